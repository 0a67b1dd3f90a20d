"""One launch of a fold: from tensors to a running kernel, and everything prepared for the next call.

:meth:`FoldLaunch.prepare` lists the steps before a first launch, :meth:`FoldLaunch.launch_into` those of every call.
Leaves are passed as they are, by pointer and strides (0 where broadcast); batch dimensions that cannot be merged are
decoded from the program id. Lengths are run-time arguments, so that a new length compiles nothing.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....plan.schedule import FEW_ROWS, Tile
from ....program.expression import Expr
from ....program.lower import Fold
from ....reductions import kind_of
from ....reductions.best import worst
from ...common import bounded_cache, evaluate
from ...common.combine import combine, split
from ...common.evaluate import Allocator, Form, Sizes, result_form
from ..codegen import compiler, few_rows, kernel_spec, tile_ranges
from ..codegen.kernel_spec import (
    K_LOOP_DEPTH,
    NARROW,
    SMALL,
    WIDEST,
    Spec,
    Unsupported,
    count_concurrent_tiles,
    list_k_loop_operands,
    specialize,
)
from ..codegen.lookups import are_prepared
from ..codegen.reductions import is_stored
from ..launch import descriptors, driver
from ..launch.replay import DescriptorOf, FoundAtLaunch, Leaf, Recipe
from ..schedules import attention, kernel_plan, logit_forms, pingpong, spec_from_tensors, sum_of_products
from ..schedules.kernel_plan import KernelPlan, Rendering, choose_few_plan, choose_plan, count_splits, shrink
from ..schedules.pingpong import EXTRA, TILE
from . import small_kernels, topk

Leaves = Mapping[Expr, Any]  # Python numbers, or tensors [*batch, length(, features)]
Merged = Callable[[], Leaves]  # the leaves with merged batch dimensions, made where they are needed
Then = Callable[[list[Tensor]], None] | None  # what else writes to the results of a launch


class ResultLayout(NamedTuple):
    """How a result lies in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # None: contiguous
    summed: bool  # its shape is that after a sum over batch dimensions; a kernel that does not sum has the whole batch
    steps: tuple[int, ...]  # of the merged batch dimensions (0 where summed), and from one row or column to the next


Layouts = Mapping[tuple[Expr, int], ResultLayout]  # by reduction and result: those that are not plainly contiguous

_EDGED = 4  # arguments that say which tiles are visited
# How many instances a multiprocessor must have if a batch dimension is folded too: loops of different length (masks)
# need more of them to be as long everywhere, unless problems are so small that a sum afterwards costs the host more.
# H200, heads of 64 and 128 with four query heads a key, 512 instances: 0.95 to 0.98 of the time with a sum afterwards,
# with a causal mask 0.96 to 1.04; eight query heads, causal: 1.12. 1024 instances: 0.86 to 1.01.
LEAST_INSTANCES = 3
_LEAST_MASKED = 6
_LITTLE = 2**28  # pairs
_GROUP_SIZES = (2, 4, 8, 16)  # parts of the text: divisions are shifts (as a run-time number: 2.5 % of a kernel's time)
# By how much fewer pairs, of more than 64 features, pay for descriptors. H200, attention of 128 features, 2²⁵ and 2²⁶
# pairs (128 x 16 heads of 128 rows to 4 x 16 of 1024): 0.79 to 1.14 of the forward's time, 0.85 to 0.94 with gradients;
# of 64 features no gain that could be told from noise.
WIDE_GAIN = 8


def describe_tensor(v: Tensor) -> tuple:
    """What kernels depend on in a tensor besides its numbers."""
    return v.dtype, v.shape, v.stride(), v.data_ptr() & 15


def describe_numbers(numbers: Sequence[Any]) -> tuple:
    """What a kernel's text depends on in Python numbers: their sign, and whether they fit in 32 bits."""
    return tuple([found for v in numbers for found in (v > 0, abs(v) >= SMALL)])


@dataclass(frozen=True)
class KernelCall:
    """A kernel and all that it is called with."""

    kernel: compiler.Kernel
    plan: KernelPlan
    grid: int
    arguments: tuple[Any, ...]
    wide: bool  # whether offsets inside a tile need int64
    precision: str  # of float32 matrix products
    ragged: bool  # whether some tile reaches beyond the folded axis, and needs masks
    device: torch.device

    def constants(self, module: Any) -> dict[str, Any]:
        """The values of ``kernel_text.CONSTANTS``, which are fixed when the kernel is compiled."""
        kind = module.tl.int64 if self.wide else module.tl.int32
        given = (self.plan.block_kept, self.plan.block_folded, kind, self.precision, self.ragged)
        return dict(zip(compiler.CONSTANTS, given, strict=True))


