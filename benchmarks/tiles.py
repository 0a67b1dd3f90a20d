"""Which plans are fastest on a GPU: the tuner on the layers below, forward and backward.

    python3 -m benchmarks.tiles --out DIR [--only WORD|WORD] [--workers N]

All candidates are first compiled by many processes (Triton keeps them on disk), then tried one after another, as
``mr.tune`` does. The results say what ``monoidreduce/engines/triton/schedules/kernel_plan.py`` should choose by itself.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import monoidreduce as mr
from monoidreduce import autotune, tuning
from monoidreduce.engines import auto

from .gpu import _qkv
from .gpu_right import attention64, attention128, causal64, causal128, contrastive, gaussian, mlp


def _normal(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.randn(*s, device="cuda", dtype=dtype) for s in shapes]


def _small(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [t * t.shape[-1] ** -0.25 for t in _normal(*shapes)]


def _points(n: int, d: int) -> list[torch.Tensor]:
    return _normal((n, d), (n, d), (n,), dtype=torch.float32)


CASES: dict[str, tuple[Any, Callable[[], list[torch.Tensor]]]] = {
    "attention full 4096 D128": (attention128, lambda: _qkv(4, 16, 4096, 128)),
    "attention causal 4096 D128": (causal128, lambda: _qkv(4, 16, 4096, 128)),
    "attention full 4096 D64": (attention64, lambda: _qkv(4, 32, 4096, 64)),
    "attention causal 4096 D64": (causal64, lambda: _qkv(4, 32, 4096, 64)),
    "attention causal 16384 D128": (causal128, lambda: _qkv(1, 16, 16384, 128)),
    "mlp 16384×16384 D128": (mlp, lambda: _small((16384, 128), (16384, 128), (16384, 128))),
    "mlp 16384×65536 D64": (mlp, lambda: _small((16384, 64), (65536, 64), (65536, 64))),
    "contrastive 32768 D128": (contrastive, lambda: _small((32768, 128), (32768, 128))),
    "contrastive 32768 D256": (contrastive, lambda: _small((32768, 256), (32768, 256))),
    "decoding 1×65536 D128": (attention128, lambda: _small((8, 1, 128), (8, 65536, 128), (8, 65536, 128))),
    "gaussian 100000 D3": (gaussian, lambda: _points(100_000, 3)),
    "gaussian 100000 D64": (gaussian, lambda: _points(100_000, 64)),
}


def _compile(case: str, part: int, parts: int) -> None:
    """Run every ``parts``-th candidate of every fold once, so that its kernel is on disk."""
    op, make = CASES[case]
    for session, call in tuning.make_sessions(autotune.record_call(op, make(), {}, backward=True).folds):
        for choice in session.list_candidates()[part::parts]:
            with contextlib.suppress(Exception):  # too large for the hardware: when it is tried, it will say so
                auto.run_choice(choice, *call)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--workers", type=int, default=14)
    options = parser.parse_args()
    began, parts = time.time(), 4
    cases = [c for c in CASES if any(word in c for word in options.only.split("|"))]
    jobs = [(c, k, parts) for c in cases for k in range(parts)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        list(pool.map(_compile, *zip(*jobs, strict=True)))
    print(f"compiled in {time.time() - began:.0f} s", flush=True)
    results: dict[str, Any] = {}
    for case in cases:
        op, make = CASES[case]
        start = time.time()
        found = mr.tune(op, *make(), quiet=True)
        print(f"{case} ({time.time() - start:.1f} s)\n{found}", flush=True)
        for fold in found.folds:
            for t in sorted(fold.trials, key=lambda t: t.seconds or 1e9)[:4]:
                print(f"    {t.choice}: {f'{1e3 * t.seconds:.3f} ms' if t.seconds else t.refused}", flush=True)
        results[case] = found.as_dict()
        (options.out / "tiles.json").write_text(json.dumps(results, indent=1))
        torch.cuda.empty_cache()
    print(f"{time.time() - began:.0f} s in all")


if __name__ == "__main__":
    main()
