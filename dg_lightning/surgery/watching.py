"""Compare the outputs of a model before and after a change."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dg_lightning.compute.macs import as_matrix, unit_axis
from dg_lightning.surgery.recording import arguments_of, call_model, with_first_tensor

if TYPE_CHECKING:
    from dg_lightning.surgery.finding import Units

_NOISE_SCALE = 10.0  # noise added to changed rows, in standard deviations of the weights
_ATTENTION = {
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
}


class OutputComparison:
    """Compares the outputs of a model and some of its modules before and after changes.

    Args:
        model: The model.
        examples: Example inputs for the model.
        varied: Whether to replace constant inputs, such as zeros, with noise. Constant inputs can
            hide differences.
    """

    def __init__(self, model: nn.Module, examples: Sequence[Any], varied: bool = True) -> None:
        self.model = model
        self.arguments = [arguments_of(model, example) for example in examples]
        if varied:
            self.arguments = apply_to_collection(self.arguments, Tensor, _varied)
        self._mode = _TrialMode()

    def of(self, model: nn.Module) -> "OutputComparison":
        """Return a comparison for another model with the same inputs."""
        other = copy.copy(self)
        other.model, other._mode = model, _TrialMode()
        other._mode.empty = self._mode.empty
        return other

    def look(self, *names: str, training: bool = False) -> list[Tensor]:
        """Return the outputs of the model and the named modules."""
        self._mode.empty = 0
        outputs: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            outputs.append(output.detach().clone())  # the model may change it in place

        hooks = [self.model.get_submodule(name).register_forward_hook(keep) for name in names]
        try:
            for args, kwargs in self.arguments:
                outputs += call_model(self.model, args, kwargs, self._mode, training)
        finally:
            for hook in hooks:
                hook.remove()
        return outputs

    def is_same(self, expected: list[Tensor], *names: str) -> bool:
        """Return True if the outputs equal those of an earlier `look`."""
        self._mode.most_empty = self._mode.empty  # allow as many as before the change
        try:
            outputs = self.look(*names)
        except Exception:  # a model whose shapes do not match may raise anything
            return False
        finally:
            self._mode.empty, self._mode.most_empty = self._mode.most_empty, None
        return len(outputs) == len(expected) and all(map(_are_close, outputs, expected))

    def unused_parameters(self) -> list[str]:
        """Return the names of the parameters that no `look` has used."""
        used = self._mode.parameters
        return [name for name, p in self.model.named_parameters() if id(p) not in used]


class _TrialMode(TorchFunctionMode):
    """Records which parameters are used, and rejects new empty tensors.

    Grouped attention without key heads divides by zero in native code, which kills the process.
    Attention may run in compiled code, so the tensors that lead to it are checked too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parameters: set[int] = set()
        self.empty = 0  # number of empty tensors created
        self.most_empty: int | None = None  # maximum number of empty tensors, if limited

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors: list[Tensor] = []
        apply_to_collection((args, kwargs), Tensor, tensors.append)
        self.parameters.update(id(t) for t in tensors if isinstance(t, nn.Parameter))
        if func in _ATTENTION and any(t.ndim > 2 and t.shape[-3] == 0 for t in tensors[:3]):
            raise ValueError("Attention needs at least one head, got none.")
        made = func(*args, **kwargs)
        outputs: list[Tensor] = []
        apply_to_collection(made, Tensor, outputs.append)
        self.empty += sum(0 in output.shape for output in outputs)
        if self.most_empty is not None and self.empty > self.most_empty:
            raise ValueError("The change must not create empty tensors.")
        return made


