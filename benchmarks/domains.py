"""Folds over listed columns: blocks, selected blocks, packed sequences, pages, edges and sampled negatives; many best,
one's own monoid of vectors and the gradient of numbers per pair over blocks.

    python -m benchmarks.domains --out DIR [--device cpu] [--only WORK ...] [--budget SECONDS] [--commit C]

Each work is one call of ours beside what people use for it: FlexAttention with the same blocks (making its mask is not
counted), fla's native sparse attention, FlashAttention's varlen, gathers in plain torch, also compiled; of pages, the
share of the memory bandwidth by the bytes that are read. Before anything is timed, results are compared. Times are
taken in turns. On a CPU the works are the same and smaller, in float32, beside plain torch.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import itertools
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr

from .cpu import commit, environment
from .gpu import _environment, bench
from .measure import best_times, peak_growth, peak_on_gpu
from .shapes import BANDWIDTH

ROUNDS = 3
Call = Callable[..., Tensor]


@dataclass(frozen=True)
class Work:
    """A call of tensors by several contenders, ours first. ``read``: bytes that it must read, where that bounds it."""

    name: str
    args: tuple[Tensor, ...]
    calls: dict[str, Call]
    backward: bool = True
    read: int = 0
    bars: tuple[float, ...] = ()  # of the time of the first peer: forward, and with the backward


def _draw(device: str, *shape: int, scale: float = 1.0) -> Tensor:
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    return (torch.randn(*shape, device=device) * scale).to(kind)


def _flex(index: Tensor, count: Tensor, size: int, heads: int) -> Call:
    """FlexAttention on lists of whole blocks [rows, most], compiled."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(count)[None, None], torch.zeros_like(index)[None, None], count[None, None], index[None, None],
        BLOCK_SIZE=(size, size),
    )  # fmt: skip
    flex = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: flex(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != heads)


def _masked(domain: Any) -> Call:
    """Dense attention with the lists as a mask."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = domain.mask(q.shape[-2], k.shape[-2]) > 0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=q.shape[1] != k.shape[1])

    return call


def _over_blocks(device: str, name: str, sizes: tuple[int, ...], each: int, share: float, bars: tuple) -> Work:
    batch, heads, shared, length, d = sizes
    blocks = length // each
    kept = max(1, round(blocks * share))
    index = torch.rand(blocks, blocks, device=device).argsort(1)[:, :kept].sort(1).values.int().contiguous()
    count = torch.full((blocks,), kept, dtype=torch.int32, device=device)
    whole = torch.zeros(blocks, blocks, dtype=torch.int32, device=device)
    whole[:, :kept] = index
    domain = mr.blocks(index, rows=each, cols=each)
    args = tuple(_draw(device, batch, h, length, d) for h in (heads, shared, shared))
    calls: dict[str, Call] = {"ours": lambda q, k, v: mr.ops.attention(q, k, v, cols=domain, enable_gqa=True)}
    peer = {"Flex": _flex(whole, count, each, shared)} if device == "cuda" else {"masked SDPA": _masked(domain)}
    return Work(name, args, calls | peer, bars=bars)


def _selected(device: str, name: str, shared: int) -> Work:
    """Every block of queries sees its own block and 15 before it: as native sparse attention selects them."""
    heads, length, d, each, most = (32, 32768, 128, 64, 16) if device == "cuda" else (4, 1024, 32, 32, 4)
    blocks = length // each
    before = torch.rand(blocks, blocks, device=device).tril(-1)
    before.fill_diagonal_(2.0)  # the own block comes first
    index = before.argsort(1, descending=True)[:, :most].int().contiguous()
    count = torch.arange(1, blocks + 1, device=device, dtype=torch.int32).clamp(max=most)
    domain = mr.blocks(index, count, rows=each, cols=each)
    args = tuple(_draw(device, 1, length, h, d).transpose(1, 2) for h in (heads, shared, shared))
    calls: dict[str, Call] = {
        "ours": lambda q, k, v: mr.ops.attention(q, k, v, cols=domain, causal=True, enable_gqa=True)
    }
    if device == "cpu":
        seen = (domain.mask(length, length) > 0).tril()
        calls["masked SDPA"] = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    elif (nsa := _nsa(index, count, shared, each)) is not None:
        calls["NSA of fla"] = nsa
    return Work(name, args, calls, bars=(1.0, 1.0))


def _nsa(index: Tensor, count: Tensor, shared: int, each: int) -> Call | None:
    """fla's kernels, which take a list per token and at least 16 query heads a key head."""
    try:
        attend = importlib.import_module("fla.ops.nsa.parallel").ParallelNSAFunction.apply
    except ImportError:
        return None
    lists = index.long().repeat_interleave(each, 0)[None, :, None].expand(-1, -1, shared, -1).contiguous()
    counts = count.long().repeat_interleave(each)[None, :, None].expand(-1, -1, shared).contiguous()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[1] < 16 * shared:
            raise ValueError("16 query heads a key head, at least")
        given = (t.transpose(1, 2) for t in (q, k, v))
        return attend(*given, lists, counts, each, q.shape[-1] ** -0.5, None).transpose(1, 2)

    return call


