"""The op itself, by turns and by the compiler's schedule, and cuDNN, interleaved."""
import statistics, torch, torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
import monoidreduce as mr
from monoidreduce.engine.triton import staged, use_plan, KernelPlan
from exp_gluon.bench import timed
OLD = {(128, False): KernelPlan(64,64,4,2,0,1), (128, True): KernelPlan(64,64,4,3,0,1), (64, False): KernelPlan(64,64,4,2,0,1), (64, True): KernelPlan(64,64,4,2,0,1)}
with torch.no_grad():
  for B,H,S,D,causal in ((4,16,4096,128,False),(4,16,4096,128,True),(1,16,16384,128,True),(8,16,2048,128,True)):
    q,k,v=(torch.randn(B,H,S,D,device="cuda",dtype=torch.bfloat16) for _ in range(3))
    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION): return F.scaled_dot_product_attention(q,k,v,is_causal=causal)
    def new(): return mr.ops.attention(q,k,v,causal=causal)
    def old():
        with use_plan({"cols": OLD[D,causal]}): return mr.ops.attention(q,k,v,causal=causal)
    def forced():
        with use_plan({"cols": KernelPlan(128,128,4,2,0,2)}): return mr.ops.attention(q,k,v,causal=causal)
    runs={"cudnn":cudnn,"new":new,"old":old,}
    if not causal:
        from exp_gluon.bench import launch, VARIANTS
        flat=[x.flatten(0,1) for x in (q,k,v)]; runs["exp"]=launch(VARIANTS["ws128q"],*flat,torch.empty_like(flat[0]),torch.empty(flat[0].shape[:2],device="cuda"),128**-0.5*1.4426950408889634)
    a,b=cudnn().float(),new().float()
    err=((a-b).norm()/a.norm()).item()
    reps=max(2,int(20*2**34/(B*H*S*S)))
    for r in runs.values(): timed(r,3)
    t={n:[] for n in runs}
    for _ in range(5):
        for n,r in runs.items(): t[n].append(timed(r,reps))
    m={n:statistics.median(x) for n,x in t.items()}
    print(B,H,S,D,"causal" if causal else "full",f"diff {err:.4f}"," ".join(f"{n} {x:.4f} ({x/m['cudnn']:.3f})" for n,x in m.items()),flush=True)
