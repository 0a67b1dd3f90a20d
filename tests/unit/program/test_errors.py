"""Every mistake a user can make with an op: the class of the error, its words, the user's line, and no work before it.

One row of a table is one mistake: what is called, the error it must raise, and what the message must hold (what was
given, what was expected, what to do).
"""

import inspect
import itertools
import math
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import monoidreduce as mr
from monoidreduce import Batch, Col, Row, errors

X, Y, V = torch.ones(5, 3), torch.ones(7, 3), torch.ones(7, 2)
R, C = torch.ones(5), torch.ones(7)


@dataclass
class Mistake:
    """``do`` must raise ``error``, whose message holds all of ``words``."""

    name: str
    do: Callable
    error: type[Exception]
    words: tuple[str, ...] = field(default_factory=tuple)


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k, v)


@mr.op
def tempered(q: Row["f"], k: Col["f"], t: float, bias: Row | None = None):
    return mr.sum((q @ k) * t)


@mr.op
def labelled(q: Row["f"], k: Col["f"], target: Row, slope: Batch):
    return mr.sum(torch.where(mr.col_index == target, q @ k, 0.0) * slope)


@mr.op
def fixed(q: Row[3], k: Col[3]):
    return mr.sum(q @ k)


# Arguments -----------------------------------------------------------------------------------------------------------

ARGUMENTS = [
    Mistake("missing", partial(attention, X, Y), mr.ArgumentError, ("'v'", 'v: Col["d"]')),
    Mistake("extra", partial(attention, X, Y, V, V), mr.ArgumentError, ("too many", 'q: Row["f"]')),
    Mistake("unknown name", partial(attention, X, Y, value=V), mr.ArgumentError, ("v", "declared as")),
    Mistake("list", partial(attention, [[1.0]], Y, V), mr.ArgumentError, ("q", 'Row["f"]', "list", "Give a tensor")),
    Mistake("none", partial(attention, None, Y, V), mr.ArgumentError, ("q", "None", "Give a tensor")),
    Mistake("text for a number", partial(tempered, X, Y, "hot"), mr.ArgumentError, ("t", "float", "'hot'", "number")),
    Mistake(
        "number for a tensor", partial(labelled, X, Y, 3, R[0]), mr.ArgumentError, ("target", "Row", "3", "tensor")
    ),
    Mistake("vector for a number", partial(tempered, X, Y, R), mr.ShapeError, ("t", "(5,)", "0-dim", "mr.Batch")),
    Mistake("rank", partial(attention, R, Y, V), mr.ShapeError, ("q", 'Row["f"]', "[..., M, f]", "(5,)", "axis")),
    Mistake("rank of a column", partial(attention, X, Y, C), mr.ShapeError, ("v", 'Col["d"]', "[..., N, d]", "(7,)")),
    Mistake(
        "rank of a number", partial(labelled, X, Y, R[0], R[0]), mr.ShapeError, ("target", "Row", "[..., M]", "()")
    ),
    Mistake("letters", partial(attention, X[:, :2], Y, V), mr.ShapeError, ("q has 2", '"f"', "k has 3", "two letters")),
    Mistake("rows", partial(labelled, X, Y, R[:4], R[0]), mr.ShapeError, ("q has 5 rows", "target has 4", "equal")),
    Mistake("columns", partial(attention, X, Y, V[:6]), mr.ShapeError, ("k has 7 columns", "v has 6", "equal")),
    Mistake("fixed size", partial(fixed, X[:, :2], Y), mr.ShapeError, ("q", "3 features", "has 2")),
    Mistake(
        "batch",
        partial(attention, X.expand(2, 5, 3), Y.expand(4, 7, 3), V),
        mr.ShapeError,
        ("batch", "k", "(4,)", "q", "(2,)", "equal or 1"),
    ),
    Mistake("dtypes", partial(attention, X.double(), Y, V), mr.DTypeError, ("q is float64", "k is float32", ".to(")),
    Mistake(
        "16 bits",
        partial(attention, X.half(), Y.bfloat16(), V.half()),
        mr.DTypeError,
        ("q is float16", "k is bfloat16"),
    ),
    Mistake("complex", partial(attention, X.to(torch.cfloat), Y, V), mr.DTypeError, ("q", "complex64", "real")),
    Mistake("sparse", partial(attention, X.to_sparse(), Y, V), mr.DTypeError, ("q", "dense")),
    Mistake(
        "8 bits",
        partial(attention, *(t.to(torch.float8_e4m3fn) for t in (X, Y, V))),
        mr.DTypeError,
        ("q", "float8_e4m3fn", "float32"),
    ),
    Mistake("devices", partial(attention, X, Y.to("meta"), V), mr.DeviceError, ("q on cpu", "k on meta", ".to(")),
]


