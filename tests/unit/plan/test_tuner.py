"""The tuner: winners are right, remembered and found again; what is wrong in any way never wins."""

import json
import threading
from types import SimpleNamespace

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row, tuning
from monoidreduce.engines import auto
from monoidreduce.engines.common import oom_retry
from monoidreduce.engines.common.evaluate import Sizes
from monoidreduce.engines.triton.launch import driver
from monoidreduce.plan import candidates, schedule, settings
from monoidreduce.plan.schedule import Choice
from monoidreduce.runtime import call_cost, dispatch
from tests.support import internals
from tests.support.comparison import errors
from tests.support.layers import BY_NAME

FAST = Choice("flash", (("tile", (1, 64, 64)),))  # what the tests' dishonest candidate is called
SHAPE = (160, 230)


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """A cache of the test's own, and nothing under way."""
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path))
    monkeypatch.setenv("MONOIDREDUCE_ENGINE", "auto")
    internals.forget_cache_warnings(monkeypatch)
    monkeypatch.setattr(tuning, "_sessions", {})
    internals.set_dense_limit(monkeypatch, 0)  # small calls too go by passes
    schedule.forget()
    yield
    schedule.forget()


class Clock:
    """Time that passes only where a test says so."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(tuning, "time", Clock())
    return tuning.time


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k, v)


@mr.op
def nearest(x: Row["f"], y: Col["f"]):
    return mr.argmin(mr.sqdist(x, y))


def drawn(rows=SHAPE[0], cols=SHAPE[1], d=8):
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(n, d, generator=generator) for n in (rows, cols, cols)]


def fold_of(op, *args):
    """One pass of a call, as engines see it."""
    with dispatch.automatic(), tuning.record() as met:
        op(*args)
    return met.folds[0]


def tuned_choice(case, device):
    return candidates.find_tuned(case, auto.fold_key(case, device))


def few(monkeypatch, *choices):
    """Only these candidates, beside the safe one."""
    internals.set_candidates(monkeypatch, lambda case, over=None: list(choices))


# Winners


def test_a_winner_is_remembered_and_followed(monkeypatch, clock):
    """The safe plan is made slow, so that the winner is known."""
    other = Choice("flash", (("tile", (1, 256, 256)),))
    few(monkeypatch, other)
    real = auto.run_choice

    def perform(how, *call):
        if how != other:
            clock.sleep(0.05)
        return real(how, *call)

    internals.replace_planned_run(monkeypatch, perform)
    args = drawn()
    found = attention.tune(*args, quiet=True)
    assert [t.winner for t in found.folds] == [other, other] and all(t.lasting for t in found.folds)
    assert all(t.seconds < t.safe_seconds for t in found.folds)
    schedule.forget()  # as in the next process
    call = fold_of(attention, *args)
    assert auto.choose(*call) == other
    assert auto.choose(*fold_of(attention, *drawn(SHAPE[0] - 7, SHAPE[1] + 9))) == other  # the same bucket
    longer = fold_of(attention, *drawn(4 * SHAPE[0], SHAPE[1]))
    assert tuned_choice(auto.make_case(*longer), call[2].device) is None  # another bucket
    assert found.folds[0].key in [r.key for r in mr.cache.plans()]
    with mr.budget("10MB"):
        assert tuned_choice(auto.make_case(*call), call[2].device) is None  # tuned without it


def test_tuning_a_layer_refuses_no_honest_plan():
    """Every candidate of a layer's forward and backward runs, and is found right."""
    for name in ("causal_attention", "cross_entropy", "gaussian_kernel"):
        layer = BY_NAME[name]
        args = layer.make(90, 130, torch.Generator().manual_seed(1), torch.float32)
        found = mr.tune(layer.op, *args, quiet=True)
        assert len(found.folds) >= 2 and all(t.trials for t in found.folds)
        assert [r.refused for t in found.folds for r in t.trials if r.refused] == []
        assert str(found.folds[0].winner) in str(found) and len(
            json.loads(json.dumps(found.as_dict()))["folds"]
        ) == len(found.folds)


def test_only_the_gradients_asked_for_are_tuned():
    q, k, v = drawn()
    both = attention.tune(q, k, v, quiet=True).folds
    forward = attention.tune(q, k, v, backward=False, quiet=True).folds
    rows = attention.tune(q.requires_grad_(), k, v, quiet=True).folds
    assert len(forward) == 1 and len(both) == len(rows) == 2
    assert rows[1].key.program != both[1].key.program and q.grad is None


