"""Bad inputs and faults, each tried on every ready-made layer, with the answer that a user should see.

What has tests of its own: attention's options (test_attention), modules (test_nn_layers), odd sizes and memory
(test_ready_made_layers). What an engine is asked (memory that runs out, caches, ranks) is not a layer's.
"""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.testing import assert_close

import monoidreduce as mr
from monoidreduce import ops
from tests.support.comparison import Result, assert_equal, assert_error_rule, flatten, run, use_small_tiles
from tests.support.ready_made_layers import near

INF, NAN = math.inf, math.nan
M, N, D = 9, 23, 4

# every layer as a function of rows x and columns y, with one result for each row; and the same in plain torch
LAYERS: dict[str, Callable] = {
    "attention": lambda x, y: ops.attention(x, y, y),
    "attention-all": lambda x, y: (
        ops.attention(
            x, y, y, causal="lower_right", window=(len(y), None), softcap=5.0, sinks=x.new_zeros(()), return_lse=True
        ).values
    ),
    "attention_decode": lambda x, y: ops.attention_decode(
        x[None, None], y[None, None], y[None, None], torch.tensor([len(y)]), window=len(y)
    )[0, 0],
    "attention_statistics": lambda x, y: ops.attention_statistics(x, y, statistics="entropy", softcap=5.0).entropy,
    "attention_kl": lambda x, y: ops.attention_kl(x, y, 0.5 * x, y, window=len(y)),
    "contrastive_loss": lambda x, y: ops.contrastive_loss(
        x, y, kind="infonce", labels=(torch.arange(len(x)) % 3, torch.arange(len(y)) % 3), reduction="none"
    ),
    "siglip": lambda x, y: ops.contrastive_loss(
        x, y, kind="siglip", labels=(torch.arange(len(x)) % 3, torch.arange(len(y)) % 3), reduction="none"
    ),
    "mlp": lambda x, y: ops.mlp(x, y, y, activation="gelu", bias=y[:, 0] if y.shape[1] else None),
    "gated_mlp": lambda x, y: ops.gated_mlp(x, y, y, y),
    "max_pool_product": lambda x, y: ops.max_pool_product(x, y),
    "knn": lambda x, y: ops.knn(x, y, min(2, len(y)) or 1).values,
    "kmeans_assign": lambda x, y: ops.kmeans_assign(x, y).values,
    "kernel_sum": lambda x, y: ops.kernel_sum(x, y, y),
    "laplacian": lambda x, y: ops.kernel_sum(x, y, kernel="laplacian"),
    "kernel_logsumexp": lambda x, y: ops.kernel_logsumexp(x, y, kernel="cauchy"),
    "softmin": lambda x, y: ops.softmin(x, y, torch.zeros(len(y), dtype=y.dtype), eps=1.0),
}
PLAIN: dict[str, Callable] = {
    "attention": lambda x, y: torch.softmax(x @ y.mT / math.sqrt(D), -1) @ y,
    "max_pool_product": lambda x, y: (x @ y.mT).max(-1).values,
    "knn": lambda x, y: near(x, y, "euclidean").topk(2, -1, largest=False).values,
    "kmeans_assign": lambda x, y: near(x, y, "sqeuclidean").min(-1).values,
    "softmin": lambda x, y: -torch.logsumexp(-near(x, y, "sqeuclidean"), -1),
    "siglip": lambda x, y: torch.nn.functional.softplus(
        torch.where((torch.arange(len(x)) % 3)[:, None] == torch.arange(len(y)) % 3, -1, 1) * (x @ y.mT)
    ).sum(-1),
}
# each pair alone is folded over rows and columns at once
BOTH_WAYS: dict[str, Callable] = {
    "clip": lambda x, y: ops.contrastive_loss(x, y),
    "chamfer": lambda x, y: ops.chamfer(x, y),
    "maxsim": lambda x, y: ops.maxsim(x, y),
    "sinkhorn": lambda x, y: ops.sinkhorn(x, y, eps=1.0, iterations=3).value,
    "sinkhorn_step": lambda x, y: torch.cat(
        ops.sinkhorn_step(x, y, y[:, 0], x.new_zeros(len(x)), y.new_zeros(len(y)), eps=1.0)
    ),
}
EACH = pytest.mark.parametrize("name", LAYERS)
EVERY = pytest.mark.parametrize("name", LAYERS | BOTH_WAYS)


