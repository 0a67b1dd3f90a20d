"""Tables, several vectors, stored numbers, long lists, own monoids and statistics on a GPU, against float64."""

import math

import pytest
import torch

import monoidreduce as mr
from monoidreduce.ops import attention_kl, attention_statistics
from tests.support import attention_statistics as dense_statistics
from tests.support import large_topk_cases, own_monoids, scaled_cases, several_vectors, table_cases

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("error::monoidreduce.errors.FallbackWarning"),
]
DTYPES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 4e-2}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])


def with_gradients(call, args, device="cuda"):
    given = [a.detach().to(device).requires_grad_(a.is_floating_point()) for a in args]
    found = call(*given)
    values = [found] if isinstance(found, torch.Tensor) else list(found)
    values = [v for v in values if v.is_floating_point()]
    weights = [torch.cos(torch.arange(v.numel(), dtype=torch.float64)).view(v.shape).to(v) for v in values]
    asked = [a for a in given if a.requires_grad]
    grads = torch.autograd.grad(values, asked, weights, allow_unused=True)
    return [t.detach().cpu().double() for t in (*values, *grads) if t is not None]


def assert_near(found, right, most):
    for k, (one, other) in enumerate(zip(found, right, strict=True)):
        assert one.shape == other.shape
        apart = float((one - other).norm() / other.norm().clamp(min=1e-30))
        assert apart <= most, (k, apart)


def check(op, dense, args, dtype, most=None):
    stored = [a.to(dtype) if a.is_floating_point() else a for a in args]
    wide = [a.double() if a.is_floating_point() else a for a in stored]
    assert_near(with_gradients(op, stored), with_gradients(dense, wide, "cpu"), most or DTYPES[dtype])


@dtypes
@pytest.mark.parametrize("case", table_cases.CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("sizes", [(150, 300, 64), (1100, 900, 128)], ids=str)
def test_tables(case, sizes, dtype):
    rows, cols, features = sizes
    if case.name == "blocks" and rows > 500 and dtype is torch.bfloat16:
        pytest.skip("sums of a thousand exponentials in 16 bits")
    check(case.op, case.dense, case.problem(rows, cols, (2, 3), features), dtype)


@dtypes
@pytest.mark.parametrize("name", several_vectors.CASES)
def test_several_vectors(name, dtype):
    op, twin, shapes = several_vectors.CASES[name]
    for sizes in ((130, 200, 4, 64), (65, 150, 32, 128)):
        check(op, twin, several_vectors.tensors(shapes, *sizes, torch.float64), dtype)


@pytest.mark.parametrize("kind", scaled_cases.KINDS, ids=str)
@pytest.mark.parametrize("op", [scaled_cases.attention, scaled_cases.head, scaled_cases.mlp])
def test_stored_numbers(op, kind):
    for scales in ("vector", "batch", "number"):
        for dtype, most in ((torch.float32, 2e-4), (torch.bfloat16, 4e-2)):
            x, *rest = scaled_cases.problem(op, kind, scales, width=128, rows=200, cols=333, dtype=dtype)
            wide = scaled_cases.widen(rest, torch.float64)
            right = with_gradients(lambda x, wide=wide: op(x, *wide), [x.double()], "cpu")
            rest = [r.to("cuda") if hasattr(r, "to") else r for r in rest]
            found = with_gradients(lambda x, rest=rest: op(x, *rest), [x])
            assert_near(found, right, most)


@pytest.mark.parametrize("k", [65, 500, 2048])
def test_long_lists(k):
    @mr.op
    def best(x: mr.Row["d"], y: mr.Col["d"]):
        return mr.topk(x @ y, k)

    torch.manual_seed(0)
    x, y = torch.randn(33, 64), torch.randn(70_001, 64)
    a, b = x.cuda().requires_grad_(), y.cuda().requires_grad_()
    values, places = best(a, b)
    s = (x.double() @ y.double().T).requires_grad_()
    right = s.topk(k)
    torch.testing.assert_close(values.cpu().double(), right.values.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(s.gather(1, places.cpu()).detach(), values.cpu().double(), rtol=1e-4, atol=1e-4)
    assert all(len(set(row)) == k for row in places.tolist())
    weight = torch.linspace(-1, 1, values.numel(), device="cuda").view(values.shape)
    got = torch.autograd.grad(values, (a, b), weight)
    full = torch.zeros(33, 70_001, dtype=torch.float64).scatter_(1, places.cpu(), weight.cpu().double())
    assert_near([g.cpu().double() for g in got], [full @ y.double(), full.T @ x.double()], 2e-4)


def test_winners():
    args = large_topk_cases.arguments()
    found = large_topk_cases.derive(large_topk_cases.winners, [a.cuda() for a in args])
    right = large_topk_cases.derive(large_topk_cases.winners, args)
    for one, other in zip((*found[0], *found[1]), (*right[0], *right[1]), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-4)


@dtypes
@pytest.mark.parametrize("op", ["attention", "pooled", "extent", "length", "variance", "both_ways"])
def test_own_monoids(op, dtype):
    args = own_monoids.problem(150, 333)
    with mr.use(engine="reference"):
        wide = [a.to(dtype).double() for a in args]
        right = with_gradients(getattr(own_monoids, op), wide, "cpu")
    found = with_gradients(getattr(own_monoids, op), [a.to(dtype) for a in args])
    assert_near(found, right, DTYPES[dtype])


@dtypes
@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 70, "softcap": 3.0}], ids=["plain", "options"])
def test_statistics(options, dtype):
    torch.manual_seed(0)
    given = torch.randn(4, 200, 64), torch.randn(2, 370, 64), torch.randn(2, 370, 32)
    names = list(dense_statistics.statistics(*(t.double() for t in given), **options))
    ours = lambda *a: [attention_statistics(*a, enable_gqa=True, **options)._asdict()[n] for n in names]
    check(ours, lambda *a: list(dense_statistics.statistics(*a, **options).values()), given, dtype)


