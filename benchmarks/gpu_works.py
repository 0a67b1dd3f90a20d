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


def qkv(*shape: int) -> list[torch.Tensor]:
    """Queries, keys and values, of the usual shape unless another is given."""
    return [torch.randn(shape or (B, H, S, D), device="cuda", dtype=torch.bfloat16) for _ in range(3)]


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
    yield Work("attention, sliding window 1024", window, {"Flex": _flex(near)}, qkv)
    ids = _documents()
    same = lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)
    packed = lambda q, k, v: ops.attention(q, k, v, causal=True, documents=ids)
    yield Work("attention, packed documents, causal", packed, {"Flex": _flex(same)}, qkv)
    plain = {"our plain attention": ops.attention}
    yield Work("attention, dropout 0.1", lambda q, k, v: ops.attention(q, k, v, dropout_p=0.1, seed=7), plain, qkv)
    yield Work("attention, soft cap 30", lambda q, k, v: ops.attention(q, k, v, softcap=30.0), plain, qkv)
    slopes = torch.logspace(-1, -8, H, base=2.0, device="cuda")
    yield Work("attention, ALiBi", lambda q, k, v: ops.attention(q, k, v, alibi_slopes=slopes), plain, qkv)


def made(*shapes: tuple[int, ...]) -> Callable[[], list[torch.Tensor]]:
    """Vectors whose products have a standard deviation of one."""
    return lambda: [torch.randn(*s, device="cuda", dtype=torch.bfloat16) * s[-1] ** -0.25 for s in shapes]


def perceptrons() -> Iterator[Work]:
    """Two-layer perceptrons and contrastive losses, beside ``torch.compile`` of the dense form."""
    compiled = lambda f: {"torch.compile": torch.compile(f, dynamic=False)}
    square, long = ((16384, 128),) * 3, ((16384, 64), (65536, 64), (65536, 64))
    relu, gelu = (lambda x, p, q: torch.relu(x @ p.mT) @ q), (lambda x, p, q: F.gelu(x @ p.mT, approximate="tanh") @ q)
    swiglu = lambda x, g, u, d: (F.silu(x @ g.mT) * (x @ u.mT)) @ d
    yield Work("MLP relu 16384×16384 D128", ops.mlp, compiled(relu), made(*square))
    ours = lambda x, p, q: ops.mlp(x, p, q, activation="gelu_tanh")
    yield Work("MLP gelu (tanh) 16384×16384 D128", ours, compiled(gelu), made(*square))
    yield Work("SwiGLU 16384×16384 D128", ops.gated_mlp, compiled(swiglu), made(*square, (16384, 128)))
    yield Work("MLP relu 16384×65536 D64", ops.mlp, compiled(relu), made(*long))
    for d in (128, 256):
        yield Work(f"contrastive N32768 D{d}", contrastive, compiled(dense_contrastive), made((32768, d), (32768, d)))


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


def int8_with_scales(x: torch.Tensor) -> list[torch.Tensor]:
    """Vectors in int8 and the scale of each."""
    scale = x.abs().amax(-1).float() / 127
    return [(x / scale.unsqueeze(-1)).round().to(torch.int8), scale]


_FP8 = 6.0 / 448  # one scale for normal numbers


def stored_operands() -> Iterator[Work]:
    """Vectors stored in 8 bits, beside the same layers of ours on the vectors that are stored."""
    ours: Callable[..., Any]

    def attention_args() -> list[torch.Tensor]:
        plain = qkv()
        return [*((t / _FP8).to(torch.float8_e4m3fn).view(torch.int8) for t in plain), *plain]

    def fp8(*args: torch.Tensor, **options: Any) -> torch.Tensor:
        q, k, v = (mr.scaled(t.view(torch.float8_e4m3fn), _FP8, wide=torch.bfloat16) for t in args[:3])
        return ops.attention(q, k, v, **options)

    for name, options in (("", {}), (" causal", {"causal": True})):
        ours = lambda *args, options=options: fp8(*args, **options)
        peers: dict[str, Callable] = {"bfloat16": lambda *args, options=options: ops.attention(*args[3:], **options)}
        yield Work(f"FP8 attention S4096 D128{name}", ours, peers, attention_args, forward_only=True)

    def points() -> list[torch.Tensor]:
        x, y = (torch.randn(n, 128, device="cuda") for n in (4096, 1_000_000))
        return [*int8_with_scales(x), *int8_with_scales(y), x, y]

    ours = lambda x, s, y, t, *plain: ops.knn(mr.scaled(x, s), mr.scaled(y, t), 10).values
    peers = {"float32": lambda *args: ops.knn(args[4], args[5], 10).values}
    yield Work("INT8 10 nearest 4096×1000000 D128", ours, peers, points, forward_only=True)

    def cache() -> list[torch.Tensor]:
        q = torch.randn(16, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(16, 8, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        return [q, *int8_with_scales(k), *int8_with_scales(v), k, v]

    lengths = lambda q: torch.full((len(q),), 8192, device=q.device)
    ours = lambda q, k, s, v, t, *plain: ops.attention_decode(q, mr.scaled(k, s), mr.scaled(v, t), lengths(q))
    peers = {"bfloat16": lambda q, *args: ops.attention_decode(q, args[4], args[5], lengths(q))}
    yield Work("INT8 cache, decoding 16×32 of 8192 D128", ours, peers, cache, forward_only=True)

    def paged() -> list[torch.Tensor]:
        q, *_, k, v = cache()
        k, v = (t.transpose(1, 2).reshape(16 * 128, 64, 8, 128).contiguous() for t in (k, v))
        return [
            q,
            *int8_with_scales(k),
            *int8_with_scales(v),
            k,
            v,
            torch.randperm(16 * 128, device="cuda").view(16, 128),
        ]

    pages = lambda q, table: mr.pages(table, lengths(q), page=64)
    ours = lambda q, k, s, v, t, *rest: ops.attention_paged(q, mr.scaled(k, s), mr.scaled(v, t), pages(q, rest[-1]))
    peers = {"bfloat16": lambda q, *args: ops.attention_paged(q, args[4], args[5], pages(q, args[-1]))}
    yield Work("INT8 pages, decoding 16×32 of 8192 D128", ours, peers, paged, forward_only=True)

    def head() -> list[torch.Tensor]:
        x, w = (torch.randn(n, 2048, device="cuda", dtype=torch.bfloat16) / 7 for n in (4096, 128256))
        return [x, *int8_with_scales(w), w, torch.randint(0, 128256, (4096,), device="cuda")]

    ours = lambda x, w, s, plain, t: ops.linear_cross_entropy(x, mr.scaled(w, s), t)
    peers = {"bfloat16": lambda x, w, s, plain, t: ops.linear_cross_entropy(x, plain, t)}
    yield Work("INT8 vocabulary, loss 4096×128256 D2048", ours, peers, head, forward_only=True)

    def tokens() -> list[torch.Tensor]:
        q = torch.randn(32, 128, device="cuda", dtype=torch.bfloat16)
        d = torch.randn(8192, 128, 128, device="cuda", dtype=torch.bfloat16)
        return [*int8_with_scales(q), *int8_with_scales(d), q, d]

    ours = lambda q, s, d, t, *plain: ops.maxsim(mr.scaled(q, s), mr.scaled(d, t))
    peers = {"bfloat16": lambda *args: ops.maxsim(*args[4:])}
    yield Work("INT8 late interaction, 8192 documents of 128 tokens D128", ours, peers, tokens, forward_only=True)
