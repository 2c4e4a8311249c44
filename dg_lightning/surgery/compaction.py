"""Closed units taken out of a model: its own class, with smaller layers.

The class of a model may compute with the number of its heads or channels. Which of its attributes
hold such a number is not known; attributes with the right value are tried, and the result counts
only if the model's outputs stay the same.
"""

import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dg_lightning.compute.maps import as_matrix
from dg_lightning.gates import Gate, set_connections
from dg_lightning.surgery.editing import Edit
from dg_lightning.surgery.gating import gated_units, remove_gates
from dg_lightning.surgery.probing import Units
from dg_lightning.surgery.watching import Watch

__all__ = ["Compact", "compact", "explain_shape_errors"]

_MOST_ATTRIBUTES = 8  # that are tried in all combinations


@dataclass
class Compact:
    """A model without its closed units.

    Args:
        model: The model, of the class that it had.
        units: The number of units, heads or channels before and after, by the map that reads them.
        notes: What could not be taken out, and why.
        attributes: Every number of a module that has changed: `"blocks.0.attn.num_heads": 2`.
        kept: What is left of each parameter and buffer: axis and indices, one after another.
        unused: Parameters that no example used. A branch that runs them was not seen, and may fail.
        hook: Explains shape errors of the model. Call its `remove()` before `torch.jit.script`, or
            before pickling the model for a process without this package.
    """

    model: nn.Module = field(repr=False)
    units: dict[str, tuple[int, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    attributes: dict[str, int] = field(default_factory=dict, repr=False)
    kept: dict[str, list[tuple[int, Tensor]]] = field(default_factory=dict, repr=False)
    unused: list[str] = field(default_factory=list)
    hook: RemovableHandle | None = field(default=None, repr=False, compare=False)

    def carry_state(self, model: nn.Module, before: Optimizer, after: Optimizer) -> None:
        """Give the optimizer of the compact model what that of the gated one had learned.

        Args:
            model: The gated model.
            before: Its optimizer.
            after: An optimizer of the compact model's parameters.
        """
        old = dict(model.named_parameters())
        for name, parameter in self.model.named_parameters():
            state = before.state.get(old[name], {})
            shape = old[name].shape
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim and value.shape != shape:
                    raise ValueError(
                        f"`{key}` of {type(before).__name__} is not of the shape of {name}: its "
                        "state cannot be carried over, start afresh."
                    )
            after.state[parameter] = {
                key: self._cut(name, value)
                if isinstance(value, Tensor) and value.shape == shape
                else copy.deepcopy(value)
                for key, value in state.items()
            }

    def _cut(self, name: str, tensor: Tensor) -> Tensor:
        for axis, index in self.kept.get(name, []):
            tensor = tensor.index_select(axis, index.to(tensor.device))
        return tensor.clone()


@torch.no_grad()
def compact(
    model: nn.Module,
    example: Any = None,
    *,
    more_examples: Sequence[Any] = (),
    multiple: int = 1,
) -> Compact:
    """Return a copy of a model without gates and without what they close.

    The outputs for the examples are compared: what cannot be taken out without changing them stays,
    as weights of 0, and is noted. The model itself is not changed.

    Args:
        model: A model with static gates of `add_gates`.
        example: What it is called with, see `find_units`.
        more_examples: Further examples, which take other branches of the model.
        multiple: Keep closed feed-forward units and channels, with weights of 0, until their number
            is a multiple of this: GPUs multiply matrices of odd sizes slowly.

    >>> from dg_lightning import add_gates
    >>> net, x = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(2, 8)
    >>> _ = add_gates(net, feed_forward={"kind": "static"}, example=x)
    >>> _ = net[2].dg_gate.logit.data[:3].fill_(-1)
    >>> compact(net, x).model
    Sequential(
      (0): Linear(in_features=8, out_features=1, bias=True)
      (1): ReLU()
      (2): Linear(in_features=1, out_features=2, bias=True)
    )
    """
    small = copy.deepcopy(model)
    gated = gated_units(small)
    if not gated:
        raise ValueError(
            f"{type(model).__name__} has no gates of `add_gates` to take units out by."
        )
    for name, (_, gate) in gated.items():
        if gate.input_dependent:
            raise ValueError(
                f"The gate of {name} looks at the input, so each of its units may be needed: only "
                "what static gates close can be taken out."
            )
    for child in small.modules():
        set_connections(child, None)  # of another shape soon; missing connections have weights of 0
    watch = Watch(small, [example, *more_examples])
    expected = watch.look(*gated)
    remove_gates(small)
    is_open = {name: _close_for_good(small, *gated[name], multiple) for name in gated}
    if not watch.is_same(expected, *gated):
        raise ValueError(
            f"With weights of 0 in place of closed units {type(model).__name__} does not compute "
            "the same: are weights shared, or made of others?"
        )
    result = Compact(small, unused=watch.unused_parameters())
    for name, (units, gate) in gated.items():
        if not is_open[name].all():
            _take_out(result, units, is_open[name], watch)
        if not bool((gate(torch.zeros(1, device=gate.threshold.device)) != 0).any()):
            result.notes.append(
                f"{name}: all {units.kind} are closed, one stays: a layer needs one."
            )
    result.hook = explain_shape_errors(small)
    return result


def explain_shape_errors(model: nn.Module) -> RemovableHandle:
    """Let errors of a compact model say what may have caused them."""
    return model.register_forward_hook(_add_note, always_call=True)


def _add_note(model: nn.Module, args: Any, output: Any) -> None:
    error = sys.exc_info()[1] if output is None else None
    if isinstance(error, RuntimeError | ValueError | IndexError):
        note = (
            f"`compact` has removed units from this {type(model).__name__}. If shapes do not fit, "
            "this call takes a branch that its examples did not take: give one that does in "
            "`more_examples`."
        )
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def _close_for_good(model: nn.Module, units: Units, gate: Gate, multiple: int) -> Tensor:
    """Multiply weights by a static gate, and return which blocks are kept, at least one."""
    consumer: Any = model.get_submodule(units.consumer)
    value: Tensor = gate.eval()(torch.zeros(1, device=gate.threshold.device))
    as_matrix(consumer, consumer.weight).mul_(value.to(consumer.weight)[:, None])
    is_open = (value.reshape(units.blocks, -1) != 0).any(1).cpu()
    multiple = multiple if units.block_size == 1 else 1
    wanted = max(int(is_open.sum()), 1)  # a layer needs a unit
    count = min(-(-wanted // multiple) * multiple, len(is_open))
    kept = (~is_open).int().argsort(stable=True)[:count]
    return torch.zeros_like(is_open).index_fill(0, kept, True)


def _take_out(result: Compact, units: Units, is_open: Tensor, watch: Watch) -> None:
    expected = watch.look(units.consumer)
    edit = Edit(result.model)
    edit.shrink(units, is_open)
    numbers = edit.numbers_to_follow(units, is_open)
    shrunk = len(edit.changes)
    for chosen in _subsets(list(numbers)):
        for name, key in chosen:
            edit.set_number(name, key, numbers[name, key])
        if watch.is_same(expected, units.consumer):
            # Numbers of units that this example does not need may be needed by others.
            for name, key in edit.counts(units, set(numbers) - set(chosen)):
                fits = len(edit.changes)
                edit.set_number(name, key, numbers[name, key])
                if not watch.is_same(expected, units.consumer):
                    edit.undo(fits)
            result.units[units.consumer] = (units.blocks, int(is_open.sum()))
            edit.report(result.kept, result.attributes)
            return
        edit.undo(shrunk)
    edit.undo(0)
    result.notes.append(
        f"{units.consumer}: {int((~is_open).sum())} closed {units.kind} stay, as weights of 0: "
        f"with fewer, {type(result.model).__name__} does not compute the same."
    )


def _subsets(items: list[Any]) -> Iterator[tuple[Any, ...]]:
    """Return all subsets, small ones first; of many items only none and all."""
    if len(items) > _MOST_ATTRIBUTES:
        return iter([(), tuple(items)])
    return chain.from_iterable(combinations(items, n) for n in range(len(items) + 1))
