"""Options that name a callback class: `--trainer.callbacks.BudgetController.budget=0.3`."""

import inspect
import json
import re
from difflib import get_close_matches
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from dg_lightning.refusal import refusal
from dg_lightning.training.spec import import_class

__all__ = ["expand_callback_options"]

_NAMED = re.compile(r"--trainer\.callbacks\.([A-Z]\w*)\.(?:init_args\.)?([\w.]+)(?:=(.*))?", re.S)
_PRINT_OPTIONS = re.compile(r"--print_config|-h$|--help")


def expand_callback_options(args: list[str], parser: ArgumentParser) -> list[str]:
    """Replace options that name a callback class with the full list of callbacks.

    Args:
        args: The command line.
        parser: Parses the other options to find the configured callbacks.
    """
    options, others = [], []
    remaining = list(args)
    while remaining:
        argument = remaining.pop(0)
        if (match := _NAMED.fullmatch(argument)) is None:
            others.append(argument)
            continue
        name, key, value = match.groups()
        if value is None and not remaining:
            raise refusal(f"{argument} needs a value.")
        options.append((name, key, remaining.pop(0) if value is None else value))
    if not options:
        return args
    found = parser.parse_args([word for word in others if not _PRINT_OPTIONS.match(word)])
    settings = json.loads(parser.dump(found, format="json"))[found.subcommand]
    callbacks = settings["trainer"].get("callbacks") or []
    for name, key, value in options:
        _set_argument(_find_callback(name, callbacks), key, value)
    return [*others, f"--trainer.callbacks={json.dumps(callbacks, default=str)}"]


def _find_callback(name: str, callbacks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the only callback of the class."""
    names = [callback["class_path"].rpartition(".")[2] for callback in callbacks]
    if names.count(name) == 1:
        return callbacks[names.index(name)]
    present = ", ".join(names) or "none"
    if name in names:
        raise refusal(f"There are {names.count(name)} callbacks {name} ({present}): use a config.")
    near = get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"add it with --trainer.callbacks+={name}."
    raise refusal(f"There is no callback {name} ({present}): {hint}")


def _set_argument(callback: dict[str, Any], key: str, text: str) -> None:
    """Set an argument, or an entry of a dict argument."""
    cls = import_class(callback["class_path"], object)
    known = inspect.signature(cls).parameters
    target = callback.setdefault("init_args", {})
    *path, last = key.split(".")
    if (name := (*path, last)[0]) not in known:
        raise refusal(f"{cls.__name__} has no argument {name!r}; it has {', '.join(known)}.")
    try:
        is_text = not path and known[last].annotation in (str, str | None)
        value = text if is_text and text != "null" else yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise refusal(f"{key} of {cls.__name__} must be a YAML value, got {text!r}.") from error
    for part in path:
        if not isinstance(target.get(part), dict):
            target[part] = {}
        target = target[part]
    target[last] = value
