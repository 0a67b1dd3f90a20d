"""Memory over time, measured: every allocation and release that torch's allocator makes during a layer's run.

The instrument is ``torch.profiler`` with ``profile_memory=True``, as in the papers' memory profiles. Its trace holds
the address and size of every allocation, also of those inside torch's own kernels. An allocation's category follows
from when it lived:

- ``gradients``: it holds a gradient that the backward returns; the inputs, there all along, are counted with them;
- ``kept``: alive when the forward had returned, so an output, or saved for the backward;
- ``temporary``: everything else.

*Extra* memory is what is beyond the inputs and their gradients, which every implementation must hold: kept + temporary.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

CATEGORIES = {
    "gradients": "inputs and gradients",
    "kept": "outputs and saved for backward",
    "temporary": "temporary",
}
_FORWARD, _BACKWARD = "monoidreduce: forward", "monoidreduce: backward"
_DEVICES = {"cpu": 0, "cuda": 1}  # the trace's numbers for them
_CPU = torch.device("cpu")

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Moment:
    """From ``seconds`` until the next moment, so many bytes of each category are alive."""

    seconds: float
    gradients: int
    kept: int
    temporary: int

    @property
    def extra(self) -> int:
        return self.kept + self.temporary

    @property
    def total(self) -> int:
        return self.gradients + self.extra


@dataclass(frozen=True)
class Profile:
    """The memory of one run: ``moments`` in order of time, the forward's end, and the run's end, in seconds."""

    moments: tuple[Moment, ...]
    forward_end: float
    end: float
    largest: int = 0  # the largest single allocation, in bytes; gradients apart

    @property
    def peak(self) -> Moment:
        """The first moment with the most bytes alive."""
        return max(self.moments, key=lambda m: m.total)

    @property
    def extra(self) -> int:
        """The peak of the extra memory, in bytes."""
        return max(m.extra for m in self.moments)


def record(
    forward: Callable[[], Tensors],
    backward: Callable[[Tensors], Tensors] | None,
    inputs: Iterable[Tensor],
    device: torch.device = _CPU,
) -> Profile:
    """Run ``forward()`` and ``backward(its outputs)``, which returns the gradients, and profile their memory.

    >>> import torch
    >>> p = record(lambda: (torch.zeros(1000) + torch.zeros(1000),), None, [])
    >>> p.extra, p.moments[-1].kept
    (12000, 4000)
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it announces each start and stop on stderr
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    # ``acc_events``: there is one cycle, but without it torch may warn that others would be dropped
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, acc_events=True
    ) as profiler:
        with record_function(_FORWARD):
            outputs = forward()
            wait()
        with record_function(_BACKWARD):
            gradients = () if backward is None else backward(outputs)
            wait()
    held = {t.untyped_storage().data_ptr() for t in gradients}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    base = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in inputs}.values())
    return _profile(events, held, base, _DEVICES[device.type])


@dataclass
class _Allocation:
    address: int
    size: int
    start: float
    end: float = float("inf")


def _profile(events: list[dict[str, Any]], gradients: set[int], base: int, device: int) -> Profile:
    """Read a trace: ``gradients`` are addresses, ``base`` the bytes of the inputs. Times in a trace are in µs."""
    spans = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] in (_FORWARD, _BACKWARD)}
    (start, forward_end), (_, end) = spans[_FORWARD], spans[_BACKWARD]
    allocations = _allocations(events, start, end, device)
    changes: list[tuple[float, str, int]] = []
    largest = 0
    for a in allocations:
        category = "temporary"
        if a.end == float("inf") and a.address in gradients:
            category = "gradients"
        elif a.start <= forward_end < a.end:
            category = "kept"
        changes.append((a.start, category, a.size))
        largest = max(largest, a.size if category != "gradients" else 0)
        if a.end != float("inf"):
            changes.append((a.end, category, -a.size))
    alive = {"gradients": base, "kept": 0, "temporary": 0}
    moments = [Moment(0.0, **alive)]
    for at, category, size in sorted(changes, key=lambda c: c[0]):
        alive[category] += size
        moments.append(Moment((at - start) * 1e-6, **alive))
    return Profile(tuple(moments), (forward_end - start) * 1e-6, (end - start) * 1e-6, largest)


def _allocations(events: list[dict[str, Any]], start: float, end: float, device: int) -> list[_Allocation]:
    """What was allocated between these times; a release of something older is not ours to count."""
    found: list[_Allocation] = []
    open_at: dict[int, _Allocation] = {}
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        at, what = event["ts"], event["args"]
        if what["Device Type"] != device or not start <= at <= end:
            continue
        if what["Bytes"] > 0:
            open_at[what["Addr"]] = _Allocation(what["Addr"], what["Bytes"], at)
            found.append(open_at[what["Addr"]])
        elif what["Addr"] in open_at:
            open_at.pop(what["Addr"]).end = at
    return found
