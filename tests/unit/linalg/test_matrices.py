"""Matrices of points: numpy arrays in and out, ``K @ v``, and mistakes that are found when a matrix is made."""

import numpy
import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row, ops
from monoidreduce.linalg import cg, logdet, matrix, nystroem, operator

X = numpy.random.default_rng(0).random((120, 2))
V = numpy.random.default_rng(1).random((120, 3))
K = numpy.exp(-((X[:, None] - X[None]) ** 2).sum(-1) / (2 * 0.3**2))


def test_products_are_of_the_kind_of_points_and_vectors():
    of_arrays, of_tensors = (matrix(ops.kernel_sum, points, bandwidth=0.3) for points in (X, torch.tensor(X)))
    for product in (of_arrays @ V, of_arrays(V)):
        assert isinstance(product, numpy.ndarray)
        numpy.testing.assert_allclose(product, K @ V, rtol=1e-10)
    for product in (of_tensors @ torch.tensor(V), of_tensors @ V, of_arrays @ torch.tensor(V)):
        assert isinstance(product, torch.Tensor)
        numpy.testing.assert_allclose(product, K @ V, rtol=1e-10)
    numpy.testing.assert_allclose(of_arrays @ V[:, 0], K @ V[:, 0], rtol=1e-10)


@mr.op
def of_numbers(x: Row["d"], y: Col["d"], v: Col, scale: float):
    return mr.sum(torch.exp(-mr.sqdist(x, y) / (2 * scale**2)) * v)


@mr.op
def of_vectors(x: Row["d"], y: Col["d"], v: Col["e"], scale: float):
    return mr.sum(torch.exp(-mr.sqdist(x, y) / (2 * scale**2)) * v)


@pytest.mark.parametrize("op", [of_numbers, of_vectors])
def test_ones_own_op_multiplies_a_vector_and_several(op):
    """Also through scipy, and for conjugate gradients, which begin with two vectors."""
    linalg = pytest.importorskip("scipy.sparse.linalg")
    kernel, outside = matrix(op, X, scale=0.3), operator(op, X, scale=0.3, ridge=0.1)
    for v in (V, V[:, 0]):
        numpy.testing.assert_allclose(kernel @ v, K @ v, rtol=1e-10)
        numpy.testing.assert_allclose(outside @ v, K @ v + 0.1 * v, rtol=1e-10)
        solved = numpy.linalg.solve(K + 0.1 * numpy.eye(120), v)
        numpy.testing.assert_allclose(cg(outside, v, ridge=0.0), solved, atol=1e-7)
    largest = linalg.eigsh(outside, k=2, return_eigenvectors=False)
    numpy.testing.assert_allclose(sorted(largest), numpy.linalg.eigvalsh(K)[-2:] + 0.1, rtol=1e-9)


def test_a_preconditioner_and_a_determinant_of_numpy_points():
    kernel = matrix(ops.kernel_sum, X, bandwidth=0.3)
    helper = nystroem(kernel, X, rank=20, ridge=0.1)
    assert isinstance(helper(V), numpy.ndarray)
    found = cg(kernel, V, ridge=0.1, preconditioner=helper)
    assert isinstance(found, numpy.ndarray)
    numpy.testing.assert_allclose(found, numpy.linalg.solve(K + 0.1 * numpy.eye(120), V), atol=1e-7)
    value, error = logdet(kernel, X, ridge=0.1)
    assert isinstance(value, numpy.ndarray)
    assert abs(value - numpy.linalg.slogdet(K + 0.1 * numpy.eye(120))[1]) < 4 * error


def test_a_scipy_operator_does_not_go_with_a_tensor():
    pytest.importorskip("scipy")
    A = operator(ops.kernel_sum, X, bandwidth=0.3)
    with pytest.raises(mr.ArgumentError, match=r"gives a numpy array, float64\[120\], for a tensor v.*linalg.matrix"):
        cg(A, torch.tensor(V[:, 0]), ridge=0.1)


def test_arguments_that_the_op_does_not_take_are_refused_when_the_matrix_is_made():
    pytest.importorskip("scipy")
    with pytest.raises(mr.ArgumentError, match=r"\(x, x, v, float64\[120, 2\]\).*There is no rectangular matrix"):
        operator(ops.kernel_sum, X[:50], X)
    with pytest.raises(mr.ArgumentError, match="'bandwith'"):
        matrix(ops.kernel_sum, X, bandwith=0.3)

    @mr.op
    def scaled(x: mr.Row["d"], y: mr.Col["d"], v: mr.Col["e"], scale: float):
        return mr.sum(scale * (x @ y) * v)

    with pytest.raises(mr.ArgumentError, match="'scale'"):
        matrix(scaled, X)
    pairs = mr.edges(torch.arange(121), torch.arange(120))  # the diagonal alone
    diagonal = matrix(scaled, torch.tensor(X), 2.0, cols=pairs) @ torch.tensor(V)
    torch.testing.assert_close(diagonal, torch.tensor(2 * (X * X).sum(-1, keepdims=True) * V))
