"""See the gates: open rates, histograms, heat maps and classes, in whatever logger there is."""

from functools import cached_property
from typing import Any, Literal

import lightning.pytorch as pl
from typing_extensions import override

from dg_lightning.dashboards import GateTables, define_metrics, run_folder
from dg_lightning.gate_activity import GateHistory, LookBack
from dg_lightning.gate_statistics import unit_rates
from dg_lightning.log_steps import log_of_step, logged_step, logs_now
from dg_lightning.protocol import GateLike, gate_layers
from dg_lightning.step_hooks import only_used_hooks

from ._agreement import mean_over_ranks
from ._gate_look import Look
from ._gate_views import log_everywhere, send_pictures, send_tables, write_files, writes_files

__all__ = ["GateMonitor"]


@only_used_hooks
class GateMonitor(pl.Callback):
    """Looks at the hard gates of every validation and test, and shows what they do.

    Scalars go to every logger. Pictures (each unit over time, by class, an input gate as the image
    or the list of features that it gates, the histogram of p) and tables go to loggers that can
    show them, every few epochs and at the end; of a test under `gates_test`. The same as CSV files,
    see `GateTables`, lies in the folder `gates` of the run, where `dg-lightning report` finds it.
    Where there is no validation, gates are looked at in training, in the steps that are logged.

    Classes need labels as the second part of a batch. The correlation with hardness also needs
    the class logits, returned from `validation_step`, as a tensor or under the key `logits`.

    Args:
        every_n_epochs: Epochs from one picture and table for loggers to the next; 0 for none.
        stage: Where a training is looked at; in validation where there is one, if None.
        files: Whether CSV files are written.
        layers: Name patterns of the gates; all when None.

    | logged key | meaning |
    |---|---|
    | `gates/open_rate` | share of open units, over all gates |
    | `gates/open_rate_g/<layer>` | mean share of samples that open a unit |
    | `gates/open_rate_p/<layer>` | mean probability |
    | `gates/churn/<layer>` | mean change of a unit's share since the last look |
    | `gates/active_ratio` | share of open units, over gates that depend on the input |
    | `gates/hardness_correlation` | of hardness (1 - largest class probability) and activity |
    | `compute/...` | the ledger, of modules that do not log it themselves |
    | `gates/pictures`, `gates/layers`, `gates/units`, `collapse/verdicts` | media |

    >>> GateMonitor(every_n_epochs=5).every_n_epochs
    5
    """

    def __init__(
        self,
        every_n_epochs: int = 10,
        stage: Literal["validation", "train"] | None = None,
        files: bool = True,
        layers: list[str] | None = None,
    ) -> None:
        if every_n_epochs < 0:
            raise ValueError(f"`every_n_epochs` must be at least 0, got {every_n_epochs}.")
        if stage not in (None, "validation", "train"):
            raise ValueError(f"`stage` must be validation or train, got {stage!r}.")
        self.every_n_epochs = every_n_epochs
        self.stage = stage
        self.files = files
        self.layers = layers
        self._gates: dict[str, GateLike] = {}
        self._in_training = False
        self._start_anew()

    def _start_anew(self) -> None:
        self.history = GateHistory()
        self._rows: list[dict[str, Any]] = []  # of layers.csv
        self._look = Look(self._gates)
        self._ended = self._look  # the last one that is complete
        self._tables: GateTables | None = None
        self._kept = "passed"  # what became of the last look
        self._pictured_at: int | None = None  # the epoch

    @cached_property  # Lightning asks for it at every hook
    @override
    def state_key(self) -> str:
        return self._generate_state_key(layers=self.layers)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # A checkpoint without gates may be tested with a config that has them.
        gates = gate_layers(pl_module, self.layers, required=stage == "fit")
        if sum(type(other) is type(self) for other in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError("Two GateMonitors would share keys and files: give one for all.")
        if stage == "fit" and (trainer.global_step == 0 or gates != self._gates):
            self._start_anew()
        self._gates = gates
        self._tables = None  # every run has a folder of its own
        if writes_files(trainer):
            for logger in trainer.loggers:
                define_metrics(logger)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        validates = trainer.enable_validation
        if self.stage == "validation" and not validates:
            raise ValueError(
                "GateMonitor is to look at the validation, and there is none: leave `stage` out."
            )
        self._in_training = self.stage == "train" or not validates
        self._look = Look(self._gates, self._in_training)

    def _end_look(self, trainer: Any, pl_module: Any) -> None:
        """Log the scalars of a look, and keep it."""
        look = self._ended = self._look
        look.end()
        if not look.found:
            return
        epoch, step = trainer.current_epoch, logged_step(trainer)
        fits = trainer.state.fn == "fit"
        # What has changed since a validation is no figure of a test.
        rows = look.rows(epoch, step, self.history if fits else GateHistory())
        for row in rows:
            for key in ("open_rate_g", "open_rate_p", "churn"):
                if row[key] is not None:
                    log_everywhere(pl_module, f"gates/{key}/{row['layer']}", row[key])
        for key, value in look.totals(pl_module).items():
            log_everywhere(pl_module, key, value, prog_bar=key == "gates/open_rate")
        if fits:
            self._kept = self.history.add(LookBack.of(epoch, step, look.found))
            self._rows += rows

    def _show(self, trainer: Any) -> None:
        """Write the files of a look, and hand pictures and tables to loggers when it is time."""
        look = self._ended
        if not look.found:
            return
        fits = trainer.state.fn == "fit"
        due = fits and self._takes_picture(trainer.current_epoch)  # on all processes alike
        if not writes_files(trainer):
            return
        if not fits:
            self._show_alone(trainer, look)
            return
        if self.files:
            self._write(trainer, look)
        if due:
            self._send(trainer)

    def _takes_picture(self, epoch: int) -> bool:
        since = -1 if self._pictured_at is None else self._pictured_at
        due = bool(self.every_n_epochs) and epoch - since >= self.every_n_epochs
        if due:
            self._pictured_at = epoch
        return due

    def _write(self, trainer: Any, look: Look) -> None:
        history, now = self.history, self._rows[-len(look.found) :]
        assert history.last is not None
        if self._tables is None:
            self._tables = GateTables(run_folder(trainer) / "gates")
            before = [kept for kept in history.looks if kept is not history.last]
            self._tables.begin(before, self._rows[: -len(now)])
        self._tables.add_layers(now)
        if self._kept == "thinned":
            self._tables.rewrite(history.looks)
        elif self._kept == "kept":
            self._tables.add(history.last)
        write_files(trainer, self._tables, look)

    def _show_alone(self, trainer: Any, look: Look) -> None:
        """Show a test, which has no history, beside what the training has shown."""
        name, history = f"gates_{trainer.state.fn.value}", GateHistory()
        epoch, step = trainer.current_epoch, logged_step(trainer)
        rows = look.rows(epoch, step, history)
        history.add(LookBack.of(epoch, step, look.found))
        if self.files:
            tables = GateTables(run_folder(trainer) / name)
            tables.begin(history.looks, rows)
            write_files(trainer, tables, look)
        if self.every_n_epochs:
            send_pictures(trainer, name, look, history)
            send_tables(trainer, name, look, step, rows)

    def _send(self, trainer: Any) -> None:
        assert self.history.last is not None
        send_pictures(trainer, "gates", self._ended, self.history)
        send_tables(trainer, "gates", self._ended, self.history.last.step, self._rows)

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._in_training and logs_now(trainer):
            self._look.add(pl_module, batch)
            self._log_batch(trainer, pl_module)

    def _log_batch(self, trainer: Any, pl_module: Any) -> None:
        """Log the open rates of one batch: an epoch may be the whole training."""
        gates = list(self._gates.values())
        sizes = [gate.units // gate.block_size for gate in gates]
        rates = mean_over_ranks(trainer, unit_rates(gates))
        opened, p, _ = rates.split([sum(sizes), sum(sizes), 3 * len(gates)])
        for name, g_of_gate, p_of_gate in zip(
            self._gates, opened.split(sizes), p.split(sizes), strict=True
        ):
            log_of_step(pl_module, f"gates/open_rate_g/{name}", g_of_gate.mean())
            log_of_step(pl_module, f"gates/open_rate_p/{name}", p_of_gate.mean())

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._in_training:
            self._end_look(trainer, pl_module)
            self._show(trainer)
            self._look = Look(self._gates, training=True)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        last = self.history.last
        if last is None or not self._ended.found or not writes_files(trainer):
            return
        if self._tables is not None and self._kept == "passed":
            self._tables.add(last)
        if self.every_n_epochs and self._pictured_at != last.epoch:
            self._send(trainer)

    @override
    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._looks_at_evaluation(trainer):
            self._look = Look(self._gates)

    @override
    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        if self._looks_at_evaluation(trainer):
            self._look.start(pl_module)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._look.stop()

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
        if self._looks_at_evaluation(trainer):
            self._look.add(pl_module, batch, outputs)

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._looks_at_evaluation(trainer):
            self._end_look(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._looks_at_evaluation(trainer):
            self._show(trainer)

    def _looks_at_evaluation(self, trainer: Any) -> bool:
        if trainer.sanity_checking:
            return False
        return bool(self._gates) and (trainer.state.fn != "fit" or not self._in_training)

    # A test is looked at in the same way.
    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end
    on_test_end = on_validation_end

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "history": self.history.state_dict(),
            "rows": list(self._rows),
            "pictured_at": self._pictured_at,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history.load_state_dict(state_dict["history"])
        self._rows = list(state_dict["rows"])
        self._pictured_at = state_dict["pictured_at"]
