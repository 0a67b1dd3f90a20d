"""Top-k of hundreds: heaps in C++, thresholds in tiles of torch calls; what is gathered at its winners, and means."""

import math

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Pair, Row
from tests.support.allocations import usage
from tests.support.comparison import use_small_tiles
from tests.support.large_topk_cases import AXES, K, arguments, dense, derive, sort_rows, winners


@pytest.fixture(params=["always", "never"], ids=["C++", "torch"])
def way(request, monkeypatch):
    monkeypatch.setenv("MONOIDREDUCE_CPP", request.param)
    if request.param == "never":
        use_small_tiles(monkeypatch, 16, 64)


@mr.op
def per_column(x: Row, y: Col, k: int, largest: bool):
    return mr.topk(x + y, k, largest=largest)


@pytest.mark.parametrize("largest", [True, False])
def test_ties_infinities_and_nan_are_those_of_a_stable_sort(largest, way):
    torch.manual_seed(0)
    for y in (
        torch.randn(700),
        torch.randint(0, 4, (700,)).float(),
        torch.arange(700.0),
        -torch.arange(700.0),
        torch.where(torch.rand(700) < 0.9, -torch.inf if largest else torch.inf, 1.0),
        torch.where(torch.rand(700) < 0.5, math.nan, torch.randn(700)),
    ):
        for k, engine in ((200, "eager"), (3, "eager"), (3, "reference")):
            with mr.use(engine=engine):
                values, places = per_column(torch.zeros(5), y, k, largest)
            wanted, at = sort_rows(y.expand(5, -1), k, largest)
            torch.testing.assert_close(values, wanted, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(places, at)


def test_equal_distances_in_any_order_of_tiles(way):
    """Near points are searched block by block, and boxes as far as the k-th point may hold an earlier one."""
    torch.manual_seed(1)
    x, y = torch.randint(0, 6, (90, 2)).float(), torch.randint(0, 6, (3000, 2)).float()
    apart = (x[:, None] - y).square().sum(-1)
    for k in (4, 70):
        assert torch.equal(mr.ops.knn(x, y, k).indices, sort_rows(apart, k, False)[1])


def test_integers_over_either_axis(way):
    x, y = torch.arange(-40, 40), torch.arange(1, 301)

    @mr.op
    def rests(x: Row, y: Col):
        return mr.topk(x * y % 7, 75, largest=False), mr.topk(x * y % 5, 75, over="rows")

    with mr.use(engine="eager"):
        (values, places), (most, rows) = rests(x, y)
    s = x[:, None] * y
    wanted, at = sort_rows(s % 7, 75, False)
    assert torch.equal(values, wanted) and torch.equal(places, at)
    wanted, at = sort_rows((s % 5).T, 75)
    assert torch.equal(most, wanted) and torch.equal(rows, at)


@pytest.mark.parametrize("engine", ["reference", "eager", "auto"])
def test_the_ends_of_int64_have_no_place(engine):
    """As infinities have none."""

    @mr.op
    def best(x: Row, y: Col):
        return mr.topk(x * y, 2).indices, mr.argmax(x * y), mr.argmin(x * y), mr.topk(x * y, 2, largest=False).indices

    ends = torch.iinfo(torch.int64)
    for end, empty in ((ends.min, ([[-1, -1]], [-1], [0], [[0, 1]])), (ends.max, ([[0, 1]], [0], [-1], [[-1, -1]]))):
        with mr.use(engine=engine):
            found = best(torch.ones(1, dtype=torch.int64), torch.tensor([end, end]))
        assert tuple(t.tolist() for t in found) == empty


@pytest.mark.parametrize("engine", ["reference", "eager", "auto", "panel"])
def test_what_is_gathered_and_its_gradients(engine, way):
    with mr.use(engine=engine):
        found, gradients = derive(winners, arguments())
    wanted, exact = derive(dense, arguments())
    assert len(found) == len(AXES)
    for a, b in zip([*found, *gradients], [*wanted, *exact], strict=True):
        torch.testing.assert_close(a, b)


@mr.op
def mean_of_best(q: Row["f"], k: Col["f"], v: Col["d"], hidden: int):
    s = torch.where(mr.col_index < mr.num_cols - hidden * (mr.row_index == 0), q @ k, -torch.inf)
    return mr.topk_mean(s, v, 3), mr.topk_mean(s, v @ v, 3)


def test_gradcheck_of_the_mean_of_the_best():
    torch.manual_seed(0)
    args = [torch.randn(n, 2, dtype=torch.float64, requires_grad=True) for n in (2, 5, 5)]
    with mr.use(engine="eager"):
        run = lambda *given: mean_of_best(*given, 3)  # the first row sees two columns
        assert torch.autograd.gradcheck(run, args)
        assert torch.autograd.gradgradcheck(run, args)
        vectors, numbers = mean_of_best(*args, 5)
    assert (vectors[0] == 0).all() and numbers[0] == 0 and (vectors[1] != 0).all()


def test_gather_takes_no_vector():
    @mr.op
    def wrong(x: Row, y: Col["d"]):
        return mr.topk(x * y[0], 2).gather(y)

    with pytest.raises(mr.UnreducedError, match="topk_mean"):
        wrong(torch.ones(3), torch.ones(4, 2))


def test_memory_is_that_of_the_lists(monkeypatch):
    """Not of all pairs: 64 x 100,000 pairs would be 26 MB."""
    monkeypatch.setenv("MONOIDREDUCE_CPP", "never")
    x, y = torch.randn(64, 4), torch.randn(100_000, 4)
    with mr.use(engine="eager", budget="2MB"):
        used = usage(lambda x, y: mr.ops.linear_topk(x, y, 512), (x, y))
    assert used.peak < 12e6


def test_streams_keep_lists_of_any_length():
    x, y, *_ = arguments()

    @mr.op
    def lists(x: Row["d"], y: Col["d"]):
        return mr.topk(x @ y, K)

    fold = lists.stream(x)
    for chunk in y.split([30, 1, 100, 69]):
        fold.update(chunk)
    values, places = fold.result()
    wanted, at = sort_rows(x @ y.T, K)
    torch.testing.assert_close(values, wanted)
    assert torch.equal(places, at)


def test_lists_of_columns_with_a_column_named_twice():
    @mr.op
    def chosen(x: Row["d"], y: Col["d"], c: Col):
        best = mr.topk(x @ y, 3)
        return best.values, best.indices, best.gather(c), mr.topk_mean(x @ y, c, 3), mr.topk_mean(x @ y, y, 3)

    torch.manual_seed(0)
    x, y, c = torch.randn(2, 3), torch.randn(9, 3), torch.randn(9)
    edges = mr.edges(torch.tensor([0, 4, 7]), torch.tensor([1, 4, 1, 0, 6, 3, 2]))
    values, at, gathered, numbers, vectors = chosen(x, y, c, cols=edges)
    weight = torch.softmax(values, -1)
    assert at[0].unique().numel() == 2 and torch.equal(gathered, c[at])
    torch.testing.assert_close(numbers, (weight * c[at]).sum(-1))
    torch.testing.assert_close(vectors, (weight.unsqueeze(-1) * y[at]).sum(-2))


@pytest.mark.parametrize("engine", ["reference", "eager", "auto", "panel"])
@pytest.mark.parametrize("over", ["cols", "rows"])
def test_gather_along_the_axis_that_was_searched(over, engine):
    """Also where the score is a number of that axis alone, so that all rows (or columns) chose the same."""

    @mr.op
    def chosen(r: Row, c: Col, p: Pair):
        score, own, other = (c, c * 2, r) if over == "cols" else (r, r * 2, c)
        best = mr.topk(score, 3, over=over)
        return best.gather(own), best.gather(p), best.gather(other * own), mr.topk_mean(score, p, 3, over=over)

    r, c, p = torch.randn(9), torch.randn(7), torch.randn(9, 7)
    with mr.use(engine=engine):
        own, pairs, products, means = chosen(r, c, p)
    score, other, p = (c, r, p) if over == "cols" else (r, c, p.mT)
    values, at = score.topk(3)
    torch.testing.assert_close(own, 2 * values)
    torch.testing.assert_close(pairs, p[:, at])
    torch.testing.assert_close(products, other.unsqueeze(-1) * 2 * values)
    torch.testing.assert_close(means, p[:, at] @ values.softmax(-1))
