"""What every callback of tasks must do."""

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from foreign_nets import OF_TASKS, Foreign, data
from foreign_nets import trainer_for as plain_trainer
from task_runs import classifier, tasks, trainer_for

import dg_lightning.callbacks
from dg_lightning.callbacks import ExactResume, TaskGates, TaskHeads, TaskMonitor

pytestmark = pytest.mark.filterwarnings("ignore:.* has no free unit left")
each = pytest.mark.parametrize("name", OF_TASKS)


def make(name: str) -> Any:
    return getattr(dg_lightning.callbacks, name)(**OF_TASKS[name])


def tasks_for(name: str) -> Any:
    return tasks(kind="drift", tasks=2) if name == "Adapt" else tasks()


@each
def test_data_without_tasks_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name} needs a DataModule with tasks, got Digits"):
        plain_trainer([make(name)], tmp_path).fit(Foreign(), data())


@each
def test_it_runs_alone_twice_with_the_same_result(name: str, tmp_path: Path) -> None:
    callback, ends = make(name), []
    for _ in range(2):
        pl.seed_everything(0, verbose=False)
        model = classifier()
        trainer_for([callback], tmp_path).fit(model, datamodule=tasks_for(name))
        ends.append(model.state_dict())
    for key, value in ends[0].items():
        assert torch.equal(value, ends[1][key]), key


@each
def test_it_is_pickled_and_copied_in_the_middle(name: str, tmp_path: Path) -> None:
    copies = []

    class InTheMiddle(pl.Callback):
        def on_before_backward(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 30:
                copies.extend([pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)])

    callback = make(name)
    trainer_for([callback, InTheMiddle()], tmp_path).fit(classifier(), datamodule=tasks_for(name))
    for other in copies:
        trainer = trainer_for([other], tmp_path, fast_dev_run=2)
        trainer.fit(classifier(), datamodule=tasks_for(name))


@pytest.mark.parametrize("labels", ["task", "class"])
@pytest.mark.parametrize("step", [5, 28, 40])  # in the first task, where the second begins, in it
def test_a_resumed_sequence_is_the_uninterrupted_one(
    step: int, labels: str, tmp_path: Path
) -> None:
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == step:
                trainer.save_checkpoint(tmp_path / "some.ckpt")

    def run(*others: Any, ckpt_path: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        pl.seed_everything(1, verbose=False)
        callbacks = [make(name) for name in OF_TASKS if name != "Adapt"]  # which ends a run
        callbacks += [ExactResume(), *others]
        trainer, model = trainer_for(callbacks, tmp_path), classifier()
        trainer.fit(model, datamodule=tasks(labels=labels), ckpt_path=ckpt_path)
        # How many passes an evaluation makes is counted in the first one of a process.
        names = [k for k in trainer.callback_metrics if not k.startswith("compute/macs")]
        logged = {k: float(trainer.callback_metrics[k]) for k in names}
        return model.state_dict(), logged

    (whole, logged), (rest, again) = run(Save()), run(ckpt_path=str(tmp_path / "some.ckpt"))
    for key, value in whole.items():
        assert torch.equal(rest[key], value), key
    assert again == logged


@pytest.mark.slow
def test_two_processes_learn_alike_and_agree(in_two_processes: Any) -> None:
    results = in_two_processes(
        """
import logging, warnings, tempfile
warnings.filterwarnings("ignore")
from task_runs import classifier, tasks, trainer_for
from dg_lightning.callbacks import EWC, ReviveDormant, TaskGates, TaskHeads, TaskMonitor
import lightning.pytorch as pl
pl.seed_everything(0, verbose=False)
gates, monitor = TaskGates(), TaskMonitor()
revive = ReviveDormant(threshold=0.3, every_n_steps=10, maturity=5)
trainer = trainer_for([TaskHeads(), monitor, gates, revive], tempfile.mkdtemp(), devices=2,
                      strategy="ddp")
model = classifier()
trainer.fit(model, datamodule=tasks())
weights = sum(float(p.double().sum()) for p in model.parameters())
figures = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("tasks")}
result = [weights, [{n: m.tolist() for n, m in f.items()} for f in gates.finished], figures]
"""
    )
    assert results[0] == results[1]
    assert results[0][2]["tasks/forgetting"] == 0


def test_they_work_together_on_a_sequence_and_its_checkpoint(tmp_path: Path) -> None:
    pl.seed_everything(0, verbose=False)
    trainer = trainer_for([TaskMonitor(), TaskHeads(), TaskGates(weight=0.1)], tmp_path)
    model = classifier()
    trainer.fit(model, datamodule=tasks())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    ends = []
    for callbacks, net in (
        (trainer.callbacks, model),  # type: ignore[attr-defined]
        ([TaskMonitor(), TaskHeads(), TaskGates()], classifier()),
    ):
        tester = trainer_for([c for c in callbacks if "Task" in type(c).__name__], tmp_path)
        path = str(tmp_path / "last.ckpt")
        ends += tester.test(net, datamodule=tasks(), ckpt_path=path, verbose=False)
    assert ends[0] == ends[1]
    assert ends[0]["tasks/average_accuracy"] > 0.8
    assert ends[0]["tasks/forgetting"] == 0
    assert ends[0]["tasks/passes"] == 1
