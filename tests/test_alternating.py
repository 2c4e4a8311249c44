"""How benchmarks compare ways of training: on times that are made up, with a known ratio."""

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[1] / "benchmarks" / "alternating.py"


@pytest.fixture(scope="module")
def alternating() -> Any:
    spec = importlib.util.spec_from_file_location("alternating", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("stretch", [1, 10, 100])
def test_every_place_is_measured_with_and_without(stretch: int, alternating: Any) -> None:
    names = list(alternating.turns(["a", "b"], "none", 100, stretch, rounds=2))
    assert len(names) == 3 * 2 * 2 * 100
    for name in ("a", "b"):
        places = [index % 100 for index, n in enumerate(names) if n == name]
        assert sorted(places) == sorted([*range(100)] * 3)


@pytest.mark.parametrize("stretch", [1, 10, 100])
def test_a_known_ratio_is_found_on_a_noisy_machine(stretch: int, alternating: Any) -> None:
    noise = random.Random(0)
    times = alternating.StepTimes("none", 100, stretch)
    for index, name in enumerate(alternating.turns(["rigl"], "none", 100, stretch, rounds=40)):
        seconds = 2.0 if name == "none" else 2.04
        if index % 100 == 99:
            seconds += 1.0 if name == "none" else 5.0  # both log there, and one makes an update
        if noise.random() < 0.02:
            seconds += 10  # something else ran
        slow = 1.2 if index // 777 % 3 == 1 else 1.0  # for a while
        times.steps.append((name, seconds * slow * noise.gauss(1, 0.01)))
    expected = (2.04 * 100 + 5) / (2.0 * 100 + 1)
    assert times.ratios()["rigl"] == pytest.approx(expected, abs=0.004)
    assert times.ratios()["none"] == 1
    assert times.seconds() == pytest.approx(2.0, rel=0.1)


def test_steps_are_timed_from_begin_to_end(
    alternating: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([1.0, 3.5, 10.0, 10.25])
    monkeypatch.setattr(alternating.time, "perf_counter", lambda: next(clock))
    times = alternating.StepTimes("none", 2, 1)
    for name in ("none", "all"):
        times.begin()
        times.end(name)
    assert times.steps == [("none", 2.5), ("all", 0.25)]
