"""What ``run`` may be given to fold: an op, or a ready-made layer that is one fold per row; as a stream, anywhere.

A layer (``ops.knn``) checks its options and calls its op. Here it is run once, on empty arguments, with a stand-in for
the op that notes how it was called: so the layer's own checks and defaults hold, and the op can be streamed. A layer
that does something to the op's result (adds up rows, runs several ops) is refused.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...block_runs import ChunkMaker, Prepared
from ...engines import auto
from ...engines.common.subproblem import finish_states
from ...engines.stream import ChunkedProgram, merge_states
from ...errors import ArgumentError, StreamError, shown
from ...op import Op, op
from ...plan import communication, schedule, settings
from ...plan.candidates import ScheduleCost
from ...plan.communication import ClusterCost
from ...plan.schedule import Choice
from ...program.expression import topological
from ...program.lower import Pass
from ...stream import Stream
from .schedule import States, make_grid


@dataclass(frozen=True)
class Called:
    """How a layer called its op: all that it gave, by the op's parameters."""

    op: Op
    given: Mapping[str, Any]


@dataclass(frozen=True)
class _StandIn:
    """Stands for an op inside a layer."""

    op: Op

    def __call__(self, *args: Any, **kwargs: Any) -> Called:
        return Called(self.op, self.op._bind(args, kwargs))


@dataclass(frozen=True)
class Names:
    """The arguments that are rows and columns, and those of them that may be left out."""

    rows: tuple[str, ...]
    cols: tuple[str, ...]
    optional: tuple[str, ...]


def find_names(fold: Any) -> Names:
    """The names of the rows and columns; of a layer, its first two arguments and every tensor that it may be given."""
    if isinstance(fold, Op):
        pairs = [n for n, p in fold.parameters.items() if p.axis == "pairs"]
        if pairs:
            raise ArgumentError(
                detail=f"{fold!r} takes {', '.join(pairs)} for every pair, which is as large as rows × columns",
                fix="Compute it in the op, from rows and columns",
            )
        sides = [tuple(n for n, p in fold.parameters.items() if p.axis == side) for side in ("rows", "cols")]
        return Names(sides[0], sides[1], tuple(n for n, p in fold.parameters.items() if p.optional))
    layer = _body_of(fold)
    known = list(inspect.signature(layer).parameters.values())
    required = [p.name for p in known if p.default is p.empty]
    tensors = [p.name for p in known if p.default is None and "Tensor" in str(p.annotation)]
    own = getattr(fold, "stream", None)  # of a layer that always folds both ways: two streams
    if len(required) < 2 or (inspect.isfunction(own) and own.__annotations__.get("return") == "BothWays"):
        raise _not_a_fold(fold)
    extra = tuple(n for n in tensors if n not in required[:2])
    return Names((required[0], *extra), (required[1], *required[2:], *extra), (*required[2:], *extra))


def _body_of(fold: Any) -> Any:
    """The function that a layer is."""
    body = inspect.unwrap(fold) if callable(fold) else fold
    if not isinstance(body, types.FunctionType):
        raise _not_a_fold(fold)
    return body


def call_layer(layer: Any, given: Mapping[str, Any]) -> Called:
    """How a layer calls its op on these arguments."""
    body = _body_of(layer)
    scope = {n: _StandIn(v) if isinstance(v, Op) else v for n, v in body.__globals__.items()}
    copied = types.FunctionType(body.__code__, scope, body.__name__, body.__defaults__, body.__closure__)
    copied.__kwdefaults__ = body.__kwdefaults__
    try:
        inspect.signature(body).bind(**given)
    except TypeError as error:
        raise ArgumentError(
            detail=f"{body.__name__}: {error}", fix=f"It is {body.__name__}{inspect.signature(body)}"
        ) from None
    try:
        found = copied(**given)
    except (AttributeError, TypeError) as error:
        if isinstance(error, ArgumentError) or "Called" not in str(error):
            raise
        found = None
    if not isinstance(found, Called):
        raise _not_a_fold(layer)
    return found


