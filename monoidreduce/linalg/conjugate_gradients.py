"""``cg``: solve K x = b for a symmetric positive definite K that is only known by its products, with gradients.

The solution is differentiated implicitly: nothing of the iterations is kept. With S = K⁻¹, x = u + S (b - K u) is the
solution for *any* u, also as a function of all that K and b depend on. So the graph is that of two such steps from the
solution found, in which S is an autograd function whose backward solves with K again. One step has the right first
derivative; the second makes the second derivative right (two Newton steps of an exact start are exact to third order),
whatever K closes over: points, bandwidths, a ridge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import arrays
from ..errors import ArgumentError, ShapeError, shown
from . import iterations, matrices
from .iterations import Options
from .matrices import Product

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}


@dataclass
class System:
    """A product and how its systems are solved; and, within one backward, the size of the cotangents that it met."""

    product: Product
    options: Options
    cotangents: dict[str, Any] = field(default_factory=dict)


def cg(
    matrix: Callable[[Tensor], Tensor],
    b: Tensor,
    *,
    ridge: float | Tensor = 0.0,
    x0: Tensor | None = None,
    tol: float | None = None,
    maxiter: int = 1000,
    preconditioner: Callable[[Tensor], Tensor] | None = None,
    progress: bool | Callable[[int, float], None] = False,
    check: bool = True,
) -> Tensor:
    """Solve ``(K + ridge · I) x = b`` by conjugate gradients, for a matrix K that is only known by its products.

    The same as ``torch.linalg.solve(K + ridge * torch.eye(N), b)``, without ever allocating the N × N matrix. K is a
    function of v that gives ``K @ v``: ``lambda v: ops.kernel_sum(x, x, v)``, :func:`matrix`, or any other. It must be
    symmetric, and positive definite with the ridge; one product with two random vectors checks this (``check=False``
    leaves it out), and every step after it.

    Gradients reach b, the ridge and everything K closes over; each is one more solve with K, and second derivatives
    work. The iterations keep no graph.

    Shapes: ``b`` [N], or [N, k] for k systems at once (a system that has converged stops), gives x of the same shape.
    ``ridge`` is a number, a 0-dim tensor, or a diagonal [N]. ``x0`` is where to start. Iterations end where
    ``|b - K x| ≤ tol |b|`` (1e-4 for float32, 1e-10 for float64 if left out), by the true residual.
    ``preconditioner`` gives an approximation of ``(K + ridge)⁻¹ v`` for v [N, k]: see :func:`nystroem`. With
    ``progress=True`` a line on stderr shows iterations and residual; or give a function of both. numpy arrays give a
    numpy array.

    Raises :class:`ConvergenceError` where ``maxiter`` iterations, or the precision, do not suffice,
    :class:`ArgumentError` for a matrix that is not symmetric or not positive definite, and :class:`ShapeError`,
    :class:`DTypeError` or :class:`DeviceError` for arguments that do not fit.

    >>> import torch, monoidreduce as mr
    >>> x, b = torch.rand(300, 2, dtype=torch.float64), torch.rand(300, 2, dtype=torch.float64)
    >>> bandwidth = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    >>> found = mr.linalg.cg(lambda v: mr.ops.kernel_sum(x, x, v, bandwidth=bandwidth), b, ridge=0.1)
    >>> K = torch.exp(-torch.cdist(x, x) ** 2 / (2 * bandwidth**2)) + 0.1 * torch.eye(300)
    >>> torch.allclose(found, torch.linalg.solve(K, b))
    True
    >>> by_dense, = torch.autograd.grad(torch.linalg.solve(K, b).square().sum(), bandwidth)
    >>> torch.allclose(torch.autograd.grad(found.square().sum(), bandwidth)[0], by_dense)
    True
    """
    if arrays.has_arrays((b, ridge, x0)):
        named: Any = dict(tol=tol, maxiter=maxiter, preconditioner=preconditioner, progress=progress, check=check)
        border = arrays.Border()
        taken = {n: border.take(v, n) for n, v in (("b", b), ("ridge", ridge), ("x0", x0))}
        return border.give(cg(_on_tensors(matrix), taken.pop("b"), **taken, **named))
    matrices.check_vectors("b", b)
    diagonal = matrices.check_ridge(ridge, b)
    options = check_options(b, tol, maxiter, preconditioner, progress)
    columns = b.unsqueeze(-1) if b.dim() == 1 else b
    if x0 is not None and (not isinstance(x0, Tensor) or x0.shape != b.shape or x0.dtype != b.dtype):
        raise ShapeError(detail=f"x0 was given {shown(x0)}, b is {shown(b)}", fix="Give both the same shape and type")
    if not b.numel():
        return torch.zeros_like(b)
    product = matrices.as_product(matrix, diagonal, columns)
    if check:
        matrices.check_symmetric(product, columns.detach())
    start = None if x0 is None else x0.detach().reshape(columns.shape)
    return solve_with_gradient(System(product, options), columns, start).view(b.shape)


def check_options(b: Tensor, tol: Any, maxiter: Any, preconditioner: Any, progress: Any) -> Options:
    """The options of a solve, checked."""
    if tol is None:
        tol = TOLERANCE[b.dtype]
    if isinstance(tol, bool) or not isinstance(tol, int | float) or not 0 < tol < 1:
        raise ArgumentError(detail=f"tol was given {shown(tol)}", fix="Give a number between 0 and 1")
    if isinstance(maxiter, bool) or not isinstance(maxiter, int) or maxiter < 1:
        raise ArgumentError(detail=f"maxiter was given {shown(maxiter)}", fix="Give a whole number, 1 or more")
    if preconditioner is not None and not callable(preconditioner):
        raise ArgumentError(
            detail=f"preconditioner was given {shown(preconditioner)}",
            fix="Give a function of v [N, k], such as linalg.nystroem(matrix, b, rank=100, ridge=ridge)",
        )
    if not callable(progress) and not isinstance(progress, bool):
        raise ArgumentError(
            detail=f"progress was given {shown(progress)}", fix="Give True, or a function of iteration and residual"
        )
    show = progress if callable(progress) else iterations.print_progress(tol, maxiter) if progress else None
    return Options(float(tol), maxiter, preconditioner, show)


def _on_tensors(matrix: Any) -> Any:
    """A matrix that may answer with numpy arrays, as a function of tensors."""
    if not callable(matrix):
        return matrix
    return lambda v: arrays.to_tensor(got, "the product") if arrays.is_array(got := matrix(v)) else got


def solve_with_gradient(system: System, b: Tensor, start: Tensor | None = None) -> Tensor:
    """The solution x [N, k] for b [N, k], differentiable by b and by what the product closes over."""
    with torch.no_grad():
        found = iterations.solve(system.product, b.detach(), system.options, start)
    if not torch.is_grad_enabled():
        return found
    first = b - system.product(found)
    if not first.requires_grad:
        return found
    near = found + _Inverse.apply(first, system, "outer")
    return near + _Inverse.apply(b - system.product(near), system, "inner")


class _Inverse(torch.autograd.Function):
    """S r for a residual r of which nothing but its derivative matters: 0, as the solution was found already."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, system: System, which: str) -> Tensor:
        ctx.system, ctx.which = system, which
        return torch.zeros_like(residual)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        # In a first backward the outer step's cotangent is g - K (S g), the residual of the inner step's own solve:
        # what is below that solve's tolerance is 0.
        system, task = ctx.system, torch._C._current_graph_task_id()
        floor: Any = 0.0
        if ctx.which == "inner":
            system.cotangents[task] = 2 * system.options.tol * cotangent.detach().norm(dim=0)
        else:
            floor = system.cotangents.pop(task, 0.0)
        if isinstance(floor, Tensor) and bool((cotangent.detach().norm(dim=0) <= floor).all()):
            return torch.zeros_like(cotangent), None, None
        if not torch.is_grad_enabled():
            return iterations.solve(system.product, cotangent, system.options, floor=floor), None, None
        return solve_with_gradient(system, cotangent), None, None
