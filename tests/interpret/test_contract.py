"""Contractions by turns: what they compute, on a machine of our own (``machine.py``), and how tiles are shared.

They are compiled in ``test_compile.py``, and run where they are meant to in ``tests/gpu``.
"""

import pytest
import torch

from monoidreduce.engine.triton import describe, launch, staged
from monoidreduce.engine.triton.wide import contract
from tests.contract import KINDS, ROOM, SIZES, check
from tests.interpret import machine

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::monoidreduce.errors.FallbackWarning")


@pytest.fixture
def seen(monkeypatch, tmp_path_factory):
    """Kernels by turns run on the machine, as three processors would; those that did."""
    found = []
    monkeypatch.setattr(contract, "_READY", {})
    monkeypatch.setattr(staged, "on", lambda device: True)
    monkeypatch.setattr(describe, "processors", lambda device: 3)
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path_factory.getbasetemp() / "kernels"))
    with machine.instead_of(launch, found):
        yield found


@pytest.mark.parametrize(("over", "kind", "add"), KINDS)
@pytest.mark.parametrize(("L", "N", "D"), SIZES)
def test_sums_against_float64(L, N, D, over, kind, add, seen):
    whole = check(L, N, D, over, kind, add)
    (ready,) = contract._READY.values()
    assert ready.cut.parts == 1
    parts = check(L, N, D, over, kind, add, room=ROOM)
    torch.testing.assert_close(parts.float(), whole.float(), rtol=2e-2 if kind is torch.bfloat16 else 1e-4, atol=1e-3)
    assert len(seen) == 2 and seen[0].kernel.name.startswith(f"contract_{over}")
