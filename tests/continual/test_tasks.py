from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from dg_lightning.continual import mask_classes, task_data
from dg_lightning.continual.tasks import task_progress
from dg_lightning.datamodules import DigitsDataModule, TaskSequence


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_masked_classes_are_as_if_there_were_a_head_of_the_others(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 6, dtype=dtype, requires_grad=True)
    target = torch.tensor([0, 1, 0, 1, 1])
    masked = F.cross_entropy(mask_classes(logits, [2, 4]).float(), torch.tensor([2, 4])[target])
    head = F.cross_entropy(logits[:, [2, 4]].float(), target)
    assert torch.equal(masked, head)
    (gradient,) = torch.autograd.grad(masked, logits)
    assert not gradient[:, [0, 1, 3, 5]].any()
    assert mask_classes(logits, None) is logits


def test_data_without_tasks_is_refused_with_a_way_out() -> None:
    trainer = SimpleNamespace(datamodule=DigitsDataModule())
    with pytest.raises(ValueError, match="dict needs a DataModule with tasks, got Digits"):
        task_data(trainer, {})


def test_progress_runs_from_0_to_1_in_every_task() -> None:
    data = TaskSequence(DigitsDataModule(), tasks=2)
    done = []
    for epoch in range(4):
        trainer = SimpleNamespace(max_epochs=4, current_epoch=epoch, num_training_batches=2)
        data.trainer = trainer  # type: ignore[assignment]
        done += [task_progress(trainer, data, batch) for batch in range(2)]
    assert done == [0, 0.25, 0.5, 0.75] * 2
