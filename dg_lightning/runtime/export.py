"""Export: a compact net as a file that runs without dg_lightning, checked after it was written."""

import copy
import json
import logging
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
_MARGIN = 1e-4  # of p and its threshold: nearer than this, rounding decides


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
    if not output.name:
        raise ValueError(f"`output` must be a file, got {str(output)!r}: give its name too.")
    ending = _ENDINGS[format]
    output = output if output.suffix == ending else output.with_name(output.name + ending)
    others = _beside(output, compacted) if format == "safetensors" else {}
    output.parent.mkdir(parents=True, exist_ok=True)
    plain_net = copy.deepcopy(compacted.net).cpu().float().eval()
    masked = copy.deepcopy(net).cpu().float().eval()
    if x is None:
        if not isinstance(net, GatedMLP):
            raise TypeError(f"For a {type(net).__name__}, give inputs to compare on as `x`.")
        x = check_inputs(compacted, net)
    x = x.cpu().float()
    unfinished = output.with_name(f".{output.name}")
    try:
        {"safetensors": _safetensors, "pt2": _pt2, "onnx": _onnx}[format](
            plain_net, compacted, unfinished, x
        )
        difference = _difference(_reader(format, unfinished), masked, x)
        if not difference < _TOLERANCE:
            raise RuntimeError(
                f"What would be {output} differs from the trained net by {difference:.1e} of its "
                f"largest output, more than {_TOLERANCE:.0e}, and is not kept: please report it "
                "with the checkpoint."
            )
        unfinished.replace(output)
    finally:
        unfinished.unlink(missing_ok=True)
    for path, text in others.items():
        path.write_text(text, encoding="utf-8")
    return Exported([output, *others], difference, _reader(format, output))


@torch.inference_mode()
def _difference(run: Callable[[Tensor], Tensor], masked: nn.Module, x: Tensor) -> float:
    expected = masked(x)
    return float((run(x) - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def _beside(output: Path, compacted: Compact) -> dict[Path, str]:
    """Return what lies beside the weights; refuse to write over somebody else's file."""
    loader = Path(plain.__file__).read_text("utf-8")
    recipe = json.dumps({"format": 1, "steps": compacted.steps}, indent=2) + "\n"
    texts = {output.with_suffix(".recipe.json"): recipe, output.with_name("load_net.py"): loader}
    for path, text in texts.items():
        start = text.splitlines()[0]
        if path.exists() and not path.read_text("utf-8", "replace").startswith(start):
            raise ValueError(f"{path} is there already and not ours: export to another folder.")
    return texts


@torch.no_grad()
def check_inputs(compacted: Compact, net: GatedMLP, samples: int = _SAMPLES) -> Tensor:
    """Draw inputs on which no gate stands on the edge, where rounding would decide."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4 * samples, net.in_features, generator=generator)
    sure = torch.ones(len(x), dtype=torch.bool)

    def look(step: plain.GatedStep, inputs: tuple[Tensor, ...]) -> None:
        nonlocal sure
        p = step.probability(inputs[0]).float().cpu()
        if step.k is None:
            sure &= (p - step.threshold).abs().amin(1) > _MARGIN
        least = max(step.k or 0, step.floor)
        if 0 < least < p.shape[1]:
            order = p.sort(descending=True).values
            gap = order[:, least - 1] - order[:, least]
            sure &= (gap > _MARGIN) | (gap == 0)  # of equal ones the first win

    steps = [m for m in compacted.net if isinstance(m, plain.GatedStep)]
    hooks = [step.register_forward_pre_hook(look) for step in steps]
    like = next(compacted.net.parameters())
    compacted.net(x.to(like.device, like.dtype))
    for hook in hooks:
        hook.remove()
    if not sure.any():
        raise ValueError(
            "Some gate stands on its edge for every input that was tried, so rounding decides what "
            "the net says: train it first, or give inputs to compare on as `x`."
        )
    return x[sure][:samples]


def _safetensors(net: nn.Sequential, compacted: Compact, path: Path, x: Tensor) -> None:
    from safetensors.torch import save_file

    recipe = json.dumps({"format": 1, "steps": compacted.steps})
    weights = {name: tensor.contiguous() for name, tensor in net.state_dict().items()}
    save_file(weights, path, {"recipe": recipe})


def _pt2(net: nn.Sequential, compacted: Compact, path: Path, x: Tensor) -> None:
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(net, (x,), dynamic_shapes=({0: batch},))
    with path.open("wb") as file:
        torch.export.save(program, file)


def _onnx(net: nn.Sequential, compacted: Compact, path: Path, x: Tensor) -> None:
    # It warns of operators of other packages.
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
    program.save(str(path), include_initializers=True, keep_initializers_as_inputs=False)


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
