"""The `export` command: write a trained net as a small file that runs without dg_lightning."""

import copy
import importlib.util
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import rich
import torch
from rich import box
from rich.table import Table
from torch import Tensor

from dg_lightning import GatedMLP, GatedRegressor
from dg_lightning.cli.errors import OneLineErrorParser, one_line
from dg_lightning.cli.runs import (
    BATCH_SIZES,
    add_run_options,
    batches,
    check_batch_sizes,
    has_part,
    input_shape,
    load_data,
    load_model,
    load_net,
    selected_checkpoint,
)
from dg_lightning.cli_error import cli_error
from dg_lightning.runtime.export import Exported, Format, check_inputs, export
from dg_lightning.runtime.lowering import (
    FREEZE_USAGE,
    MAX_ACCURACY_DROP,
    PlainNet,
    block_usage,
    fastest_plain_net,
    freeze_gates,
    freeze_if_faster,
    scores,
    without_gates,
)
from dg_lightning.runtime.timing import median_seconds
from dg_lightning.surgery import CompactModel, compact, export_model, measure_savings
from dg_lightning.surgery.gating import gated_units
from dg_lightning.training.checkpoint import preparation_in, read_checkpoint
from dg_lightning.training.module import GatedModule

_NEEDS = {"safetensors": ["safetensors"], "pt2": [], "onnx": ["onnx", "onnxruntime", "onnxscript"]}
Run: TypeAlias = Callable[[Tensor], Tensor]
Batches: TypeAlias = Callable[[], Iterable[tuple[Tensor, Tensor]]]


def export_command(args: list[str]) -> None:
    """Run `dg-lightning export`."""
    for torch_internal in (".*LeafSpec.*is deprecated.*", "The given buffer is not writable.*"):
        warnings.filterwarnings("ignore", torch_internal)
    parser = OneLineErrorParser(
        prog="dg-lightning export",
        description="Write a trained net as a small dense net that runs without dg-lightning.",
    )
    add_run_options(parser)
    parser.add_argument("--format", type=Format, default="safetensors", help="File format.")
    parser.add_argument("--output", type=str, required=True, help="Output file.")
    parser.add_argument(
        "--min_usage",
        type=float,
        default=0.0,
        help="Remove blocks of input-dependent gates that are open for a smaller share of the "
        "validation samples. This changes the outputs of the net, so its accuracy is printed.",
    )
    parser.add_argument(
        "--freeze_gates",
        type=Literal["auto"] | bool,
        default="auto",
        help="Turn input-dependent gates into static ones: a block stays open if at least "
        f"--min_usage of the validation samples open it ({FREEZE_USAGE} if --min_usage is 0). This "
        "changes the outputs of the net and makes it as fast as one with static gates. `auto` "
        "freezes the gates, and says so, if they make the net slower than the dense one and "
        "accuracy drops by at most --max_accuracy_drop. It never does so with --min_usage.",
    )
    parser.add_argument(
        "--max_accuracy_drop",
        type=float,
        default=MAX_ACCURACY_DROP,
        help="Largest drop in validation accuracy for --freeze_gates=auto.",
    )
    parser.add_argument(
        "--data_root",
        type=str,
        help="Location of the data; by default, the one in the run's config.",
    )
    parser.add_argument(
        "--batch_sizes", type=list[int], default=BATCH_SIZES, help="Batch sizes to optimise for."
    )
    given = parser.parse_args(args)
    given.ckpt_path = selected_checkpoint(given)
    _require_packages(given.format)
    if not 0 <= given.min_usage < 1:
        raise cli_error(f"`min_usage` must be in [0, 1), got {given.min_usage}.")
    if not 0 <= given.max_accuracy_drop <= 1:
        raise cli_error(f"`max_accuracy_drop` must be in [0, 1], got {given.max_accuracy_drop}.")
    sizes = check_batch_sizes(given.batch_sizes)
    model = load_model(given.ckpt_path)
    if not isinstance(model.net, GatedMLP):
        _export_any(model, given, sizes)
        return
    net = load_net(given.ckpt_path)
    asked = {"freeze_gates": given.freeze_gates is True, "min_usage": given.min_usage > 0}
    wanted = next((name for name, is_wanted in asked.items() if is_wanted), None)
    gates = [layer.gate for layer in net.layers()]
    is_dynamic = any(gate is not None and gate.input_dependent for gate in gates)
    if wanted and not is_dynamic:
        print(f"--{wanted} has no effect: no gate in this net depends on the input.")
        wanted = None
    data = load_data(given.ckpt_path, given.data_root, needed_by=wanted)
    held_out = None
    if data is not None and is_dynamic and has_part(data, "validate"):
        held_out = partial(batches, data, "validate")
    elif wanted is not None:
        raise cli_error(f"`{wanted}` needs a validation split, but the run's data has none.")
    reference, compacted = _compact_net(net, given, sizes, held_out)
    shape = input_shape(given.ckpt_path)
    x = check_inputs(compacted, reference).unflatten(1, shape)
    preparation = preparation_in(read_checkpoint(given.ckpt_path))
    if preparation is None:
        print(
            "The checkpoint is from an earlier version and does not record how data was prepared."
        )
    else:
        preparation.pop("seen", None)  # the training cells, which only the checkpoint needs
    exported = export(reference, compacted, given.format, Path(given.output), x, preparation)
    gains = _print_results(net, compacted, exported, sizes, shape)
    slower = [size for size, gain in gains.items() if gain < 1]
    if reference is not net and wanted is None:
        print(
            "The outputs differ from the trained net's; use --freeze_gates=false to keep the gates."
        )
    decides = any(step["kind"] == "gated" for step in compacted.steps)
    if slower and decides:
        need = "" if held_out else ", which needs the run's validation data (--data_root)"
        print(
            f"Slower than the dense net at batch size {', '.join(map(str, slower))}: "
            "input-dependent gates cost more here than they save. Make them static with "
            f"--freeze_gates=true{need}."
        )
    if data is not None:
        _print_scores([net, exported.run], data, "test")


