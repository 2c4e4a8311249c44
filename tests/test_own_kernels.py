"""Kernels that a machine cannot run are done without."""

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dg_lightning.own_kernels import kernel_on

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    kernel_on.cache_clear()
    yield
    kernel_on.cache_clear()


def once(function: Any, device: torch.device) -> None:
    function()


def test_one_that_cannot_be_compiled_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def add() -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setitem(sys.modules, "dg_lightning.adding", types.SimpleNamespace(add=add))
    with pytest.warns(UserWarning, match=r"the kernel add on cpu .*Failed to find C compiler\): t"):
        assert kernel_on(CPU, "adding", "add", once) is None
    assert kernel_on(CPU, "adding", "add", once) is None  # without another warning


def test_one_that_runs_is_tried_once_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    module = types.SimpleNamespace(add=lambda: calls.append(1))
    monkeypatch.setitem(sys.modules, "dg_lightning.adding", module)
    for _ in range(3):
        assert kernel_on(CPU, "adding", "add", once) is module.add
    assert calls == [1]


def test_without_triton_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dg_lightning.gates.floor_kernel", None)
    assert kernel_on(CPU, "gates.floor_kernel", "decided_with_floor", once) is None
