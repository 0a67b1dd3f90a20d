"""Partial folds combine to the whole: any cut of rows and columns of any layer, values and gradients."""

import itertools
import math
import random

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines import eager
from monoidreduce.engines.common import combine, subproblem
from monoidreduce.engines.common.evaluate import Sizes
from monoidreduce.program.expression import node, reduce_node
from monoidreduce.program.lower import Fold
from tests.support import internals
from tests.support.comparison import assert_equal, assert_error_rule, cast, named, run, use_small_tiles
from tests.support.layers import BY_NAME, ZOO


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    use_small_tiles(monkeypatch)


def pieces(length, count, chance):
    """``count`` consecutive stretches of an axis, some of them empty."""
    ends = sorted(chance.randint(0, length) for _ in range(count - 1))
    return tuple(zip([0, *ends], [*ends, length], strict=True))


def cut(monkeypatch, rows, cols, seed=0):
    """Make the eager engine run every fold in parts: ``rows`` × ``cols`` blocks of ragged sizes, then combined."""
    chance = random.Random(seed)

    def folder(fold, leaves, sizes):
        part = subproblem.Subproblem(
            pieces(sizes.rows, rows, chance), pieces(sizes.cols, cols, chance), (sizes.rows, sizes.cols)
        )
        return subproblem.finish_states(fold, subproblem.run_subproblem(fold, leaves, sizes, part, eager.run))

    internals.replace_eager_engine(monkeypatch, folder)


