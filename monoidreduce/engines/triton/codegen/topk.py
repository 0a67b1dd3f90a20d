"""The k best of a row, in a kernel: a list in registers, into which a tile's better values are taken one by one.

Values are compared as integers that are ordered like them (NaN above all, as in torch), so that there is one order and
no special case; integers are compared as they are. A tile that has nothing better costs one comparison; of random
values only about k log(N / k) of a row's N ever enter its list. The list is sorted at the end, by torch: it is small.
"""

from __future__ import annotations

from typing import Any

from ....program.expression import Expr
from .kernel_spec import TINY, Unsupported, padded
from .reduction import Kind

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
