"""Loading of trained nets and their data from checkpoints."""

import atexit
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from dg_lightning import GatedMLP, GatedRegressor
from dg_lightning.cli.errors import OneLineErrorParser, one_line, refusal
from dg_lightning.cli.runs import add_config_option, data_of_run, newest_run
from dg_lightning.training.checkpoint import opened, preparation_in, read_checkpoint
from dg_lightning.training.module import GatedModule
from dg_lightning.training.spec import build, check_trusted, import_class

__all__ = [
    "BATCH_SIZES",
    "add_checkpoint_options",
    "batches",
    "check_batch_sizes",
    "has_part",
    "input_shape",
    "load_data",
    "load_inputs",
    "load_model",
    "load_net",
    "resolve_checkpoint",
]

BATCH_SIZES = [1, 32, 1024]


def add_checkpoint_options(parser: OneLineErrorParser) -> None:
    """Add the options that select a checkpoint by path or by config."""
    parser.add_argument("--ckpt_path", type=str, help="The checkpoint.")
    add_config_option(parser)


def resolve_checkpoint(given: Any) -> str:
    """Return the path of the selected checkpoint; one behind a URL is downloaded once."""
    if (given.ckpt_path is None) == (given.config is None):
        raise refusal("Give either --ckpt_path, or --config for the newest run of a config.")
    if given.ckpt_path is None:
        return newest_run(given.config)
    path: str = given.ckpt_path
    if "://" not in path:
        return path
    folder = tempfile.mkdtemp(prefix="dg-lightning-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    local = Path(folder, "checkpoints", "downloaded.ckpt")  # as in a run, whose folder is private
    local.parent.mkdir()
    with opened(path) as source, local.open("wb") as file:
        shutil.copyfileobj(source, file)
    return str(local)


def check_batch_sizes(batch_sizes: list[int]) -> list[int]:
    """Return the batch sizes, or refuse invalid ones."""
    if not batch_sizes or min(batch_sizes) < 1:
        raise refusal(f"`batch_sizes` must be numbers of at least 1, got {batch_sizes}.")
    return batch_sizes


def load_model(path: str) -> GatedModule:
    """Return the LightningModule of a checkpoint, from one reading of the file."""
    with opened(path) as file:
        saved = read_checkpoint(file, name=path).get("hyper_parameters", {})
        class_path = saved.get("_class_path")
        if not isinstance(class_path, str):
            raise refusal(f"{path!r} is no checkpoint of this program: give another one.")
        return import_class(class_path, GatedModule).load_from_checkpoint(file, "cpu")


def load_net(path: str) -> GatedMLP:
    """Return the net of a checkpoint, in evaluation mode, without gradients."""
    model = load_model(path)
    net = model.net
    if not isinstance(net, GatedMLP):
        raise refusal(
            f"{path!r} holds a {type(net).__name__}: only a GatedMLP can be made compact so far."
        )
    net.eval().requires_grad_(False)
    if isinstance(model, GatedRegressor):  # its outputs in units of the target
        net.output.weight.mul_(model.target_std)
        net.output.bias.mul_(model.target_std).add_(model.target_mean)
    return net


def input_shape(path: str) -> list[int]:
    """Return the shape of a single input of a checkpoint's net."""
    saved = read_checkpoint(path)["hyper_parameters"].get("input_shape")
    if saved is None:
        return [load_net(path).in_features]
    return [saved] if isinstance(saved, int) else list(saved)


def load_data(
    path: str, root: str | None, *, needed_by: str | None = None
) -> pl.LightningDataModule | None:
    """Return the data of a checkpoint's run, from the config in the run folder.

    Returns None if there is none, or refuses if an option needs it.
    """
    found = data_of_run(path)
    if found is None:
        if needed_by is not None:
            raise refusal(
                f"`{needed_by}` needs the run's data, and there is no config.yaml with it near "
                f"{path!r}: name the checkpoint in the run's own folder."
            )
        return None
    spec, config = found
    if root is not None:
        _move(spec.setdefault("init_args", {}), root)
    check_trusted(spec, config)
    preparation = preparation_in(read_checkpoint(path))
    try:
        data = build(spec, "data", pl.LightningDataModule)
        if preparation is not None and hasattr(data, "use_preparation"):
            data.use_preparation(preparation)
        data.prepare_data()
        for stage in ("validate", "test") if preparation else ("fit", "test"):
            data.setup(stage)
    except Exception as error:  # any error: the DataModule may be third-party
        reason = one_line(str(error))
        if needed_by is not None:
            raise refusal(
                f"The run's data cannot be read ({reason}): give --data_root, where it is now."
            ) from error
        print(f"The run's data cannot be read ({reason}).")
        return None
    return data


def _move(arguments: dict[str, Any], root: str) -> None:
    """Name the place where data is now: the data itself, or a folder that holds it."""
    if not Path(root).is_file():
        arguments["root"] = root
    for key in ("path", "folder"):
        if old := arguments.get(key):
            places = Path(root) / old, Path(root) / Path(old).name, Path(root)
            arguments[key] = next((str(place) for place in places if place.exists()), old)


def has_part(data: pl.LightningDataModule, part: str) -> bool:
    """Return True if there are samples in the validation or test part."""
    try:
        return next(batches(data, part), None) is not None
    except MisconfigurationException:  # no such dataloader
        return False


def load_inputs(path: str, count: int, root: str | None = None) -> Tensor:
    """Return validation inputs of a checkpoint's run, or random ones if not available."""
    data = load_data(path, root)
    if data is None:
        print("Inputs are drawn at random.")
        return torch.randn(count, load_net(path).in_features)
    found = torch.cat([x for x, _ in batches(data, "validate")]).flatten(1)
    return found.repeat(-(-count // len(found)), 1)[:count]


def batches(data: pl.LightningDataModule, part: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the inputs and labels of the validation or test part."""
    loader = data.val_dataloader() if part == "validate" else data.test_dataloader()
    for x, target, *_ in loader:
        yield x, target
