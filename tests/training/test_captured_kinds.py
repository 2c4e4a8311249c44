"""What tells kinds of steps apart: whatever Python decides in a step, with emulated graphs."""

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from captured_nets import STATIC, Own, assert_same, data, fit, model
from emulated_graphs import emulate
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from dg_lightning import CapturedSteps, GatedClassifier, add_gates
from dg_lightning.callbacks import GatePenalty, RoutingMonitor
from dg_lightning.training.optimizers import restore_fused


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)


def assert_equal(make: Any, root: Path, callbacks: Any = list, **options: Any) -> None:
    """Train twice, captured and not, and compare weights and logs."""
    modules, logged = [], []
    for capture in (True, False):
        module = make()
        module.cuda_graphs = capture
        replays = fit(module, callbacks(), root, accelerator="cpu", **options)
        assert any(replays.replayed) == capture
        modules.append(module)
        logged.append([repr(row) for row in replays.logged])
    assert_same(*modules)
    assert logged[0] == logged[1]


class TwoHeads(Own):
    """Has a head for each task, as a batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})

    def losses(self, batch: Any) -> dict[str, Tensor]:
        logits = self.heads[batch["task"]](self.net(batch["x"]))
        return {"loss": nn.functional.cross_entropy(logits, batch["y"])}


@pytest.mark.parametrize("order", ["aaabbb", "ababab", "aabbab"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_parameters_without_a_gradient_stay_as_they_are(
    order: str, accumulate: int, tmp_path: Path
) -> None:
    tasks = [{"task": t, "x": x, "y": y} for t, (x, y) in zip(order, data(), strict=False)]
    more = {"batches": tasks, "accumulate_grad_batches": accumulate}
    assert_equal(TwoHeads, tmp_path, **more)


class Freezes(Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 3:
            pl_module.net[0].requires_grad_(False)


def test_weights_that_are_frozen_stay_as_they_are(tmp_path: Path) -> None:
    assert_equal(Own, tmp_path, lambda: [Freezes()])


class Sums(Own):
    """Takes lists of tensors of any length."""

    def losses(self, batch: Any) -> dict[str, Tensor]:
        left, right = (sum(self.net(x).mean() for x in part) for part in batch)
        return {"loss": (left - 2 * right).square()}


def test_batches_with_the_same_tensors_in_other_places_are_told_apart(tmp_path: Path) -> None:
    x = torch.randn(12, 4, 12, generator=torch.Generator().manual_seed(0))
    one = [([x[i], x[i + 1]], [x[i + 2]]) for i in (0, 3)]
    two = [([x[i]], [x[i + 1], x[i + 2]]) for i in (6, 9)]
    assert_equal(Sums, tmp_path, batches=[*one, *two])


class ClipsLater(Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.gradient_clip_val = 0.01 if trainer.current_epoch > 2 else 1.0


class Replaces(Callback):
    """Puts weights somewhere else, as averages do that are tried out in validation."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 20:
            for parameter in pl_module.parameters():
                parameter.data = parameter.data.clone()


class Reloads(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 20:
            optimizer = trainer.optimizers[0]
            optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("callback", [ClipsLater, Replaces, Reloads])
def test_what_others_change_between_steps_is_followed(callback: Any, tmp_path: Path) -> None:
    assert_equal(Own, tmp_path, lambda: [callback()])


@pytest.mark.parametrize("callback", [Replaces, Reloads])
def test_graphs_of_tensors_that_are_gone_are_forgotten(callback: Any, tmp_path: Path) -> None:
    replays = fit(Own(), [callback()], tmp_path, accelerator="cpu")
    assert replays.replayed[19:23] == [True, False, True, True]


def test_what_a_router_records_is_of_its_last_pass(tmp_path: Path) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        net: Any = {"experts": 4, "expert_width": 8, "capacity_factor": 1.0}
        adam: Any = {"class_path": "AdamW", "init_args": {"lr": 2**-7, "fused": True}}
        spec: Any = {"class_path": "SwitchMoE", "init_args": net}
        return GatedClassifier(spec, [12], 3, optimizer=adam)

    assert_equal(make, tmp_path, lambda: [RoutingMonitor()])


def test_gates_of_add_gates_are_captured(tmp_path: Path) -> None:
    def make() -> Any:
        module = Own()
        add_gates(module.net, feed_forward={"kind": "dynamic"}, example=torch.randn(2, 12))
        return module

    assert_equal(make, tmp_path, lambda: [GatePenalty(0.1)])


def test_several_penalties_are_told_apart(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        below = GatePenalty(0.3, "hinge_below", target={"*.0.*": 0.5, "*.1.*": 0.7}, name="below")
        return [GatePenalty(0.1, layer_weights={"*.1.*": 2.0}), below]

    assert_equal(lambda: model(STATIC), tmp_path, callbacks)


def test_too_many_kinds_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Numbered(Own):
        def losses(self, batch: Any) -> dict[str, Tensor]:
            return super().losses(batch[:2])

    many = [(x[:4], y[:4], number) for number, (x, y) in enumerate([*data()] * 5)]
    with caplog.at_level(logging.INFO):
        fit(Numbered(), [], tmp_path, batches=many, accelerator="cpu", max_epochs=2)
    assert len([line for line in caplog.messages if "more than 32 kinds of steps" in line]) == 1


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (torch.zeros(()), "a dict with a tensor `loss`, got Tensor"),
        ({"task": torch.zeros(())}, r"a dict with a tensor `loss`, got \['task'\]"),
        ({"loss": torch.zeros(()), "part": 0.5}, "tensors, got float for 'part'"),
    ],
)
def test_losses_that_are_none_get_one_line(returned: Any, said: str) -> None:
    class Wrong(CapturedSteps):
        def losses(self, batch: Any) -> Any:
            return returned

    with pytest.raises(TypeError, match=said):
        Wrong().training_step(None, 0)


def test_a_fused_optimizer_stays_fused_when_it_is_resumed() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    plain = torch.optim.AdamW([weight])
    plain.step()
    fused = torch.optim.AdamW([weight], fused=True)
    fused.load_state_dict(plain.state_dict())
    assert not fused.param_groups[0]["fused"]
    restore_fused(fused)
    assert fused.param_groups[0]["fused"]
    fused.step()
    assert fused.state[weight]["step"] == 2


def test_a_foreign_clipping_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Clips(Own):
        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            self.seen = True

    module: pl.LightningModule = Clips()
    with caplog.at_level(logging.INFO):
        fit(module, [], tmp_path, accelerator="cpu", max_epochs=1)
    assert "Clips overrides `configure_gradient_clipping`" in caplog.text
