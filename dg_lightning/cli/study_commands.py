"""The commands `study` and `search`, which run many trainings."""

import sys

from dg_lightning.cli.errors import OneLineErrorParser, refusal
from dg_lightning.configs import resolve_config_paths

__all__ = ["STUDY_COMMANDS", "run_study_command"]

_DESCRIPTIONS = {
    "study": "Train and test variants x seeds of a dataset, and compare them in one table.",
    "search": "Search settings that are accurate and cheap, by validation alone.",
}
STUDY_COMMANDS = tuple(_DESCRIPTIONS)


def run_study_command(args: list[str]) -> None:
    """Run `study` or `search` with the arguments after that word."""
    command, *rest = args
    try:
        import optuna  # noqa: F401
    except ModuleNotFoundError as error:
        raise refusal(f"`{command}` needs Optuna: pip install optuna.", error) from error
    from dg_lightning.cli.program import run_command
    from dg_lightning.study import Search, Study, run_search, run_study

    kind = Study if command == "study" else Search
    parser = OneLineErrorParser(prog=f"dg-lightning {command}", description=_DESCRIPTIONS[command])
    parser.add_argument("--config", action="config", help="One that ships, or a file.")
    parser.add_class_arguments(kind)
    given = parser.parse_args(resolve_config_paths(rest))
    given.pop("config")
    settings = kind(**parser.instantiate(given).as_dict())
    if isinstance(settings, Search):
        succeeded = run_search(settings, run_command)
    else:
        succeeded = run_study(settings, run_command)
    if not succeeded:
        sys.exit(1)
