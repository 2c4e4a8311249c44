"""The `export` command: write a trained net as a program that runs without dg_lightning."""

import copy
import importlib.util
import warnings
from pathlib import Path
from typing import Any

import rich
import torch
from torch import Tensor, nn

from dg_lightning import GatedRegressor, gate_layers
from dg_lightning.cli.errors import OneLineErrorParser, one_line
from dg_lightning.cli.runs import (
    BATCH_SIZES,
    add_run_options,
    batches,
    check_batch_sizes,
    has_part,
    load_data,
    load_model,
    rescale_outputs,
    scores,
    selected_checkpoint,
)
from dg_lightning.cli_error import cli_error
from dg_lightning.layers import GatedMLP
from dg_lightning.surgery import (
    CompactModel,
    compact,
    export_model,
    freeze_gates,
    measure_savings,
)
from dg_lightning.surgery.exporting import (
    ProgramFormat,
    SelectedInputs,
    output_file,
    without_unused_inputs,
)
from dg_lightning.surgery.freezing import freezable_layers
from dg_lightning.training.checkpoint import preparation_in, read_checkpoint
from dg_lightning.training.module import GatedModule

_NEEDS: dict[str, list[str]] = {"pt2": [], "onnx": ["onnx", "onnxruntime", "onnxscript"]}


def export_command(args: list[str]) -> None:
    """Run `dg-lightning export`."""
    for torch_internal in (
        ".*LeafSpec.*is deprecated.*",
        "The given buffer is not writable.*",
        "The tensor attributes? .*assigned during export.*",  # what gates record
    ):
        warnings.filterwarnings("ignore", torch_internal)
    given = _export_parser().parse_args(args)
    given.ckpt_path = selected_checkpoint(given)
    output, given.format = _output_of(given)
    _require_packages(given.format)
    if not 0 < given.min_usage <= 1:
        raise cli_error(f"`min_usage` must be in (0, 1], got {given.min_usage}.")
    sizes = check_batch_sizes(given.batch_sizes)
    model = load_model(given.ckpt_path)
    if isinstance(model, GatedRegressor):
        rescale_outputs(model, given.ckpt_path)
    net = model.net.eval().requires_grad_(False)
    shape = _input_shape(model)
    needed_by = "export" if shape is None else "freeze_gates" if given.freeze_gates else None
    data = load_data(given.ckpt_path, given.data_root, needed_by=needed_by)
    part = "test" if data is not None and has_part(data, "test") else "validate"
    try:
        wanted = _freeze(net, data, given.min_usage) if given.freeze_gates else net
        if data is not None:
            example = next(batches(data, part))[0]
        else:
            assert shape is not None
            example = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
        small = _smaller(wanted, example)
        prepared = _preparation(given.ckpt_path)
        exported = export_model(small.model, example, output, given.format, prepared)
    except (RuntimeError, ValueError) as error:
        raise cli_error(one_line(str(error))) from error
    for name, (whole, left) in small.units.items():
        print(f"{name}: {left:,} of {whole:,} are left.")
    for note in small.notes:
        print(note)
    savings = measure_savings(wanted, small, example, sizes)
    rich.print(savings.table())
    slower = [size for size, (dense, ours) in savings.milliseconds.items() if ours > dense]
    if slower and _can_freeze(wanted):
        print(
            f"Slower than the dense net at batch size {', '.join(map(str, slower))}: gates that "
            "depend on the input cost more here than they save. --freeze_gates=true makes them "
            "static, which changes the outputs."
        )
    size = "any size" if exported.any_batch_size else len(example)
    print(
        f"{exported.file}: {exported.file.stat().st_size:,} bytes, for inputs "
        f"{list(example.shape[1:])} in batches of {size}; largest difference "
        f"{exported.difference:.1e}, relative to the largest output."
    )
    if data is not None:
        found = batches(data, part)
        if not exported.any_batch_size:
            found = ((x, y) for x, y in found if len(x) == len(example))
        runs: list[Any] = [net, lambda x: exported.run(x)[0]]
        measure, (before, after) = scores(runs, found)
        name = measure[0].upper() + measure[1:]
        print(f"{name} on the {part} split: {before:.2%} before, {after:.2%} after.")


