"""The layers of the zoo on nothing at all, hidden rows, NaN, infinities and huge numbers.

Where the plain form has no answer, the dense engine's is the expected one.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import monoidreduce as mr
from monoidreduce import Col, Row
from tests.support.comparison import (
    Result,
    assert_equal,
    assert_error_rule,
    cast,
    flatten,
    is_float,
    largest,
    named,
    run,
    use_small_tiles,
)
from tests.support.layers import BY_NAME, ZOO

FLOAT64 = torch.float64


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    use_small_tiles(monkeypatch)


def randn(*shape):
    return torch.randn(*shape, dtype=FLOAT64)


# Nothing to fold, nothing to see


def reference(layer, args):
    with mr.use(engine="reference"):
        return run(layer.op, args)


@pytest.mark.parametrize("layer", named(layer for layer in ZOO if layer.least_rows == 0))
def test_no_rows(layer, seed):
    args = layer.args(0, 37, seed)
    result = run(layer.op, args)
    assert_equal(result, reference(layer, args))
    over_rows = {name for name, v in result.values.items() if 0 not in v.shape}  # folds of no rows: identities
    assert over_rows or all(not g.any() for g in result.grads.values())


@pytest.mark.parametrize("layer", named(layer for layer in ZOO if layer.least_cols <= 1))
def test_no_columns(layer, seed):
    """Sums are 0, logsumexp is -inf, means are 0; whatever is made of these is the dense engine's answer too."""
    args = layer.make(19, 0, torch.Generator().manual_seed(seed), FLOAT64)
    assert_equal(run(layer.op, args), reference(layer, args))


def test_identities_of_nothing():
    q, k, v = randn(5, 3).requires_grad_(), randn(0, 3).requires_grad_(), randn(0, 2).requires_grad_()

    @mr.op
    def all_of_them(q: Row["f"], k: Col["f"], v: Col["d"]):
        s = q @ k
        numbers = {"lse": mr.logsumexp(s), "max": mr.max(s), "min": mr.min(s), "argmax": mr.argmax(s)}
        truths = {"count": mr.count(s > 0), "any": mr.any(s > 0), "all": mr.all(s > 0)}
        return (
            numbers | truths | {"mean": mr.softmax_mean(s, v), "sum": mr.sum(s * v), "weighted": mr.weighted_mean(s, v)}
        )

    for engine in ("eager", "reference"):
        with mr.use(engine=engine):
            found = all_of_them(q, k, v)
        expected = {"mean": 0.0, "lse": -math.inf, "sum": 0.0, "max": -math.inf, "min": math.inf}
        expected |= {"argmax": -1, "weighted": 0.0, "count": 0, "any": False, "all": True}
        for name, value in expected.items():
            assert (found[name] == value).all(), (engine, name, found[name])
        total = sum(found[name].sum() for name in ("mean", "sum", "weighted"))
        grads = torch.autograd.grad(total, (q, k, v), allow_unused=True)
        assert all(g is None or not g.any() for g in grads), engine


MASKED = {
    "padded_attention": lambda: (randn(2, 9, 4), randn(2, 40, 4), randn(2, 40, 3), torch.tensor([0, 40])),
    "document_attention": lambda: (
        randn(40, 4),
        randn(40, 4),
        randn(40, 3),
        torch.arange(40) // 7,
        torch.full((40,), 2),
    ),
    "window_attention": lambda: (randn(90, 4), randn(9, 4), randn(9, 3), 3),
    "dilated_attention": lambda: (randn(40, 4), randn(1, 4), randn(1, 3), 3),
}


@pytest.mark.parametrize("name", MASKED)
def test_a_row_that_sees_nothing_is_zero_with_finite_gradients(name, seed):
    layer, args = BY_NAME[name], MASKED[name]()
    result = run(layer.op, args)
    assert_equal(result, run(layer.dense, args))
    value = result.values["value 0"]
    blind = (value == 0).all(-1)
    assert blind.any() and not blind.all()
    assert all(g.isfinite().all() for g in result.grads.values())
    assert not result.grads["gradient 0"][blind].any()


