"""Protect what finished tasks have learned: their weights, and a gate for each task."""

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
    """The weights that finished tasks use, and their values.

    A task uses a connection if it opens the units at both of its ends, and a bias if it opens the
    unit. It uses everything that has no gate: norms, embeddings, maps between them. So what a
    finished task computes never changes, to the last bit, and all other weights are free.

    Args:
        module: The model.
        head: The map that makes the logits, if tasks have classes of their own.
        with_gates: Whether to protect the parameters of gates, too.
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
        # What another module reads too, such as an embedding, is used as a whole.
        self._shared = {p for child in others for p in child.parameters(recurse=False)}
        self._owners: list[Any] = [child for child in module.modules() if hasattr(child, "weight")]
        self._kept: dict[nn.Parameter, Tensor] = {}
        self._held: dict[nn.Parameter, Tensor] = {}  # what `_kept` is valid for
        self._hooks: dict[Optimizer, Any] = {}

    @torch.no_grad()
    def add(
        self, opened: Callable[[GateLike], Tensor | None], classes: Sequence[int] | None = None
    ) -> None:
        """Protect what a task uses.

        Args:
            opened: Returns the open blocks of a gate, bool; None if it may open any of them.
            classes: The outputs of the head that are the task's; None for all.
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
        """Keep the values of protected weights: those of now for what is protected from now on."""
        for parameter, used in self.used.items():
            if used.any():
                now = parameter.detach().clone()
                if parameter in self._kept:
                    now = torch.where(self._held[parameter], self._kept[parameter], now)
                self._kept[parameter], self._held[parameter] = now, used.clone()
        for owner in self._owners:
            set_protected(owner, self._held.get(owner.weight))

    def end(self) -> None:
        """Protect nothing any more."""
        for hook in self._hooks.values():
            hook.remove()
        self._kept, self._held, self._hooks = {}, {}, {}
        for owner in self._owners:
            set_protected(owner, None)

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """Let a step leave protected weights alone; their gradients take no part in clipping."""
        if optimizer not in self._hooks:
            hook = optimizer.register_step_post_hook(lambda done, *_: self.restore(done))
            self._hooks[optimizer] = hook
        for parameter in self._kept:
            if parameter.grad is not None:
                parameter.grad.masked_fill_(self.used[parameter], 0)

    @torch.no_grad()
    def restore(self, optimizer: Optimizer) -> None:
        """Give protected weights their values back after a step."""
        for parameter in self._held_by(optimizer):
            kept = torch.where(self.used[parameter], self._kept[parameter], parameter)
            parameter.copy_(kept)

    def reset_state(self, optimizer: Optimizer) -> None:
        """Let an optimizer forget what it keeps of protected weights, as momentum."""
        for parameter in self._held_by(optimizer):
            reset_state(optimizer, parameter, keep=~self.used[parameter])

    def _held_by(self, optimizer: Optimizer) -> list[nn.Parameter]:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [parameter for parameter in self._kept if id(parameter) in held]

    def share(self) -> float:
        """Return the share of weights that are protected, without those of gates."""
        weights = [used for p, used in self.used.items() if p not in self._in_gates]
        return sum(int(used.sum()) for used in weights) / sum(used.numel() for used in weights)

    def moved(self) -> bool:
        """Return True if something has changed protected weights past this."""
        pairs = [(p.detach()[self.used[p]], kept[self.used[p]]) for p, kept in self._kept.items()]
        return not all(torch.equal(now, kept) for now, kept in pairs)


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
        self.finished.append({name: _permanently_open(gate) for name, gate in self.gates.items()})

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


def _permanently_open(gate: StaticGate) -> Tensor:
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
