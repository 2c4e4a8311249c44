"""Keep the gradients of missing connections away from an optimizer, in every step."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dg_lightning.own_kernels import kernel_on
from dg_lightning.recorded import Recorded

from .connections import Connections
from .zeroing import keep_only

__all__ = ["GradientMask"]

_MOST_KEPT = 8


class GradientMask:
    """Lets no gradient reach the missing connections of some layers.

    Their weight, gradient and slots are 0, so every optimizer that works weight by weight leaves
    all of them at 0. It is called in every step, and on a GPU is one launch. Gradients are fresh in
    every step, and mostly lie where others lay before; what masks them there is kept.

    Args:
        connections: The layers.
    """

    def __init__(self, connections: Iterable[Connections]) -> None:
        self.connections = list(connections)
        self._weights: list[nn.Parameter] = []
        self._masks: list[Tensor] = []
        self._forget()

    def _forget(self) -> None:
        self._kept: dict[tuple[int, ...], Callable[[], None]] = {}  # by where gradients lie
        self._recorded = Recorded()
        self._refused = False  # by the kernel
        self._looked_at = -1

    def __call__(self) -> None:
        """Mask the gradients that there are."""
        if Connections.changes != self._looked_at:
            self._look()
        addresses = []
        for weight in self._weights:
            if (gradient := weight.grad) is None:
                self._mask()
                return
            addresses.append(gradient.data_ptr())
            # A weight that was converted, to another type or layout, lies elsewhere.
            addresses.append(weight.data_ptr())
        mask = self._kept.get((*addresses,))
        if mask is not None:
            mask()
        elif addresses:
            self._mask_elsewhere((*addresses,))

    def _look(self) -> None:
        """See which layers have all connections, and need no mask."""
        # What has not been counted yet is not waited for here.
        sparse = [c for c in self.connections if c.has_news or not c.full]
        masks = [c.mask for c in sparse]
        if list(map(id, masks)) != list(map(id, self._masks)):
            self._weights, self._masks = [c.weight for c in sparse], masks
            self._forget()
        self._looked_at = Connections.changes

    def _mask_elsewhere(self, addresses: tuple[int, ...]) -> None:
        """Mask gradients that lie where none lay before, and keep what does it."""
        gradients: list[Any] = [weight.grad for weight in self._weights]
        kernel = None if self._refused else _kernel_on(gradients[0].device)
        if kernel is not None:
            again = kernel(gradients, self._masks)
            if again is not None:
                if len(self._kept) == _MOST_KEPT:
                    del self._kept[next(iter(self._kept))]
                self._kept[addresses] = again
                return
            self._refused = True
        self._recorded(self._mask, gradients)

    def _mask(self) -> None:
        pairs = zip(self._weights, self._masks, strict=True)
        keep_only((g, mask) for weight, mask in pairs if (g := weight.grad) is not None)

    def __reduce__(self) -> Any:
        return type(self), (self.connections,)  # a copy has other layers, which lie elsewhere


def _kernel_on(device: torch.device) -> Any:
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    return kernel_on(device, "rewiring.mask_kernel", "masked_at_once", _try_kernel)


def _try_kernel(masked_at_once: Any, device: torch.device) -> None:
    ones = torch.ones(2, 2, device=device)
    masked_at_once([ones], [ones.bool()])
