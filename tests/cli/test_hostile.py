"""Nothing that a checkpoint, a config or a data file names is imported or run."""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import anndata
import h5py
import numpy as np
import pytest
import torch
from hostile import (
    BUILT_IN_TRAINING_ONLY,
    CHECKPOINTS,
    TOUCH,
    doubled,
    endless_list,
    hostile_checkpoint,
    is_untouched,
    lay_out,
    pickled_bomb,
    serving,
    time_limit,
)
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from dg_lightning import GatedClassifier, trust
from dg_lightning.callbacks import RigL
from dg_lightning.cli import main
from dg_lightning.cli.program import run_command
from dg_lightning.cli.runs import load_net
from dg_lightning.datamodules import CIFAR10DataModule, DigitsDataModule, PBMC3kDataModule
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
def _in_hostile_folder(
    in_empty_folder: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    lay_out(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))  # where torch.hub keeps downloads
    yield
    sys.modules.pop("evil", None)  # where a test has failed


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
        (pickled_bomb(), "Python objects, which may run code"),
        (b"text", "is not a checkpoint, or is truncated"),
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


def with_weights_times(factor: float, good: Path, target: Path) -> bytes:
    """Return a checkpoint like a good one, with other weights."""
    checkpoint = torch.load(good, weights_only=True)
    state = checkpoint["state_dict"]
    checkpoint["state_dict"] = {key: tensor * factor for key, tensor in state.items()}
    torch.save(checkpoint, target)
    return target.read_bytes()


def used_by_test(path: str) -> torch.Tensor:
    """Return the output weights that `test` has used."""
    weight: torch.Tensor = run_command(
        ["test", *CONFIG, f"--ckpt_path={path}"]
    ).model.net.output.weight
    return weight


def loaded(path: str) -> torch.Tensor:
    return GatedClassifier.load_from_checkpoint(path).net.get_parameter("output.weight")


READERS: dict[str, Callable[[str], torch.Tensor]] = {
    "test": used_by_test,
    "load_from_checkpoint": loaded,
    "load_net": lambda path: load_net(path).output.weight,
}


