"""What a sharded fold says to the other ranks, in bytes: the papers' equations 5 and 9, and what our layouts send.

Counts are bytes sent by one rank, on average over the ranks; a model of time adds a latency per message and divides by
the bandwidth. ``rows × cols`` pairs; ``A`` and ``B`` are the bytes of one row's and one column's inputs, ``P`` those of
one row's result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..program.expr import Expr
from ..program.lower import Fold

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
    """A turn of the ring: all travellers (``moving`` bytes over all ranks) visit every other rank; what is carried for
    them also comes home."""
    return ((ranks - 1) * moving + ranks * carried) / ranks


@dataclass(frozen=True)
class State:
    """What combining one result of a reduction takes: bytes that are reduced, and bytes that are gathered."""

    reduced: int = 0
    gathered: int = 0

    @property
    def bytes(self) -> int:
        return self.reduced + self.gathered


_PLACE = 8  # an index


def state(reduction: Expr, of: Of, item: int) -> State:
    """The state of one row (or column) of a reduction, with ``item`` bytes a number."""
    kind, _, params = reduction.attrs
    width = lambda e: 1 if e.feature is None else of(str(e.feature))
    if kind == "sum":
        return State(width(reduction.args[0]) * (item if reduction.args[0].dtype == "float" else _PLACE))
    if kind == "pick":
        return State(width(reduction.args[2]) * item)
    if kind == "soft":
        return State((2 + sum(map(width, reduction.args[1:]))) * item)
    if kind == "best":
        return State((item if reduction.args[0].dtype == "float" else _PLACE) + _PLACE)
    if kind == "topk":
        return State(gathered=params[0] * (item + _PLACE))
    if kind == "moments":
        return State(gathered=3 * item)
    return State(gathered=sum(map(width, reduction.args)) * item)


def states(fold: Fold, of: Of, item: int) -> dict[str, State]:
    """The states of all reductions over ``"cols"`` (of one row) and over ``"rows"`` (of one column)."""
    found = {}
    for over in ("cols", "rows"):
        mine = [state(r, of, item) for r in fold.reductions if r.attrs[1] == over]
        found[over] = State(sum(s.reduced for s in mine), sum(s.gathered for s in mine))
    return found


def travels(fold: Fold, of: Of, widths: Mapping[str, int], item: int, totals: tuple[int, int]) -> str:
    """Which side goes round the ring: the one that is less to send, with the results that it carries."""
    found = states(fold, of, item)
    cols = totals[1] * (widths["cols"] + found["rows"].bytes)
    rows = totals[0] * (widths["rows"] + found["cols"].bytes)
    return "rows" if rows < cols else "cols"


def sent(fold: Fold, of: Of, item: int, totals: tuple[int, int], ranks: tuple[int, int]) -> float:
    """Bytes that one rank sends for a fold with rows over ``ranks[0]`` and columns over ``ranks[1]`` (two groups)."""
    total = 0.0
    here = {"cols": totals[0] / ranks[0], "rows": totals[1] / ranks[1]}
    for over, count in (("cols", ranks[1]), ("rows", ranks[0])):
        s = states(fold, of, item)[over]
        total += reduce_bytes(here[over] * s.reduced, count) + gather_bytes(here[over] * s.gathered, count)
    return total


def sent_in_a_ring(
    fold: Fold, of: Of, widths: Mapping[str, int], item: int, totals: tuple[int, int], ranks: int
) -> float:
    """Bytes that one rank sends for a fold with rows and columns over one group."""
    side = travels(fold, of, widths, item, totals)
    other, count = ("cols", totals[0]) if side == "rows" else ("rows", totals[1])
    return ring_bytes(count * widths[side], count * states(fold, of, item)[other].bytes, ranks)
