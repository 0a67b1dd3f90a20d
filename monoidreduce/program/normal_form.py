"""Normal form: sums and softmax means rewritten into the equal form that is cheapest for every engine.

A sum of vectors becomes ``outer × Σ number × vector`` (a product of matrices), factors that do not depend on the
folded axis leave the sum, those that depend on it alone join the vector, and a sum against ``index == t`` becomes a
``pick``, which is a gather and needs no pass over the pairs at all. The same for the values of a softmax mean.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from ..reductions import kind_of, make
from . import constructors
from .constructors import ONE, ZERO, apply, terms
from .expression import Expr, const, index, size, topological
from .several import scale, split_factor, split_products

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
    if e.op != "where" or not constructors.is_constant(e.args[2], 0) or e.args[1].feature is not None:
        return None
    hot, rest = split_index_match(e.args[0])
    if hot is None or f"{hot[0]}s" != over or hot[1].feature is None or rest.feature is not None:
        return None
    return make("picks", over, (hot[0],), (hot[1], apply("where", rest, e.args[1], 0.0), ONE))[0]


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
    if e.op == "fsum" and e.args[0].op == "where" and constructors.is_constant(e.args[0].args[2], 0):
        c, value, _ = e.args[0].args
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
