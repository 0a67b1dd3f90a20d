"""Attention as models call it, by classes of shapes: ours beside cuDNN, flash and FlashAttention 4.

    python -m benchmarks.shapes --out DIR [--only CLASS ...] [--budget SECONDS] [--commit C]

Queries, keys and values are heads split from one projection (``view(B, S, H, D).transpose(1, 2)``) and the output goes
back to ``[B, S, H D]``, so that a copy on either side is counted. FlashAttention 4 takes ``[B, S, H, D]`` as it lies
and runs where it is installed, with its default and with ``deterministic=True``. Before anything is timed, values and
gradients are compared with float64 beside the first peer's. Times are taken in turns; decoding also shows the share of
the memory bandwidth, by the bytes of keys and values.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr

from .cpu import commit
from .gpu import _environment, bench
from .measure import peak_on_gpu

BANDWIDTH = 4.8e12  # bytes a second that an H200's memory is sold with
ROUNDS = 3


@dataclass(frozen=True)
class Shape:
    """One call: batch, query heads, key heads, query rows, keys, features of q and k, features of v."""

    kind: str
    b: int
    h: int
    hk: int
    rows: int
    keys: int
    d: int
    dv: int
    causal: bool
    dtype: torch.dtype = torch.bfloat16
    backward: bool = True

    @property
    def name(self) -> str:
        heads = f"{self.h}" if self.h == self.hk else f"{self.h}/{self.hk}"
        length = f"{self.rows}" if self.rows == self.keys else f"{self.rows}:{self.keys}"
        width = f"{self.d}" if self.d == self.dv else f"{self.d}/{self.dv}"
        type_ = str(self.dtype).removeprefix("torch.")
        return f"{'causal' if self.causal else 'full'} {self.b}×{heads}×{length}×{width} {type_}"


def shapes() -> Iterator[Shape]:
    """All calls, class by class."""
    both = (True, False)
    for c in both:
        yield Shape("long", 4, 16, 16, 4096, 4096, 128, 128, c)
        yield Shape("long", 4, 32, 8, 4096, 4096, 64, 64, c)
        yield Shape("long", 1, 16, 16, 16384, 16384, 128, 128, c)
    yield Shape("long", 2, 32, 8, 4096, 4096, 128, 128, True)
    yield Shape("long", 1, 32, 8, 16384, 16384, 64, 64, True)
    yield Shape("long", 4, 32, 32, 2048, 2048, 64, 64, True, torch.float16)
    yield Shape("long", 1, 8, 8, 65536, 65536, 128, 128, True)
    for d in (16, 32, 40, 72, 80, 96, 112, 160, 192, 224, 256):
        for c in both:
            yield Shape("width", 2, 16, 16, 4096, 4096, d, d, c)
    for c in both:
        yield Shape("width", 2, 16, 16, 4096, 4096, 192, 128, c)
    for b, s in ((128, 128), (64, 256), (16, 512), (4, 1024)):
        for d in (64, 128):
            for c in both:
                yield Shape("short", b, 16, 16, s, s, d, d, c)
    for b, rows, keys in ((64, 1, 1024), (8, 1, 4096), (8, 1, 32768), (1, 1, 131072), (8, 4, 8192), (8, 16, 8192)):
        yield Shape("decode", b, 32, 8, rows, keys, 128, 128, False, backward=False)
    yield Shape("decode", 8, 32, 32, 1, 8192, 64, 64, False, backward=False)
    yield Shape("float32", 2, 8, 8, 4096, 4096, 64, 64, True, torch.float32)


Call = Callable[[Tensor, Tensor, Tensor], Tensor]  # of projections [B, S, H D] to [B, S, H Dv]


def split_heads(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def _join_heads(y: Tensor) -> Tensor:
    return y.transpose(1, 2).reshape(y.shape[0], y.shape[2], -1)


def _as_model(attention: Callable[..., Tensor], s: Shape) -> Call:
    return lambda q, k, v: _join_heads(attention(split_heads(q, s.h), split_heads(k, s.hk), split_heads(v, s.hk)))


def _ours(s: Shape) -> Call:
    return _as_model(lambda q, k, v: mr.ops.attention(q, k, v, is_causal=s.causal, enable_gqa=s.h != s.hk), s)


def _sdpa(s: Shape, backend: str) -> Call:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = getattr(SDPBackend, backend)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(chosen):
            return F.scaled_dot_product_attention(q, k, v, is_causal=s.causal, enable_gqa=s.h != s.hk)

    return _as_model(call, s)


def _flex(s: Shape) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if s.causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, s.rows, s.keys, device="cuda")
    return _as_model(lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=s.h != s.hk), s)


def _fa4(s: Shape, deterministic: bool) -> Call:
    attention = importlib.import_module("flash_attn.cute").flash_attn_func

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (x.view(*x.shape[:2], n, -1) for x, n in ((q, s.h), (k, s.hk), (v, s.hk)))
        found = attention(*heads, causal=s.causal, deterministic=deterministic)
        found = found[0] if isinstance(found, tuple) else found
        return found.reshape(*found.shape[:2], -1)

    return call


def _has_fa4() -> bool:
    try:
        importlib.import_module("flash_attn.cute")
    except ImportError:
        return False
    return True


def _contenders(s: Shape, with_fa4: bool) -> dict[str, Call]:
    found = {"ours": _ours(s)}
    if s.dtype is torch.float32:
        return found | {"efficient": _sdpa(s, "EFFICIENT_ATTENTION")}
    found |= {"cuDNN": _sdpa(s, "CUDNN_ATTENTION"), "flash": _sdpa(s, "FLASH_ATTENTION")}
    if with_fa4 and s.kind in ("long", "width"):
        found["FA4"] = _fa4(s, False)
        if s.backward and s.kind == "long":
            found["FA4 deterministic"] = _fa4(s, True)
    return found


def _inputs(s: Shape) -> list[Tensor]:
    make = lambda n, heads, d: torch.randn(s.b, n, heads * d, device="cuda", dtype=s.dtype)
    return [make(s.rows, s.h, s.d), make(s.keys, s.hk, s.d), make(s.keys, s.hk, s.dv)]


def _errors(s: Shape, calls: dict[str, Call], args: list[Tensor]) -> dict[str, list[float]]:
    """Root mean square errors of the output and the gradients, relative to float64's, over one head of one batch."""
    found: dict[str, list[float]] = {}
    g = torch.randn(s.b, s.rows, s.h * s.dv, device="cuda", dtype=s.dtype)
    exact = _exact(s, args, g)
    for name, call in calls.items():
        given = [a.detach().requires_grad_() for a in args]
        try:
            y = call(*given)
            grads = torch.autograd.grad(y, given, g) if s.backward else ()
        except Exception:
            continue
        parts = [y.detach()[0, :, : s.dv], *(_first(t, n) for t, n in zip(grads, (s.d, s.d, s.dv), strict=False))]
        found[name] = [float((p.double() - e).norm() / e.norm()) for p, e in zip(parts, exact, strict=False)]
    return found


