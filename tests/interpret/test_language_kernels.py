"""Truth values in arithmetic, vectors over a top-k, and numbers that are read anew, in kernels."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.engines.triton import KernelPlan, use_plan

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::monoidreduce.errors.FallbackWarning")


def run(body, engine, *args):
    plan = KernelPlan(16, 16, 4, 1)
    given = [a.detach().clone().requires_grad_() for a in args]
    with mr.use(engine=engine), use_plan({"cols": plan, "rows": plan}):
        found = mr.op(body)(*given)
    floats = [v.square().sum() for v in found if v.requires_grad]
    slopes = torch.autograd.grad(sum(floats), given) if floats else ()
    return [*(v.detach() for v in found), *slopes]


def truths(x: Row["d"], y: Col["d"]):
    s = x @ y
    c, d = s > 0, s < 1
    some = mr.any(c & d)
    kinds = mr.sum(c * c), mr.sum(c + d), mr.sum(c + 1), mr.sum(c * d * s), mr.sum(torch.square(c) + d)
    return (*kinds, mr.max(c * d), mr.sum(torch.minimum(c, d) * 0.5), some * some, some + some)


def over_topk(x: Row["d"], y: Col["d"]):
    best = mr.topk(x @ y, 3).values
    return torch.softmax(best, -1), best.sum(), torch.logsumexp(best, -1), torch.where(best > 0, best, 0.0)


@pytest.mark.parametrize("body", [truths, over_topk], ids=lambda body: body.__name__)
def test_kernels(body):
    x, y = torch.randn(5, 3), torch.randn(18, 3)
    for found, right in zip(run(body, "triton", x, y), run(body, "reference", x, y), strict=True):
        assert found.dtype == right.dtype
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def test_a_number_of_the_closure_is_read_anew():
    scale = 1.0

    @mr.op
    def layer(x: Row["d"], y: Col["d"]):
        return mr.sum(torch.tanh(x @ y * scale))

    x, y = torch.randn(5, 3), torch.randn(7, 3)
    with mr.use(engine="triton"):
        for scale in (1.0, 2.0, 1.0, 0.5):
            torch.testing.assert_close(layer(x, y), torch.tanh(x @ y.T * scale).sum(1), rtol=1e-4, atol=1e-4)
