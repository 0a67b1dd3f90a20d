"""Kernels that walk lists: a group of kept indices folds the blocks of the folded axis that a list names.

Lists are compressed rows (CSR): group g folds the blocks ``items[offsets[g]:offsets[g + 1]]``. The number of the next
block is loaded while a tile is computed, so that its own loads need not wait for it. A tile lies in one block and its
leaves are read as in any other kernel, from the block's place on; or, where blocks are narrow (edges have one index),
it holds several, and leaves are gathered index by index. Positions along a list count from 0 (``spot``).

A program instance of one kept index (edges, whose rows have lists of their own) multiplies number by number, in the
type of the accumulators: a matrix product would be mostly padding. Query heads that share keys and lists are rows of
one tile (``Spec.grouped``), so that what they fold is read once.
"""

from __future__ import annotations

import functools
import re

from ....program.expression import Expr
from . import few_rows
from .expressions import ExpressionWriter
from .kernel_spec import COPIES, ONCE, TINY, LoopBodies, Spec

_EACH = "folded_lane[:, :, None]", "folded_in[:, :, None]"
_LOAD = re.compile(r"\w+_write_entry\w* = tl\.load\(")  # of vectors, which needs nothing that a tile computes


def list_arguments(spec: Spec) -> tuple[list[str], list[str]]:
    """The parameters of the lists, in the order in which ``kernels/listed_launch.py`` gives them, and those that Triton
    must not specialize on."""
    tensors = ["offsets", "items"] + ["ends"] * spec.listing.ends + ["entries"] * spec.listing.entries
    numbers = ["groups", *["entry_count"] * spec.listing.numbered, *(f"list_b{k}" for k in range(spec.rank))]
    return [*tensors, *numbers], numbers


def write_kept(spec: Spec) -> list[str]:
    """Lines after the batch element: the group of this program instance, its kept indices and its list."""
    listing = spec.listing
    if listing.role != "lists":
        return _write_window(spec)
    if listing.each:
        return _write_each(spec)
    size = listing.kept_block  # 0: all kept indices
    if listing.tiles:
        lines = [f"group = tile // {listing.tiles}" if size else "group = 0"]
        lines += ["kept_at = tile * KEPT + tl.arange(0, KEPT)", "kept_in = kept_at < kept_size"]
        lines += ["kept_lane = tl.arange(0, KEPT).to(INT)"]
    elif not size:
        lines = ["group = 0", "kept_start = tile * KEPT", "kept_at = kept_start + tl.arange(0, KEPT)"]
        lines += ["kept_in = kept_at < kept_size", "kept_lane = tl.arange(0, KEPT).to(INT)"]
        lines += ["kept_row = kept_at % period", "kept_group = kept_at // period"] if spec.grouped else []
    elif spec.grouped:  # a group's indices of each batch element that is part of the kept axis
        lines = [
            f"per_group = tl.cdiv(kept_size // period * {size}, KEPT)",
            "group = tile // per_group",
            "member = tile % per_group * KEPT + tl.arange(0, KEPT)",
            f"kept_group = member // {size}",
            f"kept_row = group * {size} + member % {size}",
            "kept_in = (kept_group < kept_size // period) & (kept_row < period)",
            "kept_start = 0",
            "kept_at = kept_group * period + kept_row",
            "kept_lane = kept_at.to(INT)",
        ]
    else:
        per_group = f"(({size} + KEPT - 1) // KEPT)"
        lines = [
            f"group = tile // {per_group}",
            f"member = tile % {per_group} * KEPT + tl.arange(0, KEPT)",
            f"kept_start = group * {size} + tile % {per_group} * KEPT",
            "kept_at = kept_start + tl.arange(0, KEPT)",
            f"kept_in = (kept_at < kept_size) & (member < {size})",
            "kept_lane = tl.arange(0, KEPT).to(INT)",
        ]
    count = f"tl.cast(tl.load(offsets + listing + 1) - list_first, tl.int32) * {listing.folded_block}"
    return [
        *lines,
        "folded_lane = tl.arange(0, FOLDED).to(INT)",
        "# its list: where it begins, and how many folded indices it has",
        f"listing = ({_list_number(spec)}) * groups + group",
        "list_first = tl.load(offsets + listing)",
        f"positions = {count}",
        *(["positions = tl.minimum(positions, tl.cast(tl.load(ends + listing), tl.int32))"] if listing.ends else []),
        *([f"positions = tl.where(positions > {2 * listing.window}, 0, positions)"] if listing.window else []),
    ]


