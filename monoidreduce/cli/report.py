"""What commands write into a report: HTML pages, their SVG figures, and the same figures as PNG files.

A page is one file that needs nothing else: no script, no font and no image. ``style.css`` is copied into it and colours
the figures too, light or dark. Curves differ in colour, in dashes and in the shape of their marks, so that they can be
told apart without colours. The units of a figure are those of its view box; text is 12 units high.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from .command import CommandError
from .measure import CATEGORIES, Environment, MemoryProfile, Moment
from .terminal import format_mb, format_number

WIDTH, HEIGHT = 480, 300
CURVE_STYLES = 8  # classes k0 to k7 of the style sheet
_INSET_BELOW = 0.42  # a profile whose peak is below this part of the axis is also drawn enlarged, in the empty space
_PNG_COLOURS = ("#8b9299", "#0d74ce", "#f0a63a")  # of CATEGORIES
_PNG_POINTS = 900

Points = Sequence[tuple[float, float]]

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


# Parts of a page. Arguments are HTML, unless they are called titles or names ----------------------------------------


def make_page(title: str, parts: Iterable[str]) -> str:
    """A page of these parts."""
    css = importlib.resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    return _PAGE.format(title=escape(title), css=css, body="\n".join(filter(None, parts)))


def make_header(
    title: str, intro: str, tiles: Iterable[tuple[str, str, str]], environment: Environment, seconds: float
) -> str:
    """The title, an introduction, tiles of (number, what it is, remark), and where and when it was measured."""
    cells = "\n".join(f"<li><b>{value}</b> {what} <small>{remark}</small></li>" for value, what, remark in tiles)
    facts = {
        "monoidreduce": environment.version,
        "Python": environment.python,
        "torch": environment.torch,
        "processor": environment.cpu,
        "threads": environment.threads,
        "GPU": environment.gpu,
        "date": environment.date,
        "measured in": f"{seconds:.0f} s",
    }
    listed = "\n".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items() if v)
    list_of_tiles = f'<ul class="tiles">\n{cells}\n</ul>' if cells else ""
    parts = [f"<h1>{escape(title)}</h1>", intro, list_of_tiles, f"<dl>\n{listed}\n</dl>"]
    return "<header>\n" + "\n".join(filter(None, parts)) + "\n</header>"


def make_section(title: str, *parts: str) -> str:
    return "\n".join(["<section>", f"<h2>{escape(title)}</h2>", *filter(None, parts), "</section>"])


def make_table(headings: Iterable[str], rows: Iterable[str], kind: str = "") -> str:
    """A table of rows that are ``<tr>`` elements; ``kind`` is its class in the style sheet."""
    head = "".join(f'<th scope="col">{h}</th>' for h in headings)
    body = "\n".join(rows)
    opening = f'<table class="{kind}">' if kind else "<table>"
    return f"{opening}\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def make_legend_entry(kind: str, words: str) -> str:
    return f'<span class="entry"><span class="swatch {kind}"></span> {words}</span>'


def make_figures(figures: Iterable[tuple[str, str]]) -> str:
    """Figures side by side, each an SVG drawing and its caption."""
    drawn = "\n".join(f"<figure>\n{svg}\n<figcaption>{caption}</figcaption>\n</figure>" for svg, caption in figures)
    return f'<div class="figures">\n{drawn}\n</div>'


def make_memory_section(name: str, profiles: Sequence[tuple[MemoryProfile, str, str]]) -> str:
    """Memory over time on one vertical scale, side by side: (profile, title, remark) each."""
    top = memory_axis_top(profile for profile, _, _ in profiles)
    figures = [
        (
            draw_memory(profile, top, escape(title)),
            f"<b>{escape(title)}</b>: {format_mb(profile.extra)} MB beyond inputs and gradients. {remark}",
        )
        for profile, title, remark in profiles
    ]
    legend = "\n".join(make_legend_entry(category, words) for category, words in CATEGORIES.items())
    intro = f"""<p>Bytes alive during one forward and backward of {escape(name)}, as recorded by
