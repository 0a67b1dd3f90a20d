"""What warp-specialised kernels need of a device and of Triton: they are written in Gluon, for Hopper's ``wgmma``."""

from __future__ import annotations

import functools

import torch

from ..launch import jit_module


@functools.cache
def runs_warp_specialized(device: torch.device) -> bool:
    """True when the device has ``wgmma`` (compute capability 9.0) and this Triton has the Gluon calls we use."""
    if device.type != "cuda" or jit_module.triton_version() < (3, 6) or not torch.cuda.is_available():
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def has_registers_for_wide_tiles() -> bool:
    """True when this Triton keeps ping-pong tiles of 128 x 192 in registers.

    Triton 3.6 does; Triton 3.9 spills some of them to local memory, and then tiles of 128 x 128 are faster. On an H200
    with Triton 3.6 wide tiles took 0.91 of the time of the products alone where narrow ones took 0.96 (a forward of
    65536 x 65536 pairs, 768 features)."""
    return jit_module.triton_version() < (3, 7)


def compiler_options(consumers: int) -> dict[str, int]:
    """Options of the compiler for a kernel with so many consumer warp groups beside a producer; none for one without.

    A multiprocessor has 65536 registers. When the kernel starts they are shared out evenly, also to the three warps
    that the producer's warp group leaves idle; ``warp_specialize`` moves them afterwards. They are counted by 8."""
    return {"maxnreg": 65536 // (128 * (consumers + 1)) // 8 * 8} if consumers else {}
