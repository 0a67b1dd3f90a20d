"""Whether the Triton engine is right on a GPU (``gpu.py`` asks first of all).

Every layer of the zoo and a few wide ones, in float32, bfloat16 and float16, values and gradients: the error against
float64 may be at most twice that of plain torch in the same precision.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import math
import multiprocessing
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

import monoidreduce as mr
from monoidreduce import Col, Row

from .gpu_works import contrastive, dense_contrastive

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DRAWS = 12  # of inputs, where a result is one number


@mr.op
def attention64(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k * 0.125, v)


@mr.op
def attention128(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k * 128**-0.5, v)


@mr.op
def causal64(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(torch.where(mr.col_index <= mr.row_index, q @ k * 0.125, -torch.inf), v)


@mr.op
def causal128(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(torch.where(mr.col_index <= mr.row_index, q @ k * 128**-0.5, -torch.inf), v)


@mr.op
def mlp(x: Row["d"], p: Col["d"], q: Col["n"]):
    return mr.sum(torch.relu(x @ p) * q)


@mr.op
def gaussian(x: Row["f"], y: Col["f"], b: Col):
    return mr.sum(torch.exp(-mr.sqdist(x, y)) * b)


def dense_mlp(x, p, q):
    return torch.relu(x @ p.mT) @ q


def _wide_layers() -> dict[str, tuple[Callable, Callable, Callable]]:
    """Layers with enough features for matrix products: op, plain form, inputs (M, N, generator, dtype)."""

    def draw(*shapes, peak=1.0):
        def make(gen, dtype):
            made = [torch.randn(s, generator=gen, dtype=torch.float64) for s in shapes]
            return (made[0] * peak).to(dtype), *(t.to(dtype) for t in made[1:])

        return make

    def causal(q, k, v):
        s = q @ k.mT * q.shape[-1] ** -0.5
        return torch.softmax(s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -math.inf), -1) @ v

    full = lambda q, k, v: torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v
    found: dict[str, tuple[Callable, Callable, Callable]] = {
        "attention 64": (attention64, full, draw((2, 200, 64), (2, 333, 64), (2, 333, 64))),
        "attention 64, peaked": (attention64, full, draw((200, 64), (333, 64), (333, 64), peak=8.0)),
        "causal 128": (causal128, causal, draw((2, 3, 257, 128), (2, 1, 257, 128), (2, 1, 257, 128))),
        "causal 64": (causal64, causal, draw((4, 512, 64), (4, 512, 64), (4, 512, 64))),
        "mlp 64 → 111": (mlp, dense_mlp, draw((300, 64), (515, 64), (515, 111))),
        "mlp 59 → 59": (mlp, dense_mlp, draw((300, 59), (515, 59), (515, 59))),
        "contrastive 128": (contrastive, dense_contrastive, draw((300, 128), (300, 128), peak=0.1)),
        "contrastive 256, peaked": (contrastive, dense_contrastive, draw((300, 256), (300, 256), peak=0.5)),
    }
    return found


def _on_gpu(op: Callable) -> Callable:
    """The op on the GPU, seen from the CPU: arguments and results travel, so do gradients."""

    def call(*args: Any) -> Any:
        out = op(*(a.cuda() if isinstance(a, torch.Tensor) else a for a in args))
        home = lambda t: t.cpu()
        if isinstance(out, torch.Tensor):
            return home(out)
        return {k: home(t) for k, t in out.items()} if isinstance(out, dict) else tuple(home(t) for t in out)

    return call


def _many(result: Any) -> bool:
    """Whether every result and gradient has several numbers: the error of a single one is a matter of luck."""
    return all(t.numel() >= DRAWS for t in result.floating().values())


def check(name: str, precision: str) -> dict[str, str]:
    """Judge one layer in one precision; an empty answer means that it is right."""
    if importlib.util.find_spec("pytest") is None:  # the rules are the tests' own, but need no runner
        sys.modules.setdefault("pytest", types.SimpleNamespace(MonkeyPatch=object))  # type: ignore[arg-type]
    from tests.support.comparison import assert_error_rule, cast, run
    from tests.support.layers import BY_NAME

    dtype = PRECISIONS[precision]
    torch.set_num_threads(1)
    told: list[str] = []
    try:
        trials: list[tuple[Any, Any, Any]] = []
        while len(trials) < (2 if not trials or _many(trials[0][2]) else DRAWS):
            gen = torch.Generator().manual_seed(len(trials))
            if name in BY_NAME:
                layer = BY_NAME[name]
                op, dense, args = layer.op, layer.dense, layer.make(59, 111, gen, dtype)
            else:
                op, dense, draw = _wide_layers()[name]
                args = draw(gen, dtype)
            with warnings.catch_warnings(record=True) as heard, mr.use(engine="triton"):
                warnings.simplefilter("always")
                got = run(_on_gpu(op), args)
            told += [str(w.message) for w in heard if isinstance(w.message, mr.errors.FallbackWarning)]
            trials.append((got, run(dense, args), run(dense, cast(args, torch.float64))))
        assert_error_rule(trials, ulps=8.0)
    except Exception as error:
        kind = type(error).__name__
        where = traceback.format_exc()[-1500:] if not isinstance(error, AssertionError) else ""
        return {"name": name, "precision": precision, "problem": f"{kind}: {str(error)[:600]}", "where": where}
    return {"name": name, "precision": precision, "fallback": told[0]} if told else {}


def correctness(workers: int, save: Callable[[str, Any], None]) -> None:
    from tests.support.layers import ZOO

    asked = [(n, p) for p in PRECISIONS for n in [*_wide_layers(), *(layer.name for layer in ZOO)]]
    began = time.time()
    answers = []
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for answer in pool.map(check, *zip(*asked, strict=True)):
            if answer:
                answers.append(answer)
                save("problems", [a for a in answers if "problem" in a])
                if "problem" in answer:
                    print(f"  {answer['precision']:9} {answer['name']}: {answer['problem'][:200]}", flush=True)
    wrong = sum("problem" in a for a in answers)
    fell = sorted({a["name"] for a in answers if "fallback" in a})
    print(
        f"{len(asked)} cases, {wrong} wrong, {time.time() - began:.0f} s; fell back: {', '.join(fell) or 'none'}",
        flush=True,
    )
    save("cases", len(asked))
    save("wrong", wrong)
    save("fallbacks", fell)
