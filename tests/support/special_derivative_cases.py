"""First derivatives on special values: zeros of both signs, infinities, NaN, ties, negative and huge numbers."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr
from monoidreduce import Col, Row

INF, NAN = math.inf, math.nan
GRID = [0.0, -0.0, INF, -INF, NAN, 1.0, -1.0, 0.5, 2.0, -3.0, -0.5, -2.0, 3.0, 6.0, 1e30, -1e30, 1e-30, -1e-30, 40.0]

UNARY: dict[str, Callable[[Any], Any]] = {
    **{
        name: getattr(torch, name)
        for name in [
            "neg",
            "abs",
            "sign",
            "square",
            "sqrt",
            "rsqrt",
            "reciprocal",
            "exp",
            "exp2",
            "expm1",
            "log",
            "log2",
            "log10",
            "log1p",
            "sinc",
            "asin",
            "acos",
            "asinh",
            "acosh",
            "atanh",
            "erfinv",
            "lgamma",
            "digamma",
            "sin",
            "cos",
            "sinh",
            "cosh",
            "tan",
            "erf",
            "erfc",
            "atan",
            "tanh",
            "sigmoid",
            "floor",
            "ceil",
            "round",
            "trunc",
            "frac",
            "deg2rad",
            "logit",
            "nan_to_num",
        ]
    },
    **{
        name: getattr(F, name)
        for name in [
            "silu",
            "relu",
            "leaky_relu",
            "gelu",
            "softplus",
            "logsigmoid",
            "hardtanh",
            "relu6",
            "elu",
            "mish",
            "softsign",
            "hardsigmoid",
            "hardswish",
            "tanhshrink",
        ]
    },
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "clamp": lambda x: torch.clamp(x, -1.0, 2.0),
    "clamp from below": lambda x: x.clamp(min=0.5),
    "clamp from above": lambda x: x.clamp(max=0.5),
    **{f"x ** {n}": lambda x, n=n: x**n for n in (0, 1, 2, 3, 4.0, -1, -2, 0.5, 1.5, 0.3)},
    **{f"{base} ** x": lambda x, base=base: base**x for base in (2.0, 0.0, -2.0, 1.0)},
    "masked root": lambda x: torch.where(x > 0, torch.sqrt(torch.where(x > 0, x, 1.0)), 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 2.0),
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    **{
        name: getattr(torch, name)
        for name in [
            "add",
            "sub",
            "mul",
            "div",
            "pow",
            "minimum",
            "maximum",
            "logaddexp",
            "remainder",
            "fmax",
            "fmin",
            "xlogy",
            "atan2",
            "hypot",
            "fmod",
            "copysign",
        ]
    },
    "where": lambda a, b: torch.where(a > b, a, b),
    "clamp from below": lambda a, b: torch.clamp(a, min=b),
    "clamp from above": lambda a, b: torch.clamp(a, max=b),
}
# A choice leaves the other branch's cotangent out, whatever it is: with an infinite one, 0 * inf would be NaN.
CHOICES = ["minimum", "maximum", "where", "clamp from below", "clamp from above", "fmax", "fmin"]
HARD = [
    "relu",
    "leaky_relu",
    "hardtanh",
    "relu6",
    "clamp",
    "clamp from below",
    "clamp from above",
    "masked_fill",
    "x ** 0",
]
# Gradients of ours that are 0: of a sum of nothing, NaN in torch; of relu at NaN, the cotangent in torch.
OURS: dict[str, list[Any]] = {"logaddexp": [(-INF, -INF)], "relu": [NAN]}
# Gradients that only some versions of torch have: NaN where atan2 has no angle, a slope where hardswish bends; that of
# a number that fmax left for NaN's sake.
if torch.__version__ < "2.13":
    OURS |= {"atan2": [(a, b) for a in (0.0, -0.0) for b in (0.0, -0.0)], "hardswish": [-3.0]}
if "2.14" <= torch.__version__ < "2.15":  # torch compares these as versions
    OURS |= {name: [(a, b) for a in GRID for b in GRID if a != a or b != b] for name in ("fmax", "fmin")}


def compare(name: str, got: Tensor, expected: Tensor, points: list[Any]) -> None:
    wrong = ~torch.isclose(got, expected, rtol=1e-6, atol=1e-29, equal_nan=True)
    own = {repr(p) for p in OURS.get(name, ())}
    wrong &= torch.tensor([repr(p) not in own for p in points]).view(wrong.shape)
    listed = [(points[k], float(got.flatten()[k]), float(expected.flatten()[k])) for k in wrong.flatten().nonzero()]
    assert not listed, f"{name} at, got, torch: {listed[:8]}"


def check(name: str, f: Callable[..., Any], count: int, engine: str, cotangent: float = 1.0, few: bool = False) -> None:
    """Every point of the grid is a problem of one pair; ``few``: of a smaller grid."""
    grid = GRID[:10] if few else GRID
    if count == 1:
        points: list[Any] = grid
        given = [torch.tensor(grid, dtype=torch.float64).unsqueeze(-1)]
    else:
        points = [(a, b) for a in grid for b in grid]
        given = [torch.tensor(side, dtype=torch.float64).unsqueeze(-1) for side in zip(*points, strict=True)]

    @mr.op
    def ours(x: Row, y: Col):
        return mr.sum(f(x * y) if count == 1 else f(x, y))

    mine = [t.clone().requires_grad_() for t in given]
    with mr.use(engine=engine):
        value = ours(mine[0], mine[1] if count == 2 else torch.ones_like(mine[0]))
        got = _grads(value, mine, cotangent)
    theirs = [t.clone().requires_grad_() for t in given]
    plain = f(*(t * 1.0 for t in theirs))
    compare(f"the value of {name}", value.detach(), plain.detach(), points)
    for one, other in zip(got, _grads(plain, theirs, cotangent), strict=True):
        compare(name, one, other, points)


def _grads(value: Tensor, inputs: list[Tensor], cotangent: float) -> list[Tensor]:
    if not value.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad(value, inputs, torch.full_like(value, cotangent), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


POWERS = [1, 2, 3, 2.5, 1.5, 0.5, -1, -2, INF, -INF]


def check_norms(engine: str, power: float, normalized: bool = False) -> None:
    """Norms of a vector and of a distance, with zeros and equal points among them: values and gradients as torch's."""
    x = torch.tensor([[0.0, 0, 0], [1, 2, -2], [0, 3, 0], [2, 2, -2]], dtype=torch.float64)
    y = torch.tensor([[0.0, 0, 0], [1, 2, -2], [0, 0, 1], [2, 0, 2], [1, 1, 1]], dtype=torch.float64)
    length: Callable[[Any], Any] = lambda v: torch.linalg.vector_norm(v, power, dim=-1)
    if normalized:
        length = lambda v: F.normalize(v, power, dim=-1, eps=0.25).square().sum(-1)

    @mr.op
    def op(x: Row["d"], y: Col["d"]):
        return mr.sum(length(x) * (1 + y[0])), mr.sum(length(x - y), over="rows")

    def run(dense: bool) -> tuple:
        a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
        if dense:
            found = (length(a).unsqueeze(-1) * (1 + b[:, 0])).sum(1), length(a.unsqueeze(1) - b).sum(0)
        else:
            with mr.use(engine=engine):
                found = op(a, b)
        return *found, *torch.autograd.grad(found[0].square().sum() + found[1].sin().sum(), [a, b])

    for one, other in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(one, other)
