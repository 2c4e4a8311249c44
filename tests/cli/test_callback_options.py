import pytest
import yaml

from dg_lightning.cli import main

pytestmark = pytest.mark.usefixtures("in_empty_folder")


def callbacks(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, dict[str, object]]:
    with pytest.raises(SystemExit) as stopped:
        main(["fit", *args, "--print_config"])
    assert stopped.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"]
    return {c["class_path"].rpartition(".")[2]: c.get("init_args", {}) for c in printed}


def test_one_argument_of_one_callback_is_set_wherever_it_stands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--config=mnist/dynamicgate", "--trainer.callbacks+=LearningRateMonitor"]
    before = callbacks(capsys, *options)
    options.append("--trainer.callbacks.BudgetController.budget=0.25")
    options += ["--trainer.callbacks.GateMonitor.init_args.every_n_epochs", "3"]
    after = callbacks(capsys, *options)
    before["BudgetController"]["budget"] = 0.25
    before["GateMonitor"]["every_n_epochs"] = 3
    assert after == before


def test_parts_of_a_schedule_and_null(capsys: pytest.CaptureFixture[str]) -> None:
    found = callbacks(
        capsys,
        "--config=digits/dynamicgate",
        "--trainer.callbacks.GatePenalty.weight.start=0",
        "--trainer.callbacks.GatePenalty.weight.end=1",
        "--trainer.callbacks.GatePenalty.layers=null",
    )
    assert found["GatePenalty"]["weight"]["end"] == 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "BudgetController.budget=0.2",
            "The config has no callback BudgetController (configured: ModelCheckpoint, "
            "GateMonitor, CollapseDetector, GatePenalty): "
            "add it with --trainer.callbacks+=BudgetController.",
        ),
        ("GatePenalty.weigth=1", "GatePenalty has no argument 'weigth'; it has weight, usage"),
        ("GatePenalty.usage=often", "usage"),
        ("GatePenalty.weight=[1,", "weight of GatePenalty must be a YAML value, got '[1,'"),
        ("GatePenalty.weight=!!python/name:os.system", "must be a YAML value"),
        ("GatePenalty.weight=2020-01-01", "weight"),
        ("GatePenalty.weight", "--trainer.callbacks.GatePenalty.weight needs a value"),
    ],
)
def test_mistakes_are_one_line(
    option: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--config=digits/dynamicgate", f"--trainer.callbacks.{option}"])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_text_stays_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("007", "on", "2020-01-01"):
        option = f"--trainer.callbacks.ModelCheckpoint.filename={text}"
        found = callbacks(capsys, "--config=digits/dynamicgate", option)
        assert found["ModelCheckpoint"]["filename"] == text


def test_two_callbacks_of_a_class_are_not_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--config=digits/dynamicgate", "--trainer.callbacks+=ModelCheckpoint"]
    with pytest.raises(SystemExit):
        main(["fit", *options, "--trainer.callbacks.ModelCheckpoint.save_top_k=2"])
    assert "2 callbacks named ModelCheckpoint" in capsys.readouterr().err
