"""GatedRegressor: its loss, its metrics in units of the target, checkpoints, what is refused."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error
from small_tables import people

from dg_lightning import GatedClassifier, GatedRegressor
from dg_lightning.callbacks import GateMonitor, GatePenalty
from dg_lightning.datamodules import DigitsDataModule, TabularDataModule

NET: Any = {
    "class_path": "dg_lightning.GatedMLP",
    "init_args": {
        "hidden": [16],
        "gate": {"kind": "dynamic", "network": "low_rank", "rank": 2},
        "input_gate": {"kind": "static"},
    },
}
ADAM: Any = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.02}}
QUIET: Any = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def rents() -> TabularDataModule:
    return TabularDataModule.from_frame(
        people(), label="rent", task="regression", ignore=["person", "day", "home"], batch_size=32
    )


def trained(folder: Path) -> tuple[pl.Trainer, GatedRegressor]:
    model = GatedRegressor(NET, input_shape=[9], optimizer=ADAM)
    gates: list[Any] = [GateMonitor(), GatePenalty(0.001)]
    trainer = pl.Trainer(default_root_dir=folder, max_epochs=15, callbacks=gates, **QUIET)
    trainer.fit(model, datamodule=rents())
    return trainer, model


def test_the_loss_is_that_of_the_standardised_target() -> None:
    model = GatedRegressor(NET, input_shape=[3])
    model.target_mean.fill_(100.0)
    model.target_std.fill_(20.0)
    target = torch.tensor([100.0, 140.0])
    assert model.task_loss(torch.zeros(2, 1), target).item() == pytest.approx((0 + 4) / 2)


def test_metrics_are_exact_far_from_zero() -> None:
    model = GatedRegressor(NET, input_shape=[3])
    model.target_mean.fill_(1e5)
    model.target_std.fill_(2.0)
    target = 1e5 + torch.randn(500, generator=torch.Generator().manual_seed(0))
    output = (target - 1e5)[:, None] / 2 * 0.9
    model.val_metrics.update(*model.metric_inputs(output, target[:, None]))
    wanted = r2_score(target.double().numpy(), (1e5 + 2.0 * output[:, 0].double()).numpy())
    assert model.val_metrics.compute()["val/r2"].item() == pytest.approx(wanted, abs=1e-3)
    with pytest.raises(ValueError, match=r"target must be one number .*\[4, 2\]"):
        model.task_loss(torch.zeros(4, 1), torch.zeros(4, 2))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_it_learns_and_its_metrics_are_those_of_scikit_learn(tmp_path: Path) -> None:
    trainer, model = trained(tmp_path)
    data = rents()
    (logged,) = trainer.test(model, datamodule=data, verbose=False)
    given = data.part("test")
    outputs: Any = trainer.predict(model, datamodule=rents())
    predicted = torch.cat([batch["prediction"] for batch in outputs])[given.rows].numpy()
    truth = given.labels.numpy()
    assert logged["test/r2"] == pytest.approx(r2_score(truth, predicted), abs=1e-4)
    assert logged["test/rmse"] == pytest.approx(root_mean_squared_error(truth, predicted), rel=1e-4)
    assert logged["test/mae"] == pytest.approx(mean_absolute_error(truth, predicted), rel=1e-4)
    assert logged["test/r2"] > 0.8  # the rule is linear, its noise small


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_checkpoint_predicts_in_the_units_of_its_training(tmp_path: Path) -> None:
    trainer, model = trained(tmp_path)
    trainer.save_checkpoint(tmp_path / "net.ckpt")
    again = GatedRegressor.load_from_checkpoint(tmp_path / "net.ckpt")
    x = torch.randn(5, 9)
    expected = model.eval().predict_step(x, 0)["prediction"]
    torch.testing.assert_close(again.eval().predict_step(x, 0)["prediction"], expected)
    assert again.target_mean == model.target_mean != 0


def test_classes_and_numbers_are_not_confused(tmp_path: Path) -> None:
    trainer = pl.Trainer(default_root_dir=tmp_path, max_epochs=1, **QUIET)
    with pytest.raises(ValueError, match="labels of DigitsDataModule are classes"):
        trainer.fit(GatedRegressor(NET, input_shape=[1, 8, 8]), datamodule=DigitsDataModule())
    with pytest.raises(ValueError, match="`num_classes` must be at least 2"):
        GatedClassifier(NET, input_shape=[9], num_classes=rents().num_classes)
