"""What runs a call: the engines, which of them is in force, what around the call has a say in it, and in which form.

``mr.use(engine="eager")`` or the variable ``MONOIDREDUCE_ENGINE`` override the choice. An engine's contract is one
function: run this fold, on these tensors, of these sizes; return the value of each reduction. ``reference`` is the
exception: it runs the whole traced program on all pairs, so that it shares as little as possible with what it
checks.

A call on plain tensors that nobody traces takes the fast paths (a cached plan, recorded launches). The settings are one
value in a context variable (``plan/settings.py``), and torch runs a backward on a GPU in a thread of its own, where no
block of the caller's is open: so the forward keeps its settings, and the backward applies them.

A forward takes its form for the sake of its gradients:

**Products of 16-bit vectors that are not rounded.** A forward in one kernel has its products in float32. A gradient
that reads them from a panel of bfloat16 divides by the forward's sum of exponentials, which must be that of the same
numbers: of exact ones, it would miss the largest weights of a peaked softmax by several per cent. So such a forward
rounds its products, unless its gradients, too, are written by products of our own, which have theirs in float32
(``engines/triton/panel/epilogue.py``). Which it will be is predicted here, and said in the fold (``Fold.exact``).
Gradients inherit it, gradients of gradients too, and whoever runs them obeys: where panels are the vendor's after all
they hold float32. A prediction that fails costs memory and time, and no digits.

**Gradients of rows that the forward saves** (``program/gradient.py``). It pays where kernels run and pairs are
many: a product less in all, for the price of one vector per row that is held until the backward. Under a memory budget
the usual path is taken, and so it is by a backward that is itself to be differentiated. Targets that are data (labels
in any order) lie in every tile, so that no tile goes without a condition and a running maximum: they take the usual
path too.

Three small expressions around folds (:func:`row_dot`, ...) have kernels of their own on a GPU. Each function is its
torch expression; where its arguments are plain tensors on a GPU and the Triton engine has a kernel
for them, that runs instead: one launch, and 16-bit numbers are converted as they are read.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import tuning
from ..engines import eager, listed, panel, triton
from ..engines.common import evaluate, matmul, oom_retry, skip_small_tiles, subproblem
from ..engines.common.evaluate import Sizes
from ..engines.common.matmul import SIXTEEN, dry_run_sizes
from ..engines.panel import as_program, split_into_loops
from ..engines.ranks import distributed_fold
from ..errors import EngineError, NoGradientError
from ..plan import panel_layout, settings
from ..plan.settings import REFERENCE_LIMIT, Settings
from ..program.expression import Expr, topological
from ..program.gradient import FoldGradient, SavingFold, fold_saving_row_gradients
from ..program.lower import Fold, Lowered, Pass, compile_program, find_same_sequence
from ..program.trace import Parameter

# The engines


def _run_kernels(fold: Fold, leaves: list[Any], sizes: Sizes) -> list[torch.Tensor]:
    """One kernel a direction where features fit in registers, or only numbers are asked; panels where they do not."""
    if takes_panels(fold, sizes) and settings.kernels_run_on(sizes.device):
        for run in (triton.run_k_loop_fold, functools.partial(panel.run, step_class=triton.KernelStep)):
            try:
                return run(fold, leaves, sizes)
            except triton.Unsupported:  # of both: told, and run by the eager engine, below
                pass
    return triton.run(fold, leaves, sizes, fallback=eager.run)


def takes_panels(fold: Fold, sizes: Sizes) -> bool:
    """Whether kernels take panels for a fold: it has pairs, and vectors of more features than registers hold."""
    if all(sizes.of(letter) <= panel_layout.NARROW for letter in fold.letters):
        return False
    return bool(torch.Size(sizes.batch).numel() * sizes.rows * sizes.cols) and not panel.writes_pairs(fold)


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

    def gather(fold: Fold, leaves: list[Any], sizes: Sizes) -> list[torch.Tensor]:
        return listed.run(fold, leaves, sizes, inner, eager.run_blocks)

    def run_engine(fold: Fold, leaves: list[Any], sizes: Sizes) -> list[torch.Tensor]:
        compiled = kernels and settings.kernels_run_on(sizes.device)
        sequences = not compiled and fold.domain is None and find_same_sequence(fold.reductions) is not None
        if fold.domain is None and not sequences:
            return run(fold, leaves, sizes)
        if (named := subproblem.find_named_pairs(fold)) is not None:
            return named.run(fold, leaves, sizes, run, run_engine)
        try:
            if compiled:
                return triton.run_listed(fold, leaves, sizes, gather)
            if asked:
                triton.check_device(sizes.device)
        except triton.Unsupported as reason:
            if all((sizes.rows, sizes.cols, *sizes.batch)):
                triton.warn_fallback(fold, reason, "gathered pieces of lists run")
        if fold.domain is not None:
            return gather(fold, leaves, sizes)
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
    if precision is not None and precision not in evaluate.PRECISIONS:
        raise EngineError(
            detail=f"mr.use was given the precision {precision!r}", fix=f"Use one of {', '.join(evaluate.PRECISIONS)}"
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
    return None if state is None else (*state, evaluate.float32_precision())


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


MANY = 2**24  # pairs from which saved row gradients pay


def mark_exact_folds(program: Lowered, needed: frozenset[str], sizes: Sizes) -> Lowered:
    """The same program; its folds say which of them keep their products exact.

    ``needed``: the inputs whose gradients may be needed; those of vectors always may."""
    if not settings.kernels_run_on(sizes.device):
        return program
    letters = {letter: sizes.of(letter) > triton.WIDEST for p in program.passes for letter in p.fold.letters}
    if not any(letters.values()) or not triton.driver.has_fast_epilogues(sizes.device):
        return program
    given = (needed, tuple(letters.items()), sizes.device, sizes.compute)
    return _mark_passes(program, tuple(_keeps_exact(p, *given) for p in program.passes))


@functools.lru_cache(maxsize=1024)
def _mark_passes(program: Lowered, exact: tuple[bool, ...]) -> Lowered:
    pairs = zip(program.passes, exact, strict=True)
    passes = tuple(replace(p, fold=replace(p.fold, exact=True)) if is_exact else p for p, is_exact in pairs)
    return replace(program, passes=passes) if any(exact) else program


@functools.lru_cache(maxsize=1024)
def _keeps_exact(p: Pass, needed: frozenset[str], letters: tuple, device: torch.device, compute: torch.dtype) -> bool:
    """Whether a fold's products stay exact: it is a softmax-weighted mean of vectors, or it is done in one kernel and
    its gradients are sums of weights that products of our own write."""
    fold, features = p.fold, {letter: triton.WIDEST + wide for letter, wide in letters}
    if any(r.attrs[0] == "soft" and any(a.feature is not None for a in r.args[1:]) for r in fold.reductions):
        return True  # such a forward never rounds its logits, so its gradients may not either
    if not triton.takes_k_loop(fold, max([0, *(features[letter] for letter in fold.letters)]), narrow=True):
        return False
    pairs = zip(fold.leaves, p.feeds, strict=True)
    wanted = tuple(e.dtype == "float" and _may_need_gradient(feed, needed) for e, feed in pairs)
    try:
        passes = compile_program(FoldGradient(fold, wanted, (True,) * len(fold.outputs))).passes
        found = [loop for one in passes for loop in split_into_loops(as_program(one.fold))]
        sizes = Sizes(1, 1, (), features, device, compute)  # however many rows and columns
        return len(found) == 1 and triton.MemoryPlan(found[0], sizes, {torch.bfloat16}).has_epilogue()
    except (NoGradientError, triton.Unsupported):
        return False


def _may_need_gradient(feed: Expr, needed: frozenset[str]) -> bool:
    inputs = [e for e in topological([feed]) if e.op == "input"]
    return any(e.feature is not None or e.attrs[0] in needed for e in inputs)


def has_many_pairs(sizes: Sizes) -> bool:
    """Whether pairs are so many that it pays."""
    return math.prod(sizes.batch) * sizes.rows * sizes.cols >= MANY


def may_save_row_gradients(fold: Fold) -> bool:
    """Whether a forward may save what the gradients of its rows need: where it folds a logsumexp or sums numbers."""
    return any(r.attrs[0] in ("soft", "sum") and len(r.args) == 1 for r in fold.reductions)


def find_saving_fold(fold: Fold, leaves: Sequence[Any], sizes: Sizes, engine: str) -> SavingFold | None:
    """How a fold saves what its rows' gradients need, where that pays; in a dry run, as the real call would."""
    real = matmul.dry_run_sizes.get()
    sizes = sizes if real is None else real
    kernels = engine == "triton" or (sizes.device.type == "cuda" and (engine == "auto" or real is not None))
    if not kernels or not has_many_pairs(sizes) or fold.domain is not None:
        return None
    if settings.requested_budget() is not None or not settings.kernels_run_on(sizes.device):
        return None
    found = fold_saving_row_gradients(fold, tuple(isinstance(v, Tensor) and v.requires_grad for v in leaves))
    if found is None or (found.target is not None and any(e.op == "leaf" for e in topological([found.target]))):
        return None
    widths = [sizes.of(str(fold.leaves[m.place].feature)) for m in found.means]
    return found if min(widths) > triton.TINY and sum(widths) <= triton.WIDEST else None


