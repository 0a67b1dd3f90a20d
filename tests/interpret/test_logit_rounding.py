"""Logits that are not rounded to 16 bits: which folds keep them, and that every backward sees the forward's logits."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import chunks
from monoidreduce.engines import panel
from monoidreduce.engines.common import matmul
from monoidreduce.engines.triton import KernelPlan
from monoidreduce.engines.triton.panel import epilogue
from monoidreduce.errors import BudgetError
from monoidreduce.program.lower import compile_program
from monoidreduce.runtime import dispatch, torch_operator
from monoidreduce.runtime.dispatch import names_needing_gradient
from tests.support import internals
from tests.support.logit_rounding_cases import compare, head, made, ours, plain, pulled, twice

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::monoidreduce.errors.FallbackWarning")

SMALL = dict.fromkeys(epilogue.PLANS, KernelPlan(16, 32, 4, 1)) | {"gather_label_logits": KernelPlan(1, 64, 4, 1)}


@mr.op
def biased(x: mr.Row["d"], w: mr.Col["d"], target: mr.Row, bias: mr.Col, scale: float):
    s = x @ w * scale + bias
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == target, s, 0.0))


@mr.op
def two(p: mr.Row["d"], c: mr.Col["d"], q: mr.Row["e"], t: mr.Col["e"]):
    return mr.logsumexp(p @ c) - mr.softmax_mean(q @ t, p @ c)


@mr.op
def meant(x: mr.Row["d"], w: mr.Col["d"], v: mr.Col["e"]):
    return mr.softmax_mean(x @ w, v)


@mr.op
def best(x: mr.Row["d"], w: mr.Col["d"]):
    return mr.argmax(x @ w)


@pytest.fixture(autouse=True)
def hopper(monkeypatch, tmp_path_factory):
    """Generated products stand in for the vendor's, in small tiles."""
    internals.use_epilogue_plans(monkeypatch, SMALL)
    internals.forget_launches(monkeypatch)
    internals.set_panel_sizes(monkeypatch, MULTIPLE=4)
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path_factory.getbasetemp() / "kernels"))
    for one in (head, biased, two, meant, best):  # what other tests' devices planned
        one._plans.known.clear()
    dispatch._keeps_exact.cache_clear()


@pytest.fixture
def steps(monkeypatch):
    """The types of the pairs of all panels that are held."""
    return internals.watch_panels(monkeypatch, lambda step, layout: step.plan.pair_dtype)


@pytest.fixture
def elsewhere(monkeypatch):
    """What was predicted does not come true: gradients go by the vendor's products."""
    internals.use_vendor_gradients(monkeypatch)


def zeros(*shapes, asks=True):
    return [torch.zeros(s, dtype=torch.bfloat16, requires_grad=asks) for s in shapes]


def stays(op, *args):
    """Whether the folds of a call keep their products."""
    traced, bound, sizes, _ = op._prepare(args, {})
    program = dispatch.mark_exact_folds(compile_program(traced.outputs), names_needing_gradient(bound), sizes)
    return [p.fold.exact for p in program.passes]


def test_whose_products_stay_exact(monkeypatch):
    x, w, b = zeros((5, 300), (9, 300), 9)
    label = torch.zeros(5).long()
    assert stays(head, x, w, label) == stays(biased, x, w, label, b.detach(), 0.5) == [True]
    assert stays(biased, x, w, label, b, 0.5) == [False], "the gradient of a bias is folded from a panel"
    for asks in (False, True):
        assert stays(biased, x, w, label, b.detach(), torch.ones(()).requires_grad_(asks)) == [not asks]
    assert stays(two, x, w, *zeros((5, 300), (9, 300))) == [False], "two products"
    assert stays(meant, x, w, *zeros((9, 300))) == [True], "a mean of vectors, whose forward does not round its logits"
    assert stays(best, x, w) == [False], "it has no gradient, and is not rounded anyway"
    assert stays(head, *zeros((5, 64), (9, 64)), label) == [False], "narrow features have kernels without panels"
    internals.pretend_device(monkeypatch, epilogue=False)
    assert stays(head, x, w, label) == [False], "an older GPU"


def test_a_plan_is_made_anew_where_a_number_asks_for_a_gradient():
    x, w, b = zeros((5, 300), (9, 300), 9)
    label = torch.zeros(5).long()
    with mr.use(engine="triton"):
        for asks in (False, True, False, True):
            biased(x, w, label, b.detach().requires_grad_(asks), 0.5).sum().backward()
    (plans,) = biased._plans.known.values()
    assert sorted(len(plan.without_gradient) for plan in plans) == [0, 1]


def test_gradients_inherit_and_a_compiler_tells_them_apart():
    x, w = zeros((5, 300), (9, 300))
    label = torch.zeros(5).long()
    traced, bound, sizes, _ = head._prepare((x, w, label), {})
    program = compile_program(traced.outputs)
    (fold,) = (p.fold for p in dispatch.mark_exact_folds(program, names_needing_gradient(bound), sizes).passes)
    (usual,) = (p.fold for p in program.passes)
    assert fold != usual and torch_operator.name_fold(fold) != torch_operator.name_fold(usual)
    assert (
        torch_operator._find_fold(torch_operator.name_fold(fold)).exact
        and not torch_operator._find_fold(torch_operator.name_fold(usual)).exact
    )
    with mr.use(engine="triton"):
        value = head(x, w, label).sum()
        seen, run = [], panel.as_program
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(panel, "as_program", lambda fold: seen.append(fold.exact) or run(fold))
            (grad,) = torch.autograd.grad(value, x, create_graph=True)
            grad.sum().backward()
    assert len(seen) > 1 and all(seen)


