"""A fold over a part of a larger problem: some ranges of its rows and columns, or the pairs that a list names.

A shard, a step of a ring and a chunk of a stream are all subproblems: the leaves hold some of the global rows and
columns, and the results are states (``combine.py``) that are merged with those of the other subproblems. Each pair of
contiguous ranges is one engine call on slices of the leaves.

Pairs that no list names, or of other sequences, are not folded. They are added afterwards to the results that they
change: whatever says that a pair does not exist, a condition or a list, it is the identity of its reduction. Of the k
smallest numbers it is an infinity, and stands before NaN.

Out of a grid of blocks, :class:`ChosenBlocks` are those that a fold computes: an engine that walks over tiles leaves
out the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...program import expression
from ...program.constructors import apply, substitute
from ...program.expression import Expr, const, index, node, reduce_node, topological
from ...program.lower import Fold, split_index_match
from ...reductions import kind_of
from . import combine
from .bounded_cache import BoundedCache
from .combine import State, split
from .evaluate import Sizes, pair_result_form, restore_domain
from .shard import Ranges

Engine = Callable[[Fold, list[Any], Sizes], list[Tensor]]


@dataclass(frozen=True)
class Subproblem:
    """The global ranges of rows and columns that the leaves hold, of ``totals`` rows and columns. With ``wide``,
    arguments per pair hold all global columns instead."""

    rows: Ranges
    cols: Ranges
    totals: tuple[int, int]
    wide: bool = False


def run_subproblem(
    fold: Fold, leaves: list[Any], sizes: Sizes, part: Subproblem, engine: Engine, into: dict[int, Tensor] | None = None
) -> list[State]:
    """Run a fold on a subproblem; returns one state per reduction, for the rows or the columns of the subproblem.
    Results per pair are added to ``into``, by the number of their reduction."""
    rows, cols = _join_ranges(part.rows), _join_ranges(part.cols)
    into = allocate_pair_results(fold, leaves, sizes) if into is None and len(rows) * len(cols) > 1 else into
    grid: list[list[list[State]]] = []
    for row in rows:
        grid.append([])
        for col in cols:
            grid[-1].append(_run_block(fold, leaves, sizes, part, row, col, engine))
            for k, target in (into or {}).items():
                _add_pair_results(target, grid[-1][-1][k][0].squeeze(0), row, col, part.wide)
                grid[-1][-1][k] = []
    states = []
    for k, r in enumerate(fold.reductions):
        if kind_of(r).per_pair:
            states.append([into[k].unsqueeze(0)] if into is not None else grid[0][0][k])
            continue
        if kind_of(r).both_axes:
            states.append(combine.merge_states(r, [block[k] for line in grid for block in line]))
            continue
        lines = grid if r.attrs[1] == "cols" else list(zip(*grid, strict=True))
        kept = [combine.merge_states(r, [block[k] for block in line]) for line in lines]
        states.append(
            kept[0] if len(kept) == 1 else [torch.cat(ts, 1 + len(sizes.batch)) for ts in zip(*kept, strict=True)]
        )
    return states


def run_block(fold: Fold, leaves: list[Any], sizes: Sizes, rows: slice, cols: slice, engine: Engine) -> list[State]:
    """Run a fold on some rows and columns of a whole problem; returns one state per reduction."""
    whole = Subproblem(((0, sizes.rows),), ((0, sizes.cols),), (sizes.rows, sizes.cols))
    return _run_block(fold, leaves, sizes, whole, Range(rows, rows.start), Range(cols, cols.start), engine)


def finish_states(fold: Fold, states: list[State]) -> list[Tensor]:
    """The results of a fold, from the states of its reductions."""
    return [t for r, state in zip(fold.reductions, states, strict=True) for t in combine.close_state(r, state)]


def allocate_pair_results(fold: Fold, leaves: list[Any], sizes: Sizes) -> dict[int, Tensor]:
    """Zeros for the results per pair of a fold, each in the shape of the argument it is a gradient of."""
    found = {}
    for k, r in enumerate(fold.reductions):
        if kind_of(r).per_pair:
            like = leaves[fold.leaves.index(r.args[1])]
            shape, dtype = pair_result_form(like, sizes)
            found[k] = torch.zeros(shape, dtype=dtype, device=like.device)
    return found


def _add_pair_results(target: Tensor, value: Tensor, row: Range, col: Range, wide: bool) -> None:
    """Add a block's results per pair; along an axis of size 1 all blocks are summed."""
    for axis, at in ((-2, row.local), (-1, col.inside(wide))):
        if target.shape[axis] != 1:
            target = target.narrow(axis, at.start, at.stop - at.start)
    target += value


