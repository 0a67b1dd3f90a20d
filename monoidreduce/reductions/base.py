"""The base class of all kinds of reduction: the questions that the library asks of a kind, and answers that follow.

A kind is one object, made once and kept in the table of the package (``KINDS``); it holds no data of a call. The first
argument of many methods is ``params``, the kind's own parameters in a reduction (``k`` of a top-k, say).

The least that a kind must say is

- ``outputs``: the feature and the number class of each of its results;
- ``pullback``: the cotangents of one pair's fields, from the final results (Theorem 2.1), as symbols;
- a monoid on *states*: ``identity`` (one number per state field), ``lift`` (a pair's fields as a state), ``combine``
  (two states as one) and ``finish`` (a state as results). These are written in torch functions that act number by
  number, since they are called with tensors and, to write a kernel, with symbols;
- ``open``: results back into a state, where results are not the state itself: splits, ranks and streams exchange
  states.

From these come the dense form, the accumulators of tiles in torch, the lines of a Triton kernel, the
combination of partial results, the exchange between ranks and the cost. A kind overrides what it can do better.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..program import intervals as iv
from ..program.constructors import Contraction, apply
from ..program.expression import Expr, Feature, node, reduce_node, result
from ..program.symbol import Symbol, expr_of

# Accumulators: how tiles in torch fold a kind of reduction, tile by tile, in either direction.
#
# An accumulator holds its state for a whole axis (numbers and vectors per row, or per column), takes one tile at a time
# for a slice of it, and turns the state into results at the end. The state is the one that computes best (a running
# maximum, a sum and unnormalised values), not the one users see.

Offset = int | Tensor


class Accumulator:
    """State for ``length`` rows (``over="cols"``) or columns (``over="rows"``) of ``batch`` problems."""

    into: Tensor | None = None  # where a number per pair goes, which is not folded
    folded: int | None = None  # the length of the folded axis, of which tiles may be skipped; None: not known

    def __init__(
        self,
        kind: Any,
        reduction: Expr,
        batch: int,
        length: int,
        widths: list[int],
        compute: torch.dtype,
        device: torch.device,
        homes: Sequence[Tensor] = (),
        engine: Any = None,
    ):
        """``kind``: the row of the table. ``widths``: features of each field, -1 for a number. ``homes``: where the
        results will lie, in the order of ``finish``; totals that are results are kept there. ``engine``: what adds
        contractions of tiles to totals (``contract``) and takes exponentials in place (``exp_into``)."""
        self.kind, self.engine = kind, engine
        _, self.over, self.params = reduction.attrs
        self.fields = reduction.args
        self.batch, self.length, self.widths = batch, length, widths
        self.compute, self.device, self.homes = compute, device, homes
        self.dim = -1 if self.over == "cols" else -2
        self.start()

    def start(self) -> None:
        """Make the state of no pairs."""
        raise NotImplementedError

    def step(self, reducer: Any, owned: tuple[bool, ...], tile: Any, at: slice, offset: Offset) -> None:
        """Fold one tile into the slice ``at``.

        ``reducer`` has what the kind's ``tile_reads`` asked for (``roots`` and ``values``), ``owned`` says which roots
        may be overwritten, ``tile.full(root)`` is a number per pair. ``offset`` is the tile's place on the folded axis,
        or that of each of its indices, ascending."""
        raise NotImplementedError

    def edge(self, at: slice) -> Tensor:
        """The number [b, l] that one more pair must reach to make a difference; for kinds that select pairs."""
        raise NotImplementedError

    def finish(self) -> list[Tensor]:
        """The results."""
        raise NotImplementedError

    def numbers(self, value: float, dtype: torch.dtype | None = None) -> Tensor:
        """A number per kept index."""
        return torch.full((self.batch, self.length), value, dtype=dtype or self.compute, device=self.device)

    def totals(self, width: int, result: int = -1) -> Tensor:
        """Zeros, of numbers where ``width`` is below 0; ``result``: which result they become, if they do."""
        if 0 <= result < len(self.homes):
            return self.homes[result].zero_()
        shape = (self.batch, self.length) if width < 0 else (self.batch, self.length, width)
        return torch.zeros(shape, dtype=self.compute, device=self.device)

    def across(self, x: Tensor) -> Tensor:
        """Numbers per kept index [b, l], shaped to broadcast with a tile."""
        return x.unsqueeze(self.dim)


def shift_places(place: Tensor, offset: Offset) -> Tensor:
    """Places in a tile as places on the folded axis."""
    return offset[place] if isinstance(offset, Tensor) else place + offset


Outputs = list[tuple[Feature, str]]  # of every result: its feature, and "float", "int" or "bool"
State = list[Tensor]  # of several parts of the folded axis: every tensor is [parts, *batch, length(, features)]
Exchange = Generator[tuple[str, list[Tensor]], list[Tensor], State]  # yields (operation, tensors), is sent the outcome
Reads = tuple[tuple[Expr, ...], tuple[tuple[Contraction, ...], ...]]  # numbers per pair, and contractions by value
Local = Callable[[list[Tensor], tuple, int], list[Tensor]]  # the dense form on (fields, params, length)


# What follows from a kind's monoid alone: the fold of an axis, the accumulator of tiles and the lines of a kernel.
#
# The state of a pair is ``kind.lift(fields)``, two states are ``kind.combine``d, and ``kind.finish`` makes results of
# the last. A tile is folded as a tree, then combined with the state of the tiles before.


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


# Lines: what a kind writes when a Triton kernel is written, and how splits are combined.
#
# Nothing of the Triton engine is imported here: the code generator hands in what a kind may use of it (:class:`Tools`).

Form = tuple[tuple[int, ...], torch.dtype]  # shape and type of a tensor


@dataclass(frozen=True)
class Tools:
    """The parts of the code generator that lines are written with."""

    writer: Callable[..., Any]  # expressions as lines: ``writer(spec)``
    running_sum: Callable[..., Any]  # of numbers or vectors: ``running_sum(name, feature, dtype, writer, lanes)``
    stored_sum: Callable[..., Any]  # in memory, where it is too wide: ``stored_sum(name, reduction, writer)``, or None
    move_factors: Callable[..., Any]  # a contraction whose vector is a leaf, numbers in the weight
    reads_one_pair: Callable[..., bool]  # whether a number per pair can be computed at one index: ``(value, spec)``
    one_pair: Callable[..., Any]  # a writer of numbers at one index per kept index: ``(writer, name, index)``
    block_function: Callable[..., Any]  # a writer of functions of blocks, of numbers and vectors: ``(spec)``
    pair_vector: Callable[..., str]  # the vectors of a tile's pairs: ``(writer, expression)``
    literal: Callable[[float], str]
    pad_width: Callable[[int], int]  # features that a block holds
    tiny: int  # features up to which vectors are unrolled


class Lines:
    """A reduction in a kernel. ``fields`` are given anew to each step: loops differ in what is known of conditions."""

    guesses: bool = False  # whether whole tiles do with a guess of a maximum (``guess``, ``guessed`` and others)
    guessing: bool = False  # whether this loop does
    sloped: bool = False  # whether the tile to guess from is the one nearest to the rows' own indices
    skipped: str = ""  # how many folded indices are not visited, where its state begins with them

    def __init__(self, kind: Any, place: int, reduction: Expr, scale: Expr, v: Any, tools: Tools):
        """``place``: of the reduction in the fold. ``v``: the writer of the kernel's expressions."""
        self.kind, self.place, self.reduction, self.scale, self.v, self.tools = kind, place, reduction, scale, v, tools
        _, self.over, self.params = reduction.attrs
        self.name = f"{reduction.attrs[0]}{place}"
        self.helpers: list[str] = []  # functions of its own that the kernel calls
        self.prepare()

    def prepare(self) -> None:
        """Decide what the lines need; called once."""

    @property
    def first_result(self) -> int:
        """The place of its first result among those of the fold."""
        before = self.v.spec.fold.outputs
        return next(k for k, (r, _) in enumerate(before) if r is self.reduction)

    def place_of(self, fields: tuple[Expr, ...]) -> str:
        """The folded index of each pair, ``[1, FOLDED]``: its own, or the second field where results of parts, which
        know theirs, are folded again."""
        return "folded_at[None, :]" if len(fields) == 1 else f"{self.v.number(fields[1])}.to(tl.int32)"

    @property
    def totals(self) -> list[Any]:
        """Its running sums of vectors, where it has any."""
        return []

    def start(self) -> list[str]:
        """The lines that make the state, before the loop."""
        raise NotImplementedError

    def step(self, fields: tuple[Expr, ...]) -> None:
        """Append to ``v.inside`` what one tile does to the state."""
        raise NotImplementedError

    def finish(self) -> list[tuple[list[str], Any]]:
        """Per result: its text (one per feature where features are few) and its feature."""
        raise NotImplementedError


