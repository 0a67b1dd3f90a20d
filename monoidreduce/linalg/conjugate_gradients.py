"""``cg``: solve K x = b for a symmetric positive definite K that is only known by its products, with gradients.

The solution is differentiated implicitly: nothing of the iterations is kept. With S = K⁻¹, x = u + S (b - K u) is the
solution for *any* u, also as a function of all that K and b depend on. So the graph is that of two such steps from the
solution found, in which S is an autograd function whose backward solves with K again. One step has the right first
derivative; the second makes the second derivative right (two Newton steps of an exact start are exact to third order),
whatever K closes over: points, bandwidths, a ridge.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from .. import arrays
from ..errors import ArgumentError, ConvergenceError, MonoidReduceError, ShapeError, shown
from . import matrices
from .matrices import Product, not_positive

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .matrices import Array

# The loop of conjugate gradients: several right-hand sides at once, each with its own steps.
#
# Nothing here is differentiated: ``conjugate_gradients.py`` puts a gradient above it.

LEAST_SECONDS = 0.5  # between two lines of progress
RESTARTS = 8  # how often the true residual may disagree with the recurrence before that is an error

Progress = Callable[[int, float], None]


@dataclass(frozen=True)
class Options:
    """How far, how long, and with what help a system is solved; the same for its gradient's systems."""

    tol: float
    maxiter: int
    preconditioner: Callable[[Tensor], Tensor] | None = None
    progress: Progress | None = None


@dataclass
class Steps:
    """The step lengths of each column [k], iteration by iteration: what the Lanczos matrix is made of."""

    alpha: list[Tensor]
    beta: list[Tensor]


def print_progress(tol: float, maxiter: int) -> Progress:
    """What prints one line to stderr and keeps it up to date: iterations, the largest residual, seconds."""
    begin, last = time.monotonic(), [0.0]

    def show(iteration: int, residual: float) -> None:
        now = time.monotonic()
        done = residual <= tol or iteration >= maxiter
        if done or now - last[0] >= LEAST_SECONDS:
            last[0] = now
            line = f"\rcg: {iteration} of at most {maxiter} iterations, residual {residual:.1e} of {tol:.0e}"
            sys.stderr.write(f"{line}, {now - begin:.1f} s" + ("\n" if done else ""))
            sys.stderr.flush()

    return show


def solve(
    product: Product,
    b: Tensor,
    options: Options,
    start: Tensor | None = None,
    floor: Tensor | float = 0.0,
    steps: Steps | None = None,
) -> Tensor:
    """x [N, k] with |b - K x| ≤ tol |b| in every column; raises ConvergenceError where that is not reached.

    ``floor``: an absolute bound [k] besides, below which residuals do not matter. ``steps`` collects step lengths (then
    there is no preconditioner, and columns stay where they are)."""
    sizes = b.norm(dim=0)
    bound = torch.maximum(options.tol * sizes, torch.as_tensor(floor, dtype=b.dtype, device=b.device))
    x = torch.zeros_like(b) if start is None else start.clone()
    residual = b.clone() if start is None else b - product(x)
    iteration, before = 0, math.inf
    for _ in range(RESTARTS):
        left = (residual.norm(dim=0) > bound).nonzero().squeeze(-1)
        if not len(left):
            return x
        whole = len(left) == b.shape[1]
        part, r, limit = (x, residual, bound) if whole else (x[:, left], residual[:, left], bound[left])
        own = sizes if whole else sizes[left]
        part, iteration = _iterate(product, part, r, (limit / 2, own), options, iteration, steps)  # a half for drift
        if whole:
            x = part
        else:
            x[:, left] = part
        residual = b - product(x)  # the recurrence drifts from the true residual; only the true one counts
        reached = _find_largest(residual.norm(dim=0), bound)
        if reached <= 1 or iteration >= options.maxiter:
            break
        if reached > before / 2:  # rounding decides: another restart would not help
            break
        before, steps = reached, None
    norms = residual.norm(dim=0)
    if _find_largest(norms, bound) <= 1:
        return x
    worst = int((norms / bound.clamp(min=1e-300)).argmax())
    relative = float(norms[worst] / sizes[worst]) if float(sizes[worst]) else math.inf
    raise ConvergenceError(
        iterations=iteration,
        residual=f"{relative:.1e}",
        tol=f"{options.tol:.1e}",
        column=f" of column {worst}" if b.shape[1] > 1 else "",
        fix=_advise(iteration >= options.maxiter, b.dtype, options.preconditioner is not None),
    )


