"""The vocabulary heads against plain torch: every pair of options, values and gradients, in float64 and by the rule.

The samples of each function come from ``tests/support/vocabulary_heads.py``: all pairs of options, sizes and layouts.
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import monoidreduce as mr
from monoidreduce import ops
from monoidreduce.ops import checks
from monoidreduce.plan import schedule
from tests.support.allocations import usage
from tests.support.comparison import Result, assert_equal, assert_error_rule, is_float, run, use_small_tiles
from tests.support.pairwise_options import pairwise
from tests.support.vocabulary_heads import FUNCTIONS, RICH, by_name, draw, split

F64 = torch.float64


def shown(sample):
    """A sample's id: what differs from the default."""
    return "-".join(f"{name}={value}" for name, value in sample.items())


SAMPLES = [
    pytest.param(name, sample, id=f"{name}-{k}")
    for name, f in FUNCTIONS.items()
    for k, sample in enumerate(f.samples())
]


def evaluate(f, sample, dtype, seed, scale=1.0) -> tuple[Result, Result, Result]:
    """Ours, plain torch's and plain torch's in float64, on the same inputs, with all gradients that torch has."""
    names, args = split(draw(f, sample, dtype, seed, scale))
    exact = [a.double() if is_float(a) else a for a in args]
    asked = [k for k, a in enumerate(args) if is_float(a) and names[k] != "class_weights"]  # of these torch has none
    forms = (f.ours, args), (f.plain, args), (f.plain, exact)
    return tuple(run(by_name(g, names), a, asked=asked) for g, a in forms)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_there_are_enough_samples(name):
    assert len(FUNCTIONS[name].samples()) >= 25


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "sample"), SAMPLES)
def test_values_and_gradients_are_those_of_plain_torch(name, sample):
    ours, plain, _ = evaluate(FUNCTIONS[name], sample, F64, seed=1)
    assert ours.values.keys() == plain.values.keys(), shown(sample)
    assert_equal(ours, plain)


def enough(sample):
    """A sample of sizes at which errors are no matter of luck: on one class plain torch is exact, on two nearly."""
    rows = (3, 17) if len(sample["rows"]) > 1 else (51,)
    return sample | {"rows": rows, "classes": max(sample["classes"], 59), "features": 16}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(("name", "sample"), SAMPLES)
def test_errors_stay_within_twice_plain_torch(name, sample, dtype):
    alone = sample.get("reduction", "none") != "none"  # one number's error is luck, a scalar's gradient is one
    draws = range(6 if dtype == torch.float32 and "tensor" in sample.values() else 3 if alone else 2)
    assert_error_rule([evaluate(FUNCTIONS[name], enough(sample), dtype, seed) for seed in draws])


RICH_SAMPLES = [pytest.param(*sample, id=name) for name, sample in RICH.items()]
SMOOTH = [p for p in RICH_SAMPLES if p.id != "linear_argmax"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "sample"), SMOOTH)
def test_derivatives_match_finite_differences(name, sample):
    names, args = split(draw(FUNCTIONS[name], sample | {"rows": (3,), "classes": 5, "features": 2}, F64, seed=4))
    args = [a.requires_grad_() if is_float(a) else a for a in args]
    call = by_name(FUNCTIONS[name].ours, names)

    def smooth(*args):
        result = call(*args)
        return tuple(r for r in (result if isinstance(result, tuple) else (result,)) if r.is_floating_point())

    assert torch.autograd.gradcheck(smooth, args, fast_mode=True)
    assert torch.autograd.gradgradcheck(smooth, args, fast_mode=True)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("scale", [0.1, 1.5], ids=["flat", "peaked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(("name", "sample"), SMOOTH)
def test_the_rule_holds_on_flat_and_on_peaked_rows(name, sample, dtype, scale):
    sample = sample | {"rows": (65,), "classes": 259, "features": 32}
    assert_error_rule([evaluate(FUNCTIONS[name], sample, dtype, seed, scale) for seed in range(5, 9)])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "sample"), RICH_SAMPLES)
