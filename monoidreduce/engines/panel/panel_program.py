"""A program as loops over panels: which passes share their GEMMs, and what each stage is fed.

A pass joins the loop before it unless it needs a result that only the end of that loop completes: one over rows, or a
gather. Inner products of a row's and a column's vector become leaves given per pair, which a GEMM computes.

On a CPU, sums of vectors are found that can be whole products (:func:`find_whole_sums`): the weights of a panel are
written over its inner products, then multiplied. A gradient of a vocabulary head is Σ weight × vector over both axes.
Tiles of torch calls write the weights of a tile, and multiply it, hundreds of times for each panel; here one generated
C++ function writes those of all tiles where their inner products were, and each sum is one matrix product.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...plan import panel_layout, settings
from ...program.constructors import apply, contractions, substitute
from ...program.expression import Expr, const, node, reduce_node, result, topological
from ...program.lower import Fold, Lowered, Pass, compile_program, conditions, is_idle
from ...reductions import kind_of, make, outputs_of
from ...reductions.pair import EVERY
from ..common import matmul
from ..common.evaluate import Sizes


@dataclass(frozen=True)
class Stage:
    """One pass as it is done to a panel: inner products are leaves per pair; ``gathers`` wait for the loop's end."""

    fold: Fold
    feeds: tuple[Expr, ...]  # of the fold's leaves; of an inner product, itself
    results: tuple[tuple[Expr, ...], ...]
    gathers: Pass | None

    @functools.cached_property
    def products(self) -> list[tuple[Expr, Expr]]:
        """(leaf, inner product) of the inner products that it reads."""
        return [(e, f) for e, f in zip(self.fold.leaves, self.feeds, strict=True) if f.op == "dot"]


@dataclass(frozen=True)
class PanelLoop:
    """Stages that share one loop over panels."""

    stages: tuple[Stage, ...]

    @functools.cached_property
    def products(self) -> list[Expr]:
        """The inner products of all stages; a GEMM fills a panel for each."""
        return list(dict.fromkeys(f for s in self.stages for _, f in s.products))

    @property
    def exact(self) -> bool:
        """Whether inner products may not be rounded to 16 bits."""
        return all(s.fold.exact for s in self.stages)

    def list_last_uses(self, at: int) -> list[Expr]:
        """The inner products that no stage after ``at`` reads."""
        later = {f for s in self.stages[at + 1 :] for _, f in s.products}
        return [f for _, f in self.stages[at].products if f not in later]

    def split_directions(self) -> list[PanelLoop]:
        """A single stage as two loops, one for each axis folded over: more GEMMs, and less memory. Empty where that is
        not possible."""
        found: list[PanelLoop] = []
        for over in ("cols", "rows") if len(self.stages) == 1 else ():
            stage = self.stages[0]
            grouped = group_by_reduction(stage.fold.reductions, stage.results)
            own = {r: users for r, users in grouped.items() if r.attrs[1] == over}
            if own:
                used = set(topological(own))
                kept = [(e, f) for e, f in zip(stage.fold.leaves, stage.feeds, strict=True) if e in used]
                fold = Fold(tuple(e for e, _ in kept), tuple(own), exact=stage.fold.exact)
                results = tuple(u for users in own.values() for u in users)
                gathers = None if found else stage.gathers
                found.append(PanelLoop((Stage(fold, tuple(f for _, f in kept), results, gathers),)))
        return found if len(found) == 2 else []


def find_least_bytes(program: Lowered, least: Callable[[PanelLoop], int]) -> int:
    """Bytes in which every loop of a program can run, ``least(loop)`` being what one takes by itself; a loop that does
    not fit runs one direction at a time where that is possible."""
    loops = split_into_loops(program)
    return max([0, *(least(one) for loop in loops for one in loop.split_directions() or [loop])])


@functools.lru_cache(maxsize=1024)
def split_into_loops(program: Lowered) -> tuple[PanelLoop, ...]:
    """The loops of a program: a pass joins the loop before it unless it needs what only that loop's end completes."""
    found: list[list[Stage]] = []
    late: set[Expr] = set()  # results that only the end of the current loop completes
    for p in program.passes:
        under = set(topological(p.feeds))
        if not found or under & late:
            found.append([])
            late = set()
        stage = _make_stage(p)
        found[-1].append(stage)
        gathered = stage.gathers.results if stage.gathers else ()
        outputs = zip(p.fold.outputs, p.results, strict=True)
        over_rows = [n for (r, _), users in outputs for n in users if _is_over_rows(r)]
        late |= {n for users in gathered for n in users} | set(over_rows)
        late |= {e for e in topological(program.outputs) if e.op == "reduce" and _is_over_rows(e)}
    return tuple(PanelLoop(tuple(stages)) for stages in found)


def _is_over_rows(reduction: Expr) -> bool:
    return reduction.attrs[1] == "rows"


def _feed_one_sided(p: Pass) -> Pass:
    """A pass with all one-sided expressions fed to it, and scales in the weights, which are then rounded once."""
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


