"""What every callback must do: a new one is tested the day it is exported."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from foreign_nets import (
    ARGUMENTS,
    OF_TASKS,
    Foreign,
    data,
    each,
    make,
    module_for,
    together,
    trainer_for,
)
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn

import dg_lightning.callbacks
from dg_lightning import gate_layers
from dg_lightning.callbacks import (
    Distill,
    MinimumActivity,
    TemperatureAnnealing,
    ThresholdPhases,
)
from dg_lightning.schedules import Clock

pytestmark = [
    pytest.mark.filterwarnings("ignore:Gate collapse"),
    pytest.mark.filterwarnings("ignore:BudgetController"),  # so few steps need not do
    pytest.mark.filterwarnings("ignore:τ has no effect"),
]


def test_every_exported_callback_has_arguments_here() -> None:
    exported = set(dg_lightning.callbacks.__all__)
    assert {*ARGUMENTS, *OF_TASKS} == exported


@each
def test_runs_alone_on_a_foreign_module_twice_and_logs_what_it_says(
    name: str, tmp_path: Path
) -> None:
    callback = make(name)
    for _ in range(2):  # a second Trainer finds a callback that has run before
        model = module_for(name)
        trainer = trainer_for([callback], tmp_path)
        trainer.fit(model, data())
        assert trainer.global_step == 12
    keys = {key.split("/")[0] for key in trainer.callback_metrics}
    assert keys <= {
        "loss",
        "val",
        "gates",
        "collapse",
        "rewiring",
        "routing",
        "compute",
        "dormant",
        "distill",
    }
    trainer.fit_loop.epoch_loop.max_steps = 16  # the same Trainer goes on
    trainer.fit(model, data())
    assert trainer.global_step == 16


@each
def test_two_runs_with_one_seed_are_the_same(name: str, tmp_path: Path) -> None:
    ends = []
    for _ in range(2):
        model = module_for(name)
        trainer_for([make(name)], tmp_path).fit(model, data())
        ends.append(model.state_dict())
    for key, value in ends[0].items():
        assert torch.equal(value, ends[1][key]), key


@each
def test_survives_fast_dev_run_pickle_and_copy(name: str, tmp_path: Path) -> None:
    copies = []

    class InTheMiddle(pl.Callback):
        def on_before_backward(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:  # gates have a graph here
                copies.extend([pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)])

    callback = make(name)
    trainer_for([callback], tmp_path, fast_dev_run=2).fit(module_for(name), data())
    trainer_for([InTheMiddle(), callback], tmp_path).fit(module_for(name), data())
    copies += [pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)]
    for other in copies:
        assert other.state_key == callback.state_key
        trainer_for([other], tmp_path).fit(module_for(name), data())


@each
def test_a_module_without_gates_is_refused_where_gates_are_needed(
    name: str, tmp_path: Path
) -> None:
    model = Foreign()
    model.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    trainer = trainer_for([make(name)], tmp_path)
    if name in ("Distill", "ExactResume", "StaticSparse"):
        trainer.fit(model, data())
        return
    if name == "AddGates":
        with pytest.raises(ValueError, match="has no feed_forward to gate"):
            trainer.fit(model, data())
        return
    if name in ("ContinualBackprop", "ReviveDormant"):
        with pytest.raises(ValueError, match="Foreign has no units to revive"):
            trainer.fit(model, data())
        return
    if name in ("MagnitudePruning", "RigL", "SET"):
        with pytest.raises(ValueError, match="No layer matches"):
            trainer.fit(model, data())
        return
    with pytest.raises(ValueError, match="Foreign has no gate"):
        trainer.fit(model, data())


@pytest.mark.slow
@pytest.mark.parametrize("pressing", ["GatePenalty", "BudgetController"])
@pytest.mark.parametrize(("every", "accumulate"), [(5, 1), (7, 1), (17, 1), (11, 2)])
def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(
    pressing: str, every: int, accumulate: int, tmp_path: Path
) -> None:
    """Weights, optimizer, τ, θ, floors, λ and every counter of every callback."""

    def run(folder: str, ckpt_path: str | None = None, **arguments: Any) -> dict[str, Any]:
        saving = ModelCheckpoint(
            tmp_path / folder, every_n_train_steps=every, save_top_k=-1, filename="{step}"
        )
        trainer = trainer_for(
            [*together(pressing), saving],
            tmp_path,
            max_steps=-1,
            max_epochs=2,
            accumulate_grad_batches=accumulate,
            enable_checkpointing=True,
            **arguments,
        )
        pl.seed_everything(7, verbose=False)
        trainer.fit(Foreign(), data(), ckpt_path=ckpt_path, weights_only=True)
        trainer.save_checkpoint(tmp_path / folder / "end.ckpt")
        saved: dict[str, Any] = torch.load(tmp_path / folder / "end.ckpt", weights_only=True)
        return saved

    whole = run("whole")
    torch.rand(17)  # other random numbers have been drawn in the new process
    resumed = run("resumed", str(tmp_path / "whole" / f"step={every}.ckpt"))
    for part in ("state_dict", "optimizer_states", "random_generators"):
        assert_same(resumed[part], whole[part], part)
    for key, state in whole["callbacks"].items():
        # Step 11 ends an epoch, whose validation Lightning leaves out when it resumes there.
        missed_a_look = "GateMonitor" in key and every == 11
        if "ModelCheckpoint" not in key and not missed_a_look:
            assert_same(resumed["callbacks"][key], state, key)


def assert_same(a: Any, b: Any, where: str) -> None:
    if isinstance(b, dict):
        assert a.keys() == b.keys(), where
        for key in b:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(b, list | tuple):
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{index}]")
    elif isinstance(b, Tensor):
        assert torch.equal(a, b), where
    else:
        assert a == b, where


class Averaging(WeightAveraging):
    """Stochastic weight averaging, of buffers too."""


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "averaging",
    [
        lambda: EMAWeightAveraging(decay=0.9),
        lambda: EMAWeightAveraging(decay=0.9, update_every_n_steps=5),
        Averaging,
        lambda: StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1),
    ],
    ids=["ema", "ema every 5", "average", "swa"],
)
def test_averages_of_weights_leave_the_settings_of_gates_alone(
    averaging: Callable[[], Any], first: bool, tmp_path: Path
) -> None:
    """Deployed are the live τ, θ and floors: in validation, in checkpoints and at the end."""
    live: dict[str, list[float]] = {}
    in_validation = []

    def settings(module: nn.Module) -> dict[str, list[float]]:
        return {
            name: [gate.temperature.item(), gate.threshold.item(), gate.min_open.item()]
            for name, gate in gate_layers(module).items()
        }

    class Watch(pl.Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            live.update(settings(pl_module))

        def on_validation_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if not trainer.sanity_checking:
                in_validation.append(settings(pl_module) == live)

    ours = [TemperatureAnnealing(), ThresholdPhases(), MinimumActivity(3)]
    average = averaging()
    callbacks = [average, *ours] if first else [*ours, average]
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=10, filename="{step}", save_top_k=-1)
    trainer = trainer_for(
        [*callbacks, Watch(), saving],
        tmp_path,
        max_steps=-1,
        max_epochs=3,
        val_check_interval=7,
        enable_checkpointing=True,
    )
    model = Foreign()
    trainer.fit(model, data())
    assert len(in_validation) > 4
    assert all(in_validation)
    assert settings(model) == live
    assert next(iter(live.values())) == pytest.approx([1.0, 0.75, 3.0])
    saved = torch.load(tmp_path / "step=40.ckpt", weights_only=True)["state_dict"]
    clock = Clock(trainer.global_step, trainer.global_step // 3)
    curves = ThresholdPhases().plan(clock, model) + TemperatureAnnealing().plan(clock, model)
    theta, tau = (
        curve.value_at(39) for curve in curves if curve.quantity in ("threshold", "temperature")
    )
    assert saved["body.1.gate.threshold"].item() == pytest.approx(theta)
    assert saved["body.1.gate.temperature"].item() == pytest.approx(tau)
    assert saved["body.1.gate.min_open"].item() == 3


def test_all_of_them_together_with_early_stopping_and_a_learning_rate_scheduler(
    tmp_path: Path,
) -> None:
    trainer = trainer_for(
        [*together(), EarlyStopping("val", patience=1, min_delta=10.0)],
        tmp_path,
        max_steps=-1,
        max_epochs=9,
    )
    trainer.fit(Foreign(), data())
    assert trainer.current_epoch < 8


@pytest.mark.slow
@pytest.mark.parametrize("pressing", ["GatePenalty", "BudgetController"])
def test_a_compiled_net_trains_as_the_plain_one(pressing: str, tmp_path: Path) -> None:
    ends = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = Foreign()
        model.body[1].gate.policy = "threshold"  # type: ignore[union-attr]
        model.body[1].dropout.p = 0.0  # type: ignore[union-attr]
        if compiled:
            model.body.compile(backend="aot_eager", fullgraph=True)
        # Distill breaks graphs.
        callbacks = [one for one in together(pressing) if not isinstance(one, Distill)]
        trainer_for(callbacks, tmp_path, max_steps=6).fit(model, data())
        ends.append(model.state_dict())
    for key, value in ends[0].items():
        torch.testing.assert_close(ends[1][key], value, msg=key)


def test_all_of_them_run_in_a_pytorch_lightning_trainer(tmp_path: Path) -> None:
    import pytorch_lightning

    class Theirs(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = Foreign().body

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.body(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    digits = data()
    digits.prepare_data()
    digits.setup("fit")
    for pressing in ("GatePenalty", "BudgetController"):
        trainer = pytorch_lightning.Trainer(
            accelerator="cpu",
            max_steps=10,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=together(pressing),
            default_root_dir=tmp_path,
        )
        trainer.fit(Theirs(), digits.train_dataloader())
        assert trainer.global_step == 10


@pytest.mark.slow
def test_two_processes_decide_the_same(
    in_two_processes: Callable[[str], list[Any]], tmp_path: Path
) -> None:
    ranks = in_two_processes(f"""
