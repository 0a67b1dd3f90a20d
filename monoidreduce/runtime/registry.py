"""Which engine runs: the registry, and the user's override.

``mr.use(engine="eager")`` or the variable ``MONOIDREDUCE_ENGINE`` override the choice. An engine's contract is one
function: run this fold, on these tensors, of these sizes; return the value of each reduction. ``reference`` is the
exception: it runs the whole traced program on all pairs, so that it shares as little as possible with what it
checks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import tuning
from ..engines import eager, listed, panel, triton
from ..engines.common import matmul, oom_retry, skip_small_tiles
from ..engines.common.evaluate import Sizes
from ..engines.common.subproblem import choose_leaves, keep_reductions
from ..engines.ranks import distributed_fold
from ..errors import EngineError
from ..plan import settings
from ..plan.settings import REFERENCE_LIMIT
from ..program.lower import Fold, find_same_sequence
from ..reductions import kind_of


def _run_kernels(fold: Fold, leaves: list[Any], sizes: Sizes) -> list[torch.Tensor]:
    """One kernel a direction where features fit in registers, or only numbers are asked; panels where they do not."""
    if panel.is_wide(fold, sizes) and settings.kernels_run_on(sizes.device):
        for run in (triton.run_k_loop_fold, functools.partial(panel.run, step_class=triton.KernelStep)):
            try:
                return run(fold, leaves, sizes)
            except triton.Unsupported:  # of both: told, and run by the eager engine, below
                pass
    return triton.run(fold, leaves, sizes, fallback=eager.run)


def _run_panels(fold: Fold, leaves: list[Any], sizes: Sizes) -> list[torch.Tensor]:
    """The panel schedule for every fold; in torch where there is no kernel."""
    if not torch.Size(sizes.batch).numel() or panel.writes_pairs(fold):
        return eager.run(fold, leaves, sizes)
    try:
        return panel.run(fold, leaves, sizes, choose_step_class("panel", sizes.device))
    except triton.Unsupported as reason:
        triton.warn_fallback(fold, reason, "panels in torch run")
        return panel.run(fold, leaves, sizes)


def choose_step_class(engine: str, device: torch.device) -> panel.StepClass:
    """How an engine does things to a panel."""
    return triton.KernelStep if engine != "eager" and settings.kernels_run_on(device) else panel.TorchStep


def can_record(engine: str, sizes: Sizes) -> bool:
    """Whether an engine's folds are launches on this device, which are recorded (``replay.py``)."""
    launches = engine in ("auto", "triton") and bool(sizes.rows) and bool(sizes.cols)
    return launches and settings.kernels_run_on(sizes.device)


def _add_lists(run: Callable, inner: Callable, kernels: bool = False) -> Callable:
    """An engine that also folds listed pairs, with ``inner`` for the batches of pieces; ``kernels``: by kernels that
    read the lists, where there are any."""

    def run_engine(fold: Fold, leaves: list[Any], sizes: Sizes) -> list[torch.Tensor]:
        compiled = kernels and settings.kernels_run_on(sizes.device)
        if fold.domain is None:
            packed = not compiled and find_same_sequence(fold) is not None
            found = listed.run_packed(fold, leaves, sizes, inner) if packed else None
            return run(fold, leaves, sizes) if found is None else found
        if not compiled:
            return listed.run(fold, leaves, sizes, inner)
        try:
            return triton.run_listed(fold, leaves, sizes)
        except triton.Unsupported as reason:
            if all((sizes.rows, sizes.cols, *sizes.batch)):
                triton.warn_fallback(fold, reason, "gathered pieces of lists run")
            found = _gather_tables(fold, leaves, sizes, inner)
            return listed.run(fold, leaves, sizes, inner) if found is None else found

    return run_engine


def _gather_tables(fold: Fold, leaves: list[Any], sizes: Sizes, inner: Callable) -> list[torch.Tensor] | None:
    """Gradients of tables by gathered pieces, all other reductions by kernels that read the lists; None where there
    are no others, or they have no kernel."""
    tables = tuple(k for k, r in enumerate(fold.reductions) if kind_of(r).both_axes)
    others = tuple(k for k in range(len(fold.reductions)) if k not in tables)
    if not tables or not others:
        return None
    rest, own = keep_reductions(fold, others), keep_reductions(fold, tables)
    try:
        by_kernels = triton.run_listed(rest, choose_leaves(fold, leaves, rest), sizes)
    except triton.Unsupported:
        return None
    gathered = listed.run(own, choose_leaves(fold, leaves, own), sizes, inner)
    found = dict(zip((*rest.outputs, *own.outputs), (*by_kernels, *gathered), strict=True))
    return [found[o] for o in fold.outputs]


