"""Where streamed columns come from: arrays, memory maps and files, cut into chunks that can be read again.

The one place that knows optional packages: safetensors and Parquet (pyarrow) for files, rich for a progress bar. On a
GPU the next chunk is copied from pinned memory, on a stream of its own, while the present one is folded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from .errors import ArgumentError, ShapeError, StreamError

SIZE = 65536  # columns a chunk: a few tiles, and little against any memory


def chunks(*arrays: Any, size: int = SIZE, device: Any = None, names: Iterable[str] | None = None) -> Chunks:
    """Columns from tensors, numpy arrays, memory maps or files, ``size`` at a time, as often as they are asked for.

    Several arrays of one length give tuples, in their order. A file is ``.npy`` (read as a memory map),
    ``.safetensors`` or ``.parquet``; of the last two ``names`` picks the columns. With a CUDA ``device`` chunks arrive
    there through pinned memory, the next one while the present one is used.

    Raises ArgumentError, ShapeError or StreamError for what cannot be read.

    >>> import torch
    >>> [c[0].tolist() for c in chunks(torch.arange(5.0), size=2)]
    [[0.0, 1.0], [2.0, 3.0], [4.0]]
    """
    if size < 1:
        raise ArgumentError(detail=f"chunks was given size = {size}", fix="Give at least one column at a time")
    opened: list[Any] = []
    for a in arrays:
        opened += _opened(a, list(names or ()))
    if not opened:
        raise ArgumentError(detail="chunks was given nothing to cut", fix="Give tensors, arrays or paths of files")
    if len({len(a) for a in opened}) > 1:
        raise ShapeError(
            detail=f"the arrays differ in length: {', '.join(str(len(a)) for a in opened)}",
            fix="Give equally many columns in each",
        )
    return Chunks(opened, size, torch.device(device) if device is not None else None)


class Chunks:
    """A source that can be read again; made by :func:`chunks`."""

    def __init__(self, arrays: list[Any], size: int, device: torch.device | None):
        self.arrays, self.size, self.device = arrays, size, device

    def __len__(self) -> int:
        return -(-len(self.arrays[0]) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        if self.device is not None and self.device.type == "cuda":
            return _prefetched(self._cut(), self.device)
        return self._cut()

    def _cut(self) -> Iterator[tuple[Tensor, ...]]:
        for at in range(0, len(self.arrays[0]), self.size):
            yield tuple(_tensor(a[at : at + self.size]) for a in self.arrays)


def _opened(given: Any, names: list[str]) -> list[Any]:
    if isinstance(given, Tensor | numpy.ndarray):
        return [given]
    if not isinstance(given, str | Path):
        raise ArgumentError(detail=f"chunks was given {type(given).__name__}", fix="Give a tensor, an array or a path")
    path = Path(given)
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise ArgumentError(detail=f"{path.name} is no file of {', '.join(_READERS)}", fix="Read it to an array first")
    if not path.exists():
        raise ArgumentError(detail=f"there is no file {path}", fix="Give the path of one")
    return reader(path, names)


def _npy(path: Path, names: list[str]) -> list[Any]:
    return [numpy.load(path, mmap_mode="r")]


class _Safetensor:
    """One tensor of a file, read a slice at a time."""

    def __init__(self, path: Path, name: str):
        self.path, self.name = path, name
        self.length = self._slice().get_shape()[0]

    def _slice(self) -> Any:
        return _safetensors()(str(self.path), framework="pt").get_slice(self.name)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, which: slice) -> Tensor:
        return self._slice()[which.start : min(which.stop, self.length)]


def _safetensors() -> Any:
    try:
        from safetensors import safe_open
    except ImportError:
        raise StreamError(detail="safetensors is not installed", fix="pip install safetensors") from None
    return safe_open


def _from_safetensors(path: Path, names: list[str]) -> list[Any]:
    there = list(_safetensors()(str(path), framework="pt").keys())
    return [_Safetensor(path, n) for n in _picked(names, there, path)]


class _ParquetColumn:
    """One column of a file; the group of rows that was read last is kept, for the next chunk."""

    def __init__(self, path: Path, name: str):
        self.file, self.name = _parquet().ParquetFile(path), name
        counts = [self.file.metadata.row_group(g).num_rows for g in range(self.file.num_row_groups)]
        self.starts = [sum(counts[:g]) for g in range(len(counts) + 1)]
        self.kept: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, which: slice) -> Any:
        stop = min(which.stop, len(self))
        groups = [g for g in range(len(self.starts) - 1) if self.starts[g] < stop and self.starts[g + 1] > which.start]
        cut = [self._group(g)[max(0, which.start - self.starts[g]) : stop - self.starts[g]] for g in groups]
        return numpy.concatenate(cut) if cut else self._group(0)[:0]

    def _group(self, g: int) -> Any:
        if self.kept[0] != g:
            column = self.file.read_row_group(g, columns=[self.name]).column(0).combine_chunks()
            values = column.to_numpy(zero_copy_only=False)
            self.kept = g, numpy.stack(list(values)) if values.dtype == object else values
        return self.kept[1]


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise StreamError(detail="pyarrow is not installed, which reads Parquet", fix="pip install pyarrow") from None
    return pyarrow.parquet


def _from_parquet(path: Path, names: list[str]) -> list[Any]:
    there = _parquet().ParquetFile(path).schema_arrow.names
    return [_ParquetColumn(path, n) for n in _picked(names, there, path)]


def _picked(names: list[str], there: list[str], path: Path) -> list[str]:
    missing = [n for n in names if n not in there]
    if missing:
        raise ArgumentError(
            detail=f"{path.name} has no {', '.join(missing)}", fix=f"It has {', '.join(there)}; pick with names=[...]"
        )
    return names or there


_READERS = {".npy": _npy, ".safetensors": _from_safetensors, ".parquet": _from_parquet}


def _tensor(a: Any) -> Tensor:
    return a if isinstance(a, Tensor) else torch.from_numpy(numpy.array(a))


def _prefetched(source: Iterator[tuple[Tensor, ...]], device: torch.device) -> Iterator[tuple[Tensor, ...]]:
    """The chunks on a GPU: two pinned buffers, filled in turn, and copies on a stream of their own."""
    copying = torch.cuda.Stream(device)
    pinned: list[list[Tensor]] = [[], []]
    copied = [torch.cuda.Event(), torch.cuda.Event()]
    ahead: tuple[tuple[Tensor, ...], int] | None = None
    for n, chunk in enumerate(source):
        side = n % 2
        copied[side].synchronize()  # the copy that last read this buffer is over
        rooms: list[Tensor | None] = [*pinned[side]] or [None] * len(chunk)
        pinned[side] = [_pinned(t, room) for t, room in zip(chunk, rooms, strict=True)]
        with torch.cuda.stream(copying):
            there = tuple(t.to(device, non_blocking=True) for t in pinned[side])
            copied[side].record(copying)
        if ahead is not None:
            yield _arrived(*ahead, copied)
        ahead = there, side
    if ahead is not None:
        yield _arrived(*ahead, copied)


def _pinned(t: Tensor, old: Tensor | None) -> Tensor:
    fits = old is not None and old.dtype == t.dtype and old.shape[1:] == t.shape[1:] and len(old) >= len(t)
    room = old if fits and old is not None else torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
    return room[: len(t)].copy_(t)


def _arrived(chunk: tuple[Tensor, ...], side: int, copied: list[Any]) -> tuple[Tensor, ...]:
    present = torch.cuda.current_stream(chunk[0].device)
    present.wait_event(copied[side])
    for t in chunk:
        t.record_stream(present)  # its memory is not given away before the work on it is over
    return chunk


def progress(source: Iterable[Any], quiet: bool, what: str = "folding") -> Iterator[Any]:
    """The same, with a bar for whoever sits at a terminal and has rich."""
    if quiet or not sys.stderr.isatty():
        return iter(source)
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return iter(source)
    total = len(source) if hasattr(source, "__len__") else None  # type: ignore[arg-type]
    return iter(track(source, what, total=total, console=Console(stderr=True), transient=True))
