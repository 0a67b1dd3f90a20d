"""One case of ``planner.py``: exhaustive search of a program's folds, and whole calls in turns.

Every candidate of every fold (schedule, tile, number of parts) is checked and timed alone; the best of each make the
best call. That call, the planner's own choice, the dense one where it is allowed, and then the tuner's choice are run
in turns: on a GPU as captured graphs, so that the host's time is not in them.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce import autotune, tuning
from monoidreduce.engines import auto
from monoidreduce.engines.common import oom_retry
from monoidreduce.explain import measure
from monoidreduce.plan import candidates, schedule
from monoidreduce.plan.candidates import Case, folded_axes
from monoidreduce.plan.schedule import Choice, follow
from monoidreduce.runtime import call_cost

from .measure import Held, captured, held_at_peak
from .planner_works import Size, Work

Book = Mapping[str, Choice]  # what folds follow, by name; "call": the call as a whole
Followed = Book | None  # None: what the planner chooses
Step = Callable[[], None]
Plan = tuple[bool, frozenset]  # what a choice runs by
Times = dict[Plan, float | None]  # seconds, None where it was refused
DENSE: Book = {"call": Choice("dense")}
PASSES: Book = {"call": Choice("flash")}
SLOW = 0.05  # seconds from which on one run says enough


class DeviceLost(RuntimeError):
    """A candidate took the device with it: nothing more can be run in this process."""


@contextlib.contextmanager
def following(choice: Followed) -> Iterator[None]:
    with mr.use(engine="auto"), contextlib.nullcontext() if choice is None else follow(choice):
        yield


# Candidates -----------------------------------------------------------------------------------------------------


def folds(work: Work, args: list[Tensor]) -> list[tuple[tuning.Session, tuning.FoldRun]]:
    """The folds of a call, with what they are given."""
    return list(tuning.make_sessions(autotune.record_call(work.op, args, {}, backward=True).folds))


def ways(case: Case) -> tuple[str | None, ...]:
    """What is varied in turn: each kernel's tile, and then the schedule."""
    return (*(folded_axes(case.fold) if case.kernels else ()), None)


def varied(case: Case, way: str | None) -> list[Choice]:
    """All candidates that differ from the default in one kernel; or in the schedule, and all of torch's tiles."""
    found = candidates.rank_candidates(case, way)
    kernels = case.kernels and way is None
    return [c for c in found if not (kernels and c.schedule in ("flash", "split"))]


def search(session: tuning.Session, call: tuning.FoldRun, known: Times, row: dict[str, Any]) -> Choice:
    """The best of all ways to run a fold, one kernel's tile after the other; those that come close are timed again.

    ``known``: what the tuner tried; all others are tried here."""
    case, device = session.case, call[2].device
    best, found = session.safe, dict(known)
    with torch.no_grad():
        truth = tuning.comparable_results(call[0], auto.run_choice(best, *call), *call[1:])
        if _same(best) not in found:
            found[_same(best)] = tuning.measure_seconds(lambda: auto.run_choice(best, *call), device)
        own = found[_same(best)]
        for way in ways(case):
            times = {best: found[_same(best)]}
            for choice in varied(case, way):
                tile = choice.tile(way) if way is not None else None
                choice = choice if tile is None or way is None else best.with_tile(way, tile)
                if _same(choice) not in found:
                    found[_same(choice)] = _tried(choice, call, truth, row, min(times.values()))
                seconds = found[_same(choice)]
                if seconds is not None:
                    times[choice] = seconds
                if case.kernels and way is None and seconds is not None and seconds > 2 * times[best]:
                    break  # panels that are far behind are so in any room
            close = sorted((c for c in times if times[c] < 1.1 * min(times.values())), key=times.__getitem__)[:4]
            run = lambda c: _again(lambda: auto.run_choice(c, *call), own, device)
            turns = [[run(c) for c in close] for _ in range(3)]
            again = {c: min(t) for c, t in zip(close, zip(*turns, strict=True), strict=True)}
            best = min(again, key=again.__getitem__)
            found[_same(best)] = again[best]
            row["tried"] = row.get("tried", 0) + len(times)
            shown = {str(c): round(t * 1e3, 4) for c, t in times.items()}
            row.setdefault("times_ms", []).append({"fold": case.name, "way": way, "times": shown})
    return best


def _same(choice: Choice) -> Plan:
    """What a choice runs by: not in which order its tiles are named, nor whether their number of parts has a name."""
    return choice.schedule == "panel", frozenset(choice.tiles)


