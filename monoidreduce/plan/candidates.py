"""What a fold costs by every schedule that could run it, and the choice among them.

From the ground up: the rates of devices; op counts of a fold (matrix products, arithmetic per pair, bytes read and
written); the cost model (:func:`estimate`): seconds, memory and traffic of one fold by a schedule; and

- :func:`rank_candidates`: all candidates, for the tuner;
- :func:`rank_untuned`: those that may run without having been measured;
- :func:`choose`: what runs. A choice set by ``follow``, else a tuned plan, else the cheapest that the budget allows.

A :class:`Case` is one fold at one size on one device: all that the choice of a schedule depends on. It holds no
tensors. :func:`count_work` returns a :class:`Work`: operations per pair and bytes per row and per column. Costs are
bilinear in the sizes (the papers' section 3), so a slice of m rows and n columns takes

    m n × (operations per pair)    and    m × (bytes per row) + n × (bytes per column)

For M rows and N columns in l × r slices, workers that take W column slices for each row slice, and A, B and P bytes of
a row's inputs, a column's inputs and a row's result:

    work     (equations 2, 6)  the work of all pairs, and r - 1 combinations of partial results per row
    time     (equations 3, 7)  the work divided by the workers, and no less than the longest chain
    memory   (equations 4, 8)  that of one slice
    traffic  (equations 5, 9)  forward: (r / W) M A + l N B + (r / W - 1) M P

Each ``_estimate_*`` function below fills these in for one way of running, dividing counted operations by rates:

    seconds per pair = flops / GEMM rate + exponentials / special rate + other operations / plain rate

The gradient of a fold is a fold, so the same formulas serve forward and backward.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ..program.constructors import ONE, Contraction
from ..program.expression import Expr, letters, topological
from ..program.lower import Fold
from ..program.primitives import PRIMITIVES
from ..program.several import DOTS, is_product
from ..reductions import kind_of, outputs_of
from . import schedule, settings
from .schedule import Choice, Key, family_name, get_followed, middle_length, round_length

# Device rates: what the cost model divides by.
#
#     seconds = max(bytes / bandwidth, flops / (GEMM rate × efficiency), operations / plain or special rate) + launch
#
# GPUs are in a table, by family. Hopper's GEMM rates, bandwidth and launch time were measured on an H200; its
# arithmetic rates, caches and links are the vendor's figures. Other families were not measured: they have the vendor's
# peaks at the shares that an H200 reached. CPUs differ too much for a table: :func:`measure_cpu` measures this one, in
# 20 to 30 ms, once per process.


@dataclass(frozen=True)
class DeviceRates:
    """Rates of one device, per second; sizes in bytes, costs in seconds."""

    name: str
    gemm: Mapping[str, float]  # flops of matrix products, by type
    bandwidth: float  # bytes from and to memory
    plain: float  # simple operations on numbers in registers or in the nearest cache
    special: float  # exponentials
    launch: float  # seconds of host time per operator
    cache: int  # the last cache before memory
    near: int  # the cache of one processor; on GPUs its shared memory
    link: float  # bytes that one rank sends to another
    fresh: float = 0.0  # seconds per byte of memory written for the first time (page faults)
    half: int = 0  # the side of a square product that reaches half the full rate; 0: every product reaches it
    processors: int = 1
    source: str = "measured"  # where the numbers come from

    def rate(self, dtype: str) -> float:
        """Flops per second of matrix products of a type; types not in the table run in float32."""
        return self.gemm.get(dtype, self.gemm["float32"])

    def efficiency(self, *sides: float) -> float:
        """The share of the full rate that a product reaches: s t / (s t + half²) for its two longest sides s and t."""
        _, long, longest = sorted((1.0, *sides))[-3:]
        return long * longest / (long * longest + self.half**2)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "gemm": dict(self.gemm)}

    def __hash__(self) -> int:
        return hash((self.name, self.bandwidth, self.plain, self.special, self.launch))


def _make_gpu(name: str, half: float, single: float, double: float, **rest: Any) -> DeviceRates:
    return DeviceRates(name, {"bfloat16": half, "float16": half, "float32": single, "float64": double}, **rest)


_MEASURED = "H200: benchmarks.gpu and benchmarks.gpu_wide, 2026-11-15"
_DERIVED = "the vendor's peaks, at the shares measured on an H200"

# float32 is the rate without tensor cores; mr.use(precision=) and large folds may use them
GPUS = {
    "hopper": _make_gpu(
        "H100/H200",
        7.2e14,
        4.5e13,
        4.5e13,
        bandwidth=4.0e12,
        plain=2.9e13,
        special=3.7e12,
        launch=5e-6,
        cache=50 * 2**20,
        near=232_448,
        link=4.0e11,
        processors=132,
        source=_MEASURED,
    ),
    "ampere": _make_gpu(
        "A100",
        2.3e14,
        1.4e13,
        1.4e13,
        bandwidth=1.6e12,
        plain=9.7e12,
        special=2.4e12,
        launch=5e-6,
        cache=40 * 2**20,
        near=166_912,
        link=2.5e11,
        processors=108,
        source=_DERIVED,
    ),
    "ada": _make_gpu(
        "L4/RTX 4090",
        9.0e13,
        2.2e13,
        3.5e11,
        bandwidth=2.5e11,
        plain=1.5e13,
        special=1.9e12,
        launch=5e-6,
        cache=48 * 2**20,
        near=101_376,
        link=2.0e10,
        processors=58,
        source=_DERIVED,
    ),
}


def get_rates(device: torch.device) -> DeviceRates:
    """The rates of a device."""
    if device.type == "cuda" and torch.cuda.is_available():
        return _get_gpu_rates(device)
    return GPUS["hopper"] if device.type == "cuda" else measure_cpu(torch.get_num_threads())


@functools.cache
def _get_gpu_rates(device: torch.device) -> DeviceRates:
    """The rates of a GPU's family, scaled to its number of processors."""
    found = torch.cuda.get_device_properties(device)
    base = GPUS[family_name(found.major, found.minor)]
    share = found.multi_processor_count / base.processors
    if abs(share - 1) < 0.05:
        return base
    return replace(
        base,
        name=found.name,
        gemm={k: v * share for k, v in base.gemm.items()},
        bandwidth=base.bandwidth * share,
        plain=base.plain * share,
        special=base.special * share,
        processors=found.multi_processor_count,
        source=_DERIVED,
    )


