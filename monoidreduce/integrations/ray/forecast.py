"""``estimate``: what a job of ``run`` would take, from shapes alone; nothing is run and no file is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError, shown
from ...op import Op
from ...plan import communication
from ...plan.communication import ClusterCost
from ...plan.cost import Scheduled
from . import folds
from .schedule import make_grid

Shapes = Sequence[int] | Mapping[str, Sequence[int]]


def estimate(
    fold: Any,
    *,
    rows: Shapes,
    cols: Shapes,
    workers: int,
    machines: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    disk: float = communication.DISK,
    row_block: int | None = None,
    col_chunk: int | None = None,
    **options: Any,
) -> ClusterCost:
    """What :func:`run` would take on ``workers`` workers of ``machines`` machines, by the cost model.

    ``rows`` and ``cols`` are shapes (of the op's parameters, by name, where a side has several). A worker computes as
    this CPU does with torch's present number of threads, or, with ``device="cuda"``, as this GPU (without one, an
    H200). ``disk``: bytes a second that a machine reads and writes. Calls of Ray, the network and stragglers are
    not modelled beyond a fixed overhead for each unit.

    >>> from monoidreduce import ops
    >>> from monoidreduce.integrations import ray as mr_ray
    >>> cost = mr_ray.estimate(ops.knn, rows=(10**9, 64), cols=(10**9, 64), k=10, workers=6400, machines=100)
    >>> cost.units > 10**5, cost.peak < 1e9
    (True, True)
    """
    for name, value in (("workers", workers), ("machines", machines)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(detail=f"{name} was given {value!r}", fix="Give a whole number from 1")
    names = folds.find_names(fold)
    shapes = {
        side: _named(side, given, own) for side, given, own in (("rows", rows, names.rows), ("cols", cols, names.cols))
    }
    length = {side: next(iter(found.values()))[0] for side, found in shapes.items()}
    grid = make_grid(length["rows"], length["cols"], row_block, col_chunk)
    here = {"rows": min(grid.block, grid.rows), "cols": min(grid.chunk, grid.cols)}
    given = {
        n: torch.empty(here[side], *shape[1:], dtype=dtype, device="meta")
        for side, found in shapes.items()
        for n, shape in found.items()
    }
    called = (
        folds.Called(fold, {**given, **options})
        if isinstance(fold, Op)
        else folds.call_layer(fold, {**given, **options})
    )
    cost = called.op.cost(**called.given, backward=False, device=device)
    found: Scheduled = next(s for s in cost.schedules if s.schedule not in ("dense", "total"))
    state = sum(communication.states(p.case.fold, p.case.of, p.case.wide)["cols"].bytes for p in found.parts)
    one = {side: sum(_bytes_of_one(given[n]) for n in named) for side, named in shapes.items()}
    return communication.estimate_cluster(
        rows=grid.rows,
        cols=grid.cols,
        block=grid.block,
        chunk=grid.chunk,
        stretch=grid.stretch,
        chunk_seconds=found.seconds / max(1, len(found.parts)),
        row_bytes=one["rows"],
        col_bytes=one["cols"],
        state_bytes=state,
        pair_bytes=found.held,
        workers=workers,
        machines=machines,
        passes=max(1, len(found.parts)),
        disk=disk,
    )


def _named(side: str, given: Any, names: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes of a side by parameter."""
    found = dict(given) if isinstance(given, Mapping) else {names[0]: given}
    right = lambda s: isinstance(s, Sequence) and len(s) in (1, 2) and all(isinstance(n, int) and n > 0 for n in s)
    if not found or not set(found) <= set(names) or not all(map(right, found.values())):
        raise ArgumentError(
            detail=f"{side} was given {shown(given)}",
            fix=f"Give a shape such as (1000000, 64), or one for each of {', '.join(names)}, by name",
        )
    return {n: tuple(s) for n, s in found.items()}


def _bytes_of_one(t: Tensor) -> int:
    return t.nbytes // max(1, len(t))
