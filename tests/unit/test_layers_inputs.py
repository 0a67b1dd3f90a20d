"""The layers of the zoo on inputs that are not plain: views, broadcasts, nothing at all, infinities, NaN, huge numbers."""

import math

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import monoidreduce as mr
from monoidreduce import Col, Row
from tests.layers import BY_NAME, ZOO
from tests.layers_compare import Result, assert_equal, assert_error_rule, cast, flatten, is_float, largest, run, use_small_tiles

FLOAT64 = torch.float64


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    use_small_tiles(monkeypatch)


def names(layers):
    return [pytest.param(layer, id=layer.name) for layer in layers]


def draw(layer, M, N, seed, dtype=FLOAT64):
    return layer.make(M, max(N, layer.least_cols), torch.Generator().manual_seed(seed), dtype)


def parameters(layer):
    return list(layer.op.parameters.values())


def randn(*shape, dtype=FLOAT64):
    return torch.randn(*shape, dtype=dtype)


# Views: the same numbers, laid out otherwise


def transposed(a):
    return a.movedim(-1, 0).contiguous().movedim(0, -1) if a.dim() > 1 else a


def strided(a):
    """Every other element of a longer tensor, along every axis."""
    for dim in range(a.dim()):
        a = torch.stack([a, torch.full_like(a, 7)], dim + 1).flatten(dim, dim + 1)[(slice(None),) * dim + (slice(None, None, 2),)]
    return a


def unaligned(a):
    """Starts one element into its storage."""
    whole = torch.cat([a.new_zeros(1), a.flatten()])
    return whole[1:].view(a.shape)


VIEWS = [transposed, strided, unaligned]


