"""Candidates of the tuner as generated kernels: right ones pass its check, wrong ones never do."""

import gc

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce import Col, Row, autotune, tuning
from monoidreduce.engines import triton
from monoidreduce.engines.common.evaluate import Sizes
from monoidreduce.engines.triton import KernelPlan, use_plan
from monoidreduce.engines.triton.launch import driver
from monoidreduce.plan.schedule import Choice
from monoidreduce.runtime import memory_estimate
from monoidreduce.runtime.dry_run import FoldCall, LiveMemory
from tests.support import internals
from tests.support.wrong_kernels import CHANGES, GUESSED, wrong

SAFE = Choice("flash", (("cols", (16, 16, 4, 1, 1)),))
CANDIDATE = Choice("flash", (("cols", (16, 32, 4, 1, 1)),))


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k, v)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path))
    internals.forget_launches(monkeypatch)


def perform(choice, fold, leaves, sizes):
    with use_plan({over: KernelPlan(*t) for over, t in choice.tiles}):
        return triton.run(fold, list(leaves), sizes)


def call(rows=75, cols=90, d=16, dtype=torch.float32):
    torch.manual_seed(0)
    args = [torch.randn(n, d).to(dtype) for n in (rows, cols, cols)]
    sizes = Sizes(rows, cols, (), {"f": d, "d": d}, torch.device("cpu"), torch.float32)
    return attention.program(*args).passes[0].fold, args, sizes


def test_a_right_kernel_passes():
    given = call()
    assert tuning.find_error(perform, CANDIDATE, SAFE, *given, perform(SAFE, *given)) == ""


WRONG = [*((change, torch.float32) for change in CHANGES), *((change, torch.float16) for change in GUESSED)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("change", "dtype"), WRONG, ids=str)
def test_a_wrong_kernel_does_not(change, dtype, monkeypatch):
    internals.guess_maximum_for(monkeypatch, torch.float16)  # rounded as on a GPU: the interpreter cuts bfloat16 off
    given = call(dtype=dtype)
    truth = perform(SAFE, *given)
    with wrong(KernelPlan(16, 32), change) as made:
        assert "wrong in" in tuning.find_error(perform, CANDIDATE, SAFE, *given, truth)
    assert made


def test_a_kernel_that_is_wrong_at_other_lengths_only():
    """64 columns are whole tiles, and the ragged end is never met: it is looked for in a shorter call."""
    given = call(cols=128)
    truth = perform(SAFE, *given)
    with wrong(KernelPlan(16, 32), "forgets the ragged end"):
        assert tuning.describe_difference(perform(CANDIDATE, *given), truth, 2.0**-12) == ""
        triton.prepared_folds().clear()
        assert "at 35 × 67, result" in tuning.find_error(perform, CANDIDATE, SAFE, *given, truth)


@pytest.mark.parametrize("many", [100 * 90, 100 * 90 + 1])
def test_the_short_call_runs_the_kernels_of_the_long_one(many, monkeypatch):
    """Kernels of many pairs are other ones: what is checked is what will run, and is compiled once."""
    internals.set_pair_thresholds(monkeypatch, many=many)
    args = [a.half() for a in call(100)[1]]
    with mr.use(engine="auto"):
        fold, leaves, sizes = autotune.record_call(attention, args, {}, backward=True).folds[-1]
    plans = {over: (16, 16, 4, 1, 1) for over in ("cols", "rows")}
    loaded, load = [], driver.load_module
    monkeypatch.setattr(driver, "load_module", lambda text, *rest: loaded.append(text) or load(text, *rest))
    choice = Choice("flash", tuple(plans.items()))
    assert tuning.find_error(perform, choice, choice, fold, leaves, sizes, perform(choice, fold, leaves, sizes)) == ""
    assert len(loaded) > 2 == len(set(loaded))


@mr.op
def gated(x: Row["d"], gate: Col["d"], up: Col["d"], down: Col["n"]):
    return mr.sum(F.silu(x @ gate) * (x @ up) * down)


@mr.op
def pooling(x: Row["d"], y: Col["d"]):
    return mr.max(x @ y)


@pytest.mark.parametrize(("op", "columns"), [(attention, 2), (gated, 3), (pooling, 1)], ids=lambda p: str(p))
def test_kernels_hold_what_they_were_predicted_to(op, columns, monkeypatch):
    """Several kernels one after the other, each cut into parts; gathers before them."""
    collected = lambda launch, *given: (launch(*given), gc.collect())[0]  # the interpreter holds on to tensors
    gc.collect()
    gc.freeze()  # so that each of those collections looks at this test's objects alone
    internals.replace_launch(monkeypatch, collected)
    internals.replace_fixed_kernel_launch(monkeypatch, collected)
    torch.manual_seed(0)
    args = [torch.randn(n, 128, requires_grad=True) for n in (67, *[70] * columns)]
    cut = Choice("split", tuple((over, (16, 16, 4, 1, 3)) for over in ("cols", "rows")))
    with mr.use(engine="triton"):
        folds = autotune.record_call(op, args, {}, backward=True).folds
    assert len(folds) == 2
    for fold, leaves, sizes in folds:
        call = FoldCall(fold, tuple(leaves), sizes, True, 0)
        with torch.no_grad(), LiveMemory([v for v in leaves if isinstance(v, torch.Tensor)]) as alive:
            found = perform(cut, fold, leaves, sizes)
        predicted = memory_estimate.estimate_gpu_peak(call, cut, replayed=False)
        assert found and predicted == pytest.approx(alive.peak, rel=0.05)
