"""A training step of Llama-like models, of a billion weights and of some layers of eight: what users feel, beside
torch's own layers and Liger's.

    python -m benchmarks.model [--out DIR] [--commit HASH] [--only WORDS] [--budget SECONDS] [--adamw] [--tiny]

The model is plain torch and stands in this file: RMSNorm, rotary positions, grouped queries, SwiGLU, a vocabulary that
is tied (1B) or not (8B). Of the 8B all sizes are true but the number of its layers, so that a step fits one device.
A step is forward, loss and backward (``--adamw``: and the optimiser's step, the same for all), eager and compiled.
Contenders differ in attention and loss alone: torch's (``F.scaled_dot_product_attention``, ``F.cross_entropy`` of the
logits), Liger's loss where it is installed (with torch's attention), and ours (``ops.attention``,
``ops.linear_cross_entropy``). They share their weights and take turns; the median of the rounds counts. Peak memory is
that of one step, weights and gradients included. ``--tiny`` is a few seconds on a CPU, to see that all of it runs.

Each model is measured in a process of its own. A contender whose kernels fail there (an illegal access spoils the whole
process) is written down with its error, and the others are measured again without it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import importlib.metadata
import json
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoidreduce import ops

from .cpu import commit, environment

WARM_UP, ROUNDS = 3, 5

# The model ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """The sizes of a model and of a batch of tokens."""

    layers: int = 16
    width: int = 2048
    heads: int = 32
    shared: int = 8  # heads of keys and values
    inner: int = 8192
    vocabulary: int = 128256
    batch: int = 4
    length: int = 4096
    tied: bool = True  # the head is the table of embeddings

    @property
    def head(self) -> int:
        return self.width // self.heads

    def __str__(self) -> str:
        depth = "" if self.width == Shape.width else f", {self.layers} layers of width {self.width}"
        return f"{self.batch}×{self.length} tokens, {self.heads}/{self.shared} heads of {self.head}{depth}"


SHAPES = {
    "4x4096": Shape(),
    "1x16384": Shape(batch=1, length=16384),
    "4x4096 of width 128": Shape(heads=16),
    "8B, 4 layers": Shape(layers=4, width=4096, inner=14336, tied=False),
}
TINY = {"tiny": Shape(1, 64, 4, 2, 128, 300, 2, 48)}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    """Attention and a gated perceptron, each behind a norm and added to its input."""

    def __init__(self, s: Shape):
        super().__init__()
        self.s = s
        self.before, self.between = nn.RMSNorm(s.width, 1e-5), nn.RMSNorm(s.width, 1e-5)
        self.q, self.o = (nn.Linear(s.width, s.width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(s.width, s.shared * s.head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(s.width, s.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(s.inner, s.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        batch, length, s, y = x.shape[0], x.shape[1], self.s, self.before(x)
        q = self.q(y).view(batch, length, s.heads, s.head).transpose(1, 2)
        k = self.k(y).view(batch, length, s.shared, s.head).transpose(1, 2)
        v = self.v(y).view(batch, length, s.shared, s.head).transpose(1, 2)
        y = attend(_rotate(q, cos, sin), _rotate(k, cos, sin), v)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, s.width))
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return x * cos + torch.cat((-other, one), -1) * sin


class Model(nn.Module):
    """The weights of a language model; ``forward`` gives the loss by the attention and the loss that it is given."""

    def __init__(self, s: Shape):
        super().__init__()
        self.table = nn.Embedding(s.vocabulary, s.width)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.last = nn.RMSNorm(s.width, 1e-5)
        self.head = self.table if s.tied else nn.Linear(s.width, s.vocabulary, bias=False)
        angles = torch.arange(s.length)[:, None] * 500000.0 ** (-torch.arange(0, s.head, 2) / s.head)
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor, attend: Attend, loss: Loss) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin, attend)
        return loss(self.last(x).flatten(0, 1), self.head.weight, targets.flatten())


# Contenders -----------------------------------------------------------------------------------------------------------


def torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def torch_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), targets)


def our_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ops.attention(q, k, v, is_causal=True, enable_gqa=True)


def our_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return ops.linear_cross_entropy(x, weight, targets)


def contenders() -> Iterator[tuple[str, Attend, Loss]]:
    """Names, attention and loss."""
    yield "torch", torch_attention, torch_loss
    with contextlib.suppress(ImportError):
        liger = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
        apply = liger.LigerFusedLinearCrossEntropyFunction.apply
        yield "Liger", torch_attention, lambda x, weight, targets: apply(x, weight, targets)[0]
    yield "ours", our_attention, our_loss


def _best_attention(cuda: bool) -> contextlib.AbstractContextManager:
    """Torch's own attention by the fastest of its kernels."""
    if not cuda:
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True)


