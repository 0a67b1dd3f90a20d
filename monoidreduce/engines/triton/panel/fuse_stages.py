"""Stages fused into one kernel, from the first fold of scalars to the weights of the last sum of vectors.

Between two stages of a loop stands a little arithmetic on rows (a logsumexp, its reciprocal). Done by torch it would
end the kernel and read the panel again; here it becomes part of the kernel, between its passes over columns. What a
kernel cannot do there (vectors, results of GEMMs) ends the group of stages.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ....program.constructors import apply, rebuild, substitute
from ....program.contract import Contraction, contractions
from ....program.expression import Expr, index, node, reduce_node, size, topological
from ....program.primitives import PRIMITIVES
from ....program.several import OF_VECTORS
from ....reductions import outputs_of
from ...panel.panel_program import PanelLoop, Stage, group_by_reduction
from ..codegen.kernel_spec import Unsupported


def _make_leaf(name: str, rows: bool = False, dtype: str = "int") -> Expr:
    return node("leaf", (), (name,), rows=rows, cols=False, feature=None, dtype=dtype)


# arguments of every kernel: where its panel begins, and how many rows and columns there are in all
FIRST = {axis: _make_leaf(f"first_{axis}") for axis in ("row", "col")}
COUNT = {axis: _make_leaf(f"count_{axis}") for axis in ("rows", "cols")}
OFFSETS = (*FIRST.values(), *COUNT.values())


class VectorSum(NamedTuple):
    """A sum of vectors: its place among the stage's reductions, the axis folded over, and the GEMMs that add up to it,
    each of a weight per pair and a vector."""

    place: int
    over: str
    products: tuple[Contraction, ...]


@dataclass(frozen=True)
class StageSplit:
    """A stage's reductions by what computes them. Places are those among the stage's reductions."""

    folds: Mapping[str, tuple[Expr, ...]]  # per axis folded over, the scalars that a kernel folds
    places: Mapping[str, tuple[int, ...]]  # of these
    sums: tuple[VectorSum, ...]
    topk: tuple[tuple[int, Expr], ...]  # place, and the scalar per pair whose best are found by sorting
    weights: tuple[Expr, ...]  # scalars per pair that must lie in memory


@functools.lru_cache(maxsize=1024)
def split_stage(stage: Stage) -> StageSplit:
    """Split a stage; raises Unsupported where one of its reductions has neither a kernel nor a GEMM."""
    folds: dict[str, list[Expr]] = {"cols": [], "rows": []}
    places: dict[str, list[int]] = {"cols": [], "rows": []}
    sums, topk = [], []
    for place, r in enumerate(stage.fold.reductions):
        kind, over, _ = r.attrs
        if kind == "topk" and over == "cols":
            topk.append((place, r.args[0]))
        elif kind == "sum" and r.args[0].feature is not None:
            sums.append(VectorSum(place, over, _list_products(r)))
        elif any(a.feature is not None for a in r.args):
            raise Unsupported(f"{kind} of vectors")
        else:
            folds[over].append(r)
            places[over].append(place)
    weights = [c.weight for one in sums for c in one.products] + [e for _, e in topk]
    used = [n for over in folds.values() for r in over for n in r.args] + weights
    if any(e.op in (*OF_VECTORS, "component") and e.is_pair for e in topological(used)):
        raise Unsupported("vectors per pair")
    return StageSplit(
        {over: tuple(rs) for over, rs in folds.items()},
        {over: tuple(ps) for over, ps in places.items()},
        tuple(sums),
        tuple(topk),
        tuple(dict.fromkeys(weights)),
    )


def _list_products(r: Expr) -> tuple[Contraction, ...]:
    found = contractions(r.args[0], r.attrs[1])
    if any(c.walk or c.minus is not None or c.vector is None or c.vector.op != "leaf" for c in found):
        raise Unsupported("a sum of vectors that is no product")
    return found


@dataclass(frozen=True)
class FusedStages:
    """Stages as one kernel does them: folds of scalars over columns, one stage after the other, then weights."""

    leaves: tuple[Expr, ...]
    feeds: tuple[Expr, ...]  # of the leaves, as the program has them; inner products are themselves
    folds: tuple[tuple[Expr, ...], ...]  # per stage, its reductions
    names: tuple[tuple[Expr, ...], ...]  # per stage, what later stages call its results
    weights: tuple[Expr, ...]  # of the last stage


@functools.lru_cache(maxsize=1024)
def group_stages(loop: PanelLoop) -> tuple[range, ...]:
    """The stages of each kernel: as many in a row as can be, all but the last folding only scalars."""
    found: list[range] = []
    for at, stage in enumerate(loop.stages):
        last, split = found[-1] if found else range(0), split_stage(stage)
        if last and _folds_only_scalars(loop.stages[at - 1]) and not split.topk and not split.folds["rows"]:
            group = range(last.start, at + 1)
            if _try_fuse(loop, group) is not None:
                found[-1] = group
                continue
        found.append(range(at, at + 1))
    return tuple(found)


def _folds_only_scalars(stage: Stage) -> bool:
    split = split_stage(stage)
    return not split.weights and not split.folds["rows"]


@functools.lru_cache(maxsize=1024)
def fuse_stages(loop: PanelLoop, group: range, shifted: bool) -> FusedStages:
    """The stages of a group (of :func:`group_stages`) as one kernel. ``shifted``: its panel may begin at another column
    than 0."""
    found = _try_fuse(loop, group)
    assert found is not None
    here = shift_indices(*(("row", "col") if shifted else ("row",))) | _WHOLE_SIZES
    folds = tuple(tuple(shift_reduction(r, here) for r in fold) for fold in found.folds)
    return FusedStages(found.leaves, found.feeds, folds, found.names, substitute(found.weights, here))


@functools.lru_cache(maxsize=1024)
def _try_fuse(loop: PanelLoop, group: range) -> FusedStages | None:
    """None where a stage is fed something that only torch can compute from the results before it."""
    scope = _KernelScope()
    folds: list[tuple[Expr, ...]] = []
    names: list[tuple[Expr, ...]] = []
    weights: tuple[Expr, ...] = ()
    for at in group:
        stage, split = loop.stages[at], split_stage(loop.stages[at])
        wanted = set(topological([*split.folds["cols"], *split.weights]))
        fed = [(e, f) for e, f in zip(stage.fold.leaves, stage.feeds, strict=True) if e in wanted]
        if not all(scope.add_feed(f) for _, f in fed):
            return None
        replace = {e: scope.values[f] for e, f in fed}
        folds.append(substitute(split.folds["cols"], replace))
        weights = substitute(split.weights, replace)
        names.append(scope.name_results(stage, split, at))
    return FusedStages(tuple(scope.leaves), tuple(scope.leaves.values()), tuple(folds), tuple(names), weights)


class _KernelScope:
    """The program's expressions as a fused kernel has them: leaves, results of its earlier stages, arithmetic on
    both."""

    def __init__(self) -> None:
        self.values: dict[Expr, Expr] = {}
        self.dependent: set[Expr] = set()  # on results; all else is a leaf, computed once by torch
        self.leaves: dict[Expr, Expr] = {}

    def add_feed(self, feed: Expr) -> bool:
        """Express a feed; False where a kernel cannot."""
        for e in topological([feed], stop=self.values.__contains__):
            if e not in self.values and not self.dependent.isdisjoint(e.args):
                self.dependent.add(e)
        for e in topological([feed], stop=lambda e: e in self.values or e not in self.dependent):
            if e in self.values:
                continue
            if e not in self.dependent:
                self.values[e] = self._add_leaf(e)
            elif e.feature is not None or e.op not in PRIMITIVES or not PRIMITIVES[e.op].triton:
                return False
            else:
                self.values[e] = rebuild(e, tuple(self.values[a] for a in e.args))
        return True

    def _add_leaf(self, feed: Expr) -> Expr:
        if feed.op in ("const", "nan", "size", "row_index", "col_index"):
            return feed
        name = f"{'s' if feed.op == 'dot' else 'x'}{len(self.leaves)}"
        leaf = node("leaf", (), (name,), rows=feed.rows, cols=feed.cols, feature=feed.feature, dtype=feed.dtype)
        self.leaves[leaf] = feed
        return leaf

    def name_results(self, stage: Stage, split: StageSplit, at: int) -> tuple[Expr, ...]:
        """A name for each result of a stage's folds, under which later stages find it."""
        own = group_by_reduction(stage.fold.reductions, stage.results)
        found: list[Expr] = []
        for r in split.folds["cols"]:
            for k, (_, dtype) in enumerate(outputs_of(r)):
                found.append(_make_leaf(f"result{at}_{len(found)}", True, dtype))
                self.values |= dict.fromkeys(own[r][k], found[-1])
                self.dependent |= set(own[r][k])
        return tuple(found)


# Indices of a panel that does not begin at the first row and column -----------------------------------------------

_WHOLE_SIZES = {size(axis): count for axis, count in COUNT.items()}


def shift_indices(*axes: str) -> dict[Expr, Expr]:
    """Substitutions of the indices along some axes: the panel's own index, and where the panel begins."""
    return {index(axis): apply("add", index(axis), FIRST[axis]) for axis in axes}


def shift_reduction(r: Expr, here: dict[Expr, Expr] | None = None) -> Expr:
    """A reduction on a panel, by the substitutions ``here``, those of both axes if left out."""
    here = shift_indices(*FIRST) | _WHOLE_SIZES if here is None else here
    (found,) = substitute((r,), here)
    kind, over, params = found.attrs
    if kind != "pick" or index(params[0]) not in here:
        return found
    target = apply("sub", found.args[0], FIRST[params[0]])  # compared with the panel's own index
    return reduce_node(kind, over, params, (target, *found.args[1:]))
