"""The connections of one layer: its mask, kept true in weights and optimizer, and its figures."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dg_lightning.protocol import matching, plain_name
from dg_lightning.recorded import Recorded

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
        (self._count,) = counted(self.mask)
        self.changed_at = 0  # the last step after which connections were changed, or were to be
        self._churn = 0.0
        self._counts: list[int] | Tensor | None = None  # of the last change, until they are read
        self._explored = packed(self._sample())
        self._figures: dict[str, Tensor] | None = None
        layer.connection_mask = self.mask
        self.apply()

    @property
    def count(self) -> int:
        """How many connections exist."""
        self._read_counts()
        return self._count

    @property
    def churn(self) -> float:
        """The share of connections that the last change has made."""
        self._read_counts()
        return self._churn

    def _read_counts(self) -> None:
        """Take in what the last change has counted, on the device: it is waited for here."""
        if self._counts is None:
            return
        counts = self._counts.tolist() if isinstance(self._counts, Tensor) else self._counts
        (count, same), self._counts = counts, None
        made = (self.mask.numel() - same + count - self._count) / 2
        self._count, self._churn = count, made / max(1, count)

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
        self._read_counts()
        same = mask == self.mask
        if same.is_cuda:
            self._counts = torch.stack([torch.count_nonzero(m) for m in (mask, same)])
        else:
            self._counts = counted(mask, same)
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
            dead_inputs, dead_outputs = self._dead_ends()
            values = {
                "density": self.count / self.mask.numel(),
                "churn": self.churn,
                "itop": self._share_explored(),
                "dead_inputs": dead_inputs,
                "dead_outputs": dead_outputs,
            }
            self._figures = {key: torch.tensor(float(value)) for key, value in values.items()}
        return self._figures

    def _dead_ends(self) -> list[int]:
        """Count the inputs and outputs without any connection."""
        if self.full:
            return [0, 0]
        matrix = self.mask.flatten(1).view(torch.uint8)
        counts = [torch.count_nonzero(matrix.amax(axis)) for axis in (0, 1)]
        alive: list[int] = torch.stack(counts).tolist()
        return [matrix.shape[1] - alive[0], matrix.shape[0] - alive[1]]

    def _share_explored(self) -> float:
        # Python counts bits faster than numpy unpacks them; those that fill the last byte are 0.
        return int.from_bytes(self._explored.numpy().tobytes()).bit_count() / self._sample().numel()

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
            "churn": self.churn,
            "changed_at": self.changed_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.mask.copy_(unpacked(state["mask"], state["shape"]))
        (self._count,) = counted(self.mask)
        self._explored.copy_(state["explored"])
        self._churn, self._counts = state["churn"], None
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


def mask_gradients(connections: Iterable[Connections], recorded: Recorded | None = None) -> None:
    """Let no gradient reach missing connections.

    Their weight, gradient and slots are 0, so every optimizer that works weight by weight leaves
    all of them at 0. With `recorded`, in one launch where it is done again and again.
    """
    partial_layers = [c for c in connections if not c.full and c.weight.grad is not None]
    gradients: list[Any] = [c.weight.grad for c in partial_layers]
    if gradients:
        masks = [c.mask for c in partial_layers]
        (recorded or Recorded())(
            lambda: keep_only(zip(gradients, masks, strict=True)), [*gradients, *masks]
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