@dtypes
def test_divergence(dtype):
    torch.manual_seed(0)
    given = torch.randn(3, 200, 64), torch.randn(3, 370, 64), torch.randn(3, 200, 128), torch.randn(3, 370, 128)
    check(
        lambda *a: attention_kl(*a, causal=True), lambda *a: dense_statistics.kl(*a, causal=True),
        given, dtype, 8e-2 if dtype is torch.bfloat16 else None,
    )  # fmt: skip


@mr.op
def functions(x: mr.Row["d"], y: mr.Col["d"]):
    s = torch.tanh(0.2 * (x @ y))
    t = 0.5 + 0.4 * s
    return (
        mr.sum(torch.sinc(s)), mr.sum(torch.asin(0.9 * s)), mr.sum(torch.acos(0.9 * s)), mr.sum(torch.atan2(s, t)),
        mr.sum(torch.hypot(s, t)), mr.sum(torch.logit(t)), mr.sum(torch.lgamma(t + 1)), mr.sum(torch.digamma(t + 1)),
        mr.sum(torch.xlogy(s, t)),
    )  # fmt: skip


def dense_functions(x, y):
    s = torch.tanh(0.2 * (x @ y.mT))
    t = 0.5 + 0.4 * s
    every = (
        torch.sinc(s), torch.asin(0.9 * s), torch.acos(0.9 * s), torch.atan2(s, t), torch.hypot(s, t), torch.logit(t),
        torch.lgamma(t + 1), torch.digamma(t + 1), torch.xlogy(s, t),
    )  # fmt: skip
    return [f.sum(-1) for f in every]


@dtypes
def test_scalar_functions(dtype):
    torch.manual_seed(0)
    check(functions, dense_functions, [torch.randn(100, 16) / math.sqrt(4), torch.randn(150, 16)], dtype)