def _find_largest(norms: Tensor, bound: Tensor) -> float:
    """The largest residual in units of its bound; NaN is infinite."""
    found = torch.where(norms == 0, 0.0, norms / bound)
    return float(found.nan_to_num(nan=math.inf).max()) if found.numel() else 0.0


def _advise(too_few: bool, dtype: torch.dtype, preconditioned: bool) -> str:
    more = "" if preconditioned else "a preconditioner (linalg.nystroem), "
    if too_few:
        return f"Try {more}a larger ridge, a larger tol, or a larger maxiter"
    precision = "float64, " if dtype is torch.float32 else ""
    return f"Rounding keeps it there. Try {precision}{more}a larger ridge, or a larger tol"


def _iterate(
    product: Product,
    x: Tensor,
    r: Tensor,
    scale: tuple[Tensor, Tensor],
    options: Options,
    iteration: int,
    steps: Steps | None,
) -> tuple[Tensor, int]:
    """Iterate until the recurrence's residuals are below ``scale``'s bounds (the first; the second are sizes of b).

    A column that is done stays as it is; once half are, the others go on alone."""
    bound, sizes = scale
    helped = options.preconditioner or (lambda v: v)
    found, place = x.clone(), torch.arange(x.shape[1], device=x.device)
    x, r = x.clone(), r.clone()
    z = helped(r)
    p, rz = z.clone(), (r * z).sum(0)
    active = r.norm(dim=0) > bound
    while iteration < options.maxiter:
        many = int(active.sum())
        if not many:
            break
        if steps is None and 2 * many <= x.shape[1]:
            found[:, place] = x
            keep = active.nonzero().squeeze(-1)
            x, r, p, place, rz = x[:, keep], r[:, keep], p[:, keep], place[keep], rz[keep]
            bound, sizes, active = bound[keep], sizes[keep], active[keep]
        image = product(p)
        curvature = (p * image).sum(0)
        if bool((active & ~(curvature > 0)).any()):
            _raise_curvature(p, image, curvature, active)
        alpha = torch.where(active, rz / curvature, 0.0)
        x, r = x + alpha * p, r - alpha * image
        z = helped(r)
        new = (r * z).sum(0)
        beta = torch.where(active & (rz != 0), new / rz, 0.0)
        p, rz = z + beta * p, torch.where(active, new, rz)
        if steps is not None:
            steps.alpha.append(alpha)
            steps.beta.append(beta)
        norms = r.norm(dim=0)
        active = active & (norms > bound)
        iteration += 1
        if options.progress is not None:
            options.progress(iteration, float((norms / sizes.clamp(min=1e-300)).max()))
    found[:, place] = x
    return found, iteration


def _raise_curvature(p: Tensor, image: Tensor, curvature: Tensor, active: Tensor) -> None:
    at = int((active & ~(curvature > 0)).to(torch.uint8).argmax())
    if not bool(image[:, at].isfinite().all()):
        raise ConvergenceError(
            iterations="some", residual="not finite", tol="a number", column="", fix="Look for NaN and infinity in b"
        )
    raise not_positive(float(curvature[at] / (p[:, at].norm() * image[:, at].norm()).clamp(min=1e-300)))


TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}


@dataclass
class System:
    """A product and how its systems are solved; and, within one backward, the size of its cotangents."""

    product: Product
    options: Options
    cotangents: dict[str, Any] = field(default_factory=dict)


