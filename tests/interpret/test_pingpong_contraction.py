"""Ping-pong contraction kernels: what they compute, and which contractions get one.

They run on the CPU in ``tests/support/gluon_simulator.py``; ``test_aot_compile.py`` compiles them for a GPU, and
``tests/gpu`` runs the same cases there.
"""

import pytest
import torch

from monoidreduce.engines.triton.panel import accumulators
from tests.support import gluon_simulator, internals
from tests.support.pingpong_contraction_cases import KINDS, SIZES, check, made

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::monoidreduce.errors.FallbackWarning")


@pytest.fixture
def seen(monkeypatch, tmp_path_factory):
    """Contraction kernels run on the simulator, as on three multiprocessors; the launches that did."""
    internals.forget_contractions(monkeypatch)
    internals.pretend_device(monkeypatch, processors=3)
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path_factory.getbasetemp() / "kernels"))
    return gluon_simulator.simulate(monkeypatch)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("over", "add"), KINDS)
@pytest.mark.parametrize(("L", "N", "D"), SIZES)
def test_sums_against_float64(L, N, D, over, add, seen):
    check(L, N, D, over, add)
    assert [call.kernel.name for call in seen] == [f"contract_{over}" + "_added" * add]


def test_float16(seen):
    check(*SIZES[1], "rows", True, narrow=torch.float16)
    assert len(seen) == 1


def test_sums_that_are_long_few_or_of_other_widths_are_the_vendors(seen):
    """What is left to them is told; the other goes through the door that panels use."""
    out, weights, vectors = made(1500, 512, 768, "rows")
    exact = torch.addmm(out.double(), weights.double(), vectors.double())
    accumulators.contract_into(out, weights, vectors, True)
    assert len(seen) == 1 and (out.double() - exact).norm() <= 3e-3 * exact.norm()
    for L, N, D in [(500, 512, 768), (1500, 504, 768), (1500, 4104, 768), (1500, 512, 640), (1500, 512, 776)]:
        assert not accumulators.contract_by_pingpong(*made(L, N, D, "rows"), True) and len(seen) == 1


@pytest.mark.parametrize("change", ["types", "features apart", "unaligned", "another device"])
def test_what_no_descriptor_can_copy_is_the_vendors(change, seen, monkeypatch):
    out, weights, vectors = made(1500, 512, 768, "rows")
    if change == "types":
        out = out.float()
    elif change == "features apart":
        vectors = vectors.mT.contiguous().mT
    elif change == "unaligned":
        out = torch.zeros(1500, 769, dtype=torch.bfloat16)[:, 1:]
    else:
        internals.pretend_device(monkeypatch, warp_specialised=False)
    assert not accumulators.contract_by_pingpong(out, weights, vectors, False) and not seen
