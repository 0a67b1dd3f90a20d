"""First derivatives of primitives beside torch's, on special values."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row
from tests.support.special_derivative_cases import BINARY, CHOICES, HARD, INF, NAN, UNARY, check


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
