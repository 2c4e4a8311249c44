import logging
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dg_lightning.schedules import Clock, JoinedPhases, Phase, Schedule, as_schedule


@pytest.mark.parametrize(
    ("duration", "steps"),
    [
        (40, 40),
        (0.25, 250),
        (1.0, 1000),
        ("3 epochs", 300),
        ("1 epoch", 100),
        ("0.5 epochs", 50),
        ("600 steps", 600),
        ("1 step", 1),
        ("70 %", 700),
    ],
)
def test_durations_are_steps_fractions_or_words(duration: Any, steps: int) -> None:
    assert Clock(1000, 100).steps(duration) == steps


@pytest.mark.parametrize("duration", [-1, 1.5, "soon", "3", "3 weeks", "150 %"])
def test_what_is_no_duration_is_refused(duration: Any) -> None:
    with pytest.raises(ValueError, match="`begin` must be a number of steps"):
        Schedule(0, 1, begin=duration)


def test_epochs_of_data_without_a_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`until` is '3 epochs'.*no length"):
        Clock(1000).steps("3 epochs", "until")
    with pytest.raises(ValueError, match="`staircase: epoch`"):
        Schedule(0, 1, staircase="epoch").resolve(Clock(1000))(3)


@pytest.mark.parametrize(
    ("shape", "quarter", "half"),
    [
        ("linear", 2.5, 2.0),
        ("cosine", 3 - 2 * (1 - math.cos(math.pi / 4)) / 2, 2.0),
        ("quadratic", 3 - 2 / 16, 2.5),
        ("exponential", 3 * (1 / 3) ** 0.25, 3 * (1 / 3) ** 0.5),
        ("step", 1.0, 1.0),
    ],
)
def test_shapes_by_hand(shape: Any, quarter: float, half: float) -> None:
    at = Schedule(3.0, 1.0, shape, begin=100, until=500).resolve(Clock(1000))
    assert [at(0), at(99)] == [3.0, 3.0]
    assert at(200) == pytest.approx(quarter)
    assert at(300) == pytest.approx(half)
    assert [at(500), at(999)] == [1.0, 1.0]


def test_a_warmup_has_its_own_value() -> None:
    at = Schedule(1e-3, 0.1, "exponential", begin=3, until=5, before=0.0).resolve(Clock(10))
    assert [at(0), at(2), at(3), at(5)] == [0.0, 0.0, 1e-3, 0.1]
    assert at(4) == pytest.approx(1e-2)


def test_a_staircase_is_algorithm_1_to_the_letter() -> None:
    total, warmup, highest = 7, 2, 0.3
    ramp = Schedule(0.0, highest, begin=f"{warmup} epochs", until="100%", staircase="epoch")
    at = ramp.resolve(Clock(total * 13, 13))
    for t in range(1, total + 1):  # the paper counts epochs from 1
        by_paper = 0 if t <= warmup else highest * min(1, (t - warmup) / max(1, total - warmup))
        for step in range((t - 1) * 13, t * 13):
            assert at(step) == pytest.approx(by_paper)


@given(
    st.sampled_from(["linear", "cosine", "quadratic", "exponential", "step"]),
    st.floats(0.01, 10),
    st.floats(0.01, 10),
    st.integers(0, 200),
)
def test_a_schedule_stays_between_its_ends_and_goes_one_way(
    shape: Any, start: float, end: float, step: int
) -> None:
    at = Schedule(start, end, shape, begin="10%", until="80%").resolve(Clock(200))
    low, high = sorted([start, end])
    assert low - 1e-9 <= at(step) <= high + 1e-9
    assert (at(step + 1) - at(step)) * (end - start) >= -1e-9


def test_bad_schedules_say_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"`start` and `end` .* got 0 and 1"):
        Schedule(0, 1, "exponential")
    with pytest.raises(ValueError, match=r"`until` .*'20%' \(step 20\).*'50%' \(step 50\)"):
        Schedule(0, 1, begin="50%", until="20%").resolve(Clock(100))
    with pytest.raises(ValueError, match=r"`shape` must be linear.* or step, got 'round'"):
        Schedule(0, 1, "round")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`start` must be a finite number, got inf"):
        Schedule(math.inf, 1)
    with pytest.raises(ValueError, match="`weight` takes start, end"):
        as_schedule("weight", {"beginning": 0})
    with pytest.raises(ValueError, match=r"`keep` must be in \[0, 1\], got 2"):
        Phase(2, 0.5, 1)


def test_phases_are_joined_without_a_jump() -> None:
    at = JoinedPhases([0.9, 0.6, 0.3], [0, 30, 70], width=10)
    values = [at(step) for step in range(100)]
    assert values[29] == values[30] == 0.9
    assert values[40] == values[70] == 0.6
    assert values[80] == values[99] == 0.3
    assert max(abs(b - a) for a, b in pairwise(values)) < 0.06
    abrupt = JoinedPhases([0.9, 0.6], [0, 30], width=0)
    assert [abrupt(29), abrupt(30)] == [0.9, 0.6]


class FakeTrainer:
    estimated_stepping_batches = 90
    num_training_batches = 35
    accumulate_grad_batches = 4


def test_the_clock_of_a_trainer_counts_optimizer_steps() -> None:
    assert Clock.from_trainer(FakeTrainer()) == Clock(90, 9)
    endless: Any = FakeTrainer()
    endless.estimated_stepping_batches = math.inf
    clock = Clock.from_trainer(endless)
    assert clock == Clock(None, 9)
    assert [clock.steps(duration) for duration in (40, "40 steps", "2 epochs")] == [40, 40, 18]
    assert Schedule(0.5, 0.5).resolve(clock)(10**9) == 0.5
    for fraction in (0.75, "75 %"):
        with pytest.raises(ValueError, match=r"`until` is .*75.*no known end.*`max_steps`"):
            clock.steps(fraction, "until")


def test_a_clock_by_hand_says_what_it_assumes(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock(240, 60, assumed=True)
    with caplog.at_level(logging.INFO):
        assert clock.steps(30, "begin") == 30
        assert not caplog.messages
        assert clock.steps(0.5, "until") == 120
    (line,) = caplog.messages
    assert "`until: 0.5` assumes" in line
    assert "240 steps" in line
    assert "`max_steps`" in line
