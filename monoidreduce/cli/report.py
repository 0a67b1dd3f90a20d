"""What commands write into a report: HTML pages, their SVG figures, and the same figures as PNG files.

A page is one file that needs nothing else: no script, no font and no image. ``style.css`` is copied into it and colours
the figures too, light or dark. Curves differ in colour, in dashes and in the shape of their marks, so that they can be
told apart without colours. The units of a figure are those of its view box; text is 12 units high.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import importlib.util
import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape as escape_markup
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import progress
from .command import CommandError
from .measure import CATEGORIES, Environment, MemoryProfile, Moment

# What the terminal shows: tables, lines with a status, a progress bar, and how numbers are written.
#
# This is the only file that imports rich. rich drops colours with NO_COLOR or in a pipe, and makes tables as narrow as
# the window. Progress goes to stderr, so that stdout holds results alone.

OK, FAILED, NOT_TRIED, MISSING = "ok", "FAILED", "not tried", "missing"
_COLOURS = {OK: "green", FAILED: "bold red", NOT_TRIED: "dim", MISSING: "yellow"}


class _Console(Console):
    """Raises BrokenPipeError for ``app.run``. rich itself would exit with 1, which means that a check failed."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console(*, stderr: bool = False) -> Console:
    """A rich console on stdout, or on stderr."""
    return _Console(stderr=stderr, highlight=False, soft_wrap=False)


@contextlib.contextmanager
def show_progress(steps: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr, or a line a step where that is no terminal. Yields a function to call with a step's
    name as the step begins."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        numbers = itertools.count(1)
        yield lambda name: progress.print_line(f"{next(numbers)}/{steps} {name}")
        return
    columns = (BarColumn(bar_width=24), TextColumn("{task.completed:.0f}/{task.total:.0f}"), TimeElapsedColumn())
    bar = Progress(*columns, TextColumn("{task.description}"), console=console, transient=True)
    task = bar.add_task("", total=steps, completed=-1)  # a step counts as done when the next one begins
    with bar:
        yield lambda name: bar.update(task, description=escape_markup(name), advance=1)


def print_table(
    console: Console,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Sequence[int] = (),
    markup: bool = False,
) -> None:
    """A table as wide as its content, or as the window. ``right``: the columns to align on the right.

    With ``markup``, cells may hold rich's markup; without, they are printed as they are.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for k, heading in enumerate(headings):
        table.add_column(heading, justify="right" if k in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(row if markup else map(escape_markup, row)))
    console.print(table)


def print_statuses(console: Console, lines: Sequence[tuple[str, str, str]]) -> None:
    """Print (name, status, words) lines in columns, or with the words below where the window is too narrow."""
    width, status_width = (max(len(line[k]) for line in lines) for k in (0, 1))
    for name, status, words in lines:
        mark = f"[{_COLOURS[status]}]{status}[/]" if status in _COLOURS else status
        if console.width >= width + status_width + 36:
            grid = Table.grid(padding=(0, 2))
            grid.add_column(width=width, no_wrap=True)
            grid.add_column(width=status_width, no_wrap=True)
            grid.add_column(overflow="fold")
            grid.add_row(escape_markup(name), mark, escape_markup(words))
            console.print(grid)
        else:
            console.print(f"{escape_markup(name)}  {mark}")
            console.print(Padding(escape_markup(words), (0, 0, 0, 2)))


def print_paths(console: Console, paths: Iterable[Path]) -> None:
    """Print the files that were written, one a line and never wrapped, so that they can be copied."""
    for path in paths:
        console.print(str(path), soft_wrap=True, markup=False)


# Numbers, written alike in the terminal and on pages ----------------------------------------------------------------


def format_number(number: float) -> str:
    """A number with about three digits.

    >>> [format_number(x) for x in (1234.5, 123.4, 12.34, 1.234, 0.1234)]
    ['1234', '123', '12.3', '1.23', '0.12']
    """
    return f"{number:.0f}" if number >= 99.95 else f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"


def format_mb(size: float) -> str:
    """Bytes as megabytes (1 MB is 10⁶ bytes).

    >>> format_mb(2_500_000)
    '2.50'
    """
    return format_number(size / 1e6)


def format_size(size: int) -> str:
    """Bytes in the largest binary unit, with one decimal where it says something.

    >>> format_size(2**28), format_size(3 * 2**29), format_size(2**23 + 1)
    ('256 MiB', '1.5 GiB', '8 MiB')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 2**power:
            return f"{size / 2**power:.1f}".removesuffix(".0") + f" {unit}"
    return f"{size} B"


def format_ratio(ratio: float) -> str:
    """A ratio with a times sign.

    >>> [format_ratio(x) for x in (0.5, 1.25, 14.26, 140.4)]
    ['0.50×', '1.25×', '14.3×', '140×']
    """
    return f"{format_number(ratio)}×"


def geometric_mean(ratios: Sequence[float]) -> float:
    """The geometric mean, the right average for ratios.

    >>> geometric_mean([1.0, 4.0])
    2.0
    """
    return math.exp(sum(math.log(max(r, 1e-9)) for r in ratios) / len(ratios))


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


@dataclass(frozen=True)
class Origin:
    """Where the numbers on a page come from."""

    environment: Environment
    seconds: float
    command_line: str


def make_page(
    title: str,
    heading: str,
    intro: str,
    tiles: Iterable[tuple[str, str, str]],
    parts: Iterable[str],
    origin: Origin,
    more: str = "",
) -> str:
    """A page: its heading, an introduction, tiles of (number, what it is, remark), where and when it was measured, the
    parts, and how to reproduce it with ``more`` to say about that."""
    cells = "\n".join(f"<li><b>{value}</b> {what} <small>{remark}</small></li>" for value, what, remark in tiles)
    environment = origin.environment
    facts = {
        "monoidreduce": environment.version,
        "Python": environment.python,
        "torch": environment.torch,
        "processor": environment.cpu,
        "threads": environment.threads,
        "GPU": environment.gpu,
        "date": environment.date,
        "measured in": f"{origin.seconds:.0f} s",
    }
    listed = "\n".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items() if v)
    code = f'<pre><code>pip install "monoidreduce[cli]"\n{escape(origin.command_line)}</code></pre>'
    body = [
        "<header>",
        f"<h1>{escape(heading)}</h1>",
        intro,
        f'<ul class="tiles">\n{cells}\n</ul>' if cells else "",
        f"<dl>\n{listed}\n</dl>",
        "</header>",
        *parts,
        make_section("How to reproduce it", code, more),
    ]
    css = importlib.resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    return _PAGE.format(title=escape(title), css=css, body="\n".join(filter(None, body)))


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


