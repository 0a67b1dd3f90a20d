"""Ping-pong GEMM kernels (Gluon) on a Hopper GPU: the simulator's cases, and larger ones.

``MONOIDREDUCE_TEST_SHARD=3/12`` runs a twelfth of the sizes, so that twelve processes share the compiling.
"""

import os

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines.triton import use_plan
from monoidreduce.engines.triton.launch import driver
from tests.support import internals
from tests.support.pingpong_cases import (
    SIZES,
    by_turns,
    check_fold,
    check_gradients,
    check_labels,
    check_odd,
    head,
    lse,
    made,
)

HOPPER = torch.cuda.is_available() and driver.runs_warp_specialized(torch.device("cuda"))
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU, and Triton 3.6")

PART, PARTS = map(int, os.environ.get("MONOIDREDUCE_TEST_SHARD", "0/1").split("/"))
LARGER = [*SIZES, (1025, 4097, 1032), (3000, 20001, 776), (1000, 5003, 2056), (40000, 513, 512)][PART::PARTS]


@pytest.fixture
def kernels(monkeypatch):
    """The names of the ping-pong kernels that are launched for the first time."""
    found = []

    def execute(launch, call):
        if call.kernel.hand_scheduled:
            found.append(call.kernel.name)
        return launch(call)

    internals.forget_launches(monkeypatch)
    internals.replace_launch(monkeypatch, execute)
    return found


@pytest.mark.parametrize(("M", "N", "D"), LARGER)
def test_a_fold_against_float64(M, N, D, kernels):
    for plans in ({}, by_turns(3), by_turns(3, wide=True)):
        with use_plan(plans), mr.use(engine="triton"):
            check_fold(M, N, D, "cuda")
    assert set(kernels) == {"fold_over_cols"}


@pytest.mark.parametrize(("M", "N", "D"), LARGER)
def test_labels_in_whole_and_in_cut_tiles(M, N, D, kernels):
    for plans in (by_turns(1), by_turns(3, wide=True)):
        with use_plan(plans), mr.use(engine="triton"):
            check_labels(M, N, D, "cuda")
    assert set(kernels) == {"fold_over_cols"}


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.skipif(PART > 0, reason="another process has it")
def test_nan_and_infinity_stay_in_their_rows(wide, kernels):
    with use_plan(by_turns(wide=wide)), mr.use(engine="triton"):
        check_odd("cuda")
    assert kernels


@pytest.mark.parametrize(("M", "N", "D"), LARGER)
def test_weights_measured_from_a_guess(M, N, D, kernels):
    """Near the guess, and far from it."""
    for size in (1.0, 40.0):
        with mr.use(engine="triton"), mr.budget("2GB"):
            check_gradients(M, N, D, "cuda", size)
    assert "write_guessed" in kernels


@pytest.mark.parametrize(("M", "N", "D"), LARGER)
def test_weights_that_are_known(M, N, D, kernels):
    with mr.use(engine="triton"), mr.budget("2GB"):
        check_gradients(M, N, D, "cuda", total=False)
    assert {"fold_over_cols", "write_weights"} <= set(kernels)


@pytest.mark.skipif(PART > 0, reason="another process has it")
def test_repeats_bit_for_bit():
    """Groups, copies and stores that did not wait for one another would show, sooner or later."""
    x, y, label = made(3000, 5000, 512, "cuda")
    given, bias = (x.requires_grad_(), y.requires_grad_()), torch.zeros(5000, dtype=torch.bfloat16, device="cuda")

    def results():
        value = head.total(*given, label)
        return [value.detach(), *torch.autograd.grad(value, given), lse(x.detach(), y.detach(), bias)]

    with mr.use(engine="triton"), mr.budget("1GB"):
        first = results()
        for _ in range(50):
            assert all(torch.equal(a, b) for a, b in zip(first, results(), strict=True))
