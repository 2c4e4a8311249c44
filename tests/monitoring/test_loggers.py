"""Real loggers, read back from the disk: W&B (offline), TensorBoard and CSV say the same."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
import wandb_file
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from dg_lightning import GatedClassifier
from dg_lightning.callbacks import (
    CollapseDetector,
    GateMonitor,
    GatePenalty,
    RigL,
    TemperatureAnnealing,
    ThresholdPhases,
)
from dg_lightning.datamodules import DigitsDataModule

pytest.importorskip("wandb", reason="needs the extra wandb")
from lightning.pytorch.loggers import WandbLogger

LAYERS = ("net.input_gate", "net.hidden.0.gate")
# The keys of the architecture that this training has something to say about.
KEYS = {
    *("train/loss", "train/task_loss", "val/loss", "val/accuracy", "val/macro_f1"),
    *("test/loss", "test/accuracy", "test/macro_f1"),
    *(f"compute/{key}" for key in ("macs", "macs_dense", "gate_macs", "proxy_g", "proxy_p")),
    *(f"compute/relmac_{key}" for key in ("g", "p", "fuse_g")),
    *(f"gates/{kind}/{layer}" for kind in ("open_rate", "mean_probability") for layer in LAYERS),
    *(f"gates/churn/{layer}" for layer in LAYERS),
    *("gates/temperature", "gates/threshold", "gates/penalty", "gates/penalty_weight"),
    *(f"rewiring/{key}/net.hidden.0.linear" for key in ("density", "churn", "explored")),
}


def trained(root: Path, epochs: int, checkpoint: Path | None = None) -> pl.Trainer:
    """Train, with three loggers; the run of W&B has the same id when it goes on."""
    torch.manual_seed(0)
    gate = {"kind": "static", "initial_open_rate": 0.6}
    net: Any = {
        "class_path": "GatedMLP",
        "init_args": {"hidden": [16], "gate": gate, "input_gate": gate},
    }
    model = GatedClassifier(net, input_shape=[1, 8, 8], num_classes=10, gate_lr_factor=50.0)
    part = "first" if checkpoint is None else "second"
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        log_every_n_steps=5,
        logger=[
            CSVLogger(root, name="csv", version=part),
            TensorBoardLogger(root, name="tb", version=part),
            WandbLogger(save_dir=root, offline=True, id="abc", project="p", name="run"),
        ],
        callbacks=[
            GateMonitor(every_n_epochs=2),
            TemperatureAnnealing(),
            ThresholdPhases(),
            GatePenalty(0.5),
            CollapseDetector(),
            RigL(0.5, every_n_steps=4, layers=["*hidden.0.linear"]),
            ModelCheckpoint(root / "kept", filename="last", enable_version_counter=False),
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )
    data = DigitsDataModule(batch_size=64)
    trainer.fit(model, data, ckpt_path=checkpoint)
    trainer.test(model, data, verbose=False)
    return trainer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Gate collapse")
def test_every_key_is_in_every_logger_with_the_same_value_and_step_after_a_resume_too(
    tmp_path: Path,
) -> None:
    import wandb

    trained(tmp_path, epochs=2)
    wandb.finish()
    trainer = trained(tmp_path, epochs=4, checkpoint=tmp_path / "kept" / "last.ckpt")
    wandb.finish()
    for part, file in zip(("first", "second"), wandb_file.run_files(tmp_path), strict=True):
        expected = in_csv(tmp_path / "csv" / part / "metrics.csv")
        assert {key for key, _ in expected} >= KEYS
        tensorboard = in_tensorboard(tmp_path / "tb" / part)
        weights_and_biases = in_wandb(file)
        for (key, step), value in expected.items():
            assert tensorboard[key, step] == pytest.approx(value, rel=1e-5), (key, step)
            assert weights_and_biases[key, step] == pytest.approx(value, rel=1e-5), (key, step)
    # The value is what the module itself has found, and steps go on where they were.
    last = max(step for key, step in expected if key == "val/accuracy")
    assert last == 4 * 21 - 1
    macs = trainer.callback_metrics["compute/macs"].item()
    assert expected["compute/macs", trainer.global_step] == pytest.approx(macs)
    assert min(step for _, step in expected) > 2 * 21 - 1


def in_csv(path: Path) -> dict[tuple[str, int], float]:
    with path.open() as file:
        return {
            (key, int(row["step"])): float(value)
            for row in csv.DictReader(file)
            for key, value in row.items()
            if value and key not in ("step", "epoch")
        }


def in_tensorboard(folder: Path) -> dict[tuple[str, int], float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()
    assert {tag for tag in tags["images"] if tag.startswith("gates/pictures/")} == {
        f"gates/pictures/{layer}" for layer in LAYERS
    }
    assert "gates/layers/text_summary" in tags["tensors"]
    return {
        (tag, event.step): event.value for tag in tags["scalars"] for event in events.Scalars(tag)
    }


def in_wandb(file: Path) -> dict[tuple[str, int], float]:
    return {
        (key, row["trainer/global_step"]): value
        for row in wandb_file.history(file)
        for key, value in row.items()
        if isinstance(value, int | float)
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Gate collapse")
def test_tables_and_pictures_of_wandb_are_whole_after_a_resume(tmp_path: Path) -> None:
    import wandb

    trained(tmp_path, epochs=2)
    wandb.finish()
    trained(tmp_path, epochs=4, checkpoint=tmp_path / "kept" / "last.ckpt")
    wandb.finish()
    file = wandb_file.run_files(tmp_path)[-1]
    media = sorted((file.parent / "files").rglob("layers_*.table.json"))
    tables = [json.loads(path.read_text()) for path in media]
    longest = max(tables, key=lambda table: len(table["data"]))
    epochs = [row[longest["columns"].index("epoch")] for row in longest["data"]]
    assert epochs == [0, 0, 1, 1, 2, 2, 3, 3]  # two gates, from the very beginning
    shown = [row for row in wandb_file.history(file) if "gates/pictures.filenames" in row]
    assert shown[0]["gates/pictures.captions"] == list(LAYERS)
    assert shown[0]["trainer/global_step"] == 4 * 21 - 1
    for name in shown[0]["gates/pictures.filenames"]:
        assert (file.parent / "files" / name).stat().st_size > 1000


def fitted(root: Path, *options: str) -> Path:
    """Run `fit` in a process of its own, and return the file of its W&B run."""
    done = subprocess.run(
        [sys.executable, "-m", "dg_lightning", "fit", "--config", "digits/dynamicgate", *options,
         "--trainer.max_epochs=1", "--seed_everything=3", "--quiet"],
        cwd=root, env={**os.environ, "WANDB_MODE": "offline"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    (file,) = wandb_file.run_files(root)
    return file


@pytest.mark.slow
def test_the_shipped_config_gives_wandb_all_of_the_config_and_definitions(tmp_path: Path) -> None:
    file = fitted(tmp_path, "--config", "logger/wandb")
    config = wandb_file.config(file)
    assert config["config"]["seed_everything"] == 3
    assert config["config"]["trainer"]["max_epochs"] == 1
    assert config["config"]["model"]["init_args"]["num_classes"] == 10
    assert config["versions"]["torch"] == torch.__version__.partition("+")[0]
    run = next(r.run for r in wandb_file.records(file) if r.HasField("run"))
    assert (run.project, run.job_type) == ("dg-lightning", "train")
    assert list(run.tags) == ["dg-lightning"]
    defined = wandb_file.definitions(file)
    assert defined["gates/*"].step_metric == "trainer/global_step"
    assert defined["val/accuracy"].summary.max
    assert defined["val/loss"].summary.min
    (folder,) = (tmp_path / "runs" / "digits" / "dynamicgate").iterdir()
    kept = {"checkpoints", "config.yaml", "gates", "metrics.csv", "versions.json"}
    assert {path.name for path in folder.iterdir()} >= kept


@pytest.mark.slow
def test_with_a_server_the_kept_checkpoint_is_an_artifact(tmp_path: Path) -> None:
    # The client writes the same records when it is told to keep them for later.
    file = fitted(tmp_path, "--config", "logger/wandb_online")
    (model,) = [a for a in wandb_file.artifacts(file) if a.type == "model"]
    assert {"latest", "best"} <= set(model.aliases)
    assert [entry.path for entry in model.manifest.contents] == ["model.ckpt"]


def test_mlflow_is_asked_for_figures_and_tables_by_its_abilities() -> None:
    """Without the package: the calls of MLflow's client, as its documentation has them."""
    from matplotlib.figure import Figure

    from dg_lightning.monitoring import show_pictures, show_table, supports_images

    class Client:
        calls: ClassVar[list[tuple[Any, ...]]] = []

        def log_figure(self, run_id: str, figure: Any, artifact_file: str) -> None:
            self.calls.append((run_id, artifact_file))

        def log_table(self, run_id: str, data: Any, artifact_file: str) -> None:
            self.calls.append((run_id, data, artifact_file))

    class Logger:
        run_id = "r1"
        experiment = Client()

    assert supports_images(Logger())
    show_pictures(Logger(), "gates/pictures", {"a": Figure()}, 7)
    show_table(Logger(), "gates/layers", ["x", "y"], [[1, 2], [3, 4]], 7)
    assert Client.calls == [
        ("r1", "gates/pictures/a/step_00000007.png"),
        ("r1", {"x": [1, 3], "y": [2, 4]}, "gates/layers/step_00000007.json"),
    ]
