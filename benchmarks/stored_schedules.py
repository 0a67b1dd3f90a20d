"""Candidate schedules of stored vectors on a GPU, timed in turns as CUDA graphs (no host), beside bfloat16.

``python -m benchmarks.stored_schedules fp8`` times FP8 attention by each schedule; ``... decode`` decoding from an INT8
or FP8 cache by each tile, ``... pages`` the same from INT8 pages, ``... late`` INT8 late interaction. Every candidate's
error against float64 on the same stored numbers is printed beside it.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

import monoidreduce as mr
from benchmarks.gpu_works import int8_with_scales
from monoidreduce import Col, Row, ops
from monoidreduce.engines.triton import KernelPlan, use_plan
from monoidreduce.engines.triton.schedules import attention as kernels

ROUNDS, REPEATS = 15, 10
_FP8 = 6.0 / 448


@contextmanager
def _schedules(changed: Mapping[str, Any]) -> Iterator[None]:
    before = kernels.STORED_SCHEDULES
    tried = tuple(replace(s, **changed) if s.widest == 128 else s for s in before)
    vars(kernels)["STORED_SCHEDULES"] = tried
    try:
        yield
    finally:
        vars(kernels)["STORED_SCHEDULES"] = before


def _attention(scale: float) -> mr.Op:
    @mr.op
    def attention(q: Row["f"], k: Col["f"], v: Col["d"]) -> torch.Tensor:
        return mr.softmax_mean(q @ k * scale, v)

    return attention


def _capture(fn: Callable[[], torch.Tensor], how: AbstractContextManager[Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    with how, torch.no_grad():
        for _ in range(3):
            fn()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fn()
    return graph, out


def _time(graph: torch.cuda.CUDAGraph, flush: torch.Tensor) -> float:
    """Milliseconds of one replay; the L2 cache is flushed before each."""
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
    for start, end in marks:
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks)


Candidate = tuple[Callable[[], Any], AbstractContextManager[Any]]


def compare(candidates: Mapping[str, Candidate], exact: Callable[[Any], torch.Tensor]) -> None:
    """Print the median time of each candidate, its ratio to the first, and its error; ``exact``: what is compared."""
    graphs, flush = dict[str, tuple[torch.cuda.CUDAGraph, Any]](), torch.empty(2**26, device="cuda")
    for name, (fn, how) in candidates.items():
        try:
            graphs[name] = _capture(fn, how)
        except Exception as error:  # a tile that does not fit, say: the others are timed
            torch.cuda.synchronize()
            print(f"{name}: {type(error).__name__} {str(error)[:150]}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, (graph, _) in graphs.items():
            times[name].append(_time(graph, flush))
    base = statistics.median(next(iter(times.values())))
    for name, (graph, out) in graphs.items():
        graph.replay()
        torch.cuda.synchronize()
        off = (exact(out) - exact(None)).square().mean().sqrt().item()
        middle = statistics.median(times[name])
        print(f"{name}: {middle:.4f} ms, {middle / base:.3f} of the first, rms error {off:.3e}", flush=True)


def fp8(heads: int, tokens: int) -> None:
    """FP8 attention by each schedule, 128 features."""
    plain = [torch.randn(heads, tokens, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    values = [(t / _FP8).to(torch.float8_e4m3fn) for t in plain]
    stored = [mr.scaled(t, _FP8, wide=torch.bfloat16) for t in values]
    q, k, v = (t[-1].double() * _FP8 for t in values)
    s = q @ k.mT * 128**-0.5
    wanted = torch.softmax(s, -1) @ v
    shipped = next(s for s in kernels.STORED_SCHEDULES if s.widest == 128)
    ways: dict[str, dict[str, Any]] = {
        "shipped": {},
        "ring 3": {"ring": 3},
        "ring 2": {"ring": 2},
    }
    candidates: dict[str, Candidate] = {
        "bfloat16": (lambda: ops.attention(plain[0], plain[1], plain[2]), nullcontext())
    }
    for at, (name, changed) in enumerate(ways.items()):
        op = _attention(128**-0.5 * (1 + at * 1e-6))  # a program of its own, so that no plan is shared
        candidates[name] = (functools.partial(op, *stored), _schedules(changed))
    print(f"FP8 attention, {heads} heads of {tokens}, {shipped}", flush=True)
    compare(candidates, lambda out: wanted if out is None else out[-1].double())


def decode(kind: str) -> None:
    """One query row against 8192 stored columns, 16 sequences of 32 heads over 8, by each tile."""
    q = torch.randn(16, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(16, 8, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.full((16,), 8192, device="cuda")
    if kind == "int8":
        stored = [mr.scaled(*int8_with_scales(t)) for t in (k, v)]
    else:
        stored = [mr.scaled((t / _FP8).to(torch.float8_e4m3fn), _FP8, wide=torch.bfloat16) for t in (k, v)]
    own = [t.dequantize(torch.float64)[:1, :1] for t in stored]
    wanted = torch.softmax(q[:1, :4].double() @ own[0].mT * 128**-0.5, -1) @ own[1]
    candidates: dict[str, Candidate] = {
        "bfloat16": (lambda: ops.attention_decode(q, k, v, lengths), nullcontext()),
        "shipped": (lambda: ops.attention_decode(q, stored[0], stored[1], lengths), nullcontext()),
    }
    for folded, warps, stages, parts in TILES:
        plan = {"cols": KernelPlan(16, folded, warps, stages, splits=parts)}
        name = f"{folded} columns, {warps} warps, {stages} stages, {parts} splits"
        candidates[name] = (lambda: ops.attention_decode(q, stored[0], stored[1], lengths), use_plan(plan))
    print(f"decoding from {kind}", flush=True)
    compare(candidates, lambda out: wanted if out is None else out[:1, :4].double())


def pages() -> None:
    """One query row of 16 sequences of 32 heads over 8, 8192 columns in INT8 pages of 64, by each tile."""
    q = torch.randn(16, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(16 * 128, 64, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    table = torch.randperm(16 * 128, device="cuda").view(16, 128)
    lengths = torch.full((16,), 8192, device="cuda")
    stored = [mr.scaled(*int8_with_scales(t)) for t in (k, v)]
    own = [t.dequantize(torch.float64)[table[0], :, 0].reshape(-1, 128) for t in stored]
    wanted = torch.softmax(q[0, :4, 0].double() @ own[0].mT * 128**-0.5, -1) @ own[1]
    call = lambda k, v: ops.attention_paged(q, k, v, mr.pages(table, lengths, page=64))
    candidates: dict[str, Candidate] = {
        "bfloat16": (lambda: call(k, v), nullcontext()),
        "shipped": (lambda: call(stored[0], stored[1]), nullcontext()),
    }
    for folded, warps, stages, parts in PAGE_TILES:
        plan = {"cols": KernelPlan(16, folded, warps, stages, splits=parts)}
        name = f"{folded} columns, {warps} warps, {stages} stages, {parts} splits"
        candidates[name] = (lambda: call(stored[0], stored[1]), use_plan(plan))
    print("decoding from int8 pages", flush=True)
    compare(candidates, lambda out: wanted if out is None else out[0, :4, 0].double())


def late() -> None:
    """INT8 late interaction of a query of 32 tokens with 8192 documents of 128, by each tile."""
    q = torch.randn(32, 128, device="cuda", dtype=torch.bfloat16)
    d = torch.randn(8192, 128, 128, device="cuda", dtype=torch.bfloat16)
    stored = [mr.scaled(*int8_with_scales(t)) for t in (q, d)]
    exact = [t.dequantize(torch.float64) for t in (stored[0], mr.scaled(*int8_with_scales(d[:64])))]
    wanted = (exact[0] @ exact[1].mT).amax(-1).sum(-1)
    candidates: dict[str, Candidate] = {
        "bfloat16": (lambda: ops.maxsim(q, d), nullcontext()),
        "shipped": (lambda: ops.maxsim(*stored), nullcontext()),
    }
    for plan in LATE_TILES:
        candidates[str(plan)] = (lambda: ops.maxsim(*stored), use_plan({"cols": KernelPlan(*plan)}))
    print("late interaction of int8", flush=True)
    compare(candidates, lambda out: wanted if out is None else out.reshape(-1)[:64].double())


# Rows, columns, warps, stages
LATE_TILES = [(64, 128, 4, 3), (32, 128, 4, 3), (32, 128, 4, 1), (32, 128, 2, 2), (32, 64, 4, 2), (32, 64, 2, 3)]
# Columns, warps, stages, splits
PAGE_TILES = [(64, 4, 4, 8), (64, 4, 3, 8), (64, 4, 2, 8), (64, 4, 2, 4), (64, 4, 1, 8), (64, 2, 3, 8), (64, 4, 4, 2)]
# Columns, warps, stages, splits: longer tiles read the queries from shared memory less often; fewer warps wait for each
# other less; one stage reads straight into registers.
TILES = [
    (64, 4, 4, 3),
    (64, 4, 3, 4),
    (64, 4, 2, 4),
    (64, 4, 1, 4),
    (128, 4, 3, 2),
    (128, 4, 2, 3),
    (128, 4, 1, 3),
    (128, 8, 3, 2),
    (128, 8, 2, 3),
    (64, 2, 4, 3),
    (64, 2, 3, 6),
    (64, 2, 1, 6),
    (32, 2, 4, 6),
    (32, 1, 3, 12),
]


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    if "fp8" in sys.argv[1:]:
        fp8(64, 4096)
        fp8(16, 16384)
    if "pages" in sys.argv[1:]:
        pages()
    if "late" in sys.argv[1:]:
        late()
    for kind in ("int8", "fp8"):
        if "decode" in sys.argv[1:]:
            decode(kind)


if __name__ == "__main__":
    main()
