"""Bodies of many operations: every step from the body to its gradient takes time linear in them.

Written out as text, an expression whose subexpressions are shared is exponentially long, and a long chain is deeper
than Python's stack: each body here would never end, or raise RecursionError, if one pass walked it as a tree.
"""

import time

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.program.lower import digest_fold

STEPS = 80


def chain(s, steps):
    for _ in range(steps):
        s = torch.sin(s) + 0.001 * s
    return s


def chebyshev(s, degree):
    before, now = 1.0, s
    for _ in range(degree - 1):
        before, now = now, 2 * s * now - before
    return now


def recurrence(a, b, step, steps=STEPS):
    for k in range(steps):
        a, b = b, step(a, b, k)
    return b


def sums_of_chain(x: Row["d"], y: Col["d"], w: Col):
    return mr.sum(chain(x @ y, STEPS))


def logarithm_of_products(x: Row["d"], y: Col["d"], w: Col):
    s = torch.tanh(x @ y)
    return mr.logsumexp(recurrence(s, s * w, lambda a, b, k: torch.sin(a * b) + s))


def products_alone(x: Row["d"], y: Col["d"], w: Col):
    s = torch.tanh(x @ y)
    return mr.sum(recurrence(s, s * w, lambda a, b, k: a * b))


def vectors_per_pair(x: Row["d"], y: Col["d"], w: Col):
    v = x * y
    return mr.sum(recurrence(v, v - x, lambda a, b, k: torch.tanh(0.1 * v * b) - a, 40).sum())


def linear_vectors(x: Row["d"], y: Col["d"], w: Col):
    return mr.sum(recurrence(x * y, x - y, lambda a, b, k: 0.9 * b - 0.5 * a).sum())


def one_feature(x: Row["d"], y: Col["d"], w: Col):
    return mr.sum(recurrence(x * y, x - y, lambda a, b, k: 0.9 * b - 0.5 * a)[0])


def masks_of_zeros(x: Row["d"], y: Col["d"], w: Col):
    s = x @ y
    for k in range(STEPS):
        s = torch.where(mr.col_index + k >= mr.row_index, s * 1.001, 0.0)
    return mr.sum(s)


def masks_of_infinities(x: Row["d"], y: Col["d"], w: Col):
    s = x @ y
    for k in range(STEPS):
        s = torch.where(mr.col_index + k >= mr.row_index, s, -torch.inf)
    return mr.logsumexp(s)


def labels(x: Row["d"], y: Col["d"], w: Col):
    s = x @ y
    hot = torch.where(mr.col_index == mr.row_index, s, 0.0)
    return mr.sum(recurrence(hot, s, lambda a, b, k: 0.9 * b - 0.5 * a))


def conjunction(x: Row["d"], y: Col["d"], w: Col):
    near = mr.col_index == mr.row_index
    for k in range(STEPS):
        near = near & (mr.col_index + k >= mr.row_index)
    return mr.sum(torch.where(near, x @ y, 0.0))


def arithmetic_on_an_index(x: Row["d"], y: Col["d"], w: Col):
    least = mr.row_index
    for k in range(STEPS):
        least = least + k % 3 - 1
    return mr.sum(torch.where(mr.col_index >= least, x @ y, 0.0))


def on_one_side(x: Row["d"], y: Col["d"], w: Col):
    n = torch.tanh(x.sum())
    n = recurrence(n, n + 1, lambda a, b, k: torch.sin(b) * a + 0.5)
    return mr.sum(x @ y * n) * n


def after_the_reduction(x: Row["d"], y: Col["d"], w: Col):
    n = torch.tanh(mr.sum(x @ y))
    return recurrence(n, n + 1, lambda a, b, k: torch.sin(b) * a + 0.5)


def one_sided_where_a_condition_is_decided(x: Row["d"], y: Col["d"], w: Col):
    s = torch.where(mr.row_index >= 0, w, x @ y)
    return mr.sum(recurrence(s, s + 1, lambda a, b, k: torch.sin(b) + a * 0.5))


