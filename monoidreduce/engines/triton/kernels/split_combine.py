"""The results of a walk that was cut, from those of its parts, in one kernel: torch takes up to twenty operations.

The arithmetic is that of ``combine.py``: a softmax part by part in their order, the best of a row the first of equals.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....program.expression import Expr
from ...common.evaluate import Form
from ..launch.launch_cache import Kernels
from ..launch.launch_replay import Leaf, Recipe

_TEXT = '''"""The results of a whole from those of its parts."""

import triton
import triton.language as tl


@triton.jit
def part(log, peak, place, here):
    # the total's logarithm and the peak of one part: what saw nothing has none, what saw infinity has that
    of_total = tl.load(log + place, mask=here, other=float("-inf"))
    top = tl.load(peak + place, mask=here, other=0.0)
    return of_total, tl.where(tl.abs(of_total) == float("inf"), of_total, top)


@triton.jit(do_not_specialize=["parts"])
def unite_softmax(
    z_out, mean_out, log_out, peak_out, mean, log, peak, parts, rows,
    WIDTH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, NUMBERS: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    here = at < rows
    inside = here[:, None] & (lane < WIDTH)[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for k in range(0, parts):
        of_total, own = part(log, peak, at + tl.cast(k, tl.int64) * rows, here)
        top = tl.maximum(top, own, propagate_nan=tl.PropagateNan.ALL)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, LANES], tl.float32)
    for k in range(0, parts):
        place = at + tl.cast(k, tl.int64) * rows
        of_total, own = part(log, peak, place, here)
        below = tl.where(own == top, 0.0, own) - tl.where(own == top, 0.0, top)  # infinities too
        weight = tl.exp(below) * tl.exp(of_total)
        total += weight
        if WIDTH:
            sums += weight[:, None] * tl.load(mean + place[:, None] * WIDTH + lane[None, :], mask=inside, other=0.0)
    seen = tl.where(total == 0.0, 1.0, total)  # a row that sees nothing has mean 0
    if WIDTH:
        tl.store(mean_out + at[:, None] * WIDTH + lane[None, :], sums / seen[:, None], mask=inside)
    if NUMBERS:
        of_total = tl.where(total == 0.0, float("-inf"), tl.log(seen))
        safe = tl.where(tl.abs(top) == float("inf"), 0.0, top)
        tl.store(z_out + at, of_total + safe, mask=here)
        tl.store(log_out + at, of_total, mask=here)
        tl.store(peak_out + at, safe, mask=here)


@triton.jit
def highest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def lowest(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["parts"])
def unite_best(
    value_out, place_out, value, place, parts, rows,
    LARGEST: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, PARTS)
    here = at < rows
    inside = (k < parts)[:, None] & here[None, :]
    worst = float("-inf") if LARGEST else float("inf")
    v = tl.load(value + k[:, None].to(tl.int64) * rows + at[None, :], mask=inside, other=worst)
    top = tl.reduce(v, 0, highest) if LARGEST else tl.reduce(v, 0, lowest)
    tied = (v == top[None, :]) | (v != v)  # NaN is before all, as in torch
    first = tl.min(tl.where(tied, k[:, None], PARTS), 0)
    tl.store(value_out + at, top, mask=here)
    tl.store(place_out + at, tl.load(place + first.to(tl.int64) * rows + at, mask=here), mask=here)


@triton.jit(do_not_specialize=["parts"])
def unite_sum(out, x, parts, rows, PARTS: tl.constexpr, ROWS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, PARTS)
    inside = (k < parts)[:, None] & (at < rows)[None, :]
    v = tl.load(x + k[:, None].to(tl.int64) * rows + at[None, :], mask=inside, other=0)
    tl.store(out + at, tl.sum(v, 0), mask=at < rows)
'''
_WIDEST = 1024
_PARTS = 1024
_SMALL = 2**20  # bytes of parts that are held until a call is done
_BLOCK = 2048  # numbers of a program instance
_FLOATS = (torch.float32, torch.float64)
_kernels = Kernels(_TEXT)


class Task(NamedTuple):
    """A launch: which of the whole's tensors it writes, which of the parts' it reads, and what else it is given."""

    name: str
    written: tuple[int, ...]
    read: tuple[int, ...]
    parts: int
    rows: int
    constants: tuple[tuple[str, Any], ...]

    @property
    def grid(self) -> tuple[int]:
        return (-(-self.rows // dict(self.constants)["ROWS"]),)

    def given(self, whole: Sequence[Any], stacked: Sequence[Any]) -> tuple:
        """Its arguments."""
        return *[whole[k] for k in self.written], *[stacked[k] for k in self.read], self.parts, self.rows


class Joined(NamedTuple):
    """A launch that makes these of a reduction's results; its leaves are those of the parts."""

    recipe: Recipe
    written: tuple[int, ...]

    def moved(self, first: int) -> Joined:
        """The same where the reduction's results are not the first."""
        given = (v._replace(at=v.at + first) if isinstance(v, Leaf) else v for v in self.recipe.arguments)
        return Joined(self.recipe._replace(arguments=tuple(given)), tuple(first + k for k in self.written))


