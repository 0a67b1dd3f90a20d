"""``explain`` of the ready-made layers: what their ops would run, with nothing computed."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import ops

Q, K, V = torch.randn(2, 8, 4), torch.randn(2, 9, 4), torch.randn(2, 9, 3)
X, W, T = torch.randn(8, 40), torch.randn(50, 40), torch.arange(8)


@pytest.mark.parametrize(
    ("layer", "args", "sizes"),
    [
        (ops.attention, (Q, K, V), (8, 9)),
        (ops.linear_cross_entropy, (X, W, T), (8, 50)),
        (ops.knn, (X.numpy(), W.numpy(), 3), (8, 50)),
        (ops.linear_sample, (X, W, 7), (8, 50)),
        (ops.mlp, (*(t.to("meta") for t in (X, W, W)),), (8, 50)),
    ],
)
def test_the_op_of_a_layer_is_explained(layer, args, sizes):
    layer(*args)  # its plans are cached
    text = layer.explain(*args)
    assert text.startswith(f"{layer.__name__} calls 1 op\n")
    (call,) = text.as_dict()["calls"]
    assert (call["rows"], call["cols"], call["times"]) == (*sizes, 1)
    assert "predicted, forward and backward" in text
    assert "predicted, forward (" in layer.explain(*args, backward=False)


def test_nothing_is_computed():
    tensors = [torch.full_like(t, torch.nan).requires_grad_() for t in (Q, K, V)]
    with mr.tally() as tiles:
        ops.attention.explain(*tensors)
    assert tiles.computed == 0 and all(t.grad is None for t in tensors)


def test_wide_losses_name_the_gradient_taken_in_the_forward():
    x, w = torch.randn(64, 512, requires_grad=True), torch.randn(300, 512)
    assert "(by op.total)" in ops.linear_cross_entropy.explain(x, w, torch.zeros(64, dtype=torch.long))


def test_equal_calls_are_counted():
    text = ops.sinkhorn.explain(torch.rand(5, 3), torch.rand(6, 3), eps=0.1, iterations=4)
    assert sum(call["times"] for call in text.as_dict()["calls"]) >= 8 and "calls like this one)" in text


@pytest.mark.parametrize("domain", [mr.edges(torch.arange(9), torch.arange(8)), mr.jagged(torch.tensor([0, 3, 8]))])
def test_listed_columns_are_counted(domain):
    text = ops.attention.explain(Q[0], K[0, :8], V[0, :8], cols=domain)
    assert f"over {domain.kind}: " in text


def test_the_layer_can_be_measured():
    text = ops.attention.explain(Q, K, V, measure=True)
    assert text.as_dict()["measured"]["seconds"] > 0 and "measured: " in text


def test_mistakes_are_those_of_the_call():
    with pytest.raises(mr.ShapeError, match="features"):
        ops.attention.explain(Q, K[..., :3], V)
    ops.attention(Q, K, V)  # and the next call computes again
    assert ops.attention(Q, K, V).abs().sum() > 0


@pytest.mark.parametrize(
    "domain",
    [
        mr.edges(torch.arange(9), torch.arange(8)),
        mr.blocks(torch.zeros(2, 1, dtype=torch.int32), rows=4, cols=4),
    ],
)
def test_lists_without_numbers(domain):
    """What they have room for is counted."""

    @mr.op
    def attention(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"]):
        return mr.softmax_mean(q @ k, v)

    given = [t[0, :8].to("meta") for t in (Q, K, V)]
    listed = attention.explain(*given, cols=domain.to("meta")).as_dict()["listed"]
    assert listed == attention.explain(*(t[0, :8] for t in (Q, K, V)), cols=domain).as_dict()["listed"]
