"""Time and memory of a call, measured from outside.

Time: contenders take turns in one process and the best of several rounds counts, so that a noisy neighbour hurts all
alike. Memory: the growth of the process's peak resident set over the call, in a process of its own (Linux), so that
what any library allocates in any way is seen."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def best_times(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds of each call: the best of ``rounds``, taken in turns, after one warm-up."""
    best = dict.fromkeys(calls, float("inf"))
    for round_ in range(rounds + 1):
        for name, call in calls.items():
            gc.collect()
            start = time.perf_counter()
            call()
            took = (time.perf_counter() - start) * 1e3
            if round_ or rounds == 0:
                best[name] = min(best[name], took)
    return best


def captured(step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A step as a CUDA graph, after three runs on another stream as torch asks; and what the capture returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    return graph, found


def peak_on_gpu(step: Callable[[], object]) -> float:
    """Megabytes that a step on a GPU holds at its peak beyond what was there before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


Held = tuple[int, str]  # bytes, and who asked for them


def held_at_peak(step: Callable[[], object]) -> list[Held]:
    """What a step on a GPU holds when it holds most, the largest first, as torch's allocator tells it."""
    step()  # what is kept from one to the next
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history("all", stacks="python")
    try:
        step()
        torch.cuda.synchronize()
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(None)
    return at_peak(trace)


def at_peak(trace: Iterable[Mapping[str, Any]]) -> list[Held]:
    """The allocations alive when they are most, of a trace of the allocator; what was there before is not counted."""
    live: dict[int, Held] = {}
    total = most = 0
    found: list[Held] = []
    for event in trace:
        if event["action"] == "alloc":
            live[event["addr"]] = event["size"], _asker(event.get("frames", ()))
            total += event["size"]
            if total > most:
                most, found = total, list(live.values())
        elif event["action"] == "free_requested":
            total -= live.pop(event["addr"], (0, ""))[0]
    return sorted(found, reverse=True)


def _asker(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost of our own functions."""
    for f in frames:
        if "monoidreduce" in f["filename"]:
            return f"{Path(f['filename']).name}:{f['line']} {f['name']}"
    return "torch"


def _resident(field: str) -> float:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise OSError(f"{_STATUS} has no {field}")


def peak_growth(call: Callable[[], object]) -> float:
    """Megabytes by which the resident set grew, at its peak, over what it was before the call."""
    gc.collect()
    _CLEAR.write_text("5")  # start the high-water mark anew
    before = _resident("VmRSS")
    kept = call()
    peak = _resident("VmHWM")
    del kept
    return max(0.0, peak - before)
