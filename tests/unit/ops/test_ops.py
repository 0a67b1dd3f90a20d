"""The ready-made layers against plain torch: values, gradients, the error rule, bad inputs, memory and passes."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import monoidreduce as mr
from monoidreduce import ops
from monoidreduce.errors import (
    ArgumentError,
    DTypeError,
    LabelError,
    ShapeError,
    TraceError,
    UnknownFunctionError,
)
from monoidreduce.ops.mlp import ACTIVATIONS

RAGGED = [(1, 1, 3), (1, 59, 4), (59, 1, 5), (59, 111, 7), (65, 127, 1)]  # rows, columns, features
F64 = torch.float64
NAN, INF = math.nan, math.inf


# Every layer and option beside the same in plain torch ---------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A layer of floating inputs only (labels and the like are made from their shapes), and what it equals."""

    layer: Callable[..., Tensor]
    dense: Callable[..., Tensor]
    shapes: Callable[[int, int, int], list[tuple[int, ...]]]

    def inputs(self, m: int, n: int, d: int, dtype: torch.dtype = F64) -> list[Tensor]:
        single = torch.float32 if dtype.itemsize == 2 else dtype  # a scale or a temperature is not held in 16 bits
        return [torch.randn(s, dtype=dtype if s else single, requires_grad=True) for s in self.shapes(m, n, d)]


def labels(x: Tensor, weight: Tensor, ignore: bool = False) -> Tensor:
    rows = torch.arange(math.prod(x.shape[:-1]), device=x.device)
    target = rows * 7 % len(weight)
    return torch.where(rows % 3 == 2, -100, target).view(x.shape[:-1]) if ignore else target.view(x.shape[:-1])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x @ weight.mT if bias is None else x @ weight.mT + bias


def cross_entropy_case(reduction: str, bias: bool = False, ignore: bool = False) -> Case:
    def layer(x, w, b=None):
        return ops.cross_entropy(x, w, labels(x, w, ignore), bias=b, reduction=reduction)

    def dense(x, w, b=None):
        return F.cross_entropy(linear(x, w, b), labels(x, w, ignore), reduction=reduction)

    return Case(layer, dense, lambda m, n, d: [(m, d), (n, d), *([(n,)] if bias else [])])


def given_case(reduction: str, bias: bool = False) -> Case:
    def layer(x, w, p, b=None):
        return ops.cross_entropy_given(x, w, p.softmax(-1), bias=b, reduction=reduction)

    def dense(x, w, p, b=None):
        return F.cross_entropy(linear(x, w, b), p.softmax(-1), reduction=reduction)

    return Case(layer, dense, lambda m, n, d: [(m, d), (n, d), (m, n), *([(n,)] if bias else [])])


def distributions_case(reduction: str) -> Case:
    return Case(
        lambda *args: ops.cross_entropy_distributions(*args, reduction=reduction),
        lambda p, c, q, t: F.cross_entropy(p @ c.T, torch.softmax(q @ t.T, -1), reduction=reduction),
        lambda m, n, d: [(m, d), (n, d), (m, 3), (n, 3)],
    )


def dense_entropy(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    log_p = torch.log_softmax(linear(x, w, b), -1)
    return -(log_p.exp() * log_p).sum(-1)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = False) -> Tensor:
    s = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril(), -INF)
    return torch.softmax(s, -1) @ v


def mlp_case(activation: str | Callable) -> Case:
    function = ACTIVATIONS[activation] if isinstance(activation, str) else activation
    return Case(
        lambda *args: ops.mlp(*args, activation=activation),
        lambda x, p, q: function(x @ p.mT) @ q,
        lambda m, n, d: [(m, d), (n, d), (n, 3)],
    )


def gated_case(activation: str | Callable) -> Case:
    function = ACTIVATIONS[activation] if isinstance(activation, str) else activation
    return Case(
        lambda *args: ops.gated_mlp(*args, activation=activation),
        lambda x, gate, up, down: (function(x @ gate.mT) * (x @ up.mT)) @ down,
        lambda m, n, d: [(m, d), (n, d), (n, d), (n, 3)],
    )


def sample_case(bias: bool = False) -> Case:
    def dense(x, w, t, b=None):
        index = ops.sample(x.detach(), w.detach(), 5, bias=None if b is None else b.detach(), temperature=t.exp()).index
        return torch.log_softmax(linear(x, w, b) / t.exp(), -1).gather(-1, index.unsqueeze(-1)).squeeze(-1)

    def layer(x, w, t, b=None):
        return ops.sample(x, w, 5, bias=b, temperature=t.exp()).log_prob

    return Case(layer, dense, lambda m, n, d: [(m, d), (n, d), (), *([(n,)] if bias else [])])


def contrastive_case(reduction: str = "mean", normalize: bool = False) -> Case:
    def dense(x, y, t):
        if normalize:
            x, y = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
        s, own = x @ y.T / t.exp(), torch.arange(len(x), device=x.device)
        return (F.cross_entropy(s, own, reduction=reduction) + F.cross_entropy(s.T, own, reduction=reduction)) / 2

    def layer(x, y, t):
        return ops.contrastive_loss(x, y, temperature=t.exp(), normalize=normalize, reduction=reduction)

    return Case(layer, dense, lambda m, n, d: [(m, d), (m, d), ()])


def bounded(x: Tensor) -> Tensor:
    """An activation of the user's own."""
    return x * torch.sigmoid(x) + torch.where(x > 0, torch.tanh(x), 0.0)


