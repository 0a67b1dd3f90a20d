"""Packed sequences in kernels: which tiles are visited, and the warp-specialised family on the simulator."""

import itertools

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.engines.triton.codegen import tile_ranges
from monoidreduce.runtime import bind
from tests.support import gluon_simulator, internals

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k * 0.1, v)


@mr.op
def causal(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(torch.where(mr.col_index <= mr.row_index, q @ k * 0.1, -torch.inf), v)


@mr.op
def local(q: Row["f"], k: Col["f"], v: Col["d"]):
    near = (mr.row_index - mr.col_index).abs() <= 50
    return mr.softmax_mean(torch.where(near, q @ k * 0.1, -torch.inf), v)


DOMAINS = {
    "square, empty ones, a tail of none": lambda: mr.jagged(torch.tensor([0, 70, 70, 200, 200, 330])),
    "rows and columns apart": lambda: mr.jagged(torch.tensor([0, 130, 130, 380]), torch.tensor([0, 190, 250, 300])),
    "one": lambda: mr.jagged(torch.tensor([0, 384])),
}


def dense(op, q, k, v, domain):
    rows, cols = q.shape[-2], k.shape[-2]
    seen = domain.mask(rows, cols) > 0
    i, j = domain.row_positions(rows)[:, None], domain.col_positions(cols)
    seen &= {"attention": seen, "causal": j <= i, "local": (i - j).abs() <= 50}[op.__name__]
    s = torch.where(seen, q @ k.mT * 0.1, -torch.inf)
    return torch.where(seen.any(-1, keepdim=True), torch.softmax(s, -1), 0.0).nan_to_num(0.0) @ v


@pytest.fixture
def long(monkeypatch):
    monkeypatch.setattr(bind, "_is_long", lambda *given: True)


@pytest.mark.parametrize("name, op", [*zip(DOMAINS, (local, causal, attention), strict=True), ("one", causal)])
def test_tile_ranges(monkeypatch, long, name, op):
    """Tiles that are left out have no pair, and whole ones have all; values are those of the dense form."""
    domain, make = DOMAINS[name](), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 384, 16, generator=make).requires_grad_() for _ in range(3))
    seen = dense(op, q * 0, k * 0, torch.eye(384), domain)[0, 0] > 0
    tables = []
    bounds = tile_ranges.compute_tile_ranges

    def watched(fold, over, values, lengths, blocks, device):
        found = bounds(fold, over, values, lengths, blocks, device)
        if tile_ranges.find_stretches(fold) is not None:
            tables.append((over, blocks, found))
        return found

    monkeypatch.setattr(tile_ranges, "compute_tile_ranges", watched)
    with mr.use(engine="triton"):
        y = op(q, k, v, cols=domain)
        found = [y, *torch.autograd.grad(y, (q, k, v), torch.ones_like(y))]
    y = dense(op, q, k, v, domain)
    for one, other in zip(found, [y, *torch.autograd.grad(y, (q, k, v), torch.ones_like(y))], strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)
    assert {over for over, *_ in tables} == {"cols", "rows"}
    for over, (kept, folded), table in tables:
        assert table.shape[0] == 1
        pairs = seen if over == "cols" else seen.T
        for t, (first, whole_first, whole_last, again_first, again_last, last) in enumerate(table[0].tolist()):
            assert first <= whole_first <= whole_last <= again_first <= again_last <= last
            mine = pairs[t * kept : (t + 1) * kept]
            outside = torch.cat([mine[:, : first * folded], mine[:, last * folded :]], 1)
            assert not outside.any()
            for a, b in ((whole_first, whole_last), (again_first, again_last)):
                assert mine[:, a * folded : b * folded].all()


def test_no_tiles_are_masked_without_need(long):
    """Inside one sequence all but the ends are whole; a window is cut out of it."""
    rows = torch.arange(3).repeat_interleave(128).int()[None]
    program = mr.jagged(torch.tensor([0, 128, 256, 384]))
    found = []
    with pytest.MonkeyPatch.context() as patch, mr.use(engine="triton"), torch.no_grad():
        bounds = tile_ranges.compute_tile_ranges
        patch.setattr(
            tile_ranges, "compute_tile_ranges", lambda *given: found.append((given, bounds(*given))) or found[-1][1]
        )
        attention(*(torch.randn(384, 16) for _ in range(3)), cols=program)
    (fold, over, values, *_), _ = found[0]
    table = bounds(fold, over, dict.fromkeys(values, rows), (384, 384), (64, 32), torch.device("cpu"))[0]
    starts = [0, 0, 4, 4, 8, 8]
    assert table.tolist() == [[s, s, s + 4, s + 4, s + 4, s + 4] for s in starts]


@pytest.mark.parametrize("name, op", [(n, op) for n, op in zip([*DOMAINS], (causal, attention), strict=False)])
def test_warp_specialised_kernels(monkeypatch, long, name, op):
    """Forward, row and column gradients on the simulator."""
    seen = gluon_simulator.simulate(monkeypatch)
    internals.set_pair_thresholds(monkeypatch, many=0, very_many=0)
    domain, make = DOMAINS[name](), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(384, 128, generator=make).bfloat16().requires_grad_() for _ in range(3))
    with mr.use(engine="triton"):
        y = op(q, k, v, cols=domain)
        found = [y, *torch.autograd.grad(y, (q, k, v), torch.ones_like(y))]
    given = [t.detach().double().requires_grad_() for t in (q, k, v)]
    y = dense(op, *given, domain)
    for one, other in zip(found, [y, *torch.autograd.grad(y, given, torch.ones_like(y))], strict=True):
        assert (one.double() - other).norm() < 6e-3 * other.norm()
    assert [call.kernel.hand_scheduled for call in seen] == [True, True, True]


def test_the_cpu_knows_no_stretches():
    """Where there are no kernels for it, the condition is the plain one."""
    lengths = torch.tensor([4096, 8192])
    offsets = torch.tensor([0, *itertools.accumulate(lengths.tolist())])
    call = bind.bind_domain(
        attention.parameters, {n: torch.empty(12288, 1) for n in ("q", "k", "v")}, mr.jagged(offsets)
    )
    assert call.form == ("jagged", True)
