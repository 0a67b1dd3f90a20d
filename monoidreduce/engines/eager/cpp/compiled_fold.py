"""A fold as C++ on leaves of one kind: everything of a call but the addresses is found out once.

What a call of a kind needs (variants of tiles, the compiled function, its list of arguments, the form of results) is
decided by types, shapes, strides, numbers that conditions read, threads and the budget. A :class:`CompiledFold` holds
all of it; calling one allocates results, writes their addresses and those of the leaves into the list, and runs.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....plan import settings
from ....program.expression import Expr, size
from ....program.lower import Fold
from ....reductions import kind_of, outputs_of
from ...common import combine, evaluate, skip_small_tiles
from ...common.evaluate import Allocator, Sizes
from ...common.subproblem import ChosenBlocks
from ..tile_code import Reducer
from ..tile_walk import FoldCode
from . import compiler
from .kernel_text import HEAD, LEAF, Form, KernelText
from .primitive_text import Unsupported
from .variants import Tables, choose_tiles, make_tables

BLOCK, FOLDED, CONDITIONAL = 128, 512, 256  # a tile of 256 kB stays in the L2 cache beside its operands
# Products with folded vectors copied features first take a sixth less time (MKL, 128 x 512 x 64 and 128).
PACK_ROWS = 1024  # kept indices from which the copy is cheap
PACK_BYTES = 2**24  # of copies, at most
LEAST_BLOCK = 16
SPLIT_PAIRS = 2**18  # of a split of the folded axis, at least: putting splits together takes 0.1 ms
_SPLIT = ("sum", "soft", "best", "topk", "pick")  # kinds whose tiles need not know how many came before
WIDE, WIDE_BLOCK = 256, 512  # features beyond which a tile's operands, read again for every block, are the most
KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
PAIR_KINDS = {
    torch.float32: ("float", 0),
    torch.float64: ("double", 0),
    torch.bfloat16: ("uint16_t", 0),
    torch.float16: ("uint16_t", 10),
    torch.int64: ("I", 0),
    torch.bool: ("uint8_t", 0),
}
NUMBER_TYPES = {"float": "float", "int": "I", "bool": "uint8_t"}
_BUFFERS = (6, 10, 11)  # the arguments that are addresses of a call's own: of memory, numbers and copies
_Place = tuple[int, int, int]  # an argument, whose address it is (buffers, leaves, results), and the offset in bytes


@dataclass(frozen=True)
class Kernel:
    """A compiled fold: its function, and the numbers that a thread's memory holds."""

    call: Any
    room: int
    packed: int  # features of all folded vectors that are copied


@dataclass(frozen=True)
class _Walk:
    """How the function is called: the merged batch shape, the lengths of the kept and the folded axis, the same of a
    tile, batch elements of one call, threads, sets of blocks (of a walk that sums over both axes), and splits of the
    folded axis: the tiles of each."""

    shape: tuple[int, ...]
    lengths: tuple[int, int]
    block: tuple[int, int]
    step: int
    threads: int
    sets: int
    splits: Sequence[range]

    def calls(self) -> Iterator[tuple[int, tuple[int, ...], slice]]:
        """The batch elements of each call: the place of the outer index, the index, and a range of the last."""
        for n, where in enumerate(evaluate.iterate_outer(self.shape)):
            for first in range(0, self.shape[-1], self.step):
                yield n, where, slice(first, min(first + self.step, self.shape[-1]))


