"""The panel schedule on a CPU: every layer of the zoo, sums with their gradient taken in the forward, budgets.

Panels are made small, so that small problems walk many ragged ones.
"""

import math
import threading

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce.engines import panel
from monoidreduce.engines.eager.cpp import compiler
from monoidreduce.plan import budget, panel_layout, schedule, settings
from monoidreduce.program.gradient import compile_loss_and_gradient
from monoidreduce.runtime import gradient_in_forward
from tests.support import internals
from tests.support.allocations import usage
from tests.support.comparison import Result, assert_equal, assert_error_rule, cast, is_float, named, run
from tests.support.layers import BY_NAME, ZOO

needs_compiler = pytest.mark.skipif(
    compiler.current_compiler() is None or compiler.gemm_addresses() is None, reason="no C++ compiler, or no BLAS"
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    internals.set_panel_sizes(monkeypatch, NARROW=0, MIN_ROWS=1, MULTIPLE=4)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("rows", [3, 1000], ids=lambda n: f"{n} rows")
@pytest.mark.parametrize("layer", named(ZOO))
def test_every_layer_in_panels(layer, rows, seed):
    args = layer.args(19, 37, seed)
    with mr.use(engine="panel"), mr.budget(schedule.LEAST + rows * 37 * 8 * 2):
        got = run(layer.op, args)
    with mr.use(engine="eager"):
        assert_equal(got, run(layer.op, args))


# Sums ----------------------------------------------------------------------------------------------------------


def summable(layer):
    """Whether a layer gives one floating number per row, each row by itself."""
    args = layer.args(5, 6, 0)
    try:
        outputs = layer.op._prepare(args, {})[0].outputs
        inputs = tuple(e for n, e in gradient_in_forward.find_inputs(outputs).items() if e.dtype == "float")
        return (
            len(outputs) == 1
            and not known_batch(layer, args)
            and compile_loss_and_gradient(outputs, inputs) is not None
        )
    except mr.NoGradientError:
        return False


def known_batch(layer, args):
    return bool(layer.op._prepare(args, {})[2].batch)


SUMMABLE = [layer for layer in ZOO if layer.differentiable and summable(layer)]


def test_most_losses_are_summable():
    names = {layer.name for layer in SUMMABLE}
    assert len(names) >= 15 and {"cross_entropy", "label_smoothing", "jensen_shannon", "focal_loss"} <= names


def pulled(function, args, scale):
    given = [a.detach().requires_grad_() if is_float(a) else a for a in args]
    value = function(*given)
    floats = [a for a in given if is_float(a)]
    grads = torch.autograd.grad(value * scale, floats, allow_unused=True)
    filled = [torch.zeros_like(a) if g is None else g for a, g in zip(floats, grads, strict=True)]
    return Result({"value": value.detach()}, {f"gradient {k}": g for k, g in enumerate(filled)})


@pytest.mark.parametrize("rows", [3, 1000], ids=lambda n: f"{n} rows")
@pytest.mark.parametrize("layer", named(SUMMABLE))
def test_sums_take_their_gradient_in_the_forward(layer, rows, seed, monkeypatch):
    args = layer.args(19, 37, seed)
    taken = []
    original = panel.execute
    monkeypatch.setattr(panel, "execute", lambda *a, **k: taken.append(1) or original(*a, **k))
    with mr.budget(4 * schedule.LEAST + rows * 37 * 8 * 2):
        got = pulled(layer.op.total, args, 3.0)
    assert_equal(got, pulled(lambda *a: layer.dense(*a).sum(), args, 3.0))
    products = any(f for w in panel.split_into_loops(layer.op.program(*args)) for f in w.products)
    assert bool(taken) == products  # without a product there is nothing to keep


@pytest.mark.parametrize("name", ["cross_entropy", "jensen_shannon"])
def test_backward_again_and_derivatives_of_gradients(name, seed):
    layer = BY_NAME[name]
    args = [a.detach().requires_grad_() if is_float(a) else a for a in layer.args(7, 9, seed)]
    floats = [a for a in args if is_float(a)]
    loss, plain = layer.op.total(*args), layer.dense(*args).sum()
    assert type(loss.grad_fn).__name__ == "_LossFunctionBackward"
    for scale in (2.0, 0.0, -1.0):  # the gradients that wait are given away once
        got = torch.autograd.grad(loss * scale, floats, retain_graph=True)
        expected = torch.autograd.grad(plain * scale, floats, retain_graph=True)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    seconds = []
    for value in (layer.op.total(*args), plain):
        grads = torch.autograd.grad(value, floats, create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.square().sum() for g in grads), floats))
    for a, b in zip(*seconds, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-12)

    def function(*floats):
        rest = iter(floats)
        return layer.op.total(*(next(rest) if is_float(a) else a for a in args))

    assert torch.autograd.gradcheck(function, floats, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, floats, fast_mode=True)