CASES: dict[str, Case] = {
    "attention": Case(ops.attention, dense_attention, lambda m, n, d: [(m, d), (n, d), (n, 3)]),
    "attention-scale": Case(
        lambda *qkv: ops.attention(*qkv, scale=0.3),
        lambda *qkv: dense_attention(*qkv, scale=0.3),
        lambda m, n, d: [(m, d), (n, d), (n, 3)],
    ),
    "attention-tensor-scale": Case(
        lambda *qkvs: ops.attention(*qkvs[:3], scale=qkvs[3]),
        dense_attention,
        lambda m, n, d: [(m, d), (n, d), (n, 3), ()],
    ),
    "attention-causal": Case(
        lambda *qkv: ops.attention(*qkv, causal=True),
        lambda *qkv: dense_attention(*qkv, causal=True),
        lambda m, n, d: [(m, d), (n, d), (n, 3)],
    ),
    "attention-batched": Case(ops.attention, dense_attention, lambda m, n, d: [(2, 1, m, d), (3, n, d), (2, 1, n, 3)]),
    "cross_entropy-mean": cross_entropy_case("mean"),
    "cross_entropy-sum-bias": cross_entropy_case("sum", bias=True),
    "cross_entropy-none": cross_entropy_case("none"),
    "cross_entropy-mean-bias-ignore": cross_entropy_case("mean", bias=True, ignore=True),
    "cross_entropy-sum-ignore": cross_entropy_case("sum", ignore=True),
    "cross_entropy-none-ignore": cross_entropy_case("none", ignore=True),
    "given-mean": given_case("mean"),
    "given-sum-bias": given_case("sum", bias=True),
    "given-none": given_case("none"),
    "distributions-mean": distributions_case("mean"),
    "distributions-sum": distributions_case("sum"),
    "distributions-none": distributions_case("none"),
    "entropy": Case(ops.entropy, dense_entropy, lambda m, n, d: [(m, d), (n, d)]),
    "entropy-bias": Case(
        lambda x, w, b: ops.entropy(x, w, bias=b), dense_entropy, lambda m, n, d: [(m, d), (n, d), (n,)]
    ),
    **{f"mlp-{name}": mlp_case(name) for name in ACTIVATIONS},
    "mlp-own": mlp_case(bounded),
    "mlp-module": mlp_case(nn.Tanh()),
    "mlp-batched": Case(
        ops.mlp, lambda x, p, q: torch.relu(x @ p.mT) @ q, lambda m, n, d: [(2, m, d), (2, n, d), (n, 3)]
    ),
    "gated_mlp-silu": gated_case("silu"),
    "gated_mlp-own": gated_case(bounded),
    "sample": sample_case(),
    "sample-bias": sample_case(bias=True),
    "max_pool_product": Case(
        ops.max_pool_product, lambda x, w: (x @ w.mT).max(-1).values, lambda m, n, d: [(m, d), (n, d)]
    ),
    "max_pool_product-batched": Case(
        ops.max_pool_product, lambda x, w: (x @ w.mT).max(-1).values, lambda m, n, d: [(2, m, d), (2, n, d)]
    ),
    "contrastive-mean": contrastive_case(),
    "contrastive-sum": contrastive_case("sum"),
    "contrastive-none-normalize": contrastive_case("none", normalize=True),
}
MAIN = [name for name in CASES if not name.startswith("mlp-") or name in ("mlp-relu", "mlp-gelu", "mlp-own")]


