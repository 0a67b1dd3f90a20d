"""Measure a GPU's tables anew, the oldest first, for as long as there is time: ``python -m benchmarks.refresh``.

    python -m benchmarks.refresh --list
    python -m benchmarks.refresh --out DIR --minutes 9 [--commit HASH] [--only WORDS] [--tests MINUTES]

Each table is one command, in a process of its own, which gets its usual time or what is left of all, and writes its
files into DIR as it goes; its output is DIR/NAME.log. A table whose process fails or runs too long leaves what it has
written, and the next one begins. ``--tests`` runs tests/gpu first, several processes beside each other. Copy the files
of DIR into benchmarks/results, remove those they replace, and run ``python -m benchmarks.readme``.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .cpu import commit

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_LEAST = 0.5  # of its usual time: with less a table is not begun
_NEIGHBOURS = 8  # tests that one process runs one after the other, since they often share kernels


class Table(NamedTuple):
    """One file of results. ``seconds``: what it takes, about; ``budget``: its command takes ``--budget``."""

    kind: str
    command: tuple[str, ...]
    seconds: int
    budget: bool = True


_WORKS = "relative|entropy|column sums|divergence|indexer|Hamming|best|monoid|others|FP8|INT8"
TABLES = (
    Table("model", ("model",), 330),
    Table("model-8b-width-128", ("model", "--only", "8B|width 128"), 330),
    Table("generality", ("generality",), 250, budget=False),
    Table("shapes-long", ("shapes", "--only", "long"), 70),
    Table("shapes-width", ("shapes", "--only", "width"), 110),
    Table("shapes-short-decode-float32", ("shapes", "--only", "short", "decode", "float32"), 140),
    Table("domains", ("domains",), 330),
    Table("gpu-works", ("gpu", "--no-correct", "--only", _WORKS), 140),
    Table("heads", ("heads",), 140),
    Table("accuracy", ("accuracy",), 80, budget=False),
    Table("gpu", ("gpu",), 450),
    Table("gpu-wide", ("gpu_wide",), 240),
    Table("limits", ("limits", "--memory", "1GiB", "--seconds", "8"), 90, budget=False),
    Table("first", ("first",), 80, budget=False),
    Table("stream", ("stream_gpu",), 70),
)


def date_of(kind: str, results: Path = RESULTS) -> str:
    """When the newest file of a kind was written, as in its name; empty where there is none."""
    found = (re.fullmatch(rf"{re.escape(kind)}-(\d{{8}}-\d{{4}})\.json", p.name) for p in results.glob("*.json"))
    return max((m[1] for m in found if m), default="")


def in_order(words: str, results: Path = RESULTS) -> list[Table]:
    """The tables whose names contain one of the words (``|`` between), the oldest first."""
    chosen = [table for table in TABLES if any(word in table.kind for word in words.split("|"))]
    return sorted(chosen, key=lambda table: date_of(table.kind, results))


def run(command: Sequence[str], seconds: float, log: Path, **environment: str) -> int | None:
    """The exit status of a command; None where it was stopped, with all that it started, after so many seconds."""
    with log.open("w") as out:
        started = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            start_new_session=True,
        )
        try:
            return started.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
            return None


def measure(table: Table, left: float, out: Path, revision: str | None) -> str:
    """Measure one table; what became of it."""
    seconds = min(table.seconds * 1.25, left)
    command = [sys.executable, "-m", f"benchmarks.{table.command[0]}", *table.command[1:], "--out", str(out)]
    command += ["--budget", str(int(min(table.seconds, seconds - 15)))] if table.budget else []
    command += ["--commit", revision] if revision else []
    began = time.monotonic()
    status = run(command, seconds, out / f"{table.kind}.log")
    became = "stopped" if status is None else "done" if status == 0 else f"failed ({status})"
    return f"{table.kind}: {became}, {time.monotonic() - began:.0f} s"


def test(minutes: float, out: Path, processes: int = 16) -> str:
    """Run tests/gpu, its tests dealt out to processes in runs of neighbours; the last line of each, and what failed."""
    base = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
    listed = subprocess.run([*base, "--collect-only", "tests/gpu"], cwd=ROOT, capture_output=True, text=True).stdout
    names = [line for line in listed.splitlines() if "::" in line]
    runs = [names[k : k + _NEIGHBOURS] for k in range(0, len(names), _NEIGHBOURS)]
    logs = [out / f"tests-{k}.log" for k in range(processes)]
    started = []
    for k, log in enumerate(logs):
        mine = [name for run in runs[k::processes] for name in run]
        command = ["timeout", str(int(minutes * 60)), *base, *mine]
        started.append(subprocess.Popen(command, cwd=ROOT, stdout=log.open("w"), stderr=subprocess.STDOUT))
    for process in started:
        process.wait()
    lines = [log.read_text().strip().splitlines() or ["nothing"] for log in logs]
    failed = [line for own in lines for line in own if line.startswith(("FAILED", "ERROR"))]
    return "\n".join([*(own[-1] for own in lines), *failed])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0, help="of all; what is left of it bounds each table")
    parser.add_argument("--only", default="", help="words, with | between: tables by name")
    parser.add_argument("--tests", type=float, default=0.0, help="minutes of them for tests/gpu, before all tables")
    parser.add_argument("--commit", type=commit, help="what is measured, where the machine has no git")
    parser.add_argument("--list", action="store_true", help="say what would be measured, and for how long")
    asked = parser.parse_args()
    tables = in_order(asked.only)
    if asked.list:
        for table in tables:
            print(f"{table.kind}: {table.seconds} s, last {date_of(table.kind) or 'never'}")
        print(f"{sum(table.seconds for table in tables) / 60:.0f} minutes in all")
        return
    if asked.out is None:
        parser.error("--out DIR is needed")
    out = asked.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + asked.minutes * 60
    if asked.tests:
        print(test(asked.tests, out), flush=True)
    for table in tables:
        left = ends - time.monotonic()
        if left < table.seconds * _LEAST:
            print(f"{table.kind}: not begun, {left:.0f} s left", flush=True)
            continue
        print(measure(table, left, out, asked.commit), flush=True)


if __name__ == "__main__":
    main()
