"""Ops under torch's compilers and tracers: one graph, right values and gradients, few compilations."""

import io

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import monoidreduce as mr
from monoidreduce import ops
from monoidreduce.engines.common.evaluate import Sizes
from monoidreduce.runtime import torch_operator
from tests.support.torch_feature_ops import (
    attention,
    biased,
    both_ways,
    dense_attention,
    doubled_tanh,
    make,
    noisy,
    own_monoid,
    several,
    together,
)

pytestmark = pytest.mark.filterwarnings("ignore:Attempted to insert:UserWarning")  # export of a module with weights

LABELS = torch.tensor([3, 1, -100, 4, 0])
CALLS = {
    "attention": (lambda q, k, v: attention(q * 2, k, v, 0.3).relu(), ((2, 5, 3), (2, 7, 3), (2, 7, 4))),
    "by keyword": (lambda q, k, v: attention(q, k, scale=0.3, v=v, causal=True), ((5, 3), (7, 3), (7, 4))),
    "two in a row": (
        lambda q, k, v: attention(attention(q, k, v, 0.3), k, v, 0.1, True),
        ((2, 5, 3), (2, 7, 3), (2, 7, 3)),
    ),
    "a choice": (lambda q, k: together(several(q, k, doubled_tanh)), ((5, 3), (7, 3))),
    "a choice of torch's": (lambda q, k: together(several(q, k, activation=torch.sin)), ((5, 3), (7, 3))),
    "a tuple": (lambda x, y: both_ways(x, y, 0.5)[0].sum() * both_ways(x, y, 0.5)[1], ((5, 3), (7, 3))),
    "own monoid": (
        lambda q, k, v: own_monoid(q, k, v).v * own_monoid(q, k, v).z[..., None],
        ((5, 3), (7, 3), (7, 4)),
    ),
    "given per pair": (biased, ((5, 3), (7, 3), (7, 4), (5, 7))),
    "random": (lambda q, k: noisy(q, k, 7), ((5, 3), (7, 3))),
    "ops.attention": (
        lambda q, k, v: ops.attention(q, k, v, causal=True, window=3, softcap=2.0),
        ((2, 5, 3), (2, 7, 3), (2, 7, 4)),
    ),
    "ops.linear_cross_entropy": (
        lambda x, w: ops.linear_cross_entropy(x, w, LABELS, label_smoothing=0.1),
        ((5, 3), (7, 3)),
    ),
    "ops.mlp": (lambda x, p, q: ops.mlp(x, p, q, activation="gelu"), ((2, 5, 3), (7, 3), (7, 4))),
    "ops.contrastive_loss": (lambda x, y: ops.contrastive_loss(x, y, normalize=True), ((5, 3), (5, 3))),
    "ops.sample": (lambda x, w: ops.sample(x, w, 7).log_prob, ((5, 3), (7, 3))),
}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def compare(f, compiled, args):
    """Values and gradients of both."""
    expected, found = f(*args), compiled(*args)
    torch.testing.assert_close(found, expected)
    given = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    torch.testing.assert_close(
        torch.autograd.grad(found.sin().sum(), given), torch.autograd.grad(expected.sin().sum(), given)
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CALLS)
def test_fullgraph(name):
    f, shapes = CALLS[name]
    compare(f, torch.compile(f, fullgraph=True, backend="aot_eager"), make(*shapes))


def test_inductor():
    f, shapes = CALLS["two in a row"]
    compare(f, torch.compile(f, fullgraph=True), make(*shapes, dtype=torch.float32))


def test_lengths_and_numbers_compile_twice_at_most():
    """The first call fixes them, the second leaves them open."""
    counter = CompileCounterWithBackend("aot_eager")

    def f(q, k, v, scale, keep):
        return attention(q[:, :keep], k, v, scale, True)

    compiled = torch.compile(f, fullgraph=True, backend=counter)
    for length in (16, 17, 19, 33, 40, 51):
        q, k, v = make((2, length, 3), (2, length + 2, 3), (2, length + 2, 4))
        compare(f, compiled, (q, k, v, 0.01 * length, length - 2))
    assert counter.frame_count <= 2


def test_marked_dynamic_compiles_once():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, 0.3), fullgraph=True, backend=counter)
    for length in (16, 17, 59, 111):
        q, k, v = make((length, 3), (length + 3, 3), (length + 3, 4))
        for t in (q, k, v):
            torch._dynamo.mark_dynamic(t, 0)
        torch.testing.assert_close(compiled(q, k, v), dense_attention(q, k, v, 0.3))
    assert counter.frame_count == 1


def test_a_number_that_the_body_looks_at_is_guarded():
    @mr.op
    def best(x: mr.Row["d"], y: mr.Col["d"], k: int):
        return mr.topk(x @ y, k).values

    x, y = make((5, 3), (9, 3))
    compiled = torch.compile(lambda x, y, k: best(x, y, k), fullgraph=True, backend="aot_eager")
    for k in (2, 3, 4):
        torch.testing.assert_close(compiled(x, y, k), (x @ y.mT).topk(k).values)


def test_a_module_trains_compiled():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(9, 4)
            self.mix = torch.nn.Linear(4, 4)

        def forward(self, tokens):
            x = self.mix(self.table(tokens))
            return ops.linear_cross_entropy(ops.attention(x, x, x, causal=True), self.table.weight, tokens, shift=1)

    tokens = torch.randint(0, 9, (2, 6), generator=torch.Generator().manual_seed(0))
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = Net().double()
        step = torch.compile(net, fullgraph=True, backend="aot_eager") if compiled else net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        losses.append([])
        for _ in range(4):
            loss = step(tokens)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-9) and losses[0][-1] < losses[0][0]


