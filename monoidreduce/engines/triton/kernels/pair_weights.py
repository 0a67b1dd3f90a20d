"""What matched pairs weigh (``pick.py``), by one generated kernel: products of their vectors, and all arithmetic.

The text is made of the same lines as a fold's (``expressions.py``). A program instance takes some pairs: a number is a
block ``[KEPT, 1]``, read at the pair's own index or at its target; an inner product or squared distance is a loop over
features.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....program.expression import Expr, topological
from ....program.lower import Fold
from ....program.philox import DRAWS
from ....program.primitives import PRIMITIVES
from ...common.evaluate import Sizes
from ..codegen import kernel_text
from ..codegen.expressions import ExpressionWriter
from ..codegen.kernel_spec import Spec, Unsupported, padded
from ..launch.launch_cache import Kernels

PRODUCTS = ("dot", "sqdist")
_OTHERS = ("leaf", "const", "nan", "size", "row_index", "col_index", *PRODUCTS)
_WIDE = 128  # features that are read at once
_KINDS = {bool: torch.bool, int: torch.int64}
_TEXT = '''"""What matched pairs weigh."""

import triton
import triton.language as tl

{helpers}
@triton.jit
def pair_weights({signature}):
    INT: tl.constexpr = tl.int64
    FOLDED: tl.constexpr = 1
    entry = tl.program_id(0).to(tl.int64) * KEPT + tl.arange(0, KEPT)[:, None]
    batch = tl.program_id(1).to(tl.int64)
    exists = entry < side * matches
    row = entry // matches
    match = entry % matches
    place += batch * side * matches
    out += batch * side * matches
    there = tl.load(place + entry, mask=exists, other=-1).to(tl.int64)
    hit = (there >= 0) & (there < other) & exists
    there = tl.where(hit, there, 0)
{body}
'''


class _Weights(ExpressionWriter):
    """Numbers of matched pairs; ``by_rows``: rows hold the targets, which are columns."""

    def __init__(self, spec: Spec, by_rows: bool):
        super().__init__(spec)
        self.by_rows = by_rows

    def _text(self, e: Expr) -> str:
        if e.op in ("row_index", "col_index"):
            return "row" if (e.op == "row_index") == self.by_rows else "there"
        if e.op == "size":
            axis = e.attrs[0]
            if axis not in ("rows", "cols"):
                return str(self.spec.width(axis))
            return "side" if (axis == "rows") == self.by_rows else "other"
        return super()._text(e)

    def _leaf(self, e: Expr) -> str:
        name = str(e.attrs[0]).replace("/", "_")
        mask = ", mask=hit, other=0" if e.rows or e.cols else ""
        text = f"tl.load({self._at(e, name)}{mask})"
        return self._loaded(text, e, self.spec.type_of[e])

    def _name(self, e: Expr) -> str:
        return ""

    def _at(self, e: Expr, name: str) -> str:
        if e.is_pair:  # one number per match
            return f"{name}_ptr + batch * {name}_b + row * {name}_s + match * {name}_f"
        index = "row" if (e.rows if self.by_rows else e.cols) else "there"
        step = f" + {index} * {name}_s" if e.rows or e.cols else ""
        return f"{name}_ptr + batch * {name}_b{step}"

    def _over_features(self, e: Expr) -> str:
        width = self.spec.width(e.args[0].feature)
        lanes = min(padded(width), _WIDE)
        total = self.bind((e, "total"), "tl.zeros([KEPT, 1], tl.float32)", True)
        blocks = []
        for a in e.args:
            x = str(a.attrs[0])
            load = f"tl.load({self._at(a, x)} + lane * {x}_f, mask=inside, other=0)"
            blocks.append(f"{load}.to(tl.float32)")
        x, y = ("here", "far") if e.op == "dot" else ("gap", "gap")
        self.inside += [
            f"for first in range(0, {width}, {lanes}):",
            f"    lane = first + tl.arange(0, {lanes})[None, :]",
            f"    inside = hit & (lane < {width})",
            f"    here = {blocks[0]}",
            f"    far = {blocks[1]}",
            *([] if e.op == "dot" else ["    gap = here - far"]),
            f"    {total} += tl.sum({x} * {y}, 1)[:, None]",
        ]
        return total


@functools.lru_cache(maxsize=1024)
def list_leaves(value: Expr) -> tuple[Expr, ...]:
    """The leaves that a value is computed from."""
    return tuple(e for e in topological([value]) if e.op == "leaf")


@functools.lru_cache(maxsize=256)
def _write(value: Expr, by_rows: bool, types: tuple[str, ...], letters: tuple) -> Kernels | None:
    """The kernel of a value; None where it holds something that is no arithmetic on numbers and products."""
    leaves = list_leaves(value)
    spec = Spec(Fold(leaves, ()), "cols", types, (0,) * len(leaves), letters, "float32", None, 1, *(False,) * 3)
    plain = lambda e: (e.op in PRIMITIVES and e.op not in DRAWS) or e.op in _OTHERS
    if not all(e.packing is None and plain(e) for e in topological([value])):
        return None
    lines = _Weights(spec, by_rows)
    try:
        found = lines.argument(value, "float")
    except Unsupported:
        return None
    names = ["out", "place", "side", "other", "matches"]
    for e in spec.fold.leaves:
        x = str(e.attrs[0]).replace("/", "_")
        names += [f"{x}_ptr", f"{x}_b", *([f"{x}_s"] if e.rows or e.cols else [])]
        names += [f"{x}_f"] if e.feature is not None or e.is_pair else []
    store = f"tl.store(out + entry, tl.where(hit, {found}, 0.0) + tl.zeros([KEPT, 1], tl.float32), mask=exists)"
    body = "\n".join(f"    {line}" for line in [*lines.before, *lines.inside, store])
    helpers = "\n".join(kernel_text.copy_device_functions(body))
    signature = ", ".join([*names, "KEPT: tl.constexpr"])
    return Kernels(_TEXT.format(helpers=helpers, signature=signature, body=body))


def weigh(value: Expr, values: Mapping[Expr, Any], sizes: Sizes, place: Tensor, by_rows: bool) -> Tensor | None:
    """What each pair weighs ``[batch, side, matches]``, 0 where its target is outside; None where there is no kernel.

    ``values``: of leaves, ``[batch, length(, features)]``; of numbers per match ``[batch, side, matches]``."""
    full = lambda v: torch.full((1,), v, dtype=_KINDS.get(type(v), torch.float32), device=place.device)
    given = [v if isinstance(v := values[e], Tensor) else full(v) for e in list_leaves(value)]
    kernels = _write(value, by_rows, tuple([str(v.dtype)[6:] for v in given]), tuple(sizes.letters.items()))
    if kernels is None:
        return None
    batch, side, matches = place.shape
    out = torch.empty(place.shape, dtype=torch.float32, device=place.device)
    other = sizes.cols if by_rows else sizes.rows
    arguments: list[Any] = [out, place, side, other, matches]
    for v in given:
        arguments += [v, *(0 if n == 1 else s for n, s in zip(v.shape, v.stride(), strict=True))]
    if out.numel():
        kernels("pair_weights", (-(-side * matches // 32), batch), arguments, dict(KEPT=32))
    return out
