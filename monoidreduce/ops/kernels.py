"""Kernel sums, and optimal transport by soft minima of a cost: what is done with points and distances."""

from __future__ import annotations

import math
import sys
import warnings
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, no_type_check

import torch
from torch import Tensor

from ..arrays import is_array, to_tensor
from ..domains import Domain
from ..engines.ranks import agreement
from ..errors import ArgumentError, ConvergenceWarning, ShapeError
from ..files import open_arrays
from ..runtime import dispatch
from ..sources import AlongAxis
from . import checks
from . import language as mr
from .neighbours import root
from .streaming import BothWays, count_entries

if TYPE_CHECKING:
    from numpy.typing import NDArray

Kernel = Literal["gaussian", "laplacian", "cauchy", "energy"]
KERNELS = ("gaussian", "laplacian", "cauchy", "energy")
Cost = Literal["sqeuclidean", "euclidean"]
COSTS = ("sqeuclidean", "euclidean")


@no_type_check
def _log_kernel(x, y, kernel, bandwidth):
    square = mr.sqdist(x, y)
    if kernel == "gaussian":
        return -square / (2 * bandwidth * bandwidth)
    return -root(square) / bandwidth if kernel == "laplacian" else -torch.log1p(square / (bandwidth * bandwidth))


@no_type_check
def _kernel(x, y, kernel, bandwidth):
    if kernel == "energy":
        return -root(mr.sqdist(x, y))
    if kernel == "cauchy":
        return 1 / (1 + mr.sqdist(x, y) / (bandwidth * bandwidth))
    return torch.exp(_log_kernel(x, y, kernel, bandwidth))


@mr.op
@no_type_check
def _kernel_sum(x: mr.Row["d"], y: mr.Col["d"], kernel: str, bandwidth: float, b: mr.Col | None = None):
    near = _kernel(x, y, kernel, bandwidth)
    return mr.sum(near if b is None else near * b)


@mr.op
@no_type_check
def _kernel_vectors(x: mr.Row["d"], y: mr.Col["d"], b: mr.Col["e"], kernel: str, bandwidth: float):
    return mr.sum(_kernel(x, y, kernel, bandwidth) * b)


@checks.public_layer(rows={"x": "vectors"}, cols={"y": "vectors", "b": "either"})
def kernel_sum(
    x: Tensor,
    y: Tensor,
    b: Tensor | None = None,
    *,
    kernel: Kernel = "gaussian",
    bandwidth: float | Tensor = 1.0,
    cols: Domain | None = None,
) -> Tensor:
    """A kernel's matrix times b: Σ_j K(x_i, y_j) b_j.

    The same as ``torch.exp(-torch.cdist(x, y) ** 2 / (2 * bandwidth**2)) @ b``, without ever allocating the M × N
    kernel matrix or its gradient. With d the distance and σ the bandwidth, K is ``"gaussian"`` exp(-d²/2σ²),
    ``"laplacian"`` exp(-d/σ), ``"cauchy"`` 1/(1 + d²/σ²) or ``"energy"`` -d (which knows no bandwidth).

    Shapes: ``x`` [..., M, D], ``y`` [..., N, D] and ``b`` [..., N, E] give [..., M, E]; ``b`` [N], or left out for
    ones, gives [..., M]. ``bandwidth`` is a number above 0 or a 0-dim tensor, with a gradient if it asks for one.
    ``cols``: which pairs are added, such as ``mr.blocks`` of clusters that are near each other.

    Raises :class:`ShapeError`, :class:`DTypeError`, :class:`DeviceError` or :class:`ArgumentError` for arguments that
    do not fit.

    >>> import torch
    >>> from monoidreduce.ops import kernel_sum
    >>> x, y, b = torch.randn(6, 3), torch.randn(9, 3), torch.randn(9, 2)
    >>> expected = torch.exp(-torch.cdist(x, y) ** 2 / 2) @ b
    >>> torch.allclose(kernel_sum(x, y, b), expected, atol=1e-5)
    True
    """
    _check(x, y, kernel, bandwidth, KERNELS)
    listed = checks.listed(cols)
    if b is None:
        return _kernel_sum(x, y, kernel, bandwidth, **listed)
    checks.vectors("b", b, "[N] or [..., N, E]", 1)
    checks.floating(b=b)
    if b.dim() == 1:
        return _kernel_sum(x, y, kernel, bandwidth, b, **listed)
    return _kernel_vectors(x, y, b, kernel, bandwidth, **listed)


