"""Columns streamed from the host through a GPU, beside the bandwidth of a bare copy.

    python3 -m benchmarks.stream_gpu --out DIR [--gib GIB] [--budget SECONDS] [--commit HASH]

The copy bandwidth is that of pinned memory to the device in one piece of 256 MiB, again and again. The corpus lies in
pinned memory, in pageable memory, or in a file that is mapped; the process may hold a quarter of it on the device. A
search for the ten best and a sum over all columns read it chunk by chunk; both are checked against plain torch first.
"device" is one chunk that is there already, folded as often: the work without any copy. The best of two counts.
Writes ``stream-*.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, no_type_check

import numpy
import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.sources import BYTES

from .cpu import commit, environment

FEATURES, ROWS, MIB = 128, 32, 2**20
CHUNKS = (16, 64, 128, 256)  # MiB
GOAL = 0.85


@mr.op
@no_type_check
def search(x: Row["d"], y: Col["d"]):
    return mr.topk(x @ y, 10).indices


@mr.op
@no_type_check
def total(x: Row["d"], y: Col["d"]):
    return mr.sum(torch.tanh(x @ y))


def seconds(call: Callable[[], Any], rounds: int = 2) -> float:
    """The best of several, after a warm-up."""
    call()
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def copy_bandwidth(pinned: bool) -> float:
    """Bytes a second from the host to the device, in large pieces."""
    here = torch.ones(256 * MIB, dtype=torch.uint8, pin_memory=pinned)
    there = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")

    def copies() -> None:
        for _ in range(8):
            there.copy_(here, non_blocking=True)

    return 8 * here.nbytes / seconds(copies)


def staging_bandwidth() -> float:
    """Bytes a second from pageable to pinned memory, by torch's threads."""
    here, there = torch.ones(64 * MIB), torch.empty(64 * MIB, pin_memory=True)
    return here.nbytes / seconds(lambda: there.copy_(here))


def corpus(gib: float, dtype: torch.dtype, pinned: bool) -> Tensor:
    """Columns that differ, made of one random block."""
    count = int(gib * 2**30) // (FEATURES * dtype.itemsize)
    whole = torch.empty(count, FEATURES, dtype=dtype, pin_memory=pinned)
    block = torch.randn(min(count, 2**17), FEATURES, generator=torch.Generator().manual_seed(0)).to(dtype)
    for k, part in enumerate(whole.split(len(block))):
        torch.mul(block[: len(part)], 1 + k / 64, out=part)
    return whole


def check(x: Tensor, y: Tensor) -> dict[str, float]:
    """Both ops beside plain torch, which multiplies what the corpus holds block by block."""
    parts = [(x.double() @ part.cuda().double().T) for part in y.split(2**17)]
    best = torch.cat([p.topk(10).values for p in parts], 1).topk(10).values
    exact = torch.stack([torch.tanh(p).sum(1) for p in parts]).sum(0)
    places = search.stream(x).over(mr.chunks(y, size=100_000, device="cuda"), quiet=True)
    found = torch.stack([(x[r].double() * y[places[r].cpu()].cuda().double()).sum(-1) for r in range(len(x))])
    summed = total.stream(x).over(mr.chunks(y, size=100_000, device="cuda"), quiet=True)
    scale = best.abs().amax()
    return {
        "ten best": float((found.sort(descending=True).values - best).abs().amax() / scale),
        "sum": float((summed.double() - exact).abs().amax() / exact.abs().amax()),
    }


def source(where: str, gib: float, dtype: torch.dtype, folder: str) -> Any:
    """The corpus, where it is to lie."""
    if where == "device":
        return corpus(max(CHUNKS) / 1024, dtype, True).cuda()
    y = corpus(gib, dtype, where == "pinned")
    if where != "mapped file":
        return y
    numpy.save(f"{folder}/corpus.npy", y.numpy())
    return numpy.load(f"{folder}/corpus.npy", mmap_mode="r")


