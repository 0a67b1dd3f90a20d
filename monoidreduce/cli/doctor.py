"""``monoidreduce doctor``: what is here, what will run where, and what to install."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .._version import __version__
from ..engines import triton
from ..errors import MonoidReduceError
from ..plan import cache
from ..runtime import registry
from . import terminal
from .command import Answer, Command
from .peers import PEERS

OK, MISSING, FAILED = "ok", "missing", "FAILED"


@dataclass(frozen=True)
class Finding:
    """A line of the report: what, how it stands, and what it means or what to do."""

    name: str
    state: str
    words: str


def run() -> Answer:
    """Say what is here, what runs where, and what to install."""
    found = [check() for check in CHECKS]
    peers = [_peer(p.name, p.package, p.install or p.package) for p in PEERS if p.package]
    runs = where()
    data = {
        "checks": [vars(f) for f in found], "runs": runs, "peers": [vars(p) for p in peers],
        "ready": not any(f.state == FAILED for f in found),
    }  # fmt: skip

    def show(console: object) -> None:
        lines = [(f.name, f.state, f.words) for f in (*found, *peers)]
        terminal.named(console, lines + [(f"on {device}", "", words) for device, words in runs.items()])  # type: ignore[arg-type]

    return Answer(data, show, int(not data["ready"]))


def where() -> dict[str, str]:
    """What runs on which device."""
    try:
        engine = registry.engine()
    except MonoidReduceError as error:
        return {"every device": str(error)}
    if engine != "auto":
        return {"every device": f"the engine {engine}, as MONOIDREDUCE_ENGINE asks"}
    cpu = "tiles in torch; the dense form where the pairs are few"
    if not torch.cuda.is_available():
        return {"cpu": cpu}
    kernels = "generated Triton kernels; panels for features too wide for them; tiles in torch for what has no kernel"
    return {"cpu": cpu, "cuda": kernels if triton.available() else "tiles in torch: Triton is not installed"}


# What is looked at -----------------------------------------------------------------------------------------------


def _python() -> Finding:
    state = OK if sys.version_info >= (3, 10) else FAILED
    return Finding("Python", state, f"{platform.python_version()}, {platform.system()} {platform.machine()}")


def _library() -> Finding:
    return Finding("monoidreduce", OK, __version__)


def _torch() -> Finding:
    enough = _release(torch.__version__) >= (2, 6)
    words = f"{torch.__version__}, threads: {torch.get_num_threads()}"
    return Finding("torch", OK if enough else FAILED, words if enough else f"{words}: 2.6 or newer is needed")


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "no GPU is visible to it"
        return Finding("GPU", MISSING, f"{why}: everything runs on the CPU")
    names = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    major, minor = torch.cuda.get_device_capability()
    free, total = torch.cuda.mem_get_info()
    words = f"{', '.join(names)}; capability {major}.{minor}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
    return Finding("GPU", OK, words)


def _triton() -> Finding:
    version = _version("triton")
    if version is None:
        return Finding("Triton", MISSING, "GPUs run tiles in torch without it: pip install triton")
    enough = _release(version) >= (3, 2)
    return Finding("Triton", OK if enough else FAILED, version if enough else f"{version}: 3.2 or newer is needed")


def _compiler() -> Finding:
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++", "cl"))), None)
    return Finding("C++ compiler", OK if found else MISSING, found or "torch.compile on a CPU needs one")


def _extra() -> Finding:
    missing = [name for name in ("click", "rich", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        return Finding("pictures", MISSING, f'{", ".join(missing)}: pip install "monoidreduce[cli]"')
    return Finding("pictures", OK, f"matplotlib {_version('matplotlib')}")


def _sources() -> Finding:
    missing = [name for name in ("safetensors", "pyarrow") if importlib.util.find_spec(name) is None]
    if missing:
        return Finding("files", MISSING, f'{", ".join(missing)}, to stream from: pip install "monoidreduce[files]"')
    return Finding("files", OK, "safetensors and Parquet can be streamed from")


def _cache() -> Finding:
    folder = cache.path()
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    if not os.access(nearest, os.W_OK):
        return Finding(
            "cache", MISSING, f"{folder} cannot be written: plans and kernels are made anew in every process"
        )
    return Finding("cache", OK, f"{folder}, {len(cache.plans())} plans")


def _settings() -> Finding:
    given = {k: v for k, v in os.environ.items() if k.startswith("MONOIDREDUCE_")}
    try:
        registry.engine()
    except MonoidReduceError as error:
        return Finding("settings", FAILED, str(error))
    return Finding("settings", OK, ", ".join(f"{k}={v}" for k, v in given.items()) or "none in the environment")


CHECKS: tuple[Callable[[], Finding], ...] = (
    _library, _python, _torch, _gpu, _triton, _compiler, _extra, _sources, _cache, _settings,
)  # fmt: skip


def _peer(name: str, package: str, install: str) -> Finding:
    if importlib.util.find_spec(package) is None:
        return Finding(name, MISSING, f"to measure beside: pip install {install}")
    return Finding(name, OK, f"{_version(install) or 'installed'}; bench measures beside it")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version.

    >>> _release("2.13.0+cpu")
    (2, 13)
    """
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())


COMMAND = Command("doctor", run, ())
