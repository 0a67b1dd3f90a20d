"""Cases of the kernel that makes the gradients of queries, keys and values; run on the simulator by ``tests/interpret``
and on a GPU by ``tests/gpu``."""

import torch

import monoidreduce as mr
from monoidreduce import ops

CASES = [  # batch, query heads, heads, rows, columns, features, options
    (1, 2, 2, 130, 200, 128, {}),
    (2, 2, 1, 192, 256, 128, {}),
    (1, 2, 2, 300, 300, 128, {"is_causal": True}),
    (1, 4, 2, 256, 256, 128, {"is_causal": True}),
    (1, 2, 2, 150, 130, 128, {"softcap": 5.0}),
    (1, 4, 2, 300, 200, 64, {}),
    (1, 2, 2, 300, 300, 64, {"is_causal": True}),
    (2, 1, 1, 200, 150, 64, {"softcap": 5.0}),
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
