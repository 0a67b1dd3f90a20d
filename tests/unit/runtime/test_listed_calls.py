"""Calls over a domain under torch's compiler, transforms and autocast: the same numbers as in a plain call."""

import math

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils import _pytree as pytree

import monoidreduce as mr
from monoidreduce import Col, Row
from tests.support import listed_cases


@mr.op
def attention(x: Row["f"], y: Col["f"], v: Col["d"]):
    s = torch.where(mr.col_index <= mr.row_index + 1, torch.tanh(x @ y), -torch.inf)
    return mr.softmax_mean(s, v)


DOMAINS = {"edges": 3, "blocks": 7, "jagged": 8}  # seeds of problems


def problem(kind):
    found = listed_cases.random_problem(DOMAINS[kind])
    assert found.domain.kind == kind
    return found, found.args()


@pytest.mark.parametrize("kind", DOMAINS)
def test_compiled(kind):
    """The domain is made inside the graph; nothing breaks it, with fixed lengths and with open ones."""
    given, args = problem(kind)
    plain = attention(*args, cols=given.domain)
    gradients = torch.autograd.grad(plain.square().sum(), args)
    kinds = {"edges": mr.edges, "jagged": mr.jagged}
    tensors = given.domain.tensors()
    block = {"rows": given.domain.rows, "cols": given.domain.cols} if kind == "blocks" else {}

    def call(x, y, v, *lists):
        domain = mr.blocks(*lists, **block) if kind == "blocks" else kinds[kind](*lists)
        return attention(x, y, v, cols=domain)

    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        found = compiled(*args, *tensors)
        torch.testing.assert_close(found, plain)
        for one, other in zip(torch.autograd.grad(found.square().sum(), args), gradients, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", DOMAINS)
def test_transforms(kind):
    given, args = problem(kind)
    several = [torch.stack([t.detach(), 0.5 * t.detach()]) for t in args]
    call = lambda *some: attention(*some, cols=given.domain)
    one_by_one = torch.stack([call(*(t[k] for t in several)) for k in range(2)])
    torch.testing.assert_close(torch.vmap(call)(*several), one_by_one)
    tangent = torch.ones_like(args[0])
    others = [t.detach() for t in args[1:]]
    moved = torch.func.jvp(lambda x: call(x, *others), (args[0].detach(),), (tangent,))[1]
    step = 1e-6
    ahead, behind = (call(args[0].detach() + k * step * tangent, *others) for k in (1, -1))
    torch.testing.assert_close(moved, (ahead - behind) / (2 * step), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", DOMAINS)
def test_autocast(kind):
    given, args = problem(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attention(*(t.float() for t in args), cols=given.domain)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), attention(*args, cols=given.domain), rtol=0.05, atol=0.05)


def pages():
    """Two sequences, which share their first page; two query heads to a key."""
    make = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=make).requires_grad_()
    table, lengths = torch.tensor([[2, 0, 3], [2, 4, 1]]), torch.tensor([5, 3])
    return (draw(2, 4, 2, 3), draw(6, 2, 2, 3), draw(6, 2, 2, 2)), table, lengths


def test_compiled_pages():
    """The gradient of the pages has no copy for each sequence, in the graph either."""
    args, *lists = pages()
    call = lambda *given: attention(*given[:3], cols=mr.pages(*given[3:], page=2))
    plain = call(*args, *lists)
    gradients = torch.autograd.grad(plain.square().sum(), args)
    held: list[int] = []

    def watch(graph, example):
        values = [v for node in graph.graph.nodes for v in pytree.tree_leaves(node.meta.get("val"))]
        held.extend(math.prod(map(int, v.shape)) for v in values if isinstance(v, torch.Tensor))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=watch, bw_compiler=watch)
    found = torch.compile(call, fullgraph=True, dynamic=True, backend=backend)(*args, *lists)
    torch.testing.assert_close(found, plain)
    for one, other in zip(torch.autograd.grad(found.square().sum(), args), gradients, strict=True):
        torch.testing.assert_close(one, other)
    assert 0 < max(held) <= args[1].numel()


def test_transformed_pages():
    args, *lists = pages()
    call = lambda *given: attention(*given, cols=mr.pages(*lists, page=2))
    several = [torch.stack([t.detach(), 0.5 * t.detach()]) for t in args]
    gradient = torch.func.grad(lambda *given: call(*given).square().sum(), argnums=(0, 1, 2))
    for dims in ((0, None, None), (None, 0, 0)):
        given = [t if d == 0 else t[0] for t, d in zip(several, dims, strict=True)]
        found = torch.vmap(gradient, dims)(*given)
        one_by_one = [gradient(*(t[k] if d == 0 else t for t, d in zip(given, dims, strict=True))) for k in range(2)]
        for one, other in zip(found, zip(*one_by_one, strict=True), strict=True):
            torch.testing.assert_close(one, torch.stack(other))
    assert torch.autograd.gradgradcheck(call, args, fast_mode=True)
