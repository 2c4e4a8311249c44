"""Drift of the inputs, seen by what gates open: no labels are needed."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from dg_lightning.gates import gate_layers
from dg_lightning.gates.deployment import deployed_gate

__all__ = ["DriftDetector", "DriftReport", "OpenCounts", "Opened", "opened_in"]

_BEYOND_CHANCE = 1e-3
_LEAST_VARIANCE = 2.0
_COUNTS = ("samples", "sums", "squares", "products")


class Opened(NamedTuple):
    """How often samples opened the blocks of a gate, by the class that they were taken for."""

    samples: Tensor  # (classes,)
    sums: Tensor  # (classes, blocks), of shares of a sample's positions
    squares: Tensor  # (classes, blocks)
    independent: Tensor  # how many independent blocks would vary as much together


class OpenCounts(Metric):
    """Counts how often samples open the blocks of a gate.

    Args:
        classes: Number of classes.
        blocks: Number of blocks.
        **options: Arguments of `torchmetrics.Metric`.

    >>> counts = OpenCounts(2, 3)
    >>> counts.update(torch.tensor([[1, 0, 0], [1, 1, 0]]).double(), torch.tensor([0, 1]))
    >>> counts.opened().sums.tolist()
    [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    """

    full_state_update = False
    samples: Tensor
    sums: Tensor
    squares: Tensor
    products: Tensor

    def __init__(self, classes: int, blocks: int, **options: Any) -> None:
        super().__init__(**options)
        by_class = (classes, blocks)
        self.shapes = [(classes,), by_class, by_class, (blocks, blocks)]
        for name, shape in zip(_COUNTS, self.shapes, strict=True):
            zeros = torch.zeros(shape, dtype=torch.float64)
            self.add_state(name, zeros, dist_reduce_fx="sum")

    @override
    def update(self, opened: Tensor, classes: Tensor) -> None:
        """Count samples: the share of positions that open each block, and their classes."""
        self.samples.index_add_(0, classes, torch.ones_like(classes, dtype=torch.float64))
        self.sums.index_add_(0, classes, opened)
        self.squares.index_add_(0, classes, opened.square())
        self.products += opened.T @ opened

    @override
    def compute(self) -> list[Tensor]:
        """Return the counts so far, of all processes."""
        return [getattr(self, name).clone() for name in _COUNTS]

    def opened(self) -> Opened:
        """Return what reports compare, of all processes."""
        # Of a single value, a metric returns a number.
        pairs = zip(self.compute(), self.shapes, strict=True)
        samples, sums, squares, products = (found.reshape(shape) for found, shape in pairs)
        within = products - (sums / samples.clamp(min=1).unsqueeze(1)).T @ sums  # classes
        scale = within.diagonal().clamp(min=1e-9).rsqrt()
        related = (within * scale * scale.unsqueeze(1)).square().fill_diagonal_(1.0)
        return Opened(samples, sums, squares, len(related) ** 2 / related.sum())


@dataclass(frozen=True)
class DriftReport:
    """What a detector says about some samples.

    Args:
        samples: How many there were.
        by_layer: By gate, the mean square of how far open rates lie from those of the reference,
            in standard errors: about 1 without drift. NaN if there are too few samples to tell.
        by_class: The same by class, over all gates, for the classes that can be compared.
        p: Probability of rates so far off without drift: of the gate that is farthest off, times
            the number of gates. NaN if there are too few samples to tell.
    """

    samples: int
    by_layer: dict[str, float]
    by_class: dict[int, float]
    p: float

    @property
    def has_drifted(self) -> bool:
        """Whether that is beyond chance."""
        return self.p < _BEYOND_CHANCE

    def __str__(self) -> str:
        start = f"Open rates of {self.samples:,} sample{'s' * (self.samples != 1)}: "
        if math.isnan(self.p):
            return start + "too few to tell, of the classes that the reference has"
        scores = {name: score for name, score in self.by_layer.items() if not math.isnan(score)}
        most = max(scores, key=lambda name: scores[name])
        verdict = "the inputs have drifted" if self.has_drifted else "no drift is seen"
        return (
            f"{start}{verdict} (p = {self.p:.2g}; in {most} they are {scores[most]:.1f} times as "
            "far off as chance would have them)"
        )


class DriftDetector:
    """Compares how often units open with a reference, as the validation part of the training.

    Rates are compared by unit, among samples that the model takes for the same class, so another
    mixture of classes is no drift. Only gates that depend on the input can tell.

    Args:
        model: The model. If it returns class logits ``(samples, classes)``, rates are compared by
            class.

    >>> from dg_lightning import GatedMLP
    >>> _ = torch.manual_seed(0)
    >>> gate = {"kind": "dynamic", "initial_open_rate": 0.6, "initial_spread": 1.0}
    >>> net = GatedMLP(8, [16], 2, gate=gate)
    >>> detector = DriftDetector(net)
    >>> detector.learn([torch.randn(500, 8)])
    >>> detector.compare([torch.randn(100, 8)]).has_drifted
    False
    >>> detector.compare([torch.randn(100, 8) + 1]).has_drifted
    True
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        found = gate_layers(model)
        self.gates = {name: gate for name, gate in found.items() if gate.input_dependent}
        if not self.gates:
            raise ValueError(
                "Only gates that depend on the input tell of drift, and there are none: use "
                "`kind: dynamic`."
            )
        self.reference: dict[str, Opened] = {}  # by gate; anything may keep it and set it again

    def learn(self, batches: Iterable[Any]) -> None:
        """Take batches for the reference: inputs, or tuples that begin with them."""
        self.reference = {}
        self.reference = opened_in(self._count(batches))

    def compare(self, batches: Iterable[Any]) -> DriftReport:
        """Say whether batches are like the reference."""
        return self.report(opened_in(self._count(batches)))

    @torch.no_grad()
    def _count(self, batches: Iterable[Any]) -> dict[str, OpenCounts]:
        counts: dict[str, OpenCounts] = {}
        was_training = self.model.training
        self.model.eval()
        try:
            for batch in [batches] if isinstance(batches, Tensor) else batches:
                self.forget()
                x = batch[0] if isinstance(batch, list | tuple) else batch
                self.count(counts, self.model(x))
        finally:
            self.model.train(was_training)
        if not counts:
            raise ValueError("There are no batches: give some.")
        return counts

    def forget(self) -> None:
        """Forget what gates have opened, before a pass in which some may not take part."""
        for gate in self.gates.values():
            gate.probability = gate.gate = None

    @torch.no_grad()
    def count(self, counts: dict[str, OpenCounts], output: Any) -> None:
        """Add what gates have opened in the last pass of the model, which returned `output`."""
        logits = output.detach() if isinstance(output, Tensor) and output.ndim == 2 else None
        if not counts:  # for all gates, as processes sum them together
            width = 1 if logits is None else logits.shape[1]
            for name, gate in self.gates.items():
                counts[name] = OpenCounts(width, gate.units // gate.block_size)
                self._refuse_other(name, counts[name])
        for name, gate in self.gates.items():
            if gate.probability is None:
                continue  # it took no part
            opened = deployed_gate(gate).double()
            samples = len(opened) if logits is None else len(logits)
            if samples in opened.shape[1:-1] and len(opened) != samples:
                opened = opened.transpose(0, 1)  # positions come first
            opened = opened.reshape(samples, -1, opened.shape[-1]).mean(1)
            classes = torch.zeros(samples, dtype=torch.long, device=opened.device)
            if logits is not None:
                classes = logits.argmax(1).to(opened.device)
            counts[name].to(opened.device).update(opened, classes)

    def _refuse_other(self, name: str, counts: OpenCounts) -> None:
        known = self.reference.get(name)
        if known is not None and known.sums.shape != counts.sums.shape:
            raise ValueError(
                f"The reference of {name} has {known.sums.shape[0]} classes and "
                f"{known.sums.shape[1]} blocks, got {counts.sums.shape[0]} and "
                f"{counts.sums.shape[1]}: it is of another net, or one of both was not called for "
                "class logits."
            )

    def report(self, opened: Mapping[str, Opened]) -> DriftReport:
        """Compare counts of some samples with the reference."""
        if not self.reference:
            raise ValueError("There is no reference: let it `learn` one first.")
        by_layer, samples, p = {}, 0, []
        squares: list[Tensor] = []
        for name, found in opened.items():
            known = Opened(*(tensor.to(found.sums.device) for tensor in self.reference[name]))
            if not (found.samples.any() and known.samples.any()):
                continue  # a gate that took no part
            off, spread = _difference(found, known)
            # Blocks that hardly vary in so few samples are no guide.
            told = spread.sum(0) >= _LEAST_VARIANCE
            score = (off.sum(0).square() / spread.sum(0))[told].mean()  # NaN of none
            free = known.independent * told.double().mean()
            if told.any():
                p.append(float(torch.special.gammaincc(free / 2, score * free / 2)))
            by_layer[name], samples = float(score), int(found.samples.sum())
            squares.append((off.square() / spread).masked_fill(spread == 0, torch.nan))
        if not squares:
            raise ValueError("No gate that depends on the input took part: nothing to compare.")
        by_class = torch.cat(squares, 1).nanmean(1)
        compared = by_class.isfinite().nonzero().flatten().tolist()
        return DriftReport(
            samples,
            by_layer,
            {label: float(by_class[label]) for label in compared},
            min(1.0, len(p) * min(p)) if p else math.nan,
        )


def _difference(found: Opened, known: Opened) -> tuple[Tensor, Tensor]:
    """Return by how much sums are off, by class and block, and the variance of that by chance."""
    both = (found.samples > 0) & (known.samples > 0)
    counts, sums, squares = (
        [torch.where(both, o.samples, 0).unsqueeze(1) for o in (found, known)],
        [torch.where(both.unsqueeze(1), o.sums, 0) for o in (found, known)],
        [torch.where(both.unsqueeze(1), o.squares, 0) for o in (found, known)],
    )
    n, m = counts[0], counts[1].clamp(min=1)
    total = (n + counts[1]).clamp(min=2)
    # Without drift, all samples of a class are alike.
    variance = sum(squares) / total - (sum(sums) / total).square()
    variance = variance.clamp(min=0) * total / (total - 1)
    return sums[0] - n * sums[1] / m, n * variance * (1 + n / m)


def opened_in(counts: Mapping[str, OpenCounts]) -> dict[str, Opened]:
    """Return the counts of each gate, of all processes."""
    return {name: metric.opened() for name, metric in counts.items()}
