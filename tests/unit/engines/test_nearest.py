"""Branch and bound finds what all pairs give, bit for bit: ties, infinities, NaN, batches and both directions."""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce import Col, Row, ops
from monoidreduce.engines.eager import branch_and_bound
from monoidreduce.plan.schedule import Choice, follow
from monoidreduce.reductions.best import first_best


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"KEPT_BLOCK": 8, "FOLDED_BLOCK": 4, "FIRST_POINTS": 8, "GROWTH": 2, "HEAP_RATIO": 2}.items():
        monkeypatch.setattr(branch_and_bound, name, value)


@contextmanager
def from_points(least: int) -> Iterator[None]:
    before, branch_and_bound.MIN_POINTS = branch_and_bound.MIN_POINTS, least
    try:
        with mr.use(engine="eager"):
            yield
    finally:
        branch_and_bound.MIN_POINTS = before


def both(call: Callable[[], Any]) -> tuple[Any, Any, mr.Tally]:
    """A call with branch and bound, the same with all pairs, and what the first has computed."""
    with from_points(1), mr.tally() as seen:
        found = call()
    with from_points(10**9):
        return found, call(), seen


@mr.op
def named(x: Row["d"], y: Col["d"], k: int, scale: float):
    square = mr.sqdist(x, y)
    return {
        "largest": mr.topk(-square * scale, k).values,
        "decayed": mr.topk(1 / square, k).indices,
        "near": mr.min(torch.where(square > 0.5, torch.inf, square)),
        "who": mr.argmax(-torch.sqrt(square) / scale),
        "rows": mr.argmin(square, over="rows"),
    }


@mr.op
def cancelled(x: Row["d"], y: Col["d"], w: Col):
    return mr.min(mr.sqdist(x, y) - w)


def points(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(math.prod(shape))).to(dtype)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("features", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("sizes", [(1, 1), (59, 111), (257, 129)])
def test_neighbours_are_those_of_all_pairs(sizes: tuple[int, int], features: int) -> None:
    x, y = points(sizes[0], features), points(sizes[1], features)
    for metric in ("euclidean", "sqeuclidean"):
        found, expected, _ = both(lambda metric=metric: ops.knn(x, y, min(5, sizes[1]), metric=metric))
        assert torch.equal(found.values, expected.values) and torch.equal(found.indices, expected.indices)
        found, expected, _ = both(lambda metric=metric: ops.kmeans_assign(x, y, metric=metric))
        assert torch.equal(found.values, expected.values) and torch.equal(found.indices, expected.indices)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_type(dtype: torch.dtype) -> None:
    x, y = points(150, 3, dtype=dtype), points(203, 3, dtype=dtype)
    found, expected, seen = both(lambda: ops.knn(x, y, 3))
    assert torch.equal(found.values, expected.values)
    assert seen.pairs_computed + seen.pairs_skipped == 150 * 203 and seen.pairs_skipped > 0


def test_far_pairs_are_not_computed() -> None:
    x, y = points(700, 2), points(900, 2)
    _, _, seen = both(lambda: ops.knn(x, y, 4))
    assert seen.pairs_computed < 0.2 * 700 * 900
    _, _, seen = both(lambda: ops.chamfer(x, y))
    assert seen.pairs_computed < 0.2 * 2 * 700 * 900


def test_the_first_of_equals() -> None:
    """Points of a lattice: every distance is met many times, and points stand twice."""
    lattice = torch.cartesian_prod(*[torch.arange(6.0)] * 3)
    y = torch.cat([lattice, lattice])[torch.randperm(432, generator=torch.Generator().manual_seed(0))]
    x = lattice + 0.5
    found, expected, _ = both(lambda: ops.kmeans_assign(x, y))
    assert torch.equal(found.indices, expected.indices) and torch.equal(found.values, expected.values)
    assert torch.equal(expected.indices, (x[:, None] - y).square().sum(-1).argmin(-1))
    found, expected, _ = both(lambda: ops.knn(x, y, 20))
    assert torch.equal(found.values, expected.values)
    assert torch.equal((x[:, None] - y[found.indices]).norm(dim=-1), found.values)


def test_any_number_that_a_distance_bounds() -> None:
    x, y = points(120, 3), points(160, 3)
    found, expected, seen = both(lambda: named(x, y, 4, 0.3))
    assert all(torch.equal(found[n], expected[n]) for n in expected)
    assert seen.pairs_skipped > 0


def test_what_rounding_decides_is_left_alone() -> None:
    x, y, w = points(90, 2), points(70, 2), 1e8 + points(70)
    found, expected, seen = both(lambda: cancelled(x, y, w))
    assert torch.equal(found, expected) and seen.pairs_computed == 90 * 70


@pytest.mark.sampled(3)
@pytest.mark.parametrize("side", ["x", "y", "both"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e30])
def test_points_without_a_place(wrong: float, side: str) -> None:
    x, y = points(130, 3), points(140, 3)
    for t, name in ((x, "x"), (y, "y")):
        if side in (name, "both"):
            t[17, 1] = t[55] = wrong
    for call in (lambda: ops.knn(x, y, 6), lambda: ops.knn(x, y, 140), lambda: ops.kmeans_assign(x, y)):
        found, expected, _ = both(call)
        assert torch.equal(found.values.nan_to_num(-1), expected.values.nan_to_num(-1))
        seen = expected.values.isfinite()
        assert torch.equal(found.indices[seen], expected.indices[seen])
    found, expected, _ = both(lambda: ops.kmeans_assign(x, y))
    assert torch.equal(found.indices, expected.indices)


@mr.op
def closeness(x: Row["d"], y: Col["d"], k: int):
    return mr.topk(1 / mr.sqdist(x, y), k).values


def test_infinitely_far_is_not_worst() -> None:
    x, y = points(100, 2), torch.cat([points(6, 2), torch.full((100, 2), 1e30)])
    found, expected, _ = both(lambda: closeness(x, y, 9))
    assert torch.equal(found, expected) and (found[:, 6:] == 0).all()


@pytest.mark.parametrize("make", [torch.zeros, torch.ones])
def test_all_in_one_place(make: Callable[..., Tensor]) -> None:
    found, expected, _ = both(lambda: ops.kmeans_assign(make(70, 3), make(90, 3)))
    assert torch.equal(found.indices, expected.indices) and torch.equal(found.values, expected.values)


def test_batches_options_and_strides() -> None:
    x, y = points(2, 1, 3, 90).mT, points(1, 3, 110, 3)
    lengths = torch.tensor([[110, 60, 0], [1, 90, 17]])
    calls = (
        lambda: ops.knn(x, y, 4),
        lambda: ops.knn(y, y, 4, exclude_self=True),
        lambda: ops.chamfer(x.expand(2, 3, 90, 3), y.expand(2, 3, 110, 3), y_lengths=lengths, points="sum"),
    )
    for call in calls:
        found, expected, _ = both(call)
        for a, b in zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]:
            assert torch.equal(a, b)


