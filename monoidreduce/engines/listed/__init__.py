"""Folds over listed pairs: one wrapper around any engine, for forward and gradient alike, since both are folds.

The lists of the kept axis (rows for a reduction over columns, columns for one over rows) are cut into pieces of few
different lengths (``lists.py``). Pieces of one length are gathered into a batch of small dense problems, which the
inner engine folds, and the states of a list's pieces are combined with ⊙. Memory is that of one batch of pieces;
nothing has the size of rows × columns, nothing is added atomically, and the order of combination depends on the lists
alone. Numbers of edges on a CPU are computed by torch (``edge_numbers.py``).

**Listed blocks** on a CPU, where an engine walks over tiles, are folded where they lie: tiles that no list names are
left out. Nothing is gathered, and both directions of a gradient are one walk. Lists with a block that stands twice,
blocks that are too small for a tile, and what is not folded pair by pair are left to gathered pieces.

**Packed sequences** on a CPU: each sequence is a small fold of its own, on slices of the leaves. Pairs of two sequences
would be the identity, because a condition ``row's number == column's number`` says so (``mr.jagged``, documents). Where
these numbers rise along both axes, only the stretches of equal numbers are folded, without the condition. So a sequence
costs what it would alone, and what lies beyond the last one is never read. Short neighbours are one stretch, with the
condition; if that gives a NaN, each is folded alone after all, since a weight of 0 does not keep a neighbour's NaN or
infinity out of a sum.

**Gradients of monoids that have no local one** come from ``combine`` with all other pairs of a list
(``common/block_gradients.py``): autograd through the pieces and their combination. Pieces are gathered once more, each
batch of them when its gradient is due, and differentiated as small dense folds.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...plan import settings
from ...program import constructors
from ...program.constructors import LISTED
from ...program.expression import Expr, const, topological
from ...program.lower import Fold, find_same_sequence
from ...reductions import kind_of, outputs_of
from ..common import bounded_cache, combine, subproblem
from ..common.block_gradients import Blocks, iterate_block_reductions, refuse_lists
from ..common.evaluate import Evaluator, Sizes, allocate_result, pair_result_form, restore_domain, result_form
from ..common.subproblem import ChosenBlocks, Engine, Range, make_offset_leaf, offset_fold, slice_leaf
from . import edge_numbers
from .lists import (
    FlatLeaf,
    Layout,
    Lists,
    LocalFold,
    Piece,
    check_numbers,
    combine_parts,
    find_lists,
    flatten_index,
    localize,
)

_CHECKPOINT: dict[str, Any] = dict(use_reentrant=False, preserve_rng_state=False)  # differentiated, pieces wait nowhere
_CACHE = 4 * 2**20  # bytes of a batch element that the leaves of pieces take on a CPU, so that they stay in its cache
_DEVICE = 256 * 2**20  # and elsewhere
_LONGEST = 4096  # indices of a piece
_FILLED = 2**20  # bytes of leaves and pairs that take as long as a batch of pieces to begin, about a millisecond


def run(fold: Fold, leaves: list[Any], sizes: Sizes, engine: Engine, walk: Walk) -> list[Tensor]:
    """Run a fold over the pairs that its domain lists; the contract of every engine. ``walk``: an engine's walk over
    chosen tiles, None where it has none."""
    assert fold.domain is not None
    (form,), edges = fold.domain.attrs, fold.domain.attrs[0][0] == "edges"
    given = dict(zip(fold.leaves, leaves, strict=True))
    tensors = [given[a] for a in fold.domain.args]
    if sizes.device.type == "meta":  # lists without numbers: shapes alone
        return [
            _make_pair_zeros(given[r.args[1]], sizes, edges)
            if kind_of(r).per_pair
            else torch.empty(result_form(r, k, sizes)[0], dtype=result_form(r, k, sizes)[1], device="meta")
            for r, k in fold.outputs
        ]
    if (walked := run_blocks(fold, given, sizes, tensors, walk)) is not None:
        return walked
    results: list[Any] = [None] * len(fold.reductions)
    shared: edge_numbers.Shared = {}
    groups = _group_reductions(fold, leaves, sizes)
    for over, places in groups:
        found = None
        chosen = [fold.reductions[k] for k in places]
        find = functools.partial(find_lists, form, tensors, sizes.rows, sizes.cols, over[0])
        lists, once = find(False), _has_once(fold, places)
        hidden, ragged = "" if lists.limit is None else "kept", bool(lists.kept_size % lists.kept_block)
        local = localize(fold, over[0], places, hidden, ragged)
        if edges and not once and edge_numbers.can_run(local, lists, sizes):
            with contextlib.suppress(edge_numbers.Tied):
                count = tensors[1].shape[-1]
                found = edge_numbers.run(local, given, sizes, lists, over[0], count, shared, len(groups) > 1)
        if found is None:
            ordered = once or any(kind_of(r).place is not None for r in chosen)
            lists = find(True) if ordered and form[0] != "pages" else lists
            if edges and any(e.is_pair for e in local.leaves) and any(name == "once" for name, _ in local.extra):
                check_numbers(lists)
            found = _DirectionRun(fold, local, given, sizes, lists, over[0], over[1], edges, engine).run()
        for k, values in zip(places, found, strict=True):
            results[k] = values
    return subproblem.add_unlisted(fold, [t for values in results for t in values], tensors, sizes)


def _has_once(fold: Fold, places: tuple[int, ...]) -> bool:
    local = localize(fold, fold.reductions[places[0]].attrs[1], places)
    return any(name == "once" for name, _ in local.extra)


def _group_reductions(
    fold: Fold, leaves: Sequence[Any], sizes: Sizes
) -> list[tuple[tuple[str, tuple[int, ...]], tuple]]:
    """The reductions that run together: of one direction, combined over the same batch dimensions.

    A sum that is the gradient of a leaf without some batch dimension is combined along it, so that columns that many
    sequences share have one result."""
    found: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for k, r in enumerate(fold.reductions):
        over = "rows" if r.attrs[1] == "rows" else "cols"
        leaf = None if kind_of(r).both_axes else fold.gradient_of.get(r)
        merged: tuple[int, ...] = ()
        if leaf is not None and fold.domain is not None:
            value = leaves[fold.leaves.index(leaf)]
            own = leaves[fold.leaves.index(fold.domain.args[-1])].shape
            count = len(sizes.batch)
            merged = tuple(d for d in range(count) if own[d] != 1 and value.shape[d] == 1)
        found.setdefault((over, merged), []).append(k)
    return [(key, tuple(places)) for key, places in found.items()]


class _DirectionRun:
    """The reductions of one direction."""

    def __init__(
        self,
        fold: Fold,
        local: LocalFold,
        given: dict[Expr, Any],
        sizes: Sizes,
        lists: Lists,
        over: str,
        merged: tuple[int, ...],
        edges: bool,
        engine: Engine,
    ):
        self.fold, self.local, self.given, self.sizes, self.lists, self.over = fold, local, given, sizes, lists, over
        self.merged, self.engine, self.edges = merged, engine, edges
        self.layout = Layout.of(sizes.batch, lists, self._find_packed())
        ragged = bool(lists.kept_size % lists.kept_block)
        self.filled = localize(fold, over, local.places, "folded", ragged)  # the same for pieces that are filled up
        self.extra = {e: name for name, e in (*local.extra, *self.filled.extra)}
        derived = {fold.reductions[k].args[1] for k in local.places if kind_of(fold.reductions[k]).per_pair}
        self.flat = {
            e: FlatLeaf(given[e], e, self.layout, edges, once=e not in derived)
            for e in self.filled.leaves
            if e not in self.extra and isinstance(given[e], Tensor)
        }
        self.reductions = [fold.reductions[k] for k in local.places]
        kept = [1 if d in merged else n for d, n in enumerate(lists.batch)]
        self.own = [kept[d] for d in self.layout.own]
        self.blocks = math.prod(kept) * lists.kept_blocks
        self.pairs = {
            k: _make_pair_zeros(given[r.args[1]], sizes, edges)
            for k, r in zip(local.places, self.reductions, strict=True)
            if kind_of(r).per_pair
        }
        self.pairs |= {  # or entries of a table
            k: torch.zeros(result_form(r, 0, sizes)[0], dtype=sizes.compute, device=sizes.device)
            for k, r in zip(local.places, self.reductions, strict=True)
            if kind_of(r).both_axes
        }

    def run(self) -> list[list[Tensor]]:
        bytes_kept, bytes_unit = self._count_bytes()
        elements = max(1, math.prod(self.layout.shared_sizes))  # which engines in torch run one after the other
        room = min(_CACHE * elements, _DEVICE // 4) if self.sizes.device.type == "cpu" else _DEVICE
        room = min(room, (settings.requested_budget() or room)) // settings.shrink_factor()
        most = max(1, min(_LONGEST // self.lists.unit, room // max(1, bytes_unit)))
        pieces = self.lists.pieces(1 << most.bit_length() - 1, self.merged, self._count_spare_units(bytes_unit))
        results = [self._make_empty(r) for r in self.reductions]
        again = torch.is_grad_enabled() and any(leaf.flat.requires_grad for leaf in self.flat.values())
        parts: list[list[Tensor]] = []
        for batch in pieces.batches:
            step = max(1, room // max(1, bytes_kept + batch.units * bytes_unit))
            for first in range(0, len(batch.list), step):
                piece = Piece(self.lists, batch, self.over, first, min(first + step, len(batch.list)))
                found = self._fold_piece(piece) if not again else checkpoint(self._fold_piece, piece, **_CHECKPOINT)
                if batch.complete:
                    for targets, values in zip(results, found, strict=True):
                        for t, v in zip(targets, values, strict=True):
                            t.index_copy_(self.layout_dim, piece.slot, v.to(t.dtype))
                else:
                    self._keep_parts(parts, pieces.parts, piece, found)
        if pieces.parts:
            for r, targets, state in zip(self.reductions, results, parts, strict=True):
                if not targets:
                    continue
                merge = functools.partial(combine.merge_states, r)
                done = combine_parts(state, pieces.counts, 1 + self.layout_dim, merge)
                for t, v in zip(targets, combine.close_state(r, done), strict=True):
                    t.index_copy_(self.layout_dim, pieces.owners, v.to(t.dtype))
        named = dict(zip(self.local.places, results, strict=True))
        return [
            [self.pairs[k]] if k in self.pairs else [self._to_result(t) for t in named[k]] for k in self.local.places
        ]

    def _count_spare_units(self, bytes_unit: int) -> int:
        """Units that may be filled up in a batch of pieces on a CPU, where beginning a batch takes as long."""
        ranked = any(r.attrs[0] == "topk" for r in self.reductions)  # what fills up would stand before NaN
        if self.sizes.device.type != "cpu" or self.pairs or self.lists.limit is not None or ranked:
            return 0
        return max(1, _FILLED // bytes_unit)

    def _find_packed(self) -> tuple[int, ...]:
        """The batch dimensions that only rows have, where columns are folded: more rows for the same columns."""
        kinds = [kind_of(self.fold.reductions[k]) for k in self.local.places]
        if self.over != "cols" or any(kind.per_pair or kind.both_axes for kind in kinds):
            return ()
        count, others = len(self.sizes.batch), []
        for e in self.local.leaves:
            value = self.given.get(e)
            if e.is_pair and not self.edges:  # numbers of each row, which would have to be there as often as the row
                return ()
            if isinstance(value, Tensor) and (e.cols or not e.rows):
                behind = (1 if self.edges and e.is_pair else e.rows + e.cols) + (e.feature is not None)
                lead = value.shape[: value.dim() - behind]
                others.append((*(1,) * (count - len(lead)), *lead))
        free = [
            d for d in range(count) if self.sizes.batch[d] > 1 and (not self.lists.batch or self.lists.batch[d] == 1)
        ]
        return tuple(d for d in free if all(shape[d] == 1 for shape in others))

    @property
    def kept_block(self) -> int:
        """The kept indices of a piece."""
        return self.lists.kept_block * self.layout.copies

    @property
    def layout_dim(self) -> int:
        """The dimension of kept blocks in results, and of pieces in what the engine returns."""
        return len(self.layout.shared)

    def _count_bytes(self) -> tuple[int, int]:
        """Bytes that a piece takes for its kept indices, and for each unit of folded ones."""
        kept, unit = 0, 0
        wide, shared = self.sizes.compute.itemsize, math.prod(self.layout.shared_sizes)
        for e, leaf in self.flat.items():
            width = leaf.flat.element_size() * (leaf.flat.shape[-1] if e.feature is not None else 1)
            each = width * math.prod(leaf.flat.shape[: leaf.dim])
            if e.is_pair:
                unit += each * self.kept_block * self.lists.unit
            elif (e.rows and self.over == "rows") or (e.cols and self.over == "cols"):
                unit += each * self.lists.unit
            else:
                kept += each * self.kept_block
        pairs = shared * wide * self.kept_block * self.lists.unit
        kept += sum(shared * 8 * self.sizes.of(str(r.args[2].feature)) for r in self.reductions if kind_of(r).both_axes)
        return kept, max(1, unit + pairs + 16 * self.lists.unit)

    def _fold_piece(self, piece: Piece) -> list[list[Tensor]]:
        """The results of each reduction for some pieces, ``[*shared, pieces, kept indices, features]``."""
        batch = (*self.layout.shared_sizes, piece.count)
        lengths = piece.rows.shape[1] * self.layout.copies, piece.cols.shape[1]
        sizes = replace(self.sizes, rows=lengths[0], cols=lengths[1], batch=batch)
        local = self.local if piece.length is None else self.filled
        values = {e: self._read_leaf(e, piece) for e in local.leaves}
        found: dict[int, list[Tensor]] = {}
        if local.fold is not None:
            fold = local.fold
            results = self.engine(fold, [values[e] for e in fold.leaves], sizes)
            for k, (r, mine) in zip(local.folded, combine.split(fold, results), strict=True):
                if kind_of(r).both_axes:
                    mine = self._add_to_table(k, mine, piece)
                found[k] = self._write_pairs(k, mine, piece) if kind_of(r).per_pair else mine
        plain = iter(local.plain)
        for k in self.local.places:
            if k not in found:
                found[k] = self._reduce_plain(next(plain), values, sizes)
        for k, r in zip(self.local.places, self.reductions, strict=True):
            at = kind_of(r).place
            if at is not None:
                found[k] = [self._to_index(t, piece) if n == at else t for n, t in enumerate(found[k])]
        return [found[k] for k in self.local.places]

    def _read_leaf(self, e: Expr, piece: Piece) -> Any:
        if e in self.extra:
            value = piece.extra(self.extra[e], self.sizes)
            value = value.repeat(1, self.layout.copies) if e.rows and self.layout.packed else value
            return value.view(*(1,) * self.layout_dim, *value.shape) if isinstance(value, Tensor) else value
        return self.flat[e].read(piece) if e in self.flat else self.given[e]

    def _reduce_plain(self, r: Expr, values: dict[Expr, Any], sizes: Sizes) -> list[Tensor]:
        """A reduction of what has one axis at most, by torch."""
        named = {e.attrs[0]: v for e, v in values.items()}
        found = kind_of(r).dense_results(Evaluator(sizes, named)(r))
        length = sizes.rows if r.attrs[1] == "cols" else sizes.cols
        outcome = []
        for t, (feature, _) in zip(found, outputs_of(r), strict=True):
            t = t.squeeze(-1 - (feature is not None) - (r.attrs[1] == "rows"))
            tail = t.shape[-1:] if feature is not None else ()
            outcome.append(t.expand(*sizes.batch, length, *tail))
        return outcome

    def _to_index(self, place: Tensor, piece: Piece) -> Tensor:
        """Places among the folded indices of a piece as indices of the whole."""
        pages = self.lists.limit is not None or self.fold.domain.attrs[0][0] == "pages"  # type: ignore[union-attr]
        names = piece.position if pages and self.over == "cols" else piece.folded
        names = names.view(*(1,) * self.layout_dim, piece.count, *(1,) * (place.dim() - self.layout_dim - 2), -1)
        names = names.expand(*place.shape[:-1], names.shape[-1])
        return torch.where(place < 0, place, names.gather(-1, place.clamp(min=0)))

    def _write_pairs(self, k: int, found: list[Tensor], piece: Piece) -> list[Tensor]:
        """Add the numbers per pair of some pieces to the whole."""
        leaf = self.fold.reductions[k].args[1]
        flat = self.flat[leaf]
        at, target = flat.index(piece), FlatLeaf(self.pairs[k], leaf, self.layout, self.edges).flat
        values = found[0].to(target.dtype)
        assert at is not None
        unique = self.edges and all(n != 1 for n in flat.batch)
        values = values.flatten(flat.dim)
        valid = None
        if piece.lists.kept_block > 1 and piece.lists.kept_size % piece.lists.kept_block:
            inside = torch.arange(piece.lists.kept_block, device=at.device)
            valid = piece.lists.kept[piece.list].unsqueeze(1) * piece.lists.kept_block + inside
            valid = (valid < piece.lists.kept_size).unsqueeze(2).expand(at.shape).reshape(-1)
        at = at.reshape(-1)
        if valid is not None:
            at, values = at[valid], values[..., valid]
        if unique:
            target.index_copy_(flat.dim, at, values)
        else:
            target.movedim(-1, 0).index_put_((at,), values.movedim(-1, 0), accumulate=True)
        return []

    def _add_to_table(self, k: int, found: list[Tensor], piece: Piece) -> list[Tensor]:
        """Add what some pieces have for a table's entries, ``[*shared, pieces, n]``, to the whole ``[*batch, n]``."""
        total, (count,) = self.pairs[k], found
        order = (*self.layout.shared, *self.layout.own, len(self.sizes.batch))
        flat = total.permute(order).reshape(*count.shape[: self.layout_dim], -1, count.shape[-1])
        places = [piece.coordinates[d] for d in self.layout.own]
        at = flatten_index(places, [self.sizes.batch[d] for d in self.layout.own])
        if not isinstance(at, Tensor):
            flat += count.sum(self.layout_dim, keepdim=True)
        else:  # sorted, so deterministic on GPUs
            flat.movedim(self.layout_dim, 0).index_put_((at,), count.movedim(self.layout_dim, 0), accumulate=True)
        if flat.data_ptr() != total.data_ptr():
            back = flat.view([total.shape[d] for d in order]).permute([order.index(d) for d in range(total.dim())])
            total.copy_(back)
        return []

    def _make_empty(self, r: Expr) -> list[Tensor]:
        """Results of all kept blocks, each as if its list were empty."""
        if kind_of(r).per_pair or kind_of(r).both_axes:
            return []
        lead = *self.layout.shared_sizes, self.blocks, self.kept_block
        return [t.expand(*lead, *t.shape[1:]).contiguous() for t in make_empty_results(r, self.sizes)]

    def _keep_parts(self, parts: list[list[Tensor]], count: int, piece: Piece, found: list[list[Tensor]]) -> None:
        """Put the states of some pieces among the parts, which are allocated when the first are known."""
        length = piece.folded.shape[1]
        for n, (r, values) in enumerate(zip(self.reductions, found, strict=True)):
            state = combine.open_state(r, [t.unsqueeze(0) for t in values], [length], [0]) if values else []
            if len(parts) <= n:
                at = 1 + self.layout_dim
                parts.append([t.new_empty(*t.shape[:at], count, *t.shape[at + 1 :]) for t in state])
            for t, v in zip(parts[n], state, strict=True):
                t.index_copy_(1 + self.layout_dim, piece.slot, v.to(t.dtype))

    def _to_result(self, t: Tensor) -> Tensor:
        """``[*shared, blocks, block, features]`` as ``[*batch, kept axis, features]``."""
        lists, layout = self.lists, self.layout
        tail = t.shape[self.layout_dim + 2 :]
        packed = [layout.batch[d] for d in layout.packed]
        first = self.layout_dim + len(self.own)  # the dimension of kept blocks; packed ones move in front of it
        t = t.reshape(*t.shape[: self.layout_dim], *self.own, lists.kept_blocks, *packed, lists.kept_block, *tail)
        t = t.movedim(first, first + len(packed)).flatten(first + len(packed), first + len(packed) + 1)
        t = t.narrow(first + len(packed), 0, lists.kept_size)
        order = [0] * len(self.sizes.batch)
        for at, d in enumerate((*layout.shared, *layout.own, *layout.packed)):
            order[d] = at
        return t.permute((*order, *range(len(order), t.dim()))).contiguous()


