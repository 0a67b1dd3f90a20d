"""What a device and the installed Triton can do; from a kernel's text to a launch, the first and every later one.

Abilities are asked by plans, schedules and launches. Plans are also made for GPUs that are not in this machine, of
which nothing is known.

Triton reads a function's source from its file, so the text is written to a private folder (``plan/disk.py``), under the
hash of its content. What runs is the text that was just written here, never whatever the file may hold. What a first
launch compiled is launched again without a look-up (:class:`Relauncher`, :class:`LaunchCache`). Every kernel on a
panel, and every small kernel whose text no program generates (:class:`Kernels`), is launched through a launch cache; so
this is also where launches are reported to a recorder (``replay.py``). Importing this file does not import Triton.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import copy
import functools
import hashlib
import importlib
import importlib.metadata
import linecache
import os
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from ....plan import disk, schedule, settings
from ....plan.cache import KERNELS
from ....plan.schedule import Family
from ...common.bounded_cache import BoundedCache
from ...common.torch_code import run_text
from ..codegen.compiler import IMPORTS, copy_device_functions
from . import descriptors, start_triton


@functools.cache
def triton_version() -> tuple[int, ...]:
    """The installed version of Triton: major and minor."""
    return tuple(int(part) for part in importlib.metadata.version("triton").split("+")[0].split(".")[:2])


def find_capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of an NVIDIA GPU of this machine; (0, 0) of any other device."""
    if not _is_present(device) or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


def _is_present(device: torch.device) -> bool:
    """True for a GPU of this machine."""
    return device.type == "cuda" and torch.cuda.is_available()


@functools.cache
def find_family(device: torch.device) -> Family | None:
    """The family of a GPU, with the shared memory that it reports; None without a GPU."""
    if not _is_present(device):
        return None
    known = torch.cuda.get_device_properties(device)
    found = schedule.family(known.major, known.minor)
    return replace(found, shared=int(getattr(known, "shared_memory_per_block_optin", 0)) or found.shared)


@functools.cache
def count_processors(device: torch.device) -> int:
    """The number of streaming multiprocessors; 1 without a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if _is_present(device) else 1


def can_relaunch(device: torch.device) -> bool:
    """True where kernels are launched again by addresses: not by the interpreter, nor by an older Triton, whose
    launchers take no constants."""
    return device.type == "cuda" and triton_version() >= (3, 4)


@functools.cache
def has_descriptors(device: torch.device) -> bool:
    """True when the device and this version of Triton have tensor descriptors (TMA)."""
    if triton_version() < (3, 4):
        return False
    return find_capability(device) >= (9, 0) if device.type == "cuda" else settings.interprets_kernels()


def chains_launches(device: torch.device) -> bool:
    """True where a kernel may be launched while the one before it runs, and wait for it on the device: from Hopper on
    (programmatic dependent launch). What a launch takes is then hidden."""
    return device.type == "cuda" and has_descriptors(device)


def has_fast_epilogues(device: torch.device) -> bool:
    """True where generated GEMMs are as fast as the vendor's: tensor descriptors feed the tensor cores."""
    return device.type == "cuda" and has_descriptors(device)


@functools.cache
def has_tanh(device: torch.device) -> bool:
    """True for GPUs with instructions for tanh and 1 / x: NVIDIA's, from Turing on."""
    return find_capability(device) >= (7, 5)


@functools.cache
def multiplies_eight_bits(device: torch.device) -> bool:
    """True for GPUs with matrix units for 8-bit integers and floats: NVIDIA's, from Ada on."""
    return find_capability(device) >= (8, 9) or (not _is_present(device) and settings.interprets_kernels())


@functools.cache
def splits_float32(device: torch.device) -> bool:
    """True on Hopper and newer, which multiply split float32 weights without moving them between threads."""
    return find_capability(device) >= (9, 0) if device.type == "cuda" else settings.interprets_kernels()


@functools.cache
def runs_warp_specialized(device: torch.device) -> bool:
    """True when the device has ``wgmma`` (compute capability 9.0) and this Triton has the Gluon calls we use."""
    return find_capability(device) == (9, 0) and triton_version() >= (3, 6)


def has_small_products() -> bool:
    """True when this Triton multiplies tiles of fewer than 16 rows."""
    return triton_version() >= (3, 3)


