"""The Triton engine: one generated kernel per direction of a fold, for GPUs.

``run`` has the contract of every engine: this fold, on these tensors, of these sizes. A fold that has no kernel (a
top-k, a monoid with vectors, more features than registers hold) is handed to ``fallback`` with a warning that says
why. Importing this room does not import Triton: the generated text does.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import EngineError, FallbackWarning
from ...plan import tiles
from ...program.expr import Expr
from ...program.lower import Fold
from .. import batching, hardware
from ..evaluate import Sizes
from ..pick import run_pick
from ..tilecode import in_tiles
from . import deep, launch, rows
from . import describe as describe
from .panel import KernelStep
from .plan import KernelPlan, overrides, use_plan
from .spec import Unsupported

__all__ = ["KernelPlan", "KernelStep", "Unsupported", "available", "run", "run_deep", "runs_on", "use_plan"]

_told: set[tuple[Fold, str]] = set()
_READY: dict[tuple, Ready] = {}


hardware.ROW_DOT[:] = [rows.dot]
hardware.SCALE[:] = [rows.scale]


@functools.cache
def available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def runs_on(device: torch.device) -> bool:
    """Whether kernels run there: on a GPU, or in Triton's interpreter."""
    return available() and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


def run(
    fold: Fold, leaves: list[Any], sizes: Sizes, fallback: Callable[..., list[Tensor]] | None = None
) -> list[Tensor]:
    """Run a fold. Leaves are ``[*batch, M or N, f]`` or Python numbers; results come back the same way."""
    try:
        return _run(fold, leaves, sizes)
    except Unsupported as reason:
        if fallback is None or hardware.asked.get()[1]:
            raise EngineError(
                detail=f"the Triton engine cannot run this fold: {reason}",
                fix='Use mr.use(engine="eager"), or leave strict out to let that engine run it with a warning',
            ) from None
        if (fold, str(reason)) not in _told:
            _told.add((fold, str(reason)))
            warnings.warn(FallbackWarning(f"the eager engine runs what has no kernel: {reason}"), stacklevel=2)
        return fallback(fold, leaves, sizes)


def run_deep(fold: Fold, leaves: list[Any], sizes: Sizes) -> list[Tensor]:
    """Run a fold to numbers of wide 16-bit vectors; raises Unsupported for all others."""
    vectors = [(e, v) for e, v in zip(fold.leaves, leaves, strict=True) if e.feature is not None]
    narrow = any(v.dtype in hardware.SIXTEEN for _, v in vectors)
    if not deep.fits(fold, max(sizes.of(str(e.feature)) for e, _ in vectors), narrow):
        raise Unsupported("products of 16 bits that are folded to numbers have kernels of their own")
    return _run(fold, leaves, sizes)


def _run(fold: Fold, leaves: list[Any], sizes: Sizes) -> list[Tensor]:
    key: tuple = (
        id(fold),
        sizes.rows,
        sizes.cols,
        sizes.batch,
        sizes.compute,
        sizes.device,
        hardware.float32_precision(),
        overrides(),
    )
    key += tuple(
        (v.dtype, v.shape, v.stride(), v.data_ptr() & 15)
        if isinstance(v, Tensor)
        else (type(v), v > 0, abs(v) >= launch.SMALL)
        for v in leaves
    )
    ready = _READY.get(key)
    if ready is None:
        ready = _READY[key] = Ready(fold, leaves, sizes)
        while len(_READY) > 4096:
            del _READY[next(iter(_READY))]
    return ready(leaves)


class Ready:
    """A fold on tensors of given types, shapes, strides and alignment: its launches, made once."""

    def __init__(self, fold: Fold, leaves: list[Any], sizes: Sizes):
        if not available():
            raise Unsupported("Triton is not installed")
        if sizes.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise Unsupported("the tensors are on a CPU (TRITON_INTERPRET=1 runs kernels there)")
        if any(e.is_pair for e in fold.leaves):
            raise Unsupported("an argument is given per pair")
        self.fold, self.sizes = fold, sizes  # the fold is held, so that its id stays its own
        values, self.batch = self._merged(leaves)
        self.picks = [r for _, _, picks in _directions(fold) for r in picks]
        self.launches = [
            launch.Launch(folds, over, values, self.batch, sizes)
            for over, folds, _ in _directions(fold)
            if folds.reductions
        ]

    def _merged(self, leaves: list[Any]) -> tuple[dict[Expr, Any], tuple[int, ...]]:
        """The leaves, tensors with as few batch dimensions as they allow."""
        given = [e for e, v in zip(self.fold.leaves, leaves, strict=True) if isinstance(v, Tensor)]
        batch, views = batching.merge(self.sizes.batch, [v for v in leaves if isinstance(v, Tensor)])
        return dict(zip(self.fold.leaves, leaves, strict=True)) | dict(zip(given, views, strict=True)), batch

    def __call__(self, leaves: list[Any]) -> list[Tensor]:
        values = dict(zip(self.fold.leaves, leaves, strict=True))
        merged = functools.cache(lambda: self._merged(leaves)[0])
        results: dict[tuple[Expr, int], Tensor] = {}
        for r in self.picks:
            found = _pick(r, merged(), self.batch, self.sizes)
            results[r, 0] = found.view(*self.sizes.batch, *found.shape[len(self.batch) :])
        for one in self.launches:
            results |= zip(one.fold.outputs, one(values, merged), strict=True)
        return [results[o] for o in self.fold.outputs]


@functools.lru_cache(maxsize=1024)
def _directions(fold: Fold) -> tuple[tuple[str, Fold, tuple[Expr, ...]], ...]:
    """Per direction: what one kernel folds, and the picks that are gathers of their own."""
    found = []
    for over in ("cols", "rows"):
        mine = {r: s for r, s in fold.scaled if r.attrs[1] == over}
        whole = Fold(fold.leaves, tuple(mine))
        picks = tuple(r for r in mine if r.attrs[0] == "pick" and not in_tiles(whole, r))
        kept = {r: s for r, s in mine.items() if r not in picks}
        found.append((over, Fold(fold.leaves, tuple(kept), tuple(kept.values())), picks))
    return tuple(found)


def _pick(r: Expr, values: dict[Expr, Any], batch: tuple[int, ...], sizes: Sizes) -> Tensor:
    """A gather needs no kernel of ours."""
    length = sizes.rows if r.attrs[1] == "cols" else sizes.cols
    feature = r.args[2].feature
    tail = () if feature is None else (sizes.of(str(feature)),)
    out = torch.zeros(*batch, length, *tail, dtype=sizes.compute, device=sizes.device)
    for where in batching.outer(batch):
        part = {e: v[where] if isinstance(v, Tensor) else v for e, v in values.items()}
        run_pick(r, part, sizes, batch[-1], out[where], tiles.ELEMENTS)
    return out
