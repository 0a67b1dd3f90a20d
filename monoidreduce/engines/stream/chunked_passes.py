"""Passes over columns that come in chunks: each chunk is a part of the whole, and its state is merged with the rest.

The backward of a pass is again a fold, whose results for the rows add up over the chunks and whose results for the
columns are those of the chunk at hand; so a gradient is one more reading of the source.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...errors import StreamError
from ...program.compile import compile_program
from ...program.expression import Expr, size, topological
from ...program.gradient import FoldGradient
from ...program.lower import Fold, Lowered, Pass
from ...program.normal_form import is_pass
from ..common import combine, subproblem
from ..common.combine import State
from ..common.evaluate import Evaluator, Sizes, from_layout, to_layout
from ..common.saved_tensors import own, saved
from ..common.shard import Axis, Shard
from ..common.subproblem import Engine, Part
from ..ranks.sharded_program import as_gradient
from .checksum import Chunk

Read = Callable[[], Iterator[Chunk]]
OnGradient = Callable[[int, dict[str, Tensor]], None]


@dataclass(frozen=True)
class Walk:
    """One op over a stream: its program, the arguments that stay, and the engine."""

    program: Lowered
    sizes: Sizes
    inputs: Mapping[str, Any]
    engine: Engine

    def __post_init__(self) -> None:
        reads = topological([*self.program.outputs, *(f for p in self.program.passes for f in p.feeds)])
        for e in reads:
            if e.op == "reduce" and (e.attrs[1] == "rows") == is_pass(e):
                raise StreamError(
                    detail="this op folds "
                    + ("its rows for every column" if is_pass(e) else "a column vector by itself"),
                    fix="Stream an op whose results are per row, or give all columns at once",
                )
        if any(e.cols for e in self.program.outputs):
            raise StreamError(detail="this op has a result for every column", fix="Give all columns at once")
        for f in (f for p in self.program.passes for f in p.feeds if f.cols):
            if any(e.op == "reduce" for e in topological([f])):
                raise StreamError(detail="a column value depends on a fold", fix="Give all columns at once")

    def needs_count(self, p: Pass) -> bool:
        return size("cols") in topological([*p.fold.reductions, *p.feeds, *p.fold.scales])

    def at(self, start: int, count: int, total: int | None) -> Sizes:
        """The sizes of a chunk, where it stands."""
        rows, cols = Axis((((0, self.sizes.rows),),)), Axis((((start, start + count),),), whole=total)
        return replace(self.sizes, cols=count, shard=Shard(rows, cols))

    def kept(self, p: Pass, known: Mapping[Expr, Any], total: int | None) -> dict[int, Any]:
        """The feeds of a pass that no chunk changes, by their place."""
        evaluate = Evaluator(self.at(0, total or 0, total), self.inputs, dict(known))
        return {k: from_layout(evaluate(f), f) for k, f in enumerate(p.feeds) if not f.cols}

    def leaves(self, p: Pass, kept: Mapping[int, Any], chunk: Chunk, total: int | None) -> list[Any]:
        start, count, columns = chunk
        evaluate = Evaluator(self.at(start, count, total), {**self.inputs, **columns})
        return [kept[k] if k in kept else from_layout(evaluate(f), f) for k, f in enumerate(p.feeds)]

    def fold(self, fold: Fold, leaves: list[Any], chunk: Chunk, total: int | None) -> list[State]:
        start, count, _ = chunk
        part = Part(((0, self.sizes.rows),), ((start, start + count),), (self.sizes.rows, total or 0))
        return subproblem.run(fold, leaves, replace(self.sizes, cols=count), part, self.engine)

    def finish(self, found: Mapping[int, list[Tensor]], total: int) -> tuple[list[Any], Sizes]:
        """The outputs, from the results of the passes (by their place)."""
        sizes = replace(self.sizes, cols=total)
        evaluate = Evaluator(sizes, self.inputs, self.known(found))
        return [evaluate(e) for e in self.program.outputs], sizes

    def known(self, found: Mapping[int, list[Tensor]]) -> dict[Expr, Any]:
        return {
            n: to_layout(value, n)
            for k, results in found.items()
            for value, nodes in zip(results, self.program.passes[k].results, strict=True)
            for n in nodes
        }


def merged(fold: Fold, one: list[State] | None, other: list[State]) -> list[State]:
    if one is None:
        return other
    return [combine.merged(r, [a, b]) for r, a, b in zip(fold.reductions, one, other, strict=True)]


# A whole source ----------------------------------------------------------------------------------------------


@dataclass
class Job:
    """A pass over a source: what its forward and its backward share."""

    walk: Walk
    place: int
    read: Read
    on_gradient: OnGradient | None
    total: int | None = None

    @property
    def stage(self) -> Pass:
        return self.walk.program.passes[self.place]


def over(walk: Walk, read: Read, on_gradient: OnGradient | None, columns_ask: bool = False) -> tuple[list[Any], Sizes]:
    """All passes over a source that can be read again; differentiable.

    The columns are no inputs that autograd could see: an anchor stands for those that ask for a gradient.
    """
    found: dict[int, list[Tensor]] = {}
    total: int | None = None
    for k, p in enumerate(walk.program.passes):
        if total is None and walk.needs_count(p):
            total = sum(count for _, count, _ in read())
        job = Job(walk, k, read, on_gradient, total)
        kept = walk.kept(p, walk.known(found), total)
        anchor = torch.zeros((), device="cpu", requires_grad=on_gradient is not None or columns_ask)
        found[k] = list(_Pass.apply(job, anchor, *(kept.get(n) for n in range(len(p.feeds)))))
        total = job.total
    return walk.finish(found, total or 0)


class _Pass(torch.autograd.Function):
    """One pass over a source; its backward reads the source again."""

    @staticmethod
    def forward(ctx: Any, job: Job, anchor: Tensor, *kept: Any) -> tuple[Tensor, ...]:
        results = own(_folded(job, kept))
        ctx.job, ctx.constants = job, [None if isinstance(v, Tensor) else v for v in kept]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in results if not t.dtype.is_floating_point))
        ctx.save_for_backward(*(v for v in kept if isinstance(v, Tensor)), *results)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        pairs = [*zip(ctx.job.stage.feeds, ctx.constants, strict=True)]
        first = sum(not f.cols and c is None for f, c in pairs)  # tensors among what is kept
        tensors, unchanged = saved(ctx, range(first, first + len(cotangents)))
        rest = iter(tensors)
        kept = [None if f.cols else c if c is not None else next(rest) for f, c in pairs]
        results = list(rest) if unchanged else _folded(ctx.job, kept)
        return None, None, *_Backward(ctx.job, kept, results, cotangents, ctx.needs_input_grad[2:]).run()


def _folded(job: Job, kept: Sequence[Any]) -> list[Tensor]:
    """The results of a pass: one reading of the source."""
    p, walk = job.stage, job.walk
    rows = {k: v for k, v in enumerate(kept) if not p.feeds[k].cols}
    states: list[State] | None = None
    seen = 0
    for chunk in job.read():
        states = merged(p.fold, states, walk.fold(p.fold, walk.leaves(p, rows, chunk, job.total), chunk, job.total))
        seen += chunk[1]
        del chunk  # while the next one comes, nobody holds this one
    if states is None:
        raise StreamError(detail="the source is empty", fix="Give at least one chunk, if only with no columns")
    job.total = seen
    return subproblem.results(p.fold, states)


class _Backward:
    """The second reading: row gradients add up, column gradients go to their chunk."""

    def __init__(self, job: Job, kept: list[Any], results: list[Tensor], cotangents: tuple, asked: tuple[bool, ...]):
        self.job, self.kept, self.results, self.cotangents, self.asked = job, kept, results, cotangents, asked
        self.fold = job.stage.fold

    def run(self) -> list[Tensor | None]:
        states: list[State] | None = None
        program: _Program | None = None
        for chunk in self.job.read():
            wanted = {n: v for n, v in chunk[2].items() if isinstance(v, Tensor) and v.is_floating_point()}
            wanted = wanted if self.job.on_gradient else {n: v for n, v in wanted.items() if v.requires_grad}
            columns = {n: v.detach().requires_grad_() if n in wanted else v for n, v in chunk[2].items()}
            fed = self._feeds((*chunk[:2], columns))
            program = self._program(bool(wanted))
            if not program.passes:
                continue
            states, grads = self._chunk(
                program, chunk, [v.detach() if isinstance(v, Tensor) else v for v in fed], states
            )
            if wanted:
                self._deliver(chunk, wanted, columns, fed, grads)
        return self._rows(program, states)

    def _feeds(self, chunk: Chunk) -> list[Any]:
        rows = {k: v for k, v in enumerate(self.kept) if not self.job.stage.feeds[k].cols}
        with torch.enable_grad():
            return self.job.walk.leaves(self.job.stage, rows, chunk, self.job.total)

    def _program(self, columns: bool) -> _Program:
        asked = tuple(
            columns and e.dtype == "float" if e.cols else a for e, a in zip(self.fold.leaves, self.asked, strict=True)
        )
        return _gradient(self.fold, asked, tuple(g is not None for g in self.cotangents))

    def _evaluator(self, program: _Program, sizes: Sizes, leaves: list[Any]) -> Evaluator:
        inputs = dict(zip(program.leaves, leaves, strict=True)) | dict(zip(program.results, self.results, strict=True))
        inputs |= {n: g for n, g in zip(program.cotangents, self.cotangents, strict=True) if g is not None}
        return Evaluator(sizes, inputs)

    def _chunk(
        self, program: _Program, chunk: Chunk, leaves: list[Any], states: list[State] | None
    ) -> tuple[list[State], dict[int, Tensor]]:
        (p,) = program.passes
        walk, total = self.job.walk, self.job.total
        evaluate = self._evaluator(program, walk.at(chunk[0], chunk[1], total), leaves)
        mine = walk.fold(p.fold, [from_layout(evaluate(f), f) for f in p.feeds], chunk, total)
        results = subproblem.results(p.fold, mine)
        for (r, _), value, nodes in zip(p.fold.outputs, results, p.results, strict=True):
            for n in nodes if r.attrs[1] != "cols" else ():
                evaluate.memo[n] = to_layout(value, n)
        grads = {
            k: as_gradient((evaluate(e), e), leaves[k], self.fold.leaves[k])
            for k, e in program.outputs.items()
            if self.fold.leaves[k].cols
        }
        rows = [k for k, r in enumerate(p.fold.reductions) if r.attrs[1] == "cols"]
        folded = (
            mine
            if states is None
            else [
                combine.merged(r, [states[k], mine[k]]) if k in rows else mine[k]
                for k, r in enumerate(p.fold.reductions)
            ]
        )
        return folded, grads

    def _deliver(self, chunk: Chunk, wanted: dict, columns: dict, fed: list[Any], grads: dict[int, Tensor]) -> None:
        """From the gradients of what was fed to those of the chunk's own tensors."""
        live = [k for k in grads if isinstance(fed[k], Tensor) and fed[k].requires_grad]
        inputs = [columns[n] for n in wanted]
        found = (
            torch.autograd.grad([fed[k] for k in live], inputs, [grads[k] for k in live], allow_unused=True)
            if live
            else [None] * len(inputs)
        )
        named = {n: torch.zeros_like(v) if g is None else g for (n, v), g in zip(wanted.items(), found, strict=True)}
        for n, g in named.items():
            if wanted[n].requires_grad and wanted[n].is_leaf:
                wanted[n].grad = g if wanted[n].grad is None else wanted[n].grad + g
        if self.job.on_gradient is not None:
            self.job.on_gradient(chunk[0], named)

    def _rows(self, program: _Program | None, states: list[State] | None) -> list[Tensor | None]:
        grads: list[Tensor | None] = [None] * len(self.kept)
        if program is None:
            return grads
        walk, total = self.job.walk, self.job.total or 0
        evaluate = self._evaluator(program, replace(walk.sizes, cols=total), [0 if v is None else v for v in self.kept])
        if states is not None:
            (p,) = program.passes
            for (r, _), value, nodes in zip(p.fold.outputs, subproblem.results(p.fold, states), p.results, strict=True):
                for n in nodes if r.attrs[1] == "cols" else ():
                    evaluate.memo[n] = to_layout(value, n)
        for k, want in enumerate(self.asked):
            if want:
                e = program.outputs.get(k)
                result = (None, self.fold.leaves[k]) if e is None else (evaluate(e), e)
                grads[k] = as_gradient(result, self.kept[k], self.fold.leaves[k])
        return grads


@dataclass(frozen=True)
class _Program:
    """A gradient program: one pass, and an output for each leaf that has one."""

    passes: tuple[Pass, ...]
    outputs: Mapping[int, Expr]
    leaves: tuple[str, ...]
    results: tuple[str, ...]
    cotangents: tuple[str, ...]


@functools.lru_cache(maxsize=1024)
def _gradient(fold: Fold, asked: tuple[bool, ...], given: tuple[bool, ...]) -> _Program:
    source = FoldGradient(fold, asked, given)
    program, leaves = compile_program(source), tuple(e.attrs[0] for e in fold.leaves)
    outputs = dict(zip([k for k, there in enumerate(source.present) if there], program.outputs, strict=True))
    return _Program(program.passes, outputs, leaves, source.results, source.cotangents)
