"""Benefit of rescues: collapsing MNIST runs with and without a rescue, and a healthy run.

    python benchmarks/collapse_rescue.py --root DIR

Prints validation accuracy, executed MACs and the detected failure modes.
"""

import argparse
import logging
import os
import warnings
from typing import Any

import lightning.pytorch as pl
from rich.console import Console
from rich.table import Table

from dg_lightning import GatedClassifier
from dg_lightning.callbacks import CollapseDetector, GatePenalty, ThresholdPhases
from dg_lightning.datamodules import MNISTDataModule
from dg_lightning.schedules import Phase, Schedule


def trainings() -> dict[str, tuple[list[Any], CollapseDetector]]:
    """Return the callbacks of each training run."""
    ramp = Schedule(0.0, 1.0, begin="10%", until="60%")
    strong = Schedule(0.0, 200.0, "step", begin="20%")
    phases = [Phase(0.9, 0.55, 1.0), Phase(0.02, 0.97, 50.0, begin="50%")]
    found: dict[str, tuple[list[Any], CollapseDetector]] = {
        "healthy": ([GatePenalty(ramp, "expected_macs")], CollapseDetector())
    }
    for action in ("warn", "rescue"):
        found[f"strong penalty, {action}"] = ([GatePenalty(strong)], CollapseDetector(action))
        shock = [
            GatePenalty(20.0, "target"),
            ThresholdPhases(phases, transition=0, buffer_keep=None),
        ]
        found[f"phase shock, {action}"] = (shock, CollapseDetector(action))
    return found


def main() -> None:
    """Train all variants and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default=os.environ.get("DG_DATA", "data"))
    parser.add_argument("--epochs", type=int, default=8)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    table = Table(title=f"MNIST, {arguments.epochs} epochs, one seed, validation")
    for column in ("training", "accuracy", "MACs of dense", "verdicts"):
        table.add_column(column)
    for name, (callbacks, detector) in trainings().items():
        pl.seed_everything(0, verbose=False)
        gate = {"kind": "static"}
        net: Any = {"class_path": "GatedMLP"}
        net["init_args"] = {"hidden": [256], "gate": gate, "input_gate": gate}
        adam: Any = {"class_path": "Adam", "init_args": {"lr": 1e-3}}
        model = GatedClassifier(
            net, input_shape=[1, 28, 28], num_classes=10, optimizer=adam, gate_lr_factor=30.0
        )
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=arguments.epochs,
            callbacks=[*callbacks, detector],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, MNISTDataModule(root=arguments.root, batch_size=128))
        logged = trainer.callback_metrics
        share = logged["compute/macs"] / logged["compute/macs_dense"]
        said = dict.fromkeys(verdict["mode"] for verdict in detector.verdicts)
        table.add_row(name, f"{logged['val/accuracy']:.2%}", f"{share:.1%}", ", ".join(said))
    Console().print(table)


if __name__ == "__main__":
    main()
