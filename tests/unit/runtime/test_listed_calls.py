"""Calls over a domain under torch's compiler, transforms and autocast: the same numbers as in a plain call."""

import math

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils import _pytree as pytree

import monoidreduce as mr
from monoidreduce import Col, Pair, Row
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


@pytest.mark.parametrize("kind", DOMAINS)
def test_trained_after_a_call_in_inference_mode(kind):
    """What is made of the lists is kept: made in inference mode, no later call could have a gradient of it."""
    given, args = problem(kind)
    with torch.inference_mode():
        found = attention(*args, cols=given.domain)
    again = attention(*args, cols=given.domain)
    assert torch.equal(found, again)
    torch.autograd.grad(again.sum(), args)


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


@mr.op
def cooled(x: Row["f"], y: Col["f"], v: Col["d"], heat: float):
    return mr.softmax_mean(x @ y / heat, v)


@mr.op
def capped(x: Row["f"], y: Col["f"], v: Col["d"], heat: float):
    return mr.softmax_mean(torch.tanh(x @ y) if heat > 1 else x @ y, v)  # asks for the number's value


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [*DOMAINS, "pages"])
@pytest.mark.parametrize("op", [cooled, capped])
def test_compiled_with_numbers_that_are_left_open(kind, op):
    """Layers make numbers of widths (1/√f), and users give others in each call."""
    if kind == "pages":
        args, table, lengths = pages()
        domain = mr.pages(table, lengths, page=2)
    else:
        given, args = problem(kind)
        domain = given.domain

    def call(x, y, v, heat):
        return op(x, y, v, x.shape[-1] ** 0.5 * heat, cols=domain)

    torch._dynamo.reset()
    found = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for heat in (0.3, 0.7, 1.9):
        one, other = found(*args, heat), call(*args, heat)
        torch.testing.assert_close(one, other)
        pairs = (torch.autograd.grad(y.square().sum(), args) for y in (one, other))
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(a, b)


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


