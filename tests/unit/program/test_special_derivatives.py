"""First derivatives of primitives beside torch's, on special values."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.program import primitives
from tests.support.special_derivative_cases import BINARY, CHOICES, HARD, INF, NAN, POWERS, UNARY, check, check_norms


@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_number(name):
    check(name, UNARY[name], 1, "eager")


@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_numbers(name):
    check(name, BINARY[name], 2, "eager")


@pytest.mark.parametrize("cotangent", [INF, NAN])
@pytest.mark.parametrize("name", CHOICES)
def test_what_is_not_chosen_has_no_gradient_whatever_the_cotangent(name, cotangent):
    check(name, BINARY[name], 2, "eager", cotangent)


@pytest.mark.parametrize("cotangent", [INF, NAN])
@pytest.mark.parametrize("name", HARD)
def test_what_is_cut_off_has_no_gradient_whatever_the_cotangent(name, cotangent):
    check(name, UNARY[name], 1, "eager", cotangent)


@pytest.mark.parametrize("shared", [False, True])
def test_ties_before_and_from_torch_2_14(monkeypatch, shared):
    """A bound that is a number, ties of bounds that are vectors, and NaN that loses; on any torch (the cases above say
    that the installed one is followed)."""
    monkeypatch.setattr(primitives, "_shares_ties", shared)
    own, half = (0.0, 0.5) if shared else (1.0, 1.0)
    cases = {
        (lambda x, y: x.clamp(min=0.5) + 0 * y, 0.5, 1.0): (own, 0.0),
        (lambda x, y: x.clamp(-1.0, 0.5) + 0 * y, -1.0, 1.0): (own, 0.0),
        (lambda x, y: x.clamp(min=y), 2.0, 2.0): (half, 1 - half),
        (lambda x, y: x.clamp(max=y), 2.0, 2.0): (half, 1 - half),
        (torch.fmax, 2.0, 2.0): (half, 1 - half),
        (torch.fmin, NAN, 2.0): (0.0, 1.0),
        (torch.fmax, 2.0, NAN): (1.0, 0.0),
        (lambda x, y: torch.fmax(x, y).clamp(0.0, 5.0), 2.0, 1.0): (1.0, 0.0),
    }
    for (f, *values), expected in cases.items():
        given = [torch.tensor([v], dtype=torch.float64, requires_grad=True) for v in values]

        @mr.op
        def op(x: Row, y: Col):
            return mr.sum(f(x, y))  # noqa: B023 - called at once

        assert tuple(map(float, torch.autograd.grad(op(*given).sum(), given))) == expected


@pytest.mark.parametrize("engine", ["reference", "eager", "auto"])
def test_a_minimum_with_an_infinite_branch(engine):
    """1 / min(x, y) where the minimum is 0: the cotangent of the minimum is infinite, and the other branch has none."""

    @mr.op
    def op(x: Row, y: Col):
        return mr.sum(1 / torch.minimum(x, y))

    x, y = torch.zeros(2, requires_grad=True), torch.ones(1, requires_grad=True)
    with mr.use(engine=engine):
        grads = torch.autograd.grad(op(x, y).sum(), [x, y])
    assert torch.equal(grads[0], torch.full((2,), -INF)) and torch.equal(grads[1], torch.zeros(1))


@pytest.mark.parametrize("engine", ["reference", "eager"])
@pytest.mark.parametrize("power", POWERS)
def test_norms(power, engine):
    check_norms(engine, power)
    check_norms(engine, power, normalized=True)


def test_the_power_of_a_norm_is_a_choice():
    @mr.op
    def total(x: Row["d"], y: Col["d"], p: float):
        return mr.sum((x - y).norm(p))

    x, y = torch.randn(3, 4), torch.randn(5, 4)
    for p in (0, 1, 3.0, INF):
        torch.testing.assert_close(total(x, y, p), torch.cdist(x, y, p).sum(1))
    with pytest.raises(mr.TraceError, match="p = 'nuc'"):
        mr.op(measure_by("nuc"))(x, y)


def measure_by(p):
    def body(x: Row["d"], y: Col["d"]):
        return mr.sum((x - y).norm(p))

    return body
