"""What a user did wrong, said in one line, with exit status 2."""

import re
import sysconfig
import traceback
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse
import lightning
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

import dg_lightning
from dg_lightning import callbacks, datamodules
from dg_lightning.cli.refusal import Refusal, refusal

__all__ = [
    "OneLineErrorParser",
    "Refusal",
    "is_users_error",
    "one_line",
    "passes_own_code",
    "refusal",
    "unexpected",
]

# Packages that raise an error of these types on purpose, with a message for the user.
_PACKAGES = (dg_lightning, callbacks, datamodules, lightning, jsonargparse)
_SPEAKING = [Path(package.__path__[0]) for package in _PACKAGES]
_SPOKEN = (ValueError, TypeError, RuntimeError)
_MISFIT = "Error(s) in loading state_dict"

# Lines of the parser's report on nested types that only lead to what is wrong.
_FRAME = re.compile(
    r"Parser key|Does not validate against|Subtypes:|Errors:|Given value|Problem with given"
    r"|Expected a <class 'NoneType'>|Expected a path but"
)
_REWORDINGS = (
    (r"Type <class '[^']*'> expects a function or a callable class: ", ""),
    (r"\.? Got value: (?:\[?Namespace|\{).*", "."),
    (
        r"Expected a dot import path string: (\S+?)(?:\. Got value.*)?$",
        r"There is no class \1; give its full path, as package.module.Class.",
    ),
)


class OneLineErrorParser(LightningArgumentParser):
    """Says what is wrong in one line, without the usage of a hundred options before it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # An abbreviated option is more often a misspelt one.
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise refusal(one_line(message), ex)


def is_users_error(error: Exception) -> bool:
    """Tell an error that was raised for the user to read from one that a bug has caused."""
    if isinstance(error, (OSError, ImportError, MisconfigurationException)):
        return True
    if str(error).startswith(_MISFIT):
        return True
    place = traceback.extract_tb(error.__traceback__)[-1].filename
    is_sentence = isinstance(error, KeyError) and " " in str(error)
    speaks = isinstance(error, _SPOKEN) or is_sentence
    return speaks and any(Path(place).is_relative_to(package) for package in _SPEAKING)


def passes_own_code(error: Exception) -> bool:
    """Return True if code that is neither ours nor installed took part in an error."""
    installed = [Path(path) for path in set(sysconfig.get_paths().values())]
    frames = traceback.extract_tb(error.__traceback__)
    files = [Path(frame.filename) for frame in frames if not frame.filename.startswith("<")]
    known = [*_SPEAKING, *installed]
    return any(not any(file.is_relative_to(place) for place in known) for file in files)


def unexpected(error: Exception) -> str:
    """Describe an error that nobody has foreseen."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'} (raised in "
        f"{Path(frame.filename).name}, line {frame.lineno}); DG_TRACEBACK=1 shows the traceback."
    )


def one_line(message: str) -> str:
    """Press the parser's report on nested types into the key and what is wrong with it."""
    if "Problems parsing config" in message:
        return " ".join(message.split())
    if message.startswith(_MISFIT):
        first = " ".join(message.split("\n\t", 2)[1].split())[:200]
        return f"The weights of the checkpoint do not fit the net: {first}"
    keys = dict.fromkeys(re.findall(r'Parser key "([^"]+)"', message))
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    reasons = [line for line in lines if line and not _FRAME.match(line)]
    if not reasons:  # the report is a single line
        return message.strip()
    reason = _expectation(reasons) or reasons[0]
    for pattern, replacement in _REWORDINGS:
        reason = re.sub(pattern, replacement, reason)
    return ": ".join([".".join(keys), reason] if keys else [reason])


def _expectation(reasons: list[str]) -> str | None:
    """Join the alternatives of a union: expected one of these, got that."""
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
