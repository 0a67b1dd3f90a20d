"""A call gone through in small: every operation that torch would run is noted, at the sizes that it would have.

Every axis gets a prime length of its own, so that any size that turns up says of itself which axes it is made of, and
what it would be in the real call. (Meta tensors would say the same after a second of imports.) Counted are floating
operations of matrix products, bytes read and written, launches, and the bytes alive at once; folds are noted with the
leaves they are fed, for the cost model to judge.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..engines import triton
from ..engines.common import matmul
from ..engines.common.evaluate import Form, Sizes
from ..engines.common.saved_tensors import private_graphs
from ..plan.device_rates import Ceilings
from ..plan.op_counts import SPECIAL
from ..program.lower import Fold
from ..reductions import KINDS, kind_of
from . import registry, torch_operator
from .autograd import REHEARSAL
from .live_memory import Alive
from .one_sided_function import ARITHMETIC, Arithmetic, Run

_PRIMES = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167, 173, 179, 181, 191, 193, 197, 199)
_MANY = (257,)
_LITERAL = 16  # lengths up to here stay as they are: a body may ask for a feature by its number
_FREE = (
    "view",
    "expand",
    "transpose",
    "squeeze",
    "select",
    "slice",
    "detach",
    "alias",
    "permute",
    "t.",
    "unbind",
    "empty",
)


@dataclass(frozen=True)
class Noted:
    """One fold of a call: what it is given, and how many bytes the call holds beside it."""

    fold: Fold
    leaves: tuple[Any, ...]
    sizes: Sizes
    backward: bool
    beside: int  # bytes alive when it begins


@dataclass
class Rehearsal:
    """What a call would do: torch's own operations added up, folds listed."""

    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0
    launches: int = 0
    peak: int = 0
    folds: list[Noted] = field(default_factory=list)


class Scale:
    """Small lengths for the axes of a call, and back: what a small number would be at the real lengths.

    ``most``: what all must exceed; ``tiles``: the lengths of tiles, which stay shorter than what they are cut from.
    """

    def __init__(self, sizes: Sizes, most: int = 0, tiles: Sequence[int] = ()):
        lengths = {*sizes.batch, sizes.rows, sizes.cols, *sizes.letters.values(), *tiles}
        primes = iter(p for p in _PRIMES if p > most)
        self.small: dict[int, int] = {n: next(primes, n) for n in sorted(lengths) if n > _LITERAL}
        if not tiles and sizes.rows > matmul._SMALL_ROWS:  # torch's products of so many rows are done in another way
            self.small[sizes.rows] = next((p for p in _MANY if p > most), sizes.rows)
        self.real = {p: n for n, p in self.small.items()}

    def down(self, length: int) -> int:
        return self.small.get(length, length)

    def up(self, number: float) -> int:
        """The product of lengths that a small product stands for."""
        rest, found = int(number), 1
        if not rest:
            return 0
        for prime, length in self.real.items():
            while rest % prime == 0:
                rest //= prime
                found *= length
        return found * rest

    def sizes(self, sizes: Sizes) -> Sizes:
        letters = {k: self.down(n) for k, n in sizes.letters.items()}
        batch = tuple(map(self.down, sizes.batch))
        rows, cols = self.down(sizes.rows), self.down(sizes.cols)
        return replace(sizes, rows=rows, cols=cols, batch=batch, letters=letters, device=_CPU)

    def tensor(self, t: Tensor, backward: bool) -> Tensor:
        """A small tensor in the place of a real one: numbers small enough for every index and logarithm."""
        shape = [self.down(n) for n in t.shape]
        made = torch.full(shape, 0.5 if t.is_floating_point() else 0, dtype=t.dtype)
        return made.requires_grad_(backward and t.requires_grad)

    def leaf(self, v: Any) -> Any:
        """A leaf as large as it would be, without numbers."""
        if not isinstance(v, Tensor):
            return v
        return torch.empty([self.up(n) for n in v.shape], dtype=v.dtype, device="meta")


_CPU = torch.device("cpu")


