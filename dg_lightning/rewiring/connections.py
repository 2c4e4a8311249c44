"""The connections of one layer: its mask, kept true in weights and optimizer, and its figures."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dg_lightning.protocol import matching, plain_name

from .optimizer_slots import reset_slots
from .selection import counted
from .structures import Structure
from .update import largest_mask
from .zeroing import keep_only

__all__ = [
    "Connections",
    "generator_for",
    "initial_mask",
    "mask_gradients",
    "packed",
    "sparse_layers",
    "unpacked",
]

_SAMPLED = 2**16  # positions whose history is followed, for the share that was ever explored


class Connections:
    """A layer with a mask of the connections that exist.

    The weight stays a plain parameter that holds exact zeros, and the gradient is taken of it as a
    whole, so that it tells what a missing connection would do. The mask is announced in the plain
    attribute `connection_mask` of the layer, and is changed in place.

    Args:
        name: The layer's name.
        layer: A linear or convolution layer.
        mask: The connections that exist, bool, of the shape of the weight.
        structure: What they keep to.
    """

    def __init__(
        self, name: str, layer: nn.Module, mask: Tensor, structure: Structure | None = None
    ) -> None:
        self.name = name
        self.layer = layer
        self.structure = structure or Structure()
        self.weight = cast(nn.Parameter, layer.weight)
        self.mask = mask.to(self.weight.device, copy=True)
        (self.count,) = counted(self.mask)
        self.changed_at = 0  # the last step after which connections were changed, or were to be
        self.churn = torch.zeros(())
        self._explored = packed(self._sample())
        self._figures: dict[str, Tensor] | None = None
        layer.connection_mask = self.mask
        self.apply()

    @property
    def full(self) -> bool:
        """Whether every connection exists."""
        return self.count == self.mask.numel()

    def move(self) -> None:
        """Follow the weight to its device."""
        if self.mask.device != self.weight.device:
            self.mask = self.mask.to(self.weight.device)
            self.layer.connection_mask = self.mask
        self._figures = None

    def apply(self) -> None:
        """Set the weights of missing connections to exactly 0."""
        keep_only([(self.weight, self.mask)])

    def clean(self, optimizer: Optimizer) -> None:
        """Bring weights and slots of missing connections back to what they start with."""
        self.apply()
        reset_slots(optimizer, self.weight, but=self.mask)

    @torch.no_grad()
    def change(self, mask: Tensor, optimizer: Optimizer | None) -> None:
        """Take a new mask: what is new or gone starts at 0, what stays is not touched."""
        if mask is self.mask:  # nothing has changed
            return
        same = mask == self.mask
        self.count, new = counted(mask, mask > self.mask)
        self.churn = torch.tensor(new / max(1, self.count))
        self.mask.copy_(mask)
        keep_only([(self.weight, same)])
        if optimizer is not None:
            reset_slots(optimizer, self.weight, but=same)
        self._explored |= packed(self._sample())
        self._figures = None

    def figures(self) -> dict[str, Tensor]:
        """Return what is logged of a layer; it is counted once a change.

        `itop` is the share of positions that have ever had a connection (in-time
        over-parameterization); in a layer of more than 65,536 weights, of an even sample of them.
        """
        if self._figures is None:
            matrix = self.mask.flatten(1).view(torch.uint8)
            self._figures = {
                "density": torch.tensor(self.count / matrix.numel()),
                "churn": self.churn,
                "itop": self._share_explored(),
                "dead_inputs": (matrix.amax(0) == 0).sum(dtype=torch.float32),
                "dead_outputs": (matrix.amax(1) == 0).sum(dtype=torch.float32),
            }
        return self._figures

    def _share_explored(self) -> Tensor:
        import numpy as np

        # Not by torch, which wakes all threads of a CPU for it: 7 ms on a machine with many.
        bits = np.unpackbits(self._explored.numpy(), count=self._sample().numel())
        return torch.tensor(bits.mean(), dtype=torch.float32)

    def checksum(self) -> int:
        """Return a number that is the same where the connections are."""
        return crc32(packed(self.mask).numpy().tobytes())

    def _sample(self) -> Tensor:
        # A step without a common divisor with the rows' length meets all columns alike.
        step = math.ceil(self.mask.numel() / _SAMPLED)
        while math.gcd(step, self.mask[0].numel()) > 1 and step > 1:
            step += 1
        return self.mask.flatten()[::step]

    def state_dict(self) -> dict[str, Any]:
        """Return the mask, eight connections a byte, and the figures that have a history."""
        return {
            "mask": packed(self.mask),
            "shape": list(self.mask.shape),
            "explored": self._explored.clone(),
            "churn": float(self.churn),
            "changed_at": self.changed_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.mask.copy_(unpacked(state["mask"], state["shape"]))
        (self.count,) = counted(self.mask)
        self._explored.copy_(state["explored"])
        self.churn.fill_(state["churn"])
        self.changed_at = state["changed_at"]
        self._figures = None
        self.apply()


def sparse_layers(
    module: nn.Module, layers: list[str] | None, without: set[nn.Module]
) -> dict[str, nn.Module]:
    """Find linear and convolution layers by name pattern, each weight once.

    Without patterns, frozen ones are left out.

    Raises:
        ValueError: If there is none, a pattern fits none, or a weight is not a plain parameter.
    """
    found: dict[str, nn.Module] = {}
    weights: list[Any] = []
    for name, child in module.named_modules():
        kind = isinstance(child, nn.Linear | nn.modules.conv._ConvNd)
        if not kind or child in without:
            continue
        weight: Any = child.weight
        frozen = layers is None and not weight.requires_grad
        if not frozen and not any(weight is other for other in weights):
            weights.append(weight)
            found[plain_name(name)] = child
    if not found:
        raise ValueError(
            f"There is no layer to make sparse in {type(module).__name__}: nn.Linear or nn.Conv* "
            "are looked for, outside of gates and not frozen."
        )
    chosen = matching(found, layers, "layer")
    for name, child in chosen.items():
        if child._parameters.get("weight") is None:
            raise ValueError(
                f"The weight of {name} is not a plain parameter: make a pruning permanent with "
                "torch.nn.utils.prune.remove (and take its masks along with masks_of_pruned), "
                "remove the parametrization, or leave the layer out with `layers`."
            )
    return chosen


def mask_gradients(connections: Iterable[Connections]) -> None:
    """Let no gradient reach missing connections.

    Their weight, gradient and slots are 0, so every optimizer that works weight by weight leaves
    all of them at 0.
    """
    keep_only(
        (c.weight.grad, c.mask) for c in connections if not c.full and c.weight.grad is not None
    )


def generator_for(seed: int | None, name: str, step: int, device: torch.device) -> torch.Generator:
    """Return a generator that is the same on every process, for one layer at one step."""
    generator = torch.Generator(device)
    generator.manual_seed(crc32(f"{seed} {name} {step}".encode()))
    return generator


def initial_mask(
    weight: Tensor, density: float, structure: Structure, generator: torch.Generator | None
) -> Tensor:
    """Draw connections at random with a generator, or take those of the largest weights."""
    if generator is None:
        return largest_mask(weight.detach().abs(), density, structure)
    scores = torch.rand(weight.shape, generator=generator, device=weight.device)
    return largest_mask(scores, density, structure)


def packed(mask: Tensor) -> Tensor:
    """Write a mask with eight entries a byte.

    >>> packed(torch.tensor([True, False, True])).tolist()
    [160]
    """
    import numpy as np

    return torch.from_numpy(np.packbits(mask.cpu().numpy()))


def unpacked(bits: Tensor, shape: Any) -> Tensor:
    """Read what `packed` has written."""
    import numpy as np

    values = np.unpackbits(bits.cpu().numpy(), count=math.prod(shape))
    return torch.from_numpy(values.astype(bool)).reshape(tuple(shape))
