"""Warp-specialised attention kernels (Gluon) on a Hopper GPU: the simulator's cases.

``MONOIDREDUCE_TEST_SHARD=3/12`` runs a twelfth of the cases, so that twelve processes share the compiling.
"""

import os

import pytest
import torch

import monoidreduce as mr
from benchmarks.accuracy import DATA
from monoidreduce import ops
from monoidreduce.engines.triton import use_plan
from monoidreduce.engines.triton.launch import driver
from tests.support import internals
from tests.support.warp_specialised_attention_cases import (
    BY_TURNS,
    CAPPED,
    CASES,
    SLANTED,
    check,
    check_nan,
    check_peaked,
    check_slanted,
    made,
)

HOPPER = torch.cuda.is_available() and driver.runs_warp_specialized(torch.device("cuda"))
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU, and Triton 3.6")


PART, PARTS = map(int, os.environ.get("MONOIDREDUCE_TEST_SHARD", "0/1").split("/"))


@pytest.fixture
def kernels(monkeypatch):
    """The kernels that are launched for the first time."""
    internals.forget_launches(monkeypatch)
    return internals.watch_launches(monkeypatch, lambda call: call.kernel)


@pytest.mark.parametrize("case", CASES[PART::PARTS], ids=repr)
def test_against_float64(case, kernels):
    with use_plan(BY_TURNS), mr.use(engine="triton"):
        check(case, "cuda")
    assert [k.hand_scheduled for k in kernels if k.name != "side"] == [True]


@pytest.mark.parametrize("case", CAPPED[PART::PARTS], ids=repr)
def test_soft_caps_against_float64(case, kernels):
    with use_plan(BY_TURNS), mr.use(engine="triton"):
        check(case, "cuda")
    assert [k.hand_scheduled for k in kernels if k.name != "side"] == [True]


@pytest.mark.parametrize("name", list(SLANTED)[PART::PARTS])
def test_lines_against_float64(name, kernels):
    with use_plan(BY_TURNS), mr.use(engine="triton"):
        check_slanted(name, "cuda")
    assert [k.hand_scheduled for k in kernels] == [True]


@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}][PART % 2 :: min(PARTS, 2)], ids=repr)
def test_nan_and_infinity_stay_in_their_rows(options, kernels):
    with use_plan(BY_TURNS), mr.use(engine="triton"):
        check_nan("cuda", **options)
    assert [k.hand_scheduled for k in kernels if k.name != "side"] == [True]


def test_another_cap_is_the_same_kernel(kernels):
    q, k, v = (a.cuda() for a in made(200, 520, size=3.0))
    for cap in (40.0, 25.0):
        with use_plan(BY_TURNS), mr.use(engine="triton"):
            got = ops.attention(q, k, v, softcap=cap)
        with mr.use(engine="reference"):
            exact = ops.attention(q.double(), k.double(), v.double(), softcap=cap)
        assert (got.double() - exact).norm() <= 2**-8 * exact.norm()
    assert [k.hand_scheduled for k in kernels] == [True]


def test_repeats_bit_for_bit():
    args = [a.cuda() for a in made(1000, 777)]
    with use_plan(BY_TURNS), mr.use(engine="triton"):
        first = ops.attention(*args, causal=True, return_lse=True)
        for _ in range(50):
            again = ops.attention(*args, causal=True, return_lse=True)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_gradients_through_it():
    args = [a.cuda().requires_grad_() for a in made(384, 512)]
    with use_plan(BY_TURNS), mr.use(engine="triton"):
        grads = torch.autograd.grad(ops.attention(*args, causal=True).float().square().sum(), args)
    wide = [a.detach().double().requires_grad_() for a in args]
    with mr.use(engine="reference"):
        exact = torch.autograd.grad(ops.attention(*wide, causal=True).square().sum(), wide)
    for a, b in zip(grads, exact, strict=True):
        assert (a.double() - b).norm() <= 0.02 * b.norm()


def test_chosen_where_pairs_are_many_and_nothing_of_their_size_is_kept(kernels):
    q, k, v = (a.cuda() for a in made(4096, 4096, (16,)))
    ops.attention(q, k, v)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ops.attention(q, k, v)
    assert [k.hand_scheduled for k in kernels if k.name != "side"] == [True]
    assert torch.cuda.max_memory_allocated() - before <= 2 * q.nbytes


@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", DATA)
def test_peaked_rows_are_as_exact_as_by_a_running_maximum(kind, causal, d):
    with mr.use(engine="triton"):
        check_peaked(kind, "cuda", d, causal, length=1024)
