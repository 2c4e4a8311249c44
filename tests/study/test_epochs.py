"""The course of runs, by hand."""

from pathlib import Path

import pytest

from dg_lightning.study.tables import epoch_rows, epochs_markdown

KEYS = "train/loss,val/accuracy,routing/cv/net.router,gates/active_ratio,test/accuracy"
METRICS = f"""epoch,step,{KEYS}
0,9,2.0,,,,
0,19,1.0,,,,
0,20,,0.5,0.25,0.75,
1,29,0.5,,,,
1,40,,0.75,0.5,0.5,
2,41,,,0.9,0.9,0.8
"""


def test_values_of_steps_are_averaged_and_the_test_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(METRICS)
    first, second = epoch_rows(tmp_path / "metrics.csv")
    assert first["train/loss"] == pytest.approx(1.5)
    assert first["val/accuracy"] == 0.5
    assert second == {
        "epoch": 1, "train/loss": 0.5, "val/accuracy": 0.75, "routing/cv/net.router": 0.5,
        "gates/active_ratio": 0.5,
    }  # fmt: skip


def test_the_papers_table_is_the_mean_over_seeds(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(METRICS)
    rows = epoch_rows(tmp_path / "metrics.csv")
    runs = [{"variant": "moe", "seed": s, **row} for s in (0, 1) for row in rows]
    runs[0]["val/accuracy"] = 0.7
    dense = {"variant": "baseline", "seed": 0, "epoch": 0, "val/accuracy": 0.1}
    text = epochs_markdown([dense, *runs])
    assert "| epoch | acc | loss | active | cv |" in text
    assert "| 0 | 0.6 | 1.5 | 0.75 | 0.25 |" in text
    assert "baseline" not in text
    assert epochs_markdown([dense]) == ""
