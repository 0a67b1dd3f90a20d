"""Cases for column-gradient kernels of one warp group: sizes and attention options;
run on the simulator by ``tests/interpret`` and on a GPU by ``tests/gpu``."""

import torch

import monoidreduce as mr
from monoidreduce import ops
from monoidreduce.engines.triton import KernelPlan, Rendering

ALONE = KernelPlan(64, 64, 4, 2, splits=1, rendering=Rendering.HAND_SCHEDULED)
DROPPED = {"dropout_p": 0.2, "seed": 3}
OPTIONS = [
    {},
    {"softcap": 5.0},
    {"alibi_slopes": torch.tensor([0.1, 0.5])},
    {"causal": True},
    DROPPED,
    {"dropout_p": 0.5, "seed": -(2**62)},
    DROPPED | {"causal": True},
    {"enable_gqa": True},
    DROPPED | {"enable_gqa": True},
]
SIZES = [(150, 200), (130, 66), (64, 128)]


def pulled(engine, dtype, options, rows, cols, device="cpu"):
    """The gradients of an attention: of queries, keys and values."""
    gen = torch.Generator().manual_seed(0)
    heads = 1 if "enable_gqa" in options else 2
    shapes = [(2, rows), (heads, cols), (heads, cols), (2, rows)]
    made = (torch.randn(2, h, n, 128, generator=gen).bfloat16() for h, n in shapes)
    *args, y = (a.to(device, dtype) for a in made)
    given = {k: v.to(device, dtype) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    leaves = [a.requires_grad_() for a in args]
    with mr.use(engine=engine):
        return torch.autograd.grad(ops.attention(*leaves, **given), leaves, y)


def check(found, options, rows, cols, device="cpu"):
    """Not more than twice the error of plain torch in bfloat16, both against float64; keys and values alone."""
    exact, plain = (pulled("reference", t, options, rows, cols, device) for t in (torch.float64, torch.bfloat16))
    for got, right, theirs in [*zip(found, exact, plain, strict=True)][1:]:
        allowed = max(2 * (theirs.double() - right).norm().item(), 2**-8 * right.norm().item())
        assert (got.double() - right).norm() <= allowed
