"""Layers that nobody tuned, beside ``torch.compile`` of their dense form.

    python -m benchmarks.generality [--out DIR] [--commit C] [--seed N] [--count N] [--tiny]

A seeded generator draws bodies (a score, one or two functions, a condition, a reduction) and sizes. Each layer is first
compared with float64, values and gradients: its error may be at most twice that of plain torch in the same precision.
Then both forms are timed in turns, forward and with gradients, and their memory is measured. Each is timed twice: on
the device, behind other work, as in a model whose host runs ahead of it; and alone, where the host's time counts too.
``--tiny`` draws the same bodies at sizes for a CPU and only shows that everything runs. On a GPU what is compared is
compiled first, by several processes at once, which then measure in turn. Writes ``generality-DATE.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import importlib.metadata
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr
from monoidreduce import Col, Row

from .cpu import commit, environment
from .measure import peak_on_gpu

ROUNDS = 15  # of the contenders in turns; the median counts
PREPARATION = 150.0  # seconds after which a process begins to compile no other layer
TINY = 64  # sizes are divided by this where everything is only shown to run
RULE = 2.0  # our error against float64, over plain torch's
FLOOR = 1e-3  # relative errors below are the rounding of results
BEST = 8  # of a topk
WHAT = ("forward", "both")  # is timed
HOW = ("device", "alone")
AHEAD = 10**7  # cycles that a GPU waits: about 5 ms

# Of numbers per pair, for symbols and for tensors
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "abs": torch.abs,
    "atan": torch.atan,
    "clamp": lambda x: torch.clamp(x, -1.0, 1.0),
    "cos": torch.cos,
    "elu": F.elu,
    "erf": torch.erf,
    "exp(-|x|)": lambda x: torch.exp(-torch.abs(x)),
    "gelu": F.gelu,
    "hardswish": F.hardswish,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "log1p(|x|)": lambda x: torch.log1p(torch.abs(x)),
    "logsigmoid": F.logsigmoid,
    "mish": F.mish,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "sin": torch.sin,
    "softplus": F.softplus,
    "softsign": F.softsign,
    "sqrt(1 + x²)": lambda x: torch.sqrt(1.0 + x * x),
    "square": torch.square,
    "tanh": torch.tanh,
}
SCORES = {"x · y": 4, "x · y + b": 2, "-|x - y|²": 1, "(x · y) σ(x · z)": 1}  # and how often each is drawn
REDUCTIONS = {
    "softmax_mean": 3,
    "sum of vectors": 3,
    "logsumexp": 2,
    "sum": 2,
    "mean": 1,
    "var": 1,
    "max": 2,
    "min": 1,
    "topk": 1,
}
SIZES = [  # batch, rows, columns, features
    ((), 8192, 8192, 128),
    ((), 16384, 16384, 128),
    ((), 4096, 32768, 64),
    ((), 32768, 4096, 128),
    ((4,), 4096, 4096, 96),
    ((16,), 2048, 2048, 64),
    ((), 10000, 10000, 80),
    ((8,), 4096, 4096, 32),
]
NEUTRAL = {"softmax_mean": -math.inf, "logsumexp": -math.inf, "max": -math.inf}  # where a condition leaves a pair out


@dataclass(frozen=True)
class Layer:
    """A body and the sizes it is called with."""

    score: str
    functions: tuple[str, ...]
    causal: bool
    reduction: str
    batch: tuple[int, ...]
    rows: int
    cols: int
    features: int

    @property
    def name(self) -> str:
        inner = self.score
        for f in self.functions:
            inner = f"{f}({inner})" if f.isidentifier() else re.sub("(?<![a-z])x(?![a-z])", f"({inner})", f)
        size = "×".join(map(str, (*self.batch, self.rows, self.cols, self.features)))
        return f"{self.reduction} of {inner}{', causal' if self.causal else ''}, {size}"

    def apply(self, score: Any) -> Any:
        """The number of a pair from its score."""
        for f in self.functions:
            score = FUNCTIONS[f](score)
        return score

    def inputs(self, device: str, dtype: torch.dtype) -> list[Tensor]:
        """x, y, z, b and v, those that the body reads, from a seed of the layer's own."""
        gen = torch.Generator().manual_seed(len(self.name) * 1000 + self.rows)
        width = self.features**-0.25
        shapes: list[tuple[int, ...]] = [(self.rows, self.features), (self.cols, self.features)]
        shapes += [(self.cols, self.features)] if self.score.endswith("z)") else []
        shapes += [(self.cols,)] if self.score.endswith("b") else []
        shapes += [(self.cols, self.features)] if self.reduction in ("softmax_mean", "sum of vectors") else []
        made = [torch.randn(*self.batch, *s, generator=gen) * (width if len(s) > 1 else 1.0) for s in shapes]
        return [t.to(device, dtype) for t in made]