# fitted to attention, MLPs and losses, dense and in tiles, on one core of a Neoverse N1 (benchmarks/planner.py)
_FAULT = 4e-7  # seconds to map and clear a page of 4096 bytes
_HALF = 200
_SOCKET = 2.0e9  # bytes per second between processes of one machine: an assumption, only used to rank layouts

# CPUs ---------------------------------------------------------------------------------------------------------


@functools.cache
def measure_cpu(threads: int) -> DeviceRates:
    """This CPU's rates with ``threads`` threads, measured once per process: 20 to 30 ms.

    >>> import torch
    >>> measure_cpu(torch.get_num_threads()).rate("float32") > 1e9
    True
    """
    with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
        side, long = 384, 2**18
        a, b, c = (torch.ones(side, side, device="cpu") for _ in range(3))
        x, y = torch.full((long,), 0.5, device="cpu"), torch.empty(long, device="cpu")
        far = torch.ones(2**21, device="cpu")
        into = torch.empty_like(far)
        tiny = torch.ones(8, device="cpu")
        single = 2 * side**3 / _time_best(lambda: torch.mm(a, b, out=c), 2)
        double = [t.double() for t in (a[:192, :192], b[:192, :192], c[:192, :192])]
        wide = 2 * 192**3 / _time_best(lambda: torch.mm(double[0], double[1], out=double[2]))
        return DeviceRates(
            f"CPU, {threads} thread{'s' if threads != 1 else ''}",
            {"float32": single, "float64": wide},
            bandwidth=2 * far.numel() * 4 / _time_best(lambda: into.copy_(far), 2),
            plain=long / _time_best(lambda: torch.mul(x, x, out=y)),
            special=long / _time_best(lambda: torch.exp(x, out=y)),
            launch=_time_best(lambda: [torch.mul(tiny, tiny, out=tiny) for _ in range(50)]) / 50,
            cache=_read_cache_size(3, 32 * 2**20),
            near=_read_cache_size(2, 2**20),
            link=_SOCKET,
            fresh=_FAULT / 4096,
            half=_HALF,
            processors=threads,
        )


