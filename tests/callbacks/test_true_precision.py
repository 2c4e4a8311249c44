"""Every callback where weights are in true half or double precision."""

from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_nets import OF_TASKS, data, each, make, module_for, trainer_for
from task_runs import classifier, tasks
from task_runs import trainer_for as sequential
from torch import Tensor

import dg_lightning.callbacks
from dg_lightning.callbacks import RigL

pytestmark = [
    pytest.mark.filterwarnings("ignore:Gate collapse"),
    pytest.mark.filterwarnings("ignore:BudgetController"),  # so few steps need not do
    pytest.mark.filterwarnings("ignore:τ has no effect"),
]
precisely = pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])


def module_of(name: str) -> Any:
    """Return a module that learns by SGD: Adam divides by 0 in half precision."""
    model: Any = module_for(name)
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.02)
    return model


def tensors_in(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state
    nested = isinstance(state, dict | list | tuple)
    return [tensor for value in values for tensor in tensors_in(value)] if nested else []


def narrow(callback: Any) -> set[torch.dtype]:
    """Return the dtypes of fewer than 32 bits in the state of a callback."""
    kinds = {t.dtype for t in tensors_in(callback.state_dict()) if t.is_floating_point()}
    return {kind for kind in kinds if kind.itemsize < 4}


@precisely
@each
def test_trains_and_goes_on_from_its_checkpoint(name: str, precision: Any, tmp_path: Path) -> None:
    options: Any = {"precision": precision, "enable_checkpointing": True}
    callback, model = make(name), module_of(name)
    trainer = trainer_for([callback], tmp_path, **options)
    trainer.fit(model, data())
    assert trainer.global_step == 12
    assert all(bool(weight.isfinite().all()) for weight in model.parameters())
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    again = trainer_for([make(name)], tmp_path, **{**options, "max_steps": 16})
    again.fit(module_of(name), data(), ckpt_path=tmp_path / "some.ckpt", weights_only=True)
    assert again.global_step == 16


@precisely
@each
def test_what_it_measures_is_kept_in_float32_or_wider(
    name: str, precision: Any, tmp_path: Path
) -> None:
    callback = make(name)
    trainer_for([callback], tmp_path, precision=precision).fit(module_of(name), data())
    assert not narrow(callback)


@precisely
def test_mean_gradients_are_kept_in_float32_or_wider(precision: Any, tmp_path: Path) -> None:
    rigl = RigL(0.8, every_n_steps=3, layers=["*1.linear"], grow="mean_gradient")
    trainer_for([rigl], tmp_path, precision=precision).fit(module_of("RigL"), data())
    assert tensors_in(rigl.state_dict())
    assert not narrow(rigl)


@precisely
@pytest.mark.parametrize("name", OF_TASKS)
@pytest.mark.filterwarnings("ignore:.* has no free unit left")
@pytest.mark.filterwarnings("ignore:No unit is open for less")
def test_callbacks_of_tasks_do(name: str, precision: Any, tmp_path: Path) -> None:
    model: Any = classifier()
    model.optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.02}}
    callback = getattr(dg_lightning.callbacks, name)(**OF_TASKS[name])
    sequence = tasks(kind="drift", tasks=2) if name == "Adapt" else tasks()
    sequential([callback], tmp_path, precision=precision).fit(model, datamodule=sequence)
    assert all(bool(weight.isfinite().all()) for weight in model.parameters())
    assert not narrow(callback)
