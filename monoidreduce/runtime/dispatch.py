"""What runs a call: the engines, which of them is in force, and what around the call has a say in it.

``mr.use(engine="eager")`` or the variable ``MONOIDREDUCE_ENGINE`` override the choice. An engine's contract is one
function: run this fold, on these tensors, of these sizes; return the value of each reduction. ``reference`` is the
exception: it runs the whole traced program on all pairs, so that it shares as little as possible with what it
checks.

A call on plain tensors that nobody traces takes the fast paths (a cached plan, recorded launches). The settings are one
value in a context variable (``plan/settings.py``), and torch runs a backward on a GPU in a thread of its own, where no
block of the caller's is open: so the forward keeps its settings, and the backward applies them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import tuning
from ..engines import eager, listed, panel, triton
from ..engines.common import matmul, oom_retry, skip_small_tiles
from ..engines.common.evaluate import Sizes
from ..engines.ranks import distributed_fold
from ..errors import EngineError
from ..plan import settings
from ..plan.settings import REFERENCE_LIMIT, Settings
from ..program.declarations import Parameter
from ..program.lower import Fold, find_same_sequence

# The engines


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


def _add_lists(run: Callable, inner: Callable, kernels: bool = False, asked: bool = False) -> Callable:
    """An engine that also folds listed pairs, with ``inner`` for the batches of pieces; ``kernels``: by kernels that
    read the lists, where there are any; ``asked``: kernels were asked for, and what runs instead is said."""

    def run_engine(fold: Fold, leaves: list[Any], sizes: Sizes) -> list[torch.Tensor]:
        compiled = kernels and settings.kernels_run_on(sizes.device)
        sequences = not compiled and fold.domain is None and find_same_sequence(fold) is not None
        if fold.domain is None and not sequences:
            return run(fold, leaves, sizes)
        try:
            if compiled:
                return triton.run_listed(fold, leaves, sizes)
            if asked:
                triton.check_device(sizes.device)
        except triton.Unsupported as reason:
            if all((sizes.rows, sizes.cols, *sizes.batch)):
                triton.warn_fallback(fold, reason, "gathered pieces of lists run")
        if fold.domain is not None:
            return listed.run(fold, leaves, sizes, inner)
        found = listed.run_packed(fold, leaves, sizes, inner)
        return run(fold, leaves, sizes) if found is None else found

    return run_engine


def _run_pieces(fold: Fold, leaves: list[Any], sizes: Sizes) -> list[torch.Tensor]:
    """A batch of pieces: kernels where there are any, else tiles in torch."""
    return (_run_kernels if settings.kernels_run_on(sizes.device) else eager.run)(fold, leaves, sizes)


ENGINES: dict[str, Callable] = {
    "eager": _add_lists(eager.run, eager.run),
    "panel": _add_lists(_run_panels, _run_pieces, kernels=True),
    "triton": _add_lists(_run_kernels, _run_pieces, kernels=True, asked=True),
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


# The settings in force


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


def launch_key() -> tuple | None:
    """The settings that decide which kernels run a fold, besides its tensors; None where recorded launches must not be
    used."""
    state = settings.launch_state()
    return None if state is None else (*state, matmul.float32_precision())


def apply_settings(then: Settings) -> contextlib.AbstractContextManager[None]:
    """Put the settings of a forward (``settings.now``) in force again inside the block, but for the engine, which its
    folds know."""
    fields = dict(precision=then.precision, strict=then.strict, tune=then.tune, followed=then.followed)
    limit = {} if then.budget is None else {"budget": then.budget}
    return settings.change(**fields, **limit, skip_below=then.skip_below)


# Who sees the calls of torch that are made: tracers, transforms, autograd

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


def include_16_bits(values: Sequence[Any]) -> bool:
    """Whether any of the values has 16 bits."""
    return any([isinstance(v, Tensor) and v.dtype in matmul.SIXTEEN for v in values])


# Autocast
#
# Inside ``torch.autocast`` every floating argument but float64 is cast to the region's type, so that types may be mixed
# there, as in torch's own fused layers; arithmetic and accumulation are ours as always (float32 for 16-bit inputs),
# with autocast off. Outside, mixed types stay an error.


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
