"""Monoids without a pullback have gradients: derived from the trace of combine, or from all other pairs.

They are held to autograd through a plain sequential fold, and those of catalogue monoids to the hand-written ones."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines.common import block_gradients
from monoidreduce.reductions.user import gradient_source
from monoidreduce.runtime.dry_run import LiveMemory
from tests.support import own_monoids as own
from tests.support.comparison import use_small_tiles


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    use_small_tiles(monkeypatch)
    monkeypatch.setattr(block_gradients, "_BLOCK", 4)
    monkeypatch.setattr(block_gradients, "_LEAST_BLOCK", 4)


def assert_right(op, found, args, second=False, tolerance=1e-9):
    expected = own.with_gradients(lambda *given: own.plain(op, *given), [a.double() for a in args], second)
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=tolerance, atol=tolerance)


def test_where_gradients_come_from():
    assert {m: gradient_source(m) for m in own.ROADS} == own.ROADS
    assert gradient_source(mr.monoids.LogWSum) == "pullback"
    assert gradient_source(mr.monoids.LogWSum * own.Extent) == "trace"
    assert gradient_source(own.Extent * own.TopTwo) == "others"
    assert gradient_source(mr.monoids.And * mr.monoids.Or) == "none"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("op", own.OPS)
@pytest.mark.parametrize("engine", ["reference", "eager", "panel", "auto"])
def test_engines(engine, op):
    args = own.problem()
    with mr.use(engine=engine):
        assert_right(op, own.with_gradients(getattr(own, op), args, second=True), args, second=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype):
    args = own.problem(dtype=dtype)
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    with mr.use(engine="eager"):
        found = own.with_gradients(own.variance, args)
    assert [t.dtype for t in found[2:]] == [dtype] * 3
    assert_right("variance", found, args, tolerance=tolerance)


def test_batches_that_broadcast_and_strides():
    x, y, v = own.problem()
    rows = torch.stack([x, 2 * x, -x]).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()  # [3, 7, 4]
    cols, values = y.clone().requires_grad_(), v.T.contiguous().T.unsqueeze(0).clone().requires_grad_()
    with mr.use(engine="eager"):
        found = own.pooled(rows, cols, values)
    right = [torch.stack(ts) for ts in zip(*(own.plain("pooled", r, cols, values[0]) for r in rows), strict=True)]
    given = (rows, cols, values)
    for got, expected in zip(found, right, strict=True):
        torch.testing.assert_close(got, expected)
    grads = [torch.autograd.grad(ts, given, [*map(own.cotangent, ts)]) for ts in (found, right)]
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected)


def test_zeros_have_the_product_of_the_others():
    x = torch.tensor([[2.0, 0.0, 3.0], [0.0, 0.0, 1.0]], dtype=torch.float64, requires_grad=True)

    @mr.op
    def product(f: mr.Pair, v: mr.Col["e"]):
        return mr.reduce(own.ProductSum, p=f, v=v).p

    with mr.use(engine="eager"):
        product(x, torch.zeros(3, 1).double()).sum().backward()
    assert x.grad.tolist() == [[0.0, 6.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (5, 1)])
def test_few_pairs(shape):
    args = own.problem(*shape)
    with mr.use(engine="eager"):
        found = own.with_gradients(own.product_sum, args)
    if 0 in shape:
        assert not any(g.any() for g in found[3:])
    else:
        assert_right("product_sum", found, args)


def test_transforms():
    x, y, v = own.problem(3, 9)
    total = lambda f: lambda x, y: sum((own.cotangent(t) * t).sum() for t in f(x, y, v))
    ours, right = total(own.variance), total(lambda *a: own.plain("variance", *a))
    many = torch.stack([x, -2 * x])
    with mr.use(engine="eager"):
        for transform in (
            lambda f: torch.func.grad(f, (0, 1))(x, y),
            lambda f: torch.vmap(torch.func.grad(f), (0, None))(many, y),
            lambda f: torch.func.jvp(f, (x, y), (torch.sin(x), torch.cos(y))),
            lambda f: torch.func.jacfwd(torch.func.jacrev(f))(x, y),
        ):
            torch.testing.assert_close(transform(ours), transform(right))


def test_torch_compile():
    compiled = torch.compile(own.product_sum, backend="aot_eager", fullgraph=True, dynamic=True)
    with mr.use(engine="eager"):
        for cols in (5, 9):
            args = own.problem(3, cols)
            assert_right("product_sum", own.with_gradients(compiled, args), args)


@pytest.mark.parametrize("op", ["product_sum", "variance", "attention"])
def test_streams(op):
    args = own.problem()
    x, y, v = (a.clone().requires_grad_() for a in args)
    chunks = [(y[:4].detach().requires_grad_(), v[:4].detach().requires_grad_())]
    chunks += [(y[4:].detach().requires_grad_(), v[4:].detach().requires_grad_())]
    values = list(getattr(own, op).stream(x).over(chunks))
    torch.autograd.backward(values, [*map(own.cotangent, values)])
    grads = [
        torch.cat([c[k].grad if c[k].grad is not None else torch.zeros_like(c[k]) for c in chunks]) for k in (0, 1)
    ]
    assert_right(op, [*(t.detach() for t in values), x.grad, *grads], args)


def test_a_block_at_a_time(monkeypatch):
    """Beside inputs and gradients, a share of the pairs."""
    monkeypatch.undo()
    x, y, v = (t.requires_grad_() for t in own.problem(128, 1024, torch.float32))
    with mr.use(engine="eager"), mr.budget("1MB"):
        values = own.variance(x, y, v)
        with LiveMemory([x, y, v, *values]) as alive:
            torch.autograd.backward(values, [*map(torch.ones_like, values)])
    assert alive.peak < 2 * 2**20  # autograd through all pairs would hold dozens of matrices of 512 kB


@pytest.mark.parametrize("op", ["variance", "product_sum", "pooled"])
def test_estimates_of_memory(monkeypatch, op):
    """What is predicted is held, within a factor of two, and within twice the budget."""
    monkeypatch.undo()
    args = [t.requires_grad_() for t in own.problem(1024, 1024, torch.float32)]
    with mr.use(engine="eager"), mr.budget("4MB"):
        predicted = getattr(own, op).cost(*args)["flash"]
        values = getattr(own, op)(*args)
        with LiveMemory([*args, *values]) as alive:
            torch.autograd.backward(values, [*map(torch.ones_like, values)])
    assert predicted.peak / 2 < alive.peak < min(2 * predicted.peak, 2 * 4e6)


@pytest.mark.parametrize("name", ["LogSumExp", "LogWSum", "Max", "Min", "Sum", "WSum", "Welford", "Prod"])
def test_hand_written_gradients_are_found(name):
    """Catalogue monoids without their pullback."""
    monoid = getattr(mr.monoids, name)
    s, v = torch.randn(5, 11, dtype=torch.float64), torch.randn(11, 3, dtype=torch.float64)
    found = []
    with mr.use(engine="eager"):
        for one in (monoid, without_pullback(monoid)):
            found.append(own.with_gradients(fold_of(one), (s, v)))
    assert gradient_source(monoid) == "pullback"
    for got, right in zip(*found, strict=True):
        torch.testing.assert_close(got, right)


def fold_of(monoid):
    @mr.op
    def folded(s: mr.Pair, v: mr.Col["e"]):
        special = {"w": torch.exp(s), "n": torch.exp(s), "m2": s * s, "zeros": 0.0}
        fields = {n: s * v if field.marker.axes else special.get(n, s) for n, field in monoid.fields().items()}
        return tuple(mr.reduce(monoid, **fields).asdict().values())

    return folded


def without_pullback(monoid):
    kept = ("domain", "integers", "legal", "approx", "_fields")
    body = {n: v for n, v in monoid.__dict__.items() if n in kept}
    body["combine"] = lambda a, b: made(**monoid.combine(monoid(**a.asdict()), monoid(**b.asdict())).asdict())
    made = type(mr.Monoid)(monoid.__name__, (mr.Monoid,), body)
    assert not made.has_gradient
    return made


def test_what_has_no_derivative_says_so():
    @mr.op
    def steps(x: mr.Row["d"], y: mr.Col["d"]):
        return mr.reduce(own.Steps, v=x @ y).v

    x, y, _ = own.problem()
    for engine in ("reference", "eager"):
        with mr.use(engine=engine), pytest.raises(mr.NoGradientError, match="Steps, whose combine has no derivative"):
            steps(x.clone().requires_grad_(), y).sum().backward()


def test_lists_of_pairs():
    """Formulas go through lists; what needs all other pairs refuses them."""
    x, y, v = own.problem(3, 5)
    rowptr, index = torch.tensor([0, 2, 3, 5]), torch.tensor([0, 4, 2, 1, 3])
    listed = torch.zeros(3, 5, dtype=torch.bool)
    listed[torch.tensor([0, 0, 1, 2, 2]), index] = True
    x.requires_grad_()
    found = own.attention(x, y, v, cols=mr.edges(rowptr, index))[0]
    right = torch.where(listed, x @ y.T, -torch.inf).softmax(1) @ v
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(*(torch.autograd.grad(t.square().sum(), x) for t in (found, right)))
    with pytest.raises(mr.NoGradientError, match=r"Variance needs all other pairs.*listed"):
        own.variance(x, y, v, cols=mr.edges(rowptr, index))[0].sum().backward()


def test_explain_says_where_a_gradient_comes_from():
    x, y, v = own.problem(40, 60)
    with mr.use(engine="eager"):
        said = own.product_sum.explain(x.requires_grad_(), y, v)
        assert "ProductSum by combine with all other pairs" in said and "a pullback(c, a, g) of its own" in said
        assert "Attention's pullback is derived from the trace" in own.attention.explain(x, y, v)


def test_what_has_no_gradient_is_folded_beside_what_has_one():
    """By the planner's choice too, which looks at the backward before anybody asks for it."""

    @mr.op
    def both(x: mr.Row["d"], y: mr.Col["d"]):
        return mr.reduce(own.Steps, v=x @ y).v, mr.logsumexp(x @ y)

    x, y = torch.randn(5, 3, requires_grad=True), torch.randn(7, 3)
    with mr.use(engine="auto"):
        steps, total = both(x, y)
        (grad,) = torch.autograd.grad(total.sum(), x, retain_graph=True)
        with pytest.raises(mr.NoGradientError, match="Steps"):
            steps.sum().backward()
    torch.testing.assert_close(steps, (x @ y.T).floor().sum(1))
    torch.testing.assert_close(grad, (x @ y.T).softmax(1) @ y)
