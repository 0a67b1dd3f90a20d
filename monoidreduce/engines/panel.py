"""The panel schedule: vendor GEMMs fill a panel of pairs; everything else is done to the panel where it lies.

**A program as loops over panels.** A *panel* is a block of rows × columns of pairs. A pass joins the loop before it,
and shares its GEMMs, unless it needs a result that only the end of that loop completes: one over rows, or a gather.
Inner products of a row's and a column's vector become leaves given per pair, which a GEMM computes.

**What is done to a panel** is a :class:`Step`: in tiles of torch here (:class:`TorchStep`), in generated kernels on a
GPU (``engines/triton/panel/kernel_step.py``).

On a CPU, sums of vectors are found that can be whole products (:func:`find_whole_sums`): the weights of a panel are
written over its inner products, then multiplied. A gradient of a vocabulary head is Σ weight × vector over both axes.
Tiles of torch calls write the weights of a tile, and multiply it, hundreds of times for each panel; here one generated
C++ function writes those of all tiles where their inner products were, and each sum is one matrix product.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import BudgetError
from ..plan import budget, panel_layout, settings
from ..plan import schedule as plan
from ..program.constructors import apply, contractions, substitute
from ..program.expression import Expr, const, node, reduce_node, result, size, topological
from ..program.lower import Fold, Lowered, Pass, compile_program, conditions, is_idle
from ..reductions import kind_of, make, outputs_of
from ..reductions.base import Accumulator
from ..reductions.pair import EVERY
from ..reductions.sum import SumAccumulator
from .common import matmul
from .common.evaluate import Evaluator, Sizes, from_layout, to_layout
from .common.label_gather import run_pick
from .eager import cpp
from .eager.cpp.compiled_fold import WIDE
from .eager.tile_code import Buffers
from .eager.tile_walk import BatchChunk, FoldCode, compile_fold, make_accumulator, split_range


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


# The loop over panels

ALIGN = 64  # elements: the row pitch of a panel is a multiple


class Step(Protocol):
    """What does the stages of one loop to its panels. Called in this order: ``compute_row_scalars``, ``choose_layout``,
    ``begin``, then ``run_stages`` for every group of stages of every panel, then ``finish_stage`` for every stage."""

    splits_softmax_means: bool  # whether a softmax mean of vectors should come as a softmax and a sum
    aligns_features: bool  # whether vectors should begin on 16 bytes
    groups: tuple[range, ...]  # the stages that are done at once

    @staticmethod
    def run_or_replay(run: Callable[..., list[Any]], *given: Any) -> list[Any]:
        """What ``run(*given)`` returns, perhaps from a recorded run."""

    def __init__(self, loop: PanelLoop, sizes: Sizes, dtypes: set[torch.dtype]) -> None:
        """``dtypes``: those of the columns' vectors."""

    def compute_row_scalars(self, scalars: tuple[Expr, ...], evaluator: Evaluator) -> None:
        """Compute scalars of all rows, if there is a faster way than the evaluator's own."""

    def choose_layout(self, limit: int) -> panel_layout.PanelLayout | None:
        """The layout that fits in ``limit`` bytes, None where none does."""

    def least_bytes(self) -> int:
        """Bytes in which some layout fits."""

    def begin(self, layout: panel_layout.PanelLayout) -> None: ...

    def iterate_panels(self) -> Iterable[tuple[slice, slice]]:
        """The rows and columns of the panels, in their order."""

    def run_stages(self, group: range, panel: Panel) -> None:
        """Do a group of stages to a panel, and hand over the results that are complete."""

    def finish_stage(self, at: int) -> list[list[Tensor] | None]:
        """The results that only all panels complete, None for the others."""


StepClass = type[Step]


# Running ------------------------------------------------------------------------------------------------------


