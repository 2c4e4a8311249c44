"""W&B workspace with accuracy against MACs, open rates, heat maps, schedules and collapse."""

import json
import urllib.error
import urllib.request
from typing import Any

_OVER_SEEDS: dict[str, Any] = {"groupby_aggfunc": "mean", "groupby_rangefunc": "stddev"}


def gate_workspace(entity: str, project: str, by_variant: bool = False) -> Any:
    """Return a project's workspace as a `wandb_workspaces` object.

    Args:
        entity: User or team.
        project: Name of the project.
        by_variant: Whether to draw the mean and standard deviation of the runs of each group, which
            are the seeds of a study's variant, instead of each run.
    """
    import wandb_workspaces.expr as expr
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    def line(title: str, *keys: str, **options: Any) -> Any:
        return wr.LinePlot(title=title, y=list(keys), **_OVER_SEEDS, **options)

    def matching(title: str, pattern: str, **options: Any) -> Any:
        return wr.LinePlot(title=title, metric_regex=pattern, **_OVER_SEEDS, **options)

    share: Any = (0.0, 1.0)
    sections = {
        "Accuracy against compute": [
            wr.ScatterPlot(
                title="Validation accuracy against MACs relative to dense, one point per run",
                x=wr.SummaryMetric("compute/macs_share"),
                y=wr.SummaryMetric("val/accuracy.last"),
            ),
            line("Validation accuracy", "val/accuracy"),
            line("Executed MACs relative to dense", "compute/macs_share", range_y=share),
            line("Loss", "train/loss", "val/loss"),
        ],
        "Open rates by layer": [
            matching("Open (hard gates)", "gates/open_rate/.*", range_y=share),
            matching("Probability", "gates/mean_probability/.*", range_y=share),
            matching("Churn between snapshots", "gates/churn/.*"),
            line("Open, all gates", "gates/open_rate", range_y=share),
            line("Correlation between hardness and activity", "gates/hardness_correlation"),
        ],
        "Heat maps": [
            wr.MediaBrowser(
                title="Units of each gate over time, by class, and p",
                media_keys=["gates/pictures"],
                num_columns=1,
            )
        ],
        "Schedules": [
            matching("Temperature", "gates/temperature.*"),
            matching("Threshold", "gates/threshold.*"),
            matching("Penalty weight", "gates/penalty_weight.*"),
            line("Budget", "gates/budget_used", "gates/budget_allowed"),
        ],
        "Connections": [
            matching("Density", "rewiring/density/.*", range_y=share),
            matching("Share added by the last update", "rewiring/churn/.*"),
            matching("Positions that have ever had a connection", "rewiring/explored/.*"),
            matching("Inputs and outputs without a connection", "rewiring/dead_.*"),
        ],
        "Experts": [
            matching("Entropy of expert usage", "routing/entropy/.*"),
            matching("Mutual information of expert and class", "routing/mutual_information/.*"),
            matching("Dropped choices", "routing/dropped/.*"),
        ],
        "Tasks": [
            matching("Accuracy on each task", "tasks/accuracy/.*", range_y=share),
            line("Average accuracy", "tasks/average_accuracy", range_y=share),
            line("Forgetting", "tasks/forgetting"),
            line("Units and weights in use", "tasks/units_used", "tasks/weights_protected"),
        ],
        "Collapse": [
            matching("Failing gates by mode", "collapse/.*"),
            wr.WeavePanelSummaryTable(table_name="collapse/verdicts"),
            wr.WeavePanelSummaryTable(table_name="gates/layers"),
        ],
    }
    return ws.Workspace(
        name="Gates by variant" if by_variant else "Gates",
        entity=entity,
        project=project,
        sections=[ws.Section(name=n, panels=p, is_open=True) for n, p in sections.items()],
        settings=ws.WorkspaceSettings(x_axis="trainer/global_step"),
        runset_settings=ws.RunsetSettings(groupby=[expr.Metric("Group")] if by_variant else []),
    )


def specification(workspace: Any) -> str:
    """Return the JSON that would be saved on the server."""
    view = workspace._to_model()
    view_json = {
        "entity": view.entity,
        "project": view.project,
        "display_name": view.display_name,
        "type": "project-view",
        "spec": view.spec.model_dump(mode="json", by_alias=True, exclude_none=True),
    }
    return json.dumps(view_json, indent=2) + "\n"


def reachable_server(timeout: float = 5.0) -> tuple[str, bool]:
    """Return the address of the W&B server, and whether it responds."""
    import wandb

    address: str = wandb.setup().settings.base_url
    try:
        urllib.request.urlopen(address, timeout=timeout)
    except urllib.error.HTTPError:
        return address, True  # an error page is a response too
    except (OSError, ValueError):
        return address, False
    return address, True