def test_gradients_go_to_the_neighbours() -> None:
    x, y = points(60, 2, dtype=torch.float64).requires_grad_(), points(50, 2, dtype=torch.float64).requires_grad_()
    found, expected, _ = both(lambda: torch.autograd.grad(ops.knn(x, y, 3).values.square().sum(), (x, y)))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    with from_points(1):
        assert torch.autograd.gradcheck(lambda x, y: ops.chamfer(x, y), (x[:9], y[:7]))


def test_an_order_keeps_points_together() -> None:
    flat = torch.rand(4096, 3, generator=torch.Generator().manual_seed(1)) * torch.tensor([100.0, 1.0, 1.0])
    order = branch_and_bound.sort_into_blocks(flat, 32)
    assert torch.equal(order.sort().values, torch.arange(4096))
    long = flat[order].view(-1, 32, 3)
    assert (long.amax(1) - long.amin(1))[:, 0].mean() < 5.0


def test_a_budget_is_kept() -> None:
    x, y = points(300, 3), points(300, 3)
    with from_points(1), mr.budget("1MB"), mr.tally() as seen:
        ops.knn(x, y, 3)
    assert seen.pairs_computed == 300 * 300


@pytest.mark.parametrize("kind", ["random", "ties", "nan", "worst", "whole", "alike"])
@pytest.mark.parametrize("size", [1023, 1024, 1055, 2047])
def test_a_place_found_by_runs_is_the_first(size: int, kind: str) -> None:
    for dim, largest in itertools.product((-1, -2), (True, False)):
        x = points(2, 5, size) if dim == -1 else points(2, size, 5)
        made = {
            "random": x,
            "ties": (2 * x).round(),
            "nan": torch.where(x > 2.9, math.nan, x),
            "worst": torch.full_like(x, -math.inf if largest else math.inf),
            "whole": (3 * x).long(),
            "alike": x[:1, :1, :1].expand(x.shape),
        }[kind]
        expected = (made.argmax if largest else made.argmin)(dim, keepdim=True)
        assert torch.equal(first_best(made, dim, largest), expected)


def test_small_tiles_are_filled() -> None:
    x, y = points(300, 3), points(300, 3)
    found, expected, _ = both(lambda: ops.knn(x, y, 3))
    with from_points(1), mr.use(engine="auto"), follow(Choice("flash", (("tile", (1, 3, 3)),))):
        assert torch.equal(ops.knn(x, y, 3).values, expected.values)
    assert torch.equal(found.values, expected.values)
