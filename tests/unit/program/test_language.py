"""The pair language: every function and spelling against plain torch on the dense matrix, and what a body may say.

A function of the language is a row of ``TABLE``; the first test holds the table against what the package says it knows,
so that a new primitive without a row is a failure.
"""

import functools
import math
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce import Batch, Col, Row
from monoidreduce.engines.eager import tile_code
from monoidreduce.plan.schedule import Tiles
from monoidreduce.program import constructors
from monoidreduce.program import intervals as iv
from monoidreduce.program.expression import node
from monoidreduce.program.philox import DRAWS
from monoidreduce.program.philox import ticket as philox_ticket
from monoidreduce.program.primitives import COMPOSITES, PRIMITIVES
from tests.support.dense_reference import coin, philox, ticket, uniform
from tests.support.layers.base import coins
from tests.support.random_programs import difference, everything, tiled

TILES = Tiles(1, 2, 3)


# Functions of numbers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """How a function is called: with how many values, what else, where it is defined and whether it has a slope."""

    values: int = 1
    rest: tuple = ()
    low: float = -3.0
    high: float = 3.0
    slope: bool = True
    smooth: bool = True  # defined and differentiable on the whole line, but for kinks where torch says what holds
    twice: bool = True  # torch has its second derivative
    tolerance: float = 1e-10
    options: tuple = ()  # more keywords, each tried


def _unary(**given) -> Case:
    return Case(**given)


def _binary(**given) -> Case:
    return Case(values=2, **given)


def _rows(names: str, case: Case) -> dict[str, Case]:
    return dict.fromkeys(names.split(), case)


TABLE: dict[str, Case] = {
    **_rows(
        (
            "abs absolute atan arctan cos erf erfc exp exp2 expm1 neg negative positive sigmoid expit sin sinh "
            "cosh square tanh deg2rad rad2deg detach contiguous sinc asinh arcsinh"
        ),
        _unary(),
    ),
    **_rows(
        "relu relu6 silu mish softsign hardswish tanhshrink logsigmoid log_sigmoid",
        _unary(),
    ),
    **_rows("ceil floor round sign sgn trunc fix frac selu", _unary()),
    **_rows(
        "log log2 log10 log1p sqrt rsqrt reciprocal entr lgamma gammaln digamma psi",
        _unary(low=0.1, high=3.0, smooth=False),
    ),
    **_rows("asin arcsin acos arccos atanh arctanh erfinv", _unary(low=-0.9, high=0.9, smooth=False)),
    **_rows("acosh arccosh", _unary(low=1.1, high=4.0, smooth=False)),
    "ndtr": _unary(smooth=False),
    "celu": _unary(options=({"alpha": 0.5},)),
    **_rows("isnan isinf isfinite logical_not", _unary(slope=False)),
    "hardsigmoid": _unary(twice=False, tolerance=1e-7),  # torch's own slope is 1/6 in float32, always
    "tan": _unary(low=-1.2, high=1.2),
    "logit": _unary(low=0.1, high=0.9, smooth=False, options=({"eps": 0.3},)),
    "leaky_relu": _unary(options=({"negative_slope": 0.3},)),
    "elu": _unary(options=({"alpha": 0.5},)),
    "gelu": _unary(options=({"approximate": "tanh"},)),
    "softplus": _unary(options=({"beta": 2.0, "threshold": 3.0},)),
    "hardtanh": _unary(options=({"min_val": -0.5, "max_val": 2.0},)),
    "clamp": _unary(rest=(-1.0, 2.0), options=({"min": 0.5}, {"max": 0.5})),
    "clip": _unary(rest=(-1.0, 2.0), options=({"min": 0.5}, {"max": 0.5})),
    "clamp_min": _unary(rest=(0.5,)),
    "clamp_max": _unary(rest=(0.5,)),
    "nan_to_num": _unary(options=({"nan": 2.0},)),
    **_rows("add sub subtract rsub", _binary(options=({"alpha": 0.5},))),
    **_rows("mul multiply minimum maximum fmin fmax logaddexp logaddexp2 copysign", _binary()),
    **_rows(
        "div divide true_divide",
        _binary(low=0.2, smooth=False, options=({"rounding_mode": "floor"}, {"rounding_mode": "trunc"})),
    ),
    **_rows("pow float_power remainder fmod xlogy xlog1py atan2 arctan2 hypot", _binary(low=0.2, smooth=False)),
    "floor_divide": _binary(low=0.2, slope=False, smooth=False),
    "heaviside": _binary(slope=False),
    "lerp": _binary(rest=(0.3,)),
    **_rows("eq ne not_equal lt less le less_equal gt greater ge greater_equal", _binary(slope=False)),
}

# Functions of truth values, of vectors, and those that choose or cast, have tests of their own below.
LOGICAL = ("bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "logical_and", "logical_or", "logical_xor")
OTHERS = ("addcdiv", "addcmul", "bitwise_left_shift", "bitwise_right_shift", "polygamma")  # test_scalar_functions.py
CHOICES = ("where", "masked_fill")
CASTS = ("bfloat16", "bool", "double", "float", "half", "int", "long", "to", "type")
VECTORS = ("amax", "amin", "dot", "inner", "matmul", "mean", "norm", "normalize", "sum", "vdot", "vector_norm")
VECTORS += ("log_softmax", "logsumexp", "max", "min", "softmax")  # tests/unit/program/test_truth_values.py


def test_every_function_has_a_row():
    known = {*TABLE, *LOGICAL, *OTHERS, *CHOICES, *CASTS, *VECTORS}
    assert known == set(mr.functions())
    assert {p.name for p in PRIMITIVES.values() if p.in_torch} | {*COMPOSITES} <= set(mr.functions())
    own = {p.name for p in PRIMITIVES.values() if not p.in_torch}
    assert not own & set(mr.functions()) and not [name for name in own if hasattr(torch, name)]


def spellings(name: str) -> dict[str, Callable]:
    """Every way in which torch spells a function: as torch.f, F.f, torch.special.f and as a method."""
    found = {f"torch.{name}": getattr(torch, name, None), f"F.{name}": getattr(F, name, None)}
    found |= {f"special.{name}": getattr(torch.special, name, None)}
    if hasattr(torch.Tensor, name):
        found[f".{name}"] = lambda x, *rest, **options: getattr(x, name)(*rest, **options)
    return {k: f for k, f in found.items() if f is not None}


@mr.op
def one(f: Callable, a: Row, b: Col, w: Col):
    """A function of a pair's number, folded both ways, with and without a weight."""
    y = f(a * b)
    return mr.sum(y * w), mr.sum(y, over="rows")


def one_dense(f, a, b, w):
    y = f(a[:, None] * b)
    return (y * w).sum(1), y.sum(0)


@mr.op
def two(f: Callable, a: Row, b: Col, c: Row, d: Col):
    y = f(a * b, c * d)
    return mr.sum(y), mr.sum(y, over="rows")


def two_dense(f, a, b, c, d):
    y = f(a[:, None] * b, c[:, None] * d)
    return y.sum(1), y.sum(0)


def same(op, dense, arguments, second=True, tolerance=1e-10):
    """Values, gradients and second gradients of the eager engine are those of plain torch."""
    with tiled(TILES):
        got = everything(op, arguments, second)
    expected = everything(dense, arguments, second)
    wrong = [f"{k}: {problem}" for k in expected if (problem := difference(got[k], expected[k], tolerance))]
    assert not wrong, "\n".join(wrong)


def between(low, high, *shape):
    return (torch.rand(shape, dtype=torch.float64) * (high - low) + low).requires_grad_()


def factors(case: Case, rows: int, cols: int):
    """A row's and a column's number whose product lies in the domain."""
    if case.low > 0:
        root = math.sqrt(case.low), math.sqrt(case.high)
        return between(*root, rows), between(*root, cols)
    return between(case.low, case.high, rows), between(0.3, 1.0, cols)


def functions_of_the_table():
    for name, case in TABLE.items():
        for spelling, f in spellings(name).items():
            for options in ({}, *case.options):
                rest = () if {"min", "max"} & options.keys() else case.rest
                if torch_takes(f, case, rest, options):
                    yield pytest.param(f, case, rest, options, id=f"{spelling}-{'-'.join(options)}".rstrip("-"))


def torch_takes(f, case, rest, options) -> bool:
    """Whether torch itself takes the option in this spelling."""
    try:
        f(*[torch.ones(1)] * case.values, *rest, **options)
    except TypeError:
        return False
    return True


@pytest.mark.parametrize(("f", "case", "rest", "options"), list(functions_of_the_table()))
def test_function(f, case, rest, options, seed):
    """In the inside of its domain a function has torch's value, gradient and second gradient."""
    a, b = factors(case, 5, 7)
    exact = "rounding_mode" in options or not case.slope
    if case.values == 1:
        arguments = {"a": a, "b": b, "w": between(-1, 1, 7)}
        g = lambda x: f(x, *rest, **options)
        op, dense = one, one_dense
    else:
        c, d = factors(case, 5, 7)
        arguments = {"a": a, "b": b, "c": c, "d": d}
        g = lambda x, y: f(x, y, *rest, **options)
        op, dense = two, two_dense
    if exact:
        arguments = {k: v.detach() for k, v in arguments.items()}
    bound = lambda fn: lambda **given: fn(g, **given)
    same(bound(op), bound(dense), arguments, not exact and case.twice, case.tolerance)


KINKS = torch.tensor([0.0, 1.0, -1.0, 0.5, -0.5, 2.0, 3.0, -3.0, 6.0, 1.5, 2.5, -2.5, 20.0, -20.0], dtype=torch.float64)


@pytest.mark.parametrize("name", [n for n, c in TABLE.items() if c.values == 1 and c.smooth and spellings(n)])
def test_slope_on_a_kink(name):
    """Exactly on a kink, a bound or a jump, the gradient is the one torch chooses."""
    if name == "hardswish" and torch.__version__ < "2.8":
        pytest.skip("torch gave it a slope there")
    case = TABLE[name]
    f = next(iter(spellings(name).values()))
    arguments = {
        "a": KINKS.clone().requires_grad_(case.slope),
        "b": torch.ones(1, dtype=torch.float64),
        "w": torch.ones(1, dtype=torch.float64),
    }
    for options in ({}, *case.options):
        rest = () if {"min", "max"} & options.keys() else case.rest
        g = lambda x, rest=rest, options=options: f(x, *rest, **options)
        bound = lambda fn, g=g: lambda **given: fn(g, **given)
        same(bound(one), bound(one_dense), arguments, False, case.tolerance)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "minimum", "maximum", "fmin", "fmax", "logaddexp", "lerp"])
