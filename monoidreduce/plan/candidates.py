"""The schedules that could run a fold, ranked by the cost model, and the choice among them.

- :func:`rank_candidates`: all of them, for the tuner;
- :func:`rank_untuned`: those that may run without having been measured;
- :func:`choose`: what runs. A choice set by ``follow``, else a tuned plan, else the cheapest that the budget allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ..reductions import kind_of
from . import cost, plan_records, settings, tiles
from .op_counts import Case, folded_axes, only_gathers
from .plan_records import Key
from .schedule import Choice, get_followed

# Tiles of a kernel: kept indices per program instance, folded indices per step, warps, stages. Splits are added later.
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
SPLITS = (2, 4, 8, 16, 32, 64)
TORCH_TILES = ((1024, 1024), (512, 1024), (1024, 512), (512, 512), (256, 1024), (2048, 512), (256, 256))
# On a GPU, panels are taken where they are predicted faster than kernels by this: the backward of a gated MLP
# (16400 × 16500 × 128, bfloat16, H200) was predicted 2.1 and 2.5 ms, and took 3.4 and 1.35.
PANEL_LEAD = 1.25
PANEL_BYTES = (32 * 2**20, 128 * 2**20, 512 * 2**20)


def rank_candidates(case: Case, over: str | None = None) -> list[Choice]:
    """All choices for a fold, the one with the least predicted time first.

    With ``over`` ("cols" or "rows"), only those that differ from the default in the tile of that axis's kernel.
    """
    seconds = _estimate_once(case)
    found = _list_kernel_candidates(case, over, seconds) if case.kernels else _list_torch_candidates(case)
    return _rank(case, found, seconds, panels=over is None)


def rank_untuned(case: Case) -> list[Choice]:
    """The candidates that may run unmeasured: the default tiles, in any number of splits unless the engine names it.

    The cost model does not know about register spills: with a tile that it predicted 1 % faster, the gradient of a
    gated MLP took seven times as long."""
    if not case.kernels:
        return rank_candidates(case)
    case, own = case.typical(), dict(case.defaults)
    seconds = _estimate_once(case)
    found = _list_kernel_candidates(case, None, seconds, others=())  # the cost of other tiles is not asked for

    def is_default(choice: Choice) -> bool:
        return all(cost.same_tile(t, own[way]) and own[way][4] in (0, t[4]) for way, t in choice.tiles)

    return _rank(case, list(filter(is_default, found)), seconds)


def _estimate_once(case: Case) -> Callable[[Choice], float]:
    """The predicted seconds of choices, each computed once: of kernels only the tiles count."""
    known: dict[tuple, float] = {}

    def estimate(choice: Choice) -> float:
        key = (choice.schedule == "panel", *sorted(choice.tiles))
        if key not in known:
            known[key] = cost.estimate(case, choice).seconds
        return known[key]

    return estimate


def _rank(case: Case, found: list[Choice], seconds: Callable[[Choice], float], panels: bool = True) -> list[Choice]:
    """These choices, and panels where the fold can use them, by their predicted time."""
    if case.panels is not False and panels:
        found = [] if case.gpu and not case.kernels else found
        found += [Choice("panel"), *(Choice("panel", (("room", (room,)),)) for room in PANEL_BYTES)]
    lead = PANEL_LEAD if case.gpu and case.kernels else 1.0
    return sorted(dict.fromkeys(found), key=lambda c: (lead if c.schedule == "panel" else 1.0) * seconds(c))


def choose(case: Case, key: Key | None = None) -> Choice:
    """What runs: the followed choice, else the tuned plan of ``key``, else the cheapest within the budget.

    With kernels it is the same for all lengths of a class (``Case.rounded``), whichever of them comes first."""
    case = case.rounded() if case.kernels else case
    if only_gathers(case.fold):  # no tiles to choose, whatever the number of features
        return Choice("flash")
    if settings.shrink_factor() > 1:  # an OOM retry
        return least_memory_choice(case)
    known = get_followed(case.name) or (None if key is None else find_tuned(case, key))
    if known is not None:
        return known
    limit = settings.requested_budget()
    ranked = rank_untuned(case)
    if limit is None:
        return ranked[0]
    ranked += [least_memory_choice(case)] if any(t[4] > 1 for _, t in case.defaults) else []
    return next((c for c in ranked if cost.estimate(case, c).held <= limit), default_choice(case))


def find_tuned(case: Case, key: Key) -> Choice | None:
    """The tuned choice stored under ``key``; None without one, or if it cannot run ``case``."""
    choice = plan_records.recall_choice(key)
    return choice if choice is not None and can_run(case, choice) else None


def default_choice(case: Case) -> Choice:
    """The engine's default tiles, by the schedule that every fold has."""
    if case.gpu and case.panels and not case.kernels:
        return Choice("panel")
    return name_schedule(case, Choice("flash", case.defaults))


