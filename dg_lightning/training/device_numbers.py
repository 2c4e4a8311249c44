"""Numbers that change from step to step, where captured steps can read them."""

from torch import Tensor

__all__ = ["DeviceNumbers"]


class DeviceNumbers:
    """Lists of numbers as tensors that keep their place on a device.

    A captured step reads the tensors of the step that was recorded, so numbers are written into
    them, and only those that have changed: nothing waits for the device.

    >>> import torch
    >>> numbers = DeviceNumbers()
    >>> numbers.set("weight", [0.1])
    >>> tensor = numbers.get("weight", torch.zeros(()))
    >>> numbers.set("weight", [0.5])
    >>> tensor
    tensor([0.5000])
    """

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self._tensors: dict[str, Tensor] = {}

    def set(self, name: str, values: list[float]) -> None:
        """Set the numbers of a name."""
        before, self._values[name] = self._values.get(name, []), values
        if name not in self._tensors or before == values:
            return
        if len(before) != len(values):
            del self._tensors[name]
            return
        for entry, old, new in zip(self._tensors[name], before, values, strict=True):
            if old != new:
                entry.fill_(new)

    def get(self, name: str, like: Tensor) -> Tensor:
        """Return the numbers of a name, with the device and dtype that a tensor has."""
        known = self._tensors.get(name)
        if known is None or (known.device, known.dtype) != (like.device, like.dtype):
            known = self._tensors[name] = like.new_tensor(self._values[name])
        return known
