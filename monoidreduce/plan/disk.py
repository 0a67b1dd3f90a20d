"""The cache on disk: safe files for kernel sources and all else that is kept, and the plan records among them.

A file is written under a temporary name, flushed and renamed, so a killed process leaves the old file or the new one.
Only plain files of this user that nobody else may write are read. If the cache directory is not writable, caching is
skipped, with one warning per process.

Plan records are tuned plans, kept in this process and on disk for the next. A :class:`Key` is all that a plan depends
on: program, bucket of lengths, types, device, budget, versions. A :class:`Record` is a plan with its measurements. On
disk a record is one small JSON file, named by a digest of its key, so writers of different plans never touch the same
file, and writers of one plan replace each other's file as a whole. A file that is truncated, altered, foreign or of
another format is ignored, and the plan is chosen or tuned as if there were none. ``mr.cache`` (``cache.py``) is the
user's view of this store. Needs no torch.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

from .._version import __version__
from ..errors import ArgumentError, CacheWarning
from . import settings
from .schedule import Choice

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


FORMAT = 1
FOLDER = "plans"
_MOST = 4096  # records kept in memory
_DEEPEST = 8  # levels of nesting in a plan's JSON
_lock = threading.Lock()
_known: dict[Key, Record | None] = {}


@dataclass(frozen=True)
class Key:
    """All that a tuned plan depends on.

    >>> import monoidreduce as mr
    >>> key = mr.cache.Key(program="a digest", shape="64 x 64", types="float32", device="cpu", budget="")
    >>> key.versions != ""  # those installed
    True
    """

    program: str  # a digest of the program's text
    shape: str  # the bucket that its sizes fall into
    types: str
    device: str
    budget: str
    versions: str = ""  # of the libraries; those installed, if left out

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", self.versions or installed_versions())

    @property
    def digest(self) -> str:
        return hashlib.sha256(canonical_json(asdict(self)).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Record:
    """A tuned plan as plain data, and what was measured for it.

    >>> import monoidreduce as mr
    >>> key = mr.cache.Key(program="a digest", shape="64 x 64", types="float32", device="cpu", budget="")
    >>> record = mr.cache.Record(key, plan={})
    >>> mr.cache.Record.from_json(record.to_json()) == record
    True
    """

    key: Key
    plan: Mapping[str, Any]
    measured: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As plain data, with a checksum."""
        body = {"format": FORMAT, "key": asdict(self.key), "plan": dict(self.plan), "measured": dict(self.measured)}
        return {**body, "sum": _compute_checksum(body)}

    @staticmethod
    def from_json(found: Any) -> Record | None:
        """The record in parsed JSON; None if it is not a valid record."""
        if not isinstance(found, dict) or set(found) != {"format", "key", "plan", "measured", "sum"}:
            return None
        key, names = found["key"], {f.name for f in fields(Key)}
        if found["format"] != FORMAT or not isinstance(key, dict) or set(key) != names:
            return None
        if not all(isinstance(v, str) for v in key.values()):
            return None
        if not all(isinstance(found[n], dict) and _is_plain(found[n], _DEEPEST) for n in ("plan", "measured")):
            return None
        body = {name: value for name, value in found.items() if name != "sum"}
        return Record(Key(**key), found["plan"], found["measured"]) if found["sum"] == _compute_checksum(body) else None


def bucket(length: int) -> int:
    """The next power of two: lengths above its half and up to it share a plan.

    >>> bucket(1000), bucket(1024), bucket(1025)
    (1024, 1024, 2048)
    """
    return 1 << max(0, length - 1).bit_length()


@functools.cache
def installed_versions() -> str:
    """The installed versions of monoidreduce, torch and Triton."""
    found = [f"monoidreduce {__version__}"]
    for name in ("torch", "triton"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def make_key(
    program: str, kind: str, lengths: Iterable[int], letters: Iterable[tuple[str, int]], types: str, device: str
) -> Key:
    """The key of a tuned plan under the budget in force.

    ``program``: a digest; ``kind``: ``"call "`` for a whole call, ``""`` for a fold; ``lengths``: batch, rows and
    columns, rounded up to powers of two so that a new length seldom needs tuning; ``letters``: feature sizes, exact.
    """
    shape = " × ".join(str(bucket(n)) for n in lengths)
    features = ", ".join(f"{letter}={size}" for letter, size in letters)
    return Key(program, f"{kind}{shape}; {features}", types, device, str(settings.requested_budget() or ""))


def recall_choice(key: Key) -> Choice | None:
    """The tuned choice of a key; None without one, or if its plan is not a valid choice."""
    record = recall(key)
    try:
        return None if record is None else Choice.from_dict(record.plan)
    except ArgumentError:
        return None


def remember_choice(key: Key, choice: Choice, measured: Mapping[str, Any], lasting: bool) -> bool:
    """Store a tuned choice; on disk too if ``lasting``. True if the next process will find it."""
    return remember(Record(key, choice.as_dict(), measured), lasting)


def recall(key: Key) -> Record | None:
    """The record of a key, or None. Reads the disk once per key and process."""
    if key in _known:
        return _known[key]
    place = open_folder(FOLDER)
    found = None if place is None else load_record(place / f"{key.digest}.json")
    return _keep_in_memory(key, found if found is not None and found.key == key else None)


def remember(record: Record, lasting: bool = True) -> bool:
    """Store a record in place of the old one; on disk too if ``lasting``. True if the next process will find it."""
    _keep_in_memory(record.key, record)
    settings.renew_plans()
    place = open_folder(FOLDER) if lasting else None
    return place is not None and write(place / f"{record.key.digest}.json", canonical_json(record.to_json()).encode())


def load_record(path: Path) -> Record | None:
    """The record in a file; None, with a warning, if the file holds none."""
    data = read(path)
    if data is None:
        return None
    found = parse_json(data)
    record = Record.from_json(found)
    if record is None:
        warn_once(f"{path} holds no plan of this library")
    return record


def parse_json(data: bytes) -> Any:
    """Parse JSON; None if it is not JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def list_records() -> list[Record]:
    """All valid records on disk."""
    place = open_folder(FOLDER)
    found = [] if place is None else [load_record(path) for path in list_files(place, ".json")]
    return [r for r in found if r is not None]


def forget() -> None:
    """Drop the records in memory; they are read from disk again."""
    with _lock:
        _known.clear()
    settings.renew_plans()


def _keep_in_memory(key: Key, record: Record | None) -> Record | None:
    with _lock:
        while len(_known) >= _MOST:
            del _known[next(iter(_known))]
        _known[key] = record
    return record


def canonical_json(value: Any) -> str:
    """Canonical JSON: equal values give equal text."""
    return json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":"))


def _compute_checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(body).encode()).hexdigest()[:16]


def _is_plain(value: Any, depth: int) -> bool:
    """True if a value is of JSON's types, finite, and nested at most ``depth`` levels."""
    if isinstance(value, float):
        return value - value == 0
    if value is None or isinstance(value, (bool, int, str)):
        return True
    if depth and isinstance(value, (list, dict)):
        return all(_is_plain(v, depth - 1) for v in (value.values() if isinstance(value, dict) else value))
    return False
