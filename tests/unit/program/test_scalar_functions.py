"""Inverse, gamma and error functions, and bits of whole numbers: values, derivatives, special values, refusals."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce import Col, Row
from tests.support import scalar_functions as cases


@pytest.fixture(params=["reference", "eager", "cpp"])
def engine(request, monkeypatch):
    monkeypatch.setenv("MONOIDREDUCE_CPP", "always" if request.param == "cpp" else "never")
    with mr.use(engine="eager" if request.param == "cpp" else request.param):
        yield request.param


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", cases.NAMES)
def test_values_and_derivatives_are_torchs(name, seed):
    x, y = (torch.randn(n, 2, dtype=torch.float64, requires_grad=True) for n in (4, 5))
    op = lambda x, y: cases.smooth(x, y, name)
    torch.testing.assert_close(op(x, y), cases.smooth_dense(x, y, name))
    assert torch.autograd.gradcheck(op, (x, y))
    assert torch.autograd.gradgradcheck(op, (x, y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_engines(dtype, engine, seed):
    """Ragged batches that broadcast, non-contiguous rows; gradients in float32, but not as C++, which takes long."""
    slopes = dtype is torch.float32 and engine != "cpp"
    x, y = torch.randn(2, 3, 37).mT.to(dtype), torch.randn(45, 3).to(dtype)
    for name in cases.MANY:
        mine, theirs = ([t.clone().requires_grad_(slopes) for t in (x, y)] for _ in range(2))
        got, want = cases.smooth(*mine, name), cases.smooth_dense(*(t.float() for t in theirs), name)
        if dtype is torch.bfloat16:
            torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=0.5)  # products of 16 bits are rounded
            continue
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        if not slopes:
            continue
        for a, b in zip(*(torch.autograd.grad(v.sum(), t) for v, t in ((got, mine), (want, theirs))), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_empty_axes(engine):
    assert torch.equal(cases.smooth(torch.zeros(3, 2), torch.zeros(0, 2), "lgamma"), torch.zeros(3))
    assert cases.smooth(torch.zeros(0, 2), torch.zeros(3, 2), "lgamma").shape == (0,)
    empty = torch.zeros(3, 0, dtype=torch.int64)
    assert torch.equal(cases.hamming(empty, torch.zeros(4, 0, dtype=torch.int64), 64)[0], torch.zeros(3, 2).long())


def test_derivative_of_sinc_near_zero():
    """Where torch's formula cancels: to the last digits of float32, and the second derivative at 0 itself."""

    @mr.op
    def op(x: Row, y: Col):
        return mr.sum(torch.sinc(x * y))

    x = torch.cat([torch.logspace(-6, -0.4, 40), torch.zeros(1)]).requires_grad_()
    (slope,) = torch.autograd.grad(op(x, torch.ones(1)).sum(), x, create_graph=True)
    u = math.pi * x.detach().double()
    right = torch.where(u == 0, 0.0, math.pi * (torch.cos(u) - torch.sin(u) / u) / u)
    big = u > 0.01  # below, float64 cancels as well
    torch.testing.assert_close(slope.detach().double()[big], right[big], rtol=1e-6, atol=0)
    small = u < 0.03
    torch.testing.assert_close(slope.detach().double()[small], (-math.pi * u / 3)[small], rtol=1e-4, atol=0)
    (curve,) = torch.autograd.grad(slope.sum(), x)
    assert abs(float(curve[-1]) + math.pi**2 / 3) < 1e-5


