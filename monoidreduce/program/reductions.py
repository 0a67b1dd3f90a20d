"""Reductions: what a body calls to fold pairs, and the table of the few kinds they all become.

Every reduction of the language is one of seven kinds plus arithmetic on its results: ``sum``; ``soft`` (logsumexp and
softmax means of any number of values, one logit); ``best`` (largest or smallest, and where); ``topk``; ``moments``;
``user`` (any monoid); and ``pick`` (a sum against ``index == t``, which is a gather; made by ``normal.py`` only). An
eighth, ``pair``, folds nothing: it writes a number per pair out, in the shape of an argument that was given per pair,
summed over what was broadcast in that (made by ``gradient.py`` only; its ``over`` is neither axis). A kind knows its
results, its pullback (Theorem 2.1: cotangents of one pair's fields from the final results) and when a pair is idle,
that is, equal to the identity. An engine knows how to fold each kind; nobody else needs to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..algebra import Monoid, Scalar
from ..errors import ArgumentError, NoGradientError, TraceError, UnreducedError
from . import build
from . import intervals as iv
from .expr import Expr, Feature, const, index, node, reduce_node, result, size
from .pull import pull
from .symbol import Symbol, current_trace, expr_of

Outputs = list[tuple[Feature, str]]


@dataclass(frozen=True)
class Kind:
    """One row: ``outputs(fields, params)``, ``pullback(over, params, fields, results, cotangents)``,
    ``idle(params, ...)``."""

    outputs: Callable[[tuple[Expr, ...], tuple], Outputs]
    pullback: Callable[..., list[Any]]
    idle: Callable[[tuple, list[iv.Interval]], bool]
    fixed: tuple[int, ...] = ()  # results that are constants to a gradient

    def moves(self, k: int, count: int) -> bool:
        """Whether result ``k`` of ``count`` has a cotangent."""
        return k not in self.fixed and k - count not in self.fixed


def _sum_outputs(fields: tuple[Expr, ...], params: tuple) -> Outputs:
    return [(fields[0].feature, "int" if fields[0].dtype == "bool" else fields[0].dtype)]


def _soft_outputs(fields: tuple[Expr, ...], params: tuple) -> Outputs:
    """z = logsumexp, a mean per value; then, for gradients, log Σ exp(s - peak) and the (finite) peak itself."""
    return [(None, "float"), *((v.feature, "float") for v in fields[1:]), (None, "float"), (None, "float")]


def _soft_pullback(over: str, params: tuple, fields: list, results: list, g: list) -> list:
    """LogWSum: one pair (s, v) has weight w = exp(s - z), and D(c, a) g = (w (g_z + ⟨g_v, v - mean⟩), w g_v).

    The weight is exp(s - peak) / Σ exp(s - peak): z itself, rounded, would cost digits where logits are large.
    """
    logit, *values = fields
    _, *means, log_total, peak = results
    raised: Any = torch.exp(logit - peak)  # of a symbol, so a symbol
    weight = raised * Symbol(build.apply("decay", log_total.expr))
    inner: Any = 0.0
    for g_log in (g[0], g[-2]):  # z and log_total differ by the peak, a constant: they move alike
        inner = inner if g_log is None else g_log + inner
    for value, mean, gm in zip(values, means, g[1:-2], strict=True):
        if gm is not None:
            inner = _contract(gm, value - mean) + inner
    return [weight * inner, *(None if gm is None else weight * gm for gm in g[1:-2])]


def _contract(g: Any, x: Any) -> Any:
    return g * x if x.expr.feature is None else g @ x


def _best_pullback(over: str, params: tuple, fields: list, results: list, g: list) -> list:
    at = Symbol(index(over.rstrip("s")))
    return [torch.where(at == results[1], g[0], 0.0)]


def _topk_pullback(over: str, params: tuple, fields: list, results: list, g: list) -> list:
    at = Symbol(index(over.rstrip("s")))
    return [torch.where(at == results[1], g[0], 0.0).sum()]


def _moments_pullback(over: str, params: tuple, fields: list, results: list, g: list) -> list:
    total = 0.0
    if g[0] is not None:
        total = g[0] / _size(over)
    if g[1] is not None:
        total = total + 2 * g[1] * (fields[0] - results[0])
    return [total]


def _pick_pullback(over: str, params: tuple, fields: list, results: list, g: list) -> list:
    """Σ [index == t] value × vector: wherever the index matches, the sum's own pullback."""
    target, value, vector = fields
    hit = Symbol(index(params[0])) == target
    if vector.expr.feature is None:
        return [None, torch.where(hit, g[0] * vector, 0.0), torch.where(hit, g[0] * value, 0.0)]
    inner = g[0] @ vector
    if value.expr.feature is None:
        weight = torch.where(hit, value, 0.0)
    else:  # one match per feature of the target (a top-k): each value meets the same vector
        weight = torch.where(hit, value, 0.0).sum()
    return [None, torch.where(hit, inner, 0.0), weight * g[0]]


