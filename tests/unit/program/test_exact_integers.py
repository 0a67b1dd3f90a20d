"""Integers are exact: ids of 2**53 and more, top-k, quotients, remainders and powers, on every engine."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Pair, Row
from monoidreduce.plan.schedule import Choice, follow
from tests.support.comparison import use_small_tiles
from tests.support.exact_integer_cases import CASES, documents, leaks, pairs, shifts_by_data, vectors

ENGINES = ["reference", "eager", "auto"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CASES)
def test_integers_are_those_of_torch(name, engine):
    CASES[name].check(engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_sums_and_products_of_integer_vectors(engine):
    vectors(engine)


@pytest.mark.parametrize("engine", [*ENGINES, "panel"])
@pytest.mark.parametrize("case", [pairs, shifts_by_data])
def test_integers_have_64_bits(engine, case, monkeypatch):
    use_small_tiles(monkeypatch)
    case(engine)


def test_integers_of_small_calls_have_64_bits():
    @mr.op
    def least(a: Row, b: Col, p: Pair):
        return mr.min((p << 33) + p * p + (a + b).int())

    given = torch.zeros(2), torch.zeros(7), torch.full((2, 7), 2**30, dtype=torch.int32)
    with mr.use(engine="auto"), follow({"call": Choice("dense")}):
        assert least(*given).tolist() == [2**60 - 2**63] * 2


def test_constants_of_more_bits_are_refused():
    @mr.op
    def op(a: Row, b: Col):
        return mr.sum(a - b + 2**63)

    with pytest.raises(mr.TraceError, match="more than 64 bits"):
        op(torch.ones(2).long(), torch.ones(3).long())


@pytest.mark.parametrize("base", [0, 2**24, 2**53, 2**60, -(2**60) - 9, 2**63 - 8])
@pytest.mark.parametrize("engine", ENGINES)
def test_attention_stays_in_its_document(engine, base, monkeypatch):
    use_small_tiles(monkeypatch)
    documents(engine, base)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float32])
def test_integers_that_meet_floats_are_rounded_as_in_torch(dtype, monkeypatch):
    """2**24 and 2**24 + 1 are one number in float32: a tile must not be skipped because they differ."""
    use_small_tiles(monkeypatch)
    a, b = torch.full((40,), 2**24 + 1), torch.full((50,), 2**24, dtype=dtype)

    @mr.op
    def same(a: Row, b: Col, x: Row, y: Col):
        return mr.sum(torch.where(a == b, x * y, 0.0))

    compute = torch.float64 if dtype == torch.float64 else torch.float32
    x, y = torch.rand(40, dtype=compute), torch.rand(50, dtype=compute)
    kind = dtype if dtype.is_floating_point else torch.int64
    expected = torch.where(a.to(kind).unsqueeze(-1) == b, x.unsqueeze(-1) * y, 0.0).sum(-1)
    torch.testing.assert_close(same(a, b, x, y), expected)


def test_sums_that_wrap_around_are_not_promised_away(monkeypatch):
    use_small_tiles(monkeypatch)
    a, b = torch.full((20,), 2**63 - 2), torch.arange(40)

    @mr.op
    def below(a: Row, b: Col):
        return mr.sum(torch.where(a + b < 0, 1.0, 0.0))

    torch.testing.assert_close(below(a, b), ((a.unsqueeze(-1) + b) < 0).sum(-1).float())


def test_pairs_of_other_documents_are_not_computed():
    ids = 2**60 + torch.arange(8).repeat_interleave(512)
    with mr.use(engine="eager"), mr.tally() as seen:
        leaks(ids)
    assert seen.pairs_computed == 8 * 512**2


@pytest.mark.parametrize(("engine", "way"), [("reference", "never"), ("eager", "never"), ("eager", "always")])
def test_a_divisor_of_zero_is_torchs_error(engine, way, monkeypatch):
    """In generated C++ too, where processors trap; as they do at the quotient that 64 bits do not hold."""
    monkeypatch.setenv("MONOIDREDUCE_CPP", way)

    @mr.op
    def quotients(x: Row, y: Col):
        return mr.max(x // y), mr.sum(x % y), mr.min(torch.div(x, y, rounding_mode="trunc"))

    x = torch.tensor([-(2**63), 7])
    with mr.use(engine=engine):
        with pytest.raises(RuntimeError, match="ZeroDivision"):
            quotients(x, torch.tensor([1, 0]))
        got = [v.tolist() for v in quotients(x, torch.tensor([-1, 3]))]
        assert got == [[-(2**63) // 3, 2], [1, 1], [-(2**63), -7]]


def test_numbers_given_at_the_call_are_raised_as_in_python():
    @mr.op
    def scaled(x: Row, y: Col, n: int):
        return mr.sum(x * y * 2**n)

    torch.testing.assert_close(scaled(torch.ones(2), torch.ones(3), -1), torch.full((2,), 1.5))


def test_chunks_of_columns_keep_the_best_integers():
    x, y = torch.tensor([2**53 + 1, -(2**60)]), 2**55 + torch.tensor([1, 5, -7, 3, 2, 9, 4])

    @mr.op
    def best(x: Row, y: Col):
        return mr.topk(x + y, 3), mr.topk(x + y, 3, largest=False).values, mr.max(x + y), mr.argmin(x + y)

    fold = best.stream(x)
    for part in y.split(2):
        fold.update(part)
    top, least, most, where = fold.result()
    pairs = x.unsqueeze(-1) + y
    assert torch.equal(top.values, pairs.topk(3).values) and torch.equal(top.indices, pairs.topk(3).indices)
    assert torch.equal(least, pairs.topk(3, largest=False).values)
    assert torch.equal(most, pairs.amax(1)) and torch.equal(where, pairs.argmin(1))


@pytest.mark.parametrize("engine", ["eager", "reference"])
def test_a_product_of_integers_and_floats_is_one_of_floats(engine):
    @mr.op
    def largest(x: mr.Row["d"], y: mr.Col["d"]):
        return mr.max(x @ y)

    x, y = torch.randn(60, 4), torch.randn(70, 4)
    with mr.use(engine=engine):
        for a, b in ((x.long(), y), (x, y.long())):
            torch.testing.assert_close(largest(a, b), (a.float() @ b.float().T).amax(1))
