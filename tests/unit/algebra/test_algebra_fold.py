"""fold: over an axis, over a stream, in order, with gradients, and what it answers to mistakes."""

import math
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monoidreduce import errors
from monoidreduce.algebra import Function, Matrix, Monoid, Scalar, Vector, fold, monoids
from monoidreduce.algebra.fold import Partials

HERE = settings(deadline=None, derandomize=True, max_examples=40)


class Word(Monoid):
    """Concatenation of digits: ordered, without an n-ary fold, and exact, so that every mistake of order shows."""

    commutative = False
    value: Scalar = 0.0
    power: Scalar = 1.0

    def combine(a, b):
        return Word(value=a.value * b.power + b.value, power=a.power * b.power)


class Plain(Monoid):
    """LogWSum without an n-ary fold."""

    z: Scalar = -math.inf
    v: Vector = 0.0

    def combine(a, b):
        c = monoids.LogWSum.combine(monoids.LogWSum(z=a.z, v=a.v), monoids.LogWSum(z=b.z, v=b.v))
        return Plain(z=c.z, v=c.v)


# --- over an axis ---


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 15])
def test_the_tree_keeps_the_order(n):
    digits = torch.arange(1, n + 1, dtype=torch.float64) % 10
    got = fold(Word, {"value": digits, "power": torch.tensor(10.0, dtype=torch.float64)})
    assert got.value.item() == float("".join(str(int(d)) for d in digits))


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_dim_counts_the_axes_of_a_number(dim):
    x = torch.randn(3, 4, 5)
    assert torch.allclose(fold(monoids.Sum, x, dim).v, x.sum(dim), atol=1e-6)
    z, v = torch.randn(3, 4, 5), torch.randn(3, 4, 5, 2)
    got = fold(monoids.LogWSum, {"z": z, "v": v}, dim)
    want = (torch.softmax(z, dim).unsqueeze(-1) * v).sum(dim if dim >= 0 else dim - 1)
    assert got.z.shape == z.sum(dim).shape and torch.allclose(got.v, want, atol=1e-6)
    tree = fold(Plain, {"z": z, "v": v}, dim)
    assert torch.allclose(tree.v, want, atol=1e-6) and torch.allclose(tree.z, torch.logsumexp(z, dim), atol=1e-6)


@pytest.mark.parametrize("dim", [(0, 1), "a", 1.0, True])
def test_what_is_no_axis_is_refused(dim):
    with pytest.raises(errors.ArgumentError, match="dim was given"):
        fold(monoids.Sum, torch.ones(2, 3), dim=dim)


def test_the_last_axis_is_folded_by_default():
    z, v = torch.randn(6, 7), torch.randn(7, 3)
    got = fold(monoids.LogWSum, {"z": z, "v": v})  # v broadcasts over the six rows
    assert torch.allclose(got.v, torch.softmax(z, -1) @ v, atol=1e-6)
    assert torch.allclose(fold(monoids.LogWSum, monoids.LogWSum(z=z, v=v)).v, got.v)


def test_a_vector_monoid_of_one_field_takes_one_tensor():
    class Sums(Monoid):
        v: Vector = 0.0

        def combine(a, b):
            return Sums(v=a.v + b.v)

    x = torch.randn(5, 3)
    assert torch.allclose(fold(Sums, x).v, x.sum(0), atol=1e-6)  # the last axis is the vector's own
    with pytest.raises(errors.ShapeError, match="no axis -1"):
        fold(Sums, torch.randn(3))


def test_numbers_may_stand_for_fields():
    got = fold(monoids.Welford, {"n": 1.0, "mean": torch.tensor([1.0, 3.0]), "m2": 0.0})
    assert (got.n.item(), got.mean.item(), got.m2.item()) == (2.0, 2.0, 2.0)


def test_strided_and_expanded_tensors():
    x = torch.randn(6, 5).t()[::2]
    assert torch.allclose(fold(monoids.LogSumExp, x, 1).z, torch.logsumexp(x, 1))
    y = torch.randn(1, 5).expand(4, 5)
    assert torch.allclose(fold(Plain, {"z": y, "v": y.unsqueeze(-1)}, 0).v.squeeze(-1), y[0], atol=1e-6)


@pytest.mark.parametrize("name", ["Sum", "LogSumExp", "Max", "Min", "Prod", "Welford", "Count"])
def test_an_empty_axis_gives_the_identity(name):
    monoid = getattr(monoids, name)
    got = fold(monoid, torch.zeros(3, 0, 2), 1)
    for field, value in got.asdict().items():
        assert value.shape == (3, 2) and (value == monoid.fields()[field].identity).all()


def test_an_empty_axis_has_an_empty_gradient():
    z, v = torch.zeros(3, 0, requires_grad=True), torch.zeros(3, 0, 2, requires_grad=True)
    got = fold(monoids.LogWSum, {"z": z, "v": v})
    assert got.v.shape == (3, 2) and (got.z == -math.inf).all()
    got.v.sum().backward()
    assert v.grad.shape == (3, 0, 2)
    assert fold(monoids.Cat, torch.zeros(0, 4, requires_grad=True), 0).items.shape == (0,)
    assert torch.equal(fold(monoids.MMul, torch.zeros(0, 2, 2)).m, torch.eye(2))


