"""Find runs and checkpoints, and load their nets and data."""

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torchmetrics.functional import r2_score

from dg_lightning import GatedMLP, GatedRegressor
from dg_lightning.cli.errors import one_line
from dg_lightning.cli_error import cli_error
from dg_lightning.configs import config_name, config_path, option_values
from dg_lightning.files import locked
from dg_lightning.monitoring import run_folder
from dg_lightning.training.checkpoint import opened, preparation_in, read_checkpoint
from dg_lightning.training.module import GatedModule
from dg_lightning.training.spec import build, check_size, check_trusted, import_class

_LOCK_SECONDS = 30.0  # maximum wait while another process claims a folder
RUN_FILE = "run.json"  # records the configs of a run
_CSV = "lightning.pytorch.loggers.CSVLogger"


def with_csv_logger_first(trainer: Mapping[str, Any]) -> list[Any] | None:
    """Return the loggers with a CSV logger first, or None if nothing changes.

    The first logger determines the run folder, and other loggers would name it differently.
    """
    loggers = _loggers(trainer)
    if loggers is None or _is_csv(loggers[0]):
        return None
    csv = [logger for logger in loggers if _is_csv(logger)]
    others = [logger for logger in loggers if not _is_csv(logger)]
    root = trainer.get("default_root_dir") or "."
    own = {"class_path": _CSV, "init_args": {"save_dir": root, "name": ""}}
    return [*(csv or [own]), *others]


def with_free_version(trainer: Mapping[str, Any]) -> list[Any] | None:
    """Return the loggers with an unused version, or None if nothing changes.

    A second run with the same version would overwrite the tables of the first.
    """
    loggers = _loggers(trainer)
    options = (loggers[0].get("init_args") or {}) if loggers and _is_csv(loggers[0]) else {}
    if loggers is None or (version := options.get("version")) is None:
        return None
    name = version if isinstance(version, str) else f"version_{version}"
    folder = _checkpoint_folders({**trainer, "callbacks": None})[0]
    if not (folder / name / RUN_FILE).exists():
        return None
    free = next(f"{name}_{k}" for k in count(1) if not (folder / f"{name}_{k}").exists())
    rank_zero_info(f"{folder / name} already contains a run: using {folder / free} instead.")
    first = {**loggers[0], "init_args": {**options, "version": free}}
    return [first, *loggers[1:]]


def claim_run_folder(trainer: Any) -> None:
    """Create the run folder immediately, so that concurrent runs get different numbers.

    Loggers choose a number that no existing folder has, but create their folder later. If a command
    fails before it writes anything, the folder is removed.
    """
    if not trainer.loggers or trainer.fast_dev_run or not trainer.is_global_zero:
        return
    logger = trainer.loggers[0]
    folder = Path(logger.save_dir or trainer.default_root_dir, str(logger.name)).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".claim.lock", "starts a run", _LOCK_SECONDS, remove=True):
        claimed = run_folder(trainer).resolve()
        if not claimed.exists():
            claimed.mkdir(parents=True)
            atexit.register(_remove_if_empty, claimed)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # it is not empty, or gone
        folder.rmdir()


def newest_checkpoint(trainer: Mapping[str, Any], configs: Sequence[str]) -> str:
    """Return the newest checkpoint that `fit` saved for this config.

    Args:
        trainer: The settings of the Trainer, as plain values.
        configs: The config files; runs with other configs are ignored.
    """
    folders = _checkpoint_folders(trainer)
    wanted = _without_fragments([config_name(config) for config in configs])
    recorded = {p: _recorded_configs(p) for folder in folders for p in folder.rglob("*.ckpt")}
    # Prefer runs with the same configs. Otherwise accept the same first config or unknown configs.
    found = [p for p, own in recorded.items() if own == wanted]
    found = found or [p for p, own in recorded.items() if own is None or own[:1] == wanted[:1]]
    if not found:
        raise cli_error(
            f"No checkpoint found under {' or '.join(map(str, folders))}: "
            "run `dg-lightning fit` first, or pass one with --ckpt_path."
        )
    newest = max(found, key=lambda path: path.stat().st_mtime)
    # Prefer the last epoch, as the shipped configs do.
    last = max(
        newest.parent.glob("last*.ckpt"), key=lambda path: path.stat().st_mtime, default=None
    )
    return str(last or newest)


