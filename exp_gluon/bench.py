"""Check and time the variants against cuDNN and the generated kernel."""
import os, statistics, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
import torch, triton
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from exp_gluon import kernels
from exp_gluon.variants import VARIANTS

def launch(v, q, k, v_, o, lse, scale):
    B, M, D = q.shape
    N = k.shape[1]
    fn = getattr(kernels, v["kernel"])
    def desc(t, rows):
        lay = gl.NVMMASharedLayout.get_default_for([rows, D], gl.bfloat16)
        return TensorDescriptor.from_tensor(t.view(-1, D), [rows, D], lay)
    tiles = M // v["tile"]
    args = (desc(q, v["rows"]), desc(k, v["BN"]), desc(v_, v["BN"]), desc(o, v["rows"]), lse, M, N, scale, tiles)
    opts = dict(num_warps=v["warps"])
    if v.get("maxnreg"): opts["maxnreg"] = v["maxnreg"]
    grid = (B * tiles,)
    if v.get("persistent"): grid = (min(132 * v["persistent"], B * tiles),)
    def run():
        fn[grid](*args, **v["consts"], **opts, **v.get("extra", {}))
    return run

def data(S, BH, D, peak=1.0, seed=0):
    g = torch.Generator(device="cuda").manual_seed(seed)
    q, k, v = (torch.randn(BH, S, D, device="cuda", dtype=torch.bfloat16, generator=g) for _ in range(3))
    return q * peak, k, v

def compile_one(name):
    v = VARIANTS[name]
    M = 384
    M = M if M % v["tile"] == 0 else 512
    q, k, w = data(512, 2, 128)
    q = q[:, :M].contiguous()
    o = torch.empty_like(q); lse = torch.empty(q.shape[:2], device="cuda")
    run = launch(v, q, k, w, o, lse, 128**-0.5 * 1.4426950408889634)
    run(); torch.cuda.synchronize()

def check(name, causal):
    v = VARIANTS[name]
    worst = []
    for peak, seed in ((1.0, 0), (6.0, 1)):
        M = 1152 if v["tile"] == 192 else 1024
        q, k, w = data(2048 if not v.get("square") else M, 3, 128, peak, seed)
        q = q[:, :M].contiguous()
        o = torch.full_like(q, float("nan")); lse = torch.full(q.shape[:2], float("nan"), device="cuda")
        launch(v, q, k, w, o, lse, 128**-0.5 * 1.4426950408889634)()
        s = q.double() @ k.double().mT * 128**-0.5
        if v.get("causal"): s = s.masked_fill(~torch.ones_like(s, dtype=torch.bool).tril(), -float("inf"))
        want = s.softmax(-1) @ w.double()
        plain = F.scaled_dot_product_attention(q[None], k[None], w[None], is_causal=bool(v.get("causal")))[0]
        err = ((o.double() - want).norm() / want.norm()).item()
        ref = ((plain.double() - want).norm() / want.norm()).item()
        el = (lse.double() - s.logsumexp(-1)).abs().max().item()
        worst.append(f"{err:.4f}/{ref:.4f} lse {el:.1e}")
        ok = err < 1.5 * ref and el < 1e-2
        if not ok: worst.append("WRONG")
    return " ".join(worst)

def timed(fn, reps):
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(reps): fn()
    b.record(); torch.cuda.synchronize()
    return a.elapsed_time(b) / reps

if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] == "compile":
        compile_one(sys.argv[2]); sys.exit()
    causal = "causal" in sys.argv
    names = [a for a in sys.argv[1:] if a in VARIANTS] or list(VARIANTS)
    t0 = time.time()
    def go(n):
        try: return go_(n)
        except subprocess.TimeoutExpired: return n, 1, "timeout"
    def go_(n):
        p = subprocess.run([sys.executable, "-m", "exp_gluon.bench", "compile", n], capture_output=True, text=True, timeout=45)
        return n, p.returncode, p.stderr[-600:]
    with ThreadPoolExecutor(12) as pool:
        done = list(pool.map(go, names))
    print("compiled in", round(time.time() - t0, 1), "s")
    good = []
    for n, rc, err in done:
        if rc: print(n, "FAILED", err); continue
        said = check(n, causal)
        print(f"{n:18} {said}", flush=True)
        good.append(n)
    for BH, S in ((64, 4096), (16, 16384)):
        q, k, w = data(S, BH, 128)
        o = torch.empty_like(q); lse = torch.empty(q.shape[:2], device="cuda")
        runs = {n: launch(VARIANTS[n], q, k, w, o, lse, 128**-0.5 * 1.4426950408889634) for n in good if S % VARIANTS[n]["tile"] == 0}
        import monoidreduce as mr
        def cudnn():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION): return F.scaled_dot_product_attention(q[None], k[None], w[None], is_causal=causal)
        runs["cudnn"] = cudnn
        runs["ours"] = lambda: mr.ops.attention(q, k, w, causal=causal)
        with torch.no_grad():
            reps = 20 if S == 4096 else 6
            for r in runs.values(): timed(r, 3)
            times = {n: [] for n in runs}
            for _ in range(7):
                for n, r in runs.items(): times[n].append(timed(r, reps))
        c = statistics.median(times["cudnn"])
        print(f"BH{BH} S{S}")
        for n, t in sorted(times.items(), key=lambda x: statistics.median(x[1])):
            m = statistics.median(t)
            print(f"  {n:18} {m:.4f} ms  min {min(t):.4f}  /cudnn {m / c:.3f}  {(2 if causal else 4) * BH * S * S * 128 / m / 1e9:.0f} TF", flush=True)
