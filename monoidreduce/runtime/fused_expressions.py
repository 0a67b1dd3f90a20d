"""Small torch expressions around the folds that have a kernel of their own on a GPU.

Each function is its torch expression; where its arguments are plain tensors on a GPU and the Triton engine has a kernel
for them, that runs instead: one launch, and 16-bit numbers are converted as they are read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..engines import triton
from ..engines.common.matmul import SIXTEEN, dry_run_sizes


def row_dot(x: Tensor, y: Tensor, compute: torch.dtype) -> Tensor:
    """``(x * y).sum(-1)`` in the type ``compute``."""
    on_gpu = x.is_cuda or dry_run_sizes.get() is not None
    plain = type(x) is Tensor and type(y) is Tensor and on_gpu and x.dtype in SIXTEEN and compute is torch.float32
    if plain and not (torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)):
        found = triton.row_kernels.compute_row_dots(x, y) if x.is_cuda else torch.zeros(x.shape[:-1], device="cpu")
        if found is not None:
            return found
    x, y = (t if t.dtype is compute else t.to(compute) for t in (x, y))
    return (x * y).sum(-1)


def label_share(labels: Tensor, ignored: int, dtype: torch.dtype) -> Tensor:
    """``1 / (labels != ignored).sum()`` as a 0-dim tensor: infinite where all labels are ignored."""
    kernel = label_share_kernel(labels, ignored, dtype)
    if kernel is not None:
        return kernel(labels, ignored, dtype)
    return (labels != ignored).sum().to(dtype).reciprocal()


def label_share_kernel(labels: Tensor, ignored: int, dtype: torch.dtype) -> Callable[..., Tensor] | None:
    """The function that computes :func:`label_share` for labels like these by one kernel; None where there is none."""
    plain = labels.is_cuda and type(labels) is Tensor and not torch.compiler.is_compiling()
    return triton.row_kernels.prepare_share(labels, ignored) if plain and dtype is torch.float32 else None


def scale_(x: Tensor, factor: Tensor) -> Tensor:
    """``x.mul_(factor)`` for a 0-dim factor. A factor of 1 reads nothing: gradients of a mean are large."""
    if x.is_cuda and triton.row_kernels.scale_in_place(x, factor):
        return x
    if factor.device.type == "cpu" and float(factor) == 1.0:
        return x
    return x.mul_(factor)
