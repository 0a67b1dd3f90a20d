"""The demo's page: one HTML file that needs nothing else. No script, no font, no image from anywhere.

``render`` is a function of the results alone; the style sheet is ``style.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from . import figures
from .environment import Environment
from .measure import LEAST, ROUNDS, Result, Side
from .memory import CATEGORIES
from .numbers import factor, geometric, short
from .style import CSS


def render(results: Sequence[Result], environment: Environment, seconds: float, command: str) -> str:
    """The whole page. The figures show the first result, attention."""
    body = "\n".join(
        [
            _header(results),
            _layers(results),
            _figures(results[0]),
            _method(results, environment, seconds, command),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>MonoidReduce: the demo</title>\n<style>\n{CSS}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _header(results: Sequence[Result]) -> str:
    tiles = [
        (factor(geometric([r.smaller for r in results])), "less extra memory", "geometric mean of the layers below"),
        (factor(geometric([r.faster for r in results])), "the dense form’s speed", "geometric mean, forward and backward"),
        (f"{_margin(results):.2g}×", "the dense form’s error", "at worst, both against float64"),
    ]
    cells = "".join(f'<li><b>{value}</b> <span>{what}</span> <small>{how}</small></li>' for value, what, how in tiles)
    return f"""<header>
<h1>MonoidReduce</h1>
<p class="lead">A layer that combines every row with every column usually builds the M × N matrix of all pairs, and keeps it for the
backward pass. If the results combine by a commutative monoid, it need not: the fold runs tile by tile, and the gradient of
each pair follows from the final result alone. Below, {len(results)} layers written this way beside the same layers in plain torch,
measured on this machine.</p>
<ul class="tiles">{cells}</ul>
</header>"""


def _margin(results: Sequence[Result]) -> float:
    return max(r.ours.error / max(r.naive.error, 1e-30) for r in results)


def _layers(results: Sequence[Result]) -> str:
    rows = "\n".join(_row(r) for r in results)
    return f"""<section>
<h2>The layers</h2>
<p class="key"><span class="swatch ours"></span> MonoidReduce <span class="swatch naive"></span> dense torch.
Bars are relative within a cell.</p>
<table>
<thead><tr><th scope="col">Layer</th><th scope="col">Time, ms</th><th scope="col">Peak extra memory, MB</th><th scope="col">Error</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
</section>"""


def _row(r: Result) -> str:
    time = _bars(r.ours.total_ms, r.naive.total_ms, r.faster, "faster", "slower")
    memory = _bars(r.ours.extra_mb, r.naive.extra_mb, r.smaller, "smaller", "larger")
    only = "" if r.layer.backward else " <em>forward only</em>"
    return f"""<tr>
<th scope="row"><span class="name">{escape(r.layer.name)}</span>{only}
<span class="formula">{escape(r.layer.formula)}</span>
<details><summary>{escape(str(r.size))}</summary><code>{escape(r.layer.dense)}</code><br>{_split(r)}</details></th>
<td data-label="Time, ms">{time}</td>
<td data-label="Peak extra memory, MB">{memory}</td>
<td data-label="Error" class="errors"><span>{_error(r.ours)}</span><span class="quiet">{_error(r.naive)}</span></td>
</tr>"""


def _split(r: Result) -> str:
    if not r.layer.backward:
        return f"best of {r.rounds}"
    return f"forward alone: {short(r.ours.forward_ms)} ms, dense {short(r.naive.forward_ms)} ms; best of {r.rounds}"


def _bars(ours: float, naive: float, gain: float, better: str, worse: str) -> str:
    longest = max(ours, naive, 1e-12)
    words = f"{factor(gain)} {better}" if gain >= 1 else f"{factor(1 / gain)} {worse}"
    lines = "".join(
        f'<span class="line"><span class="track"><span class="bar {kind}" style="width:{100 * value / longest:.1f}%"></span></span>'
        f"<span>{short(value)}</span></span>"
        for kind, value in (("ours", ours), ("naive", naive))
    )
    return f'{lines}<span class="gain {"good" if gain >= 1 else "bad"}">{words}</span>'


def _error(side: Side) -> str:
    digits, _, power = f"{side.error:.1e}".partition("e")
    return f"{digits}·10<sup>{int(power)}</sup>".replace("-", "−")


def _figures(r: Result) -> str:
    top = figures.axis_top(r.ours.profile, r.naive.profile)
    legend = "".join(f'<span class="swatch {name}"></span> {words} ' for name, words in CATEGORIES.items())
    drawings = "\n".join(
        f"<figure>\n{figures.timeline(side.profile, top, escape(label, quote=True))}\n"
        f"<figcaption><b>{escape(label)}</b>: {short(side.extra_mb)} MB beyond inputs and gradients. {escape(form)}</figcaption>\n</figure>"
        for side, label, form in (
            (r.ours, "Memory of MonoidReduce attention", "One tile of pairs exists at a time."),
            (r.naive, "Memory of naive attention", f"{r.layer.dense}: the matrix, its softmax and their gradients."),
        )
    )
    return f"""<section>
<h2>Memory over time</h2>
<p>Bytes alive during one forward and backward of {escape(r.layer.name)} ({escape(str(r.size))}), as recorded by
<code>torch.profiler</code>. Both figures have the same vertical scale; each has its own time.</p>
<p class="key">{legend}</p>
<div class="figures">
{drawings}
</div>
</section>"""


def _method(results: Sequence[Result], environment: Environment, seconds: float, command: str) -> str:
    facts = {
        "monoidreduce": environment.version,
        "Python": environment.python,
        "torch": environment.torch,
        "processor": environment.cpu,
        "threads": str(environment.threads),
        "date": environment.date,
        "duration": f"{seconds:.0f} s",
    }
    listed = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())
    return f"""<section>
<h2>How it was measured</h2>
<dl>{listed}</dl>
<ul>
<li><b>Time</b>: forward and backward in float32, the best of {LEAST} to {ROUNDS} runs, ours and dense in turns.</li>
<li><b>Memory</b>: every allocation and release of torch’s allocator, by <code>torch.profiler</code>, in a run of its own after
the timed ones. <em>Extra</em> is what lives beyond the inputs and their gradients: outputs, what is saved for the backward, and
temporaries; the number is its peak. 1 MB is 10<sup>6</sup> bytes.</li>
<li><b>Error</b>: ‖x − truth‖ / ‖truth‖, the worst of all outputs and gradients; the truth is the dense form in float64 on the
same inputs. A sampler is judged by the log-probability of what it drew.</li>
<li>Inputs are random with a fixed seed; logits have a standard deviation of 2.</li>
</ul>
<h2>How to reproduce it</h2>
<pre><code>pip install "monoidreduce[demo]"
{escape(command)}</code></pre>
<p>or <code>make demo</code> in a clone of the repository. <code>--json</code> prints the numbers, <code>--out DIR</code> puts this
page elsewhere.</p>
</section>"""