<code>torch.profiler</code>. The figures have the same vertical scale; each has its own time, and
no peak is too short to be drawn.</p>
<p class="key">{legend}</p>"""
    return make_section("Memory over time", intro, make_figures(figures))


def make_reproduce_section(command: str, more: str = "") -> str:
    code = f'<pre><code>pip install "monoidreduce[cli]"\n{escape(command)}</code></pre>'
    return make_section("How to reproduce it", code, more)


# SVG: memory over time ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PlotArea:
    """A plotting area: its edges, and the seconds and bytes at its right and top edges."""

    left: float
    top: float
    right: float
    bottom: float
    seconds: float
    bytes: float

    def x(self, seconds: float) -> float:
        return self.left + (self.right - self.left) * seconds / self.seconds

    def y(self, size: float) -> float:
        return self.bottom - (self.bottom - self.top) * size / self.bytes


def memory_axis_top(profiles: Iterable[MemoryProfile]) -> float:
    """The upper end of a bytes axis that these profiles share: a tenth above the highest peak."""
    return max(p.peak.total for p in profiles) * 1.1


def highest_moments(profile: MemoryProfile, count: int) -> Iterator[tuple[float, Moment]]:
    """``count`` equal spans of time, each as its start and its highest moment, so that no short peak is lost."""
    moments, k = profile.moments, 0
    for column in range(count):
        end = profile.end * (column + 1) / count
        highest = moments[k]
        while k + 1 < len(moments) and moments[k + 1].seconds < end:
            k += 1
            if moments[k].total > highest.total:
                highest = moments[k]
        yield profile.end * column / count, highest


def draw_memory(profile: MemoryProfile, top: float, label: str) -> str:
    """One profile as stacked areas over time on an axis of ``top`` bytes. ``label`` is for screen readers."""
    area = _PlotArea(44, 22, WIDTH - 16, HEIGHT - 40, profile.end, top)
    is_low = profile.peak.total < _INSET_BELOW * top
    parts = [*_draw_grid(area), *_draw_areas(profile, area), *_draw_phases(profile, area)]
    parts += _draw_peak(profile, area, mark=not is_low)
    return _svg(label, [*parts, *(_draw_inset(profile, area) if is_low else ())])


def _draw_inset(profile: MemoryProfile, outer: _PlotArea) -> Iterator[str]:
    """The same profile on its own scale, in the empty space above it."""
    peak = profile.peak.total
    area = _PlotArea(outer.left + 62, outer.top + 46, outer.right - 20, outer.y(peak) - 60, profile.end, peak * 1.15)
    frame = (area.left - 46, area.top - 24, area.right - area.left + 58, area.bottom - area.top + 36)
    yield '<rect class="frame" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="4"/>'.format(*frame)
    yield _text(area.left - 38, area.top - 9, "the same, enlarged", "start", "strong")
    yield from _draw_grid(area, most=3, times=False)
    yield from _draw_areas(profile, area)
    yield _line(area.x(profile.forward_end), area.top, area.x(profile.forward_end), area.bottom, "phase")


def _draw_grid(area: _PlotArea, most: int = 5, times: bool = True) -> Iterator[str]:
    for megabytes in round_ticks(area.bytes / 1e6, most):
        y = area.y(megabytes * 1e6)
        yield _line(area.left, y, area.right, y, "grid")
        yield _text(area.left - 6, y + 4, f"{megabytes:g}", "end")
    if not times:
        return
    yield _text(area.left - 6, area.top - 8, "MB", "end")
    for milliseconds in round_ticks(area.seconds * 1e3):
        x = area.x(milliseconds / 1e3)
        yield _line(x, area.bottom, x, area.bottom + 4, "axis")
        yield _text(x, area.bottom + 18, f"{milliseconds:g}", "middle")
    yield _text(area.right, area.bottom + 34, "ms", "end")


def _draw_areas(profile: MemoryProfile, area: _PlotArea) -> Iterator[str]:
    """From back to front: all categories, all but the temporary, and the inputs and gradients alone."""
    columns = list(highest_moments(profile, int((area.right - area.left) * 2)))
    names = list(CATEGORIES)
    for k in range(len(names) - 1, -1, -1):
        path = [f"M{area.left:.1f} {area.bottom:.1f}"]
        last = ""
        for at, moment in columns:
            level = f"V{area.y(sum(getattr(moment, n) for n in names[: k + 1])):.1f}"
            if level != last:
                path += [f"H{area.x(at):.1f}", level]
                last = level
        path += [f"H{area.right:.1f}", f"V{area.bottom:.1f}Z"]
        yield f'<path class="{names[k]}" d="{"".join(path)}"/>'


def _draw_phases(profile: MemoryProfile, area: _PlotArea) -> Iterator[str]:
    middle = area.x(profile.forward_end)
    yield _line(middle, area.top - 4, middle, area.bottom, "phase")
    yield _text(middle - 5, area.top - 8, "forward", "end") if middle - area.left > 80 else ""
    yield _text(middle + 5, area.top - 8, "backward", "start")


def _draw_peak(profile: MemoryProfile, area: _PlotArea, mark: bool) -> Iterator[str]:
    x, y = area.x(profile.peak.seconds), area.y(profile.peak.total)
    is_right = not mark or x > (area.left + area.right) / 2
    yield _line(area.left, y, area.right, y, "peak")
    yield f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' if mark else ""
    at, anchor = (area.right - 4, "end") if is_right else (area.left + 4, "start")
    yield _text(at, y - 6, f"peak {format_mb(profile.peak.total)} MB", anchor, "strong")


def round_ticks(top: float, most: int = 5) -> list[float]:
    """Round, evenly spaced numbers from 0 up to ``top``.

    >>> round_ticks(203), round_ticks(0.9, 3)
    ([0, 50, 100, 150, 200], [0.0, 0.5])
    """
    rough = max(top, 1e-12) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough * 0.999)
    whole = int(step) if step >= 1 else step
    return [round(k * whole, 12) for k in range(int(top / step + 1e-9) + 1)]


# SVG: curves over the number of pairs -------------------------------------------------------------------------------


class _LogAxis:
    """A logarithmic axis between two places of a drawing, with a margin at both ends."""

    def __init__(self, values: Sequence[float], start: float, end: float):
        low, high = max(min(values), 1e-9), max(max(values), 1e-9)
        margin = 1.15 if high / low > 1.5 else 2.0
        self.low, self.high, self.start, self.end = math.log10(low / margin), math.log10(high * margin), start, end

    def at(self, value: float) -> float:
        fraction = (math.log10(max(value, 1e-9)) - self.low) / (self.high - self.low)
        return self.start + fraction * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Powers of ten and, where there are few, round numbers between them."""
        decades = self.high - self.low
        steps = (1,) if decades > 3 else (1, 2, 5) if decades > 0.7 else (1, 1.5, 2, 3, 5, 7)
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        return [v for p in powers for s in steps if self.low <= math.log10(v := s * 10.0**p) <= self.high]