def _run_pieces(fold: Fold, leaves: list[Any], sizes: Sizes) -> list[torch.Tensor]:
    """A batch of pieces: kernels where there are any, else tiles in torch."""
    return (_run_kernels if settings.kernels_run_on(sizes.device) else eager.run)(fold, leaves, sizes)


ENGINES: dict[str, Callable] = {
    "eager": _add_lists(eager.run, eager.run),
    "panel": _add_lists(_run_panels, eager.run),
    "triton": _add_lists(_run_kernels, _run_pieces, kernels=True),
    "auto": _add_lists(tuning.run, _run_pieces, kernels=True),
}


def _add_retry(run: Callable) -> Callable:
    """An engine that runs a fold once more under a smaller memory budget when memory runs out."""

    def run_fold(fold: Fold, leaves: Any, sizes: Sizes) -> list[torch.Tensor]:
        try:
            return run(fold, leaves, sizes)
        except Exception as error:
            oom_retry.find_reason(error)  # raises any other error again
        oom_retry.release_memory(sizes.device)
        return oom_retry.run_smaller(run, (fold, leaves, sizes), sizes, fold)

    return run_fold


FOLDERS = {name: _add_retry(run) for name, run in ENGINES.items()}
# by engine: what differentiates monoids without a local gradient, where it is not ``engines/common/block_gradients.py``
BLOCK_GRADIENTS: dict[str, Callable[..., list[torch.Tensor | None]]] = {}


def engine() -> str:
    """The engine in force: of the innermost ``use``, else of the environment, else ``auto``."""
    return str(settings.now().engine)


def sharded_folder() -> Callable:
    """What runs folds over many ranks: the engine in force, on each of them."""
    name = engine()
    if name == "reference":
        raise EngineError(detail="the reference engine knows one process only", fix='Use mr.use(engine="eager")')
    return functools.partial(distributed_fold.run, engine=FOLDERS[name])


def automatic() -> contextlib.AbstractContextManager[None]:
    """The engine ``auto`` inside the block, all other settings as they are."""
    return settings.change(engine="auto")


@contextlib.contextmanager
def use(
    engine: str | None = None,
    *,
    limit: int | None = REFERENCE_LIMIT,
    precision: str | None = None,
    strict: bool | None = None,
    tune: bool | None = None,
    budget: int | str | None = None,
    skip_below: float | None = None,
    check: bool | None = None,
) -> Iterator[None]:
    """Choose inside the block how ops run; what is not said stays as it is outside of it.

    ``engine``: ``auto``, ``eager``, ``panel``, ``reference`` or ``triton``. ``limit`` bounds the pair elements of
    ``reference`` (None: no bound). ``precision``: how kernels multiply float32 numbers: ``ieee`` (as exact as float32
    is), ``tf32`` or ``tf32x3`` (almost float32, on the matrix units); where nobody says, torch's own switch is
    followed, ``torch.set_float32_matmul_precision``. ``strict``: what has no kernel is an error instead of a warning.
    ``tune``: every call tries one more plan for its folds, until the fastest is known (engine ``auto``). ``budget``: as
    :class:`mr.budget <monoidreduce.plan.budget.budget>`. ``skip_below``: as
    :class:`mr.skip_below <monoidreduce.engines.common.skip_small_tiles.skip_below>`. ``check``: the lists of a domain
    (``cols=``) and indices of tables (:func:`mr.lookup <monoidreduce.lookup>`) are read and checked on GPUs too, which
    waits for the GPU; on a CPU they always are.

    >>> import monoidreduce as mr
    >>> with mr.use(engine="eager"):
    ...     pass
    """
    if precision is not None and precision not in matmul.PRECISIONS:
        raise EngineError(
            detail=f"mr.use was given the precision {precision!r}", fix=f"Use one of {', '.join(matmul.PRECISIONS)}"
        )
    given: dict[str, Any] = dict(precision=precision, strict=strict, tune=tune, check=check)
    given["engine"] = None if engine is None else settings.check_engine(engine, "mr.use")
    given["limit"] = None if limit == REFERENCE_LIMIT else limit
    given["budget"] = None if budget is None else settings.parse_bytes(budget)
    given["skip_below"] = None if skip_below is None else skip_small_tiles.skip_below(skip_below)
    fields = {name: value for name, value in given.items() if value is not None}
    if limit is None:  # no bound
        fields["limit"] = None
    with settings.change(**fields):
        yield
