"""Tiles of single kernels on a GPU, interleaved: which one each kernel of a perceptron's gradient should take.

    python -m benchmarks.kernel_tiles swiglu|relu|gelu|relu64 [--dry]
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
import re
import statistics
import sys
import time

DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"

import torch

import monoidreduce as mr
from monoidreduce import ops, tuning
from monoidreduce.engine import triton as engine
from monoidreduce.engine.triton import KernelPlan, launch, use_plan
from monoidreduce.engine.triton import plan as plans
from monoidreduce.engine.triton.text import emit, kinds
from monoidreduce.plan import defaults, store

N, D, R = (256, 128, 2) if DRY else (16384, 128, 24)
DEVICE = "cpu" if DRY else "cuda"


def _args(*shapes):
    torch.manual_seed(0)
    return [(torch.randn(*s, device=DEVICE) * s[-1] ** -0.25).bfloat16() for s in shapes]


def _square(count):
    return lambda: _args(*[(N, 128)] * count)


gelu = lambda x, p, q: ops.mlp(x, p, q, activation="gelu_tanh")
CASES = {
    "swiglu": (ops.gated_mlp, _square(4)),
    **{f"gated {n}": (ops.gated_mlp, lambda n=n: _args((n, 128), *[(N, 128)] * 3)) for n in (20000, 12000, 10000)},
    "relu": (ops.mlp, _square(3)),
    "gelu": (gelu, _square(3)),
    "relu64": (ops.mlp, lambda: _args((N, 64), (4 * N, 64), (4 * N, 64))),
}

# per kernel: (pass, direction, which cut), what it is called, and its tiles: kept, folded, warps, stages, parts, boxes
GATED = {
    "forward (3)": (
        (0, "cols", 0),
        "64,64,4,2,1,1 128,64,8,3,1,0 r:64,64,4,2,1,1 p:128,64,8,3,1,0 p:128,64,8,3,1,1 p:64,64,4,2,1,1 p:128,64,8,4,1,1 rp:64,64,4,2,1,1",
    ),
    "row (5)": (
        (1, "cols", 0),
        "128,64,8,3,1,0 128,64,8,3,1,1 128,64,8,2,1,1 rx0:64,64,4,2,1,1 rx2:64,64,4,2,1,1 rx2:128,64,8,3,1,1",
    ),
    "gate, up (5)": ((1, "rows", 0), "64,64,4,2,1,1 p:64,64,4,2,1,1 p:128,64,8,3,1,1"),
    "down (3)": ((1, "rows", 1), "128,64,8,3,1,0 p:128,64,8,3,1,0 64,64,4,2,1,1 p:64,64,4,2,1,1 r:64,64,4,2,1,1 rp:64,64,4,2,1,1"),
}
_KEPT = " r:64,64,4,3,1,1 r:64,64,4,2,1,1 r:64,64,4,4,1,1 r:128,64,8,3,1,1"
_PLAIN = "64,64,4,3,1,1 64,64,4,2,1,1 128,64,8,3,1,0"
PLAIN = {
    "forward (2)": ((0, "cols", 0), _PLAIN + _KEPT + " r:64,128,4,2,1,1"),
    "row (3)": ((1, "cols", 0), "128,64,8,3,1,0 64,64,4,3,1,1 64,64,4,2,1,1" + _KEPT + " rx2:64,64,4,3,1,1 r:64,128,4,2,1,1"),
    "columns (4)": ((1, "rows", 0), "64,64,4,2,1,1 128,64,8,3,1,0 rx1:64,64,4,2,1,1 rx3:64,64,4,2,1,1 rx1:64,64,4,3,1,1 rx3:64,64,4,3,1,1"),
}
LONG = {
    "forward (2)": ((0, "cols", 0), "64,128,4,3,1,1 64,64,4,3,1,1 64,64,4,4,1,1 64,64,4,5,1,1" + _KEPT + " r:64,128,4,3,1,1"),
    "row (3)": ((1, "cols", 0), "64,128,4,3,1,1" + _KEPT + " r:64,128,4,3,1,1 rx2:64,128,4,3,1,1 rx2:64,64,4,4,1,1"),
    "columns (4)": ((1, "rows", 0), "64,128,4,3,1,1" + _KEPT + " r:64,128,4,3,1,1 rx3:64,128,4,3,1,1 rx3:64,64,4,4,1,1 rx1:64,64,4,4,1,1"),
}
_PARTS = lambda tile, boxes: " ".join(f"{tile},{parts},{boxes}" for parts in (1, 2, 4, 8))
UNEVEN = {"row (5)": ((1, "cols", 0), _PARTS("128,64,8,3", 0)), "forward (3)": ((0, "cols", 0), _PARTS("64,64,4,2", 1))}
SWEEPS = {"gated 20000": UNEVEN, "gated 12000": UNEVEN, "gated 10000": UNEVEN, "swiglu": GATED, "relu": PLAIN, "gelu": PLAIN, "relu64": LONG}


HELD = '''
@triton.jit
def in_registers(x, place, kept_at):
    # as a product has it, plus a product of nothing: so the compiler keeps it in registers
    never = kept_at < 0
    lane = tl.arange(0, 16)
    left = tl.load(place + kept_at[:, None] * 16 + lane[None, :], mask=never[:, None], other=0)
    right = tl.load(place + lane[:, None] * 16 + tl.arange(0, x.shape[1])[None, :], mask=(lane < tl.max(never.to(tl.int32), 0))[:, None], other=0)
    return (x.to(tl.float32) + tl.dot(left, right)).to(x.dtype)

'''


def held(text, which):
    kept = [k for k in sorted(set(re.findall(r"(x\d)_at \+ kept_lane", text))) if not which or k in which]
    lines = "".join(f"    {k}_block = in_registers({k}_block, {k}_ptr, kept_at)\n" for k in kept)
    text = text.replace("    # running values\n", lines + "    # running values\n", 1)
    i = text.index("\n@triton.jit(do_not")
    return text[:i] + HELD + text[i:]


STEP = kinds.Sum.step


def products_first(self, fields):
    parts = [kinds.factored(c) for c in kinds.contractions(fields[0], self.over)]
    for c in parts:
        self.v.products(c.weight)
    for c in parts:
        self.total.add(c, self.weight(c.weight))


def turned(text):
    text = re.sub(r"tl\.dot\((\w+_block), tl\.trans\((\w+_block)\)\)", r"tl.trans(tl.dot(\2, tl.trans(\1)))", text)
    text = re.sub(
        r"(sum\d) = tl\.dot\((.+?), (\w+_block), acc=\1\)", r"\1 = tl.dot(tl.trans(\3), tl.trans(\2), acc=\1)", text
    )
    text = re.sub(
        r"(sum\d) = tl\.dot\(sum\d_late \+ 0\.0, (.+), acc=\1\)", r"\1 = tl.dot(tl.trans(\2), tl.trans(\1_late), acc=\1)", text
    )
    text = re.sub(r"(sum\d) = tl\.zeros\(\[KEPT, 128\]", r"\1 = tl.zeros([128, KEPT]", text)
    return re.sub(r", (sum\d), mask", r", tl.trans(\1), mask", text)


def folds(case):
    op, make = CASES[case]
    args = [a.requires_grad_() for a in make()]
    if DRY:
        return list(tuning.recorded(op, args, {}, backward=True).folds)
    return list(tuning.recorded(op, args, {}, backward=True).folds)


def variant(found, where, how):
    at, over, cut = where
    fold, leaves, sizes = found[at]
    whole = next(part for o, part, _ in engine._directions(fold) if o == over)
    part = whole if cut < 0 else engine._held(whole, sizes)[cut]
    *change, tile = how.split(":")
    change = change[0] if change else ""
    plan = KernelPlan(*map(int, tile.split(",")))
    values, batch = engine.merged(fold, leaves, sizes)
    kinds.Sum.step = products_first if "p" in change else STEP
    emit.kernel.cache_clear()
    with use_plan({over: plan}):
        one = launch.Launch(part, over, values, batch, sizes)
    kinds.Sum.step = STEP
    emit.kernel.cache_clear()
    if "r" in change:
        one.kernel = dataclasses.replace(one.kernel, text=held(one.kernel.text, re.findall(r"x\d", change)))
    if "t" in change:
        one.kernel = dataclasses.replace(one.kernel, text=turned(one.kernel.text))
    one._first_plan = plan
    place = {e: k for k, e in enumerate(fold.leaves)}
    given = [leaves[place[e]] for e in part.leaves]
    return lambda: one(given, lambda: values), one


def everything(case):
    return [(name, where, how) for name, (where, hows) in SWEEPS[case].items() for how in hows.split()]


def compile_some(case, part, parts):
    found = folds(case)
    for name, where, how in everything(case)[part::parts]:
        try:
            variant(found, where, how)[0]()
        except Exception as error:
            print("   not compiled:", name, how, type(error).__name__, str(error)[:100], flush=True)
    if not DRY:
        torch.cuda.synchronize()


def timed(run):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    return begin, end


def main(case):
    began, workers = time.time(), 14
    if not DRY:
        with concurrent.futures.ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_some, [case] * workers, range(workers), [workers] * workers))
    print(f"{case}: compiled in {time.time() - began:.1f} s", flush=True)
    found, runs, truth = folds(case), {}, {}
    for name, where, how in everything(case):
        try:
            run, one = variant(found, where, how)
            result = [r.float() for r in run()]
            if one.plan != one._first_plan:
                print("   made smaller:", name, how, one.plan)
                continue
            key = tuple(r.attrs for r in one.fold.reductions), name
            own = truth.setdefault(key, result)
            wrong = max(float((a - b).norm() / b.norm()) for a, b in zip(result, own, strict=True))
            runs[name, how] = run, wrong
        except Exception as error:
            print("   fails:", name, how, type(error).__name__, str(error)[:100], flush=True)
    if DRY:
        print({k: f"{w:.1e}" for k, (_, w) in runs.items()})
        return
    times = {k: [] for k in runs}
    for _ in range(R):
        events = [(k, timed(run)) for k, (run, _) in runs.items()]
        torch.cuda.synchronize()
        for k, (begin, end) in events:
            times[k].append(begin.elapsed_time(end))
    for (name, how), t in times.items():
        products = int(re.search(r"\((\d)\)", name)[1])
        fold, leaves, sizes = found[0]
        flops = 2 * sizes.rows * sizes.cols * sizes.letters["d"] * products
        middle = statistics.median(t)
        print(f"{name:15} {how:17} {middle:.4f} ms, least {min(t):.4f}, {flops / middle / 1e9:.0f} TFLOP/s, differs {runs[name, how][1]:.1e}")
    print(f"{case}: {time.time() - began:.1f} s", flush=True)


_GATED, _ROW, _LAST = (128, 1, "gated"), (128, 1, "gated gradient"), (128, 1, "plain gradient")
_LONG64 = (64, 1, "plain")
TABLES = {  # per key: the tile, and whether kept blocks stay in registers; None: not in the table
    "as it was": {_LONG64: ((64, 128, 4, 3), False), _ROW: None},
    "row": {},
    "row, last": {_LAST: ((64, 64, 4, 2), False), _LONG64: ((64, 64, 4, 4), False)},
    "row, last held": {_LAST: ((64, 64, 4, 2), True), _LONG64: ((64, 64, 4, 4), True)},
    "row, last, gated 128,64,8,3": {_LAST: ((64, 64, 4, 2), False), _GATED: None, _LONG64: ((64, 64, 4, 3), False)},
    "row, last, gated held": {_LAST: ((64, 64, 4, 2), False), _GATED: ((64, 64, 4, 2), True)},
}
_COPIED = dict(defaults.COPIED)


def switch(table):
    defaults.COPIED.clear()
    defaults.COPIED.update(_COPIED)
    plans.HELD = frozenset(key for key, entry in table.items() if entry and entry[1])
    for key, entry in table.items():
        defaults.COPIED.pop(key, None)
        if entry:
            defaults.COPIED[key] = entry[0]
    engine._READY.clear()
    store.forget()


def step_of(case):
    op, make = CASES[case]
    given = [a.requires_grad_() for a in make()]
    g = torch.randn_like(op(*given))
    return lambda: torch.autograd.grad(op(*given), given, g)


def warm(case, name):
    switch(TABLES[name])
    step_of(case)()
    torch.cuda.synchronize()


def tables(names):
    from triton.testing import do_bench

    began = time.time()
    jobs = [(case, name) for case in names for name in TABLES]
    with concurrent.futures.ProcessPoolExecutor(14, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(warm, *zip(*jobs, strict=True)))
    print(f"compiled in {time.time() - began:.1f} s", flush=True)
    for case in names:
        found, step = {name: [] for name in TABLES}, step_of(case)
        for _ in range(3):
            for name, table in TABLES.items():
                switch(table)
                step()
                found[name].append(do_bench(step, warmup=10, rep=50, return_mode="median"))
        for name, times in found.items():
            print(f"{case:8} {name:32} {statistics.median(times):.4f} ms, least {min(times):.4f}", flush=True)
    print(f"{time.time() - began:.1f} s", flush=True)


def whole():
    from torch.profiler import ProfilerActivity, profile

    from . import gpu
    from .gpu_works import perceptrons

    works = [w for w in perceptrons() if "contrastive" not in w.name]
    for work in works:
        args = work.args()
        gpu.both(work.ours, args)
        for _ in range(2):
            print(work.name, "ours: forward %.4f, both %.4f" % gpu.both(work.ours, args), flush=True)
        given = [a.detach().requires_grad_() for a in args]
        g = torch.randn_like(work.ours(*given))
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(10):
                torch.autograd.grad(work.ours(*given), given, g)
            torch.cuda.synchronize()
        for event in sorted(seen.key_averages(), key=lambda e: -e.device_time_total)[:6]:
            print(f"      {event.device_time_total / 1e4:.4f} ms x {event.count / 10:.0f}  {event.key[:60]}")
    work = next(w for w in works if "SwiGLU" in w.name)
    args = work.args()
    for name, peer in work.peers.items():
        print(work.name, name, "forward %.4f, both %.4f" % gpu.both(peer, args), flush=True)
        print(work.name, "ours: forward %.4f, both %.4f" % gpu.both(work.ours, args), flush=True)


if __name__ == "__main__":
    if "tables" in sys.argv:
        tables([a for a in sys.argv[1:] if a in CASES])
        sys.exit()
    if "whole" in sys.argv:
        whole()
        sys.exit()
    for case in [a.replace("_", " ") for a in sys.argv[1:] if not a.startswith("-")]:
        main(case)
