"""No layer ever builds the M × N matrix, forward or backward: memory as a test, on every layer of the zoo.

At the default tile no single tensor may exceed a tile or the inputs' own size. With a small tile, what is alive at once
may only grow as the inputs do: from one size to its double, twice as much as from its half, where a matrix of pairs
would grow four times as much. And what a mask hides is not computed at all: tiles are counted.
"""

import math

import pytest
import torch

import monoidreduce as mr
from monoidreduce.plan import schedule
from monoidreduce.runtime import dispatch
from tests.support import internals
from tests.support.allocations import usage
from tests.support.comparison import flatten, is_float, named, run, use_small_tiles
from tests.support.layers import BY_NAME, ZOO

WIDEST = 8  # bytes of an int64: an index or a random number per pair
WIDE = (1537, 1409)  # the least at which a tile can be told from the matrix, and ragged
TILE = (96, 128)
SIZES = (144, 288, 576)  # at the least number of tiles at which even a matrix of truth values is seen


# Layers with arguments per pair are in test_pair_arguments.py.
GIVEN_SIDES = [layer for layer in ZOO if all(p.axis != "pairs" for p in layer.parameters)]


def make(layer, M, N):
    return layer.make(M, N, torch.Generator().manual_seed(0), torch.float32)


def assert_never_dense(function, args, M, N):
    """The largest tensor is a tile or of the size of the inputs."""
    assert M * N * 4 > schedule.ELEMENTS * WIDEST, "too small to tell a tile from the matrix"
    used = usage(function, args)
    inputs = sum(a.numel() for a in args if isinstance(a, torch.Tensor))
    allowed = max(schedule.ELEMENTS * WIDEST, 4 * WIDEST * inputs)
    assert used.largest <= allowed, f"{used.culprit} took {used.largest:,} bytes, allowed {allowed:,}"


def assert_grows_linearly(function, layer):
    """Doubling rows and columns twice: the second step costs about twice the first, not four times."""
    small, middle, large = (usage(function, make(layer, n, n)).peak for n in SIZES)
    slack = TILE[0] * TILE[1] * WIDEST
    first, second = middle - small, large - middle
    assert second <= 2.3 * first + slack, f"peaks of {small:,}, {middle:,} and {large:,} bytes at {SIZES}"


@pytest.mark.sampled(12)
@pytest.mark.parametrize("layer", named(GIVEN_SIDES))
def test_no_tensor_is_larger_than_a_tile_or_the_inputs(layer):
    assert_never_dense(layer.op, make(layer, *WIDE), *WIDE)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("layer", named(GIVEN_SIDES))
def test_memory_grows_with_the_inputs(layer, monkeypatch):
    use_small_tiles(monkeypatch, *TILE)
    assert_grows_linearly(layer.op, layer)


@pytest.mark.parametrize("name", ["causal_attention", "cross_entropy", "gaussian_kernel", "swiglu", "sinkhorn_step"])
def test_second_derivatives_build_no_matrix_either(name):
    layer = BY_NAME[name]

    def gradients(*args):
        floats = [a for a in args if is_float(a)]
        total = sum(v.square().sum() for v in flatten(layer.op(*args)))
        return torch.autograd.grad(total, floats, create_graph=True)

    assert_never_dense(gradients, make(layer, *WIDE), *WIDE)


def test_broadcast_and_sliced_batches_are_viewed_not_copied(monkeypatch):
    """Heads that share keys, and every other key of a longer cache: neither is laid out anew."""
    heads, few, many, f = 8, 4, 4096, 32
    q = torch.randn(heads, heads, few, f)
    cache = torch.randn(heads, 1, 2 * many, f)
    k, v = cache[:, :, ::2], cache[:, :, 1::2]
    internals.set_tiles(monkeypatch, choose=lambda *_, **__: schedule.Tiles(1, few, 2**12), pairs=2**14)
    used = usage(BY_NAME["scaled_attention"].op, (q, k, v, 1.0), backward=False)
    assert used.peak < k.numel() * 4, f"{used.culprit} took {used.largest:,} of {used.peak:,} bytes"


# The helpers must catch what they are for