def test_polygamma_and_products_of_three():
    @mr.op
    def op(x: Row, y: Col):
        s = x * y
        orders = [torch.polygamma(n, s) for n in (0, 1, 2, 3)] + [s.polygamma(1), torch.special.polygamma(2, s)]
        return tuple(mr.sum(v) for v in (*orders, torch.addcmul(s, x, y, value=2), torch.addcdiv(s, x, y, value=0.5)))

    x, y = torch.rand(3, dtype=torch.float64) + 0.5, torch.rand(4, dtype=torch.float64) + 0.5
    s = x[:, None] * y
    right = [torch.polygamma(n, s) for n in (0, 1, 2, 3, 1, 2)] + [3 * s, s + 0.5 * x[:, None] / y]
    for got, want in zip(op(x, y), right, strict=True):
        torch.testing.assert_close(got, want.sum(1))
    with pytest.raises(mr.TraceError, match="order"):
        mr.op(_declared(lambda s: mr.sum(s.polygamma(-1))))(x, y)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_bits(dtype, engine):
    i, j, _ = cases.codes(dtype, 5, 7, 1)
    i, j = i[:, 0], j[:, 0]
    for k, (got, want) in enumerate(zip(cases.bits(i, j), cases.bits_dense(i, j), strict=True)):
        assert torch.equal(got, want), k


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
@pytest.mark.parametrize("words", [1, 3])
def test_hamming_distance_of_packed_codes(dtype, words, engine):
    x, y, width = cases.codes(dtype, 6, 9, words)
    distances = cases.hamming_dense(x, y, width)
    values, places = cases.hamming(x, y, width)
    assert torch.equal(values, distances.sort(1).values[:, :2])
    assert torch.equal(distances.gather(1, places), values)


def test_population_count_of_every_width():
    @mr.op
    def count(x: Row, y: Col, width: int):
        return mr.sum(mr.popcount(x + y, int(width)))

    x, zero = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 0x5A5A5A5A5A5A]), torch.zeros(1, dtype=torch.int64)
    for width in range(1, 65):
        right = [bin(v & ((1 << width) - 1)).count("1") for v in x.tolist()]
        assert count(x, zero, width).tolist() == right


def test_cells_of_morton_codes(engine):
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randint(0, 64, (n, 2), generator=g) for n in (9, 11))
    for level in (0, 2, 5):
        right = ((x[:, None] >> level) == (y >> level)).all(-1).sum(1)
        assert torch.equal(cases.same_cell(x, y, 2 * level), right)


def test_blocks_by_a_shift_are_skipped():
    """i >> 6 == j >> 6 is a block diagonal, whose tiles are known beforehand."""

    @mr.op
    def blocks(x: Row, y: Col):
        return mr.sum(torch.where(mr.row_index >> 6 == mr.col_index >> 6, x * y, 0.0))

    x = torch.ones(256)
    with mr.use(engine="eager"), mr.tally() as tiles:
        torch.testing.assert_close(blocks(x, x), torch.full((256,), 64.0))
    assert tiles.skipped or tiles.computed == 1  # one tile, if one holds all


def test_truth_values_beside_bits():
    @mr.op
    def op(x: Row, y: Col):
        c = x > y
        return mr.sum(c & 1), mr.any(c & (x == 3)), mr.sum(~c), mr.sum(np.int64(6) & (x ^ y)), mr.sum(1 << (x & 3))

    x, y = torch.arange(5), torch.arange(7)
    c, a = x[:, None] > y, x[:, None]
    right = (c & 1).sum(1), (c & (a == 3)).any(1), (~c).sum(1), (6 & (a ^ y)).sum(1), (1 << (a & 3)).expand(5, 7).sum(1)
    for got, want in zip(op(x, y), right, strict=True):
        assert torch.equal(got, want)


