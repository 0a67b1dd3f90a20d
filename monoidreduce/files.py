"""Files of arrays, read a slice at a time: ``.npy``, ``.safetensors``, ``.parquet``, and several files as one array.

A reader knows its ``shape`` and ``dtype`` before anything is read, and its ``filename`` for messages. A slice is read
from the file itself, not through a memory map: a file that is cut short is then an error and not a crash, and what was
read does not stay in the process's memory. A file that is changed between two slices is an error too. Optional packages
(safetensors, pyarrow) are imported when a file needs them.
"""

from __future__ import annotations

import bisect
import contextlib
import glob
import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from .arrays import check_mapped, check_type, to_tensor
from .errors import ArgumentError, DTypeError, MonoidReduceError, ShapeError, StreamError, shown

Names = str | Sequence[str]  # an array of a file by its name; of a table, also several columns that are its features
_DECODED = 2**20  # bytes of a Parquet column that are decoded at a time; decoding lists takes several times as many
_SAMPLE = 2**16  # bytes at the beginning and at the end of a file that its fingerprint is made of


def is_path(given: Any) -> bool:
    """Whether something names a file."""
    return isinstance(given, (str, os.PathLike))


def is_file_list(given: Any) -> bool:
    """Whether something is a list of files, which together are one array."""
    return isinstance(given, (list, tuple)) and bool(given) and all(map(is_path, given))


def is_file(given: Any) -> bool:
    """Whether something names a file, or several that are one array."""
    return is_path(given) or is_file_list(given)


def open_arrays(given: Any, names: Sequence[Names] = ()) -> list[Any]:
    """The arrays of a file, of each file of a list or a pattern laid end to end, or the array itself.

    ``names`` picks those of a ``.safetensors`` or ``.parquet`` file; an entry that is a list of columns of numbers is
    one array, with these as features."""
    if isinstance(given, (Tensor, numpy.ndarray, _File, Parts)):
        return [given]
    if is_file_list(given):
        parts = [open_arrays(path, names) for path in given]
        if len({len(p) for p in parts}) > 1:
            counts = ", ".join(f"{Path(g).name} {len(p)}" for g, p in zip(given, parts, strict=True))
            raise ArgumentError(detail=f"the files hold different numbers of arrays: {counts}", fix="Pick with names=")
        return [Parts(same) if len(same) > 1 else same[0] for same in zip(*parts, strict=True)]
    if not is_path(given):
        raise ArgumentError(
            detail=f"chunks was given {shown(given)}", fix="Give a tensor, an array, a path or a list of paths"
        )
    matched = find_files(given)
    if len(matched) != 1 or matched[0] != str(given):
        return open_arrays(matched, names)
    path = Path(given)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        fix = "Give its files, as a list or a pattern" if path.is_dir() else "Read it to an array first"
        raise ArgumentError(detail=f"{path} is no file of {', '.join(_READERS)}", fix=fix)
    if not path.exists():
        raise ArgumentError(detail=f"there is no file {path}", fix="Give the path of one")
    if path.is_dir():
        raise ArgumentError(detail=f"{path} is a folder", fix="Give the path of a file")
    with report_read_errors(path):
        return reader(path, list(names))


def find_files(given: Any, what: str = "") -> list[str]:
    """The files that a path or a pattern (``"x/*.npy"``, ``"~/x.npy"``) names, in the order of their names; ``what``:
    whose they are."""
    text = os.path.expanduser(str(given))
    if not glob.has_magic(text) or os.path.exists(text):
        return [text]
    found = sorted(glob.glob(text))
    if not found:
        raise ArgumentError(
            detail=f"{f'{what}: ' if what else ''}no file fits {text}", fix="Give a pattern of files that are there"
        )
    return found


@contextlib.contextmanager
def report_read_errors(path: Path) -> Iterator[None]:
    """Turn read errors of numpy, safetensors and pyarrow into a StreamError that names the file."""
    try:
        yield
    except (MonoidReduceError, MemoryError):
        raise
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise StreamError(
            detail=f"{path} cannot be read as {path.suffix}: {said}",
            fix="The file is damaged, cut short or of another kind: write it again, or check who may read it",
        ) from error


