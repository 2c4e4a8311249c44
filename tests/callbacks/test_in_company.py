"""Callbacks beside others, in trainings that are not of the simplest kind."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dg_lightning import GatedLinear, StaticGate, gate_layers
from dg_lightning.callbacks import (
    BudgetController,
    CollapseDetector,
    ExactResume,
    GatePenalty,
    MinimumActivity,
    TemperatureAnnealing,
    ThresholdPhases,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Gate collapse"),
    pytest.mark.filterwarnings("ignore:BudgetController"),
    pytest.mark.filterwarnings("ignore:τ has no effect"),
]


class Net(pl.LightningModule):
    def __init__(self, units: int = 32, dropout: float = 0.0, **gate: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = GatedLinear(8, units, gate=StaticGate(units, **gate), dropout=dropout)
        self.b = GatedLinear(units, units, gate=StaticGate(units, **gate))
        self.out = nn.Linear(units, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.b(self.a(x)))
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


def loader(shuffle: bool = False) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 8, generator=generator)
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=8, shuffle=shuffle)


def fit(
    model: pl.LightningModule,
    callbacks: list[Any],
    root: Path,
    ckpt: Any = None,
    shuffle: bool = False,
    **arguments: Any,
) -> pl.Trainer:
    defaults: dict[str, Any] = {"max_epochs": 10, "enable_checkpointing": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        **{**defaults, **arguments},
    )
    trainer.fit(model, loader(shuffle), ckpt_path=ckpt)
    return trainer


def open_rate(model: Net) -> float:
    model.eval()
    with torch.no_grad():
        model(torch.randn(4, 8))
    masks = [gate.gate for gate in gate_layers(model).values() if gate.gate is not None]
    return torch.cat(masks).mean().item()


@pytest.mark.parametrize("decay", [0.9, 0.999])
def test_an_average_of_weights_keeps_the_budget(decay: float, tmp_path: Path) -> None:
    model = Net()
    fit(model, [BudgetController(0.5, "open_rate"), EMAWeightAveraging(decay=decay)], tmp_path)
    assert open_rate(model) == pytest.approx(0.5, abs=0.02)


def test_nothing_changes_gates_that_have_landed(tmp_path: Path) -> None:
    callbacks = [
        BudgetController(0.4, "open_rate"),
        CollapseDetector("rescue", every_n_steps=2),
        MinimumActivity("10%"),
        TemperatureAnnealing(until="100%"),
        ThresholdPhases(),
    ]
    model = Net()
    fit(model, callbacks, tmp_path)
    assert open_rate(model) == pytest.approx(0.4, abs=0.02)


def test_a_longer_training_after_the_landing_keeps_the_budget(tmp_path: Path) -> None:
    fit(Net(), [BudgetController(0.5, "open_rate")], tmp_path).save_checkpoint(tmp_path / "c.ckpt")
    model = Net()
    detector = CollapseDetector(every_n_steps=2)
    budget = BudgetController(0.5, "open_rate")
    fit(model, [budget, detector], tmp_path, tmp_path / "c.ckpt", max_epochs=20)
    assert open_rate(model) == pytest.approx(0.5, abs=0.02)
    assert all(history[-1].begun for history in detector._history.values())


def test_units_with_the_same_p_are_not_all_closed(tmp_path: Path) -> None:
    model = Net()
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.0)  # type: ignore[method-assign]
    controller = BudgetController(0.8, "open_rate")
    with pytest.warns(UserWarning, match="Many units have the same p and open together"):
        fit(model, [controller], tmp_path)
    assert open_rate(model) == 1.0  # nearer than 0
    frozen = Net()
    for gate in (frozen.a.gate, frozen.b.gate):
        assert gate is not None
        gate.requires_grad_(False)
    with pytest.raises(ValueError, match="`requires_grad`"):
        fit(frozen, [BudgetController(0.5)], tmp_path)


def test_saturated_gates_can_be_landed(tmp_path: Path) -> None:
    model = Net(temperature=0.05)
    with torch.no_grad():
        for gate in (model.a.gate, model.b.gate):
            assert isinstance(gate, StaticGate)
            gate.logit.copy_(torch.linspace(0.9, 3, 32))  # z / τ from 18 on: p is 1 in float32
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=1e-9)  # type: ignore[method-assign]
    fit(model, [BudgetController(0.5, "open_rate", every_n_steps=1)], tmp_path, max_epochs=20)
    assert open_rate(model) < 0.75


def test_a_budget_that_other_gates_use_up_shuts_nothing(tmp_path: Path) -> None:
    model = Net()
    model.a = GatedLinear(8, 32, gate={"kind": "static", "policy": "top_k", "k": "90%"})
    with pytest.raises(ValueError, match="cannot be met"):
        fit(model, [BudgetController(0.1, layers=["b.*"])], tmp_path)


@pytest.mark.parametrize(
    "make",
    [
        lambda layers: BudgetController(0.5, "open_rate", layers=layers, name=layers[0]),
        lambda layers: CollapseDetector(layers=layers),
        lambda layers: MinimumActivity(2, layers=layers),
        lambda layers: TemperatureAnnealing(layers=layers),
        lambda layers: ThresholdPhases(layers=layers),
        lambda layers: GatePenalty(0.1, layers=layers, name=layers[0]),
    ],
)
def test_two_of_a_kind_on_different_gates(make: Any, tmp_path: Path) -> None:
    trainer = fit(Net(), [make(["a.*"]), make(["b.*"])], tmp_path)
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    fit(Net(), [make(["a.*"]), make(["b.*"])], tmp_path, tmp_path / "c.ckpt", max_epochs=11)


@pytest.mark.parametrize("cls", [TemperatureAnnealing, ThresholdPhases])
def test_two_writers_of_one_gate_are_refused(cls: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"set the (temperature|factor) of a.gate.*`layers`"):
        fit(Net(), [cls(), cls(layers=["a.*"])], tmp_path)


def test_a_floor_that_is_added_on_resume_holds(tmp_path: Path) -> None:
    fit(Net(), [], tmp_path).save_checkpoint(tmp_path / "c.ckpt")
    model = Net()
    fit(model, [MinimumActivity("25%")], tmp_path, tmp_path / "c.ckpt", max_epochs=11)
    assert [gate.min_open.item() for gate in gate_layers(model).values()] == [8, 8]


class TwoNets(pl.LightningModule):
    """Two nets with an optimizer each, trained in turn by hand; the first one under no_grad too."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.g, self.d = Net(), Net()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        first, second = optimizers
        with torch.no_grad():
            self.g(batch[0])
        for optimizer, net in ((second, self.d), (first, self.g)):
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(net(batch[0]), batch[1]))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.g, self.d)]


