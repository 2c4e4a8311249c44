"""Gate activity over many samples: rates by unit and class, histograms, and their history."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from dg_lightning.gates.deployment import deployed_gate
from dg_lightning.gates.protocol import GateLike

__all__ = ["BINS", "GateActivity", "GateHistory", "GateSnapshot", "HistoryEntry"]

BINS = 20  # of the histogram of p over [0, 1]


@dataclass(frozen=True)
class GateSnapshot:
    """Activity of one gate over the samples of one snapshot, with one entry per block."""

    layer: str
    block_size: int
    g: Tensor  # (blocks,), share of samples that open the block
    p: Tensor  # (blocks,), mean probability
    histogram: Tensor  # (BINS,), share of all p
    by_class: Tensor | None  # (classes, blocks), g by class; NaN if a class is unseen
    temperature: float
    threshold: float
    by_position: Tensor | None = None  # (positions,), g by position in a sequence

    @property
    def dead_units(self) -> int:
        """Number of units that no sample opened."""
        return int((self.g == 0).sum()) * self.block_size


class GateActivity(Metric):
    """Accumulates gate activity over batches and processes.

    Args:
        gates: The gates, by name.
        num_classes: Number of classes for rates by class; 0 for none.
        positions: Length of a sequence for rates by position; 0 for none.
        **kwargs: Arguments of `torchmetrics.Metric`.

    >>> from dg_lightning import StaticGate
    >>> gate = StaticGate(4).eval()
    >>> _ = gate(torch.randn(3, 4))
    >>> activity = GateActivity({"gate": gate}, num_classes=2)
    >>> activity.update(samples=3, target=torch.tensor([0, 1, 1]))
    >>> activity.snapshots()[0].g
    tensor([1., 1., 1., 1.])
    """

    full_state_update = False
    classes: Tensor  # (classes,), samples
    rows: Tensor  # (gates,)
    opened: Tensor  # (blocks of all gates,)
    probability: Tensor  # (blocks of all gates,)
    histogram: Tensor  # (gates, BINS)
    by_class: Tensor  # (classes, blocks of all gates)
    by_position: Tensor  # (gates, positions)

    def __init__(
        self,
        gates: dict[str, GateLike],
        num_classes: int = 0,
        positions: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.gates = gates
        self.num_classes, self.positions = num_classes, positions
        self.varies = False
        self.sizes = [gate.units // gate.block_size for gate in gates.values()]
        blocks = sum(self.sizes)
        sums = {
            "rows": torch.zeros(len(gates), dtype=torch.int64),
            "opened": torch.zeros(blocks, dtype=torch.int64),
            "probability": torch.zeros(blocks),
            "histogram": torch.zeros(len(gates), BINS),
            "classes": torch.zeros(num_classes, dtype=torch.int64),
            "by_class": torch.zeros(num_classes, blocks),
            "by_position": torch.zeros(len(gates), positions),
        }
        for name, zero in sums.items():
            self.add_state(name, zero, dist_reduce_fx="sum")

    @override
    @torch.no_grad()
    def update(self, samples: int, target: Tensor | None = None, training: bool = False) -> None:
        """Add the last forward pass of the gates.

        Args:
            samples: Number of samples in the batch; the weight of a static gate.
            target: Class of each sample, or of each token, for rates by class.
            training: Whether it was a training pass, where gates may be soft or sampled. If so,
                the gates that would be deployed are counted.
        """
        opened, probability, histogram, rows, by_class = [], [], [], [], []
        labels = None
        if self.num_classes and target is not None:
            # `one_hot` would reject ignored labels such as -100.
            classes = torch.arange(self.num_classes, device=target.device)
            labels = (target.unsqueeze(-1) == classes).float()
            self.classes += labels.sum(0).long()
        for index, (name, gate) in enumerate(self.gates.items()):
            if gate.gate is None or gate.probability is None:
                raise RuntimeError(
                    f"Gate {name!r} took no part in the forward pass: let the net use it, or name "
                    "the other gates with `layers`."
                )
            mask = deployed_gate(gate) if training else gate.gate.detach() != 0
            is_open = mask.float().reshape(-1, mask.shape[-1])
            p = gate.probability.detach().float().reshape(is_open.shape)
            weight = samples if len(is_open) == 1 else 1  # a static gate has a single row
            rows.append(len(is_open) * weight)
            opened.append(is_open.sum(0) * weight)
            probability.append(p.sum(0) * weight)
            histogram.append(torch.histc(p, BINS, 0.0, 1.0) * weight)
            if labels is not None:
                by_class.append(_by_class(labels, is_open))
            if self.positions and gate.input_dependent:
                # Sequences of different lengths have no common positions.
                self.varies = self.varies or mask.shape[1:-1] != (self.positions,)
                if not self.varies:
                    self.by_position[index] += mask.float().mean(-1).sum(0)
        self.rows += torch.tensor(rows).to(self.rows.device, non_blocking=True)
        self.opened += torch.cat(opened).long()
        self.probability += torch.cat(probability)
        self.histogram += torch.stack(histogram)
        if by_class:
            self.by_class += torch.cat(by_class, -1)

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return the sums on the CPU."""
        names = ("rows", "opened", "probability", "histogram", "classes", "by_class", "by_position")
        return {name: getattr(self, name).cpu() for name in names}

    def snapshots(self) -> list[GateSnapshot]:
        """Return one snapshot per gate, reduced over all processes."""
        if not self.update_called:
            return []
        sums = self.compute()
        # torchmetrics squeezes tensors with one element.
        rows = sums["rows"].reshape(-1).double()
        by_block = {k: sums[k].reshape(-1).split(self.sizes) for k in ("opened", "probability")}
        histogram = sums["histogram"].reshape(-1, BINS).double()
        classes = sums["classes"].reshape(-1, 1).double()
        by_class = sums["by_class"].reshape(self.num_classes, sum(self.sizes))
        class_counts = by_class.split(self.sizes, -1)
        has_labels = bool(classes.any())
        by_position = sums["by_position"].reshape(len(self.gates), self.positions).double()
        snapshots = []
        for index, (name, gate) in enumerate(self.gates.items()):
            by_label = class_counts[index].double() / classes
            snapshots.append(
                GateSnapshot(
                    layer=name,
                    block_size=gate.block_size,
                    g=(by_block["opened"][index].double() / rows[index]).float(),
                    p=(by_block["probability"][index].double() / rows[index]).float(),
                    histogram=(histogram[index] / histogram[index].sum()).float(),
                    # A static gate treats all classes alike.
                    by_class=by_label.float() if has_labels and gate.input_dependent else None,
                    temperature=float(gate.temperature),
                    threshold=float(gate.threshold),
                    by_position=(by_position[index] * self.positions / rows[index]).float()
                    if self.positions and gate.input_dependent and not self.varies
                    else None,
                )
            )
        return snapshots


