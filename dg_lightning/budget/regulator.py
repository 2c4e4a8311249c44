"""One budget over a training run: λ, the share that may be used, validation, the landing."""

from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from dg_lightning.budget.budget import GateBudget
from dg_lightning.budget.landing import ENOUGH_MEASUREMENTS, LEAST, Landing, Mean
from dg_lightning.budget.multiplier import Multiplier

__all__ = ["Regulator"]

_MISSED = 0.05  # of the budget
_RECENT = 2  # measurements: more would lag behind gates that close, one may be of a small batch
_WORDS = {"macs": "of the dense MACs", "open_rate": "of the units open"}
_SAME_P = (
    "Many units have the same p and open together, other gates use more than is left, or "
    "connections still move: press longer (`begin`, `landing`), or raise the gates' learning rate."
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
        least = self.budget.least()
        self.savings = self.start - least if self.start > least else 1.0

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
        tolerance = max(_MISSED * self.budget.budget, self.budget.grain)
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
