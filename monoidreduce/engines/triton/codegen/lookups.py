"""Lookups in a kernel's text: an entry of a table for every pair.

They are loads through the L1 cache: the entries of neighbours are neighbours, or the same. Hand-scheduled kernels look
up bands alone, which have an entry for every diagonal in order (``kernels/diagonal_bands.py``): all places that a
thread reads are constants away from one another, and no tile reaches beyond the band.
"""

from __future__ import annotations

from typing import Any

from ....program.expression import Expr
from .exponents import literal
from .kernel_spec import Unsupported

BAND_ROOM = 128  # entries beyond both ends of a band: as much as a tile reaches beyond the last row or column


def name_band(place: int) -> tuple[str, str]:
    """The name and the feature of a band that is the leaf at a place of a fold."""
    return f"x{place}", f"band{place}"


def is_band(table: Expr) -> bool:
    """True for a leaf that has an entry for every diagonal."""
    return table.op == "leaf" and str(table.feature).startswith("band")


def reads_bands_alone(tables: frozenset[Expr]) -> bool:
    """True when hand-scheduled kernels have all of these tables."""
    return all(is_band(e) for e in tables)


def write_lookup(v: Any, table: Expr, index: Expr) -> str:
    """The text of a lookup; NaN, or 0 of integers, outside of the table. ``v``: the kernel's writer."""
    if hasattr(v, "pair_layout") and is_band(table):
        return _look_up_band(v, table)
    if type(v).__name__ not in ("ExpressionWriter", "ListedWriter"):
        raise Unsupported("a table is looked up")
    name, at = table.attrs[0], v.number(index)
    outside = literal(float("nan") if table.dtype == "float" else 0)
    text = f"tl.load({v.base(table)} + {at} * {name}_f, mask=({at} >= 0) & ({at} < {name}_n), other={outside})"
    return v._loaded(text, table, v.spec.type_of[table])


def _look_up_band(v: Any, table: Expr) -> str:
    """In a Gluon kernel. The row is the kept index, or the folded one: places then fall, or rise, with the column."""
    rises = v.spec.over == "rows"
    cols, apart = ("kept_size", "start - kept_at") if rises else ("folded_size", "kept_at - start")
    text = f"look_up_band({v.base(table)}, {apart} + ({cols} + {BAND_ROOM - 1}), {1 if rises else -1}, {v.pair_layout})"
    return v._loaded(text, table, v.spec.type_of[table])


# Layouts of [KEPT, EIGHTS, 8]: an index inside an eight varies within a thread, which eight it is by constants, so that
# these are part of the instructions that load.
LOOK_UP_BAND = """
@gluon.jit
def look_up_band(base, at, SIGN: tl.constexpr, like):
    # the entries at + SIGN x column
    KEPT: tl.constexpr = like.shape[0]
    EIGHTS: tl.constexpr = like.shape[1] // 8
    LAYOUT: tl.constexpr = tl.reshape(like, [KEPT, EIGHTS, 8]).type.layout
    EIGHT: tl.constexpr = tl.SliceLayout(1, LAYOUT)
    at = tl.convert_layout(at, tl.SliceLayout(1, EIGHT))[:, None]
    near = base + (at + SIGN * tl.arange(0, 8, tl.SliceLayout(0, EIGHT))[None, :])
    more = tl.arange(0, EIGHTS, tl.SliceLayout(0, tl.SliceLayout(2, LAYOUT))) * (8 * SIGN)
    found = tl.load(near[:, None, :] + more[None, :][:, :, None])
    return tl.convert_layout(tl.reshape(found, [KEPT, EIGHTS * 8]), like.type.layout)
"""
