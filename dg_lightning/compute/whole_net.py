"""Count how often each linear layer runs, and the MACs of all other modules in a network."""

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.backends import mha
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torchmetrics import Metric

from dg_lightning.compute.macs import dense_decision_macs, linear_maps, uncounted_modules
from dg_lightning.gates.protocol import Feeds, gate_layers


@dataclass(frozen=True)
class WholeNet:
    """What a network computes in addition to one run of each linear layer.

    Args:
        runs: How often each linear layer runs per sample, keyed by layer name. In a sequence, a
            layer runs once for each position.
        other: MACs per sample for everything else, such as convolutions.
        uncounted: Modules with weights that ran but that torch's counter does not support.
        between: MACs per sample for the products between a gate's producers and its consumer,
            keyed by gate name. In attention, a closed head saves its share of these MACs.
    """

    runs: dict[str, float] = field(default_factory=dict)
    other: int = 0
    uncounted: tuple[str, ...] = ()
    between: dict[str, int] = field(default_factory=dict)


class _NoTracker(nullcontext[None]):
    """No-op module tracker for a FLOP counter, which needs the attribute `parents`."""

    parents = frozenset({"Global"})


class FlopRecorder:
    """Context manager that counts the FLOPs in a forward pass with torch's counter.

    Matrix products count as dense. Computation outside the module and its children, such as a loss
    or a metric, is not counted.

    Args:
        module: The network, or a module that contains it.

    >>> from dg_lightning import GatedLinear
    >>> net = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), GatedLinear(8, 4), nn.Linear(4, 2))
    >>> with FlopRecorder(net) as count:
    ...     _ = net(torch.zeros(5, 1, 6))
    >>> count.result(samples=5)
    WholeNet(runs={'2.linear': 1.0, '3': 1.0}, other=24, uncounted=(), between={})
    """

    def __init__(self, module: nn.Module) -> None:
        self._net = module
        self._counter = FlopCounterMode(display=False)
        # Only the total is needed, and torch's module tracker fails if a module's input is a
        # Parameter while gradients are disabled.
        self._counter.mod_tracker = _NoTracker()  # type: ignore[assignment]
        self._stack = ExitStack()
        gates = gate_layers(module, required=False)
        self._maps = {m.name: m for m in linear_maps(module)}
        self._tracked: dict[str, Any] = {name: m.linear for name, m in self._maps.items()}
        self._tracked |= gates
        self._gates = gates
        runners = {f"{name}.runner": gate.feeds.runner for name, gate in gates.items()}
        self._runners = {name: runner for name, runner in runners.items() if runner is not None}
        self._tracked |= self._runners
        self._others = uncounted_modules(module)
        self._tracked |= self._others
        self._flops = dict.fromkeys(self._tracked, 0)
        self._between = dict.fromkeys(self._gates, 0)
        self._ran: set[str] = set()
        # gate name -> [FLOPs of other modules when the gate's producers last ran]
        self._made: dict[str, list[int]] = {}
        children = [child for child in module.children() if not isinstance(child, Metric)]
        roots = [module, *children]
        self._roots = [root for root in roots if not isinstance(root, torch.jit.ScriptModule)]
        self._depth = 0
        self._total = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for name, module in self._tracked.items():
                if isinstance(module, nn.Module):
                    self._track(stack, name, module)
            for name, gate in self._gates.items():
                self._track_between(stack, name, gate.feeds)
            for root in self._roots:
                self._track_root(stack, root)
            # The counter sees only plain products, so disable compiled code and fused attention.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
            mha.set_fastpath_enabled(False)
            stack.enter_context(self._counter)
            self._stack = stack.pop_all()
        return self

    def _track(self, stack: ExitStack, name: str, module: nn.Module) -> None:
        before: list[int] = []

        def on_enter(*_: Any) -> None:
            self._ran.add(name)
            before.append(self._counter.get_total_flops())

        def on_exit(*_: Any) -> None:
            self._flops[name] += self._counter.get_total_flops() - before.pop()

        stack.callback(module.register_forward_pre_hook(on_enter).remove)
        stack.callback(module.register_forward_hook(on_exit).remove)

    def _track_between(self, stack: ExitStack, name: str, feeds: Feeds) -> None:
        """Count the products between a gate's producers and its consumer.

        Counting starts after the first producer if the innermost module around the producers has no
        other linear layers, because relative-position attention multiplies before the last producer
        has run. Otherwise, counting starts after the last producer.
        """
        if not feeds.scales_between:
            return
        home = self._home_of(feeds)
        made = self._made.setdefault(name, [])

        def elsewhere() -> int:
            return self._counter.get_total_flops() - self._counted() - sum(self._between.values())

        def on_exit(*_: Any) -> None:
            if home is None or not made:
                made[:] = [elsewhere()]

        def on_enter(*_: Any) -> None:
            if made:
                self._between[name] += elsewhere() - made.pop()

        for producer in feeds.producers:
            stack.callback(producer.register_forward_hook(on_exit).remove)
        if home is not None:
            stack.callback(home.register_forward_pre_hook(lambda *_: made.clear()).remove)
        stack.callback(feeds.consumers[0].register_forward_pre_hook(on_enter).remove)

    def _home_of(self, feeds: Feeds) -> nn.Module | None:
        """Return the innermost module around a gate's producers, or None if it has other layers."""
        producers = set(feeds.producers)
        homes = [m for m in self._net.modules() if producers <= set(m.modules())]
        home = homes[-1]
        maps = {m.linear for m in self._maps.values()} & set(home.modules())
        return home if maps <= {*producers, *feeds.consumers} else None

    def _track_root(self, stack: ExitStack, root: nn.Module) -> None:
        before: list[int] = []

        def on_enter(*_: Any) -> None:
            if not self._depth:
                # Reset the counts of gates whose consumer did not run in an earlier pass.
                for made in self._made.values():
                    made.clear()
            self._depth += 1
            before.append(self._counter.get_total_flops())

        def on_exit(*_: Any) -> None:
            self._depth -= 1
            inside = self._counter.get_total_flops() - before.pop()
            self._total += 0 if self._depth else inside  # only count the outermost call

        stack.callback(root.register_forward_pre_hook(on_enter).remove)
        stack.callback(root.register_forward_hook(on_exit).remove)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _counted(self) -> int:
        """Return the FLOPs used by linear layers and gates."""
        return sum(self._flops[name] for name in (*self._maps, *self._gates, *self._runners))

    def result(self, samples: int) -> WholeNet | None:
        """Return the counts per sample, or None if a gated layer was not called as a module.

        An ungated layer that was not called, such as the output projection in torch's attention,
        has 0 runs, and its MACs are in `other`. If a gate has a `runner`, the layers whose weights
        the runner uses count as run once for each decision of the gate.
        """
        runs = {
            name: self._flops[name] / (2 * m.macs_dense * samples) for name, m in self._maps.items()
        }
        for name, gate in self._gates.items():
            if decision := dense_decision_macs(gate):
                runs[name] = self._flops[name] / (2 * decision * samples)
        decided = {id(gate): runs.get(name, 0.0) for name, gate in self._gates.items()}
        for name, m in self._maps.items():
            gated_by = m.output_gate or m.input_gate
            if runs[name] == 0 and gated_by is not None:
                if gated_by.feeds.runner is None:
                    return None
                runs[name] = decided[id(gated_by)]
        other = self._total - self._counted() - sum(self._between.values())
        unknown = [n for n in self._others if n in self._ran and self._flops[n] == 0]
        between = {n: round(flops / (2 * samples)) for n, flops in self._between.items() if flops}
        return WholeNet(runs, round(other / (2 * samples)), tuple(unknown), between)
