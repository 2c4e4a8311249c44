"""The commands `report`, `genes` and `wandb-workspace`: look at what came out."""

import sys
from pathlib import Path

from dg_lightning.cli.errors import OneLineErrorParser, refusal
from dg_lightning.cli.runs import add_config_option, newest_run
from dg_lightning.files import write_text

__all__ = ["VIEWS", "show"]

VIEWS = ("report", "genes", "wandb-workspace")


def show(args: list[str]) -> None:
    """Run one of the commands with the arguments behind that word."""
    command, *rest = args
    if command == "report":
        _report(rest)
    elif command == "genes":
        from dg_lightning.cli.genes import run_genes

        run_genes(rest)
    else:
        _workspace(rest)


def _report(args: list[str]) -> None:
    from dg_lightning.report import write_report

    parser = OneLineErrorParser(
        prog="dg-lightning report",
        description="Write the page of a study or of a run: one file that opens from the disk.",
    )
    parser.add_argument("folder", type=str, nargs="?", help="Folder of a study, or of a run.")
    add_config_option(parser)
    parser.add_argument("--output", type=str, help="The file; report.html in that folder if None.")
    given = parser.parse_args(args)
    if (given.folder is None) == (given.config is None):
        raise refusal("Give either a folder, or --config for the newest run of a config.")
    folder = given.folder or Path(newest_run(given.config)).parents[1]
    path = write_report(Path(folder), None if given.output is None else Path(given.output))
    print(f"The report is {path}.")


def _workspace(args: list[str]) -> None:
    parser = OneLineErrorParser(
        prog="dg-lightning wandb-workspace",
        description="Save a workspace in W&B: open rates, heat maps, accuracy against MACs.",
    )
    parser.add_argument("--entity", type=str, required=True, help="User or team.")
    parser.add_argument("--project", type=str, default="dg-lightning", help="Project.")
    parser.add_argument(
        "--output",
        type=str,
        default="wandb_workspace.json",
        help="Where its specification goes if no server can be reached.",
    )
    given = parser.parse_args(args)
    try:
        import wandb
        import wandb_workspaces  # noqa: F401
    except ModuleNotFoundError as error:
        raise refusal(
            "`wandb-workspace` needs W&B: pip install wandb wandb-workspaces.", error
        ) from error
    from dg_lightning.dashboards.workspace import gate_workspace, reachable_server, specification

    workspace = gate_workspace(given.entity, given.project)
    address, answers = reachable_server()
    reason = "could not be reached"
    if answers:
        try:
            workspace.save()
        except (wandb.Error, ValueError, OSError) as error:
            reason = f"would not take it ({' '.join(str(error).split())})"
        else:
            print(f"The workspace is {workspace.url}.")
            return
    path = Path(given.output)
    write_text(path, specification(workspace))
    sys.stderr.write(
        f"{address} {reason}: the specification of the workspace is in {path}. To save it, run "
        "`wandb login` and this command again where the server can be reached.\n"
    )