def _time_best(call: Callable[[], object], rounds: int = 4) -> float:
    """The least seconds of a few calls after a warm-up; with one thread, in thread time, which ignores other load."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    found = []
    for _ in range(rounds + 1):
        start = clock()
        call()
        found.append(clock() - start)
    return max(min(found[1:]), 1e-9)


def _read_cache_size(level: int, otherwise: int) -> int:
    """Bytes of a cache level as reported by the system, or ``otherwise``."""
    try:
        size = os.sysconf(f"SC_LEVEL{level}_CACHE_SIZE")
    except (AttributeError, OSError, ValueError):
        size = 0
    return size if size > 0 else otherwise


# Op counts ----------------------------------------------------------------------------------------------------


SPECIAL = {name: p.cost for name, p in PRIMITIVES.items() if p.cost}  # in exponentials; others are plain arithmetic
FAST = SPECIAL | {name: p.fast for name, p in PRIMITIVES.items() if p.fast}  # in kernels of 16-bit programs
FEW_FEATURES = 16  # up to here squared distances are computed feature by feature, without matrix products
_OF_VECTORS = ("dot", "sqdist", "fsum", "famax", "famin")  # numbers per pair that are made of vectors


@dataclass(frozen=True)
class Case:
    """One fold at one size on one device."""

    fold: Fold
    name: str  # a digest of the fold, equal in every process
    rows: int
    cols: int
    batch: int
    letters: tuple[tuple[str, int], ...]
    dtype: str  # of its vectors: "bfloat16", "float32", ...
    item: int  # bytes of a number of its vectors
    wide: int  # bytes of a number in which arithmetic is done
    ceilings: DeviceRates
    kernels: bool = False  # it has generated kernels, whose accumulators stay in registers
    panels: bool | None = False  # it can run one panel at a time; None: if that is what is chosen, it is asked
    gpu: bool = False
    defaults: tuple[tuple[str, tuple[int, ...]], ...] = ()  # the engine's default tiles, by folded axis
    tile: int = 0  # bytes per pair of a tile in torch
    fixed: int = 0  # bytes of a tile in torch that do not grow with it
    width: int = 1  # numbers per pair that are folded as a vector
    steps: int = 0  # torch operators per tile
    seen: float = 1.0  # the share of the pairs that conditions on indices do not skip

    def pairs(self, rows: int = 0, cols: int = 0) -> float:
        """Pairs computed in tiles of ``rows`` × ``cols``: those not skipped, and the rest of tiles on a mask's edge."""
        cut = (rows / max(1, self.rows) + cols / max(1, self.cols)) / 4
        share = 1.0 if self.seen == 1 else min(1.0, self.seen + cut)
        return self.batch * self.rows * self.cols * share

    def rounded(self) -> Case:
        """The case that stands for all lengths of its class, whose schedule is the same: the longest one, so that what
        fits a budget there fits it here."""
        rows, cols = round_length(self.rows), round_length(self.cols)
        return self if (rows, cols) == (self.rows, self.cols) else replace(self, rows=rows, cols=cols)

    def typical(self) -> Case:
        """The case of a length in the middle of its class, by whose time schedules are compared: the longest one may
        begin another wave of program instances, of which the others know nothing."""
        rows, cols = middle_length(self.rows), middle_length(self.cols)
        return self if (rows, cols) == (self.rows, self.cols) else replace(self, rows=rows, cols=cols)

    @functools.cached_property
    def estimated(self) -> dict[tuple[str, tuple[int, ...]], tuple[float, float, float, int]]:
        """What was estimated of its kernels, by folded axis and tile (``candidates.py``)."""
        return {}

    @functools.cached_property
    def widest(self) -> int:
        """The greatest feature size of its leaves, at least 1."""
        return max([1, *(self.of(letters(e.feature)[-1]) for e in self.fold.leaves if e.feature is not None)])

    def of(self, letter: str | int) -> int:
        name = str(letter).lstrip("#")
        return int(name) if name.isdigit() else dict(self.letters)[name]

    def features(self, e: Expr) -> int:
        """The feature size of an expression; 1 for a number."""
        return 1 if e.feature is None else self.of(str(e.feature))


