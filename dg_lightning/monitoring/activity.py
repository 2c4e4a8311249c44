"""Gate activity by unit and class, in one snapshot and over a training run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from dg_lightning.compute.metric import ComputeLedger
from dg_lightning.compute.whole_net import FlopRecorder, WholeNet
from dg_lightning.gates.protocol import GateLike, deployed_gate, gate_layers

BINS = 20  # bins of the histogram of p over [0, 1]


@dataclass(frozen=True)
class GateSnapshot:
    """Activity of one gate over the samples of one snapshot, with one entry per block."""

    layer: str
    block_size: int
    g: Tensor  # (blocks,), share of samples that open the block
    p: Tensor  # (blocks,), mean probability
    histogram: Tensor  # (BINS,), share of all p in each bin
    by_class: Tensor | None  # (classes, blocks), g for each class; NaN if it is unseen
    temperature: float
    threshold: float
    by_position: Tensor | None = None  # (positions,), g at each position in a sequence

    @property
    def dead_units(self) -> int:
        """Number of units that no sample opened."""
        return int((self.g == 0).sum()) * self.block_size


class GateActivity(Metric):
    """Accumulates gate activity over batches and processes.

    Args:
        gates: The gates, by name.
        num_classes: Number of classes, to record rates for each class; 0 to record none.
        positions: Sequence length, to record rates at each position; 0 to record none.
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
    classes: Tensor  # (classes,), samples per class
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
        """Add the gates' last forward pass.

        Args:
            samples: Number of samples in the batch, which is the weight of a static gate.
            target: Class of each sample, or of each token, for rates by class.
            training: Whether this was a training pass, in which gates may be soft or sampled. If
                so, the hard gates that would be deployed are counted.
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
                    f"Gate {name!r} did not run in the last forward pass: use it in the net, or "
                    "exclude it with `layers`."
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
        names = (
            "rows",
            "opened",
            "probability",
            "histogram",
            "classes",
            "by_class",
            "by_position",
        )
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
    """For each class, count the samples that open a block, averaged over sequence positions."""
    if len(is_open) % len(labels):  # a static gate, or rows that are not samples
        return labels.sum(0).unsqueeze(-1) * is_open.mean(0)
    # The rows were flattened from (batch, positions, blocks) or (batch, blocks).
    return labels.T @ is_open.reshape(len(labels), -1, is_open.shape[-1]).mean(1)


@dataclass(frozen=True)
class HistoryEntry:
    """A snapshot as stored in the history, with tensors keyed by layer."""

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
    """Snapshots of a training run. Above `max_entries`, every second one is dropped.

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
        """Add an entry; return whether it was kept or skipped, or the history was thinned."""
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
        """Return the mean change in g since the last entry, or None if there is none.

        For a static gate, this is the share of units that opened or closed.
        """
        before = None if self.last is None else self.last.g.get(gate.layer)
        if before is None or before.shape != gate.g.shape:
            return None
        return (gate.g - before).abs().mean().item()

    def entries_with_last(self) -> list[HistoryEntry]:
        """Return the kept entries and the last entry, even if it was not kept."""
        if self.last is None or (self.entries and self.entries[-1] is self.last):
            return list(self.entries)
        return [*self.entries, self.last]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values and tensors."""
        entries, kept = [vars(entry) for entry in self.entries_with_last()], len(self.entries)
        return {"entries": entries, "kept": kept, "seen": self._seen, "every": self._stride}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        saved = state["entries" if "entries" in state else "looks"]  # the key in version 0.2
        entries = [HistoryEntry(**entry) for entry in saved]
        self.entries, self.last = entries[: state["kept"]], entries[-1] if entries else None
        self._seen, self._stride = state["seen"], state["every"]


def usage_entropy(counts: Tensor) -> Tensor:
    """Return the entropy of expert usage in nats; at most ``ln E``.

    >>> round(usage_entropy(torch.tensor([1, 1, 0, 0])).item(), 4)
    0.6931
    """
    share = counts.double() / counts.sum()
    return -torch.xlogy(share, share).sum()


def coefficient_of_variation(counts: Tensor) -> Tensor:
    """Return the standard deviation of expert usage over its mean; 0 if usage is uniform.

    >>> coefficient_of_variation(torch.tensor([3, 1])).item()
    0.5
    """
    counts = counts.double()
    return counts.std(correction=0) / counts.mean()


def mutual_information(joint: Tensor) -> Tensor:
    """Return the mutual information of two variables in nats, from their joint counts.

    >>> round(mutual_information(torch.tensor([[5, 0], [0, 5]])).item(), 4)
    0.6931
    """
    pairs = joint.double() / joint.sum()
    independent = pairs.sum(1, keepdim=True) * pairs.sum(0, keepdim=True)
    return (torch.xlogy(pairs, pairs) - torch.xlogy(pairs, independent)).sum()


class RoutingStatistics(Metric):
    """Accumulates expert usage by class over batches and processes.

    Args:
        experts: Number of experts.
        num_classes: Number of classes.
        **kwargs: Arguments of `torchmetrics.Metric`.

    >>> statistics = RoutingStatistics(experts=2, num_classes=2)
    >>> chosen = torch.tensor([[True, False], [False, True]])
    >>> statistics.update(chosen, chosen.float(), torch.tensor([0, 1]))
    >>> {name: round(value.item(), 3) for name, value in statistics.compute().items()}
    {'entropy': 0.693, 'cv': 0.0, 'mutual_information': 0.693}
    """

    full_state_update = False
    used: Tensor  # (experts,)
    joint: Tensor  # (experts, classes)

    def __init__(self, experts: int, num_classes: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("used", torch.zeros(experts, dtype=torch.int64), dist_reduce_fx="sum")
        joint = torch.zeros(experts, num_classes, dtype=torch.int64)
        self.add_state("joint", joint, dist_reduce_fx="sum")

    @override
    def update(self, chosen: Tensor, probability: Tensor, target: Tensor) -> None:
        """Add a batch: chosen experts (bool), router probabilities, and labels."""
        self.used += chosen.sum(0)
        pairs = probability.argmax(-1) * self.joint.shape[1] + target
        self.joint += torch.bincount(pairs, minlength=self.joint.numel()).view_as(self.joint)

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return the entropy and variation of usage, and its mutual information with classes."""
        return {
            "entropy": usage_entropy(self.used.cpu()),
            "cv": coefficient_of_variation(self.used.cpu()),
            "mutual_information": mutual_information(self.joint.cpu()),
        }


