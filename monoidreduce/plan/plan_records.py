"""Plan records: tuned plans, kept in this process and on disk for the next.

A :class:`Key` is all that a plan depends on: program, bucket of lengths, types, device, budget, versions. A
:class:`Record` is a plan with its measurements. On disk a record is one small JSON file, named by a digest of its key,
so writers of different plans never touch the same file, and writers of one plan replace each other's file as a whole.
A file that is truncated, altered, foreign or of another format is ignored, and the plan is chosen or tuned as if there
were none. ``mr.cache`` (``cache.py``) is the user's view of this store. Needs no torch.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .._version import __version__
from ..errors import ArgumentError
from . import disk, settings
from .schedule import Choice

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
    place = disk.open_folder(FOLDER)
    found = None if place is None else load_record(place / f"{key.digest}.json")
    return _keep_in_memory(key, found if found is not None and found.key == key else None)


def remember(record: Record, lasting: bool = True) -> bool:
    """Store a record in place of the old one; on disk too if ``lasting``. True if the next process will find it."""
    _keep_in_memory(record.key, record)
    settings.renew_plans()
    place = disk.open_folder(FOLDER) if lasting else None
    return place is not None and disk.write(
        place / f"{record.key.digest}.json", canonical_json(record.to_json()).encode()
    )


def load_record(path: Path) -> Record | None:
    """The record in a file; None, with a warning, if the file holds none."""
    data = disk.read(path)
    if data is None:
        return None
    found = parse_json(data)
    record = Record.from_json(found)
    if record is None:
        disk.warn_once(f"{path} holds no plan of this library")
    return record


def parse_json(data: bytes) -> Any:
    """Parse JSON; None if it is not JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def list_records() -> list[Record]:
    """All valid records on disk."""
    place = disk.open_folder(FOLDER)
    found = [] if place is None else [load_record(path) for path in disk.list_files(place, ".json")]
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
