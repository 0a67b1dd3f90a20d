"""The arguments of a call: checked before any work, and what their sizes, types and devices say of it.

Every message names the argument, what was given and what was expected; ``op.py`` adds the op and its arguments.

A domain (``op(..., cols=domain)``) is bound as further arguments of the call. It is a static form and a few integer
tensors. For each form an op has a second op, whose program is restricted (``program/trace.py``) and which takes
the tensors as arguments that the body does not see: from there on they are bound, cached, traced, saved and replayed as
all other tensors are. Pages also change how arguments are read: the columns of all sequences lie in one pool, so that
heads are a batch dimension of the columns and sequences are not.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..algebra import Monoid
from ..domains import Domain, Edges, Jagged, Pages
from ..domains.base import is_plain, wrong_domain_error
from ..engines.common import bounded_cache
from ..engines.common.evaluate import Form, Sizes, broadcast_shapes, find_model, find_strides, traced_length
from ..errors import ArgumentError, DeviceError, DTypeError, ShapeError, shown
from ..program.expression import Expr, Feature, letters, topological
from ..program.lower import Lowered
from ..program.symbol import Symbol
from ..program.trace import HIDDEN, Parameter, inputs_of, public_name
from ..reductions import kind_of, outputs_of
from . import recorder

_ALL = "all cols"  # of what is given per pair, where columns are divided and it is not
GIVE = "Give a tensor, a numpy array or an array with DLPack; of a table, table.to_numpy()"
READ = "Files are read by op.stream(rows).over(columns); or open it, as in numpy.load(path, mmap_mode='r')"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_kind(p: Parameter, value: Any) -> None:
    """One argument against its declaration."""
    if value is None and p.optional:
        return
    if p.is_tensor:
        if isinstance(value, Symbol):
            raise ArgumentError(
                detail=f"an op was called inside the body of another, with {shown(value)} as {p.name}",
                fix="Call the function that it was made of, as in op.function(...): a body may use any other",
            )
        if not isinstance(value, Tensor):
            fix = READ if isinstance(value, (str, os.PathLike)) else GIVE
            raise ArgumentError(detail=f"{p.name} is declared {p}, but was given {shown(value)}", fix=fix)
        if value.is_nested:
            raise ArgumentError(
                detail=f"{p.name} is a nested tensor", fix="Give its values(), or give rows and columns without cols="
            )
        if value.dim() < len(p.tail):
            raise ShapeError(
                detail=f"{p.name} is declared {p}, so its shape is {p.shape}, but it is {tuple(value.shape)}",
                fix="Add the missing axis, or change the declaration",
            )
        if value.is_complex() or value.is_sparse or value.is_quantized:
            kind = "" if value.is_complex() else ", sparse" if value.is_sparse else ", quantised"
            raise DTypeError(detail=f"{p.name} is {shown(value)}{kind}", fix="Give a dense tensor of real numbers")
    elif p.axis == "number":
        if isinstance(value, Tensor):
            if value.dim() != 0:
                raise ShapeError(
                    detail=f"{p.name} is declared {p}, one number, but was given a tensor {tuple(value.shape)}",
                    fix="Give a number or a 0-dim tensor, or declare it mr.Batch, Row or Col",
                )
        elif p.python is int and isinstance(value, (float, int)) and not (value == value // 1 and abs(value) < 2**63):
            raise ArgumentError(
                detail=f"{p.name} is declared int, but was given {value}", fix="Give a whole number of 64 bits"
            )
        elif not isinstance(value, (int, float, torch.SymInt)) and not hasattr(value, "item"):
            raise ArgumentError(detail=f"{p.name} is declared {p}, but was given {shown(value)}", fix="Give a number")


def number_class(dtype: torch.dtype) -> str:
    return "float" if dtype.is_floating_point else "bool" if dtype is torch.bool else "int"


def pad_batch_dims(value: Any, p: Parameter, rank: int) -> Any:
    """A tensor with all the batch dimensions there are (size 1 in front), a view; numbers and choices as they are."""
    if not isinstance(value, Tensor):
        return value.item() if hasattr(value, "item") else value
    own = value.dim() - len(p.tail)
    as_given = p.axis in ("pairs", "list", "lists", "edges") or p.stored or p.name.startswith(HIDDEN)
    if not value.is_floating_point() and value.dtype not in (torch.bool, torch.int64) and not as_given:
        value = value.long()  # indices are int64 everywhere; what is given per pair is raised tile by tile
    if len(letters(p.feature)) == 2:
        value = value.flatten(-2)
    return value[(None,) * (rank - own)] if rank > own else value


def bind_inputs(parameters: dict[str, Parameter], values: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """The arguments that are there, as a program's inputs."""
    return {n: pad_batch_dims(v, parameters[n], len(sizes.batch)) for n, v in values.items() if v is not None}


