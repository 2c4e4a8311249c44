"""What gates do over samples, against numpy on the same decisions."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dg_lightning import DynamicGate, StaticGate
from dg_lightning.monitoring.activity import (
    BINS,
    GateActivity,
    GateHistory,
    GateSnapshot,
    HistoryEntry,
    _target,
)


def dynamic(units: int = 12, **arguments: Any) -> DynamicGate:
    torch.manual_seed(0)
    gate = DynamicGate(8, units, network="linear", initial_open_rate=0.5, **arguments).eval()
    torch.nn.init.normal_(gate.network[-1].weight)  # type: ignore[arg-type]
    return gate


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from([1, 3]))
@settings(max_examples=25, deadline=None)
def test_shares_means_and_histogram_are_those_of_all_samples(
    batches: list[int], block_size: int
) -> None:
    gate = dynamic(block_size=block_size)
    activity = GateActivity({"gate": gate}, num_classes=3)
    decided, chances, labels = [], [], []
    for size in batches:
        target = torch.randint(3, (size,))
        gate(torch.randn(size, 8))
        assert gate.gate is not None
        assert gate.probability is not None
        activity.update(size, target)
        decided.append(gate.gate.detach().numpy() != 0)
        chances.append(gate.probability.detach().numpy())
        labels.append(target.numpy())
    (look,) = activity.snapshots()
    g, p, y = np.concatenate(decided), np.concatenate(chances), np.concatenate(labels)
    np.testing.assert_allclose(look.g, g.mean(0), rtol=1e-6)
    np.testing.assert_allclose(look.p, p.mean(0), rtol=1e-5)
    expected, _ = np.histogram(p, BINS, (0, 1))
    # A p on the edge of a bin may fall on either side of it.
    assert np.abs(np.asarray(look.histogram) * p.size - expected).sum() <= 2
    assert look.by_class is not None
    for label in range(3):
        if (y == label).any():
            np.testing.assert_allclose(look.by_class[label], g[y == label].mean(0), rtol=1e-5)
        else:
            assert look.by_class[label].isnan().all()
    assert look.dead_units == int((g.sum(0) == 0).sum()) * block_size


def test_a_static_gate_counts_for_every_sample_beside_one_that_depends_on_the_input() -> None:
    static, other = StaticGate(4, initial_open_rate=0.9).eval(), dynamic()
    with torch.no_grad():
        static.logit[1] = -5.0
    activity = GateActivity({"static": static, "dynamic": other}, num_classes=2)
    for size in (5, 2):
        static(torch.randn(size, 4))
        other(torch.randn(size, 8))
        activity.update(size, torch.zeros(size, dtype=torch.long))
    first, second = activity.snapshots()
    assert first.g.tolist() == [1, 0, 1, 1]
    assert first.p[0].item() == pytest.approx(0.9)
    assert first.by_class is None  # it is the same for all
    assert second.by_class is not None
    assert second.by_class[1].isnan().all()
    torch.testing.assert_close(second.by_class[0], second.g)
    assert activity.rows.tolist() == [7, 7]


def test_positions_of_a_sequence_count_one_by_one_and_for_their_sample_s_class() -> None:
    gate = dynamic()
    gate(torch.randn(2, 5, 8))
    assert gate.gate is not None
    activity = GateActivity({"gate": gate}, num_classes=2)
    activity.update(2, torch.tensor([1, 0]))
    (look,) = activity.snapshots()
    torch.testing.assert_close(look.g, (gate.gate != 0).float().mean((0, 1)))
    assert look.by_class is not None
    torch.testing.assert_close(look.by_class, (gate.gate != 0).float().mean(1)[[1, 0]])


def test_training_is_counted_as_it_would_be_deployed() -> None:
    gate = StaticGate(6, policy="bernoulli", initial_open_rate=0.3)
    gate(torch.randn(50, 6))
    activity = GateActivity({"gate": gate})
    activity.update(50, training=True)
    (look,) = activity.snapshots()
    assert look.g.tolist() == [0.0] * 6  # p = 0.3 is below the threshold of 0.5
    assert look.by_class is None


def test_a_gate_that_took_no_part_is_named() -> None:
    with pytest.raises(RuntimeError, match="'lonely'"):
        GateActivity({"lonely": StaticGate(3)}).update(1)


def look(layer: str, *g: float) -> GateSnapshot:
    values = torch.tensor(g)
    return GateSnapshot(layer, 1, values, values, torch.zeros(BINS), None, 1.0, 0.5)


def test_churn_is_the_mean_change_since_the_last_look_also_when_that_was_let_go() -> None:
    history = GateHistory(max_entries=2)
    assert history.churn(look("a", 1, 1, 0, 0)) is None
    for epoch in range(8):
        history.add(HistoryEntry.from_gates(epoch, epoch, [look("a", 1, 1, 0, epoch % 2)]))
    assert history.churn(look("a", 1, 0, 0.5, 1)) == pytest.approx(1.5 / 4)
    assert history.churn(look("b", 1)) is None


def test_a_history_that_goes_on_is_the_undisturbed_one() -> None:
    whole, resumed = GateHistory(max_entries=4), GateHistory(max_entries=4)
    for epoch in range(11):
        whole.add(HistoryEntry.from_gates(epoch, epoch, [look("a", epoch)]))
        if epoch == 6:
            resumed.load_state_dict(whole.state_dict())
        elif epoch > 6:
            resumed.add(HistoryEntry.from_gates(epoch, epoch, [look("a", epoch)]))
    assert [k.epoch for k in resumed.entries_with_last()] == [
        k.epoch for k in whole.entries_with_last()
    ]
    assert [k.epoch for k in whole.entries_with_last()][-1] == 10
    assert len(whole.entries) <= 4


@pytest.mark.slow
def test_two_processes_count_as_one_with_all_samples(
    in_two_processes: Callable[[str], list[Any]],
) -> None:
    ranks = in_two_processes("""
