"""The CPU benchmark: ours against the dense form, the papers' 256 × 256 tiles, torch's own fused layers, and KeOps.

``python -m benchmarks.cpu`` runs every case (``--case NAME`` some, ``--quick`` small sizes), prints a table and writes
it to ``benchmarks/results/`` with date, machine, versions, commit and command. Nobody edits those files by hand."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.engines.common.matmul import needs_float32

from . import papers
from .measure import best_times, peak_growth

try:
    from pykeops.torch import LazyTensor
except ImportError:  # clouds of points then run without their peer
    LazyTensor = None

RESULTS = Path(__file__).parent / "results"
OURS = "MonoidReduce"


@mr.op
@no_type_check
def attention(q: Row["f"], k: Col["f"], v: Col["d"], scale: float):
    return mr.softmax_mean(q @ k * scale, v)


@mr.op
@no_type_check
def mlp(x: Row["d"], p: Col["d"], q: Col["n"]):
    return mr.sum(torch.relu(x @ p) * q)


@dataclass(frozen=True)
class Case:
    """One line of the benchmark: inputs, the contenders, which inputs get gradients, and the target ratios.

    Without rounds, contenders run once, after a small warm-up: some take minutes. Their memory is not measured."""

    name: str
    make: Callable[[], tuple[Tensor, ...]]
    contenders: dict[str, Callable[..., Tensor]]
    targets: dict[str, str]
    rounds: int = 3
    gradients: bool = True


def _attention_case(
    s: int, d: int, heads: int, dtype: torch.dtype, targets: dict[str, str], rounds: int, dense: bool
) -> Case:
    scale = 1 / math.sqrt(d)
    contenders: dict[str, Callable[..., Tensor]] = {
        OURS: lambda q, k, v: attention(q, k, v, scale),
        "torch SDPA": F.scaled_dot_product_attention,
    }
    if dense:
        contenders["dense"] = lambda q, k, v: torch.softmax(q @ k.mT * scale, -1) @ v
    if heads == 1 and dtype == torch.float32 and s <= 4096:
        contenders["papers' 256 × 256"] = lambda q, k, v: papers.attention(q[0, 0] * scale, k[0, 0], v[0, 0])
    kind = str(dtype).removeprefix("torch.")
    name = f"attention {kind} {heads} × {s} × {s}, D {d}"
    return Case(
        name, lambda: tuple(torch.randn(1, heads, s, d).to(dtype) for _ in range(3)), contenders, targets, rounds
    )


def _mlp_case(b: int, k: int, d: int, dtype: torch.dtype, rounds: int) -> Case:
    kind = str(dtype).removeprefix("torch.")
    contenders: dict[str, Callable[..., Tensor]] = {OURS: mlp, "dense": lambda x, p, q: torch.relu(x @ p.T) @ q}
    if dtype == torch.float32:
        contenders["papers' 256 × 256"] = papers.mlp
    make = lambda: tuple((torch.randn(n, d) / math.sqrt(d)).to(dtype) for n in (b, k, k))
    return Case(f"MLP relu {kind} {b} × {k}, D {d}", make, contenders, {"dense": "≤ 0.6 (memory ≤ 2 %)"}, rounds)


def _ce_case(m: int, d: int, v: int, dtype: torch.dtype, rounds: int) -> Case:
    def make() -> tuple[Tensor, ...]:
        return (torch.randn(m, d).to(dtype), (torch.randn(v, d) / math.sqrt(d)).to(dtype), torch.randint(0, v, (m,)))

    contenders: dict[str, Callable[..., Tensor]] = {
        OURS: lambda x, w, t: mr.ops.cross_entropy(x, w, t),
        "dense": lambda x, w, t: F.cross_entropy(x @ w.T, t),
    }
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=512)
        contenders["torch chunked (512)"] = lambda x, w, t: F.linear_cross_entropy(x, w, t, options=options)
    kind = str(dtype).removeprefix("torch.")
    return Case(
        f"linear cross-entropy {kind} {m} × {d} × {v}", make, contenders, {"dense": "≤ 0.85 (memory ≤ 7 %)"}, rounds
    )


def _clouds(n: int, d: int, rounds: int) -> list[Case]:
    """Kernel sums and nearest neighbours of n points, where a dense form has no room. KeOps finds distances alone."""
    peers: list[dict[str, Callable[..., Tensor]]] = [{}, {}]
    if LazyTensor is not None:
        square = lambda x, y: ((LazyTensor(x[:, None]) - LazyTensor(y[None])) ** 2).sum(-1)
        peers = [
            {"KeOps": lambda x, y, b: (-square(x, y)).exp() @ b},
            {"KeOps": lambda x, y: square(x, y).Kmin(10, dim=1)},
        ]
    ours: list[Callable[..., Tensor]] = [
        lambda x, y, b: mr.ops.kernel_sum(x, y, b, bandwidth=math.sqrt(0.5)),
        lambda x, y: mr.ops.knn(x, y, 10, metric="sqeuclidean").values,
    ]
    points = lambda: (torch.randn(n, d), torch.randn(n, d))
    makes: list[Callable[[], tuple[Tensor, ...]]] = [lambda: (*points(), torch.randn(n, 1)), points]
    return [
        Case(f"{what} float32 {n} × {n}, D {d}", make, {OURS: our, **peer}, {"KeOps": "< 1"}, rounds, False)
        for what, make, our, peer in zip(("Gaussian sum", "10 neighbours"), makes, ours, peers, strict=True)
    ]


def cases(quick: bool) -> list[Case]:
    """Every case. Where the CPU has no bf16 products, torch's own bf16 layers take hours at full size: smaller
    there."""
    small = 16 if quick else 1
    slow_bf16 = needs_float32(torch.device("cpu"), torch.bfloat16)
    f32, bf16 = torch.float32, torch.bfloat16
    s4, s16 = 4096 // small, 16384 // small
    first = {"torch SDPA": "forward ≤ 1.3, both ≤ 1.1"}
    long = {"torch SDPA": "forward ≤ 1.3, both ≤ 1.0"}
    return [
        _attention_case(s4, 64, 1, f32, first, 5, True),
        _attention_case(s16, 64, 1, f32, long, 1, True),
        _attention_case(s16, 128, 1, f32, long, 1, False),
        _attention_case(2048 // small, 64, 16, f32, first, 2, True),
        _attention_case((1024 if slow_bf16 else 16384) // small, 128, 1, bf16, {"torch SDPA": "both ≤ 0.85"}, 1, False),
        _mlp_case(s16, s16, 128, f32, 1),
        _mlp_case((1024 if slow_bf16 else 16384) // small, (1024 if slow_bf16 else 16384) // small, 128, bf16, 1),
        _ce_case(s4, 512, 131072 // small, f32, 1),
        _ce_case(s4, 1024, 131072 // small, f32, 1),
        _ce_case(
            (512 if slow_bf16 else 4096) // small, 512 // small, (4096 if slow_bf16 else 131072) // small, bf16, 1
        ),
        *_clouds(20_000 // small, 3, 3),
        *_clouds(20_000 // small, 64, 1),
        *_clouds(100_000 // small, 3, 1),
        *_clouds(100_000 // small, 64, 0),
    ]


# Measuring one case -----------------------------------------------------------------------------------------


def _inputs(case: Case, grad: bool) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(t.requires_grad_(grad and t.dtype.is_floating_point) for t in case.make())


def _call(case: Case, name: str, grad: bool, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
    f = case.contenders[name]
    if not grad:

        def forward() -> Any:
            with torch.no_grad():
                return f(*inputs)

        return forward
    wanted = [t for t in inputs if t.requires_grad]

    def both() -> Any:
        out = f(*inputs)
        return torch.autograd.grad(out, wanted, torch.ones_like(out))

    return both


def _warm_up(case: Case, name: str, grad: bool, inputs: tuple[Tensor, ...]) -> None:
    """A small call: libraries loaded, code compiled."""
    small = tuple(
        t[..., :64, :].detach().requires_grad_(t.requires_grad) if t.dim() > 1 else t[:64] % 64 for t in inputs
    )
    _call(case, name, grad, small)()


def measure_time(case: Case) -> dict[str, dict[str, float]]:
    times = {}
    for what, grad in (("forward", False), ("both", True))[: 1 + case.gradients]:
        inputs = _inputs(case, grad)
        for name in case.contenders if not case.rounds else ():
            _warm_up(case, name, grad, inputs)
        times[what] = best_times({n: _call(case, n, grad, inputs) for n in case.contenders}, case.rounds)
    return times


def measure_memory(case: Case, name: str) -> dict[str, float]:
    """Peak growth of forward + backward beyond inputs, their gradients included in the growth and taken off here."""
    inputs = _inputs(case, case.gradients)
    _warm_up(case, name, case.gradients, inputs)
    growth = peak_growth(_call(case, name, case.gradients, inputs))
    gradients = sum(t.numel() * t.element_size() for t in inputs if t.requires_grad) / 2**20
    return {"extra": max(0.0, growth - gradients)}


def _child(arguments: list[str]) -> Any:
    """Run one measurement in a fresh process and read its answer."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.cpu", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run(quick: bool, only: list[str]) -> dict[str, Any]:
    rows = []
    chosen = [c for c in cases(quick) if not only or any(part in c.name for part in only)]
    extra = ["--quick"] if quick else []
    for at, case in enumerate(chosen, 1):
        print(f"[{at}/{len(chosen)}] {case.name}", file=sys.stderr, flush=True)
        times = _child(["--child", case.name, *extra])
        measured = case.contenders if case.rounds else ()
        memory = {n: _child(["--child", case.name, "--memory", n, *extra])["extra"] for n in measured}
        rows.append({"case": case.name, "times": times, "memory": memory, "targets": case.targets})
    return {"environment": environment(), "rows": rows}


