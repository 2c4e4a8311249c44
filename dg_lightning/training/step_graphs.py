"""Training steps as CUDA graphs, recorded once for each kind of step and replayed."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from dg_lightning.gates import gate_layers
from dg_lightning.training.device_numbers import DeviceNumbers

__all__ = ["CannotCaptureError", "StepGraphs"]

_MOST_KINDS = 32  # of passes, and of updates: each has its graph


class CannotCaptureError(RuntimeError):
    """A step did something that a graph cannot hold."""


class _Pass(NamedTuple):
    """A recorded forward and backward pass, and what it leaves behind."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Any]
    values: dict[str, Tensor]
    gates: list[dict[str, Any]]
    gradients: list[Tensor | None]


class StepGraphs:
    """Records the steps of a module and replays them.

    A step is two graphs: the *pass* (losses, penalties, backward) and the *update* (masks,
    clipping, scaler, optimizer), because several passes may make one update. A kind of step is run
    as usual the first time, recorded the second time and replayed from then on. What tells kinds
    apart is what Python decides: shapes, floors, which parameters have a gradient, constants of the
    optimizer, and what callbacks say in `prepare_step`. Numbers that change from step to step are
    tensors that are written in place.

    Args:
        module: The module; `losses(batch)` is recorded.
        trainer: Its Trainer, with one optimizer.
    """

    def __init__(self, module: Any, trainer: Any) -> None:
        self.module, self.trainer, self.optimizer = module, trainer, trainer.optimizers[0]
        self.replayed = False  # whether the current pass was replayed
        self._kind: Hashable = None  # of the current step; None if it must run as usual
        self._passes: dict[Hashable, _Pass | None] = {}
        self._updates: dict[Hashable, torch.cuda.CUDAGraph | None] = {}
        self._callbacks = [c for c in trainer.callbacks if hasattr(c, "prepare_step")]
        self._gates: list[Any] = list(gate_layers(module, required=False).values())
        self._children = list(module.modules())
        self._places: tuple[Any, ...] = ()
        self._gradients: dict[Tensor, Tensor] = {}
        self._rates = DeviceNumbers()
        self._is_full = False
        self._device = trainer.strategy.root_device
        self._stream = torch.cuda.Stream(self._device)
        # Graphs of a pool overwrite each other's results. Those of a pass must outlive the update.
        self._pass_pool = torch.cuda.graph_pool_handle()
        self._update_pool = torch.cuda.graph_pool_handle()

    # The pass.

    def run_pass(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Return the losses of a batch, whose gradients are there already if it was replayed."""
        self.replayed = False
        self._forget_if_replaced(batch_idx)
        first = batch_idx % self.trainer.accumulate_grad_batches == 0
        self._kind, leaves = self._kind_of_step(), _leaves(batch)
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

    def _forget_if_replaced(self, batch_idx: int) -> None:
        """Forget all graphs if tensors that they work on are no longer where they were."""
        if batch_idx == 0 or not self._places:
            self._parameters = list(self.module.parameters())
            self._tensors = [*self._parameters, *self.module.buffers()]
        places = (id(self.optimizer.state), *(tensor.data_ptr() for tensor in self._tensors))
        if places != self._places:
            self._places = places
            self._passes.clear()
            self._updates.clear()

    def _kind_of_step(self) -> Hashable:
        """Return all that Python decides in a step, or None if a callback wants it as usual."""
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
        """Return what a recorded pass depends on: the shape of a tensor, or a plain value."""
        if isinstance(leaf, Tensor) and leaf.device == self._device:
            return leaf.shape, leaf.dtype
        plain = leaf is None or isinstance(leaf, str | int | float)
        return leaf if plain else object()  # equal to nothing: never recorded

    def _is_new(self, known: dict[Hashable, Any], key: Hashable) -> bool:
        if key in known:
            return False
        if len(known) < _MOST_KINDS:
            known[key] = None
        elif not self._is_full:
            self._is_full = True
            rank_zero_info(
                f"{type(self.module).__name__}: there are more than {_MOST_KINDS} kinds of steps "
                "(shapes, plain values in batches, settings of the optimizer); others than these "
                "are not captured."
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
                with torch.autocast(self._device.type, enabled=False):  # as behind `training_step`
                    loss = values["loss"] / self.trainer.accumulate_grad_batches
                    self.trainer.strategy.backward(loss, self.optimizer)
        except CannotCaptureError:
            self._set_gradients(before)
            raise
        return _Pass(
            graph,
            _leaves(inputs),
            {name: value.detach() for name, value in values.items()},
            [_recorded(gate) for gate in self._gates],
            [parameter.grad for parameter in self._parameters],
        )

    # Gradients have one place each, to which graphs write.

    def keep_gradients(self) -> None:
        """Move the gradients of a backward pass to their places."""
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
        """Make an optimizer step, by `step` or by its graph."""
        self._rates.set("lr", [float(group["lr"]) for group in self.optimizer.param_groups])
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
        """Give the optimizer its learning rates on the device, for a step."""
        groups = self.optimizer.param_groups
        before = [{key: group[key] for key in group if key != "params"} for group in groups]
        rates = self._rates.get("lr", torch.empty(0, device=self._device))
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
            if capturable and "capturable" in group:  # which fused optimizers are
                group["capturable"] = True
        try:
            yield
        finally:
            for group, settings in zip(groups, before, strict=True):
                group.update(settings)

    @contextmanager
    def _recording(self, pool: Any) -> Iterator[torch.cuda.CUDAGraph]:
        """Record what is done on the device, which does not happen until it is replayed."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        try:
            with torch.cuda.graph(graph, pool, self._stream, "thread_local"):
                yield graph
        except RuntimeError as error:
            torch.cuda.set_stream(stream)
            with torch.cuda.graph(torch.cuda.CUDAGraph()):  # generators wait for a graph to end
                torch.rand(1, device=self._device)
            first: BaseException = error  # those after it are of the broken graph
            while first.__context__ is not None:
                first = first.__context__
            raise CannotCaptureError(str(first).partition("\n")[0]) from error


def _leaves(batch: Any) -> list[Any]:
    """Return the tensors and other values of a batch, each container announced by its size."""
    if isinstance(batch, Mapping):
        inside = [leaf for key, value in batch.items() for leaf in (key, *_leaves(value))]
    elif isinstance(batch, list | tuple):
        inside = [leaf for value in batch for leaf in _leaves(value)]
    else:
        return [batch]
    return [f"{type(batch).__name__} of {len(batch)}", *inside]


def _recorded(gate: Any) -> dict[str, Any]:
    """Return what a gate has recorded in its last forward pass, without its graph."""
    names = getattr(gate, "recorded", ("probability", "gate"))
    values = {name: getattr(gate, name) for name in names}
    return {n: v.detach() if isinstance(v, Tensor) else v for n, v in values.items()}


def _constants(group: dict[str, Any]) -> Hashable:
    """Return the settings of a parameter group that are not written in place."""
    return tuple(repr(value) for key, value in group.items() if key not in ("params", "lr"))
