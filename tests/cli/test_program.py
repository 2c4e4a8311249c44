import csv
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import dg_lightning
from dg_lightning import GatedClassifier
from dg_lightning.cli import main, shipped_configs
from dg_lightning.configs import config_path

pytestmark = pytest.mark.usefixtures("in_empty_folder")

RunProgram = Callable[..., subprocess.CompletedProcess[str]]
SMALL = [
    "--trainer.max_epochs=2",
    "--trainer.enable_progress_bar=false",
    "--trainer.accelerator=cpu",
]


@pytest.mark.slow
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


def test_what_the_optimizer_keeps_of_closed_units_does_not_slow_training_down() -> None:
    if not torch.set_flush_denormal(False):
        pytest.skip("this CPU has no such switch")
    # The mean gradient of a unit that gets none any more: it would stay there for good. Of few,
    # because other threads than this one may have been made before.
    mean = torch.full([8], 1e-42)
    assert mean.mul(0.9).min() > 0
    main(["fit", "--config", "digits/dynamicgate", *SMALL, "--trainer.fast_dev_run=true"])
    assert not mean.mul(0.9).any()


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
    of_config = ["ModelCheckpoint", "GateMonitor", "CollapseDetector", "GatePenalty"]
    assert names == [*of_config, "LearningRateMonitor"]


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
    monkeypatch.setenv("DG_TRUST", "theirs")
    model = GatedClassifier.load_from_checkpoint(next(Path("own").rglob("last.ckpt")))
    assert model.net.layers[1].out_features == 7  # type: ignore[union-attr,index]


@pytest.mark.slow
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


@pytest.mark.slow
def test_two_processes_fit_test_and_predict_without_noise(run_program: RunProgram) -> None:
    common = [
        "--config=digits/dynamicgate",
        *SMALL,
        "--trainer.devices=2",
        "--trainer.strategy=ddp",
    ]
    for command in ("fit", "test", "predict"):
        done = run_program(command, *common)
        assert done.returncode == 0, done.stderr
        assert "sync_dist" not in done.stderr
        assert done.stdout.count("Compute ledger") == (command == "test")
    (path,) = Path().rglob("predictions*.csv")
    rows = list(csv.DictReader(path.open()))
    assert [int(row["index"]) for row in rows] == list(range(360))


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["fit", "--help"]])
def test_help(arguments: list[str], run_program: RunProgram) -> None:
    done = run_program(*arguments)
    assert done.returncode == 0
    assert "dg-lightning" in done.stdout


def test_version_by_module_and_by_script() -> None:
    script = Path(sys.executable).with_name("dg-lightning")
    for command in ([sys.executable, "-m", "dg_lightning"], [str(script)]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == f"dg-lightning {dg_lightning.__version__}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "dataset",
    [
        "digits",
        "mnist",
        "fashion_mnist",
        "cifar10",
        "tiny_imagenet",
        "speech_commands",
        "pbmc3k",
        "vit",
        "table",
        "images",
        "continual",
    ],
)
def test_every_shipped_config_parses_and_fits_a_batch(
    dataset: str, small_datasets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DG_DATA", str(small_datasets))
    configs = [name for name in shipped_configs() if name.startswith(f"{dataset}/")]
    assert len(configs) >= 2
    # In bfloat16 a batch takes minutes on some CPUs.
    small = ["--trainer.precision=32", "--data.batch_size=8"] if dataset == "vit" else []
    once = ["--trainer.fast_dev_run=true", "--trainer.accelerator=cpu", *small]
    for name in configs:
        main(["fit", "--config", name, *once])
        assert not any(Path().rglob("*.ckpt"))


FRAGMENTS = [name for name in shipped_configs() if name.startswith("callbacks/")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:BudgetController")  # three steps do not do
@pytest.mark.filterwarnings("ignore:(RigL|SET) never rewires")
@pytest.mark.filterwarnings("ignore:τ has no effect")
@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_every_fragment_appends_its_callback_and_fits(fragment: str) -> None:
    gated = "--model.net.gate={kind: static}"
    options = ["--config=digits/baseline", f"--config={fragment}"]
    options += [gated] if fragment != "callbacks/add_gates" else []
    main(["fit", *options, "--trainer.max_epochs=1", "--trainer.limit_train_batches=3"])
    saved = yaml.safe_load(next(Path("runs").rglob("config.yaml")).read_text())
    names = [callback["class_path"] for callback in saved["trainer"]["callbacks"]]
    fragment_settings = yaml.safe_load(Path(config_path(fragment)).read_text("utf-8"))
    added = [callback["class_path"] for callback in fragment_settings["trainer"]["callbacks+"]]
    assert names[0].endswith("ModelCheckpoint")
    assert names[1:] == added


@pytest.mark.parametrize("name", ["collapse_detector", "gate_monitor", "exact_resume"])
def test_a_callback_that_a_config_already_has_is_not_added_twice(name: str) -> None:
    options = ["--config=digits/dynamicgate_input", f"--config=callbacks/{name}"]
    main(["fit", *options, "--trainer.max_epochs=1", "--trainer.limit_train_batches=3"])
    saved = yaml.safe_load(next(Path("runs").rglob("config.yaml")).read_text())
    names = [callback["class_path"] for callback in saved["trainer"]["callbacks"]]
    assert len(names) == len(set(names))


@pytest.mark.slow
def test_the_papers_recipe_meets_its_keep_target() -> None:
    options = ["--config=digits/baseline", "--config=callbacks/paper_recipe"]
    options += ["--model.net.gate={kind: static}", "--model.gate_lr_factor=60"]
    main(["fit", *options, "--trainer.max_epochs=40", "--trainer.accelerator=cpu"])
    rows = list(csv.DictReader(next(Path("runs").rglob("metrics.csv")).open()))
    shares = [float(row["compute/macs_share"]) for row in rows if row.get("compute/macs_share")]
    assert shares[-1] == pytest.approx(0.25, abs=0.05)


def test_dotted_options_reach_the_gate_callback_of_a_shipped_config() -> None:
    options = ["--config=digits/dynamicgate", "--trainer.callbacks.weight.start=0"]
    options += ["--trainer.callbacks.weight.end=1", "--trainer.callbacks.weight.begin=1 epochs"]
    main(["fit", *options, "--trainer.max_epochs=2", "--trainer.limit_train_batches=3"])
    saved = yaml.safe_load(next(Path("runs").rglob("config.yaml")).read_text())
    assert saved["trainer"]["callbacks"][-1]["init_args"]["weight"]["begin"] == "1 epochs"


def test_a_dataset_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dg_lightning.datamodules import TinyImageNetDataModule

    (download,) = TinyImageNetDataModule.downloads
    refused = replace(download, url="http://127.0.0.1:1/tiny.zip")
    monkeypatch.setattr(TinyImageNetDataModule, "downloads", (refused,))
    with pytest.raises(SystemExit) as caught:
        main(["fit", "--config", "tiny_imagenet/baseline", f"--data.root={tmp_path}/data"])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    for part in (
        "/tiny-imagenet-200/wnids.txt, ",
        "refused",
        "unpack it to",
        refused.url,
        "DG_DATA",
    ):
        assert part in line


def test_nothing_is_written_outside_of_the_run_folder(tmp_path: Path) -> None:
    options: list[Any] = ["--config", "digits/dynamicgate", *SMALL]
    main(["fit", *options])
    main(["test", *options])
    assert [entry.name for entry in tmp_path.iterdir()] == ["runs"]
