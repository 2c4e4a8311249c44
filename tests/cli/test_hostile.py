"""Nothing that a checkpoint, a config or a data file names is imported or run."""

import shutil
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import anndata
import h5py
import numpy as np
import pytest
import torch
from hostile import (
    BUILT_IN_TRAINING_ONLY,
    CHECKPOINTS,
    TOUCH,
    hostile_checkpoint,
    is_untouched,
    lay_out,
    pickled_bomb,
)
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from dg_lightning import GatedClassifier, trust
from dg_lightning.callbacks import RigL
from dg_lightning.cli import main
from dg_lightning.datamodules import CIFAR10DataModule, PBMC3kDataModule
from dg_lightning.training.checkpoint import read_checkpoint

CONFIG = ["--config=digits/baseline", "--trainer.enable_progress_bar=false"]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a net, and return its checkpoint."""
    folder = tmp_path_factory.mktemp("good")
    options = [*CONFIG, "--model.net.hidden=[4]", "--trainer.limit_train_batches=2"]
    main(["fit", *options, "--trainer.max_epochs=1", f"--trainer.logger.save_dir={folder}"])
    return next(folder.rglob("last.ckpt"))


@pytest.fixture(autouse=True)
def _in_hostile_folder(in_empty_folder: None, tmp_path: Path) -> None:
    lay_out(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(args)
    assert stopped.value.code == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("dg-lightning: err")]
    return line


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_hostile_checkpoint_runs_nothing(
    name: str, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    hostile_checkpoint(good, path, name)
    shutil.copy(good.parents[1] / "config.yaml", path.parents[1])
    refused(capsys, "fit", *CONFIG, f"--ckpt_path={path}", "--trainer.max_epochs=2")
    assert is_untouched(tmp_path)
    commands = {
        "test": ["test", *CONFIG, f"--ckpt_path={path}"],
        "export": ["export", f"--ckpt_path={path}", "--output=net", "--batch_sizes=[1]"],
    }
    for command in commands.values():
        if name in BUILT_IN_TRAINING_ONLY:
            continue
        refused(capsys, *command)
        assert is_untouched(tmp_path)
    if name not in BUILT_IN_TRAINING_ONLY:
        with pytest.raises((ValueError, TypeError, ModuleNotFoundError)):
            GatedClassifier.load_from_checkpoint(path)
        with (
            path.open("rb") as file,
            pytest.raises((ValueError, TypeError, ModuleNotFoundError)),
        ):
            GatedClassifier.load_from_checkpoint(file)
    assert is_untouched(tmp_path)


def test_a_pickle_is_not_called_cut_short(tmp_path: Path) -> None:
    for content, message in (
        (pickled_bomb(), "holds Python objects, which may run code"),
        (b"text", "is not a checkpoint, or was cut short"),
    ):
        Path("a.ckpt").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_checkpoint("a.ckpt")
    assert is_untouched(tmp_path)


def test_a_file_of_hyper_parameters_is_not_trusted(good: Path, tmp_path: Path) -> None:
    Path("hparams.yaml").write_text("net: {class_path: evil.Net}")
    with pytest.raises(ValueError, match=r"hparams.yaml names the class 'evil.Net'"):
        GatedClassifier.load_from_checkpoint(good, hparams_file="hparams.yaml")
    assert is_untouched(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["an object", "os.system", "an object among the weights"])
def test_a_checkpoint_behind_a_url_is_checked_too(
    name: str, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hostile.ckpt"
    hostile_checkpoint(good, path, name)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        for url in (f"http://127.0.0.1:{server.server_port}/hostile.ckpt", f"file://{path}"):
            refused(capsys, "test", *CONFIG, f"--ckpt_path={url}")
            with pytest.raises(ValueError, match=r"Python objects|not trusted"):
                GatedClassifier.load_from_checkpoint(url)
    finally:
        server.shutdown()
    assert is_untouched(tmp_path)
    main(["test", *CONFIG, f"--ckpt_path=file://{good}"])


FOREIGN = """
from typing import Any, Callable
import torch
from torch import nn
from lightning.pytorch.demos.boring_classes import BoringModel

class Foreign(BoringModel):
    def __init__(self, net: nn.Module = None, act: Callable = torch.relu, extra: Any = None,
                 name: str = "a", width: int = 1):
        super().__init__()
        print("made with", name, width)
