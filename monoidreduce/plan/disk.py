"""The one road to the disk: a private folder, files that are whole or not there, and nothing read that another wrote.

Kernels' texts and tuned plans take it. A file is written beside its place, flushed and renamed over it, so that whoever
is killed, whenever, leaves the old file or the new one. What is read must be a plain file of this user that nobody else
may write. Whatever the disk refuses, the work goes on without it; one warning per process says so. Needs no torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import tempfile
import threading
import time
import warnings
from pathlib import Path

from ..errors import CacheWarning

LARGEST = 2**24  # bytes of a file: ours are of kilobytes
_STALE = 3600.0  # seconds after which a temporary file's writer is taken for dead
_PREFIX = ".writing-"
_told = threading.Event()


def base() -> Path:
    """Where everything is kept: ``$MONOIDREDUCE_CACHE``, else ``monoidreduce`` in the user's cache folder."""
    asked = os.environ.get("MONOIDREDUCE_CACHE")
    if asked:
        return Path(asked)
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(home) / "monoidreduce" if home else Path(os.path.expanduser("~/.cache/monoidreduce"))


def folder(name: str) -> Path | None:
    """A private folder in it, made if need be; None where there can be none."""
    place = base() / name
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = place.lstat()
        if not stat.S_ISDIR(found.st_mode) or not _is_mine(found):
            complain(f"{place} is not a folder of this user")
            return None
        if stat.S_IMODE(found.st_mode) != 0o700:
            place.chmod(0o700)
    except (OSError, RuntimeError) as error:  # no home, a read-only one, a file in the way
        complain(f"{place}: {error}")
        return None
    _sweep(place)
    return place


@functools.cache
def temporary() -> Path:
    """A private folder for what must lie in a file, where the disk has no place for it."""
    return Path(tempfile.mkdtemp(prefix="monoidreduce-"))


def read(path: Path) -> bytes | None:
    """All of a file, if it is there and is ours."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return None
    except OSError as error:
        complain(f"{path}: {error}")
        return None
    try:
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or not _is_mine(found) or found.st_mode & 0o022:
                complain(f"{path} is not a plain file that this user alone can write")
            elif found.st_size > LARGEST:
                complain(f"{path} has {found.st_size:,} bytes")
            else:
                return file.read(LARGEST + 1)
    except OSError as error:
        complain(f"{path}: {error}")
    return None


def write(path: Path, data: bytes) -> bool:
    """Put a file in its place, whole; False, and nothing changed, where the disk refuses."""
    try:
        put(path, data)
    except OSError as error:
        complain(f"{path}: {error}")
        return False
    return True


def put(path: Path, data: bytes) -> None:
    """The same where the user asked for it: raises OSError."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=_PREFIX)  # of mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def files(place: Path, suffix: str) -> list[Path]:
    """The files of a folder with this ending, in order; temporary ones are not among them."""
    try:
        return sorted(p for p in place.iterdir() if p.suffix == suffix and not p.name.startswith(_PREFIX))
    except OSError:
        return []


def remove(path: Path) -> bool:
    """Whether a file was there and is gone."""
    try:
        path.unlink()
    except OSError:
        return False
    return True


def _is_mine(found: os.stat_result) -> bool:
    return not hasattr(os, "geteuid") or found.st_uid == os.geteuid()


@functools.cache
def _sweep(place: Path) -> None:
    """Remove, once a process, what writers left that were killed."""
    with contextlib.suppress(OSError):
        for path in place.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_mtime > _STALE:
                    path.unlink()


def complain(reason: str) -> None:
    """Say once that something on the disk is not used."""
    if not _told.is_set():
        _told.set()
        warnings.warn(CacheWarning(f"the cache is not used where it cannot be: {reason}"), stacklevel=3)
