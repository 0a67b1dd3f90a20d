"""Messages that help: what was given, what to write instead, and the line of the body that did it."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce import Col, Row

X, Y = torch.ones(3, 4), torch.ones(5, 4)


def message(body, error=mr.MonoidReduceError, *args, **kwargs):
    with pytest.raises(error) as caught:
        mr.op(body)(*(args or (X, Y)), **kwargs)
    return str(caught.value)


def body_of(f):
    def body(x: Row["d"], y: Col["d"]):
        return mr.sum(f(x, y))  # here

    return body


NUMPY = {
    "exp": (lambda x, y: np.exp(x @ y), "torch.exp"),
    "maximum": (lambda x, y: np.maximum(x @ y, 0.0), "torch.maximum"),
    "cbrt": (lambda x, y: np.cbrt(x @ y), "torch.pow"),
    "where": (lambda x, y: np.where(x @ y > 0, x @ y, 0.0), "torch.where"),
    "sum": (lambda x, y: np.sum(x @ y), "mr.sum"),
    "max": (lambda x, y: np.max(x @ y), "mr.max"),
    "concatenate": (lambda x, y: np.concatenate([x, y]), "x @ y + u @ v"),
    "asarray": (lambda x, y: np.asarray(x @ y), "torch's functions"),
    "array": (lambda x, y: np.zeros((2000, 3)) * (x @ y), "float64[2000, 3]"),
    "vector": (lambda x, y: (x @ y) * np.zeros(70), "float64[70]"),
}


@pytest.mark.parametrize("name", NUMPY)
def test_numpy(name):
    f, advice = NUMPY[name]
    said, line = message(body_of(f), mr.TraceError).split("\n")
    assert advice in said and "lambda x, y: " in line


ZERO = {
    "//": lambda x, y: x @ y + mr.row_index // 0,
    "%": lambda x, y: x @ y + mr.col_index % 0,
    "fmod": lambda x, y: x @ y + torch.fmod(mr.col_index, 0),
    "trunc": lambda x, y: x @ y + torch.div(mr.col_index, 0, rounding_mode="trunc"),
}


@pytest.mark.parametrize("name", ZERO)
def test_whole_numbers_divided_by_zero(name):
    said, line = message(body_of(ZERO[name]), mr.TraceError).split("\n")
    assert "a whole number is divided by 0" in said and "lambda x, y: " in line


def test_floats_divided_by_zero():
    assert mr.op(body_of(lambda x, y: x @ y // 0))(X, Y).tolist() == [torch.inf] * 3


def test_numbers_of_numpy_are_numbers():
    @mr.op
    def layer(x: Row["d"], y: Col["d"]):
        return mr.sum(np.float32(2) * (x @ y) + np.int64(1)) - np.float64(0.5) * (np.float64(1) < mr.sum(x @ y))

    assert layer(X, Y)[0].item() == 44.5


INSTEAD = {
    "cdist": (lambda x, y: torch.cdist(x, y), "(x - y).norm()"),
    "dropout": (lambda x, y: F.dropout(x @ y, 0.1), "mr.dropout(x, p, seed)"),
    "shape": (lambda x, y: x @ y * x.shape[-1] ** -0.5, "scale: float"),
    "size": (lambda x, y: sum(x @ y for _ in range(mr.num_cols)), "n: int"),
    "zip": (lambda x, y: sum(abs(a - b) for a, b in zip(x, y, strict=True)), "(x - y).abs().sum()"),
    "new axis": (lambda x, y: x[:, None] - y, "x - y"),
    "table": (lambda x, y: x[mr.row_index - mr.col_index], "mr.lookup(table, index)"),
    "einsum": (lambda x, y: torch.einsum("d,d->", x, y), "x @ y"),
    "cat": (lambda x, y: torch.cat([x, y]), "x @ y + u @ v"),
    "linear": (lambda x, y: F.linear(x, y), "before the call"),
    "median": (lambda x, y: torch.median(x @ y), "mr.topk"),
    "cumsum": (lambda x, y: torch.cumsum(x @ y, 0), "mr.col_index <= mr.row_index"),
    "softmax": (lambda x, y: torch.softmax(x @ y, -1), "mr.softmax_mean(logit, value)"),
    "log_softmax": (lambda x, y: F.log_softmax(x @ y, dim=-1), "s - mr.logsumexp(s)"),
    "logsumexp": (lambda x, y: torch.logsumexp(x @ y, -1), "mr.logsumexp"),
    "norm": (lambda x, y: torch.norm(x, y), "mr.sqdist(x, y)"),
    "mm": (lambda x, y: torch.mm(x, y), "x @ y"),
    "bmm": (lambda x, y: x.bmm(y), "x @ y"),
    "max": (lambda x, y: torch.max(x @ y), "mr.max"),
    "sdpa": (lambda x, y: F.scaled_dot_product_attention(x, y, y), "mr.softmax_mean"),
    "tril": (lambda x, y: torch.tril(x @ y), "mr.col_index <= mr.row_index"),
    "cross_entropy": (lambda x, y: F.cross_entropy(x @ y, x), "mr.col_index == target"),
    "gather": (lambda x, y: torch.gather(y, 0, x), "mr.col_index == i"),
}


@pytest.mark.parametrize("name", INSTEAD)
def test_what_to_write_instead(name):
    f, advice = INSTEAD[name]
    said, line = message(body_of(f), mr.TraceError).split("\n")
    assert advice in said and "lambda x, y: " in line and "Did you mean" not in said


def test_the_distance_that_is_offered_has_torchs_gradient_at_equal_points():
    z = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    distances = mr.op(body_of(lambda x, y: (x - y).norm()))
    (ours,) = torch.autograd.grad(distances(z, z).sum(), z)
    (dense,) = torch.autograd.grad(torch.cdist(z, z).sum(), z)
    torch.testing.assert_close(ours, dense)


def test_declarations_and_engines_by_their_names():
    with pytest.raises(mr.DeclarationError, match=r'Write Row\["f"\]'):
        Row("d")
    with pytest.raises(mr.DTypeError, match=r"x is float32\[3, 2\], sparse"):
        mr.op(body_of(lambda x, y: x @ y))(X[:, :2].float().to_sparse(), Y[:, :2].float())

    def reads(x: Row["d"], y: Col["d"], t: mr.Table["n"]):
        return mr.sum(mr.lookup(t, mr.row_index))

    assert repr(mr.op(reads)) == '<op reads(x: Row["d"], y: Col["d"], t: Table["n"])>'
    with pytest.raises(mr.EngineError, match=r"flash, .* schedules"), mr.use(engine="flash"):
        pass
    with pytest.raises(mr.ArgumentError, match=r"mr\.blocks\.from_block_mask"):
        mr.op(reads)(X, Y, torch.ones(3), cols=X)
    with pytest.raises(mr.ColumnListError, match="cumsum"):
        mr.jagged(torch.tensor([2, 3])).check(5, 5)
    with pytest.raises(mr.ShapeError, match="truth value for each block"):
        mr.blocks.from_mask(torch.ones(300, 300, dtype=torch.bool)).check(300, 300)


def test_no_name_is_offered_that_only_looks_a_little_alike():
    text = message(body_of(lambda x, y: torch.i0(x @ y)), mr.UnknownFunctionError)
    assert "Did you mean" not in text.split("\n")[0]


def test_formats():
    text = message(body_of(lambda x, y: (f"{x @ y:.3f}", x @ y)[1]), mr.TraceError)
    assert "'.3f'" in text and "dot(x, y)" in text and "lambda x, y" in text

    @mr.op
    def shows(x: Row["d"], y: Col["d"]):
        assert f"{x @ y}" == "<number per pair: dot(x, y)>"
        return mr.sum(x @ y)

    assert shows(X, Y).shape == (3,)


@pytest.mark.parametrize("word", ["dim", "axis", "keepdim", "dtype"])
def test_keywords_that_torch_has(word):
    def body(x: Row["d"], y: Col["d"]):
        s = x @ y
        return mr.sum(s, **{word: 1})

    text = message(body, mr.ArgumentError)
    assert f"mr.sum has no keyword '{word}'" in text and "return mr.sum(s, **{word: 1})" in text
    assert "over" in text


def test_an_axis_by_position():
    text = message(body_of(lambda x, y: mr.max(x @ y, -1)), mr.ArgumentError)
    assert 'over="rows"' in text and "mr.max(x, over='cols')" in text


def local(q: Row["f"], k: Col["f"], window: int, scale: float = 1.0):
    return mr.sum(torch.where((mr.row_index - mr.col_index).abs() <= window, q @ k, 0.0)) * scale


def test_keywords_that_an_op_has_not():
    text = message(local, mr.ArgumentError, X, Y, windw=3)
    assert "unknown keyword 'windw', did you mean 'window'?" in text
    assert "unknown keyword 'colour'." in message(local, mr.ArgumentError, X, Y, window=3, colour=1)
    with pytest.raises(mr.ArgumentError, match="unknown keyword 'windw', did you mean 'window'"):
        mr.op(local).stream(X, windw=3)


def never_reduced(x: Row["d"], y: Col["d"]):
    s = x @ y
    del s

    return x * 2  # here


def pair_returned(x: Row["d"], y: Col["d"]):
    total = mr.sum(x @ y)
    if total is None:
        return total
    return x @ y, total  # here


def word_returned(x: Row["d"], y: Col["d"]):
    total = mr.sum(x @ y)
    return {"total": total, "name": "total"}  # here


def nothing_returned(x: Row["d"], y: Col["d"]):
    for _ in range(2):
        pass
    mr.sum(x @ y)  # here


@pytest.mark.parametrize("body", [never_reduced, pair_returned, word_returned, nothing_returned])
def test_the_line_that_returns(body):
    text = message(body)
    assert text.endswith("# here") and f"in {body.__name__}, test_error_messages.py:" in text


def test_methods():
    class Model:
        def layer(self, x: Row["d"], y: Col["d"]):
            return mr.sum(x @ y)

    with pytest.raises(mr.DeclarationError, match=r"is a method.*staticmethod"):
        mr.op(Model.layer)
    assert mr.op(Model().layer)(X, Y)[0].item() == 20.0


def test_an_op_in_a_body():
    inner = mr.op(local)
    text = message(body_of(lambda x, y: inner(x, y, 3)), mr.ArgumentError)
    assert "inside the body of another" in text and "op.function" in text
    assert mr.op(lambda_free)(X, Y).shape == (3,)


def lambda_free(x: Row["d"], y: Col["d"]):
    return mr.op(local).function(x, y, 3)


def test_arrays_are_shown_by_type_and_shape():
    large = np.zeros((2_000_000, 3), dtype=np.float32)
    text = message(never_reduced, mr.ShapeError, large, Y)
    assert text.count("float32[2000000, 3]") == 1 and "0." not in text and len(text) < 400
    text = message(never_reduced, mr.ArgumentError, [[0.0] * 4] * 1000, Y)
    assert "a list of 1000" in text and len(text) < 400
    text = message(local, mr.ShapeError, X, Y, window=torch.zeros(900))
    assert "tensor(" not in text and "(900,)" in text


FIXED = [
    (
        lambda s, k: mr.topk(s, k).values,
        mr.ArgumentError,
        "topk was given k = ",
        [True, 0, -1, 2.0, math.nan, "3", None],
    ),
    (lambda s, k: mr.topk_mean(s, s, k), mr.ArgumentError, "topk_mean was given k = ", [[2], torch.tensor(2.0), 1j]),
    (lambda s, p: mr.sum(mr.dropout(s, p, 1)), mr.ArgumentError, "dropout was given p = ", [-0.1, 2, "0.5", None, 1j]),
    (lambda s, p: mr.sum(mr.dropout(s, p, 1)), mr.ArgumentError, "dropout was given p = ", [math.nan, torch.ones(2)]),
    (lambda s, m: mr.sum(s.div(2, rounding_mode=m)), mr.TraceError, "rounding_mode=", ["ceil", "", 1]),
    (lambda s, m: mr.sum(torch.div(s.int(), 2, rounding_mode=m)), mr.TraceError, "rounding_mode=", ["ceil", ""]),
]


@pytest.mark.parametrize(("body", "error", "match", "values"), FIXED)
def test_fixed_choices(body, error, match, values):
    for value in values:

        @mr.op
        def op(x: Row["d"], y: Col["d"]):
            return body(x @ y, value)  # noqa: B023  # called in this iteration

        with pytest.raises(error, match=match):
            op(torch.ones(2, 3), torch.ones(4, 3))


def test_choices_given_at_the_call():
    @mr.op
    def best(x: Row["d"], y: Col["d"], k: int):
        return mr.topk(x @ y, k).values

    @mr.op
    def dropped(x: Row["d"], y: Col["d"], p: float):
        return mr.sum(mr.dropout(x @ y, p, 1))

    x, y = torch.ones(2, 3), torch.ones(4, 3)
    with pytest.raises(mr.ArgumentError, match="k = True"):
        best(x, y, True)
    with pytest.raises(mr.ArgumentError, match="k = -3"):
        best(x, y, -3)
    with pytest.raises(mr.ArgumentError, match="p = nan"):
        dropped(x, y, math.nan)
    with pytest.raises(mr.ArgumentError, match="k was given True"):
        mr.ops.knn(x, y, True)


@pytest.mark.parametrize("name", ["any", "all", "count"])
def test_reductions_of_truth_by_their_own_names(name):
    @mr.op
    def op(x: Row["d"], y: Col["d"]):
        return getattr(mr, name)(x > y)

    with pytest.raises(mr.UnreducedError, match=f"mr.{name} folds"):
        op(torch.ones(2, 3), torch.ones(4, 3))
