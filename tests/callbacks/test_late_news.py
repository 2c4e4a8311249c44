"""What a GPU tells of an update one batch later: here as on a GPU, but on a CPU."""

import copy
import csv
import pickle
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sparse_nets import Plain, Watch, fit

from dg_lightning.callbacks import RigL
from dg_lightning.rewiring import connections as connections_module

KEY = "rewire/itop/net.0"


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "_counts_later", lambda _: True)
    monkeypatch.setattr(RigL, "checks_later", lambda *_: True)


def rows_of(root: Path, every: int, **options: Any) -> list[tuple[int, int, str]]:
    logger = CSVLogger(root)
    rigl = RigL(0.7, every_n_steps=every, until=1.0, drop_shape="constant")
    fit(Plain(), [rigl], root, logger=logger, **options)
    logger.save()
    lines = Path(logger.log_dir, "metrics.csv").read_text().splitlines()
    rows = [row for row in csv.DictReader(lines) if row.get(KEY)]
    return [(int(row["step"]), int(row["epoch"]), row[KEY]) for row in rows]


@pytest.mark.parametrize("every", [1, 4, 6])
def test_figures_are_the_same_at_most_a_batch_later(
    every: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    options: Any = {"log_every_n_steps": 1, "max_epochs": 2}  # of 12 steps
    at_once = rows_of(tmp_path / "at once", every, **options)
    request.getfixturevalue("as_on_a_gpu")
    later = rows_of(tmp_path / "later", every, **options)
    values = [value for *_, value in at_once]
    changed = [
        value for value, before in zip(values, ["", *values], strict=False) if value != before
    ]
    found = [value for *_, value in later]
    assert [v for v, before in zip(found, ["", *found], strict=False) if v != before] == changed
    for value in set(values):
        first = next(row for row in at_once if row[2] == value)
        second = next(row for row in later if row[2] == value)
        assert second[0] - first[0] in (0, 1)
        assert second[1] == first[1]  # also where an epoch ends with an update


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("validates", [True, False])
def test_who_monitors_them_sees_those_of_now(validates: bool, tmp_path: Path) -> None:
    rigl = RigL(0.7, every_n_steps=4, until=1.0)
    seen: list[tuple[float, float]] = []

    class Validating(Plain):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            value = self.trainer.callback_metrics[KEY].item()
            seen.append((value, rigl.connections["net.0"].figures()["itop"]))

    class Monitors(pl.Callback):
        monitor = None if validates else KEY

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if not validates and (trainer.global_step == 1 or trainer.global_step % 4 == 0):
                value = trainer.callback_metrics[KEY].item()
                seen.append((value, rigl.connections["net.0"].figures()["itop"]))

    options: Any = {"log_every_n_steps": 4, "logger": CSVLogger(tmp_path)}
    if validates:
        model: Any = Validating()
        x, y = torch.randn(8, 12, dtype=torch.float64), torch.randint(4, (8,))
        model.val_dataloader = lambda: torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x, y), batch_size=8
        )
        options |= {"val_check_interval": 4, "num_sanity_val_steps": 0}
    else:
        model = Plain()
    fit(model, [rigl, Monitors()], tmp_path, **options)
    assert len(seen) >= 6
    for found, now in seen:
        assert found == pytest.approx(now)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_monitor_finds_them_after_one_batch(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, monitor=KEY, save_on_train_epoch_end=False)
    fit(
        Plain(),
        [RigL(0.7, every_n_steps=1, until=1.0), saving],
        tmp_path,
        limit_train_batches=1,
        log_every_n_steps=1,
        logger=CSVLogger(tmp_path),
        enable_checkpointing=True,
    )


class Overflows(pl.Callback):
    """Lets gradients overflow in some steps, which then do nothing."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step + 1 in self.steps:
            pl_module.net[2].weight.grad[0, 0] = torch.nan


class Calms(pl.Callback):
    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step + 1 in self.steps:
            for p in pl_module.parameters():
                p.grad = torch.zeros_like(p)


@pytest.mark.parametrize("later", [False, True])
def test_every_update_that_is_left_out_is_told_of_once(
    later: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if later:
        request.getfixturevalue("as_on_a_gpu")
    rigl = RigL(0.6, every_n_steps=4, until=1.0, drop_shape="constant")
    steps = (8, 12, 20)  # with the last one before the end
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        callbacks = [Overflows(*steps), rigl, Calms(*steps), watch := Watch(rigl)]
        fit(Plain(), callbacks, tmp_path, log_every_n_steps=50)
        fit(Plain(), [rigl], tmp_path)
    told = [str(w.message).split(":")[0] for w in seen if "leaves the update" in str(w.message)]
    assert told == [f"RigL leaves the update of step {step} out" for step in steps]
    assert watch.changes() == [4, 16]


@pytest.mark.parametrize("later", [False, True])
def test_weights_that_are_not_finite_change_no_connection(
    later: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    class Infinite(Plain):
        def on_train_start(self) -> None:
            weight: Any = self.net[0].weight
            weight.data[0, weight[0].ne(0).nonzero()[0]] = torch.inf  # with a finite gradient

    if later:
        request.getfixturevalue("as_on_a_gpu")
    rigl = RigL(0.6, every_n_steps=4, until=1.0)
    first: list[Any] = []

    class First(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            first.append({name: c.mask.clone() for name, c in rigl.connections.items()})

    with pytest.warns(UserWarning, match="a gradient or a weight is not finite"):
        fit(Infinite(), [rigl, First()], tmp_path)
    for name, c in rigl.connections.items():
        assert torch.equal(c.mask, first[0][name])


@pytest.mark.usefixtures("as_on_a_gpu")
def test_an_update_that_is_left_out_has_no_churn_of_its_own(tmp_path: Path) -> None:
    rigl = RigL(0.6, every_n_steps=4, until=1.0, drop_shape="constant")
    callbacks = [Overflows(8), rigl, Calms(8)]
    with pytest.warns(UserWarning, match="leaves the update of step 8 out"):
        fit(Plain(), callbacks, tmp_path, max_epochs=1)
    assert rigl.connections["net.0"].churn > 0  # of step 4


@pytest.mark.usefixtures("as_on_a_gpu")
def test_news_that_nobody_has_read_do_not_hinder_a_copy(tmp_path: Path) -> None:
    rigl = RigL(0.6, every_n_steps=4, until=1.0)
    fit(Plain(), [rigl], tmp_path, max_steps=5, log_every_n_steps=50)
    c = rigl.connections["net.0"]
    c.change(~c.mask, None)
    assert c.has_news
    assert copy.deepcopy(c).count == int(c.mask.sum())
    c.change(~c.mask, None)
    assert pickle.loads(pickle.dumps(c)).count == int(c.mask.sum())
    assert not c.has_news