def test_slope_of_ties(name):
    """Two equal numbers share the gradient as torch shares it."""
    f, rest = getattr(torch, name), TABLE[name].rest
    arguments = {k: torch.ones(3, dtype=torch.float64, requires_grad=True) for k in "abcd"}
    g = lambda x, y: f(x, y, *rest)
    same(lambda **given: two(g, **given), lambda **given: two_dense(g, **given), arguments, second=False)


STRANGE = torch.tensor(
    [0.0, -0.0, math.inf, -math.inf, math.nan, 1e300, -1e300, 1e-300, 700.0, -700.0, 1e-9], dtype=torch.float64
)


@pytest.mark.parametrize("name", [n for n, c in TABLE.items() if c.values == 1 and spellings(n)])
def test_strange_numbers(name):
    """Infinities, NaN, overflow and underflow give what torch gives."""
    case, f = TABLE[name], next(iter(spellings(name).values()))
    for options in ({}, *case.options):
        rest = () if {"min", "max"} & options.keys() else case.rest
        got = one(
            lambda x, r=rest, o=options: f(x, *r, **o),
            STRANGE,
            torch.ones(1, dtype=torch.float64),
            torch.ones(1, dtype=torch.float64),
        )[0]
        expected = f(STRANGE, *rest, **options).double()
        torch.testing.assert_close(got.double(), expected, equal_nan=True, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "name", [n for n, c in TABLE.items() if c.values == 2 and n not in ("heaviside", "floor_divide")]
)
def test_strange_pairs(name):
    case, f = TABLE[name], next(iter(spellings(name).values()))
    numbers = torch.tensor([0.0, 1.0, -2.0, 0.5, math.inf, -math.inf, math.nan], dtype=torch.float64)
    x, y = (t.flatten() for t in torch.meshgrid(numbers, numbers, indexing="ij"))
    g = lambda x, y: f(x, y, *case.rest)
    unit = torch.ones(1, dtype=torch.float64)
    got = two(g, x, unit, y, unit)[0]
    torch.testing.assert_close(got.double(), g(x, y).double(), equal_nan=True, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", [n for n, c in TABLE.items() if c.values == 1 and c.slope and spellings(n)])
def test_accuracy_in_float32(name):
    """Near zero and far out, no more than twice the error of torch's own float32."""
    case, f = TABLE[name], next(iter(spellings(name).values()))
    x = (
        torch.cat([torch.logspace(-8, 1.5, 200), -torch.logspace(-8, 1.5, 200)])
        if case.low < 0
        else torch.logspace(-8, 1.5, 200)
    )
    x = x[(x > case.low) & (x < case.high)] if not case.smooth or name == "tan" else x
    unit = torch.ones(1)
    got = one(lambda t: f(t, *case.rest), x, unit, unit)[0].double()
    truth, plain = f(x.double(), *case.rest), f(x, *case.rest).double()
    unit_in_the_last_place = torch.finfo(torch.float32).eps * truth.abs() + 2.0**-149
    worst = ((got - truth).abs() - 2 * (plain - truth).abs() - 2 * unit_in_the_last_place).argmax()
    error, allowed = (got - truth).abs()[worst], 2 * (plain - truth).abs()[worst] + 2 * unit_in_the_last_place[worst]
    assert error <= allowed, (
        f"{name}({x[worst].item()}) is off by {error.item():.2e}, torch by {(plain - truth)[worst].item():.2e}"
    )


@pytest.mark.parametrize("weight", [0.3, 0.9, 1.0])
def test_accuracy_of_two_values(weight):
    """The digits of a small logarithm, and all of an end whose weight is 1."""
    x, y = (t.flatten() for t in torch.meshgrid(*[torch.logspace(-10, 2, 40) * s for s in (-1, 1)], indexing="ij"))
    unit = torch.ones(1)
    for f in (torch.special.xlog1py, lambda a, b: torch.lerp(a, b, weight), lambda a, b: torch.lerp(b, a, weight)):
        got = two(f, x, unit, y, unit)[0].double()
        truth, plain = f(x.double(), y.double()), f(x, y).double()
        allowed = 2 * (plain - truth).abs() + 2 * torch.finfo(torch.float32).eps * truth.abs() + 2.0**-149
        assert ((got - truth).abs() <= allowed).all()


def test_floor_division_is_exact():
    """1.0 // 0.1 is 9: 0.1 is a little more than a tenth; dividing and rounding down would say 10."""
    x = torch.tensor([1.0, 0.7, 6.0, -1.0, 0.3, 1e17], dtype=torch.float64)
    y = torch.tensor([0.1, -0.1, 0.2, 3.0], dtype=torch.float64)
    unit = torch.ones(4, dtype=torch.float64)
    for f in (lambda a, b: a // b, lambda a, b: torch.div(a, b, rounding_mode="floor"), torch.floor_divide):
        got = two(f, x, unit, torch.ones(6, dtype=torch.float64), y)[0]
        torch.testing.assert_close(got, f(x[:, None], y).sum(1), rtol=0, atol=0)


OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "**": operator.pow,
    "//": operator.floordiv,
    "%": operator.mod,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


@pytest.mark.parametrize("sign", OPERATORS)
def test_operator(sign, seed):
    """Between symbols, with a number on the right, and reflected."""
    f = OPERATORS[sign]
    exact = sign in ("//", "%", "<", "<=", ">", ">=", "==", "!=")
    a, b, c, d = (between(0.4, 2.0, n) for n in (5, 7, 5, 7))
    arguments = {"a": a, "b": b, "c": c, "d": d}
    if exact:
        arguments = {k: v.detach() for k, v in arguments.items()}
    numbers = (2, 0.7, True) if sign in "+*" else (2, 0.7, 3)
    functions = [f] + [
        g for n in numbers for g in (lambda x, y, n=n: f(x, n) + 0 * y, lambda x, y, n=n: f(n, x) + 0 * y)
    ]
    for g in functions:
        same(
            lambda g=g, **given: two(g, **given),
            lambda g=g, **given: two_dense(g, **given),
            arguments,
            second=not exact,
        )


@pytest.mark.parametrize(
    "f", [operator.neg, operator.pos, abs, round, math.floor, math.ceil, math.trunc], ids=lambda f: f.__name__
)
def test_python_function(f, seed):
    """What Python calls abs(x), round(x) and so on is torch's function of that name."""
    a, b, w = between(-3, 3, 5), between(-2, 2, 7), between(-1, 1, 7)
    plain = {math.floor: torch.floor, math.ceil: torch.ceil, math.trunc: torch.trunc, round: torch.round}.get(f, f)
    same(
        lambda **given: one(f, **given),
        lambda **given: one_dense(plain, **given),
        {"a": a, "b": b, "w": w},
        second=False,
    )


# Truth and whole numbers ---------------------------------------------------------------------------------------------


@mr.op
def whole(f: Callable, i: Row, j: Col):
    y = f(i, j)
    return mr.sum(y), mr.max(y + 0), mr.sum(y, over="rows")


@pytest.mark.parametrize(
    "f",
    [
        lambda i, j: i + j,
        lambda i, j: i - j,
        lambda i, j: i * j,
        lambda i, j: i // (j + 5),
        lambda i, j: i % (j + 5),
        lambda i, j: (i - j).abs(),
        lambda i, j: torch.minimum(i, j),
        lambda i, j: torch.maximum(i, j),
        lambda i, j: (i * j).sign(),
        lambda i, j: (i + j).square(),
        lambda i, j: (i + j) ** 2,
        lambda i, j: -(i + j),
        lambda i, j: torch.where(i > j, i, j),
        lambda i, j: 2 * i - j,
        lambda i, j: (i + j).clamp(-1, 2),
        lambda i, j: 7 - i * j,
        lambda i, j: (i + j) ** 3,
        lambda i, j: (i > j).long() + j,
        lambda i, j: torch.div(i, j + 5, rounding_mode="floor"),
        lambda i, j: (i + j).float().long(),
    ],
)
def test_whole_numbers(f, seed):
    """Whole numbers stay whole and exact; nothing is rounded through floating point."""
    i, j = torch.randint(-4, 5, (5,)), torch.randint(-4, 5, (7,))
    dense = f(i[:, None], j)
    with tiled(TILES):
        total, largest, other = whole(f, i, j)
    assert total.dtype == largest.dtype == torch.int64
    assert torch.equal(total, dense.sum(1)) and torch.equal(largest, dense.amax(1)) and torch.equal(other, dense.sum(0))


def test_large_whole_numbers_are_exact():
    """Above 2**53 a double would round."""
    i, j = torch.tensor([2**60 + 1, 3]), torch.tensor([1, 2**60 + 3])
    total, largest, _ = whole(lambda i, j: i + j, i, j)
    assert total.tolist() == (i[:, None] + j).sum(1).tolist() and largest.tolist() == (i[:, None] + j).amax(1).tolist()


BITS = [lambda i, j: i & j, lambda i, j: i | j, lambda i, j: i ^ j, lambda i, j: ~i + j]


@pytest.mark.parametrize("f", BITS)
def test_bits_of_whole_numbers(f):
    """& | ^ ~ of whole numbers are bitwise, as in torch."""
    i, j = torch.arange(5), torch.arange(7)
    assert torch.equal(whole(f, i, j)[0], f(i[:, None], j).sum(1))


@mr.op
def truth(f: Callable, m: Row, n: Col, x: Row):
    y = f(m, n)
    return mr.any(y), mr.all(y), mr.count(y), mr.sum(y), mr.sum(torch.where(y, x, 0.5)), mr.count(y, over="rows")


@pytest.mark.parametrize(
    "f",
    [
        lambda m, n: m & n,
        lambda m, n: m | n,
        lambda m, n: m ^ n,
        lambda m, n: ~m & n,
        lambda m, n: m == n,
        lambda m, n: m != n,
        torch.logical_and,
        torch.logical_or,
        torch.logical_xor,
        torch.bitwise_and,
        torch.bitwise_or,
        torch.bitwise_xor,
        lambda m, n: torch.logical_not(m) | n,
        lambda m, n: torch.bitwise_not(m) | n,
        lambda m, n: True & m | n,
        lambda m, n: False | m & n,
        lambda m, n: m.logical_and(n),
        lambda m, n: True ^ (m | n),
        lambda m, n: m > n,
        lambda m, n: m <= n,
    ],
)
def test_truth(f, seed):
    m, n, x = torch.rand(5) < 0.5, torch.rand(7) < 0.5, torch.rand(5, dtype=torch.float64)
    dense = f(m[:, None], n)
    expected = (
        dense.any(1),
        dense.all(1),
        dense.sum(1),
        dense.sum(1),
        torch.where(dense, x[:, None], 0.5).sum(1),
        dense.sum(0),
    )
    with tiled(TILES):
        for got, want in zip(truth(f, m, n, x), expected, strict=True):
            torch.testing.assert_close(got, want)


CASTS_TO = {
    "float": lambda x: x.float(),
    "double": lambda x: x.double(),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "int": lambda x: x.int(),
    "long": lambda x: x.long(),
    "bool": lambda x: x.bool(),
    "to": lambda x: x.to(torch.float32),
    "type": lambda x: x.type(torch.int64),
    "to_bool": lambda x: x.to(torch.bool),
}


@pytest.mark.parametrize("name", CASTS_TO)
def test_casts(name, seed):
    """A cast changes the class of a number (truth, whole, floating); the floating type stays that of the arithmetic."""
    cast = CASTS_TO[name]
    floating = name in ("float", "double", "half", "bfloat16", "to")
    for source in (torch.rand(5, dtype=torch.float64) * 6 - 3, torch.randint(-2, 3, (5,)), torch.rand(5) < 0.5):
        unit = torch.ones(3, dtype=torch.float64)

        @mr.op
        def casted(a: Row, unit: Col):
            return mr.sum(cast(torch.where(unit > 0, a, a)))

        got = casted(source, unit)
        expected = 3 * (source.double() if floating else cast(source).long())
        torch.testing.assert_close(got, expected)


def test_gradient_of_casts():
    """Through a floating cast the gradient passes; a cast to whole numbers or truth stops it."""

    @mr.op
    def through(a: Row, b: Col):
        s = a * b
        return mr.sum(s.double() * 2) + mr.sum(s.int() * 1.0) + mr.sum(s.bool().float())

    a, b = between(1, 2, 3), between(1, 2, 4)
    (grad,) = torch.autograd.grad(through(a, b).sum(), a)
    torch.testing.assert_close(grad, 2 * b.sum().expand(3))


def test_choices(seed):
    """torch.where in each spelling, with numbers on either side, nested, and masked_fill."""
    a, b, w = between(-1, 1, 5), between(-1, 1, 7), between(-1, 1, 7)
    for g in (
        lambda s: torch.where(s > 0.1, s, -s),
        lambda s: torch.where(s > 0.1, s, 0.5),
        lambda s: torch.where(s > 0.1, 0.5, s),
        lambda s: s.where(s > 0.1, -s),
        lambda s: s.masked_fill(s > 0.1, 2.0),
        lambda s: torch.masked_fill(s, s > 0.1, 2.0),
        lambda s: torch.where(s > 0.1, torch.where(s > 0.5, s, 0.0), torch.where(s > 0.1, 1.0, s * s)),
        lambda s: torch.where(s > 0.1, torch.exp(s), torch.log(torch.where(s > 0.1, 1.0, 0.2 - s))),
    ):
        same(lambda g=g, **given: one(g, **given), lambda g=g, **given: one_dense(g, **given), {"a": a, "b": b, "w": w})


# Vectors -------------------------------------------------------------------------------------------------------------

# name: the same for a body's vectors x, y and for tensors with features last
ON_VECTORS: dict[str, tuple[Callable, Callable]] = {
    "matmul": (lambda x, y: x @ y, lambda x, y: (x * y).sum(-1)),
    "matmul reversed": (lambda x, y: y @ x, lambda x, y: (x * y).sum(-1)),
    "torch.matmul": (torch.matmul, lambda x, y: (x * y).sum(-1)),
    "dot": (torch.dot, lambda x, y: (x * y).sum(-1)),
    "vdot": (lambda x, y: x.vdot(y), lambda x, y: (x * y).sum(-1)),
    "inner": (torch.inner, lambda x, y: (x * y).sum(-1)),
    "same side": (lambda x, y: (x @ x) * (y @ y), lambda x, y: (x * x).sum(-1) * (y * y).sum(-1)),
    "sum": (lambda x, y: (x * y).sum(), lambda x, y: (x * y).sum(-1)),
    "sum dim": (lambda x, y: torch.sum(x * y, dim=-1), lambda x, y: (x * y).sum(-1)),
    "sum of sum": (lambda x, y: (x + y).sum(), lambda x, y: (x + y).sum(-1)),
    "mean": (lambda x, y: (x * y).mean(), lambda x, y: (x * y).mean(-1)),
    "mean of a side": (lambda x, y: x.mean() * y.mean(-1), lambda x, y: x.mean(-1) * y.mean(-1)),
    "tanh": (lambda x, y: torch.tanh(x - y).sum(), lambda x, y: torch.tanh(x - y).sum(-1)),
    "maximum": (lambda x, y: torch.maximum(x, y).sum(), lambda x, y: torch.maximum(x, y).sum(-1)),
    "nested": (
        lambda x, y: (torch.tanh(x @ y) * x - y).square().sum(),
        lambda x, y: (torch.tanh((x * y).sum(-1, True)) * x - y).square().sum(-1),
    ),
    "quotient": (lambda x, y: (x / (2 + y)).sum(), lambda x, y: (x / (2 + y)).sum(-1)),
    "where": (lambda x, y: torch.where(x > y, x, 2 * y).sum(), lambda x, y: torch.where(x > y, x, 2 * y).sum(-1)),
    "sqdist": (mr.sqdist, lambda x, y: (x - y).square().sum(-1)),
    "sqdist spelt": (lambda x, y: ((x - y) ** 2).sum(), lambda x, y: (x - y).square().sum(-1)),
    "manhattan": (lambda x, y: (x - y).abs().sum(), lambda x, y: (x - y).abs().sum(-1)),
    "norm": (lambda x, y: (x - y).norm(), lambda x, y: torch.linalg.vector_norm(x - y, dim=-1)),
    "norm 1": (lambda x, y: torch.norm(x - y, p=1), lambda x, y: torch.linalg.vector_norm(x - y, 1, dim=-1)),
    "norm 3": (
        lambda x, y: torch.linalg.vector_norm(x - y, 3),
        lambda x, y: torch.linalg.vector_norm(x - y, 3, dim=-1),
    ),
    "norm of a side": (lambda x, y: x.norm() * y.norm(p=math.inf), lambda x, y: x.norm(dim=-1) * y.abs().amax(-1)),
    "amax": (lambda x, y: x.amax() + y.amin(), lambda x, y: x.amax(-1) + y.amin(-1)),
    "normalize": (
        lambda x, y: F.normalize(x, dim=-1) @ F.normalize(y, dim=-1),
        lambda x, y: (F.normalize(x, dim=-1) * F.normalize(y, dim=-1)).sum(-1),
    ),
    "normalize 1": (
        lambda x, y: F.normalize(x, p=1.0, dim=-1) @ y,
        lambda x, y: (F.normalize(x, 1.0, dim=-1) * y).sum(-1),
    ),
    "component": (lambda x, y: x[0] * y[1] - x[2], lambda x, y: x[..., 0] * y[..., 1] - x[..., 2]),
    "last component": (lambda x, y: x[-1] * y[..., 0], lambda x, y: x[..., -1] * y[..., 0]),
    "component of a pair": (lambda x, y: torch.exp(x - y)[1], lambda x, y: torch.exp(x - y)[..., 1]),
}


@mr.op
def on_vectors(f: Callable, x: Row["f"], y: Col["f"]):
    s = f(x, y)
    return mr.sum(torch.sin(s)), mr.sum(s, over="rows")


@pytest.mark.parametrize("width", [3, 11])
@pytest.mark.parametrize("name", ON_VECTORS)
def test_vectors(name, width, seed):
    f, dense = ON_VECTORS[name]
    x, y = between(-1, 1, 5, width), between(-1, 1, 7, width)

    def plain(x, y):
        s = dense(x[:, None, :], y[None, :, :])
        return torch.sin(s).sum(1), s.sum(0)

    same(lambda **given: on_vectors(f, **given), plain, {"x": x, "y": y})


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y, s: s * y,
        lambda x, y, s: s * x,
        lambda x, y, s: x - y,
        lambda x, y, s: torch.tanh(x + y),
        lambda x, y, s: s * x * y + y,
        lambda x, y, s: y + 0 * s,
        lambda x, y, s: x + y,
        lambda x, y, s: torch.where(s > 0, x, y),
        lambda x, y, s: y / (2 + s.square()),
        lambda x, y, s: -(s * y - x),
    ],
)
def test_sums_and_means_of_vectors(f, seed):
    """A vector per pair may be summed and averaged, in both directions, whatever it is made of."""

    @mr.op
    def fold(x: Row["f"], y: Col["f"]):
        s = x @ y
        v = f(x, y, s)
        return mr.sum(v), mr.softmax_mean(s, v), mr.sum(v, over="rows"), mr.softmax_mean(s, v, over="rows"), mr.mean(v)

    def dense(x, y):
        s = x @ y.T
        v = f(x[:, None, :], y[None], s[..., None]).expand(*s.shape, x.shape[1])
        p, q = torch.softmax(s, 1)[..., None], torch.softmax(s, 0)[..., None]
        return v.sum(1), (p * v).sum(1), v.sum(0), (q * v).sum(0), v.mean(1)

    same(fold, dense, {"x": between(-1, 1, 5, 3), "y": between(-1, 1, 7, 3)})


