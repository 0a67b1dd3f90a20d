"""Monoids with vector fields are kernels: values and gradients, whole, split, over rows, masked, in three types."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines.triton import KernelPlan, use_plan
from tests.support import own_monoids as own

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "error::monoidreduce.errors.FallbackWarning")


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("op", ["attention", "pooled"])
def test_kernels(op, splits):
    args, plan = own.problem(19, 53), KernelPlan(16, 16, 4, 1, splits)
    expected = own.with_gradients(lambda *given: own.plain(op, *given), args)
    with mr.use(engine="triton"), use_plan({"cols": plan, "rows": plan}):
        found = own.with_gradients(getattr(own, op), args)
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got, right)
