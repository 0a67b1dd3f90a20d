"""GEMMs whose epilogue writes softmax weights, in the interpreter: with a known maximum, with a guessed one, and with
a guess that was too low."""

import math

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce.engines.panel import split_into_loops
from monoidreduce.engines.triton import KernelPlan
from monoidreduce.engines.triton.launch import driver
from monoidreduce.engines.triton.panel import row_factor
from monoidreduce.engines.triton.panel.row_factor import RowCorrections
from monoidreduce.engines.triton.panel.row_kernel import fuse_stages, group_stages
from monoidreduce.plan import panel_layout as panels
from monoidreduce.program.constructors import ZERO, apply
from monoidreduce.program.expression import index, node, topological
from monoidreduce.program.gradient import compile_loss_and_gradient
from monoidreduce.runtime.gradient_in_forward import find_inputs
from tests.support import internals

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::monoidreduce.errors.FallbackWarning")

SMALL = {
    "write_weights": KernelPlan(16, 32, 4, 1),
    "recompute_rows": KernelPlan(16, 16, 4, 1),
    "guess_maxima": KernelPlan(16, 16, 4, 1),
    "gather_label_logits": KernelPlan(1, 64, 4, 1),
    "multiply_labels": KernelPlan(16, 16, 4, 1),
    "weigh_labels": KernelPlan(16, 16, 4, 1),
    "write_guessed": KernelPlan(16, 32, 4, 1),
    "sum_guessed": KernelPlan(16, 32, 4, 1),
    "finish_rows": KernelPlan(16, 16, 4, 1),
}


@pytest.fixture(autouse=True)
def used(monkeypatch, tmp_path_factory):
    """These products stand in for the vendor's, in small tiles; the kernels that were launched."""
    internals.use_epilogue_plans(monkeypatch, SMALL)
    internals.set_panel_sizes(monkeypatch, MIN_ROWS=4, MULTIPLE=4)
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path_factory.getbasetemp() / "kernels"))
    return internals.watch_epilogue_kernels(monkeypatch)


@mr.op
def head(x: mr.Row["d"], w: mr.Col["d"], target: mr.Row, bias: mr.Col):
    s = x @ w * 0.7 + bias
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == target, s, 0.0))


@mr.op
def own_index(x: mr.Row["d"], y: mr.Col["d"]):
    s = x @ y
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == mr.row_index, s, 0.0))


def vectors(rows, cols, features, peaked=0.0):
    w = torch.randn(cols, features).bfloat16()
    x = torch.randn(rows, features) / features**0.5
    target = torch.randint(cols, (rows,))
    return (x + w[target].float() * (peaked / features)).bfloat16(), w, target


def pulled(function, args, limit):
    given = [a.detach().requires_grad_() for a in args]
    with mr.use(engine="triton"), mr.budget(limit):
        value = function(*given)
        return [value.detach(), *torch.autograd.grad(value * 0.3, given)]


def compared(got, plain, args, factor=2.5, loss=2e-5):
    """Gradients have at most so many times the error of plain torch. (The interpreter cuts digits, a GPU rounds.)"""
    found = []
    for kind in (torch.float64, torch.bfloat16):
        given = [a.detach().to(kind).requires_grad_() for a in args]
        value = plain(*given)
        found.append([value.detach(), *torch.autograd.grad(value * 0.3, given)])
    for own, exact, naive in zip(got[1:], found[0][1:], found[1][1:], strict=True):
        error, theirs = (torch.linalg.vector_norm(g.double() - exact) for g in (own, naive))
        assert error <= factor * theirs + 1e-9 * torch.linalg.vector_norm(exact)
    assert abs(got[0].double() - found[0][0]) <= loss * found[0][0].abs() + 1e-4


def alike(got, expected):
    """A loss and its gradients, as 16 bits may differ; NaN where they are."""
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-3, equal_nan=True)
    for own, other in zip(got[1:], expected[1:], strict=True):
        assert torch.equal(own.isnan(), other.isnan())
        size = other.float().nan_to_num().abs().max()
        torch.testing.assert_close(own.float(), other.float(), rtol=0.02, atol=0.01 * float(size), equal_nan=True)


