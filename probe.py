import gc
import time

import torch
from torch.profiler import ProfilerActivity, profile

import monoidreduce as mr
from benchmarks import gpu_wide as g
from monoidreduce.engine.triton import KernelPlan, sweep


def prof(name, call, top):
    call(); torch.cuda.synchronize()
    t=time.time(); call(); h=time.time()-t; torch.cuda.synchronize(); w=time.time()-t
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as p:
        call(); torch.cuda.synchronize()
    tot={}
    for e in p.events():
        if e.device_type == torch.autograd.DeviceType.CUDA:
            k=tot.setdefault(e.name[:60],[0,0]); k[0]+=1; k[1]+=e.device_time if hasattr(e,'device_time') else e.cuda_time
    rows=sorted(tot.items(), key=lambda x:-x[1][1])
    s=sum(t for k,(n,t) in rows if k.startswith("sweep"))/1e3
    print("###", name, f"host {h*1e3:.2f} wall {w*1e3:.2f} sweep {s:.3f}", flush=True)
    for k,(n,t) in rows[:top]: print(f"   {t/1e3:8.3f} ms {n:4d} x {k}", flush=True)
began=time.time()
works={w.name:w for w in g._works()}
for name,limit in (("cross-entropy g M8192 D2304 V256000, random","1100MB"),("cross-entropy l M8192 D4096 V128256, random","550MB"),("contrastive N32768 D512","550MB")):
    work=works[name]; args=work.make(); grads=[0,1] if "cross" in name else [0,2]
    with mr.budget(limit):
        call=lambda: g.pull(work.ours,args,grads)
        for k,(b,w) in enumerate(((4096,8),(2048,4),(2048,8),(4096,4),(4096,16),(8192,8),(8192,16),(16384,16))):
            sweep.PLANS["cols"]=KernelPlan(1,b,w,2)
            prof(f"{name[:16]} {b} {w}", call, 12 if k==0 else 0)
        sweep.PLANS["cols"]=KernelPlan(1,4096,8,2)
        gemms=work.gemms(args)
        print(name, "products", g.milliseconds(gemms), "ours", g.milliseconds(call), "products", g.milliseconds(gemms), "ours", g.milliseconds(call), flush=True)
    del args,call,gemms; gc.collect(); torch.cuda.empty_cache()
print(f"{time.time()-began:.0f}s")