def draw_curves(curves: Mapping[str, Points], unit: str, label: str) -> str:
    """Curves over the number of pairs, both axes logarithmic; the first is ours. ``label`` is for screen readers."""
    xs, ys = ([point[k] for points in curves.values() for point in points] for k in (0, 1))
    across, up = _LogAxis(xs, 56, WIDTH - 18), _LogAxis(ys, HEIGHT - 40, 22)
    parts = [_text(50, 12, unit, "end"), _text(WIDTH - 18, HEIGHT - 6, "pairs", "end")]
    for value in up.ticks():
        y = up.at(value)
        parts += [_line(56, y, WIDTH - 18, y, "grid"), _text(50, y + 4, format_si(value), "end")]
    for value in sorted(set(xs)):
        x = across.at(value)
        parts += [_line(x, HEIGHT - 40, x, HEIGHT - 36, "axis"), _text(x, HEIGHT - 22, format_si(value), "middle")]
    for k, points in reversed(list(enumerate(curves.values()))):  # ours last, on top
        parts += _draw_curve([(across.at(x), up.at(y)) for x, y in points], k % CURVE_STYLES)
    return _svg(label, parts)


def _draw_curve(points: Points, k: int) -> Iterator[str]:
    if len(points) > 1:
        yield f'<path class="curve k{k}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>'
    for x, y in points:
        shape = (
            f"M{x - 4:.1f} {y:.1f}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z",
            f"M{x - 3.5:.1f} {y - 3.5:.1f}h7v7h-7Z",
            f"M{x:.1f} {y - 4.5:.1f}l4.5 8h-9Z",
            f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5Z",
        )[k % 4]
        yield f'<path class="mark k{k}" d="{shape}"/>'


