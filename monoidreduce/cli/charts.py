"""Curves over the number of pairs, both axes logarithmic: inline SVG, coloured by the page's style sheet.

Curves differ in colour, in dashes and in the shape of their marks, and carry their names: none needs the colours alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .figures import HEIGHT, WIDTH, line, text
from .numbers import short

Points = Sequence[tuple[float, float]]
KINDS = 8  # kinds of curves in the style sheet: k0 to k7


def curves(lines: Mapping[str, Points], unit: str, label: str) -> str:
    """A chart of these curves; the first is ours. ``label`` is what a screen reader says."""
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    across, up = _Axis(min(xs), max(xs), 56, WIDTH - 18), _Axis(min(ys), max(ys), HEIGHT - 40, 22)
    parts = [text(50, 12, unit, "end"), text(WIDTH - 18, HEIGHT - 6, "pairs", "end")]
    for value in up.ticks():
        parts += [
            line(56, up.at(value), WIDTH - 18, up.at(value), "grid"),
            text(50, up.at(value) + 4, _si(value), "end"),
        ]
    for value in sorted(set(xs)):
        parts += [
            line(across.at(value), HEIGHT - 40, across.at(value), HEIGHT - 36, "axis"),
            text(across.at(value), HEIGHT - 22, _si(value), "middle"),
        ]
    for k, points in reversed(list(enumerate(lines.values()))):  # ours last, on top
        parts += _curve([(across.at(x), up.at(y)) for x, y in points], k % KINDS)
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">\n{body}\n</svg>'


class _Axis:
    """A logarithmic axis between two places of a drawing, with a little room at both ends."""

    def __init__(self, low: float, high: float, start: float, end: float):
        low, high = max(low, 1e-9), max(high, 1e-9)
        room = 1.15 if high / low > 1.5 else 2.0
        self.low, self.high, self.start, self.end = math.log10(low / room), math.log10(high * room), start, end

    def at(self, value: float) -> float:
        part = (math.log10(max(value, 1e-9)) - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round numbers: powers of ten, and 2 and 5 times those where there are few."""
        steps = (1,) if self.high - self.low > 3 else (1, 2, 5) if self.high - self.low > 0.7 else (1, 1.5, 2, 3, 5, 7)
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        found = [s * 10.0**p for p in powers for s in steps]
        return [v for v in found if self.low <= math.log10(v) <= self.high]


def _curve(points: Sequence[tuple[float, float]], k: int) -> list[str]:
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    drawn = [f'<path class="curve k{k}" d="{path}"/>'] if len(points) > 1 else []
    return drawn + [_mark(x, y, k) for x, y in points]


def _mark(x: float, y: float, k: int) -> str:
    shape = {
        0: f"M{x - 4:.1f} {y:.1f}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z",
        1: f"M{x - 3.5:.1f} {y - 3.5:.1f}h7v7h-7Z",
        2: f"M{x:.1f} {y - 4.5:.1f}l4.5 8h-9Z",
        3: f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5Z",
    }[k % 4]
    return f'<path class="mark k{k}" d="{shape}"/>'


def _si(value: float) -> str:
    """A number as an axis has it.

    >>> _si(0.5), _si(20), _si(16777216)
    ('0.5', '20', '16.8M')
    """
    for power, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= power:
            return f"{short(value / power).removesuffix('.00').removesuffix('.0')}{letter}"
    return f"{value:.3g}"
