"""No batch, no rows, no columns, no features, in kernels."""

import pytest

from tests.support.empty_shape_cases import REDUCTIONS, check, check_layer

KINDS = ["no batch", "no columns", "no features"]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [n for n in REDUCTIONS if n != "monoid"])  # vector fields have no kernel
def test_every_reduction(name):
    for kind in KINDS:
        check(name, "triton", kind)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["attention", "cross_entropy", "gated_mlp", "kernel_sum", "maxsim", "max_pool"])
def test_layers(name):
    for kind in KINDS:
        check_layer(name, "triton", kind)
