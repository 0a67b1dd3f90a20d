"""The tuner: which of the plans that the cost model leaves close is the fastest here, on the user's own shapes.

A :class:`Session` tries one fold's candidates, one at a time: ahead of time, all in a row (``op.tune``), or in the
background, one in every call (``mr.use(tune=True)``), whose own result always is the safe plan's meanwhile. The winner
is remembered (``tuned_plans.py``) for all lengths of its bucket, and in the next process.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..engines.auto import planner, tuned_plans
from ..engines.common import matmul, oom_retry
from ..engines.common.evaluate import Sizes
from ..engines.triton.launch import jit_module
from ..errors import EngineError
from ..plan import budget, candidates, cost, plan_records
from ..plan.environment import Variable
from ..plan.op_counts import Case, directions
from ..plan.schedule import Choice, follow
from ..program.lower import Fold, Lowered
from . import trial
from .trial import Trial

VARIABLE = "MONOIDREDUCE_TUNE"
_process = Variable(VARIABLE)
CLOSE = 4.0  # candidates that the model thinks so many times slower than its best are not tried
MOST = 16  # nor more than so many at a time
FINAL = 1.1  # those that take at most so many times the best one's time are timed again, in turns
LONGER = 3  # for so many times as long: they differ by a few per cent
GAIN = 0.98  # a winner takes at most this share of the safe plan's time: less is noise
Call = tuple[Fold, Sequence[Any], Sizes]  # one fold, its leaves and its sizes
_sessions: dict[plan_records.Key, Session] = {}
_lock = threading.Lock()
_recorded: Recording | None = None


def run(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> list[Tensor]:
    """The engine ``auto``: by the plan's choice; where tuning was asked for, one more candidate is tried on the way."""
    if _recorded is not None:
        _recorded.folds.append((fold, [v.detach() if isinstance(v, Tensor) else v for v in leaves], sizes))
        return planner.perform(candidates.default(planner.case_of(fold, leaves, sizes)), fold, leaves, sizes)
    if not asked() or budget.parts() > 1 or not sizes.rows or not sizes.cols:
        return planner.run(fold, leaves, sizes)
    return _in_passing(fold, leaves, sizes)


def asked() -> bool:
    """Whether calls tune on the way: as ``mr.use`` says, else the environment."""
    said = matmul.asked.get()[2]
    if said is not None:
        return said
    told = _process.said() or ""
    if told not in ("", "0", "1"):
        raise EngineError(detail=f"{VARIABLE} is {told!r}", fix="Set it to 1 or to 0, or leave it out")
    return told == "1"


def idle() -> bool:
    """Whether folds just run: nobody records them, and none is tuned on the way."""
    return _recorded is None and not asked()


def recording() -> bool:
    """Whether somebody records what runs."""
    return _recorded is not None


# One fold -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tuned:
    """What came of a fold's trials."""

    key: plan_records.Key
    fold: str  # in words
    safe: Choice
    winner: Choice
    seconds: float
    safe_seconds: float
    trials: tuple[Trial, ...]
    lasting: bool  # whether the next process will find it

    def __str__(self) -> str:
        refused = sum(t.seconds is None for t in self.trials)
        lost = f", {refused} refused" if refused else ""
        gain = f"{self.safe_seconds / self.seconds:.2f} times as fast as the default"
        return f"{self.fold}: {self.winner}; {1e3 * self.seconds:.3f} ms, {gain} ({len(self.trials)} tried{lost})"


