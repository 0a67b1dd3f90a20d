"""The Triton engine on a GPU: first whether it is right, then how fast it is beside what users would pick instead.

    python3 -m benchmarks.gpu --out DIR [--budget SECONDS] [--workers N]

Correctness: every layer of the zoo and a few wide ones, in float32, bfloat16 and float16, values and gradients; the
error against float64 may be at most twice that of plain torch in the same precision. Speed: attention beside PyTorch's
own (cuDNN, flash) and FlexAttention; a perceptron and a contrastive loss beside ``torch.compile`` of the dense form.
Prints a short table and writes ``gpu.json``, as far as it got, whenever it learns something.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import monoidreduce as mr

from . import gpu_works, host, language_works
from .cpu import commit, environment
from .gpu_right import attention64, attention128, causal64, causal128, correctness, dense_mlp, mlp
from .measure import peak_on_gpu

# Speed ----------------------------------------------------------------------------------------------------------------


ROUNDS, LONG = 3, 100.0  # of contenders in turns; milliseconds from which on one of them will do


def bench(fn: Callable[[], Any]) -> float:
    """Median milliseconds."""
    from triton.testing import do_bench

    return float(do_bench(fn, warmup=10, rep=50, return_mode="median"))


def in_turns(
    contenders: dict[str, tuple[Callable[..., torch.Tensor], dict[str, Any]]], args: list[torch.Tensor], backward: bool
) -> dict[str, list[float] | str]:
    """Milliseconds of forward, and of forward with backward, of calls that share a chip whose clock follows its heat:
    they are measured by turns, and the median of the rounds counts. ``contenders``: a call, and what it is used with.
    """
    given = [a.detach().requires_grad_(a.is_floating_point()) for a in args]
    steps: dict[str, list[Callable[[], None]]] = {}
    found: dict[str, list[float] | str] = {}
    for name, (fn, how) in contenders.items():
        try:
            steps[name] = _steps(fn, how, args, given, backward)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[:300]}"
    for k in range(1 + backward):
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(ROUNDS):
            for name, own in steps.items():
                if not times[name] or times[name][0] < LONG:
                    times[name].append(bench(own[k]))
        for name, rounds in times.items():
            found.setdefault(name, []).append(round(statistics.median(rounds), 4))  # type: ignore[union-attr]
    torch.cuda.empty_cache()
    return {name: found[name] for name in contenders}


def _steps(
    fn: Callable[..., torch.Tensor],
    how: dict[str, Any],
    args: list[torch.Tensor],
    given: list[torch.Tensor],
    backward: bool,
) -> list[Callable[[], None]]:
    """What is timed of a call, each done once: compiled."""

    def forward() -> None:
        with torch.no_grad(), mr.use(**how):
            fn(*args)

    def whole() -> None:
        with mr.use(**how):
            torch.autograd.grad(fn(*given), given, g, allow_unused=True)  # a peer may read fewer inputs

    forward()
    if not backward:
        return [forward]
    g = torch.randn_like(fn(*args))
    whole()
    return [forward, whole]


SHAPES = [
    ("full", 4, 16, 4096, 128),
    ("causal", 4, 16, 4096, 128),
    ("full", 4, 32, 4096, 64),
    ("causal", 4, 32, 4096, 64),
    ("full", 1, 16, 16384, 128),
    ("causal", 1, 16, 16384, 128),
]


def _attention(kind: str, d: int) -> mr.Op:
    return {"full64": attention64, "full128": attention128, "causal64": causal64, "causal128": causal128}[f"{kind}{d}"]


def _qkv(b: int, h: int, s: int, d: int) -> list[torch.Tensor]:
    return [torch.randn(b, h, s, d, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def peers(kind: str) -> dict[str, Callable]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def sdpa(backend: Any) -> Callable:
        def call(q, k, v):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=kind == "causal")

        return call

    return {"cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION), "flash": sdpa(SDPBackend.FLASH_ATTENTION)}


def flex(kind: str, s: int) -> Callable:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if kind == "causal":
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, s, s, device="cuda")
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def time_attention(clock: Callable[[], bool], save: Callable[[str, Any], None], rows: list[dict]) -> None:
    for kind, b, h, s, d in SHAPES:
        if not clock():
            return
        args, ours = _qkv(b, h, s, d), _attention(kind, d)
        others = peers(kind) | ({"Flex": flex(kind, s)} if clock() else {})
        _row(f"attention {kind} {b}×{h}×{s}×{d}", ours, {"engine": "triton"}, others, args, True, save, rows)


def time_others(clock: Callable[[], bool], save: Callable[[str, Any], None], rows: list[dict], only: str) -> None:
    works = [*gpu_works.attention_variants(), *gpu_works.perceptrons(), *gpu_works.clouds()]
    works += [*gpu_works.stored_operands(), *language_works.works()]
    for work in works:
        if not any(word in work.name for word in only.split("|")):
            continue
        if not clock():
            return
        how = {"engine": "triton", "strict": True} | work.how
        _row(work.name, work.ours, how, work.peers, work.args(), not work.forward_only, save, rows)


def _row(
    name: str,
    ours: Callable,
    how: dict[str, Any],
    others: Mapping[str, Callable],
    args: list[torch.Tensor],
    backward: bool,
    save: Callable[[str, Any], None],
    rows: list[dict],
) -> None:
    """Measure a work and show it."""
    contenders = {"ours": (ours, how)} | {k: (fn, {"strict": False}) for k, fn in others.items()}
    times = in_turns(contenders, args, backward)
    with mr.use(**how):
        memory = _guarded(extra if backward else extra_forward, ours, args)
    row = {"work": name, "ours": times.pop("ours"), "MB": memory, **times}
    _show(row)
    rows.append(row)
    save("speed", rows)


def extra_forward(fn: Callable[..., torch.Tensor], args: list[torch.Tensor]) -> tuple[float, ...]:
    """Peak memory, in MB, of a forward without gradients beyond inputs and result."""
    with torch.no_grad():
        result = fn(*args)
        own = result.numel() * result.element_size() / 1e6
        del result
        return (peak_on_gpu(lambda: fn(*args)) - own,)


def extra(fn: Callable[..., torch.Tensor], args: list[torch.Tensor]) -> tuple[float, ...]:
    """Peak memory, in MB, of forward and backward beyond inputs, result and gradients."""
    given = [a.detach().requires_grad_() for a in args]
    y = fn(*given)
    g = torch.randn_like(y)
    torch.autograd.grad(y, given, g)
    del y
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = fn(*given)
    kept = [y, *torch.autograd.grad(y, given, g)]
    torch.cuda.synchronize()
    own = sum(t.numel() * t.element_size() for t in kept)
    return ((torch.cuda.max_memory_allocated() - before - own) / 1e6,)


def time_hosts(save: Callable[[str, Any], None]) -> None:
    """What a tiny call costs the host, ours and torch's own."""
    found = {}
    for name, args, ours, theirs in itertools.islice(host.cases("cuda", torch.bfloat16), 2):
        found[name] = {"ours": host.both(ours, args, 200), "torch": host.both(theirs, args, 200)}
        print(name, found[name], flush=True)
    save("host", found)


