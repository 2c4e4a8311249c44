"""Draw the figures of the documentation.

python results/pictures.py                 # accuracy against MACs, and curves, from results/*.csv
python results/pictures.py markers RUN     # marker genes, from a run of pbmc3k/dynamicgate
python results/pictures.py dashboard DIR   # what W&B shows of a study, from the keys that it logged
"""

import statistics
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from studies import CURVE_DATASETS, CURVES, Study

DOCS = Path(__file__).parents[1] / "docs"
DATASETS = {
    "MNIST": "mnist",
    "Fashion-MNIST": "fashion_mnist",
    "CIFAR-10": "cifar10",
    "Tiny ImageNet": "tiny_imagenet",
    "Speech Commands": "speech_commands",
    "PBMC3k": "pbmc3k",
    "text, a Transformer": "text",
}
STYLES = {  # marker and colour
    "dense": ("s", "0.3"),
    "dense, narrow": ("s", "0.7"),
    "static gates": ("o", "C0"),
    "gates by input": ("D", "C2"),
    "gates by input, 4 times as wide": ("D", "C8"),
    "gates and RigL": ("^", "C3"),
    "RigL alone": ("v", "C1"),
    "experts": ("P", "C4"),
    "pruning": ("X", "C5"),
}
VARIANTS = {  # label -> variant
    "dense": "baseline",
    "static gates": "dynamicgate",
    "gates by input": "dynamicgate_input",
    "gates and RigL": "dynamicgate_rigl",
    "RigL alone": "rigl",
}
VARIANTS_OF_TEXT = {
    "dense": "baseline",
    "dense, narrow": "narrow",
    "static gates": "dynamicgate_static",
    "gates by input": "dynamicgate",
    "gates by input, 4 times as wide": "dynamicgate_wide",
    "experts": "switch_moe",
}
MARKERS = 3  # genes per cell type
DASHBOARD = {  # title -> logged key, or its beginning
    "Validation accuracy": "val/accuracy",
    "MACs relative to dense": "compute/macs_share",
    "Open, hidden layer 1": "gates/open_rate/net.hidden.0.gate",
    "Open, hidden layer 2": "gates/open_rate/net.hidden.1.gate",
    "Weight of the penalty": "gates/penalty_weight",
    "Positions explored": "rewiring/explored/net.hidden.0.linear",
}


