"""Gradients of monoids that have no local one: from ``combine`` at (one pair, all others), block by block.

Where D(c, a) is not known from c and a alone, the derivative of a fold by one of its pairs needs ⊙ of all the others.
The folded axis is cut into blocks. The blocks' states are folded once more; differentiating that small fold (prefix and
suffix products of blocks) gives the cotangent of each block, which goes back through the balanced tree inside it,
recomputed. At any time the memory of one block of some kept indices is held, and a state per block for these.

That is a reverse pass over checkpoints, and so are its derivatives. Of ⟨h, Jᵀ g⟩, the gradient in a direction h, the
gradient by the inputs is that of ⟨g, Ṗ⟩, where (P, Ṗ) is the fold of (a, ȧ): the pairs with their tangents are a monoid
too. ``order`` says how often tangents were added; everything here is written once for all orders, in torch alone, so
that it runs on any device and under every transform.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...errors import NoGradientError
from ...plan import budget, candidates
from ...plan.candidates import DeviceRates, count_fold
from ...program.constructors import find_listed
from ...program.expression import Expr, Feature
from ...program.lower import Fold
from ...reductions import kind_of, outputs_of
from ...reductions.user import gradient_source, saved_by_autograd, trace_combine
from .evaluate import Evaluator, Sizes
from .matmul import free_memory
from .shard import Axis, Ranges, Shard

_BLOCK = 4096  # folded indices of a block, at most
_LEAST_BLOCK = 32
_LEAST_KEPT = 16  # kept indices below which blocks get shorter
# Numbers of a block's elements, on a CPU and on a GPU. CPU, gradients of variances of 2048 x 2048 pairs, in blocks of
# 128, 256 and 1312 (by 512) kept indices: 181, 146 and 223 ms.
_CACHED, _FILLED = 2**20, 2**26
_OF_PAIRS = 2  # numbers of a pair besides its fields
_STEPS = 10  # operators of a level besides combine's own

Function = Callable[..., tuple[Tensor, ...]]


@functools.lru_cache(maxsize=4096)
def lack_local_gradient(fold: Fold) -> tuple[bool, ...]:
    """For each result of a fold, whether its gradient comes from all others, and so from here."""
    return tuple(r.attrs[0] == "user" and gradient_source(r.attrs[2][0]) == "others" for r, _ in fold.outputs)


def differentiate_by_blocks(
    fold: Fold, leaves: Sequence[Any], sizes: Sizes, wanted: Sequence[bool], cotangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of leaves (those ``wanted``) through the results of :func:`lack_local_gradient`; differentiable."""
    grads: list[Tensor | None] = [None] * len(leaves)
    for fold_of, given in iterate_block_reductions(fold, cotangents):
        job = Blocks(fold_of, sizes, tuple(leaves), tuple(wanted))
        add_gradients(grads, job, job.gradients(given))
    return grads


def split_cotangents(fold: Fold, cotangents: Sequence[Tensor | None]) -> tuple[list, list]:
    """The cotangents of the results that have a local gradient, and those of all others; None elsewhere."""
    pairs = [*zip(cotangents, lack_local_gradient(fold), strict=True)]
    return [None if other else g for g, other in pairs], [g if other else None for g, other in pairs]


def add_gradients(grads: list[Tensor | None], job: Blocks, found: Sequence[Tensor]) -> None:
    """Add the gradients of a job's leaves to those of all leaves."""
    for k, g in zip(job.asked, found, strict=True):
        before = grads[k]
        grads[k] = g if before is None else before + g


def iterate_block_reductions(
    fold: Fold, cotangents: Sequence[Tensor | None]
) -> Iterator[tuple[Fold, list[Tensor | None]]]:
    """Each reduction of :func:`lack_local_gradient` as a fold of its own, with its cotangents, if it has any."""
    at = 0
    for r in fold.reductions:
        count = len(outputs_of(r))
        given = list(cotangents[at : at + count])
        if lack_local_gradient(fold)[at] and any(g is not None for g in given):
            _refuse_lists(r)
            yield Fold(fold.leaves, (r,), exact=fold.exact), given
        at += count


