"""Compile variants for a Hopper that is not here: registers, spills, shared memory, waits."""
import re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from exp_gluon import kernels
from exp_gluon.variants import VARIANTS

def layout(shape):
    return repr(gl.NVMMASharedLayout.get_default_for(list(shape), gl.bfloat16))

def build(name):
    v = VARIANTS[name]
    fn = getattr(kernels, v["kernel"])
    D = v.get("D", 128)
    bm, bn = v["rows"], v["BN"]
    desc = lambda r: f"tensordesc<bf16[{r}, {D}],{layout((r, D))}>"
    sig = dict(q_desc=desc(bm), k_desc=desc(bn), v_desc=desc(bn), o_desc=desc(bm), lse_ptr="*fp32", M="i32", N="i32", scale="fp32", tiles="i32")
    consts = dict(v["consts"])
    if "num_warps" in fn.arg_names: consts["num_warps"] = v["warps"]
    sig |= {k: "constexpr" for k in consts}
    attrs = {(i,): [["tt.divisibility", 16]] for i, k in enumerate(sig) if k in ("lse_ptr", "M", "N")}
    src = GluonASTSource(fn, {k: sig[k] for k in fn.arg_names}, {(fn.arg_names.index(k),): x for k, x in consts.items()}, attrs)
    opts = dict(num_warps=v["warps"])
    if v.get("maxnreg"): opts["maxnreg"] = v["maxnreg"]
    return triton.compile(src, target=GPUTarget("cuda", 90, 32), options=opts)

if __name__ == "__main__":
    for name in sys.argv[1:] or VARIANTS:
        c = build(name)
        ptx = c.asm["ptx"]
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as f:
            f.write(ptx); f.flush()
            said = subprocess.run([get_ptxas(90).path, "-v", "--gpu-name=sm_90a", f.name, "-o", "/tmp/gluon-scratch/out.cubin"], capture_output=True, text=True)
        open(f"/tmp/gluon-scratch/{name}.ptx", "w").write(ptx)
        open(f"/tmp/gluon-scratch/{name}.ttgir", "w").write(c.asm["ttgir"])
        err = said.stderr
        print(name, "regs", re.findall(r"Used (\d+) registers", err), "spill", re.findall(r"(\d+) bytes spill stores", err), "shared", c.metadata.shared,
              "wgmma", ptx.count("wgmma.mma_async"), "waits", re.findall(r"wgmma.wait_group.sync.aligned (\d)", ptx), "setmax", re.findall(r"setmaxnreg\.\w+\.\w+\.\w+\.\w+ (\d+)", ptx), "bars", ptx.count("bar.sync") + ptx.count("barrier.sync"), flush=True)
        for line in err.splitlines():
            if "warn" in line.lower() or "erialize" in line or "error" in line: print("   ", line[:200])
