"""Cases of the kernel that makes the gradients of queries, keys and values; run on the simulator by ``tests/interpret``
and on a GPU by ``tests/gpu``."""

import itertools

import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce import ops

CASES = [  # batch, query heads, heads, rows, columns, features, options
    (1, 2, 2, 130, 200, 128, {}),
    (2, 2, 1, 192, 256, 128, {}),
    (1, 2, 2, 300, 300, 128, {"is_causal": True}),
    (1, 4, 2, 256, 256, 128, {"is_causal": True}),
    (1, 2, 2, 150, 130, 128, {"softcap": 5.0}),
]


def gradients(engine, dtype, batch, heads, shared, rows, cols, features, options, device="cpu"):
    """Those of an attention whose heads are split from projections."""
    gen = torch.Generator().manual_seed(0)
    sizes = [(rows, heads), (cols, shared), (cols, shared), (rows, heads)]
    made = [
        torch.randn(batch, n, h, features, generator=gen).bfloat16().to(device, dtype).transpose(1, 2) for n, h in sizes
    ]
    *leaves, y = made
    leaves = [a.requires_grad_() for a in leaves]
    with mr.use(engine=engine):
        return torch.autograd.grad(ops.attention(*leaves, enable_gqa=heads != shared, **options), leaves, y)


def check(found, case, device="cpu", least=2**-8):
    """Not more than twice the error of plain torch in bfloat16, both against float64, and in the inputs' layout."""
    exact, plain = (gradients("reference", t, *case, device) for t in (torch.float64, torch.bfloat16))
    for got, right, theirs in zip(found, exact, plain, strict=True):
        allowed = max(2 * (theirs.double() - right).norm().item(), least * right.norm().item())
        assert (got.double() - right).norm() <= allowed
        assert got.transpose(1, 2).is_contiguous()


PACKED = [  # lengths of sequences, heads, features, options, dtype
    ([300, 0, 1, 128, 600, 205], 2, 128, {}, torch.bfloat16),
    ([300, 0, 1, 128, 600, 205], 2, 128, {"is_causal": True}, torch.bfloat16),
    ([2000, 700, 900], 4, 64, {"is_causal": True}, torch.bfloat16),
    ([64] * 20, 1, 128, {}, torch.bfloat16),
    ([1000, 30, 500], 2, 128, {}, torch.float16),
    ([1000, 30, 500], 2, 64, {"is_causal": True}, torch.float16),
]


def packed_gradients(case, engine="auto", device="cuda", kind=None):
    """Those of attention over packed sequences; engine "sequences": of plain torch, one sequence after the other."""
    lengths, heads, features, options, dtype = case
    make = torch.Generator().manual_seed(0)
    made = [torch.randn(1, heads, sum(lengths), features, generator=make).to(dtype) for _ in range(4)]
    *leaves, y = (t.to(device, kind or dtype) for t in made)
    leaves, ends = [t.requires_grad_() for t in leaves], [0, *itertools.accumulate(lengths)]
    if engine == "sequences":
        own = [[t[:, :, a:b] for t in leaves] for a, b in itertools.pairwise(ends)]
        out = torch.cat([F.scaled_dot_product_attention(*given, **options) for given in own if given[0].shape[2]], 2)
    else:
        domain = mr.jagged(torch.tensor(ends, dtype=torch.int32, device=device))
        with mr.use(engine=engine):
            out = ops.attention(*leaves, cols=domain, **options)
    return torch.autograd.grad(out, leaves, y)
