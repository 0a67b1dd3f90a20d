"""Contractions by turns: what they compute, on a machine of our own (``machine.py``), and how tiles are shared.

They are compiled in ``test_compile.py``, and run where they are meant to in ``tests/gpu``.
"""

import pytest

from monoidreduce.engine.triton import launch, staged
from tests.contract import KINDS, ROOM, SIZES, check
from tests.interpret import machine

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::monoidreduce.errors.FallbackWarning")


@pytest.fixture
def seen(monkeypatch, tmp_path_factory):
    """Kernels by turns run on the machine, as three processors would; those that did."""
    found = []
    monkeypatch.setattr(staged, "on", lambda device: True)
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path_factory.getbasetemp() / "kernels"))
    with machine.instead_of(launch, found):
        yield found


@pytest.mark.parametrize(("over", "width", "add"), KINDS)
@pytest.mark.parametrize(("L", "N", "D"), SIZES)
def test_sums_against_float64(L, N, D, over, width, add, seen):
    cut, _ = check(L, N, D, over, width, add, processors=3)
    assert cut.parts == 1 and [call.kernel.name for call in seen] == [f"contract_{over}" + "_added" * add]


@pytest.mark.parametrize(("over", "add"), [("cols", False), ("rows", True)])
@pytest.mark.parametrize(("L", "N", "D"), [(200, 2310, 136), (400, 3100, 200)])
def test_parts_of_the_last_tiles(L, N, D, over, add, seen):
    cut, _ = check(L, N, D, over, 128, add, processors=3, room=ROOM)
    assert cut.parts > 1 and seen[0].ragged
