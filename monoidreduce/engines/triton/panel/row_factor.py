"""The factor of a row that is known late, and the label column: how sums of softmax weights do without both.

A gradient through a softmax has weights exp(s - max) / total × g - [column = label] × g. The exponential can be written
as soon as its inner product is there, measured from a guessed maximum; the total, and all that is computed from it, is
known late, when all columns were seen. Since it is one number per row it multiplies the sums' other operands instead of
the pairs (:func:`split_row_factor`, :class:`RowCorrections`).

The label's weight stands out by orders of magnitude. Among the other weights it would be rounded with them, and
multiplied by a rounded factor: it is added to the sums instead, in float32, where they are complete. Rows of one label
are added in their order by the first of them, so that results do not depend on which program instance runs first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....program.constructors import ONE, ZERO, apply, substitute
from ....program.expression import Expr, const, index, topological
from ..launch.driver import Kernels
from .row_kernel import FusedStages, shift_indices

_MAX_TERMS = 16  # beyond which nothing is distributed


@dataclass(frozen=True)
class FactoredWeight:
    """A weight as ``factor`` × ``pair_weight``, plus ``label_weight`` in the column ``label``.

    In that column both terms may nearly cancel: their sum is computed where it is exact, apart from the others."""

    pair_weight: Expr  # per pair, of leaves and the exponential
    exponential: Expr  # exp(logit - max)
    factor: Expr  # per row, known late
    label: Expr | None
    label_weight: Expr | None


@dataclass(frozen=True)
class LabelTerm:
    """The whole weight in each row's ``label`` column, which differs from that of the other columns."""

    weight: Expr
    label: Expr


def has_distinct_labels(label: Expr | None) -> bool:
    """True when no two rows have the same label: it is the row's own index."""
    return label is not None and label in (index("row"), *shift_indices("row").values())


def split_label_column(weight: Expr) -> tuple[Expr, LabelTerm] | None:
    """A weight that is 0 in each row's label column, and what stands there; None where rows have no label, or
    several."""
    hits = [e for e in topological([weight]) if _is_label_term(e)]
    labels = {_find_label(e) for e in hits}
    if len(labels) != 1:
        return None
    label = labels.pop()
    (others,) = substitute((weight,), dict.fromkeys(hits, ZERO))
    return apply("where", apply("eq", index("col"), label), ZERO, others), LabelTerm(weight, label)


@dataclass(frozen=True)
class _Term:
    """A product of scalars per pair and of scalars per row."""

    pairs: tuple[Expr, ...] = ()
    rows: tuple[Expr, ...] = ()


@functools.lru_cache(maxsize=1024)
def split_row_factor(stages: FusedStages) -> FactoredWeight | None:
    """Take apart the one weight of some stages; None where their folds are anything but a softmax of scalars and label
    gathers, or the weight is no such product."""
    folds = [r for fold in stages.folds for r in fold]
    soft = [r for r in folds if r.attrs[0] == "soft"]
    if len(stages.weights) != 1 or len(soft) != 1 or len(soft[0].args) != 1 or soft[0] is not stages.folds[0][0]:
        return None
    if any(stages.folds[1:]) or any(r.attrs[0] not in ("soft", "pick") for r in folds):
        return None
    results = {n for names in stages.names for n in names}
    exponential = apply("exp", apply("sub", soft[0].args[0], stages.names[0][2]))
    terms = _expand_terms(stages.weights[0], exponential, results)
    if terms is None:
        return None
    hits = [t for t in terms if len(t.pairs) == 1 and _is_label_term(t.pairs[0])]
    others = [t for t in terms if t not in hits]
    labels = {_find_label(t.pairs[0]) for t in hits} | {r.args[0] for r in folds if r.attrs[0] == "pick"}
    if len(others) != 1 or len(labels) > 1:
        return None
    if exponential not in others[0].pairs or any(map(_is_label_term, others[0].pairs)):
        return None
    at_label = [_multiply((t.pairs[0].args[1], *t.rows)) for t in hits]
    return FactoredWeight(
        _multiply(others[0].pairs),
        exponential,
        _multiply(others[0].rows),
        labels.pop() if labels else None,
        functools.reduce(lambda a, b: apply("add", a, b), at_label) if at_label else None,
    )


def _expand_terms(e: Expr, exponential: Expr, results: set[Expr]) -> tuple[_Term, ...] | None:
    """An expression as a sum of terms whose scalars per pair need no result; None where it is no such sum."""
    dependent: set[Expr] = set()  # what needs a result
    for n in topological([e]):
        if n in results or not dependent.isdisjoint(n.args):
            dependent.add(n)
    found: dict[Expr, tuple[_Term, ...] | None] = {}
    for n in topological([e], stop=lambda n: n is exponential or not _is_sum(n)):
        terms = _expand_node(n, exponential, n in dependent, found)
        found[n] = None if terms is None or len(terms) >= _MAX_TERMS else terms
    return found[e]


