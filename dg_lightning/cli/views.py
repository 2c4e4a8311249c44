"""The commands `report`, `genes`, `features` and `wandb-workspace`, which present results."""

import sys
from pathlib import Path

from dg_lightning.cli.errors import OneLineErrorParser, refusal
from dg_lightning.cli.runs import add_config_option, newest_run
from dg_lightning.files import write_text

__all__ = ["VIEW_COMMANDS", "run_view_command"]

VIEW_COMMANDS = ("report", "genes", "features", "wandb-workspace")


def run_view_command(args: list[str]) -> None:
    """Run one of these commands with the arguments after its name."""
    command, *rest = args
    if command == "report":
        _report(rest)
    elif command == "genes":
        from dg_lightning.cli.genes import run_genes

        run_genes(rest)
    elif command == "features":
        from dg_lightning.cli.features import run_features

        run_features(rest)
    else:
        _workspace(rest)


def _report(args: list[str]) -> None:
    from dg_lightning.study.report import write_report

    parser = OneLineErrorParser(
        prog="dg-lightning report",
        description="Write the HTML report of a study or of a run as a single file.",
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
    from dg_lightning.monitoring.workspace import gate_workspace, reachable_server, specification

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
