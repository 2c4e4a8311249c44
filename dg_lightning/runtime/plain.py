"""A net from its recipe: this file needs torch, and safetensors to load; nothing of dg_lightning.

`dg-lightning export --format safetensors` copies this file next to the weights:

    from load_net import load
    net = load("model.safetensors")
"""

import json
from typing import Any

import torch
from torch import Tensor, nn


class Select(nn.Module):
    """Selects some of the inputs."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("index", torch.zeros(size, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Return the selected inputs."""
        return torch.index_select(x, 1, self.index)  # type: ignore[arg-type]


class Mask(nn.Module):
    """Sets some of the inputs to 0."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Return the masked inputs."""
        return x * self.mask  # type: ignore[operator]


class GatedStep(nn.Module):
    """A hidden layer whose gates depend on the input.

    Args:
        inputs: Number of inputs.
        outputs: Number of units.
        block: Number of adjacent units that share a gate.
        gate: Hidden widths of the gate network.
        relu: Whether the gate network has ReLU between its layers.
        activation: Name of the activation.
        norm: Whether a layer norm precedes the activation.
        temperature: Divisor of the logits.
        shift: Offset subtracted from the logits after the division.
        threshold: A gate is open if p is above this value.
        k: Number of gates to open instead of using the threshold, or None.
        floor: Minimum number of open gates.
        scaled: Whether open units are multiplied by their p.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        block: int,
        gate: list[int],
        relu: bool,
        activation: str,
        norm: bool,
        temperature: float,
        shift: float,
        threshold: float,
        k: int | None,
        floor: int,
        scaled: bool = False,
    ) -> None:
        super().__init__()
        self.scaled = scaled
        self.block, self.relu, self.k, self.floor = block, relu, k, floor
        self.temperature, self.shift, self.threshold = temperature, shift, threshold
        self.linear = nn.Linear(inputs, outputs)
        self.norm = nn.LayerNorm(outputs) if norm else nn.Identity()
        self.activation = _ACTIVATIONS[activation]()
        widths = [inputs, *gate, outputs // block]
        self.gate = nn.ModuleList(map(nn.Linear, widths, widths[1:]))

    def probability(self, x: Tensor) -> Tensor:
        """Return each gate's p, in the precision of the gate's weights."""
        z = x.to(self.gate[0].weight.dtype)  # type: ignore[arg-type]
        for index, layer in enumerate(self.gate):
            z = layer(torch.relu(z) if index and self.relu else z)
        return torch.sigmoid(z / self.temperature - self.shift)

    def forward(self, x: Tensor) -> Tensor:
        """Return the units, which are 0 where gates are closed."""
        p = self.probability(x)
        is_open = p > self.threshold if self.k is None else torch.zeros_like(p, dtype=torch.bool)
        least = max(self.k or 0, self.floor)
        # Most samples open enough gates without top-k, but a traced program cannot check that.
        checks = least > 0 and self.k is None and not torch.compiler.is_compiling()
        if least and not (checks and bool((is_open.sum(-1) >= least).all())):
            is_open = is_open | _top_k_mask(p, least)
        gate = is_open * p if self.scaled else is_open
        if self.block > 1:
            gate = gate.repeat_interleave(self.block, -1)
        hidden: Tensor = self.activation(self.norm(self.linear(x)))
        return hidden * (gate.to(hidden.dtype) if self.scaled else gate)


def _top_k_mask(p: Tensor, count: int) -> Tensor:
    """Return a mask of the largest entries, with ties resolved by index."""
    last = p.topk(count, dim=-1).values[:, -1:]
    above, tied = p > last, p == last
    missing = count - above.sum(-1, keepdim=True)
    return above | (tied & (tied.long().cumsum(-1) <= missing))


_ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}
_STEPS: dict[str, Any] = {
    **_ACTIVATIONS,
    "flatten": nn.Flatten,
    "gated": GatedStep,
    "layer_norm": nn.LayerNorm,
    "linear": nn.Linear,
    "mask": Mask,
    "select": Select,
}


def build_plain(steps: list[dict[str, Any]]) -> nn.Sequential:
    """Build the net that a recipe describes, without loading weights."""
    made = [dict(step) for step in steps]
    return nn.Sequential(*(_STEPS[step.pop("kind")](**step) for step in made)).eval()


def load(path: str) -> nn.Sequential:
    """Load a net from a safetensors file with a recipe in its header.

    `net.preparation` describes how data becomes inputs: features, scaling and class names.
    """
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        about = file.metadata()
        recipe = json.loads(about["recipe"])
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if recipe["format"] != 1:
        raise ValueError(f"{path} has format {recipe['format']}, expected 1: export it again.")
    net = build_plain(recipe["steps"])
    net.load_state_dict(weights)
    net.preparation = json.loads(about.get("preparation", "null"))
    return net