def compiler_options(kernel: compiler.Kernel, plan: KernelPlan) -> dict[str, int]:
    """Compiler options of a kernel besides warps and stages: a limit on registers per thread.

    A softmax over narrow vectors in small tiles runs four program instances per multiprocessor as long as a thread has
    at most 128 registers; by default the compiler takes a few more (causal attention of 64 features on an H200: 20 %
    slower). What is given per pair needs more of them.
    """
    if kernel.hand_scheduled:
        return kernel_plan.limit_registers(kernel.consumers)
    small = plan.num_warps == 4 and plan.block_kept * plan.block_folded <= 64 * 64 and kernel.widths.state <= 64
    small = small and not any(e.is_pair for e in kernel.leaves)
    limited = kernel.traits.guesses and small and torch.version.hip is None  # AMD's compiler has no such option
    return {"maxnreg": 128} if limited else {}


def execute(call: KernelCall) -> Callable[..., None] | None:
    """Compile a kernel and launch it on the current stream of its device.

    Returns what launches it again with other tensors; None where it cannot be launched by address."""
    module = driver.load_module(call.kernel.text, call.kernel.functions)
    constants = call.constants(module)
    options = dict(num_warps=call.plan.num_warps, num_stages=call.plan.num_stages)
    options |= compiler_options(call.kernel, call.plan)
    with driver.use_device(call.device):
        kernel, grid = getattr(module, call.kernel.name), (call.grid,)
        compiled = driver.launch(kernel, grid, call.arguments, constants | options)
        driver.report_resources(compiled)
        return driver.make_relauncher(compiled, grid, tuple(constants.values()), call.device)


class ArgumentTemplate:
    """The arguments of a kernel after its outputs: numbers, and gaps that leaves fill at every launch."""

    def __init__(self, values: Sequence[Any] = ()):
        self.values: list[Any] = [*values]
        self.gaps: list[tuple[int, int, bool]] = []  # place, leaf, and whether that is a tensor

    def add_gap(self, leaf: int, is_tensor: bool) -> None:
        """Leave a gap for a leaf."""
        self.gaps.append((len(self.values), leaf, is_tensor))
        self.values.append(None)

    def add_leaf(self, leaf: int, v: Any) -> list[int]:
        """The same, with the strides of a tensor like ``v`` behind it (0 where broadcast); returns these."""
        self.add_gap(leaf, isinstance(v, Tensor))
        if not isinstance(v, Tensor):
            return []
        strides = [0 if n == 1 else s for n, s in zip(v.shape, v.stride(), strict=True)]
        self.values += strides
        return strides

    def fill(self, leaves: Sequence[Any], by_address: bool) -> list[Any]:
        """The arguments for these leaves; ``by_address``: addresses in place of tensors."""
        found = self.values.copy()
        for at, leaf, is_tensor in self.gaps:
            found[at] = leaves[leaf].data_ptr() if is_tensor and by_address else leaves[leaf]
        return found

    def list_recipe_arguments(self) -> list[Any]:
        """The same for a :class:`Recipe`."""
        found = self.values.copy()
        for at, leaf, is_tensor in self.gaps:
            found[at] = Leaf(leaf, is_tensor)
        return found


