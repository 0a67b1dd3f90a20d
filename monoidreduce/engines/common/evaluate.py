"""Plain torch evaluation of expressions: what runs before and after the passes, and the engine ``reference``.

Every value is held in one layout, ``[*batch, rows, cols]`` and a trailing feature axis for vectors, with size 1 for
an axis that the value does not have; so numbers, rows, columns and whole pair matrices broadcast by themselves.
Python numbers stay Python numbers. Differentiable by autograd. 16-bit inputs are cast to float32 when arithmetic
reads them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...domains import Domain, restore
from ...errors import EngineError
from ...plan import settings
from ...program.constructors import LISTED, find_listed, listed_node, substitute
from ...program.expression import Expr, const, letters, topological
from ...program.lower import Fold
from ...program.primitives import PRIMITIVES
from ...reductions import kind_of, outputs_of
from ...reductions.base import folded_dim, stretch
from .shard import Shard

# The nodes of listed pairs (``program/trace.py``) evaluated densely, for the reference engine.
#
# A pair that is listed twice is folded twice. A mask cannot say that, so a reduction whose lists repeat a pair is given
# one copy of the folded axis for each time, and a copy's pairs that are not listed so often are the identity.


def restore_domain(form: tuple, tensors: Sequence[Tensor]) -> Domain:
    """The domain of these tensors, whose leading dimensions are batch dimensions of the call."""
    if form[0] == "pages":  # sequences are the only batch dimension that a table has
        table, lengths = tensors
        tensors = table.reshape(lengths.numel(), table.shape[-1]), lengths.reshape(-1)
    return restore(form, tuple(tensors))


def count_pairs(e: Expr, tensors: Sequence[Tensor], rows: int, cols: int) -> Tensor:
    """How often each pair is listed: ``[*batch, rows, cols]``. Raises EngineError where numbers cannot be read."""
    if any(type(t) is not Tensor or torch._C._functorch.is_batchedtensor(t) for t in tensors):
        raise EngineError(
            detail="the reference engine reads how often each pair is listed, which is not known while torch.compile "
            "traces a call or torch.vmap maps its lists",
            fix='Use mr.use(engine="eager")',
        )
    found = restore_domain(e.attrs[0], tensors).mask(rows, cols)
    if e.attrs[0][0] == "pages":
        found = found.reshape(*tensors[1].shape, rows, cols)
    return found


def evaluate_node(e: Expr, tensors: Sequence[Tensor], rows: int, cols: int) -> Tensor:
    """The value of a node for every pair."""
    if e.op != "listed_position":
        return count_pairs(e, tensors, rows, cols) > 0
    table, lengths = tensors
    page, flat = e.attrs[0][1], table.reshape(lengths.numel(), table.shape[-1]).long()
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
    later: Callable[[], list[Tensor]],
) -> list[Tensor]:
    """The results of a reduction over the folded axis of ``size`` by ``dense(fields, size)``. ``later``: the fields of
    an entry that is not the first of several equal ones."""
    listed = find_listed(e.args)
    if listed is None:
        return dense(fields, size)
    tensors, (form,) = [tensors_of(a) for a in listed.args], listed.attrs
    kind, (_, over, params) = kind_of(e), e.attrs
    times = count_pairs(listed, tensors, *shape)
    most = int(times.max()) if times.numel() else 0
    vectors = [a.feature is not None for a in e.args]
    if most < 2:
        if kind.place is None or form[0] != "pages" or over != "cols":
            return dense(fields, size)
        position = evaluate_node(listed_node("listed_position", form, listed.args), tensors, *shape)
        order = position.argsort(-1)  # the first of equals is the first of the sequence
        (*fields, order) = torch.broadcast_tensors(*stretch(fields, vectors, over, size), order)
        found = dense([f.gather(-1, order) for f in fields], size)
        found[kind.place] = _to_position(found[kind.place], position.sort(-1).values)
        return found
    absent, n = kind.absent(params, e.args), len(fields)
    again = later() if any(x.op == "listed_once" for x in topological(e.args)) else fields
    whole = stretch([*fields, *again, times], [*vectors, *vectors, False], over, size)
    copies = []
    for f, behind, vector, nothing in zip(whole[:n], whole[n:-1], vectors, absent, strict=True):
        seen = [(times > k).unsqueeze(-1) if vector else times > k for k in range(most)]
        own = [f, *[behind] * (most - 1)]
        parts = [
            x if nothing is None else torch.where(one, x, torch.full((), nothing, dtype=x.dtype, device="cpu"))
            for x, one in zip(own, seen, strict=True)
        ]
        axis = f.dim() + folded_dim(over, vector)
        copies.append(torch.stack(torch.broadcast_tensors(*parts), axis + 1).flatten(axis, axis + 1))
    found = dense(copies, size * most)
    if kind.place is not None:
        place = found[kind.place]
        found[kind.place] = torch.where(place < 0, place, place // most)
    return found


def _to_position(place: Tensor, position: Tensor) -> Tensor:
    """Columns of all pages as positions in the sequence; ``position``: ``[*batch, 1, cols]``."""
    if not position.shape[-1]:
        return place
    behind = position.dim() - 1
    rows = place.reshape(*place.shape[:behind], math.prod(place.shape[behind:]))
    position = position.expand(*rows.shape[:-1], position.shape[-1])
    return torch.where(rows < 0, rows, position.gather(-1, rows.clamp(min=0))).view_as(place)


Value = Any  # a Tensor in the layout above, or a Python number
NUMBER_KINDS = {"bool": torch.bool, "int": torch.int64}  # else the type of the arithmetic


@dataclass(frozen=True)
class Sizes:
    """The sizes of one call: rows, columns, batch shape, letters; its device and the type that arithmetic is done in.

    With sharded rows or columns, ``rows`` and ``cols`` are the local sizes and ``of`` returns the global ones, which is
    what ``num_rows`` and ``num_cols`` of a program mean. ``repeats``: about how many folds like this one a call runs,
    for which what is compiled once serves all."""

    rows: int
    cols: int
    batch: tuple[int, ...]
    letters: Mapping[str, int]
    device: torch.device
    compute: torch.dtype
    shard: Shard | None = None
    repeats: int = 1

    def of(self, axis: str) -> int:
        if axis in ("rows", "cols"):
            return self.here(axis) if self.shard is None else self.shard.axis(axis).total
        return int(axis.lstrip("#")) if axis.lstrip("#").isdigit() else self.letters[axis]

    def here(self, axis: str) -> int:
        return self.rows if axis == "rows" else self.cols


def traced_length(length: int) -> int:
    """A length as a number: where a compiler leaves it open, the number that it was traced with, without a guard."""
    if type(length) is int:
        return length
    hint = getattr(getattr(length, "node", None), "hint", None)
    return int(length if hint is None else hint)


PRECISIONS = ("ieee", "tf32", "tf32x3")

# The getter behind torch.backends.cuda.matmul.fp32_precision (torch 2.9 and later, where allow_tf32 can no longer be
# read). Called directly, since it runs in every call and the public property takes four times as long.
_read_precision: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)


def float32_precision() -> str:
    """How kernels multiply float32 numbers: as set by ``mr.use``, else as torch is configured."""
    chosen = settings.current.get().precision
    if chosen is not None:
        return chosen
    if _read_precision is None:
        return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    said = _read_precision("cuda", "matmul")
    if said == "none":
        said = _read_precision("generic", "all")
    return "tf32" if said == "tf32" else "ieee"


Form = tuple[tuple[int, ...], torch.dtype]  # shape and type of a tensor


class Allocator:
    """Allocates tensors of one shape and type with ``empty_like``, which takes half the time of ``empty``.

    The model tensor is made when it is first needed, since plans are also made for devices that are not present. Its
    storage is empty: during CUDA graph capture by a compiler, no memory of a first call may stay allocated.

    ``strides``: of a dense tensor, contiguous if left out."""

    __slots__ = ("_model", "device", "form", "strides")

    def __init__(self, form: Form, device: torch.device, strides: tuple[int, ...] | None = None):
        self.form, self.device, self.strides = form, device, strides
        self._model: Tensor | None = None

    @property
    def model(self) -> Tensor:
        """The tensor that ``empty_like`` copies the form of."""
        if self._model is None:
            shape, dtype = self.form
            strides = self.strides or (0,) * len(shape)  # of an expanded number: the copy is contiguous
            self._model = torch.empty_strided(shape, strides, dtype=dtype, device=self.device)
            self._model.untyped_storage().resize_(0)
        return self._model

    def __call__(self) -> Tensor:
        return torch.empty_like(self.model if self._model is None else self._model)


def result_form(r: Expr, k: int, sizes: Sizes, batch: tuple[int, ...] | None = None) -> Form:
    """Shape and type of a reduction's k-th result, for the batch shape of ``sizes`` or for ``batch``."""
    feature, number = outputs_of(r)[k]
    length = {"cols": (sizes.rows,), "rows": (sizes.cols,)}.get(r.attrs[1], ())
    tail = () if feature is None else (sizes.of(str(feature)),)
    if kind_of(r).keeps_pairs:
        tail = (sizes.here(r.attrs[1]),)
    dtype = sizes.compute if number == "float" else torch.int64
    return (*(sizes.batch if batch is None else batch), *length, *tail), dtype