@dataclass(frozen=True)
class Work:
    """Operations per pair; bytes read and written per row and per column."""

    products: int = 0  # flops of matrix products that make pairs (q @ k)
    contracted: int = 0  # flops of matrix products that fold pairs (weights @ v)
    plain: float = 0.0  # plain operations
    special: float = 0.0  # exponentials
    reads: Mapping[str, int] = field(default_factory=dict)  # "rows", "cols": bytes of an index's inputs
    writes: Mapping[str, int] = field(default_factory=dict)  # bytes of an index's results

    @property
    def flops(self) -> int:
        return self.products + self.contracted


def count_work(case: Case, over: str | None = None) -> Work:
    """The work of a fold; with ``over``, of its reductions over that axis alone, which are one kernel."""
    return count_fold(case.fold, case.letters, case.item, case.wide, over, case.kernels and case.item == 2)


@functools.lru_cache(maxsize=4096)
def count_fold(
    fold: Fold, letters: tuple[tuple[str, int], ...], item: int, wide: int, over: str | None = None, fast: bool = False
) -> Work:
    """:func:`count_work` of a fold on numbers of ``item`` bytes, computed with ``wide``."""
    counter = _Counter(fold, dict(letters), item, wide, FAST if fast else SPECIAL)
    return counter.run([r for r in fold.reductions if over is None or r.attrs[1] in (over, "neither", "both")])


def add_work(works: list[Work]) -> Work:
    """The sum of several pieces of work on the same pairs."""
    both = [{k: sum(getattr(w, n).get(k, 0) for w in works) for k in ("rows", "cols")} for n in ("reads", "writes")]
    sums = [sum(getattr(w, n) for w in works) for n in ("products", "contracted", "plain", "special")]
    return Work(*sums, *both)


@functools.lru_cache(maxsize=1024)
def folded_axes(fold: Fold) -> tuple[str, ...]:
    """The axes ("cols", "rows") over which a fold reduces in tiles."""
    walked = [r for r in fold.reductions if kind_of(r).walks(r, fold.reductions)]
    return tuple(o for o in ("cols", "rows") if any(r.attrs[1] == o for r in walked))


@functools.lru_cache(maxsize=1024)
def only_gathers(fold: Fold) -> bool:
    """True if a fold only gathers or scatters single pairs, and computes no tile."""
    return not any(kind_of(r).walks(r, fold.reductions) for r in fold.reductions)


