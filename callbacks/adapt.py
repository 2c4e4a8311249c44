"""Adapt a trained net to drift by training only some of its weights."""

from typing import Any, Literal, TypeAlias

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from dg_lightning.arguments import checked, renamed
from dg_lightning.collapse import open_shares
from dg_lightning.continual import AccuracyMatrix, Protection, TaskData, task_data
from dg_lightning.continual.tasks import logits_of
from dg_lightning.gates import gate_layers
from dg_lightning.gates.protocol import GateLike, deployed_gate
from dg_lightning.training.averaging import check_no_running_state

from ._shared import mean_over_ranks

Train: TypeAlias = Literal["nothing", "gates", "inactive", "both", "all"]
_COMPARED = 8  # number of batches whose gate decisions are compared
_MIN_COST = 0.01  # smallest drift cost for which recovery is logged
_NOT_MEASURED = -1.0  # replaces NaN in checkpoints, so that they compare equal


class Adapt(pl.Callback):
    """Adapts a trained net to drift and logs the gain and the cost.

    The net is first trained as usual on the first task of a sequence. Then only the weights
    selected by `train` are trained, on `batches` labelled batches from the second task (see
    `TaskSequence(kind="drift", tasks=2)`), and training ends. All other weights keep their
    values, no matter which optimizer is used. Training on the first task does not depend on
    `train`, so runs with the same seed adapt the same net. All tasks must be validated after every
    epoch.

    Args:
        train: What to adapt: `nothing`, `gates`, `inactive` (weights to and from units that are
            rarely open), `both` (gates and inactive weights) or `all` (including gates).
        batches: Number of batches from the second task to train on.
        inactive: A unit is inactive if less than this share of the samples opened it in the last
            epoch before the drift.

    | logged key | meaning |
    |---|---|
    | `adapt/drift_cost` | accuracy lost to the drift |
    | `adapt/recovery` | share of that accuracy regained, logged if at least one point was lost |
    | `adapt/clean_loss` | accuracy lost on the first task |
    | `adapt/gate_flips` | share of gate decisions that changed, on the same drifted samples |
    | `adapt/weights_free` | share of weights that may adapt |

    All values are measured on the validation split, and a test logs them again. `validation_step`
    must return the class logits, as a tensor or under the key `logits`, and labels must be the
    second item of the batch. A run that is resumed after the drift logs no gate flips.

    >>> Adapt("gates", batches=100).train
    'gates'
    """

    @renamed(what="train")
    @checked
    def __init__(self, train: Train = "both", batches: int = 200, inactive: float = 0.3) -> None:
        if batches < 1:
            raise ValueError(f"`batches` must be at least 1, got {batches}.")
        if not 0 < inactive <= 1:
            raise ValueError(f"`inactive` must be above 0 and at most 1, got {inactive}.")
        self.train = train
        self.batches = batches
        self.inactive = inactive
        self._forget()
        self._reset()

    def _reset(self) -> None:
        self.done = 0  # batches trained on since the drift
        self.rates = torch.empty(0)  # mean share of samples that open each block, before the drift
        self._epoch = (torch.zeros(()), 0)  # (sum of shares, number of batches) in this epoch
        self.accuracy = torch.full((2, 2), torch.nan).double()  # (before or after adapting, task)
        self.figures: dict[str, float] = {}  # logged key -> value

    def _forget(self) -> None:
        self._data: TaskData | None = None
        self._gates: dict[str, GateLike] = {}
        self._protection: Protection | None = None
        self._counts = AccuracyMatrix(2)  # accuracy in the current validation
        self._buffers: dict[str, Tensor] = {}  # module buffers when adaptation begins
        self._decisions: dict[int, Tensor] = {}  # batch index -> gates before adaptation
        self._flips: list[Tensor] = []

    @property
    def _adapts(self) -> bool:
        return self._data is not None and self._data.current_task > 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._data = task_data(trainer, self)
        if self._data.tasks != 2:
            raise ValueError(
                f"Adapt needs a sequence of two tasks, got {self._data.tasks}: use `tasks: 2`."
            )
        self._reset()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.train != "all":
            check_no_running_state(pl_module, trainer, self)
        if (trainer.check_val_every_n_epoch, trainer.val_check_interval) != (1, 1.0):
            raise ValueError(
                "Adapt needs validation after every epoch: leave `check_val_every_n_epoch` and "
                "`val_check_interval` at their defaults."
            )
        needed = self.train not in ("nothing", "all")
        self._gates = gate_layers(pl_module, required=needed)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._adapts:
            self._epoch = (torch.zeros(()), 0)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._adapts and self._protection is None:
            self._begin(trainer, pl_module)

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        shares, batches = self._epoch
        if self.accuracy[0].isnan().any() or (self._gates and not batches):
            raise ValueError(
                "Adapt needs one epoch and a validation on both tasks before the drift: use it "
                "from the start of training, with data that evaluates all tasks."
            )
        if not len(self.rates) and self._gates:  # already known in a resumed run
            self.rates = mean_over_ranks(trainer, shares / batches).cpu()
        self._buffers = {name: buffer.clone() for name, buffer in pl_module.named_buffers()}
        with_gates = self.train in ("nothing", "inactive")
        self._protection = Protection(pl_module, with_gates=with_gates)
        if self.train == "all":
            return
        active: dict[GateLike, Tensor] = {}
        if self.train in ("inactive", "both"):
            gates = list(self._gates.values())
            sizes = [gate.units // gate.block_size for gate in gates]
            often = (self.rates >= self.inactive).split(sizes)
            active = dict(zip(gates, often, strict=True))
            if all(opened.all() for opened in often):
                rank_zero_warn(
                    f"No unit is open for less than {self.inactive:.0%} of the samples, so there "
                    "are no inactive weights to adapt: raise `inactive`, or close more units."
                )
        self._protection.add(lambda gate: active.get(gate))
        for optimizer in trainer.optimizers:
            self._protection.reset_state(optimizer)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if self._protection is not None:
            self._protection.before_step(optimizer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        if self._adapts:
            self.done += 1
            trainer.should_stop = trainer.should_stop or self.done >= self.batches
        elif self._gates:
            shares, batches = self._epoch
            opened = open_shares(list(self._gates.values()))
            self._epoch = (shares.to(opened.device) + opened, batches + 1)

    @override
    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._counts = AccuracyMatrix(2).to(pl_module.device)
        self._flips = []

    @override
    def on_validation_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._data is None:
            return  # called by `trainer.validate`
        task = self._data.task_of("val", batch_idx)
        self._counts.update(int(self._adapts), task, logits_of(outputs, self), batch[1])
        if task and self._gates:
            self._compare(batch_idx)

    def _compare(self, batch_idx: int) -> None:
        now = torch.cat([deployed_gate(gate).flatten().cpu() for gate in self._gates.values()])
        if self._adapts and batch_idx in self._decisions:
            self._flips.append((now != self._decisions[batch_idx]).double().mean())
        elif not self._adapts and len(self._decisions.keys() | {batch_idx}) <= _COMPARED:
            self._decisions[batch_idx] = now

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._data is None or trainer.sanity_checking:
            return
        row = int(self._adapts)
        self.accuracy[row] = self._counts.compute().cpu()[row]
        if not self._adapts or self._protection is None:
            return
        (clean, drifted), (clean_now, drifted_now) = self.accuracy.tolist()
        self.figures = {
            "adapt/drift_cost": clean - drifted,
            "adapt/clean_loss": clean - clean_now,
            "adapt/weights_free": 1 - self._protection.share(),
        }
        if clean - drifted >= _MIN_COST:
            self.figures["adapt/recovery"] = (drifted_now - drifted) / (clean - drifted)
        if self._flips:
            flips = torch.stack(self._flips).mean().to(pl_module.device)
            self.figures["adapt/gate_flips"] = float(mean_over_ranks(trainer, flips))
        self._log(pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._protection is None:
            return
        if self.done != self.batches:
            rank_zero_warn(
                f"Adapt trained on {self.done} batches instead of {self.batches}: "
                "increase `max_epochs`, and leave out `min_epochs` and `min_steps`."
            )
        buffers = dict(pl_module.named_buffers())
        moved = [n for n, before in self._buffers.items() if not torch.equal(buffers[n], before)]
        if self.train != "all" and (moved or self._protection.moved()):
            rank_zero_warn(
                f"{', '.join(moved) or 'Weights'} changed although Adapt protects them: remove "
                "callbacks that change them, such as gate schedules and budgets."
            )

    @override
    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._log(pl_module)

    def _log(self, pl_module: pl.LightningModule) -> None:
        for key, value in self.figures.items():
            pl_module.log(key, value)

    @override
    def state_dict(self) -> dict[str, Any]:
        shares, batches = self._epoch
        before = self.accuracy[0].nan_to_num(_NOT_MEASURED)
        return {
            "done": self.done,
            "rates": self.rates,
            "shares": shares,
            "batches": batches,
            "before": before,
            "figures": self.figures,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.done, self.rates = state_dict["done"], state_dict["rates"]
        self._epoch = (state_dict["shares"], state_dict["batches"])
        before = state_dict["before"]
        self.accuracy[0] = torch.where(before == _NOT_MEASURED, torch.nan, before)
        self.figures = dict(state_dict["figures"])

    @override
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._protection is not None:
            self._protection.end()
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        own: dict[str, Any] = {"_data": None, "_protection": None, "_gates": {}}
        return {**self.__dict__, **own, "_buffers": {}, "_decisions": {}, "_flips": []}