class DenseBackward(torch.autograd.Function):
    """A well-behaved forward whose backward builds the matrix."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return BY_NAME["relu_mlp"].op(q, k, v)

    @staticmethod
    def backward(ctx, g):
        q, k, v = ctx.saved_tensors
        s = q @ k.T
        gs = (g @ v.T) * (s > 0)
        return gs @ k, gs.T @ q, torch.relu(s).T @ g


def masked_sum(q, k, v):
    """Only a matrix of truth values is built, a quarter of the bytes."""
    near = torch.arange(len(q)).unsqueeze(-1) >= torch.arange(len(k))
    return near.sum(-1).unsqueeze(-1) * q


PLANTED = {"a dense form": BY_NAME["relu_mlp"].dense, "a dense backward": DenseBackward.apply}


@pytest.mark.parametrize("function", [pytest.param(f, id=name) for name, f in PLANTED.items()])
def test_a_planted_matrix_is_found_by_its_size(function):
    with pytest.raises(AssertionError, match="1537, 1409"):
        assert_never_dense(function, make(BY_NAME["relu_mlp"], *WIDE), *WIDE)


@pytest.mark.parametrize(
    "function", [pytest.param(f, id=name) for name, f in (PLANTED | {"a mask": masked_sum}).items()]
)
def test_a_planted_matrix_is_found_by_its_growth(function, monkeypatch):
    use_small_tiles(monkeypatch, *TILE)
    with pytest.raises(AssertionError, match="peaks"):
        assert_grows_linearly(function, BY_NAME["relu_mlp"])


def test_a_matrix_planted_in_the_engine_is_found(monkeypatch):
    real = dispatch.FOLDERS["eager"]

    def wasteful(fold, leaves, sizes):
        torch.zeros(sizes.rows, sizes.cols)
        return real(fold, leaves, sizes)

    internals.replace_eager_engine(monkeypatch, wasteful)
    layer = BY_NAME["relu_mlp"]
    with pytest.raises(AssertionError, match="1537, 1409"):
        assert_never_dense(layer.op, make(layer, *WIDE), *WIDE)


# Tiles that a mask hides


def grid(mask, rows, cols):
    """For each tile, whether any of its pairs is seen."""
    return [part.any().item() for strip in mask.split(rows, -2) for part in strip.split(cols, -1)]


def overlap(a, b, rows, cols):
    """For each tile, whether the ranges of two sorted lists meet there."""
    return [bool(r[0] <= c[-1] and c[0] <= r[-1]) for r in a.split(rows) for c in b.split(cols)]


def expected_tiles(name, args, M, N, tile):
    i, j = torch.arange(M).unsqueeze(-1), torch.arange(N)
    if name in ("causal_attention", "forgetting_attention"):
        return grid(j <= i, *tile)
    if name == "window_attention":
        return grid((i - j).abs() <= args[3], *tile)
    if name == "prefix_attention":
        return grid((j <= i) | (j < args[3]), *tile)
    same = overlap(args[3], args[4], *tile)
    return [a and b for a, b in zip(same, grid(j <= i, *tile), strict=True)]


MASKED = ["causal_attention", "forgetting_attention", "window_attention", "prefix_attention", "document_attention"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [(256, 256), (111, 259), (259, 111)], ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("name", MASKED)
def test_hidden_tiles_are_skipped_forward_and_backward(name, size, monkeypatch):
    use_small_tiles(monkeypatch, 16, 32)
    layer, (M, N) = BY_NAME[name], size
    args = make(layer, M, N)
    seen = expected_tiles(name, args, M, N, (16, 32))
    assert len(seen) == math.ceil(M / 16) * math.ceil(N / 32)
    with mr.tally() as forward:
        layer.op(*args)
    assert (forward.computed, forward.skipped) == (sum(seen), len(seen) - sum(seen))
    with mr.tally() as both:
        run(layer.op, args)
    passes, rest = divmod(both.tiles, len(seen))
    assert rest == 0 and passes >= 2
    assert (both.computed, both.skipped) == (passes * sum(seen), passes * (len(seen) - sum(seen)))


def test_padded_batches_skip_what_none_of_them_sees(monkeypatch):
    use_small_tiles(monkeypatch, 16, 32, batch=1)
    layer = BY_NAME["padded_attention"]
    q, k, v, _ = make(layer, 64, 256)
    with mr.tally() as t:
        layer.op(q, k, v, torch.tensor([40, 256]))
    assert (t.computed, t.skipped) == (4 * (2 + 8), 4 * 6)


def test_pairs_are_counted(monkeypatch):
    use_small_tiles(monkeypatch, 16, 32)
    with mr.tally() as t:
        BY_NAME["causal_attention"].op(*make(BY_NAME["causal_attention"], 50, 70))
    assert t.pairs_computed + t.pairs_skipped == 50 * 70 and t.pairs_skipped > 0


def test_a_row_of_tiles_that_sees_nothing_costs_nothing(monkeypatch):
    use_small_tiles(monkeypatch, 16, 32)
    q, k, v = (torch.randn(64, 4, requires_grad=True) for _ in range(3))
    with mr.tally() as t:
        y = BY_NAME["document_attention"].op(q, k, v, torch.full((64,), 0), torch.full((64,), 1))
        y.sum().backward()
    assert t.computed == 0
    assert torch.equal(y, torch.zeros_like(y)) and all(torch.equal(x.grad, torch.zeros_like(x)) for x in (q, k, v))
