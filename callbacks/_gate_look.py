"""One look at the gates of a module: a validation, a test, or the logged steps of an epoch."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dg_lightning.gate_activity import GateActivity, GateHistory, GateLook
from dg_lightning.metrics import ComputeLedger
from dg_lightning.protocol import GateLike, gate_layers
from dg_lightning.routing import ActivityCorrelation
from dg_lightning.whole_net import CountWholeNet, WholeNet

__all__ = ["Look"]


class Look:
    """Takes in forward passes, and tells what the gates did in all of them.

    Args:
        gates: The gates, by name.
        training: Whether the passes are of training, where gates may be soft or drawn.
    """

    def __init__(self, gates: dict[str, GateLike], training: bool = False) -> None:
        self.gates = gates
        self.training = training
        self.activity: GateActivity | None = None
        self.correlation: ActivityCorrelation | None = None
        self.ledger: ComputeLedger | None = None
        self.whole_net: WholeNet | None = None
        self._count: CountWholeNet | None = None
        self.found: list[GateLook] = []

    @property
    def num_classes(self) -> int:
        """How many classes are told apart; 0 if labels are not known."""
        return 0 if self.activity is None else self.activity.num_classes

    def start(self, pl_module: Any) -> None:
        """Count all that the first forward pass does, for modules that do not log it themselves."""
        if self.activity is None and not hasattr(pl_module, "compute_report"):
            self._count = CountWholeNet(pl_module)
            self._count.__enter__()

    def stop(self, samples: int = 1) -> None:
        """End that count."""
        if self._count is not None:
            self._count.__exit__(None, None, None)
            self.whole_net, self._count = self._count.whole(samples), None

    @torch.no_grad()
    def add(self, pl_module: Any, batch: Any, outputs: Any = None) -> None:
        """Take in the last forward pass, of this batch."""
        samples = _samples(batch)
        self.stop(samples)
        target, logits = _target(batch), None if self.training else _logits(outputs)
        if self.activity is None:
            tells_apart = target is not None and any(g.input_dependent for g in self.gates.values())
            classes = _num_classes(pl_module, logits) if tells_apart else 0
            self.activity = GateActivity(self.gates, classes).to(pl_module.device)
            ran = all(g.gate is not None for g in gate_layers(pl_module).values())
            if ran and not self.training and not hasattr(pl_module, "compute_report"):
                self.ledger = ComputeLedger(pl_module).to(pl_module.device)
        self.activity.update(samples, target if self.num_classes else None, self.training)
        if self.ledger is not None:
            self.ledger.update(pl_module, samples)
        if logits is not None:
            self._correlate(pl_module, logits)

    def _correlate(self, pl_module: Any, logits: Tensor) -> None:
        gates = [gate for gate in self.gates.values() if gate.input_dependent]
        masks: list[Any] = [gate.gate for gate in gates]
        if not masks or any(mask.shape[:-1] != logits.shape[:-1] for mask in masks):
            return
        if self.correlation is None:
            self.correlation = ActivityCorrelation().to(pl_module.device)
        hardness = 1 - logits.detach().float().softmax(-1).amax(-1)
        opened = torch.zeros_like(hardness)
        for mask, gate in zip(masks, gates, strict=True):
            opened += (mask != 0).float().mean(-1) * gate.units
        self.correlation.update(hardness, opened / sum(gate.units for gate in gates))

    def end(self) -> None:
        """Add up what was seen, over all processes."""
        if self.activity is not None:
            self.found = self.activity.looks()

    def rows(self, epoch: int, step: int, history: GateHistory) -> list[dict[str, Any]]:
        """Return the rows of `layers.csv`."""
        return [
            {
                "epoch": epoch,
                "step": step,
                "layer": look.layer,
                "open_rate_g": look.g.mean().item(),
                "open_rate_p": look.p.mean().item(),
                "churn": history.churn(look),
                "dead_units": look.dead_units,
                "temperature": look.temperature,
                "threshold": look.threshold,
            }
            for look in self.found
        ]

    def totals(self, pl_module: Any) -> dict[str, float]:
        """Return the figures of all gates together, under their logged keys."""
        units = [gate.units for gate in self.gates.values()]
        opened = sum(n * look.g.mean().item() for n, look in zip(units, self.found, strict=True))
        found = {"gates/open_rate": opened / sum(units)}
        if self.correlation is not None:
            figures = self.correlation.compute()
            # A constant activity has no correlation.
            found |= {f"gates/{k}": v.item() for k, v in figures.items() if v.isfinite()}
        if self.ledger is not None:
            found |= self.ledger.report(pl_module, self.whole_net).logged()
        return found


def _target(batch: Any) -> Tensor | None:
    """Return the class of each sample, where the second part of a batch looks like that."""
    target = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
    is_class = isinstance(target, Tensor) and target.ndim == 1 and not target.is_floating_point()
    return target if is_class else None


def _logits(outputs: Any) -> Tensor | None:
    logits = outputs.get("logits") if isinstance(outputs, dict) else outputs
    return logits if isinstance(logits, Tensor) and logits.ndim == 2 else None


def _num_classes(pl_module: Any, logits: Tensor | None) -> int:
    if logits is not None:
        return logits.shape[-1] if logits.shape[-1] > 1 else 0  # one logit is no class
    data = getattr(pl_module.trainer, "datamodule", None)
    return int(getattr(pl_module, "num_classes", None) or getattr(data, "num_classes", None) or 0)


def _samples(batch: Any) -> int:
    sizes = [len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    return sizes[0] if sizes else 1
