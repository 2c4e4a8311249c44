from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from task_runs import classifier, tasks, trainer_for
from torch import Tensor

from dg_lightning.callbacks import EWC, SynapticIntelligence, TaskHeads, TaskMonitor


class Line(pl.LightningModule):
    """One weight, whose loss is linear: every gradient is known."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        self.gradients: list[Tensor] = []
        self.values: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.values.append(self.w.detach().clone())
        return (self.w * torch.tensor([3.0, 0.0])).sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.w.grad is not None
        self.gradients.append(self.w.grad.clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.001)


def test_weights_are_pulled_back_by_the_squares_of_gradients(tmp_path: Path) -> None:
    model = Line()
    trainer_for([EWC(weight=0.5)], tmp_path, limit_val_batches=0).fit(model, datamodule=tasks())
    steps = len(model.values)
    data = tasks()
    data.setup("fit")
    sizes = [2 * -(-len(of_task["train"]) // 32) for of_task in data._by_task]
    assert steps == sum(sizes)
    first, second = sizes[0], sizes[0] + sizes[1]
    anchors = [model.values[first], model.values[second]]
    importance = torch.tensor([9.0, 0.0])  # squares of the gradients of the task
    for step in range(steps):
        known = [] if step < first else anchors[:1] if step < second else anchors
        pull = sum(0.5 * importance * (model.values[step] - anchor) for anchor in known)
        expected = torch.tensor([3.0, 0.0]) + pull
        torch.testing.assert_close(model.gradients[step], expected)


def test_weights_are_pulled_back_by_what_their_steps_have_gained(tmp_path: Path) -> None:
    """The importance of the paper, section 3, from the values that the module has seen."""
    model, c, damping = Line(), 0.02, 1e-3
    intelligence = SynapticIntelligence(weight=c, damping=damping)
    trainer_for([intelligence], tmp_path, limit_val_batches=0).fit(model, datamodule=tasks())
    data = tasks()
    data.setup("fit")
    sizes = [2 * -(-len(of_task["train"]) // 32) for of_task in data._by_task]
    ends = [0, sizes[0], sizes[0] + sizes[1]]
    importance, anchor = torch.zeros(2), torch.zeros(2)
    for step, (value, gradient) in enumerate(zip(model.values, model.gradients, strict=True)):
        if step in ends[1:]:
            start = ends[ends.index(step) - 1]
            change = value - model.values[start]
            gained = -torch.tensor([3.0, 0.0]) * change  # the gradient of the task never changes
            importance = importance + gained / (change**2 + damping)
            anchor = value
        pull = 2 * c * importance * (value - anchor)
        torch.testing.assert_close(gradient, torch.tensor([3.0, 0.0]) + pull)
    assert importance[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "weights"), [(EWC, (0.0, 1000.0)), (SynapticIntelligence, (0.0, 1.0))]
)
def test_a_net_forgets_less_with_it(
    tmp_path: Path, kind: type[EWC | SynapticIntelligence], weights: tuple[float, float]
) -> None:
    forgotten = []
    for weight in weights:
        pl.seed_everything(0, verbose=False)
        trainer = trainer_for([TaskMonitor(), kind(weight)], tmp_path, max_epochs=12)
        trainer.fit(classifier(gated=False), datamodule=tasks(kind="permuted"))
        forgotten.append(float(trainer.callback_metrics["tasks/forgetting"]))
    assert forgotten[1] < 0.5 * forgotten[0]


def test_wrong_values_are_refused() -> None:
    with pytest.raises(ValueError, match="`weight` must be at least 0, got -1"):
        EWC(weight=-1.0)
    with pytest.raises(ValueError, match="`damping` must be above 0, got 0"):
        SynapticIntelligence(damping=0.0)


def test_heads_keep_outputs_of_other_tasks_out_of_it(tmp_path: Path) -> None:
    ewc, model = EWC(weight=1.0), classifier(gated=False)
    trainer_for([TaskHeads(), ewc], tmp_path).fit(model, datamodule=tasks())
    importance = ewc._importance["net.output.bias"]
    assert (importance[:7] > 0).all()  # the first two tasks
    assert not importance[7:].any()


def test_a_gradient_that_is_not_finite_leaves_no_trace(tmp_path: Path) -> None:
    class Overflow(Line):
        def on_after_backward(self) -> None:
            assert self.w.grad is not None
            if self.trainer.global_step == 3:
                self.w.grad.fill_(torch.inf)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert self.w.grad is not None
            self.w.grad.nan_to_num_(posinf=0.0)  # as a scaler that skips the step

    ewc = EWC(weight=0.5)
    trainer_for([ewc], tmp_path, limit_val_batches=0).fit(Overflow(), datamodule=tasks())
    assert ewc._importance["w"].isfinite().all()


def test_each_of_several_optimizers_pulls_its_own_weights_once(tmp_path: Path) -> None:
    class Two(Line):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.v = torch.nn.Parameter(torch.ones(2))

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.zero_grad()
            self.manual_backward((3 * self.w).sum() + (3 * self.v).sum())
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([p], lr=0.001) for p in (self.w, self.v)]

    ewc, model = EWC(weight=0.5), Two()
    trainer_for([ewc], tmp_path, limit_val_batches=0).fit(model, datamodule=tasks())
    assert ewc._steps["w"] == ewc._steps["v"]
    # Gradients of the task are 3; in the second task the pull is on top of them.
    assert (ewc._importance["w"] < 30).all()
    torch.testing.assert_close(model.w - 1, model.v - torch.tensor([1.0, 0.0]))