def no_gradient(monoid: type) -> NoGradientError:
    """What to say of a monoid whose gradient was asked for and that has none."""
    return NoGradientError(
        detail=f"a gradient was asked of {monoid.__name__}, which has no local gradient",
        fix="Add pullback(c, a, g) (Theorem 2.1), or remove(c, a), to the monoid",
    )


def _user_pullback(over: str, params: tuple, fields: list, results: list, g: list) -> list:
    (monoid,) = params
    names = list(monoid.fields())
    if not monoid.has_gradient:
        raise no_gradient(monoid)
    whole, part = (monoid(**dict(zip(names, values, strict=True))) for values in (results, fields))
    cotangents = monoid(**{n: 0.0 if v is None else v for n, v in zip(names, g, strict=True)})
    if monoid.gradient_road == "pullback":
        pulled = monoid.pullback(whole, part, cotangents)
        return [getattr(pulled, n) for n in names]
    return _pullback_from_remove(monoid, names, whole, part, cotangents)


def _pullback_from_remove(monoid: Any, names: list[str], whole: Any, part: Any, g: Any) -> list:
    """D(c, a) g as the derivative of ``combine(a, rest)`` by a, then with ``rest = remove(c, a)`` put in its place."""
    rest = {n: expr_of(getattr(monoid.remove(whole, part), n)) for n in names}
    held = {
        n: node("leaf", (), (f"rest/{n}",), rows=e.rows, cols=e.cols, feature=e.feature, dtype=e.dtype)
        for n, e in rest.items()
    }
    combined = monoid.combine(part, monoid(**{n: Symbol(e) for n, e in held.items()}))
    seeds = [(expr_of(getattr(combined, n)), expr_of(getattr(g, n))) for n in names]
    pulled = pull(seeds, [expr_of(getattr(part, n)) for n in names])
    back = {held[n]: e for n, e in rest.items()}
    return [None if e is None else Symbol(build.substitute((e,), back)[0]) for e in pulled]


def _user_outputs(fields: tuple[Expr, ...], params: tuple) -> Outputs:
    return [(f.feature, f.dtype) for f in fields]


def _never(params: tuple, fields: list[iv.Interval]) -> bool:
    return False


KINDS: dict[str, Kind] = {
    "sum": Kind(_sum_outputs, lambda over, params, f, r, g: [g[0]], lambda params, f: f[0] == iv.FALSE),
    "soft": Kind(
        _soft_outputs,
        _soft_pullback,
        lambda params, f: f[0] == iv.MINUS_INF,
        fixed=(-1,),  # the peak
    ),
    "best": Kind(
        lambda f, params: [(None, f[0].dtype), (None, "int")],
        _best_pullback,
        lambda params, f: f[0] == (iv.MINUS_INF if params[0] else (iv.INF, iv.INF)),
    ),
    "topk": Kind(
        lambda f, params: [(f"#{params[0]}", f[0].dtype), (f"#{params[0]}", "int")],  # a letter nobody can declare
        _topk_pullback,
        lambda params, f: f[0] == (iv.MINUS_INF if params[1] else (iv.INF, iv.INF)),
    ),
    "moments": Kind(lambda f, params: [(None, "float")] * 2, _moments_pullback, _never),
    "user": Kind(_user_outputs, _user_pullback, _never),
    "pick": Kind(
        lambda f, params: [(f[2].feature, "float")],
        _pick_pullback,
        _never,
    ),
    "pair": Kind(
        lambda f, params: [(None, "float")],  # fields: the number, and the argument whose shape it takes
        lambda over, params, f, r, g: [g[0], None],
        lambda params, f: f[0] == iv.FALSE,
    ),
}


