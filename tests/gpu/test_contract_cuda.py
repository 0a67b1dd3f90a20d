"""Contractions by turns (Gluon, on Hopper), where they are meant to run: the cases of the machine without one, larger
ones, and a head whose column gradients are added up over panels."""

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce.engine import hardware
from monoidreduce.engine.triton import launch, staged
from monoidreduce.engine.triton.wide import contract
from tests.contract import KINDS, ROOM, SIZES, check, made

HOPPER = torch.cuda.is_available() and staged.on(torch.device("cuda"))
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU, and Triton 3.6")

LARGER = [*SIZES, (20000, 1096, 776), (3000, 5000, 1032)]


@pytest.mark.parametrize(("over", "width", "add"), KINDS)
def test_sums_against_float64(over, width, add):
    for L, N, D in LARGER:
        for processors in (132, 5):
            check(L, N, D, over, width, add, processors, "cuda")
    check(*SIZES[0], over, width, add, 132, "cuda", narrow=torch.float16)


@pytest.mark.parametrize(("over", "add"), [("cols", False), ("rows", True)])
def test_parts_of_the_last_tiles(over, add):
    for L, N, D in ((200, 2310, 136), (1024, 40000, 2304), (1500, 9000, 1100)):
        cut, _ = check(L, N, D, over, 128, add, 132, "cuda", ROOM)
        assert cut.parts > 1


def test_repeats_bit_for_bit():
    """Places that were given back too early, and stores that nobody waited for, would show, sooner or later."""
    for over, width, add in KINDS:
        found = [check(30000, 1024, 768, over, width, add, 132, "cuda")[1] for _ in range(10)]
        assert all(torch.equal(found[0], other) for other in found[1:])


def test_which_sums_take_turns():
    out, weights, vectors = made(70000, 1024, 768, "rows", "cuda")
    exact = torch.addmm(out.double(), weights.double(), vectors.double())
    assert contract.into(out, weights, vectors, True, 0)
    hardware.contract_into(plain := made(70000, 1024, 768, "rows", "cuda")[0], weights, vectors, True)
    assert torch.equal(out, plain) and (out.double() - exact).norm() <= 2e-3 * exact.norm()
    for L, N, D in ((2000, 1024, 768), (70000, 1024, 512), (70000, 6000, 192), (70000, 512, 768)):
        assert not contract.into(*made(L, N, D, "rows", "cuda"), True, 0)


def test_column_gradients_over_panels(monkeypatch):
    """Walked, heard and run as it was written down: the same, and as near as torch."""
    seen, real = [], launch.execute
    monkeypatch.setattr(launch, "execute", lambda call: seen.append(call.kernel.name) or real(call))
    monkeypatch.setattr(contract, "_READY", {})
    gen = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 768, generator=gen).bfloat16().cuda().requires_grad_() for n in (4096, 70000))
    label = torch.randint(70000, (4096,), generator=gen).cuda()

    def ours():
        with mr.use(engine="triton"), mr.budget("150MB"):
            return torch.autograd.grad(mr.ops.cross_entropy(x * 0.04, w, label), (x, w))

    found = [ours() for _ in range(4)]
    assert {"contract_rows", "contract_rows_added"} <= set(seen)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    results = []
    for kind in (torch.float64, torch.bfloat16):
        own = [t.detach().to(kind).requires_grad_() for t in (x, w)]
        logits = ((own[0] * 0.04) @ own[1].T).to(torch.promote_types(kind, torch.float32))
        results.append(torch.autograd.grad(F.cross_entropy(logits, label), own))
    for mine, exact, plain in zip(found[0], *results, strict=True):
        error, other = ((t.double() - exact).norm() for t in (mine, plain))
        assert error <= 2 * other
