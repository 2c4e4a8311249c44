"""The `convert` command: add per-token gates to a trained dense Transformer."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from dg_lightning.cli.errors import OneLineErrorParser
from dg_lightning.cli.runs import (
    add_run_options,
    load_data,
    load_model,
    selected_checkpoint,
)
from dg_lightning.cli_error import cli_error
from dg_lightning.files import atomic_write, write_text
from dg_lightning.gates import GateSettings
from dg_lightning.study.tables import markdown_table
from dg_lightning.surgery import Converted, convert
from dg_lightning.training.checkpoint import read_checkpoint
from dg_lightning.training.module import GatedModule


def convert_command(args: list[str]) -> None:
    """Run `dg-lightning convert`."""
    parser = OneLineErrorParser(
        prog="dg-lightning convert",
        description="Convert a trained dense Transformer so that each token runs only some blocks "
        "of the feed-forward layers: cluster the units, train the gates, fine-tune everything.",
    )
    add_run_options(parser)
    parser.add_argument(
        "--budget",
        type=float | list[float],
        default=0.5,
        help="Share of the feed-forward MACs to use, gate networks included. A list makes one "
        "model for each budget.",
    )
    parser.add_argument("--output", type=str, required=True, help="Folder for the checkpoints.")
    parser.add_argument(
        "--block_size", type=int, default=64, help="Number of units that share a gate."
    )
    parser.add_argument(
        "--teach_steps", type=int, default=250, help="Number of steps that train only the gates."
    )
    parser.add_argument("--tune_steps", type=int, default=1000, help="Number of fine-tuning steps.")
    parser.add_argument(
        "--learning_rate", type=float, default=3e-4, help="Learning rate for fine-tuning."
    )
    parser.add_argument(
        "--distill",
        type=float,
        default=0.0,
        help="Weight of the divergence from the dense model during fine-tuning.",
    )
    parser.add_argument("--seed", type=int, default=0, help="Seed of the batch order.")
    parser.add_argument(
        "--data_root",
        type=str,
        help="Location of the data; by default, the one in the run's config.",
    )
    given = parser.parse_args(args)
    path = selected_checkpoint(given)
    budgets = given.budget if isinstance(given.budget, list) else [given.budget]
    if not budgets or not all(0 < budget < 1 for budget in budgets):
        raise cli_error(f"`budget` must be above 0 and below 1, got {given.budget}.")
    output = Path(given.output)
    if output.exists() and not output.is_dir():
        raise cli_error(
            f"`output` must be a folder, but {given.output!r} is a file: choose another."
        )
    done: list[Converted] = []
    for budget in budgets:
        pl.seed_everything(given.seed, verbose=False)
        model = load_model(path).to("cuda" if torch.cuda.is_available() else "cpu")
        data: Any = load_data(path, given.data_root, needed_by="convert")
        data.setup("fit")
        settings: GateSettings = {
            "kind": "dynamic",
            "block_size": given.block_size,
            "scale": "probability",
        }
        device = model.device.type
        bfloat16 = torch.autocast(device, torch.bfloat16) if device == "cuda" else nullcontext()
        with bfloat16:
            done.append(
                convert(
                    model,
                    data.train_dataloader(),
                    budget=budget,
                    gate=settings,
                    validation=data.val_dataloader(),
                    teach_steps=given.teach_steps,
                    tune_steps=given.tune_steps,
                    learning_rate=given.learning_rate,
                    distill=given.distill,
                )
            )
        file = output / f"budget_{budget:g}.ckpt"
        _save(model, done[-1], path, file)
        print(f"{done[-1]}: {file}")
    table = _budget_table(done)
    write_text(output / "conversion.md", table + "\n")
    print(table)


def _save(model: GatedModule, converted: Converted, source: str, file: Path) -> None:
    """Write a self-contained checkpoint in the format that `AddGates` runs use."""
    checkpoint = read_checkpoint(source)
    for key in ("optimizer_states", "lr_schedulers", "loops"):
        checkpoint.pop(key, None)
    checkpoint["state_dict"] = {k: v.detach().cpu() for k, v in model.state_dict().items()}
    settings = {kind: dict(value) for kind, value in converted.settings.items()}
    gates = {"module": "", "settings": settings, "found": converted.found.state()}
    checkpoint |= {"callbacks": {}, "add_gates": gates}
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as unfinished:
        torch.save(checkpoint, unfinished)


def _budget_table(done: Sequence[Converted]) -> str:
    rows = [["dense", "", f"{done[0].loss_before:.4f}"]]
    rows += [[f"{c.budget:.0%}", f"{c.used:.1%}", f"{c.loss_after:.4f}"] for c in done]
    return markdown_table(["budget", "used", "validation loss"], rows)
