"""``monoidreduce demo``: the papers' layers and their dense forms, measured on this machine, and a page about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import click

from . import measure, report
from .command import OUT, Answer, OutputFolder, command
from .layers import LOGIT, PAPER_LAYERS, Layer, Size
from .measure import Environment, MemoryProfile, Runner, relative_error, run_once, time_in_turns, to_float64
from .terminal import format_number, format_ratio, geometric_mean, print_table, show_progress

SECONDS = 75.0  # what the whole demo should take
TIMED_SHARE = 0.35  # the part of it for timed runs; the rest is the truth in float64, first calls and memory
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


@command(
    "demo", click.Option(["--quick"], is_flag=True, help="tiny sizes, a few seconds; the numbers mean little"), OUT
)
def demo(quick: bool, out: Path) -> Answer:
    """Show what it does: ten layers beside their dense forms.

    The papers' layers are measured here and now, ours and naive: time, peak extra memory, error against float64.
    Writes a page, index.html.
    """
    folder = OutputFolder(out)
    start = time.perf_counter()
    results = _measure_all(quick)
    seconds = time.perf_counter() - start
    environment = measure.describe_environment()
    (page,) = folder.write({"index.html": render_page(results, environment, seconds, quick)})

    def show(console: Any) -> None:
        print_results(console, results, _write_footnotes(results, seconds))
        console.print(f"report: {page}", soft_wrap=True, markup=False)

    layers = [r.to_data() for r in results]
    return Answer({"environment": vars(environment), "seconds": seconds, "layers": layers, "report": str(page)}, show)


def _measure_all(quick: bool) -> list[Result]:
    """Measure every layer. On a slow or busy machine, later layers get fewer timed runs, so that it ends in time."""
    start = time.perf_counter()
    results: list[Result] = []
    with show_progress(len(PAPER_LAYERS) * len(STAGES)) as begin:
        for k, layer in enumerate(PAPER_LAYERS):
            share = (SECONDS - (time.perf_counter() - start)) / (len(PAPER_LAYERS) - k)
            tell = lambda stage, name=layer.name: begin(f"{name}: {stage}")
            results.append(measure_layer(layer, layer.quick if quick else layer.full, share * TIMED_SHARE, tell))
    return results


def measure_layer(
    layer: Layer, size: Size, seconds: float = 2.5, tell: Callable[[str], None] = lambda stage: None
) -> Result:
    """Measure a layer at a size. ``tell`` is called with each of the STAGES as it begins.

    Timed runs stop after ``seconds``, but each implementation gets at least LEAST_RUNS (one if ``seconds`` is 0).
    """
    args = layer.inputs(size)
    runners = [Runner(call, args, backward=layer.backward) for call in (layer.ours, layer.naive)]
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


def _write_footnotes(results: Sequence[Result], seconds: float) -> list[str]:
    return [
        "ms: forward and backward in float32, the best run. MB: peak beyond the inputs and their gradients. "
        "error: the worst of outputs and gradients against float64. ratio: naive ÷ ours.",
        f"Geometric means of the ratios: time {format_ratio(geometric_mean([r.faster for r in results]))}, "
        f"memory {format_ratio(geometric_mean([r.smaller for r in results]))}. Measured in {seconds:.0f} s.",
    ]


# The page ---------------------------------------------------------------------------------------------------------

_EXAMPLE = """\
@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):   # what happens to one pair of a row and a column
    return mr.softmax_mean(q @ k, v)                    # how the pairs combine

y = attention(q, k, v)                                  # differentiable; nothing of size M × N is ever allocated"""
_TIME, _MEMORY, _ERROR = "Time, ms", "Peak extra memory, MB", "Error"


def render_page(results: Sequence[Result], environment: Environment, seconds: float, quick: bool = False) -> str:
    """The page, a function of the results alone. The figures show the first result, attention."""
    intro = f"""<p class="lead">A layer that combines every row with every column usually builds the M × N matrix of all
pairs, and keeps it for the backward pass. If the results combine by a commutative monoid, it need not: the fold runs
tile by tile, and the gradient of each pair follows from the final result alone. Below, {len(results)} layers written
this way beside the same layers in plain torch, measured on this machine.</p>
<pre><code>{escape(_EXAMPLE)}</code></pre>"""
    error = max(r.ours.error / max(r.naive.error, 1e-30) for r in results)
    mean = "geometric mean of the layers below"
    tiles = (
        (format_ratio(geometric_mean([r.smaller for r in results])), "less extra memory", mean),
        (format_ratio(geometric_mean([r.faster for r in results])), "the dense form’s speed", mean),
        (format_ratio(error), "the dense form’s error", "the worst layer, both against float64"),
    )
    parts = [_make_layers(results, quick), _make_figures(results[0]), _make_method(results)]
    more = """<p>or <code>make demo</code> in a clone of the repository. <code>--json</code> prints the numbers,
<code>--out DIR</code> puts this page elsewhere.</p>"""
    origin = report.Origin(environment, seconds, "python -m monoidreduce demo" + (" --quick" if quick else ""))
    return report.make_page("the demo", "MonoidReduce", intro, tiles, parts, origin, more)


def _make_layers(results: Sequence[Result], quick: bool) -> str:
    caution = "<p><b>Tiny sizes (<code>--quick</code>): these numbers mean little.</b></p>" if quick else ""
    key = [report.make_legend_entry("ours", "MonoidReduce"), report.make_legend_entry("naive", "dense torch")]
    legend = f'<p class="key">{" ".join(key)}\nBars are relative within a cell.</p>'
    table = report.make_table(("Layer", _TIME, _MEMORY, _ERROR), map(_make_row, results))
    return report.make_section("The layers", caution, legend, table)


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


def _make_figures(r: Result) -> str:
    dense = f"<code>{escape(r.layer.dense)}</code> holds all pairs, their softmax, and the gradients of both."
    profiles = (
        (r.ours.profile, "Memory of MonoidReduce attention", "One tile of pairs exists at a time."),
        (r.naive.profile, "Memory of naive attention", dense),
    )
    return report.make_memory_section(f"{r.layer.name} ({r.size})", profiles)


def _make_method(results: Sequence[Result]) -> str:
    rounds = sorted({r.rounds for r in results})
    runs = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else f"{rounds[0]}"
    method = f"""<ul>
<li><b>Time</b>: forward and backward in float32, the best of {runs} runs, ours and dense in turns.</li>
<li><b>Memory</b>: every allocation and release of torch’s allocator, by <code>torch.profiler</code>, in a run of its
own after the timed ones. <em>Extra</em> is what lives beyond the inputs and their gradients: outputs, what is saved
for the backward, and temporaries; the number is its peak. 1 MB is 10<sup>6</sup> bytes.</li>
<li><b>Error</b>: ‖x − truth‖ / ‖truth‖, the worst of all outputs and gradients; the truth is the dense form in float64
on the same inputs. A sampler is judged by the log-probability of what it drew.</li>
<li>Inputs are random with a fixed seed; logits have a standard deviation of {LOGIT:g}.</li>
</ul>"""
    return report.make_section("How it was measured", method)
