"""Bad inputs and faults, each tried on every vocabulary head, with the answer that a user should see.

What has tests of its own: odd sizes and layouts (test_vocabulary_heads), wrong types, devices, labels and ranks
(test_vocabulary_heads_mistakes). What an engine is asked (memory that runs out, caches, ranks) is not a head's.
"""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.testing import assert_close

import monoidreduce as mr
from monoidreduce import ops
from tests.support.comparison import assert_error_rule, run, use_small_tiles
from tests.support.vocabulary_heads import (
    plain_cross_entropy,
    plain_divergence,
    plain_entropy,
    plain_logprobs,
    plain_topk,
)

INF, NAN = math.inf, math.nan
M, V, D = 9, 23, 4


def labels(x, w):
    return torch.arange(len(x)) * 7 % max(len(w), 1)


def given(x, w):
    return torch.softmax(torch.sin(1.7 * torch.arange(len(x) * len(w))).view(len(x), len(w)), -1).to(x.dtype)


# every head as a function of x, weight and bias, one result per row; and the same in plain torch
HEADS = {
    "linear_cross_entropy": lambda x, w, b=None: ops.linear_cross_entropy(x, w, labels(x, w), bias=b, reduction="none"),
    "probabilities": lambda x, w, b=None: ops.linear_cross_entropy(x, w, given(x, w), bias=b, reduction="none"),
    "linear_logprobs": lambda x, w, b=None: ops.linear_logprobs(x, w, labels(x, w), bias=b),
    "ids": lambda x, w, b=None: ops.linear_logprobs(x, w, ids=labels(x, w).unsqueeze(-1), bias=b).ids_log_probs.squeeze(
        -1
    ),
    "linear_entropy": lambda x, w, b=None: ops.linear_entropy(x, w, bias=b),
    "linear_cross_entropy_soft": lambda x, w, b=None: ops.linear_cross_entropy_soft(
        x, w, x, w, bias=b, teacher_bias=b, reduction="none"
    ),
    "linear_kl": lambda x, w, b=None: ops.linear_kl(x, w, x / 2, w, bias=b, teacher_bias=b, reduction="none"),
    "linear_jsd": lambda x, w, b=None: ops.linear_jsd(x, w, x / 2, w, bias=b, teacher_bias=b, reduction="none"),
    "linear_sample": lambda x, w, b=None: ops.linear_sample(x, w, 3, bias=b).log_prob,
    "linear_topk": lambda x, w, b=None: ops.linear_topk(x, w, 2, bias=b).values,
    "linear_argmax": lambda x, w, b=None: ops.linear_argmax(x, w, bias=b),
}
PLAIN = {
    "linear_cross_entropy": lambda x, w: plain_cross_entropy(x, w, labels(x, w), reduction="none"),
    "probabilities": lambda x, w: plain_cross_entropy(x, w, given(x, w), reduction="none"),
    "linear_logprobs": lambda x, w: plain_logprobs(x, w, labels(x, w)),
    "ids": lambda x, w: plain_logprobs(x, w, labels(x, w)),
    "linear_entropy": plain_entropy,
    "linear_cross_entropy_soft": lambda x, w: plain_divergence("soft")(x, w, x, w, reduction="none"),
    "linear_kl": lambda x, w: plain_divergence("kl")(x, w, x / 2, w, reduction="none"),
    "linear_jsd": lambda x, w: plain_divergence("jsd")(x, w, x / 2, w, reduction="none"),
    "linear_topk": lambda x, w: plain_topk(x, w, 2).values,
}
SMOOTH = [name for name in HEADS if name != "linear_argmax"]
EACH, EACH_SMOOTH = pytest.mark.parametrize("name", HEADS), pytest.mark.parametrize("name", SMOOTH)


def leaves(m=M, v=V, d=D, dtype=torch.float32):
    return torch.randn(m, d, dtype=dtype, requires_grad=True), torch.randn(v, d, dtype=dtype, requires_grad=True)


