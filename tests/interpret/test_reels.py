"""Walks over panels as they were written down: the same launches, bit for bit the same numbers, no more memory."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engine import hardware
from monoidreduce.engine.alive import Alive
from monoidreduce.engine.triton import KernelPlan, deep, epilogue, kept, listen, reel, reels, sweep
from monoidreduce.errors import OutOfMemoryError
from monoidreduce.plan import budget, panels
from tests.interpret.test_epilogue_kernels import SMALL

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::monoidreduce.errors.FallbackWarning")


@mr.op
def own_index(x: mr.Row["d"], y: mr.Col["d"], scale: float):
    s = x @ y * scale
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == mr.row_index, s, 0.0))


@mr.op
def both_ways(x: mr.Row["d"], y: mr.Col["d"], scale: float):
    s = x @ y * scale
    return mr.logsumexp(s), mr.logsumexp(s, over="rows"), mr.sum(torch.tanh(s) * y)


@mr.op
def best(x: mr.Row["d"], y: mr.Col["d"], bias: mr.Col):
    return mr.topk(x @ y + bias, 9)


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path_factory):
    """Few features are wide, tiles are small, and products may write weights."""

    def exact(total, blocks):  # the interpreter multiplies float32, not bfloat16
        x, y = (f"{block}.to(tl.float32)" for block in blocks)
        return f"{total} = tl.dot({x}, tl.trans({y}), acc={total}, input_precision='ieee')"

    for name, value in {"FEW": 4, "ROUND": 4, "SMALLEST": 4}.items():
        monkeypatch.setattr(panels, name, value)
    monkeypatch.setattr(deep, "_dot", exact)
    monkeypatch.setattr(epilogue, "on", lambda device: True)
    monkeypatch.setattr(epilogue, "PLANS", SMALL)
    monkeypatch.setattr(epilogue, "SHALLOW", {})
    monkeypatch.setattr(sweep, "PLANS", {"cols": KernelPlan(8, 16, 4, 1), "rows": KernelPlan(32, 16, 4, 1)})
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path_factory.getbasetemp() / "kernels"))


@pytest.fixture
def ran(monkeypatch, by_address):
    """The reels that were run."""
    found = []

    class Counted(reel.Reel):
        def __init__(self, *how):
            super().__init__(*how)
            run = self.run
            self.run = lambda *given: found.append(self) or run(*given)

    monkeypatch.setattr(reels, "Reel", Counted)
    return found


def vectors(rows, cols, features, dtype=torch.bfloat16, seed=0):
    gen = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(n, features, generator=gen) for n in (rows, cols))
    return (x / features**0.5).to(dtype), y.to(dtype)


def pulled(op, args, limit, *rest):
    """Results and gradients."""
    given = [a.detach().requires_grad_(a.is_floating_point()) for a in args]
    with mr.use(engine="triton"), mr.budget(limit):
        found = op(*given, *rest)
        found = [y for y in (found if isinstance(found, tuple) else (found,)) if y.is_floating_point()]
        grads = torch.autograd.grad([y.sum() for y in found], given, allow_unused=True)
    return [*(y.detach() for y in found), *(g for g in grads if g is not None)]


def walked(monkeypatch, run):
    """The same, walked each time."""
    with monkeypatch.context() as patch:
        patch.setattr(reels, "repeated", lambda walked, *given: walked(*given))
        return run()


ROW = 70 * 2 + 32 + 264 * 2
CASES = [
    pytest.param(own_index.total, 40, 70, 264, torch.bfloat16, ROW * 12, id="gradients in the forward"),
    pytest.param(own_index.total, 33, 70, 300, torch.bfloat16, "10MB", id="in one panel"),
    pytest.param(own_index, 40, 600, 264, torch.bfloat16, 9000, id="in the memory of gradients"),
    pytest.param(own_index, 59, 70, 264, torch.bfloat16, 30_000, id="blocks of rows"),
    pytest.param(both_ways, 23, 31, 260, torch.float32, 70_000, id="both ways, swept"),
    pytest.param(both_ways, 1, 31, 257, torch.float64, "1MB", id="one row, float64"),
]


@pytest.mark.parametrize(("op", "rows", "cols", "features", "dtype", "limit"), CASES)
def test_the_same_launches_and_the_same_numbers(
    op, rows, cols, features, dtype, limit, ran, by_address, monkeypatch
):
    for k in range(2):  # walked, and heard
        pulled(op, vectors(rows, cols, features, dtype, k), limit, 0.7)
    assert not ran
    for k in range(2, 4):
        args = vectors(rows, cols, features, dtype, k)
        by_address.clear()
        wanted = walked(monkeypatch, lambda args=args: pulled(op, args, limit, 0.7))
        launched = by_address.copy()
        by_address.clear()
        got = pulled(op, args, limit, 0.7)
        assert by_address == launched and ran.pop()
        for a, b in zip(got, wanted, strict=True):
            assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
