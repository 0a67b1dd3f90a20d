"""What calls cost on the host of an H200 that is not there (``pretend.py``): ``python -m benchmarks.host_pretended``.

Kernels are started as on a GPU, by addresses on a stream, and do nothing; allocations are a CPU's. Microseconds of the
process's own time, the best of several rounds, so that other processes disturb little; compare columns of one run. SDPA
is torch's own on a CPU, of two tokens, so that next to nothing is computed. ``--lengths``: milliseconds of the first
call of a new length.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr
from monoidreduce import ops
from monoidreduce.domains import base
from monoidreduce.engines.triton.launch import descriptors, driver
from monoidreduce.ops import checks
from monoidreduce.plan import settings

from . import host, pretend

_BF16 = torch.bfloat16


class Started(driver.Relauncher):
    """A kernel that is started by addresses, and does nothing."""

    def __init__(self, compiled: Any, grid: tuple[int, ...], constants: tuple[Any, ...], device: torch.device):
        self.constants, self.device, self.grid = constants, device, (*grid, 1, 1)[:3]
        self.start, self.inserted = pretend._nothing, (0, (1, 2, 3), None, None, None)

    def __call__(self, *arguments: Any) -> None:
        pass

    def on_grid(self, grid: tuple[int, ...]) -> Started:
        return Started(None, grid, self.constants, self.device)

    def open_descriptors(self, arguments: Any) -> Any:
        places = [k for k, v in enumerate(arguments) if descriptors.is_descriptor(v)]
        return self.start, {k: descriptors.EncodedByAddress(lambda at: (at, 1, 2, 3, 4)) for k in places}


@contextlib.contextmanager
def started() -> Iterator[None]:
    """Calls inside the block run on the host as they would beside an H200."""
    no = lambda *tensors: False
    with (
        mock.patch.object(driver, "find_stream", lambda device: lambda: 7),
        mock.patch.multiple(base, can_inspect=no),
        mock.patch.multiple(checks, can_inspect=no),
        mock.patch.object(settings, "interprets_kernels", lambda: True),  # asked in place of is_cuda
        mock.patch.object(Tensor, "sum_to_size", lambda t, shape: t.new_empty(shape)),
        pretend.h200(),
        mock.patch.object(driver, "make_relauncher", Started),
        mr.use(engine="auto"),
    ):
        yield


def microseconds(call: Callable[[], object], repeats: int = 40, rounds: int = 25) -> float:
    """The process's own time of one call, the best of several rounds."""
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(repeats):
            call()
        best = min(best, (time.process_time() - start) / repeats * 1e6)
    return best


def both(call: Callable[..., Tensor], given: list[Tensor]) -> str:
    """Microseconds of a forward, and of forward and backward."""
    cotangent = torch.ones_like(call(*given))
    step = lambda: torch.autograd.grad(call(*given), given, cotangent)
    return f"{microseconds(lambda: call(*given)):.0f} / {microseconds(step):.0f}"


def heads(length: int, counts: tuple[int, int, int], split: bool, grad: bool = True) -> list[Tensor]:
    """Queries, keys and values of so many heads; ``split``: from projections of [1, length, heads · 64]."""
    shape = lambda n: (1, length, n, 64) if split else (1, n, length, 64)
    made = [torch.zeros(shape(n), dtype=_BF16) for n in counts]
    return [(t.transpose(1, 2) if split else t).requires_grad_(grad) for t in made]


def attention() -> Iterator[tuple[str, str, str]]:
    causal, grouped = dict(is_causal=True), dict(is_causal=True, enable_gqa=True)
    rows: tuple[tuple[str, dict, tuple[int, int, int], bool], ...] = (
        ("attention", {}, (4, 4, 4), False),
        ("attention, causal, split heads", causal, (4, 4, 4), True),
        ("attention, causal, split heads, grouped queries", grouped, (8, 2, 2), True),
    )
    for name, options, counts, split in rows:
        ours = both(lambda *given, o=options: ops.attention(*given, **o), heads(128, counts, split))
        sdpa = lambda *given, o=options: F.scaled_dot_product_attention(*given, **o)
        yield name, ours, both(sdpa, heads(2, counts, split))


def stored_and_listed() -> Iterator[tuple[str, str, str]]:
    q, k, v = heads(256, (4, 4, 4), False, grad=False)
    k8, v8 = (torch.zeros(1, 4, 256, 64, dtype=torch.int8) for _ in range(2))
    calls: dict[str, Callable[[], object]] = {"attention, no gradients": lambda: ops.attention(q, k, v)}
    for name, shape in (("vector", (1, 4, 256)), ("head", (1, 4, 1)), ("tensor", ())):
        made = mr.scaled(k8, torch.ones(shape)), mr.scaled(v8, torch.ones(shape))
        calls[f"INT8, a scale a {name}"] = lambda made=made: ops.attention(q, *made)  # type: ignore[misc]
    index, count = torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    blocks, jagged = mr.blocks(index, count, rows=128, cols=128), mr.jagged(torch.tensor([0, 100, 256]))
    calls["blocks"] = lambda: ops.attention(q, k, v, cols=blocks)
    calls["packed sequences, causal"] = lambda: ops.attention(q, k, v, cols=jagged, is_causal=True)
    pages = mr.pages(torch.zeros(2, 4, dtype=torch.int32), torch.tensor([100, 200]), page=64)
    keys, values = (torch.zeros(8, 64, 2, 64, dtype=_BF16) for _ in range(2))
    one = torch.zeros(2, 8, 1, 64, dtype=_BF16)
    calls["pages, grouped queries"] = lambda: ops.attention_paged(one, keys, values, pages)
    x, y, z = moving = [t.clone().requires_grad_() for t in (one, keys, values)]
    calls["pages, with their gradients"] = lambda: torch.autograd.grad(ops.attention_paged(x, y, z, pages), moving, one)
    for name, call in calls.items():
        yield name, f"{microseconds(call):.0f}", ""


def lengths() -> Iterator[tuple[str, str, str]]:
    for name, found in host.lengths(torch.device("cpu"), _BF16):
        yield f"a new length, {name}", found, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("| call | ours, forward / with gradients | SDPA |\n|---|---|---|")
    with started():
        for part in (lengths,) if asked.lengths else (attention, stored_and_listed):
            for row in part():
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
