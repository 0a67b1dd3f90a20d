"""How a fold is run: a :class:`Choice` of one of five schedules and its tiles (plain data, stored as JSON), the
tiles that are taken where nothing was chosen, and the records of what was tuned.

| schedule | how |
|---|---|
| ``dense`` | the whole matrix of pairs (a whole call) |
| ``flash`` | tiles; on a GPU one kernel per folded axis |
| ``split`` | as ``flash``, with the folded axis split over program instances and the partial results combined |
| ``panel`` | vendor GEMMs, one panel of pairs at a time |
| ``total`` | panels, with the gradient taken in the forward (a whole call) |

The cost model ranks choices (``candidates.py``), the tuner measures them, and :func:`follow` sets one for a block.

Default tiles: those of the eager engine (:func:`choose_tiles`), then the tables of Triton kernels. The eager engine's
time is matrix products, a few passes of arithmetic over the tile, and about 0.1 ms of Python per tile. The products and
Python want it large, the passes want it in the cache, and skipping wants it small. Measured with attention, forward and
backward, on two cores each of a Neoverse N1 (1 MB of L2) and of a Xeon with AMX (2 MB of L2): 1024 × 1024 is within a
few per cent of the best shape on both, in float32 and bfloat16; 512 × 512 costs 20 to 40 %.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .._version import __version__
from ..errors import ArgumentError, BudgetError
from . import budget, disk, settings

SCHEDULES = ("dense", "flash", "split", "panel", "total")


@dataclass(frozen=True)
class Choice:
    """How to run a fold (or, for ``dense`` and ``total``, a whole call).

    ``tiles`` by name; the engine chooses what is missing:

    - ``tile``: (batch, rows, cols) of a tile in torch;
    - ``cols``, ``rows``: (kept, folded, warps, stages, splits, copies) of the kernel that folds that axis. Splits 0: as
      the engine chooses; copies 0: plain loads, 1: tensor descriptors, 2: warp-specialised;
    - ``room``: (bytes,) of panels.

    >>> choice = Choice("flash", (("tile", (1, 512, 1024)),))
    >>> Choice.from_dict(choice.as_dict()) == choice
    True
    """

    schedule: str
    tiles: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def tile(self, name: str) -> tuple[int, ...] | None:
        return next((t for n, t in self.tiles if n == name), None)

    def with_tile(self, name: str, tile: tuple[int, ...]) -> Choice:
        """The same with the tile ``name`` replaced."""
        return Choice(self.schedule, (*[(n, t) for n, t in self.tiles if n != name], (name, tile)))

    def as_dict(self) -> dict[str, Any]:
        """The choice as plain data, which JSON can hold."""
        return {"schedule": self.schedule, "tiles": {n: list(t) for n, t in self.tiles}}

    @staticmethod
    def from_dict(given: Mapping[str, Any]) -> Choice:
        """The inverse of :meth:`as_dict`; raises ArgumentError for anything else."""
        try:
            schedule, found = given["schedule"], given["tiles"]
            tiles = tuple((str(n), tuple(t)) for n, t in found.items())
        except (KeyError, TypeError, AttributeError):
            schedule, tiles = None, ()
        sizes = [k for _, t in tiles for k in t]
        right = {"tile": (3,), "cols": (5, 6), "rows": (5, 6), "room": (1,)}
        if (
            schedule not in SCHEDULES
            or any(len(t) not in right.get(n, ()) for n, t in tiles)
            or not all(type(k) is int and 0 <= k < 2**60 for k in sizes)
            or any(n != "room" and 0 in t[:3] for n, t in tiles)
        ):
            raise ArgumentError(detail=f"{given!r:.200} is no choice", fix="Give what Choice.as_dict returned")
        return Choice(schedule, tiles)

    def __str__(self) -> str:
        shown = {"tile": "tiles of {1} rows × {2} columns", "room": "panels in {0} bytes"}
        parts = [shown[n].format(*t) if n in shown else f"over {n} {_describe_kernel(*t)}" for n, t in self.tiles]
        return ", ".join([self.schedule, *parts])


def _describe_kernel(kept: int, folded: int, warps: int, stages: int, splits: int, copies: int = 0) -> str:
    cut = f", {splits} split{'s' if splits > 1 else ''}" if splits else ""
    how = ("", ", tensor descriptors", ", warp-specialised")[min(copies, 2)]
    return f"{kept} × {folded}, {warps} warps, {stages} stages{cut}{how}"


def follow(choice: Choice | Mapping[str, Choice]) -> contextlib.AbstractContextManager[None]:
    """Run every fold inside the block by ``choice``, or each by its own: a mapping from the names of folds.

    In a mapping, ``"call"`` stands for the call as a whole (``dense`` or ``total``). Only the engine ``auto`` follows a
    choice. A backward follows what its forward followed.
    """
    chosen = choice if isinstance(choice, Mapping) else {"": choice}
    return settings.change(followed={**(settings.current.get().followed or {}), **chosen})


def is_following() -> bool:
    """True inside a :func:`follow` block."""
    return settings.current.get().followed is not None


def get_followed(name: str) -> Choice | None:
    """The choice that ``follow`` set for a fold, by its name (or for ``"call"``); None without one."""
    choices = settings.current.get().followed
    if not choices:
        return None
    found = choices.get(name) or choices.get("")
    if found is None:
        return None
    whole = found.schedule in ("dense", "total")
    return found if whole == (name == "call") else None


ROWS, COLS = 1024, 1024  # the tile when both axes are long
ELEMENTS = ROWS * COLS  # pairs at a time wherever torch computes some: panels and gathers too, also on a GPU
HELD = 6 * 8  # bytes per pair, at most, of a tile's buffers and torch's temporaries: six numbers of 64 bits
LEAST = 16 * 16 * HELD  # a smaller budget is refused: the tiles would be too slow


@dataclass(frozen=True)
class Tiles:
    """Batch elements, rows and columns of one tile."""

    batch: int
    rows: int
    cols: int


def choose_tiles(
    batch: int, rows: int, cols: int, width: int = 1, room: int | None = None, copied: tuple[int, int] = (0, 0)
) -> Tiles:
    """The tile for ``batch`` folds of ``rows`` × ``cols`` pairs, each pair holding ``width`` numbers.

    ``copied``: bytes of a row's and of a column's vectors that are copied for a tile, as they are multiplied in another
    type than they are stored in. ``room``: bytes that tiles may take; by default the budget. Raises BudgetError if that
    is too little.
    """
    asked = settings.now()
    elements, room = ELEMENTS // max(1, width) // asked.shrink, room or asked.budget
    if room is not None:
        if room < LEAST:
            raise BudgetError(given=budget.format_floor(room), least=budget.format_ceil(LEAST))
        elements = min(elements, max(LEAST, room // asked.shrink) // HELD)
    elements = max(1, elements)
    r = min(max(1, rows), max(1, min(ROWS, elements)))
    c = min(max(1, cols), max(1, elements // r))
    r = min(max(1, rows), max(r, elements // c))  # few columns: take more rows
    if room is not None:  # a quarter for the copies of either side
        r, c = (min(n, max(16, room // 4 // held)) if held else n for n, held in zip((r, c), copied, strict=True))
    b = min(max(1, batch), max(1, elements // (r * c)))
    return Tiles(b, r, c)


# Default tiles of generated kernels, by what a kernel holds and by GPU family: what an untuned call runs with.
#
# ``KERNELS`` was measured on one H200 (``benchmarks/tiles.py``): each tile was the fastest, or within a few per cent of
# it, over attention, MLPs, contrastive losses and kernel sums, each kernel alone. The other families were not measured:
# their tiles are the same, or smaller where those spill, and fit by a count of shared memory that is at most 6 % below
# what kernels compiled for 8.0 and 8.9 take; none of them spills more than the fastest tiles on an H200 do
# (``tests/interpret/test_aot_compile.py``).

Tile = tuple[int, int, int, int]  # kept indices per program instance, folded indices per step, warps, stages

KERNELS: dict[str, Tile] = {
    "few features": (32, 32, 4, 2),  # or none; all in registers: gradients of points spill with 32 × 128 (8 → 22 ms)
    "float64": (32, 32, 4, 1),
    "float64, wide": (16, 16, 4, 1),
    "float32, exact": (32, 32, 4, 2),  # no tensor cores: one stage, or larger tiles, spill
    "float32": (64, 64, 4, 2),
    "float32, wide": (64, 32, 4, 2),
    "float32, halves": (128, 64, 4, 2),  # split float32 on tensor cores; kernels that hold more spill with larger tiles
    "float32, halves, close": (64, 64, 4, 2),  # neighbours: 27 ms where 64 × 32 takes 40
    "float32, halves, close, powers": (64, 32, 4, 3),
    "float32, thirds": (64, 64, 4, 3),
    "float32, thirds, close": (64, 32, 4, 3),
    "float32, thirds, sums": (64, 64, 4, 2),
    "float32, thirds, wide": (64, 32, 4, 2),
    "16 bits": (64, 64, 4, 3),
    "16 bits, wide": (128, 64, 8, 3),
    # not measured: a block of kept vectors is loaded for each product, 128 folded indices keep the L2 cache up with it
    "several vectors, 16 bits": (128, 128, 8, 3),
}

# Kernels that load operands by tensor descriptors: by feature size, number of vector accumulators, and what they do.
#   "one block": one folded operand per tile ("softmax": with a guessed maximum)
#   "passes": a condition skips tiles; "softmax": a guessed maximum; "powers": computes powers
#   "reads": conditions on data, whose numbers leave no shared memory for three stages of 64 in two instances
#   "short": several conditions, so that few tiles per row are computed
#   "plain": none of these; "gated": three folded operands; "gradient": the row gradient; "apart": two kept operands,
#   and an accumulator of a third that is in no other product
COPIED: dict[tuple[int, int, str], Tile] = {
    (64, 1, "one block"): (64, 64, 4, 2),
    (64, 1, "one block, softmax"): (64, 64, 4, 2),
    (128, 1, "one block"): (64, 128, 4, 2),
    (128, 1, "one block, softmax"): (64, 128, 4, 3),
    (256, 1, "one block"): (128, 64, 8, 3),
    (256, 1, "one block, softmax"): (128, 64, 8, 3),
    (64, 1, "plain"): (64, 64, 4, 4),
    (64, 1, "plain gradient"): (64, 128, 4, 3),
    (64, 2, "plain"): (64, 128, 4, 3),
    (128, 1, "plain"): (64, 64, 4, 3),
    (128, 2, "plain"): (64, 64, 4, 2),
    (128, 1, "gated"): (64, 64, 4, 2),
    (128, 1, "gated gradient"): (128, 64, 8, 3),
    (128, 1, "plain apart"): (64, 64, 4, 2),
    (128, 1, "passes"): (64, 64, 4, 3),
    (128, 1, "short"): (64, 64, 4, 3),
    (128, 1, "reads"): (64, 32, 4, 3),
    (128, 1, "short gradient"): (64, 64, 4, 2),
    (128, 1, "reads gradient"): (64, 64, 4, 2),
    (128, 1, "powers"): (64, 64, 4, 2),
    **{
        (width, sums, how): tile
        for how in ("passes", "short", "reads", "softmax", "powers")
        for width, sums, tile in (
            (64, 0, (64, 64, 4, 2)),
            (64, 1, (64, 64, 4, 2)),
            (64, 2, (64, 128, 4, 2)),
            (128, 0, (128, 64, 8, 3)),
            (128, 2, (64, 64, 4, 2)),
            (256, 0, (128, 64, 8, 3)),
            (256, 1, (128, 64, 8, 3)),
        )
        # column sums of attention, 64 × 4096 × 4096 pairs: 1.07 ms by plain loads, 1.20 by descriptors (H200)
        if (width, sums, how) != (128, 0, "powers")
    },
}


# GEMM with a fold as its epilogue: by whether pairs draw random numbers, and whether there are many rows
FEW_ROWS = 64
DEEP: dict[tuple[str, bool], Tile] = {
    ("", True): (128, 256, 8, 3),
    ("", False): (64, 256, 8, 4),
    ("draws", True): (128, 256, 8, 3),
    ("draws", False): (64, 256, 8, 4),
}


# Few kept indices against many folded ones (decoding): by the widest features, folded indices per step, warps, stages.
# Kept indices per program instance: as many as there are, from 16 to ``MOST_FEW``
MOST_FEW = 64
FEW: dict[int, tuple[int, int, int]] = {64: (128, 4, 4), 128: (64, 4, 4), 256: (32, 4, 4)}
# Where the folded vectors are stored in 8 bits or fewer. H200, one row of 16 x 32/8 heads against as many columns as
# have the bytes of 8192 of 128 features, by FEW's tiles and by these: FP8 0.104 to 0.087, 0.096 to 0.089 and
# 0.110 to 0.088 ms of 64, 128 and 256 features; int8 0.118 to 0.108, 0.112 to 0.099 and 0.120 to 0.100; in bfloat16
# 0.134, 0.134 and 0.140.
FEW_STORED: dict[int, tuple[int, int, int]] = {64: (256, 4, 3), 128: (128, 4, 3), 256: (64, 4, 3)}
# The same of pages, whose length tiles keep to. H200, the same in pages of 64: 0.106 ms, by four warps 0.128, in
# bfloat16 0.147
FEW_STORED_PAGES = FEW | {128: (64, 2, 3)}


@dataclass(frozen=True, eq=False)
class Family:
    """GPUs with the same limits. ``spare``: the share of shared memory that a kernel's counted buffers may take."""

    name: str
    shared: int  # bytes of shared memory of one program instance
    spare: float
    ahead: int  # pipeline stages that have no buffer of their own
    source: str
    own: Mapping[str, Tile] = field(default_factory=dict)  # tiles that differ from the table

    def tile(self, kind: str) -> Tile:
        """The default tile for a kind of kernel, a key of ``KERNELS``."""
        return self.own.get(kind, KERNELS[kind])


