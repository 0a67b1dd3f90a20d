"""Replay of whole programs: the same results and gradients, for any gradients asked for and any strides."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce import Col, Row, ops
from monoidreduce.engines.triton.launch import driver
from monoidreduce.runtime import replay

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FORWARD, BACKWARD = ["fold_over_cols"], ["side", "fold_over_cols", "fold_over_rows"]


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k, v)


@mr.op
def several(x: Row["d"], y: Col["d"], b: Row):
    """Three outputs: of numbers, of indices, and one that knows nothing of b."""
    s = x @ y
    return mr.logsumexp(s) * b, mr.argmax(s), torch.tanh(mr.logsumexp(s) * 0.5)


@mr.op
def loss(x: Row["d"], w: Col["d"], label: Row, share: float):
    s = x @ w
    return (mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == label, s, 0.0))) * share


def drawn(*shapes, dtype=torch.float32):
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=gen, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def heads(dtype=torch.float32):
    return drawn((2, 7, 16), (2, 9, 16), (2, 9, 5), dtype=dtype)


def grads(y, args, **more):
    return torch.autograd.grad(y, args, torch.cos(y.detach()), **more)


def by_torch(q, k, v):
    y = torch.softmax(q @ k.mT, -1) @ v
    return [y, *grads(y, (q, k, v))]


def assert_close(found, wanted, atol=2e-5):
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape and torch.allclose(got.double(), want.double(), atol=atol)


@pytest.fixture(autouse=True)
def kernels():
    with mr.use(engine="triton"):
        yield


def test_graphs_are_used_twice_and_gradients_added(by_address):
    args = heads()
    _, *wanted = by_torch(*args)
    y = attention(*args)
    y.backward(torch.cos(y.detach()), retain_graph=True)
    y.backward(torch.cos(y.detach()))
    assert by_address == [*FORWARD, *BACKWARD, *BACKWARD]
    assert_close([a.grad for a in args], [2 * w for w in wanted], 5e-5)


def test_a_graph_is_let_go_with_its_results(by_address):
    """Not even a cycle holds it: whoever captures a step on another stream needs earlier nodes to be gone."""

    def step():
        weights = [w.requires_grad_() for w in drawn((16, 16), (16, 16), (16, 5))]
        x = torch.ones(2, 9, 16)
        attention(*(x @ w for w in weights)).sum().backward()
        return [weakref.ref(w) for w in weights]

    step()  # what kernels were launched with first, these tests keep
    gc.disable()
    try:
        refs = [ref for _ in range(3) for ref in step()]
        assert by_address and all(ref() is None for ref in refs)
    finally:
        gc.enable()


def test_what_is_asked_for(by_address):
    q, k, v = heads()
    _, dq, dk, dv = by_torch(q, k, v)
    for asked, wanted in (((q,), [dq]), ((k, v), [dk, dv]), ((v,), [dv])):
        given = [t if any(t is a for a in asked) else t.detach() for t in (q, k, v)]
        for _ in range(2):
            assert_close(grads(attention(*given), asked), wanted)
    with torch.no_grad():
        assert not attention(q, k, v).requires_grad
    assert not by_address.count("fold_over_rows") < 4


@pytest.mark.parametrize("turn", ["unaligned", "transposed", "float64"])
def test_what_is_kept_comes_back_otherwise(by_address, turn):
    """Hooks may give what a backward needs another alignment, other strides, or even another type."""
    turned = {
        "unaligned": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
        "transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
        "float64": lambda t: t.double() if t.is_floating_point() else t,
    }[turn]
    args = heads()
    _, *wanted = by_torch(*args)
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(turned, lambda t: t):
            y = attention(*args)
        assert_close([g.float() for g in grads(y, args)], wanted)


def test_cotangents_of_every_form(by_address):
    args = heads()
    y = attention(*args)
    wanted = torch.autograd.grad(y, args, torch.ones(2, 7, 5), retain_graph=True)
    for one in (torch.ones(()).expand(2, 7, 5), torch.ones(2, 5, 7).mT, torch.ones(2, 7, 10)[..., ::2]):
        assert_close(torch.autograd.grad(y, args, one, retain_graph=True), wanted)


def test_scales_of_stored_vectors_need_no_launch_of_their_own(by_address):
    """One number leaves the sums, and multiplies the mean as it is written in the type that is expected."""
    q, *others = drawn((2, 7, 16), (2, 9, 16), (2, 9, 16), dtype=torch.float16)
    k, v = (mr.scaled((20 * t.detach()).to(torch.int8), 0.05) for t in others)
    found = [attention(q.detach(), k, v) for _ in range(4)]
    assert by_address and set(by_address) == {"fold_over_cols"}
    assert all(torch.equal(one, found[0]) and one.dtype is torch.float16 for one in found)
    assert_close(found[-1:], [torch.softmax(q.float() @ k.dequantize().mT, -1) @ v.dequantize()], 5e-3)


def test_a_gradient_to_be_summed_is_walked(by_address):
    q, k, v = drawn((2, 7, 16), (9, 16), (9, 5))
    y = torch.softmax(q @ k.mT, -1) @ v
    for _ in range(2):
        assert_close(grads(attention(q, k, v), (q, k, v)), grads(y, (q, k, v), retain_graph=True), 5e-5)


def test_outputs_and_cotangents_that_are_left_out(by_address):
    x, y, b = drawn((7, 16), (9, 16), (7,))
    for _ in range(2):
        first, best, third = several(x, y, b)
        s = x @ y.mT
        z = s.logsumexp(-1)
        assert not best.requires_grad and torch.equal(best, s.argmax(-1))
        assert_close(grads(first, (x, y, b)), grads(z * b, (x, y, b), retain_graph=True))
        first, best, third = several(x, y, b)
        assert_close(grads(third, (x, y)), grads(torch.tanh(s.logsumexp(-1) * 0.5), (x, y)))
        assert torch.autograd.grad(several(x, y, b)[2].sum(), b, allow_unused=True)[0].eq(0).all()
    first, _, third = several(x.detach(), y.detach(), b)
    assert first.requires_grad and not third.requires_grad


def test_second_derivatives(by_address):
    args = heads(dtype=torch.float64)
    found = []
    for y in (attention(*args), torch.softmax(args[0] @ args[1].mT, -1) @ args[2]):
        first = grads(y, args, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), args)])
    assert_close(*found, 1e-12)
    assert by_address.count("fold_over_cols") > 2


@pytest.mark.parametrize("batch", [(), (2,)])
def test_the_sum_of_a_loss(by_address, batch):
    x, w = drawn((*batch, 7, 16), (9, 16))
    label, share = torch.arange(7), torch.tensor(0.25, requires_grad=True)
    logits = (x @ w.mT).flatten(0, -2)
    wanted = F.cross_entropy(logits, label.repeat(max(1, len(x) * len(batch))), reduction="sum") * 0.25
    expected = torch.autograd.grad(wanted * 3, (x, w), retain_graph=True)
    for _ in range(2):
        found = loss.total(x, w, label, 0.25)
        assert found.shape == () and torch.allclose(found, wanted)
        assert_close(torch.autograd.grad(found * 3, (x, w)), expected)
    assert by_address.count("total") == 2 * (not batch)
    found = loss.total(x, w, label, share)
    assert torch.allclose(torch.autograd.grad(found, share)[0], wanted * 4)
    (gx,) = torch.autograd.grad(loss.total(x, w, label, 0.25), x, create_graph=True)
    (again,) = torch.autograd.grad(gx.square().sum(), w)
    (gx,) = torch.autograd.grad(wanted, x, create_graph=True)
    assert_close([again], torch.autograd.grad(gx.square().sum(), w), 1e-4)


def test_a_ready_loss_forgets_nobody(by_address):
    """Ignored rows, wrong labels, a mean: as by torch, in few launches."""
    x, w = drawn((8, 16), (12, 16))
    target = torch.tensor([0, 3, -100, 11, 5, -100, 2, 7])
    wanted = F.cross_entropy(x @ w.T, target)
    expected = torch.autograd.grad(wanted, (x, w))
    for _ in range(2):
        by_address.clear()
        found = ops.cross_entropy(x, w, target)
        assert_close([found, *torch.autograd.grad(found, (x, w))], [wanted, *expected])
    with pytest.raises(mr.LabelError):
        ops.cross_entropy(x, w, target + 100)
    with pytest.raises(mr.ShapeError):
        ops.cross_entropy(x, w, target[:-1])
    with pytest.raises(mr.ArgumentError):
        ops.cross_entropy(x, w, target, reduction="median")


@mr.op
def tempered(x: Row["d"], y: Col["d"], t: float, k: int):
    """Numbers made of numbers: their signs are not those of what they are made of."""
    return mr.logsumexp(x @ y * (t * t - 1) / (2 * t)) * (k - mr.num_cols) + k * t


def tempered_in_torch(x, y, t, k):
    return torch.logsumexp(x @ y.mT * ((t * t - 1) / (2 * t)), -1) * (k - y.shape[-2]) + k * t


def test_numbers_made_of_numbers(by_address):
    args = drawn((7, 12), (9, 12))
    for t, k in ((2.0, 3), (0.5, 3), (2.0, 3), (0.5, 12), (-2.0, 9), (1.0, 3), (2.0, 3)):
        wanted = tempered_in_torch(*args, t, k)
        for _ in range(2):
            by_address.clear()
            found = tempered(*args, t, k)
            assert_close([found, *grads(found, args)], [wanted, *grads(wanted, args, retain_graph=True)], 1e-4)
    assert by_address == [*FORWARD, "side", *BACKWARD], "launches, and nothing else"


def test_a_number_that_is_returned_is_no_launch(by_address):
    @mr.op
    def scaled(x: Row["d"], y: Col["d"], t: float):
        return mr.logsumexp(x @ y), t * t

    (x, y) = drawn((7, 12), (9, 12))
    for t in (2.0, 3.0):
        z, square = scaled(x, y, t)
        assert_close([z, square], [torch.logsumexp(x @ y.mT, -1), torch.full((), t * t)])


@pytest.mark.parametrize("kernel", ["gaussian", "cauchy"])
def test_a_kernel_sum_is_launches(by_address, kernel):
    x, y, b = drawn((7, 3), (9, 3), (9, 2))
    weight = {"gaussian": lambda d, s: torch.exp(-d / (2 * s * s)), "cauchy": lambda d, s: 1 / (1 + d / (s * s))}
    for width in (0.7, 1.5, 0.7):
        by_address.clear()
        found = ops.kernel_sum(x, y, b, kernel=kernel, bandwidth=width)
        wanted = weight[kernel](((x[:, None] - y) ** 2).sum(-1), width) @ b
        assert_close([found, *grads(found, (x, y, b))], [wanted, *grads(wanted, (x, y, b))])
    assert by_address == [*FORWARD, "fold_over_cols", "fold_over_rows"]


def test_memory_that_runs_out(by_address, monkeypatch):
    """A tape that finds no memory leaves the call to the ordinary road, forward and backward."""
    args = heads()
    wanted = by_torch(*args)
    one = grads(y := attention(*args), args, retain_graph=True) and y.grad_fn.kept[0]

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr(one.launches, "run", full)
    y = attention(*args)
    assert_close([y, *grads(y, args)], wanted)
    monkeypatch.undo()
    with mr.use(engine="triton"):
        y = attention(*args)
        for tape in one.backwards.known.values():
            monkeypatch.setattr(tape, "run", full)
        assert_close([y, *grads(y, args)], wanted)


def test_so_many_kinds_are_kept(by_address, monkeypatch):
    monkeypatch.setattr(replay, "MOST", 1)
    args = drawn((2, 6, 16), (2, 9, 16), (2, 9, 5))
    _, *wanted = by_torch(*args)
    for precision in ("ieee", "tf32x3"):
        with mr.use(engine="triton", precision=precision):
            y = attention(*args)
            for stride in (1, 2):
                one = torch.empty(2, 6, 5 * stride)[..., ::stride].copy_(torch.cos(y.detach()))
                assert_close(torch.autograd.grad(y, args, one, retain_graph=True), wanted)


class Launcher:
    """As Triton's own are made."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self):
        self.seen = []
        self.launch = lambda *given: self.seen.append(given)

    def __call__(self, x, y, z, stream, function, *args):
        self.launch(x, y, z, stream, function, False, True, None, None, *args)


def test_what_a_launcher_calls():
    launcher, after = Launcher(), ("function", "metadata", None, None, None)
    start, between = driver._find_c_launcher(launcher, (5, 1, 1), after)
    start(5, 1, 1, "stream", *between, "out", 3)
    launcher(5, 1, 1, "stream", *after, "out", 3)
    assert launcher.seen[0] == launcher.seen[1] and len(launcher.seen) == 2
    launcher.global_scratch_size = 16
    assert driver._find_c_launcher(launcher, (5, 1, 1), after) is None
    assert driver._find_c_launcher(lambda *given: None, (5, 1, 1), after) is None
