"""What torch does with ops on a GPU: graphs, streams, compilers, autocast; and no waiting for the device."""

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from benchmarks.measure import captured
from monoidreduce import ops
from tests.support.torch_feature_ops import attention, dense_attention, make

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def tensors(dtype=torch.float32, length=300, width=64):
    shapes = ((2, length, width),) * 3
    return tuple(t.detach().cuda().requires_grad_() for t in make(*shapes, dtype=dtype))


def labels(rows=300, classes=500):
    return torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(0)).cuda()


STEPS = {
    "attention": lambda q, k, v, t: ops.attention(q, k, v, causal=True).square().mean(),
    "window": lambda q, k, v, t: ops.attention(q, k, v, causal=True, window=40).square().mean(),
    "loss": lambda q, k, v, t: ops.linear_cross_entropy(q[0], k.flatten(0, 1)[:500], t),
    "mlp": lambda q, k, v, t: ops.mlp(q, k[0], v[0]).square().mean(),
}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", STEPS)
def test_nothing_waits_for_the_device(name):
    """After a first call, forward and backward make no synchronisation."""
    given, target = tensors(), labels()  # made before: a copy from the host waits
    step = lambda q, k, v: STEPS[name](q, k, v, target)
    torch.autograd.grad(step(*given), given[:2])
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        torch.autograd.grad(step(*given), given[:2])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # warmed up on another stream, as torch asks
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_graphs(name, dtype):
    """Captured once, replayed on new numbers: the same as running anew."""
    given, target = tensors(dtype), labels()
    step = lambda q, k, v: STEPS[name](q, k, v, target)

    def both():
        loss = step(*given)
        return loss, torch.autograd.grad(loss, given[:2])

    graph, (loss, grads) = captured(both)
    for seed in (1, 2):
        fresh = tuple(t.cuda() for t in make(*(t.shape for t in given), dtype=dtype, grad=False, seed=seed))
        with torch.no_grad():
            for t, n in zip(given, fresh, strict=True):
                t.copy_(n)
        graph.replay()
        again = step(*given)
        assert torch.equal(loss, again)
        for g, n in zip(grads, torch.autograd.grad(again, given[:2]), strict=True):
            assert torch.equal(g, n)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # what was captured keeps its own
def test_make_graphed_callables():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(64, 192, device="cuda"))

        def forward(self, x):
            return ops.attention(*(x @ self.w).chunk(3, -1), causal=True)

    layer, x = Layer(), torch.randn(2, 100, 64, device="cuda")
    wanted = layer(x)
    wanted.sum().backward()
    # While any graph of these weights is alive, so is the node that accumulates their gradient, with the stream it was
    # made on: a capture elsewhere cannot join the default one. Nothing but this tensor may hold it.
    wanted = wanted.detach()
    kept, layer.w.grad = layer.w.grad.clone(), None
    graphed = torch.cuda.make_graphed_callables(layer, (x.clone(),))
    found = graphed(x)
    found.sum().backward()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(layer.w.grad, kept)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # the one that torch's own pool of graphs begins with
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compile(mode, dtype):
    """Masked, so that a table of tiles is kept: a graph's pool of memory would not let it stay."""
    given = tensors(dtype)
    compiled = torch.compile(lambda q, k, v: attention(q.tanh(), k, v, 0.1, True).relu(), fullgraph=True, mode=mode)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        found = compiled(*given)
        grads = torch.autograd.grad(found.sum(), given)
    expected = attention(given[0].tanh(), *given[1:], 0.1, True).relu()
    loose = {} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}  # a compiler rounds between its own kernels
    torch.testing.assert_close(found, expected, **loose)
    torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), given), **loose)


def split_heads(x, k, v):
    """As models call it: heads of one projection, grouped queries, the result joined again."""
    q = x.view(1, -1, 8, 128).transpose(1, 2)
    k, v = (t.view(1, -1, 2, 128).transpose(1, 2) for t in (k, v))
    y = ops.attention(q, k, v, causal=True, enable_gqa=True)
    return y.transpose(1, 2).reshape(1, -1, 1024)


