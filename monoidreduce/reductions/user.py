"""``user``: any monoid of the user's, or of the catalogue. Parameters: ``(monoid,)``.

Its fields are the monoid's, and its results are its state. Nearly all of it follows from ``combine``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..algebra.fold import fold_pairs
from ..errors import NoGradientError
from ..program import intervals as iv
from ..program.constructors import apply, find_compared, find_listed, listed_node
from ..program.expression import Expr, node
from ..program.symbol import Symbol, expr_of
from .base import FastForm, Lines, Outputs, Reads, Reduction
from .derived_gradient import gradient_source, is_idempotent, local_pullback, trace_combine

# The lines of a Triton kernel that folds a monoid with vector fields.
#
# The state of a kept index is a number ``[KEPT]`` or a vector ``[KEPT, features]`` for each field. A tile's elements
# are made whole, ``[KEPT, FOLDED]`` and ``[KEPT, FOLDED, features]``, and folded as a tree: the two halves of the
# folded axis are combined until one element is left. So every pair is combined once, its numbers are not repeated for
# its features, and ``combine`` may take inner products.

_LEVELS = 8  # of the tree: tiles have at most 2**8 folded indices


class VectorLines(Lines):
    """Any monoid with vector fields; its results are its state."""

    def prepare(self) -> None:
        names, self.features = self.kind.state_names(self.params), [a.feature for a in self.reduction.args]
        self.state = [f"{self.name}_{n}" for n in names]
        self.widths = [0 if f is None else self.tools.pad_width(self.v.spec.width(f)) for f in self.features]
        self.identities = [self.tools.literal(float(value)) for value in self.kind.identity(self.params)]
        self.v.pair_features += sum(self.widths)
        sides = [[_make_argument(f"{s}_{n}", f) for n, f in zip(names, self.features, strict=True)] for s in "ab"]
        inner = self.tools.block_function(self.v.spec)
        inner.outer |= {e: str(e.attrs[0]) for side in sides for e in side}
        results = self.kind.combine(self.params, *([Symbol(e) for e in side] for side in sides))
        texts = [inner.number(apply("cast", expr_of(x), to="float")) for x in results]
        arguments = ", ".join(str(e.attrs[0]) for side in sides for e in side)
        self.combine = f"combine{self.place}"
        self.helpers += [f"def {self.combine}({arguments}):"]
        self.helpers += [f"    {line}" for line in inner.before] + [f"    return {', '.join(texts)}"]

    def start(self) -> list[str]:
        return [
            f"{s} = tl.full([KEPT{f', {w}' if w else ''}], {identity}, {self.v.float})"
            for s, w, identity in zip(self.state, self.widths, self.identities, strict=True)
        ]

    def step(self, fields: tuple[Expr, ...]) -> None:
        v = self.v
        tiles = [f"{s}_tile" for s in self.state]
        parts = zip(tiles, fields, self.widths, self.identities, strict=True)
        v.inside += [f"{tile} = {self._elements(e, w, identity)}" for tile, e, w, identity in parts]
        seen = f"{self.name}_seen"
        v.inside += [f"{seen} = folded_in[None, :].to(tl.int32)"] if v.masked else []
        halves = [[f"{t}_{side}" for t in tiles] for side in "ab"]
        tree = [
            f"{a}, {b} = split_{'vectors' if w else 'numbers'}({t})"
            for t, a, b, w in zip(tiles, *halves, self.widths, strict=True)
        ]
        tree += [f"{seen}, {seen}_b = split_numbers({seen})"] if v.masked else []
        tree += self._combine(tiles, halves[0], halves[1], f"{seen}_b")
        v.inside += [
            f"for level in tl.static_range({_LEVELS}):",
            f"    if {tiles[0]}.shape[1] > 1:",
            *(f"        {line}" for line in tree),
        ]
        last = [f"tl.reshape({t}, [KEPT{f', {w}' if w else ''}])" for t, w in zip(tiles, self.widths, strict=True)]
        v.inside += [f"{seen} = tl.reshape({seen}, [1])"] if v.masked else []
        v.inside += self._combine(self.state, self.state, last, seen)

    def _combine(self, into: list[str], a: list[str], b: list[str], seen: str) -> list[str]:
        """Lines that combine two elements; where a tile reaches beyond the folded axis, only with what is ``seen``:
        the identity need not be one of itself (minus infinity less minus infinity is no number)."""
        if not self.v.masked:
            return [f"{', '.join(into)} = {self.combine}({', '.join((*a, *b))})"]
        new = [f"{s}_new" for s in self.state]
        lines = [f"{', '.join(new)} = {self.combine}({', '.join((*a, *b))})"]
        for x, y, z, w in zip(into, new, a, self.widths, strict=True):
            mask = f"tl.expand_dims({seen}, -1)" if w else seen
            lines.append(f"{x} = tl.where({mask} != 0, {y}, {z})")
        return lines

    def _elements(self, e: Expr, width: int, identity: str) -> str:
        """The elements of a tile: the identity beyond the folded axis."""
        v = self.v
        if not width:
            return f"tl.broadcast_to({v.mask_columns(v.full(e), identity)}, [KEPT, FOLDED])"
        text = self.tools.pair_vector(v, e)
        if v.masked:
            text = f"tl.where(folded_in[None, :, None], {text}, {identity})"
        return f"tl.broadcast_to({text}, [KEPT, FOLDED, {width}])"

    def finish(self) -> list[tuple[list[str], Any]]:
        found: list[tuple[list[str], Any]] = []
        for s, feature, width in zip(self.state, self.features, self.widths, strict=True):
            count = 0 if feature is None else self.v.spec.width(feature)
            if 0 < count <= self.tools.tiny:  # stored number by number
                lane = f"tl.arange(0, {width})[None, :]"
                texts = [f"tl.sum(tl.where({lane} == {f}, {s}, 0.0), 1)" for f in range(count)]
            else:
                texts = [s]
            found.append((texts, feature))
        return found


def _make_argument(name: str, feature: Any) -> Expr:
    return node("leaf", (), (name,), rows=False, cols=False, feature=feature, dtype="float")


def check_gradient(monoid: type) -> None:
    """Raise NoGradientError for a monoid that has no gradient, or none that is a formula of one pair."""
    source = gradient_source(monoid)
    if source == "none":
        raise NoGradientError(
            detail=f"a gradient was asked of {monoid.__name__}, whose combine has no derivative",
            fix="Detach what depends on it, or add pullback(c, a, g), the gradient that it should have",
        )
    if source == "others":
        raise NoGradientError(
            detail=f"the gradient of {monoid.__name__} is taken from combine with all other pairs, not from a formula",
            fix="Add pullback(c, a, g) (Theorem 2.1), or remove(c, a), to the monoid",
        )


@functools.lru_cache(maxsize=1024)
def compares_results(r: Expr) -> bool:
    """Whether the gradient of a reduction asks which pairs equal its results (:attr:`Fold.compares_results`)."""
    if r.attrs[0] != "user" or gradient_source(r.attrs[2][0]) in ("none", "others"):
        return False
    (monoid,) = r.attrs[2]
    features = dict(zip(monoid.fields(), (a.feature for a in r.args), strict=True))
    form: Any = dict(op="leaf", args=(), rows=True, dtype="float")
    sides = [
        {n: Symbol(node(attrs=(side + n,), cols=side == "a", feature=f, **form)) for n, f in features.items()}
        for side in "cag"
    ]
    pulled = local_pullback(monoid, *sides)
    return bool(find_compared([expr_of(v) for v in pulled.values() if isinstance(v, Symbol)]))


class User(Reduction):
    name = "user"
    fast_forms = FastForm.LISTS | FastForm.CUT_LISTS | FastForm.LONG_LISTS
    vector_lines = VectorLines
    folds_trees = True
    merges_one = True  # x ⊙ identity: the form that every other fold has (0 for no weight)

    def outputs(self, fields: tuple[Expr, ...], params: tuple) -> Outputs:
        return [(f.feature, f.dtype) for f in fields]

    def result_names(self, fields: tuple[Expr, ...], params: tuple) -> tuple[str, ...]:
        return tuple(params[0].fields())

    def pullback(self, over: str, params: tuple, fields: list, results: list, g: list) -> list:
        (monoid,) = params
        names = list(monoid.fields())
        check_gradient(monoid)
        whole, part = (dict(zip(names, values, strict=True)) for values in (results, fields))
        cotangents = {n: 0.0 if v is None else v for n, v in zip(names, g, strict=True)}
        pulled = local_pullback(monoid, whole, part, cotangents)
        listed = find_listed([f.expr for f in fields if isinstance(f, Symbol)])
        if listed is not None and listed.attrs[0][0] != "pages" and is_idempotent(monoid):
            first: Any = Symbol(listed_node("listed_once", listed.attrs[0], listed.args))  # of equal entries of a list
            pulled = {n: v if v is None else torch.where(first, v, 0.0) for n, v in pulled.items()}
        return [pulled[n] for n in names]

    def count_pair(self, counter: Any, r: Expr) -> None:
        for a in r.args:
            counter.count_value(a)
        counter.count_combination(trace_combine(r.attrs[2][0], tuple(a.feature for a in r.args)), self.plain_ops)

    def identity(self, params: tuple) -> tuple[float, ...]:
        return tuple(float(field.identity) for field in params[0].fields().values())

    def absent(self, params: tuple, fields: tuple[Expr, ...]) -> Sequence[float | None]:
        return self.identity(params)

    def idle(self, params: tuple, fields: list[iv.Interval]) -> bool:
        return fields == [(x, x) for x in self.identity(params)]

    def combine(self, params: tuple, a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
        (monoid,) = params
        names = list(monoid.fields())
        combined = monoid.combine(*(monoid(**dict(zip(names, values, strict=True))) for values in (a, b)))
        return [getattr(combined, n) for n in names]

    def state_names(self, params: tuple) -> list[str]:
        return list(params[0].fields())

    def fold(self, params: tuple, state: Sequence[Tensor], dim: int) -> list[Tensor]:
        (monoid,) = params
        names = list(monoid.fields())
        folded = fold_pairs(monoid, dict(zip(names, state, strict=True)), dim)
        return [getattr(folded, n) for n in names]

    def dense(self, fields: list[Tensor], vectors: list[bool], over: str, params: tuple, size: int) -> list[Tensor]:
        (monoid,) = params
        results = super().dense(fields, vectors, over, params, size)
        for r in results:
            if r.requires_grad and gradient_source(monoid) == "none":  # autograd would give zeros
                r.register_hook(lambda g: check_gradient(monoid))
        return results

    def tile_bytes(self, memory: Any, params: tuple, reads: Reads, owned: tuple[bool, ...]) -> int:
        """The vectors, stacked, and the first levels of their tree."""
        return memory.wide * 2 * sum(memory.size_of(str(a.feature)) for a in reads[0] if a.feature is not None)

    def exchanged_bytes(self, r: Expr, width: Callable[[Expr], int], item: int) -> tuple[int, int]:
        return 0, sum(map(width, r.args)) * item
