"""The command `bench`: measure the speed of a net on this machine."""

import importlib.util
from pathlib import Path
from typing import Literal

import rich
import torch
from torch import Tensor

from dg_lightning.cli.errors import OneLineErrorParser, refusal
from dg_lightning.cli.trained import (
    BATCH_SIZES,
    add_checkpoint_options,
    check_batch_sizes,
    load_inputs,
    load_net,
    resolve_checkpoint,
)
from dg_lightning.runtime.bench import bench, draw, random_net, save, table

__all__ = ["run_bench"]


def run_bench(args: list[str]) -> None:
    """Run the command with the arguments after its name."""
    parser = OneLineErrorParser(
        prog="dg-lightning bench",
        description="Measure a net on this machine: dense, masked, compact, block-wise, sparse.",
    )
    add_checkpoint_options(parser)
    parser.add_argument(
        "--shape", type=list[int], help="Inputs, hidden widths, outputs; or a checkpoint."
    )
    parser.add_argument("--open_rate", type=float, default=0.25, help="Of a shape's gates.")
    parser.add_argument(
        "--gates", type=Literal["static", "dynamic"], default="static", help="Of a shape."
    )
    parser.add_argument("--block_size", type=int, default=1, help="Of a shape's gates.")
    parser.add_argument("--batch_sizes", type=list[int], default=BATCH_SIZES, help="Batches.")
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
    if (given.ckpt_path or given.config) is None and given.shape is None:
        raise refusal("Give --ckpt_path, --config, or --shape, as in --shape '[784, 256, 10]'.")
    if (given.ckpt_path or given.config) is not None and given.shape is not None:
        raise refusal("Give either a checkpoint or --shape, not both.")
    if given.shape is None:
        given.ckpt_path = resolve_checkpoint(given)
    if given.rounds < 1:
        raise refusal(f"`rounds` must be at least 1, got {given.rounds}.")
    sizes, device = check_batch_sizes(given.batch_sizes), _device(given.device)
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
        net = load_net(given.ckpt_path).to(device, dtype)
        title = given.ckpt_path
        x = load_inputs(given.ckpt_path, max(sizes), given.data_root)
    rows, notes = bench(net, sizes, x, given.rounds)
    rich.print(table(rows, title))
    for note in notes:
        print(note)
    if given.output is not None:
        folder = Path(given.output)
        save(rows, folder / "bench.csv")
        if importlib.util.find_spec("matplotlib") is None:
            print("A picture needs matplotlib: pip install matplotlib")
        else:
            draw(rows, folder / "bench.png", title)
        print(f"The figures are in {folder}.")


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