@dataclass(frozen=True)
class Range:
    """A contiguous range: its local slice, and its global start."""

    local: slice
    start: int

    def inside(self, wide: bool) -> slice:
        """The slice of a tensor that holds the local indices, or (``wide``) all global ones."""
        return slice(self.start, self.start + self.local.stop - self.local.start) if wide else self.local


def _join_ranges(ranges: Ranges) -> list[Range]:
    """The ranges, with adjacent ones joined."""
    found: list[Range] = []
    at = 0
    for start, stop in ranges:
        count = stop - start
        if found and (last := found[-1]).start + last.local.stop - last.local.start == start:
            found[-1] = Range(slice(last.local.start, at + count), last.start)
        else:
            found.append(Range(slice(at, at + count), start))
        at += count
    return found


def _run_block(
    fold: Fold, leaves: list[Any], sizes: Sizes, part: Subproblem, row: Range, col: Range, engine: Engine
) -> list[State]:
    own = replace(sizes, rows=row.local.stop - row.local.start, cols=col.local.stop - col.local.start)
    placed, fed = offset_fold(fold)
    cut = list(leaves)
    if fold.domain is None:  # else rows are divided with their lists, and there is one block
        cut = [slice_leaf(v, e, row, col, part.wide) for v, e in zip(leaves, fold.leaves, strict=True)]
    starts = {"row_start": row.start, "col_start": col.start}
    given = dict(zip(fold.leaves, cut, strict=True))
    cut += [make_offset_leaf(f, given, starts, part.totals, own) for f in fed]
    found = [t.unsqueeze(0) for t in engine(placed, cut, own)]
    along = {"rows": (own.rows, row.start), "cols": (own.cols, col.start), "neither": (0, 0), "both": (0, 0)}
    return [
        combine.open_state(r, mine, [along[r.attrs[1]][0]], [along[r.attrs[1]][1]])
        for r, mine in combine.split(fold, found)
    ]


def slice_leaf(value: Any, e: Expr, row: Range, col: Range, wide: bool) -> Any:
    """The rows and columns of a leaf that a block reads; broadcast axes (size 1) of arguments per pair stay."""
    if not isinstance(value, Tensor):
        return value
    last = value.dim() - 1 - (e.feature is not None)
    cuts = [(last - e.cols, row.local)] if e.rows else []
    cuts += [(last, col.inside(wide and e.is_pair))] if e.cols else []
    for axis, at in cuts:
        if not e.is_pair or value.shape[axis] != 1:
            value = value.narrow(axis, at.start, at.stop - at.start)
    return value


@dataclass(frozen=True)
class Target:
    """A leaf that stands for ``of`` (a leaf or an index), counted from the first ``row`` or ``col`` of the part."""

    of: Expr
    axis: str


Fed = str | Target  # "row_start", "col_start", "num_rows", "num_cols", or a target


@functools.lru_cache(maxsize=1024)
def offset_fold(fold: Fold) -> tuple[Fold, tuple[Fed, ...]]:
    """The fold for a part, and what must be fed to it behind its own leaves (nothing where no place is asked for)."""
    fed: dict[Fed, Expr] = {}

    def number(name: str) -> Expr:
        return fed.setdefault(name, node("leaf", (), (name,), rows=False, cols=False, feature=None, dtype="int"))

    def target(of: Expr, axis: str) -> Expr:
        name = f"{of if of.op == 'leaf' else of.op}_from_{axis}"
        leaf = node("leaf", (), (name,), rows=of.rows, cols=of.cols, feature=of.feature, dtype="int")
        return fed.setdefault(Target(of, axis), leaf)

    fields = [f for r in fold.reductions for f in (r.args[1:] if kind_of(r).gathers else r.args)]
    replace: dict[Expr, Expr] = {}
    for e in topological(fields):
        hot = split_index_match(e)[0] if e.op == "eq" else None
        if hot is not None and not hot[1].args:
            replace[e] = apply("eq", index(hot[0]), target(hot[1], hot[0]))
    for e in topological([*fields, *fold.scales], stop=replace.__contains__):
        if e.op in ("row_index", "col_index"):
            replace[e] = apply("add", e, number(e.op.replace("index", "start")))
        elif e in (expression.size("rows"), expression.size("cols")):
            replace[e] = number(f"num_{e.attrs[0]}")
    reductions = []
    for r in fold.reductions:
        kind, over, params = r.attrs
        if kind_of(r).gathers:
            args = (target(r.args[0], params[0]), *substitute(r.args[1:], replace))
        else:
            args = substitute(r.args, replace)
        reductions.append(reduce_node(kind, over, params, args))
    scales = substitute(fold.scales, replace)
    return Fold((*fold.leaves, *fed.values()), tuple(reductions), scales, exact=fold.exact), tuple(fed)


