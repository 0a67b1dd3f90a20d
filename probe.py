import torch, time, gc
import monoidreduce as mr
from monoidreduce import Row, Col
from monoidreduce.engine.triton import sweep, KernelPlan, use_plan
from benchmarks import gpu_wide as g
began=time.time()
ms=g.milliseconds
@mr.op
def draw(x: Row["d"], w: Col["d"], seed: int):
    return mr.sample(x @ w, seed)
@mr.op
def lse(x: Row["d"], w: Col["d"]):
    return mr.logsumexp(x @ w)
works={w.name:w for w in g._works()}
def attempt(f):
    try: return f()
    except Exception as e: return f"{type(e).__name__}: {str(e)[:200]}"
for name in ("cross-entropy g M8192 D2304 V256000, peaked","cross-entropy l M8192 D4096 V128256, random"):
    work=works[name]; args=work.make(); x,w,t=args
    truth=g.reference(work,args,[0,1])
    with torch.no_grad():
        print(name, "gemm", round(ms(lambda: x@w.mT),2), flush=True)
        for p in ((128,256,8,3),(128,256,8,4),(128,128,4,4),(128,128,8,3),(256,128,8,3)):
            def f():
                with use_plan({"cols": KernelPlan(*p)}):
                    return [round(ms(lambda: mr.ops.cross_entropy(x,w,t), 3, .2),2), round(ms(lambda: lse(x,w), 3, .2),2), round(ms(lambda: g.top(x,w), 3, .2),2)]
            print("  deep ce lse argmax", p, attempt(f), f"{time.time()-began:.0f}s", flush=True)
        print("  default", attempt(lambda: [ms(lambda: mr.ops.cross_entropy(x,w,t)), g.extra_memory(lambda: mr.ops.cross_entropy(x,w,t))]))
    for b,wp in ((2048,8),(1024,4),(1024,8),(2048,16),(4096,16)):
        sweep.PLANS["cols"]=KernelPlan(1,b,wp,2)
        with mr.budget("1100MB"): print("  1100MB", b, wp, attempt(lambda: ms(lambda: g.pull(work.ours,args,[0,1]))), flush=True)
    sweep.PLANS["cols"]=KernelPlan(1,2048,8,2)
    for limit in ("8MB","64MB","550MB","1100MB"):
        with mr.budget(limit):
            call=lambda: g.pull(work.ours,args,[0,1])
            print("  ", limit, attempt(lambda: [[round(g.relative(a,b),5) for a,b in zip(call(),truth)], g.extra_memory(call), ms(call)]), f"{time.time()-began:.0f}s", flush=True)
    print("  products", ms(work.gemms(args)))
    del args,truth,x,w,t,call; gc.collect(); torch.cuda.empty_cache()
w=g._normal(128256,4096)
for M in (64,1024):
    x=g._normal(M,4096,scale=4096**-.5)
    with torch.no_grad():
        plans=((64,128,4,4),(64,256,8,3),(64,64,4,4),(64,256,4,3)) if M==64 else ((128,256,8,3),(128,128,8,3),(128,64,4,4),(128,128,4,3),(64,128,4,4))
        print("M",M,"gemm",ms(lambda: x@w.mT,3,.1))
        for p in plans:
            def f():
                with use_plan({"cols": KernelPlan(*p)}): return [round(ms(lambda: g.top(x,w),3,.1),3), round(ms(lambda: draw(x,w,7),3,.1),3)]
            print("  argmax sample", p, attempt(f), f"{time.time()-began:.0f}s", flush=True)
        print("  default", attempt(lambda: [ms(lambda: g.top(x,w),3,.1), ms(lambda: draw(x,w,7),3,.1), ms(lambda: g.best50(x,w),3,.1)]))
print(f"{time.time()-began:.0f}s")
