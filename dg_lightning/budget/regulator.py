"""Keep a training run on its budget by adapting the penalty weight, then landing.

Landing means freezing the gates and shifting them until the budget is met exactly.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from dg_lightning.budget.budget import GateBudget
from dg_lightning.gates.protocol import GateLike
from dg_lightning.schedules.schedule import Clock, Duration, Schedule, ValueAt

Method: TypeAlias = Literal["pi", "dual", "shift", "balance"]


class Multiplier:
    """The penalty weight λ for a budget, which adapts to measured usage on the device.

    `pi` is a proportional-integral controller on log λ, which adapts to a loss of any scale.
    `dual` is gradient ascent on the Lagrangian.

    Args:
        method: The update rule. `shift` and `balance` use no penalty, so their λ never changes.
        initial: The initial λ.
        highest: The largest λ.
        integral: Gain for the accumulated error. For `dual`, the step size as a multiple of
            `initial`.
        proportional: Gain for the change in the error.
    """

    def __init__(
        self,
        method: Method,
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
        """Return λ on a device, moving it there once to avoid a copy in every step."""
        if self.value.device != device:
            self.value, self.error = self.value.to(device), self.error.to(device)
        return self.value

    @torch.no_grad()
    def update(self, used: Tensor, allowed: float) -> None:
        """Raise λ if more was used than allowed, and lower it otherwise.

        While usage is too high, λ never falls, even if the error shrinks quickly.
        """
        value = self.on(used.device)
        error = torch.log(used.clamp_min(1e-6) / allowed).clamp(-0.5, 0.5).to(value.dtype)
        if self.method == "pi":
            step = self.integral * error + self.proportional * (error - self.error)
            step = torch.where(error > 0, step.clamp_min(0), step)
            value = (value * step.exp()).clamp(self.lowest, self.highest)
        else:
            value = (value + self.integral * self.initial * error).clamp(0, self.highest)
        # In place, because captured steps read this tensor.
        self.value.copy_(value)
        self.error.copy_(error)

    def state_dict(self) -> dict[str, float]:
        """Return λ and the last error."""
        return {"value": float(self.value), "error": float(self.error)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state from `state_dict`."""
        self.value, self.error = torch.tensor(state["value"]), torch.tensor(state["error"])


_MEASUREMENTS = 200  # default number of measurements in a training run
_LANDING = 10  # number of measurements during a landing

_TOLERANCE = 0.01  # relative error below which landed gates are not corrected
MIN_MEASUREMENTS = 10  # number of batches needed for a correction
MIN_SHARE = 1e-6  # lower bound on a used share, to avoid division by zero


_BALANCE = 0.2  # change of ``z / τ`` in a pass, for a block that all or no rows open
_CATCH_UP = 0.01  # change of the target load in a step, for each unit of error in the share

Mean: TypeAlias = Callable[[Tensor], Tensor]  # averages a value over ranks


