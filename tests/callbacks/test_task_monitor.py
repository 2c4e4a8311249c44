import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from sklearn.metrics import accuracy_score
from task_runs import TASKS, classifier, tasks, trainer_for

from dg_lightning.callbacks import TaskHeads, TaskMonitor
from dg_lightning.continual import forgetting


class ByHand(pl.Callback):
    """Collects predictions, for scikit-learn to judge."""

    def __init__(self) -> None:
        self.rows: list[dict[int, tuple[list[int], list[int]]]] = []

    def on_validation_epoch_start(self, *_: Any) -> None:
        self.rows.append({task: ([], []) for task in range(TASKS)})

    def on_test_epoch_start(self, *_: Any) -> None:
        self.on_validation_epoch_start()

    def _add(self, part: str, trainer: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        said, true = self.rows[-1][trainer.datamodule.task_of(part, batch_idx)]
        said += outputs["logits"].argmax(-1).tolist()
        true += batch[1].tolist()

    def on_validation_batch_end(self, trainer: Any, _: Any, *rest: Any) -> None:
        self._add("val", trainer, *rest[:3])

    def on_test_batch_end(self, trainer: Any, _: Any, *rest: Any) -> None:
        self._add("test", trainer, *rest[:3])

    def accuracies(self, row: int) -> list[float]:
        return [float(accuracy_score(true, said)) for said, true in self.rows[row].values()]


def test_the_matrix_is_that_of_scikit_learn_and_is_written(tmp_path: Path) -> None:
    monitor, hand, model = TaskMonitor(), ByHand(), classifier(gated=False)
    logger = CSVLogger(tmp_path)
    trainer = trainer_for([monitor, TaskHeads(), hand], tmp_path, logger=logger)
    trainer.fit(model, datamodule=tasks())
    rows = [hand.accuracies(2 * task + 1) for task in range(TASKS)]  # after its last epoch
    torch.testing.assert_close(monitor.matrix, torch.tensor(rows).double())
    with (Path(logger.log_dir) / "tasks.csv").open() as file:
        header, *written = list(csv.reader(file))
    assert header == ["0", "1", "2"]
    assert [[float(cell) for cell in row] for row in written] == monitor.matrix.tolist()
    logged = trainer.callback_metrics
    assert float(logged["tasks/forgetting"]) == pytest.approx(forgetting(monitor.matrix, 2))
    assert float(logged["tasks/current"]) == 2
    assert float(logged["tasks/average_accuracy"]) == pytest.approx(sum(rows[2]) / 3)
    when = [rows[task][task] for task in range(TASKS)]
    assert float(logged["tasks/accuracy_when_learned"]) == pytest.approx(sum(when) / 3)
    chance = [1 / len(tasks().classes_of(task) or ()) for task in range(TASKS)]
    ahead = [rows[task - 1][task] - chance[task] for task in (1, 2)]
    assert float(logged["tasks/forward_transfer"]) == pytest.approx(sum(ahead) / 2)

    (tested,) = trainer.test(model, datamodule=tasks(), verbose=False)
    expected = hand.accuracies(-1)
    assert [tested[f"tasks/accuracy/{task}"] for task in range(TASKS)] == pytest.approx(expected)
    assert tested["tasks/average_accuracy"] == pytest.approx(sum(expected) / 3)
    assert tested["tasks/forgetting"] == pytest.approx(float(logged["tasks/forgetting"]))


def test_what_was_not_evaluated_is_not_logged(tmp_path: Path) -> None:
    monitor = TaskMonitor()
    trainer = trainer_for([monitor, TaskHeads()], tmp_path)
    trainer.fit(classifier(gated=False), datamodule=tasks(evaluate="current"))
    assert monitor.matrix.isnan().sum() == TASKS**2 - TASKS
    logged = trainer.callback_metrics
    assert "tasks/accuracy/2" in logged
    assert "tasks/accuracy/0" not in logged or float(logged["tasks/current"]) == 2
    assert "tasks/accuracy_when_learned" in logged
    assert float(logged.get("tasks/forgetting", 0)) == 0  # the first task was alone


def test_a_sanity_check_leaves_no_trace(tmp_path: Path) -> None:
    monitor = TaskMonitor()
    trainer = trainer_for([monitor, TaskHeads()], tmp_path, num_sanity_val_steps=2)
    trainer.fit(classifier(gated=False), datamodule=tasks())
    assert not monitor.matrix.isnan().any()


def test_overlap_of_open_units_is_logged_for_gates(tmp_path: Path) -> None:
    trainer = trainer_for([TaskMonitor(), TaskHeads()], tmp_path)
    trainer.fit(classifier(), datamodule=tasks())
    assert float(trainer.callback_metrics["tasks/overlap"]) == 1  # gates that all tasks share


def test_a_module_that_returns_no_logits_is_told_what_to_do(tmp_path: Path) -> None:
    class Silent(type(classifier())):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)

    model = classifier()
    model.__class__ = Silent
    with pytest.raises(TypeError, match="TaskMonitor needs class logits"):
        trainer_for([TaskMonitor()], tmp_path).fit(model, datamodule=tasks())


@pytest.mark.parametrize("options", [{"check_val_every_n_epoch": 3}, {"limit_val_batches": 2}])
def test_a_trainer_that_does_not_measure_every_task_is_warned_of(
    options: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match=r"TaskMonitor.*`check_val_every_n_epoch`"):
        trainer_for([TaskMonitor()], tmp_path, **options).fit(classifier(), datamodule=tasks())
