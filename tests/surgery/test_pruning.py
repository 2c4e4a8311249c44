from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo_models import ZOO

from dg_lightning.surgery import prune

CRITERIA = ["taylor", "activation", "magnitude"]


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def half_useless() -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """Return a net whose odd units hardly reach its outputs, and data that it fits nearly."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    nn.init.normal_(net[0].weight)
    net[2].weight.data[:, 1::2] *= 1e-4
    inputs = torch.randn(4, 32, 8)
    return net, [(x, net(x).detach() + torch.randn(32, 3)) for x in inputs]


@pytest.mark.parametrize("criterion", CRITERIA)
def test_units_that_matter_are_kept(criterion: Any) -> None:
    net, batches = half_useless()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    result = prune(net, batches, 0.5, criterion=criterion, loss=mean_square)
    assert result.units == {"2": (16, 8)}
    small: Any = result.model
    assert torch.equal(small[0].weight, net[0].weight[::2])
    torch.testing.assert_close(small(batches[0][0]), net(batches[0][0]), rtol=0, atol=0.01)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_the_score_of_taylor_is_the_squared_gradient_of_a_factor_of_the_unit() -> None:
    net, batches = half_useless()
    expected = torch.zeros(16)
    for x, y in batches:
        factor = torch.ones(16, requires_grad=True)
        F.mse_loss(net[2](net[1](net[0](x)) * factor), y).backward()
        assert factor.grad is not None
        expected += factor.grad.square()
    kept = expected.topk(5).indices.sort().values
    small: Any = prune(net, batches, 5 / 16, loss=mean_square).model
    assert torch.equal(small[0].weight, net[0].weight[kept])


def test_a_hugging_face_model_is_pruned_by_its_own_loss_and_reloads(tmp_path: Any) -> None:
    model: Any = ZOO["bert"].build().eval()
    tokens = ZOO["bert"].example()["input_ids"]
    batch = {"input_ids": tokens, "labels": torch.arange(len(tokens)) % 2}
    result = prune(model, [batch], 0.5, layers=["*.output.dense"])
    assert result.settings == {"intermediate_size": 32}
    result.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    inputs = {"input_ids": batch["input_ids"]}
    assert torch.equal(again(**inputs).logits, result.model(**inputs).logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 0.0}, "`target` must be a share of the units in"),
        ({"target": 1.5}, "`target` must be a share of the units in"),
        ({"kinds": ["units"]}, "`kinds` must be some of feed_forward, heads, channels"),
        ({"kinds": []}, "`kinds` must be some of feed_forward, heads, channels"),
        ({"batches": []}, "`batches` must hold at least one batch"),
        ({"loss": None}, "needs a loss"),
    ],
)
def test_wrong_values_are_refused(options: dict[str, Any], message: str) -> None:
    net, batches = half_useless()
    given: dict[str, Any] = {"batches": batches, "target": 0.5, "loss": mean_square, **options}
    with pytest.raises(ValueError, match=message):
        prune(net, **given)
