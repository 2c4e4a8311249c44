import re
from pathlib import Path

import pytest
import torch

from dg_lightning.monitoring.report.charts import task_map
from dg_lightning.monitoring.report.page import read_run, read_tasks, run_part

ROWS = "0,1,2\n0.9,0.5,nan\n0.8,0.95,nan\nnan,nan,nan\n"


def test_the_matrix_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "tasks.csv"
    assert read_tasks(path) is None
    path.write_text(ROWS)
    found = read_tasks(path)
    assert found is not None
    expected = torch.tensor([[0.9, 0.5, torch.nan], [0.8, 0.95, torch.nan], [torch.nan] * 3])
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert "at the end 87.50% on average" in task_map(found)  # the last row that exists


def test_a_run_of_tasks_has_a_section_and_others_have_none(tmp_path: Path) -> None:
    header = "epoch,step,tasks/average_accuracy,tasks/forgetting,val/accuracy"
    (tmp_path / "metrics.csv").write_text(f"{header}\n0,5,0.9,0,0.9\n1,10,0.875,0.1,0.87\n")
    assert "Tasks in sequence" not in run_part(read_run(tmp_path))
    (tmp_path / "tasks.csv").write_text(ROWS)
    page = run_part(read_run(tmp_path))
    assert "Tasks in sequence" in page
    assert "Accuracy on every task, after learning each" in page
    final = re.search(r"forgetting</t[dh]>\s*<td[^>]*>([^<]+)<", page)
    assert final is not None
    assert final[1] == "10.00%"
    learned = page[page.index("Accuracy right after learning a task") :]
    assert "95" in learned[:6000]


@pytest.mark.slow
@pytest.mark.usefixtures("in_empty_folder")
@pytest.mark.filterwarnings("ignore:.* has no free unit left")
def test_the_study_of_digits_tells_what_was_forgotten() -> None:
    from dg_lightning.cli import main

    options = ["--seeds=1", "--output=out", "--options=[trainer.max_epochs=5]", "--workers=1"]
    options.append("--only=[naive,joint,ewc,task_gates]")
    main(["study", "--config=studies/split_digits", *options])
    summary = Path("out/summary.md").read_text()
    rows = re.findall(r"\| `(\w+)` \| ([\d.]+)% \| (-?[\d.]+)% \|", summary)
    tasks = {name: (float(accuracy), float(lost)) for name, accuracy, lost in rows}
    assert set(tasks) >= {"naive", "joint", "ewc", "task_gates"}
    assert tasks["task_gates"][1] == 0
    main(["report", "out"])
    assert "Tasks in sequence" in Path("out/report.html").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("in_empty_folder")
def test_the_study_of_drift_tells_what_was_won_back() -> None:
    from dg_lightning.cli import main

    options = ["--seeds=1", "--output=out", "--options=[trainer.max_epochs=10]", "--workers=1"]
    options.append("--only=[contrast_nothing,contrast_all,contrast_gates]")
    main(["study", "--config=studies/drift_digits", *options])
    summary = Path("out/summary.md").read_text()
    adapted = summary[summary.index("Adaptation to drift") :]
    cell = r"(-?[\d.]+)% \| "
    rows = re.findall(rf"\| `(\w+)` \| {cell}{cell}{cell}", adapted)
    figures = {name: tuple(map(float, found)) for name, *found in rows}
    cost, *others = figures["contrast_nothing"]
    assert cost > 0
    assert others == [0, 0]  # recovery, and what clean samples lost
    assert figures["contrast_all"][0] == cost
    assert figures["contrast_all"][1] > figures["contrast_gates"][1]
