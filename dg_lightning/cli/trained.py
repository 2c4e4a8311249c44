"""What a checkpoint holds, for commands that use trained nets: the net, its inputs, its data."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from dg_lightning import GatedClassifier, GatedMLP
from dg_lightning.checkpoint import preparation_in, read_checkpoint
from dg_lightning.cli.errors import OneLineErrorParser, one_line, refusal
from dg_lightning.cli.runs import add_config_option, newest_run
from dg_lightning.spec import build, check_trusted, import_class

__all__ = [
    "BATCH_SIZES",
    "add_checkpoint_options",
    "batches",
    "checked_sizes",
    "checkpoint_path",
    "data_of",
    "has_part",
    "inputs_of",
    "net_of",
    "shape_of",
]

BATCH_SIZES = [1, 32, 1024]


def add_checkpoint_options(parser: OneLineErrorParser) -> None:
    """Let a command be told its checkpoint by path, or by config."""
    parser.add_argument("--ckpt_path", type=str, help="The checkpoint.")
    add_config_option(parser)


def checkpoint_path(given: Any) -> str:
    """Return the checkpoint that was asked for."""
    if (given.ckpt_path is None) == (given.config is None):
        raise refusal("Give either --ckpt_path, or --config for the newest run of a config.")
    return newest_run(given.config) if given.ckpt_path is None else given.ckpt_path


def checked_sizes(batch_sizes: list[int]) -> list[int]:
    """Return the sizes of batches that were asked for."""
    if not batch_sizes or min(batch_sizes) < 1:
        raise refusal(f"`batch_sizes` must be numbers of at least 1, got {batch_sizes}.")
    return batch_sizes


def net_of(path: str) -> GatedMLP:
    """Return the net of a checkpoint, in evaluation, without gradients."""
    saved = read_checkpoint(path).get("hyper_parameters", {})
    class_path = saved.get("_class_path")
    if not isinstance(class_path, str):
        raise refusal(f"{path!r} is no checkpoint of a GatedClassifier: give another one.")
    model = import_class(class_path, GatedClassifier).load_from_checkpoint(path, map_location="cpu")
    net = model.net
    if not isinstance(net, GatedMLP):
        raise refusal(
            f"{path!r} holds a {type(net).__name__}: only a GatedMLP can be made compact so far."
        )
    net.eval().requires_grad_(False)
    return net


def shape_of(path: str) -> list[int]:
    """Return the shape of one input of a checkpoint's net."""
    saved = read_checkpoint(path)["hyper_parameters"].get("input_shape")
    if saved is None:
        return [net_of(path).in_features]
    return [saved] if isinstance(saved, int) else list(saved)


def data_of(
    path: str, root: str | None, *, needed_by: str | None = None
) -> pl.LightningDataModule | None:
    """Return the data of the run that a checkpoint is from, by the config in the run's folder.

    None where it is not there, unless an option needs it.
    """
    checkpoint = Path(path).resolve()
    places = [folder / "config.yaml" for folder in list(checkpoint.parents)[:2]]
    config = next((place for place in places if place.is_file()), None)
    whole = None if config is None else _read_yaml(config)
    spec: Any = whole.get("data") if isinstance(whole, dict) else None
    if not isinstance(spec, dict) or "class_path" not in spec:
        if needed_by is not None:
            raise refusal(
                f"`{needed_by}` needs the run's data, and there is no config.yaml with it near "
                f"{path!r}: export from the run's own folder."
            )
        return None
    if root is not None:
        spec.setdefault("init_args", {})["root"] = root
    check_trusted(spec, config)
    preparation = preparation_in(read_checkpoint(path))
    try:
        data = build(spec, "data", pl.LightningDataModule)
        if preparation is not None and hasattr(data, "use_preparation"):
            data.use_preparation(preparation)
        data.prepare_data()
        for stage in ("validate", "test") if preparation else ("fit", "test"):
            data.setup(stage)
    except Exception as error:  # of whatever kind: a DataModule may be anybody's
        reason = one_line(str(error))
        if needed_by is not None:
            raise refusal(f"The run's data cannot be read ({reason}): give --data_root.") from error
        print(f"The run's data cannot be read ({reason}).")
        return None
    return data


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise refusal(f"{path} is not plain YAML ({one_line(str(error))}): mend it.") from error


def has_part(data: pl.LightningDataModule, part: str) -> bool:
    """Tell whether there are samples in the validation or test part."""
    try:
        return next(batches(data, part), None) is not None
    except MisconfigurationException:  # of a DataModule without a loader for it
        return False


def inputs_of(path: str, count: int, root: str | None = None) -> Tensor:
    """Return inputs for the net of a checkpoint: of the run's validation part, if that is there."""
    data = data_of(path, root)
    if data is None:
        print("Inputs are drawn at random.")
        return torch.randn(count, net_of(path).in_features)
    found = torch.cat([x for x, _ in batches(data, "validate")]).flatten(1)
    return found.repeat(-(-count // len(found)), 1)[:count]


def batches(data: pl.LightningDataModule, part: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Give the inputs and labels of the validation or test part."""
    loader = data.val_dataloader() if part == "validate" else data.test_dataloader()
    for x, target, *_ in loader:
        yield x, target
