"""Entry point: handles requests that do not need torch, and delegates the rest."""

import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

import dg_lightning
from dg_lightning.cli_error import cli_error
from dg_lightning.configs import config_path, config_summary, option_values, shipped_configs

COMMANDS = {
    "fit": "Train a model.",
    "validate": "Evaluate a checkpoint on the validation split.",
    "test": "Evaluate a checkpoint on the test split.",
    "predict": "Write a checkpoint's predictions to predictions.csv.",
    "plan": "Plot a config's schedules without training.",
    "check": "Run a few training steps and report problems, without saving anything.",
    "study": "Train and test variants over several seeds, and compare them in one table.",
    "search": "Search for accurate and cheap settings, using validation data only.",
    "report": "Write an HTML report on a run or a study.",
    "features": "List the columns or genes that a trained net uses, with their importance.",
    "export": "Write a trained net as a small file that runs without dg-lightning.",
    "convert": "Add per-token gates to a trained dense Transformer.",
    "configs": "List the shipped configs.",
}
# Words that other programs use for our commands.
_SYNONYMS = {"train": "fit", "evaluate": "test", "eval": "test", "infer": "predict"}
_NEEDS_RUN = ("report", "features", "export", "convert")
_OF_A_RUN = ("validate", "test", "predict", "report", "features", "export", "convert")
# Options of the commands that train or evaluate: the part before the first dot.
_TRAINING = ("fit", "validate", "test", "predict", "plan", "check")
_OPTIONS = (
    "--config", "--print_config", "--seed_everything", "--trainer", "--model", "--data",
    "--optimizer", "--lr_scheduler", "--ckpt_path", "--weights_only", "--verbose",
    "--return_predictions", "--output", "--ranks", "--json",
)  # fmt: skip
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main(args: Sequence[str] | None = None) -> None:
    """Run the program with the given arguments, by default those from the command line."""
    given = list(sys.argv[1:] if args is None else args)
    try:
        if _answer_without_torch(given):
            return
        # Imported here because it imports torch, which takes seconds.
        from dg_lightning.cli.commands import run

        run(given)
    except SystemExit as stop:
        # Lightning exits with a different status when training is interrupted.
        if isinstance(stop.__context__, KeyboardInterrupt):
            hint = "; `fit --ckpt_path last` resumes from here" if given[0] == "fit" else ""
            sys.stderr.write(f"dg-lightning: interrupted{hint}.\n")
            raise SystemExit(_INTERRUPTED) from None
        raise
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:  # a given file cannot be read
        raise cli_error(f"{error}.", error) from error
    except KeyboardInterrupt:  # outside training, where Lightning handles it
        sys.stderr.write("dg-lightning: interrupted.\n")
        raise SystemExit(_INTERRUPTED) from None


def _answer_without_torch(given: list[str]) -> bool:
    """Handle requests that do not need torch. Return True if nothing is left to do."""
    words = [word for word in given if word != "--quiet"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return True
    command, *rest = words
    if command == "--version":
        print(f"dg-lightning {dg_lightning.__version__}")
        return True
    if command not in COMMANDS:
        near = get_close_matches(command, [*COMMANDS, *_SYNONYMS], n=1)
        meant = _SYNONYMS.get(near[0], near[0]) if near else ""
        hint = f"did you mean {meant}?" if near else f"choose from {', '.join(COMMANDS)}."
        raise cli_error(f"Unknown command {command!r}; {hint}")
    if "-h" in rest or "--help" in rest:
        return False
    if command == "configs":
        _list_configs(rest)
        return True
    _check_files(command, rest)
    return False


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "usage: dg-lightning COMMAND [options]",
            "",
            "Train and use networks that decide which of their units to run.",
            "",
            *lines,
            "",
            "`dg-lightning COMMAND --help` lists the options of a command. With --quiet, a command",
            "prints warnings and errors only. `dg-lightning --version` prints the version.",
        ]
    )


def _list_configs(rest: list[str]) -> None:
    """Print the shipped configs whose names begin with the given prefix, by default all."""
    if len(rest) > 1:
        raise cli_error(f"`configs` takes at most one name, got {' '.join(rest)}.")
    shipped = shipped_configs()
    found = [name for name in shipped if not rest or name.startswith(rest[0])]
    if not found:
        groups = dict.fromkeys(name.partition("/")[0] for name in shipped)
        raise cli_error(f"No config begins with {rest[0]!r}; the groups are {', '.join(groups)}.")
    width = max(map(len, found))
    for name in found:
        print(f"{name:<{width}}  {config_summary(name)}")


def _check_files(command: str, rest: list[str]) -> None:
    """Check that files named on the command line exist, before torch is imported."""
    if command in ("fit", "plan", "check") and not rest:
        raise cli_error(
            f"`{command}` needs a config, such as `dg-lightning {command} --config "
            "digits/dynamicgate`; `dg-lightning configs` lists the shipped ones."
        )
    if command in _NEEDS_RUN and not rest:
        raise cli_error(
            "Name one run: pass its folder, --config (for the newest run with it) or --ckpt_path."
        )
    for word in rest if command in _TRAINING else ():
        name = re.split(r"[.=+]", word, maxsplit=1)[0]
        # The parser accepts the beginning of a name, too.
        if name.startswith("--") and not any(option.startswith(name) for option in _OPTIONS):
            near = get_close_matches(name, _OPTIONS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"`{command} --help` lists all."
            raise cli_error(f"Unknown option {name}; {hint}")
    for name in option_values(rest, "--config", "-c"):
        config_path(name)
    for path in option_values(rest, "--ckpt_path"):
        if path not in ("last", "null") and "://" not in path and not Path(path).exists():
            raise cli_error(f"No checkpoint found at {path!r}: pass its path with --ckpt_path.")
    for path in option_values(rest, "--data.path", "--data.init_args.path"):
        roots = [Path(), Path(os.environ.get("DG_DATA") or "data")]
        if path != "null" and not any((root / path).exists() for root in roots):
            raise cli_error(f"No file or folder at {path!r}: pass its path with --data.path.")
    runs = [word for word in rest[:1] if not word.startswith("-")]
    if command in _OF_A_RUN and runs and not Path(runs[0]).exists():
        raise cli_error(f"No run found at {runs[0]!r}: pass a run folder or a checkpoint.")
