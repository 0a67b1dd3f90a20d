"""Kernels of the gradient of a table: for every entry, the sum over the pairs that read it. No atomics, a fixed order.

Where the index is equal along diagonals, a program instance owns a band of them: it walks down the band, tile by tile,
and the same place of every tile lies on the same diagonal, so that tiles are added as they are. At the end the sum of
all tiles is skewed once, and added up along its diagonals. Where the index is a number of the row plus one of the
column, tiles that read the same entries at the same places are added as they are, too: those of all batch elements that
share the table and, where the index repeats itself along diagonals (places of a picture), those a period apart. At the
end the instance visits the entries between the least and the greatest of its tiles. For any other index a program
instance owns kept indices, as in other kernels, and some entries of the table; of each tile it visits the entries
between the least and the greatest that occur, and computes nothing where none does. Over lists (``cols=``) it is the
same: an instance owns every so many-th tile of kept indices, and walks their lists.
"""

from __future__ import annotations

import functools

from ....program.constructors import is_constant
from ....program.expression import Expr
from . import compiler, listed
from .compiler import Kernel, write_prologue
from .expressions import ExpressionWriter
from .kernel_spec import Spec

_TILE = [
    "folded_at = start + tl.arange(0, FOLDED)",
    "folded_in = within(folded_at, folded_size, RAGGED)",
]


@functools.lru_cache(maxsize=1024)
def compile_histogram(spec: Spec, entries: int, alike: tuple[int, int] | None = None) -> Kernel:
    """The kernel of a spec whose one reduction is a histogram; raises Unsupported where there is none.

    ``entries``: how many a program instance holds, a power of two; 0: it walks along diagonals. ``alike``: it adds up
    tiles that are alike; after how many tiles along a diagonal the index repeats itself (0: never), and how many
    entries lie between the least and the greatest of a tile."""
    v = ExpressionWriter(spec)
    if alike is not None:
        body = _walk_alike(v, *alike)
    else:
        body = _walk_rows(v, entries) if entries else _walk_diagonals(v)
    return compiler.describe_kernel(v, compiler.write_function(spec, body), {}, False)


def _walk_alike(v: ExpressionWriter, period: int, width: int) -> list[str]:
    """``out0`` is ``[batch elements that share no table, classes of tiles, parts, width]``: the sums of ``width``
    entries from the least of a class on. Batch elements that share a table come first, and are divided into parts."""
    value, index, _ = v.spec.fold.reductions[0].args
    own = ("tile =", "kept_at =", "kept_in =", "batch =", "part =")
    fixed = [line for line in write_prologue(v.spec) if not line.startswith(own)]
    if period:  # a band of diagonals, and where on it: from there on in steps of a period
        pick = [
            f"band, turn = group // {period}, group % {period}",
            "shift = band - (kept_tiles - 1)  # from a kept tile to the folded tile that it meets",
            "begin = tl.maximum(0, -shift)",
            f"begin += (turn - begin % {period} + {period}) % {period}",
            "end = tl.minimum(kept_tiles, folded_tiles - shift)",
        ]
    else:
        pick = ["begin = group // folded_tiles", "shift = group % folded_tiles - begin", "end = begin + 1"]
    enter = [
        "kept_at = tile * KEPT + tl.arange(0, KEPT)",
        "kept_in = kept_at < kept_size",
        "start = (tile + shift) * FOLDED",
        *_TILE,
    ]
    places = ExpressionWriter(v.spec)
    places.loop(True)
    at = places.full(index)
    return [
        "part = tl.program_id(0) % parts",
        "group = tl.program_id(0) // parts % (tiles // parts)",
        "rests = tl.num_programs(0) // tiles",
        "sharing = batches // rests",
        "kept_tiles = tl.cdiv(kept_size, KEPT)",
        "folded_tiles = tl.cdiv(folded_size, FOLDED)",
        *pick,
        f"total = tl.zeros([KEPT, FOLDED], {v.float})",
        "for one in range(part, sharing, parts):",
        "    batch = one * rests + tl.program_id(0) // tiles",
        *(f"    {line}" for line in fixed),
        f"    for tile in range(begin, end, {period or 1}):",
        *(f"        {line}" for line in (*enter, *_add_tile(v, value))),
        "# the entries of a tile, those beyond the ends too: it is the same in all of them",
        "tile = begin",
        *(line for line in fixed if not line.startswith(("b", "rest"))),
        *enter,
        *places.before,
        *places.inside,
        f"place = {at}.to(tl.int32)",
        "first = tl.min(place)",
        f"out = out0 + tl.cast(tl.program_id(0), tl.int64) * {width}",
        f"for one in range(0, {width}):",
        "    tl.store(out + one, tl.sum(tl.sum(tl.where(place == first + one, total, 0), 1), 0))",
    ]