# Axes -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Axis:
    """Maps values from ``low`` to ``high`` (their logarithms, if ``log``) to places from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    ticks: Sequence[float]  # the values to label
    log: bool = False

    def at(self, value: float) -> float:
        number = math.log10(max(value, 1e-9)) if self.log else value
        return self.start + (self.end - self.start) * (number - self.low) / (self.high - self.low)


def _linear_axis(top: float, start: float, end: float, most: int = 5) -> _Axis:
    return _Axis(0.0, top, start, end, round_ticks(top, most))


def _log_axis(values: Sequence[float], start: float, end: float) -> _Axis:
    """An axis with a margin at both ends, labelled at powers of ten and, where there are few, between them."""
    values = [*values] or [1.0]  # nothing fitted
    low, high = max(min(values), 1e-9), max(max(values), 1e-9)
    margin = 1.15 if high / low > 1.5 else 2.0
    low, high = math.log10(low / margin), math.log10(high * margin)
    steps = (1,) if high - low > 3 else (1, 2, 5) if high - low > 0.7 else (1, 1.5, 2, 3, 5, 7)
    powers = range(math.floor(low), math.ceil(high) + 1)
    ticks = [v for p in powers for s in steps if low <= math.log10(v := s * 10.0**p) <= high]
    return _Axis(low, high, start, end, ticks, log=True)


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


def format_si(value: float) -> str:
    """A number as written at a logarithmic axis.

    >>> format_si(0.5), format_si(20), format_si(16777216)
    ('0.5', '20', '16.8M')
    """
    for power, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= power:
            return f"{format_number(value / power).removesuffix('.00').removesuffix('.0')}{letter}"
    return f"{value:.3g}"


def _draw_axes(x: _Axis, y: _Axis, x_unit: str = "", y_unit: str = "") -> Iterator[str]:
    """Grid lines with their values, and the horizontal axis if it has a unit."""
    format_tick = format_si if y.log else "{:g}".format
    for value in y.ticks:
        yield _line(x.start, y.at(value), x.end, y.at(value), "grid")
        yield _text(x.start - 6, y.at(value) + 4, format_tick(value), "end")
    if x_unit:
        yield _text(x.start - 6, y.end - 8, y_unit, "end")
        for value in x.ticks:
            yield _line(x.at(value), y.start, x.at(value), y.start + 4, "axis")
            yield _text(x.at(value), y.start + 18, format_tick(value), "middle")
        yield _text(x.end, y.start + 34, x_unit, "end")


# SVG: memory over time --------------------------------------------------------------------------------------------


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
    """One profile as stacked areas over time, on an axis of ``top`` bytes. ``label`` is for screen readers.

    A low profile is drawn again on its own scale, in the empty space above it.
    """
    x, y = _linear_axis(profile.end * 1e3, 44, WIDTH - 16), _linear_axis(top / 1e6, HEIGHT - 40, 22)
    is_low = profile.peak.total < _INSET_BELOW * top
    middle = x.at(profile.forward_end * 1e3)
    peak_x, peak_y = x.at(profile.peak.seconds * 1e3), y.at(profile.peak.total / 1e6)
    parts = [*_draw_axes(x, y, "ms", "MB"), *_draw_areas(profile, x, y), _line(middle, 18, middle, y.start, "phase")]
    if middle - x.start > 80:
        parts.append(_text(middle - 5, 14, "forward", "end"))
    parts += [_text(middle + 5, 14, "backward", "start"), _line(x.start, peak_y, x.end, peak_y, "peak")]
    if not is_low:
        parts.append(f'<circle class="dot" cx="{peak_x:.1f}" cy="{peak_y:.1f}" r="3"/>')
    is_right = is_low or peak_x > (x.start + x.end) / 2
    at, anchor = (x.end - 4, "end") if is_right else (x.start + 4, "start")
    parts.append(_text(at, peak_y - 6, f"peak {format_mb(profile.peak.total)} MB", anchor, "strong"))
    return _svg(label, [*parts, *(_draw_inset(profile, peak_y) if is_low else ())])


def _draw_inset(profile: MemoryProfile, bottom: float) -> Iterator[str]:
    x = _linear_axis(profile.end * 1e3, 106, WIDTH - 36)
    y = _linear_axis(profile.peak.total * 1.15 / 1e6, bottom - 60, 68, most=3)
    frame = (x.start - 46, y.end - 24, x.end - x.start + 58, y.start - y.end + 36)
    yield '<rect class="frame" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="4"/>'.format(*frame)
    yield _text(x.start - 38, y.end - 9, "the same, enlarged", "start", "strong")
    yield from _draw_axes(x, y)
    yield from _draw_areas(profile, x, y)
    middle = x.at(profile.forward_end * 1e3)
    yield _line(middle, y.end, middle, y.start, "phase")


def _draw_areas(profile: MemoryProfile, x: _Axis, y: _Axis) -> Iterator[str]:
    """From back to front: all categories, all but the temporary, and the inputs and gradients alone."""
    columns = list(highest_moments(profile, int((x.end - x.start) * 2)))
    names = list(CATEGORIES)
    for k in range(len(names) - 1, -1, -1):
        path = [f"M{x.start:.1f} {y.start:.1f}"]
        last = ""
        for seconds, moment in columns:
            level = f"V{y.at(sum(getattr(moment, n) for n in names[: k + 1]) / 1e6):.1f}"
            if level != last:
                path += [f"H{x.at(seconds * 1e3):.1f}", level]
                last = level
        path += [f"H{x.end:.1f}", f"V{y.start:.1f}Z"]
        yield f'<path class="{names[k]}" d="{"".join(path)}"/>'


# SVG: curves over the number of pairs -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """A horizontal line across a chart of curves, and the words above it."""

    value: float
    words: str


def draw_curves(
    curves: Mapping[str, Points], unit: str, label: str, x_unit: str = "pairs", bound: Bound | None = None
) -> str:
    """Curves over the number of pairs, both axes logarithmic; the first is ours. ``label`` is for screen readers.

    A mark tells its values where the pointer rests on it. With another ``x_unit``, round sizes are labelled.
    """
    xs, ys = ([point[k] for points in curves.values() for point in points] for k in (0, 1))
    x = _log_axis(xs, 56, WIDTH - 18)
    x = replace(x, ticks=sorted(set(xs))) if x_unit == "pairs" else x
    y = _log_axis([*ys, bound.value] if bound else ys, HEIGHT - 40, 22)
    parts = list(_draw_axes(x, y, x_unit, unit))
    if bound:
        at = y.at(bound.value)
        parts += [_line(x.start, at, x.end, at, "peak"), _text(x.start + 4, at - 6, bound.words, "start", "strong")]
    for k, (who, points) in reversed(list(enumerate(curves.items()))):  # ours last, on top
        words = [f"{escape(who)}: {a:.0f} {x_unit}, {format_number(b)} {unit}" for a, b in points]
        parts += _draw_curve([(x.at(a), y.at(b)) for a, b in points], k % CURVE_STYLES, words)
    return _svg(label, parts)


def _draw_curve(points: Points, k: int, words: Sequence[str]) -> Iterator[str]:
    if len(points) > 1:
        yield f'<path class="curve k{k}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>'
    for (x, y), said in zip(points, words, strict=True):
        shape = (
            f"M{x - 4:.1f} {y:.1f}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z",
            f"M{x - 3.5:.1f} {y - 3.5:.1f}h7v7h-7Z",
            f"M{x:.1f} {y - 4.5:.1f}l4.5 8h-9Z",
            f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5Z",
        )[k % 4]
        yield f'<g><title>{said}</title><path class="mark k{k}" d="{shape}"/></g>'


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
