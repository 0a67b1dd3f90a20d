"""Replay of panel programs: the same launches, bit for bit the same numbers, no more memory."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines.common.bounded_cache import BoundedCache
from monoidreduce.engines.triton import KernelPlan
from monoidreduce.engines.triton.launch import driver, replay
from monoidreduce.engines.triton.panel import kernel_step
from monoidreduce.plan import budget, panel_layout
from monoidreduce.runtime.dry_run import LiveMemory
from tests.interpret.test_epilogue_kernels import SMALL
from tests.support import internals

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::monoidreduce.errors.FallbackWarning")


@mr.op
def own_index(x: mr.Row["d"], y: mr.Col["d"], scale: float):
    s = x @ y * scale
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == mr.row_index, s, 0.0))


@mr.op
def both_ways(x: mr.Row["d"], y: mr.Col["d"], scale: float):
    s = x @ y * scale
    return mr.logsumexp(s), mr.logsumexp(s, over="rows"), mr.sum(torch.tanh(s) * y)


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path_factory):
    """Few features are wide, tiles are small, and products may write weights."""
    internals.set_panel_sizes(monkeypatch, MIN_ROWS=4, MULTIPLE=4, MIN_SIDE=4)
    internals.use_epilogue_plans(monkeypatch, SMALL)
    internals.use_row_kernel_plans(monkeypatch, {"cols": KernelPlan(8, 16, 4, 1), "rows": KernelPlan(32, 16, 4, 1)})
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path_factory.getbasetemp() / "kernels"))


@pytest.fixture
def ran(monkeypatch, by_address):
    """The replays that were run."""
    found = []
    internals.watch_panel_replays(monkeypatch, lambda run, reel, *given: found.append(reel) or run(*given))
    return found


def vectors(rows, cols, features, dtype=torch.bfloat16, seed=0):
    gen = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(n, features, generator=gen) for n in (rows, cols))
    return (x / features**0.5).to(dtype), y.to(dtype)


def pulled(op, args, limit, *rest):
    """Results and gradients."""
    given = [a.detach().requires_grad_(a.is_floating_point()) for a in args]
    with mr.use(engine="triton"), mr.budget(limit):
        found = op(*given, *rest)
        found = [y for y in (found if isinstance(found, tuple) else (found,)) if y.is_floating_point()]
        grads = torch.autograd.grad([y.sum() for y in found], given, allow_unused=True)
    return [*(y.detach() for y in found), *(g for g in grads if g is not None)]


def walked(monkeypatch, run):
    """The same, walked each time."""
    with monkeypatch.context() as patch:
        internals.replace_panel_replay(patch)
        return run()


ROW = 70 * 2 + 32 + 264 * 2
CASES = [
    pytest.param(own_index.total, 40, 70, 264, torch.bfloat16, ROW * 12, id="gradients in the forward"),
    pytest.param(own_index.total, 33, 70, 300, torch.bfloat16, "10MB", id="in one panel"),
    pytest.param(own_index, 24, 300, 264, torch.bfloat16, 5000, id="in the memory of gradients"),
    pytest.param(own_index, 59, 70, 264, torch.bfloat16, 30_000, id="gradients in one panel"),
    pytest.param(both_ways, 23, 31, 260, torch.float32, 2000, id="both ways, swept"),
    pytest.param(both_ways, 1, 31, 257, torch.float64, "1MB", id="one row, float64"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("op", "rows", "cols", "features", "dtype", "limit"), CASES)
def test_the_same_launches_and_the_same_numbers(op, rows, cols, features, dtype, limit, ran, by_address, monkeypatch):
    for k in range(2):  # walked, and heard
        pulled(op, vectors(rows, cols, features, dtype, k), limit, 0.7)
    assert not ran
    args = vectors(rows, cols, features, dtype, 2)
    by_address.clear()
    wanted = walked(monkeypatch, lambda: pulled(op, args, limit, 0.7))
    launched = by_address.copy()
    by_address.clear()
    got = pulled(op, args, limit, 0.7)
    assert by_address == launched and ran
    assert_equal(got, wanted)


def test_totals_in_the_memory_of_gradients_are_written_down(ran, monkeypatch):
    """Blocks of rows, whose totals lie in their gradients and those of later rows."""
    internals.set_panel_sizes(monkeypatch, MIN_ROWS=128, OVERHEAD=16)
    used = []
    internals.replace_row_blocks(monkeypatch, lambda choose, *given: used.append(choose(*given)) or used[-1])
    run = lambda seed: pulled(own_index, vectors(160, 160, 264, seed=seed), 30_000, 0.7)
    run(0), run(1)
    assert not ran
    assert_equal(run(2), walked(monkeypatch, lambda: run(2)))
    assert ran and 1 < len(used[0].blocks) < panel_layout.MAX_ROUNDINGS and used[0].cols < 160


def assert_equal(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)


SWEPT = (both_ways, (23, 31, 260, torch.float32), 2000)  # panels that the interpreter is quick with


def test_no_more_memory_is_held(by_address, monkeypatch):
    op, sizes, limit = SWEPT
    peaks = {"walked": [], "run": []}

    def watched(name, run, given):
        with LiveMemory(given) as alive:
            found = run()
        peaks[name].append(alive.peak)
        return found

    internals.watch_panel_replays(monkeypatch, lambda run, reel, *given: watched("run", lambda: run(*given), given))
    for _ in range(3):
        pulled(op, vectors(*sizes), limit, 0.7)
    tensors = lambda inputs: [v for v in inputs.values() if isinstance(v, torch.Tensor)]
    plain = lambda walked, *given: watched("walked", lambda: walked(*given), tensors(given[1]))
    internals.replace_panel_replay(monkeypatch, plain)
    pulled(op, vectors(*sizes), limit, 0.7)
    assert len(peaks["run"]) == len(peaks["walked"]) >= 2
    assert all(0 < run <= walked for run, walked in zip(peaks["run"], peaks["walked"], strict=True))


def test_what_is_of_another_kind_is_walked(ran, monkeypatch):
    op, sizes, limit = SWEPT
    x, y = vectors(*sizes)
    cut = torch.randn(29, 270)[3:26, 5:265]  # begins elsewhere, and its rows are longer
    for _ in range(3):
        pulled(op, (x, y), limit, 0.7)
    runs = len(ran)
    for args, scale in (((cut, y), 0.7), ((x, y), 0.9), ((y, y), 0.7)):
        for _ in range(3):
            got = pulled(op, args, limit, scale)
        assert_equal(got, walked(monkeypatch, lambda args=args, s=scale: pulled(op, args, limit, s)))
    assert runs and len(ran) == 4 * runs
    moved = torch.randn(23 + 4, 270)[4:, 5:265].as_strided((23, 260), (270, 1), 270 + 5)
    assert_equal(pulled(op, (moved, y), limit, 0.7), walked(monkeypatch, lambda: pulled(op, (moved, y), limit, 0.7)))
    assert len(ran) == 5 * runs  # the same kind, at another place of its storage


def test_one_tensor_twice_is_not_two(ran, monkeypatch):
    op, (rows, _, *rest), limit = SWEPT
    x, y = vectors(rows, rows, *rest)
    for _ in range(3):
        pulled(op, (x, x), limit, 0.7)
    runs = len(ran)
    assert_equal(pulled(op, (x, y), limit, 0.7), walked(monkeypatch, lambda: pulled(op, (x, y), limit, 0.7)))
    assert runs and len(ran) == runs


def test_without_a_budget_panels_are_chosen_each_time(ran, monkeypatch):
    op, sizes, limit = SWEPT
    monkeypatch.setattr(budget, "LEAST", 1)
    args = vectors(*sizes)

    def free(size):
        internals.pretend_free_memory(monkeypatch, size * budget._SHARE)

    def both():
        given = [a.detach().requires_grad_() for a in args]
        with mr.use(engine="triton"):
            found = op(*given, 0.7)
            return [*found, *torch.autograd.grad([y.sum() for y in found], given)]

    kinds = lambda: [len(kind.recordings) for kind in kernel_step._LOOPS.values()]
    for size in (limit, 2**20, limit, 2**20):
        free(size)
        for _ in range(2):
            assert_equal(both(), walked(monkeypatch, both))
    assert max(kinds()) == 2 and len(ran) >= 5


def test_memory_that_runs_out_in_a_reel(ran, monkeypatch):
    op, sizes, limit = SWEPT
    args = vectors(*sizes)
    for _ in range(3):
        wanted = pulled(op, args, limit, 0.7)
    (kind, *_) = kernel_step._LOOPS.values()

    def out(*given):
        ran.append("ran out")
        raise torch.OutOfMemoryError("CUDA out of memory")

    kind.recordings[0].replay.run = out
    for a, b in zip(pulled(op, args, limit, 0.7), wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert ran.count("ran out") == 1


def test_so_many_kinds_are_kept(ran, monkeypatch):
    monkeypatch.setattr(kernel_step, "_LOOPS", BoundedCache(2))
    op, sizes, limit = SWEPT
    for scale in (0.5, 0.6, 0.6, 0.7):  # what is met once pushes nothing out
        pulled(op, vectors(*sizes), limit, scale)
    (first, second) = kernel_step._LOOPS
    assert 0.6 in first and 0.6 in second and not ran
    for scale in (0.7, 0.8, 0.9):
        pulled(op, vectors(*sizes), limit, scale)
    assert [0.7 in key for key in kernel_step._LOOPS] == [True, True]


# What is heard, and written down: of torch alone


def heard(function, *args):
    listener = replay.Recorder({f"x{k}": t for k, t in enumerate(args)})
    with listener, torch.no_grad():
        found = function(*args)
    return listener, found


def written(function, *args):
    """A function of tensors as a replay."""
    listener, found = heard(function, *args)
    assert not listener.failure
    given = {f"x{k}": replay.Place.whole(f"x{k}", t) for k, t in enumerate(args)}
    return replay.Replay(listener.steps, given, listener.symbolic(found), listener.constants, args[0].device)


def shared(x, y):
    """Numbers of one type in the memory of others, parts of parts, constants, two results at once."""
    host = torch.empty(64, 4, dtype=torch.float64)
    inner = host.view(-1).view(torch.uint8)[64:704].view(torch.float32).view(32, 5).zero_()
    inner[3:11].copy_(x.mT[:8])
    inner[:, 1] += y[1] * torch.tensor(3.0) + torch.full((), 2.0)
    values, places = inner.topk(2, dim=0)
    torch.mm(inner[:8, :4], x[:4, :6], out=torch.empty(8, 6))
    unused = torch.arange(4) * 2
    assert unused.shape == (4,)
    return inner.mT, values, places, x, torch.tensor(2.0).exp().item()


def test_written_down_it_is_the_same_function():
    args = torch.randn(5, 32), torch.randn(6)[1:5]
    made = written(shared, *args)
    assert "arange" not in made.text and made.text.count("zero_") <= 1
    for seed in range(3):
        torch.manual_seed(seed)
        args = torch.randn(9, 32)[seed : seed + 5], torch.randn(9)[seed + 1 : seed + 5]
        for a, b in zip(made.run(*args), shared(*args), strict=True):
            assert a == b if isinstance(b, float) else torch.equal(a, b) and a.stride() == b.stride()


def test_what_is_let_go_after_its_last_use():
    made = written(lambda x: (((x + 1).exp() * 2).sum(0),), torch.randn(300, 200))
    x = torch.randn(300, 200)
    with LiveMemory([x]) as alive:
        made.run(x)
    assert x.nbytes < alive.peak <= 2 * x.nbytes + 200 * 4


ELSEWHERE = torch.zeros(64)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x * float(x.sum()), "otherwise"),
        (lambda x: x[x > 0], "otherwise"),
        (lambda x: x + torch.rand(4), "otherwise"),
        (lambda x: x + ELSEWHERE[0], "elsewhere"),
        (lambda x: x[:, :0].sum() + x, "nothing"),
    ],
)
def test_what_cannot_be_done_again_is_said(function, reason):
    listener, found = heard(function, torch.ones(4, 4))
    assert reason in listener.failure and found.numel() >= 4  # and it was done all the same


def test_an_input_read_as_another_type_is_not_written_down():
    with pytest.raises(replay.NotRecordable, match="another type"):
        written(lambda x: (x.view(torch.int32) + 1,), torch.ones(4, 4))


def test_parts_of_one_tensor_are_told_apart():
    x = torch.zeros(8, 4)
    assert "one tensor" in replay.Recorder({"a": x[:4], "b": x[4:]}).failure
    assert not replay.Recorder({"a": x, "b": x}).failure


def test_a_kernel_that_is_not_launched_again_is_not_written_down():
    listener = replay.Recorder({})
    with listener:
        driver.report(None, ())
    assert "not launched again" in listener.failure


class Compiled:
    """What Triton's compiler gives, as far as launchers look at it."""

    function, packed_metadata = 12345, (4, 1, 2048)

    def __init__(self, seen):
        self.seen, self.run = seen, self._run

    def _run(self, *given):
        self.seen.append(given)

    def __getitem__(self, grid):
        return lambda *given: self.seen.append(("watched", grid, *given))


