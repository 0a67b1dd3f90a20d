"""Ready-made layers over lists of columns, against the dense call with the same mask: values and gradients."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce import ops
from tests.support.allocations import usage

ENGINES = ["eager", "reference"]
F64 = torch.float64


def randn(*shape, grad=True):
    return torch.randn(*shape, dtype=F64, requires_grad=grad)


def compare(ours, dense, inputs, tolerance=1e-9):
    """Equal results, and equal gradients of a random weighting of them; where the dense one is None, only values."""
    ours, dense = (t if isinstance(t, tuple) else (t,) for t in (ours, dense))
    for a, b in zip(ours, dense, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
    weights = [torch.randn_like(t) for t in ours]
    found = [
        torch.autograd.grad(sum((t * w).sum() for t, w in zip(r, weights, strict=True)), inputs) for r in (ours, dense)
    ]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def masked_attention(q, k, v, seen, softcap=None, slopes=None, lse=False):
    """Plain torch; a row that sees nothing gives 0."""
    s = q @ k.mT / q.shape[-1] ** 0.5
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s = s if slopes is None else s + slopes
    z = torch.where(seen, s, -torch.inf)
    empty = ~seen.any(-1, keepdim=True)
    w = torch.where(empty, 0.0, torch.softmax(torch.where(empty, 0.0, z), -1))
    y = torch.where(seen, w, 0.0) @ v
    return (y, torch.logsumexp(z, -1)) if lse else y


def distance(m, n, shift=0):
    return torch.arange(m).unsqueeze(1) + shift - torch.arange(n)


@pytest.fixture(params=ENGINES)
def engine(request):
    with mr.use(engine=request.param):
        yield request.param


@pytest.mark.parametrize("heads", [None, "query", "key", "one"])
def test_block_sparse_attention(engine, heads):
    q, k, v = randn(2, 4, 13, 3), randn(2, 2, 10, 3), randn(2, 2, 10, 2)
    lead = {None: (), "query": (2, 4), "key": (2, 2), "one": (2, 1)}[heads]
    keep = torch.rand(*lead, 4, 3) > 0.5
    keep[..., 0, :] = False
    cols = mr.blocks.from_mask(keep, 4, 4)
    seen = cols.mask(13, 10) > 0
    seen = seen.repeat_interleave(2, 1) if heads == "key" else seen
    seen = (seen & (distance(13, 10) >= 0)).expand(2, 4, 13, 10)
    ours = ops.attention(q, k, v, enable_gqa=True, causal=True, softcap=2.0, cols=cols)
    dense = masked_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), seen, softcap=2.0)
    compare(ours, dense, (q, k, v))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("causal", [False, True, "lower_right"])
@pytest.mark.parametrize("square", [True, False])
def test_packed_attention(engine, square, causal):
    rows = torch.tensor([0, 3, 3, 8, 9])
    cols = rows if square else torch.tensor([0, 2, 5, 12, 13])
    q, k, v = randn(2, 10, 3), randn(2, int(cols[-1]) + 1, 3), randn(2, int(cols[-1]) + 1, 2)
    domain = mr.jagged(rows) if square else mr.jagged(rows, cols)
    slopes = torch.tensor([0.3, 0.1], dtype=F64)
    ours = ops.attention(q, k, v, causal=causal, alibi_slopes=slopes, window=(4, None), cols=domain)
    parts = []
    for (a, b), (c, d) in zip(itertools.pairwise(rows.tolist()), itertools.pairwise(cols.tolist()), strict=True):
        apart = distance(b - a, d - c, (d - c) - (b - a) if causal == "lower_right" else 0)
        seen = (apart <= 4) & ((apart >= 0) if causal else True)
        bias = -slopes[:, None, None] * apart.abs()
        parts.append(masked_attention(q[:, a:b], k[:, c:d], v[:, c:d], seen.expand(2, -1, -1), slopes=bias))
    parts.append(torch.zeros(2, 1, 2, dtype=F64))  # a row of no sequence
    compare(ours, torch.cat(parts, 1), (q, k, v))


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("heads", [2, 6])
def test_paged_attention(engine, heads, new):
    held = mr.pages(torch.tensor([[3, 1, 4], [5, 0, 0], [2, 0, 0]]), torch.tensor([10, 3, 4]), page=4)
    q, k, v = randn(3, heads, new, 3), randn(6, 4, 2, 3), randn(6, 4, 2, 2)
    slopes = torch.rand(heads, dtype=F64)
    options = dict(window=(5, None), softcap=3.0)
    ours = ops.attention_paged(q, k, v, held, alibi_slopes=slopes, return_lse=True, **options)
    dense = ops.attention_decode(
        q, held.gather(k), held.gather(v), held.lengths, alibi_slopes=slopes, return_lse=True, **options
    )
    compare(tuple(ours), tuple(dense), (q, k, v))


def test_shared_pages_and_two_stores(engine):
    """A prefix in pages that two sequences share; and attention to two halves of a sequence, merged by their lse."""
    k, v, q = randn(4, 2, 1, 3), randn(4, 2, 1, 3), randn(2, 1, 1, 3)
    held = mr.pages(torch.tensor([[0, 1], [0, 2]]), torch.tensor([4, 3]), page=2)
    whole = ops.attention_paged(q, k, v, held)
    compare(whole, ops.attention_decode(q, held.gather(k), held.gather(v), held.lengths), (q, k, v))
    first = mr.pages(torch.tensor([[0], [0]]), torch.tensor([2, 2]), page=2)
    second = mr.pages(torch.tensor([[1], [2]]), torch.tensor([2, 1]), page=2)
    halves = [ops.attention_paged(q, k, v, half, causal=False, return_lse=True) for half in (first, second)]
    share = torch.softmax(torch.stack([h.lse for h in halves]), 0).unsqueeze(-1)
    torch.testing.assert_close(share[0] * halves[0].values + share[1] * halves[1].values, whole)


@pytest.mark.parametrize("causal", [False, True, "lower_right"])
def test_selected_attention(engine, causal):
    q, k, v = randn(2, 4, 21, 3), randn(2, 2, 27, 3), randn(2, 2, 27, 2)
    options = dict(block=4, rows=8, causal=causal, enable_gqa=True)
    cols = ops.select_blocks(q, k, 4, **options)
    assert cols.index.shape == (2, 2, 3, 4)
    ours = ops.selected_attention(q, k, v, 4, **options)
    seen = (cols.mask(21, 27) > 0).repeat_interleave(2, 1)
    assert int(cols.mask(21, 27).max()) == 1
    if causal:
        apart = distance(21, 27, 6 if causal == "lower_right" else 0)
        seen = seen & (apart >= 0)
        assert bool((seen & (apart == 0)).any(-1).all()) and bool(seen[..., 0].all())  # itself, and the first block
    compare(ours, masked_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), seen), (q, k, v))


def test_the_best_blocks_are_chosen():
    q, k = torch.randn(3, 16, 4, dtype=F64), torch.randn(3, 25, 4, dtype=F64)
    means = torch.stack([k[:, a : a + 4].mean(1) for a in range(0, 25, 4)], 1)
    scores = q.view(3, 4, 4, 4).mean(2) @ means.mT
    chosen = ops.select_blocks(q, k, 3, block=4, sinks=0)
    assert torch.equal(chosen.index.sort(-1).values, scores.topk(3).indices.sort(-1).values)
    assert bool((chosen.count == 3).all())
    with pytest.raises(mr.ArgumentError, match="Give at least 2"):
        ops.select_blocks(q, k, 1, block=4, causal=True)
    with pytest.raises(mr.ArgumentError, match=r"2 come first\. Give at least 2"):
        ops.select_blocks(q, k, 1, block=4, sinks=2)


def graph(rows, cols, edges, seed=0):
    make = torch.Generator().manual_seed(seed)
    index = torch.stack([torch.randint(cols, (edges,), generator=make), torch.randint(rows, (edges,), generator=make)])
    index = torch.unique(index, dim=1)  # each edge once, in the order of its source
    return index, mr.edges.from_edge_index(index, rows)


def test_graph_attention(engine):
    index, (cols, order) = graph(9, 7, 30)
    target, source, values, bias = randn(3, 9), randn(3, 7), randn(3, 7, 2), randn(3, index.shape[1])
    ours = ops.graph_attention(target, source, values, cols, bias=bias[:, order])
    parts = []
    for i in range(9):
        mine = (index[1] == i).nonzero().squeeze(1)
        s = F.leaky_relu(target[:, i, None] + source[:, index[0, mine]] + bias[:, mine], 0.2)
        parts.append((torch.softmax(s, -1).unsqueeze(-1) * values[:, index[0, mine]]).sum(1))
    compare(ours, torch.stack(parts, 1), (target, source, values, bias))


def test_graph_attention_module_is_pyg_gatconv():
    """Against the formula of GATConv, written with gathers and scatters over edges."""
    index, (cols, _) = graph(8, 8, 24, 1)
    layer = mr.nn.GraphAttention(5, 3, heads=2).double()
    x = torch.randn(8, 5, dtype=F64)
    h = layer.lin(x).view(8, 2, 3)
    s = F.leaky_relu(((h * layer.att_src).sum(-1))[index[0]] + ((h * layer.att_dst).sum(-1))[index[1]], 0.2).exp()
    total = torch.zeros(8, 2, dtype=F64).index_add(0, index[1], s)[index[1]]
    y = torch.zeros(8, 2, 3, dtype=F64).index_add(0, index[1], (s / total).unsqueeze(-1) * h[index[0]])
    torch.testing.assert_close(layer(x, cols), y.flatten(1) + layer.bias)
    assert {n: tuple(p.shape) for n, p in layer.named_parameters()} == {
        "att_src": (1, 2, 3), "att_dst": (1, 2, 3), "bias": (6,), "lin.weight": (6, 5),
    }  # fmt: skip
    assert mr.nn.GraphAttention(5, 3, heads=2, concat=False, bias=False).double()(x, cols).shape == (8, 3)


def dense_sampled(x, w, target, samples, bias, log_q, temperature, remove):
    s = (x @ w.T + bias) / temperature - log_q
    samples = samples.expand(len(x), -1) if samples.dim() == 1 else samples
    negatives = s.gather(1, samples)
    negatives = torch.where(samples == target[:, None], -torch.inf, negatives) if remove else negatives
    own = s.gather(1, target[:, None])
    return torch.logsumexp(torch.cat([own, negatives], 1), 1) - own.squeeze(1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("remove", [True, False])
@pytest.mark.parametrize("sparse", [True, False])
def test_sampled_cross_entropy(engine, shared, remove, sparse):
    x, w, bias, log_q = randn(6, 4), randn(12, 4), randn(12), torch.randn(12, dtype=F64)
    target = torch.tensor([3, 0, 11, 3, 5, 5])
    samples = torch.stack([torch.randperm(12)[:9] for _ in range(6)])
    samples = samples[0] if shared else samples
    if engine != "reference":  # which has one number for each pair, and cannot fold a pair twice with two
        samples[..., 1] = samples[..., 0]
    options = dict(bias=bias, log_q=log_q, temperature=0.7, remove_hits=remove, reduction="none")
    ours = ops.sampled_cross_entropy(x, w, target, samples, sparse_grad=sparse, **options)
    dense = dense_sampled(x, w, target, samples, bias, log_q, 0.7, remove)
    torch.testing.assert_close(ours, dense)
    cotangent = torch.randn(6, dtype=F64)
    mine = torch.autograd.grad(ours, (x, w, bias), cotangent)
    theirs = torch.autograd.grad(dense, (x, w, bias), cotangent)
    for a, b in zip(mine, theirs, strict=True):
        assert a.is_sparse == (sparse and a.shape == w.shape)
        torch.testing.assert_close(a.to_dense() if a.is_sparse else a, b)


def test_sampled_cross_entropy_ignores_weighs_and_reduces():
    x, w = randn(2, 3, 4), randn(10, 4)
    target = torch.tensor([[1, -100, 4], [0, 9, -100]])
    samples, weights = torch.randint(10, (2, 3, 5)), torch.rand(2, 3, dtype=F64)
    each = ops.sampled_cross_entropy(x, w, target, samples, reduction="none")
    assert each.shape == (2, 3) and bool((each[target == -100] == 0).all())
    mean = ops.sampled_cross_entropy(x, w, target, samples)
    torch.testing.assert_close(mean, each.sum() / 4)
    weighed = ops.sampled_cross_entropy(x, w, target, samples, token_weights=weights)
    torch.testing.assert_close(weighed, (each * weights).sum() / weights[target != -100].sum())
    (gradient,) = torch.autograd.grad(mean, x)
    assert not gradient[target == -100].any() and gradient.isfinite().all()
    none = ops.sampled_cross_entropy(
        x, w, target.new_full((2, 3), -100), samples, token_weights=weights.requires_grad_()
    )
    assert none.isnan() and all((g == 0).all() for g in torch.autograd.grad(none, [x, w, weights]))
    with pytest.raises(mr.ColumnListError, match=r"samples.* is 1\d, but classes are numbered from 0 to 9"):
        ops.sampled_cross_entropy(x, w, target, samples + 10 - samples.min())
    with pytest.raises(mr.ShapeError, match="for each"):
        ops.sampled_cross_entropy(x, w, target, samples[0])
    with pytest.raises(mr.LabelError):
        ops.sampled_cross_entropy(x, w, target + 20, samples)


def test_16_bit_samples_have_float32_loss_and_log_q():
    x, w = torch.randn(6, 8).bfloat16(), torch.randn(50, 8).bfloat16()
    target, samples, log_q = torch.randint(50, (6,)), torch.randint(50, (6, 7)), torch.randn(50) - 16
    loss = ops.sampled_cross_entropy(x, w, target, samples, log_q=log_q, reduction="none")
    exact = dense_sampled(x.double(), w.double(), target, samples, 0.0, log_q.double(), 1.0, False)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, exact.float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("metric", ["dot", "cosine", "euclidean", "sqeuclidean"])
def test_rerank(engine, metric):
    x, y = randn(5, 3), randn(20, 3)
    candidates = torch.stack([torch.randperm(20)[:8] for _ in range(5)])
    found = ops.rerank(x, y, candidates, 3, metric=metric)
    near = y[candidates]
    scores = {
        "dot": (x.unsqueeze(1) * near).sum(-1),
        "cosine": F.cosine_similarity(x.unsqueeze(1), near, -1),
        "euclidean": (x.unsqueeze(1) - near).norm(dim=-1),
        "sqeuclidean": ((x.unsqueeze(1) - near) ** 2).sum(-1),
    }[metric]
    values, place = scores.topk(3, largest=metric in ("dot", "cosine"))
    assert torch.equal(found.indices, candidates.gather(1, place))
    compare(found.values, values, (x, y))


def test_rerank_of_short_lists():
    edges = mr.edges(torch.tensor([0, 1, 1, 4]), torch.tensor([2, 0, 1, 2]))
    found = ops.rerank(torch.ones(3, 1), torch.tensor([[1.0], [2.0], [3.0]]), edges, 2)
    assert found.indices.tolist() == [[2, -1], [-1, -1], [2, 1]]
    assert found.values.tolist() == [[3.0, -torch.inf], [-torch.inf, -torch.inf], [3.0, 2.0]]
    with pytest.raises(mr.TopKError, match="k = 3 of only 2 candidates"):
        ops.rerank(torch.ones(3, 1), torch.ones(3, 1), torch.zeros(3, 2, dtype=torch.int64), 3)


def test_kernels_and_perceptrons_over_blocks(engine):
    x, y, b = randn(9, 3), randn(11, 3), randn(11, 2)
    keep = torch.rand(3, 3) > 0.4
    cols = mr.blocks.from_mask(keep, 3, 4)
    seen = cols.mask(9, 11).double()
    square = lambda: torch.cdist(x, y) ** 2
    compare(ops.kernel_sum(x, y, b, cols=cols), (torch.exp(-square() / 2) * seen) @ b, (x, y, b), 1e-7)
    compare(
        ops.kernel_logsumexp(x, y, cols=mr.blocks.from_mask(torch.ones(3, 3, dtype=torch.bool), 3, 4)),
        torch.logsumexp(-square() / 2, -1), (x, y), 1e-7,
    )  # fmt: skip
    compare(ops.mlp(x, y, b, activation="gelu", cols=cols), (F.gelu(x @ y.T) * seen) @ b, (x, y, b))
    z = randn(11, 3)
    compare(ops.gated_mlp(x, y, z, b, cols=cols), (F.silu(x @ y.T) * (x @ z.T) * seen) @ b, (x, y, z, b))
    h = randn(11)
    every = mr.edges.from_neighbours(torch.arange(11).expand(9, 11))
    compare(ops.softmin(x, y, h, eps=0.5, cols=every), ops.softmin(x, y, h, eps=0.5), (x, y, h), 1e-7)


@pytest.mark.parametrize(
    "call,words",
    [
        (lambda t, c: ops.attention(t, t, t, cols="some"), "cols was given 'some'. Give mr.blocks(...)"),
        (lambda t, c: ops.attention(t, t, t, cols=c, lengths=torch.tensor([2])), "Drop lengths: cols says"),
        (lambda t, c: ops.graph_attention(t[0], t[0], t, torch.zeros(2)), "Give mr.edges"),
        (lambda t, c: ops.attention_paged(t, t, t, c), "Give mr.pages"),
        (lambda t, c: ops.selected_attention(t, t, t, 1, blocks=c), "Give mr.blocks"),
        (lambda t, c: ops.kernel_sum(t, t, cols=3), "cols was given 3"),
        (lambda t, c: ops.rerank(t, t, c, 1), "Give mr.edges"),
    ],
)
def test_mistakes(call, words):
    with pytest.raises(mr.ArgumentError) as caught:
        call(torch.zeros(4, 4), mr.jagged(torch.tensor([0, 4])))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "candidates,error,words",
    [
        ([[0, 1]], mr.ShapeError, "candidates has shape (1, 2) beside x (3, 4). Give [3, K]"),
        ([[0, 1], [2, 3], [0, -1]], mr.ColumnListError, "candidates[2, 1] is -1, but columns are numbered"),
    ],
)
def test_candidates_that_do_not_fit(candidates, error, words):
    with pytest.raises(error) as caught:
        ops.rerank(torch.zeros(3, 4), torch.zeros(4, 4), torch.tensor(candidates), 1)
    assert words in str(caught.value)


def blocks_outside(q, cols):
    return ops.attention(q, q, q, causal=True, cols=cols)


def selected(q):
    return ops.selected_attention(q, q, q, 2, block=4)


def graph_layer(x, cols):
    return ops.graph_attention(x[:, 0], x[:, 1], x, cols)


def sampled(x, w, target, samples):
    return ops.sampled_cross_entropy(x, w, target, samples, remove_hits=True)


def paged(q, k, table, lengths):
    return ops.attention_paged(q, k, k, mr.pages(table, lengths, page=4))


COMPILED = {
    "blocks": (blocks_outside, lambda: (torch.randn(12, 4), mr.blocks.from_mask(torch.rand(3, 3) > 0.4, 4, 4))),
    "selected": (selected, lambda: (torch.randn(12, 4),)),
    "graph": (graph_layer, lambda: (torch.randn(9, 4), mr.edges.from_neighbours(torch.randint(9, (9, 3))))),
    "sampled": (sampled, lambda: (
        torch.randn(5, 4), torch.randn(20, 4), torch.randint(20, (5,)), torch.randint(20, (5, 6))
    )),
    "paged": (paged, lambda: (
        torch.randn(2, 4, 1, 8), torch.randn(5, 4, 2, 8), torch.tensor([[3, 0], [1, 4]]), torch.tensor([3, 7])
    )),
}  # fmt: skip


LONGER = ("selected", "graph")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONGER else n for n in COMPILED])
def test_layers_compile(name):
    function, make = COMPILED[name]
    args = make()
    args[0].requires_grad_()
    ours, eager = torch.compile(function, fullgraph=True, backend="aot_eager")(*args), function(*args)
    torch.testing.assert_close(ours, eager)
    g = torch.randn_like(eager)
    torch.testing.assert_close(torch.autograd.grad(ours, args[0], g), torch.autograd.grad(eager, args[0], g))


def test_second_derivatives():
    _, (cols, _) = graph(4, 3, 8)
    held = mr.pages(torch.tensor([[1, 0], [2, 0]]), torch.tensor([3, 1]), page=2)
    cases = {
        "graph": (lambda t, s, v: ops.graph_attention(t, s, v, cols), (randn(4), randn(3), randn(3, 2))),
        "paged": (lambda q, k: ops.attention_paged(q, k, k, held), (randn(2, 2, 1, 2), randn(3, 2, 1, 2))),
        "sampled": (
            lambda x, w: ops.sampled_cross_entropy(x, w, torch.tensor([1, 4]), torch.tensor([[0, 0, 1], [2, 3, 1]])),
            (randn(2, 2), randn(5, 2)),
        ),
        "packed": (lambda q: ops.attention(q, q, q, cols=mr.jagged(torch.tensor([0, 1, 4]))), (randn(4, 2),)),
    }
    for call, inputs in cases.values():
        assert torch.autograd.gradcheck(call, inputs) and torch.autograd.gradgradcheck(call, inputs)


def test_empty_axes_and_batches():
    none = torch.zeros(0, dtype=torch.int64)
    zero = mr.edges(torch.zeros(1, dtype=torch.int64), none)
    assert ops.graph_attention(torch.zeros(0), torch.zeros(3), torch.zeros(3, 2), zero).shape == (0, 2)
    lone = mr.edges(torch.zeros(4, dtype=torch.int64), none)
    assert not ops.graph_attention(torch.zeros(3), torch.zeros(0), torch.zeros(0, 2), lone).any()
    q = torch.zeros(2, 0, 4)
    assert ops.attention(q, q, q, cols=mr.jagged(torch.tensor([0, 0]))).shape == (2, 0, 4)
    assert ops.attention(torch.zeros(0, 8, 4), q[:0, :0], q[:0, :0], cols=mr.blocks(none.view(2, 0), rows=4)).shape == (
        0,
        8,
        4,
    )
    held = mr.pages(torch.zeros(0, 2, dtype=torch.int64), none, page=4)
    assert ops.attention_paged(
        torch.zeros(0, 2, 1, 3), torch.zeros(5, 4, 1, 3), torch.zeros(5, 4, 1, 3), held
    ).shape == (0, 2, 1, 3)
    loss = ops.sampled_cross_entropy(
        torch.randn(3, 2), torch.randn(5, 2), torch.tensor([0, 1, 2]), torch.zeros(3, 0, dtype=torch.int64)
    )
    assert float(loss) == 0.0  # no negatives
    for samples in (torch.arange(3), none.view(0, 3), none.view(0, 0)):
        x, weight = torch.zeros(0, 2, requires_grad=True), torch.randn(5, 2, requires_grad=True)
        loss = ops.sampled_cross_entropy(x, weight, none, samples, reduction="none")
        (grad,) = torch.autograd.grad(loss.sum(), weight, create_graph=True)
        assert loss.shape == (0,) and not grad.any()
        assert not torch.autograd.grad(grad.sum(), weight)[0].any()


def test_autocast_and_16_bits():
    q, k = torch.randn(2, 2, 24, 16), torch.randn(2, 2, 24, 16)
    cols = mr.blocks.from_mask(torch.rand(3, 3) > 0.3, 8, 8)
    exact = ops.attention(q.double(), k.double(), k.double(), cols=cols)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = ops.attention(q, k, k, cols=cols)
    half = ops.attention(q.bfloat16(), k.bfloat16(), k.bfloat16(), cols=cols)
    assert cast.dtype is half.dtype is torch.bfloat16
    for y in (cast, half):
        torch.testing.assert_close(y.double(), exact, atol=4e-2, rtol=4e-2)


def test_nans_stay_in_their_rows():
    x = torch.randn(6, 3)
    x[2] = torch.nan
    y = ops.graph_attention(x[:, 0], x[:, 1], x, mr.edges.from_neighbours(torch.tensor([[1], [2], [1], [4], [5], [0]])))
    assert y.isnan().any(-1).tolist() == [False, True, True, False, False, False]


def test_nothing_of_pairs_or_of_edges_with_features_is_allocated():
    """The largest storage is a list, or the columns themselves; gathered vectors come in pieces."""
    x, w, many = torch.randn(512, 64), torch.randn(3000, 64), torch.randint(3000, (512, 200))
    listed, gathered = 512 * 200 * 8, 512 * 200 * 64 * 4
    found = usage(lambda x, w: ops.sampled_cross_entropy(x, w, torch.arange(512), many), (x, w))
    assert found.largest <= 2 * listed and found.peak < 0.8 * gathered, found
    near = mr.edges.from_neighbours(many)
    found = usage(lambda t, s, v: ops.graph_attention(t, s, v, near), (x[:, 0], w[:, 0], w))
    assert found.largest <= 2 * listed and found.peak < 0.8 * gathered, found
    q, cols = torch.randn(2048, 16), mr.blocks(torch.arange(16).unsqueeze(1))
    found = usage(lambda q: ops.attention(q, q, q, cols=cols), (q,))
    assert found.largest < 2048 * 2048, found  # a quarter of the scores


def test_pages_and_blocks_of_8_bit_numbers():
    k, q = torch.randn(4, 8, 2, 16, dtype=F64), torch.randn(2, 4, 3, 16, dtype=F64)
    scale = k.abs().amax(-1) / 127
    small = (k / scale.unsqueeze(-1)).round().to(torch.int8)
    held = mr.pages(torch.tensor([[3, 1], [2, 0]]), torch.tensor([11, 5]), page=8)
    exact = small.double() * scale.unsqueeze(-1)
    stored = mr.scaled(small, scale)
    torch.testing.assert_close(ops.attention_paged(q, stored, stored, held), ops.attention_paged(q, exact, exact, held))
    cols = mr.blocks.from_mask(torch.rand(1, 2) > 0.3, 8, 4)
    each = [t.transpose(1, 2) for t in (small, scale, exact)]
    stored = mr.scaled(each[0], each[1])
    rows = torch.randn(4, 2, 5, 16, dtype=F64)
    ours, wanted = ops.attention(rows, stored, stored, cols=cols), ops.attention(rows, each[2], each[2], cols=cols)
    torch.testing.assert_close(ours, wanted)