def _by_class(labels: Tensor, is_open: Tensor) -> Tensor:
    """Count by class the samples that open a block, averaged over the positions of a sequence."""
    if len(is_open) % len(labels):  # a static gate, or rows that are not samples
        return labels.sum(0).unsqueeze(-1) * is_open.mean(0)
    # Flattened from (batch, positions, blocks), or (batch, blocks).
    return labels.T @ is_open.reshape(len(labels), -1, is_open.shape[-1]).mean(1)


@dataclass(frozen=True)
class HistoryEntry:
    """A snapshot as kept in the history, by layer."""

    epoch: int
    step: int
    g: dict[str, Tensor]
    p: dict[str, Tensor]
    histogram: dict[str, Tensor]

    @classmethod
    def from_gates(cls, epoch: int, step: int, gates: Sequence[GateSnapshot]) -> "HistoryEntry":
        """Create an entry from the snapshots of all gates."""
        parts = [{gate.layer: getattr(gate, k) for gate in gates} for k in ("g", "p", "histogram")]
        return cls(epoch, step, *parts)


class GateHistory:
    """Snapshots of a training run; every second one is dropped when `max_entries` is exceeded.

    >>> history = GateHistory(max_entries=4)
    >>> for epoch in range(9):
    ...     _ = history.add(HistoryEntry.from_gates(epoch, epoch, []))
    >>> [entry.epoch for entry in history.entries]
    [0, 4, 8]
    """

    def __init__(self, max_entries: int = 100) -> None:
        self.max_entries = max_entries
        self.entries: list[HistoryEntry] = []
        self.last: HistoryEntry | None = None
        self._seen = 0
        self._stride = 1

    def add(self, entry: HistoryEntry) -> Literal["kept", "thinned", "skipped"]:
        """Add an entry; return whether it was kept, others were dropped too, or it was skipped."""
        self.last = entry
        self._seen += 1
        if (self._seen - 1) % self._stride:
            return "skipped"
        self.entries.append(entry)
        if len(self.entries) <= self.max_entries:
            return "kept"
        self.entries = self.entries[::2]
        self._stride *= 2
        return "thinned"

    def churn(self, gate: GateSnapshot) -> float | None:
        """Return the mean change of g since the last entry, or None if there is none.

        For a static gate, this is the share of units that opened or closed.
        """
        before = None if self.last is None else self.last.g.get(gate.layer)
        if before is None or before.shape != gate.g.shape:
            return None
        return (gate.g - before).abs().mean().item()

    def entries_with_last(self) -> list[HistoryEntry]:
        """Return the kept entries and the last one, whether kept or not."""
        if self.last is None or (self.entries and self.entries[-1] is self.last):
            return list(self.entries)
        return [*self.entries, self.last]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values and tensors."""
        entries, kept = [vars(entry) for entry in self.entries_with_last()], len(self.entries)
        return {"looks": entries, "kept": kept, "seen": self._seen, "every": self._stride}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        entries = [HistoryEntry(**entry) for entry in state["looks"]]
        self.entries, self.last = entries[: state["kept"]], entries[-1] if entries else None
        self._seen, self._stride = state["seen"], state["every"]
