"""What a module's net may be: a class config, a module, or what plain LightningCLI makes of it."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn

from dg_lightning import GatedClassifier, GatedMLP, GatedRegressor
from dg_lightning.datamodules import DigitsDataModule

NET = ["--model.net=GatedMLP", "--model.net.hidden=[8]", "--model.net.gate={kind: static}"]
MODEL = [*NET, "--model.input_shape=[1, 8, 8]", "--model.num_classes=10"]
ADAM = ["--model.optimizer=Adam", "--model.optimizer.lr=0.01"]
FAST = [
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=2",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
]
CLASSES: dict[str, tuple[Any, list[str]]] = {
    "classes": ([GatedClassifier, DigitsDataModule], []),
    "class paths": (
        [],
        [
            "--model=dg_lightning.GatedClassifier",
            "--data=dg_lightning.datamodules.DigitsDataModule",
        ],
    ),
}


@pytest.mark.filterwarnings("ignore:.*smaller than the logging interval")
@pytest.mark.parametrize("kind", CLASSES)
def test_plain_lightning_cli(kind: str, in_empty_folder: None) -> None:
    classes, paths = CLASSES[kind]
    cli: Any = partial(LightningCLI, *classes)
    fit = cli(args=["fit", *paths, *MODEL, *ADAM, *FAST])
    assert isinstance(fit.model, GatedClassifier)
    assert isinstance(fit.model.net, GatedMLP)
    assert fit.model.net.layers()[0].linear.out_features == 8
    (optimizer,) = fit.trainer.optimizers
    assert isinstance(optimizer, torch.optim.Adam)
    assert optimizer.param_groups[0]["lr"] == 0.01
    run = Path("lightning_logs", "version_0")
    (checkpoint,) = run.rglob("*.ckpt")
    saved = [f"--config={run / 'config.yaml'}", f"--ckpt_path={checkpoint}"]
    for command in ("validate", "test", "predict"):
        Path("config.yaml").unlink(missing_ok=True)  # Lightning refuses to overwrite it
        again = cli(args=[command, *saved, "--trainer.logger=false"])
        for name, value in fit.model.state_dict().items():
            assert torch.equal(again.model.state_dict()[name], value)
    loaded = GatedClassifier.load_from_checkpoint(checkpoint)
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(loaded.eval()(x), fit.model.eval()(x))
    assert loaded.optimizer["class_path"] == "torch.optim.Adam"


@pytest.mark.parametrize("kind", [GatedClassifier, GatedRegressor])
def test_a_net_may_be_a_module_which_a_checkpoint_does_not_hold(kind: Any, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10 if kind is GatedClassifier else 1))
    sizes = {"num_classes": 10} if kind is GatedClassifier else {}
    model = kind(net, input_shape=[1, 8, 8], label_smoothing=0.1, **sizes) if sizes else kind(net)
    assert model.net is net
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(model)
    trainer.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    torch.load(tmp_path / "a.ckpt", weights_only=True)
    with pytest.raises(ValueError, match=r"has no `net`.*net=\.\.\."):
        kind.load_from_checkpoint(tmp_path / "a.ckpt")
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, net[1].out_features))
    again = kind.load_from_checkpoint(tmp_path / "a.ckpt", net=other)
    assert torch.equal(again.net[1].weight, net[1].weight)
    assert again.hparams.get("label_smoothing") == (0.1 if sizes else None)


def test_a_module_needs_its_number_of_classes() -> None:
    with pytest.raises(ValueError, match="`num_classes` is not set"):
        GatedClassifier(nn.Linear(4, 2))
