"""Which hooks of a training step a callback is called at."""

from collections.abc import Iterable
from functools import wraps
from typing import Any, TypeVar

import lightning.pytorch as pl

__all__ = ["leave_out_empty_hooks", "only_used_hooks", "use_hooks"]

_OF_A_STEP = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
)

Callback = TypeVar("Callback", bound=type[pl.Callback])


def only_used_hooks(callback: Callback) -> Callback:
    """Let every callback of a class leave out its empty hooks when it is set up."""
    set_up = callback.setup

    @wraps(set_up)
    def setup(self: pl.Callback, *arguments: Any, **named: Any) -> None:
        leave_out_empty_hooks(self)
        set_up(self, *arguments, **named)

    callback.setup = setup  # type: ignore[method-assign]
    return callback


def leave_out_empty_hooks(callback: pl.Callback) -> None:
    """Take the hooks of a training step that a callback leaves empty out of Lightning's loop.

    Lightning looks whether a hook is callable. Calling an empty one takes about 8 µs, and six
    callbacks have thirty of them: more than all that they do in a step on a fast GPU. Those of the
    class stay as they are, so that a subclass may call them.
    """
    for hook in _OF_A_STEP:
        empty = getattr(type(callback), hook, None) is getattr(pl.Callback, hook)
        if empty and hook not in vars(callback):  # which may have somebody's own
            setattr(callback, hook, None)


def use_hooks(callback: pl.Callback, used: Iterable[str], unused: Iterable[str]) -> None:
    """Let a callback be called at some of its hooks, and not at others, until told otherwise.

    Hooks that somebody's subclass has are always called: ours do nothing when they are not used.
    """
    own = vars(callback)
    for hook in used:
        if own.get(hook, hook) is None:  # switched off by us, not somebody's own
            del own[hook]
    for hook in unused:
        if getattr(type(callback), hook).__module__.startswith("dg_lightning."):
            setattr(callback, hook, None)
