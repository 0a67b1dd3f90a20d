"""Folds over columns that arrive in chunks: the passes over a source, and the check that it reads the same again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import StreamError
from ..program.expression import Expr, size, topological
from ..program.lower import Fold, Lowered, Pass, is_pass
from .common import combine, subproblem
from .common.block_gradients import Blocks, add_gradients, iterate_block_reductions, split_cotangents
from .common.combine import State
from .common.evaluate import Evaluator, Sizes, from_layout, to_layout
from .common.gradient_program import (
    GradientProgram,
    build_gradient_program,
    detach_views,
    load_saved,
    to_gradient,
    zero_gradient,
)
from .common.shard import Axis, Shard
from .common.subproblem import Engine, Subproblem

# Checksums of tensors, and the check that a source of chunks gives the same columns every time it is read.
#
# A gradient, and a program of several passes, read a source again. A source that is then shorter, longer, in another
# order or simply different would give wrong numbers without a sign, so every later reading is compared with the first.
# The stream of a user (``stream.py`` of the package) also stores the checksums of the rows in a saved state.

Chunk = tuple[int, int, dict[str, Any]]  # first column, how many, and the column arguments by name

_LINE_WORDS = 1024  # words of a line: sums along both axes of [lines, width] are weighted by their position
_WORDS_AT_ONCE = 2**24  # words that are summed at once where they must be widened to int64 first: bounds the copy
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksum(t: Tensor) -> Tensor:
    """A 64-bit checksum of a tensor's bits, as a 0-dim int64 tensor on its device; the same on every device.

    Position-dependent, so that a permutation changes it. It reads the tensor twice and does not synchronise.
    """
    flat = t.detach().contiguous().view(-1)
    flat = flat.view(_INTEGERS[flat.element_size()])
    step = 8 // flat.element_size()
    if flat.numel() % step == 0 and flat.storage_offset() % step == 0 and flat.data_ptr() % 8 == 0:
        return _sum_words(flat.view(torch.int64)) + flat.nbytes
    # Unaligned, or a length that is no multiple of 8 bytes: the same 64-bit words, assembled from shorter ones.
    total = flat.new_full((), flat.nbytes, dtype=torch.int64)  # so that trailing zeros count
    for at in range(0, flat.numel(), _WORDS_AT_ONCE):
        padded = flat[at : at + _WORDS_AT_ONCE]
        padded = torch.cat([padded, padded.new_zeros(-padded.numel() % step)])  # a copy starts aligned
        total = total + _sum_words(padded.view(torch.int64), at // step)
    return total


def _sum_words(words: Tensor, start: int = 0) -> Tensor:
    """Words weighted by their position; arithmetic modulo 2**64, so that no order of summation changes it."""
    full = words.numel() // _LINE_WORDS * _LINE_WORDS
    lines = words[:full].view(-1, _LINE_WORDS)
    first = start // _LINE_WORDS
    total = (lines.sum(1) * _draw_weights(first, first + lines.shape[0], words.device)).sum()
    total = total + (lines.sum(0) * _draw_weights(0, _LINE_WORDS, words.device)).sum()
    rest = words[full:]
    line = _draw_weights(first + lines.shape[0], first + lines.shape[0] + 1, words.device)
    return total + (rest * (_draw_weights(0, rest.numel(), words.device) + line)).sum()


def _draw_weights(start: int, stop: int, device: torch.device) -> Tensor:
    """Odd pseudo-random weights, one for each position (a multiplicative hash)."""
    n = torch.arange(start + 1, stop + 1, device=device) * -7046029254386353131
    return (n ^ (n >> 29)) * -4658895280553007687 | 1


def row_checksums(rows: Mapping[str, Any]) -> dict[str, int]:
    """Checksums of the arguments that are not streamed, by name, as stored in a saved state."""
    found = {}
    for name, value in rows.items():
        if isinstance(value, (bool, int, float)) or (hasattr(value, "item") and getattr(value, "ndim", 1) == 0):
            number = value.item() if hasattr(value, "item") else value
            # 1, 1.0 and a tensor of it are the same argument
            value = torch.tensor(float(number), dtype=torch.float64, device="cpu")
        if isinstance(value, Tensor):
            found[name] = int(checksum(value))
    return found


@dataclass(frozen=True)
class _ChunkRecord:
    """One chunk that was read: its first column, its length, the types and shapes of its tensors, and checksums."""

    start: int
    count: int
    kinds: tuple[tuple[str, torch.dtype, torch.Size], ...]
    sums: Tensor | None


class Readings:
    """All readings of one source: each later one must give what the first gave.

    Args:
        source: the source's name, for messages.
        again: whether there can be a second reading; otherwise nothing is computed.
        verify: whether chunks are compared by checksum. The number of columns is compared always.
    """

    def __init__(self, source: str, again: bool, verify: bool):
        self.source, self.again, self.verify = source, again, verify
        self._first: list[_ChunkRecord] | None = None

    def watch(self, chunks: Iterator[Chunk], at_once: bool = False) -> Iterator[Chunk]:
        """The chunks of one reading, compared on the way.

        On a GPU checksums are compared after the last chunk, so that the host need not wait for each; with
        ``at_once`` before the chunk is handed on (as always on a CPU).
        """
        seen: list[_ChunkRecord] = []
        pending: list[int] = []
        for start, count, columns in chunks:
            seen.append(self._look(start, count, columns))
            if self._first is not None and self.verify and not self._compare(seen, at_once):
                pending.append(len(seen) - 1)
            yield start, count, columns
            del columns  # while the next chunk comes, nobody holds this one
        first = self._first
        if first is None:
            self._first = seen
            return
        before, now = (sum(s.count for s in each) for each in (first, seen))
        if before != now or (self.verify and len(first) != len(seen)):
            raise self._make_error(
                f"gave {before} columns in {len(first)} chunks when it was first read, but {now} columns in "
                f"{len(seen)} chunks when it was read again"
            )
        if pending:
            sums = [torch.stack([s for k in pending if (s := each[k].sums) is not None]) for each in (first, seen)]
            equal = (sums[0] == sums[1]).all(-1).tolist()
            if not all(equal):
                raise self._make_changed_source_error(pending[equal.index(False)], seen)

    def _look(self, start: int, count: int, columns: Mapping[str, Any]) -> _ChunkRecord:
        if not (self.again and self.verify):
            return _ChunkRecord(start, count, (), None)
        tensors = sorted((n, v) for n, v in columns.items() if isinstance(v, Tensor))
        sums = torch.stack([checksum(v) for _, v in tensors]) if tensors else None
        return _ChunkRecord(start, count, tuple((n, v.dtype, v.shape) for n, v in tensors), sums)

    def _compare(self, seen: list[_ChunkRecord], at_once: bool) -> bool:
        """Whether the comparison of the last chunk is over; False leaves it for the end."""
        first, k = self._first or [], len(seen) - 1
        now = seen[k]
        if k >= len(first):
            raise self._make_error(
                f"gave {len(first)} chunks when it was first read, and now chunk {k} (from column {now.start}) as well"
            )
        before = first[k]
        if before.kinds != now.kinds or before.count != now.count:
            raise self._make_changed_source_error(k, seen)
        if before.sums is None or now.sums is None:
            return True
        if now.sums.device.type != "cpu" and not at_once:
            return False
        if not torch.equal(before.sums, now.sums):
            raise self._make_changed_source_error(k, seen)
        return True

    def _make_changed_source_error(self, k: int, seen: list[_ChunkRecord]) -> StreamError:
        before, now = (self._first or [])[k], seen[k]
        if before.count != now.count:
            what = f"it had {before.count} columns, and has {now.count}"
        elif before.kinds != now.kinds:
            what = "its tensors have other types or shapes"
        else:
            what = "its values differ"
        return self._make_error(
            f"gave another chunk {k} (columns {before.start} to {before.start + before.count}) when it was read again: "
            f"{what}"
        )

    def _make_error(self, what: str) -> StreamError:
        return StreamError(
            detail=f"{self.source} {what}",
            fix="Gradients, and ops of several passes, read a source more than once: give one that yields the same "
            "columns in the same order every time (no shuffling, no files that change); verify=False skips the "
            "comparison of values, at your own risk",
        )


# Passes over columns that arrive in chunks: each chunk is a subproblem, and its state is merged with the others.
#
# The backward of a pass is again a fold: its row results are summed over the chunks, and its column results are those
# of the current chunk. So a gradient reads the source once more.

Read = Callable[[], Iterator[Chunk]]
OnGradient = Callable[[int, dict[str, Tensor]], None]


@dataclass(frozen=True)
class ChunkedProgram:
    """One op over a stream: its program, the arguments that are not streamed, and the engine. Where its rows are some
    of ``all_rows``, ``first_row`` is the number of the first of them."""

    program: Lowered
    sizes: Sizes
    inputs: Mapping[str, Any]
    engine: Engine
    first_row: int = 0
    all_rows: int | None = None

    def __post_init__(self) -> None:
        reads = topological([*self.program.outputs, *(f for p in self.program.passes for f in p.feeds)])
        for e in reads:
            if e.op == "reduce" and (e.attrs[1] == "rows") == is_pass(e):
                raise StreamError(
                    detail="this op folds "
                    + ("its rows for every column" if is_pass(e) else "a column vector by itself"),
                    fix="Stream an op whose results are per row, or give all columns at once",
                )
            if self.all_rows is not None and e.op == "reduce" and e.attrs[1] == "rows":
                raise StreamError(
                    detail="this op adds up its rows, which are read in blocks",
                    fix="Give the rows in memory, or return a result for every row and add these up",
                )
        if any(e.cols for e in self.program.outputs):
            raise StreamError(detail="this op has a result for every column", fix="Give all columns at once")
        for f in (f for p in self.program.passes for f in p.feeds if f.cols):
            if any(e.op == "reduce" for e in topological([f])):
                raise StreamError(detail="a column value depends on a fold", fix="Give all columns at once")

    def needs_count(self, p: Pass) -> bool:
        """Whether a pass reads the total number of columns."""
        return size("cols") in topological([*p.fold.reductions, *p.feeds, *p.fold.scales])

    def chunk_sizes(self, start: int, count: int, total: int | None) -> Sizes:
        """The sizes of a chunk, sharded so that column indices are global."""
        cols = Axis((((start, start + count),),), whole=total)
        return replace(self.sizes, cols=count, shard=Shard(self._row_axis, cols))

    @property
    def _row_axis(self) -> Axis:
        return Axis((((self.first_row, self.first_row + self.sizes.rows),),), whole=self.all_rows)

    def row_feeds(self, p: Pass, known: Mapping[Expr, Any], total: int | None) -> dict[int, Any]:
        """The feeds of a pass that do not depend on the chunk, by their position."""
        evaluate = Evaluator(self.chunk_sizes(0, total or 0, total), self.inputs, dict(known))
        return {k: evaluate.feed(f) for k, f in enumerate(p.feeds) if not f.cols}

    def leaves(self, p: Pass, kept: Mapping[int, Any], chunk: Chunk, total: int | None) -> list[Any]:
        """All feeds of a pass for one chunk."""
        start, count, columns = chunk
        evaluate = Evaluator(self.chunk_sizes(start, count, total), {**self.inputs, **columns})
        return [kept[k] if k in kept else evaluate.feed(f) for k, f in enumerate(p.feeds)]

    def fold(self, fold: Fold, leaves: list[Any], chunk: Chunk, total: int | None) -> list[State]:
        """The states of a fold over one chunk."""
        start, count, _ = chunk
        rows = self._row_axis
        block = Subproblem(rows.own, ((start, start + count),), (rows.total, total or 0))
        pairs = max(1, self.sizes.rows * count)  # of this chunk: what pays is decided by all of them
        repeats = max(1, rows.total * (total or 0) // pairs)
        sizes = replace(self.sizes, cols=count, repeats=repeats)
        return subproblem.run_subproblem(fold, leaves, sizes, block, self.engine)

    def finish(self, found: Mapping[int, list[Tensor]], total: int) -> tuple[list[Any], Sizes]:
        """The outputs and the sizes, from the results of the passes (by their position)."""
        placed = None if self.all_rows is None else Shard(self._row_axis, Axis((((0, total),),)))
        sizes = replace(self.sizes, cols=total, shard=placed)
        evaluate = Evaluator(sizes, self.inputs, self.known(found))
        return [evaluate(e) for e in self.program.outputs], sizes

    def known(self, found: Mapping[int, list[Tensor]]) -> dict[Expr, Any]:
        """The results of the passes by expression, in the evaluator's layout."""
        return {
            n: to_layout(value, n)
            for k, results in found.items()
            for value, nodes in zip(results, self.program.passes[k].results, strict=True)
            for n in nodes
        }


