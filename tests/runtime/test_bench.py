import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dg_lightning import GatedMLP
from dg_lightning.runtime.bench import bench, draw, predicted_speed_up, random_net, save, table
from dg_lightning.runtime.timing import median_seconds, peak_bytes

CPU = torch.device("cpu")


def shape(dynamic: bool, open_rate: float = 0.25, block_size: int = 4) -> GatedMLP:
    return random_net(
        [16, 64, 8],
        open_rate,
        dynamic=dynamic,
        block_size=block_size,
        device=CPU,
        dtype=torch.float32,
    )


def test_predictions_by_hand() -> None:
    net = shape(dynamic=False)
    x = torch.randn(50, 16)
    assert predicted_speed_up(net, x) == pytest.approx(4.0)
    net = shape(dynamic=True)
    share = float(net.layers()[0].gate.decide(x).mean())  # type: ignore[union-attr,operator]
    dense = 16 * 64 + 64 * 8
    assert predicted_speed_up(net, x) == pytest.approx(dense / (dense * share + 16 * 16), rel=1e-6)
    assert 0.15 < share < 0.35


@pytest.mark.parametrize("dynamic", [False, True])
def test_every_way_has_a_row_for_every_batch_size(dynamic: bool, tmp_path: Path) -> None:
    rows, _ = bench(shape(dynamic), [1, 8], rounds=2)
    ways = ["dense", "masked", "compact", *(["blocks"] if dynamic else [])]
    assert [row.way for row in rows if row.batch_size == 8] == ways
    dense = rows[0]
    assert (dense.speed_up, dense.predicted, dense.realised) == (1.0, 1.0, 1.0)
    assert all(row.milliseconds > 0 and row.peak_mb > 0 for row in rows)
    assert rows[4].per_second == rows[4].batch_size / rows[4].milliseconds * 1e3
    assert table(rows, "title").row_count == len(rows)
    save(rows, tmp_path / "deep" / "bench.csv")
    with (tmp_path / "deep" / "bench.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    pytest.importorskip("matplotlib")
    draw(rows, tmp_path / "bench.png", "title")
    assert (tmp_path / "bench.png").stat().st_size > 5000


def test_sparse_connections_are_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    net = GatedMLP(64, [64], 8)
    net.layers()[0].linear.weight.data *= torch.rand(64, 64) < 0.1
    _, notes = bench(net, [4], rounds=2)
    assert any("of its connections" in note for note in notes)
    from dg_lightning.runtime import sparse

    monkeypatch.setattr(sparse, "fastest_form", lambda *_: {"dense": 1.0, "csr": 2.0})
    rows, _ = bench(net, [4], rounds=2)  # where a sparse form is faster
    assert rows[-1].way == "sparse"
    assert rows[-1].peak_mb > 0
    assert rows[-1].weights_mb < rows[0].weights_mb


def test_every_layer_of_a_shape_opens_what_was_asked_for() -> None:
    net = random_net(
        [64, 256, 256, 8], 0.25, dynamic=True, block_size=8, device=CPU, dtype=torch.float32
    )
    x = torch.randn(400, 64)
    net(x)
    layers: Any = net.layers()
    for layer in layers:
        assert 0.15 < float(layer.gate.gate.mean()) < 0.35


@pytest.mark.parametrize(
    ("widths", "rate", "says"), [([4, 8], 0.5, "`shape`"), ([4, 8, 2], 0.0, "`open_rate`")]
)
def test_bad_shapes_are_refused(widths: list[int], rate: float, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        random_net(widths, rate, dynamic=False, block_size=1, device=CPU, dtype=torch.float32)


def test_peak_memory_by_hand() -> None:
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    x = torch.randn(100, 64)
    with torch.inference_mode():
        # Hidden units before and behind the activation are there at the same time.
        assert peak_bytes(lambda: net(x), CPU) == 2 * 100 * 128 * 4


def test_times_are_compared_in_turns() -> None:
    calls: list[str] = []

    def run(name: str) -> Any:
        calls.append(name)
        return sum(range(200_000 if name == "slow" else 10))

    taken = median_seconds({"slow": lambda: run("slow"), "fast": lambda: run("fast")}, CPU, 3)
    assert taken["slow"] > 5 * taken["fast"]