def execute(
    program: Lowered, inputs: Mapping[str, Any], sizes: Sizes, step_class: StepClass, limit: int = 0
) -> list[Any]:
    """Run a program of one batch element, loop by loop; its outputs in the evaluator's layout. ``limit``: bytes that
    panels may take, the budget's if left out."""
    given, aligned = inputs, sizes
    if step_class.aligns_features:
        given, aligned, limit = pad_features(program, inputs, sizes, limit)
    found = step_class.run_or_replay(functools.partial(_run_loops, step_class), program, given, aligned, limit)
    return found if aligned is sizes else cut_features(found, program, sizes)


def least_bytes(program: Lowered, sizes: Sizes, step_class: StepClass, dtypes: set[torch.dtype]) -> int:
    """Bytes in which a program can be run, its columns' vectors being of ``dtypes``."""
    program = split_softmax_means(program) if step_class.splits_softmax_means else program
    return find_least_bytes(program, lambda loop: step_class(loop, sizes, dtypes).least_bytes())


def _run_loops(
    step_class: StepClass, program: Lowered, inputs: Mapping[str, Any], sizes: Sizes, limit: int
) -> list[Any]:
    program = split_softmax_means(program) if step_class.splits_softmax_means else program
    evaluator = Evaluator(sizes, inputs)
    needed = _list_nodes(program.outputs)
    for loop in split_into_loops(program):
        first = _LoopRun(loop, evaluator, needed, step_class, limit)
        runs = [first]
        if first.layout is None:
            runs = [_LoopRun(one, evaluator, needed, step_class, limit) for one in loop.split_directions()] or runs
        if not all(each.layout for each in runs):
            bytes = least_bytes(program, sizes, step_class, first.dtypes)
            raise BudgetError(given=budget.format_floor(first.limit), least=budget.format_ceil(bytes), bytes=bytes)
        for each in runs:
            each.run()
    return [evaluator(e) for e in program.outputs]


@functools.lru_cache(maxsize=1024)
def _list_nodes(outputs: tuple[Expr, ...]) -> frozenset[Expr]:
    return frozenset(topological(outputs))


def writes_pairs(fold: Fold) -> bool:
    """Whether a fold has a result per pair (the gradient of an input given per pair), which tiles must write; or looks
    up tables or reads packed vectors, which panels' kernels cannot."""
    return bool(fold.tables or fold.packed) or any(kind_of(r).per_pair for r in fold.reductions)


def run(
    fold: Fold, leaves: list[Any], sizes: Sizes, step_class: StepClass | None = None, limit: int = 0
) -> list[Tensor]:
    """Run a fold as every engine does, one batch element after the other."""
    program, names = as_program(fold), [str(e.attrs[0]) for e in fold.leaves]
    one = Sizes(sizes.rows, sizes.cols, (), sizes.letters, sizes.device, sizes.compute)
    shape = torch.Size(sizes.batch)
    found = []
    for b in range(shape.numel()):
        at = tuple(int(i) for i in torch.unravel_index(torch.tensor(b, device="cpu"), shape)) if sizes.batch else ()
        own = [v.expand((*shape, *v.shape[len(shape) :]))[at] if isinstance(v, Tensor) else v for v in leaves]
        values = execute(program, dict(zip(names, own, strict=True)), one, step_class or TorchStep, limit)
        found.append([_expand_result(from_layout(v, e), e, one) for v, e in zip(values, program.outputs, strict=True)])
    if len(found) == 1:  # no second copy of a gradient that may be most of the memory
        return [t.view(*shape, *t.shape) for t in found[0]]
    return [torch.stack(each).view(*shape, *each[0].shape) for each in zip(*found, strict=True)]


def _expand_result(value: Any, e: Expr, sizes: Sizes) -> Tensor:
    """A result as engines return it: a tensor of its full length, in the type that the caller holds."""
    length = (sizes.rows,) if e.rows else (sizes.cols,) if e.cols else ()
    tail = () if e.feature is None else (sizes.of(str(e.feature)),)
    dtype = {"int": torch.int64}.get(e.dtype, sizes.compute)
    value = value if isinstance(value, Tensor) else torch.full((), value, device=sizes.device)
    if e.feature is not None and value.dtype in matmul.SIXTEEN:
        dtype = value.dtype
    return value.to(dtype).expand(*length, *tail)