def test_several_nets_and_optimizers_have_their_penalty_and_one_clock(tmp_path: Path) -> None:
    model = TwoNets()
    free = TwoNets()
    temperatures = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            temperatures.append(pl_module.g.a.gate.temperature.item())

    detector = CollapseDetector(every_n_steps=4)
    annealing = TemperatureAnnealing(2.0, 1.0, until="100%")
    fit(model, [GatePenalty(5.0), annealing, detector, Watch()], tmp_path, max_epochs=4)
    fit(free, [TemperatureAnnealing(2.0, 1.0, until="100%")], tmp_path, max_epochs=4)
    assert len(temperatures) == 32
    assert temperatures[16] == pytest.approx(1.5)
    assert all(len(history) >= 5 for history in detector._history.values())
    for name, gate in gate_layers(model).items():
        other = gate_layers(free)[name]
        assert (gate.logit < other.logit).all(), name  # type: ignore[attr-defined]


class Skipping(Net):
    """The first layer is not run in every second batch, and frozen later."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 5:
            assert self.a.gate is not None
            self.a.gate.requires_grad_(False)
        h = self.a(batch[0]) if batch_idx % 2 else torch.zeros(len(batch[0]), 32)
        return nn.functional.cross_entropy(self.out(self.b(h)), batch[1])


def test_gates_that_are_skipped_or_frozen_are_left_alone(tmp_path: Path) -> None:
    fit(Skipping(), [GatePenalty(0.1, "expected_macs", layers=["a.*", "b.*"])], tmp_path)


def test_a_shuffled_torch_loader_resumes_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    ends = []
    for resume in (False, True):
        pl.seed_everything(3, verbose=False)
        model = Net(dropout=0.3)
        saving = ModelCheckpoint(
            tmp_path, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True
        )
        if resume:
            torch.rand(11)
        fit(
            model,
            [ExactResume()] if resume else [ExactResume(), saving],
            tmp_path,
            tmp_path / "epoch=1.ckpt" if resume else None,
            max_epochs=4,
            enable_checkpointing=not resume,
            shuffle=True,
        )
        ends.append(model.state_dict())
    for key, value in ends[0].items():
        assert torch.equal(value, ends[1][key]), key


class Settings(pl.Callback):
    """Notes what the first gate is set to in every step, and stops."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.seen: dict[int, tuple[float, float]] = {}

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        gate = pl_module.a.gate
        self.seen[trainer.global_step] = gate.temperature.item(), gate.threshold.item()
        trainer.should_stop = trainer.global_step == self.last


@pytest.mark.parametrize(("until", "join"), [(4000, 4000), (40, 20)])
def test_settings_follow_their_schedules_in_every_step_also_when_resumed(
    until: int, join: int, tmp_path: Path
) -> None:
    def callbacks() -> list[Any]:
        other: Any = {"keep": 0.5, "weight_factor": 1.0}
        first, then = {"begin": 0, "threshold": 0.3}, {"begin": 8, "threshold": 0.6}
        phases: Any = [{**first, **other}, {**then, **other}]
        return [
            TemperatureAnnealing(2.0, 1.0, until=until),
            ThresholdPhases(phases, transition=join, buffer_keep=None),
            ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=10, save_top_k=-1),
            Settings(last=50),
        ]

    whole, resumed = callbacks(), callbacks()
    long: Any = {"max_epochs": 2000, "enable_checkpointing": True}  # of 8 steps
    fit(Net(), whole, tmp_path, **long)
    fit(Net(), resumed, tmp_path, tmp_path / "step=10.ckpt", **long)
    assert min(resumed[-1].seen) == 10
    for step, (temperature, threshold) in whole[-1].seen.items():
        assert temperature == pytest.approx(2.0 - min(step, until) / until)
        if step >= 10:
            assert resumed[-1].seen[step] == (temperature, threshold)
    thresholds = {step: threshold for step, (_, threshold) in whole[-1].seen.items()}
    assert len({thresholds[step] for step in range(12, 24)}) == 12
    assert thresholds[8] == pytest.approx(0.3)


def test_an_epoch_has_one_temperature_where_it_was_asked_for(tmp_path: Path) -> None:
    annealing = TemperatureAnnealing(2.0, 1.0, until="100%", staircase="epoch")
    fit(Net(), [annealing, settings := Settings(last=40)], tmp_path, max_epochs=1000)
    for epoch in range(5):
        assert len({settings.seen[8 * epoch + step][0] for step in range(8)}) == 1
