"""A penalty acts once for every forward pass, in whatever way a training uses its graphs."""

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from dg_lightning import DynamicGate, GatedClassifier, GatedLinear, gate_layers
from dg_lightning.callbacks import BudgetController, GatePenalty

WEIGHT = 0.7
each_policy = pytest.mark.parametrize("policy", ["threshold", "soft"])


class Net(pl.LightningModule):
    """Somebody's module with manual optimization, which keeps the gradients of its first step."""

    def __init__(self, policy: Any = "threshold") -> None:
        super().__init__()
        torch.manual_seed(0)
        gates = [DynamicGate(n_in, n_out, policy=policy) for n_in, n_out in ((4, 8), (8, 6))]
        for gate in gates:
            nn.init.normal_(gate.network[-1].weight)  # type: ignore[arg-type]
        self.body = nn.Sequential(
            GatedLinear(4, 8, gate=gates[0]), GatedLinear(8, 6, gate=gates[1]), nn.Linear(6, 2)
        )
        self.automatic_optimization = False
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.backwards(self.body(batch[0]))
        gate: Any = self.body[0].gate
        self.seen.append(gate.network[-1].bias.grad.clone())

    def backwards(self, out: Tensor) -> None:
        self.manual_backward(out.square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Twice(Net):
    def backwards(self, out: Tensor) -> None:
        loss = out.square().mean()
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss)


class AnotherFirst(Net):
    def backwards(self, out: Tensor) -> None:
        self.manual_backward(self.body[2](torch.ones(1, 6)).sum())  # not made of gates
        self.manual_backward(out.square().mean())


class Views(Net):
    def backwards(self, out: Tensor) -> None:
        for loss in out.square().mean(0):
            self.manual_backward(loss.clone(), retain_graph=True)


@pytest.mark.parametrize("policy", ["concrete", "hard_concrete", "bernoulli"])
def test_gates_that_are_sampled_beside_p_are_penalised_too(policy: str, tmp_path: Path) -> None:
    first = "body.0.gate"  # whose p does not depend on samples
    alone, pressed = (
        fitted(AnotherFirst(policy), callbacks, tmp_path, max_steps=1, limit_train_batches=1)
        for callbacks in ([], [GatePenalty(WEIGHT, layers=[first])])
    )
    model, x = Net(policy), torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    model.body(x[:8])
    gate: Any = model.body[0].gate
    (expected,) = torch.autograd.grad(WEIGHT * gate.probability.mean(), gate.network[-1].bias)
    torch.testing.assert_close(pressed.seen[0] - alone.seen[0], expected)


def test_a_callback_with_another_kind_of_term_is_no_penalty(tmp_path: Path) -> None:
    other: Any = pl.Callback()
    other.term = 3
    fitted(Net(), [GatePenalty(WEIGHT), other], tmp_path)


class RawViews(Net):
    def backwards(self, out: Tensor) -> None:
        for loss in out.square().mean(0):
            self.manual_backward(loss, retain_graph=True)


class InParts(Net):
    def backwards(self, out: Tensor) -> None:
        self.manual_backward(out.mean(), retain_graph=True, inputs=list(self.body[2].parameters()))
        rest = [p for p in self.parameters() if p not in set(self.body[2].parameters())]
        self.manual_backward(out.square().mean(), inputs=rest)