# Declarations --------------------------------------------------------------------------------------------------------


def no_annotation(x):
    return mr.sum(x)


def a_tensor(x: torch.Tensor):
    return mr.sum(x)


def any_number_of(*xs: Row):
    return mr.sum(xs[0])


def any_keywords(**xs: Row):
    return mr.sum(xs["a"])


def two_sides(x: Row | Col):
    return mr.sum(x)


def unreadable(x: 'Row["f"] +'):  # noqa: F722
    return mr.sum(x)


DECLARATIONS = [
    Mistake("no annotation", lambda: mr.op(no_annotation), mr.DeclarationError, ("no_annotation", "x", 'Row["f"]')),
    Mistake("tensor", lambda: mr.op(a_tensor), mr.DeclarationError, ("a_tensor", "x", "torch.Tensor", 'Row["f"]')),
    Mistake("star", lambda: mr.op(any_number_of), mr.DeclarationError, ("any_number_of", "*xs", "Name every argument")),
    Mistake("stars", lambda: mr.op(any_keywords), mr.DeclarationError, ("any_keywords", "xs", "Name every argument")),
    Mistake("two sides", lambda: mr.op(two_sides), mr.DeclarationError, ("two_sides", "x", "Row", "Col")),
    Mistake("unreadable", lambda: mr.op(unreadable), mr.DeclarationError, ("unreadable", "x", 'Row["f"] +')),
    Mistake("a number", lambda: mr.op(3), mr.DeclarationError, ("op was given 3", "Give a function")),
    Mistake("a module", lambda: mr.op(torch.nn.ReLU()), mr.DeclarationError, ("ReLU", "Give a function")),
    Mistake("empty row", lambda: Row[0], mr.DeclarationError, ("Row[0]", 'Row["f"]')),
    Mistake("fraction", lambda: Col[1.5], mr.DeclarationError, ("Col[1.5]", 'Col["f"]')),
    Mistake("truth", lambda: Batch[True], mr.DeclarationError, ("Batch[True]", 'Batch["f"]')),
]


# Bodies: each makes one mistake, on the line that ends with "# here"

KEPT: list = []
COUNTER = itertools.count(1)
CAPTURED = torch.ones(7)


def data_dependent_if(x: Row["f"], y: Col["f"]):
    if (x @ y) > 0:  # here
        return mr.sum(x @ y)
    return mr.sum(-(x @ y))


def python_and(x: Row["f"], y: Col["f"]):
    near = (mr.row_index > 2) and (mr.col_index > 2)  # here
    return mr.sum(torch.where(near, x @ y, 0.0))


def python_or(x: Row["f"], y: Col["f"]):
    near = (mr.row_index > 2) or (mr.col_index > 2)  # here
    return mr.sum(torch.where(near, x @ y, 0.0))


def python_not(x: Row["f"], y: Col["f"]):
    return mr.sum(torch.where(not (x @ y > 0), 1.0, 0.0))  # here


def python_max(x: Row["f"], y: Col["f"]):
    return mr.sum(max(x @ y, 0.0))  # here


def python_float(x: Row["f"], y: Col["f"]):
    return mr.sum(float(x @ y))  # here


def python_int(x: Row["f"], y: Col["f"]):
    return mr.sum(int(x @ y))  # here


def math_function(x: Row["f"], y: Col["f"]):
    return mr.sum(math.exp(x @ y))  # here


def python_range(x: Row["f"], y: Col["f"]):
    return mr.sum(sum(x[k] * y[k] for k in range(x[0])))  # here


def iteration(x: Row["f"], y: Col["f"]):
    return mr.sum(sum(a * b for a, b in zip(x, y, strict=True)))  # here


def python_len(x: Row["f"], y: Col["f"]):
    return mr.sum((x @ y) / len(x))  # here


