"""Integers in kernels, and in the ranges by which kernels skip tiles."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Pair, Row
from tests.support.exact_integer_cases import CASES, documents, pairs, shifts_by_data, vectors


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_integers_are_those_of_torch(name):
    CASES[name].check("triton")


def test_sums_and_products_of_integer_vectors():
    vectors("triton")


@pytest.mark.parametrize("case", [pairs, shifts_by_data])
def test_integers_have_64_bits(case):
    case("triton")


@pytest.mark.parametrize("base", [2**53, 2**63 - 8])
def test_attention_stays_in_its_document(base):
    documents("triton", base)


def test_sums_that_wrap_around_are_not_promised_away():
    a, b = torch.full((20,), 2**63 - 2), torch.arange(200)

    @mr.op
    def below(a: Row, b: Col):
        return mr.sum(torch.where(a + b < 0, 1.0, 0.0))

    with mr.use(engine="triton"):
        torch.testing.assert_close(below(a, b), ((a.unsqueeze(-1) + b) < 0).sum(-1).float())


def test_positions_given_as_data_within_a_window():
    at = 2**60 + torch.arange(300)

    @mr.op
    def near(mine: Row, theirs: Col, y: Col):
        return mr.sum(torch.where((mine - theirs).abs() <= 3, y, 0.0))

    y = torch.rand(300)
    with mr.use(engine="triton"):
        got = near(at, at, y)
    torch.testing.assert_close(got, torch.where((at.unsqueeze(-1) - at).abs() <= 3, y, 0.0).sum(-1))


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize(
    "cols", [None, mr.jagged(torch.tensor([0, 2, 5]), torch.tensor([0, 3, 7]))], ids=["all", "packed"]
)
def test_constants_that_int32_does_not_hold(cols, dtype):
    """Beside indices, truth values and int32 data, in conditions and comparisons; packed, the least of all integers
    stands for pairs that do not exist."""
    far = 2**40

    @mr.op
    def beyond(x: Row, y: Col, ids: Pair):
        near = torch.where(ids > 1, mr.col_index, far)
        most = mr.max(torch.where(mr.col_index < 3, ids, -far))
        return (
            most,
            mr.argmin(near),
            mr.count(ids < far),
            mr.max(torch.where(ids > 0, mr.row_index < 2, -far)),
            mr.max(ids),
        )

    given = torch.zeros(5), torch.zeros(7), torch.arange(35).view(5, 7).remainder(4).to(dtype)
    with mr.use(engine="triton", strict=True):
        got = beyond(*given, cols=cols)
    with mr.use(engine="reference"):
        expected = beyond(*given, cols=cols)
    assert all(map(torch.equal, got, expected))