def plain_head(target, bias):
    def loss(x, w):
        s = (x @ w.mT).to(torch.promote_types(x.dtype, torch.float32)) * 0.7 + bias
        return F.cross_entropy(s, target, reduction="sum")

    return loss


GUESSED = ["guess_maxima", "write_guessed", "gather_label_logits", "finish_rows", "recompute_rows"]


def test_a_first_panel_is_looked_at_and_nothing_is_left_of_it(seed, used, monkeypatch):
    x, w, target = vectors(40, 59, 272)
    bias = torch.randn(59).bfloat16()
    loss = lambda x, w: head.total(x, w, target, bias)
    limit = 20 * 1024  # several panels
    expected = pulled(loss, (x, w), limit)
    panels = len(used) // len(GUESSED)
    assert panels > 1
    used.clear()
    added, add = [], RowCorrections.add_label_terms
    internals.compile_in_parallel(monkeypatch)
    monkeypatch.setattr(
        RowCorrections,
        "add_label_terms",
        lambda *given: added.append(driver._collected.get() is not None) or add(*given),
    )
    found = pulled(loss, (x, w), limit)
    assert used == GUESSED * (panels + 1)
    assert added == [True] + [False] * panels
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    used.clear()
    pulled(loss, (x, w), limit)
    assert used == GUESSED * panels


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("rows", "cols", "features"), [(1, 59, 264), (33, 70, 264), (20, 64, 300)])
@pytest.mark.parametrize("peaked", [0.0, 8.0])
def test_weights_measured_from_a_guess(rows, cols, features, peaked, seed, used):
    x, w, target = vectors(rows, cols, features, peaked)
    bias = torch.randn(cols).bfloat16()
    got = pulled(lambda x, w: head.total(x, w, target, bias), (x, w), "10MB")
    assert used == GUESSED
    compared(got, plain_head(target, bias), (x, w))


def test_many_panels_and_labels_that_are_shared_or_ignored(seed, used):
    x, w, target = vectors(40, 70, 264)
    target[:9], target[9], target[10], bias = 7, -100, 70, torch.zeros(70).bfloat16()
    row = 70 * 2 + 32 + 264 * 2
    got = pulled(lambda x, w: head.total(x, w, target, bias), (x, w), row * 12)
    assert used == GUESSED * 4
    seen = (target >= 0) & (target < 70)

    def plain(x, w):
        s = (x @ w.mT).to(torch.promote_types(x.dtype, torch.float32)) * 0.7
        picked = s.gather(1, target.clamp(0, 69)[:, None])[:, 0]
        return (s.logsumexp(1) - torch.where(seen, picked, 0.0)).sum()

    compared(got, plain, (x, w), factor=3.0)


def test_the_label_is_the_row(seed, used):
    x, w, _ = vectors(40, 40, 264)
    got = pulled(lambda x, w: own_index.total(x, w), (x, w), "10MB")
    assert used == GUESSED
    compared(got, lambda x, w: F.cross_entropy((x @ w.mT).double(), torch.arange(40), reduction="sum"), (x, w))


def test_labels_are_added_last(seed, used):
    """However many panels there are, what outweighs the rest of a column's sum is rounded once."""
    x, w, _ = vectors(120, 120, 264)
    each = 120 * 2 + 32 + 264 * 2
    whole, cut = (pulled(own_index.total, (x, w), limit) for limit in ("10MB", each * 20))
    assert used == GUESSED * (1 + 6)
    truth = torch.autograd.functional.jacobian(
        lambda w: F.cross_entropy(x.double() @ w.mT, torch.arange(120), reduction="sum") * 0.3, w.double()
    )
    errors = [torch.linalg.vector_norm(found[2].double() - truth) for found in (whole, cut)]
    assert errors[1] <= 1.1 * errors[0], errors