def _list_number(spec: Spec) -> str:
    """Which of the domain's batch elements this is."""
    return " + ".join(f"b{k} * list_b{k}" for k in range(spec.rank))


def _write_each(spec: Spec) -> list[str]:
    """The same of several kept indices, each with a list of its own."""
    window = spec.listing.window
    return [
        "kept_start = tile * KEPT",
        "kept_at = kept_start + tl.arange(0, KEPT)",
        "kept_in = kept_at < kept_size",
        "kept_lane = tl.arange(0, KEPT).to(INT)",
        "# its lists: where they begin, and how many folded indices they have",
        f"listing = offsets + ({_list_number(spec)}) * groups + kept_at",
        "list_first = tl.load(listing, mask=kept_in, other=0)",
        "list_last = tl.load(listing + 1, mask=kept_in, other=0)",
        "positions = tl.cast(list_last - list_first, tl.int32)",
        *([f"positions = tl.where(positions > {2 * window}, 0, positions)"] if window else []),
        "longest = tl.max(positions, 0)",
        "list_first, positions = list_first[:, None], positions[:, None]",
    ]


def _write_window(spec: Spec) -> list[str]:
    """The same of one window of all entries: the long list that it lies in, and which of its entries are folded here.

    A list's first window also has the entries before it. To combine windows, the program instance of a list's first
    one folds them as its entries; all others are idle."""
    size, windows = spec.listing.window, spec.listing.role == "windows"
    lines = [
        f"lists = offsets + ({_list_number(spec)}) * groups",
        f"window_first = tl.load(lists).to(tl.int64) + tile.to(tl.int64) * {size}",
        "group = find_list(lists, groups, window_first)",
        "list_start = tl.load(lists + group).to(tl.int64)",
        "list_end = tl.load(lists + group + 1).to(tl.int64)",
        f"leads = window_first - {size} < list_start",
        f"long = (list_end - list_start > {2 * size}) & (window_first < list_end)",
    ]
    if windows:
        count = f"tl.minimum(window_first + {size}, list_end) - list_first"
        lines += ["list_first = tl.where(leads, list_start, window_first)"]
        lines += [f"positions = tl.where(long, {count}, 0).to(tl.int32)"]
    else:
        each = f" * {spec.listing.numbers}" if spec.listing.numbers > 1 else ""
        count = f"tl.cdiv(list_end - window_first, {size}){each}"
        lines += [f"list_first = tile{each}", f"positions = tl.where(long & leads, {count}, 0).to(tl.int32)"]
    return [
        *lines,
        "kept_start = group",
        "kept_at = kept_start + tl.arange(0, KEPT)",
        "kept_in = kept_at < tl.where(positions > 0, kept_size, 0)",
        "kept_lane = tl.arange(0, KEPT).to(INT)",
        "folded_lane = tl.arange(0, FOLDED).to(INT)",
    ]


def tile_of_step(spec: Spec, step: str) -> str:
    """The tile of the folded axis that a step along the list computes; beyond the axis where the list is empty."""
    tiles = _write_tile_count(spec)
    block = f"tl.cast(tl.load(items + tl.where(positions > 0, list_first + {step} // {tiles}, 0)), tl.int32)"
    return f"tl.where(positions > 0, {block} * {tiles} + {step} % {tiles}, tl.cdiv(folded_size, FOLDED))"


@functools.lru_cache(maxsize=1024)
def find_upper_limits(spec: Spec) -> tuple[few_rows.Limit, ...] | None:
    """The conditions of a fold over positions, where each is a limit that positions lie below and that rises with the
    kept index (causal): the first tiles are then whole. None where some condition is another."""
    limits = few_rows.find_limits(spec.fold, spec.over) if spec.listed is not None and spec.listing.logical else None
    if limits is None or not all(op in ("lt", "le") and _rises(spec, bound) for op, bound in limits):
        return None
    return limits


def _rises(spec: Spec, e: Expr) -> bool:
    """True when an integer is the kept index and numbers of the batch element, added or subtracted."""
    if e.op == "add":
        return all(_rises(spec, a) for a in e.args)
    if e.op == "sub":
        return _rises(spec, e.args[0]) and not spec.keeps(e.args[1]) and _rises(spec, e.args[1])
    return e.op in ("const", "size") or (e.op == "leaf" and not e.is_pair and not spec.keeps(e)) or _is_kept(spec, e)