def row_dot(x: Tensor, y: Tensor, compute: torch.dtype) -> Tensor:
    """``(x * y).sum(-1)`` in the type ``compute``."""
    on_gpu = x.is_cuda or dry_run_sizes.get() is not None
    plain = type(x) is Tensor and type(y) is Tensor and on_gpu and x.dtype in SIXTEEN and compute is torch.float32
    if plain and not (torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)):
        found = triton.small_kernels.compute_row_dots(x, y) if x.is_cuda else torch.zeros(x.shape[:-1], device="cpu")
        if found is not None:
            return found
    x, y = (t if t.dtype is compute else t.to(compute) for t in (x, y))
    return (x * y).sum(-1)


def label_share(labels: Tensor, ignored: int, dtype: torch.dtype) -> Tensor:
    """``1 / (labels != ignored).sum()`` as a 0-dim tensor: infinite where all labels are ignored."""
    kernel = label_share_kernel(labels, ignored, dtype)
    if kernel is not None:
        return kernel(labels, ignored, dtype)
    return (labels != ignored).sum().to(dtype).reciprocal()


def label_share_kernel(labels: Tensor, ignored: int, dtype: torch.dtype) -> Callable[..., Tensor] | None:
    """The function that computes :func:`label_share` for labels like these by one kernel; None where there is none."""
    plain = labels.is_cuda and type(labels) is Tensor and not torch.compiler.is_compiling()
    return triton.small_kernels.prepare_share(labels, ignored) if plain and dtype is torch.float32 else None


def scale_(x: Tensor, factor: Tensor) -> Tensor:
    """``x.mul_(factor)`` for a 0-dim factor. A factor of 1 reads nothing: gradients of a mean are large."""
    if x.is_cuda and triton.small_kernels.scale_in_place(x, factor):
        return x
    if factor.device.type == "cpu" and float(factor) == 1.0:
        return x
    return x.mul_(factor)
