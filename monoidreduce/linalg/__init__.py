"""Linear algebra with matrices that are never built: solve, precondition, log-determinant, and operators for scipy.

A matrix is what it does to vectors: a function of ``v`` [N] or [N, k] that gives ``K @ v``. A ready-made kernel
(``ops.kernel_sum``), an op of your own, or any function made of them will do, if it is symmetric.

>>> import torch, monoidreduce as mr
>>> x, b = torch.rand(200, 3), torch.rand(200)
>>> kernel = lambda v: mr.ops.kernel_sum(x, x, v, bandwidth=0.5)
>>> weights = mr.linalg.cg(kernel, b, ridge=0.1)
>>> torch.allclose(kernel(weights) + 0.1 * weights, b, atol=1e-3)
True
"""

from .conjugate_gradients import Nystroem, cg, nystroem
from .log_determinant import LogDet, logdet
from .matrices import KernelMatrix, matrix, operator

__all__ = ["KernelMatrix", "LogDet", "Nystroem", "cg", "logdet", "matrix", "nystroem", "operator"]
