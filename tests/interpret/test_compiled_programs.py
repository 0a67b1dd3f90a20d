"""Programs as operators of a compiled graph: the numbers, types and strides of the uncompiled call, bit by bit."""

import functools

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import monoidreduce as mr
from monoidreduce import ops
from monoidreduce.runtime import program_operator

LABELS = torch.tensor([3, 1, -100, 4, 0, 5, 2, 2])


def tensors(*shapes, dtype=torch.float32):
    gen = torch.Generator().manual_seed(3)
    return tuple(torch.randn(s, generator=gen).to(dtype).requires_grad_() for s in shapes)


def split_heads(x, k, v):
    """As models call it."""
    q = x.view(2, -1, 4, 16).transpose(1, 2)
    k, v = (t.view(2, -1, 2, 16).transpose(1, 2) for t in (k, v))
    y = ops.attention(q, k, v, causal=True, enable_gqa=True)
    return y.transpose(1, 2).reshape(2, -1, 64)


def with_sinks(q, k, v, sinks):
    found = ops.attention(q, k, v, sinks=sinks, return_lse=True)
    return found.values * found.lse[..., None]


CALLS = {
    "split heads": (split_heads, ((2, 20, 64), (2, 20, 32), (2, 20, 32)), "program"),
    "sinks": (with_sinks, ((2, 12, 16), (2, 9, 16), (2, 9, 16), (2,)), "program"),
    "head": (lambda x, w: ops.linear_cross_entropy(x, w, LABELS), ((8, 300), (30, 300)), "loss_and_gradient"),
    "head, one weight": (
        lambda x, w: ops.linear_cross_entropy(x.detach(), w, LABELS, reduction="sum") * 0.3,
        ((8, 300), (30, 300)),
        "loss_and_gradient",
    ),
    "log-probabilities": (lambda x, w: ops.linear_logprobs(x, w, LABELS.clamp(0)), ((8, 40), (30, 40)), "program"),
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr("monoidreduce.ops.checks.can_inspect", lambda t: False)  # as on a GPU
    with mr.use(engine="triton"):
        yield


def gradients(f, args, g):
    y = f(*args)
    return y.detach(), *torch.autograd.grad(y, args, g, allow_unused=True)


def watched(met):
    """A backend that runs graphs node by node; ``met``: our operators, and what they are given."""

    class Watch(torch.fx.Interpreter):
        def call_function(self, target, args, kwargs):
            met.extend([(target, args)] if "monoidreduce" in str(target) else [])
            return super().call_function(target, args, kwargs)

    return aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(Watch(graph).run))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CALLS)
def test_a_graph_computes_what_the_call_computes(name):
    f, shapes, operator = CALLS[name]
    args = tensors(*shapes)
    met = []
    compiled = torch.compile(f, fullgraph=True, backend=watched(met))
    g = torch.randn_like(f(*args).detach())
    for found, wanted in zip(gradients(compiled, args, g), gradients(f, args, g), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-7 if name == "sinks" else 0, check_stride=True)
    wanted = ["program", "program_gradient"] if operator == "program" else [operator]
    assert [str(op) for op, _ in met] == [f"monoidreduce.{name}.default" for name in wanted]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["split heads", "head"])
@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_opcheck(name):
    f, shapes, _ = CALLS[name]
    args, met = tensors(*shapes), []
    y = torch.compile(f, fullgraph=True, backend=watched(met))(*args)
    y.backward(torch.ones_like(y))
    for op, given in met:
        assert set(torch.library.opcheck(op, given).values()) == {"SUCCESS"}


def test_lengths_compile_twice_at_most():
    """As torch's own attention does: the first length is fixed, the second leaves it open."""
    counter = CompileCounterWithBackend("aot_eager")

    def layer(x, k, v):
        q, k, v = (t.unflatten(-1, (-1, 16)).transpose(1, 2) for t in (x, k, v))
        return ops.attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)

    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for length in (10, 12, 15):
        args = tensors((1, length, 32), (1, length, 16), (1, length, 16))
        g = torch.ones(1, length, 32)
        for found, wanted in zip(gradients(compiled, args, g), gradients(layer, args, g), strict=True):
            assert torch.equal(found, wanted)
    assert counter.frame_count == 2