def pair_result_form(like: Tensor, sizes: Sizes) -> Form:
    """Shape and type of a result per pair, which is the gradient of the argument ``like``: the argument's own type, or
    the compute type where it is broadcast and gradients are summed."""
    once = like.shape == (*sizes.batch, sizes.rows, sizes.cols)
    return tuple(like.shape), like.dtype if once else sizes.compute


def to_layout(t: Value, e: Expr) -> Value:
    """A tensor as users hold it (``[*batch, M or N, f]``) as a view in the layout of this module."""
    if not isinstance(t, Tensor):
        return t
    at = t.dim() - (e.feature is not None)
    if not e.rows and not e.cols:
        return t.unsqueeze(at).unsqueeze(at)
    return t.unsqueeze(at) if not e.cols else t.unsqueeze(at - 1) if not e.rows else t


def from_layout(t: Value, e: Expr) -> Value:
    """The inverse of :func:`to_layout`."""
    if not isinstance(t, Tensor):
        return t
    last = t.dim() - 1 - (e.feature is not None)  # the column axis
    if not e.cols:
        t = t.squeeze(last)
    return t if e.rows else t.squeeze(last - 1)


@dataclass
class Evaluator:
    """Evaluates expressions given the values of inputs; ``memo`` may be seeded with the results of passes."""

    sizes: Sizes
    inputs: Mapping[str, Value]
    memo: dict[Expr, Value] = field(default_factory=dict)

    def __call__(self, e: Expr) -> Value:
        if e in self.memo:
            return self.memo[e]
        for n in topological([e], stop=self.memo.__contains__):
            if n not in self.memo:
                self.memo[n] = self._node(n)
        return self.memo[e]

    def feed(self, e: Expr) -> Value:
        """What a pass is fed with: the value, or stored vectors as they are, which engines widen tile by tile."""
        return self.inputs[e.attrs[0]] if e.is_stored else from_layout(self(e), e)

    def _node(self, e: Expr) -> Value:
        if e.packing is not None:
            scale, width = self.inputs[e.args[0].attrs[0]] if e.args else None, self.sizes.of(str(e.feature))
            return to_layout(unpack(e.packing, width, self.inputs[e.attrs[0]], scale, self.sizes.compute), e)
        if e.op in ("input", "leaf"):
            return to_layout(self.inputs[e.attrs[0]], e)
        if e.op == "const":
            return e.attrs[0]
        if e.op == "nan":
            return float("nan")
        if e.op == "size":
            return self.sizes.of(e.attrs[0])
        if e.op.endswith("_index"):
            return self._index(e.op)
        if e.op == "result":
            return self.memo[e.args[0]][e.attrs[0]]
        if e.op in LISTED:
            return evaluate_node(e, [self._list(a) for a in e.args], self.sizes.rows, self.sizes.cols)
        args = [self.to_compute(self.memo[a], a) for a in e.args]
        if e.op == "reduce":
            return self._reduce(e, [self._tensor(a, x) for a, x in zip(args, e.args, strict=True)])
        if self.sizes.shard is not None:
            args = [
                self.sizes.shard.replicate_operand(a, x, e) if isinstance(a, Tensor) else a
                for a, x in zip(args, e.args, strict=True)
            ]
        if e.op in PRIMITIVES:
            return self._primitive(e, args)
        return _FEATURES[e.op](e, self.sizes, *args)

    def _reduce(self, e: Expr, fields: list[Tensor]) -> list[Tensor]:
        kind, (_, over, params) = kind_of(e), e.attrs
        vectors = [a.feature is not None for a in e.args]

        def local(fields: list[Tensor], params: tuple, size: Any) -> list[Tensor]:
            return kind.dense(fields, vectors, over, params, size)

        if self.sizes.shard is not None:
            return self.sizes.shard.reduce(e, fields, local)
        shape: Any = (self.sizes.rows, self.sizes.cols)

        def dense(fields: list[Tensor], size: int) -> list[Tensor]:
            if kind.both_axes:
                return local(fields, params, shape)
            return kind.dense_part(local, fields, params, size)  # a list may be shorter than the k that are asked for

        def later() -> list[Tensor]:
            first = {x: const(False) for x in topological(e.args) if x.op == "listed_once"}
            found = [(self._tensor(self.to_compute(self(a), a), a), a) for a in substitute(e.args, first)]
            spread = [vector and a.feature is None for vector, (_, a) in zip(vectors, found, strict=True)]
            return [t.unsqueeze(-1) if one else t for (t, _), one in zip(found, spread, strict=True)]

        return reduce_listed(e, fields, self.sizes.here(over), self._list, shape, dense, later)

    def _list(self, e: Expr) -> Tensor:
        """A tensor of a domain as it was given, with all batch dimensions."""
        return self.inputs[e.attrs[0]]

    def to_compute(self, value: Value, e: Expr) -> Value:
        return to_compute_dtype(value, e, self.sizes.compute) if isinstance(value, Tensor) else value

    def tensor(self, e: Expr) -> Tensor:
        """The value of ``e`` as a tensor in the compute type, also if it is a Python number."""
        return self._tensor(self.to_compute(self(e), e), e)

    def _tensor(self, value: Value, e: Expr) -> Tensor:
        if isinstance(value, Tensor):
            return value
        dims = (1,) * (len(self.sizes.batch) + 2 + (e.feature is not None))
        return torch.full(dims, value, dtype=NUMBER_KINDS.get(e.dtype, self.sizes.compute), device=self.sizes.device)

    def _index(self, op: str) -> Tensor:
        s = self.sizes
        if op == "batch_index":
            if s.shard is not None:
                return s.shard.batch_index(s.batch, s.device).view(*s.batch, 1, 1)
            count = torch.Size(s.batch).numel()
            return torch.arange(count, device=s.device).view(*s.batch, 1, 1)
        rows = op == "row_index"
        if s.shard is None:
            indices = torch.arange(s.rows if rows else s.cols, device=s.device)
        else:
            indices = (s.shard.rows if rows else s.shard.cols).index(s.device)
        return indices.view(*(1,) * len(s.batch), *((-1, 1) if rows else (1, -1)))

    def _primitive(self, e: Expr, args: list[Value]) -> Value:
        if not any(isinstance(a, Tensor) for a in args):
            return evaluate_numbers(e, args)
        primitive = PRIMITIVES[e.op]
        attributes = dict(zip(primitive.attributes, e.attrs, strict=True))
        if e.op == "cast":
            return cast(args[0], e.attrs[0], self.sizes.compute)
        tensors = []
        for a, x in zip(args, e.args, strict=True):
            if not isinstance(a, Tensor):
                kind = NUMBER_KINDS.get(x.dtype, self.sizes.compute)
                a = torch.full((), a, dtype=kind, device=self.sizes.device)  # no copy, no sync
            elif e.feature is not None and x.feature is None:
                a = a.unsqueeze(-1)
            tensors.append(a)
        value = primitive.torch(*tensors, **attributes)
        return value.to(self.sizes.compute) if e.dtype == "float" and value.dtype != self.sizes.compute else value


