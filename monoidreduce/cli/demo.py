"""``monoidreduce demo``: what fits in a given memory, what is faster, and the papers' layers, measured on this machine.

First the sizes that fit, ours beside torch (``limits``); then layers beside their dense forms; then the page of both.
On a machine with a GPU everything is measured there, in bfloat16 and at sizes that a GPU is for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..engines.common import matmul
from ..errors import ArgumentError
from ..plan.settings import parse_bytes
from . import limits, measure, report
from .command import Answer, CommandError, OutputFolder
from .layers import LOGIT, PAPER_LAYERS, TIME_LAYERS, Layer, Size
from .limits import QUESTIONS, STOPPED_BY_MEMORY, Growth, Limit
from .measure import CPU, Environment, MemoryProfile, Runner, relative_error, run_once, time_in_turns, to_float64
from .report import format_number, format_ratio, format_size, geometric_mean, print_table, show_progress

SECONDS = 100.0  # what the whole demo should take
QUICK_SECONDS = 80.0  # after which --quick leaves out what remains: on a GPU a layer's first call compiles for seconds
GROWING_SHARE = 0.4  # the part of it for finding what fits
TIMED_SHARE = 0.35  # the part of a layer's time for timed runs; the rest is the truth, first calls and memory
MEMORY = {"cpu": 2**28, "cuda": 2**30}  # what the first part may use, unless --memory says
QUICK_MEMORY = {"cpu": 2**24, "cuda": 2**27}  # a GPU's vendor library takes 32 MiB with its first product
GPU_SCALE = 4  # rows and columns on a GPU, of those on a CPU
STAGES = ("first calls, and float64", "time", "memory")  # of measuring a layer
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
    """All that the demo measured. Questions and layers for which no time was left are named in ``left_out``."""

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
        raise CommandError(
            f"--memory {text!r:.80} is no memory. Give a number of bytes, or a text such as 256MiB or 2GB"
        ) from None


def demo(memory: str | None, device: torch.device | None, quick: bool, out: Path) -> Answer:
    """Show what fits in a given memory, and how fast."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    allowed = _parse_memory(memory) if memory else (QUICK_MEMORY if quick else MEMORY)[device.type]
    free = matmul.free_memory(device)
    if free and allowed > 0.7 * free:
        raise CommandError(f"--memory {format_size(allowed)} is too much: {format_size(free)} are free. Give less")
    folder = OutputFolder(out)
    findings = _measure_all(allowed, device, quick)
    environment = measure.describe_environment(device)
    (page,) = folder.write({"index.html": render_page(findings, environment)})

    def show(console: Any) -> None:
        if quick:
            console.print(f"[bold]{QUICK_CAUTION}[/]")
        print_limits(console, findings.limits)
        print_results(console, [*findings.wins, *findings.papers], _write_footnotes(findings))
        console.print(f"report: {page}", soft_wrap=True, markup=False)

    return Answer({"environment": vars(environment), **findings.to_data(), "report": str(page)}, show)


def _measure_all(memory: int, device: torch.device, quick: bool) -> Findings:
    """Measure everything. On a slow or busy machine, later layers get fewer timed runs, or are left out.

    The first of every list is never left out (the page draws the memory of the papers' first layer).
    """
    start = time.perf_counter()
    growing = (2.0 if quick else SECONDS) * GROWING_SHARE / len(QUESTIONS) / len(limits.SIDES)
    total = QUICK_SECONDS if quick else SECONDS
    found: list[Limit] = []
    results: list[Result] = []
    left_out: list[str] = []
    layers = (TIME_LAYERS[0], PAPER_LAYERS[0], *TIME_LAYERS[1:], *PAPER_LAYERS[1:])
    with show_progress(len(QUESTIONS) * len(limits.SIDES) + len(layers) * len(STAGES)) as begin:
        for k, question in enumerate(QUESTIONS):
            title = f"{question.title} in {format_size(memory)}"
            if k > 0 and time.perf_counter() - start > total:
                left_out.append(title)
                continue
            tell = lambda what, name=title: begin(f"{name}: {what}")
            found.append(limits.answer(question, memory, growing, device, tell))
        for k, layer in enumerate(layers):
            left = total - (time.perf_counter() - start)
            if k > 1 and left < 0:
                left_out.append(layer.name)
                continue
            tell = lambda what, name=layer.name: begin(f"{name}: {what}")
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

