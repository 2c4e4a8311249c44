"""Weights go into a model with or without gates, from one with or without gates."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dg_lightning.surgery import add_gates, load_weights
from dg_lightning.surgery.gating import gated_units

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def gated(seed: int) -> nn.Sequential:
    model = net(seed)
    add_gates(model, feed_forward={"kind": "static"}, example=X)
    logit_of(model).data[:4] = -9.0 - seed
    return model.eval()


def logit_of(model: nn.Module) -> Any:
    ((_, gate),) = gated_units(model).values()
    return gate.logit


def test_a_plain_model_gets_the_weights_behind_gates_and_says_so() -> None:
    source, model = gated(1), net(2)
    with pytest.warns(UserWarning, match=r"1 gates, such as 2\.dg_gate"):
        assert load_weights(model, source.state_dict()) == ["2.dg_gate"]
    assert torch.equal(model(X), net(1)(X))
    assert not torch.equal(model(X), source(X))  # whose gates are closed


def test_a_gated_model_keeps_its_gates_over_plain_weights() -> None:
    model = gated(2)
    assert load_weights(model, net(1).state_dict()) == []
    expected = gated(1)
    assert float(logit_of(model)[0]) == -11.0
    assert torch.equal(model(X), expected(X))


def test_gates_are_loaded_where_both_have_them() -> None:
    model = gated(2)
    assert load_weights(model, gated(1).state_dict()) == []
    assert float(logit_of(model)[0]) == -10.0


class Module(pl.LightningModule):
    """A LightningModule around a model, with a buffer of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_files_of_lightning_modules_and_of_plain_models(suffix: str, tmp_path: Path) -> None:
    path, state = tmp_path / f"weights{suffix}", Module(net(1)).state_dict()
    if suffix == ".ckpt":
        torch.save({"state_dict": state, "epoch": 3}, path)
    else:
        save_file(state, path)
    model = net(2)
    load_weights(model, path)
    assert torch.equal(model(X), net(1)(X))
    inner = gated(2)
    load_weights(inner, path)
    assert torch.equal(inner(X), gated(1)(X))


def test_a_lightning_module_takes_the_weights_of_its_model() -> None:
    class Whole(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = gated(2)

    module = Whole()
    load_weights(module, net(1).state_dict())
    assert torch.equal(module.model(X), gated(1)(X))


def test_other_weights_are_refused_and_change_nothing() -> None:
    model = net(2)
    before = copy.deepcopy(model.state_dict())
    wide = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)).state_dict()
    with pytest.raises(ValueError, match=r"0\.weight must have the shape \(8, 6\), got \(9, 6\)"):
        load_weights(model, wide)
    lacking = {key: value for key, value in net(1).state_dict().items() if key != "2.bias"}
    with pytest.raises(ValueError, match=r"lacks 2\.bias"):
        load_weights(model, lacking)
    with pytest.raises(ValueError, match=r"has 5\.bias"):
        load_weights(model, {**net(1).state_dict(), "5.bias": torch.zeros(3)})
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_one_of_several_parts_must_be_named() -> None:
    pair = {f"{part}.{k}": v for part in ("a", "b") for k, v in net(1).state_dict().items()}
    with pytest.raises(
        ValueError, match=r"Several parts of the source fit Sequential \(a\., b\.\)"
    ):
        load_weights(net(2), pair)
    both = nn.ModuleDict({"a": net(2), "b": net(3)})
    with pytest.raises(ValueError, match=r"Several parts of ModuleDict fit the source"):
        load_weights(both, net(1).state_dict())


class Tied(nn.Module):
    """A model whose first and last layers share a weight, and that keeps a state of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.note = {"seed": seed}

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def test_tied_weights_may_be_left_out_and_other_state_is_kept() -> None:
    model, state = Tied(2), Tied(1).state_dict()
    del state["last.weight"]
    load_weights(model, state)
    assert torch.equal(model.last.weight, Tied(1).first.weight)
    assert model.last.weight is model.first.weight
    assert model.note == {"seed": 1}


def test_a_gate_of_another_kind_is_left_out() -> None:
    model = net(2)
    add_gates(model, feed_forward={"kind": "dynamic", "threshold": 0.3}, example=X)
    source = gated(1)
    with pytest.warns(UserWarning, match="no place for 1 gates"):
        assert load_weights(model, source.state_dict()) == ["2.dg_gate"]
    ((_, gate),) = gated_units(model).values()
    assert float(gate.threshold) == pytest.approx(0.3)
