"""Validation loss of dense and gated language models against training time.

    python benchmarks/loss_by_time.py --device cuda --width 1024 --seconds 240 --output DIR
    python benchmarks/loss_by_time.py --draw benchmarks/loss_by_time_1024.csv --output DIR/x.png

`dense` has feed-forwards four times as wide as the model. `wide` has feed-forwards sixteen times as
wide, in blocks of half the width. Every token opens two of the 32 blocks (`--open`) from the first
step on (`policy: top_k`), and biases balance the loads of blocks (`method: balance`). `threshold`
opens as many on average: its gates have a threshold instead. `moe` is a mixture of experts of the
same size, `MoEFeedForward` with one expert per block.

Whole training steps are CUDA graphs. Models train in turns on one GPU, with the same settings, and
their learning rate falls with the time that is left. Validation is not timed. With `--profile`,
the kernels of one step are listed instead. `--draw` plots saved curves, and prints the lead over
the dense model and the time to its final loss.
"""

import argparse
import csv
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dg_lightning import gate_layers, param_groups
from dg_lightning.budget import balance_loads, gate_loads
from dg_lightning.datamodules import TextDataModule
from dg_lightning.layers import GPT
from dg_lightning.runtime import lay_out_by_unit, skip_closed_blocks

WIDER = 16  # hidden units over width
LEARNING_RATE, WARM_UP, LAST_RATE = 6e-4, 200, 0.1  # warm-up in steps
BATCH = 16
SHARES = (0.25, 0.5, 0.75, 1.0)  # leads are printed at these shares of the time
TURN = 50  # steps


def settings_of(name: str, width: int, blocks: int, share: float) -> dict[str, Any]:
    """Return the arguments of a variant's GPT."""
    if name == "dense":
        return {"hidden": 4 * width}
    hidden = WIDER * width
    if name == "moe":
        experts = {"experts": blocks, "top_k": round(share * blocks), "capacity_factor": 1.25}
        return {"hidden": hidden, "experts": experts}
    gate: dict[str, Any] = {"kind": "dynamic", "block_size": hidden // blocks}
    gate |= {"scale": "probability", "initial_open_rate": share, "initial_spread": 1.0}
    if name == "wide":
        gate |= {"policy": "top_k", "k": round(share * blocks)}
    return {"hidden": hidden, "gate": gate}


class Learner:
    """A language model and its training, with one CUDA graph per step.

    Args:
        name: Name of the variant.
        net: The model.
        data: Windows of text.
        given: The options: training time, or steps instead, and the share of open blocks.
    """

    def __init__(
        self, name: str, net: GPT, data: TextDataModule, given: argparse.Namespace
    ) -> None:
        self.name, self.net, self.data, self.given = name, net, data, given
        self.device = next(net.parameters()).device
        self.on_gpu = self.device.type == "cuda"
        groups = param_groups(net, lr=LEARNING_RATE)
        for group in groups if self.on_gpu else ():
            group["lr"] = torch.tensor(LEARNING_RATE, device=self.device)
        own: Any = {"fused": True, "capturable": True} if self.on_gpu else {}
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1, **own)
        self.gates = list(gate_layers(net, required=False).values())
        self.target = torch.tensor(given.open, device=self.device)  # load of a block in training
        self.batches = self._batches()
        self.x, self.y = (tensor.clone() for tensor in next(self.batches))
        self.memory = 0  # bytes beyond parameters, gradients and optimizer state
        self.share, self.dead = math.nan, 0  # open blocks, and blocks that are never open
        self.taken, self.steps = 0.0, 0
        self.curve: list[tuple[float, int, float]] = []  # seconds, steps, validation loss
        self._replay = self._capture() if self.on_gpu else self._step

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            for x, y in self.data.train_dataloader():
                yield x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        # bfloat16 would be slower on a CPU.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.on_gpu):
            loss = F.cross_entropy(self.net(x).flatten(0, 1), y.flatten())
            extra = self.net.auxiliary_loss() if self.net.training else None
        return loss if extra is None else loss + extra

    def _step(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.x, self.y).backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        if self.name in ("wide", "threshold"):
            balance_loads(self.gates, self.target)
        self.optimizer.step()

    def _capture(self) -> Any:
        """Record a step. The steps before it do not count, and are undone."""
        before = {name: value.clone() for name, value in self.net.state_dict().items()}
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self._step()
            self.optimizer.zero_grad()
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self._step()
            gradients = sum(p.nbytes for p in self.net.parameters())
            self.memory = torch.cuda.max_memory_allocated() - held - gradients
            self.optimizer.zero_grad()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                self._step()
        torch.cuda.synchronize()
        self.net.load_state_dict(before)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        return graph.replay

    def learn(self, steps: int) -> None:
        """Train for some steps."""
        self._wait()
        start = time.perf_counter()
        for _ in range(steps):
            x, y = next(self.batches)
            self.x.copy_(x)
            self.y.copy_(y)
            left = max(1 - self._progress(time.perf_counter() - start), 0.0)
            rate = LEARNING_RATE * min((self.steps + 1) / WARM_UP, 1.0)
            rate *= LAST_RATE + (1 - LAST_RATE) * left
            for group in self.optimizer.param_groups:
                if self.on_gpu:
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            self._replay()
            self.steps += 1
        self._wait()
        self.taken += time.perf_counter() - start

    def _progress(self, running: float = 0.0) -> float:
        """Return the share of the training that is over."""
        if self.given.steps:
            return float(self.steps / self.given.steps)
        return float((self.taken + running) / self.given.seconds)

    @property
    def is_done(self) -> bool:
        """Whether the training time, or number of steps, is spent."""
        return self._progress() >= 1

    @torch.no_grad()
    def validate(self) -> None:
        """Record the validation loss, and correct the target load by the share in validation."""
        self.net.eval()
        losses, loads = [], []
        for x, y in self.data.val_dataloader():
            losses.append(self.loss(x.to(self.device), y.to(self.device)))
            loads.append([gate_loads(gate) for gate in self.gates])
        self.net.train()
        self.curve.append((self.taken, self.steps, float(torch.stack(losses).mean())))
        if self.gates:
            by_gate = [torch.stack(one).mean(0) for one in zip(*loads, strict=True)]
            self.share = float(torch.cat(by_gate).mean())
            self.dead = int((torch.cat(by_gate) == 0).sum())
            if self.name == "threshold":
                wanted = self.given.open
                self.target.mul_((wanted / self.share) ** 0.5).clamp_(wanted / 2, 2 * wanted)

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def describe(self) -> str:
        """Return the results in a line."""
        seconds, steps, loss = self.curve[-1]
        parameters = sum(p.numel() for p in self.net.parameters()) / 1e6
        line = f"{self.name:6} {parameters:5.0f} M parameters, {steps} steps in {seconds:.0f} s"
        line += f" ({1e3 * seconds / max(steps, 1):.1f} ms), {self.memory / 2**30:.2f} GiB beyond "
        line += f"state, validation loss {loss:.4f}"
        if self.gates:
            line += f", {self.share:.2%} open, {self.dead} dead blocks"
        return line