def test_no_features():
    """Vectors of length 0: every product is 0, and gradients are empty."""

    @mr.op
    def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
        return mr.softmax_mean(q @ k, v), mr.logsumexp(mr.sqdist(q, k))

    q, k, v = between(0, 1, 5, 0), between(0, 1, 7, 0), between(0, 1, 7, 2)
    mean, z = attention(q, k, v)
    torch.testing.assert_close(mean, v.mean(0).expand(5, 2))
    torch.testing.assert_close(z, torch.full((5,), math.log(7), dtype=torch.float64))
    grads = torch.autograd.grad(mean.sum() + z.sum(), (q, k, v))
    assert [tuple(g.shape) for g in grads] == [(5, 0), (7, 0), (7, 2)]


# What a tile may know ------------------------------------------------------------------------------------------------

ENDS = [-math.inf, -5.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 7.0, math.inf]
LOGIC = ("logical_and", "logical_or", "logical_xor", "logical_not")
BITWISE = [n for n in PRIMITIVES if n.startswith("bitwise") or n == "popcount"]
ONE = ("logical_not", "bitwise_not", "popcount")
PAIRS = [n for n in PRIMITIVES if n not in ONE and (n in (*LOGICAL, *BITWISE) or (n in TABLE and TABLE[n].values == 2))]


