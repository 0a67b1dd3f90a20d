"""Columns that do not fit in memory, or are not there yet: a fold fed chunk by chunk, stopped, resumed and merged.

The rows and the state stay; a chunk of columns comes, is folded where it stands in the whole, and goes. A state knows
which columns it covers, as intervals of global column numbers, so that streams merge in any order and no column is
counted twice. Gradients need a second look at every chunk, so they ask for a source that can be read again. A source is
any iterable of chunks (a tensor, or a tuple or dict of tensors); ``sources.py`` makes them of arrays and files.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .engines.common.combine import State
from .engines.common.evaluate import Sizes
from .engines.common.subproblem import finish_states as closed
from .engines.ranks import agreement
from .engines.stream import chunked_passes
from .engines.stream.checksum import Readings, row_checksums
from .engines.stream.chunked_passes import Chunk, ChunkedProgram, OnGradient
from .errors import ArgumentError, StreamError
from .program.declarations import Parameter
from .sources import Chunks, progress

Ranges = tuple[tuple[int, int], ...]  # disjoint intervals [start, stop) of column numbers, in order, none adjacent


@dataclass(frozen=True)
class Prepared:
    """What an op tells of a call: the walk over its passes, its program's name, how columns become inputs, and its
    results' form. It holds no column: a chunk is not to outlive its turn."""

    walk: ChunkedProgram
    name: str
    inputs: Callable[[Mapping[str, Any]], dict[str, Any]]
    form: Callable[[list[Any], Sizes], Any]


