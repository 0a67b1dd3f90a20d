"""Variances in kernels: a thread's own columns, merged. Far from zero, of unlike tiles, of few columns."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row


@mr.op
def moments(x: Row["d"], y: Col["d"], b: Col):
    s = x @ y + b
    return mr.var(s, correction=0), mr.mean(s)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows, cols", [(70, 200), (3, 64), (5, 1), (2, 129)])
@pytest.mark.parametrize("dtype, most", [(torch.float64, 1e-12), (torch.float32, 3e-5)])
def test_columns_far_from_zero_that_rise(rows, cols, dtype, most):
    gen = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, 4, generator=gen, dtype=dtype) for n in (rows, cols))
    b = 1000.0 + torch.arange(cols, dtype=dtype) / 8  # the first tile's mean is nobody else's
    with mr.use(engine="triton"):
        found, mean = moments(x, y, b)
    exact = x.double() @ y.double().mT + b.double()
    torch.testing.assert_close(found.double(), exact.var(-1, correction=0), rtol=most, atol=most)
    torch.testing.assert_close(mean.double(), exact.mean(-1), rtol=most, atol=0.0)


def test_no_columns_have_no_mean():
    with mr.use(engine="triton"):
        found, mean = moments(torch.zeros(3, 4), torch.zeros(0, 4), torch.zeros(0))
    assert found.isnan().all() and mean.isnan().all()
