"""Running a kernel: which text, which plan, which arguments; and all of it frozen for the next call.

Leaves are passed as they are, by pointer and strides (0 where broadcast); batch dimensions that cannot be merged are
decoded from the program's number. Lengths are run-time arguments, so that a new length compiles nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...program.expr import Expr
from ...program.lower import Fold
from ...program.reductions import KINDS
from .. import hardware
from ..combine import combine
from ..evaluate import Sizes
from . import deep, describe, emit, recent, rows, skip, source, topk
from .plan import KernelPlan, choose, parts, shrink
from .spec import WIDEST

Values = Mapping[Expr, Any]  # leaves as Python numbers or tensors [*batch, length(, features)]

SMALL = 2**28  # integers and offsets inside a tile below this are counted in int32
_BOUNDS: dict[tuple, tuple[Tensor, int]] = {}  # of conditions on indices and numbers only


@dataclass(frozen=True)
class Call:
    """One launch, ready to run: what a kernel is called with."""

    kernel: emit.Kernel
    plan: KernelPlan
    grid: int
    arguments: tuple[Any, ...]
    wide: bool  # whether offsets inside a tile need int64
    precision: str  # of float32 matrix products
    ragged: bool  # whether tiles need masks anywhere
    device: torch.device


def execute(call: Call) -> Callable[..., Any] | None:
    """Launch a kernel on the current stream of its device; what launches it again with other tensors, if there is."""
    module = source.load(call.kernel.text)
    constants = dict(
        KEPT=call.plan.block_kept,
        FOLDED=call.plan.block_folded,
        INT=module.tl.int64 if call.wide else module.tl.int32,
        PRECISION=call.precision,
        RAGGED=call.ragged,
    )
    options = dict(num_warps=call.plan.num_warps, num_stages=call.plan.num_stages)
    with source.on(call.device):
        given = source.described(module, call.arguments)
        compiled = getattr(module, call.kernel.name)[(call.grid,)](*given, **constants, **options)
        again = source.again(compiled, call.grid, tuple(constants.values()))
    if again is None or not any(isinstance(v, source.Descriptor) for v in call.arguments):
        return again
    return lambda *arguments: again(*source.described(module, arguments))


class Launch:
    """One direction of a fold on tensors of given types, shapes, strides and alignment: a kernel and its arguments.

    Made once; a call allocates the outputs, fills in the pointers and launches. Host time decides small cases.
    """

    def __init__(self, fold: Fold, over: str, values: Values, batch: tuple[int, ...], sizes: Sizes):
        self.fold, self.over, self.batch, self.sizes = fold, over, batch, sizes
        self.spec, self.casts = describe.describe(fold, over, values, batch, sizes)
        self.lengths = (sizes.rows, sizes.cols) if over == "cols" else (sizes.cols, sizes.rows)
        self.prepare(values)

    def prepare(self, values: Values, plan: KernelPlan | None = None) -> None:
        """Choose the plan, unless it is given, and write the kernel and its arguments."""
        sizes, item = self.sizes, getattr(torch, self.spec.narrow or self.spec.compute).itemsize
        kernel = emit.kernel(self.spec)
        self.plan = plan or choose(kernel, self.over, item, describe.shared(sizes.device), self.lengths[0])
        count = torch.Size(self.batch).numel()
        self.tiles, folded = (-(-n // b) for n, b in zip(self.lengths, self.blocks, strict=True))
        self.parts = parts(self.plan, self.tiles * count, folded, describe.processors(sizes.device), kernel.deep)
        self.spec = replace(self.spec, split=self.parts > 1)
        self.kernel, self.grid = emit.kernel(self.spec), self.tiles * count * self.parts
        self.reaches = emit.reaches(self.spec)
        self.data = self.spec.bounds and any(isinstance(values[e], Tensor) for e in describe.asked(self.fold))
        self.merged = bool(self.casts or self.data or self.reaches)  # whether calls need leaves with merged batch
        self.outputs = [self._output(r, k) for r, k in self.fold.outputs]
        self.again: Callable[..., Any] | None = None
        self._arguments(describe.converted(values, self.casts, self.batch, sizes), count)

    @property
    def blocks(self) -> tuple[int, int]:
        return self.plan.block_kept, self.plan.block_folded

    def _arguments(self, values: Values, count: int) -> None:
        """The arguments of every call, with room for tensors; ``fill``: which leaf goes where."""
        self.template: list[Any] = [None] * len(self.outputs)
        self.fill: list[tuple[int, Expr]] = []
        wide, most = False, max(*self.blocks, WIDEST)
        for e in self.kernel.leaves:
            v = values[e]
            self.fill.append((len(self.template), e))
            self.template.append(None)
            if isinstance(v, Tensor):
                strides = [0 if n == 1 else s for n, s in zip(v.shape, v.stride(), strict=True)]
                wide |= any(s * most >= 2**31 for s in strides[len(self.batch) :])
                self.template += strides
            else:
                wide |= isinstance(v, int) and abs(v) >= SMALL
        self.template += [*self.lengths, self.tiles, *self.batch[1:]]
        self.template += [self.parts, count] if self.spec.split else []
        ragged = (
            bool(self.spec.bounds or self.spec.split or self.reaches) or self.lengths[1] % self.plan.block_folded != 0
        )
        self.how = (wide, hardware.float32_precision(), ragged, self.sizes.device)

    def __call__(self, leaves: Values, merged: Callable[[], Values]) -> list[Tensor]:
        """``leaves``: as they were given, since only their pointers count; ``merged()``: with the batch merged."""
        outputs = [torch.empty(shape, dtype=dtype, device=self.sizes.device) for shape, dtype in self.outputs]
        if self.grid:
            given = merged() if self.merged else leaves
            values = describe.converted(given, self.casts, self.batch, self.sizes)
            arguments = list(self.template)
            arguments[: len(outputs)] = outputs
            for at, e in self.fill:
                arguments[at] = values[e]
            if self.spec.bounds:
                arguments += self._bounds(values)
            arguments += [rows.reach(values[e]) for _, e in self.reaches]
            arguments += self._descriptors(values)
            if self.again is not None:
                self.again(*arguments)
            elif not self._first(arguments, merged):
                return self(leaves, merged)
        return self._whole(outputs)

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

    def _output(self, r: Expr, k: int) -> tuple[tuple[int, ...], torch.dtype]:
        kind, _, params = r.attrs
        feature, number = KINDS[kind].outputs(r.args, params)[k]
        tail = () if feature is None else (self.sizes.of(str(feature)),)
        dtype = self.sizes.compute if number == "float" else torch.int64
        if self.spec.narrow and feature is not None and kind in ("sum", "soft") and not self.spec.split:
            dtype = getattr(torch, self.spec.narrow)  # as the caller will hold it: half the traffic
        cut = (self.parts,) if self.spec.split else ()
        return (*cut, *self.sizes.batch, self.lengths[0], *tail), dtype

    def _whole(self, outputs: list[Tensor]) -> list[Tensor]:
        """The outputs; those of a split walk combined."""
        if not self.spec.split:
            return self._tidied(outputs)
        block = self.plan.block_folded
        step = -(-self.lengths[1] // (block * self.parts)) * block
        ends = [min(k * step, self.lengths[1]) for k in range(self.parts + 1)]
        return self._tidied(combine(self.fold, outputs, [b - a for a, b in itertools.pairwise(ends)], ordered=True))

    def _tidied(self, outputs: list[Tensor]) -> list[Tensor]:
        """The lists of the best, sorted; all else as it is."""
        for at, (r, k) in enumerate(self.fold.outputs):
            if r.attrs[0] == "topk" and k == 0:
                outputs[at : at + 2] = topk.tidy(r, *outputs[at : at + 2])
        return outputs

    def _descriptors(self, values: Values) -> list[Any]:
        if not self.spec.described:
            return []
        sides = [(values[e].view(*values[e].shape[-2:]), self.spec.folds(e)) for e in deep.vectors(self.spec)]
        return [source.Descriptor(v, (self.blocks[folded], deep.DEPTH)) for v, folded in sides]

    def _bounds(self, values: Values) -> list[Any]:
        """Which tiles are visited, and whether the last kept tiles begin first, since their walks are the longest."""
        asked = {e: values[e] for e in describe.asked(self.fold)}
        device, batches = self.sizes.device, len(self.batch) - 1
        if self.data:
            found = recent.get((self, *asked.values()))
            if found is None:
                flat = {e: v.flatten(0, batches) if isinstance(v, Tensor) else v for e, v in asked.items()}
                found = skip.bounds(self.fold, self.over, flat, self.lengths, self.blocks, device)
                recent.put((self, *asked.values()), found)
            return [found, found.stride(0) if found.shape[0] > 1 else 0, 0]
        key = (self.fold, self.over, self.lengths, self.blocks, tuple(asked.values()), device)
        if key not in _BOUNDS:
            edges = skip.bounds(self.fold, self.over, asked, self.lengths, self.blocks, torch.device("cpu"))
            walks = edges[0, :, -1] - edges[0, :, 0]
            _BOUNDS[key] = edges.to(device), int(walks[-1] > walks[0])
            while len(_BOUNDS) > 256:
                del _BOUNDS[next(iter(_BOUNDS))]
        edges, flip = _BOUNDS[key]
        return [edges, 0, flip]