REFUSED = {
    "floats": (lambda s: mr.sum(s & 1), mr.TraceError, "floating-point"),
    "shifted floats": (lambda s: mr.sum(s << 1), mr.TraceError, "floating-point"),
    "shifted truths": (lambda s: mr.sum((s > 0) << (s > 1)), mr.TraceError, r"\.int\(\)"),
    "count of floats": (lambda s: mr.sum(mr.popcount(s, 8)), mr.TraceError, "whole numbers"),
    "no width": (lambda s: mr.sum(mr.popcount(s.int())), mr.ArgumentError, "bits"),
    "wrong width": (lambda s: mr.sum(mr.popcount(s.int(), 65)), mr.ArgumentError, "1 to 64"),
    "a method": (lambda s: mr.sum(s.int().popcount()), mr.UnknownFunctionError, "mr.popcount"),
    "ndtri": (lambda s: mr.sum(torch.special.ndtri(s)), mr.UnknownFunctionError, "torch.erfinv"),
    "angle": (lambda s: mr.sum(torch.angle(s)), mr.UnknownFunctionError, r"torch.atan2\(y, x\)"),
    "igamma": (lambda s: mr.sum(torch.igamma(s, s)), mr.UnknownFunctionError, "before the call"),
    "ldexp": (lambda s: mr.sum(torch.ldexp(s, s.int())), mr.UnknownFunctionError, "torch.exp2"),
    "threshold": (lambda s: mr.sum(torch.nn.functional.threshold(s, 0.1, 2.0)), mr.UnknownFunctionError, "torch.where"),
    "gcd": (lambda s: mr.sum(torch.gcd(s.int(), s.int())), mr.UnknownFunctionError, "tabulate"),
    "numpy": (lambda s: mr.sum(np.bitwise_count(s)), mr.TraceError, "mr.popcount"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_what_to_write(name):
    body, error, words = REFUSED[name]
    op = mr.op(_declared(body))
    with pytest.raises(error, match=words):
        op(torch.ones(2), torch.ones(3))


def _declared(body):
    def op(x: Row, y: Col):
        return body(x * y)

    return op


def test_every_number_function_of_torch_is_known_or_explained():
    """What torch has of one or two numbers is in the language, or its refusal says what to write."""
    from monoidreduce.program.advice import INSTEAD, REDUCTIONS

    known = {*mr.functions(), *INSTEAD, *REDUCTIONS}
    special = {n for n in dir(torch.special) if not n.startswith("_") and callable(getattr(torch.special, n))}
    losses = {n for n in dir(F) if n.endswith(("_loss", "_div")) or n.startswith("binary_cross")}
    losses -= {"ctc_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss"}
    missing = (special | losses) - known - {"common_args", "multi_input"}
    assert not {n for n in missing if n.islower()}, missing


def test_functions_are_listed_on_the_language_page_and_not_refused():
    from monoidreduce.program.advice import INSTEAD
    from monoidreduce.program.primitives import COMPOSITES, PRIMITIVES

    page = (Path(__file__).parents[3] / "docs/language.md").read_text()
    operators = set("add sub mul div neg ge gt le lt ne bitwise_left_shift bitwise_right_shift".split())
    operators |= {"bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "rsub", "detach", "contiguous", "positive"}
    spelled = {"addcdiv", "addcmul", "clamp_min", "clamp_max", "clip"}  # torch's other spellings
    names = {name for name, row in PRIMITIVES.items() if row.in_torch} | set(COMPOSITES)
    assert not {n for n in names - operators - spelled if not re.search(rf"\b{n}\b", page)}
    assert not names & set(INSTEAD) - {"contiguous"}


@mr.op
def losses(s: Row, target: Row, sign: Row, v: Row, one: Col):
    """The bodies that a refusal of torch's losses names; of one column, so that a mean is the value."""
    d = (s - target).abs()
    found = {
        "binary_cross_entropy_with_logits": F.softplus(s) - s * target,
        "soft_margin_loss": F.softplus(-sign * s),
        "huber_loss": torch.where(d < 1, 0.5 * d * d, d - 0.5),
        "poisson_nll_loss": torch.exp(s) - target * s,
        "gaussian_nll_loss": 0.5 * (torch.log(v) + (s - target).square() / v),
    }
    return {name: mr.mean(value * one) for name, value in found.items()}


def test_what_is_written_instead_of_a_loss_is_that_loss():
    draw = torch.Generator().manual_seed(0)
    s, target, sign, v = (torch.rand(6, generator=draw) * 3 for _ in range(4))
    target, sign = target.clamp(max=1), torch.sign(sign - 1.5)
    for name, value in losses(s, target, sign, v, torch.ones(1)).items():
        given = (s, sign) if name == "soft_margin_loss" else (s, target, v) if "gaussian" in name else (s, target)
        torch.testing.assert_close(value, getattr(F, name)(*given, reduction="none"))


def test_a_polynomial_is_a_loop():
    @mr.op
    def third(x: Row, y: Col):
        p, last = x * y, 1.0
        for _ in range(2):
            p, last = 2 * (x * y) * p - last, p
        return mr.sum(p)

    x, y = torch.rand(3), torch.rand(4)
    expected = torch.special.chebyshev_polynomial_t(x.unsqueeze(-1) * y, 3).sum(-1)
    torch.testing.assert_close(third(x, y), expected)
