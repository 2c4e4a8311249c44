"""Protect finished tasks by freezing the weights they use and keeping gates for each task."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dg_lightning.compute.macs import LinearMap, gate_submodules, linear_maps
from dg_lightning.gates import StaticGate, gate_layers
from dg_lightning.gates.policies import open_probability
from dg_lightning.gates.protocol import GateLike, set_protected
from dg_lightning.rewiring.sparse_layer import reset_state


class Protection:
    """The weights that finished tasks use, with their saved values.

    A task uses a connection if it opens the units at both ends, and a bias if it opens the unit. It
    also uses all parameters without gates, such as norms, embeddings and ungated layers. These
    weights are frozen, so the outputs of finished tasks stay bit-for-bit identical. All other
    weights remain free.

    Args:
        module: The model.
        head: The layer that computes the logits, if tasks have separate classes.
        with_gates: Whether to protect the parameters of gates too.
    """

    def __init__(
        self, module: nn.Module, head: nn.Module | None = None, with_gates: bool = False
    ) -> None:
        self.maps = linear_maps(module)
        self.head = head
        self._in_gates = {p for child in gate_submodules(module) for p in child.parameters()}
        left_out = set() if with_gates else self._in_gates
        self.used = {
            p: torch.zeros_like(p, dtype=torch.bool)
            for p in module.parameters()
            if p not in left_out
        }
        linears = {found.linear for found in self.maps}
        others = [child for child in module.modules() if child not in linears]
        # Parameters shared with another module, such as an embedding, are protected as a whole.
        self._shared = {p for child in others for p in child.parameters(recurse=False)}
        self._owners: list[Any] = [child for child in module.modules() if hasattr(child, "weight")]
        self._kept: dict[nn.Parameter, Tensor] = {}
        self._held: dict[nn.Parameter, Tensor] = {}  # mask of the valid values in `_kept`
        self._hooks: dict[Optimizer, Any] = {}

    @torch.no_grad()
    def add(
        self, opened: Callable[[GateLike], Tensor | None], classes: Sequence[int] | None = None
    ) -> None:
        """Protect the weights that a task uses.

        Args:
            opened: Function that returns a bool mask of a gate's open blocks, or None if any block
                may be open.
            classes: The task's classes among the outputs of the head, or None for all outputs.
        """
        partly = set()
        for linear_map in (found for found in self.maps if found.linear.weight in self.used):
            outputs, inputs = linear_map.expand_to_units(opened)
            weight = linear_map.linear.weight
            if linear_map.linear is self.head and classes is not None:
                rows = torch.arange(len(linear_map.matrix(weight)))
                outputs = torch.isin(rows, torch.tensor(list(classes)))
            partly |= self._use(linear_map, outputs, inputs)
        for parameter, used in self.used.items():
            if parameter not in partly - self._shared:
                used.fill_(True)
        self.hold()

    def _use(
        self, linear_map: LinearMap, outputs: Tensor | None, inputs: Tensor | None
    ) -> set[nn.Parameter]:
        weight = linear_map.linear.weight
        pairs = torch.ones_like(weight, dtype=torch.bool)
        matrix = linear_map.matrix(pairs)  # a view
        if outputs is not None:
            matrix &= outputs.to(pairs.device)[:, None, None]
        if inputs is not None:
            matrix &= inputs.to(pairs.device)[:, None]
        self.used[weight] |= pairs
        bias = linear_map.linear.bias
        if bias is None:
            return {weight}
        self.used[bias] |= True if outputs is None else outputs.to(bias.device)
        return {weight, bias}

    def hold(self) -> None:
        """Save the values of newly protected weights, and mark all protected weights."""
        for parameter, used in self.used.items():
            if used.any():
                now = parameter.detach().clone()
                if parameter in self._kept:
                    now = torch.where(self._held[parameter], self._kept[parameter], now)
                self._kept[parameter], self._held[parameter] = now, used.clone()
        for owner in self._owners:
            set_protected(owner, self._held.get(owner.weight))

    def end(self) -> None:
        """Stop protecting weights."""
        for hook in self._hooks.values():
            hook.remove()
        self._kept, self._held, self._hooks = {}, {}, {}
        for owner in self._owners:
            set_protected(owner, None)

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """Exclude protected weights from an optimizer step.

        Their gradients become 0, so that clipping ignores them. Their values are restored after
        the step.
        """
        if optimizer not in self._hooks:
            hook = optimizer.register_step_post_hook(lambda done, *_: self.restore(done))
            self._hooks[optimizer] = hook
        for parameter in self._kept:
            if parameter.grad is not None:
                parameter.grad.masked_fill_(self.used[parameter], 0)

    @torch.no_grad()
    def restore(self, optimizer: Optimizer) -> None:
        """Restore the values of protected weights after a step."""
        for parameter in self._held_by(optimizer):
            kept = torch.where(self.used[parameter], self._kept[parameter], parameter)
            parameter.copy_(kept)

    def reset_state(self, optimizer: Optimizer) -> None:
        """Reset optimizer state, such as momentum, for protected weights."""
        for parameter in self._held_by(optimizer):
            reset_state(optimizer, parameter, keep=~self.used[parameter])

    def _held_by(self, optimizer: Optimizer) -> list[nn.Parameter]:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [parameter for parameter in self._kept if id(parameter) in held]

    def share(self) -> float:
        """Return the share of weights that are protected, not counting gates."""
        weights = [used for p, used in self.used.items() if p not in self._in_gates]
        return sum(int(used.sum()) for used in weights) / sum(used.numel() for used in weights)

    def moved(self) -> bool:
        """Return True if protected weights differ from their saved values."""
        pairs = [(p.detach()[self.used[p]], kept[self.used[p]]) for p, kept in self._kept.items()]
        return not all(torch.equal(now, kept) for now, kept in pairs)


_SATURATED_LOGIT = 20.0  # |logit / τ| that opens or closes a gate at any threshold


class GatesByTask:
    """Static gates that can switch between the current task and finished tasks.

    Args:
        module: The model. All of its gates must be static.
        finished: For each finished task, a dict from gate names to open blocks.

    Raises:
        ValueError: If a gate is not static, or scales units by p.

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
                    f"TaskGates needs hard gates, but {name} scales units by p: remove `scale`."
                )
            self.gates[name] = gate
        self.finished = [] if finished is None else finished
        # Logits of the current task while the gates of a finished task are in use.
        self._own: dict[str, Tensor] = {}

    @torch.no_grad()
    def finish(self) -> None:
        """Save which blocks the gates open in deployment when a task ends."""
        self.finished.append({name: _permanently_open(gate) for name, gate in self.gates.items()})

    @torch.no_grad()
    def start(self, optimizers: list[Optimizer]) -> None:
        """Reset the gates and their optimizer state when a task begins."""
        for gate in self.gates.values():
            gate.logit.copy_(gate.initial_logit().expand_as(gate.logit))
            for optimizer in optimizers:
                nothing = torch.zeros_like(gate.logit, dtype=torch.bool)
                reset_state(optimizer, gate.logit, keep=nothing)

    @torch.no_grad()
    def use(self, task: int) -> None:
        """Switch to the gates of a finished task, or back to the gates of the current task."""
        if task < len(self.finished):
            if not self._own:
                self._own = {name: gate.logit.clone() for name, gate in self.gates.items()}
            for name, gate in self.gates.items():
                opened = self.finished[task][name].to(gate.logit)
                gate.logit.copy_((2 * opened - 1) * _SATURATED_LOGIT * gate.temperature)
        else:
            for name, own in self._own.items():
                self.gates[name].logit.copy_(own)
            self._own = {}

    def opened(self, task: int) -> Mapping[Any, Tensor]:
        """Return each gate's open blocks for a finished task."""
        return {gate: self.finished[task][name] for name, gate in self.gates.items()}

    def free(self, name: str) -> Tensor:
        """Return a bool mask of the blocks in a gate that no finished task uses."""
        free = torch.ones(self.gates[name].blocks, dtype=torch.bool)
        for opened in self.finished:
            free &= ~opened[name].cpu()
        return free

    def units_used(self) -> float:
        """Return the share of gated units that finished tasks use."""
        units = sum(gate.units for gate in self.gates.values())
        free = sum(int(self.free(n).sum()) * gate.block_size for n, gate in self.gates.items())
        return 1 - free / units

    @torch.no_grad()
    def press(self, weight: float, optimizer: Optimizer) -> None:
        """Add the gradient of a penalty on the mean p of free blocks to the logits' gradients."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        free = {name: self.free(name) for name in self.gates}
        count = sum(int(blocks.sum()) for blocks in free.values())
        for name, gate in self.gates.items():
            if weight and count and gate.logit.grad is not None and id(gate.logit) in held:
                gate.logit.grad += weight * _slope(gate) * free[name].to(gate.logit) / count


def _permanently_open(gate: StaticGate) -> Tensor:
    """Return a bool mask of the blocks that a gate opens in deployment."""
    training = gate.training
    gate.eval()
    opened = gate.decide(gate.logit.new_zeros(1, 1)) != 0
    gate.train(training)
    return opened.cpu()


def _slope(gate: StaticGate) -> Tensor:
    """Return the derivative of each p with respect to its logit."""
    with torch.enable_grad():
        logit = gate.logit.detach().requires_grad_()
        p = open_probability(logit / gate.temperature, gate.policy)
        (slope,) = torch.autograd.grad(p.sum(), logit)
    return slope
