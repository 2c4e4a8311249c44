"""The gates of a model, kept for each finished task."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dg_lightning.gates import StaticGate, gate_layers
from dg_lightning.gates.policies import open_probability
from dg_lightning.rewiring.sparse_layer import reset_state

__all__ = ["GatesByTask"]

_SURE = 20.0  # a logit in units of τ that opens or closes whatever the threshold is


class GatesByTask:
    """Static gates that decide for the current task, and can be set to those of a finished one.

    Args:
        module: The model, all of whose gates must be static.
        finished: The open blocks of each gate, by name, for each task that is finished.

    >>> from dg_lightning import GatedMLP
    >>> gates = GatesByTask(GatedMLP(8, [4], 2, gate={"kind": "static"}))
    >>> gates.finish(), gates.units_used()
    (None, 1.0)
    """

    def __init__(self, module: nn.Module, finished: list[dict[str, Tensor]] | None = None) -> None:
        self.gates: dict[str, StaticGate] = {}
        for name, gate in gate_layers(module).items():
            if not isinstance(gate, StaticGate):
                raise ValueError(f"TaskGates needs static gates, got {type(gate).__name__} {name}.")
            if gate.scale is not None:
                raise ValueError(
                    f"TaskGates makes gates hard, and {name} scales units by p: leave out `scale`."
                )
            self.gates[name] = gate
        self.finished = [] if finished is None else finished
        self._own: dict[str, Tensor] = {}  # logits of the current task, while others are in use

    @torch.no_grad()
    def finish(self) -> None:
        """Keep what the gates would open in deployment, for the task that ends."""
        self.finished.append({name: _is_open(gate) for name, gate in self.gates.items()})

    @torch.no_grad()
    def start(self, optimizers: list[Optimizer]) -> None:
        """Let gates decide anew, for the task that begins."""
        for gate in self.gates.values():
            gate.logit.copy_(gate.initial_logit().expand_as(gate.logit))
            for optimizer in optimizers:
                nothing = torch.zeros_like(gate.logit, dtype=torch.bool)
                reset_state(optimizer, gate.logit, keep=nothing)

    @torch.no_grad()
    def use(self, task: int) -> None:
        """Set gates to those of a finished task, or of the current one if it is not finished."""
        if task < len(self.finished):
            if not self._own:
                self._own = {name: gate.logit.clone() for name, gate in self.gates.items()}
            for name, gate in self.gates.items():
                opened = self.finished[task][name].to(gate.logit)
                gate.logit.copy_((2 * opened - 1) * _SURE * gate.temperature)
        else:
            for name, own in self._own.items():
                self.gates[name].logit.copy_(own)
            self._own = {}

    def opened(self, task: int) -> Mapping[Any, Tensor]:
        """Return the open blocks of a finished task, by gate."""
        return {gate: self.finished[task][name] for name, gate in self.gates.items()}

    def free(self, name: str) -> Tensor:
        """Return the blocks of a gate that no finished task uses."""
        free = torch.ones(self.gates[name].blocks, dtype=torch.bool)
        for opened in self.finished:
            free &= ~opened[name].cpu()
        return free

    def units_used(self) -> float:
        """Return the share of units that finished tasks use."""
        units = sum(gate.units for gate in self.gates.values())
        free = sum(int(self.free(n).sum()) * gate.block_size for n, gate in self.gates.items())
        return 1 - free / units

    @torch.no_grad()
    def press(self, weight: float, optimizer: Optimizer) -> None:
        """Add the gradient of a penalty on the mean p of free blocks, for an optimizer's logits."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        free = {name: self.free(name) for name in self.gates}
        count = sum(int(blocks.sum()) for blocks in free.values())
        for name, gate in self.gates.items():
            if weight and count and gate.logit.grad is not None and id(gate.logit) in held:
                gate.logit.grad += weight * _slope(gate) * free[name].to(gate.logit) / count


def _is_open(gate: StaticGate) -> Tensor:
    """Return the blocks that a gate opens in deployment."""
    training = gate.training
    gate.eval()
    opened = gate.decide(gate.logit.new_zeros(1, 1)) != 0
    gate.train(training)
    return opened.cpu()


def _slope(gate: StaticGate) -> Tensor:
    """Return the derivative of each p by its logit."""
    with torch.enable_grad():
        logit = gate.logit.detach().requires_grad_()
        p = open_probability(logit / gate.temperature, gate.policy)
        (slope,) = torch.autograd.grad(p.sum(), logit)
    return slope
