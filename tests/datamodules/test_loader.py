from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dg_lightning.datamodules._files import ArrayTable
from dg_lightning.datamodules._loader import BatchLoader
from dg_lightning.datamodules._splits import Split


def at(rank: int, ranks: int) -> Callable[[], tuple[int, int]]:
    return lambda: (rank, ranks)


def numbered(samples: int) -> Split:
    """Return samples whose input is their index."""
    table = ArrayTable(np.arange(samples, dtype=np.float32)[:, None])
    return Split(table, np.arange(samples), torch.arange(samples))


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


def test_other_batches_within_an_epoch_are_refused() -> None:
    state = {**BatchLoader(numbered(20), 4).state_dict(), "epoch": 1, "samples_seen": 8}
    with pytest.raises(ValueError, match=r"batches of 4 samples .* uses 6: resume with the same"):
        BatchLoader(numbered(20), 3, True, at(0, 2)).load_state_dict(state)
    BatchLoader(numbered(20), 2, True, at(0, 2)).load_state_dict(state)
    done = {**state, "samples_seen": 20, "epoch_is_done": 1}
    for ended in ({**state, "samples_seen": 0}, done):  # between epochs they may change
        BatchLoader(numbered(20), 3).load_state_dict(ended)


@pytest.mark.parametrize("state", [{"samples": 30}, {"anything": 1}])
def test_the_state_of_other_data_is_refused(state: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"training samples, .* has 20: resume with the same data"):
        BatchLoader(numbered(20), 4).load_state_dict(state)


def test_after_an_epoch_the_data_may_change() -> None:
    finished = BatchLoader(numbered(30), 4)
    for _ in zip(range(8), finished, strict=False):
        saved = finished.state_dict()
    other = BatchLoader(numbered(20), 4)
    other.load_state_dict(saved)
    other.set_epoch(1)
    assert len(list(other)) == 5


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
    loader.load_state_dict({**loader.state_dict(), "epoch": 1, "samples_seen": 8})
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
