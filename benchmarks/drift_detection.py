"""How well gates tell of drift, against what is usually looked at.

    dg-lightning fit --config mnist/dynamicgate_input
    python benchmarks/drift_detection.py CHECKPOINT

Windows of 20 samples, clean and damaged: how often is the score of a damaged one higher (AUROC)?
Scores are those of `DriftDetector` on the gates; the mean of 1 minus the largest softmax
probability; and the largest Kolmogorov-Smirnov statistic of a window against the validation part,
over softmax probabilities and over the features that the last layer reads. `alarms` is the share of
clean windows of which `DriftDetector` says that they have drifted.
"""

import argparse
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

from dg_lightning import GatedClassifier
from dg_lightning.cli.trained import load_data
from dg_lightning.continual.drift import DriftDetector
from dg_lightning.datamodules import TaskSequence

DRIFTS: Any = ("noise", "blur", "contrast", "occlusion")
STRENGTHS = 5  # the first is clean


class Watched:
    """A trained model, with what detectors look at.

    Args:
        model: The model.
        reference: Inputs of the validation part.
    """

    def __init__(self, model: GatedClassifier, reference: Tensor) -> None:
        self.model = model.eval()
        self.features = torch.empty(0)
        last = [m for m in model.modules() if isinstance(m, torch.nn.Linear)][-1]
        last.register_forward_pre_hook(self._keep)
        self.detector = DriftDetector(model)
        self.detector.learn(reference.split(1000))
        self.reference = {name: seen.sort(0).values for name, seen in self._look(reference).items()}
        self.alarms: list[bool] = []

    def _keep(self, module: Any, args: Any) -> None:
        self.features = args[0].detach()

    @torch.no_grad()
    def _look(self, x: Tensor) -> dict[str, Tensor]:
        return {"softmax": self.model(x).softmax(-1), "features": self.features}

    def scores(self, x: Tensor) -> dict[str, float]:
        """Return the scores of a window."""
        report = self.detector.compare([x])
        self.alarms.append(report.has_drifted)
        seen = self._look(x)
        scores = {
            "gates": max(report.by_layer.values()),
            "1 - largest": float(1 - seen["softmax"].amax(-1).mean()),
        }
        for name, reference in self.reference.items():
            scores[f"KS, {name}"] = largest_distance(seen[name], reference)
        return scores


def largest_distance(window: Tensor, reference: Tensor) -> float:
    """Return the largest distance of two distribution functions, over all columns.

    Args:
        window: Some rows.
        reference: Many rows, each column sorted.
    """
    values = window.sort(0).values.T.contiguous()
    columns = reference.T.contiguous()
    size = values.shape[1]
    below = torch.searchsorted(columns, values) / len(reference)
    until = torch.searchsorted(columns, values, right=True) / len(reference)
    steps = torch.arange(size + 1) / size
    return float(torch.maximum(steps[1:] - until, below - steps[:-1]).max())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ckpt_path")
    parser.add_argument("--size", type=int, default=20)
    parser.add_argument("--windows", type=int, default=200)
    given = parser.parse_args()
    model = GatedClassifier.load_from_checkpoint(given.ckpt_path, map_location="cpu")
    data: Any = load_data(given.ckpt_path, None, needed_by="this benchmark")
    data.setup("fit")
    watched = Watched(model, torch.cat([x for x, _ in data.val_dataloader()]))
    generator = torch.Generator().manual_seed(0)
    table = Table(title=f"AUROC, windows of {given.size} samples")
    for column in ("drift", "strength", "accuracy", "gates", "1 - largest"):
        table.add_column(column, justify="right")
    for name in watched.reference:
        table.add_column(f"KS, {name}", justify="right")
    alarms: list[bool] = []
    for drift in DRIFTS:
        tasks = TaskSequence(data, "drift", STRENGTHS, drift=drift, course="gradual")
        tasks.setup("test")
        samples: list[list[Any]] = [[] for _ in range(STRENGTHS)]
        for index, batch in enumerate(tasks.test_dataloader()):
            samples[tasks.task_of("test", index)].append(batch)
        found: list[dict[str, Tensor]] = []
        for strength, batches in enumerate(samples):
            x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
            watched.alarms = []
            drawn = torch.randint(len(x), (given.windows, given.size), generator=generator)
            each = [watched.scores(x[rows]) for rows in drawn]
            found.append({key: torch.tensor([s[key] for s in each]) for key in each[0]})
            if strength == 0:
                alarms += watched.alarms
                continue
            truth = torch.arange(2).repeat_interleave(given.windows)
            cells = []
            for key, values in found[strength].items():
                both = torch.cat([found[0][key], values])
                area = binary_auroc(both.argsort().argsort() / len(both), truth)  # ranks
                cells.append(f"{float(area):.2f}")
            with torch.no_grad():
                accuracy = float((model(x).argmax(-1) == y).float().mean())
            share = f"{strength / (STRENGTHS - 1):.2f}"
            table.add_row(drift, share, f"{accuracy:.3f}", *cells)
    Console(width=100).print(table)
    print(f"alarms: {sum(alarms) / len(alarms):.3f} of {len(alarms)} clean windows")


if __name__ == "__main__":
    main()