def cut(y: Any, where: str, gib: float, size: int) -> Any:
    """The corpus in chunks of ``size`` columns."""
    if where != "device":
        return mr.chunks(y, size=size, device="cuda")
    return [(y[:size],)] * max(1, int(gib * 2**30) // y[:size].nbytes)


def rows(gib: float, bandwidth: float, clock: Callable[[], bool], show: Callable[[dict], None]) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(1)).to("cuda", dtype)
        errors = check(x, corpus(0.125, dtype, True))
        for where in ("device", "pinned", "pageable", "mapped file"):
            if where == "mapped file" and dtype == torch.bfloat16:  # numpy has no such numbers
                continue
            with tempfile.TemporaryDirectory() as folder:
                y = source(where, gib, dtype, folder)
                for op, name in ((search, "ten best"), (total, "sum")):
                    for mib in CHUNKS:
                        if clock():
                            chunks = cut(y, where, gib, mib * MIB // (FEATURES * dtype.itemsize))
                            found = measured(op, x, chunks, int(gib * 2**30), bandwidth)
                            what = {"work": name, "type": str(dtype)[6:], "from": where, "chunk MiB": mib}
                            show({**what, **found, "error": errors[name]})
                y = chunks = None
                gc.collect()
                torch.cuda.empty_cache()


def measured(op: Any, x: Tensor, chunks: Any, nbytes: int, bandwidth: float) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        rate = nbytes / seconds(lambda: op.stream(x).over(chunks, quiet=True))
    peak = round(torch.cuda.max_memory_allocated() / MIB)
    return {"GB/s": round(rate / 1e9, 1), "of copy": round(rate / bandwidth, 3), "device MiB": peak}


def summary(results: dict[str, Any]) -> str:
    """The table at the size that a chunk has unless told otherwise."""
    return markdown({**results, "rows": [r for r in results["rows"] if r["chunk MiB"] * MIB == BYTES]})


def markdown(results: dict[str, Any]) -> str:
    lines = [f"- {k}: {v}" for k, v in results["environment"].items()]
    lines += [
        f"- copy, pinned to device: {results['copy'] / 1e9:.1f} GB/s",
        f"- copy, pageable to device: {results['pageable'] / 1e9:.1f} GB/s",
        f"- copy, pageable to pinned: {results['staging'] / 1e9:.1f} GB/s ({results['threads']} threads)",
        f"- corpus: {results['gib']} GiB; allowed on the device: {results['limit MiB']} MiB; {ROWS} rows of {FEATURES}",
        "",
        f"Bytes of columns a second, and their part of the copy from pinned memory (goal {GOAL}). What lies in",
        "pageable memory or in a mapped file is first copied to pinned memory by the host, which is the limit there.",
        "",
        "| work | type | corpus in | chunk, MiB | GB/s | of the copy | on the device, MiB | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        "| " + " | ".join(f"{v:.1e}" if k == "error" else str(v) for k, v in r.items()) + " |" for r in results["rows"]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=4.0, help="of the corpus")
    parser.add_argument("--budget", type=float, default=50.0, help="seconds after which nothing new is begun")
    parser.add_argument("--commit", type=commit, help="what was measured, where the machine has no git")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.time()
    found = environment()
    found["machine"] = torch.cuda.get_device_name()
    found["commit"] = options.commit or found["commit"]
    found["command"] = "python -m benchmarks.stream_gpu --out DIR"
    copy, pageable = copy_bandwidth(True), copy_bandwidth(False)
    torch.cuda.empty_cache()
    limit = options.gib * 2**30 / 4  # bytes: the corpus is four times as large
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    results: dict[str, Any] = {"environment": found, "copy": copy, "pageable": pageable, "staging": staging_bandwidth()}
    results |= {"threads": torch.get_num_threads(), "gib": options.gib, "limit MiB": round(limit / MIB), "rows": []}
    stem = options.out / f"stream-{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M}"

    def show(row: dict[str, Any]) -> None:
        results["rows"].append(row)
        print(row, flush=True)
        stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        stem.with_suffix(".md").write_text(markdown(results))

    rows(options.gib, copy, lambda: time.time() - began < options.budget, show)
    print(f"{time.time() - began:.0f} s in all; {stem}.json and .md")


if __name__ == "__main__":
    main()