def make_stream(
    layer: Any, rows: Mapping[str, Tensor], cols: Mapping[str, Tensor], options: Mapping[str, Any]
) -> Stream:
    """The stream of an op or a layer over these rows; ``cols`` are empty and say the columns' kind."""
    if isinstance(layer, Op):
        return layer.stream(**rows, **options)
    called = call_layer(layer, {**rows, **cols, **options})
    sides = {id(t): (side, n) for side, named in (("rows", rows), ("cols", cols)) for n, t in named.items()}
    kept: dict[str, Any] = {}
    for name, value in called.given.items():
        axis = called.op.parameters[name].axis
        side, given = sides.pop(id(value), (None, ""))
        if value is None and called.op.parameters[name].optional:
            continue
        if side is None and axis in ("rows", "cols", "pairs"):
            raise _not_a_fold(layer)
        if side is not None and (side != axis or (side == "cols" and name != given)):
            raise (
                _not_a_fold(layer)
                if side == axis
                else ArgumentError(
                    detail=f"{given} was given as {side}, but {layer.__name__} has it for {axis}",
                    fix=f"Give it as {axis}" if axis in ("rows", "cols") else "Give it as a number",
                )
            )
        if side != "cols":
            kept[name] = value
    if sides:
        raise _not_a_fold(layer)
    return called.op.stream(**kept)


def _not_a_fold(fold: Any) -> ArgumentError:
    name = getattr(fold, "__name__", type(fold).__name__)
    return ArgumentError(
        detail=f"{name} is not one fold per row, so that its rows cannot be spread over workers",
        fix="Give an op (@mr.op) whose results are per row, or a layer such as ops.knn, ops.kmeans_assign, "
        "ops.kernel_sum or ops.kernel_logsumexp",
    )


@dataclass(frozen=True)
class Portable:
    """An op or layer that can be pickled wherever it was defined: an op travels as its function.

    An op is its function by name otherwise, which a worker cannot find where it was defined in a script.
    """

    function: Any
    is_op: bool

    @staticmethod
    def of(fold: Any) -> Portable:
        return Portable(fold.function, True) if isinstance(fold, Op) else Portable(fold, False)

    def stream(self, rows: Mapping[str, Tensor], cols: Mapping[str, Tensor], options: Mapping[str, Any]) -> Stream:
        """See :func:`make_stream`."""
        return make_stream(
            _ops.setdefault(self.function, op(self.function)) if self.is_op else self.function, rows, cols, options
        )


_ops: dict[Any, Op] = {}  # of this process, so that each is traced once


# The fold of one row block, pass by pass, on the streams' own states. Knows nothing of Ray.
#
# states   = block.fold(stage, chunks)       # of a stretch of columns
# states   = block.merge(stage, one, other)  # of two, in the order of their columns
# results  = block.close(stage, states)      # of a pass: the next one may read them
# outputs  = block.outputs(results)          # of the op, for these rows

Results = Mapping[int, list[Tensor]]  # of the passes so far, by their position


