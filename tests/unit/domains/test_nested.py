"""Jagged nested tensors go into ops and layers, and come out, as they are."""

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce import ops

F64 = torch.float64
ROWS, COLS = torch.tensor([0, 3, 3, 8]), torch.tensor([0, 4, 5, 7])


def nest(values, offsets, dim=1):
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=dim)


@mr.op
def causal(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"]):
    return mr.softmax_mean(torch.where(mr.col_index <= mr.row_index, q @ k, -torch.inf), v)


@mr.op
def both_ways(x: mr.Row["d"], y: mr.Col["d"], w: mr.Row):
    s = x @ y
    return {"rows": mr.sum(s) * w, "cols": mr.sum(s * w, over="rows")}


def test_ops_and_gradients():
    q, k, v = (torch.randn(n, 3, dtype=F64, requires_grad=True) for n in (8, 7, 7))
    y = causal(nest(q, ROWS), nest(k, COLS), nest(v, COLS))
    assert y.is_nested and y.offsets() is ROWS
    packed = causal(q, k, v, cols=mr.jagged(ROWS, COLS))
    assert torch.equal(y.values(), packed)
    g = torch.randn_like(packed)
    for a, b in zip(
        torch.autograd.grad(y.values(), (q, k, v), g), torch.autograd.grad(packed, (q, k, v), g), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_gradients_of_nested_leaves():
    """Autograd runs in the name of the nested tensor, which switches off what symbols need: also where the gradient
    program is new."""

    @mr.op
    def total(q: mr.Row["f"], k: mr.Col["f"]):
        s = q @ k
        return mr.sum(torch.exp(s - mr.logsumexp(s)) * torch.tanh(s))

    x = torch.nested.nested_tensor([torch.randn(n, 3, dtype=F64) for n in (4, 1, 6)], layout=torch.jagged)
    x.requires_grad_()
    (found,) = torch.autograd.grad(total(x, x).values().sum(), x)
    assert found.is_nested
    for part, mine in zip(x.detach().unbind(), found.unbind(), strict=True):
        part.requires_grad_()
        s = part @ part.T
        (expected,) = torch.autograd.grad((torch.softmax(s, -1) * torch.tanh(s)).sum(), part)
        torch.testing.assert_close(mine, expected)


def test_results_of_rows_and_of_columns():
    x, y, w = torch.randn(8, 2), torch.randn(7, 2), torch.randn(8)
    found = both_ways(nest(x, ROWS), nest(y, COLS), nest(w, ROWS))
    packed = both_ways(x, y, w, cols=mr.jagged(ROWS, COLS))
    assert found["rows"].offsets() is ROWS and found["cols"].offsets() is COLS
    assert all(torch.equal(found[n].values(), packed[n]) for n in packed)


class Sums(mr.Monoid):
    s: mr.Scalar = 0.0

    def combine(a, b):
        return Sums(s=a.s + b.s)


@mr.op
def sums(x: mr.Row["d"], y: mr.Col["d"]):
    return mr.reduce(Sums, s=x @ y)


def test_results_of_columns_are_theirs_where_there_are_as_many_rows():
    x, y, w, ends = torch.randn(8, 2), torch.randn(8, 2), torch.randn(8), torch.tensor([0, 1, 6, 8])
    found = both_ways(nest(x, ROWS), nest(y, ends), nest(w, ROWS))
    assert found["rows"].offsets() is ROWS and found["cols"].offsets() is ends
    shared = both_ways(nest(x, ROWS), y, nest(w, ROWS))  # columns that all sequences share
    assert torch.equal(shared["cols"], both_ways(x, y, w)["cols"]) and shared["rows"].is_nested
    statistics = ops.attention_statistics(nest(x, ROWS), nest(y, ends))
    assert statistics.column_sums.offsets() is ends and statistics.lse.offsets() is ROWS
    assert sums(nest(x, ROWS), nest(y, ends)).s.offsets() is ROWS


def test_attention_with_heads_is_torch_attention():
    lengths = torch.tensor([3, 1, 5])
    parts = [torch.randn(n, 2, 4, dtype=F64) for n in lengths.tolist()]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)  # [batch, heads, j, features]
    y = ops.attention(x, x, x, is_causal=True)
    assert y.shape == x.shape
    for part, mine in zip(parts, y.transpose(1, 2).unbind(), strict=True):
        p = part.transpose(0, 1)
        torch.testing.assert_close(mine.transpose(0, 1), F.scaled_dot_product_attention(p, p, p, is_causal=True))


def test_rows_alone():
    x, w, target = torch.randn(8, 4), torch.randn(9, 4), torch.randint(9, (8,))
    y = ops.mlp(nest(x, ROWS), w, w)
    assert y.is_nested and torch.equal(y.values(), ops.mlp(x, w, w))
    each = ops.linear_cross_entropy(nest(x, ROWS), w, nest(target, ROWS), reduction="none")
    assert torch.equal(each.values(), ops.linear_cross_entropy(x, w, target, reduction="none"))
    assert not ops.linear_cross_entropy(nest(x, ROWS), w, nest(target, ROWS)).is_nested


def test_under_compile():
    compiled = torch.compile(both_ways, backend="aot_eager", fullgraph=True)
    x, y = nest(torch.randn(8, 3), ROWS), nest(torch.randn(8, 3), torch.tensor([0, 1, 6, 8]))
    w = nest(torch.randn(8), ROWS)
    found, expected = compiled(x, y, w), both_ways(x, y, w)
    for name, values in expected.items():
        torch.testing.assert_close(found[name].values(), values.values())
        assert torch.equal(found[name].offsets(), values.offsets())


@pytest.mark.parametrize(
    "call,error,words",
    [
        (lambda a, b: causal(a, b, nest(torch.randn(7, 3), COLS.clone())), mr.ShapeError, "same offsets"),
        (lambda a, b: causal(a.values(), b, b), mr.ArgumentError, "the rows are not"),
        (lambda a, b: causal(a, b, b, cols=mr.jagged(ROWS, COLS)), mr.ArgumentError, "without cols="),
        (lambda a, b: ops.attention(a, b, b, cols=mr.jagged(ROWS, COLS)), mr.ArgumentError, "beside cols="),
        (
            lambda a, b: ops.linear_cross_entropy(a, torch.eye(3), nest(torch.zeros(8).long(), ROWS), shift=1),
            mr.ArgumentError,
            "shift was given beside nested",
        ),
        (lambda a, b: ops.knn(a, b, 1), mr.ArgumentError, "Give dense columns"),
        (lambda a, b: causal(a, torch.randn(3, 7, 3), torch.randn(3, 7, 3)), mr.ShapeError, "that all sequences share"),
    ],
)  # fmt: skip
def test_mistakes(call, error, words):
    with pytest.raises(error) as caught:
        call(nest(torch.randn(8, 3), ROWS), nest(torch.randn(7, 3), COLS))
    assert words in str(caught.value)
