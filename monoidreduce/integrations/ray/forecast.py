"""``estimate``: what a job of ``run`` would take, from shapes alone; no file is read.

A worker's speed is measured with a small piece of the job on random numbers, folded here as a worker folds it. Where
the workers' device is not here, the cost model says it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
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

_ROWS, _COLUMNS = 2048, 16384  # of the piece that is measured, at first
_LEAST_SECONDS = 0.05  # below, more rows are taken

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
    measure: bool = True,
    disk: float = communication.DISK,
    row_block: int | None = None,
    col_chunk: int | None = None,
    **options: Any,
) -> ClusterCost:
    """What :func:`run` would take on ``workers`` workers of ``machines`` machines.

    ``rows`` and ``cols`` are shapes (of the op's parameters, by name, where a side has several). A worker computes as
    this CPU does with torch's present number of threads, or, with ``device="cuda"``, as this GPU: a piece of the job is
    run here, on random numbers, for about a second. With ``measure=False``, and for a GPU where there is none, the cost
    model is asked instead; for CPUs it is 5 to 20 times too high (it knows tiles in torch, not generated C++), and
    without a GPU it assumes an H200. ``ClusterCost.measured`` says which it was.
    ``disk``: bytes a second that a machine reads and writes. Calls of Ray, the network and stragglers are not modelled
    beyond a fixed overhead for each unit; tiles that a condition on the data would skip are counted.

    >>> from monoidreduce import ops
    >>> from monoidreduce.integrations import ray as mr_ray
    >>> cost = mr_ray.estimate(ops.knn, rows=(10**9, 8), cols=(10**9, 8), k=10, workers=6400, machines=100)
    >>> cost.units > 10**5, cost.peak < 1e9, cost.measured
    (True, True, True)
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
    passes, seconds = max(1, len(found.parts)), found.seconds
    here_too = torch.device(device).type == "cpu" or torch.cuda.is_available()
    if measure and here_too:
        seconds = here["rows"] * here["cols"] * _seconds_of_a_pair(fold, shapes, here, dtype, device, options)
    one = {side: sum(_bytes_of_one(given[n]) for n in named) for side, named in shapes.items()}
    estimated = communication.estimate_cluster(
        rows=grid.rows,
        cols=grid.cols,
        block=grid.block,
        chunk=grid.chunk,
        stretch=grid.stretch,
        chunk_seconds=seconds / passes,
        row_bytes=one["rows"],
        col_bytes=one["cols"],
        state_bytes=state,
        pair_bytes=found.held,
        workers=workers,
        machines=machines,
        passes=passes,
        disk=disk,
    )
    return replace(estimated, measured=measure and here_too)


def _seconds_of_a_pair(
    fold: Any,
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]],
    largest: Mapping[str, int],
    dtype: torch.dtype,
    device: torch.device | str,
    options: Mapping[str, Any],
) -> float:
    """Seconds that a pair takes here in all passes: two chunks of columns for some rows, as a worker folds them.

    On a CPU it is processor time, which other work on the machine does not add to."""
    threads = torch.get_num_threads()
    cols, rows = min(_COLUMNS, largest["cols"]), min(_ROWS, largest["rows"])
    draw = torch.Generator(device).manual_seed(0)

    def vectors(side: str, count: int) -> dict[str, Tensor]:
        return {
            n: torch.randn(count, *shape[1:], generator=draw, dtype=dtype, device=device)
            for n, shape in shapes[side].items()
        }

    def now() -> float:
        if torch.device(device).type == "cpu":
            return time.process_time() / threads
        torch.cuda.synchronize(device)
        return time.perf_counter()

    chunks = [(start, vectors("cols", cols)) for start in (0, cols)]
    empty = {n: t[:0] for n, t in chunks[0][1].items()}
    while True:
        given = vectors("rows", rows)
        stream = functools.partial(folds.make_stream, fold, given, empty, options)
        block = folds.RowBlock(stream, 0, rows, 2 * cols, empty)
        took = []
        for _ in range(3):  # the first one compiles
            results: dict[int, list[Tensor]] = {}
            start = now()
            for stage in range(block.stages):
                results[stage] = block.close(stage, block.fold(stage, results, chunks))
            took.append(now() - start)
        if min(took) > _LEAST_SECONDS or rows >= largest["rows"]:
            return min(took) / (2 * rows * cols)
        rows = min(4 * rows, largest["rows"])


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