def test_what_a_call_raises_is_raised():
    with pytest.raises(mr.ShapeError):
        attention.tune(torch.ones(3, 4), torch.ones(3, 5), torch.ones(3, 4))
    with pytest.raises(mr.ArgumentError, match="was given int"):
        mr.tune(3)
    assert tuning._current_recording is None and not tuning._recording_lock.locked()


def test_nothing_to_tune_is_said():
    assert "nothing to tune" in str(mr.tune(torch.add, torch.ones(2), torch.ones(2)))
    assert attention.tune(torch.ones(0, 4), torch.ones(3, 4), torch.ones(3, 4)).folds == ()


def test_a_budget_bounds_the_candidates():
    q, k, v = drawn(1200, 1200)
    with mr.budget("2MB"):
        (found,) = attention.tune(q, k, v, backward=False, quiet=True).folds
        case = auto.make_case(*fold_of(attention, q, k, v))
        assert found.trials and all(candidates.can_run(case, t.choice) for t in found.trials)
    assert found.key.budget == "2000000"


def test_a_monoid_of_ones_own_is_remembered_by_this_process_only():
    class Total(mr.Monoid):
        x: mr.Scalar = 0.0

        def combine(a, b):
            return Total(x=a.x + b.x)

        def pullback(c, a, g):
            return Total(x=g.x)

    @mr.op
    def total(x: Row["f"], y: Col["f"]):
        return mr.reduce(Total, x=x @ y).x

    (found,) = total.tune(*drawn()[:2], backward=False, quiet=True).folds
    assert not found.lasting and mr.cache.plans() == []
    assert schedule.recall(found.key) is not None


RECORDS = {
    "no schedule": {"tiles": {}},
    "an unknown schedule": {"schedule": "magic", "tiles": {}},
    "a whole call's": {"schedule": "dense", "tiles": {}},
    "a kernel's on a CPU": {"schedule": "flash", "tiles": {"cols": [64, 64, 4, 2, 1]}},
    "no size": {"schedule": "flash", "tiles": {"tile": [1, 0, 64]}},
    "a text": {"schedule": "flash", "tiles": {"tile": ["1", 2, 3]}},
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_makes_no_sense_here_is_not_followed(name):
    args = drawn()
    call = fold_of(attention, *args)
    case = auto.make_case(*call)
    schedule.remember(schedule.Record(auto.fold_key(case, call[2].device), RECORDS[name]))
    assert tuned_choice(case, call[2].device) is None
    assert errors(attention(*args), torch.softmax(args[0] @ args[1].T, -1) @ args[2]).max() < 1e-5


# What must never win


def right(how, fold, leaves, sizes):
    return planner_perform(how, fold, leaves, sizes)


planner_perform = auto.run_choice


def forgets_a_tile(how, fold, leaves, sizes):
    """Every column but the last sixteen."""
    cut = [v[: sizes.cols - 16] if e.cols else v for e, v in zip(fold.leaves, leaves, strict=True)]
    return right(how, fold, cut, Sizes(sizes.rows, sizes.cols - 16, (), sizes.letters, sizes.device, sizes.compute))


def forgets_a_ragged_end(how, fold, leaves, sizes):
    rest = sizes.cols % 64
    cut = [v[: sizes.cols - rest] if e.cols and rest else v for e, v in zip(fold.leaves, leaves, strict=True)]
    return right(how, fold, cut, Sizes(sizes.rows, sizes.cols - rest, (), sizes.letters, sizes.device, sizes.compute))


def writes_nothing(how, fold, leaves, sizes):
    """Hands out memory in which an earlier run may have left the right numbers."""
    return [torch.empty_like(t) for t in right(how, fold, leaves, sizes)]


def writes_all_but_one(how, fold, leaves, sizes):
    found = []
    for t in right(how, fold, leaves, sizes):
        out = torch.empty(t.shape, dtype=t.dtype)
        out.view(-1)[1:] = t.reshape(-1)[1:]
        found.append(out)
    return found


def reads_before_it_writes(how, fold, leaves, sizes):
    found = []
    for t in right(how, fold, leaves, sizes):
        scratch = torch.empty(t.shape, dtype=t.dtype)
        found.append(t + (scratch - scratch))
    return found


def adds_twice(how, fold, leaves, sizes):
    return [2 * t for t in right(how, fold, leaves, sizes)]


def is_one_off(how, fold, leaves, sizes):
    return [t + 1 for t in right(how, fold, leaves, sizes)]


def swaps_rows(how, fold, leaves, sizes):
    return [t.flip(0) for t in right(how, fold, leaves, sizes)]


def has_another_shape(how, fold, leaves, sizes):
    return [t[:-1] for t in right(how, fold, leaves, sizes)]


def has_a_nan(how, fold, leaves, sizes):
    found = [t.clone() for t in right(how, fold, leaves, sizes)]
    found[0].view(-1)[7] = torch.nan if found[0].is_floating_point() else -1
    return found


def fails(how, fold, leaves, sizes):
    raise RuntimeError("an illegal memory access was encountered")


def runs_out(how, fold, leaves, sizes):
    raise torch.OutOfMemoryError("CUDA out of memory.")


WRONG = [
    forgets_a_tile,
    forgets_a_ragged_end,
    writes_nothing,
    writes_all_but_one,
    reads_before_it_writes,
    adds_twice,
    is_one_off,
    swaps_rows,
    has_another_shape,
    has_a_nan,
    fails,
    runs_out,
]


CASES = [(attention, f) for f in WRONG]
CASES += [(nearest, f) for f in WRONG if f not in (adds_twice, reads_before_it_writes)]  # poison cancels in integers


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("op", "dishonest"), CASES, ids=lambda f: f.__name__)
def test_a_wrong_candidate_never_wins(dishonest, op, monkeypatch, clock):
    few(monkeypatch, FAST)

    def perform(how, *call):
        if how == FAST:
            return dishonest(how, *call)
        clock.sleep(0.005)  # the wrong one would win by far
        return right(how, *call)

    internals.replace_planned_run(monkeypatch, perform)
    args = drawn(d=3)[: 3 if op is attention else 2]
    (found,) = op.tune(*args, backward=False, quiet=True).folds
    assert found.winner == found.safe != FAST
    assert [t.choice for t in found.trials] == [FAST] and found.trials[0].refused and found.trials[0].seconds is None
    assert "1 refused" in str(found)
    assert auto.choose(*fold_of(op, *args)) == found.safe


