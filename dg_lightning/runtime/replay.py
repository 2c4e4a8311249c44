"""CUDA graphs of a net: all its launches as one, for batches that are small for a GPU."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dg_lightning.protocol import gate_layers

__all__ = ["Recording", "Replays"]

_MOST = 4  # graphs that are kept; each has memory of its own
_WARM_UP = 3


class Replays:
    """Records a net's forward pass, once for each shape of input, and replays it.

    A replay reads the parameters where they lie, so it follows changes in place; parameters that
    were moved, and gates with another floor, are recorded anew. It gives back a copy, so what it
    returned before stays.

    Args:
        net: The net, in evaluation, without gradients.
        forward: What to record.
    """

    def __init__(self, net: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
        self._net, self._forward = net, forward
        self._kept: OrderedDict[Any, Recording] = OrderedDict()

    def __call__(self, x: Tensor) -> Tensor:
        addresses = tuple(p.data_ptr() for p in (*self._net.parameters(), *self._net.buffers()))
        gates: list[Any] = list(gate_layers(self._net, required=False).values())
        floors = tuple(getattr(gate, "_floor", None) for gate in gates)
        key = (x.shape, x.dtype, x.device, addresses, floors)
        recording = self._kept.get(key)
        if recording is None:
            with torch.inference_mode(False):  # else only that mode could use it again
                recording = self._kept[key] = Recording(self._forward, x.clone(), self._net)
            if len(self._kept) > _MOST:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        recording.input.copy_(x)
        out = recording().clone()
        for gate in gates:
            gate.probability, gate.gate = gate.probability.clone(), gate.gate.clone()
        return out


class Recording:
    """A forward pass as a CUDA graph, from one tensor to another.

    Args:
        forward: What to record; it must not wait for the device.
        x: The input, which every replay reads.
        net: Whose gates it sets.
    """

    def __init__(self, forward: Callable[[Tensor], Tensor], x: Tensor, net: nn.Module) -> None:
        if not x.is_cuda:
            raise ValueError(f"Only a net on CUDA can be recorded, got an input on {x.device}.")
        self.input = x
        self._gates = list(gate_layers(net, required=False).values())
        aside = torch.cuda.Stream(x.device)
        aside.wait_stream(torch.cuda.current_stream(x.device))
        with torch.no_grad(), torch.cuda.stream(aside):
            for _ in range(_WARM_UP):  # kernels are compiled, and libraries set up
                forward(x)
        torch.cuda.current_stream(x.device).wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.device(x.device), torch.cuda.graph(self._graph):
            self.output = forward(x)
        self._left = [(gate.probability, gate.gate) for gate in self._gates]

    def __call__(self) -> Tensor:
        """Run it again, and return the output tensor, the same every time."""
        self._graph.replay()
        for gate, (probability, g) in zip(self._gates, self._left, strict=True):
            gate.probability, gate.gate = probability, g
        return self.output
