import multiprocessing
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


def at(rank: int, ranks: int) -> Callable[[], tuple[int, int]]:
    return lambda: (rank, ranks)


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
    loaders = [BatchLoader(part, batch_size, True, at(rank, ranks)) for rank in range(ranks)]
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
    step = data.draw(st.sampled_from([4, 6, 12]))
    ranks, other_ranks = (
        data.draw(st.sampled_from([r for r in (1, 2, 3) if step % r == 0 and step // r > 1]))
        for _ in range(2)
    )
    first = [BatchLoader(part, step // ranks, True, at(rank, ranks)) for rank in range(ranks)]
    done = data.draw(st.integers(0, len(first[0])))
    seen, states = [], []
    for loader in first:
        loader.set_epoch(2)
        batches = iter(loader)
        seen += [label for _ in range(done) for label in next(batches)[1].tolist()]
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)  # only rank 0's is saved
    for rank in range(other_ranks):
        loader = BatchLoader(part, step // other_ranks, True, at(rank, other_ranks))
        loader.load_state_dict(states[0])
        loader.set_epoch(2)
        assert len(list(loader.batches(states[0]["samples_seen"]))) == len(loader) - done
        seen += [label for _, labels in loader for label in labels.tolist()]
    assert set(seen) == set(range(samples))
    if samples >= 3 and samples - states[0]["samples_seen"] not in range(1, other_ranks):
        assert len(seen) == samples


def test_other_batches_in_the_middle_of_an_epoch_are_refused() -> None:
    state = {"seed": 0, "epoch": 1, "samples_seen": 8, "samples_a_step": 4}
    with pytest.raises(ValueError, match=r"batches of 4 samples .* got 6: resume it with the same"):
        BatchLoader(numbered(20), 3, True, at(0, 2)).load_state_dict(state)
    for seen in (0, 20):  # at its ends they may change
        BatchLoader(numbered(20), 3).load_state_dict({**state, "samples_seen": seen})


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
    state = {"seed": 0, "epoch": 1, "samples_seen": 8, "samples_a_step": 4}
    loader.load_state_dict(state)
    loader.set_epoch(2)
    assert len(list(loader)) == 3


def test_passes_at_the_same_time_do_not_mix() -> None:
    loader = BatchLoader(numbered(6), 2)
    for _, outer in zip(range(3), loader, strict=False):
        assert [labels.tolist() for _, labels in loader] == [[0, 1], [2, 3], [4, 5]]
        last = outer[1].tolist()
    assert last == [4, 5]


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
        self.validations = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, labels = batch
        self.seen.append((self.current_epoch, float(inputs.double().sum())))
        return torch.nn.functional.cross_entropy(self.layer(inputs.flatten(1)), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        return

    def on_validation_end(self) -> None:
        self.validations += not self.trainer.sanity_checking

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


class Interruption(pl.Callback):
    """Saves a checkpoint at one moment, and ends the run there."""

    def __init__(self, moment: str, epoch: int, batch: int, path: Path) -> None:
        self.moment, self.epoch, self.batch, self.path = moment, epoch, batch, path

    def interrupt(self, moment: str, trainer: pl.Trainer, batch: int) -> None:
        if (moment, trainer.current_epoch, batch) == (self.moment, self.epoch, self.batch):
            raise RuntimeError("interrupted")

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *rest: Any) -> None:
        self.interrupt("batch", trainer, rest[-1])

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, *rest: Any) -> None:
        self.interrupt("step", trainer, trainer.fit_loop.batch_idx)

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(
    ("moment", "epoch", "batch"),
    [
        ("batch", 1, 0),
        ("batch", 1, 5),
        ("step", 1, 0),
        ("step", 0, 10),
        ("step", 1, 4),
    ],
)
def test_a_batch_that_a_run_broke_off_in_is_trained_on_again(
    moment: str, epoch: int, batch: int, tmp_path: Path
) -> None:
    model, trainer = train(tmp_path / "a", callbacks=[])
    interruption = Interruption(moment, epoch, batch, tmp_path / "broken.ckpt")
    with pytest.raises(RuntimeError, match="interrupted"):
        train(tmp_path / "b", callbacks=[interruption])
    resumed, other = train(tmp_path / "c", tmp_path / "broken.ckpt", callbacks=[])
    assert other.global_step == trainer.global_step
    assert resumed.seen == model.seen[len(model.seen) - len(resumed.seen) :]
    assert torch.equal(resumed.layer.weight, model.layer.weight)
    assert resumed.validations == 3 - epoch


def test_workers_end_with_the_run() -> None:
    data = DigitsDataModule(batch_size=400, num_workers=1)
    trainer = pl.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(Recorder(), datamodule=data)
    assert not multiprocessing.active_children()


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
alone = DigitsDataModule(batch_size=31)  # its loader is made where nobody knows of ranks
alone.setup("fit")
alone_loader, first = alone.train_dataloader(), len(model.seen["train"])
trainer.fit_loop.max_epochs, trainer.limit_val_batches = 2, 0
trainer.fit(model, train_dataloaders=alone_loader)
shared = len(model.seen["train"]) - first
every = {}
for name, part in data._parts.items():
    inputs, _ = part.__getitems__(range(len(part)))
    every[name] = inputs.double().flatten(1).matmul(WEIGHTS).tolist()
model.seen["train"] = model.seen["train"][:first]
result = {"seen": model.seen, "every": every, "shared": shared}
"""
    )
    assert [result["shared"] for result in results] == [647, 646]
    for part in ("train", "val", "test"):
        seen = results[0]["seen"][part] + results[1]["seen"][part]
        assert sorted(seen) == pytest.approx(sorted(results[0]["every"][part]))
