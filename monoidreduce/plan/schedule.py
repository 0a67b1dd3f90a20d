"""A :class:`Choice`: how a fold is run, as one of five schedules and its tiles. Plain data, stored as JSON.

| schedule | how |
|---|---|
| ``dense`` | the whole matrix of pairs (a whole call) |
| ``flash`` | tiles; on a GPU one kernel per folded axis |
| ``split`` | as ``flash``, with the folded axis split over program instances and the partial results combined |
| ``panel`` | vendor GEMMs, one panel of pairs at a time |
| ``total`` | panels, with the gradient taken in the forward (a whole call) |

The cost model ranks choices (``candidates.py``), the tuner measures them, and :func:`follow` sets one for a block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError
from . import settings

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
