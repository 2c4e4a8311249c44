from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dg_lightning import GatedMLP, gate_layers
from dg_lightning.compute.metric import ComputeLedger, ComputeReport


def some_net(kind: str = "dynamic") -> GatedMLP:
    torch.manual_seed(0)
    gate: Any = {"kind": kind, "block_size": 2}
    net = GatedMLP(6, [8, 4], 3, gate=gate, input_gate={"kind": "static"}).eval()
    for one in gate_layers(net).values():
        for parameter in one.parameters():  # type: ignore[attr-defined]
            nn.init.normal_(parameter)
    return net


def ledger_over(net: GatedMLP, batches: list[torch.Tensor]) -> ComputeReport:
    ledger = ComputeLedger(net)
    for batch in batches:
        net(batch)
        ledger.update(net, len(batch))
    return ledger.report(net)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_batches_of_unequal_size_and_any_order_give_the_mean_over_samples(kind: str) -> None:
    net = some_net(kind)
    x = torch.randn(23, 6)
    whole = ledger_over(net, [x]).metrics()
    shuffled = x[torch.randperm(23)]
    assert ledger_over(net, list(shuffled.split([1, 9, 13]))).metrics() == pytest.approx(whole)


def test_open_rates_and_dead_units_by_hand() -> None:
    net = some_net("static")
    gate: Any = gate_layers(net)["hidden.0.gate"]
    gate.logit.data = torch.tensor([5.0, -5.0, 0.1, -0.1])
    (layer,) = (
        r for r in ledger_over(net, [torch.randn(3, 6)]).layers if r.name.startswith("hidden.0")
    )
    assert layer.open_rate_g == 0.5
    assert layer.dead_units == 4
    assert layer.open_rate_p == pytest.approx(torch.sigmoid(gate.logit).mean().item())


@pytest.mark.slow
def test_two_processes_equal_one_with_all_samples(
    in_two_processes: Callable[[str], list[Any]],
) -> None:
    ranks = in_two_processes("""
from test_metric import ledger_over, some_net
dist.init_process_group("gloo")
x = torch.randn(20, 6, generator=torch.Generator().manual_seed(5))
batches = [x[:7], x[7:9]] if dist.get_rank() == 0 else [x[9:]]
result = ledger_over(some_net(), batches).metrics()
""")
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(5))
    alone = ledger_over(some_net(), [x]).metrics()
    for figures in ranks:
        assert figures == pytest.approx(alone)
        assert figures["compute/macs"] == alone["compute/macs"]


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_an_empty_batch_changes_nothing(kind: str) -> None:
    net, x = some_net(kind), torch.randn(23, 6)
    alone = ledger_over(net, [x]).metrics()
    for batches in ([x, x[:0]], [x[:0], x]):
        assert ledger_over(net, batches).metrics() == pytest.approx(alone)


def test_an_empty_batch_of_tokens_changes_nothing() -> None:
    from dg_lightning.layers import GPT

    gate: Any = {"kind": "dynamic", "block_size": 8, "initial_spread": 1.0}
    net = GPT([10], 30, width=16, depth=1, heads=2, hidden=32, gate=gate).eval()
    tokens, reports = torch.randint(30, (3, 10)), []
    for batches in ([tokens], [tokens, tokens[:0]], [tokens[:0], tokens]):
        ledger = ComputeLedger(net)
        for batch in batches:
            net(batch)
            ledger.update(net, batch.numel())
        reports.append(ledger.report(net).metrics())
    for other in reports[1:]:
        assert other == pytest.approx(reports[0])
