"""Results published by the paper and its scripts, and how its tables count MACs."""

from importlib.resources import files
from typing import Any

import yaml

from dg_lightning.compute.report import ComputeReport, LayerCompute

__all__ = ["published", "relative_macs_by_rule"]

# Which rate a table uses, and whether closed outputs save MACs as well as closed inputs.
_RULES = {"fan_in": ("g", False), "both": ("g", True), "fan_in_p": ("p", False)}


def published(dataset: str) -> dict[str, Any]:
    """Return the published table of a dataset: `table`, `rule` and `rows` by variant.

    >>> published("mnist")["rows"]["dynamicgate"]["accuracy"]
    0.9807
    """
    text = files("dg_lightning.study").joinpath("published.yaml").read_text(encoding="utf-8")
    unknown: dict[str, Any] = {"table": "not in the paper", "rule": None, "rows": {}}
    entry: dict[str, Any] = yaml.safe_load(text).get(dataset, unknown)
    return entry


def relative_macs_by_rule(report: ComputeReport, rule: str) -> float:
    """Return the MACs of a net relative to dense, as counted by a published table.

    As in all of these tables, mean rates are multiplied and gate decisions are free.
    """
    kind, outputs_count = _RULES[rule]
    used, rate_in = 0.0, 1.0
    for layer in report.layers:
        rate = _rate(layer, kind)
        if not layer.is_map:  # an input gate
            rate_in = rate
            continue
        used += layer.macs_dense * layer.density * rate_in * (rate if outputs_count else 1.0)
        rate_in = rate
    return used / report.macs_dense if report.macs_dense else 1.0


def _rate(layer: LayerCompute, kind: str) -> float:
    rate = layer.open_rate_g if kind == "g" else layer.open_rate_p
    return 1.0 if rate is None else rate