def _is_sum(e: Expr) -> bool:
    """True when the terms of an expression follow from those of its arguments."""
    inside = e.op in ("add", "sub", "mul", "neg") or (e.op == "div" and not e.args[1].cols)
    return inside and (e.is_pair or e.cols)


def _expand_node(
    e: Expr, exponential: Expr, dependent: bool, found: dict[Expr, tuple[_Term, ...] | None]
) -> tuple[_Term, ...] | None:
    """The terms of a node, given those of its arguments."""
    if not e.is_pair and not e.cols:
        return (_Term(rows=(e,)),)
    if e is exponential or _is_label_term(e):
        return (_Term(pairs=(e,)),)
    if not _is_sum(e):
        return None if dependent else (_Term(pairs=(e,)),)
    first = found[e.args[0]]
    if first is None or e.op == "neg":
        return first and tuple(map(_negate, first))
    if e.op == "div":
        inverse = apply("div", ONE, e.args[1])
        return tuple(_Term(t.pairs, (*t.rows, inverse)) for t in first)
    second = found[e.args[1]]
    if second is None:
        return None
    if e.op != "mul":
        return (*first, *(second if e.op == "add" else map(_negate, second)))
    if len(first) * len(second) >= _MAX_TERMS:
        return None
    return tuple(_Term(s.pairs + t.pairs, s.rows + t.rows) for s in first for t in second)


def _negate(t: _Term) -> _Term:
    return _Term(t.pairs, (*t.rows, const(-1.0)))


def _is_label_term(e: Expr) -> bool:
    """True when an expression is a row's scalar in one column, and 0 in all others."""
    if e.op != "where" or e.args[2].const != 0 or e.args[1].cols or e.args[0].op != "eq":
        return False
    return any(a.op == "col_index" and not b.cols for a, b in (e.args[0].args, e.args[0].args[::-1]))


def _find_label(term: Expr) -> Expr:
    a, b = term.args[0].args
    return b if a.op == "col_index" else a


def _multiply(factors: Sequence[Expr]) -> Expr:
    return functools.reduce(lambda a, b: apply("mul", a, b), factors, ONE)


# What is done to the sums ---------------------------------------------------------------------------------------

_TEXT = """@triton.jit
def scale_rows(out, vectors, vectors_s, vectors_f, factors, WIDTH: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factors + row)
    for start in range(0, WIDTH, LANES):
        lane = start + tl.arange(0, LANES)
        own = tl.load(vectors + row * vectors_s + lane * vectors_f, mask=lane < WIDTH, other=0).to(tl.float32)
        tl.store(out + row * WIDTH + lane, own * factor, mask=lane < WIDTH)


@triton.jit
def clear_labels(panel, panel_r, labels, first, last, rows, LANES: tl.constexpr):
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    label = tl.load(labels + row, mask=row < rows, other=-1)
    inside = (label >= first) & (label < last)
    nothing = tl.zeros([LANES], tl.float32).to(panel.dtype.element_ty)
    tl.store(panel + row.to(tl.int64) * panel_r + label - first, nothing, mask=inside)


@triton.jit
def complete_rows(
    out, factors, weights, labels, vectors, vectors_s, vectors_f,
    SCALED: tl.constexpr, LABELLED: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factors + row) if SCALED else 1.0
    for start in range(0, WIDTH, LANES):
        lane = start + tl.arange(0, LANES)
        value = tl.load(out + row * WIDTH + lane, mask=lane < WIDTH, other=0).to(tl.float32) * factor
        if LABELLED:
            weight = tl.load(weights + row)
            if weight != 0.0:
                place = tl.load(labels + row) * vectors_s + lane * vectors_f
                value += weight * tl.load(vectors + place, mask=lane < WIDTH, other=0).to(tl.float32)
        tl.store(out + row * WIDTH + lane, value, mask=lane < WIDTH)


@triton.jit
def add_labels(
    out, weights, labels, vectors, vectors_s, vectors_f, rows,
    DISTINCT: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
    MANY: tl.constexpr,
):
    row = tl.program_id(0) // BLOCKS
    lane = tl.program_id(0) % BLOCKS * LANES + tl.arange(0, LANES)
    weight = tl.load(weights + row)
    label = tl.load(labels + row)
    before = 0
    after = 0
    if not DISTINCT:
        if weight != 0.0:
            earlier = tl.zeros([1024], tl.int32)  # added up at the end: in every step it would cost more than the rest
            later = tl.zeros([1024], tl.int32)
            for start in range(0, rows, 1024):
                other = start + tl.arange(0, 1024)
                same = tl.load(labels + other, mask=other < rows, other=-1) == label
                same = same & (tl.load(weights + other, mask=same, other=0.0) != 0.0)
                earlier += (same & (other < row)).to(tl.int32)
                later += (same & (other > row)).to(tl.int32)
            before = tl.sum(earlier)
            after = tl.sum(later)
    if (weight != 0.0) & (before == 0):
        place = out + label * WIDTH + lane
        value = tl.load(place, mask=lane < WIDTH, other=0).to(tl.float32)
        own = vectors + row.to(tl.int64) * vectors_s + lane * vectors_f
        value += weight * tl.load(own, mask=lane < WIDTH, other=0).to(tl.float32)
        if after > 0:
            for start in range(row + 1, rows, MANY):
                others = start + tl.arange(0, MANY)
                same = tl.load(labels + others, mask=others < rows, other=-1) == label
                if tl.max(tl.abs(tl.load(weights + others, mask=same, other=0.0))) > 0.0:
                    for some in range(start, min(start + MANY, rows), ROWS):
                        other = some + tl.arange(0, ROWS)
                        there = tl.load(weights + other, mask=other < rows, other=0.0)
                        there = tl.where(tl.load(labels + other, mask=other < rows, other=-1) == label, there, 0.0)
                        if tl.max(tl.abs(there)) > 0.0:
                            more = vectors + other.to(tl.int64)[:, None] * vectors_s + lane[None, :] * vectors_f
                            mask = (there != 0.0)[:, None] & (lane < WIDTH)[None, :]
                            value += tl.sum(tl.load(more, mask=mask, other=0).to(tl.float32) * there[:, None], 0)
        tl.store(place, value, mask=lane < WIDTH)
"""
_kernels = Kernels("Vectors times their row's factor, and the terms of label columns.", _TEXT)


