"""Random pair programs as Python text, and the comparison of two engines on them.

A program is a straight list of assignments, one operation each, read off a tape of bytes that Hypothesis draws.
What fails is made shorter, line by line, and printed as a script that runs by itself. Every value carries what the
generator must know to stay inside the language and away from places where two correct engines may differ by more than
rounding: a bound on its size, whether it is positive, whether it is *generic* (no two pairs are equal and none sits on
a kink but by accident) and whether it is finite. For ``tests/unit/engines/test_random_programs.py``.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce.plan import schedule as plan
from tests.support import internals
from tests.support.dense_reference import plain

NAMESPACE = {"torch": torch, "F": F, "mr": mr, "Row": mr.Row, "Col": mr.Col, "Batch": mr.Batch}
LENGTHS = (3, 2, 1, 5, 8)  # of rows and columns; also 0, now and then
WIDTHS = (2, 3, 1, 4, 9)  # of vectors: 9 takes the road of many features
TOLERANCE = 1e-9
BATCHES = ((), (2,), (1,), (3,), (2, 1), (2, 2))


# Monoids of one's own ------------------------------------------------------------------------------------------------


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


def signed(*shape: int) -> torch.Tensor:
    """Random numbers between -1 and 1."""
    return torch.rand(shape, dtype=torch.float64) * 2 - 1


NAMESPACE["signed"] = signed


# A program and its text ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """The text of an op and of its arguments, the tiles to run it by, and how often to differentiate it."""

    parameters: tuple[tuple[str, str, str], ...]  # name, annotation, the argument as an expression
    assignments: tuple[tuple[str, str], ...]  # name, text
    returned: tuple[str, ...]
    seed: int
    tiles: plan.Tiles
    second: bool

    @property
    def source(self) -> str:
        heads = ", ".join(f"{name}: {annotation}" for name, annotation, _ in self.parameters)
        lines = [f"{name} = {text}" for name, text in self.assignments] + [f"return {', '.join(self.returned)}"]
        return "\n".join([f"def program({heads}):", *(f"    {line}" for line in lines)])

    def op(self) -> mr.Op:
        scope = dict(NAMESPACE)
        exec(compile(self.source, "<random program>", "exec"), scope)
        return mr.op(scope["program"])

    def arguments(self) -> dict[str, Any]:
        torch.default_generator.manual_seed(self.seed)  # torch.manual_seed, without a word to devices
        return {name: eval(text, dict(NAMESPACE)) for name, _, text in self.parameters}

    def check(self) -> None:
        """The engines and plain torch give the same, else an AssertionError with a short script that shows it."""
        what = self.failure()
        if what:
            small = self.shrunk(_kind(what))
            raise AssertionError(f"{small.failure()}\n\nTo reproduce, run:\n\n{small}")

    def failure(self) -> str:
        try:
            check(self.op(), self.arguments(), self.tiles, self.second)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def shrunk(self, kind: str) -> Program:
        """A simpler program that fails in the same way; the simplest that single steps lead to."""
        for candidate in self.simpler():
            if _kind(candidate.failure()) == kind:
                return candidate.shrunk(kind)
        return self

    def simpler(self) -> Iterator[Program]:
        """Programs with one result, one line or one complication less."""
        if len(self.returned) > 1:
            yield from (replace(self, returned=(name,)).pruned() for name in self.returned)
        if self.second:
            yield replace(self, second=False)
        inputs = {name for name, _, _ in self.parameters}
        for k, (name, text) in enumerate(self.assignments):
            earlier = inputs | {n for n, _ in self.assignments[:k]}
            for word in sorted(_words(text) & earlier):
                swap = lambda t, name=name, word=word: re.sub(rf"\b{name}\b", word, t)
                later = tuple((n, swap(t)) for n, t in self.assignments[k + 1 :])
                yield replace(
                    self, assignments=self.assignments[:k] + later, returned=tuple(map(swap, self.returned))
                ).pruned()
        if self.tiles != plan.Tiles(1, 8, 8):
            yield replace(self, tiles=plan.Tiles(1, 8, 8))

    def pruned(self) -> Program:
        """Without the lines and parameters that nothing needs; a floating row and a column stay, they say the sizes."""
        needed, kept = set(self.returned), []
        for name, text in reversed(self.assignments):
            if name in needed:
                kept.append((name, text))
                needed |= _words(text)
        for side in ("Row", "Col"):
            floats = [n for n, a, text in self.parameters if a.startswith(side) and "signed" in text]
            if not needed.intersection(floats):
                needed.update(floats[:1])
        parameters = tuple(p for p in self.parameters if p[0] in needed)
        return replace(self, parameters=parameters, assignments=tuple(reversed(kept)))

    def __str__(self) -> str:
        given = [f"{name} = {text}" for name, _, text in self.parameters]
        return "\n".join(
            [
                "import torch",
                "import torch.nn.functional as F",
                "import monoidreduce as mr",
                "from monoidreduce import Batch, Col, Row",
                "from monoidreduce.plan.schedule import Tiles",
                "from tests.support.random_programs import Blend, Either, Turn, check, signed",
                "",
                "@mr.op",
                self.source,
                "",
                f"torch.manual_seed({self.seed})",
                *given,
                f"arguments = dict({', '.join(f'{n}={n}' for n, _, _ in self.parameters)})",
                f"check(program, arguments, {self.tiles}, second={self.second})",
            ]
        )

    __repr__ = __str__


def _kind(failure: str) -> str:
    """The first line of a message without its numbers."""
    return re.sub(r"[\d.-]+", "", failure.split("\n")[0])


def _words(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w.])[a-z]\w*", text))


# Comparing -----------------------------------------------------------------------------------------------------------


def check(op: mr.Op, arguments: dict[str, Any], tiles: plan.Tiles, second: bool) -> None:
    """Values, gradients and (``second``) gradients of gradients of the eager engine, against the reference engine."""
    with tiled(tiles), mr.use(engine="eager"):
        got = everything(op, arguments, second)
    with mr.use(engine="reference"):
        expected = everything(op, arguments, second)
    compare(got, expected, "eager differs from reference")
    like = list(flat(op(**arguments)))
    with default_dtype(torch.float64):
        truth = everything(functools.partial(plain(op, arguments), like), arguments, second=False)
    compare({name: expected[name] for name in truth}, truth, "reference differs from plain torch")


def compare(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    wrong = [f"{name}: {problem}" for name in expected if (problem := difference(got[name], expected[name]))]
    assert not wrong, f"{what}\n" + "\n".join(wrong)


@contextmanager
def default_dtype(dtype: torch.dtype):
    """So that a whole number times 0.5 is in ``dtype``, as it is in a body."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def tiled(tiles: plan.Tiles):
    """Run every fold inside the block by these tiles, and every pick in pieces of as many pairs."""
    with pytest.MonkeyPatch.context() as patch:
        pairs = tiles.batch * tiles.rows * tiles.cols
        internals.set_tiles(patch, choose=lambda *_, **__: tiles, pairs=pairs)
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
        cotangents = [cotangent(o, k, generator) for k, o in enumerate(roots)]
        live = [(o, g) for o, g in zip(roots, cotangents, strict=True) if o.requires_grad and g is not None]
        grads: Iterable[torch.Tensor | None] = [None] * len(inputs)
        if live and inputs:
            ys, gs = zip(*live, strict=True)
            grads = torch.autograd.grad(ys, list(inputs.values()), gs, create_graph=second, allow_unused=True)
        roots = [torch.zeros_like(v) if g is None else g for v, g in zip(inputs.values(), grads, strict=True)]
        found.update({f"{order} of {n}": g.detach() for n, g in zip(inputs, roots, strict=True)})
    return found