def test_a_tile_forgotten_in_a_long_sum_is_seen_in_a_short_one():
    """One tile of 16 columns in 6000 is below bfloat16's rounding; of two tiles and three columns it is not."""
    few_rows, many = 8, 6000
    q, k, v = (torch.randn(n, 4, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (few_rows, many, many))
    k = k * 0.01  # every column weighs the same
    fold, leaves, sizes = fold_of(attention, q, k, v + 1)
    choice = Choice("flash", (("tile", (1, 8, 16)),))
    truth = right(candidates.default_choice(auto.make_case(fold, leaves, sizes)), fold, leaves, sizes)
    assert (
        tuning.describe_difference(
            forgets_a_tile(Choice("flash"), fold, leaves, sizes), truth, tuning.tolerance(leaves)
        )
        == ""
    )

    def perform(how, *call):
        return (forgets_a_tile if how == choice else right)(Choice("flash"), *call)

    problem = tuning.find_error(perform, choice, Choice("flash"), fold, leaves, sizes, truth)
    assert "at 8 × 35" in problem and "wrong in" in problem


@pytest.mark.parametrize(("spilled", "refused"), [(0, False), (64, False), (4096, True)])
def test_a_kernel_that_spills_is_not_timed(spilled, refused, monkeypatch):
    few(monkeypatch, FAST)

    def perform(how, *call):
        if how == FAST:  # as launching a kernel says it
            report = {"n_regs": 255, "n_spills": spilled // 4, "metadata": SimpleNamespace(shared=4096)}
            driver.report_resources(SimpleNamespace(**report))
        return right(how, *call)

    internals.replace_planned_run(monkeypatch, perform)
    (found,) = attention.tune(*drawn(), backward=False, quiet=True).folds
    assert (found.trials[0].seconds is None) == refused
    assert found.trials[0].refused == (f"its kernel spills {spilled} bytes" if refused else "")


def test_when_every_candidate_fails_the_safe_plan_stays(monkeypatch):
    internals.replace_planned_run(
        monkeypatch, lambda how, *call: right(how, *call) if not how.tiles else fails(how, *call)
    )
    found = attention.tune(*drawn(), quiet=True)
    for fold in found.folds:
        plain = [t for t in fold.trials if t.choice.tiles]
        assert plain and all("illegal memory" in t.refused for t in plain) and not fold.winner.tiles


def test_a_device_that_is_lost_is_said_at_once(monkeypatch):
    """Everything after an illegal access fails, on a GPU: no candidate may be judged by that."""
    few(monkeypatch, FAST)
    internals.replace_planned_run(monkeypatch, lambda how, *call: (fails if how == FAST else right)(how, *call))
    monkeypatch.setattr(oom_retry, "is_device_lost", lambda device: True)
    with pytest.raises(mr.EngineError, match=r"(?s)answers no more since flash, tiles of 64 rows .*illegal.*anew"):
        attention.tune(*drawn(), quiet=True)
    assert schedule.list_records() == []


# The checks themselves


def test_a_guess_of_the_maximum_is_each_plans_own():
    """A kernel guesses it by its first tile, so that another tile has another, and another logarithm beside it."""

    def perform(how, *call):
        *others, logarithm, peak = right(how, *call)
        return [*others, logarithm - 40, peak + 40] if how == FAST else [*others, logarithm, peak]

    safe, call = Choice("flash"), fold_of(attention, *drawn())
    truth = perform(safe, *call)
    assert tuning.describe_difference(perform(FAST, *call), truth, 2.0**-12) != ""
    assert tuning.find_error(perform, FAST, safe, *call, truth) == ""
    of_another = tuning.comparable_results(call[0], [*truth[:-1], truth[-1] + 40], *call[1:])
    assert tuning.describe_difference(of_another, tuning.comparable_results(call[0], truth, *call[1:]), 2.0**-5) != ""


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.bool])
def test_poison_is_what_nobody_computes(dtype):
    with tuning.Poison():
        made = [torch.empty(3, dtype=dtype), torch.empty_like(torch.zeros(3, dtype=dtype)), torch.zeros(3).new_empty(3)]
    assert made[2].isnan().all()
    for t in made[:2]:
        assert t.isnan().all() if dtype.is_floating_point else t.all() if dtype is torch.bool else (t < -(2**20)).all()


