"""What devices can do: the rates that a cost model divides by.

GPUs stand in a table, by class. Hopper's products, bandwidth and launches are what was reached on an H200; its
arithmetic, caches and links are the vendor's figures. Of other classes nothing was measured: they are the vendors'
peaks at the shares that an H200 reached. CPUs differ too much for a table: :func:`measured` looks once, for a few
milliseconds, and remembers.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from .default_tiles import family_name


@dataclass(frozen=True)
class Ceilings:
    """Rates per second of one device, sizes in bytes, costs in seconds."""

    name: str
    gemm: Mapping[str, float]  # floating operations of matrix products, by type
    bandwidth: float  # bytes from and to memory
    plain: float  # plain operations on numbers that are in registers or in the nearest cache
    special: float  # exponentials
    launch: float  # of one operation as the host sees it
    cache: int  # the last cache before memory
    near: int  # a cache that one processor has for itself; shared memory on GPUs
    link: float  # bytes that one rank sends to another
    fresh: float = 0.0  # seconds for every byte of memory that is written for the first time: pages are mapped
    half: int = 0  # the side of a product that reaches half the full rate; 0: launches say it all
    processors: int = 1
    source: str = "measured"  # where the numbers come from

    def rate(self, dtype: str) -> float:
        """Matrix products of a type; what is not there is done in float32."""
        return self.gemm.get(dtype, self.gemm["float32"])

    def efficiency(self, *sides: float) -> float:
        """The share of the full rate that a product of these sides reaches: small ones are packed more than used."""
        _, long, longest = sorted((1.0, *sides))[-3:]
        return long * longest / (long * longest + self.half**2)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "gemm": dict(self.gemm)}

    def __hash__(self) -> int:
        return hash((self.name, self.bandwidth, self.plain, self.special, self.launch))


def _gpu(name: str, half: float, single: float, double: float, **rest: Any) -> Ceilings:
    return Ceilings(name, {"bfloat16": half, "float16": half, "float32": single, "float64": double}, **rest)


_MEASURED = "H200: benchmarks.gpu and benchmarks.gpu_wide, 2026-11-15"
_DERIVED = "the vendor's peaks, at the shares measured on an H200"

# float32 is the plain one: many pairs go by the matrix units, and others where that is asked for, mr.use(precision=)
GPUS = {
    "hopper": _gpu(
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
    "ampere": _gpu(
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
    "ada": _gpu(
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


def of(device: torch.device) -> Ceilings:
    """The ceilings of a device."""
    if device.type == "cuda" and torch.cuda.is_available():
        return _known_gpu(device)
    return GPUS["hopper"] if device.type == "cuda" else measured(torch.get_num_threads())


@functools.cache
def _known_gpu(device: torch.device) -> Ceilings:
    """The class of a GPU, scaled to the processors that it has."""
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


# fitted to attention, perceptrons and losses, dense and in tiles, on one core of a Neoverse N1 (benchmarks/planner.py)
_FAULT = 4e-7  # seconds to map and clear a page of 4096 bytes
_HALF = 200
_SOCKET = 2.0e9  # bytes a second between processes of one machine: an assumption, to rank layouts by

# CPUs ---------------------------------------------------------------------------------------------------------


@functools.cache
def measured(threads: int) -> Ceilings:
    """This CPU's ceilings, measured once in a process with ``threads`` threads: 20 to 30 ms.

    >>> import torch
    >>> measured(torch.get_num_threads()).rate("float32") > 1e9
    True
    """
    with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
        side, long = 384, 2**18
        a, b, c = (torch.ones(side, side) for _ in range(3))
        x, y = torch.full((long,), 0.5), torch.empty(long)
        far = torch.ones(2**21)
        into = torch.empty_like(far)
        tiny = torch.ones(8)
        single = 2 * side**3 / _best(lambda: torch.mm(a, b, out=c), 2)
        double = [t.double() for t in (a[:192, :192], b[:192, :192], c[:192, :192])]
        wide = 2 * 192**3 / _best(lambda: torch.mm(double[0], double[1], out=double[2]))
        return Ceilings(
            f"CPU, {threads} thread{'s' if threads != 1 else ''}",
            {"float32": single, "float64": wide},
            bandwidth=2 * far.numel() * 4 / _best(lambda: into.copy_(far), 2),
            plain=long / _best(lambda: torch.mul(x, x, out=y)),
            special=long / _best(lambda: torch.exp(x, out=y)),
            launch=_best(lambda: [torch.mul(tiny, tiny, out=tiny) for _ in range(50)]) / 50,
            cache=_cache(3, 32 * 2**20),
            near=_cache(2, 2**20),
            link=_SOCKET,
            fresh=_FAULT / 4096,
            half=_HALF,
            processors=threads,
        )


def _best(call: Callable[[], object], rounds: int = 4) -> float:
    """Seconds: the best of a few, after one for warmth; with one thread of its own time, whatever else runs here."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    found = []
    for _ in range(rounds + 1):
        start = clock()
        call()
        found.append(clock() - start)
    return max(min(found[1:]), 1e-9)


def _cache(level: int, otherwise: int) -> int:
    """Bytes of a level of cache, as the system says."""
    try:
        size = os.sysconf(f"SC_LEVEL{level}_CACHE_SIZE")
    except (AttributeError, OSError, ValueError):
        size = 0
    return size if size > 0 else otherwise
