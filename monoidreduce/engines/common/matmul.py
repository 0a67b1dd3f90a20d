"""The one place that knows what the hardware does fast: products of tiles, and exponentials.

``needs_float32`` says whether 16-bit operands should be raised to float32 before they are multiplied (a CPU without
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
def _cpu_has_16bit_units(dtype: torch.dtype) -> bool:
    names = (
        ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
        if dtype is torch.bfloat16
        else ("_is_amx_fp16_supported",)
    )
    return any(getattr(torch.cpu, name, lambda: False)() for name in names)


def needs_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of this 16-bit type are better done in float32 on this device."""
    return device.type == "cpu" and not _cpu_has_16bit_units(dtype)


def choose_16bit_type(vectors: list[Tensor]) -> torch.dtype | None:
    """bfloat16 where a program's vectors are, and the hardware multiplies it: then all its products are done in it.

    Not float16: what the program computes on one side (a vector over its row's sum) may fall below float16's range.
    """
    for v in vectors:
        if v.dtype is torch.bfloat16 and not needs_float32(v.device, v.dtype):
            return torch.bfloat16
    return None


def to_operand(t: Tensor, compute: torch.dtype, narrow: torch.dtype | None) -> Tensor:
    """A tile's vectors in the type they are multiplied in."""
    if not (t.dtype.is_floating_point and compute.is_floating_point):
        return t
    if narrow is not None:
        return t.to(narrow)
    if t.dtype in SIXTEEN and not needs_float32(t.device, t.dtype):
        return t
    return t.to(compute)


# the sizes of the call on a GPU that what runs stands for: see rehearse.py
rehearsed: ContextVar[Any] = ContextVar("rehearsed", default=None)
ROW_DOT: list[Callable[[Tensor, Tensor], Tensor | None]] = []  # the GPU engine's own, if it is there


def row_dot(x: Tensor, y: Tensor, compute: torch.dtype) -> Tensor:
    """⟨x_i, y_i⟩ in ``compute``; 16-bit vectors on a GPU are raised as they are read, where nothing watches."""
    there = x.is_cuda or rehearsed.get() is not None
    plain = type(x) is Tensor and type(y) is Tensor and there and x.dtype in SIXTEEN and compute is torch.float32
    if plain and ROW_DOT and not (torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)):
        found = ROW_DOT[0](x, y) if x.is_cuda else torch.zeros(x.shape[:-1])
        if found is not None:
            return found
    x, y = (t if t.dtype is compute else t.to(compute) for t in (x, y))
    return (x * y).sum(-1)


SHARE: list[Callable[[Tensor, int], Callable[..., Tensor] | None]] = []  # the GPU engine's own, if it is there


def sharer(labels: Tensor, ignored: int, dtype: torch.dtype) -> Callable[..., Tensor] | None:
    """What does the work of :func:`share` for labels like these, where the GPU engine has something."""
    plain = labels.is_cuda and type(labels) is Tensor and not torch.compiler.is_compiling()
    return SHARE[0](labels, ignored) if plain and dtype is torch.float32 and SHARE else None


def share(labels: Tensor, ignored: int, dtype: torch.dtype) -> Tensor:
    """One over the number of labels that are not ignored, a 0-dim tensor: infinite where there are none."""
    ready = sharer(labels, ignored, dtype)
    if ready is not None:
        return ready(labels, ignored, dtype)
    return (labels != ignored).sum().to(dtype).reciprocal()


SCALE: list[Callable[[Tensor, Tensor], bool]] = []  # the GPU engine's own, if it is there


def scale_(x: Tensor, factor: Tensor) -> Tensor:
    """x *= factor, a 0-dim tensor, in place. Where it is 1, nothing is read: gradients of a mean are large."""
    if x.is_cuda and SCALE and SCALE[0](x, factor):
        return x
    if factor.device.type == "cpu" and float(factor) == 1.0:
        return x
    return x.mul_(factor)


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
        return out.copy_(_multiply_integers(x, y))
    x = x if alpha == 1 else x * alpha  # alpha in the product itself is 1.5 times slower with OpenBLAS
    yt = y.mT.contiguous() if _TRANSPOSE_FIRST and out.device.type == "cpu" else y.mT
    if out.shape[0] == 1:
        torch.mm(x[0], yt[0], out=out[0])
        return out
    return torch.bmm(x, yt, out=out)