# What a body calls ------------------------------------------------------------------------------------------


def make(kind: str, over: str, params: tuple, fields: tuple[Expr, ...]) -> list[Expr]:
    """The results of a reduction, as expressions."""
    reduction = reduce_node(kind, over, params, fields)
    outputs = KINDS[kind].outputs(fields, params)
    return [result(reduction, k, feature, dtype) for k, (feature, dtype) in enumerate(outputs)]


def _reduce(kind: str, over: str, params: tuple, *values: Any, vectors: bool = False, name: str = "") -> list[Any]:
    if over not in ("cols", "rows"):
        raise ArgumentError(
            detail=f"{name} was given over={over!r}", fix='Use over="cols" (the default) or over="rows"'
        )
    if current_trace.get() is None:
        raise TraceError(
            detail=f"mr.{name} was called outside the body of an op",
            fix="Decorate the function that calls it with @mr.op",
        )
    fields = tuple(expr_of(v) for v in values)
    number_fields = fields[:1] if vectors and kind != "sum" else () if vectors else fields
    for f in number_fields:
        if f.feature is not None:
            raise UnreducedError(
                detail=f'mr.{name} folds one number per pair, but was given a vector over "{f.feature}"; '
                "a whole vector per pair would be M × N × features",
                fix="Reduce it over its features first (x @ y, .sum()), or fold it with mr.sum or mr.softmax_mean",
            )
    return [Symbol(e) for e in make(kind, over, params, fields)]


def _size(axis: str) -> Any:
    return Symbol(size(axis))


def _number(x: Any) -> Expr:
    return build.apply("cast", expr_of(x), to="float")


def sum(x: Any, *, over: str = "cols") -> Any:
    """Σ_j x: the sum over columns (or rows) of a number or a vector per pair."""
    return _reduce("sum", over, (), x, vectors=True, name="sum")[0]


def mean(x: Any, *, over: str = "cols") -> Any:
    """Σ_j x / N; with no columns it is NaN, as torch's mean of nothing."""
    count = _size(over)
    return torch.where(count == 0, math.nan, sum(x, over=over) / torch.clamp(count, min=1))


def logsumexp(x: Any, *, over: str = "cols") -> Any:
    """log Σ_j exp(x); minus infinity where there is nothing to see."""
    return _reduce("soft", over, (), Symbol(_number(x)), name="logsumexp")[0]


def softmax_mean(logit: Any, value: Any, *, over: str = "cols") -> Any:
    """Σ_j softmax_j(logit) value, of a vector or of a number; 0 where every logit is minus infinity."""
    values = Symbol(_number(logit)), Symbol(_number(value))
    return _reduce("soft", over, (), *values, vectors=True, name="softmax_mean")[1]


def weighted_mean(weight: Any, value: Any, *, over: str = "cols") -> Any:
    """Σ_j weight · value / Σ_j weight; 0 where the weights sum to 0."""
    total = sum(weight, over=over)
    seen = total != 0
    return torch.where(seen, sum(weight * value, over=over) / torch.where(seen, total, 1.0), 0.0)


def max(x: Any, *, over: str = "cols") -> Any:
    """The largest x; a tie's gradient goes to its first column. Minus infinity where there is nothing."""
    return _reduce("best", over, (True,), x, name="max")[0]


def min(x: Any, *, over: str = "cols") -> Any:
    """The smallest x; a tie's gradient goes to its first column. Infinity where there is nothing."""
    return _reduce("best", over, (False,), x, name="min")[0]


def argmax(x: Any, *, over: str = "cols") -> Any:
    """The first column of the largest x; -1 where every x is minus infinity or there is none."""
    return _reduce("best", over, (True,), x, name="argmax")[1]


def argmin(x: Any, *, over: str = "cols") -> Any:
    """The first column of the smallest x; -1 where every x is infinity or there is none."""
    return _reduce("best", over, (False,), x, name="argmin")[1]


class TopK(NamedTuple):
    """What :func:`topk` returns: k values, best first, and their columns."""

    values: Any
    indices: Any


