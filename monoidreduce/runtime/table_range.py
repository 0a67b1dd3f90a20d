"""Indices of tables, checked before any work: an index out of range at a pair that counts is an error.

Interval arithmetic proves most indices right from the sizes of a call, the numbers given and, on a CPU, the least and
greatest value of integer tensors. Where it cannot, the pairs out of range are counted, by a program of the same
language. What depends on sizes and numbers is counted once for each of them. What depends on tensors is counted in
every call on a CPU; on a GPU, where that would wait for the device, under ``mr.use(check=True)``. Over ranks and in
streams, where no process sees all of them, it is not: there an entry that does not exist is NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..engines.common.bounded_cache import BoundedCache
from ..engines.common.evaluate import Sizes
from ..engines.common.skip_small_tiles import pause_counting
from ..engines.common.torch_code import inputs
from ..errors import TableError
from ..plan import settings
from ..program.constructors import apply, interval
from ..program.expression import Expr, const, index, size, topological
from ..program.intervals import Interval
from ..program.lower import compile_program
from ..reductions import make
from .autograd import make_stepwise_runner
from .dispatch import is_untraced

_MOST_PASSED = 256  # numbers of one kind of call whose indices are known to be in range


def make_range_check(outputs: tuple[Expr, ...], sizes: Sizes) -> Callable[[Mapping[str, Any]], None] | None:
    """What must be called with the inputs before a program runs; None where there is nothing to look at.

    Raises TableError at once where sizes alone show an index out of range."""
    counts = count_out_of_range(outputs)
    if not counts or not is_untraced() or not _has_pairs(sizes):
        return None
    pending = [c for c in counts if not _is_inside(c[0], sizes, {})]
    plain = [c for c in pending if not _name_inputs(c)]
    for c in plain:
        _refuse_out_of_range(c, replace(sizes, batch=()), {})
    rest = [c for c in pending if c not in plain]
    return _RangeCheck(rest, sizes) if rest else None


def check_part(outputs: tuple[Expr, ...], sizes: Sizes, values: Mapping[str, Any]) -> None:
    """The same of a call over ranks, of which each sees all indices and numbers, but only its own part of tensors."""
    whole = replace(sizes, rows=sizes.of("rows"), cols=sizes.of("cols"), shard=None)
    found = make_range_check(outputs, whole)
    if found is not None:
        found({n: v for n, v in values.items() if not isinstance(v, Tensor)})


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
        if e.op == "lookup" and not _is_clamped(e):
            found.append((e, _count_pairs(apply("logical_and", own, _is_outside(e)))))
        for k, a in enumerate(e.args):
            mine = own
            if e.op == "where" and k and e.args[0].feature is None:
                condition = e.args[0] if k == 1 else apply("logical_not", e.args[0])
                mine = apply("logical_and", own, condition)
            live[a] = apply("logical_or", live[a], mine) if a in live else mine
    return tuple(found)


def _is_clamped(e: Expr) -> bool:
    """True for a lookup whose index ``clamp=True`` keeps inside."""
    table, at = e.args
    least = apply("sub", size(str(table.feature)), 1)
    return at.op == "minimum" and at.args[1] is least and at.args[0].op == "maximum" and at.args[0].args[1].const == 0


def _is_outside(e: Expr) -> Expr:
    table, at = e.args
    return apply("logical_or", apply("lt", at, 0), apply("ge", at, size(str(table.feature))))


def _count_pairs(condition: Expr) -> Expr:
    """How often a condition holds: a program of one number."""
    total = apply("cast", condition, to="int")
    for axis, varies in (("cols", condition.cols), ("rows", condition.rows)):
        if varies:
            (total,) = make("sum", axis, (), (total,))
    return apply("cast", total, to="int")


class _RangeCheck:
    """The lookups of one plan whose indices depend on inputs."""

    def __init__(self, counts: list[tuple[Expr, Expr]], sizes: Sizes):
        self.counts, self.sizes = counts, sizes
        self.names = [_name_inputs(c) for c in counts]
        self.passed: BoundedCache[tuple, bool] = BoundedCache(_MOST_PASSED)

    def __call__(self, values: Mapping[str, Any]) -> None:
        if not is_untraced():
            return
        for number, (c, names) in enumerate(zip(self.counts, self.names, strict=True)):
            if any(n not in values for n in names):
                continue
            given = {n: values[n] for n in names}
            tensors = any(isinstance(v, Tensor) for v in given.values())
            if tensors and self.sizes.device.type != "cpu" and not settings.now().check:
                continue
            key = (number, *((n, type(v), v) for n, v in given.items())) if not tensors else None
            if key is not None and self.passed.find(key, False):
                continue
            if not _is_inside(c[0], self.sizes, given):
                _refuse_out_of_range(c, self.sizes, given)
            if key is not None:
                self.passed.keep(key, True)


def _has_pairs(sizes: Sizes) -> bool:
    return all(type(n) is int and n > 0 for n in (sizes.rows, sizes.cols, *sizes.batch))


def _name_inputs(count: tuple[Expr, Expr]) -> list[str]:
    return [e.attrs[0] for e in topological([count[1]]) if e.op == "input"]


def _is_inside(lookup: Expr, sizes: Sizes, given: Mapping[str, Any]) -> bool:
    """Whether an index is in range for all indices and values between the ends of those that are there."""
    memo: dict[Expr, Interval] = {index("row"): (0, sizes.rows - 1), index("col"): (0, sizes.cols - 1)}
    memo |= {size(axis): (sizes.of(axis),) * 2 for axis in ("rows", "cols", *sizes.letters)}
    table, at = lookup.args
    for e in topological([at]):
        value = given.get(e.attrs[0]) if e.op == "input" else None
        if e.dtype == "int" and isinstance(value, int):
            memo[e] = (value, value)
        elif e.dtype == "int" and isinstance(value, Tensor) and value.numel() and value.device.type == "cpu":
            ends = torch.aminmax(value)
            memo[e] = (int(ends.min), int(ends.max))
    low, high = interval(at, memo)
    return low >= 0 and high < sizes.of(str(table.feature))


def _refuse_out_of_range(count: tuple[Expr, Expr], sizes: Sizes, given: Mapping[str, Any]) -> None:
    """Count the pairs that read beyond a table; raises TableError if there are any."""
    lookup, total = count
    program = compile_program((total,))
    names = inputs(program)
    numbers = frozenset(n for n in names if not isinstance(given[n], Tensor))
    with torch.no_grad(), pause_counting():
        walk = make_stepwise_runner("eager", program, numbers, False)
        (found,) = walk(sizes, *(given[n] for n in names))
    wrong = int(found.sum()) if isinstance(found, Tensor) else int(found)
    if wrong:
        raise TableError(
            detail=f"an index of mr.lookup is out of range at {wrong} {_place(lookup)}{'s' * (wrong > 1)}: the table "
            f'"{lookup.args[0].feature}" has {sizes.of(str(lookup.args[0].feature))} entries, and the index is '
            f"{lookup.args[1]!r}",
            table=lookup.args[0].feature,
        )


def _place(lookup: Expr) -> str:
    return "pair" if lookup.is_pair else "row" if lookup.rows else "column" if lookup.cols else "batch element"


def check_before(run: Callable[..., Sequence[Any]], look: Callable[..., None], names: tuple[str, ...]) -> Callable:
    """``run`` after a look at its inputs, which have these names."""

    def call(*given: Any) -> Sequence[Any]:
        look(dict(zip(names, given, strict=True)))
        return run(*given)

    return call