def grads(value: Tensor, inputs: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(value, inputs, cotangent, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


def assert_equal_with_gradients(case: Case, inputs: list[Tensor], **tolerance: float) -> None:
    got, expected = case.layer(*inputs), case.dense(*inputs)
    assert_close(got, expected, **tolerance)
    cotangent = torch.randn_like(expected)
    assert_close(grads(got, inputs, cotangent), grads(expected, inputs, cotangent), **tolerance)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("size", RAGGED, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_plain_torch(name, size, seed):
    assert_equal_with_gradients(CASES[name], CASES[name].inputs(*size))


LARGE = [
    "attention-causal", "cross_entropy-mean-bias-ignore", "distributions-none", "entropy-bias", "mlp-gelu",
    "gated_mlp-silu", "sample", "max_pool_product", "contrastive-mean",
]  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_several_tiles_agree_with_plain_torch(name, seed):
    assert_equal_with_gradients(CASES[name], CASES[name].inputs(1025, 1025, 3))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", MAIN)
def test_derivatives_match_finite_differences(name, seed):
    inputs = CASES[name].inputs(3, 4, 2)
    assert torch.autograd.gradcheck(CASES[name].layer, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(CASES[name].layer, inputs, fast_mode=True)


@pytest.mark.parametrize("name", MAIN)
def test_the_dense_engine_agrees(name, seed):
    inputs = CASES[name].inputs(11, 13, 4)
    with mr.use(engine="reference"):
        expected = CASES[name].layer(*inputs)
    assert_close(CASES[name].layer(*inputs), expected)


# The error rule ------------------------------------------------------------------------------------------------------


def errors(case: Case, inputs: list[Tensor]) -> list[tuple[str, float, float, float]]:
    """For the value and each gradient: the layer's distance from float64, plain torch's, and the size of the truth.

    Gradients are those of four cotangents together, so that a single number (a temperature's) is not judged by luck.
    """
    exact = [x.detach().double().requires_grad_() for x in inputs]
    cotangents = torch.randn(4, *case.dense(*exact).shape, dtype=F64)
    parts = []
    for f, at in ((case.layer, inputs), (case.dense, inputs), (case.dense, exact)):
        value = f(*at)
        found = [torch.autograd.grad(value, at, c.to(value.dtype), retain_graph=True) for c in cotangents]
        parts.append([value.detach(), *(torch.stack(g) for g in zip(*found, strict=True))])
    rows = []
    for k, (got, plain, true) in enumerate(zip(*parts, strict=True)):
        far = [float((v.double() - true).norm()) for v in (got, plain)]
        lucky = 8 if true.numel() <= 4 else 1  # plain torch may be off by nothing in a single number
        rows.append(("value" if k == 0 else f"gradient {k - 1}", *far, lucky * float(true.norm())))
    return rows


def assert_error_rule(case: Case, inputs: list[Tensor]) -> None:
    """At most twice plain torch's error; one rounding of the result itself is always allowed."""
    eps = torch.finfo(inputs[0].dtype).eps
    for what, got, plain, size in errors(case, inputs):
        assert got <= 2 * plain + eps / 2 * size, f"{what}: error {got:.3g}, plain torch's {plain:.3g}, of {size:.3g}"


RULED = [name for name in MAIN if not name.startswith("sample") and not name.endswith("batched")]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", RULED)
def test_errors_stay_within_twice_plain_torch(name, dtype, seed):
    assert_error_rule(CASES[name], CASES[name].inputs(65, 259, 32, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(
    "name", ["attention", "cross_entropy-mean", "distributions-mean", "entropy", "contrastive-mean"]
)
def test_errors_stay_within_twice_plain_torch_on_peaked_rows(name, dtype, seed):
    case = CASES[name]
    inputs = [(2.0 * x.detach()).requires_grad_() for x in case.inputs(65, 259, 32, dtype)]
    assert_error_rule(case, inputs)


@pytest.mark.parametrize("fit", [0.3, 1.0])
def test_small_losses_keep_their_digits(fit, seed):
    """Where the prediction is good, the loss is a small gap of large numbers."""
    w, target = torch.randn(300, 32), torch.randint(300, (128,))
    x = (fit * w[target] + 0.3 * torch.randn(128, 32)).requires_grad_()
    w.requires_grad_()
    labelled = Case(
        lambda x, w: ops.cross_entropy(x, w, target, reduction="none"),
        lambda x, w: F.cross_entropy(x @ w.T, target, reduction="none"),
        lambda m, n, d: [],
    )
    distilled = Case(
        lambda x, w: ops.cross_entropy_distributions(x, w, 1.1 * x, w, reduction="none"),
        lambda x, w: F.cross_entropy(x @ w.T, torch.softmax(1.1 * x @ w.T, -1), reduction="none"),
        lambda m, n, d: [],
    )
    for case in (labelled, distilled, CASES["entropy"]):
        assert_error_rule(case, [x, w])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_sampled_log_probabilities_keep_the_error_rule(dtype, seed):
    x, w = torch.randn(129, 32, dtype=dtype), torch.randn(515, 32, dtype=dtype)
    index, log_prob = ops.sample(x, w, 3)
    plain, true = (
        torch.log_softmax(a @ b.T, -1).gather(-1, index[:, None])[:, 0] for a, b in ((x, w), (x.double(), w.double()))
    )
    floor = torch.finfo(dtype).eps / 2 * true.norm()
    assert (log_prob - true).norm() <= 2 * (plain - true).norm() + floor


def test_16bit_losses_are_float32_and_vectors_keep_their_type(seed):
    x, w = torch.randn(5, 4, dtype=torch.bfloat16), torch.randn(7, 4, dtype=torch.bfloat16)
    target = torch.randint(7, (5,))
    assert ops.cross_entropy(x, w, target).dtype == torch.float32
    assert ops.cross_entropy_given(x, w, torch.rand(5, 7).bfloat16()).dtype == torch.float32
    assert ops.entropy(x, w).dtype == torch.float32
    assert ops.contrastive_loss(x, x).dtype == torch.float32
    assert ops.attention(x, w, w).dtype == torch.bfloat16
    assert ops.mlp(x, w, w).dtype == ops.gated_mlp(x, w, w, w).dtype == torch.bfloat16


# Each layer's own ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "n"), [(5, 5), (5, 9), (9, 5)])
def test_attention_masks_and_scales_as_torch_does(m, n, seed):
    q, k, v = torch.randn(2, 3, m, 4), torch.randn(2, 3, n, 4), torch.randn(2, 3, n, 6)
    for causal in (False, True):
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        assert_close(ops.attention(q, k, v, causal=causal), expected)
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=2.0)
        assert_close(ops.attention(q, k, v, causal=causal, scale=2.0), expected)


def test_causal_attention_skips_what_it_cannot_see(seed):
    q, k, v = torch.randn(2048, 4), torch.randn(2048, 4), torch.randn(2048, 4)
    with mr.tally() as t:
        ops.attention(q, k, v, causal=True)
    assert t.skipped > 0


@pytest.mark.parametrize(
    "name", ["mlp", "gated_mlp", "entropy", "sample", "max_pool_product", "cross_entropy", "given"]
)
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3), (0, 3)], ids=str)
def test_leading_dimensions_of_x_are_rows(name, lead, seed):
    x, w = torch.randn(*lead, 4), torch.randn(9, 4)
    calls = {
        "mlp": lambda x: ops.mlp(x, w, w),
        "gated_mlp": lambda x: ops.gated_mlp(x, w, w, w),
        "entropy": lambda x: ops.entropy(x, w),
        "sample": lambda x: ops.sample(x, w, 3).log_prob,
        "max_pool_product": lambda x: ops.max_pool_product(x, w),
        "cross_entropy": lambda x: ops.cross_entropy(x, w, labels(x, w, ignore=True), reduction="none"),
        "given": lambda x: ops.cross_entropy_given(x, w, torch.ones(*x.shape[:-1], 9) / 9, reduction="none"),
    }
    y = calls[name](x)
    flat = calls[name](x.reshape(math.prod(lead), 4))
    assert y.shape == (*lead, *flat.shape[1:])
    assert_close(y.reshape(flat.shape), flat)


def test_ignored_rows_have_no_loss_and_no_gradient_whatever_they_hold(seed):
    x, w = torch.randn(5, 4, dtype=F64), torch.randn(7, 4, dtype=F64, requires_grad=True)
    x[1] = NAN
    x.requires_grad_()
    target = torch.tensor([3, -100, 6, -100, 0])
    loss = ops.cross_entropy(x, w, target, reduction="none")
    assert loss[1] == loss[3] == 0 and loss.isfinite().all()
    gx, gw = torch.autograd.grad(ops.cross_entropy(x, w, target), [x, w])
    assert (gx[[1, 3]] == 0).all() and gw.isfinite().all()
    kept = [0, 2, 4]
    expected = torch.autograd.grad(F.cross_entropy(x[kept] @ w.T, target[kept]), [x, w])
    assert_close([gx, gw], list(expected))


@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 4])
def test_any_label_may_be_the_ignored_one(ignore_index, seed):
    x, w = torch.randn(6, 4, dtype=F64), torch.randn(5, 4, dtype=F64)
    target = torch.tensor([0, 1, 4, ignore_index, 0, 3])
    for reduction in ("mean", "sum", "none"):
        expected = F.cross_entropy(x @ w.T, target, ignore_index=ignore_index, reduction=reduction)
        assert_close(ops.cross_entropy(x, w, target, ignore_index=ignore_index, reduction=reduction), expected)


