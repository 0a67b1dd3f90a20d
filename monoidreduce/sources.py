"""Where streamed rows and columns come from: arrays, memory maps and files, cut into chunks that can be read again.

``files.py`` reads the files. On a GPU the next chunk is copied from pinned memory, on a stream of its own, while the
present one is folded; a thread of its own fills the pinned buffers, so that the copies never wait for what the caller
does between two chunks.
"""

from __future__ import annotations

import math
import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from .arrays import check_mapped, check_type, is_array, to_tensor
from .errors import ArgumentError, ShapeError
from .files import Names, Parts, is_file, open_arrays

SIZE = 65536  # columns a chunk: a few tiles, and little against any memory
BYTES = 2**27  # of a chunk for a GPU: what is done between two chunks (1.5 ms for a search) is hidden behind its copy


def chunks(
    *arrays: Any,
    size: int | None = None,
    device: Any = None,
    names: Iterable[Names] | Mapping[str, Names] | None = None,
    axes: Iterable[int] | None = None,
) -> Chunks:
    """Columns from tensors, numpy arrays, memory maps or files, ``size`` at a time, as often as they are asked for.

    Several arrays of one length give tuples, in their order. ``axes`` says which axis of each is the columns' (the
    first, unless told): -1 of what is given per pair, -2 of vectors behind batch dimensions. A file is ``.npy``,
    ``.safetensors`` or ``.parquet``; of the last two ``names`` picks the columns. A list of paths, or a pattern
    (``"y/*.npy"``, in the order of the names), is one array, its files laid end to end.

    A table with one column a feature: ``names={"y": ["f0", "f1", "f2"]}`` makes one array y [N, 3] of them. A mapping
    gives dicts by its keys, and a value that is one name picks that array.

    With a CUDA ``device`` chunks arrive there through pinned memory, the next one while the
    present one is used; what lies in pinned memory already is copied from there. Unless told, a chunk has 128 MiB of
    columns, on a CPU at most 65536.

    Raises ArgumentError, ShapeError, DTypeError or, for a file that is damaged, StreamError; also while reading, for
    one that is cut short or changed meanwhile.

    >>> import torch
    >>> [c[0].tolist() for c in chunks(torch.arange(5.0), size=2)]
    [[0.0, 1.0], [2.0, 3.0], [4.0]]
    >>> [tuple(b.shape) for _, b in chunks(torch.ones(5, 4), torch.ones(3, 5), size=4, axes=(0, -1))]
    [(3, 4), (3, 1)]
    """
    if size is not None and (not isinstance(size, int) or size < 1):
        raise ArgumentError(detail=f"chunks was given size = {size!r}", fix="Give a whole number of columns, 1 or more")
    opened: list[Any] = []
    known = tuple(names) if isinstance(names, Mapping) else None
    picked = list(names.values() if isinstance(names, Mapping) else names or ())
    for a in arrays:
        opened += open_arrays(to_tensor(a) if is_array(a) and not isinstance(a, numpy.ndarray) else a, picked)
    if known is not None and len(known) != len(opened):
        raise ArgumentError(
            detail=f"names has {', '.join(known)} for {len(opened)} arrays",
            fix="Name what is picked of one file, .safetensors or .parquet, or of files that are alike",
        )
    if not opened:
        raise ArgumentError(detail="chunks was given nothing to cut", fix="Give tensors, arrays or paths of files")
    cut = [AlongAxis(a, axis) for a, axis in zip(opened, _resolve_axes(opened, axes), strict=True)]
    if len({len(a) for a in cut}) > 1:
        raise ShapeError(
            detail=f"the arrays differ in length: {', '.join(str(len(a)) for a in cut)}",
            fix="Give equally many columns in each, and say with axes=... where they are not the first axis",
        )
    where = torch.device(device) if device is not None else None
    most = gpu_columns(cut)
    return Chunks(cut, size or (min(SIZE, most) if where is None or where.type != "cuda" else most), where, known)


def is_source_of_arrays(given: Any) -> bool:
    """Whether something is a whole array, or files of one, and not an iterable of chunks."""
    return isinstance(given, Tensor) or is_array(given) or is_file(given)


def gpu_columns(cut: list[AlongAxis]) -> int:
    """The number of columns in a chunk of ``BYTES``."""
    return max(1, BYTES // max(1, sum(a.bytes_each for a in cut)))


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


class AlongAxis:
    """An array, in memory or in a file, with the axis that is cut."""

    def __init__(self, array: Any, axis: int):
        self.array, self.axis = array, axis % len(array.shape)
        if isinstance(array, numpy.ndarray):
            check_type(array, str(getattr(array, "filename", None) or "an array"))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(n) for n in self.array.shape)

    @property
    def dtype(self) -> torch.dtype:
        array = self.array
        return to_tensor(numpy.empty(0, array.dtype)).dtype if isinstance(array, numpy.ndarray) else array.dtype

    @property
    def bytes_each(self) -> int:
        """Bytes of one row or column."""
        return self.dtype.itemsize * math.prod(n for k, n in enumerate(self.shape) if k != self.axis)

    @property
    def name(self) -> str:
        return str(getattr(self.array, "filename", None) or type(self.array).__name__)

    @property
    def paths(self) -> list[Path]:
        """The files that it is read from."""
        parts = self.array.parts if isinstance(self.array, Parts) else [self.array]
        return [Path(p.filename) for p in parts if getattr(p, "filename", None)]

    def __len__(self) -> int:
        return self.shape[self.axis]

    def __getitem__(self, which: slice) -> Any:
        if isinstance(self.array, numpy.memmap):
            check_mapped(self.array)
        stop = slice(which.start, min(which.stop, len(self)))
        return self.array[(*(slice(None),) * self.axis, stop)] if self.axis else self.array[stop]

    def read(self, start: int, stop: int) -> Tensor:
        """A part of it as a tensor."""
        return _to_tensor(self[start:stop])


