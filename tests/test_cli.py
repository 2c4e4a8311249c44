import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import dg_lightning
from dg_lightning import GatedClassifier
from dg_lightning.cli import main, shipped_configs

SMALL = [
    "--trainer.max_epochs=2",
    "--trainer.enable_progress_bar=false",
    "--trainer.accelerator=cpu",
]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dg-lightning"])


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dg_lightning", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must fail; return its one line."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    errors = [line for line in lines if line.startswith("dg-lightning: error: ")]
    assert len(errors) == 1
    assert lines[-1] == errors[0]
    assert not any("Traceback" in line for line in lines)
    return errors[0].removeprefix("dg-lightning: error: ")


@pytest.mark.parametrize("variant", ["baseline", "dropout", "dynamicgate"])
def test_fit_then_test_a_shipped_config(variant: str, tmp_path: Path) -> None:
    main(["fit", "--config", f"digits/{variant}", *SMALL])
    folder = tmp_path / "runs" / "digits" / variant / "version_0"
    assert (folder / "metrics.csv").is_file()
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["trainer"]["max_epochs"] == 2
    assert config["model"]["init_args"]["num_classes"] == 10
    assert config["model"]["init_args"]["input_shape"] == [1, 8, 8]
    # All of it reaches the logger too.
    logged = yaml.safe_load((folder / "hparams.yaml").read_text())["config"]
    assert logged["data"]["class_path"] == "dg_lightning.datamodules.DigitsDataModule"
    assert logged["trainer"]["max_epochs"] == 2

    main(["test", "--config", f"digits/{variant}", *SMALL])
    (row,) = csv.DictReader((folder.parent / "version_1" / "metrics.csv").open())
    assert float(row["test/accuracy"]) > 0.3
    assert float(row["compute/macs_dense"]) == 64 * 256 + 256 * 128 + 128 * 10
    again = GatedClassifier.load_from_checkpoint(folder / "checkpoints" / "last.ckpt")
    assert again.num_classes == 10


def test_newest_checkpoint_is_used_and_resume_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ["--config", "digits/dynamicgate", *SMALL]
    main(["fit", *options])
    first = Path("runs/digits/dynamicgate/version_0/checkpoints/last.ckpt")
    main(["fit", *options, "--trainer.max_epochs=3", "--ckpt_path", str(first)])
    second = Path("runs/digits/dynamicgate/version_1/checkpoints/last.ckpt")
    assert torch.load(second, weights_only=True)["epoch"] == 2
    main(["validate", *options])
    assert f"Using the newest checkpoint, {second}" in caplog.text
    main(["predict", *options])
    rows = list(csv.DictReader((second.parents[2] / "version_3" / "predictions.csv").open()))
    assert len(rows) == 360
    assert {row["prediction"] for row in rows} <= set("0123456789")


def test_printed_config_is_accepted_again_and_fragments_stack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--config", "digits/dynamicgate", "--model.net.hidden=[32]", "--print_config"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    Path("printed.yaml").write_text(printed)
    Path("more.yaml").write_text(
        "trainer:\n  callbacks+:\n    class_path: LearningRateMonitor\n"
        "    init_args: {logging_interval: epoch}\n"
    )
    with pytest.raises(SystemExit):
        main(["fit", "--config", "printed.yaml", "--print_config"])
    assert capsys.readouterr().out == printed
    with pytest.raises(SystemExit):
        main(["fit", "--config", "printed.yaml", "--config", "more.yaml", "--print_config"])
    callbacks = yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"]
    names = [c["class_path"].rpartition(".")[2] for c in callbacks]
    assert names == ["GatePenalty", "ModelCheckpoint", "LearningRateMonitor"]


def test_dotted_overrides_reach_net_gate_optimizer_and_an_appended_callback(tmp_path: Path) -> None:
    main(
        [
            "fit",
            "--config=digits/baseline",
            "--model.net.hidden=[16,8]",
            "--model.net.gate={kind: dynamic}",
            "--model.net.gate.network=low_rank",
            "--model.net.gate.rank=3",
            "--model.optimizer=SGD",
            "--model.optimizer.lr=0.05",
            "--trainer.callbacks+=GatePenalty",
            "--trainer.callbacks.weight=0.2",
            *SMALL,
        ]
    )
    model = GatedClassifier.load_from_checkpoint(
        next(Path("runs").rglob("last.ckpt")), weights_only=True
    )
    net = model.hparams["net"]["init_args"]
    assert net["gate"] == {"kind": "dynamic", "network": "low_rank", "rank": 3}
    assert model.hparams["optimizer"]["class_path"] == "torch.optim.SGD"
    config = yaml.safe_load(next(Path("runs").rglob("config.yaml")).read_text())
    assert config["trainer"]["callbacks"][-1]["class_path"] == "dg_lightning.callbacks.GatePenalty"


