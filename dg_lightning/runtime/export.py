"""Export plain nets to files that run without dg_lightning, and verify them."""

import copy
import io
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from dg_lightning.files import atomic_write, write_text
from dg_lightning.layers.mlp import GatedMLP
from dg_lightning.runtime import plain
from dg_lightning.runtime.lowering import PlainNet

Format: TypeAlias = Literal["safetensors", "pt2", "onnx"]
_SUFFIXES = {"safetensors": ".safetensors", "pt2": ".pt2", "onnx": ".onnx"}
_SAMPLES = 64
_TOLERANCE = 1e-4  # relative to the largest output, in float32
_MARGIN = 1e-4  # rounding decides about a gate if p is closer than this to its threshold


@dataclass
class Exported:
    """Result of an export.

    Args:
        files: The written files, starting with the net.
        difference: Largest difference from the masked net, relative to its largest output.
        run: Function that runs the net loaded from the file.
    """

    files: list[Path]
    difference: float
    run: Callable[[Tensor], Tensor] = field(repr=False)

    @property
    def size(self) -> int:
        """Size of the net's file in bytes."""
        return self.files[0].stat().st_size


def export(
    net: nn.Module,
    made: PlainNet,
    format: Format,
    output: Path,
    x: Tensor | None = None,
    preparation: Mapping[str, Any] | None = None,
) -> Exported:
    """Export a plain net, and compare the loaded file with the original net.

    Args:
        net: The trained net with its gates.
        made: The net's plain form, from `plain_net`.
        format: `safetensors` (weights with their recipe, and a Python file that loads them without
            dg_lightning), `pt2` (a `torch.export` program) or `onnx`.
        output: The file to write. A missing suffix is added.
        x: Inputs to compare on. For a `GatedMLP`, random inputs are used by default.
        preparation: How data becomes inputs (features, scaling, classes), stored in the file as
            JSON under `preparation`.

    Raises:
        RuntimeError: If the outputs of the loaded net differ from those of the original.
        OSError: If the file cannot be written. An existing file is not changed.
    """
    output = output_file(output, format)
    companions = _companion_files(output, made) if format == "safetensors" else {}
    small = copy.deepcopy(made.net).cpu().float().eval()
    masked = copy.deepcopy(net).cpu().float().eval()
    if x is None:
        if not isinstance(net, GatedMLP):
            raise TypeError(f"`x` is needed for a {type(net).__name__}: pass inputs to compare on.")
        x = check_inputs(made, net)
    x = x.cpu().float()
    writer = {"safetensors": _safetensors, "pt2": _pt2, "onnx": _onnx}[format]
    extra = json.dumps(preparation)
    with atomic_write(output) as unfinished:
        try:
            writer(small, made, unfinished, x, extra)
        except Exception as error:  # writers raise different errors for a full disk
            if not isinstance(error, OSError) and "os error" not in str(error).lower():
                raise
            raise OSError(f"{output} cannot be written ({error}): use another path.") from error
        difference = _difference(_load_runner(format, unfinished), masked, x)
        if not difference < _TOLERANCE:
            raise RuntimeError(
                f"{output} was not written: its outputs differ by {difference:.1e} of the largest "
                f"output of the trained net, more than {_TOLERANCE:.0e}. Please report this with "
                "the checkpoint."
            )
    for path, text in companions.items():
        write_text(path, text)
    return Exported([output, *companions], difference, _load_runner(format, output))


def output_file(output: Path, format: Format) -> Path:
    """Return the file to write, with the suffix of its format."""
    if format not in _SUFFIXES:
        raise ValueError(f"`format` must be one of {', '.join(_SUFFIXES)}, got {format!r}.")
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


@torch.inference_mode()
def _difference(run: Callable[[Tensor], Tensor], masked: nn.Module, x: Tensor) -> float:
    expected = masked(x)
    return float((run(x) - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def _companion_files(output: Path, made: PlainNet) -> dict[Path, str]:
    """Return the files to write next to the weights, but never replace unrelated files."""
    loader = Path(plain.__file__).read_text("utf-8")
    recipe = json.dumps({"format": 1, "steps": made.steps}, indent=2) + "\n"
    texts = {output.with_suffix(".recipe.json"): recipe, output.with_name("load_net.py"): loader}
    for path, text in texts.items():
        start = text.splitlines()[0]
        if path.exists() and not path.read_text("utf-8", "replace").startswith(start):
            raise ValueError(f"{path} exists and is not an exported file: use another folder.")
    return texts


@torch.no_grad()
def check_inputs(made: PlainNet, net: GatedMLP, samples: int = _SAMPLES) -> Tensor:
    """Sample inputs for which rounding cannot open or close a gate."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4 * samples, net.in_features, generator=generator)
    is_stable = torch.ones(len(x), dtype=torch.bool)

    def check_margins(step: plain.GatedStep, inputs: tuple[Tensor, ...]) -> None:
        nonlocal is_stable
        p = step.probability(inputs[0]).float().cpu()
        if step.k is None:
            is_stable &= (p - step.threshold).abs().amin(1) > _MARGIN
        min_open = max(step.k or 0, step.floor)
        if 0 < min_open < p.shape[1]:
            ranked = p.sort(descending=True).values
            gap = ranked[:, min_open - 1] - ranked[:, min_open]
            is_stable &= (gap > _MARGIN) | (gap == 0)  # ties are resolved by index

    steps = [m for m in made.net if isinstance(m, plain.GatedStep)]
    hooks = [step.register_forward_pre_hook(check_margins) for step in steps]
    like = next(made.net.parameters())
    made.net(x.to(like.device, like.dtype))
    for hook in hooks:
        hook.remove()
    if not is_stable.any():
        raise ValueError(
            "Every sampled input lies at a gate threshold, so rounding decides the outputs: train "
            "the net first, or pass inputs to compare on as `x`."
        )
    return x[is_stable][:samples]


def _safetensors(net: nn.Sequential, made: PlainNet, path: Path, x: Tensor, extra: str) -> None:
    from safetensors.torch import save_file

    recipe = json.dumps({"format": 1, "steps": made.steps})
    weights = {name: tensor.contiguous() for name, tensor in net.state_dict().items()}
    save_file(weights, path, {"recipe": recipe, "preparation": extra})


def _pt2(net: nn.Sequential, made: PlainNet, path: Path, x: Tensor, extra: str) -> None:
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(net, (x,), dynamic_shapes=({0: batch},))
    content = io.BytesIO()  # torch aborts the process if it cannot write a file
    torch.export.save(program, content, extra_files={"preparation": extra})
    path.write_bytes(content.getvalue())


def _onnx(net: nn.Sequential, made: PlainNet, path: Path, x: Tensor, extra: str) -> None:
    # Silence warnings about operators in other packages.
    logging.getLogger("torch.onnx._internal.exporter._schemas").setLevel(logging.ERROR)
    program = torch.onnx.export(
        net,
        (x,),
        dynamo=True,
        dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
        input_names=["input"],
        output_names=["logits"],
        verbose=False,
    )
    assert program is not None
    program.model.metadata_props["preparation"] = extra
    program.save(str(path), include_initializers=True, keep_initializers_as_inputs=False)


def _load_runner(format: Format, path: Path) -> Callable[[Tensor], Tensor]:
    """Return a function that runs the exported net."""
    if format == "safetensors":
        return plain.load(str(path))
    if format == "pt2":
        with path.open("rb") as file:
            program: Any = torch.export.load(file).module()
        return lambda x: program(x)
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"input": x.numpy()})[0])
