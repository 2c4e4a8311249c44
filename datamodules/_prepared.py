"""Sample preparation as part of the checkpoint."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

import lightning.pytorch as pl
from typing_extensions import override

from dg_lightning.training.checkpoint import checked

from ._part import Part

__all__ = ["PreparedData"]


class PreparedData(pl.LightningDataModule):
    """A DataModule that saves classes, input shape and scaling in the checkpoint."""

    _parts: dict[str, Part]

    @property
    @abstractmethod
    def class_names(self) -> tuple[str, ...]:
        """Class names, in label order."""

    @property
    @abstractmethod
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""

    @abstractmethod
    def part_to_predict(self) -> Part:
        """Return the samples for `predict`, in dataset order."""

    def preparation(self) -> dict[str, Any]:
        """Return the class names, input shape and scaling as plain values."""
        scaling: dict[str, Any] = getattr(self.part_to_predict().prepare, "plain", dict)()
        names, shape = list(self.class_names), list(self.input_shape)
        return {"class_names": names, "input_shape": shape, **scaling}

    def use_preparation(self, preparation: Mapping[str, Any]) -> None:
        """Prepare samples as in training; raise ValueError if this is impossible.

        Args:
            preparation: From a trained model (`GatedClassifier.preparation`) or another DataModule.
        """
        for name in ("class_names", "input_shape"):
            trained, here = list(preparation.get(name) or ()), list(getattr(self, name))
            if trained and trained != here:
                raise ValueError(
                    f"The checkpoint was trained with {name} {_abbreviate(trained)}, "
                    f"{type(self).__name__} has {_abbreviate(here)}: give the data of its training."
                )

    @classmethod
    @override
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | IO[bytes],
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Return the DataModule of a checkpoint, see `dg_lightning.trust`.

        With `weights_only=False` nothing is checked: reading such a file may run any code.
        """
        if weights_only is False:
            return super().load_from_checkpoint(
                checkpoint_path, map_location, hparams_file, False, **kwargs
            )
        with checked(cls, checkpoint_path, hparams_file) as (file, _, hparams):
            return super().load_from_checkpoint(
                file, map_location, weights_only=True, **(hparams | kwargs)
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"preparation": self.preparation()} if self._parts else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if isinstance(state_dict.get("preparation"), dict):
            self.use_preparation(state_dict["preparation"])

    def describe_samples(self) -> dict[str, Sequence[Any]]:
        """Return the columns of `predictions.csv` that describe the samples of `predict`.

        The first column identifies the sample; `true_label` is empty where unknown.
        """
        part = self.part_to_predict()
        names = [self.class_names[label] for label in part.labels.tolist()]
        return {"index": range(len(part)), "true_label": names, "part": ["test"] * len(part)}


def _abbreviate(values: list[Any]) -> str:
    return f"[{', '.join(map(str, values[:6]))}{', ...' * (len(values) > 6)}]"
