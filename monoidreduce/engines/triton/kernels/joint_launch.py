"""Attention's gradients by queries, keys and values in one launch (``schedules/joint_gradients.py``).

Before it a small kernel sets the counters that put its additions in order; after it another one rounds the sums of rows
to their type, in the memory order of the queries. Counters and sums are one buffer, which lives as long as the call.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....plan import settings
from ....plan.schedule import Tile
from ....program.constructors import ONE
from ....program.expression import Expr, topological
from ....program.lower import Fold
from ...common.evaluate import Allocator, Form
from ..codegen import compiler
from ..codegen.kernel_spec import Joint, Spec, Unsupported
from ..codegen.reductions import find_plain_sum, list_factors
from ..launch import descriptors, driver
from ..launch.driver import Kernels
from ..launch.replay import DescriptorOf, Leaf, Recipe
from ..schedules import joint_gradients
from ..schedules.joint_gradients import KEPT, PART, JointSchedule
from ..schedules.kernel_plan import KernelPlan, overriding_plans
from .fold_kernel import LEAST_INSTANCES, FoldLaunch, Layouts, Leaves, Merged, Then
from .small_kernels import CombiningLaunch

_BATCH_DIMS = 4  # of a result, after merging
_NOBODY = 2**30  # the first column tile of rows that no tile visits
# Of C batch elements on P multiprocessors P / C tiles of each start together, and the last of these waits P / C steps
# for its turn to add. A multiprocessor has C x tiles x steps / P steps in all: at least so many times what it waits.
_STEPS_PER_WAIT = 16
_ELEMENTS_BESIDE = 16  # batch elements whose tiles are launched side by side
_TEXT = """@triton.jit
def set_counters(buffer, first, blocks, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(buffer + at, tl.load(first + at % blocks, mask=at < count), mask=at < count)


@triton.jit
def round_sums(
    out, buffer, first, scale, total, start, blocks, length, n1, n2, n3, s0, s1, s2, s3, step,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, PART: tl.constexpr, NOBODY: tl.constexpr,
    SCALED: tl.constexpr, DECAYED: tl.constexpr,
):
    block = tl.program_id(0) % blocks
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, FEATURES)
    part = (row // PART * (FEATURES // PART))[:, None] + (lane // PART)[None, :]
    at = start + (tl.program_id(0).to(tl.int64) * 2 + part) * PART + (row % PART)[:, None]
    sums = tl.load(buffer + at * PART + (lane % PART)[None, :]).to(tl.float32, bitcast=True)
    sums = tl.where(tl.load(first + block) < NOBODY, sums, 0.0)
    at = (block * ROWS + row).to(tl.int64)
    if SCALED:  # weights may have the row's decay already
        factor = tl.load(scale + batch * length + at, mask=at < length, other=0.0)
        if DECAYED:
            factor *= tl.exp(tl.load(total + batch * length + at, mask=at < length, other=0.0))
        sums *= factor[:, None]
    b3 = batch % n3
    rest = batch // n3
    b2 = rest % n2
    rest = rest // n2
    place = rest // n1 * s0 + rest % n1 * s1 + b2 * s2 + b3 * s3
    out += place + at[:, None] * step + lane[None, :]
    tl.store(out, sums.to(out.dtype.element_ty), mask=(at < length)[:, None])
"""
_kernels = Kernels("Sums of rows that column tiles add up in order: counters before, rounding after.", _TEXT)


class JointLaunch(FoldLaunch):
    """The launch of a fold over rows (``own``: gradients of keys and values) that makes the sum over columns of
    ``other`` (the gradient of queries) too.

    Raises Unsupported where there is none."""

    combines = True
    least_masked = LEAST_INSTANCES

    def __init__(self, own: FoldLaunch, other: FoldLaunch, values: Leaves, layouts: Layouts):
        self.own, self.other = own, other
        schedule = _find_schedule(own, other)
        if schedule is None:
            raise Unsupported("the sums of rows and columns have kernels of their own")
        self.schedule = schedule
        found = _match_sums(own.fold, other.fold)
        if found is None:
            raise Unsupported("the sums of rows and columns have no weights in common")
        self.weight, self.vector, self.decay, scale = found
        # a scale per row is applied when sums are rounded; it has the decay that the weights of columns have too
        self.row_scale = scale if scale.op == "leaf" and scale.rows else None
        self.joint_scale = scale if self.row_scale is None else ONE
        for e in self._row_numbers():
            v = values[e]
            if not isinstance(v, Tensor) or v.dtype != torch.float32 or not v.is_contiguous():
                raise Unsupported("a scale of rows is not contiguous")
            if v.numel() != math.prod(own.batch) * own.sizes.rows:
                raise Unsupported("a scale of rows is broadcast")
        super().__init__(own.fold, "rows", values, own.batch, own.sizes, layouts)
        if self.spec.folded_batch_dim != own.spec.folded_batch_dim:
            raise Unsupported("the kernel of columns alone sums over the batch too")

    @property
    def returned_outputs(self) -> tuple[tuple[Expr, int], ...]:
        return *self.fold.outputs, *self.other.fold.outputs

    @property
    def plans(self) -> dict[str, KernelPlan]:
        return {"cols": self.other.plan, "rows": self.own.plan}  # of the two kernels that any other plan takes

    @property
    def extra_forms(self) -> list[Form]:
        return [self.allocate_buffer.form, *self.other.outputs]

    def _row_numbers(self) -> list[Expr]:
        """The leaves that rounding reads."""
        found = [] if self.row_scale is None else [self.row_scale]
        return found + ([] if self.decay is ONE else [self.decay.args[0]])

    def _describe(self, values: Leaves) -> None:
        super()._describe(values)
        if self.few_rows is not None or any(self.conversions):
            raise Unsupported("leaves are converted before the launch")
        joint = Joint(self.weight, self.vector, self.joint_scale, self.sizes.cols % KEPT != 0)
        self.spec = replace(self.spec, joint=joint)

    def _choose_hand_scheduled(self, spec: Spec, count: int) -> Tile | None:
        enough = _keeps_busy(self, count, self.schedule)
        return (KEPT, self.schedule.rows, 4, 2) if enough and joint_gradients.write_kernel(spec) is not None else None

    def _write_hand_scheduled(self) -> compiler.Kernel | None:
        return joint_gradients.write_kernel(self.spec)

    def _write_kernel(self, leaves: Leaves) -> None:
        super()._write_kernel(leaves)
        known = {e for e in topological([self.joint_scale]) if e.op == "leaf"}
        plainly = all(self.spec.is_number(e) for e in known) and known <= {*self.kernel.leaves}
        if self.splits != 1 or not self.grid or not plainly or not self.kernel.hand_scheduled:
            raise Unsupported("there is no warp-specialised kernel")

    def _lay_out_arguments(self, values: Leaves) -> None:
        super()._lay_out_arguments(values)
        self.blocks_of_rows = -(-self.lengths[1] // self.schedule.rows)
        self.counters = math.prod(self.batch) * self.blocks_of_rows
        start = -(-self.counters // PART)
        rows = start + self.counters * 2 * PART
        self.allocate_buffer = Allocator(((rows * PART,), torch.int32), self.sizes.device)
        self.joint_descriptor = descriptors.make_buffer_descriptor(rows, PART, PART, self.sizes.device)
        self.first_tiles = self._find_first_tiles()
        beside = min(_ELEMENTS_BESIDE, self.count)
        self.joint_numbers = (start, self.count, beside)
        layout = self.other.find_layout(self.other.fold.outputs[0])
        width = self.schedule.features
        steps = [math.prod(self.batch[k + 1 :]) * self.lengths[1] * width for k in range(len(self.batch))]
        *steps, step = layout.steps if layout is not None else (*steps, width)
        missing = _BATCH_DIMS - len(self.batch)
        sizes, strides = [*(1,) * missing, *self.batch][1:], [*(0,) * missing, *steps]
        self.rounding = (start, self.blocks_of_rows, self.lengths[1], *sizes, *strides, step)

    def _find_first_tiles(self) -> Tensor:
        """The first column tile that adds to each block of rows, by the order in which tiles are launched."""
        if not self.spec.bounds:
            return torch.zeros(self.blocks_of_rows, dtype=torch.int32, device=self.sizes.device)
        if self.mask_leaves:
            raise Unsupported("which tiles are visited depends on more than indices")
        self.masks_read_data = False
        edges, _, flip = self._edges([])
        ends = edges[0].cpu()
        ends = ends.flip(0) if flip else ends
        at = torch.arange(self.blocks_of_rows, device="cpu")
        visits = (ends[:, :1] <= at) & (at < ends[:, -1:])
        tile = torch.arange(len(ends), device="cpu")[:, None].expand_as(visits)
        first = torch.where(visits, tile, _NOBODY).amin(0)
        last = torch.where(visits, tile, -1).amax(0)
        if not visits.any(1).all() or ((last - first + 1 != visits.sum(0)) & visits.any(0)).any():
            raise Unsupported("column tiles that visit a block of rows do not follow each other")
        return first.to(self.sizes.device, torch.int32)

    def _set_counters(self, buffer: Tensor) -> Any:
        grid, given = (-(-self.counters // 1024),), (buffer, self.first_tiles, self.blocks_of_rows, self.counters)
        return _kernels("set_counters", grid, given, dict(BLOCK=1024))

    def _round(self, out: Tensor, buffer: Tensor, leaves: Sequence[Any]) -> Any:
        constants = dict(ROWS=self.schedule.rows, FEATURES=self.schedule.features, PART=PART, NOBODY=_NOBODY)
        constants |= dict(SCALED=self.row_scale is not None, DECAYED=self.decay is not ONE)
        numbers = [leaves[self.fold.leaves.index(e)] for e in self._row_numbers()]
        numbers += [self.first_tiles] * (2 - len(numbers))  # never read
        given = (out, buffer, self.first_tiles, *numbers, *self.rounding)
        return _kernels("round_sums", (self.counters,), given, constants)

    def __call__(self, leaves: Sequence[Any], merged: Merged, then: Then = None) -> list[Tensor]:
        assert then is None, "sums have no lists that are completed"
        outputs, buffer, out = (
            [allocate() for allocate in self.allocators],
            self.allocate_buffer(),
            self.other.allocators[0](),
        )
        self._set_counters(buffer)
        arguments, _kept = self._arguments(leaves, merged)
        sums = descriptors.replace_base(self.joint_descriptor, buffer.view(torch.float32))
        arguments += [buffer, self.first_tiles, *self.joint_numbers, sums]
        if self.relaunch is None:
            self._compile_and_launch([*outputs, *arguments], merged)
        else:
            arguments[-6:-4] = buffer.data_ptr(), self.first_tiles.data_ptr()  # before numbers and descriptor
            self.relaunch(*outputs, *arguments)
        self._round(out, buffer, leaves)
        return [*outputs, out]

    def recipe(self) -> Recipe | None:
        found = super().recipe()
        if found is None:
            return None
        at = len(self.fold.leaves) + len(self.shifts)
        joint = (Leaf(at, True), self.first_tiles, *self.joint_numbers, DescriptorOf(at, self.joint_descriptor))
        return found._replace(arguments=(*found.arguments, *joint))

    def make_sum_recipe(self) -> Recipe | None:
        buffer = self.allocate_buffer()
        relaunch = self._set_counters(buffer)
        arguments = (self.first_tiles, self.blocks_of_rows, self.counters)
        return None if relaunch is None else Recipe(relaunch, ((tuple(buffer.shape), buffer.dtype),), arguments)

    def list_combining_launches(self) -> list[CombiningLaunch] | None:
        out, device = self.other.allocators[0](), self.sizes.device
        like = torch.zeros(math.prod(self.batch), self.sizes.rows, device=device)
        relaunch = self._round(out, self.allocate_buffer(), [like] * len(self.fold.leaves))
        at = len(self.fold.outputs)
        numbers: list[Any] = [Leaf(at + 1 + self.fold.leaves.index(e), True) for e in self._row_numbers()]
        numbers += [self.first_tiles] * (2 - len(numbers))
        arguments = (Leaf(at, True), self.first_tiles, *numbers, *self.rounding)
        made = Recipe(relaunch, tuple(self.other.outputs), arguments, tuple(self.other.strides))
        return None if relaunch is None else [CombiningLaunch(made, (at,))]


@functools.lru_cache(maxsize=256)
def _match_sums(own: Fold, other: Fold) -> tuple[Expr, Expr, Expr, Expr] | None:
    """The weight that the sum over columns of ``other`` shares with one of ``own``, its vector, by what decay that is
    more than its own weight, and its scale; None where there is none."""
    ((result, scale),) = other.scaled
    of_rows, sums = find_plain_sum(result), filter(None, map(find_plain_sum, own.reductions))
    if of_rows is None or of_rows.vector is None:
        return None
    found = [(c.weight, decay) for c in sums if (decay := _find_decay(c.weight, of_rows.weight)) is not None]
    if len(found) != 1:
        return None
    ((weight, decay),) = found
    by_row = scale.op == "leaf" and scale.rows
    return (weight, of_rows.vector, decay, scale) if decay is ONE or by_row else None


def _keeps_busy(launch: FoldLaunch, count: int, schedule: JointSchedule) -> bool:
    """True when tiles of so many batch elements keep multiprocessors busy, and wait little for each other."""
    tiles, processors = -(-launch.lengths[0] // KEPT), driver.count_processors(launch.sizes.device)
    steps = -(-launch.lengths[1] // schedule.rows) * (math.prod(launch.batch) // max(count, 1))
    return count * tiles >= processors and count**2 * tiles * steps >= _STEPS_PER_WAIT * processors**2


def _find_decay(weight: Expr, other: Expr) -> Expr | None:
    """By what a weight is more than another: 1, or the decay of a row; None where they differ by more."""
    if weight is other:
        return ONE
    rest = Counter(list_factors(weight))
    rest.subtract(Counter(list_factors(other)))
    more = [e for e, count in rest.items() for _ in range(abs(count))]
    single = len(more) == 1 and rest[more[0]] == 1 and more[0].op == "decay" and more[0].args[0].op == "leaf"
    return more[0] if single else None


def _find_schedule(own: FoldLaunch, other: FoldLaunch) -> JointSchedule | None:
    """How both launches run as one: of plain sums, on a device that has such kernels, where memory is not limited."""
    layouts = [other.find_layout(o) for o in other.fold.outputs]
    schedule = joint_gradients.schedule_of(
        {own.sizes.of(str(e.feature)) for e in own.fold.leaves if e.feature is not None}
    )
    joins = (
        schedule is not None
        and driver.runs_warp_specialized(own.sizes.device)
        and settings.requested_budget() is None
        and not overriding_plans()
        and len(other.fold.reductions) == len(other.outputs) == 1
        and not other.spec.split
        and not any(layout is not None and layout.summed for layout in layouts)
        and all(r.attrs[0] == "sum" for one in (own, other) for r in one.fold.reductions)
        and len(own.batch) <= _BATCH_DIMS
        and _keeps_busy(own, own.count, schedule)
    )
    return schedule if joins else None
