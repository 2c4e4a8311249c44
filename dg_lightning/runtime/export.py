"""Export: a compact net as a file that runs without dg_lightning, checked after it was written."""

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from dg_lightning.layers import GatedMLP
from dg_lightning.runtime import plain
from dg_lightning.runtime.compaction import Compact

__all__ = ["Exported", "Format", "check_inputs", "export"]

Format: TypeAlias = Literal["safetensors", "pt2", "onnx"]
_ENDINGS = {"safetensors": ".safetensors", "pt2": ".pt2", "onnx": ".onnx"}
_SAMPLES = 64
_TOLERANCE = 1e-4  # of the largest output, for files in float32
_MARGIN = 1e-3  # of a gate's logit: nearer to 0, rounding decides


@dataclass
class Exported:
    """What was written.

    Args:
        files: The files; the first one is the net.
        difference: Largest difference from the masked net, as a share of its largest output.
        run: Runs the net that was read back from the file.
    """

    files: list[Path]
    difference: float
    run: Callable[[Tensor], Tensor] = field(repr=False)

    @property
    def size(self) -> int:
        """Bytes of the net's file."""
        return self.files[0].stat().st_size


def export(
    net: nn.Module, compacted: Compact, format: Format, output: Path, x: Tensor | None = None
) -> Exported:
    """Write a compact net, read it back, and compare it with the net that it was made of.

    Args:
        net: The net as it was trained, with its gates.
        compacted: What `compact` made of it.
        format: `safetensors`: weights with their recipe, and a Python file that loads them without
            dg_lightning. `pt2`: a program of `torch.export`. `onnx`.
        output: The file; its ending is added where it is missing.
        x: Inputs to compare on; drawn at random for a `GatedMLP` where None.

    Raises:
        RuntimeError: If what was read back differs.
    """
    if format not in _ENDINGS:
        raise ValueError(f"`format` must be one of {', '.join(_ENDINGS)}, got {format!r}.")
    ending = _ENDINGS[format]
    output = output if output.suffix == ending else output.with_name(output.name + ending)
    output.parent.mkdir(parents=True, exist_ok=True)
    plain_net = copy.deepcopy(compacted.net).cpu().float().eval()
    masked = copy.deepcopy(net).cpu().float().eval()
    if x is None:
        if not isinstance(net, GatedMLP):
            raise TypeError(f"For a {type(net).__name__}, give inputs to compare on as `x`.")
        x = check_inputs(compacted, net)
    x = x.cpu().float()
    write = {"safetensors": _safetensors, "pt2": _pt2, "onnx": _onnx}[format]
    unfinished = output.with_name(f".{output.name}")
    files = write(plain_net, compacted, unfinished, x)
    unfinished.replace(output)
    run = _reader(format, output)
    with torch.inference_mode():
        expected = masked(x)
        difference = float((run(x) - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
    if not difference < _TOLERANCE:
        raise RuntimeError(
            f"{output} differs from the trained net by {difference:.1e} of its largest output, "
            f"more than {_TOLERANCE:.0e}: please report it with the checkpoint."
        )
    return Exported([output, *files], difference, run)


@torch.no_grad()
def check_inputs(compacted: Compact, net: GatedMLP, samples: int = _SAMPLES) -> Tensor:
    """Draw inputs on which no gate stands on the edge, where rounding would decide."""
    x = torch.randn(4 * samples, net.in_features, generator=torch.Generator().manual_seed(0))
    sure = torch.ones(len(x), dtype=torch.bool)

    def look(step: plain.GatedStep, inputs: tuple[Tensor, ...]) -> None:
        nonlocal sure
        z = step.logits(inputs[0]).float()
        sure &= z.abs().amin(1) > _MARGIN
        least = max(step.k or 0, step.floor)
        if 0 < least < z.shape[1]:
            order = z.sort(descending=True).values
            sure &= order[:, least - 1] - order[:, least] > _MARGIN

    steps = [m for m in compacted.net if isinstance(m, plain.GatedStep)]
    hooks = [step.register_forward_pre_hook(look) for step in steps]
    like = next(compacted.net.parameters())
    compacted.net(x.to(like.device, like.dtype))
    for hook in hooks:
        hook.remove()
    return x[sure][:samples]


def _safetensors(net: nn.Sequential, compacted: Compact, path: Path, x: Tensor) -> list[Path]:
    from safetensors.torch import save_file

    recipe = json.dumps({"format": 1, "steps": compacted.steps})
    weights = {name: tensor.contiguous() for name, tensor in net.state_dict().items()}
    save_file(weights, path, {"recipe": recipe})
    target = path.with_name(path.name.removeprefix("."))
    readable = target.with_suffix(".json")
    readable.write_text(json.dumps({"format": 1, "steps": compacted.steps}, indent=2) + "\n")
    loader = target.with_suffix(".py")
    shutil.copyfile(plain.__file__, loader)
    return [readable, loader]


def _pt2(net: nn.Sequential, compacted: Compact, path: Path, x: Tensor) -> list[Path]:
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(net, (x,), dynamic_shapes=({0: batch},))
    with path.open("wb") as file:
        torch.export.save(program, file)
    return []


def _onnx(net: nn.Sequential, compacted: Compact, path: Path, x: Tensor) -> list[Path]:
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
    program.save(str(path), include_initializers=True, keep_initializers_as_inputs=False)
    return []


def _reader(format: Format, path: Path) -> Callable[[Tensor], Tensor]:
    """Return what runs a file."""
    if format == "safetensors":
        return plain.load(str(path))
    if format == "pt2":
        with path.open("rb") as file:
            program: Any = torch.export.load(file).module()
        return lambda x: program(x)
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"input": x.numpy()})[0])
