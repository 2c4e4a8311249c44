"""A GatedMLP that runs only the blocks of units that its samples open."""

from functools import partial
from typing import Any, Literal, Self, TypeAlias, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from dg_lightning.gates import Gate
from dg_lightning.layers import GatedLinear, GatedMLP
from dg_lightning.runtime.dispatch import FEW, candidates, fastest_engine, run_gated
from dg_lightning.runtime.feed_forward import FeedForward
from dg_lightning.runtime.replay import Recording, Replays
from dg_lightning.runtime.timing import shortest_seconds

__all__ = ["BlockGatedMLP", "Engine"]

Engine: TypeAlias = Literal["auto", "masked", "blocks", "rows", "triton", "graph"]
_HARD = ("threshold", "top_k", "bernoulli")
_OFTEN = 10  # uses of a shape after which recording it is tried
_RENEWED = 1000  # uses after which engines are compared again: open rates change in training


class BlockGatedMLP(GatedMLP):
    """A `GatedMLP` whose input-dependent gates skip work: closed blocks need not be computed.

    It has the parameters, the state dict and the values of a `GatedMLP`, so a checkpoint of one
    loads into the other. A hidden layer is run by blocks where its gate depends on the input and is
    hard, nothing stands between product and activation, and the gate of the next layer does not
    need the hidden units itself; every other layer, and one with hooks, runs as in a `GatedMLP`.
    Where blocks are skipped, a closed gate learns nothing from the loss of that sample.

    Args:
        in_features: Number of inputs.
        hidden: Width of each hidden layer.
        num_classes: Number of outputs.
        engine: `masked` is a `GatedMLP`: all is computed, and closed gates learn too. `blocks`
            multiplies each block with the samples that open it. `rows` reads only the weights of
            open units, one sample after the other (to learn, it is `blocks`). `triton` has kernels
            of its own, on CUDA; `graph` records them and the rest of the net as a CUDA graph (in
            evaluation, without gradients). `auto` takes the one that is fastest for the batch at
            hand, by measuring, `dense` among them (all blocks, and the gradients of the others);
            engines round differently, so a training that must be repeatable bit by bit names one.
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
        self._fastest: dict[tuple[Any, ...], tuple[str, int]] = {}
        self._kept: dict[int, dict[Any, Any]] = {}  # views of each layer's weights
        self._replays: Replays | None = None
        self._replayed: dict[torch.Size, int | bool] = {}  # uses of a shape, or what was found

    @classmethod
    def of(cls, mlp: GatedMLP, engine: Engine = "auto") -> Self:
        """Return a net that shares the layers of a `GatedMLP`, and skips work."""
        net = cls.__new__(cls)
        nn.Module.__init__(net)
        # All but what every module has for itself, such as hooks.
        vars(net).update({k: v for k, v in vars(mlp).items() if k not in vars(net)})
        net.training, net._modules = mlp.training, dict(mlp._modules)
        net._set_engine(engine)
        return net

    @torch.no_grad()
    def lay_out_by_unit(self) -> Self:
        """Let the weights that read a unit lie side by side in memory, for use on a CPU.

        Values and shapes stay; a product over some units then reads memory from end to end.
        """
        layers = self.layers()
        for reader in [layer.linear for layer in layers[1:]] + [self.output]:
            reader.weight.data = reader.weight.t().contiguous().t()
        return self

    @override
    def forward(self, x: Tensor) -> Tensor:
        if not self._can_record(x):
            return self._eager(x, self.engine)
        if self._replays is None:
            self._replays = Replays(self, partial(self._eager, engine="triton"))
        if self.engine == "graph" or self._replay_is_faster(x, self._replays):
            return self._replays(x)
        return self._eager(x, self.engine)

    def _can_record(self, x: Tensor) -> bool:
        if self.engine not in ("auto", "graph") or not x.is_cuda or x.dtype.itemsize != 2:
            return False
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        if torch.is_autocast_enabled("cuda") or torch.cuda.is_current_stream_capturing():
            return False
        return "triton" in candidates(x, learns=False) and self._has_room(x)

    def _has_room(self, x: Tensor) -> bool:
        """Tell whether the kernels can do without waiting for the device, as a graph must."""
        from dg_lightning.runtime.packing import has_room

        layers = self.layers()
        readers = [layer.linear for layer in layers[1:]] + [self.output]
        return all(
            has_room(
                len(x),
                layer.gate.blocks,
                (layer.gate.block_size + reader.out_features) * x.element_size(),
                x.device,
            )
            for layer, reader in zip(layers, readers, strict=True)
            if isinstance(layer.gate, Gate) and layer.gate.input_dependent
        )

    def _replay_is_faster(self, x: Tensor, replays: Replays) -> bool:
        """Measure, once a shape has come so often that recording it pays."""
        known = self._replayed.get(x.shape, 0)
        if isinstance(known, bool):
            return known
        self._replayed[x.shape] = known + 1
        if known + 1 < _OFTEN:
            return False
        eager = shortest_seconds(partial(self._eager, x, self.engine), x.device)
        faster = self._replayed[x.shape] = shortest_seconds(partial(replays, x), x.device) < eager
        return faster

    def record(self, x: Tensor) -> "Recording":
        """Record the forward pass on this very tensor, as a CUDA graph, without any copy.

        Write a batch into `x`, call what is returned, and read the result before the next call
        writes over it.
        """
        return Recording(partial(self._eager, engine="triton"), x, self)

    def _eager(self, x: Tensor, engine: Engine) -> Tensor:
        h = x.flatten(1)
        if self.input_gate is not None:
            h = self.input_gate(h).to(h.dtype) * h
        h = self.input_norm(h)
        layers = self.layers()
        product: Tensor | None = None  # of the layer at hand, where the one before has computed it
        for index, layer in enumerate(layers):
            after = layers[index + 1] if index + 1 < len(layers) else None
            if product is None and self._skips(layer, after, engine):
                gate = layer.gate
                assert isinstance(gate, Gate)
                reader = self.output if after is None else after.linear
                kept = self._kept.setdefault(index, {})
                parts = layer.linear, layer.activation, reader
                net = FeedForward.of(*parts, gate.block_size, kept)
                product = self._run(h, gate, net, engine)
            elif product is None:
                h = layer(h)
            else:
                raw = layer.activation(layer.norm(product))
                if layer.gate is not None:  # not input-dependent: `_skips` has seen to that
                    raw = layer.gate(raw).to(raw.dtype) * raw
                h, product = layer.dropout(raw), None
        logits: Tensor = self.output(h) if product is None else product
        return logits

    def _skips(self, layer: GatedLinear, after: GatedLinear | None, engine: Engine) -> bool:
        gate = layer.gate
        return (
            engine != "masked"
            and not torch.compiler.is_compiling()
            and isinstance(gate, Gate)
            and gate.input_dependent
            and (gate.policy in _HARD or not gate.training)
            and isinstance(layer.norm, nn.Identity)
            and (layer.dropout.p == 0 or not layer.dropout.training)
            and (after is None or after.gate is None or not after.gate.input_dependent)
            # Somebody who hangs on to a module wants it to be called.
            and not any(_has_hooks(m) for m in (layer, *layer.children(), after or self.output))
            and (after is None or not _has_hooks(after.linear))
        )

    def _run(self, x: Tensor, gate: Gate, net: FeedForward, engine: Engine) -> Tensor:
        tensors = (x, *net.tensors, *gate.parameters())
        learns = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if engine != "auto":
            name = {"graph": "triton", "rows": "blocks" if learns else "rows"}.get(engine, engine)
            return run_gated(name, x, gate, net)
        few = len(x) <= FEW
        key = (len(x).bit_length(), few, x.dtype, x.device, learns, net.first[0].shape)
        name, uses = self._fastest.get(key, ("", _RENEWED))
        if uses >= _RENEWED:
            name, uses = fastest_engine(x, gate, net, learns), 0
        self._fastest[key] = (name, uses + 1)
        return run_gated(name, x, gate, net)

    def __getstate__(self) -> dict[str, Any]:
        # What was measured and recorded belongs to this net on this device.
        own: dict[str, Any] = {"_fastest": {}, "_kept": {}, "_replays": None, "_replayed": {}}
        return {**self.__dict__, **own}

    @override
    def extra_repr(self) -> str:
        return f"engine={self.engine}"


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
