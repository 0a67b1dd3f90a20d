"""Dry runs: execute a call without its numbers, and count what it would compute, move and allocate.

Two ways to run without numbers, both under a :class:`LiveMemory` mode that sees every torch operation:

- **small tensors** (:class:`Scale`): every axis gets a prime length of its own, so any size that turns up factors into
  the axes it is made of and can be scaled back to the real call. Used for whatever torch runs on real numbers. (Meta
  tensors would do as well, after a second of imports.)
- **meta tensors** (:class:`MetaMemory`): real shapes, no storage, kernels not launched. Used for GPU engines.

:func:`dry_run` goes through a whole call, forward and backward: floating operations of matrix products, bytes read and
written, launches, peak memory; folds are not executed but listed with their leaves, for the cost model
(``call_cost.py``) and the memory estimate (``memory_estimate.py``).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ..engines import triton
from ..engines.common import block_gradients, evaluate, matmul, skip_small_tiles
from ..engines.common.evaluate import Form, Sizes
from ..engines.common.gradient_program import private_graphs
from ..errors import NoGradientError
from ..plan.candidates import SPECIAL, DeviceRates
from ..program.expression import Expr, letters
from ..program.lower import Fold
from ..reductions import KINDS
from . import dispatch, torch_operator
from .autograd import DRY_RUN, ELEMENTWISE_STEPS, ElementwiseRun, ElementwiseStep

_CPU, _META = torch.device("cpu"), torch.device("meta")


# Memory alive at once -----------------------------------------------------------------------------------------


@functools.cache
def _is_composite(func: Any) -> bool:
    """True for an operator that only calls other operators. Cached: asking the dispatcher costs more than most ops."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


_DIVISIONS = ("aten::floor_divide", "aten::remainder", "aten::fmod", "aten::div")


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of storages created inside the block; ``peak`` is the most that were alive at once.

    Storages of ``given`` (the inputs) are not counted. Memory that an operator allocates and frees before it returns
    is not seen.
    """

    def __init__(self, given: Sequence[Tensor] = ()):
        super().__init__()
        self.given = {id(t.untyped_storage()): t.untyped_storage() for t in given}
        self.live: dict[int, int] = {}
        self.total = self.peak = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here, and torch's guard against it would import Dynamo, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func._schema.name == "monoidreduce::fold":  # count what our operator does inside
            with self:
                result = torch_operator._run(*args, **(kwargs or {}))
        elif _is_composite(func):  # a mode receives composite operators whole
            with self:
                result = func.decompose(*args, **(kwargs or {}))
        else:
            result = self.run_operation(func, args, kwargs or {})
            self.on_operation(func, args, kwargs or {}, result)
        for t in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(t, Tensor):
                self._track(t)
        return result

    def run_operation(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Execute one operator. A dry run's numbers are made up: integer divisors that are 0 become 1."""
        divides = func._schema.name in _DIVISIONS and isinstance(args[1], Tensor) and not args[1].is_floating_point()
        return (
            func(args[0], args[1].masked_fill(args[1] == 0, 1), *args[2:], **kwargs)
            if divides
            else func(*args, **kwargs)
        )

    def on_operation(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """Called after every operator; for subclasses."""

    def on_growth(self, t: Tensor, size: int) -> None:
        """Called when a storage is new, or larger than it was; for subclasses."""

    def size(self, t: Tensor) -> int:
        """Bytes of a tensor's storage."""
        return 0 if t.is_meta else t.untyped_storage().nbytes()

    def _track(self, t: Tensor) -> None:
        if t.layout is not torch.strided:  # its parts are tensors of their own
            return
        storage = t.untyped_storage()
        key, size = id(storage), self.size(t)
        if key in self.given or self.live.get(key, -1) >= size:
            return
        if key not in self.live:
            weakref.finalize(storage, self._release, key).atexit = False
        self.total += size - self.live.get(key, 0)
        self.live[key] = size
        self.peak = max(self.peak, self.total)
        self.on_growth(t, size)

    def _release(self, key: int) -> None:
        self.total -= self.live.pop(key, 0)


class MetaMemory(LiveMemory):
    """Bytes that meta tensors would take.

    For most operators torch computes meta results in Python and imports its compiler to do so, which takes seconds. So
    an operator that writes in place is skipped, and of a pointwise operator only the result's shape and type are made.
    """

    def __init__(self, leaves: Sequence[Any]):
        super().__init__([v for v in leaves if isinstance(v, Tensor)])

    def run_operation(self, func: Any, args: tuple, kwargs: dict) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if not any(t.is_meta for t in given):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return kwargs.get("out", args[0])
        if torch.Tag.pointwise not in func.tags:
            return func(*args, **kwargs)
        one = tree_map_only(Tensor, lambda t: torch.ones((1,) * t.dim(), dtype=t.dtype, device="cpu"), (args, kwargs))
        made: Tensor = func(*one[0], **one[1])
        return torch.empty(_broadcast_shape(given), dtype=made.dtype, device=_META)

    def size(self, t: Tensor) -> int:
        return t.untyped_storage().nbytes() if t.is_meta else 0


def _broadcast_shape(given: list[Tensor]) -> tuple[int, ...]:
    """The shape of a pointwise operator's result."""
    longest = max(t.dim() for t in given)
    shapes = [(1,) * (longest - t.dim()) + tuple(t.shape) for t in given]
    return tuple(next((n for n in lengths if n != 1), 1) for lengths in zip(*shapes, strict=True))


# Small lengths that stand for real ones -----------------------------------------------------------------------

_PRIMES = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167, 173, 179, 181, 191, 193, 197, 199)
_MANY = (257,)
_LITERAL = 16  # lengths up to here stay as they are: a body may index a feature by its number