class Stream:
    """A fold under way: made by ``op.stream(...)``, fed by ``update`` or ``over``, asked by ``result``.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def attention(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"]):
    ...     return mr.softmax_mean(q @ k, v)
    >>> q, k, v = torch.randn(3, 4), torch.randn(10, 4), torch.randn(10, 2)
    >>> fold = attention.stream(q)
    >>> fold.update(k[:7], v[:7])
    >>> fold.update(k[7:], v[7:])
    >>> torch.allclose(fold.result(), attention(q, k, v), atol=1e-6)
    True
    """

    def __init__(
        self,
        prepare: Callable[[Mapping[str, Any]], Prepared],
        columns: Mapping[str, Parameter],
        rows: Mapping[str, Any],
    ):
        self._prepare, self._columns, self._rows = prepare, columns, rows
        self._prepared: Prepared | None = None
        self._last: tuple[dict[str, Any], Prepared] | None = None  # of what kind the last chunk was
        self._empty: dict[str, Any] | None = None  # a chunk of no columns, of the kind of those folded
        self._states: list[State] | None = None
        self._ranges: Ranges = ()
        self._next = 0  # the number of the next column
        self._placed = False  # whether starting() said so, and no column has come since

    @property
    def ranges(self) -> Ranges:
        """The columns folded so far, as disjoint intervals ``(start, stop)`` in order."""
        return self._ranges

    @property
    def start(self) -> int:
        """The number of the first column folded, or of the one that will be."""
        return self._ranges[0][0] if self._ranges else self._next

    @property
    def stop(self) -> int:
        """The number that the next column gets."""
        return self._next

    def starting(self, at: int) -> Stream:
        """The same, with its next column numbered ``at``: a part of a longer stream, or a gap to be filled."""
        if isinstance(at, bool) or not hasattr(at, "__index__") or at < 0:
            raise ArgumentError(detail=f"starting was given at = {at!r}", fix="Give a whole number from 0")
        self._next, self._placed = operator.index(at), True
        return self

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Fold one more chunk of columns, given in the order of the op's column parameters, or by name."""
        named = self._named(kwargs if kwargs and not args else args)
        with torch.no_grad():
            prepared = self._ready(named)
            chunk = self._chunk(prepared, named, self._next)
            ranges = _join_ranges(self._ranges, ((chunk[0], chunk[0] + chunk[1]),))
            walk, p = prepared.walk, _single_pass(prepared.walk)
            leaves = walk.leaves(p, walk.row_feeds(p, {}, None), chunk, None)
            self._states = chunked_passes.merge_states(p.fold, self._states, walk.fold(p.fold, leaves, chunk, None))
        self._ranges, self._next, self._placed = ranges, self._next + chunk[1], False

    def merge(self, other: Stream) -> Stream:
        """Take in what another stream of the same op and rows has folded of other columns, in any order.

        The next column is then numbered after the last one of both, unless ``starting`` has just said otherwise.
        Columns that both have folded, another op and other rows are a StreamError, and leave both as they were.
        """
        if not isinstance(other, Stream):
            raise ArgumentError(detail=f"merge was given {type(other).__name__}", fix="Give another op.stream(...)")
        if other._states is None or other._prepared is None or other._empty is None:
            return self
        if other._rows is not self._rows:
            _check_same_rows(row_checksums(other._rows), self._rows, "the streams to be merged")
        with torch.no_grad():
            prepared = self._ready(other._empty, other._prepared.name)
            ranges = _join_ranges(self._ranges, other._ranges)
            fold = _single_pass(prepared.walk).fold
            if self._states is None:
                self._states = list(other._states)
            else:
                first, second = (self, other) if self.start <= other.start else (other, self)
                self._states = chunked_passes.merge_states(fold, first._states, second._states or [])
        self._ranges = ranges
        if ranges and not self._placed:
            self._next = max(self._next, ranges[-1][1])
        return self

    def result(self) -> Any:
        """What the op would have returned for all columns so far, without gradients.

        Where columns are still missing in between, the result is that of the columns that were folded: indices are
        column numbers of the whole stream, and means and counts are over the columns that were folded.
        """
        if self._states is None or self._prepared is None:
            raise StreamError(detail="no columns have been folded", fix="Call update first, if only with no columns")
        walk = self._prepared.walk
        with torch.no_grad():
            found = closed(_single_pass(walk).fold, self._states)
            return self._prepared.form(*walk.finish({0: found}, sum(b - a for a, b in self._ranges)))

    def over(
        self,
        source: Iterable[Any],
        *,
        gradients: OnGradient | None = None,
        quiet: bool = False,
        verify: bool = True,
    ) -> Any:
        """Read a whole source of chunks; the result, differentiable for the rows where they ask for it.

        A gradient reads the source again: chunks that ask for one get theirs added to ``.grad``, and
        ``gradients(first column, {name: gradient})`` is called for each. A program of several passes reads it once for
        each, and what it calls with is then to be added up. At a terminal a bar shows how far it is, unless ``quiet``.

        A later reading that differs from the first is a StreamError: the number of columns is always compared, and
        with ``verify`` a checksum of every chunk (where there can be a second reading; it costs two reads of the
        chunk's memory each time).
        """
        if self._states is not None:
            raise StreamError(detail="this stream has been fed already", fix="Give a source to a fresh op.stream(...)")
        _check_not_sharded()
        reader = iter(source)
        if reader is source:
            if torch.is_grad_enabled() and (self._rows_ask() or gradients is not None):
                raise StreamError(
                    detail=f"a gradient needs to read the source twice, but {type(source).__name__} is read only once",
                    fix="Give a list, a DataLoader or mr.chunks(...), or call it under torch.no_grad()",
                )
            for values in progress(source, quiet, None):
                self.update(**self._named(values))
            return self.result()
        first = next(reader, None)
        if first is None:
            raise StreamError(detail="the source is empty", fix="Give at least one chunk, if only with no columns")
        named = self._named(first)
        prepared = self._prepare(named)
        columns_ask = any(isinstance(v, Tensor) and v.requires_grad for v in named.values())
        begun = [_chain([first], reader)]  # the first reading goes on where the look at the first chunk ended
        count = len(source) if isinstance(source, Sized) else None
        asked = torch.is_grad_enabled() and (self._rows_ask() or gradients is not None or columns_ask)
        readings = Readings(_source_name(source), asked or _reads_again(prepared.walk), verify)
        at_once = gradients is not None or columns_ask  # a chunk's gradient is not given to another chunk
        del first, named, reader

        def read() -> Iterator[Chunk]:
            return readings.watch(chunks(), at_once)

        def chunks() -> Iterator[Chunk]:
            at = self._next
            for values in progress(begun.pop() if begun else source, quiet, count):
                chunk = self._chunk(prepared, self._named(values), at)
                at += chunk[1]
                del values  # while the next one comes, nobody holds this one
                yield chunk
                del chunk

        return prepared.form(*chunked_passes.run_over_source(prepared.walk, read, gradients, columns_ask))

    # Stop and resume

    def state_dict(self) -> dict[str, Any]:
        """All that must be kept to go on later, or elsewhere: plain tensors and numbers.

        The rows are not kept, but a checksum of each: a state is resumed with the rows that it was made with.
        """
        return {
            "program": self._prepared.name if self._prepared is not None else "",
            "start": self.start,
            "stop": self.stop,
            "ranges": [list(r) for r in self._ranges],
            "rows": row_checksums(self._rows),
            "columns": None if self._empty is None else dict(self._empty),
            "states": None if self._states is None else [[t.clone() for t in s] for s in self._states],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Stream:
        """Go on from where ``state_dict`` was taken: to the bit as if nothing had happened.

        A state of another op, of other options or of other rows is a StreamError.
        """
        if self._states is not None:
            raise StreamError(detail="this stream has been fed already", fix="Load into a fresh op.stream(...)")
        missing = {"program", "start", "stop", "ranges", "rows", "columns", "states"} - set(state)
        if missing:
            raise StreamError(
                detail=f"the state lacks {', '.join(sorted(missing))}",
                fix="Give what state_dict() gave; a state of an older version holds too little, so fold anew",
            )
        _check_same_rows(state["rows"], self._rows, "the saved state and this stream")
        if state["states"] is not None:
            self._ready(state["columns"], str(state["program"]))
            self._states = [[t.clone() for t in s] for s in state["states"]]
        self._ranges = tuple((int(a), int(b)) for a, b in state["ranges"])
        self._next = int(state["stop"])
        return self

    # Chunks

    def _named(self, values: Any) -> dict[str, Any]:
        if isinstance(values, Tensor):
            values = (values,)
        needed = [n for n, p in self._columns.items() if not p.optional]
        if isinstance(values, Mapping):
            wrong = (set(values) - set(self._columns)) | (set(needed) - set(values))
        elif isinstance(values, tuple | list) and len(values) in (len(needed), len(self._columns)):
            names = needed if len(values) == len(needed) else list(self._columns)
            return dict(zip(names, values, strict=True))
        else:
            wrong = {"what was given"}
        if wrong:
            raise ArgumentError(
                detail=f"a chunk holds {', '.join(self._columns)}, but {', '.join(sorted(wrong))} does not fit",
                fix="Give a tensor for each column parameter, in order or by name; what is given per pair, too, comes "
                "with the chunk's columns",
            )
        return dict(values)

    def _ready(self, named: Mapping[str, Any], name: str = "") -> Prepared:
        """What is known of the op for chunks like this one, made by the first and then kept; with ``name``, it must be
        the program of that name."""
        _check_not_sharded()
        if self._prepared is None:
            prepared = self._prepare(named)
            p = _single_pass(prepared.walk)
            if prepared.walk.needs_count(p):
                raise StreamError(
                    detail="this op asks for the number of columns before they have all come",
                    fix="Use .over(source) with a source that can be read again",
                )
            _check_same_source(name or prepared.name, prepared.name)
            self._prepared = prepared
            self._empty = {n: self._without_columns(n, v) for n, v in named.items()}
        _check_same_source(name or self._prepared.name, self._prepared.name)
        return self._prepared

    def _without_columns(self, name: str, value: Any) -> Any:
        """A column argument of no columns, which says all that a program asks of one: type, features and batch."""
        if not isinstance(value, Tensor):
            return value
        tail = self._columns[name].tail
        return value.detach().narrow(value.dim() - len(tail) + tail.index("cols"), 0, 0).clone()

    def _rows_ask(self) -> bool:
        return any(isinstance(v, Tensor) and v.requires_grad for v in self._rows.values())

    def _chunk(self, prepared: Prepared, named: Mapping[str, Any], at: int) -> Chunk:
        """A chunk checked against the first one, its tensors given all batch dimensions; one like the last is right."""
        kind = {n: (v.dtype, v.shape, v.device) if isinstance(v, Tensor) else None for n, v in named.items()}
        if self._last is None or self._last[0] != kind or None in kind.values():
            again = self._prepare(named)
            _check_same_source(prepared.name, again.name)
            self._last = kind, again
        again = self._last[1]
        return at, again.walk.sizes.cols, again.inputs(named)


def _chain(first: list[Any], rest: Iterator[Any]) -> Iterator[Any]:
    """Yield the chunks already read, then the rest, without keeping references."""
    while first:
        yield first.pop()
    yield from rest


def _check_not_sharded() -> None:
    if agreement.current_layout() is not None:
        raise StreamError(
            detail="a stream was fed inside mr.shard", fix="Stream on each rank, and merge the streams' states"
        )


def _single_pass(walk: ChunkedProgram) -> Any:
    if len(walk.program.passes) != 1:
        raise StreamError(
            detail=f"this op passes {len(walk.program.passes)} times over its columns",
            fix="Use .over(source) with a source that can be read again",
        )
    return walk.program.passes[0]


def _check_same_source(name: str, other: str) -> None:
    if name != other:
        raise StreamError(
            detail="the columns, rows or options do not fit those folded so far",
            fix="Keep one op, one set of rows, and chunks of one type and one number of features",
        )


def _check_same_rows(sums: Mapping[str, int], rows: Mapping[str, Any], who: str) -> None:
    own = row_checksums(rows)
    different = sorted(n for n in set(sums) | set(own) if sums.get(n) != own.get(n))
    if different:
        raise StreamError(
            detail=f"{who} have other values of {', '.join(different)}, so their states do not belong together",
            fix="Give op.stream(...) the very rows and numbers that the state was made with",
        )


def _join_ranges(ranges: Ranges, more: Ranges) -> Ranges:
    """The union of two sets of column ranges; raises StreamError if they overlap."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(r for r in (*ranges, *more) if r[0] < r[1]):
        if found and start < found[-1][1]:
            raise StreamError(
                detail=f"columns {_format_ranges(ranges)} and {_format_ranges(more)} share numbers {start} to "
                f"{min(stop, found[-1][1])}: the same columns would be folded twice",
                fix="Fold every column once, and number the parts of a stream with .starting(at=...)",
            )
        if found and start == found[-1][1]:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def _format_ranges(ranges: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{start} to {stop}" for start, stop in ranges)


def _source_name(source: Any) -> str:
    return str(source) if isinstance(source, Chunks) else f"the source ({type(source).__name__})"


def _reads_again(walk: ChunkedProgram) -> bool:
    """Whether a source is read more than once even without gradients."""
    return len(walk.program.passes) > 1 or any(walk.needs_count(p) for p in walk.program.passes)