@mr.op
@no_type_check
def _kernel_logsumexp(x: mr.Row["d"], y: mr.Col["d"], kernel: str, bandwidth: float, log_weights: mr.Col | None = None):
    s = _log_kernel(x, y, kernel, bandwidth)
    return mr.logsumexp(s if log_weights is None else s + log_weights)


@checks.public_layer(rows={"x": "vectors"}, cols={"y": "vectors", "log_weights": "numbers"})
def kernel_logsumexp(
    x: Tensor,
    y: Tensor,
    log_weights: Tensor | None = None,
    *,
    kernel: Literal["gaussian", "laplacian", "cauchy"] = "gaussian",
    bandwidth: float | Tensor = 1.0,
    cols: Domain | None = None,
) -> Tensor:
    """The logarithm of a weighted kernel sum: log Σ_j w_j K(x_i, y_j), also where all of it underflows.

    The same as ``torch.logsumexp(log_weights - torch.cdist(x, y) ** 2 / (2 * bandwidth**2), -1)``, without ever
    allocating the M × N kernel matrix or its gradient: the log-density of a mixture, a kernel density estimate, a free
    energy. Kernels, bandwidth and ``cols`` as in :func:`kernel_sum`, but ``"energy"``, which is negative. For 16-bit
    inputs it is float32.

    Shapes: ``x`` [..., M, D], ``y`` [..., N, D] and ``log_weights`` [..., N] give [..., M]; minus infinity without
    columns.

    Raises :class:`ShapeError`, :class:`DTypeError`, :class:`DeviceError` or :class:`ArgumentError` for arguments that
    do not fit.

    >>> import torch
    >>> from monoidreduce.ops import kernel_logsumexp
    >>> x, y = torch.randn(6, 3), torch.randn(9, 3)
    >>> expected = torch.logsumexp(-torch.cdist(x, y) ** 2 / 2, -1)
    >>> torch.allclose(kernel_logsumexp(x, y), expected, atol=1e-5)
    True
    """
    _check(x, y, kernel, bandwidth, KERNELS[:3])
    if log_weights is not None:
        checks.tensor("log_weights", log_weights, "[..., N]", 1)
        checks.floating(log_weights=log_weights)
    return _kernel_logsumexp(x, y, kernel, bandwidth, log_weights, **checks.listed(cols))


def _check(x: Any, y: Any, kernel: Any, bandwidth: Any, kernels: tuple[str, ...]) -> None:
    checks.floating(x=x, y=y)
    checks.one_of("kernel", kernel, kernels)
    checks.positive("bandwidth", bandwidth)


# Optimal transport ----------------------------------------------------------------------------------------------------


@mr.op
@no_type_check
def _softmin(x: mr.Row["d"], y: mr.Col["d"], h: mr.Col, eps: float, cost: str):
    square = mr.sqdist(x, y)
    return -eps * mr.logsumexp(h - (square if cost == "sqeuclidean" else root(square)) / eps)


