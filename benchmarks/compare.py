"""The same calls by two versions of the library, timed in turns on one GPU: what a change of the code costs.

    python -m benchmarks.compare --before CHECKOUT --out DIR [--budget SECONDS] [--only WORDS] [--commit HASH]

``CHECKOUT`` is a folder that holds another version's ``monoidreduce`` package (``git worktree add`` makes one). Each
version runs in a process of its own, so both are imported, compiled and cached apart. One process measures while the
other waits; the median over the rounds of after / before is reported, with both times and peak memory. Calls use
public names only. Writes ``compare-DATE.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROUNDS = 7
HERE = Path(__file__).resolve()
Case = tuple[Callable[..., Any], Callable[[], list[torch.Tensor]], bool]  # the call, its inputs, whether differentiated


# The calls ------------------------------------------------------------------------------------------------------------


def cases() -> dict[str, Case]:
    """What is timed, by name. Imported by each worker, which finds its own version of the library."""
    from monoidreduce import ops

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda") * scale).to(dtype)

    def heads(b: int, h: int, s: int, d: int, groups: int = 1, **kw: Any) -> Callable[[], list[torch.Tensor]]:
        return lambda: [normal(b, n, s, d, **kw) for n in (h, h // groups, h // groups)]

    def split_heads(b: int, h: int, s: int, d: int) -> Callable[[], list[torch.Tensor]]:
        return lambda: [normal(b, s, h, d).transpose(1, 2) for _ in range(3)]

    def matrices(*shapes: tuple[int, ...]) -> Callable[[], list[torch.Tensor]]:
        return lambda: [normal(*s, scale=s[-1] ** -0.25) for s in shapes]

    def points(m: int, n: int, d: int, e: int = 0) -> Callable[[], list[torch.Tensor]]:
        shapes = [(m, d), (n, d)] + ([(n, e)] if e else [])
        return lambda: [normal(*s, dtype=torch.float32) for s in shapes]

    def attention(**options: Any) -> Callable[..., torch.Tensor]:
        return lambda q, k, v: ops.attention(q, k, v, **options)

    slopes = torch.logspace(-1, -8, 16, base=2.0, device="cuda")
    documents = (torch.arange(4096, device="cuda") // 700).long()
    labels = torch.randint(32000, (8192,), device="cuda")
    words = torch.randint(128256, (4096,), device="cuda")
    wide, long = matrices((8192, 4096), (32000, 4096)), matrices((4096, 2048), (128256, 2048))
    square = ((16384, 128),) * 3
    return {
        "attention full D128": (attention(), heads(4, 16, 4096, 128), True),
        "attention causal D128": (attention(is_causal=True), heads(4, 16, 4096, 128), True),
        "attention full D64": (attention(), heads(4, 32, 4096, 64), True),
        "attention causal D64": (attention(is_causal=True), heads(4, 32, 4096, 64), True),
        "attention causal D96": (attention(is_causal=True), heads(4, 16, 4096, 96), True),
        "attention causal D256": (attention(is_causal=True), heads(2, 8, 4096, 256), True),
        "attention causal D128, float16": (attention(is_causal=True), heads(4, 16, 4096, 128, dtype=torch.half), True),
        "attention causal D64, float32": (attention(is_causal=True), heads(2, 8, 2048, 64, dtype=torch.float32), True),
        "attention causal D128, split heads": (attention(is_causal=True), split_heads(4, 16, 4096, 128), True),
        "attention causal D128, grouped queries": (
            attention(is_causal=True, enable_gqa=True),
            heads(2, 32, 4096, 128, groups=4),
            True,
        ),
        "attention window 1024": (attention(window=(1023, 0)), heads(4, 16, 4096, 128), True),
        "attention packed documents": (attention(is_causal=True, documents=documents), heads(4, 16, 4096, 128), True),
        "attention dropout": (attention(dropout_p=0.1, seed=7), heads(4, 16, 4096, 128), True),
        "attention soft cap": (attention(softcap=30.0), heads(4, 16, 4096, 128), True),
        "attention ALiBi": (attention(alibi_slopes=slopes), heads(4, 16, 4096, 128), True),
        "attention 16×1024, many heads": (attention(is_causal=True), heads(16, 16, 1024, 64), True),
        "decoding, 1 row × 32768": (
            attention(),
            lambda: [normal(8, 32, 1, 128), normal(8, 32, 32768, 128), normal(8, 32, 32768, 128)],
            False,
        ),
        "MLP relu D128": (ops.mlp, matrices(*square), True),
        "MLP gelu D128": (lambda x, p, q: ops.mlp(x, p, q, activation="gelu_tanh"), matrices(*square), True),
        "SwiGLU D128": (ops.gated_mlp, matrices(*square, (16384, 128)), True),
        "contrastive D128": (lambda x, y: ops.contrastive_loss(x, y), matrices((16384, 128), (16384, 128)), True),
        "Gaussian sum D3, float32": (lambda x, y, b: ops.kernel_sum(x, y, b), points(50000, 50000, 3, 1), True),
        "10 neighbours D64, float32": (lambda x, y: ops.knn(x, y, 10).values, points(10000, 100000, 64), False),
        "cross-entropy 8192×4096×32000": (lambda x, w: ops.linear_cross_entropy(x, w, labels), wide, True),
        "cross-entropy 4096×2048×128256": (lambda x, w: ops.linear_cross_entropy(x, w, words), long, True),
        "log-probabilities 4096×2048×128256": (lambda x, w: ops.linear_logprobs(x, w, words), long, True),
        "argmax 4096×2048×128256": (lambda x, w: ops.linear_argmax(x, w), long, False),
        "sample 4096×2048×128256": (lambda x, w: ops.linear_sample(x, w, seed=3).index, long, False),
        "50 best 4096×2048×128256": (lambda x, w: ops.linear_topk(x, w, 50).values, long, False),
        "distillation 4096×1024×32000": (
            lambda x, w, s, t: ops.linear_kl(x, w, s, t),
            matrices((4096, 1024), (32000, 1024), (4096, 2048), (32000, 2048)),
            True,
        ),
    }


# One version, in a process of its own ---------------------------------------------------------------------------------


def steps(case: Case) -> dict[str, Callable[[], Any]]:
    """What is timed of a call: ``forward``, and ``both`` where it is differentiated. Each is run once: compiled."""
    function, make, differentiated = case
    torch.manual_seed(0)
    args = make()
    found: dict[str, Callable[[], Any]] = {}

    def forward() -> None:
        with torch.no_grad():
            function(*args)

    forward()
    found["forward"] = forward
    if differentiated:
        given = [a.detach().requires_grad_() for a in args]
        cotangent = torch.randn_like(function(*given))
        asked = given[:2] if len(given) == 4 and given[0].shape[-1] != given[2].shape[-1] else given  # teachers: none

        def both() -> None:
            torch.autograd.grad(function(*given), asked, cotangent)

        both()
        found["both"] = both
    return found


def peak(step: Callable[[], Any]) -> float:
    """Peak memory of a step in MB beyond what is allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def work() -> None:
    """Answer requests, one JSON object a line: {"prepare": name}, then {"time": step} or {"memory": step}."""
    from triton.testing import do_bench

    known, ready = cases(), dict[str, Callable[[], Any]]()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "prepare" in request:
                ready.clear()
                torch.cuda.empty_cache()
                ready.update(steps(known[request["prepare"]]))
                answer: Any = list(ready)
            elif "time" in request:
                answer = float(do_bench(ready[request["time"]], warmup=10, rep=60, return_mode="median"))
            else:
                answer = peak(ready[request["memory"]])
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print("@" + json.dumps(answer), flush=True)


