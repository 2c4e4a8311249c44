"""Validation loss of a dense and a gated language model against training time.

    python benchmarks/loss_by_time.py --device cuda --width 2048 --minutes 4 --output DIR

Both train alternately on one machine; the gated model skips closed blocks with the fastest engine.
Its blocks close in the first half of the time, and a quarter is open in the second half. Losses are
plotted against the training time of each model, without validation.
"""

import argparse
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformer import OPEN, gate_of

from dg_lightning import gate_layers
from dg_lightning.budget import gate_budgets
from dg_lightning.datamodules import TextDataModule
from dg_lightning.layers import GPT
from dg_lightning.runtime import skip_closed_blocks

LEARNING_RATE, WARM_UP = 3e-4, 100  # steps
TURN = 20  # steps


class Learner:
    """A language model with a training loop that measures its time.

    Args:
        net: The model.
        data: Windows of text.
        seconds: Training time; gates close in its first half.
    """

    def __init__(self, net: GPT, data: TextDataModule, seconds: float) -> None:
        self.net, self.data, self.seconds = net, data, seconds
        self.device = next(net.parameters()).device
        adam: Any = {"lr": LEARNING_RATE, "betas": (0.9, 0.95), "weight_decay": 0.1}
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
        # bfloat16 would be slower on a CPU.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=x.is_cuda):
            return F.cross_entropy(self.net(x).flatten(0, 1), y.flatten())

    def learn(self, steps: int) -> None:
        """Train for some steps, then record the validation loss."""
        self.net.train()
        self._wait()
        start = time.perf_counter()
        for batch in islice(self.batches, steps):
            for group in self.optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min((self.steps + 1) / WARM_UP, 1.0)
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
    """Train a dense and a gated model alternately; save their curves and a plot."""
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
    while any(learner.taken < 60 * minutes for learner in learners.values()):
        for learner in learners.values():
            if learner.taken < 60 * minutes:
                learner.learn(TURN)
    output.mkdir(parents=True, exist_ok=True)
    rows = ["net,seconds,steps,loss"]
    rows += [f"{n},{s:.2f},{k},{x:.4f}" for n, m in learners.items() for s, k, x in m.curve]
    (output / "curves.csv").write_text("\n".join(rows) + "\n")
    draw({name: learner.curve for name, learner in learners.items()}, width, output)
    for name, learner in learners.items():
        seconds, steps, loss = learner.curve[-1]
        print(f"{name}: {steps:,} steps in {seconds:.0f} s, validation loss {loss:.4f}")


def draw(curves: dict[str, list[tuple[float, int, float]]], width: int, output: Path) -> None:
    """Plot losses against time."""
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4))
    for name, curve in curves.items():
        axis.plot([point[0] for point in curve], [point[2] for point in curve], ".-", label=name)
    axis.set(title=f"d = {width}", xlabel="seconds of training", ylabel="nats per byte, validation")
    axis.legend()
    figure.tight_layout()
    figure.savefig(output / "curves.png", dpi=120)


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--output", type=Path, default=Path("runs/loss_by_time"))
    given = parser.parse_args()
    train(given.width, given.depth, given.minutes, given.output, given.device)


if __name__ == "__main__":
    main()