@overload
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
) -> Tensor: ...
@overload
def cg(
    matrix: Callable[..., Any],
    b: NDArray[Any],
    *,
    ridge: float | NDArray[Any] = 0.0,
    x0: NDArray[Any] | None = None,
    tol: float | None = None,
    maxiter: int = 1000,
    preconditioner: Callable[..., Any] | None = None,
    progress: bool | Callable[[int, float], None] = False,
    check: bool = True,
) -> NDArray[Any]: ...
def cg(
    matrix: Callable[..., Any],
    b: Any,
    *,
    ridge: Any = 0.0,
    x0: Any = None,
    tol: float | None = None,
    maxiter: int = 1000,
    preconditioner: Callable[..., Any] | None = None,
    progress: bool | Callable[[int, float], None] = False,
    check: bool = True,
) -> Any:
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
    ``progress=True`` a line on stderr shows iterations and residual; or give a function of both. A numpy array b gives
    a numpy array, and the functions are called with arrays.

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
        helper = on_tensors(preconditioner, "the preconditioner")
        named: Any = dict(tol=tol, maxiter=maxiter, preconditioner=helper, progress=progress, check=check)
        border = arrays.Border()
        taken = {n: border.take(v, n) for n, v in (("b", b), ("ridge", ridge), ("x0", x0))}
        return border.give(cg(on_tensors(matrix), taken.pop("b"), **taken, **named))
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
    if isinstance(tol, bool) or not isinstance(tol, (int, float)) or not 0 < tol < 1:
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
    show = progress if callable(progress) else print_progress(tol, maxiter) if progress else None
    return Options(float(tol), maxiter, _check_preconditioner(preconditioner), show)


def _check_preconditioner(preconditioner: Callable[[Tensor], Tensor] | None) -> Callable[[Tensor], Tensor] | None:
    if preconditioner is None:
        return None

    def call(v: Tensor) -> Tensor:
        found: Any = preconditioner(v)
        if not isinstance(found, Tensor) or found.shape != v.shape or found.dtype != v.dtype:
            raise ShapeError(
                detail=f"the preconditioner gave {shown(found)} for v {shown(v)}", fix="Give the same shape and type"
            )
        return found

    return call


def on_tensors(function: Any, what: str = "the matrix") -> Any:
    """A function of numpy arrays, as one of tensors; it may answer with either."""
    if not callable(function):
        return function

    def call(v: Tensor) -> Any:
        try:
            found = function(arrays.to_numpy(v))
        except TypeError as error:
            if isinstance(error, MonoidReduceError):
                raise
            raise ArgumentError(
                detail=f"{what} was called with a numpy array, as b is one, and raised: {error}",
                fix="Write a function of numpy arrays, or give a tensor in place of the array",
            ) from error
        return arrays.to_tensor(found, f"the result of {what}") if arrays.is_array(found) else found

    return call


def solve_with_gradient(system: System, b: Tensor, start: Tensor | None = None) -> Tensor:
    """The solution x [N, k] for b [N, k], differentiable by b and by what the product closes over."""
    with torch.no_grad():
        found = solve(system.product, b.detach(), system.options, start)
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
            return solve(system.product, cotangent, system.options, floor=floor), None, None
        return solve_with_gradient(system, cotangent), None, None


# Nyström's preconditioner: the largest eigenvalues of a matrix, found with one product, and their inverse.


class Nystroem:
    """An approximation of (K + ridge · I)⁻¹ by K's largest eigenvalues; made by :func:`nystroem`. A function of v.

    ``eigenvalues`` [rank], the largest first, and ``eigenvectors`` [N, rank].

    >>> import torch, monoidreduce as mr
    >>> x = torch.rand(200, 1, dtype=torch.float64)
    >>> nearly = mr.linalg.nystroem(mr.linalg.matrix(mr.ops.kernel_sum, x), x, rank=10, ridge=0.1)
    >>> nearly.eigenvalues.shape, nearly(torch.ones(200, 1, dtype=torch.float64)).shape
    (torch.Size([10]), torch.Size([200, 1]))
    """

    def __init__(self, eigenvalues: Tensor, eigenvectors: Tensor, ridge: float):
        self.eigenvalues, self.eigenvectors, self.ridge = eigenvalues, eigenvectors, ridge
        # Beyond the eigenvalues found all are taken to be the smallest of these: the result is scaled by that.
        self._scale = (eigenvalues[-1] + ridge) / (eigenvalues + ridge) - 1

    def __repr__(self) -> str:
        return f"<preconditioner of rank {len(self.eigenvalues)}, {shown(self.eigenvectors)}, ridge {self.ridge}>"

    @overload
    def __call__(self, v: Tensor) -> Tensor: ...
    @overload
    def __call__(self, v: NDArray[Any]) -> NDArray[Any]: ...
    def __call__(self, v: Any) -> Any:
        if arrays.is_array(v):
            return arrays.to_numpy(self(arrays.to_tensor(v, "v")))
        inside = self.eigenvectors.mT @ v
        return v + self.eigenvectors @ (self._scale.unsqueeze(-1) * inside if v.dim() == 2 else self._scale * inside)


