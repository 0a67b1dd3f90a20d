"""The planner against exhaustive search: is what it chooses, untuned and tuned, close to the best that could run?

    python -m benchmarks.planner [--device cuda] [--quick] [--only WORD ...] [--workers N] [--out DIR]

Ten programs at three shapes each, forward and backward. Every candidate (schedule and tiles) is run as a whole call by
``follow``, in turns with what the planner chose by itself, then the tuner has its go. Also: predicted against measured
peak memory, what planning adds to a first call, what a planned call costs to look up, and host time of a small call."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import datetime
import gc
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr
from monoidreduce import Col, Row, ops
from monoidreduce.engine import calls, planner, roads
from monoidreduce.explain import measure
from monoidreduce.plan import candidates
from monoidreduce.plan.choice import Choice, follow

from .cpu import RESULTS, environment
from .host import both


@mr.op
@no_type_check
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k * 0.125, v)


@mr.op
@no_type_check
def causal(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(torch.where(mr.col_index <= mr.row_index, q @ k * 0.125, -torch.inf), v)


@mr.op
@no_type_check
def mlp(x: Row["d"], p: Col["d"], q: Col["n"]):
    return mr.sum(torch.relu(x @ p) * q)


@mr.op
@no_type_check
def gated(x: Row["d"], gate: Col["d"], up: Col["d"], down: Col["n"]):
    return mr.sum(F.silu(x @ gate) * (x @ up) * down)


@mr.op
@no_type_check
def cross_entropy(x: Row["d"], w: Col["d"]):
    s = x @ w
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == mr.row_index, s, 0.0))


@mr.op
@no_type_check
def contrastive(x: Row["d"], y: Col["d"]):
    s = x @ y
    return mr.logsumexp(s), mr.logsumexp(s, over="rows")


@mr.op
@no_type_check
def gaussian(x: Row["d"], y: Col["d"], b: Col):
    return mr.sum(torch.exp(-mr.sqdist(x, y)) * b)


@mr.op
@no_type_check
def pooling(x: Row["d"], y: Col["d"]):
    return mr.max(x @ y)


@dataclass(frozen=True)
class Work:
    """A program and the shapes of its arguments: (rows, cols, features) of M, N and d, by the first letter."""

    name: str
    op: Any
    sides: str  # for each argument, M or N, and d where it is a vector: "Md Nd N"
    sizes: tuple[tuple[int, int, int], ...]  # on a CPU
    large: tuple[tuple[int, int, int], ...]  # on a GPU
    exact: bool = False  # float32 on a GPU too

    def args(self, size: tuple[int, int, int], device: str) -> list[Tensor]:
        lengths = dict(zip("MNd", size, strict=True))
        dtype = torch.bfloat16 if device == "cuda" and not self.exact else torch.float32
        made = []
        for side in self.sides.split():
            shape = [lengths[letter] for letter in side]
            made.append((torch.randn(shape, device=device) * size[2] ** -0.25).to(dtype).requires_grad_())
        return made


WORKS = [
    Work(
        "attention",
        attention,
        "Md Nd Nd",
        ((300, 300, 64), (1500, 1500, 64), (64, 8000, 64)),
        ((512, 512, 64), (8192, 8192, 64), (16, 65536, 64)),
    ),
    Work(
        "attention 128",
        attention,
        "Md Nd Nd",
        ((200, 500, 128), (2048, 1024, 128), (3000, 100, 128)),
        ((2048, 2048, 128), (16384, 8192, 128), (128, 32768, 128)),
    ),
    Work(
        "causal attention",
        causal,
        "Md Nd Nd",
        ((400, 400, 64), (1200, 1200, 64), (2500, 2500, 64)),
        ((1024, 1024, 64), (4096, 4096, 64), (16384, 16384, 64)),
    ),
    Work(
        "perceptron",
        mlp,
        "Md Nd Nd",
        ((1000, 128, 128), (1024, 4096, 128), (4000, 600, 64)),
        ((4096, 256, 128), (8192, 16384, 128), (16384, 1024, 64)),
    ),
    Work(
        "gated perceptron",
        gated,
        "Md Nd Nd Nd",
        ((500, 256, 128), (1024, 2048, 64), (2000, 2000, 32)),
        ((2048, 1024, 128), (8192, 8192, 64), (16384, 4096, 128)),
    ),
    Work(
        "cross-entropy",
        cross_entropy,
        "Md Nd",
        ((256, 1000, 64), (1024, 8000, 64), (100, 20000, 128)),
        ((1024, 8192, 128), (8192, 32768, 128), (256, 131072, 128)),
    ),
    Work(
        "wide cross-entropy",
        cross_entropy,
        "Md Nd",
        ((128, 2000, 512), (512, 4000, 512), (1024, 1024, 1024)),
        ((512, 4096, 1024), (4096, 32768, 1024), (1024, 65536, 2048)),
    ),
    Work(
        "contrastive",
        contrastive,
        "Md Nd",
        ((300, 300, 128), (1500, 1500, 128), (3000, 1000, 64)),
        ((1024, 1024, 128), (8192, 8192, 128), (32768, 4096, 128)),
    ),
    Work(
        "gaussian kernel",
        gaussian,
        "Md Nd N",
        ((500, 500, 3), (2000, 2000, 3), (5000, 300, 3)),
        ((1024, 1024, 3), (16384, 16384, 3), (65536, 2048, 3)),
        exact=True,
    ),
    Work(
        "pooling",
        pooling,
        "Md Nd",
        ((500, 700, 64), (2000, 2000, 64), (32, 20000, 64)),
        ((1024, 1024, 64), (8192, 16384, 64), (64, 131072, 64)),
    ),
]


# Candidates -----------------------------------------------------------------------------------------------------


def choices(work: Work, args: list[Tensor], device: str) -> dict[str, Choice | Mapping[str, Choice]]:
    """What could run the call: every tile of the tables, every schedule."""
    found: dict[str, Choice | Mapping[str, Choice]] = {"dense": {"call": Choice("dense")}, "panel": Choice("panel")}
    if device == "cpu":
        rows, cols = (next(len(a) for a, s in zip(args, work.sides.split(), strict=True) if s[0] == x) for x in "MN")
        for r, c in candidates.TORCH_TILES:
            tile = (1, min(r, rows), min(c, cols))
            found[f"tiles {tile[1]} × {tile[2]}"] = Choice("flash", (("tile", tile),))
        return found
    narrow = min(a.shape[-1] for a in args if a.dim() > 1) <= 8
    found["kernels' own tiles"] = Choice("flash")
    for t in (candidates.NARROW_TILES if narrow else candidates.KERNEL_TILES)[::2]:
        found[f"kernels {t}"] = Choice("flash", (("cols", (*t, 1)), ("rows", (*t, 1))))
    for parts in (4, 16, 64):
        t = (64, 64, 4, 3) if not narrow else (32, 32, 4, 2)
        found[f"kernels {t} in {parts} parts"] = Choice("split", (("cols", (*t, parts)), ("rows", (*t, 1))))
    return found


def step_of(op: Any, args: list[Tensor]) -> Callable[[], None]:
    """Forward and backward, with cotangents made beforehand."""
    first = op(*args)
    values = [first] if isinstance(first, Tensor) else list(first)
    ones = [torch.ones_like(v) for v in values]

    def step() -> None:
        got = op(*args)
        torch.autograd.grad([got] if isinstance(got, Tensor) else list(got), args, ones)

    return step


def seconds(step: Callable[[], None], device: str, least: float) -> float:
    """The median of as many runs as ``least`` seconds hold, at least three."""
    if device == "cuda":
        return _events(step, least)
    taken: list[float] = []
    while sum(taken) < least or len(taken) < 3:
        gc.collect()
        start = clock()()
        step()
        taken.append(clock()() - start)
    return statistics.median(taken)


def clock() -> Callable[[], float]:
    """With one thread the process's own time: what else the machine does then counts little."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def _events(step: Callable[[], None], least: float) -> float:
    taken: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() - began < least or len(taken) < 5:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3)
    return statistics.median(taken)


