"""Compact models in files: weights as safetensors, and a recipe of what has changed beside them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dg_lightning.files import replacing, write_text
from dg_lightning.surgery.compaction import Compact, explain_shape_errors

__all__ = ["load_compact", "save_compact"]

_FORMAT = "dg_lightning compact model, version 1"


def save_compact(result: Compact, path: str | Path) -> None:
    """Write the weights of a compact model to `path`, and its recipe beside it.

    The recipe, `<path>.json`, holds every number of a module that is not what the model's
    constructor makes it, such as the heads of an attention.
    """
    from safetensors.torch import save_model

    path = Path(path)
    recipe = {"format": _FORMAT, "attributes": result.attributes, "units": result.units}
    with replacing(path) as unfinished:
        save_model(result.model, str(unfinished))
    write_text(_recipe(path), json.dumps(recipe, indent=1))


def load_compact(build: Callable[[], nn.Module], path: str | Path) -> nn.Module:
    """Return a compact model from its files.

    Args:
        build: Makes the model as it was before gates were put in, for example its constructor.
        path: The file that `save_compact` has written.

    Raises:
        ValueError: If the files do not fit what `build` makes.
    """
    from safetensors import safe_open

    path = Path(path)
    recipe: dict[str, Any] = json.loads(_recipe(path).read_text(encoding="utf-8"))
    if recipe.get("format") != _FORMAT:
        raise ValueError(f"{_recipe(path)} is not the recipe of a compact model.")
    model = build()
    for full, number in recipe["attributes"].items():
        name, _, key = full.rpartition(".")
        setattr(_submodule(model, name, path), key, number)
    loaded = set()
    with safe_open(str(path), framework="pt") as file, torch.no_grad():
        for full in file.keys():  # noqa: SIM118, it is no dict
            name, _, key = full.rpartition(".")
            module = _submodule(model, name, path)
            tensor, old = file.get_tensor(full), getattr(module, key, None)
            if not isinstance(old, torch.Tensor):
                raise ValueError(f"{path} has a {full}, which {type(model).__name__} lacks.")
            if old.shape != tensor.shape:
                new = torch.empty_like(tensor, dtype=old.dtype, device=old.device)
                is_parameter = isinstance(old, nn.Parameter)
                old = nn.Parameter(new, old.requires_grad) if is_parameter else new
                setattr(module, key, old)
            old.copy_(tensor)
            loaded.add(id(old))
    saved = model.state_dict().keys()
    for full, tensor in [*model.named_parameters(), *model.named_buffers()]:  # tied ones once
        if full in saved and id(tensor) not in loaded:
            raise ValueError(f"{path} lacks {full}, which {type(model).__name__} has.")
    explain_shape_errors(model)
    return model


def _recipe(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _submodule(model: nn.Module, name: str, path: Path) -> nn.Module:
    found: nn.Module | None = dict(model.named_modules()).get(name)
    if found is None:
        raise ValueError(
            f"{path} has a {name}, which {type(model).__name__} lacks: let `build` make the model "
            "that gates were put into."
        )
    return found