def fitted(model: Any, callbacks: list[Any], root: Path, **options: Any) -> Any:
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    settings = {"accelerator": "cpu", "max_epochs": 1, "logger": False, **options}
    trainer = pl.Trainer(
        callbacks=callbacks,
        default_root_dir=root,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(model, DataLoader(TensorDataset(x), batch_size=8))
    return model


@each_policy
@pytest.mark.parametrize("kind", [Twice, AnotherFirst, Views, InParts])
def test_it_is_added_once_however_many_backward_passes_there_are(
    kind: Any, policy: str, tmp_path: Path
) -> None:
    alone, pressed = (
        fitted(kind(policy), callbacks, tmp_path, max_steps=1, limit_train_batches=1).seen[0]
        for callbacks in ([], [GatePenalty(WEIGHT)])
    )
    model = Net(policy)
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    model.body(x[:8])
    rates = [gate.probability.mean() for gate in gate_layers(model).values()]  # type: ignore[union-attr]
    gate: Any = model.body[0].gate
    (expected,) = torch.autograd.grad(WEIGHT * torch.stack(rates).sum(), gate.network[-1].bias)
    torch.testing.assert_close(pressed - alone, expected)


def test_a_view_of_several_losses_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one of several views .*: call backward on `loss.clone"):
        fitted(RawViews(), [GatePenalty(WEIGHT)], tmp_path)


class SkipsLayers(Net):
    """Leaves a layer out in every second batch, and computes activations again."""

    def __init__(self, policy: Any = "threshold") -> None:
        super().__init__(policy)
        self.automatic_optimization = True
        self.body[1] = GatedLinear(8, 8, gate=DynamicGate(8, 8, policy=policy))
        self.body[2] = nn.Linear(8, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = checkpoint(self.body[0], batch[0], use_reentrant=False)
        if batch_idx % 2 == 0:
            x = checkpoint(self.body[1], x, use_reentrant=False)
        return self.body[2](x).square().mean()


@each_policy
def test_a_layer_may_be_left_out_of_some_batches(policy: str, tmp_path: Path) -> None:
    fitted(SkipsLayers(policy), [GatePenalty(WEIGHT)], tmp_path)


class LosesABatch(Net):
    """Its backward pass does not come by the gates in the third batch."""

    def __init__(self, policy: Any = "threshold") -> None:
        super().__init__(policy)
        self.automatic_optimization = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.number = batch_idx
        return self.body(batch[0]).square().mean()

    def backward(self, loss: Tensor, *_: Any) -> None:
        if self.number == 2:
            loss = self.body[2](torch.ones(1, 6)).sum()
        loss.backward()


@each_policy
@pytest.mark.parametrize("pressing", ["GatePenalty", "BudgetController"])
def test_a_penalty_that_could_not_act_is_told_of_at_once(
    pressing: str, policy: str, tmp_path: Path
) -> None:
    penalty: Any = GatePenalty(WEIGHT)
    if pressing == "BudgetController":
        penalty = BudgetController(0.8, measure="open_rate", begin=0, freeze_at=3, every_n_steps=1)
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    with pytest.raises(RuntimeError, match="No gradient of the loss reached the gates"):
        fitted(LosesABatch(policy), [penalty, saving], tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step=1.ckpt", "step=2.ckpt"]


@pytest.mark.slow
@each_policy
def test_graphs_are_let_go_when_a_batch_ends(policy: str, tmp_path: Path) -> None:
    alive: list[Any] = []

    class Holds(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x = batch[0].clone()  # kept by the graph, for the gradient of the first weights
            alive.append(weakref.ref(x))
            self.manual_backward(self.body(x).square().mean(), retain_graph=True)

    class Look(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            gc.collect()
            assert not any(node() is not None for node in alive)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            for gate in gate_layers(pl_module).values():
                assert gate.probability is not None
                assert not gate.probability.requires_grad
            copy.deepcopy(pl_module.body)

    fitted(Holds(policy), [GatePenalty(WEIGHT), Look()], tmp_path)
    assert len(alive) == 6


@pytest.mark.parametrize("loses", [False, True])
def test_a_batch_without_a_backward_pass_of_our_module_is_told_of(
    loses: bool, tmp_path: Path
) -> None:
    class Loses(GatedClassifier):
        def backward(self, loss: Tensor, *_: Any) -> None:
            if not loses or self.global_step != 2:
                loss.backward()

    net: Any = {"class_path": "GatedMLP", "init_args": {"hidden": [8], "gate": {"kind": "dynamic"}}}
    model, penalty = Loses(net, input_shape=[4], num_classes=2), GatePenalty(WEIGHT)
    data = TensorDataset(torch.randn(40, 4), torch.randint(2, (40,)))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        callbacks=[penalty],
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if loses:
        with pytest.raises(RuntimeError, match="No gradient of the loss reached the gates"):
            trainer.fit(model, DataLoader(data, batch_size=8))
        assert trainer.global_step == 3
        return
    trainer.fit(model, DataLoader(data, batch_size=8))
    (gate,) = gate_layers(model).values()
    assert gate.probability is not None
    assert not gate.probability.requires_grad


def test_somebodys_own_hook_on_a_penalty_is_called(tmp_path: Path) -> None:
    calls: list[int] = []
    penalty: Any = GatePenalty(WEIGHT)
    penalty.on_train_batch_start = lambda *_: calls.append(1)
    fitted(Net(), [penalty], tmp_path)
    assert len(calls) == 6
