"""What the sparse callbacks share: masks that hold in every step, and change when they are due."""

import math
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from dg_lightning.averaging import mask_averages
from dg_lightning.log_steps import log_of_step, logs_now
from dg_lightning.recorded import Recorded
from dg_lightning.rewiring import WEIGHT_BY_WEIGHT, Connections, mask_gradients
from dg_lightning.schedules import Clock
from dg_lightning.step_hooks import use_hooks

from ._agreement import refuse_different_masks
from ._masked_layers import MaskedLayers

__all__ = ["Sparse", "all_finite"]


def all_finite(values: Iterable[Tensor]) -> bool:
    """Tell whether every entry of all tensors is a number; waits for the device."""
    values = list(values)
    if not values:
        return True
    # A sum with one entry that is not finite is not; the sum itself may overflow, though. Norms of
    # all tensors are one operation on a GPU, and on a CPU slower than sums.
    on_gpu = all(value.is_cuda for value in values)
    sums = torch._foreach_norm(values) if on_gpu else [value.sum() for value in values]
    if math.isfinite(float(torch.stack(sums).sum())):
        return True
    return all(bool(value.isfinite().all()) for value in values)


class Sparse(MaskedLayers):
    """Keeps the weights of missing connections, and what the optimizer knows of them, at 0.

    Gradients are masked before the optimizer's step, which then leaves missing connections at 0:
    those of torch that work weight by weight do. After all others it is cleaned up. A subclass says
    when connections change (`changes_after`) and how (`new_masks`).
    """

    sees_all_gradients = False  # or only those of steps after which something changes
    puts_off = False  # whether a change that a step did not allow is made after the next one

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._handles: list[Any] = []
        # By optimizer: how many parameters it has, and which of them are ours.
        self._mine: dict[Optimizer, tuple[int, list[Connections]]] = {}
        self._due: list[Connections] = []
        self._masking = Recorded()
        self._step = 0
        self._logged_at = -1

    def changes_after(self, step: int, last: int) -> bool:
        """Tell whether a layer changes after this optimizer step, counted from 1.

        `last` is the one after which it changed before. A layer is stepped by its own optimizer,
        and with several of those it sees some of the steps only.
        """
        return False

    def new_masks(
        self, trainer: Any, step: int, due: list[Connections]
    ) -> dict[Connections, Tensor]:
        """Return the new masks of layers, after the optimizer's step."""
        return {}

    def see_gradients(
        self, trainer: Any, optimizer: Optimizer, mine: list[Connections], due: list[Connections]
    ) -> None:
        """Look at the dense gradients of layers, before they are masked.

        In steps after which something changes, or in all of them (`sees_all_gradients`).
        """

    def start_anew(self) -> None:
        """Forget an earlier training."""
        for c in self.connections.values():
            c.changed_at = 0

    def prepare(self, clock: Clock) -> str | None:
        """Resolve durations, when training starts; return what is to be warned of."""
        return None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._fresh and trainer.global_step > 0:
            raise RuntimeError(
                f"Training goes on at step {trainer.global_step} without masks of "
                f"{type(self).__name__}: resume from a checkpoint that has them, or start anew."
            )
        warning = self.prepare(Clock.of(trainer))
        if warning is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_warn(warning)
        if trainer.global_step == 0:
            self.start_anew()
        self._logged_at = -1
        self._log_figures(True)
        self._mine = {}

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        mine = self._layers_of(trainer, pl_module, optimizer)
        self._step = trainer.global_step + 1
        self._due = [c for c in mine if self.changes_after(self._step, c.changed_at)]
        if self._due and not all_finite(g for c in self._due if (g := c.weight.grad) is not None):
            self._leave_out()
        if self._due or self.sees_all_gradients:
            self.see_gradients(trainer, optimizer, mine, self._due)
        mask_gradients(mine, self._masking)

    def _layers_of(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> list[Connections]:
        """Return the layers that an optimizer steps, which may become more while it trains."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._mine.get(optimizer)
        if known is None:
            hook = optimizer.register_step_post_hook(self._after_step(trainer, pl_module))
            self._handles.append(hook)
        if known is None or known[0] != count:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            mine = [c for c in self.connections.values() if id(c.weight) in held]
            self._mine[optimizer] = known = (count, mine)
        return known[1]

    def _leave_out(self) -> None:
        """Make no change after this step."""
        if not self.puts_off:
            rank_zero_warn(
                f"{type(self).__name__} leaves the update of step {self._step} out: a gradient is "
                "not finite."
            )
            for c in self._due:
                c.changed_at = self._step
        self._due = []

    def _after_step(self, trainer: Any, pl_module: nn.Module) -> Any:
        """Return the hook that runs right after an optimizer's step, if the step is made at all."""

        def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if type(optimizer) not in WEIGHT_BY_WEIGHT:
                for c in self._mine[optimizer][1]:
                    c.clean(optimizer)
            if self._due:
                self._change(trainer, pl_module, optimizer)

        return hook

    def _change(self, trainer: Any, pl_module: nn.Module, optimizer: Any) -> None:
        due, self._due = self._due, []
        masks = self.new_masks(trainer, self._step, due)
        for c, mask in masks.items():
            c.change(mask, optimizer)
            c.changed_at = self._step
        mask_averages(pl_module, trainer, masks)
        refuse_different_masks(trainer, due)
        self._log_figures(True)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._log_figures(True)

    def _log_figures(self, now: bool) -> None:
        """Let Lightning call the hook that logs, or not: a call costs more than what it does."""
        hook = ["on_train_batch_end"]
        use_hooks(self, *(hook, []) if now else ([], hook))

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        # Figures are new after a change only, and an epoch forgets what was logged before it.
        changed_at = max(c.changed_at for c in self.connections.values())
        if batch_idx == 0 or (self._logged_at != changed_at and logs_now(trainer)):
            self._logged_at = changed_at
            for name, c in self.connections.items():
                for key, value in c.figures().items():
                    log_of_step(pl_module, f"rewire/{key}/{name}", value)
            self._log_figures(False)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._let_go()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._let_go()

    def _let_go(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._mine, self._due, self._masking = [], {}, [], Recorded()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": [], "_mine": {}}