def draw_layers(seed: int, count: int) -> list[Layer]:
    """The layers of a seed: each reduction, score and size as often as its weight says, functions one or two."""
    rng = random.Random(seed)
    found: list[Layer] = []
    while len(found) < count:
        (score,) = rng.choices(list(SCORES), list(SCORES.values()))
        functions = tuple(rng.sample(sorted(FUNCTIONS), rng.choice((1, 1, 2))))
        (reduction,) = rng.choices(list(REDUCTIONS), list(REDUCTIONS.values()))
        causal = rng.random() < 0.25 and (reduction in NEUTRAL or reduction in ("sum", "sum of vectors"))
        layer = Layer(score, functions, causal, reduction, *rng.choice(SIZES))
        if layer not in found:
            found.append(layer)
    return found


def shrink(layer: Layer) -> Layer:
    """A layer at a size for a CPU."""
    return Layer(
        layer.score,
        layer.functions,
        layer.causal,
        layer.reduction,
        layer.batch[:1] and (2,),
        max(BEST, layer.rows // TINY),
        max(BEST, layer.cols // TINY),
        layer.features // 4,
    )


def make_ours(layer: Layer) -> Callable[..., Tensor]:
    """The layer in the pair language."""
    has_z, has_b = layer.score.endswith("z)"), layer.score.endswith("b")

    @no_type_check
    def fold(x: Any, y: Any, z: Any, b: Any, v: Any) -> Any:
        s = -mr.sqdist(x, y) if layer.score.startswith("-") else x @ y
        s = s + b if has_b else s * torch.sigmoid(x @ z) if has_z else s
        s = layer.apply(s)
        if layer.causal:
            s = torch.where(mr.col_index <= mr.row_index, s, NEUTRAL.get(layer.reduction, 0.0))
        if layer.reduction == "softmax_mean":
            return mr.softmax_mean(s, v)
        if layer.reduction == "sum of vectors":
            return mr.sum(s * v)
        return mr.topk(s, BEST).values if layer.reduction == "topk" else getattr(mr, layer.reduction)(s)

    if layer.reduction in ("softmax_mean", "sum of vectors"):
        if has_z:

            @mr.op
            @no_type_check
            def op(x: Row["f"], y: Col["f"], z: Col["f"], v: Col["d"]):
                return fold(x, y, z, None, v)
        elif has_b:

            @mr.op
            @no_type_check
            def op(x: Row["f"], y: Col["f"], b: Col, v: Col["d"]):
                return fold(x, y, None, b, v)
        else:

            @mr.op
            @no_type_check
            def op(x: Row["f"], y: Col["f"], v: Col["d"]):
                return fold(x, y, None, None, v)
    elif has_z:

        @mr.op
        @no_type_check
        def op(x: Row["f"], y: Col["f"], z: Col["f"]):
            return fold(x, y, z, None, None)
    elif has_b:

        @mr.op
        @no_type_check
        def op(x: Row["f"], y: Col["f"], b: Col):
            return fold(x, y, None, b, None)
    else:

        @mr.op
        @no_type_check
        def op(x: Row["f"], y: Col["f"]):
            return fold(x, y, None, None, None)

    return op


def make_dense(layer: Layer) -> Callable[..., Tensor]:
    """The layer in plain torch, with whole matrices."""
    has_z, has_b = layer.score.endswith("z)"), layer.score.endswith("b")

    def dense(x: Tensor, y: Tensor, *others: Tensor) -> Tensor:
        rest = list(others)
        s = x @ y.mT
        if layer.score.startswith("-"):
            s = 2.0 * s - x.square().sum(-1, keepdim=True) - y.square().sum(-1).unsqueeze(-2)
        if has_z:
            s = s * torch.sigmoid(x @ rest.pop(0).mT)
        if has_b:
            s = s + rest.pop(0).unsqueeze(-2)
        s = layer.apply(s)
        if layer.causal:
            at = [torch.arange(n, device=x.device) for n in s.shape[-2:]]
            s = torch.where(at[1] <= at[0].unsqueeze(-1), s, NEUTRAL.get(layer.reduction, 0.0))
        if layer.reduction == "softmax_mean":
            return torch.softmax(s, -1) @ rest[0]
        if layer.reduction == "sum of vectors":
            return s @ rest[0]
        if layer.reduction in ("max", "min"):
            return getattr(torch, layer.reduction)(s, -1).values
        return torch.topk(s, BEST, -1).values if layer.reduction == "topk" else getattr(torch, layer.reduction)(s, -1)

    return dense


# Correctness


def check(layer: Layer, device: str, dtype: torch.dtype) -> list[str]:
    """What of a layer is outside the rule: its value, or the gradient of one of its inputs."""
    given = layer.inputs(device, dtype)
    ours = _run(make_ours(layer), given)
    theirs = _run(make_dense(layer), given)
    exact = _run(make_dense(layer), [t.double() for t in given])
    names = ["value", *(f"gradient {k}" for k in range(len(given)))]
    found = []
    for name, a, b, e in zip(names, ours, theirs, exact, strict=True):
        size = float(e.norm()) or 1.0
        own, plain = (float((t.double() - e).norm()) / size for t in (a, b))
        if not own <= max(RULE * plain, FLOOR):
            found.append(f"{name}: {own:.1e}, plain torch {plain:.1e}")
    return found


def _run(fn: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in given]
    y = fn(*leaves)
    g = torch.linspace(0.5, 1.5, y.numel(), device=y.device).view(y.shape).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, g)]


