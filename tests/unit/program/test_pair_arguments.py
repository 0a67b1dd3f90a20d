"""Arguments given per pair: how they broadcast, their types, their gradients, and that nothing else is as large."""

import math

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Pair, Row
from tests.support.allocations import usage
from tests.support.comparison import assert_equal, assert_error_rule, cast, run, use_small_tiles
from tests.support.layers.base import only, softmax

FLOAT64 = torch.float64
B, H, M, N = 2, 3, 19, 37


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"], bias: Pair | None = None, seen: Pair | None = None):
    s = q @ k
    s = s if bias is None else s + bias
    s = s if seen is None else torch.where(seen, s, -torch.inf)
    return mr.softmax_mean(s, v)


def plain(q, k, v, bias=None, seen=None):
    s = q @ k.mT
    s = s if bias is None else s + bias
    s = s if seen is None else torch.where(seen, s, -math.inf)
    return torch.softmax(s, -1) @ v


@mr.op
def total(x: Pair, over_rows: bool):
    return mr.sum(x, over="rows") if over_rows else mr.sum(x)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    use_small_tiles(monkeypatch)


def randn(*shape, dtype=FLOAT64):
    return torch.randn(*shape, dtype=FLOAT64).to(dtype)


def qkv(*batch, dtype=FLOAT64):
    return randn(*batch, M, 5, dtype=dtype), randn(*batch, N, 5, dtype=dtype), randn(*batch, N, 3, dtype=dtype)


# Shapes

SHAPES = [
    (B, H, M, N),
    (H, M, N),
    (M, N),
    (1, 1, M, N),
    (B, 1, M, N),
    (B, 1, 1, N),
    (1, H, M, 1),
    (1, N),
    (M, 1),
    (1, 1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_axis_broadcasts_and_its_gradient_is_summed(shape, seed):
    args = (*qkv(B, H), randn(*shape))
    assert_equal(run(attention, args), run(plain, args))
    with mr.use(engine="reference"):
        assert_equal(run(attention, args), run(plain, args))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masks_broadcast_too(shape, seed):
    seen = torch.rand(shape) > 0.3
    seen[..., 0] = True
    args = (*qkv(B, H), randn(M, N), seen)
    assert_equal(run(attention, args), run(plain, args))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (3, 4, 5), (1, 1, 4, 5), (3, 1, 5), (4, 1)], ids=str)
def test_first_and_second_derivatives(shape, seed):
    args = (randn(2, 3, 4, 2), randn(2, 3, 5, 2), randn(2, 3, 5, 2), randn(*shape))
    args = tuple(a.requires_grad_() for a in args)
    assert torch.autograd.gradcheck(attention, args, fast_mode=True)
    assert torch.autograd.gradgradcheck(attention, args, fast_mode=True)


def test_a_pair_may_be_all_there_is(seed):
    x = randn(B, M, N)
    for over_rows, dim in ((False, -1), (True, -2)):
        assert_equal(run(total, (x, over_rows)), run(lambda x, _, d=dim: x.sum(d), (x, over_rows)))
    assert total(randn(1, N), False).shape == (1,)


def test_batch_dimensions_of_the_pair_alone(seed):
    """Rows and columns without a batch, and a bias for each of several heads."""
    args = (*qkv(), randn(4, M, N))
    assert_equal(run(attention, args), run(plain, args))


def test_views_are_sliced_not_copied(seed):
    whole = randn(N + 3, 2 * M)
    args = (*qkv(), whole.mT[1::2, 3:])
    assert_equal(run(attention, args), run(plain, args))
    args = (*qkv(B, H), randn(1, 1, 1, 1).expand(B, H, M, N))
    assert_equal(run(attention, args), run(plain, args))


@pytest.mark.parametrize("size", [(0, N), (M, 0), (0, 0)], ids=str)
def test_no_rows_or_no_columns(size, seed):
    m, n = size
    args = (randn(m, 5), randn(n, 5), randn(n, 3), randn(m, n))
    result = run(attention, args)
    assert result.values["value 0"].shape == (m, 3) and not result.values["value 0"].any()
    assert all(g.shape == a.shape and not g.any() for g, a in zip(result.grads.values(), args, strict=True))


