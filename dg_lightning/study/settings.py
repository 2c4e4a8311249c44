"""What a study is: variants of a training, each with several seeds."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = [
    "PlannedTrial",
    "Variant",
    "as_option",
    "planned_trials",
    "seeds_of",
    "what_is_trained",
]

# Options that only say where something lies on a machine.
_PLACES = re.compile(r"--data\.(init_args\.)?(root|cache_dir)$")
# In an option, stands for the seed of the trial: `data.split_seed={seed}`.
_SEED = "{seed}"


@dataclass
class Variant:
    """One row of the table.

    Args:
        config: A config file, or the short name of one that ships; `<dataset>/<variant>` if None.
        options: Dotted options of `fit`, as `trainer.max_epochs=20`; they come after those of the
            study. `{seed}` stands for the seed.
    """

    config: str | None = None
    options: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PlannedTrial:
    """One training of a study.

    Args:
        variant: Name of its variant.
        seed: Its seed.
        arguments: What `fit` is given.
        fingerprint: Changes when what would be trained does.
    """

    variant: str
    seed: int
    arguments: tuple[str, ...]
    fingerprint: str

    @property
    def name(self) -> str:
        """How people know it."""
        return f"{self.variant}, seed {self.seed}"


def seeds_of(seeds: int | Sequence[int]) -> list[int]:
    """Return the seeds: those given, or so many from 0 on.

    >>> seeds_of(3)
    [0, 1, 2]
    """
    found = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not found or len(set(found)) < len(found) or min(found) < 0:
        raise ValueError(
            f"`seeds` must be a number of seeds or a list of different ones, got {seeds}."
        )
    return found


def planned_trials(
    dataset: str,
    variants: dict[str, Variant],
    seeds: Sequence[int],
    options: Sequence[str],
) -> list[PlannedTrial]:
    """Return all trainings, seed by seed, so that every variant is seen early.

    Args:
        dataset: Name of the dataset, where a variant's config is looked for.
        variants: The variants by name.
        seeds: The seeds.
        options: Dotted options for all variants.

    >>> [t.name for t in planned_trials("digits", {"baseline": Variant()}, [0, 1], [])]
    ['baseline, seed 0', 'baseline, seed 1']
    """
    from dg_lightning.cli.configs import config_path, with_config_paths

    if not variants:
        raise ValueError("A study needs `variants`: name at least one.")
    for name in variants:
        if not name.replace("_", "").replace("-", "").isalnum():
            raise ValueError(
                f"The name of a variant is also that of a folder: expected letters, digits, _ and "
                f"-, got {name!r}."
            )
    planned = []
    for seed in seeds:
        for name, variant in variants.items():
            path = config_path(variant.config or f"{dataset}/{name}")
            texts = [o.replace(_SEED, str(seed)) for o in [*options, *variant.options]]
            given = with_config_paths([as_option(text) for text in texts])
            arguments = (f"--config={path}", *given, f"--seed_everything={seed}")
            origin = json.dumps([name, seed, *what_is_trained(arguments)])
            fingerprint = hashlib.sha256(origin.encode()).hexdigest()[:16]
            planned.append(PlannedTrial(name, seed, arguments, fingerprint))
    return planned


def what_is_trained(arguments: Sequence[str]) -> list[str]:
    """Return what decides the result: configs by their content, data wherever it lies."""
    found = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key == "--config":
            found.append(Path(value).read_text(encoding="utf-8"))
        elif not _PLACES.match(key):
            found.append(argument)
    return found


def as_option(text: str) -> str:
    """Return a dotted option as the command line has it.

    >>> as_option("trainer.max_epochs=3")
    '--trainer.max_epochs=3'
    """
    if "=" not in text:
        raise ValueError(f"An option is written as key=value, got {text!r}.")
    return text if text.startswith("--") else f"--{text}"