def test_sixteen_bits_are_folded_in_thirty_two():
    x = torch.ones(4096, dtype=torch.bfloat16)  # a running sum in bfloat16 would stop at 256
    got = fold(monoids.Sum, x).v
    assert got.dtype == torch.bfloat16 and got.item() == 4096
    assert fold(monoids.Sum, (x[i : i + 64] for i in range(0, 4096, 64)), 0).v.item() == 4096
    half = fold(monoids.LogSumExp, torch.tensor([6e4, 6e4], dtype=torch.float16)).z
    assert half.dtype == torch.float16 and torch.isfinite(half)


def test_booleans_are_counted_not_or_ed():
    x = torch.tensor([True, True, False])
    assert fold(monoids.Sum, x).v.item() == 2 and fold(monoids.Count, x).n.item() == 2
    assert fold(monoids.And, torch.tensor([1.0, 0.0])).v.item() is False


# --- gradients ---


@pytest.mark.parametrize("monoid", [monoids.LogWSum, Plain], ids=lambda m: m.__name__)
def test_autograd_goes_through_twice(monoid, seed):
    z = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)

    def run(z, v):
        return tuple(fold(monoid, {"z": z, "v": v}).asdict().values())

    assert torch.autograd.gradcheck(run, (z, v)) and torch.autograd.gradgradcheck(run, (z, v))


@pytest.mark.parametrize("name", ["Sum", "LogSumExp", "Max", "Min", "ArgMax", "Prod", "Welford"])
def test_theorem_2_1_the_gradient_needs_the_result_and_the_element_only(name, seed):
    monoid = getattr(monoids, name)
    values = monoid.embed(torch.randn(6, 9, dtype=torch.float64), 1).asdict()
    elements = monoid(**{n: t.clone().requires_grad_(t.is_floating_point()) for n, t in values.items()})
    whole = fold(monoid, elements, 1)
    g = {n: torch.randn_like(t) if t.is_floating_point() else torch.zeros_like(t) for n, t in whole.asdict().items()}
    lifted = [
        monoid(**{n: t.detach().unsqueeze(-1) for n, t in values.items()})
        for values in ({n: t.unsqueeze(1) for n, t in whole.asdict().items()}, elements.asdict())
    ]
    local = monoid.pullback(*lifted, monoid(**{n: t[:, None, None] for n, t in g.items()}))
    carriers = {n: t for n, t in elements.asdict().items() if t.requires_grad}
    outs = [n for n, t in whole.asdict().items() if t.requires_grad]
    grads = torch.autograd.grad([getattr(whole, n) for n in outs], list(carriers.values()), [g[n] for n in outs])
    for n, want in zip(carriers, grads, strict=True):
        assert torch.allclose(getattr(local, n).squeeze(-1), want), n


def test_nothing_seen_means_no_gradient():
    z = torch.full((2, 4), -math.inf, requires_grad=True)
    v = torch.randn(2, 4, 3, requires_grad=True)
    for monoid in (monoids.LogWSum, Plain):
        got = fold(monoid, {"z": z, "v": v})
        assert (got.v == 0).all() and (got.z == -math.inf).all()
        for grad in torch.autograd.grad(got.v.sum() + torch.where(got.z > -1, got.z, 0.0).sum(), (z, v)):
            assert (grad == 0).all()


@pytest.mark.parametrize("monoid", [monoids.LogWSum, Plain], ids=lambda m: m.__name__)
def test_one_element_without_weight_is_nothing(monoid):
    x = {"z": torch.tensor([-math.inf]), "v": torch.ones(1, 3)}
    alone = {name: t[0] for name, t in x.items()}
    for got in (fold(monoid, x), fold(monoid, [alone]), fold(monoid, [x], 0)):
        assert got.v.tolist() == [0.0, 0.0, 0.0] and got.z.item() == -math.inf


# --- streams ---


def test_a_stream_is_folded_as_it_comes_with_few_partial_results():
    alive, most = set(), 0

    class Counted(Monoid):
        v: Scalar = 0.0

        def combine(a, b):
            return Counted(v=a.v + b.v)

    partials = Partials()
    for i in range(1000):
        partials.push(Counted(v=i))
        most = max(most, len(partials.waiting))
        alive.add(i)
    assert partials.result().v == sum(alive) and most <= 10


def test_streams_of_elements_dicts_tensors_and_numbers():
    x = torch.randn(11, 3)
    want = x.sum(0)
    assert torch.allclose(fold(monoids.Sum, iter(x)).v, want, atol=1e-6)
    assert torch.allclose(fold(monoids.Sum, ({"v": row} for row in x)).v, want, atol=1e-6)
    assert torch.allclose(fold(monoids.Sum, [monoids.Sum(v=row) for row in x]).v, want, atol=1e-6)
    assert fold(monoids.Sum, [1.0, 2.0, 3.5]).v.item() == 6.5
    assert fold(monoids.ArgMax, [3.0, 8.0, 8.0]).index.item() == 1