def mapped_calls():
    """Calls of one element of a batch, whose lists or some tensors of these differ from element to element."""
    make = torch.Generator().manual_seed(0)
    index = lambda high, *shape: torch.randint(0, high, shape, generator=make)
    rising = lambda *shape: F.pad(index(9, *shape).cumsum(1), (1, 0))
    rows, lists = torch.arange(7) * 4, index(9, 3, 6, 4)
    ends = rising(3, 6).clamp(max=24)
    ends[:, -1] = 24
    blocks, count = index(3, 3, 3, 2), index(3, 3, 3)
    yield "neighbours", lambda x, y, v, i: attention(x, y, v, cols=mr.edges.from_neighbours(i)), (lists,)
    yield "rowptr", lambda x, y, v, r: attention(x, y, v, cols=mr.edges(r, lists[0].flatten())), (ends,)
    yield "index", lambda x, y, v, i: attention(x, y, v, cols=mr.edges(rows, i.flatten())), (lists,)
    yield "blocks", lambda x, y, v, i: attention(x, y, v, cols=mr.blocks(i, count[0], 2, 3)), (blocks,)
    yield "count", lambda x, y, v, n: attention(x, y, v, cols=mr.blocks(blocks[0], n, 2, 3)), (count,)
    yield "both", lambda x, y, v, i, n: attention(x, y, v, cols=mr.blocks(i, n, 2, 3)), (blocks, count)
    yield "jagged", lambda x, y, v, o: attention(x, y, v, cols=mr.jagged(o, ends[0] // 3)), (ends.clamp(max=6),)
    table, lengths = torch.rand(3, 2, 4, generator=make).argsort(-1)[..., :2], index(5, 3, 2)
    yield "table", lambda x, y, v, t: paged(x, y, v, mr.pages(t, lengths[0], 2)), (table,)
    yield "lengths", lambda x, y, v, n: paged(x, y, v, mr.pages(table[0], n, 2)), (lengths,)


def paged(x, y, v, domain):
    store = lambda t: t[:8].view(4, 2, 1, -1)
    return attention(x.expand(2, 1, *x.shape), store(y), store(v), cols=domain)


@pytest.mark.filterwarnings("ignore:torch.searchsorted")  # of what torch expands to map it
@pytest.mark.parametrize("name, call, lists", [*mapped_calls()], ids=lambda v: v if isinstance(v, str) else "")
def test_lists_of_each_mapped_element(name, call, lists):
    make = torch.Generator().manual_seed(1)
    args = [torch.randn(3, *shape, dtype=torch.float64, generator=make) for shape in ((6, 3), (9, 3), (9, 2))]
    gradient = torch.func.grad(lambda *given: call(*given).square().sum(), argnums=(0, 1, 2))
    for function in (lambda *given: (call(*given),), gradient):
        found = torch.vmap(function)(*args, *lists)
        one_by_one = [function(*(t[k] for t in (*args, *lists))) for k in range(3)]
        for one, other in zip(found, zip(*one_by_one, strict=True), strict=True):
            torch.testing.assert_close(one, torch.stack(other))


def test_mapped_elements_have_equally_many_edges():
    """Which no check before the call can read."""
    x, index = torch.randn(2, 3, 4), torch.zeros(2, 3, 2).long()
    call = lambda x, count: attention(x, x, x, cols=mr.edges.from_neighbours(index[0], count))
    with pytest.raises(mr.ColumnListError, match="rowptr ends at 4 for one element of the batch, but index has 6"):
        torch.vmap(call)(x, torch.tensor([[2, 2, 2], [1, 2, 1]]))


@pytest.mark.parametrize("engine", ["auto", "eager", "reference"])
def test_batches_read_no_more_than_the_lists(engine):
    """Lists that all batch elements share may have room to spare; it belongs to no row."""
    x, index = torch.randn(2, 3, 4, dtype=torch.float64), torch.tensor([0, 2, 1])
    lists = [mr.edges(torch.arange(4), i) for i in (index, torch.cat([index, index]))]
    with mr.use(engine=engine):
        torch.testing.assert_close(*(attention(x, x, x, cols=one) for one in lists))


def test_the_reference_engine_reads_lists():
    """How often a pair is listed is a number that neither a compiler nor a mapped list has."""
    given, args = problem("edges")
    x, index = torch.randn(2, 3, 4), torch.zeros(2, 3, 2).long()
    compiled = torch.compile(lambda *given_args: attention(*given_args, cols=given.domain), backend="aot_eager")
    mapped = torch.vmap(lambda x, i: attention(x, x, x, cols=mr.edges.from_neighbours(i)))
    torch._dynamo.reset()
    with mr.use(engine="reference"):
        for call, tensors in ((compiled, args), (mapped, (x, index))):
            with pytest.raises(Exception, match="the reference engine reads how often each pair is listed"):
                call(*tensors)
        torch.vmap(lambda x: attention(x, x, x, cols=mr.edges.from_neighbours(index[0])))(x)  # one list for all


@mr.op
def weigh(w: Pair, h: Col["d"]):
    return mr.sum(w * h), mr.logsumexp(w, over="rows")


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("engine", ["auto", "eager", "reference"])
def test_numbers_of_edges_count_rows(engine):
    """No argument is a row: a product with a sparse matrix."""
    make = torch.Generator().manual_seed(0)
    dense = torch.randn(5, 4, dtype=torch.float64, generator=make)
    dense[2] = 0
    csr = torch.where(dense > 0, dense, 0.0).to_sparse_csr()
    w, h = (
        csr.values().clone().requires_grad_(),
        torch.randn(4, 3, dtype=torch.float64, generator=make).requires_grad_(),
    )
    plain = csr.to_dense().requires_grad_()
    with mr.use(engine=engine):
        y, total = weigh(w, h, cols=mr.edges.from_csr(csr))
        torch.testing.assert_close(y, plain @ h)
        torch.testing.assert_close(total, torch.where(plain > 0, plain, -torch.inf).logsumexp(0))
        found = torch.autograd.grad(y.square().sum(), (w, h))
    wanted = torch.autograd.grad((plain @ h).square().sum(), (plain, h))
    torch.testing.assert_close(found[0], wanted[0][plain > 0])
    torch.testing.assert_close(found[1], wanted[1])
    given = mr.blocks(torch.tensor([[1], [0]]), rows=3, cols=2)
    with mr.use(engine=engine):
        torch.testing.assert_close(weigh(dense, h, cols=given)[0], (dense * given.mask(5, 4)) @ h)


@mr.op
def store_total(h: Col["d"]):
    return mr.sum(h), mr.mean(h)


def test_columns_alone():
    store = torch.arange(24.0).view(3, 2, 2, 2)
    held = mr.pages(torch.tensor([[2, 0]]), torch.tensor([3]), page=2)
    total, mean = store_total(store, cols=held)
    torch.testing.assert_close(total, held.gather(store).sum(2, keepdim=True))
    torch.testing.assert_close(mean, total / 3)
    torch.testing.assert_close(
        store_total(store[0, 0], cols=mr.edges(*torch.tensor([[0, 2], [0, 1]])))[0], store[0, 0].sum(0, True)
    )
    for domain in (mr.blocks(torch.tensor([[0]])), mr.jagged(torch.tensor([0, 2]))):
        with pytest.raises(mr.ShapeError, match="no argument says how many rows there are"):
            store_total(store[0, 0], cols=domain)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", [*DOMAINS, "numbers of edges"])
def test_meta_tensors_have_shapes(kind):
    """A model on the meta device, with its lists there too."""
    if kind == "numbers of edges":
        csr = torch.eye(4).to_sparse_csr()
        call, domain, args = (
            weigh,
            mr.edges.from_csr(csr),
            [csr.values().requires_grad_(), torch.randn(4, 3).requires_grad_()],
        )
    else:
        given, args = problem(kind)
        call, domain = attention, given.domain
    there = [t.detach().to("meta").requires_grad_() for t in args]
    flat = pytree.tree_leaves
    wanted, found = flat(call(*args, cols=domain)), flat(call(*there, cols=domain.to("meta")))
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in wanted]
    assert [g.shape for g in torch.autograd.grad(found[0].sum(), there)] == [t.shape for t in args]
