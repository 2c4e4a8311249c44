"""Accuracy and speed of a Vision Transformer at half its MACs: gates against Torch-Pruning.

    dg-lightning study --config studies/vit --output vit
    python benchmarks/vit_cifar10.py prune --root data --seed 52 --output pruned/52
    python benchmarks/vit_cifar10.py speed --gated vit/runs/.../last.ckpt --pruned pruned/52/net.pt

`prune` trains the dense net for 40 epochs. Torch-Pruning (pip install torch-pruning) then removes
heads, units and width by the Taylor criterion until `--macs` of the dense MACs are left, and the
smaller net is trained for 20 more epochs, in total as many as the gated net. `speed` times a batch
of 64, alternating dense, compact and pruned nets, on a GPU as CUDA graphs. MACs are counted by
torch's FlopCounterMode, attention included.
"""

import argparse
import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dg_lightning import GatedClassifier
from dg_lightning.datamodules import CIFAR10DataModule
from dg_lightning.layers import VisionTransformer
from dg_lightning.runtime.timing import median_seconds
from dg_lightning.surgery import compact

SHAPE = (3, 32, 32)
NET = {"class_path": "dg_lightning.layers.VisionTransformer", "init_args": {}}
STEPS = (0.05, 0.95)  # range of pruning ratios


def macs(net: nn.Module) -> int:
    """Return the MACs of one image, attention included."""
    x = torch.zeros(1, *SHAPE, device=next(net.parameters()).device)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        net(x)
    return int(counter.get_total_flops()) // 2


def classifier(epochs: int, lr: float) -> GatedClassifier:
    """Return the module of `vit/baseline`."""
    cosine = {"class_path": "CosineAnnealingLR", "init_args": {"T_max": epochs}}
    adam = {"class_path": "AdamW", "init_args": {"lr": lr, "weight_decay": 0.05}}
    return GatedClassifier(NET, SHAPE, 10, adam, cosine, cuda_graphs=True)  # type: ignore[arg-type]


def train(module: GatedClassifier, data: CIFAR10DataModule, epochs: int, output: Path) -> float:
    """Train a module and return its test accuracy."""
    trainer = pl.Trainer(
        max_epochs=epochs,
        precision="bf16-mixed",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=output,
        callbacks=[ModelCheckpoint(dirpath=output, save_weights_only=True)],
    )
    trainer.fit(module, data)
    return float(trainer.test(module, data, verbose=False)[0]["test/accuracy"])


def pruned(net: Any, batch: tuple[Tensor, Tensor], ratio: float) -> Any:
    """Return a copy of a net, pruned evenly with Torch-Pruning."""
    import torch_pruning as tp  # type: ignore[import-not-found]

    net = copy.deepcopy(net)
    x, target = batch
    nn.functional.cross_entropy(net(x), target).backward()
    pruner = tp.pruner.MetaPruner(
        net,
        x[:2],
        importance=tp.importance.GroupTaylorImportance(),
        pruning_ratio=ratio,
        ignored_layers=[net.output],
        num_heads={block.attention.qkv: 6 for block in net.blocks},
        prune_num_heads=True,
        prune_head_dims=False,
        head_pruning_ratio=ratio,
        unwrapped_parameters=[(net.position, 1)],
    )
    pruner.step()
    net.zero_grad()
    return net


def prune(root: str, seed: int, share: float, output: Path, epochs: tuple[int, int]) -> None:
    """Train, prune, and fine-tune."""
    pl.seed_everything(seed)
    data = CIFAR10DataModule(root=root, batch_size=256)
    module = classifier(epochs[0], 1e-3)
    before = train(module, data, epochs[0], output)
    dense = macs(module.net)
    device = next(module.parameters()).device
    x, target = next(iter(data.train_dataloader()))
    batch = x.to(device), target.to(device)
    low, high = STEPS
    for _ in range(12):  # bisect for the smallest ratio that meets the budget
        middle = (low + high) / 2
        if macs(pruned(module.net, batch, middle)) <= share * dense:
            high = middle
        else:
            low = middle
    smaller = classifier(epochs[1], 5e-4)
    smaller.net = pruned(module.net, batch, high)
    after = train(smaller, data, epochs[1], output)
    torch.save(smaller.net.cpu(), output / "net.pt")
    figures = {
        "seed": seed,
        "accuracy": after,
        "before": before,
        "ratio": high,
        "macs": macs(smaller.net),
        "macs_dense": dense,
    }
    (output / "result.json").write_text(json.dumps(figures), encoding="utf-8")
    print(figures)


def speed(gated: Path, pruned_net: Path | None, device: str, dtype: torch.dtype) -> None:
    """Print the time of a batch of 64 through each net."""
    module = GatedClassifier.load_from_checkpoint(gated, map_location="cpu").eval()
    dense = VisionTransformer(SHAPE, 10, **module.hparams["net"].get("init_args", {}))
    example = torch.randn(2, *SHAPE)
    nets: dict[str, Any] = {
        "dense": dense,
        "gated, compact": compact(module.net, example).model,
        "gated, compact, multiples of 16": compact(module.net, example, multiple=16).model,
    }
    if pruned_net is not None:
        nets["Torch-Pruning"] = torch.load(pruned_net, weights_only=False)
    table = Table(title=f"{device}, batch 64, {dtype}")
    for column in ("net", "MACs", "share", "ms", "times as fast"):
        table.add_column(column, justify="right")
    x = torch.randn(64, *SHAPE, device=device, dtype=dtype)
    share = {name: macs(net.to("cpu", torch.float32)) for name, net in nets.items()}
    runs: dict[str, Callable[[], Any]] = {
        name: partial(net.eval().to(device, dtype), x) for name, net in nets.items()
    }
    with torch.inference_mode():
        if device == "cuda":  # otherwise launching kernels takes most of the time
            runs = {name: recorded(run) for name, run in runs.items()}
        seconds = median_seconds(runs, torch.device(device), 9)
    for name in nets:
        ratio = seconds["dense"] / seconds[name]
        of_dense, ms = share[name] / share["dense"], seconds[name] * 1e3
        table.add_row(name, f"{share[name]:,}", f"{of_dense:.1%}", f"{ms:.2f}", f"{ratio:.2f}")
    Console(width=100).print(table)


def recorded(run: Callable[[], Tensor]) -> Callable[[], None]:
    """Record a CUDA graph and return its replay."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prune")
    one.add_argument("--root", default="data")
    one.add_argument("--seed", type=int, default=52)
    one.add_argument("--macs", type=float, default=0.5)
    one.add_argument("--epochs", type=int, nargs=2, default=(40, 20))
    one.add_argument("--output", type=Path, required=True)
    two = commands.add_parser("speed")
    two.add_argument("--gated", type=Path, required=True)
    two.add_argument("--pruned", type=Path)
    two.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    two.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    given = parser.parse_args()
    if given.command == "prune":
        prune(given.root, given.seed, given.macs, given.output, tuple(given.epochs))
    else:
        speed(given.gated, given.pruned, given.device, getattr(torch, given.dtype))


if __name__ == "__main__":
    main()
