"""``mr.linalg.cg`` beside dense torch: values, gradients of both orders, several systems, errors."""

import numpy
import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row, linalg, ops


@mr.op
def matern(x: Row["d"], y: Col["d"], v: Col["e"], scale: float):
    """(1 + d) exp(-d), d the distance over the scale: a kernel that no layer has."""
    square = mr.sqdist(x, y)
    zero = square == 0
    d = torch.where(zero, 0.0, torch.sqrt(torch.where(zero, 1.0, square))) / scale
    return mr.sum((1 + d) * torch.exp(-d) * v)


def points(n=60, d=2, dtype=torch.float64, seed=0):
    return torch.rand(n, d, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def gaussian(x, bandwidth):
    return torch.exp(-(x[:, None] - x).square().sum(-1) / (2 * bandwidth**2))


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
def test_solutions_are_those_of_a_dense_solver(dtype, tol):
    x, b = points(300, 3, dtype), points(300, 5, dtype, 1)
    found = linalg.cg(lambda v: ops.kernel_sum(x, x, v, bandwidth=0.3), b, ridge=0.1)
    dense = gaussian(x.double(), 0.3) + 0.1 * torch.eye(300).double()
    assert ((dense @ found.double() - b).norm(dim=0) <= tol * b.double().norm(dim=0)).all()
    closer = linalg.cg(linalg.matrix(ops.kernel_sum, x, bandwidth=0.3), b, ridge=1.0, tol=tol / 10)
    right = torch.linalg.solve(dense + 0.9 * torch.eye(300).double(), b.double())
    plain = torch.linalg.solve(gaussian(x, 0.3) + torch.eye(300).to(dtype), b)
    assert (closer.double() - right).norm() <= max(2 * (plain.double() - right).norm(), tol / 10 * right.norm())
    one = linalg.cg(lambda v: ops.kernel_sum(x, x, v, bandwidth=0.3), b[:, 0], ridge=0.1)
    assert one.shape == (300,) and torch.allclose(one, found[:, 0], rtol=1e-3, atol=1e-3)


def test_a_users_op_a_diagonal_and_non_contiguous_systems():
    x, b, diagonal = points(80), points(3, 80, seed=1).mT, 0.1 + points(80, 1, seed=2)[:, 0]
    d = (x[:, None] - x).square().sum(-1).sqrt() / 0.5
    found = linalg.cg(linalg.matrix(matern, x, 0.5), b, ridge=diagonal)
    assert torch.allclose(found, torch.linalg.solve((1 + d) * torch.exp(-d) + diagonal.diag(), b))


def solved(x, b, scale, ridge):
    product = lambda v: ops.kernel_sum(x, x, v, bandwidth=scale.exp())  # made of what asks for a gradient
    return linalg.cg(product, b, ridge=ridge, tol=1e-13, check=False)


def everything_with_a_gradient():
    x, b = points(7).requires_grad_(), points(7, 2, seed=1).requires_grad_()
    return (x, b, *(torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (-0.9, 0.3)))


@pytest.mark.slow
def test_numerical_gradients_of_both_orders():
    assert torch.autograd.gradcheck(solved, everything_with_a_gradient())
    assert torch.autograd.gradgradcheck(solved, everything_with_a_gradient())


def test_gradients_of_both_orders():
    everything = everything_with_a_gradient()

    def dense(x, b, scale, ridge):
        return torch.linalg.solve(gaussian(x, scale.exp()) + ridge * torch.eye(7).double(), b)

    results = []
    for solve in (solved, dense):
        found = solve(*everything)
        first = torch.autograd.grad(
            (found * found.detach()).sum() + found.square().sum(), everything, create_graph=True
        )
        both = sum(g.square().sum() for g in first) + found.sum()  # solution and gradient in one backward
        results.append((*first, *torch.autograd.grad(both, everything)))
    for own, theirs in zip(*results, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-7, atol=1e-9)


def test_a_first_backward_solves_once_and_keeps_no_iterations():
    x, b = points(200), points(200, 1, seed=1)[:, 0]
    scale = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    products = []

    def product(v):
        products.append(v.requires_grad)
        return ops.kernel_sum(x, x, v, bandwidth=scale)

    found = linalg.cg(product, b, ridge=0.1)
    forward = len(products)
    found.sum().backward()
    assert len(products) - forward < forward  # one solve more; the step that is 0 asks for none
    assert products[:-1].count(True) <= 2  # two products have a graph: nothing of the iterations is kept


def test_converged_systems_stop():
    x = points(100, 1)
    easy = torch.linalg.eigh(gaussian(x, 0.3)).eigenvectors[:, -1:]  # an eigenvector: one iteration
    widths = []

    def product(v):
        widths.append(v.shape[1])
        return ops.kernel_sum(x, x, v, bandwidth=0.3)

    both = torch.cat([easy, easy * 2, easy * 3, points(100, 1, seed=1)], 1)
    found = linalg.cg(product, both, ridge=1e-3, check=False)
    assert widths.count(1) > widths.count(4)
    assert torch.allclose(product(found) + 1e-3 * found, both, atol=1e-6)


def test_a_preconditioner_saves_iterations_and_changes_nothing():
    x, b = points(500, 1), points(500, 2, seed=1)
    matrix = linalg.matrix(ops.kernel_sum, x, bandwidth=0.2)
    counts = {}
    results = []
    for name, helper in (("plain", None), ("nystroem", linalg.nystroem(matrix, b, rank=30, ridge=1e-4))):
        progress = lambda iteration, residual, name=name: counts.update({name: iteration})
        results.append(linalg.cg(matrix, b, ridge=1e-4, preconditioner=helper, progress=progress))
    assert counts["nystroem"] * 3 < counts["plain"]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_a_start_is_used(capfd):
    x, b = points(100), points(100, 1, seed=1)[:, 0]
    product = lambda v: ops.kernel_sum(x, x, v, bandwidth=0.3)
    found = linalg.cg(product, b, ridge=0.1, progress=True)
    assert "cg: " in (said := capfd.readouterr().err) and "residual" in said and said.endswith("s\n")
    seen = []
    again = linalg.cg(product, b, ridge=0.1, x0=found, progress=lambda *step: seen.append(step))
    assert not seen and torch.equal(again, found)


def test_numpy_comes_and_goes():
    x, b = points(50).numpy(), points(50, 2, seed=1).numpy()
    found = linalg.cg(lambda v: ops.kernel_sum(torch.from_numpy(x), torch.from_numpy(x), v), b, ridge=0.1)
    assert isinstance(found, numpy.ndarray)
    dense = numpy.exp(-((x[:, None] - x) ** 2).sum(-1) / 2) + 0.1 * numpy.eye(50)
    numpy.testing.assert_allclose(found, numpy.linalg.solve(dense, b), rtol=1e-6, atol=1e-6)
    in_numpy = linalg.cg(lambda v: dense @ v, b, preconditioner=lambda v: v / numpy.diag(dense)[:, None])
    numpy.testing.assert_allclose(in_numpy, found, rtol=1e-6, atol=1e-6)
    with pytest.raises(mr.ArgumentError, match="called with a numpy array, as b is one"):
        linalg.cg(lambda v: torch.mm(torch.from_numpy(dense), v), b)
    for wrong in (lambda v: v[:5], lambda v: None, lambda v: v.astype("f")):
        with pytest.raises(mr.ShapeError, match="the preconditioner gave"):
            linalg.cg(lambda v: dense @ v, b, preconditioner=wrong)


def test_scipy_uses_an_operator():
    from scipy.sparse.linalg import cg, eigsh

    x, b = points(90), points(90, 1, seed=1)[:, 0]
    operator = linalg.operator(ops.kernel_sum, x.numpy(), bandwidth=0.3, ridge=0.5)
    dense = gaussian(x, 0.3) + 0.5 * torch.eye(90).double()
    found, failed = cg(operator, b.numpy(), rtol=1e-10)
    assert not failed and numpy.allclose(found, torch.linalg.solve(dense, b).numpy(), atol=1e-6)
    largest = eigsh(operator, k=2, return_eigenvectors=False)
    assert numpy.allclose(numpy.sort(largest), torch.linalg.eigvalsh(dense)[-2:].numpy())
    assert numpy.allclose(operator @ numpy.eye(90)[:, :3], dense[:, :3].numpy())


def test_empty_systems():
    x = points(0)
    product = lambda v: ops.kernel_sum(x, x, v)
    assert linalg.cg(product, torch.zeros(0, 2).double()).shape == (0, 2)
    assert linalg.cg(lambda v: v, torch.zeros(5, 0)).shape == (5, 0)
    assert linalg.cg(lambda v: v, torch.zeros(5)).eq(0).all()


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (dict(matrix=torch.eye(4)), mr.ArgumentError, r"float32\[4, 4\]"),
        (dict(b=torch.zeros(4, dtype=torch.bfloat16)), mr.DTypeError, "float32 or float64"),
        (dict(b=torch.zeros(4, 1, 1)), mr.ShapeError, r"\(4, 1, 1\)"),
        (dict(ridge=-1.0), mr.ArgumentError, "ridge was given -1"),
        (dict(ridge=torch.ones(5)), mr.ShapeError, "4 rows"),
        (dict(tol=0), mr.ArgumentError, "tol was given 0"),
        (dict(maxiter=0), mr.ArgumentError, "maxiter was given 0"),
        (dict(x0=torch.zeros(5)), mr.ShapeError, "x0"),
        (dict(preconditioner=3), mr.ArgumentError, "preconditioner"),
        (dict(progress="yes"), mr.ArgumentError, "progress"),
        (dict(matrix=lambda v: v[:2]), mr.ShapeError, r"float32\[2\]"),
        (dict(matrix=lambda v: v.double()), mr.ShapeError, "float64"),
        (dict(matrix=lambda v: torch.triu(torch.ones(4, 4)) @ v), mr.ArgumentError, "not symmetric"),
        (dict(matrix=lambda v: -v), mr.ArgumentError, "not positive"),
        (dict(matrix=lambda v: v * float("nan")), mr.ArgumentError, "not finite"),
        (dict(matrix=lambda v: torch.tensor([3.0, 2, 1, -1e-3]).view(-1, 1) * v), mr.ArgumentError, "not positive"),
    ],
)
def test_mistakes_are_named(change, error, says):
    given = dict(matrix=lambda v: 2 * v, b=torch.ones(4)) | change
    with pytest.raises(error, match=says):
        linalg.cg(given.pop("matrix"), given.pop("b"), **given)


def test_what_does_not_converge_is_an_error():
    x = points(200, 1)
    product = lambda v: ops.kernel_sum(x, x, v)
    with pytest.raises(mr.ConvergenceError, match=r"after 5 iterations.*nystroem"):
        linalg.cg(product, x[:, 0], ridge=1e-8, maxiter=5)
    single = x.float()
    with pytest.raises(mr.ConvergenceError, match=r"float64|larger ridge"):
        linalg.cg(lambda v: ops.kernel_sum(single, single, v), single[:, 0], ridge=1e-3, tol=1e-12, maxiter=400)