@pytest.mark.parametrize("looks", [True, False])
def test_all_rows_ignored(looks, looking, seed):
    looking(looks)
    x, w = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    target = torch.full((5,), -100)
    assert ops.cross_entropy(x, w, target).isnan()
    total = ops.cross_entropy(x, w, target, reduction="sum")
    assert total == 0
    assert all((g == 0).all() for g in torch.autograd.grad(total, [x, w]))
    assert all((g == 0).all() for g in torch.autograd.grad(ops.cross_entropy(x, w, target), [x, w]))
    for weights in (torch.rand(5), torch.full((5,), NAN)):
        loss = ops.cross_entropy(x, w, target, token_weights=weights.requires_grad_())
        grads = torch.autograd.grad(loss, [x, w, weights])
        assert loss.isnan() and all((g == 0).all() for g in grads)


def test_where_labels_are_not_looked_at_the_loss_is_the_same_and_bad_ones_are_nan(looking, seed):
    looking(False)
    case = CASES["cross_entropy-mean-bias-ignore"]
    assert_equal_with_gradients(case, case.inputs(59, 111, 7))
    x, w = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    target = torch.tensor([3, 7, -1, 2**40, -100])
    loss = ops.cross_entropy(x, w, target, reduction="none")
    assert loss.isnan().tolist() == [False, True, True, True, False]
    assert ops.cross_entropy(x, w, target).isnan() and ops.cross_entropy(x, w, target, reduction="sum").isnan()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_labels_of_any_integer_type(dtype, seed):
    x, w, target = torch.randn(6, 4), torch.randn(5, 4), torch.tensor([0, 1, 4, 2, 0, 3])
    assert_close(ops.cross_entropy(x, w, target.to(dtype)), F.cross_entropy(x @ w.T, target))


def test_given_rows_need_not_be_distributions(seed):
    x, w, p = torch.randn(6, 4, dtype=F64), torch.randn(5, 4, dtype=F64), torch.randn(6, 5, dtype=F64)
    assert_close(ops.cross_entropy_given(x, w, p), F.cross_entropy(x @ w.T, p))


def test_a_one_hot_distribution_is_a_label(seed):
    x, w, target = torch.randn(6, 4, dtype=F64), torch.randn(5, 4, dtype=F64), torch.tensor([0, 1, 4, 2, 0, 3])
    hot = F.one_hot(target, 5).double()
    assert_close(ops.cross_entropy_given(x, w, hot), ops.cross_entropy(x, w, target))


def test_cross_entropy_with_oneself_is_the_entropy(seed):
    p, c = torch.randn(6, 4, dtype=F64), torch.randn(9, 4, dtype=F64)
    assert_close(ops.cross_entropy_distributions(p, c, p, c, reduction="none"), ops.entropy(p, c))


@pytest.mark.parametrize("n", [1, 2, 59, 2049])
def test_entropy_of_uniform_and_of_peaked_rows(n):
    w = torch.eye(n)
    uniform = torch.zeros(2, n, requires_grad=True)
    h = ops.entropy(uniform, w)
    assert_close(h, torch.full((2,), math.log(n)))
    assert_close(torch.autograd.grad(h.sum(), uniform)[0], torch.zeros(2, n), atol=1e-6, rtol=0)
    peaked = (1e4 * torch.eye(n)[:2]).requires_grad_()
    h = ops.entropy(peaked, w)
    assert (h == 0).all()
    assert (torch.autograd.grad(h.sum(), peaked)[0] == 0).all()


def test_entropy_keeps_its_digits_when_all_logits_are_far_from_zero(seed):
    x, w = torch.randn(64, 8), torch.randn(400, 8) * 0.3
    x[:, 0], w[:, 0] = 100.0, 10.0  # every logit is about 1000
    case = CASES["entropy"]
    assert_error_rule(case, [x.requires_grad_(), w.requires_grad_()])


def test_classes_of_minus_infinite_bias_take_no_part(seed):
    x, w = torch.randn(5, 4, dtype=F64, requires_grad=True), torch.randn(9, 4, dtype=F64, requires_grad=True)
    bias = torch.zeros(9, dtype=F64)
    bias[[2, 5, 8]] = -INF
    kept = [0, 1, 3, 4, 6, 7]
    for got, expected in (
        (ops.entropy(x, w, bias=bias), ops.entropy(x, w[kept])),
        (ops.cross_entropy(x, w, torch.tensor([0, 1, 3, 0, 7]), bias=bias),
         ops.cross_entropy(x, w[kept], torch.tensor([0, 1, 2, 0, 5]))),
    ):  # fmt: skip
        assert_close(got, expected)
        assert_close(torch.autograd.grad(got.sum(), [x, w]), torch.autograd.grad(expected.sum(), [x, w]))
    everything = torch.full((9,), -INF, dtype=F64)
    assert (ops.entropy(x, w, bias=everything) == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(ops.entropy(x, w, bias=everything).sum(), [x, w]))
    index, log_prob = ops.sample(x, w, 1, bias=everything)
    assert (index == -1).all() and (log_prob == -INF).all()
    assert not torch.isin(
        torch.stack([ops.sample(x, w, s, bias=bias).index for s in range(20)]), torch.tensor([2, 5, 8])
    ).any()


