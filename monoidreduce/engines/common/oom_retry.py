"""OOM retry: what happens when memory runs out during a fold.

Buffers of the failed attempt are referenced by the frames of the error's traceback, so the error is dropped first. The
fold is then run once more under a smaller memory budget. Engines do not write to their inputs, so the second attempt
starts from the same numbers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from ...errors import BudgetError, MonoidReduceError, OutOfMemoryError
from ...plan import budget, settings
from ...program.lower import Fold
from ...reductions import kind_of
from .evaluate import Sizes, result_form

# What allocators say that raise a plain RuntimeError: torch's own on the CPU, and the vendor's libraries on a GPU.
_MESSAGES = ("DefaultCPUAllocator", "not enough memory", "out of memory", "ALLOC_FAILED", "bad allocation", "bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: of a device, of the host, or of what one kernel may hold."""
    if isinstance(error, MonoidReduceError):
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or type(error).__name__ == "OutOfResources":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _MESSAGES)


def run_with_retry(run: Callable[..., Any], given: tuple, sizes: Sizes, fold: Fold | None = None) -> Any:
    """Call ``run(*given)``; if memory runs out, once more with a smaller budget. ``fold``: for the error message."""
    return run_or_fall_back(run, lambda *given: run_smaller(run, given, sizes, fold), given, sizes)


def run_smaller(run: Callable[..., Any], given: tuple, sizes: Sizes, fold: Fold | None = None) -> Any:
    """The second attempt of :func:`run_with_retry`."""
    try:
        with settings.shrink_memory():
            return run(*given)
    except Exception as error:
        if not isinstance(error, BudgetError) and not is_out_of_memory(error):
            raise
        reason = str(error)
    release_memory(sizes.device)
    raise _make_error(reason, sizes, fold)


def run_with_typed_error(run: Callable[..., Any], given: tuple, sizes: Sizes) -> Any:
    """Call ``run(*given)``; running out of memory raises OutOfMemoryError, without a retry."""
    try:
        return run(*given)
    except Exception as error:
        reason = find_reason(error)
    raise_typed(reason, sizes)


def find_reason(error: Exception) -> str:
    """What an error says of memory that ran out; raises any other error again."""
    try:
        if is_out_of_memory(error):
            return str(error)
        raise error
    finally:
        del error  # this frame is on its traceback: a cycle that would hold the call's tensors


def raise_typed(reason: str, sizes: Sizes) -> NoReturn:
    """Raise OutOfMemoryError for a ``reason``: outside of the handler, so that what its frames held is released."""
    release_memory(sizes.device)
    raise _make_error(reason, sizes)


def run_or_fall_back(run: Callable[..., Any], other: Callable[..., Any], given: Sequence[Any], sizes: Sizes) -> Any:
    """Call ``run(*given)``; if memory runs out, ``other(*given)``."""
    try:
        return run(*given)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    release_memory(sizes.device)
    return other(*given)


def _make_error(reason: str, sizes: Sizes, fold: Fold | None = None) -> OutOfMemoryError:
    least = "" if fold is None else f"; its results alone take {budget.format_ceil(_count_result_bytes(fold, sizes))}"
    said = reason.strip().split("\n")[0] or "the allocator does not say more"
    return OutOfMemoryError(rows=sizes.rows, cols=sizes.cols, reason=said, least=least)


def is_device_lost(device: torch.device) -> bool:
    """Whether a device is unusable: after an illegal access, for the rest of the process."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def release_memory(device: torch.device) -> None:
    """Free unreachable tensors and the allocator's cached blocks."""
    gc.collect()  # frames and closures may hold each other
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _count_result_bytes(fold: Fold, sizes: Sizes) -> int:
    """Bytes of a fold's results: the least memory it needs."""
    forms = [result_form(r, k, sizes) for r, k in fold.outputs if not kind_of(r).per_pair]
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in forms)
