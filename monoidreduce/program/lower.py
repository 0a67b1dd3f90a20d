"""The last passes of the compiler: which reductions run together, and what is hoisted out of them.

A reduction whose fields live on pairs belongs to a pass; its level is one more than the deepest pass that its fields
use, so there are as few passes as the dependencies allow. Every maximal one-sided subexpression (``F.normalize(x)``,
``⟨g, P⟩``) is *fed* to the pass, computed once by plain torch. Three are left to the engine, and what they are made of
is fed: a vector that is fed anyway (and is no table), or is stored in a small type, times a number, so that no second
vector is read; ``decay``, which a kernel joins with an exponential; and arithmetic on indices, of which engines know
the range on every tile. A :class:`Fold` is what an engine runs: reductions over numbered leaves, independent of the
layer it came from, and equal folds are the same object.
"""

from __future__ import annotations

import functools
import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..reductions import kind_of, outputs_of
from . import constructors
from .constructors import interval, substitute
from .expression import Expr, const, letters, node, reduce_node, result, topological
from .normal_form import is_pass
from .philox import DRAWS
from .primitives import PRIMITIVES
from .several import OF_VECTORS

_BUILTIN = ("const", "nan", "size", "row_index", "col_index")  # engines make these themselves


@dataclass(frozen=True)
class Fold:
    """Reductions over leaves, run in one pass over the pairs."""

    leaves: tuple[Expr, ...]
    reductions: tuple[Expr, ...]
    # A number that each reduction's result is multiplied by at the end (of a softmax: its mean); none, or all
    scales: tuple[Expr, ...] = ()
    raised: bool = False  # return vectors in the accumulator's type, since they are used in further arithmetic
    exact: bool = False  # never round products to 16 bits, here or in the gradient, even where they are stored
    # Sums that are gradients and nothing else, each with its leaf. An engine may return them summed over the batch
    # dimensions in which the leaf has size 1, and lays them out in memory as the leaf is.
    gradients: tuple[tuple[Expr, Expr], ...] = ()

    @functools.cached_property
    def scaled(self) -> tuple[tuple[Expr, Expr], ...]:
        """Every reduction with its scale."""
        return tuple(zip(self.reductions, self.scales or (constructors.ONE,) * len(self.reductions), strict=True))

    @functools.cached_property
    def pure(self) -> tuple[Expr, ...]:
        """The reductions with their scales moved inside: the form that is differentiated."""
        return tuple(
            r
            if s is constructors.ONE
            else constructors.rebuild(r, (*r.args[:-1], constructors.apply("mul", r.args[-1], s)))
            for r, s in self.scaled
        )

    @functools.cached_property
    def letters(self) -> tuple[str, ...]:
        """The letters (or fixed sizes) of the features of its leaves, tables aside, each once."""
        features = [str(e.feature) for e in self.leaves if e.feature is not None and e not in self.tables]
        return tuple(dict.fromkeys(name for f in features for name in (f, *letters(f))))

    @functools.cached_property
    def tables(self) -> frozenset[Expr]:
        """The leaves that are looked up, entry by entry: however many they have, no pair holds more than one."""
        found = [e.args[0] for e in topological(self.reductions) if e.op == "lookup"]
        return frozenset(found + [r.args[2] for r in self.reductions if r.attrs[0] == "histogram"])

    @functools.cached_property
    def packed(self) -> frozenset[Expr]:
        """The leaves that are packed vectors, and their scales."""
        found = [e for e in self.leaves if e.packing is not None]
        return frozenset([*found, *(a for e in found for a in e.args)])

    @functools.cached_property
    def domain(self) -> Expr | None:
        """The node that says which pairs are listed (``domains/``); None: all pairs are folded."""
        return constructors.find_listed(self.reductions)

    @functools.cached_property
    def outputs(self) -> tuple[tuple[Expr, int], ...]:
        """(reduction, k) for every result, in order."""
        counts = [len(outputs_of(r)) for r in self.reductions]
        return tuple((r, k) for r, count in zip(self.reductions, counts, strict=True) for k in range(count))

    @functools.cached_property
    def compares_results(self) -> bool:
        """True where a computed number of a pair is compared for equality with one of its row or column: a result of
        the forward then says which pairs it came from, and engines must compute these to the last bit as it did."""
        return any(a.args for a in constructors.find_compared(self.reductions))

    @functools.cached_property
    def gradient_of(self) -> Mapping[Expr, Expr]:
        """By reduction, the leaf that it is the gradient of."""
        return dict(self.gradients)


