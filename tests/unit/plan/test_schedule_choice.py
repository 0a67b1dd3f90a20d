"""The planner's choice: dense where that is small and faster, never silently, and as right as every other schedule."""

import json
import sys
import threading

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce.engines import auto as planner
from monoidreduce.engines import dense as whole
from monoidreduce.engines.common import oom_retry
from monoidreduce.plan import candidates
from monoidreduce.plan.candidates import folded_axes
from monoidreduce.plan.schedule import Choice, follow
from monoidreduce.runtime import call_cost
from monoidreduce.runtime.dry_run import LiveMemory
from tests.support import internals
from tests.support.comparison import assert_equal, assert_error_rule, cast, flatten, is_float, named, run
from tests.support.layers import BY_NAME, DIFFERENTIABLE, ZOO

DENSE = {"call": Choice("dense")}


# What is chosen follows from the rates of a device: here always those of one CPU, whatever this one is busy with.
CPU = candidates.DeviceRates(
    "CPU, 1 thread",
    {"float32": 3e10, "float64": 1.5e10},
    bandwidth=2e10,
    plain=3e9,
    special=6e8,
    launch=1.5e-6,
    cache=2**25,
    near=2**20,
    link=2e9,
    fresh=1e-10,
    half=200,
)


@pytest.fixture(autouse=True)
def auto(monkeypatch):
    monkeypatch.setattr(candidates, "measure_cpu", lambda threads: CPU)
    with mr.use(engine="auto"):
        yield