def _first(t: Tensor, width: int) -> Tensor:
    return t[0, :, :width]


def _exact(s: Shape, args: list[Tensor], g: Tensor) -> list[Tensor]:
    """Output and gradients of the first query head, in float64; of k and v over all query heads of the first group."""
    group = s.h // s.hk
    q, k, v = (
        args[0][0, :, : group * s.d].double(),
        args[1][0, :, : s.d].double(),
        args[2][0, :, : s.dv].double(),
    )
    outputs, grads = [], [torch.zeros_like(k), torch.zeros_like(v)]
    first: list[Tensor] = []
    for n in range(group if s.backward else 1):
        leaves = [x.detach().requires_grad_() for x in (q[:, n * s.d : (n + 1) * s.d], k, v)]
        logits = leaves[0] @ leaves[1].T / s.d**0.5
        if s.causal:
            above = torch.ones(logits.shape, dtype=torch.bool, device="cuda").triu(1)
            logits = logits.masked_fill(above, -torch.inf)
        y = torch.softmax(logits, -1) @ leaves[2]
        outputs.append(y.detach())
        if s.backward:
            made = torch.autograd.grad(y, leaves, g[0, :, n * s.dv : (n + 1) * s.dv].double())
            first = first or [made[0]]
            grads = [a + b for a, b in zip(grads, made[1:], strict=True)]
    return [outputs[0], *first, *grads]


def _steps(call: Call, args: list[Tensor], backward: bool) -> list[Callable[[], object]]:
    """What is timed of a call, each done once: compiled."""

    def forward() -> None:
        with torch.no_grad():
            call(*args)

    forward()
    if not backward:
        return [forward]
    given = [a.detach().requires_grad_() for a in args]
    g = torch.randn_like(call(*args))
    whole = lambda: torch.autograd.grad(call(*given), given, g)
    whole()
    return [forward, whole]


