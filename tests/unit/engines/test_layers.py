"""Every layer of the zoo against the plain PyTorch form: values, first and second derivatives, precision, determinism.

Tiles are made small, so that ragged sizes walk many ragged tiles.
"""

import pytest
import torch

import monoidreduce as mr
from tests.support.comparison import (
    Result,
    assert_equal,
    assert_error_rule,
    cast,
    flatten,
    is_float,
    named,
    run,
    use_small_tiles,
)
from tests.support.layers import BY_NAME, DIFFERENTIABLE, ZOO

SIZES = [(1, 1), (59, 111), (1, 257), (257, 1), (128, 129), (33, 2)]
PRECISIONS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    use_small_tiles(monkeypatch)


def test_the_zoo_is_large():
    assert len(ZOO) >= 45 and len(BY_NAME) == len(ZOO)


def test_small_tiles_are_used(seed):
    with mr.tally() as t:
        run(BY_NAME["sigmoid_attention"].op, BY_NAME["sigmoid_attention"].args(59, 111, seed))
    assert t.computed >= 2 * 3 * 3 and t.skipped == 0


@pytest.mark.sampled(12)
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("layer", named(ZOO))
def test_float64_equals_the_plain_form(layer, size, seed):
    args = layer.args(*size, seed)
    assert_equal(run(layer.op, args), run(layer.dense, args))


def trial(layer, args):
    """The layer, its plain form in the same precision, and its plain form in float64, on the same numbers."""
    return run(layer.op, args), run(layer.dense, args), run(layer.dense, cast(args, torch.float64))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dtype", PRECISIONS, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("layer", named(ZOO))
def test_error_is_at_most_twice_that_of_plain_torch(layer, dtype, seed, monkeypatch):
    use_small_tiles(monkeypatch, 16, 32)  # four and four: as many more roundings
    draws = 6 if dtype is torch.float32 else 1  # 16 bits leave a wide margin: products are accumulated in float32
    assert_error_rule([trial(layer, layer.args(59, 111, seed + k, dtype)) for k in range(draws)])


@pytest.mark.parametrize("layer", named(ZOO))
def test_results_have_the_documented_types(layer, seed):
    """Vectors and gradients come in the inputs' type; numbers in the type they were accumulated in."""
    args = layer.args(5, 7, seed, torch.bfloat16)
    result = run(layer.op, args)
    assert all(g.dtype == torch.bfloat16 for g in result.grads.values())
    for got, exact in zip(result.values.values(), flatten(layer.dense(*cast(args, torch.float64))), strict=True):
        assert got.is_floating_point() == exact.is_floating_point()
        assert got.dtype in (torch.bfloat16, torch.float32, torch.int64, torch.bool)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("layer", named(ZOO))
def test_two_runs_are_bitwise_equal(layer, seed):
    args = layer.args(59, 111, seed, torch.float32)
    first, second = run(layer.op, args).all(), run(layer.op, args).all()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layer", named(ZOO))
def test_the_reference_engine_agrees(layer, seed):
    args = layer.args(35, 37, seed)
    with mr.use(engine="reference"):
        dense = run(layer.op, args)
    assert_equal(dense, run(layer.dense, args))
    assert_equal(run(layer.op, args), dense)


def of_floats(layer, args):
    """The layer as a function of its floating arguments alone, returning what has a gradient."""
    at = [k for k, a in enumerate(args) if is_float(a)]

    def function(*floats):
        given = list(args)
        for k, a in zip(at, floats, strict=True):
            given[k] = a
        return tuple(v for v in flatten(layer.op(*given)) if v.requires_grad)

    return function, tuple(args[k].requires_grad_() for k in at)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("layer", named(DIFFERENTIABLE))
def test_first_derivatives(layer, seed, monkeypatch):
    use_small_tiles(monkeypatch, 3, 4)
    function, floats = of_floats(layer, layer.args(5, 6, seed))
    assert torch.autograd.gradcheck(function, floats, fast_mode=True)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("layer", named(DIFFERENTIABLE))
def test_second_derivatives(layer, seed, monkeypatch):
    use_small_tiles(monkeypatch, 3, 4)
    function, floats = of_floats(layer, layer.args(5, 6, seed))
    assert torch.autograd.gradgradcheck(function, floats, fast_mode=True)


def test_what_is_detached_is_a_constant(seed):
    @mr.op
    def fixed_weights(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"]):
        s = q @ k
        return mr.softmax_mean(s.detach(), v) * mr.logsumexp(s).detach() + mr.sum(torch.tanh(s) * v.detach())

    def plain(q, k, v):
        s = q @ k.mT
        return torch.softmax(s.detach(), -1) @ v * s.logsumexp(-1, keepdim=True).detach() + torch.tanh(s) @ v.detach()

    args = BY_NAME["scaled_attention"].args(59, 111, seed)[:3]
    assert_equal(run(fixed_weights, args), run(plain, args))


def third(function, args):
    """Directional derivatives thrice, by the same random directions."""
    gen = torch.Generator().manual_seed(5)
    floats = [a.detach().requires_grad_() for a in args]
    value = flatten(function(*floats))[0]
    total = (value * torch.randn(value.shape, generator=gen, dtype=torch.float64)).sum()
    for _ in range(2):
        grads = torch.autograd.grad(total, floats, create_graph=True)
        total = sum((g * torch.randn(g.shape, generator=gen, dtype=torch.float64)).sum() for g in grads)
    grads = torch.autograd.grad(total, floats, allow_unused=True)
    filled = [torch.zeros_like(a) if g is None else g for a, g in zip(floats, grads, strict=True)]
    return Result({}, {f"third derivative {k}": g for k, g in enumerate(filled)})


@pytest.mark.parametrize("name", ["causal_attention", "gaussian_kernel_of_many_features", "jensen_shannon", "gelu_mlp"])
def test_third_derivatives(name, seed):
    args = BY_NAME[name].args(19, 37, seed)
    assert_equal(third(BY_NAME[name].op, args), third(BY_NAME[name].dense, args), rtol=1e-8)