@mr.op
def attention(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"]):
    return mr.softmax_mean(q @ k, v)


@mr.op
def causal(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"], back: int):
    return mr.softmax_mean(torch.where(mr.col_index <= mr.row_index - back, q @ k, -torch.inf), v)


@mr.op
def mlp(x: mr.Row["d"], p: mr.Col["d"], q: mr.Col["n"]):
    return mr.sum(torch.relu(x @ p) * q)


def qkv(M, N, d=16, **options):
    return [torch.randn(n, d, **options) for n in (M, N, N)]


def largest(function):
    """Bytes of the largest storage that a call makes."""

    class Largest(LiveMemory):
        most = 0

        def size(self, t):
            self.most = max(self.most, super().size(t))
            return super().size(t)

    with Largest() as found:
        function()
    return found.most


# What runs


def test_small_calls_run_dense_and_say_so():
    args = qkv(200, 300)
    told = attention.explain(*args)
    assert told.as_dict()["runs"] == "dense" and "folding costs more than it saves" in told
    with mr.tally() as tally:
        attention(*args)
    assert tally.tiles == 0


@pytest.mark.parametrize("engine", ["eager", "panel"])
def test_an_engine_that_was_asked_for_never_runs_dense(engine):
    with mr.use(engine=engine), mr.tally() as tally:
        assert attention.explain(*qkv(200, 300)).as_dict()["runs"] != "dense"
        attention(*qkv(200, 300))
    assert tally.computed > 0


def test_nothing_larger_than_the_limit_is_built_without_a_budget():
    side = int((call_cost.DENSE_LIMIT / 4) ** 0.5) + 40
    args = qkv(side, side, requires_grad=True)
    assert attention.explain(*args).as_dict()["runs"] != "dense"
    most = largest(lambda: torch.autograd.grad(attention(*args).sum(), args))
    assert most <= 1024 * 1024 * 4


def test_the_limit_counts_all_matrices_that_are_alive_at_once():
    """Its gradient holds several matrices of 4 MB; one alone would be below the limit of 8."""
    args = qkv(1000, 1000, requires_grad=True)
    cost = attention.cost(*args, backward=True)
    dense = cost["dense"]
    assert dense.held == 1000 * 1000 * 4 < call_cost.DENSE_LIMIT < dense.peak - dense.results
    assert dense.results == 4 * sum(t.numel() for t in args) + 4 * 1000 * args[2].shape[-1]  # gradients, and results
    assert cost.chosen.schedule != "dense"
    with mr.tally() as tally:
        attention(*args)
    assert tally.computed > 0


def test_a_budget_bounds_the_dense_form():
    args = qkv(600, 700, requires_grad=True)
    cost = attention.cost(*args)
    assert cost["dense"].seconds < cost["flash"].seconds
    for limit, runs in ((cost["dense"].peak - 1, "flash"), (cost["dense"].peak, "dense")):
        with mr.budget(limit):
            assert attention.explain(*args).as_dict()["runs"] == runs
            with mr.tally() as tally:
                attention(*args)
            assert (tally.computed == 0) == (runs == "dense")


def test_a_large_budget_lets_larger_matrices_be_built(monkeypatch):
    monkeypatch.setenv("MONOIDREDUCE_CPP", "never")  # no matrix is faster than generated C++
    x, p, q = (torch.empty(n, 256, device="meta") for n in (4096, 1024, 1024))
    assert mlp.cost(x, p, q).chosen.schedule == "flash"  # 16 MB a matrix
    with mr.budget("1GB"):
        assert mlp.cost(x, p, q).chosen.schedule == "dense"


def test_the_longest_of_a_class_is_asked_whether_cpp_runs_its_folds(monkeypatch):
    """Of grouped heads at a length that is not the longest of its class."""
    monkeypatch.setattr(call_cost.cpp, "is_worthwhile", lambda *given: True)
    monkeypatch.setattr(call_cost.cpp, "describe", lambda *given: "torch")
    q, k, v = (torch.randn(1, heads, 187, 8, requires_grad=True) for heads in (4, 2, 2))
    found = mr.ops.attention(q, k, v, enable_gqa=True)
    wanted = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    torch.testing.assert_close(found, wanted)


def test_calls_inside_transforms_are_folds():
    q, k, v = qkv(20, 30, dtype=torch.float64)
    expected = torch.autograd.functional.jvp(lambda q: torch.softmax(q @ k.T, -1) @ v, q, torch.ones_like(q))[1]
    found = torch.func.jvp(lambda q: attention(q, k, v), (q,), (torch.ones_like(q),))[1]
    torch.testing.assert_close(found, expected)
    rows = torch.func.vmap(lambda row: attention(row.unsqueeze(0), k, v))(q).squeeze(1)
    torch.testing.assert_close(rows, attention(q, k, v))


def test_memory_that_runs_out_in_the_dense_form_leaves_the_passes(monkeypatch):
    args = qkv(100, 120)
    expected = attention(*args)

    def failing(program, numbers):
        def run(sizes, *given):
            raise torch.OutOfMemoryError("planted")

        return whole.Script((), (), run, "", None, (), ())

    internals.replace_dense_form(monkeypatch, failing)
    released = []
    monkeypatch.setattr(oom_retry, "release_memory", released.append)
    with mr.tally() as tally:
        torch.testing.assert_close(attention(*args), expected)
    assert tally.computed > 0 and len(released) == 1


# The dense form is right


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layer", named(ZOO))
def test_the_dense_form_equals_the_plain_one(layer, seed):
    with follow(DENSE):
        for size in ((1, 1), (5, 9), (37, 3)):
            args = layer.args(*size, seed)
            assert_equal(run(layer.op, args), run(layer.dense, args))


@pytest.mark.parametrize("name", ["alibi_attention", "value_and_lse", "entropy_and_its_variance", "cross_entropy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_the_dense_form_keeps_the_error_rule(name, dtype, seed):
    layer, trials = BY_NAME[name], []
    for k in range(4):
        args = layer.args(59, 111, seed + k, dtype)
        with follow(DENSE):
            ours = run(layer.op, args)
        trials.append((ours, run(layer.dense, args), run(layer.dense, cast(args, torch.float64))))
    assert_error_rule(trials)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layer", named(DIFFERENTIABLE[::4]))
def test_second_derivatives_of_the_dense_form(layer, seed):
    args = layer.args(4, 5, seed)
    at = [k for k, a in enumerate(args) if is_float(a)]

    def function(*floats):
        given = [floats[at.index(k)] if k in at else a for k, a in enumerate(args)]
        with follow(DENSE):
            return tuple(v for v in flatten(layer.op(*given)) if v.requires_grad)

    assert torch.autograd.gradgradcheck(function, tuple(args[k].requires_grad_() for k in at), fast_mode=True)


def test_rows_that_see_nothing_and_numbers_that_are_none():
    q, k, v = qkv(6, 8, dtype=torch.float64)
    q[5] = torch.nan
    args = [t.requires_grad_() for t in (q, k, v)]
    with follow(DENSE):
        y = causal(*args, 2)
    grads = torch.autograd.grad(y[:5].sum(), args)
    assert torch.equal(y[:2], torch.zeros(2, 16)) and y[5].isnan().all() and not y[:5].isnan().any()
    assert torch.equal(grads[0][:2], torch.zeros(2, 16)) and not any(g[:5].isnan().any() for g in grads[:1])


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_empty_sides(size):
    args = qkv(*size, requires_grad=True)
    y = attention(*args)
    assert y.shape == (size[0], 16) and torch.equal(y, torch.zeros_like(y))
    assert all(torch.equal(g, torch.zeros_like(g)) for g in torch.autograd.grad(y.sum(), args))


def test_batches_broadcast_in_the_dense_form():
    q, k, v = torch.randn(3, 1, 7, 4), torch.randn(1, 2, 9, 4), torch.randn(9, 5)
    with follow(DENSE):
        torch.testing.assert_close(attention(q, k, v), torch.softmax(q @ k.mT, -1) @ v)


# Choices


def test_choices_are_plain_data():
    found = Choice("split", (("cols", (64, 32, 4, 3, 8)), ("rows", (128, 64, 8, 2, 1))))
    assert Choice.from_dict(json.loads(json.dumps(found.as_dict()))) == found
    assert "64 × 32" in str(found)


@pytest.mark.parametrize("rows", [16, 8192], ids=["few rows", "many rows"])
def test_every_candidate_of_a_gpu_can_be_kept_and_found_again(rows):
    q, k = (torch.empty(n, 64, dtype=torch.bfloat16, device="meta") for n in (rows, 8192))
    for part in attention.cost(q, k, k, device="cuda").chosen.parts:
        assert part.case.kernels
        for over in (None, *folded_axes(part.case.fold)):
            found = candidates.rank_candidates(part.case, over)
            assert len(set(found)) == len(found) > 4 and candidates.default_choice(part.case) in found
            for choice in found:
                assert Choice.from_dict(json.loads(json.dumps(choice.as_dict()))) == choice
                assert candidates.can_run(part.case, choice)


@pytest.mark.parametrize("rows", [8192, 16384, 20000])
def test_unmeasured_kernels_run_by_their_own_tiles(rows):
    x, p = (torch.empty(n, 128, dtype=torch.bfloat16, device="meta") for n in (rows, 16384))
    for part in mlp.cost(x, p, p, device="cuda").chosen.parts:
        others = [c for c in candidates.rank_candidates(part.case) if c not in candidates.rank_untuned(part.case)]
        own, whole = dict(part.case.defaults), lambda tile: (*tile[:4], *tile[5:])  # all but the number of parts
        assert all(whole(t) == whole(own[way]) for way, t in part.choice.tiles) and len(others) > 4


@mr.op
def gated(x: mr.Row["d"], p: mr.Col["d"], q: mr.Col["d"], w: mr.Col["n"]):
    return mr.sum(F.silu(x @ p) * (x @ q) * w)


@pytest.mark.parametrize("rows", [16400, 17400])
def test_panels_need_a_lead_and_no_length_of_a_class_begins_a_wave_for_all(rows):
    """129 tiles fit on a GPU of 132 processors at once; the longest length of their class has 136."""
    x, p = (torch.empty(n, 128, dtype=torch.bfloat16, device="meta") for n in (rows, 16500))
    parts = gated.cost(x, p, p, p, device="cuda").chosen.parts
    assert parts[-1].backward and all(candidates.choose(part.case).schedule == "flash" for part in parts)


def test_every_kernels_walk_is_cut_by_itself():
    """128 tiles of four warps leave a GPU of 132 processors half empty, in both directions of a gradient."""
    q = torch.empty(8191, 64, dtype=torch.bfloat16, device="meta")
    part = attention.cost(q, q, q, device="cuda").chosen.parts[-1]
    assert part.backward and {way: tile[4] for way, tile in part.choice.tiles} == {"cols": 2, "rows": 2}
    long = torch.empty(2**17, 64, dtype=torch.bfloat16, device="meta")
    assert attention.cost(long, long, long, device="cuda").chosen.schedule == "flash"


WRONG = [
    None,
    {},
    {"schedule": "magic", "tiles": {}},
    {"schedule": "flash", "tiles": {"tile": [1, 2]}},
    {"schedule": "flash", "tiles": {"tile": [1, 0, 5]}},
    {"schedule": "flash", "tiles": {"tile": [1, "2", 5]}},
    {"schedule": "flash", "tiles": {"tile": [1, True, 5]}},
    {"schedule": "flash", "tiles": {"cols": [64, 64, 4, 2, -1]}},
    {"schedule": "flash", "tiles": {"nobody": [1]}},
    {"schedule": "flash", "tiles": 5},
]


@pytest.mark.parametrize("given", WRONG, ids=str)
def test_what_is_no_choice_is_refused(given):
    with pytest.raises(mr.ArgumentError, match="no choice"):
        Choice.from_dict(given)


def test_tiles_are_followed_forward_and_backward():
    args = qkv(100, 120, requires_grad=True)
    with mr.tally() as tally:
        with follow(Choice("flash", (("tile", (1, 50, 40)),))):
            y = attention(*args)
        forward = tally.computed
        torch.autograd.grad(y.sum(), args)  # outside: the forward's choice holds
    assert (forward, tally.computed) == (6, 12)


def test_a_backward_in_another_thread_follows_too():
    args = qkv(100, 120, requires_grad=True)
    with follow(Choice("flash", (("tile", (1, 50, 40)),))):
        y = attention(*args)
    counted = []

    def backward():
        with mr.tally() as tally:
            torch.autograd.grad(y.sum(), args)
        counted.append(tally.computed)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert counted == [6]


def test_each_fold_may_follow_its_own_choice():
    args = qkv(100, 120, requires_grad=True)
    forward, backward = attention.cost(*args)["flash"].parts
    book = {
        forward.case.name: Choice("flash", (("tile", (1, 100, 60)),)),
        backward.case.name: Choice("panel"),
    }
    with follow(book), mr.tally() as tally:
        y = attention(*args)
        assert tally.computed == 2
        grads = torch.autograd.grad(y.sum(), args)
    q, k, v = args
    torch.testing.assert_close(grads, torch.autograd.grad((torch.softmax(q @ k.T, -1) @ v).sum(), args))


@pytest.mark.parametrize("name", ["scaled_attention", "cross_entropy", "swiglu", "gaussian_kernel", "pooling"])
def test_every_candidate_gives_the_same_numbers(name, seed):
    layer = BY_NAME[name]
    args = layer.args(90, 110, seed)
    expected = run(layer.dense, args)
    parts = layer.op.cost(*[a.requires_grad_() if is_float(a) else a for a in args])["flash"].parts
    tried = {c for p in parts for c in candidates.rank_candidates(p.case)}
    assert {c.schedule for c in tried} >= {"flash"} and len(tried) > 3
    for choice in tried:
        with follow(choice):
            assert_equal(run(layer.op, args), expected)


def test_smaller_tiles_are_chosen_within_a_budget():
    args = qkv(3000, 3000, requires_grad=True)
    cost = attention.cost(*args)
    with mr.budget("2MB"):
        for part in attention.cost(*args)["flash"].parts:
            assert candidates.choose(part.case) != cost["flash"].parts[0].choice
        assert largest(lambda: attention(*args)) <= 2e6


# What planning costs


def calls(function, *args):
    """How many calls, of Python and of C, a function makes in all: its time, but the same on every machine."""
    made = 0

    def count(frame, event, arg):
        nonlocal made
        made += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return made


def test_planning_is_quick():
    """A first call plans in under 50 ms, a planned one is found again in under 50 µs: 20,000 calls and 19, in fact."""
    attention.cost(*qkv(100, 100))  # ceilings are measured once in a process
    args = qkv(211, 307, requires_grad=True)
    _, bound, sizes, _ = attention._prepare(tuple(args), {})
    program = mr.op(attention.function).program(*args)
    assert calls(call_cost.runs_dense, program, dict(bound), sizes, True) < 50_000

    fold = program.passes[0].fold
    leaves = [bound[str(e.attrs[0])] for e in program.passes[0].feeds]
    assert calls(planner.choose, fold, leaves, sizes) < 5_000
    assert calls(planner.choose, fold, leaves, sizes) < 100


def test_dense_or_tiled_is_asked_once_for_a_class_of_lengths(monkeypatch):
    """97 to 100 are one class, 101 is of the next; what runs is what ``explain`` says of each of them."""
    found, estimate = [], call_cost.estimate_program
    monkeypatch.setattr(call_cost, "estimate_program", lambda *args, **more: found.append(1) or estimate(*args, **more))
    counts = []
    for n in (97, 98, 100, 99, 101):
        attention(*torch.randn(3, n, 8).unbind())
        counts.append(len(found))
    assert counts == [1, 1, 1, 1, 2]
