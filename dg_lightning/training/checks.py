"""Checks of a classifier: its settings, and the sizes and class weights of its data."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dg_lightning.training.optimizers import unscales_itself

__all__ = [
    "balanced_weights",
    "check_class_weights",
    "check_is_spec",
    "check_settings",
    "check_sizes",
    "known_num_classes",
    "refuse_scaled_gradients",
]


def check_is_spec(net: Any) -> None:
    """Refuse a net that is already built."""
    if isinstance(net, nn.Module):
        raise TypeError(
            f"`net` must be a class path with its arguments, got a {type(net).__name__}: write "
            "net={'class_path': 'dg_lightning.GatedMLP', 'init_args': {...}}, so that a "
            "checkpoint can build it again."
        )


def known_num_classes(num_classes: int | None, net: Mapping[str, Any]) -> int:
    """Return the number of classes that is given, or that the net is built with."""
    check_is_spec(net)
    if num_classes is None:
        num_classes = (net.get("init_args") or {}).get("num_classes")
    if num_classes is None:
        raise ValueError("`num_classes` is unknown: give it, or a DataModule that has it.")
    if num_classes < 2:
        raise ValueError(
            f"There must be at least 2 classes to tell apart, got {num_classes}; GatedRegressor "
            "learns numbers."
        )
    return num_classes


def check_settings(gate_lr_factor: float, gate_clip_norm: float | None) -> None:
    """Refuse values out of range."""
    if gate_lr_factor < 0:
        raise ValueError(f"`gate_lr_factor` must be at least 0, got {gate_lr_factor}.")
    if gate_clip_norm is not None and gate_clip_norm <= 0:
        raise ValueError(f"`gate_clip_norm` must be above 0, got {gate_clip_norm}.")


def check_sizes(
    hparams: Mapping[str, Any], data: Any, names: Sequence[str] = ("num_classes", "input_shape")
) -> None:
    """Refuse data with another number of classes or another shape than the model's."""
    for name in names:
        own, theirs = hparams.get(name), getattr(data, name, None)
        if own is not None and theirs is not None and _plain(own) != _plain(theirs):
            raise ValueError(
                f"The model has {name} {_plain(own)}, {type(data).__name__} has "
                f"{_plain(theirs)}: set model.{name}={_plain(theirs)}, or give the data that a "
                "checkpoint was trained on."
            )


def check_class_weights(weights: Sequence[float] | None, num_classes: int) -> None:
    """Refuse class weights that are not one a class, negative, or all 0."""
    if weights is None:
        return
    if len(weights) != num_classes:
        raise ValueError(
            f"`class_weights` must have {num_classes} entries, one a class, got {len(weights)}."
        )
    if min(weights) < 0 or not any(weights):
        raise ValueError(f"`class_weights` must be at least 0, and one above, got {weights}.")


def balanced_weights(data: Any) -> Tensor:
    """Return the class weights of a DataModule."""
    weights = getattr(data, "class_weights", None)
    if weights is None:
        raise ValueError(
            "`class_weights='balanced'` needs a DataModule with `class_weights`; "
            "give the weights as a list instead."
        )
    return torch.as_tensor(weights)


def _plain(value: int | Sequence[int]) -> int | list[int]:
    return value if isinstance(value, int) else list(value)


def refuse_scaled_gradients(trainer: Any, optimizer: Any) -> None:
    """Refuse `gate_clip_norm` where gradients are unscaled within the optimizer's step only."""
    if unscales_itself(trainer, optimizer):
        raise ValueError(
            "`gate_clip_norm` needs unscaled gradients, which a fused optimizer has within its "
            "step only: write fused=False, or train without a loss scaler."
        )