class _LoopRun:
    """One loop over panels: its layout, what it is fed, and the results over columns so far."""

    def __init__(
        self, loop: PanelLoop, evaluator: Evaluator, needed: frozenset[Expr], step_class: StepClass, limit: int
    ):
        self.loop, self.evaluator, self.needed = loop, evaluator, needed
        self.nodes = [list(group_by_reduction(s.fold.reductions, s.results).values()) for s in loop.stages]
        self.sizes = evaluator.sizes
        feeds = [f for s in loop.stages for f in s.feeds]
        feeds += [a for f in feeds if f.op == "dot" for a in f.args]
        self.fixed = {f: evaluator(f) for f in dict.fromkeys(feeds) if not f.rows}
        vectors = [v for f, v in self.fixed.items() if f.cols and f.feature is not None]
        self.dtypes = {v.dtype for v in vectors}
        self.step = step_class(loop, self.sizes, self.dtypes)
        known = find_row_scalars(tuple(feeds))
        self.step.compute_row_scalars(known, evaluator)
        self.scalars = {f: evaluator(f) for f in known}
        self.layout: panel_layout.PanelLayout | None = panel_layout.PanelLayout(1, 1)
        self.limit = limit
        if self.sizes.rows and self.sizes.cols:
            if limit:
                self.layout = self.step.choose_layout(limit)
            else:
                free = functools.partial(matmul.free_memory, self.sizes.device)
                found = panel_layout.choose_in_budget(self.step.choose_layout, free, self.step.least_bytes())
                self.limit, self.layout = found
        self.found: dict[Expr, Tensor] = {}
        self.last: tuple[slice, Evaluator, dict[Expr, Any]] | None = None

    def run(self) -> None:
        assert self.layout is not None
        self.step.begin(self.layout)
        for rows, cols in self.step.iterate_panels():
            panel = Panel(self, rows, cols)
            for group in self.step.groups:
                self.step.run_stages(group, panel)
        for at, stage in enumerate(self.loop.stages):
            for nodes, value in pair_results(stage, self.step.finish_stage(at)):
                self.evaluator.memo |= {n: to_layout(value, n) for n in nodes}
        self.evaluator.memo |= {n: to_layout(v, n) for n, v in self.found.items()}
        self.last = None
        del self.step  # and with it the panel's memory, before another loop allocates its own
        for stage in self.loop.stages:
            self._gather(stage.gathers)

    def evaluate_rows(self, rows: slice) -> tuple[Evaluator, dict[Expr, Any]]:
        """An evaluator of these rows alone, and what was fed of them; what does not depend on rows was computed once.

        Panels of the same rows share both: they only add to sums, which no stage of this loop reads."""
        if self.last is None or self.last[0] != rows:
            self.last = rows, self._make_evaluator(rows), {}
        return self.last[1:]

    def _make_evaluator(self, rows: slice) -> Evaluator:
        inputs = self.evaluator.inputs
        memo = dict(self.fixed)
        for f, value in self.scalars.items():
            memo[f] = value[rows] if isinstance(value, Tensor) and value.shape[0] > 1 else value
        for e in topological([*(f for s in self.loop.stages for f in s.feeds)], stop=memo.__contains__):
            if e in memo:
                continue
            if e.op in ("input", "leaf") and e.rows:
                value = inputs[e.attrs[0]]
                if e.is_pair:  # given per pair, perhaps broadcast
                    value = value.expand(self.sizes.rows, self.sizes.cols)
                memo[e] = to_layout(value[rows] if isinstance(value, Tensor) else value, e)
            elif e.op == "row_index":
                memo[e] = torch.arange(rows.start, rows.stop, device=self.sizes.device).view(-1, 1)
            elif e.rows and e in self.evaluator.memo:  # a result of an earlier loop
                memo[e] = self.evaluator.memo[e][rows]
        return Evaluator(self.sizes, inputs, memo)

    def keep(self, nodes: tuple[Expr, ...], value: Tensor, rows: slice, local: Evaluator, full: Tensor | None) -> None:
        """Keep what later stages read of these rows, and what outputs read of all rows."""
        for n in nodes:
            local.memo[n] = to_layout(value, n)
            if n not in self.needed:
                continue
            if full is not None or value.shape[0] == self.sizes.rows:
                self.found[n] = value if full is None else full
                continue
            if n not in self.found:
                self.found[n] = value.new_empty((self.sizes.rows, *value.shape[1:]))
            self.found[n][rows] = value

    def _gather(self, gathers: Pass | None) -> None:
        if gathers is None:
            return
        leaves = {e: from_layout(self.evaluator(f), f) for e, f in zip(gathers.fold.leaves, gathers.feeds, strict=True)}
        leaves = {e: v.unsqueeze(0) if isinstance(v, Tensor) else v for e, v in leaves.items()}
        for r, (nodes,) in group_by_reduction(gathers.fold.reductions, gathers.results).items():
            length = self.sizes.rows if r.attrs[1] == "cols" else self.sizes.cols
            ((feature, _),) = outputs_of(r)
            tail = () if feature is None else (self.sizes.of(str(feature)),)
            out = torch.zeros(1, length, *tail, dtype=self.sizes.compute, device=self.sizes.device)
            run_pick(r, leaves, self.sizes, 1, out, plan.ELEMENTS)
            self.evaluator.memo |= {n: to_layout(out[0], n) for n in nodes}