@pytest.mark.parametrize("name", ["causal_attention", "padded_attention", "cross_entropy", "window_attention"])
def test_a_call_cut_short_is_the_same_call_on_fewer(name):
    layer = BY_NAME[name]
    args = layer.make(70, 90, torch.Generator().manual_seed(3), torch.float32)
    with dispatch.automatic(), tuning.record() as met:
        layer.op(*args)
    for fold, leaves, sizes in met.folds:
        cut, short = tuning.shorten(fold, leaves, sizes, Choice("flash", (("tile", (1, 8, 16)),)))
        assert (short.rows, short.cols) == (35, 35)
        for e, v in zip(fold.leaves, cut, strict=True):
            if isinstance(v, torch.Tensor) and (e.rows or e.cols):
                assert v.shape[v.dim() - 1 - (e.feature is not None)] == 35
        found = auto.run_choice(Choice("flash"), fold, cut, short)
        assert tuning.describe_difference(auto.run_choice(Choice("panel"), fold, cut, short), found, 2.0**-12) == ""


def test_rounding_is_no_difference_and_more_is():
    truth = [torch.randn(50, 8, generator=torch.Generator().manual_seed(0))]
    assert tuning.describe_difference([truth[0] * (1 + 2.0**-14)], truth, 2.0**-12) == ""
    assert "of 400 numbers" in tuning.describe_difference([truth[0] * 1.1], truth, 2.0**-12)
    assert "wrong in 1 of 3" in tuning.describe_difference([torch.tensor([1, 2, 4])], [torch.tensor([1, 2, 3])], 0.1)
    odd = [torch.tensor([torch.inf, torch.nan, 1.0])]
    assert (
        tuning.describe_difference(odd, odd, 2.0**-12)
        == ""
        != tuning.describe_difference([odd[0].nan_to_num()], odd, 2.0**-12)
    )