def _make_stage(p: Pass) -> Stage:
    p = _feed_one_sided(p)
    outputs = group_by_reduction(p.fold.reductions, p.results)
    gathers = [r for r in p.fold.reductions if not kind_of(r).walks(r, p.fold.reductions)]
    folded = [r for r in p.fold.reductions if r not in gathers]
    feed = dict(zip(p.fold.leaves, p.feeds, strict=True))
    replace: dict[Expr, Expr] = {}
    for e in topological(folded):
        if is_product(e):
            name = f"s{len(replace)}"
            replace[e] = node("leaf", (), (name,), rows=True, cols=True, feature=None, dtype="float")
    reductions = substitute(tuple(folded), replace)
    used = set(topological(reductions))
    kept = [(e, feed[e]) for e in p.fold.leaves if e in used]
    kept += [(leaf, substitute((d,), feed)[0]) for d, leaf in replace.items()]
    own = [e for e in p.fold.leaves if e in set(topological(gathers))]
    later = None
    if gathers:
        users = tuple(u for r in gathers for u in outputs[r])
        later = Pass(Fold(tuple(own), tuple(gathers)), tuple(feed[e] for e in own), users)
    results = tuple(u for r in folded for u in outputs[r])
    fold = Fold(tuple(e for e, _ in kept), reductions, exact=p.fold.exact)
    return Stage(fold, tuple(f for _, f in kept), results, later)


def is_product(e: Expr) -> bool:
    """Whether a node is an inner product of a row's and a column's vector, which a GEMM computes."""
    return e.op == "dot" and e.dtype == "float" and all(a.op == "leaf" and not a.is_pair for a in e.args)


def group_by_reduction(reductions: tuple[Expr, ...], results: tuple) -> dict[Expr, list]:
    """The results of each reduction, of a list with all of them in a row."""
    found, at = {}, 0
    for r in reductions:
        count = len(outputs_of(r))
        found[r] = list(results[at : at + count])
        at += count
    return found


@functools.lru_cache(maxsize=1024)
def as_program(fold: Fold) -> Lowered:
    """A fold as a program whose outputs are its results."""
    results = tuple(result(r, k, feature, dtype) for r in fold.pure for k, (feature, dtype) in enumerate(outputs_of(r)))
    only = Pass(Fold(fold.leaves, fold.pure), fold.leaves, tuple((e,) for e in results))
    return Lowered((only,), results).with_exactness(fold.exact)


@functools.lru_cache(maxsize=1024)
def split_softmax_means(program: Lowered) -> Lowered:
    """A program with every softmax mean of vectors as a sum, weighted by a softmax that an earlier pass completes."""
    replace: dict[Expr, Expr] = {}
    for e in topological(program.outputs):
        if e.op == "result" and e.feature is not None and e.args[0].attrs[0] == "soft":
            over, fields = e.args[0].attrs[1], substitute(e.args[0].args, replace)
            _, log_total, peak = make("soft", over, (), fields[:1])
            seen = apply("where", apply("eq", log_total, -math.inf), 0.0, apply("exp", apply("neg", log_total)))
            weight = apply("mul", apply("exp", apply("sub", fields[0], peak)), seen)
            (replace[e],) = make("sum", over, (), (apply("mul", weight, fields[e.attrs[0]]),))
    return compile_program(substitute(program.outputs, replace)).with_exactness(program.exact) if replace else program


def list_feeds(stage: Stage) -> list[tuple[Expr, Expr]]:
    """(leaf, what it is fed) of all leaves but inner products."""
    return [(e, f) for e, f in zip(stage.fold.leaves, stage.feeds, strict=True) if f.op != "dot"]


def pair_results(stage: Stage, results: list[list[Tensor] | None]) -> Iterator[tuple[tuple[Expr, ...], Tensor]]:
    """Each result that is there, beside the nodes of the program that it is the value of."""
    grouped = group_by_reduction(stage.fold.reductions, stage.results)
    for nodes, values in zip(grouped.values(), results, strict=True):
        if values is not None:
            yield from zip(nodes, values, strict=True)


