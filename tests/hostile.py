"""Hostile files: each would leave a canary if any of its code ran."""

import os
import pickle
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

import torch

CANARY = "canary"
# In the working folder, which the program can import from.
EVIL = f"""
open({CANARY!r}, "w").close()
import lightning.pytorch as pl
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()
        open({CANARY!r}, "w").close()

class Optimizer(torch.optim.SGD):
    pass

class Data(pl.LightningDataModule):
    pass

class Model(pl.LightningModule):
    pass

def function(*args, **kwargs):
    open({CANARY!r}, "w").close()
"""
TOUCH = f"touch {CANARY}"


class Bomb:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (TOUCH,)


def _net(class_path: Any, **init_args: Any) -> Callable[[dict[str, Any]], None]:
    def change(checkpoint: dict[str, Any]) -> None:
        spec = {"class_path": class_path, "init_args": init_args}
        checkpoint["hyper_parameters"]["net"] = spec

    return change


def _value(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(checkpoint: dict[str, Any]) -> None:
        checkpoint["hyper_parameters"][name] = value

    return change


def _argument(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(checkpoint: dict[str, Any]) -> None:
        checkpoint["hyper_parameters"]["net"]["init_args"][name] = value

    return change


def _top(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(checkpoint: dict[str, Any]) -> None:
        checkpoint[name] = value

    return change


_SPEC = {"class_path": "evil.Net", "init_args": {}}
# By name: what is changed in a good checkpoint.
CHECKPOINTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "os.system": _net("os.system", command=TOUCH),
    "subprocess.Popen": _net("subprocess.Popen", args=["touch", CANARY]),
    "builtins.exec": _net("builtins.exec", source=f"open({CANARY!r}, 'w')"),
    "runpy": _net("runpy.run_path", path_name="evil.py"),
    "torch.hub": _net("torch.hub.load", repo_or_dir=".", model="evil", source="local"),
    "a module that acts when imported": _net("evil.Net"),
    "a function of it": _net("evil.function"),
    "a function of torch": _net("torch.nn.functional.relu"),
    "a submodule that is not there": _net("torch.nn.evil.Net"),
    "a prefix that looks trusted": _net("torch.nn_evil.Net"),
    "our own prefix": _net("dg_lightning_evil.Net"),
    "a relative path": _net(".evil.Net"),
    "a path of a file": _net("./evil.py"),
    "no text": _net(["evil", "Net"]),
    "an argument": _argument("gate", _SPEC),
    "an argument of a list": _argument("hidden", [4, _SPEC]),
    "a text in place of a net": _value("net", "evil.Net"),
    "a file in place of a net": _value("net", "hostile.yaml"),
    "a text argument": _net(
        "torch.nn.TransformerEncoderLayer", d_model=4, nhead=1, activation="evil.function"
    ),
    "an optimizer": _value("optimizer", {"class_path": "evil.Optimizer"}),
    "an optimizer that is a command": _value(
        "optimizer", {"class_path": "os.system", "init_args": {"command": TOUCH}}
    ),
    "a text in place of an optimizer": _value("optimizer", "evil.Optimizer"),
    "a scheduler": _value("lr_scheduler", {"class_path": "subprocess.Popen"}),
    "a model": _value("_class_path", "evil.Model"),
    "a model that is a function": _value("_class_path", "os.system"),
    "an instantiator": _value("_instantiator", "evil.function"),
    "Lightning's instantiator": _value("_instantiator", "lightning.pytorch.cli.instantiate_module"),
    "a key of Lightning's first versions": _top("hparams", {"net": _SPEC}),
    "another one": _top("module_arguments", {"net": _SPEC}),
    "a file of the checkout": _net("dg_lightning.tests.hostile.Net"),
    "a script of the checkout": _net("dg_lightning.examples.demo.Net"),
    "hyper-parameters that are no dict": _top("hyper_parameters", [_SPEC]),
    "hyper-parameters of data": _top("datamodule_hyper_parameters", {"a": _SPEC}),
    "an object": _top("anything", Bomb()),
    "an object among the weights": lambda checkpoint: checkpoint["state_dict"].update(x=Bomb()),
    "an object of a callback": lambda checkpoint: checkpoint["callbacks"].update(x=Bomb()),
}
# What need not be an error in `test`: nothing of it is built there.
BUILT_IN_TRAINING_ONLY = {"a text in place of an optimizer", "a scheduler"}


def lay_out(folder: Path) -> None:
    """Write the module that acts when it is imported, and a config that names it."""
    (folder / "evil.py").write_text(EVIL)
    (folder / "torch_nn_evil.py").write_text(EVIL)
    (folder / "dg_lightning_evil.py").write_text(EVIL)
    (folder / "hostile.yaml").write_text("class_path: evil.Net\n")


def hostile_checkpoint(good: Path, target: Path, name: str) -> None:
    """Write a checkpoint that tries something."""
    checkpoint = torch.load(good, weights_only=True)
    CHECKPOINTS[name](checkpoint)
    target.parent.mkdir(parents=True, exist_ok=True)
    torch.save(checkpoint, target)


def is_untouched(folder: Path) -> bool:
    """Return True if no hostile code has run."""
    return not (folder / CANARY).exists() and "evil" not in sys.modules


def pickled_bomb() -> bytes:
    """Return a pickle that runs a command."""
    return pickle.dumps({"data": Bomb(), "labels": [0]}, protocol=2)


class TookTooLong(BaseException):
    """No `Exception`, so that no handler turns a hang into a message."""


@contextmanager
def time_limit(seconds: int = 20) -> Iterator[None]:
    """Fail if the block does not end, as with data that is exponentially large."""

    def stop(*_: Any) -> NoReturn:
        raise TookTooLong(f"It did not end within {seconds} s.")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def memory_limit(gigabytes: float = 3.0) -> Iterator[None]:
    """Let this process take only so much more memory, so that a bomb harms no other program."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + int(gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class AnsweringServer(ThreadingHTTPServer):
    """Gives the k-th answer to the k-th download of a path, and the last one ever after.

    Args:
        answers: What each path answers, in order.
    """

    def __init__(self, answers: Mapping[str, Sequence[bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Answering)
        self.answers = answers
        self.downloads: Counter[str] = Counter()

    def url(self, path: str) -> str:
        """Return the address of a path."""
        return f"http://127.0.0.1:{self.server_port}{path}"


class _Answering(BaseHTTPRequestHandler):
    server: AnsweringServer

    def do_HEAD(self) -> None:
        self._next_answer()

    def do_GET(self) -> None:
        body = self._next_answer()
        self.server.downloads[self.path] += 1
        self.wfile.write(body)

    def _next_answer(self) -> bytes:
        answers = self.server.answers[self.path]
        body = answers[min(self.server.downloads[self.path], len(answers) - 1)]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return body

    def log_message(self, *args: Any) -> None: ...


@contextmanager
def serving(answers: Mapping[str, Sequence[bytes]]) -> Iterator[AnsweringServer]:
    """Run a server with these answers."""
    with AnsweringServer(answers) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def doubled(times: int) -> list[Any]:
    """Return a list that holds 2 to the power of `times` texts, in `times` small lists."""
    found: list[Any] = ["a"]
    for _ in range(times):
        found = [found, found]
    return found


def endless_list() -> list[Any]:
    """Return a list that holds itself."""
    found: list[Any] = []
    found.append([found])
    return found


def nested(depth: int) -> list[Any]:
    """Return a list in a list in a list."""
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found