def name_schedule(case: Case, choice: Choice) -> Choice:
    """The choice under its schedule's name: ``split`` if a kernel has several splits, else ``flash``."""
    cut = any(cost.count_splits(case, over, tile) > 1 for over, tile in choice.tiles)
    return Choice("split" if cut else "flash", choice.tiles)


def least_memory_choice(case: Case) -> Choice:
    """The choice that takes the least memory: no splits, whose partial results are buffers; default tiles."""
    found = default_choice(case)
    for way, tile in found.tiles:
        found = found.with_tile(way, (*tile[:4], 1, *tile[5:]))
    return found if found.schedule == "panel" else replace(found, schedule="flash")


def _list_kernel_candidates(
    case: Case, over: str | None, seconds: Callable[[Choice], float], others: Sequence[tuple[int, ...]] | None = None
) -> list[Choice]:
    """The choices of kernels; ``others``: the tiles tried beside the default ones, all of the table by default."""
    base = default_choice(case)
    found = [base, least_memory_choice(case)] if over is None else [base]
    narrow = max([0, *(case.features(e) for e in case.fold.leaves)]) <= 8
    sizes = others if others is not None else NARROW_TILES if narrow else KERNEL_TILES
    for way in folded_axes(case.fold) if over is None else (over,):
        own = base.tile(way)
        if own is not None:
            found += [base.with_tile(way, t) for t in _vary_tile(case, way, own, sizes)]
    if over is None:
        found.append(_combine_best_splits(base, found, seconds))
    return [name_schedule(case, c) for c in found]


def _combine_best_splits(base: Choice, found: Sequence[Choice], seconds: Callable[[Choice], float]) -> Choice:
    """The default tiles, each in its best number of splits: costs of kernels add up, so each is chosen alone."""
    best = base
    for way, own in base.tiles:
        parts = {t for c in found if (t := c.tile(way)) is not None and cost.same_tile(t, own)}
        best = best.with_tile(way, min(sorted(parts), key=lambda t: seconds(base.with_tile(way, t))))
    return best


def _vary_tile(
    case: Case, way: str, own: tuple[int, ...], sizes: Sequence[tuple[int, ...]]
) -> Iterator[tuple[int, ...]]:
    """Variations of a kernel's default tile ``own``: other tiles, with the default number of splits or one; the same
    tile in other numbers of splits if it leaves processors idle; the same tile with or without tensor descriptors."""
    copied = tuple(min(1, copies) for copies in own[5:])  # warp specialisation (2) has one tile
    for t in sizes:
        cut = cost.count_splits(case, way, (*t, own[4])) > 1
        yield from ((*t, splits, *copied) for splits in ((own[4], 1) if cut else (1,)))
    if cost.count_instances(case, way, own) < 2 * case.ceilings.processors:
        # every split fills its lists anew: H200, 10 nearest of 4096 x 10⁶ points in int8: 6.7 ms in 4 splits, 9.9 in 64
        lists = any(kind_of(r).selected(r.attrs[2]) > 1 for r in case.fold.reductions)
        most = cost.count_splits(case, way, (*own[:4], 0)) if lists else max(SPLITS)
        yield from ((*own[:4], splits, *copied) for splits in SPLITS if splits <= most)
    yield from ((*own[:5], int(not copies)) for copies in own[5:])


def _list_torch_candidates(case: Case) -> list[Choice]:
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
    if choice.schedule not in ("flash", "split", "panel") or (choice.schedule == "panel" and case.panels is False):
        return False
    if (kernels and not case.kernels) or (choice.tile("tile") and case.kernels):
        return False
    if not all(_is_power_of_two(n) for t in kernels for n in t[:3]) or not all(t[0] * t[1] <= 2**16 for t in kernels):
        return False
    limit = settings.requested_budget()
    return limit is None or cost.estimate(case, choice).held <= limit


def _is_power_of_two(n: int) -> bool:
    return n > 0 and not n & (n - 1)
