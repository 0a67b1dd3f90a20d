"""Each monoid of the catalogue against plain torch, and at the corners where naive formulas give NaN."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monoidreduce import errors
from monoidreduce.algebra import fold, monoids
from monoidreduce.algebra.catalogue import NO_INDEX

HERE = settings(deadline=None, derandomize=True, max_examples=60)
INF = math.inf

PLAIN = {
    "Sum": lambda x, dim: {"v": x.sum(dim)},
    "Count": lambda x, dim: {"n": torch.full_like(x.sum(dim), x.shape[dim], dtype=torch.int64)},
    "LogSumExp": lambda x, dim: {"z": torch.logsumexp(x, dim)},
    "Max": lambda x, dim: {"v": x.amax(dim)},
    "Min": lambda x, dim: {"v": x.amin(dim)},
    "ArgMax": lambda x, dim: dict(zip(("v", "index"), x.max(dim), strict=True)),
    "ArgMin": lambda x, dim: dict(zip(("v", "index"), x.min(dim), strict=True)),
    "Prod": lambda x, dim: {"v": x.prod(dim)},
    "Welford": lambda x, dim: {"mean": x.mean(dim), "m2": x.var(dim, correction=0) * x.shape[dim]},
    "And": lambda x, dim: {"v": (x != 0).all(dim)},
    "Or": lambda x, dim: {"v": (x != 0).any(dim)},
}


def scalars(monoid, **values):
    return monoid(**{name: torch.tensor([value]) for name, value in values.items()})


def clean(*tensors):
    return all(not torch.isnan(t).any() for t in tensors)


# --- against plain torch ---


@pytest.mark.parametrize("shape", [(1,), (59,), (4, 111), (2, 3, 17)], ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_the_fold_is_what_torch_calls_it(name, shape, seed):
    x = torch.randn(shape, dtype=torch.float64)
    for dim in range(len(shape)):
        got = fold(getattr(monoids, name), x, dim)
        for field, want in PLAIN[name](x, dim).items():
            assert torch.allclose(getattr(got, field), want), (field, dim)
            assert getattr(got, field).dtype == want.dtype


@pytest.mark.parametrize("name", [n for n in PLAIN if n not in ("Count", "And", "Or")])
def test_one_by_one_is_the_same_as_all_at_once(name, seed):
    monoid = getattr(monoids, name)
    x = torch.randn(13, 4, dtype=torch.float64)
    a, b = fold(monoid, x, 0), fold(monoid, x.unbind())
    assert all(torch.allclose(getattr(a, field), getattr(b, field)) for field in monoid.fields())


@HERE
@given(st.lists(st.sampled_from([-INF, -1e5, -1.0, 0.0, 0.5, 1e5]), min_size=1, max_size=9), st.integers(0, 2**31))
def test_attention_is_a_fold(logits, seed):
    z = torch.tensor(logits, dtype=torch.float64)
    v = torch.randn(len(logits), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    got = fold(monoids.LogWSum, {"z": z, "v": v})
    one_by_one = fold(monoids.LogWSum, ({"z": a, "v": b} for a, b in zip(z, v, strict=True)))
    want = torch.softmax(z, 0) @ v if (z > -INF).any() else torch.zeros(3, dtype=torch.float64)
    assert torch.allclose(got.v, want) and torch.allclose(one_by_one.v, want)
    assert torch.equal(got.z, one_by_one.z) or torch.allclose(got.z, one_by_one.z)


# --- the identity is exact, nothing plus nothing is clean ---

FINITE = [m for n in monoids.__all__ if n not in ("TopK", "MMul", "Cat", "Compose") for m in [getattr(monoids, n)]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("monoid", FINITE, ids=lambda m: m.__name__)
def test_the_identity_changes_no_bit(monoid, dtype, seed):
    values = torch.tensor([0.3, -7.1, 1e30, -1e30, 1e5, -1e5, 1e-30, 1.0], dtype=dtype).unsqueeze(-1)
    raw = {n: values.abs() if n in ("w", "n", "m2") else values for n in monoid.fields()}
    raw = {n: torch.arange(8).unsqueeze(-1) if n in monoid.integers else t for n, t in raw.items()}
    raw = {n: t > 0 if isinstance(monoid.fields()[n].identity, bool) else t for n, t in raw.items()}
    x = monoid(**raw)
    for y in (monoid.combine(x, monoid.identity(x)), monoid.combine(monoid.identity(x), x)):
        for name, value in x.asdict().items():
            assert torch.equal(getattr(y, name), value), name


@pytest.mark.parametrize("monoid", [m for m in FINITE if m.has_gradient], ids=lambda m: m.__name__)
def test_nothing_combined_with_nothing_has_clean_derivatives(monoid):
    identity = monoid.identity(dtype=torch.float64)
    a = {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in identity.asdict().items()}
    c = monoid.combine(monoid(**a), identity)
    assert clean(*c.asdict().values())
    floats = [t for t in a.values() if t.requires_grad]
    outs = [t for t in c.asdict().values() if t.requires_grad]
    grads = torch.autograd.grad(outs, floats, [torch.ones_like(t) for t in outs], create_graph=True, allow_unused=True)
    assert clean(*(g for g in grads if g is not None))
    g = monoid(**{n: torch.ones_like(t) for n, t in identity.asdict().items()})
    assert clean(*monoid.pullback(monoid.identity(dtype=torch.float64), identity, g).asdict().values())


@pytest.mark.parametrize("name", ["LogSumExp", "LogWSum"])
def test_only_minus_infinity_gives_zero_gradients(name):
    monoid = getattr(monoids, name)
    g = {"z": torch.ones(1), "v": torch.ones(3)}
    x = {"z": torch.tensor([-INF]), "v": torch.randn(3)}
    nothing = monoid(**{n: x[n] for n in monoid.fields()})
    pulled = monoid.pullback(monoid.identity(nothing), nothing, monoid(**{n: g[n] for n in monoid.fields()}))
    assert all((t == 0).all() for t in pulled.asdict().values())


# --- logarithms ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_large_logits_stay_finite(dtype):
    top = 6e4 if dtype == torch.float16 else 1e5
    z = torch.tensor([top, top, -top, -INF], dtype=dtype)
    got = fold(monoids.LogSumExp, z).z.double()
    assert torch.isfinite(got) and abs(got - z.double().logsumexp(0)) <= 0.01 * top
    mean = fold(monoids.LogWSum, {"z": z, "v": torch.tensor([[1.0], [3.0], [9.0], [9.0]], dtype=dtype)}).v
    assert mean.item() == 2.0


@pytest.mark.parametrize("gap", [0.0, 1.0, 200.0, 1e5, INF])
def test_second_derivatives_of_log_add_are_finite(gap):
    for low, high in ((-gap, 0.0), (0.0, -gap)):
        a, b = (torch.tensor([n], dtype=torch.float32, requires_grad=True) for n in (low, high))
        z = monoids.LogSumExp.combine(monoids.LogSumExp(z=a), monoids.LogSumExp(z=b)).z
        first = torch.autograd.grad(z, (a, b), create_graph=True)
        second = torch.autograd.grad(first[0], (a, b))
        share = 1 / (1 + math.exp(min(high - low, 700.0)))
        assert first[0].item() == pytest.approx(share, abs=1e-6)
        assert second[0].item() == pytest.approx(share * (1 - share), abs=1e-6)


def test_plus_infinity_is_plus_infinity():
    assert fold(monoids.LogSumExp, torch.tensor([INF, 0.0, -INF])).z.item() == INF


def test_nan_stays_in_its_own_row():
    x = torch.tensor([[1.0, math.nan, 2.0], [1.0, 3.0, 2.0]])
    for name, field in (("Sum", "v"), ("LogSumExp", "z"), ("Max", "v"), ("Min", "v"), ("Prod", "v"), ("ArgMax", "v")):
        got = getattr(fold(getattr(monoids, name), x), field)
        assert got.isnan().tolist() == [True, False], name
        streamed = getattr(fold(getattr(monoids, name), x.unbind(1)), field)
        assert streamed.isnan().tolist() == [True, False], name


# --- weights ---


def test_weighted_mean_and_its_corners(seed):
    w, v = torch.rand(5, 9, dtype=torch.float64), torch.randn(5, 9, 2, dtype=torch.float64)
    w[0] = 0
    w[1, 3] = 0
    got = fold(monoids.WSum, {"w": w, "v": v})
    assert (got.v[0] == 0).all() and torch.allclose(got.v[1:], (w.unsqueeze(-1) * v).sum(1)[1:] / w.sum(1)[1:, None])
    w, v = w.requires_grad_(), v.requires_grad_()
    grads = torch.autograd.grad(fold(monoids.WSum, {"w": w, "v": v}).v.sum(), (w, v))
    assert clean(*grads) and (grads[0][0] == 0).all() and grads[0][1, 3] != 0  # a weight of 0 still has a derivative


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_weights_of_any_size(size):
    v = torch.tensor([[2.0], [4.0]])
    assert fold(monoids.WSum, {"w": torch.tensor([size, 3 * size]), "v": v}).v.item() == pytest.approx(3.5)


# --- extremes ---


def test_ties_go_to_the_smallest_index_in_any_order():
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        v = torch.tensor([7.0, 1.0, 7.0, 1.0])[order]
        x = {"v": v, "index": torch.tensor(order)}
        assert fold(monoids.ArgMax, x).index.item() == 0 and fold(monoids.ArgMin, x).index.item() == 1
        stream = [{"v": a, "index": i} for a, i in zip(v, order, strict=True)]
        assert fold(monoids.ArgMax, stream).index.item() == 0 and fold(monoids.ArgMin, stream).index.item() == 1


def test_all_minus_infinity_still_has_a_first_index():
    assert fold(monoids.ArgMax, torch.full((3,), -INF)).index.item() == 0
    assert fold(monoids.ArgMax, [-INF, -INF]).index.item() == 0
    assert fold(monoids.ArgMax, torch.zeros(0)).index.item() == NO_INDEX


def test_extremes_of_integers():
    x = torch.tensor([3, 0, 255, 0], dtype=torch.uint8)
    assert fold(monoids.ArgMin, x).index.item() == 1 and fold(monoids.ArgMax, x).v.item() == 255
    low = torch.tensor([5, torch.iinfo(torch.int64).min])
    assert fold(monoids.ArgMin, low).index.item() == fold(monoids.ArgMin, low.unbind()).index.item() == 1
    assert fold(monoids.ArgMax, {"v": torch.tensor([1.0, 2.0]), "index": torch.tensor([4.0, 9.0])}).index.item() == 9.0


def test_the_gradient_of_an_extreme_goes_to_the_winner():
    x = torch.tensor([2.0, 5.0, 5.0], requires_grad=True)
    fold(monoids.ArgMax, x).v.backward()
    assert x.grad.tolist() == [0.0, 1.0, 0.0]
    c, g = scalars(monoids.Max, v=5.0), scalars(monoids.Max, v=3.0)
    assert monoids.Max.pullback(c, scalars(monoids.Max, v=5.0), g).v.item() == 3.0
    assert monoids.Max.pullback(c, scalars(monoids.Max, v=4.0), g).v.item() == 0.0


# --- top k ---


@pytest.mark.parametrize("k", [1, 3, 8])
def test_topk_is_torch_topk(k, seed):
    x = torch.randn(4, 23, dtype=torch.float64, requires_grad=True)
    want = x.topk(k)
    for got in (fold(monoids.TopK(k), x), fold(monoids.TopK(k), x.split([5, 1, 17], 1), 1)):
        assert torch.equal(got.v, want.values) and torch.equal(got.index, want.indices)
        g = torch.randn(4, k, dtype=torch.float64)
        assert torch.equal(*(torch.autograd.grad(t, x, g, retain_graph=True)[0] for t in (got.v, want.values)))


def test_topk_corners():
    assert monoids.TopK(3) is monoids.TopK(3) and monoids.TopK(3).__name__ == "TopK(3)"
    few = fold(monoids.TopK(5), torch.tensor([1.0, 4.0]))
    assert few.v.tolist() == [4.0, 1.0] and few.index.tolist() == [1, 0]
    ties = fold(monoids.TopK(2), torch.tensor([1.0, 1.0, 1.0]).unbind())
    assert ties.index.tolist() == [0, 1]
    for wrong in (0, -1, 2.0, True, "3", [1]):
        with pytest.raises(errors.ArgumentError, match="at least 1"):
            monoids.TopK(wrong)


# --- moments ---


def test_equal_numbers_have_no_variance():
    x = torch.full((1000,), 0.1)
    assert fold(monoids.Welford, x).m2.item() == 0.0 and fold(monoids.Welford, x.unbind()).m2.item() == 0.0
    assert fold(monoids.Welford, x).mean.item() == x[0].item()


def test_variance_far_from_zero(seed):
    x = torch.randn(4096) + 1e4  # in float32, Σx² - (Σx)²/n has no correct digit left
    truth = x.double().var(correction=0).item()
    for got in (fold(monoids.Welford, x), fold(monoids.Welford, x.split(100), 0)):
        assert (got.m2 / got.n).item() == pytest.approx(truth, rel=1e-3)


def test_variance_is_differentiable(seed):
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    got = fold(monoids.Welford, x)
    ours = torch.autograd.grad((got.m2 / (got.n - 1)).sum(), x)[0]
    assert torch.allclose(ours, torch.autograd.grad(x.var(1).sum(), x)[0])


# --- products ---


@pytest.mark.parametrize("row", [[2.0, 3.0, -4.0], [2.0, 0.0, 5.0], [0.0, 3.0, 0.0], [0.0, 0.0, 0.0], [0.0]])
def test_the_gradient_of_a_product_is_right_at_zeros(row):
    x = torch.tensor(row, dtype=torch.float64, requires_grad=True)
    want = torch.autograd.grad(x.prod(), x)[0]
    assert torch.equal(torch.autograd.grad(fold(monoids.Prod, x).v, x)[0], want)
    elements = monoids.Prod.embed(x.detach(), 0)
    whole = fold(monoids.Prod, elements)
    g = scalars(monoids.Prod, v=1.0, p=0.0, zeros=0)
    local = monoids.Prod.pullback(
        monoids.Prod(**{n: t.reshape(1) for n, t in whole.asdict().items()}),
        monoids.Prod(**{n: t.unsqueeze(-1) for n, t in elements.asdict().items()}),
        g,
    )
    assert torch.allclose(local.v.squeeze(-1), want)


# --- sampling ---


def test_samples_follow_the_distribution_and_not_the_order():
    gen = torch.Generator().manual_seed(3)
    logits = torch.tensor([0.0, 1.0, -INF, 2.0, -1.0])
    noise = torch.rand(20000, 5, generator=gen).clamp(min=1e-12)
    x = monoids.Sample.perturbed(logits.expand(20000, 5), noise, torch.arange(5).expand(20000, 5))
    got = fold(monoids.Sample, x)
    seen = torch.bincount(got.index, minlength=5) / 20000
    want = torch.softmax(logits, 0)
    assert seen[2] == 0 and ((seen - want).abs() <= 5 * (want / 20000).sqrt() + 1e-12).all()
    assert torch.allclose(got.z, torch.logsumexp(logits, 0).expand(20000))
    order = [3, 0, 4, 2, 1]
    shuffled = fold(monoids.Sample, ({n: t[:, j] for n, t in x.asdict().items()} for j in order))
    assert torch.equal(shuffled.index, got.index) and torch.equal(shuffled.key, got.key)


def test_samples_are_equal_when_they_choose_the_same():
    one = scalars(monoids.Sample, z=0.0, key=1.0, index=3)
    assert monoids.Sample.approx(one, scalars(monoids.Sample, z=1e-9, key=1.0, index=3))
    assert not monoids.Sample.approx(one, scalars(monoids.Sample, z=0.0, key=1.0, index=4))
    nothing = [scalars(monoids.Sample, z=-INF, key=-INF, index=i) for i in (3, 4)]
    assert monoids.Sample.approx(*nothing) and not monoids.Sample.has_gradient


# --- ordered ones ---


def test_matrices_in_order(seed):
    m = torch.randn(7, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    got = fold(monoids.MMul, m, 0).m
    want = m[0] @ m[1] @ m[2] @ m[3] @ m[4] @ m[5] @ m[6]
    assert torch.allclose(got, want)
    assert torch.allclose(torch.autograd.grad(got.sum(), m)[0], torch.autograd.grad(want.sum(), m)[0])


def test_lists_in_order():
    x = torch.arange(12).reshape(2, 3, 2)
    assert fold(monoids.Cat, x, 1).items.tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert fold(monoids.Cat, x, 0).items.tolist() == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    pieces = [torch.arange(n) for n in (0, 3, 1, 0, 2)]
    assert torch.equal(fold(monoids.Cat, pieces).items, torch.cat(pieces))


def test_functions_in_order_without_a_deep_stack():
    many = fold(monoids.Compose, (lambda x, k=k: (x * 3 + k) % 1009 for k in range(5000))).f
    x = 7
    for k in reversed(range(5000)):
        x = (x * 3 + k) % 1009
    assert many(7) == x
    assert repr(monoids.Compose.combine(monoids.Compose(f=abs), monoids.Compose(f=str)).f) == "abs ∘ str"
    assert not monoids.Compose.approx(monoids.Compose(f=abs), monoids.Compose(f=torch.neg))
