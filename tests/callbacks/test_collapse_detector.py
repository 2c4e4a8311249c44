"""Every mode is provoked in a real short training on the digits, and named."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from dg_lightning import GatedClassifier, gate_layers
from dg_lightning.callbacks import (
    BudgetController,
    CollapseDetector,
    GatePenalty,
    MinimumActivity,
    ThresholdPhases,
)
from dg_lightning.collapse import MODES
from dg_lightning.datamodules import DigitsDataModule
from dg_lightning.schedules import Phase, Schedule

pytestmark = [
    pytest.mark.filterwarnings("ignore:Gate collapse"),
    pytest.mark.filterwarnings("ignore:θ rises above"),
    pytest.mark.filterwarnings("ignore:λ, θ and the keep target"),
    pytest.mark.filterwarnings("ignore:target is too close to θ"),
]
STATIC: Any = {"kind": "static"}
DYNAMIC: Any = {"kind": "dynamic", "network": "low_rank", "rank": 8}
SGD: Any = {"class_path": "SGD", "init_args": {"lr": 0.1}}
ADAM: Any = {"class_path": "AdamW", "init_args": {"lr": 0.01}}


def fitted(
    gate: Any,
    callbacks: list[Any],
    root: Path,
    detector: CollapseDetector | None = None,
    gate_lr_factor: float = 30.0,
    prepare: Any = None,
    epochs: int = 15,
    optimizer: Any = None,
) -> tuple[CollapseDetector, GatedClassifier, pl.Trainer]:
    pl.seed_everything(0, verbose=False)
    if gate is DYNAMIC and gate_lr_factor > 1:  # which is of biases alone
        optimizer, gate_lr_factor = ADAM, 3.0
    net: Any = {"class_path": "GatedMLP", "init_args": {"hidden": [64, 64], "gate": gate}}
    model = GatedClassifier(
        net,
        input_shape=[1, 8, 8],
        num_classes=10,
        gate_lr_factor=gate_lr_factor,
        optimizer=optimizer,
    )
    if prepare is not None:
        prepare(model)
    detector = detector or CollapseDetector()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[*callbacks, detector],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        default_root_dir=root,
    )
    trainer.fit(model, DigitsDataModule(batch_size=64))
    return detector, model, trainer


def modes_of(detector: CollapseDetector) -> set[str]:
    return {verdict["mode"] for verdict in detector.verdicts}


def with_bias(value: float, share: float) -> Any:
    """Set the bias of a share of the units, which then open never or always."""

    def prepare(model: GatedClassifier) -> None:
        for gate in gate_layers(model).values():
            bias = gate.network[-1].bias.data  # type: ignore[attr-defined]
            bias[: round(share * len(bias))] = value

    return prepare


def without_reading(model: GatedClassifier) -> None:
    """Let only the biases of GateNets learn."""
    for gate in gate_layers(model).values():
        gate.network[-1].weight.requires_grad_(False)  # type: ignore[attr-defined]


def with_broken_estimator(model: GatedClassifier) -> None:
    """Cut the gradient of the loss off, as the paper's MNIST script does."""

    def cut(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return output.detach()

    for gate in gate_layers(model).values():
        gate.register_forward_hook(cut)  # type: ignore[attr-defined]


SLOW_RISE = [Phase(0.9, 0.5, 1.0), Phase(0.9, 0.97, 1.0, begin="20%")]
SHOCK = [Phase(0.9, 0.55, 1.0), Phase(0.05, 0.93, 20.0, begin="50%")]
PROVOKED: dict[str, dict[str, Any]] = {
    "closed_by_threshold": {
        "gate": STATIC,
        "callbacks": lambda: [GatePenalty(0.01), ThresholdPhases(SLOW_RISE, transition="50%")],
        "gate_lr_factor": 1.0,
    },
    "closed_by_penalty": {"gate": STATIC, "callbacks": lambda: [GatePenalty(50.0)]},
    "phase_shock": {
        "gate": STATIC,
        "callbacks": lambda: [GatePenalty(5.0, "target"), ThresholdPhases(SHOCK, transition=0)],
        "gate_lr_factor": 1.0,
    },
    "all_open": {
        "gate": STATIC,
        "callbacks": lambda: [GatePenalty(1e-6)],
        "gate_lr_factor": 1.0,
    },
    "identical_gates": {
        "gate": STATIC,
        "callbacks": lambda: [GatePenalty(0.01)],
        "gate_lr_factor": 1.0,
        "prepare": with_broken_estimator,
    },
    "input_independent": {
        "gate": DYNAMIC,
        "callbacks": lambda: [GatePenalty(1.0, "expected_macs")],
        "prepare": without_reading,
    },
    "dead_units": {
        "gate": DYNAMIC,
        "callbacks": lambda: [GatePenalty(1e-3)],
        "prepare": with_bias(-20.0, 0.93),
    },
    "always_on_units": {
        "gate": DYNAMIC,
        "callbacks": lambda: [GatePenalty(1e-3)],
        "prepare": with_bias(3.0, 0.95),
        "gate_lr_factor": 1.0,
    },
    "flapping": {
        "gate": STATIC,
        "callbacks": lambda: [GatePenalty(1200.0, "target", target=0.5)],
        "gate_lr_factor": 10.0,
        "optimizer": SGD,
    },
}


def test_every_mode_is_provoked_here() -> None:
    assert set(PROVOKED) == set(MODES)


@pytest.mark.slow
@pytest.mark.parametrize("mode", PROVOKED)
def test_names_what_was_provoked_and_nothing_before_it(mode: str, tmp_path: Path) -> None:
    setting = dict(PROVOKED[mode])
    detector, _, trainer = fitted(callbacks=setting.pop("callbacks")(), root=tmp_path, **setting)
    assert detector.verdicts[0]["mode"] == mode
    assert f"collapse/{mode}" in trainer.callback_metrics


def test_a_verdict_has_mode_layer_evidence_cause_and_remedy_in_one_line(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Gate collapse") as caught:
        fitted(STATIC, [GatePenalty(50.0)], tmp_path, epochs=5)
    (line,) = {str(w.message) for w in caught if "hidden.0" in str(w.message)}
    assert "\n" not in line
    for part in (
        "net.hidden.0.gate: closed_by_penalty. p fell from 0.800 to 0.",
        "Likely cause: the penalty's weight is too large",
        "Remedy: lower the weight, or ramp it up more slowly.",
    ):
        assert part in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gate", "callbacks"),
    [
        (STATIC, lambda: [GatePenalty(Schedule(0.0, 1.0, until="50%"), "expected_macs")]),
        (STATIC, lambda: [BudgetController(0.2)]),
        (STATIC, lambda: [GatePenalty(1.0, "target"), ThresholdPhases()]),
        (DYNAMIC, lambda: [GatePenalty(Schedule(0.0, 1.0, until="50%"), "expected_macs")]),
        (DYNAMIC, lambda: [BudgetController(0.5)]),
        (STATIC, lambda: [GatePenalty(Schedule(0.0, 50.0, begin="99%", before=0.0))]),
        (STATIC, lambda: []),
    ],
    ids=["penalty", "budget", "phases", "GateNet", "GateNet budget", "not begun", "no penalty"],
)
def test_says_nothing_of_a_healthy_training(gate: Any, callbacks: Any, tmp_path: Path) -> None:
    detector, _, _ = fitted(gate, callbacks(), tmp_path)
    assert detector.verdicts == []


def test_a_rescue_brings_collapsed_gates_back_and_is_taken_back(tmp_path: Path) -> None:
    penalty = Schedule(0.0, 50.0, "step", begin="20%")
    collapsed, model, _ = fitted(STATIC, [GatePenalty(penalty)], tmp_path)
    assert modes_of(collapsed) == {"closed_by_penalty"}
    assert all(history[-1].g == 0 for history in collapsed._history.values())
    detector = CollapseDetector("rescue")
    rescued, model, _ = fitted(STATIC, [GatePenalty(penalty)], tmp_path, detector)
    model.eval()
    assert modes_of(rescued) == {"closed_by_penalty"}
    open_rates = [gate.gate.mean().item() for gate in gate_layers(model).values()]  # type: ignore[union-attr]
    assert min(open_rates) > 0.2
    data = DigitsDataModule()
    data.prepare_data()
    data.setup("validate")
    with torch.no_grad():
        right = [(model(x).argmax(-1) == y).float().mean() for x, y in data.val_dataloader()]
    assert torch.stack(right).mean() > 0.8
    assert all(rescue.weight_factor < 0.1 for rescue in rescued._rescues.values())


def test_thresholds_are_lowered_and_given_back_when_the_gates_are_healthy(tmp_path: Path) -> None:
    phases = [Phase(0.9, 0.5, 1.0), Phase(0.9, 0.85, 1.0, begin="10%")]
    detector = CollapseDetector("rescue", every_n_steps=4)
    rescued, model, _ = fitted(
        STATIC,
        [GatePenalty(0.001), ThresholdPhases(phases, transition="5%")],
        tmp_path,
        detector,
        gate_lr_factor=1.0,
    )
    assert "closed_by_threshold" in modes_of(rescued)
    rescue = rescued._rescues["net.hidden.0.gate"]
    gate = gate_layers(model)["net.hidden.0.gate"]
    expected = pytest.approx(0.85 + rescue.threshold_offset)
    assert gate.threshold.item() == expected
    assert rescue.eased or rescue.relapses or rescue.threshold_offset < 0


def test_stops_a_collapsed_training_but_no_fast_dev_run(tmp_path: Path) -> None:
    _, _, trainer = fitted(STATIC, [GatePenalty(50.0)], tmp_path, CollapseDetector("stop"))
    assert trainer.current_epoch < 14


def test_dead_units_are_revived_by_the_callback_for_it(tmp_path: Path) -> None:
    floors = MinimumActivity(None, revive_after=40)
    setting = PROVOKED["dead_units"]
    _, model, _ = fitted(
        DYNAMIC, [GatePenalty(1e-3), floors], tmp_path, prepare=setting["prepare"], epochs=6
    )
    assert floors.revived >= 2 * round(0.93 * 64)
    with torch.no_grad():
        model.eval()(torch.randn(64, 1, 8, 8))
    gate = gate_layers(model)["net.hidden.0.gate"]
    assert gate.gate is not None
    assert (gate.gate.amax(0) == 0).float().mean() < 0.5


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="`action` must be warn, rescue or stop, got 'pray'"):
        CollapseDetector("pray")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`modes` must be .*closed_by_threshold"):
        CollapseDetector(modes=["bad"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="`every_n_steps` must be at least 2, got 1"):
        CollapseDetector(every_n_steps=1)


@pytest.mark.parametrize("floor", [0.25, 0.5])
@pytest.mark.parametrize("pressing", ["penalty", "budget"])
def test_gates_that_cannot_open_again_are_named_even_on_a_high_floor(
    pressing: str, floor: float, tmp_path: Path
) -> None:
    """As attention heads, of which one must stay: p falls without end until they are frozen."""
    gate: Any = {**STATIC, "min_open": f"{floor:.0%}"}
    times: Any = {"begin": "10%", "until": "50%", "freeze_at": "60%"}
    callback: Any = GatePenalty(50.0)
    if pressing == "budget":
        callback = BudgetController(floor + 0.05, "open_rate", initial_weight=50.0, **times)
    lowest: list[float] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            gates: Any = gate_layers(pl_module).values()
            lowest.append(max(float(gate.probability.mean()) for gate in gates))

    detector, *_ = fitted(gate, [callback, Look()], tmp_path, gate_lr_factor=1000.0, epochs=8)
    assert min(lowest) < 1e-4
    assert "closed_by_penalty" in modes_of(detector)


def test_resting_on_a_high_floor_as_it_is_meant_to_be_is_healthy(tmp_path: Path) -> None:
    gate: Any = {**STATIC, "min_open": "25%"}
    detector, model, _ = fitted(gate, [GatePenalty(10.0, "target", target=0.2)], tmp_path)
    opened = [gate.gate.mean().item() for gate in gate_layers(model).values()]  # type: ignore[union-attr]
    assert opened == [0.25, 0.25]
    assert detector.verdicts == []
