"""Convert a trained dense Transformer so that each token runs only some feed-forward blocks.

1. Group units that are active together into blocks.
2. Freeze the model, and teach gates which blocks contribute most to a token's output.
3. Fine-tune all weights within the budget. The dense model can be a second target.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm  # type: ignore[import-untyped]

from dg_lightning.arguments import renamed
from dg_lightning.budget import GateBudget, gate_budgets
from dg_lightning.compute.macs import as_matrix, weight_axes
from dg_lightning.gates import Gate, GateSettings, gate_layers
from dg_lightning.gates.protocol import filter_by_name
from dg_lightning.surgery.finding import Units, UnitSearchResult, find_units
from dg_lightning.surgery.gating import build_gates, register_gates
from dg_lightning.surgery.recording import first_tensor

_MAX_RUNS = 10


@torch.no_grad()
def cluster_units(activity: Tensor, size: int, seed: int = 0) -> Tensor:
    """Return an order of units that puts those active together side by side.

    Uses k-means with cosine similarity and clusters of equal size.

    Args:
        activity: Non-negative contribution of each unit to each token, ``(tokens, units)``.
        size: Units per block, which must divide the number of units.
        seed: Seed for the initial centres.

    >>> together = torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 1], [2, 0, 2, 0]])
    >>> sorted(cluster_units(together, 2)[:2].tolist()) in ([0, 2], [1, 3])
    True
    """
    points = F.normalize(activity.float().t(), dim=1)
    drawn = torch.randperm(len(points), generator=torch.Generator().manual_seed(seed))
    centres = points[drawn[: len(points) // size].to(points.device)]
    block = torch.zeros(len(points), dtype=torch.long, device=points.device)
    for _ in range(_MAX_RUNS):
        before, block = block, _assign(points @ centres.t(), size)
        if torch.equal(block, before):
            break
        sums = torch.zeros_like(centres).index_add_(0, block, points)
        centres = F.normalize(sums, dim=1)
    return block.argsort(stable=True)


def _assign(similarity: Tensor, size: int) -> Tensor:
    """Assign each unit to its most similar block that has room.

    The assignment is greedy. Each block accepts the most similar units that want it, and the
    remaining units try their next choice.
    """
    block = torch.full((len(similarity),), -1, device=similarity.device)
    room = torch.full((similarity.shape[1],), size, device=similarity.device)
    while len(left := (block < 0).nonzero()[:, 0]):
        wanted = similarity[left].masked_fill(room == 0, -torch.inf).argmax(1)
        for index in wanted.unique().tolist():
            applied = left[wanted == index]
            taken = min(len(applied), int(room[index]))
            best = applied[similarity[applied, index].topk(taken).indices]
            block[best] = index
            room[index] -= taken
    return block


@torch.no_grad()
def reorder_units(model: nn.Module, units: Units, order: Tensor) -> None:
    """Permute units in their producers and their consumer in place.

    The outputs of the model do not change.

    Args:
        model: The model.
        units: The units of a feed-forward layer.
        order: For each new position, the index of the unit to put there.
    """
    for name, rows in units.producers.items():
        producer: Any = model.get_submodule(name)
        # A unit has one row, or two if the layer produces both halves of a gated unit.
        by_unit = rows.argsort(stable=True).view(units.size, -1)
        source = torch.empty_like(rows)
        source[by_unit] = by_unit[order.cpu()]
        source = source.to(producer.weight.device)
        axis = weight_axes(producer)[0]
        producer.weight.copy_(producer.weight.index_select(axis, source))
        if producer.bias is not None:
            producer.bias.copy_(producer.bias[source])
    consumer: Any = model.get_submodule(units.consumer)
    axis = weight_axes(consumer)[1]
    consumer.weight.copy_(consumer.weight.index_select(axis, order.to(consumer.weight.device)))


Loss: TypeAlias = Callable[[Any], Tensor]  # maps a batch to its loss

_SAMPLE = 4096  # tokens used for clustering
_LEARNING_RATE = 3e-3


@contextmanager
def _recording(
    model: nn.Module, found: UnitSearchResult
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Record the inputs to producers and to consumers, both keyed by the consumer's name."""
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
    """Return the consumer's weights, ``(outputs, units)``."""
    consumer: Any = model.get_submodule(group.consumer)
    return as_matrix(consumer, consumer.weight).flatten(1).detach().float()