def python_in(x: Row["f"], y: Col["f"]):
    return mr.sum((x @ y) * (1 if 3 in x else 0))  # here


def numpy_array(x: Row["f"], y: Col["f"]):
    return mr.sum(np.asarray(x @ y))  # here


def in_place(x: Row["f"], y: Col["f"]):
    s = x @ y
    s.clamp_(min=0)  # here
    return mr.sum(s)


def in_place_flag(x: Row["f"], y: Col["f"]):
    return mr.sum(F.relu(x @ y, inplace=True))  # here


def out_argument(x: Row["f"], y: Col["f"]):
    return mr.sum(torch.exp(x @ y, out=CAPTURED))  # here


def assignment(x: Row["f"], y: Col["f"]):
    s = x @ y
    s[...] = 0  # here
    return mr.sum(s)


def unknown_function(x: Row["f"], y: Col["f"]):
    return mr.sum(torch.i0(x @ y))  # here


def misspelt_method(x: Row["f"], y: Col["f"]):
    return mr.sum((x @ y).sigmiod())  # here


def too_many_arguments(x: Row["f"], y: Col["f"]):
    return mr.sum((x @ y).tanh(3.0, 4.0))  # here


def captured_tensor(x: Row["f"], y: Col["f"]):
    return mr.sum((x @ y) * CAPTURED)  # here


def captured_number(x: Row["f"], y: Col["f"]):
    return mr.sum((x @ y) * torch.nn.Parameter(torch.tensor(2.0)))  # here


def string(x: Row["f"], y: Col["f"]):
    return mr.sum((x @ y) * "2")  # here


def shape_asked(x: Row["f"], y: Col["f"]):
    return mr.sum((x @ y) / x.shape[-1])  # here


def largest_values(x: Row["f"], y: Col["f"]):
    return mr.max(x @ y).values  # here


def transposed(x: Row["f"], y: Col["f"]):
    return mr.sum(x @ y.T)  # here


def item(x: Row["f"], y: Col["f"]):
    return mr.sum((x @ y) * x[0].item())  # here


def to_device(x: Row["f"], y: Col["f"]):
    return mr.sum((x @ y).to("cuda"))  # here


def slice_of_features(x: Row["f"], y: Col["f"]):
    return mr.sum(x[:2] @ y[:2])  # here


def feature_of_a_number(x: Row["f"], y: Col["f"]):
    return mr.sum((x @ y)[0])  # here


def random_constant(x: Row["f"], y: Col["f"]):
    return mr.sum((x @ y) * random.random())


def counter(x: Row["f"], y: Col["f"]):
    return mr.sum((x @ y) * next(COUNTER))


def leaked_symbol(x: Row["f"], y: Col["f"]):
    KEPT.append(x @ y)
    return mr.sum(KEPT[0])  # here


def two_letters(x: Row["f"], v: Col["d"]):
    return mr.sum(x @ v)  # here


def two_letters_elementwise(x: Row["f"], v: Col["d"]):
    return mr.sum((x * v).sum())  # here


def dot_of_numbers(r: Row, y: Col["f"]):
    return mr.sum(r @ y)  # here


def sum_of_a_number(x: Row["f"], y: Col["f"]):
    return mr.sum((x @ y).sum())  # here


def largest_feature_of_a_number(x: Row["f"], y: Col["f"]):
    return mr.sum((x @ y).amax())  # here


def no_reduction(x: Row["f"], y: Col["f"]):
    return x.sum()


def pair_returned(x: Row["f"], y: Col["f"]):
    return mr.sum(x @ y), x @ y


def nothing_returned(x: Row["f"], y: Col["f"]):
    mr.sum(x @ y)


def tensor_returned(x: Row["f"], y: Col["f"]):
    return mr.sum(x @ y), torch.ones(3)


def largest_vector(x: Row["f"], y: Col["f"]):
    return mr.max(x - y)  # here


def logsumexp_of_a_vector(x: Row["f"], y: Col["f"]):
    return mr.logsumexp(x * y)  # here


def topk_of_a_vector(x: Row["f"], y: Col["f"]):
    return mr.topk(x - y, 2).values  # here


def vector_as_a_logit(x: Row["f"], y: Col["f"]):
    return mr.softmax_mean(x - y, y)  # here


