"""Compiles generated C++ with the machine's compiler, once, and loads it.

Libraries are kept in the cache folder, under a name made of the text, the compiler, its flags and the CPU. A file is
loaded only if it is this user's own and has the checksum written beside it; anything else is compiled anew. The text
has a plain C interface and includes no header of torch, so a compilation takes a second, not twenty.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from ....errors import FallbackWarning
from ....plan import disk

FOLDER = "cpp"
_TIMEOUT = 120  # seconds
# Without partial redundancy elimination (tree-pre), which puts branches into loops that GCC then does not vectorise.
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-w", "-fno-tree-pre", "-fno-math-errno", "-fno-trapping-math")
_lock = threading.Lock()
_loaded: dict[str, ctypes.CDLL | None] = {}
_noted = threading.Event()
if hasattr(os, "register_at_fork"):  # a child must not wait for a thread that it does not have
    os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Compiler:
    """A compiler, its flags, and what tells it and this CPU from others."""

    path: str
    flags: tuple[str, ...]
    identity: str


@functools.cache
def find_compiler(search: str | None, wanted: str | None) -> Compiler | None:
    """The C++ compiler of this machine: ``wanted`` (``$CXX``), else g++ or clang++ on the path ``search``."""
    if sys.platform == "win32":
        return None
    names = [wanted] if wanted else ["g++", "clang++", "c++"]
    for name in names:
        path = shutil.which(name, path=search)
        if path is None:
            continue
        try:
            version = subprocess.run([path, "--version"], capture_output=True, timeout=20, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        machine = platform.machine().lower()
        native = "-mcpu=native" if machine in ("aarch64", "arm64") else "-march=native"
        threads = "-fopenmp-simd" if sys.platform == "darwin" else "-fopenmp"
        wide = ("-mprefer-vector-width=512",) if "avx512f" in _cpu_flags() else ()
        flags = (*_FLAGS, "-ffp-contract=fast", native, threads, *wide)
        identity = repr((path, version, flags, machine, _cpu_flags(), sys.platform))
        return Compiler(path, flags, identity)
    return None


@functools.cache
def _cpu_flags() -> str:
    """The instruction sets of this CPU, which code compiled for it may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = ("flags", "Features", "model name", "CPU part", "CPU implementer")
    return "\n".join(sorted({line for line in lines if line.startswith(named)}))


def current_compiler() -> Compiler | None:
    return find_compiler(os.environ.get("PATH"), os.environ.get("CXX"))


def load(text: str) -> ctypes.CDLL | None:
    """The library of a text, compiled if it is not in the cache; None, with one note, where that fails."""
    compiler = current_compiler()
    if compiler is None:
        _note("no C++ compiler was found")
        return None
    key = hashlib.sha256(f"{compiler.identity}\n{text}".encode()).hexdigest()[:40]
    with _lock:
        if key not in _loaded:
            _loaded[key] = _find(key) or _make(key, text, compiler)
        return _loaded[key]


def _find(key: str) -> ctypes.CDLL | None:
    """A library from the cache folder, if its checksum holds."""
    place = disk.open_folder(FOLDER)
    if place is None or not (place / f"{key}.so").exists():
        return None
    data, said = disk.read(place / f"{key}.so"), disk.read(place / f"{key}.sum")
    if data is None or said is None or hashlib.sha256(data).hexdigest().encode() != said:
        return None
    return _open(place / f"{key}.so")


def _open(path: Path) -> ctypes.CDLL | None:
    try:
        found = ctypes.CDLL(str(path))
        found.run_fold.argtypes = [ctypes.c_void_p]
        found.run_fold.restype = ctypes.c_int
    except (OSError, AttributeError):
        return None
    return found


def _make(key: str, text: str, compiler: Compiler) -> ctypes.CDLL | None:
    """Compile a text, keep the library, and load it."""
    with tempfile.TemporaryDirectory(prefix="monoidreduce-cpp-") as folder:
        source, library = Path(folder) / "fold.cpp", Path(folder) / "fold.so"
        source.write_text(text)
        command = [compiler.path, *compiler.flags, str(source), "-o", str(library)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            _note(f"{compiler.path} failed: {error}")
            return None
        if done.returncode or not library.exists():
            _note(f"{compiler.path} failed: {done.stderr.decode(errors='replace')[-500:]}")
            return None
        data = library.read_bytes()
        place = disk.open_folder(FOLDER)
        found = None
        if place is not None and disk.write(place / f"{key}.so", data):
            disk.write(place / f"{key}.sum", hashlib.sha256(data).hexdigest().encode())
            found = _open(place / f"{key}.so")
        if found is None:  # no cache folder, or one from which nothing may be run
            spare = disk.temporary_folder() / f"{key}.so"
            spare.write_bytes(data)
            found = _open(spare)
        if found is None:
            _note("the compiled library cannot be loaded")
        return found


def _note(reason: str) -> None:
    """Say once per process that tiles run in torch."""
    if not _noted.is_set():
        _noted.set()
        warnings.warn(
            FallbackWarning(f"{reason}; tiles run in torch, slower (MONOIDREDUCE_CPP=never says nothing)"), stacklevel=3
        )


@functools.cache
def gemm_addresses() -> tuple[int, int, int] | None:
    """Addresses of torch's own sgemm and dgemm, and of the function that limits MKL's threads (0: none)."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        if not (folder / name).exists():
            continue
        try:
            library = ctypes.CDLL(str(folder / name))
            found = [ctypes.cast(getattr(library, f), ctypes.c_void_p).value or 0 for f in ("sgemm_", "dgemm_")]
        except (OSError, AttributeError):
            return None
        limit = getattr(library, "MKL_Set_Num_Threads_Local", None)
        address = 0 if limit is None else ctypes.cast(limit, ctypes.c_void_p).value or 0
        return found[0], found[1], address
    return None
