"""The command `genes`: the genes that a net of cells keeps, and their weight by cell type."""

from pathlib import Path
from typing import Any

import rich
import torch
from rich import box
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from dg_lightning import GatedMLP
from dg_lightning.cli.errors import OneLineErrorParser, refusal
from dg_lightning.cli.runs import add_run_options, checkpoint_of
from dg_lightning.cli.trained import load_data, load_net
from dg_lightning.files import write_csv
from dg_lightning.training.checkpoint import preparation_in, read_checkpoint

__all__ = ["run_genes"]

_SHOWN = 6  # genes per cell type in the terminal


def run_genes(args: list[str]) -> None:
    """Run the command with the arguments after its name."""
    parser = OneLineErrorParser(
        prog="dg-lightning genes",
        description="Write the genes that a net of cells has kept, with their weight by cell type: "
        "by how much the type's logit, less the mean of all, rises with the gene's log-normalised "
        "value, on average over the training cells of that type.",
    )
    add_run_options(parser, "genes.csv")
    given = parser.parse_args(args)
    path = checkpoint_of(given.run, given.config)
    preparation = preparation_in(read_checkpoint(path))
    if preparation is None or not {"input_genes", "class_names", "std"} <= preparation.keys():
        raise refusal(f"{path} was not trained on cells: give a run of PBMC3kDataModule.")
    net = load_net(str(path))
    data: Any = load_data(str(path), given.data_root, needed_by="genes")
    names, types = preparation["input_genes"], preparation["class_names"]
    kept, weights = gene_weights(net, list(data.train_dataloader()), len(types))
    if preparation["std"] is not None:
        weights = weights / torch.tensor(preparation["std"])
    output = Path(given.output) if given.output else path.parents[1] / "genes.csv"
    rows = [
        (names[gene], cell_type, f"{weights[index, gene]:.6g}")
        for gene in kept.nonzero().flatten().tolist()
        for index, cell_type in enumerate(types)
    ]
    write_csv(output, [("gene", "cell_type", "weight"), *rows])
    rich.print(_table(names, types, kept, weights))
    print(f"{int(kept.sum()):,} of {len(names):,} genes are kept; their weights are in {output}.")


def gene_weights(
    net: GatedMLP, batches: list[tuple[Tensor, Tensor]], classes: int
) -> tuple[Tensor, Tensor]:
    """Return the mask of kept inputs ``(inputs,)`` and their weights ``(classes, inputs)``.

    Args:
        net: The net, in evaluation mode.
        batches: Inputs and labels.
        classes: Number of classes.
    """
    total = torch.zeros(classes, net.in_features)
    cells = torch.zeros(classes)
    opened = torch.zeros(net.in_features, dtype=torch.bool)
    for x, target in batches:
        x = x.flatten(1).requires_grad_()
        logits = net(x)
        contrast = logits.gather(1, target[:, None])[:, 0] - logits.mean(1)
        (gradient,) = torch.autograd.grad(contrast.sum(), x)
        total.index_add_(0, target, gradient)
        cells += torch.bincount(target, minlength=classes)
        gate = net.input_gate
        if gate is None or gate.gate is None:
            opened |= True
        else:
            is_open = (gate.gate != 0).reshape(-1, gate.units // gate.block_size).any(0)
            opened |= is_open.repeat_interleave(gate.block_size)
    return opened & (total != 0).any(0), total / cells.clamp(min=1)[:, None]


def _table(names: list[str], types: list[str], kept: Tensor, weights: Tensor) -> Table:
    """Return the genes with the largest weights for each cell type."""
    table = Table(box=box.SIMPLE, show_header=True)
    table.add_column("cell type", no_wrap=True)
    table.add_column("genes that speak for it most")
    for index, cell_type in enumerate(types):
        values = torch.where(kept, weights[index], -torch.inf)
        top = values.topk(min(_SHOWN, int(kept.sum()))).indices.tolist()
        top_genes = ", ".join(names[gene] for gene in top if values[gene] > 0)
        table.add_row(escape(cell_type), escape(top_genes))
    return table
