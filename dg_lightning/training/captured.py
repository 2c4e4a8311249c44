"""Replay training steps as CUDA graphs."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from dg_lightning.gates import gate_layers
from dg_lightning.training.optimizers import has_scaler, restore_fused
from dg_lightning.training.step_logging import is_logged_step


class DeviceScalars:
    """Numbers in a device tensor that is updated in place.

    A captured step always reads the tensor that it was recorded with. Only numbers that have
    changed are written, and the host never waits for the device.

    >>> import torch
    >>> weight = DeviceScalars([0.1])
    >>> tensor = weight.on(torch.zeros(()))
    >>> weight.set([0.5])
    >>> tensor
    tensor([0.5000])
    """

    def __init__(self, values: Sequence[float] = ()) -> None:
        self._values = list(values)
        self._tensor: Tensor | None = None

    def set(self, values: Sequence[float]) -> None:
        """Update the numbers that have changed."""
        before, self._values = self._values, list(values)
        if self._tensor is None or before == self._values:
            return
        if len(before) != len(self._values):
            self._tensor = None
            return
        for entry, old, new in zip(self._tensor, before, self._values, strict=True):
            if old != new:
                entry.fill_(new)

    def on(self, like: Tensor) -> Tensor:
        """Return the numbers as a tensor with the device and dtype of `like`."""
        kept = self._tensor
        if kept is None or (kept.device, kept.dtype) != (like.device, like.dtype):
            kept = self._tensor = like.new_tensor(self._values)
        return kept


_MAX_GRAPHS = 32  # maximum number of recorded passes, and of recorded updates


class CannotCaptureError(RuntimeError):
    """Raised if a step cannot be captured in a CUDA graph."""


class _Pass(NamedTuple):
    """The graph of a forward and backward pass, with its inputs and results."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Any]
    values: dict[str, Tensor]
    gates: list[dict[str, Any]]
    gradients: list[Tensor | None]


