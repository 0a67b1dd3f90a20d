"""Fixtures of the GPU tests: the launches of a test, and kernels for many pairs on small problems."""

import pytest

from tests.support import internals


@pytest.fixture
def launched(monkeypatch):
    """What is launched for the first time: its kernel and its plan."""
    internals.forget_launches(monkeypatch)
    return internals.watch_launches(monkeypatch, lambda call: (call.kernel, call.plan))


@pytest.fixture
def of_few(monkeypatch):
    """Few pairs have the kernels of many. (A plan would not reach a backward, which has a thread of its own.)"""
    internals.set_pair_thresholds(monkeypatch, very_many=0)
    internals.pretend_device(monkeypatch, processors=1)
