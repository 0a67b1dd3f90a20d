"""Automatic mixed precision, as torch's own fused layers have it.

Inside ``torch.autocast`` every floating argument but float64 is cast to the region's type, so that types may be mixed
there; arithmetic and accumulation are then ours as always (float32 for 16-bit inputs), with autocast out of the way.
Outside, mixed types stay an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..program.declarations import Parameter


@functools.cache
def _available(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


def anywhere() -> bool:
    """Whether an autocast region of any device is open."""
    return torch._C._is_any_autocast_enabled()


def region(values: Iterable[Any]) -> str | None:
    """The type of device whose autocast region this is; None outside."""
    for v in values:
        if isinstance(v, Tensor):
            device = v.device.type
            return device if _available(device) and torch.is_autocast_enabled(device) else None
    return None


def run(call: Callable, parameters: Mapping[str, Parameter], device: str, args: tuple, kwargs: dict) -> Any:
    """The call with its arguments in the region's type, and autocast off."""
    dtype = torch.get_autocast_dtype(device)
    cast = [_cast(v, p, dtype) for v, p in zip(args, parameters.values(), strict=False)]
    named = {n: _cast(v, parameters.get(n), dtype) for n, v in kwargs.items()}
    with torch.autocast(device, enabled=False):
        return call(*cast, *args[len(cast) :], **named)


def _cast(value: Any, p: Parameter | None, dtype: torch.dtype) -> Any:
    """A number (a temperature) keeps its digits, and float64 its meaning, as in torch."""
    if not isinstance(value, Tensor) or p is None or p.axis == "number":
        return value
    return value.to(dtype) if value.is_floating_point() and value.dtype != torch.float64 else value