def _is_kept(spec: Spec, e: Expr) -> bool:
    return e.op in ("row_index", "col_index") and not e.op.startswith(spec.over[:3])


def write_limit(spec: Spec, e: Expr, kept: str) -> str:
    """Such an integer as a scalar; ``kept``: the kept index."""
    if _is_kept(spec, e):
        return kept
    if e.op == "const":
        return repr(e.const)
    if e.op == "size":
        return "folded_size" if e.attrs[0] == spec.over else "kept_size"
    if e.op == "leaf":
        x = str(e.attrs[0])
        if spec.is_number(e):
            return f"{x}_number"
        return f"tl.cast(tl.load({x}_ptr{''.join(f' + b{k} * {x}_b{k}' for k in spec.kept_batch)}), tl.int32)"
    first, second = (write_limit(spec, a, kept) for a in e.args)
    return f"({first} {'+' if e.op == 'add' else '-'} {second})"


def write_steps(spec: Spec, kept: int) -> list[str]:
    """Lines of a hand-scheduled kernel: how many tiles it visits, of which the first ones are whole. ``kept``: indices
    of an instance."""
    if not spec.listing.ends:
        return ["whole_steps = positions // FOLDED", "steps = tl.maximum(whole_steps, 1)"]
    lines = ["whole_steps = positions // FOLDED", "steps = tl.cdiv(positions, FOLDED)"]
    for op, bound in find_upper_limits(spec) or ():
        least = write_limit(spec, bound, f"tile * {kept}")
        most = write_limit(spec, bound, f"(tl.minimum(tile * {kept} + {kept}, kept_size) - 1)")
        more = " + 1" if op == "le" else ""
        lines.append(f"whole_steps = tl.minimum(whole_steps, tl.maximum({least}{more}, 0) // FOLDED)")
        lines.append(f"steps = tl.minimum(steps, tl.cdiv(tl.maximum({most}{more}, 0), FOLDED))")
    return [*lines, "steps = tl.maximum(steps, 1)"]


def write_tile_range(v: ExpressionWriter) -> list[str]:
    """Lines that say which tiles of the list are visited: whole ones (all, where no block is cut), then the others."""
    size = "longest" if v.spec.listing.each else "positions"
    lines = few_rows.write_tile_range(v, size, limited=v.spec.listing.logical)
    return [*lines, "whole_first = begin", "whole_last = begin if RAGGED else end"] if walks_twice(v.spec) else lines


def walks_twice(spec: Spec) -> bool:
    """True when whole tiles have a loop of their own, without masks: for a guessed maximum and delayed products."""
    return not spec.listing.gathered and bool(spec.guess or spec.descriptors)


def write_first(spec: Spec, t: str) -> list[str]:
    """Lines before a loop from tile ``t`` on: load the number of its first block."""
    listed = spec.listing
    if listed.role == "combine":
        return []
    if listed.gathered:
        spot = f"({t} * FOLDED + {_write_positions(spec)})" if listed.each else f"{t} * FOLDED + tl.arange(0, FOLDED)"
        return [
            f"ahead = tl.load(items + list_first + {_write_entry(spec, f'({spot})')}, mask={spot} < positions, other=0)"
        ]
    return [f"ahead = tl.load(items + list_first + {t} // {_write_tile_count(spec)}, mask={t} < end, other=0)"]


def write_place(spec: Spec) -> list[str]:
    """The first lines of a loop's body: where tile ``t`` lies, which of it exists, and the next block's number."""
    listed = spec.listing
    if listed.role == "combine":
        return [
            "spot = t * FOLDED + tl.arange(0, FOLDED)",
            "folded_lane = (list_first + spot).to(INT)",
            "folded_in = spot < positions",
            "folded_at = list_first + spot",
        ]
    if listed.gathered:
        size = listed.folded_block
        inner = f" * {size} + spot % {size}" if size > 1 else ""
        cut = " & (folded_lane < folded_size)" if size > 1 else ""
        return [
            f"spot = t * FOLDED + {_write_positions(spec)}",
            f"folded_lane = ahead.to(INT){inner}",
            "later = spot + FOLDED",
            f"ahead = tl.load(items + list_first + {_write_entry(spec, 'later')}, mask=later < positions, other=0)",
            f"folded_in = (spot < positions){cut}",
            f"folded_at = {'spot' if listed.logical else 'folded_lane.to(tl.int32)'}",
        ]
    tiles, length = _write_tile_count(spec), "positions" if listed.logical else "folded_size"
    return [
        f"start = ahead.to(tl.int32) * {listed.folded_block} + t % {tiles} * FOLDED",
        f"ahead = tl.load(items + list_first + tl.minimum(t + 1, end - 1) // {tiles})",
        f"folded_at = {'t * FOLDED' if listed.logical else 'start'} + tl.arange(0, FOLDED)",
        f"folded_in = within(folded_at, {length}, RAGGED)",
    ]


