"""Which trials a study has."""

from pathlib import Path

import pytest

from dg_lightning.cli_error import CLIError
from dg_lightning.study.settings import Variant, expand_seeds, plan_trials


def test_a_config_may_name_the_dataset_of_the_study() -> None:
    planned = plan_trials("digits", {"dense": Variant("{dataset}/baseline")}, [0], [])
    assert Path(planned[0].arguments[0].partition("=")[2]).match("digits/baseline.yaml")


def test_every_variant_of_a_seed_comes_before_the_next_seed() -> None:
    variants = {"baseline": Variant(), "rigl": Variant()}
    found = plan_trials("digits", variants, [3, 5], [])
    assert [(t.variant, t.seed) for t in found] == [
        ("baseline", 3), ("rigl", 3), ("baseline", 5), ("rigl", 5)
    ]  # fmt: skip


def test_options_of_a_variant_come_behind_those_of_the_study_and_know_the_seed() -> None:
    variant = Variant("digits/rigl", ["data.split_seed={seed}"])
    (trial,) = plan_trials("digits", {"moving": variant}, [7], ["trainer.max_epochs=2"])
    assert trial.arguments[0].endswith("rigl.yaml")
    assert trial.arguments[1:] == (
        "--trainer.max_epochs=2", "--data.split_seed=7", "--seed_everything=7"
    )  # fmt: skip


def test_a_fingerprint_follows_content_and_options_not_the_place(tmp_path: Path) -> None:
    def fingerprint(text: str, name: str, *options: str) -> str:
        path = tmp_path / name
        path.write_text(text)
        return plan_trials("x", {"a": Variant(str(path))}, [0], options)[0].fingerprint

    same = fingerprint("a: 1", "one.yaml", "b=1")
    assert fingerprint("a: 1", "two.yaml", "b=1") == same
    assert fingerprint("a: 2", "one.yaml", "b=1") != same
    assert fingerprint("a: 1", "one.yaml", "b=2") != same
    # Where data lies on a machine changes nothing; what a further config says does.
    assert fingerprint("a: 1", "one.yaml", "data.root=/elsewhere", "b=1") == same
    (tmp_path / "logger.yaml").write_text("trainer: {logger: {class_path: WandbLogger}}")
    assert fingerprint("a: 1", "one.yaml", f"config={tmp_path}/logger.yaml", "b=1") == same
    for shown in ("trainer.logger=WandbLogger", "trainer.logger.offline=true"):
        assert fingerprint("a: 1", "one.yaml", shown, "b=1") == same
    more = tmp_path / "more.yaml"
    more.write_text("c: 1")
    before = fingerprint("a: 1", "one.yaml", f"config={more}")
    more.write_text("c: 2")
    assert fingerprint("a: 1", "one.yaml", f"config={more}") != before


def test_refuses() -> None:
    with pytest.raises(ValueError, match="`variants`"):
        plan_trials("digits", {}, [0], [])
    with pytest.raises(ValueError, match=r"got '\.\./a'"):
        plan_trials("digits", {"../a": Variant()}, [0], [])
    with pytest.raises(ValueError, match=r"key=value, got 'trainer'"):
        plan_trials("digits", {"rigl": Variant()}, [0], ["trainer"])
    with pytest.raises(CLIError):
        plan_trials("digits", {"ringle": Variant()}, [0], [])
    for seeds in (0, [], [1, 1], [-1]):
        with pytest.raises(ValueError, match="`seeds`"):
            expand_seeds(seeds)