def evaluate_numbers(e: Expr, values: Sequence[Value]) -> Value:
    """A primitive of Python numbers: exact, in float64, and a Python number too."""
    primitive = PRIMITIVES[e.op]
    kinds = [NUMBER_KINDS.get(x.dtype, torch.float64) for x in e.args]
    args = [torch.tensor(v, dtype=kind, device="cpu") for v, kind in zip(values, kinds, strict=True)]
    if e.op == "cast":
        return {"float": float, "int": int, "bool": bool}[e.attrs[0]](args[0].item())
    return primitive.torch(*args, **dict(zip(primitive.attributes, e.attrs, strict=True))).item()


def to_compute_dtype(x: Tensor, e: Expr, compute: torch.dtype) -> Tensor:
    """An input in the type that arithmetic is done in."""
    return x if e.dtype == "bool" else x.to(NUMBER_KINDS.get(e.dtype, compute))


def cast(x: Tensor, to: str, compute: torch.dtype) -> Tensor:
    return x != 0 if to == "bool" else x.to(NUMBER_KINDS.get(to, compute))


def _dot(e: Expr, sizes: Sizes, x: Tensor, y: Tensor) -> Tensor:
    if x.dtype.is_floating_point:
        return x.squeeze(-2) @ y.squeeze(-3).mT
    return (x * y).sum(-1)  # integer matrix products are slow on GPUs


