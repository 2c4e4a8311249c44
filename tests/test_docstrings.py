import doctest
import importlib
import inspect
import pkgutil

import pytest

import dg_lightning
import dg_lightning.callbacks
import dg_lightning.datamodules

# The first path only: in a checkout the second one of `dg_lightning` is the whole repository.
TOP = (dg_lightning, dg_lightning.callbacks, dg_lightning.datamodules)
FOUND = [
    module
    for package in TOP
    for module in pkgutil.walk_packages(package.__path__[:1], f"{package.__name__}.")
    if not module.name.endswith(".__main__")
]
MODULES = sorted(module.name for module in FOUND)
PACKAGES = [*TOP, *(importlib.import_module(module.name) for module in FOUND if module.ispkg)]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_hold(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name != "triton":
            raise
        pytest.skip("needs Triton")
    assert doctest.testmod(module).failed == 0


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
