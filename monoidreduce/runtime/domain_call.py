"""Calls over some of the pairs, ``op(..., cols=domain)``: the domain as further arguments of the call.

A domain is a static form and a few integer tensors. For each form an op has a second op, whose program is restricted
(``program/declarations.py``) and which takes the tensors as arguments that the body does not see: from there on they
are bound, cached, traced, saved and replayed as all other tensors are. Pages also change how arguments are read: the
columns of all sequences lie in one pool, so that heads are a batch dimension of the columns and sequences are not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..algebra import Monoid
from ..domains import Domain, Edges, Jagged, Pages
from ..domains.base import is_plain, wrong_domain_error
from ..engines.common import bounded_cache
from ..engines.common.evaluate import traced_length
from ..errors import ArgumentError, ShapeError
from ..program.declarations import Parameter, inputs_of
from . import recorder

_LONG = 1024  # columns of a sequence, on average, from which on the start-up of a warp-specialised kernel pays


@dataclass(frozen=True)
class DomainCall:
    """The arguments of a call over a domain: the body's own and the domain's, by name. ``grouped``: results have the
    query heads in two dimensions, one for the heads of the columns."""

    form: tuple
    values: dict[str, Any]
    grouped: bool = False

    def finish(self, results: Any) -> Any:
        """Results as users hold them."""
        return _map_tensors(results, lambda t: t.flatten(1, 2)) if self.grouped else results


def parameters_over(form: tuple, parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """The parameters of an op over a domain: the body's and the domain's. A Pair is one number an edge."""
    own = {
        n: replace(p, axis="edges") if form[0] == "edges" and p.axis == "pairs" else p for n, p in parameters.items()
    }
    return own | {name: Parameter(name, axis, None, False, ...) for name, axis in inputs_of(form)}


def check_domain(domain: Any) -> Domain:
    """What was given as ``cols``, if it is a domain."""
    if not isinstance(domain, Domain):
        raise wrong_domain_error("cols", domain)
    return domain


def bind_domain(parameters: Mapping[str, Parameter], values: Mapping[str, Any], domain: Domain) -> DomainCall:
    """The arguments of a call whose ``values`` are bound, with those of its domain."""
    given = {n: v for n, v in values.items() if isinstance(v, Tensor) and parameters[n].is_tensor}
    if isinstance(domain, Pages):
        return _bind_pages(parameters, values, given, domain)
    rows, cols = (_find_length(parameters, given, axis) for axis in ("rows", "cols"))
    if rows is None and isinstance(domain, Edges):
        rows = domain.rowptr.shape[-1] - 1
    if rows is None or cols is None:
        side, what = ("Row", "rows") if rows is None else ("Col", "columns")
        raise ShapeError(
            detail=f"no argument says how many {what} there are",
            fix=f"Declare a parameter mr.{side} or mr.Pair and use it in the body",
        )
    domain.check(rows, cols)
    form = domain.form
    if isinstance(domain, Jagged):
        form += ("long",) if _is_long(domain, rows, cols) else ()
        found = tuple(_remembered_sequence(*domain.tensors(), form, rows, cols, k) for k in range(4))
    else:
        found = domain.tensors()
        if isinstance(domain, Edges):
            _check_numbers_of_edges(parameters, given, domain)
    names = [name for name, _ in inputs_of(form)]
    return DomainCall(form, {**values, **dict(zip(names, found, strict=True))})


def _make_sequence(*given: Any) -> Tensor:
    """The tensor number ``place`` of :func:`_make_sequences`, all of which are made once for the same offsets.

    ``given``: the offsets, the domain's form, how many rows and columns there are, and the place."""
    *tensors, form, rows, cols, place = given
    make = functools.partial(_make_sequences, Jagged(*tensors), rows, cols, len(form) > 2)
    if not is_plain(*tensors):
        return make()[place]
    return bounded_cache.compute_once(("sequences", form, rows, cols, *tensors), make, tensors[0].device)[place]


def _remember_sequence(*given: Any) -> Callable[..., Tensor]:
    known = bounded_cache.LastComputed(lambda *tensors: _make_sequence(*tensors, *given[-4:]))
    return lambda *again: known(*again[:-4])


_remembered_sequence = recorder.step(_make_sequence, _remember_sequence)


def _make_sequences(domain: Jagged, rows: int, cols: int, long: bool) -> tuple[Tensor, ...]:
    """The sequences of rows and columns (of long ones as warp-specialised kernels copy them), and places in them."""
    found = domain.row_sequences(rows), domain.col_sequences(cols)
    places = domain.row_positions(rows).long(), domain.col_positions(cols).long()
    return *(found if long else (t.long() for t in found)), *places