QUICK_CAUTION = (
    "--quick: these sizes are too small to tell. They show that everything runs; at such sizes Python decides the time "
    "and a dense matrix costs nothing. For sizes that tell, run monoidreduce demo (about two minutes)."
)
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
            words = describe_largest(growth, question.unit) + describe_used(growth)
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
    means = ""
    if findings.quick:
        notes.insert(0, QUICK_CAUTION)
    elif len(results) > 2:
        times, sizes = ([getattr(r, what) for r in results] for what in ("faster", "smaller"))
        means = f"Geometric means of the ratios: time {format_ratio(geometric_mean(times))}, "
        means += f"memory {format_ratio(geometric_mean(sizes))}. "
    notes.append(f"{means}Measured in {findings.seconds:.0f} s.")
    if findings.left_out:
        again = " A second run finds compiled what this one compiled, and gets further." if findings.quick else ""
        notes.append(f"Left out, for want of time: {'; '.join(findings.left_out)}.{again}")
    return notes


# The demo's page: what fits, what is faster, the papers' layers, and the memory of one of them over time.
#
# Charts, tiles and tables are made from the same measurements; a mark in a chart tells its numbers.

_EXAMPLE = """\
@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k, v)  # what happens to one pair, and how the pairs combine

y = attention(q, k, v)  # differentiable; nothing of size M × N is ever allocated"""
_TIME, _MEMORY, _ERROR = "Time, ms", "Peak extra memory, MB", "Error"
_CAUTION = "<p><b>Tiny sizes (<code>--quick</code>): these numbers mean little.</b></p>"


def render_page(findings: Findings, environment: Environment) -> str:
    """The page, a function of the findings alone."""
    memory = format_size(findings.memory)
    intro = f"""<p class="lead">A layer that combines every row with every column usually builds the M × N matrix of all
pairs, and keeps it for the backward pass. That matrix decides how long a context, how large a vocabulary or how large a
batch you can have. Written as a fold, the layer runs tile by tile, and the matrix never exists. Below, what fits in
{escape(memory)} on this machine, with and without it.</p>
<pre><code>{escape(_EXAMPLE)}</code></pre>"""
    tiles = [_make_tile(answer) for answer in findings.limits]
    method = _make_method([*findings.wins, *findings.papers])
    parts = [_make_limits(findings), _make_wins(findings), _make_layers(findings), _make_figures(findings), method]
    more = """<p>or <code>make demo</code> in a clone of the repository. <code>--memory 1GiB</code> allows more,
<code>--json</code> prints the numbers, <code>--out DIR</code> puts this page elsewhere.</p>"""
    quick = " --quick" if findings.quick else ""
    origin = report.Origin(environment, findings.seconds, "python -m monoidreduce demo" + quick)
    return report.make_page("the demo", "MonoidReduce", intro, tiles, filter(None, parts), origin, more)


# What fits --------------------------------------------------------------------------------------------------------


def describe_largest(growth: Growth, unit: str) -> str:
    """The largest size that fits, in words; with ≥ where time ended the search and not memory.

    >>> from .limits import Run
    >>> describe_largest(Growth((Run(1024, 5_000_000, 0.1),), 10**7, "time"), "tokens")
    '≥ 1,024 tokens'
    """
    if growth.largest is None:
        return f"fewer than {growth.runs[0].size:,} {unit}"
    return f"{'' if growth.stopped == STOPPED_BY_MEMORY else '≥ '}{growth.largest.size:,} {unit}"


def describe_used(growth: Growth) -> str:
    """How much of the memory the largest size used, where time ended the search; else nothing.

    >>> from .limits import Run
    >>> describe_used(Growth((Run(1024, 5 * 2**20, 0.1),), 2**28, "time"))
    ' (uses 5 MiB)'
    """
    if growth.stopped == STOPPED_BY_MEMORY or growth.largest is None or growth.largest.peak is None:
        return ""
    return f" (uses {format_size(growth.largest.peak)})"


