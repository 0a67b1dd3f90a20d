"""A kind of reduction in one file, with one row in the table, has kernels: whole, split, over rows and on panels."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines.triton import KernelPlan, use_plan
from tests.support import logmeanexp
from tests.support import new_kinds as new

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "error::monoidreduce.errors.FallbackWarning")


@pytest.fixture(autouse=True)
def row():
    with new.planted():
        yield


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "op"), new.NAMES)
@pytest.mark.parametrize("splits", [1, 3])
def test_kernels(name, op, splits):
    plan = KernelPlan(16, 16, 4, 1, splits)
    with mr.use(engine="triton"), use_plan({"cols": plan, "rows": plan}):
        new.check(name, op, new.problem(21, 50))


@pytest.mark.parametrize("name", new.CASES)
def test_single_precision(name):
    plan = KernelPlan(16, 16, 4, 1)
    with mr.use(engine="triton"), use_plan({"cols": plan, "rows": plan}):
        new.check(name, "by_rows", new.problem(21, 50, torch.float32), 1e-4)


def test_rows_that_see_nothing():
    x, y, b = new.problem(5, 20)
    b[:] = -torch.inf
    with mr.use(engine="triton"):
        value, _, z = logmeanexp.by_rows(x, y, b)
    assert (value == -torch.inf).all() and (z == -torch.inf).all()


@pytest.mark.parametrize(("name", "op"), new.NAMES)
def test_panels(name, op):
    with mr.use(engine="panel"):
        new.check(name, op, new.problem(21, 50))
