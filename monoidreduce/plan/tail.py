"""Gradients in almost no memory: what is not written yet of the gradients holds everything else.

Column gradients of a vocabulary are the largest thing that a backward returns, and are written a few columns at a
time. Until then their memory is free for a panel of pairs. Row gradients are added up in float32 and rounded at the
very end, so that their own memory holds the totals of the first half of the rows. Those of the other half lie apart
where the budget has room for that, else at the end of the column gradients: the columns whose place they take are met
twice, first for the rows alone, and last, when the row gradients are done, for themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

_ROUND = 128  # columns of a panel are a multiple of this where there are more
_LEAST = 16  # columns of the least panel
_ALIGN = 256  # bytes: where panels and totals may begin
ROWS, COLS = frozenset({"cols"}), frozenset({"rows"})  # the directions folded over: of row, of column gradients


class Rows(NamedTuple):
    """Rows: how many there are, of how many the row gradients' memory holds the totals, and bytes of a row's totals."""

    number: int
    lent: int
    each: int


@dataclass(frozen=True)
class Turn:
    """A panel of all rows and some columns: what is folded of it, and where it lies in bytes (None: in its own)."""

    first: int
    last: int
    over: frozenset[str]
    at: int | None


@dataclass(frozen=True)
class Tail:
    """The turns, the columns that a panel of its own holds, and where the row totals lie: those of the first ``lent``
    rows in the row gradients, the others in the column gradients, from ``totals`` on (None: apart)."""

    turns: tuple[Turn, ...]
    own: int
    lent: int
    totals: int | None


def tail(
    cols: int, line: int, column: int, rows: Rows, room: int, most: int, fill: Callable[[int], int]
) -> Tail | None:
    """Plan the turns; None where the column gradients are too small to be of use.

    ``line``: bytes of one column's gradient; ``column``: bytes that a panel holds of one column; ``room``: bytes for a
    panel of its own, at least one of a few columns, and for row totals; ``most``: columns of a panel; ``fill``: how
    many of at most so many columns a panel had better have.
    """
    rest = (rows.number - rows.lent) * rows.each
    apart = rest <= room * 3 // 4
    own = min((room - rest if apart else room) // max(1, column), cols, most)
    own = own // _ROUND * _ROUND or own // _LEAST * _LEAST
    begin = cols * line if apart else (cols * line - rest) // _ALIGN * _ALIGN
    first = begin // line  # the columns from here on are met twice
    if not own or first < cols // 2:
        return None
    fit = lambda begin, end, column: fill(min(most, max(0, end - begin - _ALIGN) // column // _ROUND * _ROUND))
    step = fit(0, begin, column)
    step, place = (step, 0) if step > own else (own, None)
    again = [Turn(at, min(cols, at + step), ROWS, place) for at in range(first, cols, step)]
    once = _written(0, first, begin, line, column, own, fit, ROWS | COLS)
    late = _written(first, cols, cols * line, line, column, own, fit, COLS)
    return Tail((*again, *once, *late), own, rows.lent, None if apart else begin)


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
