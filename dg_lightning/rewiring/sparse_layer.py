"""Layers whose masks are applied to weights and optimizer state."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from dg_lightning.gates.protocol import protected_mask, set_connections

from .drop_and_grow import Structure, drop_and_grow

_AS_INTEGERS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


def zero_outside(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Zero the entries of tensors outside their masks.

    Each pair is a tensor and a bool mask of the same shape.

    >>> values = torch.tensor([1.0, torch.inf])
    >>> zero_outside([(values, torch.tensor([True, False]))])
    >>> values.tolist()
    [1.0, 0.0]
    """
    for values, mask in pairs:
        integers = _AS_INTEGERS.get(values.dtype)
        if integers is None:
            values.detach().masked_fill_(~mask, 0)
        else:
            # Integer products with 0 or 1 are exact, whereas multiplying floats would turn inf
            # into NaN. On a CPU, this takes a third as long as `masked_fill_`.
            values.detach().view(integers).mul_(mask.view(torch.uint8))


_SAMPLED = 2**16  # maximum number of positions tracked for the explored share

# Optimizers that keep a weight at 0 if its gradient and state are 0. Subclasses may not.
WEIGHT_BY_WEIGHT = frozenset({
    optim.ASGD, optim.Adadelta, optim.Adafactor, optim.Adagrad, optim.Adam, optim.AdamW,
    optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
})  # fmt: skip
# Optimizer state that does not start at 0, mapped to the option with its initial value.
_STARTS = {
    optim.Adagrad: {"sum": "initial_accumulator_value"},
    optim.Rprop: {"step_size": "lr"},
}