def measure(s: Shape, with_fa4: bool) -> dict[str, Any]:
    """Milliseconds of forward and of both, in turns, peak megabytes of both, and errors."""
    args = _inputs(s)
    calls = _contenders(s, with_fa4)
    row: dict[str, Any] = {"class": s.kind, "work": s.name, "ms": {}, "MB": {}, "why": {}}
    if s.rows * s.keys <= 4096 * 4096:
        row["errors"] = _errors(s, {n: calls[n] for n in list(calls)[:2]}, args)
    steps: dict[str, list[Callable[[], object]]] = {}
    if s.d != s.dv:  # what cuDNN and flash may refuse
        calls["Flex"] = _flex(s)
    for name, call in calls.items():
        try:
            steps[name] = _steps(call, args, s.backward)
            row["MB"][name] = round(peak_on_gpu(steps[name][-1]), 1)
        except Exception as error:
            row["why"][name] = f"{type(error).__name__}: {str(error)[:200]}"
    for k in range(1 + s.backward):
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(ROUNDS):
            for name, own in steps.items():
                times[name].append(bench(own[k]))
        for name, rounds in times.items():
            row["ms"].setdefault(name, []).append(round(sorted(rounds)[len(rounds) // 2], 4))
    if s.kind == "decode" and "ours" in row["ms"]:
        read = (args[1].numel() + args[2].numel()) * args[1].element_size()
        row["bandwidth"] = {n: round(read / (t[0] * 1e-3) / BANDWIDTH, 3) for n, t in row["ms"].items()}
    torch.cuda.empty_cache()
    return row


def best_peer(row: dict[str, Any], step: int) -> tuple[str, float] | None:
    """The fastest of the others."""
    others = {n: t[step] for n, t in row["ms"].items() if n not in ("ours", "FA4 deterministic") and len(t) > step}
    name = min(others, key=others.get, default=None)  # type: ignore[arg-type]
    return None if name is None else (name, others[name])


def markdown(results: dict[str, Any]) -> str:
    """The results as tables, one a class."""
    lines = [f"- {k}: {v}" for k, v in results["environment"].items()]
    lines += ["", "Times in ms, forward / forward+backward, in turns; ratio to the fastest of the others in the row."]
    rows = results["rows"]
    for kind in dict.fromkeys(r["class"] for r in rows):
        mine = [r for r in rows if r["class"] == kind]
        names = [n for n in dict.fromkeys(n for r in mine for n in r["ms"]) if n != "ours"]
        extra = ["of the bandwidth"] if kind == "decode" else ["peak MB, ours / least of the others"]
        head = ["work", "ours", *names, "ratio", *extra, "error over the peer's"]
        lines += ["", f"## {kind}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for r in mine:
            shown = lambda t: " / ".join(f"{x:.3f}" for x in t) if t else "–"
            own = r["ms"].get("ours")
            if own is None:
                lines.append(f"| {r['work']} | {r['why'].get('ours', '')} |" + " |" * (len(head) - 2))
                continue
            ratios = [f"{own[k] / p[1]:.2f}" for k in range(len(own)) if (p := best_peer(r, k))]
            if kind == "decode":
                last = f"{r['bandwidth']['ours']:.0%}"
            else:
                least = min((m for n, m in r["MB"].items() if n != "ours"), default=None)
                last = f"{r['MB'].get('ours')} / {least}"
            errors = list(r.get("errors", {}).values())
            compared = "–"
            if len(errors) == 2:
                compared = " ".join(f"{a / max(b, 1e-9):.2f}" for a, b in zip(*errors, strict=True))
            cells = [r["work"], shown(own), *(shown(r["ms"].get(n)) for n in names), " / ".join(ratios), last, compared]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--only", nargs="*", default=[], help="classes, in a file of their own: long, width, short, decode, float32"
    )
    parser.add_argument("--budget", type=float, default=400.0, help="seconds after which nothing new is begun")
    parser.add_argument("--commit", type=commit, help="what was measured, where the machine has no git")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.time()
    environment = _environment(options.commit)
    environment["command"] = environment["command"].replace("benchmarks.gpu", "benchmarks.shapes")
    results: dict[str, Any] = {"environment": environment, "rows": []}
    kind = "-".join(["shapes", *options.only])
    stem = options.out / f"{kind}-{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M}"
    torch._dynamo.config.cache_size_limit = 256
    with_fa4 = _has_fa4()
    for shape in shapes():
        if options.only and shape.kind not in options.only:
            continue
        if time.time() - began > options.budget:
            print("out of time before", shape.name, file=sys.stderr)
            break
        row = measure(shape, with_fa4)
        results["rows"].append(row)
        print(row["class"], row["work"], row["ms"], row.get("bandwidth", ""), row["why"] or "", flush=True)
        stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        stem.with_suffix(".md").write_text(markdown(results))
    print(f"{time.time() - began:.0f} s in all; {stem}.json and .md")


if __name__ == "__main__":
    main()
