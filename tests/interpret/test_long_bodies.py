"""Kernels of bodies with many operations: their text is written without recursion into every one of them."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.engines.triton import KernelPlan, use_plan

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "error::monoidreduce.errors.FallbackWarning")


def chain(x: Row["d"], y: Col["d"]):
    s = x @ y
    for _ in range(120):
        s = torch.sin(s) + 0.001 * s
    return mr.sum(s)


def shared(x: Row["d"], y: Col["d"]):
    s = torch.tanh(x @ y)
    a, b = s, s + 0.5
    for _ in range(60):
        a, b = b, 0.9 * torch.sin(b) * a + s
    return mr.logsumexp(b)


def vectors(x: Row["d"], y: Col["d"]):
    v = x * y
    a, b = v, v - x
    for _ in range(30):
        a, b = b, torch.sin(v * b) - a * 0.5
    return mr.sum(b.sum())


def rows(x: Row["d"], y: Col["d"]):
    a, b = x.sum(), x.sum() + 1
    for _ in range(120):
        a, b = b, torch.sin(b) * a * 0.5
    return mr.sum(x @ y) * b


@pytest.mark.parametrize("body", [chain, shared, vectors, rows], ids=lambda body: body.__name__)
def test_kernels_of_long_bodies(body):
    def run(engine):
        torch.manual_seed(1)
        x, y = (torch.rand(n, 3).requires_grad_() for n in (5, 7))
        plan = KernelPlan(16, 16, 4, 1)
        with mr.use(engine=engine, strict=True), use_plan({"cols": plan, "rows": plan}):
            value = mr.op(body)(x, y)
            value.sum().backward()
        return value.detach(), x.grad, y.grad

    for found, right in zip(run("triton"), run("reference"), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