@contextlib.contextmanager
def following(choice: Choice | Mapping[str, Choice] | None) -> Iterator[None]:
    with mr.use(engine="auto"), contextlib.nullcontext() if choice is None else follow(choice):
        yield


# Measuring ------------------------------------------------------------------------------------------------------


def planning(op: Any, args: list[Tensor]) -> dict[str, float]:
    """Milliseconds that planning adds to a first call, and microseconds that it adds to every other."""
    spent, calls_ = [0.0], [0]
    kept = planner.chosen, roads.is_dense

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            start = clock()()
            try:
                return function(*given)
            finally:
                spent[0] += clock()() - start
                calls_[0] += 1

        return call

    planner._CHOSEN.clear()
    op._plans.clear()
    planner.chosen, roads.is_dense = timed(kept[0]), timed(kept[1])
    try:
        with following(None):
            step_of(op, args)()
            first = spent[0]
    finally:
        planner.chosen, roads.is_dense = kept
    with following(None):
        step = step_of(op, args)
        spent[0], calls_[0] = 0.0, 0
        planner.chosen = timed(kept[0])
        road = calls.Roads._is_dense
        calls.Roads._is_dense = timed(road)  # type: ignore[method-assign]
        try:
            for _ in range(20):
                step()
        finally:
            planner.chosen = kept[0]
            calls.Roads._is_dense = road  # type: ignore[method-assign]
    return {"first_ms": first * 1e3, "cached_us": spent[0] / 20 * 1e6}


