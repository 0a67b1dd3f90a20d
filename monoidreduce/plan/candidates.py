"""What could run a fold, cheapest first as the cost model sees it, and which of it does.

:func:`candidates` lists, :func:`offered` lists those that need no measurement, :func:`choose` takes the first of these
that the budget allows, unless a block says what to follow or a measured winner is remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from . import budget, cost, tiles
from .op_counts import Case, directions
from .schedule import Choice, told

# What a kernel's tile may be: indices it owns, indices it meets at a time, warps, stages; parts are added for a split.
KERNEL_TILES = (
    (64, 64, 4, 3),
    (64, 64, 4, 2),
    (64, 32, 4, 3),
    (64, 128, 4, 2),
    (128, 64, 8, 3),
    (128, 64, 8, 2),
    (128, 32, 8, 3),
    (128, 128, 8, 2),
)
NARROW_TILES = ((32, 32, 4, 2), (64, 32, 4, 2), (32, 64, 4, 2), (64, 64, 4, 2), (128, 32, 4, 2), (32, 128, 4, 2))
PARTS = (2, 4, 8, 16, 32, 64)
TORCH_TILES = ((1024, 1024), (512, 1024), (1024, 512), (512, 512), (256, 1024), (2048, 512), (256, 256))
ROOMS = (32 * 2**20, 128 * 2**20, 512 * 2**20)  # bytes that panels may take


def candidates(case: Case, over: str | None = None) -> list[Choice]:
    """The ways to run a fold, the one that the model thinks fastest first.

    With ``over`` only those that differ from the first in the tile of that direction's kernel.
    """
    found = _kernels(case, over) if case.kernels else _torch(case)
    if case.panels and over is None:
        found = [] if case.gpu and not case.kernels else found
        found += [Choice("panel"), *(Choice("panel", (("room", (room,)),)) for room in ROOMS)]
    estimated = {c: cost.estimate(case, c).seconds for c in dict.fromkeys(found)}
    return sorted(estimated, key=lambda c: estimated[c])


def offered(case: Case) -> list[Choice]:
    """Of these, what may run unmeasured: a kernel's own tiles, in any number of parts. The model does not know what
    spills: with another tile it once thought 1 % faster, a gated perceptron's gradient took seven times as long."""
    own = dict(case.defaults)
    known = lambda c: c.schedule == "panel" or all(cost.same(t, own[way]) for way, t in c.tiles)
    return [c for c in candidates(case) if not case.kernels or known(c)]


def choose(case: Case, remembered: Callable[[Case], Choice | None] | None = None) -> Choice:
    """What to run: as followed, else what was measured to win, else the model's cheapest within the budget."""
    if budget.parts() > 1:  # memory ran out
        return smallest(case)
    asked = told(case.name) or (remembered(case) if remembered is not None else None)
    if asked is not None:
        return asked
    limit = budget.asked()
    ranked = offered(case)
    if limit is None:
        return ranked[0]
    return next((c for c in ranked if cost.estimate(case, c).held <= limit), default(case))


def default(case: Case) -> Choice:
    """The engine's own tiles, for the schedule that always runs."""
    if case.gpu and case.panels and not case.kernels:
        return Choice("panel")
    return named(case, Choice("flash", case.defaults))


def named(case: Case, choice: Choice) -> Choice:
    """A kernel whose folded axis is cut into parts is a split."""
    cut = any(cost.parts_of(case, over, tile) > 1 for over, tile in choice.tiles)
    return replace(choice, schedule="split" if cut else "flash")


def smallest(case: Case) -> Choice:
    """What takes the least memory: no part of a walk is kept apart, and the engine's tiles go by the room there is."""
    found = default(case)
    for way, tile in found.tiles:
        found = found.having(way, (*tile[:4], 1, *tile[5:]))
    return found if found.schedule == "panel" else replace(found, schedule="flash")


def _kernels(case: Case, over: str | None) -> list[Choice]:
    base = default(case)
    found = [base, smallest(case)] if over is None else [base]
    sizes = NARROW_TILES if max([0, *(case.features(e) for e in case.fold.leaves)]) <= 8 else KERNEL_TILES
    for way in directions(case.fold) if over is None else (over,):
        own = base.tile(way)
        if own is not None:
            found += [base.having(way, t) for t in _varied(case, way, own, sizes)]
    if over is None:
        found.append(_joint(case, base, found))
    return [named(case, c) for c in found]


def _joint(case: Case, base: Choice, found: Sequence[Choice]) -> Choice:
    """Every kernel's own tile in the number of parts that is best for it: their costs add up."""
    best = base
    for way, own in base.tiles:
        parts = {t for c in found if (t := c.tile(way)) is not None and cost.same(t, own)}
        best = best.having(way, min(sorted(parts), key=lambda t: cost.estimate(case, base.having(way, t)).seconds))
    return best


def _varied(case: Case, way: str, own: tuple[int, ...], sizes: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Other tiles than a kernel's own, in the engine's number of parts or in one; its own in other numbers of parts
    where it leaves processors idle, and with the other way to copy."""
    copied = tuple(min(1, boxes) for boxes in own[5:])  # copies by turns are for one tile alone
    for t in sizes:
        cut = cost.parts_of(case, way, (*t, own[4])) > 1
        yield from ((*t, parts, *copied) for parts in ((own[4], 1) if cut else (1,)))
    if cost.instances(case, way, own) < 2 * case.ceilings.processors:
        yield from ((*own[:4], parts, *copied) for parts in PARTS)
    yield from ((*own[:5], int(not boxes)) for boxes in own[5:])


def _torch(case: Case) -> list[Choice]:
    found = []
    for rows, cols in TORCH_TILES if case.width == 1 else ():
        r, c = min(rows, max(1, case.rows)), min(cols, max(1, case.cols))
        b = min(max(1, case.batch), max(1, tiles.ELEMENTS // (r * c * case.width)))
        found.append(Choice("flash", (("tile", (b, r, c)),)))
    own = tiles.choose(case.batch, case.rows, case.cols, case.width)
    return [Choice("flash", (("tile", (own.batch, own.rows, own.cols)),)), *found]


def can_run(case: Case, choice: Choice) -> bool:
    """True if a choice, read from a plan record, can run this case within the budget."""
    kernels = [t for name, t in choice.tiles if name in ("cols", "rows")]
    if choice.schedule not in ("flash", "split", "panel") or (choice.schedule == "panel" and not case.panels):
        return False
    if (kernels and not case.kernels) or (choice.tile("tile") and case.kernels):
        return False
    if not all(_is_power_of_two(n) for t in kernels for n in t[:3]) or not all(t[0] * t[1] <= 2**16 for t in kernels):
        return False
    limit = budget.asked()
    return limit is None or cost.estimate(case, choice).held <= limit


def _is_power_of_two(n: int) -> bool:
    return n > 0 and not n & (n - 1)
