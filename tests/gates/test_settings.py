from typing import Any

import pytest

from dg_lightning import DynamicGate, StaticGate
from dg_lightning.gates import make_gate


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 3}, "`block_size` must divide `units`=8, got 3"),
        ({"temperature": 0.0}, "`temperature` must be above 0, got 0.0"),
        ({"threshold": 1.0}, r"`threshold` must be in \[0, 1\), got 1.0"),
        ({"initial_open_rate": 1.0}, r"`initial_open_rate` must be in \(0, 1\), got 1.0"),
        ({"policy": "top_k"}, "`k` .* got k=None"),
        ({"k": 3}, "`k` .* got k=3"),
        ({"policy": "top_k", "k": 9}, "`k` must be from 1 to 8 gates, got 9"),
        ({"policy": "topk"}, "`policy` must be one of"),
        ({"min_open": 1.5}, "`min_open` .* got 1.5"),
        ({"min_open": "150%"}, "`min_open` .* got '150%'"),
        ({"min_open": "many"}, "`min_open` .* got 'many'"),
        ({"min_open": 9}, "`min_open` must be from 0 to 8 gates, got 9"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StaticGate(8, **options)


def test_a_gate_that_would_start_closed_warns() -> None:
    with pytest.warns(UserWarning, match="`initial_open_rate` 0.5"):
        StaticGate(8, initial_open_rate=0.5, threshold=0.6)


def test_make_gate_builds_from_plain_values_and_names_what_is_wrong() -> None:
    gate = make_gate({"kind": "dynamic", "network": "low_rank", "rank": 2, "block_size": 4}, 5, 8)
    assert isinstance(gate, DynamicGate)
    assert gate.blocks == 2
    with pytest.raises(ValueError, match=r"`gate`.*'rank'"):
        make_gate({"kind": "static", "rank": 2}, 5, 8)
    with pytest.raises(ValueError, match="static or dynamic, got 'dynamc'"):
        make_gate({"kind": "dynamc"}, 5, 8)  # type: ignore[typeddict-item]
    with pytest.raises(ValueError, match="linear, low_rank or mlp, got 'deep'"):
        DynamicGate(5, 8, network="deep")  # type: ignore[arg-type]
