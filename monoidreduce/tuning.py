"""Trials and the tuner: measure candidate plans on the user's own tensors and keep the fastest correct one."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .engines import auto, triton
from .engines.common import combine, evaluate, oom_retry
from .engines.common.evaluate import Sizes
from .errors import EngineError
from .plan import candidates, schedule, settings
from .plan.candidates import Case, folded_axes
from .plan.schedule import Choice, follow
from .program.expression import Expr
from .program.lower import Fold, Lowered, is_digest_portable
from .reductions import kind_of

# Trials: is a candidate plan's result right, and how long does it take?
#
# A result is right if it equals the safe plan's up to rounding, on the call itself and, with the same kernels, on a cut
# of it so short that every tile matters (in a long sum a missing tile would hide in the rounding). All memory that the
# candidate allocates is filled with NaN, or with absurd integers, first: so numbers it forgets to write, or reads
# before it writes, are seen, and are not the right ones that an earlier run left there.

Perform = Callable[[Choice, Fold, Sequence[Any], Sizes], list[Tensor]]
FAR = 1.5  # a candidate whose first run takes more than so many times the best so far is timed only twice more
MOST_SPILLED = 1024  # bytes per thread of register spills; the fastest kernels on an H200 had up to 256
# The relative difference allowed between two plans: a few roundings of the coarsest type that products are made in.
_APART = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8, torch.float32: 2.0**-12, torch.float64: 2.0**-30}
_APART_TF32 = 2.0**-8
_aten = torch.ops.aten
_EMPTY = (
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
)


@dataclass(frozen=True)
class Trial:
    """The result of one trial: the candidate's time, or why it was refused."""

    choice: Choice
    seconds: float | None
    refused: str = ""


