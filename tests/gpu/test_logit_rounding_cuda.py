"""Logits that are not rounded to 16 bits, on a GPU: the backward recomputes exactly the forward's logits."""

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce.engines.triton.launch import driver
from monoidreduce.plan import budget
from tests.support import internals
from tests.support.logit_rounding_cases import compare, head, made, ours, plain, pulled, twice

HOPPER = torch.cuda.is_available() and driver.has_fast_epilogues(torch.device("cuda"))
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a GPU whose gradients are written by products of our own")

SIZES = [(1000, 8003, 520), (2048, 2048, 768), (600, 4096, 4096)]


@pytest.fixture(params=[True, False], ids=["predicted", "mistaken"])
def held(request, monkeypatch):
    """Once as predicted, once where gradients go by the vendor's products: the types of the pairs that panels held, and
    the one that those of gradients should have."""
    internals.forget_panel_recordings(monkeypatch)
    found = internals.watch_panels(monkeypatch, lambda step, layout: step.plan.pair_dtype)
    if not request.param:
        internals.use_vendor_gradients(monkeypatch)
    return found, torch.bfloat16 if request.param else torch.float32


@pytest.mark.parametrize("limit", ["1MB", "8MB", "300MB"])
@pytest.mark.parametrize(("M", "N", "D"), SIZES)
def test_peaked_logits(M, N, D, limit, held):
    x, w, target = given = made(M, N, D, "cuda")

    def limited(*args):
        with mr.budget(limit):
            return ours(*args)

    found, (types, kind) = pulled(limited, *given), held
    assert set(types) == {kind}
    compare(found, pulled(plain, x.double(), w.double(), target), pulled(plain, *given))
    for again in (pulled(limited, *given) for _ in range(3)):  # walked, heard, run
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    kept = pulled(limited, *given)
    torch.cuda.synchronize()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    assert peak - before - sum(t.nbytes for t in kept) <= budget.parse(limit) + 64 * (M + N)  # a few numbers of each


@pytest.mark.usefixtures("held")
def test_backward_again_and_sums():
    """A second backward is the first; one of sums, whose gradients were given away, recomputes the same logits."""
    x, w, target = made(1000, 8003, 520, "cuda")
    for loss in (ours, head.total):
        first = [a.detach().requires_grad_() for a in (x, w)]
        with mr.budget("64MB"):
            value = loss(*first, target)
            one, other = (torch.autograd.grad(value, first, retain_graph=True) for _ in range(2))
        for a, b in zip(one, other, strict=True):
            assert torch.linalg.vector_norm(a.float() - b.float()) <= 0.005 * torch.linalg.vector_norm(a.float())


def test_derivatives_of_gradients():
    x, w, target = given = made(500, 3000, 520, "cuda")
    with mr.budget("64MB"):
        found = twice(ours, *given)
    with mr.use(engine="eager"):
        compare(found, twice(plain, x.double(), w.double(), target), twice(ours, *given), factor=3.0)


@mr.op
def contrastive(x: mr.Row["d"], y: mr.Col["d"]):
    s = x @ y
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == mr.row_index, s, 0.0))


@pytest.mark.parametrize(("limit", "scale"), [("6MB", 70), ("1GB", 40)])
def test_rows_that_are_sure_of_their_label(limit, scale):
    """A loss of 4e-7: a label's product is that which the row's total has in it, or nothing is right. Of 2e-3 where the
    gradient is taken in the forward, and a label's product is not."""
    N = 8192
    torch.manual_seed(0)
    x, y = (F.normalize(torch.randn(N, 512, device="cuda"), dim=-1) for _ in range(2))
    x, y = (x * scale).bfloat16(), F.normalize(y + 0.5 * x, dim=-1).bfloat16()
    own = torch.arange(N, device="cuda")

    def limited(x, y, _):
        with mr.budget(limit):
            return contrastive.total(x, y) / N

    plainly = lambda x, y, own: F.cross_entropy((x @ y.mT).to(torch.promote_types(x.dtype, torch.float32)), own)
    truth, naive = pulled(plainly, x.double(), y.double(), own), pulled(plainly, x, y, own)
    compare(pulled(limited, x, y, own)[1:], truth[1:], naive[1:])
