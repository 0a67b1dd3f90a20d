"""Activation checkpointing of calls that were never made before: shapes, and often ops, are new in every case.

A checkpoint compares what its recomputation saves with what the forward saved. So the first call of a kind, which is
planned, the second, which is written down, and all later ones must save the same.
"""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import monoidreduce as mr
from monoidreduce import Col, Row, nn, ops
from tests.support.comparison import is_float
from tests.support.ready_made_layers import READY

FRESH = itertools.count(71)  # lengths that no other call has
ENGINES = ["auto", "eager", "reference"]


def fresh_attention():
    @mr.op
    def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
        return mr.softmax_mean(q @ k * 0.3, v)

    return attention


def dense_attention(q, k, v):
    return torch.softmax(q @ k.mT * 0.3, -1) @ v


def qkv():
    rows, cols = next(FRESH), next(FRESH)
    return [torch.randn(2, n, 8, dtype=torch.float64, requires_grad=True) for n in (rows, cols, cols)]


def asking(args):
    return [t.clone().requires_grad_() if is_float(t) else t for t in args]


def backward(call, args):
    """The gradients of a number that depends on all results."""
    for t in args:
        if is_float(t):
            t.grad = None
    results = [y for y in tree_leaves(call(*args)) if isinstance(y, torch.Tensor) and y.requires_grad]
    sum(y.sin().nan_to_num(0.0, 0.0, 0.0).sum() for y in results).backward()
    return [t.grad for t in args if is_float(t)]


def assert_same(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=1e-7, atol=1e-9)


def saved_by(call, args):
    """The kinds of the tensors that a call saves for its backward."""
    found = []

    def pack(t):
        found.append((tuple(t.shape), t.dtype, t.device))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call(*args)
    return found


def policy(*saves):
    """Selective checkpointing that saves the results of these operators."""

    def decide(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in saves else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, decide)


def products():
    return policy(torch.ops.aten.mm.default, torch.ops.aten.bmm.default)


def folds():
    return policy(torch.ops.monoidreduce.fold.default)


def nested(call, *args):
    inner = lambda *given: checkpoint(call, *given, use_reentrant=False)
    return checkpoint(inner, *args, use_reentrant=False)


def offloaded(call, *args):
    with torch.autograd.graph.save_on_cpu():
        return call(*args)


WAYS = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "non-reentrant": functools.partial(checkpoint, use_reentrant=False, determinism_check="default"),
    "debug": functools.partial(checkpoint, use_reentrant=False, debug=True),
    "nested": nested,
    "save_on_cpu": offloaded,
    "selective products": lambda call, *args: checkpoint(call, *args, use_reentrant=False, context_fn=products()),
    "selective folds": lambda call, *args: checkpoint(call, *args, use_reentrant=False, context_fn=folds()),
    "selective none": lambda call, *args: checkpoint(call, *args, use_reentrant=False, context_fn=policy()),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", WAYS)
def test_the_first_call_of_an_op(way, engine):
    for call in (fresh_attention(), functools.partial(ops.attention, scale=0.3)):
        args = qkv()
        with mr.use(engine=engine):
            found = backward(functools.partial(WAYS[way], call), args)
        assert_same(found, backward(dense_attention, args))


@pytest.mark.parametrize("engine", ["auto", "eager"])
def test_two_calls_of_a_kind_in_one_block(engine):
    """The second is watched in the forward, and both are in the recomputation."""
    call, args = fresh_attention(), qkv()

    def block(f, q, k, v):
        return f(f(f(q, k, v), k, v), k, v)

    with mr.use(engine=engine):
        for way in (True, False):
            found = backward(lambda *given, way=way: checkpoint(block, call, *given, use_reentrant=way), args)
            assert_same(found, backward(functools.partial(block, dense_attention), args))


def _sampled(ready):
    sample = dict(ready.samples()[len(ready.factors) % 5])
    rows = next(FRESH)
    args, options = ready.make(sample | {"size": (rows, rows + 4)}, 5)
    return functools.partial(ready.ours, **options), list(args)


def _heads(features=6):
    """Activations, weights, and those of a teacher."""
    rows, cols = next(FRESH), next(FRESH)
    make = lambda n: torch.randn(n, features, dtype=torch.float64)
    return make(rows), make(cols), make(rows), make(cols)


def _labelled(layer, **options):
    def make():
        x, w, *_ = _heads()
        return functools.partial(layer, **options), [x, w, torch.randint(len(w), (len(x),))]

    return make


def _given():
    x, w, *_ = _heads()
    return ops.cross_entropy_given, [x, w, torch.rand(len(x), len(w), dtype=x.dtype)]


def _decode():
    n = next(FRESH)
    q, k, v = (torch.randn(2, 2, m, 8, dtype=torch.float64) for m in (1, n, n))
    return ops.attention_decode, [q, k, v, torch.tensor([n, n - 3])]


