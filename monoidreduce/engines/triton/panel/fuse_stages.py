"""Stages joined: what one kernel does to a panel, from the first fold of numbers to the weights of the last sum.

Between two stages of a walk stands a little arithmetic on rows (a logsumexp, its reciprocal). Done by torch it would
end the kernel and read the panel again; here it is written into the kernel, between its loops. What a kernel cannot do
there (vectors, results of products) ends the group.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from ....program.constructors import apply, rebuild, substitute
from ....program.contract import Contraction, contractions
from ....program.expression import Expr, index, node, reduce_node, size, topological
from ....program.primitives import PRIMITIVES
from ....reductions import outputs_of
from ...panel.panel_program import Stage, Walk, by_reduction
from ..codegen.kernel_spec import Unsupported


def _number(name: str, rows: bool = False, dtype: str = "int") -> Expr:
    return node("leaf", (), (name,), rows=rows, cols=False, feature=None, dtype=dtype)


# where a panel begins, and how many rows and columns there are in all
FIRST = {axis: _number(f"first_{axis}") for axis in ("row", "col")}
COUNT = {axis: _number(f"count_{axis}") for axis in ("rows", "cols")}
PLACES = (*FIRST.values(), *COUNT.values())


@dataclass(frozen=True)
class Parts:
    """A stage cut by who does it. Places are those of the stage's reductions."""

    numbers: Mapping[str, tuple[Expr, ...]]  # per direction, what a kernel folds
    places: Mapping[str, tuple[int, ...]]
    sums: tuple[tuple[int, str, tuple[Contraction, ...]], ...]  # place, direction, products to add
    tops: tuple[tuple[int, Expr], ...]  # place, the number per pair whose best are found by sorting
    weights: tuple[Expr, ...]  # numbers per pair that must lie in memory


@functools.lru_cache(maxsize=1024)
def parts(stage: Stage) -> Parts:
    """Cut a stage; raises Unsupported where one of its reductions has neither a kernel nor a product."""
    numbers: dict[str, list[Expr]] = {"cols": [], "rows": []}
    places: dict[str, list[int]] = {"cols": [], "rows": []}
    sums, tops = [], []
    for place, r in enumerate(stage.fold.reductions):
        kind, over, _ = r.attrs
        if kind == "topk" and over == "cols":
            tops.append((place, r.args[0]))
        elif kind == "sum" and r.args[0].feature is not None:
            sums.append((place, over, _products(r)))
        elif any(a.feature is not None for a in r.args):
            raise Unsupported(f"{kind} of vectors")
        else:
            numbers[over].append(r)
            places[over].append(place)
    weights = [c.weight for _, _, cs in sums for c in cs] + [e for _, e in tops]
    used = [n for over in numbers.values() for r in over for n in r.args] + weights
    if any(e.op in ("dot", "sqdist", "fsum", "component") and e.is_pair for e in topological(used)):
        raise Unsupported("vectors per pair")
    return Parts(
        {over: tuple(rs) for over, rs in numbers.items()},
        {over: tuple(ps) for over, ps in places.items()},
        tuple(sums),
        tuple(tops),
        tuple(dict.fromkeys(weights)),
    )


def _products(r: Expr) -> tuple[Contraction, ...]:
    found = contractions(r.args[0], r.attrs[1])
    if any(c.walk or c.minus is not None or c.vector is None or c.vector.op != "leaf" for c in found):
        raise Unsupported("a sum of vectors that is no product")
    return found


@dataclass(frozen=True)
class Joint:
    """Stages as one kernel does them: folds of numbers over columns in turn, then numbers per pair to write."""

    leaves: tuple[Expr, ...]
    feeds: tuple[Expr, ...]  # of the leaves, as the program has them; products are themselves
    folds: tuple[tuple[Expr, ...], ...]  # per stage, its reductions
    names: tuple[tuple[Expr, ...], ...]  # per stage, what later stages call its results
    weights: tuple[Expr, ...]


@functools.lru_cache(maxsize=1024)
def groups(walk: Walk) -> tuple[range, ...]:
    """Which stages are done by one kernel: as many in a row as can be, all but the last folding only numbers."""
    found: list[range] = []
    for at, stage in enumerate(walk.stages):
        last = found[-1] if found else range(0)
        if last and _only_numbers(walk.stages[at - 1]) and not parts(stage).tops and not parts(stage).numbers["rows"]:
            whole = range(last.start, at + 1)
            if _joined(walk, whole) is not None:
                found[-1] = whole
                continue
        found.append(range(at, at + 1))
    return tuple(found)


def _only_numbers(stage: Stage) -> bool:
    cut = parts(stage)
    return not cut.weights and not cut.numbers["rows"]