def tuned(op: Any, args: list[Tensor]) -> tuple[dict[str, Choice], dict[str, Times]]:
    """The tuner's winners, and the times of all that it tried (None: refused), by fold."""
    with following(None):
        folds = op.tune(*args, quiet=True).folds
    times: dict[str, Times] = {}
    for t in folds:
        tried = {_same(c.choice): c.seconds for c in t.trials}
        times[t.key.program] = {**tried, _same(t.safe): t.safe_seconds}
    return {t.key.program: t.winner for t in folds}, times


@contextlib.contextmanager
def tuned_plans() -> Iterator[None]:
    """What is tuned inside the block is known inside such blocks alone."""
    kept = schedule.FOLDER
    schedule.FOLDER = f"{kept}-tuned"
    schedule.forget()
    try:
        yield
    finally:
        schedule.FOLDER = kept
        schedule.forget()


def _tried(choice: Choice, call: tuning.FoldRun, truth: list[Tensor], row: dict[str, Any], best: float) -> float | None:
    """Seconds of a candidate, None where it is refused; ``best``: those of the best so far."""
    try:
        run, device = lambda: auto.run_choice(choice, *call), call[2].device
        found = tuning.comparable_results(call[0], run(), *call[1:])
        problem = tuning.describe_difference(found, truth, tuning.tolerance(call[1]))
        if not problem:
            return tuning.measure_seconds(run, device, best=best)
    except Exception as error:  # it does not fit, or has no such form
        problem = f"{type(error).__name__}: {str(error)[:80]}"
        if oom_retry.is_device_lost(call[2].device):
            raise DeviceLost(f"{choice}: {problem}") from None
    row.setdefault("refused", {})[str(choice)] = problem
    return None


def _again(run: Callable[[], Any], about: float, device: torch.device) -> float:
    return _once(run, device.type) if about > SLOW else tuning.measure_seconds(run, device)


# Whole calls -----------------------------------------------------------------------------------------------------


def step_of(op: Any, args: list[Tensor]) -> Step:
    """Forward and backward, with cotangents made beforehand."""
    first = op(*args)
    values = [first] if isinstance(first, Tensor) else list(first)
    ones = [torch.ones_like(v) for v in values]

    def step() -> None:
        got = op(*args)
        torch.autograd.grad([got] if isinstance(got, Tensor) else list(got), args, ones)

    return step


def graphed(step: Step) -> Step:
    """A step as a captured graph: its kernels alone, without the host.

    The graph reads what the step holds (its cotangents), so that this is kept with it: the next capture gives all
    memory back that nobody holds, and a graph that reads it then takes the device with it."""
    graph, _ = captured(step)

    def replay(kept: Step = step) -> None:
        graph.replay()

    return replay


def _captured(step: Step) -> Step:
    try:
        return graphed(step)
    except RuntimeError as error:  # then the host's time is in it, where the device waits for it
        print(f"not captured: {str(error)[:200]}", flush=True)
        torch.cuda.synchronize()
        return step


