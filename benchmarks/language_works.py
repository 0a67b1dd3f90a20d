"""What is timed on a GPU of the language beyond plain products: tables, statistics of attention, several vectors a row,
long lists of the best, packed codes and monoids of one's own, each beside what users would pick instead."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import monoidreduce as mr
from monoidreduce import ops

from .gpu_works import D, H, S, Work, made, qkv

SIDE, BLOCK = 64, 128  # of a picture, and of a map of blocks


@mr.op
@no_type_check
def relative_attention(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"], bias: mr.Table["n"], scale: float):
    return mr.softmax_mean(q @ k * scale + mr.lookup(bias, mr.row_index - mr.col_index + mr.num_cols - 1), v)


@mr.op
@no_type_check
def causal_relative_attention(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"], bias: mr.Table["n"], scale: float):
    back = mr.row_index - mr.col_index
    return mr.softmax_mean(torch.where(back >= 0, q @ k * scale + mr.lookup(bias, back), -torch.inf), v)


@mr.op
@no_type_check
def picture_attention(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"], bias: mr.Table["n"], scale: float, side: int):
    """Swin's relative positions of a picture or a window of ``side`` columns."""
    down = mr.row_index // side - mr.col_index // side + (mr.num_cols // side - 1)
    right = mr.row_index % side - mr.col_index % side + (side - 1)
    return mr.softmax_mean(q @ k * scale + mr.lookup(bias, down * (2 * side - 1) + right), v)