def whole(r: Expr, stacked: Sequence[Tensor]) -> list[Tensor] | None:
    """A reduction's results from those of its parts ``[parts, *batch, length(, features)]``; None where there is no
    kernel for it."""
    made = room(r, stacked)
    if made is None:
        return None
    for task in _tasks(r, stacked) or ():
        _kernels(task.name, task.grid, task.given(made, stacked), dict(task.constants))
    return made


def room(r: Expr, stacked: Sequence[Tensor]) -> list[Tensor] | None:
    """Where they go."""
    if _tasks(r, stacked) is None or not all([t.is_contiguous() for t in stacked]):
        return None
    return [torch.empty_like(t[0]) for t in stacked]


def recipes(r: Expr, stacked: Sequence[Form], held: Sequence[torch.dtype], device: torch.device) -> list[Joined] | None:
    """How the launches are made again that write results in these types; they are made once on the way. None where
    parts are so large that they should be let go as soon as they were read."""
    if sum(math.prod(shape) * kind.itemsize for shape, kind in stacked) > _SMALL:
        return None
    parts = [torch.empty(shape, dtype=kind, device=device) for shape, kind in stacked]
    todo, found = _tasks(r, parts), []
    if todo is None:
        return None
    made = [torch.empty_like(t[0], dtype=kind) for t, kind in zip(parts, held, strict=True)]
    for task in todo:
        again = _kernels(task.name, task.grid, task.given(made, parts), dict(task.constants))
        if again is None:
            return None
        forms = tuple((tuple(made[k].shape), made[k].dtype) for k in task.written)
        arguments = (*(Leaf(k, True) for k in task.read), task.parts, task.rows)
        found.append(Joined(Recipe(again, forms, arguments), task.written))
    return found


def _tasks(r: Expr, stacked: Sequence[Tensor]) -> list[Task] | None:
    return tasks(r.attrs[0], r.attrs[2], tuple([(tuple(t.shape), t.dtype) for t in stacked]))


@functools.lru_cache(maxsize=1024)
def tasks(kind: str, params: tuple, stacked: tuple[Form, ...]) -> list[Task] | None:
    """The launches for parts of these forms; None where there is no kernel for them."""
    parts = stacked[0][0][0]
    make = _KINDS.get(kind)
    if make is None or not 0 < parts <= _PARTS or not all(math.prod(shape) for shape, _ in stacked):
        return None
    return make(params, stacked, parts)


def _softmax(params: tuple, stacked: tuple[Form, ...], parts: int) -> list[Task] | None:
    """(z, means, logarithm, peak): one launch for each mean, with the first of them the numbers too."""
    (numbers, _), count = stacked[0], len(stacked)
    widths = [shape[-1] if len(shape) > len(numbers) else 1 for shape, _ in stacked[1:-2]]
    if any(dtype is not torch.float32 for _, dtype in stacked) or max([1, *widths]) > _WIDEST:
        return None
    found = []
    for k, width in enumerate(widths or [0]):
        lanes, mean = 1 << max(width - 1, 0).bit_length(), 1 + k if widths else 0
        constants = dict(WIDTH=width, LANES=lanes, ROWS=max(1, min(32, _BLOCK // lanes)), NUMBERS=k == 0)
        written, read = (0, mean, count - 2, count - 1), (mean, count - 2, count - 1)
        found.append(Task("unite_softmax", written, read, parts, math.prod(numbers[1:]), tuple(constants.items())))
    return found


def _best(params: tuple, stacked: tuple[Form, ...], parts: int) -> list[Task] | None:
    (shape, dtype), _ = stacked
    constants = (("LARGEST", params[0]), *_block(parts))
    known = dtype in _FLOATS
    return [Task("unite_best", (0, 1), (0, 1), parts, math.prod(shape[1:]), constants)] if known else None


def _sum(params: tuple, stacked: tuple[Form, ...], parts: int) -> list[Task] | None:
    ((shape, dtype),) = stacked
    known = dtype in _FLOATS or dtype is torch.int64
    return [Task("unite_sum", (0,), (0,), parts, math.prod(shape[1:]), _block(parts))] if known else None


def _block(parts: int) -> tuple[tuple[str, int], ...]:
    lanes = max(2, 1 << (parts - 1).bit_length())
    return ("PARTS", lanes), ("ROWS", max(1, min(32, _BLOCK // lanes)))


_KINDS: dict[str, Callable[[tuple, tuple[Form, ...], int], list[Task] | None]] = {
    "best": _best,
    "pick": _sum,
    "soft": _softmax,
    "sum": _sum,
}
