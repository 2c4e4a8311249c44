"""What RigL and SET share: when connections are dropped, and how many."""

from typing import Literal

from torch import Tensor
from typing_extensions import override

from dg_lightning.rewiring import Connections, Distribution, rewired
from dg_lightning.schedules import Clock, Duration, Schedule, check_duration

from ._masked_layers import Initial
from ._sparse import LOOK_AHEAD, Sparse

__all__ = ["DropShape", "Rewiring"]

DropShape = Literal["cosine", "linear", "constant"]


class Rewiring(Sparse):
    """Drops the smallest weights every so many steps, and grows as many connections elsewhere."""

    def __init__(
        self,
        sparsity: float | dict[str, float] = 0.9,
        distribution: Distribution = "erk",
        layers: list[str] | None = None,
        structure: str = "unstructured",
        every_n_steps: int = 100,
        drop_fraction: float = 0.3,
        drop_shape: DropShape = "cosine",
        until: Duration = 0.75,
        exclude_just_dropped: bool = False,
        initial: Initial = "random",
        masks: str | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(sparsity, distribution, layers, structure, initial, masks, seed)
        if every_n_steps < 1:
            raise ValueError(f"`every_n_steps` must be at least 1, got {every_n_steps}.")
        if not 0 < drop_fraction <= 1:
            raise ValueError(f"`drop_fraction` must be in (0, 1], got {drop_fraction}.")
        if drop_shape not in ("cosine", "linear", "constant"):
            raise ValueError(
                f"`drop_shape` must be cosine, linear or constant, got {drop_shape!r}."
            )
        check_duration("until", until)
        self.every_n_steps = every_n_steps
        self.drop_fraction = drop_fraction
        self.drop_shape: DropShape = drop_shape
        self.until = until
        self.exclude_just_dropped = exclude_just_dropped

    @override
    def prepare(self, clock: Clock) -> str | None:
        self._until = clock.steps(self.until)
        end = self.drop_fraction if self.drop_shape == "constant" else 0.0
        shape = "linear" if self.drop_shape == "constant" else self.drop_shape
        schedule = Schedule(self.drop_fraction, end, shape, until=max(self._until, 1))
        self._fraction_at = schedule.resolve(clock)
        if self._until > self.every_n_steps:
            return None
        return (
            f"{type(self).__name__} never rewires: its interval is {self.every_n_steps} steps, and "
            f"it stops before step {self._until} of {clock.total_steps}; lower `every_n_steps` or "
            "raise `until`."
        )

    @override
    def changes_after(self, step: int, last: int) -> bool:
        due = step // self.every_n_steps > last // self.every_n_steps
        return due and step < self._until

    @override
    def next_change(self) -> int:
        if type(self).changes_after is not Rewiring.changes_after:
            return super().next_change()
        longest_ago = min(c.changed_at for c in self.connections.values())
        due = max(self._step + 1, self.every_n_steps * (longest_ago // self.every_n_steps + 1))
        furthest = self._step + LOOK_AHEAD
        return min(due, furthest) if due < self._until else furthest

    def keep_scores(self, c: Connections) -> Tensor:
        """Return what is kept of a layer: the largest weights."""
        weight = c.weight.detach()
        # Of its scores `rewire` looks at the size; somebody's own may count on scores above 0.
        return weight if type(self).rewire is Rewiring.rewire else weight.abs()

    def rewire(self, step: int, c: Connections, keep: Tensor, grow: Tensor) -> Tensor:
        """Return the new mask of a layer, from the sizes of scores for keeping and for growing.

        If some are not finite, `only_if` is unset.
        """
        if c.full:
            return c.mask
        return rewired(
            c.mask,
            keep,
            grow,
            self._fraction_at(step),
            c.structure,
            self.exclude_just_dropped,
            by_size=True,
            total=c.count // c.structure.block**2,
            finite=self.only_if,
        )