def test_names_and_functions_are_the_same_activation(seed):
    x, p, q = torch.randn(5, 4), torch.randn(9, 4), torch.randn(9, 3)
    assert_close(ops.mlp(x, p, q, activation="gelu_tanh"), F.gelu(x @ p.T, approximate="tanh") @ q)
    assert_close(ops.mlp(x, p, q, activation=lambda s: s**3), (x @ p.T) ** 3 @ q)
    assert_close(ops.mlp(x, p, q), ops.mlp(x, p, q, activation="relu"))
    assert_close(ops.gated_mlp(x, p, p, q), ops.gated_mlp(x, p, p, q, activation=nn.SiLU()))


def test_contrastive_loss_looks_both_ways(seed):
    x, y, own = torch.randn(33, 4, dtype=F64), torch.randn(33, 4, dtype=F64), torch.arange(33)
    loss = ops.contrastive_loss(x, y, temperature=0.5, reduction="none")
    s = x @ y.T / 0.5
    there, back = (F.cross_entropy(t, own, reduction="none") for t in (s, s.T))
    assert not torch.allclose(there, back)
    assert_close(loss, (there + back) / 2)
    assert_close(ops.contrastive_loss(y, x, temperature=0.5, reduction="none"), loss)


def test_contrastive_batches_are_apart(seed):
    x, y = torch.randn(3, 7, 4), torch.randn(3, 7, 4)
    got = ops.contrastive_loss(x, y, normalize=True, reduction="none")
    assert_close(
        got,
        torch.stack([ops.contrastive_loss(a, b, normalize=True, reduction="none") for a, b in zip(x, y, strict=True)]),
    )


def test_a_zero_vector_is_normalized_as_torch_does(seed):
    case = CASES["contrastive-none-normalize"]
    x, y, t = case.inputs(5, 5, 3)
    with torch.no_grad():
        x[2] = 0
    got, expected = case.layer(x, y, t), case.dense(x, y, t)
    assert_close(got, expected)
    cotangent = torch.randn_like(expected)
    assert_close(grads(got, [x, y, t], cotangent), grads(expected, [x, y, t], cotangent))


@pytest.mark.parametrize("return_indices", [False, True])
def test_max_pooling_returns_what_is_asked(return_indices, seed):
    x, w = torch.randn(6, 4), torch.randn(9, 4)
    expected = (x @ w.T).max(-1)
    got = ops.max_pool_product(x, w, return_indices=return_indices)
    if return_indices:
        assert_close(tuple(got), tuple(expected))
        assert_close(got.indices, expected.indices)
    else:
        assert_close(got, expected.values)


# Sampling ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_classes_are_drawn_as_often_as_they_are_probable(temperature):
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -INF])
    count = 20_000
    index, log_prob = ops.sample(torch.ones(count, 1), torch.zeros(5, 1), 11, bias=logits, temperature=temperature)
    p = torch.softmax(logits / temperature, 0)
    found = torch.bincount(index, minlength=5) / count
    assert ((found - p).abs() <= 4.5 * (p * (1 - p) / count).sqrt()).all(), (found, p)  # 4.5 standard deviations
    assert_close(log_prob, p.log()[index])


def test_draws_depend_on_the_seed_and_on_nothing_else():
    x, w = torch.ones(700, 1), torch.zeros(1500, 1)
    index = ops.sample(x, w, 1).index
    assert (index == ops.sample(x, w, 1).index).all()
    assert (index == ops.sample(x, w, torch.tensor(1)).index).all()
    assert (index == ops.sample(x.view(7, 100, 1), w, 1).index.view(-1)).all()
    assert (index[:20] == ops.sample(x[:20], w, 1).index).all()
    assert (index == ops.sample(x, w, 2).index).float().mean() < 0.02
    assert (index[1:] == index[:-1]).float().mean() < 0.02
    with mr.use(engine="reference"):
        assert (index == ops.sample(x, w, 1).index).all()


def test_a_low_temperature_draws_the_largest(seed):
    x, w = torch.randn(50, 4), torch.randn(9, 4)
    assert (ops.sample(x, w, 3, temperature=1e-4).index == (x @ w.T).argmax(-1)).all()


# One pass, and no pair matrix ----------------------------------------------------------------------------------------


def large_calls(m: int, n: int) -> dict[str, Callable[[], Tensor]]:
    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape).requires_grad_()

    x, w, v, y, t = leaf(m, 4), leaf(n, 4), leaf(n, 4), leaf(m, 4), torch.tensor(0.7, requires_grad=True)
    probs = torch.rand(m, n, dtype=torch.float32)
    half = [
        torch.randn(m, 4).bfloat16().requires_grad_(),
        torch.randn(n, 4).bfloat16().requires_grad_(),
        probs.bfloat16(),
    ]
    return {
        "attention": lambda: ops.attention(x, w, v),
        "attention-causal": lambda: ops.attention(x, w, v, causal=True),
        "cross_entropy": lambda: ops.cross_entropy(x, w, labels(x, w, ignore=True)),
        "given": lambda: ops.cross_entropy_given(x, w, probs),
        "given-bf16": lambda: ops.cross_entropy_given(*half),
        "distributions": lambda: ops.cross_entropy_distributions(x, w, y, v),
        "entropy": lambda: ops.entropy(x, w),
        "mlp": lambda: ops.mlp(x, w, v, activation="gelu"),
        "gated_mlp": lambda: ops.gated_mlp(x, w, v, v),
        "sample": lambda: ops.sample(x, w, 3, temperature=t).log_prob,
        "max_pool_product": lambda: ops.max_pool_product(x, w),
        "contrastive": lambda: ops.contrastive_loss(x, y, temperature=t, normalize=True),
    }