def _sqdist(e: Expr, sizes: Sizes, x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().sum(-1)


def _component(e: Expr, sizes: Sizes, x: Tensor) -> Tensor:
    return x[..., e.attrs[0]]


def _spread(e: Expr, sizes: Sizes, x: Value) -> Value:
    count = sizes.of(str(e.attrs[0]))
    if not isinstance(x, Tensor):
        ones = (1,) * (len(sizes.batch) + 2)
        return torch.full((*ones, count), x, dtype=NUMBER_KINDS.get(e.dtype, sizes.compute), device=sizes.device)
    return x.unsqueeze(-1).expand(*x.shape, count)


def look_up(table: Value, index: Value, axes: int) -> Tensor:
    """``table[..., index]`` of a table ``[*batch, n]`` and an index with ``axes`` dimensions after the batch; NaN, or 0
    of integers, outside of the table."""
    entries, own = table.shape[-1], table.shape[:-1]
    index = index if isinstance(index, Tensor) else torch.full((1,) * axes, index, device=table.device)
    inside = (index >= 0) & (index < entries)
    outside = torch.full((), math.nan if table.dtype.is_floating_point else 0, dtype=table.dtype, device=table.device)
    at = index.clamp(0, max(0, entries - 1))
    if own.numel() != 1:
        at = at + (torch.arange(own.numel(), device=at.device) * entries).view(*own, *(1,) * axes)
    if not entries:
        return outside.expand(torch.broadcast_shapes(index.shape, (*own, *(1,) * axes)))
    return torch.where(inside, table.reshape(-1)[at], outside)  # backwards it is a sorted, deterministic sum


def einsum(e: Expr, sizes: Sizes, x: Value, y: Value) -> Tensor:
    """A product of several vectors (``program/several.py``), on tensors that broadcast but for their features."""
    tensors = [_unflatten(v, a, sizes) for v, a in zip((x, y), e.args, strict=True)]
    terms, out = e.attrs[0].split("->")
    found = torch.einsum(f"...{terms.replace(',', ',...')}->...{out}", *tensors)
    return found.flatten(-2) if len(out) == 2 else found


def part(e: Expr, sizes: Sizes, x: Tensor) -> Tensor:
    """One of several vectors."""
    return _unflatten(x, e.args[0], sizes).select(-2, e.attrs[0])


def _unflatten(x: Tensor, e: Expr, sizes: Sizes) -> Tensor:
    names = letters(e.feature)
    return x.unflatten(-1, [sizes.of(name) for name in names]) if len(names) == 2 else x


_FEATURES: dict[str, Any] = {
    "lookup": lambda e, sizes, table, index: look_up(table[..., 0, 0, :], index, 2),
    "fsum": lambda e, sizes, x: x.sum(-1),
    "famax": lambda e, sizes, x: x.amax(-1),
    "famin": lambda e, sizes, x: x.amin(-1),
    "dot": _dot,
    "sqdist": _sqdist,
    "component": _component,
    "spread": _spread,
    "einsum": einsum,
    "part": part,
}


# Vectors stored with scales for blocks of features, or in 4 bits, as plain tensors: a tile at a time.
#
# Such a leaf (``Expr.packing``) is one tensor of small numbers, and where blocks have scales of their own, that is the
# leaf's argument. The engines in torch call this for the rows or columns that a tile reads.


def unpack(packing: tuple[int, int], width: int, values: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Stored vectors [..., n, f] of 8 bits, or [..., n, f / 2] of 4, times their scales [..., n, blocks]; ``width``: f.

    >>> unpack((4, 2), 4, torch.tensor([[0x98, 0xA7]], dtype=torch.uint8), torch.tensor([[1.0, 10.0]]), torch.float32)
    tensor([[  0.,   1., -10.,  20.]])
    """
    bits, block = packing
    if bits == 4:
        values = torch.stack((values & 15, values >> 4), -1).flatten(-2).to(torch.int8) - 8
    values = _cut(values.to(dtype), width)
    return values if scale is None else values * _cut(scale.to(dtype).repeat_interleave(block, -1), width)


def _cut(t: Tensor, width: int) -> Tensor:
    """The first features. Lengths of a dry run are primes, of which none is twice another: there the first is all."""
    return t[..., :width] if t.shape[-1] >= width else t[..., :1].expand(*t.shape[:-1], width)


# Leading batch dimensions: broadcast without copies.
#
# Adjacent batch dimensions that can be viewed as one in every tensor are merged; the last merged one becomes the batch
# axis of tiles and the others are looped over, so that expanded, transposed and sliced batches are never copied.


def broadcast_shapes(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """The broadcast of two batch shapes. ``torch.broadcast_shapes`` is called only if they differ: its first call takes
    a second, for its imports."""
    if not one or one == other:
        return other
    return tuple(torch.broadcast_shapes(one, other)) if other else one


def describe_leaves(leaves: Sequence[Any]) -> tuple:
    """What kernels depend on in leaves besides their values: dtype, shape, strides, alignment."""
    found: list[Any] = []
    for v in leaves:
        if isinstance(v, Tensor):
            found += (v.dtype, v.shape, v.stride(), v.data_ptr() & 15)
        else:
            found.append(type(v))
    return tuple(found)


def merge_batch_dims(
    batch: tuple[int, ...], tensors: list[Tensor], strides: Sequence[Sequence[int]] = ()
) -> tuple[tuple[int, ...], list[Tensor], list[tuple[int, ...]]]:
    """Expand each tensor to the batch shape and merge adjacent dimensions; returns the merged batch shape and views.

    ``strides``: of the batch dimensions of tensors that are yet to be allocated; returned with merged dimensions."""
    batch, count = tuple(batch), len(batch)
    views = [t if t.shape[:count] == batch else t.expand((*batch, *t.shape[count:])) for t in tensors]
    shape, others = list(batch), [list(s) for s in strides]
    at = 0
    while at + 1 < len(shape):
        strides = [*[v.stride() for v in views], *others]
        if 1 in shape[at : at + 2] or all(s[at] == s[at + 1] * shape[at + 1] for s in strides):
            views = [v.flatten(at, at + 1) for v in views]
            for s in others:
                s[at : at + 2] = [s[at] if shape[at + 1] == 1 else s[at + 1]]
            shape[at : at + 2] = [shape[at] * shape[at + 1]]
        else:
            at += 1
    if not shape:
        return (1,), [v.unsqueeze(0) for v in views], [(0,) for _ in others]
    return tuple(shape), views, [tuple(s) for s in others]


def iterate_outer(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every index into the looped (all but the last) batch dimensions."""
    return itertools.product(*(range(s) for s in shape[:-1]))


# In which order the dimensions of a fold's vectors lie in memory: as those of the input that they belong to.
#
# Attention's queries often come as ``view(B, S, H, D).transpose(1, 2)`` and its result goes back by ``transpose(1,
# 2).reshape(B, S, H * D)``. A result that lies in memory as the queries do makes that a view; so do gradients that lie
# as their inputs. The rule, for every fold and every engine that can follow it for free: a gradient takes the order of
# its leaf; any other vector per row takes that of a row vector among the leaves (of the same features, if there is
# one), and per column that of a column vector. Features stay innermost, and a result is dense even where the input is a
# slice. Numbers per row or column are contiguous.


def find_model(fold: Fold, r: Expr, k: int, leaves: Sequence[Any]) -> Tensor | None:
    """The leaf whose memory order a reduction's k-th result takes; None for numbers, and where there is none."""
    feature = outputs_of(r)[k][0]
    if feature is None or r.rows == r.cols:
        return None
    own = fold.gradient_of.get(r)
    found = {
        e: v
        for e, v in zip(fold.leaves, leaves, strict=True)
        if isinstance(v, Tensor) and e.feature is not None and (e.rows, e.cols) == (r.rows, r.cols)
    }
    if own in found:
        return found[own]
    return next((v for e, v in found.items() if e.feature == feature), next(iter(found.values()), None))


def summed_batch(fold: Fold, r: Expr, leaves: Sequence[Any], sizes: Sizes) -> tuple[int, ...]:
    """The batch shape of a gradient after it is summed over the dimensions in which its leaf has size 1; that of the
    call for any other result."""
    leaf = fold.gradient_of.get(r)
    value = None if leaf is None else leaves[fold.leaves.index(leaf)]
    if not isinstance(value, Tensor) or value.dim() < len(sizes.batch):
        return sizes.batch
    return tuple(1 if own == 1 else n for n, own in zip(sizes.batch, value.shape, strict=False))


def sum_gradients(fold: Fold, results: Sequence[Tensor], leaves: Sequence[Any], sizes: Sizes) -> list[Tensor]:
    """The results of a fold, gradients summed over the batch dimensions in which their leaf has size 1, where the
    engine has not done so."""
    found = []
    for (r, _), t in zip(fold.outputs, results, strict=True):
        batch = summed_batch(fold, r, leaves, sizes) if r in fold.gradient_of else ()
        dims = [d for d, n in enumerate(batch) if n != t.shape[d]]
        found.append(t.sum(dims, keepdim=True) if dims else t)
    return found


def find_strides(shape: tuple[int, ...], model: Tensor | None) -> tuple[int, ...] | None:
    """The strides of a dense result ``[*batch, length, features]`` in the memory order of ``model``; None where that is
    contiguous."""
    if model is None or model.dim() != len(shape):
        return None
    own = [*map(traced_length, shape)]
    moved = [d for d, n in enumerate(own[:-1]) if n > 1]
    # what the model does not have of its own comes first, as the outermost dimensions
    rank = {d: traced_length(model.stride(d)) if traced_length(model.shape[d]) > 1 else 0 for d in moved}
    order = sorted(moved, key=lambda d: (rank[d] > 0, -rank[d]))
    if order == moved or 0 in own:
        return None
    strides, step = [shape[-1]] * (len(shape) - 1), shape[-1]
    for d in reversed(order):
        strides[d] = step
        step *= shape[d]
    return (*strides, 1)


def allocate_result(fold: Fold, r: Expr, k: int, leaves: Sequence[Any], sizes: Sizes) -> Tensor:
    """Room for a result, in the memory order of the input that it belongs to; contiguous where that input does not
    have all batch dimensions, so that these stay merged: most such results are summed over them afterwards."""
    shape, dtype = result_form(r, k, sizes)
    model = find_model(fold, r, k, leaves)
    shared = model is not None and any(own == 1 < n for own, n in zip(model.shape, shape, strict=False))
    strides = None if shared else find_strides(shape, model)
    if strides is None:
        return torch.empty(shape, dtype=dtype, device=sizes.device)
    return torch.empty_strided(shape, strides, dtype=dtype, device=sizes.device)
