"""The kernel that drops and grows, against a sort by numpy; on a CPU by Triton's interpreter."""

from typing import Any

import numpy as np
import pytest
import torch
from interpreted import DEVICE, INTERPRETED, here, passes_interpreted, unless_it_runs_here

pytest.importorskip("triton")
# On a GPU many programs count together, and some have nothing to do.
SIZES = [2, 7, 5001] if INTERPRETED else [2, 7, 64, 4096, 5001, 132 * 4096 + 1, 2_000_003]


@unless_it_runs_here
def test_without_a_gpu_it_is_interpreted() -> None:
    passes_interpreted(__file__)


def first_largest(scores: Any, allowed: Any, count: int) -> Any:
    order = np.argsort(np.where(allowed, -scores, np.inf), kind="stable")
    mask = np.zeros(len(scores), bool)
    mask[order[:count]] = True
    return mask


def scores_of(kind: str, size: int, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.rand(size, generator=generator)
    if kind == "all alike":
        return torch.full((size,), 0.25)
    if kind == "many alike":
        return (drawn * 4).round() / 4
    return drawn * 10.0 ** (torch.rand(size, generator=generator) * 60 - 40)  # also denormal


@here
@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("kind", ["drawn", "many alike", "all alike"])
@pytest.mark.parametrize("size", SIZES)
def test_it_keeps_and_grows_what_a_sort_does(size: int, kind: str, exclude: bool) -> None:
    from dg_lightning.rewiring.rewire_kernel import rewired_at_once

    generator = torch.Generator().manual_seed(size)
    keep, grow = (scores_of(kind, size, generator) for _ in range(2))
    old = torch.rand(size, generator=generator) < 0.4
    old[0], old[1] = True, False
    total = int(old.sum())
    for grown in {1, max(1, total // 3), total - 1} - {0}:
        kept = total - grown
        grown = min(grown, size - total) if exclude else grown
        signs = torch.where(torch.rand(size, generator=generator) < 0.5, -1.0, 1.0)
        tensors = [tensor.to(DEVICE) for tensor in (old, keep * signs, -grow * signs)]
        found = rewired_at_once(tensors[0], tensors[1], tensors[2], kept, grown, exclude)
        if kept == 0:
            assert found is None
            continue
        stays = first_largest(keep.numpy(), old.numpy(), kept)
        comes = first_largest(grow.numpy(), ~(old.numpy() if exclude else stays), grown)
        assert found is not None
        assert torch.equal(found.cpu(), torch.from_numpy(stays | comes)), (kept, grown)


@here
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 3.4028234e38])
def test_it_tells_of_scores_that_are_not_finite(value: float) -> None:
    from dg_lightning.rewiring.rewire_kernel import rewired_at_once

    size = 300 if INTERPRETED else 132 * 4096 + 1
    generator = torch.Generator().manual_seed(0)
    old = torch.rand(size, generator=generator) < 0.4
    for place in (int(old.int().argmax()), int((~old).int().argmax()), size - 1):
        for which in range(2):
            scores = [torch.randn(size, generator=generator) for _ in range(2)]
            scores[which][place] = value
            finite = torch.tensor(True, device=DEVICE)
            tensors = [tensor.to(DEVICE) for tensor in (old, *scores)]
            rewired_at_once(tensors[0], tensors[1], tensors[2], 10, 10, False, finite)
            assert bool(finite) == (abs(value) < torch.inf)
            rewired_at_once(tensors[0], tensors[1].sign(), tensors[0].float(), 9, 9, True, finite)
            assert bool(finite) == (abs(value) < torch.inf)  # once told, it stays


@here
def test_what_it_does_not_do_is_left_to_torch() -> None:
    from dg_lightning.rewiring.rewire_kernel import rewired_at_once

    old, scores = torch.eye(4, device=DEVICE).bool(), torch.rand(4, 4, device=DEVICE)
    assert rewired_at_once(old, scores.double(), scores.double(), 2, 2, False) is None
    assert rewired_at_once(old, scores.T, scores, 2, 2, False) is None
    assert rewired_at_once(old, scores, scores, 0, 4, False) is None


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
@pytest.mark.parametrize("structure", ["unstructured", "block:2"])
def test_an_update_on_a_gpu_is_the_one_on_a_cpu(
    structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dg_lightning.rewiring import Structure, rewired, update

    by_kernel, at_once = [], update._at_once

    def watched(*arguments: Any) -> Any:
        by_kernel.append(at_once(*arguments))
        return by_kernel[-1]

    monkeypatch.setattr(update, "_at_once", watched)
    torch.manual_seed(0)
    for shape in ((64, 30), (8, 4, 4, 4), (1024, 3072)):
        keep, grow = torch.randn(shape), torch.randn(shape)
        blocks = Structure(structure)
        mask = blocks.ungroup(blocks.masks(torch.rand(shape) < 0.2), keep)
        for by_size in (True, False):
            expected = rewired(mask, keep, grow, 0.3, blocks, by_size=by_size)
            found = rewired(mask.cuda(), keep.cuda(), grow.cuda(), 0.3, blocks, by_size=by_size)
            assert torch.equal(found.cpu(), expected)
    assert len(by_kernel) == 3
    assert all(new is not None for new in by_kernel)


@here
@pytest.mark.parametrize("shape", [(2, 3), (33, 40), (70, 1000), (6, 4, 3, 3)])
@pytest.mark.parametrize("slots", [0, 1, 2])
@pytest.mark.parametrize("made", [None, True, False])
def test_a_change_at_once_is_one_in_steps(
    shape: tuple[int, ...], slots: int, made: bool | None
) -> None:
    from dg_lightning.rewiring.news import HEADER
    from dg_lightning.rewiring.rewire_kernel import changed_at_once

    generator = torch.Generator().manual_seed(slots)
    before, after = (torch.rand(shape, generator=generator) < 0.05 for _ in range(2))
    every = 7
    mask, new = before.to(DEVICE, copy=True), after.to(DEVICE)
    tensors = [torch.ones(shape, device=DEVICE) for _ in range(1 + slots)]
    only_if = None if made is None else torch.tensor(made, device=DEVICE)
    versions = [tensor._version for tensor in (mask, *tensors)]
    news = changed_at_once(mask, new, only_if, tensors, every)
    assert news is not None
    expected = before if made is False else after
    assert torch.equal(mask.cpu(), expected)
    for tensor in tensors:
        assert torch.equal(tensor.cpu(), (expected == before).float())
    for tensor, version in zip((mask, *tensors), versions, strict=True):
        assert tensor._version > version
    found = news.cpu().numpy()
    counts = [int(expected.sum()), int((expected == before).sum()), int(made is not False), 0]
    assert found[:HEADER].view("int64").tolist() == counts
    matrix = expected.flatten(1)
    rest = [matrix.any(0), matrix.any(1), expected.flatten()[::every]]
    assert found[HEADER:].tolist() == torch.cat(rest).int().tolist()


@here
def test_a_change_of_other_tensors_is_left_to_torch() -> None:
    from dg_lightning.rewiring.rewire_kernel import changed_at_once

    mask, weight = torch.eye(4, device=DEVICE).bool(), torch.rand(4, 4, device=DEVICE)
    assert changed_at_once(mask, ~mask, None, [weight.double()], 1) is None
    assert changed_at_once(mask, ~mask, None, [weight] * 4, 1) is None
    assert changed_at_once(mask, ~mask, None, [weight.T], 1) is None
    assert torch.equal(mask, torch.eye(4, device=DEVICE).bool())


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
@pytest.mark.parametrize("kind", ["AdamW", "Adagrad"])  # which does not start at 0
def test_connections_on_a_gpu_change_as_on_a_cpu(kind: str) -> None:
    from dg_lightning.rewiring import Connections, change_all

    seen = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(40, 30), torch.nn.Linear(30, 7)]
        masks = [[torch.rand(layer.weight.shape) < 0.2 for _ in range(4)] for layer in layers]
        parameters = [p for layer in layers for p in layer.to(device).parameters()]
        optimizer = getattr(torch.optim, kind)(parameters, lr=0.1)
        connections = [
            Connections(str(number), layer, masks[number][0].to(device))
            for number, layer in enumerate(layers)
        ]
        figures = []
        for turn in range(1, 4):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 0.5)
            optimizer.step()
            made = torch.tensor(turn != 2, device=device)
            new = [masks[number][turn].to(device) for number in range(2)]
            change_all(dict(zip(connections, new, strict=True)), optimizer, made)
            wanted = masks[0][1] if turn == 2 else masks[0][turn]
            assert torch.equal(connections[0].mask.cpu(), wanted)
            figures.append([(c.count, c.figures(), c.left_out_at) for c in connections])
        slots = [v.cpu() for p in parameters for v in optimizer.state[p].values()]
        seen.append((figures, [p.detach().cpu() for p in parameters], slots))
    assert seen[0][0] == seen[1][0]
    for cpu, cuda in zip(seen[0][1] + seen[0][2], seen[1][1] + seen[1][2], strict=True):
        torch.testing.assert_close(cpu, cuda)
