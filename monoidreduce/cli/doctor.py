"""``monoidreduce doctor``: the versions found, which engine runs on which device, and what to install."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .._version import __version__
from ..errors import MonoidReduceError
from ..plan import cache, settings
from ..runtime import dispatch
from .bench import PEERS, find_cpp_compiler
from .command import Answer
from .report import FAILED, MISSING, OK, print_statuses


@dataclass(frozen=True)
class Finding:
    """A line of the report: a part of the system, its state, and what that means or what to do."""

    name: str
    state: str
    words: str


def doctor() -> Answer:
    """Say what is here, what runs where, and what to install."""
    found = [check() for check in _CHECKS]
    peers = [_check_peer(p.name, p.package, p.install or p.package) for p in PEERS if p.package]
    runs = _describe_engines()
    ready = not any(f.state == FAILED for f in found)
    data = {"checks": [vars(f) for f in found], "runs": runs, "peers": [vars(p) for p in peers], "ready": ready}
    lines = [(f.name, f.state, f.words) for f in (*found, *peers)]
    lines += [(f"on {device}", "", words) for device, words in runs.items()]
    return Answer(data, lambda console: print_statuses(console, lines), int(not ready))


def _describe_engines() -> dict[str, str]:
    """What runs on each device."""
    try:
        engine = dispatch.engine()
    except MonoidReduceError as error:
        return {"every device": str(error)}
    if engine != "auto":
        return {"every device": f"the engine {engine}, as MONOIDREDUCE_ENGINE asks"}
    compiles = find_cpp_compiler() and os.environ.get("MONOIDREDUCE_CPP") != "never"
    compiled = "generated C++ for large folds, " if compiles else ""
    cpu = f"{compiled}tiles in torch; the dense form where the pairs are few"
    if not torch.cuda.is_available():
        return {"cpu": cpu}
    kernels = "generated Triton kernels; panels for features too wide for them; tiles in torch for what has no kernel"
    return {"cpu": cpu, "cuda": kernels if settings.has_triton() else "tiles in torch: Triton is not installed"}


def _check_library() -> Finding:
    return Finding("monoidreduce", OK, __version__)


def _check_python() -> Finding:
    state = OK if sys.version_info >= (3, 10) else FAILED
    return Finding("Python", state, f"{platform.python_version()}, {platform.system()} {platform.machine()}")


def _check_torch() -> Finding:
    return _require("torch", torch.__version__, (2, 6), f", threads: {torch.get_num_threads()}")


def _check_gpu() -> Finding:
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "no GPU is visible to it"
        return Finding("GPU", MISSING, f"{why}: everything runs on the CPU")
    names = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    major, minor = torch.cuda.get_device_capability()
    free, total = torch.cuda.mem_get_info()
    words = f"{', '.join(names)}; capability {major}.{minor}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
    return Finding("GPU", OK, words)


def _check_triton() -> Finding:
    version = _find_version("triton")
    if version is None:
        return Finding("Triton", MISSING, "GPUs run tiles in torch without it: pip install triton")
    return _require("Triton", version, (3, 2))


def _check_compiler() -> Finding:
    compiler = find_cpp_compiler()
    without = "a CPU then runs tiles in torch, slower; torch.compile on a CPU needs one too"
    return Finding("C++ compiler", OK if compiler else MISSING, compiler or without)


def _check_pictures() -> Finding:
    missing = _find_missing("click", "rich", "matplotlib")
    if missing:
        return Finding("pictures", MISSING, f'{missing}: pip install "monoidreduce[cli]"')
    return Finding("pictures", OK, f"matplotlib {_find_version('matplotlib')}")


def _check_sources() -> Finding:
    missing = _find_missing("safetensors", "pyarrow")
    if missing:
        return Finding("files", MISSING, f'{missing}, to stream from: pip install "monoidreduce[files]"')
    return Finding("files", OK, "safetensors and Parquet can be streamed from")


def _check_cache() -> Finding:
    folder = cache.path()
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    if os.access(nearest, os.W_OK):
        return Finding("cache", OK, f"{folder}, {len(cache.plans())} plans")
    return Finding("cache", MISSING, f"{folder} cannot be written: plans and kernels are made anew in every process")


def _check_settings() -> Finding:
    given = {k: v for k, v in os.environ.items() if k.startswith("MONOIDREDUCE_")}
    try:
        dispatch.engine()
    except MonoidReduceError as error:
        return Finding("settings", FAILED, str(error))
    return Finding("settings", OK, ", ".join(f"{k}={v}" for k, v in given.items()) or "none in the environment")


_CHECKS: tuple[Callable[[], Finding], ...] = (
    _check_library, _check_python, _check_torch, _check_gpu, _check_triton, _check_compiler, _check_pictures,
    _check_sources, _check_cache, _check_settings,
)  # fmt: skip


def _check_peer(name: str, package: str, install: str) -> Finding:
    if _find_missing(package):
        return Finding(name, MISSING, f"to measure beside: pip install {install}")
    return Finding(name, OK, f"{_find_version(install) or 'installed'}; bench measures beside it")


def _require(name: str, version: str, least: tuple[int, int], more: str = "") -> Finding:
    """The state of a package that must have at least this version."""
    words = f"{version}{more}"
    if _parse_version(version) >= least:
        return Finding(name, OK, words)
    return Finding(name, FAILED, f"{words}: {least[0]}.{least[1]} or newer is needed")


def _find_missing(*packages: str) -> str:
    """The packages that are not installed, separated by commas."""
    return ", ".join(name for name in packages if importlib.util.find_spec(name) is None)


def _find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _parse_version(version: str) -> tuple[int, ...]:
    """The first two numbers of a version.

    >>> _parse_version("2.13.0+cpu")
    (2, 13)
    """
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
