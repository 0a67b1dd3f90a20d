"""The one place that knows what the hardware does fast: products of tiles, and exponentials.

``raise_16bit`` says whether 16-bit operands should be raised to float32 before they are multiplied (a CPU without
16-bit matrix units) or multiplied as they are, with float32 accumulation across tiles (GPUs, CPUs with AMX or AVX-512
bf16).
"""

from __future__ import annotations

import functools
import math
import os
import platform
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

SIXTEEN = (torch.float16, torch.bfloat16)
PRECISIONS = ("ieee", "tf32", "tf32x3")
# What mr.use says of precision, strict and tune: kept by a backward.
asked: ContextVar[tuple[str | None, bool, bool | None]] = ContextVar("asked", default=(None, False, None))


def float32_precision() -> str:
    """How kernels multiply float32 numbers: as ``mr.use`` asks, else as torch itself would."""
    chosen = asked.get()[0]
    if chosen is not None:
        return chosen
    if _PRECISION is None:
        return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    said = _PRECISION("cuda", "matmul")
    if said == "none":
        said = _PRECISION("generic", "all")
    return "tf32" if said == "tf32" else "ieee"


# What torch.backends.cuda.matmul.fp32_precision asks, since 2.9; the older switch cannot be read beside it. Asked in
# every call: the switch itself takes four times as long.
_PRECISION: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)


@functools.cache
def _cpu_multiplies(dtype: torch.dtype) -> bool:
    names = (
        ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
        if dtype is torch.bfloat16
        else ("_is_amx_fp16_supported",)
    )
    return any(getattr(torch.cpu, name, lambda: False)() for name in names)