def merge_states(fold: Fold, one: list[State] | None, other: list[State]) -> list[State]:
    """Merge the states of two chunks; ``one`` is None before the first."""
    if one is None:
        return other
    return [combine.merge_states(r, [a, b]) for r, a, b in zip(fold.reductions, one, other, strict=True)]


# A whole source ----------------------------------------------------------------------------------------------


@dataclass
class SourcePass:
    """One pass over a source: what its forward and its backward share."""

    chunked: ChunkedProgram
    place: int
    read: Read
    on_gradient: OnGradient | None
    total: int | None = None

    @property
    def stage(self) -> Pass:
        return self.chunked.program.passes[self.place]


def source_is_empty() -> StreamError:
    """The error of a source that gave no chunk at all."""
    return StreamError(detail="the source is empty", fix="Give at least one chunk, if only with no columns")


def run_over_source(
    chunked: ChunkedProgram, read: Read, on_gradient: OnGradient | None, columns_ask: bool = False
) -> tuple[list[Any], Sizes]:
    """Run all passes over a source that can be read again; differentiable.

    Autograd does not see the columns as inputs: a zero-dimensional anchor tensor requires a gradient in their place.
    """
    found: dict[int, list[Tensor]] = {}
    total: int | None = None
    for k, p in enumerate(chunked.program.passes):
        if total is None and chunked.needs_count(p):
            total = sum(count for _, count, _ in read())
        job = SourcePass(chunked, k, read, on_gradient, total)
        kept = chunked.row_feeds(p, chunked.known(found), total)
        anchor = torch.zeros((), device="cpu", requires_grad=on_gradient is not None or columns_ask)
        found[k] = list(_Pass.apply(job, anchor, *(kept.get(n) for n in range(len(p.feeds)))))
        total = job.total
    return chunked.finish(found, total or 0)


