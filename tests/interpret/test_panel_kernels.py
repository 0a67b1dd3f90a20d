"""Panels done by generated kernels, in the interpreter: every layer of the zoo, sums, and every way to cut pairs."""

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce.engines import triton
from monoidreduce.engines.common.evaluate import Sizes
from monoidreduce.engines.panel import split_into_loops
from monoidreduce.engines.triton import KernelPlan, KernelStep
from monoidreduce.engines.triton.kernels import elementwise
from monoidreduce.engines.triton.panel.arena import BorrowedTotals
from monoidreduce.errors import EngineError, FallbackWarning
from monoidreduce.plan import panel_layout
from monoidreduce.program.gradient import compile_loss_and_gradient
from monoidreduce.runtime.gradient_in_forward import find_inputs
from tests.support import internals
from tests.support.comparison import Result, assert_error_rule, cast, run
from tests.support.layers import BY_NAME, ZOO

# the interpreter computes both sides of a where, and NumPy tells of each infinity met there
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::monoidreduce.errors.FallbackWarning")

PLANS = {"cols": KernelPlan(8, 16, 4, 1), "rows": KernelPlan(32, 16, 4, 1)}


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path_factory):
    internals.set_panel_sizes(monkeypatch, NARROW=0, MIN_ROWS=4, MULTIPLE=4, MIN_SIDE=4)
    internals.use_row_kernel_plans(monkeypatch, PLANS)
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path_factory.getbasetemp() / "kernels"))


@pytest.fixture
def used(monkeypatch):
    """The panels that kernels were run on."""
    return internals.watch_panels(monkeypatch)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("layer", [pytest.param(layer, id=layer.name) for layer in ZOO])
def test_every_layer_in_panels(layer, seed):
    args = layer.args(5, 21, seed, torch.float32)
    with mr.use(engine="panel"), mr.budget(60_000):
        got = run(layer.op, args)
    trial = (got, run(layer.dense, args), run(layer.dense, cast(args, torch.float64)))
    # the interpreter's powers and logarithms are NumPy's in float32: several units off in the last place on some CPUs
    assert_error_rule([trial], factor=4.0, ulps=16.0, terms=1.0)


@mr.op
def loss(x: mr.Row["d"], w: mr.Col["d"], target: mr.Row, bias: mr.Col):
    s = x @ w + bias
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == target, s, 0.0))


def pulled(function, args, target):
    given = [a.detach().requires_grad_() for a in args]
    value = function(*given, target)
    grads = torch.autograd.grad(value * 0.3, given)
    return Result({"value": value.detach()}, {f"gradient {k}": g for k, g in enumerate(grads)})


def plain(x, w, bias, target):
    return F.cross_entropy((x @ w.mT + bias).to(torch.promote_types(x.dtype, torch.float32)), target, reduction="sum")


SIZES = {  # budget: rows and columns of the panels of forward and gradient, or of both at once
    "float32": {300: [(2, 37), (14, 4)], 900: [(4, 37)], 10**6: [(14, 37)]},
    "float16": {300: [(2, 37), (4, 4), (14, 4)], 700: [(4, 37), (14, 4)], 10**6: [(14, 37)]},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dtype", "limit"), [(d, b) for d, budgets in SIZES.items() for b in budgets])
def test_every_way_to_cut_the_pairs(dtype, limit, used, seed):
    args = [torch.randn(s, dtype=torch.float64).to(getattr(torch, dtype)) for s in ((14, 5), (37, 5), (37,))]
    target = torch.randint(37, (14,))
    with mr.use(engine="triton"), mr.budget(limit):
        got = pulled(lambda x, w, b, t: loss.total(x, w, t, b), args, target)
    truth = pulled(plain, cast(args, torch.float64), target)
    assert_error_rule([(got, pulled(plain, args, target), truth)], factor=3.0)
    assert [(p.rows, p.cols) for p in used] == SIZES[dtype][limit]


@mr.op
def counted_loss(x: mr.Row["d"], w: mr.Col["d"], target: mr.Row, ignored: int):
    s = x @ w
    value = mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == target, s, 0.0))
    return torch.where((target == ignored) | (target < 0), 0.0, value * 0.5)


def test_numbers_of_rows_are_computed_once_for_all_panels(used, monkeypatch, seed):
    """What a gradient multiplies rows by, where it waits for no panel: one kernel, however many panels there are."""
    launched = []
    original = elementwise.ElementwiseLaunch.__call__
    monkeypatch.setattr(
        elementwise.ElementwiseLaunch, "__call__", lambda self, leaves: launched.append(1) or original(self, leaves)
    )
    x, w = (torch.randn(s, 5) for s in (14, 37))
    target = torch.randint(37, (14,))
    target[3:6] = 36
    with mr.use(engine="triton"), mr.budget(900):
        got = pulled(lambda x, w, t: counted_loss.total(x, w, t, 36), [x, w], target)

    def plain_loss(x, w, target):
        return 0.5 * F.cross_entropy(x @ w.mT, target, ignore_index=36, reduction="sum")

    truth = pulled(plain_loss, [x.double(), w.double()], target)
    assert_error_rule([(got, pulled(plain_loss, [x, w], target), truth)], factor=3.0)
    assert [p.count(14) for p in used] == [4] and len(launched) == 1