class ActivityCorrelation(Metric):
    """Correlation between hardness and activity: do harder samples open more units?

    Hardness is 1 minus the largest class probability. Activity is the share of open units.

    >>> correlation = ActivityCorrelation()
    >>> correlation.update(torch.tensor([0.1, 0.2, 0.6]), torch.tensor([0.2, 0.4, 1.2]))
    >>> round(correlation.compute()["hardness_correlation"].item(), 4)
    1.0
    """

    full_state_update = False
    samples: Tensor
    means: Tensor  # (2,): hardness, activity
    moments: Tensor  # (2, 2): sums of products of deviations

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # Stacked over processes, then merged, because sums of squares would lose small variances.
        self.add_state("samples", torch.zeros(()), dist_reduce_fx=None)
        self.add_state("means", torch.zeros(2), dist_reduce_fx=None)
        self.add_state("moments", torch.zeros(2, 2), dist_reduce_fx=None)

    @override
    def update(self, hardness: Tensor, activity: Tensor) -> None:
        """Add a batch."""
        values = torch.stack([hardness.float(), activity.float()], -1)
        means = values.mean(0)
        deviations = values - means
        batch = (self.samples.new_tensor(len(values)), means, deviations.T @ deviations)
        current = (self.samples, self.means, self.moments)
        stacked = [torch.stack(both) for both in zip(current, batch, strict=True)]
        self.samples, self.means, self.moments = _merge(*stacked)

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return the correlation (NaN if either is constant) and the mean activity."""
        samples, means, moments = _merge(
            self.samples.reshape(-1), self.means.reshape(-1, 2), self.moments.reshape(-1, 2, 2)
        )
        covariance, variances = moments[0, 1], moments.diagonal()
        # Treat variance that comes only from rounding as constant.
        constant = (variances <= 1e-10 * samples * means.square().clamp_min(1e-12)).any()
        correlation = covariance / variances.prod().sqrt()
        return {
            "hardness_correlation": torch.where(constant, torch.nan, correlation),
            "active_ratio": means[1],
        }


def _merge(samples: Tensor, means: Tensor, moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the counts, means and moments of several groups of samples."""
    total = samples.sum()
    share = (samples / total.clamp_min(1)).unsqueeze(-1)
    mean = (share * means).sum(0)
    offsets = means - mean
    between = (samples[:, None, None] * offsets.unsqueeze(-1) * offsets.unsqueeze(-2)).sum(0)
    return total, mean, moments.sum(0) + between