def find_sizes(
    parameters: dict[str, Parameter], values: dict[str, Any], wide: bool = False
) -> tuple[Sizes, torch.dtype | None]:
    """Check that sizes, types and devices agree, and say what they are. Where ``wide``, what is given per pair has more
    columns than are here."""
    found: dict[str, tuple[str, int]] = {}
    batch: tuple[int, ...] = ()
    batch_of = ""
    floats: dict[str, torch.dtype] = {}
    devices: dict[str, torch.device] = {}
    for name, p in parameters.items():
        value = values.get(name)
        if not isinstance(value, Tensor):
            continue
        if p.axis == "number" and value.device.type == "cpu":
            continue
        devices[name] = value.device
        if p.axis == "number":
            continue
        lists = p.axis in ("list", "lists", "edges")
        if value.dtype.is_floating_point and not p.stored:
            floats[name] = value.dtype
        own = tuple(value.shape[: value.dim() - len(p.tail)])
        for axis, length in zip(p.tail, value.shape[len(own) :], strict=True):
            if p.packing is not None and p.packing[0] == 4 and axis == p.feature:
                length *= 2  # two in a byte
            if not lists and (length != 1 or p.axis != "pairs"):  # an axis of size 1 of a Pair is broadcast
                _agree(found, _ALL if wide and p.axis == "pairs" and axis == "cols" else axis, name, length)
        try:
            batch = broadcast_shapes(batch, own)
        except RuntimeError:
            raise ShapeError(
                detail=f"the batch dimensions of {public_name(name)}, {own}, do not broadcast with {tuple(batch)} of "
                f"{public_name(batch_of)}",
                fix="Leading dimensions must be equal or 1",
            ) from None
        batch_of = batch_of or name
    if len(set(devices.values())) > 1:
        raise DeviceError(
            detail="arguments are on different devices: "
            + ", ".join(f"{public_name(n)} on {d}" for n, d in devices.items())
        )
    sides = {n: d for n, d in floats.items() if parameters[n].axis in ("rows", "cols")} or floats
    dtype = next(iter(sides.values()), None) or _find_stored_type(parameters)
    compute = torch.float32 if dtype in (None, torch.float16, torch.bfloat16) else dtype
    kinds = {d for n, d in floats.items() if n in sides or d != compute}  # a Pair or Batch may have the arithmetic's
    if len(kinds) > 1:
        raise DTypeError(
            detail="arguments mix floating types: " + ", ".join(f"{n} is {str(d)[6:]}" for n, d in floats.items())
        )
    if dtype is not None and dtype not in _FLOATS:
        raise DTypeError(
            detail=f"{next(iter(floats))} is {dtype}, which has no arithmetic here",
            fix="Use float64, float32, float16 or bfloat16",
        )
    device = next(iter(devices.values()), torch.device("cpu"))
    if _ALL in found and "cols" not in found:
        raise ShapeError(
            detail=f"columns are divided, but only {found[_ALL][0]} says how many there are, for every pair",
            fix="Divide the rows alone: mr.shard(rows=...)",
        )
    sizes = {k: s for k, (_, s) in found.items() if k != _ALL}
    if "rows" not in sizes and isinstance(ends := values.get("_cols_rowptr"), Tensor):
        sizes["rows"] = ends.shape[-1] - 1
    for p in parameters.values():
        if p.feature is not None and len(names := letters(p.feature)) == 2 and all(n in sizes for n in names):
            sizes[str(p.feature)] = sizes[names[0]] * sizes[names[1]]
    return Sizes(sizes.pop("rows", 1), sizes.pop("cols", 1), tuple(batch), sizes, device, compute), dtype


def _find_stored_type(parameters: dict[str, Parameter]) -> torch.dtype | None:
    """The type that stored vectors stand for, where some do: that of results, where no other argument has one."""
    kinds = [p.wide for p in parameters.values() if p.wide is not None]
    return functools.reduce(torch.promote_types, kinds) if kinds else None


def _agree(found: dict[str, tuple[str, int]], axis: str, name: str, length: int) -> None:
    first, size = found.setdefault(axis, (name, length))
    if axis.isdigit() and length != int(axis):
        raise ShapeError(detail=f"{name} is declared with {axis} features, but has {length}", fix="Change one of them")
    if size != length:
        what = {"rows": "rows", "cols": "columns", _ALL: "columns"}.get(axis, f'features "{axis}"')
        raise ShapeError(
            detail=f"{first} has {size} {what}, but {name} has {length}",
            fix="They must be equal"
            if axis in ("rows", "cols", _ALL)
            else "Equal letters must be equal sizes; use two letters if they differ",
        )


@functools.lru_cache(maxsize=1024)
def _list_sized(outputs: tuple[Expr, ...]) -> list[tuple[Expr, dict[Feature, None]]]:
    """The nodes that ask something of sizes, with the features that must be equally many."""
    found = []
    for e in topological(outputs):
        alike = e.op not in ("reduce", "einsum")
        features = [a.feature for a in e.args if alike and a.feature is not None]
        names: dict[Feature, None] = dict.fromkeys(features)
        if len(names) > 1 or e.op in ("part", "component", "famax", "famin", "reduce"):
            found.append((e, names))
    return found


