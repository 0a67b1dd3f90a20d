"""The k best of a row, in a kernel: a list in registers, into which a tile's better values are taken one by one.

Values are compared as integers that are ordered like them (NaN above all, as in torch), so that there is one order and
no special case; integers are compared as they are. A tile that has nothing better costs one comparison; of random
values only about k log(N / k) of a row's N ever enter its list. The list is sorted at the end, by torch: it is small.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ....errors import BudgetError
from ....plan import budget
from ....program.constructors import ONE
from ....program.expression import Expr
from ....program.lower import Fold
from ...common import matmul
from ...common.combine import COMBINERS
from ...common.evaluate import Sizes
from ..codegen.kernel_spec import TINY, Unsupported, padded
from ..codegen.reduction import Kind
from ..launch import jit_module, operation_replay
from . import topk_rows

_MOST = 64  # beyond, the list takes too many registers
# The keys (``ordered32``, ``ordered64``) of minus infinity, and of infinity where the smallest are sought.
_WORST = {32: -(2**31) + 2**23 - 1, 64: -(2**63) + 2**52 - 1}


class TopK(Kind):
    def prepare(self) -> None:
        self.k, self.largest = self.params
        if self.k > _MOST:
            raise Unsupported(f"the {self.k} best, more than {_MOST}")
        self.whole = self.reduction.args[0].dtype != "float"
        self.wide = self.whole or self.v.spec.compute == "float64"
        self.room = padded(self.k)
        self.v.bind((self.name, "slots"), f"tl.arange(0, {self.room})[None, :]", False, f"{self.name}_slots")

    def start(self) -> list[str]:
        n, kind = self.name, "tl.int64" if self.wide else "tl.int32"
        # Where no tile is visited, or too few columns are, slots keep what they begin with: an infinity, not NaN.
        floats = self.reduction.args[0].dtype == "float"
        least = _WORST[64 if self.wide else 32] if floats else -(2**63)
        beyond = 2**63 - 1 if self.wide else 2**31 - 1  # slots that do not exist are never the worst
        return [
            f"{n}_keys = tl.where({n}_slots < {self.k}, tl.full([KEPT, {self.room}], {least}, {kind}), {beyond})",
            f"{n}_at = tl.full([KEPT, {self.room}], -1, tl.int32)",
        ]

    def step(self, fields: tuple[Expr, ...]) -> None:
        v, n = self.v, self.name
        least = f"tl.full([1, 1], {-(2**63) if self.wide else -(2**31)}, tl.int{64 if self.wide else 32})"
        value = v.full(fields[0])
        key = f"{value}.to(tl.int64)" if self.whole else f"ordered{64 if self.wide else 32}({value})"
        key = key if self.largest else f"~{key}"
        v.inside += [
            f"{n}_new = {v.seen(key, least)}",
            f"{n}_worst = tl.min({n}_keys, 1)",
            f"while tl.max((tl.max({n}_new, 1) > {n}_worst).to(tl.int32), 0) > 0:",
            f"    {n}_best = tl.max({n}_new, 1)",
            f"    {n}_place = tl.min(tl.where({n}_new == {n}_best[:, None], folded_at[None, :], 2147483647), 1)",
            f"    {n}_slot = tl.min(tl.where({n}_keys == {n}_worst[:, None], {n}_slots, {self.room}), 1)",
            f"    {n}_takes = {n}_best > {n}_worst",
            f"    {n}_here = {n}_takes[:, None] & ({n}_slots == {n}_slot[:, None])",
            f"    {n}_keys = tl.where({n}_here, {n}_best[:, None], {n}_keys)",
            f"    {n}_at = tl.where({n}_here, {n}_place[:, None], {n}_at)",
            f"    {n}_gone = {n}_takes[:, None] & (folded_at[None, :] == {n}_place[:, None])",
            f"    {n}_new = tl.where({n}_gone, {least}, {n}_new)",
            f"    {n}_worst = tl.min({n}_keys, 1)",
        ]

    def finish(self) -> list[tuple[list[str], Any]]:
        n, feature = self.name, f"#{self.k}"
        keys = f"{'' if self.largest else '~'}{n}_keys"
        self.v.inside.append(f"{n}_values = {keys if self.whole else f'unordered{64 if self.wide else 32}({keys})'}")
        values, places = f"{n}_values", f"{n}_at.to(tl.int64)"
        if self.k > TINY:
            return [([values], feature), ([places], feature)]
        pick = lambda text, zero, f: f"tl.sum(tl.where({n}_slots == {f}, {text}, {zero}), 1)"
        return [
            ([pick(values, "0" if self.whole else "0.0", f) for f in range(self.k)], feature),
            ([pick(places, "0", f) for f in range(self.k)], feature),
        ]


def tidy(r: Expr, values: Tensor, places: Tensor) -> list[Tensor]:
    """A list as users get it: best first, and no place where there was nothing."""
    merge: Callable = COMBINERS["topk"].merge
    values, places = (t.squeeze(0) for t in merge([values.unsqueeze(0), places.unsqueeze(0)], r.attrs[2]))
    worst = float("-inf") if r.attrs[2][1] else float("inf")
    return [values, places.masked_fill(values == worst, -1)]


# Of a panel -----------------------------------------------------------------------------------------------------


def of_panel(panel: Tensor, r: Expr, compute: torch.dtype) -> list[Tensor]:
    """The best of each row of a panel, as the eager engine keeps them."""
    k, largest = r.attrs[2]
    return topk_rows.best(panel, min(k, panel.shape[1]), largest, compute)


def factors(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> tuple[Tensor, Tensor] | None:
    """Rows and columns, where a fold is the k best products of each row with all columns and nothing else."""
    places = _places(fold, sizes)
    if places is None:
        return None
    x, y = (leaves[k] for k in places)
    return (x, y) if x.dtype == y.dtype and x.dtype.is_floating_point else None


def straight(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> Callable[[Sequence[Any]], list[Tensor]] | None:
    """What finds them for leaves like these, if a fold is that: for calls whose host would take longer than they."""
    places = _places(fold, sizes)
    if places is None or factors(fold, leaves, sizes) is None:
        return None
    return _Straight(fold, places, sizes)


class _Straight:
    """The k best products for leaves of one kind: the first is heard, later ones run what was heard, in as many panels
    as there was room for then.

    ``reels``: by whether rows and columns are the same; None: there is more to it than can be written down."""

    def __init__(self, fold: Fold, places: tuple[int, int], sizes: Sizes):
        self.fold, self.places, self.sizes = fold, places, sizes
        self.reels: dict[bool, Any] = {}

    def __call__(self, leaves: Sequence[Any]) -> list[Tensor]:
        x, y = (leaves[k] for k in self.places)
        same = x.data_ptr() == y.data_ptr()
        made = self.reels.get(same, self)
        if made is self:
            return self._met(x, y, same)
        found = None if made is None else made.run(x, y)
        return of_product(self.fold, x, y, self.sizes) if found is None else list(found)

    def _met(self, x: Tensor, y: Tensor, same: bool) -> list[Tensor]:
        run = functools.partial(of_product, self.fold, sizes=self.sizes)
        if not jit_module.repeats(self.sizes.device):
            return run(x, y)
        found, self.reels[same], _ = operation_replay.heard(run, (x, y), self.sizes.device)
        return found


def _places(fold: Fold, sizes: Sizes) -> tuple[int, int] | None:
    (r, *others), product = fold.reductions, fold.reductions[0].args[0]
    if others or r.attrs[:2] != ("topk", "cols") or product.op != "dot" or sizes.batch or not sizes.rows:
        return None
    if any(e.op != "leaf" or e.is_pair for e in product.args) or fold.scaled[0][1] is not ONE:
        return None
    x, y = product.args if product.args[0].rows else product.args[::-1]
    return fold.leaves.index(x), fold.leaves.index(y)


def of_product(fold: Fold, x: Tensor, y: Tensor, sizes: Sizes) -> list[Tensor]:
    """The k best products of each row with all columns, some rows at a time.

    What a panel does, without its book-keeping, which takes longer than the work where rows are few.
    """
    r = fold.reductions[0]
    kind = torch.bfloat16 if x.dtype is torch.bfloat16 else sizes.compute
    held = sizes.compute if fold.raised else kind  # as the caller will hold them, where nothing is computed of them
    row = sizes.cols * kind.itemsize
    room = budget.limit(lambda: matmul.free_memory(sizes.device), row)
    if room < row:
        raise BudgetError(given=budget.given(room), least=budget.shown(row))
    step = min(sizes.rows, room // row)
    panel = torch.empty(step, sizes.cols, dtype=kind, device=sizes.device)
    if step == sizes.rows:
        matmul.panel_into(panel, x, y)
        return of_panel(panel, r, held)
    parts = []
    for at in range(0, sizes.rows, step):
        some = x[at : at + step]
        matmul.panel_into(panel[: len(some)], some, y)
        parts.append(of_panel(panel[: len(some)], r, held))
    return [torch.cat(t) for t in zip(*parts, strict=True)]