def leaves(m=M, n=N, d=D, dtype=torch.float32):
    return torch.randn(m, d, dtype=dtype, requires_grad=True), torch.randn(n, d, dtype=dtype, requires_grad=True)


def zero_gradients(out, inputs):
    found = torch.autograd.grad(out.sum(), inputs, allow_unused=True)
    return all(g is None or torch.equal(g, torch.zeros_like(g)) for g in found)


def call(name):
    return (LAYERS | BOTH_WAYS)[name]


# 1 to 4: nothing to see

NOTHING = {"max_pool_product": -INF, "kmeans_assign": INF, "kernel_logsumexp": -INF, "softmin": INF}


@EACH
def test_no_columns(name):
    x, y = leaves(n=0)
    if name == "knn":
        with pytest.raises(ValueError, match="k = 1 of only 0"):
            LAYERS[name](x, y)
        return
    out = LAYERS[name](x, y)
    assert_close(out, torch.full_like(out, NOTHING.get(name, 0.0)))
    assert zero_gradients(out, [x, y])


@EACH
def test_no_rows(name):
    x, y = leaves(m=0)
    out = LAYERS[name](x, y)
    assert out.shape[0] == 0 and zero_gradients(out, [x, y])


@EACH
def test_no_features(name):
    """Scores are constant: every column is as good as every other."""
    x, y = leaves(d=0)
    out = LAYERS[name](x, y)
    expected = {"max_pool_product": 0.0, "knn": 0.0, "kmeans_assign": 0.0, "laplacian": N}
    expected |= {"kernel_logsumexp": math.log(N), "softmin": -math.log(N), "siglip": N * math.log(2)}
    expected |= {"contrastive_loss": math.log(N), "attention_statistics": math.log(N), "attention_kl": 0.0}
    assert out.shape[0] == M
    if name in expected:
        assert_close(out, torch.full_like(out, expected[name]), rtol=1e-5, atol=1e-6)
    else:
        assert out.numel() == 0


def test_both_ways_of_nothing():
    x, none = leaves(n=0)
    assert ops.chamfer(x, none, points="sum", reduction="sum") == INF
    assert ops.chamfer(none, none, points="sum") == 0 and ops.chamfer(none, none).isnan()
    assert ops.maxsim(x, none) == -INF and ops.maxsim(none, x) == 0
    assert ops.contrastive_loss(none, none).isnan() and ops.contrastive_loss(none, none, reduction="sum") == 0


# 5: a leading block that is hidden


@pytest.mark.parametrize("name", ["attention", "kernel_logsumexp", "softmin"])
def test_a_leading_block_of_hidden_columns_changes_nothing(name, monkeypatch):
    use_small_tiles(monkeypatch, 4, 8)
    x, y = leaves(dtype=torch.float64)
    wide = torch.cat([torch.randn(32, D, dtype=torch.float64), y])
    weights = torch.zeros(32 + N, dtype=torch.float64)
    weights[:32] = -INF
    hidden = {
        "attention": lambda: ops.attention(x, wide, wide, weights[None]),
        "kernel_logsumexp": lambda: ops.kernel_logsumexp(x, wide, weights, kernel="cauchy"),
        "softmin": lambda: ops.softmin(x, wide, weights, eps=1.0),
    }
    assert_close(hidden[name](), LAYERS[name](x, y))


# 6 to 8: infinities and NaN


@pytest.mark.parametrize("name", PLAIN)
def test_infinite_inputs_give_what_torch_gives(name):
    x, y = torch.randn(M, D), torch.randn(N, D)
    x[2, 0], y[:, 0] = INF, y[:, 0].abs()
    got, expected = LAYERS[name](x, y), PLAIN[name](x, y)
    assert_close(got, expected, equal_nan=True)


