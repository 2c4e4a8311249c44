"""The connections of one layer: its mask, kept true in weights and optimizer, and its figures."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dg_lightning.protocol import matching, plain_name

from .optimizer_slots import reset_slots, slots_to_keep
from .selection import counted
from .structures import Structure
from .update import largest_mask
from .zeroing import keep_only

__all__ = [
    "Connections",
    "change_all",
    "generator_for",
    "initial_mask",
    "packed",
    "read_news",
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
        self.changes = 0  # how often they were
        self.left_out = False  # whether the last time was left out, as far as it is known by now
        self._churn = 0.0
        self._news: Tensor | None = None  # of the last change, on a GPU, until they are read
        self._dead_ends: list[int] | None = None  # None until they are counted
        self._every = _even_step(self.mask.numel(), self.mask[0].numel())
        self._explore(packed(self._sample()))
        layer.connection_mask = self.mask
        self.apply()

    @property
    def count(self) -> int:
        """How many connections exist."""
        self._read_news()
        return self._count

    @property
    def churn(self) -> float:
        """The share of connections that the last change has made."""
        self._read_news()
        return self._churn

    @property
    def has_news(self) -> bool:
        """Whether the last change has counted something that has not been read."""
        return self._news is not None

    def _read_news(self) -> None:
        """Take in what the last change has counted on a GPU, which is waited for here."""
        if self._news is not None:
            read_news([self])

    def _take_in_news(self, news: Any) -> None:
        self._news = None
        rows, columns = self.mask.flatten(1).shape
        ends = news[17 : 17 + columns + rows]
        self._dead_ends = [int((part == 0).sum()) for part in (ends[:columns], ends[columns:])]
        self.left_out = not news[16]
        sample = torch.from_numpy(news[17 + columns + rows :])
        self._take_in(news[:16].view("int64").tolist(), sample)

    def _take_in(self, counts: list[int], sample: Tensor) -> None:
        count, same = counts
        made = (self.mask.numel() - same + count - self._count) / 2
        self._count, self._churn = count, made / max(1, count)
        self._explore(self._explored | packed(sample))

    def _explore(self, explored: Tensor) -> None:
        """Take a history of the sampled positions."""
        self._explored = explored
        # Python counts bits faster than numpy unpacks them; those that fill the last byte are 0.
        bits = int.from_bytes(explored.numpy().tobytes()).bit_count()
        self._share_explored = bits / len(self._sample())

    @property
    def full(self) -> bool:
        """Whether every connection exists."""
        if self._news is not None:
            self._read_news()
        return self._count == self.mask.numel()

    def move(self) -> None:
        """Follow the weight to its device."""
        if self.mask.device != self.weight.device:
            self.mask = self.mask.to(self.weight.device)
            self.layer.connection_mask = self.mask

    def apply(self) -> None:
        """Set the weights of missing connections to exactly 0."""
        keep_only([(self.weight, self.mask)])

    def clean(self, optimizer: Optimizer) -> None:
        """Bring weights and slots of missing connections back to what they start with."""
        self.apply()
        reset_slots(optimizer, self.weight, but=self.mask)

    def change(self, mask: Tensor, optimizer: Optimizer | None) -> None:
        """Take a new mask: what is new or gone starts at 0, what stays is not touched."""
        change_all({self: mask}, optimizer)

    def _take(self, mask: Tensor, only_if: Tensor | None) -> Tensor:
        """Take a new mask, and return where it is as before."""
        self._read_news()
        self.changes += 1
        if only_if is not None:
            mask = torch.where(only_if, mask, self.mask)
        same = mask == self.mask
        self.mask.copy_(mask)
        self._dead_ends, self.left_out = None, False
        if _counts_later(mask):  # all that is asked of it at once: nothing waits for it here
            counts = torch.stack((mask.flatten(), same.flatten())).sum(1)
            made = same.new_ones(1) if only_if is None else only_if.view(1)
            sample = self._sample().view(torch.uint8)
            parts = counts.view(torch.uint8), made.view(torch.uint8), *self._live_ends(), sample
            self._news = torch.cat(parts)
        else:
            self.left_out = only_if is not None and not only_if
            self._take_in(counted(mask, same), self._sample())
        return same

    def figures(self) -> dict[str, float]:
        """Return what is logged of a layer.

        `itop` is the share of positions that have ever had a connection (in-time
        over-parameterization); in a layer of more than 65,536 weights, of an even sample of them.
        """
        self._read_news()
        if self._dead_ends is None:
            self._dead_ends = [len(ends) - counted(ends)[0] for ends in self._live_ends()]
        return {
            "density": self._count / self.mask.numel(),
            "churn": self._churn,
            "itop": self._share_explored,
            "dead_inputs": float(self._dead_ends[0]),
            "dead_outputs": float(self._dead_ends[1]),
        }

    def _live_ends(self) -> tuple[Tensor, Tensor]:
        """Mark the inputs and the outputs with a connection."""
        matrix = self.mask.flatten(1).view(torch.uint8)  # of which the largest is soon found
        return matrix.amax(0), matrix.amax(1)

    def checksum(self) -> int:
        """Return a number that is the same where the connections are."""
        return crc32(packed(self.mask).numpy().tobytes())

    def _sample(self) -> Tensor:
        return self.mask.flatten()[:: self._every]

    def state_dict(self) -> dict[str, Any]:
        """Return the mask, eight connections a byte, and the figures that have a history."""
        self._read_news()
        return {
            "mask": packed(self.mask),
            "shape": list(self.mask.shape),
            "explored": self._explored.clone(),
            "churn": self._churn,
            "changed_at": self.changed_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.changes += 1
        self.mask.copy_(unpacked(state["mask"], state["shape"]))
        (self._count,) = counted(self.mask)
        self._explore(state["explored"].cpu().clone())
        self._churn, self._news, self._dead_ends = state["churn"], None, None
        self.changed_at = state["changed_at"]
        self.apply()


@torch.no_grad()
def change_all(
    masks: Mapping[Connections, Tensor], optimizer: Optimizer | None, only_if: Tensor | None = None
) -> None:
    """Give layers new masks: what is new or gone starts at 0, what stays is not touched.

    Args:
        masks: The new masks.
        optimizer: Whose slots start anew.
        only_if: A bool on the device of the layers; if it is not set, nothing changes.
    """
    kept: list[tuple[Tensor, Tensor]] = []
    for c, mask in masks.items():
        if mask is not c.mask:
            same = c._take(mask, only_if)
            kept.append((c.weight, same))
            if optimizer is not None:
                kept += slots_to_keep(optimizer, c.weight, but=same)
    keep_only(kept)


def read_news(connections: Iterable[Connections]) -> None:
    """Read what was counted on a GPU when layers were changed; waits for it once."""
    unread = [(c, c._news) for c in connections if c._news is not None]
    if unread:
        # By numpy: threads that torch wakes up for so little go on to be in the way of others.
        together = torch.cat([news for _, news in unread]).cpu().numpy()
        for c, news in unread:
            c._take_in_news(together[: len(news)])
            together = together[len(news) :]


def _counts_later(mask: Tensor) -> bool:
    return mask.is_cuda


def _even_step(positions: int, columns: int) -> int:
    """Return the step of a sample of positions, row by row, that meets all columns alike."""
    step = math.ceil(positions / _SAMPLED)
    while math.gcd(step, columns) > 1 and step > 1:
        step += 1
    return step


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
