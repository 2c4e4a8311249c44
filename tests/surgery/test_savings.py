import copy
from typing import Any

import torch
from torch import nn

from dg_lightning import add_gates, gate_layers
from dg_lightning.surgery import compact, measure_savings

STATIC: Any = {"kind": "static"}


def test_parameters_macs_and_bytes_are_those_of_the_layers() -> None:
    net, x = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(3, 8)
    plain = copy.deepcopy(net)
    add_gates(net, feed_forward=STATIC, example=x)
    (gate,) = gate_layers(net).values()
    gate.logit.data[:3] = -1.0  # type: ignore[attr-defined]
    found = measure_savings(net, compact(net, x), x, batch_sizes=[1, 5])
    assert found.parameters == (sum(p.numel() for p in plain.parameters()), 9 + 4)
    assert found.macs == (8 * 4 + 4 * 2, 8 + 2)
    assert found.megabytes == (46 * 4 / 1e6, 13 * 4 / 1e6)
    assert set(found.milliseconds) == {1, 5}
    assert all(time > 0 for pair in found.milliseconds.values() for time in pair)
    assert list(gate_layers(net))  # the model keeps its gates


def test_the_table_has_a_row_for_each_batch_size() -> None:
    net, x = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(3, 8)
    add_gates(net, feed_forward=STATIC, example=x)
    table = measure_savings(net, compact(net, x), x, batch_sizes=[2]).table()
    assert list(table.columns[0].cells) == [
        "parameters", "MACs per sample", "weights, MB", "batch of 2, ms",
    ]  # fmt: skip
    assert list(table.columns[3].cells)[:3] == ["1.00", "1.00", "1.00"]