def _write_tile_count(spec: Spec) -> str:
    """How many tiles a block has."""
    return f"({spec.listing.folded_block} // FOLDED)"


def _write_positions(spec: Spec) -> str:
    """The positions of a tile, from its first one on: along a list, or along each of several."""
    return "tl.arange(0, FOLDED)[None, :]" if spec.listing.each else "tl.arange(0, FOLDED)"


def _write_entry(spec: Spec, spot: str) -> str:
    """Which entry of a list a position lies in."""
    return spot if spec.listing.folded_block == 1 else f"{spot} // {spec.listing.folded_block}"


def join_loop(spec: Spec, tile: list[str]) -> list[str]:
    """One loop over all tiles of a list; ``tile``: what one adds to the accumulators, with masks."""
    head = write_place(spec)
    if spec.listing.single:  # all loads of a tile are on their way before any arithmetic
        tile = sorted(tile, key=lambda line: _LOAD.match(line) is None)
    if spec.listing.each:  # folded indices are blocks [KEPT, FOLDED] already
        tile = [re.sub(r"\b(folded_in|folded_at)\[None, :\]", r"\1", line) for line in tile]
    return [*write_first(spec, "begin"), "for t in range(begin, end):", *(f"    {line}" for line in [*head, *tile])]


def join_loops(spec: Spec, bodies: LoopBodies) -> list[str]:
    """Both loops: whole tiles, then the others."""
    head = write_place(spec)
    return [
        *(["gone = folded_size"] if bodies.delayed else []),
        *write_first(spec, "whole_first"),
        "for t in range(whole_first, whole_last):",
        *(f"    {line}" for line in [*head, *bodies.whole_tile, *(["gone = start"] if bodies.delayed else [])]),
        *(["if whole_last > whole_first:", *(f"    {line}" for line in bodies.delayed)] if bodies.delayed else []),
        *bodies.check_guess,
        *write_first(spec, "whole_last"),
        "for t in range(whole_last, end):",
        *(f"    {line}" for line in [*head, *bodies.cut_tile]),
    ]


