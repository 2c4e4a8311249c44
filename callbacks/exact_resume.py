"""Resume exactly: save every random generator in the checkpoint."""

import random
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader
from typing_extensions import override

from dg_lightning.training.loaders import loader_generators

__all__ = ["ExactResume"]

_KEY = "random_generators"


class ExactResume(pl.Callback):
    """Saves every random generator of every rank, and restores it when a run is resumed.

    Dropout, sampled gates and everything else that is random then continue as in the uninterrupted
    run: Python's `random`, NumPy's global generator, torch's on the CPU and on every CUDA device,
    and those given to a torch `DataLoader` or its sampler. The order of the data is up to the
    loader: our DataModules resume in mid-epoch, a plain `DataLoader` at the end of an epoch.

    A checkpoint of another number of ranks restores nothing, with a warning.

    >>> sorted(ExactResume.generators())
    ['cuda', 'numpy', 'python', 'torch']
    """

    def __init__(self) -> None:
        self._fits = False
        self._to_restore: dict[str, Any] | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._fits = stage == "fit"

    @staticmethod
    def generators() -> dict[str, Any]:
        """Return the state of every generator of this rank, as tensors and plain values."""
        import numpy as np

        version, words, gauss = random.getstate()
        state = np.random.get_state(legacy=True)
        assert isinstance(state, tuple)
        kind, keys, position, has_gauss, cached = state
        return {
            "python": [version, list(words), gauss],
            "numpy": [kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached],
            "torch": torch.get_rng_state(),
            "cuda": [s.cpu() for s in torch.cuda.get_rng_state_all()],
        }

    @staticmethod
    def restore(state: dict[str, Any]) -> None:
        """Set every generator of this rank."""
        import numpy as np

        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
        torch.set_rng_state(state["torch"].cpu())
        if len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        own = self._to_restore  # of a resumed training that has not started
        if own is None:
            own = {
                **self.generators(),
                "loaders": [g.get_state() for g in loader_generators(trainer.train_dataloader)],
            }
        states: list[Any] = [own]
        if trainer.world_size > 1:  # Lightning dumps on every process, and writes on the first
            states = [None] * trainer.world_size
            dist.all_gather_object(states, own)
        checkpoint[_KEY] = states

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        states = checkpoint.get(_KEY)
        if not self._fits:
            return
        if states is None:
            rank_zero_warn(
                "The checkpoint was saved without ExactResume: random numbers will not be those of "
                "the uninterrupted run."
            )
        elif len(states) != trainer.world_size:
            rank_zero_warn(
                f"The checkpoint has the random generators of {len(states)} processes, this run "
                f"has {trainer.world_size}: random numbers will not be those of the "
                "uninterrupted run."
            )
        else:
            self._to_restore = states[trainer.global_rank]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._to_restore is None:
            return
        self._restore_all(trainer, self._to_restore)
        loaders = trainer.fit_loop._combined_loader
        progress = trainer.fit_loop.epoch_loop.batch_progress
        between_epochs = progress.current.ready == 0 or progress.is_last_batch
        if between_epochs and any(isinstance(d, DataLoader) for d in loaders.flattened):  # type: ignore[union-attr]
            # A torch loader draws a seed when its iterator is made, which the uninterrupted run
            # does after the checkpoint, and Lightning has done here before it was restored.
            iter(trainer.fit_loop._data_fetcher)  # type: ignore[arg-type]

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # In the middle of an epoch, loaders have drawn their seeds anew since the start.
        if self._to_restore is not None and batch_idx > 0:
            self._restore_all(trainer, self._to_restore)
        self._to_restore = None

    def _restore_all(self, trainer: pl.Trainer, state: dict[str, Any]) -> None:
        """Set every generator of this rank, those of loaders too."""
        self.restore(state)
        own, saved = loader_generators(trainer.train_dataloader), state.get("loaders", [])
        if len(own) != len(saved):
            rank_zero_warn(
                f"The checkpoint has {len(saved)} generators of training loaders, this run has "
                f"{len(own)}: the order of the data will not be that of the uninterrupted run."
            )
            return
        for generator, value in zip(own, saved, strict=True):
            generator.set_state(value.cpu())