def _is_long(domain: Jagged, rows: int, cols: int) -> bool:
    """Whether sequences are long on average, on a device that has kernels for that."""
    least = _LONG * (len(domain.row_offsets) - 1)
    return domain.device.type == "cuda" and min(traced_length(rows), traced_length(cols)) >= least


def _find_length(parameters: Mapping[str, Parameter], given: Mapping[str, Tensor], axis: str) -> int | None:
    """How many rows or columns there are, by the first argument that has them; numbers per pair may be broadcast."""
    several = None
    for name, value in given.items():
        p = parameters[name]
        if p.axis in (axis, "pairs"):
            length = value.shape[p.tail.index(axis) - len(p.tail)]
            if p.axis == axis:
                return length
            several = length if several in (None, 1) else several
    return several


def _check_numbers_of_edges(parameters: Mapping[str, Parameter], given: Mapping[str, Tensor], domain: Edges) -> None:
    edges = domain.index.shape[-1]
    for name, value in given.items():
        if parameters[name].axis == "edges" and value.shape[-1] != edges:
            raise ShapeError(
                detail=f"{name} has shape {tuple(value.shape)}, but with mr.edges a Pair is one number an edge",
                fix=f"Give [..., {edges}]",
            )


# Pages


def _bind_pages(
    parameters: Mapping[str, Parameter], values: Mapping[str, Any], given: Mapping[str, Tensor], domain: Pages
) -> DomainCall:
    sequences = len(domain.lengths)
    heads, query_heads, pages = 1, 0, 0
    for name, value in given.items():
        p = parameters[name]
        vector = p.feature is not None
        if p.axis == "pairs":
            raise ArgumentError(
                detail=f"{name} is one number per pair, which columns in pages do not have",
                fix="Compute it in the body, from Row, Col and Batch arguments",
            )
        if p.axis == "cols":
            domain._check_store(name, value if vector else value.unsqueeze(-1))
            heads, pages = max(heads, value.shape[2]), value.shape[0]
        elif p.axis == "rows":
            lead = tuple(value.shape[: value.dim() - len(p.tail)])
            if len(lead) != 2 or lead[0] not in (1, sequences):
                raise ShapeError(
                    detail=f"{name} has shape {tuple(value.shape)}, but there are {sequences} sequences",
                    fix=f"Give [{sequences}, heads, M{', features' if vector else ''}]",
                )
            query_heads = max(query_heads, lead[1])
    query_heads = query_heads or heads
    if query_heads % heads:
        raise ShapeError(
            detail=f"there are {query_heads} heads of rows and {heads} of columns",
            fix="Give a multiple of the columns' heads",
        )
    rows = _find_length(parameters, given, "rows")
    domain.check(1 if rows is None else rows, pages * domain.page)
    grouped = query_heads != heads
    split = (heads, query_heads // heads) if grouped else (heads,)
    moved = dict(values)
    for name, value in given.items():
        p, tail = parameters[name], len(parameters[name].tail)
        if p.axis == "cols":
            pool = value.movedim(2, 0).flatten(1, 2)  # [heads, pages · page, features], a view
            moved[name] = pool.unsqueeze(1) if grouped else pool
        elif value.dim() > tail and grouped:
            at = value.dim() - tail - 1
            moved[name] = value.unflatten(at, split if value.shape[at] != 1 else (1, 1))
    ones = (1,) * len(split)
    lengths = domain.lengths
    # tiles in torch count in int64; one tensor for all calls, which find their lists by it
    if not lengths.is_cuda and lengths.dtype is not torch.int64:
        lengths = domain._once("lengths", (), lengths.long)
    tensors = domain.table.view(sequences, *ones, domain.table.shape[1]), lengths.view(sequences, *ones)
    names = [name for name, _ in inputs_of(domain.form)]
    return DomainCall(domain.form, {**moved, **dict(zip(names, tensors, strict=True))}, grouped)


def _map_tensors(value: Any, change: Any) -> Any:
    """Results in their form, each tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return type(value)({k: _map_tensors(v, change) for k, v in value.items()})
    if isinstance(value, Monoid):
        return type(value)(**{n: _map_tensors(getattr(value, n), change) for n in type(value).fields()})
    parts: Sequence[Any] = [_map_tensors(v, change) for v in value]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
