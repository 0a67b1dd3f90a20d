"""Frozen passes on a GPU: launched again by address, with what a backward needs in one allocation."""

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from benchmarks.measure import captured
from monoidreduce import ops
from monoidreduce.engine import hardware

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),  # warmed up on another stream, as torch asks
]


def drawn(*shapes, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]


def gap(got, want):
    return float((got.detach().cpu().double() - want.detach()).abs().max() / want.detach().abs().max().clamp(min=1e-9))


def assert_same(ours, theirs, args, most):
    """The first time, and frozen, as torch in float64."""
    wide = [a.detach().cpu().double().requires_grad_() for a in args]
    y = theirs(*wide)
    cotangent = torch.randn_like(y)
    wanted = [y, *torch.autograd.grad(y, wide, cotangent)]
    for _ in range(3):
        got = ours(*args)
        found = [got, *torch.autograd.grad(got, args, cotangent.to(got))]
        assert max(map(gap, found, wanted)) < most


@pytest.mark.parametrize("rows", [1, 111, 128])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2), (torch.float64, 1e-12)])
def test_attention(rows, dtype, most):
    args = drawn((2, 3, rows, 64), (2, 3, 70, 64), (2, 3, 70, 64), dtype=dtype)
    assert_same(ops.attention, F.scaled_dot_product_attention, args, most)
    turned = lambda f: lambda *a: f(*(t.transpose(1, 2) for t in a))
    args = drawn((2, rows, 3, 64), (2, 70, 3, 64), (2, 70, 3, 64), dtype=dtype)
    assert_same(turned(ops.attention), turned(F.scaled_dot_product_attention), args, most)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(reduction, smoothing):
    target = torch.randint(0, 513, (64,), device="cuda")
    target[5] = -100
    options = {"reduction": reduction, "label_smoothing": smoothing}
    ours = lambda x, w: ops.cross_entropy(x, w, target, **options)
    theirs = lambda x, w: F.cross_entropy(x @ w.T, target.cpu(), **options)
    assert_same(ours, theirs, drawn((64, 64), (513, 64)), 2e-5)


@pytest.mark.parametrize("count", [1, 1000, 2**16, 2**16 + 1])
def test_the_share_of_a_row(count):
    labels = torch.randint(0, 3, (count,), device="cuda")
    assert torch.equal(hardware.share(labels, 1, torch.float32), (labels != 1).sum().float().reciprocal())


def test_a_captured_graph_is_played_with_other_numbers():
    args = drawn((2, 96, 64), (2, 96, 64), (2, 96, 64), dtype=torch.bfloat16)
    ones = torch.ones(2, 96, 64, device="cuda", dtype=torch.bfloat16)
    step = lambda: torch.autograd.grad(ops.attention(*args), args, ones)
    graph, found = captured(step)
    with torch.no_grad():
        for a in args:
            a.copy_(torch.randn_like(a))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(f, w) for f, w in zip(found, step(), strict=True))


def test_second_derivatives():
    args = drawn((1, 5, 16), (1, 6, 16), (1, 6, 8), dtype=torch.float64)
    for _ in range(2):
        ops.attention(*args)
    assert torch.autograd.gradgradcheck(ops.attention, args, fast_mode=True)


def test_other_streams_and_no_gradients():
    args = drawn((2, 64, 64), (2, 64, 64), (2, 64, 64))
    wanted = ops.attention(*args)
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        found = ops.attention(*args)
    torch.cuda.synchronize()
    assert torch.equal(found, wanted) and not found.requires_grad
    with mr.use(precision="tf32"):
        ops.attention(*args)
    assert torch.equal(ops.attention(*args), wanted)
