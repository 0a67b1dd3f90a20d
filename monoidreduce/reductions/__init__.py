"""Kinds of reduction, one file each: all that programs, the planner, every engine, ranks and streams know of a kind.

Everything that a body reduces becomes one of these kinds plus arithmetic on its results (``program/vocabulary.py`` has
what users call). ``base.py`` lists the questions that are asked of a kind, and which few answers suffice. A new kind is
a file with a subclass of :class:`Reduction`, and a row in ``_ROWS``.

May import ``errors``, ``algebra`` and the symbols of ``program`` (expressions, constructors, contractions), which know
nothing of kinds; passes over programs (normal form, gradient, lowering) stand above this package. Engines are never
imported: what a kind uses of one is handed in.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..program.expression import Expr, reduce_node, result
from .base import FastForm, Outputs, Reduction, State
from .best import Best
from .histogram import Histogram
from .moments import Moments
from .pair import Pair
from .pick import Pick, Picks
from .softmax import Softmax
from .sum import Sum
from .topk import NextBest, Panel, TopK
from .user import User, compares_results

_ROWS = (
    Softmax(),
    Best(),
    Sum(),
    Pick(),
    Picks(),
    TopK(),
    NextBest(),
    Moments(),
    User(),
    Pair(),
    Panel(),
    Histogram(),
)
KINDS: dict[str, Reduction] = {kind.name: kind for kind in _ROWS}


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


__all__ = [
    "KINDS",
    "FastForm",
    "Outputs",
    "Reduction",
    "State",
    "all_have",
    "compares_results",
    "kind_of",
    "make",
    "outputs_of",
]
