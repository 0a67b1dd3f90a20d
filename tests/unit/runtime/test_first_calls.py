"""First calls in every situation that torch knows: each is what plain torch computes, whatever was called before.

Kinds of calls follow each other in random orders, on shapes and often ops that are new; what the first of them left in
caches is what the next one finds.
"""

import copy
import itertools
import pickle
import random
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import monoidreduce as mr
from monoidreduce import Col, Row, nn, ops
from monoidreduce.runtime import dispatch
from tests.support.comparison import flatten, is_float
from tests.support.layers import DIFFERENTIABLE

FRESH = itertools.count(61)  # lengths that no other call has
FLOAT64 = torch.float64


def fresh_op():
    @mr.op
    def both(q: Row["f"], k: Col["f"], v: Col["d"]):
        s = q @ k * 0.4
        return mr.softmax_mean(s, v), mr.logsumexp(s)

    return both


def dense_form(q, k, v):
    s = q @ k.mT * 0.4
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


def _dense_entropy(x, w, *_):
    p = torch.log_softmax(x @ w.mT, -1)
    return (-(p.exp() * p).sum(-1),)


def labels(x, w):
    return torch.arange(len(x), device=x.device) % len(w)


LAYERS = [
    (lambda: fresh_op(), dense_form),
    (
        lambda: lambda q, k, v: (ops.attention(q, k, v, scale=0.4),),
        lambda q, k, v: (F.scaled_dot_product_attention(q, k, v, scale=0.4),),
    ),
    (lambda: lambda x, w, _: (ops.linear_entropy(x, w),), _dense_entropy),
    (
        lambda: lambda x, p, q: (ops.mlp(x, p, q, activation="tanh"),),
        lambda x, p, q: (torch.tanh(x @ p.mT) @ q,),
    ),
    (
        lambda: lambda x, w, _: (ops.linear_cross_entropy(x, w, labels(x, w)),),
        lambda x, w, _: (F.cross_entropy(x @ w.mT, labels(x, w)),),
    ),
]


def drawn(features):
    rows, cols = next(FRESH), next(FRESH)
    make = lambda n: torch.randn(n, features, dtype=FLOAT64) / features**0.5
    return [make(rows), make(cols), make(cols)]


def loss_of(results):
    return sum(y.to(FLOAT64).sin().sum() for y in results)


def gradients(f, args, change=False):
    """The results, and the gradients of all arguments that have one."""
    args = [t.clone().requires_grad_() for t in args]
    results = f(*args)
    shown = [y.detach().clone() for y in results]
    for y in results if change else ():
        y *= 2
    loss = loss_of([y / 2 for y in results] if change else results)
    return [*shown, *(g for g in torch.autograd.grad(loss, args, allow_unused=True) if g is not None)]


def in_threads(f, args):
    found, engine = [], dispatch.engine()

    def run():
        with mr.use(engine=engine):
            found.append(gradients(f, args))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 3
    return found[0]


def without(off):
    def run(f, args):
        with off():
            before = [y.clone() for y in f(*args)]
        found = gradients(f, args)
        torch.testing.assert_close(before, found[: len(before)])
        return found

    return run


def checkpointed(f, args):
    return gradients(lambda *given: checkpoint(f, *given, use_reentrant=False), args)


def transformed(f, args):
    """By torch.func; of all arguments, zeros where there is no gradient."""
    found = torch.func.grad(lambda *given: loss_of(f(*given)), (0, 1))(*args)
    return [*f(*args), *found]


def mapped(f, args):
    one = torch.func.grad(lambda *given: loss_of(f(*given)), (0, 1))
    found = torch.vmap(one)(*(torch.stack([t, -t]) for t in args))
    return [*f(*args), *(g[0] for g in found)]


def for_some(f, args):
    """Other arguments ask for gradients than in the call before."""
    x, w, *rest = (t.clone() for t in args)
    for asks in (x, w):
        asks.requires_grad_()
        torch.autograd.grad(loss_of(f(x, w, *rest)), asks)
        asks.requires_grad_(False)
    return gradients(f, args)


def watched(f, args):
    with torch.autograd.detect_anomaly(check_nan=True):
        return gradients(f, args)


def elsewhere(f, args):
    with torch.device("meta"):
        return gradients(f, args)


def cast(f, args):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        f(*(t.float() for t in args))
    return gradients(f, args)


KINDS = {
    "plain": gradients,
    "changed in place": lambda f, args: gradients(f, args, change=True),
    "threads": in_threads,
    "no_grad": without(torch.no_grad),
    "inference_mode": without(torch.inference_mode),
    "checkpoint": checkpointed,
    "func": transformed,
    "vmap": mapped,
    "some": for_some,
    "anomaly": watched,
    "default device": elsewhere,
    "autocast": cast,
}


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("engine", ["auto", "eager"])
@pytest.mark.parametrize("start", range(4))
def test_kinds_of_calls_in_any_order(engine, start, seed):
    rng = random.Random(seed + start)
    for k, (make, dense) in enumerate(LAYERS):
        f, args = make(), drawn(rng.choice([4, 8, 520]) if k == 4 else 6)
        wanted = gradients(dense, args)
        with mr.use(engine=engine):
            for kind in rng.sample(sorted(KINDS), 4):
                found = KINDS[kind](f, args)
                for x, y in zip(found, wanted, strict=False):  # torch.func was asked for fewer
                    torch.testing.assert_close(x, y, rtol=1e-7, atol=1e-9)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection_looks_at_the_users_numbers_alone():
    """Not at those of a cost estimate, where all points are equal, and distances have no gradient."""
    names = ("minkowski_distance", "energy_distance")
    for layer in (layer for layer in DIFFERENTIABLE if layer.name in names):
        args = [t.requires_grad_() if is_float(t) else t for t in layer.args(next(FRESH), 33, 3)]
        with mr.use(engine="auto"), torch.autograd.detect_anomaly(check_nan=True):
            sum(y.sum() for y in flatten(layer.op(*args))).backward()


@pytest.mark.parametrize("engine", ["auto", "eager"])
def test_another_default_device(engine):
    """Whatever tensors are made on the way are made where the arguments are."""
    with mr.use(engine=engine):
        for layer in DIFFERENTIABLE[::3]:
            args = layer.args(next(FRESH), 33, 3)
            with torch.device("meta"):
                found = flatten(layer.op(*args))
            torch.testing.assert_close(found, flatten(layer.op(*args)))


def test_compiled_before_anything_else():
    f, args = fresh_op(), drawn(6)
    compiled = torch.compile(lambda *given: f(*given), backend="aot_eager", fullgraph=True)
    with mr.use(engine="auto"):
        torch.testing.assert_close(gradients(compiled, args), gradients(dense_form, args))
        torch.testing.assert_close(gradients(f, args), gradients(dense_form, args))


def test_modules_are_copied_between_calls():
    module = nn.GatedMLP(6, 10).double()
    x = torch.randn(next(FRESH), 6, dtype=FLOAT64)
    with mr.use(engine="auto"):
        found = []
        for one in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), module, copy.deepcopy(module)):
            found.append([one(x), *torch.autograd.grad(one(x).sin().sum(), list(one.parameters()))])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])