# Measuring ------------------------------------------------------------------------------------------------------------


def steps(s: Shape, device: str, adamw: bool, backend: str, allowed: Callable[[], bool]) -> Iterator[tuple[str, Any]]:
    """The contenders' steps by name, each a function that returns the loss; or why there is none."""
    cuda = device == "cuda"
    torch.manual_seed(0)
    with torch.device(device):
        model = Model(s).to(torch.bfloat16 if cuda else torch.float32)
        tokens = torch.randint(s.vocabulary, (s.batch, s.length + 1))
    given = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=cuda) if adamw else None
    found = list(contenders())
    for compiled in (False, True):
        for name, attend, loss in found:
            called = f"{name}, {'compiled' if compiled else 'eager'}"
            if compiled and not allowed():
                yield called, "no time was left"
                continue
            whole = lambda *given, attend=attend, loss=loss: model(*given, attend, loss)
            run = torch.compile(whole, dynamic=False, backend=backend) if compiled else whole

            def step(run: Callable[..., Tensor] = run) -> Tensor:
                with _best_attention(cuda):
                    value = run(*given)
                    value.backward()
                if optimizer is not None:
                    optimizer.step()
                for weight in model.parameters():
                    weight.grad = None
                return value.detach()

            yield called, step


class Spoiled(Exception):
    """A contender, and its error, after which no CUDA call of this process succeeds."""


def measure_apart(name: str, options: argparse.Namespace, seconds: float) -> dict[str, dict[str, Any]]:
    """The same in a process of its own, again without each contender that spoils the process."""
    failed: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "found.json"
        while True:
            asked = {"name": name, "failed": failed, "seconds": seconds, "adamw": options.adamw, "tiny": options.tiny}
            began = time.time()
            command = [sys.executable, "-m", "benchmarks.model", "--answer", str(answer), "--asked", json.dumps(asked)]
            subprocess.run(command, check=True)
            found = json.loads(answer.read_text())
            if "spoiled" not in found:
                return found
            seconds -= time.time() - began
            failed |= found["spoiled"]


def answer_parent(asked: dict[str, Any], answer: Path) -> None:
    """What :func:`measure_apart` asked, as a file."""
    began, tiny = time.time(), asked["tiny"]
    shape, device, backend = (
        (TINY[asked["name"]], "cpu", "aot_eager") if tiny else (SHAPES[asked["name"]], "cuda", "inductor")
    )
    try:
        allowed = lambda: time.time() - began < asked["seconds"]
        found = measure(shape, device, asked["adamw"], backend, allowed, asked["failed"])
    except Spoiled as error:
        found = {"spoiled": {error.args[0]: error.args[1]}}
    answer.write_text(json.dumps(found))


