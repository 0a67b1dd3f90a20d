"""The demo's page: ``render`` is a function of the results alone."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from . import page
from .environment import Environment
from .layers import LOGIT
from .measure import Result, Side
from .numbers import factor, geometric, short

_EXAMPLE = """\
@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):   # what happens to one pair of a row and a column
    return mr.softmax_mean(q @ k, v)                    # how the pairs combine

y = attention(q, k, v)                                  # differentiable; nothing of size M × N is ever allocated"""


def render(results: Sequence[Result], environment: Environment, seconds: float, quick: bool = False) -> str:
    """The whole page. The figures show the first result, attention."""
    parts = [_header(results, environment, seconds), _layers(results, quick), _figures(results[0])]
    parts.append(_method(results, "python -m monoidreduce demo" + (" --quick" if quick else "")))
    return page.whole("the demo", parts)


def _header(results: Sequence[Result], environment: Environment, seconds: float) -> str:
    error = max(r.ours.error / max(r.naive.error, 1e-30) for r in results)
    tiles = (
        (factor(geometric([r.smaller for r in results])), "less extra memory", "geometric mean of the layers below"),
        (
            factor(geometric([r.faster for r in results])),
            "the dense form’s speed",
            "geometric mean of the layers below",
        ),
        (factor(error), "the dense form’s error", "the worst layer, both against float64"),
    )
    cells = "\n".join(f"<li><b>{value}</b> {what} <small>{how}</small></li>" for value, what, how in tiles)
    return f"""<header>
<h1>MonoidReduce</h1>
<p class="lead">A layer that combines every row with every column usually builds the M × N matrix of all pairs, and
keeps it for the backward pass. If the results combine by a commutative monoid, it need not: the fold runs tile by
tile, and the gradient of each pair follows from the final result alone. Below, {len(results)} layers written this way
beside the same layers in plain torch, measured on this machine.</p>
<pre><code>{escape(_EXAMPLE)}</code></pre>
<ul class="tiles">
{cells}
</ul>
{page.facts(environment, seconds)}
</header>"""


def _layers(results: Sequence[Result], quick: bool) -> str:
    caution = "<p><b>Tiny sizes (<code>--quick</code>): these numbers mean little.</b></p>\n" if quick else ""
    headings = "".join(f'<th scope="col">{h}</th>' for h in ("Layer", _TIME, _MEMORY, _ERROR))
    rows = "\n".join(_row(r) for r in results)
    return f"""<section>
<h2>The layers</h2>
{caution}<p class="key">{page.entry("ours", "MonoidReduce")} {page.entry("naive", "dense torch")}
Bars are relative within a cell.</p>
<table>
<thead><tr>{headings}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
</section>"""


_TIME, _MEMORY, _ERROR = "Time, ms", "Peak extra memory, MB", "Error"


def _row(r: Result) -> str:
    time = _bars(r.ours.total_ms, r.naive.total_ms, r.faster, "faster", "slower")
    memory = _bars(r.ours.extra_mb, r.naive.extra_mb, r.smaller, "smaller", "larger")
    only = "" if r.layer.backward else " <em>forward only</em>"
    return f"""<tr>
<th scope="row"><span class="name">{escape(r.layer.name)}</span>{only}
<span class="formula">{escape(r.layer.formula)}</span>
<details><summary>{escape(str(r.size))}</summary>{_details(r)}</details></th>
<td data-label="{_TIME}">{time}</td>
<td data-label="{_MEMORY}">{memory}</td>
<td data-label="{_ERROR}" class="errors"><span>{_error(r.ours)}</span><span class="quiet">{_error(r.naive)}</span></td>
</tr>"""


def _details(r: Result) -> str:
    dense = f"Dense: <code>{escape(r.layer.dense)}</code><br>"
    if not r.layer.backward:
        return f"{dense}Best of {r.rounds}."
    forward = f"Forward alone: {short(r.ours.forward_ms)} ms, dense {short(r.naive.forward_ms)} ms."
    return f"{dense}{forward} Best of {r.rounds}."


def _bars(ours: float, naive: float, gain: float, better: str, worse: str) -> str:
    longest = max(ours, naive, 1e-12)
    words = f"{factor(gain)} {better}" if gain >= 1 else f"{factor(1 / gain)} {worse}"
    lines = "".join(
        f'<span class="line"><span class="track"><span class="bar {kind}" style="width:{100 * value / longest:.1f}%">'
        f"</span></span><span>{short(value)}</span></span>"
        for kind, value in (("ours", ours), ("naive", naive))
    )
    return f'{lines}<span class="gain {"good" if gain >= 1 else "bad"}">{words}</span>'


def _error(side: Side) -> str:
    digits, _, power = f"{side.error:.1e}".partition("e")
    return f"{digits}·10<sup>{int(power)}</sup>".replace("-", "−")


def _figures(r: Result) -> str:
    dense = f"<code>{escape(r.layer.dense)}</code> holds all pairs, their softmax, and the gradients of both."
    sides = (
        (r.ours.profile, "Memory of MonoidReduce attention", "One tile of pairs exists at a time."),
        (r.naive.profile, "Memory of naive attention", dense),
    )
    return page.profiles(f"{r.layer.name} ({r.size})", sides)


def _method(results: Sequence[Result], command: str) -> str:
    rounds = sorted({r.rounds for r in results})
    runs = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else f"{rounds[0]}"
    return f"""<section>
<h2>How it was measured</h2>
<ul>
<li><b>Time</b>: forward and backward in float32, the best of {runs} runs, ours and dense in turns.</li>
<li><b>Memory</b>: every allocation and release of torch’s allocator, by <code>torch.profiler</code>, in a run of its
own after the timed ones. <em>Extra</em> is what lives beyond the inputs and their gradients: outputs, what is saved
for the backward, and temporaries; the number is its peak. 1 MB is 10<sup>6</sup> bytes.</li>
<li><b>Error</b>: ‖x − truth‖ / ‖truth‖, the worst of all outputs and gradients; the truth is the dense form in float64
on the same inputs. A sampler is judged by the log-probability of what it drew.</li>
<li>Inputs are random with a fixed seed; logits have a standard deviation of {LOGIT:g}.</li>
</ul>
<h2>How to reproduce it</h2>
<pre><code>pip install "monoidreduce[cli]"
{escape(command)}</code></pre>
<p>or <code>make demo</code> in a clone of the repository. <code>--json</code> prints the numbers, <code>--out
DIR</code> puts this page elsewhere.</p>
</section>"""
