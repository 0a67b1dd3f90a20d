"""Expressions of many operations: some of their values are bound by name before the rest asks for them.

The text of a value asks for the texts of its arguments (``expressions.py``), which is recursive. Expressions of usual depth
are left alone. In a deeper one the nodes are divided into layers of ``LAYER`` levels, and every value that another
layer reads is bound first, from the bottom up: so no call is nested deeper than a layer has levels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ....program.expression import Expr, topological
from ....program.primitives import PRIMITIVES

if TYPE_CHECKING:
    from .expressions import Values

LAYER = 64


def bind_numbers(v: Values, e: Expr) -> None:
    """Bind the numbers under a deep number that other layers read."""
    if e.depth > LAYER and "" not in v.layered:
        v.layered.add("")
        for n in _read_across(e, lambda n: n in v.outer or n in v.inner):
            if n.feature is None:
                v.number(n)
        v.layered.remove("")


def bind_components(v: Values, e: Expr, f: str) -> None:
    """Bind feature ``f`` of the vectors under a deep vector that other layers read."""
    if e.depth > LAYER and f not in v.layered:
        v.layered.add(f)
        for n in _read_across(e, lambda n: n.feature is None or (n, f) in v.outer or (n, f) in v.inner):
            v.component(n, f)
        v.layered.remove(f)


def _read_across(e: Expr, is_bound: Callable[[Expr], bool]) -> list[Expr]:
    """The elementwise nodes under ``e`` that are read from a higher layer and are not bound, arguments first."""
    order = topological([e], stop=is_bound)
    read = {a for n in order if not is_bound(n) for a in n.args if a.depth // LAYER < n.depth // LAYER}
    return [n for n in order if n in read and n.op in PRIMITIVES and not is_bound(n)]
