"""Wide features on a GPU: linear cross-entropy, contrastive and distillation losses, sampling, beside their peers.

    python3 -m benchmarks.gpu_wide --out DIR [--budget SECONDS] [--commit HASH] [--only WORD ...] [--who NAME ...]

Every contender's loss and gradients are compared with a float32 reference (computed row block by row block) before it
is timed; the relative errors stand in the results. The chip is limited by power, so that a kernel's time depends on
what ran before, and drifts: every contender is timed beside the products alone, and its ratio to them is what to
compare. "Of the products": one call of each after the other. "In blocks": a fifth of a second of each after the other,
three times, so that a call has only its own kind before it, as in a training step; a block's first calls do not count,
and medians of the blocks' medians are compared. "From rest": one call on an idle device, with the host's time in it.
Extra memory is the peak beyond inputs, results and gradients.
Peers are imported from ``peers/`` (unpacked wheels) where they are. Writes ``gpu-wide-*.json`` and ``.md`` as it goes;
with ``--only`` (words of works) or ``--who`` (contenders by name) these words are in the files' names.
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
import math
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import monoidreduce as mr

from .cpu import commit, environment
from .wide_works import Loss, Work, best50, contrastive, cross_entropy, distill, draw, normal, top, works

SMALL = 2.0**-12
KEPT: list[mr.skip_below] = []
COLUMNS = "of the products", "in blocks", "from rest ms", "forward ms", "MB", "forward MB"
ROUNDS = {"naive": 1, "Cut Cross-Entropy": 3, "Liger": 3, "torch.compile": 5}
FORWARD = "ours", "torch.compile", "naive", "Cut Cross-Entropy", "QuACK"  # whose forward alone is timed too
BLOCKS, WARM, COUNTED = 3, 0.05, 0.15  # how many of each, and seconds of a block: before anything counts, and then


def queued(calls: Sequence[Callable[[], Any]], rounds: int, warm: int = 1) -> list[float]:
    """Median milliseconds of each call, in turns, one behind the other: the device has always something to do, as in a
    training step and in Triton's ``do_bench``, so that the host counts only where it cannot keep up."""
    marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
    for turn in range(-warm, rounds):
        for call, own in zip(calls, marks, strict=True):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            if turn >= 0:
                own.append((start, stop))
    torch.cuda.synchronize()
    return [statistics.median(start.elapsed_time(stop) for start, stop in own) for own in marks]


def milliseconds(call: Callable[[], Any], seconds: float = 0.4) -> float:
    """Median milliseconds of a call, run for about so long."""
    (once,) = queued([call], 2)
    return queued([call], max(3, min(50, int(seconds * 1e3 / max(once, 1e-3)))))[0]


def from_rest(call: Callable[[], Any], rounds: int = 3) -> float:
    """Median milliseconds of a call on an idle device."""
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        found += queued([call], 1, warm=0)
    return statistics.median(found)


