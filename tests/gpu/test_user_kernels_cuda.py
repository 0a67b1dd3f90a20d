"""Tile functions written in Triton, on a GPU: values and gradients beside the same functions in torch and float64."""

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.support.user_kernel_cases import LAYERS, inputs


def pulled(layer, args, cotangents):
    leaves = [a.detach().requires_grad_() if a.is_floating_point() else a for a in args]
    out = layer.apply(*leaves)
    given = [c.to(o.dtype) for c, o in zip(cotangents, out, strict=True)]
    return [*out, *torch.autograd.grad(out, [a for a in leaves if a.requires_grad], given)]


@pytest.mark.parametrize("size", [(1, 1), (111, 59), (257, 1000)], ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("name", sorted(LAYERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
def test_error_is_within_twice_that_of_torch(name, size, dtype):
    gen = torch.Generator().manual_seed(3)
    args = [a.cuda() for a in inputs(name, *size, dtype, gen)]
    exact = [a.double() if a.is_floating_point() else a for a in args]
    products = LAYERS[name].torch.apply(*args)
    given = [torch.randn(p.shape, generator=gen).to(p.dtype).cuda().double() for p in products]
    truths = pulled(LAYERS[name].torch, exact, given)
    got, plain = pulled(LAYERS[name].kernels, args, given), pulled(LAYERS[name].torch, args, given)
    for mine, theirs, truth in zip(got, plain, truths, strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - truth).norm() <= 2 * (theirs - truth).norm() + 1e-6 * truth.norm()


def test_a_thousand_runs_are_bitwise_equal():
    args = [a.cuda() for a in inputs("attention", 200, 300, torch.bfloat16, torch.Generator().manual_seed(5))]
    first = LAYERS["attention"].kernels.apply(*args)
    for _ in range(1000):
        again = LAYERS["attention"].kernels.apply(*args)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