def accuracy_against_macs() -> None:
    """Draw test accuracy against executed MACs, ± standard deviation, one panel per dataset."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    *panels, last = figure.subplots(2, 4).flat
    handles: dict[str, Any] = {}
    for axes, (title, name) in zip(panels, DATASETS.items(), strict=True):
        study = Study(name)
        (dense,) = set(study.values("baseline", "macs_dense"))
        variants = VARIANTS_OF_TEXT if name == "text" else VARIANTS
        for label, variant in variants.items():
            marker, color = STYLES[label]
            shares = [100 * macs / dense for macs in study.values(variant, "macs")]
            accuracies = [100 * value for value in study.values(variant, "accuracy")]
            x, y = statistics.fmean(shares), statistics.fmean(accuracies)
            spread = statistics.stdev(accuracies)
            handles[label] = axes.errorbar(x, y, spread, fmt=marker, color=color, capsize=2)
        axes.set_title(title, fontsize=10)
        axes.set_xscale("log")
        ticks = [2, 5, 10, 25, 50, 100]
        axes.set_xticks(ticks, [f"{tick} %" for tick in ticks], fontsize=8)
        axes.minorticks_off()
        axes.set_xlim(1.5, 140)
        axes.tick_params(axis="y", labelsize=8)
        axes.grid(alpha=0.3)
    last.axis("off")
    last.legend(list(handles.values()), list(handles), loc="center", fontsize=9)
    figure.supxlabel("executed MACs, of the dense net's", fontsize=9)
    figure.supylabel("test accuracy, %; five seeds, text three", fontsize=9)
    figure.savefig(DOCS / "accuracy_macs.png", dpi=130)


def curves() -> None:
    """Draw accuracy against MACs at six budgets, and join the points that no other dominates."""
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    shares = (5, 10, 20, 30, 50, 75)
    for axes, (title, dataset) in zip(
        figure.subplots(2, 2).flat, CURVE_DATASETS.items(), strict=True
    ):
        study = Study("curves", dataset)
        (dense,) = set(study.values("baseline", "macs_dense"))
        points = []
        for label, method in {"dense": "baseline", **CURVES}.items():
            marker, color = STYLES[label]
            at = (100,) if method == "baseline" else shares
            names = [method] if method == "baseline" else [f"{method}_{share}" for share in shares]
            x = [100 * statistics.fmean(study.values(name, "macs")) / dense for name in names]
            scores = [[100 * value for value in study.values(name, "accuracy")] for name in names]
            y = [statistics.fmean(values) for values in scores]
            spread = [statistics.stdev(values) for values in scores]
            form: dict[str, Any] = {"fmt": f"{marker}-", "color": color, "lw": 0.8, "ms": 5}
            axes.errorbar(x, y, spread, capsize=2, label=label, **form)
            points += list(zip(at, y, x, strict=True))
        # At equal budgets only the best counts, and it must beat all smaller budgets.
        best = [p for p in sorted(points) if all(p[1] > q[1] for q in points if q[0] < p[0])]
        best = [p for p in best if all(p[1] >= q[1] for q in best if q[0] == p[0])]
        axes.plot([p[2] for p in best], [p[1] for p in best], color="0.75", lw=5, zorder=0)
        axes.set_title(title, fontsize=10)
        axes.set_xscale("log")
        axes.set_xticks([*shares, 100], [f"{tick} %" for tick in (*shares, 100)], fontsize=8)
        axes.minorticks_off()
        axes.tick_params(axis="y", labelsize=8)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    figure.supxlabel("executed MACs, of the dense net's", fontsize=9)
    figure.supylabel("test accuracy, %; three seeds", fontsize=9)
    figure.savefig(DOCS / "curves.png", dpi=130)


def marker_genes(run: Path) -> None:
    """Draw the genes with the most evidence for each cell type: weight times mean value."""
    import anndata
    import pandas as pd
    import scanpy as sc

    from dg_lightning.cli.runs import load_data

    data: Any = load_data(str(next(run.rglob("last.ckpt"))), None, needed_by="markers")
    part = data.part_to_predict()
    inputs, labels = part.__getitems__(range(len(part)))
    known = (labels >= 0).numpy()
    cells = anndata.AnnData(inputs.numpy()[known], var=pd.DataFrame(index=data.feature_names))
    names = [data.class_names[label] for label in labels[known].tolist()]
    cells.obs["cell type"] = pd.Categorical(names, data.class_names)
    means = cells.to_df().groupby(cells.obs["cell type"], observed=True).mean()
    weights = pd.read_csv(run / "genes.csv").pivot(
        index="cell_type", columns="gene", values="weight"
    )
    said = weights * means.loc[weights.index, weights.columns]
    chosen = {name: list(said.loc[name].nlargest(MARKERS).index) for name in data.class_names}
    plot = sc.pl.dotplot(
        cells, chosen, "cell type", standard_scale="var", return_fig=True, show=False
    )
    plot.savefig(DOCS / "markers.png", dpi=110, bbox_inches="tight")


def dashboard(study: Path) -> None:
    """Draw logged values against steps: for each variant, the mean and spread over seeds."""
    import pandas as pd

    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = figure.subplots(2, 3).flat
    for color, variant in enumerate(sorted(path.name for path in (study / "runs").iterdir())):
        files = sorted((study / "runs" / variant).glob("seed_*/metrics.csv"))
        rows = pd.concat([pd.read_csv(file) for file in files])
        for axes, (title, key) in zip(panels, DASHBOARD.items(), strict=True):
            axes.set_title(title, fontsize=10)
            axes.grid(alpha=0.3)
            if key not in rows:
                continue
            by_step = rows.dropna(subset=key).groupby("step")[key]
            mean, spread = by_step.mean(), by_step.std()
            axes.plot(mean.index, mean, color=f"C{color}", label=variant)
            axes.fill_between(
                mean.index, mean - spread, mean + spread, color=f"C{color}", alpha=0.2
            )
            axes.set_xlabel("optimizer step", fontsize=8)
        panels = figure.axes
    figure.axes[0].legend(fontsize=8)
    figure.savefig(DOCS / "dashboard.png", dpi=110)


if __name__ == "__main__":
    if sys.argv[1:2] == ["markers"]:
        marker_genes(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["dashboard"]:
        dashboard(Path(sys.argv[2]))
    else:
        accuracy_against_macs()
        curves()
