"""Layers that a module makes, replaces or wraps after its constructor."""

from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_nets import Foreign, data, each, make, module_for, trainer_for
from torch import nn

pytestmark = [
    pytest.mark.filterwarnings("ignore:Gate collapse"),
    pytest.mark.filterwarnings("ignore:BudgetController"),
    pytest.mark.filterwarnings("ignore:τ has no effect"),
]


class Late(Foreign):
    """Somebody's module that has its layers later, or has other layers later."""

    def __init__(self, name: str, when: str, replaces: bool) -> None:
        super().__init__()
        self.name, self.when = name, when
        self.body: Any = module_for(name).body if replaces else None

    def complete(self, when: str) -> None:
        if when == self.when:  # with the random numbers of a module that is made at once
            self.body = module_for(self.name).body

    def setup(self, stage: str) -> None:
        self.complete("setup")

    def configure_model(self) -> None:
        self.complete("configure_model")


def ends(model: Foreign, name: str, root: Path, compiled: bool = False) -> dict[str, Any]:
    callback = make(name)
    trainer_for([callback], root).fit(model, data())
    return {
        **{key.replace("_orig_mod.", ""): value for key, value in model.state_dict().items()},
        **{key: str(value) for key, value in callback.state_dict().items()},
    }


@each
@pytest.mark.parametrize("replaces", [False, True], ids=["made", "replaced"])
@pytest.mark.parametrize("when", ["setup", "configure_model"])
def test_they_are_trained_as_those_of_a_module_that_is_made_at_once(
    name: str, when: str, replaces: bool, tmp_path: Path
) -> None:
    late = ends(Late(name, when, replaces), name, tmp_path)
    for key, value in ends(module_for(name), name, tmp_path).items():
        assert torch.equal(late[key], value) if torch.is_tensor(value) else late[key] == value, key


@each
def test_a_wrapper_that_is_put_around_them_changes_nothing(name: str, tmp_path: Path) -> None:
    class Wrapping(Foreign):
        def configure_model(self) -> None:
            self.body: Any = torch.compile(module_for(name).body, backend="eager")

    wrapped = ends(Wrapping(), name, tmp_path)
    for key, value in ends(module_for(name), name, tmp_path).items():
        if torch.is_tensor(value):
            torch.testing.assert_close(wrapped[key], value, msg=key)


@each
def test_they_are_found_in_a_test_too(name: str, tmp_path: Path) -> None:
    class Tested(Late):
        def test_step(self, batch: Any, batch_idx: int) -> Any:
            return {"logits": self.body(batch[0])}

    callback = make(name)
    trainer = trainer_for([callback], tmp_path, limit_test_batches=2)
    (metrics,) = trainer.test(Tested(name, "configure_model", False), data(), verbose=False)
    if name == "GateMonitor":
        assert "gates/open_rate/body.1.gate" in metrics
    if name == "RoutingMonitor":
        assert any(key.startswith("routing/entropy/body.1") for key in metrics)


def test_layers_that_share_a_module_have_either_name(tmp_path: Path) -> None:
    class Tied(Foreign):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.body[1]
            self.last = nn.Linear(16, 10)
            self.last.weight = self.body[3].weight  # type: ignore[assignment]

    for layers in (["again.linear"], ["body.1.linear"], ["last"], ["body.3"]):
        sparse = make("StaticSparse")
        sparse.layers = layers
        model = Tied()
        trainer_for([sparse], tmp_path).fit(model, data())
        assert list(sparse.connections) == layers
        (layer,) = sparse.connections.values()
        assert (layer.weight[~layer.mask] == 0).all()
    for layers in (["again.*"], ["body.1.*"]):
        annealing = make("TemperatureAnnealing")
        annealing.layers = layers
        model = Tied()
        trainer_for([annealing], tmp_path).fit(model, data())
        assert model.again.gate.temperature < 2  # type: ignore[union-attr,operator]
        assert model.body[2].gate.temperature == 1  # type: ignore[union-attr]
