"""Compiled kernels are launched by addresses, others as Triton does it."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from dg_lightning import kernel_launch
from dg_lightning.kernel_launch import Launch


class Run:
    """What Triton 3.6 makes of a compiled kernel."""

    launch_cooperative_grid, launch_pdl = True, False
    global_scratch_size = profile_scratch_size = 0

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(("run", arguments))

    def launch(self, *arguments: Any) -> None:
        self.calls.append(("launch", arguments))


class Kernel:
    """Stands in for a kernel: notes how it is launched."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.run, self.function, self.packed_metadata = Run(self.calls), 77, (4, 1, 0)

    def __getitem__(self, grid: Any) -> Any:
        def compile_and_launch(*arguments: Any, **options: Any) -> "Kernel":
            self.calls.append(("compiled", grid, arguments, options))
            return self

        return compile_and_launch


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_launch, "DIRECTLY", True)
    monkeypatch.setattr(kernel_launch, "_device_of_now", lambda: -1)  # where tensors of a CPU lie
    monkeypatch.setattr(kernel_launch, "_stream_of", lambda device: 5)


def tensors_of(number: int) -> list[torch.Tensor]:
    return [torch.zeros(64)[:32] for _ in range(number)]  # a CPU's too lie at multiples of 16


@pytest.mark.parametrize(
    ("version", "scratch", "way"),
    [((3, 6), 0, "launch"), ((3, 6), 8, "run"), ((3, 7), 0, "run"), ((3, 9), 0, "run")],
)
def test_the_second_launch_is_by_addresses(
    version: Any, scratch: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_launch, "VERSION", version)
    monkeypatch.setattr(Run, "global_scratch_size", scratch)
    kernel = Kernel()
    launch, tensors = Launch(kernel, num_warps=8), tensors_of(2)
    addresses = [tensor.data_ptr() for tensor in tensors]
    launch(3, tensors, (10, True), "key")
    ((_, grid, arguments, options),) = kernel.calls
    assert (grid, options) == ((3, 1, 1), {"num_warps": 8})
    assert all(a is b for a, b in zip(arguments, [*tensors, 10, True], strict=True))
    launch(4, tensors, (11, True), "key")
    between = (77, True, False, None, None, (4, 1, 0)) if way == "launch" else (77, (4, 1, 0))
    hooks = None, None, None
    assert kernel.calls[1] == (way, (4, 1, 1, 5, *between, *hooks, *addresses, 11, True))


def test_what_was_compiled_for_others_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    launch, tensors = Launch(kernel), tensors_of(2)
    launch(3, tensors, (), "key")
    launch(3, tensors, (), "other key")
    launch(3, [tensors[0], torch.zeros(33)[1:]], (), "key")  # not at a multiple of 16
    monkeypatch.setattr(kernel_launch, "_device_of_now", lambda: 0)
    launch(3, tensors, (), "key")
    assert [call[0] for call in kernel.calls] == ["compiled"] * 4
    monkeypatch.setattr(kernel_launch, "DIRECTLY", False)
    launch = Launch(kernel)
    launch(3, tensors, (), "key")
    launch(3, tensors, (), "key")
    assert [call[0] for call in kernel.calls] == ["compiled"] * 6


def test_bools_are_handed_over_as_bytes() -> None:
    kernel = Kernel()
    Launch(kernel)(1, [torch.ones(32, dtype=torch.bool)], (), "key")
    assert kernel.calls[0][2][0].dtype == torch.uint8


def test_a_launch_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_launch, "VERSION", (3, 6))
    kernel = Kernel()
    launch, tensors = Launch(kernel), tensors_of(1)
    again = launch.repeatedly(2, tensors, (9,), "key")
    assert [call[0] for call in kernel.calls] == ["compiled"]
    again()
    name, arguments = kernel.calls[1]
    assert name == "launch"
    assert arguments[:4] == (2, 1, 1, 5)
    assert arguments[-2:] == (tensors[0].data_ptr(), 9)
    monkeypatch.setattr(kernel_launch, "_device_of_now", lambda: 0)  # somebody is elsewhere
    again()
    assert kernel.calls[2][0] == "compiled"


def test_one_that_is_not_aligned_is_repeated_as_triton_does_it() -> None:
    kernel = Kernel()
    launch = Launch(kernel)
    launch.repeatedly(2, tensors_of(1), (), "key")
    again = launch.repeatedly(2, [torch.zeros(33)[1:]], (), "key")
    again()
    assert [call[0] for call in kernel.calls] == ["compiled"] * 3
