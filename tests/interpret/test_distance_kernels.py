"""Squared distances of 16-bit vectors as products with norms that are computed before the launch."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.engines.triton.schedules import spec_from_tensors
from tests.support import internals


@mr.op
def mixed(x: Row["f"], y: Col["f"], v: Col["d"]):
    near = torch.exp(-mr.sqdist(x, y) / 16)
    return mr.sum(near * v), mr.logsumexp(near)


@mr.op
def nearest(x: Row["f"], y: Col["f"]):
    return mr.min(mr.sqdist(x, y))


@pytest.mark.parametrize(
    ("op", "width", "many"),
    [(mixed, 24, True), (mixed, 24, False), (mixed, 80, True), (nearest, 80, True)],
    ids=["24", "24, few pairs", "80", "min of 80"],
)
@pytest.mark.filterwarnings("error::monoidreduce.errors.FallbackWarning")
def test_values_and_gradients_equal_float64(op, width, many, seed, monkeypatch):
    torch.manual_seed(seed)
    monkeypatch.setattr(spec_from_tensors, "MANY_SIXTEEN", 0 if many else 2**24)
    internals.forget_launches(monkeypatch)
    texts = []
    internals.replace_launch(monkeypatch, lambda launch, call: texts.append(call.kernel.text) or launch(call))
    shapes = [(2, 70, width), (133, width), (133, 40)][: 2 + (op is mixed)]  # columns are shared by the batch
    given = [torch.randn(s).div(2).half().requires_grad_() for s in shapes]
    exact = [t.detach().double().requires_grad_() for t in given]
    found = {}
    for kind, args in (("triton", given), ("reference", exact)):
        with mr.use(engine=kind):
            results = op(*args)
            results = results if isinstance(results, tuple) else (results,)
            total = sum((r.double() * torch.linspace(0.5, 1.5, r.numel()).view(r.shape)).sum() for r in results)
            found[kind] = [*(r.detach() for r in results), *torch.autograd.grad(total, args)]
    for ours, theirs in zip(found["triton"], found["reference"], strict=True):
        error = float((ours.double() - theirs).norm() / theirs.norm())
        assert error < 2e-3, error
    folds = [text for text in texts if "def fold" in text]
    assert folds and all(("_norm_ptr" in text) == many for text in folds)
    assert all(("tl.sum(x" in text) != many for text in folds)  # of few pairs, norms are computed in tiles


def test_a_point_that_is_not_a_number_stays_in_its_row(seed, monkeypatch):
    torch.manual_seed(seed)
    monkeypatch.setattr(spec_from_tensors, "MANY_SIXTEEN", 0)
    internals.forget_launches(monkeypatch)
    x, y, v = (torch.randn(n, 32).half() for n in (20, 40, 40))
    x[3, 5] = torch.nan
    with mr.use(engine="triton"):
        found = mixed(x, y, v)[0]
    assert found[3].isnan().all()
    assert not torch.cat([found[:3], found[4:]]).isnan().any()


@pytest.mark.parametrize("split", [False, True], ids=["contiguous", "split heads"])
def test_norms_are_part_of_a_replay(split, by_address, monkeypatch, seed):
    torch.manual_seed(seed)
    monkeypatch.setattr(spec_from_tensors, "MANY_SIXTEEN", 0)
    shapes = [(2, 20, 24), (2, 30, 24), (2, 30, 40)]
    given = [torch.randn(b, n, d) if not split else torch.randn(n, b, d).transpose(0, 1) for b, n, d in shapes]
    for step in range(3):
        args = [t.half().add(step / 4).requires_grad_() for t in given]
        found = []
        for kind, own in (("triton", args), ("reference", [t.detach().double().requires_grad_() for t in args])):
            with mr.use(engine=kind):
                y = mixed(*own)[0]
                found.append([y.detach(), *torch.autograd.grad(y, own, torch.ones_like(y))])
        for ours, theirs in zip(*found, strict=True):
            assert float((ours.double() - theirs).norm() / theirs.norm()) < 3e-3
    # forward and gradients, each time by address but for the norms of strided vectors, which a copy is made of
    assert by_address.count("fold_over_cols") >= (2 if split else 5)
