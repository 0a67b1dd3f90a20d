"""The kernel that makes the gradients of queries, keys and values (Gluon) on a Hopper GPU: the simulator's cases."""

import pytest
import torch

from monoidreduce.engines.triton.launch import driver
from tests.support.joint_gradient_cases import CASES, check, gradients

HOPPER = torch.cuda.is_available() and driver.runs_warp_specialized(torch.device("cuda"))
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU, and Triton 3.6")
MANY = (2, 16, 16, 2048, 2048, 128, {"is_causal": True})


def joint(launched):
    return [kernel for kernel, _ in launched if "joint_box" in kernel.text]


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_against_float64(case, launched, of_few):
    check(gradients("triton", torch.bfloat16, *case, "cuda"), case, "cuda")
    assert joint(launched)


def test_repeats_bit_for_bit_where_tiles_wait_for_each_other(launched):
    first = gradients("auto", torch.bfloat16, *MANY, "cuda")
    assert joint(launched)
    for _ in range(30):
        again = gradients("auto", torch.bfloat16, *MANY, "cuda")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_float16(causal, launched, of_few):
    case = (1, 2, 2, 300, 300, 128, {"is_causal": causal})
    found, exact, plain = (
        gradients(engine, dtype, *case, "cuda")
        for engine, dtype in (("triton", torch.float16), ("reference", torch.float64), ("reference", torch.float16))
    )
    assert joint(launched)
    for got, right, theirs in zip(found, exact, plain, strict=True):
        assert (got.double() - right).norm() <= max(2 * (theirs.double() - right).norm(), 2**-11 * right.norm())
