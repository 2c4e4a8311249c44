"""A pretrained BERT for chemical reactions: gated, fine-tuned on yields, and compacted.

    pip download --no-deps rxnfp && unzip rxnfp-*.whl
    python benchmarks/bert_reactions.py --weights rxnfp/models/transformers/bert_pretrained \
        --reactions random_split_0.tsv

The weights (12 layers, width 256) come from the PyPI package `rxnfp`. The reactions, Suzuki-Miyaura
couplings with their yields, come from the repository rxn4chemistry/rxn_yields. The same weights are
fine-tuned twice: dense, and with static gates on units and heads, trained to use `--budget` of the
MACs of linear layers. R² is measured on the yields of the last reactions in the file. The gated
model is then compacted, saved, loaded into a new one, and compared in R² and time.
"""

import argparse
import logging
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from dg_lightning import param_groups
from dg_lightning.callbacks import AddGates, BudgetController
from dg_lightning.surgery import compact, load_compact, save_compact

TOKEN = re.compile(r"\[[^\]]+\]|Br|Cl|%\d\d|>>|.")
BATCH = 16


class Yields(pl.LightningModule):
    """Predicts standardised yields with a third-party model."""

    def __init__(self, model: nn.Module, steps: int) -> None:
        super().__init__()
        self.model = model
        self.steps = steps

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the predicted yields."""
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask)
        yields: Tensor = outputs.logits.squeeze(-1)
        return yields

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the squared error."""
        ids, target = batch
        ids = ids[:, : int((ids != 0).sum(1).max())]
        return nn.functional.mse_loss(self(ids, (ids != 0).long()), target)

    def configure_optimizers(self) -> Any:
        """Return AdamW with warm-up and annealing."""
        optimizer = torch.optim.AdamW(param_groups(self, 2e-4, 50), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, [g["lr"] for g in optimizer.param_groups], self.steps, pct_start=0.1
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def reactions(path: Path, vocabulary: Path) -> tuple[Tensor, Tensor]:
    """Return the tokens of reactions and their standardised yields."""
    numbers = {word: i for i, word in enumerate(vocabulary.read_text().split("\n"))}
    lines = [line.split("\t") for line in path.read_text().splitlines()[1:]]
    rows, yields = [], []
    for line in lines:
        tokens = [numbers.get(token, numbers["[UNK]"]) for token in TOKEN.findall(line[-2])]
        rows.append(torch.tensor([numbers["[CLS]"], *tokens, numbers["[SEP]"]]))
        yields.append(float(line[-1]))
    target = torch.tensor(yields)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), (
        target - target.mean()
    ) / target.std()


@torch.inference_mode()
def score(model: nn.Module, ids: Tensor, target: Tensor) -> tuple[float, float]:
    """Return R² and the prediction time in seconds."""
    model.eval()
    start = time.perf_counter()
    parts = [model(input_ids=x, attention_mask=(x != 0).long()).logits for x in ids.split(BATCH)]
    seconds = time.perf_counter() - start
    error = (torch.cat(parts).squeeze(-1) - target).square().mean()
    return float(1 - error / target.var()), seconds


def main() -> None:
    """Fine-tune, compact and compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--reactions", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=4032)
    parser.add_argument("--tests", type=int, default=1728)
    given = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    ids, target = reactions(given.reactions, given.weights / "vocab.txt")
    train = TensorDataset(ids[: given.samples], target[: given.samples])
    steps = given.epochs * (len(train) // BATCH)

    def build() -> Any:
        config = BertConfig.from_pretrained(given.weights, num_labels=1)
        return BertForSequenceClassification(config)

    def tune(callbacks: list[Any]) -> Any:
        pl.seed_everything(1)
        model = build()
        # Hugging Face no longer reads this old file, whose norms have different names.
        state = torch.load(given.weights / "pytorch_model.bin", weights_only=True)
        renamed = {
            key.replace("gamma", "weight").replace("beta", "bias"): value
            for key, value in state.items()
        }
        unknown = model.load_state_dict(renamed, strict=False)
        assert not [key for key in unknown.missing_keys if "encoder" in key]
        trainer = pl.Trainer(
            max_epochs=given.epochs,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Yields(model, steps), DataLoader(train, BATCH, shuffle=True, drop_last=True))
        return model

    example = {"input_ids": ids[:2], "attention_mask": (ids[:2] != 0).long()}
    static: Any = {"kind": "static", "min_open": 1}
    gates = AddGates(
        feed_forward=static,
        heads=static,
        layers=["*encoder*"],
        submodule="model",
        example=example,
    )
    dense = tune([])
    gated = tune(
        [gates, BudgetController(budget=given.budget, begin="10%", until="50%", freeze_at="60%")]
    )
    small = compact(gated, example)
    with tempfile.TemporaryDirectory() as folder:
        save_compact(small, Path(folder) / "small.safetensors")
        loaded = load_compact(build, Path(folder) / "small.safetensors")
    table = Table(title=f"{given.samples} training reactions, {given.tests} test reactions")
    for column in ("model", "parameters", "R²", "seconds"):
        table.add_column(column, justify="right")
    test = ids[-given.tests :], target[-given.tests :]
    for name, model in {"dense": dense, "gated": gated, "compact, loaded": loaded}.items():
        quality, seconds = score(model, *test)
        count = sum(p.numel() for p in model.parameters())
        table.add_row(name, f"{count:,}", f"{quality:.4f}", f"{seconds:.1f}")
    console = Console(width=100)
    console.print(table)
    console.print(f"{len(small.units)} layers compacted; notes: {small.notes}")


if __name__ == "__main__":
    main()
