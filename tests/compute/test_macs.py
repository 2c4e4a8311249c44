import io
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dg_lightning import DynamicGate, GatedLinear, GatedMLP, StaticGate, gate_layers
from dg_lightning.compute.macs import executed_macs, expected_macs, linear_maps, uncounted_modules
from dg_lightning.compute.metric import ComputeLedger, ComputeReport


def report_of(net: nn.Module, x: Tensor) -> ComputeReport:
    net.eval()
    net(x)
    ledger = ComputeLedger(net)
    ledger.update(net, len(x))
    return ledger.report(net)


def open_first(gate: Any, count: int) -> None:
    """Open the first `count` units of a static gate, close the rest."""
    gate.logit.data = torch.where(torch.arange(gate.units) < count, 5.0, -5.0)


def counted_by_hand(net: GatedMLP, x: Tensor) -> list[list[int]]:
    """Executed MACs of every map and sample, counted entry by entry from first principles."""
    gates = gate_layers(net, required=False)
    maps = {name: m for name, m in net.named_modules() if isinstance(m, nn.Linear)}
    rows: list[list[int]] = []
    previous = gates.get("input_gate")
    names = [f"hidden.{i}" for i in range(len(net.hidden))] + ["output"]
    for name in names:
        linear = maps[name if name == "output" else f"{name}.linear"]
        own = gates.get(f"{name}.gate")
        mask = getattr(linear, "connection_mask", torch.ones_like(linear.weight)).bool()
        counts = []
        for sample in range(len(x)):
            total = 0
            for i in range(linear.out_features):
                for j in range(linear.in_features):
                    total += (
                        bool(mask[i, j])
                        and unit_open(own, sample, i)
                        and unit_open(previous, sample, j)
                    )
            counts.append(total)
        rows.append(counts)
        previous = own
    return rows