def output_weight(checkpoint: Path) -> torch.Tensor:
    weight: torch.Tensor = torch.load(checkpoint, weights_only=True)["state_dict"][
        "net.output.weight"
    ]
    return weight


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_checkpoints_of_one_name_at_two_urls_stay_apart(
    reader: str, good: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.ckpt"
    answers = {
        "/a/last.ckpt": [good.read_bytes()],
        "/b/last.ckpt": [with_weights_times(2, good, other)],
        "/b/last.ckpt?version=1": [with_weights_times(3, good, tmp_path / "third.ckpt")],
    }
    with serving(answers) as server:
        found = [READERS[reader](server.url(path)) for path in answers]
    for factor, weight in enumerate(found, 1):
        torch.testing.assert_close(weight.detach(), output_weight(good) * factor)


@pytest.mark.slow
@pytest.mark.parametrize("good_answers", [1, 2])
@pytest.mark.parametrize("reader", READERS)
def test_what_a_url_answers_is_checked_and_loaded_from_one_download(
    reader: str,
    good_answers: int,
    good: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    hostile_checkpoint(good, tmp_path / "hostile.ckpt", "a module that acts when imported")
    hostile = (tmp_path / "hostile.ckpt").read_bytes()
    with serving({"/last.ckpt": [good.read_bytes()] * good_answers + [hostile]}) as server:
        weight = READERS[reader](server.url("/last.ckpt"))
    assert is_untouched(tmp_path)
    torch.testing.assert_close(weight.detach(), output_weight(good))
    assert server.downloads["/last.ckpt"] == 1


@pytest.mark.slow
def test_weights_of_a_second_answer_are_not_tested(good: Path, tmp_path: Path) -> None:
    other = with_weights_times(float("nan"), good, tmp_path / "other.ckpt")
    with serving({"/last.ckpt": [good.read_bytes(), other]}) as server:
        weight = used_by_test(server.url("/last.ckpt"))
    torch.testing.assert_close(weight.detach(), output_weight(good))


@pytest.mark.slow
@pytest.mark.parametrize("good_answers", [1, 2, 3])
@pytest.mark.parametrize("command", ["export", "convert"])
def test_commands_download_a_checkpoint_once(
    command: str, good_answers: int, good: Path, tmp_path: Path
) -> None:
    hostile_checkpoint(good, tmp_path / "hostile.ckpt", "a module that acts when imported")
    hostile = (tmp_path / "hostile.ckpt").read_bytes()
    options = {
        "export": ["--output=net", "--batch_sizes=[1]"],
        "convert": ["--output=out"],
    }
    with (
        serving({"/last.ckpt": [good.read_bytes()] * good_answers + [hostile]}) as server,
        suppress(SystemExit),  # `convert` has nothing to convert in it
    ):
        main([command, f"--ckpt_path={server.url('/last.ckpt')}", *options[command]])
    assert is_untouched(tmp_path)
    assert server.downloads["/last.ckpt"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("reader", [*READERS, "convert"])
def test_a_file_that_is_replaced_after_it_was_checked_is_not_read_again(
    reader: str,
    good: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "last.ckpt"
    shutil.copy(good, path)
    hostile_checkpoint(good, tmp_path / "hostile.ckpt", "a module that acts when imported")
    with_weights_times(2, tmp_path / "hostile.ckpt", tmp_path / "hostile.ckpt")
    load = torch.load

    def load_and_replace(*args: Any, **options: Any) -> Any:
        content = load(*args, **options)
        shutil.copy(tmp_path / "hostile.ckpt", tmp_path / "next.ckpt")
        (tmp_path / "next.ckpt").replace(path)  # as another process may at this moment
        return content

    monkeypatch.setattr(torch, "load", load_and_replace)
    if reader == "convert":
        line = refused(capsys, "convert", f"--ckpt_path={path}", "--output=out")
        assert "evil.Net" not in line  # but that it cannot be converted
    else:
        weight = READERS[reader](str(path))
        monkeypatch.undo()
        torch.testing.assert_close(weight.detach(), output_weight(good))
    assert is_untouched(tmp_path)


BY_THE_PARSER = (
    "_instantiator: lightning.pytorch.cli.instantiate_module\n"
    "_class_path: dg_lightning.training.classifier.GatedClassifier\n"
    "input_shape: [64]\nnum_classes: 10\n"
)
HPARAMS = {
    "tags.csv": "key,value\nnet,{'class_path':'evil.Net'}\ninput_shape,[64]\nnum_classes,10\n",
    "TAGS.CSV": "key,value\nnum_classes,10\noptimizer,{'class_path':'evil.Optimizer'}\n",
    "instantiator.csv": "key,value\n_instantiator,evil.function\n",
    "parser.yaml": f"{BY_THE_PARSER}net: evil.Net\n",
    "parser.yml": f"{BY_THE_PARSER}net: hostile.yaml\n",
    "parser_of_an_argument.yaml": (
        f"{BY_THE_PARSER}net:\n  class_path: torch.nn.TransformerEncoderLayer\n"
        "  init_args: {d_model: 4, nhead: 1, activation: evil.function}\n"
    ),
    "another_file.yaml": "hparams_file: of_another.csv\n",  # an argument of Lightning's own
    "unchecked.yaml": "weights_only: false\n",
    "instantiator.yaml": "_instantiator: evil.function\n",
    "tag.yaml": f"net: !!python/object/apply:os.system [{TOUCH}]\n",
    "name.yaml": "net: !!python/name:os.system\n",
    "list.yaml": "- {class_path: evil.Net}\n",
    "text.yaml": "evil.Net\n",
}


@pytest.mark.parametrize("name", HPARAMS)
def test_no_file_of_hyper_parameters_chooses_what_is_imported(
    name: str, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    content = HPARAMS[name]
    if name.lower().endswith(".csv"):  # a value that has a comma is quoted
        rows = [line.split(",", 1) for line in content.splitlines()]
        content = "".join(f'{key},"{value}"\n' for key, value in rows)
    Path(name).write_text(content)
    Path("of_another.csv").write_text("key,value\nnet,\"{'class_path':'evil.Net'}\"\n")
    with pytest.raises(ValueError, match=f"{name}|hparams_file") as caught:
        GatedClassifier.load_from_checkpoint(good, hparams_file=name)
    assert "\n" not in str(caught.value)
    assert is_untouched(tmp_path)


def test_good_files_of_hyper_parameters_are_used_or_refused(good: Path) -> None:
    Path("good.yaml").write_text(
        "net: {class_path: dg_lightning.GatedMLP, init_args: {hidden: [4]}}\n"
        "input_shape: [64]\nnum_classes: 10\nlabel_smoothing: 0.25\n"
    )
    try:
        model = GatedClassifier.load_from_checkpoint(good, hparams_file="good.yaml")
    except ValueError as error:
        assert "hparams_file" in str(error)  # noqa: PT017  # either is right
    else:
        assert model.label_smoothing == 0.25


@pytest.mark.slow
@pytest.mark.parametrize("name", ["an object", "hyper-parameters of data"])
def test_data_from_a_checkpoint_behind_a_url_is_checked_too(
    name: str, good: Path, tmp_path: Path
) -> None:
    hostile_checkpoint(good, tmp_path / "hostile.ckpt", name)
    with serving({"/last.ckpt": [(tmp_path / "hostile.ckpt").read_bytes()]}) as server:
        for source in (server.url("/last.ckpt"), str(tmp_path / "hostile.ckpt")):
            with pytest.raises(ValueError, match=r"Python objects|not trusted"):
                DigitsDataModule.load_from_checkpoint(source)
    assert is_untouched(tmp_path)


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
    with pytest.raises(ValueError, match="is not a checkpoint, or is truncated"):
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
    assert is_untouched(tmp_path)


LAUGHS = "&a0 [x]\n" + "".join(
    f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]\n" for k in range(1, 30)
)
DATA = "class_path: dg_lightning.datamodules.DigitsDataModule, init_args"
UNENDING = {
    "billion laughs": f"a0: {LAUGHS}data: {{{DATA}: {{root: *a29}}}}\n",
    "itself": f"data: &d {{{DATA}: {{root: [*d]}}}}\n",
    "itself in a dict": f"data: {{{DATA}: &d {{root: {{a: *d}}}}}}\n",
    "depth": f"data: {{{DATA}: {{root: {'[' * 3000}{']' * 3000}}}}}\n",
}


@pytest.mark.parametrize("name", UNENDING)
def test_a_config_beside_a_checkpoint_that_never_ends_is_refused(
    name: str, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run" / "last.ckpt"
    path.parent.mkdir()
    shutil.copy(good, path)
    path.with_name("config.yaml").write_text(UNENDING[name])
    with time_limit():
        line = refused(capsys, "export", f"--ckpt_path={path}", "--output=net")
    assert "config.yaml" in line
    assert len(line) < 500


@pytest.mark.parametrize("command", ["test", "export", "convert"])
@pytest.mark.parametrize("values", [doubled(60), endless_list()], ids=["doubled", "endless"])
def test_hyper_parameters_that_never_end_are_refused(
    values: list[Any], command: str, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "endless.ckpt"
    checkpoint = torch.load(good, weights_only=True)
    checkpoint["hyper_parameters"]["net"]["init_args"]["hidden"] = values
    torch.save(checkpoint, path)
    options = CONFIG if command == "test" else ["--output=net"]
    with time_limit():
        line = refused(capsys, command, *options, f"--ckpt_path={path}")
    assert "endless.ckpt" in line
    assert len(line) < 500


def test_a_file_of_hyper_parameters_that_never_ends_is_refused(good: Path) -> None:
    Path("laughs.yaml").write_text(f"a0: {LAUGHS}net: *a29\n")
    with time_limit(), pytest.raises(ValueError, match=r"laughs.yaml|hparams_file"):
        GatedClassifier.load_from_checkpoint(good, hparams_file="laughs.yaml")


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
        with pytest.raises(ValueError, match="Cannot read masks from"):
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