class Largest(TorchDispatchMode):
    """The most elements that the memory of any operation's result holds."""

    def __init__(self, inputs: set[int]):
        super().__init__()
        self.elements, self.inputs = 0, inputs

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in self.inputs:
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.itemsize)
        return out


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", list(large_calls(1, 1)))
def test_no_tensor_comes_near_the_size_of_the_pairs(name, seed):
    m = n = 2500
    call = large_calls(m, n)[name]
    given = {t.untyped_storage().data_ptr() for t in _tensors(inspect.getclosurevars(call).nonlocals.values())}
    with Largest(given) as largest:
        call().sum().backward()
    assert 0 < largest.elements < m * n / 5, f"{largest.elements / (m * n):.2f} of the pair matrix"


def _tensors(values):
    for v in values:
        if isinstance(v, Tensor):
            yield v
        elif isinstance(v, list):
            yield from _tensors(v)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # torch 2.12
def test_a_16bit_distribution_is_not_raised_to_float32_whole(seed):
    """Inside torch's own sum, where the counter above does not see."""
    x, w = torch.randn(1000, 4).bfloat16(), torch.randn(3000, 4).bfloat16()
    probs = torch.rand(1000, 3000).bfloat16()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        ops.cross_entropy_given(x, w, probs)
    assert 0 < max(event.cpu_memory_usage for event in profile.events()) < probs.numel() * 4 / 2


@pytest.mark.parametrize("name", [n for n in large_calls(1, 1) if "causal" not in n])
def test_forward_visits_every_pair_once(name, seed):
    with mr.tally() as t:
        large_calls(130, 130)[name]()
    visits = {"cross_entropy": 87 / 130, "distributions": 2, "entropy": 2}.get(name, 1)  # see the next test
    assert t.pairs_computed == 130 * 130 * visits


def test_ignored_rows_are_not_visited_and_16_bits_need_no_first_pass(seed):
    x, w = torch.randn(130, 4), torch.randn(130, 4)
    for call, visits in (
        (lambda: ops.cross_entropy(x, w, torch.full((130,), -100), reduction="sum"), 0),
        (lambda: ops.entropy(x.bfloat16(), w.bfloat16()), 1),
        (lambda: ops.cross_entropy_distributions(*[t.bfloat16() for t in (x, w, x, w)]), 1),
    ):
        with mr.tally() as t:
            call()
        assert t.pairs_computed == visits * 130 * 130


# Bad inputs ----------------------------------------------------------------------------------------------------------


def test_labels_out_of_range_are_named_before_any_work():
    x, w = torch.randn(2, 3, 4), torch.randn(5, 4)
    target = torch.tensor([[0, 1, 4], [2, 5, -1]])
    with mr.tally() as t, pytest.raises(LabelError, match=r"label 5 at position \(1, 1\).*from 0 to 4.*ignore_index"):
        ops.cross_entropy(x, w, target)
    assert t.tiles == 0
    with pytest.raises(IndexError, match="label -1 at position 2 is"):
        ops.cross_entropy(x[0], w, torch.tensor([0, 1, -1]))
    with pytest.raises(LabelError, match=r"label 0 at position 0 is.*no classes"):
        ops.cross_entropy(x[0], w[:0], torch.tensor([0, 1, 1]))
    assert ops.cross_entropy(x[0], w, torch.tensor([0, 1, -1]), ignore_index=-1).isfinite()