def format_si(value: float) -> str:
    """A number as written at an axis.

    >>> format_si(0.5), format_si(20), format_si(16777216)
    ('0.5', '20', '16.8M')
    """
    for power, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= power:
            return f"{format_number(value / power).removesuffix('.00').removesuffix('.0')}{letter}"
    return f"{value:.3g}"


def _svg(label: str, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">\n{body}\n</svg>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, words: str, anchor: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


# PNG files. matplotlib takes a second to load, so it is imported by the functions that draw --------------------------


def require_matplotlib() -> None:
    """Raise an error that says what to install. Call this before any long measurement."""
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError('pictures need matplotlib. Install it: pip install "monoidreduce[cli]"')


def draw_memory_png(title: str, profiles: Mapping[str, MemoryProfile]) -> bytes:
    """Memory over time, one panel for each profile, on one vertical scale."""
    figure = _make_figure(len(profiles), 1, title)
    top = memory_axis_top(profiles.values()) / 1e6
    for axes, (who, profile) in zip(figure.axes, profiles.items(), strict=True):
        points = list(highest_moments(profile, _PNG_POINTS))
        times = [at * 1e3 for at, _ in points]
        heights = [[getattr(m, name) / 1e6 for _, m in points] for name in CATEGORIES]
        axes.stackplot(times, heights, labels=CATEGORIES.values(), colors=_PNG_COLOURS, step="post", linewidth=0)
        axes.axvline(profile.forward_end * 1e3, color="black", linestyle=":", linewidth=1)
        axes.set(title=f"{who}: {profile.extra / 1e6:.3g} MB extra", xlabel="ms", ylim=(0, top), xlim=(0, times[-1]))
    figure.axes[0].set_ylabel("MB")
    figure.axes[-1].legend(loc="upper left", fontsize="small", frameon=False)
    return _to_png(figure)


def draw_curves_png(title: str, panels: Mapping[str, tuple[str, Mapping[str, Points]]]) -> bytes:
    """Curves over the number of pairs, both axes logarithmic. ``panels``: title -> (unit, curves)."""
    figure = _make_figure(2, -(-len(panels) // 2), title)
    for axes, (name, (unit, curves)) in zip(figure.axes, panels.items(), strict=False):
        for who, points in curves.items():
            width = 2.2 if who == "ours" else 1.2
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=who, linewidth=width)
        axes.set(title=name, xlabel="pairs", ylabel=unit, xscale="log", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", frameon=False)
    return _to_png(figure)


def _make_figure(columns: int, rows: int, title: str) -> Any:
    from matplotlib.figure import Figure  # not pyplot: no global state, no window

    figure = Figure(figsize=(5.2 * columns, 3.4 * rows + 0.4), layout="constrained")
    figure.suptitle(title)
    figure.subplots(rows, columns)
    return figure


def _to_png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