def _make_tile(answer: Limit) -> tuple[str, str, str]:
    question = answer.question
    words = describe_largest(answer.ours, question.unit)
    number, _, unit = words.rpartition(" ")
    times = f"{format_ratio(answer.gain)} torch’s " if 0 < answer.gain < 1e9 else "torch: "
    remark = f"{question.title.lower()}: {times}{describe_largest(answer.dense, question.unit)}"
    return escape(number), escape(unit), escape(remark)


def _make_limits(findings: Findings) -> str:
    memory = format_size(findings.memory)
    key = [report.make_legend_entry("k0", "MonoidReduce"), report.make_legend_entry("k1", "torch")]
    intro = f"""<p>Each problem was run, forward and backward, at growing sizes until a run needed more than
{escape(memory)}: inputs, gradients, results and temporaries together. Every mark is a run; point at one for its
numbers. “≥” means that the next size would have taken too long, not that memory ran out.</p>
<p class="key">{" ".join(key)}</p>"""
    figures = [(_draw_limit(answer), _make_caption(answer)) for answer in findings.limits]
    headings = ("Size", "Who", "Peak, MiB", "Seconds", "Fits")
    tables = [
        f"<details><summary>All runs: {escape(answer.question.title.lower())}</summary>"
        + report.make_table(headings, _make_runs(answer), "numbers")
        + "</details>"
        for answer in findings.limits
    ]
    caution = _CAUTION if findings.quick else ""
    return report.make_section(f"What fits in {memory}", caution, intro, report.make_figures(figures), *tables)


def _draw_limit(answer: Limit) -> str:
    curves = {
        who: sorted((float(r.size), r.peak / 2**20) for r in growth.runs if r.peak is not None)
        for who, growth in (("MonoidReduce", answer.ours), ("torch", answer.dense))
    }
    question = answer.question
    bound = report.Bound(answer.ours.limit / 2**20, f"{format_size(answer.ours.limit)} allowed")
    label = escape(f"{question.title}: peak memory of ours and of torch over the number of {question.unit}")
    return report.draw_curves({k: v for k, v in curves.items() if v}, "MiB", label, question.unit, bound)


def _make_caption(answer: Limit) -> str:
    question = answer.question
    sides = (describe_largest(g, question.unit) + describe_used(g) for g in (answer.ours, answer.dense))
    ours, dense = map(escape, sides)
    times = f", {format_ratio(answer.gain)} as many" if 0 < answer.gain < 1e9 else ""
    return (
        f"<b>{escape(question.title)}</b>: ours {ours}, torch {dense}{times}. {escape(question.what.capitalize())}. "
        f"torch: <code>{escape(question.torch_code)}</code>"
    )


def _make_runs(answer: Limit) -> list[str]:
    rows = []
    for who, growth in (("ours", answer.ours), ("torch", answer.dense)):
        for run in sorted(growth.runs, key=lambda r: r.size):
            peak = "out of memory" if run.peak is None else format_number(run.peak / 2**20)
            fits = "yes" if run.peak is not None and run.peak <= growth.limit else "no"
            cells = {"Who": who, "Peak, MiB": peak, "Seconds": format_number(run.seconds), "Fits": fits}
            kind = ' class="us"' if who == "ours" else ""
            listed = "".join(f'<td data-label="{h}">{c}</td>' for h, c in cells.items())
            rows.append(f'<tr{kind}><th scope="row">{run.size:,}</th>{listed}</tr>')
    return rows


# Layers -----------------------------------------------------------------------------------------------------------


def _make_wins(findings: Findings) -> str:
    if not findings.wins:
        return ""
    intro = (
        "<p>Where most pairs can be skipped, or a pair is cheap, the matrix is most of the dense form’s time too.</p>"
    )
    return report.make_section("Where it is fastest", intro, _make_layer_table(findings.wins))


def _make_layers(findings: Findings) -> str:
    results = findings.papers
    if not results:
        return ""
    means = [format_ratio(geometric_mean([getattr(r, what) for r in results])) for what in ("faster", "smaller")]
    left = f" Left out, for want of time: {escape('; '.join(findings.left_out))}." if findings.left_out else ""
    summary = f" Geometric means, dense divided by ours: time {means[0]}, extra memory {means[1]}."
    summary = summary if len(results) > 2 else ""
    intro = f"<p>Layers of the papers beside the same layers in plain torch.{summary}{left}</p>"
    return report.make_section("The papers’ layers", intro, _make_layer_table(results))