A, W = torch.zeros(3, 4), torch.zeros(5, 4)
LABELS = torch.zeros(3, dtype=torch.int64)
MISTAKES = {
    "attention-features": (lambda: ops.attention(A, W[:, :3], W), ShapeError, "q has 4 features.*k has 3"),
    "attention-columns": (lambda: ops.attention(A, W, W[:3]), ShapeError, "k has 5 columns.*v has 3"),
    "attention-type": (lambda: ops.attention(A, W.double(), W), DTypeError, "k is float64"),
    "attention-no-tensor": (lambda: ops.attention(None, W, W), ArgumentError, "q is declared"),
    "attention-rank": (lambda: ops.attention(A[0], W, W), ShapeError, "q is declared"),
    "attention-batch": (lambda: ops.attention(A.expand(2, 3, 4), W.expand(3, 5, 4), W), ShapeError, "k, \\(3,\\)"),
    "attention-scale": (lambda: ops.attention(A, W, W, scale=torch.ones(2)), ShapeError, "scale is declared float"),
    "entropy-features": (lambda: ops.entropy(A, W.T), ShapeError, r"x \(3, 4\) and weight \(4, 5\).*\[V, D\]"),
    "entropy-type": (lambda: ops.entropy(A, W.bfloat16()), DTypeError, "x is float32, weight is bfloat16"),
    "entropy-device": (lambda: ops.entropy(A, W.to("meta")), mr.DeviceError, "x on cpu, weight on meta"),
    "entropy-weight": (lambda: ops.entropy(A, W[None]), ShapeError, r"weight has shape \(1, 5, 4\)"),
    "entropy-bias": (lambda: ops.entropy(A, W, bias=W[0]), ShapeError, "weight has 5 classes, but bias has 4"),
    "entropy-bias-rank": (lambda: ops.entropy(A, W, bias=W), ShapeError, r"bias has shape \(5, 4\)"),
    "entropy-no-tensor": (lambda: ops.entropy([1.0], W), ArgumentError, r"x was given \[1.0\] \(list\)"),
    "labels-float": (lambda: ops.cross_entropy(A, W, LABELS.float()), DTypeError, "floating probabilities"),
    "labels-bool": (lambda: ops.cross_entropy(A, W, LABELS.bool()), DTypeError, "target is bool"),
    "labels-shape": (lambda: ops.cross_entropy(A, W, LABELS[:2]), ShapeError, r"target has shape \(2,\)"),
    "labels-none": (lambda: ops.cross_entropy(A, W, None), ArgumentError, "target was given None"),
    "ignore-index": (lambda: ops.cross_entropy(A, W, LABELS, ignore_index=1.5), ArgumentError, "ignore_index"),
    "reduction": (
        lambda: ops.cross_entropy(A, W, LABELS, reduction="avg"),
        ArgumentError,
        "'avg'.*'mean', 'sum', 'none'",
    ),
    "reduction-given": (lambda: ops.cross_entropy_given(A, W, A @ W.T, reduction=None), ArgumentError, "None"),
    "reduction-two": (lambda: ops.cross_entropy_distributions(A, W, A, W, reduction=""), ArgumentError, "''"),
    "probs-shape": (lambda: ops.cross_entropy_given(A, W, A), ShapeError, r"probs has shape \(3, 4\).*\(3, 5\)"),
    "probs-type": (lambda: ops.cross_entropy_given(A, W, (A @ W.T).double()), DTypeError, "probs is float64"),
    "two-rows": (lambda: ops.cross_entropy_distributions(A, W, A[:2], W), ShapeError, "p has 3 rows, but q has 2"),
    "two-letters": (lambda: ops.cross_entropy_distributions(A, W, A, W[:, :2]), ShapeError, "q has 4 .*t has 2"),
    "activation-name": (lambda: ops.mlp(A, W, W, activation="gelo"), ArgumentError, "'gelo'. Did you mean 'gelu'"),
    "activation-kind": (lambda: ops.gated_mlp(A, W, W, W, activation=None), ArgumentError, "activation was given None"),
    "activation-unknown": (lambda: ops.mlp(A, W, W, activation=torch.i0), UnknownFunctionError, "i0"),
    "activation-inplace": (lambda: ops.mlp(A, W, W, activation=nn.ReLU(inplace=True)), TraceError, "in place"),
    "mlp-hidden": (lambda: ops.mlp(A, W, W[:2]), ShapeError, "p has 5 columns, but q has 2"),
    "gated-features": (lambda: ops.gated_mlp(A, W, W[:, :2], W), ShapeError, "x has 4 features.*up has 2"),
    "sample-seed": (lambda: ops.sample(A, W, 0.5), ArgumentError, "seed was given 0.5"),
    "sample-seed-size": (lambda: ops.sample(A, W, 2**64), ArgumentError, "64 bits"),
    "sample-temperature": (lambda: ops.sample(A, W, 1, temperature=0.0), ArgumentError, "temperature was given 0.0"),
    "pool-features": (lambda: ops.max_pool_product(A, W[:, 1:]), ShapeError, "x has 4 features.*w has 3"),
    "contrastive-count": (lambda: ops.contrastive_loss(A, W), ShapeError, "x has 3 vectors, but y has 5"),
    "contrastive-rank": (lambda: ops.contrastive_loss(A[0], A[0]), ShapeError, r"x has shape \(4,\)"),
    "contrastive-temperature": (lambda: ops.contrastive_loss(A, A, temperature=-1), ArgumentError, "above 0"),
    "contrastive-features": (lambda: ops.contrastive_loss(A, A[:, 1:]), ShapeError, "x has 4 features.*y has 3"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    call, error, message = MISTAKES[name]
    with mr.tally() as t, pytest.raises(error, match=f"(?s){message}"):
        call()
    assert t.tiles == 0


def test_no_columns():
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(0, 4, requires_grad=True)
    outputs = [
        (ops.attention(x, w, w), 0),
        (ops.mlp(x, w, w), 0),
        (ops.gated_mlp(x, w, w, w), 0),
        (ops.entropy(x, w), 0),
        (ops.entropy(x, w, bias=torch.zeros(0)), 0),
        (ops.max_pool_product(x, w), -INF),
        (ops.sample(x, w, 1).log_prob, -INF),
        (ops.cross_entropy_given(x, w, torch.zeros(3, 0), reduction="none"), NAN),  # -inf · 0, undefined as 0/0 is
        (ops.cross_entropy_distributions(x, w, x, w, reduction="none"), -INF),
    ]
    for out, value in outputs:
        assert_close(out, torch.full_like(out, value), equal_nan=True)
        if value == 0:
            assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), [x, w]))
    assert (ops.sample(x, w, 1).index == -1).all()
    assert (ops.max_pool_product(x, w, return_indices=True).indices == -1).all()
    assert ops.cross_entropy(x, w, torch.full((3,), -100), reduction="sum") == 0


def test_no_rows():
    x, w = torch.randn(0, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    for out in (
        ops.attention(x, w, w),
        ops.mlp(x, w, w),
        ops.gated_mlp(x, w, w, w),
        ops.entropy(x, w),
        ops.max_pool_product(x, w),
        ops.sample(x, w, 1).log_prob,
        ops.cross_entropy(x, w, none, reduction="none"),
        ops.cross_entropy_given(x, w, torch.zeros(0, 5), reduction="none"),
        ops.cross_entropy_distributions(x, w, x, w, reduction="none"),
        ops.contrastive_loss(x, x, reduction="none"),
    ):
        assert out.shape[0] == 0
        assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), [x, w], allow_unused=True) if g is not None)
    assert ops.cross_entropy(x, w, none).isnan() and ops.cross_entropy(x, w, none, reduction="sum") == 0
    assert ops.contrastive_loss(x, x).isnan()


def test_no_features():
    x, w, v = torch.randn(3, 0), torch.randn(5, 0), torch.randn(5, 4)
    assert_close(ops.attention(x, w, v), v.mean(0).expand(3, 4))
    assert_close(ops.entropy(x, w), torch.full((3,), math.log(5)))
    assert_close(ops.cross_entropy(x, w, LABELS), torch.tensor(math.log(5)))
    assert_close(ops.mlp(x, w, v, activation="sigmoid"), 0.5 * v.sum(0).expand(3, 4))
    assert_close(ops.max_pool_product(x, w), torch.zeros(3))


