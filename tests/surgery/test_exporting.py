"""A model of any class becomes a program that runs without the class."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from dg_lightning import GatedMLP, compact
from dg_lightning.surgery import CompactModel, export_model, exporting, prune

SIZES: Any = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"input_ids": torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(0))}


def bert() -> CompactModel:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=50, intermediate_size=64, **SIZES)
    model: Any = BertForSequenceClassification(config)
    return prune(model.eval(), [TOKENS], 0.5, criterion="magnitude", layers=["*.output.dense"])


def gpt2() -> CompactModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, bos_token_id=0)
    config.eos_token_id = 0
    model: Any = GPT2LMHeadModel(config)
    return prune(model.eval(), [TOKENS], 0.5, criterion="magnitude", uniform=False)


def resnet() -> CompactModel:
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10).eval()
    batches = [torch.randn(2, 3, 32, 32)]
    kinds: Any = {"kinds": ["channels"], "uniform": False}
    return prune(model, batches, 0.5, criterion="magnitude", **kinds)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["pt2", "onnx"])
@pytest.mark.parametrize("build", [bert, gpt2, resnet])
def test_compact_models_of_other_classes_run_anywhere(
    build: Any, format: str, tmp_path: Path
) -> None:
    compact = build()
    example: Any = torch.randn(1, 3, 32, 32) if build is resnet else TOKENS
    exported = export_model(compact.model, example, tmp_path / f"model.{format}")
    assert exported.difference < 1e-5
    assert exported.any_batch_size
    other = torch.randn(5, 3, 32, 32) if build is resnet else torch.randint(50, (5, 8))
    with torch.no_grad():
        if build is resnet:
            (found,), expected = exported.run(other), compact.model(other)
        else:
            found = exported.run(input_ids=other)[0]
            expected = compact.model(input_ids=other).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_the_file_runs_in_a_process_without_this_package(tmp_path: Path) -> None:
    compact = resnet()
    x = torch.randn(3, 3, 32, 32)
    torch.save({"x": x, "y": compact.model(x).detach()}, tmp_path / "pair.pt")
    export_model(compact.model, x, tmp_path / "model.pt2")
    text = (
        "import sys, torch\n"
        "pair = torch.load('pair.pt')\n"
        "found = torch.export.load('model.pt2').module()(pair['x'])\n"
        "torch.testing.assert_close(found, pair['y'])\n"
        "assert 'dg_lightning' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", text], cwd=tmp_path, check=True, timeout=120)


class FixedSize(nn.Module):
    """A model whose batch size is written into it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(2, 6) * 2


class Branching(nn.Module):
    """A model that asks for values of its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.sum()) > 0 else x


def test_a_fixed_batch_size_is_said(tmp_path: Path) -> None:
    assert not export_model(FixedSize(), torch.randn(2, 6), tmp_path / "a.pt2").any_batch_size
    net = nn.Sequential(nn.Linear(6, 3))
    exported = export_model(net, torch.randn(1, 6), tmp_path / "b.pt2")
    assert exported.any_batch_size
    torch.testing.assert_close(exported.run(torch.ones(4, 6))[0], net(torch.ones(4, 6)))


def test_what_cannot_be_exported_is_refused_and_overwrites_nothing(tmp_path: Path) -> None:
    file = tmp_path / "model.pt2"
    file.write_bytes(b"mine")
    with pytest.raises(ValueError, match="Branching cannot be exported"):
        export_model(Branching(), torch.randn(2, 6), file)
    assert file.read_bytes() == b"mine"
    with pytest.raises(ValueError, match=r"\.pt2 or \.onnx, got 'net\.bin'"):
        export_model(nn.Linear(2, 2), torch.randn(2, 2), "net.bin")


def test_weights_in_half_precision_become_float32(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(6, 3)).bfloat16()
    exported = export_model(net, torch.randn(2, 6), tmp_path / "model.pt2")
    assert exported.run(torch.randn(2, 6))[0].dtype == torch.float32


class Reordered(nn.Module):
    """A model whose arguments are not symmetric, with two outputs of different sizes."""

    def forward(self, a: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> Any:
        assert c is not None
        return {"small": a - 2 * c, "large": 1e6 * a, "empty": a[:, :0], "which": a > c}


@pytest.mark.parametrize("format", ["pt2", pytest.param("onnx", marks=pytest.mark.slow)])
def test_arguments_are_told_apart_by_name(format: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    a, c = torch.randn(2, 4, 6, generator=generator)
    exported = export_model(Reordered(), {"c": c, "a": a}, tmp_path / f"model.{format}")
    for found in (exported.run(a, c=c), exported.run(c=c, a=a), exported.run(a=a, c=c)):
        torch.testing.assert_close(found[0], a - 2 * c)


def test_outputs_are_compared_each_by_its_own_size() -> None:
    model, x = Reordered(), {"a": torch.ones(2, 3), "c": torch.zeros(2, 3)}

    def run_with(change: Any) -> Any:
        def run(**given: Tensor) -> list[Tensor]:
            outputs = list(model(**given).values())
            outputs[0] = change(outputs[0])
            return outputs

        return exporting._difference(run, model, (), x)

    assert run_with(lambda y: y) == 0
    assert run_with(lambda y: y * 1.01) > 1e-6
    assert run_with(lambda y: y * torch.nan) == float("inf")
    assert run_with(lambda y: y[:1]) == float("inf")


def test_a_model_in_half_precision_takes_its_own_example(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(6, 3)).bfloat16()
    x = torch.randn(2, 6).bfloat16()
    assert export_model(net, x, tmp_path / "model.pt2").run(x.float())[0].shape == (2, 3)


@pytest.mark.parametrize("size", [1, 3])
def test_a_fixed_batch_size_is_said_whatever_it_is(size: int, tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(max(size, 2), 4) * 2

    exported = export_model(Fixed(), torch.randn(size, 4), tmp_path / "model.pt2")
    assert not exported.any_batch_size


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_program_reads_open_inputs_only(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    gate: Any = {"kind": kind}
    net = GatedMLP(8, [16], 3, gate=gate, input_gate={"kind": "static"}).eval()
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    assert net.input_gate is not None
    net.input_gate.logit.data[3:] = -1.0  # type: ignore[operator]
    net.input_gate.logit.data[:3] = 1.0  # type: ignore[operator]
    x = torch.randn(20, 8)
    small = compact(net, x).model
    exported = export_model(small, x, tmp_path / "model.pt2")
    assert exported.any_batch_size
    torch.testing.assert_close(exported.run(x[:7])[0], net(x[:7]).detach())
    program = torch.export.load(tmp_path / "model.pt2").module()
    shapes = [tuple(w.shape) for w in program.state_dict().values() if w.ndim == 2]
    assert not any(inputs == 8 for _, inputs in shapes)
    assert any(inputs == 3 for _, inputs in shapes)


def test_a_gate_that_stays_is_no_error() -> None:
    net = GatedMLP(8, [4], 3, input_gate={"kind": "static"}, input_norm="layer").eval()
    small = compact(net, torch.randn(5, 8))
    assert any("input_gate" in note for note in small.notes)