@checks.public_layer(rows={"x": "vectors"}, cols={"y": "vectors", "h": "numbers"})
def softmin(
    x: Tensor,
    y: Tensor,
    h: Tensor,
    *,
    eps: float | Tensor,
    cost: Cost = "sqeuclidean",
    cols: Domain | None = None,
) -> Tensor:
    """The soft minimum of a cost: -ε log Σ_j exp(h_j - C(x_i, y_j) / ε), the one operation of entropic transport.

    The same as ``-eps * torch.logsumexp(h - torch.cdist(x, y) ** 2 / eps, -1)``, without ever allocating the M × N
    costs or their gradient. The cost is the distance, or its square.

    Shapes: ``x`` [..., M, D], ``y`` [..., N, D], ``h`` [..., N] give [..., M], in float32 for 16-bit inputs and under
    autocast. ``eps`` is a number above 0, or a 0-dim tensor of one. ``cols``: which pairs there are (truncated
    transport).

    Raises :class:`ShapeError`, :class:`DTypeError`, :class:`DeviceError` or :class:`ArgumentError` for arguments that
    do not fit.

    >>> import torch
    >>> from monoidreduce.ops import softmin
    >>> x, y, h = torch.randn(6, 3), torch.randn(9, 3), torch.randn(9)
    >>> expected = -0.5 * torch.logsumexp(h - torch.cdist(x, y) ** 2 / 0.5, -1)
    >>> torch.allclose(softmin(x, y, h, eps=0.5), expected, atol=1e-5)
    True
    """
    checks.floating(x=x, y=y, h=h)
    checks.positive("eps", eps)
    checks.one_of("cost", cost, COSTS)
    with dispatch.without_autocast((x,)):
        return _softmin(*map(_as_float32, (x, y, h)), eps, cost, **checks.listed(cols))


def _as_float32(t: Any) -> Any:
    """16-bit tensors as float32: potentials are differences of large numbers."""
    return t.float() if isinstance(t, Tensor) and t.is_floating_point() and t.dtype.itemsize == 2 else t


class Sinkhorn(NamedTuple):
    """What :func:`sinkhorn` returns: the cost of transport, the potentials of both sides, and how it ended.

    ``iterations`` were done; ``error``, known where a tolerance was given, is the most that a potential of g moved in
    the last one, and ``converged`` says whether that is within the tolerance.

    >>> import torch, monoidreduce as mr
    >>> found = mr.ops.sinkhorn(torch.zeros(2, 1), torch.ones(3, 1), eps=0.1, tolerance=1e-6)
    >>> found.f.shape, found.g.shape, found.iterations, found.converged
    (torch.Size([2]), torch.Size([3]), 1, True)
    """

    value: Tensor
    f: Tensor
    g: Tensor
    iterations: int = 0
    error: float | None = None
    converged: bool | None = None


if TYPE_CHECKING:

    class SinkhornArrays(NamedTuple):
        """:class:`Sinkhorn` of numpy arrays, as type checkers see it; at run time it is that class."""

        value: NDArray[Any]
        f: NDArray[Any]
        g: NDArray[Any]
        iterations: int
        error: float | None
        converged: bool | None


def _report_end(iterations: int, error: float | None, tolerance: float) -> tuple[int, float | None, bool | None]:
    """How Sinkhorn's iterations ended; warns where a tolerance was given and missed."""
    if error is None:
        return iterations, None, None
    if not error <= tolerance:
        warnings.warn(
            f"sinkhorn has not converged: in the last of {iterations} iterations a potential moved by {error:.1e}, and "
            f"the tolerance is {tolerance:.1e}, so the value and its gradient are not those of the optimum. Give more "
            "iterations, a larger eps, or a larger tolerance",
            ConvergenceWarning,
            stacklevel=_frames_to_caller(),
        )
    return iterations, error, error <= tolerance


def _frames_to_caller() -> int:
    """How many frames above the function that asks stands the first one outside this package."""
    frame, count = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] == __name__.split(".")[0]:
        frame, count = frame.f_back, count + 1
    return count


def _check_lengths(rows: int, cols: int, g: Tensor, log_a: Tensor, log_b: Tensor) -> None:
    for name, t, points, count in (("g", g, "y", cols), ("log_a", log_a, "x", rows), ("log_b", log_b, "y", cols)):
        if t.shape[-1] != count:
            raise ShapeError(
                detail=f"{name} has {t.shape[-1]} numbers for {count} points {points}", fix="Give one each"
            )


