"""Token-wise gates in a Transformer: how much faster than dense, and what is learned meanwhile.

    python benchmarks/transformer.py feed_forward --device cuda
    python benchmarks/transformer.py block --device cuda
    python benchmarks/transformer.py generate
    python benchmarks/transformer.py train --device cuda --width 2048 --minutes 4 --output DIR

A quarter of the blocks is open, different ones for each token; gates scale, and deciding is
included. Dense is the same module without gates. `feed_forward` and `block` measure forward passes
and training steps (forward and backward, for inputs and all parameters), launched by the host and
as CUDA graphs, in bfloat16 on a GPU. `generate` draws text, one token at a time. Variants are
measured in turns and compared by their medians. `train` lets a dense and a gated language model
learn in turns, for as long each, and draws their losses against the time that each has taken.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from dg_lightning import GatedFeedForward, gate_layers
from dg_lightning.budget import gate_budgets
from dg_lightning.datamodules import TextDataModule
from dg_lightning.layers import GPT
from dg_lightning.layers.transformer import Block
from dg_lightning.runtime import skip_closed_blocks
from dg_lightning.runtime.timing import median_seconds

OPEN = 0.25
SIZES = {  # tokens, width, block size
    "cuda": [(32768, 1024, 256), (16384, 2048, 512), (8192, 4096, 1024)],
    "cpu": [(1024, 256, 64)],
}
CONTEXT = 1024  # tokens of a sequence
LEAST = 0.05  # seconds per measurement: work is queued as in a real loop


def gate_of(block: int) -> Any:
    """Return the settings of gates."""
    return {"kind": "dynamic", "block_size": block, "scale": "probability", "initial_spread": 1.0}


@torch.no_grad()
def open_exactly(model: nn.Module, x: Tensor, share: float = OPEN) -> None:
    """Shift the gates of a model, one after another, until a batch opens a share of the blocks."""
    for gate in gate_layers(model).values():
        model(x)
        assert gate.probability is not None
        z = torch.logit(gate.probability.float().flatten())
        gate.shift_bias(-float(z.kthvalue(round((1 - share) * len(z))).values))


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """Record a function as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def forward(model: nn.Module, x: Tensor) -> Callable[[], object]:
    """Return a forward pass without gradients."""

    def run() -> None:
        with torch.no_grad():
            model(x)

    return run


def training(model: nn.Module, x: Tensor) -> Callable[[], object]:
    """Return a training step without an optimizer."""
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
    table = Table(title=f"{what}, {OPEN:.0%} of the blocks open, times as fast as dense")
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
                        continue  # it asks the device how many tokens open a block
                    skip_closed_blocks(gated, engine)  # type: ignore[arg-type]
                    one = step(gated, x)
                    one()  # measures, if it has to choose
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
    """Return a run with the engine of now, also if others are used in between."""
    layers = [layer for layer in model.modules() if isinstance(layer, GatedFeedForward)]
    skips = [layer.skip for layer in layers]

    def go() -> None:
        for layer, skip in zip(layers, skips, strict=True):
            layer.skip = skip
        run()

    return go


def feed_forward(gated: bool, width: int, block: int) -> nn.Module:
    """Make a feed-forward."""
    return GatedFeedForward(width, 4 * width, gate=gate_of(block) if gated else None)