class Scale:
    """Maps the lengths of a call to small primes, and products of small lengths back to real ones.

    ``most``: a length that every small axis must exceed (the k of a top-k); ``tiles``: tile lengths, which get primes
    smaller than those of the axes they are cut from.
    """

    def __init__(self, sizes: Sizes, most: int = 0, tiles: Sequence[int] = ()):
        products = {letter: n for letter, n in sizes.letters.items() if len(letters(letter)) > 1}
        own = (n for letter, n in sizes.letters.items() if letter not in products)
        lengths = {*sizes.batch, sizes.rows, sizes.cols, *own, *tiles}
        primes = iter(p for p in _PRIMES if p > most)
        self.small: dict[int, int] = {n: next(primes, n) for n in sorted(lengths) if n > _LITERAL}
        if not tiles and sizes.rows > matmul._SMALL_ROWS:  # a product of more rows takes another path in matmul.py
            self.small[sizes.rows] = next((p for p in _MANY if p > most), sizes.rows)
        self.real = {p: n for n, p in self.small.items()}
        for letter, n in products.items():
            self.small[n] = math.prod(self.down(sizes.of(one)) for one in letters(letter))

    def down(self, length: int) -> int:
        """The small length of an axis."""
        return self.small.get(length, length)

    def up(self, number: float) -> int:
        """The product of real lengths that a product of small lengths stands for."""
        rest, found = int(number), 1
        if not rest:
            return 0
        for prime, length in self.real.items():
            while rest % prime == 0:
                rest //= prime
                found *= length
        return found * rest

    def sizes(self, sizes: Sizes) -> Sizes:
        """The small sizes of a call, on the CPU."""
        letters = {k: self.down(n) for k, n in sizes.letters.items()}
        batch = tuple(map(self.down, sizes.batch))
        rows, cols = self.down(sizes.rows), self.down(sizes.cols)
        return replace(sizes, rows=rows, cols=cols, batch=batch, letters=letters, device=_CPU)

    def constant_tensor(self, t: Tensor, backward: bool) -> Tensor:
        """A small tensor of one number, which every index and logarithm accepts: 0.5, or 0 for integers."""
        shape = [self.down(n) for n in t.shape]
        made = torch.full(shape, 0.5 if t.is_floating_point() else 0, dtype=t.dtype, device="cpu")
        return made.requires_grad_(backward and t.requires_grad)

    def varied_leaf(self, v: Any) -> Any:
        """A small leaf of many different numbers: distances of 0 would take another path. Numbers stay as they are."""
        if not isinstance(v, Tensor):
            return v
        shape = [self.down(n) for n in v.shape]
        if not v.is_floating_point():
            return torch.zeros(shape, dtype=v.dtype, device="cpu")
        count = torch.Size(shape).numel()
        return torch.arange(count, dtype=torch.float64, device="cpu").mul_(0.6180339887).frac_().to(v.dtype).view(shape)

    def real_leaf(self, v: Any) -> Any:
        """A meta tensor of the real shape that a small leaf stands for. Numbers stay as they are."""
        if not isinstance(v, Tensor):
            return v
        return torch.empty([self.up(n) for n in v.shape], dtype=v.dtype, device="meta")


