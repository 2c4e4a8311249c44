"""Small versions of the architectures that people have, with random weights."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dg_lightning.surgery.recording import arguments_of, call_model

IMAGE = (2, 3, 32, 32)


@dataclass(frozen=True)
class Architecture:
    """A model, what it is called with, and what is to be found in it: numbers of gated maps."""

    build: Callable[[], nn.Module]
    example: Callable[[], Any]
    feed_forward: int = 0
    heads: int = 0
    channels: int = 0
    generates: bool = False


def run(model: nn.Module, example: Any) -> list[Tensor]:
    """Return the tensors that a model returns in evaluation mode."""
    return call_model(model, *arguments_of(model, example))


def images(size: int = 32) -> Callable[[], Tensor]:
    return lambda: torch.randn(2, 3, size, size)


def tokens(**others: Any) -> Callable[[], dict[str, Tensor]]:
    def example() -> dict[str, Tensor]:
        ids = torch.arange(14).reshape(2, 7) + 5
        return {"input_ids": ids, **dict.fromkeys(others, ids)}

    return example


def torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        models: Any = pytest.importorskip("torchvision.models")
        net: nn.Module = getattr(models, name)(num_classes=10, **options)
        return net

    return build


def timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        models: Any = pytest.importorskip("timm")
        net: nn.Module = models.create_model(name, num_classes=10, **options)
        return net

    return build


def mixer() -> nn.Module:
    pytest.importorskip("timm")
    kind = import_module("timm.models.mlp_mixer").MlpMixer
    net: nn.Module = kind(10, img_size=32, patch_size=8, num_blocks=2, embed_dim=48)
    return net


def hugging_face(name: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        pytest.importorskip("transformers")
        package = import_module("transformers")
        net: nn.Module = getattr(package, name)(getattr(package, config)(**options))
        return net

    return build


class GroupedAttention(nn.Module):
    """Attention whose heads share keys and values in groups."""

    def __init__(self, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        self.q, self.kv = nn.Linear(8, 2 * heads), nn.Linear(8, 4 * groups)
        self.out = nn.Linear(2 * heads, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, 2)).transpose(-2, -3)
        k, v = (
            part.unflatten(-1, (self.groups, 2))
            .transpose(-2, -3)
            .repeat_interleave(self.heads // self.groups, -3)
            for part in self.kv(x).chunk(2, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(mixed.transpose(-2, -3).flatten(-2))
        return out


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 24),
        nn.BatchNorm1d(24),
        nn.ReLU(),
        nn.Linear(24, 12),
        nn.Tanh(),
        nn.Linear(12, 3),
    )


SMALL_VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2}
TOKENS: dict[str, Any] = {"vocab_size": 50, "pad_token_id": 0}
BERT: dict[str, Any] = TOKENS | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}

ZOO = {
    "vit_b_16": Architecture(
        lambda: import_module("torchvision.models").VisionTransformer(
            32, 8, 2, 4, 48, 96, num_classes=10
        ),
        images(),
        feed_forward=2,
    ),
    "swin_t": Architecture(torchvision("swin_t"), images(64), feed_forward=12),
    "resnet18": Architecture(torchvision("resnet18"), images(64), channels=8),
    "resnet50": Architecture(torchvision("resnet50"), images(64), channels=32),
    "mobilenet_v3_small": Architecture(
        torchvision("mobilenet_v3_small"), images(64), feed_forward=12, channels=2
    ),
    "convnext_tiny": Architecture(torchvision("convnext_tiny"), images(64), feed_forward=18),
    "vit_tiny": Architecture(
        timm("vit_tiny_patch16_224", num_heads=3, **SMALL_VIT), images(), feed_forward=2, heads=2
    ),
    "deit3": Architecture(
        timm("deit3_small_patch16_224", num_heads=6, **SMALL_VIT), images(), feed_forward=2, heads=2
    ),
    "mixer": Architecture(mixer, images(), feed_forward=4),
    "bert": Architecture(
        hugging_face("BertForSequenceClassification", "BertConfig", **BERT),
        tokens(),
        feed_forward=3,
        heads=2,
    ),
    "gpt2": Architecture(
        hugging_face(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=50,
            n_embd=32,
            n_layer=2,
            n_head=4,
            bos_token_id=1,
            eos_token_id=2,
        ),
        tokens(),
        feed_forward=2,
        heads=2,
        generates=True,
    ),
    "llama": Architecture(
        hugging_face("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2, **BERT),
        tokens(),
        feed_forward=2,
        heads=2,
        generates=True,
    ),
    "t5": Architecture(
        hugging_face(
            "T5ForConditionalGeneration",
            "T5Config",
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            **TOKENS,
        ),
        tokens(decoder_input_ids=None),
        feed_forward=4,
        heads=2,
        generates=True,
    ),
    "hf_vit": Architecture(
        hugging_face(
            "ViTForImageClassification",
            "ViTConfig",
            image_size=32,
            patch_size=8,
            **{k: v for k, v in BERT.items() if k not in TOKENS},
        ),
        lambda: {"pixel_values": torch.randn(IMAGE)},
        feed_forward=2,
        heads=2,
    ),
    "encoder": Architecture(encoder, lambda: torch.randn(2, 5, 32), feed_forward=2),
    "mlp": Architecture(mlp, lambda: torch.randn(4, 8), feed_forward=2),
}
