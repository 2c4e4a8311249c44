"""The gradient of a penalty by the logits of static gates, against autograd's."""

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn

from dg_lightning import GatedMLP, StaticGate
from dg_lightning.callbacks import BudgetController, GatePenalty, TemperatureAnnealing
from dg_lightning.callbacks._logit_pull import LogitPull  # type: ignore[import-not-found]
from dg_lightning.schedules import Schedule

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])


def gates_on(device: str) -> list[Any]:
    torch.manual_seed(0)
    settings: list[dict[str, Any]] = [
        {"units": 6},
        {"units": 8, "block_size": 2, "temperature": 0.7},
        {"units": 5, "policy": "hard_concrete", "temperature": 2.0},
    ]
    gates = [StaticGate(**own).to(device) for own in settings]
    for gate in gates:
        nn.init.normal_(gate.logit)
    return gates


def expected(gates: list[Any], usage: Callable[[Tensor], Tensor], scales: list[float]) -> Any:
    """Let autograd find the gradient of a usage of the mean p, as the gates' own forward has it."""
    total = []
    for index, scale in enumerate(scales):
        for gate in gates:
            gate(torch.zeros(2, 3, device=gate.logit.device))
        rates = torch.stack([gate.probability.mean() for gate in gates])
        (gradient,) = torch.autograd.grad(usage(rates), gates[index].logit)
        total.append(scale * gradient)
    return total


@each_device
def test_it_is_what_autograd_finds_whatever_changes_in_between(device: str) -> None:
    gates, target = gates_on(device), torch.tensor([0.1, 0.5, 0.9], device=device)
    pull = LogitPull(gates)
    for step in range(4):
        if step == 1:  # in place
            target.fill_(0.3)
            gates[0].temperature.fill_(0.4)
            gates[1].logit.data.add_(0.1)
        elif step == 2:  # by other tensors
            target = torch.full((3,), 0.7, device=device)
            gates[2].logit.data = gates[2].logit.data - 1
        scales = [0.3, 0.3, 0.3] if step < 3 else [0.3, 0.1, 2.0]
        for gate in gates:
            gate.logit.grad = torch.ones_like(gate.logit)
        if step == 3:
            gates[1].logit.grad = None
        before = [None if g.logit.grad is None else g.logit.grad.clone() for g in gates]

        def usage(rates: Tensor, to: Tensor = target) -> Tensor:
            return (rates - to).square().sum()

        def gradient_of(rates: Tensor, to: Tensor = target) -> Tensor:
            return 2 * (rates - to)

        wanted = expected(gates, usage, scales)
        pull.add(gradient_of, [target], scales)
        for gate, old, new in zip(gates, before, wanted, strict=True):
            found = gate.logit.grad if old is None else gate.logit.grad - old
            torch.testing.assert_close(found, new, atol=1e-6, rtol=1e-5)


class Net(pl.LightningModule):
    """A net that somebody else has written."""

    def __init__(self) -> None:
        super().__init__()
        self.net = GatedMLP(6, [16, 8], 3, gate={"kind": "static", "threshold": 0.4})
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_after_backward(self) -> None:
        gate: Any = self.net.hidden[0].gate
        self.seen.append(gate.logit.grad.detach().cpu().clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


class Early(pl.Callback):
    """Takes the known gradient away from a penalty, so that p is pulled at in the backward pass."""

    def __init__(self, penalty: Any) -> None:
        self.penalty = penalty

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.penalty.pressure.later = False


def fitted(
    model: pl.LightningModule, callbacks: list[pl.Callback], tmp_path: Any, **options: Any
) -> None:
    data: Any = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(3)]
    trainer = pl.Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_epochs": 1, **options},
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=None))


@each_device
@pytest.mark.filterwarnings("ignore:BudgetController")
@pytest.mark.parametrize("make", [
    lambda: GatePenalty(Schedule(0.1, 1.0), "expected_macs"),
    lambda: GatePenalty(0.5, "target", target={"*0.gate": 0.2, "*1.gate": 0.6}),
    lambda: GatePenalty(0.5, layer_weights={"*0.gate": 3.0}),
    lambda: BudgetController(0.5, begin=0, every_n_steps=2, landing=1.0),
])  # fmt: skip
def test_a_training_is_the_one_early_in_the_backward_pass(
    make: Any, device: str, tmp_path: Any
) -> None:
    seen = []
    for early in (False, True):
        torch.manual_seed(0)
        model, penalty = Net(), make()
        callbacks = [penalty, TemperatureAnnealing(), *([Early(penalty)] if early else [])]
        options = {"accelerator": device, "max_epochs": 8, "accumulate_grad_batches": 2}
        fitted(model, callbacks, tmp_path, **options)
        seen.append(torch.stack(model.seen))
        assert penalty.pressure.later is not early
        copy.deepcopy(penalty)  # although it has seen graphs
    torch.testing.assert_close(seen[0], seen[1], atol=1e-6, rtol=1e-4)
    assert seen[0].abs().max() > 1e-3


class Noting(GatePenalty):
    """Somebody's own penalty, which looks at what happens."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.calls: list[str] = []

    def on_before_backward(self, *arguments: Any) -> None:
        self.calls.append("before")
        super().on_before_backward(*arguments)

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.calls.append("end")
        super().on_train_batch_end(*arguments)


def test_hooks_of_a_subclass_are_called_and_the_penalty_acts_once(tmp_path: Any) -> None:
    seen = []
    for penalty in (Noting(), GatePenalty(0.5)):
        torch.manual_seed(0)
        model = Net()
        fitted(model, [penalty], tmp_path)
        seen.append(torch.stack(model.seen))
        if isinstance(penalty, Noting):
            assert penalty.calls == ["before", "end"] * 3
    assert torch.equal(*seen)


class WithDeltas(Net):
    """Trains an offset to frozen logits, as an adapter does."""

    def __init__(self) -> None:
        super().__init__()
        self.delta = nn.Parameter(torch.zeros(16))

    def training_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        name = "hidden.0.gate.logit"
        logit = self.net.get_parameter(name).detach() + self.delta
        out = torch.func.functional_call(self.net, {name: logit}, batch[0])
        return nn.functional.cross_entropy(out, batch[1])

    def on_after_backward(self) -> None:
        assert self.net.get_parameter("hidden.0.gate.logit").grad is None
        assert self.delta.grad is not None
        self.seen.append(self.delta.grad.clone())


def test_logits_that_were_put_in_from_outside_are_found_in_the_backward_pass(tmp_path: Any) -> None:
    seen = []
    for weight in (0.0, 7.0):
        torch.manual_seed(0)
        model = WithDeltas()
        fitted(model, [GatePenalty(weight)], tmp_path)
        seen.append(model.seen[0])
    p = torch.sigmoid(torch.tensor(0.8).logit())
    torch.testing.assert_close(seen[1] - seen[0], (7.0 * p * (1 - p) / 16).expand(16))
