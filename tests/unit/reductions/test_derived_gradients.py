"""Monoids without a pullback have gradients: derived from the trace of combine, or from all other pairs.

They are held to autograd through a plain sequential fold, and those of catalogue monoids to the hand-written ones."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines.common import others
from monoidreduce.reductions.derived_gradient import gradient_road
from tests.support import own_monoids as own
from tests.support.comparison import use_small_tiles


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    use_small_tiles(monkeypatch)
    monkeypatch.setattr(others, "_BLOCK", 4)
    monkeypatch.setattr(others, "_LEAST_BLOCK", 4)


def assert_right(op, found, args, second=False, tolerance=1e-9):
    expected = own.with_gradients(lambda *given: own.plain(op, *given), [a.double() for a in args], second)
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=tolerance, atol=tolerance)


def test_where_gradients_come_from():
    assert {m: gradient_road(m) for m in own.ROADS} == own.ROADS
    assert gradient_road(mr.monoids.LogWSum) == "pullback"
    assert gradient_road(mr.monoids.LogWSum * own.Extent) == "trace"
    assert gradient_road(own.Extent * own.TopTwo) == "others"
    assert gradient_road(mr.monoids.And * mr.monoids.Or) == "none"


@pytest.mark.parametrize("op", own.OPS)
@pytest.mark.parametrize("engine", ["reference", "eager", "panel", "auto"])
def test_engines(engine, op):
    args = own.problem()
    with mr.use(engine=engine):
        assert_right(op, own.with_gradients(getattr(own, op), args, second=True), args, second=True)
