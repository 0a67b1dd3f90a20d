"""What the rest of the package calls in this engine: folds run, prepared and described; arithmetic; plans.

:func:`run` has the contract of every engine: run this fold, on these tensors, of these sizes. A fold that has no kernel
(a monoid with vectors, more features than registers hold) is handed to ``fallback`` with a warning that says why.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...errors import EngineError, FallbackWarning
from ...plan import settings
from ...program.expression import Expr
from ...program.lower import Fold
from ..common.evaluate import Sizes
from ..common.torch_code import Elementwise
from .codegen.kernel_spec import TINY, WIDEST, Unsupported, takes_k_loop
from .kernels import elementwise, fold_kernel, pick, point_search, small_kernels, topk, user_kernels
from .kernels.fold_kernel import describe_numbers
from .kernels.listed_fold import ListedFold, prepare_listed, run_listed
from .kernels.prepared_fold import (
    FoldSavingResults,
    PreparedFold,
    check_device,
    gather_labels,
    list_sources,
    list_tiles,
    merge_batches,
    prepare,
    prepare_or_refuse,
    prepared_folds,
    record,
    selects_from_panels,
)
from .launch import driver
from .launch.driver import compile_ahead, compile_only, skip_launches, watch_resources
from .launch.replay import Buffer, NumberArithmetic, ProgramReplay, RecordedLaunches, ReplayNames, ReplayViews
from .panel import epilogue
from .panel.arena import MemoryPlan
from .panel.kernel_step import KernelStep, MetaStep
from .schedules import spec_from_tensors
from .schedules.kernel_plan import KernelPlan, Rendering, overriding_plans, use_plan
from .schedules.spec_from_tensors import as_for

__all__ = [
    "TINY",
    "WIDEST",
    "Buffer",
    "FoldSavingResults",
    "KernelPlan",
    "KernelStep",
    "ListedFold",
    "MemoryPlan",
    "MetaStep",
    "NumberArithmetic",
    "PreparedFold",
    "ProgramReplay",
    "RecordedLaunches",
    "Rendering",
    "ReplayNames",
    "ReplayViews",
    "Unsupported",
    "as_for",
    "check_device",
    "compile_ahead",
    "compile_only",
    "describe_numbers",
    "driver",
    "elementwise",
    "epilogue",
    "gather_labels",
    "is_k_loop_fold",
    "list_sources",
    "list_tiles",
    "merge_batches",
    "overriding_plans",
    "pick",
    "point_search",
    "prepare",
    "prepare_best_products",
    "prepare_k_loop_fold",
    "prepare_listed",
    "prepare_side",
    "prepared_folds",
    "record",
    "run",
    "run_k_loop_fold",
    "run_listed",
    "skip_launches",
    "small_kernels",
    "sums_batch",
    "takes_k_loop",
    "topk",
    "use_plan",
    "user_kernels",
    "warn_fallback",
    "watch_resources",
]

prepare_best_products = topk.prepare_best_products

_warned: set[tuple[Fold, str]] = set()


def run(
    fold: Fold, leaves: list[Any], sizes: Sizes, fallback: Callable[..., list[Tensor]] | None = None
) -> list[Tensor]:
    """Run a fold. Leaves are ``[*batch, M or N, f]`` or Python numbers; results come back the same way."""
    try:
        return _run(fold, leaves, sizes)
    except Unsupported as reason:
        warn_fallback(fold, reason, None if fallback is None else "the eager engine runs")
        assert fallback is not None
        return fallback(fold, leaves, sizes)


def is_k_loop_fold(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> bool:
    """True for folds of wide vectors that need no panels: 16-bit products folded to numbers, or top-k of products."""
    return topk.find_product(fold, leaves, sizes) is not None or _to_numbers(fold, leaves, sizes)


def _to_numbers(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> bool:
    pairs = zip(fold.leaves, leaves, strict=True)
    vectors = {e: v for e, v in pairs if e.feature is not None and e not in fold.tables}
    narrow = spec_from_tensors.narrow_type(vectors, sizes) is not None
    return takes_k_loop(fold, max([0, *(sizes.of(str(e.feature)) for e in vectors)]), narrow)


def run_k_loop_fold(fold: Fold, leaves: list[Any], sizes: Sizes) -> list[Tensor]:
    """Run such a fold; raises Unsupported for all others."""
    factors = topk.find_product(fold, leaves, sizes)
    if factors is None and not _to_numbers(fold, leaves, sizes):
        raise Unsupported("products of 16 bits that are folded to numbers have kernels of their own")
    return topk.select_best_products(fold, *factors, sizes) if factors else _run(fold, leaves, sizes)


def prepare_k_loop_fold(fold: Fold, leaves: list[Any], sizes: Sizes) -> PreparedFold | None:
    """Such a fold prepared for leaves like these; None for other folds, and where torch does a part."""
    alone = topk.find_product(fold, leaves, sizes) is None and _to_numbers(fold, leaves, sizes)
    return prepare(fold, leaves, sizes) if alone else None


def warn_fallback(fold: Fold, reason: Unsupported, instead: str | None) -> None:
    """Warn once that another engine runs a fold; raise EngineError if there is none, or with ``strict``."""
    if instead is None or settings.current.get().strict:
        raise EngineError(
            detail=f"the Triton engine cannot run this fold: {reason}",
            fix='Use mr.use(engine="eager"), or leave strict out to let that engine run it with a warning',
        ) from None
    if (fold, str(reason)) not in _warned:
        _warned.add((fold, str(reason)))
        warnings.warn(FallbackWarning(f"{instead} what has no kernel: {reason}"), stacklevel=3)


def _run(fold: Fold, leaves: list[Any], sizes: Sizes) -> list[Tensor]:
    if selects_from_panels(fold):
        return topk.run_large(fold, leaves, sizes, _run)
    return prepare_or_refuse(fold, leaves, sizes)(leaves)


def prepare_side(
    side: Elementwise, leaves: Sequence[Any], sizes: Sizes
) -> Callable[[Sequence[Any]], list[Tensor]] | None:
    """Arithmetic on rows or columns alone as one launch, for leaves like these; None where it has no kernel."""
    try:
        return elementwise.ElementwiseLaunch(side, leaves, sizes)
    except Unsupported:
        return None


def sums_batch(batch: tuple[int, ...], r: Expr, sizes: Sizes) -> bool:
    """True when the kernel of a gradient is expected to sum it over the batch too; ``batch``: the dimensions of the
    call, 1 where it is summed."""
    length = sizes.rows if r.attrs[1] == "cols" else sizes.cols
    kept = math.prod(n for n, own in zip(sizes.batch, batch, strict=True) if own != 1)
    return kept * -(-length // 64) >= fold_kernel.LEAST_INSTANCES * driver.count_processors(sizes.device)
