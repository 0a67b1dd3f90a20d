"""Folds on a CPU as generated C++: all arithmetic of a pair in one loop, products by torch's own BLAS.

:func:`run` is asked first by the eager engine. It answers None, and tiles of torch calls run, where a fold has no C++
form, is too small for a compilation to pay, or no compiler is there. Whether C++ runs depends on the fold, its sizes
and the machine alone, never on what is in the cache: repeated calls have equal bits.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....plan import settings
from ....plan.settings import EnvironmentVariable
from ....program.expression import Expr, size
from ....program.lower import Fold
from ....reductions import kind_of, outputs_of
from ...common import evaluate, matmul, skip_small_tiles
from ...common.evaluate import Sizes, allocate_result
from ..tile_code import Reducer, TileCode
from ..tile_walk import FoldCode, compile_fold, decide_tiles, merge_ranges, split_range, tile_ranges
from . import compiler
from .kernel_text import HEAD, LEAF, Form, KernelText
from .primitive_text import Unsupported

_SETTING = EnvironmentVariable("MONOIDREDUCE_CPP")  # "never": tiles of torch calls; "always": at any size
WORTH = 2**27  # pairs times operations from which a compilation of a second pays: about 20 ms in torch
BLOCK, FOLDED, CONDITIONAL = 128, 512, 256  # a tile of 256 kB stays in the L2 cache beside its operands
# Products with folded vectors copied features first take a sixth less time (MKL, 128 x 512 x 64 and 128).
PACK_ROWS = 1024  # kept indices from which the copy is cheap
PACK_BYTES = 2**24  # of copies, at most
LEAST_BLOCK = 16
_CACHED_TILES = 4096  # of a table that is kept
_ANY_PAIR = torch.empty(0)  # in the place of a number per pair, which no table reads
WIDE, WIDE_BLOCK = 256, 512  # features beyond which a tile's operands, read again for every block, are the most
_KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_PAIR_KINDS = {
    torch.float32: ("float", 0),
    torch.float64: ("double", 0),
    torch.bfloat16: ("uint16_t", 0),
    torch.float16: ("uint16_t", 10),
    torch.int64: ("I", 0),
    torch.bool: ("uint8_t", 0),
}


@dataclass(frozen=True)
class Kernel:
    """A compiled fold: its function, and the numbers that a thread's memory holds."""

    call: Any
    room: int
    packed: int  # features of all folded vectors that are copied


def run(
    fold: Fold,
    leaves: Sequence[Any],
    sizes: Sizes,
    panel: slice | None = None,
    totals: Mapping[Expr, Tensor] | None = None,
) -> list[Tensor] | None:
    """Run a fold as C++; None if tiles of torch calls should.

    With ``panel`` the leaves hold these rows alone. ``totals``: sums over rows that are added to, not begun."""
    part = sizes if panel is None else replace(sizes, rows=panel.stop - panel.start)
    if not applies(fold, leaves, part):
        return None
    try:
        return _run(fold, leaves, part, sizes, 0 if panel is None else panel.start, totals or {})
    except Unsupported:
        return None


def applies(fold: Fold, leaves: Sequence[Any], sizes: Sizes, worth: int = WORTH) -> bool:
    """Whether C++ may run a fold of at least ``worth`` operations, as far as can be said without writing it."""
    setting = _SETTING.read()
    if setting == "never" or sizes.device.type != "cpu" or sizes.compute not in (torch.float32, torch.float64):
        return False
    if (
        matmul.dry_run_sizes.get() is not None
        or skip_small_tiles.active() is not None
        or settings.current.get().shrink > 1
    ):
        return False
    if not (sizes.rows and sizes.cols and torch.Size(sizes.batch).numel() and all(map(sizes.of, fold.letters))):
        return False  # BLAS takes no matrix without columns
    if setting != "always" and count_work(fold, sizes) < worth:
        return False
    if any(kind_of(r).per_pair or not kind_of(r).walks(r, fold.reductions) for r in fold.reductions):
        return False
    given = {e: v for e, v in zip(fold.leaves, leaves, strict=True) if isinstance(v, Tensor)}
    if any(not given[e].shape[-1] for e in fold.tables):
        return False
    return all(_is_readable(e, v, e in fold.tables) for e, v in given.items())