def iterate_grid(sizes: Sizes, layout: panel_layout.PanelLayout) -> Iterator[tuple[slice, slice]]:
    """The panels in their order; where there are no pairs, an empty one, which gives the identities."""
    rows = split_range(sizes.rows, layout.rows) or [slice(0, 0)]
    cols = split_range(sizes.cols, layout.cols) or [slice(0, 0)]
    if layout.outer == "rows":
        yield from itertools.product(rows, cols)
    else:
        yield from ((r, c) for c, r in itertools.product(cols, rows))


class Panel:
    """Some rows and columns of a running loop: what is fed for them, and where their results go."""

    def __init__(self, run: _LoopRun, rows: slice, cols: slice):
        self.run, self.rows, self.cols = run, rows, cols
        self.local, self.fed = run.evaluate_rows(rows)

    def feed(self, f: Expr) -> Any:
        """The value of a one-sided expression (or of one given per pair) for these rows and columns."""
        if f not in self.fed:
            self.fed[f] = from_layout(self.local(f), f)
        value = self.fed[f]
        if not f.cols or not isinstance(value, Tensor):
            return value
        return value[:, self.cols] if f.rows else value[self.cols]

    def with_all_columns(self, rows: slice) -> Panel:
        """Some rows, and all columns."""
        return Panel(self.run, rows, slice(0, self.run.sizes.cols))

    def keep_results(
        self, at: int, place: int, values: list[Tensor], full_tensors: Sequence[Tensor | None] = ()
    ) -> None:
        """Hand over the results of one reduction of a stage; ``full_tensors``: the tensors of all rows that they are
        slices of, where they are."""
        for own, value, full in zip(
            self.run.nodes[at][place], values, full_tensors or [None] * len(values), strict=True
        ):
            self.run.keep(own, value, self.rows, self.local, full)


# Stages in torch ----------------------------------------------------------------------------------------------


