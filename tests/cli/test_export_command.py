"""The command `export`."""

import re
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from dg_lightning import GatedClassifier
from dg_lightning.cli import main
from dg_lightning.runtime.plain import load

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
@pytest.mark.parametrize("format", ["safetensors", "pt2", "onnx"])
def test_export_writes_checks_and_tells(
    runs: Path, format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("safetensors", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    path = checkpoint(runs, "dynamicgate")
    before = path.read_bytes()
    output = ["--format", format, "--output", str(tmp_path / "net"), "--batch_sizes=[1,8]"]
    main(["export", "--ckpt_path", str(path), *output])
    said = capsys.readouterr().out
    assert (tmp_path / f"net.{format}").is_file()
    for part in ("file against dense", "largest difference", "Accuracy on the test split"):
        assert part in said
    assert path.read_bytes() == before
    if format == "safetensors":
        assert "from load_net import load" in said
        model = GatedClassifier.load_from_checkpoint(path).eval()
        x = torch.randn(5, 64)
        found = load(str(tmp_path / "net.safetensors"))(x)
        torch.testing.assert_close(found, model(x).detach(), atol=1e-5, rtol=1e-5)


def test_hardly_used_units_are_removed_on_demand(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("safetensors")
    path = checkpoint(runs, "dynamicgate_input")
    content = torch.load(path, weights_only=True)
    for part in ("weight", "bias"):  # close the gates of 100 units, whatever the input
        content["state_dict"][f"net.hidden.0.gate.network.1.{part}"][:100] = -9.0 * (part == "bias")
    closed = path.with_name("closed.ckpt")
    torch.save(content, closed)
    output = ["--output", str(tmp_path / "net"), "--batch_sizes=[8]"]
    main(["export", "--ckpt_path", str(closed), *output, "--min_usage=0.01"])
    said = capsys.readouterr().out
    assert "hidden.0: 156 of 256 are left." in said
    before, after = re.findall(r"(\d+\.\d+)% (?:before|after)", said)
    assert before == after


def test_gates_are_frozen_where_they_slow_down_and_stay_on_demand(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("safetensors")
    path = checkpoint(runs, "dynamicgate_input")
    gated = 2.0  # seconds, where all others take one

    def seconds(runs: Any, *_: Any, **__: Any) -> dict[str, float]:
        return {name: gated if name == "ours" else 1.0 for name in runs}

    monkeypatch.setattr("dg_lightning.runtime.lowering.median_seconds", seconds)

    def export(*options: str) -> tuple[str, bool]:
        """Return what is said, and whether the file looks at its input to decide."""
        output = ["--output", str(tmp_path / "net"), "--batch_sizes=[1]"]
        main(["export", "--ckpt_path", str(path), *output, *options])
        steps = load(str(tmp_path / "net.safetensors"))
        return capsys.readouterr().out, any("Gated" in type(step).__name__ for step in steps)

    said, looks = export("--max_accuracy_drop=1")
    assert not looks
    assert "They are frozen" in said
    assert "--freeze_gates=false to keep the gates" in said
    gated = 0.5
    said, looks = export("--max_accuracy_drop=1")
    assert looks
    gated = 2.0
    said, looks = export("--freeze_gates=false")
    assert looks
    assert "Make them static with --freeze_gates=true" in said
    said, looks = export("--freeze_gates=true")
    assert not looks
    assert "--freeze_gates" not in said
    assert "Accuracy on the test split" in said


class OnlyTested(pl.LightningDataModule):
    """Somebody's data, without a validation part."""

    @override
    def test_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(8, 64), torch.zeros(8)), batch_size=4)


def test_without_a_validation_part_gates_stay(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("safetensors")
    monkeypatch.setenv("DG_TRUST", __name__)
    path = tmp_path / "run" / "last.ckpt"
    path.parent.mkdir()
    path.write_bytes(checkpoint(runs, "dynamicgate_input").read_bytes())
    config = f"data:\n  class_path: {__name__}.OnlyTested\n"
    path.with_name("config.yaml").write_text(config)
    output = ["--output", str(tmp_path / "net"), "--batch_sizes=[1]"]
    main(["export", "--ckpt_path", str(path), *output])
    said = capsys.readouterr().out
    assert "static with --freeze_gates=true, which needs" in said
    assert "Accuracy on the test split" in said
    with pytest.raises(SystemExit):
        main(["export", "--ckpt_path", str(path), *output, "--freeze_gates=true"])
    assert "`freeze_gates` needs a validation split" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["export", "--ckpt_path=nowhere.ckpt", "--output=a"], "nowhere.ckpt"),
        (["export", "--ckpt_path=a.ckpt", "--output=a", "--min_usage=2"], "`min_usage`"),
        (
            ["export", "--ckpt_path=a.ckpt", "--output=a", "--max_accuracy_drop=2"],
            "`max_accuracy_drop`",
        ),
        (["export", "--ckpt_path=a.ckpt", "--output=a", "--format=h5"], "format"),
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
    pytest.importorskip("safetensors")

    def interrupt(*_: object) -> None:
        (written,) = tmp_path.iterdir()
        assert written.name.startswith(".net.safetensors")
        raise KeyboardInterrupt

    # The package has a function of the module's name.
    monkeypatch.setattr(sys.modules["dg_lightning.runtime.export"], "_difference", interrupt)
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


@pytest.mark.parametrize(
    ("option", "said"),
    [("--format=safetensors", "--format pt2"), ("--min_usage=0.1", "need a GatedMLP")],
)
def test_what_needs_a_gated_mlp_is_refused(
    transformer: Path, option: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--format=pt2", "--output", str(tmp_path / "net")]
    with pytest.raises(SystemExit):
        main(["export", "--ckpt_path", str(transformer), *output, option])
    error = capsys.readouterr().err
    assert said in error
    assert "VisionTransformer" in error
