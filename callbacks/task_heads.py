"""Outputs of the current task only."""

from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from dg_lightning.arguments import checked
from dg_lightning.continual import TaskData, task_data
from dg_lightning.continual.tasks import Heads

__all__ = ["TaskHeads"]


class TaskHeads(pl.Callback):
    """Leaves a model only the classes of the task at hand, as a head for each task would.

    In training that is the current task, in evaluation the task of the batch. All classes stay open
    if the data does not tell the task (`TaskSequence(labels="class")`), and while all tasks are
    trained together (`joint`).

    Args:
        head: Name of the linear map that makes the logits; None for the last one.

    >>> TaskHeads(head="output").head
    'output'
    """

    @checked
    def __init__(self, head: str | None = None) -> None:
        self.head = head
        self._data: TaskData | None = None
        self._heads: Heads | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._data = task_data(trainer, self)

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._data is not None
        if self._heads is None:
            self._heads = Heads(pl_module, self._data, self.head)

    on_fit_start = on_validation_start = on_test_start = _begin

    def _take(self, task: int) -> None:
        assert self._data is not None
        assert self._heads is not None
        self._heads.classes = self._data.classes_of(task) if self._data.tells_task else None

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self._data is not None
        assert self._heads is not None
        self._take(self._data.current_task)
        if self._data.joint:
            self._heads.classes = None

    @override
    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        assert self._data is not None
        part = "test" if trainer.testing else "val"
        self._take(self._data.task_of(part, batch_idx))

    on_test_batch_start = on_validation_batch_start

    @override
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._heads is not None:
            self._heads.remove()
        self._heads = self._data = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_heads": None, "_data": None}
