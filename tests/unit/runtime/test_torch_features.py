"""Ops under torch's features: cached plans, threads, copies, autocast, transforms, forward mode, checkpoints, modes."""

import copy
import gc
import pickle
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import monoidreduce as mr
from monoidreduce import Row, ops
from monoidreduce.ops.attention import _attention
from monoidreduce.plan import settings
from monoidreduce.plan.settings import Settings
from tests.support import internals
from tests.support.torch_feature_ops import (
    attention,
    biased,
    both_ways,
    dense_attention,
    dense_several,
    doubled_tanh,
    make,
    noisy,
    own_monoid,
    several,
    together,
)

SHAPES = ((2, 5, 3), (2, 7, 3), (2, 7, 4))


# Plans


def test_a_plan_is_kept_and_values_are_no_part_of_it(monkeypatch):
    q, k, v = make(*SHAPES)
    attention(q, k, v, 0.3)
    count = len(attention._plans)
    calls = []
    monkeypatch.setattr(type(attention), "_prepare", lambda *a: calls.append(a))  # the long way would come to nothing
    for scale in (0.3, -2.0, 17.5):
        for tensors in ((q, k, v), tuple(t.detach() for t in (q, k, v)), make(*SHAPES, seed=5)):
            torch.testing.assert_close(attention(*tensors, scale), dense_attention(*tensors, scale))
    assert not calls and len(attention._plans) == count


def test_a_number_that_the_body_looks_at_has_a_plan_of_its_own():
    q, k, v = make((6, 3), (6, 3), (6, 2))
    for causal in (False, True, False, True):
        torch.testing.assert_close(attention(q, k, v, 0.5, causal), dense_attention(q, k, v, 0.5, causal))
        torch.testing.assert_close(attention(q, k, v, causal=causal, scale=0.5), dense_attention(q, k, v, 0.5, causal))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda q, k, v: (q, k[..., :2], v, 0.3), mr.ShapeError),
        (lambda q, k, v: (q, k, v.float(), 0.3), mr.DTypeError),
        (lambda q, k, v: (q, k, v.to_sparse(), 0.3), mr.DTypeError),
        (lambda q, k, v: (q, k, v.to(torch.complex128), 0.3), mr.DTypeError),
        (lambda q, k, v: (q[:1].expand(3, 5, 3), k, v, 0.3), mr.ShapeError),
        (lambda q, k, v: (q, k, v, "0.3"), mr.ArgumentError),
        (lambda q, k, v: (q, k, v, None), mr.ArgumentError),
        (lambda q, k, v: (q, k, v, q), mr.ShapeError),
        (lambda q, k, v: (q, k, v), mr.ArgumentError),
        (lambda q, k, v: (q, k, v, 0.3, False, 1), mr.ArgumentError),
        (lambda q, k, v: (q, k, None, 0.3), mr.ArgumentError),
        (lambda q, k, v: (q.tolist(), k, v, 0.3), mr.ArgumentError),
        (lambda q, k, v: (q.to("meta"), k, v, 0.3), mr.DeviceError),
    ],
)
def test_a_wrong_call_finds_no_plan(change, error):
    q, k, v = make(*SHAPES, grad=False)
    attention(q, k, v, 0.3)  # its plan is there
    for _ in range(2):
        with pytest.raises(error, match="in attention"):
            attention(*change(q, k, v))


def test_wrong_keywords_find_no_plan():
    q, k, v = make(*SHAPES, grad=False)
    attention(q, k, v, scale=0.3)
    for wrong in ({"scale": 0.3, "k": k}, {"scale": 0.3, "window": 3}, {}):
        with pytest.raises(mr.ArgumentError):
            attention(q, k, v, **wrong)


def test_whole_numbers_are_checked_at_every_call():
    q, k = make((5, 3), (7, 3), grad=False)
    first = noisy(q, k, 3)
    assert torch.equal(noisy(q, k, 3.0), first) and not torch.equal(noisy(q, k, 4), first)
    for wrong in (3.5, 2**70, float("nan"), "3"):
        with pytest.raises(mr.ArgumentError):
            noisy(q, k, wrong)


def test_engines_have_plans_of_their_own():
    q, k, v = make(*SHAPES)
    for engine in ("eager", "reference", "eager"):
        with mr.use(engine=engine):
            torch.testing.assert_close(attention(q, k, v, 0.3), dense_attention(q, k, v, 0.3))


def test_plans_hold_no_tensors():
    q, k, v = make((2, 5, 3), (2, 9, 3), (2, 9, 4))
    attention(q, k, v, 0.3).sum().backward()
    seen = [id(t) for t in (q, k, v)]
    del q, k, v
    gc.collect()
    assert not [o for o in gc.get_objects() if id(o) in seen and isinstance(o, torch.Tensor)]