class Poison(TorchDispatchMode):
    """Fills memory allocated inside the block with NaN, absurd integers or True."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here; torch's guard against it would import Dynamo."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY and result.numel():
            if result.is_floating_point():
                result.fill_(torch.nan)
            else:
                result.fill_(True if result.dtype is torch.bool else torch.iinfo(result.dtype).min // 3)
        return result


# Is the result right? -----------------------------------------------------------------------------------------


def find_error(
    perform: Perform, choice: Choice, safe: Choice, fold: Fold, leaves: Sequence[Any], sizes: Sizes, truth: list[Tensor]
) -> str:
    """What is wrong with a candidate's results, "" if nothing is. ``truth``: the safe plan's for these leaves."""
    limit = tolerance(leaves)
    with Poison():
        found = perform(choice, fold, leaves, sizes)
    got, right = (comparable_results(fold, given, leaves, sizes) for given in (found, truth))
    if problem := describe_difference(got, right, limit):
        return problem
    short = shorten(fold, leaves, sizes, choice)
    if short is None:
        return ""
    with triton.as_for(sizes):
        expected = perform(safe, fold, *short)
        with Poison():
            found = perform(choice, fold, *short)
    got, right = (comparable_results(fold, given, *short) for given in (found, expected))
    problem = describe_difference(got, right, limit)
    return f"at {short[1].rows} × {short[1].cols}, {problem}" if problem else ""


def comparable_results(fold: Fold, results: Sequence[Tensor], leaves: Sequence[Any], sizes: Sizes) -> list[Tensor]:
    """The results of a fold in a form that is the same by every plan.

    A softmax's shift differs between plans: the maximum, or a guessed maximum. Gradients are summed over the batch
    inside some kernels.
    """
    summed = evaluate.sum_gradients(fold, results, leaves, sizes)
    return [t for r, own in combine.split(fold, summed) for t in kind_of(r).settled(own)]


def describe_difference(found: Sequence[Tensor], truth: Sequence[Tensor], limit: float) -> str:
    """How two lists of results differ beyond ``limit``, "" if they do not; integers, infinities and NaN are exact."""
    for at, (a, b) in enumerate(zip(found, truth, strict=True)):
        if a.shape != b.shape:
            return f"result {at} has the shape {tuple(a.shape)} instead of {tuple(b.shape)}"
        if not b.is_floating_point():
            off = a != b
        else:
            a, b = (t if t.dtype is torch.float64 else t.float() for t in (a, b))
            off = ~((a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= limit * _scale_of(b)))
        if count := int(off.sum()):
            return f"result {at} is wrong in {count} of {off.numel()} numbers"
    return ""


def _scale_of(b: Tensor) -> Tensor:
    """The magnitude that rounding errors are compared with, per number: |b| + RMS of its row + RMS of all / 8.

    The last term is for rows that are small because large numbers cancelled.
    """
    b = torch.where(b.isfinite(), b, 0).abs()
    return b + b.square().mean(-1, keepdim=True).sqrt() + b.square().mean().sqrt() / 8


def tolerance(leaves: Sequence[Any]) -> float:
    """The relative difference allowed between results of these leaves."""
    coarse = evaluate.float32_precision() == "tf32"
    tensors = [v for v in leaves if isinstance(v, Tensor) and v.dtype in _APART]
    found = [_APART_TF32 if coarse and v.is_cuda and v.itemsize == 4 else _APART[v.dtype] for v in tensors]
    return max(found, default=_APART[torch.float32])


def shorten(fold: Fold, leaves: Sequence[Any], sizes: Sizes, choice: Choice) -> tuple[list[Any], Sizes] | None:
    """The first rows and columns of a call: two tiles and a ragged third. None if the call is no longer, or a shard."""
    blocks = {"rows": 1, "cols": 1}
    for name, tile in choice.tiles:
        if name == "tile":
            blocks = {"rows": max(blocks["rows"], tile[1]), "cols": max(blocks["cols"], tile[2])}
        elif name in blocks:  # a kernel that folds one axis keeps tiles of the other
            other = "rows" if name == "cols" else "cols"
            blocks = {other: max(blocks[other], tile[0]), name: max(blocks[name], tile[1] * max(1, tile[4]))}
    rows, cols = (min(sizes.here(axis), 2 * max(16, blocks[axis]) + 3) for axis in ("rows", "cols"))
    if (rows, cols) == (sizes.rows, sizes.cols) or sizes.shard is not None:
        return None
    cut = [
        _cut_leaf(v, e, rows, cols) if isinstance(v, Tensor) else v for e, v in zip(fold.leaves, leaves, strict=True)
    ]
    return cut, replace(sizes, rows=rows, cols=cols)


def _cut_leaf(v: Tensor, e: Expr, rows: int, cols: int) -> Tensor:
    """The first indices of a leaf ``[*batch, M or N, f]``, or ``[*batch, M, N]``; broadcast dimensions stay."""
    last = v.dim() - 1 - (e.feature is not None)
    if e.cols:
        v = v.narrow(last, 0, min(cols, v.shape[last]))
    at = last - 1 if e.cols else last
    return v.narrow(at, 0, min(rows, v.shape[at])) if e.rows else v


# How long does it take? ---------------------------------------------------------------------------------------


def measure_seconds(
    run: Callable[[], Any], device: torch.device, spend: float | None = None, best: float = math.inf
) -> float:
    """The median seconds of a call that has run before, over as many calls as ``spend`` seconds hold.

    ``best``: the best time so far; a call that is much slower is timed only twice more."""
    clock = _GpuClock() if device.type == "cuda" else _time_on_cpu
    first = clock(run)
    spend = 0.0 if first > FAR * best else default_spend(device) if spend is None else spend
    count = max(2, min(25, int(spend / max(first, 1e-7)))) if first < 1.0 else 0
    return float(numpy.median([first, *(clock(run) for _ in range(count))]))


def default_spend(device: torch.device) -> float:
    """Seconds spent on timing one plan."""
    return 0.005 if device.type == "cuda" else 0.03


def _time_on_cpu(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


_CYCLES = 2e9  # GPU clock cycles per second, about
_AHEAD = 2e-4  # seconds that the GPU is kept busy before a call
_LONGEST = 5e-3


class _GpuClock:
    """Seconds of GPU time. The GPU sleeps until the host has enqueued the whole call, so that no gaps are timed."""

    def __init__(self) -> None:
        self.ahead = _AHEAD

    def __call__(self, run: Callable[[], Any]) -> float:
        while True:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(int(self.ahead * _CYCLES))
            start = time.perf_counter()
            begin.record()
            run()
            end.record()
            enqueued = time.perf_counter() - start
            end.synchronize()
            if enqueued < self.ahead or self.ahead >= _LONGEST:  # a call that waits for the GPU is timed as it is
                return begin.elapsed_time(end) / 1000
            self.ahead = min(_LONGEST, 2 * enqueued)


# The tuner: measures the plans that the cost model leaves close, on the user's own tensors, and keeps the fastest.
#
# A :class:`Session` tries the candidates of one fold, one at a time: ahead of time, all in a row (``op.tune``), or in
# the background, one per call (``mr.use(tune=True)``), which meanwhile returns the safe plan's result. The tuned plan
# is stored (``plan/disk.py``) for all lengths of its bucket, and for later processes.

CLOSE = 4.0  # candidates predicted to take more than so many times the best one's time are not tried
MOST = 16  # candidates tried per folded axis
FINAL = 1.1  # candidates within this factor of the best are timed again, in turns
LONGER = 3  # how much longer the final timing is: these differ by a few per cent
GAIN = 0.98  # a tuned plan takes at most this share of the safe plan's time; smaller gains are noise
FoldRun = tuple[Fold, Sequence[Any], Sizes]  # one fold, its leaves and its sizes
_sessions: dict[schedule.Key, Session] = {}
_lock = threading.Lock()
_current_recording: Recording | None = None


def run(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> list[Tensor]:
    """The engine ``auto``: run a fold by its choice; if tuning is on, also try one more candidate."""
    if _current_recording is not None:
        _current_recording.folds.append((fold, [v.detach() if isinstance(v, Tensor) else v for v in leaves], sizes))
        return auto.run_choice(candidates.default_choice(auto.make_case(fold, leaves, sizes)), fold, leaves, sizes)
    if not is_requested() or settings.shrink_factor() > 1 or not sizes.rows or not sizes.cols:
        return auto.run(fold, leaves, sizes)
    return _run_and_try_one(fold, leaves, sizes)


def is_requested() -> bool:
    """True if calls tune in the background: as ``mr.use(tune=)`` says, else ``MONOIDREDUCE_TUNE``."""
    return bool(settings.now().tune)


def is_idle() -> bool:
    """True if folds just run: they are neither recorded nor tuned."""
    return _current_recording is None and not is_requested()


def is_recording() -> bool:
    """True inside a :func:`record` block."""
    return _current_recording is not None


# One fold -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tuned:
    """The result of tuning a fold, or a whole call."""

    key: schedule.Key
    fold: str  # its reductions and sizes, as text
    safe: Choice
    winner: Choice
    seconds: float
    safe_seconds: float
    trials: tuple[Trial, ...]
    lasting: bool  # stored on disk, where the next process will find it

    def __str__(self) -> str:
        refused = sum(t.seconds is None for t in self.trials)
        lost = f", {refused} refused" if refused else ""
        gain = f"{self.safe_seconds / self.seconds:.2f} times as fast as the default"
        return f"{self.fold}: {self.winner}; {1e3 * self.seconds:.3f} ms, {gain} ({len(self.trials)} tried{lost})"


class Session:
    """The trials of one fold: candidates still to be tried, and the best so far."""

    def __init__(self, case: Case, device: torch.device):
        self.case, self.device = case, device
        self.key = auto.fold_key(case, device)
        self.safe = self.best = candidates.default_choice(case)
        self.times: dict[Choice, float] = {}
        self.trials: list[Trial] = []
        self.done: Tuned | None = None
        self.busy = threading.Lock()
        self._proposals = self._iterate_candidates()
        self._next: Choice | None = next(self._proposals, None)

    def __len__(self) -> int:
        """The number of trials, done or still to do."""
        return len(self.list_candidates())

    def list_candidates(self) -> list[Choice]:
        """All candidates, in order, if the safe plan stayed the best."""
        return [c for way in self._list_axes() for c in self._list_close(way) if c != self.safe]

    def step(self, fold: Fold, leaves: Sequence[Any], sizes: Sizes, truth: list[Tensor]) -> bool:
        """Try one candidate; False if none was left, which picks the tuned plan. ``truth``: the safe plan's results."""
        if self.done is not None:
            return False
        if self.safe not in self.times:
            self.times[self.safe] = self._measure(self.safe, fold, leaves, sizes)
        if self._next is None:
            self.done = self._pick_tuned(fold, leaves, sizes)
            return False
        tried = self._try(self._next, fold, leaves, sizes, truth)
        self.trials.append(tried)
        if tried.seconds is not None:
            self.times[tried.choice] = tried.seconds
            self.best = min(self.times, key=lambda c: self.times[c])
        self._next = next(self._proposals, None)
        return True

    def _list_axes(self) -> tuple[str | None, ...]:
        """What is varied, in order: the tile of each kernel; then the schedule, and tiles in torch (None)."""
        return (*(folded_axes(self.case.fold) if self.case.kernels else ()), None)

    def _iterate_candidates(self) -> Iterator[Choice]:
        seen = {self.safe}
        for way in self._list_axes():
            for choice in self._list_close(way):
                tile = choice.tile(way) if way is not None else None
                if tile is not None:
                    choice = candidates.name_schedule(self.case, self.best.with_tile(str(way), tile))
                if choice not in seen:
                    seen.add(choice)
                    yield choice

    def _list_close(self, way: str | None) -> list[Choice]:
        """The candidates that the model predicts to be close to its best, and that the budget allows."""
        found = candidates.rank_candidates(self.case, way)
        if way is None and self.case.kernels:  # the kernels' tiles have been varied already
            found = [c for c in found if c.schedule not in ("flash", "split")]
        costs = {c: candidates.estimate(self.case, c) for c in found}
        least = min((e.seconds for e in costs.values()), default=0.0)
        room = settings.requested_budget()
        close = [c for c, e in costs.items() if e.seconds <= CLOSE * least and (room is None or e.held <= room)]
        return close[:MOST]

    def _try(self, choice: Choice, fold: Fold, leaves: Sequence[Any], sizes: Sizes, truth: list[Tensor]) -> Trial:
        try:
            with triton.watch_resources() as kernels:
                problem = find_error(auto.run_choice, choice, self.safe, fold, leaves, sizes, truth)
            spilled = max([0, *(k.spills for k in kernels)])
            if not problem and spilled > MOST_SPILLED:
                problem = f"its kernel spills {spilled} bytes"
            if problem:
                return Trial(choice, None, problem)
            return Trial(choice, self._measure(choice, fold, leaves, sizes))
        except Exception as error:  # a candidate that cannot run is refused, whatever the reason
            refused = f"{type(error).__name__}: {error}"
        if oom_retry.is_device_lost(self.device):
            raise EngineError(
                detail=f"{self.device} answers no more since {choice} was tried: {refused[:200]}",
                fix="Start the process anew; it runs by the usual plan unless it tunes. Please report the plan",
            )
        oom_retry.release_memory(self.device)
        return Trial(choice, None, refused)

    def _measure(
        self, choice: Choice, fold: Fold, leaves: Sequence[Any], sizes: Sizes, spend: float | None = None
    ) -> float:
        run = functools.partial(auto.run_choice, choice, fold, leaves, sizes)
        return measure_seconds(run, self.device, spend, self.times.get(self.best, math.inf))

    def _pick_tuned(self, fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> Tuned:
        """Time the best few and the safe plan again, in turns since devices warm up, and store the fastest."""
        final = [*self._list_finalists(), self.safe]
        times = {self.safe: self.times[self.safe]}
        if len(final) > 1:
            spend = LONGER * default_spend(self.device)
            turns = [[self._measure(c, fold, leaves, sizes, spend) for c in final] for _ in range(3)]
            times = {c: min(column) for c, column in zip(final, zip(*turns, strict=True), strict=True)}
        best, safe = min(times, key=lambda c: times[c]), times[self.safe]
        tuned = best if times[best] < GAIN * safe else self.safe
        mine = times[tuned]
        measured = {"seconds": mine, "safe": safe, "tried": len(self.trials)}
        lasting = schedule.remember_choice(self.key, tuned, measured, is_digest_portable(self.key.program))
        kinds = ", ".join(f"{r.attrs[0]} over {r.attrs[1]}" for r in fold.reductions)
        shape = f"{sizes.rows} × {sizes.cols}" + (f" × {tuple(sizes.batch)}" if sizes.batch else "")
        return Tuned(self.key, f"{kinds}, {shape}", self.safe, tuned, mine, safe, tuple(self.trials), lasting)

    def _list_finalists(self) -> list[Choice]:
        """The candidates closest to the best, at most three."""
        ranked = sorted(self.times, key=lambda c: self.times[c])
        close = [c for c in ranked if self.times[c] <= FINAL * self.times[ranked[0]] and c != self.safe]
        return close[:3]


# In the background --------------------------------------------------------------------------------------------


def _run_and_try_one(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> list[Tensor]:
    """Run a fold by its safe plan and try one candidate. Not while a CUDA graph is captured or another thread tries."""
    case = auto.make_case(fold, leaves, sizes)
    key = auto.fold_key(case, sizes.device)
    captured = sizes.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    with _lock:
        session = _sessions.get(key)
        if session is None and not captured and schedule.recall(key) is None:
            session = _sessions[key] = Session(case, sizes.device)
    if session is None or captured or not session.busy.acquire(blocking=False):
        return auto.run(fold, leaves, sizes)
    try:
        result = auto.run_choice(session.safe, fold, leaves, sizes)
        if not session.step(fold, leaves, sizes, result):
            with _lock:
                _sessions.pop(key, None)
        return result
    finally:
        session.busy.release()


# Ahead of time ------------------------------------------------------------------------------------------------


class TunableCall(Protocol):
    """A call that may run dense or tiled: see ``runtime/call_cost.py``."""

    program: Lowered
    sizes: Sizes

    @property
    def passes(self) -> Callable[..., list[Any]]: ...

    def __call__(self, *given: Any) -> list[Any]: ...

    def may_be_dense(self, given: Sequence[Any], asks: bool) -> bool: ...


@dataclass
class Recording:
    """The folds and the calls that ran, with their arguments."""

    folds: list[FoldRun] = field(default_factory=list)
    calls: list[tuple[TunableCall, tuple[Any, ...], bool]] = field(default_factory=list)


@contextlib.contextmanager
def record() -> Iterator[Recording]:
    """Record what runs inside the block, in every thread: backwards have their own."""
    global _current_recording
    with _recording_lock:
        _current_recording = Recording()
        try:
            with settings.run_every_fold():
                yield _current_recording
        finally:
            _current_recording = None


_recording_lock = threading.Lock()


def note_call(call: TunableCall, given: tuple[Any, ...], asks: bool) -> None:
    """Add a call to the current recording, if any."""
    if _current_recording is not None:
        _current_recording.calls.append((call, given, asks))


def make_sessions(folds: Sequence[FoldRun]) -> Iterator[tuple[Session, FoldRun]]:
    """A session for each different fold of a recording that has pairs."""
    seen = set()
    for fold, leaves, sizes in folds:
        if not sizes.rows or not sizes.cols or not torch.Size(sizes.batch).numel():
            continue
        session = Session(auto.make_case(fold, leaves, sizes), sizes.device)
        if session.key not in seen:
            seen.add(session.key)
            yield session, (fold, leaves, sizes)


def run_trials(session: Session, fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> Iterator[Trial]:
    """Run all trials of a session; its ``done`` then holds the result."""
    with torch.no_grad():
        truth = auto.run_choice(session.safe, fold, leaves, sizes)
        while session.step(fold, leaves, sizes, truth):
            yield session.trials[-1]


def tune_call(call: TunableCall, given: tuple[Any, ...], asks: bool) -> Tuned | None:
    """Tune a small call as a whole: tiled, by the tuned plans of its folds, or dense. None if it may not run dense."""
    if not call.may_be_dense(given, asks):
        return None
    own = [v.detach().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in given]
    passes, dense = Choice("flash"), Choice("dense")

    def run_dense(*given: Any) -> list[Any]:
        with follow({"call": dense}):
            return call(*given)

    truth = _run_with_gradients(call.passes, own)
    try:
        refused = describe_difference(_run_with_gradients(run_dense, own), truth, tolerance(own))
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    tried = (call.passes,) if refused else (call.passes, run_dense)
    timed = [functools.partial(_run_with_gradients, run, own) for run in tried]
    turns = [[measure_seconds(run, call.sizes.device) for run in timed] for _ in range(3)]
    safe, *others = (min(column) for column in zip(*turns, strict=True))
    tuned = dense if others and others[0] < GAIN * safe else passes
    best = others[0] if tuned is dense else safe
    key = auto.call_key(call.program, own, call.sizes, asks)
    measured = {"seconds": best, "safe": safe, "tried": 1}
    lasting = schedule.remember_choice(key, tuned, measured, is_digest_portable(key.program))
    trials = (Trial(dense, others[0] if others else None, refused),)
    shape = f"{call.sizes.rows} × {call.sizes.cols}"
    return Tuned(key, f"the call, {shape}", passes, tuned, best, safe, trials, lasting)


def _run_with_gradients(run: Callable[..., list[Any]], given: Sequence[Any]) -> list[Tensor]:
    """The results of a call, and the gradients of the inputs that require one."""
    values = [v for v in run(*given) if isinstance(v, Tensor)]
    moving = [v for v in values if v.requires_grad]
    inputs = [v for v in given if isinstance(v, Tensor) and v.requires_grad]
    if not moving:
        return values
    found = torch.autograd.grad(moving, inputs, [torch.ones_like(v) for v in moving], allow_unused=True)
    return [*(v.detach() for v in values), *(g for g in found if g is not None)]