def variance_of_a_vector(x: Row["f"], y: Col["f"]):
    return mr.var(x - y)  # here


def too_few_asked(x: Row["f"], y: Col["f"]):
    return mr.topk(x @ y, 0).values  # here


def fractional_k(x: Row["f"], y: Col["f"]):
    return mr.topk(x @ y, 2.7).values  # here


def fractional_seed(x: Row["f"], y: Col["f"]):
    return mr.sample(x @ y, 1.5)  # here


def huge_seed(x: Row["f"], y: Col["f"]):
    return mr.sum(mr.dropout(x @ y, 0.5, 2**70))  # here


def rounded_to_digits(x: Row["f"], y: Col["f"]):
    return mr.sum(round(x @ y, 2))  # here


def torch_max(x: Row["f"], y: Col["f"]):
    return torch.max(x @ y)  # here


def torch_logsumexp(x: Row["f"], y: Col["f"]):
    return torch.logsumexp(x @ y, 1)  # here


def strange_axis(x: Row["f"], y: Col["f"]):
    return mr.sum(x @ y, over="x")  # here


def strange_axis_of_topk(x: Row["f"], y: Col["f"]):
    return mr.topk(x @ y, 2, over="columns").values  # here


def impossible_dropout(x: Row["f"], y: Col["f"]):
    return mr.sum(mr.dropout(x @ y, 1.5, 0))  # here


def negative_dropout(x: Row["f"], y: Col["f"]):
    return mr.sum(mr.dropout(x @ y, -0.1, 0))  # here


class Keeps(mr.Monoid):
    """The last element: not commutative."""

    commutative = False
    v: mr.Scalar = 0.0

    def combine(a, b):
        return b


class Steps(mr.Monoid):
    """Nothing in it has a derivative."""

    v: mr.Scalar = 0.0

    def combine(a, b):
        return Steps(v=torch.floor(a.v) + torch.floor(b.v))


class Loudest(mr.Monoid):
    """The larger in absolute value."""

    v: mr.Scalar = 0.0

    def combine(a, b):
        return Loudest(v=torch.where(torch.abs(a.v) >= torch.abs(b.v), a.v, b.v))


def wrong_fields(x: Row["f"], y: Col["f"]):
    return mr.reduce(mr.monoids.LogWSum, z=x @ y).z  # here


def number_for_a_vector(x: Row["f"], y: Col["f"]):
    return mr.reduce(mr.monoids.LogWSum, z=x @ y, v=x @ y).z  # here


def no_monoid(x: Row["f"], y: Col["f"]):
    return mr.reduce(dict, z=x @ y)["z"]  # here


def ordered_monoid(x: Row["f"], y: Col["f"]):
    return mr.reduce(Keeps, v=x @ y).v  # here


def vector_for_a_scalar(x: Row["f"], y: Col["f"]):
    return mr.reduce(Loudest, v=x - y).v  # here


