from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from task_runs import Somebodys, classifier, tasks, trainer_for
from torch import Tensor, nn

from dg_lightning import GatedLinear, gate_layers
from dg_lightning.callbacks import AddGates, TaskGates, TaskHeads
from dg_lightning.continual.tasks import find_head

pytestmark = pytest.mark.filterwarnings("ignore:.* has no free unit left")


def test_no_free_unit_is_told_of_with_a_way_out(tmp_path: Path) -> None:
    model = classifier(gate={"kind": "static", "policy": "soft", "initial_open_rate": 0.99})
    with pytest.warns(UserWarning, match=r"has no free unit left for task 1.*raise `weight`"):
        trainer_for([TaskHeads(), TaskGates(weight=0.0)], tmp_path).fit(model, datamodule=tasks())


@pytest.mark.parametrize(
    ("model", "gates", "message"),
    [
        (
            lambda: classifier(gate={"kind": "dynamic", "network": "linear"}),
            TaskGates(),
            "TaskGates needs static gates, got DynamicGate net.hidden.0.gate",
        ),
        (lambda: classifier(norm="batch"), TaskGates(), "running statistics of a batch norm"),
        (
            classifier,
            TaskGates(head="nose"),
            "`head` must name .* 10 outputs, got 'nose'.*net",
        ),
        (
            lambda: classifier(hidden=[32, 5]),
            TaskGates(head="net.hidden.1.linear"),
            "`head` must name .* 10 outputs",
        ),
        (
            lambda: classifier(gate={"kind": "static", "scale": "probability"}),
            TaskGates(),
            "net.hidden.0.gate .*`scale`",
        ),
        (lambda: classifier(gated=False), TaskGates(), "has no gate"),
    ],
)
def test_what_cannot_be_protected_is_refused(
    model: Any, gates: TaskGates, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        trainer_for([gates], tmp_path).fit(model(), datamodule=tasks())


@pytest.mark.parametrize("options", [{"weight": -1.0}, {"start": 0.0}, {"end": -0.1}])
def test_wrong_values_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"`{next(iter(options))}` must be"):
        TaskGates(**options)  # type: ignore[arg-type]


def test_a_prediction_is_the_least_uncertain_one_whatever_was_told(tmp_path: Path) -> None:
    pl.seed_everything(0, verbose=False)
    gates, model = TaskGates(), classifier()
    trainer = trainer_for([gates], tmp_path)
    trainer.fit(model, datamodule=tasks())
    predicted = torch.cat([batch.argmax(-1) for batch in predictions(trainer, model, tasks())])
    data = tasks(labels="class")
    said = torch.cat([batch.argmax(-1) for batch in predictions(trainer, model, data)])
    assert torch.equal(predicted, said)
    labels = data.part_to_predict().labels
    assert (predicted == labels).double().mean() > 0.25
    assert len(set(predicted.tolist())) > 4  # not those of the last task alone


def predictions(trainer: pl.Trainer, model: Any, data: Any) -> Any:
    model.predict_step = lambda batch, batch_idx: model(batch[0])
    return trainer.predict(model, datamodule=data)


def test_an_interrupted_evaluation_leaves_the_gates_of_the_current_task(tmp_path: Path) -> None:
    class Stop(pl.Callback):
        def on_validation_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            if trainer.current_epoch == 3 and rest[2] == 1:
                raise KeyError("stop")

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            self.logits = [g.logit.detach().clone() for g in gate_layers(module).values()]  # type: ignore[attr-defined]

    stop, model = Stop(), classifier()
    with pytest.raises(KeyError, match="stop"):
        trainer_for([TaskGates(), stop], tmp_path).fit(model, datamodule=tasks())
    for gate, logit in zip(gate_layers(model).values(), stop.logits, strict=True):
        assert torch.equal(gate.logit, logit)  # type: ignore[attr-defined]


def test_a_callback_that_knows_no_task_is_refused_in_a_test(tmp_path: Path) -> None:
    model = classifier()
    trainer_for([TaskGates()], tmp_path).fit(model, datamodule=tasks())
    with pytest.raises(ValueError, match=r"TaskGates.*`ckpt_path`"):
        trainer_for([TaskGates()], tmp_path).test(model, datamodule=tasks(), verbose=False)


def test_averages_of_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="averaged weights"):
        trainer_for([TaskGates(), EMAWeightAveraging()], tmp_path).fit(
            classifier(), datamodule=tasks()
        )


def test_the_head_is_found_wherever_it_stands(tmp_path: Path) -> None:
    class HeadFirst(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(32, 10)
            self.layer = GatedLinear(64, 32, gate={"kind": "static"})

    data = tasks()
    data.setup("test")
    model = HeadFirst()
    assert find_head(model, data) is model.head


def test_logits_in_a_tuple_are_refused_and_names_are_not(tmp_path: Path) -> None:
    class Named(Somebodys):
        answer = staticmethod(lambda logits: logits)

        def forward(self, x: Tensor, *, other: int = 0) -> Any:
            return self.answer(super().forward(x))

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return self(x=batch[0], other=1)

    def run(model: Any) -> None:
        gates = AddGates(feed_forward={"kind": "static", "policy": "soft"})
        trainer = trainer_for([gates, TaskGates()], tmp_path)
        trainer.fit(model, datamodule=tasks(labels="class"))

    run(Named())
    several = Named()
    several.answer = lambda logits: logits if several.training else (logits, 0)
    with pytest.raises(TypeError, match=r"`forward` must return .*got tuple"):
        run(several)
