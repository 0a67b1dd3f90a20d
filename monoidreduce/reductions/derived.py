"""What follows from a kind's monoid alone: the fold of an axis, the accumulator of tiles and the lines of a kernel.

The state of a pair is ``kind.lift(fields)``, two states are ``kind.combine``d, and ``kind.finish`` makes results of the
last. A tile is folded as a tree, then combined with the state of the tiles before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..program.constructors import apply
from ..program.expression import Expr, node
from ..program.symbol import Symbol, expr_of
from .accumulator import Accumulator, Offset
from .kernel_lines import Lines


def fold_states(kind: Any, params: tuple, state: Sequence[Tensor], dim: int) -> list[Tensor]:
    """The states along axis ``dim >= 0`` as one, by a balanced tree that keeps their order; that axis is gone."""
    state = list(torch.broadcast_tensors(*state))
    size = state[0].shape[dim]
    if size == 0:  # nothing is added to the identity, but a gradient can be asked for
        return [t.sum(dim) + value for t, value in zip(state, kind.identity(params), strict=True)]
    waiting: list[Tensor] | None = None
    while size > 1:
        if size % 2:
            last = [t.narrow(dim, size - 1, 1) for t in state]
            waiting = last if waiting is None else list(kind.combine(params, last, waiting))
        even = (slice(None),) * dim
        end = size - size % 2
        pairs = [[t[(*even, slice(first, end, 2))] for t in state] for first in (0, 1)]
        state = list(kind.combine(params, *pairs))
        size //= 2
    if waiting is not None:
        state = list(kind.combine(params, state, waiting))
    return [t.squeeze(dim) for t in state]


class DerivedAccumulator(Accumulator):
    """Any monoid. In ``combine`` a number carries a trailing axis of size 1 and a vector its features."""

    def start(self) -> None:
        identity = self.kind.identity(self.params)
        vectors = any(w >= 0 for w in self.widths)  # then the state is the fields themselves
        self.state_widths = self.widths if vectors else [-1] * len(identity)
        self.state = []
        for value, width in zip(identity, self.state_widths, strict=True):
            shape = (self.batch, self.length, width if width >= 0 else 1)
            self.state.append(torch.full(shape, value, dtype=self.compute, device=self.device))

    def step(self, reducer: Any, owned: tuple[bool, ...], tile: Any, at: slice, offset: Offset) -> None:
        kind, params = self.kind, self.params
        fields = [
            tile.full(root) if width < 0 else self._vector(root, tile)
            for root, width in zip(reducer.roots, self.widths, strict=True)
        ]
        lifted = [
            x if isinstance(x, Tensor) else torch.full(tile.tile, x, dtype=self.compute, device=self.device)
            for x in kind.lift(params, fields)
        ]
        folded = kind.fold(params, lifted, 2 if self.over == "cols" else 1)
        new = [t.unsqueeze(-1) if w < 0 else t for t, w in zip(folded, self.state_widths, strict=True)]
        for s, value in zip(self.state, kind.combine(params, [s[:, at] for s in self.state], new), strict=True):
            s[:, at] = value

    def _vector(self, e: Expr, tile: Any) -> Tensor:
        if e in tile.values and e.feature is not None:
            v: Tensor = tile.values[e].to(self.compute)
            return v.unsqueeze(2 if e.rows else 1).expand(*tile.tile, v.shape[-1])
        return torch.stack([tile.component(e, f).expand(tile.tile) for f in range(tile.width(e))], -1)

    def finish(self) -> list[Tensor]:
        state = [s if w >= 0 else s.squeeze(-1) for s, w in zip(self.state, self.state_widths, strict=True)]
        return list(self.kind.finish(self.params, state))


class DerivedLines(Lines):
    """Any monoid of numbers: its traced ``combine`` is a function that ``tl.reduce`` folds a tile with."""

    def prepare(self) -> None:
        self.identities = [self.tools.literal(float(value)) for value in self.kind.identity(self.params)]
        self.state = self.kind.state_names(self.params)
        sides = [{n: _number(f"{side}_{n}") for n in self.state} for side in "ab"]
        a, b = ([Symbol(e) for e in side.values()] for side in sides)
        arguments = [e for side in sides for e in side.values()]
        self._function(f"combine{self.place}", arguments, self.kind.combine(self.params, a, b))
        names = [_number(n) for n in self.state]
        results = list(self.kind.finish(self.params, [Symbol(e) for e in names]))
        self.plain = [expr_of(x) for x in results] == names  # the state is the results
        self.results = [f"{self.name}_result{k}" for k in range(len(results))]
        if not self.plain:
            self.helpers.append("")
            self._function(f"finish{self.place}", names, results)

    def _function(self, name: str, arguments: list[Expr], results: Sequence[Any]) -> None:
        """Add a function of numbers to the helpers."""
        inner = self.tools.writer(self.v.spec)
        inner.scalars = True
        inner.outer |= {e: str(e.attrs[0]) for e in arguments}
        texts = [inner.number(apply("cast", expr_of(x), to="float")) for x in results]
        self.helpers.append(f"def {name}({', '.join(str(e.attrs[0]) for e in arguments)}):")
        self.helpers += [f"    {line}" for line in inner.before] + [f"    return {', '.join(texts)}"]

    def start(self) -> list[str]:
        kind = self.v.float
        pairs = zip(self.state, self.identities, strict=True)
        return [f"{self.name}_{f} = tl.full([KEPT], {identity}, {kind})" for f, identity in pairs]

    def step(self, fields: tuple[Expr, ...]) -> None:
        v = self.v
        zeros = f"tl.zeros([KEPT, FOLDED], {v.float})"
        lifted = [expr_of(x) for x in self.kind.lift(self.params, [Symbol(e) for e in fields])]
        blocks = [
            v.seen(v.full(e) if e.is_pair else f"{zeros} + {v.number(e)}", f"tl.full([1, 1], {identity}, {v.float})")
            for e, identity in zip(lifted, self.identities, strict=True)
        ]
        elements = blocks[0] if len(blocks) == 1 else f"({', '.join(blocks)})"
        state = ", ".join(f"{self.name}_{f}" for f in self.state)
        tile = ", ".join(f"{self.name}_{f}_tile" for f in self.state)
        combine = f"combine{self.place}"
        v.inside += [
            f"{tile} = tl.reduce({elements}, 1, {combine})",
            f"{state} = {combine}({state}, {tile})",
        ]

    def finish(self) -> list[tuple[list[str], Any]]:
        state = [f"{self.name}_{f}" for f in self.state]
        if self.plain:
            return [([s], None) for s in state]
        self.v.inside.append(f"{', '.join(self.results)} = finish{self.place}({', '.join(state)})")
        return [([text], None) for text in self.results]


def _number(name: str) -> Expr:
    return node("leaf", (), (name,), rows=False, cols=False, feature=None, dtype="float")
