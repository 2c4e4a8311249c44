"""Export any model to a program that runs without its class, and compare the two."""

import copy
import inspect
import io
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from typing_extensions import override

from dg_lightning.files import atomic_write
from dg_lightning.gates import DynamicGate
from dg_lightning.layers import GatedMLP
from dg_lightning.surgery.recording import arguments_of

ProgramFormat: TypeAlias = Literal["pt2", "onnx"]
_SUFFIXES = {"pt2": ".pt2", "onnx": ".onnx"}
_Arrange: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]
_TOLERANCE = 1e-4  # relative to the largest output


@dataclass(frozen=True)
class ExportedModel:
    """A model that was written as a program.

    Args:
        file: The written file.
        difference: Largest difference of an output, relative to the size of that output.
        any_batch_size: Whether it takes batches of any size, or only of the example's.
        run: Function that runs the file and returns its output tensors in order.
    """

    file: Path
    difference: float
    any_batch_size: bool
    run: Callable[..., list[Tensor]] = field(repr=False)


def export_model(
    model: nn.Module,
    example: Any,
    output: str | Path,
    format: ProgramFormat | None = None,
    preparation: Mapping[str, Any] | None = None,
) -> ExportedModel:
    """Write a model to a file that runs without its class, and compare the file's outputs.

    It is meant for the `model` of `compact` and `prune`, of any class. The program takes batches of
    any size, if the model allows that, and other dimensions as in the example.

    Args:
        model: A model. It is not changed.
        example: Example inputs, as in `find_units`, whose tensors have one entry per sample.
        output: The file to write.
        format: `pt2` (a `torch.export` program) or `onnx`; the default is the file's suffix.
        preparation: How data becomes inputs (features, scaling, classes), stored in the file as
            JSON under `preparation`.

    Raises:
        ValueError: If the model cannot be exported.
        RuntimeError: If the outputs of the file differ from the model's.

    >>> import tempfile
    >>> net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export_model(net, torch.randn(1, 8), folder + "/net.pt2").any_batch_size
    True
    """
    given: Any = format or Path(output).suffix.removeprefix(".")
    if given not in ("pt2", "onnx"):
        raise ValueError(
            f"`output` must end in .pt2 or .onnx, got {str(output)!r}: or pass `format`."
        )
    path = output_file(Path(output), given)
    extra = json.dumps(preparation)
    copied: Any = copy.deepcopy(model).cpu().float().eval()
    if getattr(getattr(copied, "config", None), "use_cache", False):
        copied.config.use_cache = False  # a program returns tensors, no cache of keys and values
    if isinstance(copied, GatedMLP):
        copied = without_unused_inputs(copied)
    args, kwargs = _replaced(arguments_of(copied, example), _on_cpu)
    called = _caller(copied, args, kwargs)
    size = _batch_size((args, kwargs))
    # A batch of one would be taken for a constant.
    args, kwargs = _resized((args, kwargs), size, max(size, 2))
    size = max(size, 2)
    try:
        program = _exported(copied, args, kwargs, size)
    except Exception as error:  # torch raises many kinds of errors here
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{type(model).__name__} cannot be exported ({reason}): save it with `save_compact`."
        ) from error
    with atomic_write(path) as unfinished:
        try:
            if given == "pt2":
                content = io.BytesIO()  # torch aborts the process if it cannot write a file
                torch.export.save(program, content, extra_files={"preparation": extra})
                unfinished.write_bytes(content.getvalue())
            else:
                _write_onnx(program, unfinished, extra)
        except Exception as error:  # writers raise different errors for a full disk
            if not isinstance(error, OSError) and "os error" not in str(error).lower():
                raise
            raise OSError(f"{path} cannot be written ({error}): use another path.") from error
        run = _runner(given, unfinished, called)
        difference = _difference(run, copied, args, kwargs)
        any_size = True
        try:
            more = _resized((args, kwargs), size, size + 1)
            difference = max(difference, _difference(run, copied, *more))
        except Exception:  # a fixed size: torch and onnxruntime raise different errors
            any_size = False
        if not difference < _TOLERANCE:
            raise RuntimeError(
                f"{path} was not written: an output differs by {difference:.1e} of its size from "
                f"the model's, more than {_TOLERANCE:.0e}."
            )
    return ExportedModel(path, difference, any_size, _runner(given, path, called))


def output_file(output: Path, format: ProgramFormat) -> Path:
    """Return the file to write, with the suffix of its format."""
    if not output.name:
        raise ValueError(f"`output` must be a file, got {str(output)!r}: add a file name.")
    suffix = _SUFFIXES[format]
    if output.suffix in _SUFFIXES.values() and output.suffix != suffix:
        other = output.suffix.removeprefix(".")
        raise ValueError(
            f"{output} has the wrong suffix for {format}: use --format {other}, or a file name "
            f"that ends in {suffix}."
        )
    if output.is_dir():
        raise ValueError(f"`output` must be a file, got the folder {str(output)!r}: add a name.")
    return output if output.suffix == suffix else output.with_name(output.name + suffix)


