"""Rows and columns as a job names them: files, lists of files, Ray datasets, arrays; opened by whoever reads them.

A :class:`Column` is one argument of an op, a concatenation of parts along its first axis. It travels to the workers as
paths and object references; a worker opens a file when it first reads of it. Files go through ``sources.py``, which
knows their formats. What a job was begun with is remembered (size and time of each file, a checksum of what lies in
memory): a file that has changed since is an error, not a wrong number.
"""

from __future__ import annotations

import functools
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from ...engines.stream import checksum
from ...errors import ArgumentError, DTypeError, ShapeError, StreamError, shown
from ...files import find_files
from ...sources import chunks

# The ``ray`` package, imported when it is first used; its absence is one error that names the extra.


class _Ray:
    """Stands for the module ``ray``."""

    def __getattr__(self, name: str) -> Any:
        try:
            import ray
        except ImportError:
            raise StreamError(detail="ray is not installed", fix="pip install 'monoidreduce[ray]'") from None
        return getattr(ray, name)


ray: Any = _Ray()


@dataclass(frozen=True)
class FilePart:
    """One array of a file."""

    path: str
    name: str | None  # of the array in the file; None: it has one
    count: int
    dtype: str
    tail: tuple[int, ...]
    size: int
    modified: int

    def read(self, start: int, stop: int) -> Tensor:
        if _stamp(self.path) != (self.size, self.modified):
            raise StreamError(
                detail=f"{self.path} has changed since the job began",
                fix="Put the file back, or begin anew in another folder; let nobody write to it meanwhile",
            )
        return _as_tensor(_open(self.path, self.name, self.size, self.modified)[start:stop])

    @property
    def identity(self) -> list[Any]:
        """What tells this part from another, as plain data."""
        return [
            os.path.abspath(self.path),
            self.name,
            self.count,
            self.dtype,
            list(self.tail),
            self.size,
            self.modified,
        ]


@dataclass(frozen=True)
class ObjectPart:
    """An array in Ray's object store: given as one, or a block of a dataset."""

    reference: Any
    name: str | None
    count: int
    dtype: str
    tail: tuple[int, ...]
    sum: int

    def read(self, start: int, stop: int) -> Tensor:
        return _as_tensor(_pick(ray.get(self.reference), self.name)[start:stop])

    @property
    def identity(self) -> list[Any]:
        return ["object", self.name, self.count, self.dtype, list(self.tail), self.sum]


@dataclass(frozen=True)
class Column:
    """One argument of an op: parts one after the other."""

    parts: tuple[FilePart | ObjectPart, ...]

    @functools.cached_property
    def starts(self) -> list[int]:
        return [0, *numpy.cumsum([p.count for p in self.parts]).tolist()]

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def dtype(self) -> torch.dtype:
        found = getattr(torch, self.parts[0].dtype)
        assert isinstance(found, torch.dtype)
        return found

    def read(self, start: int, stop: int) -> Tensor:
        """The rows from ``start`` to ``stop``."""
        found = []
        for k in range(max(0, bisect_right(self.starts, start) - 1), len(self.parts)):
            if self.starts[k] >= stop:
                break
            first, last = max(start, self.starts[k]), min(stop, self.starts[k + 1])
            if first < last:
                found.append(self.parts[k].read(first - self.starts[k], last - self.starts[k]))
        return torch.cat(found) if len(found) > 1 else found[0] if found else self.empty(0)

    def empty(self, count: int) -> Tensor:
        """So many rows without memory: every one is the same zero."""
        return torch.zeros((), dtype=self.dtype, device="cpu").expand(count, *self.parts[0].tail)


Table = dict[str, Column]  # the arguments of one side, by name


def are_files(given: Any) -> bool:
    """Whether a side names files alone, so that it can be looked at without a cluster."""
    if isinstance(given, Mapping):
        return all(map(are_files, given.values()))
    return given is None or isinstance(given, (str, Path, list, tuple, int, float))


def make_table(side: str, given: Any, names: Sequence[str], optional: Sequence[str] = ()) -> Table:
    """The arguments ``names`` of a side ("rows" or "cols"), from what ``run`` was given for it."""
    needed = [n for n in names if n not in optional]
    if isinstance(given, Mapping):
        unknown, missing = [str(n) for n in given if n not in names], [n for n in needed if n not in given]
        if unknown or missing:
            told = [f"{', '.join(unknown)} is unknown"] * bool(unknown) + [f"{', '.join(missing)} is missing"] * bool(
                missing
            )
            raise ArgumentError(
                detail=f"{side}: {' and '.join(told)}",
                fix=f"Give a source for each of {', '.join(names)}"
                + (f"; {', '.join(optional)} may be left out" if optional else ""),
            )
        table = {n: _make_column(side, given[n], n, alone=True) for n in names if n in given}
    else:
        alone = len(needed) == 1
        table = {n: _make_column(side, given, n, alone) for n in needed}
    lengths = {n: len(c) for n, c in table.items()}
    if len(set(lengths.values())) > 1:
        text = ", ".join(f"{n} has {count}" for n, count in lengths.items())
        raise ShapeError(detail=f"the {side} differ in length: {text}", fix=f"Give equally many {side} in each")
    return table


