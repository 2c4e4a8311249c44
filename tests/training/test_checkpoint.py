"""What is refused in a checkpoint, in one clear line each."""

import io
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from hostile import doubled, endless_list, memory_limit, time_limit
from torch import Tensor, nn

from dg_lightning import GatedClassifier, GatedMLP, GatedRegressor
from dg_lightning.surgery import find_units, restore_gates
from dg_lightning.training.checkpoint import read_checkpoint

STATIC: Any = {"kind": "static"}
WEIGHT = "net.output.weight"
HUGE = 10**13  # sizes of this many bytes are refused by every machine


class MaskedMLP(GatedMLP):
    """A net whose buffer is infinite with good reason, as the mask of an attention is."""

    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__(hidden=[4], in_features=in_features, num_classes=num_classes)
        mask = torch.full((3, 3), float("-inf")).triu(1)
        self.register_buffer("mask", mask)


def checkpoint(**changes: Any) -> dict[str, Any]:
    """Return a checkpoint of a small net, as a Trainer writes it."""
    net: Any = {"class_path": "dg_lightning.GatedMLP", "init_args": {"hidden": [4]}}
    model = GatedClassifier(net=net, input_shape=[3], num_classes=2)
    return {
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": dict(model.state_dict()),
        "hyper_parameters": dict(model.hparams),
        "callbacks": {},
        "optimizer_states": [],
        **changes,
    }


def with_weight(weight: Any) -> dict[str, Any]:
    found = checkpoint()
    found["state_dict"][WEIGHT] = weight
    return found


