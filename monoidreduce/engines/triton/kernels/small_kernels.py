"""Small fixed kernels beside folds: combining the partial results of splits, and reading vectors once.

Partial results are combined in one kernel, where torch takes up to twenty operations. The arithmetic, and the kernels,
are those of the kinds of reduction (``combine_text``, ``combine_launches``).

Vectors are read once for ⟨x_i, y_i⟩ of every row, a factor for all of them, shifts of exponents. torch raises 16-bit
vectors to float32 in memory first; at the sizes of attention that costs a tenth of a backward pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....program.expression import Expr
from ....reductions import KINDS
from ....reductions.base import CombineLaunch
from ...common.evaluate import Allocator, Form
from ..codegen.kernel_spec import LOG2E, power_of_two
from ..launch import driver
from ..launch.driver import Kernels, Relaunch
from ..launch.replay import Leaf, Recipe

_PARTS = 1024
_SMALL = 2**20  # bytes of parts that are held until a call is done
FEW_ROWS = 2**24  # the same of few rows, whose steps are so short that recording them counts more
_WIDE = 4096  # numbers at a time from which on an instance has eight warps
_kernels = Kernels(
    "The results of a whole from those of its parts.", "".join(kind.combine_text for kind in KINDS.values())
)


class CombiningLaunch(NamedTuple):
    """A launch that makes these of a reduction's results; its leaves are those of the parts."""

    recipe: Recipe
    written: tuple[int, ...]

    def offset(self, first: int) -> CombiningLaunch:
        """The same where the reduction's results are not the first."""
        given = (v._replace(at=v.at + first) if isinstance(v, Leaf) else v for v in self.recipe.arguments)
        return CombiningLaunch(self.recipe._replace(arguments=tuple(given)), tuple(first + k for k in self.written))


def combine_splits(r: Expr, stacked: Sequence[Tensor]) -> list[Tensor] | None:
    """A reduction's results from those of its parts ``[parts, *batch, length(, features)]``; None where there is no
    kernel for it."""
    made = allocate_results(r, stacked)
    if made is None:
        return None
    for task in _find_launches(r, stacked) or ():
        _launch(task, task.given(made, stacked))
    return made


def _launch(task: CombineLaunch, given: tuple) -> Relaunch | None:
    constants = dict(task.constants)
    if "SOME" not in constants:
        return _kernels(task.name, task.grid, given, constants)
    chained = driver.chains_launches(given[0].device)
    options = {"num_warps": 8 if constants["ROWS"] * constants["SOME"] * constants["LANES"] > _WIDE else 4}
    options |= {"launch_pdl": True} if chained else {}
    return _kernels(task.name, task.grid, given, {**constants, "WAIT": chained}, options)


def allocate_results(r: Expr, stacked: Sequence[Tensor]) -> list[Tensor] | None:
    """Tensors for a reduction's results; None where there is no kernel for it."""
    if _find_launches(r, stacked) is None or not all([t.is_contiguous() for t in stacked]):
        return None
    return [torch.empty_like(t[0]) for t in stacked]


def recipes(
    r: Expr, stacked: Sequence[Form], held: Sequence[torch.dtype], device: torch.device, most: int = 0
) -> list[CombiningLaunch] | None:
    """How the launches are made again that write results in these types; they are made once on the way. None where
    parts are so large (more than ``most`` bytes) that they should be let go as soon as they were read."""
    if sum(math.prod(shape) * kind.itemsize for shape, kind in stacked) > (most or _SMALL):
        return None
    parts = [torch.empty(shape, dtype=kind, device=device) for shape, kind in stacked]
    todo, found = _find_launches(r, parts), []
    if todo is None:
        return None
    made = [torch.empty_like(t[0], dtype=kind) for t, kind in zip(parts, held, strict=True)]
    for task in todo:
        relaunch = _launch(task, task.given(made, parts))
        if relaunch is None:
            return None
        forms = tuple((tuple(made[k].shape), made[k].dtype) for k in task.written)
        arguments = (*(Leaf(k, True) for k in task.read), task.parts, task.rows)
        found.append(CombiningLaunch(Recipe(relaunch, forms, arguments), task.written))
    return found


def can_hold_splits(r: Expr, stacked: Sequence[Form]) -> bool:
    """True when there is a kernel for parts of these forms, and they may stay until a call is done."""
    small = sum(math.prod(shape) * kind.itemsize for shape, kind in stacked) <= _SMALL
    return small and find_launches(r.attrs[0], r.attrs[2], tuple(stacked)) is not None


def _find_launches(r: Expr, stacked: Sequence[Tensor]) -> list[CombineLaunch] | None:
    return find_launches(r.attrs[0], r.attrs[2], tuple([(tuple(t.shape), t.dtype) for t in stacked]))


@functools.lru_cache(maxsize=1024)
def find_launches(kind: str, params: tuple, stacked: tuple[Form, ...]) -> list[CombineLaunch] | None:
    """The launches for parts of these forms; None where there is no kernel for them."""
    parts = stacked[0][0][0]
    if not 0 < parts <= _PARTS or not all(math.prod(shape) for shape, _ in stacked):
        return None
    return KINDS[kind].combine_launches(params, stacked, parts)