"""


@pytest.mark.parametrize(
    "values",
    [
        {"net": "evil.Net"},
        {"net": "hostile.yaml"},
        {"act": "evil.function"},
        {"extra": "{class_path: evil.Net}"},
        {"net": {"class_path": "evil.Net"}},
    ],
)
def test_hyper_parameters_of_somebody_elses_module_are_plain(
    values: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("foreign.py").write_text(FOREIGN)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ["--model=foreign.Foreign", "--trainer.enable_progress_bar=false"]
    options.append("--data=lightning.pytorch.demos.boring_classes.BoringDataModule")
    main(["fit", *options, "--trainer.fast_dev_run=false", "--trainer.max_steps=1"])
    (path,) = Path("lightning_logs").rglob("*.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["hyper_parameters"] = {**values, "name": "evil.Net", "width": 7}
    torch.save(checkpoint, path)
    capsys.readouterr()
    with suppress(SystemExit):
        main(["test", *options, f"--ckpt_path={path}"])
    out = capsys.readouterr()
    assert is_untouched(tmp_path)
    assert "made with evil.Net 7" in out.out or "dg-lightning: error: " in out.err


def test_a_checkpoint_cut_short_says_so(good: Path) -> None:
    Path("cut.ckpt").write_bytes(good.read_bytes()[:-2000])
    with pytest.raises(ValueError, match="is not a checkpoint, or was cut short"):
        read_checkpoint("cut.ckpt")


CONFIGS = {
    "a command": "model: {init_args: {net: {class_path: os.system, init_args: {command: %s}}}}",
    "a process": "model: {init_args: {net: {class_path: subprocess.Popen, init_args: {args: %s}}}}",
    "optimizer": "model: {init_args: {optimizer: {class_path: os.system, init_args: {x: %s}}}}",
    "scheduler": "model: {init_args: {lr_scheduler: {class_path: os.popen, init_args: {cmd: %s}}}}",
    "callback": "trainer: {callbacks: [{class_path: os.system, init_args: {command: %s}}]}",
    "logger": "trainer: {logger: {class_path: os.system, init_args: {command: %s}}}",
    "model": "model: {class_path: os.system, init_args: {command: %s}}",
    "data": "data: {class_path: os.system, init_args: {command: %s}}",
    "tag": "trainer: !!python/object/apply:os.system [%s]",
    "tag of a name": "trainer: !!python/name:os.system %s",
    "own tag": "trainer: !evil %s",
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_hostile_config_runs_nothing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("hostile.yaml").write_text(CONFIGS[name] % TOUCH)
    refused(capsys, "fit", *CONFIG, "--config=hostile.yaml", "--trainer.fast_dev_run=true")
    assert is_untouched(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        "data: {class_path: evil.Data}",
        f"data: {{class_path: os.system, init_args: {{command: {TOUCH}}}}}",
        f"data: !!python/object/apply:os.system [{TOUCH}]",
        "data: {class_path: dg_lightning.datamodules.DigitsDataModule, init_args: "
        "{root: {class_path: evil.Net}}}",
    ],
)
def test_the_config_beside_a_checkpoint_is_not_trusted(
    config: str, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run" / "last.ckpt"
    path.parent.mkdir()
    shutil.copy(good, path)
    path.with_name("config.yaml").write_text(config)
    refused(capsys, "export", f"--ckpt_path={path}", "--output=net", "--batch_sizes=[1]")
    refused(capsys, "bench", f"--ckpt_path={path}", "--batch_sizes=[1]", "--rounds=1")
    assert is_untouched(tmp_path)


def test_pickles_in_data_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(pickled_bomb())
    with pytest.raises(ValueError, match="is damaged"):
        CIFAR10DataModule(root=str(tmp_path)).prepare_data()
    np.savez("masks.npz", np.array([object()], dtype=object), allow_pickle=True)
    for content in (pickled_bomb(), Path("masks.npz").read_bytes()):
        Path("masks.pt").write_bytes(content)
        trainer = Trainer(
            callbacks=[RigL(sparsity=0.5, masks="masks.pt")],
            logger=False,
            max_epochs=1,
            enable_progress_bar=False,
            accelerator="cpu",
        )
        with pytest.raises(ValueError, match="holds no masks that can be read"):
            trainer.fit(BoringModel())
    assert is_untouched(tmp_path)


def test_pickled_bytes_in_an_h5ad_stay_bytes(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).poisson(1.0, (60, 40)).astype("float32")
    cells = anndata.AnnData(counts)
    cells.obs["kind"] = ["a", "b", "c"] * 20
    cells.write_h5ad("cells.h5ad")
    with h5py.File("cells.h5ad", "r+") as file:
        file["uns"].create_dataset("bomb", data=np.void(pickled_bomb()))
        file["obs"].attrs["bomb"] = np.void(pickled_bomb())
    data = PBMC3kDataModule(path="cells.h5ad", label_column="kind", genes=20, root=str(tmp_path))
    with suppress(ValueError):  # that anndata cannot read it is fine
        data.prepare_data()
    assert is_untouched(tmp_path)


def test_a_package_that_the_user_names_is_trusted(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("mine.py").write_text(
        "from dg_lightning import GatedMLP\nclass Mine(GatedMLP):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    options = [*CONFIG, "--trainer.max_epochs=1", "--trainer.limit_train_batches=2"]
    main(["fit", *options, "--model.net=mine.Mine", "--model.net.hidden=[4]"])
    path = next(Path("runs").rglob("last.ckpt"))
    with pytest.raises(ValueError, match=r"'mine.Mine', whose package is not trusted.*DG_TRUST=mi"):
        GatedClassifier.load_from_checkpoint(path)
    # Named in the command itself, in the environment, or in Python.
    main(["test", *CONFIG, "--model.net=mine.Mine", "--model.net.hidden=[4]"])
    monkeypatch.setenv("DG_TRUST", "other, mine")
    assert type(GatedClassifier.load_from_checkpoint(path).net).__name__ == "Mine"
    monkeypatch.delenv("DG_TRUST")
    with pytest.raises(ValueError, match="not trusted"):
        GatedClassifier.load_from_checkpoint(path)
    monkeypatch.setattr("dg_lightning.training.spec._trusted", {"torch.optim"})
    trust("mine", "dg_lightning.training.classifier")
    assert type(GatedClassifier.load_from_checkpoint(path).net).__name__ == "Mine"
