"""Columns that do not fit in memory, or are not there yet: a fold fed chunk by chunk, stopped, resumed and merged.

The rows and the state stay; a chunk of columns comes, is folded where it stands in the whole, and goes. Gradients need
a second look at every chunk, so they ask for a source that can be read again. A source is any iterable of chunks (a
tensor, or a tuple or dict of tensors); ``sources.py`` makes them of arrays and files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .engine import streaming
from .engine.combine import State
from .engine.evaluate import Sizes
from .engine.ranks import agree
from .engine.ranks.parts import results as closed
from .engine.streaming import Chunk, OnGradient, Walk
from .errors import ArgumentError, StreamError
from .sources import progress


@dataclass(frozen=True)
class Prepared:
    """What an op tells of a call: the walk over its passes, its program's name, how columns become inputs, and its
    results' form. It holds no column: a chunk is not to outlive its turn."""

    walk: Walk
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

    def __init__(self, prepare: Callable[[Mapping[str, Any]], Prepared], columns: Mapping[str, bool], asks: bool):
        self._prepare, self._columns, self._asks = prepare, columns, asks
        self._prepared: Prepared | None = None
        self._last: tuple[dict[str, Any], Prepared] | None = None  # of what kind the last chunk was
        self._states: list[State] | None = None
        self._resumed = ""
        self.start = self.stop = 0

    def starting(self, at: int) -> Stream:
        """The same, with its first column numbered ``at``: a part of a longer stream, to be merged."""
        if self._states is not None:
            raise StreamError(detail="columns have been folded already", fix="Number the first column before any")
        self.start = self.stop = at
        return self

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Fold one more chunk of columns, given in the order of the op's column parameters, or by name."""
        named = self._named(kwargs if kwargs and not args else args)
        with torch.no_grad():
            prepared = self._ready(named)
            chunk = self._chunk(prepared, named, self.stop)
            walk, p = prepared.walk, _only(prepared.walk)
            leaves = walk.leaves(p, walk.kept(p, {}, None), chunk, None)
            self._states = streaming.merged(p.fold, self._states, walk.fold(p.fold, leaves, chunk, None))
        self.stop += chunk[1]

    def merge(self, other: Stream) -> Stream:
        """Take in what another stream has folded of other columns."""
        if other._states is None or other._prepared is None:
            return self
        if self._states is None:
            self._prepared, self._states, self.start, self.stop = (
                other._prepared,
                other._states,
                other.start,
                other.stop,
            )
            return self
        prepared = other._prepared
        _same(self._prepared.name if self._prepared is not None else self._resumed, prepared.name)
        placed = prepared.walk.placed
        if placed and max(self.start, other.start) < min(self.stop, other.stop):
            raise StreamError(
                detail=f"columns {self.start} to {self.stop} and {other.start} to {other.stop} share numbers, which "
                "this op asks for",
                fix="Number the parts of a stream with .starting(at=...)",
            )
        first, second = (self, other) if self.start <= other.start else (other, self)
        assert second._states is not None
        self._states = streaming.merged(_only(prepared.walk).fold, first._states, second._states)
        seen = self.stop - self.start + other.stop - other.start
        self.start = min(self.start, other.start)
        self.stop = self.start + seen
        return self

    def result(self) -> Any:
        """What the op would have returned for all columns so far, without gradients."""
        if self._states is None or self._prepared is None:
            raise StreamError(detail="no columns have been folded", fix="Call update first, if only with no columns")
        walk = self._prepared.walk
        with torch.no_grad():
            found = closed(_only(walk).fold, self._states)
            return self._prepared.form(*walk.finish({0: found}, self.stop - self.start))

    def over(self, source: Iterable[Any], *, gradients: OnGradient | None = None, quiet: bool = False) -> Any:
        """Read a whole source of chunks; the result, differentiable for the rows where they ask for it.

        A gradient reads the source again: chunks that ask for one get theirs added to ``.grad``, and
        ``gradients(first column, {name: gradient})`` is called for each. A program of several passes reads it once for
        each, and what it calls with is then to be added up. At a terminal a bar shows how far it is, unless ``quiet``.
        """
        if self._states is not None:
            raise StreamError(detail="this stream has been fed already", fix="Give a source to a fresh op.stream(...)")
        _alone()
        reader = iter(source)
        if reader is source:
            if torch.is_grad_enabled() and (self._asks or gradients is not None):
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
        begun = [_resumed([first], reader)]  # the first reading goes on where the look at the first chunk ended
        count = len(source) if isinstance(source, Sized) else None
        del first, named, reader

        def read() -> Iterator[Chunk]:
            at = self.start
            for values in progress(begun.pop() if begun else source, quiet, count):
                chunk = self._chunk(prepared, self._named(values), at)
                at += chunk[1]
                del values  # while the next one comes, nobody holds this one
                yield chunk
                del chunk

        return prepared.form(*streaming.over(prepared.walk, read, gradients, columns_ask))

    # Stop and resume

    def state_dict(self) -> dict[str, Any]:
        """All that must be kept to go on later, or elsewhere: plain tensors and numbers."""
        name = self._prepared.name if self._prepared is not None else self._resumed
        states = None if self._states is None else [[t.clone() for t in s] for s in self._states]
        return {"program": name, "start": self.start, "stop": self.stop, "states": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> Stream:
        """Go on from where ``state_dict`` was taken: to the bit as if nothing had happened."""
        if self._states is not None:
            raise StreamError(detail="this stream has been fed already", fix="Load into a fresh op.stream(...)")
        missing = {"program", "start", "stop", "states"} - set(state)
        if missing:
            raise StreamError(detail=f"the state lacks {', '.join(sorted(missing))}", fix="Give what state_dict() gave")
        self._resumed, self.start, self.stop = str(state["program"]), int(state["start"]), int(state["stop"])
        self._states = None if state["states"] is None else [[t.clone() for t in s] for s in state["states"]]
        return self

    # Chunks

    def _named(self, values: Any) -> dict[str, Any]:
        if isinstance(values, Tensor):
            values = (values,)
        needed = [n for n, optional in self._columns.items() if not optional]
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

    def _ready(self, named: Mapping[str, Any]) -> Prepared:
        _alone()
        if self._prepared is None:
            prepared = self._prepare(named)
            p = _only(prepared.walk)
            if prepared.walk.needs_count(p):
                raise StreamError(
                    detail="this op asks for the number of columns before they have all come",
                    fix="Use .over(source) with a source that can be read again",
                )
            _same(self._resumed or prepared.name, prepared.name)
            self._prepared = prepared
        return self._prepared

    def _chunk(self, prepared: Prepared, named: Mapping[str, Any], at: int) -> Chunk:
        """A chunk checked against the first one, its tensors given all batch dimensions; one like the last is right."""
        kind = {n: (v.dtype, v.shape, v.device) if isinstance(v, Tensor) else None for n, v in named.items()}
        if self._last is None or self._last[0] != kind or None in kind.values():
            again = self._prepare(named)
            _same(prepared.name, again.name)
            self._last = kind, again
        again = self._last[1]
        return at, again.walk.sizes.cols, again.inputs(named)


def _resumed(first: list[Any], rest: Iterator[Any]) -> Iterator[Any]:
    """What was looked at, then the rest; holding none of it."""
    while first:
        yield first.pop()
    yield from rest


def _alone() -> None:
    if agree.current() is not None:
        raise StreamError(
            detail="a stream was fed inside mr.shard", fix="Stream on each rank, and merge the streams' states"
        )


def _only(walk: Walk) -> Any:
    if len(walk.program.passes) != 1:
        raise StreamError(
            detail=f"this op passes {len(walk.program.passes)} times over its columns",
            fix="Use .over(source) with a source that can be read again",
        )
    return walk.program.passes[0]


def _same(name: str, other: str) -> None:
    if name != other:
        raise StreamError(
            detail="the columns, rows or options do not fit those folded so far",
            fix="Keep one op, one set of rows, and chunks of one type and one number of features",
        )