# Time and memory


def steps(fn: Callable[..., Tensor], given: list[Tensor]) -> tuple[Callable[[], None], Callable[[], None]]:
    """Forward alone, and forward with the gradients of all inputs."""
    leaves = [t.detach().requires_grad_() for t in given]
    g = torch.ones_like(fn(*given))

    def forward() -> None:
        with torch.no_grad():
            fn(*given)

    def both() -> None:
        torch.autograd.grad(fn(*leaves), leaves, g)

    return forward, both


def time_in_turns(contenders: dict[str, Callable[[], None]], rounds: int, ahead: bool) -> dict[str, float]:
    """Median milliseconds of each on a GPU, in turns, the L2 cache flushed before each; ``ahead``: the host has time to
    be done before the device begins."""
    flushed = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for k in range(rounds + 2):
        for name, step in contenders.items():
            flushed.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if ahead:
                torch.cuda._sleep(AHEAD)
            begin.record()
            step()
            end.record()
            torch.cuda.synchronize()
            times[name] += [begin.elapsed_time(end)] if k >= 2 else []
    return {name: statistics.median(found) for name, found in times.items()}


Steps = dict[str, tuple[Callable[[], None], Callable[[], None]]]


def make_steps(layer: Layer) -> Steps:
    """Both forms of a layer on a GPU, each run once: compiled."""
    given = layer.inputs("cuda", torch.bfloat16)
    made = {"ours": make_ours(layer), "dense": torch.compile(make_dense(layer), dynamic=False)}
    found = {name: steps(fn, given) for name, fn in made.items()}
    for own in found.values():
        for step in own:
            step()
    torch.cuda.synchronize()
    return found


def measure(layer: Layer, made: Steps, rounds: int) -> dict[str, Any]:
    """Milliseconds and megabytes of both forms."""
    row: dict[str, Any] = {"layer": layer.name}
    for k, what in enumerate(WHAT):
        for how, ahead in (("device", True), ("alone", False)):
            times = time_in_turns({name: own[k] for name, own in made.items()}, rounds, ahead)
            found = {name: round(t, 4) for name, t in times.items()}
            row.setdefault(what, {})[how] = found | {"ratio": round(times["ours"] / times["dense"], 3)}
    row["MB"] = {name: round(peak_on_gpu(own[1]), 1) for name, own in made.items()}
    torch.cuda.empty_cache()
    return row


# The run: several processes compile and check layers at once; then each in turn measures its own


def work(layers: list[Layer], which: list[int], lock: Path) -> None:
    """In a process of its own: compile and check some layers; told to by a line, measure them. A JSON line each."""
    torch._dynamo.config.cache_size_limit = 256
    made: dict[int, Steps] = {}
    wrong: dict[int, list[str]] = {}
    begin = time.monotonic()
    for k in which:
        if time.monotonic() - begin > PREPARATION:
            wrong[k] = ["not reached"]
            continue
        try:
            made[k] = make_steps(layers[k])
            with lock.open("w") as file:  # one at a time: float64 takes much memory
                fcntl.flock(file, fcntl.LOCK_EX)
                wrong[k] = check(layers[k], "cuda", torch.bfloat16)
                torch.cuda.empty_cache()
        except Exception:
            wrong[k] = [" | ".join(traceback.format_exc().strip().splitlines()[-2:])[:300]]
    print("ready", flush=True)
    sys.stdin.readline()
    for k in which:
        row: dict[str, Any] = {"layer": layers[k].name}
        if k in made:
            row = measure(layers[k], made[k], ROUNDS)
        print(json.dumps(row | {"place": k, "wrong": wrong[k]}), flush=True)


