"""Warp-specialised MLP kernels (Gluon) on a Hopper GPU: the simulator's cases.

``MONOIDREDUCE_TEST_SHARD=3/12`` runs a twelfth of the cases, so that twelve processes share the compiling.
"""

import os

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row, ops
from monoidreduce.engines.triton.launch import driver
from tests.support.warp_specialised_mlp_cases import (
    CASES,
    FUNCTIONS,
    PLAIN,
    check,
    check_infinite,
    check_plain,
    made,
    ours,
    torchs,
)

HOPPER = torch.cuda.is_available() and driver.runs_warp_specialized(torch.device("cuda"))
PART, PARTS = map(int, os.environ.get("MONOIDREDUCE_TEST_SHARD", "0/1").split("/"))
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU, and Triton 3.6")


def shown(launched):
    """The names of kernels, whether they take turns, and how many indices they keep."""
    return [(kernel.name, kernel.hand_scheduled, plan.block_kept) for kernel, plan in launched]


GROUPED = [("fold_over_cols", True, 128), ("fold_over_cols", True, 128), ("fold_over_rows", True, 64)]


@pytest.mark.parametrize("case", CASES[PART::PARTS], ids=repr)
def test_against_float64(case, launched, of_few):
    check(case, "cuda")
    assert shown(launched) == GROUPED


@pytest.mark.parametrize(("rows", "cols", "batch", "activation"), PLAIN[PART::PARTS])
def test_a_plain_perceptron_against_float64(rows, cols, batch, activation, launched, of_few):
    check_plain(rows, cols, batch, activation, "cuda")
    assert shown(launched) == GROUPED[:1]


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
def test_a_plain_perceptron_of_many_pairs(activation, launched):
    x, p, _, q, _ = (a.cuda() for a in made(16400, 16500))
    first = ops.mlp(x, p, q, activation=activation)
    assert shown(launched) == GROUPED[:1]
    exact = FUNCTIONS[activation](x.float() @ p.float().mT) @ q.float()
    assert (first.float() - exact).norm() <= 0.0045 * exact.norm()
    assert all(torch.equal(first, ops.mlp(x, p, q, activation=activation)) for _ in range(50))


def test_an_infinite_cotangent_stays_with_what_is_seen(launched, of_few):
    check_infinite("cuda")
    assert shown(launched) == GROUPED


def test_repeats_bit_for_bit(launched, of_few):
    *args, y = (a.cuda() for a in made(1000, 777))
    first = ours(args, y)
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(first, ours(args, y), strict=True))
    assert shown(launched) == GROUPED


def test_chosen_where_pairs_are_many_and_nothing_of_their_size_is_kept(launched):
    *args, y = (a.cuda() for a in made(16400, 16500))
    leaves = [a.requires_grad_() for a in args]
    pull = lambda: torch.autograd.grad(ops.gated_mlp(*leaves), leaves, y)
    found = pull()
    assert shown(launched) == GROUPED
    exact = torchs([a.float() for a in args], y.float(), "silu")[1:]
    for got, right in zip(found, exact, strict=True):
        assert (got.float() - right).norm() <= 0.0045 * right.norm()
    del exact, right
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    pull()
    assert torch.cuda.max_memory_allocated() - before <= 6 * y.nbytes


DROPPED = {"dropout_p": 0.2, "seed": 3}


@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 5.0}, {"causal": True}, DROPPED, DROPPED | {"causal": True}, {"enable_gqa": True}],
    ids=repr,
)
def test_the_row_gradient_of_attention(options, launched, of_few):
    gen = torch.Generator().manual_seed(0)
    heads = 1 if "enable_gqa" in options else 2
    q, k, v, y = (torch.randn(2, h, n, 128, generator=gen) for h, n in ((2, 300), (heads, 200), (heads, 200), (2, 300)))

    def pulled(engine, dtype):
        args = [a.cuda().bfloat16().to(dtype).requires_grad_() for a in (q, k, v)]
        with mr.use(engine=engine), mr.budget("16GB"):  # under a budget, rows and columns have kernels of their own
            return torch.autograd.grad(ops.attention(*args, **options), args, y.cuda().bfloat16().to(dtype))

    found, exact, plain = (
        pulled("triton", torch.bfloat16),
        *(pulled("reference", t) for t in (torch.float64, torch.bfloat16)),
    )
    for got, right, theirs in zip(found, exact, plain, strict=True):
        allowed = max(2 * (theirs.double() - right).norm().item(), 2**-8 * right.norm().item())
        assert (got.double() - right).norm() <= allowed
    assert ("fold_over_cols", True, 128) in shown(launched)[1:]


@mr.op
def loss(x: Row["d"], target: Row, w: Col["d"]):
    s = x @ w
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == target, s, 0.0))


@pytest.mark.parametrize(("rows", "cols"), [(300, 200), (129, 65)])
def test_the_row_gradient_of_a_loss(rows, cols, launched, of_few):
    x, w, _, _, _ = (a.cuda() for a in made(rows, cols))
    target, y = torch.arange(rows, device="cuda") % cols, torch.linspace(-1, 1, rows, device="cuda").bfloat16()

    def pulled(engine, dtype):
        leaf = x.to(dtype).requires_grad_()
        with mr.use(engine=engine):
            return torch.autograd.grad(loss(leaf, target, w.to(dtype)), leaf, y.to(dtype))[0]

    got, exact, plain = (
        pulled("triton", torch.bfloat16),
        *(pulled("reference", t) for t in (torch.float64, torch.bfloat16)),
    )
    assert (got.double() - exact).norm() <= max(2 * (plain.double() - exact).norm(), 2**-8 * exact.norm())
    assert shown(launched)[-1] == GROUPED[0]