def test_many_small_tiles_and_the_dense_engine_agree(name, sample, monkeypatch):
    names, args = split(draw(FUNCTIONS[name], sample | {"rows": (59,), "classes": 111}, F64, seed=6))
    call = by_name(FUNCTIONS[name].ours, names)
    whole = run(call, args)
    with mr.use(engine="reference"):
        assert_equal(run(call, args), whole)
    use_small_tiles(monkeypatch)
    assert_equal(run(call, args), whole)


@pytest.mark.parametrize("fit", [0.3, 1.0])
def test_small_losses_keep_their_digits(fit, seed):
    """Where a prediction is good, a loss is a small gap of large numbers."""
    trials = {}
    for _ in range(4):  # judged together: which CPU rounds a single draw better is a matter of luck
        w, target = torch.randn(300, 32), torch.randint(300, (128,))
        x = fit * w[target] + 0.3 * torch.randn(128, 32)
        given = 0.999 * F.one_hot(target, 300) + 0.001 / 300
        calls = {
            "linear_cross_entropy": {"x": x, "weight": w, "target": given, "reduction": "none"},
            "linear_logprobs": {"x": x, "weight": w, "target": target, "return_entropy": True},
            **{
                name: {"x": x, "weight": w, "teacher_x": 1.01 * x, "teacher_weight": w, "reduction": "none"}
                for name in ("linear_kl", "linear_jsd", "linear_cross_entropy_soft")
            },
        }
        for name, inputs in calls.items():
            names, args = split(inputs)
            exact = [a.double() if is_float(a) else a for a in args]
            ours, plain = (by_name(g, names) for g in (FUNCTIONS[name].ours, FUNCTIONS[name].plain))
            trials.setdefault(name, []).append((run(ours, args), run(plain, args), run(plain, exact)))
    for found in trials.values():
        assert_error_rule(found)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_logits_far_from_zero_keep_their_digits(smoothing, seed):
    x, w = torch.randn(64, 8), torch.randn(400, 8) * 0.3
    x[:, 0], w[:, 0] = 100.0, 10.0  # every logit is about 1000
    f = FUNCTIONS["linear_cross_entropy"]
    for target in (torch.randint(400, (64,)), torch.softmax(3 * torch.randn(64, 400), -1)):
        options = {"target": target, "label_smoothing": smoothing, "reduction": "none"}
        names, args = split({"x": x, "weight": w, **options})
        exact = [a.double() if is_float(a) else a for a in args]
        ours, plain = by_name(f.ours, names), by_name(f.plain, names)
        assert_error_rule([(run(ours, args), run(plain, args), run(plain, exact))])


# Memory and passes ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "sample"), RICH_SAMPLES)
def test_nothing_of_the_size_of_the_logits_is_allocated(name, sample):
    m = v = 2048
    inputs = draw(FUNCTIONS[name], sample | {"rows": (m,), "classes": v, "features": 4}, torch.float32, seed=7)
    held = {"target": inputs.pop("target")} if name == "linear_cross_entropy" else {}  # asks for no gradient
    names, args = split(inputs)
    used = usage(by_name(lambda **more: FUNCTIONS[name].ours(**more, **held), names), args, held=held.values())
    allowed = schedule.ELEMENTS * 8
    assert allowed < m * v * 4, "too small to tell a tile from the matrix"
    assert used.largest <= allowed, f"{used.culprit} took {used.largest:,} bytes"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_given_ids_are_gathered_in_chunks(dtype):
    m, k, d, v = 1024, 128, 64, 300
    x, w, ids = torch.randn(m, d).to(dtype), torch.randn(v, d).to(dtype), torch.randint(v, (m, k))
    used = usage(lambda x, w: ops.linear_logprobs(x, w, ids=ids).ids_log_probs, [x, w], held=[ids])
    allowed = schedule.ELEMENTS * 8
    assert allowed < m * k * d * dtype.itemsize, "too small to tell a chunk from all"
    assert used.largest <= allowed, f"{used.culprit} took {used.largest:,} bytes"