SLOW = pytest.mark.slow
DIVISIBLE = [layer for layer in ZOO if all(p.axis != "pairs" for p in layer.parameters)]  # what is per pair is not cut
CUTS = [pytest.param((1, 5), marks=SLOW), pytest.param((4, 1), marks=SLOW), (3, 3)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("blocks", CUTS, ids=str)
@pytest.mark.parametrize("layer", named(DIVISIBLE))
def test_any_cut_of_any_layer_is_the_layer(layer, blocks, seed, monkeypatch):
    args = layer.args(29, 41, seed)
    whole = run(layer.op, args)
    cut(monkeypatch, *blocks, seed)
    assert_equal(run(layer.op, args), whole)


@SLOW
@pytest.mark.parametrize("layer", named(DIVISIBLE))
def test_cuts_keep_the_precision(layer, seed, monkeypatch):
    cut(monkeypatch, 2, 7, seed)
    draws = [layer.args(29, 111, seed + k, torch.float32) for k in range(3)]
    trials = [(run(layer.op, a), run(layer.dense, a), run(layer.dense, cast(a, torch.float64))) for a in draws]
    assert_error_rule(trials)


def one_fold(body, *args):
    """The only fold of an op, its leaves and sizes."""
    (only,) = body.program(*args).passes
    return only.fold


@mr.op
def several(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"]):
    s = q @ k
    top = mr.topk(s, 3, largest=False)
    return mr.softmax_mean(s, v), mr.logsumexp(s), mr.argmax(s), mr.max(s), top.values, top.indices, mr.var(s)


def results_of(fold: Fold, leaves, rows, cols, letters):
    sizes = Sizes(rows, cols, (), letters, torch.device("cpu"), torch.float64)
    return eager.run(fold, leaves, sizes)


def stacks(fold, q, k, v, at):
    """Results of the columns before and after each cut, stacked; the parts' lengths and starts."""
    ends = [0, *at, len(k)]
    spans = list(itertools.pairwise(ends))
    found = [results_of(fold, [q, k[a:b], v[a:b]], len(q), b - a, {"f": q.shape[1], "d": v.shape[1]}) for a, b in spans]
    return [torch.stack(ts) for ts in zip(*found, strict=True)], [b - a for a, b in spans], ends[:-1]


def assert_same(got, whole, k):
    """All results alike; of a top-k's places, which torch orders freely among equals, that they hold the values."""
    *got, top, places, _, spread = got
    *whole, _, _, _, _ = rest = whole
    for a, b in zip([*got, top, spread], [*whole, rest[-4], rest[-1]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert all(len(set(p.tolist())) == 3 for p in places)
    torch.testing.assert_close(k.squeeze(-1)[places], top, equal_nan=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("at", [(), (0,), (7,), (3, 3, 9), (1, 2, 3, 4, 5), (19,)], ids=str)
@pytest.mark.parametrize("special", [None, -math.inf, math.inf, math.nan, 1e5], ids=str)
def test_stacked_results_combine(at, special, seed):
    q, k, v = torch.ones(4, 1).double(), torch.randn(19, 1).double(), torch.randn(19, 3).double()
    if special is not None:
        k[2:5] = special
    fold = one_fold(several, q, k, v)
    stacked, lengths, starts = stacks(fold, q, k, v, at)
    whole = results_of(fold, [q, k, v], 4, 19, {"f": 1, "d": 3})
    assert_same(combine.combine(fold, stacked, lengths, starts), whole, k)


def test_places_tie_for_the_first_whatever_the_order_of_parts(seed):
    q, k, v = torch.ones(2, 1).double(), torch.tensor([[1.0], [5.0], [5.0], [0.0]]).double(), torch.ones(4, 1).double()
    fold = one_fold(several, q, k, v)
    stacked, lengths, starts = stacks(fold, q, k, v, (2,))
    swapped = combine.combine(fold, [t.flip(0) for t in stacked], lengths[::-1], starts[::-1])
    whole = results_of(fold, [q, k, v], 2, 4, {"f": 1, "d": 1})
    assert_same(swapped, whole, k)
    (where,) = [t for t in swapped if t.dtype is torch.int64 and t.dim() == 1]
    assert where.tolist() == [1, 1]


def test_no_parts_at_all_are_the_identity(seed):
    q, k, v = torch.ones(4, 1).double(), torch.randn(9, 1).double(), torch.randn(9, 3).double()
    fold = one_fold(several, q, k, v)
    stacked, _, _ = stacks(fold, q, k, v, ())
    nothing = combine.combine(fold, [t[:0] for t in stacked], [])
    for got, expected in zip(nothing, results_of(fold, [q, k[:0], v[:0]], 4, 0, {"f": 1, "d": 3}), strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True)


def test_a_monoid_of_ones_own_combines(seed):
    layer = BY_NAME["attention_of_ones_own_monoid"]
    args = layer.args(5, 23, seed)
    fold = one_fold(layer.op, *args)
    leaves = list(layer.op.program(*args).passes[0].feeds)
    assert len(leaves) == 3
    q, k, v = args
    stacked, lengths, starts = stacks(fold, q, k, v, (4, 4, 20))
    whole = results_of(fold, [q, k, v], 5, 23, {"f": 5, "d": 3})
    for got, expected in zip(combine.combine(fold, stacked, lengths, starts), whole, strict=True):
        torch.testing.assert_close(got, expected)


def test_parts_in_order_give_the_first_of_equals():
    """What a split kernel combines by fewer calls is what any order gives."""
    value = torch.tensor([[1.0, -math.inf, 2.0, math.nan], [3.0, -math.inf, 2.0, 5.0], [3.0, -math.inf, 1.0, math.nan]])
    place = torch.tensor([[4, -1, 0, 2], [11, -1, 13, 12], [25, -1, 21, 20]])
    x = node("leaf", (), ("x",), rows=True, cols=True, feature=None, dtype="float")
    for largest in (True, False):
        fold = Fold((x,), (reduce_node("best", "cols", (largest,), (x,)),))
        sign = 1 if largest else -1
        slow = combine.combine(fold, [sign * value, place], [10, 10, 10])
        fast = combine.combine(fold, [sign * value, place], [10, 10, 10], ordered=True)
        for a, b in zip(slow, fast, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)
        assert fast[1].tolist() == [11, -1, 0, 2]
