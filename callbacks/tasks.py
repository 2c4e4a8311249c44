"""Train on a sequence of tasks: heads and metrics."""

import math
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from dg_lightning.arguments import checked
from dg_lightning.collapse import open_shares
from dg_lightning.continual import (
    AccuracyMatrix,
    TaskData,
    average_accuracy,
    backward_transfer,
    forgetting,
    forward_transfer,
    overlap,
    plasticity,
    task_data,
)
from dg_lightning.continual.tasks import Heads, logits_of
from dg_lightning.files import write_text
from dg_lightning.gates.protocol import GateLike, gate_layers
from dg_lightning.monitoring import run_folder

from ._shared import mean_over_ranks


class TaskHeads(pl.Callback):
    """Restricts the logits to the classes of the current task.

    This is equivalent to a separate head for each task. Training uses the classes of the current
    task, and evaluation uses those of the batch's task. Logits are not restricted if the data does
    not provide the task (`TaskSequence(labels="class")`), or while all tasks are trained together
    (`joint`).

    Args:
        head: Name of the linear layer that computes the logits (default: the last one).

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


_NOT_MEASURED = -1.0  # replaces NaN in checkpoints, so that they compare equal


class TaskMonitor(pl.Callback):
    """Measures accuracy, forgetting and transfer over a sequence of tasks.

    `validation_step` and `test_step` must return the class logits, as a tensor or under the key
    `logits`, and the labels must be the second item of the batch. The validation after a task's
    last epoch fills the row for that task in the accuracy matrix. The matrix is written to
    `tasks.csv` in the run's folder.

    | logged key | meaning |
    |---|---|
    | `tasks/current` | index of the task being trained |
    | `tasks/accuracy/<task>` | accuracy on a task |
    | `tasks/average_accuracy` | mean accuracy on the tasks learned so far |
    | `tasks/accuracy_when_learned` | mean accuracy on each task right after learning it |
    | `tasks/forgetting` | mean accuracy that earlier tasks lost since they were learned |
    | `tasks/backward_transfer` | mean accuracy that earlier tasks gained since they were learned |
    | `tasks/forward_transfer` | mean accuracy above chance right before a task is learned |
    | `tasks/plasticity` | mean accuracy when learned, last ten tasks minus first ten |
    | `tasks/overlap` | mean share of open units that two learned tasks have in common |

    In a test, accuracies are measured on the test split. Forgetting and transfer still come from
    the last validation.

    >>> TaskMonitor().learned
    0
    """

    def __init__(self) -> None:
        self.learned = 0  # the current task, or the last one learned
        self.matrix = torch.empty(0, 0)  # validation accuracies, NaN if not measured
        self._counts = AccuracyMatrix(0)  # counts in the current evaluation
        self._data: TaskData | None = None
        self._watched: list[GateLike] = []
        self._opened: dict[int, tuple[Tensor, int]] = {}  # task -> (sum, number of batches)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._data = task_data(trainer, self)
        if stage == "fit" or len(self.matrix) != self._data.tasks:
            tasks = self._data.tasks
            self.learned, self.matrix = 0, torch.full((tasks, tasks), torch.nan).double()

    @override
    def on_train_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        assert self._data is not None
        epochs = (trainer.max_epochs or 0) // self._data.tasks
        every = trainer.check_val_every_n_epoch
        partly = every is None or epochs % every or trainer.limit_val_batches != 1.0
        if partly and not trainer.fast_dev_run:
            rank_zero_warn(
                "TaskMonitor may miss tasks: set `check_val_every_n_epoch` to a divisor of the "
                f"{epochs} epochs per task, and leave `limit_val_batches` at its default."
            )

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._data is not None
        self._counts = AccuracyMatrix(self._data.tasks).to(pl_module.device)
        self._watched = list(gate_layers(pl_module, required=False).values())
        self._opened = {}
        if trainer.state.fn == "fit":
            self.learned = self._data.current_task

    on_validation_epoch_start = on_test_epoch_start = _begin

    @override
    def on_validation_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        logits = logits_of(outputs, self)
        assert self._data is not None
        task = self._data.task_of("test" if trainer.testing else "val", batch_idx)
        self._counts.update(self.learned, task, logits, batch[1])
        if self._watched:
            opened, batches = self._opened.get(task, (torch.zeros(()), 0))
            opened = opened.to(logits.device) + open_shares(self._watched)
            self._opened[task] = (opened, batches + 1)

    on_test_batch_end = on_validation_batch_end

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self.matrix[self.learned] = self._counts.compute().cpu()[self.learned]
        self._log(trainer, pl_module, self.matrix)
        if trainer.state.fn == "fit":
            pl_module.log("tasks/current", float(self.learned))
            folder = run_folder(trainer)  # all processes must call this
            if trainer.is_global_zero:
                rows = [range(len(self.matrix)), *self.matrix.tolist()]
                lines = [",".join(map(str, row)) for row in rows]
                write_text(folder / "tasks.csv", "\n".join(lines) + "\n")

    @override
    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._log(trainer, pl_module, self._counts.compute().cpu())

    def _log(self, trainer: Any, pl_module: pl.LightningModule, now: Tensor) -> None:
        """Log figures from this evaluation and from earlier validations."""
        assert self._data is not None
        figures = self._figures(now)
        if len(self._opened) > self.learned > 0 and self._data.tells_task:
            each = [opened / batches for opened, batches in self._opened.values()]
            rates = mean_over_ranks(trainer, torch.stack(each[: self.learned + 1]))
            figures["tasks/overlap"] = overlap(rates.cpu())
        for key, value in figures.items():
            if not math.isnan(value):
                pl_module.log(key, value)

    def _figures(self, now: Tensor) -> dict[str, float]:
        assert self._data is not None
        learned, history = self.learned, self.matrix
        chances = [1 / len(self._classes(task)) for task in range(self._data.tasks)]
        return {
            **{f"tasks/accuracy/{t}": value for t, value in enumerate(now[learned].tolist())},
            "tasks/average_accuracy": average_accuracy(now, learned),
            "tasks/accuracy_when_learned": float(history.diagonal()[: learned + 1].mean()),
            "tasks/forgetting": forgetting(history, learned),
            "tasks/backward_transfer": backward_transfer(history, learned),
            "tasks/forward_transfer": forward_transfer(history, learned, torch.tensor(chances)),
            "tasks/plasticity": plasticity(history, learned),
        }

    def _classes(self, task: int) -> Any:
        assert self._data is not None
        classes = self._data.classes_of(task) if self._data.tells_task else None
        return range(self._data.num_classes) if classes is None else classes

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"learned": self.learned, "matrix": self.matrix.nan_to_num(_NOT_MEASURED)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.learned, saved = state_dict["learned"], state_dict["matrix"]
        self.matrix = torch.where(saved == _NOT_MEASURED, torch.nan, saved)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_data": None, "_watched": []}
