"""Lookups in a kernel's text: an entry of a table for every pair.

They are loads through the L1 cache: the entries of neighbours are neighbours, or the same. Hand-scheduled kernels look
up two kinds of tables. Bands have an entry for every diagonal in order (``kernels/histogram.py``): all places that
a thread reads are constants away from one another, and no tile reaches beyond the band. Others are read at a number of
the row plus one of the column (``kernels/histogram.py``), which are never outside of the table.
"""

from __future__ import annotations

from typing import Any

from ....program.expression import Expr
from .kernel_spec import Unsupported, literal

BAND_ROOM = 128  # entries beyond both ends of a band: as much as a tile reaches beyond the last row or column


def name_band(place: int) -> tuple[str, str]:
    """The name and the feature of a band that is the leaf at a place of a fold."""
    return f"x{place}", f"band{place}"


def is_band(table: Expr) -> bool:
    """True for a leaf that has an entry for every diagonal."""
    return table.op == "leaf" and str(table.feature).startswith("band")


def has_bands(tables: frozenset[Expr]) -> bool:
    """True when some of these tables are bands."""
    return any(map(is_band, tables))


def name_sum(place: int) -> str:
    """The feature of a table that is the leaf at a place of a fold, and is read at sums of two numbers."""
    return f"sum{place}"


def is_summed(table: Expr) -> bool:
    """True for a leaf that is read at a number of the row plus one of the column, never outside of it."""
    return table.op == "leaf" and str(table.feature).startswith("sum")


def are_prepared(tables: frozenset[Expr]) -> bool:
    """True when hand-scheduled kernels have all of these tables."""
    return all(is_band(e) or is_summed(e) for e in tables)


def write_lookup(v: Any, table: Expr, index: Expr) -> str:
    """The text of a lookup; NaN, or 0 of integers, outside of the table. ``v``: the kernel's writer."""
    if hasattr(v, "pair_layout") and is_band(table):
        return _look_up_band(v, table)
    if is_summed(table):
        row, col = map(v.number, index.args)  # both of 32 bits, as their sum is
        return v.to_arithmetic_type(f"tl.load({v.base(table)} + ({row} + {col}))", table, v.spec.type_of[table])
    if type(v).__name__ not in ("ExpressionWriter", "ListedWriter"):
        raise Unsupported("a table is looked up")
    name, at = table.attrs[0], v.number(index)
    outside = literal(float("nan") if table.dtype == "float" else 0)
    text = f"tl.load({v.base(table)} + {at} * {name}_f, mask=({at} >= 0) & ({at} < {name}_n), other={outside})"
    return v.to_arithmetic_type(text, table, v.spec.type_of[table])


def _look_up_band(v: Any, table: Expr) -> str:
    """In a Gluon kernel. The row is the kept index, or the folded one: places then fall, or rise, with the column."""
    rises = v.spec.over == "rows"
    cols, apart = ("kept_size", "start - kept_at") if rises else ("folded_size", "kept_at - start")
    first, half = f"{apart} + ({cols} + {BAND_ROOM - 1})", f"{table.attrs[0]}_n // 2"
    text = f"look_up_band({v.base(table)}, {first}, {half}, {1 if rises else -1}, {v.pair_layout})"
    return v.to_arithmetic_type(text, table, v.spec.type_of[table])


def write_look_up_band(spec: Any, folded: int) -> str:
    """The device function, for tiles of 64 kept and so many folded indices as an MMA leaves them.

    A thread has rows ``r`` and ``r + 8`` and columns ``2c + e + 8m``, in registers ``4m + 2h + e``: its places are a
    constant away from the first, those of its second row are those of its first and one more, and the two of an ``e``
    are one load of 8 bytes, from whichever copy of the band (the second begins one entry later) has them aligned."""
    rises = spec.over == "rows"
    sign = 1 if rises else -1
    down = sign if spec.diagonals is not None else -sign  # places from row r to row r + 8; kept indices may be reversed
    registers = folded // 2
    at = {(h, m): 32 * (down * h + sign * m) for h in range(2) for m in range(folded // 8)}
    names = {place: k for k, place in enumerate(sorted(set(at.values())))}
    lines = [f".reg .f32 t<{2 * len(names)}>;"]
    for place, k in names.items():
        lines.append(f"ld.global.nc.v2.f32 {{t{2 * k}, t{2 * k + 1}}}, [${registers} + {place}];")
    for (h, m), place in at.items():
        for e in range(2):
            lines.append(f"mov.f32 ${4 * m + 2 * h + e}, t{2 * names[place] + (e if rises else 1 - e)};")
    return _LOOK_UP_BAND.format(
        lower=0 if rises else 1,
        assembly="{ " + " ".join(lines) + " }",
        constraints=",".join(["=f"] * registers + ["l"] * registers),
        registers=registers,
    )


_LOOK_UP_BAND = """
@gluon.jit
def look_up_band(base, at, half, SIGN: tl.constexpr, like):
    # the entries at + SIGN x column: what a thread reads begins at its first pair of columns
    lane = tl.arange(0, like.shape[1], tl.SliceLayout(0, like.type.layout))
    first = at[:, None] + SIGN * lane[None, :] - {lower}
    place = base + (first + (first & 1) * (half - 1))
    return tl.inline_asm_elementwise(
        "{assembly}",
        "{constraints}",
        [place.to(tl.int64)],
        dtype=tl.float32,
        is_pure=True,
        pack={registers},
    )
"""
