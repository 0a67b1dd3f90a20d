"""The schedules that could run a fold, what each costs, and the choice among them.

- :func:`rank_candidates`: all of them, for the tuner;
- :func:`rank_untuned`: those that may run without having been measured;
- :func:`choose`: what runs. A choice set by ``follow``, else a tuned plan, else the cheapest that the budget allows.

The cost model (:func:`estimate`): seconds, memory and traffic of one fold by a schedule, from op counts and a device's
rates.

The papers' section 3, for M rows and N columns in l × r slices, workers that take W column slices for each row slice,
and A, B and P bytes of a row's inputs, a column's inputs and a row's result:

    work     (equations 2, 6)  the work of all pairs, and r - 1 combinations of partial results per row
    time     (equations 3, 7)  the work divided by the workers, and no less than the longest chain
    memory   (equations 4, 8)  that of one slice
    traffic  (equations 5, 9)  forward: (r / W) M A + l N B + (r / W - 1) M P

Each ``_estimate_*`` function below fills these in for one way of running, dividing counted operations
by rates (both in ``op_counts.py``):

    seconds per pair = flops / GEMM rate + exponentials / special rate + other operations / plain rate

The gradient of a fold is a fold, so the same formulas serve forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..reductions import kind_of, outputs_of
from . import disk, schedule, settings
from .disk import Key
from .op_counts import Case, DeviceRates, Work, count_work, folded_axes, only_gathers
from .schedule import Choice, get_followed

OVERLAP = 0.6  # share of a kernel's arithmetic that MMAs do not hide (attention and MLPs on an H200)
PANEL_SLOWDOWN = (
    1.1  # panels in torch against tiles in torch, for the same counts (measured with attention: 1.03 to 1.4)
)
CLEARLY = 0.9  # the dense form must take at most this share of the fold's time to be worth its memory
GATHER_OPS = 11  # torch operators of one gather or scatter (counted)
STEPS = 36  # Python overhead of a tile besides its operators (slices, views, look-ups), in launches


@dataclass(frozen=True)
class Estimate:
    """The cost of one fold: operations of matrix products, bytes read and written, seconds, and memory."""

    flops: float
    bytes: float
    seconds: float
    held: int  # bytes of pairs at once
    peak: int  # bytes of all that is allocated: pairs, results, accumulators, copies


@dataclass(frozen=True)
class Part:
    """One fold of a call: how it would run, and its cost."""

    case: Case
    choice: Choice
    estimate: Estimate
    backward: bool


@dataclass(frozen=True)
class ScheduleCost:
    """The cost of a whole call by one schedule.

    ``flops`` of matrix products; ``bytes`` read and written; ``seconds``; ``held``: bytes of pairs at once; ``peak``:
    all bytes alive at once beside the inputs; ``sent``: bytes that one rank sends to others; ``results``: bytes of the
    dense form's results and gradients.
    """

    schedule: str
    flops: float
    bytes: float
    seconds: float
    held: int
    peak: int
    parts: tuple[Part, ...] = ()
    sent: float = 0.0
    ranks: int = 1
    results: int = 0


@dataclass(frozen=True)
class Cost:
    """The cost of a call by every schedule that could run it, the fastest first."""

    schedules: tuple[ScheduleCost, ...]
    ceilings: DeviceRates
    budget: int | None
    dense: int | None  # without a budget: bytes of pairs that the dense form may hold; None: it is never allowed
    backward: bool
    own: str = ""  # the schedule under which each fold runs by its own choice
    prefers_dense: bool | None = None  # as decided for all lengths of a class; None: by these seconds

    @property
    def chosen(self) -> ScheduleCost:
        """What a call on this device would run: its folds' own choices, or the fastest schedule that is allowed; dense
        only if it is clearly faster."""
        here = [s for s in self.schedules if s.ranks == 1 and s.schedule != "total"]
        folds = [s for s in here if s.schedule != "dense"]
        folds.sort(key=lambda s: s.schedule != self.own)
        fold = next((s for s in folds if self.allows(s)), folds[-1])
        dense = self.get("dense")
        if dense is None or not self.allows(dense):
            return fold
        faster = dense.seconds <= CLEARLY * fold.seconds if self.prefers_dense is None else self.prefers_dense
        return dense if faster else fold

    def allows(self, scheduled: ScheduleCost) -> bool:
        """True if a schedule fits in the budget; without one, if the dense form's pairs fit in ``dense`` bytes."""
        if scheduled.schedule == "dense":
            return self.dense is not None and fits_dense(scheduled, self.budget, self.dense)
        return self.budget is None or scheduled.held <= self.budget

    def with_schedule(self, scheduled: ScheduleCost) -> Cost:
        """The same with one more schedule."""
        return replace(self, schedules=tuple(sorted((*self.schedules, scheduled), key=lambda s: s.seconds)))

    def __getitem__(self, schedule: str) -> ScheduleCost:
        return next(s for s in self.schedules if s.schedule == schedule)

    def __contains__(self, schedule: object) -> bool:
        return any(s.schedule == schedule for s in self.schedules)

    def get(self, schedule: str, otherwise: ScheduleCost | None = None) -> ScheduleCost | None:
        return next((s for s in self.schedules if s.schedule == schedule), otherwise)

    def __str__(self) -> str:
        parts = [f"{s.schedule} {s.seconds * 1e3:.3g} ms, {s.peak / 1e6:.3g} MB" for s in self.schedules]
        return "; ".join(parts)


