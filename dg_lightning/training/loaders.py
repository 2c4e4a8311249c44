"""Random generators of torch loaders."""

from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

__all__ = ["loader_generators"]


def loader_generators(loaders: Any) -> list[torch.Generator]:
    """Return the generators that torch loaders and their samplers were given, each once."""
    found: list[torch.Generator] = []
    for loader in CombinedLoader([] if loaders is None else loaders).flattened:
        if isinstance(loader, DataLoader):
            inner = getattr(loader.batch_sampler, "sampler", None)
            for holder in (loader, loader.sampler, loader.batch_sampler, inner):
                generator = getattr(holder, "generator", None)
                if isinstance(generator, torch.Generator) and generator not in found:
                    found.append(generator)
    return found
