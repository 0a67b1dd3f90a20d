"""Replay of single passes: the results of the uncached path, and reuse only for calls of the same kind."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from triton.runtime import interpreter

import monoidreduce as mr
from monoidreduce import Batch, Col, Row, ops
from monoidreduce.engines import triton
from monoidreduce.engines.triton.kernels import small_kernels
from monoidreduce.plan import settings
from monoidreduce.plan.schedule import follow
from monoidreduce.plan.settings import EnvironmentVariable
from monoidreduce.runtime import autograd, dispatch, replay
from tests.support import internals
from tests.support.new_lengths import functions_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"], scale: float):
    return mr.softmax_mean(q @ k * scale, v)


@mr.op
def cosine(x: Row["d"], w: Col["d"], b: Batch, tail: Row, t: float, most: int):
    """Arithmetic on both sides, before and after the pass, with every kind of leaf."""
    s = F.normalize(x) @ F.normalize(w) / t
    z = mr.logsumexp(s)
    late = torch.where((mr.row_index < most) & (tail > 0), torch.tanh(z) * b, z + tail)
    return late, mr.sum(torch.relu(s) * w) * b, (tail * 2 + mr.row_index).clamp(max=3.0)


def drawn(*shapes, dtype=torch.float32, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=gen, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def heads(seed=0, dtype=torch.float32):
    return drawn((2, 7, 16), (2, 9, 16), (2, 9, 5), dtype=dtype, seed=seed)


def both(op, args, *rest):
    """Results and gradients."""
    found = op(*args, *rest)
    found = [y for y in (found if isinstance(found, tuple) else (found,)) if y.requires_grad]
    return [*found, *torch.autograd.grad(found, args, [torch.cos(y.detach()) for y in found])]


def assert_same(op, args, *rest, times=3, rtol=2e-5):
    """By the kernels, the first time and frozen, as by torch in float64."""
    wide = [a.detach().double().requires_grad_() for a in args]
    with mr.use(engine="eager"):
        wanted = both(op, wide, *rest)
    with mr.use(engine="triton"):
        for _ in range(times):
            for got, want in zip(both(op, args, *rest), wanted, strict=True):
                assert got.shape == want.shape
                assert (got - want).abs().max() <= rtol * want.abs().max().clamp(min=1)


@pytest.fixture
def pretended(monkeypatch):
    """Kernels run nowhere, and are counted: what is left is the host's work, as on a GPU."""
    made: list[str] = []

    def again(name):
        return lambda *arguments: made.append(name)

    internals.replace_launch(monkeypatch, lambda launch, call: again(call.kernel.name))
    internals.relaunch_on_any_device(monkeypatch)
    internals.forget_launches(monkeypatch)
    with mr.use(engine="triton"):
        yield made


@pytest.mark.parametrize("length", [7, 8])
def test_launches_by_address(by_address, length):
    """What a backward needs shares an allocation, its parts on 16 bytes: 8 numbers a row end there by themselves."""
    args = drawn((2, length, 16), (2, 11, 16), (2, 11, 5))  # a size of its own: no other test has recorded it
    assert_same(attention, args, 0.3, times=2)
    assert by_address == ["fold_over_cols", "side", "fold_over_cols", "fold_over_rows"] * 2
    by_address.clear()
    assert_same(cosine, drawn((2, length, 12), (9, 12), (2,), (2, length)), 0.4, 5, times=2)
    assert by_address.count("side") >= 4