def _packed(device: str, causal: bool = False) -> Work:
    name = "jagged, causal" if causal else "jagged"
    sequences, low, high, heads, d = (64, 200, 8000, 16, 128) if device == "cuda" else (16, 50, 1200, 4, 64)
    make = torch.Generator().manual_seed(0)
    lengths = torch.randint(low, high + 1, (sequences,), generator=make)
    ends = [0, *lengths.cumsum(0).tolist()]
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    domain = mr.jagged(offsets)
    args = tuple(_draw(device, 1, heads, ends[-1], d) for _ in range(3))
    ours = functools.partial(mr.ops.attention, is_causal=causal, cols=domain)
    calls: dict[str, Call] = {"ours": ours}
    if device == "cpu":
        attend = functools.partial(F.scaled_dot_product_attention, is_causal=causal)
        calls["SDPA, one by one"] = lambda q, k, v: torch.cat(
            [attend(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b]) for a, b in itertools.pairwise(ends)], 2
        )
        return Work(name, args, calls, bars=(1.0, 1.0))
    if not causal:
        calls["Flex"] = _flex_documents(lengths.to(device), ends[-1])
    if (flash := _flash()) is not None:
        calls["FA4 varlen"] = _varlen(flash, offsets, int(lengths.max()), causal)
    return Work(name, args, calls, bars=(0.75, 0.75))


def _flex_documents(lengths: Tensor, total: int) -> Call:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    document = torch.repeat_interleave(lengths)
    same = lambda b, h, i, j: document[i] == document[j]
    first = torch.arange(0, total, 128, device=document.device)
    low, high = document[first], document[(first + 127).clamp(max=total - 1)]  # of each block
    meet = (low[:, None] <= high) & (high[:, None] >= low)
    alone = (low == high) & (first + 128 <= total)
    full = meet & alone[:, None] & alone
    lists: list[Tensor] = []
    for kept in (meet & ~full, full):
        lists += [
            kept.sum(1)[None, None].int(),
            torch.argsort(kept.int(), dim=1, descending=True, stable=True)[None, None].int(),
        ]
    some, which, whole, these = lists
    mask = BlockMask.from_kv_blocks(
        some, which, whole, these, BLOCK_SIZE=(128, 128), mask_mod=same, seq_lengths=(total, total)
    )
    flex = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: flex(q, k, v, block_mask=mask)


def _flash() -> Call | None:
    """FlashAttention 4 for packed sequences and pages; None where it is not installed."""
    try:
        return importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    except (ImportError, AttributeError):
        return None


def _varlen(attend: Call, offsets: Tensor, longest: int, causal: bool) -> Call:
    sizes: dict[str, Any] = dict(cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest)
    sizes["causal"] = causal

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = attend(*(t[0].transpose(0, 1) for t in (q, k, v)), **sizes)
        return (found[0] if isinstance(found, tuple) else found).transpose(0, 1)[None]

    return call