INF, NAN = math.inf, math.nan
STEPS = torch.arange(80) // 20
FAR = {
    "rising": STEPS * 500.0,
    "falling": STEPS * -500.0,
    "late": torch.where(STEPS == 0, -INF, -300.0),
    "alone": torch.where(STEPS == 3, 2e4, -INF),
    "nothing": torch.full((80,), -INF),
    "nan": torch.where(STEPS == 2, NAN, 1.0),
    "inf": torch.where(STEPS == 2, INF, 1.0),
    "low tiles": torch.where(STEPS == 0, 100.0, -20.0),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FAR)
def test_guesses_that_were_no_good(name, seed, used, monkeypatch):
    """The same as where the vendor's product is swept: rows are written again, totals never depended on the guess."""
    x, w, target = vectors(20, 80, 264)
    bias = FAR[name].bfloat16()
    function = lambda x, w: head.total(x, w, target, bias)
    got = pulled(function, (x, w), "10MB")
    assert used == GUESSED
    internals.pretend_device(monkeypatch, epilogue=False)
    expected = pulled(function, (x, w), "10MB")
    alike(got, expected)


def test_known_weights_in_a_few_bytes(seed, used):
    x, w, target = vectors(20, 500, 264)
    bias = torch.randn(500).bfloat16()
    shares = torch.arange(20) / 10
    got = pulled(lambda x, w: (head(x, w, target, bias) * shares).sum(), (x, w), 4000)
    assert used and set(used) == {"write_weights"}

    def plain(x, w):
        s = (x @ w.mT).to(torch.promote_types(x.dtype, torch.float32)) * 0.7 + bias
        return (F.cross_entropy(s, target, reduction="none") * shares).sum()

    compared(got, plain, (x, w), factor=4.0)


@pytest.fixture
def recomputed(monkeypatch):
    """No rows are few enough to keep their pairs."""
    internals.set_panel_sizes(monkeypatch, MIN_ROWS=10**6)


def weighed(x, w, target, bias, limit):
    shares = torch.arange(len(x)) / 10
    got = pulled(lambda x, w: (head(x, w, target, bias) * shares).sum(), (x, w), limit)

    def plain(x, w):
        s = (x @ w.mT).to(torch.promote_types(x.dtype, torch.float32)) * 0.7 + bias
        return (F.cross_entropy(s, target, reduction="none", ignore_index=-100) * shares).sum()

    return got, plain


@pytest.mark.parametrize("peaked", [0.0, 8.0])
def test_known_labels_by_themselves(peaked, seed, used, recomputed):
    """Panels of all rows, in the memory of column gradients: labels are weighed once, and left out of the pairs."""
    x, w, target = vectors(24, 500, 264, peaked)
    target[:5] = 7
    got, plain = weighed(x, w, target, torch.randn(500).bfloat16(), "20KB")
    assert used[0] == "weigh_labels" and used.count("weigh_labels") == 1 and used.count("write_weights") > 1
    compared(got, plain, (x, w))


def test_known_labels_that_are_ignored_or_nowhere(seed, used, recomputed):
    x, w, target = vectors(24, 500, 264)
    target[:5], target[5:9], shares = -100, 500, torch.arange(24) / 10
    bias = torch.zeros(500).bfloat16()
    got = pulled(lambda x, w: (head(x, w, target, bias) * shares).sum(), (x, w), "20KB")
    assert used.count("weigh_labels") == 1
    seen = (target >= 0) & (target < 500)

    def plain(x, w):
        s = (x @ w.mT).to(torch.promote_types(x.dtype, torch.float32)) * 0.7
        picked = s.gather(1, target.clamp(0, 499)[:, None])[:, 0]
        return ((s.logsumexp(1) - torch.where(seen, picked, 0.0)) * shares).sum()

    compared(got, plain, (x, w))


