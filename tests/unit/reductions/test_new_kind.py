"""A kind of reduction in one file, with one row in the table, runs on every engine that needs no kernels."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines.common import combine
from monoidreduce.plan.schedule import Choice, follow
from monoidreduce.program.expression import node, reduce_node
from monoidreduce.program.lower import Fold
from monoidreduce.reductions import KINDS
from tests.support import logmeanexp as new
from tests.support.comparison import use_small_tiles


@pytest.fixture(autouse=True)
def row():
    with new.planted():
        yield


@pytest.mark.parametrize("op", ["by_rows", "both_ways"])
@pytest.mark.parametrize("engine", ["reference", "eager", "panel", "auto"])
def test_engines(engine, op, monkeypatch):
    use_small_tiles(monkeypatch)
    args = new.problem()
    with mr.use(engine=engine):
        new.assert_right(new.with_gradients(getattr(new, op), args), args, op)


@pytest.mark.parametrize("op", ["by_rows", "both_ways"])
def test_whole_matrices(op):
    args = new.problem()
    with mr.use(engine="auto"), follow({"call": Choice("dense")}), mr.tally() as count:
        new.assert_right(new.with_gradients(getattr(new, op), args), args, op)
    assert not count.pairs_computed  # no tile was walked


def test_single_precision_is_as_exact_as_plain_torch(monkeypatch):
    use_small_tiles(monkeypatch)
    args = new.problem(dtype=torch.float32)
    with mr.use(engine="eager"):
        new.assert_right(new.with_gradients(new.by_rows, args), args, "by_rows", 2e-5)


def test_second_derivatives():
    x, y, b = new.problem(4, 6)
    with mr.use(engine="eager"):
        assert torch.autograd.gradgradcheck(
            lambda x: new.by_rows(x, y, b)[0], (x.requires_grad_(),), check_undefined_grad=False
        )


@pytest.mark.parametrize("empty", [False, True], ids=["", "with an empty part"])
def test_results_of_parts_combine(empty):
    x = torch.randn(1, 3, 50).double()
    x[:, 1, :20] = -torch.inf
    leaf = node("leaf", (), ("x",), rows=True, cols=True, feature=None, dtype="float")
    fold = Fold((leaf,), (reduce_node("logmeanexp", "cols", (), (leaf,)),))
    lengths = [20, 0, 30] if empty else [20, 30]
    parts = x.split(lengths, dim=-1)
    dense = lambda part: KINDS["logmeanexp"].dense([part], [False], "cols", (), part.shape[-1])
    stacked = [torch.stack([t.squeeze(-1) for t in ts]) for ts in zip(*map(dense, parts), strict=True)]
    for found, right in zip(combine.combine(fold, stacked, lengths), dense(x), strict=True):
        torch.testing.assert_close(found, right.squeeze(-1))


def test_the_cost_model_counts_it():
    args = new.problem()
    assert new.by_rows.cost(*args).chosen.seconds > 0


def test_streams():
    x, y, b = new.problem()
    expected = new.truth("by_rows", (x, y, b))
    fold = new.by_rows.stream(x)
    for start, stop in ((0, 30), (30, 31), (31, 83)):
        fold.update(y[start:stop], b[start:stop])
    for found, right in zip(fold.result(), expected, strict=False):
        torch.testing.assert_close(found, right)


def test_gradients_of_a_stream():
    x, y, b = new.problem()
    values = new.by_rows.stream(x.requires_grad_()).over([(y[:40], b[:40]), (y[40:], b[40:])])
    (found,) = torch.autograd.grad(values, x, [new.cotangent(len(x))] * 3)
    torch.testing.assert_close(found, new.truth("by_rows", (x, y, b))[3])
