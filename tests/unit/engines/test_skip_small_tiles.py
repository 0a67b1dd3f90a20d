"""Tiles of a gradient that are left out: which, how far the gradient is off, and that nobody gets it unasked."""

import contextlib
import threading

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.engines.common import skip_small_tiles
from tests.support import internals
from tests.support.allocations import usage

BOUND = 2.0**-12
ENGINES = ["eager", "panel"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Tiles of 8 × 8, and features that count as wide."""
    monkeypatch.setattr(skip_small_tiles, "TILE", 8)
    internals.set_panel_sizes(monkeypatch, NARROW=0, MIN_ROWS=1)


@mr.op
def planted(x: Row["d"], y: Col["d"], a: Row, b: Col, weak: float):
    """Σ_j k_ij ⟨x, y_j⟩, where k is 1 for rows and columns that are both marked, else weak."""
    return mr.sum(torch.where(a * b > 0, 1.0, weak) * (x @ y))


@mr.op
def head(x: Row["d"], w: Col["d"], target: Row):
    s = x @ w
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == target, s, 0.0))


def problem(m, n, d=5, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    w, target = torch.randn(n, d, dtype=torch.float64), torch.randint(n, (m,))
    x = w[target] * 4 + torch.randn(m, d, dtype=torch.float64)
    return x.to(dtype), w.to(dtype), target


def pulled(function, x, y, g=1.0):
    """A value and its gradients by two tensors, for a cotangent of g in every result."""
    given = [t.detach().requires_grad_() for t in (x, y)]
    value = function(*given)
    return value.detach(), *torch.autograd.grad(value, given, torch.full_like(value, g))


@pytest.mark.parametrize("g", [1.0, 1000.0, 1e-4])
@pytest.mark.parametrize("engine", ENGINES)
def test_planted_tiles_are_counted_and_kept(engine, g):
    """Two runs of 8 rows of five, three of columns of six (the last ones ragged) are marked: 6 of 30 tiles, twice."""
    x, y = torch.randn(37, 5, dtype=torch.float64), torch.randn(43, 5, dtype=torch.float64)
    a, b = torch.zeros(37, dtype=torch.float64), torch.zeros(43, dtype=torch.float64)
    a[[3, 36]], b[[0, 9, 15, 42]] = 1.0, 1.0
    weak = 2.0**-14
    with mr.use(engine=engine):
        exact = pulled(lambda x, y: planted(x, y, a, b, weak), x, y, g)
        with mr.skip_below(BOUND) as skipped:
            got = pulled(lambda x, y: planted(x, y, a, b, weak), x, y, g)
    assert skipped.tiles == 60 and skipped.kept == pytest.approx(6 / 30)  # whatever the loss is multiplied by
    rows, cols = (t.nonzero().squeeze(1).div(8, rounding_mode="floor").unique() for t in (a, b))
    seen = torch.isin(torch.arange(37) // 8, rows)[:, None] & torch.isin(torch.arange(43) // 8, cols)[None, :]
    c = torch.where(a[:, None] * b > 0, 1.0, weak).double() * seen * g
    for found, wanted in zip(got, (exact[0], c @ y, c.mT @ x), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("size", [(59, 111), (1, 300), (128, 129)], ids=str)
@pytest.mark.parametrize("summed", [False, True], ids=["a row each", "summed"])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_error_is_below_its_bound(engine, summed, size):
    """Values are the same numbers; gradients lack terms below the threshold, and no others."""
    x, w, target = problem(*size)
    loss = (lambda x, w: head.total(x, w, target)) if summed else (lambda x, w: head(x, w, target))
    with mr.use(engine=engine):
        value, dx, dw = pulled(loss, x, w, 3.0)
        with mr.skip_below(BOUND) as skipped:
            same, ex, ew = pulled(loss, x, w, 3.0)
    assert torch.equal(value, same) and skipped.tiles and (size[0] == 1 or 0 < skipped.kept < 1)
    t = 3.0 * BOUND  # |softmax - label| is at most 1
    assert ((dx - ex).abs() < t * w.abs().sum(0) + 1e-12).all()
    assert ((dw - ew).abs() < t * x.abs().sum(0) + 1e-12).all()
    assert size[0] == 1 or not torch.equal(dx, ex)


@pytest.mark.parametrize("engine", ENGINES)
def test_off_by_default_and_where_nothing_is_small(engine):
    """Without it, or with a bound below every cotangent, all tiles are contracted: the same gradients."""
    x, w, target = problem(59, 111)
    with mr.use(engine=engine):
        exact = pulled(lambda x, w: head(x, w, target), x, w)
        with mr.skip_below(1e-300) as skipped:
            got = pulled(lambda x, w: head(x, w, target), x, w)
        assert skip_small_tiles.requested() is None
        again = pulled(lambda x, w: head(x, w, target), x, w)
    assert skipped.kept == 1.0 and skipped.tiles == 2 * 8 * 14
    for a, b, c in zip(exact, got, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
        assert torch.equal(a, c)


def test_a_backward_keeps_the_bound_of_its_forward():
    """Also in another thread, as torch's own for a GPU; and one outside of any block keeps none."""
    x, w, target = problem(59, 111)
    x.requires_grad_()
    with mr.use(engine="panel"):
        with mr.use(skip_below=BOUND):
            inside = head(x, w, target).sum()
        outside = head(x, w, target).sum()
    found = []
    for loss in (inside, outside):
        x.grad = None
        thread = threading.Thread(target=loss.backward)
        with contextlib.nullcontext() if loss is inside else mr.skip_below(0.5):
            thread.start()
            thread.join()
        found.append(x.grad)
    exact = (torch.softmax(x @ w.T, -1) - torch.nn.functional.one_hot(target, 111)) @ w
    torch.testing.assert_close(found[1], exact.detach())
    assert not torch.allclose(found[0], found[1], rtol=1e-9)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_beside_an_infinite_cotangent_nothing_is_small(value):
    x, w, target = problem(24, 40)
    g = torch.ones(24, dtype=torch.float64)
    g[5] = value
    with mr.use(engine="panel"), mr.skip_below(BOUND) as skipped:
        given = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(head(given, w, target), given, g)
    assert skipped.kept == 1.0
    exact = (torch.softmax(x @ w.T, -1) - torch.nn.functional.one_hot(target, 40)) @ w
    others = torch.arange(24) != 5
    torch.testing.assert_close(dx[others], exact[others])


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_mean_skips_what_a_sum_skips(reduction):
    x, w, target = problem(128, 300)
    with mr.use(engine="panel"), mr.skip_below(BOUND) as skipped:
        pulled(lambda x, w: mr.ops.cross_entropy(x, w, target, reduction=reduction), x, w, 1e-4)
    with mr.use(engine="panel"), mr.skip_below(BOUND) as each:
        pulled(lambda x, w: head(x, w, target), x, w)
    assert skipped.tiles == each.tiles and skipped.kept == each.kept < 1


def test_a_row_that_is_nan_stays_so():
    x, w, target = problem(24, 400)
    x[9] = float("nan")
    with mr.use(engine="panel"), mr.skip_below(BOUND):
        _, dx, dw = pulled(lambda x, w: head(x, w, target), x, w)
    assert dx[9].isnan().all() and not dx[torch.arange(24) != 9].isnan().any() and dw.isnan().all()


def test_gradients_to_be_differentiated_are_whole():
    x, w, target = problem(24, 40)
    x.requires_grad_()
    with mr.use(engine="panel"), mr.skip_below(0.5) as skipped:
        (dx,) = torch.autograd.grad(head(x, w, target).sum(), x, create_graph=True)
    exact = (torch.softmax(x @ w.T, -1) - torch.nn.functional.one_hot(target, 40)) @ w
    torch.testing.assert_close(dx, exact)
    assert skipped.tiles == 0


def test_no_matrix_of_pairs_is_built():
    x, w, target = problem(512, 2048, 16, torch.float32)
    with mr.use(engine="panel"), mr.budget("1MB"), mr.skip_below(BOUND):
        used = usage(lambda x, w: head.total(x, w, target), (x, w))
    assert used.peak <= 10**6 + 4 * (x.numel() + w.numel()) + 64 * (512 + 2048) + 4 * w.numel(), used


@pytest.mark.parametrize("given", [0, 0.0, -1e-3, 1.0, 2, float("nan"), float("inf"), True, "small", None])
def test_what_is_no_bound(given):
    with pytest.raises(mr.ArgumentError, match="between 0 and 1"):
        mr.skip_below(given)


def test_blocks_nest_and_decorate():
    @mr.skip_below(0.25)
    def inner():
        return skip_small_tiles.requested().bound

    with mr.skip_below(BOUND) as outer:
        assert skip_small_tiles.requested() is outer and inner() == 0.25 and skip_small_tiles.requested() is outer
    assert skip_small_tiles.requested() is None and outer.kept == 1.0 and outer.tiles == 0
    assert repr(outer) == f"skip_below({BOUND!r})"
