"""Hold one budget over a training run: the weight of its penalty, then landing exactly on it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from dg_lightning.budget.budget import GateBudget
from dg_lightning.gates.protocol import GateLike
from dg_lightning.schedules.schedule import Clock, Duration, Schedule, ValueAt


class Multiplier:
    """λ of a budget, moved by what was used; all arithmetic stays on the device.

    `pi` is a proportional-integral controller on log λ, which finds the scale of any loss;
    `dual` is gradient ascent on the Lagrangian.

    Args:
        method: The rule; λ of `shift` is never moved, as it has no penalty.
        initial: The first λ.
        highest: The largest λ.
        integral: Gain of the summed error; of `dual`, the step of λ as a multiple of `initial`.
        proportional: Gain of the change of the error.
    """

    def __init__(
        self,
        method: Literal["pi", "dual", "shift"],
        initial: float,
        highest: float,
        integral: float = 0.1,
        proportional: float = 1.0,
    ) -> None:
        self.method = method
        self.initial = initial
        self.highest = highest
        self.lowest = initial * 1e-3
        self.integral = integral
        self.proportional = proportional
        self.value = torch.tensor(initial)
        self.error = torch.tensor(0.0)

    def on(self, device: torch.device) -> Tensor:
        """Return λ on a device, where it stays: a copy in every step would wait for it."""
        if self.value.device != device:
            self.value, self.error = self.value.to(device), self.error.to(device)
        return self.value

    @torch.no_grad()
    def update(self, used: Tensor, allowed: float) -> None:
        """Raise λ where more was used than allowed, lower it where less.

        While too much is used λ never falls, however fast the error does.
        """
        value = self.on(used.device)
        error = torch.log(used.clamp_min(1e-6) / allowed).clamp(-0.5, 0.5).to(value.dtype)
        if self.method == "pi":
            step = self.integral * error + self.proportional * (error - self.error)
            step = torch.where(error > 0, step.clamp_min(0), step)
            value = (value * step.exp()).clamp(self.lowest, self.highest)
        else:
            value = (value + self.integral * self.initial * error).clamp(0, self.highest)
        # In place: a captured step reads this tensor.
        self.value.copy_(value)
        self.error.copy_(error)

    def state_dict(self) -> dict[str, float]:
        """Return λ and the last error."""
        return {"value": float(self.value), "error": float(self.error)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on where `state_dict` was taken."""
        self.value, self.error = torch.tensor(state["value"]), torch.tensor(state["error"])


_MEASUREMENTS = 200  # over a training run, where their interval is not given
_LANDING = 10  # measurements over which gates land

_TOLERANCE = 0.01  # of the budget: closer than this, a gate that has landed is left alone
ENOUGH_MEASUREMENTS = 10  # batches that a correction is based on
LEAST = 1e-6  # share that something is at least taken to use


Mean: TypeAlias = Callable[[Tensor], Tensor]  # over ranks


