"""A checkpoint of version 0.2, saved before files were merged."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from dg_lightning import GatedClassifier, gate_layers
from dg_lightning.cli.program import run_command
from dg_lightning.datamodules import DigitsDataModule

FOLDER = Path(__file__).parents[1] / "fixtures" / "v0_2"
CHECKPOINT = FOLDER / "half_way.ckpt"  # after 4 of 8 epochs


def test_it_tests_as_it_did() -> None:
    model = GatedClassifier.load_from_checkpoint(CHECKPOINT)
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    (logged,) = trainer.test(model, DigitsDataModule(batch_size=64), verbose=False)
    # Of the version that has saved it.
    assert logged["test/accuracy"] == 0.2527777850627899
    assert logged["test/loss"] == pytest.approx(2.223156690597534, rel=1e-6)
    assert logged["compute/macs"] == 627.0
    assert logged["compute/macs_expected"] == pytest.approx(382.33191, rel=1e-6)


@pytest.mark.filterwarnings("ignore:τ has no effect")
def test_it_resumes_with_every_callback_and_reaches_what_the_old_version_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved = torch.load(CHECKPOINT, weights_only=True)
    cli: Any = run_command(
        ["fit", f"--config={FOLDER / 'config.yaml'}", f"--ckpt_path={CHECKPOINT}"]
    )
    assert cli.trainer.global_step == 2 * saved["global_step"]
    assert all(gate.min_open > 0 for gate in gate_layers(cli.model).values())
    (logged,) = cli.trainer.test(cli.model, cli.datamodule, verbose=False)
    assert logged["test/accuracy"] == pytest.approx(0.39444443583488464)
    assert logged["compute/macs_share"] == pytest.approx(0.30144229531288147)
