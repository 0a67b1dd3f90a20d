"""Relative positions and attention's statistics at sizes where warp-specialised kernels run, against float64."""

import pytest
import torch

from monoidreduce import ops
from monoidreduce.engines import triton
from monoidreduce.engines.triton.kernels.histogram import DiagonalLaunch
from monoidreduce.engines.triton.launch import driver
from tests.support import table_cases

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("error::monoidreduce.errors.FallbackWarning"),
]


def problem(rows, cols):
    torch.manual_seed(0)
    vectors = [torch.randn(4, 8, n, 128, device="cuda") for n in (rows, cols, cols)]
    return [(vectors[0] * 128**-0.5).bfloat16(), vectors[1].bfloat16(), vectors[2].bfloat16()]


def assert_right(op, dense, args, most=8e-3):
    def run(call, dtype=None):
        given = [a.detach().to(dtype or a.dtype).requires_grad_() for a in args]
        values = call(*given)
        values = [values] if isinstance(values, torch.Tensor) else list(values)
        weights = [torch.cos(torch.arange(v.numel(), device="cuda")).view(v.shape).to(v) for v in values]
        return [*(v.detach() for v in values), *torch.autograd.grad(values, given, weights)]

    found, again = run(op), run(op)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    for k, (one, right) in enumerate(zip(found, run(dense, torch.float64), strict=True)):
        assert float((one.double() - right).norm() / right.norm()) < most, k


@pytest.mark.parametrize("name, rows, cols", [("relative", 2048, 600), ("relative", 1999, 603), ("causal", 2048, 2048)])
def test_relative_positions(name, rows, cols):
    case = next(c for c in table_cases.CASES if c.name == name)
    before = set(map(id, triton.prepared_folds().values()))
    bias = torch.randn(8, case.table(rows, cols), device="cuda")
    assert_right(case.op, lambda *args: _dense(name, *args), [*problem(rows, cols), bias])
    made = [one for ready in triton.prepared_folds().values() if id(ready) not in before for one in ready.launches]
    if driver.runs_warp_specialized(torch.device("cuda")) and name == "relative":
        assert any(isinstance(one, DiagonalLaunch) for one in made)  # the table's gradient, inside the row gradient's


def _dense(name, q, k, v, bias):
    rows, cols = q.shape[-2], k.shape[-2]
    gap = torch.arange(rows, device="cuda")[:, None] - torch.arange(cols, device="cuda")
    s = q @ k.mT + bias[:, (gap + cols - 1 if name == "relative" else gap.clamp(min=0))]
    return (s if name == "relative" else s.masked_fill(gap < 0, -torch.inf)).softmax(-1) @ v


@pytest.mark.parametrize("rows, cols", [(2048, 600), (1999, 603)])
def test_statistics(rows, cols):
    def dense(q, k, v):
        s = q @ k.mT
        gap = (torch.arange(rows, device="cuda")[:, None] - torch.arange(cols, device="cuda")).abs()
        return s.softmax(-1) @ v, -(s.softmax(-1) * s.log_softmax(-1)).sum(-1), (s.softmax(-1) * gap).sum(-1)

    def ours(q, k, v):
        found = ops.attention_statistics(q, k, v, statistics=("entropy", "distance"), scale=1.0)
        return found.values, found.entropy, found.distance

    assert_right(ours, dense, problem(rows, cols))
