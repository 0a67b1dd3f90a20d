"""Gradients of reductions that choose pairs, on a GPU: right, bitwise equal in every run, and without a pass."""

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import monoidreduce as mr
from monoidreduce import Col, Row


@mr.op
def largest(x: Row["d"], y: Col["d"]):
    return mr.max(x @ y)


@mr.op
def nearest(x: Row["d"], y: Col["d"]):
    return mr.min(mr.sqdist(x, y))


@mr.op
def best(x: Row["d"], y: Col["d"]):
    return mr.topk(torch.tanh(x @ y), 5).values


DENSE = {
    largest: lambda x, y: (x @ y.mT).max(-1).values,
    nearest: lambda x, y: (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1).min(-1).values,
    best: lambda x, y: torch.tanh(x @ y.mT).topk(5, dim=-1).values,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", DENSE, ids=["largest", "nearest", "best"])
def test_gradients_of_chosen_pairs(op, dtype):
    torch.manual_seed(0)
    x, y = (torch.randn(2, n, 72, device="cuda").mul(0.3).to(dtype) for n in (1111, 700))
    y[:, 3] *= 4.0  # chosen by many rows

    def run(fn, *given):
        leaves = [t.detach().clone().requires_grad_() for t in given]
        value = fn(*leaves)
        g = torch.linspace(0.5, 1.5, value.numel(), device="cuda").view(value.shape).to(value.dtype)
        return torch.autograd.grad(value, leaves, g)

    with mr.use(engine="triton", strict=True):
        ours, again = run(op, x, y), run(op, x, y)
    exact = run(DENSE[op], x.double(), y.double())
    for a, b, e in zip(ours, again, exact, strict=True):
        assert torch.equal(a, b)
        assert (a.double() - e).norm() <= (1e-2 if dtype is torch.bfloat16 else 1e-4) * e.norm()
