"""What is timed on a GPU besides plain attention, each beside what users would pick instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import monoidreduce as mr
from monoidreduce import ops

B, H, S, D = 4, 16, 4096, 128
CHUNK = 4096  # rows of the chunked torch forms: 1.6 GB of distances at a time


@dataclass(frozen=True)
class Work:
    """A call of ours, those of peers, and their inputs."""

    name: str
    ours: Callable
    peers: Mapping[str, Callable]
    args: Callable[[], list[torch.Tensor]]
    how: dict[str, Any] = field(default_factory=dict)  # for mr.use
    forward_only: bool = False


def _qkv() -> list[torch.Tensor]:
    return [torch.randn(B, H, S, D, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def _documents() -> torch.Tensor:
    """Packed documents of 200 to 1,800 tokens."""
    gen = torch.Generator().manual_seed(0)
    ends = torch.cumsum(torch.randint(200, 1800, (64,), generator=gen), 0)
    return torch.bucketize(torch.arange(S), ends, right=True).cuda()


def _flex(condition: Callable | None = None, score: Callable | None = None) -> Callable:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    mask = create_block_mask(condition, None, None, S, S, device="cuda") if condition else None
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, score_mod=score)


def attention_variants() -> Iterator[Work]:
    """Masks beside FlexAttention, whose mask is made beforehand; what is added to scores beside our own plain form."""
    near = lambda b, h, i, j: (i >= j) & (i - j < 1024)
    window = lambda q, k, v: ops.attention(q, k, v, window=(1023, 0))
    yield Work("attention, sliding window 1024", window, {"Flex": _flex(near)}, _qkv)
    ids = _documents()
    same = lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)
    packed = lambda q, k, v: ops.attention(q, k, v, causal=True, documents=ids)
    yield Work("attention, packed documents, causal", packed, {"Flex": _flex(same)}, _qkv)
    plain = {"our plain attention": ops.attention}
    yield Work("attention, dropout 0.1", lambda q, k, v: ops.attention(q, k, v, dropout_p=0.1, seed=7), plain, _qkv)
    yield Work("attention, soft cap 30", lambda q, k, v: ops.attention(q, k, v, softcap=30.0), plain, _qkv)
    slopes = torch.logspace(-1, -8, H, base=2.0, device="cuda")
    yield Work("attention, ALiBi", lambda q, k, v: ops.attention(q, k, v, alibi_slopes=slopes), plain, _qkv)
    peers = {"our plain attention": lambda q, k, v, bias: ops.attention(q, k, v), "Flex": _relative_flex()}
    yield Work("attention, relative positions", relative_attention, peers, _qkv_and_table)


@mr.op
@no_type_check
def relative_attention(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"], bias: mr.Table["n"]):
    return mr.softmax_mean(q @ k * D**-0.5 + mr.lookup(bias, mr.row_index - mr.col_index + mr.num_cols - 1), v)


def _qkv_and_table() -> list[torch.Tensor]:
    return [*_qkv(), torch.randn(H, 2 * S - 1, device="cuda")]


def _relative_flex() -> Callable:
    """The same by FlexAttention, whose gradient of the table is by atomics. Its own tiles are too large."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    tiles: Any = dict(BLOCK_M=64, BLOCK_N=64, BLOCK_M1=32, BLOCK_N1=64, BLOCK_M2=64, BLOCK_N2=32)

    def run(q, k, v, bias):
        return compiled(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[h, i - j + S - 1], kernel_options=tiles)

    return run


def attention_statistics() -> Iterator[Work]:
    """Statistics of attention's weights beside our plain attention; results side by side, so that they are one tensor,
    for both. The bar is 1.3 of plain attention, forward and with gradients."""
    padded = lambda q, k, v: F.pad(ops.attention(q, k, v), (0, 2))

    def rows(q, k, v):
        found: Any = ops.attention_statistics(q, k, v, statistics=("entropy", "distance"))
        return torch.cat((found.values, torch.stack((found.entropy, found.distance), -1).to(q.dtype)), -1)

    yield Work("attention, entropy, distance", rows, {"our plain attention": padded}, _qkv)
    sums = lambda q, k: ops.attention_statistics(q, k, statistics=("column_sums",)).column_sums
    plain = {"our plain attention": lambda q, k: ops.attention(q, k, k)}
    yield Work("attention, column sums alone", sums, plain, lambda: _qkv()[:2])
    teacher = _qkv()[:2]
    kl = lambda q, k: ops.attention_kl(q, k, *teacher)
    yield Work("attention, divergence from a teacher", kl, plain, lambda: _qkv()[:2])


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