def check_sizes(outputs: tuple[Expr, ...], sizes: Sizes) -> None:
    """What the body asks of sizes that only the call knows: features that are there, a k that is not too large."""
    for e, names in _list_sized(outputs):
        if len(names) > 1 and len({sizes.of(str(letter)) for letter in names}) > 1:
            (one, other), (m, n) = list(names)[:2], [sizes.of(str(letter)) for letter in names][:2]
            shown_as = [f'a vector over "{letter}"'.replace('vector over "#', 'top-k of "') for letter in (one, other)]
            raise ShapeError(
                detail=f"{e.op} combines {shown_as[0]}, which has {m} features, with {shown_as[1]}, which has {n}",
                fix="A top-k's values are combined with vectors of k features",
            )
        if e.op == "part" and not -(count := sizes.of(letters(e.args[0].feature)[0])) <= e.attrs[0] < count:
            raise ShapeError(
                detail=f"vector [{e.attrs[0]}] was asked of {count} vectors",
                fix=f"They are numbered from 0 to {count - 1}",
            )
        if e.op == "component" and not -(count := sizes.of(str(e.args[0].feature))) <= e.attrs[0] < count:
            raise ShapeError(
                detail=f'feature [{e.attrs[0]}] was asked of a vector over "{e.args[0].feature}", which has {count}',
                fix=f"Features are numbered from 0 to {count - 1}",
            )
        if e.op in ("famax", "famin") and sizes.of(str(e.args[0].feature)) == 0:
            raise ShapeError(
                detail=f"the {'largest' if e.op == 'famax' else 'smallest'} feature was asked of a vector over "
                f'"{e.args[0].feature}", which has none',
                fix="Give it at least one feature",
            )
        if e.op == "reduce":
            axis = {"cols": "columns"}.get(e.attrs[1], "rows")
            kind_of(e).check_length(e.attrs[2], sizes.of(e.attrs[1]), axis)


# The form in which users hold results: shapes, types and strides.
#
# Whoever allocates a result and whoever only says what it will be (a compiler's fake tensors) ask the same functions.


def output_form(e: Expr, sizes: Sizes, out: torch.dtype | None, total: bool = False) -> Form:
    """An output as users hold it: every axis of its kind and the whole batch, or no axis where it is a sum of numbers
    per row; vectors in the inputs' type ``out``.

    Numbers stay in the type they were accumulated in: rounding a loss or a logsumexp to 16 bits would cost 1e-3.
    """
    tail = (*((sizes.rows,) if e.rows else ()), *((sizes.cols,) if e.cols else ()))
    tail += () if e.feature is None else (sizes.of(str(e.feature)),)
    kind = {"bool": torch.bool, "int": torch.int64}.get(e.dtype, sizes.compute)
    if total:
        return (), kind if e.dtype == "float" else torch.int64
    if out is not None and e.feature is not None and e.dtype == "float" and not _is_list_of_numbers(e):
        kind = out
    return (*sizes.batch, *tail), kind


def output_axes(outputs: Sequence[Expr]) -> list[str]:
    """The axis that each output has an entry for: ``rows``, ``cols`` or none."""
    return ["rows" if e.rows else "cols" if e.cols else "" for e in outputs]


@functools.lru_cache(maxsize=1024)
def _is_list_of_numbers(e: Expr) -> bool:
    """True where only integers have this feature, as the numbers at a row's given indices: no vector of the inputs."""
    named = [n.dtype for n in topological([e]) if n.feature == e.feature and not n.args]
    return bool(named) and all(dtype == "int" for dtype in named)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, as torch counts them: an axis of size 0 as one of size 1."""
    found: list[Any] = []
    step: Any = 1  # an int, or a torch.SymInt
    for length in reversed(shape):
        found.append(step)
        step = step * torch.sym_max(length, 1)
    return tuple(reversed(found))


def output_strides(program: Lowered, output: int, shape: tuple[int, ...], inputs: Mapping[str, Any]) -> tuple[int, ...]:
    """The strides of an output of a program of one pass, as its engine allocates it: in the memory order of an input,
    where it belongs to that input (``engines/common/evaluate.py``)."""
    (one,) = program.passes
    e = program.outputs[output]
    leaves = [inputs[str(x.attrs[0])] if x.op == "input" else None for x in one.feeds]
    at = next((k for k, users in enumerate(one.results) if e in users), None)
    if at is None:  # arithmetic of one side, laid out as the vectors that it reads: results of the fold, if any
        own = [
            (r, k) for r, k in one.fold.outputs if outputs_of(r)[k][0] == e.feature and (r.rows, r.cols) == e.axes[:2]
        ]
    else:
        own = [one.fold.outputs[at]]
    model = find_model(one.fold, *own[0], leaves) if own and e.feature is not None else None
    return find_strides(shape, model) or contiguous_strides(shape)


def gradient_strides(leaf: Tensor) -> tuple[int, ...]:
    """The strides of the gradient of an input: in its memory order."""
    return find_strides(tuple(leaf.shape), leaf) or contiguous_strides(leaf.shape)


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
