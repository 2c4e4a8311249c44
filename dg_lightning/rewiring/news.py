"""What a change of connections has counted on a GPU, read when it need not be waited for."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["HEADER", "News"]

# Bytes at the beginning, numbers of eight each: the connections, the positions that are as before,
# whether the change was made, and nothing. Behind them are a byte for each input and each output,
# not 0 where it has a connection, and one for each position of a sample.
HEADER = 32


class News:
    """What was counted, on its way from a device to the host.

    Args:
        counted: Bytes.
    """

    def __init__(self, counted: Tensor) -> None:
        self._bytes = counted.to("cpu", non_blocking=True)
        self._arrived: Any = None
        if counted.is_cuda:
            self._arrived = torch.cuda.current_stream(counted.device).record_event()

    def read(self) -> Any:
        """Return them as an array, when they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._bytes.numpy()