def has_registers_for_wide_tiles() -> bool:
    """True when this Triton keeps ping-pong tiles of 128 x 192 in registers.

    Triton 3.6 does; Triton 3.9 spills some of them to local memory, and then tiles of 128 x 128 are faster. On an H200
    with Triton 3.6 wide tiles took 0.91 of the time of the products alone where narrow ones took 0.96 (a forward of
    65536 x 65536 pairs, 768 features)."""
    return triton_version() < (3, 7)


# From a text to a launch


def write_text(text: str) -> Path:
    """The file of a text, written whole: in the private folder or, where there is none, in a temporary one."""
    name, data = f"k{hashlib.sha256(text.encode()).hexdigest()[:24]}.py", text.encode()
    place = disk.open_folder(KERNELS)
    if place is not None and (disk.read(place / name) == data or disk.write(place / name, data)):
        return place / name
    spare = disk.temporary_folder() / name
    spare.write_bytes(data)
    return spare


def load_module(text: str, functions: tuple[tuple[str, Any], ...] = ()) -> Any:
    """Compile a kernel's text to a Python module. The text itself imports Triton; this file does not.

    ``functions``: by name, functions that the text calls and does not define."""
    return _SKIPPED if _skips.get() else _load_text(text, functions)


def is_loaded(text: str) -> bool:
    """True where a text was loaded before: at least one launch of its kernel is compiled, or about to be."""
    return text in _loaded


_loaded: set[str] = set()


@functools.lru_cache(maxsize=1024)
def _load_text(text: str, functions: tuple[tuple[str, Any], ...]) -> Any:
    if len(_loaded) >= _MOST:
        _loaded.clear()
    _loaded.add(text)
    path = str(write_text(text))
    module = types.ModuleType(Path(path).stem)
    module.__file__ = path
    module.__dict__.update(functions)
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    run_text(text, module.__dict__, path)
    return module


class _SkippedLaunch:
    """A stand-in for a module of kernels, a kernel and its launch in a dry run: every use does nothing."""

    def __getattr__(self, name: str) -> _SkippedLaunch:
        return self

    def __getitem__(self, grid: Any) -> _SkippedLaunch:
        return self

    def __call__(self, *arguments: Any, **constants: Any) -> None:
        """Launch nothing."""


_SKIPPED = _SkippedLaunch()
_skips: contextvars.ContextVar[bool] = contextvars.ContextVar("skips", default=False)


def skip_launches() -> contextlib.AbstractContextManager[bool]:
    """First launches inside the block do nothing: for dry runs, which look at allocations alone."""
    return settings.hold(_skips, True)


@dataclass(frozen=True)
class Resources:
    """What the compiler says of a kernel: registers and bytes spilled of a thread, bytes of shared memory."""

    registers: int
    spills: int
    shared: int


_resources_seen: contextvars.ContextVar[list[Resources] | None] = contextvars.ContextVar("resources_seen", default=None)


def watch_resources() -> contextlib.AbstractContextManager[list[Resources]]:
    """The resources of kernels first launched inside the block."""
    return settings.hold(_resources_seen, [])


def report_resources(compiled: Any) -> None:
    """Add a compiled kernel's resources to the list of ``watch_resources``; interpreted kernels have none."""
    watching = _resources_seen.get()
    if watching is not None and getattr(compiled, "n_regs", None) is not None:
        watching.append(Resources(compiled.n_regs, 4 * compiled.n_spills, int(compiled.metadata.shared)))


def use_device(device: torch.device) -> Any:
    """Makes a device the current one, on which kernels are launched (the interpreter has none)."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def make_relauncher(
    compiled: Any, grid: tuple[int, ...], constants: tuple[Any, ...], device: torch.device
) -> Relauncher | None:
    """A compiled kernel's own launcher, without the look-up of a normal launch; None where this Triton has none."""
    there = hasattr(compiled, "packed_metadata") and can_relaunch(device)
    return Relauncher(compiled, grid, constants, device) if there else None