def _refuse_lists(r: Expr) -> None:
    if find_listed(r.args) is not None:
        raise NoGradientError(
            detail=f"the gradient of {r.attrs[2][0].__name__} needs all other pairs of a row, block by block, but the "
            "pairs of this call are listed (cols=)",
            fix="Hide pairs with torch.where instead, or add pullback(c, a, g) to the monoid",
        )


@dataclass(frozen=True, eq=False)
class Blocks:
    """A fold of one reduction on its leaves, to be run and differentiated block by block."""

    fold: Fold
    sizes: Sizes
    leaves: tuple[Any, ...]
    wanted: tuple[bool, ...]

    @property
    def reduction(self) -> Expr:
        return self.fold.reductions[0]

    @functools.cached_property
    def differentiable(self) -> tuple[int, ...]:
        """The leaves that derivatives are taken by: all floating-point tensors."""
        return tuple(k for k, v in enumerate(self.leaves) if isinstance(v, Tensor) and v.is_floating_point())

    @functools.cached_property
    def asked(self) -> tuple[int, ...]:
        return tuple(k for k in self.differentiable if self.wanted[k])

    def states(self) -> list[Tensor]:
        """The results of the fold."""
        return list(_Fold.apply(_Call(self, 0), *(self.leaves[k] for k in self.differentiable)))

    def gradients(self, cotangents: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """The gradients of the leaves that are asked for."""
        asked = tuple(self.differentiable.index(k) for k in self.asked)
        if not asked:
            return ()
        given = self.fill_cotangents(cotangents)
        return _Gradient.apply(_Call(self, 0, asked), *(self.leaves[k] for k in self.differentiable), *given)

    def fill_cotangents(self, cotangents: Sequence[Tensor | None]) -> list[Tensor]:
        """Cotangents, with zeros for those that are not given."""
        return [self._make_zeros(k) if g is None else g for k, g in enumerate(cotangents)]

    # Blocks

    @functools.cached_property
    def over_cols(self) -> bool:
        return bool(self.reduction.attrs[1] == "cols")

    def cut_both_axes(self, order: int) -> tuple[list[slice], list[slice]]:
        """The slices of the kept and of the folded axis."""
        kept, folded = (self.sizes.rows, self.sizes.cols) if self.over_cols else (self.sizes.cols, self.sizes.rows)
        return cut_axes(self.reduction, self.sizes, int(kept), int(folded), order)  # a compiler compiles for these

    def leaf_slice(self, k: int, value: Tensor, kept: slice, folded: slice) -> Tensor:
        e = self.fold.leaves[k]
        for axis, here in self._find_axes(e, value):
            at = kept if (axis == "rows") == self.over_cols else folded
            value = value.narrow(here, at.start, at.stop - at.start)
        return value

    @staticmethod
    def _find_axes(e: Expr, value: Tensor) -> list[tuple[str, int]]:
        """The axes along which a leaf is cut, and where they are; an axis of size 1 of an argument per pair is not."""
        last = value.dim() - 1 - (e.feature is not None)
        axes = [("rows", last - e.cols)] if e.rows else []
        axes += [("cols", last)] if e.cols else []
        return [(axis, at) for axis, at in axes if not e.is_pair or value.shape[at] != 1]

    def cut_axis(self, k: int, like: Tensor, kept: bool) -> int | None:
        """Where leaf k is cut along the kept or the folded axis; None where it is not, and its gradients add up."""
        found = {(axis == "rows") == self.over_cols: at for axis, at in self._find_axes(self.fold.leaves[k], like)}
        return found.get(kept)

    def function(self, order: int, kept: slice, folded: slice) -> Function:
        """The fold of one block, as a function of the slices of the moving leaves and, for each order, tangents."""
        rows, cols = (kept, folded) if self.over_cols else (folded, kept)
        fixed = {
            str(e.attrs[0]): self.leaf_slice(k, v, kept, folded) if isinstance(v, Tensor) else v
            for k, (e, v) in enumerate(zip(self.fold.leaves, self.leaves, strict=True))
            if k not in self.differentiable
        }
        names = [str(self.fold.leaves[k].attrs[0]) for k in self.differentiable]
        sizes = self._make_block_sizes(rows, cols)
        r = self.reduction

        def block(*values: Tensor) -> tuple[Tensor, ...]:
            evaluate = Evaluator(sizes, fixed | dict(zip(names, values, strict=True)))
            fields = [evaluate.tensor(a) for a in r.args]
            _, over, params = r.attrs
            vectors = [a.feature is not None for a in r.args]
            found = kind_of(r).dense(fields, vectors, over, params, sizes.here(over))
            length = sizes.rows if self.over_cols else sizes.cols
            made = []
            for t, (feature, _) in zip(found, outputs_of(r), strict=True):
                t = t.squeeze((-1 if self.over_cols else -2) - (feature is not None))
                made.append(t.expand(*sizes.batch, length, *t.shape[t.dim() - (feature is not None) :]))
            return tuple(made)

        return _add_tangents(block, order)

    def merge(self, order: int) -> Function:
        """The fold of stacked states, as a function of them and of their tangents."""
        kind, params = kind_of(self.reduction), self.reduction.attrs[2]
        return _add_tangents(lambda *stacked: tuple(kind.fold(params, stacked, 0)), order)

    def _make_block_sizes(self, rows: slice, cols: slice) -> Sizes:
        shard = self.sizes.shard
        own = Shard(Axis((((0, self.sizes.rows),),)), Axis((((0, self.sizes.cols),),))) if shard is None else shard
        kept = Axis((_cut_ranges(own.rows.own, rows),), whole=own.rows.total)
        place = Shard(kept, Axis((_cut_ranges(own.cols.own, cols),), whole=own.cols.total), batch=own.batch)
        return replace(self.sizes, rows=rows.stop - rows.start, cols=cols.stop - cols.start, shard=place)

    def _make_zeros(self, k: int) -> Tensor:
        feature, _ = outputs_of(self.reduction)[k]
        length = self.sizes.rows if self.over_cols else self.sizes.cols
        tail = () if feature is None else (self.sizes.of(str(feature)),)
        return torch.zeros(*self.sizes.batch, length, *tail, dtype=self.sizes.compute, device=self.sizes.device)

    def result_slice(self, value: Tensor, k: int, kept: slice) -> Tensor:
        """Some kept indices of result (or cotangent, or tangent) number k."""
        feature, _ = outputs_of(self.reduction)[k % len(outputs_of(self.reduction))]
        return value.narrow(value.dim() - 1 - (feature is not None), kept.start, kept.stop - kept.start)

    def slices_of(self, values: Sequence[Tensor], kept: slice, folded: slice) -> list[Tensor]:
        """The slices of the moving leaves and of their tangents."""
        count = len(self.differentiable)
        return [self.leaf_slice(self.differentiable[n % count], v, kept, folded) for n, v in enumerate(values)]


def cut_axes(r: Expr, sizes: Sizes, kept: int, folded: int, order: int = 0) -> tuple[list[slice], list[slice]]:
    """The slices in which the budget allows to differentiate a fold, on a CPU of no more numbers than stay in a cache.

    Where all folded indices of some kept ones fit in a block, its pairs are computed once, and twice where they do not:
    so blocks are long and narrow."""
    room = budget.allowed_bytes(lambda: free_memory(sizes.device)) // _count_held_bytes(r, sizes, order)
    count = max(1, torch.Size(sizes.batch).numel())
    room = min(room, (_CACHED if sizes.device.type == "cpu" else _FILLED) // (_count_state_numbers(r, sizes) * count))
    block = max(1, min(folded, _BLOCK))
    while block > _LEAST_BLOCK and room // _count_elements(folded, block) < min(_LEAST_KEPT, kept):
        block //= 2
    block = -(-folded // -(-folded // block)) if folded else block  # equally long, but for the last
    return _cut_slices(kept, max(1, room // _count_elements(folded, block))), _cut_slices(folded, block)


def _count_elements(folded: int, block: int) -> int:
    """Pairs of a block, and states of all blocks, that one kept index holds."""
    return block if block >= folded else block + -(-folded // block)


def _count_state_numbers(r: Expr, sizes: Sizes) -> int:
    return sum(_list_widths(r, [f for f, _ in outputs_of(r)], sizes))


def _list_widths(r: Expr, features: Iterable[Feature], sizes: Sizes) -> list[int]:
    """The numbers of vectors with these features; of those that are none of the fold's, the widest field's."""
    own = [a.feature for a in r.args if a.feature is not None]
    widest = max((sizes.of(str(f)) for f in own), default=1)
    return [1 if f is None else sizes.of(str(f)) if f in own else widest for f in features]


def _count_held_bytes(r: Expr, sizes: Sizes, order: int = 0) -> int:
    """Bytes that differentiating a fold holds for one element of every batch element: the elements, what autograd saves
    of all levels of their tree, and the elements' cotangents. With tangents there is twice as much of everything."""
    features, given = tuple(a.feature for a in r.args), tuple(a.op != "const" for a in r.args)
    saved = saved_by_autograd(r.attrs[2][0], features, given)
    elements = [f for f, own in zip(features, given, strict=True) if own]
    numbers = 2 * sum(_list_widths(r, elements, sizes)) + sum(_list_widths(r, saved, sizes)) + _OF_PAIRS
    return sizes.compute.itemsize * numbers * 3**order * max(1, torch.Size(sizes.batch).numel())


def describe_blocks(r: Expr, sizes: Sizes) -> tuple[int, int, int]:
    """The kept and folded indices of a block, and the bytes that differentiating it holds."""
    kept, folded = (sizes.rows, sizes.cols) if r.attrs[1] == "cols" else (sizes.cols, sizes.rows)
    (one, *_), (block, *_) = cut_axes(r, sizes, kept, folded)
    return one.stop, block.stop, one.stop * _count_elements(folded, block.stop) * _count_held_bytes(r, sizes)


def estimate_gradient(fold: Fold, sizes: Sizes, rates: DeviceRates) -> candidates.Estimate:
    """The cost of differentiating a fold of one reduction block by block."""
    (r,), (kept, block, held) = fold.reductions, describe_blocks(fold.reductions[0], sizes)
    wide = sizes.compute.itemsize
    work = count_fold(fold, tuple(sizes.letters.items()), wide, wide)
    length, folded = (sizes.rows, sizes.cols) if r.attrs[1] == "cols" else (sizes.cols, sizes.rows)
    pairs = torch.Size(sizes.batch).numel() * length * folded
    times = 3 + (block < folded)  # forward and twice as much back; before it, all blocks' states
    flops = pairs * times * (work.products + work.contracted)
    numbers = pairs * times * (work.plain + work.special)
    operators = len(trace_combine(r.attrs[2][0], tuple(a.feature for a in r.args))) + _STEPS
    calls = -(-length // max(kept, 1)) * -(-folded // max(block, 1)) * times * max(block, 2).bit_length() * operators
    seconds = flops / rates.rate(str(sizes.compute)[6:]) + numbers * candidates.torch_number_seconds(rates, wide)
    return candidates.Estimate(flops, 3 * wide * numbers, seconds + calls * rates.launch, held, held)


def _cut_slices(length: int, size: int) -> list[slice]:
    return [slice(at, min(length, at + size)) for at in range(0, length, size)] or [slice(0, 0)]


def _cut_ranges(ranges: Ranges, at: slice) -> Ranges:
    """The global ranges of the local indices ``at``."""
    found, first = [], 0
    for start, stop in ranges:
        one, other = max(first, at.start), min(first + stop - start, at.stop)
        if one < other:
            found.append((start + one - first, start + other - first))
        first += stop - start
    return tuple(found)


def _join(parts: Sequence[Tensor], at: int | None) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return functools.reduce(torch.add, parts) if at is None else torch.cat(list(parts), at)


def _add_tangents(function: Function, order: int) -> Function:
    """``function`` of inputs and tangents: its results and their tangents; ``order`` times over."""
    if order == 0:
        return function
    inner = _add_tangents(function, order - 1)

    def push_forward(*values: Tensor) -> tuple[Tensor, ...]:
        half = len(values) // 2
        # a tangent is laid out as its value, and cannot be written where elements of that share memory
        values = tuple(v.contiguous() if 0 in v.stride() else v for v in values)
        pair: Any = torch.func.jvp(inner, values[:half], values[half:])
        return *pair[0], *pair[1]

    return push_forward


# Forward and gradient, of any order -------------------------------------------------------------------------------


def run_blocks(job: Blocks, order: int, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The fold, block by block."""
    kept_slices, folded_slices = job.cut_both_axes(order)
    found = [_merge(job, order, _make_block_states(job, order, values, kept, folded_slices)) for kept in kept_slices]
    joined = []
    for k, parts in enumerate(zip(*found, strict=True)):
        feature, _ = outputs_of(job.reduction)[k % len(outputs_of(job.reduction))]
        joined.append(_join(parts, parts[0].dim() - 1 - (feature is not None)))
    return tuple(joined)


def _make_block_states(
    job: Blocks, order: int, values: Sequence[Tensor], kept: slice, folded: Sequence[slice]
) -> list[tuple[Tensor, ...]]:
    return [job.function(order, kept, at)(*job.slices_of(values, kept, at)) for at in folded]


def _merge(job: Blocks, order: int, states: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    if len(states) == 1:
        return states[0]
    return job.merge(order)(*(torch.stack(ts) for ts in zip(*states, strict=True)))


def differentiate_blocks(
    job: Blocks, order: int, asked: Sequence[int], values: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The gradients of the values numbered ``asked``, block by block."""
    kept_slices, folded_slices = job.cut_both_axes(order)
    leaves = [job.differentiable[n % len(job.differentiable)] for n in asked]
    folded_at, kept_at = (
        [job.cut_axis(k, values[n], side) for k, n in zip(leaves, asked, strict=True)] for side in (False, True)
    )
    found: list[list[Tensor]] = [[] for _ in asked]  # by kept slice, or one sum
    for kept in kept_slices:
        g = tuple(job.result_slice(c, k, kept) for k, c in enumerate(cotangents))
        given = [g]
        if len(folded_slices) > 1:
            states = zip(*_make_block_states(job, order, values, kept, folded_slices), strict=True)
            pulled = _apply_transposed(job.merge(order), [torch.stack(ts) for ts in states], g)
            given = list(zip(*(t.unbind() for t in pulled), strict=True))
        grads = [
            _differentiate_block(job, order, asked, values, kept, at, own)
            for at, own in zip(folded_slices, given, strict=True)
        ]
        for n, parts in enumerate(zip(*grads, strict=True)):
            part = _join(parts, folded_at[n])
            found[n] = [part + found[n][0]] if found[n] and kept_at[n] is None else [*found[n], part]
        del grads
    return tuple(_join(parts, at).to(values[n].dtype) for n, parts, at in zip(asked, found, kept_at, strict=True))


def _differentiate_block(
    job: Blocks, order: int, asked: Sequence[int], values: Sequence[Tensor], kept: slice, at: slice, g: tuple
) -> tuple[Tensor, ...]:
    cut, block = job.slices_of(values, kept, at), job.function(order, kept, at)

    def function(*moved: Tensor) -> tuple[Tensor, ...]:
        given = list(cut)
        for n, value in zip(asked, moved, strict=True):
            given[n] = value
        return block(*given)

    return _apply_transposed(function, [cut[n] for n in asked], g)


def _apply_transposed(function: Function, values: Sequence[Tensor], g: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The transposed derivative of ``function`` at ``values``, applied to ``g``; nothing of it stays recorded."""
    if torch._C._are_functorch_transforms_active():  # which know their own derivatives alone
        found: tuple[Tensor, ...] = torch.func.vjp(function, *values)[1](g)
        return found
    with torch.enable_grad():
        given = [v.detach().requires_grad_() for v in values]
        roots = [(y, c) for y, c in zip(function(*given), g, strict=True) if y.requires_grad]
        if not roots:
            return tuple(torch.zeros_like(v) for v in values)
        made = torch.autograd.grad(
            [y for y, _ in roots], given, [c.to(y.dtype) for y, c in roots], allow_unused=True, materialize_grads=True
        )
    return tuple(made)


@dataclass(frozen=True, eq=False)
class _Call:
    """What the functions below are given beside tensors: a fold of ``order``, and which values gradients are for."""

    job: Blocks
    order: int
    asked: tuple[int, ...] = ()

    def next(self, asked: tuple[int, ...] = ()) -> _Call:
        return _Call(self.job, self.order + 1, asked)

    @property
    def values(self) -> int:
        """How many values there are: moving leaves, and their tangents."""
        return len(self.job.differentiable) * 2**self.order

    @property
    def results(self) -> int:
        return len(outputs_of(self.job.reduction)) * 2**self.order


class _Fold(torch.autograd.Function):
    """The fold of an order; its backward is :class:`_Gradient`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: _Call, *values: Tensor) -> tuple[Tensor, ...]:
        return run_blocks(call.job, call.order, values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.call, *values = inputs
        ctx.save_for_backward(*values)
        ctx.save_for_forward(*values)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple:
        asked = tuple(n for n, need in enumerate(ctx.needs_input_grad[1:]) if need)
        call = replace(ctx.call, asked=asked)
        found = _Gradient.apply(call, *ctx.saved_tensors, *cotangents)
        return None, *_scatter(found, asked, call.values)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple:
        values = ctx.saved_tensors
        found: tuple[Tensor, ...] = _Fold.apply(ctx.call.next(), *values, *_fill_tangents(tangents, values))
        return found[-ctx.call.results :]


class _Gradient(torch.autograd.Function):
    """Jᵀ g of the fold of an order; the derivatives of this are folds, and gradients, of the next order."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: _Call, *given: Tensor) -> tuple[Tensor, ...]:
        return differentiate_blocks(call.job, call.order, call.asked, given[: call.values], given[call.values :])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.call, *given = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given)
        ctx.save_for_forward(*given)

    @staticmethod
    def backward(ctx: Any, *directions: Tensor | None) -> tuple:
        """Of ⟨h, Jᵀ g⟩ = ⟨g, Ṗ⟩ with the tangents h: by g it is Ṗ, by the values a gradient of the next order."""
        call, count, needs = ctx.call, ctx.call.values, ctx.needs_input_grad[1:]
        values, g = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        if all(h is None for h in directions):
            return (None,) * (1 + count + len(g))
        both = (*values, *_fill_tangents(_scatter(directions, call.asked, count), values))
        asked = tuple(n for n in range(count) if needs[n])
        moved = _differentiate_twice(call, asked, both, g) if asked else ()
        push_forward = _Fold.apply(call.next(), *both)[-len(g) :] if any(needs[count:]) else (None,) * len(g)
        return None, *_scatter(moved, asked, count), *push_forward

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple:
        """Jᵀ ġ, and the derivative of Jᵀ g along the values' tangents: a Hessian is symmetric."""
        call, count = ctx.call, ctx.call.values
        values, g = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        moved = _differentiate_twice(call, call.asked, (*values, *_fill_tangents(tangents[:count], values)), g)
        linear = _Gradient.apply(call, *values, *_fill_tangents(tangents[count:], g))
        return tuple(map(torch.add, moved, linear))


def _differentiate_twice(
    call: _Call, asked: tuple[int, ...], both: Sequence[Tensor], g: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The gradient of ⟨g, Ṗ⟩ by the values numbered ``asked``."""
    found: tuple[Tensor, ...] = _Gradient.apply(call.next(asked), *both, *(torch.zeros_like(c) for c in g), *g)
    return found


def _fill_tangents(tangents: Sequence[Tensor | None], values: Sequence[Tensor]) -> list[Tensor]:
    """Tangents, with zeros for those that are not given."""
    pairs = zip(tangents, values, strict=True)
    return [torch.zeros_like(v) if t is None else t.to(v.dtype).expand_as(v) for t, v in pairs]


def _scatter(found: Sequence[Tensor | None], asked: Sequence[int], count: int) -> list[Tensor | None]:
    made: list[Tensor | None] = [None] * count
    for n, value in zip(asked, found, strict=True):
        made[n] = value
    return made