def in_turns(call: Callable[[], Any], products: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Median milliseconds of a call, and its ratio to those of the products, one of each after the other."""
    ours, theirs = queued([call, products], rounds)
    return ours, ours / theirs


def in_blocks(call: Callable[[], Any], products: Callable[[], Any]) -> float:
    """The ratio of a call's milliseconds to the products', in blocks of each that take turns."""
    calls = products, call
    took = [queued([each], 2)[0] / 1e3 for each in calls]
    found: list[list[float]] = [[], []]
    for _ in range(BLOCKS):
        for each, seconds, own in zip(calls, took, found, strict=True):
            own += queued([each], max(2, round(COUNTED / seconds)), warm=max(1, round(WARM / seconds)))
    theirs, ours = map(statistics.median, found)
    return ours / theirs


def extra_memory(call: Callable[[], Tensor | tuple[Tensor, ...]]) -> float:
    """Megabytes at the peak of a call beyond what it returns and what was there before."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    results = sum(t.untyped_storage().nbytes() for t in ([kept] if isinstance(kept, Tensor) else kept))
    del kept
    return (peak - before - results) / 1e6


def pull(loss: Loss, args: tuple[Tensor, ...], grads: list[int]) -> tuple[Tensor, ...]:
    given = [a.detach().requires_grad_(k in grads) for k, a in enumerate(args)]
    value = loss(*given)
    return (value.detach(), *torch.autograd.grad(value, [given[k] for k in grads]))


def reference(work: Work, args: tuple[Tensor, ...], grads: list[int], block: int = 1024) -> list[Tensor]:
    """The mean loss and its gradients in float32, rows block by block."""
    wide = [a.float() if a.is_floating_point() else a for a in args]
    totals = [torch.zeros((), device="cuda"), *(torch.zeros_like(wide[k]) for k in grads)]
    for at in range(0, work.rows, block):
        rows = slice(at, at + block)
        part = tuple(a[rows] if k in work.by_rows else a for k, a in enumerate(wide))
        value, *found = pull(work.plain, part, grads)
        totals[0] += value / work.rows
        for total, k, g in zip(totals[1:], grads, found, strict=True):
            (total[rows] if k in work.by_rows else total).add_(g, alpha=1 / work.rows)
    return totals


def relative(got: Tensor, truth: Tensor) -> float:
    return float(torch.linalg.vector_norm(got.float() - truth) / torch.linalg.vector_norm(truth))


def _filtered(loss: Loss, *args: Tensor) -> Tensor:
    """A loss whose gradients leave small tiles out; the share of tiles that was kept stands in ``KEPT``."""
    with mr.skip_below(SMALL) as skipped:
        found = loss(*args)
    KEPT[:] = [skipped]
    return found


def contenders(work: Work) -> Iterator[tuple[str, Loss]]:
    for limit in work.budgets[1::2] if work.brief else work.budgets:

        def ours(*args: Tensor, limit: str = limit) -> Tensor:
            with mr.budget(limit):
                return work.ours(*args)

        yield f"ours {limit}", ours
    if not work.brief:
        yield "ours", work.ours
    if work.plain is cross_entropy and not work.brief:
        yield f"ours, skip_below 2**{round(math.log2(SMALL))}", partial(_filtered, work.ours)
    mean: Loss = lambda *args: work.plain(*args) / work.rows
    if not work.brief:
        yield "torch.compile", torch.compile(mean, dynamic=False)
    if work.rows < 65536:
        yield "naive", mean
    if work.plain is not distill and not work.brief:
        yield from _peers(work)


def _peers(work: Work) -> Iterator[tuple[str, Loss]]:
    order = (0, 1, 2) if work.plain is cross_entropy else (0, 2, 1)
    if cce := _import("cut_cross_entropy"):
        yield "Cut Cross-Entropy", lambda *a: cce.linear_cross_entropy(*(a[k] for k in order))
    if liger := _import("liger_kernel.ops.fused_linear_cross_entropy"):
        function = liger.LigerFusedLinearCrossEntropyFunction
        yield "Liger", lambda *a: function.apply(*(a[k] for k in order))[0]
    if quack := _import("quack.linear_cross_entropy"):
        chunked = quack.chunked_linear_cross_entropy
        yield "QuACK", lambda *a: chunked(*(a[k] for k in order))
        yield "QuACK, untuned", lambda *a: chunked(*(a[k] for k in order), tuned=False)


def _import(name: str) -> Any:
    """A peer's module, or None; an installed one that cannot be imported says why, once."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        return None
    try:
        return importlib.import_module(name)
    except Exception as error:
        said = f"{name} cannot be imported: {type(error).__name__}: {error}"
        if said not in _SAID:
            print(said[:400], flush=True)
        _SAID.add(said)
        return None


_SAID = set[str]()


def measure(work: Work, clock: Callable[[], bool], show: Callable[[dict], None], names: Sequence[str] = ()) -> None:
    """Measure the contenders of a work that have these names, or all."""
    args = work.make()
    grads = [k for k, a in enumerate(args[: work.grads]) if a.is_floating_point()]
    if work.plain is distill or work.plain is contrastive:
        grads = [0, 2]
    truth = reference(work, args, grads)
    torch.cuda.empty_cache()
    products = work.gemms(args)
    floor = milliseconds(products)
    show({"work": work.name, "who": "the products alone", "ms": round(floor, 3)})
    torch.cuda.empty_cache()
    for who, loss in contenders(work):
        if not clock():
            return
        if names and who not in names:
            continue
        row: dict[str, Any] = {"work": work.name, "who": who}
        try:
            call = partial(pull, loss, args, grads)
            found = call()
            row["errors"] = [round(relative(g, t), 5) for g, t in zip(found, truth, strict=True)]
            del found
            if KEPT:
                row["who"] += f", {KEPT.pop().kept:.1%} of tiles kept"
            row["MB"] = round(extra_memory(call), 1)
            ms, ratio = in_turns(call, products, ROUNDS.get(who, 3 if "skip" in who else 9))
            row["ms"], row["of the products"] = round(ms, 3), round(ratio, 3)
            if who.startswith("ours ") or who == "torch.compile":
                row["in blocks"] = round(in_blocks(call, products), 3)
            row["from rest ms"] = round(from_rest(call), 3)
            KEPT.clear()
            if who in FORWARD:
                forward = partial(loss, *args)
                with torch.no_grad():
                    row["forward ms"] = round(milliseconds(forward, 0.3), 3)
                    row["forward MB"] = round(extra_memory(forward), 1)
        except Exception as error:
            row["problem"] = f"{type(error).__name__}: {str(error)[:300]}"
        gc.collect()
        torch.cuda.empty_cache()
        show(row)
    if not work.brief:
        x, w = (args[k] for k in grads)
        one = milliseconds(lambda: x @ w.mT)
        show({"work": work.name, "who": "the forward's product alone", "ms": round(one, 3)})


def _pickers(x: Tensor, w: Tensor) -> dict[str, dict[str, Callable[[], Tensor]]]:
    def gumbel(x: Tensor) -> Tensor:
        s = (x @ w.mT).float()
        return (s - torch.log(-torch.log(torch.rand_like(s)))).argmax(-1)

    compiled = torch.compile(gumbel, dynamic=False)
    return {
        "Gumbel sampling": {
            "ours": lambda: draw(x, w, 7),
            "torch.compile": lambda: compiled(x),
            "multinomial": lambda: torch.multinomial(torch.softmax((x @ w.mT).float(), -1), 1),
        },
        "argmax": {"ours": lambda: top(x, w), "torch": lambda: (x @ w.mT).argmax(-1)},
        "top 50": {"ours": lambda: best50(x, w)[1], "torch": lambda: (x @ w.mT).topk(50)[1]},
    }


def picks(clock: Callable[[], bool], show: Callable[[dict], None]) -> None:
    """Sampling, argmax and top-50 over a vocabulary, without gradients."""
    D, V = 4096, 128256
    torch.manual_seed(0)
    w = normal(V, D)
    for M in (64, 1024):
        x = normal(M, D, scale=D**-0.5)
        exact = x.float() @ w.float().mT
        with torch.no_grad():
            for name, whos in _pickers(x, w).items():
                if not clock():
                    return
                work, calls = f"{name} M{M} D{D} V{V}", list(whos.values())
                try:
                    took = queued(calls, 40, warm=3)
                except Exception as error:
                    show({"work": work, "who": "all", "problem": f"{type(error).__name__}: {str(error)[:300]}"})
                    continue
                for (who, call), ms in zip(whos.items(), took, strict=True):
                    row: dict[str, Any] = {"work": work, "who": who, "ms": round(ms, 3)}
                    found = call()
                    if name != "Gumbel sampling":  # what was picked is the best, to the rounding of a logit
                        best = exact.topk(found.shape[-1] if found.dim() > 1 else 1).values[:, -1]
                        least = exact.gather(1, found.view(M, -1)).amin(1)
                        row["errors"] = [float((best - least).clamp(min=0).max())]
                    row["MB"], row["from rest ms"] = round(extra_memory(call), 1), round(from_rest(call), 3)
                    if who == "ours":
                        row["in blocks"] = round(in_blocks(call, calls[1]), 3)
                    show(row)
        del exact


def markdown(results: dict[str, Any]) -> str:
    lines = [f"- {k}: {v}" for k, v in results["environment"].items()]
    lines += [
        "",
        "Milliseconds of loss and gradients (and of the forward alone), bfloat16, calls queued one behind the other;",
        "of the products: in turns with them, call by call; in blocks: in turns with them, a fifth of a second of each",
        "at a time; from rest: one call on an idle device. Extra megabytes. Relative errors of the loss and of each",
        "gradient against float32. Picks of one kind take turns call by call, ours in blocks with the one below it;",
        "their errors: how far below the best a pick lies.",
        "",
    ]
    lines += [
        "| work | who | ms | of the products | in blocks | from rest | forward | MB | forward MB | errors |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results["rows"]:
        cells = [r["work"], r["who"], r.get("ms", r.get("problem", ""))]
        cells += [r.get(key, "") for key in COLUMNS]
        cells += [", ".join(map(str, r.get("errors", ())))]
        lines.append("| " + " | ".join(str(c).replace("\n", " ").replace("|", "/") for c in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=190.0, help="seconds after which nothing new is begun")
    parser.add_argument("--commit", type=commit, help="what was measured, where the machine has no git")
    parser.add_argument("--only", nargs="*", default=[], help="words of the works to do")
    parser.add_argument("--who", nargs="*", default=[], help="contenders of works with gradients, by name")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    sys.path.append(str(Path(__file__).parent.parent / "peers"))
    torch._dynamo.config.cache_size_limit = 256  # torch.compile goes dense, silently, after 8 recompilations
    began = time.time()
    found = environment()
    found["machine"] = torch.cuda.get_device_name()
    found["commit"] = options.commit or found["commit"]
    for peer in ("liger_kernel", "quack-kernels", "nvidia-cutlass-dsl"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found["versions"] += f", {peer} {importlib.metadata.version(peer)}"
    words = sys.argv[1:]
    words[words.index("--out") + 1] = "DIR"  # where the results went is nobody's business
    found["command"] = "python -m benchmarks.gpu_wide " + shlex.join(words)
    results: dict[str, Any] = {"environment": found, "rows": []}
    chosen = re.sub(r"\W+", "-", " ".join((*options.only, *options.who)).lower()).strip("-")
    name = f"gpu-wide-{chosen}" if chosen else "gpu-wide"
    stem = options.out / f"{name}-{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M}"

    def show(row: dict[str, Any]) -> None:
        results["rows"].append(row)
        results["seconds"] = round(time.time() - began)
        print(" ".join(f"{k} {v}" if k not in ("work", "who") else f"{v!s:24}" for k, v in row.items()), flush=True)
        stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        stem.with_suffix(".md").write_text(markdown(results))

    clock = lambda: time.time() - began < options.budget
    wanted = lambda name: not options.only or any(word in name for word in options.only)
    known = works()
    todo: list[tuple[str, Callable[..., None]]] = [
        (work.name, partial(measure, work, names=options.who)) for work in known
    ]
    largest = next(k for k, work in enumerate(known) if work.rows == 65536)
    todo += [("picks", picks), todo.pop(largest)]  # the longest last, should time run out
    for name, do in todo:
        if clock() and wanted(name):
            do(clock, show)
            gc.collect()
            torch.cuda.empty_cache()
    print(f"{time.time() - began:.0f} s in all; {stem}.json and .md")


if __name__ == "__main__":
    main()
