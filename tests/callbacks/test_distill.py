"""Distill: the distance to a teacher is added to the loss of any module."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from dg_lightning import GatedMLP, gate_layers
from dg_lightning.callbacks import AddGates, Distill

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(24) % 3


def net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


class Module(pl.LightningModule):
    """Somebody's module with a loss of its own, which may be 0."""

    def __init__(self, own: float = 0.0, model: nn.Module | None = None) -> None:
        super().__init__()
        self.own = own
        self.net: Any = net() if model is None else model

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.own * F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer_for(path: Path, callbacks: list[Any], steps: int = 1, **options: Any) -> pl.Trainer:
    settings: dict[str, Any] = {"max_steps": steps, "logger": False, "accelerator": "cpu"}
    settings |= {"enable_progress_bar": False, "enable_model_summary": False}
    settings |= {"enable_checkpointing": False, "default_root_dir": path, "log_every_n_steps": 1}
    return pl.Trainer(callbacks=callbacks, **settings | options)


def loader(size: int = 12) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), batch_size=size)


def kl(own: Tensor, taught: Tensor, temperature: float) -> Tensor:
    """Hinton, Vinyals and Dean's distance (arXiv:1503.02531), by torch.distributions."""
    pair = [torch.distributions.Categorical(logits=x / temperature) for x in (taught, own)]
    distance: Tensor = torch.distributions.kl_divergence(*pair).mean() * temperature**2
    return distance


def relative_square(own: Tensor, taught: Tensor) -> Tensor:
    return F.mse_loss(own, taught) / F.mse_loss(taught, torch.zeros_like(taught))


def one_minus_cosine(own: Tensor, taught: Tensor) -> Tensor:
    dot = (own * taught).sum(-1)
    mean: Tensor = (1 - dot / own.norm(dim=-1) / taught.norm(dim=-1)).mean()
    return mean


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"temperature": 3.0}, lambda own, taught: kl(own, taught, 3.0)),
        ({"measure": "mse"}, relative_square),
        (
            {"measure": "cosine", "weight": 2.0},
            lambda own, taught: 2 * one_minus_cosine(own, taught),
        ),
    ],
)
@pytest.mark.parametrize("own", [0.0, 1.0])
def test_a_step_is_that_of_both_losses(
    settings: dict[str, Any], expected: Any, own: float, tmp_path: Path
) -> None:
    teacher, hand, module = net(5), net(), Module(own)
    loss = own * F.cross_entropy(hand(X[:12]), Y[:12])
    (loss + expected(hand(X[:12]), teacher(X[:12]).detach())).backward()
    torch.optim.SGD(hand.parameters(), lr=0.1).step()
    trainer = trainer_for(tmp_path, [Distill(teacher, **settings)])
    trainer.fit(module, loader())
    for key, value in hand.state_dict().items():
        torch.testing.assert_close(module.net.state_dict()[key], value)
    assert trainer.callback_metrics["loss"] == pytest.approx(loss.item())
    weight = settings.get("weight", 1.0)
    distance = expected(net()(X[:12]), teacher(X[:12])).item() / weight
    assert trainer.callback_metrics["distill/loss"].item() == pytest.approx(distance, rel=1e-5)


def test_accumulation_and_mixed_precision_do_not_change_the_weight(tmp_path: Path) -> None:
    ends = []
    for size, options in ((24, {}), (6, {"accumulate_grad_batches": 4})):
        module = Module(1.0)
        trainer_for(tmp_path, [Distill(net(5))], **options).fit(module, loader(size))
        ends.append(module.net[0].weight.detach().clone())
    torch.testing.assert_close(ends[0], ends[1])
    module = Module(1.0)
    trainer_for(tmp_path, [Distill(net(5))], precision="bf16-mixed").fit(module, loader(24))
    torch.testing.assert_close(module.net[0].weight, ends[0], atol=5e-3, rtol=0)


def test_layers_are_compared_too(tmp_path: Path) -> None:
    teacher, hand, module = net(5), net(), Module()
    distance = relative_square(hand(X[:12]), teacher(X[:12]).detach())
    distance += relative_square(hand[:2](X[:12]), teacher[:2](X[:12]).detach())
    distance.backward()
    torch.optim.SGD(hand.parameters(), lr=0.1).step()
    callback = Distill(teacher, measure="mse", layers=["1"])
    trainer_for(tmp_path, [callback]).fit(module, loader())
    torch.testing.assert_close(module.net[0].weight, hand[0].weight)


