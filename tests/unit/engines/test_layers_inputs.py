"""The layers of the zoo on views and broadcast batches, and with only some gradients asked for."""

import pytest
import torch
from torch.testing import assert_close

import monoidreduce as mr
from monoidreduce.engines.common import matmul
from tests.support.comparison import assert_equal, cast, flatten, is_float, named, run, use_small_tiles
from tests.support.layers import BY_NAME, ZOO

FLOAT64 = torch.float64


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    use_small_tiles(monkeypatch)


def randn(*shape, dtype=FLOAT64):
    return torch.randn(*shape, dtype=dtype)


# Views: the same numbers, laid out otherwise


def transposed(a):
    return a.movedim(-1, 0).contiguous().movedim(0, -1) if a.dim() > 1 else a


def strided(a):
    """Every other element of a longer tensor, along every axis."""
    for dim in range(a.dim()):
        a = torch.stack([a, torch.full_like(a, 7)], dim + 1).flatten(dim, dim + 1)[
            (slice(None),) * dim + (slice(None, None, 2),)
        ]
    return a


def unaligned(a):
    """Starts one element into its storage."""
    whole = torch.cat([a.new_zeros(1), a.flatten()])
    return whole[1:].view(a.shape)


VIEWS = [transposed, strided, unaligned]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("view", VIEWS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("layer", named(ZOO))
def test_views_are_as_good_as_contiguous_tensors(layer, view, seed):
    args = layer.args(19, 37, seed)
    views = [view(a) if isinstance(a, torch.Tensor) and a.dim() else a for a in args]
    assert all(torch.equal(a, b) for a, b in zip(args, views, strict=True) if isinstance(a, torch.Tensor))
    assert_equal(run(layer.op, views), run(layer.op, args), rtol=1e-12)


@pytest.mark.parametrize("name", ["scaled_attention", "swiglu", "laplacian_kernel", "soft_targets"])
def test_expanded_rows_columns_and_features(name, seed):
    """Stride 0 along any axis; the gradient is that of the expanded tensor."""
    layer = BY_NAME[name]
    args = list(layer.args(19, 37, seed))
    for k, a in enumerate(args):
        if is_float(a):
            given = [*args]
            given[k] = a[:1].expand_as(a) if k % 2 or a.dim() == 1 else a[:, :1].expand_as(a)
            assert_equal(run(layer.op, given), run(layer.dense, given))


@pytest.mark.parametrize("name", ["value_and_lse", "info_nce", "gelu_mlp"])
def test_expanded_and_strided_cotangents(name, seed):
    layer = BY_NAME[name]
    args = layer.args(19, 37, seed)
    shapes = [v.shape for v in flatten(layer.dense(*args))]
    for make in (lambda s: randn(1).expand(s), lambda s: strided(randn(*s)), lambda s: transposed(randn(*s))):
        cotangents = [make(s) for s in shapes]
        assert_equal(run(layer.op, args, cotangents=cotangents), run(layer.dense, args, cotangents=cotangents))


# Batches


def batched(layer, M, N, seed):
    """Arguments whose batch dimensions differ: rows [2, 1, ...], columns and pairs [3, ...], the rest as it is."""
    gen = torch.Generator().manual_seed(seed)
    draws = [[layer.make(M, N, gen, FLOAT64) for _ in range(3)] for _ in range(2)]
    args = []
    for k, p in enumerate(layer.parameters[: len(draws[0][0])]):
        if p.axis == "rows":
            args.append(torch.stack([draws[b][0][k] for b in range(2)]).unsqueeze(1))
        elif p.axis in ("cols", "pairs"):
            args.append(torch.stack([draws[0][b][k] for b in range(3)]))
        else:
            args.append(draws[0][0][k])
    return args


def one_by_one(layer):
    """The plain form on each of the 2 × 3 problems."""

    def function(*args):
        axes = [p.axis for p in layer.parameters]
        results = []
        for i in range(2):
            for j in range(3):
                picked = [
                    a[i, 0] if x == "rows" else a[j] if x in ("cols", "pairs") else a
                    for a, x in zip(args, axes, strict=False)
                ]
                results.append(flatten(layer.dense(*picked)))
        return [torch.stack(same).unflatten(0, (2, 3)) for same in zip(*results, strict=True)]

    return function


def has_own_batch(layer):
    args = layer.args(2, 5, 0)
    least = [len(p.tail) for p in layer.parameters]
    return any(isinstance(a, torch.Tensor) and a.dim() > n for a, n in zip(args, least, strict=False))


RANDOM = ("dropout_attention", "categorical_sample")  # each problem of a batch draws its own numbers
UNBATCHED = [layer for layer in ZOO if not has_own_batch(layer) and layer.name not in RANDOM]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layer", named(UNBATCHED))
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
    assert not torch.equal(
        results[0].values["value 0"], run(BY_NAME["dropout_attention"].op, (q, k, v, 0.25, seed + 1)).values["value 0"]
    )


# Which gradients


class Products:
    """Counts the matrix products of the eager engine (a dispatch mode would see one operator for each fold)."""

    def __enter__(self):
        self.count, self.patch = 0, pytest.MonkeyPatch()
        for name in ("dot_into", "multiply_16bit", "accumulate"):
            self.patch.setattr(matmul, name, self._counted(getattr(matmul, name)))
        return self

    def _counted(self, function):
        def counted(*args):
            self.count += 1
            return function(*args)

        return counted

    def __exit__(self, *_):
        self.patch.undo()


@pytest.mark.parametrize(
    "name",
    ["scaled_attention", "soft_targets", "swiglu", "gaussian_kernel", "cross_entropy", "rational_quadratic_kernel"],
)
def test_subsets_of_gradients(name, seed):
    layer = BY_NAME[name]
    args = layer.args(19, 37, seed)
    full = run(layer.op, args)
    floats = [k for k, a in enumerate(args) if is_float(a)]
    for k in floats:
        part = run(layer.op, args, asked=[k])
        assert list(part.grads) == [f"gradient {k}"]
        assert_close(part.grads[f"gradient {k}"], full.grads[f"gradient {k}"], rtol=1e-12, atol=1e-12)
    assert run(layer.op, args, asked=[]).grads == {}


def test_only_the_asked_gradients_are_computed(seed):
    layer = BY_NAME["scaled_attention"]
    args = layer.args(16, 32, seed)
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
        up, down = (
            BY_NAME["distance_attention"].op(*cast((q, k, v), FLOAT64), g).square().sum()
            for g in (0.5 + eps, 0.5 - eps)
        )
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
    args = BY_NAME["scaled_attention"].args(19, 37, seed)
    assert not BY_NAME["scaled_attention"].op(*args).requires_grad
    args[0].requires_grad_()
    with torch.no_grad():
        assert not BY_NAME["scaled_attention"].op(*args).requires_grad
    with torch.inference_mode():
        assert not BY_NAME["scaled_attention"].op(*args).requires_grad


def test_inputs_and_cotangents_are_left_alone(seed):
    for name in (
        "scaled_attention",
        "cross_entropy",
        "gaussian_kernel_of_many_features",
        "nearest_neighbours",
        "logic_and_casts",
    ):
        layer = BY_NAME[name]
        args = layer.args(35, 37, seed)
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
