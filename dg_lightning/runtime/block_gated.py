"""A GatedMLP that computes only the blocks of units that are open."""

from functools import partial
from typing import Any, Self, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from dg_lightning.gates import Gate
from dg_lightning.gates.policies import HARD_POLICIES
from dg_lightning.layers.mlp import GatedLinear, GatedMLP
from dg_lightning.runtime.dispatch import Engine, Runner, candidates
from dg_lightning.runtime.replay import GraphCache, Recording
from dg_lightning.runtime.timing import shortest_seconds

__all__ = ["BlockGatedMLP", "Engine", "has_hooks"]

_RECORD_AFTER = 10  # uses of an input shape before a CUDA graph is tried


class BlockGatedMLP(GatedMLP):
    """A `GatedMLP` that skips the blocks closed by its input-dependent gates.

    Parameters, state dict and outputs equal those of a `GatedMLP`, so checkpoints are
    interchangeable. A hidden layer skips blocks if its gate is hard and input-dependent, it has no
    norm or active dropout, and the next layer's gate does not read its units. All other layers, and
    those with hooks, run as in a `GatedMLP`. A skipped block gives its gate no gradient.

    Args:
        in_features: Number of inputs.
        hidden: Width of each hidden layer.
        num_classes: Number of outputs.
        engine: `masked` computes everything, as a `GatedMLP` does; closed gates get gradients too.
            `blocks` multiplies each block with the samples that open it. `rows` reads only the
            weights of open units, sample by sample (`blocks` if gradients are needed). `triton`
            uses custom CUDA kernels; `graph` also captures the net as a CUDA graph (evaluation
            without gradients only). `auto` measures which engine is fastest for each batch size,
            including `dense` (all blocks, gradients as with skipping). Engines round differently:
            name one if training must be bitwise reproducible.
        **options: The other arguments of `GatedMLP`.

    >>> gate = {"kind": "dynamic", "block_size": 16}
    >>> mlp = BlockGatedMLP(64, [128], 10, gate=gate, engine="blocks")
    >>> mlp(torch.randn(5, 64)).shape
    torch.Size([5, 10])
    """

    def __init__(
        self,
        in_features: int,
        hidden: list[int],
        num_classes: int,
        *,
        engine: Engine = "auto",
        **options: Any,
    ) -> None:
        super().__init__(in_features, hidden, num_classes, **options)
        self._set_engine(engine)

    def _set_engine(self, engine: Engine) -> None:
        if engine not in get_args(Engine):
            raise ValueError(f"`engine` must be one of {get_args(Engine)}, got {engine!r}.")
        self.engine = engine
        self._runner = Runner(engine)
        self._graphs: GraphCache | None = None
        self._replays: dict[torch.Size, int | bool] = {}  # uses, then whether to replay

    @classmethod
    def of(cls, mlp: GatedMLP, engine: Engine = "auto") -> Self:
        """Return a net that shares the layers of a `GatedMLP` and skips closed blocks."""
        net = cls.__new__(cls)
        nn.Module.__init__(net)
        # Everything except per-module state such as hooks.
        vars(net).update({k: v for k, v in vars(mlp).items() if k not in vars(net)})
        net.training, net._modules = mlp.training, dict(mlp._modules)
        net._set_engine(engine)
        return net

    @torch.no_grad()
    def lay_out_by_unit(self) -> Self:
        """Store the outgoing weights of each unit contiguously, for inference on a CPU.

        Values and shapes do not change; a product over some units then reads contiguous memory.
        """
        layers = self.layers()
        for reader in [layer.linear for layer in layers[1:]] + [self.output]:
            reader.weight.data = reader.weight.t().contiguous().t()
        return self

    @override
    def forward(self, x: Tensor) -> Tensor:
        if not self._can_record(x):
            return self._eager(x, self.engine)
        if self._graphs is None:
            self._graphs = GraphCache(self, partial(self._eager, engine="triton"))
        if self.engine == "graph" or self._replay_is_faster(x, self._graphs):
            return self._graphs(x)
        return self._eager(x, self.engine)

    def _can_record(self, x: Tensor) -> bool:
        if self.engine not in ("auto", "graph") or not x.is_cuda or x.dtype.itemsize != 2:
            return False
        if not x.numel():
            return False
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        if torch.is_autocast_enabled("cuda") or torch.cuda.is_current_stream_capturing():
            return False
        return "triton" in candidates(x, needs_grad=False) and self._has_room(x)

    def _has_room(self, x: Tensor) -> bool:
        """Return True if the kernels need no device synchronization, as a graph requires."""
        from dg_lightning.runtime.launching import worst_case_fits

        layers = self.layers()
        readers = [layer.linear for layer in layers[1:]] + [self.output]
        return all(
            worst_case_fits(
                len(x),
                layer.gate.blocks,
                (layer.gate.block_size + reader.out_features) * x.element_size(),
                x.device,
            )
            for layer, reader in zip(layers, readers, strict=True)
            if isinstance(layer.gate, Gate) and layer.gate.input_dependent
        )

    def _replay_is_faster(self, x: Tensor, graphs: GraphCache) -> bool:
        """Return True if replaying is faster; measured once a shape has been used often enough."""
        choice = self._replays.get(x.shape, 0)
        if isinstance(choice, bool):
            return choice
        self._replays[x.shape] = choice + 1
        if choice + 1 < _RECORD_AFTER:
            return False
        eager = shortest_seconds(partial(self._eager, x, self.engine), x.device)
        faster = self._replays[x.shape] = shortest_seconds(partial(graphs, x), x.device) < eager
        return faster

    def record(self, x: Tensor) -> "Recording":
        """Record the forward pass on `x` as a CUDA graph, without copying the input.

        Write a batch into `x` and call the recording; the next call overwrites its result.
        """
        return Recording(partial(self._eager, engine="triton"), x, self)

    def _eager(self, x: Tensor, engine: Engine) -> Tensor:
        h = x.flatten(1)
        if self.input_gate is not None:
            h = self.input_gate(h).to(h.dtype) * h
        h = self.input_norm(h)
        layers = self.layers()
        product: Tensor | None = None  # pre-activation, if the previous layer computed it
        for index, layer in enumerate(layers):
            after = layers[index + 1] if index + 1 < len(layers) else None
            if product is None and self._skips(layer, after, engine):
                gate = layer.gate
                assert isinstance(gate, Gate)
                reader = self.output if after is None else after.linear
                run = self._runner if engine == self.engine else Runner(engine)
                product = run(h, gate, layer.linear, layer.activation, reader, index)
            elif product is None:
                h = layer(h)
            else:
                raw = layer.activation(layer.norm(product))
                if layer.gate is not None:  # not input-dependent, see `_skips`
                    raw = layer.gate(raw).to(raw.dtype) * raw
                h, product = layer.dropout(raw), None
        logits: Tensor = self.output(h) if product is None else product
        return logits

    def _skips(self, layer: GatedLinear, after: GatedLinear | None, engine: Engine) -> bool:
        gate = layer.gate
        return (
            engine != "masked"
            and isinstance(gate, Gate)
            and self._runner.may_skip(gate)
            and gate.input_dependent
            and (gate.policy in HARD_POLICIES or not gate.training)
            and isinstance(layer.norm, nn.Identity)
            and (layer.dropout.p == 0 or not layer.dropout.training)
            and (after is None or after.gate is None or not after.gate.input_dependent)
            # Modules with hooks must be called.
            and not any(has_hooks(m) for m in (layer, *layer.children(), after or self.output))
            and (after is None or not has_hooks(after.linear))
        )

    def __getstate__(self) -> dict[str, Any]:
        # Measurements and recordings are specific to this instance and device.
        caches: dict[str, Any] = {"_graphs": None, "_replays": {}}
        return {**self.__dict__, **caches}

    @override
    def extra_repr(self) -> str:
        return f"engine={self.engine}"


def has_hooks(module: nn.Module, owner: object = None) -> bool:
    """Return True if a module must be called because of hooks, other than those of `owner`."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    hooks += module._backward_hooks.values()
    return any(owner is None or getattr(hook, "__self__", None) is not owner for hook in hooks)
