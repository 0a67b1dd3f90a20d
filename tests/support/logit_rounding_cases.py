"""Cases for logits that are not rounded to 16 bits: heads whose rows are confident of their label."""

import math

import torch
import torch.nn.functional as F

import monoidreduce as mr


@mr.op
def head(x: mr.Row["d"], w: mr.Col["d"], target: mr.Row):
    s = x @ w
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == target, s, 0.0))


def made(M, N, D, device="cpu"):
    """Vectors and labels whose mean probability is about 0.6: logits are so large that 16 bits miss them by a few
    hundredths, and weights by as much."""
    gen = torch.Generator().manual_seed(0)
    w, target = torch.randn(N, D, generator=gen).bfloat16(), torch.randint(N, (M,), generator=gen)
    x = torch.randn(M, D, generator=gen) / math.sqrt(D)
    x += w[target].float() * ((math.log(N) + 0.9 + 3 * torch.randn(M, 1, generator=gen)) / D)
    return x.bfloat16().to(device), w.to(device), target.to(device)


def shares(target):
    """The rows' own cotangents: nothing of a gradient is known in the forward."""
    return torch.linspace(0.5, 1.5, len(target), device=target.device)


def plain(x, w, target):
    logits = (x @ w.mT).to(torch.promote_types(x.dtype, torch.float32))
    return (F.cross_entropy(logits, target, reduction="none") * shares(target)).sum()


def ours(x, w, target):
    return (head(x, w, target) * shares(target)).sum()


def pulled(loss, x, w, target):
    given = [a.detach().requires_grad_() for a in (x, w)]
    value = loss(*given, target)
    return [value.detach(), *torch.autograd.grad(value, given)]


def twice(loss, x, w, target):
    """Derivatives of gradients, along the vectors themselves."""
    given = [a.detach().requires_grad_() for a in (x, w)]
    grads = torch.autograd.grad(loss(*given, target), given, create_graph=True)
    along = sum((g * a.detach()).sum() for g, a in zip(grads, given, strict=True))
    return torch.autograd.grad(along, given)


def compare(found, truth, naive, factor=2.0):
    """At most so many times plain torch's error."""
    for own, exact, theirs in zip(found, truth, naive, strict=True):
        error, other = (torch.linalg.vector_norm(t.double() - exact) for t in (own, theirs))
        assert error <= factor * other + 1e-6 * torch.linalg.vector_norm(exact), (float(error), float(other))
