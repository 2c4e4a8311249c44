"""The commands `export` and `bench`: a trained net as a small file, and how fast it really is."""

import copy
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import lightning.pytorch as pl
import torch
import yaml
from torch import Tensor

from dg_lightning import GatedClassifier, GatedMLP
from dg_lightning.cli.checkpoints import read_checkpoint
from dg_lightning.cli.errors import OneLineErrorParser, one_line, refusal
from dg_lightning.runtime.bench import bench, draw, random_net, save, table
from dg_lightning.runtime.choice import fastest_compact, usage_of, without_gates
from dg_lightning.runtime.compaction import Compact
from dg_lightning.runtime.export import Exported, Format, check_inputs, export
from dg_lightning.runtime.timing import median_seconds
from dg_lightning.spec import build, import_class

__all__ = ["deploy", "inputs_of", "net_of"]

_NEEDED = {"safetensors": ["safetensors"], "pt2": [], "onnx": ["onnx", "onnxruntime", "onnxscript"]}
_BATCH_SIZES = [1, 32, 1024]
Run: TypeAlias = Callable[[Tensor], Tensor]


def deploy(args: list[str]) -> None:
    """Run one of the commands with the arguments behind that word."""
    command, *rest = args
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated.*")  # of torch, about itself
    if command == "export":
        _export(rest)
    else:
        _bench(rest)


def _export(args: list[str]) -> None:
    parser = OneLineErrorParser(
        prog="dg-lightning export",
        description="Write a trained net as a small dense one that runs without dg-lightning.",
    )
    parser.add_argument("--ckpt_path", type=str, required=True, help="The checkpoint.")
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
        "--data_root", type=str, help="Where the data is, for accuracies; as in the run's config."
    )
    parser.add_argument(
        "--batch_sizes", type=list[int], default=_BATCH_SIZES, help="Sizes to be fast for."
    )
    given = parser.parse_args(args)
    _need(given.format)
    if not 0 <= given.min_usage < 1:
        raise refusal(f"`min_usage` must be from 0 to below 1, got {given.min_usage}.")
    net = net_of(given.ckpt_path)
    sizes = _sizes(given.batch_sizes)
    data = _data_of(given.ckpt_path, given.data_root, required=given.min_usage > 0)
    options: dict[str, Any] = {}
    if given.min_usage > 0:
        assert data is not None
        usage = usage_of(net, (x for x, _ in _batches(data, "validate")))
        options = {"usage": usage, "min_usage": given.min_usage}
    made = fastest_compact(net, sizes, **options)
    # What was removed on purpose changes the net: the file is compared with what is left.
    masked = _closed_for_good(net, **options) if options else net
    shape = _shape_of(given.ckpt_path)
    x = check_inputs(made, net).unflatten(1, shape)
    exported = export(masked, made, given.format, Path(given.output), x)
    _tell(net, made, exported, sizes, shape)
    if data is not None:
        before, after = _accuracies(data, net, exported)
        print(f"Accuracy on the test part: {before:.2%} before, {after:.2%} after.")


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
) -> None:
    """Print what was written, how exact it is, and how fast."""
    import rich
    from rich import box
    from rich.table import Table

    for name, (before, after) in made.units.items():
        print(f"{name}: {after:,} of {before:,} are left.")
    for note in made.notes:
        print(note)
    dense = fastest_compact(without_gates(net), sizes).net
    found = Table(box=box.SIMPLE)
    for column in ("batch", "dense ms", "masked ms", "file ms", "file against dense"):
        found.add_column(column, justify="right")
    for size in sizes:
        x = torch.randn(size, *shape)
        with torch.inference_mode():
            ways: dict[str, Run] = {"dense": dense, "masked": net, "file": exported.run}
            runs = {name: partial(way, x) for name, way in ways.items()}
            taken = median_seconds(runs, x.device)
        cells = [f"{taken[name] * 1e3:.3f}" for name in ("dense", "masked", "file")]
        found.add_row(f"{size:,}", *cells, f"{taken['dense'] / taken['file']:.2f} x")
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


def _bench(args: list[str]) -> None:
    parser = OneLineErrorParser(
        prog="dg-lightning bench",
        description="Measure a net here: dense, masked, compact, by blocks, sparse.",
    )
    parser.add_argument("--ckpt_path", type=str, help="A checkpoint; or give a shape.")
    parser.add_argument("--shape", type=list[int], help="Inputs, hidden widths, outputs.")
    parser.add_argument("--open_rate", type=float, default=0.25, help="Of a shape's gates.")
    parser.add_argument(
        "--gates", type=Literal["static", "dynamic"], default="static", help="Of a shape."
    )
    parser.add_argument("--block_size", type=int, default=1, help="Of a shape's gates.")
    parser.add_argument("--batch_sizes", type=list[int], default=_BATCH_SIZES, help="Batches.")
    parser.add_argument("--device", type=str, default="cpu", help="cpu, cuda, cuda:1.")
    parser.add_argument(
        "--dtype", type=Literal["float32", "bfloat16", "float16"], default="float32", help="Type."
    )
    parser.add_argument(
        "--data_root", type=str, help="Where a checkpoint's data is; as in the run's config."
    )
    parser.add_argument("--rounds", type=int, default=15, help="Measurements of each.")
    parser.add_argument("--output", type=str, help="Folder for bench.csv and bench.png.")
    given = parser.parse_args(args)
    if (given.ckpt_path is None) == (given.shape is None):
        raise refusal("Give either --ckpt_path or --shape, as in --shape '[784, 256, 10]'.")
    if given.rounds < 1:
        raise refusal(f"`rounds` must be at least 1, got {given.rounds}.")
    sizes, device = _sizes(given.batch_sizes), _device(given.device)
    dtype = getattr(torch, given.dtype)
    x: Tensor | None = None
    if given.ckpt_path is None:
        net = random_net(
            given.shape,
            given.open_rate,
            dynamic=given.gates == "dynamic",
            block_size=given.block_size,
            device=device,
            dtype=dtype,
        )
        title = (
            f"{'-'.join(map(str, given.shape))}, {given.gates} gates, {given.open_rate:.0%} open"
        )
    else:
        net = net_of(given.ckpt_path).to(device, dtype)
        title = given.ckpt_path
        x = inputs_of(given.ckpt_path, max(sizes), given.data_root)
    rows, notes = bench(net, sizes, x, given.rounds)
    import rich

    rich.print(table(rows, title))
    for note in notes:
        print(note)
    if given.output is not None:
        folder = Path(given.output)
        save(rows, folder / "bench.csv")
        if importlib.util.find_spec("matplotlib") is None:
            print("A picture needs matplotlib: pip install 'dg-lightning[plot]'")
        else:
            draw(rows, folder / "bench.png", title)
        print(f"The figures are in {folder}.")


