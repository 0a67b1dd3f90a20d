"""What autograd saves for a backward: independent of caches, and safe against in-place changes of results.

``torch.utils.checkpoint`` compares the number of tensors that a call saves with that of its recomputation, so a call
may save only what its own backward reads. Graphs that the library builds for itself (estimating costs, measuring,
deriving a pullback) are built under :func:`private_graphs`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


@contextlib.contextmanager
def private_graphs() -> Iterator[None]:
    """A context for graphs of stand-in tensors on the CPU, isolated from the caller's autograd settings.

    The caller's saved-tensor hooks are not called: torch calls only the innermost pair, and the pair set here does
    nothing. Anomaly detection is off, since the numbers mean nothing. Tensors are created on the CPU, whatever the
    default device."""
    with contextlib.ExitStack() as stack:
        if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None:  # None outside torch.func
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_identity, _identity))
        if torch.is_anomaly_enabled():
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        if torch.empty(0).device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


def _identity(t: Tensor) -> Tensor:
    return t


def detach_views(results: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Results of an engine as outputs of an ``autograd.Function``, none of them a view.

    Engines return views of their buffers, and torch refuses to change a view in place that a custom function made."""
    return tuple([t if t._base is None else t.detach() for t in results])


def load_saved(ctx: Any, outputs: range) -> tuple[tuple[Tensor, ...], bool]:
    """``ctx.saved_tensors``, and whether the function's ``outputs`` among them (by position) still hold its results.

    They do not where the user changed one in place (``y += 1``); a backward then recomputes them. An input that was
    changed in place is torch's error, as ever."""
    if getattr(ctx, "outputs_changed", False):
        return ctx.saved_tensors, False
    try:
        return ctx.saved_tensors, True
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
    for k in outputs:  # torch does not compare the versions of what hooks unpack
        ctx._raw_saved_tensors[k].register_hooks(_identity, _identity)
    found = ctx.saved_tensors  # raises where it was an input
    ctx.outputs_changed = True
    return found, False
