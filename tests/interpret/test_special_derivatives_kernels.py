"""First derivatives of primitives beside torch's, on special values, in kernels."""

import pytest

from tests.support.special_derivative_cases import BINARY, INF, UNARY, check, check_norms


@pytest.mark.parametrize("name", ["relu", "clamp", "hardtanh", "cosh", "logit", "x ** 0", "x ** 3", "0.0 ** x"])
def test_functions_of_one_number(name):
    check(name, UNARY[name], 1, "triton")


@pytest.mark.parametrize("name", ["minimum", "maximum", "pow", "xlogy", "clamp from below"])
def test_functions_of_two_numbers(name):
    check(name, BINARY[name], 2, "triton", few=True)


@pytest.mark.parametrize("name", ["minimum", "maximum"])
def test_what_is_not_chosen_has_no_gradient_whatever_the_cotangent(name):
    check(name, BINARY[name], 2, "triton", INF, few=True)


@pytest.mark.parametrize("power", [2, 3, 0.5, -1])
def test_norms(power):
    check_norms("triton", power)
