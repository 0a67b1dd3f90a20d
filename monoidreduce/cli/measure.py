"""Run a layer and measure it: results, gradients, time, memory over time, and the error between two runs.

Memory is read from torch's profiler, with ``profile_memory=True``. Its trace holds the address and size of every
allocation, including those made inside torch's own kernels. Each allocation belongs to one category:

- ``gradients``: it holds a gradient that the backward returns; the inputs are counted here too;
- ``kept``: it is alive when the forward returns, so it is an output or saved for the backward;
- ``temporary``: everything else.

*Extra* memory is kept + temporary: what is held beyond the inputs and their gradients, which any implementation needs.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile, record_function
from torch.utils._pytree import tree_leaves

from .._version import __version__
from ..engines.common import matmul
from .layers import SEED

CPU = torch.device("cpu")
DENSE_MATRICES = 6  # matrices of pairs that a dense form may hold at once, including those of its backward
CATEGORIES = {
    "gradients": "inputs and gradients",
    "kept": "outputs and saved for backward",
    "temporary": "temporary",
}
_FORWARD, _BACKWARD = "monoidreduce: forward", "monoidreduce: backward"
_TRACE_DEVICES = {"cpu": 0, "cuda": 1}  # how the trace numbers devices

Tensors = tuple[Tensor, ...]


# Results, time and peak memory ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Results of one run: floating-point ``values``, integer and boolean results, and a gradient per differentiable
    argument (None where it is unused)."""

    values: Tensors
    discrete: Tensors = ()
    gradients: tuple[Tensor | None, ...] = ()

    @property
    def tensors(self) -> Tensors:
        return (*self.values, *self.discrete, *(g for g in self.gradients if g is not None))

    def error(self, truth: Outcome) -> float:
        """The largest relative error of any value or gradient; values only if this run had no backward."""
        found = relative_error(self.values, truth.values)
        return max(found, relative_error(self.gradients, truth.gradients)) if self.gradients else found


class Runner:
    """A function with its arguments, run repeatedly for its results, its time or its memory."""

    def __init__(
        self, call: Callable[..., Any], args: tuple[Any, ...], device: torch.device = CPU, backward: bool = True
    ):
        self.call, self.args, self.device, self.backward = call, args, device, backward
        self.inputs = differentiable(args)
        self.forward_seconds = self.seconds = math.inf  # the best of all timed runs
        self._cotangents: list[Tensor] = []  # drawn once, so that no timed or profiled run pays for them

    def forward(self) -> list[Tensor]:
        return [t for t in tree_leaves(self.call(*self.args)) if isinstance(t, Tensor)]

    def gradients(self, results: Sequence[Tensor], create_graph: bool = False) -> tuple[Tensor | None, ...]:
        """The gradients of all results with fixed random cotangents; empty if nothing is differentiable."""
        roots = [t for t in results if t.requires_grad]
        if not roots or not self.backward:
            return ()
        self._cotangents = self._cotangents or _draw_cotangents(roots)
        return torch.autograd.grad(roots, self.inputs, self._cotangents, allow_unused=True, create_graph=create_graph)

    def run(self) -> Outcome:
        """Run the forward and the backward once."""
        results = self.forward()
        floats = tuple(t.detach() for t in results if t.is_floating_point())
        return Outcome(floats, tuple(t for t in results if not t.is_floating_point()), self.gradients(results))

    def time(self) -> None:
        """Run once and keep the time if it is the best so far."""
        start = self._now()
        results = self.forward()
        middle = self._now()
        self.gradients(results)
        self.forward_seconds = min(self.forward_seconds, middle - start)
        self.seconds = min(self.seconds, self._now() - start)

    def profile_memory(self) -> MemoryProfile:
        """The memory of one run over time. Call :meth:`run` first: a first run may trace, plan and fill caches."""
        tensors = [t for t in (*self.args, *self._cotangents) if isinstance(t, Tensor)]
        backward = lambda results: tuple(g for g in self.gradients(results) if g is not None)
        return profile_memory(lambda: tuple(self.forward()), backward if self.backward else None, tensors, self.device)

    def peak_extra_bytes(self) -> int:
        """The peak memory beyond the arguments and their gradients, in bytes."""
        if self.device.type != "cuda":
            return self.profile_memory().extra
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        outcome = self.run()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        return max(0, peak - sum(g.nbytes for g in outcome.gradients if g is not None))

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def time_in_turns(runners: Sequence[Runner], seconds: float, least: int, most: int) -> int:
    """Time the runners in turns, so that a busy moment of the machine affects all of them alike.

    Stops after ``seconds``, with at least ``least`` and at most ``most`` rounds. Returns the number of rounds.
    """
    start, rounds = time.perf_counter(), 0
    while rounds < least or (rounds < most and time.perf_counter() - start < seconds):
        for runner in runners:
            runner.time()
        rounds += 1
    return rounds


