"""Calls over a domain under torch's compiler, transforms and autocast: the same numbers as in a plain call."""

import pytest
import torch

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
