"""Layers of tile functions written in Triton, in the interpreter, against the same functions in torch."""

import pytest
import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode

import monoidreduce as mr
from monoidreduce.errors import ArgumentError, EngineError, NoGradientError, ShapeError
from tests.support import ROOT, internals
from tests.support import user_kernel_cases as tiles
from tests.support.doc_pages import BLOCK
from tests.support.user_kernel_cases import LAYERS, inputs

# the interpreter computes both sides of a where, and NumPy tells of each infinity met there
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
MLP = {
    "init": tiles.mlp_init,
    "avals": 1,
    "bvals": 2,
    "islice": 32,
    "jslice": 16,
    "proj_fold": tiles.mlp_fold,
    "proj_fold_bwd": tiles.mlp_grad,
    "binary_reduce": tiles.mlp_join,
}


@pytest.fixture(autouse=True)
def private_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path))


def pulled(layer, args, cotangents):
    """Products, and the gradients of every floating argument for given cotangents."""
    leaves = [a.detach().requires_grad_() if a.is_floating_point() else a for a in args]
    out = layer.apply(*leaves)
    given = [c.to(o.dtype) for c, o in zip(cotangents, out, strict=True)]
    return [*out, *torch.autograd.grad(out, [a for a in leaves if a.requires_grad], given)]


def cotangents_of(name, args, generator):
    return [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in LAYERS[name].torch.apply(*args)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("size", [(1, 1), (33, 50), (59, 16)], ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("name", sorted(LAYERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=lambda d: str(d)[6:])
def test_values_and_gradients(name, size, dtype, seed):
    gen = torch.Generator().manual_seed(seed)
    args = inputs(name, *size, dtype, gen)
    given = cotangents_of(name, args, gen)
    got, expected = pulled(LAYERS[name].kernels, args, given), pulled(LAYERS[name].torch, args, given)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(got, expected, **tolerance)


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_16_bit_types_accumulate_in_float32(name, seed):
    """float16, which the interpreter rounds as a GPU does (bfloat16 it cuts off); against float64, beside the same
    tiles in torch."""
    gen = torch.Generator().manual_seed(seed)
    args = inputs(name, 33, 150, torch.float16, gen)
    exact = [a.double() if a.is_floating_point() else a for a in args]
    given = [c.half().double() for c in cotangents_of(name, args, gen)]
    got, plain = pulled(LAYERS[name].kernels, args, given), pulled(LAYERS[name].torch, args, given)
    for mine, theirs, truth in zip(got, plain, pulled(LAYERS[name].torch, exact, given), strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - truth).norm() <= 2 * (theirs - truth).norm() + 1e-6 * truth.norm()


def test_strides_and_broadcasts_are_only_viewed(seed):
    q = torch.randn(20, 40, dtype=torch.float64).T[::2]
    k = torch.randn(1, 20, dtype=torch.float64).expand(19, 20)
    v = torch.randn(19, 40, dtype=torch.float64)[:, 3:20]
    given = [torch.randn(20, dtype=torch.float64), torch.randn(20, 17, dtype=torch.float64)]
    pair = LAYERS["attention"]
    torch.testing.assert_close(pulled(pair.kernels, (q, k, v), given), pulled(pair.torch, (q, k, v), given))


def test_nothing_to_fold():
    x, p, q = inputs("mlp", 5, 0, torch.float64)
    y, gx, gp, gq = pulled(LAYERS["mlp"].kernels, (x, p, q), [torch.ones(5, 24)])
    assert not y.any() and not gx.any() and gp.shape == p.shape and gq.shape == q.shape
    x, p, q = inputs("mlp", 0, 5, torch.float64)
    y, _, gp, gq = pulled(LAYERS["mlp"].kernels, (x, p, q), [torch.ones(0, 24)])
    assert y.shape == (0, 24) and not gp.any() and not gq.any()


def test_only_what_needs_a_gradient_gets_a_kernel(monkeypatch, seed):
    ran = internals.watch_launches(monkeypatch, lambda call: call.kernel.name)
    x, p, q = inputs("mlp", 20, 20, torch.float64)
    LAYERS["mlp"].kernels.apply(x, p.requires_grad_(), q)[0].sum().backward()
    assert ran == ["fold_over_cols", "gradient_over_rows"] and p.grad is not None


def test_nothing_of_pair_size_is_allocated(seed):
    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else (out,):
                self.most = max(self.most, t.untyped_storage().nbytes() if isinstance(t, torch.Tensor) else 0)
            return out

    x, p, q = inputs("mlp", 100, 90, torch.float32)
    with Largest() as seen:
        pulled(LAYERS["mlp"].kernels, (x, p, q), [torch.ones(100, 24)])
    assert 4 * 100 * 20 <= seen.most < 4 * 100 * 90


def test_second_derivatives_are_refused():
    x, p, q = inputs("mlp", 3, 3, torch.float64)
    (y,) = LAYERS["mlp"].kernels.apply(x.requires_grad_(), p, q)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(NoGradientError, match="once, not twice"):
        g.sum().backward()


@triton.jit
def two_results(x, p, q, inside):
    return tl.dot(x, tl.trans(p)), tl.sum(x, 1)


@triton.jit
def one_number(x, p, q, inside):
    return tl.sum(x, 1)


@triton.jit
def no_mask(x, p, q):
    return x


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"islice": 24}, ArgumentError, "islice is 24.*power of two"),
        ({"jslice": 8}, ArgumentError, "jslice is 8.*at least 16"),
        ({"islice": tiles._tiles}, ArgumentError, "islice is <function"),
        ({"proj_fold": tiles.mlp_fold_torch}, ArgumentError, "proj_fold is no @triton.jit function"),
        ({"binary_reduce": tiles.mlp_join_torch}, ArgumentError, "binary_reduce is no @triton.jit function"),
        ({"proj_fold": no_mask}, ArgumentError, "proj_fold takes 3 arguments, not 4"),
        ({"proj_fold_bwd": tiles.attention_grad}, ArgumentError, "proj_fold_bwd takes 8 arguments, not 6"),
        ({"D": lambda p, h, g: g}, ArgumentError, "proj_fold_bwd instead of D"),
    ],
)
def test_mistakes_at_the_factory(changes, error, message):
    with pytest.raises(error, match=message):
        mr.MonoidReduce("Mlp", **(MLP | changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"proj_fold": two_results}, ArgumentError, "Triton does not take"),
        ({"proj_fold": one_number}, ArgumentError, "not in its tile's shape"),
        ({"init": lambda a, b: (a[0].new_zeros(2),)}, ShapeError, "init returned no tuple of 1 tensors of 5 rows"),
        ({"init": lambda a, b: a[0]}, ShapeError, "init returned no tuple"),
    ],
)
def test_mistakes_in_the_functions(changes, error, message):
    layer = mr.MonoidReduce("Mlp", **(MLP | changes))
    with pytest.raises(error, match=message):
        layer.apply(*inputs("mlp", 5, 7, torch.float32))


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ([(5, 20), (7, 20)], ArgumentError, "takes 1 row and 2 column tensors"),
        ([(5, 20), (7, 20), (6, 24)], ShapeError, r"column tensors \[6, 7\]"),
        ([(2, 5, 20), (7, 20), (7, 24)], ShapeError, r"\[2, 5, 20\]"),
        ([(5, 300), (7, 300), (7, 24)], ShapeError, "1 to 256 features"),
    ],
)
def test_mistakes_in_a_call(args, error, message):
    with pytest.raises(error, match=message):
        LAYERS["mlp"].kernels.apply(*map(torch.ones, args))