def a_range(rng: random.Random) -> tuple[iv.Interval, float]:
    """An interval and a number in it: exactly an infinity where both ends are that, else finite; or anything at all."""
    if rng.random() < 0.1:
        return iv.NAN, rng.choice([-math.inf, -2.5, 0.0, 0.3, 4.0, math.inf, math.nan])
    low, high = sorted((rng.choice(ENDS), rng.choice(ENDS)))
    if low == high:
        return (low, high), low
    ends = max(low, -9.0), min(high, 9.0)
    return (low, high), rng.choice([*ends, rng.uniform(*ends), rng.uniform(*ends)])


def a_truth(rng: random.Random) -> tuple[iv.Interval, float]:
    interval = rng.choice([iv.TRUE, iv.FALSE, iv.EITHER, iv.UNKNOWN])
    return interval, rng.choice([v for v in (0.0, 1.0) if interval[0] <= v <= interval[1]])


def a_whole(rng: random.Random) -> tuple[iv.Interval, int]:
    low, high = sorted(rng.choice([-9, -1, 0, 1, 5, 63, 64, 2**40, rng.randint(-99, 99)]) for _ in range(2))
    if rng.random() < 0.1:
        return iv.UNKNOWN, rng.randint(-(2**63), 2**63 - 1)
    return (low, high), rng.randint(low, high)


