"""From kernel text to a launch: JIT modules, caches, tensor descriptors, recorded launches.

What Triton needs before its first kernel is started here, by a call that has not imported the engine yet."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading


@functools.cache
def start_triton() -> tuple[threading.Thread, ...]:
    """Start what Triton does once in a process before it compiles or finds a kernel: its driver, for which a C compiler
    takes most of a second once on a machine, and the hash of its own files, hundreds of megabytes. Both leave Python
    free: threads do them while a first call is planned and its kernels are written. The first launch waits for them."""
    threads = [threading.Thread(target=work, name=work.__name__) for work in (_start_driver, _hash_triton)]
    importlib.import_module("triton")
    for thread in threads:
        thread.start()
    return tuple(threads)


def _start_driver() -> None:
    with contextlib.suppress(Exception):  # the first launch raises it
        importlib.import_module("triton.runtime").driver.active.utils  # noqa: B018


def _hash_triton() -> None:
    for place in ("triton.runtime.cache", "triton.compiler.compiler"):  # from Triton 3.5 on, and before
        with contextlib.suppress(Exception):
            importlib.import_module(place).triton_key()
            return
