"""Statistics of attention's weights, and the divergence of two attentions, in kernels."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines.triton import KernelPlan, use_plan
from monoidreduce.ops import attention_kl, attention_statistics
from tests.support import attention_statistics as dense

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "error::monoidreduce.errors.FallbackWarning")
PLAN = KernelPlan(16, 16, 4, 1)


@pytest.fixture(autouse=True)
def kernels():
    with mr.use(engine="triton"), use_plan({"cols": PLAN, "rows": PLAN}):
        yield


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 7, "softcap": 3.0}], ids=["plain", "options"])
def test_statistics(options, seed):
    """Grouped heads, ragged tiles, values in the same pass; with gradients."""
    given = torch.randn(4, 20, 8), torch.randn(2, 37, 8), torch.randn(2, 37, 5)
    mine, theirs = ([t.clone().requires_grad_() for t in given] for _ in range(2))
    found = attention_statistics(*mine, enable_gqa=True, **options)._asdict()
    right = dense.statistics(*theirs, **options)
    sums = [sum((v * (k + 1)).cos().sum() for k, v in enumerate(f[n] for n in right)) for f in (found, right)]
    for name, t in right.items():
        torch.testing.assert_close(found[name], t, rtol=1e-4, atol=1e-4)
    for a, b in zip(torch.autograd.grad(sums[0], mine), torch.autograd.grad(sums[1], theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-3)


def test_divergence(seed):
    given = torch.randn(1, 20, 4), torch.randn(1, 37, 4), torch.randn(3, 20, 8), torch.randn(3, 37, 8)
    mine, theirs = ([t.clone().requires_grad_() for t in given] for _ in range(2))
    loss, right = attention_kl(*mine, causal=True), dense.kl(*(t.expand(3, -1, -1) for t in theirs), causal=True)
    torch.testing.assert_close(loss, right, rtol=1e-4, atol=1e-4)
    for a, b in zip(torch.autograd.grad(loss.sum(), mine), torch.autograd.grad(right.sum(), theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
