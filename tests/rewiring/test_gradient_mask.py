"""Gradients of missing connections never reach an optimizer, wherever they lie."""

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


def test_what_masks_gradients_is_kept_for_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"made": 0, "made use of": 0}

    def stand_in(gradients: Any, masks: Any) -> Any:
        """Stands in for the kernel, which knows addresses only: masks those that there were."""
        calls["made"] += 1
        pairs = list(zip(gradients, masks, strict=True))

        def mask_there() -> None:
            calls["made use of"] += 1
            for gradient, mask in pairs:
                gradient.mul_(mask)

        mask_there()
        return mask_there

    monkeypatch.setattr(gradient_mask, "_kernel_on", lambda _: stand_in)
    torch.manual_seed(0)
    layers: Any = [nn.Linear(6, 5, bias=False) for _ in range(3)]
    half, full = torch.rand(5, 6) < 0.5, torch.ones(5, 6, dtype=torch.bool)
    connections = [
        Connections("", layer, mask)
        for layer, mask in zip(layers, (half, ~half, full), strict=True)
    ]
    mask_gradients = GradientMask(connections)
    lying = [[torch.empty(5, 6) for _ in layers] for _ in range(12)]
    for turn in range(90):
        if turn == 40:
            connections[2].change(half, None)  # which had all of them
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
            assert calls["made"] == 6  # three places, and again when the third layer came in
    assert len(mask_gradients._kept) <= 8
    assert calls["made use of"] == 90 - len(range(0, 90, 11))
