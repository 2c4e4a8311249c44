from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader

from dg_lightning.callbacks import StaticSparse
from dg_lightning.rewiring import import_pruned, masks_of_pruned


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch), torch.zeros(len(batch)).long())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def fit(model: pl.LightningModule, callbacks: list[Any], root: Path) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[*callbacks, ModelCheckpoint(root, filename="end")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )
    inputs: Any = torch.randn(12, 6)
    trainer.fit(model, DataLoader(inputs, batch_size=4))


@pytest.mark.parametrize("permanent", [False, True])
def test_a_checkpoint_of_model_pruning_goes_on_sparse(tmp_path: Path, permanent: bool) -> None:
    callback = ModelPruning("l1_unstructured", amount=0.5, make_pruning_permanent=permanent)
    fit(Plain(), [callback], tmp_path)
    path = tmp_path / "end.ckpt"
    if permanent:
        with pytest.raises(ValueError, match="`zeros=True`"):
            import_pruned(path)
    weights, masks = import_pruned(path, zeros=permanent)
    assert set(masks) == {"net.0", "net.2"}
    kept = sum(int(mask.sum()) for mask in masks.values())
    assert 0.4 < kept / (6 * 8 + 8 * 3) < 0.6  # it rounds
    model = Plain()
    model.load_state_dict(weights)  # strictly
    sparse = StaticSparse(0.5)
    sparse.set_initial_masks(masks)
    fit(model, [sparse], tmp_path / "more")
    for name, mask in masks.items():
        weight: Any = model.get_submodule(name).weight
        assert (weight[~mask] == 0).all()
        assert (weight[mask] != 0).all()


def test_masks_of_a_pruned_module_are_taken_over_by_path(tmp_path: Path) -> None:
    model = Plain()
    prune.l1_unstructured(model.net[0], "weight", amount=0.25)
    prune.random_unstructured(model.net[2], "weight", amount=0.5)
    masks = masks_of_pruned(model)
    assert list(masks) == ["net.0", "net.2"]
    torch.save(model.state_dict(), tmp_path / "pruned.pt")
    fresh = Plain()
    sparse = StaticSparse(masks=str(tmp_path / "pruned.pt"))
    fit(fresh, [sparse], tmp_path)
    for name, mask in masks.items():
        assert torch.equal(sparse.connections[name].mask, mask)


def test_a_mask_of_another_shape_is_refused(tmp_path: Path) -> None:
    sparse = StaticSparse(0.5)
    sparse.set_initial_masks({"net.0": torch.ones(8, 6).bool(), "net.2": torch.ones(2, 2).bool()})
    with pytest.raises(ValueError, match=r"mask of net.2 must have shape \(3, 8\)"):
        fit(Plain(), [sparse], tmp_path)