class _Pass(torch.autograd.Function):
    """One pass over a source; its backward reads the source again."""

    @staticmethod
    def forward(ctx: Any, job: SourcePass, anchor: Tensor, *kept: Any) -> tuple[Tensor, ...]:
        results = detach_views(_fold_source(job, kept))
        ctx.job, ctx.constants = job, [None if isinstance(v, Tensor) else v for v in kept]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in results if not t.dtype.is_floating_point))
        ctx.save_for_backward(*(v for v in kept if isinstance(v, Tensor)), *results)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        pairs = [*zip(ctx.job.stage.feeds, ctx.constants, strict=True)]
        first = sum(not f.cols and c is None for f, c in pairs)  # how many of the row feeds are tensors
        tensors, unchanged = load_saved(ctx, range(first, first + len(cotangents)))
        rest = iter(tensors)
        kept = [None if f.cols else c if c is not None else next(rest) for f, c in pairs]
        results = list(rest) if unchanged else _fold_source(ctx.job, kept)
        return None, None, *_SourceBackward(ctx.job, kept, results, cotangents, ctx.needs_input_grad[2:]).run()


def _fold_source(job: SourcePass, kept: Sequence[Any]) -> list[Tensor]:
    """Read the source once and return the results of a pass."""
    p, chunked = job.stage, job.chunked
    rows = {k: v for k, v in enumerate(kept) if not p.feeds[k].cols}
    states: list[State] | None = None
    seen = 0
    for chunk in job.read():
        states = merge_states(
            p.fold, states, chunked.fold(p.fold, chunked.leaves(p, rows, chunk, job.total), chunk, job.total)
        )
        seen += chunk[1]
        del chunk  # so that its memory is free while the next one is read
    if states is None:
        raise source_is_empty()
    job.total = seen
    return subproblem.finish_states(p.fold, states)


