"""What gates do over many samples: shares by unit and by class, histograms, and their history."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from dg_lightning.deployed import deployed_gate
from dg_lightning.protocol import GateLike

__all__ = ["BINS", "GateActivity", "GateHistory", "GateLook", "LookBack"]

BINS = 20  # of the histogram of p, between 0 and 1


@dataclass(frozen=True)
class GateLook:
    """One gate over the samples of one look; an entry a block of units."""

    layer: str
    block_size: int
    g: Tensor  # (blocks,), share of samples that open it
    p: Tensor  # (blocks,), mean
    histogram: Tensor  # (BINS,), share of all p
    by_class: Tensor | None  # (classes, blocks), share of a class that opens it; NaN if unseen
    temperature: float
    threshold: float

    @property
    def dead_units(self) -> int:
        """Units that no sample opened."""
        return int((self.g == 0).sum()) * self.block_size


class GateActivity(Metric):
    """Counts what gates do over batches and processes, with the gates of a forward pass.

    Args:
        gates: The gates, by name.
        num_classes: How many classes samples are told apart by; 0 leaves that out.
        **kwargs: Arguments of `torchmetrics.Metric`.

    >>> from dg_lightning import StaticGate
    >>> gate = StaticGate(4).eval()
    >>> _ = gate(torch.randn(3, 4))
    >>> activity = GateActivity({"gate": gate}, num_classes=2)
    >>> activity.update(samples=3, target=torch.tensor([0, 1, 1]))
    >>> activity.looks()[0].g
    tensor([1., 1., 1., 1.])
    """

    full_state_update = False
    classes: Tensor  # (classes,), samples
    rows: Tensor  # (gates,)
    opened: Tensor  # (blocks of all gates,)
    probability: Tensor  # (blocks of all gates,)
    histogram: Tensor  # (gates, BINS)
    by_class: Tensor  # (classes, blocks of all gates)

    def __init__(self, gates: dict[str, GateLike], num_classes: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.gates = gates
        self.num_classes = num_classes
        self.sizes = [gate.units // gate.block_size for gate in gates.values()]
        blocks = sum(self.sizes)
        sums = {
            "rows": torch.zeros(len(gates), dtype=torch.int64),
            "opened": torch.zeros(blocks, dtype=torch.int64),
            "probability": torch.zeros(blocks),
            "histogram": torch.zeros(len(gates), BINS),
            "classes": torch.zeros(num_classes, dtype=torch.int64),
            "by_class": torch.zeros(num_classes, blocks),
        }
        for name, zero in sums.items():
            self.add_state(name, zero, dist_reduce_fx="sum")

    @override
    @torch.no_grad()
    def update(self, samples: int, target: Tensor | None = None, training: bool = False) -> None:
        """Add the last forward pass of the gates, which was over so many samples.

        Args:
            samples: How many; where a gate is the same for all, it counts that often.
            target: Class of each sample; needed where classes are told apart.
            training: Whether it was one of training, where gates may be soft or drawn: what they
                would decide when deployed is counted.
        """
        opened, probability, histogram, rows, by_class = [], [], [], [], []
        labels = None
        if self.num_classes and target is not None:
            # Not `one_hot`: a label may stand for none of the classes, as -100 does.
            classes = torch.arange(self.num_classes, device=target.device)
            labels = (target.unsqueeze(-1) == classes).float()
            self.classes += labels.sum(0).long()
        for name, gate in self.gates.items():
            if gate.gate is None or gate.probability is None:
                raise RuntimeError(
                    f"Gate {name!r} took no part in the forward pass: let the net use it, or name "
                    "the other gates with `layers`."
                )
            decided = deployed_gate(gate) if training else gate.gate.detach() != 0
            is_open = decided.float().reshape(-1, decided.shape[-1])
            p = gate.probability.detach().float().reshape(is_open.shape)
            times = samples if len(is_open) == 1 else 1  # a static gate is one row for all samples
            rows.append(len(is_open) * times)
            opened.append(is_open.sum(0) * times)
            probability.append(p.sum(0) * times)
            histogram.append(torch.histc(p, BINS, 0.0, 1.0) * times)
            if labels is not None:
                by_class.append(_by_class(labels, is_open))
        self.rows += torch.tensor(rows).to(self.rows.device, non_blocking=True)
        self.opened += torch.cat(opened).long()
        self.probability += torch.cat(probability)
        self.histogram += torch.stack(histogram)
        if by_class:
            self.by_class += torch.cat(by_class, -1)

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return the sums, on the host."""
        names = ("rows", "opened", "probability", "histogram", "classes", "by_class")
        return {name: getattr(self, name).cpu() for name in names}

    def looks(self) -> list[GateLook]:
        """Return what was seen, reduced over all processes, a gate an entry."""
        if not self._update_count:
            return []
        found = self.compute()
        # A metric squeezes what has one element.
        rows = found["rows"].reshape(-1).double()
        by_block = {k: found[k].reshape(-1).split(self.sizes) for k in ("opened", "probability")}
        histogram = found["histogram"].reshape(-1, BINS).double()
        classes = found["classes"].reshape(-1, 1).double()
        by_class = found["by_class"].reshape(self.num_classes, sum(self.sizes))
        by_class_of = by_class.split(self.sizes, -1)
        seen = bool(classes.any())
        looks = []
        for index, (name, gate) in enumerate(self.gates.items()):
            by_label = by_class_of[index].double() / classes
            looks.append(
                GateLook(
                    layer=name,
                    block_size=gate.block_size,
                    g=(by_block["opened"][index].double() / rows[index]).float(),
                    p=(by_block["probability"][index].double() / rows[index]).float(),
                    histogram=(histogram[index] / histogram[index].sum()).float(),
                    # A static gate has nothing to tell classes apart by.
                    by_class=by_label.float() if seen and gate.input_dependent else None,
                    temperature=float(gate.temperature),
                    threshold=float(gate.threshold),
                )
            )
        return looks


