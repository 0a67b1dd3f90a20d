"""Stages of a panel on a GPU: GEMMs by the vendor, everything else by generated kernels.

A group of stages becomes vendor GEMMs that fill the panel, one kernel that takes every row through all stages
(``row_kernel.py``), and one GEMM for every sum of vectors, whose weights that kernel wrote over the panel; or a
generated GEMM writes the weights in its epilogue (``epilogue.py``). Scalars that are folded over rows have a kernel of
their own. A :class:`KernelStep` holds the memory plan of its loop, and from ``begin`` on an arena and accumulators.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ....plan import settings
from ....plan.panel_layout import InPlaceLayout, PanelLayout
from ....program.expression import Expr
from ....program.lower import Fold, Lowered
from ....reductions import outputs_of
from ...common import combine, matmul, skip_small_tiles
from ...common.bounded_cache import BoundedCache
from ...common.evaluate import Evaluator, Sizes, from_layout, to_layout
from ...common.torch_code import ElementwiseGroup, group_elementwise
from ...panel import Panel, PanelLoop, iterate_grid
from ..codegen.kernel_spec import Unsupported
from ..kernels import elementwise, topk
from ..launch import driver
from ..launch.replay import Replay, record
from . import epilogue, row_kernel
from .accumulators import Accumulators, PanelWeights, StoredWeights, contract_by_pingpong
from .arena import Arena, MemoryPlan
from .epilogue import EpilogueGemm
from .row_kernel import OFFSETS, fuse_stages, shift_reduction

# Replays of whole loops over panels (``launch/replay.py``).
#
# The key is the program, the sizes, dtypes and strides of tensors, the numbers, and the settings. The first run of a
# key is not recorded, the second is, and from the third on the recording is replayed. Without a budget, panel sizes
# depend on free memory: they are chosen anew each time, and a recording is used only if they are the same.

_MOST_RECORDINGS = 4  # recordings of one kind, with different panels
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
Walk = Callable[[Lowered, Mapping[str, Any], Sizes, int], list[Any]]


@dataclass(frozen=True)
class _Recording:
    """A recorded loop over panels."""

    replay: Replay
    plans: tuple  # the tiles of its kernels
    choices: tuple[tuple[Any, Any], ...]  # what chose the panels of each of its parts, and the panels

    def is_current(self, is_bounded: bool) -> bool:
        """True when the loop would be the same now; ``is_bounded``: the memory for it is given, not what is free."""
        return self.plans == _list_plans() and (
            is_bounded or all(plan.choose_default_layout() == layout for plan, layout in self.choices)
        )


@dataclass
class _Loop:
    """Loops over panels of one kind. The program is held, so that its id stays its own."""

    program: Lowered
    failed: bool = False  # it cannot be recorded
    recordings: list[_Recording] = field(default_factory=list)


_LOOPS: BoundedCache[tuple, _Loop] = BoundedCache(512)  # those of hundreds of lengths
_SEEN_ONCE: BoundedCache[tuple, bool] = BoundedCache(1024)  # most are not seen again, and evict no recording


def replay_walk(walk: Walk, program: Lowered, inputs: Mapping[str, Any], sizes: Sizes, limit: int) -> list[Any]:
    """What ``walk`` returns, by a replay where there is one; ``limit``: bytes that it may take, 0: as many as there
    are."""
    key = _make_key(program, inputs, sizes, limit)
    loop = None if key is None else _LOOPS.find(key) or _find_from_second_run(key, program)
    if loop is None or loop.failed:
        return walk(program, inputs, sizes, limit)
    is_bounded = bool(limit) or settings.requested_budget() is not None
    for known in loop.recordings:
        if known.is_current(is_bounded):
            found = known.replay.run(*[v for v in inputs.values() if isinstance(v, Tensor)])
            return walk(program, inputs, sizes, limit) if found is None else list(found)
    if len(loop.recordings) >= _MOST_RECORDINGS:
        return walk(program, inputs, sizes, limit)
    return _record(loop, walk, inputs, sizes, limit)


def _make_key(program: Lowered, inputs: Mapping[str, Any], sizes: Sizes, limit: int) -> tuple | None:
    """All that a loop over panels depends on but its tiles; None where it may depend on more."""
    if settings.shrink_factor() > 1 or skip_small_tiles.active() is not None or not driver.can_relaunch(sizes.device):
        return None
    if sizes.shard is not None or matmul.dry_run_sizes.get() or torch._C._are_functorch_transforms_active():
        return None
    key: list[Any] = [
        id(program),
        limit,
        settings.requested_budget(),
        sizes.rows,
        sizes.cols,
        sizes.device,
        sizes.compute,
    ]
    key += [*sizes.letters.values(), *inputs]
    grad, first = torch.is_grad_enabled(), dict[int, int]()
    for at, v in enumerate(inputs.values()):
        if not isinstance(v, Tensor):
            key += (type(v), v, v == 0 and str(v))  # zeros have signs
        elif type(v) not in _PLAIN or v.device != sizes.device or (grad and v.requires_grad):
            return None
        else:
            address = v.data_ptr()
            key += (v.dtype, v.shape, v.stride(), address & 15, first.setdefault(address, at))
    return tuple(key)


def _find_from_second_run(key: tuple, program: Lowered) -> _Loop | None:
    """The kind of a loop from its second run on, which is recorded; None on the first."""
    if _SEEN_ONCE.pop(key, None) is None:
        _SEEN_ONCE.keep(key, True)
        return None
    return _LOOPS.keep(key, _Loop(program))


def _record(loop: _Loop, walk: Walk, inputs: Mapping[str, Any], sizes: Sizes, limit: int) -> list[Any]:
    tensors = [v for v in inputs.values() if isinstance(v, Tensor)]
    found, replay, choices = record(lambda *_: walk(loop.program, inputs, sizes, limit), tensors, sizes.device)
    if replay is None:
        loop.failed = True
    else:
        loop.recordings.append(_Recording(replay, _list_plans(), choices))
    return found


def _list_plans() -> tuple:
    """The tiles of all kernels on panels."""
    return (*epilogue.PLANS.values(), *epilogue.SHALLOW.values(), *row_kernel.PLANS.values())


_BOTH = frozenset({"rows", "cols"})


class KernelStep:
    """Stages done by kernels; see :class:`monoidreduce.engines.panel.Step`."""

    splits_softmax_means = aligns_features = True

    @staticmethod
    def run_or_replay(run: Callable[..., list[Any]], *given: Any) -> list[Any]:
        return replay_walk(run, *given)

    def __init__(self, loop: PanelLoop, sizes: Sizes, dtypes: set[torch.dtype]):
        self.loop, self.sizes = loop, sizes
        self.plan = MemoryPlan(loop, sizes, dtypes)
        self.groups = self.plan.groups

    def choose_layout(self, limit: int) -> PanelLayout | None:
        return self.plan.choose_layout(limit)

    def least_bytes(self) -> int:
        return self.plan.least_bytes()

    def compute_row_scalars(self, scalars: tuple[Expr, ...], whole: Evaluator) -> None:
        """Scalars of all rows in one kernel: with a torch call each the GPU would wait for the host."""
        for side, fed_with, outputs in _gather_scalars(scalars):
            leaves = [from_layout(whole(e), e) for e in fed_with]
            key: tuple = (side, self.sizes.rows, self.sizes.cols, self.sizes.device, self.sizes.compute)
            key += tuple((row_kernel.specialization(v), getattr(v, "shape", None)) for v in leaves)
            try:
                launch = _SCALAR_LAUNCHES.find(key) or _SCALAR_LAUNCHES.keep(
                    key, elementwise.ElementwiseLaunch(side, leaves, self.sizes)
                )
            except Unsupported:
                continue
            found = launch(leaves)
            driver.report(launch.relaunch, (*found, *launch.template.fill(leaves, by_address=False)))
            whole.memo |= {e: to_layout(v, e) for e, v in zip(outputs, found, strict=True)}

    def begin(self, layout: PanelLayout) -> None:
        recorder = driver.recording.get()
        if recorder is not None:
            recorder.chose_panels(self.plan, layout)
        self.layout, plan = layout, self.plan
        self.shifted = layout.cols < self.sizes.cols  # panels may begin at another column than 0
        extra = {(n, dtype) for places in plan.weight_places for dtype, n in places if isinstance(n, int)}
        buffers = {f: plan.pair_dtype for f in self.loop.products} | {k: k[1] for k in sorted(extra, key=str)}
        self.arena = Arena(buffers, layout, self.sizes, plan.narrow_dtype)
        self.accumulators = Accumulators(plan, layout, self.arena)
        in_blocks = layout.outer == "rows" and layout.rows < self.sizes.rows and self.shifted
        self.without_labels = plan.epilogue_without_labels() if layout.in_place or in_blocks else None
        self.directions = _BOTH  # those that the panel is folded over
        self.stored: Callable[[Panel, Sizes], PanelWeights] | None = None  # the panel's weights, where they are stored
        self.filled: tuple[Any, set[Expr]] = (None, set())  # a panel, and its inner products that are there
        self.kernels = _list_row_kernels(self.loop)
        self.panel_sizes: dict[tuple[int, int], Sizes] = {}

    # The order of panels

    def iterate_panels(self) -> Iterable[tuple[slice, slice]]:
        if self.layout.in_place is not None:
            return self._iterate_in_place(self.layout.in_place)
        return self._iterate_blocks() if self.layout.blocks else iterate_grid(self.sizes, self.layout)

    def _iterate_blocks(self) -> Iterator[tuple[slice, slice]]:
        """Blocks of rows one after the other, a strip of columns of each at a time."""
        cols = self.sizes.cols
        self.accumulators.begin_blocks(self.layout.blocks)
        for block in self.layout.blocks:
            self.accumulators.begin_block(block)
            for start in range(0, cols, block.cols):
                for row in range(block.first, block.last, block.rows):
                    yield slice(row, min(block.last, row + block.rows)), slice(start, min(cols, start + block.cols))
            self.accumulators.close_borrowed()

    def _iterate_in_place(self, layout: InPlaceLayout) -> Iterator[tuple[slice, slice]]:
        """Panels of all rows, in the memory of the largest column gradient until that is written."""
        rows = self.sizes.rows
        self.accumulators.begin_in_place(layout)
        if layout.stored:
            yield from self._iterate_stored(layout)
        for one in layout.panels:
            if "cols" not in one.over:  # the row gradients are complete, and the memory of their totals is needed
                self.accumulators.close_borrowed()
            self.directions = one.over
            self.arena.move_panel(one.at, rows, one.last - one.first)
            yield slice(0, rows), slice(one.first, one.last)
        self.accumulators.close_borrowed()

    def _iterate_stored(self, layout: InPlaceLayout) -> Iterator[tuple[slice, slice]]:
        """All columns once, to fold them, then those whose weights were stored meanwhile."""
        gemm, rows = self.plan.epilogue_with_storage(), slice(0, self.sizes.rows)
        assert gemm is not None
        stored = StoredWeights(self.accumulators, layout, gemm, self.without_labels, self._feed_epilogue)
        self.stored, self.directions = stored.fold_columns, frozenset()
        yield rows, slice(0, self.sizes.cols)
        for one in layout.stored:
            self.stored, self.directions = stored.take_weights, one.over
            yield rows, slice(one.first, one.last)
        self.stored = None
        stored.close()

    # A group of stages of one panel

    def run_stages(self, group: range, panel: Panel) -> None:
        at, totals = group[-1], self.accumulators
        split, here = self.plan.splits[at], self._sizes_of(panel)
        self._fold_over_rows(at, panel, here)
        self._precompile(group, panel, here)
        weights = self._write_weights(group, panel, here)
        for one in split.sums:
            value = totals.add_vector_sum(at, one, weights, panel) if one.over in self.directions else None
            if value is not None:
                panel.keep_results(at, one.place, [value], [totals.complete.get((at, one.place))])
        if self.layout.in_place is None and totals.block is None and panel.cols.stop == self.sizes.cols:
            totals.close_borrowed()
        for place, e in split.topk:
            reduction = self.loop.stages[at].fold.reductions[place]
            panel.keep_results(at, place, topk.select_best_of_panel(weights.matrices[e], reduction, here.compute))

    def finish_stage(self, at: int) -> list[list[Tensor] | None]:
        return self.accumulators.finish_stage(at)

    def _sizes_of(self, panel: Panel) -> Sizes:
        rows, cols = panel.rows.stop - panel.rows.start, panel.cols.stop - panel.cols.start
        if (rows, cols) not in self.panel_sizes:
            self.panel_sizes[rows, cols] = replace(self.sizes, rows=rows, cols=cols)
        return self.panel_sizes[rows, cols]

    def _write_weights(self, group: range, panel: Panel, here: Sizes) -> PanelWeights:
        """Take every row through the stages: results over columns are handed over, the last stage's weights
        returned."""
        if self.stored is not None:
            return self.stored(panel, here)
        in_place = self.layout.in_place
        known = self.plan.epilogue_of_last_stage() if in_place and in_place.stored else None
        gemm = self.without_labels or known or self.plan.epilogue(self.shifted)
        if gemm and not gemm.guesses:
            self._weigh_labels(panel)
            return self._run_epilogue(gemm, panel, here, [])
        stages = fuse_stages(self.loop, group, self.shifted)
        wholes = [self.arena.get_scalars(n) for names in stages.names for n in names]
        results = [torch.empty_like(w) if self.shifted else w[panel.rows] for w in wholes]
        run = functools.partial(self._run_epilogue, gemm) if gemm else functools.partial(self._run_row_kernel, group)
        weights = run(panel, here, results)
        places = [(stage, place) for stage in group for place in self.plan.splits[stage].places["cols"]]
        fold = Fold((), tuple(r for own in stages.folds for r in own))
        own = zip(places, combine.split(fold, results), combine.split(fold, wholes), strict=True)
        for (stage, place), (r, values), (_, complete) in own if "cols" in self.directions else ():
            if self.shifted:
                self.accumulators.combine_scalars(stage, place, r, [t[: here.rows] for t in values], panel)
            else:
                panel.keep_results(stage, place, values, complete)
        return weights

    def _weigh_labels(self, panel: Panel) -> None:
        """Weigh the label columns of a panel's rows, or of its block's, once, where they are left out of weights."""
        block = self.accumulators.block
        rows = panel.rows if block is None else slice(block.first, block.last)
        if self.without_labels and self.accumulators.labelled_rows != rows:
            across = panel.with_all_columns(rows)
            values = self._feed_epilogue(self.without_labels, across)
            terms = self.without_labels.weigh_labels(values, self._sizes_of(across))
            self.accumulators.keep_label_terms(terms, across)

    def _run_epilogue(self, gemm: EpilogueGemm, panel: Panel, here: Sizes, results: list[Tensor]) -> PanelWeights:
        """Weights by a GEMM with an epilogue."""
        out = self.arena.panel[gemm.product][: here.rows, : here.cols]
        corrections = gemm.write_weights(out, self._feed_epilogue(gemm, panel), results, here)
        return PanelWeights({self.plan.splits[self.groups[0][-1]].weights[0]: out}, corrections)

    def _feed_epilogue(self, gemm: EpilogueGemm, panel: Panel) -> dict[Expr, Any]:
        values = {e: self._feed_kernel(f, panel) for e, f in gemm.feeds} | self._offsets(panel)
        operands = zip(gemm.operand_leaves, gemm.operands, strict=True)
        return values | {e: panel.feed(f).to(self.plan.gemm_dtype).unsqueeze(0) for e, f in operands}

    def _run_row_kernel(self, group: range, panel: Panel, here: Sizes, results: list[Tensor]) -> PanelWeights:
        """Weights by vendor GEMMs and a kernel over the rows of their panel."""
        stages, last = fuse_stages(self.loop, group, self.shifted), group[-1]
        values = {e: self._feed_kernel(f, panel) for e, f in zip(stages.leaves, stages.feeds, strict=True)}
        outputs: list[Any] = list(results)
        found, written = {}, []
        places = self.plan.weight_places[last]
        for w, inside, (dtype, place) in zip(self.plan.splits[last].weights, stages.weights, places, strict=True):
            if place is None:
                found[w] = values[inside][0]
                continue
            buffer = self.arena.panel[(place, dtype) if isinstance(place, int) else place].view(dtype)
            found[w] = buffer[: here.rows, : here.cols]
            written.append(inside)
            outputs += [found[w], found[w].stride(0)]
        if outputs:
            work = row_kernel.RowWork(stages.leaves, stages.folds, stages.names, tuple(written))
            self._launch((group, self.shifted), work, "cols", values, panel, here, outputs)
        return PanelWeights(found)

    def _fold_over_rows(self, at: int, panel: Panel, here: Sizes) -> None:
        """Fold scalars over the rows of a panel, and combine them with those of the panels before."""
        split, stage = self.plan.splits[at], self.loop.stages[at]
        if not split.folds["rows"] or "rows" not in self.directions:
            return
        fold = Fold((*stage.fold.leaves, *OFFSETS), tuple(map(shift_reduction, split.folds["rows"])))
        values = {e: self._feed_kernel(f, panel) for e, f in zip(stage.fold.leaves, stage.feeds, strict=True)}
        kinds = [outputs_of(r)[k][1] for r, k in fold.outputs]
        dtypes = [here.compute if kind == "float" else torch.int64 for kind in kinds]
        outputs = [torch.empty(here.cols, dtype=dtype, device=here.device) for dtype in dtypes]
        self._launch(at, row_kernel.RowFold(fold), "rows", values, panel, here, outputs)
        for place, (r, own) in zip(split.places["rows"], combine.split(fold, outputs), strict=True):
            self.accumulators.combine_scalars(at, place, r, own, panel)

    # Feeds and launches

    def _feed_kernel(self, f: Expr, panel: Panel) -> Any:
        """What is fed to a kernel: numbers, and tensors ``[1, length(, length)]``; an inner product is computed
        once."""
        if f.feature is not None:
            return None
        value = self._compute_product(f, panel) if f.op == "dot" else panel.feed(f)
        if isinstance(value, Tensor):
            return value.unsqueeze(0)
        if self.sizes.compute is torch.float64 and f.dtype == "float":  # scalar arguments of kernels are float32
            return torch.full((1,), value, dtype=torch.float64, device=self.sizes.device)
        return value

    def _compute_product(self, f: Expr, panel: Panel) -> Tensor:
        """An inner product of a panel, by a vendor GEMM."""
        where, here = (panel.rows, panel.cols, self.directions), self._sizes_of(panel)
        out = self.arena.panel[f][: here.rows, : here.cols]
        if self.filled[0] != where:
            self.filled = (where, set())
        if f not in self.filled[1]:
            operands = [panel.feed(a) for a in (f.args if f.args[0].rows else f.args[::-1])]
            dtype = self.plan.gemm_dtype
            x, y = (t if dtype is None else t.to(dtype) for t in operands)
            matmul.multiply_into_panel(out, x, y)
            self.filled[1].add(f)
        return out

    def _offsets(self, panel: Panel) -> dict[Expr, int]:
        begins = (panel.rows.start, panel.cols.start, self.sizes.rows, self.sizes.cols)
        return dict(zip(OFFSETS, begins, strict=True))

    def _launch(
        self, key: Any, work: row_kernel.KernelWork, over: str, values: dict, panel: Panel, here: Sizes, outputs: list
    ) -> None:
        values = {**values, **self._offsets(panel)}
        types = tuple(v.dtype if isinstance(v, Tensor) else type(v) for v in values.values())
        sizes = (here.rows, here.cols, here.compute, here.device, tuple(here.letters.values()))
        whole = (key, over, len(outputs), types, sizes, row_kernel.PLANS[over])
        if whole not in self.kernels:
            self.kernels[whole] = row_kernel.prepare_kernel(work, over, values, here)
        self.kernels[whole](outputs, values, here.device)

    # Compilation

    def _precompile(self, group: range, panel: Panel, here: Sizes) -> None:
        """Compile the kernels around a GEMM with a guessed maximum, and its sums', at the same time, before the first
        panel of its kind is worked on."""
        gemm = self.plan.epilogue(self.shifted)
        if gemm is None or not gemm.guesses:
            return
        key = (here.cols, here.device, self.directions, *here.letters.values())
        if key in gemm.compiled:
            return
        if driver.compile_ahead(here.device, lambda: self._launch_all(gemm, group, panel, here)):
            gemm.compiled.add(key)

    def _launch_all(self, gemm: EpilogueGemm, group: range, panel: Panel, here: Sizes) -> None:
        """Launch all that is done to a panel but vendor GEMMs, on copies: nothing is added to the real totals."""

        def contract(out: Tensor, weights: Tensor, vectors: Tensor, over: str, add: bool) -> None:
            contract_by_pingpong(out, weights if over == "cols" else weights.mT, vectors, add)

        step = copy.copy(self)
        step.arena = self.arena.fork()
        totals = step.accumulators = self.accumulators.fork(step.arena)
        names = [n for names in fuse_stages(self.loop, group, False).names for n in names]
        results = [step.arena.get_scalars(n)[panel.rows] for n in names]
        weights = step._run_epilogue(gemm, panel, here, results)
        weights = replace(weights, contract=contract)
        for one in self.plan.splits[group[-1]].sums:
            if one.over in self.directions:
                totals.add_vector_sum(group[-1], one, weights, panel)
        totals.add_waiting_labels(group[-1])


_SCALAR_LAUNCHES: BoundedCache[tuple, elementwise.ElementwiseLaunch] = BoundedCache(256)


@functools.lru_cache(maxsize=1024)
def _gather_scalars(scalars: tuple[Expr, ...]) -> list[ElementwiseGroup]:
    return group_elementwise(scalars, frozenset())


@functools.lru_cache(maxsize=256)
def _list_row_kernels(loop: PanelLoop) -> dict[tuple, row_kernel.PreparedKernel]:
    """The kernels of a loop that were written so far."""
    return {}


# The same on meta tensors, for estimates of memory: panels that are alike run once


class _MetaPlan(MemoryPlan):
    """A memory plan for meta tensors, with the fused GEMMs of the real device."""

    def __init__(self, loop: PanelLoop, sizes: Sizes, dtypes: set[torch.dtype], real_sizes: Sizes):
        self.real = MemoryPlan(loop, real_sizes, dtypes)
        super().__init__(loop, sizes, dtypes)

    def epilogue(self, shifted: bool) -> EpilogueGemm | None:
        return self.real.epilogue(shifted)


class MetaStep(KernelStep):
    """Runs the panel engine on meta tensors; of panels that are alike, only the first."""

    real_sizes: ClassVar[Sizes]

    def __init__(self, loop: PanelLoop, sizes: Sizes, dtypes: set[torch.dtype]):
        super().__init__(loop, sizes, dtypes)
        self.plan = _MetaPlan(loop, sizes, dtypes, self.real_sizes)

    def iterate_panels(self) -> Iterator[tuple[slice, slice]]:
        seen = set()
        for rows, cols in super().iterate_panels():
            own = self.arena.panel is self.arena.own
            kind = (rows.stop - rows.start, cols.stop - cols.start, self.directions, own)
            if kind not in seen:
                seen.add(kind)
                yield rows, cols
