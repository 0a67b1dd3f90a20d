"""Memory that runs out in the middle of a call: one smaller attempt, then one clear error; all else as before.

A small device is played by counting what torch allocates and refusing what is too much, as a GPU's allocator does; and
on the CPU the process's own limit makes the real allocator fail.
"""

import gc
import json
import subprocess
import sys
import weakref

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.engines.common import matmul, oom_retry
from monoidreduce.plan import budget, schedule, settings
from monoidreduce.plan.settings import Settings, current, now
from monoidreduce.runtime import autograd
from tests.support import ROOT, internals
from tests.support.allocations import Watch
from tests.support.comparison import errors

CHILD = ROOT / "tests" / "support" / "limited_memory.py"


@pytest.fixture(autouse=True)
def quick_collections():
    """Running out of memory collects garbage: only a test's own, not what thousands of tests have imported."""
    gc.freeze()


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k, v)


@mr.op
def loss(x: Row["d"], w: Col["d"], label: Row):
    s = x @ w
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == label, s, 0.0))


class SmallDevice(Watch):
    """Refuses allocations beyond ``room`` bytes, as a GPU does; counts how often."""

    def __init__(self, room, given=()):
        super().__init__(given)
        self.room, self.refused = room, 0

    def _track(self, t):
        if self.func is torch.ops.aten.detach.default:  # of what was kept for a backward: no allocation
            return
        super()._track(t)
        if self.total > self.room:
            self.refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def drawn(seed, rows=1100, cols=1200, d=8):
    torch.manual_seed(seed)
    return [torch.randn(n, d, requires_grad=True) for n in (rows, cols, cols)]


def gradients(args, y):
    return torch.autograd.grad(y.square().sum(), args)


def read_settings():
    return now(), torch.is_grad_enabled()


def close(a, b):
    return errors(a, b).max() <= 1e-5 * b.abs().max()