def unit_open(gate: Any, sample: int, unit: int) -> bool:
    if gate is None:
        return True
    g = gate.gate if gate.gate.ndim == 1 else gate.gate[sample]
    return bool(g[unit // gate.block_size] == 1)


@pytest.mark.parametrize(
    ("widths", "macs"),
    [
        ([784, 256, 10], 203_264),
        ([3072, 1024, 512, 10], 3_675_136),
        ([1640, 512, 256, 12], 973_824),
        ([2000, 1000, 500, 9], 2_504_500),
    ],
)
def test_dense_macs_of_the_paper(widths: list[int], macs: int) -> None:
    net = GatedMLP(widths[0], widths[1:-1], widths[-1])
    x = torch.randn(1, widths[0])
    report = report_of(net, x)
    assert report.macs == report.macs_dense == macs
    assert report.compute_proxy("g") == report.relative_macs("p", fused=True) == 1
    with FlopCounterMode(display=False) as counter:  # an outside opinion
        net(x)
    assert counter.get_total_flops() == 2 * macs


def test_cifar_row_of_the_paper_962_and_148_open() -> None:
    net = GatedMLP(3072, [1024, 512], 10, gate={"kind": "static"})
    open_first(gate_layers(net)["hidden.0.gate"], 962)
    open_first(gate_layers(net)["hidden.1.gate"], 148)
    report = report_of(net, torch.randn(3, 3072))
    assert report.macs == 3072 * 962 + 962 * 148 + 148 * 10 == 3_099_120
    assert report.macs / report.macs_dense == pytest.approx(0.8433, abs=5e-5)
    # RelMAC leaves the output layer out and gives no credit for closed inputs.
    assert report.relative_macs("g") == pytest.approx(0.8465, abs=5e-5)
    assert report.compute_proxy("g") == pytest.approx((962 / 1024 + 148 / 512) / 2)
    assert report.macs_as_implemented == 3_675_136


def test_mnist_row_of_the_paper_612_inputs_and_246_units_open() -> None:
    net = GatedMLP(784, [256], 10, gate={"kind": "static"}, input_gate={"kind": "static"})
    open_first(gate_layers(net)["input_gate"], 612)
    open_first(gate_layers(net)["hidden.0.gate"], 246)
    report = report_of(net, torch.randn(3, 784))
    # The published rule, 2 * (784 r_in 256 + 256 r_hid 10) = 318,263 FLOPs, skips no closed row;
    # ours does: the gate is known before the product.
    assert 2 * 612 * 256 + 2 * 246 * 10 == 318_264  # 318,263 after the script's float32 rounding
    assert report.macs == 612 * 246 + 246 * 10
    assert report.relative_macs("g") == pytest.approx(246 / 256)


def test_speech_row_of_the_paper_473_and_210_open() -> None:
    net = GatedMLP(1640, [512, 256], 12, gate={"kind": "static"})
    open_first(gate_layers(net)["hidden.0.gate"], 473)
    open_first(gate_layers(net)["hidden.1.gate"], 210)
    report = report_of(net, torch.randn(2, 1640))
    assert report.macs == 1640 * 473 + 473 * 210 + 210 * 12 == 877_570
    assert report.macs / report.macs_dense == pytest.approx(0.901, abs=5e-4)


def test_pbmc_gate_networks_cost_144_000_macs_which_the_paper_leaves_out() -> None:
    low_rank: Any = {"kind": "dynamic", "network": "low_rank", "rank": 32}
    net = GatedMLP(2000, [1000, 500], 9, activation="gelu", gate=low_rank, input_norm="layer")
    report = report_of(net, torch.randn(2, 2000))
    assert report.gate_macs == (2000 + 1000) * 32 + (1000 + 500) * 32 == 144_000
    assert report.macs == 2_504_500 + 144_000
    assert report.macs_as_implemented == report.macs
    # With every unit of layer 1 closed, the second GateNet has no open input to read.
    gate_layers(net)["hidden.0.gate"].shift_bias(-50.0)
    report = report_of(net, torch.randn(2, 2000))
    assert report.gate_macs == (2000 + 1000) * 32 + 500 * 32 == 112_000
    assert report.macs == 112_000 + 500 * 9


@given(
    widths=st.lists(st.sampled_from([2, 4, 6]), min_size=2, max_size=4),
    kind=st.sampled_from(["static", "dynamic"]),
    block_size=st.sampled_from([1, 2]),
    input_gate=st.sampled_from([None, "static", "dynamic"]),
    masked=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_executed_macs_equal_a_count_entry_by_entry(
    widths: list[int], kind: Any, block_size: int, input_gate: Any, masked: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    gate: Any = {"kind": kind, "block_size": block_size}
    inputs: Any = None if input_gate is None else {"kind": input_gate}
    net = GatedMLP(widths[0], widths[1:], 3, gate=gate, input_gate=inputs).eval()
    for one in gate_layers(net).values():
        for parameter in one.parameters():  # type: ignore[attr-defined]
            nn.init.normal_(parameter, std=2)
    if masked:
        for linear_map in linear_maps(net):
            weight = linear_map.linear.weight
            linear_map.linear.connection_mask = torch.rand_like(weight) < 0.5
    x = torch.randn(4, widths[0])
    report = report_of(net, x)
    by_hand = counted_by_hand(net, x)
    maps = linear_maps(net)
    for linear_map, counts in zip(maps, by_hand, strict=True):
        assert executed_macs(linear_map).expand(4).tolist() == counts
    mapped = [layer for layer in report.layers if layer.is_map]
    assert [layer.macs for layer in mapped] == [sum(counts) / 4 for counts in by_hand]
    assert report.macs <= report.macs_dense + report.gate_macs
    assert report.macs_dense + report.gate_macs <= report.macs_as_implemented
    assert report.macs == sum(layer.macs for layer in report.layers) + report.gate_macs
    if masked:
        kept = [m.linear.connection_mask.float().mean().item() for m in maps]
        assert [layer.density for layer in mapped] == pytest.approx(kept)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_expected_macs_are_the_mean_of_products_not_the_product_of_means(
    kind: Any, masked: bool
) -> None:
    net = GatedMLP(6, [4, 4], 3, gate={"kind": kind}).eval()
    for gate in gate_layers(net).values():
        for parameter in gate.parameters():  # type: ignore[attr-defined]
            nn.init.normal_(parameter, std=2)
    middle = linear_maps(net)[1]
    mask = torch.rand(4, 4) < 0.6 if masked else torch.ones(4, 4, dtype=torch.bool)
    if masked:
        middle.linear.connection_mask = mask
    net(torch.randn(9, 6))
    first, second = (g.probability.expand(9, 4) for g in gate_layers(net).values())  # type: ignore[union-attr]
    by_hand = torch.einsum("bi,ij,bj->b", second, mask.float(), first)
    share = expected_macs(middle).expand(9)
    torch.testing.assert_close(share * 16, by_hand)


def test_no_credit_for_own_rows_behind_a_layer_norm_nor_for_normalised_inputs() -> None:
    net = GatedMLP(6, [4], 3, norm="layer", gate={"kind": "static"}, input_gate={"kind": "static"})
    open_first(gate_layers(net)["hidden.0.gate"], 1)
    open_first(gate_layers(net)["input_gate"], 2)
    assert report_of(net, torch.randn(2, 6)).macs == 2 * 4 + 1 * 3
    net = GatedMLP(6, [4], 3, gate={"kind": "static"}, input_gate={"kind": "static"}, norm="batch")
    open_first(gate_layers(net)["hidden.0.gate"], 1)
    assert report_of(net, torch.randn(2, 6)).macs == 6 * 1 + 1 * 3
    net = GatedMLP(6, [4], 3, input_gate={"kind": "static"}, input_norm="batch")
    open_first(gate_layers(net)["input_gate"], 2)
    assert report_of(net, torch.randn(2, 6)).macs == 6 * 4 + 4 * 3


def test_a_foreign_net_gets_credit_only_for_what_is_certain() -> None:
    gate = StaticGate(8)
    net = nn.Sequential(GatedLinear(6, 8, gate=gate), nn.LayerNorm(8), nn.Linear(8, 3))
    open_first(gate, 2)
    # Own rows are skipped. What the next map reads is unknown, so it counts in full.
    assert report_of(net, torch.randn(2, 6)).macs == 6 * 2 + 8 * 3


def test_a_gate_of_unknown_place_still_pays_for_its_network() -> None:
    class ByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.linear = DynamicGate(64, 8), nn.Linear(64, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.gate(x) * self.linear(x)
            return out

    report = report_of(ByHand(), torch.randn(2, 64))
    assert report.gate_macs == 64 * 8
    assert report.macs == report.macs_as_implemented == 2 * 64 * 8


def test_sequences_count_by_the_mean_position() -> None:
    gate = DynamicGate(4, 8)
    nn.init.normal_(gate.network[0].weight)  # type: ignore[arg-type]
    net = nn.Sequential(GatedLinear(4, 8, gate=gate), nn.Linear(8, 3))
    x = torch.randn(6, 5, 4)
    by_position = report_of(net, x.flatten(0, 1)).metrics()
    assert report_of(net, x).metrics() == pytest.approx(by_position)
    assert by_position["compute/proxy_g"] < 1


def test_what_is_not_counted_is_named() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    assert list(uncounted_modules(net)) == ["0"]
    report = report_of(net, torch.randn(2, 1, 4, 4))
    assert report.uncounted == ("0",)
    assert "not counted: 0." in str(report.table().caption)
    assert uncounted_modules(GatedMLP(6, [4], 3, norm="layer", gate={"kind": "dynamic"})) == {}


def test_expected_decisions_use_p_too() -> None:
    gate: Any = {"kind": "dynamic", "initial_open_rate": 0.6}
    net = GatedMLP(8, [4, 4], 3, gate=gate)
    maps = 8 * 4 * 0.6 + 4 * 4 * 0.36 + 4 * 3 * 0.6
    assert report_of(net, torch.randn(2, 8)).macs_expected == pytest.approx(
        maps + 8 * 4 + 4 * 4 * 0.6
    )


def test_fused_proxy_is_density_times_open_rate() -> None:
    net = GatedMLP(6, [4, 8], 3, gate={"kind": "static"})
    open_first(gate_layers(net)["hidden.0.gate"], 2)
    open_first(gate_layers(net)["hidden.1.gate"], 2)
    first = linear_maps(net)[0].linear
    first.connection_mask = torch.arange(24).reshape(4, 6) % 4 == 0
    report = report_of(net, torch.randn(2, 6))
    assert report.relative_macs("g") == pytest.approx((24 * 0.5 + 32 * 0.25) / 56)
    assert report.relative_macs("g", fused=True) == pytest.approx(
        (24 * 0.5 * 0.25 + 32 * 0.25) / 56
    )


def test_counts_beyond_float32_stay_exact() -> None:
    net = GatedMLP(5000, [5001], 1, gate={"kind": "static"})
    linear_maps(net)[0].linear.connection_mask = torch.ones(5001, 5000, dtype=torch.bool)
    assert report_of(net, torch.randn(3, 5000)).macs == 5000 * 5001 + 5001


def test_a_ledger_without_a_forward_pass_says_so() -> None:
    net = GatedMLP(6, [4], 3, gate={"kind": "static"})
    with pytest.raises(RuntimeError, match="4 units has not run"):
        ComputeLedger(net).update(net, 1)
    with (
        pytest.warns(UserWarning, match="before the"),
        pytest.raises(RuntimeError, match="no samples"),
    ):
        ComputeLedger(net).report(net)


def test_table_has_a_line_a_layer_and_fits_a_terminal() -> None:
    from rich.console import Console

    net = GatedMLP(784, [256, 128], 10, gate={"kind": "dynamic"}, input_gate={"kind": "static"})
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(report_of(net, torch.randn(2, 784)).table())
    text = console.export_text()
    for name in ("input_gate", "hidden.0", "hidden.1", "output", "total", "200,704"):
        assert name in text
    assert "…" not in text
