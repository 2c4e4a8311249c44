"""Count the dense, expected and executed multiply-accumulates (MACs) of linear layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dg_lightning.gates.protocol import (
    GateLike,
    connection_mask,
    gate_layers,
    plain_name,
)

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_POSITIONS = "dg_positions"  # name of an attribute set on modules


def is_linear_map(module: nn.Module) -> bool:
    """Return True for a module that multiplies by its weight and does nothing else.

    This excludes subclasses that override `forward`, subclasses of torch's convolutions, and
    grouped convolutions, whose outputs depend on only some of the inputs.

    >>> is_linear_map(nn.Conv2d(3, 8, 3)), is_linear_map(nn.Conv2d(8, 8, 3, groups=8))
    (True, False)
    """
    if "weight" not in dict(module.named_parameters(recurse=False)):
        return False  # weight_norm and pruning compute the weight from other parameters
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    if isinstance(module, _CONVOLUTIONS):
        return type(module) in _CONVOLUTIONS and module.groups == 1
    return _is_transposed(module)


def _is_transposed(module: nn.Module) -> bool:
    """Return True for Hugging Face's GPT-2 linear layer, whose weight has shape `(in, out)`."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def as_matrix(module: Any, tensor: Tensor) -> Tensor:
    """View a tensor that has the shape of the weight as ``(outputs, inputs, kernel)``."""
    return tensor.T.unsqueeze(-1) if _is_transposed(module) else tensor.unsqueeze(-1).flatten(2)


def weight_axes(module: nn.Module) -> tuple[int, int]:
    """Return the output axis and the input axis in a layer's weight."""
    return (1, 0) if _is_transposed(module) else (0, 1)


def unit_axis(module: nn.Module) -> int:
    """Return the (negative) index of the unit axis in a layer's inputs and outputs."""
    return -1 - len(module.kernel_size) if isinstance(module, _CONVOLUTIONS) else -1


def calls_per_sample(module: nn.Module) -> int:
    """Return how often a layer runs per sample, or 1 if this is unknown."""
    count: int = getattr(module, _POSITIONS, 1)
    return count


def knows_calls_per_sample(module: nn.Module) -> bool:
    """Return True if it is known how often a layer runs per sample."""
    return _POSITIONS in vars(module)


def set_calls_per_sample(module: nn.Module, count: int | None) -> None:
    """Set how often a layer runs per sample, or None if this is unknown.

    The count is stored in a plain attribute, so the module's state dict does not change.
    """
    vars(module).pop(_POSITIONS, None)
    if count is not None:
        vars(module)[_POSITIONS] = count


# Modules that the ledger counts, or whose weights are not used in matrix products.
_COUNTED_OR_FREE = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.GroupNorm)


@dataclass(frozen=True)
class LinearMap:
    """A linear layer in a network, with the gates on its inputs and outputs.

    Args:
        name: Name of the module.
        linear: The module.
        input_gate: The gate that sets some inputs to exactly zero; None if unknown.
        output_gate: The gate that closes some outputs; None if unknown.
        skips_rows: Whether closed outputs need not be computed.
    """

    name: str
    linear: Any
    input_gate: GateLike | None = None
    output_gate: GateLike | None = None
    skips_rows: bool = False

    @property
    def macs_dense(self) -> int:
        """MACs per sample for the full matrix, over all calls."""
        return int(self.linear.weight.numel()) * calls_per_sample(self.linear)

    @property
    def connections(self) -> int:
        """MACs per sample for the existing connections, over all calls."""
        mask = connection_mask(self.linear)
        if mask is None:
            return self.macs_dense
        known: int | None = getattr(self.linear, "connection_count", None)
        # Counting forces a device synchronisation, so prefer the known count.
        return (int(mask.sum()) if known is None else known) * calls_per_sample(self.linear)

    @property
    def is_gated(self) -> bool:
        """Whether there is a gate on the inputs or on the outputs."""
        return self.input_gate is not None or self.output_gate is not None

    @property
    def is_first_of_gate(self) -> bool:
        """Whether this layer is the main producer of a gate's units, rather than a partner."""
        return self.output_gate is not None and self.linear is self.output_gate.feeds.producer

    def matrix(self, tensor: Tensor) -> Tensor:
        """Return a tensor that has the shape of the weight as ``(outputs, inputs, kernel)``."""
        return as_matrix(self.linear, tensor)

    def expand_to_units(
        self, of: Callable[[GateLike], Tensor | None], every_output: bool = False
    ) -> list[Tensor | None]:
        """Expand the block values that `of` returns for a gate to outputs and to inputs.

        The result is a list of two tensors, for the outputs and for the inputs. A tensor is None if
        there is no gate. The first one is also None if closed outputs must be computed anyway,
        unless `every_output` is True.
        """
        ends: list[Tensor | None] = []
        saves = self.skips_rows or every_output
        for gate in (self.output_gate if saves else None, self.input_gate):
            value = None if gate is None else of(gate)
            ends.append(None if gate is None or value is None else self._expand(gate, value))
        return ends

    def _expand(self, gate: GateLike, per_block: Tensor) -> Tensor:
        rows = gate.feeds.rows.get(self.linear)
        if rows is None or gate is not self.output_gate:
            return per_block.repeat_interleave(gate.block_size, -1)
        return per_block[..., rows.to(per_block.device)]