def _make_column(side: str, given: Any, name: str, alone: bool) -> Column:
    parts: list[FilePart | ObjectPart]
    if isinstance(given, (str, Path)):
        parts = [_file_part(p, name, alone) for p in find_files(given, side)]
    elif isinstance(given, (list, tuple)) and given and all(isinstance(p, (str, Path)) for p in given):
        parts = [_file_part(p, name, alone) for each in given for p in find_files(each, side)]
    elif isinstance(given, (Tensor, numpy.ndarray)):
        parts = [_object_part(ray.put(_as_numpy(given)), None)]
    elif hasattr(given, "to_numpy_refs"):
        parts = _dataset_parts(side, given, name, alone)
    else:
        raise ArgumentError(
            detail=f"{side} was given {shown(given)} for {name}",
            fix='Give a path, a pattern such as "x/*.npy", a list of paths, a Ray dataset, an array, or a mapping from '
            "the op's parameters to these",
        )
    first = parts[0]
    for p in parts:
        if (p.dtype, p.tail) != (first.dtype, first.tail):
            where = getattr(p, "path", "a later part")
            raise (DTypeError if p.dtype != first.dtype else ShapeError)(
                detail=f"{where} holds {p.dtype}{['...', *p.tail]} for {name}, but the first part holds "
                f"{first.dtype}{['...', *first.tail]}",
                fix="All parts of one argument have one type and one shape, except for their length",
            )
    return Column(tuple(parts))


def _stamp(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise StreamError(
            detail=f"{path} cannot be read: {error.strerror}",
            fix="Every worker must see the file under this path: keep it on a disk that all machines share",
        ) from None
    return found.st_size, found.st_mtime_ns


@functools.lru_cache(maxsize=64)
def _open(path: str, name: str | None, size: int, modified: int) -> Any:
    """An array of a file, to be sliced; ``size`` and ``modified`` make a changed file another one."""
    return chunks(path, names=None if name is None else [name]).arrays[0]


def _file_part(path: str | Path, name: str, alone: bool) -> FilePart:
    """The array ``name`` of a file; if it is the only argument (``alone``), the file's one array of whatever name."""
    opened = chunks(path) if str(path).endswith(".npy") else None
    picked: str | None = None
    if opened is None:
        try:
            opened, picked = chunks(path, names=[name]), name
        except ArgumentError:
            opened = chunks(path) if alone and os.path.isfile(path) else None
            if opened is None or len(opened.arrays) != 1:
                raise
    elif not alone:
        raise ArgumentError(
            detail=f"{path} holds one array, which {name} cannot be picked from",
            fix="Give a mapping from the op's parameters to their files",
        )
    size, modified = _stamp(str(path))
    array = opened.arrays[0]
    sample = _as_tensor(array[0:1] if len(array) else array[0:0])
    return FilePart(str(path), picked, len(array), str(sample.dtype)[6:], tuple(sample.shape[1:]), size, modified)


# What lies in Ray's object store

_SMALL = 64 * 2**20  # bytes that are looked at here, rather than by processes started for it


def _describe_object(value: Any, name: str | None) -> tuple[int, str, tuple[int, ...], int]:
    t = _as_tensor(_pick(value, name))
    return len(t), str(t.dtype)[6:], tuple(t.shape[1:]), int(checksum(t))


def _object_part(reference: Any, name: str | None) -> ObjectPart:
    return ObjectPart(reference, name, *_describe_object(ray.get(reference), name))


def _dataset_parts(side: str, dataset: Any, name: str, alone: bool) -> list[FilePart | ObjectPart]:
    """The blocks of a Ray dataset; of a large one, each is described where it lies."""
    names = list(dataset.schema().names)
    picked = name if name in names else names[0] if alone and len(names) == 1 else None
    if picked is None:
        raise ArgumentError(
            detail=f"the dataset given as {side} has no column {name}",
            fix=f"It has {', '.join(names)}: rename one, or map {name} to dataset.select_columns([...])",
        )
    references = dataset.to_numpy_refs(column=picked)
    if (dataset.size_bytes() or _SMALL) < _SMALL:
        told = [_describe_object(value, None) for value in ray.get(references)]
    else:
        told = ray.get([ray.remote(_describe_object).remote(r, None) for r in references])
    return [ObjectPart(r, None, *t) for r, t in zip(references, told, strict=True) if t[0]] or [
        ObjectPart(references[0], None, *told[0])
    ]


def _pick(value: Any, name: str | None) -> Any:
    found = value if name is None else value[name]
    if isinstance(found, numpy.ndarray) and found.dtype == object:  # lists of numbers
        found = numpy.stack([numpy.asarray(v) for v in found])
    return found


def _as_numpy(value: Tensor | numpy.ndarray) -> Any:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return value if value.dtype is torch.bfloat16 else value.numpy()
    return value


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if value.dtype.name not in _TYPES:
        raise DTypeError(
            detail=f"{shown(value)} has the type {value.dtype.name}, which torch has none for",
            fix="Convert it to a type of torch first",
        )
    return torch.from_numpy(numpy.array(value))


_TYPES = {"float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"}