class _SourceBackward:
    """Reads the source again: row gradients are summed over chunks, column gradients belong to their chunk."""

    def __init__(
        self, job: SourcePass, kept: list[Any], results: list[Tensor], cotangents: tuple, row_needs: tuple[bool, ...]
    ):
        self.job, self.kept, self.results, self.row_needs = job, kept, results, row_needs
        self.fold = job.stage.fold
        self.cotangents, others = split_cotangents(self.fold, cotangents)
        self.others = OtherChunks(self.fold, others)
        self.more: dict[int, Tensor] = {}  # gradients of row feeds through these

    def run(self) -> list[Tensor | None]:
        states: list[list[State]] | None = None  # of each pass of the gradient
        program: GradientProgram | None = None
        if self.others.parts:
            self._read_others()
        for number, chunk in enumerate(self._read_with_gradients()):
            wanted = {n: v for n, v in chunk[2].items() if isinstance(v, Tensor) and v.is_floating_point()}
            wanted = wanted if self.job.on_gradient else {n: v for n, v in wanted.items() if v.requires_grad}
            columns = {n: v.detach().requires_grad_() if n in wanted else v for n, v in chunk[2].items()}
            fed = self._evaluate_feeds((*chunk[:2], columns))
            program = self._build_program(bool(wanted))
            leaves = [v.detach() if isinstance(v, Tensor) else v for v in fed]
            grads: dict[int, Tensor] = {}
            if program.program.passes:
                states, grads = self._fold_chunk(program, chunk, leaves, states)
            if self.others.parts:
                self._add_others(number, chunk, leaves, bool(wanted), grads)
            if wanted and (program.program.passes or self.others.parts):
                self._backpropagate_to_columns(chunk, wanted, columns, fed, grads)
        found = self._finish_rows(program, states)
        return [self._add(g, self.more.get(k)) for k, g in enumerate(found)]

    def _read_with_gradients(self) -> Iterator[Chunk]:
        """The chunks, cut or computed as in the forward: a backward runs without gradients, and a slice of a weight
        would ask for none."""
        chunks = self.job.read()
        while True:
            with torch.enable_grad():
                chunk = next(chunks, None)
            if chunk is None:
                return
            yield chunk
            del chunk

    def _read_others(self) -> None:
        """The first reading of gradients that come from all others."""
        chunked, total = self.job.chunked, self.job.total
        for chunk in self.job.read():
            fed = [v.detach() if isinstance(v, Tensor) else v for v in self._evaluate_feeds(chunk)]
            self.others.read(fed, chunked.chunk_sizes(chunk[0], chunk[1], total))
        self.others.fold(fed, chunked.chunk_sizes(chunk[0], chunk[1], total))

    def _add_others(
        self, number: int, chunk: Chunk, leaves: list[Any], columns: bool, grads: dict[int, Tensor]
    ) -> None:
        """The second reading: gradients of columns are added to those of the chunk, those of rows to one another."""
        sizes = self.job.chunked.chunk_sizes(chunk[0], chunk[1], self.job.total)
        found = self.others.gradients(number, leaves, sizes, self._find_wanted(columns))
        for k, g in enumerate(found):
            if g is not None:
                into = grads if self.fold.leaves[k].cols else self.more
                into[k] = g if k not in into else into[k] + g

    @staticmethod
    def _add(one: Tensor | None, other: Tensor | None) -> Tensor | None:
        return one if other is None else other if one is None else one + other

    def _evaluate_feeds(self, chunk: Chunk) -> list[Any]:
        rows = {k: v for k, v in enumerate(self.kept) if not self.job.stage.feeds[k].cols}
        with torch.enable_grad():
            return self.job.chunked.leaves(self.job.stage, rows, chunk, self.job.total)

    def _find_wanted(self, columns: bool) -> tuple[bool, ...]:
        """The feeds whose gradients are wanted; ``columns``: those of columns too."""
        return tuple(
            columns and e.dtype == "float" if e.cols else a
            for e, a in zip(self.fold.leaves, self.row_needs, strict=True)
        )

    def _build_program(self, columns: bool) -> GradientProgram:
        given = tuple(g is not None for g in self.cotangents)
        return build_gradient_program(self.fold, self._find_wanted(columns), given)

    def _make_evaluator(self, program: GradientProgram, sizes: Sizes, leaves: list[Any]) -> Evaluator:
        return Evaluator(sizes, program.bind(leaves, self.results, self.cotangents))

    def _fold_chunk(
        self, program: GradientProgram, chunk: Chunk, leaves: list[Any], states: list[list[State]] | None
    ) -> tuple[list[list[State]], dict[int, Tensor]]:
        chunked, total = self.job.chunked, self.job.total
        evaluate = self._make_evaluator(program, chunked.chunk_sizes(chunk[0], chunk[1], total), leaves)
        folded: list[list[State]] = []
        for p in program.program.passes:  # each of pairs and saved results alone, so none waits for another
            mine = chunked.fold(p.fold, [evaluate.feed(f) for f in p.feeds], chunk, total)
            results = subproblem.finish_states(p.fold, mine)
            for (r, _), value, nodes in zip(p.fold.outputs, results, p.results, strict=True):
                for n in nodes if r.attrs[1] not in ("cols", "both") else ():
                    evaluate.memo[n] = to_layout(value, n)
            before = None if states is None else states[len(folded)]
            rows = [k for k, r in enumerate(p.fold.reductions) if r.attrs[1] in ("cols", "both")]
            folded.append(
                mine
                if before is None
                else [
                    combine.merge_states(r, [before[k], mine[k]]) if k in rows else mine[k]
                    for k, r in enumerate(p.fold.reductions)
                ]
            )
        grads = {
            k: to_gradient(from_layout(evaluate(e), e), e, leaves[k], self.fold.leaves[k])
            for k, e in program.outputs
            if e is not None and self.fold.leaves[k].cols
        }
        return folded, grads

    def _backpropagate_to_columns(
        self, chunk: Chunk, wanted: dict, columns: dict, fed: list[Any], grads: dict[int, Tensor]
    ) -> None:
        """Backpropagate from the feeds to the chunk's own tensors, and store or report their gradients."""
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
            elif wanted[n].requires_grad:  # a slice of a weight, what a network made: on to those
                torch.autograd.backward(wanted[n], g, retain_graph=True)
        if self.job.on_gradient is not None:
            self.job.on_gradient(chunk[0], named)

    def _finish_rows(self, program: GradientProgram | None, states: list[list[State]] | None) -> list[Tensor | None]:
        grads: list[Tensor | None] = [None] * len(self.kept)
        if program is None:
            return grads
        chunked, total = self.job.chunked, self.job.total or 0
        evaluate = self._make_evaluator(
            program, replace(chunked.sizes, cols=total), [0 if v is None else v for v in self.kept]
        )
        for p, mine in zip(program.program.passes, states or [], strict=states is not None):
            for (r, _), value, nodes in zip(
                p.fold.outputs, subproblem.finish_states(p.fold, mine), p.results, strict=True
            ):
                for n in nodes if r.attrs[1] in ("cols", "both") else ():
                    evaluate.memo[n] = to_layout(value, n)
        for k, e in program.outputs:
            if self.row_needs[k]:
                leaf = self.kept[k]
                grads[k] = (
                    zero_gradient(leaf)
                    if e is None
                    else to_gradient(from_layout(evaluate(e), e), e, leaf, self.fold.leaves[k])
                )
        return grads


