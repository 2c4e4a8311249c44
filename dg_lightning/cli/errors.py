"""One-line messages for user errors, with exit status 2."""

import re
import sysconfig
import traceback
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse
import lightning
from lightning import Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

import dg_lightning
from dg_lightning import callbacks, datamodules
from dg_lightning.cli_error import cli_error

# If one of these packages raises one of `_MESSAGE_TYPES`, the message is meant for the user.
_PACKAGES = (dg_lightning, callbacks, datamodules, lightning, jsonargparse)
_PACKAGE_FOLDERS = [Path(package.__path__[0]) for package in _PACKAGES]
_MESSAGE_TYPES = (ValueError, TypeError, RuntimeError)
_STATE_DICT_MISMATCH = "Error(s) in loading state_dict"

# Lines of the parser's report that do not describe the problem.
_BOILERPLATE = re.compile(
    r"Parser key|Does not validate against|Subtypes:|Errors:|Given value|Problem with given"
    r"|Expected a <class 'NoneType'>|Expected a path but"
)
_REWORDINGS = (
    (r"Type <class '[^']*'> expects a function or a callable class: ", ""),
    (r"\.? Got value: (?:\[?Namespace|\{).*", "."),
    (
        r"Expected a dot import path string: (\S+?)(?:\. Got value.*)?$",
        r"No class \1 found; pass its full path, such as package.module.Class.",
    ),
)

_UNKNOWN_OPTION = re.compile(
    r"(?:^unrecognized arguments: |^Option '|does not accept option ')(-*)([\w.]+)"
)
_UNKNOWN_CLASS = re.compile(r"No class (\w+) found; ")

# Options of version 0.2. In Python, `arguments.renamed` accepts them with a warning.
RENAMED = {
    "capture": "cuda_graphs",
    "join": "transition",
    "landing": "freeze_at",
    "max_loss": "max_accuracy_drop",
    "module": "submodule",
    "of": "rate",
    "only": "layers",
    "what": "train",
}


class OneLineErrorParser(LightningArgumentParser):
    """Reports errors in one line, without the usage text."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # An abbreviation is usually a typo.
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if re.match(r"unrecognized arguments: [^-]", message):
            message += "; pass a config with --config"
        elif unknown := _UNKNOWN_OPTION.search(message):
            known = list(self.get_defaults(skip_validation=True).keys())
            known += [f"trainer.{name}" for name in signature(Trainer).parameters]
            new = RENAMED.get(unknown[2].rpartition(".")[2])
            new = new if any(key.rpartition(".")[2] == new for key in known) else None
            near = [] if new else get_close_matches(unknown[2], known, n=1)
            message += f"; it is now {unknown[1]}{new}." if new else ""
            message += f"; did you mean {unknown[1]}{near[0]}?" if near else ""
        raise cli_error(_suggest_class(one_line(message)), ex)


def _suggest_class(message: str) -> str:
    """Suggest one of our classes for a misspelled class name."""
    unknown = _UNKNOWN_CLASS.search(message)
    ours = [name for package in (callbacks, datamodules, dg_lightning) for name in package.__all__]
    near = get_close_matches(unknown[1], ours, n=1) if unknown else []
    if not near:
        return message
    return message[: unknown.end()] + f"did you mean {near[0]}?"  # type: ignore[union-attr]


def is_user_error(error: Exception) -> bool:
    """Return True if the error is a message for the user rather than a bug."""
    if isinstance(error, (OSError, ImportError, MisconfigurationException)):
        return True
    if str(error).startswith(_STATE_DICT_MISMATCH):
        return True
    origin = traceback.extract_tb(error.__traceback__)[-1].filename
    is_sentence = isinstance(error, KeyError) and " " in str(error)
    has_message = isinstance(error, _MESSAGE_TYPES) or is_sentence
    return has_message and any(Path(origin).is_relative_to(package) for package in _PACKAGE_FOLDERS)


def involves_user_code(error: Exception) -> bool:
    """Return True if the traceback passes through code that is neither ours nor installed."""
    installed = [Path(path) for path in set(sysconfig.get_paths().values())]
    frames = traceback.extract_tb(error.__traceback__)
    files = [Path(frame.filename) for frame in frames if not frame.filename.startswith("<")]
    known = [*_PACKAGE_FOLDERS, *installed]
    return any(not any(file.is_relative_to(folder) for folder in known) for file in files)


def describe_unexpected(error: Exception) -> str:
    """Describe an unexpected error and where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'} (raised in "
        f"{Path(frame.filename).name}, line {frame.lineno}); DG_TRACEBACK=1 shows the traceback."
    )


def one_line(message: str) -> str:
    """Shorten the parser's report on nested types to the key and the reason."""
    if "Problems parsing config" in message:
        return " ".join(message.split())
    if message.startswith(_STATE_DICT_MISMATCH):
        first = " ".join(message.split("\n\t", 2)[1].split())[:200]
        return f"The checkpoint's weights do not fit the net: {first}"
    keys = dict.fromkeys(re.findall(r'Parser key "([^"]+)"', message))
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    reasons = [line for line in lines if line and not _BOILERPLATE.match(line)]
    if not reasons:  # a single-line report
        return message.strip()
    reason = _join_expectations(reasons) or reasons[0]
    for pattern, replacement in _REWORDINGS:
        reason = re.sub(pattern, replacement, reason)
    return ": ".join([".".join(keys), reason] if keys else [reason])


def _join_expectations(reasons: list[str]) -> str | None:
    """Join the messages for the members of a union type: expected A or B, got C."""
    pattern = r"Expected a (<class '[\w.]+'>|typing\.Literal\[.*?\])(?:\. Got value: (.*))?$"
    matches = [re.match(pattern, reason) for reason in reasons]
    found = [match for match in matches if match is not None]
    if not found or len(found) < len(matches):
        return None
    kinds = [
        re.sub(r"<class '(?:\w+\.)*(\w+)'>|typing\.Literal\[(.*)\]", r"\1\2", m[1]) for m in found
    ]
    got = next((match[2] for match in found if match[2]), None)
    return f"expected {' or '.join(dict.fromkeys(kinds))}" + (f", got {got}." if got else ".")
