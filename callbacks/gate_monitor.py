"""Log gate activity to any logger: open rates, histograms, heat maps, per-class rates."""

from functools import cached_property
from typing import Any, Literal

import lightning.pytorch as pl
from typing_extensions import override

from dg_lightning.arguments import checked
from dg_lightning.collapse import unit_rates
from dg_lightning.gates import GateLike, gate_layers
from dg_lightning.monitoring import GateTables, define_metrics, run_folder
from dg_lightning.monitoring.activity import GateHistory, HistoryEntry, Snapshot
from dg_lightning.monitoring.views import (
    is_writing_rank,
    log_scalar,
    publish_evaluation,
    send_pictures,
    send_tables,
    write_files,
)
from dg_lightning.training import is_logged_step, log_step, logged_step

from ._shared import DeferredStateCallback, mean_over_ranks, state_key

# Columns of layers.csv by logged key.
_LOGGED_COLUMNS = {"open_rate": "open_rate_g", "mean_probability": "open_rate_p", "churn": "churn"}


class GateMonitor(DeferredStateCallback):
    """Logs the activity of hard gates during validation and testing.

    Scalars go to every logger. Loggers that support pictures and tables get these every
    `every_n_epochs` epochs and at the end of training. The pictures show units over time and by
    class, the histogram of p, and input gates as the image or feature list that they gate. A test
    logs pictures and tables under `gates_test`. The same data is written as CSV files (see
    `GateTables`) to the run's `gates` folder, which `dg-lightning report` reads. If there is no
    validation, the gates are monitored in the training steps that are logged.

    Per-class rates need labels as the second item of the batch. The hardness correlation also
    needs `validation_step` to return the class logits, as a tensor or under the key `logits`.

    Args:
        every_n_epochs: Epochs between pictures and tables sent to loggers. 0 disables them.
        stage: Stage of `fit` to monitor (default: validation if there is one, otherwise training).
        files: Whether to write CSV files.
        layers: Name patterns of the gates (default: all).

    | logged key | meaning |
    |---|---|
    | `gates/open_rate` | share of units that are open, over all gates |
    | `gates/open_rate/<layer>` | share of samples that open a unit, averaged over units |
    | `gates/mean_probability/<layer>` | mean p |
    | `gates/churn/<layer>` | mean change in a unit's open rate since the last snapshot |
    | `gates/active_ratio` | share of units that are open, over input-dependent gates |
    | `gates/hardness_correlation` | correlation of activity with 1 - largest class probability |
    | `compute/...` | compute ledger, for modules that do not log one |
    | `gates/pictures`, `gates/layers`, `gates/units`, `collapse/verdicts` | pictures and tables |

    >>> GateMonitor(every_n_epochs=5).every_n_epochs
    5
    """

    @checked
    def __init__(
        self,
        every_n_epochs: int = 10,
        stage: Literal["validation", "train"] | None = None,
        files: bool = True,
        layers: list[str] | None = None,
    ) -> None:
        if every_n_epochs < 0:
            raise ValueError(f"`every_n_epochs` must be at least 0, got {every_n_epochs}.")
        self.every_n_epochs = every_n_epochs
        self.stage = stage
        self.files = files
        self.layers = layers
        self._gates: dict[str, GateLike] = {}
        self._monitors_training = False
        self._reset()

    def _reset(self) -> None:
        self.history = GateHistory()
        self._rows: list[dict[str, Any]] = []  # rows of layers.csv
        self._snapshot = Snapshot(self._gates)
        self._last_snapshot = self._snapshot  # last complete snapshot
        self._tables: GateTables | None = None
        self._outcome = "skipped"  # last return value of `history.add`
        self._last_picture_epoch: int | None = None

    @cached_property  # Lightning reads it in every hook of every step
    @override
    def state_key(self) -> str:
        return state_key(self, layers=self.layers)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if sum(type(other) is type(self) for other in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError("Two GateMonitors would write the same keys and files: use only one.")
        self._tables = None  # each run has its own folder
        if is_writing_rank(trainer):
            for logger in trainer.loggers:
                define_metrics(logger)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        gates = gate_layers(pl_module, self.layers)
        if trainer.global_step == 0 or gates != self._gates:
            self._reset()
        self._gates = gates

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        has_validation = trainer.enable_validation
        if self.stage == "validation" and not has_validation:
            raise ValueError(
                "`stage='validation'` needs a validation, but this run has none: leave `stage` out."
            )
        self._monitors_training = self.stage == "train" or not has_validation
        self._snapshot = Snapshot(self._gates, self._monitors_training)

    def _log_snapshot(self, trainer: Any, pl_module: Any) -> None:
        snapshot = self._last_snapshot = self._snapshot
        snapshot.compute()
        if not snapshot.results:
            return
        epoch, step = trainer.current_epoch, logged_step(trainer)
        is_fit = trainer.state.fn == "fit"
        # Churn is only defined within a training run.
        rows = snapshot.layer_rows(epoch, step, self.history if is_fit else GateHistory())
        for row in rows:
            for key, column in _LOGGED_COLUMNS.items():
                if row[column] is not None:
                    log_scalar(pl_module, f"gates/{key}/{row['layer']}", row[column])
        for key, value in snapshot.totals(pl_module).items():
            log_scalar(pl_module, key, value, prog_bar=key == "gates/open_rate")
        if is_fit:
            self._outcome = self.history.add(HistoryEntry.from_gates(epoch, step, snapshot.results))
            self._rows += rows

    def _publish(self, trainer: Any) -> None:
        snapshot = self._last_snapshot
        if not snapshot.results:
            return
        is_fit = trainer.state.fn == "fit"
        # Every rank decides, so that the callback's state is the same on all ranks.
        due = is_fit and self._check_picture_due(trainer.current_epoch)
        if not is_writing_rank(trainer):
            return
        if not is_fit:
            publish_evaluation(trainer, snapshot, self.files, bool(self.every_n_epochs))
            return
        if self.files:
            self._write_tables(trainer, snapshot)
        if due:
            self._send_media(trainer)

    def _check_picture_due(self, epoch: int) -> bool:
        since = -1 if self._last_picture_epoch is None else self._last_picture_epoch
        due = bool(self.every_n_epochs) and epoch - since >= self.every_n_epochs
        if due:
            self._last_picture_epoch = epoch
        return due

    def _write_tables(self, trainer: Any, snapshot: Snapshot) -> None:
        history, new_rows = self.history, self._rows[-len(snapshot.results) :]
        assert history.last is not None
        if self._tables is None:
            self._tables = GateTables(run_folder(trainer) / "gates")
            before = [entry for entry in history.entries if entry is not history.last]
            self._tables.begin(before, self._rows[: -len(new_rows)])
        self._tables.add_layers(new_rows)
        if self._outcome == "thinned":
            self._tables.rewrite(history.entries)
        elif self._outcome == "kept":
            self._tables.add(history.last)
        write_files(trainer, self._tables, snapshot)

    def _send_media(self, trainer: Any) -> None:
        assert self.history.last is not None
        send_pictures(trainer, "gates", self._last_snapshot, self.history)
        send_tables(trainer, "gates", self._last_snapshot, self.history.last.step, self._rows)

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._monitors_training and is_logged_step(trainer):
            self._snapshot.update(pl_module, batch)
            self._log_batch(trainer, pl_module)

    def _log_batch(self, trainer: Any, pl_module: Any) -> None:
        """Log one batch's open rates, because a run may be a single epoch."""
        gates = list(self._gates.values())
        sizes = [gate.units // gate.block_size for gate in gates]
        rates = mean_over_ranks(trainer, unit_rates(gates))
        open_rates, p, _ = rates.split([sum(sizes), sum(sizes), 3 * len(gates)])
        for key, values in (("open_rate", open_rates), ("mean_probability", p)):
            means = zip(self._gates, values.split(sizes), strict=True)
            log_step(pl_module, {f"gates/{key}/{name}": part.mean() for name, part in means})

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._monitors_training:
            self._log_snapshot(trainer, pl_module)
            self._publish(trainer)
            self._snapshot = Snapshot(self._gates, training=True)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        last = self.history.last
        if last is None or not self._last_snapshot.results or not is_writing_rank(trainer):
            return
        if self._tables is not None and self._outcome == "skipped":
            self._tables.add(last)
        if self.every_n_epochs and self._last_picture_epoch != last.epoch:
            self._send_media(trainer)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != "fit":
            # An ungated checkpoint may be tested with a config that includes this callback.
            self._gates = gate_layers(pl_module, self.layers, required=False)

    @override
    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._monitors_evaluation(trainer):
            self._snapshot = Snapshot(self._gates)

    @override
    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        if self._monitors_evaluation(trainer):
            self._snapshot.start_counting(pl_module)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._snapshot.stop_counting()

    @override
    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._monitors_evaluation(trainer):
            self._snapshot.update(pl_module, batch, outputs)

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._monitors_evaluation(trainer):
            self._log_snapshot(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._monitors_evaluation(trainer):
            self._publish(trainer)

    def _monitors_evaluation(self, trainer: Any) -> bool:
        if trainer.sanity_checking:
            return False
        return bool(self._gates) and (trainer.state.fn != "fit" or not self._monitors_training)

    # Tests are monitored like validation.
    on_test_start = on_validation_start
    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end
    on_test_end = on_validation_end

    @override
    def current_state(self) -> dict[str, Any]:
        return {
            "history": self.history.state_dict(),
            "rows": list(self._rows),
            "pictured_at": self._last_picture_epoch,
        }

    @override
    def restore(self, state: dict[str, Any]) -> None:
        self.history.load_state_dict(state["history"])
        self._rows = list(state["rows"])
        self._last_picture_epoch = state["pictured_at"]
