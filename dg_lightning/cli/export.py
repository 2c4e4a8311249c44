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
from dg_lightning.surgery.exporting import ProgramFormat
from dg_lightning.training.checkpoint import preparation_in, read_checkpoint

_NEEDS = {"pt2": [], "onnx": ["onnx", "onnxruntime", "onnxscript"]}


def export_command(args: list[str]) -> None:
    """Run `dg-lightning export`."""
    for torch_internal in (".*LeafSpec.*is deprecated.*", "The given buffer is not writable.*"):
        warnings.filterwarnings("ignore", torch_internal)
    given = _export_parser().parse_args(args)
    given.ckpt_path = selected_checkpoint(given)
    chosen = given.format or Path(given.output).suffix.removeprefix(".")
    given.format = chosen if chosen in _NEEDS else "pt2"
    _require_packages(given.format)
    if not 0 < given.min_usage <= 1:
        raise cli_error(f"`min_usage` must be in (0, 1], got {given.min_usage}.")
    sizes = check_batch_sizes(given.batch_sizes)
    net = _load_net(given.ckpt_path)
    needed_by = "freeze_gates" if given.freeze_gates else None
    if not isinstance(net, GatedMLP):
        needed_by = "export"
    data = load_data(given.ckpt_path, given.data_root, needed_by=needed_by)
    part = "test" if data is not None and has_part(data, "test") else "validate"
    try:
        wanted = _freeze(net, data, given.min_usage) if given.freeze_gates else net
        example = _example(wanted, given.ckpt_path, data, part)
        small = _without_closed_units(wanted, example)
        prepared = _preparation(given.ckpt_path)
        exported = export_model(small.model, example, given.output, given.format, prepared)
    except (RuntimeError, ValueError) as error:
        raise cli_error(one_line(str(error))) from error
    for name, (whole, left) in small.units.items():
        print(f"{name}: {left:,} of {whole:,} are left.")
    for note in small.notes:
        print(note)
    savings = measure_savings(wanted, small, example, sizes)
    rich.print(savings.table())
    slower = [size for size, (dense, ours) in savings.milliseconds.items() if ours > dense]
    if slower and not given.freeze_gates and _dynamic_gates(net):
        print(
            f"Slower than the dense net at batch size {', '.join(map(str, slower))}: gates that "
            "depend on the input cost more here than they save. --freeze_gates=true makes them "
            "static, which changes the outputs."
        )
    shape, size = list(example.shape[1:]), "any size" if exported.any_batch_size else len(example)
    print(
        f"{exported.file}: {exported.file.stat().st_size:,} bytes, for inputs {shape} in batches "
        f"of {size}; largest difference {exported.difference:.1e}, relative to the largest output."
    )
    if data is not None:
        runs: list[Any] = [net, lambda x: exported.run(x)[0]]
        measure, (before, after) = scores(runs, batches(data, part))
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


def _load_net(path: str) -> nn.Module:
    """Load a net whose outputs are in the units of the target."""
    model = load_model(path)
    if isinstance(model, GatedRegressor):
        rescale_outputs(model, path)
    return model.net.eval().requires_grad_(False)


def _dynamic_gates(net: nn.Module) -> bool:
    return any(gate.input_dependent for gate in gate_layers(net, required=False).values())


def _freeze(net: nn.Module, data: Any, min_usage: float) -> nn.Module:
    if not _dynamic_gates(net):
        print("--freeze_gates has no effect: no gate in this net depends on the input.")
        return net
    if not has_part(data, "validate"):
        raise cli_error("`freeze_gates` needs a validation split, but the run's data has none.")
    return freeze_gates(net, (x for x, _ in batches(data, "validate")), min_usage)


def _example(net: nn.Module, path: str, data: Any, part: str) -> Tensor:
    """Return inputs to compare on: a batch of the data, or random inputs without data."""
    if data is not None:
        return next(batches(data, part))[0]
    saved = read_checkpoint(path)["hyper_parameters"].get("input_shape")
    shape: Any = net.in_features if saved is None else saved
    sizes = [shape] if isinstance(shape, int) else shape
    return torch.randn(2, *sizes, generator=torch.Generator().manual_seed(0))


def _without_closed_units(net: nn.Module, example: Tensor) -> CompactModel:
    gates = gate_layers(net, required=False).values()
    if any(not gate.input_dependent for gate in gates):
        return compact(net, example)
    return CompactModel(copy.deepcopy(net))


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
