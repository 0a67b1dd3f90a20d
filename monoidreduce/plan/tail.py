"""Gradients in almost no memory: what is not written yet of the column gradients holds everything else.

Column gradients of a vocabulary are the largest thing that a backward returns, and are written a few columns at a
time. Until then their memory is free: at its end lie the float32 totals of the row gradients, before them the panel of
pairs. So the columns whose place the totals take are met twice: first for the rows alone, and last, when the row
gradients are done, for themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_ROUND = 128  # columns of a panel are a multiple of this where there are more
_LEAST = 16  # columns of the least panel
_ALIGN = 256  # bytes: where panels and totals may begin
ROWS, COLS = frozenset({"cols"}), frozenset({"rows"})  # the directions folded over: of row, of column gradients


@dataclass(frozen=True)
class Turn:
    """A panel of all rows and some columns: what is folded of it, and where it lies in bytes (None: in its own)."""

    first: int
    last: int
    over: frozenset[str]
    at: int | None


@dataclass(frozen=True)
class Tail:
    """The turns, the columns that a panel of its own holds, and where the row totals lie."""

    turns: tuple[Turn, ...]
    own: int
    totals: int


def tail(
    cols: int, line: int, column: int, totals: int, room: int, most: int, fill: Callable[[int], int]
) -> Tail | None:
    """Plan the turns; None where the column gradients are too small to be of use.

    ``line``: bytes of one column's gradient; ``column``: bytes that a panel holds of one column; ``totals``: bytes of
    the row totals; ``room``: bytes for a panel of its own, at least one of a few columns; ``most``: columns of a panel;
    ``fill``: how many of at most so many columns a panel had better have.
    """
    own = min(room // max(1, column), cols, most)
    own = own // _ROUND * _ROUND or own // _LEAST * _LEAST
    begin = (cols * line - totals) // _ALIGN * _ALIGN
    first = begin // line  # the columns from here on are met twice
    if not own or first < cols // 2:
        return None
    fit = lambda begin, end, column: fill(min(most, max(0, end - begin - _ALIGN) // column // _ROUND * _ROUND))
    step = fit(0, begin, column)
    step, place = (step, 0) if step > own else (own, None)
    again = [Turn(at, min(cols, at + step), ROWS, place) for at in range(first, cols, step)]
    once = _written(0, first, begin, line, column, own, fit, ROWS | COLS)
    late = _written(first, cols, cols * line, line, column, own, fit, COLS)
    return Tail((*again, *once, *late), own, begin)


def _written(
    at: int, last: int, end: int, line: int, column: int, own: int, fit: Callable[..., int], over: frozenset[str]
) -> list[Turn]:
    """Turns that write the gradients of columns, each panel at the end of what is free beyond its own gradients.

    ``fit``: columns of a panel that fits between two places, of so many bytes each."""
    found = []
    while at < last:
        step = min(fit(at * line, end, line + column), last - at)
        place = (end - -(-step // _ROUND) * _ROUND * column) // _ALIGN * _ALIGN if step > own else None
        step = step if step > own else min(own, last - at)
        found.append(Turn(at, at + step, over, place))
        at += step
    return found