class Worker:
    """A process that runs one version of the library."""

    def __init__(self, checkout: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        command = [sys.executable, str(HERE), "--work"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=checkout
        )

    def send(self, **request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise RuntimeError("the worker has ended")

    def ask(self, **request: Any) -> Any:
        self.send(**request)
        return self.receive()


# Both, in turns -------------------------------------------------------------------------------------------------------


def compare(name: str, workers: dict[str, Worker]) -> list[dict[str, Any]]:
    """Rows of one call: a row for the forward and one for both, or one row that says what failed."""
    for worker in workers.values():  # compiled at the same time
        worker.send(prepare=name)
    prepared = {version: worker.receive() for version, worker in workers.items()}
    failed = {version: answer["error"] for version, answer in prepared.items() if isinstance(answer, dict)}
    if failed:
        return [{"call": name, "failed": failed}]
    rows = []
    for step in prepared["after"]:
        times: dict[str, list[float]] = {version: [] for version in workers}
        for _ in range(ROUNDS):
            for version, worker in workers.items():
                times[version].append(worker.ask(time=step))
        ratio = statistics.median(a / b for a, b in zip(times["after"], times["before"], strict=True))
        memory = {version: round(worker.ask(memory=step), 1) for version, worker in workers.items()}
        middle = {version: round(statistics.median(found), 4) for version, found in times.items()}
        rows.append({"call": name, "step": step, **middle, "ratio": round(ratio, 4), "memory": memory})
    return rows


def markdown(results: dict[str, Any]) -> str:
    lines = [f"- {k}: {v}" for k, v in results["environment"].items()]
    lines += ["", "Times in ms, in turns; ratio = after / before: below 1 the newer version is faster.", ""]
    lines += ["| call | step | before | after | ratio | MB before | MB after |", "|---|---|---|---|---|---|---|"]
    for row in results["rows"]:
        if "failed" in row:
            lines.append(f"| {row['call']} | {row['failed']} | | | | | |")
            continue
        memory = row["memory"]
        cells = [row["call"], row["step"], f"{row['before']:.3f}", f"{row['after']:.3f}", f"{row['ratio']:.3f}"]
        lines.append("| " + " | ".join([*cells, str(memory["before"]), str(memory["after"])]) + " |")
    ratios = [row["ratio"] for row in results["rows"] if "ratio" in row]
    if ratios:
        summary = f"median {statistics.median(ratios):.3f}, least {min(ratios):.3f}, greatest {max(ratios):.3f}"
        lines.append(f"\n{len(ratios)} steps: {summary}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--before", type=Path, help="a folder with the other version's package")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget", type=float, default=480.0, help="seconds after which nothing new is begun")
    parser.add_argument("--only", default="", help="words, with | between: calls by name")
    parser.add_argument("--commit", default="", help="what was measured, where the machine has no git: BEFORE..AFTER")
    options = parser.parse_args()
    if options.work:
        work()
        return
    if options.before is None or options.out is None:
        parser.error("give --before CHECKOUT and --out DIR")
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.time()
    workers = {"before": Worker(options.before.resolve()), "after": Worker(HERE.parents[1])}
    versions = f"torch {torch.__version__}, triton {importlib.metadata.version('triton')}"
    results: dict[str, Any] = {
        "environment": {
            "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC",
            "machine": torch.cuda.get_device_name(),
            "versions": versions,
            "commit": options.commit,
            "command": "python -m benchmarks.compare --before CHECKOUT --out DIR",
        },
        "rows": [],
    }
    stem = options.out / f"compare-{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M}"
    for name in cases():
        if time.time() - began > options.budget:
            break
        if not any(word in name for word in options.only.split("|")):
            continue
        for row in compare(name, workers):
            print(row, flush=True)
            results["rows"].append(row)
        stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        stem.with_suffix(".md").write_text(markdown(results))
    print(f"{time.time() - began:.0f} s; {stem}.md")


if __name__ == "__main__":
    main()
