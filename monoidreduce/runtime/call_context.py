"""What surrounds a call: who traces it, whether autocast is on, and the settings in force.

A call on plain tensors that nobody traces takes the fast paths (a cached plan, recorded launches). The settings are one
value in a context variable (``plan/settings.py``), and torch runs a backward on a GPU in a thread of its own, where no
block of the caller's is open: so the forward keeps its settings, and the backward applies them.

Inside ``torch.autocast`` every floating argument but float64 is cast to the region's type, so that types may be mixed
there, as in torch's own fused layers; arithmetic and accumulation are ours as always (float32 for 16-bit inputs), with
autocast off. Outside, mixed types stay an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..plan import settings
from ..plan.settings import Settings
from ..program.declarations import Parameter

PLAIN = frozenset({Tensor, torch.nn.Parameter})


def is_divided() -> bool:
    """Whether rows and columns are divided over ranks, or come in chunks; False while torch.compile traces."""
    return not torch.compiler.is_dynamo_compiling() and settings.layout.get() is not None


def is_untraced() -> bool:
    """Whether nothing traces or transforms torch's calls: no compiler, fake tensors, transform, forward-mode level."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def is_transformed() -> bool:
    """Whether one of torch's function transforms, or forward mode, is active: these differentiate what they see."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


_KEYS = torch._C._TorchDispatchModeKey
_TRACERS = (_KEYS.FAKE, _KEYS.PROXY, _KEYS.FUNCTIONAL)


def is_traced() -> bool:
    """Whether a compiler or a tracer writes down what torch does; other dispatch modes only watch it."""
    return bool(torch._C._len_torch_dispatch_stack()) and any(
        torch._C._get_dispatch_mode(k) is not None for k in _TRACERS
    )


def are_plain(values: Sequence[Any]) -> bool:
    """Whether all tensors among these values hold numbers (no subclass), and nothing traces the call."""
    return is_untraced() and all([type(v) in PLAIN for v in values if isinstance(v, Tensor)])


def need_gradient(values: Sequence[Any]) -> bool:
    """Whether any of these requires a gradient."""
    return True in [isinstance(v, Tensor) and v.requires_grad for v in values]


def names_needing_gradient(values: Mapping[str, Any]) -> frozenset[str]:
    """The names of those that require a gradient."""
    return frozenset(n for n, v in values.items() if isinstance(v, Tensor) and v.requires_grad)


# Settings


def apply_settings(then: Settings) -> contextlib.AbstractContextManager[None]:
    """Put the settings of a forward (``settings.now``) in force again inside the block, but for the engine, which its
    folds know."""
    fields = dict(precision=then.precision, strict=then.strict, tune=then.tune, followed=then.followed)
    limit = {} if then.budget is None else {"budget": then.budget}
    return settings.change(**fields, **limit, skip_below=then.skip_below)


# Autocast


def _has_autocast(device: str) -> bool:
    """Whether there is autocast for a type of device; torch 2.6 cannot compile the question, and asks others alone."""
    return device in ("cpu", "cuda") or torch.amp.is_autocast_available(device)


def autocast_device(values: Iterable[Any]) -> str | None:
    """The type of device whose autocast region this call is in; None outside."""
    for v in values:
        if isinstance(v, Tensor):
            device = v.device.type
            return device if _has_autocast(device) and torch.is_autocast_enabled(device) else None
    return None


def without_autocast(values: Iterable[Any]) -> contextlib.AbstractContextManager:
    """A block without autocast for these values' device."""
    device = autocast_device(values)
    return torch.autocast(device, enabled=False) if device else contextlib.nullcontext()


def call_in_autocast(
    call: Callable, parameters: Mapping[str, Parameter], device: str, args: tuple, kwargs: dict
) -> Any:
    """Call with the arguments cast to the region's type, and autocast off."""
    dtype = torch.get_autocast_dtype(device)
    cast = [_cast(v, p, dtype) for v, p in zip(args, parameters.values(), strict=False)]
    named = {n: _cast(v, parameters.get(n), dtype) for n, v in kwargs.items()}
    with torch.autocast(device, enabled=False):
        return call(*cast, *args[len(cast) :], **named)


def _cast(value: Any, p: Parameter | None, dtype: torch.dtype) -> Any:
    """A number (a temperature) keeps its digits, and float64 its precision, as in torch."""
    if not isinstance(value, Tensor) or p is None or p.axis == "number" or p.stored:
        return value
    return value.to(dtype) if value.is_floating_point() and value.dtype != torch.float64 else value
