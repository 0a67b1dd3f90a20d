"""What a device and the installed Triton can do: asked by plans, schedules and launches. Plans are also made for GPUs
that are not in this machine, of which nothing is known."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import threading
from dataclasses import replace

import torch

from ....plan import schedule, settings
from ....plan.schedule import Family


@functools.cache
def triton_version() -> tuple[int, ...]:
    """The installed version of Triton: major and minor."""
    return tuple(int(part) for part in importlib.metadata.version("triton").split("+")[0].split(".")[:2])


def find_capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of an NVIDIA GPU of this machine; (0, 0) of any other device."""
    if not _is_present(device) or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


def _is_present(device: torch.device) -> bool:
    """True for a GPU of this machine."""
    return device.type == "cuda" and torch.cuda.is_available()


@functools.cache
def find_family(device: torch.device) -> Family | None:
    """The family of a GPU, with the shared memory that it reports; None without a GPU."""
    if not _is_present(device):
        return None
    known = torch.cuda.get_device_properties(device)
    found = schedule.family(known.major, known.minor)
    return replace(found, shared=int(getattr(known, "shared_memory_per_block_optin", 0)) or found.shared)


@functools.cache
def count_processors(device: torch.device) -> int:
    """The number of streaming multiprocessors; 1 without a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if _is_present(device) else 1


def can_relaunch(device: torch.device) -> bool:
    """True where kernels are launched again by addresses: not by the interpreter, nor by an older Triton, whose
    launchers take no constants."""
    return device.type == "cuda" and triton_version() >= (3, 4)


@functools.cache
def has_descriptors(device: torch.device) -> bool:
    """True when the device and this version of Triton have tensor descriptors (TMA)."""
    if triton_version() < (3, 4):
        return False
    return find_capability(device) >= (9, 0) if device.type == "cuda" else settings.interprets_kernels()


def chains_launches(device: torch.device) -> bool:
    """True where a kernel may be launched while the one before it runs, and wait for it on the device: from Hopper on
    (programmatic dependent launch). What a launch takes is then hidden."""
    return device.type == "cuda" and has_descriptors(device)


def has_fast_epilogues(device: torch.device) -> bool:
    """True where generated GEMMs are as fast as the vendor's: tensor descriptors feed the tensor cores."""
    return device.type == "cuda" and has_descriptors(device)


@functools.cache
def has_tanh(device: torch.device) -> bool:
    """True for GPUs with instructions for tanh and 1 / x: NVIDIA's, from Turing on."""
    return find_capability(device) >= (7, 5)


@functools.cache
def multiplies_eight_bits(device: torch.device) -> bool:
    """True for GPUs with matrix units for 8-bit integers and floats: NVIDIA's, from Ada on."""
    return find_capability(device) >= (8, 9) or (not _is_present(device) and settings.interprets_kernels())


@functools.cache
def splits_float32(device: torch.device) -> bool:
    """True on Hopper and newer, which multiply split float32 weights without moving them between threads."""
    return find_capability(device) >= (9, 0) if device.type == "cuda" else settings.interprets_kernels()


@functools.cache
def runs_warp_specialized(device: torch.device) -> bool:
    """True when the device has ``wgmma`` (compute capability 9.0) and this Triton has the Gluon calls we use."""
    return find_capability(device) == (9, 0) and triton_version() >= (3, 6)


def has_small_products() -> bool:
    """True when this Triton multiplies tiles of fewer than 16 rows."""
    return triton_version() >= (3, 3)


def has_registers_for_wide_tiles() -> bool:
    """True when this Triton keeps ping-pong tiles of 128 x 192 in registers.

    Triton 3.6 does; Triton 3.9 spills some of them to local memory, and then tiles of 128 x 128 are faster. On an H200
    with Triton 3.6 wide tiles took 0.91 of the time of the products alone where narrow ones took 0.96 (a forward of
    65536 x 65536 pairs, 768 features)."""
    return triton_version() < (3, 7)


@functools.cache
def start_triton() -> tuple[threading.Thread, ...]:
    """Start what Triton does once in a process before it compiles or finds a kernel: its driver, for which a C compiler
    takes most of a second once on a machine, and the hash of its own files, hundreds of megabytes. Both leave Python
    free: threads do them while a first call is planned and its kernels are written. The first launch waits for them."""
    threads = [threading.Thread(target=work, name=work.__name__) for work in (_start_driver, _hash_triton)]
    importlib.import_module("triton")
    for thread in threads:
        thread.start()
    return tuple(threads)


def _start_driver() -> None:
    with contextlib.suppress(Exception):  # the first launch raises it
        importlib.import_module("triton.runtime").driver.active.utils  # noqa: B018


def _hash_triton() -> None:
    for place in ("triton.runtime.cache", "triton.compiler.compiler"):  # from Triton 3.5 on, and before
        with contextlib.suppress(Exception):
            importlib.import_module(place).triton_key()
            return
