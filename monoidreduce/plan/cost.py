"""What a schedule costs: time, memory and traffic of one fold, from the papers' equations and a device's ceilings.

Equations 2 and 6 give the work (that of the whole fold, and ``r - 1`` combinations of partial results), 3 and 7 the
time on N workers (the work divided, and no less than the longest chain), 4 and 8 the memory of a slice, 5 and 9 the
traffic (``communication.py``). The gradient's fold is a fold like any other, so one set of formulas serves both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..reductions import kind_of
from . import budget
from . import tiles as tiling
from .communication import forward_cost
from .device_rates import Ceilings
from .op_counts import Case, Work, count, directions, gathers
from .schedule import Choice

OVERLAP = 0.6  # of a kernel's arithmetic, what its matrix products do not hide (attention and perceptrons on an H200)
ASIDE = 1.1  # panels of torch against tiles of torch, at the same count (measured with attention: 1.03 to 1.4)
CLEARLY = 0.9  # of a fold's time, what the dense form may take at most to be worth its memory
GATHERED = 11  # torch operations of a gather, or a scatter (counted)
STEPS = 36  # launches' worth of Python that a tile takes besides its arithmetic: slices, views, look-ups


@dataclass(frozen=True)
class Estimate:
    """Of one fold: floating operations of matrix products, bytes read and written, seconds, and bytes held."""

    flops: float
    bytes: float
    seconds: float
    held: int  # of pairs, at once
    peak: int  # and all else that is allocated: results, totals, copies


@dataclass(frozen=True)
class Part:
    """One fold of a call: how it would run, and what that costs."""

    case: Case
    choice: Choice
    estimate: Estimate
    backward: bool


@dataclass(frozen=True)
class Scheduled:
    """A whole call by one schedule.

    ``flops`` of matrix products; ``bytes`` read and written; ``seconds``; ``held``: bytes of pairs at once; ``peak``:
    all bytes alive at once beside the inputs; ``sent``: bytes that one rank sends to others.
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


@dataclass(frozen=True)
class Cost:
    """What a call costs by every schedule that could run it, the fastest first."""

    schedules: tuple[Scheduled, ...]
    ceilings: Ceilings
    budget: int | None
    dense: int | None  # bytes of one matrix of pairs that may be built where no budget was given; None: none at all
    backward: bool

    @property
    def chosen(self) -> Scheduled:
        """What a call on this device would run: the fastest of those that are allowed; dense must be clearly faster."""
        here = [s for s in self.schedules if s.ranks == 1 and s.schedule != "total"]
        folds = [s for s in here if s.schedule != "dense"]
        fold = next((s for s in folds if self.allows(s)), folds[-1])
        dense = self.get("dense")
        if dense is not None and self.allows(dense) and dense.seconds <= CLEARLY * fold.seconds:
            return dense
        return fold

    def allows(self, scheduled: Scheduled) -> bool:
        """Whether the budget has room for a schedule; without one, a matrix of pairs may have ``dense`` bytes."""
        if scheduled.schedule == "dense":
            if self.dense is None:
                return False
            return scheduled.held <= self.dense if self.budget is None else scheduled.peak <= self.budget
        return self.budget is None or scheduled.held <= self.budget

    def having(self, scheduled: Scheduled) -> Cost:
        """The same with one schedule more."""
        return replace(self, schedules=tuple(sorted((*self.schedules, scheduled), key=lambda s: s.seconds)))

    def __getitem__(self, schedule: str) -> Scheduled:
        return next(s for s in self.schedules if s.schedule == schedule)

    def __contains__(self, schedule: object) -> bool:
        return any(s.schedule == schedule for s in self.schedules)

    def get(self, schedule: str, otherwise: Scheduled | None = None) -> Scheduled | None:
        return next((s for s in self.schedules if s.schedule == schedule), otherwise)

    def __str__(self) -> str:
        parts = [f"{s.schedule} {s.seconds * 1e3:.3g} ms, {s.peak / 1e6:.3g} MB" for s in self.schedules]
        return "; ".join(parts)


def estimate(case: Case, choice: Choice) -> Estimate:
    """The cost of a fold run by a choice."""
    if not case.pairs():
        return Estimate(0.0, 0.0, case.ceilings.launch, 0, _results(case, count(case)))
    if gathers(case.fold):
        return _gathers(case)
    if choice.schedule == "panel":
        return _panel(case, choice)
    return _kernels(case, choice) if case.kernels else _tiles(case, choice)


def _results(case: Case, work: Work) -> int:
    return case.batch * (case.rows * work.writes["rows"] + case.cols * work.writes["cols"])