def config_of(checkpoint: str | Path) -> Path | None:
    """Return the path of the config.yaml in a checkpoint's run folder, or None."""
    if "://" in str(checkpoint):
        return None
    places = [folder / "config.yaml" for folder in list(Path(checkpoint).resolve().parents)[:2]]
    return next((place for place in places if place.is_file()), None)


def read_config(config: Path) -> Any:
    """Read a config.yaml as plain values, which are not trusted yet."""
    try:
        return yaml.safe_load(config.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise cli_error(f"{config} is not plain YAML ({reason}): fix the file.") from error


def data_of_run(checkpoint: str | Path) -> tuple[Any, Path] | None:
    """Return the data settings of a checkpoint's run and the path of their file, or None.

    The settings are plain values, which are not trusted yet.
    """
    if (config := config_of(checkpoint)) is None:
        return None
    whole = read_config(config)
    data: Any = whole.get("data") if isinstance(whole, dict) else None
    check_size(data, config)  # otherwise `json` might not finish
    try:
        json.dumps(data)
    except (TypeError, ValueError, RecursionError) as error:
        raise cli_error(f"`data` in {config} must be plain values ({error}): fix it.") from error
    return (data, config) if isinstance(data, dict) and "class_path" in data else None


def with_config(args: Sequence[str], values: Mapping[str, Any], checkpoint: str) -> list[str]:
    """Insert settings into a command line, right after the configs of a run.

    Later configs and options take precedence over these settings.
    """
    given: dict[str, int] = {}  # index after each config
    for index, argument in enumerate(args):
        option, equals, value = argument.partition("=")
        after = index + (1 if equals else 2)
        if option in ("--config", "-c") and after <= len(args):
            given[config_name(value if equals else args[index + 1])] = after
    recorded = _recorded_configs(Path(checkpoint))
    if recorded is None or not given.keys() >= set(recorded):  # the run was moved or copied
        recorded = list(given)
    place = max((given[name] for name in recorded), default=1)
    return [*args[:place], f"--config={json.dumps(values)}", *args[place:]]


def add_run_options(parser: ArgumentParser) -> None:
    """Add the options that select a run."""
    parser.add_argument(
        "run", type=str, nargs="?", help="Folder of a run, or path of a checkpoint."
    )
    parser.add_argument(
        "--config",
        type=str,
        action="append",
        help="Config (name or path) whose newest run is used.",
    )
    parser.add_argument("--ckpt_path", type=str, help="Path or URL of a checkpoint.")


def selected_checkpoint(given: Any) -> str:
    """Return the path of the selected checkpoint, downloading it if it is a URL."""
    chosen = [given.run, given.config, given.ckpt_path]
    if sum(value is not None for value in chosen) != 1:
        raise cli_error(
            "Name one run: pass its folder, --config (for the newest run with it) or --ckpt_path."
        )
    if given.config is not None:
        return newest_run(given.config)
    if given.run is not None:
        return checkpoint_in(given.run)
    path: str = given.ckpt_path
    return _downloaded(path) if "://" in path else path


def checkpoint_in(run: str) -> str:
    """Return the newest checkpoint in a run folder, or the given checkpoint file."""
    if Path(run).is_file():
        return run
    found = sorted(Path(run).rglob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise cli_error(f"No checkpoint found in {run!r}: pass the folder of a `fit` run.")
    return str(found[-1])


def expand_run(args: Sequence[str]) -> list[str]:
    """Add the config of the run, or of the checkpoint, that `test` and its like are given."""
    command, *rest = args
    if command not in ("validate", "test", "predict") or not rest:
        return list(args)
    named = not rest[0].startswith("-")
    checkpoint = checkpoint_in(rest[0]) if named else None
    if not named and not any(option_values(rest, "--config", "-c")):
        checkpoint = next(option_values(rest, "--ckpt_path"), None)
        if any(word.startswith(("--model", "--data=", "--data.class")) for word in rest):
            return list(args)
    if checkpoint is None or checkpoint in ("last", "null"):
        return list(args)
    config = config_of(checkpoint)
    if config is None:
        raise cli_error(f"No config.yaml found near {checkpoint!r}: pass --config and --ckpt_path.")
    check_trusted(read_config(config), config, also=["lightning.pytorch"])
    options = [f"--ckpt_path={checkpoint}", *rest[1:]] if named else rest
    return [command, f"--config={config}", *options]


def _downloaded(url: str) -> str:
    folder = tempfile.mkdtemp(prefix="dg-lightning-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    local = Path(folder, "checkpoints", "downloaded.ckpt")  # laid out as in a run
    local.parent.mkdir()
    with opened(url) as source, local.open("wb") as file:
        shutil.copyfileobj(source, file)
    return str(local)


def newest_run(configs: Sequence[str]) -> str:
    """Return the newest checkpoint for configs given by name or path, and print its path."""
    trainer: dict[str, Any] = {}
    for config in configs:
        path = config_path(config)
        content = yaml.safe_load(Path(path).read_text("utf-8"))
        if isinstance(content, dict):
            trainer |= content.get("trainer") or {}
    found = newest_checkpoint(trainer, [config_path(config) for config in configs])
    print(f"Using the newest checkpoint, {found}")
    return found


def _without_fragments(configs: Sequence[str]) -> list[str]:
    return [name for name in configs if not name.startswith(("logger/", "trainer/"))]


def _recorded_configs(checkpoint: Path) -> list[str] | None:
    """Return the configs of a checkpoint's run; None if unknown."""
    record = checkpoint.parent.parent / RUN_FILE
    try:
        content = json.loads(record.read_text("utf-8"))
        return _without_fragments(content["configs"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _loggers(trainer: Mapping[str, Any]) -> list[Any] | None:
    """Return the configured loggers; None if Lightning's default applies."""
    loggers = trainer.get("logger")
    found = loggers if isinstance(loggers, list) else [loggers]
    return found if found and all(isinstance(logger, dict) for logger in found) else None


def _is_csv(logger: Any) -> bool:
    return str(logger.get("class_path", "")).rpartition(".")[2] == "CSVLogger"


def _checkpoint_folders(trainer: Mapping[str, Any]) -> list[Path]:
    """List the folders under which a run with these settings saves checkpoints."""
    root = trainer.get("default_root_dir") or "."
    callbacks = trainer.get("callbacks") or []
    of_callbacks = [(c.get("init_args") or {}).get("dirpath") for c in callbacks]
    if chosen := [Path(folder) for folder in of_callbacks if folder]:
        return chosen
    if trainer.get("logger") is False:
        return [Path(root, "checkpoints")]
    loggers = with_csv_logger_first(trainer) or _loggers(trainer)
    if loggers is None:
        return [Path(root, "lightning_logs")]
    options = loggers[0].get("init_args") or {}
    name = options.get("name")
    return [Path(options.get("save_dir") or root, "lightning_logs" if name is None else name)]


BATCH_SIZES = [1, 32, 1024]


def check_batch_sizes(batch_sizes: list[int]) -> list[int]:
    """Return the batch sizes after validating them."""
    if not batch_sizes or min(batch_sizes) < 1:
        raise cli_error(
            f"`batch_sizes` must list one or more sizes of at least 1, got {batch_sizes}."
        )
    return batch_sizes


def load_model(path: str) -> GatedModule:
    """Load the LightningModule in a checkpoint, opening the file only once."""
    with opened(path) as file:
        saved = read_checkpoint(file, name=path).get("hyper_parameters", {})
        class_path = saved.get("_class_path")
        if not isinstance(class_path, str):
            raise cli_error(f"{path!r} is not a dg-lightning checkpoint: pass another one.")
        return import_class(class_path, GatedModule).load_from_checkpoint(file, "cpu")


def load_net(path: str) -> GatedMLP:
    """Load the net in a checkpoint, in evaluation mode and without gradients."""
    model = load_model(path)
    net = model.net
    if not isinstance(net, GatedMLP):
        raise cli_error(
            f"Only a GatedMLP is supported so far, but {path!r} contains a {type(net).__name__}."
        )
    net.eval().requires_grad_(False)
    if isinstance(model, GatedRegressor):
        rescale_outputs(model, path)
    return net


@torch.no_grad()
def rescale_outputs(model: GatedRegressor, path: str) -> None:
    """Rescale the outputs of a regressor's net to the units of its target."""
    net = model.net
    if not isinstance(net, GatedMLP):
        raise cli_error(
            f"A regressor needs a GatedMLP for this, but {path!r} contains a {type(net).__name__}."
        )
    net.output.weight.mul_(model.target_std)
    net.output.bias.mul_(model.target_std).add_(model.target_mean)


@torch.inference_mode()
def scores(
    runs: Sequence[Callable[[Tensor], Tensor]], data: Iterable[tuple[Tensor, Tensor]]
) -> tuple[str, list[float]]:
    """Return a metric's name and its value for each run: accuracy, or R² for one output."""
    wanted, given = [], []
    for x, target in data:
        wanted.append(target)
        given.append([run(x) for run in runs])
    target, outputs = torch.cat(wanted), [torch.cat(of) for of in zip(*given, strict=True)]
    if outputs[0].shape[-1] == 1:
        target, mean = target.double(), target.double().mean()  # keeps sums of squares exact
        values = [output.squeeze(-1).double() - mean for output in outputs]
        return "R²", [float(r2_score(value, target - mean)) for value in values]
    return "accuracy", [float((out.argmax(-1) == target).double().mean()) for out in outputs]


def load_data(
    path: str, root: str | None, *, needed_by: str | None = None
) -> pl.LightningDataModule | None:
    """Load the data of a checkpoint's run from the config in the run folder.

    Returns None if the data is not available, unless an option (`needed_by`) requires it.
    """
    found = data_of_run(path)
    if found is None:
        if needed_by is not None:
            raise cli_error(
                f"`{needed_by}` needs the run's data, but no config.yaml near {path!r} describes "
                "it: pass a checkpoint inside its run folder."
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
            raise cli_error(
                f"The run's data cannot be read ({reason}): pass its location with --data_root."
            ) from error
        print(f"The run's data cannot be read ({reason}).")
        return None
    return data


def _move(arguments: dict[str, Any], root: str) -> None:
    """Point the data arguments to `root`, which is the data or a folder that contains it."""
    if not Path(root).is_file():
        arguments["root"] = root
    for key in ("path", "folder"):
        if old := arguments.get(key):
            places = Path(root) / old, Path(root) / Path(old).name, Path(root)
            arguments[key] = next((str(place) for place in places if place.exists()), old)


def has_part(data: pl.LightningDataModule, part: str) -> bool:
    """Return True if the validation or test split has samples."""
    try:
        return next(batches(data, part), None) is not None
    except MisconfigurationException:  # no such dataloader
        return False


def load_inputs(path: str, count: int, root: str | None = None) -> Tensor:
    """Return validation inputs from a checkpoint's run, or random inputs if it has no data."""
    data = load_data(path, root)
    if data is None:
        print("Using random inputs.")
        return torch.randn(count, load_net(path).in_features)
    found = torch.cat([x for x, _ in batches(data, "validate")]).flatten(1)
    return found.repeat(-(-count // len(found)), 1)[:count]


def batches(data: pl.LightningDataModule, part: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the inputs and labels of the validation or test split."""
    loader = data.val_dataloader() if part == "validate" else data.test_dataloader()
    for x, target, *_ in loader:
        yield x, target