class _File:
    """A file as it was when it was opened."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __init__(self, path: Path):
        self.filename = path
        self._seen = self._look()

    def __repr__(self) -> str:
        return f"{self.filename}, {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def _look(self) -> tuple[int, int]:
        found = os.stat(self.filename)
        return found.st_size, found.st_mtime_ns

    def check_unchanged(self) -> None:
        """Raise StreamError if the file is no longer what was opened."""
        try:
            now = self._look()
        except OSError as error:
            raise StreamError(
                detail=f"{self.filename} cannot be read any more: {error.strerror}", fix="Put it back, and start again"
            ) from error
        if now != self._seen:
            what = "cut short" if now[0] < self._seen[0] else "changed"
            raise StreamError(
                detail=f"{self.filename} has been {what} while it was read: it had {self._seen[0]} bytes, and has "
                f"{now[0]}",
                fix="Write it again, and let nobody change it meanwhile",
            )

    def fingerprint(self) -> str:
        """Size, time of the last change, and a hash of the file's beginning and end: what tells it from another."""
        self.check_unchanged()
        found = hashlib.sha256(repr(self._seen).encode())
        with report_read_errors(self.filename), open(self.filename, "rb") as file:
            found.update(file.read(_SAMPLE))
            file.seek(max(0, self._seen[0] - _SAMPLE))
            found.update(file.read(_SAMPLE))
        return found.hexdigest()


class NpyFile(_File):
    """An array in a ``.npy`` file."""

    def __init__(self, path: Path):
        super().__init__(path)
        with open(path, "rb") as file:
            version = numpy.lib.format.read_magic(file)
            read = {(1, 0): numpy.lib.format.read_array_header_1_0, (2, 0): numpy.lib.format.read_array_header_2_0}
            if version not in read:
                raise ValueError(f"version {version} of the format is not known")
            self.shape, self.by_columns, self.kind = read[version](file)
            self.offset = file.tell()
        if self.kind.hasobject:
            raise ValueError("it holds Python objects")
        check_type(numpy.empty(0, self.kind), str(path))
        self.dtype = to_tensor(numpy.empty(0, self.kind)).dtype
        self.by_columns = self.by_columns and len(self.shape) > 1
        needed = self.offset + math.prod(self.shape) * self.kind.itemsize
        if self._seen[0] < needed:
            raise ValueError(f"it has {self._seen[0]} bytes, but its header speaks of {needed}")

    def __getitem__(self, which: Any) -> numpy.ndarray:
        self.check_unchanged()
        with report_read_errors(self.filename):
            if isinstance(which, tuple) or self.by_columns:  # along another axis than the one that is contiguous
                mapped = numpy.load(self.filename, mmap_mode="r")
                check_mapped(mapped)
                return numpy.array(mapped[which])
            start, stop, _ = which.indices(self.shape[0])
            found = numpy.empty((max(0, stop - start), *self.shape[1:]), self.kind)
            with open(self.filename, "rb", buffering=0) as file:
                file.seek(self.offset + start * math.prod(self.shape[1:]) * self.kind.itemsize)
                room = memoryview(found.reshape(-1).view(numpy.uint8).data)
                while room:
                    count = file.readinto(room)
                    if not count:
                        raise ValueError("it ends before its array does")
                    room = room[count:]
        self.check_unchanged()
        return found


class Safetensor(_File):
    """One tensor of a ``.safetensors`` file."""

    def __init__(self, path: Path, name: str):
        super().__init__(path)
        self.name = name
        found = self._slice()
        self.shape, self.dtype = tuple(found.get_shape()), _SAFETENSOR_TYPES[found.get_dtype()]

    def _slice(self) -> Any:
        return _import_safetensors()(str(self.filename), framework="pt").get_slice(self.name)

    def fingerprint(self) -> str:
        return f"{super().fingerprint()} {self.name}"

    def __getitem__(self, which: Any) -> Tensor:
        with report_read_errors(self.filename):  # opened anew for each slice, and then checked by the package
            self.check_unchanged()
            return self._slice()[which]


