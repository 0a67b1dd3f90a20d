"""Tables that pairs look up by an integer: ``lookup``, and when its index is out of range.

A lookup is a node ``lookup(table, index)``: a number per pair (or per row, or per column), whose table is a vector of
no axis. Its gradient is a ``histogram`` over all pairs, and the gradient of a histogram is a lookup again.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..errors import ArgumentError, TraceError, shown
from ..reductions import make
from . import constructors
from .constructors import apply
from .expression import Expr, are_several, const, size, topological
from .symbol import Symbol, check_call, current_trace, expr_of


@check_call
def lookup(table: Any, index: Any, *, clamp: bool = False) -> torch.Tensor:
    """``table[index]``: an entry of a :class:`~monoidreduce.Table`, by any integer of the pair.

    The index may be made of row and column indices, of sizes, and of integer arguments per row, column, pair or batch
    element. An index below 0 or beyond the table at a pair that counts (one that no ``torch.where`` leaves out) is an
    :class:`~monoidreduce.TableError`; with ``clamp=True`` it reads the nearest entry. An index that depends on tensors
    is checked on a CPU, and on a GPU under ``mr.use(check=True)``, since there the check waits for the device; without
    it, over ranks and in streams, an entry that does not exist is NaN.

    The gradient of the table is summed in a fixed order, without atomics, and along diagonals where the index is a
    function of ``mr.row_index - mr.col_index``.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def attention(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"], bias: mr.Table["n"]):
    ...     return mr.softmax_mean(q @ k + mr.lookup(bias, mr.row_index - mr.col_index + mr.num_cols - 1), v)
    >>> q, k, v = torch.randn(3, 8, 5, 4).unbind()  # 8 heads of 5 tokens
    >>> bias = torch.zeros(8, 9, requires_grad=True)
    >>> attention(q, k, v, bias).sum().backward()
    >>> bias.grad.shape
    torch.Size([8, 9])
    """
    if current_trace.get() is None:
        raise TraceError(
            detail="mr.lookup was called outside the body of an op",
            fix="Decorate the function that calls it with @mr.op; elsewhere write table[..., index]",
        )
    entries, at = expr_of(table), expr_of(index)
    if entries.feature is None or entries.rows or entries.cols or are_several(entries):
        raise ArgumentError(
            detail=f"mr.lookup was given {shown(table)} as a table",
            fix="Give a parameter declared mr.Table[\"n\"]; read a row's or column's number with torch.where, as "
            "mr.sum(torch.where(mr.col_index == i, value, 0.0))",
        )
    if at.dtype != "int" or at.feature is not None:
        raise ArgumentError(
            detail=f"mr.lookup was given {shown(index)} as an index",
            fix="Give one integer per pair, row or column: x.to(torch.int64), or a // b for a quotient",
        )
    if clamp:
        at = apply("minimum", apply("maximum", at, 0), apply("sub", size(str(entries.feature)), 1))
    return Symbol(constructors.look_up(entries, at))  # type: ignore[return-value]  # in a body, a tensor


# Out of range -------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def count_out_of_range(outputs: tuple[Expr, ...]) -> tuple[tuple[Expr, Expr], ...]:
    """The lookups of a program, each with how many of its indices are out of range where they count: one number.

    An index counts unless a ``torch.where`` on every way from the lookup to a result takes its other branch."""
    live: dict[Expr, Expr] = {e: const(True) for e in outputs}
    found: list[tuple[Expr, Expr]] = []
    for e in reversed(topological(outputs)):
        own = live.get(e, const(False))
        if e.op == "reduce":
            own = const(True)
        if e.op == "lookup" and not is_clamped(e):
            found.append((e, _count(apply("logical_and", own, _is_outside(e)))))
        for k, a in enumerate(e.args):
            mine = own
            if e.op == "where" and k and e.args[0].feature is None:
                condition = e.args[0] if k == 1 else apply("logical_not", e.args[0])
                mine = apply("logical_and", own, condition)
            live[a] = apply("logical_or", live[a], mine) if a in live else mine
    return tuple(found)


def is_clamped(e: Expr) -> bool:
    """True for a lookup whose index ``clamp=True`` keeps inside."""
    table, at = e.args
    least = apply("sub", size(str(table.feature)), 1)
    return at.op == "minimum" and at.args[1] is least and at.args[0].op == "maximum" and at.args[0].args[1].const == 0


def _is_outside(e: Expr) -> Expr:
    table, at = e.args
    return apply("logical_or", apply("lt", at, 0), apply("ge", at, size(str(table.feature))))


def _count(condition: Expr) -> Expr:
    """How often a condition holds: a program of one number."""
    total = apply("cast", condition, to="int")
    for axis, varies in (("cols", condition.cols), ("rows", condition.rows)):
        if varies:
            (total,) = make("sum", axis, (), (total,))
    return constructors.apply("cast", total, to="int")
