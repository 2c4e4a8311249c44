from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dg_lightning.datamodules import (
    DigitsDataModule,
    MNISTDataModule,
    PBMC3kDataModule,
    TaskSequence,
)
from dg_lightning.datamodules._splits import CropFlip


def sequence(**options: Any) -> TaskSequence:
    data = TaskSequence(DigitsDataModule(batch_size=32), **options)
    data.setup("fit")
    return data


def batches(data: TaskSequence, part: str = "val") -> list[tuple[int, Tensor, Tensor]]:
    loader = getattr(data, f"{part}_dataloader")()
    return [(data.task_of(part, index), *batch) for index, batch in enumerate(loader)]


def images(data: TaskSequence, task: int, part: str = "val") -> Tensor:
    return torch.cat([x for of, x, _ in batches(data, part) if of == task])


@pytest.mark.parametrize("labels", ["task", "class", "domain"])
def test_each_task_of_a_split_has_classes_of_its_own(labels: Any) -> None:
    data = sequence(tasks=5, labels=labels)
    seen = 0
    for task, _, y in batches(data, "test"):
        seen += len(y)
        expected = {0, 1} if labels == "domain" else {2 * task, 2 * task + 1}
        assert set(y.tolist()) <= expected
    assert seen == 360
    assert data.tells_task == (labels == "task")
    assert data.classes_of(2) == (None if labels == "domain" else (4, 5))
    assert data.class_names == (
        ("0/2/4/6/8", "1/3/5/7/9") if labels == "domain" else (*"0123456789",)
    )


def test_classes_that_do_not_divide_evenly_are_spread() -> None:
    data = sequence(tasks=3)
    assert [len(data.classes_of(task) or ()) for task in range(3)] == [4, 3, 3]
    assert len(sequence(tasks=3, labels="domain").class_names) == 4


def test_pixels_are_permuted_alike_in_all_images_of_a_task_and_otherwise_in_another() -> None:
    data = sequence(kind="permuted", tasks=3)
    first, second, third = (images(data, task).flatten(1) for task in range(3))
    plain = DigitsDataModule()
    plain.setup("fit")
    assert torch.equal(first, torch.cat([x for x, _ in plain.val_dataloader()]).flatten(1))
    order = [int(((second - first[:, [i]]).abs().sum(0)).argmin()) for i in range(64)]
    for task in (second, third):
        assert torch.equal(task.sort(1).values, first.sort(1).values)
        assert not torch.equal(task, first)
    varied = first.std(0) > 0
    assert torch.equal(second[:, order][:, varied], first[:, varied])
    assert not torch.equal(second, third)
    assert torch.equal(images(sequence(kind="permuted", tasks=3), 1).flatten(1), second)
    other = sequence(kind="permuted", tasks=3, task_seed=1)
    assert not torch.equal(images(other, 1).flatten(1), second)


def test_a_quarter_turn_is_that_of_torch() -> None:
    data = sequence(kind="rotated", tasks=2)
    first, second = images(data, 0), images(data, 1)
    turns = [torch.rot90(first, k, (2, 3)) for k in (1, 3)]
    errors = [float((second - turn).abs().max()) for turn in turns]
    assert min(errors) < 1e-5


@pytest.mark.parametrize("drift", ["noise", "blur", "contrast", "occlusion"])
def test_a_drift_is_the_same_whenever_a_sample_is_seen(drift: Any) -> None:
    data = sequence(kind="drift", drift=drift, tasks=3, course="gradual")
    clean, mild, strong = (images(data, task) for task in range(3))
    assert torch.equal(images(data, 2), strong)
    assert torch.equal(clean, images(sequence(kind="permuted", tasks=2), 0))
    assert (clean - mild).abs().mean() < (clean - strong).abs().mean()
    assert strong.min() >= 0
    assert strong.max() <= 1
    part = data._by_task[2]["val"]
    alone = torch.cat([part.get_batch(np.array([index]))[0] for index in range(5)])
    torch.testing.assert_close(alone, strong[:5])  # whatever batch it is in


def test_courses() -> None:
    clean = images(sequence(kind="permuted", tasks=2), 0)
    for course, damaged in (("abrupt", [0, 1, 1, 1]), ("recurring", [0, 1, 0, 1])):
        data = sequence(kind="drift", tasks=4, course=course)
        found = [not torch.equal(images(data, task), clean) for task in range(4)]
        assert found == [bool(d) for d in damaged]


def test_a_drift_of_bytes_is_on_their_scale(small_datasets: Path) -> None:
    mnist = MNISTDataModule(root=str(small_datasets))
    data = TaskSequence(mnist, kind="drift", drift="contrast", tasks=2)
    data.setup("fit")
    clean, drifted = images(data, 0), images(data, 1)
    mean, std = 0.1307, 0.3081
    clean, drifted = clean * std + mean, drifted * std + mean
    middle = clean.mean((1, 2, 3), keepdim=True)
    torch.testing.assert_close(drifted, 0.1 * clean + 0.9 * middle, atol=1e-5, rtol=0)