BODIES = [
    (data_dependent_if, mr.TraceError, ("if", "pair", "torch.where")),
    (python_and, mr.TraceError, ("and", "torch.where", "&")),
    (python_or, mr.TraceError, ("or", "torch.where", "|")),
    (python_not, mr.TraceError, ("not", "torch.where", "~")),
    (python_max, mr.TraceError, ("max()", "torch.minimum")),
    (python_float, mr.TraceError, ("float()", "torch function")),
    (python_int, mr.TraceError, ("int()", ".int()")),
    (math_function, mr.TraceError, ("math function", "torch function")),
    (python_range, mr.TraceError, ("int()",)),
    (iteration, mr.TraceError, ("iterates", "x[0]")),
    (python_len, mr.TraceError, ("x[0]",)),
    (python_in, mr.TraceError, ("x[0]",)),
    (numpy_array, mr.TraceError, ("x[0]",)),
    (in_place, mr.TraceError, ("clamp_ writes in place", "use clamp")),
    (in_place_flag, mr.TraceError, ("inplace=True", "drop inplace")),
    (out_argument, mr.TraceError, ("out=", "drop out")),
    (assignment, mr.TraceError, ("writes into", "torch.where")),
    (unknown_function, mr.UnknownFunctionError, ("i0", "apply it before the call")),
    (misspelt_method, mr.UnknownFunctionError, ("sigmiod", "Did you mean sigmoid")),
    (too_many_arguments, mr.TraceError, ("tanh", "3 arguments", "takes 1")),
    (captured_tensor, mr.TraceError, ("(7,)", "not one of its arguments", "Pass it as an argument")),
    (captured_number, mr.TraceError, ("()", "not one of its arguments", "Pass it as an argument")),
    (string, mr.TraceError, ("'2'", "str", "numbers")),
    (shape_asked, mr.TraceError, (".shape", "mr.num_rows")),
    (transposed, mr.TraceError, (".T", "q @ k")),
    (largest_values, mr.TraceError, (".values", "mr.max and mr.min are the number itself")),
    (item, mr.TraceError, (".item", "traced")),
    (to_device, mr.TraceError, (".to('cuda')", "torch.float32")),
    (slice_of_features, mr.TraceError, ("slice", "x[0]")),
    (feature_of_a_number, mr.TraceError, ("[0]", "x[0]")),
    (random_constant, mr.ImpureError, ("two different programs", "pass changing values as arguments")),
    (counter, mr.ImpureError, ("two different programs", "pass changing values as arguments")),
    (leaked_symbol, mr.ImpureError, ("earlier trace", "keep no symbols")),
    (two_letters, mr.ShapeError, ('"f"', '"d"', "the same letter")),
    (two_letters_elementwise, mr.ShapeError, ('"f"', '"d"', "equal letters")),
    (dot_of_numbers, mr.ShapeError, ("one number", "use *")),
    (sum_of_a_number, mr.UnreducedError, ("one number", "mr.sum")),
    (largest_feature_of_a_number, mr.UnreducedError, ("one number", "mr.max(...)")),
    (no_reduction, mr.NotReducedError, ("no_reduction", "no reduction", "mr.sum")),
    (pair_returned, mr.UnreducedError, ("every pair", "mr.sum")),
    (nothing_returned, mr.TraceError, ("None", "Return a reduction")),
    (tensor_returned, mr.TraceError, ("Tensor", "Return a reduction")),
    (largest_vector, mr.UnreducedError, ("mr.max", 'vector over "f"', "M × N × features", "mr.sum")),
    (logsumexp_of_a_vector, mr.UnreducedError, ("mr.logsumexp", 'vector over "f"', "M × N × features", "mr.sum")),
    (topk_of_a_vector, mr.UnreducedError, ("mr.topk", 'vector over "f"', "M × N × features", "mr.sum")),
    (vector_as_a_logit, mr.UnreducedError, ("mr.softmax_mean", 'vector over "f"', "x @ y")),
    (variance_of_a_vector, mr.UnreducedError, ("mr.var", 'vector over "f"', "x @ y")),
    (too_few_asked, mr.ArgumentError, ("k = 0", "at least one")),
    (fractional_k, mr.ArgumentError, ("topk", "k = 2.7")),
    (fractional_seed, mr.ArgumentError, ("seed", "1.5")),
    (huge_seed, mr.ArgumentError, ("seed", f"{2**70}", "64 bits")),
    (rounded_to_digits, mr.TraceError, ("round",)),
    (torch_max, mr.UnknownFunctionError, ("no max", "mr.max")),
    (torch_logsumexp, mr.UnknownFunctionError, ("no logsumexp", "mr.logsumexp")),
    (strange_axis, mr.ArgumentError, ("sum", "over='x'", 'over="cols"', 'over="rows"')),
    (strange_axis_of_topk, mr.ArgumentError, ("topk", "over='columns'", 'over="cols"')),
    (impossible_dropout, mr.ArgumentError, ("p = 1.5", "between 0 and 1")),
    (negative_dropout, mr.ArgumentError, ("p = -0.1", "between 0 and 1")),
    (wrong_fields, mr.ArgumentError, ("LogWSum", "fields z, v", "given z", "every field")),
    (no_monoid, mr.ArgumentError, ("dict", "subclass of mr.Monoid")),
    (ordered_monoid, mr.ArgumentError, ("Keeps", "not commutative", "mr.fold")),
    (vector_for_a_scalar, mr.UnreducedError, ("field v of Loudest", "Scalar", "mr.Vector")),
    (number_for_a_vector, mr.ShapeError, ("field v of LogWSum", "Vector", "mr.Scalar")),
]


