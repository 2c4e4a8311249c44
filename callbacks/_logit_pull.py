"""A penalty's gradient by the logits of static gates: known without a forward or backward pass."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dg_lightning.gates import StaticGate
from dg_lightning.gates.policies import open_probability

__all__ = ["LogitPull"]

_WARM_UP = 3


class LogitPull:
    """Adds the gradient of a penalty on mean p to the one of the logits of static gates.

    With ``p = σ(z / τ)`` it takes a dozen tiny operations, and on a GPU each costs its launch:
    there they are recorded once, and replayed as one. A replay reads tensors where they lie: what
    is changed in place is followed, and a tensor that was replaced makes for a new recording.

    Args:
        gates: The gates.
    """

    def __init__(self, gates: Sequence[Any]) -> None:
        self.gates = gates
        self._recorded: tuple[Any, torch.cuda.CUDAGraph, list[Tensor]] | None = None

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
        pulls = self._pulls(gradient_of, reads)
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

    def _pulls(
        self, gradient_of: Callable[[Tensor], Tensor], reads: Sequence[Tensor]
    ) -> list[Tensor]:
        if not self.gates[0].logit.is_cuda:
            return self._computed(gradient_of)
        own = [tensor for gate in self.gates for tensor in (gate.logit, gate.temperature)]
        key = [tensor.data_ptr() for tensor in (*own, *reads)]
        if self._recorded is None or self._recorded[0] != key:
            self._recorded = (key, *self._record(gradient_of))
        self._recorded[1].replay()
        return self._recorded[2]

    def _record(
        self, gradient_of: Callable[[Tensor], Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):
                self._computed(gradient_of)
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads, as those that pin memory for a loader, may go on with what they do.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            pulls = self._computed(gradient_of)
        return graph, pulls

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_recorded": None}

    def _computed(self, gradient_of: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Return the gradient by the logits of each gate."""
        ps = [self._p(gate) for gate in self.gates]
        by_rate = gradient_of(torch.stack([p.mean() for p in ps])).unbind()
        return [
            pull * p * (1 - p) / (gate.temperature * len(p))
            for gate, p, pull in zip(self.gates, ps, by_rate, strict=True)
        ]
