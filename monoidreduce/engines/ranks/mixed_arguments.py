"""Plain tensors beside DTensors, and DTensors on a part of the others' mesh: what they mean, agreed by all ranks.

Nobody said how such a tensor lies over the mesh (or over the dimensions that it lacks). Along an axis that the DTensors
shard, its size says it: the global size is the whole tensor, of which each rank takes its slice; a rank's own size is
that rank's shard. Without such an axis it is the same on all ranks, as under torch's ``implicit_replication``, which is
checked by sums of its numbers. What is neither is one error on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import ShardError
from ..common import shard
from ..common.shard import Group
from . import agreement

Key = tuple[str, int] | None  # ("rows", k), ("cols", 0), ("batch", counted from the right); None: features, broadcast
Axes = tuple[Key, ...]
_TOLERANCE = 1e-5  # of sums of numbers: replicas may differ in their last digits, two batches differ in the first


class Unplaced(NamedTuple):
    """A sharded axis of a tensor whose placement over mesh dimension ``dim`` nobody said."""

    name: str
    dim: int
    axis: str
    size: int
    own: int  # the size of this rank's shard
    whole: int | None  # the global size, None where no DTensor says it: then it is this rank's shard
    one: bool  # whether it is of size 1 and may be shared by all


def describe_arguments(values: Mapping[str, Any], axes: Mapping[str, Axes], dims: Mapping[str, tuple]) -> str:
    """All that must be equal on all ranks before anything is sent, as lines of text."""
    lines = ["arguments beside DTensors"]
    for name in axes:
        value = values[name]
        if dims[name]:
            where = ", ".join(map(repr, value.placements))
            lines.append(f"{name} as a DTensor {list(value.shape)} of {str(value.dtype)[6:]} placed ({where})")
        else:
            lines.append(f"{name} as a plain tensor of {value.dim()} dimensions of {str(value.dtype)[6:]}")
    return "\n".join(lines)


def agree_on_sizes(
    unplaced: Sequence[Unplaced], told: str, groups: Mapping[int, Group], dim_name: Callable[[int], str]
) -> dict[tuple[str, int], str]:
    """For each (name, mesh dimension) what the tensor is along its sharded axis: "one" for all, the "whole", or a
    rank's "own" shard; a collective call.

    Raises ShardError on every rank where the ranks hold different arguments, or a size is none of these on all of them.
    """
    mask = lambda fits: sum(1 << k for k, u in enumerate(unplaced) if fits(u))
    one, whole, own = mask(lambda u: u.one), mask(lambda u: u.size == u.whole), mask(lambda u: u.size == u.own)
    problem: ShardError | None = None
    for m in _rounds(list(groups)):
        try:
            given = agreement.PairShards(own=own, shared=whole, wide=(one,))
            headers = agreement.exchange_headers(groups[m], problem is not None, told, {"rows": 0, "cols": 0}, given)
            for h in headers:
                own, whole, one = own & h[4], whole & h[5], one & h[6]
        except ShardError as error:
            problem, told = problem or error, error.text
    for k, u in enumerate(unplaced):
        if problem is None and not (own | whole | one) >> k & 1:
            problem = ShardError(
                detail=f"{u.name} is not placed over mesh dimension {dim_name(u.dim)}, over which {u.axis} are "
                f"sharded, and on some rank has neither the size of all ({u.whole}) nor of the rank's own shard",
                fix="Give every rank the whole of it or its own shard, or make it a DTensor: distribute_tensor",
            )
    if problem is not None:
        raise problem
    what = lambda k: "one" if one >> k & 1 else "whole" if whole >> k & 1 else "own"
    return {(u.name, u.dim): what(k) for k, u in enumerate(unplaced)}


def check_replicated(
    values: Mapping[str, Any],
    same: Sequence[tuple[str, int]],
    groups: Mapping[int, Group],
    dim_name: Callable[[int], str],
    placed: Sequence[str],
) -> None:
    """Raise ShardError on every rank unless these (tensor, mesh dimension) hold the same numbers on all ranks of it."""
    if not same:
        return
    names = sorted({name for name, _ in same})
    sums = torch.cat([_sum_numbers(values[name]) for name in names])
    wrong = 0  # 1 + the number of the first that differs
    for m in _rounds(list(groups)):
        message = torch.cat([sums.new_tensor([wrong]), sums])
        device = agreement.header_device(groups[m])
        found = shard.all_gather(message.to(device), groups[m]).cpu()
        wrong = int(found[:, 0].max())
        for k, (name, dim) in enumerate(same):
            at = 1 + 3 * names.index(name)
            if dim == m and not wrong and not _agree(found[:, at : at + 3]):
                wrong = k + 1
    if wrong:
        name, dim = same[wrong - 1]
        where = f'mesh["{dim_name(dim)[1:-1]}"]' if dim_name(dim)[0] == "'" else "mesh"
        raise ShardError(
            detail=f"{name} is a plain tensor that differs between the ranks of mesh dimension {dim_name(dim)}, over "
            f"which {' and '.join(placed)} {'lies' if len(placed) == 1 else 'lie'}: nobody said how it is divided",
            fix=f"If every rank has its own rows (data parallelism), call the layer in the forward of the module that "
            f"owns the weight, where fully_shard gathers it, or inside mr.shard(rows={where}); "
            "else give all ranks the same tensor, or a DTensor",
        )


def _rounds(dims: list[int]) -> list[int]:
    """The mesh dimensions to exchange over, so that what is found in any of them is known to every rank at the end."""
    return [*dims, *dims[:-1]]


def _sum_numbers(value: Tensor) -> Tensor:
    """Three sums of a tensor in float64: of its numbers, weighted by place, and of the magnitudes of both."""
    with torch.no_grad():
        rows = (value.flatten(0, -2) if value.dim() > 1 else value.reshape(-1, 1)).sum(-1, dtype=torch.float64)
        place = torch.arange(1, len(rows) + 1, dtype=torch.float64, device=rows.device) / max(len(rows), 1)
        return torch.stack([rows.sum(), rows @ place, rows.abs().sum()]).cpu()


def _agree(found: Tensor) -> bool:
    """Whether the sums of all ranks are those of the same numbers; NaN and infinities are equal to themselves."""
    room = _TOLERANCE * found[:, 2].nan_to_num(posinf=0.0).amax()
    first = found[:1].expand_as(found)
    near = (found - first).abs() <= room
    return bool((near | (found == first) | (found.isnan() & first.isnan())).all())
