"""Device rates: what the cost model divides by.

    seconds = max(bytes / bandwidth, flops / (GEMM rate × efficiency), operations / plain or special rate) + launch

GPUs are in a table, by family. Hopper's GEMM rates, bandwidth and launch time were measured on an H200; its arithmetic
rates, caches and links are the vendor's figures. Other families were not measured: they have the vendor's peaks at the
shares that an H200 reached. CPUs differ too much for a table: :func:`measure_cpu` measures this one, in 20 to 30 ms,
once per process.
"""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .tiles import family_name


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
        a, b, c = (torch.ones(side, side) for _ in range(3))
        x, y = torch.full((long,), 0.5), torch.empty(long)
        far = torch.ones(2**21)
        into = torch.empty_like(far)
        tiny = torch.ones(8)
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
def _gpu_name(device: torch.device) -> str:
    found = torch.cuda.get_device_properties(device)
    return f"{found.name}, {found.major}.{found.minor}, {found.multi_processor_count} processors"


@functools.cache
def _cpu_name() -> str:
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
    interpreted = ", interpreted" if os.environ.get("TRITON_INTERPRET") == "1" else ""
    if device.type == "cuda":
        return _gpu_name(device)
    return f"{_cpu_name() if device.type == 'cpu' else device.type}, {torch.get_num_threads()} threads{interpreted}"
