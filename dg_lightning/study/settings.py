"""Study settings: variants of a training run, each with several seeds."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from dg_lightning.configs import config_path, resolve_config_paths

# Options that do not affect the result: local paths, and what is shown or logged.
_WITHOUT_EFFECT = re.compile(
    r"--(data\.(init_args\.)?(root|cache_dir)|trainer\.(logger(\..*)?|enable_progress_bar))$"
)
# Placeholders: the trial's seed in an option, as in `data.split_seed={seed}`, and the dataset in
# the name of a config.
_SEED, _DATASET = "{seed}", "{dataset}"


@dataclass
class Variant:
    """A variant, which is one row of the table.

    Args:
        config: Config file, or the short name of a shipped one; `<dataset>/<variant>` if None.
            `{dataset}` is replaced with the dataset, so one study can serve several.
        options: Dotted options of `fit`, such as `trainer.max_epochs=20`, applied after those of
            the study. `{seed}` is replaced with the seed.
    """

    config: str | None = None
    options: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PlannedTrial:
    """One training run of a study.

    Args:
        variant: Name of the variant.
        seed: Random seed.
        arguments: Arguments of `fit`.
        fingerprint: Hash of everything that affects the result.
    """

    variant: str
    seed: int
    arguments: tuple[str, ...]
    fingerprint: str

    @property
    def name(self) -> str:
        """Display name."""
        return f"{self.variant}, seed {self.seed}"


def expand_seeds(seeds: int | Sequence[int]) -> list[int]:
    """Return the given seeds, or that many seeds starting at 0.

    >>> expand_seeds(3)
    [0, 1, 2]
    """
    expanded = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not expanded or len(set(expanded)) < len(expanded) or min(expanded) < 0:
        raise ValueError(
            f"`seeds` must be a number of seeds or a list of distinct seeds, got {seeds}."
        )
    return expanded


def plan_trials(
    dataset: str,
    variants: dict[str, Variant],
    seeds: Sequence[int],
    options: Sequence[str],
) -> list[PlannedTrial]:
    """Return all trials, seed by seed, so that every variant has results early.

    Args:
        dataset: Name of the dataset, which is also the config folder of the variants.
        variants: The variants by name.
        seeds: The seeds.
        options: Dotted options for all variants.

    >>> [t.name for t in plan_trials("digits", {"baseline": Variant()}, [0, 1], [])]
    ['baseline, seed 0', 'baseline, seed 1']
    """
    if not variants:
        raise ValueError("`variants` must name at least one variant, got none.")
    for name in variants:
        if not name.replace("_", "").replace("-", "").isalnum():
            raise ValueError(
                f"Names in `variants` are also folder names: use only letters, digits, _ and -, "
                f"got {name!r}."
            )
    planned = []
    for seed in seeds:
        for name, variant in variants.items():
            config = variant.config or f"{dataset}/{name}"
            path = config_path(config.replace(_DATASET, dataset))
            texts = [o.replace(_SEED, str(seed)) for o in [*options, *variant.options]]
            given = resolve_config_paths([as_option(text) for text in texts])
            arguments = (f"--config={path}", *given, f"--seed_everything={seed}")
            identity = json.dumps([name, seed, *training_inputs(arguments)])
            fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]
            planned.append(PlannedTrial(name, seed, arguments, fingerprint))
    return planned


def training_inputs(arguments: Sequence[str]) -> list[str]:
    """Return the config contents and the options that affect the result."""
    inputs = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key == "--config":
            text = Path(value).read_text(encoding="utf-8")
            if not _only_sets_loggers(text):
                inputs.append(text)
        elif not _WITHOUT_EFFECT.match(key):
            inputs.append(argument)
    return inputs


def _only_sets_loggers(text: str) -> bool:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:  # `fit` says what is wrong with it
        return False
    trainer = content.get("trainer") if isinstance(content, dict) and len(content) == 1 else None
    return isinstance(trainer, dict) and set(trainer) == {"logger"}


def as_option(text: str) -> str:
    """Return a dotted option as a command-line argument.

    >>> as_option("trainer.max_epochs=3")
    '--trainer.max_epochs=3'
    """
    if "=" not in text:
        raise ValueError(f"An option must be written as key=value, got {text!r}.")
    return text if text.startswith("--") else f"--{text}"
