"""Random pair programs as Python text, and the comparison of two engines on them.

A program is a straight list of assignments, one operation each, drawn by Hypothesis so that a failure shrinks to a short one.
What fails is printed as a script that runs by itself. Every value carries what the generator must know to stay inside the
language and away from places where two correct engines may differ by more than rounding: a bound on its size, whether it
is positive, whether it is *generic* (no two pairs are equal and none sits on a kink but by accident) and whether it is
finite. Used by ``tests/unit/test_random_programs.py``; imports torch, hypothesis and the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce.plan import tiles as plan

NAMESPACE = {"torch": torch, "F": F, "mr": mr, "Row": mr.Row, "Col": mr.Col, "Batch": mr.Batch}
LENGTHS = (3, 2, 1, 5, 8)  # of rows and columns; also 0, now and then
WIDTHS = (2, 3, 1, 4, 9)  # of vectors: 9 takes the road of many features
BATCHES = ((), (2,), (1,), (3,), (2, 1), (2, 2))


# Monoids of one's own --------------------------------------------------------------------------------------------------


class Turn(mr.Monoid):
    """The product of complex numbers, its gradient derived from ``remove``."""

    re: mr.Scalar = 1.0
    im: mr.Scalar = 0.0

    def combine(a, b):
        return Turn(re=a.re * b.re - a.im * b.im, im=a.re * b.im + a.im * b.re)

    def remove(c, a):
        size = a.re * a.re + a.im * a.im
        return Turn(re=(c.re * a.re + c.im * a.im) / size, im=(c.im * a.re - c.re * a.im) / size)


class Either(mr.Monoid):
    """Whether any of several independent events happens: ``1 - Π (1 - p)``, its gradient by ``pullback``."""

    p: mr.Scalar = 0.0

    def combine(a, b):
        return Either(p=a.p + b.p - a.p * b.p)

    def pullback(c, a, g):
        return Either(p=g.p * (1 - c.p) / (1 - a.p))


class Blend(mr.Monoid):
    """The weighted mean of vectors with its weight, as the paper writes it."""

    z: mr.Scalar = -math.inf
    v: mr.Vector = 0.0

    def combine(a, b):
        z = torch.logaddexp(a.z, b.z)
        safe = torch.where(z == -math.inf, 0.0, z)
        return Blend(z=z, v=a.v * torch.exp(a.z - safe) + b.v * torch.exp(b.z - safe))

    def pullback(c, a, g):
        w = torch.exp(a.z - torch.where(c.z == -math.inf, 0.0, c.z))
        return Blend(z=w * (g.z + mr.dot(g.v, a.v - c.v)), v=w * g.v)


NAMESPACE |= {"Turn": Turn, "Either": Either, "Blend": Blend}


# A program and its text ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """The text of an op and of its arguments, the tiles to run it by, and how often to differentiate it."""

    parameters: tuple[tuple[str, str, str], ...]  # name, annotation, the argument as an expression
    lines: tuple[str, ...]
    seed: int
    tiles: plan.Tiles
    second: bool

    @property
    def source(self) -> str:
        heads = ", ".join(f"{name}: {annotation}" for name, annotation, _ in self.parameters)
        return "\n".join([f"def program({heads}):", *(f"    {line}" for line in self.lines)])

    def op(self) -> mr.Op:
        scope = dict(NAMESPACE)
        exec(compile(self.source, "<random program>", "exec"), scope)
        return mr.op(scope["program"])

    def arguments(self) -> dict[str, Any]:
        torch.manual_seed(self.seed)
        values = {name: eval(text, dict(NAMESPACE)) for name, _, text in self.parameters}
        for value in values.values():
            if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
                value.requires_grad_()
        return values

    def check(self) -> None:
        """Both engines give the same, else an AssertionError that holds the script."""
        try:
            check(self.op(), self.arguments(), self.tiles, self.second)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}\n\nTo reproduce, run:\n\n{self}") from error

    def __str__(self) -> str:
        given = [f"{name} = {text}" for name, _, text in self.parameters]
        floats = [name for name, _, text in self.parameters if "float64" in text]
        return "\n".join(
            [
                "import torch",
                "import torch.nn.functional as F",
                "import monoidreduce as mr",
                "from monoidreduce import Batch, Col, Row",
                "from monoidreduce.plan.tiles import Tiles",
                "from tests.programs import Blend, Either, Turn, check",
                "",
                "@mr.op",
                self.source,
                "",
                f"torch.manual_seed({self.seed})",
                *given,
                *(f"{name}.requires_grad_()" for name in floats),
                f"arguments = dict({', '.join(f'{n}={n}' for n, _, _ in self.parameters)})",
                f"check(program, arguments, {self.tiles}, second={self.second})",
            ]
        )

    __repr__ = __str__


# Comparing -------------------------------------------------------------------------------------------------------------


def check(op: mr.Op, arguments: dict[str, Any], tiles: plan.Tiles, second: bool) -> None:
    """Values, gradients and (``second``) gradients of gradients of the eager engine, against the reference engine."""
    with tiled(tiles), mr.use(engine="eager"):
        got = everything(op, arguments, second)
    with mr.use(engine="reference"):
        expected = everything(op, arguments, second)
    assert got.keys() == expected.keys()
    wrong = [f"{name}: {problem}" for name in got if (problem := difference(got[name], expected[name]))]
    assert not wrong, "eager differs from reference\n" + "\n".join(wrong)


@contextmanager
def tiled(tiles: plan.Tiles):
    """Run every fold inside the block by these tiles, and every pick in pieces of as many pairs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "choose", lambda *_, **__: tiles)
        patch.setattr(plan, "ELEMENTS", tiles.batch * tiles.rows * tiles.cols)
        yield