def _stream_sinkhorn_step(
    x: Any, g: Any, log_a: Any, log_b: Any, *, eps: float | Tensor, cost: Cost = "sqeuclidean"
) -> BothWays:
    """Two streams: the potential of x over y, then that of y over x."""
    g, log_a, log_b = (to_tensor(t) if is_array(t) else t for t in (g, log_a, log_b))
    for name, t in (("g", g), ("log_a", log_a), ("log_b", log_b)):
        checks.tensor(name, t, "[M or N]", 1, 1)
    checks.positive("eps", eps)

    def run(x: Any, y: Any, quiet: bool) -> tuple[Tensor, Tensor]:
        _check_lengths(count_entries("x", x), count_entries("y", y), g, log_a, log_b)
        f = softmin.stream(x, eps=eps, cost=cost).over(y, log_b + g / eps, quiet=quiet)
        return f, softmin.stream(y, eps=eps, cost=cost).over(x, log_a + f / eps, quiet=quiet)

    return BothWays("sinkhorn_step", x, run)


@checks.public_layer(rows={}, cols={}, stream=_stream_sinkhorn_step)
def sinkhorn_step(
    x: Tensor,
    y: Tensor,
    g: Tensor,
    log_a: Tensor,
    log_b: Tensor,
    *,
    eps: float | Tensor,
    cost: Cost = "sqeuclidean",
) -> tuple[Tensor, Tensor]:
    """One Sinkhorn iteration: the potential f that fits g, then the g that fits f.

    The same as ``f = softmin(x, y, log_b + g / eps)`` and ``g = softmin(y, x, log_a + f / eps)``, without ever
    allocating the M × N costs, the plan or their gradients. Differentiable by everything.

    Shapes: ``x`` [..., M, D], ``y`` [..., N, D], ``g`` and ``log_b`` [..., N], ``log_a`` [..., M] give f [..., M] and g
    [..., N]. ``log_a`` and ``log_b`` are the logarithms of the masses.

    Raises :class:`ShapeError`, :class:`DTypeError`, :class:`DeviceError` or :class:`ArgumentError` for arguments that
    do not fit.

    >>> import torch
    >>> from monoidreduce.ops import sinkhorn_step
    >>> x, y = torch.randn(6, 3), torch.randn(9, 3)
    >>> f, g = sinkhorn_step(x, y, torch.zeros(9), torch.zeros(6) - 1.8, torch.zeros(9) - 2.2, eps=0.5)
    >>> f.shape, g.shape
    (torch.Size([6]), torch.Size([9]))
    """
    for name, t in (("g", g), ("log_a", log_a), ("log_b", log_b)):
        checks.tensor(name, t, "[..., M or N]", 1)
    checks.floating(g=g, log_a=log_a, log_b=log_b)
    checks.positive("eps", eps)
    if isinstance(x, Tensor) and isinstance(y, Tensor) and min(x.dim(), y.dim()) > 1:  # else softmin says so
        _check_lengths(x.shape[-2], y.shape[-2], g, log_a, log_b)
    f = softmin(x, y, log_b + g / eps, eps=eps, cost=cost)
    with agreement.swap_axes():
        return f, softmin(y, x, log_a + f / eps, eps=eps, cost=cost)


def _stream_sinkhorn(
    x: Any,
    a: Any = None,
    b: Any = None,
    *,
    eps: float,
    iterations: int = 100,
    tolerance: float = 0.0,
    cost: Cost = "sqeuclidean",
    scaling: float = 1.0,
) -> BothWays:
    """Sinkhorn's iterations, each two streams; the potentials stay in memory."""
    _check_iterations(eps, iterations, tolerance, cost, scaling)
    given = [to_tensor(t) if is_array(t) else t for t in (a, b)]

    def run(x: Any, y: Any, quiet: bool) -> Sinkhorn:
        lengths = [count_entries("x", x), count_entries("y", y)]
        kind = torch.float64 if AlongAxis(open_arrays(x)[0], 0).dtype is torch.float64 else torch.float32
        masses = []
        for mass, count, name in zip(given, lengths, "ab", strict=True):
            mass = torch.full((count,), 1 / max(count, 1), dtype=kind, device="cpu") if mass is None else mass
            checks.tensor(name, mass, "[points]", 1, 1)
            if len(mass) != count:
                raise ShapeError(detail=f"{name} has {len(mass)} masses for {count} points", fix="Give one each")
            masses.append(_as_float32(mass))
        corners = [_read_corners(points) for points in (x, y)] if scaling < 1 else []
        levels = _plan_levels(corners, float(eps), scaling, cost, iterations)
        log_a, log_b = (mass.log() for mass in masses)
        g = torch.zeros_like(log_b)
        error, done = None, 0
        while done < int(iterations) and not (error is not None and error <= tolerance):
            level = levels[done] if done < len(levels) else eps
            f, new = _stream_sinkhorn_step(x, g, log_a, log_b, eps=level, cost=cost).run(x, y, quiet)
            done += 1
            error, g = float(_largest_change(new, g)) if tolerance and done > len(levels) else None, new
        f, g = (
            softmin.stream(rows, eps=eps, cost=cost).over(cols, h, quiet=quiet)
            for rows, cols, h in ((x, y, log_b + g / eps), (y, x, log_a + f / eps))
        )
        value = (masses[0] * f).sum(-1) + (masses[1] * g).sum(-1)
        return Sinkhorn(value, f, g, *_report_end(done, error, tolerance))

    return BothWays("sinkhorn", x, run)