def linear_maps(module: nn.Module) -> list[LinearMap]:
    """Return the linear layers in a module in order, excluding layers inside gates.

    >>> from dg_lightning import GatedMLP
    >>> [m.name for m in linear_maps(GatedMLP(8, [4], 2, gate={"kind": "static"}))]
    ['hidden.0.linear', 'output']
    """
    gates = gate_layers(module, required=False).values()
    in_gates = gate_submodules(module)
    producers = {producer: gate for gate in gates for producer in gate.feeds.producers}
    consumers = {consumer: gate for gate in gates for consumer in gate.feeds.consumers}
    maps = []
    for name, child in module.named_modules():
        counted = isinstance(child, nn.Linear) or knows_calls_per_sample(child)
        if (counted or child in producers or child in consumers) and child not in in_gates:
            made = producers.get(child)
            skips_rows = made is not None and made.feeds.skips_rows
            maps.append(LinearMap(plain_name(name), child, consumers.get(child), made, skips_rows))
    return maps


def executed_macs(linear_map: LinearMap) -> Tensor:
    """Return the MACs that a layer executed in the last forward pass, as int64.

    The result has one entry per sample. It is 0-d if the count is the same for all samples.
    """
    outputs, inputs = linear_map.expand_to_units(_open_blocks)
    linear, mask = linear_map.linear, connection_mask(linear_map.linear)
    runs = calls_per_sample(linear)
    if mask is None:
        all_outputs, all_inputs, kernel = linear_map.matrix(linear.weight).shape
        pairs = _open_count(inputs, all_inputs) * _open_count(outputs, all_outputs)
        return pairs * (kernel * runs)
    # Row sums are integers below 2^24, which float32 represents exactly. The total may be larger.
    rows = linear_map.matrix(mask.to(linear.weight.device, torch.float32)).sum(-1)
    if inputs is not None:
        with torch.autocast(rows.device.type, enabled=False):
            per_row = inputs.float() @ rows.T
    else:
        per_row = rows.sum(-1)
    per_row = per_row.round().long()
    return (per_row if outputs is None else per_row * outputs).sum(-1) * runs


def expected_macs(linear_map: LinearMap) -> Tensor:
    """Return the MACs per sample as a fraction of the dense MACs, with p in place of g."""
    outputs, inputs = linear_map.expand_to_units(_probability)
    linear, mask = linear_map.linear, connection_mask(linear_map.linear)
    if mask is None:
        one = torch.ones((), device=linear.weight.device)
        open_in = one if inputs is None else inputs.mean(-1)
        return open_in * (one if outputs is None else outputs.mean(-1))
    rows = linear_map.matrix(mask.to(linear.weight.device, torch.float32)).mean(-1)
    with torch.autocast(rows.device.type, enabled=False):
        per_row = rows.mean(-1) if inputs is None else inputs.float() @ rows.T / rows.shape[-1]
    return (per_row if outputs is None else per_row * outputs).mean(-1)


def decision_macs(gate: GateLike, maps: Sequence[LinearMap]) -> Tensor:
    """Return the MACs per sample for a gate's decisions in the last pass, over open inputs."""
    before = gate_before(gate, maps)
    inputs = None if before is None else _open_blocks(before).sum(-1) * before.block_size
    return gate.decision_macs(inputs) * decisions(gate)