def test_the_logsumexp_of_nothing_is_minus_infinity_with_zero_gradients(seed):
    @mr.op
    def seen(q: Row["f"], k: Col["f"], n: Row):
        return mr.logsumexp(torch.where(mr.col_index < n, q @ k, -torch.inf))

    n = torch.arange(19) // 2 * 4
    q, k = randn(19, 4).requires_grad_(), randn(37, 4).requires_grad_()
    for engine in ("eager", "reference"):
        with mr.use(engine=engine):
            z = seen(q, k, n)
        assert (z[:2] == -math.inf).all() and z[2:].isfinite().all()
        grads = torch.autograd.grad(z, (q, k), torch.ones_like(z))
        assert all(g.isfinite().all() for g in grads) and not grads[0][:2].any()
        assert grads[0][2:].any(-1).all()


def test_a_leading_tile_that_is_all_hidden(seed):
    """The running maximum starts at -inf and stays there for a while."""

    @mr.op
    def late(q: Row["f"], k: Col["f"], v: Col["d"], start: Row):
        s = torch.where(mr.col_index >= start, q @ k, -torch.inf)
        return mr.softmax_mean(s, v), mr.logsumexp(s), mr.max(s)

    args = (randn(40, 4), randn(111, 4), randn(111, 3), torch.arange(40) * 3)
    with mr.use(engine="reference"):
        expected = run(late, args)
    assert_equal(run(late, args), expected)
    assert (expected.values["value 1"] == -math.inf).any() and expected.values["value 0"].isfinite().all()


INDEXED = ["cross_entropy", "binary_cross_entropy", "z_loss", "embedding_lookup", "segment_sums", "target_scores"]


@pytest.mark.parametrize("name", INDEXED)
def test_an_index_that_no_column_has_matches_nothing(name, seed):
    """Written with torch.where, a class beyond the columns is no error: it adds 0, and gets and gives no gradient."""
    layer = BY_NAME[name]
    args = list(layer.args(19, 37, seed))
    index = next(a for a in args if a.dtype == torch.int64)
    index[:6] = torch.tensor([-1, 37, -100, 10**6, -37, -(2**40)])
    result = run(layer.op, args)
    assert_equal(result, reference(layer, args))
    index[:6] = 37
    assert_equal(run(layer.op, args), result)


# NaN, infinities, huge numbers


def folds_columns_only(layer, args):
    program = layer.op.program(*args)
    return all(r.attrs[1] == "cols" for p in program.passes for r in p.fold.reductions)


NO_SHARED_RESULT = [layer for layer in ZOO if folds_columns_only(layer, layer.args(5, 7, 0))]


def spoil(layer, args, bad):
    """Put NaN into one row of every row argument."""
    spoiled = []
    for a, p in zip(args, layer.parameters, strict=False):
        if p.axis == "rows" and is_float(a):
            a = a.clone()
            a.select(row_axis(a, p), bad).fill_(math.nan)
        spoiled.append(a)
    return spoiled


def row_axis(a, p):
    return a.dim() - 1 - (p.feature is not None)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layer", named(NO_SHARED_RESULT))
def test_nan_stays_in_its_own_row(layer, seed):
    M, bad = 35, 17
    args = layer.args(M, 37, seed)
    spoiled = spoil(layer, args, bad)
    clean, hurt = run(layer.op, args), run(layer.op, spoiled)
    rest = torch.tensor([i for i in range(M) if i != bad])
    plain = flatten(layer.dense(*spoiled))
    for (name, value), dense in zip(hurt.values.items(), plain, strict=True):
        dim = value.shape.index(M)
        assert_close(
            value.index_select(dim, rest), clean.values[name].index_select(dim, rest), msg=lambda m, n=name: f"{n}: {m}"
        )
        assert torch.equal(value.select(dim, bad).isnan(), dense.select(dim, bad).isnan()), f"{name}, the row itself"
    for name, g in hurt.grads.items():
        k = int(name.split()[1])
        if layer.parameters[k].axis == "rows":
            dim = row_axis(args[k], layer.parameters[k])
            assert_close(g.index_select(dim, rest), clean.grads[name].index_select(dim, rest), rtol=1e-9, atol=1e-12)