# Gradients of monoids that have no local one (``common/block_gradients.py``), over columns that arrive in chunks.
# A chunk is one more block: a first reading keeps a state of each chunk, whose fold gives every chunk its cotangent;
# a second one goes back through the pairs of each chunk. So such a gradient reads the source twice, and holds as many
# numbers per row as a state has, for each chunk.


class OtherChunks:
    """The reductions of one pass whose gradients come from all others, with their cotangents."""

    def __init__(self, fold: Fold, cotangents: Sequence[Tensor | None]):
        self.parts = [*iterate_block_reductions(fold, cotangents)]
        self.states: list[list[list[Tensor]]] = [[] for _ in self.parts]  # of each reduction and chunk
        self.given: list[list[tuple[Tensor, ...]]] = []  # likewise, the cotangents

    def read(self, leaves: Sequence[Any], sizes: Sizes) -> None:
        """The first reading of a chunk."""
        for (fold, _), states in zip(self.parts, self.states, strict=True):
            states.append(_make_blocks(fold, leaves, sizes, (False,) * len(leaves)).states())

    def fold(self, leaves: Sequence[Any], sizes: Sizes) -> None:
        """After the first reading: the cotangent of each chunk."""
        for (fold, given), states in zip(self.parts, self.states, strict=True):
            job = _make_blocks(fold, leaves, sizes, (False,) * len(leaves))
            stacked = [torch.stack(ts) for ts in zip(*states, strict=True)]
            pulled = torch.func.vjp(job.merge(0), *stacked)[1](tuple(job.fill_cotangents(given)))
            self.given.append([*zip(*(t.unbind() for t in pulled), strict=True)])
        self.states.clear()

    def gradients(
        self, number: int, leaves: Sequence[Any], sizes: Sizes, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """The second reading of chunk ``number``: the gradients of its leaves."""
        grads: list[Tensor | None] = [None] * len(leaves)
        for (fold, _), given in zip(self.parts, self.given, strict=True):
            job = _make_blocks(fold, leaves, sizes, wanted)
            add_gradients(grads, job, job.gradients(given[number]))
        return grads


def _make_blocks(fold: Fold, leaves: Sequence[Any], sizes: Sizes, wanted: Sequence[bool]) -> Blocks:
    return Blocks(fold, sizes, tuple(leaves), tuple(wanted))
