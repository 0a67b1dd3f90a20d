"""Elementwise arithmetic of rows alone or columns alone, between passes, grouped into one kernel.

Examples are a row's ⟨g, P⟩, or a loss from its sums. ``torch_code.py`` runs such arithmetic node by node, one torch
call each; on a GPU a call costs more on the host than the arithmetic on the device. So neighbours are grouped as a
:class:`Side`, which is one kernel (``engines/triton/kernels/elementwise.py``) and whose gradient is again a side.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from ...program import constructors
from ...program.expression import Expr, node, topological
from ...program.philox import DRAWS
from ...program.primitives import PRIMITIVES
from ...program.reverse_mode import pull

_MIN_CALLS = 2  # torch calls from which on one kernel is faster
_CALLS = {"spread": 0, "word": 12, "mark": 36}  # torch calls of a node, if not one
_PER_PAIR = {*DRAWS} - {"word", "mark"}
_FREE = ("const", "nan", "size", "row_index", "col_index")  # known without being given


@dataclass(frozen=True)
class Side:
    """Expressions per row (or per column) of leaves; independent of the program that they come from."""

    axis: str
    leaves: tuple[Expr, ...]
    outputs: tuple[Expr, ...]


def _is_simple(e: Expr) -> bool:
    """Whether an expression is elementwise arithmetic of rows alone or columns alone that a kernel can compute."""
    known = e.op in ("fsum", "spread") or (
        e.op in PRIMITIVES and e.op not in _PER_PAIR and bool(PRIMITIVES[e.op].triton)
    )
    return known and e.rows != e.cols


FoundSide = tuple[Side, tuple[Expr, ...], tuple[Expr, ...]]  # what it is fed, and what its outputs are in the program


def find_sides(roots: Sequence[Expr], there: frozenset[Expr]) -> list[FoundSide]:
    """The groups of elementwise nodes under ``roots``, without those in ``there``."""
    order = topological(roots, stop=there.__contains__)
    found = (_find_side(axis, [e for e in order if e not in there], roots) for axis in ("rows", "cols"))
    return [side for side in found if side is not None]


def _find_side(axis: str, order: Sequence[Expr], roots: Sequence[Expr]) -> FoundSide | None:
    inside = {e for e in order if _is_simple(e) and e.rows is (axis == "rows")}
    inside -= _blocked_nodes(order, inside)
    if sum(_CALLS.get(e.op, 1) for e in inside) < _MIN_CALLS:
        return None
    used = {a for e in order if e not in inside for a in e.args}
    outputs = tuple(e for e in order if e in inside and (e in used or e in roots))
    under = topological(outputs, stop=lambda e: e not in inside)
    fed = tuple(e for e in under if e not in inside and e.op not in _FREE)
    return _with_numbered_leaves(axis, outputs, fed), fed, outputs


def _blocked_nodes(order: Sequence[Expr], inside: set[Expr]) -> set[Expr]:
    """The nodes that depend on a node outside which itself depends on one of these: they cannot be in one kernel."""
    waiting: set[Expr] = set()
    tainted: set[Expr] = set()
    for e in order:
        if any(a in tainted for a in e.args) or (e not in inside and any(a in inside for a in e.args)):
            tainted.add(e)
            if e in inside:
                waiting.add(e)
    return waiting


def _with_numbered_leaves(axis: str, outputs: tuple[Expr, ...], fed: tuple[Expr, ...]) -> Side:
    leaves = {
        e: node("leaf", (), (f"x{k}",), rows=e.rows, cols=e.cols, feature=e.feature, dtype=e.dtype)
        for k, e in enumerate(fed)
    }
    return Side(axis, tuple(leaves.values()), constructors.substitute(outputs, leaves))


@functools.lru_cache(maxsize=4096)
def differentiate_side(
    side: Side, asked: tuple[bool, ...], given: tuple[bool, ...]
) -> tuple[tuple[Expr, ...], tuple[Expr | None, ...]]:
    """The leaves that stand for the outputs' cotangents, and the gradient of each leaf (None: not asked for, or zero).

    Gradients have the axis of the side even if their leaf does not: the caller sums over it."""
    cotangents = tuple(
        node("leaf", (), (f"g{k}",), rows=e.rows, cols=e.cols, feature=e.feature, dtype="float")
        for k, e in enumerate(side.outputs)
    )
    seeds = [(e, g) for e, g, k in zip(side.outputs, cotangents, given, strict=True) if k and e.dtype == "float"]
    wrt = [e for e, want in zip(side.leaves, asked, strict=True) if want]
    pulled = dict(zip(wrt, pull(seeds, wrt), strict=True))
    return cotangents, tuple(pulled.get(e) for e in side.leaves)
