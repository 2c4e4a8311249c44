"""The gradient with a penalty, against the analytic one, in whatever way a training gets there."""

from collections.abc import Callable
from itertools import product
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from penalised_nets import (
    USAGES,
    WEIGHT,
    Foreign,
    ForeignByHand,
    analytic_gradient,
    every_usage,
    fitted,
    samples,
    term_of,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# The node that made p is pulled at, or, where something else made it, a hook on p is.
each_way = pytest.mark.parametrize("policy", ["threshold", "soft"])


@each_way
@every_usage
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_gradient_equals_the_analytic_one(
    settings: dict[str, Any], micro_batches: int, policy: Any
) -> None:
    model = fitted(settings, micro_batches, policy=policy)
    expected = analytic_gradient(settings, micro_batches, policy)
    without = analytic_gradient({"usage": "hinge_below", "target": 0.0}, micro_batches, policy)
    assert model.grads.keys() == expected.keys()
    for name, grad in model.grads.items():
        torch.testing.assert_close(grad, expected[name], msg=name)
    assert any(not torch.allclose(expected[name], without[name]) for name in expected)


@each_way
@every_usage
def test_manual_optimization_gets_the_same_gradient(settings: dict[str, Any], policy: Any) -> None:
    model = fitted(settings, cls=ForeignByHand, policy=policy)
    for name, grad in analytic_gradient(settings, 1, policy).items():
        torch.testing.assert_close(model.grads[name], grad, msg=name)


@each_way
@every_usage
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_with_and_without_a_loss_scaler(
    precision: Any, micro_batches: int, settings: dict[str, Any], policy: Any
) -> None:
    plugins = []
    if precision == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # type: ignore[attr-defined]
        plugins = [pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)]
    options: Any = {"precision": None if plugins else precision, "plugins": plugins}
    model = fitted(settings, micro_batches, policy=policy, **options)
    for name, grad in analytic_gradient(settings, micro_batches, policy).items():
        torch.testing.assert_close(model.grads[name], grad, msg=name, atol=2e-2, rtol=2e-2)


@pytest.mark.slow
def test_two_processes_equal_one_with_twice_the_batch(
    in_two_processes: Callable[[str], list[Any]],
) -> None:
    ranks = in_two_processes("""
from penalised_nets import *
class MeanSquare(Foreign):  # a mean over samples, so that halves average to the whole
    def training_step(self, batch, batch_idx):
        return self.backbone(batch[0]).square().mean()
result = {}
for policy in ("threshold", "soft"):
    for name, settings in USAGES.items():
        model = MeanSquare(policy)
        loader = DataLoader(TensorDataset(samples()), batch_size=8)
        penalty = GatePenalty(WEIGHT, **settings)
        trainer_for(callbacks=[penalty], strategy="ddp", devices=2).fit(model, loader)
        result[f"{policy} {name}"] = {name: grad.tolist() for name, grad in model.grads.items()}
""")
    policies: list[Any] = ["threshold", "soft"]
    for policy, (usage, settings) in product(policies, USAGES.items()):
        model = Foreign(policy)
        loss = model.backbone(samples()).square().mean()
        (loss + WEIGHT * term_of(model, settings)).backward()
        for grads in ranks:
            for name, parameter in model.named_parameters():
                found = torch.tensor(grads[f"{policy} {usage}"][name])
                torch.testing.assert_close(found, parameter.grad, msg=f"{policy} {usage}: {name}")


class Checkpointed(Foreign):
    """Activations are computed again in the backward pass."""

    reentrant = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        for layer in self.backbone:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        loss: Tensor = x.square().mean().sqrt()
        return loss


class CheckpointedTheOldWay(Checkpointed):
    reentrant = True


@each_way
@every_usage
def test_activation_checkpointing_presses_once_or_is_refused(
    settings: dict[str, Any], policy: Any
) -> None:
    model = fitted(settings, cls=Checkpointed, policy=policy)
    for name, grad in analytic_gradient(settings, 1, policy).items():
        torch.testing.assert_close(model.grads[name], grad, msg=name)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        fitted(settings, cls=CheckpointedTheOldWay, policy=policy)


@every_usage
def test_in_double_precision_it_is_exact_to_double_precision(settings: dict[str, Any]) -> None:
    model = fitted(settings, precision="64-true")
    plain, x = Foreign().double(), samples().double()
    torch.set_default_dtype(torch.float64)
    try:
        loss = plain.training_step([x], 0)
        (loss + WEIGHT * term_of(plain, settings)).backward()
    finally:
        torch.set_default_dtype(torch.float32)
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            found = model.grads[name]
            assert found.dtype == torch.float64
            torch.testing.assert_close(found, parameter.grad, rtol=1e-12, atol=1e-15, msg=name)


def test_a_single_gate_without_a_graph_is_named() -> None:
    class Overwritten(Foreign):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            with torch.no_grad():
                self.backbone[0](batch[0])  # what the gate has recorded for the loss is gone
            return loss

    with pytest.raises(RuntimeError, match=r"cannot act on backbone.0.gate: .* no graph"):
        fitted({"usage": "open_rate"}, cls=Overwritten)
