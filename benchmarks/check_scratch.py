import sys, torch, monoidreduce as mr, time
import torch.nn.functional as F
from monoidreduce import ops
from benchmarks import host
torch.manual_seed(0)
def err(a,b): return float((a.detach().double()-b.detach()).abs().max()/b.detach().abs().max().clamp(min=1e-9))
def check(name,f,ref,*inp):
    d=[t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in inp]
    yr=ref(*d); c=torch.randn_like(yr); gr=torch.autograd.grad(yr,[t for t in d if t.requires_grad],c)
    for n in range(3):
        y=f(*inp); g=torch.autograd.grad(y,[t for t in inp if t.requires_grad],c.to(y.dtype))
    print(name,str(inp[0].dtype)[6:],'%.1e'%err(y,yr),['%.1e'%err(a,b) for a,b in zip(g,gr)],flush=True)
for dt in (torch.float32,torch.bfloat16):
    for m in (111,128):
        q,k,v=(torch.randn(2,3,m,64,device='cuda',dtype=dt,requires_grad=True) for _ in range(3))
        check(f'attn {m}',ops.attention,F.scaled_dot_product_attention,q,k,v)
    x=torch.randn(64,64,device='cuda',dtype=dt,requires_grad=True); w=torch.randn(513,64,device='cuda',dtype=dt,requires_grad=True); t=torch.randint(0,513,(64,),device='cuda'); t[5]=-100
    check('ce',lambda x,w: ops.cross_entropy(x,w,t),lambda x,w:F.cross_entropy(x@w.T,t),x,w)
    if dt is torch.float32: check('ce sum',lambda x,w: ops.cross_entropy(x,w,t,reduction='sum'),lambda x,w:F.cross_entropy(x@w.T,t,reduction='sum'),x,w)
y=ops.attention(q,k,v); c=torch.randn_like(y)
s=torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(s):
    for _ in range(3): torch.autograd.grad(ops.attention(q,k,v),(q,k,v),c)
torch.cuda.current_stream().wait_stream(s)
g=torch.cuda.CUDAGraph()
with torch.cuda.graph(g): out=torch.autograd.grad(ops.attention(q,k,v),(q,k,v),c)
with torch.no_grad(): q.copy_(torch.randn_like(q))
g.replay(); torch.cuda.synchronize()
want=torch.autograd.grad(ops.attention(q,k,v),(q,k,v),c)
print('graph',[float((a-b).abs().max()) for a,b in zip(out,want)])
a=[torch.randn(1,5,16,device='cuda',dtype=torch.float64,requires_grad=True) for _ in range(3)]
for _ in range(2): ops.attention(*a)
print('gradgrad',torch.autograd.gradgradcheck(ops.attention,a,fast_mode=True))
for dt in (torch.float32,torch.bfloat16):
    for name,inp,ours,theirs in host.cases('cuda',dt):
        for w,f in (('ours',ours),('torch',theirs)):
            y=f(*inp); c=torch.ones_like(y)
            for _ in range(5): torch.autograd.grad(f(*inp),inp,c)
            ev=[torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda._sleep(40_000_000); ev[0].record()
            for _ in range(30): torch.autograd.grad(f(*inp),inp,c)
            ev[1].record(); torch.cuda.synchronize()
            print(name,dt,w,'GPU us per f+b %.0f'%(ev[0].elapsed_time(ev[1])/30*1e3),'host f %.0f fb %.0f'%host.both(f,inp,40),flush=True)
print(host.table('cuda',40))
for name,inp,ours,_ in host.cases('cuda'):
    host.profile(ours,inp,60)