def holds(interval: iv.Interval, value: float, what: str) -> None:
    low, high = interval
    if math.isnan(low):
        return  # anything, NaN included
    assert not math.isnan(value), f"{what} is NaN, but is promised to be in {interval}"
    slack = 1e-9 * (1 + abs(value)) if math.isfinite(value) else 0.0
    assert low <= value + slack and value - slack <= high, f"{what} is {value}, not in {interval}"


def interval(name: str, given: tuple[iv.Interval, ...], kinds: list[str], **attributes) -> iv.Interval:
    """What is known of a function of values that are known to be in the given intervals."""
    leaves = [
        node("leaf", (), (f"x{k}",), rows=True, cols=True, feature=None, dtype=kind) for k, kind in enumerate(kinds)
    ]
    return tile_code.interval(constructors.apply(name, *leaves, **attributes), dict(zip(leaves, given, strict=True)))


@pytest.mark.parametrize("name", [n for n in PRIMITIVES if n not in (*DRAWS, "cast", "stretches")])
def test_interval_holds_the_value(name):
    """Whatever the arguments are within their intervals, the result is within the interval that the rule gives."""
    rng = random.Random(name)
    arity = 3 if name == "where" else 2 if name in PAIRS else 1
    whole = name in BITWISE
    kinds = ["bool" if name in LOGIC or (name == "where" and k == 0) else "float" for k in range(arity)]
    kinds = ["int"] * arity if whole else kinds
    drawers = {"bool": a_truth, "float": a_range, "int": a_whole}
    drawn = [[drawers[kind](rng) for kind in kinds] for _ in range(300 * arity**2)]
    dtype = torch.int64 if whole else torch.float64
    columns = [torch.tensor([row[k][1] for row in drawn], dtype=dtype) for k in range(arity)]
    columns = [c.bool() if kind == "bool" else c for c, kind in zip(columns, kinds, strict=True)]
    for row, value in zip(drawn, PRIMITIVES[name].torch(*columns).tolist(), strict=True):
        given, values = zip(*row, strict=True)
        holds(interval(name, given, kinds), float(value), f"{name}{values} with arguments in {given}")


@pytest.mark.parametrize("to", ["float", "int", "bool"])
def test_interval_of_a_cast(to):
    rng = random.Random(to)
    for _ in range(500):
        given, value = a_range(rng)
        if to != "int" or math.isfinite(value):
            expected = {"float": float, "int": int, "bool": bool}[to](value)
            holds(interval("cast", (given,), ["float"], to=to), float(expected), f"{to}({value})")


def test_conditions_on_numbers_that_are_not_there():
    """A condition that is NaN for some pairs of a tile is not decided for the tile."""

    @mr.op
    def f(r: Row, c: Col):
        gap = r - c
        return (
            mr.count(torch.sqrt(gap) < 3),
            mr.count(torch.log(gap) < 5),
            mr.count(~(gap.sqrt() >= 0)),
            mr.count((gap * 0.9).int() == 0),
        )

    r, c = torch.linspace(-2, 2, 9, dtype=torch.float64), torch.linspace(-1, 1, 5, dtype=torch.float64)
    for got, expected in zip(f(r, c), plain_counts(r[:, None] - c), strict=True):
        assert torch.equal(got, expected)


def plain_counts(gap):
    return [x.sum(1) for x in (gap.sqrt() < 3, gap.log() < 5, ~(gap.sqrt() >= 0), (gap * 0.9).int() == 0)]


def test_conditions_of_a_nan_row():
    """A row that is NaN fails every comparison, whatever bounds the function around it has."""

    @mr.op
    def f(r: Row, c: Col):
        return (
            mr.count(torch.tanh(r - c) < 2),
            mr.count(torch.relu(r - c) >= 0),
            mr.count(r - c < torch.inf),
            mr.count(r != c),
        )

    r, c = torch.tensor([0.5, math.nan, -0.5]), torch.linspace(-1, 1, 4)
    for got in f(r, c)[:3]:
        assert got.tolist() == [4, 0, 4]
    assert f(r, c)[3].tolist() == [4, 4, 4]


@pytest.mark.parametrize("name", ["causal", "window", "prefix", "documents", "tail"])
def test_tiles_that_see_nothing_are_skipped(name):
    """Conditions on indices and numbers cost nothing where they fail for a whole tile."""
    conditions = {
        "causal": lambda d, e: mr.col_index <= mr.row_index,
        "window": lambda d, e: (mr.row_index - mr.col_index).abs() <= 4,
        "prefix": lambda d, e: mr.col_index < 8,
        "documents": lambda d, e: d == e,
        "tail": lambda d, e: (mr.col_index >= mr.num_cols - 4) & (mr.row_index < 16),
    }

    @mr.op
    def masked(x: Row["f"], y: Col["f"], d: Row, e: Col):
        return mr.logsumexp(torch.where(conditions[name](d, e), x @ y, -torch.inf))

    x, y = torch.randn(32, 3, dtype=torch.float64), torch.randn(32, 3, dtype=torch.float64)
    d = torch.arange(32) // 8
    with tiled(Tiles(1, 4, 4)), mr.tally() as tally:
        got = masked(x, y, d, d)
    with mr.use(engine="reference"):
        torch.testing.assert_close(got, masked(x, y, d, d))
    assert tally.skipped >= {"causal": 28, "window": 42, "prefix": 48, "documents": 48, "tail": 60}[name]


# Parameters ----------------------------------------------------------------------------------------------------------


class Counted:
    """An op and how often its body has run."""

    def __init__(self, body):
        def counting(*args, **kwargs):
            self.runs += 1
            return body(*args, **kwargs)

        self.runs = 0
        self.op = mr.op(functools.wraps(body)(counting))

    def __call__(self, *args, **kwargs):
        """The result, and how many new traces it took (a trace runs the body twice)."""
        before = self.runs
        known = sum(map(len, self.op._programs.traces.values()))
        result = self.op(*args, **kwargs)
        new = sum(map(len, self.op._programs.traces.values())) - known
        assert (self.runs > before) == (new > 0)
        return result, new


X, Y = torch.randn(5, 3, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)


def test_a_new_temperature_or_seed_is_the_same_program():
    def body(x: Row["f"], y: Col["f"], t: float, seed: int, k: int = 2):
        return mr.sum(mr.dropout((x @ y) * t, 0.3, seed)) + k

    op = Counted(body)
    (first, new), (again, more) = op(X, Y, 0.5, 1), op(X, Y, 0.7, 2)
    assert (new, more) == (1, 0) and not torch.equal(first, again)
    assert op(X, Y, 3, 4)[1] == 0, "a whole number where a float is declared"
    assert op(X, Y, torch.tensor(0.3), 4, 5)[1] == 0, "a tensor of one number"
    assert op(X[:2], Y[:1], 0.5, 1)[1] == 0, "new sizes"
    assert op(X.expand(2, 5, 3), Y, 0.5, 1)[1] == 0, "a batch"
    assert op(X.float(), Y.float(), 0.5, 1)[1] == 0, "another floating type"
    torch.testing.assert_close(op(X, Y, 0.5, 1)[0], first)


