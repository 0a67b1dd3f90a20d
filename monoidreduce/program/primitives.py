"""The table of primitives: each scalar operation stands here once, and nowhere else.

A row holds how torch evaluates it (with ``out=``, so that engines may work in place), its text in a Triton kernel, its
derivative, its interval rule and the torch names that mean it. To add an operation, add a row; functions that are
short combinations of others are one line in ``COMPOSITES``.

A derivative is written in the language itself: it receives the cotangent ``g``, the result ``y`` and the arguments as
symbols, and returns one cotangent per argument (``None``: no gradient). Those that take more than a line stand above
the table. They follow torch's formulas on special values too. Where torch gives no gradient a ``where`` leaves the
cotangent out: zero times an infinite cotangent would be NaN. What bounds a number (clamp, the hard activations, fmax
and fmin) has the gradients that the installed torch gives on a bound and to ties.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from . import intervals as iv
from . import philox


def normal_density(x: Any) -> Any:
    return torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))


def gelu_slope(x: Any, approximate: str) -> Any:
    if approximate == "none":
        return x.primitive("normal_gate") + x * normal_density(x)
    k = math.sqrt(8 / math.pi)
    square = x * x
    s = (x * (k + 0.044715 * k * square)).primitive("gate")  # (1 + tanh) / 2, which the kernel of gelu itself has
    return s * (1 + (1 - s) * (x * (k + 3 * 0.044715 * k * square)))


def silu_derivative(g: Any, y: Any, x: Any) -> tuple:
    s = x.primitive("gate")
    return (g * (s + y * (1 - s)),)


def power_derivative(g: Any, y: Any, x: Any, n: Any) -> tuple:
    """Of x ** n: 0 for the base where n is 0; for the exponent 0 where 0 is raised to n >= 0, NaN where x < 0."""
    nothing = (x == 0) & (n >= 0)
    return (
        torch.where(n == 0, 0.0, g * (n * torch.pow(x, n - 1))),
        torch.where(nothing, 0.0, g * (y * torch.log(torch.where(nothing, 1.0, x)))),
    )


def xlogy_derivative(g: Any, y: Any, x: Any, z: Any) -> tuple:
    """Of x log z: no gradient for x where 0 meets a z that has no logarithm."""
    return torch.where((x == 0) & (z <= 0), 0.0, g * torch.log(z)), g * x / z


def xlog1py(x: Any, z: Any) -> Any:
    """x log(1 + z), with the digits of a small z; 0 where x is 0 and the logarithm infinite or none."""
    nothing = (x == 0) & ((z <= -1) | (z == math.inf))
    return torch.where(nothing, 0.0, x * torch.log1p(torch.where(nothing, 0.0, z)))


def lerp(a: Any, b: Any, weight: Any) -> Any:
    """From the nearer end, as torch does: all of ``b`` where the weight is 1."""
    if isinstance(weight, (int, float)):
        return a + weight * (b - a) if abs(weight) < 0.5 else b - (1 - weight) * (b - a)
    return torch.where(torch.abs(weight) < 0.5, a + weight * (b - a), b - (1 - weight) * (b - a))


def logit_derivative(g: Any, y: Any, x: Any) -> tuple:
    """Outside of [0, 1] there is no logit: NaN."""
    return (torch.where((x < 0) | (x > 1), math.nan, g / (x * (1 - x))),)


def chosen_cotangent(g: Any, a: Any, b: Any, loses: Any) -> Any:
    """The cotangent of one of two between which a minimum chooses: a tie gives half to each, NaN all to both."""
    return torch.where(torch.logical_not(loses), torch.where(a == b, 0.5 * g, g), 0.0)


def logaddexp_share(a: Any, b: Any, y: Any) -> Any:
    """exp(a) / (exp(a) + exp(b)) for y = logaddexp(a, b); 0, and not torch's NaN, where both are minus infinity: a sum
    of nothing has no gradient."""
    return torch.where(y == -math.inf, 0.0, torch.sigmoid(a - b))


def sinc_derivative(g: Any, y: Any, x: Any) -> tuple:
    """(cos πx - sinc x) / x; within 1/4 of 0, where these cancel, the series in (πx)²."""
    near = torch.abs(x) < 0.25
    q = torch.where(near, x, 0.0).square() * (math.pi * math.pi)
    series: Any = 0.0
    for k in range(9, 0, -1):
        series = series * q + (-1) ** k * 2 * k / math.factorial(2 * k + 1)
    far = torch.where(near, 1.0, x)
    return (g * torch.where(near, series * x * (math.pi * math.pi), (torch.cos(math.pi * far) - y) / far),)


def atan2_derivative(g: Any, y: Any, a: Any, b: Any) -> tuple:
    """No gradient at the origin."""
    square = a * a + b * b
    g = torch.where(square == 0, 0.0, g / torch.where(square == 0, 1.0, square))
    return g * b, -(g * a)


def copysign_derivative(g: Any, y: Any, a: Any, b: Any) -> tuple:
    """The sign's own side has none."""
    return torch.where(a == 0, 0.0, g * (y / a)), None