sys.path.insert(0, sys.path[0] + "/callbacks")
from test_all_callbacks import *
root = Path({str(tmp_path)!r})
result = []
for pressing in ("GatePenalty", "BudgetController"):
    callbacks = [*together(pressing), ModelCheckpoint(root / pressing, filename="end")]
    trainer = trainer_for(callbacks, root, strategy="ddp", devices=2, max_steps=20,
                          enable_checkpointing=True)
    model = Foreign()
    trainer.fit(model, data())
    states = {{c.state_key: str(c.state_dict()) for c in callbacks[:-1]}}
    result.append([{{k: v.tolist() for k, v in model.state_dict().items()}}, states])
""")
    assert ranks[0] == ranks[1]
    saved = torch.load(tmp_path / "GatePenalty" / "end.ckpt", weights_only=True)
    assert len(saved["random_generators"]) == 2


@pytest.mark.slow
def test_stopping_is_decided_jointly(
    in_two_processes: Callable[[str], list[Any]], tmp_path: Path
) -> None:
    ranks = in_two_processes(f"""
sys.path.insert(0, sys.path[0] + "/callbacks")
from test_all_callbacks import *
detector = dg_lightning.callbacks.CollapseDetector("stop")
callbacks = [dg_lightning.callbacks.GatePenalty(1000.0), detector]
trainer = trainer_for(callbacks, Path({str(tmp_path)!r}), strategy="ddp", devices=2, max_steps=-1,
                      max_epochs=40)
trainer.fit(Foreign(), data())
result = [trainer.current_epoch, detector.verdicts]
""")
    assert ranks[0] == ranks[1]
    epoch, verdicts = ranks[0]
    assert epoch < 39
    assert verdicts[0]["mode"].startswith("closed")


@pytest.mark.slow
def test_each_keeps_and_logs_the_same_on_all_ranks(
    in_two_processes: Callable[[str], list[Any]], tmp_path: Path
) -> None:
    """A checkpoint holds the state of one rank only, and every rank may monitor what is logged."""
    ranks = in_two_processes(f"""
sys.path.insert(0, sys.path[0] + "/callbacks")
from test_all_callbacks import *
result = {{}}
for name in ARGUMENTS:
    callback, model = make(name), module_for(name)
    trainer = trainer_for([callback], Path({str(tmp_path)!r}), strategy="ddp", devices=2)
    trainer.fit(model, data())
    logged = trainer.callback_metrics
    ours = {{k: float(v) for k, v in logged.items() if k.partition("/")[0] not in ("loss", "val")}}
    result[name] = [str(callback.state_dict()), ours]
""")
    assert [name for name in ARGUMENTS if ranks[0][name] != ranks[1][name]] == []
