"""Penalties on static gates, wherever their logits come from."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn

from dg_lightning import GatedMLP
from dg_lightning.callbacks import GatePenalty


class Net(pl.LightningModule):
    """A net that somebody else has written."""

    def __init__(self) -> None:
        super().__init__()
        self.net = GatedMLP(6, [16, 8], 3, gate={"kind": "static", "threshold": 0.4})
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_after_backward(self) -> None:
        gate: Any = self.net.hidden[0].gate
        self.seen.append(gate.logit.grad.detach().cpu().clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


def fitted(
    model: pl.LightningModule, callbacks: list[pl.Callback], tmp_path: Any, **options: Any
) -> None:
    data: Any = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(3)]
    trainer = pl.Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_epochs": 1, **options},
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=None))


class Noting(GatePenalty):
    """Somebody's own penalty, which looks at what happens."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.calls: list[str] = []

    def on_before_backward(self, *arguments: Any) -> None:
        self.calls.append("before")
        super().on_before_backward(*arguments)

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.calls.append("end")
        super().on_train_batch_end(*arguments)


def test_hooks_of_a_subclass_are_called_and_the_penalty_acts_once(tmp_path: Any) -> None:
    seen = []
    for penalty in (Noting(), GatePenalty(0.5)):
        torch.manual_seed(0)
        model = Net()
        fitted(model, [penalty], tmp_path)
        seen.append(torch.stack(model.seen))
        if isinstance(penalty, Noting):
            assert penalty.calls == ["before", "end"] * 3
    assert torch.equal(*seen)


class WithDeltas(Net):
    """Trains an offset to frozen logits, as an adapter does."""

    def __init__(self) -> None:
        super().__init__()
        self.delta = nn.Parameter(torch.zeros(16))

    def training_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        name = "hidden.0.gate.logit"
        logit = self.net.get_parameter(name).detach() + self.delta
        out = torch.func.functional_call(self.net, {name: logit}, batch[0])
        return nn.functional.cross_entropy(out, batch[1])

    def on_after_backward(self) -> None:
        assert self.net.get_parameter("hidden.0.gate.logit").grad is None
        assert self.delta.grad is not None
        self.seen.append(self.delta.grad.clone())


@pytest.mark.filterwarnings("ignore:.* nothing is penalised")
def test_logits_that_were_put_in_from_outside_are_found_in_the_backward_pass(tmp_path: Any) -> None:
    seen = []
    for weight in (0.0, 7.0):
        torch.manual_seed(0)
        model = WithDeltas()
        fitted(model, [GatePenalty(weight)], tmp_path)
        seen.append(model.seen[0])
    p = torch.sigmoid(torch.tensor(0.8).logit())
    torch.testing.assert_close(seen[1] - seen[0], (7.0 * p * (1 - p) / 16).expand(16))
