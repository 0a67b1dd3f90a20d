"""The planner against exhaustive search: is what it chooses, untuned and tuned, close to the best that could run?

    python -m benchmarks.planner [--device cuda] [--shapes N] [--only WORD ...] [--workers N] [--out DIR]

Ten programs at three shapes each, forward and backward (``planner_works.py``), each searched, tuned and run as whole
calls (``planner_case.py``). Also: predicted against measured peak memory, what planning adds to a first call, what a
planned call costs to look up, and host time of a small call. On a GPU many processes compile all candidates first
(``planner_compile.py``). Cases run one after another in a process of their own: one that takes its device with it, or
never ends, is shown as failed, and the next runs in a new one. What is known so far is on disk after every case."""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from monoidreduce import ops
from monoidreduce.engines.common.oom_retry import is_device_lost

from .cpu import RESULTS, commit, environment
from .host import both
from .planner_case import clock, following, run
from .planner_compile import compile_all
from .planner_works import WORKS, Size, Work, cases

_LONGEST = 180  # seconds of a case, after which it counts as one that never ends


class Cases:
    """Runs cases one after another in a process of their own, and in a new one after a crash."""

    def __init__(self, device: str, least: float):
        self.device, self.least = device, least
        self._start()

    def _start(self) -> None:
        self.pool = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self.pool.submit(is_device_lost, torch.device(self.device))  # it starts while kernels are compiled

    def __call__(self, work: Work, size: Size) -> dict[str, Any] | str:
        """A case's row, or why there is none."""
        try:
            row, alive = self.pool.submit(_one, WORKS.index(work), size, self.device, self.least).result()
        except BrokenProcessPool:
            row, alive = f"the process died, or took longer than {_LONGEST} s", False
        if not alive:
            self.pool.shutdown(wait=False)
            self._start()
        return row

    def stop(self) -> None:
        self.pool.shutdown()


def _one(work: int, size: Size, device: str, least: float) -> tuple[dict[str, Any] | str, bool]:
    """A row, or what went wrong; and whether the process is still good for another."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends it, wherever it waits
    signal.alarm(_LONGEST)
    try:
        return run(WORKS[work], size, device, least), True
    except Exception as error:  # the other cases still count; a case that fails is shown
        return f"{type(error).__name__}: {error}"[:500], not is_device_lost(torch.device(device))
    finally:
        signal.alarm(0)


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
        f"tried); planning {row['first_ms']:.1f} ms, {row['cached_us']:.0f} µs; "
        f"{row['tuned_s']:.1f} + {row['searched_s']:.1f} of {row['seconds']:.1f} s\n    {memory(row)}"
    )


def memory(row: Mapping[str, Any]) -> str:
    """Bytes predicted and measured, and what was held then."""
    share = row["predicted_peak"] / max(1, row["peak"])
    held = "; ".join(f"{size:,} {who}" for size, who in row["largest"])
    told = f"memory: {row['predicted_peak']:,} bytes predicted, {row['peak']:,} measured, {share:.3f}"
    return f"{told} ({held})" if held else told


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--shapes", type=int, default=3, help="how many of the shapes of each program")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--workers", type=int, default=14, help="processes that compile kernels beforehand")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which nothing new is begun")
    parser.add_argument("--least", type=float, help="seconds that a whole call is run for, about")
    parser.add_argument("--commit", type=commit, help="what was measured, where the machine has no git")
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
    wanted = cases(given.device, given.shapes, given.only)
    results: dict[str, Any] = {"environment": told_of(given), "rows": []}
    run_case = Cases(given.device, given.least or (0.02 if given.device == "cuda" else 0.1))
    if given.device == "cuda" and given.workers > 1:
        results["kernels"] = compile_all(wanted, "cuda", given.workers, 0.5 * given.budget)
        results["compiling_s"] = round(time.time() - began)
        print(f"{results['kernels']} candidates compiled in {results['compiling_s']} s", flush=True)
    stem = given.out / f"planner-{given.device}-{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M}"
    if given.device == "cpu":  # a GPU's host time has a benchmark of its own, host.py
        results["hosts"] = hosts(given.device)
    for work, size in wanted:
        if time.time() - began > given.budget:
            break
        found = run_case(work, size)
        if isinstance(found, str):
            results.setdefault("failed", {})[f"{work.name} {size}"] = found
            print(f"{work.name} {size} failed: {found}", flush=True)
        else:
            results["rows"].append(found)
            results["summary"] = summary(results["rows"])
            print(line(found), flush=True)
        results["seconds"] = round(time.time() - began)
        stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        stem.with_suffix(".md").write_text(markdown(results))
    run_case.stop()
    print(json.dumps(results.get("summary", {}), indent=1))


if __name__ == "__main__":
    main()