@dataclass(frozen=True)
class Pass:
    """A fold, the expressions fed to its leaves, and the program's nodes that its outputs are."""

    fold: Fold
    feeds: tuple[Expr, ...]
    results: tuple[tuple[Expr, ...], ...]


@dataclass(frozen=True)
class Lowered:
    """What runs: passes in order, then the outputs (plain torch on inputs and results)."""

    passes: tuple[Pass, ...]
    outputs: tuple[Expr, ...]

    @functools.cached_property
    def exact(self) -> bool:
        """True where some pass must not round its products to 16 bits."""
        return any(p.fold.exact for p in self.passes)

    @functools.cached_property
    def is_listed(self) -> bool:
        """True where some pass folds listed pairs."""
        return any(p.fold.domain is not None for p in self.passes)

    def with_exactness(self, exact: bool) -> Lowered:
        """The same program; with ``exact`` no pass rounds its products to 16 bits."""
        passes = (replace(p, fold=replace(p.fold, exact=True)) for p in self.passes)
        return replace(self, passes=tuple(passes)) if exact else self


@functools.lru_cache(maxsize=1024)
def looks_up(outputs: tuple[Expr, ...]) -> bool:
    """Whether a program looks up tables by integers."""
    return any(e.op == "lookup" for e in topological(outputs))


@functools.lru_cache(maxsize=4096)
def name_gradients(program: Lowered, leaves: tuple[Expr | None, ...]) -> Lowered:
    """The same program; its folds are told which of their sums are gradients, and of which leaf.

    ``leaves``: per output, the input that it is the gradient of. Only what is an output and nothing else is named."""
    passes = tuple(
        replace(p, fold=replace(p.fold, gradients=_find_gradients(p, program, leaves))) for p in program.passes
    )
    return replace(program, passes=passes)


def _find_gradients(p: Pass, program: Lowered, leaves: Sequence[Expr | None]) -> tuple[tuple[Expr, Expr], ...]:
    used = {e for q in program.passes for e in topological(q.feeds)}
    used |= {a for e in topological(program.outputs) for a in e.args}
    found = []
    for (r, k), nodes in zip(p.fold.outputs, p.results, strict=True):
        places = [n for n, e in enumerate(program.outputs) if e in nodes]
        leaf = leaves[places[0]] if len(places) == 1 else None
        if (
            leaf is None
            or leaf not in p.feeds
            or k
            or r.attrs[0] not in ("sum", "histogram")
            or not used.isdisjoint(nodes)
        ):
            continue
        e = program.outputs[places[0]]
        if (e.rows, e.cols, e.feature) == (leaf.rows, leaf.cols, leaf.feature):
            found.append((r, p.fold.leaves[p.feeds.index(leaf)]))
    return tuple(found)