@EACH
def test_nan_stays_in_its_row_and_a_nan_column_is_seen(name):
    x, y = torch.randn(M, D), torch.randn(N, D)
    clean, bad = LAYERS[name](x, y), x.clone()
    bad[5, 1] = NAN
    out = LAYERS[name](bad, y)
    rest = [i for i in range(M) if i != 5]
    assert out[5].isnan().any()
    assert_close(out[rest], clean[rest])
    bad = y.clone()
    bad[0, 1] = NAN
    seen = LAYERS[name](x, bad).isnan().reshape(M, -1).any(1)
    assert seen.all() if name != "knn" else not seen.any()  # to topk NaN is farthest, as in torch


# 9: huge scores


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", [n for n in LAYERS if "mlp" not in n])
def test_scores_of_a_hundred_thousand(name, dtype, seed):
    x, y = (300 * torch.randn(37, 4)).to(dtype).requires_grad_(), (300 * torch.randn(N, 4)).to(dtype).requires_grad_()
    out = LAYERS[name](x, y)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), [x, y]))
    if name in PLAIN and dtype is torch.float32:
        args = [x.detach(), y.detach()]
        exact = [a.double() for a in args]
        assert_error_rule([(run(LAYERS[name], args), run(PLAIN[name], args), run(PLAIN[name], exact))], terms=1e6)


# 11 and 12: strides, offsets, expanded gradients


@EVERY
def test_views_and_expanded_gradients(name):
    x, y = torch.randn(M, D, dtype=torch.float64), torch.randn(M if name == "clip" else N, D, dtype=torch.float64)
    odd_x = torch.zeros(D, 2 * M + 1, dtype=torch.float64)[:, 1::2].T.copy_(x)
    odd_y = torch.zeros(y.numel() + 1, dtype=torch.float64)[1:].view(y.shape).copy_(y)
    got, expected = (run(call(name), args, cotangents=None) for args in ((odd_x, odd_y), (x, y)))
    assert_equal(got, expected, rtol=1e-10)
    alone = x[:1].expand(M, D)
    assert_equal(run(call(name), (alone, y)), run(call(name), (alone.contiguous(), y)), rtol=1e-10)


# 14 to 16: what is refused. Every tensor of every function is spoilt in seven ways; options are listed.