def fmod_derivative(g: Any, y: Any, a: Any, b: Any) -> tuple:
    return g, -(g * torch.trunc(a / b))


# Bounds

# From torch 2.14 on, clamp passes no gradient on a bound that is a number, and ties of clamp, fmax and fmin are shared.
_shares_ties = torch.__version__ >= "2.14"  # compared as versions


def inside(x: Any, low: float, high: float) -> Any:
    """torch's hard activations: the gradient passes inside, and not on the bounds nor at NaN."""
    still = x.detach()
    bounded = torch.where(still <= low, low, torch.where(still >= high, high, still))
    return torch.where((x > low) & (x < high), x, bounded)


def clamp(x: Any, low: Any, high: Any) -> Any:
    """torch's clamp, with the gradient of the installed torch; NaN, of either, stays."""
    if low is not None:
        x = _apply_bound(x, low, torch.maximum, (x > low, x <= low) if _shares_ties else (x >= low, x < low))
    if high is not None:
        x = _apply_bound(x, high, torch.minimum, (x < high, x >= high) if _shares_ties else (x <= high, x > high))
    return x


def _apply_bound(x: Any, bound: Any, choose: Callable[..., Any], sides: tuple[Any, Any]) -> Any:
    expr = getattr(bound, "expr", None)
    if _shares_ties and expr is not None and (expr.rows or expr.cols):
        return choose(x, bound)
    inside, outside = sides
    return torch.where(inside, x, torch.where(outside, bound, (x + bound).detach()))


def choose_number(choose: Callable[..., Any], wins: Any, a: Any, b: Any) -> Any:
    """torch's fmax and fmin: NaN loses."""
    if _shares_ties:
        return torch.where(torch.isnan(b), a, torch.where(torch.isnan(a), b, choose(a, b)))
    return torch.where(wins | torch.isnan(b), a, b)


aten = torch.ops.aten
_LN2, _LN10 = math.log(2.0), math.log(10.0)
_SELU = 1.6732632423543772, 1.0507009873554805  # alpha and scale


@dataclass(frozen=True)
class Primitive:
    """One row of the table."""

    name: str
    torch: Callable[..., Any]  # f(*arguments, **attributes, out=None)
    derivative: Callable[..., tuple] | None  # f(g, y, *arguments, **attributes) -> a cotangent per argument
    interval: Callable[..., iv.Interval] = iv.unknown
    result: str = "float"  # number class: float, bool, or "same" as the widest argument
    names: tuple[str, ...] = ()  # other torch names that mean the same
    attributes: dict[str, Any] = field(default_factory=dict)  # static arguments and their defaults
    triton: str = ""  # the same in a kernel: {0}, {1} ... the arguments, attributes by name, helpers from the engine
    cost: float = 0.0  # in exponentials, about; 0: plain arithmetic
    fast: float = 0.0  # the same of its approximate forms (``quick_``, ``native_``), in approximate exponentials
    in_torch: bool = True  # False: torch has no such function, and bodies do not find it by name


def _no_gradient(count: int) -> Callable[..., tuple]:
    return lambda g, y, *args, **attributes: (None,) * count


def _where(c: Any, x: Any, y: Any, out: Any = None) -> Any:
    return torch.where(c, x, y) if out is None else torch.where(c, x, y, out=out)