class ScaledMemory(LiveMemory):
    """Bytes alive at once in a run on small tensors, scaled to the real lengths."""

    def __init__(self, scale: Scale, given: Sequence[Tensor]):
        super().__init__(given)
        self.scale = scale

    def size(self, t: Tensor) -> int:
        return self.scale.up(t.untyped_storage().nbytes() // t.element_size()) * t.element_size()


@contextlib.contextmanager
def track_small_run(scale: Scale, leaves: Sequence[Any] = ()) -> Iterator[ScaledMemory]:
    """Count the memory that a run on small ``leaves`` allocates inside the block, unseen by other modes and tallies."""
    given = [v for v in leaves if isinstance(v, Tensor)]
    with (
        _disable_current_modes(),
        torch.no_grad(),
        skip_small_tiles.pause_counting(),
        ScaledMemory(scale, given) as memory,
    ):
        yield memory


@contextlib.contextmanager
def track_meta_run(leaves: Sequence[Any], sizes: Sizes) -> Iterator[MetaMemory]:
    """Count the memory that a run on meta ``leaves`` allocates inside the block; ``sizes``: those of the real call.

    Kernels are not launched, and matrix products take the path that they take on a GPU."""
    unseen = (_disable_current_modes(), torch.no_grad(), skip_small_tiles.pause_counting(), triton.skip_launches())
    with contextlib.ExitStack() as stack:
        for context in (_stand_for(sizes), *unseen):
            stack.enter_context(context)
        yield stack.enter_context(MetaMemory(leaves))


@contextlib.contextmanager
def _stand_for(sizes: Sizes | None) -> Iterator[None]:
    """Inside the block, CPU or meta tensors stand for those of a call of ``sizes`` on a GPU (unless None)."""
    token = matmul.dry_run_sizes.set(sizes)
    try:
        yield
    finally:
        matmul.dry_run_sizes.reset(token)


# A whole call -------------------------------------------------------------------------------------------------

# operators that neither compute nor move numbers, by the beginning of their names
_VIEWS = ("view", "expand", "transpose", "squeeze", "select", "slice", "detach", "alias", "permute", "t.", "unbind")
_FREE_OPERATORS = (*_VIEWS, "empty")


@dataclass(frozen=True)
class FoldCall:
    """One fold of a call: the program, its leaves as meta tensors, and the bytes that the call holds beside it."""

    fold: Fold
    leaves: tuple[Any, ...]
    sizes: Sizes
    backward: bool
    beside: int  # bytes alive when it begins


@dataclass
class DryRun:
    """What a call would do: torch's own operators added up, folds listed."""

    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0
    launches: int = 0
    peak: int = 0
    results: int = 0  # bytes of the results, and of the gradients
    folds: list[FoldCall] = field(default_factory=list)


def dry_run(
    call: Callable[..., Sequence[Any]],
    inputs: Mapping[str, Any],
    sizes: Sizes,
    rates: DeviceRates,
    most: int = 0,
    *,
    backward: bool,
) -> DryRun:
    """Go through ``call(inputs, sizes)`` on small tensors, and its backward if an input requires a gradient.

    ``inputs`` by name, Python numbers as they are. Cotangents are ones, expanded. ``most``: a length that every axis
    must exceed (the k of a top-k).
    """
    scale = Scale(sizes, most)
    with torch.set_grad_enabled(backward), _disable_current_modes(), private_graphs():
        given = {n: scale.constant_tensor(v, backward) if isinstance(v, Tensor) else v for n, v in inputs.items()}
        tensors = [v for v in given.values() if isinstance(v, Tensor)]
        on_gpu = sizes if sizes.device.type == "cuda" else None
        with _CallCounter(sizes, scale, rates, tensors) as counter, _use_counter(counter), _stand_for(on_gpu):
            found = [v for v in call(given, scale.sizes(sizes)) if isinstance(v, Tensor)]
            values = [v for v in found if v.requires_grad]
            gradients: tuple[Tensor, ...] = ()
            if backward and values:
                counter.backward = True
                wanted = [t for t in tensors if t.requires_grad]
                ones = [torch.ones((), dtype=v.dtype, device="cpu").expand(v.shape) for v in values]
                with contextlib.suppress(NoGradientError):  # which only a backward that is asked for may raise
                    gradients = _run_backward(values, wanted, ones)
                del ones
            counter.found.results = counter.total
            del found, values, gradients
    counter.found.peak = counter.peak
    return counter.found


class _CallCounter(ScaledMemory):
    """Adds up every operator inside the block, at the real lengths; lists folds instead of running them."""

    def __init__(self, sizes: Sizes, scale: Scale, rates: DeviceRates, given: Sequence[Tensor]):
        super().__init__(scale, given)
        self.sizes, self.rates = sizes, rates
        self.backward = False
        self.found = DryRun()

    def list_fold(self, fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> list[Tensor]:
        """The engine of a dry run: lists a fold and returns results that hold no numbers of interest."""
        with _disable_current_modes():
            given = tuple(map(self.scale.real_leaf, leaves))
        self.found.folds.append(FoldCall(fold, given, self.sizes, self.backward, self.total))
        made = result_forms(fold, leaves, sizes, self.sizes.device)
        return [
            torch.full(shape, 0.5 if dtype.is_floating_point else 0, dtype=dtype, device="cpu") for shape, dtype in made
        ]

    def count_block_gradients(
        self,
        fold: Fold,
        leaves: Sequence[Any],
        sizes: Sizes,
        wanted: Sequence[bool],
        cotangents: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """The gradients by blocks (``common/block_gradients.py``) of a dry run, by their own formula: the
        tree of a small block says nothing of a large one's."""
        for one, _ in block_gradients.iterate_block_reductions(fold, cotangents):
            cost, found = block_gradients.estimate_gradient(one, self.sizes, self.rates), self.found
            found.flops, found.bytes = found.flops + cost.flops, found.bytes + cost.bytes
            found.seconds += cost.seconds
            self.peak = max(self.peak, self.total + cost.peak)
        return [
            torch.zeros_like(v) if w and isinstance(v, Tensor) else None for v, w in zip(leaves, wanted, strict=True)
        ]

    def on_operation(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        name = func.__name__
        if name.startswith(_FREE_OPERATORS) or func._overloadpacket is torch.ops.aten.t:
            return
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        up = self.scale.up
        moved = sum(up(_count_numbers_read(t)) * t.element_size() for t in tensors)
        made = max((up(t.numel()) for t in tensors), default=0)
        found, rates = self.found, self.rates
        found.bytes += moved
        found.launches += 1
        time = moved / (rates.bandwidth if moved > rates.near else max(rates.bandwidth, rates.plain * 4))
        if (count := _count_flops(name, args, result)) is not None:
            flops = up(count)
            found.flops += flops
            sides = [up(n) for t in tensors[-3:] for n in t.shape[-2:]]  # two operands and the result: each side twice
            share = rates.efficiency(*sorted(sides)[::2])
            time = max(time, flops / (rates.rate(str(tensors[-1].dtype)[6:]) * share))
        elif (weight := _count_exponentials(name, args)) > 0:
            time = max(time, made * weight / rates.special)
        else:
            time = max(time, made * _count_plain(name, tensors) / rates.plain)
        new = sum(up(t.numel()) * t.element_size() for t in tree_leaves(result) if isinstance(t, Tensor))
        fresh = new * rates.fresh if new > rates.near and not name.endswith("_") else 0.0
        found.seconds += time + rates.launch + fresh


def result_forms(fold: Fold, leaves: Sequence[Any], sizes: Sizes, device: torch.device) -> list[Form]:
    """Shape and type of a fold's results. On a GPU, sums of 16-bit vectors are stored in 16 bits, and gradients are
    summed over the batch by their kernels where that leaves enough to do at the same time."""
    if device.type != "cuda":
        return torch_operator.list_result_forms(fold, list(leaves), sizes)
    made = torch_operator.list_narrow_result_forms(fold, leaves, sizes)
    if not fold.gradients:
        return made
    pairs = zip(made, fold.outputs, strict=True)
    return [(_sum_shape(fold, r, shape, leaves, sizes), dtype) for (shape, dtype), (r, _) in pairs]


def _sum_shape(fold: Fold, r: Expr, shape: tuple[int, ...], leaves: Sequence[Any], sizes: Sizes) -> tuple[int, ...]:
    """The shape of a result after the sum over the batch that its kernel makes, if it does."""
    batch = evaluate.summed_batch(fold, r, leaves, sizes)
    real = matmul.dry_run_sizes.get() or sizes
    named = r in fold.gradient_of and r.attrs[0] == "sum"
    if not named or batch == sizes.batch or not triton.sums_batch(batch, r, real):
        return shape
    return *batch, *shape[len(batch) :]


def _count_exponentials(name: str, args: tuple) -> float:
    """How many exponentials a torch operator computes per number; a small integer power computes none."""
    plain = name.split(".")[0].removesuffix("_backward").rstrip("_")
    whole = plain == "pow" and not isinstance(args[1], Tensor) and args[1] in (0, 1, 2, 3)
    return 0.0 if whole else SPECIAL.get(plain, 0.0)


def _count_plain(name: str, tensors: Sequence[Tensor]) -> float:
    """How many plain operations a torch operator takes per number; inner loops over few features cost five times."""
    if name.startswith(("argmax", "argmin", "topk", "sort")):
        return KINDS["best"].plain_ops
    short = max((t.dim() for t in tensors), default=0) > 2 and tensors[-1].dim() and tensors[-1].shape[-1] <= _LITERAL
    return 5.0 if short else 1.0


# Products by operator, and which argument is the first factor. Torch's own table, ``torch.utils.flop_counter``, imports
# Triton; convolutions and attention, which it has too, are no operators of a fold.
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}


def _count_flops(name: str, args: tuple, result: Any) -> int | None:
    """The floating-point operations of a product; None for other operators."""
    at = _PRODUCTS.get(name.split(".")[0].rstrip("_"))
    return None if at is None else 2 * result.numel() * args[at].shape[-1]


def _count_numbers_read(t: Tensor) -> int:
    """How many numbers reading a tensor touches: a broadcast dimension is read once."""
    count = 1
    for length, stride in zip(t.shape, t.stride(), strict=True):
        count *= length if stride else 1
    return count


def _run_backward(
    values: Sequence[Tensor], wanted: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """``torch.autograd.grad`` without its check of shapes, for which torch imports sympy: 0.5 s."""
    run = torch.autograd.Variable._execution_engine.run_backward
    asked = tuple(wanted)
    return run(tuple(values), tuple(cotangents), False, False, asked, allow_unreachable=True, accumulate_grad=False)


class _DryElementwise(ElementwiseStep):
    """Elementwise arithmetic in a dry run: where a kernel would compute it, only the results are counted."""

    def _prepare_launch(self, leaves: Sequence[Any]) -> ElementwiseRun | None:
        counter = _counter.get()
        with _disable_current_modes():
            found = triton.prepare_side(self.group, [counter.scale.real_leaf(v) for v in leaves], counter.sizes)
        return None if found is None else self._run_uncounted

    def _run_uncounted(self, leaves: Sequence[Any]) -> list[Tensor]:
        with _disable_current_modes():
            found = self._run_in_torch()(leaves)
        return [t.clone() for t in found]


_counter: contextvars.ContextVar[_CallCounter] = contextvars.ContextVar("counter")
ELEMENTWISE_STEPS[DRY_RUN] = _DryElementwise
dispatch.BLOCK_GRADIENTS[DRY_RUN] = lambda *given: _counter.get().count_block_gradients(*given)
dispatch.FOLDERS[DRY_RUN] = lambda fold, leaves, sizes: _counter.get().list_fold(fold, leaves, sizes)


@contextlib.contextmanager
def _use_counter(counter: _CallCounter) -> Iterator[None]:
    token = _counter.set(counter)
    try:
        yield
    finally:
        _counter.reset(token)
