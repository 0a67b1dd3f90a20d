"""Masks and integers given per pair are read by kernels; floating-point numbers, which may have a gradient for every
pair, are left to tiles in torch."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import ops

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "error::monoidreduce.errors.FallbackWarning")


@pytest.mark.parametrize("form", ["of a batch element", "for all", "transposed", "one column for all"])
def test_masks(form):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 16, generator=draw, dtype=torch.float64).requires_grad_() for n in (37, 45, 45))
    hidden = {
        "of a batch element": lambda: torch.rand(2, 1, 37, 45, generator=draw) < 0.3,
        "for all": lambda: torch.rand(37, 45, generator=draw) < 0.3,
        "transposed": lambda: (torch.rand(3, 45, 37, generator=draw) < 0.3).mT,
        "one column for all": lambda: torch.rand(3, 37, 1, generator=draw) < 0.3,
    }[form]()
    found = []
    for engine in ("reference", "triton"):
        with mr.use(engine=engine):
            y = ops.attention(q, k, v, ~hidden)
            found.append([y.detach(), *torch.autograd.grad(y.sin().sum(), (q, k, v))])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
