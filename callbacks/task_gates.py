"""Learn a gate for each task and protect what finished tasks have learned."""

from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from dg_lightning.arguments import checked
from dg_lightning.continual import Protection, TaskData, task_data
from dg_lightning.continual.protection import GatesByTask
from dg_lightning.continual.tasks import Heads, least_uncertain, task_progress
from dg_lightning.gates import set_temperature, shared_state
from dg_lightning.training import log_step
from dg_lightning.training.averaging import check_no_running_state


class TaskGates(pl.Callback):
    """Learns static gates for each task and protects what finished tasks use.

    The gates learn the current task and harden as their temperature falls. When a task is finished,
    its gates are saved, and all weights between the units that it opens are protected: no gradient
    reaches these weights and no optimizer changes them. From then on, the task's outputs stay
    bit-for-bit identical. Later tasks may use the protected units and train the remaining weights.
    Parameters without a gate (norms, embeddings, ungated linear layers) are protected after the
    first task. If tasks have different classes, the logits are restricted to the classes of the
    task, as with `TaskHeads`.

    If the data provides the task of each batch, an evaluation uses the gates of that task.
    Otherwise, and always in `predict`, the net runs once with the gates of each task learned so
    far, and each sample gets the output with the lowest entropy. Steps must then call the
    LightningModule as `self(x)`. In a test, `compute/macs` counts all these passes (`tasks/passes`
    per sample), and `compute/macs_share` compares them with as many passes through the dense net.

    Args:
        weight: Weight of a penalty on the mean p of units that are still free. The penalty leaves
            some units for later tasks.
        start: Temperature at the start of a task, relative to the gates' initial temperature.
        end: Temperature at the end of a task, relative to the gates' initial temperature.
        head: Name of the linear layer that computes the logits, for tasks with different classes
            (default: the last one).

    | logged key | meaning |
    |---|---|
    | `tasks/units_used` | share of gated units that finished tasks use |
    | `tasks/weights_protected` | share of weights that finished tasks use |
    | `tasks/passes` | forward passes per sample in an evaluation |

    >>> TaskGates(weight=0.5).weight
    0.5
    """

    @checked
    def __init__(
        self,
        weight: float = 0.5,
        start: float = 1.0,
        end: float = 0.02,
        head: str | None = None,
    ) -> None:
        for name, value in (("start", start), ("end", end)):
            if value <= 0:
                raise ValueError(f"`{name}` must be above 0, got {value}.")
        if weight < 0:
            raise ValueError(f"`weight` must be at least 0, got {weight}.")
        self.weight = weight
        self.start, self.end = start, end
        self.head = head
        self.finished: list[dict[str, Tensor]] = []  # for each task, the open blocks by gate
        self._temperatures: dict[str, float] = {}  # initial temperatures of the gates
        self._knows_tasks = False
        self._forget()

    def _forget(self) -> None:
        self._data: TaskData | None = None
        self._by_task: GatesByTask | None = None
        self._heads: Heads | None = None
        self._protection: Protection | None = None
        self._figures = {"tasks/units_used": 0.0, "tasks/weights_protected": 0.0}
        self._handles: dict[Any, Any] = {}
        self._calls: list[bool] = []  # for each running call: whether it called the module again

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._data = task_data(trainer, self)
        if stage == "fit":
            self.finished, self._temperatures = [], {}
            self._knows_tasks = True
        if not self._data.tells_task or stage == "predict":
            self._handles["before"] = pl_module.register_forward_pre_hook(self._enter)
            choose = pl_module.register_forward_hook(self._choose_task, with_kwargs=True)
            self._handles["after"] = choose

    def _find_gates(self, pl_module: pl.LightningModule) -> GatesByTask:
        if self._by_task is None:
            assert self._data is not None
            self._by_task = GatesByTask(pl_module, self.finished)
            self._heads = Heads(pl_module, self._data, self.head)
        return self._by_task

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        gates = self._find_gates(pl_module).gates
        if not self._temperatures:  # already known in a resumed run
            self._temperatures = {name: float(gate.temperature) for name, gate in gates.items()}

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._heads is not None
        check_no_running_state(pl_module, trainer, self)
        self._protection = Protection(pl_module, self._heads.map)
        for task in range(len(self.finished)):
            self._protect(task)

    def _protect(self, task: int) -> None:
        assert self._data is not None
        assert self._by_task is not None
        assert self._protection is not None
        opened = self._by_task.opened(task)
        self._protection.add(lambda gate: opened[gate], self._data.classes_of(task))
        used, protected = self._by_task.units_used(), self._protection.share()
        self._figures = {"tasks/units_used": used, "tasks/weights_protected": protected}

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._data is not None
        while len(self.finished) < self._data.current_task:
            self._finish(trainer)

    def _finish(self, trainer: pl.Trainer) -> None:
        """Save the gates of the current task and start the next one."""
        assert self._by_task is not None
        assert self._protection is not None
        self._by_task.finish()
        task = len(self.finished)
        self._protect(task - 1)
        for optimizer in trainer.optimizers:
            self._protection.reset_state(optimizer)
        self._set_temperatures(trainer, 1.0)
        self._by_task.start(trainer.optimizers)
        for name in self._by_task.gates:
            if not self._by_task.free(name).any():
                rank_zero_warn(
                    f"{name} has no free unit left for task {task}, which can only reuse what "
                    "earlier tasks learned: raise `weight`, or make the layer wider."
                )
        units, weights = self._figures.values()
        rank_zero_info(
            f"TaskGates: finished tasks ({task} so far) use {units:.1%} of the units and "
            f"{weights:.1%} of the weights."
        )

    def _set_temperatures(self, trainer: pl.Trainer, factor: float) -> None:
        assert self._by_task is not None
        for name, gate in self._by_task.gates.items():
            set_temperature(gate, shared_state(trainer, gate), factor * self._temperatures[name])

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self._data is not None
        self.use(len(self.finished))
        progress = task_progress(trainer, self._data, batch_idx)
        self._set_temperatures(trainer, self.start * (self.end / self.start) ** progress)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        assert self._by_task is not None
        assert self._protection is not None
        self._protection.before_step(optimizer)
        self._by_task.press(self.weight, optimizer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        log_step(pl_module, self._figures)

    def use(self, task: int) -> None:
        """Use the gates and classes of a finished task or of the current one."""
        assert self._data is not None
        assert self._by_task is not None
        assert self._heads is not None
        self._by_task.use(task)
        self._heads.classes = self._data.classes_of(task)

    def _enter(self, *_: Any) -> None:
        self._calls.append(False)

    def _choose_task(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], logits: Any
    ) -> Any:
        """Return the output of the least uncertain task for each sample."""
        around_another = self._calls.pop()  # DDP runs a step inside a call of the module
        if self._calls:
            self._calls[-1] = True
        if module.training or around_another:
            return logits
        if not isinstance(logits, Tensor):
            raise TypeError(
                "TaskGates needs the class logits to choose a task: `forward` must return them as "
                f"a tensor, got {type(logits).__name__}."
            )
        outputs = []
        for task in range(len(self.finished)):
            self.use(task)
            outputs.append(module.forward(*args, **kwargs))
        self.use(len(self.finished))
        return least_uncertain([*outputs, logits])

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._knows_tasks:
            raise ValueError(
                "TaskGates has not learned any task: pass a checkpoint (`ckpt_path`), or reuse "
                "the callback from the training run."
            )
        self._find_gates(pl_module)
        self.use(len(self.finished))

    on_validation_start = on_test_start = on_predict_start = _begin

    @override
    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        assert self._data is not None
        if self._data.tells_task:
            self.use(self._data.task_of("test" if trainer.testing else "val", batch_idx))

    on_test_batch_start = on_validation_batch_start

    def _end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._data is not None
        self.use(len(self.finished))
        if not trainer.predicting:
            passes = 1 if self._data.tells_task else len(self.finished) + 1
            pl_module.log("tasks/passes", float(passes))

    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = _end

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"finished": self.finished, "temperatures": self._temperatures}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._knows_tasks = True
        self.finished = list(state_dict["finished"])
        self._temperatures = dict(state_dict["temperatures"])

    @override
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for handle in self._handles.values():
            handle.remove()
        if self._by_task is not None:
            self._by_task.use(len(self.finished))  # in case an evaluation was interrupted
        if self._protection is not None:
            self._protection.end()
        if self._heads is not None:
            self._heads.remove()
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        own: dict[str, Any] = {"_handles": {}, "_calls": []}
        own |= dict.fromkeys(("_data", "_by_task", "_heads", "_protection"))
        return {**self.__dict__, **own}
