"""Record a run of a model, so that autograd can show which layers feed which."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from dg_lightning.compute.macs import gate_submodules, is_linear_map

_LOADERS = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}


@dataclass(frozen=True, eq=False)
class Call:
    """A call to a linear layer or an embedding.

    Args:
        name: Name of the module.
        module: The module.
        x: The module's input, or None for an embedding.
        leaf: The module's output, as a leaf of the autograd graph.
    """

    name: str
    module: Any
    x: Tensor | None
    leaf: Tensor


@dataclass
class Recording:
    """The calls, inputs and outputs of one run of a model."""

    calls: list[Call] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)  # model inputs, as leaves
    outputs: list[Tensor] = field(default_factory=list)
    others: list[tuple[str, Tensor]] = field(default_factory=list)  # outputs of other modules

    @property
    def batch(self) -> int:
        """The number of samples, assumed to be the length of the first input."""
        return len(self.inputs[0]) if self.inputs and self.inputs[0].ndim else 1


def arguments_of(model: nn.Module, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments for a model from an example, or from the model's default example."""
    example = offered_example(model) if example is None else example
    if example is None:
        raise ValueError(
            f"{type(model).__name__} must run once to show how its layers are connected: pass an "
            "`example` of its inputs (a tensor, a tuple, or a dict by argument name)."
        )
    # Lightning moves and casts batches, but not examples.
    first = next(model.parameters(), None)
    if first is not None:
        example = move_data_to_device(example, first.device)
    dtypes = _dtypes(model)
    if len(dtypes) == 1 and dtypes <= {torch.float16, torch.bfloat16, torch.float64}:
        (dtype,) = dtypes
        example = apply_to_collection(
            example, Tensor, lambda x: x.to(dtype) if x.dtype == torch.float32 else x
        )
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, list | tuple) else (example,)), {}


def _dtypes(model: nn.Module) -> set[torch.dtype]:
    """Return the dtypes of a model's weights, except for gates."""
    gates = {p for gate in gate_submodules(model) for p in gate.parameters()}
    weights = [p for p in model.parameters() if p not in gates]
    return {p.dtype for p in weights if p.is_floating_point()}


def offered_example(model: nn.Module) -> Any:
    """Return the model's `example_input_array` or `dummy_inputs`, if any."""
    dummy: Any = getattr(model, "dummy_inputs", None)
    # Vision models may inherit the dummy inputs of text models.
    name = getattr(model, "main_input_name", None)
    fits = name is None or (isinstance(dummy, Mapping) and name in dummy)
    example = getattr(model, "example_input_array", None)
    return dummy if example is None and fits else example


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the first argument of a call, by position or by name."""
    first: Tensor = args[0] if args else next(iter(kwargs.values()))
    return first


def with_first_tensor(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call after changing the first one."""
    if args:
        return (change(args[0]), *args[1:]), dict(kwargs)
    name = next(iter(kwargs))
    return args, {**kwargs, name: change(kwargs[name])}


def call_model(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    context: AbstractContextManager[Any] | None = None,
    training: bool = False,
) -> list[Tensor]:
    """Run a model without changing it, and return all tensors, arrays and numbers in its output.

    Args:
        model: The model.
        args: Positional arguments.
        kwargs: Keyword arguments.
        context: A context manager to run the model in.
        training: Whether to run the model in training mode.
    """
    # Some models compute gradients with respect to their inputs.
    with _temporary_mode(model, training), torch.enable_grad(), context or nullcontext():
        returned = model(*args, **(kwargs or {}))
    return _values_in(returned)


def _values_in(returned: Any) -> list[Tensor]:
    """Return all tensors, arrays and numbers in a model's output, as tensors.

    Other objects, such as key-value caches, are state for later calls and are skipped.
    """
    found: list[Tensor] = []
    pending, seen = [returned], set()
    while pending:
        value = pending.pop()
        if id(value) in seen or isinstance(value, str | bytes | nn.Module | type):
            continue
        if isinstance(value, Tensor):
            found.append(value.detach())
        elif isinstance(value, np.ndarray | np.generic | int | float | complex):
            with suppress(TypeError):  # object arrays
                found.append(torch.as_tensor(value))
        else:
            seen.add(id(value))
            if isinstance(value, Mapping):
                pending.extend(reversed(list(value.values())))
            elif isinstance(value, list | tuple):
                pending.extend(reversed(value))
            elif is_dataclass(value):
                pending.extend(getattr(value, f.name) for f in reversed(fields(value)))
    return found