def _made(*shapes: tuple[int, ...]) -> Callable[[], list[torch.Tensor]]:
    return lambda: [torch.randn(*s, device="cuda", dtype=torch.bfloat16) * s[-1] ** -0.25 for s in shapes]


def perceptrons() -> Iterator[Work]:
    """Two-layer perceptrons and contrastive losses, beside ``torch.compile`` of the dense form."""
    compiled = lambda f: {"torch.compile": torch.compile(f, dynamic=False)}
    square, long = ((16384, 128),) * 3, ((16384, 64), (65536, 64), (65536, 64))
    relu, gelu = (lambda x, p, q: torch.relu(x @ p.mT) @ q), (lambda x, p, q: F.gelu(x @ p.mT, approximate="tanh") @ q)
    swiglu = lambda x, g, u, d: (F.silu(x @ g.mT) * (x @ u.mT)) @ d
    yield Work("MLP relu 16384×16384 D128", ops.mlp, compiled(relu), _made(*square))
    ours = lambda x, p, q: ops.mlp(x, p, q, activation="gelu_tanh")
    yield Work("MLP gelu (tanh) 16384×16384 D128", ours, compiled(gelu), _made(*square))
    yield Work("SwiGLU 16384×16384 D128", ops.gated_mlp, compiled(swiglu), _made(*square, (16384, 128)))
    yield Work("MLP relu 16384×65536 D64", ops.mlp, compiled(relu), _made(*long))
    for d in (128, 256):
        yield Work(f"contrastive N32768 D{d}", contrastive, compiled(dense_contrastive), _made((32768, d), (32768, d)))


@mr.op
@no_type_check
def contrastive(x: mr.Row["d"], y: mr.Col["d"]):
    s = x @ y * 14.0
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == mr.row_index, s, 0.0))


def dense_contrastive(x, y):
    return F.cross_entropy((x @ y.mT).float() * 14.0, torch.arange(len(x), device=x.device), reduction="none")


def _chunked_gaussian(x, y, b):
    """Every chunk is computed again in the backward: their distances together would take 40 GB, three times over."""
    one = lambda part: torch.exp(-torch.cdist(part, y).square()) @ b
    return torch.cat([checkpoint(one, part, use_reentrant=False) for part in x.split(CHUNK)])


def _chunked_knn(x, y):
    return torch.cat([torch.cdist(part, y).topk(10, largest=False).values for part in x.split(CHUNK)])


def clouds() -> Iterator[Work]:
    """Kernel sums and nearest neighbours in float32, beside torch in chunks of rows."""
    n = 100_000
    for d, precision in ((3, ""), (64, ""), (64, "tf32x3")):
        args = lambda d=d: [torch.randn(n, d, device="cuda") for _ in range(2)]
        weighted = lambda d=d: [*(torch.randn(n, d, device="cuda") for _ in range(2)), torch.randn(n, 1, device="cuda")]
        how = {"precision": precision} if precision else {}
        note = f", {precision}" if precision else ""
        gaussian = lambda x, y, b: ops.kernel_sum(x, y, b, bandwidth=0.5**0.5)
        peers: dict[str, Callable] = {"chunked torch": _chunked_gaussian}
        yield Work(f"Gaussian sum N100000 D{d} float32{note}", gaussian, peers, weighted, how)
        knn = lambda x, y: ops.knn(x, y, 10).values
        peers = {"chunked torch": _chunked_knn}
        yield Work(f"10 nearest N100000 D{d} float32{note}", knn, peers, args, how, forward_only=True)


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
            yield Work(name, ours, {"chunked torch": peer}, _made((4096, d), (1_000_000, d)), forward_only=True)
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
        yield Work(name, ours, {"chunked torch": peer}, _made(*INDEXER), forward_only=True)
    peers = {"chunked torch": _chunked_partition}
    yield Work("indexer scores, logsumexp 4096×32768 H32 D128", indexer_partition, peers, _made(*INDEXER))


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
        vectors = _made(*[(8192, d)] * 3)
        peers = {
            "tiles in torch": _in_torch(own_attention),
            "mr.softmax_mean": lambda q, k, v: ops.attention(q, k, v, scale=1.0),
        }
        yield Work(f"monoid with vectors 8192×8192 D{d}", own_attention, peers, vectors)
    peers = {"mr.var": variance}
    yield Work("gradient by all others 8192×8192 D64", own_variance, peers, _made((8192, 64), (8192, 64)))