class ListedWriter(ExpressionWriter):
    """Expressions of pairs whose folded index is found in a list."""

    def __init__(self, spec: Spec):
        super().__init__(spec)
        self.listed = spec.listing

    def dropout_block(self, col: Expr) -> str:
        return f"({self.number(col)} >> 7)"

    def index_gap(self, at: str) -> str:
        return f"({at} - folded_at[None, :]).to(tl.float32)"

    def pointer(self, e: Expr) -> str:
        if not self.listed.gathered or not self.spec.folds(e):
            return super().pointer(e)
        if not e.is_pair:
            return self.base(e)
        start = f"{self.base(e)} + tl.cast({self.spec.kept_start}, tl.int64) * {self.pair_strides(e)[0]}"
        return self.bind((e, "at"), start, False, f"{e.attrs[0]}_at")

    def _leaf(self, e: Expr) -> str:
        if not self.spec.is_per_entry(e) or self.spec.is_number(e):
            return self._in_lists(e, super()._leaf(e))
        entry, stride = self.entry(of_all=e.attrs[0] in (ONCE, COPIES)), self.stride(e, "s")
        text = self._in_lists(e, f"tl.load({self.base(e)} + {entry} * {stride}, mask=folded_in, other=0)[None, :]")
        if not self.listed.gathered:  # a tile lies in one entry
            text = f"tl.load({self.base(e)} + {entry} * {stride})"
        return self.to_arithmetic_type(text, e, self.spec.type_of[e])

    def entry(self, of_all: bool = False) -> str:
        """Which entry of the lists each folded index of a tile belongs to: one number where all belong to one.

        Entries count from the batch element's first one, or with ``of_all`` from the first of all elements."""
        place = f"t // {_write_tile_count(self.spec)}" if not self.listed.gathered else _write_entry(self.spec, "spot")
        entry = f"list_first + {place}"
        if self.listed.entries:
            entry = f"tl.load(entries + {entry}{', mask=folded_in, other=0' if self.listed.gathered else ''})"
        found = self.bind("entry", f"({entry}).to(tl.int64)", True, "entry")
        if of_all or not self.listed.numbered:
            return found
        return self.bind("own entry", f"entry - ({_list_number(self.spec)}) * entry_count", True, "own_entry")

    def store_entries(self, out: str, value: str) -> None:
        """Store a number for each entry of the lists; or for each pair that they name, by the first of its entries."""
        if self.listed.whole_pairs:
            copies = [self.number(e) for e in self.spec.fold.leaves if e.attrs[0] == COPIES]
            row = "(tl.cast(batch, tl.int64) * kept_size + kept_at[:, None]) * folded_size"
            mask = " & ".join(["kept_in[:, None]", "folded_in[None, :]", *(f"({c} > 0)" for c in copies)])
            place = self._in_lists(None, f"{out} + {row} + folded_at[None, :]")
            self.inside.append(f"tl.store({place}, {value}, mask={mask})")
            return
        place = self._in_lists(None, f"{out} + tl.cast(batch, tl.int64) * entry_count + {self.entry()}[None, :]")
        self.inside.append(f"tl.store({place}, {value}, mask=folded_in[None, :])")

    def leaf_component(self, e: Expr, f: str) -> str:
        return self._in_lists(e, super().leaf_component(e, f))

    def _in_lists(self, e: Expr | None, text: str) -> str:
        """A loaded block of folded indices: of several lists it is [KEPT, FOLDED] as it is."""
        folded = e is None or (self.spec.folds(e) and not self.spec.is_number(e))
        return text.replace("[None, :]", "") if self.listed.each and folded else text

    def block(self, e: Expr, piece: int | None = None, at: tuple[int, int] | None = None, stored: bool = False) -> str:
        if not self.listed.each or not self.spec.folds(e):
            return super().block(e, piece, at, stored)
        lines = len(self.inside)
        name = super().block(e, piece, at, stored)
        for k in range(lines, len(self.inside)):  # [KEPT, FOLDED, features]
            line = self.inside[k].replace("[None, :]", "[None, None, :]").replace("folded_lane[:, None]", _EACH[0])
            self.inside[k] = line.replace("folded_in[:, None]", _EACH[1])
        return name

    # One kept index: [1, features] times [FOLDED, features]; or several, each with vectors of its own to fold

    def product(self, x: Expr, y: Expr) -> str:
        if not self.listed.single:
            return super().product(x, y)
        return self._sum_features(x, y, "{} * {}")

    def add_product(self, total: str, weight: str, block: str) -> str:
        if not self.listed.single:
            return super().add_product(total, weight, block)
        if self.listed.each:
            weight = self.bind((weight, "weights"), weight, True)
            return f"{total} += tl.sum({weight}[:, :, None] * {block}, 1)"
        return f"{total} += tl.sum(tl.reshape({weight}, [FOLDED, 1]) * {block}, 0)[None, :]"

    def _over_features(self, e: Expr) -> str:
        wide = self.listed.single and e.op == "sqdist" and all(a.op == "leaf" for a in e.args)
        if not wide or self.spec.width(e.args[0].feature) <= TINY:
            return super()._over_features(e)
        x, y = e.args
        return self._sum_features(x, y, "({0} - {1}) * ({0} - {1})")

    def _sum_features(self, x: Expr, y: Expr, form: str) -> str:
        """Σ over the features of ``form`` of two leaves' vectors, as a block ``[1, FOLDED]``."""
        parts = []
        for at in self.spec.slices(x.feature):
            blocks = [self.block(e, at=at) for e in (x, y)]
            if self.listed.each:
                blocks = [b if self.spec.folds(e) else f"{b}[:, None, :]" for e, b in zip((x, y), blocks, strict=True)]
                parts.append(f"tl.sum({form.format(*blocks)}, 2)")
                continue
            parts.append(f"tl.sum({form.format(*blocks)}, 1)[None, :]")
        return " + ".join(parts)

    def operand_type(self) -> str:
        return self.spec.compute if self.listed.single else super().operand_type()