def test_a_number_that_is_looked_at_is_fixed():
    def body(x: Row["f"], y: Col["f"], causal: bool, k: int, t: float = 1.0):
        s = (x @ y) * t
        if causal:
            s = torch.where(mr.col_index <= mr.row_index, s, -torch.inf)
        return mr.topk(s, k).values

    op = Counted(body)
    assert op(X, Y, False, 2)[0].shape == (5, 2)
    assert op(X, Y, False, 3)[0].shape == (5, 3)
    assert op(X, Y, True, 3)[0][0, 1:].tolist() == [-math.inf] * 2
    seen = [op(X, Y, c, k, t)[1] for c in (True, False) for k in (2, 3) for t in (0.1, 0.2)]
    assert sum(seen) == 1, "only causal with k = 2 is new, and a temperature never is"
    assert op(X, Y, np.bool_(True), 3)[1] == 0


def test_an_option_of_a_function_may_be_a_number_given_at_the_call():
    @mr.op
    def leaky(x: Row, y: Col, slope: float):
        return mr.sum(F.leaky_relu(x * y, slope))

    x, y = torch.randn(5), torch.randn(7)
    for slope in (0.2, 0.5):
        torch.testing.assert_close(leaky(x, y, slope), F.leaky_relu(x[:, None] * y, slope).sum(-1))

    @mr.op
    def by_row(x: Row, y: Col):
        return mr.sum(F.leaky_relu(x * y, x))

    with pytest.raises(mr.TraceError, match="differs from pair to pair"):
        by_row(x, y)


def test_a_number_that_was_looked_at_is_still_a_number():
    """Fixed or not, it may stand wherever torch wants a tensor."""

    @mr.op
    def op(x: Row["f"], y: Col["f"], t: float, k: int):
        s = torch.minimum(x @ y, t) if t > 0 else torch.logaddexp(t, x @ y)
        return mr.sum(s), mr.topk(torch.maximum(s, k), k).values, mr.sum(mr.dropout(s, t * 0, 3))

    s = X @ Y.T
    low = torch.minimum(s, torch.tensor(0.5))
    for got, expected in zip(op(X, Y, 0.5, 2), (low.sum(1), low.clamp(min=2).topk(2).values, low.sum(1)), strict=True):
        torch.testing.assert_close(got, expected, check_dtype=False)
    torch.testing.assert_close(op(X, Y, -0.5, 2)[0], torch.logaddexp(torch.tensor(-0.5), s).sum(1))


