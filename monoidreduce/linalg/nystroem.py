"""Nyström's preconditioner: the largest eigenvalues of a matrix, found with one product, and their inverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, shown
from . import matrices


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

    def __call__(self, v: Tensor) -> Tensor:
        inside = self.eigenvectors.mT @ v
        return v + self.eigenvectors @ (self._scale.unsqueeze(-1) * inside if v.dim() == 2 else self._scale * inside)


def nystroem(matrix: Callable[[Tensor], Tensor], like: Tensor, *, rank: int, ridge: float, seed: int = 0) -> Nystroem:
    """A preconditioner for :func:`cg`: the ``rank`` largest eigenvalues of K, from one product with so many vectors.

    With it the iterations depend on the eigenvalues that are left, not on the largest: for smooth kernels and a small
    ridge tens instead of hundreds. It costs one product with ``rank`` columns, N · rank numbers of memory, and
    4 · N · rank operations for each vector in each iteration. Worth it where ``rank`` is about the number of
    eigenvalues above the ridge.

    ``like`` is a tensor with N rows, in the type and on the device of the vectors (b, or the points); ``ridge``, above
    0, is about what cg is given. The random vectors are those of ``seed``. It has no gradient, and needs none: it
    changes how fast a solution is found, not the solution.

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
    if not isinstance(like, Tensor) or like.dim() < 1:
        raise ArgumentError(detail=f"like was given {shown(like)}", fix="Give a tensor with N rows: b, or the points")
    matrices.check_vectors("like", like.detach().reshape(len(like), -1) if like.dim() > 2 else like.detach())
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= len(like):
        raise ArgumentError(detail=f"rank was given {shown(rank)}", fix=f"Give a whole number from 1 to {len(like)}")
    if isinstance(ridge, bool) or not isinstance(ridge, int | float) or not ridge > 0:
        raise ArgumentError(detail=f"ridge was given {shown(ridge)}", fix="Give a number above 0")
    column = like.detach().reshape(len(like), -1)[:, :1]
    product = matrices.as_product(matrix, 0.0, column)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        probes = torch.linalg.qr(torch.randn(len(like), rank, generator=draw, dtype=torch.float64).to(column)).Q
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
        found: Any = torch.linalg.cholesky_ex(inner + more * torch.eye(len(inner), dtype=inner.dtype).to(inner.device))
        if int(found.info) == 0:
            return found.L
    raise matrices.not_positive(float(torch.linalg.eigvalsh(inner)[0] / scale.clamp(min=1e-300)))
