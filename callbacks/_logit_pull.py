"""A penalty's gradient by the logits of static gates: known without a forward or backward pass."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dg_lightning.gates import StaticGate
from dg_lightning.gates.policies import open_probability
from dg_lightning.recorded import Recorded

__all__ = ["LogitPull"]


class LogitPull:
    """Adds the gradient of a penalty on mean p to the one of the logits of static gates.

    With ``p = σ(z / τ)`` it takes a dozen tiny operations, which a GPU does as a recording.

    Args:
        gates: The gates.
    """

    def __init__(self, gates: Sequence[Any]) -> None:
        self.gates = gates
        self._recorded = Recorded()

    @staticmethod
    def fits(gate: Any) -> bool | None:
        """Tell whether the gradient by the logits of a gate is all that its p can give.

        None as long as there is no p with a graph to tell it by.
        """
        if type(gate) is not StaticGate:
            return False
        p = gate.probability
        if p is None or not p.requires_grad:
            return None
        # Not so where the logits were put in from outside, or a compiled net has made p.
        ahead: list[Any] = [p.grad_fn]
        leaves: list[Tensor] = []
        while ahead and len(leaves) < 2:
            node = ahead.pop()
            if hasattr(node, "variable"):
                leaves.append(node.variable)
            ahead += [before for before, _ in node.next_functions if before is not None]
        return len(leaves) == 1 and leaves[0] is gate.logit

    @torch.no_grad()
    def rates(self) -> Tensor:
        """Return the mean p of each gate."""
        return torch.stack([self._p(gate).mean() for gate in self.gates])

    @staticmethod
    def _p(gate: Any) -> Tensor:
        return open_probability(gate.logit / gate.temperature, gate.policy)

    @torch.no_grad()
    def add(
        self,
        gradient_of: Callable[[Tensor], Tensor],
        reads: Sequence[Tensor],
        scales: Sequence[float],
    ) -> None:
        """Add to the gradients that a backward pass has left.

        Args:
            gradient_of: The derivative of the penalty by the mean p of each gate, from those.
            reads: The tensors that it reads.
            scales: What it is multiplied by, for each gate.
        """
        own = [tensor for gate in self.gates for tensor in (gate.logit, gate.temperature)]
        pulls = self._recorded(partial(self._computed, gradient_of), [*own, *reads])
        gradients = [gate.logit.grad for gate in self.gates]
        apart = len(set(map(id, gradients))) == len(gradients)  # not so for tied logits
        if len(set(scales)) == 1 and apart and all(g is not None for g in gradients):
            torch._foreach_add_(gradients, pulls, alpha=scales[0])
            return
        for gate, pull, scale in zip(self.gates, pulls, scales, strict=True):
            if scale == 0:
                continue
            if gate.logit.grad is None:
                gate.logit.grad = pull * scale
            else:
                gate.logit.grad.add_(pull, alpha=scale)

    def _computed(self, gradient_of: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Return the gradient by the logits of each gate."""
        ps = [self._p(gate) for gate in self.gates]
        by_rate = gradient_of(torch.stack([p.mean() for p in ps])).unbind()
        return [
            pull * p * (1 - p) / (gate.temperature * len(p))
            for gate, p, pull in zip(self.gates, ps, by_rate, strict=True)
        ]