class Masked(nn.Module):
    """A model with the arguments and outputs of a Hugging Face model."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = net(seed)

    def forward(self, x: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        return {"hidden": x, "logits": self.net(x)}


class OnMasked(Module):
    """A module that passes a mask by name."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out: dict[str, Tensor] = self.net(batch[0].view(-1, 2, 6), attention_mask=mask())
        return 0 * out["logits"].sum()


def mask() -> Tensor:
    return torch.tensor([[1, 0]]).expand(6, 2)


def test_padding_does_not_count(tmp_path: Path) -> None:
    teacher, hand, module = Masked(5), net(), OnMasked(model=Masked())
    kept = X[:12].view(6, 2, 6)[:, 0]
    kl(hand(kept), teacher.net(kept).detach(), 2.0).backward()
    torch.optim.SGD(hand.parameters(), lr=0.1).step()
    trainer_for(tmp_path, [Distill(teacher)]).fit(module, loader())
    torch.testing.assert_close(module.get_submodule("net.net.0").weight, hand[0].weight)


@pytest.mark.parametrize("gates_first", [False, True])
def test_the_default_teacher_is_the_model_before_its_gates(
    gates_first: bool, tmp_path: Path
) -> None:
    static: Any = {"kind": "static"}
    gates = AddGates(feed_forward=static, submodule="net", example=X[:2])
    distill = Distill()
    module = Module()

    class Compare(pl.Callback):
        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            teacher = distill.current_state()["teacher"]
            assert teacher.keys() == net().state_dict().keys()
            assert all(torch.equal(teacher[k], v) for k, v in net().state_dict().items())

    callbacks: list[Any] = [gates, distill] if gates_first else [distill, gates]
    callbacks.append(Compare())
    trainer = trainer_for(tmp_path, callbacks, steps=4, num_sanity_val_steps=0)
    trainer.fit(module, loader(), loader())
    assert gate_layers(module)
    assert not torch.equal(module.net[0].weight, net()[0].weight)


def test_a_resumed_run_keeps_its_teacher(tmp_path: Path) -> None:
    def run(epochs: int, **options: Any) -> Module:
        module, last = Module(1.0), ModelCheckpoint(tmp_path, filename="last")
        callbacks = [Distill(weight=5.0), last]
        settings: dict[str, Any] = {"max_epochs": epochs, "enable_checkpointing": True}
        trainer_for(tmp_path, callbacks, -1, **settings).fit(module, loader(), **options)
        return module

    whole = run(3)
    (tmp_path / "last.ckpt").unlink()
    run(2)
    resumed = run(3, ckpt_path=tmp_path / "last.ckpt")
    torch.testing.assert_close(resumed.net[0].weight, whole.net[0].weight, atol=0, rtol=0)


def test_a_checkpoint_of_a_dense_net_teaches_a_gated_one(tmp_path: Path) -> None:
    dense = Module(1.0)
    trainer = trainer_for(tmp_path, [], 8)
    trainer.fit(dense, loader())
    trainer.save_checkpoint(tmp_path / "dense.ckpt")
    distill = Distill(str(tmp_path / "dense.ckpt"))
    static: Any = {"kind": "static"}
    gates = AddGates(feed_forward=static, submodule="net", example=X[:2])
    trainer = trainer_for(tmp_path, [distill, gates])
    trainer.fit(Module(), loader())
    expected = kl(net()(X[:12]), dense.net(X[:12]), 2.0).item()
    assert trainer.callback_metrics["distill/loss"].item() == pytest.approx(expected, rel=1e-4)