def test_a_wrong_call_says_so():
    q, k, v = make((5, 3), (7, 2), (7, 4))
    with pytest.raises(Exception, match=r'q has 3 features "f", but k has 2'):
        torch.compile(lambda q, k, v: attention(q, k, v, 0.3), fullgraph=True, backend="aot_eager")(q, k, v)


def test_autocast_inside():
    q, k, v = make((5, 3), (7, 3), (7, 4), dtype=torch.float32)

    def f(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attention(q, k, v, 0.3)

    found = torch.compile(f, fullgraph=True, backend="aot_eager")(q, k, v)
    assert found.dtype == torch.bfloat16 and torch.equal(found, f(q, k, v))


# Without dynamo


def arguments(op, *args):
    """The registered operator's arguments for a call."""
    program = op.program(*args)
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    found = []

    def spy(*given):
        found.append(given)
        return original(*given)

    original, library_op = torch.ops.monoidreduce.fold, torch_operator.torch.ops.monoidreduce
    spy.default = original.default  # which torch looks up where this is the first call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library_op, "fold", spy)
        with FakeTensorMode(allow_non_fake_inputs=True):
            op(*args)
    assert len(program.passes) == len(found) and tensors
    return found


@pytest.mark.parametrize(
    ("op", "shapes", "rest"),
    [(attention, ((2, 5, 3), (2, 7, 3), (2, 7, 4)), (0.3, True)), (both_ways, ((5, 3), (7, 3)), (0.5,))],
    ids=["attention", "both ways"],
)
@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch 2.14 reads it itself
def test_opcheck(op, shapes, rest):
    for given in arguments(op, *make(*shapes, dtype=torch.float32), *rest):
        checked = torch.library.opcheck(torch.ops.monoidreduce.fold.default, given)
        assert set(checked.values()) == {"SUCCESS"} and len(checked) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors(name, dtype):
    f, shapes = CALLS[name]
    args = make(*shapes, dtype=dtype)
    real = f(*args)
    real.float().sum().backward()
    bare = [a.detach() for a in args]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a).requires_grad_() for a in bare]
        labels = mode.from_tensor(LABELS)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "LABELS", labels)
            found = f(*fakes)
        found.float().sum().backward()
    assert (found.shape, found.dtype, found.stride()) == (real.shape, real.dtype, real.stride())
    for a, b in zip(args, fakes, strict=True):
        assert (a.grad.shape, a.grad.dtype) == (b.grad.shape, b.grad.dtype)


@pytest.mark.filterwarnings("ignore:.*buffer is not writable:UserWarning")  # of torch.export.load, in torch 2.12
@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(7, 3))

        def forward(self, x):
            return attention(x, self.w, self.w, 0.3)

    net = Net()
    cached = not torch.__version__.startswith(("2.8.", "2.9."))  # whose cache takes no views of dynamic sizes
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=cached):
        program = torch.export.export(
            net, (torch.randn(5, 3),), dynamic_shapes={"x": {0: torch.export.Dim.DYNAMIC}}, strict=strict
        )
    for length in (1, 5, 59):
        x = torch.randn(length, 3)
        torch.testing.assert_close(program.module()(x), net(x))
    assert any(n.target is torch.ops.monoidreduce.fold.default for n in program.graph.nodes)
    kept = io.BytesIO()
    torch.export.save(program, kept)
    kept.seek(0)
    torch.testing.assert_close(torch.export.load(kept).module()(x), net(x))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")  # torch 2.15
def test_torchscript_is_refused():
    with pytest.raises(mr.EngineError, match=r"attention is called under torch.jit.trace.*torch.export"):
        torch.jit.trace(lambda x: attention(x, x, x, 0.3), torch.randn(5, 3))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode):
    q, k, v = make((5, 3), (7, 3), (7, 4), grad=False)

    def f(q, k, v):
        y, pull = torch.func.vjp(lambda x: attention(x, k, v, 0.3), q)
        return y, *pull(y)

    graph = make_fx(f, tracing_mode=mode)(q, k, v)
    torch.testing.assert_close(graph(q, k, v), f(q, k, v))
    assert sum(n.target is torch.ops.monoidreduce.fold.default for n in graph.graph.nodes) == 2


def test_a_fold_of_another_process_is_refused_by_name():
    sizes = Sizes(5, 7, (), {"f": 3}, torch.device("cpu"), torch.float32)
    with pytest.raises(mr.EngineError, match="another process"):
        torch.ops.monoidreduce.fold("unheard of", "eager", [], [], [], 5, 7, [], "f", [3], sizes.compute, sizes.device)


def test_names_of_folds_are_their_text():
    q, k, v = make((5, 3), (7, 3), (7, 4))

    @mr.op
    def again(a: mr.Row["f"], b: mr.Col["f"], c: mr.Col["d"], s: float, causal: bool = False):
        return mr.softmax_mean(a @ b * s, c)

    one, two, three = (
        torch_operator.name_fold(p.passes[0].fold)
        for p in (attention.program(q, k, v, 0.3), again.program(q, k, v, 0.3), own_monoid.program(q, k, v))
    )
    assert one == two != three
