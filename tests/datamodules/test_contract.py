"""What every exported DataModule promises, on small roots and, under DG_DATA, on the real data."""

import json
import multiprocessing
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dg_lightning import datamodules
from dg_lightning.datamodules import BaseDataModule

NAMES = [n for n in dir(datamodules) if n.endswith("DataModule") and n != "BaseDataModule"]
REAL = os.environ.get("DG_DATA")
# Settings that a small root needs, or that make the contract say more.
SMALL = {"SpeechCommandsDataModule": {"time_shift_ms": 50, "noise_volume": 0.1}}
FOLDERS = {
    "CIFAR10DataModule": "cifar-10-batches-py",
    "FashionMNISTDataModule": "FashionMNIST",
    "MNISTDataModule": "MNIST",
    "ImageFolderDataModule": "images",
    "PBMC3kDataModule": "pbmc3k",
    "SpeechCommandsDataModule": "SpeechCommands",
    "TinyImageNetDataModule": "tiny-imagenet-200",
}
Make = Callable[..., BaseDataModule]
# A text has no samples with a class each; `test_text` says what it has instead.
of_samples = pytest.mark.parametrize(
    "make", [name for name in NAMES if name != "TextDataModule"], indirect=True
)


@pytest.fixture(scope="module")
def roots(small_datasets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    cache = tmp_path_factory.mktemp("cache")
    return {"small": small_datasets, "real": Path(REAL or small_datasets), "cache": cache}


@pytest.fixture(params=["small", pytest.param("real", marks=pytest.mark.real_data)])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "real" and REAL is None:
        pytest.skip("DG_DATA is not set")
    return str(request.param)


@pytest.fixture(params=NAMES)
def make(request: pytest.FixtureRequest, kind: str, roots: dict[str, Path]) -> Make:
    """Return a function that makes the DataModule, laid out but not set up."""
    name = request.param
    if kind == "real" and not (roots["real"] / FOLDERS.get(name, ".")).exists():
        pytest.skip(f"DG_DATA has no {FOLDERS[name]}")

    def maker(**settings: Any) -> BaseDataModule:
        folders = {"root": str(roots[kind]), "cache_dir": str(roots["cache"] / kind)}
        cls: Any = getattr(datamodules, name)
        data: BaseDataModule = cls(
            **{"batch_size": 16, **SMALL.get(name, {}), **folders, **settings}
        )
        before = {k: v for k, v in vars(data).items() if k != "_loaded_tables"}
        data.prepare_data()
        after = {k: v for k, v in vars(data).items() if k != "_loaded_tables"}
        assert after == before  # only one process of many prepares
        data._loaded_tables = None  # as in the others
        return data

    return maker


def ready(make: Make, **settings: Any) -> BaseDataModule:
    data = make(**settings)
    data.setup("fit")
    return data


def all_of(loader: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = zip(*loader, strict=True)
    return torch.cat(inputs), torch.cat(labels)


@of_samples
def test_shapes_types_and_facts(make: Make) -> None:
    data = ready(make, eval_batch_size=7)
    for loader, size in ((data.train_dataloader(), 16), (data.val_dataloader(), 7)):
        inputs, labels = next(iter(loader))
        assert inputs.shape == (size, *data.input_shape)
        assert inputs.dtype == torch.float32
        assert inputs.isfinite().all()
        assert labels.shape == (size,)
        assert labels.dtype == torch.int64
        assert 0 <= labels.min() <= labels.max() < data.num_classes
    assert data.num_classes == len(data.class_names) == len(set(data.class_names))
    assert all(isinstance(name, str) for name in data.class_names)


def test_the_same_facts_before_setup_and_after_it(make: Make) -> None:
    early, late = make(), ready(make)
    assert (early.num_classes, early.input_shape) == (late.num_classes, late.input_shape)


@of_samples
def test_weights_balance_the_classes_and_every_part_has_all(make: Make) -> None:
    data = ready(make)
    counts = data.class_counts()
    assert list(counts) == ["train", "val", "test"]
    assert all(min(of.values()) > 0 for of in counts.values())
    train = torch.tensor(list(counts["train"].values()))
    balanced = data.class_weights * train
    torch.testing.assert_close(balanced, balanced.mean().expand_as(balanced))
    torch.testing.assert_close(balanced.sum(), train.sum().float())
    most = max(counts["train"], key=lambda name: counts["train"][name])
    share = counts["test"][most] / sum(counts["test"].values())
    assert data.majority_rate() == pytest.approx(share)


@pytest.mark.slow
@of_samples
def test_parts_are_disjoint_and_loaders_show_every_sample_once(make: Make) -> None:
    data = ready(make)
    seen: dict[int, set[int]] = {}
    for part in data._parts.values():
        rows = seen.setdefault(id(part.table), set())
        assert rows.isdisjoint(part.rows.tolist())
        rows |= set(part.rows.tolist())
    for part in data._parts.values():  # and nothing of a table is left out
        assert seen[id(part.table)] == set(range(len(part.table)))
    loaders = (data.train_dataloader(), data.val_dataloader(), data.test_dataloader())
    for loader, counts in zip(loaders, data.class_counts().values(), strict=True):
        labels = torch.cat([labels for _, labels in loader])
        assert torch.bincount(labels).tolist() == list(counts.values())


def test_the_split_depends_on_its_seed_alone(make: Make) -> None:
    torch.manual_seed(1)
    first = all_of(ready(make).val_dataloader())
    torch.manual_seed(2)
    again = all_of(ready(make, num_workers=0).val_dataloader())
    other = all_of(ready(make, split_seed=1).val_dataloader())
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_order_and_augmentation_depend_on_seed_and_epoch_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def epoch(seed: int, number: int) -> torch.Tensor:
        monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
        loader = ready(make).train_dataloader()
        loader.set_epoch(number)
        return next(iter(loader))[0]

    assert torch.equal(epoch(1, 0), epoch(1, 0))
    assert not torch.equal(epoch(1, 0), epoch(1, 1))
    assert not torch.equal(epoch(1, 0), epoch(2, 0))


def test_a_loader_goes_on_where_another_stopped(make: Make) -> None:
    data = ready(make)
    whole = data.train_dataloader()
    whole.set_epoch(3)
    expected = list(whole)
    stopped = data.train_dataloader()
    stopped.set_epoch(3)
    batches = iter(stopped)
    first = [next(batches) for _ in range(2)]
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = ready(make).train_dataloader()
    resumed.load_state_dict(state)
    resumed.set_epoch(3)  # as Lightning does
    together = first + list(resumed)
    assert len(together) == len(expected) == len(whole)
    for found, batch in zip(together, expected, strict=True):
        assert torch.equal(found[0], batch[0])
        assert torch.equal(found[1], batch[1])


def test_pickles_and_can_be_set_up_twice(make: Make) -> None:
    data = pickle.loads(pickle.dumps(make()))
    data.setup("fit")
    loader = pickle.loads(pickle.dumps(data)).val_dataloader()
    expected = all_of(data.val_dataloader())
    data.setup("test")
    assert torch.equal(all_of(loader)[0], expected[0])
    assert torch.equal(all_of(data.val_dataloader())[0], expected[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", ["DigitsDataModule", "MNISTDataModule", "TextDataModule"], indirect=True
)
def test_a_spawned_worker_cuts_the_same_batches(make: Make) -> None:
    plain = ready(make).train_dataloader()
    working = ready(make, num_workers=1).train_dataloader()
    usual = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        for _ in range(2):  # the second pass is another epoch, in the same worker
            for found, expected in zip(working, plain, strict=True):
                assert torch.equal(found[0], expected[0])
                assert torch.equal(found[1], expected[1])
    finally:
        multiprocessing.set_start_method(usual, force=True)


@of_samples
def test_prediction_goes_through_samples_in_order(make: Make) -> None:
    data = ready(make, eval_batch_size=5)
    inputs, labels = all_of(data.predict_dataloader())
    part = data.part_to_predict()
    assert torch.equal(labels, part.labels)
    assert len(inputs) == len(part)


@of_samples
def test_loaders_before_setup_are_refused(make: Make) -> None:
    data = make()
    for use in (data.train_dataloader, data.predict_dataloader, lambda: data.class_weights):
        with pytest.raises(RuntimeError, match=r"setup\('fit'\) must be called first"):
            use()


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("CIFAR10DataModule", "augment", "flip"),
        ("TinyImageNetDataModule", "augment", "crop"),
        ("TinyImageNetDataModule", "statistics", "cifar"),
        ("SpeechCommandsDataModule", "front_end", "40x99"),
        ("SpeechCommandsDataModule", "unknown", "subsample"),
        ("SpeechCommandsDataModule", "silence", "papr"),
        ("SpeechCommandsDataModule", "on_mismatch", "ignore"),
        ("PBMC3kDataModule", "fit_on", "all"),
    ],
)
def test_an_unknown_choice_is_refused(name: str, setting: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"`{setting}` must be .*got '?{value}"):
        getattr(datamodules, name)(**{setting: value})


@pytest.mark.parametrize(
    ("setting", "value"),
    [("batch_size", 0), ("eval_batch_size", 0), ("split_seed", -1), ("num_workers", -1)],
)
def test_impossible_numbers_are_named(make: Make, setting: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"`{setting}` must be at least .*, got {value}"):
        make(**{setting: value})