def test_plans_are_few():
    @mr.op
    def total(x: Row, y: mr.Col):
        return mr.sum(x * y)

    for rows in range(1, 1100):
        total(torch.ones(rows), torch.ones(2))
    assert len(total._plans) <= 1024


def test_eight_threads_on_a_first_call():
    @mr.op
    def fresh(q: Row["f"], k: mr.Col["f"], v: mr.Col["d"], scale: float):
        return mr.softmax_mean(q @ k * scale, v)

    q, k, v = make(*SHAPES)
    expected = dense_attention(q, k, v, 0.3)
    wanted = torch.autograd.grad(expected.sin().sum(), (q, k, v))
    start, failures = threading.Barrier(8), []

    def work():
        try:
            start.wait()
            for _ in range(5):
                mine = tuple(t.detach().clone().requires_grad_() for t in (q, k, v))
                y = fresh(*mine, 0.3)
                torch.testing.assert_close(y, expected)
                torch.testing.assert_close(torch.autograd.grad(y.sin().sum(), mine), wanted)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures[0]


FIRST = """
import sys, torch, monoidreduce as mr
q, k = (torch.randn(2, 3, n, 16, requires_grad=True) for n in (50, 60))
with mr.use(engine="eager"):
    mr.ops.attention(q, k, k).sum().backward()
assert "sympy" not in sys.modules, "it takes a second to import"
"""


def test_a_first_call_imports_nothing_slow():
    subprocess.run([sys.executable, "-c", FIRST], check=True)