dist.init_process_group("gloo")
rank = dist.get_rank()
from test_activity import dynamic
from dg_lightning.monitoring.activity import GateActivity
gate = dynamic()
torch.manual_seed(1)
x, y = torch.randn(20, 8), torch.randint(3, (20,))
activity = GateActivity({"gate": gate}, num_classes=3)
part = slice(rank * 8, 8 + rank * 12)
gate(x[part]); activity.update(len(y[part]), y[part])
both = activity.snapshots()[0]
alone = GateActivity({"gate": gate}, num_classes=3, distributed_available_fn=lambda: False)
gate(x); alone.update(20, y)
one = alone.snapshots()[0]
keys = ("g", "p", "histogram", "by_class")
result = [torch.allclose(getattr(both, k), getattr(one, k)) for k in keys]
""")
    assert ranks == [[True] * 4] * 2


def test_open_rates_by_position() -> None:
    gate = DynamicGate(6, 8, block_size=2, initial_spread=2.0).eval()
    activity = GateActivity({"gate": gate}, positions=5)
    expected = torch.zeros(5)
    for _ in range(2):
        with torch.no_grad():
            gate(torch.randn(3, 5, 6))
        assert gate.gate is not None
        expected += gate.gate.mean((0, 2)) / 2
        activity.update(samples=3)
    (snapshot,) = activity.snapshots()
    assert snapshot.by_position is not None
    torch.testing.assert_close(snapshot.by_position, expected)
    with torch.no_grad():
        gate(torch.randn(3, 4, 6))
    activity.update(samples=3)  # of another length
    assert activity.snapshots()[0].by_position is None


def test_the_class_of_a_token_is_the_token_itself() -> None:
    text = torch.randint(9, (3, 6))
    tokens = _target([text[:, :-1], text[:, 1:]])
    assert tokens is not None
    assert torch.equal(tokens, text[:, :-1].flatten())
    assert _target([text, text.flip(1)]) is None  # tags of tokens
    assert _target([text.float(), text]) is None
