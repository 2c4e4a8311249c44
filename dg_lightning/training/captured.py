"""CapturedSteps: trains a LightningModule by replaying its steps as CUDA graphs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from dg_lightning.training.optimizers import has_scaler, restore_fused
from dg_lightning.training.step_graphs import CannotCaptureError, StepGraphs
from dg_lightning.training.step_logging import is_logged_step

__all__ = ["CapturedSteps", "is_replayed", "why_not"]

# What Lightning calls in the part of a step that is recorded.
_RECORDED = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
_OWN = ("training_step", "backward", "optimizer_zero_grad", "optimizer_step")


class CapturedSteps(pl.LightningModule):
    """Base class of modules whose training steps are replayed as CUDA graphs.

    A step of a small net is mostly Python and launches of kernels. A subclass defines
    `losses(batch)` in place of `training_step`; forward, backward, penalties, clipping and the
    optimizer's step are then recorded once and replayed. The numbers are those of an ordinary
    training bit for bit, if float32 holds the learning rates, which are rounded to it. On a CPU,
    and where a step cannot be recorded, it says why and trains as usual.

    `losses` must do the same for every batch of a shape: what Python decides or draws in it, and
    what it keeps in attributes, is that of the recorded step. It needs one device, automatic
    optimization and an optimizer that is `fused` or `capturable`. A subclass with an
    `on_train_start` of its own calls that of this class.

    A callback with hooks between `training_step` and the optimizer's step is named and prevents it,
    unless it has a `prepare_step(trainer)`. Called before every captured pass, this writes numbers
    into tensors on the device, and returns what its hooks decide in Python (hashable), or None for
    a step that must run as usual. Hooks around the backward pass are recorded and still called in
    replays, where they must do nothing (`dg_lightning.training.is_replayed(pl_module)`).

    >>> class Regression(CapturedSteps):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.net = torch.nn.Linear(8, 1)
    ...
    ...     def losses(self, batch):
    ...         x, y = batch
    ...         return {"loss": torch.nn.functional.mse_loss(self.net(x), y)}
    ...
    ...     def configure_optimizers(self):
    ...         return torch.optim.AdamW(self.parameters(), fused=True)
    >>> Regression().capture
    True
    """

    capture = True  # whether to record steps
    _graphs: StepGraphs | None = None  # while training

    def losses(self, batch: Any) -> dict[str, Tensor]:
        """Return the `loss` that is differentiated, and any parts of it, to be logged."""
        raise NotImplementedError(f"{type(self).__name__} must define `losses(batch)`.")

    def log_losses(self, values: dict[str, Tensor]) -> None:
        """Log what `losses` has returned, as `train/<name>`."""
        for name, value in values.items():
            self.log(f"train/{name}", value.detach(), prog_bar=name == "loss")

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        values: dict[str, Tensor] = self._or_as_usual(
            lambda: self.losses(batch),
            lambda graphs: graphs.run_pass(batch, batch_idx),
        )
        check_losses(values, type(self).__name__)
        # A compiled step must not depend on the number of the batch: it would be compiled again.
        if torch.compiler.is_compiling() or self._is_logged_step():
            self.log_losses(values)
        return values["loss"]

    def _is_logged_step(self) -> bool:
        """Return True if values are logged, or monitored when the epoch ends."""
        try:
            trainer = self.trainer
        except RuntimeError:  # called without one
            return False
        return is_logged_step(trainer) or trainer.is_last_batch

    def _or_as_usual(
        self, as_usual: Callable[[], Any], captured: Callable[[StepGraphs], Any]
    ) -> Any:
        """Do something by graphs if there are any, and as usual if they fail."""
        if self._graphs is None:
            return as_usual()
        try:
            return captured(self._graphs)
        except CannotCaptureError as error:
            self._say_why_not(f"a graph cannot hold one: {error}")
            self._graphs = None
            return as_usual()

    @override
    def on_train_start(self) -> None:
        self._graphs = None
        if self.capture:
            for optimizer in self.trainer.optimizers:
                restore_fused(optimizer)
            if (reason := why_not(self, self.trainer)) is None:
                self._graphs = StepGraphs(self, self.trainer)
            else:
                self._say_why_not(reason)

    def _say_why_not(self, reason: str) -> None:
        rank_zero_info(f"{type(self).__name__}: steps are not captured, {reason}")

    @override
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if not is_replayed(self):
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    @override
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if not is_replayed(self):
            super().backward(loss, *args, **kwargs)
            if self._graphs is not None:
                self._graphs.keep_gradients()

    @override
    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        step = partial(super().optimizer_step, epoch, batch_idx, optimizer)
        if self._graphs is None:
            step(optimizer_closure)
            return
        assert optimizer_closure is not None
        loss = optimizer_closure()
        done = partial(step, lambda: loss)
        self._or_as_usual(done, lambda graphs: graphs.run_update(done))

    @override
    def teardown(self, stage: str) -> None:
        self._graphs = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_graphs": None}  # can be neither copied nor pickled


def check_losses(values: Any, name: str) -> None:
    """Raise if `losses` has returned something else than tensors by name, with a `loss`."""
    if not isinstance(values, dict) or not isinstance(values.get("loss"), Tensor):
        got = list(values) if isinstance(values, dict) else type(values).__name__
        raise TypeError(f"`losses` of {name} must return a dict with a tensor `loss`, got {got}.")
    for key, value in values.items():
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise TypeError(f"`losses` of {name} must return tensors, got {kind} for {key!r}.")


def is_replayed(module: Any) -> bool:
    """Return True if the gradients of the current pass come from a graph."""
    graphs = getattr(module, "_graphs", None)
    return graphs is not None and bool(graphs.replayed)


def why_not(module: pl.LightningModule, trainer: Any) -> str | None:
    """Return why the steps of a module cannot be captured; None if they can, as far as known."""
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return f"which needs a CUDA device, got {device.type}."
    if not isinstance(trainer.strategy, SingleDeviceStrategy):
        return f"which needs a single device, got {type(trainer.strategy).__name__}."
    if not module.automatic_optimization or len(trainer.optimizers) != 1:
        return "which needs automatic optimization with one optimizer."
    if torch.is_anomaly_enabled():
        return "because `detect_anomaly` looks at every operation."
    groups, kind = trainer.optimizers[0].param_groups, type(trainer.optimizers[0]).__name__
    if not all(group.get("fused") or group.get("capturable") for group in groups):
        return f"because {kind} is neither `fused` nor `capturable`: set `fused=True`."
    if has_scaler(trainer) and not all(group.get("fused") for group in groups):
        return f"because {kind} is not `fused`, and waits for the loss scaler in every step."
    clipping = type(module).configure_gradient_clipping.__module__
    if clipping.split(".")[0] not in ("lightning", "pytorch_lightning", "dg_lightning"):
        return f"because {type(module).__name__} has a `configure_gradient_clipping` of its own."
    for method in _OWN:
        own = getattr(type(module), method) is not getattr(CapturedSteps, method)
        if own or method in vars(module):  # as torch.compile sets it
            return f"because {type(module).__name__} has a `{method}` of its own."
    for hooked in (module, *trainer.callbacks):
        parent = pl.LightningModule if hooked is module else pl.Callback
        for hook in _RECORDED:
            if is_overridden(hook, hooked, parent) and not hasattr(hooked, "prepare_step"):
                return f"because a replay would pass over `{type(hooked).__name__}.{hook}`."
    for name, child in module.named_modules():
        before, after = child._forward_pre_hooks, child._forward_hooks
        hooks = [*before.values(), *after.values(), *child._backward_hooks.values()]
        hooks += child._backward_pre_hooks.values()
        # Those of gates in the module run while a step is recorded, and do nothing else.
        if not all(str(hook.__module__).startswith("dg_lightning.") for hook in hooks):
            return f"because a replay would pass over the hooks of {name or 'the module'}."
    return None