# Promises -------------------------------------------------------------------------------------------------------------


def promises(save: Callable[[str, Any], None]) -> None:
    """A thousand runs that are bitwise equal; a tensor of more than 2³¹ elements."""
    q, k, v = (a.requires_grad_() for a in _qkv(2, 4, 1000, 128))
    g = torch.randn_like(q)
    first = [t.clone() for t in torch.autograd.grad(causal128(q, k, v), (q, k, v), g)]
    equal = all(
        all(
            torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(causal128(q, k, v), (q, k, v), g), strict=True)
        )
        for _ in range(1000)
    )
    save("1,000 runs bitwise equal", equal)
    x = torch.randn(2**31 // 64 + 1000, 64, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    y = mlp(x, w, w)
    last = slice(len(x) - 500, len(x))
    expected = dense_mlp(x[last].float(), w.float(), w.float())
    error = float((y[last].float() - expected).norm() / expected.norm())
    save("relative error past 2^31 elements", error)
    print(f"1,000 runs bitwise equal: {equal}; past 2^31 elements, relative error {error:.1e}", flush=True)
    del x, y
    torch.cuda.empty_cache()


def _guarded(
    measure: Callable[..., tuple[float, ...]], fn: Callable[..., torch.Tensor], args: list[torch.Tensor]
) -> list[float] | str:
    try:
        return [round(t, 4) for t in measure(fn, args)]
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        torch.cuda.empty_cache()


def _show(row: dict[str, Any]) -> None:
    cells = [
        f"{k} {' / '.join(f'{t:.3f}' for t in v)}" if isinstance(v, list) else f"{k} {str(v)[:90]}"
        for k, v in row.items()
        if k != "work"
    ]
    print(f"{row['work']:36} {'   '.join(cells)}", flush=True)


def _environment(commit: str | None) -> dict[str, str]:
    """What was measured, on what, and how to measure it again."""
    found = environment()
    found["machine"] = torch.cuda.get_device_name()
    found["versions"] += f", triton {importlib.metadata.version('triton')}"
    found["commit"] = commit or found["commit"]
    given = sys.argv[1:]
    given[given.index("--out") + 1] = "DIR"  # where the results went is nobody's business
    found["command"] = "python -m benchmarks.gpu " + " ".join(given)
    return found


def markdown(results: dict[str, Any]) -> str:
    """The results as a table: milliseconds forward / forward+backward, and ours over theirs."""
    lines = [f"- {k}: {v}" for k, v in results["environment"].items()]
    if "cases" in results:
        wrong = ", ".join(f"{p['name']} ({p['precision']})" for p in results.get("problems", ())) or "none"
        lines.append(f"- checked against float64 first: {results['cases']} cases; outside the rule: {wrong}")
        lines.append(
            f"- run by the eager engine, having no kernel: {', '.join(results.get('fallbacks', ())) or 'none'}"
        )
    lines += [
        "",
        "Times in ms, forward / forward+backward, bfloat16, in turns; ratio = ours / theirs: below 1 we are faster.",
        "",
    ]
    lines += ["| work | ours | extra MB | against | theirs | ratio |", "|---|---|---|---|---|---|"]
    for row in results.get("speed", ()):
        ours = row["ours"]
        if isinstance(ours, str):
            lines.append(f"| {row['work']} | {ours} | | | | |")
            continue
        peers_of = {k: v for k, v in row.items() if k not in ("work", "ours", "MB") and not isinstance(v, str)}
        shown = lambda times: " / ".join(f"{t:.3f}" for t in times)
        memory = f"{row['MB'][0]:.1f}" if isinstance(row.get("MB"), list) else ""
        for name, theirs in peers_of.items() or [("–", [])]:
            ratio = " / ".join(f"{a / b:.2f}" for a, b in zip(ours, theirs, strict=False))
            lines.append("| " + " | ".join([row["work"], shown(ours), memory, name, shown(theirs), ratio]) + " |")
    for name, costs in results.get("host", {}).items():
        each = "; ".join(f"{who} {a:.0f} / {b:.0f}" for who, (a, b) in costs.items())
        lines.append(f"\nHost time of a tiny call, {name}, µs forward / forward+backward: {each}")
    for promise in ("1,000 runs bitwise equal", "relative error past 2^31 elements"):
        if promise in results:
            lines.append(f"\n{promise}: {results[promise]}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--correct", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--budget", type=float, default=440.0, help="seconds after which nothing new is begun")
    parser.add_argument("--workers", type=int, default=max(1, min(12, (os.cpu_count() or 4) - 2)))
    parser.add_argument("--commit", type=commit, help="what was measured, where the machine has no git")
    parser.add_argument("--only", default="", help="words, with | between: other works than plain attention, by name")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.time()
    results: dict[str, Any] = {"environment": _environment(options.commit)}
    kind = "gpu-works" if options.only else "gpu"
    stem = options.out / f"{kind}-{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M}"

    def save(key: str, value: Any) -> None:
        results[key] = value
        results["seconds"] = round(time.time() - began)
        stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        stem.with_suffix(".md").write_text(markdown(results))

    clock = lambda: time.time() - began < options.budget
    torch._dynamo.config.cache_size_limit = 256  # FlexAttention goes dense, silently, after 8 recompilations
    if options.correct:
        correctness(options.workers, save)
    rows: list[dict] = []
    time_hosts(save)
    if not options.only:
        promises(save)
        time_attention(clock, save, rows)
    time_others(clock, save, rows, options.only)
    print(f"{time.time() - began:.0f} s in all; {stem}.json and .md")


if __name__ == "__main__":
    main()
