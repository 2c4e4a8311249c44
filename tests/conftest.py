"""Settings and helpers that all tests share."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch  # noqa: F401  # here, so that its log is not bound to a captured stream
import pytest
import torch
from hypothesis import settings
from small_roots import small_root

# The same examples in every run, and no deadline: the machines that run this are noisy.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _numbers_as_they_are() -> Iterator[None]:
    """Undo what the program or a Trainer says to torch: the next test does not expect it."""
    yield
    torch.set_flush_denormal(False)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid connections to anywhere but this machine."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        host = address[0] if isinstance(address, tuple) else ""
        if host not in ("", "localhost", "127.0.0.1", "::1", socket.gethostname()):
            refuse(host)
        connect(self, address)

    def refuse(host: str) -> NoReturn:
        raise AssertionError(f"A test tried to reach {host}.")

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(autouse=True)
def _no_data_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test read real datasets unless it says so."""
    for name in ("DG_DATA", "DG_CACHE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _no_seed_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what `seed_everything` has left in the environment, where subprocesses see it."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _no_run_of_another_test() -> Iterator[None]:
    """Close the run of W&B that a test leaves open: the next test's logger would go on with it."""
    yield
    if wandb := sys.modules.get("wandb"):
        wandb.finish()
        wandb.teardown()  # else the programs of other tests would talk to its service
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        del os.environ[name]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture
def in_two_processes(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], list[Any]]:
    """Run a script in two gloo processes; return the `result` that each of them leaves."""

    def run(source: str) -> list[Any]:
        script = tmp_path / "worker.py"
        script.write_text(
            "import json, os, sys\n"
            "import torch, torch.distributed as dist\n"
            f"sys.path[:0] = {[str(Path(__file__).parent), str(request.path.parent)]!r}\n"
            f"{source}\n"
            f"path = {str(tmp_path)!r} + f'/{{os.environ[\"RANK\"]}}.json'\n"
            "with open(path, 'w') as file:\n"
            "    json.dump(result, file)\n"
            "if dist.is_initialized():  # gloo may abort a rank that exits before the other\n"
            "    dist.barrier()\n"
            "    dist.destroy_process_group()\n"
        )
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        done = subprocess.run(
            [*launch, "--nproc-per-node=2", str(script)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]

    return run


@pytest.fixture(scope="session")
def small_datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a root with small datasets in their real formats."""
    return small_root(tmp_path_factory.mktemp("data"))


@pytest.fixture
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test of the program in a folder of its own, without pytest's command line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dg-lightning"])


@pytest.fixture
def run_program() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the program in a process of its own."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dg_lightning", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)

    return run
