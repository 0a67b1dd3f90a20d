"""Changing tensors in place: results are the user's own, and an input that was changed is torch's error.

Every case has new shapes, so each first call is cold; the calls after it take the cached roads.
"""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce import Col, Row, ops
from tests.support.comparison import flatten, is_float
from tests.support.layers import DIFFERENTIABLE
from tests.support.ready_made_layers import READY

FRESH = itertools.count(67)  # lengths that no other call has
ENGINES = ["auto", "eager", "reference"]
CHANGED = "modified by an inplace operation"


def fresh_op():
    @mr.op
    def several(x: Row["d"], y: Col["d"]):
        s = x @ y
        return mr.softmax_mean(s, y), mr.logsumexp(s), mr.argmax(s)

    return several


def dense_form(x, y):
    s = x @ y.mT
    return torch.softmax(s, -1) @ y, torch.logsumexp(s, -1), s.argmax(-1)


def drawn(features=6):
    return [torch.randn(next(FRESH), features, dtype=torch.float64, requires_grad=True) for _ in range(2)]


def asking(args):
    return [t.clone().requires_grad_() if is_float(t) else t for t in args]


@pytest.mark.parametrize("engine", ENGINES)
def test_results_are_changed_and_differentiated(engine):
    op, args = fresh_op(), drawn()
    mean, log, _ = dense_form(*args)
    wanted = torch.autograd.grad((mean * 2 + 1).sin().sum() + (log - 1).cos().sum(), args)
    with mr.use(engine=engine):
        for _ in range(4):
            mean, log, best = op(*args)
            mean *= 2
            mean += 1
            log -= 1
            best += 1
            loss = mean.sin().sum() + log.cos().sum()
            for keep in (True, False):  # a second backward recomputes the results too
                torch.testing.assert_close(torch.autograd.grad(loss, args, retain_graph=keep), wanted)


@pytest.mark.parametrize("engine", ENGINES)
def test_second_derivatives_of_changed_results(engine):
    args = drawn()

    def second(f):
        y = f(*args)[0]
        y.mul_(2)
        first = torch.autograd.grad(y.sin().sum(), args, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), args)

    with mr.use(engine=engine):
        torch.testing.assert_close(second(fresh_op()), second(dense_form))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("engine", ["auto", "eager"])
@pytest.mark.parametrize("ready", READY, ids=repr)
def test_results_of_layers_are_changed(ready, engine):
    rows = next(FRESH)
    sample = dict(ready.samples()[len(ready.factors) % 7]) | {"size": (rows, rows + 4)}
    args, options = ready.make(sample, 5)
    with mr.use(engine=engine):
        for _ in range(3):
            for y in flatten(ready.ours(*asking(args), **options)):
                y += 1


@pytest.mark.parametrize("engine", ["auto", "eager"])
def test_results_of_ops_are_changed(engine):
    with mr.use(engine=engine):
        for layer in DIFFERENTIABLE[::3]:
            for y in flatten(layer.op(*asking(layer.args(next(FRESH), 33, 3)))):
                y.mul_(2) if y.dtype is not torch.bool else y.logical_not_()


@pytest.mark.parametrize("engine", ENGINES)
def test_results_without_gradients_meet_ones_with(engine):
    """A view that was made under no_grad could not be changed where gradients are on."""
    op, (x, y) = fresh_op(), [t.detach() for t in drawn()]
    with mr.use(engine=engine):
        for off in (torch.no_grad(), torch.enable_grad()):
            with off:
                mean, log, _ = op(x, y)
            weight = torch.ones(len(x), dtype=x.dtype, requires_grad=True)
            log += weight
            mean *= weight.unsqueeze(-1)
            (log.sum() + mean.sum()).backward()
            torch.testing.assert_close(weight.grad, 1 + dense_form(x, y)[0].sum(-1))


@pytest.mark.parametrize("engine", ENGINES)
def test_results_are_no_memory_of_inputs_or_each_other(engine):
    @mr.op
    def passed(x: Row["d"], y: Col["d"], b: Row):
        total = mr.sum(x @ y)
        return x * 1, total, mr.sum(x @ y), x[0], b

    x, y = (t.detach() for t in drawn())
    b = torch.randn(len(x), dtype=x.dtype)
    before = x.clone(), b.clone()
    with mr.use(engine=engine):
        found = passed(x, y, b)
        wanted = [t.clone() for t in found]
        for k, t in enumerate(found):
            t += k + 1
    for k, (t, want) in enumerate(zip(found, wanted, strict=True)):
        torch.testing.assert_close(t, want + k + 1)
    torch.testing.assert_close((x, b), before)


@pytest.mark.parametrize("engine", ENGINES)
def test_results_that_are_the_same_for_a_whole_batch(engine):
    @mr.op
    def partly(x: Row["d"], y: Col["d"], b: Row):
        return mr.sum(x @ y), torch.tanh(b), mr.num_cols * 2

    x, y, b = torch.randn(3, next(FRESH), 4), torch.randn(next(FRESH), 4), torch.randn(next(FRESH) - 2)
    with mr.use(engine=engine):
        for t in partly(x, y, b):
            t += torch.arange(3).view(3, *(1,) * (t.dim() - 1))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("changed", [0, 1])
def test_an_input_that_was_changed_is_an_error(engine, changed):
    op, args = fresh_op(), [t * 1 for t in drawn()]
    layer = functools.partial(ops.attention, scale=1.0)
    with mr.use(engine=engine):
        for call in (lambda x, y: op(x, y)[0], lambda x, y: layer(x, y, y)):
            for _ in range(4):
                y = call(*args)
                with torch.no_grad():
                    args[changed] += 1
                with pytest.raises(RuntimeError, match=CHANGED):
                    torch.autograd.grad(y.sum(), args)


def test_an_input_and_a_result_that_were_changed_are_an_error():
    op, args = fresh_op(), [t * 1 for t in drawn()]
    y = op(*args)[0]
    y += 1
    with torch.no_grad():
        args[0] += 1
    with pytest.raises(RuntimeError, match=CHANGED):
        y.sum().backward()


def test_losses_whose_gradient_is_taken_in_the_forward():
    """It was taken before the input changed: an error, or right."""
    x, w = (t * 1 for t in drawn(520))
    target = torch.randint(len(w), (len(x),))
    wanted = torch.autograd.grad(2 * F.cross_entropy(x @ w.mT, target), (x, w))
    with mr.use(engine="auto"):
        for _ in range(3):
            loss = ops.linear_cross_entropy(x, w, target)
            loss *= 2
            torch.testing.assert_close(torch.autograd.grad(loss, (x, w)), wanted)
        loss = ops.linear_cross_entropy(x, w, target)
        with torch.no_grad():
            x += 1
        try:
            found = torch.autograd.grad(2 * loss, (x, w))
        except RuntimeError as error:
            assert CHANGED in str(error)
        else:
            torch.testing.assert_close(found, wanted)


def test_results_of_a_stream_are_changed():
    op, (x, y) = fresh_op(), drawn()
    mean, log, _ = dense_form(x, y.detach())
    wanted = torch.autograd.grad((mean * 2).sin().sum() + (log + 1).cos().sum(), x)
    mean, log, _ = op.stream(x).over(mr.chunks(y.detach(), size=20))
    mean *= 2
    log += 1
    torch.testing.assert_close(torch.autograd.grad(mean.sin().sum() + log.cos().sum(), x), wanted)
