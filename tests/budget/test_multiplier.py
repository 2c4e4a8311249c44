"""λ of a budget."""

from typing import Any

import pytest
import torch

from dg_lightning.budget.multiplier import Multiplier


@pytest.mark.parametrize("method", ["pi", "dual"])
def test_a_multiplier_rises_while_too_much_is_used_and_stays_in_bounds(method: Any) -> None:
    multiplier = Multiplier(method, initial=0.1, highest=2.0)
    high, low = torch.tensor(0.9), torch.tensor(0.1)
    for _ in range(500):
        before = float(multiplier.value)
        multiplier.update(high, high, allowed=0.3)
        assert before <= float(multiplier.value) <= 2.0
    assert float(multiplier.value) == 2.0
    for _ in range(500):
        multiplier.update(low, low, allowed=0.3)
    assert float(multiplier.value) <= 0.0101


def test_a_multiplier_waits_for_gates_that_are_about_to_close() -> None:
    multiplier = Multiplier("pi", initial=0.1, highest=2.0)
    for _ in range(10):  # p has fallen below what is allowed, hard gates will follow
        multiplier.update(torch.tensor(0.9), torch.tensor(0.29), allowed=0.3)
    assert float(multiplier.value) < 0.1
