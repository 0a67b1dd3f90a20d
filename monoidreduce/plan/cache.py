"""``mr.cache``: the cache on disk. Where it is, what it holds; clearing it, exporting and importing tuned plans.

>>> import monoidreduce as mr
>>> mr.cache.path().is_absolute()
True
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ..errors import CacheError
from . import disk, schedule
from .schedule import Key, Record

KERNELS, LIBRARIES = "kernels", "cpp"
_SUFFIXES = {schedule.FOLDER: (".json",), KERNELS: (".py",), LIBRARIES: (".so", ".sum")}

__all__ = ["Key", "Record", "clear", "export", "import_", "path", "plans"]


def path() -> Path:
    """The cache folder: ``$MONOIDREDUCE_CACHE``, else a folder in the user's own cache folder.

    >>> import monoidreduce as mr
    >>> mr.cache.path().is_absolute()
    True
    """
    return disk.cache_root().absolute()


def plans() -> list[Record]:
    """The tuned plans on disk, for every device and version: ``.key``, ``.plan`` and ``.measured`` of each.

    >>> import monoidreduce as mr
    >>> all(plan.key.program for plan in mr.cache.plans())
    True
    """
    return schedule.list_records()


def clear(*, kernels: bool = True) -> int:
    """Delete all plans, and kernels' sources and compiled C++ unless ``kernels=False``; returns how many files went.

    Plans in this process's memory are dropped too. A missing cache counts as an empty one.

    >>> import monoidreduce as mr, os, tempfile
    >>> from unittest import mock
    >>> with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, MONOIDREDUCE_CACHE=folder):
    ...     mr.cache.clear()
    0
    """
    count = 0
    for name in _SUFFIXES if kernels else (schedule.FOLDER,):
        place = disk.cache_root() / name
        if place.is_dir() and not place.is_symlink():
            found = [file for suffix in _SUFFIXES[name] for file in disk.list_files(place, suffix)]
            count += sum(map(disk.remove, found))
    schedule.forget()
    return count


def export(file: str | os.PathLike[str]) -> int:
    """Write all plans to one JSON file, for ``import_`` elsewhere; returns their number.

    Raises CacheError if the file cannot be written.

    >>> import monoidreduce as mr, tempfile, os
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     count = mr.cache.export(os.path.join(folder, "plans.json"))
    ...     count == mr.cache.import_(os.path.join(folder, "plans.json"))
    True
    """
    found = plans()
    body = {"format": schedule.FORMAT, "plans": [r.to_json() for r in found]}
    try:
        with disk.open_new(Path(file)) as new:
            new.write(disk.canonical_json(body).encode())
    except OSError as error:
        raise CacheError(
            detail=f"plans cannot be written to {os.fspath(file)}: {error}", fix="Name a file in a folder of yours"
        ) from None
    return len(found)


def import_(file: str | os.PathLike[str]) -> int:
    """Store the plans of a file that ``export`` wrote, in place of ours with the same keys; returns their number.

    A plan is used only on the device and with the versions it was measured with, so importing another machine's is
    safe. The whole file is checked before anything is stored; CacheError says what is wrong with it.

    >>> import monoidreduce as mr, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = os.path.join(folder, "plans.json")
    ...     mr.cache.export(file) == mr.cache.import_(file)
    True
    """
    found = _read_records(Path(file))
    for record in found:
        schedule.remember(record)
    return len(found)


def _read_records(file: Path) -> list[Record]:
    try:
        with file.open("rb") as opened:
            data = opened.read(disk.LARGEST + 1)
    except OSError as error:
        raise CacheError(detail=f"plans cannot be read from {file}: {error}", fix="Name a file of export") from None
    body = disk.parse_json(data) if len(data) <= disk.LARGEST else None
    if not isinstance(body, dict) or not isinstance(body.get("plans"), list) or body.get("format") != schedule.FORMAT:
        raise CacheError(
            detail=f"{file} holds no plans in the form that this version knows",
            fix="Give a file that mr.cache.export of the same version wrote",
        )
    return list(_parse_records(file, body["plans"]))


def _parse_records(file: Path, given: list) -> Iterable[Record]:
    for at, one in enumerate(given):
        record = Record.from_json(one)
        if record is None:
            raise CacheError(
                detail=f"plan {at + 1} of {len(given)} in {file} is damaged or no plan",
                fix="Nothing was taken: export the plans again",
            )
        yield record