def topk(x: Any, k: int, *, largest: bool = True, over: str = "cols") -> TopK:
    """The k largest x (or smallest), best first, with their columns; -1 marks places that only saw infinity."""
    if isinstance(k, float) or int(k) < 1:
        raise ArgumentError(detail=f"topk was given k = {k}", fix="Ask for a whole number, at least one")
    k, largest = int(k), bool(largest)
    return TopK(*_reduce("topk", over, (k, largest), x, name="topk"))


def any(x: Any, *, over: str = "cols") -> Any:
    """Whether x holds for any column."""
    return count(x, over=over) > 0


def all(x: Any, *, over: str = "cols") -> Any:
    """Whether x holds for every column (true of none)."""
    return count(x, over=over) == _size(over)


def count(x: Any = True, *, over: str = "cols") -> Any:
    """For how many columns x holds."""
    if isinstance(x, bool):
        return _size(over) if x else Symbol(const(0))
    return _reduce("sum", over, (), Symbol(build.apply("cast", expr_of(x), to="bool")), name="count")[0]


def var(x: Any, *, correction: float = 1, over: str = "cols") -> Any:
    """The variance of x over columns, as torch.var: Σ (x - mean)² / (N - correction), in Welford's form."""
    moments: list[Any] = _reduce("moments", over, (), Symbol(_number(x)), name="var")
    return moments[1] / torch.clamp(_size(over) - correction, min=0)


def _drawn(name: str, seed: Any) -> Any:
    key = expr_of(seed)
    if key.dtype != "int" or (key.op == "const" and not -(2**63) <= key.const < 2**63) or key.rows or key.cols:
        raise ArgumentError(detail=f"a seed was given as {seed!r}", fix="Give one whole number of 64 bits")
    return Symbol(build.apply(name, key, index("batch"), index("row"), index("col")))


def uniform(seed: Any) -> Any:
    """A uniform number in (0, 1) per pair, from Philox on (seed, batch, i, j)."""
    return _drawn("uniform", seed)


def gumbel(seed: Any) -> Any:
    """A standard Gumbel number per pair, the same for every tile, engine and recomputation."""
    return -torch.log(-torch.log1p(-uniform(seed)))


def dropout(x: Any, p: Any, seed: Any) -> Any:
    """x with probability 1 - p, scaled by 1 / (1 - p), else 0; the mask depends on (seed, batch, i, j) alone."""
    p = float(p)  # a fixed choice: it is checked here, and a new one is a new trace
    if not 0 <= p <= 1:
        raise ArgumentError(detail=f"dropout was given p = {p}", fix="A probability lies between 0 and 1")
    return torch.where(_drawn("coin", seed) >= round(p * 2**31), x * (1 / (1 - p) if p < 1 else 0.0), 0.0)


def sample(logit: Any, seed: Any, *, over: str = "cols") -> Any:
    """One column drawn with probability softmax(logit), by the Gumbel-max trick."""
    return argmax(logit + gumbel(seed), over=over)


def reduce(monoid: type[Monoid], *, over: str = "cols", **fields: Any) -> Any:
    """Fold a monoid of one's own: one value per declared field; returns the monoid with the results."""
    if not (isinstance(monoid, type) and issubclass(monoid, Monoid)):
        raise ArgumentError(detail=f"mr.reduce was given {monoid!r}", fix="Give a subclass of mr.Monoid")
    declared = monoid.fields()
    if set(fields) != set(declared):
        raise ArgumentError(
            detail=f"{monoid.__name__} has the fields {', '.join(declared)}, "
            f"but mr.reduce was given {', '.join(fields) or 'none'}",
            fix="Give every field by name",
        )
    if not monoid.commutative:
        raise ArgumentError(
            detail=f"{monoid.__name__} is not commutative, so its fold over pairs depends on the order of tiles",
            fix="Fold it in order with mr.fold",
        )
    exprs = []
    for name, (marker, _) in declared.items():
        e = expr_of(fields[name])
        if marker is Scalar and e.feature is not None:
            raise UnreducedError(
                detail=f'field {name} of {monoid.__name__} is a Scalar, but was given a vector over "{e.feature}"',
                fix="Declare it mr.Vector, or reduce it over its features first",
            )
        exprs.append(build.apply("cast", e, to="float"))
    results = (
        _reduce("user", over, (monoid,), *(Symbol(e) for e in exprs), vectors=True, name="reduce") if exprs else []
    )
    return monoid(**dict(zip(declared, results, strict=True)))
