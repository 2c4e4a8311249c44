"""Wrong values for every argument of every exported callback, and of what they are given.

The values come from the signatures, so a new callback is covered the day it is exported. What
does not fit an annotation is judged by pydantic, not by our own check.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

import pytest
from foreign_nets import ARGUMENTS, OF_TASKS

import dg_lightning.callbacks
from dg_lightning.collapse import Limits
from dg_lightning.schedules import Phase, Schedule

pydantic = pytest.importorskip("pydantic")

ANY = pydantic.ConfigDict(arbitrary_types_allowed=True)  # such as nn.Module
CLASSES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    **{n: (getattr(dg_lightning.callbacks, n), a) for n, a in {**ARGUMENTS, **OF_TASKS}.items()},
    "Schedule": (Schedule, {"start": 1.0, "end": 0.5}),
    "Phase": (Phase, {"keep": 0.5, "threshold": 0.5, "weight_factor": 1.0}),
    "Limits": (Limits, {}),
}
# Wrong for every argument: no number of ours is negative or endless, nothing is empty.
NEVER: list[Any] = [
    *(math.nan, math.inf, -math.inf, -1, -0.5, -(10**9)),
    *("", [], {}, (), [""], {"": 0.5}, {"x": math.nan}, {"x": -1.0}, {"x": math.inf}, [math.nan]),
]
# Wrong where the annotation does not allow them.
OTHERS: list[Any] = [
    *(None, True, False, 0.3, 1.5, 2.5, 3, "no", "150 %", "-1 steps", "3 weeks", b"1", 1j),
    *([None], [1], ["x", 1], [["x"]], {"x": None}, {"x": "y"}, {"x": True}, {1: 0.5}, {"x": [1]}),
    *({1}, object(), len, float, iter([1]), ["no"], {"x": {}}, "None", "nan", "1e3"),
]
OUT_OF_RANGE: list[tuple[str, str, Any]] = [
    *(("BudgetController", "budget", value) for value in (0, 1.5, {"*": 0.0}, {"*": 2})),
    *(("BudgetController", name, 1.5) for name in ("begin", "until", "freeze_at")),
    *(("BudgetController", name, "150 %") for name in ("begin", "until", "freeze_at")),
    ("BudgetController", "initial_weight", 0),
    ("BudgetController", "max_weight", 0.01),
    *(("CollapseDetector", "every_n_steps", value) for value in (0, 1)),
    *(("CollapseDetector", "limits", value) for value in ({"close": 1}, {"closed": 2})),
    ("GatePenalty", "weight", {"begin": 0, "finish": 1}),
    ("GatePenalty", "weight", {"start": "a", "end": 1}),
    *(("MinimumActivity", "min_open", value) for value in (1.5, {"*": 1.5})),
    *((n, "every_n_steps", 0) for n in ("BudgetController", "MagnitudePruning", "RigL", "SET")),
    *(
        (n, "sparsity", value)
        for n in ("MagnitudePruning", "RigL", "SET", "StaticSparse")
        for value in (1, 1.5, {"*": 1.0})
    ),
    *((n, "structure", "3:2") for n in ("MagnitudePruning", "RigL", "SET", "StaticSparse")),
    *((n, "structure", "blocks") for n in ("MagnitudePruning", "RigL", "SET", "StaticSparse")),
    *((n, "drop_fraction", value) for n in ("RigL", "SET") for value in (0, 1.5)),
    *((n, "until", 1.5) for n in ("RigL", "SET", "TemperatureAnnealing", "MagnitudePruning")),
    ("RigL", "mean_decay", 1),
    *(("TemperatureAnnealing", name, 0) for name in ("start", "end")),
    ("ThresholdPhases", "phases", [{"hold": 1}]),
    ("ThresholdPhases", "buffer_keep", 1.5),
    *(("Phase", name, 1.5) for name in ("keep", "threshold")),
    ("Limits", "patience", 0),
]
# Right all the same: no limits are the usual ones, and a schedule may have any sign.
FINE: list[tuple[str, str, Any]] = [
    ("CollapseDetector", "limits", {}),
    *(("Schedule", n, v) for n in ("start", "end", "before") for v in (-1, -0.5, -(10**9))),
]


def fits(value: Any, hint: Any) -> bool:
    try:
        pydantic.TypeAdapter(hint, config=ANY).validate_python(value, strict=True)
    except (pydantic.ValidationError, pydantic.errors.PydanticSchemaGenerationError):
        return False
    return True


def wrong_values() -> Iterator[tuple[str, str, Any]]:
    for name, (cls, _) in CLASSES.items():
        hints = get_type_hints(cls.__init__)
        for argument in inspect.signature(cls).parameters:
            others = [value for value in OTHERS if not fits(value, hints[argument])]
            for value in (*NEVER, *others):
                if (name, argument, value) not in FINE:
                    yield name, argument, value
    yield from OUT_OF_RANGE


def answer(name: str, argument: str, value: Any) -> str:
    """Return what is said to a value: clear, or what is wrong with the answer."""
    cls, arguments = CLASSES[name]
    try:
        cls(**{**arguments, argument: value})
    except ValueError as error:
        line = str(error)
        inside = isinstance(value, dict | list) and "`" in line  # a field of what is given
        if "\n" in line:
            return f"more than a line: {line}"
        return "clear" if f"`{argument}`" in line or inside else f"does not name it: {line}"
    except Exception as error:
        return f"raw: {type(error).__name__}: {error}"
    return "silent"


def test_each_gets_one_line_that_names_the_argument() -> None:
    tried = list(wrong_values())
    bad = [
        f"{name}({argument}={value!r}): {said}"
        for name, argument, value in tried
        if (said := answer(name, argument, value)) != "clear"
    ]
    assert not bad, f"{len(bad)} of {len(tried)}:\n" + "\n".join(bad)
    assert len(tried) >= 1000


@pytest.mark.parametrize("name", CLASSES)
def test_right_values_are_taken(name: str) -> None:
    cls, arguments = CLASSES[name]
    cls(**arguments)
    if name not in ("Schedule", "Phase"):
        cls(**{n: p.default for n, p in inspect.signature(cls).parameters.items()} | arguments)