@checks.public_layer(rows={}, cols={}, stream=_stream_sinkhorn)
def sinkhorn(
    x: Tensor,
    y: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    eps: float,
    iterations: int = 100,
    tolerance: float = 0.0,
    cost: Cost = "sqeuclidean",
    scaling: float = 1.0,
) -> Sinkhorn:
    """Entropic optimal transport between two weighted clouds, by Sinkhorn's iterations in the log domain.

    The value is ⟨a, f⟩ + ⟨b, g⟩, the dual of min_π ⟨π, C⟩ + ε KL(π ‖ a ⊗ b), the same as a Sinkhorn loop over the
    matrix ``C = torch.cdist(x, y) ** 2`` in plain torch, without ever allocating that matrix, the plan or a gradient of
    one. The iterations keep no graph: at the optimum the gradient by x, y, a and b is that of one last step, and this
    is what flows back.

    Shapes: ``x`` [..., M, D], ``y`` [..., N, D], masses ``a`` [..., M] and ``b`` [..., N] (equal ones if left out) give
    the value [...], ``f`` [..., M] and ``g`` [..., N], then ``iterations``, ``error`` and ``converged``
    (:class:`Sinkhorn`). Iterations end early once no potential of g moves by more than ``tolerance``; each looks at it
    then, which on a GPU is a synchronisation. Where the iterations do not suffice for it, there is a
    :class:`ConvergenceWarning`.

    ``scaling`` below 1 is ε-scaling: the first iteration has the largest cost between the clouds' bounding boxes for ε,
    each of the next ``scaling`` times that of the one before, down to ``eps``. The optimum is the same. Different
    clouds take fewer iterations so, the smaller ``eps`` the fewer (0.5 is a good value); a cloud and itself take more.

    Raises :class:`ShapeError`, :class:`DTypeError`, :class:`DeviceError` or :class:`ArgumentError` for arguments that
    do not fit.

    >>> import torch
    >>> from monoidreduce.ops import sinkhorn
    >>> x = torch.randn(50, 3)
    >>> found = sinkhorn(x, x + 2.0, eps=0.05, iterations=300)
    >>> bool(abs(found.value - 12) < 0.5)
    True
    """
    checks.tensor("x", x, "[..., M, D]", 2)
    checks.tensor("y", y, "[..., N, D]", 2)
    checks.floating(x=x, y=y)
    _check_iterations(eps, iterations, tolerance, cost, scaling)
    rows, cols = agreement.total_sizes(x.shape[-2], y.shape[-2])
    a, b = _masses("a", a, x, rows), _masses("b", b, y, cols)
    x, y, a, b = map(_as_float32, (x, y, a, b))
    fixed_x, fixed_y, log_a, log_b = x.detach(), y.detach(), a.detach().log(), b.detach().log()
    levels: Any = []
    if scaling < 1:
        corners = [agreement.max_over_ranks(axis, _corners(t)) for axis, t in (("rows", fixed_x), ("cols", fixed_y))]
        levels = x.new_tensor(_plan_levels(corners, float(eps), scaling, cost, iterations))
    with torch.no_grad():
        g = torch.zeros_like(log_b)
        error, done = None, 0
        while done < int(iterations) and not (error is not None and error <= tolerance):
            level = levels[done] if done < len(levels) else eps
            f, new = sinkhorn_step(fixed_x, fixed_y, g, log_a, log_b, eps=level, cost=cost)
            done += 1
            if tolerance and done > len(levels):
                error = float(agreement.max_over_ranks("cols", _largest_change(new, g)))
            g = new
        to_x, to_y = log_a + f / eps, log_b + g / eps
    f = softmin(x, fixed_y, to_y, eps=eps, cost=cost)
    with agreement.swap_axes():
        g = softmin(y, fixed_x, to_x, eps=eps, cost=cost)
    value = agreement.sum_over_ranks("rows", (a * f).sum(-1)) + agreement.sum_over_ranks("cols", (b * g).sum(-1))
    return Sinkhorn(value, f, g, *_report_end(done, error, tolerance))