def _flash_pages(attend: Call, domain: Any) -> Call:
    """One query a sequence: it does not split keys on this architecture."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given = q.transpose(1, 2), k, v  # [sequences, tokens, heads, features] and pages
        found = attend(*given, seqused_k=domain.lengths, page_table=domain.table)
        return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

    return call


def _paged(device: str) -> Work:
    sequences, low, high, heads, shared, d = (
        (64, 1024, 32768, 32, 8, 128) if device == "cuda" else (8, 256, 8192, 8, 2, 64)
    )
    page = 64
    make = torch.Generator().manual_seed(0)
    lengths = torch.randint(low, high + 1, (sequences,), generator=make)
    pages = -(-lengths // page)
    place = torch.randperm(int(pages.sum()), generator=make).int()
    table = torch.zeros(sequences, int(pages.max()), dtype=torch.int32)
    for s, (first, count) in enumerate(zip((pages.cumsum(0) - pages).tolist(), pages.tolist(), strict=True)):
        table[s, :count] = place[first : first + count]
    domain = mr.pages(table.to(device), lengths.int().to(device), page=page)
    q = _draw(device, sequences, heads, 1, d)
    k, v = (_draw(device, len(place), page, shared, d) for _ in range(2))

    def gathered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = domain.gather(k), domain.gather(v)
        seen = torch.arange(keys.shape[2], device=q.device) < domain.lengths.view(-1, 1, 1, 1)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)

    calls: dict[str, Call] = {
        "ours": lambda q, k, v: mr.ops.attention_paged(q, k, v, domain),
        "gather + SDPA": gathered,
    }
    if device == "cuda" and (flash := _flash()) is not None:
        calls["FA4 paged"] = _flash_pages(flash, domain)
    read = 2 * int(lengths.sum()) * shared * d * q.element_size()
    return Work("pages", (q, k, v), calls, backward=False, read=read, bars=(1.0,))


def _graph(device: str) -> Work:
    rows, d = (10**6, 64) if device == "cuda" else (20_000, 32)
    make = torch.Generator().manual_seed(0)
    degree = (20 + 15 * torch.randn(rows, generator=make)).round().clamp(min=0).long()
    pointer = torch.cat([torch.zeros(1, dtype=torch.long), degree.cumsum(0)]).to(device)
    index = torch.randint(0, rows, (int(pointer[-1]),), generator=make).to(device)
    owner = torch.repeat_interleave(degree.to(device))
    domain = mr.edges(pointer.int(), index.int())

    def scattered(target: Tensor, source: Tensor, values: Tensor) -> Tensor:
        s = F.leaky_relu(target[owner] + source[index], 0.2).float()
        top = torch.full((rows,), -torch.inf, device=s.device).scatter_reduce(0, owner, s.detach(), "amax")
        weight = torch.exp(s - top[owner])
        total = torch.zeros(rows, device=s.device).index_add(0, owner, weight)
        share = (weight / total[owner]).to(values.dtype)
        return torch.zeros(rows, values.shape[-1], dtype=values.dtype, device=s.device).index_add(
            0, owner, share[:, None] * values[index]
        )

    calls: dict[str, Call] = {
        "ours": lambda target, source, values: mr.ops.graph_attention(target, source, values, domain)
    }
    calls |= {"gather + scatter, compiled": torch.compile(scattered)} if device == "cuda" else {}
    calls |= {"gather + scatter": scattered}
    args = (_draw(device, rows), _draw(device, rows), _draw(device, rows, d))
    return Work("edges", args, calls, bars=(0.5, 0.5) if device == "cuda" else (1.0, 1.0))


@mr.op
def _log_total(x: mr.Row["d"], w: mr.Col["d"]):
    return mr.logsumexp(x @ w)


def _sampled(device: str) -> Work:
    rows, each, items, d = (8192, 2048, 10**7, 128) if device == "cuda" else (512, 128, 50_000, 64)
    chosen = torch.randint(0, items, (rows, each), device=device, dtype=torch.int32)
    domain = mr.edges.from_neighbours(chosen)
    gathered = lambda x, w: torch.bmm(w[chosen.long()], x.unsqueeze(-1)).squeeze(-1).float().logsumexp(-1)
    calls: dict[str, Call] = {"ours": lambda x, w: _log_total(x, w, cols=domain), "gather + bmm": gathered}
    args = (_draw(device, rows, d, scale=0.3), _draw(device, items, d, scale=0.3))
    return Work("sampled softmax", args, calls, backward=False, bars=(0.5,) if device == "cuda" else (1.0,))


def _drawn_blocks(device: str, rows: int, columns: int, each: int, kept: int) -> tuple[Any, Tensor]:
    """Lists of ``kept`` column blocks for each row block, and the columns of each row block, in order."""
    index = torch.rand(rows // each, columns // each, device=device).argsort(1)[:, :kept].sort(1).values
    columns_of = (index[:, :, None] * each + torch.arange(each, device=device)).flatten(1)
    return mr.blocks(index.int(), rows=each, cols=each), columns_of


@mr.op
def _best_logits(x: mr.Row["d"], w: mr.Col["d"], k: int):
    return mr.topk(x @ w, k).values


def _best(device: str, k: int) -> Work:
    """The best of the columns that are listed, more than a kernel keeps in registers."""
    rows, columns, each, kept, d = (4096, 32768, 128, 32, 128) if device == "cuda" else (512, 4096, 64, 8, 32)
    domain, columns_of = _drawn_blocks(device, rows, columns, each, kept)

    def gathered(x: Tensor, w: Tensor) -> Tensor:
        chunks = zip(x.view(-1, 4 * each, d).split(1), columns_of.view(-1, 4, kept * each).split(1), strict=True)
        best = [(x.view(-1, each, d) @ w[c[0]].mT).float().topk(k, -1).values for x, c in chunks]
        return torch.cat([b.flatten(0, 1) for b in best])

    calls: dict[str, Call] = {"ours": lambda x, w: _best_logits(x, w, k, cols=domain), "gather + topk": gathered}
    return Work(f"{k} best of blocks", (_draw(device, rows, d), _draw(device, columns, d)), calls, bars=(1.0, 1.0))


class _Attention(mr.Monoid):
    """Attention as one writes it down: its gradient is derived."""

    z: mr.Scalar = -math.inf
    v: mr.Vector = 0.0

    def combine(a: Any, b: Any) -> Any:
        z = torch.logaddexp(a.z, b.z)
        return _Attention(z=z, v=a.v * torch.exp(a.z - z) + b.v * torch.exp(b.z - z))


@mr.op
def _attend(q: mr.Row["d"], k: mr.Col["d"], v: mr.Col["e"]):
    return mr.reduce(_Attention, z=q @ k, v=v).v


def _own_monoid(device: str) -> Work:
    rows, columns, each, kept, d = (16384, 16384, 128, 32, 64) if device == "cuda" else (1024, 1024, 64, 4, 32)
    domain, columns_of = _drawn_blocks(device, rows, columns, each, kept)

    def gathered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.view(-1, each, d)
        return F.scaled_dot_product_attention(q, k[columns_of], v[columns_of], scale=1.0).flatten(0, 1)

    args = _draw(device, rows, d, scale=0.3), _draw(device, columns, d, scale=0.3), _draw(device, columns, d)
    ours = lambda q, k, v: _attend(q, k, v, cols=domain)
    return Work("own monoid over blocks", args, {"ours": ours, "gather + SDPA": gathered}, backward=False, bars=(1.0,))


def _biased(device: str) -> Work:
    """A bias per pair, with its gradient."""
    heads, length, each, kept, d = (8, 4096, 128, 8, 64) if device == "cuda" else (2, 1024, 64, 4, 32)
    domain, _ = _drawn_blocks(device, length, length, each, kept)
    hidden = torch.where(domain.mask(length, length) > 0, 0.0, -torch.inf)

    def masked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias + hidden.to(bias.dtype))

    args = *(_draw(device, 1, heads, length, d) for _ in range(3)), _draw(device, 1, heads, length, length)
    ours = lambda q, k, v, bias: mr.ops.attention(q, k, v, bias=bias, cols=domain)
    return Work("bias per pair over blocks", args, {"ours": ours, "masked SDPA": masked}, bars=(1.0, 1.0))


def works(device: str) -> Iterator[tuple[str, Callable[[], Work]]]:
    """The name of each work, and what makes it."""
    large = device == "cuda"
    sizes = (4, 16, 16, 8192, 128) if large else (1, 2, 2, 1024, 64)
    bars = (0.75, 0.85) if large else (1.0, 1.0)
    blocks = functools.partial(_over_blocks, device)
    yield "blocks 25 %", lambda: blocks("blocks 25 %", sizes, 128 if large else 64, 0.25, bars)
    yield "blocks 6 %", lambda: blocks("blocks 6 %", sizes, 128 if large else 64, 0.0625, bars)
    for shared in (8, 2) if large else (2,):
        name = f"selected blocks, {32 if large else 4}/{shared} heads"
        yield name, functools.partial(_selected, device, name, shared)
    packed = functools.partial(_packed, causal=True)
    for name, make in (
        ("jagged", _packed), ("jagged, causal", packed), ("pages", _paged), ("edges", _graph),
        ("sampled softmax", _sampled), ("512 best of blocks", functools.partial(_best, k=512)),
        ("own monoid over blocks", _own_monoid), ("bias per pair over blocks", _biased),
    ):  # fmt: skip
        yield name, functools.partial(make, device)


def _steps(call: Call, args: tuple[Tensor, ...], backward: bool) -> list[Callable[[], Any]]:
    """What is timed of a call."""

    def forward() -> Tensor:
        with torch.no_grad():
            return call(*args)

    if not backward:
        return [forward]
    given = [a.detach().requires_grad_() for a in args]
    g = torch.randn_like(forward())
    return [forward, lambda: torch.autograd.grad(call(*given), given, g)]


def measure(work: Work, device: str) -> dict[str, Any]:
    """Milliseconds of forward and of both, in turns, megabytes at the peak, and how far results lie apart."""
    row: dict[str, Any] = {"work": work.name, "ms": {}, "MB": {}, "apart": {}, "bars": work.bars, "why": {}}
    steps: dict[str, list[Callable[[], Any]]] = {}
    first: Tensor | None = None
    for name, call in work.calls.items():
        try:
            own = _steps(call, work.args, work.backward)
            found = own[0]().double()
            first = found if first is None else first
            row["apart"][name] = float((found - first).norm() / first.norm())
            own[-1]()
            row["MB"][name] = round((peak_on_gpu if device == "cuda" else peak_growth)(own[-1]), 1)
            steps[name] = own
        except Exception as error:
            row["why"][name] = f"{type(error).__name__}: {str(error)[:200]}"
    for k in range(1 + work.backward):
        if device == "cpu":
            best = best_times({name: own[k] for name, own in steps.items()}, ROUNDS)
        else:
            rounds = [{name: bench(own[k]) for name, own in steps.items()} for _ in range(ROUNDS)]
            best = {name: sorted(r[name] for r in rounds)[ROUNDS // 2] for name in steps}
        for name, ms in best.items():
            row["ms"].setdefault(name, []).append(round(ms, 4))
    if work.read and device == "cuda" and "ours" in row["ms"]:
        row["bandwidth"] = round(work.read / (row["ms"]["ours"][0] * 1e-3) / BANDWIDTH, 3)
    return row


def markdown(results: dict[str, Any]) -> str:
    """The results as a table."""
    lines = [f"- {k}: {v}" for k, v in results["environment"].items()]
    lines += ["", "Times in ms, forward / forward+backward, in turns. Ratio: of ours to the first peer's.", ""]
    lines += [
        "| work | ours | peers | ratio | bar | MB at the peak | of the bandwidth |",
        "|---|---|---|---|---|---|---|",
    ]
    shown = lambda t: " / ".join(f"{x:.3f}" for x in t)
    for r in results["rows"]:
        own = r["ms"].get("ours")
        peers = {n: t for n, t in r["ms"].items() if n != "ours"}
        first: list[float] = next(iter(peers.values()), [])
        ratio = " / ".join(f"{a / b:.2f}" for a, b in zip(own or [], first, strict=False)) or "–"
        cells = [r["work"], shown(own) if own else r["why"].get("ours", "–")]
        cells += ["; ".join(f"{n} {shown(t)}" for n, t in peers.items()) or "–", ratio]
        cells += [" / ".join(map(str, r["bars"])), "; ".join(f"{n} {m}" for n, m in r["MB"].items())]
        cells.append(f"{r['bandwidth']:.0%}" if "bandwidth" in r else "–")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="*", default=[], help="names of works")
    parser.add_argument("--budget", type=float, default=400.0, help="seconds after which nothing new is begun")
    parser.add_argument("--commit", type=commit, help="what was measured, where the machine has no git")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.time()
    found = _environment(options.commit) if options.device == "cuda" else environment()
    found["command"] = "python -m benchmarks.domains --out DIR" + (" --device cpu" if options.device == "cpu" else "")
    results: dict[str, Any] = {"environment": found, "rows": []}
    stem = "domains" if options.device == "cuda" else "domains-cpu"
    stem = "-".join([stem, *(re.sub(r"[^a-z0-9]+", "-", name).strip("-") for name in options.only)])
    path = options.out / f"{stem}-{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M}"
    for name, make in works(options.device):
        if options.only and name not in options.only:
            continue
        if time.time() - began > options.budget:
            print("out of time before", name, file=sys.stderr)
            break
        try:
            row = measure(make(), options.device)
        except Exception as error:  # the others still count
            print(name, type(error).__name__, str(error)[:300], file=sys.stderr)
            continue
        results["rows"].append(row)
        print(row["work"], row["ms"], row.get("bandwidth", ""), row["apart"], row["why"] or "", flush=True)
        path.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        path.with_suffix(".md").write_text(markdown(results))
    print(f"{time.time() - began:.0f} s in all; {path}.json and .md")


if __name__ == "__main__":
    main()