@torch.no_grad()
def cluster(
    model: nn.Module, found: UnitSearchResult, gates: Mapping[str, Gate], run: Loss, batch: Any
) -> None:
    """Reorder units so that units active together on a batch share a block."""
    model.eval()
    weight = next(model.parameters())
    exact = torch.autocast(weight.device.type, enabled=False)
    with exact, _recording(model, found) as (_, units):
        before = run(batch)
    # A loss may cast to half precision itself, whatever this context says.
    dtypes = [weight.dtype, before.dtype, *(tensor.dtype for tensor in units.values())]
    orders = {}
    for name, group in found.units.items():
        tokens = units[name].float()
        chosen = torch.linspace(0, len(tokens) - 1, min(_SAMPLE, len(tokens))).long()
        activity = tokens[chosen.to(tokens.device)].abs() * _weights(model, group).norm(dim=0)
        orders[name] = cluster_units(activity, gates[name].block_size)
        reorder_units(model, group, orders[name])
    with exact:
        after = run(batch)
    same = 1e-4 if min(dtype.itemsize for dtype in dtypes) >= 4 else 1e-2  # rounding tolerance
    if not torch.allclose(after.float(), before.float(), rtol=same, atol=same):
        for name, group in found.units.items():
            reorder_units(model, group, orders[name].argsort())  # undo
        raise ValueError(
            f"Reordering feed-forward units changes the outputs of {type(model).__name__} (loss "
            f"{float(before):.4f} before, {float(after):.4f} after), probably because it has other "
            "weights for each unit: select other layers with `layers`."
        )


def teach(
    model: nn.Module,
    found: UnitSearchResult,
    gates: Mapping[str, Gate],
    run: Loss,
    batches: Iterable[Any],
    share: float,
) -> None:
    """Teach gates which blocks contribute most to a token's output."""
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
                    label = _largest_share_mask(_carried(units[name], squares[name]), share)
                    z = gate.logits(inputs[name].float()) / gate.temperature
                    losses.append(F.binary_cross_entropy_with_logits(z, label))
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()


def _carried(units: Tensor, squares: Tensor) -> Tensor:
    """Return the norm of each block's output, normalised so that each token's norms sum to 1."""
    by_block = units.float().unflatten(-1, (len(squares), -1)).transpose(0, 1)  # blocks first
    lengths: Tensor = ((by_block @ squares) * by_block).sum(-1).clamp_min(0).sqrt().t()
    return lengths / lengths.sum(-1, keepdim=True).clamp_min(1e-12)


def _largest_share_mask(carried: Tensor, share: float) -> Tensor:
    """Return 1 for the given share of largest entries over all tokens, and 0 for the rest."""
    flat = carried.flatten()
    least = flat.kthvalue(max(len(flat) - round(share * len(flat)), 1)).values
    return (carried > least).float()


_CHECKED = 32  # number of batches used to compare losses
_LANDED_BY = 8  # number of batches used to match the budget after fine-tuning
_LANDINGS = 3  # number of shifts that match the budget
_SHIFT_EVERY = 5  # steps


@dataclass(frozen=True)
class Converted:
    """The result of `convert`.

    Args:
        budget: Allowed share of the gated feed-forward layers' MACs.
        used: Share of these MACs that is used, including gate networks.
        loss_before: Loss of the dense model.
        loss_after: Loss of the converted model.
        found: The gated units.
        settings: Settings for the gates.
    """

    budget: float
    used: float
    loss_before: float
    loss_after: float
    found: UnitSearchResult
    settings: Mapping[str, GateSettings]

    def __str__(self) -> str:
        return (
            f"{self.used:.1%} of the feed-forward MACs used for a budget of {self.budget:.1%}: "
            f"loss {self.loss_before:.4f} before, {self.loss_after:.4f} after"
        )