def test_nan_in_a_column_reaches_every_row_that_sees_it(seed):
    q, k, v = randn(40, 4), randn(70, 4), randn(70, 3)
    k[50] = math.nan
    attention, causal = BY_NAME["scaled_attention"].op, BY_NAME["causal_attention"].op
    assert attention(q, k, v, 0.5).isnan().all()
    assert not causal(q, k, v).isnan().any()  # no row sees column 50
    k[20] = math.nan
    seen = causal(q, k, v).isnan().all(-1)
    assert torch.equal(seen, torch.arange(40) >= 20)
    assert BY_NAME["maxsim"].op(q, k).isnan().all()


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["value_and_lse", "cross_entropy", "relu_mlp", "sigmoid_attention", "pooling", "kl_forward"]
)
def test_infinite_logits_are_as_on_the_dense_engine(name, value, seed):
    layer = BY_NAME[name]
    args = list(layer.args(19, 37, seed))
    k = next(k for k, p in enumerate(layer.parameters) if p.axis == "cols")
    args[0], args[k] = args[0].abs(), args[k].clone()
    args[k][20, 0] = value
    forward = [Result({f"value {n}": v for n, v in enumerate(flatten(layer.op(*args)))}, {})]
    with mr.use(engine="reference"):
        forward.append(Result({f"value {n}": v for n, v in enumerate(flatten(layer.op(*args)))}, {}))
    assert_equal(*forward)


@pytest.mark.parametrize("features", [3, 8, 9, 24])
def test_distances_of_close_points_far_from_the_origin(features, seed):
    """By a product of the coordinates themselves nothing would be left of them."""

    @mr.op
    def kernel(x: Row["f"], y: Col["f"], b: Col):
        gap = mr.sqdist(x, y)
        return mr.sum(torch.exp(-gap * 1e4) * b), mr.min(gap)

    def plain(x, y, b):
        gap = (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1)
        return torch.exp(-gap * 1e4) @ b, gap.amin(-1)

    trials = []
    for _ in range(4):
        centre, x = 100 * randn(1, features), randn(59, features)
        y = torch.cat([x + 1e-3 * randn(59, features), randn(52, features)])
        args = cast((x + centre, y + centre, randn(111)), torch.float32)
        asked = None if features <= 16 else [2]  # beyond, the gradient's product form loses what docs/numerics.md says
        truth = run(plain, cast(args, FLOAT64), asked=asked)
        trials.append((run(kernel, args, asked=asked), run(plain, args, asked=asked), truth))
    assert_error_rule(trials)


def test_a_tie_belongs_to_its_first_column(seed):
    """Within a tile and across tiles; the gradient goes there whole."""

    @mr.op
    def best(a: Row, b: Col):
        return mr.max(a * b), mr.argmax(a * b), mr.min(a * b), mr.argmin(a * b)

    a, b = torch.ones(20, dtype=FLOAT64).requires_grad_(), torch.zeros(100, dtype=FLOAT64)
    b[[37, 38, 70]], b[[41, 90]] = 1.0, -1.0
    b.requires_grad_()
    top, first, low, last = best(a, b)
    assert (top == 1).all() and (first == 37).all() and (low == -1).all() and (last == 41).all()
    (g,) = torch.autograd.grad((top - 2 * low).sum(), b)
    assert g[37] == 20 and g[41] == -40 and g.count_nonzero() == 2


KINKED = {
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "clamp": lambda s, t: (s * t).clamp(-2, 1),
    "clamp by numbers per pair": lambda s, t: s.clamp(min=t - 1, max=t + 1),
    "relu": lambda s, t: torch.relu(s - t),
    "abs": lambda s, t: (s - t).abs(),
    "leaky_relu": lambda s, t: F.leaky_relu(s - t, 0.3),
    "hardtanh": lambda s, t: F.hardtanh(s - t),
    "relu6": lambda s, t: F.relu6(3 * s - t),
    "hardsigmoid": lambda s, t: F.hardsigmoid(3 * s * t),
    "hardswish": lambda s, t: F.hardswish(3 * s * t),
    "elu": lambda s, t: F.elu(s - t),
    "softplus": lambda s, t: F.softplus(s * t, beta=5),
    "where": lambda s, t: torch.where(s >= t, s * t, t),
    "remainder": lambda s, t: torch.remainder(s, 2) * t,
}


