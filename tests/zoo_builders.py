"""Builders and inputs of the architectures in `zoo`."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dg_lightning.surgery.recording import arguments_of, call_model

Build = Callable[[], nn.Module]


@dataclass(frozen=True)
class Architecture:
    """A model, what it is called with, and what is promised of it.

    Args:
        build: Returns the model.
        example: Returns what it is called with.
        feed_forward: Numbers of gated maps by kind; all 0 where nothing can be gated.
        heads: See above.
        channels: See above.
        notes: Number of gates whose closed units its class does not let go.
        uncounted: Whether it has modules with weights that multiply nothing, as tables.
        generates: Whether it generates text.
        resumes: Whether it is also trained with callbacks, and resumed.
    """

    build: Build
    example: Callable[[], Any]
    feed_forward: int = 0
    heads: int = 0
    channels: int = 0
    notes: int = 0
    uncounted: bool = False
    generates: bool = False
    resumes: bool = False

    @property
    def is_gated(self) -> bool:
        """Whether anything in it can be gated."""
        return self.feed_forward + self.heads + self.channels > 0


def run(model: nn.Module, example: Any) -> list[Tensor]:
    """Return the tensors that a model returns in evaluation mode."""
    return call_model(model, *arguments_of(model, example))


def class_of(package: str, path: str) -> Any:
    """Return a class of an optional package."""
    pytest.importorskip(package)
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"{package}.{module}" if module else package), name)


def torchvision(path: str, *args: Any, **options: Any) -> Build:
    return lambda: class_of("torchvision", f"models.{path}")(*args, **options)


def timm(path: str, *args: Any, **options: Any) -> Build:
    return lambda: class_of("timm", f"models.{path}")(*args, num_classes=10, **options)


def timm_model(name: str, **options: Any) -> Build:
    return lambda: class_of("timm", "create_model")(name, num_classes=10, **options)


def hugging_face(name: str, **options: Any) -> Build:
    def build() -> nn.Module:
        kind = class_of("transformers", name)
        net: nn.Module = kind(kind.config_class(**options))
        return net

    return build


def noise(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape)


def images(size: int = 32) -> Callable[[], Tensor]:
    return noise(2, 3, size, size)


def pixels(size: int = 32) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"pixel_values": torch.randn(2, 3, size, size)}


def tokens(*others: str) -> Callable[[], dict[str, Tensor]]:
    def example() -> dict[str, Tensor]:
        ids = torch.arange(14).reshape(2, 7) + 5
        return {"input_ids": ids, **dict.fromkeys(others, ids)}

    return example


def waves() -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 400)}


def captioned() -> dict[str, Tensor]:
    return tokens()() | pixels()()


def speech() -> dict[str, Tensor]:
    ids = tokens()()["input_ids"]
    return {"input_features": torch.randn(2, 8, 16), "decoder_input_ids": ids}


def resnet(block: str, **options: Any) -> Build:
    def build() -> nn.Module:
        kind = class_of("torchvision", "models.resnet.ResNet")
        layer = class_of("torchvision", f"models.resnet.{block}")
        net: nn.Module = kind(layer, [1, 1, 1, 1], num_classes=10, **options)
        return net

    return build


def regnet() -> nn.Module:
    widths = class_of("torchvision", "models.regnet.BlockParams").from_init_params
    params = widths(depth=4, w_0=16, w_a=8.0, w_m=2.0, group_width=8, se_ratio=0.25)
    kind = class_of("torchvision", "models.regnet.RegNet")
    net: nn.Module = kind(params, num_classes=10, stem_width=16)
    return net


def mobilenet_v3() -> nn.Module:
    layer = class_of("torchvision", "models.mobilenetv3.InvertedResidualConfig")
    layers = [
        layer(16, 3, 16, 16, True, "RE", 2, 1, 1.0),
        layer(16, 3, 64, 24, True, "HS", 2, 1, 1.0),
    ]
    net: nn.Module = class_of("torchvision", "models.MobileNetV3")(layers, 32, num_classes=10)
    return net


def convnext() -> nn.Module:
    layer = class_of("torchvision", "models.convnext.CNBlockConfig")
    layers = [layer(16, 32, 1), layer(32, None, 1)]
    net: nn.Module = class_of("torchvision", "models.ConvNeXt")(layers, num_classes=10)
    return net


def swin(version: str) -> Build:
    def build() -> nn.Module:
        module = "models.swin_transformer."
        net: nn.Module = class_of("torchvision", f"{module}SwinTransformer")(
            patch_size=[4, 4],
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=[4, 4],
            num_classes=10,
            block=class_of("torchvision", f"{module}SwinTransformerBlock{version}"),
            downsample_layer=class_of("torchvision", f"{module}PatchMerging{version}"),
        )
        return net

    return build


def mixer(**options: Any) -> Build:
    """Build an MlpMixer; options of classes are their names."""

    def build() -> nn.Module:
        kind = class_of("timm", "models.mlp_mixer.MlpMixer")
        classes = {
            key: class_of("timm", f"models.mlp_mixer.{value}") if key.endswith("layer") else value
            for key, value in options.items()
        }
        net: nn.Module = kind(10, img_size=32, patch_size=8, num_blocks=2, embed_dim=48, **classes)
        return net

    return build


def poolformer() -> nn.Module:
    pooling = class_of("timm", "models.metaformer.Pooling")
    kind = class_of("timm", "models.metaformer.MetaFormer")
    net: nn.Module = kind(num_classes=10, depths=(1, 1), dims=(16, 32), token_mixers=pooling)
    return net


def resnetv2() -> nn.Module:
    net: nn.Module = class_of("timm", "models.resnetv2.ResNetV2")(
        (1, 1),
        (32, 64),
        num_classes=10,
        stem_chs=16,
        conv_layer=class_of("timm", "layers.create_conv2d"),
        norm_layer=class_of("timm", "layers.BatchNormAct2d"),
    )
    return net


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


class GraphNet(nn.Module):
    """A graph convolution; neighbours come as a float matrix or as pairs of nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, neighbours: Tensor) -> Tensor:
        def mix(h: Tensor) -> Tensor:
            if neighbours.is_floating_point():
                return neighbours @ h
            return h.index_add(0, neighbours[1], h[neighbours[0]])

        return mix(self.second(mix(self.first(x)).relu()))


def graph_by_matrix() -> dict[str, Tensor]:
    return {"x": torch.randn(6, 8), "neighbours": (torch.rand(6, 6) > 0.5).float()}


def graph_by_pairs() -> dict[str, Tensor]:
    return {"x": torch.randn(6, 8), "neighbours": torch.randint(6, (2, 12))}


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