def run(layers: list[Layer], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of all layers on a GPU, as they are measured."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.generality", "--lock", str(Path(folder) / "lock")]
        command += ["--seed", str(options.seed), "--count", str(options.count), "--work"]
        shares = [range(k, len(layers), options.workers) for k in range(min(options.workers, len(layers)))]
        pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        running: list[Any] = [subprocess.Popen([*command, *map(str, share)], **pipes) for share in shares]
        for process in running:
            while (line := process.stdout.readline()) and line.strip() != "ready":
                pass
        for process in running:
            process.stdin.write("\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
            process.wait()


def run_tiny(layers: list[Layer]) -> dict[str, Any]:
    """The layers at sizes for a CPU, checked, not timed."""
    rows = []
    for layer in map(shrink, layers):
        wrong = check(layer, "cpu", torch.float32)
        rows.append({"layer": layer.name, "wrong": wrong})
        print(f"{layer.name}: {'; '.join(wrong) or 'right'}", flush=True)
    return {"rows": rows}


def describe_row(row: dict[str, Any]) -> str:
    """A row in a line."""
    wrong = f"  outside the rule: {'; '.join(row['wrong'])}" if row["wrong"] else ""
    if "both" not in row:
        return f"{row['layer']}{wrong}"
    told = lambda t: f"{t['ours']:.3f} / {t['dense']:.3f} = {t['ratio']:.2f}"
    times = "  ".join(f"{w} {told(row[w]['device'])} (alone {row[w]['alone']['ratio']:.2f})" for w in WHAT)
    return f"{times}  {row['layer']}{wrong}"


def summarize(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median and worst ratio, forward and both, on the device and alone."""
    timed = [row for row in rows if "both" in row]
    found = {f"{what}, {how}": [row[what][how]["ratio"] for row in timed] for how in HOW for what in WHAT}
    return {what: {"median": statistics.median(r), "worst": max(r)} for what, r in found.items() if r}


def markdown(results: dict[str, Any]) -> str:
    """The results as a table."""
    lines = [f"- {k}: {v}" for k, v in results["environment"].items()]
    for what, found in results.get("summary", {}).items():
        lines.append(f"- {what}, ours / torch.compile: median {found['median']:.2f}, worst {found['worst']:.2f}")
    wrong = [f"{row['layer']} ({'; '.join(row['wrong'])})" for row in results["rows"] if row["wrong"]]
    lines += [f"- checked against float64 first; outside the rule: {', '.join(wrong) or 'none'}", ""]
    lines += ["Milliseconds on the device, forward / forward and backward; below 1 ours is faster.", ""]
    lines += ["| layer | ours | torch.compile, dense | ratio | alone | MB, ours / dense |", "|---|---|---|---|---|---|"]
    for row in results["rows"]:
        if "both" in row:
            each = [" / ".join(f"{row[w]['device'][name]:.3f}" for w in WHAT) for name in ("ours", "dense")]
            ratios = [" / ".join(f"{row[w][how]['ratio']:.2f}" for w in WHAT) for how in HOW]
            memory = f"{row['MB']['ours']:.0f} / {row['MB']['dense']:.0f}"
            lines.append(f"| {row['layer']} | {' | '.join([*each, *ratios])} | {memory} |")
        else:
            lines.append(f"| {row['layer']} | {row.get('error', 'right' if not row['wrong'] else 'wrong')} | | | | |")
    return "\n".join(lines).replace("|x|", "abs x").replace("|x - y|", "dist(x, y)") + "\n"


def describe(said: str | None) -> dict[str, str]:
    """What was measured, on what, and how to measure it again."""
    found = environment()
    if torch.cuda.is_available():
        found["machine"] = torch.cuda.get_device_name()
        found["versions"] += f", triton {importlib.metadata.version('triton')}"
    found["commit"] = said or found["commit"]
    given = sys.argv[1:]
    if "--out" in given:
        given[given.index("--out") + 1] = "DIR"
    found["command"] = " ".join(["python -m benchmarks.generality", *given])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", type=commit, help="what was measured, where the machine has no git")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--workers", type=int, default=max(1, min(12, (os.cpu_count() or 4) - 2)))
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=int, nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    layers = draw_layers(options.seed, options.count)
    if options.work:
        return work(layers, options.work, options.lock)
    results: dict[str, Any] = {"environment": describe(options.commit), "rows": []}
    stem = options.out and options.out / f"generality-{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M}"

    def save() -> None:
        results["summary"] = summarize(results["rows"])
        if stem:
            stem.parent.mkdir(parents=True, exist_ok=True)
            stem.with_suffix(".json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
            stem.with_suffix(".md").write_text(markdown(results))

    if options.tiny:
        results |= run_tiny(layers)
        save()
        return None
    for row in run(layers, options):
        results["rows"] = sorted([*results["rows"], row], key=lambda row: row["place"])
        print(describe_row(row), flush=True)
        save()
    print(json.dumps(results["summary"]))
    return None


if __name__ == "__main__":
    main()