def test_number_classes_trace_apart():
    """Whole numbers and floats are different programs: 5 // 2 is not 5.0 / 2."""

    def body(i: Row, c: Col):
        return mr.sum(i // 2 + c * 0)

    op = Counted(body)
    c = torch.zeros(2, dtype=torch.float64)
    (whole, new), (floating, more) = op(torch.tensor([5, 7]), c), op(torch.tensor([5.0, 7.5], dtype=torch.float64), c)
    assert whole.tolist() == [4.0, 6.0] and floating.tolist() == [4.0, 6.0] and (new, more) == (1, 1)


def test_optional_parameters():
    """A parameter that may be None can be left out; the body asks with ``is None``."""

    def body(x: Row["f"], y: Col["f"], bias: Col | None = None, scale: float | None = None, slope: Batch | None = None):
        s = x @ y
        s = s if bias is None else s + bias
        s = s if scale is None else s * scale
        s = s if slope is None else s - slope * (mr.row_index - mr.col_index).abs()
        return mr.logsumexp(s)

    op, s = Counted(body), X @ Y.T
    bias, slope = torch.randn(7, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    far = (torch.arange(5)[:, None] - torch.arange(7)).abs()
    torch.testing.assert_close(op(X, Y)[0], s.logsumexp(1))
    torch.testing.assert_close(op(X, Y, bias)[0], (s + bias).logsumexp(1))
    torch.testing.assert_close(op(X, Y, scale=0.5)[0], (s * 0.5).logsumexp(1))
    torch.testing.assert_close(op(X, Y, None, 0.5, slope)[0], (s * 0.5 - slope * far).logsumexp(1))
    assert [op(X, Y)[1], op(X, Y, bias)[1], op(X, Y, bias=None)[1]] == [0, 0, 0]


def test_fixed_choices():
    """Texts, literals and functions decide the program; a new one is a new trace."""

    def body(x: Row["f"], y: Col["f"], kind: str, f: Callable, side: Literal["cols", "rows"] = "cols"):
        s = f(x @ y)
        return mr.max(s, over=side) if kind == "max" else mr.sum(s, over=side)

    op, s = Counted(body), X @ Y.T
    torch.testing.assert_close(op(X, Y, "max", torch.tanh)[0], s.tanh().amax(1))
    torch.testing.assert_close(op(X, Y, "sum", torch.tanh)[0], s.tanh().sum(1))
    torch.testing.assert_close(op(X, Y, "sum", torch.exp, "rows")[0], s.exp().sum(0))
    assert [op(X, Y, "max", torch.tanh)[1], op(X, Y, "sum", torch.sin)[1]] == [0, 1]


def test_batch_parameters(seed):
    """One number, or one vector, per batch element; batch dimensions broadcast."""

    @mr.op
    def alibi(q: Row["f"], k: Col["f"], slope: Batch, shift: Batch["f"]):
        return mr.logsumexp((q + shift) @ k - slope * (mr.row_index - mr.col_index).abs())

    q, k = between(-1, 1, 2, 3, 5, 4), between(-1, 1, 2, 1, 7, 4)
    slope, shift = between(0, 1, 3), between(-1, 1, 2, 1, 4)

    def dense(q, k, slope, shift):
        far = (torch.arange(5)[:, None] - torch.arange(7)).abs()
        return ((q + shift[..., None, :]) @ k.mT - slope[:, None, None] * far).logsumexp(-1)

    same(alibi, dense, {"q": q, "k": k, "slope": slope, "shift": shift})


# Results -------------------------------------------------------------------------------------------------------------


class Both(NamedTuple):
    total: torch.Tensor
    best: torch.Tensor


def test_outputs_keep_their_form():
    """What the body returns, the call returns: tuple, list, dict, NamedTuple, monoid, nested."""

    def answers(form, call=lambda op: op(X, Y)):
        @mr.op
        def op(x: Row["f"], y: Col["f"]):
            s = x @ y
            return form(mr.sum(s), mr.max(s))

        return call(op)

    s = X @ Y.T
    total, best = s.sum(1), s.amax(1)
    for form in (
        lambda a, b: (a, b),
        lambda a, b: [a, b],
        Both,
        lambda a, b: {"a": a, "b": b},
        lambda a, b: (a, [b, {"c": a}]),
    ):
        got = answers(form)
        assert type(got) is type(form(total, best))
        torch.testing.assert_close(got, form(total, best))
    assert answers(Both)._fields == ("total", "best")
    element = answers(lambda a, b: mr.monoids.LogSumExp(z=a))
    assert isinstance(element, mr.monoids.LogSumExp)
    torch.testing.assert_close(element.z, total)
    sums = answers(lambda a, b: (mr.max(b, over="rows"), mr.monoids.LogSumExp(z=a)), lambda op: op.total(X, Y))
    torch.testing.assert_close((sums[0], sums[1].z), (best.max(), total.sum()))
    torch.testing.assert_close(answers(lambda a, b: (a, 2.0))[1], torch.tensor(2.0, dtype=torch.float64))


def test_topk_result_is_named():
    @mr.op
    def op(x: Row["f"], y: Col["f"]):
        return mr.topk(x @ y, 3)

    got, expected = op(X, Y), (X @ Y.T).topk(3)
    torch.testing.assert_close(got.values, expected.values)
    assert torch.equal(got.indices, expected.indices)


def test_results_of_every_shape(seed):
    """Per row, per column, per batch element, vectors, and constants, with the batch in front."""

    @mr.op
    def op(x: Row["f"], y: Col["f"]):
        s = x @ y
        return (
            mr.sum(s),
            mr.sum(s, over="rows"),
            mr.sum(mr.sum(s), over="rows"),
            mr.sum(s * y),
            x * mr.max(s),
            mr.num_cols * 1.0,
            mr.count(),
        )

    x, y = torch.randn(2, 3, 5, 4), torch.randn(3, 7, 4)
    shapes = [tuple(o.shape) for o in op(x, y)]
    assert shapes == [(2, 3, 5), (2, 3, 7), (2, 3), (2, 3, 5, 4), (2, 3, 5, 4), (2, 3), (2, 3)]


# Passes --------------------------------------------------------------------------------------------------------------

PASSES = {
    "several reductions": (
        1,
        lambda x, y, v, t: (mr.sum(x @ y), mr.max(x @ y), mr.softmax_mean(x @ y, v), mr.var(x @ y)),
    ),
    "both ways": (1, lambda x, y, v, t: (mr.logsumexp(x @ y), mr.logsumexp(x @ y, over="rows"))),
    "weighted mean": (1, lambda x, y, v, t: mr.weighted_mean(torch.exp(x @ y), v)),
    "normalised first": (1, lambda x, y, v, t: mr.sum(torch.tanh(F.normalize(x, dim=-1) @ F.normalize(y, dim=-1)))),
    "softmax by hand": (2, lambda x, y, v, t: mr.sum(torch.exp(x @ y - mr.logsumexp(x @ y)) * v)),
    "centred": (2, lambda x, y, v, t: mr.sum((x @ y - mr.mean(torch.tanh(x @ y))).square())),
    "rows then columns": (2, lambda x, y, v, t: mr.sum(torch.exp(x @ y - mr.max(x @ y)), over="rows")),
    "three": (3, lambda x, y, v, t: mr.sum(torch.tanh(x @ y - mr.sum(torch.tanh(x @ y - mr.max(x @ y)))))),
    "two chains side by side": (
        2,
        lambda x, y, v, t: (
            mr.sum(torch.exp(x @ y - mr.max(x @ y))),
            mr.sum(torch.exp(x @ y - mr.max(x @ y, over="rows")), over="rows"),
        ),
    ),
    "one-sided only": (0, lambda x, y, v, t: mr.sum(y) + 0 * x.sum()),
    "factors apart": (0, lambda x, y, v, t: mr.sum(x.sum() * y.sum())),
    "cross entropy": (1, lambda x, y, v, t: mr.logsumexp(x @ y) - mr.sum(torch.where(mr.col_index == t, x @ y, 0.0))),
}


@pytest.mark.parametrize("name", PASSES)
def test_as_few_passes_as_the_dependencies_allow(name):
    count, body = PASSES[name]

    @mr.op
    def op(x: Row["f"], y: Col["f"], v: Col["d"], t: Row):
        return body(x, y, v, t)

    arguments = (X, Y, torch.randn(7, 2, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 4]))
    assert len(op.program(*arguments).passes) == count
    text = op.explain(*arguments)
    assert f"{count} pass" in text and "5 rows × 7 columns" in text and "eager" in text
    assert text.count("  pass ") == count
    with mr.use(engine="reference"):
        expected = op(*arguments)
        assert "reference" in op.explain(*arguments)
    torch.testing.assert_close(op(*arguments), expected)


def test_explain_runs_nothing():
    @mr.op
    def op(x: Row["f"], y: Col["f"]):
        return mr.sum(torch.exp(x @ y - mr.logsumexp(x @ y)), over="rows")

    with mr.tally() as tally:
        assert "2 passes" in op.explain(X, Y)
    assert tally.computed == 0


# Random numbers ------------------------------------------------------------------------------------------------------

# From the authors' kat_vectors: counter, key -> output of philox4x32-10.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_in_python_is_philox(counter, key, expected):
    assert philox(counter, key) == expected


@mr.op
def numbers(x: Row, y: Col, seed: int):
    """Every uniform number itself: row i's best column has it as its value."""
    return mr.topk(mr.uniform(seed) + 0 * x * y, 7).values, mr.topk(mr.uniform(seed) + 0 * x * y, 7).indices


@pytest.mark.parametrize("engine", ["eager", "reference"])
@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32, 2**40 + 17, 2**62 + 12345, -1])
def test_uniform_is_philox(seed, engine):
    """Counter (column, row, batch, 0), key the seed: the same on every engine, for every tile, in every type."""
    x, y = torch.zeros(2, 5, dtype=torch.float64), torch.zeros(7, dtype=torch.float64)
    expected = torch.tensor(
        [[[uniform(seed, b, i, j) for j in range(7)] for i in range(5)] for b in range(2)], dtype=torch.float64
    )
    for tiles in (Tiles(1, 1, 1), Tiles(2, 3, 2), Tiles(2, 5, 7)):
        with tiled(tiles), mr.use(engine=engine):
            values, places = numbers(x, y, seed)
            torch.testing.assert_close(torch.empty_like(expected).scatter_(2, places, values), expected, rtol=0, atol=0)
            assert torch.equal(numbers(x.float(), y.float(), seed)[0].double(), values)


@mr.op
def kept(x: Row, y: Col, seed: int):
    """Which columns a row keeps: the least index of the dropped is what is missing."""
    return mr.topk(mr.dropout(1.0 + mr.col_index + 0 * x * y, 0.5, seed), 7).values


@pytest.mark.parametrize("engine", ["eager", "reference"])
@pytest.mark.parametrize("seed", [0, 2**32, 2**62 + 12345, -1])
def test_dropout_tosses_the_same_coins(seed, engine):
    x, y = torch.zeros(2, 5, dtype=torch.float64), torch.zeros(7, dtype=torch.float64)
    heads = [[[coin(seed, b, i, j) >= 2**14 for j in range(7)] for i in range(5)] for b in range(2)]
    expected = torch.tensor(heads) * 2.0 * torch.arange(1, 8).double()
    for tiles in (Tiles(1, 1, 1), Tiles(2, 3, 2), Tiles(2, 5, 7)):
        with tiled(tiles), mr.use(engine=engine):
            torch.testing.assert_close(kept(x, y, seed).sort(-1).values, expected.sort(-1).values)


def assert_signs_are_independent(heads: torch.Tensor, share: float = 0.5) -> None:
    """Means, neighbours, the corners of rectangles, rows and columns among each other: all within five sigma."""
    k = (heads.double() - share) / (share * (1 - share)) ** 0.5
    sums = [k, k[1:] * k[:-1], k[:, 1:] * k[:, :-1], k[64:] * k[:-64], k[:, 64:] * k[:, :-64], k[:, 2:] * k[:, :-2]]
    sums += [k[d:, e:] * k[:-d, e:] * k[d:, :-e] * k[:-d, :-e] for d, e in ((1, 1), (2, 3), (64, 64), (1, 128))]
    assert max(float(s.mean().abs()) * s.numel() ** 0.5 for s in sums) < 5
    for side in (k, k.mT):
        among = (side @ side.mT / side.shape[1] ** 0.5).fill_diagonal_(0)
        assert among.abs().max() < 6.5 and abs(float(among.var()) - 1) < 0.03


@pytest.mark.parametrize("least", [2**14, 3277])
@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3])
def test_coins_are_fair_and_do_not_know_each_other(seed, least):
    found = coins(seed, torch.tensor(1), torch.arange(1000)[:, None], torch.arange(900)[None, :])
    assert_signs_are_independent(found >= least, 1 - least / 2**15)