def head(x, weight):
    return ops.linear_cross_entropy(x, weight, torch.arange(len(x), device=x.device))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize(
    ("layer", "shapes"),
    [(split_heads, ((1, 1024, 1024), (1, 1024, 256), (1, 1024, 256))), (head, ((1024, 1024), (32000, 1024)))],
    ids=["attention", "head"],
)
def test_a_compiled_call_is_the_call(layer, shapes, mode):
    """Bit by bit, with the same memory: gradients wait until they are scaled, that is all."""
    torch.compiler.reset()
    given = tuple(t.detach().cuda().requires_grad_() for t in make(*shapes, dtype=torch.bfloat16))
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    peaks = []
    for call in (layer, compiled):
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            y = call(*given)
            found = [t.clone() for t in (y.detach(), *torch.autograd.grad(y, given, torch.full_like(y, 0.5)))]
            peak = torch.cuda.max_memory_allocated() - before
        peaks.append(peak)
        wanted = found if call is layer else wanted
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            a, b, rtol=0 if layer is split_heads else 1e-2, atol=0 if layer is split_heads else 1e-5
        )
    room = sum(t.numel() * t.element_size() for t in given)
    assert mode != "default" or peaks[1] <= peaks[0] + room


@pytest.mark.parametrize("name", STEPS)
def test_tracing(name):
    """Dynamo reads the front of every layer whole: what is launched there, on a GPU alone, it would stumble over."""
    given, target = tensors(), labels()
    step = lambda q, k, v: STEPS[name](q, k, v, target)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(*given)
    torch.testing.assert_close(found, step(*given))
    wanted = torch.autograd.grad(step(*given), given[:2])
    torch.testing.assert_close(torch.autograd.grad(found, given[:2]), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    q, k, v = tensors()
    with pytest.raises(mr.DTypeError):
        ops.attention(q, k.to(dtype), v)
    with torch.autocast("cuda", dtype=dtype):
        found, expected = ops.attention(q, k.to(dtype), v), F.scaled_dot_product_attention(q, k, v)
    assert found.dtype == expected.dtype == dtype
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def test_transforms():
    q, k, v = (t.detach()[0, :20, :16] for t in tensors(torch.float64))
    ours, dense = (lambda f: lambda q: f(q, k, v, 0.3).sin().sum())(attention), lambda q: dense_attention(q, k, v, 0.3)
    torch.testing.assert_close(torch.func.grad(ours)(q), torch.func.grad(lambda q: dense(q).sin().sum())(q))
    torch.testing.assert_close(
        torch.func.jvp(ours, (q,), (q,)), torch.func.jvp(lambda q: dense(q).sin().sum(), (q,), (q,))
    )
    batch = torch.stack([q, 2 * q])
    torch.testing.assert_close(
        torch.vmap(torch.func.grad(ours))(batch), torch.vmap(torch.func.grad(lambda q: dense(q).sin().sum()))(batch)
    )


def test_other_streams():
    q, k, v = tensors()
    wanted = attention(q, k, v, 0.1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = attention(q, k, v, 0.1)
        found.sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(found, wanted)


def test_deterministic_algorithms():
    x, w = (t[0] for t in tensors()[:2])
    target = labels(300, 300)
    torch.use_deterministic_algorithms(True)
    try:
        grads = [torch.autograd.grad(ops.cross_entropy(x, w, target), (x, w)) for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for g in grads[1:] for a, b in zip(g, grads[0], strict=True))


def test_a_number_on_the_host_beside_tensors_on_the_device():
    q, k, v = tensors()
    torch.testing.assert_close(attention(q, k, v, torch.tensor(0.1)), attention(q, k, v, 0.1))