_SAFETENSOR_TYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class ParquetColumn(_File):
    """One column of a ``.parquet`` file, of numbers or of lists of one length, or several columns of numbers as the
    features of one array. It is decoded a slice at a time, so a group of a million rows is not held; a slice that
    begins where the last one ended goes on from there."""

    def __init__(self, path: Path, name: Names):
        super().__init__(path)
        self.columns = [name] if isinstance(name, str) else list(name)
        self.name = name if isinstance(name, str) else ", ".join(name)
        self.joined = not isinstance(name, str)
        metadata = _import_parquet().ParquetFile(path).metadata
        counts = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
        self.starts = [sum(counts[:g]) for g in range(len(counts) + 1)]
        self.shape = (self.starts[-1],)
        self.dtype, self.at_once = torch.float32, 1
        self.at = -1  # the next row that is decoded
        self.rest: numpy.ndarray | None = None  # what has been decoded from there on
        self.batches: Iterator[Any] = iter(())
        first = self[0:1]  # to know the type and the lists' length
        self.shape, self.dtype = (self.starts[-1], *first.shape[1:]), to_tensor(first).dtype
        self.at_once = max(1, _DECODED // max(1, self.dtype.itemsize * math.prod(self.shape[1:])))
        self._close()

    def fingerprint(self) -> str:
        return f"{super().fingerprint()} {self.name}"

    def __getitem__(self, which: slice) -> Any:
        start, stop, _ = which.indices(self.shape[0])
        if start >= stop:
            return torch.empty((0, *self.shape[1:]), dtype=self.dtype, device="cpu")
        self.check_unchanged()
        try:
            with report_read_errors(self.filename):
                if self.at != start:
                    self._seek(start)
                parts = []
                while self.at < stop:
                    values = self._decode(next(self.batches)) if self.rest is None else self.rest
                    parts.append(values[: stop - self.at])
                    self.rest = values[len(parts[-1]) :] if len(parts[-1]) < len(values) else None
                    self.at += len(parts[-1])
        except BaseException:
            self._close()
            raise
        if stop == self.shape[0]:
            self._close()
        return numpy.concatenate(parts) if len(parts) > 1 else parts[0]

    def _seek(self, start: int) -> None:
        """Read from row ``start`` on."""
        group = bisect.bisect_right(self.starts, start) - 1
        opened = _import_parquet().ParquetFile(self.filename, buffer_size=_SAMPLE, pre_buffer=False)
        groups = range(group, len(self.starts) - 1)
        self.batches = opened.iter_batches(batch_size=self.at_once, row_groups=groups, columns=self.columns)
        self.at, self.rest = self.starts[group], None
        while self.at < start:
            batch = next(self.batches)
            ahead = min(start - self.at, len(batch))
            self.rest = self._decode(batch.slice(ahead)) if ahead < len(batch) else None
            self.at += ahead

    def _close(self) -> None:
        self.at, self.rest, self.batches = -1, None, iter(())

    def _decode(self, batch: Any) -> numpy.ndarray:
        found = [self._as_numbers(batch.column(n), n) for n in self.columns]
        values = self._join(found) if self.joined else found[0]
        check_type(values, f"{self.name} in {self.filename}")
        if self.shape[1:] != values.shape[1:] and self.shape[1:]:
            raise ShapeError(
                detail=f"{self.name} in {self.filename} holds lists of {self.shape[1:]} and of {values.shape[1:]}",
                fix="Write lists of one length",
            )
        return values

    def _join(self, columns: list[numpy.ndarray]) -> numpy.ndarray:
        """Columns of numbers as the features of one array, in the type that holds all of them."""
        for name, values in zip(self.columns, columns, strict=True):
            if values.ndim != 1 or values.dtype.kind not in "fiub":
                kind = "lists" if values.ndim > 1 else values.dtype.name
                raise ArgumentError(
                    detail=f"{name} in {self.filename} holds {kind}, and cannot be a feature beside others",
                    fix="Pick columns of numbers; a column of lists is an array of its own",
                )
        return numpy.stack(columns, -1)

    def _as_numbers(self, column: Any, name: str) -> numpy.ndarray:
        """A column as an array: lists of one length as rows of a matrix."""
        if column.null_count:
            raise ValueError(f"{name} has {column.null_count} missing values")
        if not hasattr(column, "flatten") or str(column.type).find("list") < 0:
            return column.to_numpy(zero_copy_only=False)
        lengths = numpy.unique(column.value_lengths().to_numpy(zero_copy_only=False))
        if len(lengths) > 1:
            raise ValueError(f"{name} has lists of {lengths[0]} to {lengths[-1]} numbers")
        inside = self._as_numbers(column.flatten(), name)
        return inside.reshape(len(column), int(lengths[0]) if len(lengths) else 0, *inside.shape[1:])


class Parts:
    """Several arrays of one type and one shape but for their lengths, laid end to end."""

    def __init__(self, parts: Sequence[Any]):
        flat: list[Any] = []
        for p in parts:
            flat += p.parts if isinstance(p, Parts) else [p]
        self.parts: list[Any] = flat
        parts, first = flat, flat[0]
        for p in parts:
            if p.dtype != first.dtype:
                raise DTypeError(
                    detail=f"{p.filename} holds {_name(p.dtype)}, but {first.filename} {_name(first.dtype)}",
                    fix="Write all files with one type",
                )
            if not p.shape or tuple(p.shape[1:]) != tuple(first.shape[1:]):
                raise ShapeError(
                    detail=f"{p.filename} has shape {list(p.shape)}, but {first.filename} {list(first.shape)}",
                    fix="Only the first axis may differ between files that are laid end to end",
                )
        self.starts = [0]
        for p in parts:
            self.starts.append(self.starts[-1] + int(p.shape[0]))
        self.shape, self.dtype = (self.starts[-1], *first.shape[1:]), first.dtype
        self.filename = f"{first.filename} … {parts[-1].filename}"

    def fingerprint(self) -> str:
        return " ".join(p.fingerprint() for p in self.parts)

    def __getitem__(self, which: slice) -> Tensor:
        start, stop, _ = which.indices(self.shape[0])
        cut = [
            to_tensor(p[max(0, start - at) : min(stop - at, int(p.shape[0]))], str(p.filename))
            for p, at in zip(self.parts, self.starts, strict=False)
            if at < stop and at + p.shape[0] > start
        ]
        return torch.cat(cut) if cut else torch.empty((0, *self.shape[1:]), dtype=self.dtype, device="cpu")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _open_npy(path: Path, names: list[Names]) -> list[Any]:
    return [NpyFile(path)]


def _import_safetensors() -> Any:
    try:
        from safetensors import safe_open
    except ImportError:
        raise StreamError(
            detail="safetensors is not installed, which reads .safetensors", fix="pip install monoidreduce[files]"
        ) from None
    return safe_open


def _open_safetensors(path: Path, names: list[Names]) -> list[Any]:
    there = list(_import_safetensors()(str(path), framework="pt").keys())
    found = _pick_names(names, there, path)
    several = next((n for n in found if not isinstance(n, str)), None)
    if several is not None:
        raise ArgumentError(
            detail=f"names picks {', '.join(several)} of {path.name} as one array",
            fix="Only columns of a .parquet file are features of one array; name one tensor for each",
        )
    return [Safetensor(path, n) for n in found if isinstance(n, str)]


def _import_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise StreamError(
            detail="pyarrow is not installed, which reads Parquet", fix="pip install monoidreduce[files]"
        ) from None
    return pyarrow.parquet


def _open_parquet(path: Path, names: list[Names]) -> list[Any]:
    schema = _import_parquet().ParquetFile(path).schema_arrow
    found = _pick_names(names, schema.names, path)
    if not names:  # texts and dates beside the numbers are no arrays
        found = [n for n in found if _holds_numbers(schema.field(n).type)] or found
    return [ParquetColumn(path, n) for n in found]


def _holds_numbers(kind: Any) -> bool:
    """Whether a column of Arrow's type is of numbers, or of lists of them."""
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    return any(word in str(kind) for word in ("int", "float", "double", "bool"))


def _pick_names(names: list[Names], there: list[str], path: Path) -> list[Names]:
    asked = [n for each in names for n in ([each] if isinstance(each, str) else each)]
    missing = [n for n in asked if n not in there]
    if missing:
        raise ArgumentError(
            detail=f"{path.name} has no {', '.join(missing)}", fix=f"It has {', '.join(there)}; pick with names=[...]"
        )
    return names or list(there)


_READERS = {".npy": _open_npy, ".safetensors": _open_safetensors, ".parquet": _open_parquet}
