"""AddGates in somebody's Trainer: optimizers, schedulers, averages, checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from foreign_nets import data, trainer_for
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import Tensor, nn

from dg_lightning import GatedClassifier, gate_layers, param_groups
from dg_lightning.callbacks import AddGates, BudgetController, MinimumActivity
from dg_lightning.layers import VisionTransformer

STATIC: Any = {"kind": "static"}


class Somebody(pl.LightningModule):
    """Somebody's module, without a gate and without an example."""

    def __init__(self, scheduler: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scheduler = scheduler
        layers = [nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10)]
        self.body = nn.Sequential(nn.Flatten(), *layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        groups = param_groups(self, lr=0.01, gate_lr_factor=50.0)
        optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
        return optimizer if self.scheduler is None else ([optimizer], [self.scheduler(optimizer)])


class Late(Somebody):
    """Makes its layers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential()

    def configure_model(self) -> None:
        if not len(self.body):
            self.body = Somebody().body


def groups(trainer: pl.Trainer) -> list[tuple[int, float, float]]:
    found = trainer.optimizers[0].param_groups
    return [(len(g["params"]), g["initial_lr"], g["weight_decay"]) for g in found]


class LateInSetup(Late):
    """Makes its layers in `setup`."""

    def configure_model(self) -> None:
        pass

    def setup(self, stage: str) -> None:
        super().configure_model()


@pytest.mark.parametrize("kind", [Somebody, Late, LateInSetup])
def test_gates_come_before_optimizers(kind: Any, tmp_path: Path) -> None:
    module = kind()
    module.scheduler = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)
    gates = AddGates(feed_forward=STATIC)
    trainer = trainer_for([gates, BudgetController(0.5, every_n_steps=2)], tmp_path, max_steps=25)
    trainer.fit(module, data())
    assert list(gate_layers(module)) == ["body.3.dg_gate", "body.5.dg_gate"]
    assert groups(trainer) == [(6, 0.01, 0.1), (2, 0.5, 0.0)]
    assert not {"configure_model", "configure_optimizers"} & set(vars(module))


def test_weight_decay_of_gates_is_warned_of(tmp_path: Path) -> None:
    class AllAlike(Somebody):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)

    before = torch.optim.Optimizer.add_param_group
    with pytest.warns(UserWarning, match="param_groups"):
        trainer_for([AddGates(feed_forward=STATIC)], tmp_path, max_steps=2).fit(AllAlike(), data())
    assert torch.optim.Optimizer.add_param_group is before


def test_gates_that_no_optimizer_has_are_refused(tmp_path: Path) -> None:
    class OnlyTheLast(Somebody):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam([p for n, p in self.named_parameters() if n == "body.5.weight"])

    with pytest.raises(ValueError, match="2 of 2 gate parameters are in no optimizer"):
        trainer_for([AddGates(feed_forward=STATIC)], tmp_path).fit(OnlyTheLast(), data())


def test_averages_have_the_gates(tmp_path: Path) -> None:
    for average in (EMAWeightAveraging(), StochasticWeightAveraging(0.01, swa_epoch_start=1)):
        module = Somebody()
        callbacks = [AddGates(feed_forward=STATIC), MinimumActivity(), average]
        trainer = trainer_for(
            callbacks, tmp_path, max_steps=-1, max_epochs=3, limit_train_batches=3
        )
        trainer.fit(module, data())
        assert len(gate_layers(module)) == 2


def test_an_average_from_before_gets_one_line(tmp_path: Path) -> None:
    callbacks = [EMAWeightAveraging(), AddGates(feed_forward=STATIC)]
    with pytest.raises(ValueError, match="list AddGates before"):
        trainer_for(callbacks, tmp_path).fit(Somebody(), data())


def test_a_resumed_training_reaches_the_same_bits(tmp_path: Path) -> None:
    def fit(path: Any = None) -> Somebody:
        module = Somebody()
        saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
        callbacks = [AddGates(feed_forward=STATIC), saving]
        trainer = trainer_for(
            callbacks, tmp_path, max_steps=8, limit_val_batches=0, enable_checkpointing=True
        )
        trainer.fit(module, data(), ckpt_path=path)
        return module

    whole = fit()
    resumed = fit(tmp_path / "step=4.ckpt")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name])


def test_a_classifier_is_loaded_from_its_checkpoint_alone(tmp_path: Path) -> None:
    sizes = {"patch": 4, "width": 12, "depth": 1, "heads": 3}
    net: Any = {"class_path": "dg_lightning.layers.VisionTransformer", "init_args": sizes}
    module = GatedClassifier(net, input_shape=[1, 8, 8], num_classes=10)
    gates = AddGates(feed_forward=STATIC, heads=STATIC, submodule="net")
    trainer = trainer_for([gates], tmp_path, max_steps=2)
    trainer.fit(module, data())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = GatedClassifier.load_from_checkpoint(tmp_path / "a.ckpt").eval()
    assert isinstance(loaded.net, VisionTransformer)
    assert len(gate_layers(loaded)) == 2
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(loaded(x), module.eval()(x))
    again = GatedClassifier(net, input_shape=[1, 8, 8], num_classes=10)
    tester = trainer_for([AddGates(feed_forward=STATIC, heads=STATIC)], tmp_path)
    figures = tester.test(again, data(), ckpt_path=str(tmp_path / "a.ckpt"), verbose=False)
    assert figures[0]["compute/macs_share"] == pytest.approx(1.0)


def test_two_parts_get_gates_of_their_own(tmp_path: Path) -> None:
    class Two(Somebody):
        def __init__(self) -> None:
            super().__init__()
            self.twin = Somebody().body

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.body(x) + self.twin(x)
            return out

    module = Two()
    callbacks = [AddGates(feed_forward=STATIC, submodule=name) for name in ("body", "twin")]
    trainer_for(callbacks, tmp_path, max_steps=2).fit(module, data())
    assert len(gate_layers(module)) == 4


def test_a_module_that_cannot_be_gated_is_left_as_it_was(tmp_path: Path) -> None:
    module = Somebody()
    with pytest.raises(ValueError, match="has no heads to gate"):
        trainer_for([AddGates(heads=STATIC)], tmp_path).fit(module, data())
    assert not {"configure_model", "configure_optimizers"} & set(vars(module))
    assert not any(child._forward_hooks for child in module.modules())
    trainer_for([], tmp_path, max_steps=2).fit(module, data())


def test_a_module_without_forward_is_told_to_name_a_part(tmp_path: Path) -> None:
    class Bare(Somebody):
        forward = pl.LightningModule.forward

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.body(batch[0]), batch[1])

    with pytest.raises(ValueError, match=r"Bare has no `forward`: .*`submodule`.*body"):
        trainer_for([AddGates(STATIC)], tmp_path).fit(Bare(), data())
    with pytest.raises(ValueError, match=r"AddGates must name .* Bare \(body\), got 'head'"):
        trainer_for([AddGates(STATIC, submodule="head")], tmp_path).fit(Bare(), data())


def test_bad_settings_get_one_line() -> None:
    with pytest.raises(ValueError, match="`feed_forward`"):
        AddGates()


@pytest.mark.slow
def test_two_processes_have_the_same_gates(
    in_two_processes: Callable[[str], list[Any]], tmp_path: Path
) -> None:
    ranks = in_two_processes(f"""
sys.path.insert(0, sys.path[0] + "/callbacks")
from test_add_gates import *
root = Path({str(tmp_path)!r})
result = []
for settings in ({{}}, {{"kind": "dynamic", "network": "low_rank", "rank": 1}}):
    gates = AddGates(feed_forward={{"kind": "static", **settings}})
    callbacks = [gates, BudgetController(0.7, every_n_steps=2)]
    module = Somebody()
    trainer_for(callbacks, root, strategy="ddp", devices=2, max_steps=20).fit(module, data())
    result.append({{k: v.tolist() for k, v in module.state_dict().items()}})
""")
    assert ranks[0] == ranks[1]
    assert "body.3.dg_gate.logit" in ranks[0][0]


def test_gates_are_added_without_a_trainer_and_once() -> None:
    module = GatedClassifier(
        {"class_path": "GatedMLP", "init_args": {"hidden": [8]}}, input_shape=[4], num_classes=3
    )
    callback = AddGates(feed_forward=STATIC, example=torch.randn(2, 4))
    assert callback.add_to(module)
    assert len(gate_layers(module)) == 1
    assert not callback.add_to(module)
    assert len(gate_layers(module)) == 1
