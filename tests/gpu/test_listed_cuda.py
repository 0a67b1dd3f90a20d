"""Folds over listed columns on a GPU: every domain against the reference engine in float64, in one precision each."""

import os

import pytest
import torch

import monoidreduce as mr
from monoidreduce import ops
from monoidreduce.runtime import bind
from tests.support import listed_cases

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore::monoidreduce.errors.FallbackWarning"),
]
PART, PARTS = map(int, os.environ.get("MONOIDREDUCE_TEST_SHARD", "0/1").split("/"))
DTYPES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2}


def compare(call, inputs, dtype, make_domain, options=None):
    """Values and gradients by kernels against the reference engine in float64, both on the GPU."""
    stored = [t.to(dtype) for t in inputs]
    given = [t.cuda().requires_grad_() for t in stored]
    exact = [t.cuda().double().requires_grad_() for t in stored]
    found = call(*given, cols=make_domain("cuda"))
    with mr.use(engine="reference"):
        right = call(*exact, cols=make_domain("cuda"))
        weight = torch.linspace(-1, 1, right.numel(), dtype=torch.float64, device="cuda").view(right.shape)
        wanted = torch.autograd.grad(right, exact, weight)
    got = torch.autograd.grad(found, given, weight.to(found))
    for name, one, other in zip(("value", *"123456"), (found, *got), (right, *wanted), strict=False):
        apart = (one.double() - other).norm() / other.norm().clamp(min=1e-30)
        assert one.shape == other.shape and apart <= DTYPES[dtype], (name, float(apart))


