"""State that Lightning loads before a callback knows the gates that it belongs to."""

from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

__all__ = ["Restored"]


class Restored(pl.Callback):
    """Takes the state of a checkpoint when training starts, when its gates are known.

    Lightning loads the state of callbacks before `on_fit_start`; a search for a learning rate does
    so after it. Until training starts, the loaded state is the state.
    """

    _loaded: dict[str, Any] | None = None

    def current_state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        raise NotImplementedError

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `current_state`."""
        raise NotImplementedError

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._loaded = None  # of a test, or of a run that did not start

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.current_state() if self._loaded is None else self._loaded

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._loaded is not None:
            self.restore(self._loaded)
            self._loaded = None
