"""The demo's page: what fits, what is faster, the papers' layers, and the memory of one of them over time.

Charts, tiles and tables are made from the same measurements; a mark in a chart tells its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from . import report
from .layers import LOGIT
from .limits import MEMORY, Growth, Limit
from .measure import Environment
from .report import format_number, format_ratio, format_size, geometric_mean

if TYPE_CHECKING:
    from .demo import Findings, Result, Side


_EXAMPLE = """\
@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):   # what happens to one pair of a row and a column
    return mr.softmax_mean(q @ k, v)                    # how the pairs combine

y = attention(q, k, v)                                  # differentiable; nothing of size M × N is ever allocated"""
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
    return f"{'' if growth.stopped == MEMORY else '≥ '}{growth.largest.size:,} {unit}"


def describe_used(growth: Growth) -> str:
    """How much of the memory the largest size used, where time ended the search; else nothing.

    >>> from .limits import Run
    >>> describe_used(Growth((Run(1024, 5 * 2**20, 0.1),), 2**28, "time"))
    ' (uses 5 MiB)'
    """
    if growth.stopped == MEMORY or growth.largest is None or growth.largest.peak is None:
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
    intro = f"""<p>The {len(results)} layers of the papers beside the same layers in plain torch. Geometric means, dense
divided by ours: time {means[0]}, extra memory {means[1]}.{left}</p>"""
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
