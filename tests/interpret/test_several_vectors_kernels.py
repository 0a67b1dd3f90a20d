"""Kernels of several vectors a row or column: one matrix product for each, gradients that are summed in memory."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines.triton import KernelPlan, use_plan
from tests.support.several_vectors import CASES, tensors

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "error::monoidreduce.errors.FallbackWarning")


def compare(
    name: str, sizes: tuple[int, int, int, int], dtype: torch.dtype = torch.float32, digits: float = 2e-5
) -> None:
    """Values and gradients against whole matrices in float64."""
    op, twin, shapes = CASES[name]
    args = tensors(shapes, *sizes, dtype)
    ours, exact = [t.requires_grad_() for t in args], [t.detach().double().requires_grad_() for t in args]
    with mr.use(engine="triton"):
        found = op(*ours)
        right = twin(*exact)
        weight = torch.linspace(-1, 1, right.numel(), dtype=torch.float64).view(right.shape)
        grads = torch.autograd.grad((found * weight.to(found.dtype)).sum(), ours)
    for one, other in zip((found, *grads), (right, *torch.autograd.grad((right * weight).sum(), exact)), strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= digits * other.abs().max()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_kernels(name):
    compare(name, (19, 37, 3, 12))


@pytest.mark.parametrize(("name", "splits"), [("indexer", 3), ("largest", 1), ("of_both", 1)])
def test_loops_over_vectors(name, splits):
    """More vectors than are unrolled, widths that fill no block, tiles in every direction, splits."""
    plan = KernelPlan(16, 16, 4, 1, splits)
    with use_plan({"cols": plan, "rows": plan}):
        compare(name, (17, 34, 9, 5))


@pytest.mark.parametrize("sizes", [(17, 20, 2, 4), (17, 20, 1, 16), (17, 20, 2, 40)])
def test_widths(sizes):
    """Features that are all unrolled, and others: also as accumulators."""
    compare("indexer", sizes)
    compare("of_columns", sizes)


def test_float64():
    compare("indexer", (17, 20, 2, 12), torch.float64, 1e-12)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite(value):
    q, k = tensors("q k", 9, 20, 10, 12, torch.float32)
    q[0, 2, 1, 0] = value
    with mr.use(engine="triton"):
        found = CASES["largest"].op(q, k)
    torch.testing.assert_close(found, CASES["largest"].twin(q, k), equal_nan=True, rtol=1e-4, atol=1e-4)