def _export_parser() -> OneLineErrorParser:
    parser = OneLineErrorParser(
        prog="dg-lightning export",
        description="Write a trained net, without its closed units, as a program that runs without "
        "dg-lightning.",
    )
    add_run_options(parser)
    parser.add_argument("--output", type=str, required=True, help="Output file.")
    parser.add_argument(
        "--format",
        type=ProgramFormat | None,
        help="pt2 (a torch.export program) or onnx; by default the suffix of --output, or pt2.",
    )
    parser.add_argument(
        "--freeze_gates",
        type=bool,
        default=False,
        help="Turn input-dependent gates into static ones, which makes the net smaller and faster. "
        "This changes its outputs, so its accuracy is printed.",
    )
    parser.add_argument(
        "--min_usage",
        type=float,
        default=0.05,
        help="With --freeze_gates: a block stays open if at least this share of the validation "
        "samples opens it.",
    )
    parser.add_argument(
        "--data_root",
        type=str,
        help="Location of the data; by default, the one in the run's config.",
    )
    parser.add_argument(
        "--batch_sizes", type=list[int], default=BATCH_SIZES, help="Batch sizes to time."
    )
    return parser


def _output_of(given: Any) -> tuple[Path, ProgramFormat]:
    """Return the file to write and its format, by default that of its suffix."""
    path = Path(given.output)
    suffix = path.suffix.lower().removeprefix(".")
    if suffix == "safetensors":
        raise cli_error(f"`output` must end in .pt2 or .onnx, got {given.output!r}.")
    chosen: ProgramFormat = given.format or ("onnx" if suffix == "onnx" else "pt2")
    try:
        return output_file(path, chosen), chosen
    except ValueError as error:
        raise cli_error(str(error)) from error


def _input_shape(model: GatedModule) -> list[int] | None:
    """Return the shape of a sample, or None if only the data knows what samples are."""
    saved = model.hparams.get("input_shape")
    if saved is None and isinstance(model.net, GatedMLP):
        saved = model.net.in_features
    if saved is None or not model.input_dtype.is_floating_point:
        return None
    return [saved] if isinstance(saved, int) else list(saved)


def _can_freeze(net: nn.Module) -> bool:
    try:
        return bool(freezable_layers(net))
    except ValueError:
        return False


def _freeze(net: nn.Module, data: Any, min_usage: float) -> nn.Module:
    if not freezable_layers(net):
        print("--freeze_gates has no effect: no gate in this net depends on the input.")
        return net
    if not has_part(data, "validate"):
        raise cli_error("`freeze_gates` needs a validation split, but the run's data has none.")
    return freeze_gates(net, (x for x, _ in batches(data, "validate")), min_usage)


def _smaller(net: nn.Module, example: Tensor) -> CompactModel:
    """Return the net without closed units and unused inputs."""
    gates = gate_layers(net, required=False).values()
    has_static = any(not gate.input_dependent for gate in gates)
    small = compact(net, example) if has_static else CompactModel(copy.deepcopy(net))
    if isinstance(small.model, GatedMLP):
        inputs = small.model.in_features
        small.model = without_unused_inputs(small.model)
        if isinstance(small.model, SelectedInputs):
            small.notes.append(f"inputs: {len(small.model.index):,} of {inputs:,} are left.")
    return small


def _preparation(path: str) -> dict[str, Any] | None:
    """Return how data becomes inputs."""
    preparation = preparation_in(read_checkpoint(path))
    if preparation is None:
        print("The checkpoint does not record how its data was prepared.")
    else:
        preparation.pop("seen", None)  # the training cells, which only the checkpoint needs
    return preparation


def _require_packages(format: str) -> None:
    missing = [name for name in _NEEDS[format] if importlib.util.find_spec(name) is None]
    if missing:
        raise cli_error(
            f"The format {format} needs {', '.join(missing)}: pip install {' '.join(missing)}."
        )
