"""Running a kernel: which text, which plan, which arguments; and all of it frozen for the next call.

Leaves are passed as they are, by pointer and strides (0 where broadcast); batch dimensions that cannot be merged are
decoded from the program's number. Lengths are run-time arguments, so that a new length compiles nothing.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....plan.default_tiles import Tile
from ....program.expression import Expr
from ....program.lower import Fold
from ....reductions import kind_of
from ...common import matmul, unchanged_tensors
from ...common.combine import combine, split
from ...common.evaluate import Allocator, Form, Sizes, result_form
from ..codegen import k_loop, kernel_text, tile_ranges
from ..codegen.kernel_spec import WIDEST, Spec, padded
from ..launch import descriptors, jit_module, parallel_compile
from ..launch.launch_recipes import DescriptorOf, FoundAtLaunch, Leaf, Recipe
from ..schedules import hopper, spec_from_tensors
from ..schedules.kernel_plan import KernelPlan, choose_plan, count_splits, overriding_plans, shrink, use_plan
from ..schedules.pingpong import gemm_fold
from ..schedules.pingpong.gemm_template import EXTRA, TILE
from ..schedules.resident import attention, logit_forms, sum_of_products
from . import exponent_shift, split_combine, topk

Values = Mapping[Expr, Any]  # leaves as Python numbers or tensors [*batch, length(, features)]

_EDGED = 4  # arguments that say which tiles are visited
SMALL = 2**28  # integers and offsets inside a tile below this are counted in int32


@dataclass(frozen=True)
class Call:
    """One launch, ready to run: what a kernel is called with."""

    kernel: kernel_text.Kernel
    plan: KernelPlan
    grid: int
    arguments: tuple[Any, ...]
    wide: bool  # whether offsets inside a tile need int64
    precision: str  # of float32 matrix products
    ragged: bool  # whether tiles need masks anywhere
    device: torch.device

    def constants(self, module: Any) -> dict[str, Any]:
        """What is fixed when the kernel is compiled, in the order of ``emit.CONSTANTS``."""
        kind = module.tl.int64 if self.wide else module.tl.int32
        given = (self.plan.block_kept, self.plan.block_folded, kind, self.precision, self.ragged)
        return dict(zip(kernel_text.CONSTANTS, given, strict=True))


def compiler_options(kernel: kernel_text.Kernel, plan: KernelPlan) -> dict[str, int]:
    """What the compiler is told of a kernel besides its warps and stages: the most registers of a thread.

    A softmax over narrow vectors in small tiles runs four instances to a multiprocessor as long as a thread has at most
    128 registers; left alone, the compiler takes a few more (causal attention of 64 features: 20 % slower on an H200).
    """
    if kernel.staged:
        return hopper.compiler_options(kernel.consumers)
    small = plan.num_warps == 4 and plan.block_kept * plan.block_folded <= 64 * 64 and kernel.state_width <= 64
    limited = kernel.guesses and small and torch.version.hip is None  # AMD's compiler has no such option
    return {"maxnreg": 128} if limited else {}


def execute(call: Call) -> Callable[..., None] | None:
    """Launch a kernel on the current stream of its device; what launches it again with other tensors, if there is."""
    module = jit_module.load(call.kernel.text, call.kernel.functions)
    constants = call.constants(module)
    options = dict(num_warps=call.plan.num_warps, num_stages=call.plan.num_stages)
    options |= compiler_options(call.kernel, call.plan)
    with jit_module.on(call.device):
        kernel, grid = getattr(module, call.kernel.name), (call.grid,)
        compiled = parallel_compile.launched(kernel, grid, call.arguments, constants | options)
        jit_module.note(compiled)
        return jit_module.again(compiled, grid, tuple(constants.values()), call.device)


class Launch:
    """One direction of a fold on tensors of given types, shapes, strides and alignment: a kernel and its arguments.

    Made once; a call allocates the outputs, fills in the pointers and launches. Host time decides small cases.
    """

    def __init__(self, fold: Fold, over: str, values: Values, batch: tuple[int, ...], sizes: Sizes):
        self.fold, self.over, self.batch, self.sizes = fold, over, batch, sizes
        self.asked = tuple(
            (e, fold.leaves.index(e)) for e in spec_from_tensors.condition_leaves(fold)
        )  # what conditions look at
        self.lists = [at for at, (r, k) in enumerate(fold.outputs) if kind_of(r).unsorted and k == 0]
        self.spec, self.before = spec_from_tensors.describe_fold(fold, over, values, batch, sizes)
        self.lengths = (sizes.rows, sizes.cols) if over == "cols" else (sizes.cols, sizes.rows)
        self.prepare(values)

    def prepare(self, values: Values, plan: KernelPlan | None = None) -> None:
        """Choose the plan, unless it is given, and write the kernel and its arguments."""
        sizes = self.sizes
        item = 2 if self.spec.pieces else getattr(torch, self.spec.narrow or self.spec.compute).itemsize
        count = torch.Size(self.batch).numel()
        plainly = kernel_text.kernel(replace(self.spec, split=False, boxes=()))
        ready = spec_from_tensors.convert_leaves(values, self.before, self.batch, sizes)
        boxed = (*plainly.folded, *k_loop.vectors(self.spec))
        found = descriptors.of(self.spec, boxed, ready, len(self.batch)) if descriptors.on(sizes.device) else ()
        many = plainly.deep or count * sizes.rows * sizes.cols >= spec_from_tensors.VERY_MANY
        many &= any(b is not None for b in found)
        turns = self._turns(replace(self.spec, boxes=found), count) if many else None
        family = spec_from_tensors.family(sizes.device)
        self.plan = plan or choose_plan(plainly, self.over, item, family, many, self.lengths[0], turns)
        self.tiles, folded = (-(-n // b) for n, b in zip(self.lengths, self.blocks, strict=True))
        self.beside = k_loop.beside(self.spec, self.blocks[0], self.lengths[0]) if plainly.deep else 0
        self.parts = count_splits(
            self.plan, self.tiles * count, folded, spec_from_tensors.processors(sizes.device), self.beside
        )
        takers = (gemm_fold,) if plainly.deep else (attention, sum_of_products)
        by_turns = any(taker.matches_plan(self.plan, sizes.device) for taker in takers)
        line = bool(self.plan.boxes and not by_turns and self.lengths[1] % 4 == 0 < self.lengths[1])
        found = descriptors.vectors(self.spec.fold, found) if by_turns else found if self.plan.boxes else ()
        self.spec = replace(self.spec, split=self.parts > 1, boxes=found, line=line)
        self.kernel = (self._by_turns() if by_turns else None) or kernel_text.kernel(self.spec)
        self.grid = self.tiles * count * self.parts
        self.data = self.spec.bounds and any(isinstance(values[e], Tensor) for e, _ in self.asked)
        self.merged = any(self.before)  # whether calls need leaves with merged batch
        self.outputs = [self._output(r, k) for r, k in self.fold.outputs]
        self.rooms = [Allocator(f, sizes.device) for f in self.outputs]
        self.types = [self._held(r, *result_form(r, k, sizes)) for r, k in self.fold.outputs]  # of whole results
        self.cuts = self._cuts() if self.spec.split else []
        self.again: Callable[..., None] | None = None
        self.edges: list[Any] | None = None  # where conditions look at indices alone
        self._arguments(ready, count)

    def _turns(self, spec: Spec, count: int) -> Tile | None:
        """The tile of a kernel whose groups of warps take turns, where it has one and gains by it."""
        device, length = self.sizes.device, self.lengths[0]
        if spec.deep:
            return gemm_fold.choose_tile(spec, device, length) if count == 1 else None
        even = self.sizes.cols % 2 == 0
        return attention.choose_tile(spec, device, length, count) or sum_of_products.choose_tile(
            spec, device, count * length, even
        )

    def _by_turns(self) -> kernel_text.Kernel | None:
        if self.spec.deep:
            return gemm_fold.write_kernel(self.spec, self.plan.block_folded > TILE)
        even = self.sizes.cols % 2 == 0
        aligned = self.plan.block_folded % self.plan.block_kept == 0
        made = (
            attention.write_kernel(self.spec, even, aligned)
            if attention.matches_plan(self.plan, self.sizes.device)
            else None
        )
        return made or sum_of_products.write_kernel_for_plan(self.spec, self.plan, even)

    @property
    def blocks(self) -> tuple[int, int]:
        return self.plan.block_kept, self.plan.block_folded

    def _arguments(self, values: Values, count: int) -> None:
        """The arguments of every call after the outputs, with room for leaves; ``fill``: which of them goes where."""
        self.template: list[Any] = []
        self.fill: list[tuple[int, int, bool]] = []  # place, leaf, and whether that is a tensor
        wide, most = False, max(*self.blocks, WIDEST)
        for e in self.kernel.leaves:
            v = values[e]
            self.fill.append((len(self.template), self.spec.fold.leaves.index(e), isinstance(v, Tensor)))
            self.template.append(None)
            if isinstance(v, Tensor):
                strides = [0 if n == 1 else s for n, s in zip(v.shape, v.stride(), strict=True)]
                wide |= any(s * most >= 2**31 for s in strides[len(self.batch) :])
                self.template += strides
            else:
                wide |= isinstance(v, int) and abs(v) >= SMALL
        self.template += [*self.lengths, self.tiles, *self.batch[1:]]
        self.template += [self.parts, count, *([self.beside] if self.spec.deep else [])] if self.spec.split else []
        ragged = bool(self.kernel.staged and self.spec.bounds) or self.lengths[1] % self.plan.block_folded != 0
        place = self.spec.fold.leaves.index
        self.shifts = [(place(n), place(t)) for n, t in self.kernel.shifts]
        line = (self.lengths[1], count, self.blocks[1], self.sizes.device)
        self.line = descriptors.line(*line) if self.spec.line and self.shifts and count else None
        self.boxes = [
            (place(e), descriptors.template(values[e], dims, self._block(e), self.kernel.staged))
            for e, dims in self.spec.box_of.items()
            if e in self.kernel.leaves
        ]
        if self.kernel.staged and self.kernel.deep and self.blocks[1] > TILE:
            e = next(e for e in k_loop.vectors(self.spec) if self.spec.folds(e))
            self.boxes.append(
                (place(e), descriptors.template(values[e], self.spec.box_of[e], (EXTRA, k_loop.DEPTH), True))
            )
        self.how = (wide, matmul.float32_precision(), ragged, self.sizes.device)

    def _block(self, e: Expr) -> tuple[int, ...]:
        """How many numbers, or vectors and of how many features, a tensor descriptor copies at a time."""
        if e.feature is None:
            return (self.blocks[1],)
        width, length = self.sizes.of(str(e.feature)), self.blocks[self.spec.folds(e)]
        width = padded(width) if self.spec.pieces else width
        if self.kernel.staged and self.kernel.deep and not self.spec.folds(e):
            length //= 2  # each group has its own
        length = min(length, TILE) if self.kernel.staged and self.kernel.deep else length
        return length, k_loop.DEPTH if width > WIDEST else width

    def __call__(self, leaves: Sequence[Any], merged: Callable[[], Values]) -> list[Tensor]:
        """``leaves``: as they were given, since only their pointers count; ``merged()``: with the batch merged."""
        outputs = [room() for room in self.rooms]
        if self.grid and not self.launched(outputs, leaves, merged):
            return self(leaves, merged)
        return self._whole(outputs) if self.spec.split or self.lists else outputs

    def launched(self, outputs: list[Any], leaves: Sequence[Any], merged: Callable[[], Values]) -> bool:
        """Launch into these outputs (tensors or, once compiled, their addresses); False: it was planned anew."""
        given = self._converted(merged()) if self.merged else leaves
        arguments, again = self.template.copy(), self.again
        for at, leaf, is_tensor in self.fill:
            arguments[at] = given[leaf].data_ptr() if is_tensor and again is not None else given[leaf]
        if self.spec.bounds:
            arguments += self.edges or self._bounds([leaves[leaf] for _, leaf in self.asked])
        arguments += [self._shift(given[n], given[t]) for n, t in self.shifts]
        arguments += [descriptors.filled(box, given[leaf]) for leaf, box in self.boxes]
        arguments += [
            logit_forms.evaluate_coefficient(made, lambda e: given[self.fold.leaves.index(e)])
            for made in self.kernel.made
        ]
        if again is None:
            return self._first([*outputs, *arguments], merged)
        again(*outputs, *arguments)
        return True

    def recipe(self) -> Recipe | None:
        """How it is launched again, where that takes nothing but the leaves' addresses and numbers, the shifts of its
        exponents, and which tiles are visited."""
        if self.again is None or self.merged or self.kernel.made or self.lists:
            return None
        arguments = [*self.template]
        for at, leaf, is_tensor in self.fill:
            arguments[at] = Leaf(leaf, is_tensor)
        if self.spec.bounds:
            arguments += self.edges or [FoundAtLaunch(tuple(leaf for _, leaf in self.asked), self._edged, _EDGED)]
        count = len(self.fold.leaves)  # shifts come after the leaves
        for k in range(len(self.shifts)):
            arguments.append(Leaf(count + k, True) if self.line is None else DescriptorOf(count + k, self.line))
        arguments += [DescriptorOf(leaf, template) for leaf, template in self.boxes]
        return Recipe(self.again, tuple(self.outputs), tuple(arguments))

    def shifted(self, leaves: Sequence[Any]) -> list[Recipe] | None:
        """How the shifts of exponents are made again, of leaves like these; None where torch makes them."""
        shape = (*self.sizes.batch, self.lengths[1])
        found: list[Recipe] = []
        for n, t in self.shifts:
            again = exponent_shift.again(leaves[n], leaves[t], shape)
            if again is None:
                return None
            arguments = (Leaf(n, True), Leaf(t, True), math.prod(shape))
            found.append(Recipe(again, ((shape, torch.float32),), arguments))
        return found

    def united(self) -> list[split_combine.Joined] | None:
        """The launches that make whole results of those of a cut walk's parts; none of a walk that was not cut, None
        where torch makes them."""
        found: list[split_combine.Joined] = []
        if not self.spec.split:
            return found
        for r, places in split(self.fold, list(range(len(self.outputs)))):
            forms, types = [self.outputs[k] for k in places], [self.types[k] for k in places]
            made = split_combine.recipes(r, forms, types, self.sizes.device)
            if made is None:
                return None
            found += [one.moved(places[0]) for one in made]
        return found

    def _converted(self, values: Values) -> list[Any]:
        found = spec_from_tensors.convert_leaves(values, self.before, self.batch, self.sizes)
        return [found[e] for e in self.spec.fold.leaves]

    def _first(self, arguments: list[Any], merged: Callable[[], Values]) -> bool:
        """Compile and launch; False if it did not fit the device and a smaller plan was made."""
        try:
            self.again = execute(Call(self.kernel, self.plan, self.grid, tuple(arguments), *self.how))
        except Exception as error:
            smaller = shrink(self.plan) if type(error).__name__ == "OutOfResources" else None
            if smaller is None:
                raise
            self.prepare(merged(), smaller)
            return False
        return True

    def _output(self, r: Expr, k: int) -> Form:
        shape, dtype = result_form(r, k, self.sizes)
        return ((self.parts, *shape), dtype) if self.spec.split else (shape, self._held(r, shape, dtype))

    def _held(self, r: Expr, shape: tuple[int, ...], dtype: torch.dtype) -> torch.dtype:
        """The type of a result as the caller will hold it: of 16-bit vectors, half the traffic."""
        vector = len(shape) > len(self.sizes.batch) + 1
        narrow = self.spec.narrow and vector and kind_of(r).sums_vectors and not self.fold.raised
        return getattr(torch, str(self.spec.narrow)) if narrow else dtype

    def _whole(self, outputs: list[Tensor]) -> list[Tensor]:
        """The outputs: those of a split walk combined, the lists of the best sorted."""
        if self.spec.split:
            outputs[:] = combine(
                self.fold, outputs, self.cuts, ordered=True, faster=split_combine.whole
            )  # parts are let go
            outputs[:] = [t.to(kind) for t, kind in zip(outputs, self.types, strict=True)]
        for at in self.lists:
            outputs[at : at + 2] = topk.tidy(self.fold.outputs[at][0], *outputs[at : at + 2])
        return outputs

    def _cuts(self) -> list[int]:
        """How much of the folded axis each part walks."""
        block = self.plan.block_folded
        each, more = divmod(-(-self.lengths[1] // block), self.parts)
        ends = [min((each * k + min(k, more)) * block, self.lengths[1]) for k in range(self.parts + 1)]
        return [b - a for a, b in itertools.pairwise(ends)]

    def _shift(self, number: Tensor, total: Tensor) -> Any:
        """(number + logarithm of a total) × log2(e) along the folded axis; infinite where the total is of nothing."""
        made = exponent_shift.made(number, total, (*(self.batch if self.merged else self.sizes.batch), self.lengths[1]))
        return made if self.line is None else descriptors.filled(self.line, made)

    def _bounds(self, asked: Sequence[Any]) -> list[Any]:
        """Which tiles are visited, and whether the last kept tiles begin first, since their walks are the longest.

        ``asked``: the leaves that conditions look at."""
        parts = (self.fold, self.over, self.lengths, self.blocks, self.sizes.device, *asked)
        edges, stride, flip = unchanged_tensors.compute_once(parts, lambda: self._edges(asked), self.sizes.device)
        found = [edges, stride, self.grid // self.tiles, flip]
        self.edges = None if asked else found
        return found

    def _edged(self, *asked: Any) -> tuple[int, ...]:
        """The same as arguments of a kernel that is launched again: those who remember hold the edges."""
        edges, *rest = self._bounds(asked)
        return edges.data_ptr(), *rest

    def _edges(self, asked: Sequence[Any]) -> list[Any]:
        values = dict(zip([e for e, _ in self.asked], asked, strict=True))
        bounds = functools.partial(tile_ranges.bounds, self.fold, self.over)
        if self.data:
            batch = self.sizes.batch or (1,)
            missing = len(batch) - len(self.sizes.batch)
            for e, v in values.items():
                if isinstance(v, Tensor):
                    whole = v[None] if missing else v
                    values[e] = whole.expand(*batch, *whole.shape[len(batch) :]).flatten(0, len(batch) - 1)
            edges = bounds(values, self.lengths, self.blocks, self.sizes.device)
            return [edges, edges.stride(0) if edges.shape[0] > 1 else 0, 0]
        edges = bounds(values, self.lengths, self.blocks, torch.device("cpu"))
        walks = edges[0, :, -1] - edges[0, :, 0]
        return [edges.to(self.sizes.device), 0, int(walks[-1] > walks[0])]


def launches(over: str, folds: Sequence[Fold], values: Values, batch: tuple[int, ...], sizes: Sizes) -> list[Launch]:
    """The launches of one direction. Where it takes several kernels, each has a tile of its own, and a plan has room
    for one: the last one's, as ``tiles_of`` shows it, stands for all of these, in as many parts as the plan says."""
    if len(folds) > 1 and (one := _together(over, folds, values, batch, sizes)) is not None:
        return [one]
    made = lambda: [Launch(fold, over, values, batch, sizes) for fold in folds]
    asked = dict(overriding_plans()).get(over)
    if asked is None or len(folds) == 1:
        return made()
    with use_plan({}):
        own = made()
    if replace(own[-1].plan, parts=asked.parts) != asked:
        return made()
    for each in own:
        if each.plan.parts != asked.parts:
            each.prepare(values, replace(each.plan, parts=asked.parts))
    return own


def _together(over: str, folds: Sequence[Fold], values: Values, batch: tuple[int, ...], sizes: Sizes) -> Launch | None:
    """One launch for what would take several, where two groups of warps can divide its sums."""
    if not hopper.runs_warp_specialized(sizes.device):
        return None
    scaled = [pair for fold in folds for pair in fold.scaled]
    whole = replace(folds[0], reductions=tuple(r for r, _ in scaled), scales=tuple(s for _, s in scaled))
    one = Launch(whole, over, values, batch, sizes)
    return one if one.kernel.staged else None