X, Y, P = torch.zeros(5, 4), torch.zeros(7, 4), torch.zeros(7, 3)
GOOD: dict[str, tuple[Callable, dict, dict]] = {
    "contrastive_loss": (ops.contrastive_loss, {"x": X, "y": X}, {}),
    "mlp": (ops.mlp, {"x": X, "p": Y, "q": P}, {}),
    "gated_mlp": (ops.gated_mlp, {"x": X, "gate": Y, "up": Y, "down": P}, {}),
    "maxsim": (ops.maxsim, {"q": X, "d": Y}, {}),
    "knn": (ops.knn, {"x": X, "y": Y}, {"k": 2}),
    "kmeans_assign": (ops.kmeans_assign, {"x": X, "centroids": Y}, {}),
    "kernel_sum": (ops.kernel_sum, {"x": X, "y": Y, "b": P}, {}),
    "kernel_logsumexp": (ops.kernel_logsumexp, {"x": X, "y": Y}, {}),
    "softmin": (ops.softmin, {"x": X, "y": Y}, {"h": P[:, 0], "eps": 1.0}),
    "sinkhorn_step": (
        ops.sinkhorn_step, {"x": X, "y": Y}, {"g": P[:, 0], "log_a": X[:, 0], "log_b": P[:, 0], "eps": 1.0},
    ),
    "sinkhorn": (ops.sinkhorn, {"x": X, "y": Y}, {"eps": 1.0, "iterations": 2}),
    "chamfer": (ops.chamfer, {"x": X, "y": Y}, {}),
}  # fmt: skip
SPOILT = {
    "no tensor": (lambda t: [[1.0]], mr.ArgumentError),
    "integers": (lambda t: t.long(), mr.DTypeError),
    "complex": (lambda t: t.cfloat(), mr.DTypeError),
    "rank": (lambda t: t[0, 0], mr.ShapeError),
    "device": (lambda t: t.to("meta"), mr.DeviceError),
    "type": (lambda t: t.double(), mr.DTypeError),
    "sizes": (lambda t: t[:-1, :-1], mr.ShapeError),
}
LONG = torch.zeros(5, dtype=torch.int64)
OPTIONS: dict[str, list[tuple[dict, type, str]]] = {
    "contrastive_loss": [
        ({"kind": "moco"}, mr.ArgumentError, "kind was given 'moco'.*'clip'"),
        ({"normalize": "no"}, mr.ArgumentError, "normalize was given 'no'.*True or False"),
        ({"temperature": 0.0}, mr.ArgumentError, "temperature was given 0.0"),
        ({"temperature": 1.0, "scale": 1.0}, mr.ArgumentError, "both temperature and scale"),
        ({"scale": -1}, mr.ArgumentError, "scale was given -1"),
        ({"bias": 1.0}, mr.ArgumentError, "bias was given for kind"),
        ({"hard_negatives": -0.5}, mr.ArgumentError, "hard_negatives was given -0.5"),
        ({"kind": "siglip", "hard_negatives": 0.5}, mr.ArgumentError, "hard_negatives was given for"),
        ({"labels": LONG[:4]}, mr.ShapeError, "labels has 4 numbers, but x has 5"),
        ({"labels": LONG.float()}, mr.DTypeError, "labels is float32"),
        ({"labels": 3}, mr.ArgumentError, "labels was given 3"),
        ({"reduction": "avg"}, mr.ArgumentError, "reduction was given 'avg'"),
        ({"y": None}, mr.ArgumentError, "without labels"),
        ({"y": Y}, mr.ShapeError, "x has 5 vectors, but y has 7"),
        ({"y": Y, "kind": "siglip"}, mr.ShapeError, "x has 5 vectors, but y has 7"),
        ({"x": Y, "kind": "infonce"}, mr.ShapeError, "x has 7 vectors, but y has 5"),
        ({"temperature": torch.ones(2)}, mr.ArgumentError, "temperature"),
    ],
    "mlp": [
        ({"activation": "gelo"}, mr.ArgumentError, "Did you mean 'gelu'"),
        ({"activation": None}, mr.ArgumentError, "activation was given None"),
        ({"activation": torch.i0}, mr.UnknownFunctionError, "i0"),
        ({"bias": X[0]}, mr.ShapeError, "bias has 4"),
        ({"bias": 1.0}, mr.ArgumentError, "bias was given 1.0"),
        ({"out_bias": X[0]}, mr.ShapeError, "out_bias has 4 numbers.*3 features"),
        ({"out_bias": P[0].double()}, mr.DTypeError, "out_bias is float64"),
        ({"out_bias": P[:2]}, mr.ShapeError, r"out_bias has shape \(2, 3\), but the result \(5, 3\)"),
        ({"out_bias": P[None, :1]}, mr.ShapeError, r"out_bias has shape \(1, 1, 3\)"),
        ({"dropout_p": 2}, mr.ArgumentError, "dropout_p was given 2"),
        ({"dropout_p": 0.5, "seed": 0.5}, mr.ArgumentError, "seed was given 0.5"),
    ],
    "gated_mlp": [
        ({"activation": "swish"}, mr.ArgumentError, "activation was given 'swish'"),
        ({"gate_bias": X[0]}, mr.ShapeError, "gate_bias has 4"),
        ({"up_bias": [1.0]}, mr.ArgumentError, "up_bias was given"),
        ({"out_bias": X[0]}, mr.ShapeError, "out_bias has 4"),
        ({"dropout_p": -1}, mr.ArgumentError, "dropout_p was given -1"),
    ],
    "maxsim": [
        ({"q_lengths": LONG}, mr.ShapeError, "q_lengths has shape"),
        ({"d_lengths": torch.tensor(8)}, mr.ArgumentError, "d_lengths holds 8.*7 vectors"),
        ({"d_lengths": torch.tensor(1.5)}, mr.DTypeError, "d_lengths is float32"),
        ({"q_lengths": torch.tensor(-1)}, mr.ArgumentError, "q_lengths holds -1"),
        ({"all_pairs": True}, mr.ShapeError, r"q has shape \(5, 4\)"),
    ],
    "knn": [
        ({"k": 8}, mr.TopKError, "k = 8 of only 7"),
        ({"k": 0}, mr.ArgumentError, "k was given 0"),
        ({"k": 1.5}, mr.ArgumentError, "k was given 1.5"),
        ({"k": "all"}, mr.ArgumentError, "k was given 'all'"),
        ({"metric": "l1"}, mr.ArgumentError, "metric was given 'l1'.*'euclidean'"),
    ],
    "kmeans_assign": [({"metric": "l1"}, mr.ArgumentError, "metric was given 'l1'")],
    "kernel_sum": [
        ({"kernel": "linear"}, mr.ArgumentError, "kernel was given 'linear'.*'energy'"),
        ({"bandwidth": 0}, mr.ArgumentError, "bandwidth was given 0"),
        ({"bandwidth": -1.0}, mr.ArgumentError, "bandwidth was given -1.0"),
        ({"b": P[:6]}, mr.ShapeError, "b has 6"),
    ],
    "kernel_logsumexp": [
        ({"kernel": "energy"}, mr.ArgumentError, "kernel was given 'energy'"),
        ({"bandwidth": None}, mr.ArgumentError, "bandwidth was given None"),
        ({"log_weights": X[0]}, mr.ShapeError, "log_weights has 4"),
        ({"log_weights": 1.0}, mr.ArgumentError, "log_weights was given 1.0"),
    ],
    "softmin": [
        ({"eps": 0.0}, mr.ArgumentError, "eps was given 0.0"),
        ({"eps": torch.ones(2)}, mr.ArgumentError, "eps was given a tensor"),
        ({"cost": "l1"}, mr.ArgumentError, "cost was given 'l1'"),
        ({"h": X[:, 0]}, mr.ShapeError, "h has 5"),
        ({"h": None}, mr.ArgumentError, "h is declared"),
    ],
    "sinkhorn_step": [
        ({"eps": -1}, mr.ArgumentError, "eps was given -1"),
        ({"cost": "l1"}, mr.ArgumentError, "cost was given 'l1'"),
        ({"g": None}, mr.ArgumentError, "g was given None"),
        ({"log_a": LONG}, mr.DTypeError, "log_a is int64"),
    ],
    "sinkhorn": [
        ({"eps": 0}, mr.ArgumentError, "eps was given 0"),
        ({"iterations": 0}, mr.ArgumentError, "iterations was given 0"),
        ({"tolerance": -1.0}, mr.ArgumentError, "tolerance was given -1.0"),
        ({"a": X[:4, 0]}, mr.ShapeError, "a has 4.*5"),
        ({"b": -torch.ones(7)}, mr.ArgumentError, "b holds -1"),
        ({"b": torch.ones(7).double()}, mr.DTypeError, "b is float64"),
    ],
    "chamfer": [
        ({"metric": "dot"}, mr.ArgumentError, "metric was given 'dot'"),
        ({"points": "max"}, mr.ArgumentError, "points was given 'max'"),
        ({"reduction": None}, mr.ArgumentError, "reduction was given None"),
        ({"x_lengths": torch.tensor(9)}, mr.ArgumentError, "x_lengths holds 9.*5 vectors"),
        ({"y_lengths": LONG}, mr.ShapeError, "y_lengths has shape"),
    ],
}
REFUSED = [
    pytest.param(name, {arg: spoil(t)}, error, "", id=f"{name}-{arg}-{what}")
    for name, (_, tensors, _) in GOOD.items()
    for arg, t in tensors.items()
    for what, (spoil, error) in SPOILT.items()
] + [pytest.param(name, *row, id=f"{name}-{row[0]}"[:60]) for name, rows in OPTIONS.items() for row in rows]