class _Counter:
    """Counts one fold, every node of its expressions once; kinds of reduction call ``count_...`` on it."""

    def __init__(self, fold: Fold, letters: Mapping[str, int], item: int, wide: int, costs: Mapping[str, float]):
        self.fold, self.letters, self.item, self.wide, self.costs = fold, letters, item, wide, costs
        self.products = self.contracted = 0
        self.plain = self.special = 0.0
        self.seen: set[Expr] = set()

    def width(self, e: Expr) -> int:
        return 1 if e.feature is None else self._of(e.feature)

    def run(self, reductions: list[Expr]) -> Work:
        for r in reductions:
            if kind_of(r).walks(r, self.fold.reductions):
                kind_of(r).count_pair(self, r)
        writes = {"rows": 0, "cols": 0}
        for r in reductions:
            for feature, dtype in outputs_of(r):
                size = (self.wide if dtype == "float" else 8) * (1 if feature is None else self._of(feature))
                if r.attrs[1] not in ("neither", "both"):
                    writes["rows" if r.attrs[1] == "cols" else "cols"] += size
        used = set(topological(reductions))
        reads = {"rows": 0, "cols": 0}
        for e in self.fold.leaves:
            if e in used and e.rows != e.cols:
                size = 8 if e.dtype == "int" else 1 if e.dtype == "bool" else self.item
                reads["rows" if e.rows else "cols"] += size * self.width(e)
        return Work(self.products, self.contracted, self.plain, self.special, reads, writes)

    def _of(self, feature: str | int) -> int:
        name = str(feature).lstrip("#")
        return int(name) if name.isdigit() else self.letters[name]

    def count_contraction(self, c: Contraction, weighted: bool = False) -> None:
        """Add one contraction; ``weighted``: its weight is multiplied by another."""
        if c.walk:
            self.count_value(c.weight)
            self.plain += 0 if is_product(c.weight) else self.width(c.weight)
            return
        self.count_number(c.weight)
        self.plain += weighted and c.weight is not ONE and c.weight.is_pair
        if c.vector is None:
            self.plain += 1
        elif c.minus is not None and self.width(c.vector) <= FEW_FEATURES:
            self.plain += 6 * self.width(c.vector)
        else:
            self.contracted += 2 * self.width(c.vector)

    def count_combination(self, results: Sequence[Expr], otherwise: int) -> None:
        """Add what combining two elements takes; ``otherwise``: plain operations where that is not known."""
        for n in topological(results):
            if n.op in PRIMITIVES:
                self._primitive(n, self.width(n))
            elif n.op in _OF_VECTORS:
                self.plain += 2 * self.width(n.args[0])
        self.plain += 0 if results else otherwise

    def count_value(self, e: Expr) -> None:
        """Count a number per pair, or a vector per pair computed feature by feature."""
        inside = topological([e], stop=lambda n: n.feature is None)
        for n in inside:
            if n.feature is None:
                self.count_number(n)
            elif n.is_pair and n.op in PRIMITIVES and n not in self.seen:
                self.seen.add(n)
                self._primitive(n, self.width(n))
            elif n.is_pair and n.op == "einsum" and n not in self.seen:
                self.seen.add(n)
                flops = 2 * max(map(self.width, (*n.args, n)))
                if n.attrs[0] in DOTS:
                    self.products += flops
                else:
                    self.contracted += flops

    def count_number(self, e: Expr) -> None:
        """Add what a number per pair is computed from."""
        for n in topological([e], stop=lambda x: x in self.seen or not x.is_pair or x.op in _OF_VECTORS):
            if n in self.seen or not n.is_pair:
                continue
            self.seen.add(n)
            if n.op == "dot":
                self.products += 2 * self.width(n.args[0])
            elif n.op == "sqdist":
                width = self.width(n.args[0])
                self.plain += 6 * width if width <= FEW_FEATURES else 2
                self.products += 0 if width <= FEW_FEATURES else 2 * (width + 4)
            elif n.op in ("fsum", "famax", "famin"):
                self.count_value(n.args[0])
                self.plain += self.width(n.args[0])
            elif n.op == "lookup":
                self.plain += 4
            elif n.op in PRIMITIVES:
                self._primitive(n, 1)

    def _primitive(self, n: Expr, times: int) -> None:
        if n.op in self.costs:
            self.special += self.costs[n.op] * times
        elif n.op not in ("cast", "detach"):
            self.plain += times


# The cost model ------------------------------------------------------------------------------------------------

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
    choice = schedule.recall_choice(key)
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
