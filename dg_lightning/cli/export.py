"""The command `export`: a trained net as a small file that runs without us."""

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

from dg_lightning import GatedMLP
from dg_lightning.checkpoint import preparation_in, read_checkpoint
from dg_lightning.cli.errors import OneLineErrorParser, refusal
from dg_lightning.cli.trained import (
    BATCH_SIZES,
    add_checkpoint_options,
    batches,
    checked_sizes,
    checkpoint_path,
    data_of,
    has_part,
    net_of,
    shape_of,
)
from dg_lightning.runtime.choice import (
    MOST_LOST,
    OFTEN_ENOUGH,
    accuracies,
    fastest_compact,
    freeze_gates,
    frozen_where_faster,
    usage_of,
    without_gates,
)
from dg_lightning.runtime.compaction import Compact
from dg_lightning.runtime.export import Exported, Format, check_inputs, export
from dg_lightning.runtime.timing import median_seconds

__all__ = ["run_export"]

_NEEDED = {"safetensors": ["safetensors"], "pt2": [], "onnx": ["onnx", "onnxruntime", "onnxscript"]}
Run: TypeAlias = Callable[[Tensor], Tensor]
Seen: TypeAlias = Callable[[], Iterable[tuple[Tensor, Tensor]]]


def run_export(args: list[str]) -> None:
    """Run the command with the arguments behind its name."""
    for about_torch_itself in (".*LeafSpec.*is deprecated.*", "The given buffer is not writable.*"):
        warnings.filterwarnings("ignore", about_torch_itself)
    parser = OneLineErrorParser(
        prog="dg-lightning export",
        description="Write a trained net as a small dense one that runs without dg-lightning.",
    )
    add_checkpoint_options(parser)
    parser.add_argument("--format", type=Format, default="safetensors", help="Kind of file.")
    parser.add_argument("--output", type=str, required=True, help="The file.")
    parser.add_argument(
        "--min_usage",
        type=float,
        default=0.0,
        help="Remove blocks that gates which depend on the input open less often than this share "
        "of the validation samples. This changes what the net says: accuracy is shown.",
    )
    parser.add_argument(
        "--freeze_gates",
        type=Literal["auto"] | bool,
        default="auto",
        help="Let gates that depend on the input look at it no longer: blocks stay that at least "
        f"--min_usage of the validation samples open ({OFTEN_ENOUGH} if that is 0). This changes "
        "what the net says, and makes it as fast as one with static gates. `auto` does it where "
        "the net is slower than the dense one with them, within --max_loss, and says so; with "
        "--min_usage it does not.",
    )
    parser.add_argument(
        "--max_loss",
        type=float,
        default=MOST_LOST,
        help="By how much the accuracy on the validation part may fall with --freeze_gates=auto.",
    )
    parser.add_argument(
        "--data_root", type=str, help="Where the data is, for accuracies; as in the run's config."
    )
    parser.add_argument(
        "--batch_sizes", type=list[int], default=BATCH_SIZES, help="Sizes to be fast for."
    )
    given = parser.parse_args(args)
    given.ckpt_path = checkpoint_path(given)
    _need(given.format)
    if not 0 <= given.min_usage < 1:
        raise refusal(f"`min_usage` must be from 0 to below 1, got {given.min_usage}.")
    if not 0 <= given.max_loss <= 1:
        raise refusal(f"`max_loss` must be from 0 to 1, got {given.max_loss}.")
    net = net_of(given.ckpt_path)
    sizes = checked_sizes(given.batch_sizes)
    asked = {"freeze_gates": given.freeze_gates is True, "min_usage": given.min_usage > 0}
    wanted = next((name for name, is_wanted in asked.items() if is_wanted), None)
    gates = [layer.gate for layer in net.layers()]
    looks = any(gate is not None and gate.input_dependent for gate in gates)
    if wanted and not looks:
        print(f"--{wanted} has nothing to do: no gate of this net depends on the input.")
        wanted = None
    data = data_of(given.ckpt_path, given.data_root, needed_by=wanted)
    seen = None
    if data is not None and looks and has_part(data, "validate"):
        seen = partial(batches, data, "validate")
    elif wanted is not None:
        raise refusal(f"`{wanted}` needs a validation part, and the run's data has none.")
    meant, made = _compacted(net, given, sizes, seen)
    shape = shape_of(given.ckpt_path)
    x = check_inputs(made, meant).unflatten(1, shape)
    preparation = preparation_in(read_checkpoint(given.ckpt_path))
    if preparation is None:
        print("The checkpoint is of an earlier version, which did not save how data was prepared.")
    else:
        preparation.pop("seen", None)  # which cells were trained on: only the checkpoint needs it
    exported = export(meant, made, given.format, Path(given.output), x, preparation)
    slower = [size for size, gain in _tell(net, made, exported, sizes, shape).items() if gain < 1]
    if meant is not net and wanted is None:
        print("It is another function than the trained net: --freeze_gates=false keeps the gates.")
    decides = any(step["kind"] == "gated" for step in made.steps)
    if slower and decides:
        need = "" if seen is not None else ", which needs validation data of the run (--data_root)"
        print(
            f"Slower than the dense net at batch {', '.join(map(str, slower))}: gates that depend "
            f"on the input cost more here than they save; --freeze_gates=true makes them static"
            f"{need}."
        )
    if data is not None:
        before, after = accuracies([net, exported.run], batches(data, "test"))
        print(f"Accuracy on the test part: {before:.2%} before, {after:.2%} after.")


