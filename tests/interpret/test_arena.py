"""Softmax weights kept in the memory of the column gradients: results and gradients are those of whole rows."""

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce.engines.triton import KernelPlan
from tests.interpret.test_epilogue_kernels import (
    FAR,
    SMALL,
    alike,
    compared,
    head,
    own_index,
    plain_head,
    pulled,
    vectors,
)
from tests.support import internals

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::monoidreduce.errors.FallbackWarning")
ROWS = 10**6  # of which fewer are not worth a panel: there are none
PLANS = SMALL | dict.fromkeys(
    ("write_weights", "write_guessed", "sum_guessed", "recompute_rows"), KernelPlan(64, 64, 4, 1)
)


@pytest.fixture(autouse=True)
def used(monkeypatch, tmp_path_factory):
    """Small tiles and panels; the kernels that were launched, and the plans of the panels."""
    found, plans = internals.watch_epilogue_kernels(monkeypatch), internals.watch_panels(monkeypatch)
    internals.use_epilogue_plans(monkeypatch, PLANS)
    internals.set_panel_sizes(monkeypatch, MIN_ROWS=ROWS, MIN_ROWS_FLOAT32=ROWS, MULTIPLE=4, MAX_COLS=128)
    internals.set_panel_sizes(monkeypatch, COL_MULTIPLE=64, MIN_COLS=4, OVERHEAD=8)
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path_factory.getbasetemp() / "kernels"))
    return found, plans


def stored_share(used):
    """The share of columns whose weights were stored; all kernels were launched as often as the plan says."""
    names, (panel,) = used
    plan = panel.in_place
    cols = max(one.last for one in plan.panels)
    expected = dict(guess_maxima=1, sum_guessed=1, finish_rows=1, weigh_labels=1, multiply_labels=1)
    expected |= dict.fromkeys(("write_guessed", "recompute_rows"), len(plan.stored)) | {
        "write_weights": len(plan.panels)
    }
    assert {name: names.count(name) for name in names} == expected
    return plan.stored[-1].last / cols


SIZES = {
    "fewer rows than features": (24, 700, 264, 4000, 0.5),
    "more rows than features": (300, 900, 264, 40_000, 0.1),
    "as little memory as there may be": (40, 700, 272, 400, 0.5),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "peaked"), [(name, 8.0) for name in SIZES] + [(next(iter(SIZES)), 0.0)])
def test_heads(name, peaked, seed, used):
    rows, cols, features, limit, least = SIZES[name]
    x, w, target = vectors(rows, cols, features, peaked)
    bias = torch.randn(cols).bfloat16()
    got = pulled(lambda x, w: head.total(x, w, target, bias), (x, w), limit)
    assert least < stored_share(used) < 1
    compared(got, plain_head(target, bias), (x, w))


def test_labels_that_are_shared_ignored_or_nowhere(seed, used):
    x, w, target = vectors(40, 700, 264)
    target[:9], target[9], target[10], target[11:14] = 7, -100, 700, 699
    bias = torch.zeros(700).bfloat16()
    got = pulled(lambda x, w: head.total(x, w, target, bias), (x, w), 4000)
    assert stored_share(used)
    seen = (target >= 0) & (target < 700)

    def plain(x, w):
        s = (x @ w.mT).to(torch.promote_types(x.dtype, torch.float32)) * 0.7
        picked = s.gather(1, target.clamp(0, 699)[:, None])[:, 0]
        return (s.logsumexp(1) - torch.where(seen, picked, 0.0)).sum()

    compared(got, plain, (x, w))


def test_the_label_is_the_row(seed, used):
    x, w, _ = vectors(40, 700, 264)
    got = pulled(own_index.total, (x, w), 4000)
    assert stored_share(used)
    compared(got, lambda x, w: F.cross_entropy((x @ w.mT).double(), torch.arange(40), reduction="sum"), (x, w))


@mr.op
def shared(x: mr.Row["d"], w: mr.Col["d"], target: mr.Row, share: mr.Row):
    s = x @ w
    return (mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == target, s, 0.0))) * share


def test_a_weight_of_each_row(seed, used):
    x, w, target = vectors(40, 700, 264)
    share = (torch.arange(40) / 32).bfloat16()  # of the first row nothing counts
    got = pulled(lambda x, w: shared.total(x, w, target, share), (x, w), 4000)
    assert stored_share(used)
    wide = lambda x, w: (x @ w.mT).to(torch.promote_types(x.dtype, torch.float32))
    compared(got, lambda x, w: (F.cross_entropy(wide(x, w), target, reduction="none") * share).sum(), (x, w))


def test_gradients_of_columns_alone(seed, used):
    x, w, target = vectors(40, 700, 264)
    bias = torch.randn(700).bfloat16()
    got = pulled(lambda w: head.total(x, w, target, bias), (w,), 4000)
    assert stored_share(used)
    compared(got, lambda w: plain_head(target, bias)(x.to(w.dtype), w), (w,))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["rising", "late", "nan", "inf"])
def test_guesses_that_were_no_good(name, seed, used, monkeypatch):
    """Rows are written again, in all panels: the same as where the vendor's product goes through the row kernel."""
    x, w, target = vectors(20, 720, 264)
    bias = FAR[name].repeat_interleave(9).bfloat16()
    function = lambda x, w: head.total(x, w, target, bias)
    got = pulled(function, (x, w), 4000)
    assert stored_share(used)
    internals.pretend_device(monkeypatch, epilogue=False)
    internals.set_panel_sizes(monkeypatch, MIN_ROWS=4)
    expected = pulled(function, (x, w), "10MB")
    alike(got, expected)


def test_a_second_backward(seed, used):
    """What was stored is given away once; a second backward recomputes the pairs."""
    x, w, target = vectors(24, 700, 264)
    given = [x.requires_grad_(), w.requires_grad_()]
    with mr.use(engine="triton"), mr.budget(4000):
        value = head.total(*given, target, torch.zeros(700).bfloat16())
        one, other = (torch.autograd.grad(value * 0.3, given, retain_graph=True) for _ in range(2))
    assert used[1][0].in_place.stored and not used[1][-1].in_place.stored
    for a, b in zip(one, other, strict=True):
        assert torch.linalg.vector_norm(a.float() - b.float()) <= 0.006 * torch.linalg.vector_norm(a.float())


@mr.op
def labelled(x: mr.Row["d"], w: mr.Col["d"], target: mr.Row):
    s = x @ w
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == target, s, 0.0))


@mr.op
def smooth(x: mr.Row["d"], w: mr.Col["d"], target: mr.Row):
    s = x @ w
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == target, s, 0.0)) - 0.1 * mr.sum(s)


class Begun(Exception):
    """A walk whose panels are known: nothing more is wanted of it."""


@pytest.mark.parametrize(("op", "rows"), [(labelled, 700), (smooth, 24), (labelled, 24)])
def test_where_it_is_of_no_use(op, rows, seed, used, monkeypatch):
    """Columns whose gradients are small beside their pairs, and weights that do not come apart."""

    def begun(begin, step, panel):
        raise Begun(panel)

    x, w, target = vectors(rows, 700, 264)
    internals.replace_panel_begin(monkeypatch, begun)
    with pytest.raises(Begun) as found:
        pulled(lambda x, w: op.total(x, w, target), (x, w), 40_000 if rows == 700 else 4000)
    panel = found.value.args[0]
    assert bool(panel.in_place and panel.in_place.stored) == (op is labelled and rows == 24)
