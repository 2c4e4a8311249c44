"""Train and test modified shipped configs, each in a separate process."""

import csv
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml


def run(
    config: str, seed: int, options: list[str], change: Callable[[dict[str, Any]], None]
) -> dict[str, float]:
    """Train and test a shipped config; return the last logged values.

    Args:
        config: Short name of the config.
        seed: The random seed.
        options: Further command-line options.
        change: Modifies the content of the config in place.
    """
    with tempfile.TemporaryDirectory() as folder:
        shipped = files("dg_lightning.configs").joinpath(f"{config}.yaml")
        content = yaml.safe_load(shipped.read_text())
        content["seed_everything"] = seed
        content["trainer"]["logger"]["init_args"]["save_dir"] = folder
        change(content)
        path = Path(folder, "config.yaml")
        path.write_text(yaml.safe_dump(content))
        options = [f"--config={path}", "--trainer.enable_progress_bar=false", *options]
        for name in ("fit", "test"):
            command = [sys.executable, "-m", "dg_lightning", name, *options]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        last: dict[str, float] = {}
        logs = sorted(Path(folder).rglob("metrics.csv"), key=lambda log: log.stat().st_mtime)
        for log in logs:
            for row in csv.DictReader(log.open()):
                last |= {key: float(value) for key, value in row.items() if value}
        return last


def figure(values: list[float]) -> str:
    """Format mean and standard deviation."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.2%} ± {spread:.2%}"
