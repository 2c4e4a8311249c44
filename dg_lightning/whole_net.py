"""The MACs of a whole net: how often its linear maps run, and what everything else costs."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.backends import mha
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torchmetrics import Metric

from dg_lightning.compute import linear_maps, uncounted_modules
from dg_lightning.protocol import gate_layers

__all__ = ["CountWholeNet", "WholeNet"]


@dataclass(frozen=True)
class WholeNet:
    """What a forward pass does besides running each linear map once a sample.

    Args:
        runs: How often each linear map runs for a sample, by name: once for each position of a
            sequence.
        other: MACs a sample of convolutions, attention and everything else that is not counted.
        uncounted: Modules with weights that ran and that torch's counter does not know.
    """

    runs: dict[str, float] = field(default_factory=dict)
    other: int = 0
    uncounted: tuple[str, ...] = ()


class CountWholeNet:
    """Counts a forward pass with torch's own counter, which sees dense products.

    What happens outside of the module and its children, such as a loss or a metric, does not count.

    Args:
        module: The net, or a module that contains it.

    >>> from dg_lightning import GatedLinear
    >>> net = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), GatedLinear(8, 4), nn.Linear(4, 2))
    >>> with CountWholeNet(net) as count:
    ...     _ = net(torch.zeros(5, 1, 6))
    >>> count.whole(samples=5)
    WholeNet(runs={'2.linear': 1.0, '3': 1.0}, other=24, uncounted=())
    """

    def __init__(self, module: nn.Module) -> None:
        self._counter = FlopCounterMode(display=False)
        self._stack = ExitStack()
        gates = gate_layers(module, required=False)
        self._maps = {m.name: m for m in linear_maps(module)}
        self._followed: dict[str, Any] = {name: m.linear for name, m in self._maps.items()}
        self._followed |= gates
        self._gates = gates
        self._others = uncounted_modules(module)
        self._followed |= {name: module.get_submodule(name) for name in self._others if name}
        self._flops = dict.fromkeys(self._followed, 0)
        self._ran: set[str] = set()
        children = [child for child in module.children() if not isinstance(child, Metric)]
        self._roots = [module, *children]
        self._depth = 0
        self._total = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for name, module in self._followed.items():
                if isinstance(module, nn.Module):
                    self._follow(stack, name, module)
            for root in self._roots:
                self._follow_root(stack, root)
            # The counter knows plain products: nothing compiled, no fused attention.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
            mha.set_fastpath_enabled(False)
            stack.enter_context(self._counter)
            self._stack = stack.pop_all()
        return self

    def _follow(self, stack: ExitStack, name: str, module: nn.Module) -> None:
        before: list[int] = []

        def enter(*_: Any) -> None:
            self._ran.add(name)
            before.append(self._counter.get_total_flops())

        def leave(*_: Any) -> None:
            self._flops[name] += self._counter.get_total_flops() - before.pop()

        stack.callback(module.register_forward_pre_hook(enter).remove)
        stack.callback(module.register_forward_hook(leave).remove)

    def _follow_root(self, stack: ExitStack, root: nn.Module) -> None:
        before: list[int] = []

        def enter(*_: Any) -> None:
            self._depth += 1
            before.append(self._counter.get_total_flops())

        def leave(*_: Any) -> None:
            self._depth -= 1
            inside = self._counter.get_total_flops() - before.pop()
            self._total += 0 if self._depth else inside  # the outermost call has it all

        stack.callback(root.register_forward_pre_hook(enter).remove)
        stack.callback(root.register_forward_hook(leave).remove)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def whole(self, samples: int) -> WholeNet | None:
        """Return what was counted, a sample; None where a gated map did not run as a module.

        A map without gates that did not, such as the output of torch's attention, has no runs, and
        its MACs are among the others.
        """
        unseen = [self._maps[name] for name in self._maps if self._flops[name] == 0]
        if any(m.input_gate is not None or m.output_gate is not None for m in unseen):
            return None
        runs = {
            name: self._flops[name] / (2 * m.macs_dense * samples) for name, m in self._maps.items()
        }
        for name, gate in self._gates.items():
            if decision := int(gate.decision_macs()):
                runs[name] = self._flops[name] / (2 * decision * samples)
        counted = sum(self._flops[name] for name in (*self._maps, *self._gates))
        other = self._total - counted
        unknown = [n for n in self._others if n in self._ran and self._flops[n] == 0]
        return WholeNet(runs, round(other / (2 * samples)), tuple(unknown))