def _inputs(case: Case, work: Work) -> int:
    return case.batch * (case.rows * work.reads["rows"] + case.cols * work.reads["cols"])


def _gathers(case: Case) -> Estimate:
    """Single pairs: torch's operations on the vectors of one side, some of them at a time
    (``engines/common/label_gather.py``)."""
    work, roof, chunks, held = count(case), case.ceilings, 0, 0
    for r in case.fold.reductions:
        side, wide = case.rows if r.attrs[2] == ("col",) else case.cols, case.features(r.args[0]) * _widest(case)
        step = max(1, tiling.ELEMENTS // (case.batch * wide))
        chunks += -(-side // step)
        held = max(held, min(side, step) * case.batch * wide * case.wide)
    results = _results(case, work)
    traffic = _inputs(case, work) + 2 * len(_TURNS) * results
    seconds = traffic / roof.bandwidth + chunks * GATHERED * roof.launch
    return Estimate(0.0, traffic, seconds, held, len(_TURNS) * held + results)


_TURNS = ("gathered", "multiplied", "summed", "added")  # of what is found at a place: each reads and writes it


# Tiles of torch -------------------------------------------------------------------------------------------------


def _tiles(case: Case, choice: Choice) -> Estimate:
    work, roof = count(case), case.ceilings
    b, r, c = choice.tile("tile") or (1, tiling.ROWS, tiling.COLS)
    r, c, b = min(r, case.rows), min(c, case.cols), min(b, case.batch)
    shape = (-(-case.batch // b), -(-case.rows // r), -(-case.cols // c))
    pairs = case.pairs(r, c)
    number = shape[0] * shape[1] * shape[2] * pairs / (case.batch * case.rows * case.cols)
    tile = b * r * c
    far = tile * case.wide * 2 > roof.cache / 2
    plain = 1 / roof.plain if not far else max(1 / roof.plain, 2 * case.wide / roof.bandwidth)
    products = work.flops / (roof.rate(_multiplied(case)) * roof.efficiency(r, c, _widest(case)))
    seconds = pairs * (products + work.plain * plain + work.special / roof.special)
    seconds += number * (STEPS + case.steps) * roof.launch
    seconds += _results(case, work) * shape[2] * 2 / roof.bandwidth  # equation 2: combining partial results
    traffic = number * (b * r * work.reads["rows"] + b * c * work.reads["cols"]) + _results(case, work) * shape[2]
    held = tile * case.tile
    peak = held + case.fixed + 2 * _results(case, work)
    return Estimate(work.flops * pairs, traffic, seconds, held, peak)


def _widest(case: Case) -> int:
    return max([1, *(case.features(e) for e in case.fold.leaves)])


def _multiplied(case: Case) -> str:
    return case.dtype if case.dtype in case.ceilings.gemm else "float32" if case.wide == 4 else "float64"


# Kernels --------------------------------------------------------------------------------------------------------


def _kernels(case: Case, choice: Choice) -> Estimate:
    roof = case.ceilings
    seconds = traffic = flops = 0.0
    held = 0
    for over in directions(case.fold):
        work = count(case, over)
        kept, folded = (case.rows, case.cols) if over == "cols" else (case.cols, case.rows)
        own = choice.tile(over) or dict(case.defaults).get(over) or (64, 64, 4, 2, 0)
        parts = _parts(own, kept, folded, case)
        instances = case.batch * -(-kept // own[0]) * parts
        warps = own[2] * (2 if 2 in own[5:] else 1)  # two groups of them, where these take turns
        busy = _busy(case, instances, warps)  # equation 3
        reuse = _reuse(own, dict(case.defaults).get(over, own))
        pair = work.flops / roof.rate(case.dtype) + OVERLAP * (work.special / roof.special + work.plain / roof.plain)
        result = case.batch * kept * work.writes["rows" if over == "cols" else "cols"]
        side, other = ("rows", "cols") if over == "cols" else ("cols", "rows")
        slices = -(-kept // own[0]), max(1, -(-folded // own[1]))
        each = work.reads[side], work.reads[other], work.writes[side]
        read = forward_cost(*slices, kept, folded, *each, W=slices[1] / parts) * case.batch
        pairs = case.pairs(*(own[:2] if over == "cols" else own[1::-1]))
        time = pairs * pair * reuse / max(busy, 1e-9)
        time = max(time, _inputs(case, work) / roof.bandwidth) + (parts > 1) * (2 * result * parts / roof.bandwidth)
        seconds += time + roof.launch * (1 + (parts > 1) * _combining(case, over))
        traffic += read + result
        flops += work.flops * pairs
        held += result * parts if parts > 1 else 0
    return Estimate(flops, traffic, seconds, held, held + _results(case, count(case)))


def _busy(case: Case, instances: int, warps: int) -> float:
    """The share of a device's rate that so many program instances reach: the processor that has the most of them ends
    last, and few warps cannot do everything at once. (Walks cut in 1 to 64 parts on an H200, 75 kernels.)"""
    most = -(-instances // case.ceilings.processors)
    full = _FULL if _widest(case) > _FEW else _FULL_OF_FEW
    return instances / max(1, most * case.ceilings.processors) * min(1.0, 0.4 + 0.6 * most * warps / full)


_FEW = 8  # features, up to which a kernel has no matrix products
_FULL, _FULL_OF_FEW = 8, 24  # warps with which a processor is at its rate: with matrix products, and without


def _combining(case: Case, over: str) -> int:
    """Launches that put the parts of a split walk together."""
    return sum(kind_of(r).combine_ops for r in case.fold.reductions if r.attrs[1] == over)


def _reuse(tile: tuple[int, ...], own: tuple[int, ...]) -> float:
    """How much slower than the engine's own tile, which was measured, another is thought to be."""
    ratio = (1 + 8 / tile[0] + 8 / tile[1]) / (1 + 8 / own[0] + 8 / own[1])
    return 1.0 if same(tile, own) else max(1.02, ratio)


def same(tile: tuple[int, ...], own: tuple[int, ...]) -> bool:
    """Whether two tiles of a kernel differ in the number of parts at most."""
    return (*tile[:4], *tile[5:]) == (*own[:4], *own[5:])


def parts_of(case: Case, over: str, tile: tuple[int, ...]) -> int:
    """Into how many parts the folded axis of a kernel is cut."""
    kept, folded = (case.rows, case.cols) if over == "cols" else (case.cols, case.rows)
    return _parts(tile, kept, folded, case)


def instances(case: Case, over: str, tile: tuple[int, ...]) -> int:
    """How many program instances a kernel has whose folded axis is not cut."""
    return case.batch * -(-(case.rows if over == "cols" else case.cols) // tile[0])


def _parts(tile: tuple[int, ...], kept: int, folded: int, case: Case) -> int:
    """Into how many parts the engine cuts the folded axis where the plan leaves it open (0)."""
    if tile[4]:
        return min(tile[4], max(1, -(-folded // tile[1])))
    instances, most = case.batch * -(-kept // tile[0]), -(-folded // tile[1])
    if not instances or instances * 2 > case.ceilings.processors:
        return 1
    return max(1, min(2 * case.ceilings.processors // instances, most // 8, 64))


# Panels ---------------------------------------------------------------------------------------------------------


def _panel(case: Case, choice: Choice) -> Estimate:
    (room,) = choice.tile("room") or (min(ROOM, budget.asked() or ROOM),)
    return panels(case, count(case), room)


def panels(case: Case, work: Work, room: int = 0) -> Estimate:
    """Some work done a panel at a time, in ``room`` bytes: products are written, read, perhaps overwritten, read.

    Without kernels everything but the products is done to a panel in tiles of torch.
    """
    roof, pairs = case.ceilings, case.batch * case.rows * case.cols
    item = case.item if case.gpu else case.wide
    row, room = max(1, case.cols * item), room or ROOM
    tiles = 0 if case.gpu else min(room // 4, tiling.ELEMENTS * tiling.HELD)
    rows = max(1, min(case.rows, (room - tiles) // row))
    number, tile = -(-case.rows // rows), max(1, min(rows * case.cols, tiles // tiling.HELD))
    held = rows * row + (0 if case.gpu else tile * case.tile)
    again = case.batch * case.cols * (work.writes["cols"] + work.reads["cols"]) * number
    traffic = pairs * 4 * item + again + _inputs(case, work)
    pair = work.flops / (roof.rate(_multiplied(case)) * roof.efficiency(min(rows, 1024), case.cols, _widest(case)))
    pair += work.special / roof.special + work.plain / roof.plain + 4 * item / roof.bandwidth
    steps = STEPS if case.gpu else (STEPS + case.steps) * -(-rows * case.cols // tile)
    seconds = pairs * pair + again / roof.bandwidth + case.batch * number * steps * roof.launch
    seconds *= 1.0 if case.gpu else ASIDE
    return Estimate(work.flops * pairs, traffic, seconds, held, held + _results(case, work) + case.fixed)


ROOM = 256 * 2**20  # bytes of panels where nothing else is said
