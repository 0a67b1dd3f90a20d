"""Ping-pong contraction kernels (Gluon) on a Hopper GPU: the simulator's cases, larger ones, and a vocabulary head
whose column gradients are added up over panels."""

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce.engines.triton.launch import driver
from tests.support import internals
from tests.support.pingpong_contraction_cases import KINDS, SIZES, check

HOPPER = torch.cuda.is_available() and driver.runs_warp_specialized(torch.device("cuda"))
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU, and Triton 3.6")


@pytest.mark.parametrize(("over", "add"), KINDS)
def test_sums_against_float64(over, add):
    for L, N, D in [*SIZES, (20000, 1096, 776), (3000, 2000, 1032)]:
        check(L, N, D, over, add, "cuda")
    check(*SIZES[0], over, add, "cuda", narrow=torch.float16)


def test_repeats_bit_for_bit():
    """Places that were given back too early, and stores that nobody waited for, would show, sooner or later."""
    for over, add in KINDS:
        found = [check(30000, 512, 768, over, add, "cuda") for _ in range(10)]
        assert all(torch.equal(found[0], other) for other in found[1:])


def test_column_gradients_over_panels(monkeypatch):
    """Walked, heard and run as it was written down: the same, and as near as torch."""
    seen = internals.watch_launches(monkeypatch, lambda call: call.kernel.name)
    internals.forget_contractions(monkeypatch)
    gen = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 768, generator=gen).bfloat16().cuda().requires_grad_() for n in (4096, 70000))
    label = torch.randint(70000, (4096,), generator=gen).cuda()

    def ours():
        with mr.use(engine="triton"), mr.budget("160MB"):
            return torch.autograd.grad(mr.ops.cross_entropy(x * 0.04, w, label), (x, w))

    found = [ours() for _ in range(4)]
    assert {"contract_rows", "contract_rows_added"} <= set(seen)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    results = []
    for kind in (torch.float64, torch.bfloat16):
        own = [t.detach().to(kind).requires_grad_() for t in (x, w)]
        logits = ((own[0] * 0.04) @ own[1].T).to(torch.promote_types(kind, torch.float32))
        results.append(torch.autograd.grad(F.cross_entropy(logits, label), own))
    for mine, exact, plain in zip(found[0], *results, strict=True):
        error, other = ((t.double() - exact).norm() for t in (mine, plain))
        assert error <= 2 * other
