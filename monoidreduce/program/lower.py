"""The compiler: from a traced body, or from a fold that is to be differentiated, to the folds that an engine runs.

:func:`run_passes` is the whole of it, one line for each compiler pass; :func:`compile_program` is the same with a
cache, and what the rest of the library calls. Nothing here depends on shapes, devices or engines, so a program is
compiled once for all calls that trace alike. ``op.explain(..., passes=True)`` prints the program after each pass.
Expressions are simplified as they are built (``expression.py``), so every pass receives and returns simplified ones.
A :class:`Fold` is what an engine runs: reductions over numbered leaves, independent of the layer it came from, and
equal folds are the same object.
"""

from __future__ import annotations

import functools
import hashlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..reductions import kind_of, make, outputs_of
from . import constructors
from .constructors import ONE, ZERO, apply, interval, substitute, terms
from .expression import Expr, const, index, letters, node, reduce_node, result, size, topological
from .philox import DRAWS
from .primitives import PRIMITIVES
from .several import OF_VECTORS, scale, split_factor, split_products

_BUILTIN = ("const", "nan", "size", "row_index", "col_index")  # engines make these themselves


@dataclass(frozen=True)
class Fold:
    """Reductions over leaves, run in one pass over the pairs."""

    leaves: tuple[Expr, ...]
    reductions: tuple[Expr, ...]
    # A number that each reduction's result is multiplied by at the end (of a softmax: its mean); none, or all
    scales: tuple[Expr, ...] = ()
    raised: bool = False  # return vectors in the accumulator's type, since they are used in further arithmetic
    exact: bool = False  # never round products to 16 bits, here or in the gradient, even where they are stored
    # Sums that are gradients and nothing else, each with its leaf. An engine may return them summed over the batch
    # dimensions in which the leaf has size 1, and lays them out in memory as the leaf is.
    gradients: tuple[tuple[Expr, Expr], ...] = ()

    @functools.cached_property
    def scaled(self) -> tuple[tuple[Expr, Expr], ...]:
        """Every reduction with its scale."""
        return tuple(zip(self.reductions, self.scales or (constructors.ONE,) * len(self.reductions), strict=True))

    @functools.cached_property
    def pure(self) -> tuple[Expr, ...]:
        """The reductions with their scales moved inside: the form that is differentiated."""
        return tuple(
            r
            if s is constructors.ONE
            else constructors.rebuild(r, (*r.args[:-1], constructors.apply("mul", r.args[-1], s)))
            for r, s in self.scaled
        )

    @functools.cached_property
    def letters(self) -> tuple[str, ...]:
        """The letters (or fixed sizes) of the features of its leaves, tables aside, each once."""
        features = [str(e.feature) for e in self.leaves if e.feature is not None and e not in self.tables]
        return tuple(dict.fromkeys(name for f in features for name in (f, *letters(f))))

    @functools.cached_property
    def tables(self) -> frozenset[Expr]:
        """The leaves that are looked up, entry by entry: however many they have, no pair holds more than one."""
        found = [e.args[0] for e in topological(self.reductions) if e.op == "lookup"]
        return frozenset(found + [r.args[2] for r in self.reductions if r.attrs[0] == "histogram"])

    @functools.cached_property
    def packed(self) -> frozenset[Expr]:
        """The leaves that are packed vectors, and their scales."""
        found = [e for e in self.leaves if e.packing is not None]
        return frozenset([*found, *(a for e in found for a in e.args)])

    @functools.cached_property
    def domain(self) -> Expr | None:
        """The node that says which pairs are listed (``domains/``); None: all pairs are folded."""
        return constructors.find_listed(self.reductions)

    @functools.cached_property
    def outputs(self) -> tuple[tuple[Expr, int], ...]:
        """(reduction, k) for every result, in order."""
        counts = [len(outputs_of(r)) for r in self.reductions]
        return tuple((r, k) for r, count in zip(self.reductions, counts, strict=True) for k in range(count))

    @functools.cached_property
    def gradient_of(self) -> Mapping[Expr, Expr]:
        """By reduction, the leaf that it is the gradient of."""
        return dict(self.gradients)


@dataclass(frozen=True)
class Pass:
    """A fold, the expressions fed to its leaves, and the program's nodes that its outputs are."""

    fold: Fold
    feeds: tuple[Expr, ...]
    results: tuple[tuple[Expr, ...], ...]


@dataclass(frozen=True)
class Lowered:
    """What runs: passes in order, then the outputs (plain torch on inputs and results)."""

    passes: tuple[Pass, ...]
    outputs: tuple[Expr, ...]

    @functools.cached_property
    def exact(self) -> bool:
        """True where some pass must not round its products to 16 bits."""
        return any(p.fold.exact for p in self.passes)

    @functools.cached_property
    def is_listed(self) -> bool:
        """True where some pass folds listed pairs."""
        return any(p.fold.domain is not None for p in self.passes)

    def with_exactness(self, exact: bool) -> Lowered:
        """The same program; with ``exact`` no pass rounds its products to 16 bits."""
        passes = (replace(p, fold=replace(p.fold, exact=True)) for p in self.passes)
        return replace(self, passes=tuple(passes)) if exact else self


@functools.lru_cache(maxsize=1024)
def looks_up(outputs: tuple[Expr, ...]) -> bool:
    """Whether a program looks up tables by integers."""
    return any(e.op == "lookup" for e in topological(outputs))


@functools.lru_cache(maxsize=4096)
def name_gradients(program: Lowered, leaves: tuple[Expr | None, ...]) -> Lowered:
    """The same program; its folds are told which of their sums are gradients, and of which leaf.

    ``leaves``: per output, the input that it is the gradient of. Only what is an output and nothing else is named."""
    passes = tuple(
        replace(p, fold=replace(p.fold, gradients=_find_gradients(p, program, leaves))) for p in program.passes
    )
    return replace(program, passes=passes)