class StepGraphs:
    """Records a module's training steps and replays them.

    A step has two graphs: the *pass* (losses, penalties, backward) and the *update* (masks,
    clipping, scaler, optimizer), because one update may follow several passes. A new kind of step
    runs eagerly once, is recorded the second time, and is replayed from then on. The kind covers
    everything that Python decides: shapes, gate floors, which parameters have gradients, optimizer
    constants, and the values that callbacks return from `prepare_step`. Numbers that change between
    steps are kept in tensors that are updated in place.

    Args:
        module: The module whose `losses(batch)` is recorded.
        trainer: The module's Trainer, which must have one optimizer.
    """

    def __init__(self, module: Any, trainer: Any) -> None:
        self.module, self.trainer, self.optimizer = module, trainer, trainer.optimizers[0]
        self.replayed = False  # whether the current pass was replayed
        self._kind: Hashable = None  # key of the current step, None to run it eagerly
        self._passes: dict[Hashable, _Pass | None] = {}
        self._updates: dict[Hashable, torch.cuda.CUDAGraph | None] = {}
        self._callbacks = [c for c in trainer.callbacks if hasattr(c, "prepare_step")]
        self._gates: list[Any] = list(gate_layers(module, required=False).values())
        self._children = list(module.modules())
        self._places: tuple[Any, ...] = ()
        self._gradients: dict[Tensor, Tensor] = {}
        self._learning_rates = DeviceScalars()
        self._is_full = False
        self._device = trainer.strategy.root_device
        self._stream = torch.cuda.Stream(self._device)
        # Graphs in the same pool overwrite each other's results, but the update must not
        # overwrite those of a pass.
        self._pass_pool = torch.cuda.graph_pool_handle()
        self._update_pool = torch.cuda.graph_pool_handle()

    # The pass.

    def run_pass(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Return the losses of a batch. A replay also computes the gradients."""
        self.replayed = False
        self._invalidate_on_realloc(batch_idx)
        first = batch_idx % self.trainer.accumulate_grad_batches == 0
        self._kind, leaves = self._graph_key(), _flatten_batch(batch)
        before = None if first else self._with_gradient()
        key = (self._kind, before, *map(self._describe, leaves))
        if self._kind is None or self._is_new(self._passes, key):
            values: dict[str, Tensor] = self.module.losses(batch)
            return values
        recorded = self._passes[key]
        if recorded is None:
            recorded = self._passes[key] = self._record_pass(batch, first)
        for buffer, leaf in zip(recorded.inputs, leaves, strict=True):
            if isinstance(leaf, Tensor):
                buffer.copy_(leaf, non_blocking=True)
        recorded.graph.replay()
        self.replayed = True
        for owner, attributes in zip(self._gates, recorded.gates, strict=True):
            for name, value in attributes.items():
                if getattr(owner, name) is not value:
                    setattr(owner, name, value)
        self._set_gradients(recorded.gradients)
        return recorded.values

    def _invalidate_on_realloc(self, batch_idx: int) -> None:
        """Discard all graphs if their tensors have moved in memory."""
        if batch_idx == 0 or not self._places:
            self._parameters = list(self.module.parameters())
            self._tensors = [*self._parameters, *self.module.buffers()]
        places = (id(self.optimizer.state), *(tensor.data_ptr() for tensor in self._tensors))
        if places != self._places:
            self._places = places
            self._passes.clear()
            self._updates.clear()

    def _graph_key(self) -> Hashable:
        """Return a key for the current kind of step, or None to run it eagerly."""
        trainer = self.trainer
        asked = [callback.prepare_step(trainer) for callback in self._callbacks]
        if any(kind is None for kind in asked):
            return None
        return (
            *asked,
            trainer.accumulate_grad_batches,
            trainer.gradient_clip_val,
            trainer.gradient_clip_algorithm,
            tuple(getattr(gate, "_floor", None) for gate in self._gates),
            tuple(child.training for child in self._children),
            tuple(parameter.requires_grad for parameter in self._parameters),
            tuple(_constants(group) for group in self.optimizer.param_groups),
        )

    def _describe(self, leaf: Any) -> Hashable:
        """Return the properties of a leaf on which a recorded pass depends."""
        if isinstance(leaf, Tensor) and leaf.device == self._device:
            return leaf.shape, leaf.dtype
        plain = leaf is None or isinstance(leaf, str | int | float)
        return leaf if plain else object()  # a unique key, so the pass is never recorded

    def _is_new(self, known: dict[Hashable, Any], key: Hashable) -> bool:
        if key in known:
            return False
        if len(known) < _MAX_GRAPHS:
            known[key] = None
        elif not self._is_full:
            self._is_full = True
            rank_zero_info(
                f"{type(self.module).__name__}: more than {_MAX_GRAPHS} kinds of steps occurred "
                "(shapes, plain values in batches, optimizer settings). Further kinds run eagerly."
            )
        return True

    def _record_pass(self, batch: Any, first: bool) -> _Pass:
        before = [parameter.grad for parameter in self._parameters]
        inputs = apply_to_collection(batch, Tensor, torch.clone)
        if first:
            self._set_gradients([None] * len(before))
        try:
            with self._recording(self._pass_pool) as graph:
                values = self.module.losses(inputs)
                with torch.autocast(self._device.type, enabled=False):  # as in Lightning
                    loss = values["loss"] / self.trainer.accumulate_grad_batches
                    self.trainer.strategy.backward(loss, self.optimizer)
        except CannotCaptureError:
            self._set_gradients(before)
            raise
        return _Pass(
            graph,
            _flatten_batch(inputs),
            {name: value.detach() for name, value in values.items()},
            [_recorded(gate) for gate in self._gates],
            [parameter.grad for parameter in self._parameters],
        )

    # The gradients. Graphs write each one to a fixed tensor.

    def copy_grads_to_static(self) -> None:
        """Copy the gradients of a backward pass to their fixed tensors."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                place = self._gradients.setdefault(parameter, parameter.grad)
                if place is not parameter.grad:
                    place.copy_(parameter.grad)
                    parameter.grad = place

    def _set_gradients(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def _with_gradient(self) -> tuple[bool, ...]:
        return tuple(parameter.grad is not None for parameter in self._parameters)

    # The update.

    def run_update(self, step: Callable[[], None]) -> None:
        """Run the optimizer step by calling `step` or replaying its graph."""
        self._learning_rates.set([float(g["lr"]) for g in self.optimizer.param_groups])
        key = (self._kind, self._with_gradient())
        if self._kind is None or self._is_new(self._updates, key):
            with self._device_settings(capturable=False):
                step()
            return
        graph = self._updates[key]
        if graph is None:
            with self._device_settings(capturable=True), self._recording(self._update_pool) as new:
                step()
            graph = self._updates[key] = new
        graph.replay()

    @contextmanager
    def _device_settings(self, capturable: bool) -> Iterator[None]:
        """Keep the optimizer's learning rates on the device during a step."""
        groups = self.optimizer.param_groups
        before = [{key: group[key] for key in group if key != "params"} for group in groups]
        rates = self._learning_rates.on(torch.empty(0, device=self._device))
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
            if capturable and "capturable" in group:  # fused optimizers can be captured
                group["capturable"] = True
        try:
            yield
        finally:
            for group, settings in zip(groups, before, strict=True):
                group.update(settings)

    @contextmanager
    def _recording(self, pool: Any) -> Iterator[torch.cuda.CUDAGraph]:
        """Record device work in a graph without running it."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        try:
            with torch.cuda.graph(graph, pool, self._stream, "thread_local"):
                yield graph
        except RuntimeError as error:
            torch.cuda.set_stream(stream)
            # Capturing a complete graph resets the capture state of the random generators.
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                torch.rand(1, device=self._device)
            first: BaseException = error  # later errors only report the broken graph
            while first.__context__ is not None:
                first = first.__context__
            raise CannotCaptureError(str(first).partition("\n")[0]) from error


def _flatten_batch(batch: Any) -> list[Any]:
    """Flatten a batch, and put each container's type and size before its values."""
    if isinstance(batch, Mapping):
        inside = [leaf for key, value in batch.items() for leaf in (key, *_flatten_batch(value))]
    elif isinstance(batch, list | tuple):
        inside = [leaf for value in batch for leaf in _flatten_batch(value)]
    else:
        return [batch]
    return [f"{type(batch).__name__} of {len(batch)}", *inside]


def _recorded(gate: Any) -> dict[str, Any]:
    """Return the values that a gate recorded in its last forward pass, detached."""
    names = getattr(gate, "recorded", ("probability", "gate"))
    values = {name: getattr(gate, name) for name in names}
    return {n: v.detach() if isinstance(v, Tensor) else v for n, v in values.items()}


def _constants(group: dict[str, Any]) -> Hashable:
    """Return the settings of a parameter group that are not updated in place."""
    return tuple(repr(value) for key, value in group.items() if key not in ("params", "lr"))


# Hooks that Lightning calls in the recorded part of a step.
_RECORDED = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
_OWN = ("training_step", "backward", "optimizer_zero_grad", "optimizer_step")


class CapturedSteps(pl.LightningModule):
    """Base class of modules whose training steps are replayed as CUDA graphs.

    In a small net, Python and kernel launches take most of a step's time. A subclass defines
    `losses(batch)` instead of `training_step`. Forward, backward, penalties, clipping and the
    optimizer step are then recorded once and replayed. Learning rates are rounded to float32. If
    rounding does not change them, results are bit-for-bit identical to eager training. On a CPU, or
    if a step cannot be recorded, the module logs the reason and trains eagerly.

    `losses` must do the same for all batches of the same shape, because a replay repeats the Python
    decisions, Python random numbers and attribute values of the recorded step. Capturing needs one
    device, automatic optimization and an optimizer that is `fused` or `capturable`. A subclass that
    overrides `on_train_start` must call `super().on_train_start()`.

    A callback with hooks between `training_step` and the optimizer step prevents capturing, unless
    it has a method `prepare_step(trainer)`. This method is called before every captured pass. It
    writes changing numbers into device tensors, and returns a hashable value that covers all Python
    decisions in the hooks, or None to run the step eagerly. Hooks around the backward pass are
    recorded. They are also called in replays, but must do nothing there. To detect a replay, call
    `dg_lightning.training.is_replayed(pl_module)`.

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
    >>> Regression().cuda_graphs
    True
    """

    cuda_graphs = True  # whether to record steps
    _graphs: StepGraphs | None = None  # set while training

    def losses(self, batch: Any) -> dict[str, Tensor]:
        """Return the `loss` to differentiate, and further values to log."""
        raise NotImplementedError(f"{type(self).__name__} must define `losses(batch)`.")

    def log_losses(self, values: dict[str, Tensor]) -> None:
        """Log the values from `losses` as `train/<name>`."""
        for name, value in values.items():
            self.log(f"train/{name}", value.detach(), prog_bar=name == "loss")

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        values: dict[str, Tensor] = self._run_captured(
            lambda: self.losses(batch),
            lambda graphs: graphs.run_pass(batch, batch_idx),
        )
        check_losses(values, type(self).__name__)
        # A compiled step that depended on the batch index would be recompiled.
        if torch.compiler.is_compiling() or self._is_logged_step():
            self.log_losses(values)
        return values["loss"]

    def _is_logged_step(self) -> bool:
        """Return True if this step is logged, or ends the epoch."""
        try:
            trainer = self.trainer
        except RuntimeError:  # no Trainer is attached
            return False
        return is_logged_step(trainer) or trainer.is_last_batch

    def _run_captured(
        self, as_usual: Callable[[], Any], captured: Callable[[StepGraphs], Any]
    ) -> Any:
        """Run a step with graphs if possible, otherwise eagerly."""
        if self._graphs is None:
            return as_usual()
        try:
            return captured(self._graphs)
        except CannotCaptureError as error:
            self._log_capture_blocker(f"recording failed: {error}")
            self._graphs = None
            return as_usual()

    @override
    def on_train_start(self) -> None:
        self._graphs = None
        if self.cuda_graphs:
            for optimizer in self.trainer.optimizers:
                restore_fused(optimizer)
            if (reason := capture_blocker(self, self.trainer)) is None:
                self._graphs = StepGraphs(self, self.trainer)
            else:
                self._log_capture_blocker(reason)

    def _log_capture_blocker(self, reason: str) -> None:
        rank_zero_info(f"{type(self).__name__}: steps are not captured, because {reason}")

    @override
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if not is_replayed(self):
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    @override
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if not is_replayed(self):
            super().backward(loss, *args, **kwargs)
            if self._graphs is not None:
                self._graphs.copy_grads_to_static()

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
        self._run_captured(done, lambda graphs: graphs.run_update(done))

    @override
    def teardown(self, stage: str) -> None:
        self._graphs = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_graphs": None}  # graphs cannot be copied or pickled


def check_losses(values: Any, name: str) -> None:
    """Check that `losses` returned a dict of tensors with a `loss`."""
    if not isinstance(values, dict) or not isinstance(values.get("loss"), Tensor):
        got = list(values) if isinstance(values, dict) else type(values).__name__
        raise TypeError(f"`{name}.losses` must return a dict with a tensor `loss`, got {got}.")
    for key, value in values.items():
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise TypeError(f"`{name}.losses` must return only tensors, got {kind} for {key!r}.")


def is_replayed(module: Any) -> bool:
    """Return True if the gradients of the current pass come from a graph."""
    graphs = getattr(module, "_graphs", None)
    return graphs is not None and bool(graphs.replayed)


def capture_blocker(module: pl.LightningModule, trainer: Any) -> str | None:
    """Return why steps cannot be captured, or None if no reason is known."""
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return f"a CUDA device is needed, got {device.type}."
    if not isinstance(trainer.strategy, SingleDeviceStrategy):
        return f"a single device is needed, got {type(trainer.strategy).__name__}."
    if not module.automatic_optimization or len(trainer.optimizers) != 1:
        return "automatic optimization with one optimizer is needed."
    if torch.is_anomaly_enabled():
        return "`detect_anomaly` inspects every operation."
    groups, kind = trainer.optimizers[0].param_groups, type(trainer.optimizers[0]).__name__
    if not all(group.get("fused") or group.get("capturable") for group in groups):
        return f"{kind} is neither `fused` nor `capturable`: set `fused=True`."
    if has_scaler(trainer) and not all(group.get("fused") for group in groups):
        return f"{kind} is not `fused`, so every step would wait for the loss scaler."
    clipping = type(module).configure_gradient_clipping.__module__
    if clipping.split(".")[0] not in ("lightning", "pytorch_lightning", "dg_lightning"):
        return f"{type(module).__name__} overrides `configure_gradient_clipping`."
    for method in _OWN:
        own = getattr(type(module), method) is not getattr(CapturedSteps, method)
        if own or method in vars(module):  # torch.compile sets the method on the instance
            return f"{type(module).__name__} overrides `{method}`."
    for hooked in (module, *trainer.callbacks):
        parent = pl.LightningModule if hooked is module else pl.Callback
        for hook in _RECORDED:
            if is_overridden(hook, hooked, parent) and not hasattr(hooked, "prepare_step"):
                return f"a replay would skip `{type(hooked).__name__}.{hook}`."
    for name, child in module.named_modules():
        before, after = child._forward_pre_hooks, child._forward_hooks
        hooks = [*before.values(), *after.values(), *child._backward_hooks.values()]
        hooks += child._backward_pre_hooks.values()
        # Hooks of our gates only need to run while a step is recorded.
        if not all(str(hook.__module__).startswith("dg_lightning.") for hook in hooks):
            return f"a replay would skip the hooks of {name or 'the module'}."
    return None