def fits_dense(dense: ScheduleCost, limit: int | None, otherwise: int) -> bool:
    """True if the dense form fits in the budget ``limit``; without one, if all but its results take ``otherwise``."""
    return dense.peak - dense.results <= otherwise if limit is None else dense.peak <= limit


def estimate(case: Case, choice: Choice) -> Estimate:
    """The cost of a fold run by ``choice``."""
    if not case.pairs():
        return Estimate(0.0, 0.0, case.ceilings.launch, 0, _count_result_bytes(case, count_work(case)))
    if only_gathers(case.fold):
        return _estimate_gathers(case)
    if choice.schedule == "panel":
        return _estimate_panel_choice(case, choice)
    return _estimate_kernels(case, choice) if case.kernels else _estimate_tiles(case, choice)


def _count_result_bytes(case: Case, work: Work) -> int:
    return case.batch * (case.rows * work.writes["rows"] + case.cols * work.writes["cols"])


def _count_input_bytes(case: Case, work: Work) -> int:
    return case.batch * (case.rows * work.reads["rows"] + case.cols * work.reads["cols"])


def _estimate_gathers(case: Case) -> Estimate:
    """Single pairs per row or column, gathered in chunks by torch (``engines/common/label_gather.py``)."""
    work, rates, chunks, held = count_work(case), case.ceilings, 0, 0
    for r in case.fold.reductions:
        side, wide = (case.rows if r.attrs[2] == ("col",) else case.cols, case.features(r.args[0]) * case.widest)
        step = max(1, schedule.ELEMENTS // (case.batch * wide))
        chunks += -(-side // step)
        held = max(held, min(side, step) * case.batch * wide * case.wide)
    results = _count_result_bytes(case, work)
    traffic = _count_input_bytes(case, work) + 2 * _GATHER_PASSES * results
    seconds = traffic / rates.bandwidth + chunks * GATHER_OPS * rates.launch
    return Estimate(0.0, traffic, seconds, held, _GATHER_PASSES * held + results)


_GATHER_PASSES = 4  # gather, multiply, sum, add: each reads and writes the gathered vectors


def forward_cost(l: int, r: int, L: int, R: int, A: int, B: int, P: int, W: float = 1) -> float:
    """Equation 5: all bytes read and combined for L rows in l slices and R columns in r slices,

        (r / W) L A + l R B + (r / W - 1) L P

    where a worker takes W column slices for each row slice, reads the row slice once and combines them locally.

    >>> forward_cost(l=1, r=1, L=10, R=20, A=4, B=8, P=4)
    200.0
    """
    groups = r / W
    return groups * L * A + l * R * B + (groups - 1) * L * P


def backward_cost(l: int, r: int, L: int, R: int, A: int, B: int, P: int, W: float = 1) -> float:
    """Equation 9: the same for the gradients, which also read results and cotangents and are summed on both sides,

        2 (r / W) L (A + P) + 2 l R B

    >>> backward_cost(l=1, r=1, L=10, R=20, A=4, B=8, P=4)
    480.0
    """
    return 2 * (r / W) * L * (A + P) + 2 * l * R * B


# Tiles in torch -----------------------------------------------------------------------------------------------


def _estimate_tiles(case: Case, choice: Choice) -> Estimate:
    work, rates = count_work(case), case.ceilings
    b, r, c = choice.tile("tile") or (1, schedule.ROWS, schedule.COLS)
    r, c, b = min(r, case.rows), min(c, case.cols), min(b, case.batch)
    shape = (-(-case.batch // b), -(-case.rows // r), -(-case.cols // c))
    pairs = case.pairs(r, c)
    number = shape[0] * shape[1] * shape[2] * pairs / (case.batch * case.rows * case.cols)
    tile = b * r * c
    far = tile * case.wide * 2 > rates.cache / 2
    plain = 1 / rates.plain if not far else max(1 / rates.plain, 2 * case.wide / rates.bandwidth)
    if any(kind_of(r).folds_trees for r in case.fold.reductions):
        plain = torch_number_seconds(rates, case.wide)
    products = work.flops / (rates.rate(_find_product_dtype(case)) * rates.efficiency(r, c, case.widest))
    seconds = pairs * (products + work.plain * plain + work.special / rates.special)
    seconds += number * (STEPS + case.steps) * rates.launch
    seconds += _count_result_bytes(case, work) * shape[2] * 2 / rates.bandwidth  # equation 2: combining partial results
    traffic = (
        number * (b * r * work.reads["rows"] + b * c * work.reads["cols"]) + _count_result_bytes(case, work) * shape[2]
    )
    held = tile * case.tile
    peak = held + case.fixed + 2 * _count_result_bytes(case, work)
    return Estimate(work.flops * pairs, traffic, seconds, held, peak)


def torch_number_seconds(rates: DeviceRates, size: int) -> float:
    """Seconds of one number of an operator of torch on tensors in memory: it reads two, of ``size`` bytes, and writes
    one, whose line is read first."""
    return max(1 / rates.plain, 4 * size / rates.bandwidth)


def _find_product_dtype(case: Case) -> str:
    return case.dtype if case.dtype in case.ceilings.gemm else "float32" if case.wide == 4 else "float64"


# Kernels ------------------------------------------------------------------------------------------------------


def _estimate_kernels(case: Case, choice: Choice) -> Estimate:
    """The costs of the kernels, added up: those of each axis and tile are estimated once for a case."""
    seconds = traffic = flops = 0.0
    held = 0
    for over in folded_axes(case.fold):
        own = choice.tile(over) or dict(case.defaults).get(over) or (64, 64, 4, 2, 0)
        found = case.estimated.get((over, own))
        if found is None:
            found = case.estimated[over, own] = _estimate_kernel(case, over, own)
        seconds, traffic, flops, held = seconds + found[0], traffic + found[1], flops + found[2], held + found[3]
    return Estimate(flops, traffic, seconds, held, held + _count_result_bytes(case, count_work(case)))


def _estimate_kernel(case: Case, over: str, own: tuple[int, ...]) -> tuple[float, float, float, int]:
    """Seconds, traffic, flops and bytes held of one kernel with the tile ``own``."""
    rates, work = case.ceilings, count_work(case, over)
    kept, folded = (case.rows, case.cols) if over == "cols" else (case.cols, case.rows)
    splits = _choose_splits(own, kept, folded, case)
    instances = case.batch * -(-kept // own[0]) * splits
    warps = own[2] * (2 if 2 in own[5:] else 1)  # two consumer warp groups in a warp-specialised kernel
    busy = _estimate_occupancy(case, over, instances, warps)  # equation 3
    reuse = _estimate_slowdown(own, dict(case.defaults).get(over, own))
    pair = work.flops / rates.rate(case.dtype) + OVERLAP * (work.special / rates.special + work.plain / rates.plain)
    result = case.batch * kept * work.writes["rows" if over == "cols" else "cols"]
    side, other = ("rows", "cols") if over == "cols" else ("cols", "rows")
    slices = -(-kept // own[0]), max(1, -(-folded // own[1]))
    each = work.reads[side], work.reads[other], work.writes[side]
    read = forward_cost(*slices, kept, folded, *each, W=slices[1] / splits) * case.batch
    pairs = case.pairs(*(own[:2] if over == "cols" else own[1::-1]))
    started = 1 + START_UP * (splits - 1) / slices[1]
    time = pairs * pair * reuse * started / max(busy, 1e-9)
    time = max(time, _count_input_bytes(case, work) / rates.bandwidth) + (splits > 1) * (
        2 * result * splits / rates.bandwidth
    )
    seconds = time + rates.launch * (1 + (splits > 1) * _count_combine_launches(case, over))
    return seconds, read + result, work.flops * pairs, result * splits if splits > 1 else 0


def _estimate_occupancy(case: Case, over: str, instances: int, warps: int) -> float:
    """The share of a device's rate that so many program instances reach.

    The processor with the most instances finishes last, and few warps do not hide latencies:

        share = instances / (most per processor × processors) × min(1, 0.4 + 0.6 × resident warps / full warps)

    Fitted to 75 kernels in 1 to 64 splits on an H200."""
    most = -(-instances // case.ceilings.processors)
    results = [f for r in case.fold.reductions if r.attrs[1] == over for f, _ in outputs_of(r)]
    full = _FULL_OF_FEW if case.widest <= _FEW else _FULL if any(f is not None for f in results) else _FULL_OF_NUMBERS
    return instances / max(1, most * case.ceilings.processors) * min(1.0, 0.4 + 0.6 * most * warps / full)


START_UP = 1.5  # tiles that a program instance could have folded while it loads its first blocks
_FEW = 8  # features up to which a kernel uses no MMAs
# Warps with which a processor reaches its rate: with MMAs, of results that are numbers (whose kernels have registers to
# spare: H200, 8192 to 16384 rows, D 128 and 64, two instances take 0.60 to 0.87 of one's time), and without MMAs
_FULL, _FULL_OF_NUMBERS, _FULL_OF_FEW = 8, 16, 24


def _count_combine_launches(case: Case, over: str) -> int:
    """Launches that combine the partial results of splits."""
    return sum(kind_of(r).combine_ops for r in case.fold.reductions if r.attrs[1] == over)


def _estimate_slowdown(tile: tuple[int, ...], own: tuple[int, ...]) -> float:
    """The predicted slowdown of a tile against the engine's default ``own``, which was measured."""
    ratio = (1 + 8 / tile[0] + 8 / tile[1]) / (1 + 8 / own[0] + 8 / own[1])
    return 1.0 if same_tile(tile, own) else max(1.02, ratio)


def same_tile(tile: tuple[int, ...], own: tuple[int, ...]) -> bool:
    """True if two tiles of a kernel differ in the number of splits at most."""
    return (*tile[:4], *tile[5:]) == (*own[:4], *own[5:])


def count_splits(case: Case, over: str, tile: tuple[int, ...]) -> int:
    """The number of splits of a kernel's folded axis."""
    kept, folded = (case.rows, case.cols) if over == "cols" else (case.cols, case.rows)
    return _choose_splits(tile, kept, folded, case)


def count_instances(case: Case, over: str, tile: tuple[int, ...]) -> int:
    """The number of program instances of a kernel without splits."""
    return case.batch * -(-(case.rows if over == "cols" else case.cols) // tile[0])


def _choose_splits(tile: tuple[int, ...], kept: int, folded: int, case: Case) -> int:
    """The number of splits: the tile's own, or the engine's choice if the tile leaves it open (0)."""
    if tile[4]:
        return min(tile[4], max(1, -(-folded // tile[1])))
    instances, most = case.batch * -(-kept // tile[0]), -(-folded // tile[1])
    if not instances or instances * 2 > case.ceilings.processors:
        return 1
    return max(1, min(2 * case.ceilings.processors // instances, most // 8, 64))


# Panels ---------------------------------------------------------------------------------------------------------


def _estimate_panel_choice(case: Case, choice: Choice) -> Estimate:
    (room,) = choice.tile("room") or (min(ROOM, settings.requested_budget() or ROOM),)
    return estimate_panels(case, count_work(case), room)


def estimate_panels(case: Case, work: Work, room: int = 0) -> Estimate:
    """The cost of some work done one panel at a time, in ``room`` bytes.

    Each pair's product is written, read, perhaps overwritten, and read again. Without kernels everything but the
    products is done to a panel in tiles of torch.
    """
    rates, pairs = case.ceilings, case.batch * case.rows * case.cols
    item = case.item if case.gpu else case.wide
    row, room = max(1, case.cols * item), room or ROOM
    tiles = 0 if case.gpu else min(room // 4, schedule.ELEMENTS * schedule.HELD)
    rows = max(1, min(case.rows, (room - tiles) // row))
    number, tile = -(-case.rows // rows), max(1, min(rows * case.cols, tiles // schedule.HELD))
    held = rows * row + (0 if case.gpu else tile * case.tile)
    again = case.batch * case.cols * (work.writes["cols"] + work.reads["cols"]) * number
    traffic = pairs * 4 * item + again + _count_input_bytes(case, work)
    pair = work.flops / (
        rates.rate(_find_product_dtype(case)) * rates.efficiency(min(rows, 1024), case.cols, case.widest)
    )
    pair += work.special / rates.special + work.plain / rates.plain + 4 * item / rates.bandwidth
    steps = STEPS if case.gpu else (STEPS + case.steps) * -(-rows * case.cols // tile)
    seconds = pairs * pair + again / rates.bandwidth + case.batch * number * steps * rates.launch
    seconds *= 1.0 if case.gpu else PANEL_SLOWDOWN
    return Estimate(work.flops * pairs, traffic, seconds, held, held + _count_result_bytes(case, work) + case.fixed)


ROOM = 256 * 2**20  # bytes of panels unless a choice or a budget says otherwise


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
        return all(same_tile(t, own[way]) and own[way][4] in (0, t[4]) for way, t in choice.tiles)

    return _rank(case, list(filter(is_default, found)), seconds)


def _estimate_once(case: Case) -> Callable[[Choice], float]:
    """The predicted seconds of choices, each computed once: of kernels only the tiles count."""
    known: dict[tuple, float] = {}

    def seconds(choice: Choice) -> float:
        key = (choice.schedule == "panel", *sorted(choice.tiles))
        if key not in known:
            known[key] = estimate(case, choice).seconds
        return known[key]

    return seconds


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
    return next((c for c in ranked if estimate(case, c).held <= limit), default_choice(case))


def find_tuned(case: Case, key: Key) -> Choice | None:
    """The tuned choice stored under ``key``; None without one, or if it cannot run ``case``."""
    choice = disk.recall_choice(key)
    return choice if choice is not None and can_run(case, choice) else None


def default_choice(case: Case) -> Choice:
    """The engine's default tiles, by the schedule that every fold has."""
    if case.gpu and case.panels and not case.kernels:
        return Choice("panel")
    return name_schedule(case, Choice("flash", case.defaults))


def name_schedule(case: Case, choice: Choice) -> Choice:
    """The choice under its schedule's name: ``split`` if a kernel has several splits, else ``flash``."""
    cut = any(count_splits(case, over, tile) > 1 for over, tile in choice.tiles)
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
        parts = {t for c in found if (t := c.tile(way)) is not None and same_tile(t, own)}
        best = best.with_tile(way, min(sorted(parts), key=lambda t: seconds(base.with_tile(way, t))))
    return best


def _vary_tile(
    case: Case, way: str, own: tuple[int, ...], sizes: Sequence[tuple[int, ...]]
) -> Iterator[tuple[int, ...]]:
    """Variations of a kernel's default tile ``own``: other tiles, with the default number of splits or one; the same
    tile in other numbers of splits if it leaves processors idle; the same tile with or without tensor descriptors."""
    copied = tuple(min(1, copies) for copies in own[5:])  # warp specialisation (2) has one tile
    for t in sizes:
        cut = count_splits(case, way, (*t, own[4])) > 1
        yield from ((*t, splits, *copied) for splits in ((own[4], 1) if cut else (1,)))
    if count_instances(case, way, own) < 2 * case.ceilings.processors:
        # every split fills its lists anew: H200, 10 nearest of 4096 x 10⁶ points in int8: 6.7 ms in 4 splits, 9.9 in 64
        lists = any(kind_of(r).selected(r.attrs[2]) > 1 for r in case.fold.reductions)
        most = count_splits(case, way, (*own[:4], 0)) if lists else max(SPLITS)
        yield from ((*own[:4], splits, *copied) for splits in SPLITS if splits <= most)
    yield from ((*own[:5], int(not copies)) for copies in own[5:])


def _list_torch_candidates(case: Case) -> list[Choice]:
    found = []
    for rows, cols in TORCH_TILES if case.width == 1 else ():
        r, c = min(rows, max(1, case.rows)), min(cols, max(1, case.cols))
        b = min(max(1, case.batch), max(1, schedule.ELEMENTS // (r * c * case.width)))
        found.append(Choice("flash", (("tile", (b, r, c)),)))
    own = schedule.choose_tiles(case.batch, case.rows, case.cols, case.width)
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
    return limit is None or estimate(case, choice).held <= limit


def _is_power_of_two(n: int) -> bool:
    return n > 0 and not n & (n - 1)
