"""``monoidreduce demo``: what fits in a given memory, what is faster, and the papers' layers, measured on this machine.

First the sizes that fit, ours beside torch (``limits``); then layers beside their dense forms. ``demo_page`` makes the
page. On a machine with a GPU everything is measured there, in bfloat16 and at sizes that a GPU is for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from ..engines.common import matmul
from ..errors import ArgumentError
from ..plan.settings import parse_bytes
from . import demo_page, limits, measure
from .command import OUT, Answer, CommandError, OutputFolder, ParsedType, command, parse_device
from .layers import PAPER_LAYERS, TIME_LAYERS, Layer, Size
from .limits import QUESTIONS, Limit
from .measure import CPU, MemoryProfile, Runner, relative_error, run_once, time_in_turns, to_float64
from .report import format_number, format_ratio, format_size, geometric_mean, print_table, show_progress

SECONDS = 100.0  # what the whole demo should take
GROWING_SHARE = 0.4  # the part of it for finding what fits
TIMED_SHARE = 0.35  # the part of a layer's time for timed runs; the rest is the truth, first calls and memory
MEMORY = {"cpu": 2**28, "cuda": 2**30}  # what the first part may use, unless --memory says
QUICK_MEMORY = 2**24
GPU_SCALE = 4  # rows and columns on a GPU, of those on a CPU
STAGES = ("float64 truth", "time", "memory")  # of measuring a layer
LEAST_RUNS, MOST_RUNS = 2, 5  # timed runs of each implementation


@dataclass(frozen=True)
class Side:
    """The measurements of one implementation: the best times, the memory of one run, and the worst error."""

    forward_ms: float
    total_ms: float
    profile: MemoryProfile
    error: float

    @property
    def extra_mb(self) -> float:
        return self.profile.extra / 1e6

    def to_data(self) -> dict[str, float]:
        times = {"forward_ms": self.forward_ms, "total_ms": self.total_ms}
        return {**times, "extra_bytes": self.profile.extra, "error": self.error}


@dataclass(frozen=True)
class Result:
    """The measurements of one layer at one size, ours and the dense form's."""

    layer: Layer
    size: Size
    ours: Side
    naive: Side
    rounds: int

    @property
    def faster(self) -> float:
        """The dense form's time divided by ours."""
        return self.naive.total_ms / self.ours.total_ms

    @property
    def smaller(self) -> float:
        """The dense form's extra memory divided by ours."""
        return self.naive.profile.extra / max(1, self.ours.profile.extra)

    def to_data(self) -> dict[str, Any]:
        return {
            "name": self.layer.name,
            **vars(self.size),
            "backward": self.layer.backward,
            "rounds": self.rounds,
            "ours": self.ours.to_data(),
            "naive": self.naive.to_data(),
            "faster": self.faster,
            "smaller": self.smaller,
        }


@dataclass(frozen=True)
class Findings:
    """All that the demo measured. Layers for which no time was left are named in ``left_out``."""

    limits: Sequence[Limit]
    wins: Sequence[Result]
    papers: Sequence[Result]
    memory: int
    seconds: float
    left_out: Sequence[str] = ()
    quick: bool = False

    def to_data(self) -> dict[str, Any]:
        return {
            "memory_bytes": self.memory,
            "seconds": self.seconds,
            "limits": [x.to_data() for x in self.limits],
            "wins": [r.to_data() for r in self.wins],
            "layers": [r.to_data() for r in self.papers],
            "left_out": list(self.left_out),
        }


def _parse_memory(text: str) -> int:
    try:
        return parse_bytes(int(text) if text.isdigit() else text)
    except ArgumentError:
        raise ValueError(
            f"{text!r:.80} is no memory. Give a number of bytes, or a text such as 256MiB or 2GB"
        ) from None


