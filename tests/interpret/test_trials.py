"""Candidates of the tuner as generated kernels: right ones pass its check, wrong ones never do."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row, tuning
from monoidreduce.engine import trial, triton
from monoidreduce.engine.evaluate import Sizes
from monoidreduce.engine.triton import KernelPlan, describe, source, use_plan
from monoidreduce.plan.choice import Choice
from tests.wrong_kernels import CHANGES, wrong

SAFE = Choice("flash", (("cols", (16, 16, 4, 1, 1)),))
CANDIDATE = Choice("flash", (("cols", (16, 32, 4, 1, 1)),))


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k, v)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path))
    monkeypatch.setattr(triton, "_READY", {})


def perform(choice, fold, leaves, sizes):
    with use_plan({over: KernelPlan(*t) for over, t in choice.tiles}):
        return triton.run(fold, list(leaves), sizes)


def call(rows=75, cols=90, d=16):
    torch.manual_seed(0)
    args = [torch.randn(n, d) for n in (rows, cols, cols)]
    sizes = Sizes(rows, cols, (), {"f": d, "d": d}, torch.device("cpu"), torch.float32)
    return attention.program(*args).passes[0].fold, args, sizes


def test_a_right_kernel_passes():
    given = call()
    assert trial.wrong(perform, CANDIDATE, SAFE, *given, perform(SAFE, *given)) == ""


@pytest.mark.parametrize("change", CHANGES)
def test_a_wrong_kernel_does_not(change):
    given = call()
    truth = perform(SAFE, *given)
    with wrong(KernelPlan(16, 32), change) as made:
        assert "wrong in" in trial.wrong(perform, CANDIDATE, SAFE, *given, truth)
    assert made


def test_a_kernel_that_is_wrong_at_other_lengths_only():
    """64 columns are whole tiles, and the ragged end is never met: it is looked for in a shorter call."""
    given = call(cols=128)
    truth = perform(SAFE, *given)
    with wrong(KernelPlan(16, 32), "forgets the ragged end"):
        assert trial.differs(perform(CANDIDATE, *given), truth, 2.0**-12) == ""
        triton._READY.clear()
        assert "at 35 × 67, result" in trial.wrong(perform, CANDIDATE, SAFE, *given, truth)


@pytest.mark.parametrize("many", [100 * 90, 100 * 90 + 1])
def test_the_short_call_runs_the_kernels_of_the_long_one(many, monkeypatch):
    """Kernels of many pairs are other ones: what is checked is what will run, and is compiled once."""
    monkeypatch.setattr(describe, "MANY", many)
    args = [a.half() for a in call(100)[1]]
    with mr.use(engine="auto"):
        fold, leaves, sizes = tuning.recorded(attention, args, {}, backward=True).folds[-1]
    plans = {over: (16, 16, 4, 1, 1) for over in ("cols", "rows")}
    loaded, load = [], source.load
    monkeypatch.setattr(source, "load", lambda text, *rest: loaded.append(text) or load(text, *rest))
    choice = Choice("flash", tuple(plans.items()))
    assert trial.wrong(perform, choice, choice, fold, leaves, sizes, perform(choice, fold, leaves, sizes)) == ""
    assert len(loaded) > 2 == len(set(loaded))
