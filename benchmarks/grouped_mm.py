"""Our Triton engine against `torch.nn.functional.grouped_mm`, on a GPU in bfloat16.

    python benchmarks/grouped_mm.py

A feed-forward d-4d-d processes 16,384 tokens, each of which opens a quarter of the blocks. With
`grouped_mm`, the rows of open blocks are gathered, multiplied in groups, and added up by token.
Routing is done beforehand, so that only products, gathering and adding are timed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from dg_lightning.runtime.engines import FeedForward
from dg_lightning.runtime.timing import median_seconds

TOKENS, OPEN = 16_384, 0.25


class GroupedProducts:
    """A gated feed-forward with grouped products, for a fixed gate."""

    def __init__(self, net: FeedForward, gate: Tensor) -> None:
        self.net, self.blocks = net, gate.shape[1]
        is_open = gate != 0
        self.block, self.token = is_open.t().nonzero().unbind(1)
        self.ends = is_open.sum(0).cumsum(0).to(torch.int32)

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return the outputs."""
        net, size = self.net, self.net.block_size
        (fc1, bias), (fc2, last_bias) = net.fc1, net.fc2
        assert bias is not None
        assert last_bias is not None
        grouped: Any = F.grouped_mm
        made = grouped(x[self.token], fc1.view(self.blocks, size, -1).mT, offs=self.ends)
        units = net.activation(made + bias.view(self.blocks, size)[self.block])
        units = units * gate[self.token, self.block].to(x.dtype).unsqueeze(1)
        columns = fc2.view(len(fc2), self.blocks, size).permute(1, 2, 0)
        parts = grouped(units, columns, offs=self.ends)
        return last_bias.expand(len(x), -1).clone().index_add(0, self.token, parts)


def call(run: Callable[[], Tensor], wanted: list[Tensor]) -> None:
    """Run once, and compute the gradients of the wanted tensors."""
    with torch.set_grad_enabled(bool(wanted)):
        out = run()
        if wanted:
            torch.autograd.grad(out.sum(), wanted, allow_unused=True)


def main() -> None:
    """Print the table."""
    from dg_lightning.runtime.triton_engine import run_triton

    torch.manual_seed(0)
    options: Any = {"device": "cuda", "dtype": torch.bfloat16}
    table = Table(title="Speed-up over dense, bfloat16")
    for column in ("d", "block", "what", "dense ms", "triton", "grouped_mm"):
        table.add_column(column, justify="right")
    for width in (1024, 2048, 4096):
        for size in (64, 256):
            fc1, fc2 = (
                nn.Linear(width, 4 * width, **options),
                nn.Linear(4 * width, width, **options),
            )
            net = FeedForward.from_linears(fc1, nn.GELU(), fc2, size, scaled=True)
            x = torch.randn(TOKENS, width, **options).requires_grad_()
            gate = torch.rand(TOKENS, 4 * width // size, device="cuda")
            gate = torch.where(gate < OPEN, 0.5 + gate, 0.0).requires_grad_()
            mlp = nn.Sequential(fc1, nn.GELU(), fc2)
            runs: dict[str, Callable[[], Tensor]] = {
                "dense": partial(mlp, x),
                "triton": partial(run_triton, x, gate, net),
                "grouped_mm": partial(GroupedProducts(net, gate), x, gate),
            }
            inputs = [x, gate, *mlp.parameters()]
            for what, wanted in (("forward", []), ("training", inputs)):
                calls = {name: partial(call, run, wanted) for name, run in runs.items()}
                seconds = median_seconds(calls, x.device, 7, 0.05)
                gains = [
                    f"{seconds['dense'] / seconds[name]:.2f}" for name in ("triton", "grouped_mm")
                ]
                shown = f"{seconds['dense'] * 1e3:.2f}"
                table.add_row(f"{width:,}", str(size), what, shown, *gains)
    Console(width=90).print(table)


if __name__ == "__main__":
    main()