_DOT_TEXT = """@triton.jit
def row_dot(out, x, y, rows, WIDTH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    place = at[:, None] * WIDTH + lane[None, :]
    inside = (at < rows)[:, None] & (lane < WIDTH)[None, :]
    a = tl.load(x + place, mask=inside, other=0).to(tl.float32)
    b = tl.load(y + place, mask=inside, other=0).to(tl.float32)
    tl.store(out + at, tl.sum(a * b, 1), mask=at < rows)


@triton.jit
def scale(x, factor, size, LANES: tl.constexpr):
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * LANES, size, tl.num_programs(0) * LANES):
            at = start + tl.arange(0, LANES)
            old = tl.load(x + at, mask=at < size, other=0).to(tl.float32)
            tl.store(x + at, old * by, mask=at < size)


@triton.jit(do_not_specialize=["ignored", "size"])
def share(out, labels, ignored, size, LANES: tl.constexpr):
    count = tl.zeros([LANES], tl.int32)
    for start in range(0, size, LANES):
        at = start + tl.arange(0, LANES)
        label = tl.load(labels + at, mask=at < size, other=0)
        count += ((label != ignored) & (at < size)).to(tl.int32)
    tl.store(out, tl.div_rn(1.0, tl.sum(count, 0).to(tl.float32)))
"""
_WIDEST_DOT = 1024
_LABELS = 2**16  # counted by one program instance; torch's two kernels are faster beyond
_dots = Kernels("Sums over the features of each row.", _DOT_TEXT)


def compute_row_dots(x: Tensor, y: Tensor) -> Tensor | None:
    """⟨x_i, y_i⟩ in float32, of two contiguous tensors ``[..., features]``; None where there is no kernel for them."""
    if x.shape != y.shape or not 0 < x.shape[-1] <= _WIDEST_DOT or not (x.is_contiguous() and y.is_contiguous()):
        return None
    out = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    width, lanes = x.shape[-1], power_of_two(x.shape[-1])
    constants = dict(WIDTH=width, LANES=lanes, ROWS=max(1, 4096 // lanes))
    _dots("row_dot", (-(-out.numel() // constants["ROWS"]),), (out, x, y, out.numel()), constants)
    return out


def scale_in_place(x: Tensor, factor: Tensor) -> bool:
    """x *= factor, a 0-dim tensor, in place; nothing is read where it is 1. False where there is no kernel for them."""
    if not x.is_contiguous() or factor.numel() != 1 or x.dtype not in _SCALED or factor.dtype is torch.float64:
        return False
    grid = (min(-(-x.numel() // 4096), 2048),)
    _dots("scale", grid, (x, factor, x.numel()), dict(LANES=4096), dict(num_warps=8))
    return True


def prepare_share(labels: Tensor, ignored: int) -> Callable[..., Tensor] | None:
    """What finds one over the number of labels that are not ignored, in float32, for labels of one type, size, strides
    and alignment; None where there is no kernel for them."""
    size = labels.numel()
    if not 0 < size <= _LABELS or not labels.is_contiguous() or not -(2**31) <= ignored < 2**31:
        return None
    room, relaunch = _allocate_one(labels.device), None

    def share(labels: Tensor, ignored: int, *_: torch.dtype) -> Tensor:
        nonlocal relaunch
        out = room()
        if relaunch is None:
            relaunch = _dots("share", (1,), (out, labels, ignored, size), dict(LANES=1024))
        else:
            relaunch(out.data_ptr(), labels.data_ptr(), ignored, size)
        return out

    return share


@functools.cache
def _allocate_one(device: torch.device) -> Allocator:
    return Allocator(((), torch.float32), device)


_SCALED = (torch.bfloat16, torch.float16, torch.float32)


# The shift of an exponent along the folded axis, made before the launch: (number + logarithm of a total) × log2(e).
#
# torch takes four operations for it, each a launch of its own.

_SHIFT = f"""@triton.jit
def shift(out, number, total, size, LANES: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    here = at < size
    of_total = tl.load(total + at, mask=here, other=0.0)
    seen = tl.where(tl.abs(of_total) == float("inf"), float("inf"), of_total)  # a total of nothing hides all
    tl.store(out + at, (tl.load(number + at, mask=here, other=0.0) + seen) * {LOG2E!r}, mask=here)
"""
_LANES = 1024
_shift_kernels = Kernels("Shifts of exponents.", _SHIFT)


def fits_kernel(number: Tensor, total: Tensor, size: int) -> bool:
    """True when one kernel makes the shifts of so many numbers."""
    plain = all(v.dtype is torch.float32 and v.is_contiguous() and v.numel() == size for v in (number, total))
    return plain and driver.can_relaunch(number.device)


def compute_shift(number: Tensor, total: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The shifts, of this shape; infinite where the total is of nothing."""
    if fits_kernel(number, total, math.prod(shape)):
        found = torch.empty_like(number)
        _launch_shift(found, number, total)
        return found.view(shape)
    seen = torch.nan_to_num(total, nan=math.nan, posinf=math.inf, neginf=math.inf)
    return (number + seen).mul_(LOG2E).expand(shape).contiguous()


def replay_shift(number: Any, total: Any, shape: tuple[int, ...]) -> Callable[..., None] | None:
    """What launches the kernel again for tensors like these, after it did once; None where torch makes the shifts."""
    return (
        _launch_shift(torch.empty_like(number), number, total) if fits_kernel(number, total, math.prod(shape)) else None
    )


def _launch_shift(out: Tensor, number: Tensor, total: Tensor) -> Callable[..., None] | None:
    size = out.numel()
    return _shift_kernels("shift", (-(-size // _LANES),), (out, number, total, size), {"LANES": _LANES})
