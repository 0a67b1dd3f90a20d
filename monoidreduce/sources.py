"""Where streamed columns come from: arrays, memory maps and files, cut into chunks that can be read again.

The one place that knows optional packages: safetensors and Parquet (pyarrow) for files, rich for a progress bar. On a
GPU the next chunk is copied from pinned memory, on a stream of its own, while the present one is folded; a thread of
its own fills the pinned buffers, so that the copies never wait for what the caller does between two chunks.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import queue
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from .errors import ArgumentError, DTypeError, MonoidReduceError, ShapeError, StreamError

SIZE = 65536  # columns a chunk: a few tiles, and little against any memory
BYTES = 2**27  # of a chunk for a GPU: what is done between two chunks (1.5 ms for a search) is hidden behind its copy


def chunks(
    *arrays: Any,
    size: int | None = None,
    device: Any = None,
    names: Iterable[str] | None = None,
    axes: Iterable[int] | None = None,
) -> Chunks:
    """Columns from tensors, numpy arrays, memory maps or files, ``size`` at a time, as often as they are asked for.

    Several arrays of one length give tuples, in their order. ``axes`` says which axis of each is the columns' (the
    first, unless told): -1 of what is given per pair, -2 of vectors behind batch dimensions. A file is ``.npy`` (read
    as a memory map), ``.safetensors`` or ``.parquet``; of the last two ``names`` picks the columns. With a CUDA
    ``device`` chunks arrive there through pinned memory, the next one while the present one is used; what lies in
    pinned memory already is copied from there. Unless told, a chunk has 65536 columns, on a GPU 128 MiB of them.

    Raises ArgumentError, ShapeError, DTypeError or, for a file that is damaged, StreamError; also while reading, for
    one that is cut short or changed meanwhile.

    >>> import torch
    >>> [c[0].tolist() for c in chunks(torch.arange(5.0), size=2)]
    [[0.0, 1.0], [2.0, 3.0], [4.0]]
    >>> [tuple(b.shape) for _, b in chunks(torch.ones(5, 4), torch.ones(3, 5), size=4, axes=(0, -1))]
    [(3, 4), (3, 1)]
    """
    if size is not None and size < 1:
        raise ArgumentError(detail=f"chunks was given size = {size}", fix="Give at least one column at a time")
    opened: list[Any] = []
    for a in arrays:
        opened += _open_source(a, list(names or ()))
    if not opened:
        raise ArgumentError(detail="chunks was given nothing to cut", fix="Give tensors, arrays or paths of files")
    cut = [_AlongAxis(a, axis) for a, axis in zip(opened, _resolve_axes(opened, axes), strict=True)]
    if len({len(a) for a in cut}) > 1:
        raise ShapeError(
            detail=f"the arrays differ in length: {', '.join(str(len(a)) for a in cut)}",
            fix="Give equally many columns in each, and say with axes=... where they are not the first axis",
        )
    where = torch.device(device) if device is not None else None
    return Chunks(cut, size or (SIZE if where is None or where.type != "cuda" else _columns_per_chunk(cut)), where)


def _columns_per_chunk(cut: list[_AlongAxis]) -> int:
    """The number of columns in a chunk of ``BYTES``."""
    one = sum(_to_tensor(a[0:1]).nbytes for a in cut)
    return max(1, BYTES // max(1, one))


def _resolve_axes(opened: list[Any], asked: Iterable[int] | None) -> list[int]:
    axes = [0] * len(opened) if asked is None else list(asked)
    if len(axes) != len(opened) or any(
        not -len(a.shape) <= k < len(a.shape) for a, k in zip(opened, axes, strict=False)
    ):
        shapes = ", ".join(str(tuple(a.shape)) for a in opened)
        raise ArgumentError(
            detail=f"chunks was given axes {tuple(axes)} for arrays of {shapes}", fix="Give one axis for each array"
        )
    return axes


class _AlongAxis:
    """An array with the axis that is cut."""

    def __init__(self, array: Any, axis: int):
        self.array, self.axis = array, axis % len(array.shape)
        if isinstance(array, numpy.ndarray):
            _check_type(array)

    def __len__(self) -> int:
        return int(self.array.shape[self.axis])

    def __getitem__(self, which: slice) -> Any:
        if isinstance(self.array, numpy.memmap):
            _check_mapped(self.array)
        stop = slice(which.start, min(which.stop, len(self)))
        return self.array[(*(slice(None),) * self.axis, stop)] if self.axis else self.array[stop]


class Chunks:
    """A source that can be read again; made by :func:`chunks`."""

    def __init__(self, arrays: list[_AlongAxis], size: int, device: torch.device | None):
        self.arrays, self.size, self.device = arrays, size, device

    def __len__(self) -> int:
        return -(-len(self.arrays[0]) // self.size)

    def __repr__(self) -> str:
        what = ", ".join(str(getattr(a.array, "filename", None) or type(a.array).__name__) for a in self.arrays)
        return f"mr.chunks({what}, size={self.size})"

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        if self.device is not None and self.device.type == "cuda":
            return _prefetch(self._cut(), self.device)
        return (tuple(_to_tensor(a) for a in arrays) for arrays in self._cut())

    def _cut(self) -> Iterator[tuple[Any, ...]]:
        for at in range(0, len(self.arrays[0]), self.size):
            yield tuple(a[at : at + self.size] for a in self.arrays)


def _open_source(given: Any, names: list[str]) -> list[Any]:
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
    if path.is_dir():
        raise ArgumentError(detail=f"{path} is a folder", fix="Give the path of a file")
    with _report_read_errors(path):
        return reader(path, names)


@contextlib.contextmanager
def _report_read_errors(path: Path) -> Iterator[None]:
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


def _check_type(array: numpy.ndarray) -> None:
    try:
        torch.from_numpy(numpy.empty(0, array.dtype))
    except (TypeError, ValueError):  # texts, objects, another byte order
        where = getattr(array, "filename", None)
        raise DTypeError(
            detail=f"{where or 'an array'} holds {array.dtype.name} ({array.dtype.str}), which torch has no type for",
            fix="Convert it to a type of torch first, in the machine's own byte order",
        ) from None


def _check_mapped(array: numpy.memmap) -> None:
    """Raise StreamError if a memory-mapped file was truncated: reading past its end would kill the process (SIGBUS)."""
    mapped = getattr(array, "_mmap", None)
    if mapped is None:
        return
    needed = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY + len(mapped)
    if mapped.size() < needed:
        raise StreamError(
            detail=f"{array.filename} has been cut short while it was read: it has {mapped.size()} bytes, "
            f"and had at least {needed}",
            fix="Write it again, and let nobody change it meanwhile",
        )


def _open_npy(path: Path, names: list[str]) -> list[Any]:
    return [numpy.load(path, mmap_mode="r")]


class _Safetensor:
    """One tensor of a file, read a slice at a time."""

    def __init__(self, path: Path, name: str):
        self.path, self.name = path, name
        self.shape = tuple(self._slice().get_shape())

    @property
    def filename(self) -> Path:
        return self.path

    def _slice(self) -> Any:
        return _import_safetensors()(str(self.path), framework="pt").get_slice(self.name)

    def __getitem__(self, which: Any) -> Tensor:
        with _report_read_errors(self.path):  # opened anew for each chunk: it may have changed
            found = self._slice()
            if tuple(found.get_shape()) != self.shape:
                raise StreamError(
                    detail=f"{self.name} in {self.path} had the shape {self.shape}, and has {found.get_shape()} now",
                    fix="Let nobody change the file while it is read",
                )
            return found[which]


def _import_safetensors() -> Any:
    try:
        from safetensors import safe_open
    except ImportError:
        raise StreamError(detail="safetensors is not installed", fix="pip install safetensors") from None
    return safe_open


def _open_safetensors(path: Path, names: list[str]) -> list[Any]:
    there = list(_import_safetensors()(str(path), framework="pt").keys())
    return [_Safetensor(path, n) for n in _pick_names(names, there, path)]


class _ParquetColumn:
    """One column of a file; the group of rows that was read last is kept, for the next chunk."""

    def __init__(self, path: Path, name: str):
        self.file, self.filename, self.name = _import_parquet().ParquetFile(path), path, name
        counts = [self.file.metadata.row_group(g).num_rows for g in range(self.file.num_row_groups)]
        self.starts = [sum(counts[:g]) for g in range(len(counts) + 1)]
        self.kept: tuple[int, Any] = (-1, None)
        self.shape = (self.starts[-1],)  # the axis that can be cut

    def __getitem__(self, which: slice) -> Any:
        start, stop = which.start, which.stop
        groups = [g for g in range(len(self.starts) - 1) if self.starts[g] < stop and self.starts[g + 1] > start]
        cut = [self._group(g)[max(0, start - self.starts[g]) : stop - self.starts[g]] for g in groups]
        return numpy.concatenate(cut) if cut else self._group(0)[:0]

    def _group(self, g: int) -> Any:
        if self.kept[0] != g:
            with _report_read_errors(self.filename):
                column = self.file.read_row_group(g, columns=[self.name]).column(0).combine_chunks()
                values = column.to_numpy(zero_copy_only=False)
                values = numpy.stack(list(values)) if values.dtype == object else values
            _check_type(values)
            self.kept = g, values
        return self.kept[1]


def _import_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise StreamError(detail="pyarrow is not installed, which reads Parquet", fix="pip install pyarrow") from None
    return pyarrow.parquet


def _open_parquet(path: Path, names: list[str]) -> list[Any]:
    there = _import_parquet().ParquetFile(path).schema_arrow.names
    return [_ParquetColumn(path, n) for n in _pick_names(names, there, path)]


def _pick_names(names: list[str], there: list[str], path: Path) -> list[str]:
    missing = [n for n in names if n not in there]
    if missing:
        raise ArgumentError(
            detail=f"{path.name} has no {', '.join(missing)}", fix=f"It has {', '.join(there)}; pick with names=[...]"
        )
    return names or there


_READERS = {".npy": _open_npy, ".safetensors": _open_safetensors, ".parquet": _open_parquet}


def _to_tensor(a: Any) -> Tensor:
    return a if isinstance(a, Tensor) else torch.from_numpy(numpy.array(a))


# On a GPU -----------------------------------------------------------------------------------------------------


def _prefetch(source: Iterator[tuple[Any, ...]], device: torch.device) -> Iterator[tuple[Tensor, ...]]:
    """Copy chunks to a GPU in a thread, one ahead of the one in use: double buffering, so at most two are held."""
    free: queue.Queue = queue.Queue()  # a place on the device each: the event after which it is free; None: stop
    ready: queue.Queue = queue.Queue()  # chunks with the event of their copy; an error; None at the end
    for _ in range(2):
        free.put(torch.cuda.Event())
    thread = threading.Thread(target=_copy_ahead, args=(source, device, free, ready), daemon=True)
    thread.start()
    try:
        while (found := ready.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            chunk, copied = found
            present = torch.cuda.current_stream(device)
            present.wait_event(copied)
            for t in chunk:
                t.record_stream(present)  # its memory is not given away before the work on it is over
            del found, t
            yield chunk
            del chunk
            used = torch.cuda.Event()
            used.record(torch.cuda.current_stream(device))
            free.put(used)
    finally:
        free.put(None)
        thread.join()


@torch.no_grad()
def _copy_ahead(source: Iterator[tuple[Any, ...]], device: torch.device, free: Any, ready: Any) -> None:
    """Fill two pinned buffers alternately, each while the other is copied on a separate stream."""
    copying = torch.cuda.Stream(device)
    buffers: list[dict[int, Tensor]] = [{}, {}]
    copied = [torch.cuda.Event(), torch.cuda.Event()]
    try:
        for n, chunk in enumerate(source):
            slot = n % 2
            copied[slot].synchronize()  # the copy that last read this buffer is over
            pinned = [_copy_to_pinned(a, buffers[slot], k) for k, a in enumerate(chunk)]
            place = free.get()
            if place is None:
                return
            place.synchronize()
            copied[slot] = torch.cuda.Event()
            with torch.cuda.stream(copying):
                there = tuple(t.to(device, non_blocking=True) for t in pinned)
                copied[slot].record(copying)
            ready.put((there, copied[slot]))
            del there
        ready.put(None)
    except BaseException as error:  # raised by whoever asks for the chunk
        ready.put(error)


def _copy_to_pinned(a: Any, buffers: dict[int, Tensor], k: int) -> Tensor:
    """An array in pinned memory: itself if it is pinned, else copied to buffer ``k`` by all of torch's threads."""
    t = a if isinstance(a, Tensor) else _view_as_tensor(a)
    if t.is_pinned():
        return t
    if k not in buffers or buffers[k].dtype != t.dtype or buffers[k].numel() < t.numel():
        buffers[k] = torch.empty(t.numel(), dtype=t.dtype, pin_memory=True)
    return buffers[k][: t.numel()].view(t.shape).copy_(t)


def _view_as_tensor(a: numpy.ndarray) -> Tensor:
    """A tensor over the memory of a read-only array, without torch's warning; it must not be written to."""
    if a.flags.writeable or not a.flags.c_contiguous or not a.size:
        return torch.from_numpy(a if a.flags.writeable else numpy.array(a))
    memory = memoryview((ctypes.c_char * a.nbytes).from_address(a.ctypes.data)).cast("B")
    return torch.from_numpy(numpy.frombuffer(memory, a.dtype).reshape(a.shape))


def progress(source: Iterable[Any], quiet: bool, total: int | None = None, what: str = "folding") -> Iterator[Any]:
    """Iterate over ``source`` with a progress bar, if stderr is a terminal and rich is installed."""
    if quiet or not sys.stderr.isatty():
        return iter(source)
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return iter(source)
    if total is None and hasattr(source, "__len__"):
        total = len(source)  # type: ignore[arg-type]
    return iter(track(source, what, total=total, console=Console(stderr=True), transient=True))
