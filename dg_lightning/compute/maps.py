"""Linear maps, however they are written: `nn.Linear`, convolutions, Hugging Face's `Conv1D`."""

from typing import Any

from torch import Tensor, nn

__all__ = [
    "as_matrix",
    "is_linear_map",
    "knows_positions",
    "positions",
    "set_positions",
    "unit_axis",
    "weight_axes",
]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_POSITIONS = "dg_positions"  # the attribute of a module


def is_linear_map(module: nn.Module) -> bool:
    """Return True for a module that multiplies by its weight and does nothing else.

    A subclass with a `forward` of its own may do anything, and so may a convolution that is none of
    torch's. Convolutions in groups are left out: an
    output depends on some of the inputs only.

    >>> is_linear_map(nn.Conv2d(3, 8, 3)), is_linear_map(nn.Conv2d(8, 8, 3, groups=8))
    (True, False)
    """
    if "weight" not in dict(module.named_parameters(recurse=False)):
        return False  # it is made of others, as by weight_norm or pruning
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    if isinstance(module, _CONVOLUTIONS):
        return type(module) in _CONVOLUTIONS and module.groups == 1
    return _is_transposed(module)


def _is_transposed(module: nn.Module) -> bool:
    """Return True for the linear layer of GPT-2 in Hugging Face: its weight is `(in, out)`."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def as_matrix(module: Any, tensor: Tensor) -> Tensor:
    """Return a tensor of the shape of a map's weight as ``(outputs, inputs, kernel)``, a view."""
    return tensor.T.unsqueeze(-1) if _is_transposed(module) else tensor.unsqueeze(-1).flatten(2)


def weight_axes(module: nn.Module) -> tuple[int, int]:
    """Return the axes of a map's weight that belong to its outputs and to its inputs."""
    return (1, 0) if _is_transposed(module) else (0, 1)


def unit_axis(module: nn.Module) -> int:
    """Return the axis of a map's inputs and outputs along which its units lie, from the end."""
    return -1 - len(module.kernel_size) if isinstance(module, _CONVOLUTIONS) else -1


def positions(module: nn.Module) -> int:
    """Return how often a map runs for a sample, as far as known, otherwise 1."""
    count: int = getattr(module, _POSITIONS, 1)
    return count


def knows_positions(module: nn.Module) -> bool:
    """Return True if it is known how often a map runs for a sample."""
    return _POSITIONS in vars(module)


def set_positions(module: nn.Module, count: int | None) -> None:
    """Set how often a map runs for a sample; None if that is not known.

    Stored as a plain attribute, so the module's state dict does not change.
    """
    vars(module).pop(_POSITIONS, None)
    if count is not None:
        vars(module)[_POSITIONS] = count
