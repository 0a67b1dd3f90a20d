"""A label that is arithmetic on the other index (the next token, a reversed axis) reads the place that it names."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row
from tests.support.label_arithmetic_cases import CONDITIONS, arguments, check, dense, op, run


@pytest.mark.sampled(2)
@pytest.mark.parametrize("over", ["cols", "rows"])
@pytest.mark.parametrize("engine", ["reference", "eager", "auto"])
@pytest.mark.parametrize("name", CONDITIONS)
def test_a_gather_reads_the_place_that_the_label_names(name, engine, over):
    with mr.use(engine=engine):
        check(op(name, over), dense(name, over), arguments())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("over", ["cols", "rows"])
@pytest.mark.parametrize("engine", ["eager", "auto"])
@pytest.mark.parametrize("name", CONDITIONS)
def test_the_same_beside_a_logsumexp_of_all_pairs(name, engine, over):
    with mr.use(engine=engine):
        check(op(name, over, whole=True), dense(name, over, whole=True), arguments())


def test_both_ways_in_one_body_with_vectors():
    @mr.op
    def both(x: Row["d"], y: Col["d"]):
        near = mr.col_index == mr.num_cols - 1 - mr.row_index
        return mr.sum(torch.where(near, x @ y, 0.0) * y), mr.sum(torch.where(near, x @ y, 0.0) * x, over="rows")

    x, y = (a.double().requires_grad_() for a in arguments()[:2])
    got = both(x, y)
    hit = torch.arange(11) == 10 - torch.arange(7).unsqueeze(-1)
    s = torch.where(hit, x @ y.mT, 0.0)
    expected = s @ y, s.mT @ x
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    mine, plain = (torch.autograd.grad(sum((v * v).sum() for v in vs), [x, y]) for vs in (got, expected))
    torch.testing.assert_close(mine, plain)


def test_second_derivatives():
    x, y, *rest = arguments(torch.float64)
    one = op("reversed", whole=True)
    torch.autograd.gradgradcheck(lambda x, y: one(x, y, *rest), (x.requires_grad_(), y.requires_grad_()))


def test_under_vmap():
    x, y, step, own, shift = arguments()
    got = torch.vmap(lambda x, y, own, shift: op("batch offset")(x, y, step, own, shift))(x, y, own, shift)
    torch.testing.assert_close(got, dense("batch offset")(x, y, step, own, shift))


def test_compiled():
    one, args = op("next", whole=True), arguments()
    compiled = torch.compile(lambda *given: one(*given), backend="aot_eager")
    check(compiled, dense("next", whole=True), args)


@pytest.mark.parametrize("name", ["next", "reversed", "batch offset", "column names row"])
def test_columns_that_come_in_chunks(name):
    x, y, step, own, shift = arguments()
    expected = run(dense(name), [x, y, step, own, shift])
    given = x.clone().requires_grad_()
    found = {}
    source = [{"y": part} for part in y.split(4, dim=1)]
    stream = op(name).stream(x=given, step=step, own=own, shift=shift)
    value = stream.over(source, gradients=lambda at, grads: found.__setitem__(at, grads["y"]))
    weight = torch.linspace(-1, 2, value.numel()).view(value.shape)
    (value * weight).sum().backward()
    got = [value.detach(), given.grad, torch.cat([found[k] for k in sorted(found)], 1)]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ["eager", "panel", "auto", "reference"])
def test_a_pair_that_is_broadcast_is_read_where_the_label_points(engine):
    """One number of a pair tensor may stand for all rows, or for all columns."""

    @mr.op
    def op(x: mr.Row["f"], p: mr.Pair):
        met = mr.row_index == mr.num_cols - mr.col_index
        return mr.sum(torch.where(met, p, 0.0), over="rows"), mr.sum(torch.where(met, p, 0.0))

    x, rows, cols = torch.zeros(4, 1), torch.arange(4)[:, None], torch.arange(3)[None, :]
    for p in (torch.randn(1, 3), torch.randn(4, 1).expand(4, 3), torch.randn(4, 3)):
        dense = torch.where(rows == 3 - cols, p, 0.0)
        with mr.use(engine=engine):
            found = op(x, p)
        torch.testing.assert_close(found, (dense.sum(0), dense.sum(1)))
