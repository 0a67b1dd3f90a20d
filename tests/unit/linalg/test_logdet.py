"""``mr.linalg.logdet`` and the Nyström preconditioner, held to dense torch."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import linalg, ops


def points(n, d, dtype=torch.float64):
    return torch.rand(n, d, dtype=dtype, generator=torch.Generator().manual_seed(0))


def dense(x, bandwidth, ridge):
    square = (x[:, None] - x).square().sum(-1)
    return torch.exp(-square / (2 * bandwidth**2)) + ridge * torch.eye(len(x), dtype=x.dtype)


@pytest.mark.parametrize(("dtype", "ridge"), [(torch.float32, 1.0), (torch.float64, 0.01)])
def test_the_error_is_as_stated(dtype, ridge):
    x = points(100, 2, dtype)
    exact = torch.logdet(dense(x.double(), 0.3, ridge))
    matrix = linalg.matrix(ops.kernel_sum, x, bandwidth=0.3)
    values, errors = zip(*(linalg.logdet(matrix, x, ridge=ridge, seed=seed) for seed in range(4)), strict=True)
    off = (torch.stack(values).double() - exact) / torch.stack(errors).double()
    assert off.abs().max() < 4 and off.abs().median() < 2  # in standard errors
    assert torch.stack(errors).mean() < 0.05 * exact.abs() + 2


def test_as_many_probes_as_a_basis_are_exact():
    diagonal = torch.arange(1.0, 9.0, dtype=torch.float64)
    found = linalg.logdet(lambda v: diagonal.unsqueeze(-1) * v, diagonal, tol=1e-12)
    assert torch.allclose(found.value, diagonal.log().sum()) and found.error < 1e-9  # signs see a diagonal exactly


def test_gradients_are_those_of_the_estimate():
    x = points(60, 2).requires_grad_()
    bandwidth, ridge = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.3, 0.5))

    def estimate(x, bandwidth, ridge):
        product = lambda v: ops.kernel_sum(x, x, v, bandwidth=bandwidth)
        return linalg.logdet(product, x, ridge=ridge, probes=400, tol=1e-10, check=False).value

    everything = (x, bandwidth, ridge)
    own = torch.autograd.grad(estimate(*everything), everything, create_graph=True)
    # The estimate's own vectors, densely: the mean of <w, dK z>
    signs = torch.randint(0, 2, (60, 400), generator=torch.Generator().manual_seed(0)).double() * 2 - 1
    K = dense(*everything)
    image = (torch.linalg.solve(K.detach(), signs) * (K @ signs)).sum() / 400
    for found, right in zip(own, torch.autograd.grad(image, everything), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)
    # and about those of the determinant, where sums are taken
    exact = torch.autograd.grad(torch.logdet(dense(*everything)), everything, create_graph=True)
    second = [torch.autograd.grad(g[1], (bandwidth, ridge)) for g in (own, exact)]
    for found, right in zip((*own[1:], *second[0]), (*exact[1:], *second[1]), strict=True):
        assert (found - right).abs() < 0.1 * right.abs()
    # of one set of probes the value is a function whose gradient this is: a diagonal matrix is seen exactly
    weights = torch.rand(8, dtype=torch.float64, requires_grad=True)
    once = lambda w: linalg.logdet(lambda v: (1 + w**2).unsqueeze(-1) * v, w, tol=1e-12, check=False).value
    assert torch.autograd.gradcheck(once, (weights,)) and torch.autograd.gradgradcheck(once, (weights,))


def test_nystroem_finds_the_largest_eigenvalues():
    x = points(300, 1)
    found = linalg.nystroem(linalg.matrix(ops.kernel_sum, x, bandwidth=0.5), x, rank=25, ridge=1e-3)
    exact = torch.linalg.eigvalsh(dense(x, 0.5, 0.0)).flip(0)
    assert torch.allclose(found.eigenvalues[:8], exact[:8], rtol=1e-3)
    v = points(300, 2)
    inverse = torch.linalg.solve(dense(x, 0.5, 1e-3), v)
    nearly = found(v) / (found.eigenvalues[-1] + 1e-3)
    assert (nearly - inverse).norm() < 1e-2 * inverse.norm()
    assert torch.allclose(found(v[:, 0]), found(v)[:, 0])


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: linalg.logdet(lambda v: v, torch.ones(3), probes=1), mr.ArgumentError, "probes was given 1"),
        (lambda: linalg.logdet(lambda v: v, 3), mr.ArgumentError, "like was given 3"),
        (lambda: linalg.logdet(lambda v: -v, torch.ones(3)), mr.ArgumentError, "not positive"),
        (lambda: linalg.nystroem(lambda v: v, torch.ones(3), rank=4, ridge=1.0), mr.ArgumentError, "1 to 3"),
        (lambda: linalg.nystroem(lambda v: v, torch.ones(3), rank=2, ridge=0.0), mr.ArgumentError, "above 0"),
        (lambda: linalg.nystroem(lambda v: -v, torch.ones(3), rank=2, ridge=1.0), mr.ArgumentError, "not positive"),
        (lambda: linalg.nystroem(lambda v: v, torch.ones(3).half(), rank=2, ridge=1.0), mr.DTypeError, "float16"),
        (lambda: linalg.matrix(3, torch.ones(3, 2)), mr.ArgumentError, "op was given 3"),
        (lambda: linalg.matrix(ops.kernel_sum, torch.ones(3)), mr.ShapeError, r"float32\[3\]"),
    ],
)
def test_mistakes_are_named(call, error, says):
    with pytest.raises(error, match=says):
        call()