# The tests -----------------------------------------------------------------------------------------------------------


class NoWork(TorchDispatchMode):
    """Fails on any torch operation: nothing is allocated, nothing is computed."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} ran before the mistake was found")


def raised(mistake: Mistake) -> Exception:
    with pytest.raises(mistake.error) as caught:
        mistake.do()
    assert type(caught.value) is mistake.error
    missing = [w for w in mistake.words if w not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    return caught.value


@pytest.mark.parametrize("mistake", ARGUMENTS, ids=lambda m: m.name)
def test_arguments(mistake):
    """The call is shown with its arguments, and not one operation has run."""
    with NoWork():
        error = raised(mistake)
    assert "called with" in str(error), "the message does not show the call"


@pytest.mark.parametrize(
    ("kind", "value", "error"),
    [
        (float, torch.tensor(1j), mr.DTypeError),
        (float, 2**70, mr.ArgumentError),
        (int, np.float32(1.5), mr.ArgumentError),
        (int, torch.tensor(1.5), mr.DTypeError),
        (bool, 7, mr.ArgumentError),
        (bool, 0.5, mr.ArgumentError),
        (bool, math.nan, mr.ArgumentError),
        (bool, torch.tensor(3), mr.DTypeError),
        (str, 7, mr.ArgumentError),
        (str, ["sum"], mr.ArgumentError),
        (Literal["sum", "max"], "mean", mr.ArgumentError),
        (Callable, "tanh", mr.ArgumentError),
    ],
    ids=repr,
)
def test_numbers_and_choices_of_another_kind(kind, value, error):
    """Nothing is rounded to what was declared; neither in the first call nor after a right one."""

    def body(x: Row["f"], y: Col["f"], c: kind):
        return mr.sum((c if kind in (float, int, bool) else 1) * (x @ y))

    op, right = (
        mr.op(body),
        {str: "sum", Callable: torch.tanh, bool: True, int: 1, float: 1.5}.get(kind, "sum"),
    )
    for _ in range(2):
        with pytest.raises(error, match=r"c (was|is)"):
            op(torch.ones(3, 2), torch.ones(4, 2), value)
        op(torch.ones(3, 2), torch.ones(4, 2), right)


@pytest.mark.parametrize("mistake", DECLARATIONS, ids=lambda m: m.name)
def test_declarations(mistake):
    raised(mistake)


@pytest.mark.parametrize(("body", "error", "words"), BODIES, ids=[b.__name__ for b, _, _ in BODIES])
def test_bodies(body, error, words):
    """The message holds the body's name, the file and the very line of the mistake, and no operation has run."""
    KEPT.clear()
    sizes = {"f": 3, "d": 2}
    op = mr.op(body)
    given = {
        n: torch.ones(*((5,) if p.axis == "rows" else (7,)), *([sizes[p.feature]] if p.feature else ()))
        for n, p in op.parameters.items()
    }

    def call():
        with NoWork() if body not in (captured_number, tensor_returned) else torch.no_grad():
            op(**given)

    message = str(raised(Mistake(body.__name__, call, error, (*words, f"in {body.__name__}", "test_errors.py:"))))
    lines = [line for line in source(body) if line.endswith("# here")]
    assert not lines or lines[0] in message, f"{lines[0]!r} is not shown in: {message}"


def source(body):
    return [line.strip() for line in inspect.getsource(body).splitlines()]


@pytest.mark.parametrize("k", [8, 100])
def test_topk_of_too_few(k):
    @mr.op
    def best(x: Row["f"], y: Col["f"], k: int):
        return mr.topk(x @ y, k).values, mr.topk(x @ y, 2, over="rows").values

    raised(Mistake("k", lambda: best(X, Y, k), mr.TopKError, (f"k = {k}", "7 columns", "at most 7", "best")))
    raised(Mistake("k", lambda: best(X[:1], Y, 7), mr.TopKError, ("k = 2", "1 rows", "at most 1")))
    assert best(X, Y, 7)[0].shape == (5, 7)