class Session:
    """The trials of one fold: what is still to be tried, and the best so far."""

    def __init__(self, case: Case, device: torch.device):
        self.case, self.device = case, device
        self.key = tuned_plans.key_of(case, device)
        self.safe = self.best = candidates.default(case)
        self.times: dict[Choice, float] = {}
        self.trials: list[Trial] = []
        self.done: Tuned | None = None
        self.busy = threading.Lock()
        self._proposals = self._in_turn()
        self._next: Choice | None = next(self._proposals, None)

    def __len__(self) -> int:
        """How many trials there are, made or still to make."""
        return len(self.proposed())

    def proposed(self) -> list[Choice]:
        """All candidates, as they would follow each other if the safe plan stayed the best."""
        return [c for way in self._ways() for c in self._close(way) if c != self.safe]

    def step(self, fold: Fold, leaves: Sequence[Any], sizes: Sizes, truth: list[Tensor]) -> bool:
        """Try one candidate beside the safe plan's results; whether there was one. The last step finds the winner."""
        if self.done is not None:
            return False
        if self.safe not in self.times:
            self.times[self.safe] = self._seconds(self.safe, fold, leaves, sizes)
        if self._next is None:
            self.done = self._won(fold, leaves, sizes)
            return False
        tried = self._tried(self._next, fold, leaves, sizes, truth)
        self.trials.append(tried)
        if tried.seconds is not None:
            self.times[tried.choice] = tried.seconds
            self.best = min(self.times, key=lambda c: self.times[c])
        self._next = next(self._proposals, None)
        return True

    def _ways(self) -> tuple[str | None, ...]:
        """What is varied in turn: the tile of each kernel; and the schedule with everything that torch's tiles have."""
        return (*(directions(self.case.fold) if self.case.kernels else ()), None)

    def _in_turn(self) -> Iterator[Choice]:
        seen = {self.safe}
        for way in self._ways():
            for choice in self._close(way):
                tile = choice.tile(way) if way is not None else None
                if tile is not None:
                    choice = candidates.named(self.case, self.best.having(str(way), tile))
                if choice not in seen:
                    seen.add(choice)
                    yield choice

    def _close(self, way: str | None) -> list[Choice]:
        """Candidates that the model leaves close to its best, and that the budget allows."""
        found = candidates.candidates(self.case, way)
        if way is None and self.case.kernels:  # kernels' tiles were varied before
            found = [c for c in found if c.schedule not in ("flash", "split")]
        costs = {c: cost.estimate(self.case, c) for c in found}
        least = min((e.seconds for e in costs.values()), default=0.0)
        room = budget.asked()
        close = [c for c, e in costs.items() if e.seconds <= CLOSE * least and (room is None or e.held <= room)]
        return close[:MOST]

    def _tried(self, choice: Choice, fold: Fold, leaves: Sequence[Any], sizes: Sizes, truth: list[Tensor]) -> Trial:
        try:
            with jit_module.watched() as kernels:
                problem = trial.wrong(planner.perform, choice, self.safe, fold, leaves, sizes, truth)
            spilled = max([0, *(k.spills for k in kernels)])
            if not problem and spilled > trial.SPILLS:
                problem = f"its kernel spills {spilled} bytes"
            return Trial(choice, None, problem) if problem else self._timed(choice, fold, leaves, sizes)
        except Exception as error:  # a candidate that cannot run here loses, whatever the reason
            refused = f"{type(error).__name__}: {error}"
        if oom_retry.is_device_lost(self.device):
            raise EngineError(
                detail=f"{self.device} answers no more since {choice} was tried: {refused[:200]}",
                fix="Start the process anew; it runs by the usual plan unless it tunes. Please report the plan",
            )
        oom_retry.release_memory(self.device)
        return Trial(choice, None, refused)

    def _timed(self, choice: Choice, fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> Trial:
        return Trial(choice, self._seconds(choice, fold, leaves, sizes))

    def _seconds(
        self, choice: Choice, fold: Fold, leaves: Sequence[Any], sizes: Sizes, spend: float | None = None
    ) -> float:
        run = lambda: planner.perform(choice, fold, leaves, sizes)
        return trial.seconds(run, self.device, spend, self.times.get(self.best, math.inf))

    def _won(self, fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> Tuned:
        """The best few against the safe plan once more, in turns, since devices warm up; remembered either way."""
        final = [*self._finalists(), self.safe]
        times = {self.safe: self.times[self.safe]}
        if len(final) > 1:
            spend = LONGER * trial.usual(self.device)
            turns = [[self._seconds(c, fold, leaves, sizes, spend) for c in final] for _ in range(3)]
            times = {c: min(column) for c, column in zip(final, zip(*turns, strict=True), strict=True)}
        winner, safe = min(times, key=lambda c: times[c]), times[self.safe]
        winner = winner if times[winner] < GAIN * safe else self.safe
        mine = times[winner]
        measured = {"seconds": mine, "safe": safe, "tried": len(self.trials)}
        lasting = tuned_plans.keep(self.key, winner, measured)
        kinds = ", ".join(f"{r.attrs[0]} over {r.attrs[1]}" for r in fold.reductions)
        shape = f"{sizes.rows} × {sizes.cols}" + (f" × {tuple(sizes.batch)}" if sizes.batch else "")
        return Tuned(self.key, f"{kinds}, {shape}", self.safe, winner, mine, safe, tuple(self.trials), lasting)

    def _finalists(self) -> list[Choice]:
        """The candidates that came closest to the best, three at most."""
        ranked = sorted(self.times, key=lambda c: self.times[c])
        close = [c for c in ranked if self.times[c] <= FINAL * self.times[ranked[0]] and c != self.safe]
        return close[:3]


# In the background --------------------------------------------------------------------------------------------


def _in_passing(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> list[Tensor]:
    """Run a fold, and try one candidate for it; nothing is tried twice at once, nor while a graph is captured."""
    case = planner.case_of(fold, leaves, sizes)
    key = tuned_plans.key_of(case, sizes.device)
    captured = sizes.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    with _lock:
        session = _sessions.get(key)
        if session is None and not captured and plan_records.recall(key) is None:
            session = _sessions[key] = Session(case, sizes.device)
    if session is None or captured or not session.busy.acquire(blocking=False):
        return planner.run(fold, leaves, sizes)
    try:
        result = planner.perform(session.safe, fold, leaves, sizes)
        if not session.step(fold, leaves, sizes, result):
            with _lock:
                _sessions.pop(key, None)
        return result
    finally:
        session.busy.release()


# Ahead of time ------------------------------------------------------------------------------------------------


class Road(Protocol):
    """A call that may run by passes or whole: see ``dense_or_tiled.py``."""

    program: Lowered
    sizes: Sizes

    @property
    def passes(self) -> Callable[..., list[Any]]: ...

    def __call__(self, *given: Any) -> list[Any]: ...

    def may_be_dense(self) -> bool: ...


@dataclass
class Recording:
    """The folds and the calls that ran, with what they were given."""

    folds: list[Call] = field(default_factory=list)
    roads: list[tuple[Road, tuple[Any, ...], bool]] = field(default_factory=list)


@contextlib.contextmanager
def recorded() -> Iterator[Recording]:
    """What runs inside the block: in every thread, since backwards have their own."""
    global _recorded
    with _recording:
        _recorded = Recording()
        try:
            yield _recorded
        finally:
            _recorded = None


_recording = threading.Lock()


def note(road: Road, given: tuple[Any, ...], asks: bool) -> None:
    """Tell whoever records of a call."""
    if _recorded is not None:
        _recorded.roads.append((road, given, asks))


def sessions(met: Sequence[Call]) -> Iterator[tuple[Session, Call]]:
    """A session for each different fold that was met, unless there are no pairs."""
    seen = set()
    for fold, leaves, sizes in met:
        if not sizes.rows or not sizes.cols or not torch.Size(sizes.batch).numel():
            continue
        session = Session(planner.case_of(fold, leaves, sizes), sizes.device)
        if session.key not in seen:
            seen.add(session.key)
            yield session, (fold, leaves, sizes)


def finish(session: Session, fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> Iterator[Trial]:
    """All trials of a session in a row; its ``done`` then holds what came of them."""
    with torch.no_grad():
        truth = planner.perform(session.safe, fold, leaves, sizes)
        while session.step(fold, leaves, sizes, truth):
            yield session.trials[-1]


def cross(road: Road, given: tuple[Any, ...], asks: bool) -> Tuned | None:
    """Which road is the faster one for a small call, by passes as tuned or whole; None where it may not be whole."""
    if not road.may_be_dense():
        return None
    own = [v.detach().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in given]
    passes, dense = Choice("flash"), Choice("dense")

    def whole(*given: Any) -> list[Any]:
        with follow({"call": dense}):
            return road(*given)

    truth = _gradients(road.passes, own)
    try:
        refused = trial.differs(_gradients(whole, own), truth, trial.apart(own))
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    tried = (road.passes,) if refused else (road.passes, whole)
    clock = lambda run: trial.seconds(lambda: _gradients(run, own), road.sizes.device)
    turns = [[clock(run) for run in tried] for _ in range(3)]
    safe, *others = (min(column) for column in zip(*turns, strict=True))
    winner = dense if others and others[0] < GAIN * safe else passes
    best = others[0] if winner is dense else safe
    key = tuned_plans.key_of_call(road.program, own, road.sizes, asks)
    lasting = tuned_plans.keep(key, winner, {"seconds": best, "safe": safe, "tried": 1})
    trials = (Trial(dense, others[0] if others else None, refused),)
    shape = f"{road.sizes.rows} × {road.sizes.cols}"
    return Tuned(key, f"the call, {shape}", passes, winner, best, safe, trials, lasting)


def _gradients(run: Callable[..., list[Any]], given: Sequence[Any]) -> list[Tensor]:
    """The results of a call, and their gradients where they are asked for."""
    values = [v for v in run(*given) if isinstance(v, Tensor)]
    moving = [v for v in values if v.requires_grad]
    inputs = [v for v in given if isinstance(v, Tensor) and v.requires_grad]
    if not moving:
        return values
    found = torch.autograd.grad(moving, inputs, [torch.ones_like(v) for v in moving], allow_unused=True)
    return [*(v.detach() for v in values), *(g for g in found if g is not None)]
