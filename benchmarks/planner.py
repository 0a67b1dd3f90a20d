"""The planner against exhaustive search: is what it chooses, untuned and tuned, close to the best that could run?

    python -m benchmarks.planner [--device cuda] [--shapes N] [--only WORD ...] [--workers N] [--out DIR]

Ten programs at three shapes each, forward and backward. Every candidate of every fold (schedule, tile, number of parts)
is checked and timed alone; the best of each make the best call. That call, the planner's own choice, the dense one
where it is allowed, and then the tuner's choice are run in turns, as whole calls: on a GPU as captured graphs, so that
the host's time is not in them. Also: predicted against measured peak memory, what planning adds to a first call, what a
planned call costs to look up, and host time of a small call. On a GPU many processes compile all candidates first."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import datetime
import functools
import gc
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr
from monoidreduce import ops, tuning
from monoidreduce.engine import planner, roads, trial, tuner
from monoidreduce.explain import measure
from monoidreduce.plan import candidates, cost
from monoidreduce.plan.choice import Choice, follow
from monoidreduce.plan.work import Case, directions

from .cpu import RESULTS, environment
from .host import both
from .measure import captured
from .planner_works import WORKS, Size, Work, cases

Book = Mapping[str, Choice]  # what folds follow, by name; "call": the call as a whole
Followed = Book | None  # None: what the planner chooses
Step = Callable[[], None]
DENSE: Book = {"call": Choice("dense")}
PASSES: Book = {"call": Choice("flash")}


@contextlib.contextmanager
def following(choice: Followed) -> Iterator[None]:
    with mr.use(engine="auto"), contextlib.nullcontext() if choice is None else follow(choice):
        yield


# Candidates -----------------------------------------------------------------------------------------------------


def folds(work: Work, args: list[Tensor]) -> list[tuple[tuner.Session, tuner.Call]]:
    """The folds of a call, with what they are given."""
    return list(tuner.sessions(tuning.recorded(work.op, args, {}, backward=True).folds))


def ways(case: Case) -> tuple[str | None, ...]:
    """What is varied in turn: each kernel's tile, and then the schedule."""
    return (*(directions(case.fold) if case.kernels else ()), None)


def varied(case: Case, way: str | None) -> list[Choice]:
    """All candidates that differ from the default in one kernel; or in the schedule, and all of torch's tiles."""
    found = candidates.candidates(case, way)
    kernels = case.kernels and way is None
    return [c for c in found if not (kernels and c.schedule in ("flash", "split"))]


def search(session: tuner.Session, call: tuner.Call, row: dict[str, Any]) -> Choice:
    """The best of all ways to run a fold, each kernel's tile by itself; those that come close are timed again."""
    case, device = session.case, call[2].device
    with torch.no_grad():
        truth = planner.perform(session.safe, *call)
        own = trial.seconds(lambda: planner.perform(session.safe, *call), device)
        best, least = session.safe, own
        for way in ways(case):
            times = {session.safe: own}
            for choice in varied(case, way):
                seconds = _tried(choice, call, truth, row, min(times.values())) if choice not in times else None
                if seconds is not None:
                    times[choice] = seconds
                if case.kernels and way is None and seconds is not None and seconds > 2 * least:
                    break  # panels that are far behind are so in any room
            close = sorted((c for c in times if times[c] < 1.1 * min(times.values())), key=times.__getitem__)[:4]
            run = lambda c: trial.seconds(lambda: planner.perform(c, *call), device)
            turns = [[run(c) for c in close] for _ in range(3)]
            again = {c: min(t) for c, t in zip(close, zip(*turns, strict=True), strict=True)}
            won = min(again, key=again.__getitem__)
            row["tried"] = row.get("tried", 0) + len(times)
            if way is not None:
                best = best.having(way, won.tile(way) or session.safe.tile(way) or ())
                least = min(least, again[won])
            elif again[won] < least:
                best = won
    return best


