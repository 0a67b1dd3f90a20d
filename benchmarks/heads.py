"""What trainers ask of a vocabulary head: log-probabilities and entropies for a loss of their own, and LoRA's head.

    python -m benchmarks.heads --out DIR [--only WORDS] [--budget SECONDS] [--commit HASH] [--tiny]

8192 tokens, 4096 features, 128256 classes in bfloat16, gradients of the hidden states and of what is trained. Beside
``ops.linear_logprobs`` and ``ops.linear_cross_entropy(low_rank=...)``: plain torch, the same compiled, the same in
chunks of 1024 tokens that the backward recomputes (as trainers write it), and Liger's heads where they are installed
and can do the work: its cross-entropy of each token, its scaled cross-entropy with an entropy, and for LoRA the
cross-entropy of a merged weight.

Each contender's results and gradients are compared with float64 before it is timed; the relative errors stand in the
results. Contenders take turns, one call of each behind the other; medians count. Memory is the peak beyond inputs,
results and gradients. ``--tiny`` is a few seconds on a CPU, to see that all of it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from monoidreduce import ops

from .cpu import commit, environment
from .gpu_wide import extra_memory, queued
from .measure import best_times

CHUNK, ROUNDS, SCALING, TEMPERATURE = 1024, 7, 2.0, 0.7
Results = tuple[Tensor, ...]
Head = Callable[..., Results]  # (x, weight, down, up, target, ids): what was asked for, one number or K numbers a row


@dataclass(frozen=True)
class Sizes:
    tokens: int = 8192
    features: int = 4096
    classes: int = 128256
    ids: int = 64
    rank: int = 16


@dataclass(frozen=True)
class Work:
    """What is asked, and what gets gradients among (x, weight, down, up)."""

    name: str
    asked: tuple[str, ...]  # of "chosen", "ids", "entropy", "lse", in this order
    temperature: float = 1.0
    trained: tuple[int, ...] = (0, 1)
    lora: bool = False


WORKS = (
    Work("chosen token", ("chosen",)),
    Work("chosen token and entropy, temperature 0.7", ("chosen", "entropy"), TEMPERATURE),
    Work("LoRA on the head: chosen token", ("chosen",), trained=(0, 2, 3), lora=True),
    Work("64 ids a row", ("ids",)),
    Work("entropy and logsumexp", ("entropy", "lse")),
    Work("chosen token, 64 ids, entropy, logsumexp, temperature 0.7", ("chosen", "ids", "entropy", "lse"), TEMPERATURE),
    Work("LoRA on the head: chosen token and entropy", ("chosen", "entropy"), trained=(0, 2, 3), lora=True),
)


def ours(work: Work, x: Tensor, weight: Tensor, down: Tensor, up: Tensor, target: Tensor, ids: Tensor) -> Results:
    found = ops.linear_logprobs(
        x,
        weight,
        target if "chosen" in work.asked else None,
        ids=ids if "ids" in work.asked else None,
        temperature=work.temperature,
        return_entropy="entropy" in work.asked,
        return_lse="lse" in work.asked,
        low_rank=(F.linear(x, down) * SCALING, up) if work.lora else None,
    )
    if isinstance(found, Tensor):
        return (found,)
    named = {"chosen": found.log_prob, "ids": found.ids_log_probs, "entropy": found.entropy, "lse": found.lse}
    return tuple(named[what] for what in work.asked)


def plain(work: Work, x: Tensor, weight: Tensor, down: Tensor, up: Tensor, target: Tensor, ids: Tensor) -> Results:
    """As one writes it with logits."""
    logits = F.linear(x, weight)
    if work.lora:
        logits = logits + F.linear(F.linear(x, down), up) * SCALING
    logits = logits.to(torch.promote_types(x.dtype, torch.float32)) / work.temperature
    lse = logits.logsumexp(-1)
    found = []
    for what in work.asked:
        if what == "chosen":
            found.append(logits.gather(-1, target[:, None])[:, 0] - lse)
        elif what == "ids":
            found.append(logits.gather(-1, ids) - lse[:, None])
        elif what == "entropy":
            found.append(lse - (logits.softmax(-1) * logits).sum(-1))
        else:
            found.append(lse)
    return tuple(found)


def chunked(work: Work, x: Tensor, weight: Tensor, down: Tensor, up: Tensor, target: Tensor, ids: Tensor) -> Results:
    parts = []
    for at in range(0, len(x), CHUNK):
        rows = slice(at, at + CHUNK)
        given = (work, x[rows], weight, down, up, target[rows], ids[rows])
        parts.append(checkpoint(plain, *given, use_reentrant=False) if torch.is_grad_enabled() else plain(*given))
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


def contenders(work: Work, cuda: bool) -> Iterator[tuple[str, Head]]:
    bind = lambda head: lambda *given: head(work, *given)
    yield "ours", bind(ours)
    yield "torch", bind(plain)
    yield "torch in chunks", bind(chunked)
    if not cuda:
        return
    if importlib.util.find_spec("liger_kernel") is not None:
        yield from _liger(work)
    if work in WORKS[:3]:
        yield "torch.compile", torch.compile(bind(plain), dynamic=False)


def _liger(work: Work) -> Iterator[tuple[str, Head]]:
    """Liger's heads that can do the work."""

    def each(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        module = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
        apply = module.LigerFusedLinearCrossEntropyFunction.apply
        return -apply(x, weight, target, None, None, -100, 0.0, 0.0, "none")[0]

    def scaled(x: Tensor, w: Tensor, down: Tensor, up: Tensor, target: Tensor, ids: Tensor) -> Results:
        module = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
        apply = module.LigerFusedLinearScaledCrossEntropyFunction.apply
        found = apply(x, w, target, work.temperature, return_entropy="entropy" in work.asked)
        return (-found,) if isinstance(found, Tensor) else (-found[0], found[1])

    if work.asked == ("chosen",) and work.lora:
        yield "Liger, merged", lambda x, w, down, up, target, ids: (each(x, w + (up @ down) * SCALING, target),)
    elif work.asked == ("chosen",):
        yield "Liger", lambda x, w, down, up, target, ids: (each(x, w, target),)
    if work.asked in (("chosen",), ("chosen", "entropy")) and not work.lora:
        yield "Liger, scaled", scaled


def draw(s: Sizes, cuda: bool) -> list[Tensor]:
    torch.manual_seed(0)
    with torch.device("cuda" if cuda else "cpu"):
        floats = [torch.randn(s.tokens, s.features) * s.features**-0.5, torch.randn(s.classes, s.features)]
        floats += [torch.randn(s.rank, s.features) * s.features**-0.5, torch.randn(s.classes, s.rank) * 0.3]
        whole = [torch.randint(s.classes, (s.tokens,)), torch.randint(s.classes, (s.tokens, s.ids))]
    return [t.bfloat16() if cuda else t for t in floats] + whole


def cotangents(work: Work, s: Sizes, device: torch.device) -> list[Tensor]:
    """A weight for each number that is asked, as a loss has them."""
    generator = torch.Generator(device).manual_seed(1)
    shape = lambda what: (s.tokens, s.ids) if what == "ids" else (s.tokens,)
    return [torch.randn(shape(what), generator=generator, device=device) / s.tokens for what in work.asked]


def pull(head: Head, work: Work, given: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_(k in work.trained) for k, t in enumerate(given)]
    found = head(*leaves)
    total = torch.stack([(a * w.to(a.dtype)).sum().double() for a, w in zip(found, weights, strict=True)]).sum()
    return (*(a.detach() for a in found), *torch.autograd.grad(total, [leaves[k] for k in work.trained]))


def reference(work: Work, given: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """Results and gradients in float64, rows block by block."""
    wide = [t.double() if t.is_floating_point() else t for t in given]
    parts = []
    totals: dict[int, Tensor] = {}
    for at in range(0, len(wide[0]), CHUNK):
        rows = slice(at, at + CHUNK)
        part = [t[rows] if k in (0, 4, 5) else t for k, t in enumerate(wide)]
        found = pull(lambda *a: plain(work, *a), work, part, [w[rows].double() for w in weights])
        parts.append(found[: len(work.asked) + 1])
        for k, gradient in zip(work.trained[1:], found[len(work.asked) + 1 :], strict=True):
            totals[k] = totals[k] + gradient if k in totals else gradient
    return [torch.cat(each) for each in zip(*parts, strict=True)] + [totals[k] for k in work.trained[1:]]


def relative(got: Tensor, truth: Tensor) -> float:
    return float(f"{torch.linalg.vector_norm(got.double() - truth) / torch.linalg.vector_norm(truth):.1e}")


def measure(work: Work, s: Sizes, given: list[Tensor], cuda: bool, show: Callable[[dict], None]) -> None:
    weights = cotangents(work, s, given[0].device)
    truth = reference(work, given, weights)
    steps: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for who, head in contenders(work, cuda):
        row = rows[who] = {"work": work.name, "who": who}

        def forward(head: Head = head) -> Results:
            with torch.no_grad():
                return head(*given)

        both = lambda head=head: pull(head, work, given, weights)
        try:
            row["errors"] = [relative(a, b) for a, b in zip(both(), truth, strict=True)]
            forward()
            if cuda:
                row["forward MB"], row["MB"] = (round(extra_memory(step), 1) for step in (forward, both))
            steps[who] = forward, both
        except Exception as error:
            row["problem"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    del truth
    gc.collect()
    for k, what in enumerate(("forward ms", "ms")):
        calls = {who: own[k] for who, own in steps.items()}
        if cuda:
            torch.cuda.empty_cache()
            times = dict(zip(calls, queued(list(calls.values()), ROUNDS), strict=True))
        else:
            times = best_times(calls, 1)
        for who, took in times.items():
            rows[who][what] = round(took, 3)
    for row in rows.values():
        show(row)
    torch.compiler.reset()


def markdown(results: dict[str, Any]) -> str:
    lines = [f"- {k}: {v}" for k, v in results["environment"].items()]
    lines += ["", "Milliseconds of the forward alone, and of forward and backward, in turns; extra megabytes of each;"]
    lines += ["relative errors, against float64, of the results and then of the gradients.", ""]
    lines += ["| work | who | forward ms | both ms | forward MB | both MB | errors |", "|---|---|---|---|---|---|---|"]
    for r in results["rows"]:
        cells = [r["work"], r["who"], r.get("forward ms", r.get("problem", ""))]
        cells += [r.get(key, "") for key in ("ms", "forward MB", "MB")]
        cells += [", ".join(f"{e:.1e}" for e in r.get("errors", ()))]
        lines.append("| " + " | ".join(str(c).replace("|", "/") for c in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder for heads-DATE.json and .md")
    parser.add_argument("--commit", type=commit, help="what was measured, where the machine has no git")
    parser.add_argument("--only", default="", help="words, with | between: works by name, in a file of their own")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds after which no work is begun")
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU")
    options = parser.parse_args()
    sys.path.append(str(Path(__file__).parent.parent / "peers"))
    began, cuda = time.time(), not options.tiny
    about = environment()
    if cuda:
        about["machine"] = torch.cuda.get_device_name()
        about["versions"] += f", triton {importlib.metadata.version('triton')}"
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            about["versions"] += f", liger {importlib.metadata.version('liger_kernel')}"
    about["commit"] = options.commit or about["commit"]
    words = sys.argv[1:]
    if options.out is not None:
        words[words.index("--out") + 1] = "DIR"  # where the results went is nobody's business
    about["command"] = f"python -m benchmarks.heads {shlex.join(words)}".strip()
    results: dict[str, Any] = {"environment": about, "rows": []}
    sizes = Sizes() if cuda else Sizes(96, 16, 320, 3, 2)
    about["sizes"] = f"{sizes.tokens} tokens, {sizes.features} features, {sizes.classes} classes, rank {sizes.rank}"
    given = draw(sizes, cuda)
    chosen = re.sub(r"\W+", "-", options.only.lower()).strip("-")
    stem = f"heads-{chosen}" if chosen else "heads"
    stem += f"-{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M}"

    def show(row: dict[str, Any]) -> None:
        results["rows"].append(row)
        results["seconds"] = round(time.time() - began)
        print(" ".join(f"{k} {v}" if k not in ("work", "who") else f"{v!s:16}" for k, v in row.items()), flush=True)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / f"{stem}.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
            (options.out / f"{stem}.md").write_text(markdown(results))

    for work in WORKS:
        if time.time() - began < options.budget and any(word in work.name for word in options.only.split("|")):
            measure(work, sizes, given, cuda, show)
            if cuda:
                torch.cuda.empty_cache()
    print(f"{time.time() - began:.0f} s in all")


if __name__ == "__main__":
    main()
