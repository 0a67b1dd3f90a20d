import torch, monoidreduce as mr, time
import torch.nn.functional as F
from monoidreduce import ops
torch.manual_seed(0)
def err(a,b): return float((a.double()-b).abs().max()/b.abs().max().clamp(min=1e-9))
def check(name,f,ref,*inp):
    d=[t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in inp]
    yr=ref(*d); c=torch.randn_like(yr); gr=torch.autograd.grad(yr,[t for t in d if t.requires_grad],c)
    for n in range(3):
        y=f(*inp); g=torch.autograd.grad(y,[t for t in inp if t.requires_grad],c.to(y.dtype))
    print(name,inp[0].dtype,'%.1e'%err(y,yr),['%.1e'%err(a,b) for a,b in zip(g,gr)])
for dt in (torch.float32,torch.bfloat16,torch.float16,torch.float64):
    q,k,v=(torch.randn(2,3,111,64,device='cuda',dtype=dt,requires_grad=True) for _ in range(3))
    check('attn',ops.attention,F.scaled_dot_product_attention,q,k,v)
    check('attn T',lambda q,k,v: ops.attention(q.transpose(1,2),k.transpose(1,2),v.transpose(1,2)),lambda q,k,v:F.scaled_dot_product_attention(q.transpose(1,2),k.transpose(1,2),v.transpose(1,2)),q,k,v)
    x=torch.randn(59,64,device='cuda',dtype=dt,requires_grad=True); w=torch.randn(513,64,device='cuda',dtype=dt,requires_grad=True); t=torch.randint(0,513,(59,),device='cuda'); t[5]=-100
    check('ce',lambda x,w: ops.cross_entropy(x,w,t),lambda x,w:F.cross_entropy(x@w.T,t),x,w)
    check('ce ls',lambda x,w: ops.cross_entropy(x,w,t,label_smoothing=.1),lambda x,w:F.cross_entropy(x@w.T,t,label_smoothing=.1),x,w)
