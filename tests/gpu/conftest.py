"""What tests of kernels by turns share: what was launched, and how few pairs get the kernels of many."""

import pytest

from monoidreduce.engine import triton as engine
from monoidreduce.engine.triton import describe, launch


@pytest.fixture
def launched(monkeypatch):
    """What is launched for the first time: its kernel and its plan."""
    found, real = [], launch.execute

    def execute(call):
        found.append((call.kernel, call.plan))
        return real(call)

    monkeypatch.setattr(engine, "_READY", {})
    monkeypatch.setattr(launch, "execute", execute)
    return found


@pytest.fixture
def of_few(monkeypatch):
    """Few pairs have the kernels of many. (A plan would not reach a backward, which has a thread of its own.)"""
    monkeypatch.setattr(describe, "VERY_MANY", 0)
    monkeypatch.setattr(describe, "processors", lambda device: 1)