def units_read_elsewhere(
    model: nn.Module, examples: Sequence[Any], units: "Mapping[str, Units]"
) -> set[str]:
    """Return the consumers whose units affect outputs even when closed.

    Autograd does not show every use, such as a top-k mask, a detached norm or output, or a weight
    that is read twice. So half of the units are closed, and noise is added to the weights that
    produce them. This must not change any output. The other half is then tested in the same way.
    """
    watch = OutputComparison(model, examples, varied=False)

    def search(names: list[str]) -> set[str]:
        chosen = {name: units[name] for name in names}
        if not names or all(
            _closes_fully(watch, chosen, half, training)
            for training in (False, True)
            for half in (0, 1)
        ):
            return set()
        middle = len(names) // 2
        return search(names[:middle]) | search(names[middle:]) if middle else set(names)

    with _without_zeros(model):
        return search(list(units))


@contextmanager
def _without_zeros(model: nn.Module) -> Iterator[None]:
    """Fill all-zero parameters with noise temporarily, because zeros hide dependencies."""
    generator = torch.Generator("cpu").manual_seed(0)
    zeros = [p for p in model.parameters() if p.is_floating_point() and not p.any()]
    try:
        for p in zeros:
            p.data.copy_(0.1 * torch.randn(p.shape, generator=generator, device="cpu"))
        yield
    finally:
        for p in zeros:
            p.data.zero_()


@torch.no_grad()
def _closes_fully(
    watch: OutputComparison, units: "Mapping[str, Units]", half: int, training: bool
) -> bool:
    """Return True if changing the weights of closed units changes no output.

    Outputs that differ from run to run are ignored. Training mode is ignored if the model fails in
    that mode.
    """
    model, generator = watch.model, torch.Generator("cpu").manual_seed(0)
    with ExitStack() as stack:
        closed = {}
        for name, own in units.items():
            order = torch.randperm(own.blocks, generator=generator, device="cpu")
            closed[name] = order % 2 == half if own.blocks > 1 else order == 0
            inputs = closed[name].repeat_interleave(own.block_size)
            stack.callback(_close_inputs(model.get_submodule(name), inputs).remove)
        try:
            expected, again = (watch.look(*units, training=training) for _ in range(2))
        except Exception:  # for example batch norm on a single sample
            return training
        for name, own in units.items():
            for producer, blocks in own.producers.items():
                rows = closed[name][blocks]
                stack.enter_context(_changed_rows(model.get_submodule(producer), rows, generator))
        try:
            found = watch.look(*units, training=training)
        except Exception:  # a model may validate its values
            return False
        return not any(
            _are_close(other, wanted) and not _are_close(output, wanted)
            for output, other, wanted in zip(found, again, expected, strict=False)
        )


def _close_inputs(consumer: nn.Module, closed: Tensor) -> Any:
    axis = unit_axis(consumer)

    def close(module: nn.Module, args: Any, kwargs: Any) -> Any:
        def masked(x: Tensor) -> Tensor:
            return x.movedim(axis, -1).masked_fill(closed.to(x.device), 0).movedim(-1, axis)

        return with_first_tensor(args, kwargs, masked)

    return consumer.register_forward_pre_hook(close, with_kwargs=True)


@contextmanager
def _changed_rows(producer: Any, rows: Tensor, generator: torch.Generator) -> Iterator[None]:
    """Add noise to the weights and biases of some outputs temporarily."""
    bias = getattr(producer, "bias", None)
    # `.data` hides the change from autograd graphs that need these weights.
    parts = [as_matrix(producer, producer.weight.data), *([] if bias is None else [bias.data])]
    index = rows.nonzero().flatten().to(producer.weight.device)
    before = [part[index] for part in parts]
    size = parts[0].float().std(unbiased=False)
    scale = _NOISE_SCALE * torch.where(size > 0, size, 1.0)
    try:
        for part, old in zip(parts, before, strict=True):
            noise = torch.randn(old.shape, generator=generator, device="cpu").to(old)
            part[index] = old + noise * scale.to(old)
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
    # Zeros from masks would bias the typical size.
    sizes = wanted[wanted.isfinite() & (wanted != 0)].abs().float()
    typical = float(sizes.median()) if sizes.numel() else 0.0
    close = torch.isclose(
        output.float(), wanted.float(), tolerance, 0.1 * tolerance * typical, equal_nan=True
    )
    return bool(close.all())
