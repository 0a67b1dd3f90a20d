"""Plans that won, remembered: in this process, and on disk for the next.

A record is one small JSON file, named by a digest of its key, so that writers of different plans never meet and writers
of one plan replace each other's whole file. A record that is truncated, altered, foreign or of another format is no
record: the plan is then chosen, or tuned, as if it had never been. What a plan says is read by whoever asks
(``schedule.py``), and checked there again. Needs no torch.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .._version import __version__
from . import disk

FORMAT = 1
FOLDER = "plans"
_MOST = 4096  # records kept in memory
_DEEPEST = 8  # levels of a plan's JSON
_lock = threading.Lock()
_known: dict[Key, Record | None] = {}
_generation = 0


@dataclass(frozen=True)
class Key:
    """All that a plan may depend on.

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
        object.__setattr__(self, "versions", self.versions or installed())

    @property
    def digest(self) -> str:
        return hashlib.sha256(text(asdict(self)).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Record:
    """A plan as plain data, and what was measured when it won.

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
        return {**body, "sum": _sum(body)}

    @staticmethod
    def from_json(found: Any) -> Record | None:
        """The record in JSON that may hold anything; None where it is none."""
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
        return Record(Key(**key), found["plan"], found["measured"]) if found["sum"] == _sum(body) else None


def bucket(length: int) -> int:
    """The power of two that lengths up to it, and above its half, share a plan with.

    >>> bucket(1000), bucket(1024), bucket(1025)
    (1024, 1024, 2048)
    """
    return 1 << max(0, length - 1).bit_length()


@functools.cache
def installed() -> str:
    """Ours, torch's and Triton's: another compiler, another plan."""
    found = [f"monoidreduce {__version__}"]
    for name in ("torch", "triton"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def recall(key: Key) -> Record | None:
    """The record of a key. A look into the disk for a key that is new to this process, else into memory."""
    if key in _known:
        return _known[key]
    place = disk.folder(FOLDER)
    found = None if place is None else load(place / f"{key.digest}.json")
    return _hold(key, found if found is not None and found.key == key else None)


def remember(record: Record, lasting: bool = True) -> bool:
    """Keep a record, in place of what its key had, on disk if it is ``lasting``; whether the next process finds it."""
    global _generation
    _hold(record.key, record)
    with _lock:
        _generation += 1
    place = disk.folder(FOLDER) if lasting else None
    return place is not None and disk.write(place / f"{record.key.digest}.json", text(record.to_json()).encode())


def load(path: Path) -> Record | None:
    """The record in a file, if it is one of ours."""
    data = disk.read(path)
    if data is None:
        return None
    found = parsed(data)
    record = Record.from_json(found)
    if record is None:
        disk.complain(f"{path} holds no plan of this library")
    return record


def parsed(data: bytes) -> Any:
    """JSON, or None where it is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def records() -> list[Record]:
    """Everything on disk that is a record."""
    place = disk.folder(FOLDER)
    found = [] if place is None else [load(path) for path in disk.files(place, ".json")]
    return [r for r in found if r is not None]


def forget() -> None:
    """Forget what is in memory; the disk is asked again."""
    global _generation
    with _lock:
        _known.clear()
        _generation += 1


def generation() -> int:
    """A number that moves whenever a plan may have changed: whoever keeps plans asks it."""
    return _generation


def _hold(key: Key, record: Record | None) -> Record | None:
    with _lock:
        while len(_known) >= _MOST:
            del _known[next(iter(_known))]
        _known[key] = record
    return record


def text(value: Any) -> str:
    """JSON of one form for equal values."""
    return json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":"))


def _sum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(text(body).encode()).hexdigest()[:16]


def _is_plain(value: Any, depth: int) -> bool:
    """Whether a value is of JSON's own kinds, finite, and not nested beyond reason."""
    if isinstance(value, float):
        return value - value == 0
    if value is None or isinstance(value, bool | int | str):
        return True
    if depth and isinstance(value, list | dict):
        return all(_is_plain(v, depth - 1) for v in (value.values() if isinstance(value, dict) else value))
    return False