def test_the_clock_is_a_median(clock):
    times = iter([0.25, 0.5, 0.125])
    assert tuning.measure_seconds(lambda: clock.sleep(next(times)), torch.device("cpu"), 0.0) == 0.25


@pytest.mark.parametrize(("best", "runs"), [(1e9, 26), (1e-9, 3)])
def test_what_is_far_behind_is_not_run_often(best, runs):
    calls = []
    tuning.measure_seconds(lambda: calls.append(0), torch.device("cpu"), best=best)
    assert len(calls) == runs


# In the background


def test_every_step_tries_one_candidate_until_all_are_tried(monkeypatch):
    runs = []

    def perform(how, *call):
        runs.append(how)
        return right(how, *call)

    internals.replace_planned_run(monkeypatch, perform)
    args = drawn()
    expected = torch.softmax(args[0] @ args[1].T, -1) @ args[2]
    tried, steps = [], 0
    with mr.use(tune=True):
        while not mr.cache.plans():
            runs.clear()
            assert errors(attention(*args), expected).max() < 1e-5
            tried.append({r for r in runs if r.tiles or r.schedule != "flash"})
            steps += 1
            assert steps < 50
        assert all(len(t) <= 1 for t in tried[:-1]) and len(set().union(*tried)) >= 5
        assert not tuning._sessions
        runs.clear()
        attention(*args)
    assert len(runs) == 1  # tuned: nothing is tried any more


def test_a_backward_is_tuned_in_passing_too():
    args = [a.requires_grad_() for a in drawn()]
    for _ in range(30):
        with mr.use(tune=True):
            y = attention(*args)
        torch.autograd.grad(y.sum(), args)  # outside of the block, as its forward asked
    assert len(mr.cache.plans()) == 2


def test_the_environment_asks_for_it(monkeypatch):
    monkeypatch.setenv(settings.TUNE, "1")
    attention(*drawn())
    assert tuning._sessions
    with mr.use(tune=False):
        assert not tuning.is_requested()
    monkeypatch.setenv(settings.TUNE, "yes")
    with pytest.raises(mr.EngineError, match="MONOIDREDUCE_TUNE is 'yes'"):
        attention(*drawn())


def test_many_threads_tune_at_once():
    args = drawn()
    expected = torch.softmax(args[0] @ args[1].T, -1) @ args[2]
    wrong = []

    def work():
        with mr.use(tune=True):
            for _ in range(6):
                if errors(attention(*args), expected).max() > 1e-5:
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and len(mr.cache.plans()) <= 1


# The road of a whole call


@pytest.fixture
def small(monkeypatch):
    internals.set_dense_limit(monkeypatch, 2**20)


def road_of(*args):
    with dispatch.automatic(), tuning.record() as met:
        attention(*args)
    return met.calls[0]


@pytest.mark.parametrize("slow", ["passes", "dense"])
def test_the_faster_road_is_taken_by_the_next_call(slow, small, monkeypatch, clock):
    args = drawn()
    real, ran = call_cost.dense.write_dense, []

    def whole(*program):
        ran.append(1)
        clock.sleep(0.05 if slow == "dense" else 0)
        return real(*program)

    def perform(*call):
        clock.sleep(0.05 if slow == "passes" else 0)
        return right(*call)

    internals.replace_dense_form(monkeypatch, whole)
    internals.replace_planned_run(monkeypatch, perform)
    few(monkeypatch)
    *_, found = attention.tune(*args, backward=False, quiet=True).folds
    assert found.winner.schedule == ("flash" if slow == "dense" else "dense") and found.lasting
    ran.clear()
    y = attention(*drawn(SHAPE[0] - 3, SHAPE[1] - 1))
    assert bool(ran) == (slow == "passes") and y.shape == (SHAPE[0] - 3, 8)
    schedule.forget()
    assert schedule.recall_choice(found.key) == found.winner


def test_a_wrong_dense_form_never_wins(small, monkeypatch):
    road, given, asks = road_of(*drawn())
    monkeypatch.setattr(type(road), "__call__", lambda self, *given: [2 * v for v in self.passes(*given)])
    found = tuning.tune_call(road, given, asks)
    assert found.winner.schedule == "flash" and "wrong in" in found.trials[0].refused


def test_a_call_too_large_to_be_whole_is_not_tried_so():
    assert tuning.tune_call(*road_of(*drawn())) is None  # DENSE_LIMIT is 0 here
