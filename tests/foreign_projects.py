"""Five projects that were not written for a check, and what it finds in them."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dg_lightning import DynamicGate, GatedClassifier, GatedLinear, StaticGate, check
from dg_lightning.callbacks import (
    SET,
    BudgetController,
    GateMonitor,
    GatePenalty,
    RigL,
    TemperatureAnnealing,
)


def images(size: int = 32, count: int = 96, batch: int = 8) -> Any:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, size, size, generator=generator)
    return DataLoader(TensorDataset(x, torch.arange(count) % 10), batch)


def vectors(width: int = 16, count: int = 128, batch: int = 8) -> Any:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, width, generator=generator)
    return DataLoader(TensorDataset(x, torch.arange(count) % 4), batch)


class ResNet(pl.LightningModule):
    """A torchvision ResNet with a gated head."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models import resnet18

        self.net = resnet18(weights=None)
        head = GatedLinear(512, 64, gate=StaticGate(64))
        self.net.fc = nn.Sequential(head, nn.Linear(64, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class GAN(pl.LightningModule):
    """Two optimizers by hand; the generator has gates that look at the input."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        gated = GatedLinear(8, 64, gate=DynamicGate(8, 64, network="low_rank", rank=2))
        self.generator = nn.Sequential(gated, nn.Linear(64, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        one, two = self.optimizers()  # type: ignore[attr-defined]
        real, bce = batch[0], nn.functional.binary_cross_entropy_with_logits
        made = self.generator(torch.randn(len(real), 8))
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        one.zero_grad()
        self.manual_backward(bce(self.discriminator(made), ones))
        one.step()
        two.zero_grad()
        known = bce(self.discriminator(real), ones)
        self.manual_backward(known + bce(self.discriminator(made.detach()), zeros))
        two.step()

    def configure_optimizers(self) -> Any:
        parts = (self.generator, self.discriminator)
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in parts]


class Late(pl.LightningModule):
    """Makes its layers in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            gated = GatedLinear(16, 32, gate=StaticGate(32))
            self.net = nn.Sequential(gated, nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Transformer(Late):
    """Torch's own Transformer, with gates that look at the token, and an LSTM."""

    def configure_model(self) -> None:
        if self.net is None:
            layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
            layer.linear1 = GatedLinear(16, 32, gate=DynamicGate(16, 32))  # type: ignore[assignment]
            self.net = nn.TransformerEncoder(layer, 2)
            self.memory = nn.LSTM(16, 16, batch_first=True)
            self.head = nn.Linear(16, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch[0][:, None, :].expand(-1, 5, -1)
        hidden, _ = self.memory(self.net(tokens))
        return nn.functional.cross_entropy(self.head(hidden[:, -1]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx))


def ours() -> GatedClassifier:
    gate = {"kind": "static"}
    net: Any = {"class_path": "GatedMLP", "init_args": {"hidden": [32, 16], "gate": gate}}
    return GatedClassifier(net, input_shape=[16], num_classes=4)


PROJECTS: dict[str, Any] = {
    "ResNet": lambda: (
        ResNet(), images(), [GatePenalty(0.1), RigL(0.8, layers=["*layer4*conv*"])],
    ),
    "GAN": lambda: (
        GAN(), vectors(), [GatePenalty(0.1), SET(0.5, layers=["discriminator.*"]),
                           TemperatureAnnealing()],
    ),
    "configure_model": lambda: (
        Late(), vectors(), [BudgetController(0.8), RigL(0.5), GateMonitor()],
    ),
    "Transformer": lambda: (
        Transformer(), vectors(), [GatePenalty(0.1, usage="expected_macs"), GateMonitor()],
    ),
    "ours": lambda: (ours(), vectors(), [BudgetController(0.5), TemperatureAnnealing()]),
}  # fmt: skip


class ByHand(Late):
    raw_step = raw_backward = False
    every = 1

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        loss: Tensor = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.raw_backward:
            loss.backward()
        else:
            self.manual_backward(loss)
        if (batch_idx + 1) % self.every == 0:
            optimizer: Any = self.optimizers(use_pl_optimizer=not self.raw_step)
            optimizer.step()
            optimizer.zero_grad()


STEPS: dict[str, Any] = {"max_epochs": 20, "accelerator": "cpu"}


def errors(model: Any, callbacks: Any, data: Any = None, **arguments: Any) -> dict[str, str]:
    """Return the errors that a check finds, by what was looked at."""
    report = check(model, vectors() if data is None else data, callbacks, **{**STEPS, **arguments})
    found = {f.what: f.found for f in report.findings if f.status == "ERROR"}
    assert report.ok == (not found)
    return found
