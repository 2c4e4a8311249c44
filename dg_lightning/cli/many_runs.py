"""The commands `study` and `search`, which train many times."""

import sys

from dg_lightning.cli.configs import with_config_paths
from dg_lightning.cli.errors import OneLineErrorParser, refusal

__all__ = ["MANY_RUNS", "run_many"]

_JOBS = {
    "study": "Train and test variants x seeds of a dataset, and compare them in one table.",
    "search": "Search settings that are accurate and cheap, by validation alone.",
}
MANY_RUNS = tuple(_JOBS)


def run_many(args: list[str]) -> None:
    """Run `study` or `search` with the arguments behind that word."""
    command, *rest = args
    try:
        import optuna  # noqa: F401
    except ModuleNotFoundError as error:
        raise refusal(f"`{command}` needs Optuna: pip install optuna.", error) from error
    from dg_lightning.study import Search, Study, run_search, run_study

    kind = Study if command == "study" else Search
    parser = OneLineErrorParser(prog=f"dg-lightning {command}", description=_JOBS[command])
    parser.add_argument("--config", action="config", help="One that ships, or a file.")
    parser.add_class_arguments(kind)
    given = parser.parse_args(with_config_paths(rest))
    given.pop("config")
    settings = kind(**parser.instantiate(given).as_dict())
    all_well = run_search(settings) if isinstance(settings, Search) else run_study(settings)
    if not all_well:
        sys.exit(1)
