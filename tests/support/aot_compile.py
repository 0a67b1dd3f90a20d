"""Compiles kernels ahead of time for GPUs that are not here, and reads what the assembler reports.

``python -m tests.support.aot_compile cuda:90`` compiles the kernels of the cases below, forward and backward, and
prints one JSON line each. Run it in its own process: Triton decides at import whether it interprets.
"""

import contextlib
import functools
import io
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.engines.triton import KernelPlan, Rendering, use_plan
from monoidreduce.engines.triton.codegen import compiler
from monoidreduce.engines.triton.kernels import fold_kernel
from monoidreduce.engines.triton.launch import driver
from monoidreduce.engines.triton.panel import accumulators
from monoidreduce.engines.triton.schedules import attention as hand_scheduled
from monoidreduce.engines.triton.schedules import kernel_plan as plan
from monoidreduce.plan import schedule as default_tiles
from tests.support import internals, own_monoids, user_kernel_cases

FAMILIES = {c: default_tiles.family(c // 10, c % 10) for c in (80, 89, 90)}


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k * 0.125, v)


@mr.op
def biased_attention(q: Row["f"], k: Col["f"], v: Col["d"], bias: mr.Pair):
    return mr.softmax_mean(q @ k * 0.125 + bias, v)


@mr.op
def many_best(q: Row["f"], k: Col["f"]):
    return mr.topk(q @ k, 200)


@mr.op
def shown(q: Row["f"], k: Col["f"], v: Col["d"], seen: Col, kind: Row):
    return mr.softmax_mean(torch.where(seen & (kind > 0), q @ k * 0.125, -torch.inf), v)


@mr.op
def causal_attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(torch.where(mr.col_index <= mr.row_index, q @ k * 0.125, -torch.inf), v)


@mr.op
def capped_attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(30.0 * torch.tanh(q @ k * 0.125 / 30.0), v)


@mr.op
def dropped_attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k * 0.125, mr.dropout(v, 0.1, 3))


@mr.op
def relative_attention(q: Row["f"], k: Col["f"], v: Col["d"], bias: mr.Table["n"]):
    return mr.softmax_mean(q @ k * 0.125 + mr.lookup(bias, mr.row_index - mr.col_index + mr.num_cols - 1), v)


@mr.op
def block_attention(q: Row["f"], k: Col["f"], v: Col["d"], bias: mr.Table["n"]):
    return mr.softmax_mean(q @ k * 0.125 + mr.lookup(bias, mr.row_index // 64 * 4 + mr.col_index // 64), v)


@mr.op
def near_attention(q: Row["f"], k: Col["f"], v: Col["d"], bias: mr.Table["n"]):
    back = (mr.row_index - mr.col_index).clamp(-64, 64)
    return mr.softmax_mean(q @ k * 0.125 + mr.lookup(bias, back + 64), v)


@mr.op
def sloped_attention(q: Row["f"], k: Col["f"], v: Col["d"], slope: mr.Batch):
    return mr.softmax_mean(q @ k * 0.125 - slope * (mr.row_index - mr.col_index).abs(), v)


def forward(op: Callable) -> Callable:
    """A call of which nobody asks gradients."""
    return torch.no_grad()(lambda *args: op(*args))


@mr.op
def mlp(x: Row["d"], p: Col["d"], q: Col["n"]):
    return mr.sum(torch.relu(x @ p) * q)


@mr.op
def gated_mlp(x: Row["d"], gate: Col["d"], up: Col["d"], down: Col["n"]):
    return mr.sum(F.silu(x @ gate) * (x @ up) * down)


@mr.op
def gelu_mlp(x: Row["d"], p: Col["d"], q: Col["n"], bias: Col):
    return mr.sum(F.gelu(x @ p + bias) * q)


@mr.op
def tanh_mlp(x: Row["d"], p: Col["d"], q: Col["n"]):
    return mr.sum(F.gelu(x @ p, approximate="tanh") * q)


@mr.op
def cross_entropy(x: Row["d"], target: Row, w: Col["d"]):
    s = x @ w
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == target, s, 0.0))


