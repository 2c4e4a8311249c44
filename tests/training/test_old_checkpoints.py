"""Checkpoints of version 0.2, saved before files were merged and names were changed."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dg_lightning import GatedClassifier, GatedLM, gate_layers
from dg_lightning.callbacks import AddGates, BudgetController, ExactResume, GateMonitor
from dg_lightning.cli.program import run_command
from dg_lightning.datamodules import DigitsDataModule

FOLDER = Path(__file__).parents[1] / "fixtures" / "v0_2"
CHECKPOINT = FOLDER / "half_way.ckpt"  # after 4 of 8 epochs


@pytest.mark.filterwarnings("ignore:`min_open=0.05` is a fraction")
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
    # As measured by the version that saved it.
    assert logged["test/accuracy"] == 0.2527777850627899
    assert logged["test/loss"] == pytest.approx(2.223156690597534, rel=1e-6)
    assert logged["compute/macs"] == 627.0
    assert logged["compute/macs_expected"] == pytest.approx(382.33191, rel=1e-6)


@pytest.mark.filterwarnings("ignore:`min_open=0.05` is a fraction")
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


class Sums(pl.LightningModule):
    """Somebody's model: says whether the sum of the inputs is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


def sums() -> DataLoader[Any]:
    x = torch.linspace(-1, 1, 64 * 8).reshape(8, 64).t().sin()
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 16)


def add_gates_trainer(root: Path, steps: int) -> pl.Trainer:
    gates = AddGates(feed_forward={"kind": "static"}, example=torch.zeros(1, 8))
    return pl.Trainer(
        accelerator="cpu",
        logger=False,
        default_root_dir=root,
        max_steps=steps,
        callbacks=[gates, BudgetController(0.5), GateMonitor(), ExactResume()],
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.mark.filterwarnings("ignore:BudgetController")
def test_gates_of_add_gates_go_on(tmp_path: Path) -> None:
    model = Sums()
    trainer = add_gates_trainer(tmp_path, 32)
    trainer.fit(model, sums(), ckpt_path=FOLDER / "add_gates.ckpt", weights_only=True)
    expected = torch.load(FOLDER / "add_gates_end.pt", weights_only=True)
    for name, value in expected.items():
        torch.testing.assert_close(model.state_dict()[name], value)


def test_a_language_model_loads_and_computes_what_it_did() -> None:
    model = GatedLM.load_from_checkpoint(FOLDER / "token_gates.ckpt").eval()
    x = torch.arange(16).reshape(2, 8)
    expected = torch.load(FOLDER / "token_gates_logits.pt", weights_only=True)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)


def test_experts_load_and_compute_what_they_did() -> None:
    model = GatedClassifier.load_from_checkpoint(FOLDER / "experts.ckpt").eval()
    expected = torch.load(FOLDER / "experts_logits.pt", weights_only=True)
    with torch.no_grad():
        torch.testing.assert_close(model(torch.linspace(-1, 1, 24).reshape(3, 8)), expected)
