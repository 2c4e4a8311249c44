"""Gates in a language model of Hugging Face, and back out as a plain small model.

pip install 'dg-lightning[models]'
python examples/hugging_face.py
"""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from dg_lightning import add_gates
from dg_lightning.callbacks import BudgetController
from dg_lightning.surgery import compact, load_compact, save_compact


def build() -> GPT2LMHeadModel:
    """Return a small GPT-2 for bytes; `from_pretrained` does as well."""
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4)
    return GPT2LMHeadModel(config)


class Bytes(pl.LightningModule):
    """Predicts the next byte."""

    def __init__(self, model: GPT2LMHeadModel) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        """Return the loss."""
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    """Train with gates, and use the small model."""
    with open(__file__, "rb") as file:
        text = torch.tensor(list(file.read() * 4))
    windows = text[: len(text) // 64 * 64].reshape(-1, 64)
    model = build()
    found = add_gates(
        model, feed_forward={"kind": "static"}, heads={"kind": "static"}, example=windows[:2]
    )
    print(found)
    trainer = pl.Trainer(
        max_epochs=5,
        callbacks=[BudgetController(budget=0.6, every_n_steps=2)],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Bytes(model), DataLoader(windows, batch_size=8, shuffle=True))  # type: ignore[arg-type]
    small = compact(model, windows[:2])
    save_compact(small, "small.safetensors")
    loaded: Any = load_compact(build, "small.safetensors").eval()
    prompt = windows[:1, :8]
    written = loaded.generate(input_ids=prompt, max_new_tokens=40, do_sample=False, pad_token_id=0)
    print(bytes(written[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
