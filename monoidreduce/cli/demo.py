"""``monoidreduce demo``: the papers' layers beside their dense forms, measured here and now, and a page about it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from . import files, options, report, terminal
from .command import Answer, Command
from .environment import Environment, surroundings
from .layers import LAYERS
from .measure import STAGES, Result, measure
from .numbers import factor, geometric

PAGE = "index.html"
SECONDS = 75.0  # what the whole should take,
TIMED = 0.35  # this part of it timed runs; the rest is the truth in float64, first calls and profiles


def run(quick: bool, out: Path) -> Answer:
    """Show what it does: ten layers beside their dense forms.

    The papers' layers are measured here and now, ours and naive: time, peak extra memory, error against float64.
    Writes a page, index.html.
    """
    folder = files.folder(out)
    start = time.perf_counter()
    results = _measured(quick)
    seconds = time.perf_counter() - start
    environment = surroundings()
    page = files.write(folder / PAGE, report.render(results, environment, seconds, quick))

    def show(console: Any) -> None:
        terminal.show(console, results, _footnotes(results, seconds))
        console.print(f"report: {page}", soft_wrap=True, markup=False)

    return Answer(as_data(results, environment, seconds, page), show)


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
    "demo",
    run,
    (
        click.Option(["--quick"], is_flag=True, help="tiny sizes, a few seconds; the numbers mean little"),
        options.out(),
    ),
)
