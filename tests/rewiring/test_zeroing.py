"""What a mask leaves out, in threads and out of them, against torch's own masked_fill."""

import multiprocessing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dg_lightning.rewiring import zeroing
from dg_lightning.rewiring.zeroing import keep_only


@pytest.fixture
def four_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def values_and_mask(size: Any, dtype: Any = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(size, generator=generator) < 0.1
    values = torch.randn(size, generator=generator)
    values[~mask & (values > 1)] = torch.inf
    values[~mask & (values < -1)] = torch.nan
    return values.to(dtype), mask


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("wide", [False, True])  # by numpy in threads, and by torch
def test_large_tensors_are_zeroed_as_small_ones(dtype: Any, wide: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(zeroing, "_has_wide_vectors", lambda: wide)
    monkeypatch.setattr(zeroing, "_IN_CACHE", 5000)
    pairs = [values_and_mask(size, dtype) for size in ((7, 11), (600, 1001), (3,), (0, 4))]
    expected = [values.masked_fill(~mask, 0) for values, mask in pairs]
    submitted: list[Any] = []
    pool = zeroing._workers(0)
    monkeypatch.setattr(zeroing, "_workers", lambda process: pool)
    submit = pool.submit

    def noted(*arguments: Any) -> Any:
        submitted.append(arguments)
        return submit(*arguments)

    monkeypatch.setattr(pool, "submit", noted)
    keep_only(pairs)
    for (values, _), wanted in zip(pairs, expected, strict=True):
        assert torch.equal(values, wanted)
    assert len(submitted) == (0 if dtype == torch.complex64 or wide else 3)


@pytest.mark.parametrize("wide", [False, True])
def test_a_parameter_knows_that_it_was_changed_and_any_layout_will_do(
    wide: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(zeroing, "_has_wide_vectors", lambda: wide)
    values, mask = values_and_mask((6, 8, 3, 3))
    weight = nn.Parameter(values.clone().contiguous(memory_format=torch.channels_last))
    flat = nn.Parameter(values.clone())
    versions = weight._version, flat._version
    keep_only([(weight, mask), (flat, mask)])
    for parameter, version in zip((weight, flat), versions, strict=True):
        assert torch.equal(parameter.detach(), values.masked_fill(~mask, 0))
        assert parameter._version > version
        assert parameter.requires_grad


def _zero_and_tell(values: Tensor, mask: Tensor, expected: Tensor, answer: Any) -> None:
    keep_only([(values, mask)])
    # By numpy: torch's own threads do not survive a fork either.
    answer.send((values.numpy() == expected.numpy()).all())


@pytest.mark.usefixtures("four_threads")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_threads_that_it_does_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zeroing, "_has_wide_vectors", lambda: False)
    values, mask = values_and_mask((600, 1000))
    expected = values.masked_fill(~mask, 0)
    keep_only([(values.clone(), mask)])  # the threads are there
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_zero_and_tell, args=(values, mask, expected, there))
    child.start()
    try:
        assert here.poll(60)
        assert here.recv()
    finally:
        child.kill()
