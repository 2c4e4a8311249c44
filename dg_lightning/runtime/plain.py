"""A net from its recipe: this file needs torch, and safetensors to load; nothing of dg_lightning.

`dg-lightning export --format safetensors` puts a copy of it beside the weights:

    from load_net import load
    net = load("model.safetensors")
"""

import json
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["GatedStep", "Mask", "Select", "build", "load"]


class Select(nn.Module):
    """Keeps some of the inputs."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("index", torch.zeros(size, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Return the entries that are kept."""
        return torch.index_select(x, 1, self.index)  # type: ignore[arg-type]


class Mask(nn.Module):
    """Makes some of the inputs 0."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Return the inputs, 0 where the mask is."""
        return x * self.mask  # type: ignore[operator]


class GatedStep(nn.Module):
    """A hidden layer whose gates depend on the input.

    Args:
        inputs: Width of the layer before.
        outputs: Number of units.
        block: How many neighbouring units share a gate.
        gate: Widths of the gate's network between its input and its gates; `relu` between them.
        relu: Whether the gate's network has ReLU between its maps.
        activation: Nonlinearity.
        norm: Whether a layer norm stands before it.
        temperature: What logits are divided by.
        shift: What is taken off them then.
        threshold: Above this p a gate is open.
        k: How many gates are open, whatever the threshold; None is no such rule.
        floor: How many are open at least.
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
    ) -> None:
        super().__init__()
        self.block, self.relu, self.k, self.floor = block, relu, k, floor
        self.temperature, self.shift, self.threshold = temperature, shift, threshold
        self.linear = nn.Linear(inputs, outputs)
        self.norm = nn.LayerNorm(outputs) if norm else nn.Identity()
        self.activation = _ACTIVATIONS[activation]()
        widths = [inputs, *gate, outputs // block]
        self.gate = nn.ModuleList(map(nn.Linear, widths, widths[1:]))

    def probability(self, x: Tensor) -> Tensor:
        """Return p of each gate, in the precision of the gate's weights."""
        z = x.to(self.gate[0].weight.dtype)  # type: ignore[arg-type]
        for index, layer in enumerate(self.gate):
            z = layer(torch.relu(z) if index and self.relu else z)
        return torch.sigmoid(z / self.temperature - self.shift)

    def forward(self, x: Tensor) -> Tensor:
        """Return the units, 0 where their gate is closed."""
        p = self.probability(x)
        is_open = p > self.threshold if self.k is None else torch.zeros_like(p, dtype=torch.bool)
        least = max(self.k or 0, self.floor)
        # Most samples open enough by themselves; a program that is written down cannot look.
        looks = least > 0 and self.k is None and not torch.compiler.is_compiling()
        if least and not (looks and bool((is_open.sum(-1) >= least).all())):
            is_open = is_open | _largest(p, least)
        if self.block > 1:
            is_open = is_open.repeat_interleave(self.block, -1)
        hidden: Tensor = self.activation(self.norm(self.linear(x))) * is_open
        return hidden


def _largest(p: Tensor, count: int) -> Tensor:
    """Mark the largest; of equal ones the first win."""
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


def build(steps: list[dict[str, Any]]) -> nn.Sequential:
    """Make the net of a recipe's steps; its weights are not set."""
    made = [dict(step) for step in steps]
    return nn.Sequential(*(_STEPS[step.pop("kind")](**step) for step in made)).eval()


def load(path: str) -> nn.Sequential:
    """Load the net of a file of weights, whose recipe is in its header.

    `net.preparation` says how data becomes its inputs: features, scaling, names of the classes.
    """
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        about = file.metadata()
        recipe = json.loads(about["recipe"])
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if recipe["format"] != 1:
        raise ValueError(f"{path} has format {recipe['format']}; this file reads format 1.")
    net = build(recipe["steps"])
    net.load_state_dict(weights)
    net.preparation = json.loads(about.get("preparation", "null"))
    return net
