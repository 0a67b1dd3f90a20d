"""Gradients in almost no memory: what is not written yet of the gradients holds everything else.

Column gradients of a vocabulary are the largest thing that a backward returns, and are written a few columns at a
time. Until then their memory is free for a panel of pairs. Row gradients are added up in float32 and rounded at the
very end, so that their own memory holds the totals of the first half of the rows. Those of the other half lie apart
where the budget has room for that, else at the end of the column gradients: the columns whose place they take are met
twice, first for the rows alone, and last, when the row gradients are done, for themselves.

Where the gradient is taken in the forward, that memory is free before anything is written: the weights of the first
columns are stowed there while rows are folded, and summed when these are known, without being computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

_ROUND, _HALF = 128, 64  # columns of a panel are a multiple of one of these where there are more
_LEAST = 16  # columns of the least panel
_ALIGN = 256  # bytes: where panels and totals may begin
_MORE = 512  # columns that a panel would have more, for what it costs beside them: row totals are read and written
_MANY = 64  # panels that are stowed, fewer than that
_WORTH = 16  # weights are stowed of one column in so many, at least: all others are folded a little slower for it
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


class Stow(NamedTuple):
    """What weights that are stowed need beside them: bytes of all tiles' sums, which lie first, while rows are folded;
    of the rows' vectors, which lie last, while stowed weights are summed; and the columns of a tile."""

    sums: int
    vectors: int
    tile: int


@dataclass(frozen=True)
class Tail:
    """The turns, the columns that a panel of its own holds, and where the row totals lie: those of the first ``lent``
    rows in the row gradients, the others in the column gradients, from ``totals`` on (None: apart).

    ``stowed``: turns before these, whose weights lie where they are said to from the fold of the rows on, and
    ``vectors``: where those of the rows lie then."""

    turns: tuple[Turn, ...]
    own: int
    lent: int
    totals: int | None
    stowed: tuple[Turn, ...] = ()
    vectors: int = 0


def tail(
    cols: int,
    line: int,
    column: int,
    rows: Rows,
    room: int,
    most: int,
    fill: Callable[[int], int],
    stow: Stow | None = None,
) -> Tail | None:
    """Plan the turns; None where the column gradients are too small to be of use.

    ``line``: bytes of one column's gradient; ``column``: bytes that a panel holds of one column; ``room``: bytes for a
    panel of its own, at least one of a few columns, and for row totals; ``most``: columns of a panel; ``fill``: how
    many of at most so many columns a panel had better have; ``stow``: that some weights are to be stowed.
    """
    rest = (rows.number - rows.lent) * rows.each
    apart = rest <= room * 3 // 4
    own = min((room - rest if apart else room) // max(1, column), cols, most)
    own = own // _ROUND * _ROUND or own // _HALF * _HALF or own // _LEAST * _LEAST
    begin = cols * line if apart else (cols * line - rest) // _ALIGN * _ALIGN
    first = begin // line  # the columns from here on are met twice
    if not own or first < cols // 2:
        return None
    fit = lambda begin, end, column: fill(min(most, max(0, end - begin - _ALIGN) // column // _ROUND * _ROUND))
    stowed: tuple[Turn, ...] = ()
    vectors = 0
    if stow is not None:
        vectors = max(0, begin - stow.vectors) // _ALIGN * _ALIGN
        stowed = _stowed(first, vectors, line, column, most, fill, stow)
        if not stowed or stowed[-1].last < cols // _WORTH:
            return None
    done = stowed[-1].last if stowed else 0
    step = fit(done * line, begin, column)
    step, place = (step, -(-done * line // _ALIGN) * _ALIGN) if step > own else (own, None)
    again = [Turn(at, min(cols, at + step), ROWS, place) for at in range(first, cols, step)]
    once = _written(done, first, begin, line, column, own, fit, ROWS | COLS)
    late = _written(first, cols, cols * line, line, column, own, fit, COLS)
    return Tail((*again, *once, *late), own, rows.lent, None if apart else begin, stowed, vectors)


def _stowed(
    last: int, end: int, line: int, column: int, most: int, fill: Callable[[int], int], stow: Stow
) -> tuple[Turn, ...]:
    """Panels of the first columns, one behind the other up to ``end``: gradients are written from the beginning on, and
    must meet no panel that is still to be summed."""
    found, whole = (0, 0), math.lcm(stow.tile, _ROUND)
    for count in range(1, _MANY):
        begins = line + count * column, count * line + column  # the first panel; the last, where panels are the shorter
        step = min(most, last // count, (end - _ALIGN) // max(begins), (end - _ALIGN - stow.sums) // (count * column))
        step = max(0, fill(step)) // whole * whole
        found = max(found, (count, step), key=lambda plan: plan[0] * (plan[1] - _MORE))
    count, step = found
    first = (end - count * step * column) // _ALIGN * _ALIGN
    return tuple(Turn(n * step, (n + 1) * step, ROWS | COLS, first + n * step * column) for n in range(count))


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
