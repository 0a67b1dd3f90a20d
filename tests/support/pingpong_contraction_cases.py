"""Cases for ping-pong contraction kernels: sizes, and sums that are added to;
run on the simulator by ``tests/interpret`` and on a GPU by ``tests/gpu``."""

import itertools

import torch

from monoidreduce.engines.triton.panel import accumulators

SIZES = [(256, 512, 128), (300, 616, 264), (700, 520, 392), (130, 1030, 192)]  # kept, folded, features
KINDS = list(itertools.product(("cols", "rows"), (False, True)))  # over, and whether sums are added to


def made(L, N, D, over, device="cpu", narrow=torch.bfloat16):
    """A total, weights that are part of a wider panel, and vectors."""
    gen = torch.Generator().manual_seed(0)
    shape = (L, -(-N // 8) * 8) if over == "cols" else (N, -(-L // 8) * 8)
    panel = torch.randn(shape, generator=gen).to(narrow).to(device)
    weights = panel[:, :N] if over == "cols" else panel[:, :L].mT
    vectors = torch.randn(N, D, generator=gen).to(narrow).to(device)
    return torch.randn(L, D, generator=gen).to(narrow).to(device), weights, vectors


def check(L, N, D, over, add, device="cpu", narrow=torch.bfloat16):
    """At most 2.5 times the error of torch, which rounds a float32 sum once. (The interpreter cuts digits.)"""
    out, weights, vectors = made(L, N, D, over, device, narrow)
    begin = out.clone() if add else torch.zeros_like(out)
    exact, plain = (torch.addmm(begin.to(t), weights.to(t), vectors.to(t)) for t in (torch.float64, torch.float32))
    out = out if add else torch.full_like(out, torch.nan)
    accumulators.PreparedContraction(out, weights, vectors, add)(out, weights, vectors)
    error, other = ((t.double() - exact).norm() for t in (out, plain.to(narrow)))
    assert error <= 2.5 * other, (error / exact.norm(), other / exact.norm())
    return out
