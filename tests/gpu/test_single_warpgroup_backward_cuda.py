"""Column-gradient kernels of one warp group (Gluon) on a Hopper GPU: the simulator's cases.

``MONOIDREDUCE_TEST_SHARD=3/9`` runs a ninth of them, so that nine processes share the compiling.
"""

import os

import pytest
import torch

import monoidreduce as mr
from monoidreduce import ops
from monoidreduce.engines.triton.launch import driver
from tests.support import internals
from tests.support.single_warpgroup_cases import DROPPED, OPTIONS, SIZES, check, pulled

HOPPER = torch.cuda.is_available() and driver.runs_warp_specialized(torch.device("cuda"))
PART, PARTS = map(int, os.environ.get("MONOIDREDUCE_TEST_SHARD", "0/1").split("/"))
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU, and Triton 3.6")


@pytest.fixture(autouse=True)
def _apart(monkeypatch):
    internals.keep_directions_apart(monkeypatch)


def alone(launched):
    """Whether each of the launched column gradients was alone."""
    return [kernel.single_warpgroup for kernel, _ in launched if kernel.name == "fold_over_rows"]


@pytest.mark.parametrize("options", OPTIONS[PART::PARTS], ids=repr)
def test_against_float64(options, launched, of_few):
    for rows, cols in SIZES:
        found = pulled("triton", torch.bfloat16, options, rows, cols, "cuda")
        check(found, options, rows, cols, "cuda")
    assert set(alone(launched)) == {True}


@pytest.mark.parametrize("options", [{}, DROPPED, {"causal": True}], ids=repr)
def test_repeats_bit_for_bit(options, launched, of_few):
    first = pulled("triton", torch.bfloat16, options, 1000, 778, "cuda")
    for _ in range(50):
        again = pulled("triton", torch.bfloat16, options, 1000, 778, "cuda")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(alone(launched))


def test_odd_columns_have_the_same_coins_by_the_compilers_schedule(launched, of_few):
    check(pulled("triton", torch.bfloat16, DROPPED, 300, 201, "cuda"), DROPPED, 300, 201, "cuda")
    assert set(alone(launched)) == {False}


@pytest.mark.parametrize("options", [{}, DROPPED, {"causal": True}], ids=repr)
def test_chosen_where_pairs_are_many_and_right_there(options, launched):
    gen = torch.Generator("cuda").manual_seed(0)
    q, k, v, y = (torch.randn(1, 8, 6000, 128, device="cuda", generator=gen).bfloat16() for _ in range(4))
    leaves = [a.requires_grad_() for a in (q, k, v)]
    found = torch.autograd.grad(ops.attention(*leaves, **options), leaves, y)
    assert any(alone(launched))
    part = [a.detach()[:, :1].float().requires_grad_() for a in (q, k, v)]
    with mr.use(engine="eager"):
        exact = torch.autograd.grad(ops.attention(*part, **options), part, y[:, :1].float())
    for got, right in zip(found, exact, strict=True):
        assert (got[:, :1].float() - right).norm() <= 0.0045 * right.norm()
