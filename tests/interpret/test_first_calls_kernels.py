"""First calls by generated kernels: checkpoints, and tensors that are changed in place. Shapes and ops are new.

``by_address`` launches kernels as on a GPU, so that calls are replayed from tapes."""

import functools
import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import monoidreduce as mr
from monoidreduce import Col, Row, ops

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FRESH = itertools.count(5)  # lengths that no other call has


@pytest.fixture(autouse=True)
def kernels():
    with mr.use(engine="triton"):
        yield


def one_pass():
    @mr.op
    def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
        return mr.softmax_mean(q @ k * 0.25, v)

    return attention


def two_passes():
    @mr.op
    def normalised(q: Row["f"], k: Col["f"], v: Col["d"]):
        s = q @ k * 0.25
        return mr.sum(torch.exp(s - mr.logsumexp(s)) * v)

    return normalised


FORMS = {"one pass": one_pass, "two passes": two_passes, "layer": lambda: functools.partial(ops.attention, scale=0.25)}


def dense(q, k, v):
    return torch.softmax(q @ k.mT * 0.25, -1) @ v


def drawn():
    rows, cols = next(FRESH), next(FRESH)
    return [torch.randn(n, f, requires_grad=True) for n, f in ((rows, 16), (cols, 16), (cols, 4))]


def backward(y, args):
    return torch.autograd.grad(y.sin().sum(), args)


def assert_close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_first_call_in_a_checkpoint(form, by_address):
    for _ in range(2):  # a new length, a new kernel
        op, args = FORMS[form](), drawn()
        wanted = backward(dense(*args), args)
        assert_close(backward(checkpoint(op, *args, use_reentrant=False), args), wanted)
        for t in args:
            t.grad = None
        args = drawn()
        wanted = backward(dense(*args), args)
        checkpoint(op, *args, use_reentrant=True).sin().sum().backward()
        assert_close([t.grad for t in args], list(wanted))


@pytest.mark.parametrize("form", FORMS)
def test_calls_save_the_same(form, by_address):
    op, args, saved = FORMS[form](), drawn(), []

    def pack(t):
        saved[-1].append((tuple(t.shape), t.dtype))
        return t

    for _ in range(4):
        saved.append([])
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            op(*args)
    assert saved[0] and all(found == saved[0] for found in saved)


@pytest.mark.parametrize("form", FORMS)
def test_results_are_changed_and_differentiated(form, by_address):
    op, args = FORMS[form](), drawn()
    wanted = backward(dense(*args) * 2 + 1, args)
    for _ in range(2):
        y = op(*args)
        y *= 2
        y += 1
        loss = y.sin().sum()
        for keep in (True, False):
            assert_close(torch.autograd.grad(loss, args, retain_graph=keep), wanted)


@pytest.mark.parametrize("form", FORMS)
def test_an_input_that_was_changed_is_an_error(form, by_address):
    op, args = FORMS[form](), [t * 1 for t in drawn()]
    for changed in (0, 1, 2):
        y = op(*args)
        with torch.no_grad():
            args[changed] += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            backward(y, args)
