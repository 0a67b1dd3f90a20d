"""Vectors stored in 8 and 4 bits, with scales of vectors and of blocks, over ranks: as in one process."""

import pytest
import torch

from tests.support import scaled_cases as cases
from tests.support.rank_cases import DIVISIONS

WORLD = 3
MAKE = {"int8": lambda x: cases.store(x, torch.int8), **{n: cases.PACKED[n] for n in list(cases.PACKED)[:3]}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("divided", DIVISIONS, ids="+".join)
@pytest.mark.parametrize("name", MAKE)
def test_ranks(pool, name, divided):
    x, y, z = (torch.randn(n, d, dtype=torch.float64) for n, d in ((10, 32), (14, 32), (14, 6)))
    stored = [MAKE[name](t) for t in (y, z)]
    options = [{"bits": s.bits, "block": s.block or None, "wide": s.wide} for s in stored]
    made = [(s.values.view(torch.uint8), s.values.dtype, s.scale, how) for s, how in zip(stored, options, strict=True)]
    x.requires_grad_()
    k, v = (s.dequantize(torch.float64).requires_grad_() for s in stored)
    value = cases.attention(x, k, v)
    expected = [value.detach(), *torch.autograd.grad((value * value.detach().cos()).sum(), (x, k))]
    answers = pool.run("stored_vectors", WORLD, divided, [x.detach(), y], made)
    for at, (axis, whole) in enumerate(zip(["rows", "rows", "cols"], expected, strict=True)):
        parts = [a[at] for a in answers]
        torch.testing.assert_close(torch.cat(parts) if axis in divided else parts[0], whole)
