"""Loss of a dense language model that is converted to per-token gates, against training on.

    python benchmarks/conversion.py --device cuda --output DIR

A dense GPT is trained on Python code until its learning rate has reached 0. Then the same number of
further steps is spent in several ways: on the dense model itself, and on converting it to a budget,
with and without the dense model as a teacher. All use the same learning rates and the same
validation windows. The variants share the GPU, as only their losses are compared.
"""

import argparse
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dg_lightning.datamodules import TextDataModule
from dg_lightning.layers import GPT
from dg_lightning.surgery import convert

LEARNING_RATE = 6e-4
VARIANTS = [
    "dense",
    "0.5:0",
    "0.5:1",
    "0.25:0",
    "0.25:1",
    "0.5:4",
    "0.25:4",
]  # budget:weight of the teacher


class Experiment:
    """The model, its text, and its loss."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        on_gpu = given.device == "cuda"
        windows: Any = {"context": given.context, "eval_windows": 256, "split_seed": 0}
        self.data = TextDataModule(given.batch, packages=on_gpu, **windows)
        self.data.prepare_data()
        self.data.setup("fit")
        torch.manual_seed(0)
        size: Any = {"width": given.width, "depth": given.depth, "heads": given.width // 64}
        self.net = GPT([given.context], 256, **size).to(given.device)
        self.autocast = torch.autocast(given.device, torch.bfloat16, enabled=on_gpu)

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        x, y = (tensor.to(self.given.device, non_blocking=True) for tensor in batch)
        with self.autocast:
            return F.cross_entropy(self.net(x).flatten(0, 1), y.flatten())

    def batches(self, steps: int) -> Any:
        """Return an iterator over random batches."""

        def endless() -> Any:
            while True:
                yield from self.data.train_dataloader()

        return islice(endless(), steps)

    def train(self, steps: int, rate: float) -> None:
        """Train all weights with a warm-up and a cosine decay to 0."""
        self.net.train()
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=rate, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, rate, steps, pct_start=0.1, cycle_momentum=False
        )
        for batch in self.batches(steps):
            optimizer.zero_grad()
            self.loss(batch).backward()
            optimizer.step()
            schedule.step()

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Return the mean loss on the validation windows."""
        self.net.eval()
        losses = [self.loss(batch) for batch in self.data.val_dataloader()]
        return float(torch.stack(losses).mean())

    def run(self, variant: str) -> str:
        """Spend the further steps on a variant, and describe the result."""
        given = self.given
        self.net.load_state_dict(torch.load(given.output / "dense.pt"))
        before = self.validation_loss()
        if variant == "dense":
            self.train(given.teach_steps + given.tune_steps, given.tune_rate)
            return f"dense: {before:.4f} before, trained on {self.validation_loss():.4f}"
        budget, weight = map(float, variant.split(":"))
        done = convert(
            self.net,
            self.data.train_dataloader(),
            budget=budget,
            loss=self.loss,
            validation=self.data.val_dataloader(),
            example=next(iter(self.data.val_dataloader()))[0].to(given.device),
            teach_steps=given.teach_steps,
            tune_steps=given.tune_steps,
            learning_rate=given.tune_rate,
            distill=weight,
            progress=False,
        )
        loss = self.validation_loss()
        return f"budget {budget:.0%}, teacher {weight:g}: {done.used:.2%} used, {loss:.4f}"


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3000, help="Steps of the dense model.")
    parser.add_argument("--teach_steps", type=int, default=250)
    parser.add_argument("--tune_steps", type=int, default=1000)
    parser.add_argument("--tune_rate", type=float, default=3e-4)
    parser.add_argument("--output", type=Path, default=Path("runs/conversion"))
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.variant:
        print(Experiment(given).run(given.variant), flush=True)
        return
    given.output.mkdir(parents=True, exist_ok=True)
    experiment = Experiment(given)
    experiment.train(given.steps, LEARNING_RATE)
    torch.save(experiment.net.state_dict(), given.output / "dense.pt")
    command = [sys.executable, *sys.argv, "--variant"]
    running = [subprocess.Popen([*command, variant]) for variant in given.variants]
    for process in running:
        process.wait()


if __name__ == "__main__":
    main()
