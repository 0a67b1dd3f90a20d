"""Kernels run here in Triton's interpreter, on the CPU. The variable must be set before anything imports Triton."""

import ctypes
import os
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "1"

import pytest

pytest.importorskip("triton")

import torch
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from monoidreduce.engines.triton.kernels import listed_launch, pick, small_kernels, topk
from monoidreduce.engines.triton.launch import descriptors, driver
from monoidreduce.engines.triton.panel import accumulators, row_factor
from monoidreduce.engines.triton.schedules import spec_from_tensors
from tests.support import internals
from tests.support.fast_interpreter import quicken


def _unseen(run):
    """What the interpreter does with torch is no business of who watches torch: a GPU does not."""

    def launched(*given):
        with _disable_current_modes():
            return run(*given)

    return launched


QUICKENED = pytest.MonkeyPatch()
quicken(QUICKENED)


@pytest.fixture
def as_it_is():
    """Triton's own interpreter."""
    QUICKENED.undo()
    yield
    quicken(QUICKENED)


@pytest.fixture
def by_address(monkeypatch):
    """Kernels are launched again as on a GPU, with addresses in place of tensors; how often."""
    made = []

    def execute(launch, call):
        run = _unseen(launch)
        run(call)

        def again(*arguments):
            made.append(call.kernel.name)
            given = (_at(a, like) for a, like in zip(arguments, call.arguments, strict=True))
            run(replace(call, arguments=tuple(given)))

        return again

    def first(launch, kernels, name, grid, like, *constants):
        run = _unseen(launch)
        run(kernels, name, grid, like, *constants)
        return lambda *arguments: run(kernels, name, grid, [*map(_at, arguments, like)], *constants)

    internals.replace_fixed_kernel_launch(monkeypatch, first)
    small_ones = (row_factor, accumulators, spec_from_tensors, pick, topk, small_kernels, listed_launch)
    for kernels in [small_kernels._dots, *(module._kernels for module in small_ones)]:
        monkeypatch.setattr(kernels, "launch_cache", driver.LaunchCache())
    internals.forget_panel_recordings(monkeypatch)
    # all of it is memory of this machine: to copy it there and back would mix up tensors that begin at one address
    monkeypatch.setattr(GridExecutor, "_init_args_hst", lambda self, args, kwargs: (list(args), kwargs))
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
    internals.replace_launch(monkeypatch, execute)
    internals.relaunch_on_any_device(monkeypatch)
    internals.forget_launches(monkeypatch)
    return made


@_unseen
def _at(address, like):
    """The tensor at an address, of a form, or a descriptor of it."""
    if hasattr(address, "block_shape") and isinstance(address.base, descriptors.Address):
        return descriptors.replace_base(address, _at(address.base.at, like.base))
    if isinstance(address, torch.Tensor) or not isinstance(like, torch.Tensor):
        return address
    extent = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    memory = (ctypes.c_char * (extent * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())