def test_the_host_does_little(monkeypatch):
    """A call above its engine: the torch calls that it makes are counted, not timed."""

    class Count(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is not torch.Tensor.shape.__get__ and "__get__" not in str(func):
                calls.append(func)
            return func(*args, **(kwargs or {}))

    q, k, v = make(*SHAPES, dtype=torch.float32)
    shapes = ((2, 5), (2, 5, 4), (2, 5), (2, 5))
    buffers = [torch.zeros(s) for s in shapes]
    internals.replace_eager_engine(monkeypatch, lambda fold, leaves, sizes: [b.clone() for b in buffers])
    with mr.use(engine="eager"), torch.no_grad():
        attention(q, k, v, 0.3)
        calls: list = []
        with Count():
            attention(q, k, v, 0.3)
    assert [c for c in calls if c is not torch.Tensor.clone] == [], calls


# Copies


def test_ops_are_copied_and_pickled_as_functions_are():
    for one in (attention, _attention):
        assert copy.deepcopy(one) is one and copy.copy(one) is one and pickle.loads(pickle.dumps(one)) is one

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.op, self.w = attention, torch.nn.Parameter(torch.randn(7, 3))

        def forward(self, x):
            return self.op(x, self.w, self.w, 0.3)

    layer = Layer()
    twin = copy.deepcopy(layer)
    x = torch.randn(5, 3)
    assert torch.equal(twin(x), layer(x)) and twin.w is not layer.w


# Automatic mixed precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_torch_does(dtype):
    q, k, v = make(*SHAPES, dtype=torch.float32)
    k16 = k.detach().to(dtype).requires_grad_()
    with pytest.raises(mr.DTypeError, match="mix"):
        ops.attention(q, k16, v)
    with torch.autocast("cpu", dtype=dtype):
        y = ops.attention(q, k16, v)
        expected = F.scaled_dot_product_attention(q, k16, v)
    assert y.dtype == expected.dtype == dtype
    torch.testing.assert_close(y, expected, atol=2e-2, rtol=2e-2)
    y.float().sum().backward()
    assert q.grad.dtype == v.grad.dtype == torch.float32 and k16.grad.dtype == dtype
    assert torch.equal(y, ops.attention(q.to(dtype), k16, v.to(dtype))), "the same as casting by hand"


def test_autocast_and_the_loss():
    x, w = make((6, 4), (9, 4), dtype=torch.float32)
    target = torch.arange(6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = ops.linear_cross_entropy(x, w.to(torch.bfloat16), target)
        loss.backward()  # inside the region: arithmetic stays ours
    assert loss.dtype == torch.float32 and x.grad.dtype == torch.float32
    y = x.detach().bfloat16().requires_grad_()
    outside = ops.linear_cross_entropy(y, w.to(torch.bfloat16), target)
    outside.backward()
    assert torch.equal(loss, outside) and torch.equal(x.grad, y.grad.float())


def test_autocast_casts_the_bias_behind_a_perceptron_too():
    x = torch.randn(5, 4, requires_grad=True)
    layers = [mr.nn.MLP(4, 8), mr.nn.GatedMLP(4, 8, bias=True)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [m(x).dtype for m in layers] == [torch.nn.Linear(4, 4)(x).dtype] * 2


def test_autocast_leaves_float64_alone():
    q, k, v = make(*SHAPES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(attention(q, k, v, 0.3), dense_attention(q.detach(), k, v, 0.3))
        with pytest.raises(mr.DTypeError, match="mix"):
            attention(q, k.float(), v, 0.3)


# torch.func


FUNCTIONS = {
    "attention": (lambda *t: attention(*t, 0.3), lambda *t: dense_attention(*t, 0.3), ((3, 2), (4, 2), (4, 2))),
    "causal": (
        lambda *t: attention(*t, 0.3, True),
        lambda *t: dense_attention(*t, 0.3, True),
        ((4, 2), (4, 2), (4, 2)),
    ),
    "several": (
        lambda *t: together(several(*t, doubled_tanh)),
        lambda *t: together(dense_several(*t, doubled_tanh)),
        ((3, 2), (4, 2)),
    ),
    "both ways": (
        lambda x, y: both_ways(x, y, 0.5)[0].sum() + both_ways(x, y, 0.5)[1].cos(),
        lambda x, y: (x @ y.mT / 0.5).logsumexp(-1).sum() + (x @ y.mT / 0.5).logsumexp(-2).cos(),
        ((3, 2), (4, 2)),
    ),
    "own monoid": (
        lambda *t: own_monoid(*t).v + own_monoid(*t).z[..., None],
        lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v + (q @ k.mT).logsumexp(-1)[..., None],
        ((3, 2), (4, 2), (4, 2)),
    ),
    "given per pair": (
        biased,
        lambda q, k, v, b: torch.softmax(q @ k.mT + b, -1) @ v,
        ((3, 2), (4, 2), (4, 2), (3, 4)),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_transforms(name):
    ours, dense, shapes = FUNCTIONS[name]
    args = make(*shapes, grad=False)
    tangents = make(*shapes, grad=False, seed=1)
    every = tuple(range(len(args)))

    def same(transform):
        torch.testing.assert_close(transform(ours), transform(dense))

    same(lambda f: torch.func.grad(lambda *a: f(*a).sin().sum(), argnums=every)(*args))
    same(lambda f: torch.func.vjp(f, *args)[1](torch.ones_like(dense(*args))))
    same(lambda f: torch.func.jvp(f, args, tangents))
    same(lambda f: torch.func.jacrev(f)(*args))
    same(lambda f: torch.func.jacfwd(f)(*args))
    loss = lambda f: lambda *a: f(*a).sin().sum()
    same(lambda f: torch.func.hessian(loss(f))(*args))
    same(lambda f: torch.func.jacrev(torch.func.jacrev(loss(f)))(*args))
    if name == "attention":
        same(lambda f: torch.func.jacfwd(torch.func.jacfwd(loss(f)))(*args))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap(name):
    ours, dense, shapes = FUNCTIONS[name]
    one, many = make(*shapes, grad=False), make(*((3, *s) for s in shapes), grad=False, seed=1)
    for dims in ((0,) * len(shapes), (0, *(None,) * (len(shapes) - 1)), (*(None,) * (len(shapes) - 1), 0)):
        args = [m if d == 0 else o for m, o, d in zip(many, one, dims, strict=True)]
        torch.testing.assert_close(torch.vmap(ours, dims)(*args), torch.vmap(dense, dims)(*args))
        per_sample = [
            torch.vmap(torch.func.grad(lambda *a, f=f: f(*a).sin().sum(), argnums=tuple(range(len(shapes)))), dims)(
                *args
            )
            for f in (ours, dense)
        ]
        torch.testing.assert_close(*per_sample)
    moved = [m.movedim(0, -1) for m in many]
    torch.testing.assert_close(torch.vmap(ours, -1)(*moved), torch.vmap(dense)(*many))
    twice = torch.vmap(torch.vmap(ours), 1)(*(m[:, None].expand(3, 2, *m.shape[1:]) for m in many))
    torch.testing.assert_close(twice[0], torch.vmap(dense)(*many))


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_vmap_and_randomness(randomness):
    """Draws are a function of the seed and the pair, so a mapped op draws as each call of its own would."""
    q, k = make((3, 5, 2), (7, 2), grad=False)
    seeds = torch.tensor([1, 2, 1])
    found = torch.vmap(lambda x, s: noisy(x, k, s), randomness=randomness)(q, seeds)
    assert torch.equal(found, torch.stack([noisy(x, k, s) for x, s in zip(q, seeds, strict=True)]))


def test_forward_mode_outside_functorch():
    q, k, v = make((3, 2), (4, 2), (4, 2), grad=False)
    t = torch.ones_like(q)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(attention(forward_ad.make_dual(q, t), k, v, 0.3)).tangent
    expected = torch.func.jvp(lambda x: dense_attention(x, k, v, 0.3), (q,), (t,))[1]
    torch.testing.assert_close(found, expected)
    one = lambda q, k, v: attention(q, k, v, 0.3)
    args = make((3, 2), (4, 2), (4, 2))
    assert torch.autograd.gradcheck(one, args, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(one, args, check_fwd_over_rev=True)


def test_the_older_vmap_is_refused():
    q, k, v = make((3, 2), (4, 2), (4, 2))
    with pytest.raises(mr.NoGradientError, match=r"torch\.func\.jacrev"):
        torch.autograd.grad(attention(q, k, v, 0.3), q, torch.ones(6, 3, 2, dtype=torch.float64), is_grads_batched=True)


def test_transforms_of_losses():
    x, w = make((6, 4), (9, 4), grad=False)
    target = torch.arange(6)
    ours, theirs = ops.cross_entropy, lambda x, w, t: F.cross_entropy(x @ w.mT, t)
    for f in (torch.func.grad, torch.func.hessian):
        torch.testing.assert_close(f(ours)(x, w, target), f(theirs)(x, w, target))
    per_sample = [
        torch.vmap(torch.func.grad(f, 1), (0, None, 0))(x[:, None], w, target[:, None]) for f in (ours, theirs)
    ]
    torch.testing.assert_close(*per_sample)


# Checkpoints, modes, second derivatives


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint(use_reentrant):
    q, k, v = make(*SHAPES)

    def block(q, k, v):
        return attention(attention(q, k, v[..., :3], 0.3), k, v, 0.5, True)

    wanted = torch.autograd.grad(block(q, k, v).sin().sum(), (q, k, v))
    checkpoint(block, q, k, v, use_reentrant=use_reentrant).sin().sum().backward()
    for t, g in zip((q, k, v), wanted, strict=True):
        torch.testing.assert_close(t.grad, g)


def test_double_backward_through_a_plan():
    q, k, v = make((3, 2), (4, 2), (4, 2))

    def mixed(f):
        (g,) = torch.autograd.grad(f(q, k, v, 0.3).sin().sum(), q, create_graph=True)
        return torch.autograd.grad(g.cos().sum(), (k, v))

    for _ in range(2):
        torch.testing.assert_close(mixed(attention), mixed(dense_attention))


def test_no_grad_and_inference_mode():
    q, k, v = make(*SHAPES)
    wanted = dense_attention(q, k, v, 0.3).detach()
    with torch.no_grad():
        assert not attention(q, k, v, 0.3).requires_grad
    with torch.inference_mode():
        y = attention(q, k, v, 0.3)
        assert y.is_inference()
        torch.testing.assert_close(y, wanted)
        inside = attention(q.clone(), k.clone(), v.clone(), 0.3)
    torch.testing.assert_close(inside, wanted)
    y = attention(q, k, v, 0.3)
    torch.testing.assert_close(
        torch.autograd.grad(y.sum(), q), torch.autograd.grad(dense_attention(q, k, v, 0.3).sum(), q)
    )


def test_deterministic_algorithms():
    x, w = make((40, 4), (9, 4), dtype=torch.float32)
    target = torch.randint(0, 9, (40,), generator=torch.Generator().manual_seed(0))
    torch.use_deterministic_algorithms(True)
    try:
        grads = [torch.autograd.grad(ops.cross_entropy(x, w, target), (x, w)) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for g in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(g, grads[0], strict=True))


def test_hooks_and_retained_graphs():
    q, k, v = make(*SHAPES)
    y = attention(q, k, v, 0.3)
    y.register_hook(lambda g: g * 2)
    first = torch.autograd.grad(y.sum(), q, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(y.sum(), q)[0], first)
    torch.testing.assert_close(first, 2 * torch.autograd.grad(dense_attention(q, k, v, 0.3).sum(), q)[0])
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        attention(q, k, v, 0.3).sum().backward()
    assert packed and max(t.numel() for t in packed) <= q.numel() + k.numel()


def test_what_an_inner_use_does_not_say_stays():
    with mr.use(engine="reference", limit=None, precision="tf32", strict=True, tune=True):
        with mr.use(engine="eager"):
            assert settings.current.get() == Settings("eager", None, "tf32", True, True)
        with mr.use(precision="ieee", strict=False):
            assert settings.current.get() == Settings("reference", None, "ieee", False, True)
    assert settings.current.get() == Settings()