ROWWISE = {
    "attention": lambda x, w: ops.attention(x, w, w),
    "attention-causal": lambda x, w: ops.attention(x, w, w, causal=True),
    "cross_entropy": lambda x, w: ops.cross_entropy(x, w, labels(x, w), reduction="none"),
    "given": lambda x, w: ops.cross_entropy_given(
        x, w, torch.ones(len(x), len(w), dtype=x.dtype) / len(w), reduction="none"
    ),
    "distributions": lambda x, w: ops.cross_entropy_distributions(x, w, x, w, reduction="none"),
    "entropy": lambda x, w: ops.entropy(x, w),
    "entropy-bias": lambda x, w: ops.entropy(x, w, bias=torch.ones(len(w), dtype=x.dtype)),
    "mlp": lambda x, w: ops.mlp(x, w, w, activation="gelu"),
    "gated_mlp": lambda x, w: ops.gated_mlp(x, w, w, w),
    "sample": lambda x, w: ops.sample(x, w, 3).log_prob,
    "max_pool_product": lambda x, w: ops.max_pool_product(x, w),
}


@pytest.mark.parametrize("name", ROWWISE)
def test_nan_stays_in_its_row_and_a_nan_column_is_seen_by_all(name, seed):
    x, w = torch.randn(37, 4), torch.randn(23, 4)
    clean = ROWWISE[name](x, w)
    bad = x.clone()
    bad[5, 1] = NAN
    out = ROWWISE[name](bad, w)
    rest = [i for i in range(37) if i != 5]
    assert out[5].isnan().all()
    assert_close(out[rest], clean[rest])
    bad = w.clone()
    bad[0, 1] = NAN
    assert ROWWISE[name](x, bad).isnan().reshape(37, -1).any(1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", [n for n in ROWWISE if "mlp" not in n])
def test_scores_of_a_hundred_thousand_stay_finite(name, dtype, seed):
    x = (torch.randn(37, 4) * 300).to(dtype).requires_grad_()
    w = (torch.randn(23, 4) * 300).to(dtype).requires_grad_()
    out = ROWWISE[name](x, w)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), [x, w]))


@pytest.mark.parametrize("name", ROWWISE)
def test_strides_offsets_and_expanded_gradients_do_not_matter(name, seed):
    x, w = torch.randn(37, 4, dtype=F64), torch.randn(23, 4, dtype=F64)
    cotangent = torch.randn(1, dtype=F64).expand_as(ROWWISE[name](x, w))
    odd_x = torch.randn(4, 37 * 2 + 1, dtype=F64)[:, 1::2].T.copy_(x).requires_grad_()  # transposed, strided, offset
    odd_w = torch.randn(23 * 4 + 1, dtype=F64)[1:].view(23, 4).copy_(w).requires_grad_()
    x.requires_grad_(), w.requires_grad_()
    got, expected = ROWWISE[name](odd_x, odd_w), ROWWISE[name](x, w)
    assert_close(got, expected)
    assert_close(
        torch.autograd.grad(got, [odd_x, odd_w], cotangent), torch.autograd.grad(expected, [x, w], cotangent.clone())
    )


def test_batches_that_are_expanded_get_the_sum_of_their_gradients(seed):
    q, k, v = torch.randn(2, 3, 5, 4, dtype=F64), torch.randn(7, 4, dtype=F64), torch.randn(7, 4, dtype=F64)
    k.requires_grad_(), v.requires_grad_()
    got = ops.attention(q, k.expand(2, 3, 7, 4), v.expand(2, 3, 7, 4))
    expected = dense_attention(q, k, v)
    assert_close(got, expected)
    assert_close(torch.autograd.grad(got.sum(), [k, v]), torch.autograd.grad(expected.sum(), [k, v]))


def test_inputs_are_left_as_they_were(seed):
    for name in ROWWISE:
        x, w = torch.randn(37, 4, requires_grad=True), torch.randn(23, 4, requires_grad=True)
        before = x.detach().clone(), w.detach().clone()
        ROWWISE[name](x, w).sum().backward()
        assert (x == before[0]).all() and (w == before[1]).all()


def test_public_names_are_sorted_and_documented_with_an_example():
    assert ops.__all__ == sorted(ops.__all__)
    for name in ops.__all__:
        text = " ".join(getattr(ops, name).__doc__.split())
        if name.islower():
            assert ">>>" in text and "without ever allocating" in text and "Raises" in text, name


# On a GPU ------------------------------------------------------------------------------------------------------------

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_gpu(test: Callable) -> Callable:
    for mark in gpu:
        test = mark(test)
    return test


@on_gpu
@pytest.mark.parametrize("name", MAIN)
def test_values_and_gradients_on_a_gpu(name, seed):
    with torch.device("cuda"):
        assert_equal_with_gradients(CASES[name], CASES[name].inputs(59, 111, 7))


@on_gpu
def test_draws_are_the_same_on_a_gpu(seed):
    x, w = torch.randn(100, 8), torch.randn(300, 8)
    assert (ops.sample(x, w, 5).index == ops.sample(x.cuda(), w.cuda(), 5).index.cpu()).float().mean() > 0.97


@on_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_cross_entropy_on_a_gpu_does_not_wait_for_the_labels(seed):
    x = torch.randn(64, 32, device="cuda", requires_grad=True)
    w = torch.randn(500, 32, device="cuda", requires_grad=True)
    target = labels(x, w, ignore=True)
    ops.cross_entropy(x, w, target).backward()  # first call: trace and warm up
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = ops.cross_entropy(x, w, target)
        found = torch.autograd.grad(loss, [x, w])
        bad = ops.cross_entropy(x, w, torch.where(target == 7, 500, target), reduction="none")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = F.cross_entropy(x @ w.T, target)
    assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    assert_close(found, torch.autograd.grad(expected, [x, w]), rtol=1e-3, atol=1e-3)
    assert bad.isnan().sum() == (target == 7).sum() > 0
