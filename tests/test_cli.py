import csv
import os
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

PENALTY = ["--trainer.callbacks+=GatePenalty", "--trainer.callbacks.weight=1"]


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
    assert [int(row["index"]) for row in rows] == list(range(360))
    assert {row["prediction"] for row in rows} <= set("0123456789")


def test_a_run_resumed_after_an_epoch_ends_as_the_uninterrupted_one() -> None:
    options = ["--config=digits/dynamicgate", *SMALL]
    main(["fit", *options, "--trainer.max_epochs=3", "--trainer.logger.save_dir=whole"])
    main(["fit", *options, "--trainer.max_epochs=1"])
    main(["fit", *options, "--trainer.max_epochs=3", "--ckpt_path=last"])
    states = []
    for folder in ("whole/digits/dynamicgate/version_0", "runs/digits/dynamicgate/version_1"):
        states.append(
            torch.load(f"{folder}/checkpoints/last.ckpt", weights_only=True)["state_dict"]
        )
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


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
        (["--config=broken.yaml"], "Problems parsing config"),
        (["--config=binary.yaml"], "A config file is not text"),
        (["--ckpt_path=."], "'.' is not a checkpoint"),
        (["--ckpt_path=other.pt"], "'other.pt' holds no checkpoint of a Trainer"),
        (["--ckpt_path=best"], "There is no checkpoint 'best'"),
        (["--ckpt_path=last"], "There is no checkpoint under runs/digits/dynamicgate"),
        (["--model.num_classes=7"], "has num_classes 7, DigitsDataModule has 10: set model.num"),
        (["--model.input_shape=[9]"], "DigitsDataModule has [1, 8, 8]: set model.input_shape"),
        (["--model.net=torch.nn.Identity"], "GatedClassifier has no gate"),
        ([*PENALTY, "--trainer.callbacks.layers=[nope]"], "No gate is named 'nope'; there are net"),
        (["--model.optimizer.lr=-1"], "`optimizer`: AdamW says: Invalid learning rate: -1.0"),
        (["--model.label_smoothing=2"], "`label_smoothing` must be in [0, 1], got 2.0."),
        (["--model.class_weights=ballanced"], "class_weights: expected list or 'balanced'"),
        (["--model.net.hidden=[0]"], "Widths must be at least 1, got [64, 0, 10]."),
        (["--data.num_workers=-1"], "`num_workers` must be at least 0, got -1."),
        (["--data.split_seed=-4"], "`split_seed` must be at least 0, got -4."),
        (
            ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/acc"],
            "Early stopping conditioned on metric `val/acc` which is not available",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_is_wrong_is_said_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("broken.ckpt").write_text("not a checkpoint")
    Path("broken.yaml").write_text("model: [unclosed\n  - {")
    Path("binary.yaml").write_bytes(bytes(range(256)))
    torch.save({"a": torch.zeros(2)}, "other.pt")
    assert message in refused(capsys, "fit", "--config", "digits/dynamicgate", *SMALL, *arguments)


def test_a_checkpoint_brings_its_own_model_and_says_where_it_differs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    main(["fit", "--config=digits/dynamicgate", "--model.net.hidden=[24]", *SMALL])
    gated = "runs/digits/dynamicgate/version_0/checkpoints/last.ckpt"
    main(["test", "--config=digits/dynamicgate", *SMALL])
    assert "differs from the config in model.net.init_args.hidden." in caplog.text
    main(["fit", "--config=digits/baseline", *SMALL])
    dense = "runs/digits/baseline/version_0/checkpoints/last.ckpt"
    caplog.clear()
    # In either direction the net is the checkpoint's: gates neither appear nor vanish.
    main(["test", "--config=digits/dynamicgate", f"--ckpt_path={dense}", *SMALL])
    assert "model.net.init_args.gate" in caplog.text
    main(["test", "--config=digits/baseline", f"--ckpt_path={gated}", *SMALL])
    configs = [
        Path(f"runs/digits/{v}/config.yaml")
        for v in ("dynamicgate/version_2", "baseline/version_1")
    ]
    nets = [
        yaml.safe_load(c.read_text())["model"]["init_args"]["net"]["init_args"] for c in configs
    ]
    assert [net["hidden"] for net in nets] == [[256, 128], [24]]
    assert [net["gate"] is None for net in nets] == [True, False]


@pytest.mark.parametrize(
    "options",
    [
        ["--trainer.logger=false"],
        ["--trainer.logger=true"],
        ["--trainer.logger.version=mine"],
        ["--trainer.logger=null", "--trainer.default_root_dir=elsewhere"],
        ["--trainer.callbacks.dirpath=kept"],
    ],
    ids=lambda options: options[-1],
)
def test_what_fit_has_written_is_found_again(
    options: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    common = ["--config=digits/baseline", *SMALL, *options]
    main(["fit", *common])
    main(["test", *common])
    (written,) = Path().rglob("last.ckpt")
    assert f"Using the newest checkpoint, {written}" in caplog.text
    main(["fit", *common, "--ckpt_path=last", "--trainer.max_epochs=3"])
    assert torch.load(max(Path().rglob("last.ckpt"), key=os.path.getmtime))["epoch"] == 2


def test_a_class_of_the_working_folder_can_be_named_by_the_script() -> None:
    Path("own.py").write_text(
        "from lightning.pytorch import Callback\n"
        "class Mine(Callback):\n"
        "    def on_fit_start(self, trainer, pl_module):\n"
        "        open('mine.txt', 'w').close()\n"
    )
    script = Path(sys.executable).with_name("dg-lightning")
    options = "--config=digits/baseline --trainer.callbacks+=own.Mine --trainer.fast_dev_run=true"
    subprocess.run([script, "fit", *options.split()], check=True, capture_output=True, timeout=300)
    assert Path("mine.txt").exists()


def test_two_processes_fit_test_and_predict_without_noise() -> None:
    common = [
        "--config=digits/dynamicgate",
        *SMALL,
        "--trainer.devices=2",
        "--trainer.strategy=ddp",
    ]
    for command in ("fit", "test", "predict"):
        done = run(command, *common)
        assert done.returncode == 0, done.stderr
        assert "sync_dist" not in done.stderr
        assert done.stdout.count("Compute ledger") == (command == "test")
    rows = [
        row for path in Path().rglob("predictions_*.csv") for row in csv.DictReader(path.open())
    ]
    assert sorted(int(row["index"]) for row in rows) == list(range(360))


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
