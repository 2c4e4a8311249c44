"""Compares a model with what it was, while it is being changed."""

from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from dg_lightning.surgery.recording import arguments_of, call_model

__all__ = ["Watch"]


class Watch:
    """Looks at what a model computes: its outputs, and those of some of its modules.

    Args:
        model: The model.
        example: What it is called with. Inputs that are all equal, such as zeros, show too little,
            and are replaced by noise.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        self.model = model
        self.arguments = apply_to_collection(arguments_of(model, example), Tensor, _varied)

    def look(self, *names: str) -> list[Tensor]:
        """Return the outputs of the model and of some modules."""
        outputs: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            outputs.append(output)

        hooks = [self.model.get_submodule(name).register_forward_hook(keep) for name in names]
        try:
            args, kwargs = self.arguments
            return call_model(self.model, args, kwargs) + outputs
        finally:
            for hook in hooks:
                hook.remove()

    def is_same(self, expected: list[Tensor], *names: str) -> bool:
        """Return True if the outputs are those of an earlier look."""
        try:
            outputs = self.look(*names)
        except (RuntimeError, ValueError, AssertionError, IndexError, TypeError):
            return False  # sizes that do not fit
        return len(outputs) == len(expected) and all(map(_are_close, outputs, expected))


def _varied(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point() or tensor.numel() < 2 or tensor.min() < tensor.max():
        return tensor
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(tensor.shape, generator=generator, device="cpu").to(tensor)


def _are_close(output: Tensor, wanted: Tensor) -> bool:
    if output.shape != wanted.shape:
        return False
    tolerance = 1e-3 if wanted.dtype.itemsize >= 4 else 0.05
    typical = float(wanted.abs().float().median()) if wanted.numel() else 0.0  # whatever is masked
    close = torch.isclose(
        output.float(), wanted.float(), tolerance, 0.1 * tolerance * typical, equal_nan=True
    )
    return bool(close.all())