def zero_gradients(out, inputs):
    found = torch.autograd.grad(out.sum(), inputs, allow_unused=True)
    return all(g is None or torch.equal(g, torch.zeros_like(g)) for g in found)


# 1 to 4: nothing to see


NOTHING = {  # of no classes: what a fold of nothing gives; a distribution over no classes is undefined
    "probabilities": NAN,
    "linear_entropy": 0.0,
    "linear_cross_entropy_soft": -INF,
    "linear_kl": 0.0,
    "linear_jsd": 0.0,
    "linear_sample": -INF,
    "linear_argmax": -1,
}


@pytest.mark.parametrize("name", NOTHING)
def test_no_classes(name):
    x, w = leaves(v=0)
    out = HEADS[name](x, w)
    assert_close(out, torch.full_like(out, NOTHING[name]), equal_nan=True)
    if NOTHING[name] == 0:
        assert zero_gradients(out, [x, w])


def test_no_classes_have_no_labels_and_no_best():
    x, w = leaves(v=0)
    none = torch.full((M,), -100)
    for call in (HEADS["linear_cross_entropy"], HEADS["linear_logprobs"]):
        with pytest.raises(IndexError, match="no classes"):
            call(x, w)
    with pytest.raises(ValueError, match="k = 2 of only 0"):
        HEADS["linear_topk"](x, w)
    assert ops.linear_cross_entropy(x, w, none, reduction="sum") == 0
    assert (ops.linear_cross_entropy(x, w, none, reduction="none", label_smoothing=0.1) == 0).all()


@EACH
def test_no_rows(name):
    x, w = leaves(m=0)
    out = HEADS[name](x, w)
    assert out.shape[0] == 0
    if name in SMOOTH:
        assert zero_gradients(out, [x, w])


@EACH
def test_no_features(name):
    out = HEADS[name](*leaves(d=0))
    expected = {"linear_argmax": 0.0, "linear_topk": 0.0, "linear_kl": 0.0, "linear_jsd": 0.0}
    sign = -1 if name in ("linear_logprobs", "ids", "linear_sample") else 1
    value = expected.get(name, sign * math.log(V))
    assert_close(out.float(), torch.full_like(out.float(), value), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["linear_entropy", "linear_kl", "linear_jsd", "linear_sample", "linear_argmax"])
def test_all_classes_masked(name):
    x, w = leaves()
    out = HEADS[name](x, w, torch.full((V,), -INF))
    assert_close(out, torch.full_like(out, NOTHING[name]))
    if NOTHING[name] == 0:
        assert zero_gradients(out, [x, w])


@pytest.mark.parametrize("looks", [True, False], ids=["looked at", "not looked at"])
def test_one_row_and_all_rows_ignored(looks, looking):
    looking(looks)
    x, w = leaves()
    target = labels(x, w)
    target[4] = -100
    for call in (
        lambda: ops.linear_cross_entropy(x, w, target, reduction="none"),
        lambda: ops.linear_logprobs(x, w, target),
    ):
        out = call()
        assert out[4] == 0 and out.isfinite().all()
        gx, gw = torch.autograd.grad(out.sum(), [x, w])
        assert (gx[4] == 0).all() and gx.isfinite().all() and gw.isfinite().all()
    found = ops.linear_cross_entropy(x, w, target, return_lse=True, return_accuracy=True)
    assert_close(found.lse, torch.logsumexp(x @ w.T, -1))
    target[:] = -100
    for options in ({}, {"z_loss": 0.1}, {"class_weights": torch.ones(V)}, {"token_weights": torch.ones(M)}):
        assert ops.linear_cross_entropy(x, w, target, **options).isnan()  # as torch's mean of nothing
        total = ops.linear_cross_entropy(x, w, target, reduction="sum", **options)
        assert total == 0 and zero_gradients(total, [x, w])


