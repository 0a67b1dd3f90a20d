"""Micro costs on the device machine."""
import time, torch, triton, triton.language as tl
from triton import knobs
def us(f, n=2000, rounds=5):
    best=1e9
    for _ in range(rounds):
        t=time.perf_counter()
        for _ in range(n): f()
        best=min(best,(time.perf_counter()-t)/n*1e6); torch.cuda.synchronize()
    return best
import os
@triton.jit
def k(o,a,b,c,d,s0,s1,s2,s3,s4,s5,s6,s7,s8,n, B: tl.constexpr, P: tl.constexpr):
    at=tl.program_id(0)*B+tl.arange(0,B)
    tl.store(o+at, tl.load(a+at,mask=at<n)+s0, mask=at<n)
dev='cuda'
a,b,c,d,o=(torch.randn(1,2,128,64,device=dev) for _ in range(5))
args=(o,a,b,c,d,64,128,64,128,64,128,64,128,64,16384)
c0=k[(1,)](*args,B=256,P="ieee")
frozen=c0[(1,1,1)]
consts=(256,"ieee")
run,fn,pm=c0.run,c0.function,c0.packed_metadata
stream=torch._C._cuda_getCurrentRawStream
print('jit launch', us(lambda: k[(1,)](*args,B=256,P="ieee")))
print('compiled[grid]', us(lambda: frozen(*args,*consts)))
print('run, hooks None', us(lambda: run(1,1,1,stream(0),fn,pm,None,None,None,*args,*consts)))
ints=tuple(x.data_ptr() if hasattr(x,'data_ptr') else x for x in args)
print('run, ints', us(lambda: run(1,1,1,stream(0),fn,pm,None,None,None,*ints,*consts)))
print('run, data_ptr each call', us(lambda: run(1,1,1,stream(0),fn,pm,None,None,None,o.data_ptr(),a.data_ptr(),b.data_ptr(),c.data_ptr(),d.data_ptr(),64,128,64,128,64,128,64,128,64,16384,*consts)))
L=run.launch
print('run.launch direct', us(lambda: L(1,1,1,stream(0),fn,run.launch_cooperative_grid,run.launch_pdl,None,None,pm,None,None,None,*args,*consts)))
for name,f in {
 'empty':lambda: torch.empty((1,2,128,64),dtype=torch.float32,device=a.device),
 'empty small':lambda: torch.empty((1,2,128),dtype=torch.float32,device=a.device),
 'empty_like':lambda: torch.empty_like(a),
 'new_empty':lambda: a.new_empty((1,2,128)),
 'empty_strided c':lambda: torch._C._dynamo.guards._empty_strided_cuda((1,2,128,64),(16384,8192,64,1),torch.float32),
 'as_strided':lambda: a.as_strided((1,2,128),(256,128,1),0),
 'view dtype+narrow': lambda: a.narrow(2,0,8),
 'select': lambda: a[0],
 'unbind4': lambda: a.view(4,-1).unbind(0),
 'split': lambda: a.view(-1).split_with_sizes((100,100,16184)),
 'view': lambda: a.view(2,128,64),
 'detach': lambda: a.detach(),
 'mul': lambda: torch.mul(a,2.0),
 'mul_': lambda: a.mul_(1.0),
 'add': lambda: a+b,
 'nan_to_num': lambda: torch.nan_to_num(a),
 'sum(-1)': lambda: a.sum(-1),
 'x*y sum': lambda: (a*b).sum(-1),
 'contiguous noop': lambda: a.contiguous(),
 'expand noop': lambda: a.expand(1,2,128,64),
 'current_device': lambda: torch.cuda.current_device(),
 '_cuda_getDevice': lambda: torch._C._cuda_getDevice(),
 'current_stream raw': lambda: stream(0),
 'with device': lambda: torch.cuda.device(0).__enter__(),
 'capturing': lambda: torch.cuda.is_current_stream_capturing(),
 'matmul precision': lambda: torch.backends.cuda.matmul.fp32_precision,
 'environ.get': lambda: os.environ.get('MONOIDREDUCE_ENGINE'),
 'is_autocast_enabled': lambda: torch.is_autocast_enabled('cuda'),
 'shape': lambda: a.shape, 'stride': lambda: a.stride(), 'data_ptr': lambda: a.data_ptr(), 'dtype': lambda: a.dtype, 'device': lambda: a.device,
 'empty_function': lambda: None,
}.items(): print(f'{name:22s} {us(f):.2f}')
r=a.clone().requires_grad_()
class E1(torch.autograd.Function):
    @staticmethod
    def forward(ctx,x,y,z): return o.detach()
    @staticmethod
    def backward(ctx,g): return g,None,None
class E4(torch.autograd.Function):
    @staticmethod
    def forward(ctx,m,x,y,z,s):
        ctx.m=m
        out=(o.detach(),o.detach(),o.detach(),o.detach())
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(out[1])
        ctx.save_for_backward(x,y,z,*out)
        return out
    @staticmethod
    def backward(ctx,*g): 
        t=ctx.saved_tensors
        return None,t[0],t[1],t[2],None
class E1s(torch.autograd.Function):
    @staticmethod
    def forward(ctx,m,x,y,z,s):
        ctx.m=m
        out=o.detach()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x,y,z,out)
        return out
    @staticmethod
    def backward(ctx,*g): 
        t=ctx.saved_tensors
        return None,t[0],t[1],t[2],None
b.requires_grad_(); c.requires_grad_()
print('E1 fwd',us(lambda:E1.apply(r,b,c)), 'fb', us(lambda: torch.autograd.grad(E1.apply(r,b,c),(r,),d)))
print('E1s fwd',us(lambda:E1s.apply(1,r,b,c,.5)), 'fb', us(lambda: torch.autograd.grad(E1s.apply(1,r,b,c,.5),(r,b,c),d)))
print('E4 fwd',us(lambda:E4.apply(1,r,b,c,.5)), 'fb', us(lambda: torch.autograd.grad(E4.apply(1,r,b,c,.5)[0],(r,b,c),d)))
print('clone fb', us(lambda: torch.autograd.grad(r.clone(),(r,),d)))
import torch.nn.functional as F
print('sdpa', us(lambda:F.scaled_dot_product_attention(r,b,c),500),us(lambda: torch.autograd.grad(F.scaled_dot_product_attention(r,b,c),(r,b,c),d),500))
