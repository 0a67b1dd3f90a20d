"""From a kernel's text to a function that can be launched.

Triton reads a function's source from its file, so the text is written to a private folder (``plan/disk.py``), under the
hash of its content. What runs is the text that was just written here, never whatever the file may hold.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import hashlib
import importlib.metadata
import linecache
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ....plan import disk
from ....plan.cache import KERNELS
from ...common.generated_code import run_text
from . import encoded_descriptors


def write(text: str) -> Path:
    """The file of a text, written whole: in the private folder or, where there is none, in a temporary one."""
    name, data = f"k{hashlib.sha256(text.encode()).hexdigest()[:24]}.py", text.encode()
    place = disk.open_folder(KERNELS)
    if place is not None and (disk.read(place / name) == data or disk.write(place / name, data)):
        return place / name
    spare = disk.temporary_folder() / name
    spare.write_bytes(data)
    return spare


def load(text: str, functions: tuple[tuple[str, Any], ...] = ()) -> Any:
    """The module of a text. Triton is imported by the text itself: nothing else here needs it.

    ``functions``: by name, what the text calls and does not hold."""
    return _IDLE if _resting.get() else _loaded(text, functions)


@functools.lru_cache(maxsize=1024)
def _loaded(text: str, functions: tuple[tuple[str, Any], ...]) -> Any:
    path = str(write(text))
    module = types.ModuleType(Path(path).stem)
    module.__file__ = path
    module.__dict__.update(functions)
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    run_text(text, module.__dict__, path)
    return module


class _Idle:
    """A module of kernels, a kernel, and its launch: nothing happens."""

    def __getattr__(self, name: str) -> _Idle:
        return self

    def __getitem__(self, grid: Any) -> _Idle:
        return self

    def __call__(self, *arguments: Any, **constants: Any) -> None:
        """Launch nothing."""


_IDLE = _Idle()
_resting: contextvars.ContextVar[bool] = contextvars.ContextVar("resting", default=False)


@contextlib.contextmanager
def resting() -> Iterator[None]:
    """What is launched for the first time inside the block does nothing: for who looks at what is allocated."""
    token = _resting.set(True)
    try:
        yield
    finally:
        _resting.reset(token)


def rests() -> bool:
    """Whether launches do nothing here."""
    return _resting.get()


@dataclass(frozen=True)
class Resources:
    """What the compiler says of a kernel: registers and bytes spilled of a thread, bytes of shared memory."""

    registers: int
    spills: int
    shared: int


_watching: contextvars.ContextVar[list[Resources] | None] = contextvars.ContextVar("watching", default=None)


@contextlib.contextmanager
def watched() -> Iterator[list[Resources]]:
    """The resources of kernels first launched inside the block."""
    found: list[Resources] = []
    token = _watching.set(found)
    try:
        yield found
    finally:
        _watching.reset(token)


def note(compiled: Any) -> None:
    """Say what a kernel takes to whoever watches; the interpreter's take nothing."""
    watching = _watching.get()
    if watching is not None and getattr(compiled, "n_regs", None) is not None:
        watching.append(Resources(compiled.n_regs, 4 * compiled.n_spills, int(compiled.metadata.shared)))


def on(device: torch.device) -> Any:
    """A kernel is launched on the current device: make it this one (the interpreter has none)."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def again(compiled: Any, grid: tuple[int, ...], constants: tuple[Any, ...], device: torch.device) -> Again | None:
    """A compiled kernel's own launcher, without the look-up of a normal launch; None where this Triton has none."""
    there = hasattr(compiled, "packed_metadata") and repeats(device)
    return Again(compiled, grid, constants, device) if there else None


def repeats(device: torch.device) -> bool:
    """Whether kernels are launched again there by addresses: not by the interpreter, nor by an older Triton, whose
    launchers take no constants."""
    return device.type == "cuda" and version() >= (3, 4)


class Again:
    """Launches a compiled kernel with other arguments.

    It is right only for arguments of the same types, the same integers and pointers of the same alignment. ``start`` is
    called with ``before``, a stream, ``after``, the arguments and ``constants``, where nobody watches launches."""

    def __init__(self, compiled: Any, grid: tuple[int, ...], constants: tuple[Any, ...], device: torch.device):
        self.constants, self.device, self.before = constants, device, (*grid, 1, 1)[:3]
        after = (compiled.function, compiled.packed_metadata, None, None, None)
        found: tuple[Callable[..., None], tuple] = _under(compiled.run, self.before, after) or (compiled.run, after)
        self.start, self.after = found
        self.watched, self.stream = compiled[self.before], stream(device)

    def __call__(self, *arguments: Any) -> None:
        found = self.stream()
        if found is not None:
            self.start(*self.before, found, *self.after, *arguments, *self.constants)
            return
        with on(self.device):
            self.watched(*arguments, *self.constants)

    def opened(self, arguments: Sequence[Any]) -> tuple[Callable[..., None], Mapping[int, encoded_descriptors.Opened]]:
        """What starts it where its descriptors were taken apart, and these by their places; ``start`` and none where
        they are given as they are. Of the arguments descriptors alone are looked at."""
        return encoded_descriptors.opened(self.start, (*self.before, None, *self.after), arguments) or (self.start, {})


def _under(launcher: Any, before: tuple, after: tuple) -> tuple[Callable[..., None], tuple] | None:
    """The compiled function that one of Triton's launchers calls, and what it gives it between stream and arguments;
    None where a launch does more than that. Found by a copy that calls something else."""
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
def stream(device: torch.device) -> Callable[[], int | None]:
    """Says the current stream of a device; None where another device is the current one, or launches are watched."""
    triton = importlib.import_module("triton")
    runtime, current, now = (
        triton.knobs.runtime,
        triton.runtime.driver.active.get_current_stream,
        torch._C._cuda_getDevice,
    )
    here = device.index

    def found() -> int | None:
        if now() != here or _is_hooked(runtime.launch_enter_hook) or _is_hooked(runtime.launch_exit_hook):
            return None
        return current(here)

    return found


def _is_hooked(hook: Any) -> bool:
    """Whether somebody (a profiler) is to be told of launches: Triton has a chain of listeners, or one, or None."""
    return bool(getattr(hook, "calls", hook))


@functools.cache
def version() -> tuple[int, ...]:
    """Triton's."""
    return tuple(int(part) for part in importlib.metadata.version("triton").split("+")[0].split(".")[:2])