def _by_class(labels: Tensor, is_open: Tensor) -> Tensor:
    """Count by class how many samples open a block; positions of a sequence count as a mean."""
    if len(is_open) % len(labels):  # one row for all samples, or rows that are no samples
        return labels.sum(0).unsqueeze(-1) * is_open.mean(0)
    # Flattened from (batch, positions, blocks), or (batch, blocks).
    return labels.T @ is_open.reshape(len(labels), -1, is_open.shape[-1]).mean(1)


@dataclass(frozen=True)
class LookBack:
    """What is kept of a look, by layer."""

    epoch: int
    step: int
    g: dict[str, Tensor]
    p: dict[str, Tensor]
    histogram: dict[str, Tensor]

    @classmethod
    def of(cls, epoch: int, step: int, looks: Sequence[GateLook]) -> "LookBack":
        """Keep a look."""
        parts = [{look.layer: getattr(look, k) for look in looks} for k in ("g", "p", "histogram")]
        return cls(epoch, step, *parts)


class GateHistory:
    """The looks of a training, at most so many: when it is full, every second one is let go.

    >>> history = GateHistory(most=4)
    >>> for epoch in range(9):
    ...     _ = history.add(LookBack.of(epoch, epoch, []))
    >>> [look.epoch for look in history.looks]
    [0, 4, 8]
    """

    def __init__(self, most: int = 100) -> None:
        self.most = most
        self.looks: list[LookBack] = []
        self.last: LookBack | None = None
        self._seen = 0
        self._every = 1

    def add(self, look: LookBack) -> Literal["kept", "thinned", "passed"]:
        """Take in a look; tell whether it is kept, and whether others were let go for it."""
        self.last = look
        self._seen += 1
        if (self._seen - 1) % self._every:
            return "passed"
        self.looks.append(look)
        if len(self.looks) <= self.most:
            return "kept"
        self.looks = self.looks[::2]
        self._every *= 2
        return "thinned"

    def churn(self, look: GateLook) -> float | None:
        """Return how far the units of a gate moved since the last look: mean change of g.

        Of a static gate it is the share of units that have opened or closed.
        """
        before = None if self.last is None else self.last.g.get(look.layer)
        if before is None or before.shape != look.g.shape:
            return None
        return (look.g - before).abs().mean().item()

    def shown(self) -> list[LookBack]:
        """Return what is kept, and the last look in any case."""
        if self.last is None or (self.looks and self.looks[-1] is self.last):
            return list(self.looks)
        return [*self.looks, self.last]

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs, as plain values and tensors."""
        shown = [vars(look) for look in self.shown()]
        return {"looks": shown, "kept": len(self.looks), "seen": self._seen, "every": self._every}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        shown = [LookBack(**look) for look in state["looks"]]
        self.looks, self.last = shown[: state["kept"]], shown[-1] if shown else None
        self._seen, self._every = state["seen"], state["every"]