# Types


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", [(B, H, M, N), (M, N), (1, N)], ids=str)
def test_error_rule(shape, dtype, seed):
    trials = []
    for _ in range(3):
        args = (*qkv(B, H, dtype=dtype), randn(*shape, dtype=dtype))
        trials.append((run(attention, args), run(plain, args), run(plain, cast(args, FLOAT64))))
        assert trials[-1][0].grads["gradient 3"].dtype == dtype
    assert_error_rule(trials)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
def test_a_float32_pair_beside_16_bits_keeps_its_digits(dtype, seed):
    args = (*qkv(dtype=dtype), randn(M, N, dtype=torch.float32))
    result = run(attention, args)
    assert result.values["value 0"].dtype == dtype and result.grads["gradient 3"].dtype == torch.float32
    exact = run(plain, cast(args, FLOAT64), cotangents=[torch.ones(M, 3)])
    ones = run(attention, args, cotangents=[torch.ones(M, 3)])
    torch.testing.assert_close(ones.grads["gradient 3"].double(), exact.grads["gradient 3"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64], ids=lambda d: str(d)[6:])
def test_integers_are_integers(dtype, seed):
    @mr.op
    def kinds(kind: Pair, y: Col):
        return mr.sum(kind * kind), mr.sum(torch.where(kind > 100, y, 0.0)), mr.max(kind), mr.count(kind % 2 == 0)

    kind, y = torch.randint(0, 127, (M, N)).to(dtype), randn(N)
    wide = kind.long()
    expected = [wide.square().sum(-1), torch.where(wide > 100, y, 0.0).sum(-1), wide.amax(-1), (wide % 2 == 0).sum(-1)]
    for engine in ("eager", "reference"):
        with mr.use(engine=engine):
            found = kinds(kind, y)
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want)


def test_conditions_on_pairs_leave_the_others_their_tiles(seed, monkeypatch):
    """What a mask hides is not known before it is read, but what the causal condition hides is."""
    use_small_tiles(monkeypatch, 16, 32)

    @mr.op
    def causal(q: Row["f"], k: Col["f"], v: Col["d"], bias: Pair, seen: Pair):
        shown = (mr.col_index <= mr.row_index) & seen & (bias < 3)
        return mr.softmax_mean(torch.where(shown, q @ k + bias, -torch.inf), v)

    q, k, v = randn(64, 5), randn(64, 5), randn(64, 3)
    bias, seen = randn(64, 64), torch.rand(64, 64) > 0.2
    with mr.tally() as tiles_:
        causal(q, k, v, bias, seen)
    assert (tiles_.computed, tiles_.skipped) == (2 + 4, 2)
    shown = torch.ones(64, 64).tril().bool() & seen & (bias < 3)
    args = (q, k, v, bias, seen)
    dense = lambda q, k, v, bias, seen: softmax(only(shown, q @ k.mT + bias)) @ v
    assert_equal(run(causal, args), run(dense, args))


def test_a_row_that_a_mask_hides_whole(seed):
    seen = torch.rand(M, N) > 0.5
    seen[3], seen[-1] = False, False
    result = run(attention, (*qkv(), randn(M, N), seen))
    assert not result.values["value 0"][[3, -1]].any()
    assert all(g.isfinite().all() for g in result.grads.values())
    assert not result.grads["gradient 3"][[3, -1]].any() and not result.grads["gradient 3"][~seen].any()


def test_nan_and_infinities_stay_where_they_are(seed):
    bias = randn(M, N)
    bias[2, 5], bias[4, :], bias[6, 1] = math.nan, -math.inf, -math.inf
    y = attention(*qkv(), bias)
    assert y[2].isnan().all() and not y[4].any() and y[[0, 1, 3, 5, 6]].isfinite().all()


# Mistakes


def _call(**changed):
    return lambda: attention(*qkv(B), **changed)


MISTAKES = [
    ("rows", _call(bias=randn(M + 1, N)), mr.ShapeError, ["q has 19 rows", "bias has 20"]),
    ("columns", _call(bias=randn(M, N - 1)), mr.ShapeError, ["k has 37 columns", "bias has 36"]),
    ("transposed", _call(bias=randn(N, M)), mr.ShapeError, ["bias has 37"]),
    ("one axis", _call(bias=randn(N)), mr.ShapeError, ["bias", "Pair", "[..., M, N]", "(37,)"]),
    ("batch", _call(bias=randn(5, M, N)), mr.ShapeError, ["batch dimensions of bias", "(5,)"]),
    ("type", _call(bias=randn(M, N).float()), mr.DTypeError, ["bias is float32", "q is float64"]),
    ("a list", _call(bias=[[0.0] * N] * M), mr.ArgumentError, ["bias", "Pair", "Give a tensor"]),
    ("a number", _call(seen=True), mr.ArgumentError, ["seen", "Pair", "Give a tensor"]),
    ("complex", _call(bias=randn(M, N).cfloat()), mr.DTypeError, ["bias", "real"]),
]


