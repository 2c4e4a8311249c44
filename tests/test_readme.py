import re
import shlex
from pathlib import Path

import pytest

from dg_lightning.cli import main, shipped_configs

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.S)


# In this process: to start another one takes longer than most of what is run.
pytestmark = pytest.mark.usefixtures("in_empty_folder")


@pytest.mark.parametrize("source", blocks("python"), ids=lambda source: source.splitlines()[0])
def test_python_blocks_run(source: str) -> None:
    exec(compile(source, "README.md", "exec"), {"__name__": "__main__"})


@pytest.mark.slow
def test_commands_run_in_the_order_of_the_page() -> None:
    ran = 0
    lines = "\n".join(blocks("bash")).splitlines()
    for words in filter(None, (shlex.split(line, comments=True) for line in lines)):
        program, *arguments = words
        if program == "make":
            assert f"\n{arguments[0]}:" in (ROOT / "Makefile").read_text()
            continue
        assert program == "dg-lightning"
        try:
            main(arguments)
        except SystemExit as ended:  # of what only prints
            if ended.code:
                raise
        ran += 1
    assert ran >= 4


def test_every_shipped_config_is_named() -> None:
    for name in shipped_configs():
        group, _, item = name.rpartition("/")
        assert f"`{name}`" in README or (f"`{group}`" in README and f"`{item}`" in README), name


@pytest.mark.slow
def test_every_key_that_a_run_logs_is_listed(tmp_path: Path) -> None:
    import csv

    options = ["--config", "digits/dynamicgate", f"--trainer.logger.save_dir={tmp_path}"]
    options += ["--trainer.max_epochs=1", "--trainer.enable_progress_bar=false"]
    for command in ("fit", "test"):
        main([command, *options])
    stacked = ["budget_controller", "temperature_annealing", "threshold_phases"]
    options[1] = "digits/baseline"
    options += [part for name in stacked for part in ("--config", f"callbacks/{name}")]
    main(["fit", *options, "--model.net.gate={kind: static}"])
    for name in ("dynamicgate_input", "switch_moe"):
        main(["fit", "--config", f"digits/{name}", *options[2:5]])
    logged = set()
    for path in tmp_path.rglob("metrics.csv"):
        logged |= set(csv.DictReader(path.open()).fieldnames or [])
    keys = r"`((?:train|val|test|compute|gates|routing)/\w+)(?:/<layer>)?`"
    listed = set(re.findall(keys, README))
    found = {re.sub(r"/net\..*", "", key) for key in logged} - {"epoch", "step"}
    assert found <= listed
    # After one epoch all units of the digits are open: there is nothing to correlate or compare.
    assert listed - found == {"gates/hardness_correlation", "gates/churn"}