@command(
    "demo",
    click.Option(["--memory"], type=ParsedType("SIZE", _parse_memory), help="what must suffice; 256MiB, 1GiB on a GPU"),
    click.Option(["--device"], type=ParsedType("DEVICE", parse_device), help="cpu or cuda; a GPU where there is one"),
    click.Option(["--quick"], is_flag=True, help="tiny sizes, a few seconds; the numbers mean little"),
    OUT,
)
def demo(memory: int | None, device: torch.device | None, quick: bool, out: Path) -> Answer:
    """Show what fits in a given memory, and how fast.

    Problems are made larger until they no longer fit, ours and plain torch; then layers are measured beside their dense
    forms: time, peak extra memory, error against float64. Writes a page, index.html.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    memory = memory or (QUICK_MEMORY if quick else MEMORY[device.type])
    free = matmul.free_memory(device)
    if free and memory > 0.7 * free:
        raise CommandError(f"--memory {format_size(memory)} is too much: {format_size(free)} are free. Give less")
    folder = OutputFolder(out)
    findings = _measure_all(memory, device, quick)
    environment = measure.describe_environment(device)
    (page,) = folder.write({"index.html": demo_page.render_page(findings, environment)})

    def show(console: Any) -> None:
        print_limits(console, findings.limits)
        print_results(console, [*findings.wins, *findings.papers], _write_footnotes(findings))
        console.print(f"report: {page}", soft_wrap=True, markup=False)

    return Answer({"environment": vars(environment), **findings.to_data(), "report": str(page)}, show)


def _measure_all(memory: int, device: torch.device, quick: bool) -> Findings:
    """Measure everything. On a slow or busy machine, later layers get fewer timed runs, or are left out.

    The papers' first layer, whose memory the page draws, comes early and is never left out; nor is any tiny size.
    """
    start = time.perf_counter()
    seconds = 2.0 if quick else SECONDS
    found: list[Limit] = []
    results: list[Result] = []
    left_out: list[str] = []
    layers = (PAPER_LAYERS[0], *TIME_LAYERS, *PAPER_LAYERS[1:])
    with show_progress(len(QUESTIONS) + len(layers) * len(STAGES)) as begin:
        for question in QUESTIONS:
            begin(f"{question.title} in {format_size(memory)}")
            found.append(limits.answer(question, memory, seconds * GROWING_SHARE / len(QUESTIONS) / 2, device))
        for k, layer in enumerate(layers):
            left = SECONDS - (time.perf_counter() - start)
            if k and left < 0 and not quick:
                left_out.append(layer.name)
                continue
            tell = lambda stage, name=layer.name: begin(f"{name}: {stage}")
            share = max(left, 0.0) / (len(layers) - k) * TIMED_SHARE
            results.append(measure_layer(layer, _choose_size(layer, device, quick), share, tell, device))
    wins, papers = ([r for r in results if r.layer in some] for some in (TIME_LAYERS, PAPER_LAYERS))
    return Findings(found, wins, papers, memory, time.perf_counter() - start, left_out, quick)


def _choose_size(layer: Layer, device: torch.device, quick: bool) -> Size:
    """A layer's size on a device: larger on a GPU, as far as the dense form in float64 has room."""
    if quick or device.type == "cpu":
        return layer.quick if quick else layer.full
    scale = GPU_SCALE
    truth = 8 * measure.DENSE_MATRICES * layer.full.rows * layer.full.cols  # bytes of the dense form in float64
    while scale > 1 and truth * scale**2 > matmul.free_memory(device):
        scale //= 2
    return Size(layer.full.rows * scale, layer.full.cols * scale, layer.full.features)


def measure_layer(
    layer: Layer,
    size: Size,
    seconds: float = 2.5,
    tell: Callable[[str], None] = lambda stage: None,
    device: torch.device = CPU,
) -> Result:
    """Measure a layer at a size. ``tell`` is called with each of the STAGES as it begins.

    Timed runs stop after ``seconds``, but each implementation gets at least LEAST_RUNS (one if ``seconds`` is 0).
    """
    args = tuple(_move(a, device) if isinstance(a, Tensor) else a for a in layer.inputs(size))
    runners = [Runner(call, args, device, backward=layer.backward) for call in (layer.ours, layer.naive)]
    tell(STAGES[0])
    errors = _measure_errors(layer, runners)  # also the first call of both, which may trace and fill caches
    tell(STAGES[1])
    rounds = time_in_turns(runners, seconds, LEAST_RUNS if seconds > 0 else 1, MOST_RUNS)
    tell(STAGES[2])
    ours, naive = (
        Side(r.forward_seconds * 1e3, r.seconds * 1e3, r.profile_memory(), error)
        for r, error in zip(runners, errors, strict=True)
    )
    return Result(layer, size, ours, naive, rounds)


