"""Running a kernel: which text, which plan, which arguments.

Leaves are passed as they are, by pointer and strides (0 where broadcast); batch dimensions that cannot be merged are
decoded from the program's number. Lengths are run-time arguments, so that a new length compiles nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...program.expr import Expr, topological
from ...program.lower import Fold
from ...program.reductions import KINDS
from .. import hardware
from ..evaluate import Sizes
from ..tilecode import contractions
from . import emit, skip, source
from .plan import KernelPlan, choose, fixed_plan, shrink
from .spec import TINY, WIDEST, Spec

_SMALL = 2**28  # integers and offsets inside a tile below this are counted in int32
_BOUNDS: dict[tuple, Tensor] = {}  # of conditions on indices and numbers only
_PREPARED: dict[tuple, Any] = {}  # launches by types, shapes and strides


@dataclass(frozen=True)
class Prepared:
    """All of a launch that depends on types, shapes and strides only: kept, since host time decides small cases."""

    spec: Spec
    kernel: emit.Kernel
    plan: KernelPlan
    lengths: tuple[int, int]  # of the kept and the folded axis
    grid: int
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    given: tuple[tuple[Expr, tuple[int, ...]], ...]  # leaves in order, each with its strides
    sizes: tuple[int, ...]
    casts: tuple[tuple[Expr, torch.dtype, int], ...]  # leaves to convert first, and to how many features to pad them
    wide: bool
    precision: str
    ragged: bool


def run(fold: Fold, over: str, values: Mapping[Expr, Any], batch: tuple[int, ...], sizes: Sizes) -> list[Tensor]:
    """Fold one direction. ``values``: leaves as Python numbers or tensors ``[*batch, length(, features)]``."""
    tf32 = torch.backends.cuda.matmul.allow_tf32
    kinds = tuple(
        (v.dtype, v.shape, v.stride()) if isinstance(v, Tensor) else (type(v), abs(v) >= _SMALL)
        for v in values.values()
    )
    key = (fold, over, sizes.rows, sizes.cols, batch, sizes.compute, sizes.device, tf32, fixed_plan(over), kinds)
    prepared = _PREPARED.get(key) or _prepare(fold, over, values, batch, sizes)
    while True:
        try:
            found = _launch(prepared, values, batch, sizes)
            break
        except Exception as error:
            smaller = shrink(prepared.plan) if type(error).__name__ == "OutOfResources" else None
            if smaller is None:
                raise
            prepared = _prepare(fold, over, values, batch, sizes, smaller)
    if len(_PREPARED) > 4096:
        _PREPARED.clear()
    _PREPARED[key] = prepared
    return found


def _prepare(
    fold: Fold,
    over: str,
    values: Mapping[Expr, Any],
    batch: tuple[int, ...],
    sizes: Sizes,
    plan: KernelPlan | None = None,
) -> Prepared:
    spec, casts = describe(fold, over, values, batch, sizes)
    values = _converted(values, casts, batch, sizes)
    kernel = emit.kernel(spec)
    item = getattr(torch, spec.narrow or spec.compute).itemsize
    plan = plan or choose(kernel, over, item, _shared(sizes.device))
    lengths = (sizes.rows, sizes.cols) if over == "cols" else (sizes.cols, sizes.rows)
    tiles = -(-lengths[0] // plan.block_kept)
    wide = False
    given: list[tuple[Expr, tuple[int, ...]]] = []
    for e in kernel.leaves:
        v = values[e]
        strides: tuple[int, ...] = ()
        if isinstance(v, Tensor):
            strides = tuple(0 if n == 1 else s for n, s in zip(v.shape, v.stride(), strict=True))
            wide |= any(s * max(plan.block_kept, plan.block_folded, WIDEST) >= 2**31 for s in strides[len(batch) :])
        else:
            wide |= isinstance(v, int) and abs(v) >= _SMALL
        given.append((e, strides))
    return Prepared(
        spec,
        kernel,
        plan,
        lengths,
        tiles * torch.Size(batch).numel(),
        tuple(_output(r, k, batch, lengths[0], sizes) for r, k in fold.outputs),
        tuple(given),
        (*lengths, tiles, *batch[1:]),
        casts,
        wide,
        "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        spec.bounds or lengths[1] % plan.block_folded != 0,
    )


def describe(
    fold: Fold, over: str, values: Mapping[Expr, Any], batch: tuple[int, ...], sizes: Sizes
) -> tuple[Spec, tuple[tuple[Expr, torch.dtype, int], ...]]:
    """The spec of a fold on these leaves, and which of them are converted before the launch."""
    vectors = {e: values[e] for e in fold.leaves if e.feature is not None and e in _used(fold)}
    narrow = next((v.dtype for v in vectors.values() if v.dtype in hardware.SIXTEEN), None)
    types, rooms, casts = [], [], []
    for e in fold.leaves:
        v = values[e]
        kind: torch.dtype | None = v.dtype if isinstance(v, Tensor) else None
        room = 0
        if kind is None and sizes.compute is torch.float64 and e.dtype == "float":
            kind = torch.float64  # a kernel's own numbers are float32
        elif e in _multiplied(fold) and isinstance(v, Tensor) and v.shape[-1] > TINY:
            if narrow and kind is torch.float32:
                kind = narrow  # rounded once here, not in every tile
            row = v.shape[-1] * (2 if narrow else v.element_size())
            if v.stride(-1) == 1 and row % 16 and v.shape[-1] <= WIDEST:
                room = -(-v.shape[-1] // 16) * 16  # rows that begin on 16 bytes load four times faster
        if kind is not None and (room or not isinstance(v, Tensor) or kind is not v.dtype):
            casts.append((e, kind, room))
        types.append(str(kind)[6:] if kind else "number")
        rooms.append(room)
    spec = Spec(
        fold,
        over,
        tuple(types),
        tuple(rooms),
        tuple(sorted(sizes.letters.items())),
        str(sizes.compute)[6:],
        str(narrow)[6:] if narrow else None,
        len(batch),
        bool(skip.preferred(fold)),
        max([0, *(sizes.of(str(e.feature)) for e in topological(fold.reductions) if e.feature is not None)]) <= TINY,
    )
    return spec, tuple(casts)


def _converted(
    values: Mapping[Expr, Any], casts: tuple[tuple[Expr, torch.dtype, int], ...], batch: tuple[int, ...], sizes: Sizes
) -> Mapping[Expr, Any]:
    if not casts:
        return values
    found = dict(values)
    for e, dtype, room in casts:
        v = found[e]
        if not isinstance(v, Tensor):
            found[e] = torch.full((1,) * len(batch), v, dtype=dtype, device=sizes.device).expand(batch)
        elif room:
            own = [1 if s == 0 else n for n, s in zip(v.shape[: len(batch)], v.stride(), strict=False)]
            kept = torch.zeros((*own, v.shape[-2], room), dtype=dtype, device=v.device)
            kept[..., : v.shape[-1]] = v[tuple(slice(n) for n in own)]  # what is broadcast is copied once
            found[e] = kept.expand(*batch, -1, -1)
        else:
            found[e] = v.to(dtype)
    return found


@functools.cache
def _shared(device: torch.device) -> int:
    """Bytes of shared memory of a program instance; 0 where the device does not say."""
    known = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return int(getattr(known, "shared_memory_per_block_optin", 0))


@functools.lru_cache(maxsize=1024)
def _used(fold: Fold) -> frozenset[Expr]:
    return frozenset(e for e in topological(fold.reductions) if e.op == "leaf")


@functools.lru_cache(maxsize=1024)
def _multiplied(fold: Fold) -> frozenset[Expr]:
    """The vector leaves that only ever enter matrix products."""
    walked: set[Expr] = set()
    multiplied: set[Expr] = set()
    for r in fold.reductions:
        for c in (c for a in r.args for c in contractions(a, r.attrs[1])):
            roots = [x for x in (c.weight, c.vector, c.minus) if x is not None]
            if c.walk:
                walked |= {e for e in topological(roots, stop=lambda e: e.feature is None) if e.feature is not None}
            multiplied |= {x for x in (c.vector,) if x is not None and x.op == "leaf"}
            for e in topological([x for x in roots if x.feature is None or c.walk]):
                if e.op == "dot":
                    multiplied |= set(e.args)
                elif e.op in ("fsum", "sqdist"):
                    walked |= set(topological(e.args, stop=lambda x: x.feature is None))
            walked |= {x for x in (c.minus, c.vector) if x is not None and c.minus is not None}
    return frozenset(multiplied - walked)


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


def execute(call: Call) -> None:
    """Launch a kernel on the current stream of its device."""
    module = source.load(call.kernel.text)
    constants = dict(
        KEPT=call.plan.block_kept,
        FOLDED=call.plan.block_folded,
        INT=module.tl.int64 if call.wide else module.tl.int32,
        PRECISION=call.precision,
        RAGGED=call.ragged,
    )
    options = dict(num_warps=call.plan.num_warps, num_stages=call.plan.num_stages)
    on = torch.cuda.device(call.device) if call.device.type == "cuda" else contextlib.nullcontext()
    with on:
        getattr(module, call.kernel.name)[(call.grid,)](*call.arguments, **constants, **options)


def _launch(p: Prepared, values: Mapping[Expr, Any], batch: tuple[int, ...], sizes: Sizes) -> list[Tensor]:
    outputs = [torch.empty(shape, dtype=dtype, device=sizes.device) for shape, dtype in p.outputs]
    if not p.grid:
        return outputs
    values = _converted(values, p.casts, batch, sizes)
    arguments: list[Any] = list(outputs)
    for e, strides in p.given:
        arguments.append(values[e])
        arguments += strides
    arguments += p.sizes
    if p.spec.bounds:
        edges = _bounds(p, values, batch, sizes)
        arguments += [edges, edges.stride(0) if edges.shape[0] > 1 else 0]
    execute(Call(p.kernel, p.plan, p.grid, tuple(arguments), p.wide, p.precision, p.ragged, sizes.device))
    return outputs


def _output(r: Expr, k: int, batch: tuple[int, ...], length: int, sizes: Sizes) -> tuple[tuple[int, ...], torch.dtype]:
    kind, _, params = r.attrs
    feature, number = KINDS[kind].outputs(r.args, params)[k]
    tail = () if feature is None else (sizes.of(str(feature)),)
    return (*batch, length, *tail), sizes.compute if number == "float" else torch.int64


def _bounds(p: Prepared, values: Mapping[Expr, Any], batch: tuple[int, ...], sizes: Sizes) -> Tensor:
    fold, over = p.spec.fold, p.spec.over
    asked = {e: values[e] for e in _asked(fold)}
    blocks = (p.plan.block_kept, p.plan.block_folded)
    data = any(isinstance(v, Tensor) for v in asked.values())
    key = () if data else (fold, over, p.lengths, blocks, tuple(asked.values()), sizes.device)
    if not data and key in _BOUNDS:
        return _BOUNDS[key]
    flat = {e: v.flatten(0, len(batch) - 1) if isinstance(v, Tensor) else v for e, v in asked.items()}
    found = skip.bounds(fold, over, flat, p.lengths, blocks, sizes.device)
    if not data:
        if len(_BOUNDS) > 256:
            _BOUNDS.clear()
        _BOUNDS[key] = found
    return found


@functools.lru_cache(maxsize=1024)
def _asked(fold: Fold) -> tuple[Expr, ...]:
    """The leaves that the conditions look at."""
    return tuple(e for e in topological(skip.preferred(fold)) if e.op == "leaf")
