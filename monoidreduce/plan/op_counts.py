"""Operation counts of a fold: matrix products, arithmetic per pair, bytes read and written.

A :class:`Case` is one fold at one size on one device: all that the choice of a schedule depends on. It holds no
tensors. :func:`count_work` returns a :class:`Work`: operations per pair and bytes per row and per column. Costs are
bilinear in the sizes (the papers' section 3), so a slice of m rows and n columns takes

    m n × (operations per pair)    and    m × (bytes per row) + n × (bytes per column)
"""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..program.constructors import ONE, Contraction
from ..program.expression import Expr, letters, topological
from ..program.lower import Fold
from ..program.primitives import PRIMITIVES
from ..program.several import DOTS, is_product
from ..reductions import kind_of, outputs_of
from . import settings
from .schedule import family_name

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


# Names --------------------------------------------------------------------------------------------------------


@functools.cache
def _read_gpu_name(device: torch.device) -> str:
    found = torch.cuda.get_device_properties(device)
    return f"{found.name}, {found.major}.{found.minor}, {found.multi_processor_count} processors"


@functools.cache
def _read_cpu_name() -> str:
    info: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            info.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    names = [info[n] for n in ("model name", "CPU implementer", "CPU part") if n in info]
    return " ".join([platform.machine(), *(names or [platform.processor()])])


def device_name(device: torch.device) -> str:
    """The model of a device, and on a CPU the number of threads: measurements hold for all devices of that name."""
    interpreted = ", interpreted" if settings.interprets_kernels() else ""
    if device.type == "cuda":
        return _read_gpu_name(device)
    return (
        f"{_read_cpu_name() if device.type == 'cpu' else device.type}, {torch.get_num_threads()} threads{interpreted}"
    )


SPECIAL = {name: p.cost for name, p in PRIMITIVES.items() if p.cost}  # in exponentials; others are plain arithmetic
FAST = SPECIAL | {name: p.fast for name, p in PRIMITIVES.items() if p.fast}  # in kernels of 16-bit programs
FEW_FEATURES = 16  # up to here squared distances are computed feature by feature, without matrix products
_OF_VECTORS = ("dot", "sqdist", "fsum", "famax", "famin")  # numbers per pair that are made of vectors
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
