"""Labels that are arithmetic on the other index, in kernels."""

import pytest
import torch

import monoidreduce as mr
from tests.support.label_arithmetic_cases import arguments, check, dense, op

NAMES = ["next", "reversed", "batch offset", "column names row", "half a column", "own offset", "and more"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("over", ["cols", "rows"])
@pytest.mark.parametrize("name", NAMES)
def test_a_gather_reads_the_place_that_the_label_names(name, over):
    with mr.use(engine="triton"):
        check(op(name, over), dense(name, over), arguments())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_the_same_beside_a_logsumexp_of_all_pairs(name):
    with mr.use(engine="triton"):
        check(op(name, whole=True), dense(name, whole=True), arguments())


def test_many_features(monkeypatch):
    """Wide features: labels are met by the kernels of a panel."""
    x, y = torch.randn(9, 300), torch.randn(13, 300)

    @mr.op
    def loss(x: mr.Row["d"], y: mr.Col["d"]):
        s = x @ y / 16
        return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == mr.row_index + 1, s, 0.0))

    def plain(x, y):
        s = x @ y.mT / 16
        return s.logsumexp(-1) - s[torch.arange(9), torch.arange(1, 10)]

    with mr.use(engine="triton"):
        check(loss, plain, [x, y])
