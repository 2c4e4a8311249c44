"""Collect the findings of a check: in one process, after resuming, and between ranks."""

import copy
import json
import os
import pickle
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeAlias
from zlib import crc32

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from typing_extensions import override

from dg_lightning.compute import gate_submodules
from dg_lightning.monitoring.views import watched_gates
from dg_lightning.schedules import Clock, Duration, Schedule, plan_warnings

from .probe import (
    Copies,
    ProbeResult,
    is_ours,
    own_settings,
    run_steps,
    shorten_schedules,
    targets,
    without_io_callbacks,
)

Status: TypeAlias = Literal["OK", "warning", "ERROR"]

_COLORS = {"OK": "green", "warning": "yellow", "ERROR": "bold red"}


@dataclass(frozen=True)
class Finding:
    """The result of one part of a check.

    Args:
        status: Severity of the finding.
        what: What was checked.
        found: What was found and, if there is a problem, how to solve it.
    """

    status: Status
    what: str
    found: str


@dataclass
class Report:
    """The findings of a check, shown as a table when printed.

    >>> report = Report()
    >>> report.add("OK", "gates", "2 gates.")
    >>> report.ok
    True
    """

    findings: list[Finding] = field(default_factory=list)

    def add(self, status: Status, what: str, found: str) -> None:
        """Add a finding."""
        self.findings.append(Finding(status, what, found))

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return all(finding.status != "ERROR" for finding in self.findings)

    def to_json(self) -> str:
        """Return the findings as JSON."""
        content = {"ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}
        return json.dumps(content, indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        """Return the findings as a table."""
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(title="Check", box=box.SIMPLE, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for finding in self.findings:
            status = f"[{_COLORS[finding.status]}]{finding.status}[/]"
            table.add_row(status, escape(finding.what), escape(finding.found))
        console = Console()
        with console.capture() as capture:
            console.print(table)
        return capture.get().rstrip()


_STEPS = 8
_PATIENCE = timedelta(seconds=60)  # how long one process waits for the other


class CompareRanks(pl.Callback):
    """Records the batch after which each weight first differs between ranks.

    It must be the last callback.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.batches = 0
        self.different: dict[str, int] = {}

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        self.batches += 1
        own = {
            name: crc32(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
            for name, parameter in pl_module.named_parameters()
        }
        every: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(every, own)
        for name in own:
            if len({other[name] for other in every}) > 1:
                self.different.setdefault(name, self.batches)
        if trainer.is_global_zero:
            self.path.write_text(json.dumps([self.batches, self.different]), encoding="utf-8")
        if self.batches >= _STEPS:
            trainer.should_stop = True


def check_ranks(
    model: Any, data: Any, callbacks: Sequence[Any], arguments: dict[str, Any]
) -> Finding:
    """Run a few steps in two processes on the CPU, and compare their weights."""
    what = "two processes"
    strategy = DDPStrategy(
        find_unused_parameters=True,
        start_method="spawn",
        process_group_backend="gloo",
        timeout=_PATIENCE,
    )
    with tempfile.TemporaryDirectory() as folder, _stdout_is_stderr():
        path = Path(folder, "ranks.json")
        own, copies = own_settings(arguments, folder), Copies(model, callbacks)
        shorten_schedules(copies.callbacks)
        try:
            trainer = pl.Trainer(
                **{**own, "accelerator": "cpu"},
                callbacks=[*copies.callbacks, CompareRanks(path)],
                devices=2,
                strategy=strategy,
            )
            trainer.fit(copies.model, data)
        except Exception as error:  # either process may raise anything
            return Finding("ERROR", what, f"Training fails: {_last_line(error)}")
        batches, different = json.loads(path.read_text(encoding="utf-8"))
    if different:
        where = ", ".join(f"{name} (batch {batch})" for name, batch in different.items())
        return Finding("ERROR", what, f"Weights differ between the processes: {where}.")
    return Finding("OK", what, f"Weights are equal after each of {batches} batches.")


@contextmanager
def _stdout_is_stderr() -> Iterator[None]:
    """Redirect stdout to stderr, because gloo writes to stdout, where the report belongs."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _last_line(error: Exception) -> str:
    """Return the last line of an error message, which may end with a remote traceback."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    last = lines[-1] if lines else type(error).__name__
    if "imed out" in str(error):
        return f"one process timed out while waiting for the other ({last})"
    if "pickle" in str(error):
        return f"{last} (objects defined in a notebook cannot be sent to other processes)"
    return last


class Resumed(pl.Callback):
    """Records the state from which a resumed run starts.

    It must be the last callback.
    """

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        ours = [c for c in trainer.callbacks if is_ours(c)]  # type: ignore[attr-defined]
        self.state = copy.deepcopy({
            "step": trainer.global_step,
            "weights": pl_module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "callbacks": {c.state_key: state for c in ours if (state := c.state_dict())},
        })  # fmt: skip
        trainer.should_stop = True


def compare_resumed(
    model: Any, data: Any, callbacks: Sequence[Any], arguments: dict[str, Any], path: Path
) -> Finding:
    """Resume from a checkpoint, and compare the restored state with the saved one."""
    saved = torch.load(path, map_location="cpu", weights_only=False)
    resumed, copies = Resumed(), Copies(model, callbacks)
    shorten_schedules(copies.callbacks)
    what = "checkpoint"
    with tempfile.TemporaryDirectory() as folder, torch.compiler.set_stance("force_eager"):
        trainer = pl.Trainer(
            **own_settings(arguments, folder),
            callbacks=[*copies.callbacks, resumed],
            devices=1,
        )
        try:
            trainer.fit(copies.model, data, ckpt_path=str(path), weights_only=False)
        except Exception as error:  # any error would also stop the real run
            line = " ".join(str(error).split())
            return Finding("ERROR", what, f"Resuming fails: {type(error).__name__}: {line}")
    if not resumed.state:
        return Finding("warning", what, "Resuming was not tested because the run had finished.")
    ours = [callback.state_key for callback in copies.callbacks if is_ours(callback)]
    kept = {key: value for key, value in saved["callbacks"].items() if key in ours and value}
    expected = {
        "step": saved["global_step"],
        "weights": saved["state_dict"],
        "optimizers": saved["optimizer_states"],
        "callbacks": kept,
    }
    different = [part for part in expected if not _same(resumed.state[part], expected[part])]
    if different:
        return Finding("ERROR", what, f"Not restored as saved: {', '.join(different)}.")
    names = ", ".join(key.partition("{")[0] for key in kept) or "no callback"
    text = f"Resumes at step {expected['step']} with all saved state, including {names}."
    return Finding("OK", what, text)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one.cpu(), other.cpu())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    equal = one == other
    return bool(equal.all() if hasattr(equal, "all") else equal)


_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_MAX_NAMES = 6
_DURATIONS = ("begin", "until", "freeze_at", "transition", "revive_after", "revive_until")


def add_findings(report: Report, given: Sequence[Any], copies: Copies, seen: ProbeResult) -> None:
    """Add the findings from a run in one process."""
    ours = copies.callbacks
    if seen.batches == 0:
        _callbacks(report, given, ours, seen)
        return
    _steps(report, given, seen)
    _gates(report, ours, seen)
    _callbacks(report, given, ours, seen)
    _plan(report, given, copies.model, seen)
    _dense_layers(report, copies.model, ours)
    if any(_presses(callback) for callback in ours):
        _penalty(report, ours, seen)
    if any(hasattr(callback, "connections") for callback in ours):
        _zeros(report, seen)
    _ledger(report, seen)


def _steps(report: Report, given: Sequence[Any], seen: ProbeResult) -> None:
    """Compare Lightning's step count with the actual and the expected numbers of steps."""
    made = f"{seen.steps} optimizer steps in {seen.batches} batches"
    if seen.optimizer_steps > seen.steps:
        report.add(
            "ERROR",
            "steps",
            f"Lightning counted {made}, but {seen.optimizer_steps} were made: call `step()` on "
            "`self.optimizers()` in `training_step`.",
        )
        return
    clock, expected = seen.clock, seen.batches * seen.optimizers
    assert clock is not None
    durations = [v for c in given if is_ours(c) for v in _moments(c).values()]
    rests_on_it = any(not isinstance(v, int) and "step" not in str(v) for v in durations)
    if clock.assumed and rests_on_it and seen.steps < 0.9 * expected:
        share = seen.steps / expected
        total = round(share * clock.total_steps) if clock.total_steps else None
        remedy = f"`max_steps={total}`" if total else "`max_steps`"
        report.add(
            "ERROR",
            "steps",
            f"{made}, {share:.0%} of what schedules assume, so the schedules will not finish: set "
            f"{remedy} in the Trainer.",
        )
        return
    end = "no known end" if clock.total_steps is None else f"{clock.total_steps:,} steps in all"
    report.add("OK", "steps", f"{made}; {end}.")


def _gates(report: Report, ours: Sequence[Any], seen: ProbeResult) -> None:
    if not seen.gates:
        report.add(
            "OK" if not any(map(is_ours, ours)) else "warning",
            "gates",
            "The module has no gates: use dg_lightning.GatedLinear, for example.",
        )
        return
    idle = [name for name in seen.gates if name not in seen.ran]
    if seen.untrained:
        report.add(
            "ERROR",
            "gates",
            f"No optimizer holds the parameters of {_names(seen.untrained)}: add them to one in "
            "`configure_optimizers`.",
        )
    elif idle:
        report.add(
            "warning",
            "gates",
            f"{_names(idle)} did not run in {seen.batches} batches: use them in `forward`.",
        )
    else:
        units = sum(gate.units for gate in seen.gates.values())
        found = f"{len(seen.gates)} with {units:,} units: {_names(seen.gates)}."
        report.add("OK", "gates", found)
    watched = watched_gates(ours)
    if unwatched := [name for name in seen.gates if name not in watched]:
        report.add(
            "OK",
            "collapse",
            f"Not watched: {_names(unwatched)}. CollapseDetector would warn if they fail.",
        )


def _callbacks(
    report: Report, given: Sequence[Any], ours: Sequence[Any], seen: ProbeResult
) -> None:
    """Report what each callback of this package acts on, and when."""
    for callback, copied in zip(without_io_callbacks(given), ours, strict=True):
        if not is_ours(callback):
            continue
        name, found = type(callback).__name__, targets(copied)
        if name in seen.dead:
            gone = _names(seen.dead[name])
            report.add("ERROR", name, f"Acts on {gone}, which the module no longer contains.")
            continue
        text = f"Acts on {_names(found)}." if found else "Active."
        assert seen.clock is not None
        try:
            report.add(*_in_time(name, text, _moments(callback), seen.clock))
        except ValueError as error:
            report.add("ERROR", name, str(error))


def _plan(report: Report, given: Sequence[Any], model: Any, seen: ProbeResult) -> None:
    """Report scheduled settings that have no effect or are risky."""
    clock = seen.clock
    if clock is None or clock.total_steps is None:
        return
    for line in plan_warnings(given, clock, model):
        report.add("warning", "schedules", line)


def _moments(callback: Any) -> dict[str, Duration]:
    """Return the durations of a callback, by name."""
    moments: dict[str, Duration] = {}
    holders = [callback, getattr(callback, "schedule", None), getattr(callback, "weight", None)]
    for name, holder in product(_DURATIONS, holders):
        value = getattr(holder, name, None)
        unused = isinstance(holder, Schedule) and (
            holder.start == holder.end or (name == "until" and holder.shape == "step")
        )
        unused = unused or (name == "revive_until" and getattr(holder, "revive_after", 0) is None)
        if isinstance(value, int | float | str) and not unused:
            moments[name] = value
    for index, phase in enumerate(getattr(callback, "phases", [])):
        moments[f"phase {index + 1}"] = phase.begin
    return moments


def _in_time(
    name: str, text: str, moments: dict[str, Duration], clock: Clock
) -> tuple[Status, str, str]:
    """Return a finding about durations, converted to steps."""
    steps = {moment: clock.steps(value, moment) for moment, value in moments.items()}
    if steps:
        text += f" In steps: {', '.join(f'{moment} {step:,}' for moment, step in steps.items())}."
    late = [m for m, step in steps.items() if clock.total_steps and step > clock.total_steps]
    if late:
        return "ERROR", name, f"{text} Training ends at {clock.total_steps:,}, before {late[0]}."
    return "OK", name, text


def _dense_layers(report: Report, model: Any, ours: Sequence[Any]) -> None:
    """Report which layers no callback makes sparse, and why."""
    sparse = [callback for callback in ours if hasattr(callback, "connections")]
    if sparse:
        made = {name for callback in sparse for name in targets(callback)}
        in_gates = gate_submodules(model)
        left = {
            name: module.weight.requires_grad
            for name, module in model.named_modules()
            if isinstance(module, _LAYERS) and name not in made and module not in in_gates
        }
        for trained, why in ((True, "not selected by any callback"), (False, "frozen")):
            if names := [name for name, trains in left.items() if trains == trained]:
                report.add("OK", "dense layers", f"{_names(names)}: {why}.")


def _presses(callback: Any) -> bool:
    """Return True if a callback adds a penalty to the loss."""
    return hasattr(callback, "term") and getattr(callback, "has_term", True)


def _penalty(report: Report, ours: Sequence[Any], seen: ProbeResult) -> None:
    if seen.backward_passes == 0:
        report.add(
            "ERROR",
            "penalty",
            "Lightning saw no backward pass, so the penalty cannot act: call "
            "`self.manual_backward(loss)`.",
        )
        return
    if seen.no_gradients is not None:
        report.add("warning", "penalty", f"Not measured: {seen.no_gradients}")
        return
    pressing = [callback for callback in ours if _presses(callback)]
    pressed = {name for callback in pressing for name in callback.term.gates} & seen.ran
    missed = [name for name in pressed if not seen.gradients.get(name, (0, 0))[1] > 0]
    # A gate within its target or with a layer weight of 0 needs no penalty gradient.
    lenient = any(
        str(getattr(c, "usage", "")).startswith("hinge") or getattr(c, "layer_weights", None)
        for c in pressing
    )
    off = all(c.weight.end == 0 for c in pressing if hasattr(c, "weight"))
    if missed and not lenient:
        weightless = off and not any(hasattr(callback, "budget") for callback in pressing)
        why = "its `weight` is 0" if weightless else "its gradient there is 0"
        report.add("ERROR", "penalty", f"Does not reach {_names(sorted(missed))}: {why}.")
        return
    sizes = [f"{n} {p:.2g} vs. {own:.2g}" for n, (own, p) in seen.gradients.items()]
    report.add("OK", "penalty", f"Gradient norms of penalty vs. loss: {_names(sizes)}.")


def _zeros(report: Report, seen: ProbeResult) -> None:
    if seen.not_zero:
        layers = _names([f"{name} (step {step})" for name, step in seen.not_zero.items()])
        report.add(
            "ERROR",
            "missing weights",
            f"Not 0 after a step in {layers}: something replaces the layer or its weight.",
        )
    else:
        count = seen.optimizer_steps
        report.add("OK", "missing weights", f"Exactly 0 after each of {count} steps.")


def _ledger(report: Report, seen: ProbeResult) -> None:
    counted = seen.whole_net
    if counted is None:
        report.add(
            "warning",
            "ledger",
            "MACs were not counted: a gated linear layer did not run as a module, or the batch "
            "size is unknown.",
        )
        return
    maps = len(counted.runs)
    text = f"{maps} linear layers and gate networks, {counted.other:,} other MACs per sample."
    if counted.uncounted:
        text += f" Not counted: {', '.join(counted.uncounted)}."
    report.add("warning" if counted.uncounted else "OK", "ledger", text)


def add_pickling(report: Report, ours: Sequence[Any]) -> None:
    """Report callbacks that cannot be pickled after a run, as a second run requires."""
    for callback in filter(is_ours, ours):
        alone = copy.copy(callback)
        for name in ("log", "log_dict"):  # methods of the module, attached by Lightning
            vars(alone).pop(name, None)
        try:
            pickle.dumps(alone)
        except Exception as error:  # its attributes may raise anything
            name = type(callback).__name__
            report.add("ERROR", name, f"Cannot be sent to other processes: {error}.")


def add_cost(report: Report, model: Any, data: Any, callbacks: Sequence[Any], trainer: Any) -> None:
    """Report the time per batch with and without the callbacks of this package."""
    times = []
    for without_ours in (False, True):
        seen = ProbeResult()
        try:
            run_steps(Copies(model, callbacks, without_ours), data, trainer, seen)
        except Exception as error:  # for example, other callbacks may monitor our keys
            report.add("OK", "time", f"Not measured without our callbacks: {error}")
            return
        times.append(1e3 * seen.seconds_per_batch)
    text = f"{times[0]:.2f} ms per batch with our callbacks, {times[1]:.2f} ms without."
    report.add("OK", "time", text)


def _names(names: Iterable[str]) -> str:
    """Join names with commas, and write out only the first few."""
    every = list(names)
    left = len(every) - _MAX_NAMES
    return ", ".join(every[:_MAX_NAMES]) + (f" and {left} others" if left > 0 else "")
