import doctest
import importlib
import inspect
import pkgutil

import pytest

import dg_lightning
import dg_lightning.callbacks
import dg_lightning.cli
import dg_lightning.datamodules
import dg_lightning.gates
import dg_lightning.runtime

# The first path only: in a checkout the second one of `dg_lightning` is the whole repository.
PACKAGES = [
    dg_lightning,
    dg_lightning.gates,
    dg_lightning.cli,
    dg_lightning.callbacks,
    dg_lightning.datamodules,
    dg_lightning.runtime,
]
MODULES = sorted(
    f"{package.__name__}.{module.name}"
    for package in PACKAGES
    for module in pkgutil.iter_modules(package.__path__[:1])
    if module.name != "__main__"
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_hold(name: str) -> None:
    if name.rpartition(".")[-1] in (
        "floor_kernel",
        "kernel_launch",
        "kernels",
        "mask_kernel",
        "packing",
        "rewire_kernel",
        "triton_engine",
    ):
        pytest.importorskip("triton")
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize(
    ("package", "name"),
    [(package.__name__, name) for package in PACKAGES for name in package.__all__],
)
def test_what_is_public_has_a_docstring(package: str, name: str) -> None:
    thing = getattr(importlib.import_module(package), name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        summary, *rest = (thing.__doc__ or "").splitlines()
        assert summary.endswith(".")
        assert not rest or not rest[0]
