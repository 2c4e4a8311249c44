"""λ of a budget."""

from typing import Any

import pytest
import torch

from dg_lightning.budget.regulator import Multiplier


@pytest.mark.parametrize("method", ["pi", "dual"])
def test_a_multiplier_rises_while_too_much_is_used_and_stays_in_bounds(method: Any) -> None:
    multiplier = Multiplier(method, initial=0.1, highest=2.0)
    high, low = torch.tensor(0.9), torch.tensor(0.1)
    for _ in range(500):
        before = float(multiplier.value)
        multiplier.update(high, allowed=0.3)
        assert before <= float(multiplier.value) <= 2.0
    assert float(multiplier.value) == 2.0
    for _ in range(500):
        multiplier.update(low, allowed=0.3)
    assert float(multiplier.value) <= 0.000101


@pytest.mark.parametrize("method", ["pi", "dual"])
def test_a_multiplier_never_falls_while_too_much_is_used(method: Any) -> None:
    multiplier = Multiplier(method, initial=0.1, highest=2.0)
    for used in torch.linspace(0.9, 0.31, 20):  # ever less, and always too much
        before = float(multiplier.value)
        multiplier.update(used, allowed=0.3)
        assert float(multiplier.value) >= before
    multiplier.update(torch.tensor(0.2), allowed=0.3)
    assert float(multiplier.value) < before
