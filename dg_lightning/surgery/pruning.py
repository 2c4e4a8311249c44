"""Prune a trained model in one call, without training: score units, close the worst, compact."""

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from itertools import chain
from typing import Any, Literal, TypeAlias

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn

from dg_lightning.compute.macs import as_matrix, unit_axis
from dg_lightning.gates import Gate
from dg_lightning.surgery.compaction import CompactModel, compact
from dg_lightning.surgery.finding import Units
from dg_lightning.surgery.gating import add_gates, gated_units
from dg_lightning.surgery.recording import arguments_of

Criterion: TypeAlias = Literal["taylor", "activation", "magnitude"]
LossFunction: TypeAlias = Callable[[nn.Module, Any], Tensor]
_KINDS = ("feed_forward", "heads", "channels")
_CLOSED = -10.0  # a logit whose p is below every useful threshold


def prune(
    model: nn.Module,
    batches: Iterable[Any],
    target: float,
    *,
    criterion: Criterion = "taylor",
    loss: LossFunction | None = None,
    kinds: Iterable[str] = ("feed_forward",),
    layers: list[str] | None = None,
    example: Any = None,
    uniform: bool = True,
    multiple: int = 1,
    build: Callable[..., nn.Module] | None = None,
) -> CompactModel:
    """Return a copy of a model that keeps the most important units of each layer.

    Args:
        model: A trained model. It is not changed.
        batches: A few batches of data, as tensors, tuples or dicts of the model's arguments.
        target: Share of the units of each layer to keep, in (0, 1). This is also the share of the
            MACs of these layers.
        criterion: Importance of a unit. `taylor`: the square of the loss gradient with respect to
            its gate, summed over batches. `activation`: its mean size, times the size of the
            weights that read it. `magnitude`: the size of the weights that make it, times that of
            the weights that read it; no data is needed.
        loss: Function of the model and a batch, for `taylor`. The default is `loss` of the model's
            output, as Hugging Face models return it for a batch with labels.
        kinds: Kinds of units to prune: `feed_forward`, `heads`, `channels`.
        layers: Name patterns for the layers that consume the units, or None for all layers.
        example: Example inputs; the default is the first batch, without labels.
        uniform: See `compact`.
        multiple: See `compact`.
        build: See `compact`.

    >>> net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> small = prune(net, [torch.randn(16, 8)], 0.5, criterion="activation").model
    >>> small[0].out_features
    2
    """
    batches, wanted = list(batches), list(kinds)
    if not 0 < target < 1:
        raise ValueError(f"`target` must be a share of the units in (0, 1), got {target}.")
    if unknown := [kind for kind in wanted if kind not in _KINDS] or not wanted:
        raise ValueError(f"`kinds` must be some of {', '.join(_KINDS)}, got {unknown or kinds!r}.")
    if not batches:
        raise ValueError("`batches` must hold at least one batch, got none.")
    gated = copy.deepcopy(model).eval()
    if example is None:
        example = _without_labels(batches[0])
    settings: Any = {kind: {"kind": "static"} for kind in wanted}
    add_gates(gated, **settings, layers=layers, example=example)
    found = gated_units(gated)
    if criterion == "taylor":
        scores = _taylor(gated, found, batches, _loss_of_output if loss is None else loss)
    elif criterion == "activation":
        scores = _activation(gated, found, batches)
    else:
        scores = {name: _magnitude(gated, units) for name, (units, _) in found.items()}
    for name, (units, gate) in found.items():
        keep = max(1, round(target * units.blocks))
        kept = scores[name].topk(keep).indices
        parameter: Any = gate.logit
        logit: Tensor = parameter.data
        closed = torch.ones_like(logit, dtype=torch.bool)
        closed[kept.to(logit.device)] = False
        logit[closed] = _CLOSED
    return compact(gated, example, uniform=uniform, multiple=multiple, build=build)


def _taylor(
    model: nn.Module,
    found: dict[str, tuple[Units, Gate]],
    batches: list[Any],
    loss: LossFunction,
) -> dict[str, Tensor]:
    scores: dict[str, Tensor] = {}
    for _, gate in found.values():
        gate.train()  # in evaluation, gates pass no gradient
    device = next(model.parameters()).device
    for batch in batches:
        model.zero_grad()
        loss(model, move_data_to_device(batch, device)).backward()
        for name, (_, gate) in found.items():
            logit: Any = gate.logit
            gradient: Tensor | None = logit.grad
            if gradient is None:
                raise ValueError(
                    f"The loss does not depend on the units of {name}: choose other `layers`, or "
                    "another `criterion`."
                )
            scores[name] = scores.get(name, 0) + gradient.detach().float().square()
    model.zero_grad()
    for _, gate in found.values():
        gate.eval()
    return scores


@torch.no_grad()
def _activation(
    model: nn.Module, found: dict[str, tuple[Units, Gate]], batches: list[Any]
) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            x: Tensor = next(v for v in chain(args, kwargs.values()) if isinstance(v, Tensor))
            x = x.detach().movedim(unit_axis(module), -1).flatten(0, -2)
            sums[name] = sums.get(name, 0) + x.float().abs().mean(0)

        return hook

    with ExitStack() as stack:
        for name in found:
            consumer = model.get_submodule(name)
            handle = consumer.register_forward_hook(record(name), with_kwargs=True)
            stack.callback(handle.remove)
        for batch in batches:
            args, kwargs = arguments_of(model, _without_labels(batch))
            model(*args, **kwargs)
    return {
        name: _by_block(sums[name] * _reading(model, units), units)
        for name, (units, _) in found.items()
    }


@torch.no_grad()
def _magnitude(model: nn.Module, units: Units) -> Tensor:
    """Return the product of the norms of the weights around each block of units."""
    score = _by_block(_reading(model, units), units)
    for name, blocks in units.producers.items():
        producer: Any = model.get_submodule(name)
        rows = as_matrix(producer, producer.weight).float().square().flatten(1).sum(1)
        by_block = torch.zeros_like(score).index_add(0, blocks.to(rows.device), rows)
        score = score * by_block.sqrt()
    return score


def _reading(model: nn.Module, units: Units) -> Tensor:
    """Return the norm of the weights that read each unit."""
    consumer: Any = model.get_submodule(units.consumer)
    weight: Tensor = as_matrix(consumer, consumer.weight)
    return weight.detach().float().square().sum(0).flatten(1).sum(1).sqrt()


def _by_block(values: Tensor, units: Units) -> Tensor:
    return values.view(units.blocks, -1).sum(1)


def _without_labels(batch: Any) -> Any:
    """Return the inputs in a batch: a dict without labels, or the first item of a tuple."""
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key != "labels"}
    return batch[0] if isinstance(batch, list | tuple) else batch


def _loss_of_output(model: nn.Module, batch: Any) -> Tensor:
    output: Any = model(**batch) if isinstance(batch, Mapping) else None
    loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise ValueError(
            "`criterion='taylor'` needs a loss: pass `loss=`, a function of the model and a batch, "
            "or batches with `labels` to a Hugging Face model."
        )
    return loss