@HERE
@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(0, 2**31))
def test_chunks_laid_end_to_end(lengths, seed):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 5, (2, sum(lengths)), generator=gen).double()
    chunks = x.split(lengths, 1)
    if x.shape[1]:
        whole, parts = fold(monoids.ArgMax, x, 1), fold(monoids.ArgMax, iter(chunks), 1)
        assert torch.equal(whole.v, parts.v) and torch.equal(whole.index, parts.index)
    values = [{"value": c, "power": torch.full_like(c, 10.0)} for c in chunks]
    ordered = fold(Word, values, 1).value
    assert torch.equal(ordered, reduce(lambda a, b: a * 10 + b, x.unbind(1), torch.zeros(2, dtype=torch.float64)))


def test_streams_are_differentiable():
    x = torch.randn(7, requires_grad=True)
    fold(monoids.LogSumExp, x.unbind()).z.backward()
    assert torch.allclose(x.grad, torch.softmax(x.detach(), 0), atol=1e-6)


def test_an_empty_stream():
    assert fold(monoids.LogSumExp, []).z.item() == -math.inf and fold(monoids.LogSumExp, []).z.shape == ()
    assert fold(monoids.Cat, []).items.shape == (0,) and fold(monoids.Compose, []).f(4) == 4
    with pytest.raises(errors.ArgumentError, match=r"no known size for v.*like="):
        fold(monoids.LogWSum, [])
    element = {"z": torch.zeros(5), "v": torch.ones(5, 3)}
    assert fold(monoids.LogWSum, [], like=element).v.shape == (5, 3)
    assert fold(monoids.LogWSum, [], 0, like=element).v.tolist() == [0.0, 0.0, 0.0]


def test_a_source_that_fails_fails_the_fold():
    def broken():
        yield torch.ones(2)
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        fold(monoids.Sum, broken())


def test_functions_come_in_streams():
    fs = [lambda x, k=k: x * 2 + k for k in range(4)]
    assert fold(monoids.Compose, fs).f(1) == fs[0](fs[1](fs[2](fs[3](1))))
    with pytest.raises(errors.ArgumentError, match="iterable of its elements"):
        fold(monoids.Compose, monoids.Compose(f=abs))


# --- mistakes ---


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: fold(3, torch.ones(2)), errors.ArgumentError, ["needs a monoid class", "subclass of Monoid"]),
        (lambda: fold(Monoid, torch.ones(2)), errors.ArgumentError, ["needs a monoid class"]),
        (lambda: fold(monoids.Sum, 3), errors.ArgumentError, ["int", "iterable"]),
        (lambda: fold(monoids.Sum, "ab"), errors.ArgumentError, ["str"]),
        (lambda: fold(monoids.Sum, torch.ones(2), 1), errors.ShapeError, ["no axis 1", "among 1 axes"]),
        (lambda: fold(monoids.Sum, torch.tensor(1.0)), errors.ShapeError, ["no axis -1"]),
        (lambda: fold(monoids.LogWSum, torch.ones(2)), errors.ArgumentError, ["2 fields", "z: Scalar = -inf", "dict"]),
        (lambda: fold(monoids.LogWSum, {"z": torch.ones(2)}), errors.ArgumentError, ["lacks v"]),
        (
            lambda: fold(monoids.LogWSum, {"z": torch.ones(2), "v": torch.tensor(1.0)}),
            errors.ShapeError,
            ["field v", "Vector", "[]"],
        ),
        (
            lambda: fold(monoids.LogWSum, {"z": torch.ones(2), "v": torch.ones(3, 1)}),
            errors.ShapeError,
            ["do not broadcast", "z [2]", "v [3, 1]"],
        ),
        (lambda: fold(monoids.MMul, torch.ones(4, 2, 3)), errors.ShapeError, ["Matrix", "equally long"]),
        (lambda: fold(monoids.Sum, {"v": "x"}), errors.ArgumentError, ["field v", "str"]),
        (lambda: fold(monoids.Sum, monoids.Max(v=torch.ones(2))), errors.ArgumentError, ["element of Max"]),
        (lambda: fold(monoids.Sum, [abs]), errors.ArgumentError, ["builtin_function"]),
    ],
)
def test_mistakes_are_named(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_fields_on_two_devices():
    fields = {"z": torch.ones(2), "v": torch.ones(2, 3, device="meta")}
    with pytest.raises(errors.DeviceError, match=r"z on cpu, v on meta"):
        fold(monoids.LogWSum, fields)


def test_markers_are_distinct():
    assert len({Scalar, Vector, Matrix, Function}) == 4 and Matrix.axes == 2 and Function.axes is None
