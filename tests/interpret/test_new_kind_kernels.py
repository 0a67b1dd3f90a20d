"""A kind of reduction in one file, with one row in the table, has kernels: whole, split, over rows and on panels."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines.triton import KernelPlan, use_plan
from tests.support import logmeanexp as new

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "error::monoidreduce.errors.FallbackWarning")


@pytest.fixture(autouse=True)
def row():
    with new.planted():
        yield


@pytest.mark.sampled(3)
@pytest.mark.parametrize("op", ["by_rows", "both_ways"])
@pytest.mark.parametrize("splits", [1, 3])
def test_kernels(op, splits):
    args, plan = new.problem(21, 50), KernelPlan(16, 16, 4, 1, splits)
    with mr.use(engine="triton"), use_plan({"cols": plan, "rows": plan}):
        new.assert_right(new.with_gradients(getattr(new, op), args), args, op)


def test_single_precision():
    args, plan = new.problem(21, 50, torch.float32), KernelPlan(16, 16, 4, 1)
    with mr.use(engine="triton"), use_plan({"cols": plan, "rows": plan}):
        new.assert_right(new.with_gradients(new.by_rows, args), args, "by_rows", 1e-4)


def test_rows_that_see_nothing():
    x, y, b = new.problem(5, 20)
    b[:] = -torch.inf
    with mr.use(engine="triton"):
        value, _, z = new.by_rows(x, y, b)
    assert (value == -torch.inf).all() and (z == -torch.inf).all()


@pytest.mark.parametrize("op", ["by_rows", "both_ways"])
def test_panels(op):
    args = new.problem(21, 50)
    with mr.use(engine="panel"):
        new.assert_right(new.with_gradients(getattr(new, op), args), args, op)
