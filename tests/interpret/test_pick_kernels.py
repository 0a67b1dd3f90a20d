"""Gradients of reductions that choose pairs, by kernels that gather and scatter these alone, in the interpreter."""

import math

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.engines.triton.kernels import fold_kernel, pick

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@mr.op
def largest(x: Row["d"], y: Col["d"]):
    return mr.max(x @ y)


@mr.op
def largest_of_columns(x: Row["d"], y: Col["d"]):
    return mr.max(x @ y, over="rows")


@mr.op
def largest_bent(x: Row["d"], y: Col["d"], b: Col):
    return mr.max(torch.tanh(x @ y + b))


@mr.op
def nearest(x: Row["d"], y: Col["d"]):
    return mr.min(mr.sqdist(x, y))


@mr.op
def three_best(x: Row["d"], y: Col["d"]):
    return mr.topk(x @ y, 3).values


@mr.op
def largest_seen(x: Row["d"], y: Col["d"], slope: mr.Batch, scale: float):
    far = (mr.row_index - mr.col_index).abs()
    return mr.max(torch.where(far > 2, torch.exp(x @ y * scale) - slope * far, -torch.inf))


@mr.op
def largest_without_text(x: Row["d"], y: Col["d"]):
    return mr.max(torch.special.polygamma(2, 1.0 + mr.sqdist(x, y)))  # its derivative has no text in kernels


OPS = {
    "largest": largest,
    "over rows": largest_of_columns,
    "bent": largest_bent,
    "nearest": nearest,
    "three best": three_best,
    "seen": largest_seen,
    "without text": largest_without_text,
}
RAGGED, BATCH, FEW = ((), 35, 30, 20), ((2, 2), 6, 14, 9), ((), 30, 3, 17)  # batch, rows, columns, features
CASES = {"largest": BATCH, "over rows": RAGGED, "bent": BATCH, "nearest": RAGGED, "three best": FEW}
CASES |= {"seen": BATCH, "without text": FEW}
OTHERS = {"bent": lambda batch, cols: [torch.randn(cols)], "seen": lambda batch, cols: [torch.rand(batch)]}


def gradients(op, args, engine, weights=None):
    leaves = [t.clone().requires_grad_() for t in args]
    with mr.use(engine=engine):
        y = op(*leaves, 0.5) if op is largest_seen else op(*leaves)
        g = torch.cos(torch.arange(float(y.numel()))).view(y.shape) if weights is None else weights
        return [y.detach(), *torch.autograd.grad(y, leaves, g.to(y.dtype))]


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    """Runs of equal targets cross many pieces."""
    monkeypatch.setattr(pick, "_PIECE", 4)


@pytest.fixture
def picked(monkeypatch):
    """The picks that kernels computed."""
    found, run = [], pick.run

    def watched(r, *given):
        found.append(r.attrs[1])
        return run(r, *given)

    monkeypatch.setattr(pick, "run", watched)
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OPS)
def test_gradients_of_chosen_pairs(name, picked):
    batch, rows, cols, width = CASES[name]
    torch.manual_seed(rows)
    args = [torch.randn(*batch, rows, width), torch.randn(*batch[1:], cols, width)]
    args += OTHERS[name](batch, cols) if name in OTHERS else []
    ours, exact = gradients(OPS[name], args, "triton"), gradients(OPS[name], args, "reference")
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)
    assert {"cols", "rows"} <= set(picked)


def test_all_rows_choose_one_column_and_infinite_cotangents_stay_with_theirs():
    torch.manual_seed(0)
    x = torch.rand(40, 16) + 0.1
    y = torch.rand(20, 16) - 2.0
    y[7] = 3.0  # of all rows but the last ones
    x[-5:] = -x[-5:]
    g = torch.ones(40)
    g[-1] = math.inf
    ours, exact = gradients(largest, (x, y), "triton", g), gradients(largest, (x, y), "reference", g)
    _, at = (x[-1] @ y.mT).max(-1)
    kept = torch.arange(20) != at
    torch.testing.assert_close(ours[2][kept], exact[2][kept], rtol=1e-5, atol=1e-4)
    assert ours[2][at].isinf().all() and ours[2][kept].isfinite().all()


def test_gradients_of_a_maximum_walk_no_pairs(monkeypatch):
    launched, call = [], fold_kernel.FoldLaunch.__call__

    def watched(self, *given):
        launched.append(self.over)
        return call(self, *given)

    monkeypatch.setattr(fold_kernel.FoldLaunch, "__call__", watched)
    gradients(largest, [torch.randn(30, 16), torch.randn(40, 16)], "triton")
    assert launched in ([], ["cols"])  # the forward, unless its launch was recorded


def test_values_in_16_bits_follow_the_rule(picked):
    torch.manual_seed(1)
    args = [torch.randn(30, 32).half(), torch.randn(20, 32).half()]
    ours = gradients(largest, args, "triton")
    exact = gradients(largest, [t.double() for t in args], "reference")
    for a, b in zip(ours[1:], exact[1:], strict=True):
        assert (a.double() - b).norm() <= 1e-3 * b.norm()
    assert picked