def test_batches_of_an_evaluation_hold_one_task_on_every_rank() -> None:
    data = sequence(tasks=5)
    loader = data.val_dataloader()
    shares = []
    for rank in (0, 1):
        loader.place = partial(lambda rank: (rank, 2), rank)
        shares.append([y for _, y in loader])
        for index, y in enumerate(shares[-1]):
            assert set((y // 2).tolist()) == {data.task_of("val", index)}
    assert len(shares[0]) == len(shares[1])
    every = torch.cat([torch.cat(share) for share in shares])
    assert len(every) == sum(len(of_task["val"]) for of_task in data._by_task)


def test_what_is_predicted_is_the_whole_test_part() -> None:
    data = sequence(tasks=5)
    part = data.part_to_predict()
    assert len(part) == 360
    assert data.describe_samples()["true_label"][0] in ("0", "1")
    assert data.preparation()["class_names"] == list("0123456789")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": 1}, "`tasks` must be .* at least 2, got 1"),
        ({"tasks": 2.5}, "`tasks` must be .* at least 2, got 2.5"),
        ({"kind": "twisted"}, "`kind` must be one of split, permuted, rotated, drift"),
        ({"kind": "permuted", "labels": "class"}, "`labels: class` needs `kind: split`"),
        ({"tasks": 11}, "`tasks` must be at most the 10 classes of DigitsDataModule, got 11"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sequence(**options)


def test_a_task_without_samples_is_refused() -> None:
    class Incomplete(DigitsDataModule):
        def split(self, tables: Any) -> Any:
            parts = super().split(tables)
            for part in parts.values():
                kept = part.labels < 8
                part.rows, part.labels = part.rows[kept.numpy()], part.labels[kept]
            return parts

    with pytest.raises(ValueError, match="Task 4 has no samples in the train split"):
        TaskSequence(Incomplete()).setup("fit")


def test_cells_can_be_split_but_not_rotated() -> None:
    data = TaskSequence(PBMC3kDataModule(), kind="rotated", tasks=2)
    with pytest.raises(ValueError, match="needs images, got samples of shape"):
        data.setup("fit")


def test_pixels_are_permuted_after_they_are_augmented() -> None:
    class Augmented(DigitsDataModule):
        def split(self, tables: Any) -> Any:
            parts = super().split(tables)
            parts["train"].augmentation = CropFlip(1)
            return parts

    data = TaskSequence(Augmented(), kind="permuted", tasks=2)
    data.setup("fit")
    plain, permuted = (
        of_task["train"].get_batch(np.arange(8), 0, 1)[0] for of_task in data._by_task
    )
    assert not torch.equal(plain, permuted)
    assert torch.equal(plain.flatten(1).sort(1).values, permuted.flatten(1).sort(1).values)


def test_class_weights_are_those_of_all_tasks() -> None:
    plain = DigitsDataModule()
    plain.setup("fit")
    data = sequence(tasks=5)
    assert torch.equal(data.class_weights, plain.class_weights)
    assert data.class_counts() == plain.class_counts()


def test_something_else_than_a_datamodule_is_refused() -> None:
    with pytest.raises(TypeError, match="`data` must be a DataModule of this package, got 5"):
        TaskSequence(5)  # type: ignore[arg-type]


def trained_at(data: TaskSequence, task: int, patch: pytest.MonkeyPatch) -> Tensor:
    """Return the labels of a training epoch of a task."""
    patch.setattr(TaskSequence, "current_task", task)
    return torch.cat([labels for _, labels in data.train_dataloader()])


def test_replayed_samples_are_as_many_as_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    data = sequence(tasks=5, labels="class", replay=30)
    plain = sequence(tasks=5, labels="class")
    for task in range(5):
        new = trained_at(plain, task, monkeypatch)
        counts = trained_at(data, task, monkeypatch).bincount(minlength=10)
        assert torch.equal(counts[2 * task : 2 * task + 2], new.bincount()[2 * task :])
        earlier = counts[: 2 * task].view(-1, 2).sum(1)
        assert not counts[2 * task + 2 :].any()
        if task:
            assert (earlier == len(new) // task).all()


def test_no_more_samples_are_replayed_than_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    data = sequence(tasks=5, labels="class", replay=30)
    trained_at(data, 3, monkeypatch)
    *stored, own = data.part_to_load("train").parts
    assert [len(np.unique(part.rows)) for part in stored] == [10, 10, 10]
    assert len(np.unique(own.rows)) == len(own)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replay": 20}, "`replay` needs `labels: class`"),
        ({"replay": -1, "labels": "class"}, "`replay` must be 0, or store at least .*, got -1"),
        ({"replay": True, "labels": "class"}, "`replay` must be 0, or .*, got True"),
        ({"replay": 3, "labels": "class"}, "one sample for each of 4 earlier tasks, got 3"),
        ({"replay": 9, "labels": "class", "joint": True}, "`replay` has no effect with `joint`"),
    ],
)
def test_replay_that_cannot_be_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sequence(**options)