def merge_softmax(outputs: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Compiler pass: join all ``soft`` reductions of one logit, so that its exponentials are computed once."""
    levels = _pass_levels(outputs)
    for level in range(1, max(levels.values(), default=0) + 1):
        outputs = constructors.substitute(outputs, _merge_soft(outputs, levels, level))
        levels = _pass_levels(outputs)
    return outputs


def group_reductions(outputs: tuple[Expr, ...]) -> tuple[tuple[Expr, ...], ...]:
    """Compiler pass: the reductions over pairs that run together, one group for each level, lowest first.

    Gathers of several pairs a row (top-k gradients, numbers at given indices) are a group of their own: they compute no
    tiles, and beside them engines would not know the folds that they have special code for."""
    levels = _pass_levels(outputs)
    groups: list[tuple[list[Expr], list[Expr]]] = [([], []) for _ in range(max(levels.values(), default=0))]
    for e in topological(outputs):
        if is_pass(e):
            groups[levels[e] - 1][kind_of(e).gathers and e.args[0].feature is not None].append(e)
    return tuple(tuple(group) for level in groups for group in level if group)


def hoist_one_sided(outputs: tuple[Expr, ...], groups: tuple[tuple[Expr, ...], ...]) -> Lowered:
    """Compiler pass: make a fold of each group; what is not per pair leaves it and is fed to it."""
    levels, order = _pass_levels(outputs), topological(outputs)
    passes = [_make_pass(list(group), order, _find_scales(list(group), outputs, levels)) for group in groups]
    return Lowered(tuple(passes), outputs)


def _pass_levels(outputs: tuple[Expr, ...]) -> dict[Expr, int]:
    levels: dict[Expr, int] = {}
    for e in topological(outputs):
        levels[e] = max((levels[a] for a in e.args), default=0) + is_pass(e)
    return levels


def _merge_soft(outputs: tuple[Expr, ...], levels: dict[Expr, int], level: int) -> dict[Expr, Expr]:
    """One ``soft`` for all softmax means and logsumexps of one logit: the exponentials are computed once."""
    groups: dict[tuple[Expr, str], list[Expr]] = {}
    order = topological(outputs)
    for e in order:
        if is_pass(e) and e.attrs[0] == "soft" and levels[e] == level:
            groups.setdefault((e.args[0], e.attrs[1]), []).append(e)
    replace: dict[Expr, Expr] = {}
    for (logit, over), members in groups.items():
        if len(members) == 1:
            continue
        values = tuple(dict.fromkeys(v for m in members for v in m.args[1:]))
        whole = reduce_node("soft", over, (), (logit, *values))
        for e in order:
            if e.op == "result" and e.args[0] in members:
                k, own = e.attrs[0], len(e.args[0].args) - 1
                place = 0 if k == 0 else 1 + values.index(e.args[0].args[k]) if k <= own else len(values) + k - own
                replace[e] = result(whole, place, e.feature, e.dtype)
    return replace


def _is_fed(e: Expr) -> bool:
    """True for what is computed before a pass: one-sided values, and arguments given per pair."""
    return not e.is_pair or e.op in ("input", "leaf")


def scaled_result(reduction: Expr) -> int:
    """Which result of a reduction its scale multiplies: the sum, or a softmax's mean."""
    return 1 if reduction.attrs[0] == "soft" else 0


def _find_scales(
    reductions: list[Expr], outputs: tuple[Expr, ...], levels: dict[Expr, int]
) -> dict[Expr, tuple[Expr, Expr]]:
    """Sums of vectors whose only use is to be multiplied by a number known before the pass: (that product, the number).
    Softmax means of stored vectors too, whose one scale is such a number.

    A kernel multiplies before it writes; a vector written, read, multiplied and written again costs twice the memory
    traffic of the fold's own results.
    """
    users: dict[Expr, list[Expr]] = {}
    for e in topological(outputs):
        for a in e.args:
            users.setdefault(a, []).append(e)
    found: dict[Expr, tuple[Expr, Expr]] = {}
    for r in reductions:
        results = [e for e in users.get(r, []) if e.attrs[0] == scaled_result(r)]
        mean = r.attrs[0] == "soft" and len(r.args) == 2 and r.args[1].is_stored
        if r.attrs[0] != "sum" and not mean:
            continue
        if len(results) != 1 or results[0].feature is None or results[0].dtype != "float":
            continue
        at, scale = results[0], constructors.ONE
        while at not in outputs and len(above := users.get(at, [])) == 1 and above[0].op == "mul":
            other = above[0].args[above[0].args[0] is at]
            if other.feature is not None or levels[other] >= levels[r] or (other.cols if r.rows else other.rows):
                break
            if mean and (other.rows or other.cols):
                break
            at, scale = above[0], constructors.apply("mul", scale, other)
        if scale is not constructors.ONE:
            found[r] = at, scale
    return found


def _make_pass(reductions: list[Expr], order: list[Expr], scales: dict[Expr, tuple[Expr, Expr]]) -> Pass:
    # A gather reads whatever place its target names, so a target that is arithmetic on an index is computed before the
    # pass and fed as a label: engines only know targets that are a plain index or a leaf.
    targets = [r.args[0] for r in reductions if kind_of(r).gathers]
    arithmetic = _index_arithmetic(targets)
    computed = {r: r.args[0] for r in reductions if kind_of(r).gathers and r.args[0] in arithmetic}
    fields = [a for r in reductions for a in (r.args[1:] if r in computed else r.args)]
    factors = [scales[r][1] if r in scales else constructors.ONE for r in reductions]
    tables = {e.args[0] for e in topological(fields, stop=_is_fed) if e.op == "lookup"}
    tables |= {r.args[2] for r in reductions if r.attrs[0] == "histogram"}
    listed = constructors.find_listed(fields)
    feeds, derived = _find_feeds(fields, tables, listed is not None and listed.attrs[0][0] == "pages")
    feeds = list(dict.fromkeys([*feeds, *computed.values(), *(f for f in factors if f.op not in _BUILTIN)]))
    leaves: dict[Expr, Expr] = {}
    for k, e in enumerate(feeds):  # the scales of packed vectors come before these
        args, form = (tuple(leaves[a] for a in e.args), e.attrs[1:]) if e.is_stored else ((), ())
        leaves[e] = node("leaf", args, (f"x{k}", *form), rows=e.rows, cols=e.cols, feature=e.feature, dtype=e.dtype)
    scaled = tuple(leaves.get(f, f) for f in factors)
    made = dict(leaves)
    for e in derived:
        made[e] = constructors.rebuild(e, tuple(made.get(a, a) for a in e.args))
    new = constructors.substitute(tuple(fields), made)
    renamed, at = [], 0
    for r in reductions:
        count = len(r.args) - (r in computed)
        target = (leaves[computed[r]],) if r in computed else ()
        renamed.append(constructors.rebuild(r, (*target, *new[at : at + count])))
        at += count
    users: dict[tuple[Expr, int], list[Expr]] = {}
    for e in order:
        if e.op == "result":
            users.setdefault((e.args[0], e.attrs[0]), []).append(e)
    for r, (product, _) in scales.items():
        users[r, scaled_result(r)] = [product]
    fold = Fold(tuple(leaves[e] for e in feeds), tuple(renamed), scaled if scales else ())
    results = tuple(tuple(users.get((r, k), ())) for r in reductions for k in range(len(outputs_of(r))))
    return Pass(fold, tuple(feeds), results)


def _find_feeds(fields: list[Expr], tables: set[Expr], paged: bool) -> tuple[list[Expr], list[Expr]]:
    """The maximal one-sided expressions under ``fields``; and those that engines make from others, which are fed.
    ``tables``: what is looked up, which is fed as it is. ``paged``: columns lie in pages. Their numbers times a factor
    (scales of stored keys) are made where they are read, since a store holds more columns than a call reads."""
    found = [e for e in topological(fields, stop=_is_fed) if _is_fed(e)]
    whole = set(found)
    feeds: dict[Expr, None] = {}
    derived: set[Expr] = set()
    stack = found[::-1]
    indices = _index_arithmetic(found)
    while stack:
        e = stack.pop()
        scaled = e.op == "mul" and e.dtype == "float" and e not in tables
        again = scaled and any(a.feature is not None and a in whole for a in e.args)
        stored = constructors.split_scale(e)[1].is_stored and not e.is_stored
        again |= paged and scaled and e.cols and e.feature is None and any(not (a.rows or a.cols) for a in e.args)
        if e.op == "decay" or (again and any(a.feature is None for a in e.args)) or stored or e in indices:
            derived.add(e)
            stack += e.args[::-1]
        elif e.op not in _BUILTIN:
            feeds |= dict.fromkeys([*(e.args if e.is_stored else ()), e])
    return list(feeds), [e for e in topological(found) if e in derived]


def _index_arithmetic(roots: list[Expr]) -> set[Expr]:
    """The nodes under ``roots`` that are arithmetic on one index and numbers: ``row_index - window``."""
    known: set[Expr] = set()
    for e in topological(roots, stop=lambda n: not n.rows and not n.cols):
        own = e.op in _BUILTIN or (e.op in PRIMITIVES and e.op not in DRAWS)
        if not (e.rows or e.cols) or (own and known.issuperset(e.args)):
            known.add(e)
    return {e for e in known if e.args and e.feature is None and (e.rows or e.cols)}


# Names of folds, equal for equal folds, in every process and on every machine

_PROCESS = uuid.uuid4().hex  # part of the names of folds over a user's own classes, whose text is not their meaning
_LOCAL = "own-"


@functools.lru_cache(maxsize=4096)
def digest_fold(fold: Fold) -> str:
    """A name for a fold, equal for equal folds: the hash of its nodes, written out one by one."""
    return digest_nodes((fold.leaves, fold.reductions, fold.scales))


@functools.lru_cache(maxsize=4096)
def digest_program(program: Lowered) -> str:
    """A name for a lowered program, equal for equal ones: the hash of its passes and of the nodes around them."""
    passes = [(*p.feeds, *(e for users in p.results for e in users)) for p in program.passes]
    folds = [f"{digest_fold(p.fold)} {p.fold.raised} {p.fold.exact}" for p in program.passes]
    return digest_nodes((*passes, program.outputs), *folds)


def digest_nodes(parts: Sequence[tuple[Expr, ...]], *others: str) -> str:
    """The hash of groups of nodes, written out one by one, and of other text."""
    order = topological([e for part in parts for e in part])
    number = {e: k for k, e in enumerate(order)}
    lines = [_format_node(e, number) for e in order]
    lines += [str([number[e] for e in part]) for part in parts]
    text = "\n".join([*lines, *others])
    found = hashlib.sha256(text.encode()).hexdigest()[:24]
    return _LOCAL + found if _PROCESS in text or any(one.startswith(_LOCAL) for one in others) else found


def is_digest_portable(name: str) -> bool:
    """True where a digest means the same fold in every process: no class of the user's is part of it."""
    return not name.startswith(_LOCAL)


def _format_node(e: Expr, number: dict[Expr, int]) -> str:
    return f"{e.op} {[number[a] for a in e.args]} {_format_attribute(e.attrs)} {e.rows} {e.cols} {e.feature} {e.dtype}"


def _format_attribute(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_format_attribute, value))})"
    plain = value is None or isinstance(value, (bool, int, float, str))
    return repr(value) if plain else f"{value!r} {id(value)} {_PROCESS}"


