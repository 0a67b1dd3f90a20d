"""What the ranks are asked to do. Each function runs on every rank of a world and returns something picklable."""

from typing import Any

import torch
from torch import Tensor

import monoidreduce as mr
from tests.layers import BY_NAME
from tests.layers_compare import flatten, is_float, use_small_tiles
from tests.ranks.cases import Case, part


class _Patch:
    """Enough of monkeypatch for tiles: set once, for the life of the process."""

    setattr = staticmethod(setattr)


use_small_tiles(_Patch())  # type: ignore[arg-type]


def sharded(group: Any, case: Case) -> dict[str, Tensor]:
    """One layer, on this rank's part: its values and gradients, and what was sent."""
    layer = BY_NAME[case.layer]
    args = layer.args(case.rows, case.cols, case.seed, case.dtype)
    mine = [part(a, p, case, group.rank(), group.size()) for a, p in zip(args, layer.parameters, strict=False)]
    given = [a.detach().clone().requires_grad_() if is_float(a) else a for a in mine]
    axes = {name: group for name in ("rows", "cols") if name in case.divided}
    with mr.shard(**axes, order=case.order):
        values = flatten(layer.op(*given))
    cotangents = [
        part(g, s, case, group.rank(), group.size()) for g, s in zip(case.cotangents, case.sides, strict=True)
    ]
    pulled = [(v, g.to(v.dtype)) for v, g in zip(values, cotangents, strict=True) if v.requires_grad]
    inputs = [a for a in given if is_float(a)]
    found = [None] * len(inputs)
    if pulled and inputs:
        found = torch.autograd.grad([v for v, _ in pulled], inputs, [g for _, g in pulled], allow_unused=True)
    grads = [torch.zeros_like(a) if g is None else g for a, g in zip(inputs, found, strict=True)]
    return {"values": [v.detach() for v in values], "grads": grads}


def sharded_many(group: Any, cases: list[Case]) -> list[Any]:
    return [sharded(group, case) for case in cases]