@mr.op
def contrastive(x: Row["d"], y: Col["d"]):
    s = x @ y * 14.0
    rows = mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == mr.row_index, s, 0.0))
    cols = mr.logsumexp(s, over="rows")
    return rows, cols


@mr.op
def gaussian(x: Row["f"], y: Col["f"], b: Col):
    return mr.sum(torch.exp(-mr.sqdist(x, y)) * b)


@mr.op
def pooled(x: Row["d"], y: Col["d"], seed: int):
    s = x @ y
    return mr.max(s), mr.var(s), mr.sample(s, seed)


@mr.op
def distill(p: Row["d"], c: Col["d"], q: Row["e"], t: Col["e"]):
    student, teacher = p @ c, q @ t
    return mr.logsumexp(student) - mr.softmax_mean(teacher, student)


@mr.op
def best(x: Row["d"], y: Col["d"]):
    return mr.argmax(x @ y)


@mr.op
def drawn(x: Row["d"], y: Col["d"], seed: int):
    return mr.sample(x @ y, seed)


def in_little(x: torch.Tensor, target: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient has no room for whole rows: its labels are weighed by themselves."""
    with mr.budget("600KB"):
        return cross_entropy(x, target, w)


def stowed(x: torch.Tensor, target: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The same of a sum of losses: weights are stowed where gradients will stand."""
    with mr.budget("600KB"):
        return cross_entropy.total(x, target, w)


def contractions(weights: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Sums with a panel's weights as they are made by turns, added to or not."""
    out, vectors = torch.zeros(len(weights), vectors.shape[1]).to(vectors), vectors.detach()
    for panel, add in itertools.product((weights.detach(), weights.detach().mT.contiguous().mT), (False, True)):
        accumulators.PreparedContraction(out, panel, vectors, add)(out, panel, vectors)
    return out


def grouped_heads(x: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention as a model calls it: heads are split off projections, four of the queries' share keys."""
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t, heads in ((x, 8), (k, 2), (v, 2)))
    return mr.ops.attention(q, k, v, enable_gqa=True).transpose(1, 2).reshape(x.shape)


@mr.op
def nearest(x: Row["f"], y: Col["f"]):
    return mr.topk(mr.sqdist(x, y), 10, largest=False).values


@mr.op
def indexer(q: mr.Row["h", "f"], w: mr.Row["h"], k: mr.Col["f"]):
    return mr.logsumexp((w * torch.relu(q @ k)).sum())


def _several(d: int) -> Callable[[torch.dtype], tuple]:
    return lambda dtype: tuple(torch.zeros(s, dtype=dtype) for s in ((256, 16, d), (256, 16), (256, d)))


def _projected(d: int) -> Callable[[torch.dtype], tuple]:
    return lambda dtype: tuple(torch.zeros(2, 256, heads * d, dtype=dtype) for heads in (8, 2, 2))


def _wide(rows: int) -> Callable[[torch.dtype], tuple]:
    return lambda t: (torch.zeros(rows, 2304, dtype=t), torch.zeros(4096, 2304, dtype=t))


def _labelled(d: int, cols: int, rows: int = 128) -> Callable[[torch.dtype], tuple]:
    zeros = torch.zeros
    return lambda t: (zeros(rows, d, dtype=t), zeros(rows, dtype=torch.int64), zeros(cols, d, dtype=t))


@dataclass(frozen=True)
class Case:
    """An op and the sizes it is compiled for. ``lean``: whether its plan must not spill. ``plans``: by direction, where
    not the default ones."""

    name: str
    op: Callable
    make: Callable[[torch.dtype], tuple]
    dtype: torch.dtype = torch.bfloat16
    lean: bool = True
    hopper: bool = False  # whether it is for Hopper alone
    plans: tuple[tuple[str, KernelPlan], ...] = ()


def _handmade_loss(dtype: torch.dtype) -> tuple:
    return user_kernel_cases.inputs("loss", 256, 256, dtype, d=64)


def _qkv(d: int, *batch: int) -> Callable[[torch.dtype], tuple]:
    return lambda dtype: tuple(torch.zeros(*batch, 256, d, dtype=dtype) for _ in range(3))


def _two_widths(f: int, d: int) -> Callable[[torch.dtype], tuple]:
    return lambda dtype: tuple(torch.zeros(256, width, dtype=dtype) for width in (f, f, d))


def _stored(kind: torch.dtype) -> Callable[[torch.dtype], tuple]:
    def make(dtype: torch.dtype) -> tuple:
        columns = (mr.scaled(torch.zeros(4, 256, 128, dtype=torch.int8).to(kind), torch.ones(4, 256)) for _ in range(2))
        return (torch.zeros(4, 256, 128, dtype=dtype), *columns)

    return make


def _cache(kind: torch.dtype, dtype: torch.dtype) -> tuple:
    """One row of heads that share columns, which have one scale where they are floats."""
    scale = torch.ones(2, 2, 1, 512) if kind is torch.int8 else 0.5
    columns = mr.scaled(torch.zeros(2, 2, 1, 512, 128, dtype=torch.int8).to(kind), scale)
    return torch.zeros(2, 2, 4, 1, 128, dtype=dtype), columns, columns


def _all_stored(kind: torch.dtype, sides: int, d: int = 128) -> Callable[[torch.dtype], tuple]:
    values = torch.zeros(1024, d, dtype=torch.int8).to(kind)
    return lambda dtype: tuple(mr.scaled(values, 0.5) for _ in range(sides))


def _four_bits(dtype: torch.dtype) -> tuple:
    columns = mr.scaled(torch.zeros(4, 256, 64, dtype=torch.uint8), torch.ones(4, 256, 4), block=32, bits=4)
    return torch.zeros(4, 256, 128, dtype=dtype), columns, columns


def _four_bits_wide(dtype: torch.dtype) -> tuple:
    columns = mr.scaled(torch.zeros(4096, 1152, dtype=torch.uint8), torch.ones(4096, 18), block=128, bits=4)
    return torch.zeros(256, 2304, dtype=dtype), columns


def _pairs(d: int, sides: int = 2) -> Callable[[torch.dtype], tuple]:
    return lambda dtype: tuple(torch.zeros(256, d, dtype=dtype) for _ in range(sides))


def _blocks(block: int) -> mr.blocks:
    """Each block of rows folds itself and the next."""
    count = 256 // block
    return mr.blocks((torch.arange(count)[:, None] + torch.arange(2)) % count, rows=block, cols=block)


_PAGES = mr.pages(torch.arange(64).view(2, 32), torch.tensor([2000, 1500]), page=64)
_EDGES = mr.edges.from_neighbours((torch.arange(256)[:, None] + torch.arange(24)) % 256)


def _paged(dtype: torch.dtype, rows: int = 1) -> tuple:
    return torch.zeros(2, 32, rows, 128, dtype=dtype), *(torch.zeros(64, 64, 8, 128, dtype=dtype) for _ in range(2))


# Features of heads: what every GPU runs, and one width of every hand-scheduled attention.
WIDTHS = sorted({64, 128} | {s.widest for s in hand_scheduled.SCHEDULES if s.runs_by_default})
STORED_WIDTHS = sorted({s.widest for s in (*hand_scheduled.STORED_SCHEDULES, *hand_scheduled.CUT_SCHEDULES)})

# Tiles of attention that run where a plan asks for them: as "attention 128, tile 192 x 64".
ASKED = [
    Case(
        f"{name} {s.widest}, tile {s.kept} x {s.folded}",
        forward(op),
        _qkv(s.widest, 4),
        hopper=True,
        plans=(("cols", KernelPlan(*s.tile, splits=1, rendering=Rendering.HAND_SCHEDULED)),),
    )
    for s in hand_scheduled.SCHEDULES
    if not s.runs_by_default
    for name, op in (("attention", attention), ("causal attention", causal_attention))
]

CASES = [
    *ASKED,
    *(Case(f"attention {d}", attention, _qkv(d, 4), hopper=d not in (64, 128)) for d in WIDTHS),
    *(Case(f"causal attention {d}", causal_attention, _qkv(d, 2, 4), hopper=d not in (64, 128)) for d in WIDTHS),
    *(Case(f"grouped heads {d}", grouped_heads, _projected(d)) for d in (64, 128)),
    Case("dropped attention 128", dropped_attention, _qkv(128, 4), hopper=True),
    Case("sloped attention 128", forward(sloped_attention), lambda t: (*_qkv(128, 4)(t), torch.ones(4)), hopper=True),
    Case("relative attention 128", relative_attention, lambda t: (*_qkv(128, 4)(t), torch.zeros(4, 511)), hopper=True),
    Case("block attention 128", block_attention, lambda t: (*_qkv(128, 4)(t), torch.zeros(4, 16)), hopper=True),
    Case("capped attention 128", forward(capped_attention), _qkv(128, 4), hopper=True),
    Case("capped attention 64", capped_attention, _qkv(64, 4)),
    Case("attention 111, ragged", attention, _qkv(111), lean=False),
    *(Case(f"mlp {d}", mlp, _pairs(d, 3)) for d in (64, 128)),
    Case("gelu mlp 128", forward(tanh_mlp), _pairs(128, 3), hopper=True),
    Case("gated mlp 128", gated_mlp, _pairs(128, 4), hopper=True),
    Case("gelu mlp 64", gelu_mlp, lambda t: (*_pairs(64, 3)(t), torch.zeros(256, dtype=t)), lean=False),
    *(
        Case(
            f"cross-entropy {d}",
            cross_entropy,
            lambda t, d=d: (*_pairs(d, 1)(t), torch.zeros(256, dtype=torch.int64), *_pairs(d, 1)(t)),
        )
        for d in (64, 128, 256)
    ),
    Case("contrastive 128", contrastive, _pairs(128)),
    Case("contrastive 256", contrastive, _pairs(256), lean=False),
    Case("gaussian 3", gaussian, lambda t: (*_pairs(3)(t), torch.zeros(256, dtype=t)), torch.float32),
    Case("gaussian 64", gaussian, lambda t: (*_pairs(64)(t), torch.zeros(256, dtype=t)), torch.float32, hopper=True),
    Case("pooled 64", pooled, lambda t: (*_pairs(64)(t), 7), torch.float32, lean=False),
    *(Case(f"attention {d}, float32", attention, _qkv(d), torch.float32, lean=False) for d in (64, 128)),
    Case("contrastive 256, float32", contrastive, _pairs(256), torch.float32, lean=False),
    Case("attention 64, float64", attention, _qkv(64), torch.float64, lean=False),
    Case(
        "shown attention 64, float64",
        shown,
        lambda t: (*_qkv(64)(t), torch.ones(256, dtype=torch.bool), torch.ones(256, dtype=torch.int8)),
        torch.float64,
    ),
    # products of many features: folds to numbers have them in their kernels; else panels, which the vendor multiplies
    Case("wide argmax, 256 rows", best, _wide(256)),
    Case("wide argmax, 64 rows", best, _wide(64), lean=False),
    Case("wide sample, 256 rows", drawn, lambda t: (*_wide(256)(t), 7), lean=False),
    Case("wide sample, 64 rows", drawn, lambda t: (*_wide(64)(t), 7), lean=False),
    Case("wide cross-entropy", cross_entropy, _labelled(320, 4096)),
    Case("wide cross-entropy, 256 rows", cross_entropy, _labelled(784, 4096, 256)),
    Case("wide cross-entropy, summed", cross_entropy.total, _labelled(320, 4096)),
    Case("wide cross-entropy, summed, unaligned", cross_entropy.total, _labelled(300, 4096), lean=False),
    Case("wide cross-entropy, in little memory", in_little, _labelled(320, 4096)),
    Case("wide cross-entropy, stowed", stowed, _labelled(784, 4096, 256), hopper=True),
    Case("wide cross-entropy, stowed, 3200", stowed, _labelled(3200, 4096, 256), lean=False, hopper=True),
    Case("wide contrastive", contrastive, lambda t: tuple(torch.zeros(512, 320, dtype=t) for _ in range(2))),
    Case(
        "wide distillation, summed",
        distill.total,
        lambda t: tuple(torch.zeros(n, d, dtype=t) for n, d in ((64, 300), (4096, 300), (64, 260), (4096, 260))),
    ),
    Case("attention 64, float16", attention, _qkv(64), torch.float16),
    Case("attention 128, float16", attention, _qkv(128), torch.float16, lean=False),
    Case(
        "wide contractions",
        contractions,
        lambda t: (torch.zeros(384, 1024).to(t), torch.zeros(1024, 384).to(t)),
        hopper=True,
    ),
    Case("indexer 64", indexer, _several(64)),
    # columns that are listed
    Case("attention over blocks 128", lambda *qkv: attention(*qkv, cols=_blocks(128)), _qkv(128, 4), hopper=True),
    Case("attention over blocks 64", lambda *qkv: attention(*qkv, cols=_blocks(64)), _qkv(64, 4), lean=False),
    Case("attention over blocks of 16", lambda *qkv: attention(*qkv, cols=_blocks(16)), _qkv(128, 4), lean=False),
    Case("attention over pages 128", forward(lambda *qkv: attention(*qkv, cols=_PAGES)), _paged, lean=False),
    *(
        Case(
            f"gradients of pages 128, {rows} rows",
            lambda *qkv: attention(*qkv, cols=_PAGES),
            functools.partial(_paged, rows=rows),
            lean=False,
        )
        for rows in (1, 64)
    ),
    Case(
        "biased attention over blocks 128",
        lambda *args: near_attention(*args, cols=_blocks(128)),
        lambda t: (*_qkv(128, 4)(t), torch.zeros(4, 129)),
        lean=False,
    ),
    *(
        Case(
            f"biased attention over pages 128, {rows} rows",
            lambda *args: near_attention(*args, cols=_PAGES),
            lambda t, rows=rows: (*_paged(t, rows), torch.zeros(32, 129)),
            lean=False,
        )
        for rows in (1, 64)
    ),
    Case("attention over edges 64", lambda *qkv: attention(*qkv, cols=_EDGES), _qkv(64), lean=False),
    *(
        Case(f"{name} over {where} 64", forward(functools.partial(op, cols=cols)), make, t, lean=False)
        for name, op, make, t in (
            ("200 best", many_best, _pairs(64), torch.bfloat16),
            ("own monoid", own_monoids.attention, _qkv(64), torch.float32),
        )
        for where, cols in (("edges", _EDGES), ("blocks", _blocks(128)), ("blocks of 16", _blocks(16)))
    ),
    *(
        Case(
            f"gradients of numbers per pair over blocks{of} 64",
            functools.partial(biased_attention, cols=_blocks(block)),
            lambda t: (*_qkv(64)(t), torch.zeros(256, 256, dtype=t)),
            lean=False,
        )
        for of, block in (("", 128), (" of 16", 16))
    ),
    # keys and values stored in 8 bits
    *(
        Case(f"stored attention 128, {str(kind)[6:]}", attention, _stored(kind), lean=False)
        for kind in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
    ),
    *(
        Case(f"decoding from {str(kind)[6:]} 128", forward(attention), functools.partial(_cache, kind), hopper=True)
        for kind in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
    ),
    # all vectors in 8 bits; 4 bits with scales of blocks
    *(
        Case(f"{name} {d}", forward(op), _all_stored(torch.float8_e4m3fn, 3, d), hopper=True)
        for d in STORED_WIDTHS
        for name, op in (("FP8 attention", attention), ("FP8 causal attention", causal_attention))
    ),
    Case("INT8 neighbours 128", forward(nearest), _all_stored(torch.int8, 2), lean=False),
    Case("4-bit attention 128", forward(attention), _four_bits, lean=False),
    Case("4-bit attention 128, float64", forward(attention), _four_bits, torch.float64, lean=False),
    Case("4-bit wide argmax", forward(best), _four_bits_wide, lean=False),
    # a monoid with vector fields, which are held per pair: forward alone, the gradient is plain sums
    *(
        Case(f"own monoid {d}, {str(t)[6:]}", forward(own_monoids.attention), _qkv(d), t, lean=False)
        for d, t in ((64, torch.bfloat16), (16, torch.float32), (64, torch.float32), (256, torch.bfloat16))
    ),
    *(
        Case(f"own monoid 64 and {d}", forward(own_monoids.attention), _two_widths(64, d), torch.float32, lean=False)
        for d in (128, 256)
    ),
    Case("own monoid with inner products 32", forward(own_monoids.pooled), _qkv(32), torch.float32, lean=False),
    # tile functions of a user's own
    Case("handmade attention 64", user_kernel_cases.LAYERS["attention"].kernels.apply, _qkv(64)),
    Case("handmade mlp 64", user_kernel_cases.LAYERS["mlp"].kernels.apply, _qkv(64)),
    Case("handmade loss 64", user_kernel_cases.LAYERS["loss"].kernels.apply, _handmade_loss),
]


@dataclass(frozen=True)
class Compiled:
    """What became of one kernel."""

    case: str
    kernel: str
    plan: tuple[int, int, int, int]
    registers: int
    spills: int
    shared: int
    counted: int  # bytes of shared memory before it is compiled: see ``count_shared``
    tensor_cores: int  # matrix instructions in the text
    staged: bool
    crumbs: int  # loads of two bytes
    lean: bool


def calls(case: Case, capability: int, plans: dict[str, KernelPlan] | None = None) -> list[fold_kernel.KernelCall]:
    """The launches of a case, forward and backward, none of them made."""
    import triton  # noqa: F401  before it is told to interpret: what is made here is compiled

    args = [
        a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
        for a in case.make(case.dtype)
    ]
    with pytest.MonkeyPatch.context() as patch, mr.use(engine="triton"), use_plan(plans or dict(case.plans)):
        patch.setenv("TRITON_INTERPRET", "1")  # lets tensors on the CPU through; nothing runs
        found = internals.collect_launches(patch)
        internals.forget_launches(patch)
        internals.pretend_device(
            patch,
            family=FAMILIES[capability],
            descriptors=capability >= 90,
            epilogue=capability >= 90,
            warp_specialised=capability == 90,
            float32_split=capability >= 90,
            tanh=True,
        )
        internals.set_pair_thresholds(  # kernels as they are for many pairs
            patch, many=0, very_many=0 if capability >= 90 else 2**62, saved_row_gradients=0, float32_split=0
        )
        out = case.op(*args)
        values = [v for v in (out if isinstance(out, tuple) else (out,)) if v.requires_grad]
        if values:
            torch.autograd.backward(values, [torch.ones_like(v) for v in values])
    return found


def compiled(case: Case, capability: int, plans: dict[str, KernelPlan] | None = None) -> Iterator[Compiled]:
    seen = set()
    for call in calls(case, capability, plans):
        if (call.kernel.text, call.plan) not in seen:
            seen.add((call.kernel.text, call.plan))
            yield assemble(case, call, capability)


def count_shared(case: Case, call: fold_kernel.KernelCall, family: default_tiles.Family) -> int:
    """Bytes of shared memory of a launch before it is compiled: what a hand-scheduled kernel's text allocates, or what
    the plan counts of any other."""
    if not call.kernel.hand_scheduled:
        item = 1 if case.name.startswith("FP8") else 2 if call.kernel.traits.pieces else case.dtype.itemsize
        return plan.shared_bytes(call.plan, call.kernel, item, family)
    (arguments,) = re.findall(rf"def {call.kernel.name}\(([^)]*)\)", call.kernel.text)
    given = zip((name.split(":")[0].strip() for name in arguments.split(",")), call.arguments, strict=False)
    boxes = {name: str(box.block_shape) for name, box in given if hasattr(box, "block_shape")}
    known = dict(zip(compiler.CONSTANTS, (call.plan.block_kept, call.plan.block_folded), strict=False))
    total = 0
    for dtype, shape in re.findall(
        r"allocate_shared_memory\(tl\.(\w+), (\[.*?\](?: \+ [\w.]+)?), [a-zA-Z]", call.kernel.text
    ):
        shape = re.sub(r"(\w+)\.block_type\.shape", lambda found: boxes[found[1]], shape)
        total += _SIZES[dtype] * math.prod(eval(shape, {}, known))
    return total


def assemble(case: Case, call: fold_kernel.KernelCall, capability: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    module = driver.load_module(call.kernel.text, call.kernel.functions)
    function = getattr(module, call.kernel.name)
    constants = call.constants(module)
    signature, attributes = {}, {}
    free = set(re.findall(r"'(\w+)'", re.search(r"do_not_specialize=\[(.*?)\]", call.kernel.text)[1]))
    for at, (name, value) in enumerate(zip(function.arg_names, call.arguments, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
            attributes[(at,)] = [["tt.divisibility", 16]]
        elif hasattr(value, "block_shape"):
            laid = f",{value.layout!r}" if call.kernel.hand_scheduled else ""
            signature[name] = f"tensordesc<{_TYPES[value.base.dtype]}{value.block_shape}{laid}>".replace(" ", "")
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and name not in free:
            constants[name] = 1
        else:
            signature[name] = "i64" if abs(value) >= 2**31 else "i32"
            if value % 16 == 0 and name not in free:
                attributes[(at,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    options = {"num_warps": call.plan.num_warps, "num_stages": call.plan.num_stages}
    options |= fold_kernel.compiler_options(call.kernel, call.plan)
    ast = (GluonASTSource if call.kernel.hand_scheduled else ASTSource)(function, signature, constants, attributes)
    said = io.StringIO()
    with mock.patch.dict(os.environ, TRITON_DUMP_PTXAS_LOG="1"), contextlib.redirect_stdout(said):
        result = triton.compile(ast, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spills = _counted(said.getvalue()) or _counted(_assembled(result.asm["ptx"], capability))
    cores = len(re.findall(r"wgmma\.mma_async|mma\.sync", result.asm["ptx"]))
    tiles = (call.plan.block_kept, call.plan.block_folded, call.plan.num_warps, call.plan.num_stages)
    counted, shared = count_shared(case, call, FAMILIES[capability]), result.metadata.shared
    crumbs = len(re.findall(r"ld\.global\.\w*16", result.asm["ptx"]))
    found = (registers, spills, shared, counted, cores, call.kernel.hand_scheduled, crumbs, case.lean)
    return Compiled(case.name, call.kernel.name, tiles, *found)


_SIZES = {"int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "float8e4nv": 1, "float8e5": 1}
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.bool: "i1",
}


def _assembled(ptx: str, capability: int) -> str:
    """What the wheel's own assembler says of a kernel that Triton had in its cache."""
    from triton.backends.nvidia.compiler import get_ptxas

    arch = f"sm_{capability}{'a' if capability >= 90 else ''}"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={arch}", file.name, "-o", "/dev/null"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def _counted(said: str) -> tuple[int, int] | None:
    """Registers and bytes spilled, in the assembler's words."""
    registers = re.search(r"Used (\d+) registers", said)
    spills = sum(map(int, re.findall(r"(\d+) bytes spill stores", said)))
    return (int(registers[1]), spills) if registers else None


if __name__ == "__main__":
    names = [case.name for case in CASES]
    target, wanted = sys.argv[1:2], sys.argv[2:]
    if not re.fullmatch(r"cuda:\d+", *target or [""]) or not set(wanted) <= set(names):
        unknown = [name for name in wanted if name not in names]
        said = f"There is no case {', '.join(map(repr, unknown))}. " if unknown else ""
        sys.exit(f"{said}python -m tests.support.aot_compile cuda:90 ['CASE' ...], of the cases:\n" + "\n".join(names))
    for case in CASES:
        if not wanted or case.name in wanted:
            for result in compiled(case, int(target[0].removeprefix("cuda:"))):
                print(json.dumps(asdict(result)), flush=True)
    os._exit(0)  # else Triton's bindings end with forty lines about what they did not free
