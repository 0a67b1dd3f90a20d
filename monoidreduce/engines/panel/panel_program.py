"""Programs cut into walks over panels: which passes can share their products, and what each is fed.

A pass joins the walk before it unless it needs a result that only the end of that walk completes: one over rows, or a
gather. Products of a row's and a column's vector become leaves given per pair.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from ...program.compile import compile_program
from ...program.constructors import apply, substitute
from ...program.contract import is_read_from_tiles
from ...program.expression import Expr, node, result, topological
from ...program.lower import Fold, Lowered, Pass
from ...program.reductions import KINDS, make


@dataclass(frozen=True)
class Stage:
    """One pass as it is done to a panel: products are leaves per pair; picks that are gathers wait for the end."""

    fold: Fold
    feeds: tuple[Expr, ...]  # of the fold's leaves; of a product, itself
    results: tuple[tuple[Expr, ...], ...]
    gathers: Pass | None

    @functools.cached_property
    def products(self) -> list[tuple[Expr, Expr]]:
        """(leaf, product) of the products it reads."""
        return [(e, f) for e, f in zip(self.fold.leaves, self.feeds, strict=True) if f.op == "dot"]


@dataclass(frozen=True)
class Walk:
    """Stages done on the same panels."""

    stages: tuple[Stage, ...]

    @functools.cached_property
    def products(self) -> list[Expr]:
        return list(dict.fromkeys(f for s in self.stages for _, f in s.products))

    @property
    def exact(self) -> bool:
        """Whether its products are to stay as exact as they are."""
        return all(s.fold.exact for s in self.stages)

    def dying(self, at: int) -> list[Expr]:
        """The products that no stage after ``at`` reads."""
        later = {f for s in self.stages[at + 1 :] for _, f in s.products}
        return [f for _, f in self.stages[at].products if f not in later]

    def apart(self) -> list[Walk]:
        """The directions of a single stage, each in a walk of its own: more products, and less held at once."""
        found: list[Walk] = []
        for over in ("cols", "rows") if len(self.stages) == 1 else ():
            stage = self.stages[0]
            own = {r: u for r, u in by_reduction(stage.fold.reductions, stage.results).items() if r.attrs[1] == over}
            if own:
                used = set(topological(own))
                kept = [(e, f) for e, f in zip(stage.fold.leaves, stage.feeds, strict=True) if e in used]
                fold = Fold(tuple(e for e, _ in kept), tuple(own), exact=stage.fold.exact)
                results = tuple(u for users in own.values() for u in users)
                gathers = None if found else stage.gathers
                found.append(Walk((Stage(fold, tuple(f for _, f in kept), results, gathers),)))
        return found if len(found) == 2 else []


def least_room(program: Lowered, least: Callable[[Walk], int]) -> int:
    """Bytes in which every walk of a program can be run, ``least(walk)`` being what one takes by itself; a walk whose
    directions can be done apart is done so where it does not fit whole."""
    return max([0, *(least(w) for walk in walks(program) for w in walk.apart() or [walk])])


@functools.lru_cache(maxsize=1024)
def walks(program: Lowered) -> tuple[Walk, ...]:
    """A program's passes as walks: a pass joins the walk before it unless it needs what only its end completes."""
    found: list[list[Stage]] = []
    late: set[Expr] = set()  # results complete at the end of the current walk only
    for p in program.passes:
        under = set(topological(p.feeds))
        if not found or under & late:
            found.append([])
            late = set()
        stage = _stage(p)
        found[-1].append(stage)
        gathered = stage.gathers.results if stage.gathers else ()
        over_rows = [n for (r, _), users in zip(p.fold.outputs, p.results, strict=True) for n in users if _late(r)]
        late |= {n for users in gathered for n in users} | set(over_rows)
        late |= {e for e in topological(program.outputs) if e.op == "reduce" and _late(e)}
    return tuple(Walk(tuple(stages)) for stages in found)


def _late(reduction: Expr) -> bool:
    return reduction.attrs[1] == "rows"


def _plain(p: Pass) -> Pass:
    """A pass with everything that is one-sided fed to it, and its scales in the weights: they are rounded once."""
    feed = dict(zip(p.fold.leaves, p.feeds, strict=True))
    reductions = p.fold.pure
    fields = tuple(a for r in reductions for a in r.args)
    sides = [e for e in topological(fields, stop=lambda e: not e.is_pair) if not e.is_pair and e.args]
    leaves = {
        e: node("leaf", (), (f"y{k}",), rows=e.rows, cols=e.cols, feature=e.feature, dtype=e.dtype)
        for k, e in enumerate(sides)
    }
    feeds = (*p.feeds, *substitute(tuple(sides), feed))
    fold = Fold((*p.fold.leaves, *leaves.values()), substitute(reductions, leaves), exact=p.fold.exact)
    return Pass(fold, feeds, p.results)


