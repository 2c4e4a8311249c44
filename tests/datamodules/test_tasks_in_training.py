"""Tasks in sequence, as a Trainer sees them."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from dg_lightning.datamodules import DigitsDataModule, TaskSequence
from dg_lightning.schedules import Clock


class Recorder(pl.LightningModule):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[Tensor] = []
        self.validated: list[set[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch[1])
        return self.weight * 1.0

    def on_validation_epoch_start(self) -> None:
        self.validated.append(set())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        self.validated[-1].add(data.task_of("val", batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer_for(**options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {"max_epochs": 10, "reload_dataloaders_every_n_epochs": 1}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    options = {"enable_checkpointing": False, "num_sanity_val_steps": 0, **quiet, **options}
    return pl.Trainer(accelerator="cpu", **{**defaults, **options})


@pytest.mark.parametrize(
    ("evaluate", "expected"),
    [
        ("all", [set(range(5))] * 10),
        ("seen", [set(range(task + 1)) for task in range(5) for _ in range(2)]),
        ("current", [{task} for task in range(5) for _ in range(2)]),
    ],
)
def test_a_trainer_learns_task_after_task(evaluate: Any, expected: list[set[int]]) -> None:
    model, data = Recorder(), TaskSequence(DigitsDataModule(), tasks=5, evaluate=evaluate)
    trainer_for().fit(model, datamodule=data)
    labels = torch.cat(model.seen)
    of_task = [len(data._by_task[task]["train"]) for task in range(5)]
    for task, seen in enumerate(labels.split([2 * size for size in of_task])):
        assert set(seen.tolist()) == {2 * task, 2 * task + 1}
    assert model.validated == expected


def test_joint_training_sees_all_tasks_in_every_epoch() -> None:
    model, data = Recorder(), TaskSequence(DigitsDataModule(), tasks=5, joint=True)
    trainer_for(max_epochs=5).fit(model, datamodule=data)
    whole = TaskSequence(DigitsDataModule(), tasks=2)
    whole.setup("fit")
    per_epoch = sum(len(of_task["train"]) for of_task in whole._by_task)
    for epoch in torch.cat(model.seen).split(per_epoch):
        assert set(epoch.tolist()) == set(range(10))
        assert set(epoch[:200].tolist()) == set(range(10))


@pytest.mark.parametrize("step", [7, 9, 11, 23])
def test_it_is_resumed_at_any_step(step: int, tmp_path: Any) -> None:
    def data() -> TaskSequence:
        return TaskSequence(DigitsDataModule(batch_size=64), tasks=5)

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == step:
                trainer.save_checkpoint(tmp_path / "some.ckpt")

    pl.seed_everything(3, verbose=False)
    whole = Recorder()
    trainer_for(callbacks=[Save()]).fit(whole, datamodule=data())
    rest = Recorder()
    trainer_for().fit(rest, datamodule=data(), ckpt_path=str(tmp_path / "some.ckpt"))
    assert len(rest.seen) == len(whole.seen) - step
    for one, other in zip(rest.seen, whole.seen[step:], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_epochs": 7}, "`max_epochs` must be a multiple of the 5 tasks.*got 7"),
        ({"max_epochs": -1, "max_steps": 5}, "`max_epochs` must be a multiple"),
        ({"reload_dataloaders_every_n_epochs": 0}, "`reload_dataloaders_every_n_epochs` .*got 0"),
        ({"reload_dataloaders_every_n_epochs": 4}, "`reload_dataloaders_every_n_epochs` .*got 4"),
    ],
)
def test_a_trainer_that_cannot_change_tasks_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer_for(**options).fit(Recorder(), datamodule=TaskSequence(DigitsDataModule()))


def test_a_run_that_is_resumed_under_another_seed_keeps_its_order(tmp_path: Any) -> None:
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 7:
                trainer.save_checkpoint(tmp_path / "some.ckpt")

    pl.seed_everything(3, verbose=False)
    whole = Recorder()
    trainer_for(callbacks=[Save()]).fit(whole, datamodule=TaskSequence(DigitsDataModule()))
    pl.seed_everything(4, verbose=False)
    rest = Recorder()
    data = TaskSequence(DigitsDataModule())
    trainer_for().fit(rest, datamodule=data, ckpt_path=str(tmp_path / "some.ckpt"))
    for one, other in zip(rest.seen, whole.seen[7:], strict=True):
        assert torch.equal(one, other)


def test_a_validation_on_its_own_sees_all_tasks() -> None:
    model, data = Recorder(), TaskSequence(DigitsDataModule(), evaluate="current")
    trainer_for().validate(model, datamodule=data, verbose=False)
    assert model.validated == [set(range(5))]


@pytest.mark.parametrize("replay", [0, 60])
@pytest.mark.parametrize("limits", [{}, {"limit_train_batches": 0.5}, {"limit_train_batches": 4}])
def test_schedules_know_the_length_of_all_tasks(replay: int, limits: dict[str, Any]) -> None:
    """A clock made in any task counts the steps that the Trainer takes."""

    class Clocks(pl.Callback):
        def __init__(self) -> None:
            self.seen: set[tuple[int | None, int | None]] = set()

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            clock = Clock.from_trainer(trainer)
            self.seen.add((clock.total_steps, clock.steps_per_epoch))

    data = TaskSequence(DigitsDataModule(batch_size=16), tasks=3, labels="class", replay=replay)
    clocks = Clocks()
    trainer = trainer_for(max_epochs=6, callbacks=[clocks], accumulate_grad_batches=2, **limits)
    trainer.fit(Recorder(), datamodule=data)
    assert clocks.seen == {(trainer.global_step, round(trainer.global_step / 6))}
