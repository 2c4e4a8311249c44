"""Snapshot of a module's gates over a validation, a test, or the logged steps of an epoch."""

from collections.abc import Iterable
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from dg_lightning.compute.metric import ComputeLedger
from dg_lightning.compute.whole_net import CountWholeNet, WholeNet
from dg_lightning.gates.protocol import GateLike, gate_layers
from dg_lightning.monitoring.activity import GateActivity, GateHistory, GateSnapshot
from dg_lightning.monitoring.routing import ActivityCorrelation

__all__ = ["Snapshot"]

_MAX_CLASSES = 2048  # more, as of a large vocabulary, are not told apart


class Snapshot:
    """Accumulates gate activity over forward passes.

    Args:
        gates: The gates, by name.
        training: Whether they are training passes, where gates may be soft or sampled.
    """

    def __init__(self, gates: dict[str, GateLike], training: bool = False) -> None:
        self.gates = gates
        self.training = training
        self.activity: GateActivity | None = None
        self.correlation: ActivityCorrelation | None = None
        self.ledger: ComputeLedger | None = None
        self.whole_net: WholeNet | None = None
        self._count: CountWholeNet | None = None
        self.results: list[GateSnapshot] = []

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 if there are no rates by class."""
        return 0 if self.activity is None else self.activity.num_classes

    def start_counting(self, pl_module: Any) -> None:
        """Count the MACs of the first forward pass, if the module does not log them itself."""
        if self.activity is None and not hasattr(pl_module, "compute_report"):
            self._count = CountWholeNet(pl_module)
            self._count.__enter__()

    def stop_counting(self, samples: int = 1) -> None:
        """Stop counting MACs."""
        if self._count is not None:
            self._count.__exit__(None, None, None)
            self.whole_net, self._count = self._count.result(samples), None

    @torch.no_grad()
    def update(self, pl_module: Any, batch: Any, outputs: Any = None) -> None:
        """Add the last forward pass, over this batch."""
        samples = _samples(batch)
        self.stop_counting(samples)
        target, logits = _target(batch), None if self.training else _logits(outputs)
        if self.activity is None:
            by_class = target is not None and any(g.input_dependent for g in self.gates.values())
            classes = _num_classes(pl_module, logits) if by_class else 0
            classes = classes if classes <= _MAX_CLASSES else 0
            activity = GateActivity(self.gates, classes, _positions(self.gates.values()))
            self.activity = activity.to(pl_module.device)
            all_ran = all(g.gate is not None for g in gate_layers(pl_module).values())
            if all_ran and not self.training and not hasattr(pl_module, "compute_report"):
                self.ledger = ComputeLedger(pl_module).to(pl_module.device)
        self.activity.update(samples, target if self.num_classes else None, self.training)
        if self.ledger is not None:
            self.ledger.update(pl_module, samples)
        if logits is not None:
            self._correlate(pl_module, logits)

    def _correlate(self, pl_module: Any, logits: Tensor) -> None:
        gates = [gate for gate in self.gates.values() if gate.input_dependent]
        masks: list[Any] = [gate.gate for gate in gates]
        if logits.shape[-1] < 2 or not masks:  # one number says nothing about hardness
            return
        if any(mask.shape[:-1] != logits.shape[:-1] for mask in masks):
            return
        if self.correlation is None:
            self.correlation = ActivityCorrelation().to(pl_module.device)
        hardness = 1 - logits.detach().float().softmax(-1).amax(-1)
        opened = torch.zeros_like(hardness)
        for mask, gate in zip(masks, gates, strict=True):
            opened += (mask != 0).float().mean(-1) * gate.units
        shares = opened / sum(gate.units for gate in gates)
        self.correlation.update(hardness.flatten(), shares.flatten())

    def compute(self) -> None:
        """Reduce over all processes and set `results`."""
        if self.activity is not None:
            self.results = self.activity.snapshots()

    def layer_rows(self, epoch: int, step: int, history: GateHistory) -> list[dict[str, Any]]:
        """Return the rows of `layers.csv`."""
        return [
            {
                "epoch": epoch,
                "step": step,
                "layer": gate.layer,
                "open_rate_g": gate.g.mean().item(),
                "open_rate_p": gate.p.mean().item(),
                "churn": history.churn(gate),
                "dead_units": gate.dead_units,
                "temperature": gate.temperature,
                "threshold": gate.threshold,
            }
            for gate in self.results
        ]

    def totals(self, pl_module: Any) -> dict[str, float]:
        """Return the totals over all gates, by logged key."""
        units = [gate.units for gate in self.gates.values()]
        opened = sum(n * gate.g.mean().item() for n, gate in zip(units, self.results, strict=True))
        totals = {"gates/open_rate": opened / sum(units)}
        if self.correlation is not None:
            values = self.correlation.compute()
            # The correlation is NaN if the activity is constant.
            totals |= {f"gates/{k}": v.item() for k, v in values.items() if v.isfinite()}
        if self.ledger is not None:
            totals |= self.ledger.report(pl_module, self.whole_net).metrics()
        return totals


def _target(batch: Any) -> Tensor | None:
    """Return the labels if the second item of the batch is a vector of integers.

    If it is a table of the tokens that follow those of the first item, the class of a token is the
    token itself.
    """
    x, target = batch[:2] if isinstance(batch, (tuple, list)) and len(batch) > 1 else (None, None)
    if not isinstance(target, Tensor) or target.is_floating_point():
        return None
    if target.ndim == 1:
        return target
    is_text = isinstance(x, Tensor) and target.ndim == 2 and x.shape == target.shape
    return x.flatten() if is_text and torch.equal(x[:, 1:], target[:, :-1]) else None


def _positions(gates: Iterable[GateLike]) -> int:
    """Return the length of a sequence if gates decide by position; 0 if not."""
    masks = [gate.gate for gate in gates if gate.gate is not None]
    lengths = {mask.shape[1] if mask.ndim == 3 else 0 for mask in masks if mask.ndim > 1}
    return lengths.pop() if len(lengths) == 1 else 0


def _logits(outputs: Any) -> Tensor | None:
    logits = outputs.get("logits") if isinstance(outputs, dict) else outputs
    return logits if isinstance(logits, Tensor) and logits.ndim in (2, 3) else None


def _num_classes(pl_module: Any, logits: Tensor | None) -> int:
    if logits is not None:
        return logits.shape[-1] if logits.shape[-1] > 1 else 0  # one logit is not a class
    data = getattr(pl_module.trainer, "datamodule", None)
    return int(getattr(pl_module, "num_classes", None) or getattr(data, "num_classes", None) or 0)


def _samples(batch: Any) -> int:
    sizes: list[int] = []
    apply_to_collection(batch, Tensor, lambda leaf: sizes.append(len(leaf)) if leaf.ndim else None)
    return sizes[0] if sizes else 1
