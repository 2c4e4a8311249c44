"""Resume a run exactly: same random numbers, and the end of an interrupted epoch."""

import random
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader
from typing_extensions import override

from dg_lightning.training.step_logging import loader_generators

_KEY = "random_generators"


class ExactResume(pl.Callback):
    """Makes a resumed run continue exactly like an uninterrupted one.

    It saves the state of every random generator on every rank, and restores it when a run is
    resumed. Dropout, sampled gates and other random operations then continue as in the
    uninterrupted run. The generators are Python's `random`, NumPy's global generator, torch's
    generators on the CPU and on every CUDA device, and any generator passed to a torch `DataLoader`
    or its sampler. The data order depends on the loader: our DataModules can resume in mid-epoch,
    but a plain `DataLoader` only at the end of an epoch.

    If a checkpoint was saved at the end of a batch, a validation or the end of an epoch may be due
    after that batch. The resumed run then starts with these steps. Lightning 2.6 would skip both,
    and would repeat an epoch when such a run is resumed again. Two differences remain: values that
    a module collects in attributes during an epoch are lost, and with `max_steps` a
    `ReduceLROnPlateau` may miss its step for that epoch.

    If the checkpoint was saved with a different number of ranks, a warning is issued and no
    generator is restored.

    >>> sorted(ExactResume.generators())
    ['cuda', 'numpy', 'python', 'torch']
    """

    def __init__(self) -> None:
        self._fits = False
        self._to_restore: dict[str, Any] | None = None
        self._stepped: int | None = None  # batches so far, if only the end of the epoch is due
        self._validates = False  # whether a validation is due first
        self._starts_epoch = False  # whether the saved epoch had ended

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._fits = stage == "fit"

    @staticmethod
    def generators() -> dict[str, Any]:
        """Return the state of every generator on this rank, as tensors and plain values."""
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
        """Restore every generator on this rank."""
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
        own = self._to_restore  # loaded, but training has not started
        if own is None:
            own = {
                **self.generators(),
                "loaders": [g.get_state() for g in loader_generators(trainer.train_dataloader)],
                "metrics": self._metrics_of_epoch(trainer),
            }
        states: list[Any] = [own]
        if trainer.world_size > 1:  # Lightning calls this on every process
            states = [None] * trainer.world_size
            dist.all_gather_object(states, own)
        checkpoint[_KEY] = states

    @staticmethod
    def _metrics_of_epoch(trainer: Any) -> dict[str, float]:
        """Return the training metrics of an epoch if only the end of the epoch is due."""
        loop = trainer.fit_loop.epoch_loop
        if not trainer.training or not loop.batch_progress.is_last_batch:
            return {}
        metrics = loop._results.metrics(on_step=False)["callback"]
        return {name: float(value) for name, value in metrics.items()}

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        states = checkpoint.get(_KEY)
        if not self._fits:
            return
        self._correct_progress(checkpoint["loops"]["fit_loop"])
        due = self._validates or self._stepped is not None
        if due and 0 <= trainer.max_steps <= checkpoint["global_step"]:
            rank_zero_warn(
                f"`max_steps`={trainer.max_steps} was reached, but a validation or the end of an "
                "epoch is still due: raise `max_steps` to run it."
            )
        if states is None:
            rank_zero_warn(
                "The checkpoint was saved without ExactResume: random numbers will differ from the "
                "uninterrupted run."
            )
        elif len(states) != trainer.world_size:
            rank_zero_warn(
                f"The checkpoint has random generators for {len(states)} processes, but this run "
                f"has {trainer.world_size}: random numbers will differ from the uninterrupted run."
            )
        else:
            self._to_restore = states[trainer.global_rank]

    def _correct_progress(self, fit: dict[str, Any]) -> None:
        """Correct the progress counters of a checkpoint before Lightning reads them."""
        epoch, batch = fit["epoch_progress"], fit["epoch_loop.batch_progress"]
        validation = fit["epoch_loop.val_loop.batch_progress"]
        now = batch["current"]  # a batch that a hook skipped is processed, but not started
        at_batch_end = now["completed"] + 1 == now["processed"] == now["started"]
        if at_batch_end and epoch["current"]["processed"] == epoch["current"]["started"]:
            # An earlier resume by Lightning counted an epoch that was still running.
            for counts in (epoch["total"], epoch["current"]):
                counts["ready"] = counts["started"] = counts["processed"] + 1
        if at_batch_end:
            # Repeat a validation that had begun, because Lightning would skip it.
            done = validation["total"]["completed"]
            validation["total"] |= {"ready": done + 1, "started": done + 1, "processed": done}
            validation["current"] = dict.fromkeys(validation["current"], 0)
            validation["is_last_batch"] = False
        self._validates = at_batch_end and not batch["is_last_batch"]
        self._stepped = None
        if at_batch_end and batch["is_last_batch"]:
            self._stepped = fit["epoch_loop.state_dict"]["_batches_that_stepped"]
            for counts in (batch["total"], batch["current"]):
                counts["completed"] += 1
        now = epoch["current"]
        self._starts_epoch = now["started"] == now["processed"] == now["completed"] + 1
        if self._starts_epoch:
            for counts in (epoch["total"], epoch["current"]):
                counts["completed"] = counts["processed"]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loop = trainer.fit_loop.epoch_loop
        if self._to_restore is not None:
            self._restore_all(trainer, self._to_restore)
            if self._stepped is None:
                self._restart_loaders(trainer)
            else:  # the next epoch creates its iterators
                metrics = self._to_restore.get("metrics", {})
                trainer.callback_metrics.update({k: torch.tensor(v) for k, v in metrics.items()})
                self._to_restore = None
        if self._validates or self._stepped is not None:
            total: Any = loop.val_loop.batch_progress.total
            total.ready = total.started = total.completed
        if self._stepped is not None:
            trainer.fit_loop._data_fetcher.done = True  # type: ignore[union-attr]
        if self._starts_epoch:
            loop.restarting = self._starts_epoch = False

    @staticmethod
    def _restart_loaders(trainer: Any) -> None:
        """Recreate the iterators of torch loaders.

        A torch loader draws a seed when its iterator is created. Lightning created the iterator
        before the generators were restored, but the uninterrupted run creates it after saving.
        """
        progress = trainer.fit_loop.epoch_loop.batch_progress
        between_epochs = progress.current.ready == 0 or progress.is_last_batch
        loaders = trainer.fit_loop._combined_loader.flattened
        if between_epochs and any(isinstance(loader, DataLoader) for loader in loaders):
            iter(trainer.fit_loop._data_fetcher)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._validates and not trainer.sanity_checking:
            self._validates = False
            trainer.fit_loop.epoch_loop._batches_that_stepped -= 1  # the batch is counted again
            if self._to_restore is not None:
                self._restore_all(trainer, self._to_restore)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._validates = False
        # In mid-epoch, loaders have drawn new seeds since training started.
        if self._to_restore is not None and batch_idx > 0:
            self._restore_all(trainer, self._to_restore)
        self._to_restore = None

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._stepped is not None:
            trainer.fit_loop.epoch_loop._batches_that_stepped = self._stepped + 1
            self._stepped = None
            if trainer.max_steps == -1:  # so that per-epoch schedulers step
                trainer.fit_loop.restarting = False

    def _restore_all(self, trainer: pl.Trainer, state: dict[str, Any]) -> None:
        """Restore every generator on this rank, including those in loaders."""
        self.restore(state)
        own, saved = loader_generators(trainer.train_dataloader), state.get("loaders", [])
        if len(own) != len(saved):
            rank_zero_warn(
                f"The checkpoint has {len(saved)} generators for training loaders, but this run "
                f"has {len(own)}: the data order will differ from the uninterrupted run."
            )
            return
        for generator, value in zip(own, saved, strict=True):
            generator.set_state(value.cpu())
