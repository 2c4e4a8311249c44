"""Speed-up of token-wise gates in a Transformer over the dense model.

    python benchmarks/transformer.py feed_forward --device cuda
    python benchmarks/transformer.py block --device cuda
    python benchmarks/transformer.py generate

A quarter of the blocks is open, different ones for each token. Gates scale their units, and gating
costs are included. Dense is the same module without gates. `feed_forward` and `block` measure
forward passes and training steps (forward and backward, for inputs and all parameters), launched by
the host and as CUDA graphs, in bfloat16 on a GPU. `generate` samples text, one token at a time.
There, `--block` sets the number of units that share a gate, by default 1/32 of them.
Variants are measured alternately and compared by their medians. `benchmarks/loss_by_time.py`
compares the losses after equal training time.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dg_lightning import GatedFeedForward, gate_layers
from dg_lightning.layers import GPT
from dg_lightning.layers.transformer import Block
from dg_lightning.runtime import skip_closed_blocks
from dg_lightning.runtime.timing import median_seconds

OPEN = 0.25
SIZES = {  # tokens, width, block size
    "cuda": [(32768, 1024, 256), (16384, 2048, 512), (8192, 4096, 1024)],
    "cpu": [(1024, 256, 64)],
}
CONTEXT = 1024  # tokens per sequence
LEAST = 0.05  # seconds per measurement, so that work is queued as in a real loop


def gate_of(block: int) -> Any:
    """Return gate settings for a block size."""
    return {"kind": "dynamic", "block_size": block, "scale": "probability", "initial_spread": 1.0}


@torch.no_grad()
def open_exactly(model: nn.Module, x: Tensor, share: float = OPEN) -> None:
    """Shift the gates of a model one by one until a batch opens a share of the blocks."""
    for gate in gate_layers(model).values():
        model(x)
        assert gate.probability is not None
        z = torch.logit(gate.probability.float().flatten())
        gate.shift_bias(-float(z.kthvalue(round((1 - share) * len(z))).values))


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """Record a function as a CUDA graph on the current stream."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        run()

    def replay(keeps: object = run) -> None:  # keeps the recorded tensors alive
        graph.replay()

    return replay


def forward(model: nn.Module, x: Tensor) -> Callable[[], object]:
    """Return a forward pass without gradients."""

    def run() -> None:
        with torch.no_grad():
            model(x)

    return run


def training(model: nn.Module, x: Tensor) -> Callable[[], object]:
    """Return a training step without optimizer."""
    inputs = x.detach().clone().requires_grad_()
    gradient = torch.randn_like(inputs)

    def run() -> None:
        inputs.grad = None
        model.zero_grad(set_to_none=True)
        model(inputs).backward(gradient)

    return run