# With Hopper's 128 × 64, or 128 × 32, column gradients spill kilobytes a thread on 8.0; with this, 164 bytes at most.
# A product's 128 × 256 spills there too.
_OLDER = {
    "16 bits, wide": (64, 64, 4, 2),
    "several vectors, 16 bits": (64, 64, 4, 2),
    "product": (128, 128, 8, 3),
}
FAMILIES = {
    "hopper": Family("H100, H200", 232_448, 0.93, 0, "measured on an H200"),
    "ampere": Family("A100", 166_912, 0.985, 1, "derived from kernels compiled for 8.0", _OLDER),
    "ada": Family("L4, RTX 4090, A10", 101_376, 0.985, 1, "derived from kernels compiled for 8.9", _OLDER),
}


def family(major: int, minor: int) -> Family:
    """The family of a compute capability; newer ones count as Hopper.

    >>> [family(*version).name for version in ((8, 0), (8, 9), (9, 0))]
    ['A100', 'L4, RTX 4090, A10', 'H100, H200']
    """
    return FAMILIES[family_name(major, minor)]


def family_name(major: int, minor: int) -> str:
    """The family of a compute capability as a key of ``FAMILIES``.

    >>> family_name(8, 6)
    'ada'
    """
    if (major, minor) == (8, 0):
        return "ampere"
    return "ada" if major in (7, 8, 12) else "hopper"


