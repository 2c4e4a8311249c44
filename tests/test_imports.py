import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def needed_by(*names: str) -> set[str]:
    """All distributions that these need, directly or not."""
    found: set[str] = set()
    waiting = [Requirement(name) for name in names]
    while waiting:
        wanted = waiting.pop()
        if wanted.name in found:
            continue
        found.add(wanted.name)
        for text in distribution(wanted.name).requires or []:
            requirement = Requirement(text)
            extras = [{"extra": extra} for extra in ("", *wanted.extras)]
            if not requirement.marker or any(map(requirement.marker.evaluate, extras)):
                waiting.append(requirement)
    return found


@pytest.fixture(scope="module")
def torch_and_lightning_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with torch, lightning and what they need, and nothing else."""
    folder = tmp_path_factory.mktemp("packages")
    for name in needed_by("torch", "lightning"):
        for file in distribution(name).files or []:
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (folder / top).exists():
                (folder / top).symlink_to(str(distribution(name).locate_file(top)))
    return folder


def run(source: str, packages: Path | None = None) -> str:
    # -S leaves out the environment's own packages.
    paths = [] if packages is None else [str(ROOT), str(packages)]
    options = [] if packages is None else ["-S"]
    source = f"import sys; sys.path[:0] = {paths}\n{source}"
    done = subprocess.run(
        [sys.executable, *options, "-c", source],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_core_and_callbacks_work_with_torch_and_lightning_alone(
    torch_and_lightning_alone: Path,
) -> None:
    for missing in ("jsonargparse", "rich", "sklearn"):
        assert not (torch_and_lightning_alone / missing).exists()
    run(
        "import torch, dg_lightning, dg_lightning.callbacks, dg_lightning.datamodules\n"
        "dg_lightning.GatedMLP(4, [3], 2, gate={'kind': 'static'})(torch.randn(2, 4))\n"
        "net = {'class_path': 'GatedMLP', 'init_args': {'hidden': [3]}}\n"
        "dg_lightning.GatedClassifier(net, [4], 2)\n",
        torch_and_lightning_alone,
    )


@pytest.mark.slow
def test_a_missing_extra_is_named_when_the_class_is_made(torch_and_lightning_alone: Path) -> None:
    out = run(
        "from dg_lightning import datamodules as d\n"
        "for cls in (d.DigitsDataModule, d.SpeechCommandsDataModule):\n"
        "    try:\n        cls()\n"
        "    except ModuleNotFoundError as error:\n        print(error)\n"
        "    d.BaseDataModule.needs = {}\n",
        torch_and_lightning_alone,
    )
    assert out.splitlines() == [
        "DigitsDataModule needs sklearn: pip install scikit-learn",
        "SpeechCommandsDataModule needs torchaudio: pip install torchaudio",
    ]


@pytest.mark.slow
def test_import_loads_nothing_heavy_beyond_lightning() -> None:
    listed = run(
        "import sys, lightning.pytorch, torchmetrics.classification\n"
        "before = set(sys.modules)\n"
        "import dg_lightning, dg_lightning.callbacks, dg_lightning.datamodules\n"
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before}))"
    )
    ours = set(listed.split()) - sys.stdlib_module_names
    # torchmetrics imports transformers, which imports filelock, where they are installed.
    assert ours - {"filelock"} == {"dg_lightning"}


@pytest.mark.slow
def test_the_command_line_and_checks_need_no_extra() -> None:
    absent = ("optuna", "wandb", "anndata", "onnx")
    run(
        f"sys.modules |= dict.fromkeys({absent})\n"
        "import dg_lightning.cli.commands, dg_lightning.checking, dg_lightning.datamodules"
    )