class TorchStep:
    """Stages done in tiles of torch, by the eager engine's arithmetic; the panel holds inner products alone."""

    splits_softmax_means = aligns_features = False

    @staticmethod
    def run_or_replay(run: Callable[..., list[Any]], *given: Any) -> list[Any]:
        return run(*given)

    def __init__(self, loop: PanelLoop, sizes: Sizes, dtypes: set[torch.dtype]):
        self.loop, self.sizes = loop, sizes
        narrow = torch.bfloat16 in dtypes and not matmul.needs_float32(sizes.device, torch.bfloat16)
        self.pair_dtype = torch.bfloat16 if narrow and not loop.exact else sizes.compute
        self.tile_bytes = plan.LEAST
        self.groups = tuple(range(at, at + 1) for at in range(len(loop.stages)))

    def compute_row_scalars(self, scalars: tuple[Expr, ...], evaluator: Evaluator) -> None:
        pass

    def choose_layout(self, limit: int) -> panel_layout.PanelLayout | None:
        # A quarter for the tiles, less where one row of a panel needs it: what least_bytes() names must suffice.
        spare = limit - self.least_bytes() + plan.LEAST
        self.tile_bytes = min(max(plan.LEAST, min(limit // 4, spare)), plan.ELEMENTS * plan.HELD)
        limit -= self.tile_bytes
        return panel_layout.plan_whole_rows(self.sizes.rows, self.sizes.cols, self._pair_bytes(), limit)

    def least_bytes(self) -> int:
        return self.sizes.cols * self._pair_bytes() + plan.LEAST

    def _pair_bytes(self) -> int:
        return max(1, len(self.loop.products)) * self.pair_dtype.itemsize

    def begin(self, layout: panel_layout.PanelLayout) -> None:
        self.layout = layout
        shape, dtype, device = (layout.rows, self.pitch(layout)), self.pair_dtype, self.sizes.device
        self.panels = {f: torch.empty(shape, dtype=dtype, device=device) for f in self.loop.products}
        self.filled: tuple[slice | None, set[Expr]] = (None, set())  # rows, and their inner products that are there
        self.tiles = self.cut_tiles(layout)
        self.accumulators = [self._accumulators(s.fold) for s in self.loop.stages]
        self.buffers: dict[int, Buffers] = {}

    def code(self, fold: Fold, numbers: frozenset[Expr]) -> FoldCode:
        return compile_fold(fold, numbers)

    def pitch(self, layout: panel_layout.PanelLayout) -> int:
        """Elements from one row of a panel to the next."""
        return -(-layout.cols // ALIGN) * ALIGN

    def cut_tiles(self, layout: panel_layout.PanelLayout) -> plan.Tiles:
        """The tiles in which everything but GEMMs is done to a panel."""
        return plan.choose_tiles(1, layout.rows, layout.cols, room=self.tile_bytes)

    def iterate_panels(self) -> Iterable[tuple[slice, slice]]:
        return iterate_grid(self.sizes, self.layout)

    def _accumulators(self, fold: Fold) -> dict[int, Accumulator]:
        """Accumulators of the reductions over rows, which only all panels complete."""
        found = {}
        for place, r in enumerate(fold.reductions):
            if r.attrs[1] == "rows":
                found[place] = make_accumulator(r, 1, self.sizes.cols, self.sizes)
        return found

    def run_stages(self, group: range, panel: Panel) -> None:
        (at,) = group
        stage = self.loop.stages[at]
        given: dict[Expr, Any] = {e: panel.feed(f) for e, f in list_feeds(stage)}
        for leaf, f in stage.products:
            given[leaf] = self._compute_product(f, panel)
        given = {e: v.unsqueeze(0) if isinstance(v, Tensor) else v for e, v in given.items()}
        if self._run_whole_sums(at, panel, given) or self._run_cpp(at, panel, given):
            return
        numbers = {e: v for e, v in given.items() if not isinstance(v, Tensor)}
        code = self.code(stage.fold, frozenset(numbers))
        buffers, accumulators = self._tile_buffers(at, numbers), self.accumulators[at]
        chunk = BatchChunk(code, given, self.sizes, self.tiles, 1, buffers, panel.rows, accumulators)
        chunk.fold_tiles()
        for place, accumulator in enumerate(chunk.accumulators):
            if place not in accumulators:
                panel.keep_results(at, place, _take_first(accumulator))

    def _run_cpp(self, at: int, panel: Panel, given: dict[Expr, Any]) -> bool:
        """Do a stage to a panel in generated C++; False if tiles of torch calls should."""
        fold, own = self.loop.stages[at].fold, self.accumulators[at]
        if type(self).code is not TorchStep.code or any(not isinstance(a, SumAccumulator) for a in own.values()):
            return False
        features = [outputs_of(r)[0][0] for r in fold.reductions if r.attrs[0] == "sum"]
        if panel.cols != slice(0, self.sizes.cols) or any(f and self.sizes.of(str(f)) > WIDE for f in features):
            return False  # sums of wide vectors are faster as products of torch's larger tiles
        totals = {fold.reductions[p]: a.total for p, a in own.items() if isinstance(a, SumAccumulator)}
        found = self._call_cpp(fold, given, panel, totals)
        if found is None:
            return False
        results = iter(found)
        for place, r in enumerate(fold.reductions):
            values = [next(results)[0] for _ in outputs_of(r)]
            if place not in own:
                panel.keep_results(at, place, values)
        return True

    def _call_cpp(
        self, fold: Fold, given: dict[Expr, Any], panel: Panel, totals: dict[Expr, Tensor]
    ) -> list[Tensor] | None:
        sizes, leaves = replace(self.sizes, batch=(1,)), [given[e] for e in fold.leaves]
        wide = any(self.sizes.of(str(f.args[0].feature)) > panel_layout.HOST_NARROW for f in self.loop.products)
        worth = cpp.WORTH_PANEL if wide else cpp.WORTH
        return cpp.run(fold, leaves, sizes, panel.rows, totals, worth=worth)

    def _run_whole_sums(self, at: int, panel: Panel, given: dict[Expr, Any]) -> bool:
        """Do a stage as whole products; False if tiles of torch calls should."""
        stage, last = self.loop.stages[at], self.loop.list_last_uses(at)
        free = tuple(leaf for leaf, f in stage.products if f in last)
        whole = find_whole_sums(stage.fold, free) if type(self).code is TorchStep.code else None
        if whole is None or panel.cols != slice(0, self.sizes.cols):
            return False
        if self.pair_dtype != self.sizes.compute:
            return False
        homes = [given[e] for e in whole.homes]
        places = dict(zip(whole.weights.reductions, homes, strict=True))
        if self._call_cpp(whole.weights, given, panel, places) is None:
            return False
        self.filled = (panel.rows, self.filled[1].difference(last))
        for place, (r, terms) in enumerate(zip(stage.fold.reductions, whole.terms, strict=True)):
            own, length = self.accumulators[at].get(place), panel.rows.stop - panel.rows.start
            accumulator = own or make_accumulator(r, 1, length, self.sizes)
            assert isinstance(accumulator, SumAccumulator)
            for k, v in terms:
                weights = homes[k] if r.attrs[1] == "cols" else homes[k].mT
                matmul.accumulate_cast(accumulator.total, weights, given[v])
            if own is None:
                panel.keep_results(at, place, _take_first(accumulator))
        return True

    def _tile_buffers(self, at: int, numbers: dict[Expr, Any]) -> Buffers:
        """One set of tile buffers per stage, kept from panel to panel."""
        if at not in self.buffers:
            constants = numbers | {size(axis): self.sizes.of(axis) for axis in ("rows", "cols", *self.sizes.letters)}
            elements = self.tiles.rows * self.tiles.cols
            self.buffers[at] = Buffers(elements, self.sizes.compute, self.sizes.device, constants)
        return self.buffers[at]

    def _compute_product(self, f: Expr, panel: Panel) -> Tensor:
        """An inner product of a panel's rows and all columns, computed once."""
        rows = panel.rows
        out = self.panels[f][: rows.stop - rows.start, : self.sizes.cols]
        if self.filled[0] != rows:
            self.filled = (rows, set())
        if f not in self.filled[1]:
            x, y = (panel.feed(a) for a in (f.args if f.args[0].rows else f.args[::-1]))
            matmul.multiply_into_panel(out, x, y)
            self.filled[1].add(f)
        return out

    def finish_stage(self, at: int) -> list[list[Tensor] | None]:
        own = self.accumulators[at]
        places = range(len(self.loop.stages[at].fold.reductions))
        return [_take_first(own[p]) if p in own else None for p in places]


def _take_first(accumulator: Accumulator | None) -> list[Tensor]:
    """Results of the only batch element."""
    assert accumulator is not None
    return [v[0] for v in accumulator.finish()]
