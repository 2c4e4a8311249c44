from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from task_runs import TASKS, Somebodys, classifier, tasks, trainer_for
from torch import Tensor, nn

from dg_lightning import GatedLinear, gate_layers
from dg_lightning.callbacks import SET, AddGates, ReviveDormant, RigL, TaskGates, TaskHeads
from dg_lightning.datamodules import TaskSequence

pytestmark = pytest.mark.filterwarnings("ignore:.* has no free unit left")


class Answers(pl.Callback):
    """Keeps what the model says about the validation samples of each task, after each."""

    def __init__(self) -> None:
        self.said: list[dict[int, Tensor]] = []

    def on_validation_epoch_start(self, *_: Any) -> None:
        self.said.append({})

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        task = trainer.datamodule.task_of("val", batch_idx)
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs
        said = self.said[-1]
        said[task] = torch.cat([said[task], logits]) if task in said else logits


def assert_nothing_is_forgotten(answers: Answers) -> None:
    after = answers.said[1::2]  # the second epoch of each task
    assert len(after) == TASKS
    for task in range(TASKS):
        for later in after[task + 1 :]:
            assert torch.equal(later[task], after[task][task])
    assert not torch.equal(after[0][2], after[2][2])  # it has learned something


@pytest.mark.parametrize("options", [{}, {"kind": "permuted"}, {"labels": "domain"}])
@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "NAdam"])
def test_no_bit_of_a_finished_task_changes(
    options: dict[str, Any], optimizer: str, tmp_path: Path
) -> None:
    told = {**options, "labels": "task"} if "labels" not in options else options
    data, answers = tasks(**told), Answers()
    data.__class__ = Told  # the gates of a task are asked for even where labels are shared
    model = classifier(num_classes=data.num_classes)
    rate = {"lr": 0.005, "weight_decay": 1e-4}
    model.optimizer = {"class_path": f"torch.optim.{optimizer}", "init_args": rate}
    heads = [TaskHeads()] if not options else []
    trainer_for([*heads, TaskGates(weight=0.3), answers], tmp_path).fit(model, datamodule=data)
    assert_nothing_is_forgotten(answers)


class Told(TaskSequence):
    """Tells the task in every scenario."""

    tells_task = True


def test_somebodys_model_forgets_nothing_either(tmp_path: Path) -> None:
    answers = Answers()
    gates = AddGates(feed_forward={"kind": "static", "policy": "soft"})
    callbacks = [gates, TaskHeads(), TaskGates(head="head"), answers]
    trainer_for(callbacks, tmp_path).fit(Somebodys(), datamodule=tasks())
    assert_nothing_is_forgotten(answers)


@pytest.mark.parametrize("sparse", [RigL, SET])
def test_connections_move_into_free_capacity_only(sparse: Any, tmp_path: Path) -> None:
    answers = Answers()
    callbacks = [TaskHeads(), TaskGates(), sparse(0.5, every_n_steps=5, until="100%"), answers]
    model = classifier()
    trainer_for(callbacks, tmp_path).fit(model, datamodule=tasks())
    assert_nothing_is_forgotten(answers)
    for layer in callbacks[2].connections.values():
        assert layer.count == int(layer.mask.sum())
        assert layer.explored_share > 0.55  # it has moved


def test_units_of_finished_tasks_are_not_revived(tmp_path: Path) -> None:
    answers = Answers()
    revive = ReviveDormant(threshold=0.9, every_n_steps=5, maturity=2)
    callbacks = [TaskHeads(), TaskGates(), revive, answers]
    trainer_for(callbacks, tmp_path).fit(classifier(), datamodule=tasks())
    assert sum(revive._revived.values()) > 0
    assert_nothing_is_forgotten(answers)


def test_a_heavier_penalty_leaves_more_units_free(tmp_path: Path) -> None:
    used = []
    for weight in (0.0, 3.0):
        pl.seed_everything(0, verbose=False)
        gates = TaskGates(weight=weight)

        class Used(pl.Callback):
            def on_train_end(self, *_: Any, gates: TaskGates = gates) -> None:
                assert gates._by_task is not None
                used.append(gates._by_task.units_used())

        trainer_for([TaskHeads(), gates, Used()], tmp_path).fit(classifier(), datamodule=tasks())
    assert used[1] < used[0] - 0.1