@pytest.mark.parametrize("view", VIEWS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("layer", names(ZOO))
def test_views_are_as_good_as_contiguous_tensors(layer, view, seed):
    args = draw(layer, 19, 37, seed)
    views = [view(a) if isinstance(a, torch.Tensor) and a.dim() else a for a in args]
    assert all(torch.equal(a, b) for a, b in zip(args, views, strict=True) if isinstance(a, torch.Tensor))
    assert_equal(run(layer.op, views), run(layer.op, args), rtol=1e-12)


@pytest.mark.parametrize("name", ["scaled_attention", "swiglu", "laplacian_kernel", "soft_targets"])
def test_expanded_rows_columns_and_features(name, seed):
    """Stride 0 along any axis; the gradient is that of the expanded tensor."""
    layer = BY_NAME[name]
    args = list(draw(layer, 19, 37, seed))
    for k, a in enumerate(args):
        if is_float(a):
            given = [*args]
            given[k] = a[:1].expand_as(a) if k % 2 or a.dim() == 1 else a[:, :1].expand_as(a)
            assert_equal(run(layer.op, given), run(layer.dense, given))


@pytest.mark.parametrize("name", ["value_and_lse", "info_nce", "gelu_mlp"])
def test_expanded_and_strided_cotangents(name, seed):
    layer = BY_NAME[name]
    args = draw(layer, 19, 37, seed)
    shapes = [v.shape for v in flatten(layer.dense(*args))]
    for make in (lambda s: randn(1).expand(s), lambda s: strided(randn(*s)), lambda s: transposed(randn(*s))):
        cotangents = [make(s) for s in shapes]
        assert_equal(run(layer.op, args, cotangents=cotangents), run(layer.dense, args, cotangents=cotangents))


# Batches


def batched(layer, M, N, seed):
    """Arguments whose batch dimensions differ: rows [2, 1, ...], columns [3, ...], everything else as it is."""
    gen = torch.Generator().manual_seed(seed)
    draws = [[layer.make(M, N, gen, FLOAT64) for _ in range(3)] for _ in range(2)]
    args = []
    for k, p in enumerate(parameters(layer)[: len(draws[0][0])]):
        if p.axis == "rows":
            args.append(torch.stack([draws[b][0][k] for b in range(2)]).unsqueeze(1))
        elif p.axis == "cols":
            args.append(torch.stack([draws[0][b][k] for b in range(3)]))
        else:
            args.append(draws[0][0][k])
    return args


def one_by_one(layer):
    """The plain form on each of the 2 × 3 problems."""

    def function(*args):
        axes = [p.axis for p in parameters(layer)]
        results = []
        for i in range(2):
            for j in range(3):
                picked = [a[i, 0] if x == "rows" else a[j] if x == "cols" else a for a, x in zip(args, axes, strict=False)]
                results.append(flatten(layer.dense(*picked)))
        return [torch.stack(same).unflatten(0, (2, 3)) for same in zip(*results, strict=True)]

    return function


def has_own_batch(layer):
    args = draw(layer, 2, 5, 0)
    least = [(p.axis in ("rows", "cols")) + (p.feature is not None) for p in parameters(layer)]
    return any(isinstance(a, torch.Tensor) and a.dim() > n for a, n in zip(args, least, strict=False))


RANDOM = ("dropout_attention", "categorical_sample")  # each problem of a batch draws its own numbers
UNBATCHED = [layer for layer in ZOO if not has_own_batch(layer) and layer.name not in RANDOM]


@pytest.mark.parametrize("layer", names(UNBATCHED))
def test_batches_broadcast(layer, seed):
    args = batched(layer, 19, 37, seed)
    assert_equal(run(layer.op, args), run(one_by_one(layer), args))


def test_random_numbers_do_not_depend_on_tiles_or_engine(monkeypatch, seed):
    q, k, v = randn(3, 19, 5), randn(3, 37, 5), randn(3, 37, 2)
    results = []
    for tile in ((4, 8, 1), (16, 32, 2), (64, 64, 3)):
        use_small_tiles(monkeypatch, *tile)
        results.append(run(BY_NAME["dropout_attention"].op, (q, k, v, 0.25, seed)))
    with mr.use(engine="reference"):
        results.append(run(BY_NAME["dropout_attention"].op, (q, k, v, 0.25, seed)))
    for other in results[1:]:
        assert_equal(other, results[0])
    assert not torch.equal(results[0].values["value 0"], run(BY_NAME["dropout_attention"].op, (q, k, v, 0.25, seed + 1)).values["value 0"])


# Nothing to fold, nothing to see


def reference(layer, args):
    with mr.use(engine="reference"):
        return run(layer.op, args)


@pytest.mark.parametrize("layer", names(ZOO))
def test_no_rows(layer, seed):
    args = draw(layer, 0, 37, seed)
    result = run(layer.op, args)
    assert_equal(result, reference(layer, args))
    rows = [p.axis == "rows" for p in parameters(layer)]
    assert all(g.numel() == 0 for k, g in enumerate(result.grads.values()) if g.shape[:1] == (0,))
    assert any(rows)


@pytest.mark.parametrize("layer", names(layer for layer in ZOO if layer.least_cols <= 1))
def test_no_columns(layer, seed):
    """Sums are 0, logsumexp is -inf, means are 0; whatever is made of these is the dense engine's answer too."""
    args = layer.make(19, 0, torch.Generator().manual_seed(seed), FLOAT64)
    assert_equal(run(layer.op, args), reference(layer, args))


def test_identities_of_nothing():
    q, k, v = randn(5, 3).requires_grad_(), randn(0, 3).requires_grad_(), randn(0, 2).requires_grad_()

    @mr.op
    def all_of_them(q: Row["f"], k: Col["f"], v: Col["d"]):
        s = q @ k
        return {
            "mean": mr.softmax_mean(s, v), "lse": mr.logsumexp(s), "sum": mr.sum(s * v), "max": mr.max(s), "min": mr.min(s),
            "argmax": mr.argmax(s), "weighted": mr.weighted_mean(s, v), "count": mr.count(s > 0), "any": mr.any(s > 0), "all": mr.all(s > 0),
        }  # fmt: skip

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
    "document_attention": lambda: (randn(40, 4), randn(40, 4), randn(40, 3), torch.arange(40) // 7, torch.full((40,), 2)),
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
    values = [t for name, t in expected.all().items() if name != "value 1"]
    assert all(t.isfinite().all() for t in values[:1])


# NaN, infinities, huge numbers


def folds_columns_only(layer, args):
    program = layer.op.program(*args)
    return all(r.attrs[1] == "cols" for p in program.passes for r in p.fold.reductions)


NO_SHARED_RESULT = [layer for layer in ZOO if folds_columns_only(layer, draw(layer, 5, 7, 0))]


def spoil(layer, args, bad):
    """Put NaN into one row of every row argument."""
    spoiled = []
    for a, p in zip(args, parameters(layer), strict=False):
        if p.axis == "rows" and is_float(a):
            a = a.clone()
            a.select(row_axis(a, p), bad).fill_(math.nan)
        spoiled.append(a)
    return spoiled


def row_axis(a, p):
    return a.dim() - 1 - (p.feature is not None)


@pytest.mark.parametrize("layer", names(NO_SHARED_RESULT))
def test_nan_stays_in_its_own_row(layer, seed):
    M, bad = 35, 17
    args = draw(layer, M, 37, seed)
    spoiled = spoil(layer, args, bad)
    clean, hurt = run(layer.op, args), run(layer.op, spoiled)
    rest = torch.tensor([i for i in range(M) if i != bad])
    plain = flatten(layer.dense(*spoiled))
    for (name, value), dense in zip(hurt.values.items(), plain, strict=True):
        dim = value.shape.index(M)
        assert_close(value.index_select(dim, rest), clean.values[name].index_select(dim, rest), msg=lambda m, n=name: f"{n}: {m}")
        assert torch.equal(value.select(dim, bad).isnan(), dense.select(dim, bad).isnan()), f"{name}, the row itself"
    for name, g in hurt.grads.items():
        k = int(name.split()[1])
        if parameters(layer)[k].axis == "rows":
            dim = row_axis(args[k], parameters(layer)[k])
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
@pytest.mark.parametrize("name", ["value_and_lse", "cross_entropy", "relu_mlp", "sigmoid_attention", "pooling", "kl_forward"])
def test_infinite_logits_are_as_on_the_dense_engine(name, value, seed):
    layer = BY_NAME[name]
    args = list(draw(layer, 19, 37, seed))
    k = next(k for k, p in enumerate(parameters(layer)) if p.axis == "cols")
    args[0], args[k] = args[0].abs(), args[k].clone()
    args[k][20, 0] = value
    forward = [Result({f"value {n}": v for n, v in enumerate(flatten(layer.op(*args)))}, {})]
    with mr.use(engine="reference"):
        forward.append(Result({f"value {n}": v for n, v in enumerate(flatten(layer.op(*args)))}, {}))
    assert_equal(*forward)


HUGE = ["scaled_attention", "value_and_lse", "cross_entropy", "soft_targets", "causal_attention"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("size", [1e4, 1e5])
@pytest.mark.parametrize("name", HUGE)
def test_huge_logits_stay_finite_and_within_the_rule(name, size, dtype, seed):
    """Scores up to ± size, beyond what a 16-bit number may hold; only the layer must stay finite.

    Softmax is then nearly one-hot and the gradient of the scores nearly 0: what is left of ⟨g, v⟩ - ⟨g, P⟩, times a key. Its
    rounding is measured against those terms.
    """
    layer = BY_NAME[name]
    trials, terms = [], 0.0
    for k in range(3):
        args = list(draw(layer, 59, 111, seed + k))
        sides = [n for n, p in enumerate(parameters(layer)) if p.feature in ("f", "d", "e") and is_float(args[n])]
        scores = [n for n in sides if parameters(layer)[n].feature == parameters(layer)[0].feature]
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


# Which gradients


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += any(word in str(func) for word in ("mm", "bmm", "addmm", "baddbmm"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["scaled_attention", "soft_targets", "swiglu", "gaussian_kernel", "cross_entropy", "rational_quadratic_kernel"])
def test_subsets_of_gradients(name, seed):
    layer = BY_NAME[name]
    args = draw(layer, 19, 37, seed)
    full = run(layer.op, args)
    floats = [k for k, a in enumerate(args) if is_float(a)]
    for k in floats:
        part = run(layer.op, args, asked=[k])
        assert list(part.grads) == [f"gradient {k}"]
        assert_close(part.grads[f"gradient {k}"], full.grads[f"gradient {k}"], rtol=1e-12, atol=1e-12)
    assert run(layer.op, args, asked=[]).grads == {}


def test_only_the_asked_gradients_are_computed(seed):
    layer = BY_NAME["scaled_attention"]
    args = draw(layer, 16, 32, seed)
    counts = {}
    for asked in ((0, 1, 2), (2,), (0,), ()):
        with Products() as products:
            run(layer.op, args, asked=asked)
        counts[asked] = products.count
    # forward: scores and values; backward: scores again, g·v unless only v is asked, and one product per gradient
    assert counts[()] == 2
    assert counts[(2,)] == 4 and counts[(0,)] == 5 and counts[(0, 1, 2)] == 7


def test_numbers_given_as_tensors_get_gradients(seed):
    gamma = torch.tensor(0.5, requires_grad=True)
    q, k, v = (torch.randn(n, 4) for n in (19, 37, 37))
    y = BY_NAME["distance_attention"].op(q, k, v, gamma)
    y.square().sum().backward()
    eps = 1e-3
    with torch.no_grad():
        up, down = (BY_NAME["distance_attention"].op(*cast((q, k, v), FLOAT64), g).square().sum() for g in (0.5 + eps, 0.5 - eps))
    assert gamma.grad.shape == () and gamma.grad.dtype == gamma.dtype
    assert_close(gamma.grad.double(), (up - down) / (2 * eps), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_a_number_may_have_a_type_of_its_own(dtype, seed):
    """A learned temperature in float32 beside 16-bit inputs, say; its gradient has its type."""
    scale = torch.tensor(0.75, dtype=dtype, requires_grad=True)
    q, k, v = (torch.randn(n, 4).bfloat16() for n in (19, 37, 37))
    y = BY_NAME["scaled_attention"].op(q, k, v, scale)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16 and scale.grad.dtype == dtype and scale.grad.isfinite()


def test_no_gradient_asked_keeps_no_graph(seed):
    args = draw(BY_NAME["scaled_attention"], 19, 37, seed)
    assert not BY_NAME["scaled_attention"].op(*args).requires_grad
    args[0].requires_grad_()
    with torch.no_grad():
        assert not BY_NAME["scaled_attention"].op(*args).requires_grad
    with torch.inference_mode():
        assert not BY_NAME["scaled_attention"].op(*args).requires_grad


def test_inputs_and_cotangents_are_left_alone(seed):
    for name in ("scaled_attention", "cross_entropy", "gaussian_kernel_of_many_features", "nearest_neighbours", "logic_and_casts"):
        layer = BY_NAME[name]
        args = draw(layer, 35, 37, seed)
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        cotangents = [randn(*v.shape) for v in flatten(layer.dense(*args))]
        kept = [c.clone() for c in cotangents]
        run(layer.op, args, cotangents=cotangents)
        assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True) if isinstance(a, torch.Tensor))
        assert all(torch.equal(a, b) for a, b in zip(cotangents, kept, strict=True))


def test_backward_twice_needs_a_kept_graph_and_gives_the_same(seed):
    q, k, v = (randn(n, 4).requires_grad_() for n in (19, 37, 37))
    y = BY_NAME["causal_attention"].op(q, k, v)
    first = torch.autograd.grad(y.sum(), (q, k, v), retain_graph=True)
    second = torch.autograd.grad(y.sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), (q, k, v))


def test_changing_an_input_before_backward_is_refused(seed):
    q, k, v = (randn(n, 4).requires_grad_() for n in (19, 37, 37))
    key = k * 1
    y = BY_NAME["causal_attention"].op(q, key, v)
    key.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