def _find_gradients(p: Pass, program: Lowered, leaves: Sequence[Expr | None]) -> tuple[tuple[Expr, Expr], ...]:
    used = {e for q in program.passes for e in topological(q.feeds)}
    used |= {a for e in topological(program.outputs) for a in e.args}
    found = []
    for (r, k), nodes in zip(p.fold.outputs, p.results, strict=True):
        places = [n for n, e in enumerate(program.outputs) if e in nodes]
        leaf = leaves[places[0]] if len(places) == 1 else None
        if (
            leaf is None
            or leaf not in p.feeds
            or k
            or r.attrs[0] not in ("sum", "histogram")
            or not used.isdisjoint(nodes)
        ):
            continue
        e = program.outputs[places[0]]
        if (e.rows, e.cols, e.feature) == (leaf.rows, leaf.cols, leaf.feature):
            found.append((r, p.fold.leaves[p.feeds.index(leaf)]))
    return tuple(found)


class Derived(Protocol):
    """A program made from a fold: its gradient (``gradient.py``)."""

    fold: Fold

    @property
    def outputs(self) -> tuple[Expr, ...]: ...


Source = tuple[Expr, ...] | Derived  # a body's outputs, or a fold and what of it is to be differentiated
Observe = Callable[[str, Any], None]  # is given the name of a compiler pass, and what that pass returned


def run_passes(source: Source, observe: Observe = lambda name, result: None) -> Lowered:
    """Compile ``source``; ``observe`` is called with the name and the result of each compiler pass, in order."""
    outputs = source if isinstance(source, tuple) else source.outputs
    observe("trace" if isinstance(source, tuple) else "gradient", outputs)
    outputs = normalize(outputs)
    observe("normal form", outputs)
    outputs = merge_softmax(outputs)
    observe("merge softmax", outputs)
    groups = group_reductions(outputs)
    observe("group reductions", groups)
    program = hoist_one_sided(outputs, groups)
    observe("hoist one-sided", program)
    return program if isinstance(source, tuple) else program.with_exactness(source.fold.exact)


@functools.lru_cache(maxsize=4096)
def compile_program(source: Source) -> Lowered:
    """The program that computes ``source``: :func:`run_passes`, with its answers cached."""
    return run_passes(source)


# Normal form: sums and softmax means rewritten into the equal form that is cheapest for every engine.
#
# A sum of vectors becomes ``outer × Σ number × vector`` (a product of matrices), factors that do not depend on the
# folded axis leave the sum, those that depend on it alone join the vector, and a sum against ``index == t`` becomes a
# ``pick``, which is a gather and needs no pass over the pairs at all. The same for the values of a softmax mean.

Part = tuple[Expr, Expr | None, Expr | None]  # of a sum: the factor and the vector outside it, the vector inside
Hot = tuple[str, Expr, Expr]  # the axis whose index is compared, the index it equals, the value there

_MANY = 64  # a product of more factors than this is not written out
_MANY_HOTS = 8
_HOT_INSIDE = ("add", "sub", "neg", "mul", "div", "where")  # operations that split_index_matches looks into


