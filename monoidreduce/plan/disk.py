"""Safe files on disk: kernel sources, plan records (``schedule.py``) and all else that is kept from process to process.

A file is written under a temporary name, flushed and renamed, so a killed process leaves the old file or the new one.
Only plain files of this user that nobody else may write are read. If the cache directory is not writable, caching is
skipped, with one warning per process. Needs no torch.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import CacheWarning

LARGEST = 2**24  # bytes; larger files are not read (ours are kilobytes)
_STALE = 3600.0  # seconds after which a temporary file is assumed abandoned
PREFIX = ".writing-"  # of files that are being written
_warned = threading.Event()


def cache_root() -> Path:
    """The cache folder: ``$MONOIDREDUCE_CACHE``, else ``monoidreduce`` in the user's cache folder."""
    own = os.environ.get("MONOIDREDUCE_CACHE")
    if own:
        return Path(own)
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(home) / "monoidreduce" if home else Path(os.path.expanduser("~/.cache/monoidreduce"))


def open_folder(name: str) -> Path | None:
    """A private folder inside the cache folder, created if needed; None, with a warning, if it cannot be used."""
    place = cache_root() / name
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = place.lstat()
        if not stat.S_ISDIR(found.st_mode) or not _is_mine(found):
            warn_once(f"{place} is not a folder of this user")
            return None
        if stat.S_IMODE(found.st_mode) != 0o700:
            place.chmod(0o700)
    except (OSError, RuntimeError) as error:  # no home folder, a read-only one, a file of that name
        warn_once(f"{place}: {error}")
        return None
    _remove_stale(place)
    return place


@functools.cache
def temporary_folder() -> Path:
    """A temporary private folder of this process, for files that must exist when the cache folder cannot be used."""
    return Path(tempfile.mkdtemp(prefix="monoidreduce-"))


def read(path: Path) -> bytes | None:
    """The contents of a file; None if it is missing or not safe to read."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return None
    except OSError as error:
        warn_once(f"{path}: {error}")
        return None
    try:
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or not _is_mine(found) or found.st_mode & 0o022:
                warn_once(f"{path} is not a plain file that this user alone can write")
            elif found.st_size > LARGEST:
                warn_once(f"{path} has {found.st_size:,} bytes")
            else:
                return file.read(LARGEST + 1)
    except OSError as error:
        warn_once(f"{path}: {error}")
    return None


def write(path: Path, data: bytes) -> bool:
    """Write a file atomically. False, with a warning and nothing changed, if the disk refuses."""
    try:
        with open_new(path) as file:
            file.write(data)
    except OSError as error:
        warn_once(f"{path}: {error}")
        return False
    return True


@contextlib.contextmanager
def open_new(path: Path, shared: bool = False) -> Iterator[BinaryIO]:
    """A file to write that stands under ``path`` when the block ends, whole, and not at all if it raises.

    It is this user's alone unless ``shared``, as other files are. Raises OSError where the disk refuses."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=PREFIX)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if shared:
            mask = os.umask(0o077)  # which can only be read by setting it
            os.umask(mask)
            os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            raise error.__context__ from None  # which torch.save hides
        raise


def list_files(place: Path, suffix: str) -> list[Path]:
    """The files of a folder with this suffix, sorted, without temporary ones."""
    try:
        return sorted(p for p in place.iterdir() if p.suffix == suffix and not p.name.startswith(PREFIX))
    except OSError:
        return []


def remove(path: Path) -> bool:
    """Delete a file; True if it existed and is gone."""
    try:
        path.unlink()
    except OSError:
        return False
    return True


def _is_mine(found: os.stat_result) -> bool:
    return not hasattr(os, "geteuid") or found.st_uid == os.geteuid()


@functools.cache
def _remove_stale(place: Path) -> None:
    """Delete, once per process, temporary files that killed writers left."""
    with contextlib.suppress(OSError):
        for path in place.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_mtime > _STALE:
                    path.unlink()


def warn_once(reason: str) -> None:
    """Warn, once per process, that something on disk is not used."""
    if not _warned.is_set():
        _warned.set()
        warnings.warn(CacheWarning(f"the cache is not used where it cannot be: {reason}"), stacklevel=3)


def parse_json(data: bytes) -> Any:
    """Parse JSON; None if it is not JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def canonical_json(value: Any) -> str:
    """Canonical JSON: equal values give equal text."""
    return json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":"))