def _need(format: str) -> None:
    missing = [name for name in _NEEDED[format] if importlib.util.find_spec(name) is None]
    if missing:
        raise refusal(
            f"The format {format} needs {', '.join(missing)}: pip install 'dg-lightning[export]'."
        )


def _sizes(batch_sizes: list[int]) -> list[int]:
    if not batch_sizes or min(batch_sizes) < 1:
        raise refusal(f"`batch_sizes` must be numbers of at least 1, got {batch_sizes}.")
    return batch_sizes


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise refusal(f"There is no device {name!r}: give cpu or cuda.", error) from error
    if device.type not in ("cpu", "cuda"):
        raise refusal(f"`device` must be cpu or cuda, got {name!r}.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise refusal(f"There is no device {name!r} here: leave --device at cpu.")
    return device


def net_of(path: str) -> GatedMLP:
    """Return the net of a checkpoint, in evaluation, without gradients."""
    saved = read_checkpoint(path).get("hyper_parameters", {})
    class_path = saved.get("_class_path")
    if class_path is None or not issubclass(import_class(class_path), GatedClassifier):
        raise refusal(f"{path!r} is no checkpoint of a GatedClassifier: give another one.")
    model = import_class(class_path).load_from_checkpoint(path, map_location="cpu")
    net = model.net
    if not isinstance(net, GatedMLP):
        raise refusal(
            f"{path!r} holds a {type(net).__name__}: only a GatedMLP can be made compact so far."
        )
    net.eval().requires_grad_(False)
    return net


def _shape_of(path: str) -> list[int]:
    """Return the shape of one input of a checkpoint's net."""
    saved = read_checkpoint(path)["hyper_parameters"].get("input_shape")
    if saved is None:
        return [net_of(path).in_features]
    return [saved] if isinstance(saved, int) else list(saved)


def _data_of(path: str, root: str | None, *, required: bool) -> pl.LightningDataModule | None:
    """Return the data of the run that a checkpoint is from, by the config in the run's folder."""
    checkpoint = Path(path).resolve()
    places = [folder / "config.yaml" for folder in list(checkpoint.parents)[:2]]
    config = next((place for place in places if place.is_file()), None)
    whole: Any = None if config is None else yaml.safe_load(config.read_text("utf-8"))
    spec: Any = whole.get("data") if isinstance(whole, dict) else None
    if not isinstance(spec, dict) or "class_path" not in spec:
        if required:
            raise refusal(
                "`min_usage` needs the run's data, and there is no config.yaml with it near "
                f"{path!r}: export from the run's own folder."
            )
        return None
    if root is not None:
        spec.setdefault("init_args", {})["root"] = root
    try:
        data: pl.LightningDataModule = build(spec, "data")
        data.prepare_data()
        data.setup("fit")
        data.setup("test")
    except Exception as error:  # of whatever kind: a DataModule may be anybody's
        reason = one_line(str(error))
        if required:
            raise refusal(f"The run's data cannot be read ({reason}): give --data_root.") from error
        print(f"The run's data cannot be read ({reason}).")
        return None
    return data


def inputs_of(path: str, count: int, root: str | None = None) -> Tensor:
    """Return inputs for the net of a checkpoint: of the run's validation part, if that is there."""
    data = _data_of(path, root, required=False)
    if data is None:
        print("Inputs are drawn at random.")
        return torch.randn(count, net_of(path).in_features)
    found = torch.cat([x for x, _ in _batches(data, "validate")]).flatten(1)
    return found.repeat(-(-count // len(found)), 1)[:count]


def _batches(data: pl.LightningDataModule, part: str) -> Iterator[tuple[Tensor, Tensor]]:
    loader = data.val_dataloader() if part == "validate" else data.test_dataloader()
    for x, target, *_ in loader:
        yield x, target


@torch.inference_mode()
def _accuracies(
    data: pl.LightningDataModule, net: GatedMLP, exported: Exported
) -> tuple[float, float]:
    """Return the share of right answers on the test part, of the trained net and of the file."""
    runs: list[Run] = [net, exported.run]
    right, total = [0, 0], 0
    for x, target in _batches(data, "test"):
        total += len(target)
        for index, run in enumerate(runs):
            right[index] += int((run(x).argmax(-1) == target).sum())
    return right[0] / total, right[1] / total
