"""Add gates to the model of any LightningModule."""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from dg_lightning.arguments import checked, renamed
from dg_lightning.gates.kinds import GateSettings, check_gate_settings
from dg_lightning.surgery import UnitSearchResult, add_gates
from dg_lightning.surgery.gating import gated_units
from dg_lightning.surgery.recording import check_example, first_inputs, offered_example
from dg_lightning.training.averaging import has_averages

from ._shared import named_part, state_key


class AddGates(pl.Callback):
    """Adds gates to the feed-forward units, attention heads or channels of any model.

    Gates are added once the module is complete, before its optimizers are created. List this
    callback before others, such as those that average weights. Gates need a higher learning rate
    than weights and no weight decay: use `dg_lightning.param_groups` in `configure_optimizers`.

    Args:
        feed_forward: Settings for gates on units between linear layers (`{"kind": "static"}`).
        heads: Settings for gates on attention heads. These gates must be static.
        channels: Settings for gates on channels between convolutions. These must be static.
        pairs: Pairs of linear layer names (see `add_gates`).
        layers: Name patterns of the layers that read the units (default: all).
        submodule: Name of the submodule that gets gates (default: the whole LightningModule).
        example: Example inputs for `submodule`. The default is its `example_input_array` or
            `dummy_inputs`. If it has neither, the inputs come from the first batch of the
            DataModule or of the LightningModule's loader.
        more_examples: Further examples that run other branches of the model.

    >>> AddGates(feed_forward={"kind": "static"}).settings["feed_forward"]
    {'kind': 'static'}
    """

    @renamed(only="layers", module="submodule")
    @checked
    def __init__(
        self,
        feed_forward: GateSettings | None = None,
        heads: GateSettings | None = None,
        channels: GateSettings | None = None,
        pairs: list[tuple[str, str]] | None = None,
        layers: list[str] | None = None,
        submodule: str | None = None,
        example: Any = None,
        more_examples: list[Any] | None = None,
    ) -> None:
        given = {"feed_forward": feed_forward, "heads": heads, "channels": channels}
        self.settings = {kind: value for kind, value in given.items() if value is not None}
        if not self.settings:
            raise ValueError("AddGates needs `feed_forward`, `heads` or `channels`.")
        for kind, value in self.settings.items():
            check_gate_settings(kind, value)
        for pair in pairs or []:
            if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(map(_is_name, pair))):
                raise ValueError(f"`pairs` must be a list of pairs of names, got {pair!r}.")
        for given_example in (example, *(more_examples or [])):
            check_example(given_example)
        self.pairs = pairs or []
        self.layers = layers
        self.submodule = submodule or ""
        self.example = example
        self.more_examples = more_examples or []
        self._found: UnitSearchResult | None = None

    @cached_property  # Lightning reads it in every hook of every step
    @override
    def state_key(self) -> str:
        return state_key(self, module=self.submodule)

    @override
    def state_dict(self) -> dict[str, Any]:
        # Lets `restore_gates` load a `GatedClassifier` from its checkpoint alone.
        if self._found is None:
            return {}
        found = self._found.state()
        return {"add_gates": {"module": self.submodule, "settings": self.settings, "found": found}}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        add = partial(self._add, trainer, pl_module, stage)
        # The module's `setup` and `configure_model` run later and may create layers. Otherwise add
        # gates now, because callbacks that average weights copy the module in their `setup`.
        if any(_is_own(pl_module, method) for method in ("setup", "configure_model")):
            _extend(pl_module, "configure_model", lambda original: (original(), add()))
        else:
            add()

    def _add(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        part = named_part(self, pl_module, self.submodule)
        if has_averages(trainer) and not gated_units(part):
            raise ValueError(
                "A weight-averaging callback copied the model before gates were added: list "
                "AddGates before that callback, and create layers in `__init__`."
            )
        if self.add_to(pl_module, getattr(trainer, "datamodule", None), stage):
            rank_zero_info(f"AddGates:\n{self._found}")

    def add_to(
        self,
        pl_module: pl.LightningModule,
        datamodule: pl.LightningDataModule | None = None,
        stage: str = "fit",
    ) -> bool:
        """Add gates now, without a Trainer, unless the module has some.

        Args:
            pl_module: The module, whose layers exist.
            datamodule: The data, set up for the stage, if an example must come from it.
            stage: `fit`, `validate`, `test` or `predict`.

        Returns:
            Whether gates were added.
        """
        part = named_part(self, pl_module, self.submodule)
        if gated_units(part):  # in an earlier stage, or manually
            return False
        example = self.example
        if example is None and offered_example(part) is None and not self.pairs:
            example = first_inputs(datamodule, pl_module, stage)
        if type(part).forward is pl.LightningModule.forward:  # no `forward` is defined
            names = ", ".join(name for name, _ in part.named_children())
            raise ValueError(
                f"AddGates runs the model on an example, but {type(part).__name__} has no "
                f"`forward`: set `submodule` to a part that has one ({names})."
            )
        self._found = add_gates(
            part,
            **self.settings,
            pairs=self.pairs,
            layers=self.layers,
            example=example,
            more_examples=self.more_examples,
        )
        return True

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        gates = [gate for _, gate in gated_units(pl_module.get_submodule(self.submodule)).values()]
        parameters = {id(p) for gate in gates for p in gate.parameters()}
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        of_gates = [
            (group, held)
            for group in groups
            if (held := parameters & {id(p) for p in group["params"]})
        ]
        if missing := len(parameters) - sum(len(held) for _, held in of_gates):
            raise ValueError(
                f"{missing} of {len(parameters)} gate parameters are in no optimizer: "
                "`configure_optimizers` must cover all parameters of the model."
            )
        if any(group.get("weight_decay") for group, _ in of_gates):
            rank_zero_warn(
                "Weight decay pulls the gates from AddGates towards half open: use "
                "`dg_lightning.param_groups(self, lr, gate_lr_factor)` in `configure_optimizers`."
            )


def _is_name(thing: object) -> bool:
    return isinstance(thing, str) and bool(thing)


def _extend(module: Any, method: str, around: Callable[[Callable[[], Any]], Any]) -> None:
    """Wrap the next call to a method.

    The original method is restored and then passed to `around`.
    """
    original = getattr(module, method)

    def once() -> Any:
        vars(module).pop(method, None)
        return around(original)

    setattr(module, method, once)


def _is_own(pl_module: pl.LightningModule, method: str) -> bool:
    """Return True if the user's module defines a method, not one of our base classes."""
    home = str(getattr(type(pl_module), method).__module__)
    ours = home.split(".")[0] in ("lightning", "pytorch_lightning", "dg_lightning")
    return not ours or method in vars(pl_module)
