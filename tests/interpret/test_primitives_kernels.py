"""Every primitive of numbers, read from the table: its kernel text and its derivative beside its row's torch function.

A new row needs no case here: its arguments are drawn from the first range where the torch function and its derivative
are finite."""

import functools
import math
import re

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines.triton import KernelPlan, use_plan
from monoidreduce.program import constructors
from monoidreduce.program.philox import DRAWS
from monoidreduce.program.primitives import PRIMITIVES
from monoidreduce.program.symbol import Symbol, expr_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "error::monoidreduce.errors.FallbackWarning")
PLAN = KernelPlan(16, 16, 4, 1)
RANGES = [(-2.3, 2.3), (0.15, 0.95), (1.2, 3.4)]
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 0.5, -1.5, 1e30, -1e30]
OTHERS = [math.inf, math.nan, 0.0, -2.0, 3.0]  # second arguments beside each of these
# of truth values and whole numbers, with tests of their own; draws; what only evaluation or the planner knows
OF_OTHER_NUMBERS = {*DRAWS, "where", "cast", "stretches", "popcount"}
TABLE = [
    p for p in PRIMITIVES.values() if p.name not in OF_OTHER_NUMBERS and not p.name.startswith(("bitwise_", "logical_"))
]
GROUPS = [TABLE[k : k + 12] for k in range(0, len(TABLE), 12)]
# Special arguments that are left out: where the kernel's rule is its own.
LEFT_OUT = {
    "polygamma": lambda x, y: (x < 0) & (x == x.round()),  # poles
    "gelu": lambda x, y: x.isinf(),  # torch's vector loop gives NaN on x86
    "mish_gate": lambda x, y: x.isnan(),  # it is always multiplied by its argument
}


def arity(p):
    """How many numbers a primitive has."""
    return 1 + max(map(int, re.findall(r"\{(\d)\}", p.triton)))


def dense(p, *args):
    return p.torch(*args, **p.attributes)


def slopes(p, args):
    """The derivatives of a row's torch function by each argument, by autograd; 0 where it has none."""
    args = [a.detach().requires_grad_() for a in args]
    value = dense(p, *args)
    if not value.requires_grad:
        return [torch.zeros_like(a) for a in args]
    found = torch.autograd.grad(value.sum(), args, allow_unused=True)
    return [torch.zeros_like(a) if g is None else g for a, g in zip(args, found, strict=True)]


@functools.cache
def find_range(name):
    """Where the arguments of a primitive are drawn."""
    p = PRIMITIVES[name]
    for low, high in RANGES:
        points = torch.linspace(low, high, 41, dtype=torch.float64)
        args = [t.flatten() for t in torch.meshgrid(*[points] * arity(p), indexing="ij")]
        if all(t.double().isfinite().all() for t in (dense(p, *args), *slopes(p, args))):
            return low, high
    raise AssertionError(f"{p.name} is finite in none of {RANGES}: add a range")


def write(p, *args):
    """A primitive of symbols, as a number."""
    found = Symbol(constructors.apply(p.name, *map(expr_of, args), **p.attributes))
    return found.float()


def scale(p, *args):
    """From -1 to 1 to the range of a primitive."""
    low, high = find_range(p.name)
    return [low + (high - low) * (0.5 + 0.5 * a) for a in args[: arity(p)]]


@pytest.fixture(autouse=True)
def kernels():
    with mr.use(engine="triton"), use_plan({"cols": PLAN, "rows": PLAN}):
        yield


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: "-".join(p.name for p in group))
def test_values_and_derivatives(group, dtype, seed):
    @mr.op
    def sums(x: mr.Row, y: mr.Row, z: mr.Col):
        return tuple(mr.sum(write(p, *scale(p, 0.5 * (x + z), 0.5 * (y - z)))) for p in group)

    x, y, z = (torch.rand(n, dtype=dtype).mul_(1.9).sub_(0.95).requires_grad_() for n in (5, 5, 18))
    X, Y, Z = (t.detach().double().requires_grad_() for t in (x, y, z))
    pairs = 0.5 * (X[:, None] + Z), 0.5 * (Y[:, None] - Z)
    rtol = 3e-5 if dtype is torch.float32 else 1e-9
    for p, got in zip(group, sums(x, y, z), strict=True):
        right = dense(p, *scale(p, *pairs)).double().sum(1)
        torch.testing.assert_close(got.double(), right, rtol=rtol, atol=10 * rtol, msg=lambda m, p=p: f"{p.name}: {m}")
        mine = torch.autograd.grad(got.sum(), (x, y, z), retain_graph=True, allow_unused=True)
        theirs = (
            torch.autograd.grad(right.sum(), (X, Y, Z), retain_graph=True, allow_unused=True)
            if right.requires_grad
            else [None] * 3
        )
        for a, b, like in zip(mine, theirs, (x, y, z), strict=True):
            a, b = (torch.zeros_like(like) if t is None else t for t in (a, b))
            torch.testing.assert_close(
                a.double(), b.double(), rtol=10 * rtol, atol=100 * rtol, msg=lambda m, p=p: f"{p.name}, slope: {m}"
            )


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: "-".join(p.name for p in group))
def test_zeros_infinities_and_nan(group):
    """Each is one pair, so that a maximum is its value."""

    @mr.op
    def each(x: mr.Row, y: mr.Row, z: mr.Col):
        return tuple(mr.max(write(p, *(x + z, y + z)[: arity(p)])) for p in group)

    x, y = (t.flatten() for t in torch.meshgrid(torch.tensor(SPECIAL), torch.tensor(OTHERS), indexing="ij"))
    for p, got in zip(group, each(x, y, torch.tensor([-0.0])), strict=True):
        here = ~LEFT_OUT[p.name](x, y) if p.name in LEFT_OUT else torch.ones_like(x).bool()
        args = [x[here], y[here]][: arity(p)]
        close = {"rtol": 1e-5, "atol": 1e-6, "equal_nan": True}
        said = functools.partial("{} of {}: {}".format, p.name, args)
        torch.testing.assert_close(got[here], dense(p, *args).float(), **close, msg=said)


def test_quotients_that_are_rounded_up():
    """1 / 0.1 is rounded to 10 in float32, but 0.1 is in 1 nine times."""

    @mr.op
    def whole(x: mr.Row, y: mr.Row, z: mr.Col):
        return mr.max((x + z) // y), mr.max((x + z) % y)

    x = torch.tensor([1.0, -1.0, 3.0, 8388609.0, 16777215.0, 0.3])
    y = torch.tensor([0.1, 0.1, -0.1, 1.0, 1.0, 0.1])
    quotient, rest = whole(x, y, torch.zeros(1))
    assert quotient.tolist() == (x // y).tolist()
    torch.testing.assert_close(rest, x % y)
