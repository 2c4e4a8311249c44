"""Export: a compact net as a file that runs without dg_lightning, checked after it was written."""

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

from dg_lightning.files import replacing, write_text
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
    net: nn.Module,
    compacted: Compact,
    format: Format,
    output: Path,
    x: Tensor | None = None,
    preparation: Mapping[str, Any] | None = None,
) -> Exported:
    """Write a compact net, read it back, and compare it with the net that it was made of.

    Args:
        net: The net as it was trained, with its gates.
        compacted: What `compact` made of it.
        format: `safetensors`: weights with their recipe, and a Python file that loads them without
            dg_lightning. `pt2`: a program of `torch.export`. `onnx`.
        output: The file; its ending is added where it is missing.
        x: Inputs to compare on; drawn at random for a `GatedMLP` where None.
        preparation: How data becomes inputs: features, scaling and classes, which the file carries
            as JSON under `preparation`.

    Raises:
        RuntimeError: If what was read back differs.
        OSError: If it cannot be written; a file that was there before is left as it was.
    """
    if format not in _ENDINGS:
        raise ValueError(f"`format` must be one of {', '.join(_ENDINGS)}, got {format!r}.")
    if not output.name:
        raise ValueError(f"`output` must be a file, got {str(output)!r}: give its name too.")
    ending = _ENDINGS[format]
    if output.suffix in _ENDINGS.values() and output.suffix != ending:
        other = output.suffix.removeprefix(".")
        raise ValueError(f"{output} is to be {format}: give --format {other}, or a file *{ending}.")
    if output.is_dir():
        raise ValueError(f"`output` must be a file, got the folder {str(output)!r}: add a name.")
    output = output if output.suffix == ending else output.with_name(output.name + ending)
    others = _beside(output, compacted) if format == "safetensors" else {}
    plain_net = copy.deepcopy(compacted.net).cpu().float().eval()
    masked = copy.deepcopy(net).cpu().float().eval()
    if x is None:
        if not isinstance(net, GatedMLP):
            raise TypeError(f"For a {type(net).__name__}, give inputs to compare on as `x`.")
        x = check_inputs(compacted, net)
    x = x.cpu().float()
    writer = {"safetensors": _safetensors, "pt2": _pt2, "onnx": _onnx}[format]
    about = json.dumps(preparation)
    with replacing(output) as unfinished:
        try:
            writer(plain_net, compacted, unfinished, x, about)
        except Exception as error:  # each writer has its own kind for a full disk
            if not isinstance(error, OSError) and "os error" not in str(error).lower():
                raise
            raise OSError(f"{output} cannot be written ({error}): name another place.") from error
        difference = _difference(_reader(format, unfinished), masked, x)
        if not difference < _TOLERANCE:
            raise RuntimeError(
                f"What would be {output} differs from the trained net by {difference:.1e} of its "
                f"largest output, more than {_TOLERANCE:.0e}, and is not kept: please report it "
                "with the checkpoint."
            )
    for path, text in others.items():
        write_text(path, text)
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


def _safetensors(net: nn.Sequential, compacted: Compact, path: Path, x: Tensor, about: str) -> None:
    from safetensors.torch import save_file

    recipe = json.dumps({"format": 1, "steps": compacted.steps})
    weights = {name: tensor.contiguous() for name, tensor in net.state_dict().items()}
    save_file(weights, path, {"recipe": recipe, "preparation": about})


def _pt2(net: nn.Sequential, compacted: Compact, path: Path, x: Tensor, about: str) -> None:
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(net, (x,), dynamic_shapes=({0: batch},))
    content = io.BytesIO()  # torch would end the process where a file cannot be written
    torch.export.save(program, content, extra_files={"preparation": about})
    path.write_bytes(content.getvalue())


def _onnx(net: nn.Sequential, compacted: Compact, path: Path, x: Tensor, about: str) -> None:
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
    program.model.metadata_props["preparation"] = about
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
