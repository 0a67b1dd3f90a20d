"""A top-k of many columns, what is gathered at its winners and their mean, with a dense form of each: for all engines,
ranks and streams."""

import math

import torch

import monoidreduce as mr

K = 70


@mr.op
def winners(x: mr.Row["d"], y: mr.Col["d"], c: mr.Col, label: mr.Col):
    """Lists over columns and over rows, gathered numbers, labels and pairs, means of vectors and numbers."""
    s = x @ y
    best = mr.topk(s, K)
    gathered = best.gather(c), best.gather(label), best.gather(c > 0), best.gather(torch.tanh(s) * c)
    means = mr.topk_mean(s, y, K), mr.topk_mean(s, c, K)
    least = mr.topk(s, K, largest=False, over="rows")
    return best.values, best.indices, *gathered, *means, least.values, least.gather(x[0])


AXES = ["rows"] * 8 + ["cols"] * 2  # which axis a result of the op has


def dense(x, y, c, label, both=True):
    """The op's results; without ``both``, those per row alone."""
    s = x @ y.mT
    values, at = s.sort(dim=-1, descending=True, stable=True)
    values, at = values[..., :K], at[..., :K]
    weight = torch.softmax(values, -1)
    there = (torch.tanh(s) * c).gather(-1, at)
    means = (weight.unsqueeze(-1) * y[at]).sum(-2), (weight * c[at]).sum(-1)
    found = [values, at, c[at], label[at], c[at] > 0, there, *means]
    if not both:
        return found
    least, rows = s.mT.sort(dim=-1, stable=True)
    return [*found, least[..., :K], x[:, 0][rows[..., :K]]]


def arguments():
    gen = torch.Generator().manual_seed(2)
    make = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64)
    return make(75, 3), make(200, 3), make(200), torch.arange(200) * 10 - 2**45


def derive(op, args):
    """Results, and the gradients of a function of those that have some."""
    given = [a.clone().requires_grad_(a.is_floating_point()) for a in args]
    found = op(*given)
    total = sum((t * t.detach().cos()).sum() for t in found if t.is_floating_point())
    return [t.detach() for t in found], list(torch.autograd.grad(total, given[:3]))


def sort_rows(x, k, largest=True):
    """The definition of a top-k: a stable sort, no place where there is nothing."""
    found = x.sort(dim=-1, descending=largest, stable=True)
    values, places = found.values[..., :k], found.indices[..., :k]
    nothing = (values == (-math.inf if largest else math.inf)) & values.is_floating_point()
    return values, places.masked_fill(nothing, -1)
