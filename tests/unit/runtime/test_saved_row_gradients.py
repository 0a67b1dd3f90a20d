"""Row gradients that the forward saves: the same numbers as without, and when they are saved."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines.common.evaluate import Sizes
from monoidreduce.program.gradient import fold_saving_row_gradients
from monoidreduce.runtime import dispatch
from tests.support import saved_row_gradient_cases as cases
from tests.support.comparison import assert_equal, assert_error_rule, cast, run


def drawn(name, dtype=torch.float64, seed=0):
    op, dense, make = cases.LOSSES[name]
    return op, dense, make(torch.Generator().manual_seed(seed), dtype)


@pytest.mark.parametrize("name", cases.LOSSES)
def test_kept_gradients_are_the_gradients(name, monkeypatch):
    op, dense, args = drawn(name)
    ordinary = run(op, args)
    met = cases.keep_always(monkeypatch)
    assert_equal(run(op, args), ordinary)
    assert any(met)
    if name != "earlier columns":  # there plain torch has NaN where a row sees nothing
        assert_equal(run(op, args), run(dense, args))


def test_a_row_that_sees_nothing_has_no_gradient(monkeypatch):
    cases.keep_always(monkeypatch)
    x, y = (torch.randn(5, 16, requires_grad=True) for _ in range(2))
    gx, gy = torch.autograd.grad(cases.earlier(x, y), (x, y), torch.ones(5))
    assert gx[0].eq(0).all() and gx[1:].ne(0).any() and gy.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["contrastive", "contrastive, confident", "labelled"])
def test_the_error_rule(name, dtype, monkeypatch):
    """Of the rows' gradients: here they see the logits as the loss saw them, even where they are large."""
    cases.keep_always(monkeypatch)
    trials = []
    for seed in range(3):
        op, dense, args = drawn(name, dtype, seed)
        trials.append(
            tuple(run(f, a, asked=[0]) for f, a in ((op, args), (dense, args), (dense, cast(args, torch.float64))))
        )
    assert_error_rule(trials, ulps=8.0)


def test_a_confident_rows_gradient_keeps_its_digits(monkeypatch):
    """p of the target is 1 - 1e-9: in float32 it is 1, and the gradient is not 0."""
    cases.keep_always(monkeypatch)
    y = torch.eye(16)
    x = (y * 8.0).requires_grad_()
    (got,) = torch.autograd.grad(cases.contrastive(x, y).sum(), x)
    exact = x.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(cases.dense_contrastive(exact, y.double()).sum(), exact)
    torch.testing.assert_close(got.double(), truth, rtol=1e-5, atol=0)


def test_second_derivatives_take_the_usual_path(monkeypatch):
    cases.keep_always(monkeypatch)
    op, _, args = drawn("contrastive")
    x, y = (a[:4, :3].clone().requires_grad_() for a in args)
    assert torch.autograd.gradcheck(op, (x, y))
    assert torch.autograd.gradgradcheck(op, (x, y))


def test_gradients_as_often_as_one_likes(monkeypatch):
    cases.keep_always(monkeypatch)
    op, _, args = drawn("labelled")
    x = args[0].clone().requires_grad_()
    out = op(x, *args[1:]).sum()
    first, again = (torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)


def test_nan_stays_in_its_row(monkeypatch):
    cases.keep_always(monkeypatch)
    op, _, args = drawn("contrastive")
    x = args[0].clone()
    x[5] = torch.nan
    (got,) = torch.autograd.grad(op(x.requires_grad_(), args[1]).sum(), x)
    assert got[5].isnan().all() and got[torch.arange(59) != 5].isfinite().all()


def _fold(op, *args):
    (one,) = op.program(*args).passes
    return one.fold


def test_what_has_no_such_form():
    x, y, v = torch.randn(5, 16), torch.randn(7, 16), torch.randn(7, 4)

    @mr.op
    def softmax(x: mr.Row["d"], y: mr.Col["d"], v: mr.Col["e"]):
        return mr.softmax_mean(x @ y, v)

    @mr.op
    def curved(x: mr.Row["d"], y: mr.Col["d"]):
        return mr.logsumexp(-mr.sqdist(x, y))

    @mr.op
    def other_way(x: mr.Row["d"], y: mr.Col["d"]):
        return mr.logsumexp(x @ y, over="rows")

    for fold in (_fold(softmax, x, y, v), _fold(curved, x, y), _fold(other_way, x, y)):
        assert fold_saving_row_gradients(fold, (True,) * len(fold.leaves)) is None
    fold = _fold(cases.contrastive, x, y)
    assert fold_saving_row_gradients(fold, tuple(e.cols for e in fold.leaves)) is None  # no row's gradient is asked
    assert fold_saving_row_gradients(fold, tuple(e.rows or e.cols for e in fold.leaves)) is not None
    assert (
        fold_saving_row_gradients(fold, (True,) * len(fold.leaves)) is None
    )  # the scale's gradient walks over the columns anyway


def test_when_it_pays(monkeypatch):
    """Where kernels run, pairs are many, features neither few nor too many, no budget is set, targets are indices."""
    monkeypatch.setattr(dispatch.settings, "kernels_run_on", lambda device: True)

    def chosen(n, d, engine="triton", op=cases.contrastive, last=3.0, **how):
        x, y = (torch.empty(n, d, device="meta", requires_grad=True) for _ in range(2))
        fold = _fold(op, torch.randn(2, d), torch.randn(2, d), *([] if isinstance(last, float) else [last]))
        sizes = Sizes(n, n, (), {"d": d}, torch.device("cpu"), torch.float32)
        with mr.use(**how):
            return dispatch.find_saving_fold(fold, [x, y, last], sizes, engine) is not None

    assert chosen(4096, 64)
    assert not chosen(4096, 64, "eager") and not chosen(4096, 64, "auto")  # no GPU
    assert not chosen(1000, 64) and not chosen(4096, 8) and not chosen(4096, 320)
    assert not chosen(4096, 64, budget="1GB")
    assert not chosen(4096, 64, op=cases.labelled, last=torch.zeros(2, dtype=torch.int64))  # targets that are data