def calls(run):
    """How often each of torch's operators is called."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        result = run()
    return result, {e.key: e.count for e in seen.key_averages() if e.key.startswith("aten::")}


ALLOCATES = {"aten::empty_like", "aten::empty_strided"}


def test_a_frozen_forward_only_allocates_and_launches(pretended):
    args = drawn((2, 8, 16), (2, 9, 16), (2, 9, 16))
    for _ in range(2):
        attention(*args, 0.3)
    pretended.clear()
    _, seen = calls(lambda: attention(*args, 0.3))
    assert set(seen) == ALLOCATES and seen["aten::empty_like"] == 2, seen  # the values, and what a backward needs
    assert pretended == ["fold_over_cols"]


def test_a_frozen_backward_only_allocates_and_launches(pretended):
    args = drawn((2, 8, 16), (2, 9, 16), (2, 9, 16))
    ones = torch.ones(2, 8, 16)
    for _ in range(2):
        torch.autograd.grad(attention(*args, 0.3), args, ones)
    y = attention(*args, 0.3)
    pretended.clear()
    _, seen = calls(lambda: torch.autograd.grad(y, args, ones))
    assert set(seen) == ALLOCATES and seen["aten::empty_like"] == 4, seen  # three gradients, and what is between
    assert pretended == ["side", "fold_over_cols", "fold_over_rows"]


def test_a_frozen_backward_of_shared_heads_adds_their_gradients(pretended):
    args = drawn((2, 3, 8, 16), (2, 1, 9, 16), (2, 1, 9, 16))
    ones = torch.ones(2, 3, 8, 16)
    for _ in range(2):
        torch.autograd.grad(attention(*args, 0.3), args, ones)
    y = attention(*args, 0.3)
    pretended.clear()
    grads, seen = calls(lambda: torch.autograd.grad(y, args, ones))
    assert set(seen) <= ALLOCATES | {"aten::sum_to_size", "aten::sum", "aten::as_strided", "aten::fill_"}, seen
    assert seen["aten::sum_to_size"] == 2 and [g.shape for g in grads] == [a.shape for a in args]
    assert pretended == ["side", "fold_over_cols", "fold_over_rows"]


def test_shared_heads_by_address(by_address):
    assert_same(attention, drawn((2, 3, 7, 16), (2, 1, 9, 16), (2, 1, 9, 5)), 0.3, times=2)
    assert by_address == ["fold_over_cols", "side", "fold_over_cols", "fold_over_rows"] * 2


def test_a_known_layer_goes_from_its_key_to_its_launches(pretended):
    """In a few functions of the library, and with no look-up between the layer and the recording."""
    args = drawn((2, 8, 16), (2, 9, 16), (2, 9, 16))
    for _ in range(4):
        ops.attention(*args)
    seen = functions_of(lambda: ops.attention(*args))
    assert not [name for name in seen if name.startswith(("op:", "runtime/call:", "runtime/replay", "runtime/bind"))]
    assert len(seen) <= 18, seen
    assert len({name.partition(":")[0] for name in seen}) <= 13, seen


def test_a_loss_takes_few_launches(pretended):
    x, weight = drawn((8, 16), (12, 16))
    loss = lambda: ops.cross_entropy(x, weight, torch.arange(8), reduction="sum")
    for _ in range(2):
        torch.autograd.grad(loss(), (x, weight))
    pretended.clear()
    y = loss()
    assert pretended == ["fold_over_cols", "total"]
    pretended.clear()
    torch.autograd.grad(y, (x, weight))
    assert pretended == ["fold_over_cols", "fold_over_rows"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_results_again(dtype):
    assert_same(attention, heads(dtype=dtype), 0.3)
    assert_same(attention, heads(seed=1, dtype=dtype), -0.7)  # other numbers, of another sign


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_arithmetic_on_sides(batch, dtype):
    args = drawn((*batch, 7, 12), (9, 12), batch, (*batch, 7), dtype=dtype)
    assert_same(cosine, args, 0.4, 5)
    assert_same(cosine, [args[0], args[1], args[2], args[3][..., :1].expand_as(args[3])], 0.4, 2**40)


def test_strides_and_alignment_are_other_kinds():
    q, k, v = heads()
    flat = torch.zeros(q.numel() + 1)
    flat[1:] = q.detach().flatten()
    odd = flat[1:].view(q.shape).requires_grad_()
    turned = q.detach().mT.contiguous().mT.requires_grad_()
    for x in (q, turned, odd, q):
        assert_same(attention, [x, k, v], 0.3, times=2)


def test_cotangents_of_every_form():
    args = heads()
    with mr.use(engine="triton"):
        expected = torch.autograd.grad(attention(*args, 0.3), args, torch.ones(2, 7, 5))
        for _ in range(2):
            for one in (torch.ones(()).expand(2, 7, 5), torch.ones(2, 5, 7).mT, torch.ones(2, 7, 10)[..., ::2]):
                for got, want in zip(torch.autograd.grad(attention(*args, 0.3), args, one), expected, strict=True):
                    assert torch.allclose(got, want, atol=1e-6)


def test_a_wrong_call_is_refused_after_right_ones():
    q, k, v = heads()
    with mr.use(engine="triton"):
        for _ in range(3):
            attention(q, k, v, 0.3)
        with pytest.raises(mr.ShapeError):
            attention(q, k[..., :-1], v, 0.3)
        with pytest.raises(mr.DTypeError):
            attention(q, k.double(), v, 0.3)
        with pytest.raises(mr.ArgumentError):
            attention(q, k, v, "0.3")
        with pytest.raises(mr.ArgumentError):
            attention(q, k, v)
        with pytest.raises(mr.ArgumentError):
            attention(q, k, v, 0.3, 0.3)
        with pytest.raises(mr.ArgumentError):
            attention(q, k, v, scales=0.3)


def test_grad_mode_and_who_asks():
    q, k, v = heads()
    with mr.use(engine="triton"):
        asked = attention(q, k, v, 0.3)
        with torch.no_grad():
            assert not attention(q, k, v, 0.3).requires_grad
        plain = [t.detach() for t in (q, k, v)]
        assert not attention(*plain, 0.3).requires_grad
        y = attention(plain[0], k, plain[2], 0.3)
        assert torch.equal(y, asked)
        (one,) = torch.autograd.grad(y.sum(), [k])
        assert torch.equal(one, torch.autograd.grad(asked.sum(), [k])[0])


def test_what_is_asked_decides_again(monkeypatch):
    """Budgets, precision, plans and engines are other situations; one that is out of the ordinary is none."""
    seen = {dispatch.launch_key()}
    with mr.budget("64MB"):
        seen.add(dispatch.launch_key())
    with mr.use(precision="tf32"):
        seen.add(dispatch.launch_key())
    with mr.use(strict=True):
        seen.add(dispatch.launch_key())
    with triton.use_plan({"cols": triton.KernelPlan(16, 32)}):
        seen.add(dispatch.launch_key())
    monkeypatch.setenv("MONOIDREDUCE_BUDGET", "32MB")
    seen.add(dispatch.launch_key())
    assert len(seen) == 6 and None not in seen
    with mr.use(tune=True):
        assert dispatch.launch_key() is None
    with follow({}), settings.shrink_memory():
        assert dispatch.launch_key() is None


def test_another_engine_is_another_plan():
    args = heads()
    for engine in ("triton", "eager", "triton", "reference", "triton"):
        with mr.use(engine=engine):
            assert torch.allclose(attention(*args, 0.3), attention(*args, 0.3))
    with mr.use(engine="triton"), mr.use(engine="triton", precision="tf32"):
        attention(*args, 0.3)


def test_second_derivatives():
    args = [a[:1, :3, :4].detach().clone().requires_grad_() for a in heads(dtype=torch.float64)]
    with mr.use(engine="triton"):
        attention(*args, 0.3)
        assert torch.autograd.gradcheck(lambda *a: attention(*a, 0.3), args, fast_mode=True)
        assert torch.autograd.gradgradcheck(lambda *a: attention(*a, 0.3), args, fast_mode=True)


def test_second_derivatives_of_arithmetic():
    args = drawn((3, 4), (2, 4), (), (3,), dtype=torch.float64)
    run = lambda *a: cosine(*a, 0.4, 2)[:2]
    with mr.use(engine="triton"):
        assert torch.autograd.gradcheck(run, args, fast_mode=True)
        assert torch.autograd.gradgradcheck(run, args, fast_mode=True)


def test_a_graph_is_used_twice():
    args = heads()
    with mr.use(engine="triton"):
        y = attention(*args, 0.3)
        first = torch.autograd.grad(y.sum(), args, retain_graph=True)
        for a, b in zip(first, torch.autograd.grad(y.sum(), args), strict=True):
            assert torch.equal(a, b)


def test_saved_tensors_may_come_back_otherwise():
    """Hooks on what is kept for a backward may give tensors of other strides and alignment."""
    args = heads()
    turned = lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) if t.is_floating_point() else t
    with mr.use(engine="triton"):
        wanted = torch.autograd.grad(attention(*args, 0.3).sum(), args)
        for _ in range(2):
            with torch.autograd.graph.saved_tensors_hooks(turned, lambda t: t):
                y = attention(*args, 0.3)
            for got, want in zip(torch.autograd.grad(y.sum(), args), wanted, strict=True):
                assert torch.allclose(got, want, atol=1e-6)


def test_an_argument_that_was_changed_in_place_is_noticed():
    q, k, v = (t.detach() for t in heads())
    q.requires_grad_()
    with mr.use(engine="triton"):
        for _ in range(2):
            y = attention(q, k, v, 0.3)
        k.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        assert not torch.equal(y, attention(q, k, v, 0.3))


def test_memory_that_runs_out_in_a_frozen_pass(monkeypatch):
    """It is tried once more, by the engine's own road."""
    args = heads()
    with mr.use(engine="triton"):
        wanted = attention(*args, 0.3)
        attention(*args, 0.3)
        real, tried = triton.FoldSavingResults.__call__, []

        def once(self, leaves):
            tried.append(self)
            if len(tried) == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
            return real(self, leaves)

        monkeypatch.setattr(triton.FoldSavingResults, "__call__", once)
        assert torch.equal(attention(*args, 0.3), wanted) and len(tried) == 1
        assert torch.equal(attention(*args, 0.3), wanted) and len(tried) == 2