_STEPS = 16  # classes of lengths between two powers of two


def round_length(length: int, classes: int = _STEPS) -> int:
    """The longest length of a length's class: between two powers of two there are 16 classes, up to 32 every length.

    >>> round_length(31), round_length(1000), round_length(1024), round_length(1025), round_length(4000)
    (31, 1024, 1024, 1088, 4096)
    """
    step = _find_class_step(length, classes)
    return -(-length // step) * step


def middle_length(length: int) -> int:
    """The length in the middle of a length's class (:func:`round_length`).

    >>> middle_length(31), middle_length(1000), middle_length(1024), middle_length(16400)
    (31, 1008, 1008, 16896)
    """
    return round_length(length) - _find_class_step(length) // 2


def _find_class_step(length: int, classes: int = _STEPS) -> int:
    """How many lengths the class of a length has."""
    return 1 << max(0, (length - 1).bit_length() - classes.bit_length())


# Plan records: tuned plans, kept in this process and on disk for the next. A :class:`Key` is all that a plan depends
# on: program, bucket of lengths, types, device, budget, versions. A :class:`Record` is a plan with its measurements.
# On disk a record is one small JSON file, named by a digest of its key, so writers of different plans never touch the
# same file, and writers of one plan replace each other's file as a whole. A file that is truncated, altered, foreign or
# of another format is ignored, and the plan is chosen or tuned as if there were none. ``mr.cache`` (``cache.py``) is
# the user's view of them.

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
        return hashlib.sha256(disk.canonical_json(asdict(self)).encode()).hexdigest()[:32]


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
        place / f"{record.key.digest}.json", disk.canonical_json(record.to_json()).encode()
    )


def load_record(path: Path) -> Record | None:
    """The record in a file; None, with a warning, if the file holds none."""
    data = disk.read(path)
    if data is None:
        return None
    found = disk.parse_json(data)
    record = Record.from_json(found)
    if record is None:
        disk.warn_once(f"{path} holds no plan of this library")
    return record


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


def _compute_checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(disk.canonical_json(body).encode()).hexdigest()[:16]


def _is_plain(value: Any, depth: int) -> bool:
    """True if a value is of JSON's types, finite, and nested at most ``depth`` levels."""
    if isinstance(value, float):
        return value - value == 0
    if value is None or isinstance(value, (bool, int, str)):
        return True
    if depth and isinstance(value, (list, dict)):
        return all(_is_plain(v, depth - 1) for v in (value.values() if isinstance(value, dict) else value))
    return False