def raise_16bit(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of this 16-bit type are better done in float32 on this device."""
    return device.type == "cpu" and not _cpu_multiplies(dtype)


def narrow_type(vectors: list[Tensor]) -> torch.dtype | None:
    """bfloat16 where a program's vectors are, and the hardware multiplies it: then all its products are done in it.

    Not float16: what the program computes on one side (a vector over its row's sum) may fall below float16's range.
    """
    for v in vectors:
        if v.dtype is torch.bfloat16 and not raise_16bit(v.device, v.dtype):
            return torch.bfloat16
    return None


def operand(t: Tensor, compute: torch.dtype, narrow: torch.dtype | None) -> Tensor:
    """A tile's vectors in the type they are multiplied in."""
    if not (t.dtype.is_floating_point and compute.is_floating_point):
        return t
    if narrow is not None:
        return t.to(narrow)
    if t.dtype in SIXTEEN and not raise_16bit(t.device, t.dtype):
        return t
    return t.to(compute)


# in a dry run (``runtime/dry_run.py``): the sizes of the GPU call that CPU or meta tensors stand for
dry_run_sizes: ContextVar[Any] = ContextVar("dry_run_sizes", default=None)


# torch's exp takes 3.2 ns an element on a Neoverse core, exp2 2.3 and a multiplication 0.25 (benchmarks/cpu.py)
_EXP2_IS_FASTER = platform.machine().lower() in ("aarch64", "arm64")
_TRANSPOSE_FIRST = _EXP2_IS_FASTER  # a transposed [n, d] costs 4 % of the product and makes it 20 % faster there


def exp_into(out: Tensor, x: Tensor, factor: float = 1) -> Tensor:
    """out = exp(factor · x), in place if they are the same tile."""
    if _EXP2_IS_FASTER and out.dtype == torch.float32 and out.device.type == "cpu":
        return torch.exp2(torch.mul(x, math.log2(math.e) * factor, out=out), out=out)
    return torch.exp(x if factor == 1 else torch.mul(x, factor, out=out), out=out)


def dot_into(out: Tensor, x: Tensor, y: Tensor, alpha: float) -> Tensor:
    """out[b, m, n] = alpha · x[b, m, d] @ y[b, n, d]ᵀ."""
    if not out.dtype.is_floating_point:
        return out.copy_(_integer_product(x, y))
    x = x if alpha == 1 else x * alpha  # alpha in the product itself is 1.5 times slower with OpenBLAS
    yt = y.mT.contiguous() if _TRANSPOSE_FIRST and out.device.type == "cpu" else y.mT
    if out.shape[0] == 1:
        torch.mm(x[0], yt[0], out=out[0])
        return out
    return torch.bmm(x, yt, out=out)


def product(x: Tensor, y: Tensor) -> Tensor:
    """x[.., m, d] @ y[.., n, d]ᵀ, differentiable; small ones of transposed operands take four times as long on ARM."""
    first = _TRANSPOSE_FIRST and x.device.type == "cpu" and x.shape[-2] <= SMALL and dry_run_sizes.get() is None
    return x @ (y.mT.contiguous() if first else y.mT)


SMALL = 256


def is_narrow(x: Tensor, y: Tensor) -> bool:
    """Whether a product is done in 16 bits."""
    return x.dtype in SIXTEEN or y.dtype in SIXTEEN


def narrow_dot(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    """alpha · x @ yᵀ with 16-bit operands, accumulated in float32; kept so on GPUs, elsewhere rounded once."""
    x, y = _same(x, y)
    if x.device.type == "cuda" and _keeps_float32():
        return torch.bmm(x, y.mT, out_dtype=torch.float32).mul_(alpha)
    return torch.bmm(x if alpha == 1 else x * alpha, y.mT)


@functools.cache
def _keeps_float32() -> bool:
    """Whether this torch's 16-bit products on a GPU can return float32 (since 2.8 or so)."""
    probe = torch.ones((1, 16, 16), dtype=torch.bfloat16, device="cuda")
    try:
        torch.bmm(probe, probe, out_dtype=torch.float32)
    except (TypeError, RuntimeError):
        return False
    return True


def panel_into(out: Tensor, x: Tensor, y: Tensor) -> None:
    """out[m, n] = x[m, d] @ y[n, d]ᵀ, rounded once to the type of ``out``."""
    if x.dtype == y.dtype == out.dtype:
        torch.mm(_by_features(x) if x.device.type == "cpu" and _MUCH * x.numel() <= out.numel() else x, y.mT, out=out)
    elif x.device.type == "cuda" and x.dtype == y.dtype and _keeps_float32() and out.dtype is torch.float32:
        torch.ops.aten.mm.dtype_out(x, y.mT, torch.float32, out=out)
    elif not out.is_meta:  # raised a few columns at a time
        x = x.to(out.dtype)
        for at in range(0, y.shape[0], _RAISED):
            part = slice(at, at + _RAISED)
            torch.mm(x, y[part].to(out.dtype).mT, out=out[:, part])


_RAISED = 4096
_MUCH = 16  # times as large as a copy of the rows a product must be, for that to cost next to nothing


def _by_features(x: Tensor) -> Tensor:
    """The same with the numbers of one feature side by side: a product of a few rows with many columns then takes 6 to
    8 % less (Neoverse, 768 features and more)."""
    return x.mT.contiguous().mT


def contract_into(out: Tensor, weights: Tensor, vectors: Tensor, add: bool) -> None:
    """out[l, d] (+)= weights[l, n] @ vectors[n, d], accumulated in float32 and rounded once to the type of ``out``."""
    if out.dtype == weights.dtype:
        torch.addmm(out, weights, vectors, out=out) if add else torch.mm(weights, vectors, out=out)
    elif weights.device.type == "cuda" and _keeps_float32():
        if add:
            torch.ops.aten.addmm.dtype_out(out, weights, vectors, out.dtype, out=out)
        else:
            torch.ops.aten.mm.dtype_out(weights, vectors, out.dtype, out=out)
    elif not out.is_meta:
        product = weights.to(out.dtype) @ vectors.to(out.dtype)
        out.add_(product) if add else out.copy_(product)


_SOON = 0.1  # seconds
_driver_said: dict[torch.device, tuple[float, int]] = {}  # when a GPU's driver was asked, and what there was


def _obtainable(device: torch.device) -> int:
    """Bytes of a GPU that this process has or could have: the driver is asked ten times a second at most, for it takes
    longer to answer than a small call takes."""
    now, (then, found) = time.monotonic(), _driver_said.get(device, (-math.inf, 0))
    if now - then >= _SOON:
        found = int(torch.cuda.mem_get_info(device)[0]) + torch.cuda.memory_reserved(device)
        _driver_said[device] = now, found
    return found


def _allocated(device: torch.device) -> int:
    """Bytes that torch's tensors take on a GPU. ``torch.cuda.memory_allocated`` flattens and sorts all that the
    allocator counts: it takes four times as long."""
    found = torch.cuda.memory_stats_as_nested_dict(device)
    return int(found["allocated_bytes"]["all"]["current"]) if found else 0


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated on a device now; on the one that is meant, where what runs stands for a call."""
    meant = dry_run_sizes.get()
    device = device if meant is None else meant.device
    if device.type == "cuda" and torch.cuda.is_available():
        return max(0, _obtainable(device) - _allocated(device))
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # a system that does not say
        return 0


def _integer_product(x: Tensor, y: Tensor) -> Tensor:
    """Integers have no fast product everywhere: one feature at a time."""
    total = torch.zeros((*x.shape[:-1], y.shape[-2]), dtype=x.dtype, device=x.device)
    for f in range(x.shape[-1]):
        total += x[..., f : f + 1] * y[..., f].unsqueeze(-2)
    return total


def _same(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Two operands in one type: where one is 16-bit and the hardware multiplies that, both are."""
    if x.dtype == y.dtype:
        return x, y
    narrow = x.dtype if x.dtype in SIXTEEN else y.dtype
    return x.to(narrow), y.to(narrow)


def accumulate(total: Tensor, weights: Tensor, vectors: Tensor) -> None:
    """total[b, l, d] += weights[b, l, n] @ vectors[b, n, d], of one type; the running total in its own."""
    if weights.dtype != total.dtype:
        total += torch.bmm(weights, vectors)
    elif total.shape[0] == 1 and total.is_contiguous():
        total[0].addmm_(weights[0], vectors[0])
    else:
        total.baddbmm_(weights, vectors)