def test_many_threads(monkeypatch):
    """Kernels one at a time, since the interpreter knows no threads; everything around them at once."""
    real, lock = interpreter.GridExecutor.__call__, threading.RLock()

    def alone(*args, **kwargs):
        with lock:
            return real(*args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", alone)
    args = [heads(seed=s) for s in range(4)]
    with mr.use(engine="triton"):
        wanted = [both(attention, a, 0.3) for a in args]
    failures: list = []

    def work(k):
        try:
            with mr.use(engine="triton"):
                for _ in range(4):
                    assert all(torch.equal(g, w) for g, w in zip(both(attention, args[k], 0.3), wanted[k], strict=True))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures[0]


def test_results_that_share_an_allocation():
    """What is kept for a backward alone may lie in one tensor."""
    with mr.use(engine="triton"):
        attention(*heads(), 0.3)
    program = attention.program(*heads(), 0.3)
    one = replay.PassReplay(program.passes[0].fold, None, "triton", (1,))
    values, rest = torch.ones(2, 7, 5), torch.arange(42.0).view(3, 2, 7)
    found = one.join([values], [rest])
    assert found[1] is values and [int(t[0, 0]) for t in (found[0], *found[2:])] == [0, 14, 28]
    assert all(a is b for a, b in zip(one.join([values], list(rest)), found, strict=True) if b is values)


@pytest.mark.parametrize("count", [1, 59, 1024, 1025])
def test_the_share_of_a_row(count, by_address):
    labels = torch.randint(0, 5, (count,), generator=torch.Generator().manual_seed(count))
    labels[1::3] = -100
    share, others = small_kernels.prepare_share(labels, -100), labels.flip(0).clamp(max=3)
    for given in (labels, others, labels):
        assert torch.equal(share(given, -100), dispatch.label_share(given, -100, torch.float32))
    nothing = torch.full((3,), -100)
    assert small_kernels.prepare_share(nothing, -100)(nothing, -100) == torch.inf
    assert (
        small_kernels.prepare_share(labels[:0], -100) is None
        and small_kernels.prepare_share(torch.zeros(4, 2)[:, 0].long()[::2], 0) is None
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaling_in_place(dtype, by_address):
    x = torch.arange(30.0).view(5, 6).to(dtype)
    for factor in (1.0, 2.0, 0.5):
        expected, before = x * factor, x.data_ptr()
        assert small_kernels.scale_in_place(x, torch.tensor(factor))
        assert torch.equal(x, expected) and x.data_ptr() == before
    assert not small_kernels.scale_in_place(x.mT, torch.tensor(2.0))
    assert not small_kernels.scale_in_place(x.double(), torch.tensor(2.0))


def test_variables_are_read_as_they_are_now(monkeypatch):
    one = EnvironmentVariable("MONOIDREDUCE_TRIED_HERE")
    assert one.read() is None
    monkeypatch.setenv(one.name, "yes")
    assert one.read() == "yes"
    monkeypatch.delenv(one.name)
    assert one.read() is None


def test_a_program_keeps_so_many_kinds(monkeypatch):
    monkeypatch.setattr(autograd, "_KINDS", 2)
    args = heads()
    with mr.use(engine="triton"):
        wanted = torch.autograd.grad(attention(*args, 0.3), args, torch.ones(2, 7, 5))
        for step in (1, 2, 3, 4):
            one = torch.ones(2, 7, 5 * step)[..., ::step]
            for got, want in zip(torch.autograd.grad(attention(*args, 0.3), args, one), wanted, strict=True):
                assert torch.allclose(got, want, atol=1e-6)