def test_column_totals_are_kept_in_float32_where_panels_are_many(monkeypatch):
    """bfloat16 totals of few panels are kept as they are; of more they wait in float32, where there is room."""
    internals.set_panel_sizes(monkeypatch, MAX_ROUNDINGS=2)
    args = (torch.zeros(40, 2), torch.zeros(60, 2), torch.zeros(40).long(), torch.zeros(60))
    outputs = loss._prepare(args, {})[0].outputs
    inputs = find_inputs(outputs)
    (loop,) = split_into_loops(compile_loss_and_gradient(outputs, (inputs["x"], inputs["w"])).program)
    sizes = Sizes(40, 60, (), {"d": 2}, torch.device("cpu"), torch.float32)
    step = KernelStep(loop, sizes, {torch.bfloat16})
    assert step.choose_layout(20 * 60 * 2) == panel_layout.PanelLayout(20, 60)
    assert step.choose_layout(8 * 60 * 2 + 60 * 2 * 4) == panel_layout.PanelLayout(8, 60, float32_totals=True)
    assert step.choose_layout(3 * 60 * 2) is None  # no room for both: the pairs are computed again instead


def test_wide_features_do_not_fall_back(seed, recwarn, used, monkeypatch):
    internals.set_panel_sizes(monkeypatch, NARROW=256)
    layer = BY_NAME["scaled_attention"]
    q, k, v = torch.randn(5, 300), torch.randn(7, 300), torch.randn(7, 4)
    with mr.use(engine="triton"):
        got = layer.op(q, k, v, 0.05)
    torch.testing.assert_close(got, torch.softmax(q @ k.T * 0.05, -1) @ v)
    assert used and not [w for w in recwarn if isinstance(w.message, mr.FallbackWarning)]


@pytest.mark.parametrize(
    ("rows", "cols", "limit", "lent", "apart"),
    [
        (14, 500, 600, 4, False),
        (14, 500, 2000, 4, True),
        (60, 600, 5000, 28, False),
        (40, 900, 6000, 20, True),
    ],
)
def test_what_is_not_written_yet_holds_the_rest(rows, cols, limit, lent, apart, used, seed):
    """bfloat16 gradients lend their memory: the panel, and the float32 totals of the row gradients."""
    args = [torch.randn(s, dtype=torch.float64).bfloat16() for s in ((rows, 30), (cols, 30), (cols,))]
    target = torch.randint(cols, (rows,))
    scale = torch.arange(rows) / rows

    def sum_of_rows(x, w, bias, target):
        return (loss(x, w, target, bias) * scale).sum()

    def plain_sum(x, w, bias, target):
        s = (x @ w.mT + bias).to(torch.promote_types(x.dtype, torch.float32))
        return (F.cross_entropy(s, target, reduction="none") * scale).sum()

    given = [a.detach().requires_grad_() for a in args]
    with mr.use(engine="panel"):
        value = sum_of_rows(*given, target)
    with mr.use(engine="panel"), mr.budget(limit):
        grads = torch.autograd.grad(value * 0.3, given)
    plan = used[-1].in_place
    assert plan is not None and (plan.lent, plan.totals is None) == (lent, apart)
    got = Result({"value": value.detach()}, {f"gradient {k}": g for k, g in enumerate(grads)})
    truth = pulled(plain_sum, cast(args, torch.float64), target)
    assert_error_rule([(got, pulled(plain_sum, args, target), truth)], factor=3.0)


def test_blocks_of_rows_where_column_gradients_are_small(used, seed):
    """The float32 totals of all row gradients do not fit, nor do column gradients lend room for them."""
    args = [torch.randn(s, dtype=torch.float64).bfloat16() for s in ((40, 4), (40, 4), (40,))]
    target = torch.randint(40, (40,))
    given = [a.detach().requires_grad_() for a in args]
    with mr.use(engine="panel"):
        value = loss(*given[:2], target, given[2]).sum()
    with mr.use(engine="panel"), mr.budget(399):
        grads = torch.autograd.grad(value * 0.3, given)
    found = used[-1].blocks
    assert 1 < len(found) <= panel_layout.PREFERRED_BLOCKS and found[-1].last == 40
    assert max(b.rows * b.cols * 2 for b in found) <= 399
    got = Result({"value": value.detach()}, {f"gradient {k}": g for k, g in enumerate(grads)})
    truth = pulled(plain, cast(args, torch.float64), target)
    assert_error_rule([(got, pulled(plain, args, target), truth)], factor=3.0)