def cotangent(y: torch.Tensor, k: int, generator: torch.Generator) -> torch.Tensor | None:
    """A random cotangent; for the second result one number for all, as of a sum, and for the third none."""
    if k == 2:
        return None
    shape = y.shape if k != 1 else ()
    return (torch.rand(shape, generator=generator, dtype=torch.float64) - 0.3).expand(y.shape)


def flat(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for v in value.values() if isinstance(value, dict) else value:
            yield from flat(v)


def difference(got: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> str:
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


# Values and how to make them -----------------------------------------------------------------------------------------


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
    """A function of one number: its text, up to which size it is used, and the ``bound`` of what comes out."""

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
    Unary("torch.heaviside({}, mr.num_cols * 0.5)", bound=_one, **_jump),
    Unary("{}.detach()"),
    Unary("{}.to(torch.float64)"),
    Unary("{}.clamp(min=-0.3, max=0.4)", bound=_one, generic=False),
    Unary("torch.clamp({}, max=0.4)", generic=False),
    Unary("{}.clamp_min(0.1)", positive=True, generic=False),
    Unary("{}.clamp_max(0.3)", generic=False),
    Unary("torch.clip({}, -0.4, 0.5)", bound=_one, generic=False),
    Unary("torch.deg2rad({})"),
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
    ("torch.fmin({a}, {b})", max),
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
WITH_NUMBER = ["{a} + {n}", "{n} * {a}", "{a} - {n}", "{n} - {a}", "{a} / ({n} + 1)"]
INTEGER = [
    "{a} + {b}",
    "{a} - {b}",
    "{a} * {b}",
    "torch.minimum({a}, {b})",
    "torch.maximum({a}, {b})",
    "{a} // 2",
    "{a} % 3",
    "-{a}",
    "{a}.abs()",
    "({a} - {b}).sign()",
    "{a}.square()",
    "torch.where({c}, {a}, {b})",
]
LOGICAL = [
    "{a} & {b}",
    "{a} | {b}",
    "{a} ^ {b}",
    "~{a}",
    "torch.logical_and({a}, {b})",
    "torch.logical_or({a}, {b})",
    "torch.logical_xor({a}, {b})",
    "torch.logical_not({a})",
]


@dataclass(frozen=True)
class Input:
    """A parameter that a program may declare; ``argument`` is its value, with {shape} and its kind to be filled in."""

    annotation: str
    axis: str
    feature: str | int | None = None
    kind: str = "float"


INPUTS = {
    "x": Input('Row["f"]', "rows", "f"),
    "y": Input('Col["f"]', "cols", "f"),
    "w": Input('Row["d"]', "rows", "d"),
    "v": Input('Col["d"]', "cols", "d"),
    "p": Input("Row[2]", "rows", 2),
    "q": Input("Col[2]", "cols", 2),
    "r": Input("Row", "rows"),
    "c": Input("Col", "cols"),
    "i": Input("Row", "rows", kind="int"),
    "j": Input("Col", "cols", kind="int"),
    "m": Input("Row", "rows", kind="bool"),
    "n": Input("Col", "cols", kind="bool"),
    "b": Input("Batch", "batch"),
    "bf": Input('Batch["f"]', "batch", "f"),
    "t": Input("float", "number"),
    "h": Input("float", "tensor"),
    "seed": Input("int", "number", kind="int"),
}


class Builder:
    """Draws a program line by line; every method that makes a value returns it and keeps it for later lines."""

    def __init__(self, tape: bytes):
        self.tape = iter(tape)
        self.lines: list[tuple[str, str]] = []  # name, text
        self.values: list[Value] = []
        self.used: set[str] = set()  # names that a later line reads
        self.reduced: set[str] = set()  # names that come after a reduction
        self.inputs: dict[str, str] = {}  # name, argument text
        self.rows, self.cols = self.length(), self.length()
        self.widths: dict[Any, int] = {"f": self.choose(WIDTHS), "d": self.choose(WIDTHS), 2: 2}
        self.batch = self.choose(BATCHES)

    def program(self) -> Program:
        for _ in range(1 + self.below(STEPS_AT_MOST)):
            getattr(self, self.choose(STEPS))()
        self.reduction()
        for name in ("r", "c"):  # so that there is always a floating row and a column
            self.input(name)
        parameters = tuple((n, INPUTS[n].annotation, text) for n, text in self.inputs.items())
        tiles = plan.Tiles(self.choose((1, 2, 3)), self.choose((2, 1, 3, 8)), self.choose((2, 1, 3, 8)))
        seed, second = self.below(100), self.chance(4)
        return Program(parameters, tuple(self.lines), self.returned(), seed, tiles, second).pruned()

    # Drawing

    def below(self, n: int) -> int:
        return next(self.tape, 0) % n

    def choose(self, options: Any) -> Any:
        return options[self.below(len(options))]

    def chance(self, one_in: int) -> bool:
        return self.below(one_in) == one_in - 1

    def length(self) -> int:
        return 0 if self.chance(30) else self.choose(LENGTHS)

    def pick(self, fits: Callable[[Value], bool], *fresh: Callable[[], Value]) -> Value:
        """One of the latest values that fit (most often), or a new one."""
        old = [v for v in reversed(self.values) if v.finite and fits(v)]
        old = sorted(old, key=lambda v: v.text in self.used)[:4]  # what nobody uses yet comes first
        if old and (not fresh or not self.chance(4)):
            return self.choose(old)
        return self.choose(fresh)()

    # Writing

    def let(self, text: str, of: Iterable[Value] = (), **known: Any) -> Value:
        """Write one line; the value lives where its operands live unless said otherwise."""
        of = tuple(of)
        self.used.update(v.text for v in of)
        name = f"a{len(self.lines)}"
        self.lines.append((name, text))
        roots = frozenset({name}).union(*(v.roots for v in of))
        where = {
            "rows": any(v.rows for v in of),
            "cols": any(v.cols for v in of),
            "feature": next((v.feature for v in of if v.feature is not None), None),
        }
        value = Value(name, roots=roots, **{**where, **known})
        if any(v.roots & self.reduced for v in of):
            self.reduced.add(name)
        self.values.append(value)
        return value

    def input(self, name: str) -> Value:
        declared = INPUTS[name]
        if name not in self.inputs:
            self.inputs[name] = self.argument(declared)
        return Value(
            name,
            declared.axis == "rows",
            declared.axis == "cols",
            declared.feature,
            declared.kind,
            roots=frozenset({name}),
            generic=declared.axis in ("rows", "cols"),
        )

    def argument(self, declared: Input) -> str:
        if declared.axis == "number":
            return (
                str(self.choose((3, 12345, 2**40 + 1)))
                if declared.kind == "int"
                else str(self.choose((0.5, 1.0, -0.7)))
            )
        grad = "" if self.chance(6) else ".requires_grad_()"
        if declared.axis == "tensor":
            return f"signed(){grad}"
        own = self.choose((self.batch, (), (1,) * len(self.batch)))
        lengths = {"rows": (self.rows,), "cols": (self.cols,), "batch": ()}[declared.axis]
        width = () if declared.feature is None else (self.widths[declared.feature],)
        shape = ", ".join(map(str, (*own, *lengths, *width)))
        if declared.kind == "bool":
            return f"torch.rand({shape or '()'}) < 0.6"
        if declared.kind == "int":  # labels of the other side, some outside
            return f"torch.randint(-1, {1 + (self.cols if declared.axis == 'rows' else self.rows)}, ({shape},))"
        if width and lengths and self.chance(5):
            turned = ", ".join(map(str, (*own, *width, *lengths)))
            return f"signed({turned}).mT{grad}"
        if own != self.batch and self.chance(5):
            whole = ", ".join(map(str, (*self.batch, *lengths, *width)))
            return f"signed({shape}).expand({whole or '()'}){grad}"
        return f"signed({shape}){grad}"

    def fit(self, v: Value, limit: float) -> str:
        """The text of a value no larger than ``limit``."""
        return v.text if v.bound <= limit else f"({v.text} * {limit / v.bound:.2g})"

    def positive(self, v: Value, limit: float = 9.0) -> str:
        if v.positive and v.bound <= limit:
            return v.text
        return self.choose(POSITIVE).format(self.fit(v, 2.0))

    # Numbers and vectors to begin with

    def number(self) -> Value:
        """Any number: of a pair, a row, a column, a batch element or the call."""
        fresh = [lambda: self.input(self.choose("rcbth")), self.pair]
        return self.pick(lambda v: v.feature is None and v.kind == "float", *fresh)

    def pair_number(self) -> Value:
        return self.pick(lambda v: v.is_pair and v.feature is None and v.kind == "float", self.pair)

    def pair(self) -> Value:
        return self.choose((self.dot, self.sides, self.sqdist, self.noise, self.contract))()

    def generic(self, pair: bool = True) -> Value:
        fits = lambda v: v.generic and v.feature is None and v.kind == "float" and (v.is_pair or not pair)
        return self.pick(fits, self.dot)

    def letter(self) -> str | int:
        return self.choose(("f", "d", 2))

    def vector(self, side: str, letter: str | int) -> Value:
        """A vector of one side over the letter."""
        name = next(n for n, d in INPUTS.items() if d.axis == side and d.feature == letter)
        fits = lambda v: (
            v.feature == letter and v.kind == "float" and (v.rows, v.cols) == (side == "rows", side == "cols")
        )
        return self.pick(fits, lambda: self.input(name))

    def any_vector(self, letter: str | int) -> Value:
        """A vector of a row, a column or a pair; a pair's half of the time."""
        if self.chance(2):
            fits = lambda v: v.feature == letter and v.kind == "float" and v.is_pair
            return self.pick(fits, lambda: self.pair_vector(letter))
        return self.vector(self.choose(("cols", "rows")), letter)

    # Steps: each writes a value of one kind

    def dot(self) -> Value:
        letter = self.letter()
        a, b = self.vector("rows", letter), self.vector("cols", letter)
        text = self.choose(("{} @ {}", "({} * {}).sum()")).format(*self.choose(((a.text, b.text), (b.text, a.text))))
        return self.let(
            text, (a, b), feature=None, bound=a.bound * b.bound * self.widths[letter], generic=a.generic and b.generic
        )

    def sqdist(self) -> Value:
        letter = self.letter()
        a, b = self.vector("rows", letter), self.vector("cols", letter)
        text = self.choose(("mr.sqdist({}, {})", "(({} - {}) ** 2).sum()", "({} - {}).square().sum()")).format(
            a.text, b.text
        )
        bound = (a.bound + b.bound) ** 2 * self.widths[letter]
        return self.let(text, (a, b), feature=None, bound=bound, generic=a.generic and b.generic)

    def sides(self) -> Value:
        a, b = self.input("r"), self.input("c")
        return self.let(
            self.choose(("{} * {}", "{} - {}", "torch.exp({}) + {}")).format(a.text, b.text), (a, b), bound=4.0
        )

    def noise(self) -> Value:
        seed = self.choose((self.input("seed").text, "7"))
        kind = self.choose(("uniform", "gumbel"))
        bound = {"uniform": 1.0, "gumbel": 17.0}[kind]
        return self.let(f"mr.{kind}({seed})", rows=True, cols=True, bound=bound)

    def dropout(self) -> Value:
        a = self.pair_number()
        p = self.choose(("0.3", "0.0", "1.0", f"({self.input('t').text} * 0 + 0.4)"))
        return self.let(
            f"mr.dropout({a.text}, {p}, {self.choose(('11', self.input('seed').text))})",
            (a,),
            bound=2 * a.bound,
            generic=False,
        )

    def unary(self) -> Value:
        f = self.choose(UNARY)
        a = self.generic() if f.needs_generic else self.number()
        text = self.positive(a) if f.needs_positive else self.fit(a, f.limit)
        bound = f.bound(min(a.bound, f.limit) if not f.needs_positive else f.limit)
        return self.let(f.text.format(text), (a,), bound=bound, positive=f.positive, generic=f.generic and a.generic)

    def binary(self) -> Value:
        jumpy = self.chance(6)
        text, bound = self.choose(JUMPY if jumpy else BINARY)
        a = self.generic() if jumpy else self.number()
        b = self.number()
        apart = not (a.roots & b.roots) and a.generic and b.generic and bound is not max
        parts = {"a": self.fit(a, 6), "b": self.fit(b, 2), "p": self.positive(a), "q": self.positive(b)}
        if self.chance(8) and not jumpy:
            text, number = (
                self.choose(WITH_NUMBER),
                self.choose(("0.5", "2", "1", "mr.num_cols", "(mr.num_rows + 1.5)")),
            )
            return self.let(text.format(a=self.fit(a, 6), n=number), (a,), bound=60.0, generic=False)
        return self.let(text.format(**parts), (a, b), bound=bound(min(a.bound, 9), 9.0), generic=apart and not jumpy)

    def one_sided_vector(self) -> Value:
        side, letter = self.choose(("rows", "cols")), self.letter()
        a = self.vector(side, letter)
        number = self.choose((self.input("r" if side == "rows" else "c"), self.input("b"), self.input("h")))
        smooth = {"bound": a.bound + 1, "generic": False}
        kinds: list[tuple[str, tuple[Value, ...], dict]] = [
            ("F.normalize({0}, dim=-1)", (a,), {"bound": 1.0, "generic": False}),
            ("torch.tanh({0})", (a,), {"bound": 1.0, "generic": a.generic}),
            ("{0} * {1}", (a, number), smooth),
            ("{0} + {1}", (a, number), smooth),
            ("{0} / (1.0 + {0}.square().sum())", (a,), smooth),
            ("{0} / torch.sqrt(0.1 + {0} @ {0})", (a,), smooth),
            ("torch.where({0} > 0.2371, {0}, 0.3 * {0})", (a,), smooth),
        ]
        if letter == "f":
            kinds.append(("{0} * {1}", (a, self.input("bf")), smooth))
        text, of, known = self.choose(kinds)
        return self.let(text.format(*(v.text for v in of)), of, **known)

    def one_sided_number(self) -> Value:
        side, letter = self.choose(("rows", "cols")), self.letter()
        a = self.vector(side, letter)
        options = ["{}.sum()", "{}[0]", "{}.mean()", f"{{}}[{self.widths[letter] - 1}]"]
        if a.generic:
            options += ["{}.amax()", "{}.norm()", "{}.amin()", "torch.norm({}, p=1)"]
        return self.let(
            self.choose(options).format(a.text),
            (a,),
            feature=None,
            bound=a.bound * self.widths[letter],
            generic=a.generic,
        )

    def pair_vector(self, letter: str | int | None = None) -> Value:
        letter = self.letter() if letter is None else letter
        a, b = self.vector("rows", letter), self.vector("cols", letter)
        kinds: list[tuple[str, tuple[Value, ...], float]] = [
            ("{0} - {1}", (a, b), a.bound + b.bound),
            ("{0} * {1}", (a, b), a.bound * b.bound),
            ("torch.tanh({0} + {1})", (a, b), 1.0),
            ("torch.maximum({0}, {1})", (a, b), max(a.bound, b.bound)),
            ("({0} - {1}).abs()", (a, b), a.bound + b.bound),
        ]
        if self.chance(2):
            s = self.pair_number()
            kinds = [
                ("{0} * {1}", (s, self.choose((a, b))), s.bound * max(a.bound, b.bound)),
                ("{0} + {1} * {2}", (a, s, b), a.bound + s.bound * b.bound),
                ("torch.sigmoid({0}) * ({1} - {2})", (s, a, b), a.bound + b.bound),
            ]
            if self.chance(3):
                kinds = [("torch.where({0}, {1}, {2})", (self.condition(), a, b), max(a.bound, b.bound))]
        text, of, bound = self.choose(kinds)
        return self.let(
            text.format(*(v.text for v in of)), of, rows=True, cols=True, feature=letter, bound=bound, generic=False
        )

    def contract(self) -> Value:
        """A number of a pair from a vector of a pair."""
        letter = self.letter()
        a = self.pick(
            lambda v: v.feature == letter and v.kind == "float" and v.is_pair, lambda: self.pair_vector(letter)
        )
        b = self.any_vector(letter)
        width = self.widths[letter]
        text, of, bound = self.choose(
            [
                ("{0}.sum()", (a,), a.bound * width),
                (f"{{0}}[{self.below(width)}]", (a,), a.bound),
                ("{0} @ {1}", (a, b), a.bound * b.bound * width),
                ("{0}.mean()", (a,), a.bound),
                ("({0} * {1}).sum()", (a, b), a.bound * b.bound * width),
                ("torch.sin({0}).sum()", (a,), 1.0 * width),
                ("{0}.square().sum()", (a,), a.bound**2 * width),
            ]
        )
        return self.let(text.format(*(v.text for v in of)), of, feature=None, bound=bound, generic=False)

    def integer(self) -> Value:
        fresh = [
            lambda: Value("mr.row_index", rows=True, kind="int", bound=8),
            lambda: Value("mr.col_index", cols=True, kind="int", bound=8),
            lambda: self.input(self.choose("ij")),
        ]
        fits = lambda v: v.kind == "int" and v.feature is None and v.bound < 1e4
        a, b = self.pick(fits, *fresh), self.choose(fresh)()
        text = self.choose(INTEGER)
        of = (a, b) if "{b}" in text else (a,)
        parts = {"a": a.text, "b": b.text}
        if "{c}" in text:
            cond = self.condition()
            of, parts["c"] = (*of, cond), cond.text
        return self.let(
            text.format(**parts), of, kind="int", bound=a.bound * a.bound + a.bound * b.bound + 1, generic=False
        )

    def condition(self) -> Value:
        """A truth value: of indices, labels, numbers or other truth values."""
        old = [v for v in reversed(self.values) if v.kind == "bool"][:3]
        if old and self.chance(2):
            text, a, b = self.choose(LOGICAL), self.choose(old), self.choose(old)
            if self.chance(2):
                b = self.input(self.choose("mn"))
            return self.let(
                text.format(a=a.text, b=b.text), (a, b) if "{b}" in text else (a,), kind="bool", generic=False
            )
        both = {"rows": True, "cols": True}
        sort = self.choose(("index", "label", "number", "side", "integer", "odd"))
        of: tuple[Value, ...] = ()
        if sort == "index":
            text = self.choose(
                [
                    "mr.col_index <= mr.row_index",
                    "(mr.row_index - mr.col_index).abs() <= 1",
                    "mr.col_index + 1 > mr.row_index",
                    "mr.row_index != mr.col_index",
                    "mr.col_index < mr.num_cols - 1",
                    "mr.col_index % 2 == mr.row_index % 2",
                    "mr.col_index == mr.row_index",
                    "mr.num_cols > mr.row_index + mr.col_index",
                ]
            )
            both["rows"] = "row" in text
        elif sort == "label":
            i, j = self.input("i"), self.input("j")
            text = self.choose(
                [
                    f"mr.col_index == {i.text}",
                    f"{j.text} == mr.row_index",
                    f"{i.text} >= mr.col_index",
                    f"{i.text} == {j.text}",
                ]
            )
            of = (i, j)
        elif sort == "number":
            a, b = self.generic(), self.number()
            text = self.choose(["{0} > {1} + 0.1371", "{0} - {1} <= -0.2137", "torch.lt({0}, {1} - 0.3173)"]).format(
                a.text, b.text
            )
            of, both = (a, b), {}
        elif sort == "side":
            a = self.input(self.choose("mnrc"))
            text = a.text if a.kind == "bool" else f"{a.text} > 0.1371"
            of, both = (a,), {}
        elif sort == "integer":
            a = self.pick(lambda v: v.kind == "int" and v.feature is None, self.integer)
            text = self.choose(["{} > 1", "{} != 0", "{} == 2", "{} <= 3", "{}.bool()"]).format(a.text)
            of, both = (a,), {}
        else:
            a = self.number()
            text = self.choose(["torch.isnan({})", "torch.isfinite({})", "~torch.isinf({})"]).format(a.text)
            of, both = (a,), {}
        return self.let(text, of, feature=None, kind="bool", generic=False, **both)

    def where(self) -> Value:
        c, a = self.condition(), self.number()
        b = self.choose((Value("0.0", bound=0), self.number(), Value("0.25", bound=0.25)))
        text = self.choose(("torch.where({c}, {a}, {b})", "torch.where({c}, {b}, {a})", "{a}.masked_fill({c}, 0.5)"))
        of = (c, a, b) if "{b}" in text else (c, a)
        return self.let(text.format(c=c.text, a=a.text, b=b.text), of, bound=max(a.bound, b.bound, 0.5), generic=False)

    def cast(self) -> Value:
        if self.chance(3):
            a = self.generic()
            return self.let(f"{a.text}.int()", (a,), kind="int", bound=a.bound + 1, generic=False)
        a = self.choose((self.condition, self.integer))()
        text = self.choose(
            ("{}.float()", "{}.to(torch.float64)", "{} * 0.5", "1.0 * {}" if a.kind == "int" else "{} + 0.0")
        )
        return self.let(text.format(a.text), (a,), bound=a.bound, generic=False)

    # Reductions

    def reduction(self) -> None:
        self.over = self.choose(("cols", "rows"))
        self.tail = "" if self.over == "cols" else ', over="rows"'
        self.count = self.cols if self.over == "cols" else self.rows
        getattr(self, self.choose(REDUCTIONS))()

    def fold(self, text: str, of: Iterable[Value], **known: Any) -> Value:
        of = tuple(of)
        where = {
            "rows": self.over != "rows" and any(v.rows for v in of),
            "cols": self.over != "cols" and any(v.cols for v in of),
        }
        value = self.let(
            text.replace(")", f"{self.tail})") if text.count(")") == 1 else f"{text[:-1]}{self.tail})",
            of,
            **{**where, **known},
        )
        self.reduced.add(value.text)
        return value

    def field(self) -> Value:
        """What is folded: most often a pair's number, now and then a row's or column's."""
        return self.number() if self.chance(8) else self.pair_number()

    def logit(self, fill: str = "-torch.inf") -> tuple[str, tuple[Value, ...], bool]:
        """A logit, masked half of the time: its text, what it is made of, and whether it is surely finite."""
        a = self.field()
        if self.chance(2):
            c = self.condition()
            return f"torch.where({c.text}, {self.fit(a, 8)}, {fill})", (a, c), False
        return self.fit(a, 8), (a,), True

    def sum(self) -> None:
        kind = self.choose(("number", "vector", "integer", "truth"))
        if kind == "vector":
            letter = self.letter()
            a = self.any_vector(letter)
            f = self.choose(("sum", "mean"))
            self.fold(
                f"mr.{f}({a.text})",
                (a,),
                feature=letter,
                bound=a.bound * 8,
                generic=False,
                finite=f == "sum" or self.count > 0,
            )
        elif kind == "number":
            a = self.field()
            f = self.choose(("sum", "mean"))
            self.fold(
                f"mr.{f}({a.text})", (a,), bound=a.bound * 8, generic=a.generic, finite=f == "sum" or self.count > 0
            )
        else:
            a = (
                self.pick(lambda v: v.kind == "int" and v.feature is None, self.integer)
                if kind == "integer"
                else self.condition()
            )
            self.fold(f"mr.sum({a.text})", (a,), kind="int", bound=a.bound * 8, generic=False)

    def logsumexp(self) -> None:
        text, of, finite = self.logit()
        z = self.fold(f"mr.logsumexp({text})", of, bound=11.0, generic=False, finite=finite and self.count > 0)
        self.guard(z, "-torch.inf")

    def guard(self, z: Value, infinity: str) -> None:
        """Sometimes, a result that may be infinite made safe for later lines."""
        if not z.finite and self.chance(2):
            self.let(f"torch.where({z.text} == {infinity}, 0.0, {z.text})", (z,), bound=z.bound, generic=False)

    def softmax_mean(self) -> None:
        text, of, _ = self.logit()
        letter = self.letter()
        value = self.any_vector(letter) if self.chance(2) else self.number()
        self.fold(
            f"mr.softmax_mean({text}, {value.text})",
            (*of, value),
            feature=value.feature,
            bound=value.bound,
            generic=False,
        )

    def weighted_mean(self) -> None:
        weight = self.field()
        value = self.any_vector(self.letter()) if self.chance(2) else self.number()
        text = f"mr.weighted_mean({self.positive(weight)}, {value.text})"
        self.fold(text, (weight, value), feature=value.feature, bound=value.bound, generic=False)

    def ranked(self) -> tuple[str, tuple[Value, ...]]:
        """A number without near ties."""
        a = self.field()
        if a.generic and (a.cols if self.over == "cols" else a.rows):
            return a.text, (a,)
        return f"{self.fit(a, 8)} + mr.uniform(99)", (a, Value("", rows=True, cols=True))

    def best(self) -> None:
        f = self.choose(("max", "min", "argmax", "argmin"))
        fill = "-torch.inf" if "max" in f else "torch.inf"
        if self.chance(4):
            a = self.pick(lambda v: v.kind == "int" and v.feature is None, self.integer)
            if f in ("max", "min") and self.count == 0:
                return self.sum()
            self.fold(f"mr.{f}({a.text})", (a,), kind="int", bound=a.bound, generic=False)
            return None
        text, of = self.ranked()
        finite = self.count > 0
        if self.chance(2):
            c = self.condition()
            text, of, finite = f"torch.where({c.text}, {text}, {fill})", (*of, c), False
        if f in ("max", "min"):
            bound = max(v.bound for v in of) + 1
            self.guard(self.fold(f"mr.{f}({text})", of, bound=bound, generic=False, finite=finite), fill)
        else:
            self.fold(f"mr.{f}({text})", of, kind="int", bound=8, generic=False)
        return None

    def topk(self) -> None:
        if self.count == 0:
            return self.sum()
        k = self.choose(range(1, 1 + min(3, self.count)))
        text, of = self.ranked()
        tail = self.choose(("", ", largest=False"))
        finite = True
        if self.chance(4):
            c = self.condition()
            text, of, finite = (
                f"torch.where({c.text}, {text}, {'torch.inf' if tail else '-torch.inf'})",
                (*of, c),
                False,
            )
        top = self.fold(f"mr.topk({text}, {k}{tail})", of, kind="topk", feature=f"#{k}")
        bound = max(v.bound for v in of) + 1
        self.let(f"{top.text}.indices", (top,), kind="int", bound=8, generic=False)
        self.let(f"{top.text}.values", (top,), bound=bound, generic=False, finite=finite)
        if self.chance(3):
            a = self.pair_number()
            at = f"{'mr.col_index' if self.over == 'cols' else 'mr.row_index'} == {top.text}.indices"
            self.let(
                f"torch.where({at}, {a.text}, 0.0)",
                (top, a),
                rows=True,
                cols=True,
                feature=f"#{k}",
                bound=a.bound,
                generic=False,
            )
        return None

    def sample(self) -> None:
        text, of, _ = self.logit()
        seed = self.choose(("5", self.input("seed").text))
        where = {"rows": self.over != "rows", "cols": self.over != "cols"}  # the noise has both sides
        self.fold(f"mr.sample({text}, {seed})", of, kind="int", bound=8, generic=False, **where)

    def truth(self) -> None:
        c, f = self.condition(), self.choose(("any", "all", "count"))
        self.fold(f"mr.{f}({c.text})", (c,), kind="int" if f == "count" else "bool", bound=8, generic=False)

    def var(self) -> None:
        a = self.field()
        correction = self.choose((0, 1, 0.5)) if self.count > 1 else 0
        self.fold(
            f"mr.var({self.fit(a, 6)}, correction={correction})", (a,), bound=72.0, generic=False, finite=self.count > 0
        )

    def user(self) -> None:
        a, letter = self.field(), self.letter()
        kind = self.choose(("Turn", "Either", "Blend", "mr.monoids.LogWSum", "mr.monoids.WSum", "mr.monoids.LogSumExp"))
        if kind == "Turn":
            b = self.number()
            fields = {"re": f"1.0 + 0.3 * torch.tanh({self.fit(a, 4)})", "im": f"0.3 * torch.sin({self.fit(b, 6)})"}
            of: tuple[Value, ...] = (a, b)
        elif kind == "Either":
            fields, of = {"p": f"0.1 + 0.5 * torch.sigmoid({self.fit(a, 6)})"}, (a,)
        elif kind == "mr.monoids.LogSumExp":
            text, of, _ = self.logit()
            fields = {"z": text}
        else:
            v = self.any_vector(letter)
            if kind == "mr.monoids.WSum":
                fields, of = {"w": self.positive(a), "v": v.text}, (a, v)
            elif kind == "Blend":  # torch.logaddexp has no second derivative at -inf
                fields, of = {"z": self.fit(a, 8), "v": v.text}, (a, v)
            else:
                text, of, _ = self.logit()
                fields, of = {"z": text, "v": v.text}, (*of, v)
        given = ", ".join(f"{name}={text}" for name, text in fields.items())
        whole = self.fold(f"mr.reduce({kind}, {given})", of, kind="monoid", feature=None)
        for name in fields:
            feature = letter if name == "v" else None
            self.let(f"{whole.text}.{name}", (whole,), feature=feature, bound=20.0, generic=False, finite=name != "z")

    # Leaving

    def returned(self) -> tuple[str, ...]:
        """The latest results that no later line uses."""
        ends = [
            v.text for v in self.values if v.text in self.reduced and not v.is_pair and v.kind not in ("topk", "monoid")
        ]
        free = [name for name in ends if name not in self.used]
        return tuple((free or ends)[-4:])


STEPS_AT_MOST = 14
STEPS = (
    "unary " * 5
    + "binary " * 5
    + "reduction " * 6
    + "where " * 2
    + "one_sided_vector one_sided_number " * 2
    + "pair dot pair_vector contract integer cast dropout"
).split()
REDUCTIONS = (
    "sum " * 5 + "softmax_mean " * 4 + "best user " * 3 + "logsumexp topk " * 2 + "weighted_mean sample truth var"
).split()


def programs() -> st.SearchStrategy[Program]:
    """Random well-typed pair programs, ready to run.

    The choices are read from a tape of bytes (past its end all 0), so that programs are as different as random bytes:
    drawn one by one, Hypothesis would spend half of its examples on variations of programs it has seen.
    """
    return st.binary(min_size=200, max_size=200).map(program_of)


def program_of(tape: bytes) -> Program:
    return Builder(tape).program()
