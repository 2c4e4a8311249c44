"""The command `export`."""

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from dg_lightning import GatedClassifier
from dg_lightning.cli import main

FIT = ["--trainer.max_epochs=2", "--trainer.enable_progress_bar=false", "--quiet"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two small nets, once for all tests here."""
    folder = tmp_path_factory.mktemp("deploy")
    places = [f"--trainer.default_root_dir={folder}", f"--trainer.logger.save_dir={folder}"]
    for variant in ("dynamicgate", "dynamicgate_input"):
        main(["fit", "--config", f"digits/{variant}", *FIT, *places])
    return folder / "digits"


def checkpoint(runs: Path, variant: str) -> Path:
    return runs / variant / "version_0" / "checkpoints" / "last.ckpt"


@pytest.mark.slow
@pytest.mark.parametrize("format", ["pt2", "onnx"])
def test_export_writes_checks_and_tells(
    runs: Path, format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint(runs, "dynamicgate")
    before = path.read_bytes()
    output = [f"--output={tmp_path / 'net'}.{format}", "--batch_sizes=[1,8]"]
    main(["export", "--ckpt_path", str(path), *output])
    said = capsys.readouterr().out
    assert (tmp_path / f"net.{format}").is_file()
    for part in ("batch of 8", "largest difference", "Accuracy on the test split"):
        assert part in said
    right = re.findall(r"([\d.]+)% (?:before|after)", said)
    assert right[0] == right[1]
    assert path.read_bytes() == before


def program(path: Path) -> Any:
    return torch.export.load(path).module()


def test_an_exported_program_has_only_open_inputs_and_units(runs: Path, tmp_path: Path) -> None:
    path = checkpoint(runs, "dynamicgate")
    content = torch.load(path, weights_only=True)
    for name, closed in (("input_gate", 40), ("hidden.0.gate", 200)):
        logit = content["state_dict"][f"net.{name}.logit"]
        logit.fill_(1.0)[:closed] = -1.0
    half_open = path.with_name("half_open.ckpt")
    torch.save(content, half_open)
    output = [f"--output={tmp_path / 'net'}", "--batch_sizes=[1]"]
    main(["export", "--ckpt_path", str(half_open), *output])
    model: Any = GatedClassifier.load_from_checkpoint(half_open).eval()
    run, x = program(tmp_path / "net.pt2"), torch.randn(5, 1, 8, 8)
    torch.testing.assert_close(run(x), model(x).detach(), atol=1e-5, rtol=1e-5)
    units = model.net.hidden[0].gate.units
    shapes = [tuple(weight.shape) for weight in run.state_dict().values() if weight.ndim == 2]
    assert (units - 200, 24) in shapes


@pytest.mark.slow
def test_gates_are_frozen_on_demand(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint(runs, "dynamicgate_input")
    content = torch.load(path, weights_only=True)
    for part in ("weight", "bias"):  # close the gates of 100 units, whatever the input
        content["state_dict"][f"net.hidden.0.gate.network.1.{part}"][:100] = -9.0 * (part == "bias")
    closed = path.with_name("closed.ckpt")
    torch.save(content, closed)

    def export(*options: str) -> str:
        output = [f"--output={tmp_path / 'net'}", "--batch_sizes=[8]"]
        main(["export", "--ckpt_path", str(closed), *output, *options])
        return capsys.readouterr().out

    said = export()
    assert "are left" not in said
    before, after = re.findall(r"([\d.]+)% (?:before|after)", said)
    assert before == after
    said = export("--freeze_gates=true", "--min_usage=0.0001")
    left = re.search(r"(\d+) of 256 are left", said)
    assert left is not None
    assert int(left[1]) <= 156
    assert "Accuracy on the test split" in said
    assert "--freeze_gates" not in said


@pytest.mark.slow
def test_a_program_for_one_batch_size_is_compared_at_that_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [f"--trainer.default_root_dir={tmp_path}", f"--trainer.logger.save_dir={tmp_path}"]
    main(["fit", "--config=digits/switch_moe", *FIT, *places])
    path = next(tmp_path.rglob("last.ckpt"))
    main(["export", str(path), f"--output={tmp_path / 'moe.pt2'}", "--batch_sizes=[1]"])
    said = capsys.readouterr().out
    before, after = re.findall(r"([\d.]+)% (?:before|after)", said)
    assert before == after
    assert "--freeze_gates" not in said  # it could not freeze a router


class OnlyTested(pl.LightningDataModule):
    """Somebody's data, without a validation part."""

    @override
    def test_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(8, 64), torch.zeros(8)), batch_size=4)