# The conditions of a fold that are decided tile by tile, from the ranges of its indices and numbers there.


def conditions(fold: Fold) -> tuple[Expr, ...]:
    """The conditions worth deciding per tile: those of ``where`` and those that are summed."""
    deciding = [r for r in fold.reductions if not kind_of(r).gathers and not kind_of(r).writes_all(r.attrs[2])]
    fields = [a for r in deciding for a in r.args]
    under = topological(fields)
    found = [e.args[0] for e in under if e.op == "where"] + [f for f in fields if f.dtype == "bool"]
    number = [c for c in found if c.feature is None and (c.rows or c.cols)]
    open_ones = _find_undecidable(number)
    return tuple(c for c in dict.fromkeys(number) if c not in open_ones)


def is_idle(r: Expr, replace: dict[Expr, Expr]) -> bool:
    """Whether a reduction sees only its identity where conditions are replaced so."""
    return kind_of(r).idle(r.attrs[2], [interval(f, {}) for f in substitute(r.args, replace)])


@functools.lru_cache(maxsize=4096)
def find_same_sequence(reductions: tuple[Expr, ...]) -> Expr | None:
    """A condition ``number of the row == number of the column`` outside of which every reduction sees its identity."""
    for e in topological([a for r in reductions for a in r.args]):
        if e.op != "eq" or any(a.op != "leaf" or a.dtype != "int" or a.feature is not None for a in e.args):
            continue
        row, col = e.args
        if (row.rows, row.cols, col.rows, col.cols) != (True, False, False, True):
            continue
        if all(is_idle(r, {e: const(False)}) for r in reductions):
            return e
    return None


def _find_undecidable(roots: list[Expr]) -> set[Expr]:
    """The nodes under ``roots`` of which a tile's index and number ranges can say nothing."""
    found: set[Expr] = set()
    for e in topological(roots):
        if e.op in (*OF_VECTORS, "lookup", *DRAWS) or not found.isdisjoint(e.args):
            found.add(e)
    return found


def ranged(fold: Fold) -> tuple[Expr, ...]:
    """The leaves whose least and greatest value per tile the conditions need."""
    return tuple(e for e in topological(conditions(fold)) if e.op == "leaf")