def measure(
    s: Shape,
    device: str,
    adamw: bool = False,
    backend: str = "inductor",
    allowed: Callable[[], bool] = lambda: True,
    failed: Mapping[str, dict[str, Any]] = MappingProxyType({}),
) -> dict[str, dict[str, Any]]:
    """Of each contender: milliseconds of a step, peak gigabytes and the loss; or its error.

    ``failed`` are the errors of contenders that are not to be tried again. One that leaves the GPU unusable raises
    :class:`Spoiled`, which names it.
    """
    cuda = device == "cuda"
    ready: dict[str, Callable[[], Tensor]] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, step in steps(s, device, adamw, backend, allowed):
        if name in failed:
            found[name] = failed[name]
            continue
        try:
            if isinstance(step, str):
                raise TimeoutError(step)
            began = time.perf_counter()
            loss = float(step())
            first = time.perf_counter() - began
            for _ in range(WARM_UP - 1):
                step()
            found[name] = {"loss": loss, "first step s": round(first, 1), "GB": _peak(step) if cuda else None}
            ready[name] = step
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            if cuda:
                try:
                    torch.cuda.synchronize()
                except Exception:
                    raise Spoiled(name, found[name]) from error
                torch.cuda.empty_cache()
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(ROUNDS):
        for name, step in ready.items():
            times[name].append(_milliseconds(step, cuda))
    for name, own in times.items():
        found[name] |= {"ms": round(statistics.median(own), 2), "rounds": [round(t, 2) for t in own]}
    torch.compiler.reset()
    return found


def _peak(step: Callable[[], Tensor]) -> float:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return round(torch.cuda.max_memory_allocated() / 1e9, 2)


def _milliseconds(step: Callable[[], Tensor], cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3


# Results --------------------------------------------------------------------------------------------------------------


def markdown(results: dict[str, Any]) -> str:
    """The results as a table; the ratio is ours over the fastest peer, eager and compiled apart."""
    lines = [f"- {k}: {v}" for k, v in results["environment"].items()]
    lines += ["", "Milliseconds of a step (median of turns), peak GB, loss; ratio = ours / fastest peer.", ""]
    lines += ["| model | | ms | GB | loss | ratio of time | of memory |", "|---|---|---|---|---|---|---|"]
    for model, found in results.get("models", {}).items():
        for name, row in found.items():
            if "error" in row:
                lines.append(f"| {model} | {name} | {row['error']} | | | | |")
                continue
            who, how = name.split(", ")
            rivals = [r for n, r in found.items() if n.endswith(how) and not n.startswith("ours") and "ms" in r]
            ratios = ["", ""]
            if who == "ours" and rivals:
                best = min(rivals, key=lambda r: r["ms"])
                memory = f"{row['GB'] / best['GB']:.2f}" if row["GB"] else ""
                ratios = [f"{row['ms'] / best['ms']:.3f}", memory]
            cells = [model, name, f"{row['ms']:.1f}", row["GB"] or "", f"{row['loss']:.4f}", *ratios]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder for model-DATE.json and .md")
    parser.add_argument("--commit", type=commit, help="what was measured, where the machine has no git")
    parser.add_argument("--only", default="", help="words, with | between: models by name, in a file of their own")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which nothing more is compiled")
    parser.add_argument("--adamw", action="store_true", help="an optimiser's step belongs to each step")
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU")
    parser.add_argument("--asked", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.asked is not None:
        return answer_parent(options.asked, options.answer)
    began = time.time()
    about = environment()
    if not options.tiny:
        about["machine"] = torch.cuda.get_device_name()
        about["versions"] += f", triton {importlib.metadata.version('triton')}"
    about["commit"] = options.commit or about["commit"]
    given = sys.argv[1:]
    if options.out is not None:
        given[given.index("--out") + 1] = "DIR"  # where the results went is nobody's business
    about["command"] = f"python -m benchmarks.model {shlex.join(given)}".strip()
    models: dict[str, Any] = {}
    results: dict[str, Any] = {"environment": about, "models": models}
    for name, shape in (TINY if options.tiny else SHAPES).items():
        if not any(word in name for word in options.only.split("|")):
            continue
        if time.time() - began > options.budget:
            break
        models[str(shape)] = measure_apart(name, options, options.budget - (time.time() - began))
        results["seconds"] = round(time.time() - began)
        for who, row in models[str(shape)].items():
            print(f"{shape}: {who:18} { ({k: v for k, v in row.items() if k != 'rounds'}) }", flush=True)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            chosen = re.sub(r"\W+", "-", options.only.lower()).strip("-")
            kind = f"model-{chosen}" if chosen else "model"
            stem = options.out / f"{kind}-{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M}"
            stem.with_suffix(".json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
            stem.with_suffix(".md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
