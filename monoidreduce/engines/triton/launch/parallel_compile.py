"""Compile the kernels of a call in parallel, before its first launch.

A kernel takes a second to compile, and a vocabulary head needs ten. Most of that second is spent in LLVM and ptxas,
without the GIL: so a call is first run with its launches collected, each new kernel is compiled in a thread, and the
launches that follow find all of them compiled. Errors are ignored here and raised by the launch itself.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from . import jit_module

_Given = tuple[tuple[int, ...], Sequence[Any], Mapping[str, Any]]  # a launch: grid, arguments, constants and options
_Waiting = dict[Any, list[_Given]]  # by kernel

_waiting: contextvars.ContextVar[_Waiting | None] = contextvars.ContextVar("waiting", default=None)
_compiles_only: contextvars.ContextVar[bool] = contextvars.ContextVar("compiles_only", default=False)
_MOST = 4096
_launched: set[tuple] = set()  # kernels with their constants that were launched before, hence compiled


def launch(function: Any, grid: tuple[int, ...], arguments: Sequence[Any], given: Mapping[str, Any]) -> Any:
    """Launch a kernel on the current device and return what was compiled; None where launches are collected."""
    waiting, key = _waiting.get(), (function, *given.items())
    if waiting is None:
        if len(_launched) >= _MOST:
            _launched.clear()  # compiling these again only finds them in Triton's cache
        _launched.add(key)
        compiled = function.warmup(*arguments, grid=grid, **given) if _compiles_only.get() else None
        if compiled is not None:  # (an interpreter compiles nothing)
            compiled.run  # noqa: B018  loads it
            return compiled
        return function[grid](*arguments, **given)
    if key not in _launched:
        waiting.setdefault(function, []).append((grid, arguments, given))
    return None


@contextlib.contextmanager
def compile_only() -> Iterator[None]:
    """First launches inside the block compile and load a kernel and do not run it: for recordings, which are replayed
    right away. What such kernels would write is not there, so nothing inside may look at it."""
    token = _compiles_only.set(True)
    try:
        yield
    finally:
        _compiles_only.reset(token)


def is_collecting() -> bool:
    """True while launches are collected. Then nothing may run, not even compiled kernels: what they would read was not
    computed, and labels that were not written may point outside a tensor."""
    return _waiting.get() is not None


def compile_ahead(device: torch.device, launches: Callable[[], Any]) -> bool:
    """Compile the kernels that ``launches`` would launch for the first time, where there are several; whether it was
    called."""
    if not _can_compile_ahead(device):
        return False
    waiting: _Waiting = {}
    token = _waiting.set(waiting)
    try:
        with contextlib.suppress(Exception):  # the call that follows raises it
            launches()
    finally:
        _waiting.reset(token)
    if len(waiting) > 1:
        with concurrent.futures.ThreadPoolExecutor(min(len(waiting), os.cpu_count() or 1), "compiling") as threads:
            for function, own in waiting.items():
                threads.submit(contextvars.copy_context().run, _compile, function, own, device)
    return True


def _compile(function: Any, launches: list[_Given], device: torch.device) -> None:
    """All that is asked of one kernel, one after the other: its caches are its own."""
    with jit_module.use_device(device):
        for grid, arguments, given in launches:
            function.warmup(*arguments, grid=grid, **given).run  # noqa: B018  loads it, and writes its launcher


def _can_compile_ahead(device: torch.device) -> bool:
    """Whether launches can be left out: kernels are compiled there (by a Triton that does so in threads, too), nobody
    watches torch's calls, and no graph is captured."""
    if device.type != "cuda" or jit_module.triton_version() < (3, 4) or jit_module.skips_launches():
        return False
    return not (torch._C._len_torch_dispatch_stack() or torch.cuda.is_current_stream_capturing())