def test_looking_at_a_tensor():
    """A number given as a tensor cannot decide the program."""

    @mr.op
    def causal(x: Row["f"], y: Col["f"], causal: bool):
        return mr.sum(x @ y) if causal else mr.sum(-(x @ y))  # here

    assert torch.equal(causal(X, Y, True), -causal(X, Y, False))
    mistake = lambda: causal(X, Y, torch.tensor(True))
    words = ("causal", "is a tensor", "plain number", "torch.where", "test_errors.py:", "if causal else")
    raised(Mistake("look", mistake, mr.TraceError, words))


def test_a_feature_that_is_not_there():
    @mr.op
    def third(x: Row["f"], y: Col["f"]):
        return mr.sum(x[3] * y[0])

    raised(Mistake("component", lambda: third(X, Y), mr.ShapeError, ("3", '"f"', "third")))


@pytest.mark.parametrize("over", ["cols", "rows"])
@pytest.mark.parametrize(
    "name",
    ["sum", "mean", "logsumexp", "max", "min", "argmax", "argmin", "any", "all", "count", "var"],
)
def test_reductions_outside_a_body(name, over):
    words = ("outside the body", "@mr.op")
    raised(Mistake(name, lambda: getattr(mr, name)(X, over=over), mr.TraceError, words))


def test_more_reductions_outside_a_body():
    words = ("outside the body", "@mr.op")
    for do in (
        lambda: mr.topk(X, 2),
        lambda: mr.sample(X, 0),
        lambda: mr.softmax_mean(X, X),
        lambda: mr.weighted_mean(X, X),
        lambda: mr.reduce(mr.monoids.LogSumExp, z=X),
    ):
        raised(Mistake("outside", do, mr.TraceError, words))


def test_dropout_given_at_the_call():
    @mr.op
    def dropped(x: Row["f"], y: Col["f"], p: float):
        return mr.sum(mr.dropout(x @ y, p, 0))

    x = X.clone().requires_grad_()
    dropped(x, Y, 1.0).sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    for p in (1.5, -0.5):
        raised(Mistake("p", lambda p=p: dropped(X, Y, p), mr.ArgumentError, (f"{p}", "between 0 and 1")))


def test_engines(monkeypatch):
    def use(name):
        with mr.use(engine=name):
            attention(X, Y, V)

    raised(Mistake("use", lambda: use("cuda"), mr.EngineError, ("mr.use", "'cuda'", "eager", "reference")))
    monkeypatch.setenv("MONOIDREDUCE_ENGINE", "turbo")
    words = ("MONOIDREDUCE_ENGINE", "'turbo'", "eager", "reference")
    raised(Mistake("variable", lambda: attention(X, Y, V), mr.EngineError, words))
    use("eager")  # the innermost choice counts
    monkeypatch.setenv("MONOIDREDUCE_ENGINE", "reference")
    attention(X, Y, V)


def test_reference_limit():
    def run(limit):
        with mr.use(engine="reference", limit=limit):
            return attention(X, Y, V)

    words = ("35", "34", 'engine="eager"', "limit=None")
    raised(Mistake("limit", lambda: run(34), mr.ReferenceLimitError, words))
    assert issubclass(mr.ReferenceLimitError, mr.EngineError)
    run(35), run(None)


@pytest.mark.parametrize("engine", ["eager", "panel"])
def test_budget(engine):
    """Too little for any part of the pairs: what was given, and the least, which does suffice."""
    x, w = torch.ones(40, 8), torch.ones(500, 8)

    def run(limit):
        with mr.use(engine=engine), mr.budget(limit):
            return attention(x, w, w)

    error = raised(Mistake("budget", lambda: run(10), mr.BudgetError, ("a budget of 10B", "Give at least")))
    least = error.details["least"]
    assert f"Give at least {least}" in str(error)
    assert torch.allclose(run(least), torch.ones(40, 8))
    for limit in (0, -1, 1.5, "12 parsecs"):
        raised(Mistake("limit", partial(run, limit), mr.ArgumentError, ("budget", repr(limit), "64MB", "above 0")))


@pytest.mark.parametrize("engine", ["eager", "reference"])
def test_gradient_of_a_monoid_that_has_none(engine):
    """The value is there; the gradient says what to add to the monoid."""

    @mr.op
    def steps(x: Row["f"], y: Col["f"]):
        return mr.reduce(Steps, v=x @ y).v

    with mr.use(engine=engine):
        y = steps(X.clone().requires_grad_(), Y)
        assert torch.equal(y, torch.floor(X @ Y.T).sum(1))
        words = ("Steps", "combine has no derivative", "pullback(c, a, g)")
        raised(Mistake("gradient", lambda: y.sum().backward(), mr.NoGradientError, words))


