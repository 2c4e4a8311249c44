"""Functions that a GPU replays: the same as computing them, whatever moves in between."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dg_lightning import recorded as recorded_module
from dg_lightning.recorded import Recorded

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Counted:
    """A function that counts how often it is called."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *arguments: Tensor) -> Tensor:
        self.calls += 1
        return self.function(*arguments)


def test_on_a_cpu_it_is_computed_every_time() -> None:
    doubled, x = Counted(lambda x: x * 2), torch.ones(2)
    recorded = Recorded()
    for _ in range(4):
        assert recorded(partial(doubled, x), [x]).tolist() == [2.0, 2.0]
    assert doubled.calls == 4


class Played:
    """Stands in for a CUDA graph: computes again from where its tensors lay."""

    made = 0

    def __init__(self, function: Any, fresh: Any, device: Any, *, copied: bool) -> None:
        Played.made += 1
        self.function, self.copied = function, copied
        self.arguments = [t.clone() for t in fresh] if copied else list(fresh)

    def take(self, fresh: Any) -> None:
        for mine, given in zip(self.arguments, fresh, strict=True):
            mine.copy_(given)

    def replay(self) -> None:
        self.result = self.function(*self.arguments)


def test_what_is_recorded_is_found_by_where_it_lies_and_what_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorded_module, "_Recording", Played)
    monkeypatch.setattr(recorded_module, "_can_be_recorded", lambda *_: True)
    recorded = Recorded()
    memory = torch.arange(8.0)
    shapes = [memory.view(2, 4), memory.view(4, 2), memory.view(torch.int32), torch.arange(8.0)]
    for turn in range(40):
        x = shapes[turn % len(shapes)]
        memory.add_(1)
        found = recorded(lambda x: x.sum(-1), fresh=[x])
        assert torch.equal(found, x.sum(-1))
    assert 1 < Played.made <= 6


@needs_cuda
def test_a_replay_follows_what_changes_in_place_and_not_what_is_elsewhere() -> None:
    recorded, total = Recorded(), Counted(lambda x, y: (x * y).sum() + y.mean())
    x, y = torch.rand(100, device="cuda"), torch.rand(100, device="cuda")
    for _ in range(20):
        found = recorded(partial(total, x, y), [x, y])
        torch.testing.assert_close(found, total.function(x, y))
        y.add_(1)
    assert total.calls == 2  # computed, recorded
    z = torch.rand(100, device="cuda")
    for _ in range(20):
        found = recorded(partial(total, x, z), [x, z])
        torch.testing.assert_close(found, total.function(x, z))
        z.mul_(0.9)
    torch.testing.assert_close(recorded(partial(total, x, y), [x, y]), total.function(x, y))


@needs_cuda
def test_what_is_fresh_in_every_step_is_copied() -> None:
    recorded, total = Recorded(), Counted(lambda x, y: (x * y).sum() + y.mean())
    kept = []
    for step in range(20):
        x, y = (torch.rand(100, device="cuda") for _ in range(2))
        kept.append(x)  # so that the next one lies elsewhere
        found = recorded(total, fresh=[x, y])
        torch.testing.assert_close(found, total.function(x, y))
        if step == 9:
            recorded(total, fresh=[x[:50], y[:50]])
    assert total.calls == 3  # computed and recorded; computed for another shape


@needs_cuda
def test_what_it_depends_on_and_what_it_changes() -> None:
    recorded = Recorded()
    x = torch.zeros(3, device="cuda")
    for factor in (1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.0):
        before = x.clone()
        recorded(partial(x.add_, factor), [x], depends_on=factor)
        assert torch.equal(x, before + factor)


@needs_cuda
def test_tensors_that_are_new_in_every_step_are_recorded_a_few_times_only() -> None:
    recorded, more = Recorded(), Counted(lambda x: x + 1)
    others = [torch.rand(8, device="cuda") for _ in range(200)]
    for step in range(2000):
        x = others[step * 7919 % 200]
        torch.testing.assert_close(recorded(partial(more, x), [x]), x + 1)
    assert recorded._made <= 8
    assert len(recorded._kept) <= 4
    assert more.calls > 1500


@needs_cuda
def test_it_can_be_copied_and_pickled_without_its_recordings() -> None:
    recorded, x = Recorded(), torch.ones(2, device="cuda")
    for _ in range(3):
        recorded(lambda: x + 1, [x])
    for other in (copy.deepcopy(recorded), pickle.loads(pickle.dumps(recorded))):
        for _ in range(3):
            assert other(lambda: x + 1, [x]).tolist() == [2.0, 2.0]