CASES = {
    **{ready.name: functools.partial(_sampled, ready) for ready in READY},
    "cross_entropy": _labelled(ops.cross_entropy, label_smoothing=0.1, reduction="none"),
    "linear_cross_entropy": _labelled(ops.linear_cross_entropy, z_loss=0.1, return_lse=True, return_accuracy=True),
    "linear_logprobs": _labelled(ops.linear_logprobs, return_entropy=True, top_k=3),
    "linear_kl": lambda: (ops.linear_kl, [*_heads()]),
    "linear_jsd": lambda: (functools.partial(ops.linear_jsd, temperature=2.0), [*_heads()]),
    "linear_cross_entropy_soft": lambda: (ops.linear_cross_entropy_soft, [*_heads()]),
    "cross_entropy_distributions": lambda: (ops.cross_entropy_distributions, [*_heads()]),
    "cross_entropy_given": _given,
    "linear_entropy": lambda: (functools.partial(ops.linear_entropy, softcap=3.0), [*_heads()[:2]]),
    "linear_topk": lambda: (functools.partial(ops.linear_topk, k=3), [*_heads()[:2]]),
    "max_pool_product": lambda: (ops.max_pool_product, [*_heads()[:2]]),
    "sinkhorn": lambda: (functools.partial(ops.sinkhorn, eps=0.5, iterations=3), [*_heads()[:2]]),
    "attention_decode": _decode,
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("engine", ["auto", "eager"])
@pytest.mark.parametrize("case", CASES)
def test_calls_of_a_layer_save_the_same(case, engine):
    call, args = CASES[case]()
    args = asking(args)
    with mr.use(engine=engine):
        first, *others = [saved_by(call, args) for _ in range(4)]
    assert all(other == first for other in others)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CASES)
def test_the_first_call_of_a_layer(case):
    call, args = CASES[case]()
    args = asking(args)
    with mr.use(engine="auto"):
        found = backward(lambda *given: checkpoint(call, *given, use_reentrant=False), args)
        assert_same(found, backward(call, args))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_losses_whose_gradient_is_taken_in_the_forward(reduction, use_reentrant):
    rows, cols = next(FRESH), 300 + next(FRESH)
    x, w = (torch.randn(n, 520, dtype=torch.float64).div_(23).requires_grad_() for n in (rows, cols))
    target = torch.randint(cols, (rows,))
    ours = lambda x, w: ops.linear_cross_entropy(x, w, target, reduction=reduction)
    with mr.use(engine="auto"):
        found = backward(lambda *given: checkpoint(ours, *given, use_reentrant=use_reentrant), [x, w])
    assert_same(found, backward(lambda x, w: F.cross_entropy(x @ w.mT, target, reduction=reduction), [x, w]))


def test_sums_of_an_op():
    @mr.op
    def loss(x: Row["d"], w: Col["d"]):
        return mr.logsumexp(x @ w)

    for features in (8, 520):
        x, w = (torch.randn(next(FRESH), features, dtype=torch.float64, requires_grad=True) for _ in range(2))
        with mr.use(engine="auto"):
            found = backward(lambda *given: checkpoint(loss.total, *given, use_reentrant=False), [x, w])
        assert_same(found, backward(lambda x, w: torch.logsumexp(x @ w.mT, -1).sum(), [x, w]))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_modules(use_reentrant):
    attend, gated = nn.MultiheadAttention(16, 2).double(), nn.GatedMLP(16, 24).double()
    block = lambda x: gated(attend(x, x, x)[0])
    x = torch.randn(2, next(FRESH), 16, dtype=torch.float64, requires_grad=True)
    with mr.use(engine="auto"):
        found = backward(lambda x: checkpoint(block, x, use_reentrant=use_reentrant), [x])
        assert_same(found, backward(block, [x]))


def test_draws_are_repeated():
    """A seed that is drawn from torch's generator is drawn again where the checkpoint restores its state."""
    q, k, v = qkv()
    drop = functools.partial(ops.attention, scale=0.3, dropout_p=0.4)
    with mr.use(engine="auto"):
        torch.manual_seed(3)
        again = functools.partial(checkpoint, drop, use_reentrant=False, preserve_rng_state=True)
        found = backward(again, [q, k, v])
        torch.manual_seed(3)
        assert_same(found, backward(drop, [q, k, v]))


def test_a_new_length_in_every_step():
    """As a training run: each batch has its own length, and every layer of the model is a checkpoint."""
    weights = [torch.randn(8, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    with mr.use(engine="auto"):
        for _ in range(4):
            x = torch.randn(1, next(FRESH), 8, dtype=torch.float64)

            def model(attend, *weights, x=x, through=lambda f, *a: f(*a)):
                for w in weights:
                    x = x + through(lambda x, w: attend(x @ w, x, x), x, w)
                return x

            inside = functools.partial(checkpoint, use_reentrant=False)
            ours = functools.partial(ops.attention, scale=0.3)
            found = backward(functools.partial(model, ours, through=inside), weights)
            assert_same(found, backward(functools.partial(model, dense_attention), weights))
