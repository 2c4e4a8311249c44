"""Teaches gates which blocks of a trained feed-forward a token needs."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dg_lightning.compute.maps import as_matrix
from dg_lightning.gates import Gate
from dg_lightning.surgery.clustering import cluster_units, reorder_units
from dg_lightning.surgery.finding import Found
from dg_lightning.surgery.probing import Units
from dg_lightning.surgery.recording import first_tensor

__all__ = ["Loss", "cluster", "teach"]

Loss: TypeAlias = Callable[[Any], Tensor]  # of a batch

_SAMPLE = 4096  # tokens by which units are clustered
_LEARNING_RATE = 3e-3


@contextmanager
def _recording(
    model: nn.Module, found: Found
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Record what the producers and the consumers of units are called with, by consumer."""
    inputs: dict[str, Tensor] = {}
    units: dict[str, Tensor] = {}

    def keep(kept: dict[str, Tensor], name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            kept[name] = first_tensor(args, kwargs).detach().flatten(0, -2)

        return hook

    with ExitStack() as stack:
        for name, group in found.units.items():
            ends = (next(iter(group.producers)), inputs), (group.consumer, units)
            for end, kept in ends:
                module = model.get_submodule(end)
                hook = module.register_forward_pre_hook(keep(kept, name), with_kwargs=True)
                stack.callback(hook.remove)
        yield inputs, units


def _weights(model: nn.Module, group: Units) -> Tensor:
    """Return the weights that read units, ``(outputs, units)``."""
    consumer: Any = model.get_submodule(group.consumer)
    return as_matrix(consumer, consumer.weight).flatten(1).detach().float()


@torch.no_grad()
def cluster(
    model: nn.Module, found: Found, gates: Mapping[str, Gate], run: Loss, batch: Any
) -> None:
    """Make units neighbours that are active together, by the tokens of a batch."""
    model.eval()
    weight = next(model.parameters())
    exact = torch.autocast(weight.device.type, enabled=False)
    with exact, _recording(model, found) as (_, units):
        before = run(batch)
    orders = {}
    for name, group in found.units.items():
        tokens = units[name].float()
        chosen = torch.linspace(0, len(tokens) - 1, min(_SAMPLE, len(tokens))).long()
        activity = tokens[chosen.to(tokens.device)].abs() * _weights(model, group).norm(dim=0)
        orders[name] = cluster_units(activity, gates[name].block_size)
        reorder_units(model, group, orders[name])
    with exact:
        after = run(batch)
    same = 1e-4 if weight.dtype.itemsize >= 4 else 1e-2  # by rounding
    if not torch.allclose(after.float(), before.float(), rtol=same, atol=same):
        for name, group in found.units.items():
            reorder_units(model, group, orders[name].argsort())  # as it was
        raise ValueError(
            f"{type(model).__name__} computes something else when units of its feed-forwards come "
            f"in another order (loss {float(before):.4f}, then {float(after):.4f}): it has weights "
            "of its own for each unit; name other maps with `only`."
        )


def teach(
    model: nn.Module,
    found: Found,
    gates: Mapping[str, Gate],
    run: Loss,
    batches: Iterable[Any],
    share: float,
) -> None:
    """Teach gates which blocks carry most of a token's output."""
    model.eval()
    squares = {}
    for name, group in found.units.items():
        by_block = _weights(model, group).unflatten(1, (gates[name].blocks, -1)).transpose(0, 1)
        with torch.autocast(by_block.device.type, enabled=False):
            squares[name] = by_block.mT @ by_block
    parameters = [p for gate in gates.values() for p in gate.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=_LEARNING_RATE)
    with _recording(model, found) as (inputs, units):
        for batch in batches:
            with torch.no_grad():
                run(batch)
            losses = []
            with torch.autocast(parameters[0].device.type, enabled=False):
                for name, gate in gates.items():
                    label = _largest(_carried(units[name], squares[name]), share)
                    z = gate.logits(inputs[name].float()) / gate.temperature
                    losses.append(F.binary_cross_entropy_with_logits(z, label))
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()


def _carried(units: Tensor, squares: Tensor) -> Tensor:
    """Return the share of the length of a token's output that each block carries."""
    by_block = units.float().unflatten(-1, (len(squares), -1)).transpose(0, 1)  # blocks first
    lengths: Tensor = ((by_block @ squares) * by_block).sum(-1).clamp_min(0).sqrt().t()
    return lengths / lengths.sum(-1, keepdim=True).clamp_min(1e-12)


def _largest(carried: Tensor, share: float) -> Tensor:
    """Return 1 for the largest entries of all tokens together, that many of them."""
    flat = carried.flatten()
    least = flat.kthvalue(max(len(flat) - round(share * len(flat)), 1)).values
    return (carried > least).float()
