"""Compact models that their own class builds: loaded where there is no dg-lightning."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zoo_builders import class_of, hugging_face
from zoo_language import GROUPED
from zoo_models import ZOO, run

from dg_lightning import add_gates, gate_layers
from dg_lightning.surgery import CompactModel, compact, load_compact

STATIC: Any = {"kind": "static"}
# Settings by which each class builds a model whose feed-forward layers are half as wide.
FAMILIES: dict[str, dict[str, Any]] = {
    "bart": {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
    "bert": {"intermediate_size": 32},
    "clip": {"text_config.intermediate_size": 32, "vision_config.intermediate_size": 32},
    "dinov2": {"mlp_ratio": 2},
    "distilbert": {"hidden_dim": 32},
    "gemma": {"intermediate_size": 32},
    "gpt2": {"n_inner": 64},
    "gpt_neox": {"intermediate_size": 32},
    "hf_vit": {"intermediate_size": 32},
    "llama": {"intermediate_size": 32},
    "mistral": {"intermediate_size": 32},
    "opt": {"ffn_dim": 32},
    "phi": {"intermediate_size": 32},
    "qwen2": {"intermediate_size": 32},
    "roberta": {"intermediate_size": 32},
    "t5": {"d_ff": 32},
    "whisper": {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
}
ELSEWHERE = """
import json, sys, torch, transformers
from pathlib import Path
done = {}
for folder in map(Path, sys.argv[1:]):
    config = json.loads((folder / "config.json").read_text())
    model = getattr(transformers, config["architectures"][0]).from_pretrained(folder).eval()
    inputs, expected = torch.load(folder / "example.pt")
    with torch.no_grad():
        outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    found = [value for value in outputs.values() if torch.is_tensor(value)]
    done[folder.name] = all(any(torch.equal(x, y) for y in found) for x in expected)
    model.train()
    (model(**inputs) if isinstance(inputs, dict) else model(inputs))[0].sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    if model.can_generate() and "input_ids" in inputs:
        text = model.eval().generate(inputs["input_ids"], max_new_tokens=3, min_new_tokens=3)
        done[folder.name] &= text.shape[1] >= 3
assert "dg_lightning" not in sys.modules
print(json.dumps(done))
"""


def close_half(model: nn.Module) -> None:
    """Close every second block, in every second layer also the first one."""
    for index, gate in enumerate(gate_layers(model).values()):
        parameter: Any = gate
        parameter.logit.data[index % 2 :: 2] = -1.0


def family(name: str, **kinds: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    case = ZOO[name]
    model, example = case.build().eval(), case.example()
    add_gates(model, example=example, **kinds)
    close_half(model)
    return model, example


@pytest.mark.slow
def test_hugging_face_models_load_without_this_package(tmp_path: Path) -> None:
    for name, settings in FAMILIES.items():
        model, example = family(name, feed_forward=STATIC)
        expected = run(model, example)
        result = compact(model, example, uniform=True)
        assert result.settings == settings, name
        for output, wanted in zip(run(result.model, example), expected, strict=True):
            torch.testing.assert_close(output, wanted, rtol=1e-3, atol=1e-3)
        result.save_pretrained(tmp_path / name)
        with torch.no_grad():
            called = result.model(**example) if isinstance(example, dict) else result.model(example)
        outputs = [value for value in called.values() if torch.is_tensor(value)]
        torch.save((example, outputs), tmp_path / name / "example.pt")
    folders = [str(tmp_path / name) for name in FAMILIES]
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *folders], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys(FAMILIES, True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma", "mixtral"])
def test_heads_go_where_the_config_has_a_size_of_heads(name: str, tmp_path: Path) -> None:
    model, example = family(name, heads=STATIC)
    result = compact(model, example, uniform=True)
    assert result.settings["num_attention_heads"] == 2
    assert result.settings["num_key_value_heads"] == 1
    result.save_pretrained(tmp_path)
    kind: Any = type(result.model)
    again = kind.from_pretrained(tmp_path).eval()
    for output, wanted in zip(run(again, example), run(result.model, example), strict=True):
        assert torch.equal(output, wanted)


def test_layers_keep_as_many_units_as_the_one_that_needs_most() -> None:
    model, example = family("bert", feed_forward=STATIC)
    gates: list[Any] = list(gate_layers(model).values())
    for gate, kept in zip(gates, (40, 30, 16), strict=True):
        gate.logit.data[:kept] = 1.0
        gate.logit.data[kept:] = -1.0
    expected = run(model, example)
    result = compact(model, example, uniform=True, multiple=16)
    assert result.settings == {"intermediate_size": 48}
    assert set(result.units.values()) == {(64, 48)}
    (note,) = result.notes  # the pooler is as wide as the residual stream
    assert "no setting of BertForSequenceClassification" in note
    for output, wanted in zip(run(result.model, example), expected, strict=True):
        torch.testing.assert_close(output, wanted)


def test_heads_stay_where_their_size_is_computed_from_their_number() -> None:
    model, example = family("bert", heads=STATIC)
    expected = run(model, example)
    result = compact(model, example, uniform=True)
    assert not result.settings
    assert len(result.notes) == 2
    assert all("2 closed heads stay" in note for note in result.notes)
    for output, wanted in zip(run(result.model, example), expected, strict=True):
        torch.testing.assert_close(output, wanted)


def test_models_of_timm_are_built_by_the_function_that_is_given() -> None:
    build = partial(
        class_of("timm", "create_model"),
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=2, num_classes=10,
    )  # fmt: skip
    torch.manual_seed(0)
    model, images = build().eval(), torch.randn(2, 3, 32, 32)
    add_gates(model, feed_forward=STATIC, example=images)
    close_half(model)
    result = compact(model, images, uniform=True, build=build)
    assert result.settings == {"mlp_ratio": 2}
    again = build(**result.settings).eval()
    again.load_state_dict(result.model.state_dict())
    assert torch.equal(again(images), result.model(images))


def test_without_equal_widths_a_folder_for_load_compact_is_written(tmp_path: Path) -> None:
    model, example = family("llama", feed_forward=STATIC)
    result = compact(model, example)
    with pytest.warns(UserWarning, match="compact with `uniform=True`"):
        result.save_pretrained(tmp_path)
    build = hugging_face("LlamaForCausalLM", **GROUPED)
    again = load_compact(build, tmp_path / "compact.safetensors")
    for output, wanted in zip(run(again.eval(), example), run(result.model, example), strict=True):
        assert torch.equal(output, wanted)


def test_what_cannot_be_rebuilt_is_refused() -> None:
    model, example = family("bert", feed_forward=STATIC)
    with pytest.raises(ValueError, match="`build` needs `uniform=True`"):
        compact(model, example, build=ZOO["bert"].build)
    model.adapter = nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match="the config of BertForSequenceClassification builds, but a"
    ):
        compact(model, example, uniform=True)
    with pytest.raises(ValueError, match="is not a Hugging Face model: use `save_compact`"):
        CompactModel(nn.Linear(1, 1)).save_pretrained("x")