def _walk_diagonals(v: ExpressionWriter) -> list[str]:
    """``out0`` is ``[batch, bands, KEPT + 2, FOLDED]``: room for the sum of all tiles, then the sums along its
    diagonals, those at and below the main one first."""
    value = v.spec.fold.reductions[0].args[0]
    own = ("tile =", "kept_at =", "kept_in =")  # of the tile, which changes in the loop here
    fixed = [line for line in write_prologue(v.spec) if not line.startswith(own)]
    return [
        "band = tl.program_id(0) % tiles",
        *fixed,
        "kept_tiles = tl.cdiv(kept_size, KEPT)",
        "shift = band - (kept_tiles - 1)  # from a kept tile to the folded tile that it meets",
        f"total = tl.zeros([KEPT, FOLDED], {v.float})",
        "for tile in range(tl.maximum(0, -shift), tl.minimum(kept_tiles, tl.cdiv(folded_size, FOLDED) - shift)):",
        "    kept_at = tile * KEPT + tl.arange(0, KEPT)",
        "    kept_in = kept_at < kept_size",
        "    start = (tile + shift) * FOLDED",
        *(f"    {line}" for line in (*_TILE, *_add_tile(v, value))),
        "room = out0 + tl.cast(tl.program_id(0), tl.int64) * ((KEPT + 2) * FOLDED)",
        "row = tl.arange(0, KEPT)[:, None]",
        "lane = tl.arange(0, FOLDED)[None, :]",
        "tl.store(room + row * FOLDED + lane, total)",
        "tl.debug_barrier()",
        "below = tl.load(room + row * FOLDED + row - lane, mask=row >= lane, other=0)",
        "above = tl.load(room + row * FOLDED + row - lane + FOLDED, mask=row < lane, other=0)",
        "sums = room + KEPT * FOLDED + tl.arange(0, FOLDED)",
        "tl.store(sums, tl.sum(below, 0))",
        "tl.store(sums + FOLDED, tl.sum(above, 0))",
    ]


def _add_tile(v: ExpressionWriter, value: Expr) -> list[str]:
    """The lines that add a tile to ``total``; nothing is computed where a condition hides all of its pairs."""
    v.loop(True)
    condition = _find_condition(value)
    if condition is not None:
        seen = v.full(condition)
    known = [*v.before, *v.inside]
    text = v.bind_masked(v.full(value), "0")
    rest = [line for line in (*v.before, *v.inside) if line not in known]
    rest.append(f"total += tl.where(kept_in[:, None], {text}, 0)")
    if condition is None:
        return [*known, *rest]
    return [*known, f"if tl.max({seen}.to(tl.int32)) > 0:", *(f"    {line}" for line in rest)]


def _find_condition(value: Expr) -> Expr | None:
    """A condition without which a number is zero."""
    stack = [value]
    while stack:
        e = stack.pop()
        if e.op == "where" and is_constant(e.args[2], 0) and e.args[0].is_pair:
            return e.args[0]
        if e.op in ("mul", "neg", "cast"):
            stack += e.args
        elif e.op == "div":
            stack.append(e.args[0])
    return None