class Timetable(NamedTuple):
    """When a budget is pressed for and landed on, in optimizer steps."""

    progress_at: ValueAt  # how much of the way to the budget is demanded, from 0 to 1
    begin: int
    freeze_at: int
    landed: int
    interval: int  # between measurements

    @classmethod
    def resolve(
        cls, clock: Clock, begin: Duration, until: Duration, freeze_at: Duration, every: int | None
    ) -> "Timetable":
        """Resolve durations; `every` is the interval, None for 1/200 of the training run."""
        progress_at = Schedule(0.0, 1.0, "linear", begin, until).resolve(clock)
        first, freeze = clock.steps(begin, "begin"), clock.steps(freeze_at, "freeze_at")
        interval = every or max(1, (clock.total_steps or freeze) // _MEASUREMENTS)
        landed = freeze + _LANDING * interval
        if clock.total_steps is not None:
            # Two steps are left for it: gates are frozen first and land one step later, because p
            # is of before the optimizer's step.
            freeze = min(freeze, max(clock.total_steps - 2, 0))
            landed = min(landed, clock.total_steps - 1)
        return cls(progress_at, first, freeze, landed, interval)

    def landing_progress(self, step: int) -> float:
        """Return how much of the landing has passed, from 0 to 1 and beyond."""
        return (step - self.freeze_at) / max(self.landed - self.freeze_at, 1)


class FrozenGates:
    """Keeps the parameters of gates fixed, whatever an optimizer does.

    `requires_grad` and `grad` stay as they are: DDP and loss scalers rely on gradients.

    Args:
        gates: The gates.
    """

    def __init__(self, gates: Iterable[GateLike]) -> None:
        modules = [gate for gate in gates if isinstance(gate, nn.Module)]
        parameters = [parameter for gate in modules for parameter in gate.parameters()]
        self.kept = [(parameter, parameter.detach().clone()) for parameter in parameters]

    @torch.no_grad()
    def hold(self) -> None:
        """Restore the parameters."""
        for parameter, value in self.kept:
            parameter.copy_(value)


class Landing:
    """Shifts frozen gates onto their budget, a little with every measurement.

    Static gates then use it exactly. What GateNets use varies between batches and changes with the
    features that they read, so they are corrected by the mean of several batches.

    Args:
        budget: The budget.
    """

    def __init__(self, budget: GateBudget) -> None:
        self.budget = budget
        self.landed = False
        self.start: float | None = None  # what was used when gates were frozen
        self.measurements = 0
        self.used = 0.0

    def approach(self, used: Tensor, progress: float) -> float:
        """Return the shift of a measurement before the gates have landed.

        Args:
            used: The share that deployed gates use, as far as the last forward pass shows it.
            progress: How much of the landing has passed, from 0 to 1.
        """
        self.used = float(used)
        self.start = self.start or max(self.used, LEAST)
        self.landed = progress >= 1
        target = self.start * (self.budget.budget / self.start) ** min(max(progress, 0.0), 1.0)
        return self.shift_to(target, self.used)

    def correct(self, used: Tensor, measurements: int = 1) -> float:
        """Add measurements after the landing, and return the shift they ask for, mostly 0."""
        self.measurements += measurements
        self.used += (float(used) - self.used) * measurements / self.measurements
        settled = abs(self.used / self.budget.budget - 1) <= _TOLERANCE
        if settled or self.measurements < ENOUGH_MEASUREMENTS:
            return 0.0
        return self.shift_to(self.budget.budget, self.used)

    def shift_to(self, target: float, used: float) -> float:
        """Return the shift that brings what is used to the target."""
        here = float(self.budget.used())  # by the last pass, which may differ from it
        return self.budget.shift_for(target if used < LEAST else here * target / used)

    def apply(self, shift: float, mean: Mean) -> None:
        """Shift the gates, and restart the measurements.

        Args:
            shift: The shift, equal on all ranks.
            mean: Mean of a value over ranks, so that all of them record the same use.
        """
        if shift:
            self.measurements = 0
            before = float(mean(self.budget.used()))
            after = float(mean(self.budget.used(shift)))
            self.used = after if before < LEAST else self.used * after / before
            self.budget.shift(shift)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        kept = {"landed": self.landed, "measurements": self.measurements, "used": self.used}
        return kept if self.start is None else {**kept, "start": self.start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.landed, self.used = state["landed"], state["used"]
        self.start = state.get("start")
        known = "measurements" in state
        self.measurements = state["measurements" if known else "looks"]  # the name in 0.2


_MISSED = 0.05  # of the budget
_RECENT = 2  # measurements: more would lag behind gates that close, one may be of a small batch
_WORDS = {"macs": "of the dense MACs", "open_rate": "of the units open"}
_SAME_P = (
    "Many units have the same p and open together, other gates use more than is left, or "
    "connections still change: penalise longer (`begin`, `freeze_at`), or raise the gates' "
    "learning rate."
)
_ALL_CLOSED = (
    "No unit is open: raise the budget, or let some stay open (`min_open` of the gates, or the "
    "callback MinimumActivity)."
)
_OTHER_INPUTS = (
    "Training inputs differ from these (the border of random crops, dropout), or the features that "
    "GateNets read still change: gates are corrected after every validation, so let some epochs "
    "follow the landing."
)


class Regulator:
    """Brings gates to a budget by measurements of training passes, and of validation.

    GateNets may use another share of validation inputs than of training inputs, which are augmented
    and pass through dropout and gates that are drawn. What counts is validation, on all loaders
    together: before the landing training passes are multiplied by the ratio of both, after it gates
    are corrected by validation. (Lightning skips the validation of an epoch when it resumes from a
    checkpoint of the epoch's last batch; the next one corrects that.)

    Args:
        name: The pattern of its gates, "" for all.
        budget: The budget.
        multiplier: Its λ.
    """

    def __init__(self, name: str, budget: GateBudget, multiplier: Multiplier) -> None:
        self.name = name
        self.budget = budget
        self.multiplier = multiplier
        self.landing = Landing(budget)
        self.start: float | None = None  # the share in use when pressing began
        self.savings = 1.0  # what there is to save: a penalty over it gives λ one scale
        self.ratio = 1.0  # what validation uses, over what training passes use
        self.used: Tensor | None = None  # the last measurement, as deployed
        self._validates = False  # whether validation corrects gates that have landed
        self._has_warned = False
        self._recent: list[Tensor] = []  # what the last measured training passes used
        self._validation = torch.zeros(2)  # share times rows, rows
        self._largest_batch: list[Any] = []  # what gates have recorded of it
        self._most_rows = 0

    @property
    def reached(self) -> float:
        """The share that deployed gates use."""
        return self.landing.used if self.landing.landed else float(self.used or 0.0)

    def allowed(self, progress: float) -> float:
        """Return the share that may be used: it falls exponentially from what was in use."""
        start = self.start or 1.0
        return float(start * (self.budget.budget / start) ** progress)

    def begin(self, mean: Mean) -> None:
        """Note the share in use when pressing begins, once; the allowed share falls from there."""
        if self.start is not None:
            return
        self.start = max(float(self.measure(mean)), self.budget.budget)
        min_share = self.budget.min_share()
        self.savings = self.start - min_share if self.start > min_share else 1.0

    def penalty(self, usage: Tensor) -> Tensor:
        """Return the penalty on a usage."""
        return self.multiplier.on(usage.device) * usage / self.savings

    def measure(self, mean: Mean) -> Tensor:
        """Return the share that deployed gates use, by the last training pass."""
        raw = mean(self.budget.used())
        self._recent = [*self._recent[1 - _RECENT :], raw]
        self.used = raw * self.ratio
        return self.used

    def control(self, used: Tensor, progress: float, mean: Mean) -> None:
        """Move λ by a measurement, or shift gates that still learn onto what is allowed."""
        if self.multiplier.method != "shift":
            self.multiplier.update(used, self.allowed(progress))
            return
        self.begin(mean)
        self._shift(self.landing.shift_to(self.allowed(progress), float(used)), mean)

    def land(self, used: Tensor, progress: float, mean: Mean) -> None:
        """Shift frozen gates after a measurement, mostly by nothing once they have landed."""
        if not self.landing.landed:
            self._shift(self.landing.approach(used, progress), mean)
        elif not self._validates:
            self._shift(self.landing.correct(used), mean)

    def _shift(self, shift: float, mean: Mean) -> None:
        own = torch.tensor(shift, device=self.budget.device)
        self.landing.apply(float(mean(own)), mean)  # on all ranks alike

    def start_validation(self) -> None:
        """Forget the last validation."""
        self._validation = torch.zeros(2, dtype=torch.float64, device=self.budget.device)
        self._largest_batch, self._most_rows = [], 0

    def add_validation_batch(self) -> None:
        """Add what the last validation batch used."""
        recorded = [(gate.probability, gate.gate) for gate in self.budget.all_gates]
        rows = max(g.shape[:-1].numel() for _, g in recorded if g is not None)
        used = self.budget.used()
        batch = torch.stack([used * rows, torch.full_like(used, rows)])
        self._validation = self._validation + batch
        if rows > self._most_rows:
            self._most_rows, self._largest_batch = rows, recorded

    def end_validation(self, mean: Mean) -> None:
        """Compare validation with the budget, and correct gates that have landed."""
        total, rows = mean(self._validation).tolist()
        recent = [float(raw) for raw in self._recent]
        if not rows or not recent:
            return
        share = total / rows
        if self._validates or (self.landing.landed and not self.budget.depends_on_input):
            self._warn_if_missed(share)  # after a first correction
        if not self.budget.depends_on_input:
            return
        if not self.landing.landed:
            self.ratio = max(share, LEAST) / max(sum(recent) / len(recent), LEAST)
            return
        # The last batch may be a small one.
        for gate, (p, g) in zip(self.budget.all_gates, self._largest_batch, strict=True):
            gate.probability, gate.gate = p, g
        self._validates, self.landing.measurements = True, 0
        self._shift(self.landing.correct(torch.tensor(share), ENOUGH_MEASUREMENTS), mean)
        self._largest_batch = []

    def _warn_if_missed(self, share: float) -> None:
        if self._misses(share) and not self._has_warned:
            self._has_warned = True
            cause = _OTHER_INPUTS if self.budget.depends_on_input else _SAME_P
            rank_zero_warn(f"BudgetController: {self._words(share, 'validation')} {cause}")

    def _misses(self, share: float) -> bool:
        tolerance = max(_MISSED * self.budget.budget, self.budget.resolution)
        return abs(share - self.budget.budget) > tolerance

    def report(self, rehearsal: bool) -> None:
        """Say what is used when training ends; a rehearsal of a few batches warns of nothing."""
        if self.used is None:
            return
        landed = self.landing.landed
        when = "landed" if landed else "not landed: training has ended"
        if self.budget.depends_on_input and not self._validates:
            when += "; measured on training inputs"
        line = self._words(self.reached, when)
        if self.budget.closes_all(self.reached) and not rehearsal:
            rank_zero_warn(f"BudgetController: {line} {_ALL_CLOSED}")
        elif self._misses(self.reached) and landed and not rehearsal:
            rank_zero_warn(f"BudgetController: {line} {_SAME_P}")
        else:
            rank_zero_info(f"BudgetController: {line}")

    def _words(self, used: float, when: str) -> str:
        what = f"{_WORDS[self.budget.measure]}{f' of {self.name}' if self.name else ''}"
        return f"{used:.2%} {what} for a budget of {self.budget.budget:.2%} ({when})."

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {
            "multiplier": self.multiplier.state_dict(),
            "landing": self.landing.state_dict(),
            "start": self.start,
            "savings": self.savings,
            "ratio": self.ratio,
            "validates": self._validates,
            "recent": [float(raw) for raw in self._recent],
            "used": None if self.used is None else float(self.used),
        }

    def load_from(self, state: dict[str, Any]) -> None:
        """Continue from the state of a controller."""
        own = state["budgets"].get(self.name)
        if own is None:
            return
        self.multiplier.load_state_dict(own["multiplier"])
        self.landing.load_state_dict(own["landing"])
        self.start, self.savings = own["start"], own["savings"]
        self.ratio, self._validates = own["ratio"], own["validates"]
        recent = [torch.tensor(raw, dtype=torch.float64) for raw in own["recent"]]
        self._recent = [raw.to(self.budget.device) for raw in recent]
        if own["used"] is not None:
            used = torch.tensor(own["used"], dtype=torch.float64)
            self.used = used.to(self.budget.device)
