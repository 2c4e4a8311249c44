"""Configs shipped with the package, named like `digits/dynamicgate`."""

from collections.abc import Iterator
from difflib import get_close_matches
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import yaml

from dg_lightning.cli_error import cli_error

__all__ = [
    "config_name",
    "config_path",
    "config_summary",
    "option_values",
    "resolve_config_paths",
    "shipped_configs",
]


def shipped_configs() -> list[str]:
    """List the short names of the shipped configs.

    >>> "digits/dynamicgate" in shipped_configs()
    True
    """
    folder = Path(str(files("dg_lightning.configs")))
    found = folder.rglob("*.yaml")
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in found)


def config_summary(name: str) -> str:
    """Return the first sentence of the leading comment of a shipped config.

    >>> config_summary("digits/baseline")
    'Digits, plain MLP: the dense reference.'
    """
    lines = files("dg_lightning.configs").joinpath(f"{name}.yaml").read_text("utf-8").splitlines()
    first = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    comment = " ".join(line.removeprefix("#").strip() for line in lines[:first])
    sentence, stop, _ = comment.partition(". ")
    return sentence + stop.rstrip()


def config_name(path: str) -> str:
    """Return the short name of a shipped config, or the absolute path of another file."""
    shipped = Path(str(files("dg_lightning.configs"))).resolve()
    whole = Path(path).resolve()
    if whole.is_relative_to(shipped):
        return whole.relative_to(shipped).with_suffix("").as_posix()
    return str(whole)


def option_values(args: list[str], *names: str) -> Iterator[str]:
    """Yield the values of an option, written as `--name value` or `--name=value`.

    >>> list(option_values(["-c", "a", "--config=b", "--x=1"], "--config", "-c"))
    ['a', 'b']
    """
    for index, argument in enumerate(args):
        option, equals, value = argument.partition("=")
        if option in names and (equals or index + 1 < len(args)):
            yield value if equals else args[index + 1]


def resolve_config_paths(args: list[str]) -> list[str]:
    """Replace short names of shipped configs with their paths."""
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
    """Return the path of a config, given by path or short name."""
    if Path(name).is_file():
        _check_yaml(name)
        return name
    shipped = shipped_configs()
    short = name.removeprefix("configs/").removesuffix(".yaml")
    if short in shipped:
        if short.startswith("logger/wandb") and find_spec("wandb") is None:
            raise cli_error(f"{short} needs W&B: pip install wandb wandb-workspaces.")
        return str(files("dg_lightning.configs").joinpath(f"{short}.yaml"))
    group = short.rpartition("/")[0]
    siblings = [one.removeprefix(f"{group}/") for one in shipped if one.startswith(f"{group}/")]
    near = get_close_matches(short, shipped, n=1, cutoff=0.8)
    hint = f"did you mean {near[0]}?" if near else "`dg-lightning configs` lists the shipped ones."
    if group and siblings and not near:
        hint = f"{group} has {', '.join(siblings)}."
    raise cli_error(f"There is no config {name!r}, neither as a file nor shipped; {hint}")


def _check_yaml(path: str) -> None:
    """Check that a file is a YAML mapping of plain values."""
    try:
        text = Path(path).read_text("utf-8")
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if getattr(event, "tag", None) is not None:
                line = event.start_mark.line + 1
                raise cli_error(f"{path}, line {line}: a config must hold plain values, not tags.")
        settings = yaml.compose(text, Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise cli_error(f"{path} is not text: {error}.", error) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise cli_error(f"{path}{where} is not YAML: {problem}.", error) from error
    if not isinstance(settings, yaml.MappingNode):
        raise cli_error(f"{path} holds no settings: write them as `name: value`.")
    _check_keys(path, settings)


def _check_keys(path: str, node: yaml.Node) -> None:
    """Check for duplicate keys, of which YAML would keep only the last."""
    seen = set()
    for item in node.value if isinstance(node, yaml.CollectionNode) else ():
        key, value = item if isinstance(item, tuple) else (None, item)
        if key is not None and key.value in seen:
            line = key.start_mark.line + 1
            raise cli_error(f"{path}, line {line}: duplicate key {key.value!r}: keep one.")
        if key is not None and isinstance(key.value, str):
            seen.add(key.value)
        _check_keys(path, value)