def _blocks(size, rows, cols, share, batch=()):
    groups, others = -(-rows // size), -(-cols // size)
    chance = torch.Generator().manual_seed(3)
    kept = max(1, int(others * share))
    index = torch.rand(*batch, groups, others, generator=chance).argsort(-1)[..., :kept].int()
    count = torch.randint(0, kept + 1, (*batch, groups), generator=chance).int()
    return lambda device: mr.blocks(index.to(device), count.to(device), rows=size, cols=size)


def _jagged(lengths, causal=False):
    ends = listed_cases.offsets(torch.tensor(lengths)).int()
    return lambda device: mr.jagged(ends.to(device))


def _edges(rows, cols, most, hub=0):
    chance = torch.Generator().manual_seed(5)
    degree = torch.randint(0, most, (rows,), generator=chance)
    if hub:
        degree[rows // 2] = hub
    index = torch.randint(0, cols, (int(degree.sum()),), generator=chance).int()
    ends = listed_cases.offsets(degree).int()
    return lambda device: mr.edges(ends.to(device), index.to(device))


def attend(q, k, v, cols, **options):
    return ops.attention(q, k, v, cols=cols, enable_gqa=True, **options)


def _heads(rows, cols, d, heads=4, shared=2):
    chance = torch.Generator().manual_seed(1)
    return [torch.randn(2, h, n, d, generator=chance) for h, n in ((heads, rows), (shared, cols), (shared, cols))]


CASES = {
    "blocks of 128": (attend, _heads(1000, 1100, 128), _blocks(128, 1000, 1100, 0.5)),
    "blocks of 128, D 64, a head each": (attend, _heads(512, 512, 64), _blocks(128, 512, 512, 0.6, (4,))),
    "blocks of 64": (attend, _heads(500, 700, 128), _blocks(64, 500, 700, 0.4)),
    "blocks of 16": (attend, _heads(100, 90, 40), _blocks(16, 100, 90, 0.5)),
    "causal blocks": (
        lambda q, k, v, cols: attend(q, k, v, cols, causal=True), _heads(640, 640, 128), _blocks(128, 640, 640, 0.7),
    ),
    "jagged": (attend, _heads(1234, 1234, 128), _jagged([300, 0, 1, 128, 600, 205])),
    "causal jagged": (
        lambda q, k, v, cols: attend(q, k, v, cols, causal=True), _heads(777, 777, 64), _jagged([77, 500, 200]),
    ),
    "edges": (
        lambda t, s, v, cols: ops.graph_attention(t, s, v, cols),
        [torch.randn(500), torch.randn(700), torch.randn(700, 64)], _edges(500, 700, 30),
    ),
    "edges with a hub": (
        lambda t, s, v, cols: ops.graph_attention(t, s, v, cols),
        [torch.randn(500), torch.randn(700), torch.randn(700, 48)], _edges(500, 700, 30, hub=9000),
    ),
    "edges of vectors": (
        lambda x, y, v, cols: listed_cases.bundle(x, y, v, cols=cols)[2],
        [torch.randn(300, 32), torch.randn(400, 32), torch.randn(400, 16)], _edges(300, 400, 50),
    ),
}  # fmt: skip
NAMES = list(CASES)[PART::PARTS]


PRECISE = {"blocks of 16": torch.float64, "edges": torch.float64, "edges of vectors": torch.float32}


@pytest.mark.parametrize("name", NAMES)
def test_attention_and_sums(name):
    call, inputs, domain = CASES[name]
    compare(call, inputs, PRECISE.get(name, torch.bfloat16), domain)


@pytest.mark.parametrize("causal", [False, True])
def test_long_sequences(causal, monkeypatch):
    """Packed sequences as those that are long on average run: warp-specialised kernels."""
    monkeypatch.setattr(bind, "_LONG", 1)
    call, inputs, domain = CASES["jagged"]
    compare(lambda *args, **more: call(*args, causal=causal, **more), inputs, torch.bfloat16, domain)


@pytest.mark.parametrize("rows, dtype", [(1, torch.bfloat16), (200, torch.bfloat16), (5, torch.float64)])
def test_pages(rows, dtype):
    torch.manual_seed(0)
    lengths, page = torch.tensor([200, 1000, 333]), 64
    table = torch.zeros(3, 16, dtype=torch.int32)
    order = torch.randperm(30).int()
    for s, (first, count) in enumerate(((0, 4), (4, 16), (20, 6))):
        table[s, :count] = order[first : first + count]
    q, k, v = torch.randn(3, 8, rows, 128), torch.randn(30, page, 2, 128), torch.randn(30, page, 2, 128)
    domain = lambda device: mr.pages(table.to(device), lengths.int().to(device), page=page)
    compare(lambda q, k, v, cols: ops.attention_paged(q, k, v, cols), [q, k, v], dtype, domain)


@pytest.mark.parametrize("first", range(PART * 2, 6, 2 * PARTS))
def test_random_lists(first):
    """Reductions of every family, in both directions, over ragged lists with repeats and empty rows."""
    for seed in range(first, first + 2):
        problem = listed_cases.random_problem(seed)
        args = problem.args()
        results = []
        for device in ("cpu", "cuda"):
            given = [a.detach().to(device).requires_grad_() for a in args]
            domain = type(problem.domain)(*(_moved(problem.domain, device)))
            with mr.use(engine="reference" if device == "cpu" else "auto"):
                found = listed_cases.bundle(*given, cols=domain)
                grads = listed_cases.gradients(list(found), given)
            results.append([t.detach().cpu() for t in (*found, *grads)])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)


def _moved(domain, device):
    """What makes the same lists on another device."""
    moved = lambda t: None if t is None else t.to(device)
    if isinstance(domain, mr.edges):
        return moved(domain.rowptr), moved(domain.index)
    if isinstance(domain, mr.blocks):
        return moved(domain.index), moved(domain.count), domain.rows, domain.cols
    same = domain.col_offsets is domain.row_offsets
    rows = moved(domain.row_offsets)
    return (rows,) if same else (rows, moved(domain.col_offsets))


def capture(step):
    """What a step returns from a CUDA graph, and what it returned before that."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        before = [step() for _ in range(3)][-1]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    torch.cuda.synchronize()
    return found, before


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node:UserWarning")  # the leaves were made beside the graph
@pytest.mark.parametrize("name", ["blocks of 128", "jagged", "edges"])
def test_captured_in_a_graph(name):
    """No call of a warm layer waits for the host."""
    call, inputs, domain = CASES[name]
    given, cols = [t.cuda().requires_grad_() for t in inputs], domain("cuda")

    def step():
        found = call(*given, cols=cols)
        return (found, *torch.autograd.grad(found, given, torch.ones_like(found)))

    found, right = capture(step)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)


@mr.op
def extremes(x: mr.Row["f"], y: mr.Col["f"]):
    s = x @ y
    return mr.max(s), mr.topk(s, 3)[0]


@mr.op
def edge_means(x: mr.Row["f"], y: mr.Col["f"], e: mr.Pair, v: mr.Col["d"]):
    return mr.softmax_mean(x @ y * 0.1 + e, v)


@mr.op
def relative(x: mr.Row["f"], y: mr.Col["f"], v: mr.Col["d"], bias: mr.Table["n"]):
    return mr.softmax_mean(x @ y * 0.1 + mr.lookup(bias, mr.row_index - mr.col_index + 4500), v)


@pytest.mark.parametrize("op", [extremes, edge_means, relative], ids=lambda op: op.function.__name__)
def test_long_lists(op, monkeypatch):
    """Short lists and one of 60,000 edges, by kernels alone, against gathered pieces in float64."""
    domain = _edges(5000, 4500, 40, hub=60_000)("cuda")
    make = torch.Generator().manual_seed(0)
    shapes = {extremes: "xy", edge_means: "xyev", relative: "xyvt"}[op]
    sizes = {"x": (5000, 64), "y": (4500, 64), "v": (4500, 48), "e": (len(domain.index),), "t": (9500,)}
    args = [torch.randn(*sizes[name], generator=make).cuda() for name in shapes]
    found = []
    for engine, dtype in (("eager", torch.float64), ("triton", torch.float32)):
        given = [a.to(dtype).requires_grad_() for a in args]
        if engine == "triton":
            monkeypatch.setattr("monoidreduce.engines.listed.run", None)  # nothing is gathered
        with mr.use(engine=engine):
            results = op(*given, cols=domain)
        results = [torch.where(t.isfinite(), t, 0.0) for t in (results if isinstance(results, tuple) else (results,))]
        loss = sum(t.sin().sum() for t in results)
        found.append([*results, *torch.autograd.grad(loss, given)])
    for right, one in zip(*found, strict=True):
        assert (one.double() - right).norm() <= 1e-5 * right.norm()


def test_long_lists_captured_in_a_graph():
    """Forward and backward over edges, with the transposed list made before."""
    domain = _edges(5000, 4500, 40, hub=60_000)("cuda")
    given = [torch.randn(*shape, device="cuda").bfloat16().requires_grad_() for shape in ((5000,), (4500,), (4500, 64))]
    weight = torch.randn(5000, 64, device="cuda").bfloat16()

    def step():
        y = ops.graph_attention(*given, domain)
        return [y, *torch.autograd.grad(y, given, weight)]

    found, wanted = capture(step)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