class FoldLaunch:
    """One kernel of a fold on tensors of given types, shapes, strides and alignment, with its arguments.

    Prepared once; a call allocates the outputs, fills in the pointers and launches. At small sizes Python overhead
    dominates. Other launches that end in results of a fold are subclasses: over lists (``listed_launch.py``), of
    histograms (``histogram.py``), of sums over both axes (``joint_launch.py``).
    """

    combines = False  # True: what the kernel writes are parts of results, which torch combines
    ordered = True  # splits follow each other along the folded axis
    least_masked = _LEAST_MASKED

    def __init__(
        self,
        fold: Fold,
        over: str,
        values: Leaves,
        batch: tuple[int, ...],
        sizes: Sizes,
        layouts: Layouts | None = None,
    ):
        """``values``: the leaves, with ``batch`` as their merged batch dimensions; ``layouts``: of its results."""
        self.fold, self.over, self.batch, self.sizes = fold, over, batch, sizes
        self.layouts = {o: found for o in fold.outputs if (found := (layouts or {}).get(o)) is not None}
        # the leaves that masks depend on, and their places
        self.mask_leaves = tuple((e, fold.leaves.index(e)) for e in spec_from_tensors.condition_leaves(fold))
        self.topk_places = [at for at, (r, k) in enumerate(fold.outputs) if kind_of(r).unsorted and k == 0]
        self.keeps_pairs = any(kind_of(r).keeps_pairs for r in fold.reductions)
        self.lengths = (sizes.rows, sizes.cols) if over == "cols" else (sizes.cols, sizes.rows)
        self.copied: tuple | None = None  # see _find_copied; None: not asked yet
        self._describe(values)
        self.first_spec = self.spec
        self.prepare(values)

    def at_lengths(self, values: Leaves, batch: tuple[int, ...], sizes: Sizes, layouts: Layouts) -> FoldLaunch | None:
        """This launch for other lengths on the same side of each threshold, and leaves that are alike (``engine.py``):
        equal to a new one. What does not depend on lengths is not computed again, and a compiled kernel is launched on
        another grid. None where it may be another kernel."""
        if type(self) is not FoldLaunch or batch != self.batch or self.few_rows is not None:
            return None
        one = object.__new__(FoldLaunch)  # a copy, in half the time of ``copy.copy``
        one.__dict__.update(self.__dict__)
        one.sizes, one.layouts = sizes, {o: found for o in self.fold.outputs if (found := layouts.get(o)) is not None}
        one.lengths = (sizes.rows, sizes.cols) if self.over == "cols" else (sizes.cols, sizes.rows)
        if one.lengths[0] <= FEW_ROWS:
            return None
        one.spec, one.copied = self.first_spec, None if any(self.conversions) else self.copied
        one.prepare(values)
        one.relaunch = self._relaunch_as(one)
        return one

    def _relaunch_as(self, other: FoldLaunch) -> Callable[..., None] | None:
        """What launches the kernel that was compiled for this one as ``other`` does; None where that is another."""
        alike = other.kernel is self.kernel and (other.plan, other.call_options) == (self.plan, self.call_options)
        if not alike or not other.grid or self.mask_leaves:  # tables of conditions on data have strides of their own
            return None
        pairs = zip(self.template.values[: self.specialized], other.template.values[: other.specialized], strict=True)
        for a, b in [(a, b) for a, b in pairs if a != b]:
            if driver.specialize_integer(a) != driver.specialize_integer(b):
                return None
        return getattr(self.relaunch, "on_grid", lambda grid: None)((other.grid,))

    def _describe(self, values: Leaves) -> None:
        """The spec, and what is converted before a launch; of few kept indices, the batch dimension they share."""
        given = self.fold, self.over, values, self.batch, self.sizes
        self.spec, self.conversions = spec_from_tensors.describe_fold(*given)
        few = 0 < self.lengths[0] <= FEW_ROWS and not any(self.conversions)
        self.few_rows = few_rows.find(self.spec, values, self.batch, self.lengths) if few else None
        if self.few_rows is not None:
            self.spec, self.batch = self.few_rows.spec, self.few_rows.batch
            self.lengths = self.few_rows.kept, self.lengths[1]
            self.layouts = {} if self.few_rows.period else self.layouts  # groups have no stride of their own in results

    def prepare(self, values: Leaves, plan: KernelPlan | None = None) -> None:
        """All steps before the first launch; taken again with a smaller ``plan`` where the first did not fit."""
        self.conversions = self.conversions._replace(transposed=())
        places = {e: k for k, e in enumerate(self.fold.leaves)}
        self.norm_rows = [
            (places[one.vector], spec_from_tensors.NormRows.of(values[one.vector], len(self.batch)))
            for one in self.conversions.norms
        ]
        leaves = self.conversions.convert(values, self.batch, self.sizes)
        leaves = leaves if self.few_rows is None else self.few_rows.regroup(leaves)
        self._choose_batch_and_plan(leaves, plan)
        self._write_kernel(leaves)
        if self.kernel.transposed is not None:
            self.conversions = self.conversions._replace(transposed=(self.kernel.transposed,))
            leaves |= spec_from_tensors.transpose_leaves(self.conversions.transposed, leaves, len(self.batch))
        self._lay_out_results()
        self._lay_out_arguments(leaves)
        self.masks_read_data = self.spec.bounds and any(isinstance(values[e], Tensor) for e, _ in self.mask_leaves)
        self.needs_merged = any(self.conversions)  # whether calls need leaves with merged batch
        self.tile_range_arguments: list[Any] | None = None  # known where masks depend on indices alone
        self.relaunch: Callable[..., None] | None = None  # launches the compiled kernel

    def _choose_batch_and_plan(self, leaves: Leaves, plan: KernelPlan | None) -> None:
        """Decide whether a batch dimension is folded too, and choose the plan; see :meth:`_choose_plan`.

        A sum over query heads that share keys then takes place in registers. Instances do as much more work and are as
        much fewer: where these are too few to keep all multiprocessors equally busy, results are summed afterwards."""
        for dim in dict.fromkeys((self._find_summed_dim(leaves), None)):
            size = 0 if dim is None or self.batch[dim] not in _GROUP_SIZES else self.batch[dim]
            self.spec = specialize(self.spec, folded_batch_dim=dim, folded_batch_size=size)
            self.count = math.prod(n for k, n in enumerate(self.batch) if k != dim)  # batch elements of the results
            self._choose_plan(leaves, plan)
            self._split_folded_axis()
            masked = self.spec.bounds and math.prod((*self.batch, *self.lengths)) > _LITTLE
            least = self.least_masked if masked else LEAST_INSTANCES
            least *= driver.count_processors(self.sizes.device)
            if dim is not None and self.splits == 1 and self.grid >= least:
                break

    def _find_summed_dim(self, leaves: Leaves) -> int | None:
        """The batch dimension that all results of this kernel are to be summed over, if there is one, and if what the
        kernel computes once, before its loop over the folded axis, does not vary along it."""
        found = [self.layouts.get(o) for o in self.fold.outputs]
        if self.spec.k_loop or self.few_rows is not None or not all(one is not None and one.summed for one in found):
            return None
        steps = [one.steps for one in found if one is not None]
        summed = {tuple(k for k, n in enumerate(self.batch) if n > 1 and not s[k]) for s in steps}
        if len(summed) != 1:  # a result that is summed over other dimensions too would need another kernel
            return None
        (dims,) = summed
        asked = {e for e, _ in self.mask_leaves}
        once = [v for e, v in leaves.items() if isinstance(v, Tensor) and (e in asked or not self.spec.folds(e))]
        return dims[0] if len(dims) == 1 and not any(v.stride(dims[0]) for v in once) else None

    def _choose_plan(self, leaves: Leaves, plan: KernelPlan | None) -> None:
        """Choose the tile and its schedule, unless ``plan`` is given."""
        spec, sizes, device = self.spec, self.sizes, self.sizes.device
        plain = self._compile_plain()
        family = driver.find_family(device)
        if self.few_rows is not None and plan is None:
            widens = any(e.is_stored and spec.folds(e) for e in spec.fold.leaves)
            given = self.lengths, self.count, driver.count_processors(device), widens
            plan = choose_few_plan(plain, self.over, family, *given)
        item = 2 if spec.pieces else getattr(torch, spec.narrow or spec.compute).itemsize
        item = 1 if spec.multiplies_only_eight_bits and not plain.widths.state else item
        pairs = math.prod(self.batch) * sizes.rows * sizes.cols
        least = spec_from_tensors.VERY_MANY // (WIDE_GAIN if plain.widths.folded > 2 * NARROW else 1)
        short = spec_from_tensors.has_short_loops(spec)
        copies = self.few_rows is None and bool(spec.bounds if short else spec.k_loop or pairs >= least)
        copies = copies and any(dims is not None for dims in self._find_copied(leaves))
        tile = None
        if copies and not short and self._has_prepared_tables():
            spec = specialize(spec, descriptors=self._find_copied(leaves))
            tile = self._choose_hand_scheduled(spec, self.count)
        self.plan = plan or choose_plan(plain, self.over, item, family, copies, self.lengths[0], tile)

    def _compile_plain(self) -> compiler.Kernel:
        """The kernel without splits and descriptors: what it holds is what tiles are chosen by."""
        return compiler.compile_fold(specialize(self.spec, split=False, descriptors=()))

    def _find_copied(self, leaves: Leaves) -> tuple:
        """Per leaf, the batch dimensions of the descriptor that may copy its blocks; None where it has none."""
        if self.copied is None:
            self.copied = ()
            if driver.has_descriptors(self.sizes.device):
                vectors = self._compile_plain().folded
                vectors += tuple(list_k_loop_operands(self.spec)) if self.spec.k_loop else ()
                self.copied = descriptors.find_copied_leaves(self.spec, vectors, leaves, len(self.batch))
        return self.copied

    def _has_prepared_tables(self) -> bool:
        """True where hand-scheduled kernels have all tables that pairs look up."""
        return not self.fold.tables or are_prepared(self.fold.tables)

    def _split_folded_axis(self) -> None:
        """Into how many splits the folded axis is cut, and so how many program instances run."""
        self.tiles, folded = (-(-n // b) for n, b in zip(self.lengths, self.blocks, strict=True))
        spec, kept = self.spec, self.blocks[0]
        self.beside = count_concurrent_tiles(spec, kept, self.lengths[0]) if spec.k_loop else 0
        processors = driver.count_processors(self.sizes.device)
        self.splits = count_splits(self.plan, self.tiles * self.count, folded, processors, self.beside)
        self.grid = self.tiles * self.count * self.splits

    def _write_kernel(self, leaves: Leaves) -> None:
        """The text: a hand-scheduled kernel where the plan asks for one and it exists, else the compiler's."""
        by_hand = self._asks_for_hand_scheduled()
        copied = self._find_copied(leaves) if self.plan.rendering or by_hand else ()
        copied = descriptors.keep_vectors(self.spec.fold, copied) if by_hand else copied
        shifts = bool(self.plan.rendering and not by_hand and self.lengths[1] % 4 == 0 < self.lengths[1])
        layouts = enumerate(map(self.find_layout, self.fold.outputs)) if self.splits == 1 else ()
        strided = tuple(k for k, layout in layouts if layout is not None and layout.strides is not None)
        fields = dict(split=self.splits > 1, descriptors=copied, shift_descriptors=shifts, strided=strided)
        if self.few_rows is not None and self.splits > 1:
            fields["launches_dependents"] = driver.chains_launches(self.sizes.device)
        self.spec = specialize(self.spec, **fields)
        written = self._write_hand_scheduled() if by_hand else None
        if written is None and self.plan.block_kept & (self.plan.block_kept - 1):
            tile = f"{self.plan.block_kept} × {self.plan.block_folded}"
            raise Unsupported(f"a plan asks for a hand-scheduled kernel of {tile} pairs, and this fold has none")
        self.kernel = written or compiler.compile_fold(self.spec)

    def _asks_for_hand_scheduled(self) -> bool:
        """True when the plan names a hand-scheduled kernel whose tile there is."""
        if self.plan.rendering != Rendering.HAND_SCHEDULED or not self._has_prepared_tables():
            return False
        if not driver.runs_warp_specialized(self.sizes.device):
            return False
        kernels = (pingpong,) if self.spec.k_loop else (attention, sum_of_products)
        return any(one.has_tile(self.plan) for one in kernels)

    def _lay_out_results(self) -> None:
        """Shapes and types of what the kernel writes, and of whole results where splits are combined."""
        self.outputs = [self._output(r, k) for r, k in self.fold.outputs]
        places = enumerate(map(self.find_layout, self.fold.outputs))
        self.strides = [one.strides if one and k in self.spec.strided else None for k, one in places]
        pairs = zip(self.outputs, self.strides, strict=True)
        self.allocators = [Allocator(form, self.sizes.device, strides) for form, strides in pairs]
        whole = self.fold.outputs if self.spec.split else ()
        self.types = [self._result_dtype(r, *result_form(r, k, self.sizes)) for r, k in whole]
        self.split_lengths = self._measure_splits() if self.spec.split else []

    def find_layout(self, output: tuple[Expr, int]) -> ResultLayout | None:
        """How a result lies in memory, where not plainly: without the sums that this kernel does not make."""
        found = self.layouts.get(output)
        return None if found is None or (found.summed and self.spec.folded_batch_dim is None) else found

    def _choose_hand_scheduled(self, spec: Spec, count: int) -> Tile | None:
        """The tile of a hand-scheduled kernel, where there is one for this fold and it gains by it."""
        device, length = self.sizes.device, self.lengths[0]
        if spec.k_loop:
            return pingpong.choose_tile(spec, device, length) if count == 1 else None
        even = self.sizes.cols % 2 == 0
        return attention.choose_tile(spec, device, length, count) or sum_of_products.choose_tile(
            spec, device, count * length, even
        )

    def _write_hand_scheduled(self) -> compiler.Kernel | None:
        """The hand-scheduled kernel of the plan; None where there is none."""
        if self.spec.k_loop:
            return pingpong.write_kernel(self.spec, self.plan.block_folded > TILE)
        even = self.sizes.cols % 2 == 0
        aligned = self.plan.block_folded % self.plan.block_kept == 0
        made = attention.write_kernel_for_plan(self.spec, self.plan, even, aligned)
        return made or sum_of_products.write_kernel_for_plan(self.spec, self.plan, even)

    @property
    def returned_outputs(self) -> tuple[tuple[Expr, int], ...]:
        """The results, in the order in which a call returns them."""
        return self.fold.outputs

    @property
    def plans(self) -> dict[str, KernelPlan]:
        """The plans among which there is a choice, by direction."""
        return {} if self.spec.k_loop or self.combines else {self.over: self.plan}

    @property
    def extra_forms(self) -> list[Form]:
        """Memory that it allocates besides its outputs."""
        return []

    @property
    def is_repeatable(self) -> bool:
        """True when a replay can launch it: nothing is computed before the launch but norms and shifts."""
        return not (self.kernel.coefficients or self.topk_places or any(self.conversions._replace(norms=())))

    @property
    def holds_splits(self) -> bool:
        """True when a replay combines the results of splits, and holds them until the call is done."""
        every = [(r, [self.outputs[k] for k in at]) for r, at in split(self.fold, list(range(len(self.outputs))))]
        return (
            self.splits > 1
            and self.is_repeatable
            and all(small_kernels.can_hold_splits(r, forms) for r, forms in every)
        )

    @property
    def blocks(self) -> tuple[int, int]:
        return self.plan.block_kept, self.plan.block_folded

    def _lay_out_arguments(self, values: Leaves) -> None:
        """The arguments of every call after the outputs."""
        spec, wide, most = self.spec, False, max(*self.blocks, WIDEST)
        self.template = ArgumentTemplate()
        for k in spec.strided:
            *steps, step = self.layouts[self.fold.outputs[k]].steps
            self.template.values += [*(steps[d] for d in spec.kept_batch), step]
            wide |= step * most >= 2**31
        for e in self.kernel.leaves:
            v = values[e]
            strides = self.template.add_leaf(spec.fold.leaves.index(e), v)
            wide |= max(strides[len(self.batch) :], default=0) * most >= 2**31
            wide |= isinstance(v, int) and abs(v) >= SMALL
            self.template.values += [v.shape[-1]] if e in self.fold.tables else []
        self.specialized = len(self.template.values)  # Triton compiles for what these are a multiple of
        sizes = [*self.lengths, self.tiles, *self.batch[1:]]
        sizes += [self.few_rows.period] if self.few_rows is not None and self.few_rows.period else []
        if spec.folded_batch_dim is not None and not spec.folded_batch_size:
            sizes.append(self.batch[spec.folded_batch_dim])
        if spec.split:
            sizes += [self.splits, self.count, *([self.beside] if spec.k_loop else [])]
        self.template.values += sizes
        ragged = bool(self.kernel.hand_scheduled and spec.bounds) or self.lengths[1] % self.plan.block_folded != 0
        place = spec.fold.leaves.index
        self.shifts = [(place(n), place(t)) for n, t in self.kernel.shifts]
        self.shift_descriptor = None
        if spec.shift_descriptors and self.shifts and self.count:
            form = self.lengths[1], math.prod(self.batch), self.blocks[1], self.sizes.device
            self.shift_descriptor = descriptors.make_shift_descriptor(*form)
        copied = [(e, block) for e in spec.descriptor_dims if e in self.kernel.leaves for block in self._list_blocks(e)]
        if self.kernel.hand_scheduled and spec.k_loop and self.blocks[1] > TILE:
            copied.append((next(e for e in list_k_loop_operands(spec) if spec.folds(e)), (EXTRA, K_LOOP_DEPTH)))
        make = functools.partial(descriptors.make_descriptor, with_layout=self.kernel.hand_scheduled)
        self.descriptors = [(place(e), make(values[e], spec.descriptor_dims[e], block)) for e, block in copied]
        self.call_options: dict[str, Any] = dict(
            wide=wide, precision=evaluate.float32_precision(), ragged=ragged, device=self.sizes.device
        )

    def _list_blocks(self, e: Expr) -> list[tuple[int, ...]]:
        """How many numbers, or vectors and of how many features, each tensor descriptor of a leaf copies at a time."""
        if e.feature is None:
            return [(self.blocks[1],)]
        width, length = self.sizes.of(str(e.feature)), self.blocks[self.spec.folds(e)]
        if self.kernel.hand_scheduled and self.spec.k_loop and not self.spec.folds(e):
            length //= 2  # each consumer warp group copies its own rows
        length = min(length, TILE) if self.kernel.hand_scheduled and self.spec.k_loop else length
        if e is self.kernel.transposed:
            return [(size, length) for _, size in self.spec.descriptor_slices(e)]
        return [(length, K_LOOP_DEPTH if width > WIDEST else size) for _, size in self.spec.descriptor_slices(e)]

    def __call__(self, leaves: Sequence[Any], merged: Merged, then: Then = None) -> list[Tensor]:
        """``leaves``: as they were given, since only their pointers count; ``merged()``: with the batch merged;
        ``then``: what else writes to the results, before top-k lists are sorted."""
        outputs = [allocate() for allocate in self.allocators]
        if self.keeps_pairs and kernel_spec.whole_tile_conditions(self.fold):  # tiles may be skipped
            r = self.fold.reductions[0]
            outputs[0].fill_(worst(outputs[0].dtype, r.attrs[2][1]))
        if self.grid and not self.launch_into(outputs, leaves, merged):
            return self(leaves, merged, then)
        if then is not None:
            then(outputs)
        return self._whole(outputs) if (self.spec.split and not self.keeps_pairs) or self.topk_places else outputs

    @property
    def is_compiled(self) -> bool:
        """True where it was compiled before, and its results are nothing but what it writes."""
        plain = type(self) is FoldLaunch and self.relaunch is not None and not (self.spec.split or self.topk_places)
        return plain and not self.keeps_pairs

    def launch_into(self, outputs: list[Any], leaves: Sequence[Any], merged: Merged) -> bool:
        """Launch into these outputs (tensors or, once compiled, their addresses). False: the plan did not fit the
        device and a smaller one was prepared; call again."""
        arguments, _kept = self._arguments(leaves, merged)
        if self.relaunch is None:
            return self._compile_and_launch([*outputs, *arguments], merged)
        self.relaunch(*outputs, *arguments)
        return True

    def _arguments(self, leaves: Sequence[Any], merged: Merged) -> tuple[list[Any], Sequence[Any]]:
        """The arguments after the outputs: leaves, tile ranges, shifts and descriptors are filled in; and the tensors
        whose addresses are among them, to be kept until the launch."""
        given = self._convert(merged()) if self.needs_merged else leaves
        arguments = self.template.fill(given, by_address=self.relaunch is not None)
        if self.spec.bounds:
            arguments += self.tile_range_arguments or self._bounds([leaves[leaf] for _, leaf in self.mask_leaves])
        arguments += [self._shift(given[n], given[t]) for n, t in self.shifts]
        arguments += [descriptors.replace_base(template, given[leaf]) for leaf, template in self.descriptors]
        arguments += [
            logit_forms.evaluate_coefficient(made, lambda e: given[self.fold.leaves.index(e)])
            for made in self.kernel.coefficients
        ]
        return arguments, given

    def recipe(self) -> Recipe | None:
        """How a replay launches it again; None where it takes more than the leaves' addresses and numbers, the shifts
        of exponents, and which tiles are visited."""
        if self.relaunch is None or not self.is_repeatable:
            return None
        arguments = self.template.list_recipe_arguments()
        if self.spec.bounds:
            found = self.tile_range_arguments or (None if self.mask_leaves else self._bounds([]))
            arguments += found or [
                FoundAtLaunch(tuple(leaf for _, leaf in self.mask_leaves), self._find_bounds, _EDGED)
            ]
        count = len(self.fold.leaves) + len(self.norm_rows)  # norms come after the leaves, then shifts
        for k in range(len(self.shifts)):
            arguments.append(
                Leaf(count + k, True)
                if self.shift_descriptor is None
                else DescriptorOf(count + k, self.shift_descriptor)
            )
        arguments += [DescriptorOf(leaf, template) for leaf, template in self.descriptors]
        return Recipe(self.relaunch, tuple(self.outputs), tuple(arguments), tuple(self.strides))

    def list_shift_recipes(self, leaves: Sequence[Any]) -> list[Recipe] | None:
        """How a replay computes norms and the shifts of exponents, for leaves like these; None where torch does."""
        shape = (*self.sizes.batch, self.lengths[1])
        found: list[Recipe] = []
        for at, rows in self.norm_rows:
            if rows.strides is None or not rows.count:
                return None
            out = torch.empty(rows.shape, dtype=torch.float32, device=self.sizes.device)
            flat = leaves[at].as_strided((rows.count, rows.width), rows.strides)
            relaunch = rows.launch(out, flat)
            if relaunch is None:
                return None
            given = (Leaf(at, True), rows.count, *flat.stride())
            found.append(Recipe(relaunch, ((rows.shape, torch.float32),), given))
        for n, t in self.shifts:
            relaunch = small_kernels.replay_shift(leaves[n], leaves[t], shape)
            if relaunch is None:
                return None
            arguments = (Leaf(n, True), Leaf(t, True), math.prod(shape))
            found.append(Recipe(relaunch, ((shape, torch.float32),), arguments))
        return found

    def make_sum_recipe(self) -> Recipe | None:
        """How a replay makes memory in which the launch adds up one more result, its last leaf; None where it does
        not."""
        return None

    def list_combining_launches(self) -> list[small_kernels.CombiningLaunch] | None:
        """How a replay combines the results of splits: no launches without splits, None where torch combines them."""
        found: list[small_kernels.CombiningLaunch] = []
        if not self.spec.split:
            return found
        for r, places in split(self.fold, list(range(len(self.outputs)))):
            forms, types = [self.outputs[k] for k in places], [self.types[k] for k in places]
            most = 0 if self.few_rows is None else small_kernels.FEW_ROWS
            made = small_kernels.recipes(r, forms, types, self.sizes.device, most)
            if made is None:
                return None
            found += [one.offset(places[0]) for one in made]
        return found

    def _convert(self, values: Leaves) -> list[Any]:
        found = self.conversions.convert(values, self.batch, self.sizes)
        return [found[e] for e in self.spec.fold.leaves]

    def _compile_and_launch(self, arguments: list[Any], merged: Merged) -> bool:
        """Compile and launch; False if it did not fit the device and a smaller plan was prepared."""
        try:
            self.relaunch = execute(
                KernelCall(self.kernel, self.plan, self.grid, tuple(arguments), **self.call_options)
            )
        except Exception as error:
            smaller = shrink(self.plan) if type(error).__name__ == "OutOfResources" else None
            if smaller is None:
                raise
            self.prepare(merged(), smaller)
            return False
        return True

    def _output(self, r: Expr, k: int) -> Form:
        shape, dtype = result_form(r, k, self.sizes)
        layout = self.find_layout((r, k))
        shape = shape if layout is None else layout.shape
        stacked = self.spec.split and not self.keeps_pairs
        return ((self.splits, *shape), dtype) if stacked else (shape, self._result_dtype(r, shape, dtype))

    def _result_dtype(self, r: Expr, shape: tuple[int, ...], dtype: torch.dtype) -> torch.dtype:
        """The type of a result as the caller will hold it: 16-bit vectors where the inputs are, half the traffic."""
        vector = len(shape) > len(self.sizes.batch) + 1
        narrow = self.spec.narrow and vector and kind_of(r).sums_vectors and not (self.fold.raised or is_stored(r))
        return getattr(torch, str(self.spec.narrow)) if narrow else dtype

    def _whole(self, outputs: list[Tensor]) -> list[Tensor]:
        """Whole results: those of splits combined, top-k lists sorted."""
        if self.spec.split:
            outputs[:] = combine(
                self.fold, outputs, self.split_lengths, ordered=self.ordered, faster=small_kernels.combine_splits
            )  # in place, so that partial results are freed
            outputs[:] = [t.to(kind) for t, kind in zip(outputs, self.types, strict=True)]
        for at in self.topk_places:
            outputs[at : at + 2] = topk.sort_list(self.fold.outputs[at][0], *outputs[at : at + 2])
        return outputs

    def _measure_splits(self) -> list[int]:
        """How much of the folded axis each split covers."""
        block = self.plan.block_folded
        each, more = divmod(-(-self.lengths[1] // block), self.splits)
        ends = [min((each * k + min(k, more)) * block, self.lengths[1]) for k in range(self.splits + 1)]
        return [b - a for a, b in itertools.pairwise(ends)]

    def _shift(self, number: Tensor, total: Tensor) -> Any:
        """(number + logarithm of a total) × log2(e) along the folded axis; infinite where the total is of no pair."""
        made = small_kernels.compute_shift(
            number, total, (*(self.batch if self.needs_merged else self.sizes.batch), self.lengths[1])
        )
        return made if self.shift_descriptor is None else descriptors.replace_base(self.shift_descriptor, made)

    def _bounds(self, asked: Sequence[Any]) -> list[Any]:
        """Arguments that say which tiles are visited, and whether the last kept tiles, which visit most, start first.

        ``asked``: the values of the leaves that masks depend on."""
        leaves = [e for e, _ in self.mask_leaves]
        table = self.fold if self.masks_read_data else (tile_ranges.identify_table(self.fold), *leaves)
        parts = (table, self.over, self._table_lengths(), self.blocks, self.sizes.device, *asked)
        edges, stride, flip = bounded_cache.compute_once(parts, lambda: self._edges(asked), self.sizes.device)
        found = [edges, stride, self.grid // self.tiles, flip]
        self.tile_range_arguments = None if asked else found
        return found

    def _find_bounds(self, *asked: Any) -> tuple:
        """The same for a replay."""
        return tuple(self._bounds(asked))

    def _table_lengths(self) -> tuple[int, int]:
        """The lengths that the table of tile ranges is made for: data has these, indices may have more."""
        return self.lengths if self.masks_read_data else tile_ranges.find_longest(self.fold, self.lengths, self.blocks)

    def _edges(self, asked: Sequence[Any]) -> list[Any]:
        """The table of tile ranges, its batch stride, and whether the last kept tiles visit most."""
        values = dict(zip([e for e, _ in self.mask_leaves], asked, strict=True))
        bounds = functools.partial(tile_ranges.compute_tile_ranges, self.fold, self.over)
        if self.masks_read_data:
            batch = self.sizes.batch or (1,)
            missing = len(batch) - len(self.sizes.batch)
            summed = self.find_layout(self.fold.outputs[0])
            kept = batch if summed is None or missing else summed.shape[: len(batch)]
            if all(math.prod(v.shape[: len(self.sizes.batch)]) == 1 for v in asked if isinstance(v, Tensor)):
                kept = (1,) * len(batch)  # one table for all batch elements
            for e, v in values.items():
                if isinstance(v, Tensor):
                    whole = v[None] if missing else v
                    whole = whole.expand(*batch, *whole.shape[len(batch) :])
                    values[e] = whole[tuple(map(slice, kept))].flatten(0, len(batch) - 1)
            edges = bounds(values, self.lengths, self.blocks, self.sizes.device)
            return [edges, edges.stride(0) if edges.shape[0] > 1 else 0, 0]
        edges = bounds(values, self._table_lengths(), self.blocks, torch.device("cpu"))
        walks = edges[0, :, -1] - edges[0, :, 0]
        return [edges.to(self.sizes.device), 0, int(walks[-1] > walks[0])]
