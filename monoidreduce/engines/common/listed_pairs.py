"""The nodes of listed pairs (``program/domain.py``) evaluated densely, for the reference engine.

A pair that is listed twice is folded twice. A mask cannot say that, so a reduction whose lists repeat a pair is given
one copy of the folded axis for each time, and a copy's pairs that are not listed so often are the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...domains import Domain, restore
from ...errors import EngineError
from ...program.constructors import find_listed, listed_node
from ...program.expression import Expr, topological
from ...reductions import kind_of
from ...reductions.base import folded_dim, stretch


def restore_domain(form: tuple, tensors: Sequence[Tensor]) -> Domain:
    """The domain of these tensors, whose leading dimensions are batch dimensions of the call."""
    if form[0] == "pages":  # sequences are the only batch dimension that a table has
        table, lengths = tensors
        tensors = table.reshape(-1, table.shape[-1]), lengths.reshape(-1)
    return restore(form, tuple(tensors))


def count_pairs(e: Expr, tensors: Sequence[Tensor], rows: int, cols: int) -> Tensor:
    """How often each pair is listed: ``[*batch, rows, cols]``."""
    found = restore_domain(e.attrs[0], tensors).mask(rows, cols)
    if e.attrs[0][0] == "pages":
        found = found.reshape(*tensors[1].shape, rows, cols)
    return found


def evaluate_node(e: Expr, tensors: Sequence[Tensor], rows: int, cols: int) -> Tensor:
    """The value of a node for every pair."""
    if e.op != "listed_position":
        return count_pairs(e, tensors, rows, cols) > 0
    table, lengths = tensors
    page, flat = e.attrs[0][1], table.reshape(-1, table.shape[-1]).long()
    place = torch.arange(flat.shape[1] * page, device=flat.device)
    at = flat[:, place // page] * page + place % page
    inside = place < lengths.reshape(-1, 1)
    found = torch.zeros(len(flat), cols + 1, dtype=torch.int64, device=flat.device)
    found.scatter_(1, torch.where(inside, at, cols), place.expand_as(at))
    return found[:, :cols].view(*lengths.shape, 1, cols)


def spread_edges(outputs: Sequence[Expr], inputs: Mapping[str, Any], rows: int, cols: int) -> dict[str, Any]:
    """The inputs of a program over edges, numbers of edges as numbers of pairs ``[*batch, rows, cols]``."""
    listed, found = find_listed(outputs), dict(inputs)
    pairs = [e.attrs[0] for e in topological(outputs) if e.op == "input" and e.is_pair]
    if listed is None or listed.attrs[0][0] != "edges" or not pairs:
        return found
    tensors = [inputs[a.attrs[0]] for a in listed.args]
    if bool((count_pairs(listed, tensors, rows, cols) > 1).any()):
        raise EngineError(
            detail="the reference engine has one number for each pair, and an edge is listed twice",
            fix='Use mr.use(engine="eager")',
        )
    lists = restore_domain(listed.attrs[0], tensors).listing(rows, cols)
    owner, item, groups = lists.owners().long(), lists.items.long(), lists.groups
    at = torch.where(owner < groups, owner * cols + item, groups * cols)
    for name in pairs:
        value = inputs[name]
        batch = torch.broadcast_shapes(value.shape[:-1], lists.batch)
        value, at_batch = value.expand(*batch, -1), at.view(*lists.batch, -1) if lists.batch else at
        if lists.batch:
            each = rows * cols
            first = torch.arange(groups // max(rows, 1), device=at.device).view(*lists.batch, 1) * each
            at_batch = at_batch - first
        room = value.new_zeros(*batch, rows * cols + 1)
        room = room.scatter(-1, at_batch.expand_as(value).clamp(max=rows * cols), value)
        found[name] = room[..., :-1].unflatten(-1, (rows, cols))
    return found


def reduce_listed(
    e: Expr,
    fields: list[Tensor],
    size: int,
    tensors_of: Callable[[Expr], Tensor],
    shape: tuple[int, int],
    dense: Callable[[list[Tensor], int], list[Tensor]],
) -> list[Tensor]:
    """The results of a reduction over the folded axis of ``size`` by ``dense(fields, size)``."""
    listed = find_listed(e.args)
    if listed is None:
        return dense(fields, size)
    tensors, (form,) = [tensors_of(a) for a in listed.args], listed.attrs
    kind, (_, over, params) = kind_of(e), e.attrs
    times = count_pairs(listed, tensors, *shape)
    most = int(times.max()) if times.numel() else 0
    if most < 2:
        found = dense(fields, size)
        if kind.place is not None and form[0] == "pages" and over == "cols":
            position = listed_node("listed_position", form, listed.args)
            found[kind.place] = _to_position(found[kind.place], evaluate_node(position, tensors, *shape))
        return found
    vectors = [a.feature is not None for a in e.args]
    absent, whole = kind.absent(params, e.args), stretch([*fields, times], [*vectors, False], over, size)
    copies = []
    for f, vector, nothing in zip(whole[:-1], vectors, absent, strict=True):
        seen = [(times > k).unsqueeze(-1) if vector else times > k for k in range(most)]
        parts = [f if nothing is None else torch.where(one, f, torch.full((), nothing, dtype=f.dtype)) for one in seen]
        copies.append(torch.cat(parts, folded_dim(over, vector)))
    found = dense(copies, size * most)
    if kind.place is not None:
        place = found[kind.place]
        found[kind.place] = torch.where(place < 0, place, place % size)
    return found


def _to_position(place: Tensor, position: Tensor) -> Tensor:
    """Columns of all pages as positions in the sequence; ``position``: ``[*batch, 1, cols]``."""
    rows = place.reshape(*place.shape[: position.dim() - 1], -1)
    position = position.expand(*rows.shape[:-1], position.shape[-1])
    return torch.where(rows < 0, rows, position.gather(-1, rows.clamp(min=0))).view_as(place)