@pytest.fixture(autouse=True)
def _within_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Turn a hang or a lack of memory into a failure of the test."""
    monkeypatch.chdir(tmp_path)
    with time_limit(), memory_limit():
        yield


def message_of(content: dict[str, Any], *needles: str) -> None:
    """Expect one short line that names all of this, from a path and from an open file."""
    torch.save(content, "a.ckpt")
    for source in ("a.ckpt", io.BytesIO(Path("a.ckpt").read_bytes())):
        with pytest.raises(ValueError, match=r".") as caught:
            GatedClassifier.load_from_checkpoint(source)
        text = str(caught.value)
        assert "\n" not in text
        assert len(text) < 400
        for needle in needles:
            assert needle in text, text


W = torch.arange(8.0).reshape(2, 4)
BAD_WEIGHTS: dict[str, Callable[[], Any]] = {
    "infinite": lambda: (W + 1) / 0,
    "minus infinite": lambda: -(W + 1) / 0,
    "one infinite": lambda: W.index_fill(0, torch.tensor([1]), float("inf")),
    "zero and minus infinite": lambda: (W * 0).index_fill(1, torch.tensor([1]), float("-inf")),
    "infinite in half precision": lambda: ((W + 1) / 0).bfloat16(),
    "too large for float32": lambda: W.double() + 1e300,
    "no number": lambda: W * float("nan"),
    "complex": lambda: W + 1j,
    "complex without an imaginary part": lambda: W.to(torch.complex64),
    "quantized": lambda: torch.quantize_per_tensor(W, 0.1, 0, torch.qint8),
    "quantized by channel": lambda: torch.quantize_per_channel(
        W, torch.ones(2), torch.zeros(2), 0, torch.qint8
    ),
    "meta": lambda: W.to("meta"),
    "sparse": lambda: W.to_sparse(),
    "sparse by rows": lambda: W.to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([W[0], W[1, :2]]),
    "a list": W.tolist,
    "nothing": lambda: None,
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_weights_that_are_no_finite_numbers_are_refused(name: str) -> None:
    message_of(with_weight(BAD_WEIGHTS[name]()), WEIGHT)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1 + 5j])
@pytest.mark.parametrize("name", ["target_mean", "target_std", "net.hidden.0.gate.threshold"])
def test_buffers_that_are_no_finite_numbers_are_refused(name: str, value: Any) -> None:
    net: Any = {
        "class_path": "dg_lightning.GatedMLP",
        "init_args": {"hidden": [4], "gate": {"kind": "static"}},
    }
    model = GatedRegressor(net=net, input_shape=[3])
    found = checkpoint(state_dict=dict(model.state_dict()), hyper_parameters=dict(model.hparams))
    found["state_dict"][name] = torch.tensor(value)
    torch.save(found, "a.ckpt")
    with pytest.raises(ValueError, match=re.escape(name)):
        GatedRegressor.load_from_checkpoint("a.ckpt")


@pytest.mark.parametrize("entries", [3 * 10**10, 3 * 10**15])
@pytest.mark.parametrize("name", [WEIGHT, "net.more"])
def test_weights_that_are_larger_than_the_file_are_refused(name: str, entries: int) -> None:
    found = checkpoint()
    found["state_dict"][name] = torch.zeros(1).expand(entries)
    message_of(found, name)


def test_expanded_states_are_refused_too() -> None:
    huge = torch.zeros(1).expand(3 * 10**10)
    message_of(checkpoint(optimizer_states=[{"state": {0: {"exp_avg": huge}}}]))
    message_of(checkpoint(callbacks={"RigL": {"masks": [huge.expand(2, -1)]}}))


def test_a_small_expanded_weight_is_none_of_these() -> None:
    torch.save(with_weight(torch.ones(1).expand(2, 4)), "a.ckpt")
    assert GatedClassifier.load_from_checkpoint("a.ckpt").net.output.weight.sum() == 8  # type: ignore[union-attr, operator]


def test_an_infinite_mask_is_not_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_TRUST", __name__)
    net: Any = {"class_path": f"{__name__}.MaskedMLP"}
    model = GatedClassifier(net=net, input_shape=[3], num_classes=2)
    found = checkpoint(state_dict=dict(model.state_dict()), hyper_parameters=dict(model.hparams))
    torch.save(found, "a.ckpt")
    loaded: nn.Module = GatedClassifier.load_from_checkpoint("a.ckpt").net
    mask = loaded.get_buffer("mask")
    assert isinstance(mask, Tensor)
    assert mask.isinf().sum() == 3


SIZES: dict[str, dict[str, Any]] = {
    "input_shape": {"input_shape": [HUGE]},
    "a product": {"input_shape": [10**7, 10**7]},
    "num_classes": {"num_classes": HUGE},
    "hidden": {"net": {"class_path": "dg_lightning.GatedMLP", "init_args": {"hidden": [HUGE]}}},
    "more than an integer": {
        "net": {"class_path": "dg_lightning.GatedMLP", "init_args": {"hidden": [2**70]}}
    },
    "of torch": {
        "net": {"class_path": "torch.nn.Linear", "init_args": {"out_features": HUGE}},
    },
    "copies of torch": {
        "net": {
            "class_path": "torch.nn.TransformerEncoder",
            "init_args": {
                "num_layers": 10**9,
                "encoder_layer": {
                    "class_path": "torch.nn.TransformerEncoderLayer",
                    "init_args": {"d_model": 4, "nhead": 1, "dim_feedforward": 4},
                },
            },
        },
    },
    "a number of layers": {
        "input_shape": [8],
        "num_classes": 4,
        "net": {
            "class_path": "dg_lightning.layers.GPT",
            "init_args": {"width": 4, "heads": 1, "depth": 10**9, "hidden": 4},
        },
    },
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_beyond_the_weights_are_refused(name: str) -> None:
    found = checkpoint()
    found["hyper_parameters"] |= SIZES[name]
    message_of(found)


@pytest.mark.parametrize("version", ["abc", "", "2.6.6 evil", 5, None, [1], {"a": 1}])
def test_a_version_that_is_none_is_refused(version: Any) -> None:
    message_of(checkpoint(**{"pytorch-lightning_version": version}), "pytorch-lightning_version")


@pytest.mark.parametrize("key", ["hyper_parameters", "datamodule_hyper_parameters"])
@pytest.mark.parametrize(
    "values",
    [doubled(60), endless_list(), {"a": [doubled(60)] * 2}],
    ids=["2^60", "endless", "dict"],
)
def test_values_that_never_end_are_refused(key: str, values: Any) -> None:
    found = checkpoint()
    found[key] = {**found.get(key, {}), "metrics": values}
    message_of(found)


def test_a_value_may_be_shared() -> None:
    shared = [4]
    found = checkpoint()
    found["hyper_parameters"]["net"]["init_args"] = {"hidden": shared, "dropout": 0.0}
    found["hyper_parameters"]["more"] = [shared, shared, {"again": shared}]
    torch.save(found, "a.ckpt")
    assert read_checkpoint("a.ckpt")["hyper_parameters"]["more"][0] == [4]


def test_a_file_cut_anywhere_is_one_line() -> None:
    torch.save(checkpoint(), "whole.ckpt")
    whole = Path("whole.ckpt").read_bytes()
    for length in np.linspace(0, len(whole) - 1, 60).astype(int):
        Path("a.ckpt").write_bytes(whole[:length])
        for source in ("a.ckpt", io.BytesIO(whole[:length])):
            with pytest.raises(ValueError, match=r"checkpoint") as caught:
                read_checkpoint(source)
            assert "\n" not in str(caught.value)


class Buffers(GatedMLP):
    """A net with buffers that are larger than its weights, and infinite ones."""

    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__(in_features, [4], num_classes)
        self.register_buffer("causal", torch.ones(2048, 2048).tril().bool(), persistent=False)
        self.register_buffer("lowest", torch.tensor(float("inf")))
        self.register_buffer("masked", torch.full((3, 3), float("-inf")))
        self.register_buffer("wide", torch.full((2,), -1e308, dtype=torch.float64))

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        assert state == 3


def test_buffers_may_be_large_and_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DG_TRUST", __name__)
    net: Any = {"class_path": f"{__name__}.Buffers"}
    model = GatedClassifier(net=net, input_shape=[3], num_classes=2)
    found = checkpoint(state_dict=dict(model.state_dict()), hyper_parameters=dict(model.hparams))
    torch.save(found, "a.ckpt")
    loaded: nn.Module = GatedClassifier.load_from_checkpoint("a.ckpt").net
    assert loaded.get_buffer("lowest").isinf()


def test_a_packed_checkpoint_is_refused() -> None:
    torch.save(checkpoint(), "stored.ckpt")
    with (
        zipfile.ZipFile("stored.ckpt") as stored,
        zipfile.ZipFile("a.ckpt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for item in stored.infolist():
            packed.writestr(item.filename, stored.read(item))
    with pytest.raises(ValueError, match=r"a\.ckpt"):
        GatedClassifier.load_from_checkpoint("a.ckpt")


@pytest.mark.parametrize(
    ("key", "value"),
    [("size", 10**9), ("producers", {"0": torch.full((6,), 10**12)}), ("kind", "heads")],
)
def test_gates_that_do_not_fit_are_refused(key: str, value: Any) -> None:
    net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    found = find_units(net, torch.randn(3, 8)).state()
    found["units"]["2"][key] = value
    saved = {"add_gates": {"module": "", "settings": {"feed_forward": STATIC}, "found": found}}
    with pytest.raises(ValueError, match=r"Sequential|gates for 2"):
        restore_gates(net, {"callbacks": {"AddGates": saved}})