def make_empty_results(r: Expr, sizes: Sizes) -> list[Tensor]:
    """The results of a reduction that folds no pair, of one kept index: ``[1(, features)]``."""
    found = []
    for k, (feature, _) in enumerate(outputs_of(r)):
        tail = () if feature is None else (sizes.of(str(feature)),)
        found.append(torch.empty(0, 1, *tail, dtype=result_form(r, k, sizes)[1], device=sizes.device))
    kind = kind_of(r)
    nothing = combine.close_state(r, kind.merge_all(r.attrs[2], [kind.open(r.attrs[2], found, [])]))
    return [t.to(f.dtype) for t, f in zip(nothing, found, strict=True)]


def _make_pair_zeros(like: Tensor, sizes: Sizes, edges: bool) -> Tensor:
    """Zeros for a result per pair, or per edge."""
    shape, dtype = (tuple(like.shape), sizes.compute) if edges else pair_result_form(like, sizes)
    return torch.zeros(shape, dtype=dtype, device=sizes.device)


# Listed blocks, where they lie

Walk = Callable[[Fold, list[Any], Sizes, ChosenBlocks], list[Tensor] | None]
_LEAST = 16  # indices of a block
_MOST = 2**24  # blocks of a table


def run_blocks(
    fold: Fold, given: Mapping[Expr, Any], sizes: Sizes, tensors: Sequence[Tensor], walk: Walk
) -> list[Tensor] | None:
    """Run a fold over listed blocks; None where ``walk`` cannot."""
    assert fold.domain is not None
    (form,) = fold.domain.attrs
    if form[0] != "blocks" or sizes.device.type != "cpu" or min(form[1:3]) < _LEAST:
        return None
    whole = _drop_lists(fold)
    if whole is None or any(type(t) is not Tensor for t in tensors) or torch._C._len_torch_dispatch_stack():
        return None
    make = functools.partial(_make_table, form, tensors, sizes.rows, sizes.cols)
    chosen = bounded_cache.compute_once(("chosen", form, sizes.rows, sizes.cols, *tensors), make, sizes.device)
    found = None if chosen is None else walk(whole, [given[e] for e in whole.leaves], sizes, chosen)
    return None if found is None else subproblem.add_unlisted(fold, found, tensors, sizes)


