"""Gates on the channels of a ResNet of torchvision: what can be gated, and what that saves.

pip install 'dg-lightning[vision]'
python examples/torchvision_resnet.py
"""

from typing import Any

import torch
from torch import nn
from torchvision.models import resnet18

from dg_lightning import add_gates, gate_layers, penalty
from dg_lightning.surgery import compact


def main() -> None:
    """Train without a Trainer, with a penalty on open channels, and take closed ones out."""
    torch.manual_seed(0)
    images, labels = torch.randn(16, 3, 64, 64), torch.randint(10, (16,))
    model = resnet18(num_classes=10)
    print(add_gates(model, channels={"kind": "static", "min_open": "10%"}, example=images[:2]))
    gates = gate_layers(model)
    is_gate: Any = [name for name, _ in model.named_parameters() if ".dg_gate." in name]
    optimizer = torch.optim.Adam(
        [
            {"params": [p for n, p in model.named_parameters() if n not in is_gate], "lr": 1e-3},
            {"params": [p for n, p in model.named_parameters() if n in is_gate], "lr": 0.3},
        ]
    )
    for _ in range(8):
        loss = nn.functional.cross_entropy(model(images), labels) + 0.02 * penalty(gates)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    small = compact(model.eval(), images[:2])
    before, after = (sum(p.numel() for p in m.parameters()) for m in (model, small.model))
    print(f"{before:,} parameters, {after:,} without closed channels")


if __name__ == "__main__":
    main()