def record(model: nn.Module, example: Any, seed: int = 0, noise_scale: float = 1.0) -> Recording:
    """Run a model once in evaluation mode, and record its calls.

    The output of every linear layer is replaced by a noisy leaf, so autograd graphs end at linear
    layers. The noise makes units differ for any example. The model does not change.

    Args:
        model: The model.
        example: Example inputs for the model.
        seed: Seed for the noise.
        noise_scale: Scale of the noise, in standard deviations of the layer's output.
    """
    args, kwargs = arguments_of(model, example)
    recording = Recording()
    generators: dict[torch.device, torch.Generator] = {}

    def as_leaf(tensor: Tensor) -> Tensor:
        if not tensor.numel():
            return tensor.detach().requires_grad_()
        device = tensor.device
        generator = generators.setdefault(device, torch.Generator(device).manual_seed(seed))
        noise = torch.randn(tensor.shape, generator=generator, device=device)
        size = tensor.float().std(unbiased=False)
        noisy = tensor.float() + noise * torch.where(size > 0, size, 1.0) * noise_scale
        return noisy.to(tensor.dtype).detach().requires_grad_()

    def input_leaf(tensor: Tensor) -> Tensor:
        leaf = tensor.detach().clone()
        recording.inputs.append(leaf)
        return leaf.requires_grad_() if leaf.is_floating_point() else leaf

    def on_map(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor:
        if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
            raise ValueError(
                f"{name} must run with gradients enabled to show how layers are connected: remove "
                "`no_grad` or `inference_mode` around it."
            )
        leaf = as_leaf(output)
        x = None if isinstance(module, nn.Embedding) else first_tensor(args, kwargs)
        recording.calls.append(Call(name, module, x, leaf))
        return leaf.clone()  # the model may change it in place

    def on_other(name: str, output: Any) -> None:
        if isinstance(output, Tensor):
            recording.others.append((name, output))

    handles = []
    inside = gate_submodules(model)
    for name, child in model.named_modules():
        if child in inside:
            continue
        own = [*child.parameters(recurse=False), *child.buffers(recurse=False)]
        if is_linear_map(child) or isinstance(child, nn.Embedding):

            def hook(module: Any, args: Any, kwargs: Any, out: Any, name: str = name) -> Tensor:
                return on_map(name, module, args, kwargs, out)

            handles.append(child.register_forward_hook(hook, with_kwargs=True))
        elif own and not any(map(is_linear_map, child.modules())):

            def watch(module: Any, args: Any, out: Any, name: str = name) -> None:
                on_other(name, out)

            handles.append(child.register_forward_hook(watch))
    try:
        with _temporary_mode(model), torch.enable_grad():
            args, kwargs = apply_to_collection((args, kwargs), Tensor, input_leaf)
            apply_to_collection(model(*args, **kwargs), Tensor, recording.outputs.append)
    finally:
        for handle in handles:
            handle.remove()
    if not recording.outputs:
        raise ValueError(f"{type(model).__name__} must return a tensor for `example`, got none.")
    return recording


@contextmanager
def _temporary_mode(model: nn.Module, training: bool = False) -> Iterator[None]:
    """Set the training mode and disable gradients of parameters temporarily.

    Buffers and random states are restored afterwards, and compiled code runs eagerly.
    """
    modes = [(child, child.training) for child in model.modules()]
    # Some buffers are counters that change even in evaluation mode.
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    flags = [(p, p.requires_grad) for p in model.parameters()]
    drawn = random.getstate(), np.random.get_state()
    try:
        for child, _ in modes:
            child.training = training
        for parameter, _ in flags:
            parameter.requires_grad_(False)
        devices = {p.device for p in model.parameters() if p.is_cuda}
        with (
            torch.random.fork_rng(devices=sorted(device.index for device in devices)),
            torch.compiler.set_stance("force_eager"),
            torch.no_grad(),
        ):
            yield
    finally:
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
        for child, mode in modes:
            child.training = mode
        for parameter, required in flags:
            parameter.requires_grad_(required)
        for buffer, before in buffers:
            buffer.data.copy_(before)  # `.data` hides this from graphs that need the buffer


def check_example(example: Any) -> None:
    """Raise ValueError if an example contains no tensor. None is allowed."""
    tensors: list[Tensor] = []
    apply_to_collection(example, Tensor, tensors.append)
    if example is not None and not tensors:
        raise ValueError(f"`example` must contain a tensor, got {example!r}.")


def first_inputs(datamodule: Any, pl_module: Any, stage: str) -> Any:
    """Return the inputs in the first batch from the DataModule or the module's loader, if any."""
    method = f"{_LOADERS[stage]}_dataloader"
    source: Any = datamodule or pl_module
    if source is pl_module and not is_overridden(method, pl_module):
        return None
    with torch.random.fork_rng(devices=[]):
        batch = next(iter(getattr(source, method)()))
    batch = pl_module.transfer_batch_to_device(batch, pl_module.device, 0)
    return batch[0] if isinstance(batch, list | tuple) else batch