def test_any_module_and_data_module_can_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("theirs.py").write_text("""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning.pytorch import LightningDataModule, LightningModule
from dg_lightning import GatedLinear

class Data(LightningDataModule):
    def __init__(self, size: int = 8):
        super().__init__()
        self.size = size
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(self.size, 4)), batch_size=4)

class Model(LightningModule):
    def __init__(self, width: int = 3):
        super().__init__()
        self.save_hyperparameters()
        gated = GatedLinear(4, width, gate={"kind": "static"})
        self.net = nn.Sequential(gated, nn.Linear(width, 1))
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Net(nn.Module):
    def __init__(self, num_classes: int, width: int = 4):
        super().__init__()
        last = nn.Linear(width, num_classes)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, width), last)
    def forward(self, x):
        return self.layers(x)
""")
    monkeypatch.syspath_prepend(str(tmp_path))
    common = ["--trainer.logger=false", "--trainer.default_root_dir=runs", *SMALL]
    model_and_data = "--model=theirs.Model --model.width=5 --data=theirs.Data --data.size=12"
    callback = "--trainer.callbacks=GatePenalty --trainer.callbacks.weight=0.1"
    main(["fit", *model_and_data.split(), *callback.split(), *common])
    saved = torch.load(next(Path("runs").rglob("*.ckpt")), weights_only=True)
    assert saved["hyper_parameters"]["width"] == 5
    # Any net in our module, told only the sizes that it asks for.
    options = ["--config=digits/baseline", "--model.net=theirs.Net"]
    options.append("--trainer.logger.save_dir=own")
    main(["fit", *options, "--model.net.width=7", *SMALL])
    main(["test", *options])
    model = GatedClassifier.load_from_checkpoint(next(Path("own").rglob("last.ckpt")))
    assert model.net.layers[1].out_features == 7  # type: ignore[union-attr,index]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.net.hiden=[3]"], "'hiden' is not accepted"),
        (["--trainer.max_epoch=3"], "unrecognized arguments: --trainer.max_epoch=3"),
        (["--trainer.max_epochs=many"], "trainer.max_epochs: expected int."),
        (["--model.net.gate.rank=x"], "gate: expected int, got x."),
        (["--model.net.gate.thresold=0.3"], "gate: Unexpected keys: {'thresold'}."),
        (["--model.net.gate.threshold=1.5"], "`threshold` must be in [0, 1), got 1.5."),
        (["--model=no_package.Model"], "model: No module named 'no_package'"),
        (["--model.net=no_package.Net"], "net: No module named 'no_package'"),
        (["--data=NoData"], "data: There is no class NoData; give its full path"),
        (["--data.batch_size=0"], "`batch_size` must be at least 1, got 0."),
        (["--config=digits/dynamcgate"], "did you mean digits/dynamicgate?"),
        (["--config=nowhere.yaml"], "There is no config 'nowhere.yaml'"),
        (["--ckpt_path=nowhere.ckpt"], "There is no checkpoint 'nowhere.ckpt'"),
        (["--ckpt_path=broken.ckpt"], "'broken.ckpt' is not a checkpoint, or was cut short"),
        (["--trainer.callbacks+=GatePenalty", "--trainer.callbacks.weigth=1"], "'weigth' is not"),
        (["--trainer.accelerator=abacus"], "invalid accelerator name"),
        (["--model.class_weights=[1,2]"], "`class_weights` must have 10 entries"),
        (["--config=broken.yaml"], "config: "),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_is_wrong_is_said_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("broken.ckpt").write_text("not a checkpoint")
    Path("broken.yaml").write_text("model: [unclosed\n  - {")
    assert message in refused(capsys, "fit", "--config", "digits/dynamicgate", *SMALL, *arguments)


def test_evaluating_without_a_trained_checkpoint_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = refused(capsys, "test", "--config", "digits/dynamicgate")
    assert "no checkpoint under runs/digits/dynamicgate: run `dg-lightning fit` first" in line


def test_a_wrong_command_as_a_process_has_exit_status_2_and_no_traceback() -> None:
    done = run("fit", "--config", "digits/dynamicgate", "--trainer.max_epoch=3")
    assert done.returncode == 2
    assert (
        done.stderr.strip() == "dg-lightning: error: unrecognized arguments: --trainer.max_epoch=3"
    )


@pytest.mark.parametrize("arguments", [["--help"], ["fit", "--help"]])
def test_help(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 0
    assert "dg-lightning" in done.stdout


def test_version_by_module_and_by_script() -> None:
    script = Path(sys.executable).with_name("dg-lightning")
    for command in ([sys.executable, "-m", "dg_lightning"], [str(script)]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == f"dg-lightning {dg_lightning.__version__}"


def test_every_shipped_config_parses_and_fits_a_batch() -> None:
    configs = shipped_configs()
    assert {"digits/baseline", "digits/dropout", "digits/dynamicgate"} <= set(configs)
    for name in configs:
        main(["fit", "--config", name, "--trainer.fast_dev_run=true", "--trainer.accelerator=cpu"])
        assert not any(Path().rglob("*.ckpt"))


def test_nothing_is_written_outside_of_the_run_folder(tmp_path: Path) -> None:
    options: list[Any] = ["--config", "digits/dynamicgate", *SMALL]
    main(["fit", *options])
    main(["test", *options])
    assert [entry.name for entry in tmp_path.iterdir()] == ["runs"]