@functools.lru_cache(maxsize=1024)
def joint(walk: Walk, group: range, moved: bool) -> Joint:
    """The stages of a group as one kernel does them. ``moved``: whether its columns may begin elsewhere than at 0."""
    found = _joined(walk, group)
    assert found is not None
    return _placed(found, ("row", "col") if moved else ("row",))


@functools.lru_cache(maxsize=1024)
def _joined(walk: Walk, group: range) -> Joint | None:
    """None where a stage is fed something that only torch can make from the results before it."""
    inner = _Inner()
    folds: list[tuple[Expr, ...]] = []
    names: list[tuple[Expr, ...]] = []
    weights: tuple[Expr, ...] = ()
    for at in group:
        stage, cut = walk.stages[at], parts(walk.stages[at])
        wanted = set(topological([*cut.numbers["cols"], *cut.weights]))
        fed = [(e, f) for e, f in zip(stage.fold.leaves, stage.feeds, strict=True) if e in wanted]
        if not all(inner.has(f) for _, f in fed):
            return None
        replace = {e: inner.made[f] for e, f in fed}
        folds.append(substitute(cut.numbers["cols"], replace))
        weights = substitute(cut.weights, replace)
        names.append(inner.named(stage, cut, at))
    return Joint(tuple(inner.leaves), tuple(inner.leaves.values()), tuple(folds), tuple(names), weights)


class _Inner:
    """What a kernel has of what the program calls it: leaves, results of its earlier stages, arithmetic on those."""

    def __init__(self) -> None:
        self.made: dict[Expr, Expr] = {}
        self.after: set[Expr] = set()  # what depends on results; all else is a leaf, computed once by torch
        self.leaves: dict[Expr, Expr] = {}

    def has(self, feed: Expr) -> bool:
        """Make what is fed; False where a kernel cannot."""
        for e in topological([feed], stop=self.made.__contains__):
            if e not in self.made and not self.after.isdisjoint(e.args):
                self.after.add(e)
        for e in topological([feed], stop=lambda e: e in self.made or e not in self.after):
            if e in self.made:
                continue
            if e not in self.after:
                self.made[e] = _leaf(e, self.leaves)
            elif e.feature is not None or e.op not in PRIMITIVES or not PRIMITIVES[e.op].triton:
                return False
            else:
                self.made[e] = rebuild(e, tuple(self.made[a] for a in e.args))
        return True

    def named(self, stage: Stage, cut: Parts, at: int) -> tuple[Expr, ...]:
        """A name for each result of a stage's folds, under which what comes later finds it."""
        own = by_reduction(stage.fold.reductions, stage.results)
        found: list[Expr] = []
        for r in cut.numbers["cols"]:
            for k, (_, dtype) in enumerate(outputs_of(r)):
                found.append(_number(f"result{at}_{len(found)}", True, dtype))
                self.made |= dict.fromkeys(own[r][k], found[-1])
                self.after |= set(own[r][k])
        return tuple(found)


def _leaf(feed: Expr, leaves: dict[Expr, Expr]) -> Expr:
    if feed.op in ("const", "nan", "size", "row_index", "col_index"):
        return feed
    name = f"{'s' if feed.op == 'dot' else 'x'}{len(leaves)}"
    leaf = node("leaf", (), (name,), rows=feed.rows, cols=feed.cols, feature=feed.feature, dtype=feed.dtype)
    leaves[leaf] = feed
    return leaf


def counted(*axes: str) -> dict[Expr, Expr]:
    """Indices in a panel that does not begin at the first row (and column): its own, and where it begins."""
    return {index(axis): apply("add", index(axis), FIRST[axis]) for axis in axes}


def _placed(whole: Joint, axes: tuple[str, ...]) -> Joint:
    """The same for a panel that does not begin at the first row (and column): indices are counted from its own."""
    here = counted(*axes) | {size(axis): count for axis, count in COUNT.items()}
    folds = tuple(tuple(placed(r, here) for r in fold) for fold in whole.folds)
    return Joint(whole.leaves, whole.feeds, folds, whole.names, substitute(whole.weights, here))


def placed(r: Expr, here: dict[Expr, Expr] | None = None) -> Expr:
    """A reduction for a panel: indices are counted from its own first row and column."""
    if here is None:
        here = counted(*FIRST) | {size(axis): count for axis, count in COUNT.items()}
    (found,) = substitute((r,), here)
    kind, over, params = found.attrs
    if kind != "pick" or index(params[0]) not in here:
        return found
    target = apply("sub", found.args[0], FIRST[params[0]])  # compared with the panel's own index
    return reduce_node(kind, over, params, (target, *found.args[1:]))