class Chunks:
    """A source that can be read again; made by :func:`chunks`."""

    def __init__(
        self, arrays: list[AlongAxis], size: int, device: torch.device | None, names: tuple[str, ...] | None = None
    ):
        self.arrays, self.size, self.device, self.names = arrays, size, device, names

    def __len__(self) -> int:
        return max(1, -(-len(self.arrays[0]) // self.size))  # of no columns too there is a chunk

    def __repr__(self) -> str:
        what = ", ".join(a.name for a in self.arrays)
        return f"mr.chunks({what}, size={self.size})"

    def __iter__(self) -> Iterator[Any]:
        return self.read_from(0)

    def like(self, values: tuple[Tensor, ...]) -> Any:
        """Tensors as a chunk holds them: on its device, by name where it has names."""
        there = values if self.device is None else tuple(v.to(self.device) for v in values)
        return there if self.names is None else dict(zip(self.names, there, strict=True))

    @property
    def columns(self) -> int:
        """How many columns there are in all."""
        return len(self.arrays[0])

    def read_from(self, chunk: int) -> Iterator[Any]:
        """The chunks from the given one on: tuples of tensors, or dicts where the arrays have names."""
        if self.device is not None and self.device.type == "cuda":
            found = _prefetch(self._cut(chunk), self.device)
        else:
            found = (tuple(_to_tensor(a) for a in arrays) for arrays in self._cut(chunk))
        return found if self.names is None else (dict(zip(self.names, values, strict=True)) for values in found)

    def _cut(self, chunk: int) -> Iterator[tuple[Any, ...]]:
        for at in range(chunk * self.size, max(1, len(self.arrays[0])), self.size):
            yield tuple(a[at : at + self.size] for a in self.arrays)


def _to_tensor(a: Any) -> Tensor:
    """A chunk as a tensor; what lies in a mapped file is copied out of it, for the file may go."""
    return to_tensor(numpy.array(a) if isinstance(a, numpy.memmap) else a)


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
    t = to_tensor(a)
    if t.is_pinned():
        return t
    if k not in buffers or buffers[k].dtype != t.dtype or buffers[k].numel() < t.numel():
        buffers[k] = torch.empty(t.numel(), dtype=t.dtype, pin_memory=True, device="cpu")
    return buffers[k][: t.numel()].view(t.shape).copy_(t)


def progress(source: Iterable[Any], quiet: bool, total: int | None = None, what: str = "folding") -> Iterator[Any]:
    """Iterate over ``source``; at a terminal a line says how far it is, how fast it goes and how long it will take."""
    if total is None and hasattr(source, "__len__"):
        total = len(source)  # type: ignore[arg-type]
    meter = Meter(quiet, total, what)
    try:
        for item in source:
            yield item
            del item  # while the next one comes, nobody holds this one
            meter.add(1)
    finally:
        meter.close()


class Meter:
    """A line at the terminal about work under way: the share done, the rate, and the time left.

    ``total``: how much there is to do, if it is known; ``unit``: of what; ``done``: what was done in an earlier run."""

    def __init__(self, quiet: bool, total: int | None, what: str = "folding", unit: str = "", done: int = 0):
        self.shown = not quiet and sys.stderr.isatty()
        self.total, self.what, self.unit, self.done, self.first = total, what, unit, done, done
        self.start = self.last = time.monotonic()
        self.width = 0

    def add(self, count: int) -> None:
        """So much more is done."""
        self.done += count
        now = time.monotonic()
        if self.shown and (now - self.last > 0.2 or self.done == self.total):
            self.last = now
            self.write(self.text(now - self.start))

    def text(self, seconds: float) -> str:
        """The line, ``seconds`` after the start."""
        rate = (self.done - self.first) / max(seconds, 1e-9)
        parts = [self.what]
        if self.total:
            parts.append(f"{100 * self.done / self.total:.0f}%")
        parts.append(f"{format_count(self.done)}{f' of {format_count(self.total)}' if self.total else ''} {self.unit}")
        parts.append(f"{format_count(rate)}/s" if rate else "")
        if self.total and rate:
            parts.append(f"{format_time((self.total - self.done) / rate)} left")
        return "  ".join(p.strip() for p in parts if p.strip())

    def write(self, text: str) -> None:
        """Replace the line."""
        sys.stderr.write("\r" + text.ljust(self.width))
        sys.stderr.flush()
        self.width = len(text)

    def close(self) -> None:
        """Wipe the line."""
        if self.shown and self.width:
            self.write("")
            sys.stderr.write("\r")
            sys.stderr.flush()


def format_count(n: float) -> str:
    """A number as people say it: 950, 1.2k, 34M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.3g}{letter}"
    return f"{n:.3g}"


def format_time(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
