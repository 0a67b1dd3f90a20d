"""Replay of single passes on a GPU: relaunched by address, with all that a backward needs in one allocation."""

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from benchmarks.measure import captured
from monoidreduce import ops
from monoidreduce.runtime import dispatch, replay
from monoidreduce.runtime.torch_replay import LayerReplay

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),  # warmed up on another stream, as torch asks
]


def drawn(*shapes, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]


def gap(got, want):
    return float((got.detach().cpu().double() - want.detach()).abs().max() / want.detach().abs().max().clamp(min=1e-9))


def assert_same(ours, theirs, args, most):
    """The first time, and frozen, as torch in float64."""
    wide = [a.detach().cpu().double().requires_grad_() for a in args]
    y = theirs(*wide)
    cotangent = torch.randn_like(y)
    wanted = [y, *torch.autograd.grad(y, wide, cotangent)]
    for _ in range(3):
        got = ours(*args)
        found = [got, *torch.autograd.grad(got, args, cotangent.to(got))]
        assert max(map(gap, found, wanted)) < most


@pytest.mark.parametrize("rows", [1, 111, 128])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2), (torch.float64, 1e-12)])
def test_attention(rows, dtype, most):
    args = drawn((2, 3, rows, 64), (2, 3, 70, 64), (2, 3, 70, 64), dtype=dtype)
    assert_same(ops.attention, F.scaled_dot_product_attention, args, most)
    turned = lambda f: lambda *a: f(*(t.transpose(1, 2) for t in a))
    args = drawn((2, rows, 3, 64), (2, 70, 3, 64), (2, 70, 3, 64), dtype=dtype)
    assert_same(turned(ops.attention), turned(F.scaled_dot_product_attention), args, most)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(reduction, smoothing):
    target = torch.randint(0, 513, (64,), device="cuda")
    target[5] = -100
    options = {"reduction": reduction, "label_smoothing": smoothing}
    ours = lambda x, w: ops.cross_entropy(x, w, target, **options)
    theirs = lambda x, w: F.cross_entropy(x @ w.T, target.cpu(), **options)
    assert_same(ours, theirs, drawn((64, 64), (513, 64)), 2e-5)


@pytest.mark.parametrize("count", [1, 1000, 2**16, 2**16 + 1])
def test_the_share_of_a_row(count):
    labels = torch.randint(0, 3, (count,), device="cuda")
    share = dispatch.label_share(labels, 1, torch.float32)
    assert torch.equal(share, (labels != 1).sum().float().reciprocal())


def test_a_captured_graph_is_played_with_other_numbers():
    args = drawn((2, 96, 64), (2, 96, 64), (2, 96, 64), dtype=torch.bfloat16)
    ones = torch.ones(2, 96, 64, device="cuda", dtype=torch.bfloat16)
    step = lambda: torch.autograd.grad(ops.attention(*args), args, ones)
    graph, found = captured(step)
    with torch.no_grad():
        for a in args:
            a.copy_(torch.randn_like(a))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(f, w) for f, w in zip(found, step(), strict=True))


def test_second_derivatives():
    args = drawn((1, 5, 16), (1, 6, 16), (1, 6, 8), dtype=torch.float64)
    for _ in range(2):
        ops.attention(*args)
    assert torch.autograd.gradgradcheck(ops.attention, args, fast_mode=True)


def test_other_streams_and_no_gradients():
    args = drawn((2, 64, 64), (2, 64, 64), (2, 64, 64))
    wanted = ops.attention(*args)
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        found = ops.attention(*args)
    torch.cuda.synchronize()
    assert torch.equal(found, wanted) and not found.requires_grad
    with mr.use(precision="tf32"):
        ops.attention(*args)
    assert torch.equal(ops.attention(*args), wanted)


def everything(args, *rest):
    y = ops.attention(*args, *rest)
    return [y, *torch.autograd.grad(y, args, torch.cos(y.detach()))]


def assert_equal(found, wanted):
    assert all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True))


def test_gradients_are_added_and_graphs_used_twice():
    args = drawn((2, 64, 64), (2, 80, 64), (2, 80, 64))
    _, *wanted = everything(args)
    for _ in range(2):
        y = ops.attention(*args)
        y.backward(torch.cos(y.detach()), retain_graph=True)
        y.backward(torch.cos(y.detach()))
    for a, w in zip(args, wanted, strict=True):
        assert torch.allclose(a.grad, 4 * w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [1023, 63])
