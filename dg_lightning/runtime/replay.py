"""CUDA graphs of a forward pass, which save launch time for small batches."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dg_lightning.gates.protocol import gate_layers

__all__ = ["GraphCache", "Recording"]

_MAX_GRAPHS = 4  # each has its own memory
_WARM_UP_RUNS = 3


class GraphCache:
    """Records a net's forward pass once for each input shape, and replays it.

    Replays follow in-place changes of parameters. The net is recorded again if parameters have
    moved or the floor of a gate has changed. Outputs are copies, which later replays do not change.

    Args:
        net: The net, in evaluation mode, without gradients.
        forward: The function to record.
    """

    def __init__(self, net: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
        self._net, self._forward = net, forward
        self._recordings: OrderedDict[Any, Recording] = OrderedDict()

    def __call__(self, x: Tensor) -> Tensor:
        addresses = tuple(p.data_ptr() for p in (*self._net.parameters(), *self._net.buffers()))
        gates: list[Any] = list(gate_layers(self._net, required=False).values())
        floors = tuple(getattr(gate, "_floor", None) for gate in gates)
        key = (x.shape, x.dtype, x.device, addresses, floors)
        recording = self._recordings.get(key)
        if recording is None:
            with torch.inference_mode(False):  # otherwise usable in inference mode only
                recording = self._recordings[key] = Recording(self._forward, x.clone(), self._net)
            if len(self._recordings) > _MAX_GRAPHS:
                self._recordings.popitem(last=False)
        self._recordings.move_to_end(key)
        recording.input.copy_(x)
        out = recording().clone()
        for gate in gates:
            gate.probability, gate.gate = gate.probability.clone(), gate.gate.clone()
        return out


class Recording:
    """A forward pass as a CUDA graph with fixed input and output tensors.

    Args:
        forward: The function to record; it must not synchronize with the device.
        x: The input tensor, read by every replay.
        net: The net whose gates are updated.
    """

    def __init__(self, forward: Callable[[Tensor], Tensor], x: Tensor, net: nn.Module) -> None:
        if not x.is_cuda:
            raise ValueError(f"Only a net on CUDA can be recorded, got an input on {x.device}.")
        self.input = x
        self._gates = list(gate_layers(net, required=False).values())
        side_stream = torch.cuda.Stream(x.device)
        side_stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.no_grad(), torch.cuda.stream(side_stream):
            for _ in range(_WARM_UP_RUNS):  # compiles kernels and initializes libraries
                forward(x)
        torch.cuda.current_stream(x.device).wait_stream(side_stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.device(x.device), torch.cuda.graph(self._graph):
            self.output = forward(x)
        self._gate_outputs = [(gate.probability, gate.gate) for gate in self._gates]

    def __call__(self) -> Tensor:
        """Replay the graph and return the output tensor, which is the same object every time."""
        self._graph.replay()
        for gate, (probability, g) in zip(self._gates, self._gate_outputs, strict=True):
            gate.probability, gate.gate = probability, g
        return self.output
