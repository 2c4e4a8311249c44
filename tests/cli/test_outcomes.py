"""Messages after a failed training run, or for a net that was never trained."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from typing_extensions import override

from dg_lightning.cli import main

pytestmark = pytest.mark.usefixtures("in_empty_folder")

SMALL = ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]
THEIRS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from lightning.pytorch import LightningDataModule, LightningModule

class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4)
    val_dataloader = test_dataloader = train_dataloader

class Model(LightningModule):
    def __init__(self, width: int = 3, rate: float = 0.1, lost: bool = False):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(4, width)
    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        return loss * float("nan") if self.hparams.lost else loss
    def test_step(self, batch, batch_idx):
        self.log("width", float(self.net.out_features))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.rate)
"""


def test_a_training_that_is_not_finite_has_failed(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--config=digits/baseline", "--model.optimizer=SGD", "--trainer.max_epochs=2"]
    with pytest.raises(SystemExit) as stopped:
        main(["fit", *options, "--model.optimizer.lr=1e30", *SMALL])
    assert stopped.value.code == 1
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("dg-lightning: err")]
    assert "Training failed: " in line
    assert "lower the learning rate" in line


def test_somebody_elses_module_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("elses.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ["--model=elses.Model", "--data=elses.Data", "--trainer.max_epochs=1", *SMALL]
    with pytest.raises(SystemExit) as stopped:
        main(["fit", *options, "--model.lost=true"])
    assert stopped.value.code == 1
    main(["fit", *options, "--model.width=5"])
    # Without a checkpoint a line says so; with one, its plain hyper-parameters are taken.
    with pytest.warns(UserWarning, match="--ckpt_path is not set: `test` uses the"):
        main(["test", *options])
    (path,) = list(Path("lightning_logs/version_1").rglob("*.ckpt"))
    capsys.readouterr()
    main(["test", *options, f"--ckpt_path={path}"])
    assert "width 5" in " ".join(capsys.readouterr().out.split())


def test_a_test_prints_what_counts_and_every_key_if_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["fit", "--config=digits/dynamicgate", "--trainer.max_epochs=1", *SMALL])
    capsys.readouterr()
    main(["test", "--config=digits/dynamicgate", *SMALL])
    shown = capsys.readouterr().out
    rows = ["test accuracy", "test macro-F1", "executed MACs per sample", "relative to dense"]
    assert all(shown.count(row) == 1 for row in rows)
    assert "compute/" not in shown
    main(["test", "--config=digits/dynamicgate", "--verbose=true", *SMALL])
    assert "compute/relmac_g" in capsys.readouterr().out
    main(["validate", "--config=digits/dynamicgate", *SMALL])
    assert "validation accuracy" in capsys.readouterr().out


@pytest.mark.slow
def test_a_checkpoint_without_its_parts_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--config=digits/baseline", "--trainer.max_epochs=1", *SMALL]
    main(["fit", *options, "--trainer.limit_train_batches=2"])
    good = torch.load(next(Path("runs").rglob("last.ckpt")), weights_only=True)
    for key in ("state_dict", "optimizer_states", "loops", "epoch", "callbacks", "lr_schedulers"):
        torch.save({k: v for k, v in good.items() if k != key}, "less.ckpt")
        capsys.readouterr()
        status = 0
        try:
            main(["fit", *options, "--ckpt_path=less.ckpt", "--trainer.max_epochs=2"])
        except SystemExit as stopped:
            status = int(stopped.code or 0)
        err = capsys.readouterr().err.splitlines()
        said = [line for line in err if line.startswith("dg-lightning: error: ")]
        assert (status, len(said)) in ((0, 0), (2, 1)), key


class Interrupting(pl.Callback):
    @override
    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.current_epoch == 1:
            raise KeyboardInterrupt


def test_an_interrupted_training_keeps_its_epoch_and_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("interrupting")
    module.Interrupting = Interrupting  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "interrupting", module)
    options = ["--config=digits/baseline", *SMALL, "--trainer.max_epochs=3"]
    with pytest.raises(SystemExit) as stopped:
        main(["fit", *options, "--trainer.callbacks+=interrupting.Interrupting"])
    assert stopped.value.code == 130
    assert capsys.readouterr().err.endswith(
        "interrupted; `fit --ckpt_path last` resumes from here.\n"
    )
    main(["fit", *options, "--ckpt_path=last"])
    newest = max(Path("runs").rglob("last.ckpt"), key=lambda path: path.stat().st_mtime)
    assert torch.load(newest, weights_only=True)["epoch"] == 2


TERMINATING = """
import os, signal
from lightning.pytorch import Callback

class Terminating(Callback):
    def __init__(self, hook: str, step: int = 0):
        def terminate(trainer, *_, **__):
            if trainer.global_step >= step and not trainer.sanity_checking:
                os.kill(os.getpid(), signal.SIGTERM)
        setattr(self, hook, terminate)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "hook", "step"),
    [
        ("fit", "on_train_batch_end", 21),  # the last batch of an epoch
        ("fit", "on_train_epoch_end", 63),  # the last epoch
        ("test", "on_test_batch_start", 0),
    ],
)
def test_a_run_that_is_terminated_has_the_status_that_shells_report(
    command: str, hook: str, step: int, run_program: Callable[..., Any]
) -> None:
    Path("ending.py").write_text(TERMINATING)
    options = ["--config=digits/baseline", "--trainer.max_epochs=3", *SMALL]
    if command == "test":
        assert run_program("fit", *options).returncode == 0
        options += ["--data.eval_batch_size=32"]
    given = [f"--trainer.callbacks.hook={hook}", f"--trainer.callbacks.step={step}"]
    done = run_program(command, *options, "--trainer.callbacks+=ending.Terminating", *given)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("dg-lightning: ")]
    assert ("--ckpt_path last" in line) == (command == "fit")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_study_that_is_terminated_has_not_succeeded(run_program: Callable[..., Any]) -> None:
    Path("ending.py").write_text(TERMINATING)
    options = ["trainer.max_epochs=2", "trainer.callbacks+=ending.Terminating"]
    options += ["trainer.callbacks.hook=on_train_batch_end", "trainer.callbacks.step=5"]
    study = ["--config=studies/digits", "--output=out", "--only=[baseline]", "--seeds=1"]
    done = run_program("study", *study, f"--set=[{','.join(options)}]")
    assert done.returncode == 128 + signal.SIGTERM, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