@mr.op
@no_type_check
def block_attention(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"], bias: mr.Table["n"], scale: float):
    """A bias for every block of pairs."""
    across = (mr.num_cols + BLOCK - 1) // BLOCK
    return mr.softmax_mean(q @ k * scale + mr.lookup(bias, (mr.row_index // BLOCK) * across + mr.col_index // BLOCK), v)


@mr.op
@no_type_check
def graph_attention(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"], bias: mr.Table["n"], hops: mr.Pair, scale: float):
    """Graphormer: a bias by the distance of two nodes."""
    return mr.softmax_mean(q @ k * scale + mr.lookup(bias, hops), v)


def _with_table(entries: int, shape: tuple[int, ...], *batch: int) -> Callable[[], list[torch.Tensor]]:
    heads = batch or (shape[1],)
    return lambda: [*qkv(*shape), torch.randn(*heads, entries, device="cuda")]


@functools.cache
def _compiled(function: Callable) -> Callable:
    """Compiled when it is first called: to import the compiler takes seconds."""
    return torch.compile(function, dynamic=False)


def _relative_flex(q, k, v, bias):
    """The same by FlexAttention, whose gradient of the table is by atomics. Its own tiles are too large."""
    from torch.nn.attention.flex_attention import flex_attention

    tiles: Any = dict(BLOCK_M=64, BLOCK_N=64, BLOCK_M1=32, BLOCK_N1=64, BLOCK_M2=64, BLOCK_N2=32)
    score = lambda s, b, h, i, j: s + bias[h, i - j + S - 1]
    return _compiled(flex_attention)(q, k, v, score_mod=score, kernel_options=tiles)


def _gathered(index: torch.Tensor) -> Callable:
    """As users have it: the bias of every pair, read from the table beforehand, for torch's own attention."""
    return lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, index].to(q.dtype))


def tables() -> Iterator[Work]:
    """Attention with learned tables beside our plain form of the same pairs. The bar is 1.2 with the gradient of the
    table."""
    full, narrow = (4, H, S, D), (4, 32, S, 64)
    plain: dict[str, Callable] = {"our plain attention": lambda q, k, v, bias: ops.attention(q, k, v)}
    causal: dict[str, Callable] = {"our causal attention": lambda q, k, v, bias: ops.attention(q, k, v, causal=True)}
    relative = lambda q, k, v, bias: relative_attention(q, k, v, bias, q.shape[-1] ** -0.5)
    flex: dict[str, Callable] = {"Flex": _relative_flex}
    yield Work("attention, relative positions", relative, plain | flex, _with_table(2 * S - 1, full))
    yield Work("attention, relative positions D64", relative, plain, _with_table(2 * S - 1, narrow))
    own = _with_table(2 * S - 1, full, 4, H)
    yield Work("attention, relative positions, a table of each batch element", relative, plain, own)
    ours = lambda q, k, v, bias: causal_relative_attention(q, k, v, bias, D**-0.5)
    yield Work("attention, relative positions, causal", ours, causal, _with_table(S, full))
    ours = lambda q, k, v, bias: picture_attention(q, k, v, bias, D**-0.5, SIDE)
    yield Work(f"attention, picture {SIDE}×{SIDE}", ours, plain, _with_table((2 * SIDE - 1) ** 2, full))
    ours = lambda q, k, v, bias: block_attention(q, k, v, bias, D**-0.5)
    yield Work(f"attention, map of blocks {BLOCK}×{BLOCK}", ours, plain, _with_table((S // BLOCK) ** 2, full))
    window = torch.arange(64, device="cuda")
    down, right = (a.unsqueeze(-1) - a + 7 for a in (window // 8, window % 8))
    dense = {"torch, gathered bias": _gathered(down * 15 + right)}
    ours = lambda q, k, v, bias: picture_attention(q, k, v, bias, 32**-0.5, 8)
    yield Work("attention, windows 8×8 D32", ours, plain | dense, _with_table(225, (4096, 8, 64, 32)))
    hops = torch.randint(0, 32, (1024, 1024), device="cuda")
    ours = lambda q, k, v, bias: graph_attention(q, k, v, bias, hops, 64**-0.5)
    dense = {"torch, gathered bias": _gathered(hops)}
    yield Work("attention, table[d] of a graph of 1024 D64", ours, plain | dense, _with_table(32, (16, 16, 1024, 64)))


def attention_statistics() -> Iterator[Work]:
    """Statistics of attention's weights beside our plain attention; results side by side, so that they are one tensor,
    for both. The bar is 1.3 of plain attention, forward and with gradients."""
    padded = lambda q, k, v: F.pad(ops.attention(q, k, v), (0, 2))

    def rows(q, k, v):
        found: Any = ops.attention_statistics(q, k, v, statistics=("entropy", "distance"))
        return torch.cat((found.values, torch.stack((found.entropy, found.distance), -1).to(q.dtype)), -1)

    yield Work("attention, entropy, distance", rows, {"our plain attention": padded}, qkv)
    sums = lambda q, k: ops.attention_statistics(q, k, statistics=("column_sums",)).column_sums
    plain = {"our plain attention": lambda q, k: ops.attention(q, k, k)}
    yield Work("attention, column sums alone", sums, plain, lambda: qkv()[:2])
    teacher = qkv()[:2]
    kl = lambda q, k: ops.attention_kl(q, k, *teacher)
    yield Work("attention, divergence from a teacher", kl, plain, lambda: qkv()[:2])


@mr.op
@no_type_check
def hamming_neighbours(x: mr.Row["w"], y: mr.Col["w"]):
    return mr.topk(-mr.popcount(x ^ y, bits=32).sum().float(), 10).values


def _chunked_hamming(x, y):
    """Of bits as bfloat16: what tensor cores make of it, in chunks of columns."""
    shifts = torch.arange(32, device=x.device)
    signs = [(((t[:, :, None] >> shifts) & 1) * 2 - 1).flatten(1).bfloat16() for t in (x, y)]
    found = [(signs[0] @ part.mT).topk(10).values for part in signs[1].split(1 << 16)]
    return torch.cat(found, 1).topk(10).values


def packed_codes() -> Iterator[Work]:
    """Binary codes of 256 bits in eight words."""
    codes = lambda n: torch.randint(-(2**31), 2**31, (n, 8), device="cuda").int()
    peers = {"chunked torch, unpacked": _chunked_hamming}
    make = lambda: [codes(4096), codes(10**6)]
    yield Work("10 nearest by Hamming 4096×10⁶×256 bits", hamming_neighbours, peers, make, forward_only=True)


@mr.op
@no_type_check
def best_products(x: mr.Row["d"], y: mr.Col["d"], k: int):
    return mr.topk(x @ y, k)


def _chunked_best(x, y, k):
    return torch.cat([(part @ y.mT).topk(k).values for part in x.split(LIST_ROWS)])


def _chunked_nearest(x, y, k):
    return torch.cat([torch.cdist(part, y).topk(k, largest=False).values for part in x.split(LIST_ROWS)])


LIST_ROWS = 256  # of the chunked torch form: 1 GB of float32 at a time


def long_lists() -> Iterator[Work]:
    """The best of a million columns, beside torch in chunks of rows: from panels of products (bfloat16, 64 and 512
    features) and from panels that a generated kernel writes (distances in three dimensions)."""
    for k in (256, 2048):
        for d in (64, 512):
            ours = lambda x, y, k=k: best_products(x, y, k).values
            peer = lambda x, y, k=k: _chunked_best(x, y, k)
            name = f"best {k} of products 4096×1000000 D{d}"
            yield Work(name, ours, {"chunked torch": peer}, made((4096, d), (1_000_000, d)), forward_only=True)
        args = lambda: [torch.randn(n, 3, device="cuda") for n in (4096, 1_000_000)]
        ours = lambda x, y, k=k: ops.knn(x, y, k).values
        peer = lambda x, y, k=k: _chunked_nearest(x, y, k)
        name = f"nearest {k} of 4096×1000000 D3 float32"
        yield Work(name, ours, {"chunked torch": peer}, args, forward_only=True)


INDEXER = ((4096, 32, 128), (4096, 32), (32768, 128))  # several queries and weights a row, one key a column
INDEXER_ROWS = 256  # of the chunked torch form: 0.5 GB of products at a time


def _chunked_scores(q, w, k):
    """The scores of a few rows at a time, which alone are M × N."""
    for queries, weights in zip(q.split(INDEXER_ROWS), w.split(INDEXER_ROWS), strict=True):
        yield torch.einsum("mhn,mh->mn", torch.relu(queries @ k.mT), weights)


def _chunked_partition(q, w, k):
    one = lambda *given: torch.logsumexp(next(_chunked_scores(*given)).float(), -1)
    parts = zip(q.split(INDEXER_ROWS), w.split(INDEXER_ROWS), strict=True)
    return torch.cat([checkpoint(one, *part, k, use_reentrant=False) for part in parts])


class OwnAttention(mr.Monoid):
    """Attention's monoid as a user writes it: its vectors are held per pair, its gradient is derived from the trace."""

    z: mr.Scalar = -torch.inf
    v: mr.Vector = 0.0

    def combine(a, b):
        z = torch.logaddexp(a.z, b.z)
        return OwnAttention(z=z, v=a.v * torch.exp(a.z - z) + b.v * torch.exp(b.z - z))


class OwnVariance(mr.Monoid):
    """A monoid whose gradient comes from combine with all other pairs."""

    n: mr.Scalar = 0.0
    mean: mr.Scalar = 0.0
    m2: mr.Scalar = 0.0
    domain = {"n": mr.algebra.Domain(low=0.0), "m2": mr.algebra.Domain(low=0.0)}

    def combine(a, b):
        n = a.n + b.n
        gap, some = b.mean - a.mean, torch.where(n == 0, 1.0, n)
        return OwnVariance(n=n, mean=a.mean + gap * b.n / some, m2=a.m2 + b.m2 + gap * gap * a.n * b.n / some)


@mr.op
@no_type_check
def indexer_partition(q: mr.Row["h", "f"], w: mr.Row["h"], k: mr.Col["f"]):
    return mr.logsumexp((w * torch.relu(q @ k)).sum())


def indexers() -> Iterator[Work]:
    """Scores of several heads, beside torch in chunks of rows: the best 2048 of each row, and a softmax's gradients."""
    for best in (64, 2048):
        ours = lambda q, w, k, best=best: ops.lightning_indexer(q, k, w, best).values
        peer = lambda q, w, k, best=best: torch.cat([s.topk(best).values for s in _chunked_scores(q, w, k)])
        name = f"lightning indexer 4096×32768 H32 D128, best {best}"
        yield Work(name, ours, {"chunked torch": peer}, made(*INDEXER), forward_only=True)
    peers = {"chunked torch": _chunked_partition}
    yield Work("indexer scores, logsumexp 4096×32768 H32 D128", indexer_partition, peers, made(*INDEXER))


@mr.op
@no_type_check
def own_attention(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"]):
    return mr.reduce(OwnAttention, z=q @ k, v=v).v


@mr.op
@no_type_check
def own_variance(x: mr.Row["d"], y: mr.Col["d"]):
    found = mr.reduce(OwnVariance, n=1.0, mean=x @ y, m2=0.0)
    return found.m2 / found.n


@mr.op
@no_type_check
def variance(x: mr.Row["d"], y: mr.Col["d"]):
    return mr.var(x @ y, correction=0)


def _in_torch(op: Callable) -> Callable:
    def run(*args):
        with mr.use(engine="eager"):
            return op(*args)

    return run


def own_monoids() -> Iterator[Work]:
    """Monoids of a user's own, beside the same op tile by tile in torch and the library's own reduction."""
    for d in (16, 64):
        vectors = made(*[(8192, d)] * 3)
        peers = {
            "tiles in torch": _in_torch(own_attention),
            "mr.softmax_mean": lambda q, k, v: ops.attention(q, k, v, scale=1.0),
        }
        yield Work(f"monoid with vectors 8192×8192 D{d}", own_attention, peers, vectors)
    peers = {"mr.var": variance}
    yield Work("gradient by all others 8192×8192 D64", own_variance, peers, made((8192, 64), (8192, 64)))


@mr.op
@no_type_check
def best_mean(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"], best: int):
    return mr.topk_mean(q @ k, v, best)


@mr.op
@no_type_check
def best_labels(x: mr.Row["d"], y: mr.Col["d"], label: mr.Col, best: int):
    return mr.topk(x @ y, best).gather(label)


def _chunked_best_mean(q, k, v, best):
    def one(part, k, v):
        found = (part @ k.mT).topk(best)
        weights = torch.softmax(found.values.float(), -1).to(v.dtype)
        return (weights.unsqueeze(-2) @ v[found.indices]).squeeze(-2)

    return torch.cat([checkpoint(one, part, k, v, use_reentrant=False) for part in q.split(LIST_ROWS)])


def winners() -> Iterator[Work]:
    """What the best columns hold: a softmax over them alone, and their labels, beside torch in chunks of rows."""
    sizes = (4096, 64), (65536, 64), (65536, 64)
    for best in (32, 256):
        ours = lambda q, k, v, best=best: best_mean(q, k, v, best)
        peers = {"chunked torch": lambda q, k, v, best=best: _chunked_best_mean(q, k, v, best)}
        yield Work(f"mean of the best {best} of 4096×65536 D64", ours, peers, made(*sizes))
    label = torch.randn(65536, device="cuda", dtype=torch.bfloat16)
    gathered = lambda x, y: torch.cat([label[(part @ y.mT).topk(32).indices] for part in x.split(LIST_ROWS)])
    labelled = lambda x, y: best_labels(x, y, label, 32)
    name = "labels of the best 32 of 4096×65536 D64"
    yield Work(name, labelled, {"chunked torch": gathered}, made(*sizes[:2]), forward_only=True)


def _dense_sample(x, w, top_p, min_p):
    """As decoders do it, of all logits: sorted, summed, cut, drawn."""
    p = torch.softmax((x @ w.mT).float(), -1)
    if min_p:
        p = torch.where(p >= min_p * p.amax(-1, keepdim=True), p, 0.0)
    if top_p:
        ordered, at = p.sort(-1, descending=True)
        ordered = torch.where(ordered.cumsum(-1) - ordered < top_p, ordered, 0.0)
        return at.gather(-1, torch.multinomial(ordered, 1))
    return torch.multinomial(p, 1)


def truncated_sampling() -> Iterator[Work]:
    """One token a row of a vocabulary, beside ``torch.compile`` of the dense form."""
    vectors = lambda: [torch.randn(n, 2048, device="cuda", dtype=torch.bfloat16) * 0.05 for n in (256, 128256)]
    for top_p, min_p in ((0.9, None), (None, 0.05), (0.5, 0.05)):
        ours = lambda x, w, p=top_p, m=min_p: ops.linear_sample(x, w, 7, top_p=p, min_p=m).index
        dense = lambda x, w, p=top_p, m=min_p: _compiled(_dense_sample)(x, w, p, m)
        named = ", ".join(f"{n} {v}" for n, v in (("top-p", top_p), ("min-p", min_p)) if v)
        yield Work(
            f"sample, {named} 256×128256 D2048",
            ours,
            {"torch.compile": dense},
            vectors,
            {"engine": "auto"},
            forward_only=True,
        )


def works() -> Iterator[Work]:
    """All of them."""
    for family in (
        tables, attention_statistics, indexers, long_lists, winners, truncated_sampling, packed_codes, own_monoids,
    ):  # fmt: skip
        yield from family()
