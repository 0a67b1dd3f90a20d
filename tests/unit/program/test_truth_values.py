"""Truth values in arithmetic are what torch makes of them, on every engine; and a top-k's values are a row's vector."""

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce import Col, Row

ENGINES = ["reference", "eager", "panel", "auto"]

ARITHMETIC = {
    "c * c": lambda c, d: c * c,
    "c * d": lambda c, d: c * d,
    "c + c": lambda c, d: c + c,
    "c + d": lambda c, d: c + d,
    "c + 1": lambda c, d: c + 1,
    "2 * c + d": lambda c, d: 2 * c + d,
    "c * 0.5": lambda c, d: c * 0.5,
    "c * True": lambda c, d: c * True,
    "c / 2": lambda c, d: c / 2,
    "square": lambda c, d: torch.square(c),
    "c ** 2": lambda c, d: c**2,
    "minimum": lambda c, d: torch.minimum(c, d),
    "maximum": lambda c, d: torch.maximum(c, d),
    "sign": lambda c, d: torch.sign(c),
    "c & d": lambda c, d: c & d,
    "c ^ d": lambda c, d: c ^ d,
    "~c": lambda c, d: ~c,
    "c < d": lambda c, d: c < d,
    "where": lambda c, d: torch.where(c, d, 1),
    "c * int": lambda c, d: c * (d + 1),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic(name, engine):
    f = ARITHMETIC[name]

    @mr.op
    def layer(x: Row["d"], y: Col["d"]):
        s = x @ y
        value = f(s > 0, s < 1)
        return mr.sum(value), mr.max(value), mr.sum(value * s)

    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    s = x @ y.T
    value = f(s > 0, s < 1)
    with mr.use(engine=engine):
        found = layer(x, y)
    right = value.sum(1), value.amax(1), (value * s).sum(1)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a.double(), b.double())
    assert found[0].is_floating_point() == right[0].is_floating_point()


@pytest.mark.parametrize("engine", ENGINES)
def test_outside_of_pairs(engine):
    @mr.op
    def layer(x: Row["d"], y: Col["d"]):
        many = mr.sum(x @ y) > 0
        few = mr.any(x @ y > 1)
        return many * few, many + few, many * 2 + few, many * many

    x, y = torch.randn(8, 3), torch.randn(6, 3)
    many, few = (x @ y.T).sum(1) > 0, (x @ y.T > 1).any(1)
    with mr.use(engine=engine):
        found = layer(x, y)
    for a, b in zip(found, (many * few, many + few, many * 2 + few, many * many), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize(
    "f", [lambda c: c - c, lambda c: 1 - c, lambda c: c - 0.5, lambda c: -c, lambda c: abs(c), lambda c: c // c]
)
def test_what_torch_refuses(f):
    with pytest.raises((RuntimeError, TypeError)):
        f(torch.tensor([True, False]))

    @mr.op
    def layer(x: Row["d"], y: Col["d"]):
        return mr.sum(f(x @ y > 0))

    with pytest.raises(mr.TraceError, match=r"truth value"):
        layer(torch.ones(2, 3), torch.ones(4, 3))


OF_TOPK = {
    "softmax": lambda b: torch.softmax(b, -1),
    "F.softmax": lambda b: F.softmax(b, dim=-1),
    "log_softmax": lambda b: b.log_softmax(-1),
    "logsumexp": lambda b: torch.logsumexp(b, -1),
    "sum": lambda b: b.sum(-1),
    "mean": lambda b: b.mean(-1),
    "amax": lambda b: b.amax(-1),
    "exp": torch.exp,
    "comparison": lambda b: torch.where(b > 0.5, b, 0.0),
    "norm": lambda b: b.norm(dim=-1),
    "normalize": lambda b: F.normalize(b, dim=-1),
    "weights": lambda b: b / b.sum(-1, keepdim=True),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", OF_TOPK)
def test_the_values_of_a_topk_are_a_vector(name, engine):
    f = OF_TOPK[name]

    @mr.op
    def layer(x: Row["d"], y: Col["d"]):
        return f(mr.topk(x @ y, 5).values)

    x, y = (torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (4, 9))
    right = f(torch.topk(x @ y.T, 5).values)
    with mr.use(engine=engine):
        value = layer(x, y)
        slopes = torch.autograd.grad(value.square().sum(), [x, y])
    torch.testing.assert_close(value, right)
    for a, b in zip(slopes, torch.autograd.grad(right.square().sum(), [x, y]), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("letter", ["k", 5])
def test_a_topk_meets_vectors_of_its_size(letter, engine):
    @mr.op
    def layer(x: Row["d"], y: Col["d"], w: Row[letter], u: Col[letter]):
        best = torch.softmax(mr.topk(x @ y, 5).values, -1)
        return best * w, best @ w, mr.sum(torch.tanh(best @ u))

    x, y, w, u = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((4, 3), (9, 3), (4, 5), (9, 5)))
    best = torch.softmax(torch.topk(x @ y.T, 5).values, -1)
    right = best * w, (best * w).sum(1), torch.tanh(best @ u.T).sum(1)
    with mr.use(engine=engine):
        found = layer(x, y, w, u)
        slopes = torch.autograd.grad(sum(v.square().sum() for v in found), [x, y, w, u])
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(slopes, torch.autograd.grad(sum(v.square().sum() for v in right), [x, y, w, u]), strict=True):
        torch.testing.assert_close(a, b)


def test_a_topk_of_another_size_is_refused():
    @mr.op
    def layer(x: Row["d"], y: Col["d"], w: Row["k"]):
        return mr.topk(x @ y, 4).values * w

    with pytest.raises(mr.ShapeError, match=r"4 .* 5"):
        layer(torch.zeros(2, 3), torch.zeros(9, 3), torch.zeros(2, 5))

    @mr.op
    def fixed(x: Row["d"], y: Col["d"], w: Row[5]):
        return mr.topk(x @ y, 4).values * w

    with pytest.raises(mr.ShapeError):
        fixed(torch.zeros(2, 3), torch.zeros(9, 3), torch.zeros(2, 5))
