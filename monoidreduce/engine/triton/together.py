"""The first launches of a fold, side by side: a kernel takes a second to compile, most of it outside Python's lock."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def run(calls: Sequence[Callable[[], T]], device: torch.device) -> list[T]:
    """What each call returns. On a GPU, unless a graph is recorded, each has a thread of its own, with the device, the
    stream and the settings of this one."""
    if len(calls) < 2 or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return [call() for call in calls]
    stream = torch.cuda.current_stream(device)

    def here(call: Callable[[], T]) -> T:
        with torch.cuda.device(device), torch.cuda.stream(stream), torch.no_grad():
            return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(contextvars.copy_context().run, here, call) for call in calls]
    return [f.result() for f in futures]