def everything(op: Callable, arguments: dict[str, Any], second: bool) -> dict[str, torch.Tensor | None]:
    """Every output by name, then the gradients of each argument for one random cotangent, then their gradients."""
    found: dict[str, torch.Tensor | None] = {}
    outputs = list(flat(op(**arguments)))
    found.update({f"output {k}": o.detach() for k, o in enumerate(outputs)})
    inputs = {n: v for n, v in arguments.items() if isinstance(v, torch.Tensor) and v.requires_grad}
    roots = outputs
    for order in ("gradient", "second gradient")[: 1 + second]:
        generator = torch.Generator().manual_seed(len(found))
        cotangents = [torch.rand(o.shape, generator=generator, dtype=torch.float64) - 0.3 for o in roots]
        live = [(o, g) for o, g in zip(roots, cotangents, strict=True) if o is not None and o.requires_grad]
        grads: Iterable[torch.Tensor | None] = [None] * len(inputs)
        if live and inputs:
            ys, gs = zip(*live, strict=True)
            grads = torch.autograd.grad(ys, list(inputs.values()), gs, create_graph=second, allow_unused=True)
        roots = [torch.zeros_like(v) if g is None else g for v, g in zip(inputs.values(), grads, strict=True)]
        found.update({f"{order} of {n}": g.detach() for n, g in zip(inputs, roots, strict=True)})
    return found


