"""Vectors stored in 8 and 4 bits on a GPU, beside float64 on the same numbers."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import ops
from tests.support import scaled_cases as cases
from tests.support.scaled_cases import KINDS, store, widen

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _rms(x):
    return x.double().square().mean().sqrt()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1.0, 6.0])
def test_fp8_attention_adds_no_more_than_storing(causal, size):
    plain = [torch.randn(2, 4, 1500, 128, device="cuda") for _ in range(3)]
    plain[0] *= size
    stored = [store(t, torch.float8_e4m3fn, "number") for t in plain]
    exact = ops.attention(*(t.double() for t in plain), causal=causal)
    quantised = ops.attention(*widen(stored, torch.float64), causal=causal)
    found = ops.attention(*stored, causal=causal)
    assert _rms(found.double() - quantised) <= _rms(quantised - exact)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: str(k)[6:])
def test_neighbours_and_products_of_both_sides(kind):
    x, y = store(torch.randn(300, 128, device="cuda"), kind), store(torch.randn(5000, 128, device="cuda"), kind)
    wide = widen((x, y), torch.float64)
    for op in (cases.near, cases.best):
        torch.testing.assert_close(op(x, y).double(), op(*wide), rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("name", [*cases.PACKED, *map(str, KINDS)])
def test_caches(name):
    make = cases.PACKED.get(name) or (lambda x: store(x, next(k for k in KINDS if str(k) == name)))
    q = torch.randn(2, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (make(torch.randn(2, 2, 700, 128, device="cuda")) for _ in range(2))
    lengths = torch.tensor([700, 333], device="cuda")
    exact = ops.attention_decode(q.double(), *widen((k, v), torch.float64), lengths)
    found = ops.attention_decode(q, k, v, lengths)
    assert found.dtype is torch.bfloat16
    assert _rms(found.double() - exact) <= 0.02 * _rms(exact)


def test_all_numbers_of_8_bits_are_widened_exactly():
    every = torch.arange(-128, 128, device="cuda").to(torch.int8)
    for kind in KINDS:
        values = every if kind is torch.int8 else every.view(kind)
        values = torch.where(values.float().isfinite(), values.view(torch.int8), torch.zeros_like(every)).view(kind)
        ones = torch.eye(16, device="cuda", dtype=torch.bfloat16)
        found = transposed(ones, mr.scaled(values.view(16, 16), 1.0), ones)
        torch.testing.assert_close(found.float(), values.view(16, 16).float().T)


@mr.op
def transposed(x: mr.Row["f"], y: mr.Col["f"], z: mr.Col["d"]):
    return mr.sum((x @ y) * z)