def make_offset_leaf(
    what: Fed, given: dict[Expr, Any], starts: dict[str, int], totals: tuple[int, int], sizes: Sizes
) -> Any:
    if isinstance(what, str):
        return {**starts, "num_rows": totals[0], "num_cols": totals[1]}[what]
    away = starts[f"{what.axis}_start"]
    if what.of.op == "leaf":
        return given[what.of] - away
    own = "row" if what.of.op == "row_index" else "col"
    here = torch.arange(sizes.rows if own == "row" else sizes.cols, device=sizes.device)
    return (here + (starts[f"{own}_start"] - away)).view(*(1,) * len(sizes.batch), -1)


# Some reductions of a fold


@functools.lru_cache(maxsize=1024)
def keep_reductions(fold: Fold, places: tuple[int, ...]) -> Fold:
    """The same fold with some of its reductions, and the leaves of these."""
    reductions = tuple(fold.reductions[k] for k in places)
    scales = tuple(fold.scales[k] for k in places) if fold.scales else ()
    used = {*topological([*reductions, *scales])}
    gradients = tuple((r, e) for r, e in fold.gradients if r in reductions)
    leaves = tuple(e for e in fold.leaves if e in used or any(e is g for _, g in gradients))
    return replace(fold, leaves=leaves, reductions=reductions, scales=scales, gradients=gradients)


def choose_leaves(fold: Fold, leaves: Sequence[Any], part: Fold) -> list[Any]:
    """The leaves of a part of a fold (:func:`keep_reductions`)."""
    return [leaves[fold.leaves.index(e)] for e in part.leaves]


# Pairs that are best in their lists


class NamedPairs(NamedTuple):
    """A fold over lists, of which some reductions fold single pairs that rows (or columns) name. ``named``: these,
    without the lists; ``places``: per reduction of the whole fold, its own place in ``named`` or (below 0) in ``rest``,
    counted from -1 down."""

    named: Fold
    rest: Fold | None
    places: tuple[int, ...]

    def run(self, fold: Fold, leaves: Sequence[Any], sizes: Sizes, whole: Engine, listed: Engine) -> list[Tensor]:
        """Run the fold, by an engine of all pairs and one of lists."""
        found = combine.split(self.named, whole(self.named, choose_leaves(fold, leaves, self.named), sizes))
        rest = [] if self.rest is None else listed(self.rest, choose_leaves(fold, leaves, self.rest), sizes)
        others = [] if self.rest is None else combine.split(self.rest, rest)
        return [t for k in self.places for t in (found[k] if k >= 0 else others[-1 - k])[1]]


@functools.lru_cache(maxsize=1024)
def find_named_pairs(fold: Fold) -> NamedPairs | None:
    """Of a fold over lists, what folds only the pairs that were found best: the gradients of a maximum, of its place
    and of a top-k. Such a pair is listed, and the first of equal entries counts alone, so its number is read at its
    place and no list is walked. None where there is no such reduction, or where numbers belong to entries of lists."""
    if fold.domain is None or fold.domain.attrs[0][0] == "pages":
        return None
    edges = fold.domain.attrs[0][0] == "edges"
    replaced: dict[Expr, Expr] = {}
    at = []
    for k, (r, scale) in enumerate(fold.scaled):
        nodes = topological([r, scale])
        ops = {e.op for e in nodes}
        numbered = edges and any(e.op == "leaf" and e.is_pair for e in nodes)
        if kind_of(r).gathers and "listed_once" in ops and "listed_position" not in ops and not numbered:
            at.append(k)
            replaced |= {e: const(True) for e in nodes if e.op in ("listed", "listed_once")}
    if not at:
        return None
    part, rest = keep_reductions(fold, tuple(at)), tuple(k for k in range(len(fold.reductions)) if k not in at)
    named = dict(zip(part.reductions, substitute(part.reductions, replaced), strict=True))
    scales = dict(zip(named.values(), substitute(part.scales, replaced), strict=False))
    reductions = tuple(dict.fromkeys(named.values()))
    gradients = tuple((named[r], e) for r, e in part.gradients)
    used = {*topological([*reductions, *scales.values()])}
    leaves = tuple(e for e in part.leaves if e in used or any(e is g for _, g in gradients))
    whole = replace(
        part,
        leaves=leaves,
        reductions=reductions,
        scales=tuple(scales[r] for r in reductions) if scales else (),
        gradients=gradients,
    )
    own = {r: reductions.index(new) for r, new in named.items()}
    places = tuple(own[r] if k in at else -1 - rest.index(k) for k, r in enumerate(fold.reductions))
    return NamedPairs(whole, keep_reductions(fold, rest) if rest else None, places)