class SelectedInputs(nn.Module):
    """Runs a net on some of its inputs.

    Args:
        net: The net.
        index: Indices of the inputs that it reads.
    """

    index: Tensor

    def __init__(self, net: nn.Module, index: Tensor) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("index", index)

    @override
    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.net(x.flatten(1).index_select(1, self.index))
        return outputs


@torch.no_grad()
def without_unused_inputs(net: GatedMLP) -> nn.Module:
    """Leave out the inputs whose weights are all 0, such as those of a closed input gate.

    The net is changed in place.
    """
    if net.input_gate is not None or not isinstance(net.input_norm, nn.Identity):
        return net
    layer = next(iter(net.layers()), None)
    readers: list[Any] = [net.output if layer is None else layer.linear]
    if layer is not None and layer.gate is not None:
        if not isinstance(layer.gate, DynamicGate):
            return net
        readers.append(layer.gate.network[0])
    used = torch.stack([(reader.weight != 0).any(0) for reader in readers]).any(0)
    index = used.nonzero().flatten()
    if not 0 < len(index) < net.in_features:
        return net
    for reader in readers:
        reader.weight = nn.Parameter(reader.weight[:, index], reader.weight.requires_grad)
        reader.in_features = len(index)
    net.in_features = len(index)
    return SelectedInputs(net, index)


def _exported(model: nn.Module, args: Any, kwargs: Any, size: int) -> Any:
    def free(tensor: Tensor) -> Any:
        batched = tensor.ndim > 0 and len(tensor) == size
        return {0: torch.export.Dim.AUTO} if batched else None

    given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    shapes = {name: _replaced(value, free) for name, value in given.items()}
    with torch.no_grad():
        return torch.export.export(model, args, kwargs, dynamic_shapes=shapes)


def _write_onnx(program: Any, path: Path, extra: str) -> None:
    # Silence warnings about operators in other packages.
    logging.getLogger("torch.onnx._internal.exporter._schemas").setLevel(logging.ERROR)
    written = torch.onnx.export(program, dynamo=True, verbose=False)
    assert written is not None
    written.model.metadata_props["preparation"] = extra
    written.save(str(path), include_initializers=True, keep_initializers_as_inputs=False)


def _runner(format: str, path: Path, called: _Arrange) -> Callable[..., list[Tensor]]:
    """Return a function that runs the file and returns its output tensors."""
    if format == "pt2":
        with path.open("rb") as file:
            program: Any = torch.export.load(file).module()

        def run_program(*args: Any, **kwargs: Any) -> list[Tensor]:
            args, kwargs = called(args, kwargs)
            return _tensors(program(*args, **kwargs))

        return run_program
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(*args: Any, **kwargs: Any) -> list[Tensor]:
        values = [tensor.numpy() for tensor in _tensors(called(args, kwargs))]
        given = dict(zip(names, values, strict=True))
        return [torch.from_numpy(x) for x in session.run(None, given)]

    return run


def _caller(model: nn.Module, args: Any, kwargs: Any) -> _Arrange:
    """Return a function that arranges arguments as in the example, by position and by name."""
    signature = inspect.signature(model.forward)
    positional = list(signature.bind_partial(*args).arguments)
    if any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values()):
        return lambda args, kwargs: (args, kwargs)

    named = list(kwargs)

    def arrange(args: Any, kwargs: Any) -> tuple[Any, Any]:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments | bound.kwargs
        return tuple(given[name] for name in positional), {name: given[name] for name in named}

    return arrange


@torch.no_grad()
def _difference(
    run: Callable[..., list[Tensor]], model: nn.Module, args: Any, kwargs: Any
) -> float:
    """Return the largest difference of an output, relative to that output's size."""
    expected = [x.double() for x in _tensors(model(*args, **kwargs))]
    found = [x.double() for x in run(*args, **kwargs)]
    if [x.shape for x in found] != [x.shape for x in expected]:
        return math.inf
    sizes = [float(y[y.isfinite()].abs().max()) if y.isfinite().any() else 0.0 for y in expected]
    distances = [0.0]
    for x, y, size in zip(found, expected, sizes, strict=True):
        same = (x == y) | (x.isnan() & y.isnan())
        if not same.all():
            furthest = float((x - y)[~same].abs().max()) / max(size, 1e-3 * max(sizes), 1e-12)
            distances.append(math.inf if math.isnan(furthest) else furthest)
    return max(distances)


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.cpu().float() if tensor.is_floating_point() else tensor.cpu()


def _batch_size(inputs: Any) -> int:
    return next((len(tensor) for tensor in _tensors(inputs) if tensor.ndim), 1)


def _resized(inputs: Any, size: int, wanted: int) -> Any:
    """Return inputs with samples repeated or left out, for another batch size."""

    def resize(tensor: Tensor) -> Tensor:
        batched = tensor.ndim > 0 and len(tensor) == size
        return tensor[torch.arange(wanted) % size] if batched else tensor

    return _replaced(inputs, resize)


def _replaced(values: Any, function: Callable[[Tensor], Any]) -> Any:
    return apply_to_collection(values, Tensor, function)


def _tensors(values: Any) -> list[Tensor]:
    """Return all tensors in nested values, in order."""
    found: list[Tensor] = []
    apply_to_collection(values, Tensor, found.append)
    return found
