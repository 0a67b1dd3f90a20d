"""What tests of kernels by turns share: what was launched, and how few pairs get the kernels of many."""

import pytest

from monoidreduce.engines import triton as engine
from monoidreduce.engines.triton.kernels import fold_kernel
from monoidreduce.engines.triton.schedules import spec_from_tensors


@pytest.fixture
def launched(monkeypatch):
    """What is launched for the first time: its kernel and its plan."""
    found, real = [], fold_kernel.execute

    def execute(call):
        found.append((call.kernel, call.plan))
        return real(call)

    monkeypatch.setattr(engine, "_READY", {})
    monkeypatch.setattr(fold_kernel, "execute", execute)
    return found


@pytest.fixture
def of_few(monkeypatch):
    """Few pairs have the kernels of many. (A plan would not reach a backward, which has a thread of its own.)"""
    monkeypatch.setattr(spec_from_tensors, "VERY_MANY", 0)
    monkeypatch.setattr(spec_from_tensors, "processors", lambda device: 1)