def _compacted(
    net: GatedMLP, given: Any, sizes: list[int], seen: Seen | None
) -> tuple[GatedMLP, Compact]:
    """Return the net as it is meant to be, and what was made of it.

    What is changed on purpose is no fault: the file is compared with what the net is then.
    """
    if seen is None or (given.freeze_gates is False and not given.min_usage):
        return net, fastest_compact(net, sizes)
    if given.freeze_gates == "auto" and not given.min_usage:
        return frozen_where_faster(net, seen, sizes, given.max_loss)
    usage = usage_of(net, (x for x, _ in seen()))
    if given.freeze_gates is True:
        frozen = freeze_gates(net, usage, given.min_usage or OFTEN_ENOUGH)
        return frozen, fastest_compact(frozen, sizes)
    made = fastest_compact(net, sizes, usage=usage, min_usage=given.min_usage)
    return _closed_for_good(net, usage, given.min_usage), made


def _closed_for_good(net: GatedMLP, usage: dict[str, Tensor], min_usage: float) -> GatedMLP:
    """Return a copy of a net whose hardly used blocks are closed for every input."""
    closed = copy.deepcopy(net)
    for name, share in usage.items():
        gate: Any = closed.get_submodule(name).gate
        last, rare = gate.network[-1], share < min_usage
        last.weight[rare], last.bias[rare] = 0.0, -1e4 * float(gate.temperature)
    return closed


def _tell(
    net: GatedMLP, made: Compact, exported: Exported, sizes: list[int], shape: list[int]
) -> dict[int, float]:
    """Print what was written, how exact it is, and how fast; return the speed-up by batch size."""
    for name, (before, after) in made.units.items():
        print(f"{name}: {after:,} of {before:,} are left.")
    for note in made.notes:
        print(note)
    dense = fastest_compact(without_gates(net), sizes).net
    found = Table(box=box.SIMPLE)
    for column in ("batch", "dense ms", "masked ms", "file ms", "file against dense"):
        found.add_column(column, justify="right")
    gains = {}
    for size in sizes:
        x = torch.randn(size, *shape)
        with torch.inference_mode():
            ways: dict[str, Run] = {"dense": dense, "masked": net, "file": exported.run}
            runs = {name: partial(way, x) for name, way in ways.items()}
            taken = median_seconds(runs, x.device)
        cells = [f"{taken[name] * 1e3:.3f}" for name in ("dense", "masked", "file")]
        gains[size] = taken["dense"] / taken["file"]
        found.add_row(f"{size:,}", *cells, f"{gains[size]:.2f} x")
    rich.print(found)
    whole = sum(p.numel() * p.element_size() for p in net.parameters())
    print(
        f"{exported.files[0]}: inputs {shape}, {exported.size:,} bytes ({whole:,} of the trained "
        f"net's weights); "
        f"largest difference {exported.difference:.1e} of the largest output."
    )
    if len(exported.files) > 1:
        print(
            f"Load it with {exported.files[-1]}, which needs torch and safetensors only: "
            f"`from load_net import load; net = load({exported.files[0].name!r})`."
        )
    return gains


def _need(format: str) -> None:
    missing = [name for name in _NEEDED[format] if importlib.util.find_spec(name) is None]
    if missing:
        raise refusal(
            f"The format {format} needs {', '.join(missing)}: pip install {' '.join(missing)}."
        )
