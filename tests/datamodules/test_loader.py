from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from dg_lightning.datamodules import DigitsDataModule
from dg_lightning.datamodules._loader import BatchLoader
from dg_lightning.datamodules._part import Part
from dg_lightning.datamodules._tables import ArrayTable


def numbered(samples: int) -> Part:
    """Return samples whose input is their index."""
    table = ArrayTable(np.arange(samples, dtype=np.float32)[:, None])
    return Part(table, np.arange(samples), torch.arange(samples))


@given(
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 9),
    ranks=st.integers(1, 5),
    epoch=st.integers(0, 3),
)
def test_ranks_share_the_batches_of_one_process(
    samples: int, batch_size: int, ranks: int, epoch: int
) -> None:
    part = numbered(samples)
    alone = BatchLoader(part, batch_size * ranks, shuffle=True)
    loaders = [BatchLoader(part, batch_size, True, rank, ranks) for rank in range(ranks)]
    for loader in (alone, *loaders):
        loader.set_epoch(epoch)
    shares = [loader.batches() for loader in loaders]
    # No rank waits for another one, and none has an empty batch.
    assert {len(share) for share in shares} == {len(loaders[0])} == {len(alone)}
    assert all(0 < len(batch) <= batch_size for share in shares for batch in share)
    seen = np.concatenate([batch for share in shares for batch in share])
    assert set(seen.tolist()) == set(range(samples))
    if batch_size > 1 and samples >= ranks:
        assert len(seen) == samples
    for index, together in enumerate(alone.batches()[:-2]):
        assert sorted(np.concatenate([s[index] for s in shares])) == sorted(together)


@given(data=st.data(), samples=st.integers(2, 60))
def test_what_was_not_seen_comes_after_a_resume_with_other_ranks(
    data: st.DataObject, samples: int
) -> None:
    part = numbered(samples)
    size, ranks, other_size, other_ranks = (data.draw(st.integers(2, 5)) for _ in range(4))
    first = [BatchLoader(part, size, True, rank, ranks) for rank in range(ranks)]
    done = data.draw(st.integers(0, len(first[0])))
    seen, states = [], []
    for loader in first:
        loader.set_epoch(2)
        batches = iter(loader)
        seen += [label for _ in range(done) for label in next(batches)[1].tolist()]
        states.append(loader.state_dict())
    if done:
        assert all(state == states[0] for state in states)  # only rank 0's is saved
    for rank in range(other_ranks):
        loader = BatchLoader(part, other_size, True, rank, other_ranks)
        loader.load_state_dict(states[0])
        loader.set_epoch(2)
        seen += [label for _, labels in loader for label in labels.tolist()]
    assert set(seen) == set(range(samples))
    if samples >= ranks and samples - min(samples, done * size * ranks) >= other_ranks:
        assert len(seen) == samples


def test_a_pass_that_is_broken_off_starts_anew() -> None:
    loader = BatchLoader(numbered(10), 4)
    for _ in range(2):
        assert next(iter(loader))[1].tolist() == [0, 1, 2, 3]


def test_without_a_trainer_every_complete_pass_is_another_epoch() -> None:
    loader = BatchLoader(numbered(20), 20, shuffle=True)
    first, second = ([labels.tolist() for _, labels in loader] for _ in range(2))
    assert first != second
    loader.set_epoch(0)
    assert [labels.tolist() for _, labels in loader] == first


def test_the_state_of_another_epoch_does_not_shorten_this_one() -> None:
    loader = BatchLoader(numbered(10), 4, shuffle=True)
    loader.load_state_dict({"seed": 0, "epoch": 1, "samples_seen": 8})
    loader.set_epoch(2)
    assert len(list(loader)) == 3


def test_iterating_leaves_the_runs_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    list(BatchLoader(numbered(10), 4, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)


class Recorder(BoringModel):
    """Learns from digits, and remembers which samples came in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        self.seen: list[tuple[int, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, labels = batch
        self.seen.append((self.current_epoch, float(inputs.double().sum())))
        return torch.nn.functional.cross_entropy(self.layer(inputs.flatten(1)), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        return

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layer.parameters(), lr=0.1, momentum=0.9)


def train(folder: Path, resume: Path | None = None, **options: Any) -> tuple[Recorder, pl.Trainer]:
    pl.seed_everything(7)
    every = options.pop("every", {"every_n_train_steps": 4})
    keep = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **every)
    settings = {"max_epochs": 3, "callbacks": [keep], "accelerator": "cpu", "logger": False}
    trainer = pl.Trainer(
        **{**settings, **options}, enable_progress_bar=False, enable_model_summary=False
    )
    model = Recorder()
    trainer.fit(model, datamodule=DigitsDataModule(batch_size=128), ckpt_path=resume)
    return model, trainer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"val_check_interval": 4},
        {"accumulate_grad_batches": 2, "every": {"every_n_train_steps": 2}},
        {"limit_train_batches": 9},
        {"every": {"every_n_epochs": 1}},
        {"every": {"every_n_epochs": 1, "save_on_train_epoch_end": False}},
        {"max_epochs": -1, "max_steps": 30},
    ],
    ids=str,
)
def test_a_run_resumed_anywhere_ends_as_the_uninterrupted_one(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model, trainer = train(tmp_path / "a", **options)
    checkpoints = sorted((tmp_path / "a").glob("*.ckpt"))
    assert len(checkpoints) >= 3
    for checkpoint in checkpoints:
        resumed, other = train(tmp_path / "b", checkpoint, **options)
        assert other.global_step == trainer.global_step
        # The samples that were left, in the same order, and nothing else.
        assert resumed.seen == model.seen[len(model.seen) - len(resumed.seen) :], checkpoint.name
        assert torch.equal(resumed.layer.weight, model.layer.weight), checkpoint.name


def test_overfitting_sees_the_same_batches_in_every_epoch(tmp_path: Path) -> None:
    model, _ = train(tmp_path, overfit_batches=2)
    sums = [value for _, value in model.seen]
    assert len(sums) == 6
    assert sums[:2] * 3 == sums


def test_two_processes_train_and_test_on_every_sample_once(
    in_two_processes: Callable[[str], list[Any]],
) -> None:
    results = in_two_processes(
        """
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from dg_lightning.datamodules import DigitsDataModule

class Counter(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        self.register_buffer("anything", torch.zeros(1))  # buffers are broadcast in every forward
        self.seen = {"train": [], "val": [], "test": []}

    def step(self, kind, batch):
        self.seen[kind] += batch[0].double().flatten(1).matmul(WEIGHTS).tolist()
        return torch.nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def training_step(self, batch, batch_idx):
        return self.step("train", batch)

    def validation_step(self, batch, batch_idx):
        self.step("val", batch)

    def test_step(self, batch, batch_idx):
        self.step("test", batch)

WEIGHTS = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
pl.seed_everything(3)
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False,
                     enable_checkpointing=False, enable_progress_bar=False,
                     num_sanity_val_steps=0, enable_model_summary=False)
model, data = Counter(), DigitsDataModule(batch_size=31)
trainer.fit(model, datamodule=data)
trainer.test(model, datamodule=data)
every = {}
for name, part in data._parts.items():
    inputs, _ = part.__getitems__(range(len(part)))
    every[name] = inputs.double().flatten(1).matmul(WEIGHTS).tolist()
result = {"seen": model.seen, "every": every}
"""
    )
    for part in ("train", "val", "test"):
        seen = results[0]["seen"][part] + results[1]["seen"][part]
        assert sorted(seen) == pytest.approx(sorted(results[0]["every"][part]))
