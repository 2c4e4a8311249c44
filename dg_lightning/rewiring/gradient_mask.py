"""Keep the gradients of missing connections away from an optimizer, in every step."""

from collections.abc import Callable, Iterable

from torch import nn

from dg_lightning.recorded import Recorded

from .connections import Connections
from .zeroing import keep_only

__all__ = ["GradientMask"]


class GradientMask:
    """Lets no gradient reach the missing connections of some layers.

    Their weight, gradient and slots are 0, so every optimizer that works weight by weight leaves
    all of them at 0. It is called in every step, and on a GPU is one launch.

    Args:
        connections: The layers.
    """

    def __init__(self, connections: Iterable[Connections]) -> None:
        self.connections = list(connections)
        self._sparse: list[Connections] = []
        self._weights: list[nn.Parameter] = []
        self._recorded = Recorded()
        self._addresses: list[int] = []  # where gradients lay in the last step
        self._replay: Callable[[], None] | None = None  # what masks them there
        self._looked_at = -1

    def __call__(self) -> None:
        """Mask the gradients that there are."""
        changes = 0
        for c in self.connections:
            changes += c.changes
        if changes != self._looked_at:
            self._look()
            self._looked_at = changes
        gradients, addresses = [], []
        for weight in self._weights:
            if (gradient := weight.grad) is None:
                self._mask()
                return
            gradients.append(gradient)
            addresses.append(gradient.data_ptr())
        if addresses == self._addresses and self._replay is not None:
            self._replay()  # as in the step before
        elif gradients:
            self._recorded(self._mask, gradients)
            self._addresses, self._replay = addresses, self._recorded.replay_of(gradients)

    def _look(self) -> None:
        """See which layers have all connections, and need no mask."""
        # What has not been counted yet is not waited for here.
        sparse = [c for c in self.connections if c.has_news or not c.full]
        if sparse != self._sparse:
            self._sparse, self._weights = sparse, [c.weight for c in sparse]
            self._recorded, self._replay = Recorded(), None

    def _mask(self) -> None:
        keep_only((g, c.mask) for c in self._sparse if (g := c.weight.grad) is not None)