@pytest.mark.parametrize("kind", ["window", "documents"])
def test_many_pairs_are_a_tape(kind, width, monkeypatch):
    """With tensor descriptors, tiles passed over and shifts: bit for bit as step by step."""
    args = drawn(*[(4, 16, 2048, 64)] * 3, dtype=torch.bfloat16)
    given = {"window": (width, 0)} if kind == "window" else {"documents": torch.arange(2048, device="cuda") // width}

    def step():
        y = ops.attention(*args, **given)
        return y, [y.detach(), *torch.autograd.grad(y, args, torch.cos(y.detach()), retain_graph=True)]

    for _ in range(3):
        y, found = step()
    assert type(y.grad_fn).__name__ == "_ReplayedFunctionBackward"
    monkeypatch.setattr(LayerReplay, "__call__", lambda self, args, kwargs: self.layer(*args, **kwargs))
    monkeypatch.setattr(replay.ForwardReplays, "find", lambda *_: None)
    y, wanted = step()
    assert type(y.grad_fn).__name__ != "_ReplayedFunctionBackward"
    assert_equal(found, wanted)


def test_what_is_kept_may_travel():
    """To the host and back: another place, of the same form."""
    args = drawn((2, 64, 64), (2, 80, 64), (2, 80, 64))
    wanted = everything(args)
    for _ in range(2):
        with torch.autograd.graph.save_on_cpu():
            y = ops.attention(*args)
        assert_equal([y, *torch.autograd.grad(y, args, torch.cos(y.detach()))], wanted)


def test_whoever_watches_launches_is_told():
    hooks = pytest.importorskip("triton").knobs.runtime
    args = drawn((2, 64, 64), (2, 80, 64), (2, 80, 64))
    wanted, seen = everything(args), []
    tell = lambda metadata: seen.append(metadata.get()["name"])
    hooks.launch_enter_hook.add(tell)
    try:
        assert_equal(everything(args), wanted)
    finally:
        hooks.launch_enter_hook.remove(tell)
    assert seen == ["fold_over_cols", "side", "fold_over_cols", "fold_over_rows"]
    assert_equal(everything(args), wanted)
    assert len(seen) == 4


def test_in_a_region_of_autocast():
    args = drawn((2, 64, 64), (2, 80, 64), (2, 80, 64))
    wanted = everything(args)
    y = ops.attention(*args)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert_equal([y, *torch.autograd.grad(y, args, torch.cos(y.detach()))], wanted)


@pytest.mark.parametrize("rows", [1, 111, 4096, 4097])
def test_the_sum_of_a_loss(rows):
    """Few rows are added up by a launch of ours, many by torch."""
    target = torch.randint(0, 50, (rows,), device="cuda")
    ours = lambda x, w: ops.cross_entropy(x, w, target)
    assert_same(ours, lambda x, w: F.cross_entropy(x @ w.T, target.cpu()), drawn((rows, 32), (50, 32)), 2e-5)


@mr.op
def best(x: mr.Row["d"], w: mr.Col["d"]):
    return mr.argmax(x @ w)


@mr.op
def draw(x: mr.Row["d"], w: mr.Col["d"], seed: int):
    return mr.sample(x @ w, seed)


def wide(rows, cols, seed):
    gen = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(n, 1024, device="cuda", generator=gen).bfloat16() / 8 for n in (rows, cols)]


def picks(x, w, seed):
    """What is picked, by an op that meets tensors of one kind again."""
    with torch.no_grad():
        return best(x, w), ops.linear_topk(x, w, 50), draw(x, w, seed)


@pytest.mark.parametrize("rows", [1, 64])
def test_what_is_picked_of_other_tensors(rows):
    """By launches whose descriptors are found by address: of other tensors, and of others in the same place."""
    for seed in range(4):
        x, w = wide(rows, 40_000, seed)
        exact = x.float() @ w.float().mT
        place, listed, drawn = picks(x, w, seed)
        rounding = exact.abs().max() / 128
        assert (exact.amax(1) - exact.gather(1, place[:, None])[:, 0]).max() <= rounding
        worst, found = exact.topk(50).values[:, -1], exact.gather(1, listed.indices)
        assert (worst - found.amin(1)).max() <= rounding and (found - listed.values).abs().max() <= rounding
        assert torch.equal(picks(x.clone(), w.clone(), seed)[2], drawn)
        x.copy_(x.flip(0)), w.copy_(w.flip(0))  # other numbers at the same addresses
        turned = picks(x, w, seed)[0]
        assert (exact.flip(0, 1).amax(1) - exact.flip(0, 1).gather(1, turned[:, None])[:, 0]).max() <= rounding


def test_what_is_picked_on_another_stream_and_in_a_graph():
    x, w = wide(64, 40_000, 0)
    wanted = [picks(x, w, 3) for _ in range(3)][-1]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        elsewhere = picks(x, w, 3)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        played = picks(x, w, 3)
    graph.replay()
    for found in (elsewhere, played):
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[2], wanted[2])
        assert torch.equal(found[1].indices, wanted[1].indices)


def test_whoever_watches_launches_of_descriptors_is_told():
    hooks = pytest.importorskip("triton").knobs.runtime
    x, w = wide(64, 40_000, 0)
    with torch.no_grad():
        wanted, seen = [best(x, w) for _ in range(3)][-1], []
        tell = lambda metadata: seen.append(metadata.get()["name"])
        hooks.launch_enter_hook.add(tell)
        try:
            assert torch.equal(best(x, w), wanted)
        finally:
            hooks.launch_enter_hook.remove(tell)
    assert seen == ["fold_over_cols", "unite_best"]


def test_descriptors_are_encoded_once_for_each_address(monkeypatch):
    """Where Triton's launchers are of the make that is known."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    if not hasattr(driver, "make_tensordesc_arg") or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no descriptors that are taken apart in Python")
    x, w = wide(64, 40_000, 0)
    with torch.no_grad():
        wanted = [best(x, w) for _ in range(3)][-1]
        taken, real = [], driver.make_tensordesc_arg
        monkeypatch.setattr(driver, "make_tensordesc_arg", lambda *given: taken.append(given) or real(*given))
        assert torch.equal(best(x, w), wanted) and not taken
        assert torch.equal(best(x.clone(), w), wanted)