def normalize(roots: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Rewrite every sum and softmax mean under ``roots`` into normal form."""
    done: dict[Expr, Expr] = {}
    for e in topological(roots):
        args = tuple(done[a] for a in e.args)
        if e.op == "result" and e.args[0].attrs[0] in ("sum", "soft"):
            done[e] = _normalize_result(done[e.args[0]], e.attrs[0])
        elif e.op == "sub":
            done[e] = _subtract(*args)
        else:
            done[e] = constructors.rebuild(e, args)
    return tuple(done[r] for r in roots)


def _subtract(a: Expr, b: Expr) -> Expr:
    """a - b; where one is a logsumexp, its peak is subtracted first, so that a small difference keeps its digits."""
    for one, other, sign in ((a, b, 1), (b, a, -1)):
        if one.op == "result" and one.attrs[0] == 0 and one.args[0].attrs[0] == "soft" and is_pass(one.args[0]):
            *_, log_total, peak = make("soft", one.args[0].attrs[1], (), one.args[0].args)
            gap = apply("sub", other, peak)
            return apply("sub", log_total, gap) if sign > 0 else apply("sub", gap, log_total)
    return apply("sub", a, b)


def is_pass(e: Expr) -> bool:
    """Whether a reduction needs the pairs (else it folds a row or column vector, which torch does)."""
    return e.op == "reduce" and (kind_of(e).gathers or (any(a.rows for a in e.args) and any(a.cols for a in e.args)))


def _normalize_result(reduction: Expr, k: int) -> Expr:
    kind, over, _ = reduction.attrs
    if kind == "sum":
        return _normalize_sum(reduction.args[0], over)
    means = len(reduction.args) - 1
    if k == 0 or k > means:  # of the logit alone: the logsumexp, and its two parts that follow the means
        return make("soft", over, (), reduction.args[:1])[max(0, k - means)]
    return _normalize_softmax_mean(reduction.args[0], reduction.args[k], over)


def _varies_along(e: Expr | None, axis: str) -> bool:
    return e is not None and (e.cols if axis == "cols" else e.rows)


def _name_other_axis(axis: str) -> str:
    return "rows" if axis == "cols" else "cols"


def _normalize_sum(e: Expr, over: str) -> Expr:
    if e.dtype != "float":
        return make("sum", over, (), (e,))[0] if _varies_along(e, over) else apply("mul", e, size(over))
    if e.feature is not None and not e.is_pair:
        return make("sum", over, (), (e,))[0] if _varies_along(e, over) else apply("mul", e, size(over))
    products, rest = split_products(e)
    if products:
        summed = [_sum_vector(p, over) for p in products]
        summed += [] if rest is None else [_normalize_sum(rest, over)]
        return functools.reduce(lambda a, b: apply("add", a, b), summed)
    gap = constructors.gap_form(e)
    if gap is not None:  # Σ c (x - y) is not split: the difference is taken before it can cancel
        free, alone, mid = factors(gap[0], over)
        value = _make_sum(apply("mul", mid, alone), apply("sub", gap[1], gap[2]), over)
        return apply("mul", value, free)
    parts = terms(e) if e.feature is not None else [(e, None, None)]
    if parts is None:  # a vector per pair that is no product: numbers at given indices, or engines walk its features
        return _pick_numbers(e, over) or _sum_vector(e, over)
    sums: dict[Part, Expr] = {}
    for k, u, v in parts:
        outer, inner = _split_vector(u, v, over)
        r, c, mid = factors(k, over)
        if inner is not None:
            inner = apply("mul", inner, c)
        else:
            mid = apply("mul", mid, c)
        key = (r, outer, inner)
        sums[key] = apply("add", sums[key], mid) if key in sums else mid
    total = ZERO
    for r, outer, inner, value in (*_split_many_matches(sums, over), *_sum_groups(sums, over)):
        value = apply("mul", value, r)
        if outer is not None:
            value = apply("mul", value, outer)
        elif e.feature is not None and inner is None:
            value = constructors.spread(value, e.feature)
        total = apply("add", total, value) if total is not ZERO else value
    return total


def _sum_vector(e: Expr, over: str) -> Expr:
    """The sum of a vector per pair that engines walk; where it is non-zero only at given indices, as picks."""
    split = split_factor(e)
    dense, hots = (e, []) if split is None else split_index_matches(split[0])
    picked = hots if dense is None else [h for h in hots if h[1].feature is not None]
    if split is None or not picked:
        return make("sum", over, (), (e,))[0]
    sums = [make("pick", over, (axis,), (t, value, split[1]))[0] for axis, t, value in picked]
    if dense is not None:  # one target a row stays with the dense part: they may cancel
        for axis, t, value in (h for h in hots if h not in picked):
            dense = apply("add", dense, apply("where", apply("eq", index(axis), t), value, 0.0))
        sums.append(make("sum", over, (), (scale(split[1], dense),))[0])
    return functools.reduce(lambda a, b: apply("add", a, b), sums)


def _pick_numbers(e: Expr, over: str) -> Expr | None:
    """Σ where(index == targets, number, 0) with a vector of targets and the folded index: a ``picks``."""
    c, number = _join_conditions(e)
    hot, rest = split_index_match(c)
    if hot is None or f"{hot[0]}s" != over or hot[1].feature is None:
        return None
    if rest.feature is not None or number.feature is not None:
        return None
    return make("picks", over, (hot[0],), (hot[1], apply("where", rest, number, 0.0), ONE))[0]


def _join_conditions(e: Expr) -> tuple[Expr, Expr]:
    """A number that is 0 where a condition does not hold, as that condition and the number elsewhere."""
    c = const(True)
    while e.op == "where" and constructors.is_constant(e.args[2], 0):
        c, e = apply("logical_and", c, e.args[0]), e.args[1]
    return c, e


def _split_many_matches(sums: dict[Part, Expr], over: str) -> list[tuple[Expr, Expr | None, Expr | None, Expr]]:
    """Take out of each part, as sums of their own, the values at vectors of targets (``sums`` is changed).

    A dense part with one target stays whole (see :func:`_make_sum`); with K of them, comparing K indices in every
    pair would cost more than the pair, while gathering is K vectors a row. Both sums are accumulated alike and added
    before they are rounded."""
    found: list[tuple[Expr, Expr | None, Expr | None, Expr]] = []
    for (r, outer, inner), mid in sums.items():
        if not mid.is_pair or not _stays_whole(mid, inner):
            continue
        dense, hots = split_index_matches(mid)
        many = [h for h in hots if h[1].feature is not None]
        if not many or dense is None:
            continue
        for axis, t, value in hots:
            if t.feature is None:
                dense = apply("add", dense, apply("where", apply("eq", index(axis), t), value, 0.0))
        sums[r, outer, inner] = dense
        picked = [make("pick", over, (a,), (t, v, ONE if inner is None else inner))[0] for a, t, v in many]
        found += [(r, outer, inner, p) for p in picked]
    return found


def _sum_groups(parts: dict[Part, Expr], over: str) -> Iterator[tuple[Expr, Expr | None, Expr | None, Expr]]:
    """Yield the sum of each part with its outer factors. Several matrix products that end in one vector become one
    sum, so that an engine has one accumulator for them (the gradient of a row that two products share)."""
    groups: dict[tuple, list[Part]] = {}
    for key, mid in parts.items():
        r, outer, inner = key
        shared = outer is None and inner is not None and _stays_whole(mid, inner)
        groups.setdefault((r,) if shared else key, []).append(key)
    for keys in groups.values():
        r, outer, inner = keys[0]
        if len(keys) == 1:
            yield r, outer, inner, _make_sum(parts[keys[0]], inner, over)
            continue
        products = [apply("mul", parts[k], v) for k in keys if (v := k[2]) is not None]
        whole = functools.reduce(lambda a, b: apply("add", a, b), products)
        yield r, outer, inner, make("sum", over, (), (whole,))[0]


def _split_vector(u: Expr | None, v: Expr | None, over: str) -> tuple[Expr | None, Expr | None]:
    """The vector that is moved out of the sum, and the one that stays in it."""
    outer, inner = (u, v) if over == "cols" else (v, u)
    if inner is not None and not _varies_along(inner, over):
        outer, inner = (inner if outer is None else apply("mul", outer, inner)), None
    return outer, inner


def factors(k: Expr, over: str) -> tuple[Expr, Expr, Expr]:
    """k as (free of the folded axis) × (of the folded axis alone) × (the rest)."""
    if not _is_short(k):
        return _factor_shared(k, over)
    free, alone = ONE, ONE
    sided, pairs = _list_factors(k)
    for op, f in sided:
        if op == "neg":
            free = apply("neg", free)
        elif _varies_along(f, over):
            alone = _multiply(alone, op, f)
        else:
            free = _multiply(free, op, f)
    others = [_guard_terms(f) if f.op in ("add", "sub") else f for f in pairs]
    if free.rows or free.cols:
        guarded = _multiply_inside(others, [("mul", free)], ("listed", "eq"))
        free = free if guarded is None else ONE
        others = guarded or others
    return free, alone, functools.reduce(lambda a, b: apply("mul", a, b), others, ONE)


def _list_factors(k: Expr) -> tuple[list[tuple[str, Expr]], list[Expr]]:
    """A product's factors of one side or none, each with how it joins (``mul`` or ``div``; ``neg`` of the rest), and
    its factors per pair."""
    sided: list[tuple[str, Expr]] = []
    pairs: list[Expr] = []
    stack = [k]
    while stack:
        f = stack.pop()
        if not f.is_pair:
            sided.append(("mul", f))
        elif f.op == "mul" and f.dtype == "float":
            stack += reversed(f.args)
        elif f.op == "neg":
            sided.append(("neg", ONE))
            stack.append(f.args[0])
        elif f.op == "div" and not f.args[1].is_pair:
            sided.append(("div", f.args[1]))
            stack.append(f.args[0])
        elif (
            f.op == "where"
            and constructors.is_constant(f.args[2], 0)
            and (number := number_factor(f.args[1])) is not None
        ):
            sided.append(("mul", number[0]))
            stack.append(apply("where", f.args[0], number[1], 0.0))
        else:
            pairs.append(f)
    return sided, pairs


def _multiply(total: Expr, op: str, factor: Expr) -> Expr:
    return apply("neg", total) if op == "neg" else apply(op, *((factor, total) if op == "mul" else (total, factor)))


# A domain (``cols=``) may leave a row without columns. Numbers of such a row may be infinite (one over a sum of
# nothing) where cotangents are 0 because a condition says that no pair exists: they are multiplied under it.


def _multiply_inside(numbers: list[Expr], sided: list[tuple[str, Expr]], kinds: tuple[str, ...]) -> list[Expr] | None:
    """The factors ``numbers`` with numbers of one side multiplied to the one that is 0 where no pair exists, or divided
    by; None where there is no such factor. ``kinds``: of what says so: lists (``"listed"``), or equal numbers of
    sequences (``"eq"``)."""
    at = next((n for n, f in enumerate(numbers) if _hides_absent_pairs(f, kinds)), None)
    if at is None:
        return None
    condition, value, _ = numbers[at].args
    value = functools.reduce(lambda total, one: _multiply(total, *one), sided, value)
    return [*numbers[:at], apply("where", condition, value, 0.0), *numbers[at + 1 :]]


def _hides_absent_pairs(e: Expr, kinds: tuple[str, ...]) -> bool:
    for c in constructors.conditions_of(e):
        sides = [(a.rows, a.cols) for a in c.args if a.op in ("input", "leaf") and a.dtype == "int"]
        if c.op in kinds and (c.op == "listed" or sides == [(True, False), (False, True)]):
            return True
    return False


def _guard_terms(e: Expr) -> Expr:
    """The same sum of numbers per pair. Pairs of other sequences are computed, and must not divide 0 by 0."""
    done: dict[Expr, Expr] = {}
    for n in topological([e], stop=lambda n: n.op not in ("add", "sub")):
        args = tuple(done.get(a, a) for a in n.args)
        done[n] = constructors.rebuild(n, args) if n.op in ("add", "sub") else _guard_product(n)
    return done[e]


def _guard_product(e: Expr) -> Expr:
    if not _is_short(e):
        return e
    sided, pairs = _list_factors(e)
    found = _multiply_inside(pairs, sided, ("eq",)) if any(x.rows or x.cols for _, x in sided) else None
    return e if found is None else functools.reduce(lambda a, b: apply("mul", a, b), found)


def _is_product(e: Expr) -> bool:
    return e.is_pair and ((e.op == "mul" and e.dtype == "float") or e.op == "neg" or e.op == "div")


def _is_short(k: Expr) -> bool:
    """Whether a product has few factors when it is written out; one whose parts are shared may have exponentially
    many."""
    count: dict[Expr, int] = {}
    for e in topological([k], stop=lambda e: not _is_product(e)):
        count[e] = 1 if not _is_product(e) else sum(count[a] for a in e.args)
    return count[k] <= _MANY


def _factor_shared(k: Expr, over: str) -> tuple[Expr, Expr, Expr]:
    """As :func:`factors`, node by node, so that what is shared stays shared."""
    found: dict[Expr, tuple[Expr, Expr, Expr]] = {}
    for e in topological([k], stop=lambda e: not _is_product(e)):
        if not _varies_along(e, over):
            found[e] = e, ONE, ONE
        elif not _varies_along(e, _name_other_axis(over)):
            found[e] = ONE, e, ONE
        elif not _is_product(e) or (e.op == "div" and e.args[1].is_pair):
            found[e] = ONE, ONE, e
        elif e.op == "neg":
            free, alone, rest = found[e.args[0]]
            found[e] = apply("neg", free), alone, rest
        elif e.op == "div":
            (free, alone, rest), (below, beside, _) = (found[a] for a in e.args)
            found[e] = apply("div", free, below), apply("div", alone, beside), rest
        else:
            first, second = (found[a] for a in e.args)
            free, alone, rest = (apply("mul", a, b) for a, b in zip(first, second, strict=True))
            found[e] = free, alone, rest
    return found[k]


def number_factor(e: Expr) -> tuple[Expr, Expr] | None:
    """e as (a number of no axis) × (the rest).

    No other factor may leave a ``where``: one that is not finite would spoil pairs that the condition leaves out.
    """
    direct = _split_number(e)
    if direct is not None:
        return direct
    has: set[Expr] = set()  # the products in which there is such a number
    for n in topological([e], stop=lambda n: n.op != "mul" or n.dtype != "float"):
        if _split_number(n) is not None or (n.op == "mul" and not has.isdisjoint(n.args)):
            has.add(n)
    if e not in has:
        return None
    passed: list[Expr] = []  # the other factors on the way down to the number
    while direct is None:
        one, other = e.args if e.args[0] in has else e.args[::-1]
        passed.append(other)
        e, direct = one, _split_number(one)
    number, rest = direct
    for other in reversed(passed):
        rest = apply("mul", rest, other)
    return number, rest


def _split_number(e: Expr) -> tuple[Expr, Expr] | None:
    """A product of a number of no axis and something else: the two of them."""
    if e.op != "mul" or e.dtype != "float":
        return None
    for one, other in (e.args, e.args[::-1]):
        if not one.rows and not one.cols and one.feature is None:
            return one, other
    return None


def _make_sum(mid: Expr, vector: Expr | None, over: str) -> Expr:
    """Σ mid × vector; where mid is non-zero only at an index, as picks.

    A mid with a dense part too (softmax minus one-hot) stays whole: the two may cancel, so they are added pair by pair.
    """
    whole = apply("mul", mid, vector) if vector is not None else mid
    if not _varies_along(whole, over):
        return apply("mul", whole, apply("cast", size(over), to="float"))
    if not whole.is_pair or _stays_whole(mid, vector):
        return make("sum", over, (), (whole,))[0]
    total = ZERO
    for axis, target, value in _merge_matches(split_index_matches(mid)[1], 1):
        picked = make("pick", over, (axis,), (target, value, vector if vector is not None else ONE))[0]
        total = picked if total is ZERO else apply("add", total, picked)
    return total


def _stays_whole(mid: Expr, vector: Expr | None) -> bool:
    """True where mid × vector is per pair and not just non-zero at one index."""
    whole = mid if vector is None else apply("mul", mid, vector)
    return whole.is_pair and split_index_matches(mid)[0] is not None


def split_index_matches(e: Expr) -> tuple[Expr | None, list[Hot]]:
    """Split a number per pair into a dense part and values that are non-zero only where an index equals t."""
    found: dict[Expr, tuple[Expr | None, list[Hot]]] = {}
    for n in topological([e], stop=lambda n: not n.is_pair or n.op not in _HOT_INSIDE):
        found[n] = _split_node(n, found)
    return found[e]


def _split_node(e: Expr, found: dict[Expr, tuple[Expr | None, list[Hot]]]) -> tuple[Expr | None, list[Hot]]:
    """:func:`split_index_matches` of a node, given that of its arguments."""
    if not e.is_pair:
        return e, []
    if e.op in ("add", "sub"):
        (left, left_hots), (right, right_hots) = (found[a] for a in e.args)
        if not left_hots and not right_hots:
            return e, []
        if e.op == "sub":
            right = None if right is None else apply("neg", right)
            right_hots = [(axis, t, apply("neg", value)) for axis, t, value in right_hots]
        dense = right if left is None else left if right is None else apply("add", left, right)
        return dense, _merge_matches(left_hots + right_hots)
    if e.op == "neg":
        dense, hots = found[e.args[0]]
        return (e, []) if not hots else (dense and apply("neg", dense), [(a, t, apply("neg", v)) for a, t, v in hots])
    if e.op == "mul":
        for one, other in (e.args, e.args[::-1]):
            dense, hots = found[one]
            if hots:
                return dense and apply("mul", dense, other), [(a, t, apply("mul", v, other)) for a, t, v in hots]
        return e, []
    if e.op == "div":
        dense, hots = found[e.args[0]]
        if not hots:
            return e, []
        by = e.args[1]
        return dense and apply("div", dense, by), [(a, t, apply("div", v, by)) for a, t, v in hots]
    if e.op == "where":
        hot, rest = split_index_match(e.args[0])
        if hot is not None and constructors.is_constant(e.args[2], 0):
            return None, [(*hot, apply("where", rest, e.args[1], 0.0))]
        return _split_condition(e, *(found.get(a, (a, [])) for a in e.args[1:]))
    if e.op == "cast" and e.args[0].dtype == "bool":
        hot, rest = split_index_match(e.args[0])
        if hot is not None:
            return None, [(*hot, apply("where", rest, 1.0, 0.0))]
    if e.op == "fsum":
        c, value = _join_conditions(e.args[0])
        hot, rest = split_index_match(c)
        if (
            hot is not None
            and hot[1].feature is not None
            and rest.feature is None
            and not _varies_along(value, f"{hot[0]}s")
        ):
            return None, [(*hot, apply("where", rest, value, 0.0))]
    return e, []


def _split_condition(
    e: Expr, one: tuple[Expr | None, list[Hot]], other: tuple[Expr | None, list[Hot]]
) -> tuple[Expr | None, list[Hot]]:
    """:func:`split_index_matches` of a ``where``, given that of its two values."""
    if not one[1] and not other[1]:
        return e, []
    c = e.args[0]
    first, second = (0.0 if d is None else d for d, _ in (one, other))
    none = all(isinstance(d, float) or constructors.is_constant(d, 0) for d in (first, second))
    hots = [(a, t, apply("where", c, v, 0.0)) for a, t, v in one[1]]
    hots += [(a, t, apply("where", c, 0.0, v)) for a, t, v in other[1]]
    return None if none else apply("where", c, first, second), _merge_matches(hots)


def _merge_matches(hots: list[Hot], few: int = _MANY_HOTS) -> list[Hot]:
    """Add up the values at equal places where there are more than a few: shared values would be written out
    repeatedly, and each place is gathered."""
    if len(hots) <= few:
        return hots
    sums: dict[tuple[str, Expr], Expr] = {}
    for axis, t, value in hots:
        sums[axis, t] = apply("add", sums[axis, t], value) if (axis, t) in sums else value
    return [(axis, t, value) for (axis, t), value in sums.items()]


def split_index_match(c: Expr) -> tuple[tuple[str, Expr] | None, Expr]:
    """``index == t`` within a conjunction: (axis, t) and the other conditions."""
    seen: set[Expr] = set()
    stack: list[tuple[Expr, Any]] = [(c, None)]  # a condition, and those beside it and above it, the nearest first
    while stack:
        e, beside = stack.pop()
        if e.op == "logical_and" and e not in seen:
            seen.add(e)
            first, second = e.args
            stack += [(second, (first, beside)), (first, (second, beside))]
        elif e.op == "eq" and (hot := _match_index(e)) is not None:
            rest = const(True)
            while beside is not None:
                other, beside = beside
                rest = apply("logical_and", rest, other)
            return hot, rest
    return None, c


def _match_index(e: Expr) -> tuple[str, Expr] | None:
    """``index == t``: the axis and t."""
    for axis, moves, stays in (("col", "cols", "rows"), ("row", "rows", "cols")):
        for one, other in (e.args, e.args[::-1]):
            at = one.op == f"{axis}_index" and other.dtype == "int"
            if at and not _varies_along(other, moves) and _varies_along(other, stays):
                return axis, other
    return None


def _normalize_softmax_mean(logit: Expr, value: Expr, over: str) -> Expr:
    """A softmax mean, its value split like a sum: what is free of the folded axis leaves the mean."""
    parts = terms(value) if value.feature is not None else [(value, None, None)]
    if parts is None:
        return make("soft", over, (), (logit, value))[1]
    total = ZERO
    for k, u, v in parts:
        outer, inner = _split_vector(u, v, over)
        r, c, mid = factors(k, over)
        weighted = apply("mul", mid, c) if inner is None else apply("mul", mid, apply("mul", inner, c))
        mean = make("soft", over, (), (logit, weighted))[1]
        part = apply("mul", mean, r)
        if outer is not None:
            part = apply("mul", part, outer)
        elif value.feature is not None and inner is None:
            part = constructors.spread(part, value.feature)
        total = apply("add", total, part) if total is not ZERO else part
    return total


# Passes over the pairs: which reductions run together, and what is hoisted out of them.
#
# A reduction whose fields live on pairs belongs to a pass; its level is one more than the deepest pass that its fields
# use, so there are as few passes as the dependencies allow. Every maximal one-sided subexpression (``F.normalize(x)``,
# ``⟨g, P⟩``) is *fed* to the pass, computed once by plain torch. Three are left to the engine, and what they are made
# of is fed: a vector that is fed anyway (and is no table), or is stored in a small type, times a number, so that no
# second vector is read; ``decay``, which a kernel joins with an exponential; and arithmetic on indices, of which
# engines know the range on every tile.


def merge_softmax(outputs: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Compiler pass: join all ``soft`` reductions of one logit, so that its exponentials are computed once."""
    levels = _pass_levels(outputs)
    for level in range(1, max(levels.values(), default=0) + 1):
        outputs = constructors.substitute(outputs, _merge_soft(outputs, levels, level))
        levels = _pass_levels(outputs)
    return outputs


def group_reductions(outputs: tuple[Expr, ...]) -> tuple[tuple[Expr, ...], ...]:
    """Compiler pass: the reductions over pairs that run together, one group for each level, lowest first.

    Gathers of several pairs a row (top-k gradients, numbers at given indices) are a group of their own: they compute no
    tiles, and beside them engines would not know the folds that they have special code for."""
    levels = _pass_levels(outputs)
    groups: list[tuple[list[Expr], list[Expr]]] = [([], []) for _ in range(max(levels.values(), default=0))]
    for e in topological(outputs):
        if is_pass(e):
            groups[levels[e] - 1][kind_of(e).gathers and e.args[0].feature is not None].append(e)
    return tuple(tuple(group) for level in groups for group in level if group)


def hoist_one_sided(outputs: tuple[Expr, ...], groups: tuple[tuple[Expr, ...], ...]) -> Lowered:
    """Compiler pass: make a fold of each group; what is not per pair leaves it and is fed to it."""
    levels, order = _pass_levels(outputs), topological(outputs)
    passes = [_make_pass(list(group), order, _find_scales(list(group), outputs, levels)) for group in groups]
    return Lowered(tuple(passes), outputs)


def _pass_levels(outputs: tuple[Expr, ...]) -> dict[Expr, int]:
    levels: dict[Expr, int] = {}
    for e in topological(outputs):
        levels[e] = max((levels[a] for a in e.args), default=0) + is_pass(e)
    return levels


def _merge_soft(outputs: tuple[Expr, ...], levels: dict[Expr, int], level: int) -> dict[Expr, Expr]:
    """One ``soft`` for all softmax means and logsumexps of one logit: the exponentials are computed once."""
    groups: dict[tuple[Expr, str], list[Expr]] = {}
    order = topological(outputs)
    for e in order:
        if is_pass(e) and e.attrs[0] == "soft" and levels[e] == level:
            groups.setdefault((e.args[0], e.attrs[1]), []).append(e)
    replace: dict[Expr, Expr] = {}
    for (logit, over), members in groups.items():
        if len(members) == 1:
            continue
        values = tuple(dict.fromkeys(v for m in members for v in m.args[1:]))
        whole = reduce_node("soft", over, (), (logit, *values))
        for e in order:
            if e.op == "result" and e.args[0] in members:
                k, own = e.attrs[0], len(e.args[0].args) - 1
                place = 0 if k == 0 else 1 + values.index(e.args[0].args[k]) if k <= own else len(values) + k - own
                replace[e] = result(whole, place, e.feature, e.dtype)
    return replace


def _is_fed(e: Expr) -> bool:
    """True for what is computed before a pass: one-sided values, and arguments given per pair."""
    return not e.is_pair or e.op in ("input", "leaf")


def scaled_result(reduction: Expr) -> int:
    """Which result of a reduction its scale multiplies: the sum, or a softmax's mean."""
    return 1 if reduction.attrs[0] == "soft" else 0


def _find_scales(
    reductions: list[Expr], outputs: tuple[Expr, ...], levels: dict[Expr, int]
) -> dict[Expr, tuple[Expr, Expr]]:
    """Sums of vectors whose only use is to be multiplied by a number known before the pass: (that product, the number).
    Softmax means of stored vectors too, whose one scale is such a number.

    A kernel multiplies before it writes; a vector written, read, multiplied and written again costs twice the memory
    traffic of the fold's own results.
    """
    users: dict[Expr, list[Expr]] = {}
    for e in topological(outputs):
        for a in e.args:
            users.setdefault(a, []).append(e)
    found: dict[Expr, tuple[Expr, Expr]] = {}
    for r in reductions:
        results = [e for e in users.get(r, []) if e.attrs[0] == scaled_result(r)]
        mean = r.attrs[0] == "soft" and len(r.args) == 2 and r.args[1].is_stored
        if r.attrs[0] != "sum" and not mean:
            continue
        if len(results) != 1 or results[0].feature is None or results[0].dtype != "float":
            continue
        at, scale = results[0], constructors.ONE
        while at not in outputs and len(above := users.get(at, [])) == 1 and above[0].op == "mul":
            other = above[0].args[above[0].args[0] is at]
            if other.feature is not None or levels[other] >= levels[r] or (other.cols if r.rows else other.rows):
                break
            if mean and (other.rows or other.cols):
                break
            at, scale = above[0], constructors.apply("mul", scale, other)
        if scale is not constructors.ONE:
            found[r] = at, scale
    return found


def _make_pass(reductions: list[Expr], order: list[Expr], scales: dict[Expr, tuple[Expr, Expr]]) -> Pass:
    # A gather reads whatever place its target names, so a target that is arithmetic on an index is computed before the
    # pass and fed as a label: engines only know targets that are a plain index or a leaf.
    targets = [r.args[0] for r in reductions if kind_of(r).gathers]
    arithmetic = _index_arithmetic(targets)
    computed = {r: r.args[0] for r in reductions if kind_of(r).gathers and r.args[0] in arithmetic}
    fields = [a for r in reductions for a in (r.args[1:] if r in computed else r.args)]
    factors = [scales[r][1] if r in scales else constructors.ONE for r in reductions]
    tables = {e.args[0] for e in topological(fields, stop=_is_fed) if e.op == "lookup"}
    tables |= {r.args[2] for r in reductions if r.attrs[0] == "histogram"}
    listed = constructors.find_listed(fields)
    feeds, derived = _find_feeds(fields, tables, listed is not None and listed.attrs[0][0] == "pages")
    feeds = list(dict.fromkeys([*feeds, *computed.values(), *(f for f in factors if f.op not in _BUILTIN)]))
    leaves: dict[Expr, Expr] = {}
    for k, e in enumerate(feeds):  # the scales of packed vectors come before these
        args, form = (tuple(leaves[a] for a in e.args), e.attrs[1:]) if e.is_stored else ((), ())
        leaves[e] = node("leaf", args, (f"x{k}", *form), rows=e.rows, cols=e.cols, feature=e.feature, dtype=e.dtype)
    scaled = tuple(leaves.get(f, f) for f in factors)
    made = dict(leaves)
    for e in derived:
        made[e] = constructors.rebuild(e, tuple(made.get(a, a) for a in e.args))
    new = constructors.substitute(tuple(fields), made)
    renamed, at = [], 0
    for r in reductions:
        count = len(r.args) - (r in computed)
        target = (leaves[computed[r]],) if r in computed else ()
        renamed.append(constructors.rebuild(r, (*target, *new[at : at + count])))
        at += count
    users: dict[tuple[Expr, int], list[Expr]] = {}
    for e in order:
        if e.op == "result":
            users.setdefault((e.args[0], e.attrs[0]), []).append(e)
    for r, (product, _) in scales.items():
        users[r, scaled_result(r)] = [product]
    fold = Fold(tuple(leaves[e] for e in feeds), tuple(renamed), scaled if scales else ())
    results = tuple(tuple(users.get((r, k), ())) for r in reductions for k in range(len(outputs_of(r))))
    return Pass(fold, tuple(feeds), results)


def _find_feeds(fields: list[Expr], tables: set[Expr], paged: bool) -> tuple[list[Expr], list[Expr]]:
    """The maximal one-sided expressions under ``fields``; and those that engines make from others, which are fed.
    ``tables``: what is looked up, which is fed as it is. ``paged``: columns lie in pages. Their numbers times a factor
    (scales of stored keys) are made where they are read, since a store holds more columns than a call reads."""
    found = [e for e in topological(fields, stop=_is_fed) if _is_fed(e)]
    whole = set(found)
    feeds: dict[Expr, None] = {}
    derived: set[Expr] = set()
    stack = found[::-1]
    indices = _index_arithmetic(found)
    while stack:
        e = stack.pop()
        scaled = e.op == "mul" and e.dtype == "float" and e not in tables
        again = scaled and any(a.feature is not None and a in whole for a in e.args)
        stored = constructors.split_scale(e)[1].is_stored and not e.is_stored
        again |= paged and scaled and e.cols and e.feature is None and any(not (a.rows or a.cols) for a in e.args)
        if e.op == "decay" or (again and any(a.feature is None for a in e.args)) or stored or e in indices:
            derived.add(e)
            stack += e.args[::-1]
        elif e.op not in _BUILTIN:
            feeds |= dict.fromkeys([*(e.args if e.is_stored else ()), e])
    return list(feeds), [e for e in topological(found) if e in derived]


def _index_arithmetic(roots: list[Expr]) -> set[Expr]:
    """The nodes under ``roots`` that are arithmetic on one index and numbers: ``row_index - window``."""
    known: set[Expr] = set()
    for e in topological(roots, stop=lambda n: not n.rows and not n.cols):
        own = e.op in _BUILTIN or (e.op in PRIMITIVES and e.op not in DRAWS)
        if not (e.rows or e.cols) or (own and known.issuperset(e.args)):
            known.add(e)
    return {e for e in known if e.args and e.feature is None and (e.rows or e.cols)}


# Names of folds, equal for equal folds, in every process and on every machine

_PROCESS = uuid.uuid4().hex  # part of the names of folds over a user's own classes, whose text is not their meaning
_LOCAL = "own-"


@functools.lru_cache(maxsize=4096)
def digest_fold(fold: Fold) -> str:
    """A name for a fold, equal for equal folds: the hash of its nodes, written out one by one."""
    return digest_nodes((fold.leaves, fold.reductions, fold.scales))


@functools.lru_cache(maxsize=4096)
def digest_program(program: Lowered) -> str:
    """A name for a lowered program, equal for equal ones: the hash of its passes and of the nodes around them."""
    passes = [(*p.feeds, *(e for users in p.results for e in users)) for p in program.passes]
    folds = [f"{digest_fold(p.fold)} {p.fold.raised} {p.fold.exact}" for p in program.passes]
    return digest_nodes((*passes, program.outputs), *folds)


def digest_nodes(parts: Sequence[tuple[Expr, ...]], *others: str) -> str:
    """The hash of groups of nodes, written out one by one, and of other text."""
    order = topological([e for part in parts for e in part])
    number = {e: k for k, e in enumerate(order)}
    lines = [_format_node(e, number) for e in order]
    lines += [str([number[e] for e in part]) for part in parts]
    text = "\n".join([*lines, *others])
    found = hashlib.sha256(text.encode()).hexdigest()[:24]
    return _LOCAL + found if _PROCESS in text or any(one.startswith(_LOCAL) for one in others) else found


def is_digest_portable(name: str) -> bool:
    """True where a digest means the same fold in every process: no class of the user's is part of it."""
    return not name.startswith(_LOCAL)


def _format_node(e: Expr, number: dict[Expr, int]) -> str:
    return f"{e.op} {[number[a] for a in e.args]} {_format_attribute(e.attrs)} {e.rows} {e.cols} {e.feature} {e.dtype}"


def _format_attribute(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_format_attribute, value))})"
    plain = value is None or isinstance(value, (bool, int, float, str))
    return repr(value) if plain else f"{value!r} {id(value)} {_PROCESS}"


