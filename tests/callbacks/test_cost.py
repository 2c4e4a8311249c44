"""What a step must not cost: hooks that do nothing."""

from typing import Any

import lightning.pytorch as pl
import pytest

from dg_lightning import callbacks
from dg_lightning.switch_moe import Router

NEEDED: dict[str, Any] = {"BudgetController": {"budget": 0.6}, "GatePenalty": {"weight": 0.5}}
OF_A_STEP = [hook for hook in vars(pl.Callback) if "batch_" in hook or "optimizer" in hook]
OF_A_STEP = [hook for hook in OF_A_STEP if hook.startswith(("on_train", "on_before"))]
OF_A_STEP += ["on_before_backward", "on_after_backward", "on_before_zero_grad"]


def set_up(callback: Any) -> Any:
    module = pl.LightningModule()
    module.net = Router(4, experts=2, expert_width=2)
    callback.setup(pl.Trainer(accelerator="cpu", logger=False), module, "predict")
    return callback


@pytest.mark.parametrize("name", callbacks.__all__)  # type: ignore[attr-defined]
def test_lightning_calls_only_hooks_that_do_something(name: str) -> None:
    callback = set_up(getattr(callbacks, name)(**NEEDED.get(name, {})))
    called = {hook for hook in OF_A_STEP if callable(getattr(callback, hook))}
    empty = {h for h in OF_A_STEP if getattr(type(callback), h) is getattr(pl.Callback, h)}
    assert len(empty) >= 3
    assert not called & empty


def test_hooks_are_used_where_arguments_ask_for_them() -> None:
    assert set_up(callbacks.MinimumActivity()).on_train_batch_end is None
    assert callable(set_up(callbacks.MinimumActivity(revive_after=10)).on_train_batch_end)
    assert set_up(callbacks.ExactResume()).on_train_batch_start is None
    assert set_up(callbacks.RigL()).on_after_backward is None  # where it would look at gates


@pytest.mark.parametrize("name", callbacks.__all__)  # type: ignore[attr-defined]
def test_a_subclass_may_call_hooks_that_are_empty(name: str) -> None:
    kind = getattr(callbacks, name)

    class Own(kind):  # type: ignore[misc,valid-type]
        def on_before_zero_grad(self, *arguments: Any) -> None:
            super().on_before_zero_grad(*arguments)

    own = set_up(Own(**NEEDED.get(name, {})))
    own.on_before_zero_grad(None, None, None)
