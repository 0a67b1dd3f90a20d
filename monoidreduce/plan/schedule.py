"""How a fold is run: one of a few schedules and its tiles. Plain data, kept as JSON.

The cost model ranks choices (``candidates.py``), the tuner measures them; :func:`follow` makes the calls inside a
block run by one.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ArgumentError

SCHEDULES = ("dense", "flash", "split", "panel", "total")


@dataclass(frozen=True)
class Choice:
    """One way to run a fold (or, for ``dense`` and ``total``, a whole call).

    ``tiles`` by name: ``tile`` (batch, rows, cols) of torch's tiles; ``cols`` and ``rows`` (kept, folded, warps,
    stages, parts, and whether tensor descriptors copy, 2: by turns; 0 parts: the engine's own number) of the kernel
    that folds in that direction; ``room`` (bytes,) of panels. A name that is missing is chosen by the engine.

    >>> choice = Choice("flash", (("tile", (1, 512, 1024)),))
    >>> Choice.from_dict(choice.as_dict()) == choice
    True
    """

    schedule: str
    tiles: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def tile(self, name: str) -> tuple[int, ...] | None:
        return next((t for n, t in self.tiles if n == name), None)

    def having(self, name: str, tile: tuple[int, ...]) -> Choice:
        """The same with another tile."""
        return replace(self, tiles=(*((n, t) for n, t in self.tiles if n != name), (name, tile)))

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"schedule": self.schedule, "tiles": {n: list(t) for n, t in self.tiles}}

    @staticmethod
    def from_dict(given: Mapping[str, Any]) -> Choice:
        """The inverse of :meth:`as_dict`; anything that is no choice raises ArgumentError."""
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
        parts = [shown[n].format(*t) if n in shown else f"over {n} {_kernel(*t)}" for n, t in self.tiles]
        return ", ".join([self.schedule, *parts])


def _kernel(kept: int, folded: int, warps: int, stages: int, parts: int, boxes: int = 0) -> str:
    cut = f", {parts} part{'s' if parts > 1 else ''}" if parts else ""
    copied = ("", ", tensor descriptors", ", by turns")[min(boxes, 2)]
    return f"{kept} × {folded}, {warps} warps, {stages} stages{cut}{copied}"


# Following ----------------------------------------------------------------------------------------------------

followed: contextvars.ContextVar[Mapping[str, Choice] | None] = contextvars.ContextVar("followed", default=None)


@contextlib.contextmanager
def follow(choice: Choice | Mapping[str, Choice]) -> Iterator[None]:
    """Run every fold inside the block by a choice, or each by its own: a mapping from the names of folds.

    In a mapping, the name ``"call"`` is that of the call as a whole (``dense`` or not, ``total`` or not). It holds for
    the engine ``auto`` alone; gradients follow what was followed when their forward ran.
    """
    chosen = choice if isinstance(choice, Mapping) else {"": choice}
    token = followed.set({**(followed.get() or {}), **chosen})
    try:
        yield
    finally:
        followed.reset(token)


def told(name: str) -> Choice | None:
    """What ``follow`` says of a fold (or of ``"call"``)."""
    asked = followed.get()
    if not asked:
        return None
    found = asked.get(name) or asked.get("")
    if found is None:
        return None
    whole = found.schedule in ("dense", "total")
    return found if whole == (name == "call") else None
