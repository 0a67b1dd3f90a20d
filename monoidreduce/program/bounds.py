"""What bounds a number, written in the language: clamp, the hard activations, fmax and fmin, with the gradients that
the installed torch gives on a bound and to ties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
        x = _bound(x, low, torch.maximum, (x > low, x <= low) if _shares_ties else (x >= low, x < low))
    if high is not None:
        x = _bound(x, high, torch.minimum, (x < high, x >= high) if _shares_ties else (x <= high, x > high))
    return x


def _bound(x: Any, bound: Any, choose: Callable[..., Any], sides: tuple[Any, Any]) -> Any:
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