_MAX_CLASSES = 2048  # with more classes, as in a large vocabulary, class rates are not recorded


class Snapshot:
    """Accumulates gate activity over forward passes.

    Args:
        gates: The gates, by name.
        training: Whether these are training passes, in which gates may be soft or sampled.
    """

    def __init__(self, gates: dict[str, GateLike], training: bool = False) -> None:
        self.gates = gates
        self.training = training
        self.activity: GateActivity | None = None
        self.correlation: ActivityCorrelation | None = None
        self.ledger: ComputeLedger | None = None
        self.whole_net: WholeNet | None = None
        self._count: FlopRecorder | None = None
        self.results: list[GateSnapshot] = []

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 if class rates are not recorded."""
        return 0 if self.activity is None else self.activity.num_classes

    def start_counting(self, pl_module: Any) -> None:
        """Count the MACs of the first forward pass, if the module does not log them itself."""
        if self.activity is None and not hasattr(pl_module, "compute_report"):
            count = FlopRecorder(pl_module)
            try:
                self._count = count.__enter__()
            except RuntimeError as error:  # for example, hooks on scripted modules
                reason = " ".join(str(error).split())[:200]
                rank_zero_warn(f"The MACs of the whole net cannot be counted ({reason}).")

    def stop_counting(self, samples: int = 1) -> None:
        """Stop counting MACs."""
        if self._count is not None:
            self._count.__exit__(None, None, None)
            self.whole_net, self._count = self._count.result(samples), None

    @torch.no_grad()
    def update(self, pl_module: Any, batch: Any, outputs: Any = None) -> None:
        """Add the last forward pass, which used this batch."""
        samples = _num_samples(batch)
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
        if logits.shape[-1] < 2 or not masks:  # hardness needs at least two logits
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
        """Return the totals over all gates, keyed by logged name."""
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
    """Return the labels in a batch, or None.

    Labels are a vector of integers in the second item. If the second item contains the next tokens
    of the first, as in a language model, each token is its own class.
    """
    x, target = batch[:2] if isinstance(batch, (tuple, list)) and len(batch) > 1 else (None, None)
    if not isinstance(target, Tensor) or target.is_floating_point():
        return None
    if target.ndim == 1:
        return target
    is_text = isinstance(x, Tensor) and target.ndim == 2 and x.shape == target.shape
    return x.flatten() if is_text and torch.equal(x[:, 1:], target[:, :-1]) else None


def _positions(gates: Iterable[GateLike]) -> int:
    """Return the sequence length if gates decide at each position, otherwise 0."""
    masks = [gate.gate for gate in gates if gate.gate is not None]
    lengths = {mask.shape[1] if mask.ndim == 3 else 0 for mask in masks if mask.ndim > 1}
    return lengths.pop() if len(lengths) == 1 else 0


def _logits(outputs: Any) -> Tensor | None:
    logits = outputs.get("logits") if isinstance(outputs, dict) else outputs
    return logits if isinstance(logits, Tensor) and logits.ndim in (2, 3) else None


def _num_classes(pl_module: Any, logits: Tensor | None) -> int:
    if logits is not None:
        return logits.shape[-1] if logits.shape[-1] > 1 else 0  # a single logit has no classes
    data = getattr(pl_module.trainer, "datamodule", None)
    return int(getattr(pl_module, "num_classes", None) or getattr(data, "num_classes", None) or 0)


def _num_samples(batch: Any) -> int:
    sizes: list[int] = []
    apply_to_collection(batch, Tensor, lambda leaf: sizes.append(len(leaf)) if leaf.ndim else None)
    return sizes[0] if sizes else 1
