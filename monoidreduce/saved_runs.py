"""A long stream on disk: its state between two chunks, finished blocks of rows, and results as ``.npy`` files.

A saved run is a private folder. Every file in it is written under another name, flushed and renamed, and begins with a
checksum of the rest, so that a killed process leaves the old file or the new one, and a damaged file is never taken for
a state. ``progress`` holds what the run is of (its fingerprint) and how far it is; ``rows-N`` the results of block N.
Results go to their final names in the same way: nothing partial ever stands there.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch
from torch import Tensor

from ._version import __version__
from .arrays import to_numpy
from .errors import ArgumentError, StreamError, shown
from .plan import disk

_MAGIC = b"monoidreduce run 1\n"
_COPIED_AT_ONCE = 2**24  # bytes of a result that are written at once


class SavedRun:
    """The folder of one run. ``temporary``: it is nobody's but this process's, and saves only what is finished."""

    def __init__(self, folder: Path, temporary: bool = False, every: float = 30.0):
        self.folder, self.temporary, self.every = folder, temporary, every
        self.last = time.monotonic()

    @staticmethod
    def open(given: Any, every: float) -> SavedRun:
        """The run of a folder, which is made if there is none; refuses what is not a run of this user's."""
        folder = read_path("state", given)
        if isinstance(every, bool) or not isinstance(every, (int, float)) or not every >= 0:
            raise ArgumentError(detail=f"every was given {every!r}", fix="Give the seconds between two saves, from 0")
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
            there = {p.name for p in folder.iterdir()}
        except OSError as error:
            raise StreamError(
                detail=f"the state cannot be kept in {folder}: {error.strerror}",
                fix="Give a folder that can be written, in one that exists",
            ) from error
        mine = not hasattr(os, "geteuid") or found.st_uid == os.geteuid()
        if not stat.S_ISDIR(found.st_mode) or not mine:
            raise StreamError(detail=f"{folder} is not a folder of this user", fix="Give state= another folder")
        if there and "progress" not in there and any(not n.startswith((disk.PREFIX, "rows-")) for n in there):
            raise StreamError(
                detail=f"{folder} holds other things than the state of a stream", fix="Give state= a folder of its own"
            )
        folder.chmod(0o700)
        return SavedRun(folder, every=every)

    def load(self) -> dict[str, Any] | None:
        """How far the run is; None if it has not begun."""
        path = self.folder / "progress"
        return _read(path) if path.exists() else None

    def check(self, saved: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> None:
        """Raise StreamError unless the saved run is of these rows, columns and options, on these versions."""
        different = find_differences(saved["fingerprint"], fingerprint)
        if different:
            raise StreamError(
                detail=f"{self.folder} holds the state of another run: {', '.join(different)}",
                fix="Give the rows, columns and options that it was begun with, or another state= to begin anew",
            )

    def save(self, progress: Mapping[str, Any]) -> None:
        """Write how far the run is."""
        _write(self.folder / "progress", progress)
        self.last = time.monotonic()

    def is_due(self) -> bool:
        """Whether it is time to save again."""
        return not self.temporary and time.monotonic() - self.last >= self.every

    def save_block(self, block: int, results: Sequence[Tensor]) -> None:
        """Write the results of a finished block of rows."""
        _write(self.folder / f"rows-{block:06d}", [t.contiguous() for t in results])

    def load_block(self, block: int) -> list[Tensor]:
        """The results of a finished block of rows."""
        return _read(self.folder / f"rows-{block:06d}")

    def remove(self) -> None:
        """Delete the folder: the run is over."""
        shutil.rmtree(self.folder, ignore_errors=True)


def find_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In what two runs differ, in words. A fingerprint has the values of options under ``"options"`` and checksums of
    rows under ``"rows"``, both by name, and all else under what it is called; the op itself is named where nothing else
    says why it differs."""
    old, new = before.get("options", {}), now["options"]
    said = [
        f"{n} was {old.get(n, 'not given')}, and is {new.get(n, 'not given')}"
        for n in dict.fromkeys((*old, *new))
        if old.get(n) != new.get(n)
    ]
    old, new = before.get("rows", {}), now["rows"]
    others = [f"the rows of {n}" for n in dict.fromkeys((*old, *new)) if old.get(n) != new.get(n)]
    others += [n for n in now if n not in ("options", "rows") and before.get(n) != now[n]]
    others = [n for n in others if n != THE_OP or (len(others) == 1 and not said)]
    return [*said, *(f"{n} changed since" for n in others)]


THE_OP = "the op, or the type or features of its arguments,"


def note_interrupt(error: KeyboardInterrupt, kept: str) -> None:
    """Say how to go on: the last line of the traceback, or, before Python 3.11, a line before it."""
    text = f"monoidreduce: interrupted; {kept}. The same call goes on from there."
    if sys.version_info >= (3, 11):
        error.add_note(text)
    else:
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def temporary_run(beside: Path) -> Iterator[SavedRun]:
    """A folder for the finished blocks of a run that is not to be resumed, beside its results."""
    try:
        folder = tempfile.mkdtemp(prefix=".rows-", dir=beside)
    except OSError as error:
        raise StreamError(
            detail=f"results cannot be written to {beside}: {error.strerror}", fix="Give a folder that can be written"
        ) from error
    run = SavedRun(Path(folder), temporary=True)
    try:
        yield run
    finally:
        run.remove()


def versions() -> str:
    """What decides bits besides the inputs: the versions, the number of threads, and the machine's kind."""
    return f"monoidreduce {__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads"


def _write(path: Path, value: Any) -> None:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    try:  # the view is let go, also where writing fails: a buffer that is still seen cannot be collected
        with buffer.getbuffer() as data, disk.open_new(path) as file:
            file.write(b"".join([_MAGIC, hashlib.sha256(data).digest(), data]))
    except OSError as error:
        raise StreamError(
            detail=f"{path} cannot be written: {error.strerror}",
            fix="Make room, or give another place; what was saved before is still there",
        ) from error


def _read(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            magic, digest = file.read(len(_MAGIC)), file.read(32)
            data = file.read()
        if magic != _MAGIC or hashlib.sha256(data).digest() != digest:
            raise ValueError("its checksum is wrong")
        return torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:
        raise StreamError(
            detail=f"{path} cannot be used as a saved state: {error}",
            fix=f"Delete the folder {path.parent} to begin anew",
        ) from error


# Results ----------------------------------------------------------------------------------------------------------


def read_path(name: str, given: Any) -> Path:
    """A path that was given as an argument."""
    if not isinstance(given, (str, os.PathLike)):
        raise ArgumentError(detail=f"{name} was given {shown(given)}", fix="Give a path")
    return Path(given).expanduser()


def check_out(out: Any) -> Path:
    """The path that results are to be written to; raises before any work if that cannot be."""
    path = read_path("out", out)
    if path.suffix != ".npy":
        raise ArgumentError(detail=f"out was given {str(out)!r}", fix='Give the path of a .npy file: out="result.npy"')
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK) or path.is_dir():
        raise ArgumentError(detail=f"out={str(out)!r} cannot be written", fix="Give a path in a folder that exists")
    return path


def check_apart(inputs: Iterable[Path], out: Path | None, state: Path | None) -> None:
    """Raise ArgumentError where a result would replace a file that is read, or a finished run delete one.

    Files are compared as files, so links are found too. Of several results each has a name of its own, which is known
    after the run alone: any ``result.NAME.npy`` counts as one."""
    read = [p for p in inputs if p.exists()]
    written: list[Path] = []
    if out is not None:
        several = out.parent.glob(f"{glob.escape(out.stem)}.*{glob.escape(out.suffix)}")
        written = [p for p in (out, *several) if p.exists() and p.name.count(".") <= out.name.count(".") + 1]
    for target in written:
        same = next((p for p in read if os.path.samefile(p, target)), None)
        if same is not None:
            which = "is" if target == out else f"may write {target.name}, which is"
            raise ArgumentError(
                detail=f"out={str(out)!r} {which} the file {same} that is read, and would replace it",
                fix="Give out= a name of its own",
            )
    if state is not None:
        kept = state.resolve()
        inside = next((p for p in (*read, *([out] if out is not None else [])) if kept in p.resolve().parents), None)
        if inside is not None:
            raise ArgumentError(
                detail=f"{inside} lies in state={str(state)!r}, which is deleted when the run is done",
                fix="Give state= a folder of its own",
            )


def join_blocks(blocks: Iterator[list[Tensor]], axes: Sequence[int], rows: int, folder: Path | None) -> list[Tensor]:
    """Results of blocks of rows, end to end: in memory, or mapped from files in ``folder``, which is to hold them."""
    if folder is None:
        return [torch.cat(same, axis) for same, axis in zip(zip(*blocks, strict=True), axes, strict=True)]
    made: list[Tensor] = []
    at = 0
    for results in blocks:
        if not made:
            made = [
                _map_result(folder / f"rows-all-{k}", t, axis, rows)
                for k, (t, axis) in enumerate(zip(results, axes, strict=True))
            ]
        count = results[0].shape[axes[0]]
        for whole, part, axis in zip(made, results, axes, strict=True):
            whole.narrow(axis, at, count).copy_(part)
        at += count
    return made


def _map_result(path: Path, like: Tensor, axis: int, rows: int) -> Tensor:
    shape = list(like.shape)
    shape[axis] = rows
    if 0 in shape:
        return like.new_empty(shape)
    return torch.from_file(str(path), shared=True, size=int(numpy.prod(shape)), dtype=like.dtype).view(shape)


def write_results(result: Any, out: Path) -> Any:
    """Write every tensor of a result to a ``.npy`` file, and map it: one to ``out``, of several each to ``out`` with
    its name in it (``result.values.npy``). All of them appear under their names, or none."""
    at = [out]
    try:
        with contextlib.ExitStack() as files:  # which get their names when it ends

            def write(value: Tensor, path: Path) -> Tensor:
                at.append(path)
                _write_array(value, files.enter_context(disk.open_new(path, shared=True)))
                return value

            written = _map_tensors(result, out, write)
    except OSError as error:
        raise StreamError(
            detail=f"{at[-1]} cannot be written: {error.strerror}", fix="Make room, or give out= another place"
        ) from error
    return _map_tensors(written, out, lambda _, path: numpy.load(path, mmap_mode="r"))


def _map_tensors(result: Any, out: Path, call: Callable[[Tensor, Path], Any]) -> Any:
    """A result in its form, with ``call(tensor, path)`` in place of every tensor."""
    if isinstance(result, Tensor):
        return call(result, out)
    if isinstance(result, Mapping):
        return {name: _map_tensors(value, _name_file(out, name), call) for name, value in result.items()}
    if isinstance(result, (tuple, list)):
        names = getattr(result, "_fields", range(len(result)))
        inside = [_map_tensors(value, _name_file(out, name), call) for name, value in zip(names, result, strict=True)]
        return type(result)(*inside) if hasattr(result, "_fields") else type(result)(inside)
    if hasattr(result, "asdict") and hasattr(type(result), "fields"):  # an element of a monoid
        return type(result)(**_map_tensors(result.asdict(), out, call))
    return result


def _name_file(out: Path, name: Any) -> Path:
    return out.with_name(f"{out.stem}.{name}{out.suffix}")


def _write_array(result: Tensor, file: BinaryIO) -> None:
    kind = to_numpy(result.new_empty(0)).dtype
    header = {"descr": numpy.lib.format.dtype_to_descr(kind), "fortran_order": False}
    numpy.lib.format.write_array_header_1_0(file, {**header, "shape": tuple(result.shape)})
    flat = result.detach().contiguous().view(-1)
    step = max(1, _COPIED_AT_ONCE // max(1, flat.element_size()))
    for at in range(0, flat.numel(), step):
        file.write(to_numpy(flat[at : at + step]).tobytes())
    file.flush()  # a disk that is full says so here
