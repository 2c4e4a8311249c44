"""Usage terms: what a penalty on expected gate usage adds to the loss (section 3.3 of the paper).

Pure, differentiable functions of the mean probability of each gate over the (global) batch.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dg_lightning.compute import LinearMap
from dg_lightning.protocol import GateLike

__all__ = ["expected_macs_usage", "linear_usage", "mean_probabilities", "without_a_price"]


def mean_probabilities(gates: Mapping[str, GateLike]) -> Tensor:
    """Return the mean p of each gate in its last forward pass, with the graph: ``(gates,)``."""
    means = []
    for name, gate in gates.items():
        if gate.probability is None:
            raise RuntimeError(
                f"Gate {name!r} has no probability: it took no part in the last forward pass."
            )
        means.append(gate.probability.mean())
    return torch.stack(means)


def linear_usage(means: Tensor) -> Tensor:
    """Return the paper's term: the sum over layers of the mean probability.

    >>> linear_usage(torch.tensor([0.5, 0.25])).item()
    0.75
    """
    return means.sum()


def expected_macs_usage(
    means: Tensor, gates: Sequence[GateLike], maps: Sequence[LinearMap]
) -> Tensor:
    """Return the MACs to expect from mean probabilities, as a share of the dense MACs.

    The sum over linear maps of ``connections * mean p_in * mean p_out``. Unlike the linear term it
    knows what a unit costs: closing one saves its row and its column.
    """
    mean_of = dict(zip(gates, means, strict=True))
    one = means.new_ones(())
    executed = means.new_zeros(())
    for linear_map in maps:
        rows = linear_map.output_gate if linear_map.skips_rows else None
        columns = linear_map.input_gate
        rows_open = one if rows is None else mean_of.get(rows, one)
        columns_open = one if columns is None else mean_of.get(columns, one)
        executed = executed + linear_map.connections * rows_open * columns_open
    return executed / sum(linear_map.macs_dense for linear_map in maps)


def without_a_price(gates: Mapping[str, GateLike], maps: Sequence[LinearMap]) -> list[str]:
    """Name the gates that no linear map depends on, which `expected_macs_usage` cannot press on."""
    priced = [m.input_gate for m in maps] + [m.output_gate for m in maps if m.skips_rows]
    return [name for name, gate in gates.items() if not any(gate is other for other in priced)]