def test_kernels_are_started_with_addresses(monkeypatch):
    seen, stream = [], [7]
    monkeypatch.setattr(driver, "find_stream", lambda device: lambda: stream[0])
    x, device = torch.zeros(6, 4), torch.device("cpu")
    again = driver.Relauncher(Compiled(seen), (3, 2), (16, "ieee"), device)

    def launch(x):
        out = torch.empty(5)
        driver.report(again, (out[1:], x[2:], 4, 0.5))
        return (out,)

    made = written(launch, x)
    (out,) = made.run(x)
    after = (12345, (4, 1, 2048), None, None, None)
    given = (out.data_ptr() + 4, x.data_ptr() + 32, 4, 0.5, 16, "ieee")
    assert seen == [(3, 2, 1, 7, *after, *given)]
    stream[0] = None  # somebody watches
    assert made.run(x) is None and len(seen) == 1


def test_a_compiled_kernel_is_launched_on_another_grid(monkeypatch):
    """As for another length, without a look-up; what stands for a launch in a dry run is not."""
    seen, stream, device = [], [7], torch.device("cpu")
    monkeypatch.setattr(driver, "find_stream", lambda device: lambda: stream[0])
    one = driver.Relauncher(Compiled(seen), (3, 2), (16,), device)
    other = one.on_grid((5,))
    for again in (other, one):
        again(1.5)
        stream[0] = None  # somebody watches
        again(1.5)
        stream[0] = 7
    after = (12345, (4, 1, 2048), None, None, None)
    first, second = ((*grid, 7, *after, 1.5, 16) for grid in ((5, 1, 1), (3, 2, 1)))
    assert seen == [first, ("watched", (5, 1, 1), 1.5, 16), second, ("watched", (3, 2, 1), 1.5, 16)]
    assert driver.Relauncher(driver._SKIPPED, (3,), (), device).on_grid((5,)) is None


def test_launchers_are_kept_by_their_keys(monkeypatch):
    monkeypatch.setattr(driver, "_MOST_LAUNCHERS", 2)
    made, keeper = [], driver.LaunchCache()

    def first(name):
        made.append(name)
        return lambda *given: made.append((name, *given))

    for key in ("a", "b", "a", "c", "a"):  # the oldest goes
        keeper((key,), lambda key=key: first(key), (1,))
    assert made == ["a", "b", ("a", 1), "c", "a"]
    keeper(("d",), lambda: None, ())
    assert ("d",) not in keeper.relaunchers
    assert (
        driver.specialize_integer(1)
        != driver.specialize_integer(2)
        != driver.specialize_integer(16)
        == driver.specialize_integer(32)
    )
    assert driver.specialize_integer(-(2**31)) != driver.specialize_integer(-(2**32))
