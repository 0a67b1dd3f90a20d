"""Extremes of truth values: torch's max, min and their indices, by every engine, also of nothing."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row

ENGINES = ("eager", "panel", "auto", "reference")


@pytest.mark.parametrize("engine", ENGINES)
def test_extremes_of_truth_values(engine):
    @mr.op
    def extremes(x: Row, y: Col):
        c = x < y
        return mr.max(c), mr.min(c), mr.argmax(c), mr.argmin(c), mr.max(c, over="rows"), mr.topk(c, 2)

    x, y = torch.tensor([0.0, 1.0, 2.0, -1.0]), torch.tensor([1.0, 0.0, 2.0])
    c = x[:, None] < y
    with mr.use(engine=engine):
        largest, smallest, first, last, over_rows, best = extremes(x, y)
    assert torch.equal(largest, c.any(1)) and torch.equal(smallest, c.all(1)) and torch.equal(over_rows, c.any(0))
    assert torch.equal(first, c.int().argmax(1)) and torch.equal(last, c.int().argmin(1))
    assert torch.equal(best.values, c.sort(1, descending=True).values[:, :2])
    assert torch.equal(c.gather(1, best.indices), best.values)


@pytest.mark.parametrize("engine", ENGINES)
def test_extremes_of_no_truth_values(engine):
    @mr.op
    def extremes(x: Row, y: Col):
        return mr.max(x < y), mr.min(x < y), mr.argmax(x < y), mr.argmin(x < y)

    with mr.use(engine=engine):
        found = extremes(torch.zeros(2), torch.zeros(0))
    assert [t.tolist() for t in found] == [[False] * 2, [True] * 2, [-1] * 2, [-1] * 2]
