"""Lookups in a kernel's text: an entry of a table for every pair.

They are loads through the L1 cache: the entries of neighbours are neighbours, or the same. Only the plain compiler's
writers have them; templates and panels, whose arguments are other ones, have no kernel for layers with tables.
"""

from __future__ import annotations

from typing import Any

from ....program.expression import Expr
from .exponents import literal
from .kernel_spec import Unsupported


def write_lookup(v: Any, table: Expr, index: Expr) -> str:
    """The text of a lookup; NaN, or 0 of integers, outside of the table. ``v``: the kernel's writer."""
    if type(v).__name__ not in ("ExpressionWriter", "ListedWriter"):
        raise Unsupported("a table is looked up")
    name, at = table.attrs[0], v.number(index)
    outside = literal(float("nan") if table.dtype == "float" else 0)
    text = f"tl.load({v.base(table)} + {at} * {name}_f, mask=({at} >= 0) & ({at} < {name}_n), other={outside})"
    return v._loaded(text, table, v.spec.type_of[table])
