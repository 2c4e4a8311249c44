"""Drift of the inputs of a trained net, seen by its gates."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from dg_lightning.continual.drift import DriftDetector, DriftReport, OpenCounts, Opened, opened_in
from dg_lightning.files import write_csv
from dg_lightning.monitoring import run_folder

__all__ = ["GateDrift"]


class GateDrift(pl.Callback):
    """Compares what gates open in `test` and `predict` with the validation part of the training.

    No labels are needed. Every validation of a training gives the reference, of its first loader,
    which is saved in checkpoints; those right after a validation fit it. Rates are compared by
    unit, and by the predicted class if steps call the module as `self(x)` and get class logits.
    `predict` prints what was found and writes `drift.csv` into the folder of the run; so does
    `test`, which logs it, too. See `DriftDetector` for a few lines of Python that do the same in a
    service.

    | logged key | meaning |
    |---|---|
    | `drift/score/<gate>` | how far off open rates are: about 1 without drift |
    | `drift/p` | probability of rates so far off without drift |

    >>> GateDrift().report is None  # of the last test or prediction
    True
    """

    def __init__(self) -> None:
        self.report: DriftReport | None = None
        self.reference: dict[str, Opened] = {}  # by gate
        self.step = 0  # of the training, when it was made
        self._forget()

    def _forget(self) -> None:
        self._detector: DriftDetector | None = None
        self._counts: dict[str, OpenCounts] = {}
        self._output: Any = None  # of the last pass of the module
        self._handle: Any = None
        self._loaded_step: int | None = None  # of the checkpoint

    @override
    def setup(self, trainer: Any, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.reference = {}
        if any(isinstance(c, StochasticWeightAveraging) for c in trainer.callbacks):
            raise ValueError(
                "GateDrift would compare with other weights than those that "
                "StochasticWeightAveraging leaves: leave one of them out, or use EMA."
            )
        self._handle = pl_module.register_forward_hook(self._keep)

    def _keep(self, module: Any, args: Any, output: Any) -> None:
        # Not what a step returns: DDP calls it as if it were `forward`.
        if not module.training and isinstance(output, Tensor) and output.ndim == 2:
            self._output = output.detach()

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn in ("test", "predict") and not self.reference:
            raise ValueError(
                "GateDrift has no reference: give the checkpoint of a training with this callback "
                "(`ckpt_path`), or the callback itself."
            )
        self._detector = DriftDetector(pl_module)
        if trainer.state.fn != "fit":
            self._detector.reference = self.reference
            if self._loaded_step is not None:
                self._warn_of(self._loaded_step)
        self.report, self._counts = None, {}

    on_validation_epoch_start = on_test_epoch_start = on_predict_epoch_start = _begin

    def _begin_batch(self, *args: Any, **kwargs: Any) -> None:
        assert self._detector is not None
        self._output = None
        self._detector.forget()

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _begin_batch

    def _count(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        assert self._detector is not None
        if dataloader_idx == 0 or trainer.state.fn != "fit":
            self._detector.count(self._counts, self._output)

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _count

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.reference, self.step = opened_in(self._counts), trainer.global_step

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._warn_of(trainer.global_step)

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._loaded_step = checkpoint["global_step"]

    def _warn_of(self, step: int) -> None:
        if self.reference and step != self.step:
            rank_zero_warn(
                f"The reference of GateDrift is of step {self.step}, the weights are of step "
                f"{step}: what has been learned between looks like drift; end with a validation."
            )

    def _compare(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> DriftReport:
        assert self._detector is not None
        self.report = report = self._detector.report(opened_in(self._counts))
        rank_zero_info(f"GateDrift: {report}.")
        folder = run_folder(trainer)  # which processes agree on
        if trainer.is_global_zero:
            rows = [("gate", *item) for item in report.by_layer.items()]
            rows += [("class", str(name), score) for name, score in report.by_class.items()]
            write_csv(folder / "drift.csv", [("kind", "name", "score"), *rows])
        return report

    @override
    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        report = self._compare(trainer, pl_module)
        for name, score in report.by_layer.items():
            pl_module.log(f"drift/score/{name}", score)
        pl_module.log("drift/p", report.p)

    @override
    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._compare(trainer, pl_module)

    @override
    def state_dict(self) -> dict[str, Any]:
        reference = {name: list(opened) for name, opened in self.reference.items()}
        return {"reference": reference, "step": self.step}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        reference = state_dict["reference"]
        self.reference = {name: Opened(*opened) for name, opened in reference.items()}
        self.step = state_dict["step"]

    @override
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_detector": None, "_counts": {}, "_output": None, "_handle": None}