def nystroem(matrix: Callable[..., Any], like: Array, *, rank: int, ridge: float, seed: int = 0) -> Nystroem:
    """A preconditioner for :func:`cg`: the ``rank`` largest eigenvalues of K, from one product with so many vectors.

    With it the iterations depend on the eigenvalues that are left, not on the largest: for smooth kernels and a small
    ridge tens instead of hundreds. It costs one product with ``rank`` columns, N · rank numbers of memory, and
    4 · N · rank operations for each vector in each iteration. Worth it where ``rank`` is about the number of
    eigenvalues above the ridge.

    ``like`` is a tensor or an array with N rows, in the type and on the device of the vectors (b, or the points);
    ``ridge``, above 0, is about what cg is given. The random vectors are those of ``seed``. It has no gradient, and
    needs none: it changes how fast a solution is found, not the solution.

    Raises :class:`ArgumentError`, :class:`ShapeError` or :class:`DTypeError` for arguments that do not fit, and
    :class:`ArgumentError` for a matrix that is not positive.

    >>> import torch, monoidreduce as mr
    >>> x = torch.rand(400, 1, dtype=torch.float64)
    >>> K = mr.linalg.matrix(mr.ops.kernel_sum, x, bandwidth=0.2)
    >>> b, counts = torch.rand(400, dtype=torch.float64), {}
    >>> for name, helper in (("plain", None), ("with help", mr.linalg.nystroem(K, x, rank=30, ridge=1e-4))):
    ...     progress = lambda iteration, residual: counts.update({name: iteration})
    ...     found = mr.linalg.cg(K, b, ridge=1e-4, preconditioner=helper, progress=progress)
    >>> counts["with help"] < counts["plain"] / 2
    True
    """
    if arrays.is_array(like):
        like, matrix = arrays.to_tensor(like, "like"), on_tensors(matrix)
    if not isinstance(like, Tensor) or like.dim() < 1:
        raise ArgumentError(detail=f"like was given {shown(like)}", fix="Give a tensor with N rows: b, or the points")
    matrices.check_vectors("like", like.detach().reshape(len(like), -1) if like.dim() > 2 else like.detach())
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= len(like):
        raise ArgumentError(detail=f"rank was given {shown(rank)}", fix=f"Give a whole number from 1 to {len(like)}")
    if isinstance(ridge, bool) or not isinstance(ridge, (int, float)) or not ridge > 0:
        raise ArgumentError(detail=f"ridge was given {shown(ridge)}", fix="Give a number above 0")
    column = like.detach().reshape(len(like), -1)[:, :1]
    product = matrices.as_product(matrix, 0.0, column)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        drawn = torch.randn(len(like), rank, generator=draw, dtype=torch.float64, device="cpu")
        probes = torch.linalg.qr(drawn.to(column)).Q
        images = product(probes)
        shift = torch.finfo(column.dtype).eps * images.norm()
        images = images + shift * probes
        inner = probes.mT @ images
        factor = _factor((inner + inner.mT) / 2)
        vectors, values, _ = torch.linalg.svd(
            torch.linalg.solve_triangular(factor, images.mT, upper=False).mT, full_matrices=False
        )
        eigenvalues = (values.square() - shift).clamp(min=0)
    return Nystroem(eigenvalues, vectors, float(ridge))


def _factor(inner: Tensor) -> Tensor:
    """The Cholesky factor of a Gram matrix, with as little added to its diagonal as lets it have one."""
    scale = inner.diagonal().abs().max()
    for power in range(4):
        more = 0.0 if not power else float(scale) * torch.finfo(inner.dtype).eps * 10.0 ** (power + 1)
        found: Any = torch.linalg.cholesky_ex(
            inner + more * torch.eye(len(inner), dtype=inner.dtype, device=inner.device)
        )
        if int(found.info) == 0:
            return found.L
    raise matrices.not_positive(float(torch.linalg.eigvalsh(inner)[0] / scale.clamp(min=1e-300)))
