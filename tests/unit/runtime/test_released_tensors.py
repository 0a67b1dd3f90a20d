"""What a call leaves behind: nothing that only Python's cycle collector would release.

Gradients that wait in a cycle take memory until the collector happens to run, which counts objects, not bytes.
"""

import contextlib
import gc
import itertools
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import monoidreduce as mr
from monoidreduce import Col, Row, nn, ops

LENGTHS = itertools.count(31)  # that no other call has: first calls are looked at too


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(torch.tanh(q @ k), v)


def listed_attention(q, k, v):
    starts = torch.arange(len(q) + 1)
    return attention(q, k, v, cols=mr.edges(starts, starts[:-1].flip(0)))


def cross_entropy(x, w, _):
    return ops.linear_cross_entropy(x, w, torch.arange(len(x)))


CALLS = {
    "own op": attention,
    "lists": listed_attention,
    "attention": lambda q, k, v: ops.attention(q, k, v, causal=True),
    "cross entropy": cross_entropy,
    "module": nn.MLP(8, 12).double(),
    "neighbours": lambda x, y, _: ops.knn(x, y, 3).values,
}


def forward_and_backward(call, inputs):
    call(*inputs).square().sum().backward()


def second_derivative(call, inputs):
    found = torch.autograd.grad(call(*inputs).square().sum(), inputs, create_graph=True, allow_unused=True)
    sum(g.square().sum() for g in found if g is not None).backward()


def checkpointed(call, inputs):
    checkpoint(call, *inputs, use_reentrant=False).square().sum().backward()


@contextlib.contextmanager
def without_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def live_after(run, call, count=3):
    """How many of its inputs and of their gradients are alive after a run, without the cycle collector."""
    length = next(LENGTHS)

    def start():
        leaves = [torch.randn(length, 8, dtype=torch.float64, requires_grad=True) for _ in range(count)]
        run(call, [x * 1 for x in leaves] if run is checkpointed else leaves)
        return [weakref.ref(t) for x in leaves for t in (x, x.grad) if t is not None]

    checkpointed(torch.add, [torch.ones(2, requires_grad=True)] * 2)  # torch's own imports leave some
    with without_collector():
        return [sum(r() is not None for r in start()) for _ in range(3)]  # planned, recorded, replayed


@pytest.mark.parametrize("engine", ["auto", "eager", "reference"])
@pytest.mark.parametrize("run", [forward_and_backward, second_derivative, checkpointed])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_leaves_no_tensor_to_the_cycle_collector(name, run, engine):
    with mr.use(engine=engine):
        assert live_after(run, CALLS[name], 1 if name == "module" else 3) == [0, 0, 0]


def test_nor_does_a_call_that_is_refused():
    class Difference(mr.Monoid):
        z: mr.Scalar = 0.0

        def combine(a, b):
            return Difference(z=a.z - b.z)

    def refused(_, inputs):
        with contextlib.suppress(mr.MonoidLawError):
            mr.fold(Difference, Difference(z=inputs[0]), 0)

    def over_budget(call, inputs):
        result = call(*inputs).sum()
        with contextlib.suppress(mr.BudgetError), mr.budget("1B"):
            result.backward()

    def wrong_shape(call, inputs):
        with contextlib.suppress(mr.ShapeError):
            call(*inputs[:2], inputs[2][1:])

    for run in (refused, over_budget, wrong_shape):
        assert live_after(run, attention) == [0, 0, 0]