def _stage(p: Pass) -> Stage:
    p = _plain(p)
    outputs = by_reduction(p.fold.reductions, p.results)
    gathers = [r for r in p.fold.reductions if r.attrs[0] == "pick" and not is_read_from_tiles(p.fold, r)]
    walked = [r for r in p.fold.reductions if r not in gathers]
    feed = dict(zip(p.fold.leaves, p.feeds, strict=True))
    replace: dict[Expr, Expr] = {}
    for e in topological(walked):
        if is_product(e):
            place = f"s{len(replace)}"
            replace[e] = node("leaf", (), (place,), rows=True, cols=True, feature=None, dtype="float")
    reductions = substitute(tuple(walked), replace)
    used = set(topological(reductions))
    kept = [(e, feed[e]) for e in p.fold.leaves if e in used]
    kept += [(leaf, substitute((d,), feed)[0]) for d, leaf in replace.items()]
    own = [e for e in p.fold.leaves if e in set(topological(gathers))]
    later = None
    if gathers:
        users = tuple(u for r in gathers for u in outputs[r])
        later = Pass(Fold(tuple(own), tuple(gathers)), tuple(feed[e] for e in own), users)
    results = tuple(u for r in walked for u in outputs[r])
    fold = Fold(tuple(e for e, _ in kept), reductions, exact=p.fold.exact)
    return Stage(fold, tuple(f for _, f in kept), results, later)


def is_product(e: Expr) -> bool:
    """Whether a node is a product of a row's and a column's vector that a matrix product computes."""
    return e.op == "dot" and e.dtype == "float" and all(a.op == "leaf" and not a.is_pair for a in e.args)


def by_reduction(reductions: tuple[Expr, ...], results: tuple) -> dict[Expr, list]:
    found, at = {}, 0
    for r in reductions:
        count = len(KINDS[r.attrs[0]].outputs(r.args, r.attrs[2]))
        found[r] = list(results[at : at + count])
        at += count
    return found


@functools.lru_cache(maxsize=1024)
def as_program(fold: Fold) -> Lowered:
    """A fold as a program whose outputs are its results."""
    results = tuple(
        result(r, k, feature, dtype)
        for r in fold.pure
        for k, (feature, dtype) in enumerate(KINDS[r.attrs[0]].outputs(r.args, r.attrs[2]))
    )
    only = Pass(Fold(fold.leaves, fold.pure), fold.leaves, tuple((e,) for e in results))
    return Lowered((only,), results).having(fold.exact)


@functools.lru_cache(maxsize=1024)
def split_means(program: Lowered) -> Lowered:
    """A program with every softmax mean of vectors as a sum, weighted by a softmax that an earlier pass completed."""
    replace: dict[Expr, Expr] = {}
    for e in topological(program.outputs):
        if e.op == "result" and e.feature is not None and e.args[0].attrs[0] == "soft":
            over, fields = e.args[0].attrs[1], substitute(e.args[0].args, replace)
            _, log_total, peak = make("soft", over, (), fields[:1])
            seen = apply("where", apply("eq", log_total, -math.inf), 0.0, apply("exp", apply("neg", log_total)))
            weight = apply("mul", apply("exp", apply("sub", fields[0], peak)), seen)
            (replace[e],) = make("sum", over, (), (apply("mul", weight, fields[e.attrs[0]]),))
    return compile_program(substitute(program.outputs, replace)).having(program.exact) if replace else program


def fed(stage: Stage) -> list[tuple[Expr, Expr]]:
    return [(e, f) for e, f in zip(stage.fold.leaves, stage.feeds, strict=True) if f.op != "dot"]


def paired(stage: Stage, results: list[list[Tensor] | None]) -> Iterator[tuple[tuple[Expr, ...], Tensor]]:
    """The nodes that each result is, beside it."""
    for nodes, values in zip(by_reduction(stage.fold.reductions, stage.results).values(), results, strict=True):
        if values is not None:
            yield from zip(nodes, values, strict=True)


@functools.lru_cache(maxsize=1024)
def row_numbers(feeds: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """The numbers per row under ``feeds`` that depend on no reduction and no vector: computed once for all rows."""
    order = topological(feeds)
    late = {e for e in order if e.op in ("reduce", "result") or e.feature is not None}
    for e in order:  # arguments first
        if not late.isdisjoint(e.args):
            late.add(e)
    known = [e for e in order if e.rows and not e.cols and e not in late]
    used = {a for e in order if e not in known for a in e.args} | set(feeds)
    return tuple(e for e in known if e in used)
