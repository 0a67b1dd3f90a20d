"""A throw-away probe."""
from __future__ import annotations

import gc
import subprocess
import sys
import time

import torch

import monoidreduce as mr
from benchmarks import gpu_wide
from monoidreduce.engine import hardware
from monoidreduce.engine.triton import KernelPlan, epilogue, sweep

CASES = {"g": (8192, 2304, 256000), "l": (8192, 4096, 128256), "c": (32768, 512, 32768), "C": (65536, 768, 65536)}
VARIANTS = {"A": KernelPlan(128, 256, 8, 3), "B": KernelPlan(128, 256, 8, 4), "D": KernelPlan(128, 128, 4, 3), "E": KernelPlan(128, 128, 8, 3)}

def data(name, peaked=False, small=False):
    M, D, V = CASES[name]
    if small:
        M, V = 512, 4096
    if name in "gl":
        x, w, t = gpu_wide._head(M, D, V, peaked)()
        return (x, w), lambda x, w: mr.ops.cross_entropy(x, w, t), lambda x, w: gpu_wide._cross_entropy(x, w, t), t
    M = V if not small else 4096
    torch.manual_seed(0)
    F = torch.nn.functional
    x, y = (F.normalize(torch.randn(M, D, device="cuda"), dim=-1) for _ in range(2))
    y = F.normalize(y + 0.5 * x, dim=-1)
    t = torch.arange(M, device="cuda")
    return ((x * 14).bfloat16(), y.bfloat16()), lambda x, y: gpu_wide.own_index.total(x, y) / len(x), None, t

def reference(args, t, block=2048):
    x, w = (a.float() for a in args)
    M = len(x)
    loss, dx, dw = torch.zeros((), device="cuda"), torch.empty_like(x), torch.zeros_like(w)
    for at in range(0, M, block):
        r = slice(at, at + block)
        s = x[r] @ w.mT
        lse = s.logsumexp(1)
        loss += (lse - s.gather(1, t[r, None])[:, 0]).sum() / M
        p = torch.exp_(s.sub_(lse[:, None]))
        p[torch.arange(len(p), device="cuda"), t[r]] -= 1
        p /= M
        dx[r] = p @ w
        dw.addmm_(p.mT, x[r])
        del s, p
    return [loss, dx, dw]

def on(fused):
    epilogue.on = lambda device: fused

def run(loss, args, limit):
    given = [a.detach().requires_grad_() for a in args]
    with mr.budget(limit):
        v = loss(*given)
    return [v.detach(), *torch.autograd.grad(v, given)]

marks = []
def mark(label, f, *a, **k):
    s, t = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    s.record(); out = f(*a, **k); t.record(); marks.append((label, s, t))
    return out

def watched():
    pi, ci, ca, fo = hardware.panel_into, hardware.contract_into, sweep.Prepared.__call__, None
    hardware.panel_into = lambda *a: mark("product", pi, *a)
    hardware.contract_into = lambda o, w, v, add: mark("rows" if w.stride(-1) == 1 else "cols", ci, o, w, v, add)
    sweep.Prepared.__call__ = lambda self, *a, **k: mark(self.kernel.name, ca, self, *a, **k)
    def undo():
        hardware.panel_into, hardware.contract_into, sweep.Prepared.__call__ = pi, ci, ca
    return undo

def compile_one(name):
    for fused in (True, False):
        on(fused)
        args, loss, _, _ = data(name, small=True)
        run(loss, args, "100MB"); run(loss, args, "600KB")

def times(calls, reps=5):
    found = {n: [] for n in calls}
    for n, c in calls.items():
        c()
    for _ in range(reps):
        for n, c in calls.items():
            s, t = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            s.record(); c(); t.record(); t.synchronize()
            found[n].append(s.elapsed_time(t))
    return {n: round(sorted(v)[len(v) // 2], 2) for n, v in found.items()}

def synced(call, reps=5):
    for _ in range(2): call()
    torch.cuda.synchronize()
    found, hosts = [], []
    for _ in range(reps):
        s, t = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        s.record(); b = time.perf_counter(); call(); hosts.append(time.perf_counter() - b); t.record(); t.synchronize()
        found.append(s.elapsed_time(t))
    return round(sorted(found)[reps // 2], 2), round(1e3 * sorted(hosts)[reps // 2], 2)

def main():
    began = time.time()
    jobs = [subprocess.Popen([sys.executable, "-m", "benchmarks._probe_wide", "compile", n]) for n in CASES]
    for j in jobs: j.wait()
    print("compiled", round(time.time() - began, 1), flush=True)
    torch.manual_seed(0)
    x, w = torch.randn(600, 512, device="cuda").bfloat16(), torch.randn(3000, 512, device="cuda").bfloat16()
    t = torch.randint(3000, (600,), device="cuda"); t[:100] = 7
    for label, a in (("plain", (x / 20, w)), ("late", (x, torch.cat([w[:500] * 0.01, w[500:] * 3])))):
        truth = reference(a, t)
        on(True)
        got = run(lambda x, w: mr.ops.cross_entropy(x, w, t), a, "100MB")
        print("repair", label, [round(gpu_wide.relative(g, r), 5) for g, r in zip(got, truth)], flush=True)
    for name in ("c", "g", "C", "l"):
        args, loss, plain, t = data(name, name == "l")
        x, w = args
        truth = reference(args, t) if name in "cg" or time.time() - began < 19 else None
        def three():
            s = x @ w.mT; s @ w; s.mT @ x
        print(name, "three", synced(three, 4)[0], flush=True)
        for limit in ("550MB", "1100MB", "8MB" if name in "gl" else "64MB"):
            if time.time() - began > 23: break
            row = {}
            for fused in (True, False):
                if limit == "64MB" and not fused: continue
                on(fused)
                row["fused" if fused else "swept"] = synced(lambda: run(loss, args, limit), 3)
            on(True)
            got = run(loss, args, limit) if truth else []
            row["errors"] = [round(gpu_wide.relative(g, r), 5) for g, r in zip(got, truth or [])]
            del got
            if limit == "550MB":
                undo = watched(); marks.clear(); run(loss, args, limit); torch.cuda.synchronize(); undo()
                parts = {}
                for n, a, z in marks: parts.setdefault(n, []).append(a.elapsed_time(z))
                row["parts"] = {n: (len(v), round(sum(v), 2)) for n, v in parts.items()}
                row["MB"] = round(gpu_wide.extra_memory(lambda: tuple(run(loss, args, limit))), 1)
            print("  ", name, limit, row, flush=True)
        del args, loss, plain, t, x, w, truth; gc.collect(); torch.cuda.empty_cache()
        print("at", round(time.time() - began, 1), flush=True)

if __name__ == "__main__":
    compile_one(sys.argv[2]) if sys.argv[1:2] == ["compile"] else main()