def _tried(choice: Choice, call: tuner.Call, truth: list[Tensor], row: dict[str, Any], enough: float) -> float | None:
    """Seconds of a candidate, None where it is refused; ``enough``: what takes twice as long need not be known well."""
    try:
        run, device = lambda: planner.perform(choice, *call), call[2].device
        problem = trial.differs(run(), truth, trial.apart(call[1]))
        if not problem:
            quick = trial.seconds(run, device, 0.0)
            return quick if quick > 2 * enough else trial.seconds(run, device)
    except Exception as error:  # it does not fit, or has no such form
        problem = f"{type(error).__name__}: {str(error)[:80]}"
    row.setdefault("refused", {})[str(choice)] = problem
    return None


# Compiling beforehand --------------------------------------------------------------------------------------------


@functools.cache
def _recorded(work: int, size: Size, device: str) -> dict[str, tuner.Call]:
    with following(PASSES):
        return {s.case.name: call for s, call in folds(WORKS[work], WORKS[work].args(size, device))}


Wanted = list[tuple[str, Choice]]  # folds by name, and what to run them by


def compiled(device: str, work: int, size: Size, wanted: Wanted) -> None:
    """Run some candidates of a program once (or its defaults), so that Triton's cache on disk holds them."""
    known = _recorded(work, size, device)
    for name, choice in wanted or [(n, Choice("flash")) for n in known]:
        with contextlib.suppress(Exception), torch.no_grad():
            planner.perform(choice, *known[name])
    if device == "cuda":
        torch.cuda.synchronize()


def to_compile(given: list[tuple[Work, Size]], device: str, each: int = 3) -> Iterator[tuple[int, Size, Wanted]]:
    """What is to be compiled, every kernel once: a few candidates of one program at a time."""
    seen: set[tuple[str, tuple]] = set()
    for work, size in given:
        found = []
        for session, _ in folds(work, work.args(size, device)):
            for way in ways(session.case):
                for choice in varied(session.case, way):
                    key = (work.name, _kernel(session.case, way, choice))
                    if key not in seen:
                        seen.add(key)
                        found.append((session.case.name, choice))
        for at in range(0, len(found), each):
            yield WORKS.index(work), size, found[at : at + each]


def _kernel(case: Case, way: str | None, choice: Choice) -> tuple:
    """What is compiled for a candidate: numbers of parts, and rooms, are told when it runs."""
    tile = choice.tile(way) if way else None
    if way is None or tile is None:
        return case.name, choice.schedule
    return case.name, way, tile[:4], cost.parts_of(case, way, tile) > 1, tile[5:]


def compile_all(given: list[tuple[Work, Size]], device: str, workers: int, seconds: float) -> int:
    """All candidates of all cases, by many processes, defaults first; how many candidates."""
    began = time.time()
    count, waiting = 0, []
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        first = {WORKS.index(w): size for w, size in reversed(given)}
        defaults = [pool.submit(compiled, device, w, size, []) for w, size in first.items()]
        concurrent.futures.wait(defaults, timeout=seconds)
        print(f"defaults compiled in {time.time() - began:.0f} s", flush=True)
        for job in to_compile(given, device):
            waiting.append(pool.submit(compiled, device, *job))
            count += len(job[2])
        concurrent.futures.wait(waiting, timeout=max(1.0, seconds - (time.time() - began)))
        pool.shutdown(wait=False, cancel_futures=True)
    return count


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
    """A step as a captured graph: its kernels alone, without the host."""
    return captured(step)[0].replay


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