BLOCKS = {
    "one panel high": (96, 80, [(40, 40, 32), (80, 40, 24), (96, 16, 80)]),
    "two panels, then one": (96, 96, [(32, 16, 16), (64, 32, 40), (96, 32, 40)]),
    "three panels, the last of them shorter": (103, 61, [(31, 12, 19), (60, 29, 24), (103, 43, 61)]),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BLOCKS)
def test_known_labels_of_blocks_of_rows(name, seed, used, recomputed, monkeypatch):
    """What outweighs the rest is rounded once however many blocks there are, and the rest once a block."""
    rows, cols, plan = BLOCKS[name]
    firsts = [0, *(last for last, _, _ in plan)]
    found = tuple(panels.RowBlock(first, *own) for first, own in zip(firsts, plan, strict=False))
    given = panels.PanelLayout(max(b.rows for b in found), min(b.cols for b in found), outer="rows", blocks=found)
    internals.replace_row_blocks(monkeypatch, lambda choose, *how: given)
    x, w, _ = vectors(rows, cols, 264)
    loss = lambda x, w: own_index(x, w).sum()
    whole = pulled(loss, (x, w), "10MB")
    used.clear()
    cut = pulled(loss, (x, w), "6KB")
    met = [-(-(b.last - b.first) // b.rows) * -(-cols // b.cols) for b in found]
    assert used.count("weigh_labels") == len(found) and used.count("write_weights") == sum(met)
    exact = [v.double().requires_grad_() for v in (x, w)]
    s = exact[0] @ exact[1].mT
    truth = torch.autograd.grad((s.logsumexp(1).sum() - s.diagonal().sum()) * 0.3, exact)
    for k, g in enumerate(truth, 1):
        errors = [torch.linalg.vector_norm(found[k].double() - g) for found in (whole, cut)]
        assert errors[1] <= 1.5 * errors[0], errors


def test_what_is_taken_apart():
    """A softmax's weight and a label; not two kinds of weights, nor a label's weight that varies with its pair."""
    x, w, t, b = (
        torch.zeros(8, 300).bfloat16(),
        torch.zeros(9, 300).bfloat16(),
        torch.zeros(8).long(),
        torch.zeros(9).bfloat16(),
    )

    @mr.op
    def smooth(x: mr.Row["d"], w: mr.Col["d"], target: mr.Row):
        s = x @ w
        return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == target, s, 0.0)) - 0.1 * mr.sum(s)

    @mr.op
    def capped(x: mr.Row["d"], w: mr.Col["d"], target: mr.Row):
        s = torch.tanh(x @ w)
        return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == target, s, 0.0))

    def found(op, *args):
        outputs = op._prepare(args, {})[0].outputs
        inputs = find_inputs(outputs)
        (loop,) = split_into_loops(compile_loss_and_gradient(outputs, (inputs["x"], inputs["w"])).program)
        return row_factor.split_row_factor(fuse_stages(loop, group_stages(loop)[0], False))

    apart = found(head, x, w, t, b)
    assert apart is not None and apart.label_weight is not None and not row_factor.has_distinct_labels(apart.label)
    assert not apart.factor.cols and apart.pair_weight.op != "const"
    assert found(smooth, x, w, t) is None
    assert found(capped, x, w, t) is None


def test_a_weight_without_its_own_column():
    """One column a row, whatever is done to what stands there; not two, nor none."""
    col, here = index("col"), [node("leaf", (), (n,), rows=True, cols=False, feature=None, dtype="int") for n in "ab"]
    number = node("leaf", (), ("x",), rows=True, cols=False, feature=None, dtype="float")
    s = node("leaf", (), ("s",), rows=True, cols=True, feature=None, dtype="float")
    hits = [apply("where", apply("eq", col, t), number, ZERO) for t in here]
    weight = apply("mul", apply("sub", apply("exp", s), hits[0]), number)
    others, own = row_factor.split_label_column(weight)
    assert own.weight is weight and own.label is here[0]
    assert others.op == "where" and hits[0] not in topological([others])
    assert (
        row_factor.split_label_column(apply("exp", s)) is None
        and row_factor.split_label_column(apply("sub", weight, hits[1])) is None
    )