def describe(fold: Fold, sizes: Sizes, numbers: frozenset[Expr]) -> str:
    """What runs a fold of these sizes on a CPU: ``"C++"`` or ``"torch"``. Writes the code, compiles nothing."""
    setting = _SETTING.read()
    small = (setting != "always" and count_work(fold, sizes) < WORTH) or not all(map(sizes.of, fold.letters))
    if setting == "never" or small or sizes.compute not in (torch.float32, torch.float64):
        return "torch"
    if any(kind_of(r).per_pair or not kind_of(r).walks(r, fold.reductions) for r in fold.reductions):
        return "torch"
    if compiler.current_compiler() is None or compiler.gemm_addresses() is None:
        return "torch"
    code = compile_fold(fold, numbers).variant({})
    named = (*numbers, *(size(axis) for axis in ("rows", "cols", *sizes.letters)))
    pairs = tuple((e, NUMBER_TYPES[e.dtype], 1) for e in fold.leaves if e.is_pair)
    swapped = all(r.attrs[1] == "rows" for r in fold.reductions)
    letters = tuple((letter, sizes.of(letter)) for letter in fold.letters)
    try:
        if code is not None:
            form = Form(sizes.compute is torch.float32, letters, (BLOCK, FOLDED), named, pairs, swapped)
            _write(fold, (_reducers(code),), form)
    except Unsupported:
        return "torch"
    return "C++"


NUMBER_TYPES = {"float": "float", "int": "I", "bool": "uint8_t"}


def count_work(fold: Fold, sizes: Sizes) -> int:
    """Pairs times a rough number of operations of each."""
    per_pair = 16 + sum(sizes.of(letter) for letter in fold.letters)
    return torch.Size(sizes.batch).numel() * sizes.rows * sizes.cols * per_pair * sizes.repeats


def _is_readable(e: Expr, v: Tensor, table: bool) -> bool:
    """Whether C++ reads a leaf: a plain tensor in memory; 16-bit vectors only where torch would widen them too."""
    if type(v) not in (Tensor, torch.nn.Parameter) or v.device.type != "cpu" or v.layout is not torch.strided:
        return False
    if e.is_pair:
        return v.dtype in _PAIR_KINDS and not v.is_conj()
    if e.feature is None or table:
        return True
    narrow = v.dtype in matmul.SIXTEEN and not matmul.needs_float32(v.device, v.dtype)
    return v.dtype in _KINDS and not narrow


