"""A run over rows and columns that come from files: blocks of rows, each of which sees all chunks of columns.

The rows of a block, the state of their fold and two chunks are held, however long the two axes are. A run that is saved
can be stopped anywhere and goes on to the bit: its blocks, its chunks and the memory that engines may use are
chosen once and stored with it. Used by ``stream.py``, which knows what an op or a layer is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .engines import stream
from .engines.common.combine import State
from .engines.common.evaluate import Sizes
from .engines.common.subproblem import finish_states
from .engines.stream import Chunk, ChunkedProgram, checksum, row_checksums
from .errors import BudgetError, ShapeError, StreamError
from .plan import budget, settings
from .saved_runs import THE_OP, SavedRun, join_blocks, note_interrupt, temporary_run, versions, write_results
from .sources import AlongAxis, Chunks, Meter, format_count

BUDGET = 2**30  # bytes of a run without a budget
_ROWS, _COLUMNS, _TILES = 4, 16, 2  # a block of rows, a chunk of columns and tiles take 1 / this of the budget each


@dataclass(frozen=True)
class Argument:
    """An argument of rows or columns: whether it may be left out, and which axis of so many is cut."""

    optional: bool
    axis: Callable[[int], int]


@dataclass(frozen=True)
class Place:
    """Where some rows stand among all: the number of the first, and of all."""

    first: int
    total: int


@dataclass(frozen=True)
class Prepared:
    """What an op tells of a call: its passes over chunks, its program's name, how columns become inputs, its results
    in order, the form that its caller sees, and the axis of rows and the bytes of each result. It holds no column: a
    chunk is not to outlive its turn."""

    chunked: ChunkedProgram
    name: str
    inputs: Callable[[Mapping[str, Any]], dict[str, Any]]
    results: Callable[[list[Any], Sizes], list[Tensor]]
    pack: Callable[[Sequence[Tensor], Mapping[str, Any], int], Any]  # the results, all rows, the number of columns
    check: Callable[[int], None]  # raises what so many columns in all are too few for
    axes: tuple[int, ...] = ()
    bytes_each: int = 0  # of all results of one row


Prepare = Callable[[Mapping[str, Any], Mapping[str, Any], Place | None], Prepared]  # of rows, a chunk, the rows' place


class ChunkMaker:
    """Chunks of columns as a fold takes them: each checked against the first; one like the last is right."""

    def __init__(self, prepare: Callable[[Mapping[str, Any]], Prepared]):
        self.prepare = prepare
        self.last: tuple[dict[str, Any], Prepared] | None = None

    def make(self, prepared: Prepared, named: Mapping[str, Any], at: int) -> Chunk:
        kind = {n: (v.dtype, v.shape, v.device) if isinstance(v, Tensor) else None for n, v in named.items()}
        if self.last is None or self.last[0] != kind or None in kind.values():
            again = self.prepare(named)
            check_same_program(prepared.name, again.name)
            self.last = kind, again
        again = self.last[1]
        return at, again.chunked.sizes.cols, again.inputs(named)


def check_same_program(name: str, other: str) -> None:
    """Raise StreamError unless two chunks, streams or states belong to one program."""
    if name != other:
        raise StreamError(
            detail="the columns, rows or options do not fit those folded so far",
            fix="Keep one op, one set of rows, and chunks of one type and one number of features",
        )


class Rows:
    """The arguments that are not columns: in memory, or in files that are read a block at a time."""

    def __init__(self, memory: Mapping[str, Any], files: Mapping[str, AlongAxis], arguments: Mapping[str, Argument]):
        self.memory, self.files, self.arguments = memory, files, arguments
        self.cut = {n: v for n, v in memory.items() if n in arguments and isinstance(v, Tensor)} if files else {}
        lengths = {n: len(a) for n, a in files.items()}
        lengths |= {n: v.shape[self._axis(n, v.dim())] for n, v in self.cut.items()}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{n} has {count}" for n, count in lengths.items())
            raise ShapeError(detail=f"the rows differ in number: {counts}", fix="Give equally many rows in each")
        self.total = next(iter(lengths.values()), None)

    def _axis(self, name: str, rank: int) -> int:
        axis = self.arguments[name].axis(rank)
        if not 0 <= axis < rank:
            raise ShapeError(
                detail=f"{name} has {rank} axes, which is one too few", fix="Give one number or vector a row"
            )
        return axis

    def block(self, start: int, stop: int) -> tuple[dict[str, Any], Place | None]:
        """The arguments of some rows, and where these stand."""
        if self.total is None:
            return dict(self.memory), None
        found = {n: v.narrow(self._axis(n, v.dim()), start, stop - start) for n, v in self.cut.items()}
        found |= {n: a.read(start, stop) for n, a in self.files.items()}
        whole = stop - start == self.total
        return {**self.memory, **found}, None if whole else Place(start, self.total)

    def stand_ins(self) -> dict[str, Any]:
        """The arguments of all rows for whoever looks at shapes and types: vectors in files without their values."""
        found = dict(self.memory)
        for n, a in self.files.items():
            one = len(a.shape) == 1
            found[n] = a.read(0, len(a)) if one else torch.zeros((), dtype=a.dtype, device="cpu").expand(a.shape)
        return found

    @property
    def bytes_each(self) -> int:
        return sum(a.bytes_each for a in self.files.values())

    def options(self) -> dict[str, str]:
        """The choices and numbers among the arguments, as they are shown."""
        return {n: repr(v) for n, v in self.memory.items() if isinstance(v, (str, bool, int, float)) or v is None}

    def fingerprint(self) -> dict[str, str]:
        """What tells these rows from others, by argument."""
        files = {n: _fingerprint(a) for n, a in self.files.items()}
        numbers = {n: str(v) for n, v in row_checksums(self.memory).items() if n not in self.options()}
        return {**numbers, **files}


def _fingerprint(a: AlongAxis) -> str:
    own = getattr(a.array, "fingerprint", None)
    values = own() if own is not None else str([int(checksum(a.read(k, k + 2**16))) for k in range(0, len(a), 2**16)])
    return f"{a.shape} {a.dtype} {values}"


class Columns:
    """A source of chunks as a run reads it: from any chunk on, and again where it can be read again."""

    def __init__(self, source: Any, named: Callable[[Any], dict[str, Any]], saved: bool):
        self.source, self.named, self.saved = source, named, saved
        self.begun: list[Iterator[Any]] = []
        self.first: list[Any] = []
        self.sums: list[list[int]] = []  # of the chunks read so far, where the source has no fingerprint
        self.once = not isinstance(source, Chunks) and iter(source) is source

    @property
    def total(self) -> int | None:
        return self.source.columns if isinstance(self.source, Chunks) else None

    def example(self) -> dict[str, Any]:
        """A chunk without columns, or the first one, which is then read as any other."""
        if isinstance(self.source, Chunks):
            empty = self.source.like(tuple(a.read(0, 0) for a in self.source.arrays))
            return self.named(empty)
        if not self.first:
            reader = iter(self.source)
            first = next(reader, None)
            if first is None:
                raise stream.source_is_empty()
            if self.once:
                self.begun.append(reader)
            self.first.append(first)
        return self.named(self.first[0])

    def read(self, chunk: int) -> Iterator[dict[str, Any]]:
        """The chunks from the given one on."""
        if isinstance(self.source, Chunks):
            for values in self.source.read_from(chunk):
                yield self.named(values)
                del values
            return
        again: Iterable[Any] = self.source
        if self.once:
            again = chain(self.first, self.begun.pop())
        for n, values in enumerate(again):
            named = self.named(values)
            del values
            if self.saved:
                self._compare(n, named)
            if n >= chunk:
                yield named
            del named

    def _compare(self, n: int, named: Mapping[str, Any]) -> None:
        sums = [int(checksum(v)) for _, v in sorted(named.items()) if isinstance(v, Tensor)]
        if n == len(self.sums):
            self.sums.append(sums)
        elif self.sums[n] != sums:
            raise StreamError(
                detail=f"chunk {n} of the source is not what it was when the run was begun",
                fix="Give the same chunks in the same order, or another state= to begin anew",
            )

    def fingerprint(self) -> str:
        if not isinstance(self.source, Chunks):
            return "chunks that come one after the other"
        return repr((self.source.size, [_fingerprint(a) for a in self.source.arrays]))


def chain(first: list[Any], rest: Iterable[Any]) -> Iterator[Any]:
    """Yield the chunks already read, then the rest, without keeping references."""
    while first:
        yield first.pop()
    yield from rest


def columns_per_chunk(arrays: Sequence[AlongAxis], most: int) -> int:
    """How many columns a chunk of these may have within the budget in force, and at most ``most``."""
    asked = settings.requested_budget()
    return most if asked is None else max(1, min(most, asked // _COLUMNS // max(1, sum(a.bytes_each for a in arrays))))


def fits_in_memory(files: Iterable[AlongAxis]) -> bool:
    """Whether rows are so few that they may be read at once."""
    return sum(a.bytes_each * len(a) for a in files) <= (settings.requested_budget() or BUDGET) // (4 * _ROWS)


@dataclass
class _Progress:
    """How far a run is: the block of rows, the pass over its columns, the chunk, and what has been folded of them."""

    block: int = 0
    stage: int = 0
    chunk: int = 0
    seen: int = 0
    states: list[State] | None = None
    found: dict[int, list[Tensor]] = field(default_factory=dict)
    total: int | None = None


@dataclass
class BlockRun:
    """One run. ``prepare`` makes ready for the rows of a block; ``saved``: where it is kept, if it is."""

    prepare: Prepare
    rows: Rows
    columns: Columns
    saved: SavedRun | None
    quiet: bool
    memo: dict[str, int]  # numbers that were drawn for the run
    own_chunks: bool = False  # whether the size of a chunk is the run's to choose

    def run(self, out: Path | None) -> Any:
        """Run it to its end: the result, or the result's files, mapped."""
        with torch.no_grad(), contextlib.ExitStack() as stack:
            plan, progress = self._begin()
            kept, blocks = self.saved, self._blocks(plan["rows"])
            if kept is None and out is not None and len(blocks) > 1:
                kept = stack.enter_context(temporary_run(out.parent))
            stack.enter_context(settings.change(budget=max(1, plan["budget"] // _TILES)))
            finished: list[list[Tensor]] = []
            prepared = None
            meter = self._meter(blocks, progress)
            try:
                for b in range(progress.block, len(blocks)):
                    results, prepared = self._fold_block(blocks[b], progress, plan, meter)
                    if kept is not None:
                        kept.save_block(b, results)
                    else:
                        finished.append(results)
                    del results
                    progress = _Progress(block=b + 1, total=progress.total)
                    self._save(plan, progress)
            except KeyboardInterrupt as error:
                if self.saved is not None:
                    of = f" of {format_count(meter.total)}" if meter.total else ""
                    done = f"with {format_count(meter.done)}{of} {meter.unit} folded"
                    note_interrupt(error, f"the state is kept in {self.saved.folder}, {done}")
                raise
            except BudgetError as error:  # speaks of the tiles' share
                least = _TILES * settings.parse_bytes(str(error.details["least"]))
                given = budget.format_floor(plan["budget"])
                raise BudgetError(given=given, least=budget.format_ceil(least), bytes=least) from None
            finally:
                meter.close()
            if prepared is None:  # all blocks were finished by an earlier run
                prepared = self.prepare(*self._arguments(blocks[-1]))
            each = iter(finished) if kept is None else (kept.load_block(b) for b in range(len(blocks)))
            on_disk = kept.folder if kept is not None and out is not None and self.rows.total is not None else None
            joined = next(each) if len(blocks) == 1 else join_blocks(each, prepared.axes, self._length(), on_disk)
            result = prepared.pack(joined, self.rows.stand_ins(), progress.total or 0)
            result = result if out is None else write_results(result, out)
            if self.saved is not None:
                self.saved.remove()
            return result

    def _begin(self) -> tuple[dict[str, Any], _Progress]:
        """The plan of the run, and how far it is: of the saved run, or new ones."""
        found = None if self.saved is None else self.saved.load()
        if self.saved is not None and found is not None:
            if self.own_chunks:
                self.columns.source.size = found["plan"]["columns"]
            self.saved.check(found, self._fingerprint())
            self.columns.sums = found["sums"]
            self.memo.update(found["plan"]["memo"])
            return found["plan"], _Progress(**found["progress"])
        plan: dict[str, Any] = {"budget": settings.requested_budget() or BUDGET, "memo": self.memo}
        plan["columns"] = getattr(self.columns.source, "size", 0)
        if self.columns.total is not None:
            self._prepare_one().check(self.columns.total)
        plan["rows"] = self._rows_per_block(plan["budget"])
        if self.columns.once and self.rows.total is not None and plan["rows"] < self.rows.total:
            raise StreamError(
                detail=f"{self.rows.total} rows are read in blocks of {plan['rows']}, and each needs all columns, but "
                "the source is read only once",
                fix="Give columns that can be read again (a file, mr.chunks(...)), or allow more memory with mr.budget",
            )
        progress = _Progress()
        self._save(plan, progress)
        return plan, progress

    def _rows_per_block(self, limit: int) -> int:
        if self.rows.total is None:
            return 0
        one = self._prepare_one()
        each = 3 * self.rows.bytes_each + 6 * one.bytes_each + 64  # rows as read and as fed; states old, new and joined
        return max(1, limit // _ROWS // each)

    def _blocks(self, count: int) -> list[tuple[int, int]]:
        if self.rows.total is None:
            return [(0, 0)]
        return [(at, min(at + count, self.rows.total)) for at in range(0, self.rows.total, count)] or [(0, 0)]

    def _arguments(self, block: tuple[int, int]) -> tuple[dict[str, Any], dict[str, Any], Place | None]:
        rows, place = self.rows.block(*block)
        return rows, self.columns.example(), place

    def _prepare_one(self) -> Prepared:
        """What is known of the op from the shapes of all rows."""
        return self.prepare(self.rows.stand_ins(), self.columns.example(), None)

    def _length(self) -> int:
        return 0 if self.rows.total is None else self.rows.total

    def _meter(self, blocks: Sequence[tuple[int, int]], progress: _Progress) -> Meter:
        rows, cols = max(1, self._length()), self.columns.total
        total = None if cols is None else rows * cols
        start = blocks[progress.block][0] if progress.block < len(blocks) else self._length()
        height = max(1, blocks[progress.block][1] - start) if progress.block < len(blocks) else 0
        done = start * (cols or 0) + height * progress.seen
        return Meter(self.quiet, total, "folding", "pairs" if self._length() else "columns", done)

    def _fold_block(
        self, block: tuple[int, int], progress: _Progress, plan: Mapping[str, Any], meter: Meter
    ) -> tuple[list[Tensor], Prepared]:
        """The results of a block of rows over all columns, from where ``progress`` stands."""
        rows, example, place = self._arguments(block)
        prepared = self.prepare(rows, example, place)
        del example
        chunked, maker = prepared.chunked, ChunkMaker(lambda chunk: self.prepare(rows, chunk, place))
        if self.columns.once and _passes(chunked) > 1:
            raise StreamError(
                detail="this op reads its columns more than once, but the source is read only once",
                fix="Give columns that can be read again: a file, a list, mr.chunks(...)",
            )
        if progress.total is None:  # what pays to be compiled is decided by it too
            counts = any(chunked.needs_count(p) for p in chunked.program.passes)
            progress.total = self._count_columns(prepared, maker) if counts else self.columns.total
        try:
            for k in range(progress.stage, len(chunked.program.passes)):
                self._fold_columns(prepared, maker, k, progress, plan, meter, max(1, block[1] - block[0]))
        except BaseException:
            with contextlib.suppress(StreamError):
                self._save(plan, progress)
            raise
        return prepared.results(*chunked.finish(progress.found, progress.total or 0)), prepared

    def _fold_columns(
        self,
        prepared: Prepared,
        maker: ChunkMaker,
        stage: int,
        progress: _Progress,
        plan: Mapping[str, Any],
        meter: Meter,
        height: int,
    ) -> None:
        chunked, p = prepared.chunked, prepared.chunked.program.passes[stage]
        fed = chunked.row_feeds(p, chunked.known(progress.found), progress.total)
        for named in self.columns.read(progress.chunk):
            chunk = maker.make(prepared, named, progress.seen)
            del named
            mine = chunked.fold(p.fold, chunked.leaves(p, fed, chunk, progress.total), chunk, progress.total)
            states = stream.merge_states(p.fold, progress.states, mine)
            count = chunk[1]
            del chunk, mine
            progress.states, progress.chunk, progress.seen = states, progress.chunk + 1, progress.seen + count
            meter.add(count * (height if self._length() else 1) if not stage else 0)
            if self.saved is not None and self.saved.is_due():
                self._save(plan, progress)
        if progress.states is None:
            raise stream.source_is_empty()
        if progress.total not in (None, progress.seen):
            raise StreamError(
                detail=f"the source gave {progress.total} columns before, and now {progress.seen}",
                fix="Give columns that are the same every time they are read",
            )
        progress.found[stage] = finish_states(p.fold, progress.states)
        progress.total, progress.states = progress.seen, None
        progress.stage, progress.chunk, progress.seen = stage + 1, 0, 0

    def _count_columns(self, prepared: Prepared, maker: ChunkMaker) -> int:
        if self.columns.total is not None:
            return self.columns.total
        return sum(maker.make(prepared, named, 0)[1] for named in self.columns.read(0))

    # On disk

    def _fingerprint(self) -> dict[str, Any]:
        return {
            "options": self.rows.options(),
            THE_OP: self._prepare_one().name,
            "rows": self.rows.fingerprint(),
            "the columns": self.columns.fingerprint(),
            "the engine or the precision": repr((settings.now().engine, settings.now().precision)),
            "the versions or threads": versions(),
        }

    def _save(self, plan: Mapping[str, Any], progress: _Progress) -> None:
        if self.saved is None:
            return
        if not hasattr(self, "_own"):
            self._own = self._fingerprint()
        state = {**vars(progress), "found": dict(progress.found)}
        self.saved.save({"fingerprint": self._own, "plan": plan, "sums": self.columns.sums, "progress": state})


def _passes(chunked: ChunkedProgram) -> int:
    """How often a source is read."""
    return len(chunked.program.passes) + any(chunked.needs_count(p) for p in chunked.program.passes)
