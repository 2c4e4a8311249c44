"""Add the distance to a teacher's outputs to the loss of any LightningModule."""

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Literal, TypeAlias

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from typing_extensions import override

from dg_lightning.arguments import checked
from dg_lightning.gates import gate_layers
from dg_lightning.surgery import remove_gates
from dg_lightning.surgery.gating import gated_units
from dg_lightning.training import log_step

from ._penalty_term import add_gradient, graph_of
from ._shared import DeferredStateCallback

Measure: TypeAlias = Literal["kl", "mse", "cosine"]


class Distill(DeferredStateCallback):
    """Adds `weight` times the distance between a model's outputs and a teacher's to the loss.

    The teacher gets the same inputs as the model, in evaluation mode and without gradients. The
    module need not know about it: the term is added right before the backward pass. Only the
    gradient changes, not the value of the loss.

    Args:
        teacher: A module with the model's inputs and outputs, or a checkpoint of a LightningModule
            of the same class. The default is a copy of the model at the start of training, without
            the gates that `add_gates` added. The copy is saved in checkpoints.
        weight: Weight of the distance.
        measure: `kl` is the divergence of class probabilities, `mse` the squared difference
            relative to the teacher's mean square, `cosine` one minus the cosine. Each is averaged
            over all rows of the output, or over those that the `attention_mask` keeps.
        temperature: With `kl`, logits are divided by it, and the distance is multiplied by its
            square.
        submodule: Name of the model in the LightningModule (default: its only child with weights).
        output: Key of the output to compare, if the model returns several (default: `logits`, or
            else the first).
        layers: Names of layers in the model whose outputs are compared, too, always by `mse`.

    | logged key | meaning |
    |---|---|
    | `distill/loss` | the distance, before it is weighted |

    >>> Distill(weight=0.5, temperature=4.0).measure
    'kl'
    """

    @checked
    def __init__(
        self,
        teacher: nn.Module | str | None = None,
        weight: float = 1.0,
        measure: Measure = "kl",
        temperature: float = 2.0,
        submodule: str | None = None,
        output: str | int | None = None,
        layers: list[str] | None = None,
    ) -> None:
        if weight < 0:
            raise ValueError(f"`weight` must be at least 0, got {weight}.")
        if temperature <= 0:
            raise ValueError(f"`temperature` must be above 0, got {temperature}.")
        self.teacher, self.weight, self.measure = teacher, weight, measure
        self.temperature, self.submodule = temperature, submodule
        self.output, self.layers = output, layers or []
        self._model: nn.Module | None = None  # the teacher in use
        self._reset()

    def _reset(self) -> None:
        self._hooks = ExitStack()
        self._terms: list[tuple[Tensor, Tensor]] = []  # (output, distance) of each forward pass
        self._listens = False  # whether a training step's forward passes are running
        self._seen: dict[str, Tensor] = {}  # outputs of layers in the current forward pass
        self._distance: Tensor | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._hooks.close()
        self._reset()
        if stage == "fit":
            self._model = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        name = _name_of_model(pl_module) if self.submodule is None else self.submodule
        try:
            model = pl_module.get_submodule(name)
        except AttributeError as error:
            parts = ", ".join(child for child, _ in pl_module.named_children())
            raise ValueError(
                f"`submodule` of Distill must name a submodule of {type(pl_module).__name__} "
                f"({parts}), got {name!r}."
            ) from error
        own = {id(parameter) for parameter in model.parameters()}
        teacher = self._make_teacher(pl_module, model, name)
        if any(id(parameter) in own for parameter in teacher.parameters()):
            raise ValueError("`teacher` shares weights with the model: pass a copy of it.")
        if self._loaded is not None:
            teacher.load_state_dict(self._loaded["teacher"])
            self._loaded = None
        first = next(iter(model.parameters()), None)
        if first is not None:
            teacher.to(first.device, first.dtype)
        self._model = teacher.eval().requires_grad_(False)
        for layer in self.layers:
            self._watch(model, layer, self._store_own)
        handle = model.register_forward_hook(self._compare, with_kwargs=True)
        self._hooks.callback(handle.remove)

    def _make_teacher(self, pl_module: Any, model: nn.Module, name: str) -> nn.Module:
        if isinstance(self.teacher, nn.Module):
            return self.teacher
        if isinstance(self.teacher, str):
            loaded = type(pl_module).load_from_checkpoint(self.teacher, map_location="cpu")
            teacher: nn.Module = loaded.get_submodule(name)
            return teacher
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise ValueError("Distill cannot copy a sharded model: pass `teacher`.")
        teacher = copy.deepcopy(model)
        if gated_units(teacher):
            remove_gates(teacher)
        if gate_layers(teacher, required=False):
            raise ValueError(
                f"Distill cannot take {name} without its gates as a teacher, because they are part "
                "of it: pass `teacher`."
            )
        return teacher

    def _watch(self, model: nn.Module, layer: str, store: Callable[[str, Tensor], None]) -> None:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            store(layer, _tensor_in(output, None, layer))

        try:
            handle = model.get_submodule(layer).register_forward_hook(hook)
        except AttributeError as error:
            raise ValueError(
                f"`layers` of Distill must name layers of {type(model).__name__}, got {layer!r}."
            ) from error
        self._hooks.callback(handle.remove)

    def _store_own(self, layer: str, value: Tensor) -> None:
        if self._listens:
            self._seen[layer] = value

    def _compare(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Run the teacher on the inputs of a forward pass, and store the distance."""
        if not self._listens or not torch.is_grad_enabled():
            return
        assert self._model is not None
        own = _tensor_in(output, self.output, "the model")
        if not own.requires_grad:
            return
        wanted: dict[str, Tensor] = {}
        with torch.no_grad(), ExitStack() as stack:
            for layer in self.layers:
                target = self._model.get_submodule(layer)
                handle = target.register_forward_hook(_storing(wanted, layer))
                stack.callback(handle.remove)
            taught = _tensor_in(self._model(*args, **kwargs), self.output, "the teacher")
        mask = kwargs.get("attention_mask")
        term = self._between(own, taught, mask, self.measure, "outputs")
        for layer, value in wanted.items():
            term = term + self._between(self._seen[layer], value, mask, "mse", layer)
        self._seen = {}
        self._terms.append((own, term))

    def _between(
        self, own: Tensor, taught: Tensor, mask: Tensor | None, measure: Measure, what: str
    ) -> Tensor:
        """Return the mean distance between two outputs."""
        if own.shape != taught.shape:
            raise ValueError(
                f"Distill compares {what} of shape {tuple(own.shape)} with the teacher's of shape "
                f"{tuple(taught.shape)}: they must be equal."
            )
        own, taught = own.float(), taught.detach().float()
        if measure == "kl":
            logs = [F.log_softmax(x / self.temperature, -1) for x in (own, taught)]
            rows = F.kl_div(logs[0], logs[1], reduction="none", log_target=True).sum(-1)
            rows = rows * self.temperature**2
        elif measure == "cosine":
            rows = 1 - F.cosine_similarity(own, taught, dim=-1)
        else:
            rows = (own - taught).square().mean(-1)
        if mask is None or mask.shape != rows.shape:
            mask = torch.ones_like(rows)
        kept = mask.to(rows.dtype)
        mean = (rows * kept).sum() / kept.sum()
        if measure == "mse":
            size = (taught.square().mean(-1) * kept).sum() / kept.sum()
            mean = mean / size.clamp_min(torch.finfo(size.dtype).tiny)
        return mean

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._listens, self._terms, self._seen = True, [], {}

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        self._listens = False  # activation checkpointing runs layers again in backward
        due = self._terms
        if not pl_module.automatic_optimization:
            # With several losses, the one that depends on an output is compared with the teacher.
            nodes = graph_of(loss)
            due = [(own, term) for own, term in self._terms if own.grad_fn in nodes]
        elif not due:
            raise RuntimeError(
                "Distill found no output with a gradient in this training step: `submodule` must "
                "name the model that `training_step` calls."
            )
        self._terms = [pair for pair in self._terms if not any(pair is other for other in due)]
        if due:
            term = torch.stack([term for _, term in due]).mean()
            self._distance = term.detach()
            add_gradient(trainer, pl_module, loss, self.weight * term.to(loss.device))

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._listens = not pl_module.automatic_optimization

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        self._listens, self._terms, self._seen = False, [], {}
        if self._distance is not None:
            log_step(pl_module, {"distill/loss": self._distance})

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._hooks.close()
        self._reset()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._hooks.close()
        self._reset()

    @override
    def current_state(self) -> dict[str, Any]:
        if self.teacher is not None or self._model is None:
            return {}
        return {"teacher": self._model.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict or None

    def __getstate__(self) -> dict[str, Any]:
        # Hook handles and tensors with a graph can be neither copied nor pickled.
        passing = {"_hooks": ExitStack(), "_terms": [], "_seen": {}, "_distance": None}
        return {**self.__dict__, **passing, "_listens": False}


def _name_of_model(pl_module: nn.Module) -> str:
    """Return the name of the only child with weights."""
    names = [
        name for name, child in pl_module.named_children() if any(True for _ in child.parameters())
    ]
    if len(names) != 1:
        raise ValueError(
            f"{type(pl_module).__name__} has several parts with weights "
            f"({', '.join(names) or 'none'}): name the one to compare with the teacher in "
            "`submodule` of Distill."
        )
    return names[0]


def _storing(found: dict[str, Tensor], layer: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        found[layer] = _tensor_in(output, None, layer)

    return hook


def _tensor_in(output: Any, key: str | int | None, what: str) -> Tensor:
    """Return the output with a key, or `logits`, or the first tensor of an output."""
    found = output
    if isinstance(output, Mapping):
        chosen = key if key is not None else "logits" if "logits" in output else next(iter(output))
        found = output.get(chosen)
    elif isinstance(output, tuple | list):
        index = 0 if key is None else key
        found = output[index] if isinstance(index, int) and index < len(output) else None
    if not isinstance(found, Tensor):
        raise ValueError(
            f"Distill needs a tensor in the output of {what}, got {type(found).__name__}: name "
            "it with `output`."
        )
    return found