def whole_block(gated: bool, width: int, block: int) -> nn.Module:
    """Make attention and feed-forward."""
    heads = max(width // 128, 1)
    return Block(width, heads, feed_forward(gated, width, block), causal=True)


def generate(width: int, depth: int, length: int, rounds: int) -> None:
    """Print how many tokens a second are drawn on a CPU, dense and gated."""
    torch.manual_seed(0)
    options: Any = {"width": width, "depth": depth, "heads": width // 64}
    dense = GPT([512], 256, **options).eval()
    gated = GPT([512], 256, gate=gate_of(64), **options).eval()
    prompt = torch.randint(256, (1, 16))
    open_exactly(gated, torch.randint(256, (1, 512)))
    skip_closed_blocks(gated)
    runs = {
        name: lambda net=net: net.generate(prompt, length)
        for name, net in (("dense", dense), ("gated", gated))
    }
    taken = median_seconds(runs, torch.device("cpu"), rounds, 0.0)
    speeds = {name: length / seconds for name, seconds in taken.items()}
    print(f"d = {width}, {depth} blocks, batch 1, {torch.get_num_threads()} threads:")
    print(", ".join(f"{name} {speed:.1f} tokens a second" for name, speed in speeds.items()))
    print(f"gated is {speeds['gated'] / speeds['dense']:.2f} times as fast")


class Learner:
    """A language model that learns by itself, and knows how long it has taken.

    Args:
        net: The model.
        data: Windows of text.
        seconds: How long it may learn; gates close in the first half.
    """

    def __init__(self, net: GPT, data: TextDataModule, seconds: float) -> None:
        self.net, self.data, self.seconds = net, data, seconds
        self.device = next(net.parameters()).device
        adam: Any = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
        self.optimizer = torch.optim.AdamW(net.parameters(), **adam)
        gated = bool(gate_layers(net, required=False))
        self.budget = gate_budgets(net, {"": OPEN}, None, "open_rate")[""] if gated else None
        self.batches = self._batches()
        self.taken, self.steps = 0.0, 0
        self.curve: list[tuple[float, int, float]] = []  # seconds, steps, validation loss

    def _batches(self) -> Iterator[Any]:
        while True:
            yield from self.data.train_dataloader()

    def loss(self, batch: Any) -> Tensor:
        x, y = (tensor.to(self.device) for tensor in batch)
        with torch.autocast(self.device.type, torch.bfloat16):
            return F.cross_entropy(self.net(x).flatten(0, 1), y.flatten())

    def learn(self, steps: int) -> None:
        """Take some steps, and look how good the model is afterwards."""
        self.net.train()
        self._wait()
        start = time.perf_counter()
        for batch in islice(self.batches, steps):
            for group in self.optimizer.param_groups:
                group["lr"] = 3e-4 * min((self.steps + 1) / 100, 1.0)
            self.optimizer.zero_grad()
            self.loss(batch).backward()
            if self.budget is not None and self.steps % 10 == 0:
                progress = min(2 * self.taken / self.seconds, 1.0)
                self.budget.shift(self.budget.shift_for(OPEN**progress))
            self.optimizer.step()
            self.steps += 1
        self._wait()
        self.taken += time.perf_counter() - start
        self.net.eval()
        with torch.no_grad():
            losses = [float(self.loss(batch)) for batch in self.data.val_dataloader()]
        self.curve.append((self.taken, self.steps, sum(losses) / len(losses)))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def train(width: int, depth: int, minutes: float, output: Path, device: str) -> None:
    """Let a dense and a gated model learn in turns; save their curves and a picture."""
    tokens = 1024 if device == "cuda" else 64
    data = TextDataModule(16, context=tokens, packages=device == "cuda", eval_windows=64)
    data.prepare_data()
    data.setup("fit")
    options: Any = {"width": width, "depth": depth, "heads": max(width // 128, 1)}
    gate = {**gate_of(width // 4), "initial_open_rate": 0.9}
    learners = {}
    for name, settings in (("dense", None), ("gated", gate)):
        torch.manual_seed(0)
        net = GPT([tokens], 256, gate=settings, **options).to(device)  # type: ignore[arg-type]
        if settings is not None:
            skip_closed_blocks(net)
        learners[name] = Learner(net, data, 60 * minutes)
    turn = 20
    while any(learner.taken < 60 * minutes for learner in learners.values()):
        for learner in learners.values():
            if learner.taken < 60 * minutes:
                learner.learn(turn)
    output.mkdir(parents=True, exist_ok=True)
    rows = ["net,seconds,steps,loss"]
    rows += [f"{n},{s:.2f},{k},{x:.4f}" for n, m in learners.items() for s, k, x in m.curve]
    (output / "curves.csv").write_text("\n".join(rows) + "\n")
    draw({name: learner.curve for name, learner in learners.items()}, width, output)
    for name, learner in learners.items():
        seconds, steps, loss = learner.curve[-1]
        print(f"{name}: {steps:,} steps in {seconds:.0f} s, validation loss {loss:.4f}")


def draw(curves: dict[str, list[tuple[float, int, float]]], width: int, output: Path) -> None:
    """Draw losses against time."""
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4))
    for name, curve in curves.items():
        axis.plot([point[0] for point in curve], [point[2] for point in curve], label=name)
    axis.set(title=f"d = {width}", xlabel="seconds of training", ylabel="nats a byte, validation")
    axis.set_yscale("log")
    axis.legend()
    figure.tight_layout()
    figure.savefig(output / "curves.png", dpi=120)


def main() -> None:
    """Run a measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["feed_forward", "block", "generate", "train"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--output", type=Path, default=Path("runs/transformer"))
    given = parser.parse_args()
    if given.what == "feed_forward":
        compare(feed_forward, "A feed-forward", given.device)
    elif given.what == "block":
        compare(whole_block, "A Transformer block", given.device)
    elif given.what == "generate":
        generate(given.width, given.depth, given.length, given.rounds)
    else:
        train(given.width, given.depth, given.minutes, given.output, given.device)


if __name__ == "__main__":
    main()
