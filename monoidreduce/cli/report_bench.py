"""What ``monoidreduce bench`` writes: a page, and the same as Markdown. Functions of the rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from . import charts, page
from .contest import Row
from .environment import Environment
from .numbers import factor, geometric, short

HEADINGS = ("size", "contender", "forward, ms", "forward and backward, ms", "extra, MB", "error", "note")


def cells(row: Row) -> tuple[str, ...]:
    """A row as text, in the order of HEADINGS."""
    number = lambda value, unit=1.0: "" if value is None else short(value / unit)
    return (
        f"{row.rows} × {row.cols}",
        row.who,
        number(row.forward_ms),
        number(row.total_ms),
        number(row.extra_bytes, 1e6),
        "" if row.error is None else f"{row.error:.1e}",
        row.note,
    )


def by_layer(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.layer, []).append(row)
    return found


def lines(rows: Sequence[Row], what: str) -> dict[str, list[tuple[float, float]]]:
    """The curves of one layer, ours first: ``what`` is "time" (ms) or "memory" (MB)."""
    found: dict[str, list[tuple[float, float]]] = {"ours": []}
    for row in rows:
        value = row.ms if what == "time" else None if row.extra_bytes is None else max(row.extra_bytes, 1) / 1e6
        if value is not None:
            found.setdefault(row.who, []).append((float(row.pairs), value))
    return {who: points for who, points in found.items() if points}


def panels(rows: Sequence[Row]) -> dict[str, tuple[str, Mapping[str, Sequence[tuple[float, float]]]]]:
    """All charts: title -> (unit, curves)."""
    return {
        f"{layer}: {what}": (unit, drawn)
        for layer, own in by_layer(rows).items()
        for what, unit in (("time", "ms"), ("memory", "MB"))
        if (drawn := lines(own, what))
    }


def markdown(rows: Sequence[Row], missing: Mapping[str, str], environment: Environment, how: str, command: str) -> str:
    """The tables, to be put where Markdown is read."""
    parts = [f"# Benchmark\n\n{_where(environment)}\n\n{how}\n\n`{command}`"]
    for layer, own in by_layer(rows).items():
        table = [HEADINGS, tuple("---" for _ in HEADINGS), *(cells(r) for r in own)]
        drawn = ["| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in table]
        parts.append(f"## {layer}\n\n" + "\n".join(drawn))
    if missing:
        parts.append("Not measured: " + "; ".join(f"{who} ({why})" for who, why in missing.items()) + ".")
    return "\n\n".join(parts) + "\n"


def _where(environment: Environment) -> str:
    machine = environment.gpu or f"{environment.cpu}, {environment.threads}"
    return f"{environment.date}; {machine}; torch {environment.torch}, monoidreduce {environment.version}"


def render(
    rows: Sequence[Row], missing: Mapping[str, str], environment: Environment, how: str, command: str, seconds: float
) -> str:
    """The page."""
    sections = [_section(layer, own) for layer, own in by_layer(rows).items()]
    return page.whole(
        "the benchmark", [_header(rows, environment, seconds, how), *sections, _missing(missing), page.again(command)]
    )


def _header(rows: Sequence[Row], environment: Environment, seconds: float, how: str) -> str:
    tiles = []
    for who, times, memory in compared(rows):
        tiles.append(
            f"<li><b>{factor(times)}</b> the speed of {escape(who)} <small>{_less(memory)} memory</small></li>"
        )
    joined = "\n".join(tiles)
    tiles_html = f'<ul class="tiles">\n{joined}\n</ul>' if tiles else ""
    return f"""<header>
<h1>MonoidReduce and its peers</h1>
<p class="lead">{escape(how)}</p>
{tiles_html}
{page.facts(environment, seconds)}
</header>"""


def _less(ratio: float) -> str:
    """A peer's memory over ours, in words."""
    return f"{factor(ratio)} less" if ratio >= 1 else f"{factor(1 / ratio)} more"


def compared(rows: Sequence[Row]) -> list[tuple[str, float, float]]:
    """For every peer, the geometric means of its time and memory over ours, where both were measured."""
    ours = {(r.layer, r.rows, r.cols): r for r in rows if r.who == "ours" and r.ms}
    found = []
    for who in dict.fromkeys(r.who for r in rows if r.who != "ours"):
        pairs = [(r, ours[key]) for r in rows if r.who == who and r.ms and (key := (r.layer, r.rows, r.cols)) in ours]
        like = [(r, o) for r, o in pairs if (r.total_ms is None) == (o.total_ms is None)]
        both = [(r, o, "ms") for r, o in like] or [(r, o, "forward_ms") for r, o in pairs]
        if both:
            times = geometric([getattr(r, a) / getattr(o, a) for r, o, a in both])
            memory = geometric([max(r.extra_bytes or 0, 1) / max(o.extra_bytes or 0, 1) for r, o, _ in both])
            found.append((who, times, memory))
    return found


def _section(layer: str, rows: Sequence[Row]) -> str:
    drawn = [
        f"<figure>\n{charts.curves(found, unit, escape(f'{what} of {layer} over the number of pairs'))}\n"
        f"<figcaption><b>{escape(layer)}: {what}</b>, {unit}; both axes logarithmic.</figcaption>\n</figure>"
        for what, unit in (("time", "ms"), ("memory", "MB"))
        if (found := lines(rows, what))
    ]
    names = dict.fromkeys(who for what in ("time", "memory") for who in lines(rows, what))
    legend = " ".join(page.entry(f"k{k % charts.KINDS}", escape(who)) for k, who in enumerate(names))
    headings = HEADINGS if any(r.note for r in rows) else HEADINGS[:-1]
    head = "".join(f'<th scope="col">{h}</th>' for h in headings)
    body = "\n".join(_row(r, headings) for r in rows)
    return f"""<section>
<h2>{escape(layer)}</h2>
<p class="key">{legend}</p>
<div class="figures">
{chr(10).join(drawn)}
</div>
<table class="numbers">
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table>
</section>"""


def _row(row: Row, headings: Sequence[str]) -> str:
    size, *rest = (escape(c) for c in cells(row)[: len(headings)])
    tagged = "".join(f'<td data-label="{h}">{c}</td>' for h, c in zip(headings[1:], rest, strict=True))
    kind = ' class="us"' if row.who == "ours" else ""
    return f'<tr{kind}><th scope="row">{size}</th>{tagged}</tr>'


def _missing(missing: Mapping[str, str]) -> str:
    if not missing:
        return ""
    listed = "\n".join(f"<li>{escape(who)}: {escape(why)}</li>" for who, why in missing.items())
    return f"<section>\n<h2>Not measured</h2>\n<ul>\n{listed}\n</ul>\n</section>"