# 5 to 8: infinities and NaN


@EACH
def test_a_leading_block_of_masked_classes_changes_nothing(name, monkeypatch):
    if name == "probabilities":
        pytest.skip("0 · log 0 of given probabilities is NaN, as in torch")
    use_small_tiles(monkeypatch, 4, 8)
    x, w = leaves(dtype=torch.float64)
    wide, bias = torch.cat([torch.randn(32, D, dtype=torch.float64), w]), torch.zeros(32 + V, dtype=torch.float64)
    bias[:32] = -INF
    if name in ("linear_cross_entropy", "linear_logprobs"):
        function = {"linear_cross_entropy": lambda *a, **k: ops.linear_cross_entropy(*a, reduction="none", **k)}
        call = function.get(name, ops.linear_logprobs)
        got, expected = call(x, wide, labels(x, w) + 32, bias=bias), call(x, w, labels(x, w))
    elif name == "ids":
        got = ops.linear_logprobs(x, wide, ids=labels(x, w)[:, None] + 32, bias=bias).ids_log_probs[:, 0]
        expected = HEADS[name](x, w)
    elif name == "linear_sample":  # other classes, so other draws: each with its own probability
        index, got = ops.linear_sample(x, wide, 3, bias=bias)
        expected = torch.log_softmax(x @ w.T, -1).gather(-1, index[:, None] - 32)[:, 0]
    elif name == "linear_cross_entropy_soft":
        got = ops.linear_cross_entropy_soft(
            x, wide, x, wide, teacher_bias=bias, bias=bias.clamp(min=-1e9), reduction="none"
        )
        expected = HEADS[name](x, w)
    else:
        got, expected = HEADS[name](x, wide, bias), HEADS[name](x, w)
        got = got - 32 if name == "linear_argmax" else got
    assert_close(got, expected)


@pytest.mark.parametrize("name", PLAIN)
def test_infinite_scores_give_what_torch_gives(name):
    x, w = torch.randn(M, D), torch.randn(V, D)
    x[2, 0], w[:, 0] = INF, w[:, 0].abs()  # every score of this row is infinite
    got, expected = HEADS[name](x, w), PLAIN[name](x, w)
    assert_close(got, expected, equal_nan=True)
    assert not expected[2].isfinite().all()


@EACH_SMOOTH
def test_nan_stays_in_its_row_and_a_nan_class_is_seen_by_all(name):
    x, w = torch.randn(M, D), torch.randn(V, D)
    clean, bad = HEADS[name](x, w), x.clone()
    bad[5, 1] = NAN
    out = HEADS[name](bad, w)
    rest = [i for i in range(M) if i != 5]
    assert out[5].isnan().all()
    assert_close(out[rest], clean[rest])
    bad = w.clone()
    bad[0, 1] = NAN
    assert HEADS[name](x, bad).isnan().reshape(M, -1).any(1).all()


# 9: huge scores


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=lambda d: str(d)[6:])
@EACH_SMOOTH
def test_scores_of_a_hundred_thousand(name, dtype, seed):
    x, w = (300 * torch.randn(37, 4)).to(dtype).requires_grad_(), (300 * torch.randn(V, 4)).to(dtype).requires_grad_()
    out = HEADS[name](x, w)
    if (name, dtype) != ("linear_topk", torch.float16):  # the logits themselves, asked for in float16, are infinite
        assert out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), [x, w]))
    if name in PLAIN:
        args = [x.detach(), w.detach()]
        exact = [a.double() for a in args]
        assert_error_rule([(run(HEADS[name], args), run(PLAIN[name], args), run(PLAIN[name], exact))], terms=300)


# 11 and 12: strides


