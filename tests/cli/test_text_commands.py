"""Training, sampling and converting a language model from the command line."""

import re
from pathlib import Path

import pytest
import torch
import yaml

from dg_lightning import GatedLM, gate_layers
from dg_lightning.cli import main

pytestmark = [pytest.mark.usefixtures("in_empty_folder"), pytest.mark.slow]
SMALL = [
    "--model.net.width=32",
    "--model.net.heads=2",
    "--model.net.depth=1",
    "--model.net.hidden=128",
    "--model.lr_scheduler.total_steps=40",
    "--data.context=32",
    "--data.batch_size=8",
    "--data.windows_per_epoch=160",
    "--data.eval_windows=16",
    "--trainer.max_epochs=2",
    "--trainer.precision=32",
    "--trainer.enable_progress_bar=false",
]


@pytest.mark.parametrize(
    "variant",
    ["baseline", "narrow", "dynamicgate", "dynamicgate_static", "dynamicgate_wide", "switch_moe"],
)
def test_every_variant_trains_and_is_tested(variant: str) -> None:
    main(["fit", "--config", f"text/{variant}", *SMALL])
    main(["test", "--config", f"text/{variant}", *SMALL])
    folder = Path(f"runs/text/{variant}")
    table = (folder / "version_1" / "compute.csv").read_text()
    assert "blocks.0.feed_forward" in table
    assert not (folder / "version_1" / "confusion.csv").exists()


def test_it_draws_texts(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", "--config", "text/dynamicgate", *SMALL])
    options = ["--data.prompt=import ", "--data.samples=2", "--data.sample_length=40"]
    main(["predict", "--config", "text/dynamicgate", *SMALL, *options])
    written = Path("runs/text/dynamicgate/version_1/samples.txt").read_text()
    parts = re.split(r"\n-{80}\n", written)
    assert len(parts) == 2
    assert all(part.startswith("import ") for part in parts)
    assert written in capsys.readouterr().out


def test_a_dense_model_is_converted(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", "--config", "text/baseline", *SMALL])
    steps = ["--teach_steps=5", "--tune_steps=5", "--block_size=16"]
    source = "runs/text/baseline/version_0/checkpoints/last.ckpt"
    before = Path(source).read_bytes()
    main(["convert", "--ckpt_path", source, "--budget=[0.6, 0.4]", "--output=out", *steps])
    said = capsys.readouterr().out
    table = Path("out/conversion.md").read_text()
    assert table in said
    assert [line.split("|")[1].strip() for line in table.splitlines()] == [
        "budget", "---", "dense", "60%", "40%",
    ]  # fmt: skip
    assert Path(source).read_bytes() == before
    model = GatedLM.load_from_checkpoint("out/budget_0.4.ckpt").eval()
    (gate,) = gate_layers(model).values()
    x = torch.randint(256, (4, 32))
    with torch.no_grad():
        model(x)
    assert gate.gate is not None
    assert 0 < float(gate.gate.mean()) < 0.7
    main(["test", "--config", "text/baseline", *SMALL, "--ckpt_path=out/budget_0.4.ckpt"])
    assert "relative to dense" in capsys.readouterr().out


def test_bad_input_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", "--config", "text/baseline", *SMALL])
    path = "runs/text/baseline/version_0/checkpoints/last.ckpt"
    for arguments, message in (
        (["--ckpt_path=none.ckpt"], "'none.ckpt'"),
        (["--ckpt_path", path, "--budget=2"], "`budget` must be above 0 and below 1, got 2"),
        (["--ckpt_path", path, "--block_size=100"], "`block_size` must divide `units`=128"),
        ([], "Name one run"),
    ):
        with pytest.raises(SystemExit):
            main(["convert", *arguments, "--output=out"])
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert message in said
    assert not Path("out").exists()


def test_a_training_without_a_penalty_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", "--config", "text/dynamicgate", *SMALL, "--trainer.accelerator=cpu"])
    assert "ERROR" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["predict", "test", "validate"])
def test_the_context_of_the_run_is_read_from_it(command: str) -> None:
    main(["fit", "--config", "text/baseline", *SMALL])
    prompt = ["--data.prompt=import ", "--data.samples=2", "--data.sample_length=40"]
    drawn = prompt if command == "predict" else []
    main([command, "--config", "text/baseline", *drawn, "--trainer.enable_progress_bar=false"])
    folder = Path("runs/text/baseline/version_1")
    data = yaml.safe_load((folder / "config.yaml").read_text())["data"]["init_args"]
    assert (data["context"], data["eval_windows"]) == (32, 16)
    if command == "predict":
        assert (folder / "samples.txt").read_text().startswith("import ")


def test_a_folder_of_ones_own_is_remembered(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for name in range(6):
        text = " ".join(str(number**2) for number in range(100 * name, 100 * name + 400))
        (tmp_path / "texts" / f"{name}.txt").write_text(text)
    main(["fit", "--config", "text/baseline", *SMALL, "--data.folder=texts"])
    main(["test", "--config", "text/baseline", "--trainer.enable_progress_bar=false"])
    path = Path("runs/text/baseline/version_1/config.yaml")
    data = yaml.safe_load(path.read_text())["data"]["init_args"]
    assert Path(data["folder"]).name == "texts"
