"""The `features` command: list the columns or genes that a trained net uses."""

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import rich
import torch
from rich import box
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from dg_lightning import GatedMLP
from dg_lightning.cli.errors import OneLineErrorParser
from dg_lightning.cli.runs import (
    add_run_options,
    batches,
    load_data,
    load_net,
    scores,
    selected_checkpoint,
)
from dg_lightning.cli_error import cli_error
from dg_lightning.files import atomic_write, write_csv
from dg_lightning.training.checkpoint import preparation_in, read_checkpoint

_SHOWN_GENES = 6  # genes per cell type in the terminal


def features_command(args: list[str]) -> None:
    """Run `dg-lightning features`."""
    parser = OneLineErrorParser(
        prog="dg-lightning features",
        description="Write the inputs that a net uses, and their importance. For a table column, "
        "this is the drop in test accuracy (R² for regression) if the column is shuffled. For a "
        "gene, it is the slope of a cell type's logit, minus the mean logit, with respect to the "
        "gene's log-normalised value, averaged over the training cells of that type.",
    )
    add_run_options(parser)
    parser.add_argument(
        "--output",
        type=str,
        help="Output file; by default features.csv (genes.csv for cells) in the run folder.",
    )
    parser.add_argument(
        "--data_root",
        type=str,
        help="Location of the data; by default, the one in the run's config.",
    )
    given = parser.parse_args(args)
    path = Path(selected_checkpoint(given)).resolve()
    preparation = preparation_in(read_checkpoint(path)) or {}
    is_table = preparation.get("kind") == "table"
    if not is_table and not {"input_genes", "class_names", "std"} <= preparation.keys():
        raise cli_error(f"`features` needs a run trained on a table or on cells, got {path}.")
    net = load_net(str(path))
    data: Any = load_data(str(path), given.data_root, needed_by="features")
    name = "features.csv" if is_table else "genes.csv"
    output = Path(given.output) if given.output else path.parents[1] / name
    if is_table:
        _write_columns(net, data, output)
    else:
        _write_genes(net, data, preparation, output)


def _write_genes(net: GatedMLP, data: Any, preparation: dict[str, Any], output: Path) -> None:
    names, types = preparation["input_genes"], preparation["class_names"]
    kept, weights = gene_weights(net, list(data.train_dataloader()), len(types))
    if preparation["std"] is not None:
        weights = weights / torch.tensor(preparation["std"])
    rows = [
        (names[gene], cell_type, f"{weights[index, gene]:.6g}")
        for gene in kept.nonzero().flatten().tolist()
        for index, cell_type in enumerate(types)
    ]
    write_csv(output, [("gene", "cell_type", "weight"), *rows])
    rich.print(_gene_table(names, types, kept, weights))
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


def _gene_table(names: list[str], types: list[str], kept: Tensor, weights: Tensor) -> Table:
    """Return a table of the genes with the largest weights for each cell type."""
    table = Table(box=box.SIMPLE, show_header=True)
    table.add_column("cell type", no_wrap=True)
    table.add_column("genes with the largest weights")
    for index, cell_type in enumerate(types):
        values = torch.where(kept, weights[index], -torch.inf)
        top = values.topk(min(_SHOWN_GENES, int(kept.sum()))).indices.tolist()
        top_genes = ", ".join(names[gene] for gene in top if values[gene] > 0)
        table.add_row(escape(cell_type), escape(top_genes))
    return table


_SHOWN = 20  # columns shown in the terminal and in the figure
_SHUFFLES = 10


def _write_columns(net: GatedMLP, data: Any, output: Path) -> None:
    x, target = (torch.cat(of) for of in zip(*batches(data, "test"), strict=True))
    columns = _places(data)
    kept = kept_inputs(net, x)
    measure, worth = shuffled_loss(net, x, target, list(columns.values()))
    rows = [
        (name, len(places), int(kept[places].sum()), value)
        for (name, places), value in zip(columns.items(), worth, strict=True)
    ]
    rows.sort(key=lambda row: (row[2] == 0, -row[3]))
    head = ("column", "inputs", "kept", f"loss_of_{'r2' if measure == 'R²' else measure}")
    write_csv(output, [head, *((*row[:3], f"{row[3]:.6g}") for row in rows)])
    rich.print(_column_table(rows, measure))
    used = sum(row[2] > 0 for row in rows)
    picture = _draw(rows, measure, output.with_suffix(".png"))
    print(f"{used} of {len(rows)} columns are kept; see {output}{picture}.")


def _places(data: Any) -> dict[str, list[int]]:
    """Return the input indices of each column."""
    named = enumerate(column for column, _ in data.current_preparation().inputs())
    return {
        column: [index for index, _ in inputs]
        for column, inputs in groupby(named, key=lambda pair: pair[1])
    }


def kept_inputs(net: GatedMLP, x: Tensor) -> Tensor:
    """Return a mask of the inputs that affect the output for any sample."""
    x = x.clone().requires_grad_()
    outputs = net(x)
    weights = torch.linspace(1, 2, outputs.shape[-1])  # so that effects do not cancel out
    (gradient,) = torch.autograd.grad((outputs * weights).sum(), x)
    return (gradient != 0).any(0)


def shuffled_loss(
    net: GatedMLP, x: Tensor, target: Tensor, columns: Sequence[list[int]]
) -> tuple[str, list[float]]:
    """Return the metric's name, and how much of it is lost when each column is shuffled."""
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(x), generator=generator) for _ in range(_SHUFFLES)]
    measure, (whole,) = scores([net], [(x, target)])
    lost = []
    for places in columns:
        runs = [partial(_shuffled, net, places, order) for order in orders]
        _, left = scores(runs, [(x, target)])
        lost.append(
            sum(whole - score for score in left) / len(left)
        )  # exactly 0 if scores are equal
    return measure, lost


def _shuffled(net: GatedMLP, places: list[int], order: Tensor, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, places] = x[order][:, places]
    outputs: Tensor = net(x)
    return outputs


def _column_table(rows: Sequence[tuple[Any, ...]], measure: str) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("column", no_wrap=True)
    for name in ("inputs kept", f"{measure} lost if shuffled"):
        table.add_column(name, justify="right")
    for name, inputs, kept, value in rows[:_SHOWN]:
        table.add_row(escape(name), f"{kept} of {inputs}", f"{value:+.2%}")
    if len(rows) > _SHOWN:
        table.add_row(f"and {len(rows) - _SHOWN} more", "", "")
    return table


def _draw(rows: Sequence[tuple[Any, ...]], measure: str, path: Path) -> str:
    """Plot the columns if matplotlib is installed; return text for the final message."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return " (install matplotlib for a figure)"
    shown = rows[:_SHOWN][::-1]
    figure = Figure(figsize=(7, 0.28 * len(shown) + 0.9), layout="constrained")
    axes = figure.add_subplot()
    colors = ["C0" if row[2] else "0.8" for row in shown]
    labels = [row[0] if row[2] else f"{row[0]} (closed)" for row in shown]
    axes.barh(range(len(shown)), [100 * row[3] for row in shown], color=colors)
    axes.set_yticks(range(len(shown)), labels)
    axes.set_xlabel(f"percentage points of {measure} lost if the column is shuffled")
    axes.spines[["top", "right"]].set_visible(False)
    with atomic_write(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=150)
    return f" and {path.name}"