def run(work: Work, size: tuple[int, int, int], device: str, least: float) -> dict[str, Any]:
    """One case: all candidates, the planner's own choice before and after tuning, memory, planning time."""
    args = work.args(size, device)
    row: dict[str, Any] = {"work": work.name, "size": list(size)}
    with following(None):
        told = work.op.explain(*args).as_dict()
        row["runs"], row["predicted_ms"] = told["runs"], _of(told, "seconds") * 1e3
        step = step_of(work.op, args)
        step()
    row |= planning(work.op, args)
    times: dict[str, float] = {}
    for name, choice in choices(work, args, device).items():
        try:
            with following(choice):
                other = step_of(work.op, args)
                other()
                times[name] = seconds(other, device, least)
        except Exception as error:  # it does not fit, or has no such form
            row.setdefault("refused", {})[name] = f"{type(error).__name__}: {str(error)[:80]}"
    with following(None):
        own = seconds(step, device, 2 * least)
        same = times.get("dense", own) if row["runs"] == "dense" else own  # the very same program, run twice
        row["untuned_ms"] = min(own, same) * 1e3
        found = measure(work.op, args, {}, True)
        row["peak"], row["predicted_peak"] = found.peak, _of(told, "peak")
    best = min(times, key=times.__getitem__)
    row["best"], row["best_ms"] = best, min(times[best] * 1e3, row["untuned_ms"])
    row["candidates_ms"] = {n: round(t * 1e3, 4) for n, t in sorted(times.items(), key=lambda x: x[1])}
    return row


def tune(row: dict[str, Any], work: Work, size: tuple[int, int, int], device: str, least: float) -> None:
    """The same case after the tuner had its go; the best candidate again, in turns with it."""
    args = work.args(size, device)
    with following(None):
        work.op.tune(*args, quiet=True)
        step = step_of(work.op, args)
    best = choices(work, args, device)[row["best"]]
    with following(best):
        other = step_of(work.op, args)
    turns: list[list[float]] = [[], []]
    for _ in range(3):
        with following(None):
            turns[0].append(seconds(step, device, least))
        with following(best):
            turns[1].append(seconds(other, device, least))
    row["tuned_ms"], again = (min(t) * 1e3 for t in turns)
    row["tuned_best_ms"] = min(again, row["tuned_ms"])


def _of(told: dict[str, Any], field: str) -> float:
    return next(s[field] for s in told["schedules"] if s["schedule"] == told["runs"])


def compiled(index: int, workers: int, quick: bool, only: list[str]) -> None:
    """Compile what the programs of a worker will run, so that Triton's own cache holds it."""
    for work, size in cases("cuda", quick, only):
        if WORKS.index(work) % workers == index:
            args = work.args(size, "cuda")
            for choice in [None, *choices(work, args, "cuda").values()]:
                with contextlib.suppress(Exception), following(choice):
                    step_of(work.op, args)()


def cases(device: str, quick: bool, only: list[str]) -> list[tuple[Work, tuple[int, int, int]]]:
    """Every program at its first shape, then at its second, then at its third."""
    wanted = [w for w in WORKS if not only or any(word in w.name for word in only)]
    return [(w, (w.large if device == "cuda" else w.sizes)[at]) for at in range(1 if quick else 3) for w in wanted]


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
    within = lambda field, share: sum(r[field] <= (1 + share) * r["best_ms"] for r in rows) / len(rows)
    tuned = [r for r in rows if "tuned_ms" in r]
    memory = [abs(r["predicted_peak"] / r["peak"] - 1) for r in rows if r["peak"]]
    return {
        "cases": len(rows),
        "untuned within 15 %": within("untuned_ms", 0.15),
        "tuned": len(tuned),
        "tuned within 3 %": sum(r["tuned_ms"] <= 1.03 * r["tuned_best_ms"] for r in tuned) / max(1, len(tuned)),
        "peak memory within 10 %": sum(m <= 0.1 for m in memory) / max(1, len(memory)),
        "planning of a first call, ms (median, worst)": statistics.median(r["first_ms"] for r in rows),
        "worst": max(r["first_ms"] for r in rows),
        "cached plans of a step, µs (median)": statistics.median(r["cached_us"] for r in rows),
    }


