"""A counter of tiles computed and skipped, for tests and for ``explain``."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Tally:
    """Tiles and pairs computed, and those that interval analysis showed to be idle.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def later(x: mr.Row, y: mr.Col):
    ...     return mr.sum(torch.where(mr.col_index > mr.row_index, x * y, 0.0))
    >>> with mr.use(engine="eager"), mr.tally() as seen:
    ...     sums = later(torch.ones(4096), torch.ones(4096))
    >>> seen.skipped > 0 and seen.tiles == seen.computed + seen.skipped
    True
    """

    computed: int = 0
    skipped: int = 0
    pairs_computed: int = 0
    pairs_skipped: int = 0

    @property
    def tiles(self) -> int:
        return self.computed + self.skipped


_counters: contextvars.ContextVar[tuple[Tally, ...]] = contextvars.ContextVar("tally", default=())


@contextlib.contextmanager
def tally() -> Iterator[Tally]:
    """Count the tiles that run inside the block.

    >>> with tally() as t:
    ...     pass
    >>> t.computed, t.skipped
    (0, 0)
    """
    mine = Tally()
    token = _counters.set((*_counters.get(), mine))
    try:
        yield mine
    finally:
        _counters.reset(token)


@contextlib.contextmanager
def pause_counting() -> Iterator[None]:
    """Nothing that runs inside the block is counted: for dry runs."""
    token = _counters.set(())
    try:
        yield
    finally:
        _counters.reset(token)


def count_tile(computed: bool, batch: int, rows: int, cols: int, tiles: int = 1) -> None:
    """Add a tile, or several of one size, to all active counters; ``computed``: False if they were skipped."""
    for t in _counters.get():
        if computed:
            t.computed += tiles
            t.pairs_computed += tiles * batch * rows * cols
        else:
            t.skipped += tiles
            t.pairs_skipped += tiles * batch * rows * cols