def run_once(call: Callable[..., Any], args: tuple[Any, ...], backward: bool = True) -> Outcome:
    """The results and gradients of one run."""
    return Runner(call, args, backward=backward).run()


def second_gradients(call: Callable[..., Any], args: tuple[Any, ...]) -> Tensors:
    """The gradients of a random combination of the gradients."""
    runner = Runner(call, args)
    first = [g for g in runner.gradients(runner.forward(), create_graph=True) if g is not None and g.requires_grad]
    if not first:
        return ()
    found = torch.autograd.grad(first, runner.inputs, _draw_cotangents(first), allow_unused=True)
    return tuple(torch.zeros_like(a) if g is None else g for g, a in zip(found, runner.inputs, strict=True))


def differentiable(args: tuple[Any, ...]) -> list[Tensor]:
    """The arguments that require gradients."""
    return [a for a in args if isinstance(a, Tensor) and a.requires_grad]


def to_float64(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments with floating-point tensors in float64."""
    return tuple(
        a.detach().double().requires_grad_(a.requires_grad) if isinstance(a, Tensor) and a.is_floating_point() else a
        for a in args
    )


def reason_dense_does_not_fit(pairs: int, args: tuple[Any, ...], device: torch.device) -> str:
    """Why a dense form with so many pairs should not be run: it needs more memory than is free. "" if it fits."""
    size = max((a.element_size() for a in differentiable(args)), default=4)
    batch = max((a.shape[:-2].numel() for a in differentiable(args)), default=1)
    need, free = DENSE_MATRICES * pairs * batch * size, matmul.free_memory(device)
    return f"it would take about {need / 1e9:.1f} GB of {free / 1e9:.1f} GB free" if free and need > free else ""


def relative_error(found: tuple[Tensor | None, ...], truth: tuple[Tensor | None, ...], least: float = 1e-3) -> float:
    """The largest ‖x − truth‖ / ‖truth‖ of any pair of tensors; infinite where shapes or infinities differ.

    A norm of the truth below ``least`` times the largest one is replaced by that: a gradient that is exactly zero has
    no relative error of its own.

    >>> relative_error((torch.tensor([1.0, 2.0]),), (torch.tensor([1.0, 2.0]),))
    0.0
    """
    if len(found) != len(truth):
        return math.inf
    norms = [t[t.isfinite()].double().norm().item() for t in truth if t is not None]
    floor = least * max(norms, default=0.0)
    return max((_relative_error(x, t, floor) for x, t in zip(found, truth, strict=True)), default=0.0)


def _relative_error(x: Tensor | None, truth: Tensor | None, floor: float) -> float:
    if x is None:  # a gradient that is None is zero
        if truth is None:
            return 0.0
        x = torch.zeros_like(truth)
    elif truth is None:
        truth = torch.zeros_like(x)
    if x.shape != truth.shape:
        return math.inf
    x, truth = x.double(), truth.to(x.device).double()
    finite = truth.isfinite()
    if not torch.equal(x.isfinite(), finite) or not torch.equal(
        x[~finite].nan_to_num(1.5), truth[~finite].nan_to_num(1.5)
    ):
        return math.inf
    difference, size = (x[finite] - truth[finite]).norm().item(), max(truth[finite].norm().item(), floor)
    return difference / size if size > 1e-300 else difference


def _draw_cotangents(like: Sequence[Tensor]) -> list[Tensor]:
    """Random cotangents, the same for every layer, engine and dtype."""
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in like]


# Memory over time -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """The bytes of each category that are alive from ``seconds`` until the next moment."""

    seconds: float
    gradients: int
    kept: int
    temporary: int

    @property
    def extra(self) -> int:
        return self.kept + self.temporary

    @property
    def total(self) -> int:
        return self.gradients + self.extra


@dataclass(frozen=True)
class MemoryProfile:
    """The memory of one run: moments in order of time, and when the forward and the run ended, in seconds."""

    moments: tuple[Moment, ...]
    forward_end: float
    end: float
    largest: int = 0  # the largest single allocation that is not a gradient, in bytes

    @property
    def peak(self) -> Moment:
        """The first moment with the most bytes alive."""
        return max(self.moments, key=lambda m: m.total)

    @property
    def extra(self) -> int:
        """The peak of the extra memory, in bytes."""
        return max(m.extra for m in self.moments)


def profile_memory(
    forward: Callable[[], Tensors],
    backward: Callable[[Tensors], Tensors] | None,
    inputs: Iterable[Tensor],
    device: torch.device = CPU,
) -> MemoryProfile:
    """Run ``forward()`` and ``backward(outputs)``, which returns the gradients, and profile their memory.

    >>> import torch
    >>> p = profile_memory(lambda: (torch.zeros(1000) + torch.zeros(1000),), None, [])
    >>> p.extra, p.moments[-1].kept
    (12000, 4000)
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise every start and stop is announced on stderr
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    # What torch.profiler is built on: it saves the trace without making an object of every event, which takes longer
    # than the run itself, and imports no compiler.
    with profile(use_kineto=True, profile_memory=True) as profiler:
        with record_function(_FORWARD):
            outputs = forward()
            synchronize()
        with record_function(_BACKWARD):
            gradients = () if backward is None else backward(outputs)
            synchronize()
    gradient_addresses = {t.untyped_storage().data_ptr() for t in gradients}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    input_bytes = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in inputs}.values())
    return _read_trace(events, gradient_addresses, input_bytes, _TRACE_DEVICES[device.type])


