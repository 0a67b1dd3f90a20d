"""``monoidreduce demo``: the papers' layers beside their dense forms, measured here and now, and a page about it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import report, terminal
from .command import Command, CommandError
from .environment import Environment, surroundings
from .layers import LAYERS
from .measure import STAGES, Result, measure
from .numbers import factor, geometric

PAGE = "index.html"
SECONDS = 75.0  # what the whole should take,
TIMED = 0.35  # this part of it timed runs; the rest is the truth in float64, first calls and profiles


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="tiny sizes, a few seconds; the numbers mean little")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("report"), help="where the page goes (report)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Measure every layer, show the table, write the page."""
    terminal.require()
    page = _door(arguments.out)
    start = time.perf_counter()
    results = _measured(arguments.quick)
    seconds = time.perf_counter() - start
    environment = surroundings()
    try:
        page.write_text(report.render(results, environment, seconds, arguments.quick), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {page}: {error.strerror}. Give another folder with --out") from None
    if arguments.json:
        print(json.dumps(as_data(results, environment, seconds, page), indent=2))
    else:
        terminal.show(results, _footnotes(results, seconds))
        print(f"report: {page}")
    sys.stdout.flush()
    return 0


def _measured(quick: bool) -> list[Result]:
    """Every layer's result. On a slow or busy machine, later layers get fewer timed runs, to end in time."""
    start = time.perf_counter()
    results: list[Result] = []
    with terminal.progress(len(LAYERS) * len(STAGES)) as begin:
        for k, layer in enumerate(LAYERS):
            share = (SECONDS - (time.perf_counter() - start)) / (len(LAYERS) - k)
            tell = lambda stage, name=layer.name: begin(f"{name}: {stage}")
            results.append(measure(layer, layer.quick if quick else layer.full, share * TIMED, tell))
    return results


def _door(folder: Path) -> Path:
    """The page's path, after making sure that it can be written: the measurements take a while."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise CommandError(f"--out {folder} is a file. Give a folder") from None
    except OSError as error:
        raise CommandError(f"cannot make the folder {folder}: {error.strerror}. Give another one with --out") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CommandError(f"cannot write into the folder {folder}. Give another one with --out")
    return folder / PAGE


def _footnotes(results: Sequence[Result], seconds: float) -> list[str]:
    return [
        "ms: forward and backward in float32, the best run. MB: peak beyond the inputs and their gradients. "
        "error: the worst of outputs and gradients against float64. ratio: naive ÷ ours.",
        f"Geometric means of the ratios: time {factor(geometric([r.faster for r in results]))}, "
        f"memory {factor(geometric([r.smaller for r in results]))}. Measured in {seconds:.0f} s.",
    ]


def as_data(results: Sequence[Result], environment: Environment, seconds: float, page: Path) -> dict[str, Any]:
    """The results as plain data."""

    def side(s: Any) -> dict[str, float]:
        return {"forward_ms": s.forward_ms, "total_ms": s.total_ms, "extra_bytes": s.profile.extra, "error": s.error}

    layers = [
        {
            "name": r.layer.name,
            "rows": r.size.rows,
            "cols": r.size.cols,
            "features": r.size.features,
            "backward": r.layer.backward,
            "rounds": r.rounds,
            "ours": side(r.ours),
            "naive": side(r.naive),
            "faster": r.faster,
            "smaller": r.smaller,
        }
        for r in results
    ]
    return {"environment": vars(environment), "seconds": seconds, "layers": layers, "report": str(page)}


COMMAND = Command(
    "demo", "measure the papers' layers beside their dense forms and write a page about it", configure, run
)