@pytest.mark.parametrize(("name", "changed", "error", "message"), REFUSED)
def test_mistakes_are_named_before_any_work(name, changed, error, message):
    function, tensors, options = GOOD[name]
    with mr.tally() as t, pytest.raises(error, match=f"(?s){message}") as caught:
        function(**{**tensors, **options, **changed})
    assert t.tiles == 0 and isinstance(caught.value, mr.MonoidReduceError)


def test_enough_mistakes():
    for name in GOOD:
        function, tensors, options = GOOD[name]
        flatten(function(**tensors, **options))  # the base itself is right
        assert sum(p.values[0] == name for p in REFUSED) >= 15, name


# 18 and 19: what the pair language cannot say, and transformations


def test_side_effects_of_an_activation_are_caught():
    calls = []

    def counted(x):
        calls.append(1)
        return x * len(calls)

    with pytest.raises(mr.ImpureError):
        ops.mlp(X, Y, P, activation=counted)


@EVERY
def test_autocast_rounds_what_it_multiplies(name):
    """Under autocast a layer is what it is for inputs rounded to that type; gradients come in the inputs' own."""
    x, y = (t.detach().bfloat16().float() for t in leaves(n=M if name == "clip" else N))
    expected = run(call(name), (x.bfloat16(), y.bfloat16()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(call(name), (x, y))
    assert all(g.dtype == torch.float32 for g in got.grads.values())
    for key, value in expected.values.items():
        assert_close(got.values[key].float(), value.float(), rtol=2e-2, atol=2e-2)


@EVERY
def test_functional_gradients(name):
    x, y = leaves(n=M if name == "clip" else N, dtype=torch.float64)
    (expected,) = torch.autograd.grad(call(name)(x, y).sum(), x)
    assert_close(torch.func.grad(lambda x: call(name)(x, y.detach()).sum())(x.detach()), expected)


# 23: threads


@EVERY
def test_eight_threads_at_once(name):
    inputs = [tuple(t.detach() for t in leaves(m=M + k, n=(M if name == "clip" else N) + k)) for k in range(8)]
    expected = [call(name)(*args) for args in inputs]
    start = threading.Barrier(8)

    def work(args):
        start.wait()
        return call(name)(*args)

    with ThreadPoolExecutor(8) as pool:
        assert_close(list(pool.map(work, inputs)), expected)


# And nothing that is given is changed


@EVERY
def test_inputs_are_left_as_they_were(name):
    x, y = leaves(n=M if name == "clip" else N)
    before = x.detach().clone(), y.detach().clone()
    assert isinstance(run(call(name), (x, y)), Result)
    assert torch.equal(x, before[0]) and torch.equal(y, before[1])


def test_names_that_are_not_there_are_answered_with_what_is():
    x = torch.ones(4, 3)
    for call, said in (
        (
            lambda: ops.knn(x, x, n_neighbors=2),
            "knn has no argument 'n_neighbors'. It takes x, y, k, metric, exclude_self",
        ),
        (lambda: ops.knn(x, x, 2, metrc="dot"), "knn has no argument 'metrc'; did you mean 'metric'?"),
    ):
        with pytest.raises(mr.ArgumentError) as found:
            call()
        assert said in str(found.value)
    with pytest.raises(AttributeError, match=r"no attribute 'knn'\. Did you mean mr\.ops\.knn\?"):
        mr.knn  # noqa: B018
    with pytest.raises(mr.ShapeError) as found:
        ops.knn(x, x[:, :2], 2)
    assert "_knn" not in str(found.value) and "neighbours.py" not in str(found.value)