@pytest.mark.slow
def test_numbers_of_heads_may_stay_open():
    """Results lie in memory as the queries do, whatever lengths the compiler leaves open."""

    def layer(x, k, v, heads, groups):
        q = x.unflatten(-1, (heads, -1)).transpose(1, 2)
        k, v = (t.unflatten(-1, (groups, -1)).transpose(1, 2) for t in (k, v))
        return ops.attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch, heads in ((2, 4), (3, 6)):
        args = tensors((batch, 12, heads * 16), (batch, 12, 32), (batch, 12, 32))
        counts = {"heads": heads, "groups": 2}
        found, wanted = (
            gradients(functools.partial(f, **counts), args, torch.ones_like(args[0])) for f in (compiled, layer)
        )
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, check_stride=True)


@pytest.mark.slow
def test_a_head_of_other_lengths_is_the_same_graph():
    counter = CompileCounterWithBackend("aot_eager")
    f = lambda x, w, labels: ops.linear_cross_entropy(x, w, labels)
    compiled = torch.compile(f, fullgraph=True, backend=counter)
    for rows in (8, 11, 20):
        x, w = tensors((rows, 300), (30, 300))
        labels = torch.arange(rows) % 30
        pairs = ((x, w), torch.tensor(0.7))
        both = [gradients(functools.partial(call, labels=labels), *pairs) for call in (compiled, f)]
        for found, wanted in zip(*both, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    assert counter.frame_count == 2


def test_gradients_of_rows_are_kept_in_a_graph(monkeypatch):
    """The backward folds for the columns alone: what rows need was saved by the forward."""
    monkeypatch.setattr("monoidreduce.runtime.dispatch.MANY", 16)

    @mr.op
    def potential(x: mr.Row["d"], y: mr.Col["d"]):
        return mr.logsumexp(x @ y)

    args, met = tensors((20, 32), (12, 32)), []
    g = torch.linspace(-1, 1, 20)
    compiled = torch.compile(potential, fullgraph=True, backend=watched(met))
    torch.testing.assert_close(gradients(compiled, args, g), gradients(potential, args, g))
    forward, backward = (op(*given) for op, given in met)
    assert len(forward) > 1 and len(backward) == 1


def test_a_backward_is_known_by_its_forward(monkeypatch):
    """As where a graph comes from a cache on disk, and only its forward was traced here."""
    args, met = tensors((5, 16), (7, 16), (7, 16)), []
    y = torch.compile(ops.attention, fullgraph=True, backend=watched(met))(*args)
    y.sum().backward()
    (_, _), (gradient, given) = met
    monkeypatch.delitem(program_operator._CALLS, given[0])
    for found, a in zip(gradient(*given), args, strict=True):
        torch.testing.assert_close(found, a.grad)
    with pytest.raises(mr.EngineError, match="another process"):
        gradient("unheard of|0|111|1", *given[1:])


def test_transforms_inside_a_graph():
    (q, k, v) = (t.detach() for t in tensors((2, 12, 16), (2, 9, 16), (2, 9, 16)))
    loss = lambda q: ops.attention(q, k[0], v[0]).sin().sum()
    per_sample = torch.vmap(torch.func.grad(loss))
    found = torch.compile(per_sample, fullgraph=True, backend="aot_eager")(q)
    torch.testing.assert_close(found, per_sample(q))


def test_a_selective_checkpoint_saves_the_operator():
    """What is saved is not computed again."""
    args = tensors((2, 12, 16), (2, 9, 16), (2, 9, 16))
    f = lambda q, k, v: ops.attention(q, k, v).sin()
    counts = []
    for policy in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE):
        run = []

        def choose(context, op, *given, policy=policy, run=run, **named):
            ours = op is torch.ops.monoidreduce.program.default
            run += [op] if ours else []
            return policy if ours else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = lambda choose=choose: create_selective_checkpoint_contexts(choose)
        y = checkpoint(f, *args, use_reentrant=False, context_fn=contexts)
        wanted = torch.autograd.grad(f(*args).sum(), args)
        for a, b in zip(torch.autograd.grad(y.sum(), args), wanted, strict=True):
            torch.testing.assert_close(a, b)
        counts.append(len(run))
    assert counts[0] >= 1


def test_gradients_of_gradients_are_traced_step_by_step():
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = (t.detach() for t in tensors((12, 16), (9, 16), (9, 16)))

    def second(q):
        q = q.requires_grad_()
        (first,) = torch.autograd.grad(ops.attention(q, k, v).sin().sum(), q, create_graph=True)
        return torch.autograd.grad(first.square().sum(), q)[0]

    graph = make_fx(second)(q)
    torch.testing.assert_close(graph(q), second(q))
