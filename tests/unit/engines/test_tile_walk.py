"""Which tiles run: runs of tiles are decided at once, and each as it would be alone."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.engines.eager import tile_walk
from monoidreduce.engines.eager.tile_walk import FoldCode, merge_ranges
from monoidreduce.program.expression import index
from monoidreduce.program.intervals import NAN


@mr.op
def window_sum(x: Row, y: Col, window: int):
    return mr.sum(torch.where((mr.row_index - mr.col_index).abs() <= window, x * y, 0.0))


@mr.op
def same_document(x: Row, a: Row, y: Col, b: Col):
    return mr.sum(torch.where(a == b, x * y, 0.0))


def test_a_window_over_many_columns_is_decided_in_few_looks(monkeypatch):
    looks, truths = [], FoldCode.truths
    monkeypatch.setattr(FoldCode, "truths", lambda self, known: looks.append(1) or truths(self, known))
    x = torch.ones(40_000)
    with mr.use(engine="eager"), mr.tally() as seen:
        y = window_sum(x, x, window=100)
    assert torch.equal(y[100:-100], torch.full((39_800,), 201.0))
    assert seen.tiles > 4000 and seen.skipped > 0.9 * seen.tiles
    assert len(looks) < 0.3 * seen.tiles


@pytest.mark.parametrize("cpp", ["never", "always"])
def test_runs_of_tiles_are_decided_as_each_tile_alone(cpp, monkeypatch, seed):
    monkeypatch.setenv("MONOIDREDUCE_CPP", cpp)
    n = 3000  # the last tile is narrower
    x, y = torch.randn(2, n, dtype=torch.float64)
    a, b = torch.randint(0, 9, (n,)).sort().values, torch.randint(0, 9, (n,))
    b[1000:] = b[1000:].sort().values

    def run():
        with mr.use(engine="eager"), mr.tally() as seen:
            return same_document(x, a, y, b), seen

    found, seen = run()
    assert torch.allclose(found, torch.where(a[:, None] == b, x[:, None] * y, 0.0).sum(1))

    def one_by_one(code, row, levels):
        for n, ranges in enumerate(levels[0]):
            yield n, n + 1, code.variant({**row, **ranges})

    monkeypatch.setattr(tile_walk, "decide_tiles", one_by_one)
    monkeypatch.setattr("monoidreduce.engines.eager.cpp.variants.decide_tiles", one_by_one)
    alone, counted = run()
    assert torch.equal(found, alone) and seen == counted and 0 < seen.skipped < seen.tiles


def test_a_range_that_may_hold_nan_stays_open():
    x = index("col")
    assert merge_ranges([{x: (0, 1)}, {x: NAN}])[1][0][x] is NAN


@pytest.mark.parametrize("cpp", ["never", "always"])
@pytest.mark.parametrize("rows", [1, 3, 8, 9])
@pytest.mark.parametrize("away", [0.0, 1e4], ids=["near the origin", "far from it"])
def test_squared_distances_of_few_rows_are_exact(rows, away, cpp, seed, monkeypatch):
    """By differences for few rows, by a product for more: both to a few roundings of the distance itself."""
    monkeypatch.setenv("MONOIDREDUCE_CPP", cpp)
    torch.manual_seed(seed)
    x, y = (torch.randn(2, n, 33) + away for n in (rows, 300))
    y[:, :rows] = x  # equal points
    x[0, 0, 3] = torch.inf
    with mr.use(engine="eager"):
        found = distances(x, y)
    exact = (x.double().unsqueeze(-2) - y.double().unsqueeze(-3)).square().sum(-1)
    torch.testing.assert_close(found.double(), exact.sort(-1).values[..., :20], rtol=2e-5, atol=0)


@mr.op
def distances(x: mr.Row["f"], y: mr.Col["f"]):
    return mr.topk(mr.sqdist(x, y), 20, largest=False).values