class Adversarial(Module):
    """A module with two losses of its own, of which the second depends on the model."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        output = self.net(batch[0])
        self.manual_backward(self.other.square())
        self.manual_backward(0 * output.sum())
        optimizer.step()
        optimizer.zero_grad()


def test_of_two_losses_the_one_that_depends_on_the_model_learns(tmp_path: Path) -> None:
    teacher, hand, module = net(5), net(), Adversarial()
    kl(hand(X[:12]), teacher(X[:12]).detach(), 2.0).backward()
    torch.optim.SGD(hand.parameters(), lr=0.1).step()
    trainer_for(tmp_path, [Distill(teacher, submodule="net")]).fit(module, loader())
    torch.testing.assert_close(module.net[0].weight, hand[0].weight)
    assert module.other.item() == pytest.approx(0.8)


class Pair(nn.Module):
    """A model that returns two outputs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Two(Module):
    """A module of two parts."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.head = nn.Linear(3, 3)


def test_what_cannot_work_is_refused_in_one_line(tmp_path: Path) -> None:
    def fit(module: Module, **settings: Any) -> None:
        trainer_for(tmp_path, [Distill(**settings)]).fit(module, loader())

    narrow = nn.Linear(6, 2)
    with pytest.raises(ValueError, match=r"\(12, 3\).*\(12, 2\)"):
        fit(Module(), teacher=narrow)
    with pytest.raises(ValueError, match="net, head"):
        fit(Two())
    with pytest.raises(ValueError, match=r"\(net, head\), got 'body'"):
        fit(Two(), submodule="body")
    with pytest.raises(RuntimeError, match="`submodule`"):
        fit(Two(), submodule="head")
    with pytest.raises(ValueError, match="has no 'missing'"):
        fit(Module(), layers=["missing"])
    with pytest.raises(ValueError, match=r"there is no 'missing\.ckpt'"):
        fit(Module(), teacher="missing.ckpt")
    module = Module()
    with pytest.raises(ValueError, match="shares weights"):
        fit(module, teacher=module.net)
    with pytest.raises(ValueError, match="`output`"):
        fit(Module(), teacher=Pair(), output=2)
    with pytest.raises(ValueError, match="pass `teacher`"):
        fit(Module(model=GatedMLP(6, [8], 3, gate={"kind": "static"})))
    settings: Any
    for settings in ({"weight": -1.0}, {"temperature": 0.0}, {"measure": "l1"}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            Distill(**settings)


def test_the_teacher_is_not_trained_and_rests_in_validation(tmp_path: Path) -> None:
    calls: list[bool] = []
    teacher = net(5)
    before = copy.deepcopy(teacher.state_dict())
    teacher.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    module = Module()
    trainer_for(tmp_path, [Distill(teacher)], 4).fit(module, loader(), loader())
    assert calls == [False] * 4
    assert all(torch.equal(before[key], value) for key, value in teacher.state_dict().items())
    assert not any("teacher" in key for key in module.state_dict())


class Changing(nn.Module):
    """A model that changes its inputs in place, behind a hook that changes them, too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_forward_pre_hook(scale_inputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x.clone().sub_(1))
        x.zero_()
        return out


def scale_inputs(module: nn.Module, args: Any) -> Any:
    return (args[0] * 3,)


def test_the_teacher_gets_the_inputs_that_the_model_gets(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, [Distill()])
    trainer.fit(Module(model=Changing()), loader())
    assert trainer.callback_metrics["distill/loss"] == 0  # it is a copy of the model


def test_a_teacher_that_is_passed_on_resuming_is_used(tmp_path: Path) -> None:
    last = ModelCheckpoint(tmp_path, filename="last")
    options: dict[str, Any] = {"max_epochs": 1, "enable_checkpointing": True}
    trainer_for(tmp_path, [Distill(), last], -1, **options).fit(Module(1.0), loader())
    teacher = net(5)
    trainer = trainer_for(tmp_path, [Distill(teacher)], -1, max_epochs=2)
    trainer.fit(Module(1.0), loader(), ckpt_path=tmp_path / "last.ckpt")
    assert torch.equal(teacher[0].weight, net(5)[0].weight)


class Positional(Masked):
    """A model whose mask is passed by position."""


class OnPositional(OnMasked):
    """A module that passes a mask by position."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return 0 * self.net(batch[0].view(-1, 2, 6), mask())["logits"].sum()


def test_a_mask_by_position_counts_as_well(tmp_path: Path) -> None:
    kept = X[:12].view(6, 2, 6)[:, 0]
    trainer = trainer_for(tmp_path, [Distill(Positional(5))])
    trainer.fit(OnPositional(model=Positional()), loader())
    expected = kl(net()(kept), net(5)(kept), 2.0).item()
    assert trainer.callback_metrics["distill/loss"].item() == pytest.approx(expected, rel=1e-5)


class Fixed(nn.Module):
    """A model that returns values of its own."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.values * 1


