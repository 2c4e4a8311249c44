"""Put gates into the model of any LightningModule."""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from typing_extensions import override

from dg_lightning.arguments import checked, renamed
from dg_lightning.gates.kinds import GateSettings, check_gate_settings
from dg_lightning.surgery import UnitSearchResult, add_gates
from dg_lightning.surgery.gating import gated_units
from dg_lightning.surgery.recording import check_example, first_inputs, offered_example
from dg_lightning.training.averaging import has_averages

from ._shared import state_key


class AddGates(pl.Callback):
    """Puts gates on feed-forward units, attention heads or channels of somebody's model.

    It does so when the module is complete, and before its optimizers are made. Put it before other
    callbacks, such as those that average weights. Gates need a higher learning rate than weights
    and no weight decay: let `configure_optimizers` use `dg_lightning.param_groups`.

    Args:
        feed_forward: Gates on units between linear maps, as plain values: `{"kind": "static"}`.
        heads: Gates on attention heads, which must be static.
        channels: Gates on channels between convolutions, which must be static.
        pairs: Names of two linear maps each, see `add_gates`.
        layers: Name patterns of the maps that read the units; None for all.
        submodule: Name of the part of the LightningModule that gets gates; None for all of it.
        example: Example inputs of `submodule`. None for its `example_input_array` or
            `dummy_inputs`, or, if it has neither, for the inputs of the first batch of the
            DataModule or of the LightningModule's own loader.
        more_examples: Further examples, which take other branches of the model.

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
            raise ValueError("Say what to gate: `feed_forward`, `heads` or `channels`.")
        for kind, value in self.settings.items():
            check_gate_settings(kind, value)
        for pair in pairs or []:
            if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(map(_is_name, pair))):
                raise ValueError(f"`pairs` must be a list of two names each, got {pair!r}.")
        for given_example in (example, *(more_examples or [])):
            check_example(given_example)
        self.pairs = pairs or []
        self.layers = layers
        self.submodule = submodule or ""
        self.example = example
        self.more_examples = more_examples or []
        self._found: UnitSearchResult | None = None

    @cached_property  # Lightning asks for it in every hook of every step
    @override
    def state_key(self) -> str:
        return state_key(self, module=self.submodule)

    @override
    def state_dict(self) -> dict[str, Any]:
        # A `GatedClassifier` is loaded from its checkpoint alone, see `restore_gates`.
        if self._found is None:
            return {}
        found = self._found.state()
        return {"add_gates": {"module": self.submodule, "settings": self.settings, "found": found}}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        add = partial(self._add, trainer, pl_module, stage)
        # Its own `setup` and `configure_model` come later and may make layers. Otherwise gates must
        # be there now: callbacks that average weights copy the module in their `setup`.
        if any(_is_own(pl_module, method) for method in ("setup", "configure_model")):
            _extend(pl_module, "configure_model", lambda original: (original(), add()))
        else:
            add()

    def _add(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        try:
            part = pl_module.get_submodule(self.submodule)
        except AttributeError as error:
            parts = ", ".join(name for name, _ in pl_module.named_children())
            raise ValueError(
                f"`submodule` of AddGates must name a part of {type(pl_module).__name__} "
                f"({parts}), got {self.submodule!r}."
            ) from error
        if not gated_units(part):  # by an earlier stage of this Trainer, or by hand
            self._put_into(part, trainer, pl_module, stage)

    def _put_into(
        self, part: nn.Module, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str
    ) -> None:
        if has_averages(trainer):
            raise ValueError(
                "A callback that averages weights has copied the model before it has got gates: "
                "put AddGates before it, and make layers in `__init__`."
            )
        example = self.example
        if example is None and offered_example(part) is None and not self.pairs:
            example = first_inputs(trainer, pl_module, stage)
        if type(part).forward is pl.LightningModule.forward:  # not defined
            names = ", ".join(name for name, _ in part.named_children())
            raise ValueError(
                f"AddGates runs the model on an example, and {type(part).__name__} has no "
                f"`forward`: name the part that has one with `submodule` ({names})."
            )
        self._found = add_gates(
            part,
            **self.settings,
            pairs=self.pairs,
            layers=self.layers,
            example=example,
            more_examples=self.more_examples,
        )
        rank_zero_info(f"AddGates:\n{self._found}")

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
                f"{missing} of {len(parameters)} parameters of gates are in no optimizer: let "
                "`configure_optimizers` take the parameters of the whole model."
            )
        if any(group.get("weight_decay") for group, _ in of_gates):
            rank_zero_warn(
                "Weight decay pulls the gates of AddGates towards half open: let "
                "`configure_optimizers` use `dg_lightning.param_groups(self, lr, gate_lr_factor)`."
            )


def _is_name(thing: object) -> bool:
    return isinstance(thing, str) and bool(thing)


def _extend(module: Any, method: str, around: Callable[[Callable[[], Any]], Any]) -> None:
    """Replace a method of a module once: `around` gets the original, which is back afterwards."""
    original = getattr(module, method)

    def once() -> Any:
        vars(module).pop(method, None)
        return around(original)

    setattr(module, method, once)


def _is_own(pl_module: pl.LightningModule, method: str) -> bool:
    """Return True if somebody's module, not ours, has a method of its own."""
    home = str(getattr(type(pl_module), method).__module__)
    ours = home.split(".")[0] in ("lightning", "pytorch_lightning", "dg_lightning")
    return not ours or method in vars(pl_module)
