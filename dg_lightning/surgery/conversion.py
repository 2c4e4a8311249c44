"""Turns a trained dense Transformer into one whose tokens run some blocks of each feed-forward.

Three steps: units that are active together become blocks; gates are taught which blocks carry most
of a token's output, while the model is frozen; all is trained on, while the budget is held.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]

from dg_lightning.budget import GateBudget, gate_budgets
from dg_lightning.gates import Gate, GateSettings, gate_layers
from dg_lightning.gates.protocol import matching
from dg_lightning.surgery.finding import Found, find_units
from dg_lightning.surgery.gating import attach_gates, make_gates
from dg_lightning.surgery.teaching import Loss, cluster, teach

__all__ = ["Converted", "convert"]

_CHECKED = 32  # batches by which losses are compared
_LANDED_BY = 8  # batches by which gates land on the budget
_LANDINGS = 3
_SHIFT_EVERY = 5  # steps


@dataclass(frozen=True)
class Converted:
    """What a conversion has done.

    Args:
        budget: The share of the MACs of the gated feed-forwards that was allowed.
        used: The share that is used, with decisions.
        loss_before: Loss of the dense model.
        loss_after: Loss of the converted model.
        found: What has got gates.
        settings: Settings of the gates.
    """

    budget: float
    used: float
    loss_before: float
    loss_after: float
    found: Found
    settings: Mapping[str, GateSettings]

    def __str__(self) -> str:
        return (
            f"{self.used:.1%} of the feed-forwards' MACs for a budget of {self.budget:.1%}: "
            f"loss {self.loss_before:.4f} before, {self.loss_after:.4f} after"
        )


def convert(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    budget: float = 0.5,
    gate: GateSettings | None = None,
    loss: Loss | None = None,
    validation: Iterable[Any] | None = None,
    example: Any = None,
    only: list[str] | None = None,
    teach_steps: int = 250,
    tune_steps: int = 1000,
    learning_rate: float = 3e-4,
    progress: bool = True,
) -> Converted:
    """Put token-wise gates into a trained Transformer, teach them, and train it on.

    The model is changed in place: its units come in another order, gates live under the maps that
    read them (see `add_gates`), and weights are trained on. Run it under `torch.autocast` for mixed
    precision.

    Args:
        model: The trained model.
        batches: Training batches, as often as needed.
        budget: The share of the feed-forwards' MACs that may be used, decisions included.
        gate: Settings of the gates, which must be dynamic; None for blocks of 64 units.
        loss: Returns the loss of a batch, which it hands to the model. None for the `losses` of our
            modules, or the `.loss` that models of Hugging Face return.
        validation: Batches by which losses are compared; None for the first training batches.
        example: What the model is called with, see `find_units`.
        only: Name patterns of the maps that read the units; None for all feed-forwards.
        teach_steps: Steps in which gates are taught.
        tune_steps: Steps in which all is trained on.
        learning_rate: The highest learning rate of these steps.
        progress: Whether to show a progress bar.

    >>> from torch.nn import functional as F
    >>> from dg_lightning.layers import GPT
    >>> net = GPT([16], 256, width=32, depth=1, heads=2)
    >>> text = [torch.randint(256, (4, 16)) for _ in range(4)]
    >>> next_byte = lambda x: F.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    >>> settings = {"kind": "dynamic", "block_size": 16}
    >>> steps = {"teach_steps": 2, "tune_steps": 2, "progress": False}
    >>> done = convert(net, text, gate=settings, loss=next_byte, example=text[0], **steps)
    >>> round(done.used, 2)
    0.5
    """
    settings: dict[str, GateSettings] = {"feed_forward": _settings(gate)}
    if not 0 < budget < 1:
        raise ValueError(f"`budget` must be above 0 and below 1, got {budget}.")
    if min(teach_steps, tune_steps) < 1:
        raise ValueError(
            f"`teach_steps` and `tune_steps` must be at least 1, got {teach_steps}, {tune_steps}."
        )
    evaluate = _loss_of(model) if loss is None else loss
    found = _feed_forwards(model, example, only)
    gates = make_gates(model, found, settings)
    share = budget - _decision_share(gates)
    if share <= 0:
        raise ValueError(
            f"The decisions alone cost {budget - share:.1%} of the feed-forwards' MACs, more than "
            f"`budget`={budget}: raise it, or take larger blocks."
        )
    device = next(model.parameters()).device
    run = _on_device(evaluate, device)
    if iter(batches) is batches:
        raise ValueError("The batches can be read once only: give a loader or a list.")
    held_out = list(islice(batches if validation is None else validation, _CHECKED))
    if not held_out:
        raise ValueError("There are no batches: give some.")
    was_training = model.training
    before = _mean_loss(model, run, held_out)
    endless = _endless(batches)
    cluster(model, found, gates, run, next(endless))

    def shown(what: str, steps: int) -> Iterable[Any]:
        bar: Iterable[Any] = tqdm(islice(endless, steps), what, steps, disable=not progress)
        return bar

    teach(model, found, gates, run, shown("Teaching gates", teach_steps), share)
    attach_gates(model, found, gates)
    _tune(model, gates, run, shown("Training on", tune_steps), tune_steps, share, learning_rate)
    used = _land(model, gates, run, held_out[:_LANDED_BY], share) + budget - share
    after = _mean_loss(model, run, held_out)
    model.train(was_training)
    return Converted(budget, used, before, after, found, settings)


def _settings(gate: GateSettings | None) -> GateSettings:
    default: GateSettings = {"kind": "dynamic", "block_size": 64, "scale": "probability"}
    settings = default if gate is None else gate
    if settings.get("kind") != "dynamic":
        raise ValueError(f"`gate` must be dynamic, as {{'kind': 'dynamic'}}, got {settings}.")
    return settings


def _loss_of(model: Any) -> Loss:
    if hasattr(model, "losses"):
        return lambda batch: model.losses(batch)["loss"]

    def returned(batch: Any) -> Tensor:
        value = getattr(model(**batch) if isinstance(batch, Mapping) else None, "loss", None)
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{type(model).__name__} returns no `.loss` for a batch: give `loss`, a function "
                "that takes a batch and returns the loss."
            )
        return value

    return returned


def _on_device(loss: Loss, device: torch.device) -> Loss:
    def run(batch: Any) -> Tensor:
        torch.clear_autocast_cache()  # weights have changed since the last batch
        return loss(move_data_to_device(batch, device))

    return run


def _feed_forwards(model: nn.Module, example: Any, only: list[str] | None) -> Found:
    found = find_units(model, example)
    units = {
        name: u
        for name, u in found.units.items()
        if u.kind == "feed_forward" and u.by_position and not u.between
    }
    if not units:
        raise ValueError(
            f"{type(model).__name__} has no feed-forward to convert: "
            f"{'; '.join(found.reasons()) or 'none was found'}."
        )
    units = matching(units, only, "map with units to gate")
    return Found(units, found.left_alone, found.positions)


def _decision_share(gates: Mapping[str, Gate]) -> float:
    """Return what decisions cost, over the MACs of the feed-forwards."""
    maps = [module for gate in gates.values() for module in _maps(gate)]
    dense = sum(int(module.weight.numel()) for module in maps)
    return sum(int(gate.decision_macs()) for gate in gates.values()) / dense


def _maps(gate: Gate) -> list[Any]:
    return [*gate.feeds.producers, *gate.feeds.consumers]


def _endless(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from batches


@torch.no_grad()
def _mean_loss(model: nn.Module, run: Loss, batches: list[Any]) -> float:
    was_training = model.training
    model.eval()
    losses = [float(run(batch)) for batch in batches]
    model.train(was_training)
    return sum(losses) / len(losses)


def _budget(model: nn.Module, gates: Mapping[str, Gate], share: float) -> GateBudget:
    """Return the budget of these gates alone."""
    names = [name for name, gate in gate_layers(model).items() if gate in gates.values()]
    return gate_budgets(model, {"": share}, names, "open_rate")[""]


def _tune(
    model: nn.Module,
    gates: Mapping[str, Gate],
    run: Loss,
    batches: Iterable[Any],
    steps: int,
    share: float,
    learning_rate: float,
) -> None:
    """Train everything on, while the budget is held."""
    model.train()
    of_gates = {id(p) for gate in gates.values() for p in gate.parameters()}
    weights = [p for p in model.parameters() if p.requires_grad and id(p) not in of_gates]
    groups = [weights, [p for gate in gates.values() for p in gate.parameters()]]
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in groups], lr=learning_rate, weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, max(steps, 2), pct_start=0.1, cycle_momentum=False
    )
    budget = _budget(model, gates, share)
    for step, batch in enumerate(batches):
        value = run(batch)
        optimizer.zero_grad()
        value.backward()
        if step % _SHIFT_EVERY == 0:
            budget.shift(budget.shift_for(share))
        optimizer.step()
        schedule.step()


@torch.no_grad()
def _land(
    model: nn.Module, gates: Mapping[str, Gate], run: Loss, batches: list[Any], share: float
) -> float:
    """Shift gates so that some batches use the budget, and return what they use."""
    model.eval()
    budget = _budget(model, gates, share)

    def look() -> None:
        """Let gates have recorded all batches, as if they were one."""
        seen: dict[Gate, list[Tensor]] = {gate: [] for gate in gates.values()}
        for batch in batches:
            run(batch)
            for gate, kept in seen.items():
                assert gate.probability is not None
                kept.append(gate.probability.flatten(0, -2))
        for gate, kept in seen.items():
            gate.probability = gate.gate = torch.cat(kept)

    for _ in range(_LANDINGS):  # later gates read what earlier ones let through
        look()
        budget.shift(budget.shift_for(share))
    look()
    return float(budget.used())