@functools.lru_cache(maxsize=1024)
def find_row_scalars(feeds: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """The scalars per row under ``feeds`` that depend on no reduction and no vector: computed once for all rows."""
    order = topological(feeds)
    late = {e for e in order if e.op in ("reduce", "result") or e.feature is not None}
    for e in order:  # arguments first
        if not late.isdisjoint(e.args):
            late.add(e)
    known = [e for e in order if e.rows and not e.cols and e not in late]
    used = {a for e in order if e not in known for a in e.args} | set(feeds)
    return tuple(e for e in known if e in used)


# 16-bit vectors whose number of features is no multiple of 16 bytes: one padded copy of each, for GEMMs at full
# speed.
#
# Neither the vendor's fast GEMMs nor tensor descriptors take rows that begin anywhere (300 features). Zeros behind the
# features of all vectors change no product; results lose them again. The copies are part of a budget: where they would
# take more than half of it, the vectors are read as they are.

_ALIGNED = 8  # 16-bit numbers of 16 bytes
# what makes vectors, or a number of vectors, from vectors and leaves zeros where all have zeros
_KEEPS_ZEROS = ("input", "leaf", "dot", "sqdist", "reduce", "result", "neg", "detach", "cast")


def pad_features(
    program: Lowered, inputs: Mapping[str, Any], sizes: Sizes, limit: int
) -> tuple[Mapping[str, Any], Sizes, int]:
    """The inputs and sizes with aligned features, and the bytes left of ``limit`` or the budget (0: there is none).

    All the same where all features are aligned, where zeros would be seen, and where the limit has no room for copies.
    """
    odd = [f for f in _letters(program) if sizes.of(f) > panel_layout.NARROW and sizes.of(f) % _ALIGNED]
    nodes = [e for e in _nodes(program) if e.op == "input" and str(e.feature) in odd]
    given = [inputs[str(e.attrs[0])] for e in nodes]
    if not odd or any(not isinstance(v, Tensor) or v.dtype not in matmul.SIXTEEN for v in given):
        return inputs, sizes, limit
    more = {f: -(-sizes.of(f) // _ALIGNED) * _ALIGNED for f in odd}
    copies = sum(v.numel() // v.shape[-1] * more[str(e.feature)] * 2 for e, v in zip(nodes, given, strict=True))
    results = [e for e in program.outputs if e.feature is not None and str(e.feature) in odd]
    copies += sum((sizes.rows if e.rows else sizes.cols) * more[str(e.feature)] * 2 for e in results)
    room = (limit or settings.requested_budget() or 0) // settings.shrink_factor()
    if room and copies > room // 2:
        return inputs, sizes, limit
    padded = {
        str(e.attrs[0]): F.pad(v, (0, more[str(e.feature)] - v.shape[-1])) for e, v in zip(nodes, given, strict=True)
    }
    return {**inputs, **padded}, replace(sizes, letters={**sizes.letters, **more}), room and room - copies


def cut_features(values: Sequence[Any], program: Lowered, sizes: Sizes) -> list[Any]:
    """Results with as many features as ``sizes`` says."""
    return [
        v[..., : sizes.of(str(e.feature))].contiguous() if e.feature is not None and isinstance(v, Tensor) else v
        for v, e in zip(values, program.outputs, strict=True)
    ]


@functools.lru_cache(maxsize=256)
def _nodes(program: Lowered) -> tuple[Expr, ...]:
    roots = [*program.outputs]
    for p in program.passes:
        roots += [*p.feeds, *p.fold.reductions, *p.fold.scales]
    return tuple(topological(roots))


@functools.lru_cache(maxsize=256)
def _letters(program: Lowered) -> tuple[str, ...]:
    """The letters of vectors that may have zeros behind them."""
    nodes = _nodes(program)
    sizes = {str(e.attrs[0]) for e in nodes if e.op == "size"}
    found = dict.fromkeys(str(e.feature) for e in nodes if e.op == "input" and e.feature is not None)
    seen = {str(v.feature) for e in nodes if not _keeps_zeros(e) for v in (e, *e.args) if v.feature is not None}
    return tuple(f for f in found if f not in seen and f not in sizes and not f.lstrip("#").isdigit())


def _keeps_zeros(e: Expr) -> bool:
    vectors = [a for a in e.args if a.feature is not None]
    if e.op in ("add", "sub"):
        return len(vectors) in (0, 2)
    if e.op == "div":
        return not vectors or vectors == [e.args[0]]
    return (not vectors and e.feature is None) or e.op in (*_KEEPS_ZEROS, "mul")


@dataclass(frozen=True)
class WholeSums:
    """Sums of vectors, in two steps."""

    weights: Fold  # writes a number per pair for each of ``homes``
    homes: tuple[Expr, ...]  # the inner products (leaves per pair) where weights are written
    terms: tuple[tuple[tuple[int, Expr], ...], ...]  # of each sum: which weight is multiplied with which vectors


@functools.lru_cache(maxsize=256)
def find_whole_sums(fold: Fold, free: tuple[Expr, ...]) -> WholeSums | None:
    """A fold as whole products; None if it has another form. ``free``: its inner products that nothing else reads."""
    weights: dict[Expr, int] = {}
    terms = []
    for r in fold.reductions:
        if r.attrs[0] != "sum" or r.args[0].dtype != "float" or r.args[0].feature is None:
            return None
        parts = contractions(r.args[0], r.attrs[1])
        if any(c.walk or c.vector is None or c.minus is not None or not c.weight.is_pair for c in parts):
            return None
        terms.append(tuple((weights.setdefault(c.weight, len(weights)), c.vector) for c in parts if c.vector))
    if len(weights) > len(free) or _hides_pairs(fold):
        return None
    written = tuple(reduce_node("pair", "neither", (EVERY,), (w, e)) for w, e in zip(weights, free, strict=False))
    used = set(topological(written))
    leaves = tuple(e for e in fold.leaves if e in used)
    return WholeSums(Fold(leaves, written, exact=fold.exact), free[: len(weights)], tuple(terms))


def _hides_pairs(fold: Fold) -> bool:
    """Whether some tiles need no products at all (a causal condition): tiles that are left out are worth more."""
    return any(
        all(is_idle(r, {c: const(truth)}) for r in fold.reductions) for c in conditions(fold) for truth in (False, True)
    )
