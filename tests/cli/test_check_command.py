import json
from pathlib import Path
from typing import Any

import pytest

from dg_lightning.cli.start import main

pytestmark = pytest.mark.usefixtures("in_empty_folder")
SMALL = ["--config=digits/dynamicgate", "--model.net.hidden=[8]", "--trainer.accelerator=cpu"]


def test_a_config_that_works(capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", *SMALL])
    out = capsys.readouterr().out
    assert "GatePenalty" in out
    assert "630 steps in all" in out
    assert "ERROR" not in out
    assert not list(Path().iterdir())


def test_an_error_has_a_line_and_exit_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    annealing = ["--trainer.callbacks+=TemperatureAnnealing", "--trainer.callbacks.until=5000"]
    with pytest.raises(SystemExit) as stopped:
        main(["check", *SMALL, *annealing, "--json"])
    assert stopped.value.code == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    (error,) = [finding for finding in report["findings"] if finding["status"] == "ERROR"]
    assert error["what"] == "TemperatureAnnealing"
    assert error["found"].endswith("Training ends at 630, before until.")


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["check", *SMALL, "--ranks=3"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("`ranks` must be 1 or 2, got 3.")


def test_ctrl_c_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dg_lightning.checking.probe.FirstProbe.on_train_batch_start", interrupt)
    with pytest.raises(SystemExit) as stopped:
        main(["check", *SMALL])
    assert stopped.value.code == 130
    assert capsys.readouterr().err.endswith("dg-lightning: interrupted.\n")
    assert not list(Path().iterdir())


@pytest.mark.slow
def test_two_processes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", *SMALL, "--ranks=2", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert [f["status"] for f in report["findings"] if f["what"] == "two processes"] == ["OK"]