class SparseLayer:
    """A layer with a mask of existing connections.

    The weight remains a plain parameter, with exact zeros for missing connections. Its gradient
    stays dense, so it can also score missing connections. The mask is set on the layer
    (`gates.set_connections`) and changed in place.

    Args:
        name: The layer's name.
        layer: A linear or convolution layer.
        mask: Bool mask of existing connections, in the shape of the weight.
        structure: The structure of the connections.
    """

    def __init__(
        self, name: str, layer: nn.Module, mask: Tensor, structure: Structure | None = None
    ) -> None:
        self.name = name
        self.layer = layer
        self.structure = structure or Structure()
        self.weight = cast(nn.Parameter, layer.weight)
        self.mask = mask.to(self.weight.device, copy=True)
        self.changed_at = 0  # last step with a change or an attempted change
        self.churn = 0.0  # share of connections added by the last change
        self._stride = _even_stride(self.mask.numel(), self.mask[0].numel())
        self._explored = self._sample(self.mask).clone()
        self._take(self._counts(self.mask).tolist())
        self.apply()

    @property
    def full(self) -> bool:
        """Whether every connection exists."""
        return self.count == self.mask.numel()

    def move(self) -> None:
        """Move the mask to the device of the weight."""
        device = self.weight.device
        self.mask, self._explored = self.mask.to(device), self._explored.to(device)
        set_connections(self.layer, self.mask, self.count)

    def apply(self) -> None:
        """Set the weights of missing connections to exactly 0."""
        if not self.full:
            zero_outside([(self.weight, self.mask)])
        self._clean_version = self.weight._version

    def apply_if_changed(self) -> None:
        """Mask the weight again if it was changed in place since the last time."""
        if self.weight._version != self._clean_version:
            self.apply()

    def clean(self, optimizer: Optimizer) -> None:
        """Zero missing connections after a step, and reset their optimizer state if necessary."""
        self.apply()
        if type(optimizer) not in WEIGHT_BY_WEIGHT:
            reset_state(optimizer, self.weight, keep=self.mask)

    def check_not_replaced(self, live: Collection[nn.Module] | None = None) -> None:
        """Raise RuntimeError if the weight was replaced or the layer is not in `live`."""
        if self.layer.weight is not self.weight or (live is not None and self.layer not in live):
            raise RuntimeError(
                f"The weight of {self.name} was replaced during training (for example by "
                "torch.nn.utils.prune), so its mask is invalid: change the weight in place, or "
                "exclude the layer with `layers`."
            )

    def rewired_mask(self, keep: Tensor, grow: Tensor, fraction: float, exclude: bool) -> Tensor:
        """Rewire the mask with `drop_and_grow`, but keep protected connections."""
        protected = protected_mask(self.layer)
        if protected is not None:
            keep = keep + protected * (keep.max() + 1)
            grow = grow.masked_fill(protected, -1)
            fraction = min(fraction, int((self.mask & ~protected).sum()) / max(1, self.count))
        blocks = self.count // self.structure.block**2
        return drop_and_grow(self.mask, keep, grow, fraction, self.structure, exclude, blocks)

    def change(self, mask: Tensor, optimizer: Optimizer | None) -> None:
        """Apply a new mask with `change_connections`."""
        change_connections({self: mask}, optimizer)

    def _counts(self, mask: Tensor) -> Tensor:
        """Count the connections in a new mask. The counts stay on its device."""
        matrix = mask.flatten(1)
        explored = self._explored | self._sample(mask)
        made = mask & ~self.mask
        counted = (mask, made, ~matrix.any(0), ~matrix.any(1), explored)
        return torch.stack([torch.count_nonzero(values) for values in counted])

    def _take(self, counts: list[int]) -> None:
        """Store the counts of the current mask and update the layer."""
        self.count, made, self.dead_inputs, self.dead_outputs, explored = counts
        self.churn = made / max(1, self.count)
        self.explored_share = explored / len(self._explored)
        set_connections(self.layer, self.mask, self.count)

    def _sample(self, mask: Tensor) -> Tensor:
        return mask.flatten()[:: self._stride]

    def figures(self) -> dict[str, float]:
        """Return the figures to log.

        `explored` is the share of positions that have ever had a connection (in-time
        over-parameterization). For layers with more than 65,536 weights, it is estimated from an
        even sample of the positions.
        """
        return {
            "density": self.count / self.mask.numel(),
            "churn": self.churn,
            "explored": self.explored_share,
            "dead_inputs": float(self.dead_inputs),
            "dead_outputs": float(self.dead_outputs),
        }

    def checksum(self) -> int:
        """Return a checksum of the mask."""
        return crc32(pack_mask(self.mask).numpy().tobytes())

    def state_dict(self) -> dict[str, Any]:
        """Return the packed mask, and the figures that depend on earlier masks."""
        return {
            "mask": pack_mask(self.mask),
            "shape": list(self.mask.shape),
            "explored": pack_mask(self._explored),
            "churn": self.churn,
            "changed_at": self.changed_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`."""
        self.mask.copy_(unpack_mask(state["mask"], state["shape"]))
        self._explored = unpack_mask(state["explored"], self._explored.shape).to(self.mask.device)
        self._take(self._counts(self.mask).tolist())
        self.churn, self.changed_at = state["churn"], state["changed_at"]
        self.apply()


@torch.no_grad()
def change_connections(
    masks: Mapping[SparseLayer, Tensor],
    optimizer: Optimizer | None,
    scores: Sequence[Tensor] = (),
) -> bool:
    """Apply new masks to sparse layers.

    The weights of new and dropped connections become 0, and all other weights stay the same. This
    synchronises with the device once.

    Args:
        masks: The new mask of each layer.
        optimizer: The optimizer whose state is reset for changed connections, or None.
        scores: The scores that the masks are based on.

    Returns:
        False if a score is not finite, in which case nothing changes. Otherwise True.
    """
    counts = [layer._counts(mask).double() for layer, mask in masks.items()]
    # A sum in double precision is finite if and only if all scores are finite.
    sums = [score.sum(dtype=torch.float64).reshape(1) for score in scores]
    device = next((value.device for value in (*counts, *sums)), None)
    if device is None:
        return True
    read: list[float] = torch.cat([value.to(device) for value in (*counts, *sums)]).tolist()
    if not all(map(math.isfinite, read)):
        return False
    for index, (layer, mask) in enumerate(masks.items()):
        same = mask == layer.mask
        layer.mask.copy_(mask)
        layer._explored |= layer._sample(mask)
        layer._take([int(value) for value in read[5 * index : 5 * index + 5]])
        zero_outside([(layer.weight, same)])
        layer._clean_version = layer.weight._version
        if optimizer is not None:
            reset_state(optimizer, layer.weight, keep=same)
    if isinstance(optimizer, optim.LBFGS):
        optimizer.state.clear()  # its history mixes all weights
    return True


def parameter_state(optimizer: Optimizer, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
    """Yield the optimizer state tensors that have one value for each weight of a parameter."""
    for name, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            yield name, value


@torch.no_grad()
def reset_state(optimizer: Optimizer, parameter: nn.Parameter, keep: Tensor) -> None:
    """Reset the optimizer state of all weights outside `keep` to its initial value.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    >>> weight.grad = torch.ones(2)
    >>> optimizer.step()
    >>> reset_state(optimizer, weight, keep=torch.tensor([False, True]))
    >>> optimizer.state[weight]["momentum_buffer"].tolist()
    [0.0, 1.0]
    """
    starts = next((s for kind, s in _STARTS.items() if isinstance(optimizer, kind)), {})
    for name, value in parameter_state(optimizer, parameter):
        if name in starts:
            groups = optimizer.param_groups
            group = next(g for g in groups if any(p is parameter for p in g["params"]))
            value.masked_fill_(~keep, float(group[starts[name]]))
        else:
            zero_outside([(value, keep)])


def _even_stride(positions: int, columns: int) -> int:
    """Return a stride that samples flattened positions and visits all columns evenly."""
    stride = math.ceil(positions / _SAMPLED)
    while math.gcd(stride, columns) > 1 and stride > 1:
        stride += 1
    return stride


def pack_mask(mask: Tensor) -> Tensor:
    """Pack a mask with eight entries per byte.

    >>> pack_mask(torch.tensor([True, False, True])).tolist()
    [160]
    """
    return torch.from_numpy(np.packbits(mask.cpu().numpy()))


def unpack_mask(bits: Tensor, shape: Any) -> Tensor:
    """Unpack a mask of the given shape that `pack_mask` has packed."""
    values = np.unpackbits(bits.cpu().numpy(), count=math.prod(shape))
    return torch.from_numpy(values.astype(bool)).reshape(tuple(shape))
