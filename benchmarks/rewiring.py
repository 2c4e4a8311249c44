"""Cost of RigL: time of a training step, time of a large update, and memory.

    python benchmarks/rewiring.py
    python benchmarks/rewiring.py --device cuda --hidden 8192 4096 --batch 2048
    python benchmarks/rewiring.py --device cuda  # launch-bound: no limit

Step: one training run of 3072-1024-512-10 with Lightning's Trainer, in which RigL with its default
interval is switched on and off (see alternating.py), for whole intervals on a CPU and every ten
steps on a GPU, so that every second interval ends with an update. Update: a layer of 10,000 x
10,000 weights with Adam. Memory: bytes kept on the device of the weights between updates.
"""

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from alternating import Repeated, StepTimes, turns
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dg_lightning import GatedClassifier
from dg_lightning.callbacks import RigL
from dg_lightning.rewiring import SparseLayer, drop_and_grow, generator_for, initial_mask
from dg_lightning.rewiring.drop_and_grow import Structure

INTERVAL = 100  # steps between updates, the default
TOTAL = 100_000


class Switch(pl.Callback):
    """Switches RigL on and off and times the steps, starting after the first update."""

    def __init__(self, rigl: RigL, rounds: int, stretch: int) -> None:
        self.rigl, self.stretch = rigl, stretch
        self.turns = turns(["RigL"], "dense", INTERVAL, stretch, rounds)
        self.times = StepTimes("dense", INTERVAL, stretch)
        self.now: str | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Record the step time and decide whether RigL is active in the next step."""
        if self.now is not None:
            self.times.end(self.now)
        elif trainer.global_step % INTERVAL:
            return
        before, self.now = self.now, next(self.turns, None)
        trainer.should_stop = self.now is None
        trainer.callbacks = [self.rigl, self] if self.now == "RigL" else [self]  # type: ignore[attr-defined]
        if self.now == "dense":
            self.rigl.teardown(trainer, pl_module, "fit")  # also removes its optimizer hook
        for c in self.rigl.connections.values():
            # Zero the weights that grew in dense steps, because zeros affect the time on a CPU.
            if self.stretch == INTERVAL and self.now == "RigL" and before == "dense":
                c.clean(trainer.optimizers[0])
            if trainer.global_step % INTERVAL == 0:  # do not catch up on missed updates
                c.changed_at = trainer.global_step
        self.times.begin()


def step(arguments: argparse.Namespace) -> tuple[float, float]:
    """Return the seconds of a dense step, and the relative time of a step with RigL."""
    torch.manual_seed(0)
    net: Any = {"class_path": "GatedMLP", "init_args": {"hidden": arguments.hidden}}
    # Fused, because plain Adam takes square roots of zeros, which are 20 times slower than other
    # square roots in Intel's library.
    adam: Any = {"class_path": "torch.optim.AdamW", "init_args": {"fused": not arguments.plain}}
    model = GatedClassifier(net, input_shape=[3072], num_classes=10, optimizer=adam)
    batch = (
        torch.randn(arguments.batch, 3072, device=arguments.device),
        torch.randint(10, (arguments.batch,), device=arguments.device),
    )
    rigl = RigL(0.9)
    switch = Switch(rigl, arguments.rounds, 10 if arguments.device == "cuda" else INTERVAL)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator=arguments.device,
            devices=1,
            max_steps=TOTAL,
            callbacks=[rigl, switch],
            logger=CSVLogger(folder),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, Repeated(batch))
    return switch.times.seconds(), switch.times.ratios()["RigL"]


def update(device: str, side: int) -> tuple[float, float]:
    """Return the seconds of one update of a large layer, and the bytes kept per weight."""
    layer = nn.Linear(side, side, bias=False, device=device)
    optimizer = torch.optim.Adam(layer.parameters())
    layer.weight.grad = torch.randn_like(layer.weight)
    optimizer.step()
    generator = generator_for(0, "layer", 0, layer.weight.device)
    mask = initial_mask(layer.weight, 0.1, Structure(), generator)
    connections = SparseLayer("layer", layer, mask)
    held = [v for v in vars(connections).values() if isinstance(v, Tensor | np.ndarray)]
    tensors = [torch.as_tensor(v) for v in held if v is not connections.weight]
    here = [v for v in tensors if v.device == layer.weight.device]
    taken = sum({v.data_ptr(): v.nbytes for v in here}.values())  # count views once
    times = []
    for _ in range(6):
        gradient = torch.randn_like(layer.weight)
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        scores = layer.weight.detach().abs(), gradient.abs()
        new = drop_and_grow(connections.mask, *scores, 0.3, total=connections.count)
        connections.change(new, optimizer)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        assert int(connections.mask.sum()) == round(0.1 * side * side)
    return statistics.median(times[1:]), taken / layer.weight.numel()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 512])
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--side", type=int, help="side of the large layer; 10,000 on a GPU, else 2,000"
    )
    parser.add_argument("--plain", action="store_true", help="use AdamW without fusion")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    # As in the program. A net that has memorised its batch has gradients close to 0, whose squares
    # are denormal and slow on x86. RigL has ten times fewer of them.
    torch.set_flush_denormal(True)
    side = arguments.side or (10_000 if arguments.device == "cuda" else 2_000)
    dense, ratio = step(arguments)
    seconds, taken = update(arguments.device, side)
    table = Table(title=f"RigL, 90 % sparse, {arguments.device}, batch {arguments.batch}")
    for column in ("what", "measured", "at most"):
        table.add_column(column, justify="left" if column == "what" else "right")
    table.add_row("dense step, ms", f"{dense * 1e3:.3f}", "")
    bar = "1.05" if arguments.device == "cpu" else "1.02" if dense >= 0.01 else ""
    table.add_row("step with RigL, ratio", f"{ratio:.3f}", bar)
    table.add_row(f"update of {side**2:,} weights, ms", f"{seconds * 1e3:.1f}", "")
    table.add_row("bytes per weight between updates", f"{taken:.4f}", "")
    Console().print(table)


if __name__ == "__main__":
    main()