def _cast(x: Any, *, to: str, out: Any = None) -> Any:
    if out is None:
        raise TypeError("a cast needs a target type: engines give it through out=, see engines.common.evaluate.cast")
    return out.copy_(x)


def _floor_divide(a: Any, b: Any, out: Any = None) -> Any:
    """A step function: autograd has no derivative for it and need not look inside."""
    value = torch.floor_divide(a.detach(), b.detach())
    return value if out is None else out.copy_(value)


def _logaddexp(a: Any, b: Any, out: Any = None) -> Any:
    """torch's, in a form that has a second derivative: torch's own is NaN where one argument is far below the other."""
    if out is not None or not torch.is_grad_enabled():
        return torch.logaddexp(a, b, out=out)
    larger, smaller = torch.where(b > a, b, a), torch.where(b > a, a, b)
    alike = (larger == smaller) & torch.isinf(larger)  # their difference would be NaN
    gap = torch.where(alike, 0.0, smaller - larger)
    return torch.where(alike, larger.detach(), larger + F.softplus(gap))


def _decay(x: Any, out: Any = None) -> Any:
    """exp(-x), and 0 where x is minus infinity: one over a total whose logarithm is x, 0 if there was nothing."""
    return torch.exp(torch.nan_to_num(-x, nan=math.nan, posinf=-math.inf), out=out)


def _popcount(x: Any, bits: int = 64, out: Any = None) -> Any:
    """How many of the lowest ``bits`` bits are 1: sums of 1, 2 and 4 bits side by side, then of all bytes."""
    x = x & ((1 << bits) - 1) if bits < 64 else x
    x = x - ((x >> 1) & 0x5555555555555555)  # of a negative number's shift, the copies of its sign are masked out
    x = (x & 0x3333333333333333).add_((x >> 2).bitwise_and_(0x3333333333333333))
    x = x.add_(x >> 4).bitwise_and_(0x0F0F0F0F0F0F0F0F).mul_(0x0101010101010101).bitwise_right_shift_(56)
    return _into(x, out)


_P = Primitive
_own = functools.partial(Primitive, in_torch=False)  # of ours: ``mr.NAME``, or what derivatives and domains use
_monotone = iv.monotone