class Relauncher:
    """Launches a compiled kernel with other arguments.

    Arguments must be of the same types, integers the same and pointers of the same alignment. ``start``, a C function
    where there is one, is called with ``grid``, a stream, the ``inserted`` arguments of Triton's, the kernel's own and
    ``constants``. While a profiler has hooked launches, ``run_hooked`` launches as Triton does."""

    def __init__(self, compiled: Any, grid: tuple[int, ...], constants: tuple[Any, ...], device: torch.device):
        self.compiled, self.constants, self.device, self.grid = compiled, constants, device, (*grid, 1, 1)[:3]
        inserted: tuple = (compiled.function, compiled.packed_metadata, None, None, None)
        launcher = compiled.run
        self.start: Callable[..., None]
        self.start, self.inserted = _find_c_launcher(launcher, self.grid, inserted) or (launcher, inserted)
        self.run_hooked, self.stream = compiled[self.grid], find_stream(device)

    def __call__(self, *arguments: Any) -> None:
        found = self.stream()
        if found is not None:
            self.start(*self.grid, found, *self.inserted, *arguments, *self.constants)
            return
        with use_device(self.device):
            self.run_hooked(*arguments, *self.constants)

    def on_grid(self, grid: tuple[int, ...]) -> Relauncher | None:
        """What launches the same kernel on another grid; None where it stands for a launch of a dry run."""
        if self.compiled is _SKIPPED:
            return None
        found = copy.copy(self)
        found.grid = (*grid, 1, 1)[:3]
        found.run_hooked = self.compiled[found.grid]
        return found

    def open_descriptors(
        self, arguments: Sequence[Any]
    ) -> tuple[Callable[..., None], Mapping[int, descriptors.EncodedByAddress]]:
        """The launch function below Triton's handling of descriptors and, by argument, a cache of encoded descriptors;
        ``start`` and no caches where that handling cannot be bypassed. Only descriptors in ``arguments`` are read."""
        found = descriptors.bypass_encoding(self.start, (*self.grid, None, *self.inserted), arguments)
        return found or (self.start, {})


def _find_c_launcher(launcher: Any, before: tuple, after: tuple) -> tuple[Callable[..., None], tuple] | None:
    """The C function that one of Triton's launchers calls, and the arguments that it inserts between the stream and the
    kernel's own; None if a launch does more. Found by a copy of the launcher whose C function records its call."""
    if getattr(launcher, "global_scratch_size", 1) or getattr(launcher, "profile_scratch_size", 0):
        return None  # memory is allocated for each launch
    seen: list[tuple] = []
    spy, stream, argument = copy.copy(launcher), object(), object()
    spy.launch = lambda *given: seen.append(given)
    try:
        spy(*before, stream, *after, argument)
        (given,) = seen
    except Exception:  # of another make
        return None
    count = len(before) + 1
    plain = given[:count] == (*before, stream) and given[-1] is argument and stream not in given[count:]
    return (launcher.launch, given[count:-1]) if plain else None


@functools.cache
def find_stream(device: torch.device) -> Callable[[], int | None]:
    """A function that returns the current stream of a device, or None if another device is current or a profiler has
    hooked launches."""
    triton = importlib.import_module("triton")
    runtime, current = triton.knobs.runtime, triton.runtime.driver.active.get_current_stream
    current_device = torch._C._cuda_getDevice
    here = device.index

    def find() -> int | None:
        if current_device() != here or _has_hook(runtime.launch_enter_hook) or _has_hook(runtime.launch_exit_hook):
            return None
        return current(here)

    return find


def _has_hook(hook: Any) -> bool:
    """True when a profiler has set one of Triton's launch hooks: a chain of them, one function, or None."""
    return bool(getattr(hook, "calls", hook))


# Compile the kernels of a call in parallel, before its first launch.
#
# A kernel takes a second to compile, and a vocabulary head needs ten. Most of that second is spent in LLVM and ptxas,
# without the GIL: so a call is first run with its launches collected, each new kernel is compiled in a thread, and the
# launches that follow find all of them compiled. Errors are ignored here and raised by the launch itself.

_LaunchArguments = tuple[tuple[int, ...], Sequence[Any], Mapping[str, Any]]  # grid, arguments; constants and options
_Collected = dict[Any, list[_LaunchArguments]]  # by kernel

_collected: contextvars.ContextVar[_Collected | None] = contextvars.ContextVar("collected", default=None)
_compiles_only: contextvars.ContextVar[bool] = contextvars.ContextVar("compiles_only", default=False)
_MOST = 4096
_launched: set[tuple] = set()  # kernels with their constants that were launched before, hence compiled


