"""The fold of one row block, pass by pass, on the streams' own states. Knows nothing of Ray.

states   = block.fold(stage, chunks)       # of a stretch of columns
states   = block.merge(stage, one, other)  # of two, in the order of their columns
results  = block.close(stage, states)      # of a pass: the next one may read them
outputs  = block.outputs(results)          # of the op, for these rows
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...block_runs import ChunkMaker, Prepared
from ...engines import auto
from ...engines.common.subproblem import finish_states
from ...engines.stream import ChunkedProgram, merge_states
from ...errors import StreamError
from ...plan import schedule, settings
from ...plan.schedule import Choice
from ...program.expression import topological
from ...program.lower import Pass
from ...stream import Stream
from .schedule import States

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
        self.walk: ChunkedProgram = replace(self.prepared.walk, first_row=start, all_rows=total_rows)
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