class Enlarged(Alive):
    """Bytes alive at once, as they would be at the real lengths."""

    def __init__(self, scale: Scale, given: Sequence[Tensor]):
        super().__init__(given)
        self.scale = scale

    def size(self, t: Tensor) -> int:
        return self.scale.up(t.untyped_storage().nbytes() // t.element_size()) * t.element_size()


class _Stage(Enlarged):
    """Notes every operation inside the block."""

    def __init__(self, sizes: Sizes, scale: Scale, roof: Ceilings, given: Sequence[Tensor]):
        super().__init__(scale, given)
        self.sizes, self.roof = sizes, roof
        self.backward = False
        self.found = Rehearsal()

    def note(self, fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> list[Tensor]:
        """An engine that computes nothing."""
        with _disable_current_modes():
            given = tuple(map(self.scale.leaf, leaves))
        self.found.folds.append(Noted(fold, given, self.sizes, self.backward, self.total))
        made = forms(fold, leaves, sizes, self.sizes.device)
        return [torch.full(shape, 0.5 if dtype.is_floating_point else 0, dtype=dtype) for shape, dtype in made]

    def noted(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        name = func.__name__
        if name.startswith(_FREE) or func._overloadpacket is torch.ops.aten.t:
            return
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        up = self.scale.up
        moved = sum(up(_span(t)) * t.element_size() for t in tensors)
        made = max((up(t.numel()) for t in tensors), default=0)
        packet = func._overloadpacket
        found, roof = self.found, self.roof
        found.bytes += moved
        found.launches += 1
        time = moved / (roof.bandwidth if moved > roof.near else max(roof.bandwidth, roof.plain * 4))
        if packet in flop_registry:
            flops = up(flop_registry[packet](*args, **kwargs, out_val=result))
            found.flops += flops
            sides = [up(n) for t in tensors[-3:] for n in t.shape[-2:]]  # two operands and the result: each side twice
            share = roof.efficiency(*sorted(sides)[::2])
            time = max(time, flops / (roof.rate(str(tensors[-1].dtype)[6:]) * share))
        elif (weight := _exponentials(name, args)) > 0:
            time = max(time, made * weight / roof.special)
        else:
            time = max(time, made * _plain(name, tensors) / roof.plain)
        new = sum(up(t.numel()) * t.element_size() for t in tree_leaves(result) if isinstance(t, Tensor))
        found.seconds += time + roof.launch + (new * roof.fresh if new > roof.near and not name.endswith("_") else 0.0)


def forms(fold: Fold, leaves: Sequence[Any], sizes: Sizes, device: torch.device) -> list[Form]:
    """Shape and type of a fold's results: on a GPU sums of 16-bit vectors come as their caller will hold them."""
    made = torch_operator.shapes(fold, list(leaves), sizes)
    vectors = [v.dtype for e, v in zip(fold.leaves, leaves, strict=True) if e.feature is not None]
    narrow = next((d for d in vectors if d in matmul.SIXTEEN), None)
    if device.type != "cuda" or narrow is None or fold.raised:
        return made
    tail = len(sizes.batch) + 1
    sums = [kind_of(r).sums_vectors and len(made[at][0]) > tail for at, (r, _) in enumerate(fold.outputs)]
    return [(shape, narrow if summed else dtype) for (shape, dtype), summed in zip(made, sums, strict=True)]


def _exponentials(name: str, args: tuple) -> float:
    """How many exponentials a torch operation takes for each number; a whole power takes none."""
    plain = name.split(".")[0].removesuffix("_backward").rstrip("_")
    whole = plain == "pow" and not isinstance(args[1], Tensor) and args[1] in (0, 1, 2, 3)
    return 0.0 if whole else SPECIAL.get(plain, 0.0)


def _plain(name: str, tensors: Sequence[Tensor]) -> float:
    """How many plain operations a torch operation takes for each number; loops over few features are short ones."""
    if name.startswith(("argmax", "argmin", "topk", "sort")):
        return KINDS["best"].plain_ops
    short = max((t.dim() for t in tensors), default=0) > 2 and tensors[-1].dim() and tensors[-1].shape[-1] <= _LITERAL
    return 5.0 if short else 1.0


def _span(t: Tensor) -> int:
    """How many numbers reading a tensor touches: what is broadcast is read once."""
    count = 1
    for length, stride in zip(t.shape, t.stride(), strict=True):
        count *= length if stride else 1
    return count


def rehearse(
    call: Callable[..., Sequence[Any]],
    inputs: Mapping[str, Any],
    sizes: Sizes,
    roof: Ceilings,
    most: int = 0,
    *,
    backward: bool,
) -> Rehearsal:
    """Go through ``call(inputs, sizes)``, and its backward where one of the inputs asks for a gradient.

    ``inputs`` by name, numbers as they are; cotangents are ones, expanded. ``most``: a length that an axis must exceed
    (the k of a top-k).
    """
    scale = Scale(sizes, most)
    with torch.set_grad_enabled(backward), _disable_current_modes(), private_graphs():
        given = {n: scale.tensor(v, backward) if isinstance(v, Tensor) else v for n, v in inputs.items()}
        tensors = [v for v in given.values() if isinstance(v, Tensor)]
        with _Stage(sizes, scale, roof, tensors) as stage, _on(stage), _standing(sizes):
            found = [v for v in call(given, scale.sizes(sizes)) if isinstance(v, Tensor)]
            values = [v for v in found if v.requires_grad]
            if backward and values:
                stage.backward = True
                wanted = [t for t in tensors if t.requires_grad]
                ones = [torch.ones((), dtype=v.dtype).expand(v.shape) for v in values]
                _backward(values, wanted, ones)
                del ones
            del found, values
    stage.found.peak = stage.peak
    return stage.found


def _backward(values: Sequence[Tensor], wanted: Sequence[Tensor], cotangents: Sequence[Tensor]) -> None:
    """``torch.autograd.grad`` without its look at the shapes, for which torch imports a computer algebra: 0.5 s."""
    run = torch.autograd.Variable._execution_engine.run_backward
    run(tuple(values), tuple(cotangents), False, False, tuple(wanted), allow_unreachable=True, accumulate_grad=False)


class _Arithmetic(Arithmetic):
    """The arithmetic of one side: where it would be a kernel, of all that it takes only the results are seen."""

    def _launch(self, leaves: Sequence[Any]) -> Run | None:
        stage = _stage.get()
        with _disable_current_modes():
            found = triton.side(self.side, [stage.scale.leaf(v) for v in leaves], stage.sizes)
        return None if found is None else self._unseen

    def _unseen(self, leaves: Sequence[Any]) -> list[Tensor]:
        with _disable_current_modes():
            found = self._by_torch()(leaves)
        return [t.clone() for t in found]


ARITHMETIC[REHEARSAL] = _Arithmetic
_stage: contextvars.ContextVar[_Stage] = contextvars.ContextVar("stage")
registry.FOLDERS[REHEARSAL] = lambda fold, leaves, sizes: _stage.get().note(fold, leaves, sizes)


@contextlib.contextmanager
def _standing(sizes: Sizes) -> Iterator[None]:
    token = matmul.rehearsed.set(sizes if sizes.device.type == "cuda" else None)
    try:
        yield
    finally:
        matmul.rehearsed.reset(token)


@contextlib.contextmanager
def _on(stage: _Stage) -> Iterator[None]:
    token = _stage.set(stage)
    try:
        yield
    finally:
        _stage.reset(token)
