import subprocess
import sys

import pytest

EXTRAS = "jsonargparse rich sklearn wandb scanpy anndata optuna onnx soundfile"

# A machine on which the extras are not installed: nobody finds them.
_BLOCK = f"""
import importlib.machinery
find = importlib.machinery.PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in {EXTRAS.split()!r} else find(name, path, target)
importlib.machinery.PathFinder.find_spec = find_spec
"""


def run(source: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=120
    ).stdout


def test_core_and_callbacks_import_and_work_with_torch_and_lightning_alone() -> None:
    run(
        _BLOCK + "import torch, dg_lightning, dg_lightning.callbacks, dg_lightning.datamodules\n"
        "dg_lightning.GatedMLP(4, [3], 2, gate={'kind': 'static'})(torch.randn(2, 4))\n"
        "net = {'class_path': 'GatedMLP', 'init_args': {'hidden': [3]}}\n"
        "dg_lightning.GatedClassifier(net, [4], 2)\n"
    )


def test_a_missing_extra_is_named_when_the_class_is_made() -> None:
    out = run(
        _BLOCK + "from dg_lightning.datamodules import DigitsDataModule\n"
        "try:\n    DigitsDataModule()\n"
        "except ModuleNotFoundError as error:\n    print(error)\n"
    )
    assert out.strip() == "DigitsDataModule needs scikit-learn: pip install scikit-learn"


def test_import_loads_nothing_heavy_beyond_lightning() -> None:
    listed = run(
        "import sys, lightning.pytorch, torchmetrics.classification\n"
        "before = set(sys.modules)\n"
        "import dg_lightning, dg_lightning.callbacks, dg_lightning.datamodules\n"
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before}))"
    )
    assert listed.split() == ["dg_lightning"]


@pytest.mark.parametrize(
    "name", ["dg_lightning", "dg_lightning.callbacks", "dg_lightning.datamodules"]
)
def test_faces_export_what_they_promise(name: str) -> None:
    assert (
        run(f"import {name} as m; print(all(hasattr(m, n) for n in m.__all__))").strip() == "True"
    )
