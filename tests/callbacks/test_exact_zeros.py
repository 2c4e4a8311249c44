"""Missing connections are exactly 0 after every step, whatever changes the weights in between."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import ModelPruning
from sparse_nets import Plain, fit
from torch import nn

from dg_lightning.callbacks import SET, MagnitudePruning, RigL, StaticSparse

SPARSE = {
    "RigL": lambda: RigL(0.6, every_n_steps=4),
    "SET": lambda: SET(0.6, every_n_steps=4),
    "StaticSparse": lambda: StaticSparse(0.6),
    "MagnitudePruning": lambda: MagnitudePruning(0.6, begin=2, until=10, every_n_steps=4),
}
every_sparse = pytest.mark.parametrize("sparse", SPARSE.values(), ids=SPARSE)


def noise(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad += torch.randn_like(parameter.grad)


class NoisyModule(Plain):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        noise(self)


class NoisyClipping(Plain):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        noise(self)
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")


class NoisyStep(Plain):
    def optimizer_step(  # type: ignore[override]
        self, epoch: Any, batch_idx: int, optimizer: Any, closure: Any
    ) -> None:
        def noisy() -> Any:
            loss = closure()
            noise(self)
            return loss

        optimizer.step(closure=noisy)


class Resetting(Plain):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % 3 == 0:
            self.net[0].reset_parameters()  # type: ignore[operator]


class NoisyCallback(pl.Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        noise(pl_module)


class Jump(pl.Callback):
    """Changes weights before the optimizer does."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter += 0.1


class AfterStep:
    """Looks at the weights right after each step of the optimizer, behind all hooks."""

    def __init__(self, sparse: Any) -> None:
        self.sparse, self.steps, self.holes = sparse, 0, 0

    def look(self, *_: Any) -> None:
        self.steps += 1
        for layer in self.sparse.connections.values():
            self.holes += int((~layer.mask).sum())
            assert (layer.layer.weight[~layer.mask] == 0).all()


class LookAfterStep(pl.Callback):
    def __init__(self, looking: AfterStep) -> None:
        self.looking, self.watched = looking, False

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not self.watched:
            optimizer.register_step_post_hook(self.looking.look)
            self.watched = True


@every_sparse
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("model", [NoisyModule, NoisyClipping, NoisyStep, Resetting])
def test_a_module_may_change_them(model: Any, optimizer: str, sparse: Any, tmp_path: Path) -> None:
    callback = sparse()
    looking = AfterStep(callback)
    fit(model(optimizer), [callback, LookAfterStep(looking)], tmp_path)
    assert looking.steps == 24
    assert looking.holes > 0


class NoisyWeights(Plain):
    """Changes weights between the optimizer's step and the end of the batch."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))


@every_sparse
def test_weights_that_change_after_the_step_are_masked_at_the_end_of_the_batch(
    sparse: Any, tmp_path: Path
) -> None:
    callback = sparse()
    looking = AfterStep(callback)

    class Look(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            looking.look()

    fit(NoisyWeights(), [callback, Look()], tmp_path)
    assert looking.steps == 24
    assert looking.holes > 0


@every_sparse
@pytest.mark.parametrize("other", [NoisyCallback, Jump])
@pytest.mark.parametrize("first", [True, False])
def test_another_callback_may_change_them(
    first: bool, other: Any, sparse: Any, tmp_path: Path
) -> None:
    callback = sparse()
    looking = AfterStep(callback)
    both = [other(), callback] if first else [callback, other()]
    fit(Plain("sgd"), [*both, LookAfterStep(looking)], tmp_path)
    assert looking.steps == 24
    assert looking.holes > 0


@every_sparse
@pytest.mark.parametrize("package", [pl, pytorch_lightning], ids=["lightning", "pytorch_lightning"])
@pytest.mark.parametrize("first", [True, False])
def test_lightnings_pruning_is_refused(
    first: bool, package: Any, sparse: Any, tmp_path: Path
) -> None:
    pruning: Any = ModelPruning("l1_unstructured", amount=0.5)
    if package is pytorch_lightning:
        pruning = pytorch_lightning.callbacks.ModelPruning("l1_unstructured", amount=0.5)
    callback = sparse()
    with pytest.raises(ValueError, match=r"Lightning's ModelPruning both decide.*remove one"):
        fit(Plain(), [pruning, callback] if first else [callback, pruning], tmp_path)


def pruned_by_hand(layer: Any) -> None:
    torch.nn.utils.prune.l1_unstructured(layer, "weight", amount=0.5)


def replaced(layer: Any) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().clone())


def parametrized(layer: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(layer)


@every_sparse
@pytest.mark.parametrize("change", [pruned_by_hand, replaced, parametrized])
def test_a_weight_that_is_replaced_in_training_is_noticed(
    change: Any, sparse: Any, tmp_path: Path
) -> None:
    class Changing(Plain):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                change(self.net[0])

    with pytest.raises(RuntimeError, match=r"The weight of net.0 was replaced during training"):
        fit(Changing(), [sparse()], tmp_path)


def test_the_history_of_lbfgs_is_of_the_connections_of_now(tmp_path: Path) -> None:
    class Newton(Plain):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=3)

    histories = []

    class Histories(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            (optimizer,) = trainer.optimizers
            state: Any = next(iter(optimizer.state.values()), {})
            histories.append(len(state.get("old_dirs", [])))

    callback = SET(0.6, every_n_steps=4)
    looking = AfterStep(callback)
    fit(Newton(), [callback, Histories(), LookAfterStep(looking)], tmp_path)
    assert looking.steps == 24
    assert histories[3] == histories[7] == 0  # steps 4 and 8 have moved connections
    assert min(histories[2], histories[6]) > 0


def test_a_layer_that_is_replaced_in_training_is_noticed(tmp_path: Path) -> None:
    class Changing(Plain):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.net[2] = nn.Linear(16, 4).double()
                self.optimizers().add_param_group({"params": self.net[2].parameters()})  # type: ignore[union-attr]

    with pytest.raises(RuntimeError, match=r"The weight of net.2 was replaced during training"):
        fit(Changing(), [StaticSparse(0.6)], tmp_path)


def assigned(model: Any) -> None:
    state = {name: value.clone() + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


@every_sparse
@pytest.mark.parametrize("change", [assigned, lambda model: replaced(model.net[0])])
def test_a_weight_that_is_replaced_between_two_trainings_is_masked(
    change: Any, sparse: Any, tmp_path: Path
) -> None:
    callback, model = sparse(), Plain()
    fit(model, [callback], tmp_path)
    change(model)
    looking = AfterStep(callback)
    fit(model, [callback, LookAfterStep(looking)], tmp_path)
    assert looking.steps == 24
    assert model.net[0].weight.eq(0).float().mean() > 0.3  # type: ignore[operator]