def launch(function: Any, grid: tuple[int, ...], arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Launch a kernel on the current device and return what was compiled; None where launches are collected.

    ``options``: by name, the kernel's constants and the compiler's options."""
    collected, key = _collected.get(), (function, *options.items())
    if collected is not None:
        if key not in _launched:
            collected.setdefault(function, []).append((grid, arguments, options))
        return None
    if len(_launched) >= _MOST:
        _launched.clear()  # compiling these again only finds them in Triton's cache
    _launched.add(key)
    if not settings.interprets_kernels():
        _wait_for_triton()
    compiled = function.warmup(*arguments, grid=grid, **options) if _compiles_only.get() else None
    if compiled is not None:  # (an interpreter compiles nothing)
        compiled.run  # noqa: B018  loads it
        return compiled
    if settings.interprets_kernels():
        _widen_interpreted_products()
    return function[grid](*arguments, **options)


@functools.cache
def _wait_for_triton() -> None:
    for thread in start_triton():
        thread.join()


@functools.cache
def _widen_interpreted_products() -> None:
    """Let Triton's interpreter multiply bfloat16 blocks in float32, which holds their products exactly, and convert
    integers to bfloat16 (and back) by way of float32.

    NumPy has no bfloat16: the interpreter stores its bits as integers, and multiplies and converts those."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    builder, handle = interpreter.interpreter_builder, interpreter.TensorHandle
    multiply, convert, language = builder.create_dot, builder.cast_impl, interpreter.tl

    def widen(block: Any) -> Any:
        if block.dtype.scalar != language.bfloat16:
            return block
        return handle((block.data.astype("uint32") << 16).view("float32"), language.float32)

    def convert_by_float32(x: Any, kind: Any) -> Any:
        if language.bfloat16 in (x.dtype.scalar, kind.scalar):
            x = convert(x, language.float32)
        return convert(x, kind)

    builder.create_dot = lambda x, y, *rest, **options: multiply(widen(x), widen(y), *rest, **options)
    builder.cast_impl = convert_by_float32


def compile_only() -> contextlib.AbstractContextManager[bool]:
    """First launches inside the block compile and load a kernel and do not run it: for recordings, which are replayed
    right away. What such kernels would write is not there, so nothing inside may look at it."""
    return settings.hold(_compiles_only, True)


def is_collecting() -> bool:
    """True while launches are collected. Then nothing may run, not even compiled kernels: what they would read was not
    computed, and labels that were not written may point outside a tensor."""
    return _collected.get() is not None


def compile_ahead(device: torch.device, launches: Callable[[], Any]) -> bool:
    """Compile the kernels that ``launches`` would launch for the first time, in parallel where there are several.
    Returns whether ``launches`` was called."""
    if not _can_compile_ahead(device):
        return False
    collected: _Collected = {}
    with settings.hold(_collected, collected), contextlib.suppress(Exception):  # the call that follows raises it
        launches()
    if len(collected) > 1:
        _wait_for_triton()
        with concurrent.futures.ThreadPoolExecutor(min(len(collected), os.cpu_count() or 1), "compiling") as threads:
            for function, of_function in collected.items():
                threads.submit(contextvars.copy_context().run, _compile, function, of_function, device)
    return True


def _compile(function: Any, launches: list[_LaunchArguments], device: torch.device) -> None:
    """Compile one kernel for all of its launches, one after the other: Triton's caches are the kernel's own."""
    with use_device(device):
        for grid, arguments, options in launches:
            function.warmup(*arguments, grid=grid, **options).run  # noqa: B018  loads it, and writes its launcher


def _can_compile_ahead(device: torch.device) -> bool:
    """True where a first run may only collect launches: on a GPU, with a Triton that compiles in threads, without a
    torch dispatch mode and outside of CUDA graph capture."""
    if device.type != "cuda" or triton_version() < (3, 4) or _skips.get():
        return False
    return not (torch._C._len_torch_dispatch_stack() or torch.cuda.is_current_stream_capturing())


# Launchers, cached by all that they depend on.


_MOST_LAUNCHERS = 4096  # a launcher is made for one grid: hundreds of lengths of several kernels
Relaunch = Callable[..., Any]
Grid = tuple[int, ...]
Numbers = Mapping[str, Any]


class LaunchRecorder(Protocol):
    """What launches on panels are reported to."""

    def add_launch(self, relaunch: Relaunch | None, arguments: Sequence[Any]) -> None:
        """A kernel was launched with these arguments; None: it cannot be launched again."""

    def chose_panels(self, chooser: Any, panels: Any) -> None:
        """A loop over panels begins; ``chooser``: what chose them."""


recording: contextvars.ContextVar[LaunchRecorder | None] = contextvars.ContextVar("recording", default=None)


def report(relaunch: Relaunch | None, arguments: Sequence[Any]) -> None:
    """Report a launch to the recorder, if there is one."""
    recorder = recording.get()
    if recorder is not None:
        recorder.add_launch(relaunch, arguments)


def launch_on_grid(known: Relaunch | None, grid: int, arguments: Sequence[Any]) -> Relaunch | None:
    """Launch what is known to launch the kernel for arguments that Triton does not tell from these, on another grid and
    without Triton's look-up; None where that is not possible."""
    found = None if is_collecting() else getattr(known, "on_grid", lambda grid: None)((grid,))
    if found is not None and not _compiles_only.get():
        found(*arguments)
    return found


class LaunchCache:
    """Relaunchers by all that they depend on; the oldest is dropped when there are too many."""

    def __init__(self) -> None:
        self.relaunchers: BoundedCache[tuple, Relaunch] = BoundedCache(_MOST_LAUNCHERS)

    def __call__(self, key: tuple, first: Callable[[], Relaunch | None], arguments: Sequence[Any]) -> Relaunch | None:
        """Relaunch what was launched with this key before, else call ``first``, which launches and returns a
        relauncher (None where there is none)."""
        relaunch = self.relaunchers.get(key)
        if is_collecting():
            return relaunch or first()
        if relaunch is not None:
            relaunch(*arguments)
        else:
            relaunch = first()
            if relaunch is not None:
                self.relaunchers.keep(key, relaunch)
        report(relaunch, arguments)
        return relaunch


class Kernels:
    """Small kernels that no program generates: ``functions`` is their text, without imports and without the device
    functions that they call."""

    def __init__(self, title: str, functions: str):
        self.title, self.functions, self.launch_cache = title, functions, LaunchCache()

    @functools.cached_property
    def text(self) -> str:
        """The whole text, made when a kernel is first launched."""
        copied = "".join(copy_device_functions(self.functions))
        return f'"""{self.title}"""\n\n{IMPORTS}{copied}\n\n{self.functions.lstrip()}'

    def __call__(
        self, name: str, grid: Grid, arguments: Sequence[Any], constants: Numbers, options: Numbers | None = None
    ) -> Relaunch | None:
        """Launch the kernel ``name`` on the device of its first argument; returns what relaunches it, if there is.

        ``constants``: in the order of the text, after all arguments; ``options``: for the compiler."""
        options = options or {}
        found, given = [name, grid, arguments[0].device, *constants.values(), *options.values()], []
        for v in arguments:
            if isinstance(v, int):
                found += specialize_integer(v)
                given.append(v)
            else:
                address = v.data_ptr()
                found += v.dtype, address & 15
                given.append(address)
        key = tuple(found)
        relaunch = self.launch_cache.relaunchers.get(key)
        if relaunch is None or is_collecting():
            return self.launch_cache(key, lambda: self._first(name, grid, arguments, constants, options), arguments)
        relaunch(*given)
        report(relaunch, arguments)
        return relaunch

    def _first(
        self, name: str, grid: Grid, arguments: Sequence[Any], constants: Numbers, options: Numbers
    ) -> Relaunch | None:
        device = arguments[0].device
        with use_device(device):
            kernel = getattr(load_module(self.text), name)
            compiled = launch(kernel, grid, arguments, {**constants, **options})
            return make_relauncher(compiled, grid, tuple(constants.values()), device)


def specialize(arguments: Sequence[Any]) -> list[Any]:
    """What Triton specializes a kernel on, in all of its arguments."""
    found: list[Any] = []
    for v in arguments:
        if type(v) is int:
            found += (v == 1, v & 15 == 0, -(2**31) <= v < 2**31)
        elif isinstance(v, torch.Tensor):
            found += (v.dtype, v.data_ptr() & 15)
        elif hasattr(v, "block_shape"):  # a descriptor
            found += (type(v), v.base.dtype, *v.block_shape)
        else:
            found.append(type(v))
    return found


def specialize_integer(v: int) -> tuple[bool, ...]:
    """What Triton specializes a kernel on in an integer: 1, a multiple of 16, and whether it fits in 32 bits."""
    return v == 1, v & 15 == 0, -(2**31) <= v < 2**31