def _once(step: Step, device: str) -> float:
    if device == "cuda":
        return trial.seconds(step, torch.device(device), 0.0)
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
    kept = planner._chosen, roads.is_dense, roads.Roads._is_dense

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            start = clock()()
            try:
                return function(*given)
            finally:
                spent[0] += clock()() - start

        return call

    planner._CHOSEN.clear()
    op._plans.clear()
    with following(None):
        try:
            planner._chosen, roads.is_dense = timed(kept[0]), timed(kept[1])
            step = step_of(op, args)
            step()
            first, spent[0] = spent[0], 0.0
            roads.is_dense = kept[1]
            roads.Roads._is_dense = timed(kept[2])  # type: ignore[method-assign]
            each = []
            for _ in range(21):
                step()
                each.append(spent[0])
                spent[0] = 0.0
        finally:
            planner._chosen, roads.is_dense = kept[:2]
            roads.Roads._is_dense = kept[2]  # type: ignore[method-assign]
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
        found = work.op.cost(*args)
    own: Book = DENSE if told["runs"] == "dense" else {p.case.name: p.choice for p in found.chosen.parts}
    best = {s.case.name: search(s, call, row) for s, call in folds(work, args)}
    others: dict[str, Book] = {"best of all": best}
    if device == "cpu" and "dense" in found and found.allows(found["dense"]):
        others["dense"] = DENSE
    row["searched_s"] = time.perf_counter() - began
    untuned = race(work.op, args, {"chosen": None, **_without(others, own)}, device, least)
    began = time.perf_counter()
    with following(None):
        won = {t.key.program: t.winner for t in work.op.tune(*args, quiet=True).folds}
    row["tuned_s"] = time.perf_counter() - began
    dense = any(c.schedule == "dense" for c in won.values())
    after: Book = DENSE if dense else {n: won[n] for n in best if n in won}
    tuned = race(work.op, args, {"tuned": None, **_without(others, after)}, device, least)
    row["plans"] = {n: {k: str(c) for k, c in p.items()} for n, p in (("own", own), ("tuned", after), ("best", best))}
    row |= {"untuned_ms": untuned["chosen"] * 1e3, "tuned_ms": tuned["tuned"] * 1e3}
    row |= {"best_ms": min(untuned.values()) * 1e3, "tuned_best_ms": min(tuned.values()) * 1e3}
    row["best"] = min(untuned, key=untuned.__getitem__)
    row["calls_ms"] = {n: round(t * 1e3, 4) for n, t in (untuned | tuned).items()}
    return row


def _without(others: Mapping[str, Book], plan: Book) -> dict[str, Followed]:
    """The calls to run beside a plan; none that is the same plan again."""
    return {n: p if p is DENSE else {**PASSES, **p} for n, p in others.items() if dict(p) != dict(plan)}


def _of(told: dict[str, Any], field: str) -> float:
    return next(s[field] for s in told["schedules"] if s["schedule"] == told["runs"])


def hosts(device: str) -> list[dict[str, Any]]:
    """Host microseconds of a small call, ours and torch's own."""
    q, k, v = (torch.randn(1, 2, 128, 64, device=device, requires_grad=True) for _ in range(3))
    rows = []
    for name, call in (("ours", ops.attention), ("SDPA", F.scaled_dot_product_attention)):
        with following(None):
            forward, backward = both(call, (q, k, v), 50)
        rows.append({"call": f"attention 1×2×128×64, {name}", "forward_us": forward, "both_us": backward})
    return rows


# Reporting ------------------------------------------------------------------------------------------------------


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    share = lambda holds: sum(map(holds, rows)) / len(rows)
    return {
        "cases": len(rows),
        "untuned within 15 %": share(lambda r: r["untuned_ms"] <= 1.15 * r["best_ms"]),
        "tuned within 3 %": share(lambda r: r["tuned_ms"] <= 1.03 * r["tuned_best_ms"]),
        "peak memory within 10 %": share(lambda r: abs(r["predicted_peak"] / r["peak"] - 1) <= 0.1),
        "planning of a first call, ms (median)": statistics.median(r["first_ms"] for r in rows),
        "planning of a first call, ms (worst)": max(r["first_ms"] for r in rows),
        "cached plans of a step, µs (median)": statistics.median(r["cached_us"] for r in rows),
        "cached plans of a step, µs (worst)": max(r["cached_us"] for r in rows),
    }


