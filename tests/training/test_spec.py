from collections.abc import Callable
from typing import Any

import pytest
import torch
from hostile import doubled, endless_list, nested, time_limit
from torch import nn

from dg_lightning import GatedMLP
from dg_lightning.training.spec import (
    build,
    check_classes,
    check_trusted,
    import_class,
    modules_named,
)


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.inner = inner
        self.num_classes = num_classes


def test_open_arguments_go_where_there_is_a_parameter_and_none_is_given() -> None:
    net = build(
        {"class_path": "GatedMLP", "init_args": {"hidden": [4]}},
        "net",
        nn.Module,
        in_features=3,
        num_classes=2,
        input_shape=(3,),
    )
    assert isinstance(net, GatedMLP)
    assert net.output.out_features == 2
    spec = {"class_path": "dg_lightning.GatedMLP", "init_args": {"hidden": [4], "num_classes": 7}}
    assert build(spec, "net", GatedMLP, in_features=3, num_classes=2).output.out_features == 7


def test_a_nested_class_path_is_built_too() -> None:
    inner = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 3, "out_features": 2}}
    spec = {"class_path": f"{__name__}.Wrapper", "init_args": {"inner": inner}}
    import sys

    assert isinstance(sys.modules[__name__].Wrapper, type)
    net = build(spec, "net", Wrapper, num_classes=5)
    assert isinstance(net.inner, nn.Linear)
    assert net.num_classes == 5


def test_bare_names_of_optimizers_and_schedulers() -> None:
    assert import_class("SGD", torch.optim.Optimizer) is torch.optim.SGD
    found = import_class("CosineAnnealingLR", torch.optim.lr_scheduler.LRScheduler)
    assert found is torch.optim.lr_scheduler.CosineAnnealingLR


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (nn.Linear(1, 1), TypeError, "`net` must be a class path with its arguments, got Linear"),
        ({"init_args": {}}, TypeError, "`net` must be a class path"),
        ({"class_path": "NoNet"}, ValueError, "No class found at 'NoNet'"),
        ({"class_path": "torch.nn.NoNet"}, ValueError, "No class found at 'torch.nn.NoNet'"),
        ({"class_path": "no_package.Net"}, ModuleNotFoundError, "no_package"),
        ({"class_path": "os.system"}, ValueError, "No class found at 'os.system'"),
        ({"class_path": "subprocess.Popen"}, ValueError, "must be a subclass of Module"),
        (
            {
                "class_path": "torch.nn.TransformerEncoder",
                "init_args": {"encoder_layer": {"class_path": "io.StringIO"}},
            },
            ValueError,
            "'io.StringIO' must be a subclass of Module",
        ),
        (
            {"class_path": "GatedMLP", "init_args": {"hiden": [3]}},
            ValueError,
            "GatedMLP has no argument 'hiden'.* in_features, hidden, num_classes",
        ),
    ],
)
def test_what_is_wrong_is_named(spec: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build(spec, "net", nn.Module)


def endless_dict() -> dict[str, Any]:
    found: dict[str, Any] = {"class_path": "torch.nn.Linear"}
    found["init_args"] = {"bias": found}
    return found


def doubled_dict() -> dict[str, Any]:
    found: dict[str, Any] = {"class_path": "torch.nn.Linear"}
    for _ in range(60):
        found = {"a": found, "b": (found, found)}
    return found


UNENDING: dict[str, Callable[[], Any]] = {
    "doubled": lambda: doubled(60),
    "doubled dicts and tuples": doubled_dict,
    "itself": endless_list,
    "itself in a dict": endless_dict,
    "depth": lambda: nested(100_000),
}


@pytest.mark.parametrize("name", UNENDING)
def test_values_that_never_end_are_checked_in_time(name: str) -> None:
    values = [UNENDING[name](), {"class_path": "evil.Net"}]
    with time_limit(), pytest.raises(ValueError, match=r".") as caught:
        check_trusted(values, "a.ckpt")
    assert "a.ckpt" in str(caught.value)
    assert len(str(caught.value)) < 300
    with time_limit(), pytest.raises((ValueError, ModuleNotFoundError)):
        check_classes(values)


@pytest.mark.parametrize("name", UNENDING)
def test_modules_of_values_that_never_end_are_named_in_time(name: str) -> None:
    values = [UNENDING[name](), {"class_path": "my_models.Net"}]
    with time_limit():
        try:
            found = modules_named(values)
        except ValueError:
            return
    assert "my_models" in found


def test_a_foreign_class_behind_a_shared_value_is_found() -> None:
    shared: list[Any] = [{"class_path": "torch.nn.Linear"}]
    check_trusted([shared, [shared, shared], {"a": shared}], "a.ckpt")
    shared.append({"class_path": "evil.Net"})
    with pytest.raises(ValueError, match=r"evil\.Net"):
        check_trusted([[1], [shared, shared]], "a.ckpt")


def test_equal_values_are_not_taken_for_the_same() -> None:
    # Temporary lists may be given the place in memory of one that was seen before.
    values = [[{"class_path": "torch.nn.Linear"}] for _ in range(1000)]
    values.append([{"class_path": "evil.Net"}])
    with pytest.raises(ValueError, match=r"evil\.Net"):
        check_trusted(values, "a.ckpt")