@renamed(only="layers")
def convert(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    budget: float = 0.5,
    gate: GateSettings | None = None,
    loss: Loss | None = None,
    validation: Iterable[Any] | None = None,
    example: Any = None,
    layers: list[str] | None = None,
    teach_steps: int = 250,
    tune_steps: int = 1000,
    learning_rate: float = 3e-4,
    distill: float = 0.0,
    progress: bool = True,
) -> Converted:
    """Add per-token gates to a trained Transformer, train them, and fine-tune the model.

    The model is changed in place: units are reordered, gates are added as in `add_gates`, and
    weights are fine-tuned. Run it under `torch.autocast` for mixed precision.

    Args:
        model: The trained model.
        batches: Training batches, repeated as often as needed.
        budget: Share of the feed-forward MACs that may be used, including gate networks.
        gate: Settings for the gates, which must be dynamic. By default, blocks have 64 units.
        loss: A function that runs the model on a batch and returns the loss. By default, this is
            `losses` for our modules, or the `.loss` that Hugging Face models return.
        validation: Batches used to compare losses. The default is the first training batches.
        example: Example inputs for the model, as in `find_units`.
        layers: Name patterns for the layers that consume the units, or None for all feed-forward
            layers.
        teach_steps: Number of steps that train only the gates.
        tune_steps: Number of steps that fine-tune all weights.
        learning_rate: Peak learning rate during fine-tuning.
        distill: Weight of the divergence from the dense model's class probabilities during
            fine-tuning. It holds back a model that still improves.
        progress: Whether to show a progress bar.

    Returns:
        The budget, the share that is used, and the losses before and after.

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
    if not 0 <= distill < math.inf:
        raise ValueError(f"`distill` must be a finite number from 0, got {distill}.")
    evaluate = _loss_of(model) if loss is None else loss
    found = _feed_forwards(model, example, layers)
    gates = build_gates(model, found, settings)
    share = budget - _decision_share(gates)
    if share <= 0:
        raise ValueError(
            f"`budget` must exceed the gates' own cost, {budget - share:.1%} of the "
            f"feed-forward MACs, got {budget}: raise it, or use larger blocks."
        )
    device = next(model.parameters()).device
    run = _on_device(evaluate, device)
    if iter(batches) is batches:
        raise ValueError("`batches` must be iterable more than once: pass a loader or a list.")
    held_out = list(islice(batches if validation is None else validation, _CHECKED))
    if not held_out:
        raise ValueError("`batches` and `validation` must not be empty.")
    was_training = model.training
    before = _mean_loss(model, run, held_out)
    tuned = run
    if distill:
        tuned = _with_teacher(model, run, distill)
        with torch.no_grad():
            tuned(held_out[0])  # fails now if there is nothing to compare
    endless = _endless(batches)
    cluster(model, found, gates, run, next(endless))

    def shown(what: str, steps: int) -> Iterable[Any]:
        bar: Iterable[Any] = tqdm(islice(endless, steps), what, steps, disable=not progress)
        return bar

    teach(model, found, gates, run, shown("Teaching gates", teach_steps), share)
    register_gates(model, found, gates)
    _tune(model, gates, tuned, shown("Fine-tuning", tune_steps), tune_steps, share, learning_rate)
    used = _land(model, gates, run, held_out[:_LANDED_BY], share) + budget - share
    after = _mean_loss(model, run, held_out)
    model.train(was_training)
    return Converted(budget, used, before, after, found, settings)


def _settings(gate: GateSettings | None) -> GateSettings:
    default: GateSettings = {"kind": "dynamic", "block_size": 64, "scale": "probability"}
    settings = default if gate is None else gate
    if settings.get("kind") != "dynamic":
        raise ValueError(f"`gate` must be dynamic, such as {{'kind': 'dynamic'}}, got {settings}.")
    return settings


def _loss_of(model: Any) -> Loss:
    if hasattr(model, "losses"):
        return lambda batch: model.losses(batch)["loss"]

    def returned(batch: Any) -> Tensor:
        value = getattr(model(**batch) if isinstance(batch, Mapping) else None, "loss", None)
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{type(model).__name__} returns no `.loss` for a batch: pass `loss`, a function "
                "that maps a batch to its loss."
            )
        return value

    return returned


def _with_teacher(model: nn.Module, run: Loss, weight: float) -> Loss:
    """Return a loss that includes the divergence from the model as it is now."""
    teacher = copy.deepcopy(model).eval().requires_grad_(False)

    def total(batch: Any) -> Tensor:
        calls: list[tuple[Any, Any, Any]] = []
        hook = model.register_forward_hook(
            lambda _, *call: calls.append(call),
            with_kwargs=True,
        )
        try:
            loss = run(batch)
        finally:
            hook.remove()
        terms = []
        for args, kwargs, output in calls:
            with torch.no_grad():
                expected = _log_probabilities(teacher(*args, **kwargs))
            found = _log_probabilities(output)
            terms.append(F.kl_div(found, expected, reduction="batchmean", log_target=True))
        if not terms:
            raise ValueError(
                f"`distill` needs a `loss` that calls the model, but {type(model).__name__} was "
                "not called: set distill=0."
            )
        return loss + weight * torch.stack(terms).mean()

    return total


def _log_probabilities(output: Any) -> Tensor:
    """Return the log-probabilities of classes, one row for each token."""
    logits = output["logits"] if isinstance(output, Mapping) and "logits" in output else output
    if not isinstance(logits, Tensor) or logits.ndim < 2:
        raise ValueError(
            f"`distill` needs a model that returns logits, got {type(output).__name__}: set "
            "distill=0."
        )
    return logits.float().log_softmax(-1).flatten(0, -2)


def _on_device(loss: Loss, device: torch.device) -> Loss:
    def run(batch: Any) -> Tensor:
        torch.clear_autocast_cache()  # the weights have changed since the last batch
        return loss(move_data_to_device(batch, device))

    return run


def _feed_forwards(model: nn.Module, example: Any, layers: list[str] | None) -> UnitSearchResult:
    found = find_units(model, example)
    units = {
        name: u
        for name, u in found.units.items()
        if u.kind == "feed_forward" and u.is_tokenwise and not u.between
    }
    if not units:
        raise ValueError(
            f"{type(model).__name__} has no feed-forward layer to convert: "
            f"{'; '.join(found.reasons()) or 'none was found'}."
        )
    units = filter_by_name(units, layers, "layer with units to gate")
    return UnitSearchResult(units, found.skipped, found.calls_per_sample)


def _decision_share(gates: Mapping[str, Gate]) -> float:
    """Return the MACs of the gate networks as a share of the feed-forward MACs."""
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
    """Return a budget for these gates only."""
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
    """Fine-tune all weights while staying within the budget."""
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
    """Shift gates to match the budget on some batches, and return the share that is used."""
    model.eval()
    budget = _budget(model, gates, share)

    def look() -> None:
        """Run all batches, and join their gates into one large batch."""
        seen: dict[Gate, list[Tensor]] = {gate: [] for gate in gates.values()}
        for batch in batches:
            run(batch)
            for gate, kept in seen.items():
                assert gate.probability is not None
                kept.append(gate.probability.flatten(0, -2))
        for gate, kept in seen.items():
            gate.probability = gate.gate = torch.cat(kept)

    for _ in range(_LANDINGS):  # shifting a gate changes the inputs of later ones
        look()
        budget.shift(budget.shift_for(share))
    look()
    return float(budget.used())
