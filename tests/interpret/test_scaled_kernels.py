"""Vectors stored in 8 bits with scales, in kernels, beside the same layers on plain tensors."""

import warnings

import pytest
import torch

import monoidreduce as mr
from tests.support import scaled_cases as cases
from tests.support.scaled_cases import KINDS, widen

OPS = [cases.attention, cases.head, cases.mlp, cases.near]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("op", "width"),
    [*((op, width) for op in OPS for width in (5, 24)), (cases.head, 300)],
    ids=lambda p: p.function.__name__ if isinstance(p, mr.Op) else str(p),
)
def test_kernels_equal_plain_tensors(op, width, seed):
    torch.manual_seed(seed)
    for kind, scales in zip(KINDS, ("vector", "batch", "number"), strict=True):
        x, *rest = cases.problem(op, kind, scales, width=width, rows=20, cols=37)
        x.requires_grad_()
        exact = op(x, *widen(rest, torch.float64))
        wanted = torch.autograd.grad(exact.square().sum(), x)[0]
        with mr.use(engine="triton"), warnings.catch_warnings():
            warnings.simplefilter("error")  # a fold without a kernel would warn
            found = op(x, *rest)
            gradient = torch.autograd.grad(found.square().sum(), x)[0]
        torch.testing.assert_close(found, exact)
        torch.testing.assert_close(gradient, wanted)