def distance(own: Tensor, taught: Tensor, path: Path, **settings: Any) -> float:
    class Shown(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return 0 * self.net(batch[0]).masked_fill(self.net.values == -torch.inf, 0).sum()

    trainer = trainer_for(path, [Distill(Fixed(taught), **settings)])
    trainer.fit(Shown(model=Fixed(own)), loader())
    return trainer.callback_metrics["distill/loss"].item()


def test_classes_may_lie_along_another_dimension(tmp_path: Path) -> None:
    own, taught = torch.randn(2, 2, 4, 5, 3, generator=torch.Generator().manual_seed(3))
    found = distance(own, taught, tmp_path, dim=1)
    expected = kl(own.movedim(1, -1), taught.movedim(1, -1), 2.0).item()
    assert found == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match=r"\(2, 4, 5, 3\): set `dim`"):
        distance(own, taught, tmp_path)
    with pytest.raises(ValueError, match="use 'mse'"):
        distance(own[..., :1, 0, 0], taught[..., :1, 0, 0], tmp_path)


def test_classes_that_are_ruled_out_add_nothing(tmp_path: Path) -> None:
    own, taught = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(4))
    expected = kl(own[:, :3], taught[:, :3], 2.0).item()
    own[:, 3] = taught[:, 3] = -torch.inf
    assert distance(own, taught, tmp_path) == pytest.approx(expected, rel=1e-5)


def test_outputs_that_are_all_zero_are_compared_without_their_size(tmp_path: Path) -> None:
    own = torch.full((5, 4), 0.5)
    assert distance(own, torch.zeros(5, 4), tmp_path, measure="mse") == pytest.approx(0.25)


def test_two_teachers_have_two_names(tmp_path: Path) -> None:
    teachers = [Distill(net(5), name="a"), Distill(net(6), name="b")]
    trainer = trainer_for(tmp_path, teachers)
    trainer.fit(Module(), loader())
    assert {"distill/loss/a", "distill/loss/b"} <= trainer.callback_metrics.keys()


class Bypassing(Adversarial):
    """A module whose backward pass callbacks do not see."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net(batch[0]).sum().backward()


def test_a_teacher_that_no_loss_hears_is_an_error(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, [Distill(net(5), submodule="net")], 8)
    with pytest.raises(RuntimeError, match="no effect"):
        trainer.fit(Bypassing(), loader())


def test_loading_a_teacher_draws_no_random_numbers(tmp_path: Path) -> None:
    dense = Module(1.0)
    trainer = trainer_for(tmp_path, [])
    trainer.fit(dense, loader())
    trainer.save_checkpoint(tmp_path / "dense.ckpt")
    draws = []
    for callbacks in ([], [Distill(str(tmp_path / "dense.ckpt"), weight=0.0)]):
        module = Module(1.0)
        torch.manual_seed(7)
        trainer_for(tmp_path, callbacks).fit(module, loader())
        draws.append(torch.rand(()))
    assert draws[0] == draws[1]


class Checkpointed(Module):
    """A module that computes its model again in the backward pass."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return 0 * checkpoint(self.net, batch[0], use_reentrant=False).sum()


def test_activation_checkpointing_changes_nothing(tmp_path: Path) -> None:
    ends = []
    for module in (Module(), Checkpointed()):
        trainer_for(tmp_path, [Distill(net(5))], 3).fit(module, loader())
        ends.append(module.net[0].weight.detach())
    assert torch.equal(*ends)


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_compiled_model_learns_as_the_plain_one(wrapped: bool, tmp_path: Path) -> None:
    ends = []
    for compiled in (False, True):
        torch._dynamo.reset()
        module, layers = Module(), None if wrapped else ["0"]
        if compiled and wrapped:
            module.net = torch.compile(module.net, backend="aot_eager")
        elif compiled:
            module.net.compile(backend="aot_eager")
        trainer_for(tmp_path, [Distill(net(1), layers=layers)], steps=3).fit(module, loader())
        ends.append(list(module.parameters()))
    torch.testing.assert_close(ends[1], ends[0])