def compare(make: Callable[[bool, int, int], nn.Module], what: str, device: str) -> None:
    """Print how much faster gated modules are than dense ones."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    engines = ["blocks", "triton", "auto"] if device == "cuda" else ["blocks", "auto"]
    table = Table(title=f"{what}, {OPEN:.0%} of the blocks open, speed-up over dense")
    for column in ("tokens", "d", "block", "what", "dense ms", *engines, "auto / best"):
        table.add_column(column, justify="right")
    for tokens, width, block in SIZES[device]:
        torch.manual_seed(0)
        made: Any = {"device": device, "dtype": dtype}
        dense = make(False, width, block).to(**made)
        gated = make(True, width, block).to(**made)
        x = torch.randn(-(-tokens // CONTEXT), min(tokens, CONTEXT), width, **made)
        open_exactly(gated, x)
        for name, step in (("forward", forward), ("training", training)):
            for kind in ("launched", "captured") if device == "cuda" else ("launched",):
                wrap = captured if kind == "captured" else lambda run: run
                runs = {"dense": wrap(step(dense, x))}
                for engine in engines:
                    if kind == "captured" and engine == "blocks":
                        continue  # reads token counts from the device
                    skip_closed_blocks(gated, engine)  # type: ignore[arg-type]
                    one = step(gated, x)
                    one()  # `auto` may measure engines first
                    if kind == "captured":
                        runs[engine] = wrap(one)
                    else:
                        runs[engine] = with_engine(gated, one)
                taken = median_seconds(runs, torch.device(device), 9, LEAST)
                ratios = {n: taken["dense"] / t for n, t in taken.items()}
                best = max(ratio for n, ratio in ratios.items() if n != "auto")
                cells = [f"{ratios[e]:.2f}" if e in ratios else "" for e in engines]
                table.add_row(
                    f"{tokens:,}", str(width), str(block), f"{name}, {kind}",
                    f"{taken['dense'] * 1e3:.3f}", *cells, f"{ratios['auto'] / best:.2f}",
                )  # fmt: skip
    Console(width=120).print(table)


def with_engine(model: nn.Module, run: Callable[[], object]) -> Callable[[], object]:
    """Return a run that always uses the current engine."""
    layers = [layer for layer in model.modules() if isinstance(layer, GatedFeedForward)]
    skips = [layer.skip for layer in layers]

    def go() -> None:
        for layer, skip in zip(layers, skips, strict=True):
            layer.skip = skip
        run()

    return go


def feed_forward(gated: bool, width: int, block: int) -> nn.Module:
    """Build a feed-forward, gated or dense."""
    return GatedFeedForward(width, 4 * width, gate=gate_of(block) if gated else None)


def whole_block(gated: bool, width: int, block: int) -> nn.Module:
    """Build attention and feed-forward, gated or dense."""
    heads = max(width // 128, 1)
    return Block(width, heads, feed_forward(gated, width, block), causal=True)


def generate(given: argparse.Namespace) -> None:
    """Print tokens per second, dense and gated, launched by the host and as CUDA graphs."""
    width, length, device = given.width, given.length, given.device
    on_gpu = device == "cuda"
    made: Any = {"device": device, "dtype": torch.bfloat16 if on_gpu else torch.float32}
    hidden = given.wider * width
    size: Any = {"width": width, "depth": given.depth, "heads": width // 64, "hidden": hidden}
    gate = gate_of(given.block or hidden // 32)
    torch.manual_seed(0)
    with torch.device(device):
        dense = GPT([512], 256, **size).to(**made).eval()
        gated = GPT([512], 256, gate=gate, **size).to(**made).eval()
    prompt = torch.randint(256, (given.batch, 16), device=device)
    with torch.no_grad():
        open_exactly(gated, torch.randint(256, (1, 512), device=device))
    skip_closed_blocks(gated, "triton" if on_gpu else "auto")
    for graph in (False, True) if on_gpu else (False,):
        runs = {
            name: partial(net.generate, prompt, length, cuda_graph=graph)
            for name, net in (("dense", dense), ("gated", gated))
        }
        for run in runs.values():
            run()
        taken = median_seconds(runs, torch.device(device), given.rounds, 0.0)
        speeds = {name: length / seconds for name, seconds in taken.items()}
        launched = "as a graph" if graph else "launched"
        print(
            f"d = {width}, hidden {hidden}, {given.depth} blocks, batch {given.batch}, {launched}:"
        )
        print(", ".join(f"{name} {speed:.1f} tokens per second" for name, speed in speeds.items()))
        print(f"gated is {speeds['gated'] / speeds['dense']:.2f} times as fast", flush=True)


def main() -> None:
    """Run a measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["feed_forward", "block", "generate"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--block", type=int)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--wider", type=int, default=4, help="Hidden units over width.")
    given = parser.parse_args()
    # Use one stream, because gradients from another stream cannot be captured.
    stream = torch.cuda.Stream() if given.device == "cuda" else None
    if given.what == "feed_forward":
        with torch.cuda.stream(stream):
            compare(feed_forward, "A feed-forward", given.device)
    elif given.what == "block":
        with torch.cuda.stream(stream):
            compare(whole_block, "A Transformer block", given.device)
    else:
        generate(given)


if __name__ == "__main__":
    main()
