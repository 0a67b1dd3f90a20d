import torch, time, sys, statistics, gc, math
import monoidreduce as mr
from torch.profiler import profile, ProfilerActivity
from benchmarks import gpu_wide as g
def ms(call, n=5):
    for _ in range(2): call()
    torch.cuda.synchronize(); ts=[]
    for _ in range(n):
        a,b=(torch.cuda.Event(enable_timing=True) for _ in range(2)); a.record(); call(); b.record(); b.synchronize(); ts.append(a.elapsed_time(b))
    return statistics.median(ts)
def prof(name, call):
    call(); torch.cuda.synchronize()
    t=time.time(); call(); h=time.time()-t; torch.cuda.synchronize(); w=time.time()-t
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as p:
        call(); torch.cuda.synchronize()
    print("###", name, f"host {h*1e3:.2f} wall {w*1e3:.2f}")
    tot={}
    for e in p.events():
        if e.device_type == torch.autograd.DeviceType.CUDA:
            k=tot.setdefault(e.name[:70],[0,0]); k[0]+=1; k[1]+=e.device_time if hasattr(e,'device_time') else e.cuda_time
    for k,(n,t) in sorted(tot.items(), key=lambda x:-x[1][1])[:14]: print(f"   {t/1e3:8.3f} ms {n:4d} x {k}", flush=True)
began=time.time()
for (M,D,V) in ((8192,2304,256000),(8192,4096,128256),(32768,512,32768)):
    x=(torch.randn(M,D,device="cuda")/D**.5).bfloat16(); w=torch.randn(V,D,device="cuda").bfloat16()
    dw=torch.zeros(V,D,device="cuda",dtype=torch.bfloat16); dw32=torch.zeros(V,D,device="cuda")
    for R in (512,1024,2048,4096):
        p=torch.randn(R,V,device="cuda",dtype=torch.bfloat16); p32=torch.empty(R,V,device="cuda") if R<=2048 else None
        n=M/R; o=torch.empty(R,D,device="cuda",dtype=torch.bfloat16)
        r=dict(mm=ms(lambda: torch.mm(x[:R],w.mT,out=p))*n, dx=ms(lambda: torch.mm(p,w,out=o))*n, dw0=ms(lambda: torch.mm(p.mT,x[:R],out=dw))*n,
          addmm=ms(lambda: torch.addmm(dw,p.mT,x[:R],out=dw))*n)
        try: r["add32"]=ms(lambda: torch.ops.aten.addmm.dtype_out(dw32,p.mT,x[:R],torch.float32,out=dw32))*n
        except Exception as e: print(str(e)[:100])
        if p32 is not None: r["mm32"]=ms(lambda: torch.ops.aten.mm.dtype_out(x[:R],w.mT,torch.float32,out=p32))*n
        print(M,D,V,"rows",R,{k:round(v,2) for k,v in r.items()}, f"{time.time()-began:.0f}s", flush=True)
        del p,p32
    del x,w,dw,dw32; torch.cuda.empty_cache()
works={w.name:w for w in g._works()}
for name,limit in (("cross-entropy g M8192 D2304 V256000, random","1100MB"),("cross-entropy l M8192 D4096 V128256, random","550MB"),("contrastive N32768 D512","550MB")):
    work=works[name]; args=work.make(); grads=[0,1] if "cross" in name else [0,2]
    with mr.budget(limit):
        call=lambda: g.pull(work.ours,args,grads)
        print(name, limit, ms(call)); prof(name, call)
    del args,call; gc.collect(); torch.cuda.empty_cache()
print(f"{time.time()-began:.0f}s")
