"""The kernel that searches a tree of boxes, in Triton's interpreter, beside all pairs in plain torch."""

import pytest
import torch

from monoidreduce.engines.common.point_tree import build_in_torch
from monoidreduce.engines.triton.kernels import point_search


@pytest.mark.parametrize("excluded", [None, 0])
def test_the_kernel_finds_the_first_of_the_nearest(excluded):
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(0, 30, (700, 2), generator=draw).float()
    y[5], y[9, 0] = float("nan"), float("inf")
    x = torch.cat([y[:3], torch.rand(2, 2, generator=draw) * 40, torch.full((1, 2), float("nan"))])
    square = (x[:, None] - y).square().sum(-1)
    if excluded is not None:
        square[torch.arange(len(x)), torch.arange(len(x))] = torch.inf
    expected = square.sort(dim=-1, stable=True)
    values, places = point_search.search(build_in_torch(y), x, 12, excluded)
    torch.testing.assert_close(values, expected.values[:, :12], equal_nan=True)
    near = values.isfinite()
    assert torch.equal(places[near], expected.indices[:, :12][near])
    assert (places[values.isposinf()] == -1).all()


def test_fewer_points_than_a_block():
    y = torch.tensor([[0.0], [2.0], [1.0]])
    values, places = point_search.search(build_in_torch(y), torch.tensor([[0.4]]), 3)
    assert places.tolist() == [[0, 2, 1]] and torch.allclose(values, torch.tensor([[0.16, 0.36, 2.56]]))
