"""Whether a checkpoint of the check resumes to what was saved."""

import copy
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from .copies import Copies, hasten, is_ours, own_settings
from .report import Finding

__all__ = ["compare_resumed"]


class Resumed(pl.Callback):
    """Comes behind all other callbacks, and notes what a resumed training starts from."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        ours = [c for c in trainer.callbacks if is_ours(c)]  # type: ignore[attr-defined]
        self.state = copy.deepcopy({
            "step": trainer.global_step,
            "weights": pl_module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "callbacks": {c.state_key: state for c in ours if (state := c.state_dict())},
        })  # fmt: skip
        trainer.should_stop = True


def compare_resumed(
    model: Any, data: Any, callbacks: Sequence[Any], arguments: dict[str, Any], path: Path
) -> Finding:
    """Resume from a checkpoint, and compare all that it starts from with what was saved."""
    saved = torch.load(path, map_location="cpu", weights_only=False)
    resumed, copies = Resumed(), Copies(model, callbacks)
    hasten(copies.callbacks)
    what = "checkpoint"
    with tempfile.TemporaryDirectory() as folder, torch.compiler.set_stance("force_eager"):
        trainer = pl.Trainer(
            **own_settings(arguments, folder),
            callbacks=[*copies.callbacks, resumed],
            devices=1,
        )
        try:
            trainer.fit(copies.model, data, ckpt_path=str(path), weights_only=False)
        except Exception as error:  # whatever it is, it would have stopped the training
            line = " ".join(str(error).split())
            return Finding("ERROR", what, f"It does not resume: {type(error).__name__}: {line}")
    if not resumed.state:
        return Finding("warning", what, "The training was over, so resuming was not tried.")
    ours = [callback.state_key for callback in copies.callbacks if is_ours(callback)]
    kept = {key: value for key, value in saved["callbacks"].items() if key in ours and value}
    expected = {
        "step": saved["global_step"],
        "weights": saved["state_dict"],
        "optimizers": saved["optimizer_states"],
        "callbacks": kept,
    }
    different = [part for part in expected if not _same(resumed.state[part], expected[part])]
    if different:
        return Finding("ERROR", what, f"Resumed, other {', '.join(different)} than were saved.")
    names = ", ".join(key.partition("{")[0] for key in kept) or "no callback"
    text = f"Resumes at step {expected['step']} with all that was saved, also of {names}."
    return Finding("OK", what, text)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one.cpu(), other.cpu())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    equal = one == other
    return bool(equal.all() if hasattr(equal, "all") else equal)
