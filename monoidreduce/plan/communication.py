"""What a sharded fold says to the other ranks, in bytes: the papers' equations 5 and 9, and what our layouts send.

Counts are bytes sent by one rank, on average over the ranks; a model of time adds a latency per message and divides by
the bandwidth. ``rows × cols`` pairs; ``A`` and ``B`` are the bytes of one row's and one column's inputs, ``P`` those of
one row's result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..program.expression import Expr
from ..program.lower import Fold
from ..reductions import kind_of

Of = Callable[[str], int]  # the size of a feature letter


def forward_cost(l: int, r: int, L: int, R: int, A: int, B: int, P: int, W: float = 1) -> float:
    """Equation 5: all bytes read and combined when L rows in l slices meet R columns in r slices.

    A worker that takes W column slices for each row slice reads the row slice once and combines them by itself.

    >>> forward_cost(l=1, r=1, L=10, R=20, A=4, B=8, P=4)
    200.0
    """
    groups = r / W
    return groups * L * A + l * R * B + (groups - 1) * L * P


def backward_cost(l: int, r: int, L: int, R: int, A: int, B: int, P: int, W: float = 1) -> float:
    """Equation 9: the same for the gradients, which read results and cotangents too and add up on both sides.

    >>> backward_cost(l=1, r=1, L=10, R=20, A=4, B=8, P=4)
    480.0
    """
    return 2 * (r / W) * L * (A + P) + 2 * l * R * B


def best_mesh(ranks: int, L: int, R: int, A: int, B: int, P: int) -> tuple[int, int]:
    """The mesh (rows over l, columns over r, l × r = ranks) that equations 5 and 9 together find cheapest.

    >>> best_mesh(8, L=1000, R=10, A=4, B=4, P=4)
    (8, 1)
    """
    shapes = [(l, ranks // l) for l in range(1, ranks + 1) if ranks % l == 0]
    cost = lambda l, r: forward_cost(l, r, L, R, A, B, P) + backward_cost(l, r, L, R, A, B, P)
    return min(shapes, key=lambda shape: cost(*shape))


# What the collectives send -----------------------------------------------------------------------------------


def reduce_bytes(payload: float, ranks: int) -> float:
    """A ring all-reduce: every byte twice, less what stays."""
    return 2 * (ranks - 1) / ranks * payload


def gather_bytes(payload: float, ranks: int) -> float:
    """An all-gather of ``payload`` from each."""
    return (ranks - 1) * payload


def ring_bytes(moving: float, carried: float, ranks: int) -> float:
    """A turn of the ring: all travellers (``moving`` bytes over all ranks) visit every other rank, and what is found
    for them there (``carried``) comes home."""
    return (ranks - 1) / ranks * (moving + carried)


def grid_bytes(rows: float, cols: float, ranks: int, slices: int) -> float:
    """A rank's share where each takes the columns of ``slices`` ranks: equation 5 with l = W and r = ``ranks``.

    ``rows`` and ``cols`` are bytes of all rows and of all columns, with their results: (r / W - 1) rows' are sent, and
    (l - 1) columns'. With ``slices = ranks`` only columns are sent (a ring), with 1 only rows.

    >>> [grid_bytes(100, 100, 16, w) for w in (1, 2, 4, 8, 16)]
    [93.75, 50.0, 37.5, 50.0, 93.75]
    """
    return ((ranks / slices - 1) * rows + (slices - 1) * cols) / ranks


@dataclass(frozen=True)
class State:
    """What combining one result of a reduction takes: bytes that are reduced, and bytes that are gathered."""

    reduced: int = 0
    gathered: int = 0

    @property
    def bytes(self) -> int:
        return self.reduced + self.gathered


def state(reduction: Expr, of: Of, item: int) -> State:
    """The state of one row (or column) of a reduction, with ``item`` bytes a number."""
    width = lambda e: 1 if e.feature is None else of(str(e.feature))
    return State(*kind_of(reduction).exchanged_bytes(reduction, width, item))


def states(fold: Fold, of: Of, item: int, batch: int = 1) -> dict[str, State]:
    """The states of all reductions over ``"cols"`` (of one row) and ``"rows"`` (of one column), of the whole batch."""
    found = {}
    for over in ("cols", "rows"):
        mine = [state(r, of, item) for r in fold.reductions if r.attrs[1] == over]
        found[over] = State(batch * sum(s.reduced for s in mine), batch * sum(s.gathered for s in mine))
    return found


def arrange(
    fold: Fold,
    of: Of,
    widths: Mapping[str, int],
    item: int,
    totals: tuple[int, int],
    ranks: int,
    asked: int | str | None,
    batch: int = 1,
) -> tuple[int, str]:
    """How ranks that have both rows and columns stand: W, and the side that stays while the other travels.

    None is a ring: the side that is less to send travels. ``"best"`` is the W with the least to send; then the side
    that is less to hold stays. What is given per pair is never sent, so its rows stay."""
    if any(e.is_pair for e in fold.leaves):
        return ranks, "rows"
    choices = [w for w in range(ranks, 0, -1) if ranks % w == 0]
    if asked != "best":
        choices = [ranks, 1] if asked is None else [int(asked)]
    rows, cols = _sides(fold, of, widths, item, totals, batch)
    slices = min(choices, key=lambda w: grid_bytes(rows, cols, ranks, w))
    fewest = rows / slices <= cols * slices / ranks
    return slices, "rows" if slices == ranks or (fewest and slices > 1) else "cols"


def _sides(
    fold: Fold, of: Of, widths: Mapping[str, int], item: int, totals: tuple[int, int], batch: int
) -> tuple[float, float]:
    """Bytes of all rows and of all columns, with the results that belong to them."""
    found = states(fold, of, item, batch)
    rows, cols = (widths[side] + found[over].bytes for side, over in (("rows", "cols"), ("cols", "rows")))
    return totals[0] * rows, totals[1] * cols


def sent(fold: Fold, of: Of, item: int, totals: tuple[int, int], ranks: tuple[int, int], batch: int = 1) -> float:
    """Bytes that one rank sends for a fold with rows over ``ranks[0]`` and columns over ``ranks[1]`` (two groups)."""
    total = 0.0
    here = {"cols": totals[0] / ranks[0], "rows": totals[1] / ranks[1]}
    for over, count in (("cols", ranks[1]), ("rows", ranks[0])):
        s = states(fold, of, item, batch)[over]
        total += reduce_bytes(here[over] * s.reduced, count) + gather_bytes(here[over] * s.gathered, count)
    return total


def sent_in_a_grid(
    fold: Fold,
    of: Of,
    widths: Mapping[str, int],
    item: int,
    totals: tuple[int, int],
    ranks: int,
    slices: int | str | None = None,
    batch: int = 1,
) -> float:
    """Bytes that one rank sends for a fold with rows and columns over one group, as ``mr.shard(slices=...)`` has it.

    ``widths`` are bytes of all of the batch for one row and one column."""
    slices, _ = arrange(fold, of, widths, item, totals, ranks, slices, batch)
    return grid_bytes(*_sides(fold, of, widths, item, totals, batch), ranks, slices)