def _export_any(model: GatedModule, given: Any, sizes: list[int]) -> None:
    """Export a net that is no GatedMLP, without its closed units."""
    name = type(model.net).__name__
    if given.format == "safetensors":
        raise cli_error(f"A {name} is exported as a program: use --format pt2 or --format onnx.")
    if given.freeze_gates is True or given.min_usage:
        raise cli_error(f"`freeze_gates` and `min_usage` need a GatedMLP, got a {name}.")
    if isinstance(model, GatedRegressor):
        raise cli_error(f"A regressor needs a GatedMLP to be exported, got a {name}.")
    data = load_data(given.ckpt_path, given.data_root, needed_by="export")
    assert data is not None
    part = "test" if has_part(data, "test") else "validate"
    example = next(batches(data, part))[0]
    net = model.net.eval().requires_grad_(False)
    try:
        small = compact(net, example) if gated_units(net) else CompactModel(copy.deepcopy(net))
        exported = export_model(small.model, example, given.output, given.format)
    except (RuntimeError, ValueError) as error:
        raise cli_error(one_line(str(error))) from error
    for note in small.notes:
        print(note)
    rich.print(measure_savings(net, small, example, sizes).table())
    size = "any size" if exported.any_batch_size else f"{len(example)}"
    print(
        f"{exported.file}: {exported.file.stat().st_size:,} bytes, for batches of {size}; largest "
        f"difference {exported.difference:.1e}, relative to the largest output."
    )
    _print_scores([net, lambda x: exported.run(x)[0]], data, part)


def _print_scores(runs: list[Run], data: Any, part: str) -> None:
    measure, (before, after) = scores(runs, batches(data, part))
    name = measure[0].upper() + measure[1:]
    print(f"{name} on the {part} split: {before:.2%} before, {after:.2%} after.")


def _compact_net(
    net: GatedMLP, given: Any, sizes: list[int], held_out: Batches | None
) -> tuple[GatedMLP, PlainNet]:
    """Return the net that the file must match, with the requested changes, and its compact form."""
    if held_out is None or (given.freeze_gates is False and not given.min_usage):
        return net, fastest_plain_net(net, sizes)
    if given.freeze_gates == "auto" and not given.min_usage:
        return freeze_if_faster(net, held_out, sizes, given.max_accuracy_drop)
    usage = block_usage(net, (x for x, _ in held_out()))
    if given.freeze_gates is True:
        frozen = freeze_gates(net, usage, given.min_usage or FREEZE_USAGE)
        return frozen, fastest_plain_net(frozen, sizes)
    compacted = fastest_plain_net(net, sizes, usage=usage, min_usage=given.min_usage)
    return _close_rare_blocks(net, usage, given.min_usage), compacted


def _close_rare_blocks(net: GatedMLP, usage: dict[str, Tensor], min_usage: float) -> GatedMLP:
    """Return a copy of a net whose rarely used blocks are closed for every input."""
    closed = copy.deepcopy(net)
    for name, share in usage.items():
        gate: Any = closed.get_submodule(name).gate
        last, rare = gate.network[-1], share < min_usage
        last.weight[rare], last.bias[rare] = 0.0, -1e4 * float(gate.temperature)
    return closed


def _print_results(
    net: GatedMLP, compacted: PlainNet, exported: Exported, sizes: list[int], shape: list[int]
) -> dict[int, float]:
    """Print the size and speed of the file, and return the speed-up for each batch size."""
    for name, (before, after) in compacted.units.items():
        print(f"{name}: {after:,} of {before:,} are left.")
    for note in compacted.notes:
        print(note)
    dense = fastest_plain_net(without_gates(net), sizes).net
    table = Table(box=box.SIMPLE)
    for column in ("batch", "dense ms", "masked ms", "file ms", "file against dense"):
        table.add_column(column, justify="right")
    gains = {}
    for size in sizes:
        x = torch.randn(size, *shape)
        with torch.inference_mode():
            nets: dict[str, Run] = {"dense": dense, "masked": net, "file": exported.run}
            runs = {name: partial(run, x) for name, run in nets.items()}
            seconds = median_seconds(runs, x.device)
        cells = [f"{seconds[name] * 1e3:.3f}" for name in ("dense", "masked", "file")]
        gains[size] = seconds["dense"] / seconds["file"]
        table.add_row(f"{size:,}", *cells, f"{gains[size]:.2f} x")
    rich.print(table)
    whole = sum(p.numel() * p.element_size() for p in net.parameters())
    print(
        f"{exported.files[0]}: inputs {shape}, {exported.size:,} bytes (trained weights: {whole:,} "
        f"bytes); largest difference {exported.difference:.1e}, relative to the largest output."
    )
    if len(exported.files) > 1:
        print(
            f"Load it with {exported.files[-1]}, which needs only torch and safetensors: "
            f"`from load_net import load; net = load({exported.files[0].name!r})`."
        )
    return gains


def _require_packages(format: str) -> None:
    missing = [name for name in _NEEDS[format] if importlib.util.find_spec(name) is None]
    if missing:
        raise cli_error(
            f"The format {format} needs {', '.join(missing)}: pip install {' '.join(missing)}."
        )
