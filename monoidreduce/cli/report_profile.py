"""The page that ``monoidreduce profile`` writes: one layer's memory over time, ours and the dense form's."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from . import page
from .environment import Environment
from .memory import Profile
from .numbers import factor, short


def render(
    what: str,
    dense: str,
    profiles: Mapping[str, Profile],
    matrix: int,
    environment: Environment,
    seconds: float,
    command: str,
    skipped: str,
) -> str:
    """``dense``: the dense form, in HTML. ``profiles`` has "ours", and "naive" unless ``skipped`` says why not."""
    name = what.split(" (")[0]
    words = {"ours": "Tiles of pairs, never all of them.", "naive": dense}
    titles = {"ours": f"Memory of {name}, MonoidReduce", "naive": f"Memory of {name}, dense"}
    sides = [(p, titles[who], words[who]) for who, p in profiles.items()]
    return page.whole(
        f"memory of {name}",
        [
            _header(what, profiles, matrix, environment, seconds),
            f"<p>The dense form was not run: {escape(skipped)}.</p>" if skipped else "",
            page.profiles(what, sides),
            page.again(command),
        ],
    )


def _header(what: str, profiles: Mapping[str, Profile], matrix: int, environment: Environment, seconds: float) -> str:
    ours, naive = profiles["ours"], profiles.get("naive")
    tiles = [
        (f"{short(ours.extra / 1e6)} MB", "at the peak", "beyond inputs and gradients"),
        (f"{100 * ours.extra / matrix:.3g} %", "of one matrix of pairs", f"which takes {short(matrix / 1e6)} MB"),
    ]
    if naive is not None:
        tiles.append((factor(naive.extra / max(1, ours.extra)), "less than the dense form", "peak of extra memory"))
    cells = "\n".join(f"<li><b>{value}</b> {what} <small>{how}</small></li>" for value, what, how in tiles)
    return f"""<header>
<h1>Memory of {escape(what)}</h1>
<ul class="tiles">
{cells}
</ul>
{page.facts(environment, seconds)}
</header>"""