def multiply_transposed(x: Tensor, y: Tensor) -> Tensor:
    """x[.., m, d] @ y[.., n, d]ᵀ, differentiable; small ones of transposed operands take four times as long on ARM."""
    first = _TRANSPOSE_FIRST and x.device.type == "cpu" and x.shape[-2] <= _SMALL_ROWS and rehearsed.get() is None
    return x @ (y.mT.contiguous() if first else y.mT)


_SMALL_ROWS = 256


def is_16bit(x: Tensor, y: Tensor) -> bool:
    """Whether a product is done in 16 bits."""
    return x.dtype in SIXTEEN or y.dtype in SIXTEEN


def multiply_16bit(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    """alpha · x @ yᵀ with 16-bit operands, accumulated in float32; kept so on GPUs, elsewhere rounded once."""
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


def multiply_into_panel(out: Tensor, x: Tensor, y: Tensor) -> None:
    """out[m, n] = x[m, d] @ y[n, d]ᵀ, rounded once to the type of ``out``."""
    if x.dtype == y.dtype == out.dtype:
        torch.mm(
            _make_feature_major(x) if x.device.type == "cpu" and _COPY_RATIO * x.numel() <= out.numel() else x,
            y.mT,
            out=out,
        )
    elif x.device.type == "cuda" and x.dtype == y.dtype and _supports_float32_output() and out.dtype is torch.float32:
        torch.ops.aten.mm.dtype_out(x, y.mT, torch.float32, out=out)
    elif not out.is_meta:  # raised a few columns at a time
        x = x.to(out.dtype)
        for at in range(0, y.shape[0], _CAST_COLUMNS):
            part = slice(at, at + _CAST_COLUMNS)
            torch.mm(x, y[part].to(out.dtype).mT, out=out[:, part])


_CAST_COLUMNS = 4096
_COPY_RATIO = 16  # times as large as a copy of the rows a product must be, for that to cost next to nothing


def _make_feature_major(x: Tensor) -> Tensor:
    """The same with the numbers of one feature side by side: a product of a few rows with many columns then takes 6 to
    8 % less (Neoverse, 768 features and more)."""
    return x.mT.contiguous().mT


CONTRACT: list[Callable[[Tensor, Tensor, Tensor, bool], bool]] = []  # the GPU engine's own, if it is there


def contract_into(out: Tensor, weights: Tensor, vectors: Tensor, add: bool) -> None:
    """out[l, d] (+)= weights[l, n] @ vectors[n, d], accumulated in float32 and rounded once to the type of ``out``."""
    if weights.dtype in SIXTEEN and CONTRACT and CONTRACT[0](out, weights, vectors, add):
        return
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
_driver_answers: dict[torch.device, tuple[float, int]] = {}  # when a GPU's driver was asked, and what there was


def _query_available(device: torch.device) -> int:
    """Bytes of a GPU that this process has or could have: the driver is asked ten times a second at most, for it takes
    longer to answer than a small call takes."""
    now, (then, found) = time.monotonic(), _driver_answers.get(device, (-math.inf, 0))
    if now - then >= _QUERY_INTERVAL:
        found = int(torch.cuda.mem_get_info(device)[0]) + torch.cuda.memory_reserved(device)
        _driver_answers[device] = now, found
    return found


def _query_allocated(device: torch.device) -> int:
    """Bytes that torch's tensors take on a GPU. ``torch.cuda.memory_allocated`` flattens and sorts all that the
    allocator counts: it takes four times as long."""
    found = torch.cuda.memory_stats_as_nested_dict(device)
    return int(found["allocated_bytes"]["all"]["current"]) if found else 0


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated on a device now; on the one that is meant, where what runs stands for a call."""
    meant = rehearsed.get()
    device = device if meant is None else meant.device
    if device.type == "cuda" and torch.cuda.is_available():
        return max(0, _query_available(device) - _query_allocated(device))
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # a system that does not say
        return 0


def _multiply_integers(x: Tensor, y: Tensor) -> Tensor:
    """Integers have no fast product everywhere: one feature at a time."""
    total = torch.zeros((*x.shape[:-1], y.shape[-2]), dtype=x.dtype, device=x.device)
    for f in range(x.shape[-1]):
        total += x[..., f : f + 1] * y[..., f].unsqueeze(-2)
    return total


def _match_dtypes(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
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
