"""Matrices by what they do to vectors: the checks that this package shares, kernels of points, scipy's operators.

A *product* is a function of v [N, k] that gives K @ v [N, k]. Users may write theirs for vectors [N] alone, or for
both; :func:`as_product` finds out with the first call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import numpy
import torch
from torch import Tensor

from .. import arrays
from ..errors import ArgumentError, DeviceError, DTypeError, EngineError, ShapeError, shown

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = Tensor | NDArray[Any]

Product = Callable[[Tensor], Tensor]


class KernelMatrix:
    """The square matrix K[i, j] = kernel(x_i, x_j) of one set of points, as a function of vectors; made by
    :func:`matrix`.

    >>> import torch, monoidreduce as mr
    >>> x = torch.rand(50, 2)
    >>> K = mr.linalg.matrix(mr.ops.kernel_sum, x, bandwidth=0.3)
    >>> K.shape, (K @ torch.ones(50)).shape, K(torch.ones(50, 4)).shape
    ((50, 50), torch.Size([50]), torch.Size([50, 4]))
    """

    __array_ufunc__ = None  # so that numpy leaves ``K @ v`` to this class

    def __init__(self, op: Callable[..., Tensor], x: Tensor, args: tuple, options: dict[str, Any], of_numpy: bool):
        self.op, self.x, self.args, self.options, self.of_numpy = op, x, args, options, of_numpy
        self.shape = (len(x), len(x))
        declared = list(getattr(op, "parameters", {}).values())[2:3]
        self.takes_numbers = any(p.axis == "cols" and p.feature is None for p in declared)  # one number per column
        self.takes_vectors = any(p.axis == "cols" and p.feature is not None for p in declared)

    @overload
    def __call__(self, v: Tensor) -> Tensor: ...
    @overload
    def __call__(self, v: NDArray[Any]) -> NDArray[Any]: ...
    def __call__(self, v: Any) -> Any:
        """K @ v for v [N] or [N, k]; a numpy array where the points and v are numpy arrays."""
        border = arrays.Border()
        border.of_others = not self.of_numpy
        vectors = border.take(v, "v")
        axes = vectors.dim() if isinstance(vectors, Tensor) else 0
        if self.takes_numbers and axes == 2:  # k vectors are a batch of k
            return border.give(self._call_op(vectors.mT).mT)
        if self.takes_vectors and axes == 1:
            return border.give(self._call_op(vectors.unsqueeze(-1)).squeeze(-1))
        return border.give(self._call_op(vectors))

    def _call_op(self, v: Any) -> Any:
        return self.op(self.x, self.x, v, *self.args, **self.options)

    @overload
    def __matmul__(self, v: Tensor) -> Tensor: ...
    @overload
    def __matmul__(self, v: NDArray[Any]) -> NDArray[Any]: ...
    def __matmul__(self, v: Any) -> Any:
        return self(v)

    def __repr__(self) -> str:
        return f"<matrix {self.shape[0]} x {self.shape[0]} of {shown(self.x)}>"


def matrix(op: Callable[..., Any], x: Array, *args: Any, **options: Any) -> KernelMatrix:
    """A kernel op of points as a matrix: ``K @ v``, or ``K(v)``, is ``op(x, x, v, *args, **options)``.

    ``op`` takes the points as rows, the points as columns, what to multiply (``Col["e"]``, or a bare ``Col``), then
    whatever else: ``ops.kernel_sum``, or an op of your own. Its gradients reach ``x`` and the other arguments.

    Shapes: ``x`` [N, D]; of numpy points, products with numpy arrays are numpy arrays. The matrix is square, of one set
    of points; for the kernel of two sets call the op: ``ops.kernel_sum(q, x, v)``. Raises :class:`ArgumentError` or
    :class:`ShapeError` for arguments that do not fit, also for ``args`` and ``options`` that the op does not take.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def linear_and_one(x: mr.Row["d"], y: mr.Col["d"], v: mr.Col["e"]):
    ...     return mr.sum((1 + x @ y) * v)
    >>> x = torch.rand(50, 2)
    >>> K = mr.linalg.matrix(linear_and_one, x)
    >>> torch.allclose(K(torch.ones(50, 1)), (1 + x @ x.T).sum(1, keepdim=True), rtol=1e-4)
    True
    """
    if not callable(op):
        raise ArgumentError(detail=f"op was given {shown(op)}", fix="Give a kernel op, such as ops.kernel_sum")
    of_numpy = isinstance(x, numpy.ndarray)
    points = arrays.to_tensor(x, "x") if arrays.is_array(x) else x
    if not isinstance(points, Tensor) or points.dim() != 2:
        raise ShapeError(detail=f"x was given {shown(x)}", fix="Give points [N, D]")
    _check_takes(op, points, args, options)
    return KernelMatrix(op, points, args, options, of_numpy)


def _check_takes(op: Any, points: Tensor, args: tuple, options: dict[str, Any]) -> None:
    """Raise ArgumentError unless the op can be called with points, points, a vector and these."""
    try:
        signature = inspect.signature(op.function if hasattr(op, "function") else op)
    except (TypeError, ValueError):  # a builtin: its first product says what is wrong
        return
    own = {n: v for n, v in options.items() if n != "cols" or not hasattr(op, "function")}  # which every op takes
    try:
        signature.bind(points, points, points, *args, **own)
    except TypeError as error:
        name, second = getattr(op, "__name__", None) or repr(op), ""
        if args and (isinstance(args[0], Tensor) or arrays.is_array(args[0])):
            second = ". There is no rectangular matrix of two sets of points: call the op itself, op(q, x, v)"
        given = ", ".join(["x", "x", "v", *(shown(a) for a in args), *(f"{n}=..." for n in options)])
        raise ArgumentError(
            detail=f"{name} is to be called with ({given}), but {error}",
            fix=f"Give one set of points, then what the op takes after a vector{second}",
        ) from None


def operator(op: Callable[..., Any], x: Array, *args: Any, ridge: float = 0.0, **options: Any) -> Any:
    """The matrix K + ridge · I of points as a ``scipy.sparse.linalg.LinearOperator``, for scipy's own solvers.

    Its products take and give numpy arrays: ``(A @ v)[i]`` is ``Σ_j kernel(x_i, x_j) v_j + ridge · v_i``. It is its own
    adjoint. ``op``, ``x``, ``args`` and ``options`` as in :func:`matrix`; ``x`` may be a numpy array. Needs scipy.

    Raises :class:`ArgumentError` or :class:`ShapeError` for arguments that do not fit, and :class:`EngineError`
    without scipy.

    >>> import numpy, scipy.sparse.linalg, monoidreduce as mr
    >>> x = numpy.random.default_rng(0).random((100, 2))
    >>> A = mr.linalg.operator(mr.ops.kernel_sum, x, bandwidth=0.3, ridge=1e-3)
    >>> largest = scipy.sparse.linalg.eigsh(A, k=3, return_eigenvectors=False)
    >>> largest.shape
    (3,)
    """
    try:
        from scipy.sparse.linalg import LinearOperator
    except ImportError as error:
        raise EngineError(detail="scipy is not installed", fix="pip install scipy") from error
    kernel = matrix(op, x, *args, **options)
    points = kernel.x

    def multiply(v: Any) -> Any:
        given = torch.as_tensor(v, dtype=points.dtype, device=points.device)
        with torch.no_grad():
            found = kernel(given.contiguous()) + ridge * given
        return found.cpu().numpy()

    def multiply_vector(v: Any) -> Any:
        return multiply(v.reshape(-1))

    dtype = torch.empty(0, dtype=points.dtype, device="cpu").numpy().dtype
    return LinearOperator(
        kernel.shape,
        matvec=multiply_vector,
        rmatvec=multiply_vector,
        matmat=multiply,
        rmatmat=multiply,
        dtype=dtype,
    )


def check_vectors(name: str, b: Any) -> None:
    """Raise unless ``b`` is a vector [N] or vectors [N, k] that a system can be solved for."""
    if not isinstance(b, Tensor):
        raise ArgumentError(detail=f"{name} was given {shown(b)}", fix="Give a tensor [N] or [N, k]")
    if b.dim() not in (1, 2):
        raise ShapeError(detail=f"{name} has shape {tuple(b.shape)}", fix="Give [N], or [N, k] for k systems at once")
    if b.dtype not in (torch.float32, torch.float64):
        raise DTypeError(
            detail=f"{name} is {str(b.dtype)[6:]}", fix="Solving needs float32 or float64: 16 bits lose the residual"
        )


def check_ridge(ridge: Any, b: Tensor) -> Tensor | float:
    """What is added to the diagonal: a number, or a number per row [N] in the form that multiplies [N, k]."""
    if isinstance(ridge, bool) or not isinstance(ridge, (int, float, Tensor)):
        raise ArgumentError(detail=f"ridge was given {shown(ridge)}", fix="Give a number, or a tensor [] or [N]")
    if not isinstance(ridge, Tensor):
        if not ridge >= 0:
            raise ArgumentError(detail=f"ridge was given {ridge}", fix="Give 0 or more")
        return float(ridge)
    if ridge.dim() > 1 or (ridge.dim() == 1 and len(ridge) != len(b)):
        raise ShapeError(
            detail=f"ridge has shape {tuple(ridge.shape)}, b has {len(b)} rows", fix="Give a tensor [] or [N]"
        )
    if ridge.dim() and ridge.device != b.device:
        raise DeviceError(detail=f"ridge is on {ridge.device}, b on {b.device}")
    return ridge.to(b.dtype).unsqueeze(-1) if ridge.dim() else ridge.to(b.dtype)


def as_product(given: Any, ridge: Tensor | float, b: Tensor) -> Product:
    """``(K + ridge) @ v`` for v [N, k], from what the user gave: a function of [N, k], or of [N] alone."""
    if not callable(given):
        raise ArgumentError(
            detail=f"the matrix was given as {shown(given)}",
            fix="Give a function of v that returns K @ v, such as lambda v: ops.kernel_sum(x, x, v)",
        )
    with torch.no_grad():
        probe = torch.zeros_like(b[:, :1])
        try:
            whole = _is_product(given(probe), probe)
            problem: Exception | None = None
        except Exception as error:
            whole, problem = False, error
        if not whole and not _is_product(_try_vector(given, probe[:, 0], problem), probe[:, 0]):
            got = given(probe[:, 0])
            if arrays.is_array(got):
                raise ArgumentError(
                    detail=f"the matrix gives a numpy array, {shown(got)}, for a tensor v",
                    fix="Give a function of tensors, such as linalg.matrix(op, x); a scipy operator takes a numpy b",
                )
            raise ShapeError(
                detail=f"the matrix gives {shown(got)} for v = {shown(probe[:, 0])}",
                fix="Give a function of v [N] or [N, k] whose result K @ v has v's shape, type and device",
            )

    def multiply(v: Tensor) -> Tensor:
        product = given(v) if whole else torch.stack([given(column) for column in v.unbind(-1)], -1)
        return product + ridge * v

    return multiply


def _try_vector(given: Callable[[Tensor], Tensor], probe: Tensor, problem: Exception | None) -> Any:
    try:
        return given(probe)
    except Exception as error:
        raise (error if problem is None else problem) from None


def _is_product(got: Any, v: Tensor) -> bool:
    return isinstance(got, Tensor) and got.shape == v.shape and got.dtype == v.dtype and got.device == v.device


def check_symmetric(product: Product, b: Tensor) -> None:
    """Raise unless ⟨u, K v⟩ = ⟨v, K u⟩ for two random vectors, and both have ⟨v, K v⟩ > 0: one product of two."""
    draw = torch.Generator().manual_seed(0)
    pair = torch.randn(len(b), 2, generator=draw, dtype=torch.float64, device="cpu").to(b)
    with torch.no_grad():
        images = product(pair)
    forms = (pair.mT @ images).double()
    sizes = pair.norm(dim=0) * images.norm(dim=0)
    if not bool(images.isfinite().all()):
        raise ArgumentError(
            detail="the matrix times a random vector is not finite", fix="Look for NaN and infinity in what it is of"
        )
    scale = float(sizes.max())
    gap, limit = float((forms[0, 1] - forms[1, 0]).abs()), (1e-4 if b.dtype is torch.float32 else 1e-9)
    if gap > limit * scale:
        raise ArgumentError(
            detail=f"the matrix is not symmetric: <u, K v> is {float(forms[0, 1]):.6g} and <v, K u> "
            f"{float(forms[1, 0]):.6g} for two random vectors",
            fix="cg solves symmetric positive definite systems; for others use scipy's gmres with linalg.operator",
        )
    least = float(forms.diagonal().min())
    if least <= 0:
        raise not_positive(least / max(scale, 1e-300))


def not_positive(form: float) -> ArgumentError:
    """The error of a matrix K that has a vector with ⟨v, K v⟩ ≤ 0; ``form``: that number, of |v| |K v|."""
    return ArgumentError(
        detail=f"the matrix is not positive definite: <v, K v> is {form:.3g} |v| |K v| for some v",
        fix="Add a ridge, or compute in float64 if its smallest eigenvalues are lost in rounding; a kernel such as "
        "'energy' is not positive at all",
    )