# The conditions of a fold that are decided tile by tile, from the ranges of its indices and numbers there.


def conditions(fold: Fold) -> tuple[Expr, ...]:
    """The conditions worth deciding per tile: those of ``where`` and those that are summed."""
    deciding = [r for r in fold.reductions if not kind_of(r).gathers and not kind_of(r).writes_all(r.attrs[2])]
    fields = [a for r in deciding for a in r.args]
    under = topological(fields)
    found = [e.args[0] for e in under if e.op == "where"] + [f for f in fields if f.dtype == "bool"]
    number = [c for c in found if c.feature is None and (c.rows or c.cols)]
    open_ones = _find_undecidable(number)
    return tuple(c for c in dict.fromkeys(number) if c not in open_ones)


def is_idle(r: Expr, replace: dict[Expr, Expr]) -> bool:
    """Whether a reduction sees only its identity where conditions are replaced so."""
    return kind_of(r).idle(r.attrs[2], [interval(f, {}) for f in substitute(r.args, replace)])


@functools.lru_cache(maxsize=4096)
def find_same_sequence(reductions: tuple[Expr, ...]) -> Expr | None:
    """A condition ``number of the row == number of the column`` outside of which every reduction sees its identity."""
    for e in topological([a for r in reductions for a in r.args]):
        if e.op != "eq" or any(a.op != "leaf" or a.dtype != "int" or a.feature is not None for a in e.args):
            continue
        row, col = e.args
        if (row.rows, row.cols, col.rows, col.cols) != (True, False, False, True):
            continue
        if all(is_idle(r, {e: const(False)}) for r in reductions):
            return e
    return None


def _find_undecidable(roots: list[Expr]) -> set[Expr]:
    """The nodes under ``roots`` of which a tile's index and number ranges can say nothing."""
    found: set[Expr] = set()
    for e in topological(roots):
        if e.op in (*OF_VECTORS, "lookup", *DRAWS) or not found.isdisjoint(e.args):
            found.add(e)
    return found


def ranged(fold: Fold) -> tuple[Expr, ...]:
    """The leaves whose least and greatest value per tile the conditions need."""
    return tuple(e for e in topological(conditions(fold)) if e.op == "leaf")
