"""The short examples run as they are."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
@pytest.mark.usefixtures("in_empty_folder")
@pytest.mark.parametrize("name", ["hugging_face", "torchvision_resnet", "timm_vit"])
def test_it_runs(
    name: str,
    small_datasets: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("timm" if name == "timm_vit" else "transformers")
    options = ["--fast", "--root", str(small_datasets)] if name == "timm_vit" else []
    monkeypatch.setattr(sys, "argv", [name, *options])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out