@pytest.mark.parametrize(("call", "error", "words"), [pytest.param(*m[1:], id=m[0]) for m in MISTAKES])
def test_mistakes_are_told(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_vector_per_pair_cannot_be_declared():
    with pytest.raises(mr.DeclarationError, match="M × N × f"):
        Pair["f"]


def test_a_pair_is_no_result():
    @mr.op
    def unreduced(q: Row["f"], k: Col["f"], bias: Pair):
        return bias * mr.logsumexp(q @ k)

    with pytest.raises(mr.UnreducedError, match="Fold it"):
        unreduced(randn(M, 5), randn(N, 5), randn(M, N))


def test_explain_and_repr_name_it(seed):
    assert "bias: Pair" in repr(attention)
    assert "1 pass over the pairs" in attention.explain(*qkv(), randn(M, N))


# Memory: the gradient of a Pair is as large as itself, and nothing else is

LONG, TILE = 512, (128, 64)


def long_qkv(batch, n=LONG):
    return tuple(torch.randn(batch, n, 4) for _ in range(3))


@pytest.mark.parametrize("shape", [(LONG, LONG), (1, LONG, LONG)], ids=str)
def test_a_shared_bias_costs_its_own_gradient_only(shape, monkeypatch):
    """Never a bias or a gradient for each of the batch."""
    use_small_tiles(monkeypatch, *TILE)
    args = (*long_qkv(6), torch.randn(*shape))
    used = usage(attention, args)
    own = LONG * LONG * 4
    assert used.largest == own, f"{used.culprit} took {used.largest:,} bytes"
    assert used.peak <= own + 24 * (args[0].numel() * 4) + 16 * TILE[0] * TILE[1] * 8, f"{used.peak:,} bytes"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(lambda n: torch.randn(n, n).bfloat16().mT, id="transposed"),
        pytest.param(lambda n: torch.randn(n, 2 * n).bfloat16()[:, ::2], id="strided"),
        pytest.param(lambda n: torch.randn(n, 1).bfloat16().expand(n, n), id="expanded"),
        pytest.param(lambda n: torch.randint(0, 2, (n, n), dtype=torch.int8), id="int8"),
        pytest.param(lambda n: torch.rand(n, n) > 0.5, id="bool"),
    ],
)
def test_what_is_not_asked_for_costs_nothing_of_its_size(pair, monkeypatch):
    use_small_tiles(monkeypatch, *TILE)

    @mr.op
    def biased(q: Row["f"], k: Col["f"], v: Col["d"], bias: Pair):
        return mr.softmax_mean(q @ k + bias, v)

    def gradients_of_the_sides(q, k, v):
        return biased(q, k, v, given)

    peaks = []
    for n in (192, 384, 768):
        given = pair(n)
        used = usage(gradients_of_the_sides, tuple(t[0].bfloat16() for t in long_qkv(1, n)), held=[given])
        assert used.largest < n * n // 2 + TILE[0] * TILE[1] * 8, f"{used.culprit} took {used.largest:,} bytes"
        peaks.append(used.peak)
    assert peaks[2] - peaks[1] <= 2.3 * (peaks[1] - peaks[0]) + TILE[0] * TILE[1] * 8, peaks


def test_second_derivatives_build_no_larger_one_either(monkeypatch):
    use_small_tiles(monkeypatch, *TILE)

    def gradients(*args):
        return torch.autograd.grad(attention(*args).square().sum(), args, create_graph=True)

    used = usage(gradients, (*long_qkv(4, 384), torch.randn(384, 384)))
    assert used.largest == 384 * 384 * 4, f"{used.culprit} took {used.largest:,} bytes"


def test_a_planted_copy_is_found(monkeypatch):
    use_small_tiles(monkeypatch, *TILE)
    q, k, v, bias = (*long_qkv(6), torch.randn(LONG, LONG))
    used = usage(lambda *a: attention(*a[:3], a[3].expand(6, LONG, LONG)), (q, k, v, bias))
    assert used.largest == 6 * LONG * LONG * 4  # an expanded bias has an expanded gradient: torch's own rule