def expected_decision_macs(gate: GateLike, maps: Sequence[LinearMap]) -> Tensor:
    """Return the expected MACs of a decision, as a fraction of a decision over all inputs."""
    before = gate_before(gate, maps)
    p = None if before is None else _probability(before)
    inputs = None if before is None or p is None else p.sum(-1) * before.block_size
    return gate.decision_macs(inputs) / max(int(gate.decision_macs()), 1)


def dense_decision_macs(gate: GateLike) -> int:
    """Return the MACs per sample for a gate's decisions, with all inputs open."""
    return int(gate.decision_macs()) * decisions(gate)


def decisions(gate: GateLike) -> int:
    """Return how often a gate decides per sample, or 1 if this is unknown."""
    producer = gate.feeds.producer
    return 1 if producer is None else calls_per_sample(producer)


def gate_before(gate: GateLike, maps: Sequence[LinearMap]) -> GateLike | None:
    """Return the gate before this one, which gates the inputs that its GateNet reads."""
    return next((m.input_gate for m in maps if m.linear is gate.feeds.producer), None)


def needed_parameters(module: nn.Module) -> int:
    """Count the parameters needed in deployment, based on the last forward pass.

    Missing connections can be removed, and so can rows and columns that static gates close. Units
    with input-dependent gates cannot be removed.

    >>> from dg_lightning import GatedMLP
    >>> mlp = GatedMLP(8, [4], 2, gate={"kind": "static"}).eval()
    >>> _ = mlp.hidden[0].gate.logit.data[:3].fill_(-1), mlp(torch.zeros(1, 8))
    >>> needed_parameters(mlp)  # 8 + 1 for the open unit, and 2 x 1 + 2 for the output layer
    13
    """
    maps = linear_maps(module)
    static = [g for g in gate_layers(module, required=False).values() if not g.input_dependent]
    counted = {id(p) for m in maps for p in m.linear.parameters()}
    counted |= {id(p) for gate in static if isinstance(gate, nn.Module) for p in gate.parameters()}
    total = sum(p.numel() for p in module.parameters() if id(p) not in counted)
    for linear_map in maps:
        kept = torch.ones_like(linear_map.linear.weight, dtype=torch.bool)
        mask = connection_mask(linear_map.linear)
        if mask is not None:
            kept &= mask.to(kept.device)
        kept = linear_map.matrix(kept)
        outputs, inputs = linear_map.expand_to_units(
            lambda g: None if g.input_dependent else _open_blocks(g)
        )
        # After training, a Trainer moves modules to the CPU, but not the recorded gates.
        if inputs is not None:
            kept = kept & inputs[:, None].to(kept.device)
        if outputs is not None:
            kept = kept & outputs[:, None, None].to(kept.device)
        rows = len(kept) if outputs is None else int(outputs.sum())
        total += int(kept.sum()) + (rows if linear_map.linear.bias is not None else 0)
    return total


def uncounted_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules, keyed by name, whose weights the ledger cannot count."""
    known = gate_submodules(module) | {m.linear for m in linear_maps(module)}
    return {
        plain_name(name) or type(child).__name__: child
        for name, child in module.named_modules()
        if any(p.ndim > 1 for p in child.parameters(recurse=False))
        and not isinstance(child, _COUNTED_OR_FREE)
        and child not in known
    }


def gate_submodules(module: nn.Module) -> set[nn.Module]:
    """Return all gates in a module, and their submodules."""
    gates = gate_layers(module, required=False).values()
    return {child for gate in gates if isinstance(gate, nn.Module) for child in gate.modules()}


def _open_blocks(gate: GateLike) -> Tensor:
    """Return which blocks were open in the last forward pass, as bool ``(..., blocks)``."""
    if gate.gate is None:
        raise RuntimeError(
            f"A gate with {gate.units} units has not run, so its MACs are unknown: run the "
            "whole net first."
        )
    return gate.gate.detach() != 0


def _probability(gate: GateLike) -> Tensor | None:
    return None if gate.probability is None else gate.probability.detach()


def _open_count(is_open: Tensor | None, width: int) -> Tensor:
    return torch.tensor(width) if is_open is None else is_open.sum(-1)
