"""Gates under FSDP2: made before sharding they work, and what cannot work says so in one line."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_nets import data
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F
from typing_extensions import override

from dg_lightning import add_gates, gate_layers
from dg_lightning.callbacks import (
    AddGates,
    BudgetController,
    CollapseDetector,
    ContinualBackprop,
    Distill,
    GateMonitor,
    GatePenalty,
    MagnitudePruning,
    MinimumActivity,
    ReviveDormant,
    RigL,
    TemperatureAnnealing,
    ThresholdPhases,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Gate collapse"),
    pytest.mark.filterwarnings("ignore:BudgetController"),
]


@pytest.fixture(autouse=True)
def _no_address_of_another_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget where Lightning made its process group: a later one would try to listen there."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


class Sharded(LightningModule):
    """Somebody's module, which is sharded in `configure_model`."""

    def __init__(self, gates: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        if gates:
            add_gates(self.net, feed_forward={"kind": "static"}, example=torch.zeros(2, 64))

    @override
    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]

    @override
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert isinstance(self.net, FSDPModule)
        return F.cross_entropy(self(batch[0]), batch[1])

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: LightningModule, callback: Any, path: Path) -> Trainer:
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, callbacks=[callback],
        enable_checkpointing=False, default_root_dir=path, **quiet,
    )  # fmt: skip
    try:
        trainer.fit(module, data())
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return trainer


def test_gates_made_before_sharding_meet_a_budget(tmp_path: Path) -> None:
    module = Sharded(gates=True)
    controller = BudgetController(0.5)
    fit(module, controller, tmp_path)
    assert controller.reached == pytest.approx(0.5, abs=0.02)
    assert len(gate_layers(module)) == 1


@pytest.mark.parametrize(
    ("callback", "way_out"),
    [
        (lambda: AddGates(feed_forward={"kind": "static"}), "before"),
        (lambda: RigL(), "ddp"),
        (lambda: MagnitudePruning(), "ddp"),
        (lambda: ReviveDormant(), "ddp"),
        (lambda: ContinualBackprop(), "ddp"),
        (lambda: Distill(), "teacher"),
    ],
    ids=["AddGates", "RigL", "MagnitudePruning", "ReviveDormant", "ContinualBackprop", "Distill"],
)
def test_what_needs_whole_weights_says_so(callback: Any, way_out: str, tmp_path: Path) -> None:
    made = callback()
    with pytest.raises(ValueError, match=f"shard.*{way_out}") as caught:
        fit(Sharded(), made, tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_add_gates_by_hand_after_sharding_says_so() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match=r"shard.*fully_shard"):
            add_gates(net, feed_forward={"kind": "static"}, example=torch.zeros(2, 6))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_the_example_with_two_processes_equals_ddp(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "fsdp.py"
    states, reached = {}, {}
    for strategy in ("fsdp", "ddp"):
        command = [sys.executable, str(example), f"--strategy={strategy}", "--epochs=3"]
        done = subprocess.run(
            [*command, f"--output={tmp_path}"],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        (found,) = re.findall(r"([\d.]+)% of the MACs", done.stdout)
        reached[strategy] = float(found)
        states[strategy] = torch.load(tmp_path / f"{strategy}.ckpt")["state_dict"]
    assert reached["fsdp"] == reached["ddp"] == pytest.approx(50, abs=1)
    assert states["fsdp"].keys() == states["ddp"].keys()
    for name, value in states["ddp"].items():
        torch.testing.assert_close(states["fsdp"][name], value, atol=1e-4, rtol=1e-4)
    gates = [value > 0 for name, value in states["ddp"].items() if name.endswith("logit")]
    assert 0 < float(torch.cat(gates).float().mean()) < 1


@pytest.mark.parametrize(
    "callback",
    [
        GatePenalty(0.1),
        MinimumActivity("10%"),
        TemperatureAnnealing(),
        ThresholdPhases(),
        CollapseDetector(),
        GateMonitor(every_n_epochs=1),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_callbacks_of_gates_run_on_sharded_modules(callback: Any, tmp_path: Path) -> None:
    trainer = fit(Sharded(gates=True), callback, tmp_path)
    assert trainer.global_step > 0
