"""README and site: every block runs, every config and logged key is named, the site builds."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from dg_lightning.cli import main, shipped_configs

ROOT = Path(__file__).parents[1]
PAGES = {path.stem: path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
PAGES["README"] = (ROOT / "README.md").read_text("utf-8")
EVERYTHING = "\n".join(PAGES.values())
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.S | re.M)
QUICK = [name for name, text in PAGES.items() if "```python" in text and "```bash" not in text]
SLOW = [name for name, text in PAGES.items() if "```bash" in text]

# In this process: to start another one takes longer than most of what is run.
pytestmark = pytest.mark.usefixtures("in_empty_folder")


def run_blocks(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for language, block in BLOCK.findall(PAGES[page]):
        if language == "python":
            exec(compile(block, page, "exec"), {"__name__": "__main__"})
        elif language == "bash":
            for line in block.splitlines():
                run_command(shlex.split(line, comments=True))
        else:
            assert language in ("text", "yaml"), f"{page}: a block of {language or 'no language'}"


def run_command(words: list[str]) -> None:
    program, *arguments = words or ["", ""]
    if program == "make":
        assert f"\n{arguments[0]}:" in (ROOT / "Makefile").read_text()
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wanted = re.findall(r"\[(.*)\]", arguments[-1])
        assert set(wanted) <= {*extras["optional-dependencies"]}
    elif program:
        assert program == "dg-lightning"
        try:
            main(arguments)
        except SystemExit as ended:  # the command only prints
            if ended.code:
                raise


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("page", QUICK)
def test_python_blocks_run(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_blocks(page, monkeypatch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("page", SLOW)
def test_commands_and_blocks_run_in_the_order_of_the_page(
    page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["dg-lightning"])
    run_blocks(page, monkeypatch)


def test_the_readme_is_short() -> None:
    assert len(PAGES["README"].splitlines()) <= 180
    assert len(PAGES["README"].split()) <= 1300


def test_every_shipped_config_is_named() -> None:
    for name in shipped_configs():
        group, _, item = name.rpartition("/")
        named = f"`{name}`" in EVERYTHING
        assert named or (f"`{group}`" in EVERYTHING and f"`{item}`" in EVERYTHING), name


@pytest.mark.parametrize("package", ["callbacks", "datamodules", "runtime", "surgery"])
def test_the_reference_has_every_public_name(package: str) -> None:
    for name in import_module(f"dg_lightning.{package}").__all__:
        assert re.search(rf"::: (dg_lightning\.)?{package}\.{name}\n", PAGES["api"]), name


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", f"--site-dir={tmp_path}"]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert "GatedRegressor" in (tmp_path / "api" / "index.html").read_text("utf-8")


@pytest.mark.slow
def test_every_key_that_a_run_logs_is_listed(tmp_path: Path) -> None:
    import csv

    options = ["--config", "digits/dynamicgate", f"--trainer.logger.save_dir={tmp_path}"]
    options += ["--trainer.max_epochs=1", "--trainer.enable_progress_bar=false"]
    for command in ("fit", "test"):
        main([command, *options])
        main([command, "--config", "table/regression_dynamicgate", *options[2:]])
    options[1] = "digits/baseline"
    for name in ("budget_controller", "paper_recipe"):
        fragment = ["--config", f"callbacks/{name}"]
        main(["fit", *options, *fragment, "--model.net.gate={kind: static}"])
    for name in ("dynamicgate_input", "switch_moe"):
        main(["fit", "--config", f"digits/{name}", *options[2:5]])
    logged = set()
    for path in tmp_path.rglob("metrics.csv"):
        logged |= set(csv.DictReader(path.open()).fieldnames or [])
    keys = r"`((?:train|val|test|compute|gates|routing)/\w+)(?:/<layer>)?`"
    listed = set(re.findall(keys, PAGES["monitoring"]))
    found = {re.sub(r"/net\..*", "", key) for key in logged} - {"epoch", "step"}
    found = {key for key in found if not key.startswith("collapse/")}  # a key for each mode
    assert found <= listed
    # After one epoch all units of the digits are open: there is nothing to correlate.
    assert listed - found <= {"gates/hardness_correlation", "gates/churn"}