def test_labels():
    """A label outside the columns is named, with where it stands and what is legal."""
    call = lambda: mr.ops.cross_entropy(X, torch.ones(7, 3), torch.tensor([0, 1, 9, 2, 3]))
    raised(Mistake("label", call, mr.LabelError, ("9", "2", "0 to 6", "ignore_index")))


def test_lists_of_columns():
    """A number outside the columns is named, with where it stands and what is legal."""
    call = lambda: mr.edges(torch.tensor([0, 1, 3]), torch.tensor([0, 2, 7])).check(2, 7)
    raised(Mistake("edge", call, mr.ColumnListError, ("index[2]", "is 7", "0 to 6")))


def test_tables():
    """An index beyond a table is counted, with the table's size and what it is made of."""

    @mr.op
    def near(x: Row["d"], y: Col["d"], bias: mr.Table["n"]):
        return mr.sum(x @ y + mr.lookup(bias, mr.row_index))

    call = lambda: near(X, torch.ones(7, 3), torch.ones(4))
    raised(Mistake("table", call, mr.TableError, ("1 row", "4 entries", "row_index", "clamp=True")))


def test_laws():
    class Mean(mr.Monoid):
        v: mr.Scalar = 0.0

        def combine(a, b):
            return Mean(v=(a.v + b.v) / 2)

    raised(Mistake("law", lambda: mr.laws.check(Mean), mr.MonoidLawError, ("Mean", "breaks the law of")))


# The classes ---------------------------------------------------------------------------------------------------------

BUILTIN = {
    "ArgumentError": TypeError,
    "BudgetError": MemoryError,
    "CacheError": ValueError,
    "ColumnListError": ValueError,
    "ConvergenceError": RuntimeError,
    "DTypeError": TypeError,
    "DeclarationError": TypeError,
    "DeviceError": ValueError,
    "EngineError": ValueError,
    "ImpureError": TypeError,
    "LabelError": IndexError,
    "MonoidLawError": AssertionError,
    "MonoidReduceError": Exception,
    "NoGradientError": RuntimeError,
    "NotReducedError": ValueError,
    "OutOfMemoryError": MemoryError,
    "ReferenceLimitError": ValueError,
    "ShapeError": ValueError,
    "TableError": IndexError,
    "TopKError": ValueError,
    "TraceError": TypeError,
    "UnknownFunctionError": TypeError,
    "UnreducedError": ValueError,
    "RankError": RuntimeError,
    "ShardError": ValueError,
    "StreamError": RuntimeError,
}


def test_every_class_is_known_here():
    """A new class of error is a new row in BUILTIN, and a new mistake above."""
    assert set(BUILTIN) == {name for name in errors.__all__ if not issubclass(getattr(errors, name), Warning)}


@pytest.mark.parametrize("name", BUILTIN)
def test_class(name):
    """Importable from the package, caught as what Python would raise, and as the root of all."""
    cls = getattr(errors, name)
    assert getattr(mr, name) is cls and name in mr.__all__
    assert issubclass(cls, BUILTIN[name]) and issubclass(cls, mr.MonoidReduceError)


def test_a_body_that_belongs_to_no_module():
    """As one that was made by ``exec`` may."""
    scope = {"Row": mr.Row, "Col": mr.Col, "mr": mr}
    exec("def body(x: Row, y: Col):\n    return mr.sum(x * y)", scope)
    with pytest.raises(errors.ShapeError, match="called with x"):
        mr.op(scope["body"])(torch.ones(2), torch.ones(()))


def test_the_place_is_added_once():
    error = mr.ShapeError(detail="x has 3 rows", fix="Give 4").at("in f").at("in g")
    assert str(error) == "x has 3 rows. Give 4\n  in f"


def test_errors_survive_pickling():
    """A worker's error reaches the parent as it was."""
    try:
        attention(X, Y)
    except mr.ArgumentError as error:
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is mr.ArgumentError and str(again) == str(error)