def test_coins_take_all_values_alike():
    """Those of even columns are lower halves of products, those of odd ones upper halves."""
    found = coins(5, torch.tensor(3), torch.arange(2000)[:, None], torch.arange(5000, 6024)[None, :])
    for half in (found[:, ::2], found[:, 1::2]):
        cells = torch.bincount(half.flatten() // 128, minlength=256).double()
        assert (
            len(cells) == 256
            and ((cells / cells.mean() - 1).square() * cells.mean()).sum() < 255 + 5 * (2 * 255) ** 0.5
        )


def test_a_probability_is_rounded_and_no_pair_is_dropped_for_certain():
    @mr.op
    def kept(x: Row, y: Col, p: float):
        return mr.mean(mr.dropout(1 + 0 * x * y, p, 3)), mr.max(mr.dropout(1 + 0 * x * y, p, 3))

    ones = torch.ones(64, dtype=torch.float64)
    assert kept(ones, ones, 1e-9)[1].max() == 1 / (1 - 2.0**-15)  # not 0: the least there is
    assert kept(ones, ones, 0.3)[1].max() == 1 / (1 - round(0.3 * 2**15) / 2**15)
    assert kept(ones, ones, 1 - 1e-9)[1].max() in (0, 2**15) and kept(ones, ones, 1.0)[0].max() == 0


@mr.op
def noise(x: Row, y: Col, seed: int):
    return mr.topk(mr.gumbel(seed) + 0 * x * y, 7)


@pytest.mark.parametrize("engine", ["eager", "reference"])
@pytest.mark.parametrize("seed", [0, 2**32, 2**62 + 12345, -1])
def test_gumbel_numbers_are_those_of_their_tickets(seed, engine):
    x, y = torch.zeros(2, 5, dtype=torch.float64), torch.zeros(7, dtype=torch.float64)
    drawn = [[[ticket(seed, b, i, j) for j in range(7)] for i in range(5)] for b in range(2)]
    expected = -torch.log(-torch.log1p(-torch.tensor(drawn, dtype=torch.float64)))
    for tiles in (Tiles(1, 1, 1), Tiles(2, 3, 2), Tiles(2, 5, 7)):
        with tiled(tiles), mr.use(engine=engine):
            values, places = noise(x, y, seed)
            torch.testing.assert_close(torch.empty_like(expected).scatter_(2, places, values), expected)


@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3])
def test_tickets_are_uniform_and_do_not_know_each_other(seed):
    """Signs as with coins; the histogram, also of the finest eighth, which decides draws of many; rows shifted."""
    u = philox_ticket(seed, torch.tensor(1), torch.arange(1000)[:, None], torch.arange(900)[None, :]).double()
    assert 0 < u.min() < 2.0**-17 and u.max() < 1
    for edge in (1.0, 2.0**-3, 2.0**-8):
        cells = torch.histc(u[u < edge] / edge, 64, 0, 1)
        expected = u.numel() * edge / 64
        assert ((cells - expected).square() / expected).sum() < 63 + 5 * (2 * 63) ** 0.5
    assert_signs_are_independent(u < 0.5)
    best = u.argmin(1)
    shifts = (best[1:] - best[:-1]) % 900
    assert torch.bincount(shifts, minlength=900).max() < 10  # no row is another, shifted


def test_the_first_known_answer_is_the_first_number():
    """Seed 0, pair (0, 0): the first word of the first known answer."""
    assert uniform(0, 0, 0, 0) == pytest.approx(0x6627E8D5 / 2**32, abs=2**-24)
    assert numbers(torch.zeros(1, dtype=torch.float64), torch.zeros(7, dtype=torch.float64), 0)[0].max() >= uniform(
        0, 0, 0, 0
    )


def test_uniform_numbers_are_uniform():
    """Mean, variance, extremes and a histogram of 40,000 numbers."""

    @mr.op
    def moments(x: Row, y: Col, seed: int, edge: Row):
        u = mr.uniform(seed) + 0 * x * y
        return mr.mean(u), mr.var(u), mr.min(u), mr.max(u), mr.count(mr.uniform(seed) < edge)

    n = 200
    edges = torch.linspace(0, 1, n + 1, dtype=torch.float64)[1:]
    mean, var, low, high, below = moments(
        torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64), 7, edges
    )
    assert abs(mean.mean() - 1 / 2) < 4 * math.sqrt(1 / 12) / n and abs(var.mean() - 1 / 12) < 0.002
    assert low.min() > 0 and high.max() < 1
    spread = (below - n * edges) / torch.sqrt(n * edges * (1 - edges)).clamp(min=1)  # row i counts numbers below edge i
    assert spread.abs().max() < 5 and abs(spread.mean()) < 0.5


def test_dropout_keeps_the_expectation():
    @mr.op
    def dropped(x: Row, y: Col, p: float, seed: int):
        return mr.mean(mr.dropout(1 + 0 * x * y, p, seed)), mr.count(mr.dropout(1 + 0 * x * y, p, seed) == 0)

    ones = torch.ones(300, dtype=torch.float64)
    for p in (0.0, 0.1, 0.5, 0.9):
        mean, zeros = dropped(ones, ones, p, 3)
        sigma = math.sqrt(p / (1 - p) / 300**2) if p else 1e-12
        assert abs(mean.mean() - 1) < 4 * sigma + 1e-12
        assert abs(zeros.double().mean() / 300 - p) < 4 * math.sqrt(p * (1 - p)) / 300 + 1e-12


def test_samples_have_the_softmax_as_their_frequencies():
    """The Gumbel-max trick: 20,000 rows of one logit; Pearson's statistic below its 99.9th percentile."""

    @mr.op
    def draw(x: Row, logit: Col, seed: int):
        return mr.sample(logit + 0 * x, seed)

    logit = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -math.inf], dtype=torch.float64)
    n = 20_000
    places = draw(torch.zeros(n, dtype=torch.float64), logit, 11)
    counts, expected = torch.bincount(places, minlength=6), n * torch.softmax(logit, 0)
    assert counts[5] == 0
    statistic = ((counts - expected)[:5].square() / expected[:5]).sum()
    assert statistic < 18.47  # chi-square of 4 degrees of freedom at 0.999


def test_gumbel_numbers():
    """Mean γ, variance π²/6; and different seeds, rows, columns and batch elements are different numbers."""

    @mr.op
    def moments(x: Row, y: Col, seed: int):
        g = mr.gumbel(seed) + 0 * x * y
        return mr.mean(g), mr.var(g, correction=0)

    zeros = torch.zeros(300, dtype=torch.float64)
    mean, var = moments(zeros, zeros, 5)
    assert abs(mean.mean() - 0.5772156649) < 4 * math.pi / math.sqrt(6) / 300
    whole = var.mean() + mean.var(correction=0)
    assert abs(whole - math.pi**2 / 6) < 0.05
    assert not torch.equal(mean, moments(zeros, zeros, 6)[0])
    batched = moments(zeros.expand(2, 300), zeros, 5)[0]
    assert torch.equal(batched[0], mean) and not torch.equal(batched[1], mean)


def test_seed_is_not_pythons_random():
    """Neither torch's nor Python's generator is touched."""
    torch.manual_seed(0), random.seed(0)
    before = torch.get_rng_state(), random.getstate()
    numbers(torch.zeros(2), torch.zeros(7), 3)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_parameters_by_position_alone():
    @mr.op
    def total(x: Row["d"], y: Col["d"], /, scale: float = 2.0):
        return mr.sum(x @ y * scale)

    x, y = torch.ones(2, 3), torch.ones(4, 3)
    assert total(x, y).tolist() == [24.0, 24.0] and total(x, y, scale=1.0).tolist() == [12.0, 12.0]


@pytest.mark.parametrize("f", [torch.relu, F.relu6])
def test_rectified_integers_stay_integers(f):
    @mr.op
    def most(x: Row, y: Col):
        return mr.max(f(x - y)), mr.min(f(y - x))

    x, y = torch.tensor([2**53 + 1, 3]), torch.tensor([0, -5])
    pairs = x.unsqueeze(1) - y
    for got, right in zip(most(x, y), (f(pairs).amax(1), f(-pairs).amin(1)), strict=True):
        assert got.dtype == torch.int64 and torch.equal(got, right)