def _make_layer_table(results: Sequence[Result]) -> str:
    key = [report.make_legend_entry("ours", "MonoidReduce"), report.make_legend_entry("naive", "dense torch")]
    legend = f'<p class="key">{" ".join(key)}\nBars are relative within a cell.</p>'
    return legend + report.make_table(("Layer", _TIME, _MEMORY, _ERROR), map(_make_row, results))


def _make_row(r: Result) -> str:
    only = "" if r.layer.backward else " <em>forward only</em>"
    forward = f"Forward alone: {format_number(r.ours.forward_ms)} ms, dense {format_number(r.naive.forward_ms)} ms. "
    details = f"Dense: <code>{escape(r.layer.dense)}</code><br>{forward if r.layer.backward else ''}Best of {r.rounds}."
    errors = f'<span>{_format_error(r.ours)}</span><span class="quiet">{_format_error(r.naive)}</span>'
    return f"""<tr>
<th scope="row"><span class="name">{escape(r.layer.name)}</span>{only}
<span class="formula">{escape(r.layer.formula)}</span>
<details><summary>{escape(str(r.size))}</summary>{details}</details></th>
<td data-label="{_TIME}">{_make_bars(r.ours.total_ms, r.naive.total_ms, r.faster, "faster", "slower")}</td>
<td data-label="{_MEMORY}">{_make_bars(r.ours.extra_mb, r.naive.extra_mb, r.smaller, "smaller", "larger")}</td>
<td data-label="{_ERROR}" class="errors">{errors}</td>
</tr>"""


def _make_bars(ours: float, naive: float, gain: float, better: str, worse: str) -> str:
    longest = max(ours, naive, 1e-12)
    words = f"{format_ratio(gain)} {better}" if gain >= 1 else f"{format_ratio(1 / gain)} {worse}"
    lines = "".join(
        f'<span class="line"><span class="track"><span class="bar {kind}" style="width:{100 * value / longest:.1f}%">'
        f"</span></span><span>{format_number(value)}</span></span>"
        for kind, value in (("ours", ours), ("naive", naive))
    )
    return f'{lines}<span class="gain {"good" if gain >= 1 else "bad"}">{words}</span>'


def _format_error(side: Side) -> str:
    digits, _, power = f"{side.error:.1e}".partition("e")
    return f"{digits}·10<sup>{int(power)}</sup>".replace("-", "−")


def _make_figures(findings: Findings) -> str:
    """Memory over time of the papers' first layer, attention."""
    if not findings.papers:
        return ""
    r = findings.papers[0]
    dense = f"<code>{escape(r.layer.dense)}</code> holds all pairs, their softmax, and the gradients of both."
    profiles = (
        (r.ours.profile, "Memory of MonoidReduce attention", "One tile of pairs exists at a time."),
        (r.naive.profile, "Memory of naive attention", dense),
    )
    return report.make_memory_section(f"{r.layer.name} ({r.size})", profiles)


def _make_method(results: Sequence[Result]) -> str:
    rounds = sorted({r.rounds for r in results}) or [0]
    runs = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else f"{rounds[0]}"
    method = f"""<ul>
<li><b>What fits</b>: each mark is one run, forward and backward; its memory is the peak of all that torch’s allocator
holds, inputs and gradients included. A first small run compiles.</li>
<li><b>Time</b>: forward and backward in float32 (bfloat16 on a GPU), the best of {runs} runs, ours and
dense in turns.</li>
<li><b>Memory</b>: every allocation and release of torch’s allocator, by <code>torch.profiler</code>, in a run of its
own after the timed ones. <em>Extra</em> is what lives beyond the inputs and their gradients: outputs, what is saved
for the backward, and temporaries; the number is its peak. 1 MB is 10<sup>6</sup> bytes.</li>
<li><b>Error</b>: ‖x − truth‖ / ‖truth‖, the worst of all outputs and gradients; the truth is the dense form in float64
on the same inputs. A sampler is judged by the log-probability of what it drew.</li>
<li>Inputs are random with a fixed seed; logits have a standard deviation of {LOGIT:g}.</li>
</ul>"""
    return report.make_section("How it was measured", method)