class Timetable(NamedTuple):
    """The schedule for a budget, in optimizer steps."""

    progress_at: ValueAt  # required progress towards the budget, from 0 to 1
    begin: int
    freeze_at: int
    landed: int
    interval: int  # steps between measurements

    @classmethod
    def resolve(
        cls, clock: Clock, begin: Duration, until: Duration, freeze_at: Duration, every: int | None
    ) -> "Timetable":
        """Convert durations to optimizer steps.

        `every` is the measurement interval in steps. None means 1/200 of the training run.
        """
        progress_at = Schedule(0.0, 1.0, "linear", begin, until).resolve(clock)
        first, freeze = clock.steps(begin, "begin"), clock.steps(freeze_at, "freeze_at")
        interval = every or max(1, (clock.total_steps or freeze) // _MEASUREMENTS)
        landed = freeze + _LANDING * interval
        if clock.total_steps is not None:
            # Reserve two steps. Gates freeze first and land one step later, because the recorded p
            # predates the optimizer step.
            freeze = min(freeze, max(clock.total_steps - 2, 0))
            landed = min(landed, clock.total_steps - 1)
        return cls(progress_at, first, freeze, landed, interval)

    def landing_progress(self, step: int) -> float:
        """Return the progress of the landing, from 0 at the start to 1 or more after the end."""
        return (step - self.freeze_at) / max(self.landed - self.freeze_at, 1)


class FrozenGates:
    """Keeps gate parameters fixed, whatever the optimizer does.

    `requires_grad` and `grad` do not change, because DDP and loss scalers rely on gradients.

    Args:
        gates: The gates to freeze.
    """

    def __init__(self, gates: Iterable[GateLike]) -> None:
        modules = [gate for gate in gates if isinstance(gate, nn.Module)]
        parameters = [parameter for gate in modules for parameter in gate.parameters()]
        self.kept = [(parameter, parameter.detach().clone()) for parameter in parameters]

    @torch.no_grad()
    def hold(self) -> None:
        """Restore the frozen values."""
        for parameter, value in self.kept:
            parameter.copy_(value)


class Landing:
    """Shifts frozen gates gradually until they meet their budget.

    Static gates then meet the budget exactly. GateNets use a different share in each batch, and it
    drifts as their input features change, so they are corrected by the mean over several batches.

    Args:
        budget: The budget to meet.
    """

    def __init__(self, budget: GateBudget) -> None:
        self.budget = budget
        self.landed = False
        self.start: float | None = None  # share used when the gates were frozen
        self.measurements = 0
        self.used = 0.0

    def approach(self, used: Tensor, progress: float) -> float:
        """Return the next shift for gates that have not landed yet.

        Args:
            used: The share used by deployed gates, estimated from the last forward pass.
            progress: Progress of the landing, from 0 to 1.
        """
        self.used = float(used)
        self.start = self.start or max(self.used, MIN_SHARE)
        self.landed = progress >= 1
        target = self.start * (self.budget.budget / self.start) ** min(max(progress, 0.0), 1.0)
        return self.shift_to(target, self.used)

    def correct(self, used: Tensor, measurements: int = 1) -> float:
        """Add measurements made after landing, and return a correction, which is usually 0."""
        self.measurements += measurements
        self.used += (float(used) - self.used) * measurements / self.measurements
        settled = abs(self.used / self.budget.budget - 1) <= _TOLERANCE
        if settled or self.measurements < MIN_MEASUREMENTS:
            return 0.0
        return self.shift_to(self.budget.budget, self.used)

    def shift_to(self, target: float, used: float) -> float:
        """Return the shift that brings usage to the target."""
        here = float(self.budget.used())  # the last pass may differ from `used`
        return self.budget.shift_for(target if used < MIN_SHARE else here * target / used)

    def apply(self, shift: float, mean: Mean) -> None:
        """Shift the gates and restart the measurements.

        Args:
            shift: The shift, which must be equal on all ranks.
            mean: Averages a value over ranks, so that all ranks record the same usage.
        """
        if shift:
            self.measurements = 0
            before = float(mean(self.budget.used()))
            after = float(mean(self.budget.used(shift)))
            self.used = after if before < MIN_SHARE else self.used * after / before
            self.budget.shift(shift)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        kept = {"landed": self.landed, "measurements": self.measurements, "used": self.used}
        return kept if self.start is None else {**kept, "start": self.start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`."""
        self.landed, self.used = state["landed"], state["used"]
        self.start = state.get("start")
        known = "measurements" in state
        self.measurements = state["measurements" if known else "looks"]  # version 0.2 saved "looks"


_MISSED = 0.05  # relative error that counts as a missed budget
# Number of measurements to average. More would lag behind closing gates, and a single one may come
# from a small batch.
_RECENT = 2
_WORDS = {"macs": "of the dense MACs", "open_rate": "of the units open"}
_SAME_P = (
    "Many units have the same p and open together, gates outside this budget use too much, or "
    "connections are still changing: penalise longer (`begin`, `freeze_at`), or raise the gates' "
    "learning rate."
)
_TOO_SPARSE = (
    "With every gate open, the connections use only {:.2%}, so this budget never closes a gate: "
    "lower the budget or the sparsity."
)
_ALL_CLOSED = (
    "No unit is open: raise the budget, or set a floor with the gates' `min_open` or the callback "
    "MinimumActivity."
)
_UNLANDED = (
    "The optimizer took fewer steps than were planned, and gates meet their budget after "
    "`freeze_at`: train for longer, or set `freeze_at` to an earlier step."
)
_OTHER_INPUTS = (
    "Training inputs differ (random crops, dropout), or the input features of GateNets are still "
    "changing. Gates are corrected after every validation, so land some epochs earlier."
)


def gate_loads(gate: GateLike) -> Tensor:
    """Return the share of rows that opened each block in the last pass."""
    assert gate.gate is not None
    return (gate.gate.detach().flatten(0, -2) != 0).float().mean(0)


@torch.no_grad()
def balance_loads(
    gates: Sequence[GateLike], target: Tensor, passes: int = 1, mean: Mean | None = None
) -> None:
    """Move the bias of every block after a pass, so that as many rows open each of them.

    Nothing is read by the host.

    Args:
        gates: The gates, which have recorded a pass.
        target: The share of rows that should open a block.
        passes: Number of passes in an optimizer step.
        mean: Averages loads over ranks.
    """
    loads = [gate_loads(gate) for gate in gates]
    own = torch.cat(loads)
    moves = (_BALANCE / passes) * (target - (own if mean is None else mean(own)))
    for gate, move in zip(gates, moves.split([len(load) for load in loads]), strict=True):
        # A fixed number of open blocks does not change, so their biases only change places.
        fixed = getattr(gate, "k", None) is not None
        gate.shift_bias((move - move.mean() if fixed else move) * gate.temperature)


class Regulator:
    """Brings gates to a budget, measured in training and on validation inputs.

    GateNets may use a different share on validation inputs than on training inputs, because of
    augmentation, dropout and sampled gates. Usage is therefore also measured on validation inputs,
    over all loaders. Before landing, training measurements are multiplied by the ratio of the
    validation share to the training share. After landing, validation corrects the gates. If
    Lightning resumes from a checkpoint saved after the last batch in an epoch, it skips validation
    for that epoch, and the next validation makes the correction.

    Args:
        name: The name pattern that selects the gates, "" for all gates.
        budget: The budget.
        multiplier: The penalty weight λ for the budget.
    """

    def __init__(self, name: str, budget: GateBudget, multiplier: Multiplier) -> None:
        self.name = name
        self.budget = budget
        self.multiplier = multiplier
        self.landing = Landing(budget)
        self.start: float | None = None  # share used when the penalty began
        self.savings = 1.0  # largest possible savings, used to normalise the penalty
        self.ratio = 1.0  # validation share / training share
        self.offset = 0.0  # added to target loads, because the loss keeps pulling at them
        self.used: Tensor | None = None  # last measurement with deployed gates
        self._validates = False  # whether validation corrects landed gates
        self._has_warned = False
        self._recent: list[Tensor] = []  # shares used in recent measured passes
        self._validation = torch.zeros(2)  # sum of share * rows, sum of rows
        self._largest_batch: list[Any] = []  # (p, g) of each gate on the largest batch
        self._most_rows = 0

    @property
    def reached(self) -> float:
        """The share that deployed gates use."""
        return self.landing.used if self.landing.landed else float(self.used or 0.0)

    def allowed(self, progress: float) -> float:
        """Return the allowed share, which falls exponentially from `start` to the budget."""
        start = self.start or 1.0
        return float(start * (self.budget.budget / start) ** progress)

    def begin(self, mean: Mean) -> None:
        """Measure usage before the penalty starts. The allowed share starts there."""
        if self.start is not None:
            return
        self.start = max(float(self.measure(mean)), self.budget.budget)
        min_share = self.budget.min_share()
        self.savings = self.start - min_share if self.start > min_share else 1.0

    def penalty(self, usage: Tensor) -> Tensor:
        """Return the penalty for this usage."""
        return self.multiplier.on(usage.device) * usage / self.savings

    def measure(self, mean: Mean) -> Tensor:
        """Return the share used by deployed gates, estimated from the last training pass."""
        raw = mean(self.budget.used())
        self._recent = [*self._recent[1 - _RECENT :], raw]
        self.used = raw * self.ratio
        return self.used

    def target_load(self, progress: float) -> float:
        """Return the share of training rows that should open each block."""
        return self.allowed(progress) / self.ratio + self.offset

    def control(self, used: Tensor, progress: float, mean: Mean, interval: int = 1) -> None:
        """Update λ after a measurement. With `shift`, shift the gates; with `balance`, the target.

        Args:
            used: The share used.
            progress: Progress towards the budget.
            mean: Averages a value over ranks.
            interval: Steps since the last measurement.
        """
        if self.multiplier.method == "balance":
            gain = min(_CATCH_UP * interval, 0.3)
            offset = self.offset + gain * (self.allowed(progress) - float(used))
            self.offset = min(max(offset, -1.0), 1.0)
            return
        if self.multiplier.method != "shift":
            self.multiplier.update(used, self.allowed(progress))
            return
        self.begin(mean)
        self._shift(self.landing.shift_to(self.allowed(progress), float(used)), mean)

    def balance(self, target: Tensor, passes: int, mean: Mean) -> None:
        """Balance the loads of all blocks, see `balance_loads`."""
        gates = [gate for gate in self.budget.gates.values() if gate.gate is not None]
        balance_loads(gates, target, passes, mean)

    def land(self, used: Tensor, progress: float, mean: Mean) -> None:
        """Shift frozen gates after a measurement. This is usually a no-op after landing."""
        if not self.landing.landed:
            self._shift(self.landing.approach(used, progress), mean)
        elif not self._validates:
            self._shift(self.landing.correct(used), mean)

    def _shift(self, shift: float, mean: Mean) -> None:
        own = torch.tensor(shift, device=self.budget.device)
        self.landing.apply(float(mean(own)), mean)  # average so that all ranks shift equally

    def start_validation(self) -> None:
        """Reset the validation statistics."""
        self._validation = torch.zeros(2, dtype=torch.float64, device=self.budget.device)
        self._largest_batch, self._most_rows = [], 0

    def add_validation_batch(self) -> None:
        """Add the share used in the last validation batch."""
        recorded = [(gate.probability, gate.gate) for gate in self.budget.all_gates]
        rows = max(g.shape[:-1].numel() for _, g in recorded if g is not None)
        used = self.budget.used()
        batch = torch.stack([used * rows, torch.full_like(used, rows)])
        self._validation = self._validation + batch
        if rows > self._most_rows:
            self._most_rows, self._largest_batch = rows, recorded

    def end_validation(self, mean: Mean) -> None:
        """Compare usage in validation with the budget, and correct gates that have landed."""
        total, rows = mean(self._validation).tolist()
        recent = [float(raw) for raw in self._recent]
        if not rows or not recent:
            return
        share = total / rows
        if self._validates or (self.landing.landed and not self.budget.depends_on_input):
            self._warn_if_missed(share)  # after at least one correction, if any are possible
        if not self.budget.depends_on_input:
            return
        if not self.landing.landed:
            self.ratio = max(share, MIN_SHARE) / max(sum(recent) / len(recent), MIN_SHARE)
            return
        # The last batch may be small, so restore the p and g recorded on the largest batch.
        for gate, (p, g) in zip(self.budget.all_gates, self._largest_batch, strict=True):
            gate.probability, gate.gate = p, g
        self._validates, self.landing.measurements = True, 0
        self._shift(self.landing.correct(torch.tensor(share), MIN_MEASUREMENTS), mean)
        self._largest_batch = []

    def _warn_if_missed(self, share: float) -> None:
        if self._misses(share) and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(f"BudgetController: {self._words(share, 'validation')} {self._cause()}")

    def warn_if_too_sparse(self) -> None:
        """Warn if the budget is above what the connections use with every gate open."""
        if (most := self.budget.max_share()) < self.budget.budget:
            what = f" {self.name}" if self.name else ""
            rank_zero_warn(f"BudgetController{what}: {_TOO_SPARSE.format(most)}")

    def _cause(self) -> str:
        """Return the likely cause of a missed budget, with a way out."""
        if (most := self.budget.max_share()) < self.budget.budget:
            return _TOO_SPARSE.format(most)
        return _OTHER_INPUTS if self._validates else _SAME_P

    def _misses(self, share: float) -> bool:
        tolerance = max(_MISSED * self.budget.budget, self.budget.resolution)
        return abs(share - self.budget.budget) > tolerance

    def report(self, rehearsal: bool) -> None:
        """Log the final usage, and warn if the budget was missed unless this is a `rehearsal`."""
        if self.used is None:
            return
        landed = self.landing.landed
        when = "landed" if landed else "not landed before training ended"
        if self.budget.depends_on_input and not self._validates:
            when += ", measured on training inputs"
        line = self._words(self.reached, when)
        if self.budget.closes_all(self.reached) and not rehearsal:
            rank_zero_warn(f"BudgetController: {line} {_ALL_CLOSED}")
        elif self._misses(self.reached) and not rehearsal:
            rank_zero_warn(f"BudgetController: {line} {self._cause() if landed else _UNLANDED}")
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
            "offset": self.offset,
            "validates": self._validates,
            "recent": [float(raw) for raw in self._recent],
            "used": None if self.used is None else float(self.used),
        }

    def load_from(self, state: dict[str, Any]) -> None:
        """Restore the state of this budget from the state of its controller."""
        own = state["budgets"].get(self.name)
        if own is None:
            return
        self.multiplier.load_state_dict(own["multiplier"])
        self.landing.load_state_dict(own["landing"])
        self.start, self.savings = own["start"], own["savings"]
        self.ratio, self._validates = own["ratio"], own["validates"]
        self.offset = own.get("offset", 0.0)  # not in checkpoints of version 0.2
        recent = [torch.tensor(raw, dtype=torch.float64) for raw in own["recent"]]
        self._recent = [raw.to(self.budget.device) for raw in recent]
        if own["used"] is not None:
            used = torch.tensor(own["used"], dtype=torch.float64)
            self.used = used.to(self.budget.device)
