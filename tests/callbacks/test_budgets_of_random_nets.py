"""Budgets on test inputs, of random nets whose training inputs look different."""

import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from dg_lightning import GatedClassifier, gate_layers
from dg_lightning.callbacks import BudgetController, RigL
from dg_lightning.compute.macs import linear_maps

WIDTH, CLASSES = 48, 5


def drawn(seed: int) -> dict[str, Any]:
    """Draw a net, its gates, whether RigL moves its connections, and a budget that it can meet."""
    draw = random.Random(seed)
    hidden = [draw.choice([96, 128, 192, 256]) for _ in range(draw.choice([1, 1, 2, 3]))]

    def gate() -> dict[str, Any]:
        policy = draw.choice(["threshold"] * 3 + ["bernoulli", "soft", "concrete", "hard_concrete"])
        made: dict[str, Any] = {"policy": policy, "block_size": draw.choice([1, 1, 2, 4])}
        if policy in ("threshold", "bernoulli") and draw.random() < 0.3:
            made["scale"] = "probability"
        if draw.random() < 0.5:
            return {"kind": "static", **made}
        return {"kind": "dynamic", "network": "low_rank", "rank": 4, **made}

    net: dict[str, Any] = {
        "hidden": hidden,
        "gate": [gate() for _ in hidden],
        "dropout": draw.choice([0.0, 0.0, 0.3]),
        "norm": draw.choice([None, None, "batch"]),
        "input_gate": draw.choice([None, {"kind": "static"}]),
    }
    sparsity = draw.choice([None, None, 0.5, 0.75])
    density = 1.0 if sparsity is None else 1 - sparsity
    # Above what GateNets take, and ungated outputs.
    budget = draw.uniform(0.35, 0.7) * density + 0.1
    return {"net": net, "sparsity": sparsity, "budget": budget}


class Blobs(pl.LightningDataModule):
    """Classes around random centres; a part of every training input is blanked, as by a crop."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        centres = torch.randn(CLASSES, WIDTH, generator=generator)
        self.parts = {}
        for part, size in (("train", 2048), ("val", 2048), ("test", 4096)):
            labels = torch.randint(CLASSES, (size,), generator=generator)
            x = centres[labels] + 1.5 * torch.randn(size, WIDTH, generator=generator)
            self.parts[part] = TensorDataset(x, labels)

    def _blank(self, samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        x, labels = (torch.stack(column) for column in zip(*samples, strict=True))
        x[:, : int(torch.randint(1, 9, ()))] = -3.0
        return x, labels

    def train_dataloader(self) -> Any:
        return DataLoader(self.parts["train"], 128, shuffle=True, collate_fn=self._blank)

    def val_dataloader(self) -> Any:
        return DataLoader(self.parts["val"], 510)  # the last batch has 8 rows

    def test_dataloader(self) -> Any:
        return DataLoader(self.parts["test"], 512)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:BudgetController")  # in the first validation
@pytest.mark.parametrize("seed", range(24))
def test_a_test_uses_the_budget_within_2_percent(seed: int, tmp_path: Path) -> None:
    case = drawn(seed)
    pl.seed_everything(seed, verbose=False)
    spec: Any = {"class_path": "GatedMLP", "init_args": case["net"]}
    model = GatedClassifier(spec, [WIDTH], CLASSES, gate_lr_factor=30.0)
    controller = BudgetController(case["budget"], begin="5%", until="30%", freeze_at="40%")
    callbacks: list[Any] = [controller]
    if case["sparsity"] is not None:
        callbacks.append(RigL(case["sparsity"], every_n_steps=20, gate_aware="grow", until="50%"))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=12,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    data = Blobs()
    trainer.fit(model, data)
    (found,) = trainer.test(model, data, verbose=False)
    share = found["compute/macs_share"]
    # Static gates use at most the budget, and less than a block below it.
    maps = linear_maps(model.net)
    blocks = [
        sum(m.connections for m in maps if gate in (m.input_gate, m.output_gate))
        * gate.block_size
        / gate.units
        for gate in gate_layers(model).values()
    ]
    one_block = max(blocks) / sum(m.macs_dense for m in maps)
    assert 0.98 * case["budget"] - one_block <= share <= 1.02 * case["budget"]
    assert controller.reached == pytest.approx(share, rel=0.02)