def passes(x: Row["d"], y: Col["d"], w: Col):
    total = 0.0
    for _ in range(30):
        total = mr.sum(x @ y * (total * 0.01 + 1))
    return total


BODIES = [
    sums_of_chain,
    logarithm_of_products,
    products_alone,
    vectors_per_pair,
    linear_vectors,
    one_feature,
    masks_of_zeros,
    masks_of_infinities,
    labels,
    conjunction,
    arithmetic_on_an_index,
    on_one_side,
    after_the_reduction,
    one_sided_where_a_condition_is_decided,
    passes,
]


def arguments(body):
    torch.manual_seed(len(body.__name__))
    shapes = (3, 2), (5, 2), (5,)
    return [(torch.randn(s, dtype=torch.float64) / 3).requires_grad_() for s in shapes]


def results(body, engine):
    given = arguments(body)
    with mr.use(engine=engine):
        value = mr.op(body)(*given)
        value.sum().backward()
    return [value.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in given)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_long_bodies_and_their_gradients(body):
    expected = results(body, "reference")
    for engine in ("eager", "auto"):  # so small a case is run dense where the planner is asked
        for found, right in zip(results(body, engine), expected, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("engine", ["reference", "eager", "panel", "auto"])
def test_a_polynomial_of_degree_40_is_what_torch_says(engine):
    @mr.op
    def layer(x: Row["d"], y: Col["d"]):
        return mr.sum(chebyshev(x @ y, 40))

    x, y = (torch.rand(n, 2, dtype=torch.float64) * 0.7 for n in (4, 7))
    x.requires_grad_()
    with mr.use(engine=engine):
        value = layer(x, y)
        (slope,) = torch.autograd.grad(value.sum(), x)
    right = chebyshev(x @ y.T, 40).sum(1)
    torch.testing.assert_close(value, right)
    torch.testing.assert_close(slope, torch.autograd.grad(right.sum(), x)[0])


def test_five_thousand_operations():
    @mr.op
    def layer(x: Row["d"], y: Col["d"]):
        return mr.sum(chain(x @ y, 1700))

    x, y = torch.rand(3, 2, requires_grad=True), torch.rand(4, 2)
    start = time.process_time()
    with mr.use(engine="eager"):
        value = layer(x, y)
        value.sum().backward()
    assert time.process_time() - start < 60  # a few seconds; a tree of it would have 2 ** 1700 nodes
    torch.testing.assert_close(value.detach(), chain(x.detach() @ y.T, 1700).sum(1))
    assert x.grad is not None and x.grad.isfinite().all()


def test_what_is_said_of_a_long_body_is_short():
    @mr.op
    def layer(x: Row["d"], y: Col["d"]):
        return mr.sum(chebyshev(x @ y, 60))

    x, y = torch.rand(3, 2), torch.rand(4, 2)
    program = layer.program(x, y)
    assert digest_fold(program.passes[0].fold)
    assert len(repr(program.outputs[0])) < 300
    assert "1 pass over the pairs" in layer.explain(x, y)
    assert layer.cost(x, y).chosen is not None

    @mr.op
    def unreduced(x: Row["d"], y: Col["d"]):
        return chebyshev(x @ y, 60)

    with pytest.raises(mr.UnreducedError) as error:
        unreduced(x, y)
    assert len(str(error.value)) < 1000


def test_shared_values_in_a_stream():
    @mr.op
    def layer(x: Row["d"], y: Col["d"]):
        return mr.sum(chebyshev(x @ y, 40))

    x, y = torch.rand(3, 2, dtype=torch.float64) / 2, torch.rand(9, 2, dtype=torch.float64)
    with mr.use(engine="eager"):
        found = layer.stream(x).over(mr.chunks(y, size=4))
    torch.testing.assert_close(found, chebyshev(x @ y.T, 40).sum(1))
