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
        assert "on_after_backward" not in used
    assert {"setup", "on_train_start", "on_save_checkpoint"} <= used
