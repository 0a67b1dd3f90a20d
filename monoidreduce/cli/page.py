"""What every page has: one HTML file that needs nothing else. No script, no font, no image from anywhere.

The parts here are put together by ``report.py`` (the demo), ``report_profile.py`` and ``report_bench.py``; the style
sheet is ``style.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from . import figures
from .environment import Environment
from .memory import CATEGORIES, Profile
from .numbers import short
from .style import CSS

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>MonoidReduce: {title}</title>
<style>
{css}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def whole(title: str, parts: Sequence[str]) -> str:
    """A page of these parts."""
    return _PAGE.format(title=escape(title), css=CSS, body="\n".join(parts))


def facts(environment: Environment, seconds: float) -> str:
    """Where and when the numbers were measured."""
    named = {
        "monoidreduce": environment.version,
        "Python": environment.python,
        "torch": environment.torch,
        "processor": environment.cpu,
        "threads": environment.threads,
        **({"GPU": environment.gpu} if environment.gpu else {}),
        "date": environment.date,
        "measured in": f"{seconds:.0f} s",
    }
    listed = "\n".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in named.items())
    return f"<dl>\n{listed}\n</dl>"


def entry(kind: str, words: str) -> str:
    """A line of a legend."""
    return f'<span class="entry"><span class="swatch {kind}"></span> {words}</span>'


def profiles(what: str, sides: Sequence[tuple[Profile, str, str]]) -> str:
    """Memory over time, side by side on one scale: each a profile, a title, and words in HTML."""
    top = figures.axis_top(*(profile for profile, _, _ in sides))
    drawn = "\n".join(_profile(*side, top) for side in sides)
    legend = "\n".join(entry(name, words) for name, words in CATEGORIES.items())
    return f"""<section>
<h2>Memory over time</h2>
<p>Bytes alive during one forward and backward of {escape(what)}, as recorded by
<code>torch.profiler</code>. The figures have the same vertical scale; each has its own time, and
no peak is too short to be drawn.</p>
<p class="key">{legend}</p>
<div class="figures">
{drawn}
</div>
</section>"""


def _profile(profile: Profile, title: str, words: str, top: float) -> str:
    return f"""<figure>
{figures.timeline(profile, top, escape(title))}
<figcaption><b>{escape(title)}</b>: {short(profile.extra / 1e6)} MB beyond inputs and gradients. {words}</figcaption>
</figure>"""


def again(command: str) -> str:
    """How to reproduce it."""
    return f"""<section>
<h2>How to reproduce it</h2>
<pre><code>pip install "monoidreduce[cli]"
{escape(command)}</code></pre>
</section>"""