def test_a_smaller_plan_is_tried_and_gives_the_same(seed):
    args = drawn(seed)
    expected = [attention(*args), *gradients(args, attention(*args))]
    before = read_settings()
    with Watch(args) as easy:
        attention(*args)
    with SmallDevice(easy.peak // 2, args) as device:
        y = attention(*args)
    assert device.refused == 1 and close(y, expected[0])
    with SmallDevice(easy.peak // 2, [*args, y]) as device:
        found = gradients(args, y)
    assert device.refused >= 1 and all(close(a, b) for a, b in zip(found, expected[1:], strict=True))
    assert read_settings() == before


def test_what_does_not_fit_at_all_is_a_typed_error(seed):
    args = drawn(seed)
    kept = [a.detach().clone() for a in args]
    before = read_settings()
    with (
        SmallDevice(1000, args) as device,
        pytest.raises(mr.OutOfMemoryError, match="1100 rows and 1200 col") as caught,
    ):
        attention(*args)
    assert isinstance(caught.value, RuntimeError) and isinstance(caught.value, MemoryError)
    assert "CUDA out of memory" in str(caught.value) and device.refused == 2
    assert all(torch.equal(a, b) for a, b in zip(args, kept, strict=True)) and read_settings() == before
    assert close(attention(*args), torch.softmax(args[0] @ args[1].T, -1) @ args[2])  # and all is well afterwards


def test_nothing_is_held_after_the_error(seed):
    """Not even by the error, which the caller may keep."""
    args = drawn(seed)
    made = []

    class Remembering(SmallDevice):
        def _track(self, t):
            if t.untyped_storage().nbytes() > 2**18:
                made.append(weakref.ref(t.untyped_storage()))
            super()._track(t)

    with Remembering(2**18, args), pytest.raises(mr.OutOfMemoryError) as caught:
        attention(*args)
    assert made and caught.value is not None and not [r for r in made if r() is not None]


def test_a_backward_that_runs_out_leaves_its_graph_usable(seed):
    args = drawn(seed)
    y = attention(*args)
    held = [*args, y]
    expected = torch.autograd.grad(y.sum(), args, retain_graph=True)
    ones = torch.ones_like(y)
    with SmallDevice(1000, [*held, ones]), pytest.raises(mr.OutOfMemoryError):
        torch.autograd.grad(y, args, ones, retain_graph=True)
    assert all(a.grad is None for a in args)
    found = torch.autograd.grad(y.sum(), args)
    assert all(map(torch.equal, found, expected))


def test_a_sum_with_its_gradient_in_the_forward(seed):
    torch.manual_seed(seed)
    x, w = torch.randn(700, 300, requires_grad=True), torch.randn(900, 300, requires_grad=True)
    label = torch.arange(700)

    def both():
        total = loss.total(x, w, label)
        return [total, *torch.autograd.grad(total, (x, w))]

    expected = both()
    refuse = iter([True])

    def begin(real, step, panel):
        real(step, panel)
        if next(refuse, False):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.MonkeyPatch.context() as patch:
        internals.replace_panel_begin(patch, begin, kernels=False)
        found = both()
    assert next(refuse, None) is None and all(close(a, b) for a, b in zip(found, expected, strict=True))


class OutOfResources(Exception):  # by name, as Triton's, which need not be installed
    pass


SAID = [
    torch.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried 1 byte"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    MemoryError(),
    OutOfResources("out of resource: shared memory"),
]


def failing(times, error):
    """An engine that fails so often, and then says with how much room it ran."""
    left = iter([error] * times)

    def run(fold, leaves, sizes):
        mistake = next(left, None)
        if mistake is not None:
            raise mistake
        return settings.shrink_factor()

    return lambda fold, leaves, sizes: oom_retry.run_with_retry(run, (fold, leaves, sizes), sizes, fold)


@pytest.fixture
def folded():
    program = attention.program(*drawn(0, 4, 5, 2))
    sizes = autograd.Sizes(4, 5, (), {"f": 2, "d": 2}, torch.device("cpu"), torch.float32)
    return program.passes[0].fold, [], sizes


@pytest.mark.parametrize("error", SAID, ids=lambda e: f"{type(e).__name__} {str(e)[:24]}")
def test_every_way_of_saying_it_is_understood(error, folded):
    assert failing(0, error)(*folded) == 1
    assert failing(1, error)(*folded) == settings.SHRINK
    with pytest.raises(mr.OutOfMemoryError):
        failing(2, error)(*folded)
    assert settings.shrink_factor() == 1


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes"), mr.BudgetError(given="1B", least="9B"), KeyError("x")], ids=repr
)
def test_other_errors_are_not_touched(error, folded):
    with pytest.raises(type(error)) as caught:
        failing(1, error)(*folded)
    assert caught.value is error


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not bound a process's addresses")
def test_the_real_allocator():
    said = subprocess.run([sys.executable, str(CHILD)], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr[-3000:]
    found = json.loads(said.stdout.splitlines()[-1])
    assert found == {
        "without room": "OutOfMemoryError",
        "smaller": True,
        "attempts": 2,
        "inputs unchanged": True,
        "afterwards": True,
    }


# Budgets


def test_less_room_makes_smaller_tiles():
    whole = schedule.choose_tiles(1, 4096, 4096)
    with settings.shrink_memory():
        less = schedule.choose_tiles(1, 4096, 4096)
    assert less.rows * less.cols * settings.SHRINK == whole.rows * whole.cols


def test_a_budget_is_a_block_a_decorator_and_a_default(monkeypatch):
    monkeypatch.delenv(budget.VARIABLE, raising=False)
    assert settings.requested_budget() is None
    mr.budget.default("32MB")
    assert settings.requested_budget() == 32_000_000
    with mr.budget("16MB"):
        assert settings.requested_budget() == 16_000_000

        @mr.budget(1000)
        def inner():
            return settings.requested_budget()

        assert inner() == 1000 and inner() == 1000 and settings.requested_budget() == 16_000_000
    mr.budget.default(None)
    assert settings.requested_budget() is None
    with mr.use(budget="8MB"):
        assert settings.requested_budget() == 8_000_000
    with pytest.raises(mr.ArgumentError, match="much"), mr.use(budget="much"):
        pass
    assert settings.requested_budget() is None and current.get() == Settings()
    monkeypatch.setenv(budget.VARIABLE, "1.5 GiB")
    assert settings.requested_budget() == 3 * 2**29


@pytest.mark.parametrize("wrong", [0, -1, True, "much", "0MB", 1.5, None])
def test_a_wrong_budget_is_refused_at_once(wrong):
    for give in (mr.budget, attention.within, *(() if wrong is None else (mr.budget.default,))):
        with pytest.raises(mr.ArgumentError, match="budget"):
            give(wrong)


def test_a_wrong_variable_is_refused(monkeypatch):
    monkeypatch.setenv(budget.VARIABLE, "plenty")
    with pytest.raises(mr.ArgumentError, match="plenty"):
        attention(*drawn(0, 4, 5, 2))


def test_a_backward_keeps_the_budget_of_its_forward(seed):
    args = drawn(seed)
    with Watch(args) as free:
        gradients(args, attention(*args))
    with Watch(args) as bound:
        y = attention.within("1MB")(*args)
        gradients(args, y)
    assert bound.peak < free.peak / 2


def test_a_budget_too_small_says_the_least():
    with pytest.raises(mr.BudgetError, match="at least"):
        attention.within(100)(*drawn(0))


def test_a_driver_is_not_asked_for_every_call(monkeypatch):
    """What torch holds is known at once; what others hold, a tenth of a second later."""
    asked, clock, held = [], [10.0], [300]
    monkeypatch.setattr(matmul, "_answers", {})
    monkeypatch.setattr(matmul.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device: asked.append(1) or (1000 - 400 * (len(asked) > 1), 0)
    )
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    counted = lambda device: {"allocated_bytes": {"all": {"current": held[0]}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", counted)
    gpu = torch.device("cuda", 0)
    assert matmul.free_memory(gpu) == 1200
    held[0], clock[0] = 450, 10.05
    assert matmul.free_memory(gpu) == 1050 and len(asked) == 1
    clock[0] = 10.2
    assert matmul.free_memory(gpu) == 650 and len(asked) == 2


def test_the_system_is_not_asked_for_every_call(monkeypatch):
    asked, clock = [], [10.0]
    monkeypatch.setattr(matmul, "_answers", {})
    monkeypatch.setattr(matmul.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(matmul.budget, "available_bytes", lambda: asked.append(1) or 100 * len(asked))
    cpu = torch.device("cpu")
    assert [matmul.free_memory(cpu), matmul.free_memory(cpu)] == [100, 100]
    clock[0] = 10.2
    assert matmul.free_memory(cpu) == 200 and len(asked) == 2