class CombineLaunch(NamedTuple):
    """A launch that combines the results of splits: which of the whole's tensors it writes, which of the stacked ones
    it reads, and what else it is given."""

    name: str
    written: tuple[int, ...]
    read: tuple[int, ...]
    parts: int
    rows: int
    constants: tuple[tuple[str, Any], ...]

    @property
    def grid(self) -> tuple[int]:
        return (-(-self.rows // dict(self.constants)["ROWS"]),)

    def given(self, whole: Sequence[Any], stacked: Sequence[Any]) -> tuple:
        """Its arguments."""
        return *[whole[k] for k in self.written], *[stacked[k] for k in self.read], self.parts, self.rows


NUMBERS_PER_INSTANCE = 2048  # of a program instance that combines splits
FLOATS = (torch.float32, torch.float64)


def split_blocks(parts: int) -> tuple[tuple[str, int], ...]:
    """The constants of a kernel that reads all splits of some rows at once."""
    lanes = max(2, 1 << (parts - 1).bit_length())
    return ("PARTS", lanes), ("ROWS", max(1, min(32, NUMBERS_PER_INSTANCE // lanes)))


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
            v.mask_columns(
                v.full(e) if e.is_pair else f"{zeros} + {v.number(e)}", f"tl.full([1, 1], {identity}, {v.float})"
            )
            for e, identity in zip(lifted, self.identities, strict=True)
        ]
        elements = blocks[0] if len(blocks) == 1 else f"({', '.join(blocks)})"
        state = ", ".join(f"{self.name}_{f}" for f in self.state)
        tile = ", ".join(f"{self.name}_{f}_tile" for f in self.state)
        combine = f"combine{self.place}"
        v.inside += [f"{tile} = tl.reduce({elements}, 1, {combine})", f"{state} = {combine}({state}, {tile})"]

    def finish(self) -> list[tuple[list[str], Any]]:
        state = [f"{self.name}_{f}" for f in self.state]
        if self.plain:
            return [([s], None) for s in state]
        self.v.inside.append(f"{', '.join(self.results)} = finish{self.place}({', '.join(state)})")
        return [([text], None) for text in self.results]


def _number(name: str) -> Expr:
    return node("leaf", (), (name,), rows=False, cols=False, feature=None, dtype="float")


class FastForm(enum.Flag):
    """Forms that engines have for kinds that declare them (``Reduction.fast_forms``). All others run without."""

    NONE = 0
    CPP = enum.auto()  # generated C++ (``engines/eager/cpp/tile_text.py``); else tiles of torch calls
    EDGES = enum.auto()  # a number an edge, on a CPU (``engines/listed/edge_numbers.py``); else gathered pieces
    FEW_ROWS = enum.auto()  # a kernel for few rows of many columns (``engines/triton/codegen/few_rows.py``)
    LISTS = enum.auto()  # kernels that read lists (``engines/triton/kernels/listed_fold.py``); else gathered pieces
    CUT_LISTS = enum.auto()  # of these: lists whose tiles are cut, so that some of a tile's pairs do not exist
    SHARED_TILES = enum.auto()  # of these: rows with lists of their own share a program instance
    SPLIT_LISTS = enum.auto()  # of these: lists are split, and combined from results alone, whatever a split's length
    LONG_LISTS = enum.auto()  # of these: long lists are split, and combined by a fold of the same kind
    ALL_LISTS = LISTS | CUT_LISTS | SHARED_TILES | SPLIT_LISTS | LONG_LISTS


class Reduction:
    """One kind of reduction. ``r`` stands for a reduction of this kind, a node of a program."""

    name: ClassVar[str]

    # The program ----------------------------------------------------------------------------------------------

    fixed: ClassVar[tuple[int, ...]] = ()  # results that are constants to a gradient
    per_pair: ClassVar[bool] = False  # True: folds nothing, and writes a number per pair instead
    both_axes: ClassVar[bool] = False  # True: folds rows and columns, into one result a batch element
    gathers: ClassVar[bool] = False  # True: reads single pairs, by their index on one axis (``fields[0]``)
    fast_forms: ClassVar[FastForm] = FastForm.NONE
    place: ClassVar[int | None] = None  # which result, if any, holds places on the folded axis (-1: none)

    def outputs(self, fields: tuple[Expr, ...], params: tuple) -> Outputs:
        """The feature and the number class of each result."""
        raise NotImplementedError

    def result_names(self, fields: tuple[Expr, ...], params: tuple) -> tuple[str, ...]:
        """What the results are called where a program is printed; their numbers if the kind does not say."""
        return tuple(map(str, range(len(self.outputs(fields, params)))))

    def pullback(self, over: str, params: tuple, fields: list, results: list, g: list) -> list[Any]:
        """The cotangent of each field of one pair (None: zero), from those of the results (None: zero)."""
        raise NotImplementedError

    def is_differentiable(self, k: int, count: int) -> bool:
        """True when result ``k`` of ``count`` has a cotangent."""
        return k not in self.fixed and k - count not in self.fixed

    def idle(self, params: tuple, fields: list[iv.Interval]) -> bool:
        """True when every pair whose fields lie in these intervals is the identity: its tile need not be computed."""
        return False

    def writes_all(self, params: tuple) -> bool:
        """True when every pair is computed whatever conditions say: these are not decided for tiles."""
        return False

    def absent(self, params: tuple, fields: tuple[Expr, ...]) -> Sequence[float | None]:
        """The fields of a pair that does not exist, so that it is the identity (None: whatever it is)."""
        raise ArgumentError(
            detail=f"{self.name} cannot fold some of the columns (cols=)", fix="Hide pairs with torch.where instead"
        )

    def walks(self, r: Expr, reductions: Sequence[Expr]) -> bool:
        """True when pairs must be computed tile by tile; False when single pairs are gathered.

        ``reductions`` are all reductions of the fold, ``r`` among them."""
        return True

    def check_length(self, params: tuple, length: int, axis: str) -> None:
        """Raise the user's mistake if ``length`` rows or columns are too few for these parameters."""

    def summed(self, fields: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """The fields that are summed over pairs, with weights or without; they may be vectors."""
        return ()

    def selected(self, params: tuple) -> int:
        """How many pairs the results are chosen from all: 1 for a best value, k for a top-k, 0 if all count."""
        return 0

    # The monoid -----------------------------------------------------------------------------------------------

    def identity(self, params: tuple) -> tuple[float, ...]:
        """The state of no pair at all, one number per field."""
        raise NotImplementedError

    def lift(self, params: tuple, fields: Sequence[Any]) -> Sequence[Any]:
        """The state of one pair; plain numbers are allowed in it."""
        return fields

    def combine(self, params: tuple, a: Sequence[Any], b: Sequence[Any]) -> Sequence[Any]:
        """Two states as one, number by number."""
        raise NotImplementedError

    def finish(self, params: tuple, state: Sequence[Any]) -> Sequence[Any]:
        """A state as results."""
        return state

    def state_names(self, params: tuple) -> list[str]:
        """What the fields of the state are called in a kernel."""
        return [f"s{k}" for k in range(len(self.identity(params)))]

    def fold(self, params: tuple, state: Sequence[Tensor], dim: int) -> list[Tensor]:
        """The states along an axis as one, in order; that axis is gone."""
        return fold_states(self, params, state, dim)

    # Dense ----------------------------------------------------------------------------------------------------

    def dense(self, fields: list[Tensor], vectors: list[bool], over: str, params: tuple, size: int) -> list[Tensor]:
        """The results by plain torch from whole fields ``[*batch, rows, cols(, features)]``, differentiable.

        The folded axis has ``size`` indices and is kept at size 1. This is what fast engines are compared with."""
        spread = stretch(fields, vectors, over, size)
        # the folded axis counted without features, from the front: the same number for scalars and vectors
        at = (spread[0].dim() - vectors[0]) + folded_dim(over)
        lifted = [
            x if isinstance(x, Tensor) else torch.full_like(spread[0], x, dtype=spread[0].dtype)
            for x in self.lift(params, spread)
        ]
        return [t.unsqueeze(at) for t in self.finish(params, self.fold(params, lifted, at))]

    def dense_part(self, local: Local, fields: list[Tensor], params: tuple, length: int) -> list[Tensor]:
        """The dense form of the ``length`` indices that one rank has."""
        return local(fields, params, length)

    def dense_results(self, results: list[Tensor]) -> list[Tensor]:
        """All results, where the dense form gives only those that programs read."""
        return results

    def has_whole_form(self, r: Expr) -> bool:
        """True when the dense engine can compute ``r``."""
        return True

    def whole_form(self, r: Expr, writer: Any, used: frozenset[int]) -> tuple[Callable[..., list[Tensor]], list[str]]:
        """How the dense engine computes ``r`` on whole matrices: a function of (sizes, *values), and the names that
        ``writer`` gives to these values. ``used``: which results are read."""
        own = _Plain(self, r.attrs[1], r.attrs[2], tuple(a.feature is not None for a in r.args))
        return own, [writer.field(a) for a in r.args]

    # Partial results ------------------------------------------------------------------------------------------

    merges_one: ClassVar[bool] = False  # True: a single part is merged too, which brings it to its final form

    def open(self, params: tuple, results: State, lengths: Sequence[int]) -> State:
        """Results of parts of the folded axis, so long each, as states that combine without loss."""
        return results

    def merge(self, params: tuple, state: State) -> State:
        """One part from several, in their order."""
        return [t.unsqueeze(0) for t in self.fold(params, state, 0)]

    def close(self, params: tuple, state: State) -> State:
        """States as results."""
        return list(self.finish(params, state))

    def merge_ordered(self, params: tuple, results: State) -> list[Tensor] | None:
        """The results of the whole from those of parts that follow each other, if there is a faster way than states."""
        return None

    def empty_state(self, params: tuple, state: State) -> State:
        """The state of one part that saw nothing; ``state`` has no parts, but the shapes."""
        return [
            t.new_zeros(1, *t.shape[1:]).fill_(value) for t, value in zip(state, self.identity(params), strict=True)
        ]

    def merge_all(self, params: tuple, states: Sequence[State]) -> State:
        """One part from all those of several states, in their order; the identity where there is none."""
        whole = states[0] if len(states) == 1 else [torch.cat(ts) for ts in zip(*states, strict=True)]
        if whole[0].shape[0] == 0:
            return self.empty_state(params, whole)
        return whole if whole[0].shape[0] == 1 and not self.merges_one else self.merge(params, whole)

    def add_unseen(self, params: tuple, results: State, count: Callable[[], tuple[Any, int]]) -> State:
        """Results of the pairs that were folded as those of the whole axis, where that differs: ``count()`` is how many
        were folded, a number or one for each kept index, and how many the axis has."""
        return results

    def exchange(self, params: tuple, state: State) -> Exchange:
        """Combine a state with those of the other ranks: yields ("SUM", "MAX", "MIN" or "GATHER", tensors).

        By default all ranks' states are gathered and combined, in the order of ranks, on each of them."""
        found: State = []
        for t in state:  # a state may mix number types, a message does not
            found += yield "GATHER", [t]
        return self.merge_all(params, [found])

    def settled(self, results: list[Tensor]) -> list[Tensor]:
        """The results that are the same by every plan, up to rounding."""
        return results

    # Tiles in torch -------------------------------------------------------------------------------------------

    accumulator: ClassVar[type[Accumulator]] = DerivedAccumulator

    def tile_reads(self, fields: tuple[Expr, ...], over: str) -> Reads:
        """What a tile computes for the accumulator: numbers per pair, and contractions of values with vectors."""
        return fields, ()

    def tile_width(self, r: Expr, size_of: Callable[[str], int]) -> int:
        """How many numbers a pair holds at once in a tile."""
        return max([1, *(size_of(str(a.feature)) for a in r.args if a.feature is not None)])

    def tile_bytes(self, memory: Any, params: tuple, reads: Reads, owned: tuple[bool, ...]) -> int:
        """Bytes per pair that the accumulator holds besides the numbers it reads: ``memory.wide`` is a float's,
        ``memory.contraction`` a contraction's. By default the states, and the first levels of their tree."""
        return memory.wide * 2 * len(self.identity(params))

    # Triton ---------------------------------------------------------------------------------------------------

    lines: ClassVar[type[Lines]] = DerivedLines
    lane_lines: ClassVar[type[Lines] | None] = None  # where a program instance owns one row; None: as elsewhere
    vector_lines: ClassVar[type[Lines] | None] = None  # where fields are vectors, which a kernel holds per pair
    sums_vectors: ClassVar[bool] = False  # True: vector results are sums, and may be returned in 16 bits
    unsorted: ClassVar[bool] = False  # True: a kernel leaves a list that torch sorts
    keeps_pairs: ClassVar[bool] = False  # True: a kernel writes the numbers of all pairs (``topk.py``)
    combine_text: ClassVar[str] = ""  # kernels that combine the results of splits

    def no_kernel(self, r: Expr) -> str:
        """Why a kernel cannot fold ``r``; empty where it can."""
        plain = self.vector_lines is not None or all(a.feature is None for a in r.args)
        return "" if plain else f"{self.name} has vector fields"

    def combine_launches(self, params: tuple, stacked: tuple[Form, ...], splits: int) -> list[CombineLaunch] | None:
        """The launches of ``combine_text`` for stacked results of these forms; None: torch combines them."""
        return None

    # Cost -----------------------------------------------------------------------------------------------------

    plain_ops: ClassVar[int] = 12  # plain operations per pair, besides those that its fields take
    folds_trees: ClassVar[bool] = False  # True: tiles in torch are combined level by level, each into new memory
    combine_ops: ClassVar[int] = 12  # launches that combine the results of splits

    def count_pair(self, counter: Any, r: Expr) -> None:
        """Add to ``counter`` (of ``plan/candidates.py``) what one pair takes."""
        for a in r.args:
            counter.count_value(a)
        counter.plain += self.plain_ops

    def exchanged_bytes(self, r: Expr, width: Callable[[Expr], int], item: int) -> tuple[int, int]:
        """Bytes of one row's (or column's) state that ranks reduce, and that they gather; ``item`` bytes a number."""
        return 0, len(self.identity(r.attrs[2])) * item


@dataclass(frozen=True)
class _Plain:
    """The dense form of a kind, on whole matrices."""

    kind: Reduction
    over: str
    params: tuple
    vectors: tuple[bool, ...]

    def __call__(self, sizes: Any, *fields: Tensor) -> list[Tensor]:
        found = self.kind.dense(list(fields), list(self.vectors), self.over, self.params, sizes.of(self.over))
        return [v.squeeze(len(sizes.batch) + (self.over == "cols")) for v in found]


# The kind of a reduction, a node of a program ---------------------------------------------------------------------

KINDS: dict[str, Reduction] = {}  # all kinds by name: the table of the package, which its ``__init__.py`` writes out


def kind_of(reduction: Expr) -> Reduction:
    """The kind of a reduction."""
    return KINDS[reduction.attrs[0]]


def outputs_of(reduction: Expr) -> Outputs:
    """The feature and the number class of each result of a reduction."""
    name, _, params = reduction.attrs
    return KINDS[name].outputs(reduction.args, params)


def all_have(form: FastForm, reductions: Iterable[Expr]) -> bool:
    """Whether all reductions are of kinds that have a fast form."""
    return all(form in kind_of(r).fast_forms for r in reductions)


def make(kind: str, over: str, params: tuple, fields: tuple[Expr, ...]) -> list[Expr]:
    """The results of a reduction of ``fields`` over ``"cols"``, ``"rows"`` or ``"both"``, as expressions."""
    reduction = reduce_node(kind, over, params, fields)
    return [result(reduction, k, feature, dtype) for k, (feature, dtype) in enumerate(outputs_of(reduction))]


# Shared by kinds ------------------------------------------------------------------------------------------------


def folded_dim(over: str, vector: bool = False) -> int:
    """The folded axis of ``[*batch, rows, cols(, features)]``, from the back."""
    return (-1 if over == "cols" else -2) - vector


def stretch(fields: list[Tensor], vectors: list[bool], over: str, size: int) -> list[Tensor]:
    """Give every field the folded axis, and all fields one shape but for features."""
    shapes = [f.shape[:-1] if v else f.shape for f, v in zip(fields, vectors, strict=True)]
    shape = list(shapes[0] if len(shapes) == 1 else torch.broadcast_shapes(*shapes))
    shape[folded_dim(over)] = size
    return [f.expand(*shape, f.shape[-1]) if v else f.expand(*shape) for f, v in zip(fields, vectors, strict=True)]


_RUNS = 4  # of equal numbers: splits cover two or three lengths


def per_part(numbers: Sequence[int], like: Tensor) -> Tensor:
    """A number for each part, shaped to broadcast with ``like`` ``[parts, ...]``."""
    runs = [(value, len([*same])) for value, same in itertools.groupby(numbers)]
    if like.is_cuda and 0 < len(runs) <= _RUNS:  # a copy from the host would wait for the device
        made = torch.cat([like.new_full((count,), value) for value, count in runs])
    else:
        made = torch.tensor(numbers, dtype=like.dtype, device=like.device)
    return made.view(-1, *(1,) * (like.dim() - 1))


def broadcast(x: Tensor, like: Tensor) -> Tensor:
    """A number per index, shaped to broadcast with numbers or vectors per index."""
    return x if x.dim() == like.dim() else x.unsqueeze(-1)
