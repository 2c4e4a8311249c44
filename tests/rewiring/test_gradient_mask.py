"""Gradients of missing connections never reach an optimizer, wherever they lie."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from dg_lightning.rewiring import Connections, GradientMask, gradient_mask

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_a_gradient_of_a_missing_connection_is_gone_whatever_it_was(
    dtype: Any, device: str
) -> None:
    torch.manual_seed(0)
    layer: Any = nn.Linear(8, 6, dtype=dtype, device=device)
    c = Connections("layer", layer, torch.rand(6, 8) < 0.3)
    gradient = torch.randn(6, 8).to(device, dtype)
    layer.weight.grad = gradient.masked_fill(~c.mask, torch.inf)
    layer.weight.grad[~c.mask & (gradient > 0)] = torch.nan
    GradientMask([c])()
    assert torch.equal(layer.weight.grad, gradient.masked_fill(~c.mask, 0))


def test_gradients_are_masked_where_there_are_some_and_when_a_layer_becomes_sparse() -> None:
    layers: list[Any] = [nn.Linear(6, 5, bias=False) for _ in range(3)]
    full, half = torch.ones(5, 6, dtype=torch.bool), torch.arange(30).reshape(5, 6) % 2 == 0
    first, second, third = (
        Connections(str(number), layer, mask)
        for number, (layer, mask) in enumerate(zip(layers, (half, half, full), strict=True))
    )
    mask_gradients = GradientMask([first, second, third])
    for turn in range(4):
        for layer in layers:
            layer.weight.grad = torch.ones(5, 6)
        if turn == 1:
            layers[0].weight.grad = None  # as when a step has no use for it
        if turn == 2:
            third.change(half, None)
        mask_gradients()
        if turn != 1:
            assert torch.equal(layers[0].weight.grad, half.float())
        assert torch.equal(layers[1].weight.grad, half.float())
        assert torch.equal(layers[2].weight.grad, (half if turn >= 2 else full).float())
    GradientMask([])()


@needs_cuda
@pytest.mark.parametrize("number", [2, 5])
def test_gradients_are_masked_wherever_they_lie(number: int) -> None:
    layers: Any = [nn.Linear(64, 32, bias=False, device="cuda") for _ in range(number)]
    masks = [torch.rand(32, 64, device="cuda") < 0.3 for _ in layers]
    mask_gradients = GradientMask(
        Connections("", layer, mask) for layer, mask in zip(layers, masks, strict=True)
    )
    kept = []
    for turn in range(40):
        gradients = [torch.randn(32, 64, device="cuda") for _ in layers]
        gradients[1][masks[1].logical_not()] = torch.inf
        if turn % 5 == 0:
            kept.append(gradients[0])  # so that the next ones lie elsewhere
        expected = [g.masked_fill(~mask, 0) for g, mask in zip(gradients, masks, strict=True)]
        for layer, gradient in zip(layers, gradients, strict=True):
            layer.weight.grad = gradient
        mask_gradients()
        for layer, wanted in zip(layers, expected, strict=True):
            assert torch.equal(layer.weight.grad, wanted)
    assert 0 < len(mask_gradients._kept) <= 8


class StandIn:
    """Stands in for the kernel, which knows addresses only: masks the gradients that there were."""

    def __init__(self) -> None:
        self.asked = self.used = 0
        self.refuses = False

    def __call__(self, gradients: Any, masks: Any) -> Any:
        self.asked += 1
        if self.refuses:
            return None
        pairs = list(zip(gradients, masks, strict=True))

        def again() -> None:
            self.used += 1
            for gradient, mask in pairs:
                gradient.mul_(mask)

        again()
        return again


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    kernel = StandIn()
    monkeypatch.setattr(gradient_mask, "_kernel_on", lambda _: kernel)
    return kernel


HALF, FULL = torch.arange(30).reshape(5, 6) % 2 == 0, torch.ones(5, 6, dtype=torch.bool)


def connected(*masks: Any) -> tuple[list[Any], list[Connections]]:
    layers: Any = [nn.Linear(6, 5, bias=False) for _ in masks]
    return layers, [Connections("", *pair) for pair in zip(layers, masks, strict=True)]


def test_what_masks_gradients_is_kept_for_where_they_lie(stand_in: StandIn) -> None:
    layers, connections = connected(HALF, ~HALF, FULL)
    mask_gradients = GradientMask(connections)
    lying = [[torch.empty(5, 6) for _ in layers] for _ in range(12)]
    for turn in range(90):
        if turn == 40:
            connections[2].change(HALF, None)  # which had all of them
        place = turn % 7 // 3 if turn < 70 else turn % 12  # in three places, then in too many
        for layer, gradient in zip(layers, lying[place], strict=True):
            layer.weight.grad = gradient.fill_(1.0)
        if turn % 11 == 0:
            layers[1].weight.grad = None
        mask_gradients()
        for c, layer in zip(connections, layers, strict=True):
            if layer.weight.grad is not None:
                assert torch.equal(layer.weight.grad, c.mask.float()), turn
        if turn == 69:
            assert stand_in.asked == 6  # three places, and again when the third layer came in
    assert len(mask_gradients._kept) <= 8
    assert stand_in.used == 90 - len(range(0, 90, 11))


@pytest.mark.parametrize("way", ["change", "load", "move"])
def test_another_layer_or_mask_is_not_masked_by_what_was_kept(stand_in: StandIn, way: str) -> None:
    layers, (first, second) = connected(HALF, FULL)
    state = Connections("", nn.Linear(6, 5), ~HALF).state_dict()
    mask_gradients = GradientMask([first, second])
    place, other = torch.ones(5, 6), torch.ones(5, 6)
    layers[0].weight.grad, layers[1].weight.grad = place, other
    mask_gradients()
    assert torch.equal(place, HALF.float())
    if way == "move":  # as to another device
        first.mask = HALF.logical_not()
        second.change(FULL.clone(), None)
    else:  # the second one becomes sparse, and its gradient lies where that of the first one lay
        first.change(FULL, None)
        second.change(~HALF, None) if way == "change" else second.load_state_dict(state)
        layers[0].weight.grad, layers[1].weight.grad = other, place
    place.fill_(1.0)
    other.fill_(1.0)
    mask_gradients()
    assert torch.equal(place, (~HALF).float())
    assert torch.equal(other, FULL.float())


def test_a_weight_that_was_converted_is_masked_anew(stand_in: StandIn) -> None:
    layers, connections = connected(HALF)
    mask_gradients, place = GradientMask(connections), torch.ones(5, 6)
    for turn in range(4):
        if turn == 2:
            layers[0].weight.data = layers[0].weight.data.clone()
        layers[0].weight.grad = place.fill_(1.0)
        mask_gradients()
        assert torch.equal(place, HALF.float())
    assert stand_in.asked == 2


def test_what_the_kernel_refuses_it_is_not_asked_for_again(stand_in: StandIn) -> None:
    layers, connections = connected(HALF, FULL)
    mask_gradients, stand_in.refuses = GradientMask(connections), True
    for turn in range(6):
        if turn == 3:
            connections[1].change(HALF, None)
            stand_in.refuses = False
        for layer in layers:
            layer.weight.grad = torch.ones(5, 6)
        mask_gradients()
        for c, layer in zip(connections, layers, strict=True):
            assert torch.equal(layer.weight.grad, c.mask.float())
        if turn == 2:
            assert stand_in.asked == 1
    assert stand_in.used > 0


def test_a_copy_masks_its_own_layers(stand_in: StandIn) -> None:
    layers, connections = connected(HALF)
    layers[0].weight.grad = torch.ones(5, 6)
    mask_gradients = GradientMask(connections)
    mask_gradients()
    for other in (copy.deepcopy(mask_gradients), pickle.loads(pickle.dumps(mask_gradients))):
        weight = other.connections[0].weight
        weight.grad = torch.ones(5, 6)
        layers[0].weight.grad.fill_(2.0)
        other()
        assert torch.equal(weight.grad, HALF.float())
        assert torch.equal(layers[0].weight.grad, torch.full((5, 6), 2.0))


@needs_cuda
def test_layers_that_the_kernel_does_not_do_are_masked_by_a_recording() -> None:
    layers: Any = [nn.Conv2d(8, 6, 3, device="cuda"), nn.Linear(6, 5, device="cuda")]
    layers[0] = layers[0].to(memory_format=torch.channels_last)
    connections = [Connections("", x, torch.rand(x.weight.shape) < 0.3) for x in layers]
    mask_gradients = GradientMask(connections)
    for _ in range(6):
        gradients = [torch.randn_like(x.weight) for x in layers]
        expected = [g * c.mask for g, c in zip(gradients, connections, strict=True)]
        for layer, gradient in zip(layers, gradients, strict=True):
            layer.weight.grad = gradient
        del gradients, gradient
        mask_gradients()
        for layer, wanted in zip(layers, expected, strict=True):
            assert torch.equal(layer.weight.grad, wanted)
    assert mask_gradients._refused
    assert mask_gradients._recorded._kept


@needs_cuda
def test_gradients_are_masked_within_somebodys_own_recording() -> None:
    layer: Any = nn.Linear(6, 5, bias=False, device="cuda")
    mask_gradients = GradientMask([Connections("", layer, HALF)])
    layer.weight.grad = torch.ones(5, 6, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask_gradients()
    for value in (1.0, 3.0):
        layer.weight.grad.fill_(value)
        graph.replay()
        assert torch.equal(layer.weight.grad.cpu(), value * HALF)