def markdown(results: Mapping[str, Any]) -> str:
    lines = [f"- {k}: {v}" for k, v in results["environment"].items()]
    lines += ["", *(f"- {k}: {v:.3g}" for k, v in results.get("summary", {}).items()), ""]
    lines += [
        "Times in ms of whole calls, forward and backward, in turns. Ratios: to the fastest of the calls run beside",
        "it: all folds by the best of their candidates, the dense form where it is allowed, the planner's own choice.",
        "",
        "| work | M × N, d | runs | untuned | ratio | tuned | ratio | best | which | tried | predicted "
        "| peak MB: predicted / measured | planning ms | cached µs |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results["rows"]:
        (m, n, d), best, again = r["size"], r["best_ms"], r["tuned_best_ms"]
        lines.append(
            f"| {r['work']} | {m} × {n}, {d} | {r['runs']} | {r['untuned_ms']:.3f} | {r['untuned_ms'] / best:.2f} "
            f"| {r['tuned_ms']:.3f} | {r['tuned_ms'] / again:.2f} | {best:.3f} | {r['best']} | {r['tried']} "
            f"| {r['predicted_ms']:.3f} | {r['predicted_peak'] / 1e6:.2f} / {r['peak'] / 1e6:.2f} "
            f"| {r['first_ms']:.1f} | {r['cached_us']:.0f} |"
        )
    lines += ["", *(f"- failed: {name}: {why}" for name, why in results.get("failed", {}).items())]
    if results.get("hosts"):
        lines += ["", "| host time of a call, µs | forward | forward and backward |", "|---|---|---|"]
        lines += [f"| {h['call']} | {h['forward_us']:.0f} | {h['both_us']:.0f} |" for h in results["hosts"]]
    return "\n".join(lines) + "\n"


def line(row: Mapping[str, Any]) -> str:
    return (
        f"{row['work']:18} {row['size']!s:22} {row['runs']:6} untuned {row['untuned_ms'] / row['best_ms']:.2f}, tuned "
        f"{row['tuned_ms'] / row['tuned_best_ms']:.2f} of {row['best_ms']:.3f} ms ({row['best']}, {row['tried']} "
        f"tried); memory {row['predicted_peak'] / max(1, row['peak']):.2f}; planning {row['first_ms']:.1f} ms, "
        f"{row['cached_us']:.0f} µs; {row['searched_s']:.1f} + {row['tuned_s']:.1f} s"
    )


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--shapes", type=int, default=3, help="how many of the shapes of each program")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--workers", type=int, default=14, help="processes that compile kernels beforehand")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which nothing new is begun")
    parser.add_argument("--least", type=float, help="seconds that a whole call is run for, about")
    parser.add_argument("--commit", help="what was measured, where the machine has no git")
    return parser.parse_args()


def told_of(given: argparse.Namespace) -> dict[str, str]:
    found = environment()
    if given.device == "cuda":
        found["machine"] = torch.cuda.get_device_name()
    found["commit"] = given.commit or found["commit"]
    asked = " ".join(a for a in sys.argv[1:] if a not in ("--out", str(given.out)))
    found["command"] = f"python -m benchmarks.planner {asked}"
    wall = "the process's own time" if clock() is time.process_time else "wall"
    found["clock"] = "captured graphs between events" if given.device == "cuda" else wall
    found["load"] = " ".join(f"{x:.1f}" for x in os.getloadavg())
    return found


def main() -> None:
    given, began = options(), time.time()
    os.environ["MONOIDREDUCE_CACHE"] = tempfile.mkdtemp(prefix="monoidreduce-planner-")  # nothing tuned before counts
    given.out.mkdir(parents=True, exist_ok=True)
    least = given.least or (0.02 if given.device == "cuda" else 0.1)
    wanted = cases(given.device, given.shapes, given.only)
    results: dict[str, Any] = {"environment": told_of(given), "rows": []}
    if given.device == "cuda" and given.workers > 1:
        results["kernels"] = compile_all(wanted, "cuda", given.workers, 0.6 * given.budget)
        results["compiling_s"] = round(time.time() - began)
        print(f"{results['kernels']} candidates compiled in {results['compiling_s']} s", flush=True)
    stem = given.out / f"planner-{given.device}-{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M}"
    if given.device == "cpu":  # a GPU's host time has a benchmark of its own, host.py
        results["hosts"] = hosts(given.device)
    for work, size in wanted:
        if time.time() - began > given.budget:
            break
        try:
            results["rows"].append(run(work, size, given.device, least))
        except Exception as error:  # the other cases still count; a case that fails is shown
            results.setdefault("failed", {})[f"{work.name} {size}"] = f"{type(error).__name__}: {error}"[:500]
            print(f"{work.name} {size} failed: {type(error).__name__}: {error}"[:500], flush=True)
            continue
        print(line(results["rows"][-1]), flush=True)
        results["summary"] = summary(results["rows"])
        results["seconds"] = round(time.time() - began)
        stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        stem.with_suffix(".md").write_text(markdown(results))
    print(json.dumps(results.get("summary", {}), indent=1))


if __name__ == "__main__":
    main()
