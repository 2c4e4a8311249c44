"""The check of a training knows callbacks of tasks."""

from typing import Any

import pytest

from dg_lightning.cli import main
from dg_lightning.configs import shipped_configs

QUICK = ("continual/split_digits/", "continual/drift_digits/")
CONFIGS = [name for name in shipped_configs() if name.startswith(QUICK)]


@pytest.mark.slow
@pytest.mark.usefixtures("in_empty_folder")
@pytest.mark.filterwarnings("ignore:.* has no free unit left")
@pytest.mark.parametrize("config", CONFIGS)
def test_configs_of_tasks_pass(config: str, capsys: Any) -> None:
    main(["check", "--config", config])
    assert "ERROR" not in capsys.readouterr().out
