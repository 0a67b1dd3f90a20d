"""Formulas of the table of primitives that take more than a line, in the language itself: derivatives, and bounds.

A derivative receives the cotangent ``g``, the result ``y`` and the arguments as symbols, and returns one cotangent per
argument. They follow torch's formulas on special values too. Where torch gives no gradient a ``where`` leaves the
cotangent out: zero times an infinite cotangent would be NaN. What bounds a number (clamp, the hard activations, fmax
and fmin) has the gradients that the installed torch gives on a bound and to ties."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


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
