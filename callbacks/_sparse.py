"""What the sparse callbacks share: masks that hold in every step, and change when they are due."""

from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from dg_lightning.averaging import mask_averages
from dg_lightning.log_steps import is_logged, log_figures, step_counter
from dg_lightning.rewiring import (
    WEIGHT_BY_WEIGHT,
    Connections,
    GradientMask,
    all_finite,
    change_all,
)
from dg_lightning.schedules import Clock
from dg_lightning.step_hooks import use_hooks

from ._agreement import refuse_different_masks
from ._masked_layers import MaskedLayers

__all__ = ["LOOK_AHEAD", "Sparse"]

LOOK_AHEAD = 64  # steps: to ask in every step costs as much as what is done in it


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
        self._changing: Any = None  # the hook after a step that changes connections
        # By optimizer: how many parameters it has, and what masks the gradients of ours.
        self._mine: dict[Optimizer, tuple[int, GradientMask]] = {}
        self._due: list[Connections] = []
        self._steps: Any = None  # what counts them
        self._step = 0
        self._look_at = 0  # the next step that may be followed by a change
        self._logged_at = -1
        self.only_if: Tensor | None = None
        self._logs_next = False  # in the next batch, when nothing has to be waited for
        self._is_monitored = False

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

    def checks_later(self, trainer: Any) -> bool:
        """Tell whether gradients are not looked at before a step, which would wait for the device.

        Then `see_gradients` and `new_masks` leave in `only_if`, a bool on the device, whether they
        and the weights are finite.
        """
        return False

    def see_gradients(
        self, trainer: Any, optimizer: Optimizer, mine: list[Connections], due: list[Connections]
    ) -> None:
        """Look at the dense gradients of layers, before they are masked.

        In steps after which something changes, or in all of them (`sees_all_gradients`).
        """

    def start_anew(self) -> None:
        """Forget an earlier training."""
        for c in self.connections.values():
            c.read_news()
            c.changed_at, c.left_out_at = 0, None

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
        self._logged_at, self._logs_next = -1, False
        monitored = [getattr(callback, "monitor", None) for callback in trainer.callbacks]  # type: ignore[attr-defined]
        self._is_monitored = any(str(key).startswith("rewire/") for key in monitored)
        self._log_figures(True)
        self._mine, self._look_at = {}, 0
        self._steps = step_counter(trainer, pl_module)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        mask_gradients = self._mask_of(optimizer)
        step = self._steps.completed + 1
        # Some optimizers compute the gradients of a step several times: the last ones count.
        if step >= self._look_at or step == self._step or self.sees_all_gradients:
            self._look(trainer, pl_module, optimizer, step, mask_gradients.connections)
        mask_gradients()

    def _look(
        self, trainer: Any, pl_module: Any, optimizer: Optimizer, step: int, mine: list[Connections]
    ) -> None:
        """See what changes after a step, and when to look again."""
        if self._changing is not None:  # that was for the step before, whether it was made or not
            self._changing.remove()
            self._changing = None
        self._step, self.only_if = step, None
        self._due = [c for c in mine if self.changes_after(step, c.changed_at)]
        self._look_at = step + 1 if self._due or self.sees_all_gradients else self.next_change()
        if self._due:
            if self._logs_next:  # else they would be those of the next change
                self._log(trainer, to_loggers=True)
            self._tell_of_left_out()
            gradients = (g for c in self._due if (g := c.weight.grad) is not None)
            if not self.checks_later(trainer) and not all_finite(gradients):
                self.leave_out(self._due)
                self._due = []
        if self._due or self.sees_all_gradients:
            self.see_gradients(trainer, optimizer, mine, self._due)
        if self._due:
            self._change_after_step(trainer, pl_module, optimizer)

    def next_change(self) -> int:
        """Return the next step after which a layer may change, or a later one than looked at."""
        if not type(self).changes_after.__module__.startswith("dg_lightning."):
            return self._step + 1  # somebody's own rule may hang on what is not known yet
        lasts = {c.changed_at for c in self.connections.values()}
        ahead = range(self._step + 1, self._step + LOOK_AHEAD)
        found = (s for s in ahead if any(self.changes_after(s, last) for last in lasts))
        return next(found, self._step + LOOK_AHEAD)

    def _mask_of(self, optimizer: Optimizer) -> GradientMask:
        """Return the mask of the layers that an optimizer steps; they may become more later on."""
        count = 0
        for group in optimizer.param_groups:
            count += len(group["params"])
        known = self._mine.get(optimizer)
        if known is None and type(optimizer) not in WEIGHT_BY_WEIGHT:
            self._handles.append(optimizer.register_step_post_hook(self._clean))
        if known is None or known[0] != count:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            mine = [c for c in self.connections.values() if id(c.weight) in held]
            self._mine[optimizer] = known = (count, GradientMask(mine))
        return known[1]

    def leave_out(self, due: list[Connections]) -> None:
        """Make no change after this step."""
        if not self.puts_off:
            for c in due:
                c.changed_at = c.left_out_at = self._step
            self._tell_of_left_out()

    def _tell_of_left_out(self) -> None:
        """Warn of updates that were left out, as soon as it is known, and once."""
        for c in self.connections.values():
            c.read_news()
        steps = {c.left_out_at for c in self.connections.values()}
        for step in sorted(step for step in steps if step is not None):
            rank_zero_warn(
                f"{type(self).__name__} leaves the update of step {step} out: a gradient or a "
                "weight is not finite."
            )
        for c in self.connections.values():
            c.left_out_at = None

    def _clean(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Clean up after a step of an optimizer that may not have left missing connections at 0."""
        for c in self._mine[optimizer][1].connections:
            c.clean(optimizer)

    def _change_after_step(self, trainer: Any, pl_module: nn.Module, optimizer: Optimizer) -> None:
        """Let connections change right after the optimizer's step, if the step is made at all."""

        def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if self._due:  # torch calls it twice where a step calls the one of its base class
                self._change(trainer, pl_module, optimizer)

        self._changing = optimizer.register_step_post_hook(hook)

    def _change(self, trainer: Any, pl_module: nn.Module, optimizer: Any) -> None:
        due, self._due = self._due, []
        masks = self.new_masks(trainer, self._step, due)
        change_all(masks, optimizer, self.only_if)
        for c in masks:
            c.changed_at = self._step
        mask_averages(pl_module, trainer, masks)
        refuse_different_masks(trainer, due)
        self._log_figures(True)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._logged_at = -1
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
        # They are new when an epoch begins and after a change, and loggers see them once.
        changed_at = max(c.changed_at for c in self.connections.values())
        seen = self._logged_at == changed_at
        logged = self._logs_next or (not seen and is_logged(trainer, pl_module))
        if logged and not self._logs_next and self._would_wait():
            self._logs_next, logged = True, False
        if logged or batch_idx == 0:
            self._log(trainer, to_loggers=logged)
        if logged or seen:
            self._logged_at = changed_at
            self._log_figures(False)

    def _would_wait(self) -> bool:
        """Tell whether figures are still on their way, and nobody needs them at once."""
        on_the_way = any(c.has_news for c in self.connections.values())
        return on_the_way and not self._is_monitored

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._logs_next:
            self._log(trainer, to_loggers=True)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._logs_next:
            self._log(trainer, to_loggers=True)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._tell_of_left_out()

    def _log(self, trainer: Any, *, to_loggers: bool) -> None:
        """Leave the figures for those who monitor them; with `to_loggers` it is done with that."""
        self._logs_next = self._logs_next and not to_loggers
        figures = {
            f"rewire/{key}/{name}": value
            for name, c in self.connections.items()
            for key, value in c.figures().items()
        }
        self._tell_of_left_out()
        log_figures(trainer, figures, to_loggers=to_loggers)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._let_go()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._let_go()

    def _let_go(self) -> None:
        for handle in (*self._handles, self._changing):
            if handle is not None:
                handle.remove()
        self._handles, self._changing, self._mine, self._due = [], None, {}, []
        self._steps = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": [], "_changing": None, "_mine": {}, "_steps": None}
