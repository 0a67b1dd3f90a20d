"""The long run: ``python -m tests.fuzz --programs 10000 --seed 0``. Exits with 1 if a program fails.

``--engine``, ``--mode`` and ``--share interpret`` (with TRITON_INTERPRET=1) narrow it down; ``--only 123`` runs one
program and shows its shrunk form; ``--record FILE`` keeps the summary as JSON. ``--lists``: each over lists of columns.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from . import lists
from .generate import generate
from .runner import Outcome, check, report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first program")
    parser.add_argument("--only", type=int, help="run this program alone")
    parser.add_argument("--share", choices=("unit", "interpret"), default="unit")
    parser.add_argument("--lists", action="store_true", help="over lists of columns, by --engine or eager")
    parser.add_argument("--engine", help="run every program by this engine")
    parser.add_argument("--mode", help="run every program through this transform")
    parser.add_argument("--shown", type=int, default=5, help="failures of one sort that are shrunk and printed")
    parser.add_argument("--record", type=Path, help="write the summary to this file")
    given = parser.parse_args()
    torch.set_num_threads(1)

    seeds = [given.only] if given.only is not None else range(given.seed, given.seed + given.programs)
    if given.lists:
        return _run_lists(seeds, given.engine or "eager", given.shown)
    counts: collections.Counter[str] = collections.Counter()
    failures: dict[str, list[int]] = collections.defaultdict(list)
    start = last = time.monotonic()
    for done, seed in enumerate(seeds, 1):
        program = generate(seed, given.share)
        if given.engine:
            program = replace(program, run=replace(program.run, engine=given.engine, tile=None))
        if given.mode:
            program = replace(program, run=replace(program.run, mode=given.mode, second=False))
        failure = check(program)
        counts.update([f"engine {program.run.engine}", f"mode {program.run.mode}", program.dtype])
        counts["second gradients"] += program.run.second
        if failure:
            failures[failure.kind].append(seed)
            if len(failures[failure.kind]) <= given.shown:
                print(report(Outcome(seed, program, failure)), "\n", flush=True)
        if time.monotonic() - last > 10:
            last = time.monotonic()
            bad = sum(map(len, failures.values()))
            print(f"{done} of {len(seeds)} programs, {bad} failed, {last - start:.0f} s", file=sys.stderr, flush=True)

    summary = {
        "programs": len(seeds),
        "first": seeds[0] if len(seeds) else given.seed,
        "share": given.share,
        "seconds": round(time.monotonic() - start, 1),
        "torch": torch.__version__,
        "of": dict(sorted(counts.items())),
        "failures": dict(failures),
    }
    print(json.dumps(summary, indent=1))
    if given.record:
        given.record.write_text(json.dumps(summary, indent=1) + "\n")
    return 1 if failures else 0


def _run_lists(seeds: Iterable[int], engine: str, shown: int) -> int:
    failed = 0
    for seed in seeds:
        failure = lists.check(seed, engine)
        failed += failure is not None
        if failure and failed <= shown:
            print(f"program {seed}: {failure.kind}\n{failure.detail}\n{generate(seed).source()}", flush=True)
    print(f"{failed} programs over lists failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
