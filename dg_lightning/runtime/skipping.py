"""Gated feed-forwards of a Transformer that compute only the blocks that a token opens."""

from typing import get_args

import torch
from torch import Tensor, nn

from dg_lightning.gates import Gate
from dg_lightning.gates.policies import HARD_POLICIES
from dg_lightning.layers import GatedFeedForward
from dg_lightning.runtime.block_gated import has_hooks
from dg_lightning.runtime.dispatch import Engine, Runner

__all__ = ["skip_closed_blocks"]


def skip_closed_blocks(model: nn.Module, engine: Engine = "auto") -> None:
    """Let every `GatedFeedForward` of a model skip the blocks that a token closes.

    Values stay the same up to rounding. So do gradients of gates that scale (`scale: probability`);
    others get none from closed blocks, so `auto` computes everything while they are trained. In a
    compiled model everything is computed as before.

    Args:
        model: The model.
        engine: `auto` takes the fastest by measuring; `masked` computes everything again; `blocks`,
            `rows` and `triton` are described in `BlockGatedMLP`.

    >>> layer = GatedFeedForward(8, 32, gate={"kind": "dynamic", "block_size": 8})
    >>> skip_closed_blocks(layer, "blocks")
    >>> layer(torch.randn(2, 3, 8)).shape
    torch.Size([2, 3, 8])
    """
    known = [name for name in get_args(Engine) if name != "graph"]
    if engine not in known:
        raise ValueError(f"`engine` must be one of {', '.join(known)}, got {engine!r}.")
    layers = [layer for layer in model.modules() if isinstance(layer, GatedFeedForward)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no GatedFeedForward: build its blocks with "
            "dg_lightning.GatedFeedForward, whose closed blocks can be skipped."
        )
    runner = Runner(engine)
    for place, layer in enumerate(layers):
        layer.skip = None if engine == "masked" else Skip(runner, place)


class Skip:
    """What a feed-forward asks before it computes everything.

    Args:
        runner: Runs the open blocks.
        place: The place of the layer in the model.
    """

    def __init__(self, runner: Runner, place: int) -> None:
        self.runner = runner
        self.place = place

    def __call__(self, layer: GatedFeedForward, h: Tensor) -> Tensor | None:
        """Return the output of a layer, or None if everything must be computed."""
        gate = layer.applied_gate
        if gate is None or not self._applies(layer, gate):
            return None
        parts = layer.first, layer.activation, layer.second
        rows = h.reshape(h.shape[:-1].numel(), h.shape[-1])
        out = self.runner(rows, gate, *parts, self.place, layer.other)
        return out.view(*h.shape[:-1], out.shape[-1])

    def _applies(self, layer: GatedFeedForward, gate: Gate) -> bool:
        learns = gate.training and torch.is_grad_enabled() and gate.scale is None
        own = vars(gate).get("hooks")  # of `add_gates`
        parts = gate, layer.first, layer.other, layer.activation, layer.second
        return (
            self.runner.may_skip(gate)
            and gate.input_dependent
            and (gate.policy in HARD_POLICIES or not gate.training)
            and not (learns and self.runner.engine == "auto")
            and not any(isinstance(part, nn.Module) and has_hooks(part, own) for part in parts)
        )