def add_unseen(fold: Fold, results: list[Any], count: Callable[[str], tuple[Any, int]]) -> list[Any]:
    """Results of the pairs that were folded as those of whole axes. ``count(over)``: of pairs of each kept index (a
    number, or a tensor of them), and of the axis that is folded."""
    found: list[Any] = []
    for r, own in split(fold, results):
        over = r.attrs[1]
        one_way = over in ("rows", "cols")
        found += kind_of(r).add_unseen(r.attrs[2], own, functools.partial(count, over)) if one_way else own
    return found


def add_unlisted(fold: Fold, results: list[Any], tensors: Sequence[Tensor], sizes: Sizes) -> list[Any]:
    """The same of the pairs that a domain lists; ``tensors``: its own."""
    assert fold.domain is not None
    lists = functools.partial(_count_listed, fold.domain.attrs[0], tensors, sizes.rows, sizes.cols)
    return add_unseen(fold, results, lambda over: (lists(over), sizes.here(over)))


def _count_listed(form: tuple, tensors: Sequence[Tensor], rows: int, cols: int, over: str) -> int | Tensor:
    """How many pairs each kept index folds: a number, or ``[*batch, kept]``."""
    if form[0] == "pages":
        return tensors[1].unsqueeze(-1) if over == "cols" else rows
    domain, (kept, folded) = restore_domain(form, tensors), (rows, cols) if over == "cols" else (cols, rows)
    lists = domain.listing(rows, cols) if over == "cols" else domain.transposed(rows, cols)
    count = lists.offsets.diff().long() * lists.col_block
    if cut := -folded % lists.col_block:  # the last block is shorter
        last = torch.where(lists.items == folded // lists.col_block, cut, 0)
        count -= count.new_zeros(lists.groups + 1).index_add_(0, lists.owners().long(), last.to(count.dtype))[:-1]
    return count.view(*lists.batch, -1).repeat_interleave(lists.row_block, -1)[..., :kept]


@dataclass(frozen=True, eq=False)
class ChosenBlocks:
    """``table`` [*batch, row blocks, column blocks] is 1 where a block of ``rows`` × ``cols`` pairs is folded, else 0;
    ``share`` of all are. ``calls``: what an engine has prepared for these blocks, and forgets with them."""

    table: Tensor
    rows: int
    cols: int
    share: float
    calls: BoundedCache[tuple, Any] = field(default_factory=lambda: BoundedCache(16))

    def choose_tile(self, most: tuple[int, int], swapped: bool) -> tuple[int, int]:
        """Kept and folded indices of tiles that lie in one block: divisors of its sizes, ``most`` at most."""
        kept, folded = (_largest_divisor(s, n) for s, n in zip(self._sizes(swapped), most, strict=True))
        return kept, folded

    def spread(self, table: Tensor, lengths: tuple[int, int], tile: tuple[int, int], swapped: bool) -> Tensor:
        """A table of this kind for the tiles of the kept and the folded axis."""
        table = table.mT if swapped else table
        for dim, length, n, size in zip((-2, -1), lengths, tile, self._sizes(swapped), strict=True):
            table = table.repeat_interleave(size // n, dim).narrow(dim, 0, -(-length // n))
        return table.contiguous()

    def _sizes(self, swapped: bool) -> tuple[int, int]:
        return (self.cols, self.rows) if swapped else (self.rows, self.cols)


def _largest_divisor(size: int, most: int) -> int:
    return next(n for n in range(min(size, most), 0, -1) if size % n == 0)
