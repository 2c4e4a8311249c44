"""Add the distance to a teacher's outputs to the loss of any LightningModule."""

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from dg_lightning.arguments import checked
from dg_lightning.gates import gate_layers
from dg_lightning.surgery import remove_gates
from dg_lightning.surgery.gating import gated_units, is_sharded
from dg_lightning.training import log_step

from ._penalty_term import add_gradient, graph_of
from ._shared import DeferredStateCallback, named_part, state_key

Measure: TypeAlias = Literal["kl", "mse", "cosine"]


class Distill(DeferredStateCallback):
    """Adds `weight` times the distance between a model's outputs and a teacher's to the loss.

    The teacher gets copies of the model's inputs, in evaluation mode and without gradients. The
    module need not know about it: the term is added right before the backward pass. Only the
    gradient changes, not the value of the loss. In manual optimization, the term is added to the
    losses that `manual_backward` receives. If you scale them, scale `weight` too. A compiled model
    must allow graph breaks (`fullgraph=False`, the default of `torch.compile`).

    Args:
        teacher: A module with the model's inputs and outputs, or a checkpoint of a LightningModule
            of the same class without added gates. A module is moved to the model's device and
            stays in evaluation mode. The default is a copy of the model at the start of training,
            without the gates that `add_gates` added. The copy is saved in checkpoints.
        weight: Weight of the distance.
        measure: `kl` is the divergence of class probabilities, `mse` the squared difference
            relative to the teacher's mean square, `cosine` one minus the cosine. Each is averaged
            over all rows of the output, or over those that the `attention_mask` keeps.
        temperature: With `kl`, logits are divided by it, and the distance is multiplied by its
            square.
        submodule: Name of the model in the LightningModule (default: its only child with weights).
        output: Key of the output to compare, if the model returns several (default: `logits`, or
            else the first).
        dim: Dimension of classes or features (default: the last).
        layers: Names of layers in the model whose outputs are compared, too, by `mse` along the
            last dimension.
        name: Suffix of the logged key, to distinguish several teachers in one Trainer.

    | logged key | meaning |
    |---|---|
    | `distill/loss` | the distance, before it is weighted, with the suffix `/<name>` |

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
        dim: int | None = None,
        layers: list[str] | None = None,
        name: str | None = None,
    ) -> None:
        if not isinstance(teacher, nn.Module | str | None) or teacher == "":
            raise ValueError(
                f"`teacher` must be a module or the path of a checkpoint, got {teacher!r}."
            )
        if output == "" or (isinstance(output, int) and output < 0):
            raise ValueError(f"`output` must be a name or an index from 0, got {output!r}.")
        if dim is not None and dim < 1:
            raise ValueError(f"`dim` must be at least 1, since 0 is the batch, got {dim}.")
        if weight < 0:
            raise ValueError(f"`weight` must be at least 0, got {weight}.")
        if temperature <= 0:
            raise ValueError(f"`temperature` must be above 0, got {temperature}.")
        self.teacher, self.weight, self.measure = teacher, weight, measure
        self.temperature, self.submodule = temperature, submodule
        self.output, self.dim, self.layers, self.name = output, dim, layers or [], name
        self._model: nn.Module | None = None  # the teacher in use
        self._reset()

    @cached_property  # Lightning reads it in every hook of every step
    @override
    def state_key(self) -> str:
        return state_key(self, name=self.name)

    def _reset(self) -> None:
        self._hooks = ExitStack()
        self._listens = False  # whether a training step's forward passes are running
        self._expected: list[_Outputs] = []  # the teacher's, of passes that have not ended
        self._seen: dict[str, Tensor] = {}  # outputs of the model's layers in the current pass
        self._passes: list[_Pass] = []  # forward passes of this batch that no loss includes yet
        self._acts = False  # whether a term was added in this epoch
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
        model = named_part(self, pl_module, name)
        teacher = self._make_teacher(pl_module, model, name)
        own = {id(parameter) for parameter in model.parameters()}
        if any(id(parameter) in own for parameter in teacher.parameters()):
            raise ValueError("`teacher` shares weights with the model: pass a copy of it.")
        if self._loaded is not None:
            if self.teacher is None:
                teacher.load_state_dict(self._loaded["teacher"])
            self._loaded = None
        self._model = teacher.requires_grad_(False)
        for layer in self.layers:
            self._watch(model, layer)
        before = model.register_forward_pre_hook(self._ask_teacher, prepend=True, with_kwargs=True)
        after = model.register_forward_hook(self._note_pass, with_kwargs=True)
        for handle in (before, after):
            self._hooks.callback(handle.remove)

    def _make_teacher(self, pl_module: Any, model: nn.Module, name: str) -> nn.Module:
        if self.teacher is None:
            return _without_gates(model, name)
        if isinstance(self.teacher, str):
            teacher = _loaded(pl_module, self.teacher, name)
        else:
            teacher = self.teacher
        first = next(iter(model.parameters()), None)
        if first is not None:
            teacher.to(first.device)
            if len(_sizes_by_dtype(teacher)) == 1:
                sizes = _sizes_by_dtype(model)  # gates stay in float32 where weights are halved
                teacher.to(max(sizes, key=lambda dtype: sizes[dtype]))
        return teacher

    def _watch(self, model: nn.Module, layer: str) -> None:
        for part in (model, self._model):
            if layer not in dict(cast("nn.Module", part).named_modules()):
                raise ValueError(
                    f"`layers` of Distill must name layers of the model and of its teacher, but "
                    f"{type(part).__name__} has no {layer!r}."
                )
        hook = partial(self._note_layer, layer)
        self._hooks.callback(model.get_submodule(layer).register_forward_hook(hook).remove)

    # Compiled models run these hooks, which keep tensors.

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_layer(self, layer: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._listens:
            self._seen[layer] = _tensor_in(output, None, layer)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _ask_teacher(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Run the teacher on the inputs of a forward pass, before the model can change them."""
        if not self._listens or not torch.is_grad_enabled():
            return
        assert self._model is not None
        found: dict[str, Tensor] = {}
        own_args, own_kwargs = apply_to_collection((args, kwargs), Tensor, Tensor.clone)
        with torch.no_grad(), ExitStack() as stack:
            for layer in self.layers:
                handle = self._model.get_submodule(layer).register_forward_hook(
                    _storing(found, layer)
                )
                stack.callback(handle.remove)
            output = self._model.eval()(*own_args, **own_kwargs)
        if missing := [layer for layer in self.layers if layer not in found]:
            raise ValueError(f"The teacher did not run {missing[0]}: choose other `layers`.")
        mask = _mask_in(module, args, kwargs)
        self._seen = {}
        self._expected.append(_Outputs(_tensor_in(output, self.output, "the teacher"), found, mask))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_pass(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Store the outputs of a forward pass with those of the teacher."""
        if not self._listens or not torch.is_grad_enabled() or not self._expected:
            return
        expected = self._expected.pop()
        own = _tensor_in(output, self.output, "the model")
        if own.requires_grad:
            self._passes.append(_Pass(own, self._seen, expected))
        self._seen = {}

    def _distance_of(self, done: "_Pass") -> Tensor:
        taught = done.expected
        self._check(done.output, taught.output, "outputs", self.measure)
        dim = -1 if self.dim is None else self.dim
        term = self._between(done.output, taught.output, taught.mask, self.measure, dim)
        for layer, value in taught.layers.items():
            own = done.layers.get(layer)
            if own is None or not own.requires_grad:
                raise RuntimeError(
                    f"Distill found no output of {layer} with a gradient: choose other `layers`, "
                    "or set use_reentrant=False for activation checkpointing."
                )
            self._check(own, value, f"outputs of {layer}", "mse")
            term = term + self._between(own, value, taught.mask, "mse", -1)
        return term

    def _check(self, own: Tensor, taught: Tensor, what: str, measure: Measure) -> None:
        if own.shape != taught.shape:
            raise ValueError(
                f"Distill compares {what} of shape {tuple(own.shape)} with the teacher's of shape "
                f"{tuple(taught.shape)}: they must be equal."
            )
        if not own.ndim:
            raise ValueError(f"Distill needs {what} with rows, got a single number: set `output`.")
        if measure == "kl" and own.ndim > 3 and self.dim is None:
            raise ValueError(
                f"`measure='kl'` needs the dimension of classes in outputs of shape "
                f"{tuple(own.shape)}: set `dim`."
            )
        if measure == "kl" and own.shape[-1 if self.dim is None else self.dim] < 2:
            raise ValueError(
                "`measure='kl'` compares probabilities of classes, got a single output per row: "
                "use 'mse'."
            )

    def _between(
        self, own: Tensor, taught: Tensor, mask: Tensor | None, measure: Measure, dim: int
    ) -> Tensor:
        """Return the mean distance between two outputs."""
        own, taught = own.float(), taught.float()
        if measure == "kl":
            logs = [F.log_softmax(x / self.temperature, dim) for x in (own, taught)]
            p = logs[1].exp()
            # Where p is 0, both logarithms may be infinite.
            rows = torch.where(p > 0, p * (logs[1] - logs[0]), 0).sum(dim) * self.temperature**2
        elif measure == "cosine":
            rows = 1 - F.cosine_similarity(own, taught, dim=dim)
        else:
            rows = (own - taught).square().mean(dim)
        if mask is None or mask.shape != rows.shape:
            mask = torch.ones_like(rows)
        kept = mask.to(rows.dtype)
        count = kept.sum().clamp_min(1)
        mean = (rows * kept).sum() / count
        if measure == "mse":
            size = (taught.square().mean(dim) * kept).sum() / count
            mean = mean / torch.where(size > 1e-12, size, 1)  # an untrained head may give only 0
        return mean

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._acts = False

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._listens, self._distance = True, None
        self._forget_passes()

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        self._listens = False  # activation checkpointing runs layers again in backward
        due = self._passes
        if not pl_module.automatic_optimization:
            # With several losses, the one that depends on an output is compared with the teacher.
            nodes = graph_of(loss)
            due = [done for done in self._passes if done.output.grad_fn in nodes]
        elif not due:
            raise RuntimeError(
                "Distill found no output with a gradient in this training step: `submodule` must "
                "name the model that `training_step` calls, and activation checkpointing of the "
                "whole model needs use_reentrant=False."
            )
        self._passes = [done for done in self._passes if not any(done is one for one in due)]
        if due:
            term = torch.stack([self._distance_of(done) for done in due]).mean()
            self._acts, self._distance = True, term.detach()
            add_gradient(trainer, pl_module, loss, self.weight * term.to(loss.device))

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._listens = not pl_module.automatic_optimization

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        self._listens = False
        self._forget_passes()
        if self._distance is not None:
            suffix = "" if self.name is None else f"/{self.name}"
            mean: Any = trainer.strategy.reduce(self._distance, reduce_op="mean")
            log_step(pl_module, {f"distill/loss{suffix}": mean})

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._acts and not pl_module.automatic_optimization:
            raise RuntimeError(
                "Distill had no effect in this epoch: call `self.manual_backward(loss)`, not "
                "`loss.backward()`, and name the model that the loss depends on in `submodule`."
            )

    def _forget_passes(self) -> None:
        self._expected, self._passes, self._seen = [], [], {}

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
        passing = {"_hooks": ExitStack(), "_expected": [], "_passes": [], "_seen": {}}
        return {**self.__dict__, **passing, "_distance": None, "_listens": False}


class _Outputs(NamedTuple):
    """What a teacher returns in a forward pass."""

    output: Tensor
    layers: dict[str, Tensor]
    mask: Tensor | None  # rows that count


class _Pass(NamedTuple):
    """What a model returns in a forward pass, and what it should return."""

    output: Tensor
    layers: dict[str, Tensor]
    expected: _Outputs


def _without_gates(model: nn.Module, name: str) -> nn.Module:
    """Return a copy of a model without added gates."""
    if is_sharded(model):
        raise ValueError("Distill cannot copy a sharded model: pass `teacher`.")
    teacher = copy.deepcopy(model)
    if gated_units(teacher):
        remove_gates(teacher)
    if gate_layers(teacher, required=False):
        raise ValueError(
            f"Distill cannot take {name} without its gates as a teacher, because they are part of "
            "it: pass `teacher`."
        )
    return teacher


def _sizes_by_dtype(module: nn.Module) -> Counter[torch.dtype]:
    """Return how many floating-point weights have each dtype."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel()
    return sizes


def _loaded(pl_module: Any, path: str, name: str) -> nn.Module:
    """Return the model in a checkpoint of the LightningModule's class."""
    kind = type(pl_module)
    if "://" not in path and not Path(path).is_file():
        raise ValueError(f"`teacher` must be a checkpoint or a module, but there is no {path!r}.")
    try:
        with isolate_rng():  # building the model must not change what the run draws
            module = kind.load_from_checkpoint(path, map_location="cpu")
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"`teacher` {path!r} cannot be loaded as a {kind.__name__} ({reason}): "
            "pass another checkpoint, or a module."
        ) from error
    teacher: nn.Module = module.get_submodule(name)
    return teacher


def _mask_in(model: nn.Module, args: Any, kwargs: Any) -> Tensor | None:
    """Return the `attention_mask` among the arguments."""
    try:
        given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # no signature
        given = kwargs
    mask = given.get("attention_mask", kwargs.get("attention_mask"))
    return mask.clone() if isinstance(mask, Tensor) else None


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