def _move(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; floating-point numbers become bfloat16 on a GPU."""
    if device.type == "cpu":
        return x
    dtype = torch.bfloat16 if x.is_floating_point() else x.dtype
    return x.detach().to(device, dtype).requires_grad_(x.requires_grad)


def _measure_errors(layer: Layer, runners: Sequence[Runner]) -> list[float]:
    """The largest relative error of any result or gradient of each implementation, against float64."""
    exact = to_float64(runners[0].args)
    if layer.judge is None:
        truth = run_once(layer.naive, exact, layer.backward)
        return [runner.run().error(truth) for runner in runners]
    errors = []
    for runner in runners:
        outcome = runner.run()
        value, true = layer.judge(exact, (*outcome.discrete, *outcome.values))
        errors.append(relative_error((value,), (true,)))
    return errors


# In the terminal --------------------------------------------------------------------------------------------------

_WIDE, _NARROW = 112, 72  # window widths that the two forms of the table need
_BAR = 24  # characters of the longest bar


def print_limits(console: Any, found: Sequence[Limit]) -> None:
    """Print the largest sizes that fit as bars, ours above torch's."""
    for answer in found:
        question = answer.question
        console.print()
        title = f"[bold]{question.title} in {format_size(answer.ours.limit)}[/]"
        console.print(f"{title}  [dim]{question.what}; forward and backward[/]")
        largest = max([g.largest.size for g in (answer.ours, answer.dense) if g.largest] or [1])
        for who, growth, colour in (("ours", answer.ours, "blue"), ("torch", answer.dense, "dim")):
            size = growth.largest.size if growth.largest else 0
            width = min(_BAR, max(4, console.width - 50))
            bar = "█" * max(1, round(width * size / largest)) if size else ""
            words = demo_page.describe_largest(growth, question.unit) + demo_page.describe_used(growth)
            ratio = f", [green]{format_ratio(answer.gain)}[/]" if who == "ours" and 1 < answer.gain < 1e9 else ""
            console.print(f"  {who:5} [{colour}]{bar}[/] {words}{ratio}")


def print_results(console: Any, results: Sequence[Result], footnotes: Sequence[str]) -> None:
    """Print the results in the widest form that fits the window, with notes below."""
    console.print()
    rows = [_format(r) for r in results]
    if console.width >= _WIDE:
        headings = ["layer", "ms, ours", "naive", "ratio", "MB, ours", "naive", "ratio", "error, ours", "naive"]
        print_table(console, headings, [[cell for part in row for cell in part] for row in rows], range(1, 9), True)
    elif console.width >= _NARROW:
        headings = ["layer", "ms, ours\nnaive", "ratio", "MB, ours\nnaive", "ratio", "error, ours\nnaive"]
        print_table(console, headings, [["\n".join(part) for part in row] for row in rows], range(1, 6), True)
    else:
        for (name,), times, (faster,), sizes, (smaller,), errors in rows:
            console.print(name, style="bold")
            console.print(f"  ms {times[0]}, naive {times[1]}, {faster}")
            console.print(f"  MB {sizes[0]}, naive {sizes[1]}, {smaller}")
            console.print(f"  error {errors[0]}, naive {errors[1]}")
    for note in footnotes:
        console.print(note, style="dim")


def _format(r: Result) -> list[list[str]]:
    """A result as text: name, times, their ratio, memory, its ratio, errors; ours and naive where there are two."""
    sides = (r.ours, r.naive)
    colour = lambda ratio: f"[{'green' if ratio >= 1 else 'yellow'}]{format_ratio(ratio)}[/]"
    return [
        [r.layer.name + ("" if r.layer.backward else " (forward)")],
        [format_number(s.total_ms) for s in sides],
        [colour(r.faster)],
        [format_number(s.extra_mb) for s in sides],
        [colour(r.smaller)],
        [f"{s.error:.1e}" for s in sides],
    ]


def _write_footnotes(findings: Findings) -> list[str]:
    results = [*findings.wins, *findings.papers]
    notes = [
        "Above, ≥: the next size would have taken too long; there was memory left.",
        "ms: forward and backward, the best run. MB: peak beyond the inputs and their gradients. "
        "error: the worst of outputs and gradients against float64. ratio: naive ÷ ours.",
    ]
    if results:
        notes.append(
            f"Geometric means of the ratios: time {format_ratio(geometric_mean([r.faster for r in results]))}, "
            f"memory {format_ratio(geometric_mean([r.smaller for r in results]))}. "
            f"Measured in {findings.seconds:.0f} s."
        )
    if findings.left_out:
        notes.append(f"Left out, for want of time: {'; '.join(findings.left_out)}.")
    return notes