def test_blocks_of_rows_that_lend_nothing_keep_the_budget_too(used, seed, monkeypatch):
    """Where small tiles are looked for, in whole panels, the totals of a block lie apart, and are counted."""
    made, zeros = [], BorrowedTotals.allocate
    monkeypatch.setattr(
        BorrowedTotals, "allocate", lambda own, count, lent, *how: made.append(lent) or zeros(own, count, lent, *how)
    )
    x, w = (torch.randn(40, 4).bfloat16().requires_grad_() for _ in range(2))
    with mr.use(engine="panel"), mr.skip_below(2**-40):
        value = loss(x, w, torch.randint(40, (40,)), torch.zeros(40).bfloat16()).sum()
    with mr.use(engine="panel"), mr.budget(599), mr.skip_below(2**-40):
        torch.autograd.grad(value, (x, w))
    panel = used[-1]
    assert panel.outer == "rows" and panel.rows < 40 and made and not any(made)
    assert panel.rows * (4 * 4 + 2 * panel.cols) <= 599


@mr.op
def log_total(x: mr.Row["d"], w: mr.Col["d"], bias: mr.Col):
    s = x @ w + bias
    return mr.logsumexp(s), mr.softmax_mean(s, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_maxima_far_from_the_first_tile(dtype):
    """A softmax is measured from a row's first tile (16 columns here), and again where that was no good guess."""
    inf, nan = float("inf"), float("nan")
    steps = torch.arange(40) // 10
    cases = [steps * 500.0, steps * -500.0, torch.where(steps == 0, -inf, -300.0), torch.where(steps == 3, 2e4, -inf)]
    cases += [torch.full((40,), -inf), torch.where(steps == 2, nan, 1.0), torch.where(steps == 2, inf, 1.0)]
    for bias in cases:
        x, w, bias = torch.zeros(3, 4, dtype=dtype), torch.zeros(40, 4, dtype=dtype), bias.to(dtype)
        with mr.use(engine="panel"), mr.budget("1MB"):
            total, mean = log_total(x, w, bias)
        s = bias.float().expand(3, 40)
        torch.testing.assert_close(
            total.float(), s.logsumexp(1), equal_nan=True, rtol=1e-2 if dtype.itemsize == 2 else 1e-6, atol=0
        )
        if s.isfinite().all():
            expected = (s.softmax(1) * s).sum(1)
            torch.testing.assert_close(mean.float(), expected, rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-5)


@mr.op
def two_passes(x: mr.Row["d"], w: mr.Col["d"], target: mr.Row):
    return mr.logsumexp(x @ w) - mr.sum(torch.where(mr.col_index == target, x @ w, 0.0))


@mr.op
def three_passes(x: mr.Row["d"], w: mr.Col["d"], target: mr.Row):
    log_p = x @ w - mr.logsumexp(x @ w)
    return -mr.sum(torch.exp(log_p) * log_p)


@pytest.mark.parametrize(("op", "kernels"), [(two_passes, 1), (three_passes, 2)], ids=["two passes", "three passes"])
def test_one_kernel_a_panel(op, kernels, used, seed, monkeypatch):
    """Folds, the arithmetic between them and the weights of a gradient are one kernel; a sum of vectors ends it."""
    launched = internals.watch_launches(monkeypatch, lambda call: call.kernel.name)
    args = [torch.randn(s).requires_grad_() for s in ((14, 5), (37, 5))]
    with mr.use(engine="triton"), mr.budget(4 * 37 * 4 + 37 * 5 * 4):
        value = op.total(*args, torch.arange(14))
    assert used[0].rows < 14
    assert launched == ["sweep_rows"] * (kernels * -(-14 // used[0].rows))
    got = torch.autograd.grad(value, args)
    with mr.use(engine="eager"):
        truth = torch.autograd.grad(op(*args, torch.arange(14)).sum(), args)
    for a, b in zip(got, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_panels_have_no_kernel_for_runs_in_torch_and_says_so(seed):
    layer = BY_NAME["attention_of_ones_own_monoid"]
    args = layer.make(9, 12, torch.Generator().manual_seed(seed), torch.float64)
    triton.engine._warned.clear()
    with mr.use(engine="panel"), pytest.warns(FallbackWarning, match="panels in torch run what has no kernel"):
        got = layer.op(*args)
    torch.testing.assert_close(got, layer.dense(*args))
    with mr.use(engine="panel", strict=True), pytest.raises(EngineError, match="cannot run this fold"):
        layer.op(*args)
