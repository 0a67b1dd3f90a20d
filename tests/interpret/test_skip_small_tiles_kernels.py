"""Contractions without the tiles that are small, and the k best of a panel: written by hand, run in the interpreter."""

import math

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines import auto
from monoidreduce.engines.common import skip_small_tiles
from monoidreduce.engines.triton.kernels import topk
from monoidreduce.engines.triton.panel import accumulators
from tests.support import internals

# the interpreter computes both sides of a where, and NumPy tells of each infinity met there
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BOUND = 2.0**-12


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path_factory):
    for module in (skip_small_tiles, accumulators):
        monkeypatch.setattr(module, "TILE", 16)
    monkeypatch.setattr(accumulators, "_PLANS", {2: (32, 16, 4, 1), 4: (32, 16, 4, 1), 8: (32, 16, 4, 1)})
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path_factory.getbasetemp() / "kernels"))


def weights(rows, cols, dtype, stride=0):
    """Small numbers, and one large in some tiles; a wider matrix is cut where rows lie further apart."""
    torch.manual_seed(0)
    w = torch.rand(rows, cols + stride, dtype=torch.float64)[:, :cols] * 2.0**-14
    for i, j in ((0, 0), (rows - 1, cols - 1), (rows // 2, cols // 3), (rows - 1, 0)):
        w[i, j] = -1.0
    whole = torch.empty(rows, cols + stride, dtype=dtype)[:, :cols]
    return whole.copy_(w)


def kept_of(w):
    """The same with zeros in the tiles that are left out, and how many are not."""
    found, count = torch.zeros_like(w), 0
    for i in range(0, w.shape[0], 16):
        for j in range(0, w.shape[1], 16):
            tile = (slice(i, i + 16), slice(j, j + 16))
            if w[tile].abs().amax() >= BOUND:
                found[tile], count = w[tile], count + 1
    return found, count


@pytest.mark.sampled(6)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("size", [(32, 48, 32), (37, 59, 33), (1, 111, 5), (64, 17, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=lambda d: str(d)[6:])
def test_contractions_skip_what_is_small(dtype, size, add):
    rows, cols, width = size
    w, exact = weights(rows, cols, dtype, 5), None
    exact, count = kept_of(w.double())
    contract = accumulators.PanelContraction()
    with mr.skip_below(BOUND) as skipped, skip_small_tiles.apply_to_gradient():
        for over, folded, kept in (("cols", cols, rows), ("rows", rows, cols)):
            vectors = torch.randn(folded, width).to(dtype)
            out = torch.ones(kept, width, dtype=torch.promote_types(dtype, torch.float32))
            contract(out, w, vectors, over, add)
            wanted = (exact if over == "cols" else exact.mT) @ vectors.double() + (1.0 if add else 0.0)
            torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)
    assert skipped.tiles == 2 * -(-rows // 16) * -(-cols // 16)
    assert skipped.kept == pytest.approx(2 * count / skipped.tiles) and (count < skipped.tiles / 2)


def test_without_asking_the_vendor_multiplies(monkeypatch):
    monkeypatch.setattr(accumulators, "_contract_kept_tiles", None)
    w, vectors, out = weights(20, 30, torch.float32), torch.randn(30, 4), torch.empty(20, 4)
    accumulators.PanelContraction()(out, w, vectors, "cols", False)
    torch.testing.assert_close(out, w @ vectors)


def test_nan_and_infinity_are_kept():
    for value, everything in ((float("nan"), True), (float("inf"), True)):
        w = weights(32, 48, torch.float32)
        w[3, 20] = value
        with mr.skip_below(BOUND) as skipped, skip_small_tiles.apply_to_gradient():
            out = torch.empty(32, 4)
            accumulators.PanelContraction()(out, w, torch.ones(48, 4), "cols", False)
        assert (skipped.kept == 1.0) == everything and not out[3].isfinite().any() and out[16:].isfinite().all()


@pytest.mark.parametrize("limit", ["60kB", "2MB"])
def test_a_loss_in_panels(limit, monkeypatch):
    """The same tiles, and so the same gradients, as the tiles of torch on one panel; in many, within the bound."""
    internals.set_panel_sizes(monkeypatch, NARROW=0, MIN_ROWS=4, MULTIPLE=4, MIN_SIDE=4)
    torch.manual_seed(0)
    w, target = torch.randn(70, 12), torch.randint(70, (40,))
    x = (w[target] * 1.5 + 0.2 * torch.randn(40, 12)).requires_grad_()
    with mr.use(engine="panel"), mr.budget(limit):
        mr.ops.cross_entropy(x, w, target, reduction="sum").backward()
        exact, x.grad = x.grad, None
        with mr.skip_below(2.0**-6) as skipped:
            mr.ops.cross_entropy(x, w, target, reduction="sum").backward()
    assert 0 < skipped.kept < 1 and not torch.equal(x.grad, exact)
    assert ((x.grad - exact).abs() < 2.0**-6 * w.abs().sum(0)).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("length", [300, 515])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=lambda d: str(d)[6:])
def test_the_k_best_in_two_levels(dtype, length, monkeypatch):
    internals.set_topk_strip(monkeypatch, 16)
    torch.manual_seed(0)
    x = torch.randn(4, length + 8)[:, :length].to(dtype)
    x[1, 5], x[2], x[3, :200] = float("nan"), -torch.inf, 2.0
    for k in (1, 3):
        compute = torch.promote_types(dtype, torch.float32)
        values, places = topk.select_best(x, k, True, compute)
        assert values.dtype is compute and (places[2] == -1).all()
        torch.testing.assert_close(values, x.topk(k).values.to(compute), rtol=0, atol=0, equal_nan=True)
        seen = [0, 1, 3]
        torch.testing.assert_close(x[seen].gather(1, places[seen]).to(compute), values[seen], equal_nan=True)
        assert all(len(set(row)) == k for row in places[seen].tolist())
        least = topk.select_best(x, k, False, compute)[0]
        torch.testing.assert_close(least, x.topk(k, largest=False).values.to(compute), equal_nan=True)
    assert topk.select_best(x[:0], 3, True, compute)[1].shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda d: str(d)[6:])
def test_the_k_best_are_those_of_a_stable_sort(dtype, monkeypatch, seed):
    """The first of equals, NaN before all, zeros whatever their signs, negative rows."""
    internals.set_topk_strip(monkeypatch, 16)
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 1101, generator=gen).to(dtype)
    x[1] -= 20
    x[2, 7], x[2, 100:900], x[3, :1000], x[4, ::2], x[5, 3::5] = math.nan, -0.0, -math.inf, 0.0, 3.0
    for k in (1, 5, 16):
        values, places = topk.select_best(x, k, True, dtype)
        wanted = x.float().sort(dim=1, descending=True, stable=True)
        assert values.dtype is dtype and torch.equal(places, wanted.indices[:, :k])
        torch.testing.assert_close(values.float(), wanted.values[:, :k], rtol=0, atol=0, equal_nan=True)
    monkeypatch.setattr(topk, "_HELD", 64)  # more than a program instance looks at
    values, places = topk.select_best(x, 16, True, dtype)
    torch.testing.assert_close(values.float(), wanted.values[:, :16], equal_nan=True)
    assert torch.equal(places, wanted.indices[:, :16])


@pytest.mark.parametrize("limit", [None, 4000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=lambda d: str(d)[6:])
def test_the_k_best_products_some_rows_at_a_time(dtype, limit, monkeypatch):
    internals.set_panel_sizes(monkeypatch, NARROW=0)
    torch.manual_seed(0)
    x, w = torch.randn(7, 300).to(dtype), torch.randn(411, 300).to(dtype)
    calls = []
    original = topk.select_best_of_panel
    monkeypatch.setattr(topk, "select_best_of_panel", lambda *a: calls.append(a) or original(*a))
    with mr.use(engine="triton", budget=limit):
        found = mr.ops.linear_topk(x, w, 9)
    exact = (x.double() @ w.double().mT).topk(9)
    assert torch.equal(found.indices, exact.indices) and len(calls) == (1 if limit is None else 4)
    torch.testing.assert_close(found.values.double(), exact.values, rtol=1e-3, atol=1e-3)
    with mr.use(engine="triton", budget=1000), pytest.raises(mr.BudgetError, match="at least"):
        mr.ops.linear_topk(x, w, 9)


def test_the_k_best_products_again_go_straight_to_them(monkeypatch):
    """The planner is asked once for products of one kind: then the host does only what finds them."""
    asked, original = [], auto.run_choice
    internals.replace_planned_run(monkeypatch, lambda *a: asked.append(a) or original(*a))
    internals.plan_panels(monkeypatch)
    for seed in range(3):
        torch.manual_seed(seed)
        x, w = torch.randn(7, 300), torch.randn(411, 300)
        with mr.use(engine="auto"), torch.no_grad():
            found = mr.ops.linear_topk(x, w, 9)
        assert torch.equal(found.indices, (x.double() @ w.double().mT).topk(9).indices)
    assert len(asked) == 1


@pytest.mark.parametrize("limit", [None, 400])
def test_the_k_best_products_again_are_what_was_heard(by_address, limit, monkeypatch):
    """A product and two launches for each panel; rows that are the columns too are another kind of call."""
    internals.plan_panels(monkeypatch)
    done, original = [], topk.select_best_products
    monkeypatch.setattr(topk, "select_best_products", lambda *a, **k: done.append(a) or original(*a, **k))
    for turn in range(6):
        torch.manual_seed(turn)
        w = torch.randn(41, 300)
        x = w if turn in (1, 4) else torch.randn(41, 300)
        with mr.use(engine="auto", budget=limit), torch.no_grad():
            found = mr.ops.linear_topk(x, w, 3)
        wanted = (x.double() @ w.double().mT).topk(3)
        assert torch.equal(found.indices, wanted.indices)
        torch.testing.assert_close(found.values.double(), wanted.values, rtol=1e-4, atol=1e-4)
    assert len(done) == 3, "walked once, and heard once for each kind"