def test_given_ids_count_as_often_as_they_are_named(seed):
    x, w = torch.randn(9, 4, dtype=F64, requires_grad=True), torch.randn(7, 4, dtype=F64, requires_grad=True)
    ids = torch.tensor([3, 3, 0, -100, 6]).expand(9, 5)
    ours = ops.linear_logprobs(x, w, ids=ids)
    assert ours.log_prob is None and ours.ids_log_probs[:, 3].eq(0).all()
    plain = torch.log_softmax(x @ w.T, -1)[:, [3, 3, 0, 6]]
    found = torch.autograd.grad(ours.ids_log_probs.sin().sum(), (x, w))
    assert_close(found, torch.autograd.grad(plain.sin().sum(), (x, w)))
    assert ops.linear_logprobs(x, w, ids=ids[:, :0]).ids_log_probs.shape == (9, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("looks", [True, False], ids=["left out", "computed"])
def test_rows_that_do_not_count_may_hold_anything(looks, dtype, seed, monkeypatch):
    if not looks:  # as on a GPU and in a compiled graph: values are not read, every row is computed
        monkeypatch.setattr(checks, "can_inspect", lambda t: False)
    x, w, t = torch.randn(9, 4).to(dtype), torch.randn(7, 4).to(dtype).requires_grad_(), torch.arange(9) % 7
    mask, heat = torch.arange(9) != 4, 0.5 + torch.rand(9)
    x[4], t[4], heat[4] = math.nan, 77, 0.0
    x.requires_grad_()
    call = lambda x, w, m: ops.linear_logprobs(x, w, t, ids=t.view(9, 1), mask=m, temperature=heat, return_entropy=True)
    found = call(x, w, mask)
    floats = found.log_prob, found.entropy, found.ids_log_probs
    assert all(y.dtype == torch.float32 and y[4].eq(0).all() and y.isfinite().all() for y in floats)
    grads = torch.autograd.grad(found.ids_log_probs.sum() + found.entropy.sum(), (x, w))
    assert grads[0][4].eq(0).all() and all(g.isfinite().all() for g in grads)


def test_a_low_rank_term_of_log_probabilities(seed):
    x, w, a, b = (torch.randn(*s, dtype=F64, requires_grad=True) for s in ((9, 4), (7, 4), (9, 2), (7, 2)))
    ids, mask = torch.randint(7, (9, 3)), torch.arange(9) % 4 > 0
    ours = ops.linear_logprobs(x, w, ids=ids, mask=mask, low_rank=(a, b), return_entropy=True)
    plain = torch.log_softmax(x @ w.T + a @ b.T, -1)
    expected = plain.gather(-1, ids) * mask[:, None], -(plain.exp() * plain).sum(-1) * mask
    given = (x, w, a, b)
    for y, z in zip((ours.ids_log_probs, ours.entropy), expected, strict=True):
        found = torch.autograd.grad(y.sin().sum(), given, retain_graph=True)
        assert_close((y, *found), (z, *torch.autograd.grad(z.sin().sum(), given, retain_graph=True)))


def test_ids_masks_and_temperatures_that_do_not_fit_are_refused():
    x, w, t = torch.randn(3, 4), torch.randn(7, 4), torch.zeros(3, dtype=torch.long)
    for options, kind, text in (
        ({"ids": torch.tensor([[7], [0], [1]])}, mr.LabelError, r"label 7 at position \(0, 0\)"),
        ({"ids": t}, mr.ShapeError, r"ids has shape \(3,\)"),
        ({"ids": torch.zeros(3, 2)}, mr.DTypeError, "ids is float32"),
        ({"ids": [[1]]}, mr.ArgumentError, "ids was given"),
        ({"mask": torch.ones(3)}, mr.DTypeError, "mask is float32"),
        ({"mask": torch.ones(4, dtype=torch.bool)}, mr.ShapeError, "mask has shape"),
        ({"temperature": torch.ones(2)}, mr.ShapeError, "temperature has shape"),
        ({"temperature": t}, mr.DTypeError, "temperature is int64"),
    ):
        with pytest.raises(kind, match=text):
            ops.linear_logprobs(x, w, t, **options)
    with pytest.raises(mr.ArgumentError, match="neither target nor ids"):
        ops.linear_logprobs(x, w)


def test_the_gradient_of_given_probabilities_is_all_that_is_as_large_as_they_are():
    m = v = 2048
    x, w, p = torch.randn(m, 4), torch.randn(v, 4), torch.rand(m, v)
    used = usage(ops.linear_cross_entropy, [x, w, p])
    assert used.largest == p.numel() * 4 and used.peak < 1.8 * used.largest


@pytest.mark.parametrize(
    ("call", "visits"),
    [
        (lambda x, w, t: ops.linear_cross_entropy(x, w, t, z_loss=1e-4, label_smoothing=0.1, return_accuracy=True), 1),
        (lambda x, w, t: ops.linear_cross_entropy(x, w, torch.rand(130, 130), softcap=5.0, return_accuracy=True), 1),
        (lambda x, w, t: ops.linear_cross_entropy(x, w, torch.where(t < 65, t, -100)), 0.5),
        (lambda x, w, t: ops.linear_logprobs(x, w, t, return_argmax=True, top_k=4), 1),
        (lambda x, w, t: ops.linear_logprobs(x, w, t, ids=t.view(130, 1), return_lse=True, return_argmax=True), 1),
        (lambda x, w, t: ops.linear_logprobs(x, w, t, ids=t.view(130, 1), mask=t < 65), 0.5),
        (lambda x, w, t: ops.linear_logprobs(x, w, torch.where(t < 65, t, -100)), 0.5),
        (lambda x, w, t: ops.linear_logprobs(x, w, t, return_entropy=True), 2),
        (lambda x, w, t: ops.linear_logprobs(x.bfloat16(), w.bfloat16(), t, return_entropy=True, top_k=4), 1),
        (lambda x, w, t: ops.linear_kl(x, w, x, w), 2),
        (lambda x, w, t: ops.linear_kl(*[a.bfloat16() for a in (x, w, x, w)]), 1),
        (lambda x, w, t: ops.linear_jsd(x, w, x, w), 2),
        (lambda x, w, t: ops.linear_topk(x, w, 5, log_probs=True), 1),
        (lambda x, w, t: ops.linear_argmax(x, w), 1),
    ],
)  # fmt: skip
def test_how_often_the_pairs_are_visited(call, visits):
    x, w, t = torch.randn(130, 4), torch.randn(130, 4), torch.arange(130)
    with mr.tally() as seen:
        call(x, w, t)
    assert seen.pairs_computed == visits * 130 * 130


@pytest.mark.parametrize("who", ["student", "teacher"])
@pytest.mark.parametrize("name", ["linear_cross_entropy_soft", "linear_kl", "linear_jsd"])
def test_gradients_go_to_whom_they_are_asked_for(name, who, seed):
    x, w, y, v = (torch.randn(n, 4, dtype=F64, requires_grad=True) for n in (9, 7, 9, 7))
    both = torch.autograd.grad(getattr(ops, name)(x, w, y, v), [x, w, y, v])
    student, teacher = (x, w), (y, v)
    if who == "student":
        loss, asked, expected = getattr(ops, name)(x, w, y.detach(), v.detach()), student, both[:2]
    else:
        loss, asked, expected = getattr(ops, name)(x.detach(), w.detach(), y, v), teacher, both[2:]
    assert_close(torch.autograd.grad(loss, asked), expected)


# Each function's own -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has it from 2.13 on")
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("rows", [(), (59,)], ids=str)
def test_a_call_of_torch_by_position_is_a_call_of_ours(given, rows, seed):
    x, w = torch.randn(*rows, 7, dtype=F64, requires_grad=True), torch.randn(11, 7, dtype=F64, requires_grad=True)
    target = torch.rand(*rows, 11, dtype=F64) if given else torch.randint(11, rows)
    b, c = torch.randn(11, dtype=F64), torch.rand(11, dtype=F64)
    for theirs, ours in (
        ({}, {}),
        ({"linear_bias": b, "weight": c}, {"bias": b, "class_weights": c}),
        ({"weight": c, "label_smoothing": 0.2}, {"class_weights": c, "label_smoothing": 0.2}),
        ({"weight": c, "reduction": "sum"}, {"class_weights": c, "reduction": "sum"}),
        ({"ignore_index": None, "reduction": "none"}, {"ignore_index": None, "reduction": "none"}),
    ):  # fmt: skip
        expected, got = F.linear_cross_entropy(x, w, target, **theirs), ops.linear_cross_entropy(x, w, target, **ours)
        assert_close(got, expected)
        assert_close(torch.autograd.grad(got.sum(), [x, w]), torch.autograd.grad(expected.sum(), [x, w]))


def test_the_mean_with_class_weights_and_smoothing_is_torchs(seed):
    x, w, c = (torch.randn(*s, dtype=F64) for s in ((40, 5), (6, 5), (6,)))
    target = torch.randint(6, (40,))
    target[::4] = 2
    for smoothing, ignore in itertools.product((0.0, 0.3, 1.0), (-100, 2)):
        options = {"label_smoothing": smoothing, "ignore_index": ignore}
        expected = F.cross_entropy(x @ w.T, target, weight=c.abs(), **options)
        assert_close(ops.linear_cross_entropy(x, w, target, class_weights=c.abs(), **options), expected)


def test_token_weights_of_zero_and_one_are_a_mask(seed):
    x, w, target = torch.randn(4, 9, 5), torch.randn(6, 5), torch.randint(6, (4, 9))
    mask = torch.rand(4, 9) < 0.5
    expected = F.cross_entropy(x[mask] @ w.T, target[mask])
    for kind in (torch.float32, torch.bool, torch.int64):
        assert_close(ops.linear_cross_entropy(x, w, target, token_weights=mask.to(kind)), expected)


def test_a_shift_predicts_the_next_token(seed):
    x, w, tokens = torch.randn(2, 9, 5), torch.randn(6, 5), torch.randint(6, (2, 9))
    expected = F.cross_entropy((x @ w.T)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert_close(ops.linear_cross_entropy(x, w, tokens, shift=1), expected)
    assert_close(ops.linear_cross_entropy(x, w, tokens, shift=True), expected)
    assert ops.linear_cross_entropy(x, w, tokens, shift=4, reduction="none").shape == (2, 5)
    assert ops.linear_cross_entropy(x, w, tokens, shift=12, reduction="none").shape == (2, 0)
    tokens[1, 3] = 6
    with pytest.raises(mr.LabelError, match=r"label 6 at position \(1, 3\)"):  # where the user gave it
        ops.linear_cross_entropy(x, w, tokens, shift=2)


def test_losses_of_16_bits_are_float32(seed):
    x, w = torch.randn(5, 4, dtype=torch.bfloat16), torch.randn(7, 4, dtype=torch.bfloat16)
    t, p = torch.randint(7, (5,)), torch.rand(5, 7).bfloat16()
    weights = torch.rand(5).bfloat16()
    for target in (t, p):
        found = ops.linear_cross_entropy(x, w, target, token_weights=weights, return_lse=True, return_accuracy=True)
        assert all(value.dtype == torch.float32 for value in found)
    for loss in (ops.linear_kl, ops.linear_jsd, ops.linear_cross_entropy_soft):
        assert loss(x, w, x, w, token_weights=weights).dtype == torch.float32
    found = ops.linear_logprobs(x, w, t, return_entropy=True, return_argmax=True)
    assert [r.dtype for r in found[:3]] == [torch.float32, torch.float32, torch.int64]


def test_divergences_of_a_head_from_itself_are_nothing(seed):
    x, w = torch.randn(9, 4, dtype=F64, requires_grad=True), torch.randn(7, 4, dtype=F64, requires_grad=True)
    for loss in (ops.linear_kl, ops.linear_jsd):
        value = loss(x, w, x.detach(), w.detach())
        assert_close(value, torch.zeros((), dtype=F64), atol=1e-14, rtol=0)
        for g in torch.autograd.grad(value, [x, w]):
            assert_close(g, torch.zeros_like(g), atol=1e-14, rtol=0)
    assert_close(ops.linear_cross_entropy_soft(x, w, x, w, reduction="none"), ops.linear_entropy(x, w))


def test_a_jsd_changes_sides_with_its_beta(seed):
    x, w, y, v = (torch.randn(n, 4, dtype=F64) for n in (9, 7, 9, 7))
    assert_close(ops.linear_jsd(x, w, y, v, beta=0.3), ops.linear_jsd(y, v, x, w, beta=0.7))
    assert_close(ops.linear_jsd(x, w, y, v, beta=0), ops.linear_kl(x, w, y, v))
    assert_close(ops.linear_jsd(x, w, y, v, beta=1), ops.linear_kl(x, w, y, v, direction="reverse"))


@pytest.mark.parametrize("name", ["linear_kl", "linear_jsd", "linear_cross_entropy_soft"])
def test_classes_that_neither_head_sees_take_no_part(name, seed):
    x, w, y, v = (torch.randn(n, 4, dtype=F64, requires_grad=True) for n in (9, 7, 9, 7))
    hidden = torch.tensor([0, 0, -math.inf, 0, 0, -math.inf, 0], dtype=F64)
    kept = hidden.isfinite()
    loss = getattr(ops, name)
    got, expected = loss(x, w, y, v, bias=hidden, teacher_bias=hidden), loss(x, w[kept], y, v[kept])
    if name == "linear_cross_entropy_soft":  # 0 · log 0 of the student is NaN, as in torch
        assert got.isnan()
        got = loss(x, w, y, v, teacher_bias=hidden, bias=torch.where(kept, 0.0, -1e4).double())
    assert_close(got, expected)
    assert_close(torch.autograd.grad(got, [x, w, y, v]), torch.autograd.grad(expected, [x, w, y, v]))


def test_old_names_are_the_new_functions():
    assert ops.cross_entropy is ops.linear_cross_entropy
    assert ops.entropy is ops.linear_entropy and ops.sample is ops.linear_sample


# The generator of samples --------------------------------------------------------------------------------------------


def test_all_allowed_pairs_are_tried():
    factors = {"a": (0, 1, 2), "b": "xy", "c": (None, 5), "d": range(4)}
    allowed = lambda s: not (s["a"] == 2 and s["c"] == 5)
    samples = pairwise(factors, allowed)
    assert all(allowed(s) for s in samples) and len(samples) < math.prod(map(len, factors.values())) / 2
    for one, other in itertools.combinations(factors, 2):
        seen = {(s[one], s[other]) for s in samples}
        expected = set(itertools.product(factors[one], factors[other]))
        assert seen == expected - ({(2, 5)} if (one, other) == ("a", "c") else set())
    assert samples == pairwise(factors, allowed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_log_probabilities_of_no_ids_are_an_empty_result(dtype):
    x, weight = torch.randn(4, 3, 8, dtype=dtype, requires_grad=True), torch.randn(5, 8, dtype=dtype)
    ids, mask = torch.zeros(4, 3, 0, dtype=torch.int64), torch.arange(12).view(4, 3) % 2 == 0
    target = torch.ones(4, 3, dtype=torch.int64)
    alone = ops.linear_logprobs(x, weight, ids=ids, mask=mask)
    both = ops.linear_logprobs(x, weight, target, ids=ids, mask=mask)
    expected = ops.linear_logprobs(x, weight, ids=target[..., None], mask=mask).ids_log_probs
    for found in (alone, both):
        assert found.ids_log_probs.shape == (4, 3, 0) and found.ids_log_probs.dtype == expected.dtype
    assert alone.log_prob is None
    assert torch.equal(both.log_prob, ops.linear_logprobs(x, weight, target, mask=mask))
    alone.ids_log_probs.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
