"""Rows and columns that do not fit in memory, or are not there yet: a fold fed in chunks, stopped, resumed, merged.

The rows and the state stay; a chunk of columns comes, is folded where it stands in the whole, and goes. Rows in a file
are read in blocks, each of which sees all columns (``block_runs.py``). A state knows
which columns it covers, as intervals of global column numbers, so that streams merge in any order and no column is
counted twice. Gradients need a second look at every chunk, so they ask for a source that can be read again. A source is
any iterable of chunks (a tensor, or a tuple or dict of tensors); ``sources.py`` makes them of arrays and files.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy
import torch
from torch import Tensor

from .arrays import Border, is_array, to_tensor
from .block_runs import (
    Argument,
    BlockRun,
    ChunkMaker,
    Columns,
    Prepare,
    Prepared,
    Rows,
    chain,
    check_same_program,
    columns_per_chunk,
    fits_in_memory,
)
from .engines import stream
from .engines.common.combine import State
from .engines.common.evaluate import Sizes
from .engines.common.subproblem import finish_states as closed
from .engines.ranks import agreement
from .engines.stream import Chunk, ChunkedProgram, OnGradient, Readings, row_checksums
from .errors import ArgumentError, ShapeError, StreamError, shown
from .files import is_file, open_arrays
from .saved_runs import SavedRun, check_apart, check_out, read_path
from .sources import SIZE, AlongAxis, Chunks, gpu_columns, is_source_of_arrays, progress
from .stored_vectors import WIDE, Scaled

Ranges = tuple[tuple[int, int], ...]  # disjoint intervals [start, stop) of column numbers, in order, none adjacent


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
        prepare: Prepare,
        columns: Mapping[str, Argument],
        rows: Mapping[str, Any],
        row_arguments: Mapping[str, Argument],
        memo: dict[str, int] | None = None,
    ):
        """``prepare``: makes ready for some rows and a chunk of columns; ``rows``: all that is no column;
        ``row_arguments``: which of these have one entry a row; ``memo``: numbers drawn while it runs."""
        self._border = Border()
        self._call, self._columns, self._row_arguments = prepare, columns, row_arguments
        self._rows, self._files = self._take_rows(rows)
        self._memo = {} if memo is None else memo
        self._prepared: Prepared | None = None
        self._maker = ChunkMaker(self._prepare)
        self._empty: dict[str, Any] | None = None  # a chunk of no columns, of the kind of those folded
        self._states: list[State] | None = None
        self._ranges: Ranges = ()
        self._next = 0  # the number of the next column
        self._placed = False  # whether starting() said so, and no column has come since

    def _take_rows(self, rows: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, AlongAxis]]:
        """The arguments in memory, and those that are too long for it."""
        memory, files = {}, {}
        for name, value in rows.items():
            if name in self._row_arguments and (is_file(value) or isinstance(value, Chunks)):
                files[name] = self._open_rows(name, value)
            else:
                memory[name] = value
        mapped = {n: v for n, v in memory.items() if n in self._row_arguments and isinstance(v, numpy.memmap)}
        found = {**files, **{n: self._open_rows(n, v) for n, v in mapped.items()}}
        self._opened = dict(files)
        self._mapped = [p for n in mapped for p in found[n].paths]
        self._border.of_numpy, self._border.of_others = bool(mapped), bool(files)
        memory = {n: self._border.take(v, n) for n, v in memory.items() if n not in mapped}
        if not fits_in_memory(found.values()):
            return memory, found
        memory |= {n: a.read(0, len(a)) for n, a in found.items()}
        return {n: memory[n] for n in rows}, {}

    def _open_rows(self, name: str, value: Any) -> AlongAxis:
        array = _open_array(name, value)
        rank = len(array.shape)
        axis = self._row_arguments[name].axis(rank) if rank else -1
        if not 0 <= axis < rank:
            raise _make_shape_error(name, array, self._row_arguments[name].axis(0), "row")
        return AlongAxis(array, axis)

    def _prepare(self, chunk: Mapping[str, Any]) -> Prepared:
        return self._call(self._rows, chunk, None)

    def _check_rows_in_memory(self, what: str) -> None:
        if self._files:
            raise StreamError(
                detail=f"{what} holds all rows, but those of {', '.join(self._files)} are read from a file in blocks",
                fix="Use over(...), or read the rows into an array first",
            )

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
        self._check_rows_in_memory("update")
        named = self._named(kwargs if kwargs and not args else args)
        with torch.no_grad():
            prepared = self._ready(named)
            chunk = self._maker.make(prepared, named, self._next)
            ranges = _join_ranges(self._ranges, ((chunk[0], chunk[0] + chunk[1]),))
            fold, states = self._fold(prepared, chunk)
            self._states = stream.merge_states(fold, self._states, states)
        self._ranges, self._next, self._placed = ranges, self._next + chunk[1], False

    def _fold(self, prepared: Prepared, chunk: Any) -> tuple[Any, list[State]]:
        """The fold of a chunk, and the states that it gives."""
        chunked, p = prepared.chunked, _check_single_pass(prepared.chunked)
        leaves = chunked.leaves(p, chunked.row_feeds(p, {}, None), chunk, None)
        return p.fold, chunked.fold(p.fold, leaves, chunk, None)

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
            fold = _check_single_pass(prepared.chunked).fold
            if self._states is None:
                self._states = list(other._states)
            else:
                first, second = (self, other) if self.start <= other.start else (other, self)
                self._states = stream.merge_states(fold, first._states, second._states or [])
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
        chunked = self._prepared.chunked
        with torch.no_grad():
            found = closed(_check_single_pass(chunked).fold, self._states)
            return self._give(self._prepared, *chunked.finish({0: found}, sum(b - a for a, b in self._ranges)))

    def _give(self, prepared: Prepared, outputs: list[Any], sizes: Sizes) -> Any:
        return self._border.give(prepared.pack(prepared.results(outputs, sizes), self._rows, sizes.cols))

    def over(
        self,
        *sources: Any,
        gradients: OnGradient | None = None,
        quiet: bool = False,
        verify: bool = True,
        out: Any = None,
        state: Any = None,
        every: float = 30.0,
    ) -> Any:
        """Read all columns; the result, differentiable for the rows where they ask for it.

        ``sources`` are the op's columns, in order: each a path, a list of paths (laid end to end), an array or a
        tensor; or one dict of them by name; or one iterable of chunks (``mr.chunks(...)``, a ``DataLoader``, a list, a
        generator). At a terminal a line says how far it is, unless ``quiet``.

        ``out="result.npy"`` writes the result to that file, when it is complete, and returns it as a memory map; of
        several results each has a file (``result.values.npy``). ``state="folder"`` keeps the state there, every so many
        seconds (``every``), and when the run is interrupted: the same call goes on from there, to the bit, and deletes
        the folder when it is done. Neither has gradients.

        A gradient reads the source again: chunks that ask for one get theirs added to ``.grad`` (slices of a weight, in
        the weight's), and ``gradients(first column, {name: gradient})`` is called for each. A program of several passes
        reads it once for each, and what it calls with is then to be added up.

        A later reading that differs from the first is a StreamError: the number of columns is always compared, and
        with ``verify`` a checksum of every chunk (where there can be a second reading; it costs two reads of the
        chunk's memory each time). Of a file, size and time of the last change are compared, always.
        """
        source, own = self._source(sources)
        if isinstance(source, Chunks):
            self._memo["columns"] = source.columns  # for checks that need it before any work
        if self._files or out is not None or state is not None:
            return self._run(source, own, gradients, quiet, out, state, every)
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
            if self._states is None:
                raise stream.source_is_empty()
            return self.result()
        first = next(reader, None)
        if first is None:
            raise stream.source_is_empty()
        named = self._named(first)
        prepared = self._prepare(named)
        if isinstance(source, Chunks):
            prepared.check(source.columns)
        columns_ask = any(isinstance(v, Tensor) and v.requires_grad for v in named.values())
        begun = [chain([first], reader)]  # the first reading goes on where the look at the first chunk ended
        count = len(source) if isinstance(source, Sized) else None
        asked = torch.is_grad_enabled() and (self._rows_ask() or gradients is not None or columns_ask)
        readings = Readings(_name_source(source), asked or _reads_again(prepared.chunked), verify)
        at_once = gradients is not None or columns_ask  # a chunk's gradient is not given to another chunk
        del first, named, reader

        def read() -> Iterator[Chunk]:
            return readings.watch(chunks(), at_once)

        def chunks() -> Iterator[Chunk]:
            at = self._next
            for values in progress(begun.pop() if begun else source, quiet, count):
                chunk = self._maker.make(prepared, self._named(values), at)
                at += chunk[1]
                del values  # while the next one comes, nobody holds this one
                yield chunk
                del chunk

        return self._give(prepared, *stream.run_over_source(prepared.chunked, read, gradients, columns_ask))

    def _run(self, source: Any, own: bool, gradients: Any, quiet: bool, out: Any, state: Any, every: float) -> Any:
        """A run in blocks of rows, or one that is kept on disk."""
        if self._states is not None or self._ranges:
            raise StreamError(detail="this stream has been fed already", fix="Give a source to a fresh op.stream(...)")
        if gradients is not None or (torch.is_grad_enabled() and self._rows_ask()):
            raise StreamError(
                detail="rows in a file, out= and state= have no gradients, but one is asked for",
                fix="Call it under torch.no_grad(), or give the rows in memory and neither out= nor state=",
            )
        _check_not_sharded()
        path = None if out is None else check_out(out)
        inputs = self._mapped + [p for a in self._opened.values() for p in a.paths]
        if isinstance(source, Chunks):
            inputs += [p for a in source.arrays for p in a.paths]
        check_apart(inputs, path, None if state is None else read_path("state", state))
        saved = None if state is None else SavedRun.open(state, every)
        files = {**self._opened, **self._files}  # those that would fit as well: a saved run keeps its blocks
        rows = Rows({n: v for n, v in self._rows.items() if n not in files}, files, self._row_arguments)
        columns = Columns(source, self._named, saved is not None)
        found = BlockRun(self._call, rows, columns, saved, quiet, self._memo, own).run(path)
        return found if path is not None else self._border.give(found)

    def _source(self, sources: Sequence[Any]) -> tuple[Any, bool]:
        """An iterable of chunks, and whether it was made here of arrays or files."""
        if not sources:
            raise ArgumentError(detail="over was given no columns", fix=f"Give {', '.join(self._columns)}")
        if any(isinstance(s, Scaled) for s in sources):
            return _cut_stored(sources), False
        if len(sources) == 1 and not isinstance(sources[0], Mapping) and not is_source_of_arrays(sources[0]):
            return _check_iterable(sources[0]), False
        if len(sources) == 1 and isinstance(sources[0], Mapping):
            given = dict(sources[0])
        else:
            values = tuple(sources) if len(sources) > 1 else self._split_file(sources[0])
            if isinstance(values, tuple) and self._names_in_order(len(values)) is None:
                count = f"{len(values)} source{'s' * (len(values) > 1)}"
                raise ArgumentError(
                    detail=f"over was given {count} for {_list_some(list(self._columns))}",
                    fix="Give one for each, in order or as a dict by name. Files of one array are a list, which lays "
                    'them end to end: over(["y0.npy", "y1.npy"])',
                )
            given = self._named(values, opened=True)
        arrays = {n: self._open_column(n, v) for n, v in given.items() if n in self._columns}
        self._named({n: None for n in given}, opened=True)
        if len({len(a) for a in arrays.values()}) > 1:
            said = ", ".join(f"{n} has {len(a)}" for n, a in arrays.items())
            raise ShapeError(detail=f"the columns differ in number: {said}", fix="Give equally many columns in each")
        device = next((v.device for v in self._rows.values() if isinstance(v, Tensor) and v.is_cuda), None)
        cut = list(arrays.values())
        size = columns_per_chunk(cut, SIZE if device is None else gpu_columns(cut))
        return Chunks(cut, size, device, tuple(arrays)), True

    def _split_file(self, given: Any) -> Any:
        """The arrays of a file that holds several, by the names of the columns or in their order."""
        found = open_arrays(given) if is_file(given) else [given]
        named = {a.name: a for a in found if getattr(a, "name", None) in self._columns}
        needed = [n for n, p in self._columns.items() if not p.optional]
        if set(needed) <= set(named):
            return named
        if is_file(given) and self._names_in_order(len(found)) is None:
            raise _make_table_error(found, needed)
        return tuple(found)

    def _open_column(self, name: str, value: Any) -> AlongAxis:
        array = _open_array(name, value)
        if is_array(array):
            self._border.of_numpy = self._border.of_numpy or isinstance(array, numpy.ndarray)
            self._border.of_others = self._border.of_others or not isinstance(array, numpy.ndarray)
            array = array if isinstance(array, numpy.ndarray) else to_tensor(array, name)
        elif isinstance(array, Tensor):
            self._border.of_others = True
        shape = getattr(array, "shape", None)
        rank = len(shape) if isinstance(shape, tuple) else 0  # what is no array may have a shape too
        axis = self._columns[name].axis(rank) if rank else -1
        if not 0 <= axis < rank:
            raise _make_shape_error(name, array, self._columns[name].axis(0), "column")
        return AlongAxis(array, axis)

    # Stop and resume

    def state_dict(self) -> dict[str, Any]:
        """All that must be kept to go on later, or elsewhere: plain tensors and numbers.

        The rows are not kept, but a checksum of each: a state is resumed with the rows that it was made with.
        """
        self._check_rows_in_memory("a state")
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
        self._check_rows_in_memory("a state")
        if not isinstance(state, Mapping):
            raise StreamError(detail=f"the state is {shown(state)}", fix="Give what state_dict() gave")
        missing = {n for n, kind in _STATE.items() if not isinstance(state.get(n, ...), kind)}
        if missing:
            raise StreamError(
                detail=f"the state lacks {', '.join(sorted(missing))}",
                fix="Give what state_dict() gave; a state of an older version holds too little, so fold anew",
            )
        _check_same_rows(state["rows"], self._rows, "the saved state and this stream")
        ranges, states = _read_ranges(state["ranges"]), state["states"]
        if (states is None) != (state["columns"] is None) or (states is None and ranges) or state["stop"] < 0:
            raise _make_damage_error("its columns, states and numbers do not belong together")
        if states is not None:
            with torch.no_grad():
                prepared = self._ready(state["columns"], str(state["program"]))
                _, nothing = self._fold(prepared, self._maker.make(prepared, self._empty or {}, 0))
            self._states = _read_states(states, nothing)
        self._ranges, self._next = ranges, int(state["stop"])
        return self

    # Chunks

    def _names_in_order(self, count: int) -> list[str] | None:
        """What so many columns without names are: those that are needed, or the first of all, with every needed one
        among them; None where that is not so."""
        needed = [n for n, p in self._columns.items() if not p.optional]
        if count == len(needed):
            return needed
        first = list(self._columns)[:count]
        return first if len(first) == count and set(needed) <= set(first) else None

    def _named(self, values: Any, opened: bool = False) -> dict[str, Any]:
        """A chunk by name, with tensors in place of arrays; ``opened``: of sources, which are taken as they are."""
        if isinstance(values, (Tensor, Scaled)) or is_array(values):
            values = (values,)
        if isinstance(values, Mapping):
            needed = [n for n, p in self._columns.items() if not p.optional]
            wrong = (set(values) - set(self._columns)) | (set(needed) - set(values))
        elif isinstance(values, (tuple, list)) and (names := self._names_in_order(len(values))) is not None:
            return self._tensors(dict(zip(names, values, strict=True)), opened)
        else:
            wrong = {f"{shown(values)}"}
        if wrong:
            raise ArgumentError(
                detail=f"a chunk holds {', '.join(self._columns)}, but {', '.join(sorted(wrong))} does not fit",
                fix="Give a tensor for each column parameter, in order or by name; what is given per pair, too, comes "
                "with the chunk's columns",
            )
        return self._tensors(dict(values), opened)

    def _tensors(self, values: dict[str, Any], opened: bool) -> dict[str, Any]:
        if opened or all(isinstance(v, Tensor) or v is None for v in values.values()):
            return values
        return {n: self._widen(n, v) if isinstance(v, Scaled) else self._border.take(v, n) for n, v in values.items()}

    def _widen(self, name: str, stored: Scaled) -> Tensor:
        """A chunk of stored columns as a plain tensor, in the type of the rows."""
        if stored.asks:
            raise ArgumentError(
                detail=f"{name} has a master that asks for a gradient, which a stream does not give",
                fix="Give all columns at once, or call it under torch.no_grad()",
            )
        rows = (v.dtype for v in self._rows.values() if isinstance(v, Tensor) and v.dim())
        return stored.dequantize(next((d for d in rows if d in WIDE), stored.wide))

    def _ready(self, named: Mapping[str, Any], name: str = "") -> Prepared:
        """What is known of the op for chunks like this one, made by the first and then kept; with ``name``, it must be
        the program of that name."""
        _check_not_sharded()
        if self._prepared is None:
            prepared = self._prepare(named)
            p = _check_single_pass(prepared.chunked)
            if prepared.chunked.needs_count(p):
                raise StreamError(
                    detail="this op asks for the number of columns before they have all come",
                    fix="Use .over(source) with a source that can be read again",
                )
            check_same_program(name or prepared.name, prepared.name)
            self._prepared = prepared
            self._empty = {n: self._without_columns(n, v) for n, v in named.items()}
        check_same_program(name or self._prepared.name, self._prepared.name)
        return self._prepared

    def _without_columns(self, name: str, value: Any) -> Any:
        """A column argument of no columns, which says all that a program asks of one: type, features and batch."""
        if not isinstance(value, Tensor):
            return value
        return value.detach().narrow(self._columns[name].axis(value.dim()), 0, 0).clone()

    def _rows_ask(self) -> bool:
        return any(isinstance(v, Tensor) and v.requires_grad for v in self._rows.values())


def _open_array(name: str, value: Any) -> Any:
    """The array of an argument: of a file or of chunks with several, the one with its name."""
    if isinstance(value, Chunks):
        found = [a.array for a in value.arrays]
    else:
        found = open_arrays(value) if is_file(value) or isinstance(value, numpy.memmap) else [value]
    if len(found) > 1:
        found = [a for a in found if getattr(a, "name", None) == name] or found
    if len(found) != 1:
        raise _make_table_error(found, [name])
    return found[0]


def _check_iterable(source: Any) -> Any:
    """A source that is to give chunks, or ArgumentError."""
    kind = type(source)
    if isinstance(source, (bytes, numpy.generic)) or not (hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")):
        raise ArgumentError(
            detail=f"over was given {shown(source)}",
            fix="Give a path, a list of paths, an array, a tensor, or an iterable of chunks; of a table, "
            "table.to_numpy()",
        )
    return source


def _cut_stored(sources: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Chunks of columns that are stored, and of tensors beside them."""
    wrong = next((s for s in sources if not isinstance(s, (Tensor, Scaled)) or len(s) != len(sources[0])), None)
    wrong = next((s for s in sources if isinstance(s, Scaled) and s.dim() != 2), wrong)
    if wrong is not None:
        raise ArgumentError(
            detail=f"over was given {shown(wrong)} among columns that are stored",
            fix="Give mr.scaled(...) of [N, f] and tensors of as many columns, or an iterable of chunks",
        )
    return [tuple(s[k : k + SIZE] for s in sources) for k in range(0, max(1, len(sources[0])), SIZE)]


def _make_shape_error(name: str, array: Any, axis: int, side: str) -> ShapeError:
    """The error of an array that has too few axes; ``axis``: the one that is cut, counted from behind."""
    axes = max(1, -axis)
    given = shown(array).removesuffix(f" ({type(array).__name__})" if hasattr(array, "filename") else "")
    what = {1: f"one number per {side}", 2: f"one vector per {side}"}.get(axes, f"several vectors per {side}")
    return ShapeError(detail=f"{name} was given {given}", fix=f"Give {what}: an array of {axes} or more dimensions")


def _make_table_error(found: Sequence[Any], needed: Sequence[str]) -> ArgumentError:
    """The error of a file whose arrays are not those that are needed."""
    file = next((str(a.filename) for a in found if getattr(a, "filename", None)), "what was given")
    there = [str(getattr(a, "name", None) or "an array") for a in found]
    fix = f"Say which is which: mr.chunks(path, names=dict({needed[0]}={there[0]!r}))"
    if any(len(a.shape) == 1 for a in found):
        fix += f"; of a table with a column for each feature, names=dict({needed[0]}=[{there[0]!r}, ...])"
    return ArgumentError(
        detail=f"{file} has {_list_some(there)}, but {', '.join(needed)} {'is' if len(needed) == 1 else 'are'} needed",
        fix=fix.replace("{", "{{").replace("}", "}}"),
    )


def _list_some(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 8 else [*names[:4], "...", *names[-2:]])


def _check_not_sharded() -> None:
    if agreement.current_layout() is not None:
        raise StreamError(
            detail="a stream was fed inside mr.shard", fix="Stream on each rank, and merge the streams' states"
        )


def _check_single_pass(chunked: ChunkedProgram) -> Any:
    if len(chunked.program.passes) != 1:
        raise StreamError(
            detail=f"this op passes {len(chunked.program.passes)} times over its columns",
            fix="Use .over(source) with a source that can be read again",
        )
    return chunked.program.passes[0]


_STATE: dict[str, Any] = {
    **{"program": str, "start": int, "stop": int, "rows": Mapping, "ranges": (tuple, list)},
    **{"columns": (Mapping, type(None)), "states": (tuple, list, type(None))},
}


def _make_damage_error(why: str) -> StreamError:
    return StreamError(detail=f"the state is damaged: {why}", fix="Give what state_dict() gave, or fold anew")


def _read_ranges(given: Sequence[Any]) -> Ranges:
    """The ranges of a saved state."""
    pairs = [tuple(r) for r in given if isinstance(r, (tuple, list)) and [type(n) for n in r] == [int, int]]
    if len(pairs) != len(given) or any(start > stop or start < 0 for start, stop in pairs):
        raise _make_damage_error(f"its ranges are {shown(given)}")
    return _join_ranges((), tuple((start, stop) for start, stop in pairs))


def _read_states(given: Sequence[Any], like: list[State]) -> list[State]:
    """Copies of saved states, where they have the form of ``like``."""
    forms = [[(m.shape, m.dtype) for m in own] for own in like]
    found = [
        [(t.shape, t.dtype) for t in s if isinstance(t, Tensor) and not t.is_meta] for s in map(_list_states, given)
    ]
    if forms != found:
        raise _make_damage_error("its tensors are not those of this op")
    return [
        [t.to(m.device, copy=True) for t, m in zip(s, own, strict=True)] for s, own in zip(given, like, strict=True)
    ]


def _list_states(state: Any) -> Sequence[Any]:
    return state if isinstance(state, (tuple, list)) else ()


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


def _name_source(source: Any) -> str:
    return str(source) if isinstance(source, Chunks) else f"the source ({type(source).__name__})"


def _reads_again(chunked: ChunkedProgram) -> bool:
    """Whether a source is read more than once even without gradients."""
    return len(chunked.program.passes) > 1 or any(chunked.needs_count(p) for p in chunked.program.passes)