_ROWS = [
    # arithmetic
    _P("add", torch.add, lambda g, y, a, b: (g, g), iv.add, "same", triton="{0} + {1}"),
    _P("sub", torch.sub, lambda g, y, a, b: (g, -g), iv.sub, "same", ("subtract",), triton="{0} - {1}"),
    _P("mul", torch.mul, lambda g, y, a, b: (g * b, g * a), iv.mul, "same", ("multiply",), triton="{0} * {1}"),
    _P(
        "div",
        torch.div,
        lambda g, y, a, b: (g / b, -(g * y / b)),
        iv.div,
        "float",
        ("divide", "true_divide"),
        triton="{0} / {1}",
    ),
    _P("pow", torch.pow, power_derivative, iv.anything, triton="power({0}, {1})", cost=3.0, fast=2.0),
    _P("neg", torch.neg, lambda g, y, x: (-g,), iv.neg, "same", ("negative",), triton="-{0}"),
    _P(
        "abs", torch.abs, lambda g, y, x: (g * torch.sign(x),), iv.absolute, "same", ("absolute",), triton="tl.abs({0})"
    ),
    _P(
        "sign",
        torch.sign,
        _no_gradient(1),
        _monotone(lambda x: float((x > 0) - (x < 0))),
        "same",
        ("sgn",),
        triton="sign({0})",
    ),
    _P("square", torch.square, lambda g, y, x: (g * (2 * x),), iv.square, "same", triton="{0} * {0}"),
    _P(
        "sqrt",
        torch.sqrt,
        lambda g, y, x: (g * (0.5 / y),),
        _monotone(math.sqrt, 0.0, domain=0.0),
        triton="tl.sqrt({0})",
    ),
    _P(
        "rsqrt",
        torch.rsqrt,
        lambda g, y, x: (g * (-0.5 * y * y * y),),
        lambda x: (0.0, iv.INF) if x[0] >= 0 else iv.NAN,
        triton="tl.rsqrt({0})",
    ),
    _P(
        "reciprocal",
        torch.reciprocal,
        lambda g, y, x: (-(g * y * y),),
        lambda x: iv.div(iv.TRUE, x),
        triton="1.0 / {0}",
    ),
    _own("decay", _decay, lambda g, y, x: (-g * y,), lambda x: (0.0, iv.INF), triton="decay({0})", cost=1.0, fast=1.0),
    _P("exp", torch.exp, lambda g, y, x: (g * y,), _monotone(math.exp, 0.0), triton="tl.exp({0})", cost=1.0, fast=1.0),
    _P(
        "exp2",
        torch.exp2,
        lambda g, y, x: (g * y * _LN2,),
        _monotone(lambda x: 2.0**x, 0.0),
        triton="tl.exp2({0})",
        cost=1.0,
        fast=1.0,
    ),
    _P(
        "expm1",
        torch.expm1,
        lambda g, y, x: (g * (y + 1),),
        _monotone(math.expm1, -1.0),
        triton="expm1({0})",
        cost=1.5,
        fast=1.5,
    ),
    _P(
        "log",
        torch.log,
        lambda g, y, x: (g / x,),
        _monotone(math.log, domain=0.0),
        triton="log({0})",
        cost=1.0,
        fast=1.5,
    ),
    _P(
        "log2",
        torch.log2,
        lambda g, y, x: (g / (x * _LN2),),
        _monotone(math.log2, domain=0.0),
        triton="tl.log2({0})",
        cost=1.0,
        fast=1.5,
    ),
    _P(
        "log10",
        torch.log10,
        lambda g, y, x: (g / (x * _LN10),),
        _monotone(math.log10, domain=0.0),
        triton="log10({0})",
        cost=1.0,
        fast=1.5,
    ),
    _P(
        "log1p",
        torch.log1p,
        lambda g, y, x: (g / (1 + x),),
        _monotone(math.log1p, domain=-1.0),
        triton="log1p({0})",
        cost=1.5,
        fast=1.5,
    ),
    _P("sin", torch.sin, lambda g, y, x: (g * torch.cos(x),), iv.wave, triton="tl.sin({0})", cost=1.5, fast=2.0),
    _P("cos", torch.cos, lambda g, y, x: (-(g * torch.sin(x)),), iv.wave, triton="tl.cos({0})", cost=1.5, fast=2.0),
    _P(
        "sinh",
        torch.sinh,
        lambda g, y, x: (g * torch.cosh(x),),
        _monotone(math.sinh),
        triton="sinh({0})",
        cost=2.0,
        fast=3.0,
    ),
    _P(
        "cosh",
        torch.cosh,
        lambda g, y, x: (g * torch.sinh(x),),
        lambda x: (1.0, iv.INF),
        triton="cosh({0})",
        cost=2.0,
        fast=2.0,
    ),
    _P("sinc", torch.sinc, sinc_derivative, iv.wave, triton="sinc({0})", cost=2.0, fast=2.0),
    _P(
        "asin",
        torch.asin,
        lambda g, y, x: (g * torch.rsqrt((1 - x) * (1 + x)),),
        iv.inside(-1.0, 1.0, _monotone(math.asin)),
        names=("arcsin",),
        triton="arcsin({0})",
        cost=2.5,
        fast=3.0,
    ),
    _P(
        "acos",
        torch.acos,
        lambda g, y, x: (-(g * torch.rsqrt((1 - x) * (1 + x))),),
        iv.inside(-1.0, 1.0, iv.falling(math.acos)),
        names=("arccos",),
        triton="arccos({0})",
        cost=2.5,
        fast=2.0,
    ),
    _P(
        "atan2",
        torch.atan2,
        atan2_derivative,
        lambda a, b: (-3.1416, 3.1416),
        names=("arctan2",),
        triton="arctan2({0}, {1})",
        cost=3.0,
        fast=3.5,
    ),
    _P("hypot", torch.hypot, lambda g, y, a, b: (g * (a / y), g * (b / y)), iv.hypot, triton="hypot({0}, {1})"),
    _P(
        "asinh",
        torch.asinh,
        lambda g, y, x: (g * torch.rsqrt(x * x + 1),),
        _monotone(math.asinh),
        names=("arcsinh",),
        triton="arcsinh({0})",
        cost=3.0,
        fast=2.5,
    ),
    _P(
        "acosh",
        torch.acosh,
        lambda g, y, x: (g * torch.rsqrt(x * x - 1),),
        _monotone(math.acosh, 0.0, domain=1.0),
        names=("arccosh",),
        triton="arccosh({0})",
        cost=3.0,
        fast=2.5,
    ),
    _P(
        "atanh",
        torch.atanh,
        lambda g, y, x: (g / (1 - x * x),),
        iv.inside(-1.0, 1.0, _monotone(math.atanh)),
        names=("arctanh",),
        triton="arctanh({0})",
        cost=2.0,
        fast=2.5,
    ),
    _P(
        "erfinv",
        torch.erfinv,
        lambda g, y, x: (g * torch.exp(y * y) * (0.5 * math.sqrt(math.pi)),),
        iv.inside(-1.0, 1.0, iv.unknown),
        triton="erfinv({0})",
        cost=3.0,
        fast=3.0,
    ),
    _P(
        "lgamma",
        torch.lgamma,
        lambda g, y, x: (g * torch.digamma(x),),
        iv.anything,
        names=("gammaln",),
        triton="lgamma({0})",
        cost=6.0,
        fast=5.0,
    ),
    _P(
        "digamma",
        torch.digamma,
        lambda g, y, x: (g * torch.polygamma(1, x),),
        iv.anything,
        names=("psi",),
        triton="digamma({0})",
        cost=6.0,
        fast=5.0,
    ),
    _P(  # of order n, from 1; kernels have orders 1 and 2
        "polygamma",
        lambda x, n=1, out=None: torch.polygamma(n, x, out=out),
        lambda g, y, x, n: (g * torch.polygamma(n + 1, x),),
        iv.anything,
        attributes={"n": 1},
        triton="polygamma_{n}({0})",
        cost=8.0,
        fast=6.0,
    ),
    _P(
        "xlogy",
        torch.xlogy,
        xlogy_derivative,
        iv.anything,
        triton="tl.where({0} == 0.0, tl.where({1} == {1}, 0.0, {1}), {0} * log({1}))",
        cost=1.0,
        fast=2.0,
    ),
    _P("logit", torch.logit, logit_derivative, iv.anything, triton="log({0}) - log1p(-{0})", cost=2.5, fast=3.0),
    _P(
        "erfc",
        torch.erfc,
        lambda g, y, x: (-(g * torch.exp(-(x * x)) * (2 / math.sqrt(math.pi))),),
        iv.falling(math.erfc, 0.0, 2.0),
        triton="erfc({0})",
        cost=2.0,
        fast=3.0,
    ),
    _P(
        "atan",
        torch.atan,
        lambda g, y, x: (g / (1 + x * x),),
        _monotone(math.atan),
        names=("arctan",),
        triton="arctan({0})",
        cost=2.0,
        fast=2.5,
    ),
    _P(
        "erf",
        torch.erf,
        lambda g, y, x: (g * torch.exp(-(x * x)) * (2 / math.sqrt(math.pi)),),
        _monotone(math.erf, -1.0, 1.0),
        triton="tl.erf({0})",
        cost=1.0,
        fast=2.0,
    ),
    # activations that torch fuses
    _P(
        "tanh",
        torch.tanh,
        lambda g, y, x: (g * (1 - y * y),),
        _monotone(math.tanh, -1.0, 1.0),
        triton="tanh({0})",
        cost=1.5,
        fast=1.0,
    ),
    _P(
        "sigmoid",
        torch.sigmoid,
        lambda g, y, x: (g * (y * (1 - y)),),
        iv.bounded(0.0, 1.0),
        names=("expit",),
        triton="sigmoid({0})",
        cost=1.0,
        fast=1.5,
    ),
    # sigmoids that meet their own argument as a factor: what counts is how far they are off of 1, not of themselves
    _own("gate", torch.sigmoid, lambda g, y, x: (g * (y * (1 - y)),), triton="gate({0})", cost=1.0, fast=1.0),
    _own(
        "normal_gate",
        torch.special.ndtr,
        lambda g, y, x: (g * normal_density(x),),
        triton="normal_gate({0})",
        cost=1.0,
        fast=1.5,
    ),
    _own(
        "mish_gate",
        lambda x, out=None: torch.tanh(F.softplus(x), out=out),
        lambda g, y, x: (g * ((1 - y * y) * x.primitive("gate")),),
        iv.bounded(0.0, 1.0),
        triton="mish_gate({0})",
        cost=4.0,
        fast=2.0,
    ),
    _P("silu", aten.silu, silu_derivative, triton="{0} * gate({0})", cost=1.0, fast=1.0),
    _P(
        "relu",
        aten.relu,
        # At NaN torch passes the cotangent on. The comparison for that, `not (x <= 0)`, keeps the compiler from fusing
        # relu into the conversion to 16 bits: 372 instructions where 241 do, and a perceptron's gradients 8 % slower.
        lambda g, y, x: (torch.where(x > 0, g, 0.0),),
        _monotone(lambda x: max(x, 0.0), 0.0),
        triton="tl.where({0} <= 0.0, 0.0, {0})",
    ),
    _P(
        "leaky_relu",
        aten.leaky_relu,
        lambda g, y, x, negative_slope: (torch.where(x > 0, g, g * negative_slope),),
        attributes={"negative_slope": 0.01},
        triton="tl.where({0} > 0.0, {0}, {0} * {negative_slope})",
    ),
    _P(
        "gelu",
        aten.gelu,
        lambda g, y, x, approximate: (g * gelu_slope(x, approximate),),
        attributes={"approximate": "none"},
        triton="gelu_{approximate}({0})",
        cost=2.0,
        fast=1.5,
    ),
    _P(
        "softplus",
        aten.softplus,
        lambda g, y, x, beta, threshold: (g * torch.where(x * beta > threshold, 1.0, torch.sigmoid(x * beta)),),
        attributes={"beta": 1.0, "threshold": 20.0},
        triton="softplus({0}, {beta}, {threshold})",
        cost=2.5,
        fast=2.0,
    ),
    _P(
        "logsigmoid",
        lambda x, out=None: _into(F.logsigmoid(x), out),
        lambda g, y, x: (g * torch.sigmoid(-x),),
        names=("log_sigmoid",),
        triton="logsigmoid({0})",
        cost=2.5,
        fast=2.0,
    ),
    # choice
    _P(
        "minimum",
        torch.minimum,
        lambda g, y, a, b: (chosen_cotangent(g, a, b, a > b), chosen_cotangent(g, a, b, a < b)),
        iv.minimum,
        "same",
        (),
        triton="tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    ),
    _P(
        "maximum",
        torch.maximum,
        lambda g, y, a, b: (chosen_cotangent(g, a, b, a < b), chosen_cotangent(g, a, b, a > b)),
        iv.maximum,
        "same",
        (),
        triton="tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    ),
    _P(
        "where",
        _where,
        lambda g, y, c, a, b: (None, torch.where(c, g, 0.0), torch.where(c, 0.0, g)),
        iv.where,
        "same",
        triton="tl.where({0}, {1}, {2})",
    ),
    _P(
        "logaddexp",
        _logaddexp,
        lambda g, y, a, b: (g * logaddexp_share(a, b, y), g * logaddexp_share(b, a, y)),
        triton="logaddexp({0}, {1})",
        cost=2.5,
        fast=2.0,
    ),
    # rounding
    _P(
        "floor",
        torch.floor,
        _no_gradient(1),
        _monotone(lambda x: x if math.isinf(x) else math.floor(x)),
        "same",
        triton="tl.floor({0})",
    ),
    _P(
        "ceil",
        torch.ceil,
        _no_gradient(1),
        _monotone(lambda x: x if math.isinf(x) else math.ceil(x)),
        "same",
        triton="tl.ceil({0})",
    ),
    _P(
        "round",
        torch.round,
        _no_gradient(1),
        _monotone(lambda x: x if math.isinf(x) else round(x)),
        "same",
        triton="nearest({0})",
    ),
    _P(
        "trunc",
        torch.trunc,
        _no_gradient(1),
        _monotone(lambda x: x if math.isinf(x) else math.trunc(x)),
        "same",
        ("fix",),
        triton="tl.where({0} < 0.0, tl.ceil({0}), tl.floor({0}))",
    ),
    _P("floor_divide", _floor_divide, _no_gradient(2), iv.floor_divide, "same", triton="floor_divide({0}, {1})"),
    _P(
        "remainder",
        torch.remainder,
        lambda g, y, a, b: (g, -(g * torch.floor_divide(a, b))),
        iv.remainder,
        "same",
        triton="remainder({0}, {1})",
    ),
    _P("fmod", torch.fmod, fmod_derivative, iv.fmod, "same", triton="fmod({0}, {1})"),
    _P("copysign", torch.copysign, copysign_derivative, iv.copysign, triton="copysign({0}, {1})"),
    # bits of whole numbers; of truth values these are the logical operations
    _P("bitwise_and", torch.bitwise_and, _no_gradient(2), iv.bitwise_and, "same", triton="{0} & {1}"),
    _P("bitwise_or", torch.bitwise_or, _no_gradient(2), iv.bitwise_or, "same", triton="{0} | {1}"),
    _P("bitwise_xor", torch.bitwise_xor, _no_gradient(2), iv.bitwise_or, "same", triton="{0} ^ {1}"),
    _P("bitwise_not", torch.bitwise_not, _no_gradient(1), lambda x: (-1 - x[1], -1 - x[0]), "same", triton="~{0}"),
    _P(
        "bitwise_left_shift",
        torch.bitwise_left_shift,
        _no_gradient(2),
        iv.shift_left,
        "same",
        triton="shift_left({0}, {1})",
    ),
    _P(
        "bitwise_right_shift",
        torch.bitwise_right_shift,
        _no_gradient(2),
        iv.shift_right,
        "same",
        triton="shift_right({0}, {1})",
    ),
    _own(
        "popcount",
        _popcount,
        _no_gradient(1),
        lambda x: (0, 64),
        "int",
        attributes={"bits": 64},
        triton="popcount({0}, {bits})",
    ),
    # truth
    _P("eq", torch.eq, None, iv.equal, "bool", triton="{0} == {1}"),
    _P("ne", torch.ne, None, iv.not_equal, "bool", ("not_equal",), triton="{0} != {1}"),
    _P("lt", torch.lt, None, iv.less, "bool", ("less",), triton="{0} < {1}"),
    _P("le", torch.le, None, iv.less_equal, "bool", ("less_equal",), triton="{0} <= {1}"),
    _P("gt", torch.gt, None, iv.greater, "bool", ("greater",), triton="{0} > {1}"),
    _P("ge", torch.ge, None, iv.greater_equal, "bool", ("greater_equal",), triton="{0} >= {1}"),
    _P("logical_and", torch.logical_and, None, iv.logical_and, "bool", triton="{0} & {1}"),
    _P("logical_or", torch.logical_or, None, iv.logical_or, "bool", triton="{0} | {1}"),
    _P("logical_xor", torch.logical_xor, None, iv.logical_xor, "bool", triton="{0} ^ {1}"),
    _P("logical_not", torch.logical_not, None, iv.logical_not, "bool", triton="{0} == 0"),
    _P("isnan", lambda x, out=None: _into(torch.isnan(x), out), None, lambda x: iv.EITHER, "bool", triton="{0} != {0}"),
    _P(
        "isinf",
        lambda x, out=None: _into(torch.isinf(x), out),
        None,
        lambda x: iv.EITHER,
        "bool",
        triton="tl.abs({0}) == float('inf')",
    ),
    # others
    _own("cast", _cast, lambda g, y, x, to: (g,), iv.cast, "cast", attributes={"to": "float"}, triton="{0}"),
    _P(
        "nan_to_num",
        torch.nan_to_num,
        lambda g, y, x, nan, posinf, neginf: (torch.where(torch.isfinite(x), g, 0.0),),
        attributes={"nan": 0.0, "posinf": None, "neginf": None},
        triton="nan_to_num({0}, {nan}, {posinf}, {neginf})",
    ),
    _P("detach", lambda x, out=None: _into(x.detach(), out), _no_gradient(1), lambda x: x, "same", triton="{0}"),
    # the same condition, which holds in long stretches of both axes: numbers along each rise (``mr.jagged``)
    _own("stretches", lambda x, out=None: _into(x, out), None, lambda x: x, "bool", triton="{0}"),
    _own("word", philox.word, _no_gradient(3), lambda *_: (-(2**31), 2**31 - 1), "int", triton="word({0}, {1}, {2})"),
    _own("mark", philox.mark, _no_gradient(2), lambda *_: (-(2**31), 2**31 - 1), "int", triton="mark({0}, {1})"),
    _own("coin", philox.coin, _no_gradient(3), lambda *_: (0, philox.COINS - 1), "int", triton="coin({0}, {1}, {2})"),
    _own(
        "gumbel",
        philox.gumbel,
        _no_gradient(4),
        lambda *_: (-3, 23),
        triton="gumbel({0}, {1}, {2}, {3}, {4})",
        cost=6.0,
        fast=6.0,
    ),
    _own(
        "uniform",
        philox.uniform,
        _no_gradient(4),
        lambda *_: (0.0, 1.0),
        triton="uniform({0}, {1}, {2}, {3})",
        cost=12.0,
    ),
]


def _into(value: Any, out: Any) -> Any:
    return value if out is None else out.copy_(value)


PRIMITIVES: dict[str, Primitive] = {p.name: p for p in _ROWS}


# Functions that are short combinations: torch name -> the same in the language.
COMPOSITES: dict[str, Callable[..., Any]] = {
    "clamp": lambda x, min=None, max=None: clamp(x, min, max),
    "clip": lambda x, min=None, max=None: clamp(x, min, max),
    "clamp_min": lambda x, min: clamp(x, min, None),
    "clamp_max": lambda x, max: clamp(x, None, max),
    "hardtanh": lambda x, min_val=-1.0, max_val=1.0, inplace=False: inside(x, min_val, max_val),
    "relu6": lambda x, inplace=False: inside(x, 0, 6),
    "elu": lambda x, alpha=1.0, inplace=False: torch.where(x > 0, x, alpha * torch.expm1(torch.where(x > 0, 0.0, x))),
    "mish": lambda x, inplace=False: x * x.primitive("mish_gate"),
    "softsign": lambda x: x / (1 + torch.abs(x)),
    "hardsigmoid": lambda x, inplace=False: inside(x / 6 + 0.5, 0.0, 1.0),
    "hardswish": lambda x, inplace=False: x * inside(x / 6 + 0.5, 0.0, 1.0),
    "celu": lambda x, alpha=1.0, inplace=False: torch.where(
        x > 0, x, alpha * torch.expm1(torch.where(x > 0, 0.0, x) / alpha)
    ),
    "selu": lambda x, inplace=False: torch.where(
        x > 0, x * _SELU[1], _SELU[0] * _SELU[1] * torch.expm1(torch.where(x > 0, 0.0, x))
    ),
    "tanhshrink": lambda x: x - torch.tanh(x),
    "tan": lambda x: torch.sin(x) / torch.cos(x),
    "rsub": lambda x, y, alpha=1: y - alpha * x,
    "frac": lambda x: x - torch.trunc(x),
    "heaviside": lambda x, values: torch.where(x == 0, values, torch.where(x > 0, 1.0, 0.0)),
    "fmax": lambda a, b: choose_number(torch.maximum, a >= b, a, b),
    "fmin": lambda a, b: choose_number(torch.minimum, a <= b, a, b),
    "lerp": lerp,
    "isfinite": lambda x: torch.logical_not(torch.logical_or(torch.isnan(x), torch.isinf(x))),
    "masked_fill": lambda x, mask, value: torch.where(mask, value, x),
    "logaddexp2": lambda a, b: torch.logaddexp(a * _LN2, b * _LN2) / _LN2,
    "xlog1py": xlog1py,
    "entr": lambda x: torch.where(x < 0, -math.inf, -torch.xlogy(x, x)),
    "ndtr": lambda x: 0.5 * torch.erfc(x * -math.sqrt(0.5)),
    "addcmul": lambda x, a, b, value=1: x + value * a * b,
    "addcdiv": lambda x, a, b, value=1: x + value * a / b,
    "rad2deg": lambda x: x * (180 / math.pi),
    "deg2rad": lambda x: x * (math.pi / 180),
    "positive": lambda x: x,
    "contiguous": lambda x: x,
}


# every torch name -> the primitive it means
NAMES: dict[str, str] = {alias: p.name for p in _ROWS if p.in_torch for alias in (p.name, *p.names)}