def test_without_a_backward_and_without_a_gpu(monkeypatch):
    layer = mr.MonoidReduce("Mlp", **(MLP | {"proj_fold_bwd": None}))
    x, p, q = inputs("mlp", 5, 7, torch.float64)
    (y,) = layer.apply(x.requires_grad_(), p, q)
    with pytest.raises(NoGradientError, match="without a backward"):
        y.sum().backward()
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(EngineError, match="tensors on one GPU"):
        layer.apply(x, p, q)


def test_a_number_is_no_way_to_cut_for_torch():
    functions = {"proj_fold": tiles.mlp_fold_torch, "binary_reduce": tiles.mlp_join_torch, "proj_fold_bwd": None}
    with pytest.raises(ArgumentError, match="islice is 32"):
        mr.MonoidReduce("Mlp", **(MLP | functions))


def test_the_example_of_the_documentation(seed):
    """It is not run with the other pages, since kernels need a GPU or the interpreter."""
    path = ROOT / "docs" / "tile-functions.md"
    text = path.read_text(encoding="utf-8")
    (block,) = [m for m in BLOCK.finditer(text) if "@triton.jit" in m.group(1)]
    line = text.count("\n", 0, block.start(1))
    space = {"__name__": "page"}
    exec(compile("\n" * line + block.group(1), str(path), "exec"), space)
    x, p, q = (space[n] for n in "xpq")
    expected = torch.autograd.grad((torch.relu(x @ p.T) @ q).sum(), (x, p, q))
    torch.testing.assert_close([t.grad for t in (x, p, q)], list(expected), rtol=1e-4, atol=1e-4)