def clock() -> Callable[[], float]:
    """With one thread the process's own time: what else the machine does then counts little."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def _once(step: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        return tuning.measure_seconds(step, torch.device(device), 0.0)
    start = clock()()
    step()
    return clock()() - start


def race(op: Any, args: list[Tensor], runners: Mapping[str, Followed], device: str, least: float) -> dict[str, float]:
    """Seconds of whole calls that follow one thing or another: the median of runs in turns; close ones run longer."""
    steps: dict[str, tuple[Step, Followed]] = {}
    for name, choice in runners.items():
        with following(choice):
            step = step_of(op, args)
            step()
            steps[name] = (_captured(step) if device == "cuda" else step), choice
    taken: dict[str, list[float]] = {name: [] for name in steps}
    began = time.perf_counter()
    while True:
        if device == "cpu":
            gc.collect()
        middle = {name: statistics.median(t) if t else 0.0 for name, t in taken.items()}
        best, spent = min(middle.values()), time.perf_counter() - began
        rounds = max(map(len, taken.values()))
        for name, (step, choice) in steps.items():
            if rounds < 3 or middle[name] < 1.15 * best:
                with following(choice):
                    taken[name].append(_once(step, device))
        close = sum(m < 1.15 * best for m in middle.values()) > 1
        if rounds >= 5 and (spent > least * len(steps) * (4 if close else 1) or rounds >= 60):
            return {name: statistics.median(t) for name, t in taken.items()}


# Planning --------------------------------------------------------------------------------------------------------


def planning(op: Any, args: list[Tensor]) -> dict[str, float]:
    """Milliseconds that planning adds to a first call, and microseconds that it adds to every other."""
    spent = [0.0]
    kept = auto._choose, call_cost.runs_dense, call_cost.DenseOrTiled._is_dense

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            start = clock()()
            try:
                return function(*given)
            finally:
                spent[0] += clock()() - start

        return call

    auto._CHOICES.clear()
    op._plans.known.clear()
    with following(None):
        try:
            auto._choose, call_cost.runs_dense = timed(kept[0]), timed(kept[1])
            step = step_of(op, args)
            step()
            first, spent[0] = spent[0], 0.0
            call_cost.runs_dense = kept[1]
            call_cost.DenseOrTiled._is_dense = timed(kept[2])  # type: ignore[method-assign]
            each = []
            for _ in range(21):
                step()
                each.append(spent[0])
                spent[0] = 0.0
        finally:
            auto._choose, call_cost.runs_dense = kept[:2]
            call_cost.DenseOrTiled._is_dense = kept[2]  # type: ignore[method-assign]
    return {"first_ms": first * 1e3, "cached_us": statistics.median(each) * 1e6}


# One case --------------------------------------------------------------------------------------------------------


def run(work: Work, size: Size, device: str, least: float) -> dict[str, Any]:
    """One case: the planner's own choice beside the best of all, before and after tuning; memory, planning time."""
    args = work.args(size, device)
    row: dict[str, Any] = {"work": work.name, "size": list(size)}
    began = time.perf_counter()
    row |= planning(work.op, args)
    with following(None):
        told = work.op.explain(*args).as_dict()
        row["runs"], row["predicted_ms"] = told["runs"], _of(told, "seconds") * 1e3
        row["predicted_peak"] = _of(told, "peak")
        row["peak"] = measure(work.op, args, {}, True).peak
        row["largest"] = _largest(work.op, args) if device == "cuda" else []
        found = work.op.cost(*args)
    own: Book = DENSE if told["runs"] == "dense" else {p.case.name: p.choice for p in found.chosen.parts}
    row["told_s"] = time.perf_counter() - began
    with tuned_plans():
        won, known = tuned(work.op, args)
    row["tuned_s"] = time.perf_counter() - began - row["told_s"]
    best = {s.case.name: search(s, call, known.get(s.case.name, {}), row) for s, call in folds(work, args)}
    others: dict[str, Book] = {"best of all": best}
    if device == "cpu" and "dense" in found and found.allows(found["dense"]):
        others["dense"] = DENSE
    row["searched_s"] = time.perf_counter() - began - row["told_s"] - row["tuned_s"]
    untuned = race(work.op, args, {"chosen": None, **_without(others, own)}, device, least)
    dense = any(c.schedule == "dense" for c in won.values())
    after: Book = DENSE if dense else {n: won[n] for n in best if n in won}
    with tuned_plans():
        again = race(work.op, args, {"tuned": None, **_without({**others, "untuned": own}, after)}, device, least)
    row["plans"] = {n: {k: str(c) for k, c in p.items()} for n, p in (("own", own), ("tuned", after), ("best", best))}
    row |= {"untuned_ms": untuned["chosen"] * 1e3, "tuned_ms": again["tuned"] * 1e3}
    row |= {"best_ms": min(untuned.values()) * 1e3, "tuned_best_ms": min(again.values()) * 1e3}
    row["best"] = min(untuned, key=untuned.__getitem__)
    row["seconds"] = time.perf_counter() - began
    row["calls_ms"] = {n: round(t * 1e3, 4) for n, t in (untuned | again).items()}
    return row


def _largest(op: Any, args: list[Tensor]) -> list[Held]:
    try:
        return held_at_peak(step_of(op, args))[:12]
    except (KeyError, RuntimeError, TypeError) as error:  # another make of torch's: the case still counts
        print(f"no trace of the allocator: {error}", flush=True)
        return []


def _without(others: Mapping[str, Book], plan: Book) -> dict[str, Followed]:
    """The calls to run beside a plan; none that is the same plan again."""
    return {n: p if p is DENSE else {**PASSES, **p} for n, p in others.items() if dict(p) != dict(plan)}


def _of(told: dict[str, Any], field: str) -> float:
    return next(s[field] for s in told["schedules"] if s["schedule"] == told["runs"])