class RowBlock:
    """Rows ``start`` to ``start + len`` of ``total_rows``, to be folded over ``total_cols`` columns.

    ``columns`` is an empty chunk that says the columns' types and features; ``choices`` the schedule of each pass, so
    that every worker runs the same (None: as the engine chooses).
    """

    def __init__(
        self,
        make_stream: Callable[[], Stream],
        start: int,
        total_rows: int,
        total_cols: int,
        columns: Mapping[str, Tensor],
        choices: list[Choice] | None = None,
    ):
        self.stream, self.start, self.total_rows, self.total_cols = make_stream(), start, total_rows, total_cols
        self.choices, self.columns = choices, dict(columns)
        self.prepared: Prepared = self.stream._prepare(columns)
        self.chunks = ChunkMaker(self.stream._prepare)
        self.walk: ChunkedProgram = replace(self.prepared.chunked, first_row=start, all_rows=total_rows)
        _check_results_are_per_row(self.walk)

    @property
    def name(self) -> str:
        """A text that is the same for the same program, features and types."""
        return self.prepared.name

    @property
    def stages(self) -> int:
        """The passes over the columns."""
        return len(self.walk.program.passes)

    @torch.no_grad()
    def fold(self, stage: int, results: Results, chunks: Iterable[tuple[int, Mapping[str, Tensor]]]) -> States:
        """The states of a pass over chunks of columns: (first column, tensors by name), in order."""
        p, total = self._pass(stage), self.total_cols
        kept = self.walk.row_feeds(p, self.walk.known(results), total)
        states: States | None = None
        for start, named in chunks:
            chunk = self.chunks.make(self.prepared, named, start)
            leaves = self.walk.leaves(p, kept, chunk, total)
            with self._follow(stage):
                found = self.walk.fold(p.fold, leaves, chunk, total)
            states = merge_states(p.fold, states, found)
        assert states is not None, "a stretch has at least one chunk"
        return states

    @torch.no_grad()
    def merge(self, stage: int, one: States, other: States) -> States:
        return merge_states(self._pass(stage).fold, one, other)

    @torch.no_grad()
    def close(self, stage: int, states: States) -> list[Tensor]:
        return finish_states(self._pass(stage).fold, states)

    @torch.no_grad()
    def outputs(self, results: Results) -> Any:
        """What the op returns for these rows."""
        found = self.prepared.results(*self.walk.finish(results, self.total_cols))
        return self.prepared.pack(found, {}, self.total_cols)

    def choose(self, columns: Mapping[str, Tensor]) -> list[Choice] | None:
        """The schedule of each pass for chunks like this one, whose numbers are not read; None where the engine is
        not ``auto``, and there is nothing to choose."""
        if settings.now().engine != "auto":
            return None
        found: list[Choice] = []

        def look(fold: Any, leaves: list[Any], sizes: Any) -> list[Tensor]:
            found.append(auto.choose(fold, leaves, sizes))
            raise _Looked

        walk = replace(self.walk, engine=look)
        results: dict[int, list[Tensor]] = {}
        for stage in range(self.stages):
            p = self._pass(stage)
            chunk = self.chunks.make(self.prepared, columns, 0)
            kept = self.walk.row_feeds(p, self.walk.known(results), self.total_cols)
            with contextlib.suppress(_Looked), torch.no_grad():
                walk.fold(p.fold, walk.leaves(p, kept, chunk, self.total_cols), chunk, self.total_cols)
            results[stage] = self.close(stage, self._fold_nothing(stage, results))
        return found

    def _fold_nothing(self, stage: int, results: Results) -> States:
        empty = self.columns
        return self.fold(stage, results, [(0, empty)])

    def _pass(self, stage: int) -> Pass:
        return self.walk.program.passes[stage]

    def _follow(self, stage: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.choices is None else schedule.follow(self.choices[stage])


class _Looked(Exception):
    """Ends a fold of which only the choice was wanted."""


def _check_results_are_per_row(walk: ChunkedProgram) -> None:
    """Raise where a row's result depends on other rows, which are elsewhere."""
    reads = topological([*walk.program.outputs, *(f for p in walk.program.passes for f in p.feeds)])
    if any(e.op == "reduce" and e.attrs[1] == "rows" for e in reads) or not all(e.rows for e in walk.program.outputs):
        raise StreamError(
            detail="this op folds over its rows as well, which are spread over the workers",
            fix="Return what belongs to each row, and add it up afterwards from the files of the result",
        )


# ``estimate``: what a job of ``run`` would take, from shapes alone; no file is read.
#
# A worker's speed is measured with a small piece of the job on random numbers, folded here as a worker folds it. Where
# the workers' device is not here, the cost model says it.

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
    names = find_names(fold)
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
    called = Called(fold, {**given, **options}) if isinstance(fold, Op) else call_layer(fold, {**given, **options})
    cost = called.op.cost(**called.given, backward=False, device=device)
    found: ScheduleCost = next(s for s in cost.schedules if s.schedule not in ("dense", "total"))
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
        stream = functools.partial(make_stream, fold, given, empty, options)
        block = RowBlock(stream, 0, rows, 2 * cols, empty)
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