@pytest.mark.slow
def test_without_a_validation_part_gates_stay(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DG_TRUST", __name__)
    path = tmp_path / "run" / "last.ckpt"
    path.parent.mkdir()
    path.write_bytes(checkpoint(runs, "dynamicgate_input").read_bytes())
    config = f"data:\n  class_path: {__name__}.OnlyTested\n"
    path.with_name("config.yaml").write_text(config)
    output = ["--output", str(tmp_path / "net"), "--batch_sizes=[1]"]
    main(["export", "--ckpt_path", str(path), *output])
    said = capsys.readouterr().out
    assert "Accuracy on the test split" in said
    with pytest.raises(SystemExit):
        main(["export", "--ckpt_path", str(path), *output, "--freeze_gates=true"])
    assert "`freeze_gates` needs a validation split" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["export", "--ckpt_path=nowhere.ckpt", "--output=a"], "nowhere.ckpt"),
        (["export", "--ckpt_path=a.ckpt", "--output=a", "--min_usage=2"], "`min_usage`"),
        (["export", "--ckpt_path=a.ckpt", "--output=a", "--format=h5"], "format"),
        (["export", "--ckpt_path=a.ckpt", "--output=a.safetensors"], "safetensors"),
        (["export", "--ckpt_path=a.ckpt", "--output=."], "`output`"),
    ],
)
@pytest.mark.usefixtures("in_empty_folder")
def test_bad_input_is_refused_in_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.ckpt").touch()
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    error: Any = capsys.readouterr().err
    assert says in error
    assert len(error.strip().splitlines()) == 1


def test_an_interruption_is_one_line_and_leaves_nothing_unfinished(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        (written,) = tmp_path.iterdir()
        assert written.name.startswith(".net.pt2")
        raise KeyboardInterrupt

    monkeypatch.setattr("dg_lightning.surgery.exporting._difference", interrupt)
    path = str(checkpoint(runs, "dynamicgate"))
    options = ["--output", str(tmp_path / "net"), "--batch_sizes=[1]"]
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(["export", "--ckpt_path", path, *options])
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "dg-lightning: interrupted.\n"
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a Vision Transformer with gates on its units and heads."""
    folder = tmp_path_factory.mktemp("vit")
    net = "--model.net=dg_lightning.layers.VisionTransformer"
    sizes = ["patch=2", "width=16", "depth=1", "heads=4"]
    gates = "{feed_forward: {kind: static}, heads: {kind: static, min_open: 1}}"
    callbacks = (
        f"[{{class_path: AddGates, init_args: {gates}}}, "
        "{class_path: BudgetController, init_args: {budget: 0.6}}]"
    )
    main(
        ["fit", "--model=dg_lightning.GatedClassifier", net]
        + [f"--model.net.{size}" for size in sizes]
        + ["--data=dg_lightning.datamodules.DigitsDataModule", "--model.gate_lr_factor=10"]
        + [f"--trainer.callbacks={callbacks}", f"--trainer.default_root_dir={folder}", *FIT]
    )
    return next(folder.rglob("*.ckpt"))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["pt2", "onnx"])
def test_a_transformer_is_exported_without_its_closed_units(
    transformer: Path, format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--format", format, "--output", str(tmp_path / "net"), "--batch_sizes=[1]"]
    main(["export", "--ckpt_path", str(transformer), *output])
    said = capsys.readouterr().out
    assert (tmp_path / f"net.{format}").is_file()
    before, after = re.findall(r"([\d.]+)% (?:before|after)", said)
    assert before == after
    parameters = re.search(r"parameters\D+([\d,]+)\D+([\d,]+)", said)
    assert parameters is not None
    whole, small = (int(number.replace(",", "")) for number in parameters.groups())
    assert small < whole