@dataclass(frozen=True)
class RowCorrections:
    """What a panel's sums still need, one number per row: the late factor, and the label's weight.

    Sums over columns of a row are multiplied by its factor when they are complete; sums over rows take the rows'
    vectors times their factors."""

    factors: Tensor | None
    label_weights: Tensor | None = None  # 0 where nothing is added
    labels: Tensor | None = None  # a column that exists, where there is something to add
    distinct: bool = False  # whether no two rows have the same label
    scaled: Tensor | None = None  # rows' vectors times their factors, where they are computed already

    def scale_vectors(self, vectors: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The rows' vectors times their factors, in ``out`` if it is given."""
        if self.scaled is not None:
            return self.scaled
        out = torch.empty(vectors.shape, dtype=dtype, device=vectors.device) if out is None else out
        constants = dict(WIDTH=vectors.shape[1], LANES=1024)
        _kernels("scale_rows", vectors.shape[:1], (out, vectors, *vectors.stride(), self.factors), constants)
        return out

    def complete_row_sums(self, sums: Tensor, vectors: Tensor) -> Tensor:
        """Multiply sums over columns by the rows' factors and add the labels' terms, in place; ``vectors``: what was
        summed, of all columns."""
        given = self.factors, self.label_weights, self.labels
        factors, weights, labels = (sums if t is None else t for t in given)
        has = dict(SCALED=self.factors is not None, LABELLED=self.label_weights is not None)
        constants = dict(**has, WIDTH=sums.shape[1], LANES=1024)
        arguments = (sums, factors, weights, labels, vectors, *vectors.stride())
        _kernels("complete_rows", sums.shape[:1], arguments, constants)
        return sums

    def clear_label_weights(self, weights: Tensor, first: int) -> None:
        """Set the labels' weights to 0 in a panel that begins at the column ``first``: they are added apart."""
        if self.labels is not None:
            arguments = (weights, weights.stride(0), self.labels, first, first + weights.shape[1], weights.shape[0])
            _kernels("clear_labels", (-(-weights.shape[0] // 128),), arguments, dict(LANES=128))

    def select_rows(self, rows: slice) -> RowCorrections:
        """The same of some rows."""
        given = self.factors, self.label_weights, self.labels
        factors, weights, labels = (None if t is None else t[rows] for t in given)
        return replace(self, factors=factors, label_weights=weights, labels=labels)

    def add_label_terms(self, sums: Tensor, vectors: Tensor) -> None:
        """Add label weight × vector to sums over rows, in place; ``vectors``: of these rows, not scaled."""
        if self.label_weights is None or self.labels is None:
            return
        width, lanes = sums.shape[1], 2048  # every block of lanes looks for rows of the same label
        constants = dict(DISTINCT=self.distinct, WIDTH=width, LANES=lanes, BLOCKS=-(-width // lanes), ROWS=8, MANY=256)
        arguments = (sums, self.label_weights, self.labels, vectors, *vectors.stride(), vectors.shape[0])
        _kernels("add_labels", (vectors.shape[0] * constants["BLOCKS"],), arguments, constants)
