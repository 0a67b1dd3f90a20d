"""The tuner and the memory contract on a GPU: real kernels, real spills, memory that really runs out."""

import contextlib
import time

import pytest
import torch

import monoidreduce as mr
from benchmarks.measure import captured
from monoidreduce import Col, Row, autotune, explain, tuning
from monoidreduce.engines import auto
from monoidreduce.engines.triton import KernelPlan
from monoidreduce.engines.triton.launch import driver
from monoidreduce.plan import candidates, schedule
from monoidreduce.plan.schedule import Choice
from tests.support import internals
from tests.support.comparison import errors
from tests.support.wrong_kernels import GUESSED, wrong

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k, v)


@mr.op
def loss(x: Row["d"], w: Col["d"], label: Row):
    s = x @ w
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == label, s, 0.0))


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path))
    monkeypatch.setattr(tuning, "MOST", 4)  # candidates of a kernel: each is compiled
    schedule.forget()
    yield
    schedule.forget()


def drawn(*lengths, d=64, dtype=torch.bfloat16):
    return [torch.randn(4, n, d, device="cuda", dtype=dtype) for n in lengths]


def test_winners_are_right_and_found_again():
    args = drawn(1000, 1500, 1500)
    found = attention.tune(*args, quiet=True)
    assert len(found.folds) == 2 and all(t.trials for t in found.folds)
    q, k, v = (a.double() for a in args)  # logits of 16 bits alone would be off by more than the limit
    truth = torch.softmax(q @ k.mT, -1) @ v
    assert errors(attention(*args), truth).max() < 0.05
    met = autotune.record_call(attention, [a[:, :-7] for a in args], {}, backward=True).folds
    assert len(met) == 2  # the second in two directions
    for (fold, leaves, sizes), tuned in zip(met, found.folds, strict=True):
        case = auto.make_case(fold, leaves, sizes)
        assert candidates.find_tuned(case, auto.fold_key(case, sizes.device)) == tuned.winner


@pytest.mark.parametrize("when", ["tuned before", "tuned on the way"])
def test_a_graph_is_captured_with_what_won(when):
    """Trials wait for the device, which a capture forbids: in it what was chosen so far runs, and nothing is tried."""
    args = [a.requires_grad_() for a in drawn(500, 700, 700)]
    if when == "tuned before":
        attention.tune(*args, quiet=True)

    def step():
        with mr.use(tune=when == "tuned on the way"):
            return torch.autograd.grad(attention(*args).sum(), args)

    graph, found = captured(step)
    with torch.no_grad():
        for a in args:
            a.copy_(torch.randn_like(a))
    graph.replay()
    with mr.use(tune=False):
        expected = torch.autograd.grad(attention(*args).sum(), args)
    for a, b in zip(found, expected, strict=True):
        assert errors(a, b).max() < 0.05


def test_the_hosts_time_is_not_timed():
    x = torch.ones(100, device="cuda")

    def run():
        for _ in range(3):
            time.sleep(3e-4)
            x.add_(1)

    assert tuning.measure_seconds(run, x.device) < 2e-4


@pytest.mark.parametrize("name", ["attention", "split", "loss"])
def test_peak_memory_is_as_predicted(name):
    lengths = {"attention": (4000, 3000, 3000), "split": (16, 40000, 40000), "loss": (3000, 9000)}[name]
    op, args = (loss if name == "loss" else attention), [torch.randn(n, 128, device="cuda") for n in lengths]
    args = [a.to(torch.bfloat16).requires_grad_() for a in args]
    given = [*args, torch.arange(len(args[0]), device="cuda")] if name == "loss" else args
    predicted = op.cost(*given).chosen.peak
    assert predicted == pytest.approx(explain.measure(op, given, {}, True).peak, rel=0.1)


def test_the_compiler_says_what_a_kernel_takes(monkeypatch):
    internals.forget_launches(monkeypatch)
    with driver.watch_resources() as kernels:
        attention(*drawn(512, 512, 512))
    assert kernels and all(0 < k.registers <= 255 and k.spills >= 0 and k.shared > 0 for k in kernels)


@pytest.mark.parametrize("change", GUESSED)
def test_a_wrong_kernel_never_wins(change, monkeypatch):
    args = drawn(1000, 1500, 1500)
    candidate = Choice("flash", (("cols", (64, 128, 4, 2, 1)),))
    internals.set_candidates(monkeypatch, lambda case, over=None: [candidate] if over == "cols" else [])
    with wrong(KernelPlan(64, 128), change) as made:
        (found,) = attention.tune(*args, backward=False, quiet=True).folds
    assert made and found.winner == found.safe
    assert len(found.trials) == 1 and "wrong in" in found.trials[0].refused


PIECE = 2**21  # bytes: of what is asked for at once, half of a usual tile, and all of the result below


def limited(more):
    """From here on, so many bytes beyond what the allocator has now."""
    share = (torch.cuda.memory_reserved() + more) / torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(share)


def pieces():
    """All memory that there is, in pieces: at least 16, and no place is left that would hold another."""
    torch.cuda.empty_cache()
    taken = [torch.empty(PIECE, dtype=torch.uint8, device="cuda") for _ in range(16)]
    limited(0)
    with contextlib.suppress(torch.OutOfMemoryError):
        while True:
            taken.append(torch.empty(PIECE, dtype=torch.uint8, device="cuda"))
    return taken


def test_memory_that_runs_out_is_given_back():
    """Where there is no place for a result; and in holes that hold a result, but no tile of the usual size."""
    args = [a.requires_grad_() for a in drawn(2048, 2048, 2048, dtype=torch.float32)]
    with mr.use(engine="eager"):
        expected = attention(*args).detach()  # and the vendor's library has what it keeps
    assert expected.nbytes == PIECE < schedule.ELEMENTS * 4
    ran_out = lambda: torch.cuda.memory_stats()["num_ooms"]
    try:
        taken = pieces()
        before, often = torch.cuda.memory_allocated(), ran_out()
        with mr.use(engine="eager"), pytest.raises(mr.OutOfMemoryError, match="out of memory"):
            attention(*args)
        assert torch.cuda.memory_allocated() == before and ran_out() > often
        del taken[::2]
        often = ran_out()
        limited(4 * PIECE)  # for what is small: a place for large tensors is of 20 MiB
        with mr.use(engine="eager"):
            found = attention(*args).detach()
        assert ran_out() > often  # and it was done all the same
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert errors(found, expected).max() < 1e-3


def test_a_backward_keeps_its_budget_in_its_own_thread():
    x, w = (torch.randn(n, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (4096, 65536))
    label = torch.randint(0, 65536, (4096,), device="cuda")
    loss(x, w, label).sum().backward()  # compiled

    def peak(call):
        y = call(x, w, label)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(y.sum(), (x, w))
        return torch.cuda.max_memory_allocated() - before

    assert peak(loss.within("200MB")) < peak(loss.within("2GB")) - 2**27
