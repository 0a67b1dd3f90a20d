"""Kernels run here in Triton's interpreter, on the CPU. The variable must be set before anything imports Triton."""

import ctypes
import os
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "1"

import pytest

pytest.importorskip("triton")

import torch

from monoidreduce.engine import triton
from monoidreduce.engine.triton import launch, source
from tests.interpret.quick import quicken

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
    real, made = launch.execute, []

    def execute(call):
        real(call)

        def again(*arguments):
            made.append(call.kernel.name)
            given = (_at(a, like) for a, like in zip(arguments, call.arguments, strict=True))
            real(replace(call, arguments=tuple(given)))

        return again

    monkeypatch.setattr(launch, "execute", execute)
    monkeypatch.setattr(source, "repeats", lambda device: True)
    monkeypatch.setattr(triton, "_READY", {})
    return made


def _at(address, like):
    """The tensor at an address, of a form."""
    if isinstance(address, torch.Tensor) or not isinstance(like, torch.Tensor):
        return address
    extent = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    memory = (ctypes.c_char * (extent * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())
