"""Which tiles are fastest: every kernel of the cases below, alone, with every candidate plan.

    python3 -m benchmarks.tiles --out DIR [--only WORD] [--workers N]

A kernel is met as the layer's own forward and backward call it, on the layer's own tensors. All candidates are first
compiled by many processes (Triton keeps them on disk), then timed one after another. The results say what
``monoidreduce/engine/triton/plan.py`` should choose.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import monoidreduce as mr
from monoidreduce.engine import triton as engine
from monoidreduce.engine.triton import KernelPlan, describe, use_plan

from . import gpu

SMALL = [(64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 3), (64, 128, 4, 2)]
LARGE = [(128, 64, 8, 3), (128, 32, 8, 3), (128, 128, 8, 2)]
BOXES = [
    (*p, 0, True)
    for p in ((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 3), (64, 128, 4, 2), (128, 64, 8, 3), (128, 128, 8, 2))
]
CANDIDATES = SMALL + LARGE + BOXES
TINY = [
    (64, 32, 4, 2),
    (32, 64, 4, 2),
    (32, 32, 4, 2),
    (64, 64, 4, 2),
    (128, 32, 4, 2),
    (64, 64, 8, 2),
    (32, 128, 4, 2),
]


def _normal(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.randn(*s, device="cuda", dtype=dtype) for s in shapes]


def _small(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [t * t.shape[-1] ** -0.25 for t in _normal(*shapes)]


CASES: dict[str, tuple[Any, Callable[[], list[torch.Tensor]], list]] = {
    "attention full 4096 D128": (gpu.attention128, lambda: gpu._qkv(4, 16, 4096, 128), CANDIDATES),
    "attention causal 4096 D128": (gpu.causal128, lambda: gpu._qkv(4, 16, 4096, 128), CANDIDATES),
    "attention full 4096 D64": (gpu.attention64, lambda: gpu._qkv(4, 32, 4096, 64), CANDIDATES),
    "attention causal 4096 D64": (gpu.causal64, lambda: gpu._qkv(4, 32, 4096, 64), CANDIDATES),
    "attention causal 16384 D128": (gpu.causal128, lambda: gpu._qkv(1, 16, 16384, 128), CANDIDATES),
    "mlp 16384×16384 D128": (gpu.mlp, lambda: _small((16384, 128), (16384, 128), (16384, 128)), CANDIDATES),
    "mlp 16384×65536 D64": (gpu.mlp, lambda: _small((16384, 64), (65536, 64), (65536, 64)), CANDIDATES),
    "contrastive 32768 D128": (gpu.contrastive, lambda: _small((32768, 128), (32768, 128)), CANDIDATES),
    "contrastive 32768 D256": (gpu.contrastive, lambda: _small((32768, 256), (32768, 256)), CANDIDATES),
    "gaussian 100000 D3": (
        gpu.gaussian,
        lambda: _normal((100_000, 3), (100_000, 3), (100_000,), dtype=torch.float32),
        TINY,
    ),
    "gaussian 100000 D64": (
        gpu.gaussian,
        lambda: _normal((100_000, 64), (100_000, 64), (100_000,), dtype=torch.float32),
        [(64, 64, 4, 2), (128, 32, 4, 2)],  # seconds each
    ),
}


def kernels(case: str) -> dict[str, Callable[[], Callable[[], Any]]]:
    """The kernels of a case, by name: each makes a call of one direction of a fold, on the tensors of the layer."""
    op, make, _ = CASES[case]
    found: dict[str, Callable[[], Callable[[], Any]]] = {}
    real = engine.Ready

    class Recorder(real):  # type: ignore[misc, valid-type]
        def __call__(self, leaves: list[Any]) -> Any:
            given = [v.detach() if isinstance(v, torch.Tensor) else v for v in leaves]
            values, _ = self._merged(given)
            for one in self.launches:
                name = ("forward", "row gradient", "column gradients")[min(len(found), 2)]
                found[name] = functools.partial(_launched, one, values)
            return super().__call__(leaves)

    args = [a.requires_grad_() for a in make()]
    engine.Ready = Recorder  # type: ignore[misc]
    engine._READY.clear()
    try:
        with mr.use(engine="triton"):
            y = op(*args)
            torch.autograd.grad(y, args, torch.randn_like(y))
    finally:
        engine.Ready = real  # type: ignore[misc]
    return found


def _launched(one: Any, values: Any) -> Callable[[], Any]:
    """The same launch with the plan in force."""
    again = engine.launch.Launch(one.fold, one.over, values, one.batch, one.sizes)
    return lambda: again(values, lambda: values)


def timed(make: Callable[[], Callable[[], Any]], plan: tuple, rep: int) -> float:
    """Milliseconds with a plan."""
    with use_plan({"cols": KernelPlan(*plan), "rows": KernelPlan(*plan)}):
        call = make()
        call()
        return gpu.bench(call) if rep else 0.0


def _compile(case: str, mine: list[tuple], running: bool) -> None:
    describe.MANY = 2**62 if running else describe.MANY
    calls = kernels(case)
    for plan in mine:
        for call in calls.values():
            with contextlib.suppress(Exception):  # too large for the hardware: when measured, it will say so
                timed(call, plan, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--running", action="store_true", help="never bound a softmax's maximum beforehand")
    options = parser.parse_args()
    began = time.time()
    cases = [c for c in CASES if any(word in c for word in options.only.split("|"))]
    describe.MANY = 2**62 if options.running else describe.MANY
    jobs = [(c, CASES[c][2][k::3], options.running) for c in cases for k in range(3)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        list(pool.map(_compile, *zip(*jobs, strict=True)))
    print(f"compiled in {time.time() - began:.0f} s", flush=True)
    results: dict[str, dict[str, Any]] = {}
    for case in cases:
        for name, make in kernels(case).items():
            times: dict[str, Any] = {}
            for plan in CASES[case][2]:
                try:
                    times[str(plan)] = round(timed(make, plan, 1), 4)
                except Exception as error:
                    times[str(plan)] = f"{type(error).__name__}: {str(error)[:100]}"
            results[f"{case}, {name}"] = times
            ranked = sorted((t, p) for p, t in times.items() if isinstance(t, float))
            print(f"{case}, {name}: " + "  ".join(f"{p} {t:.3f}" for t, p in ranked[:5]), flush=True)
            (options.out / f"tiles{'-running' if options.running else ''}.json").write_text(
                json.dumps(results, indent=1)
            )
        torch.cuda.empty_cache()
    print(f"{time.time() - began:.0f} s in all")


if __name__ == "__main__":
    main()
