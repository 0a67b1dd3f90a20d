"""Communication of a sharded fold, in bytes: what our layouts send (equations 5, in ``candidates.py``, and 9).

Counts are bytes sent by one rank, averaged over the ranks. ``A`` and ``B`` are the bytes of one row's and one column's
inputs, ``P`` those of one row's result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..program.expression import Expr
from ..program.lower import Fold
from ..reductions import kind_of
from .candidates import forward_cost

Of = Callable[[str], int]  # the size of a feature letter


def backward_cost(l: int, r: int, L: int, R: int, A: int, B: int, P: int, W: float = 1) -> float:
    """Equation 9: the same for the gradients, which also read results and cotangents and are summed on both sides,

        2 (r / W) L (A + P) + 2 l R B

    >>> backward_cost(l=1, r=1, L=10, R=20, A=4, B=8, P=4)
    480.0
    """
    return 2 * (r / W) * L * (A + P) + 2 * l * R * B


def best_mesh(ranks: int, L: int, R: int, A: int, B: int, P: int) -> tuple[int, int]:
    """The mesh (l, r), l × r = ranks, with the least sum of equations 5 and 9: rows over l ranks, columns over r.

    >>> best_mesh(8, L=1000, R=10, A=4, B=4, P=4)
    (8, 1)
    """

    def cost(shape: tuple[int, int]) -> float:
        return forward_cost(*shape, L, R, A, B, P) + backward_cost(*shape, L, R, A, B, P)

    return min(((l, ranks // l) for l in range(1, ranks + 1) if ranks % l == 0), key=cost)


# What the collectives send -----------------------------------------------------------------------------------


def reduce_bytes(payload: float, ranks: int) -> float:
    """Bytes sent by a rank in a ring all-reduce of ``payload`` bytes."""
    return 2 * (ranks - 1) / ranks * payload


def gather_bytes(payload: float, ranks: int) -> float:
    """Bytes sent by a rank in an all-gather of ``payload`` bytes from each."""
    return (ranks - 1) * payload


def grid_bytes(rows: float, cols: float, ranks: int, slices: int) -> float:
    """Bytes sent by a rank if each takes the columns of ``slices`` ranks: equation 5 with l = W and r = ``ranks``.

    ``rows`` and ``cols`` are bytes of all rows and of all columns, with their results: (r / W - 1) rows' are sent, and
    (l - 1) columns'. With ``slices = ranks`` only columns are sent (a ring), with 1 only rows.

    >>> [grid_bytes(100, 100, 16, w) for w in (1, 2, 4, 8, 16)]
    [93.75, 50.0, 37.5, 50.0, 93.75]
    """
    return ((ranks / slices - 1) * rows + (slices - 1) * cols) / ranks


@dataclass(frozen=True)
class State:
    """Bytes of one partial result of a reduction: those that are all-reduced, and those that are gathered."""

    reduced: int = 0
    gathered: int = 0

    @property
    def bytes(self) -> int:
        return self.reduced + self.gathered


def state(reduction: Expr, of: Of, item: int) -> State:
    """The state of one row (or column) of a reduction, with ``item`` bytes a number."""

    def width(e: Expr) -> int:
        return 1 if e.feature is None else of(str(e.feature))

    return State(*kind_of(reduction).exchanged_bytes(reduction, width, item))


def states(fold: Fold, of: Of, item: int, batch: int = 1) -> dict[str, State]:
    """Partial results of all reductions over ``"cols"`` (of one row) and ``"rows"`` (of one column), batch included."""
    found = {}
    for over in ("cols", "rows"):
        mine = [state(r, of, item) for r in fold.reductions if r.attrs[1] == over]
        found[over] = State(batch * sum(s.reduced for s in mine), batch * sum(s.gathered for s in mine))
    return found


def choose_grid(
    fold: Fold,
    of: Of,
    widths: Mapping[str, int],
    item: int,
    totals: tuple[int, int],
    ranks: int,
    asked: int | str | None,
    batch: int = 1,
) -> tuple[int, str]:
    """The grid of ranks that hold both rows and columns: W, and the side that stays while the other is sent.

    ``asked`` None is a ring: the side with fewer bytes is sent. ``"best"`` is the W with the fewest bytes sent; then
    the side with fewer bytes to hold stays. Pair inputs are never sent, so with one the rows stay."""
    if any(e.is_pair for e in fold.leaves):
        return ranks, "rows"
    choices = [w for w in range(ranks, 0, -1) if ranks % w == 0]
    if asked != "best":
        choices = [ranks, 1] if asked is None else [int(asked)]
    rows, cols = _count_side_bytes(fold, of, widths, item, totals, batch)
    slices = min(choices, key=lambda w: grid_bytes(rows, cols, ranks, w))
    fewest = rows / slices <= cols * slices / ranks
    return slices, "rows" if slices == ranks or (fewest and slices > 1) else "cols"


def _count_side_bytes(
    fold: Fold, of: Of, widths: Mapping[str, int], item: int, totals: tuple[int, int], batch: int
) -> tuple[float, float]:
    """Bytes of all rows and of all columns, with their results."""
    found = states(fold, of, item, batch)
    rows, cols = (widths[side] + found[over].bytes for side, over in (("rows", "cols"), ("cols", "rows")))
    return totals[0] * rows, totals[1] * cols


def count_sent(fold: Fold, of: Of, item: int, totals: tuple[int, int], ranks: tuple[int, int], batch: int = 1) -> float:
    """Bytes that one rank sends for a fold with rows over ``ranks[0]`` and columns over ``ranks[1]``, two groups."""
    total = 0.0
    here = {"cols": totals[0] / ranks[0], "rows": totals[1] / ranks[1]}
    for over, count in (("cols", ranks[1]), ("rows", ranks[0])):
        s = states(fold, of, item, batch)[over]
        total += reduce_bytes(here[over] * s.reduced, count) + gather_bytes(here[over] * s.gathered, count)
    return total


def count_sent_in_grid(
    fold: Fold,
    of: Of,
    widths: Mapping[str, int],
    item: int,
    totals: tuple[int, int],
    ranks: int,
    slices: int | str | None = None,
    batch: int = 1,
) -> float:
    """Bytes that one rank sends for a fold with rows and columns over one group, as ``mr.shard(slices=...)``.

    ``widths``: bytes of one row and of one column, batch included."""
    slices, _ = choose_grid(fold, of, widths, item, totals, ranks, slices, batch)
    return grid_bytes(*_count_side_bytes(fold, of, widths, item, totals, batch), ranks, slices)


# What a fold costs on many machines: row blocks × stretches of columns, states on disk between them.
#
# Extends ``candidates.py`` past one machine. A unit folds ``chunks`` chunks of columns over one block of rows on one
# worker; all units are alike, and workers take them one after the other:
#
#     unit     = chunks × seconds of one chunk (``candidates.py``) + bytes of its columns and rows / read rate
#                + bytes of its state, written, and read and written again by the merges / write rate + overhead
#     job      = ⌈units / workers⌉ × unit, and no less than the bytes that a machine reads / its disk's rate
#
# Traffic is equation 5 with l row blocks and r = 1: every block reads all columns once. The rates of disks and the
# overhead are assumptions, said with the figures.

DISK = 1.0e9  # bytes a second that one machine reads and writes: a solid-state disk or a shared file system
OVERHEAD = 0.03  # seconds of a unit besides: a Ray call, the checksum and the fsync of its state (benchmarks/ray.py)


@dataclass(frozen=True)
class ClusterCost:
    """The cost of one job; see :func:`estimate_cluster`."""

    rows: int
    cols: int
    workers: int
    machines: int
    units: int
    unit_seconds: float  # what one lost worker costs at most
    compute_seconds: float  # of all workers together
    read_bytes: float  # by one machine
    state_bytes: float  # written and read by one machine
    peak: int  # bytes that one worker holds
    seconds: float
    measured: bool = False  # whether a worker's speed was measured, not modelled

    def __str__(self) -> str:
        return (
            f"{self.rows:.3g} × {self.cols:.3g} pairs on {self.workers} workers of {self.machines} machines: "
            f"{_format_duration(self.seconds)} ({self.units} units of {_format_duration(self.unit_seconds)}; a machine "
            f"reads {self.read_bytes / 1e9:.3g} GB and moves {self.state_bytes / 1e9:.3g} GB of states; a worker holds "
            f"{self.peak / 1e6:.3g} MB; a worker's speed was {'measured here' if self.measured else 'not measured'})"
        )


def estimate_cluster(
    *,
    rows: int,
    cols: int,
    block: int,
    chunk: int,
    stretch: int,
    chunk_seconds: float,
    row_bytes: float,
    col_bytes: float,
    state_bytes: float,
    pair_bytes: int,
    workers: int,
    machines: int = 1,
    passes: int = 1,
    disk: float = DISK,
) -> ClusterCost:
    """The cost of ``rows`` × ``cols`` pairs in units of ``block`` rows × ``stretch`` columns.

    ``chunk_seconds``: of one worker for ``block`` rows × ``chunk`` columns; ``row_bytes``, ``col_bytes`` and
    ``state_bytes``: of one row, one column, and the state of one row; ``pair_bytes``: held of pairs at once.

    >>> cost = estimate_cluster(rows=8, cols=8, block=4, chunk=2, stretch=4, chunk_seconds=1.0, row_bytes=0,
    ...     col_bytes=0, state_bytes=0, pair_bytes=0, workers=2)
    >>> cost.units, cost.unit_seconds, cost.seconds, cost.compute_seconds
    (4, 2.03, 4.06, 8.0)
    """
    blocks, stretches = -(-rows // block), -(-cols // stretch)
    units = blocks * stretches * passes
    height, width = min(block, rows), min(stretch, cols)
    chunks = -(-width // chunk)
    each = disk * machines / workers  # a machine's disk is shared by its workers
    read = width * col_bytes + height * row_bytes / stretches  # a block's rows are read once
    moved = height * state_bytes * (1 + 3 * (stretches > 1))  # written; merges read two and write one, for two units
    total_read = passes * (blocks * cols * col_bytes + rows * row_bytes)
    compute = chunks * chunk_seconds
    unit = compute + (read + moved) / each + OVERHEAD
    return ClusterCost(
        rows,
        cols,
        workers,
        machines,
        units,
        unit,
        units * compute,
        total_read / machines,
        units * moved / machines,
        int(height * (row_bytes + 2 * state_bytes) + min(chunk, cols) * col_bytes) + pair_bytes,
        max(-(-units // workers) * unit, (total_read + units * moved) / machines / disk),
    )


def _format_duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