def _run(
    fold: Fold, leaves: Sequence[Any], sizes: Sizes, whole: Sizes, begin: int, totals: Mapping[Expr, Tensor]
) -> list[Tensor] | None:
    gemm = compiler.gemm_addresses()
    if gemm is None:
        return None
    numbers = {e: v for e, v in zip(fold.leaves, leaves, strict=True) if not isinstance(v, Tensor)}
    code = compile_fold(fold, frozenset(numbers))
    constants = numbers | {size(axis): whole.of(axis) for axis in ("rows", "cols", *sizes.letters)}
    given = {
        e: _prepare_leaf(e, v, sizes, e in fold.tables)
        for e, v in zip(fold.leaves, leaves, strict=True)
        if isinstance(v, Tensor)
    }
    rooms = [totals[r] if r in totals else allocate_result(fold, r, k, leaves, sizes) for r, k in fold.outputs]
    count = len(sizes.batch)
    shape, views, _ = evaluate.merge_batch_dims(sizes.batch, list(given.values()), [t.stride()[:count] for t in rooms])
    swapped = all(r.attrs[1] == "rows" for r in fold.reductions)
    threads = max(1, torch.get_num_threads())
    widest = max([0, *(sizes.of(letter) for letter in fold.letters)])
    block = _choose_block(shape, sizes.cols if swapped else sizes.rows, bool(code.conditions), threads, widest)
    parts = dict(zip(given, views, strict=True))
    tables = _make_tables(code, parts, numbers, (sizes, whole, begin), shape, block, swapped)
    form = Form(
        sizes.compute is torch.float32,
        tuple((letter, sizes.of(letter)) for letter in fold.letters),
        block,
        tuple(constants),
        tuple(_pair_form(e, v, swapped) for e, v in parts.items() if e.is_pair),
        swapped,
    )
    kept, folded = (sizes.cols, sizes.rows) if swapped else (sizes.rows, sizes.cols)
    limit = settings.now().budget
    item, padded = sizes.compute.itemsize, -(-folded // block[1]) * block[1]
    if limit is None and kept >= PACK_ROWS:
        wide = replace(form, transposed=True)
        if _write(fold, tables.variants, wide).packed_width * padded * item <= PACK_BYTES:
            form = wide
    kernel = _compile(fold, tables.variants, form)
    if kernel is None or (limit is not None and threads * kernel.room * item > limit):
        return None
    step = shape[-1]  # batch elements of one call
    if kernel.packed:
        step = max(1, PACK_BYTES // (kernel.packed * padded * item))
    calls = {min(step, shape[-1] - first) for first in range(0, shape[-1], step)}
    sets = 1 if all(b >= 2 * threads or b % threads == 0 for b in calls) else threads  # as in ``_RUN_MIXED``
    for at, (r, _) in enumerate(fold.outputs):
        if kind_of(r).both_axes:  # a part for each set of rows that a thread may have
            rooms[at] = torch.zeros(*sizes.batch, sets, sizes.of(str(r.args[2].feature)), dtype=torch.float64)
    copies = torch.empty(min(step, shape[-1]) * padded * kernel.packed, dtype=sizes.compute)
    for (r, k), t in zip(fold.outputs, rooms, strict=True):
        if r not in totals:
            _begin_result(r, k, t, swapped)
    outputs = [t.unsqueeze(0) if not count else t.view(*shape, *t.shape[count:]) for t in rooms]
    memory = torch.empty(threads * kernel.room, dtype=sizes.compute)
    packed = b"".join(_pack_number(e, v) for e, v in constants.items())
    held = ctypes.create_string_buffer(packed, max(1, len(packed)))
    address = gemm[0] if form.single else gemm[1]
    for n, where in enumerate(evaluate.iterate_outer(shape)):
        for first in range(0, shape[-1], step):
            own, table = slice(first, min(first + step, shape[-1])), tables.tables[n] if tables.tables else None
            by_batch = table is not None and table.dim() == 3
            table = table[own] if by_batch and table is not None else table
            head = [own.stop - first, kept, folded, threads, 0 if table is None else table.data_ptr()]
            head += [table.stride(0) if by_batch and table is not None else 0, memory.data_ptr(), kernel.room]
            head += [address, gemm[2], ctypes.addressof(held), copies.data_ptr(), begin]
            assert len(head) == HEAD
            for e in fold.leaves:
                head += _describe_leaf(e, parts[e][where][own]) if e in parts else [0] * LEAF
            for o in (o[where][own] for o in outputs):
                head += [o.data_ptr(), o.stride(0), o.stride(1)]
            arguments = (ctypes.c_int64 * len(head))(*head)
            kernel.call(ctypes.addressof(arguments))
    for (computed, many, rows, cols), tiles in tables.counts.items():
        skip_small_tiles.count_tile(computed, many, rows, cols, tiles)
    _finish_kept(fold, rooms, swapped)
    pairs = zip(fold.outputs, rooms, strict=True)
    return [t.sum(-2).to(sizes.compute) if kind_of(r).both_axes else t for (r, _), t in pairs]


def _finish_kept(fold: Fold, outputs: list[Tensor], swapped: bool) -> None:
    """Peaks and totals of softmaxes over the kept axis as results: logsumexp, the total's logarithm, the peak."""
    found = iter(outputs)
    for r in fold.reductions:
        own = [next(found) for _ in outputs_of(r)]
        if r.attrs[0] == "soft" and (r.attrs[1] == "rows") != swapped:
            z, log_total, peak = own
            log_total.log_()
            peak.masked_fill_(peak.isinf(), 0.0)
            torch.add(log_total, peak, out=z)


def _choose_block(shape: tuple[int, ...], kept: int, conditional: bool, threads: int, widest: int) -> tuple[int, int]:
    """Kept and folded indices of a tile: more of wide vectors, fewer where threads would find nothing to do."""
    block, tasks = WIDE_BLOCK if widest > WIDE else BLOCK, 4 * threads
    while block > LEAST_BLOCK and torch.Size(shape).numel() * -(-kept // block) < tasks:
        block //= 2
    return block, CONDITIONAL if conditional else FOLDED


def _begin_result(r: Expr, k: int, room: Tensor, swapped: bool) -> Tensor:
    """A result over the kept axis, which is added to from the start: zeros, and no peak."""
    if (r.attrs[1] == "rows") != swapped:
        room.fill_(-math.inf if r.attrs[0] == "soft" and k == len(outputs_of(r)) - 1 else 0)
    return room


def _prepare_leaf(e: Expr, v: Tensor, sizes: Sizes, table: bool) -> Tensor:
    """A leaf as the generated code reads it: numbers of one side, and tables, in the type of arithmetic and
    contiguous."""
    v = v.detach()
    if e.is_pair:
        v = v.expand(*v.shape[:-2], sizes.rows, sizes.cols)
        return v.to(sizes.compute) if e.dtype == "float" and v.dtype not in _KINDS else v
    if e.feature is not None and not table:
        return v
    v = v.to({"float": sizes.compute, "int": torch.int64, "bool": torch.bool}[e.dtype])
    if (e.rows or e.cols or table) and v.stride(-1) != 1:
        return v.contiguous()
    return v


def _pair_form(e: Expr, v: Tensor, swapped: bool) -> tuple[Expr, str, int]:
    kind, more = _PAIR_KINDS[v.dtype]
    step = v.stride(-2 if swapped else -1)
    return e, kind, more + (step if step in (0, 1) else 2)


def _describe_leaf(e: Expr, v: Tensor) -> list[int]:
    """Address and strides of the leaf ``v`` [batch, ...]; last the kind of number."""
    strides = list(v.stride())
    kind = _KINDS.get(v.dtype, 0)
    if e.is_pair:
        return [v.data_ptr(), strides[0], strides[1], strides[2], kind]
    if not (e.rows or e.cols):
        return [v.data_ptr(), strides[0], 0, strides[1] if e.feature is not None else 0, kind]
    return [v.data_ptr(), strides[0], strides[1], strides[2] if e.feature is not None else 0, kind]


def _pack_number(e: Expr, v: Any) -> bytes:
    return struct.pack("=d", float(v)) if e.dtype == "float" else struct.pack("=q", int(v))


# Variants of tiles ------------------------------------------------------------------------------------------------


Counts = collections.Counter[tuple[bool, int, int, int]]  # tiles, by whether they are computed, batch, rows and columns


@dataclass
class Tables:
    """The variants that tiles have, and for each outer batch index which tile has which (0: none)."""

    variants: tuple[tuple[Reducer, ...], ...]
    tables: list[Tensor]
    counts: Counts


def _reducers(code: TileCode) -> tuple[Reducer, ...]:
    return tuple(s.reducer for s in code.steps if s.reducer is not None)


def _make_tables(
    code: FoldCode,
    parts: dict[Expr, Tensor],
    numbers: dict[Expr, Any],
    where_rows: tuple[Sizes, Sizes, int],
    shape: tuple[int, ...],
    block: tuple[int, int],
    swapped: bool,
) -> Tables:
    sizes, whole, begin = where_rows
    batch, rest = torch.Size(shape).numel(), (begin, block, swapped)
    if not code.conditions:
        only = code.variant({})
        if only is None:
            raise Unsupported("nothing to do")
        return Tables((_reducers(only),), [], collections.Counter({(True, batch, sizes.rows, sizes.cols): 1}))
    lengths = (sizes.rows, sizes.cols, whole.rows, whole.cols)
    found: dict[TileCode, int] = {}
    counts: Counts = collections.Counter()
    if any(isinstance(parts.get(e), Tensor) and not e.is_pair for e in code.ranged):
        tables = []
        for where in evaluate.iterate_outer(shape):
            own = [{e: v[where][b : b + 1] for e, v in parts.items()} | numbers for b in range(shape[-1])]
            tables.append(torch.stack([_make_table(code, t, found, counts, lengths, *rest, 1) for t in own]))
    else:
        named = tuple((e, numbers.get(e, _ANY_PAIR)) for e in code.ranged)
        small = sizes.rows * sizes.cols <= _CACHED_TILES * block[0] * block[1]
        make = _make_index_table if small else _make_index_table.__wrapped__
        table, found, counts = make(code.fold, code.scalars, named, lengths, *rest, batch)
        tables = [table] * torch.Size(shape[:-1]).numel()
    if not found or len(found) > 16:
        raise Unsupported("no variant, or too many")
    return Tables(tuple(map(_reducers, found)), tables, counts)


@functools.lru_cache(maxsize=512)
def _make_index_table(
    fold: Fold, scalars: frozenset[Expr], named: tuple[tuple[Expr, Any], ...], *rest: Any
) -> tuple[Tensor, dict[TileCode, int], Counts]:
    """The table of a fold whose conditions read indices and ``named`` numbers alone, its variants and its tiles."""
    found: dict[TileCode, int] = {}
    counts: Counts = collections.Counter()
    return _make_table(compile_fold(fold, scalars), dict(named), found, counts, *rest), found, counts


def _make_table(
    code: FoldCode,
    leaves: Mapping[Expr, Any],
    found: dict[TileCode, int],
    counts: Counts,
    lengths: tuple[int, int, int, int],
    begin: int,
    block: tuple[int, int],
    swapped: bool,
    many: int,
) -> Tensor:
    """Which variant each tile has, in a table that all of ``many`` batch elements read; adds to ``found`` and
    ``counts``. ``lengths``: rows and columns that are here, and in all."""
    steps = block[::-1] if swapped else block
    rows, cols = split_range(lengths[0], steps[0]), split_range(lengths[1], steps[1])
    row_ranges, col_ranges, fixed = tile_ranges(code, leaves, lengths[2:], begin, rows, cols)
    table, hulls = [], merge_ranges(col_ranges)
    for i, row in enumerate(rows):
        line: list[int] = []
        height, last = row.stop - row.start, cols[-1].stop - cols[-1].start
        for start, stop, tile in decide_tiles(code, {**fixed, **row_ranges[i]}, hulls):
            line += [0 if tile is None else found.setdefault(tile, len(found) + 1)] * (stop - start)
            ends = int(stop == len(cols))  # the last tile may be narrower
            counts[tile is not None, many, height, steps[1]] += stop - start - ends
            counts[tile is not None, many, height, last] += ends
        table.append(line)
    layer = torch.tensor(table, dtype=torch.int8)
    return layer.mT.contiguous() if swapped else layer


@functools.lru_cache(maxsize=512)
def _compile(fold: Fold, variants: tuple[tuple[Reducer, ...], ...], form: Form) -> Kernel | None:
    """The kernel of a fold; None if it cannot be compiled here."""
    text = _write(fold, variants, form)
    library = compiler.load(text.text)
    return None if library is None else Kernel(library.run_fold, text.room.total, text.packed_width)


@functools.lru_cache(maxsize=64)
def _write(fold: Fold, variants: tuple[tuple[Reducer, ...], ...], form: Form) -> KernelText:
    return KernelText(fold, variants, form)