def commit(said: str) -> str:
    """The hash of what is measured, given where the machine has no git; a name would mean something else tomorrow."""
    if not re.fullmatch("[0-9a-f]{7,40}", said):
        raise argparse.ArgumentTypeError(f"{said!r} is no hash: give what `git rev-parse --short HEAD` says")
    return said


def environment() -> dict[str, str]:
    root = Path(__file__).parent.parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=root, check=False
    )
    changed = subprocess.run(
        ["git", "status", "--porcelain", "monoidreduce"], capture_output=True, text=True, cwd=root, check=False
    )
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {_cpu_name()}",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, monoidreduce {mr.__version__}",
        "commit": commit.stdout.strip() + (" with local changes" if changed.stdout.strip() else ""),
        "command": "python -m benchmarks.cpu " + shlex.join(sys.argv[1:]),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith(("model name", "CPU part")):
            return line.split(":")[1].strip()
    return platform.processor() or "unknown CPU"


def markdown(results: dict[str, Any]) -> str:
    """The results as a table: time of each contender, and ours over theirs."""
    lines = [f"- {k}: {v}" for k, v in results["environment"].items()]
    lines += [
        "",
        "Times in ms (best of several, contenders in turns); ratio = ours / theirs: below 1 we are faster. "
        "Extra memory: peak growth of the process over forward + backward, beyond inputs and gradients.",
        "",
        "| work | against | forward: ours / theirs | ratio | forward+backward: ours / theirs | ratio "
        "| extra MB: ours / theirs | ratio | goal |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        f, b, m = row["times"]["forward"], row["times"].get("both"), row["memory"]
        for name in (n for n in f if n != OURS):
            cells = [row["case"], name]
            for values, digits in ((f, 1), (b, 1), (m, 0)):
                if not values:
                    cells += ["–", "–"]
                    continue
                ours, theirs = values[OURS], values[name]
                ratio = f"{ours / theirs:.2f}" if theirs else "–"
                cells += [f"{ours:.{digits}f} / {theirs:.{digits}f}", ratio]
            lines.append("| " + " | ".join([*cells, row["targets"].get(name, "")]) + " |")
    return "\n".join(lines) + "\n"


def write_results(kind: str, results: dict[str, Any], text: str) -> None:
    """Keep a run's results, and the same as a table, under the time of now."""
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / f"{kind}-{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M}"
    stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    stem.with_suffix(".md").write_text(text)
    print(f"written to {stem}.md and .json", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the benchmark itself")
    parser.add_argument("--case", action="append", default=[], help="only cases whose name contains this, or another")
    parser.add_argument("--kind", default="cpu", help="the results' name: another where they stand beside all")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        case = next(c for c in cases(options.quick) if c.name == options.child)
        print(json.dumps(measure_memory(case, options.memory) if options.memory else measure_time(case)))
        return 0
    results = run(options.quick, options.case)
    text = markdown(results)
    print(text)
    if not options.quick:
        write_results(options.kind, results, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