@EACH_SMOOTH
def test_expanded_inputs_and_gradients(name):
    x, w = torch.randn(1, D, dtype=torch.float64).expand(M, D), torch.randn(V, D, dtype=torch.float64)
    (got,) = torch.autograd.grad(HEADS[name](x, w.requires_grad_()).sum(), w)  # of a sum: an expanded number
    out = HEADS[name](x.contiguous(), w)
    (expected,) = torch.autograd.grad(out, w, torch.ones_like(out))
    assert_close(got, expected)


# 14 to 16: what is refused is in test_vocabulary_heads_mistakes; where labels are not looked at, NaN


def test_labels_that_are_not_looked_at_are_nan_where_they_are_wrong(looking):
    looking(False)
    x, w = leaves(m=5)
    target = torch.tensor([3, V, -1, 2**40, -100])
    wrong = [False, True, True, True, False]
    for options in ({}, {"label_smoothing": 0.1, "class_weights": torch.ones(V), "z_loss": 0.1}):
        assert ops.linear_cross_entropy(x, w, target, reduction="none", **options).isnan().tolist() == wrong
        assert ops.linear_cross_entropy(x, w, target, **options).isnan()
    assert ops.linear_logprobs(x, w, target).isnan().tolist() == wrong


# 19: transformations


@EACH_SMOOTH
def test_autocast_is_a_call_with_its_type(name):
    """As a linear layer within autocast; also where x already has that type and the weights have not."""
    x, w = leaves()
    expected = HEADS[name](x.bfloat16(), w.bfloat16())
    before = torch.autograd.grad(expected.sum(), [x, w])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for given_x in (x, x.bfloat16()):
            got = HEADS[name](given_x, w)
            after = torch.autograd.grad(got.sum(), [x, w])
            assert got.dtype == expected.dtype
            assert_close([got, *after], [expected, *before], rtol=1.6e-2, atol=1e-2)


@EACH_SMOOTH
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's own, as it loads forward mode
def test_functional_transformations(name):
    x, w = leaves(dtype=torch.float64)
    held, call = w.detach(), lambda x: HEADS[name](x, w.detach())
    out = HEADS[name](x, held)
    (expected,) = torch.autograd.grad(out.sum(), x)
    assert_close(torch.func.grad(lambda x: call(x).sum())(x.detach()), expected)
    along = torch.randn_like(x)
    value, slope = torch.func.jvp(call, (x.detach(),), (along,))
    assert_close(value, out.detach())
    assert_close(slope.sum(), (expected * along).sum())
    if name != "linear_sample":  # a row's noise depends on its place
        stacked = torch.stack([x.detach(), along])
        assert_close(torch.vmap(call)(stacked), torch.stack([call(t) for t in stacked]))


@pytest.mark.parametrize("name", ["linear_cross_entropy", "probabilities", "linear_jsd"])
def test_one_graph_for_the_compiler(name):
    x, w = leaves()
    expected = HEADS[name](x, w)
    got = torch.compile(HEADS[name], fullgraph=True, backend="aot_eager")(x, w)
    assert_close(got, expected)
    assert_close(torch.autograd.grad(got.sum(), [x, w]), torch.autograd.grad(expected.sum(), [x, w]))


# 23: threads


@EACH
def test_eight_threads_at_once(name):
    inputs = [tuple(t.detach() for t in leaves(m=M + k, v=V + k)) for k in range(8)]
    expected = [HEADS[name](*args) for args in inputs]
    start = threading.Barrier(8)

    def call(args):
        start.wait()
        return HEADS[name](*args)

    with ThreadPoolExecutor(8) as pool:
        assert_close(list(pool.map(call, inputs)), expected)


# And nothing that is given is changed


@EACH
def test_inputs_are_left_as_they_were(name):
    x, w = leaves()
    before = x.detach().clone(), w.detach().clone()
    out = HEADS[name](x, w)
    if name in SMOOTH:
        out.sum().backward()
    assert torch.equal(x, before[0]) and torch.equal(w, before[1])
    with mr.use(engine="reference"):
        assert_close(HEADS[name](x, w), out)
