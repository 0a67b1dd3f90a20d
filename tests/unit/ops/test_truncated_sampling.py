"""Sampling from the classes that top-k, top-p and min-p leave, held to its definition."""

import math

import pytest
import torch

import monoidreduce as mr
from monoidreduce.ops import linear_sample, sampling
from tests.support.allocations import usage
from tests.support.truncated_sampling import LIMITS, arguments, draw, keep_classes, name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("engine", ["reference", "eager", "auto"])
@pytest.mark.parametrize("limits", LIMITS, ids=name)
def test_draws_are_those_of_the_definition(limits, engine):
    x, weight, bias = arguments()
    for seed in (1, 2):
        with mr.use(engine=engine):
            index, log_prob = linear_sample(x, weight, seed, bias=bias, **limits)
        wanted, exact = draw(x, weight, seed, bias, **limits)
        assert torch.equal(index, wanted)
        torch.testing.assert_close(log_prob, exact)


def test_shares_are_those_of_what_is_left():
    """Of 20,000 rows that are alike, each class has its share of the nucleus, and no other is drawn."""
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0, 1.5, -3.0]])
    left = keep_classes(logits, top_p=0.85)[0].softmax(-1)
    drawn = linear_sample(logits.expand(20_000, -1), torch.eye(6), 5, top_p=0.85).index
    shares = torch.bincount(drawn, minlength=6) / 20_000
    assert (left == 0).sum() == 3 and torch.equal(shares > 0, left > 0)
    torch.testing.assert_close(shares, left, rtol=0, atol=4 * 0.5 / math.sqrt(20_000))


def test_where_no_draw_belongs_it_is_the_best(monkeypatch):
    """The second class has nearly all mass that is not the first's; of one draw it is mostly that one."""
    monkeypatch.setattr(sampling, "_count_draws", lambda top_p, classes: 1)
    logits = torch.tensor([[0.5, 0.0, -9.0]]).expand(50, -1)
    assert (linear_sample(logits, torch.eye(3), 3, top_p=0.3).index == 0).all()
    assert linear_sample(logits, torch.eye(3), 3).index.sum() > 0


def test_gradients_are_those_of_the_whole_softmax():
    x, weight, _ = (t.requires_grad_() for t in arguments())
    for limits in (dict(top_p=0.6), dict(top_k=4, min_p=0.1)):
        index, log_prob = linear_sample(x, weight, 3, **limits)
        exact = (x @ weight.T).log_softmax(-1).gather(1, index[:, None])[:, 0]
        grads = torch.autograd.grad(log_prob.cos().sum(), (x, weight))
        torch.testing.assert_close(grads, torch.autograd.grad(exact.cos().sum(), (x, weight)))


def test_rows_that_see_little():
    x, weight = torch.ones(3, 1), torch.zeros(5, 1)
    bias = torch.full((5,), -math.inf)
    for limits in (dict(top_k=2), dict(top_p=0.5), dict(min_p=0.5), dict(top_k=2, top_p=0.5, min_p=0.5)):
        index, log_prob = linear_sample(x, weight, 1, bias=bias, **limits)
        assert (index == -1).all() and (log_prob == -math.inf).all()
        one = bias.index_fill(0, torch.tensor([3]), 2.0)
        index, log_prob = linear_sample(x, weight, 1, bias=one, **limits)
        assert (index == 3).all() and (log_prob == 0).all()
        assert linear_sample(x, weight[:0], 1, top_p=0.5).index.tolist() == [-1] * 3


def test_no_matrix_of_logits():
    x, weight = torch.randn(16, 4), torch.randn(4_000, 4)
    for limits in (dict(top_p=0.9), dict(top_k=50, top_p=0.9)):
        with mr.use(engine="eager", budget="50KB"):
            used = usage(lambda x, w, limits=limits: linear_sample(x, w, 1, **limits), (x, weight), backward=False)
        assert used.peak < 16 * 4_000 * 2  # half of a matrix


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (dict(top_p=1.5), "top_p was given 1.5"),
        (dict(min_p=-0.1), "min_p was given -0.1"),
        (dict(top_k=0), "top_k"),
        (dict(top_k=2.5), "top_k"),
        (dict(top_p=0.01), "Give top_k as well"),
        (dict(top_p="0.9"), "top_p"),
    ],
    ids=lambda v: str(v),
)
def test_mistakes(limits, said):
    with pytest.raises(mr.ArgumentError, match=said):
        linear_sample(torch.ones(2, 3), torch.ones(4, 3), 1, **limits)