@functools.lru_cache(maxsize=1024)
def _drop_lists(fold: Fold) -> Fold | None:
    """The fold of all pairs; None where some reduction is not one of pairs, or depends on how many there are."""
    replaced = {e: const(True) for e in topological(fold.reductions) if e.op in LISTED and e.op != "listed_position"}
    reductions = constructors.substitute(fold.reductions, replaced)
    scales = constructors.substitute(fold.scales, replaced)
    for r in reductions:
        pairs = kind_of(r).per_pair or (any(a.rows for a in r.args) and any(a.cols for a in r.args))
        if not pairs or kind_of(r).gathers or r.attrs[0] == "moments":
            return None
    used = set(topological([*reductions, *scales]))
    if constructors.find_listed([*reductions, *scales]) is not None or len(set(reductions)) < len(reductions):
        return None
    new = dict(zip(fold.reductions, reductions, strict=True))
    gradients = tuple((new[r], e) for r, e in fold.gradients)
    leaves = tuple(e for e in fold.leaves if e in used or any(e is g for _, g in gradients))
    return Fold(leaves, tuple(reductions), tuple(scales), raised=True, exact=fold.exact, gradients=gradients)


def _make_table(form: tuple, tensors: Sequence[Tensor], rows: int, cols: int) -> ChosenBlocks | None:
    lists = restore_domain(form, tensors).listing(rows, cols)
    blocks = -(-cols // lists.col_block)
    if not 0 < lists.groups * blocks <= _MOST:
        return None
    times = lists.items.new_zeros(lists.groups * blocks, dtype=torch.int32)
    owner = lists.owners().long()
    at = (owner * blocks + lists.items)[owner < lists.groups]
    times.index_add_(0, at, torch.ones_like(at, dtype=torch.int32))
    if not len(at) or int(times.max()) > 1:
        return None
    table = times.to(torch.int8).view(*lists.batch, -1, blocks)
    return ChosenBlocks(table, lists.row_block, lists.col_block, len(at) / len(times))


# Packed sequences

_SHORT = 2**16  # pairs of all batch elements, which take less time than a fold takes to begin


@dataclass(frozen=True)
class Stretch:
    """Neighbouring sequences: ``parts``, where there are several."""

    rows: slice
    cols: slice
    parts: tuple[Stretch, ...] = ()

    @property
    def pairs(self) -> int:
        return (self.rows.stop - self.rows.start) * (self.cols.stop - self.cols.start)


def run_packed(fold: Fold, leaves: list[Any], sizes: Sizes, engine: Engine) -> list[Tensor] | None:
    """Run a fold sequence by sequence; None where it does not fold packed sequences, or their numbers are not known."""
    same = find_same_sequence(fold.reductions)
    if same is None or sizes.device.type != "cpu":
        return None
    short = _SHORT // max(1, torch.Size(sizes.batch).numel())
    row, col = (leaves[fold.leaves.index(e)] for e in same.args)
    stretches = _find_stretches(row, col, short)
    if stretches is None:
        return None
    outputs: list[Tensor] = []
    for r, k in fold.outputs:
        if kind_of(r).per_pair:
            shape, dtype = pair_result_form(leaves[fold.leaves.index(r.args[1])], sizes)
            outputs.append(torch.zeros(shape, dtype=dtype, device="cpu"))
        else:
            outputs.append(allocate_result(fold, r, k, leaves, sizes))
    _fill_unpaired(fold, outputs, stretches, sizes)
    pairs, alone = sum(s.pairs for s in stretches), _drop_condition(fold, same)
    for s in stretches:
        alike = replace(sizes, repeats=max(1, pairs // s.pairs))
        found = _fold_stretch(fold if s.parts else alone, leaves, alike, s, engine)
        mixed = s.parts if any(t.is_floating_point() and bool(t.isnan().any()) for t in found) else ()
        for part in mixed or (s,):
            found = _fold_stretch(alone, leaves, alike, part, engine) if mixed else found
            _write_stretch(fold, found, part, len(sizes.batch), outputs)
    return outputs


def _fold_stretch(fold: Fold, leaves: list[Any], sizes: Sizes, s: Stretch, engine: Engine) -> list[Tensor]:
    row, col = Range(s.rows, s.rows.start), Range(s.cols, s.cols.start)
    own = replace(sizes, rows=s.rows.stop - s.rows.start, cols=s.cols.stop - s.cols.start)
    placed, fed = offset_fold(fold)
    cut = [slice_leaf(v, e, row, col, False) for v, e in zip(leaves, fold.leaves, strict=True)]
    starts, totals = {"row_start": row.start, "col_start": col.start}, (sizes.of("rows"), sizes.of("cols"))
    given = dict(zip(fold.leaves, cut, strict=True))
    cut += [make_offset_leaf(f, given, starts, totals, own) for f in fed]
    return subproblem.add_unseen(placed, engine(placed, cut, own), lambda over: (own.here(over), sizes.here(over)))


def _write_stretch(fold: Fold, found: list[Tensor], s: Stretch, batch: int, outputs: list[Tensor]) -> None:
    for (r, k), t, target in zip(fold.outputs, found, outputs, strict=True):
        over, kind = r.attrs[1], kind_of(r)
        if kind.per_pair:
            for axis, at in ((-2, s.rows), (-1, s.cols)):
                if target.shape[axis] != 1:
                    target = target.narrow(axis, at.start, at.stop - at.start)
            target += t
            continue
        if kind.both_axes:
            target += t
            continue
        kept, folded = (s.rows, s.cols) if over == "cols" else (s.cols, s.rows)
        if k == kind.place and folded.start:
            t = torch.where(t < 0, t, t + folded.start)
        target.narrow(batch, kept.start, kept.stop - kept.start).copy_(t)


def _fill_unpaired(fold: Fold, outputs: list[Tensor], stretches: Sequence[Stretch], sizes: Sizes) -> None:
    """What rows and columns without a partner have, which are of no stretch."""
    full = {"cols": sum(s.rows.stop - s.rows.start for s in stretches) == sizes.rows}
    full["rows"] = sum(s.cols.stop - s.cols.start for s in stretches) == sizes.cols
    for r, mine in combine.split(fold, outputs):
        if kind_of(r).both_axes:
            mine[0].zero_()
        elif not kind_of(r).per_pair and not full[r.attrs[1]]:
            for t, nothing in zip(mine, make_empty_results(r, sizes), strict=True):
                t.copy_(nothing)


@functools.lru_cache(maxsize=1024)
def _drop_condition(fold: Fold, same: Expr) -> Fold:
    """The fold of one sequence; what would no longer depend on rows and columns both keeps the condition."""
    reductions = []
    for r in fold.reductions:
        args = constructors.substitute(r.args, {same: const(True)})
        still = kind_of(r).per_pair or (any(a.rows for a in args) and any(a.cols for a in args))
        reductions.append(constructors.rebuild(r, args) if still else r)
    return Fold(fold.leaves, tuple(reductions), fold.scales, exact=fold.exact)


def _find_stretches(rows: Any, cols: Any, short: int) -> tuple[Stretch, ...] | None:
    """The stretches of equal numbers; None where the numbers do not rise, differ by batch element or have no values."""
    if any(type(t) is not Tensor or t.numel() != t.shape[-1] for t in (rows, cols)):
        return None
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return None
    make = functools.partial(_make_stretches, rows.reshape(-1), cols.reshape(-1), short)
    return bounded_cache.compute_once(("stretches", rows, cols, short), make, rows.device)


def _make_stretches(rows: Tensor, cols: Tensor, short: int) -> tuple[Stretch, ...] | None:
    if bool((rows.diff() < 0).any()) or bool((cols.diff() < 0).any()):
        return None
    found: list[Stretch] = []
    sides: list[dict[int, slice]] = []
    for t in (rows, cols):
        numbers, counts = torch.unique_consecutive(t, return_counts=True)
        places = zip(numbers.tolist(), counts.cumsum(0).tolist(), counts.tolist(), strict=True)
        sides.append({n: slice(end - count, end) for n, end, count in places})
    for row, col in ((own, sides[1][n]) for n, own in sides[0].items() if n in sides[1]):
        own, last = Stretch(row, col), found[-1] if found else None
        if last is not None and _is_short(last, row, col, short):
            both = slice(last.rows.start, row.stop), slice(last.cols.start, col.stop)
            found[-1] = Stretch(*both, (*(last.parts or (last,)), own))
        else:
            found.append(own)
    return tuple(found)


def _is_short(last: Stretch, row: slice, col: slice, short: int) -> bool:
    """Whether a sequence joins the stretch that ends where it begins: both have at most ``short`` pairs."""
    adjacent = last.rows.stop == row.start and last.cols.stop == col.start
    return adjacent and (row.stop - last.rows.start) * (col.stop - last.cols.start) <= short


# Monoids without a local gradient


def differentiate_by_pieces(
    fold: Fold, leaves: Sequence[Any], sizes: Sizes, wanted: Sequence[bool], cotangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of leaves (those ``wanted``); as ``block_gradients.differentiate_by_blocks``, over a domain."""
    grads: list[Tensor | None] = [None] * len(leaves)
    again = torch.is_grad_enabled()
    for one, given in iterate_block_reductions(fold, cotangents, lists=True):
        if torch._C._are_functorch_transforms_active():
            refuse_lists(one.reductions[0], "under a transform of torch.func")
        asked = [k for k, w in enumerate(wanted) if w]
        with torch.enable_grad():
            own = [v if again or not w else v.detach().requires_grad_() for v, w in zip(leaves, wanted, strict=True)]
            wide = [v.to(sizes.compute) if w else v for v, w in zip(own, wanted, strict=True)]
            found = run(one, wide, sizes, _fold_piece, lambda *_: None)
        pairs = [(y, c.to(y.dtype)) for y, c in zip(found, given, strict=True) if c is not None and y.requires_grad]
        if not pairs:
            continue
        roots, directions = zip(*pairs, strict=True)
        made = torch.autograd.grad(roots, [own[k] for k in asked], directions, create_graph=again, allow_unused=True)
        for k, g in zip(asked, made, strict=True):
            before = grads[k]
            grads[k] = before if g is None else g if before is None else before + g
    return grads


def _fold_piece(fold: Fold, leaves: list[Any], sizes: Sizes) -> list[Tensor]:
    return Blocks(fold, sizes, tuple(leaves), (True,) * len(leaves)).states()