@pytest.mark.parametrize("limit", ["10MB", "40KB", "20KB"])
def test_peaked_logits(limit, steps):
    given = made(24, 500, 264)
    with mr.use(engine="triton"), mr.budget(limit):
        found = pulled(ours, *given)
    x, w, target = given
    compare(found, pulled(plain, x.double(), w.double(), target), pulled(plain, *given))
    assert set(steps) == {torch.bfloat16}


LIMITS = ["10MB", "60KB", "30KB", "8KB"]  # whole rows, panels in gradients' own memory, parts of both axes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("run", ["triton", "panel"])
def test_what_was_predicted_and_did_not_come_true(limit, run, steps, elsewhere):
    """Panels are the vendor's, and hold float32: weights are those of the forward's logits."""
    given = made(24, 500, 264)
    with mr.budget(limit), mr.use(engine=run):
        found = pulled(ours, *given)
    x, w, target = given
    compare(found, pulled(plain, x.double(), w.double(), target), pulled(plain, *given))
    assert set(steps) == {torch.float32}


def test_blocks_of_rows_after_all(steps, elsewhere):
    given = made(240, 240, 264)
    with mr.use(engine="triton"), mr.budget("100KB"):
        found = pulled(ours, *given)
    x, w, target = given
    compare(found, pulled(plain, x.double(), w.double(), target), pulled(plain, *given))
    assert set(steps) == {torch.float32}


def test_a_panel_of_float32_is_counted(elsewhere):
    given = made(24, 500, 264)
    with mr.use(engine="triton"), mr.budget(500), pytest.raises(BudgetError):
        pulled(ours, *given)


@pytest.mark.parametrize("predicted", [True, False])
def test_backward_again_and_derivatives_of_gradients(predicted, steps, request):
    if not predicted:
        request.getfixturevalue("elsewhere")
    x, w, target = given = made(24, 120, 264)
    with mr.use(engine="triton"), mr.budget("1MB"):
        first = [a.detach().requires_grad_() for a in (x, w)]
        value = ours(*first, target)
        one, other = (torch.autograd.grad(value, first, retain_graph=True) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        second = twice(ours, *given)
    compare(one, pulled(plain, x.double(), w.double(), target)[1:], pulled(plain, *given)[1:])
    with mr.use(engine="eager"):  # sums of 16 bits that nearly cancel: it errs by 7 times as much as torch
        compare(second, twice(plain, x.double(), w.double(), target), twice(ours, *given), factor=3.0)
    assert torch.float32 in steps, "the second derivative has several products"


def test_sums_that_take_the_usual_road_once_more(steps):
    """The gradients in the forward are given away once; those after them are of logits that are not rounded, too."""
    x, w, target = given = made(24, 120, 264)
    with mr.use(engine="triton"), mr.budget("1MB"):
        first = [a.detach().requires_grad_() for a in (x, w)]
        value = head.total(*first, target)
        one, other = (torch.autograd.grad(value, first, retain_graph=True) for _ in range(2))
    truth, naive = pulled(_summed, x.double(), w.double(), target), pulled(_summed, *given)
    for found in (one, other):
        compare(found, truth[1:], naive[1:])


def _summed(x, w, target):
    logits = (x @ w.mT).to(torch.promote_types(x.dtype, torch.float32))
    return torch.nn.functional.cross_entropy(logits, target, reduction="sum")


def test_columns_in_chunks():
    x, w, target = made(24, 300, 264)
    with mr.use(engine="triton"), mr.budget("1MB"):
        given = x.detach().requires_grad_(), w.detach().requires_grad_()
        value = head.stream(given[0], target=target).over(chunks(given[1], size=100)).sum()
        found = torch.autograd.grad(value, given[0])
    truth, naive = (pulled(_summed, *args, target)[1:2] for args in ((x.double(), w.double()), (x, w)))
    compare(found, truth, naive)


def test_panels_in_torch_hold_float32_too(monkeypatch):
    monkeypatch.setattr(matmul, "needs_float32", lambda device, dtype: False)
    seen = internals.watch_panels(monkeypatch, lambda step, layout: step.pair_dtype, kernels=False)
    x, w, target = made(8, 40, 264)
    traced, bound, sizes, _ = head._prepare((x, w, target), {})
    for program in (
        compile_program(traced.outputs),
        dispatch.mark_exact_folds(compile_program(traced.outputs), names_needing_gradient(bound), sizes),
    ):
        (p,) = program.passes
        panel.run(p.fold, [bound[str(f.attrs[0])] for f in p.feeds], sizes)
    assert seen == [torch.bfloat16, torch.float32]


def test_texts_differ_by_the_rounding_alone(monkeypatch):
    """And kernels that were written for one are not run for the other."""
    texts = {}
    x, w, target = made(20, 40, 264)
    for marks in (True, False):
        with monkeypatch.context() as patch:
            texts[marks] = internals.watch_launches(patch, lambda call: call.kernel)
            internals.pretend_device(patch, epilogue=marks)
            head._plans.known.clear()
            with mr.use(engine="triton"), torch.no_grad():
                head(x, w, target)
    exactly, rounded = (next(k.text for k in texts[marks] if k.name == "fold_over_cols") for marks in (True, False))
    lines = [line for line in rounded.splitlines() if "as a panel would hold it" not in line]
    assert len(lines) < len(rounded.splitlines()) and lines == exactly.splitlines()
