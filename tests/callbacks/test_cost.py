"""What a step must not cost: hooks that do nothing."""

import lightning.pytorch as pl
import pytest

from dg_lightning import callbacks


@pytest.mark.parametrize("name", callbacks.__all__)  # type: ignore[attr-defined]
def test_lightning_calls_only_hooks_that_do_something(name: str) -> None:
    used = {hook for hook in vars(pl.Callback) if callable(getattr(getattr(callbacks, name), hook))}
    if name == "RigL":  # which looks at gates there, if it is asked to
        assert callbacks.RigL().on_after_backward is None
    else:
        presses = name in ("GatePenalty", "BudgetController")
        assert ("on_after_backward" in used) == presses
    assert callbacks.MinimumActivity().on_train_batch_end is None
    assert callable(callbacks.MinimumActivity(revive_after=10).on_train_batch_end)
    assert callbacks.ExactResume().on_train_batch_start is None
    assert {"setup", "on_train_start", "on_save_checkpoint"} <= used
