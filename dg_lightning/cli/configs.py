"""Configs that ship with the package, by their short names."""

from difflib import get_close_matches
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from dg_lightning.cli.errors import refusal

__all__ = ["config_path", "shipped_configs", "with_config_paths"]


def shipped_configs() -> list[str]:
    """List the short names of the configs that ship with the package.

    >>> "digits/dynamicgate" in shipped_configs()
    True
    """
    folders = [entry for entry in files("dg_lightning.configs").iterdir() if entry.is_dir()]
    found = [f"{folder.name}/{entry.name}" for folder in folders for entry in folder.iterdir()]
    return sorted(name.removesuffix(".yaml") for name in found if name.endswith(".yaml"))


def with_config_paths(args: list[str]) -> list[str]:
    """Replace the short name of a shipped config by its path."""
    resolved = list(args)
    for index, argument in enumerate(resolved):
        option, equals, value = argument.partition("=")
        if option not in ("--config", "-c"):
            continue
        if equals:
            resolved[index] = f"{option}={config_path(value)}"
        elif index + 1 < len(resolved):
            resolved[index + 1] = config_path(resolved[index + 1])
    return resolved


def config_path(name: str) -> str:
    """Return the path of a config, given as one or by the short name of one that ships."""
    if Path(name).is_file():
        return name
    shipped = shipped_configs()
    short = name.removeprefix("configs/").removesuffix(".yaml")
    if short in shipped:
        if short.startswith("logger/wandb") and find_spec("wandb") is None:
            raise refusal(f"{short} needs W&B: pip install 'dg-lightning[wandb]'.")
        return str(files("dg_lightning.configs").joinpath(f"{short}.yaml"))
    near = get_close_matches(short, shipped, n=1)
    hint = f"did you mean {near[0]}?" if near else f"these ship: {', '.join(shipped)}."
    raise refusal(f"There is no config {name!r}, neither as a file nor shipped; {hint}")
