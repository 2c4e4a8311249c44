"""What compact models save, and which budget of MACs takes a share of the time."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dg_lightning import GatedMLP, gate_layers
from dg_lightning.budget.budget import gate_budgets
from dg_lightning.surgery import (
    LatencyTable,
    add_gates,
    compact,
    measure_latency,
    measure_savings,
    measuring,
)
from dg_lightning.surgery.gating import gated_units

X = torch.randn(4, 24, generator=torch.Generator().manual_seed(0))


def gated(**given: Any) -> nn.Module:
    torch.manual_seed(0)
    settings: Any = given or {"kind": "static"}
    net = nn.Sequential(
        nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)
    )
    add_gates(net, feed_forward=settings, example=X)
    return net.eval()


def flops_of(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine on which every call takes a millisecond and as many nanoseconds as it has FLOPs."""
    devices: list[str] = []

    def seconds(runs: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
        devices.append(device.type)
        return {name: 1e-3 + 1e-9 * flops_of(run) for name, run in runs.items()}

    monkeypatch.setattr(measuring, "median_seconds", seconds)
    return devices


def test_the_table_has_the_macs_and_times_of_compact_models(clock: list[str]) -> None:
    model = gated()
    table = measure_latency(model, X, shares=(0.25, 0.5), multiples=(1,))
    dense = 24 * 64 + 64 * 64 + 64 * 8
    kept = [24 * n + n * n + n * 8 for n in (16, 32)]
    assert table.macs == pytest.approx([macs / dense for macs in kept])
    samples = len(X)
    times = [1e-3 + 1e-9 * 2 * samples * macs for macs in (*kept, dense)]
    assert table.times == pytest.approx([time / times[-1] for time in times[:2]])
    assert clock == ["cpu", "cpu"]


def test_a_budget_from_the_table_takes_the_time(clock: list[str]) -> None:
    model = gated()
    table = measure_latency(model, X, batch_size=64)
    wanted = (1 + min(table.times)) / 2
    budget = table.budget(wanted)
    share = next(n for n in range(1, 65) if used_by(model, n) >= budget)
    compacted = compact(kept(model, share), X, multiple=1).model
    x = X[torch.arange(64) % 4]
    pair = [1e-3 + 1e-9 * flops_of(partial(net, x)) for net in (compacted, gated())]
    assert pair[0] / pair[1] == pytest.approx(wanted, rel=0.02)


def kept(model: nn.Module, count: int) -> nn.Module:
    twin = copy.deepcopy(model)
    for _, gate in gated_units(twin).values():
        logit: Any = gate.logit
        logit.data[:count], logit.data[count:] = 5.0, -5.0
    return twin


def used_by(model: nn.Module, count: int) -> float:
    twin = kept(model, count)
    twin(X)
    return float(gate_budgets(twin, {"": 1.0}, None, "macs")[""].used())


def test_the_fastest_multiple_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(runs: Mapping[str, Any], device: torch.device) -> dict[str, float]:
        return {name: {"1": 3.0, "8": 1.0, "32": 2.0}.get(name, 4.0) for name in runs}

    monkeypatch.setattr(measuring, "median_seconds", seconds)
    assert measure_latency(gated(), X, multiples=(1, 8, 32)).multiple == 8


@pytest.mark.parametrize(
    ("asked", "expected"), [(1.0, 1.0), (0.9, 0.875), (0.8, 0.75), (0.55, 0.375), (0.4, 0.25)]
)
def test_a_budget_between_two_measurements_is_interpolated(asked: float, expected: float) -> None:
    table = LatencyTable(1, [0.25, 0.5, 0.75], [0.4, 0.7, 0.8])
    assert table.budget(asked) == pytest.approx(expected)


def test_a_dense_model_that_is_slower_than_a_version_never_wins() -> None:
    table = LatencyTable(1, [0.5, 0.75], [0.6, 1.1])  # 75 % of the MACs take longer than all
    assert table.budget(1.0) == 1.0
    assert table.budget(0.85) == pytest.approx(0.625)


def test_the_model_stays_as_it_is_and_runs_where_it_is_asked_to(clock: list[str]) -> None:
    model = gated()
    before = copy.deepcopy(model.state_dict())
    seen: list[torch.dtype] = []

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0].dtype)

    model.get_submodule("0").register_forward_pre_hook(note)
    measure_latency(model, X, dtype=torch.bfloat16, shares=(0.5,), multiples=(1,))
    assert torch.bfloat16 in seen
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no gates from `add_gates`"):
        measure_latency(nn.Linear(2, 2), torch.ones(1, 2))
    dynamic = gated(kind="dynamic", network="low_rank", rank=2)
    with pytest.raises(ValueError, match="kind='static'"):
        measure_latency(dynamic, X)
    with pytest.raises(ValueError, match=r"in \(0, 1\), got \[\]"):
        measure_latency(gated(), X, shares=[])
    table = LatencyTable(1, [0.25, 0.5], [0.6, 0.5])
    with pytest.raises(ValueError, match=r"at least 0\.5 .* got 0\.3.* 50% of the MACs"):
        table.budget(0.3)
    with pytest.raises(ValueError, match=r"in \(0, 1\], got 0"):
        table.budget(0)


def test_parameters_macs_and_bytes_are_those_of_the_layers() -> None:
    net, x = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(3, 8)
    plain = copy.deepcopy(net)
    add_gates(net, feed_forward={"kind": "static"}, example=x)
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
    add_gates(net, feed_forward={"kind": "static"}, example=x)
    table = measure_savings(net, compact(net, x), x, batch_sizes=[2]).table()
    assert list(table.columns[0].cells) == [
        "parameters", "MACs per sample", "weights, MB", "batch of 2, ms",
    ]  # fmt: skip
    assert list(table.columns[3].cells)[:3] == ["1.00", "1.00", "1.00"]


def test_before_is_without_gates_of_our_own_layers_too() -> None:
    net = GatedMLP(8, [4], 2, gate={"kind": "dynamic"}, input_gate={"kind": "static"}).eval()
    x = torch.randn(3, 8)
    found = measure_savings(net, compact(net, x), x, batch_sizes=[])
    assert found.macs[0] == 8 * 4 + 4 * 2
    assert found.parameters[0] == 9 * 4 + 5 * 2
    assert found.macs[1] == found.macs[0] + 8 * 4  # its GateNet
