"""Memory profiles drawn as stacked areas: inline SVG, coloured by the page's style sheet, light or dark.

Units in a drawing are those of its view box; text is 12 of them high, and the drawing is as wide as its column.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .memory import CATEGORIES, Moment, Profile
from .numbers import short, ticks

WIDTH, HEIGHT = 480, 300
_INSET_BELOW = 0.42  # a profile whose peak is below this part of the axis is also drawn enlarged, in the empty space


@dataclass(frozen=True)
class Box:
    """A plotting area: its corners, and what its right and top edges stand for."""

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


def axis_top(*profiles: Profile) -> float:
    """A common upper end of the bytes axis: a tenth above the highest peak."""
    return max(p.peak.total for p in profiles) * 1.1


def timeline(profile: Profile, top: float, label: str) -> str:
    """One profile over time, on an axis of ``top`` bytes, its peak marked."""
    box = Box(44, 22, WIDTH - 16, HEIGHT - 40, profile.end, top)
    parts = [*_grid(box), *_areas(profile, box), *_phases(profile, box)]
    if profile.peak.total < _INSET_BELOW * top:
        parts += _peak(profile, box, mark=False)
        parts += _inset(profile, box)
    else:
        parts += _peak(profile, box)
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">\n{body}\n</svg>'


def _inset(profile: Profile, box: Box) -> Iterator[str]:
    """The same profile on a scale of its own, where the outer one has nothing to show."""
    own = Box(
        box.left + 62,
        box.top + 46,
        box.right - 20,
        box.y(profile.peak.total) - 60,
        profile.end,
        profile.peak.total * 1.15,
    )
    frame = (own.left - 46, own.top - 24, own.right - own.left + 58, own.bottom - own.top + 36)
    yield '<rect class="frame" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="4"/>'.format(*frame)
    yield text(own.left - 38, own.top - 9, "the same, enlarged", "start", "strong")
    yield from _grid(own, most=3, times=False)
    yield from _areas(profile, own)
    yield line(own.x(profile.forward_end), own.top, own.x(profile.forward_end), own.bottom, "phase")


def _grid(box: Box, most: int = 5, times: bool = True) -> Iterator[str]:
    for megabytes in ticks(box.bytes / 1e6, most):
        y = box.y(megabytes * 1e6)
        yield line(box.left, y, box.right, y, "grid")
        yield text(box.left - 6, y + 4, f"{megabytes:g}", "end")
    if not times:
        return
    yield text(box.left - 6, box.top - 8, "MB", "end")
    for milliseconds in ticks(box.seconds * 1e3):
        x = box.x(milliseconds / 1e3)
        yield line(x, box.bottom, x, box.bottom + 4, "axis")
        yield text(x, box.bottom + 18, f"{milliseconds:g}", "middle")
    yield text(box.right, box.bottom + 34, "ms", "end")


def _areas(profile: Profile, box: Box) -> Iterator[str]:
    """From the back to the front: everything, then all but the temporary, then inputs and gradients alone."""
    columns = list(spans(profile, int((box.right - box.left) * 2)))
    names = list(CATEGORIES)
    for k in range(len(names) - 1, -1, -1):
        path = [f"M{box.left:.1f} {box.bottom:.1f}"]
        last = ""
        for at, moment in columns:
            level = f"V{box.y(sum(getattr(moment, n) for n in names[: k + 1])):.1f}"
            if level != last:
                path += [f"H{box.x(at):.1f}", level]
                last = level
        path += [f"H{box.right:.1f}", f"V{box.bottom:.1f}Z"]
        yield f'<path class="{names[k]}" d="{"".join(path)}"/>'


def spans(profile: Profile, count: int) -> Iterator[tuple[float, Moment]]:
    """So many equal spans of time, each as its highest moment: nothing shorter than a span is lost."""
    moments, k = profile.moments, 0
    for column in range(count):
        end = profile.end * (column + 1) / count
        highest = moments[k]
        while k + 1 < len(moments) and moments[k + 1].seconds < end:
            k += 1
            if moments[k].total > highest.total:
                highest = moments[k]
        yield profile.end * column / count, highest


def _phases(profile: Profile, box: Box) -> Iterator[str]:
    middle = box.x(profile.forward_end)
    yield line(middle, box.top - 4, middle, box.bottom, "phase")
    yield text(middle - 5, box.top - 8, "forward", "end") if middle - box.left > 80 else ""
    yield text(middle + 5, box.top - 8, "backward", "start")


def _peak(profile: Profile, box: Box, mark: bool = True) -> Iterator[str]:
    peak = profile.peak
    x, y = box.x(peak.seconds), box.y(peak.total)
    late = x > (box.left + box.right) / 2
    yield line(box.left, y, box.right, y, "peak")
    yield f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' if mark else ""
    where, anchor = (box.right - 4, "end") if late or not mark else (box.left + 4, "start")
    yield text(where, y - 6, f"peak {short(peak.total / 1e6)} MB", anchor, "strong")


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def text(x: float, y: float, words: str, anchor: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'
