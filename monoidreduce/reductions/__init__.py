"""Kinds of reduction, one file each: all that programs, the planner, every engine, ranks and streams know of a kind.

Everything that a body reduces becomes one of these kinds plus arithmetic on its results (``program/vocabulary.py`` has
what users call). ``base.py`` lists the questions that are asked of a kind, and which few answers suffice. A new kind is
a file with a subclass of :class:`Reduction`, and a row in ``_ROWS``.

May import ``errors``, ``algebra`` and the symbols of ``program`` (expressions, constructors, contractions), which know
nothing of kinds; passes over programs (normal form, gradient, lowering) stand above this package. Engines are never
imported: what a kind uses of one is handed in.
"""

from __future__ import annotations

from .base import KINDS, FastForm, Outputs, Reduction, State, all_have, kind_of, make, outputs_of
from .best import Best
from .histogram import Histogram
from .moments import Moments
from .pair import Pair
from .pick import Pick, Picks
from .softmax import Softmax
from .sum import Sum
from .topk import NextBest, Panel, TopK
from .user import User

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
KINDS.update({kind.name: kind for kind in _ROWS})

__all__ = ["KINDS", "FastForm", "Outputs", "Reduction", "State", "all_have", "kind_of", "make", "outputs_of"]
