"""The connections of one layer: its mask, kept true in weights and optimizer, and its figures."""

import itertools
import math
from collections.abc import Mapping
from typing import Any, ClassVar, cast
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dg_lightning.own_kernels import kernel_on

from .news import HEADER, News
from .optimizer_slots import fresh_slots, reset_slots
from .selection import counted
from .structures import Structure
from .zeroing import keep_only

__all__ = [
    "Connections",
    "change_all",
    "packed",
    "unpacked",
]

_numbers = itertools.count(1)
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

    changes: ClassVar[int] = (
        0  # another number after each of any layer: it is asked for in every step
    )

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
        self.left_out_at: int | None = None  # the last time that was left out, until it is told of
        self._churn = 0.0
        self._news: News | None = None  # of the last change, on a GPU, until they are read
        self._dead_ends: list[int] | None = None  # None until they are counted
        self._every = _even_step(self.mask.numel(), self.mask[0].numel())
        self._explore(packed(self._sample()).numpy())
        layer.connection_mask = self.mask
        self.apply()

    @property
    def count(self) -> int:
        """How many connections exist."""
        self.read_news()
        return self._count

    @property
    def churn(self) -> float:
        """The share of connections that the last change has made."""
        self.read_news()
        return self._churn

    @property
    def has_news(self) -> bool:
        """Whether the last change has counted something that has not been read."""
        return self._news is not None

    def read_news(self) -> None:
        """Take in what the last change has counted on a GPU, which is waited for here."""
        if self._news is None:
            return
        import numpy as np  # torch would wake its threads up for so little, to be in the way

        news, self._news = self._news.read(), None
        outputs = len(self.mask)
        inputs = self.mask.numel() // outputs
        count, same, made, _ = news[:HEADER].view("int64").tolist()
        ends, sample = news[HEADER : HEADER + inputs + outputs], news[HEADER + inputs + outputs :]
        live = np.count_nonzero(ends[:inputs]), np.count_nonzero(ends[inputs:])
        self._dead_ends = [int(inputs - live[0]), int(outputs - live[1])]
        if made:
            self._take_in([count, same], np.packbits(sample))
        else:
            self.left_out_at = self.changed_at

    def _take_in(self, counts: list[int], explored: Any) -> None:
        count, same = counts
        made = (self.mask.numel() - same + count - self._count) / 2
        self._count, self._churn = count, made / max(1, count)
        self._explore(self._explored | explored)

    def _explore(self, explored: Any) -> None:
        """Take a history of the sampled positions, eight a byte."""
        self._explored = explored
        # Python counts bits faster than numpy unpacks them; those that fill the last byte are 0.
        bits = int.from_bytes(explored.tobytes()).bit_count()
        self._share_explored = bits / math.ceil(self.mask.numel() / self._every)

    @property
    def full(self) -> bool:
        """Whether every connection exists."""
        if self._news is not None:
            self.read_news()
        return self._count == self.mask.numel()

    def move(self) -> None:
        """Follow the weight to its device."""
        if self.mask.device != self.weight.device:
            self.mask = self.mask.to(self.weight.device)
            self.layer.connection_mask = self.mask
            Connections.changes = next(_numbers)

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

    def _take(
        self, mask: Tensor, at_zero: list[Tensor] | None, only_if: Tensor | None
    ) -> Tensor | None:
        """Take a new mask; return where it is as before if weight and slots have yet to follow.

        They follow at once where a kernel can do it: `at_zero` are all of them, and all start at 0.
        """
        self.read_news()
        Connections.changes = next(_numbers)
        self._dead_ends = None
        later = _counts_later(mask)  # all that is asked of it at once: nothing waits for it here
        if later and at_zero is not None and mask.is_cuda:
            kernel = kernel_on(
                mask.device, "rewiring.rewire_kernel", "changed_at_once", _try_kernel
            )
            arguments = self.mask, mask, only_if, at_zero, self._every
            news = None if kernel is None else kernel(*arguments)
            if news is not None:
                self._news = News(news)
                return None
        if only_if is not None:
            mask = torch.where(only_if, mask, self.mask)
        same = mask == self.mask
        self.mask.copy_(mask)
        if later:
            counts = torch.stack((mask.flatten(), same.flatten())).sum(1)
            made = counts.new_ones(()) if only_if is None else only_if.to(counts.dtype)
            header = torch.cat((counts, made.expand(2))).view(
                torch.uint8
            )  # the last one fills it up
            sample = self._sample().view(torch.uint8)
            self._news = News(torch.cat((header, *self._live_ends(), sample)))
        elif only_if is None or only_if:
            self._take_in(counted(mask, same), packed(self._sample()).numpy())
        else:
            self.left_out_at = self.changed_at
        return same

    def figures(self) -> dict[str, float]:
        """Return what is logged of a layer.

        `itop` is the share of positions that have ever had a connection (in-time
        over-parameterization); in a layer of more than 65,536 weights, of an even sample of them.
        """
        self.read_news()
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
        self.read_news()
        return {
            "mask": packed(self.mask),
            "shape": list(self.mask.shape),
            "explored": torch.from_numpy(self._explored.copy()),
            "churn": self._churn,
            "changed_at": self.changed_at,
        }

    def __getstate__(self) -> dict[str, Any]:
        self.read_news()  # what is on its way can be neither copied nor pickled
        return self.__dict__

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        Connections.changes = next(_numbers)
        self.mask.copy_(unpacked(state["mask"], state["shape"]))
        (self._count,) = counted(self.mask)
        self._explore(state["explored"].cpu().clone().numpy())
        self._churn, self._news, self._dead_ends = state["churn"], None, None
        self.left_out_at = None
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
        if mask is c.mask:
            continue
        fresh = [] if optimizer is None else fresh_slots(optimizer, c.weight)
        at_zero = [c.weight, *(slot for slot, start in fresh if not start)]
        others = [(slot, start) for slot, start in fresh if start]
        same = c._take(mask, None if others else at_zero, only_if)
        if same is not None:
            kept += [(tensor, same) for tensor in at_zero]
            for slot, start in others:
                slot.masked_fill_(~same, start)
    keep_only(kept)


def _try_kernel(changed_at_once: Any, device: torch.device) -> None:
    mask, weight = torch.eye(2, device=device).bool(), torch.ones(2, 2, device=device)
    changed_at_once(mask, ~mask, None, [weight], 1)


def _counts_later(mask: Tensor) -> bool:
    return mask.is_cuda


def _even_step(positions: int, columns: int) -> int:
    """Return the step of a sample of positions, row by row, that meets all columns alike."""
    step = math.ceil(positions / _SAMPLED)
    while math.gcd(step, columns) > 1 and step > 1:
        step += 1
    return step


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
