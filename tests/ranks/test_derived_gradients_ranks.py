"""Monoids that bring no gradient, over ranks: values, gradients and second gradients as in one process."""

import pytest
import torch

from tests.support import own_monoids as own

WORLD = 3


@pytest.mark.parametrize("divided", ["rows", "cols"])
@pytest.mark.parametrize("op", ["product_sum", "both_ways"])
def test_ranks(pool, op, divided):
    args = own.problem(9, 13)  # the last rank has fewer columns
    expected = own.with_gradients(lambda *given: own.plain(op, *given), args, second=True)
    axes = [*own.axes(op), *["rows", "cols", "cols"] * 2]
    answers = pool.run("derived_gradients", WORLD, op, (divided,), args)
    for k, (axis, whole) in enumerate(zip(axes, expected, strict=True)):
        parts = [a[k] for a in answers]
        torch.testing.assert_close(torch.cat(parts) if axis == divided else parts[0], whole)


def test_a_ring_refuses_what_needs_all_pairs(pool):
    answers = pool.run("refused_gradient", WORLD, own.problem(9, 12))
    assert all("Divide rows or columns alone" in answer for answer in answers)
