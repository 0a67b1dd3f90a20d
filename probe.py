import torch, time, gc
import monoidreduce as mr
from monoidreduce import Row, Col
from monoidreduce.engine.triton import KernelPlan, use_plan
from benchmarks import gpu_wide as g
began=time.time()
ms=lambda f, s=.15: round(g.milliseconds(f, 3, s),3)
stamp=lambda: f"{time.time()-began:.0f}s"
def attempt(f):
    try: return f()
    except Exception as e: return f"{type(e).__name__}: {str(e)[:200]}"
works={w.name:w for w in g._works()}
# small M first
w=g._normal(128256,4096)
for M in (64,1024):
    x=g._normal(M,4096,scale=4096**-.5)
    with torch.no_grad():
        print("M",M,"gemm",ms(lambda: x@w.mT), "argmax", attempt(lambda: ms(lambda: g.top(x,w))), "agree", attempt(lambda: float((g.top(x,w)==(x.float()@w.float().mT).argmax(-1)).float().mean())), "sample", attempt(lambda: ms(lambda: g.draw(x,w,7))), stamp(), flush=True)
        for p in ((64,256,8,4),(64,64,4,6)) if M==64 else ():
            def f():
                with use_plan({"cols": KernelPlan(*p)}): return ms(lambda: g.top(x,w))
            print("  argmax", p, attempt(f), stamp(), flush=True)
del w,x
for name in ("cross-entropy g M8192 D2304 V256000, peaked","cross-entropy l M8192 D4096 V128256, random"):
    work=works[name]; args=work.make(); x,w,t=args
    truth=g.reference(work,args,[0,1])
    with torch.no_grad():
        print(name, "gemm", ms(lambda: x@w.mT,.3), "forward", attempt(lambda: ms(lambda: mr.ops.cross_entropy(x,w,t),.3)), "argmax", attempt(lambda: ms(lambda: g.top(x,w),.3)), stamp(), flush=True)
    for limit in ("8MB","64MB","550MB","1100MB"):
        with mr.budget(limit):
            call=lambda: g.pull(work.ours,args,[0,1])
            print("  ", limit, attempt(lambda: [[round(g.relative(a,b),5) for a,b in zip(call(),truth)], g.extra_memory(call), ms(call,.5)]), stamp(), flush=True)
    print("  products", ms(work.gemms(args),.5), flush=True)
    del args,truth,x,w,t,call; gc.collect(); torch.cuda.empty_cache()
work=works["contrastive N32768 D512"]; args=work.make()
for limit in ("64MB","550MB"):
    with mr.budget(limit):
        call=lambda: g.pull(work.ours,args,[0,2])
        print("contrastive", limit, attempt(lambda: [g.extra_memory(call), ms(call,.4)]), stamp(), flush=True)
print("  products", ms(work.gemms(args),.5), stamp(), flush=True)
