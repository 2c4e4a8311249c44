"""Compares what a model computes before and after a change."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dg_lightning.compute.maps import as_matrix, unit_axis
from dg_lightning.surgery.probing import Units
from dg_lightning.surgery.recording import arguments_of, call_model, with_first_tensor

__all__ = ["Watch", "units_read_elsewhere"]

_NOISE_SCALE = 10.0  # of changed rows, in standard deviations of their weights


class Watch:
    """Compares outputs of a model, and of some of its modules, while it is being changed.

    Args:
        model: The model.
        examples: What it is called with. Inputs that are all equal, such as zeros, show too little,
            and are replaced by noise.
    """

    def __init__(self, model: nn.Module, examples: Sequence[Any]) -> None:
        self.model = model
        self.arguments = [
            apply_to_collection(arguments_of(model, example), Tensor, _varied)
            for example in examples
        ]
        self._used = _UsedParameters()

    def look(self, *names: str) -> list[Tensor]:
        """Return the outputs of the model and of some modules."""
        outputs: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            outputs.append(output.clone())  # it may be changed in place

        hooks = [self.model.get_submodule(name).register_forward_hook(keep) for name in names]
        try:
            for args, kwargs in self.arguments:
                outputs += call_model(self.model, args, kwargs, self._used)
        finally:
            for hook in hooks:
                hook.remove()
        return outputs

    def is_same(self, expected: list[Tensor], *names: str) -> bool:
        """Return True if the outputs are those of an earlier look."""
        try:
            outputs = self.look(*names)
        except (RuntimeError, ValueError, AssertionError, IndexError, TypeError):
            return False  # sizes that do not fit
        return len(outputs) == len(expected) and all(map(_are_close, outputs, expected))

    def unused_parameters(self) -> list[str]:
        """Return the names of the parameters that no look has used."""
        used = self._used.ids
        return [name for name, p in self.model.named_parameters() if id(p) not in used]


class _UsedParameters(TorchFunctionMode):
    """Records which parameters operations read, and refuses attention without heads.

    Grouped attention over no key heads divides by zero in native code, which ends the process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors: list[Tensor] = []
        apply_to_collection((args, kwargs), Tensor, tensors.append)
        self.ids.update(id(t) for t in tensors if isinstance(t, nn.Parameter))
        if func is F.scaled_dot_product_attention and not all(t.numel() for t in tensors):
            raise ValueError("Attention over no heads.")
        return func(*args, **kwargs)


def units_read_elsewhere(
    model: nn.Module, examples: Sequence[Any], units: Mapping[str, Units]
) -> set[str]:
    """Return the consumers of units that change outputs even where they are closed.

    Autograd does not show every use: a top-k mask, a detached norm or output, a weight that is read
    a second time. So half of the units are closed, and the rows that make them are changed.
    """
    watch = Watch(model, examples)
    if not units or _closes_fully(watch, units):
        return set()
    return {name for name, own in units.items() if not _closes_fully(watch, {name: own})}


@torch.no_grad()
def _closes_fully(watch: Watch, units: Mapping[str, Units]) -> bool:
    """Return True if the rows of closed units can be changed without moving any output."""
    model, generator = watch.model, torch.Generator("cpu").manual_seed(0)
    with ExitStack() as stack:
        closed = {}
        for name, own in units.items():
            order = torch.randperm(own.blocks, generator=generator, device="cpu")
            closed[name] = torch.zeros(own.blocks, dtype=torch.bool, device="cpu")
            closed[name][order[: -(-own.blocks // 2)]] = True
            inputs = closed[name].repeat_interleave(own.block_size)
            stack.callback(_close_inputs(model.get_submodule(name), inputs).remove)
        expected = watch.look(*units)
        for name, own in units.items():
            for producer, blocks in own.producers.items():
                rows = closed[name][blocks]
                stack.enter_context(_changed_rows(model.get_submodule(producer), rows, generator))
        return watch.is_same(expected, *units)


def _close_inputs(consumer: nn.Module, closed: Tensor) -> Any:
    axis = unit_axis(consumer)

    def close(module: nn.Module, args: Any, kwargs: Any) -> Any:
        def masked(x: Tensor) -> Tensor:
            return x.movedim(axis, -1).masked_fill(closed.to(x.device), 0).movedim(-1, axis)

        return with_first_tensor(args, kwargs, masked)

    return consumer.register_forward_pre_hook(close, with_kwargs=True)


@contextmanager
def _changed_rows(producer: Any, rows: Tensor, generator: torch.Generator) -> Iterator[None]:
    """Add noise to some outputs' weights and biases for a while."""
    bias = getattr(producer, "bias", None)
    # Behind the back of graphs, which may need the weights for gradients.
    parts = [as_matrix(producer, producer.weight.data), *([] if bias is None else [bias.data])]
    index = rows.nonzero().flatten().to(producer.weight.device)
    before = [part[index] for part in parts]
    try:
        for part, old in zip(parts, before, strict=True):
            noise = torch.randn(old.shape, generator=generator, device="cpu").to(old)
            size = parts[0].float().std(unbiased=False)
            part[index] = old + noise * _NOISE_SCALE * torch.where(size > 0, size, 1.0).to(old)
        yield
    finally:
        for part, old in zip(parts, before, strict=True):
            part[index] = old


def _varied(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point() or tensor.numel() < 2 or tensor.min() < tensor.max():
        return tensor
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(tensor.shape, generator=generator, device="cpu").to(tensor)


def _are_close(output: Tensor, wanted: Tensor) -> bool:
    if output.shape != wanted.shape:
        return False
    if not wanted.is_floating_point():
        return torch.equal(output, wanted)
    tolerance = 1e-3 if wanted.dtype.itemsize >= 4 else 0.05
    sizes = wanted[wanted.isfinite() & (wanted != 0)].abs().float()  # whatever is masked
    typical = float(sizes.median()) if sizes.numel() else 0.0
    close = torch.isclose(
        output.float(), wanted.float(), tolerance, 0.1 * tolerance * typical, equal_nan=True
    )
    return bool(close.all())