@mr.op
def rows_of(x: mr.Row["d"], w: mr.Col["d"], bias: mr.Col, scale: float):
    return mr.logsumexp(x @ w * scale + bias)


def test_a_plan_of_sums_asks_who_wants_gradients_and_within_what_memory(seed, monkeypatch):
    """Calls of one kind share a plan; what they ask for differs from call to call."""
    internals.set_panel_sizes(monkeypatch, MIN_ROWS=4)
    x, w, bias = (torch.randn(s, dtype=torch.float64) for s in ((9, 5), (13, 5), (13,)))
    plain = lambda x, w, bias, scale: (x @ w.T * scale + bias).logsumexp(1).sum()
    tight = schedule.LEAST + 13 * 8 * 2
    for limit, scale in (("1MB", 0.7), (tight, 0.7), ("1MB", -0.3)):
        for wants in ((True, True, True), (True, False, False), (False, True, False)):
            given = [t.clone().requires_grad_(want) for t, want in zip((x, w, bias), wants, strict=True)]
            floats = [t for t in given if t.requires_grad]
            with mr.use(engine="panel"), mr.budget(limit):
                loss = rows_of.total(*given, scale)
                assert (type(loss.grad_fn).__name__ == "_LossFunctionBackward") == (limit != tight)
                got = [loss, *torch.autograd.grad(loss, floats)]
            expected = plain(*given, scale)
            for a, b in zip(got, [expected, *torch.autograd.grad(expected, floats)], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert len(rows_of._plans) == 1
    with torch.no_grad(), mr.use(engine="panel"):
        torch.testing.assert_close(rows_of.total(x, w, bias, 0.7), plain(x, w, bias, 0.7))


def test_reductions_of_ops_take_it(seed):
    x, w = torch.randn(9, 5, dtype=torch.float64), torch.randn(13, 5, dtype=torch.float64)
    target = torch.randint(13, (9,))
    target[3] = -100
    for reduction in ("mean", "sum"):
        got = pulled(lambda x, w, r=reduction: mr.ops.cross_entropy(x, w, target, reduction=r), (x, w), 1.0)
        assert_equal(got, pulled(lambda x, w, r=reduction: F.cross_entropy(x @ w.T, target, reduction=r), (x, w), 1.0))
    q, t = torch.randn(9, 3, dtype=torch.float64), torch.randn(13, 3, dtype=torch.float64)
    plain = lambda x, w, q, t: F.cross_entropy(x @ w.T, torch.softmax(q @ t.T, -1))
    got = pulled(mr.ops.cross_entropy_distributions, (x, w, q, t), 1.0)
    assert_equal(got, pulled(plain, (x, w, q, t), 1.0))


def head(M, D, V, peaked, dtype):
    """A linear head; peaked: the mean probability of a row's own class is about 0.6."""
    gen = torch.Generator().manual_seed(1)
    w, target = torch.randn(V, D, generator=gen), torch.randint(V, (M,), generator=gen)
    x = torch.randn(M, D, generator=gen) / math.sqrt(D)
    if peaked:
        x = x + w[target] * ((math.log(V) + 0.9 + 3 * torch.randn(M, 1, generator=gen)) / D)
    return x.to(dtype), w.to(dtype), target


@pytest.mark.sampled(3)
@pytest.mark.parametrize("peaked", [False, True], ids=["random", "peaked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
def test_precision(dtype, peaked):
    x, w, target = head(150, 300, 500, peaked, dtype)
    exact = torch.softmax(x.double() @ w.double().T, -1)
    if peaked:
        assert 0.5 < exact.gather(1, target[:, None]).mean() < 0.7
    plain = lambda x, w: F.cross_entropy((x @ w.T).float() if dtype.itemsize == 2 else x @ w.T, target)
    with mr.budget("250kB"):
        got = pulled(lambda x, w: mr.ops.cross_entropy(x, w, target), (x, w), 1.0)
    args = (x, w)
    truth = pulled(lambda x, w: F.cross_entropy(x @ w.T, target), cast(args, torch.float64), 1.0)
    assert_error_rule([(got, pulled(plain, args, 1.0), truth)])


# Budgets -------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("limit", ["300kB", "1MB", "3MB"])
def test_memory_stays_within_the_budget(limit, dtype, seed):
    x, w, target = head(400, 64, 3000, False, dtype)
    loss = lambda x, w: mr.ops.cross_entropy(x, w, target)
    with mr.budget(limit):
        used = usage(loss, (x, w))
    gradients = 4 * (x.numel() + w.numel())  # held once: an engine's totals are what is handed over
    numbers = 64 * (400 + 3000)  # a few per row and column
    assert used.peak <= budget.parse(limit) + gradients + numbers, used


@pytest.mark.parametrize("limit", ["300kB", "2MB"])
def test_the_eager_engine_stays_within_it_too(limit, seed):
    q, k, v = (torch.randn(1000, 8) for _ in range(3))
    with mr.budget(limit), mr.use(engine="eager"):
        used = usage(mr.ops.attention, (q, k, v))
    assert used.peak <= budget.parse(limit) + 12 * 4 * 1000 * 8 + 64 * 2000, used


def test_a_budget_that_cannot_be_met_says_what_could():
    x, w, target = head(10, 300, 5000, False, torch.float32)
    with mr.use(engine="panel"):
        with mr.budget("20kB"), pytest.raises(mr.BudgetError, match="at least") as caught:
            mr.ops.cross_entropy(x, w, target, reduction="none")
        least = caught.value.details["least"]
        with mr.budget(least):
            mr.ops.cross_entropy(x, w, target, reduction="none")
    with mr.use(engine="eager"), mr.budget(10), pytest.raises(mr.BudgetError, match="10B"):
        mr.ops.attention(x, x, x)


@pytest.mark.parametrize("given", [0, -1, 1.5, True, None, "", "12 parsecs", "MB", "0MB", "-3MB"])
def test_what_is_no_budget(given):
    with pytest.raises(mr.ArgumentError, match="budget"), mr.budget(given):
        pass


@pytest.mark.parametrize(
    ("given", "expected"), [(7, 7), ("64MB", 64_000_000), ("1.5 GiB", 3 * 2**29), ("8kb", 8000), ("512", 512)]
)
def test_budgets_are_read(given, expected):
    assert settings.requested_budget() is None
    with mr.budget(given):
        assert settings.requested_budget() == expected
        with mr.budget("1MB"):
            assert settings.requested_budget() == 10**6
        assert settings.requested_budget() == expected
    assert settings.requested_budget() is None


@pytest.mark.parametrize("length", [1, 59, 128, 1000, 8192])
@pytest.mark.parametrize("room", [10**4, 10**5, 10**7])
def test_parts_fit_their_room(length, room, monkeypatch):
    internals.set_panel_sizes(monkeypatch, MULTIPLE=128, MIN_ROWS=128)
    found = panel_layout.plan_whole_rows(length, 777, 4, room)
    assert found is not None and found.rows * 777 * 4 <= room
    for each in (0, 64, 1200):
        parts = panel_layout.cut_both_axes(length, 777, 4, room, each)
        assert parts is None or parts[0] * parts[1] * 4 + (parts[0] * each if parts[1] < 777 else 0) <= room


def test_a_budget_holds_in_a_backward_in_another_thread(seed, monkeypatch):
    """As torch's own thread for a GPU: no block of the caller's is open there."""
    x, w, target = head(50, 64, 300, False, torch.float32)
    x.requires_grad_()
    seen = []
    original = budget.allowed_bytes
    monkeypatch.setattr(
        budget,
        "allowed_bytes",
        lambda *a: seen.append((settings.requested_budget(), settings.now().precision)) or original(*a),
    )
    with mr.use(engine="panel", precision="tf32"), mr.budget("2MB"):
        loss = mr.ops.cross_entropy(x, w, target, reduction="none").sum()
    seen.clear()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert x.grad is not None and seen and set(seen) == {(2_000_000, "tf32")}


# Whole products on a CPU ---------------------------------------------------------------------------------------


@pytest.fixture
def whole(monkeypatch):
    """Whether each stage of a panel ran as whole products."""
    monkeypatch.setenv("MONOIDREDUCE_CPP", "always")
    found, run = [], panel.TorchStep._run_whole_sums

    def watched(*given):
        found.append(run(*given))
        return found[-1]

    monkeypatch.setattr(panel.TorchStep, "_run_whole_sums", watched)
    return found


@needs_compiler
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_a_head_are_whole_products_of_a_panel(dtype, smoothing, whole):
    x, weight, target = head(70, 300, 411, True, dtype)
    target[3] = -100
    x, weight = x.requires_grad_(), weight.requires_grad_()
    plain = lambda x, w: F.cross_entropy(x @ w.T, target, label_smoothing=smoothing)
    with mr.use(engine="panel"), mr.budget(schedule.LEAST + 16 * 411 * dtype.itemsize):
        loss = mr.ops.cross_entropy(x, weight, target, label_smoothing=smoothing)
        ours = torch.autograd.grad(loss, (x, weight))
    assert whole.count(True) > 3  # panels
    own = torch.autograd.grad(plain(x, weight), (x, weight))
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    truth = torch.autograd.grad(plain(*wide), wide)
    for a, b, t in zip(ours, own, truth, strict=True):
        assert (a - t).norm() <= 2 * (b - t).norm() + 1e-15 * t.norm()


@needs_compiler
def test_products_that_are_needed_again_are_not_written_over(whole):
    """A later stage reads them; or a condition leaves tiles out, which is worth more."""

    @mr.op
    def length(x: mr.Row["d"], y: mr.Col["d"]):
        mean = mr.sum(torch.sigmoid(x @ y) * y)
        return (mean * mean).sum()

    @mr.op
    def causal(x: mr.Row["d"], y: mr.Col["d"]):
        return mr.sum(torch.where(mr.col_index <= mr.row_index, torch.sigmoid(x @ y), 0.0) * y)

    x, y = torch.randn(50, 300) / 17, torch.randn(61, 300)
    wide = [t.double().requires_grad_() for t in (x, y)]
    truth = torch.autograd.grad((torch.sigmoid(wide[0] @ wide[1].T) @ wide[1]).square().sum(), wide)
    with mr.use(engine="panel"):
        given = [t.clone().requires_grad_() for t in (x, y)]
        found = torch.autograd.grad(length.total(*given), given)
        assert whole == [False, True]
        for a, b in zip(found, truth, strict=True):
            assert (a - b).norm() <= 1e-6 * b.norm()
        whole.clear()
        found = causal(x, y)
    assert whole == [False]
    hidden = torch.arange(61) > torch.arange(50)[:, None]
    torch.testing.assert_close(found, torch.sigmoid(x @ y.T).masked_fill(hidden, 0.0) @ y)


@needs_compiler
def test_sums_over_rows_alone_are_added_up_over_panels(monkeypatch):
    """As the gradient of a head's bias, where nothing else is trained: no panel begins them anew."""
    monkeypatch.setenv("MONOIDREDUCE_CPP", "always")
    x, weight, target = head(70, 300, 411, True, torch.float32)
    bias = torch.zeros(411, requires_grad=True)
    with mr.use(engine="panel"), mr.budget(schedule.LEAST + 16 * 411 * 4):
        (found,) = torch.autograd.grad(mr.ops.cross_entropy(x, weight, target, bias=bias), bias)
    (truth,) = torch.autograd.grad(F.cross_entropy(x.double() @ weight.double().T + bias, target), bias)
    assert (found - truth).norm() <= 1e-5 * truth.norm()


@needs_compiler
@pytest.mark.sampled(12)
@pytest.mark.parametrize("layer", named(ZOO))
def test_every_layer_in_panels_of_generated_code(layer, seed, monkeypatch):
    args = layer.args(19, 37, seed)
    with mr.use(engine="eager"):
        truth = run(layer.op, args)
    monkeypatch.setenv("MONOIDREDUCE_CPP", "always")
    with mr.use(engine="panel"), mr.budget(schedule.LEAST + 3 * 37 * 8 * 2):
        assert_equal(run(layer.op, args), truth)