def _walk_rows(v: ExpressionWriter, entries: int) -> list[str]:
    """``out0`` is ``[batch, kept tiles, entries of the table]``; instances of a tile divide the entries."""
    fixed = [line for line in write_prologue(v.spec) if not line.startswith(("tile =", "batch ="))]
    tile = _EntriesOfTile(v)
    return [
        "tile = tl.program_id(0) % tiles",
        *_choose_entries(v, entries),
        *fixed,
        *tile.invariant,
        "for t in range(0, tl.cdiv(folded_size, FOLDED)):",
        "    start = t * FOLDED",
        *(f"    {line}" for line in (*_TILE, *tile.lines)),
        *_store_entries(v, entries, "tile"),
    ]


def compile_listed_histogram(spec: Spec, entries: int) -> Kernel:
    """The same over lists. ``out0`` is ``[batch, parts, entries of the table]``: a part has every so many-th tile of
    kept indices, from its own number on; the kernel is given ``parts`` as the number of tiles."""
    v, size = listed.ListedWriter(spec), spec.listing.kept_block
    prologue = [line for line in write_prologue(spec) if not line.startswith(("tile =", "batch ="))]
    kept, tile_range = listed.write_kept(spec), listed.write_tile_range(v)
    tile, count = _EntriesOfTile(v), f"groups * (({size} + KEPT - 1) // KEPT)" if size else "tl.cdiv(kept_size, KEPT)"
    once = [*tile.invariant, *tile_range, *listed.join_loop(spec, tile.lines)]
    body = [
        "part = tl.program_id(0) % tiles",
        *_choose_entries(v, entries),
        *prologue[: len(prologue) - len(kept)],
        f"for tile in range(part, {count}, tiles):",
        *(f"    {line}" for line in (*kept, *once)),
        *_store_entries(v, entries, "part"),
    ]
    return compiler.describe_kernel(v, compiler.write_function(spec, body), {}, False)


class _EntriesOfTile:
    """What a tile adds to the entries from ``first_entry`` on; ``invariant``: lines before the loop over tiles."""

    def __init__(self, v: ExpressionWriter):
        value, index, table = v.spec.fold.reductions[0].args
        v.loop(True)
        at = v.full(index)
        before, known = len(v.before), [*v.inside]
        number = v.full(value)
        self.invariant, rest = v.before[:before], [*v.before[before:], *v.inside[len(known) :]]
        self.lines = [
            *known,
            f"inside = kept_in[:, None] & folded_in[None, :] & ({at} >= first_entry) & ({at} < last_entry)",
            f"place = tl.where(inside, {at}, -1).to(tl.int32)",
            "last = tl.max(place)",
            "if last >= 0:",
            *(f"    {line}" for line in rest),
            f"    for one in range(tl.min(tl.where(inside, place, {table.attrs[0]}_n)), last + 1):",
            f"        this = tl.sum(tl.sum(tl.where(place == one, {number}, 0), 1), 0)",
            "        total += tl.where(entry == one, this, 0)",
        ]


def _choose_entries(v: ExpressionWriter, entries: int) -> list[str]:
    """The batch element of a program instance, and which entries of the table it sums up."""
    count = f"{v.spec.fold.reductions[0].args[2].attrs[0]}_n"
    return [
        f"shares = tl.cdiv({count}, {entries})",
        f"first_entry = tl.program_id(0) // tiles % shares * {entries}",
        "batch = tl.program_id(0) // tiles // shares",
        f"last_entry = tl.minimum(first_entry + {entries}, {count})",
        f"entry = first_entry + tl.arange(0, {entries})",
        f"total = tl.zeros([{entries}], {v.float})",
    ]


def _store_entries(v: ExpressionWriter, entries: int, part: str) -> list[str]:
    count = f"{v.spec.fold.reductions[0].args[2].attrs[0]}_n"
    return [
        f"out = out0 + (tl.cast(batch, tl.int64) * tiles + {part}) * {count}",
        f"tl.store(out + entry, total, mask=entry < {count})",
    ]