@pytest.mark.parametrize("function", [pytest.param(f, id=name) for name, f in KINKED.items()])
def test_kinks_are_torchs_kinks(function):
    """Whole numbers, so that ties and corners abound: the subgradient is the one that torch takes."""

    @mr.op
    def folded(a: Row, b: Col):
        return mr.sum(function(a + 0 * b, b + 0 * a))

    def plain(a, b):
        return function(a.unsqueeze(-1) + 0 * b, b + 0 * a.unsqueeze(-1)).sum(-1)

    args = (torch.arange(-4, 5).double(), torch.arange(-3, 4).double())
    assert_equal(run(folded, args), run(plain, args), rtol=1e-7)  # torch's hardsigmoid takes its sixth from float32


HUGE = ["scaled_attention", "value_and_lse", "cross_entropy", "soft_targets", "causal_attention"]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("size", [1e4, 1e5])
@pytest.mark.parametrize("name", HUGE)
def test_huge_logits_stay_finite_and_within_the_rule(name, size, dtype, seed):
    """Scores up to ± size, beyond what a 16-bit number may hold; only the layer must stay finite.

    Softmax is then nearly one-hot and the gradient of the scores nearly 0: what is left of ⟨g, v⟩ - ⟨g, P⟩, times a
    key. Its rounding is measured against those terms.
    """
    layer = BY_NAME[name]
    trials, terms = [], 0.0
    for k in range(3):
        args = list(layer.args(59, 111, seed + k))
        sides = [n for n, p in enumerate(layer.parameters) if p.feature in ("f", "d", "e") and is_float(args[n])]
        scores = [n for n in sides if layer.parameters[n].feature == layer.parameters[0].feature]
        peak = (args[scores[0]] @ args[scores[1]].mT).abs().max().item()
        for n in scores:
            args[n] = args[n] * math.sqrt(size / peak / (args[3] if name == "scaled_attention" else 1))
        args = cast(args, dtype)
        got = run(layer.op, args)
        assert all(t.isfinite().all() for t in got.floating().values()), "not finite"
        trials.append((got, run(layer.dense, args), run(layer.dense, cast(args, FLOAT64))))
        values = largest(args[2]) if name.endswith("attention") else 0.0
        terms = max(terms, 3 * values * max(largest(args[n]) for n in scores))
    assert_error_rule(trials, terms=terms)


def test_huge_exact_logits_keep_their_differences(seed):
    """Whole numbers near 1e5 are exact in float32, and so are their differences: the weights need not suffer."""
    q = torch.full((19, 1), 1.0)
    k = (1e5 + torch.randint(0, 6, (111, 1))).float()
    v = torch.randn(111, 3)
    layer = BY_NAME["scaled_attention"]
    args = (q, k, v, 1.0)
    trials = [(run(layer.op, args), run(layer.dense, args), run(layer.dense, cast(args, FLOAT64)))]
    assert_error_rule(trials)


@mr.op
def best_of_many(x: Row, y: Col, k: int, largest: bool):
    return mr.topk(x * y, k, largest=largest)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("odd", [None, math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("k", [1, 10])
@pytest.mark.parametrize("rising", [True, False])
def test_topk_over_many_tiles_is_torch_topk(rising, k, largest, odd, monkeypatch):
    """A tile is looked at in groups of columns once k are known: nothing that belongs in the list is passed over."""
    torch.manual_seed(k)
    use_small_tiles(monkeypatch, rows=16, cols=1000)
    n = 3000
    x, y = torch.rand(37) + 0.5, torch.randn(n)
    y = y.sort(descending=not largest).values.roll(-100) if rising else y  # the best in the last tile, side by side
    if odd is not None:
        y[torch.randint(0, n, (4,))] = odd
    pairs = x[:, None] * y
    with mr.use(engine="eager"):
        found = best_of_many(x, y, k, largest)
    want = pairs.topk(k, -1, largest)
    assert_close(found.values, want.values, rtol=0, atol=0, equal_nan=True)
    sure = (found.indices >= 0) & ~found.values.isnan()
    assert torch.equal(pairs.gather(1, found.indices.clamp(min=0))[sure], found.values[sure])
