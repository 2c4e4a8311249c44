from pathlib import Path

import pytest
from PIL import Image

from dg_lightning.cli import main

pytestmark = pytest.mark.usefixtures("in_empty_folder")
CONFIGS = [
    "--config=digits/baseline",
    "--config=callbacks/paper_recipe",
    "--model.net.gate={kind: static}",
]


def test_draws_all_schedules_without_training(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", *CONFIGS, "--output=a/plan.png"])
    printed = capsys.readouterr().out
    assert "Plan: 630 optimizer steps" in printed
    for label in ("λ × factor", "keep target", "θ", "τ"):
        assert label in printed
    with Image.open("a/plan.png") as picture:
        assert picture.size[0] > 500
        colours = picture.convert("RGB").getcolors(2**20)
    assert colours is not None
    assert len(colours) > 10
    assert not Path("runs").exists()


def test_gates_that_a_callback_adds_have_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    added = '{"class_path": "AddGates", "init_args": {"feed_forward": {"kind": "static"}}}'
    annealing = '{"class_path": "TemperatureAnnealing", "init_args": {"start": 2.0, "end": 0.5}}'
    main(["plan", "--config=digits/baseline", f"--trainer.callbacks=[{added}, {annealing}]"])
    assert "τ" in capsys.readouterr().out


def test_names_risks(capsys: pytest.CaptureFixture[str]) -> None:
    phases = "--trainer.callbacks.ThresholdPhases"
    main(["plan", *CONFIGS, f"{phases}.transition=0", f"{phases}.buffer_keep=null", "--output=."])
    assert "all jump at step" in " ".join(capsys.readouterr().out.split())
    assert Path("plan.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainer.max_epochs=0"], "A plan needs a positive, finite number of steps"),
        (["--trainer.max_epochs=-1"], "A plan needs a positive, finite number of steps"),
        (["--output=p.txt"], "`output` must end in "),
    ],
)
def test_mistakes_are_answered_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *CONFIGS, *arguments])
    assert ended.value.code == 2
    printed = capsys.readouterr().err.strip().splitlines()
    assert printed[-1].startswith("dg-lightning: error: " + message)


def test_a_config_without_schedules_says_so(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    main(["plan", "--config=digits/baseline"])
    assert "there is nothing to plan" in capsys.readouterr().err + caplog.text
