"""``logdet``: the logarithm of a determinant by stochastic Lanczos quadrature, with its error and its gradient.

log det K = tr log K is the mean of ⟨z, log(K) z⟩ over random signs z. Each is an integral over K's spectrum that the
tridiagonal matrix of a few Lanczos steps gives almost exactly; conjugate gradients on K w = z are those steps, and w is
what the gradient needs: d log det K = tr(K⁻¹ dK), the mean of ⟨w, dK z⟩.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import arrays
from ..errors import ArgumentError, shown
from . import conjugate_gradients, matrices
from .conjugate_gradients import System

if TYPE_CHECKING:
    from .matrices import Array


class LogDet(NamedTuple):
    """What :func:`logdet` returns: an estimate of the logarithm of a determinant, and its standard error, as tensors
    (of numpy arrays, as 0-dim arrays).

    >>> import torch, monoidreduce as mr
    >>> found = mr.linalg.logdet(lambda v: 2 * v, torch.zeros(10, dtype=torch.float64))
    >>> round(float(found.value), 6), float(found.error) < 1e-9
    (6.931472, True)
    """

    value: Tensor
    error: Tensor


def logdet(
    matrix: Callable[..., Any],
    like: Array,
    *,
    ridge: float | Tensor = 0.0,
    probes: int = 16,
    seed: int = 0,
    tol: float | None = None,
    maxiter: int = 1000,
    progress: bool | Callable[[int, float], None] = False,
    check: bool = True,
) -> LogDet:
    """The logarithm of the determinant of ``K + ridge · I``, estimated with random vectors, and the standard error.

    About ``torch.logdet(K + ridge * torch.eye(N))``, without ever allocating the N × N matrix: the mean over ``probes``
    vectors of random signs, which are those of ``seed``, so that it is a smooth function of what K closes over. The
    error is the standard deviation of that mean (two thirds of estimates are within one, 95 % within two); it shrinks
    as 1/√probes. A value costs one solve with ``probes`` right-hand sides, to ``tol`` (1e-3 for float32, 1e-6 for
    float64 if left out, which adds far less than the error); a gradient one more. The gradient is the unbiased
    estimate of the same vectors, with an error of its own; second derivatives work.

    ``like`` is a tensor or an array with N rows, in the type and on the device of the vectors (b, or the points). The
    other arguments, and what is raised, are those of :func:`cg`.

    >>> import torch, monoidreduce as mr
    >>> x = torch.rand(300, 2, dtype=torch.float64)
    >>> value, error = mr.linalg.logdet(mr.linalg.matrix(mr.ops.kernel_sum, x), x, ridge=0.1, probes=32)
    >>> exact = torch.logdet(torch.exp(-torch.cdist(x, x) ** 2 / 2) + 0.1 * torch.eye(300))
    >>> bool((value - exact).abs() < 4 * error)
    True
    """
    if arrays.is_array(like):
        named: Any = dict(ridge=ridge, probes=probes, seed=seed, tol=tol, maxiter=maxiter, progress=progress)
        border = arrays.Border()
        taken, named["ridge"] = border.take(like, "like"), border.take(ridge, "ridge")
        return border.give(logdet(conjugate_gradients.on_tensors(matrix), taken, **named, check=check))
    if not isinstance(like, Tensor) or like.dim() < 1:
        raise ArgumentError(detail=f"like was given {shown(like)}", fix="Give a tensor with N rows: b, or the points")
    column = like.detach().reshape(len(like), -1)[:, :1] if like.numel() else like.detach().reshape(len(like), 0)
    matrices.check_vectors("like", column)
    if isinstance(probes, bool) or not isinstance(probes, int) or probes < 2:
        raise ArgumentError(
            detail=f"probes was given {shown(probes)}", fix="Give a whole number, 2 or more: their spread is the error"
        )
    if tol is None:
        tol = 1e-3 if column.dtype is torch.float32 else 1e-6
    options = conjugate_gradients.check_options(column, tol, maxiter, None, progress)
    diagonal = matrices.check_ridge(ridge, column)
    if not len(like):
        return LogDet(column.new_zeros(()), column.new_zeros(()))
    product = matrices.as_product(matrix, diagonal, column)
    if check:
        matrices.check_symmetric(product, column)
    draw = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (len(like), probes), generator=draw, device="cpu").to(column) * 2 - 1
    with torch.no_grad():
        steps = conjugate_gradients.Steps([], [])
        conjugate_gradients.solve(product, signs, options, steps=steps)
        each = len(like) * _integrate_log(steps)
        value, error = each.mean(), each.std() / probes**0.5
    value, error = value.to(column.dtype), error.to(column.dtype)
    if torch.is_grad_enabled() and (image := product(signs)).requires_grad:
        value = _Trace.apply(image, value, System(product, options), signs)
    return LogDet(value, error)


def _integrate_log(steps: conjugate_gradients.Steps) -> Tensor:
    """⟨e, log(T) e⟩ for the first unit vector e and the Lanczos matrix T of each column: [k], in float64."""
    alpha, beta = (torch.stack(s).double() for s in (steps.alpha, steps.beta))  # [steps, k]
    done = alpha == 0  # a column that had converged: its matrix ends there
    inverse = torch.where(done, 0.0, 1 / torch.where(done, 1.0, alpha))
    diagonal = inverse.clone()
    diagonal[1:] += beta[:-1] * inverse[:-1]
    diagonal = torch.where(done, 1.0, diagonal)  # log 1 = 0, and nothing leads there
    beside = torch.where(done[1:], 0.0, beta[:-1].clamp(min=0).sqrt() * inverse[:-1])
    whole = torch.diag_embed(diagonal.mT)
    whole = whole + torch.diag_embed(beside.mT, 1) + torch.diag_embed(beside.mT, -1)
    values, vectors = torch.linalg.eigh(whole)
    return (vectors[:, 0].square() * values.clamp(min=torch.finfo(torch.float64).tiny).log()).sum(-1)


class _Trace(torch.autograd.Function):
    """The estimate as a function of K z: its derivative by it is K⁻¹ z / probes."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, value: Tensor, system: System, signs: Tensor) -> Tensor:
        ctx.system, ctx.signs = system, signs
        return value.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None, None]:
        weights = conjugate_gradients.solve_with_gradient(ctx.system, ctx.signs)
        return cotangent * weights / ctx.signs.shape[1], None, None, None