class CompiledFold:
    """A fold on leaves of one kind. Called with the leaves and the totals that are added to; returns the results.

    ``whole``, ``begin``: the lengths of which the leaves may hold some rows, and the first of these. ``chosen``: the
    blocks of pairs that are folded. Raises Unsupported where no C++ can be written or compiled, or a budget is too
    small for it."""

    def __init__(
        self,
        code: FoldCode,
        leaves: Sequence[Any],
        sizes: Sizes,
        whole: Sizes,
        begin: int,
        totals: Mapping[Expr, Tensor],
        threads: int,
        chosen: ChosenBlocks | None = None,
    ):
        fold = self.fold = code.fold
        self.totals, self.compute = tuple(totals), sizes.compute
        self.swapped = all(r.attrs[1] == "rows" for r in fold.reductions)
        numbers = {e: v for e, v in zip(fold.leaves, leaves, strict=True) if not isinstance(v, Tensor)}
        self._write_numbers(numbers, whole)
        given = self._read_leaves(leaves, sizes)
        rooms = self._form_results(leaves, sizes, totals)
        count = len(sizes.batch)
        batched = [t.stride()[:count] for t in rooms]
        layers = [] if chosen is None or set(chosen.table.shape[:-2]) <= {1} else [chosen.table]
        shape, views, _ = evaluate.merge_batch_dims(sizes.batch, [*given.values(), *layers], batched)
        parts = dict(zip(given, views, strict=False))
        kept, folded = lengths = (sizes.cols, sizes.rows) if self.swapped else (sizes.rows, sizes.cols)
        form = self._choose_form(code, sizes, parts)
        if chosen is None:
            block = choose_block(shape, lengths, form.block, bool(code.conditions), threads)
        else:
            form = replace(form, block=(form.block[0], FOLDED))
            block = chosen.choose_tile(form.block, self.swapped)
            if min(block) < LEAST_BLOCK:
                raise Unsupported("blocks that have no common divisor with a tile")
        tables = make_tables(code, parts, numbers, (sizes, whole, begin), shape, block, self.swapped)
        padded = -(-folded // block[1]) * form.block[1]
        if chosen is None:
            form = self._choose_packing(tables, form, kept, padded)
        else:
            given_layers = views[len(parts)] if layers else chosen.table.reshape(chosen.table.shape[-2:])
            layer = chosen.spread(given_layers, lengths, block, self.swapped)
            tables = choose_tiles(tables, shape, layer, block if not self.swapped else (block[1], block[0]))
        kernel = compile_form(fold, tables.variants, form)
        limit, item = settings.now().budget, sizes.compute.itemsize
        if kernel is None or (limit is not None and threads * kernel.room * item > limit):
            raise Unsupported("no compiler, or too much memory")
        step = max(1, PACK_BYTES // (kernel.packed * padded * item)) if kernel.packed else shape[-1]
        sets = 1 if all(b % threads == 0 or b >= 4 * threads for b in _steps(shape[-1], step)) else threads
        for at, (r, _, _) in enumerate(self.rooms):
            if kind_of(r).both_axes:  # a part for each set of rows that a thread may have
                parts_form = (*sizes.batch, sets, sizes.of(str(r.args[2].feature))), torch.float64
                self.rooms[at] = r, Allocator(parts_form, sizes.device), 0.0
                rooms[at] = torch.empty(parts_form[0], dtype=parts_form[1], device="cpu")
        splits = self._choose_splits(shape, lengths, block, threads, kernel.packed)
        self.splits = [min(s.stop * block[1], folded) - s.start * block[1] for s in splits]
        if len(splits) > 1:
            for at, ((r, _, value), t) in enumerate(zip(self.rooms, rooms, strict=True)):
                form_of_all = (len(splits), *t.shape), t.dtype
                self.rooms[at] = r, Allocator(form_of_all, sizes.device), value
                rooms[at] = torch.empty(form_of_all[0], dtype=t.dtype, device="cpu")
        self.room, self.copied = threads * kernel.room, min(step, shape[-1]) * padded * kernel.packed
        self.kernel, self.counts = kernel, tables.counts
        self.tables = tables.tables  # arguments hold their addresses
        walk = _Walk(shape, lengths, block, step, threads, sets, splits)
        by_split = rooms if len(splits) > 1 else [t.unsqueeze(0) for t in rooms]
        outputs = [t.view(len(splits), *shape, *t.shape[1 + count :]) for t in by_split]
        origins = [t.data_ptr() for t in (*given.values(), *rooms)]
        self.arguments = [self._write_arguments(walk, *where, begin, parts, outputs, origins) for where in walk.calls()]

    # What is decided once ---------------------------------------------------------------------------------------

    def _write_numbers(self, numbers: Mapping[Expr, Any], whole: Sizes) -> None:
        """How Python numbers and lengths are written: those of leaves are read in every call."""
        lengths = {size(axis): whole.of(axis) for axis in ("rows", "cols", *whole.letters)}
        places = {e: k for k, e in enumerate(self.fold.leaves) if e in numbers}
        self.numbers = tuple(dict.fromkeys((*numbers, *lengths)))
        self.pack = struct.Struct("=" + "".join("d" if e.dtype == "float" else "q" for e in self.numbers)).pack
        kinds = [float if e.dtype == "float" else int for e in self.numbers]
        self.values = [(places.get(e, -1), kind, lengths.get(e)) for e, kind in zip(self.numbers, kinds, strict=True)]

    def _read_leaves(self, leaves: Sequence[Any], sizes: Sizes) -> dict[Expr, Tensor]:
        """The leaves as C++ reads them; kept: what has to be done to one for that in every call."""
        given = {}
        self.readers: list[tuple[int, Callable[[Tensor], Tensor] | None]] = []
        for at, (e, v) in enumerate(zip(self.fold.leaves, leaves, strict=True)):
            if isinstance(v, Tensor):
                read = functools.partial(_prepare_leaf, e, sizes, e in self.fold.tables)
                given[e] = read(v)
                in_place = given[e].data_ptr() == v.data_ptr()  # at most a view
                self.readers.append((at, None if in_place else read))
        return given

    def _form_results(self, leaves: Sequence[Any], sizes: Sizes, totals: Mapping[Expr, Tensor]) -> list[Tensor]:
        """Results; kept: how they are allocated, and what those over the kept axis, which every tile adds to, begin
        with."""
        rooms: list[Tensor] = []
        self.rooms: list[tuple[Expr, Allocator | None, float | None]] = []
        for r, k in self.fold.outputs:
            per_pair = kind_of(r).per_pair
            if per_pair and r not in totals:
                t = self._allocate_pairs(leaves[self.fold.leaves.index(r.args[1])], sizes)
            else:
                t = totals[r] if r in totals else evaluate.allocate_result(self.fold, r, k, leaves, sizes)
            begins = (per_pair or (r.attrs[1] == "rows") != self.swapped) and r not in totals
            strides = None if t.is_contiguous() else t.stride()
            allocate = None if r in totals else Allocator((tuple(t.shape), t.dtype), t.device, strides)
            self.rooms.append((r, allocate, _beginning(r, k) if begins else None))
            rooms.append(t)
        return rooms

    @staticmethod
    def _allocate_pairs(like: Tensor, sizes: Sizes) -> Tensor:
        """Room for the gradient of an argument per pair."""
        shape, dtype = evaluate.pair_result_form(like, sizes)
        if shape != (*sizes.batch, sizes.rows, sizes.cols) or dtype != sizes.compute:
            raise Unsupported("a gradient that is summed over pairs, or rounded")
        return torch.empty(shape, dtype=dtype, device=sizes.device)

    def _choose_form(self, code: FoldCode, sizes: Sizes, parts: Mapping[Expr, Tensor]) -> Form:
        widest = max([0, *(sizes.of(letter) for letter in code.fold.letters)])
        return Form(
            sizes.compute is torch.float32,
            tuple((letter, sizes.of(letter)) for letter in code.fold.letters),
            (WIDE_BLOCK if widest > WIDE else BLOCK, CONDITIONAL if code.conditions else FOLDED),
            self.numbers,
            tuple(_pair_form(e, v, self.swapped) for e, v in parts.items() if e.is_pair),
            self.swapped,
            tuple(sorted({KINDS[v.dtype] for e, v in parts.items() if _is_vector(e, code.fold)})) or (0,),
            tuple(r for r in self.totals if not kind_of(r).per_pair),
        )

    def _choose_packing(self, tables: Tables, form: Form, kept: int, padded: int) -> Form:
        """The same with copies of folded vectors, where those are small and read often enough."""
        if settings.now().budget is not None or kept < PACK_ROWS:
            return form
        wide = replace(form, transposed=True)
        copied = write_form(self.fold, tables.variants, wide).packed_width * padded * self.compute.itemsize
        return wide if copied <= PACK_BYTES else form

    def _choose_splits(
        self, shape: tuple[int, ...], lengths: tuple[int, int], block: tuple[int, int], threads: int, packed: int
    ) -> list[range]:
        """The tiles of each split of the folded axis: several where tasks are too few to keep all threads busy."""
        batch, tiles = torch.Size(shape).numel(), -(-lengths[1] // block[1])
        tasks, equal = batch * -(-lengths[0] // block[0]), lengths[0] % block[0] == 0 or lengths[0] < block[0]
        if tasks >= 4 * threads or (equal and tasks % threads == 0):
            return [range(tiles)]
        count = threads // tasks if equal and threads % tasks == 0 else -(-4 * threads // tasks)
        count = min(count, tiles, batch * lengths[0] * lengths[1] // SPLIT_PAIRS)
        folds = all((r.attrs[1] == "cols") != self.swapped and r.attrs[0] in _SPLIT for r in self.fold.reductions)
        if count < 2 or not folds or self.totals or packed:
            return [range(tiles)]
        return [range(tiles * s // count, tiles * (s + 1) // count) for s in range(count)]

    def _write_arguments(
        self,
        walk: _Walk,
        n: int,
        where: tuple[int, ...],
        own: slice,
        begin: int,
        parts: Mapping[Expr, Tensor],
        outputs: Sequence[Tensor],
        origins: Sequence[int],
    ) -> tuple[Any, list[_Place]]:
        """The arguments of one call of the function, split by split, and where addresses are written in the others:
        ``origins`` are those of the leaves and results that these have now."""
        gemm = compiler.gemm_addresses()
        assert gemm is not None
        table = self.tables[n] if self.tables else None
        by_batch = table is not None and table.dim() == 3
        table = table[own] if by_batch and table is not None else table
        fixed = [own.stop - own.start, *walk.lengths, walk.threads, 0 if table is None else table.data_ptr()]
        fixed += [table.stride(0) if by_batch and table is not None else 0, 0, self.kernel.room]
        fixed += [gemm[0] if self.compute is torch.float32 else gemm[1], gemm[2], 0, 0, begin, *walk.block, walk.sets]
        found: list[int] = []
        places: list[_Place] = []
        for split, tiles in enumerate(walk.splits):
            places += [(len(found) + at, source, 0) for source, at in enumerate(_BUFFERS)]
            origin = enumerate(origins, len(_BUFFERS))
            head = [*fixed, tiles.start, tiles.stop, len(walk.splits)]
            assert len(head) == HEAD
            found += head
            for e in self.fold.leaves:
                if e not in parts:
                    found += [0] * LEAF
                    continue
                described, (source, start) = _describe_leaf(e, parts[e][where][own]), next(origin)
                places.append((len(found), source, described[0] - start))
                found += described
            for t, (source, start) in zip(outputs, origin, strict=True):
                o = t[split][where][own]
                places.append((len(found), source, o.data_ptr() - start))
                found += [o.data_ptr(), o.stride(0), o.stride(1)]  # of a number per pair, those of a row lie together
        return (ctypes.c_int64 * len(found))(*found), places

    # A call -------------------------------------------------------------------------------------------------

    def __call__(self, *given: Any) -> list[Tensor]:
        leaves = [given[at] if read is None else read(given[at]) for at, read in self.readers]
        totals, rooms = iter(given[len(self.fold.leaves) :]), []
        for _, allocate, begin in self.rooms:
            t = next(totals) if allocate is None else allocate()
            rooms.append(t if begin is None else t.fill_(begin))
        memory = torch.empty(self.room, dtype=self.compute, device="cpu")
        copies = torch.empty(self.copied, dtype=self.compute, device="cpu")
        held = self.pack(*[kind(given[at]) if at >= 0 else n for at, kind, n in self.values])
        numbers = ctypes.create_string_buffer(held, max(1, len(held)))
        base = [memory.data_ptr(), ctypes.addressof(numbers), copies.data_ptr()]
        base += [t.data_ptr() for t in (*leaves, *rooms)]
        for head, places in self.arguments:
            arguments = type(head).from_buffer_copy(head)
            for at, source, offset in places:
                arguments[at] = base[source] + offset
            if self.kernel.call(arguments):
                raise RuntimeError("ZeroDivisionError")  # of whole numbers, as torch says it
        if skip_small_tiles.counters.get():
            for (computed, many, rows, cols), tiles in self.counts.items():
                skip_small_tiles.count_tile(computed, many, rows, cols, tiles)
        if len(self.splits) > 1:
            rooms = combine.combine(self.fold, rooms, self.splits, ordered=True)
        _finish_kept(self.fold, rooms, self.swapped)
        pairs = zip(self.fold.outputs, rooms, strict=True)
        return [t.sum(-2).to(self.compute) if kind_of(r).both_axes else t for (r, _), t in pairs]


def _beginning(r: Expr, k: int) -> float:
    """The k-th result of no pairs of a reduction over the kept axis."""
    kind, _, params = r.attrs
    if kind == "best":
        return -1 if k else -math.inf if params[-1] else math.inf
    return -math.inf if kind == "soft" and k == len(outputs_of(r)) - 1 else 0.0


def _steps(count: int, step: int) -> set[int]:
    """The batch elements of calls that have at most ``step``."""
    return {min(step, count - first) for first in range(0, count, step)}


def choose_block(
    shape: tuple[int, ...], lengths: tuple[int, int], most: tuple[int, int], conditional: bool, threads: int
) -> tuple[int, int]:
    """Kept and folded indices of a tile, ``most`` at most: blocks of about equal size, of which all threads have as
    many. ``lengths``: of the kept and the folded axis."""
    each = 1 if threads == 1 or most[0] > BLOCK else 4 if conditional else 2  # wide vectors are read in every block
    least = -(-threads * each // torch.Size(shape).numel())
    return _divide(lengths[0], most[0], least), _divide(lengths[1], most[1], 1)


def _divide(length: int, most: int, least: int) -> int:
    """The size of about equal blocks: at most ``most``, and at least ``least`` of them where they stay large enough."""
    count = max(-(-length // most), least)
    return min(most, max(LEAST_BLOCK, -(-length // (count * LEAST_BLOCK)) * LEAST_BLOCK))


def _prepare_leaf(e: Expr, sizes: Sizes, table: bool, v: Tensor) -> Tensor:
    """A leaf as the generated code reads it: numbers of one side, and tables, in the type of arithmetic and
    contiguous."""
    v = v.detach().resolve_neg()
    if e.is_pair:
        v = v.expand(*v.shape[:-2], sizes.rows, sizes.cols)
        return v.to(sizes.compute) if e.dtype == "float" and v.dtype not in KINDS else v
    if e.feature is not None and not table:
        return v
    v = v.to({"float": sizes.compute, "int": torch.int64, "bool": torch.bool}[e.dtype])
    if (e.rows or e.cols or table) and v.stride(-1) != 1:
        return v.contiguous()
    return v


def _is_vector(e: Expr, fold: Fold) -> bool:
    """Whether a leaf is read as vectors, whatever type its numbers have."""
    return e.feature is not None and not e.is_pair and e not in fold.tables


def _pair_form(e: Expr, v: Tensor, swapped: bool) -> tuple[Expr, str, int]:
    kind, more = PAIR_KINDS[v.dtype]
    step = v.stride(-2 if swapped else -1)
    return e, kind, more + (step if step in (0, 1) else 2)


def _describe_leaf(e: Expr, v: Tensor) -> list[int]:
    """Address and strides of the leaf ``v`` [batch, ...]; last the kind of number."""
    strides = list(v.stride())
    kind = KINDS.get(v.dtype, 0)
    if e.is_pair:
        return [v.data_ptr(), strides[0], strides[1], strides[2], kind]
    if not (e.rows or e.cols):
        return [v.data_ptr(), strides[0], 0, strides[1] if e.feature is not None else 0, kind]
    return [v.data_ptr(), strides[0], strides[1], strides[2] if e.feature is not None else 0, kind]


def _finish_kept(fold: Fold, outputs: list[Tensor], swapped: bool) -> None:
    """Peaks and totals of softmaxes over the kept axis as results: logsumexp, the total's logarithm, the peak."""
    found = iter(outputs)
    for r in fold.reductions:
        own = list(itertools.islice(found, len(outputs_of(r))))
        if r.attrs[0] == "soft" and (r.attrs[1] == "rows") != swapped:
            z, log_total, peak = own
            log_total.log_()
            peak.masked_fill_(peak.isinf(), 0.0)
            torch.add(log_total, peak, out=z)


@functools.lru_cache(maxsize=512)
def compile_form(fold: Fold, variants: tuple[tuple[Reducer, ...], ...], form: Form) -> Kernel | None:
    """The kernel of a fold; None if it cannot be compiled here."""
    text = write_form(fold, variants, form)
    library = compiler.load(text.text)
    return None if library is None else Kernel(library.run_fold, text.room.total, text.packed_width)


@functools.lru_cache(maxsize=64)
def write_form(fold: Fold, variants: tuple[tuple[Reducer, ...], ...], form: Form) -> KernelText:
    return KernelText(fold, variants, form)
