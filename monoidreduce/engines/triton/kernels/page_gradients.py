"""Gradients of columns that lie in pages, as a fold along the transposed table: page p folds the rows of every sequence
that owns it.

The batch dimensions that the columns do not have (sequences, and query heads that share a key) become part of the
folded axis, so that what they add to a page is added in one program instance, in a fixed order. Nothing of the pages is
copied; rows are, where their memory order is another. Where a page stands in a sequence is one number for each entry of
the table, from which positions of columns are computed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....program import constructors
from ....program.constructors import ONE, apply
from ....program.expression import Expr, const, index, node, size, topological
from ....program.lower import Fold
from ...common import bounded_cache
from ...common.evaluate import Sizes, restore_domain
from ...common.torch_code import Elementwise
from ..codegen.kernel_spec import Unsupported
from ..launch.replay import FoundAtLaunch, Leaf, Recipe
from .elementwise import ElementwiseLaunch
from .lists import Lists, read_lists

# Leaves that the rewritten fold has besides its own
_FIRST = node("leaf", (), ("page_first",), rows=True, cols=True, feature=None, dtype="int")  # per entry: its position
_ROW = node("leaf", (), ("page_row",), rows=True, cols=False, feature=None, dtype="int")  # the index in its sequence
_ROWS = node("leaf", (), ("page_rows",), rows=False, cols=False, feature=None, dtype="int")  # rows of a sequence


def find_gradients(fold: Fold) -> tuple[int, ...]:
    """The places of the reductions over rows, where the columns lie in pages."""
    if fold.domain is None or fold.domain.attrs[0][0] != "pages":
        return ()
    return tuple(k for k, r in enumerate(fold.reductions) if r.attrs[1] == "rows")


class PageGradients:
    """Sums over rows for columns in pages, on leaves like the given ones: ``fold`` is run on ``sizes`` along
    :meth:`lists`, with the leaves that :meth:`leaves` makes."""

    def __init__(self, whole: Fold, sizes: Sizes, removed: tuple[int, ...], varying: tuple[Expr, ...]):
        self.whole, self.given, self.removed, self.varying = whole, sizes, removed, varying
        self.copies = math.prod(sizes.batch[d] for d in removed)
        kept = tuple(n for d, n in enumerate(sizes.batch) if d not in removed)
        self.sizes = replace(sizes, rows=self.copies * sizes.rows, batch=kept)
        self.fold = _rewrite(whole, varying)

    def leaves(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves of the fold that kernels run."""
        values = {e: self._leaf(e, v) for e, v in zip(self.whole.leaves, leaves, strict=True)}
        named = {e.attrs[0]: v for e, v in values.items()}
        found: list[Any] = []
        for e in self.fold.leaves:
            if e is _ROWS:
                found.append(self.given.rows)
            elif e is _ROW:
                found.append(self.transpose_table(self._tensors(leaves))[2])
            elif e is _FIRST:
                found.append(self.transpose_table(self._tensors(leaves))[1])
            else:
                found.append(named[e.attrs[0]])
        return found

    def lists(self, leaves: Sequence[Any]) -> Lists:
        """For each page, the sequences that own it."""
        return self.transpose_table(self._tensors(leaves))[0]

    def recipes(
        self, leaves: Sequence[Any], places: Sequence[int], count: int
    ) -> tuple[list[Any], list[Recipe]] | None:
        """Where a replay finds each leaf of the fold that kernels run: its place among the ``count`` leaves of a call,
        in which ``places`` are those of the given ones, or what stands for it; leaves behind those are made by recipes,
        one each, which copy rows in the order of pages. None where torch has to copy."""
        asked = tuple(places[self.whole.leaves.index(a)] for a in self._domain)
        found: list[Any] = []
        copies: list[Recipe] = []
        names = [str(e.attrs[0]) for e in self.whole.leaves]
        for e in self.fold.leaves:
            if e is _ROWS:
                found.append(self.given.rows)
                continue
            if e in (_ROW, _FIRST):
                at = 2 if e is _ROW else 1
                found.append(FoundAtLaunch(asked, lambda *tensors, at=at: (self.transpose_table(tensors)[at],), 1))
                continue
            k = names.index(str(e.attrs[0]))
            old, v = self.whole.leaves[k], leaves[k]
            moved = self._move(old, v) if isinstance(v, Tensor) and old is not self._domain[0] else v
            if isinstance(v, Tensor) and self._leaf(old, v).data_ptr() != v.data_ptr():
                copy = _copy_rows(e, moved, self.given)
                if copy is None:
                    return None
                turned = (a._replace(at=places[k]) if isinstance(a, Leaf) else a for a in copy.arguments)
                found.append(Leaf(count + len(copies), True))
                copies.append(copy._replace(arguments=tuple(turned)))
            else:
                found.append(Leaf(places[k], isinstance(v, Tensor)))
        return found, copies

    def restore_batch(self, found: Sequence[Tensor]) -> list[Tensor]:
        """Results with the batch dimensions of the call, 1 where they were folded."""
        for d in self.removed:
            found = [t.unsqueeze(d) for t in found]
        return list(found)

    def shape_recipe(self, recipe: Recipe) -> Recipe:
        """The recipe of a launch whose outputs are results, in the form of :meth:`restore_batch`."""
        forms, strides = [], []
        for k, (shape, dtype) in enumerate(recipe.outputs):
            own = recipe.strides[k] if recipe.strides else None
            t = torch.empty(shape, device="meta") if own is None else torch.empty_strided(shape, own, device="meta")
            (t,) = self.restore_batch([t])
            forms.append((tuple(t.shape), dtype))
            strides.append(None if own is None else t.stride())
        return recipe._replace(outputs=tuple(forms), strides=tuple(strides) if recipe.strides else ())

    def _leaf(self, e: Expr, v: Any) -> Any:
        """A leaf ``[*batch, rows or columns, features]`` without the batch dimensions that are folded."""
        if not isinstance(v, Tensor) or e is self._domain[0]:
            return v
        moved = self._move(e, v)
        if not (e.rows or e in self.varying):
            return moved
        kept = len(self.sizes.batch)
        behind = kept + len(self.removed) + 1
        return moved.reshape(*moved.shape[:kept], self.sizes.rows, *moved.shape[behind:])

    def _move(self, e: Expr, v: Tensor) -> Tensor:
        """A view of a leaf without the batch dimensions that are folded; of rows, with these behind the others."""
        count, tail = len(self.given.batch), 1 + (e.feature is not None)
        if e in self.varying:
            v = v.unsqueeze(count)
        elif not e.rows:
            for d in reversed(self.removed):
                v = v.select(d, 0)
            return v
        shape = [*v.shape]
        for d in self.removed:
            shape[d] = self.given.batch[d]
        shape[count] = self.given.rows
        kept = [d for d in range(count) if d not in self.removed]
        return v.expand(shape).permute(*kept, *self.removed, *range(count, count + tail))

    @property
    def _domain(self) -> Sequence[Expr]:
        assert self.whole.domain is not None
        return self.whole.domain.args

    def _tensors(self, leaves: Sequence[Any]) -> list[Tensor]:
        return [leaves[self.whole.leaves.index(a)] for a in self._domain]

    def transpose_table(self, tensors: Sequence[Tensor]) -> tuple[Lists, Tensor, Tensor]:
        """The transposed table, where the page of each of its entries stands in its sequence, and the index of each
        folded row in its own; made once. ``tensors``: the table and the lengths."""
        assert self.whole.domain is not None
        (form,) = self.whole.domain.attrs
        return bounded_cache.compute_once(
            (
                "owners of pages",
                form,
                self.given.cols,
                self.given.rows,
                self.sizes.rows,
                len(self.sizes.batch),
                *tensors,
            ),
            lambda: self._transpose(form, tensors),
            self.sizes.device,
        )

    def _transpose(self, form: tuple, tensors: Sequence[Tensor]) -> tuple[Lists, Tensor, Tensor]:
        sizes = self.given
        lists = restore_domain(form, tensors).listing(self.sizes.rows // tensors[1].numel(), sizes.cols)
        owner = lists.owners().long().clamp(max=lists.groups - 1)
        place = torch.arange(len(owner), device=owner.device) - lists.offsets[owner]
        found = read_lists(lists.transposed(sizes.cols // lists.col_block), sizes.cols).without_memory_of(tensors)
        rows = torch.arange(sizes.rows, device=owner.device).repeat(self.copies)
        shape = *(1,) * len(self.sizes.batch), -1
        return found, (place * form[1]).int().view(shape), rows.int().view(shape)


def _copy_rows(e: Expr, moved: Tensor, sizes: Sizes) -> Recipe | None:
    """How a replay copies rows ``[*batch, rows(, features)]`` in their order; None where no kernel does."""
    batch = tuple(moved.shape[: moved.dim() - 1 - (e.feature is not None)])
    try:
        one = ElementwiseLaunch(
            Elementwise("rows", (e,), (e,)),
            [moved],
            replace(sizes, batch=batch),
            types={0: moved.dtype},
            contiguous=True,
        )
    except Unsupported:
        return None
    one([moved])
    return one.recipe()


def prepare(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> PageGradients:
    """The form of a fold of which all reductions are gradients of columns that all sequences share; raises
    Unsupported where one is not, or where a leaf cannot be given per row."""
    if not all((sizes.rows, sizes.cols, *sizes.batch)) or any(r not in fold.gradient_of for r in fold.reductions):
        raise Unsupported("a reduction over rows that is no gradient of a column")
    if any(r.attrs[0] != "sum" for r in fold.reductions):
        raise Unsupported("gradients of columns that are no sums, over pages")
    if any(e.op == "batch_index" for e in topological([*fold.reductions, *fold.scales])):
        raise Unsupported("indices of the batch in a gradient of pages")
    assert fold.domain is not None
    table = fold.domain.args[0]
    held = [(e, v) for e, v in zip(fold.leaves, leaves, strict=True) if isinstance(v, Tensor) and e is not table]
    if any(e.is_pair or v.dim() < len(sizes.batch) for e, v in held):
        raise Unsupported("numbers per pair, over pages")
    fixed = [v for e, v in held if e.cols or e in fold.tables]  # what must not vary along a folded dimension
    removed = tuple(d for d in range(len(sizes.batch)) if all(v.shape[d] == 1 for v in fixed))
    if 0 not in removed:
        raise Unsupported("columns or tables of each sequence, over pages")
    numbers = [(e, v) for e, v in held if not (e.rows or e.cols)]
    varying = tuple(e for e, v in numbers if any(v.shape[d] != 1 for d in removed))
    return PageGradients(fold, sizes, removed, varying)


@functools.lru_cache(maxsize=1024)
def _rewrite(fold: Fold, varying: tuple[Expr, ...]) -> Fold:
    """A fold over the rows of all sequences: numbers of batch elements (``varying``) are numbers of rows."""
    assert fold.domain is not None
    per_row = {e: node("leaf", (), e.attrs, rows=True, cols=False, feature=e.feature, dtype=e.dtype) for e in varying}
    page, lengths = fold.domain.attrs[0][1], fold.domain.args[1]
    inside = apply("remainder", index("col"), page)
    position = apply("add", _FIRST, inside)
    listed = apply("lt", position, per_row.get(lengths, lengths))
    changed: dict[Expr, Expr] = {index("row"): _ROW, size("rows"): _ROWS, **per_row}
    for e in topological([*fold.reductions, *fold.scales]):
        changed |= {"listed": {e: listed}, "listed_position": {e: position}, "listed_once": {e: const(True)}}.get(
            e.op, {}
        )
    reductions, scales = [], []
    for r, scale in fold.scaled:
        (new,), (by,) = constructors.substitute((r,), changed), constructors.substitute((scale,), changed)
        if by.rows:  # a number of the batch element, which is one of the row now
            new, by = constructors.rebuild(new, (apply("mul", new.args[0], by), *new.args[1:])), ONE
        reductions.append(new)
        scales.append(by)
    used = {*topological([*reductions, *scales])}
    leaves = [changed.get(e, e) for e in fold.leaves]
    leaves = [e for e in [*leaves, _FIRST, _ROW, _ROWS] if e in used]
    pairs = ((n, fold.gradient_of[r]) for r, n in zip(fold.reductions, reductions, strict=True))
    gradients = tuple((n, e) for n, e in pairs if e in used)
    return Fold(
        tuple(leaves), tuple(reductions), tuple(scales) if fold.scales else (), fold.raised, fold.exact, gradients
    )