def _tuned(r: Mapping[str, Any]) -> str:
    return f"{r['tuned_ms']:.3f} | {r['tuned_ms'] / r['tuned_best_ms']:.2f}" if "tuned_ms" in r else "– | –"


def markdown(results: Mapping[str, Any]) -> str:
    lines = [f"- {k}: {v}" for k, v in results["environment"].items()]
    found = results.get("summary", {})
    lines += ["", *(f"- {k}: {v:.3g}" for k, v in found.items()), ""]
    lines += [
        "Times in ms, forward and backward. Ratios: to the best of all candidates, each run as a whole call.",
        "",
        "| work | M × N, d | runs | untuned | ratio | tuned | ratio | best | by | predicted "
        "| peak MB: predicted / measured | planning ms | cached µs |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results["rows"]:
        (m, n, d), best = r["size"], r["best_ms"]
        lines.append(
            f"| {r['work']} | {m} × {n}, {d} | {r['runs']} | {r['untuned_ms']:.3f} | {r['untuned_ms'] / best:.2f} "
            f"| {_tuned(r)} | {best:.3f} | {r['best']} "
            f"| {r['predicted_ms']:.3f} | {r['predicted_peak'] / 1e6:.2f} / {r['peak'] / 1e6:.2f} "
            f"| {r['first_ms']:.1f} | {r['cached_us']:.0f} |"
        )
    lines += ["", "| host time of a call, µs | forward | forward and backward |", "|---|---|---|"]
    lines += [f"| {h['call']} | {h['forward_us']:.0f} | {h['both_us']:.0f} |" for h in results.get("hosts", [])]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="the first shape of each program")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--workers", type=int, default=14, help="processes that compile kernels beforehand")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which nothing new is begun")
    parser.add_argument("--least", type=float, default=0.05, help="seconds that a candidate is run for, about")
    parser.add_argument("--commit", help="what was measured, where the machine has no git")
    options = parser.parse_args()
    began = time.time()
    os.environ["MONOIDREDUCE_CACHE"] = tempfile.mkdtemp(prefix="monoidreduce-planner-")  # nothing tuned before counts
    options.out.mkdir(parents=True, exist_ok=True)
    if options.device == "cuda" and options.workers > 1:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(options.workers, mp_context=context) as pool:
            jobs = [
                pool.submit(compiled, k, options.workers, options.quick, options.only) for k in range(options.workers)
            ]
            concurrent.futures.wait(jobs, timeout=options.budget)
        print(f"compiled in {time.time() - began:.0f} s", flush=True)
    found = environment()
    if options.device == "cuda":
        found["machine"] = torch.cuda.get_device_name()
    found["commit"] = options.commit or found["commit"]
    found["command"] = "python -m benchmarks.planner " + " ".join(sys.argv[1:])
    found["clock"] = "the process's own time" if clock() is time.process_time else "wall"
    found["load"] = " ".join(f"{x:.1f}" for x in os.getloadavg())
    results: dict[str, Any] = {"environment": found, "rows": []}
    stem = options.out / f"planner-{options.device}-{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M}"
    results["hosts"] = hosts(options.device)
    late = lambda: time.time() - began > options.budget

    def save() -> None:
        results["summary"] = summary(results["rows"])
        results["seconds"] = round(time.time() - began)
        stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        stem.with_suffix(".md").write_text(markdown(results))

    done = []
    for work, size in cases(options.device, options.quick, options.only):
        if late():
            break
        row = run(work, size, options.device, options.least)
        done.append((row, work, size))
        results["rows"].append(row)
        print(
            f"{work.name:20} {size!s:22} {row['runs']:6} {row['untuned_ms'] / row['best_ms']:.2f} of the best, "
            f"{row['best_ms']:.3f} ms ({row['best']}); memory {row['predicted_peak'] / max(1, row['peak']):.2f}; "
            f"planning {row['first_ms']:.1f} ms, {row['cached_us']:.0f} µs",
            flush=True,
        )
        save()
    for row, work, size in done:
        if late():
            break
        tune(row, work, size, options.device, options.least)
        print(f"{work.name:20} {size!s:22} tuned {row['tuned_ms'] / row['tuned_best_ms']:.2f} of the best", flush=True)
        save()
    print(json.dumps(results.get("summary", {}), indent=1))


if __name__ == "__main__":
    main()