def build(name: str, given: argparse.Namespace, data: TextDataModule, seed: int) -> Learner:
    """Return the learner of a variant."""
    torch.manual_seed(seed)
    size: Any = {"width": given.width, "depth": given.depth, "heads": max(given.width // 128, 1)}
    settings = settings_of(name, given.width, given.blocks, given.open)
    with torch.device(given.device):
        net = GPT([data.context], 256, **size, **settings)
    if name in ("wide", "threshold"):
        lay_out_by_unit(net)
        skip_closed_blocks(net, "triton" if given.device == "cuda" else "blocks")
    return Learner(name, net, data, given)


def train(given: argparse.Namespace, seed: int) -> None:
    """Train the variants in turns, and save their curves."""
    on_gpu = given.device == "cuda"
    windows: Any = {"context": 1024 if on_gpu else 64, "eval_windows": 64, "split_seed": 0}
    data = TextDataModule(BATCH, packages=on_gpu, num_workers=2 if on_gpu else 0, **windows)
    data.prepare_data()
    data.setup("fit")
    learners = [build(name, given, data, seed) for name in given.variants]
    if given.profile:
        for learner in learners:
            profile(learner)
        return
    while busy := [learner for learner in learners if not learner.is_done]:
        for learner in busy:
            learner.learn(TURN)
            learner.validate()
    given.output.mkdir(parents=True, exist_ok=True)
    with (given.output / f"{given.width}_{seed}.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["width", "seed", "net", "seconds", "steps", "loss"])
        for learner in learners:
            for seconds, steps, loss in learner.curve:
                row = [given.width, seed, learner.name, f"{seconds:.2f}", steps, f"{loss:.4f}"]
                rows.writerow(row)
    for learner in learners:
        print(f"width {given.width}, seed {seed}: {learner.describe()}", flush=True)


def profile(learner: Learner) -> None:
    """List the kernels that take most of a step."""
    learner.learn(20)
    learner.taken, learner.steps = 0.0, 0
    learner.learn(50)
    learner.validate()
    print(learner.describe())
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        learner.learn(5)
    table = found.key_averages().table(sort_by="cuda_time_total", row_limit=28)
    print(table)


def draw(files: list[Path], output: Path) -> None:
    """Plot the losses in CSV files against time, and each net's lead over the dense one."""
    from matplotlib import pyplot as plt

    figure, (losses, leads) = plt.subplots(1, 2, figsize=(10, 4))
    for path in files:
        rows = list(csv.DictReader(path.open(newline="")))
        curves = {
            net: np.array([(r["seconds"], r["loss"]) for r in rows if r["net"] == net], float).T
            for net in dict.fromkeys(row["net"] for row in rows)
        }
        for net, (seconds, loss) in curves.items():
            label = f"{net}, width {rows[0]['width']}"
            losses.plot(seconds, loss, label=label, lw=1)
            if net != "dense":
                dense_seconds, dense_loss = curves["dense"]
                lead = np.interp(seconds, dense_seconds, dense_loss) - loss
                leads.plot(seconds, lead, label=label, lw=1)
                ahead = {s: np.interp(s * dense_seconds[-1], seconds, lead) for s in SHARES}
                shown = ", ".join(f"{x:+.4f} at {s:.0%} of the time" for s, x in ahead.items())
                reached = seconds[loss <= dense_loss[-1]]
                when = f"{reached[0] / dense_seconds[-1]:.2f}" if len(reached) else "more than 1"
                print(f"{label}: lead {shown}; the dense model's final loss after {when}")
    losses.set(yscale="log", ylabel="nats per byte, validation")
    leads.set(ylim=(-0.05, 0.05), ylabel="lead over dense, nats per byte")
    leads.axhline(0, color="gray", lw=0.8)
    for axis in (losses, leads):
        axis.set_xlabel("seconds of training")
        axis.legend()
    figure.tight_layout()
    figure.savefig(output, dpi=120)


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--variants", nargs="+", default=["dense", "wide"])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--open", type=float, default=1 / 16, help="Share of open blocks.")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--steps", type=int, help="Train for as many steps instead of seconds.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--output", type=Path, default=Path("runs/loss_by_time"))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--draw", type=Path, nargs="+", help="CSV files to draw.")
    given = parser.parse_args()
    if given.draw:
        draw(given.draw, given.output)
        return
    for seed in given.seeds:
        train(given, seed)


if __name__ == "__main__":
    main()
