"""Reductions: the table of the few kinds that everything a body folds becomes (``vocabulary.py`` has what it calls).

Every reduction of the language is one of seven kinds plus arithmetic on its results: ``sum``; ``soft`` (logsumexp and
softmax means of any number of values, one logit); ``best`` (largest or smallest, and where); ``topk``; ``moments``;
``user`` (any monoid); and ``pick`` (a sum against ``index == t``, which is a gather; made by ``normal_form.py`` only). An
eighth, ``pair``, folds nothing: it writes a number per pair out, in the shape of an argument that was given per pair,
summed over what was broadcast in that (made by ``gradient.py`` only; its ``over`` is neither axis). A kind knows its
results, its pullback (Theorem 2.1: cotangents of one pair's fields from the final results) and when a pair is idle,
that is, equal to the identity. An engine knows how to fold each kind; nobody else needs to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import NoGradientError
from . import constructors
from . import intervals as iv
from .expression import Expr, Feature, index, node, reduce_node, result, size
from .reverse_mode import pull
from .symbol import Symbol, expr_of

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
    weight = raised * Symbol(constructors.apply("decay", log_total.expr))
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
        total = g[0] / Symbol(size(over))
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
    return [None if e is None else Symbol(constructors.substitute((e,), back)[0]) for e in pulled]


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


def make(kind: str, over: str, params: tuple, fields: tuple[Expr, ...]) -> list[Expr]:
    """The results of a reduction, as expressions."""
    reduction = reduce_node(kind, over, params, fields)
    outputs = KINDS[kind].outputs(fields, params)
    return [result(reduction, k, feature, dtype) for k, (feature, dtype) in enumerate(outputs)]
