"""Cases for ping-pong GEMM kernels: sizes, labels, NaN and infinities;
run on the simulator by ``tests/interpret`` and on a GPU by ``tests/gpu``."""

import math

import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce.engines.triton import KernelPlan, Rendering

SIZES = [(256, 128, 264), (300, 390, 296), (257, 129, 512)]


def by_turns(splits=1, wide=False):
    return {"cols": KernelPlan(256, 192 if wide else 128, 4, 1, splits, rendering=Rendering.HAND_SCHEDULED)}


@mr.op
def lse(x: mr.Row["d"], y: mr.Col["d"], bias: mr.Col):
    return mr.logsumexp(x @ y * 0.7 + bias)


@mr.op
def head(x: mr.Row["d"], y: mr.Col["d"], label: mr.Row):
    s = x @ y * 2.0
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == label, s, 0.0))


def made(M, N, D, device="cpu", size=1.0):
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(M, D, generator=gen) * (size / math.sqrt(D))
    y, label = torch.randn(N, D, generator=gen), torch.randint(N, (M,), generator=gen)
    return x.bfloat16().to(device), y.bfloat16().to(device), label.to(device)


def check_fold(M, N, D, device="cpu"):
    x, y, _ = made(M, N, D, device, size=3.0)
    bias = torch.randn(N, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    with torch.no_grad():
        got = lse(x, y, bias)
    exact = (x.double() @ y.double().T * 0.7 + bias.double()).logsumexp(1)
    plain = ((x @ y.T).float() * 0.7 + bias.float()).logsumexp(1)
    assert (got - exact).norm() <= 2 * (plain - exact).norm() + 1e-6 * exact.norm()


def check_labels(M, N, D, device="cpu"):
    """What stands at a label is what the total has in it: the loss of a row that is sure of it is nothing, however its
    logit was rounded. Labels that are no column's pick nothing."""
    x, y, label = made(M, N, D, device)
    x += 4 * y[label] / math.sqrt(D)
    label[5], label[M - 1] = -1, N
    with torch.no_grad():
        got = head(x, y, label)
    none = (label < 0) | (label >= N)
    totals = ((x.float() @ y.float().T) * 2.0).logsumexp(1)
    torch.testing.assert_close(got[none], totals[none], rtol=1e-2, atol=0)
    torch.testing.assert_close(got[~none], torch.zeros_like(got[~none]), rtol=0, atol=2e-5)
    assert none.sum() == 2


def check_odd(device="cpu"):
    """Infinity, NaN and logits beyond any exponent stay in their rows; a column of -inf adds nothing."""
    x, y, _ = made(300, 200, 264, device)
    bias = torch.zeros(200, dtype=torch.bfloat16, device=device)
    bias[150] = -math.inf
    x[3], x[130, 0], x[290] = 3000 * x[3], math.nan, 0
    x[200, 1], y[:, 1] = math.inf, y[:, 1].abs() + 1
    with torch.no_grad():
        got = lse(x, y, bias)
    plain = ((x.float() @ y.float().T).bfloat16().float() * 0.7 + bias.float()).logsumexp(1)
    torch.testing.assert_close(got, plain, rtol=2e-2, atol=2e-2, equal_nan=True)
    assert got[130].isnan() and got.isnan().sum() == plain.isnan().sum()


def check_gradients(M, N, D, device="cpu", size=1.0, total=True):
    """At most 2.5 times plain torch's error. (The interpreter, which runs the kernels around, cuts digits.)"""
    x, y, label = made(M, N, D, device, size)
    given = [a.requires_grad_() for a in (x, y)]
    value = head.total(*given, label) if total else head(*given, label).sum()
    got = [value.detach(), *torch.autograd.grad(value, given)]
    found = []
    for kind in (torch.float64, torch.bfloat16):
        own = [a.detach().to(kind).requires_grad_() for a in given]
        logits = (own[0] @ own[1].T).to(torch.promote_types(kind, torch.float32)) * 2.0
        value = F.cross_entropy(logits, label, reduction="sum")
        found.append([value.detach(), *torch.autograd.grad(value, own)])
    for mine, exact, plain in zip(got, *found, strict=True):
        error, other = (torch.linalg.vector_norm(t.double() - exact) for t in (mine, plain))
        assert error <= 2.5 * other + 1e-5 * torch.linalg.vector_norm(exact)