def test_the_penalty_is_that_on_the_mean_of_free_units(tmp_path: Path) -> None:
    """Its gradient is that of autograd, and units of finished tasks are free of charge."""
    seen: list[Any] = []

    class Zero(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = GatedLinear(64, 6, gate={"kind": "static", "policy": "soft"})
            self.output = nn.Linear(6, 10)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.output(self.layer(x.flatten(1)))
            return logits

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = self(batch[0]).sum() * 0
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            gate: Any = self.layer.gate
            logit = gate.logit.detach().clone().requires_grad_()
            assert gates._by_task is not None
            free = gates._by_task.free("layer.gate").float()
            p = torch.sigmoid(logit / gate.temperature)
            (0.5 * (p * free).sum() / free.sum()).backward()
            seen.append((gate.logit.grad.clone(), logit.grad, int(free.sum())))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    gates, model = TaskGates(weight=0.5), Zero()

    class Close(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            with torch.no_grad():
                module.layer.gate.logit.copy_(torch.tensor([5.0, 5.0, -5, -5, -5, -5]))

    trainer_for([gates, Close()], tmp_path).fit(model, datamodule=tasks(kind="permuted"))
    for got, expected, _ in seen:
        torch.testing.assert_close(got, expected)
    assert [n for i, (_, _, n) in enumerate(seen) if i in (0, len(seen) - 1)] == [6, 4]


def test_temperature_falls_within_each_task(tmp_path: Path) -> None:
    seen = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            seen.append(next(float(g.temperature) for g in gate_layers(module).values()))

    trainer_for([TaskGates(start=2.0, end=0.1), Look()], tmp_path).fit(
        classifier(), datamodule=tasks(kind="permuted")
    )
    steps = len(seen) // TASKS
    for task in range(TASKS):
        part = seen[task * steps : (task + 1) * steps]
        assert part[0] == 2
        assert part == sorted(part, reverse=True)
        assert part[-1] == pytest.approx(0.1, rel=0.1)


def test_without_a_label_each_sample_gets_the_output_of_least_entropy(tmp_path: Path) -> None:
    pl.seed_everything(0, verbose=False)
    gates, model, data = TaskGates(), classifier(), tasks(labels="class")
    asked: list[tuple[Tensor, Tensor, int]] = []

    class Ask(pl.Callback):
        def on_test_batch_start(self, trainer: Any, module: Any, batch: Any, *_: Any) -> None:
            outputs = []
            for task in range(TASKS):
                gates.use(task)
                logits = module.net(batch[0])
                classes = list(data.classes_of(task) or ())
                alone = torch.full_like(logits, -1e4)
                alone[:, classes] = logits[:, classes]
                outputs.append(alone)
            every = torch.stack(outputs).double()
            log_p = every.log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
            best = every[entropy.argmin(0), torch.arange(len(logits))]
            asked.append((best.argmax(-1), module(batch[0]).argmax(-1), len(logits)))

    trainer = trainer_for([TaskHeads(), gates, Ask()], tmp_path)
    trainer.fit(model, datamodule=data)
    (logged,) = trainer.test(model, datamodule=data, verbose=False)
    for expected, got, _ in asked:
        assert torch.equal(expected, got)
    assert logged["tasks/passes"] == TASKS
    assert logged["test/accuracy"] > 0.2


def test_units_before_the_gates_are_not_revived_either(tmp_path: Path) -> None:
    class Convolutions(Somebodys):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = True
            self.body = nn.Sequential(
                *(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten()),
                GatedLinear(128, 32, gate={"kind": "static", "policy": "soft"}),
            )

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    answers = Answers()
    revive = ReviveDormant(threshold=0.9, every_n_steps=5, maturity=2)
    callbacks = [TaskGates(), revive, answers]
    trainer_for(callbacks, tmp_path).fit(Convolutions(), datamodule=tasks())
    assert_nothing_is_forgotten(answers)
