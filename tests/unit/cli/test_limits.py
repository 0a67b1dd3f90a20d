"""What fits in a given memory: the search for the largest size, and what a run is said to need."""

import pytest
import torch

from monoidreduce.cli.limits import QUESTIONS, Growth, Limit, Run, answer, grow, measure_run

CPU = torch.device("cpu")


def pretend(memory, seconds=lambda n: 0.0):
    """A measurement that is a formula, and the sizes that it was asked for."""
    asked = []

    def measure(size):
        asked.append(size)
        return Run(size, memory(size), seconds(size))

    return measure, asked


@pytest.mark.parametrize("memory", [lambda n: 12 * n * n, lambda n: 2048 * n, lambda n: 10**6 + 900 * n + n * n // 50])
def test_the_largest_size_is_found_between_one_that_fits_and_one_that_does_not(memory):
    measure, asked = pretend(memory)
    found = grow(measure, 512, 2**28, seconds=5.0, multiple=64)
    smallest_over = min(r.size for r in found.runs if r.peak > 2**28)
    assert found.stopped == "memory" and found.largest.peak <= 2**28
    assert smallest_over <= 1.08 * found.largest.size and found.largest.peak > 0.85 * 2**28
    assert asked == [r.size for r in found.runs] and len(asked) < 14 and all(n % 64 == 0 for n in asked)


def test_no_run_is_begun_that_would_take_too_long():
    measure, asked = pretend(lambda n: 100 * n, lambda n: n * n * 1e-8)
    found = grow(measure, 512, 2**40, seconds=4.0)
    assert found.stopped == "time" and max(asked) == found.largest.size
    assert 10_000 < max(asked) <= 20_100


def test_time_ends_the_growth_only_beyond_what_the_other_side_reached():
    """On a busy machine every run takes long: the other side's largest size and twice that are run all the same."""
    measure, asked = pretend(lambda n: 100 * n, lambda n: 40.0)
    found = grow(measure, 512, 2**40, seconds=4.0, multiple=64, beside=6400)
    assert found.stopped == "time" and asked == [512, 6400, 12_800] and found.largest.size == 12_800
    measure, asked = pretend(lambda n: 12 * n * n)
    assert 4400 < grow(measure, 512, 2**28, seconds=5.0, multiple=64, beside=6400).largest.size <= 4729
    measure, asked = pretend(lambda n: None)
    assert grow(measure, 512, 2**28, seconds=5.0, beside=6400).largest is None and asked == [512]


def test_a_size_that_fills_the_memory_is_the_largest_though_time_ended_the_search():
    measure, _ = pretend(lambda n: 2**28 if n == 6400 else n, lambda n: 40.0)
    assert grow(measure, 6400, 2**28, seconds=4.0).stopped == "memory"
    assert grow(measure, 6400, 2**29, seconds=4.0).stopped == "time"


def test_compiling_for_a_new_size_does_not_end_the_growth():
    """The first run of every size is slow, as where a kernel is compiled for it: the second one counts."""
    asked = []

    def measure(size):
        asked.append(size)
        return Run(size, 1000 * size, 3.0 if asked.count(size) == 1 and size > 512 else size * 1e-9)

    found = grow(measure, 512, 2**30, seconds=4.0, multiple=64)
    assert found.stopped == "memory" and found.largest.peak > 0.9 * 2**30
    assert max(r.seconds for r in found.runs) < 0.01


def test_what_runs_out_of_memory_does_not_fit():
    measure, _ = pretend(lambda n: None if n > 3000 else n)
    found = grow(measure, 512, 2**28, seconds=5.0)
    assert found.stopped == "memory" and 2700 < found.largest.size <= 3000
    measure, asked = pretend(lambda n: None)
    assert grow(measure, 512, 2**28, seconds=5.0).largest is None and asked == [512]


def test_memory_is_the_peak_of_a_real_run_with_its_inputs_and_gradients():
    inputs = lambda n: (torch.ones(n, requires_grad=True), torch.ones(()))
    run = measure_run(lambda x: (x[:, None] * x).exp().sum(), inputs, CPU)(1000)
    assert 2 * 4 * 1000**2 <= run.peak < 3.1 * 4 * 1000**2 and run.seconds > 0
    failing = measure_run(lambda x: torch.empty(2**50), inputs, CPU)(10)
    assert failing.peak is None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q.key)
def test_both_sides_compute_the_same_and_ours_needs_less(question, seed):
    *args, cotangent = question.inputs(1536, CPU)
    learned = [a for a in args if a.requires_grad]
    found, true = (
        (y := call(*args), *torch.autograd.grad(y, learned, cotangent)) for call in (question.ours, question.dense)
    )
    for a, b in zip(found, true, strict=True):
        assert torch.allclose(a, b, atol=1e-4 * b.abs().max().item())
    ours, dense = (
        measure_run(call, lambda n: question.inputs(n, CPU), CPU)(3072).peak for call in (question.ours, question.dense)
    )
    assert ours < 0.4 * dense


def test_an_answer_has_the_runs_of_both_sides():
    found = answer(QUESTIONS[2], 2**23, 60.0, CPU)
    for growth in (found.ours, found.dense):
        assert growth.stopped == "memory" and any(r.peak > 2**23 for r in growth.runs)
    assert found.to_data()["torch"]["largest"] == found.dense.largest.size < 800


@pytest.mark.parametrize(("stopped", "gain"), [("memory", 4.0), ("time", 0.0)])
def test_no_ratio_is_said_where_time_ended_the_other_side(stopped, gain):
    ours = Growth((Run(2048, 10, 0.1),), 100, "time")
    assert Limit(QUESTIONS[0], ours, Growth((Run(512, 10, 0.1),), 100, stopped)).gain == gain