def _check_iterations(eps: Any, iterations: Any, tolerance: Any, cost: Any, scaling: Any) -> None:
    checks.positive("eps", eps)
    checks.whole("iterations", iterations, 1)
    checks.between("tolerance", tolerance, 0, math.inf)
    checks.one_of("cost", cost, COSTS)
    checks.between("scaling", scaling, 0.001, 1)


def _corners(points: Tensor) -> Tensor:
    """The largest of all coordinates, then of all negated ones; minus infinity where there are no points."""
    flat = points.flatten(0, -2)
    return torch.cat([flat.amax(0), -flat.amin(0)]) if len(flat) else flat.new_full((2 * flat.shape[-1],), -math.inf)


def _read_corners(points: Any) -> Tensor:
    """The same of an array or a file, read in pieces."""
    array = AlongAxis(open_arrays(points)[0], 0)
    starts = range(0, max(len(array), 1), 65536)
    return torch.stack([_corners(_as_float32(array.read(at, at + 65536))) for at in starts]).amax(0)


def _plan_levels(corners: list[Tensor], eps: float, scaling: float, cost: Cost, iterations: int) -> list[float]:
    """Every ε above ``eps`` that iterations pass through: the largest cost that points in a box of these corners can
    have, then ``scaling`` times the one before. None where that is not finite, or not above ``eps``."""
    if not corners:
        return []
    upper, lower = torch.maximum(*corners).double().chunk(2)
    largest = float((upper + lower).square().sum())
    largest = largest if cost == "sqeuclidean" else math.sqrt(largest)
    if not eps < largest < math.inf:
        return []
    count = math.ceil(math.log(eps / largest) / math.log(scaling))
    if count >= iterations:
        raise ArgumentError(
            detail=f"scaling={scaling:g} reaches eps={eps:g} from the largest cost {largest:g} after {count} "
            f"iterations, and iterations is {iterations}",
            fix="Give more iterations, or a smaller scaling (0.5)",
        )
    return [largest * scaling**k for k in range(count)]


def _largest_change(new: Tensor, old: Tensor) -> Tensor:
    """How far any number moved; a rank may have none."""
    return (new - old).abs().max() if new.numel() else new.new_zeros(())


def _masses(name: str, mass: Any, points: Tensor, whole: int) -> Tensor:
    """Masses that were given, or equal ones for ``whole`` points, of which these are some."""
    count = points.shape[-2]
    if mass is None:
        return torch.full((count,), 1 / max(whole, 1), dtype=points.dtype, device=points.device)
    checks.tensor(name, mass, "[..., points]", 1)
    checks.floating(**{name: mass})
    checks.alike(**{"points": points, name: mass})
    if mass.shape[-1] != count:
        raise ShapeError(
            detail=f"{name} has {mass.shape[-1]} masses for {count} points", fix="Give one mass for each point"
        )
    if checks.can_inspect(mass) and bool((mass.detach() < 0).any()):
        raise ArgumentError(detail=f"{name} holds {float(mass.detach().min()):g}", fix="Masses are 0 or more")
    return mass