def flat(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for v in value.values() if isinstance(value, dict) else value:
            yield from flat(v)


def difference(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-9) -> str:
    """What is wrong with ``got``; nothing if it is equal but for rounding, NaN and infinities in the same places."""
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        return f"{got.dtype}{list(got.shape)} instead of {expected.dtype}{list(expected.shape)}"
    if not got.dtype.is_floating_point:
        same = torch.equal(got, expected)
    else:
        finite = expected[expected.isfinite()]
        scale = 1 + (finite.abs().max().item() if finite.numel() else 0.0)
        same = torch.allclose(got, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    return "" if same else f"\n    got      {got.tolist()}\n    expected {expected.tolist()}"


# Values and how to make them -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Value:
    """One value of the body: its text, where it lives, and what is known of it."""

    text: str
    rows: bool = False
    cols: bool = False
    feature: str | int | None = None
    kind: str = "float"
    bound: float = 1.0
    positive: bool = False  # at least 0.1
    generic: bool = True
    finite: bool = True
    roots: frozenset[str] = frozenset()

    @property
    def is_pair(self) -> bool:
        return self.rows and self.cols


@dataclass(frozen=True)
class Unary:
    """A function of one number: its text; where it is used (``limit``) and what comes out (``bound`` of the input's)."""

    text: str
    limit: float = 6.0
    bound: Callable[[float], float] = lambda b: b
    needs_positive: bool = False
    positive: bool = False
    needs_generic: bool = False
    generic: bool = True


_one = lambda b: 1.0
_jump = {"needs_generic": True, "generic": False}
UNARY = [
    Unary("torch.tanh({})", 5, _one),
    Unary("-{}"),
    Unary("torch.exp({})", 2, lambda b: math.exp(b), positive=True),
    Unary("{}.square()", 4, lambda b: b * b),
    Unary("{} ** 2", 4, lambda b: b * b),
    Unary("{} ** 3", 2, lambda b: b**3),
    Unary("torch.pow({}, 1.5)", 4, lambda b: b**1.5, needs_positive=True),
    Unary("torch.abs({})"),
    Unary("{}.sign()", bound=_one, **_jump),
    Unary("torch.sqrt({})", 9, lambda b: max(1, b) ** 0.5, needs_positive=True, positive=True),
    Unary("torch.rsqrt({})", 9, lambda b: 3.2, needs_positive=True, positive=True),
    Unary("{}.reciprocal()", 9, lambda b: 10.0, needs_positive=True, positive=True),
    Unary("1 / {}", 9, lambda b: 10.0, needs_positive=True, positive=True),
    Unary("torch.exp2({})", 3, lambda b: 2**b, positive=True),
    Unary("torch.expm1({})", 2, lambda b: math.exp(b)),
    Unary("torch.log({})", 9, lambda b: 2.4, needs_positive=True),
    Unary("{}.log2()", 9, lambda b: 3.4, needs_positive=True),
    Unary("torch.log1p({})", 9, lambda b: 2.4, needs_positive=True),
    Unary("torch.sin({})", bound=_one),
    Unary("{}.cos()", bound=_one),
    Unary("torch.atan({})", bound=lambda b: 1.6),
    Unary("torch.erf({})", 3, _one),
    Unary("torch.sigmoid({})", 2, _one, positive=True),
    Unary("F.silu({})"),
    Unary("torch.relu({})", generic=False),
    Unary("F.leaky_relu({}, 0.2)"),
    Unary("F.gelu({})"),
    Unary('F.gelu({}, approximate="tanh")'),
    Unary("F.softplus({})", 2, lambda b: b + 0.7, positive=True),
    Unary("F.softplus({}, beta=2.0, threshold=3.0)", 4, lambda b: b + 0.7, generic=False),
    Unary("F.logsigmoid({})", 6, lambda b: b + 0.7),
    Unary("torch.floor({})", bound=lambda b: b + 1, **_jump),
    Unary("{}.ceil()", bound=lambda b: b + 1, **_jump),
    Unary("torch.round({})", bound=lambda b: b + 1, **_jump),
    Unary("torch.trunc({})", **_jump),
    Unary("{}.frac()", bound=_one, needs_generic=True),
    Unary("torch.remainder({}, 0.7)", bound=_one, needs_generic=True),
    Unary("{} // 0.7", bound=lambda b: 2 * b + 1, **_jump),
    Unary("torch.heaviside({}, 0.5)", bound=_one, **_jump),
    Unary("{}.detach()"),
    Unary("{}.to(torch.float64)"),
    Unary("{}.clamp(min=-0.3, max=0.4)", bound=_one, generic=False),
    Unary("torch.clamp({}, max=0.4)", generic=False),
    Unary("{}.clamp_min(0.1)", positive=True, generic=False),
    Unary("F.hardtanh({})", bound=_one, generic=False),
    Unary("F.relu6({})", generic=False),
    Unary("F.elu({}, 0.7)"),
    Unary("F.mish({})"),
    Unary("F.softsign({})", bound=_one),
    Unary("F.hardsigmoid({})", bound=_one, generic=False),
    Unary("F.hardswish({})", generic=False),
    Unary("F.tanhshrink({})"),
    Unary("torch.sinh({})", 2, lambda b: math.cosh(b)),
    Unary("torch.cosh({})", 2, lambda b: math.cosh(b), positive=True),
    Unary("torch.tan({})", 1, lambda b: 1.6),
    Unary("torch.erfc({})", 2, lambda b: 2.0),
    Unary("torch.logit(0.1 + 0.8 * torch.sigmoid({}))", 4, lambda b: 2.2),
    Unary("torch.nan_to_num({})"),
    Unary("torch.positive({})"),
]

POSITIVE = ("(torch.sigmoid({}) + 0.1)", "(torch.abs({}) + 0.3)", "(F.softplus({}) + 0.1)", "torch.exp({})")

# Functions of two numbers; {q} is made positive. The bound is that of the result for bounds a and b.
BINARY: list[tuple[str, Callable[[float, float], float]]] = [
    ("{a} + {b}", lambda a, b: a + b),
    ("{a} * {b}", lambda a, b: a * b),
    ("{a} - {b}", lambda a, b: a + b),
    ("{a} / {q}", lambda a, b: 10 * a),
    ("torch.minimum({a}, {b})", max),
    ("torch.maximum({a}, {b})", max),
    ("torch.fmax({a}, {b})", max),
    ("torch.logaddexp({a}, {b})", lambda a, b: max(a, b) + 0.7),
    ("torch.pow({p}, {b})", lambda a, b: 40.0),
    ("torch.add({a}, {b}, alpha=0.5)", lambda a, b: a + b),
    ("torch.rsub({a}, {b})", lambda a, b: a + b),
    ("torch.lerp({a}, {b}, 0.3)", lambda a, b: a + b),
    ("torch.xlogy({p}, {q})", lambda a, b: 3 * a),
    ("torch.div({a}, {q})", lambda a, b: 10 * a),
]
JUMPY = [
    ("torch.remainder({a}, {q})", lambda a, b: b + 2),
    ("torch.floor_divide({a}, {q})", lambda a, b: 10 * a + 1),
    ('torch.div({a}, {q}, rounding_mode="floor")', lambda a, b: 10 * a + 1),
]
INTEGER = ["{a} + {b}", "{a} - {b}", "{a} * {b}", "torch.minimum({a}, {b})", "torch.maximum({a}, {b})", "{a} // 2", "{a} % 3",
           "-{a}", "{a}.abs()", "({a} - {b}).sign()", "{a}.square()", "torch.where({c}, {a}, {b})"]  # fmt: skip
LOGICAL = ["{a} & {b}", "{a} | {b}", "{a} ^ {b}", "~{a}", "torch.logical_and({a}, {b})", "torch.logical_or({a}, {b})",
           "torch.logical_xor({a}, {b})", "torch.logical_not({a})"]  # fmt: skip