def _int8(x: torch.Tensor) -> list[torch.Tensor]:
    """Vectors in int8 and the scale of each."""
    scale = x.abs().amax(-1).float() / 127
    return [(x / scale.unsqueeze(-1)).round().to(torch.int8), scale]


_FP8 = 6.0 / 448  # one scale for normal numbers


def stored_operands() -> Iterator[Work]:
    """Vectors stored in 8 bits, beside the same layers of ours on the vectors that are stored."""
    ours: Callable[..., Any]

    def attention_args() -> list[torch.Tensor]:
        plain = _qkv()
        return [*((t / _FP8).to(torch.float8_e4m3fn).view(torch.int8) for t in plain), *plain]

    def fp8(*args: torch.Tensor, **options: Any) -> torch.Tensor:
        stored = (mr.scaled(t.view(torch.float8_e4m3fn), _FP8, wide=torch.bfloat16) for t in args[:3])
        return ops.attention(*stored, **options)

    for name, options in (("", {}), (" causal", {"causal": True})):
        ours = lambda *args, options=options: fp8(*args, **options)
        peers: dict[str, Callable] = {"bfloat16": lambda *args, options=options: ops.attention(*args[3:], **options)}
        yield Work(f"FP8 attention S4096 D128{name}", ours, peers, attention_args, forward_only=True)

    def points() -> list[torch.Tensor]:
        x, y = (torch.randn(n, 128, device="cuda") for n in (4096, 1_000_000))
        return [*_int8(x), *_int8(y), x, y]

    ours = lambda x, s, y, t, *plain: ops.knn(mr.scaled(x, s), mr.scaled(y, t), 10).values
    peers = {"float32": lambda *args: ops.knn(*args[4:], 10).values}
    yield Work("INT8 10 nearest 4096×1000000 D128", ours, peers, points, forward_only=True)

    def cache() -> list[torch.Tensor]:
        q = torch.randn(16, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(16, 8, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        return [q, *_int8(k), *_int8(v), k, v]

    lengths = lambda q: torch.full((len(q),), 8192, device=q.device)
    ours = lambda q, k, s, v, t, *plain: ops.attention_decode(q, mr.scaled(k, s), mr.scaled(v, t), lengths(q))
    peers = {"bfloat16": lambda q, *args: ops.attention_decode(q, *args[4:], lengths(q))}
    yield Work("INT8 cache, decoding 16×32 of 8192 D128", ours, peers, cache, forward_only=True)

    def paged() -> list[torch.Tensor]:
        q, *_, k, v = cache()
        k, v = (t.transpose(1, 2).reshape(16 * 128, 64, 8, 128).contiguous() for t in (k, v))
        return [q, *_int8(k), *_int8(v), k, v, torch.randperm(16 * 128, device="cuda").view(16, 128)]

    pages = lambda q, table: mr.pages(table, lengths(q), page=64)
    ours = lambda q, k, s, v, t, *rest: ops.attention_paged(q, mr.scaled(k, s), mr.scaled(v, t), pages(q, rest[-1]))
    peers = {"bfloat16": lambda q, *args: ops.attention_paged(q, *args[4:6], pages(q, args[-1]))}
    yield Work("INT8 pages, decoding 16×32 of 8192 D128", ours, peers, paged, forward_only=True)

    def head() -> list[torch.Tensor]:
        x, w = (torch.randn(n, 2048, device="cuda", dtype=torch.bfloat16) / 7 for n in (4096, 128256))
        return [x, *_int8(w), w, torch.randint(0, 128256, (4096,), device="cuda")]

    ours = lambda x, w, s, plain, t: ops.linear_cross_entropy(x, mr.scaled(w, s), t)
    peers = {"bfloat16": lambda x, w, s, plain, t: ops.linear_cross_entropy(x, plain, t)}
    yield Work("INT8 vocabulary, loss 4096×128256 D2048", ours, peers, head, forward_only=True)

    def tokens() -> list[torch.Tensor]:
        q = torch.randn(32, 128, device="cuda", dtype=torch.bfloat16)
        d = torch.randn(8192, 128, 128, device="cuda", dtype=torch.bfloat16)
        return [*_int8(q), *_int8(d), q, d]

    ours = lambda q, s, d, t, *plain: ops.maxsim(mr.scaled(q, s), mr.scaled(d, t))
    peers = {"bfloat16": lambda *args: ops.maxsim(*args[4:])}
    yield Work("INT8 late interaction, 8192 documents of 128 tokens D128", ours, peers, tokens, forward_only=True)
