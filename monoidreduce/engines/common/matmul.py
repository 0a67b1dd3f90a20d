"""Matrix products and exponentials of tiles and panels, as each device computes them fastest.

:func:`needs_float32` decides whether 16-bit operands are cast to float32 before they are multiplied (a CPU without
16-bit matrix units) or multiplied as they are, with float32 accumulation across tiles (GPUs, CPUs with AMX or AVX-512
bf16). Also says how much memory of a device is free.
"""

from __future__ import annotations

import functools
import math
import platform
import time
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ...plan import budget

SIXTEEN = (torch.float16, torch.bfloat16)


@functools.cache
def _cpu_has_16bit_units(dtype: torch.dtype) -> bool:
    names = (
        ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
        if dtype is torch.bfloat16
        else ("_is_amx_fp16_supported",)
    )
    return any(getattr(torch.cpu, name, lambda: False)() for name in names)


def needs_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether operands of this 16-bit type should be cast to float32: on CPUs without 16-bit matrix units."""
    return device.type == "cpu" and not _cpu_has_16bit_units(dtype)


def choose_16bit_type(vectors: list[Tensor]) -> torch.dtype | None:
    """bfloat16 if any vector of a program is bfloat16 and the hardware multiplies it: all its products then use it.

    Never float16: values that a program computes per row (a vector over its row's sum) may underflow in it.
    """
    for v in vectors:
        if v.dtype is torch.bfloat16 and not needs_float32(v.device, v.dtype):
            return torch.bfloat16
    return None


def to_operand(t: Tensor, compute: torch.dtype, narrow: torch.dtype | None) -> Tensor:
    """The vectors of a tile in the type they are multiplied in."""
    if not (t.dtype.is_floating_point and compute.is_floating_point):
        return t
    if narrow is not None:
        return t.to(narrow)
    if t.dtype in SIXTEEN and not needs_float32(t.device, t.dtype):
        return t
    return t.to(compute)


# in a dry run (``runtime/dry_run.py``): the sizes of the GPU call that CPU or meta tensors stand for
dry_run_sizes: ContextVar[Any] = ContextVar("dry_run_sizes", default=None)


# torch's exp takes 3.2 ns an element on a Neoverse core, exp2 2.3 and a multiplication 0.25 (benchmarks/cpu.py)
_EXP2_IS_FASTER = platform.machine().lower() in ("aarch64", "arm64")
_TRANSPOSE_FIRST = _EXP2_IS_FASTER  # a transposed [n, d] costs 4 % of the product and makes it 20 % faster there
_FEW_ROWS = 16  # rows up to which the transposed copy costs more than it saves: 6 times the product at 4 rows


def exp_into(out: Tensor, x: Tensor, factor: float = 1) -> Tensor:
    """out = exp(factor · x), in place if they are the same tile."""
    if _EXP2_IS_FASTER and out.dtype == torch.float32 and out.device.type == "cpu":
        return torch.exp2(torch.mul(x, math.log2(math.e) * factor, out=out), out=out)
    return torch.exp(x if factor == 1 else torch.mul(x, factor, out=out), out=out)


def dot_into(out: Tensor, x: Tensor, y: Tensor, alpha: float) -> Tensor:
    """out[b, m, n] = alpha · x[b, m, d] @ y[b, n, d]ᵀ."""
    if not out.dtype.is_floating_point:
        return out.copy_(_multiply_integers(x, y))
    x = x if alpha == 1 else x * alpha  # alpha in the product itself is 1.5 times slower with OpenBLAS
    small = _is_small_batch(out, y.shape[-2])
    first = _TRANSPOSE_FIRST and out.device.type == "cpu" and out.shape[-2] > _FEW_ROWS
    yt = y.mT.contiguous() if first else y.mT
    if out.shape[0] == 1:
        torch.mm(x[0], yt[0], out=out[0])
        return out
    if small:
        torch.sum(x * y, -1, out=out[:, 0])
        return out
    return torch.bmm(x, yt, out=out)


def _is_small_batch(out: Tensor, count: int) -> bool:
    """Whether products are many of one row with few vectors, which torch without MKL multiplies one after the other:
    4096 of 16 vectors of 64 features took 45 ms, by elements 11 (Neoverse)."""
    return not _BATCHES and out.device.type == "cpu" and out.shape[-2] == 1 and len(out) >= 16 and count <= 256


_BATCHES = torch.backends.mkl.is_available()


def multiply_transposed(x: Tensor, y: Tensor) -> Tensor:
    """x[.., m, d] @ y[.., n, d]ᵀ, differentiable. Small ones of transposed operands are four times slower on ARM."""
    first = _TRANSPOSE_FIRST and x.device.type == "cpu" and x.shape[-2] <= _SMALL_ROWS and dry_run_sizes.get() is None
    return x @ (y.mT.contiguous() if first else y.mT)


_SMALL_ROWS = 256


def is_16bit(x: Tensor, y: Tensor) -> bool:
    """Whether a product has a 16-bit operand."""
    return x.dtype in SIXTEEN or y.dtype in SIXTEEN


def multiply_16bit(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    """alpha · x @ yᵀ with 16-bit operands, accumulated in float32; the result is float32 on GPUs, elsewhere 16-bit."""
    x, y = _match_dtypes(x, y)
    if x.device.type == "cuda" and _supports_float32_output():
        return torch.bmm(x, y.mT, out_dtype=torch.float32).mul_(alpha)
    return torch.bmm(x if alpha == 1 else x * alpha, y.mT)


@functools.cache
def _supports_float32_output() -> bool:
    """Whether this torch's 16-bit products on a GPU can return float32 (since 2.8 or so)."""
    probe = torch.ones((1, 16, 16), dtype=torch.bfloat16, device="cuda")
    try:
        torch.bmm(probe, probe, out_dtype=torch.float32)
    except (TypeError, RuntimeError):
        return False
    return True


_ALIGNED = 8  # 16-bit numbers of 16 bytes


def _wants_alignment(device: torch.device) -> bool:
    return device.type == "cuda"


def _split_aligned(panel: Tensor, dim: int) -> int:
    """Where a vendor GEMM on a panel is cut in two; 0 where it is not.

    Rows of a panel begin on 16 bytes, but the vendor chooses a several times slower kernel where their length is no
    multiple of that (50,257 classes): so all but the last few columns are one product, and those another."""
    length = panel.shape[dim]
    if not _wants_alignment(panel.device) or panel.dtype not in SIXTEEN or panel.stride(dim) != 1:
        return 0
    whole = length - length % _ALIGNED
    return whole if whole != length and panel.stride(1 - dim) % _ALIGNED == 0 else 0


def multiply_into_panel(out: Tensor, x: Tensor, y: Tensor) -> None:
    """out[m, n] = x[m, d] @ y[n, d]ᵀ, rounded once to the type of ``out``."""
    cut = _split_aligned(out, 1)
    if cut:
        _multiply_into_panel(out[:, cut:], x, y[cut:])
        out, y = out[:, :cut], y[:cut]
    _multiply_into_panel(out, x, y)


def _multiply_into_panel(out: Tensor, x: Tensor, y: Tensor) -> None:
    if x.dtype == y.dtype == out.dtype:
        torch.mm(_make_feature_major(x) if _should_copy_first(x, out) else x, y.mT, out=out)
    elif x.device.type == "cuda" and x.dtype == y.dtype and _supports_float32_output() and out.dtype is torch.float32:
        torch.ops.aten.mm.dtype_out(x, y.mT, torch.float32, out=out)
    elif not out.is_meta:  # cast a few columns at a time
        x = x.to(out.dtype)
        for at in range(0, y.shape[0], _CAST_COLUMNS):
            cols = slice(at, at + _CAST_COLUMNS)
            torch.mm(x, y[cols].to(out.dtype).mT, out=out[:, cols])


_CAST_COLUMNS = 4096
_COPY_RATIO = 16  # the output must be this many times larger than x for the transposed copy to be cheap


def _should_copy_first(x: Tensor, out: Tensor) -> bool:
    return _TRANSPOSE_FIRST and x.device.type == "cpu" and _COPY_RATIO * x.numel() <= out.numel()


def _make_feature_major(x: Tensor) -> Tensor:
    """The same matrix, contiguous along rows: products of few rows with many columns then take 6 to 8 % less time
    (Neoverse, 768 features and more). With MKL they take up to 14 % more."""
    return x.mT.contiguous().mT


def contract_into(out: Tensor, weights: Tensor, vectors: Tensor, add: bool) -> None:
    """out[l, d] (+)= weights[l, n] @ vectors[n, d], accumulated in float32 and rounded to the type of ``out``: once, or
    where n is cut the sums of the last few n once before."""
    cut = _split_aligned(weights, 1)
    if cut:
        _contract_into(out, weights[:, cut:], vectors[cut:], add)
        add, weights, vectors = True, weights[:, :cut], vectors[:cut]
    cut = _split_aligned(weights, 0)
    if cut:
        _contract_into(out[cut:], weights[cut:], vectors, add)
        out, weights = out[:cut], weights[:cut]
    _contract_into(out, weights, vectors, add)


def _contract_into(out: Tensor, weights: Tensor, vectors: Tensor, add: bool) -> None:
    if out.dtype == weights.dtype:
        torch.addmm(out, weights, vectors, out=out) if add else torch.mm(weights, vectors, out=out)
    elif weights.device.type == "cuda" and _supports_float32_output():
        if add:
            torch.ops.aten.addmm.dtype_out(out, weights, vectors, out.dtype, out=out)
        else:
            torch.ops.aten.mm.dtype_out(weights, vectors, out.dtype, out=out)
    elif not out.is_meta:
        product = weights.to(out.dtype) @ vectors.to(out.dtype)
        out.add_(product) if add else out.copy_(product)


_QUERY_INTERVAL = 0.1  # seconds
_answers: dict[torch.device, tuple[float, int]] = {}  # per device: when it was queried, and its answer
_HOST = torch.device("cpu")


def _query_available(device: torch.device) -> int:
    """Bytes of memory that this process holds or could allocate on a GPU, or could allocate on the host. Driver and
    system are queried at most ten times a second: a query takes longer than a small call."""
    now, (then, found) = time.monotonic(), _answers.get(device, (-math.inf, 0))
    if now - then >= _QUERY_INTERVAL:
        if device.type == "cuda":
            found = int(torch.cuda.mem_get_info(device)[0]) + torch.cuda.memory_reserved(device)
        else:
            found = budget.available_bytes()
        _answers[device] = now, found
    return found


def _query_allocated(device: torch.device) -> int:
    """Bytes of all tensors on a GPU. ``torch.cuda.memory_allocated`` takes four times as long: it flattens and sorts
    all statistics of the allocator."""
    found = torch.cuda.memory_stats_as_nested_dict(device)
    return int(found["allocated_bytes"]["all"]["current"]) if found else 0


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated on a device now; in a dry run, on the device that the run stands for."""
    meant = dry_run_sizes.get()
    device = device if meant is None else meant.device
    if device.type == "cuda" and torch.cuda.is_available():
        return max(0, _query_available(device) - _query_allocated(device))
    return _query_available(_HOST)


def _multiply_integers(x: Tensor, y: Tensor) -> Tensor:
    """A product of integers, one feature at a time: not every device has an integer matrix product."""
    total = torch.zeros((*x.shape[:-1], y.shape[-2]), dtype=x.dtype, device=x.device)
    for f in range(x.shape[-1]):
        total += x[..., f : f + 1] * y[..., f].unsqueeze(-2)
    return total


def _match_dtypes(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Cast two operands to one type: the 16-bit one, if they differ."""
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
    elif _is_small_batch(total, weights.shape[-1]):
        total += (weights.mT * vectors).sum(1, keepdim=True)
    else:
        total.baddbmm_(weights, vectors)


def accumulate_cast(total: Tensor, weights: Tensor, vectors: Tensor) -> None:
    """The same with vectors of any type, of which few are cast to that of the weights at a time."""
    step = max(1, vectors.shape[-2] if vectors.dtype == weights.dtype else _CAST_COLUMNS)
    for at in range(0, vectors.shape[-2], step):
        some = slice(at, at + step)
        accumulate(total, weights[..., some], vectors[..., some, :].to(weights.dtype))