@dataclass
class _Allocation:
    address: int
    size: int
    start: float
    end: float = math.inf


def _read_trace(events: list[dict[str, Any]], gradients: set[int], input_bytes: int, device: int) -> MemoryProfile:
    """The memory profile in a trace's events. ``gradients`` are addresses; times in a trace are in µs."""
    spans = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] in (_FORWARD, _BACKWARD)}
    (start, forward_end), (_, end) = spans[_FORWARD], spans[_BACKWARD]
    changes: list[tuple[float, str, int]] = []
    largest = 0
    for a in _read_allocations(events, start, end, device):
        category = "temporary"
        if a.end == math.inf and a.address in gradients:
            category = "gradients"
        elif a.start <= forward_end < a.end:
            category = "kept"
        changes.append((a.start, category, a.size))
        if category != "gradients":
            largest = max(largest, a.size)
        if a.end != math.inf:
            changes.append((a.end, category, -a.size))
    alive = {"gradients": input_bytes, "kept": 0, "temporary": 0}
    moments = [Moment(0.0, **alive)]
    for at, category, size in sorted(changes, key=lambda c: c[0]):
        alive[category] += size
        moments.append(Moment((at - start) * 1e-6, **alive))
    return MemoryProfile(tuple(moments), (forward_end - start) * 1e-6, (end - start) * 1e-6, largest)


def _read_allocations(events: list[dict[str, Any]], start: float, end: float, device: int) -> list[_Allocation]:
    """The allocations made between these times. Releases of older allocations are ignored."""
    found: list[_Allocation] = []
    live: dict[int, _Allocation] = {}
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        at, args = event["ts"], event["args"]
        if args["Device Type"] != device or not start <= at <= end:
            continue
        if args["Bytes"] > 0:
            live[args["Addr"]] = _Allocation(args["Addr"], args["Bytes"], at)
            found.append(live[args["Addr"]])
        elif args["Addr"] in live:
            live.pop(args["Addr"]).end = at
    return found


# The machine ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Environment:
    """The machine and the versions that numbers were measured with."""

    version: str
    python: str
    torch: str
    cpu: str
    threads: str
    date: str
    gpu: str = ""  # empty if none was used


def describe_environment(device: torch.device = CPU) -> Environment:
    """The environment of this process, for measurements on ``device``."""
    date = f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"
    threads = f"{torch.get_num_threads()} of {os.cpu_count()} cores"
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return Environment(__version__, platform.python_version(), torch.__version__, _cpu_name(), threads, date, gpu)


def _cpu_name() -> str:
    """The processor's name (on Linux; elsewhere its architecture) and the instruction set that torch uses."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.is_file() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    capability = torch.backends.cpu.get_cpu_capability()
    return (name or platform.machine()) + (f" ({capability})" if capability != "DEFAULT" else "")
